"""What a trace means: step by step, how much communication was hidden, and what the rank stood still for.

With the spans of ``trace_events.py``, in each step::

    under way      communication + copies        (unions of times)
    exposed        under way - compute           what a faster network, or a better order, could take off the step
    overlap        1 - exposed / under way

A *gap* is one uninterrupted piece of the exposed time, put down to what was waited for in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepzero.comm.profiler_ranges import Label
from deepzero.profiling import trace_events as events
from deepzero.profiling.trace_events import Trace, TraceSpan, TraceStep, inside, length, minus, times_of, union

OTHER = "communication without a name"
GATHERS = ("parameters.all_gather_forward", "parameters.all_gather_backward")
"""Stage 3's."""
REDUCTIONS = "gradients."
"""Begins the names of all reductions."""


@dataclass(frozen=True)
class StepTimes:
    """One step of one rank. All times are milliseconds."""

    step: int
    length: float
    compute: float
    operators: float
    """On a GPU the same; on a CPU what of it torch's operators took. The rest is Python, data, files."""
    communication: float
    copies: float
    under_way: float
    """One or both of them."""
    exposed: float
    exposed_copies: float
    """What of it is put down to copies between host and device alone."""
    host_steps: float
    """The optimizer in host memory, on the training thread."""

    @property
    def hidden(self) -> float:
        """Communication and copies beside which the rank computed."""
        return self.under_way - self.exposed

    @property
    def overlap(self) -> float | None:
        """0 to 1; None where nothing was under way."""
        return self.hidden / self.under_way if self.under_way > 0 else None


@dataclass(frozen=True)
class Gap:
    """The rank stood still. Times are milliseconds; :attr:`begin` counts from the step's begin."""

    step: int
    begin: float
    length: float
    phase: str
    name: str
    """The range's or the kernel's."""
    label: Label | None
    lead: float | None
    """How long before the gap the launching call was over; None: not known."""
    flight: float | None = None
    """When the collective began, in the trace's time: the launch and the wait of one have this in common."""
    first: bool = False
    """The first gather of its step: nothing comes before it that it could hide behind."""
    last: bool = False
    """The last reduction of its step: no gradients come after it that it could hide behind."""

    @property
    def kind(self) -> str:
        """The ledger's name for the collective or copy; empty if unknown."""
        return self.label.note.split(" ")[0] if self.label is not None else ""

    @property
    def prefetched(self) -> bool:
        """Whether a gather was launched ahead of its use."""
        return self.label is not None and self.label.note.endswith(" prefetch")

    @property
    def launching(self) -> bool:
        """On a CPU: not a wait, but the call that starts a collective."""
        return self.name.startswith("zero.launch")

    @property
    def copy(self) -> bool:
        """Whether it is a copy between host and device."""
        return self.kind.startswith("offload.") or (self.label is None and self.name.startswith("Memcpy"))

    @property
    def collective(self) -> tuple[int, float | None, str]:
        """Two gaps with the same are about one collective."""
        return self.step, self.begin if self.flight is None else self.flight, self.what

    @property
    def what(self) -> str:
        """In words: what for, which bucket, where."""
        if self.label is None:
            return self.name
        number = f" of bucket {self.label.bucket}" if self.label.bucket is not None else ""
        place = f" ({self.label.place})" if self.label.place else ""
        return f"{self.label.note or self.label.verb}{number}{place}"


@dataclass(frozen=True)
class GapKind:
    """Gaps of the same origin, over all steps. Milliseconds."""

    phase: str
    what: str
    count: int
    """How many collectives or copies."""
    total: float
    widest: Gap


