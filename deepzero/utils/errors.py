"""The errors that a user's settings and calls raise, from any folder."""


class ConfigError(ValueError, AssertionError):
    """A setting that cannot be used. The message says which key, which value, and what to write instead.

    DeepSpeed asserts what it asks of settings, so programs written for it catch an ``AssertionError``.
    """


class MisuseError(RuntimeError, AssertionError):
    """A call that this engine, or this moment, does not allow; an ``AssertionError`` for the same reason."""


class PartitionedUseError(RuntimeError):
    """The values of a parameter were used, or written, while they were partitioned."""
