"""A logger in a thread of its own: the training loop neither waits for it nor fails with it.

Third-party code that writes to disks and networks can do anything: raise, hang, end the program. None of it is worth a
training run, whose numbers are in ``metrics.jsonl`` anyway. So the loop only puts what it has to say into a queue, and
a thread builds the logger, feeds it and closes it:

- **It raises** (``SystemExit`` counts): it is reported once and left out from then on.
- **It hangs, or falls behind**: the queue is bounded, and what finds no room is left out and counted.
- **It hangs at the end**: the run waits so long and no longer; so long for all loggers together (:func:`finish_all`).

The thread never prints. What there is to tell waits until the loop comes by: a bar on a terminal has one writer.
"""

from __future__ import annotations

import collections
import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from deepzero.utils.threads import start_thread

ROOM = 10_000  # entries that may wait, some 20 MB: a minute of a logger that stands still, of steps of 6 ms
START_SECONDS = 10.0
"""The loop begins when the loggers are there, so that their imports do not disturb its first steps, or after this."""
FINISH_SECONDS = 120.0  # at the end of a run, for everything that still has to be written or sent
STOP_SECONDS = 10.0
"""The same for a run that failed or was asked to stop: it has 20 seconds in all, a checkpoint included."""
PAUSE_SECONDS = 1.0
"""The thread takes what has come together in so long at once: woken at every step it costs several times as much."""

Tell = Callable[[str], None]
Kind = Literal["train", "validation"]


class Sink(Protocol):
    """Whatever wants to know about a run."""

    def write(self, kind: Kind, entry: Mapping[str, Any]) -> None:
        """An optimizer step, or a validation, is over."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The run is over, or leaves before its end: ``summary["status"]`` is then not ``finished``."""


class Background:
    """A sink behind a queue, for ``ROOM`` entries, and a thread.

    ``make`` builds the sink, in the thread; its failure counts too (not installed, no disk, no network). It is given a
    function for lines that the person at the terminal should read. ``tell`` is called by the loop's thread alone.
    """

    def __init__(self, name: str, make: Callable[[Tell], Sink], tell: Tell) -> None:
        self._name, self._tell = name, tell
        # Only the loop puts, so that it can count for itself; the end of the run, without a kind, always finds room.
        self._waiting: queue.Queue[tuple[Kind | None, Mapping[str, Any]]] = queue.Queue()
        self._limit, self._deadline = FINISH_SECONDS, math.inf
        """Seconds that :meth:`finish` waits; an instant of ``time.monotonic``, once the end is announced."""
        self._news: collections.deque[str] = collections.deque()
        self._failed, self._left_out = False, 0
        self._ready, self._hurry = threading.Event(), threading.Event()  # the sink is built, or has failed; no pauses
        self._thread = start_thread(self._work, f"deepzero-{name}", make)

    # ---- the loop's side ---------------------------------------------------------------------------------------------

    def start(self, seconds: float = START_SECONDS) -> None:
        """Wait until the sink is built or has failed, but not longer than so many seconds; tell what it has to say."""
        if not self._ready.wait(seconds):
            late = f"not ready after {seconds:g} s; the run begins, and what it missed follows"
            self._news.append(f"{self._name}: {late}")
        self._deliver()

    def write(self, kind: Kind, entry: Mapping[str, Any]) -> None:
        """Pass on, unless the sink has failed. ``entry`` must not be changed afterwards."""
        self._deliver()
        if self._failed:
            return
        if self._waiting.qsize() < ROOM:
            self._waiting.put((kind, entry))
            return
        if not self._left_out:
            self._news.append(f"{self._name}: does not keep up; entries are left out, metrics.jsonl has them all")
        self._left_out += 1

    def announce_end(self, summary: Mapping[str, Any]) -> None:
        """Let the sink write what waits, and close; the time that it has for this begins. Returns at once."""
        if summary.get("status") != "finished":
            self._limit = min(self._limit, STOP_SECONDS)
        self._deadline = time.monotonic() + self._limit
        self._hurry.set()
        self._waiting.put((None, summary))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Wait until the sink has written what waits, and is closed; not for ever."""
        if self._deadline == math.inf:
            self.announce_end(summary)
        if not self._failed:
            self._thread.join(max(0.0, self._deadline - time.monotonic()))
        if self._thread.is_alive() and not self._failed:
            self._failed = True
            self._news.append(f"{self._name}: not done after {self._limit:g} s; the run ends without it")
        if self._left_out:
            self._news.append(f"{self._name}: {self._left_out} entries were left out; metrics.jsonl has them")
        self._deliver()

    def settle(self) -> None:
        """Wait until the sink has seen everything; for measurements of what it costs. Not of a sink that hangs."""
        self._hurry.set()
        while self._waiting.unfinished_tasks and not self._failed:
            time.sleep(1e-4)
        self._hurry.clear()

    def _deliver(self) -> None:
        while self._news:
            self._tell(self._news.popleft())

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _work(self, make: Callable[[Tell], Sink]) -> None:
        try:
            sink = make(self._news.append)
            self._ready.set()
            while True:
                kind, entry = self._waiting.get()
                if kind is None:
                    sink.finish(entry)
                    return
                sink.write(kind, entry)
                self._waiting.task_done()
                if self._waiting.empty():
                    self._hurry.wait(PAUSE_SECONDS)
        except BaseException as error:  # SystemExit too: see above
            self._news.append(f"{self._name}: {type(error).__name__}: {error}; training goes on without {self._name}")
            self._failed = True
            with contextlib.suppress(queue.Empty):  # nobody will ask for what waits
                while True:
                    self._waiting.get_nowait()
            self._ready.set()


def finish_all(sinks: Sequence[Sink], summary: Mapping[str, Any]) -> None:
    """Close all sinks in the time that one may take: every thread hears of the end before any of them is waited for."""
    for sink in sinks:
        if isinstance(sink, Background):
            sink.announce_end(summary)
    for sink in sinks:
        sink.finish(summary)
