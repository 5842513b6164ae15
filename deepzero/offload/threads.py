"""Threads of Python in which each torch operation runs on one core: for work that consists of many short operations.

Torch divides every operation among its own threads and waits for all of them at its end. A pass over memory in chunks
makes hundreds of such waits, and GNU's OpenMP waits by spinning: on a machine whose cores have other work too, the
thread that spins keeps the one that it waits for from its core, and a step of CPUAdam on 50 M elements took 2.7 s
instead of 0.12 s (two cores, load 5). Threads that take chunk after chunk from a common heap wait for each other once,
at the end, and a thread that lost its core leaves its share to the others. Torch's operations let go of Python's lock
while they run.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from deepzero.utils.threads import thread_pool

_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}
_making = threading.Lock()


def in_threads(count: int, act: Callable[[int], None]) -> None:
    """``act(0)``, … ``act(count - 1)``, each in a thread of its own whose torch operations use that thread only.

    Args:
        count: at least 1; 1 runs ``act(0)`` here.
        act: sees gradients switched off. What it raises is raised here, after all have ended.

    Example:
        >>> seen = set()
        >>> in_threads(2, lambda i: seen.add((i, torch.get_num_threads())))
        >>> sorted(seen)
        [(0, 1), (1, 1)]
    """
    if count == 1:
        with torch.no_grad():
            act(0)
        return

    def quietly(i: int) -> None:
        with torch.no_grad():  # a thread has its own gradient mode
            act(i)

    futures = [_pool(count).submit(quietly, i) for i in range(count)]
    errors = [error for error in (future.exception() for future in futures) if error is not None]
    if errors:
        raise errors[0]


def _pool(count: int) -> ThreadPoolExecutor:
    # A fork copies the executor, not its threads: the process is part of the name.
    key = os.getpid(), count
    pool = _pools.get(key)
    if pool is None:
        with _making:
            pool = _pools.get(key)
            if pool is None:
                pool = _pools[key] = _start(count)
    return pool


def _start(count: int) -> ThreadPoolExecutor:
    before = torch.get_num_threads()
    met = threading.Barrier(count)

    def begin() -> None:
        torch.get_num_threads()  # a new thread's first look sets it to the process's number, also after it has been set
        torch.set_num_threads(1)
        met.wait()

    pool = thread_pool(count, "deepzero-offload")
    for future in [pool.submit(begin) for _ in range(count)]:
        future.result()
    # A thread's number of threads is its own, but torch also gives the last one that was set to threads yet to come.
    torch.set_num_threads(before)
    return pool
