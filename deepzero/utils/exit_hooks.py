"""What has to be finished before a program ends, also where Python's own shutdown does not run.

A rank that the launcher has started leaves by ``os._exit`` (:func:`deepzero.launch.rank_process.leave` says why), which
skips :mod:`atexit`. ``before_the_end(act)``, a decorator too, has ``act`` called once when the program has ended;
``finish()`` calls what was asked for, the last first.
"""

import atexit
import contextlib

from deepzero.utils.threads import start_thread

_AT_THE_END = contextlib.ExitStack()
before_the_end = _AT_THE_END.callback
finish = atexit.register(_AT_THE_END.close)


def finish_within(seconds: float) -> None:
    """:func:`finish` for a program that ends with an error, which alone is said: others wait, so not for long."""

    def attempt() -> None:
        with contextlib.suppress(Exception):
            finish()

    start_thread(attempt, "deepzero-ending").join(seconds)
