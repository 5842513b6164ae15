"""A trace file, read: its steps, and when a rank computed, communicated and copied. All times are microseconds.

A GPU's trace and a CPU's are brought to the same three lists of spans; ``docs/traces.md``, "The report", has a table of
what is which. On a CPU the training thread *stands* in ``zero.launch``, ``zero.wait``, ``zero.D2H`` and ``zero.H2D``;
outside of them the rank's program computes, be it an operator or Python. What of it are operators is counted apart.
"""

from __future__ import annotations

import bisect
import gzip
import json
import re
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from deepzero.comm.profiler_ranges import Label
from deepzero.profiling.trace import COMMUNICATION, FOLDER, HELD

PATTERNS = ("*.pt.trace.json", "*.pt.trace.json.gz")
PHASES = ("forward", "backward", "boundary", "agree", "step", "publish")
"""Ranges of the engine that others lie in; ``step`` without a bucket."""
_STEP = re.compile(r"ProfilerStep#(\d+)")
_NOTHING = Label("")

Times = list[tuple[float, float]]  # (begin, end), sorted, not overlapping


class TraceError(ValueError):
    """A file that is no trace, or none that can be summed up: which, why, and what to do."""


class TraceSpan(NamedTuple):
    """Something that took time."""

    begin: float
    end: float
    name: str
    label: Label = _NOTHING
    """Ours, or that of the range in which a GPU's kernel was launched; without a verb where there is none."""
    launched: float | None = None
    """When the call that launched a collective was over, where that is known; on a GPU, when it began."""
    flight: float | None = None  # when the collective began: its launch and its wait have this in common
    cat: str = ""
    thread: Any = None
    call: Any = None
    """The event's category and thread; the number that a GPU's kernel has in common with the call that started it."""

    @property
    def kind(self) -> str:
        """The ledger's name for the collective or copy; empty if unknown."""
        return self.label.note.split(" ")[0]

    @property
    def launching(self) -> bool:
        """On a CPU: not a wait, but the call that starts a collective."""
        return self.name.startswith("zero.launch")

    @property
    def copy(self) -> bool:
        """Whether it is a copy between host and device."""
        return self.kind.startswith("offload.") or (not self.label.verb and self.name.startswith("Memcpy"))

    @property
    def what(self) -> str:
        """In words: what for, which bucket, where."""
        verb, bucket, place, note = self.label.verb, self.label.bucket, self.label.place, self.label.note
        if not verb:
            return self.name
        return (note or verb) + (f" of bucket {bucket}" * (bucket is not None)) + (f" ({place})" * bool(place))


class TraceStep(NamedTuple):
    """One ``ProfilerStep#N``."""

    number: int
    begin: float
    end: float


# ---- arithmetic ------------------------------------------------------------------------------------------------------


def union(spans: Iterable[tuple[float, float]]) -> Times:
    """Merge intervals that touch or overlap.

    Example:
        >>> union([(5, 7), (0, 2), (1, 3), (7, 8)])
        [(0, 3), (5, 8)]
    """
    merged: Times = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > begin:
            merged.append((begin, end))
    return merged


def inside(times: Times, begin: float, end: float) -> Times:
    """The parts of ``times`` between two moments.

    Example:
        >>> inside([(0, 3), (5, 8)], 2, 6)
        [(2, 3), (5, 6)]
    """
    first = max(bisect.bisect_right(times, (begin, float("inf"))) - 1, 0)
    cut = ((max(b, begin), min(e, end)) for b, e in times[first : bisect.bisect_left(times, (end, 0.0))])
    return [(b, e) for b, e in cut if e > b]


def minus(times: Times, others: Times) -> Times:
    """The parts of ``times`` that are in none of ``others``.

    Example:
        >>> minus([(0, 10), (20, 30)], [(2, 3), (9, 21)])
        [(0, 2), (3, 9), (21, 30)]
    """
    left: Times = []
    for begin, end in times:
        for b, e in inside(others, begin, end):
            left.append((begin, b))
            begin = e
        left.append((begin, end))
    return [(b, e) for b, e in left if e > b]


def length(times: Times) -> float:
    """Total length of non-overlapping intervals."""
    return sum(end - begin for begin, end in times)


def times_of(spans: Iterable[TraceSpan]) -> Times:
    """The spans' times, merged."""
    return union((span.begin, span.end) for span in spans)


# ---- files -----------------------------------------------------------------------------------------------------------


def find_traces(paths: Sequence[Path]) -> list[Path]:
    """The trace files that ``paths`` name: files, folders with traces, run folders.

    Raises:
        TraceError: one of them is, or has, none.
    """
    found: list[Path] = []
    for path in paths:
        folder = path / FOLDER if (path / FOLDER).is_dir() else path
        files = sorted(file for pattern in PATTERNS for file in folder.glob(pattern)) if path.is_dir() else [path]
        if not files:
            raise TraceError(f"{folder} has no traces ({PATTERNS[0]}); record some with profiler=torch")
        if not path.exists():
            raise TraceError(f"{path}: no such file or folder")
        found += files
    return list(dict.fromkeys(found))


def _content(path: Path) -> Any:
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise TraceError(f"{path} cannot be read: {error}") from None
    if not data.strip():
        raise TraceError(f"{path} is empty: the run that wrote it was cut short; record again")
    try:
        return json.loads(data.decode("utf-8", errors="replace"))
    except ValueError as error:
        raise TraceError(f"{path} is no trace, or a part of one: {error}") from None


def _span(event: dict[str, Any]) -> TraceSpan:
    name, cat, begin = str(event.get("name", "")), str(event.get("cat", "")), float(event["ts"])
    label = Label.parse(name) if cat in ("user_annotation", COMMUNICATION) else None
    end, call = begin + float(event["dur"]), event.get("args", {}).get("correlation")
    return TraceSpan(begin, end, name, label or _NOTHING, cat=cat, thread=event.get("tid"), call=call)


