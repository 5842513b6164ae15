"""One optimizer step of one rank, event by event: when each came, and how many bytes were held by category.

The ledger notes events all the time (launch, wait, fetch, release, gradient_ready, boundary, step, publish …). A
recorder listens for one step and weighs at each event; in all other steps an event costs one comparison. Weighing takes
time, which is kept out of the figures in three ways:

- *The clock stands meanwhile.* ``seconds`` of an event are those since the beginning of the step, less what weighing
  has taken so far. What other ranks do in that time is not undone, so this is near the truth, not the truth.
- *What stays is weighed seldom.* Masters and moments, many tensors that do not come and go, at the landmarks alone.
- *There is a limit.* When weighing has taken more than :data:`FREE_SECONDS` and a quarter of the step, events pass
  unweighed, though counted, until the step has caught up. Landmarks are weighed in any case: they come once in a step.

A model of hundreds of layers has tens of thousands of events in a step. Twice :attr:`StepRecorder.limit` points are
gathered, then thinned evenly to the limit, and so on; the landmarks and the largest of each category stay.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from deepzero.comm.ledger import Ledger

LANDMARKS = ("begin", "boundary", "step", "publish", "end")
"""Events that are always weighed, whole, and never thinned out. ``begin`` and ``end`` are the recorder's own."""
SETTLED = ("masters", "moments", "host_masters", "host_moments", "file_masters", "file_moments")
"""Categories that change at landmarks alone."""
FREE_SECONDS = 0.05
SHARE = 0.25
MAX_POINTS = 2000  # of one rank
MAX_POINTS_TOGETHER = 20_000  # of all ranks: what is gathered must stay small on a cluster, too


def points_for(world_size: int) -> int:
    """How many points each of ``world_size`` ranks keeps.

    Example:
        >>> points_for(2), points_for(100), points_for(4096)
        (2000, 200, 40)
    """
    return max(40, min(MAX_POINTS, MAX_POINTS_TOGETHER // world_size))


class Point(NamedTuple):
    """One event, and what was held after it."""

    number: int  # of the event within its step, from 0; numbers that are missing were thinned out, or not weighed
    what: str
    kind: str
    where: str
    seconds: float  # since the beginning of the step, without the time that weighing took
    held: dict[str, int]  # bytes by category; categories without any are left out
    device_bytes: int | None  # what the GPU's allocator had given out, activations included; None without GPU

    def as_dict(self) -> dict[str, Any]:
        """Returns the point as ``timeline.json`` holds it."""
        return {k: v for k, v in self._asdict().items() if k != "device_bytes" or v is not None}


class StepRecorder:
    """Listens to one step's events.

    Args:
        ledger: of this rank.
        limit: how many points are kept when the step is over; never fewer than the landmarks and largest.
        device_bytes: says what the GPU's allocator has given out; None without GPU.
        clock: in seconds.
    """

    def __init__(
        self,
        ledger: Ledger,
        limit: int = MAX_POINTS,
        device_bytes: Callable[[], int] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.ledger, self.limit = ledger, limit
        self._device_bytes, self._clock = device_bytes, clock
        self.points: list[Point] = []
        self.events = 0  # all of the step, whether weighed or not
        self.seconds = self.spent_seconds = 0.0  # of the step without weighing; of weighing
        self.problem: str | None = None  # the first thing that went wrong; recording never stops a step
        self._started = 0.0
        self._settled: dict[str, int] = {}
        self._largest: dict[str, tuple[int, int]] = {}
        """Of each category, and of all together: the most bytes, and the number of the event."""
        self._thin_at = 2 * limit
        # Copies of offloaded states are noted by a thread of their own.
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Start to record: the step begins."""
        self._started = self._clock()
        self._seen("begin", "", "")
        self._started, self.spent_seconds = self._clock(), 0.0  # the first weighing was before the step
        self.ledger.observer = self._seen

    def end(self) -> None:
        """Stop recording: the step is over."""
        self.ledger.observer = None
        self.seconds = self._clock() - self._started - self.spent_seconds
        self._seen("end", "", "")
        if len(self.points) > self.limit:
            self._thin()

    @property
    def peak_bytes(self) -> int:
        """The most that was held at a point, all categories together."""
        return self._largest.get("all", (0, -1))[0]

    def as_dict(self) -> dict[str, Any]:
        """This rank's part of ``timeline.json``."""
        return {
            "seconds": self.seconds,
            "weighing_seconds": self.spent_seconds,
            "events": self.events,
            "problem": self.problem,
            "peak_bytes": self.peak_bytes,
            "points": [point.as_dict() for point in self.points],
        }

    def _seen(self, what: str, kind: str, where: str) -> None:
        with self._lock:
            now = self._clock()
            number, elapsed = self.events, now - self._started - self.spent_seconds
            self.events += 1
            if what not in LANDMARKS and self.spent_seconds > max(FREE_SECONDS, SHARE * elapsed):
                return
            try:
                held = self._weigh(what in LANDMARKS)
                device = self._device_bytes() if self._device_bytes is not None else None
                self._keep(Point(number, what, kind, where, max(0.0, elapsed), held, device))
            # A tensor that goes away while it is weighed can raise anything; the step is worth more than the picture.
            except Exception as error:
                self.problem = self.problem or f"{what}: {type(error).__name__}: {error}"
            self.spent_seconds += self._clock() - now

    def _weigh(self, whole: bool) -> dict[str, int]:
        if whole:
            held, self._settled = self.ledger.held_in_two(SETTLED)
        else:
            held = self.ledger.held_now(SETTLED)
        held["padding"] += self._settled.get("padding", 0)  # none when the first weighing has failed
        return {name: size for name, size in {**self._settled, **held}.items() if size}

    def _keep(self, point: Point) -> None:
        self.points.append(point)
        for name, size in (*point.held.items(), ("all", sum(point.held.values()))):
            if size > self._largest.get(name, (0, -1))[0]:
                self._largest[name] = (size, point.number)
        if len(self.points) >= self._thin_at:
            self._thin()
            # Also with a limit below what must stay: a point costs the same however many there were.
            self._thin_at = len(self.points) + self.limit

    def _thin(self) -> None:
        """Keep those that must stay, and as many others, evenly far apart, as the limit has room for."""
        largest = {number for _, number in self._largest.values()}
        stay = {point.number for point in self.points if point.what in LANDMARKS or point.number in largest}
        stride = math.ceil(self.events / max(1, self.limit - len(stay)))
        kept: list[Point] = []
        for point in self.points:
            # The first that is kept is a landmark: those between are at most events / stride.
            if point.number in stay or (kept and point.number - kept[-1].number >= stride):
                kept.append(point)
        self.points = kept
