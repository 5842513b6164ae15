"""Named ranges: what ZeRO does, in a profiler's trace, in the words of the book; and how much of it was hidden.

[Note: the grammar of a range's name]
    ::

        zero.VERB[ bucket N][ (PLACE)][ NOTE]         zero.fetch bucket 12 (blocks.3.mlp.fc) prefetch

    ``VERB`` is one of :data:`VERBS`. ``N`` is the bucket: in stage 3's fetches, waits and releases the coordinator's
    key, elsewhere its number in its group. ``PLACE`` is a module or a parameter: of *fetch* the module at which it was
    launched, which with the note ``prefetch`` is an earlier one than the module that needs it; of *wait* the module
    that stands still; of everything else the first parameter of the bucket. Its own parentheses become brackets.
    ``NOTE`` are words: ``prefetch``, and of *launch*, *wait* and *in_flight* the ledger's name of the collective.

A collective is under way between two of these ranges, *launch* and *wait*: :class:`Recorder` notes for each from when
to when, and ``profiling/trace.py`` writes this into the trace as a lane of its own, as *in_flight*. **Its end is when
this rank has seen that it is complete**, at the end of the wait: gloo does not tell when messages have arrived that
nobody has waited for. NCCL's kernels are in the trace themselves, and get no such lane.

[Note: how much communication was hidden]
    Measured in every run, without a profiler, in about a microsecond for each collective::

        in_flight   length of the union of [launched, wait is over] of all collectives
        exposed     time in the launching calls and in the waits: the thread stood still
        hidden      1 - exposed / in_flight

    *in_flight* is an upper bound (see above), *exposed* is exact. So a small *hidden* is bad news; a large one may also
    mean that little was under way. On a GPU nothing is measured: a wait there is an order to a stream. A trace has the
    kernels (``tools/trace_report.py``).
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from deepzero.comm.ledger import Ledger

log = logging.getLogger(__name__)

# What a range can be: the engine's phases, what happens to buckets, what travels; docs/traces.md says what each is.
_PHASES = ("forward", "backward", "boundary", "agree", "step", "publish")
VERBS = (*_PHASES, "fetch", "release", "reduce", "launch", "wait", "D2H", "H2D", "in_flight")
_NAME = re.compile(r"zero\.(\w+)(?: bucket (\d+))?(?: \(([^()]*)\))?(?: (.*))?")
_BUCKET = re.compile(r"bucket (\d+)")
_BRACKETS = str.maketrans("()", "[]")


@dataclass(frozen=True)
class Label:
    """A range's name, in parts.

    Example:
        >>> Label("fetch", 12, "blocks.3.mlp.fc", "prefetch").text()
        'zero.fetch bucket 12 (blocks.3.mlp.fc) prefetch'
        >>> Label.parse("zero.wait bucket 3 gradients.reduce_scatter")
        Label(verb='wait', bucket=3, place='', note='gradients.reduce_scatter')
    """

    verb: str
    bucket: int | None = None
    place: str = ""
    note: str = ""

    def text(self) -> str:
        """The name, see [Note: the grammar of a range's name]."""
        number = "" if self.bucket is None else f" bucket {self.bucket}"
        place = f" ({self.place.translate(_BRACKETS)})" if self.place else ""
        return f"zero.{self.verb}{number}{place}" + (f" {self.note}" if self.note else "")

    @classmethod
    def parse(cls, name: str) -> Label | None:
        """The inverse of :meth:`text`; None for names that are not ours."""
        if (match := _NAME.fullmatch(name)) is None or match[1] not in VERBS:
            return None
        return cls(match[1], None if match[2] is None else int(match[2]), match[3] or "", match[4] or "")


@dataclass
class LaneSpan:
    """What goes into a lane of its own: a collective, a delayed update. Times are those of ``time.time_ns``."""

    label: Label
    began_ns: int
    ended_ns: int | None = None

    def end(self) -> None:
        """It is over, unless it was already."""
        self.ended_ns = self.ended_ns or time.time_ns()


class Recorder:
    """What is kept of the recorded steps beside the profiler's own events.

    ``held`` gives the bytes held by category at a moment, for the memory timeline; None: there is none.
    """

    SHARE = 20  # a sample of memory is taken only if all together take at most one part in 20 of the time

    def __init__(self, held: Callable[[], dict[str, int]] | None = None) -> None:
        self.flights: list[LaneSpan] = []
        self.aside: list[LaneSpan] = []  # in threads that the profiler does not see
        self.samples: list[tuple[int, dict[str, int]]] = []  # (``time.time_ns``, bytes by category)
        self._held = held
        self._next_sample_ns = 0
        self._mine = threading.local()  # the range around a thread's code, and the module for whose sake it waits

    @contextlib.contextmanager
    def span(self, label: Label) -> Iterator[None]:
        """A range around what is inside."""
        from torch.profiler import record_function  # late: the launcher imports this module, and not torch

        outer = getattr(self._mine, "label", None)
        self._mine.label = label
        try:
            with record_function(label.text()):
                yield
        finally:
            self._mine.label = outer
            self._sample()

    @contextlib.contextmanager
    def waiting_for_module(self, place: str) -> Iterator[None]:
        """Waits inside are for this module's sake."""
        around = self.waiting_place()
        self._mine.place = place
        try:
            yield
        finally:
            self._mine.place = around

    @contextlib.contextmanager
    def span_aside(self, label: Label) -> Iterator[None]:
        """A range around what is inside, in a thread that the profiler does not see."""
        entry = LaneSpan(label, time.time_ns())
        self.aside.append(entry)
        try:
            yield
        finally:
            entry.end()

    def inside(self, verb: str, kind: str, where: str) -> Label:
        """A label with place and note of the range around it, if that is about the same bucket, ``bucket 12``."""
        outer: Label | None = getattr(self._mine, "label", None)
        number = _BUCKET.search(where)
        bucket = int(number[1]) if number else None
        if outer is None or (bucket is not None and outer.bucket != bucket):
            return Label(verb, bucket, "", kind)
        return Label(verb, bucket, outer.place, f"{kind} {outer.note}".rstrip())

    def waiting_place(self) -> str:
        """For which module's sake this thread waits; empty: for that of the range around it."""
        place: str = getattr(self._mine, "place", "")
        return place

    def finish(self) -> None:
        """The recorded steps are over; what is under way is cut off here."""
        for flight in [*self.flights, *self.aside]:
            flight.end()

    def _sample(self) -> None:
        began = time.time_ns()
        if self._held is None or began < self._next_sample_ns:
            return
        try:
            self.samples.append((began, self._held()))
        except Exception as error:  # what watches a run does not stop it
            log.warning("the trace has no memory timeline: %r", error)
            self._held = None
        ended = time.time_ns()
        self._next_sample_ns = ended + self.SHARE * (ended - began)


_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


class Ranges:
    """The ranges of what one process group's ranks do here: named, while somebody records them, and nothing else."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None  # who records now

    def start(self, recorder: Recorder) -> None:
        """Ranges are recorded from now on, by one recorder at a time."""
        self.recorder = recorder

    def stop(self) -> None:
        """No ranges any more. Harmless when there were none."""
        if self.recorder is not None:
            self.recorder.finish()
        self.recorder = None

    def span(
        self, verb: str, bucket: int | None = None, place: str = "", note: str = ""
    ) -> AbstractContextManager[None]:
        """A range with the name ``Label(verb, bucket, place, note)``; nothing at all while nobody records."""
        return _NOTHING if self.recorder is None else self.recorder.span(Label(verb, bucket, place, note))

    def span_aside(self, verb: str, bucket: int | None, place: str, note: str) -> AbstractContextManager[None]:
        """:meth:`span` in a thread that the program has started itself, which torch's profiler does not see."""
        return _NOTHING if self.recorder is None else self.recorder.span_aside(Label(verb, bucket, place, note))

    def moving(self, verb: str, kind: str, where: str) -> AbstractContextManager[None]:
        """A range inside another one, whose place it has if both are about one bucket; ``kind`` is the ledger's."""
        return _NOTHING if self.recorder is None else self.recorder.span(self.recorder.inside(verb, kind, where))

    def waiting_for_module(self, place: str) -> AbstractContextManager[None]:
        """Waits inside are for this module's sake."""
        return _NOTHING if self.recorder is None else self.recorder.waiting_for_module(place)

    def launching(self, kind: str, where: str, lane: bool) -> tuple[LaneSpan | None, AbstractContextManager[None]]:
        """A collective that is launched, if somebody records it, and the range around the launching call.

        Without a ``lane`` where the profiler sees NCCL's kernels by itself.
        """
        if self.recorder is None:
            return None, _NOTHING
        flight = LaneSpan(self.recorder.inside("in_flight", kind, where), time.time_ns())
        if lane:
            self.recorder.flights.append(flight)
        return flight, self.recorder.span(replace(flight.label, verb="launch"))

    def waiting(self, flight: LaneSpan | None) -> AbstractContextManager[None]:
        """A range around the wait for one that :meth:`launching` has recorded, unless its steps are over."""
        if self.recorder is None or flight is None or flight.ended_ns is not None:
            return _NOTHING
        place = self.recorder.waiting_place() or flight.label.place
        return self.recorder.span(replace(flight.label, verb="wait", place=place))


class OverlapMeter:
    """The account of one rank's collectives, of the step under way and of the last one. All times are seconds.

    On a GPU nothing is measured. The ledger says which collectives are part of a step.
    """

    def __init__(self, device: torch.device, ledger: Ledger) -> None:
        self.measures = device.type == "cpu"
        self.ledger = ledger
        self.in_flight_seconds = self.exposed_seconds = 0.0
        self.under_way = 0
        self.since = 0.0  # the moment from which on something has been under way
        self._last = (0.0, 0.0)

    def began(self, kind: str) -> bool:
        """A collective is launched. Returns whether it is part of a step: then it counts until it has ended."""
        if not self.measures or not self.ledger.in_step(kind):
            return False
        if self.under_way == 0:
            self.since = perf_counter()
        self.under_way += 1
        return True

    def ended(self) -> None:
        """A collective that counts is complete, or has failed."""
        self.under_way -= 1
        if self.under_way == 0:
            self.in_flight_seconds += perf_counter() - self.since

    def close_step(self) -> None:
        """An optimizer step is complete. What is under way counts in both steps, in each the part that is in it."""
        if self.under_way:
            now = perf_counter()
            self.in_flight_seconds += now - self.since
            self.since = now
        self._last = (self.in_flight_seconds, self.exposed_seconds)
        self.in_flight_seconds = self.exposed_seconds = 0.0

    def metrics(self) -> dict[str, float]:
        """Of the last step; see [Note: how much communication was hidden]. Empty on a GPU, and if nothing was sent."""
        in_flight, exposed = self._last
        if in_flight == 0.0:
            return {}
        return {
            "comm/in_flight_seconds": in_flight,
            "comm/exposed_seconds": exposed,
            "comm/hidden_fraction": 1.0 - min(1.0, exposed / in_flight),
        }