@dataclass(frozen=True)
class TraceSummary:
    """One trace file."""

    trace: Trace
    steps: list[StepTimes]
    gaps: list[Gap]
    """The widest first."""

    @property
    def path(self) -> Path:
        """The trace file."""
        return self.trace.path

    def total(self, name: str) -> float:
        """The sum over steps of one of :class:`StepTimes`' milliseconds."""
        return float(sum(getattr(step, name) for step in self.steps))

    def groups(self) -> list[GapKind]:
        """The gaps by phase and origin, those with the most time first."""
        found: dict[tuple[str, str], list[Gap]] = {}
        for gap in self.gaps:
            found.setdefault((gap.phase, gap.what), []).append(gap)
        groups = [
            GapKind(
                phase,
                what,
                len({gap.collective for gap in gaps}),
                sum(gap.length for gap in gaps),
                max(gaps, key=lambda gap: gap.length),
            )
            for (phase, what), gaps in found.items()
        ]
        return sorted(groups, key=lambda group: -group.total)


def summarize(trace: Trace) -> TraceSummary:
    """Sum up every step of a trace, and list its gaps."""
    communication, copies = times_of(trace.communication), times_of(trace.copies)
    causes = _causes(trace)
    steps: list[StepTimes] = []
    gaps: list[Gap] = []
    for step in trace.steps:
        window = (step.begin, step.end)
        compute = events.computing(trace, step)
        sent, copied = inside(communication, *window), inside(copies, *window)
        under_way = union([*sent, *copied])
        exposed = minus(under_way, compute)
        operators = compute if trace.device == "cuda" else inside(trace.operators, *window)
        host = inside(times_of(trace.host_steps), *window)
        numbers = (compute, operators, sent, copied, under_way, exposed, minus(minus(copied, sent), compute), host)
        steps.append(
            StepTimes(
                step.number, (step.end - step.begin) / 1000, *(length(times) / 1000 for times in numbers)
            )
        )  # fmt: skip
        gaps += _gaps(trace, step, exposed, causes)
    return TraceSummary(trace, steps, sorted(gaps, key=lambda gap: -gap.length))


def _causes(trace: Trace) -> list[TraceSpan]:
    """What an exposed time can be put down to: on a CPU that in which the thread stood, on a GPU what ran."""
    found = [*trace.stands, *trace.copies] if trace.device == "cpu" else [*trace.communication, *trace.copies]
    return sorted(found, key=lambda span: span.begin)


def _gaps(
    trace: Trace, step: TraceStep, exposed: Iterable[tuple[float, float]], causes: Sequence[TraceSpan]
) -> list[Gap]:
    """One for each piece of exposed time and each cause in it; what overlaps is put down to what began first."""
    mine = [cause for cause in causes if cause.end > step.begin and cause.begin < step.end]
    first = next((c for c in _by_launch(mine) if c.kind == GATHERS[0]), None)
    last = next((c for c in reversed(_by_launch(mine)) if c.kind.startswith(REDUCTIONS)), None)
    gaps = []
    for begin, end in exposed:
        left = [(begin, end)]
        for cause in mine:
            piece = inside(left, cause.begin, cause.end)
            if not piece:
                continue
            left = minus(left, piece)
            at, lead = piece[0][0], None
            if cause.launched is not None:
                lead = max(0.0, at - cause.launched) / 1000
            moment = at if trace.device == "cpu" or cause.launched is None else cause.launched  # the CPU runs ahead
            gaps.append(
                Gap(
                    step.number, (at - step.begin) / 1000, length(piece) / 1000, trace.phase_at(moment), cause.name,
                    cause.label, lead, cause.flight, _same(cause, first), _same(cause, last),
                )
            )  # fmt: skip
        gaps += [Gap(step.number, (b - step.begin) / 1000, (e - b) / 1000, "", OTHER, None, None) for b, e in left]
    return gaps


def _by_launch(causes: Iterable[TraceSpan]) -> list[TraceSpan]:
    return sorted(causes, key=lambda cause: cause.begin if cause.flight is None else cause.flight)


def _same(cause: TraceSpan, other: TraceSpan | None) -> bool:
    """Whether both are about one collective: its launch and its wait are two spans."""
    if other is None or cause.label is None or other.label is None:
        return False
    mine, theirs = cause.label, other.label
    return (cause.flight, mine.bucket, mine.note) == (other.flight, theirs.bucket, theirs.note)
