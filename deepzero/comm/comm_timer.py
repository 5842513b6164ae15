"""How much communication was hidden in a step, measured in every run without a profiler.

Of each collective the training thread knows three moments: when it was launched, when it began to wait, when the wait
was over. From these::

    in_flight   length of the union of [launched, wait is over] of all collectives
    exposed     time in the launching calls and in the waits: the thread stood still
    hidden      1 - exposed / in_flight

*in_flight* is an upper bound: gloo does not tell when messages have arrived for which nobody has waited yet. *exposed*
is exact. So *hidden* answers "which part of the time between launch and wait was spent on something else", and a small
value is bad news, while a large one may also mean that little was under way.

On a GPU nothing is delivered: a wait there is an order to a stream, which the CPU does not see through. A trace has the
kernels (``tools/trace_report.py``).

A collective costs about a microsecond here (``docs/log.md``).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from time import perf_counter, time_ns

import torch

from deepzero.comm import profiler_ranges
from deepzero.comm.ledger import Ledger


class OverlapMeter:
    """The account of one rank's collectives, of the step under way and of the last one. All times are seconds.

    Args:
        device: where the tensors are; on a GPU nothing is measured.
        ledger: says which collectives are part of a step.
    """

    def __init__(self, device: torch.device, ledger: Ledger) -> None:
        self.measures = device.type == "cpu"
        self.ledger = ledger
        self.in_flight_seconds = self.exposed_seconds = 0.0
        self._under_way = 0
        self._since = 0.0
        self._last: tuple[float, float] = (0.0, 0.0)

    def launch(self, kind: str, where: str) -> CommTiming:
        """A collective that travels is about to be launched."""
        return CommTiming(self, kind, where, self.measures and self.ledger.in_step(kind))

    def close_step(self) -> None:
        """An optimizer step is complete. What is under way counts in both steps, in each the part that is in it."""
        if self._under_way:
            now = perf_counter()
            self.in_flight_seconds += now - self._since
            self._since = now
        self._last = (self.in_flight_seconds, self.exposed_seconds)
        self.in_flight_seconds = self.exposed_seconds = 0.0

    def metrics(self) -> dict[str, float]:
        """Of the last step, see the module's text; empty on a GPU and where nothing was sent."""
        in_flight, exposed = self._last
        if in_flight == 0.0:
            return {}
        return {
            "comm/in_flight_seconds": in_flight,
            "comm/exposed_seconds": exposed,
            "comm/hidden_fraction": 1.0 - min(1.0, exposed / in_flight),
        }

    def begin(self, now: float) -> None:
        """One more is under way."""
        if self._under_way == 0:
            self._since = now
        self._under_way += 1

    def end(self, now: float) -> None:
        """One is complete."""
        self._under_way -= 1
        if self._under_way == 0:
            self.in_flight_seconds += now - self._since


class CommTiming:
    """One collective: launch → :meth:`launched` → :meth:`standing` → :meth:`landed`; and its ranges, if recorded."""

    __slots__ = ("_airborne", "_counts", "_meter", "_range", "_recorder", "_since")

    def __init__(self, meter: OverlapMeter, kind: str, where: str, counts: bool) -> None:
        self._meter, self._counts = meter, counts
        self._recorder = profiler_ranges.recorder()
        self._range: AbstractContextManager[None] | None = None
        self._airborne: profiler_ranges.LaneSpan | None = None
        if self._recorder is not None:
            self._airborne = self._recorder.begin(kind, where, lane=meter.measures)
            label = self._airborne.label
            self._enter(profiler_ranges.Label("launch", label.bucket, label.place, label.note))
        self._since = perf_counter()
        if counts:
            meter.begin(self._since)

    def launched(self) -> None:
        """The launching call is over, and the collective is under way."""
        self._stood()

    def standing(self) -> None:
        """The program waits from now on."""
        if self._airborne is not None and self._recorder is not None and self._recorder is profiler_ranges.recorder():
            self._enter(self._recorder.wait_label(self._airborne))
        self._since = perf_counter()

    def landed(self) -> None:
        """It is complete, or has failed, perhaps in the launching call already. Twice is harmless."""
        if self._airborne is not None and self._airborne.ended_ns is None:
            self._airborne.ended_ns = time_ns()
        now = self._stood()
        if self._counts:
            self._meter.end(now)
            self._counts = False

    def _stood(self) -> float:
        now = perf_counter()
        if self._counts:
            self._meter.exposed_seconds += now - self._since
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        return now

    def _enter(self, label: profiler_ranges.Label) -> None:
        if self._recorder is not None:
            self._range = self._recorder.span(label)
            self._range.__enter__()
