"""The error that a user's settings raise, from any folder."""


class ConfigError(ValueError):
    """A setting that cannot be used. The message says which key, which value, and what to write instead."""
