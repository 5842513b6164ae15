"""One optimizer step of one rank, event by event: when each came, and how many bytes were held by category.

The ledger notes events all the time (launch, wait, fetch, release, gradient_ready, boundary, step, publish …) and holds
the list of what can be weighed. A recorder listens for one step and weighs at each event; in all other steps nobody
listens, and an event costs one comparison.

Weighing takes time, which is kept out of the figures in three ways:

- *The clock stands meanwhile.* ``seconds`` of an event are those since the beginning of the step, less what weighing
  has taken so far. What other ranks do in that time is not undone, so this is near the truth, not the truth.
- *What stays is weighed seldom.* Masters and moments are many tensors that do not come and go; they are weighed at the
  landmarks of a step alone.
- *There is a limit.* When weighing has taken more than :data:`FREE_SECONDS` and a quarter of the step, events pass
  unweighed until the step has caught up; :attr:`StepRecorder.events` counts them all the same.

A model of hundreds of layers has tens of thousands of events in a step. No more than twice :attr:`StepRecorder.limit`
points are kept at a time: then they are thinned evenly, but a landmark or the largest of a category stays.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deepzero.comm.ledger import Ledger

LANDMARKS = ("begin", "backward_end", "boundary", "step", "publish", "end")
"""Events that are always weighed, whole, and never thinned out; ``begin`` and ``end`` are the recorder's own."""
SETTLED = ("masters", "moments", "host_masters", "host_moments")
"""Categories that change at landmarks alone."""
FREE_SECONDS = 0.05
SHARE = 0.25
MAX_POINTS = 2000
"""Of one rank."""
MAX_POINTS_TOGETHER = 20_000
"""Of all ranks: what is gathered must stay small on a cluster, too."""


def points_for(world_size: int) -> int:
    """How many points each of ``world_size`` ranks keeps.

    Example:
        >>> points_for(2), points_for(100), points_for(4096)
        (2000, 200, 40)
    """
    return max(40, min(MAX_POINTS, MAX_POINTS_TOGETHER // world_size))


@dataclass(frozen=True)
class Point:
    """One event, and what was held after it."""

    number: int
    """Of the event within its step, from 0; numbers that are missing were thinned out, or not weighed."""
    what: str
    kind: str
    where: str
    seconds: float
    """Since the beginning of the step, without the time that weighing took."""
    held: dict[str, int]
    """Bytes by category; categories without any are left out."""
    device_bytes: int | None
    """What the GPU's allocator had given out, activations included; None without GPU."""

    def as_dict(self) -> dict[str, Any]:
        """For ``timeline.json``."""
        entry = dict(vars(self))
        return entry if self.device_bytes is not None else {k: v for k, v in entry.items() if k != "device_bytes"}


class StepRecorder:
    """Listens to one step's events.

    Args:
        ledger: of this rank.
        limit: how many points may be kept, about.
        device_bytes: says what the GPU's allocator has given out; None without GPU.
        clock: seconds.
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
        self.events = 0
        """All of the step, whether weighed or not."""
        self.seconds = self.spent_seconds = 0.0
        """Of the step without weighing; of weighing."""
        self.problem: str | None = None
        """The first thing that went wrong; recording never stops a step."""
        self._started = 0.0
        self._settled: dict[str, int] = {}
        self._largest: dict[str, tuple[int, int]] = {}
        # Copies of offloaded states are noted by a thread of their own.
        self._lock = threading.Lock()

    def begin(self) -> None:
        """The step begins."""
        self._started = self._clock()
        self._seen("begin", "", "")
        self._started, self.spent_seconds = self._clock(), 0.0  # the first weighing was before the step
        self.ledger.observer = self._seen

    def end(self) -> None:
        """The step is over."""
        self.ledger.observer = None
        self.seconds = self._clock() - self._started - self.spent_seconds
        self._seen("end", "", "")
        if len(self.points) > self.limit:
            self._thin()

    def as_dict(self) -> dict[str, Any]:
        """This rank's part of ``timeline.json``."""
        return {
            "seconds": self.seconds,
            "weighing_seconds": self.spent_seconds,
            "events": self.events,
            "problem": self.problem,
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
        held = self.ledger.held_now(SETTLED)
        if whole:
            everything = self.ledger.held_now()
            self._settled = {name: everything[name] for name in SETTLED if name in everything}
            self._settled["padding"] = everything["padding"] - held["padding"]
        held["padding"] += self._settled.get("padding", 0)
        together = {**self._settled, **held}
        return {name: size for name, size in together.items() if size}

    def _keep(self, point: Point) -> None:
        self.points.append(point)
        for name, size in (*point.held.items(), ("all", sum(point.held.values()))):
            if size > self._largest.get(name, (0, -1))[0]:
                self._largest[name] = (size, point.number)
        if len(self.points) >= 2 * self.limit:
            self._thin()

    def _thin(self) -> None:
        """Keep some :attr:`limit` points, as far apart as that asks for, and those that must stay."""
        stride = math.ceil(self.events / self.limit)
        stay = {number for _, number in self._largest.values()}
        kept: list[Point] = []
        for point in self.points:
            far = not kept or point.number - kept[-1].number >= stride
            if far or point.what in LANDMARKS or point.number in stay:
                kept.append(point)
        self.points = kept