class Trace:
    """One rank's trace, read from a file.

    Raises:
        TraceError: the file is not a trace of ``torch.profiler``, or has no steps.
    """

    def __init__(self, path: Path) -> None:
        content = _content(path)
        events = content.get("traceEvents") if isinstance(content, dict) else None
        if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
            raise TraceError(f"{path} is JSON, but no Chrome trace: it has no list of traceEvents")
        complete = (event for event in events if event.get("ph") == "X" and "ts" in event and "dur" in event)
        spans = sorted(map(_span, complete), key=lambda span: span.begin)
        marks = [span for span in spans if span.cat == "user_annotation" and _STEP.fullmatch(span.name)]
        if not marks:
            why = "record with profiler=torch, or with a schedule and profiler.step()"
            raise TraceError(f"{path} has no steps (ProfilerStep#…); {why}")
        info, named = content.get("distributedInfo") or {}, re.match(r"rank(\d+)\.", path.name)
        self.path, self.world_size = path, info.get("world_size")
        self.rank = int(info["rank"] if "rank" in info else named[1] if named else 0)
        self.on_gpu = any(span.cat == "kernel" for span in spans)
        self.steps = [TraceStep(int(mark.name.partition("#")[2]), mark.begin, mark.end) for mark in marks]
        self.phases: list[TraceSpan] = []
        self.host_steps: list[TraceSpan] = []  # the optimizer's sub-groups in host memory, on the training thread
        for span in spans:
            if span.label.verb in PHASES and span.label.bucket is None and not span.label.note:
                self.phases.append(span)
            elif span.label.verb == "step" and span.thread == marks[0].thread:
                self.host_steps.append(span)
        self.compute: Times = []  # on a CPU empty: see :meth:`computing`
        self.operators: Times = []  # on a CPU: torch's operators on any thread, but for those that communicate
        self.communication: list[TraceSpan] = []
        self.copies: list[TraceSpan] = []
        self.stands: list[TraceSpan] = []  # on a CPU: the launches and waits of the training thread
        if self.on_gpu:
            self._read_gpu(spans)
        else:
            self._read_cpu(spans, marks[0].thread)
        counters = (event for event in events if event.get("ph") == "C" and event.get("name") == HELD)
        self.held = sorted(((float(e["ts"]), dict(e.get("args", {}))) for e in counters), key=lambda entry: entry[0])
        """The memory timeline: bytes by category."""

    def _read_cpu(self, spans: Sequence[TraceSpan], thread: Any) -> None:
        mine = [span for span in spans if span.thread == thread]
        self.copies = [span for span in mine if span.label.verb in ("D2H", "H2D")]
        lanes = [span for span in spans if span.cat == COMMUNICATION and span.label.verb]
        flights: dict[tuple[int | None, str], list[float]] = {}
        for span in lanes:
            flights.setdefault((span.label.bucket, span.label.note), []).append(span.begin)
        over: dict[float, float] = {}
        for span in mine:
            if span.label.verb not in ("launch", "wait"):
                continue
            # The last flight of this name that had begun; a flight is noted just before its launch.
            begun = flights.get((span.label.bucket, span.label.note), [])
            place, launched = bisect.bisect_right(begun, span.begin), None
            flight = begun[place - 1] if place else None
            if flight is not None and span.label.verb == "launch":
                over[flight] = span.end
            elif flight is not None:
                launched = over.get(flight, flight)
            self.stands.append(span._replace(launched=launched, flight=flight))
        self.communication = [*lanes, *(span for span in spans if span.name.startswith("gloo:")), *self.stands]
        operators = (span for span in spans if span.cat == "cpu_op" and not span.name.startswith("c10d::"))
        self.operators = minus(times_of(operators), times_of([*self.stands, *self.copies]))

    def _read_gpu(self, spans: Sequence[TraceSpan]) -> None:
        called = [span for span in spans if span.cat in ("cuda_runtime", "cuda_driver") and span.call is not None]
        calls = {span.call: span for span in called}
        ranges: dict[Any, list[TraceSpan]] = {}
        for span in spans:
            if span.cat == "user_annotation" and span.label.verb in ("launch", "wait", "D2H", "H2D"):
                ranges.setdefault(span.thread, []).append(span)
        compute = []
        for span in spans:
            if span.cat not in ("kernel", "gpu_memcpy", "gpu_memset"):
                continue
            if call := calls.get(span.call):  # the range on its thread that it was called in; these do not overlap
                mine = ranges.get(call.thread, [])
                place = bisect.bisect_right(mine, call.begin, key=lambda around: around.begin) - 1
                label = mine[place].label if place >= 0 and mine[place].end >= call.begin else _NOTHING
                span = span._replace(label=label, launched=call.begin, flight=call.begin)
            if span.cat == "kernel" and "nccl" in span.name.lower():
                self.communication.append(span)
            elif span.cat == "gpu_memcpy" and ("HtoD" in span.name or "DtoH" in span.name):
                self.copies.append(span)
            else:
                compute.append(span)
        self.compute = times_of(compute)

    def computing(self, step: TraceStep) -> Times:
        """When the rank computed in ``step``, see the module's text."""
        if self.on_gpu:
            return inside(self.compute, step.begin, step.end)
        return minus([(step.begin, step.end)], times_of([*self.stands, *self.copies]))

    def phase_at(self, moment: float) -> str:
        """In which of :data:`PHASES` the program was, the one begun last; empty between them."""
        around = [phase for phase in self.phases if phase.begin <= moment <= phase.end]
        return max(around, key=lambda phase: phase.begin).label.verb if around else ""
