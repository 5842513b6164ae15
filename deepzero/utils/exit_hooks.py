"""What has to be finished before a program ends, also where Python's own shutdown does not run.

A rank that the launcher has started leaves by ``os._exit`` (:func:`deepzero.launch.rank_process.leave` says why), which
skips :mod:`atexit`.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable

from deepzero.utils.threads import start_thread

_FINISHERS: list[Callable[[], None]] = []


def before_the_end(act: Callable[[], None]) -> Callable[[], None]:
    """Call ``act`` once when the program has ended: a decorator."""
    _FINISHERS.append(act)
    return act


@atexit.register
def finish() -> None:
    """Call what was asked for; nothing when it was called already."""
    while _FINISHERS:
        _FINISHERS.pop()()


def finish_within(seconds: float) -> None:
    """The same for a program that ends with an error: others wait for its end, so not for long."""
    start_thread(finish, "deepzero-ending").join(seconds)
