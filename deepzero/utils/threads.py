"""Threads that work on the device of the thread that starts them. Every thread of deepzero is started here.

Nothing here imports torch: a process that has not imported it yet has no device to choose.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def start_thread(target: Callable[..., None], name: str, *args: Any, daemon: bool = True) -> threading.Thread:
    """A thread that runs ``target(*args)`` on this thread's device, started.

    Its name, ``deepzero-…``, says whose it is in ``py-spy``. A program that ends waits for one that is no ``daemon``.

    Example:
        >>> seen = []
        >>> start_thread(seen.append, "deepzero-example", 1).join()
        >>> seen
        [1]
    """
    choose = _choice()

    def run() -> None:
        choose()
        target(*args)

    thread = threading.Thread(target=run, name=name, daemon=daemon)
    thread.start()
    return thread


def thread_pool(count: int, name: str) -> ThreadPoolExecutor:
    """So many threads for ``submit``, on this thread's device."""
    return ThreadPoolExecutor(count, thread_name_prefix=name, initializer=_choice())


def _choice() -> Callable[[], None]:
    """What a new thread does first."""
    if "torch" not in sys.modules:
        return lambda: None
    from deepzero.device import accelerator

    return accelerator().thread_start()
