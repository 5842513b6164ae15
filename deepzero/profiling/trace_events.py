"""A trace file, read: its steps, and when a rank computed, communicated and copied. All times are microseconds.

Both kinds of trace are brought to the same three lists of spans.

========  ==========================================  ==========================================================
          a GPU's trace                               a CPU's
========  ==========================================  ==========================================================
compute   kernels, fills, copies within the device    the training thread, while it does not stand: below
communi-  NCCL's kernels                              *in_flight* lanes, gloo's own events, and the *launch* and
cation                                                *wait* ranges
copies    copies to and from the host                 *D2H* and *H2D* ranges: made in line by the training thread
========  ==========================================  ==========================================================

On a CPU the training thread *stands* in ``zero.launch``, ``zero.wait``, ``zero.D2H`` and ``zero.H2D``; outside of them
the rank's program runs, be it an operator or Python. What of it are operators is counted apart.
"""

from __future__ import annotations

import bisect
import gzip
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from deepzero.comm.profiler_ranges import Label
from deepzero.profiling.trace import COMMUNICATION, FOLDER, HELD

PATTERNS = ("*.pt.trace.json", "*.pt.trace.json.gz")
PHASES = ("forward", "backward", "boundary", "agree", "step", "publish")
"""Ranges of the engine that others lie in; ``step`` without a bucket."""
_STEP = re.compile(r"ProfilerStep#(\d+)")
_NOTHING = Label("")

Event = dict[str, Any]
Times = list[tuple[float, float]]
"""(begin, end), sorted, not overlapping."""


class TraceError(ValueError):
    """A file that is no trace, or none that can be summed up: which, why, and what to do."""


class TraceSpan(NamedTuple):
    """Something that took time."""

    begin: float
    end: float
    name: str
    """The range's or the kernel's."""
    label: Label = _NOTHING
    """Ours, or that of the range in which a GPU's kernel was launched; without a verb where there is none."""
    launched: float | None = None
    """When the call that launched a collective was over, where that is known; on a GPU, when it began."""
    flight: float | None = None
    """When the collective began: its launch and its wait have this in common."""

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


@dataclass
class Trace:
    """One rank's trace."""

    path: Path
    rank: int
    world_size: int | None
    device: Literal["cpu", "cuda"]
    steps: list[TraceStep]
    compute: Times = field(default_factory=list)
    """On a CPU empty: see :func:`computing`."""
    operators: Times = field(default_factory=list)
    """On a CPU: torch's operators on any thread, but for those that communicate."""
    communication: list[TraceSpan] = field(default_factory=list)
    copies: list[TraceSpan] = field(default_factory=list)
    stands: list[TraceSpan] = field(default_factory=list)
    """On a CPU: the launches and waits of the training thread."""
    phases: list[TraceSpan] = field(default_factory=list)
    host_steps: list[TraceSpan] = field(default_factory=list)
    """The optimizer's sub-groups in host memory, on the training thread."""
    held: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    """The memory timeline: bytes by category."""

    def phase_at(self, moment: float) -> str:
        """In which of :data:`PHASES` the program was, the one begun last; empty between them."""
        around = [phase for phase in self.phases if phase.begin <= moment <= phase.end]
        return max(around, key=lambda phase: phase.begin).label.verb if around else ""


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


def computing(trace: Trace, step: TraceStep) -> Times:
    """When the rank computed in ``step``, see the module's text."""
    if trace.device == "cuda":
        return inside(trace.compute, step.begin, step.end)
    return minus([(step.begin, step.end)], times_of([*trace.stands, *trace.copies]))


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


def load_trace(path: Path) -> Trace:
    """Read one file.

    Raises:
        TraceError: it is not a trace of ``torch.profiler``, or has no steps.
    """
    content = _content(path)
    events = content.get("traceEvents") if isinstance(content, dict) else None
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise TraceError(f"{path} is JSON, but no Chrome trace: it has no list of traceEvents")
    complete = [event for event in events if event.get("ph") == "X" and "ts" in event and "dur" in event]
    marks = [
        (TraceStep(int(found[1]), *_times(event)), event.get("tid")) for event in complete
        if event.get("cat") == "user_annotation" and (found := _STEP.fullmatch(event["name"]))
    ]  # fmt: skip
    if not marks:
        raise TraceError(
            f"{path} has no steps (ProfilerStep#…); record with profiler=torch, or with a schedule and profiler.step()"
        )
    info, named = content.get("distributedInfo") or {}, re.match(r"rank(\d+)\.", path.name)
    rank = int(info["rank"] if "rank" in info else named[1] if named else 0)
    on_gpu = any(event.get("cat") == "kernel" for event in complete)
    steps = sorted((step for step, _ in marks), key=lambda step: step.begin)
    trace = Trace(path, rank, info.get("world_size"), "cuda" if on_gpu else "cpu", steps)
    ours, thread = list(_ours(complete)), marks[0][1]
    for event, span in ours:
        if span.label.verb in PHASES and span.label.bucket is None and not span.label.note:
            trace.phases.append(span)
        elif span.label.verb == "step" and event.get("tid") == thread:
            trace.host_steps.append(span)
    if on_gpu:
        _read_gpu(trace, complete, ours)
    else:
        _read_cpu(trace, complete, ours, thread)
    counters = (event for event in events if event.get("ph") == "C" and event.get("name") == HELD)
    trace.held = sorted(((float(e["ts"]), dict(e.get("args", {}))) for e in counters), key=lambda entry: entry[0])
    return trace


