"""What has to be finished before a program ends, also where Python's own shutdown does not run.

A rank that the launcher has started leaves by ``os._exit`` (:func:`deepzero.launch.rank_process.leave` says why), which
skips :mod:`atexit`. What is to be done is on the list that Python's ``multiprocessing`` keeps for processes that leave
like that; a forked child calls nothing of it.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from multiprocessing.util import Finalize, _run_finalizers  # type: ignore[attr-defined]

from deepzero.utils.threads import start_thread


def before_the_end(act: Callable[[], None]) -> Callable[[], None]:
    """Call ``act`` once when the program has ended: a decorator. The last one is called first."""
    Finalize(None, act, exitpriority=0)
    return act


@atexit.register
def finish() -> None:
    """Call what was asked for; nothing when it was called already. An error is printed, and keeps nothing else back."""
    _run_finalizers(0)


def finish_within(seconds: float) -> None:
    """The same for a program that ends with an error: others wait for its end, so not for long."""
    start_thread(finish, "deepzero-ending").join(seconds)