def _content(path: Path) -> Any:
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    except (OSError, EOFError, ValueError) as error:
        raise TraceError(f"{path} cannot be read: {error}") from None
    if not data.strip():
        raise TraceError(f"{path} is empty: the run that wrote it was cut short; record again")
    try:
        return json.loads(data.decode("utf-8", errors="replace"))
    except ValueError as error:
        raise TraceError(f"{path} is no trace, or a part of one: {error}") from None


def _times(event: Event) -> tuple[float, float]:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _ours(events: Iterable[Event]) -> Iterator[tuple[Event, TraceSpan]]:
    for event in events:
        label = Label.parse(str(event.get("name", "")))
        if label is not None and event.get("cat") in ("user_annotation", COMMUNICATION):
            yield event, TraceSpan(*_times(event), event["name"], label)


def _read_cpu(trace: Trace, events: Sequence[Event], ours: Sequence[tuple[Event, TraceSpan]], thread: Any) -> None:
    flights: dict[tuple[int | None, str], list[float]] = {}
    stands: list[TraceSpan] = []
    for event, span in ours:
        if event["cat"] == COMMUNICATION:
            trace.communication.append(span)
            flights.setdefault((span.label.bucket, span.label.note), []).append(span.begin)
        elif event.get("tid") == thread and span.label.verb in ("launch", "wait"):
            stands.append(span)
        elif event.get("tid") == thread and span.label.verb in ("D2H", "H2D"):
            trace.copies.append(span)
    over: dict[float, float] = {}
    for span in sorted(stands, key=lambda stand: stand.begin):
        # The last flight of this name that had begun; a flight is noted just before its launch.
        begun = (begin for begin in flights.get((span.label.bucket, span.label.note), ()) if begin <= span.begin)
        flight, launched = max(begun, default=None), None
        if flight is not None and span.label.verb == "launch":
            over[flight] = span.end
        elif flight is not None:
            launched = over.get(flight, flight)
        trace.stands.append(span._replace(launched=launched, flight=flight))
    gloo = [TraceSpan(*_times(e), e["name"]) for e in events if str(e.get("name", "")).startswith("gloo:")]
    trace.communication += [*gloo, *trace.stands]
    operators = (e for e in events if e.get("cat") == "cpu_op" and not str(e["name"]).startswith("c10d::"))
    trace.operators = minus(union(map(_times, operators)), times_of([*trace.stands, *trace.copies]))


def _read_gpu(trace: Trace, events: Sequence[Event], ours: Sequence[tuple[Event, TraceSpan]]) -> None:
    calls = {
        event["args"]["correlation"]: event for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }  # fmt: skip
    by_thread: dict[Any, list[TraceSpan]] = {}
    for event, span in sorted(ours, key=lambda pair: pair[1].begin):
        if event["cat"] == "user_annotation" and span.label.verb in ("launch", "wait", "D2H", "H2D"):
            by_thread.setdefault(event.get("tid"), []).append(span)
    compute = []
    for event in events:
        kind, name = event.get("cat"), str(event.get("name", ""))
        if kind not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        span, call = TraceSpan(*_times(event), name), calls.get(event.get("args", {}).get("correlation"))
        if call:  # the range on its thread that it was called in; these ranges do not overlap
            called, ranges = float(call["ts"]), by_thread.get(call["tid"], [])
            place = bisect.bisect_right(ranges, called, key=lambda around: around.begin) - 1
            label = ranges[place].label if place >= 0 and ranges[place].end >= called else _NOTHING
            span = span._replace(label=label, launched=called, flight=called)
        if kind == "kernel" and "nccl" in name.lower():
            trace.communication.append(span)
        elif kind == "gpu_memcpy" and ("HtoD" in name or "DtoH" in name):
            trace.copies.append(span)
        else:
            compute.append((span.begin, span.end))
    trace.compute = union(compute)
