"""What a trace means: step by step, how much communication was hidden, and what the rank stood still for.

With the spans of ``trace_events.py``, in each step::

    under way      communication + copies        (unions of times)
    exposed        under way - compute           what a faster network, or a better order, could take off the step
    overlap        1 - exposed / under way

A *gap* is one uninterrupted piece of the exposed time, put down to what was waited for in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from deepzero.profiling.trace_events import Times, Trace, TraceSpan, TraceStep, inside, length, minus, times_of, union

GATHERS = ("parameters.all_gather_forward", "parameters.all_gather_backward")  # stage 3's
REDUCTIONS = "gradients."  # begins the names of all reductions


class StepTimes(NamedTuple):
    """One step of one rank, or the mean of several. All times are milliseconds."""

    step: int
    length: float
    compute: float
    operators: float  # on a GPU the same; on a CPU what of it torch's operators took. The rest is Python, data, files.
    communication: float
    copies: float
    under_way: float  # one or both of them
    exposed: float
    exposed_copies: float  # what of it is put down to copies between host and device alone
    host_steps: float  # the optimizer in host memory, on the training thread

    @property
    def hidden(self) -> float:
        """Communication and copies beside which the rank computed."""
        return self.under_way - self.exposed

    @property
    def overlap(self) -> float | None:
        """0 to 1; None where nothing was under way."""
        return self.hidden / self.under_way if self.under_way > 0 else None


class Gap(NamedTuple):
    """The rank stood still. Times are milliseconds; :attr:`begin` counts from the step's begin."""

    step: int
    begin: float
    length: float
    phase: str
    cause: TraceSpan  # what was waited for
    lead: float | None = None  # how long before the gap the launching call was over; None: not known
    first: bool = False  # the first gather of its step: nothing comes before it that it could hide behind
    last: bool = False  # the last reduction of its step: no gradients come after it that it could hide behind

    @property
    def collective(self) -> tuple[int, float, str]:
        """Two gaps with the same are about one collective."""
        return self.step, self.begin if self.cause.flight is None else self.cause.flight, self.cause.what


class TraceSummary:
    """A trace summed up: every step, and the gaps, the widest first."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.steps: list[StepTimes] = []
        gaps: list[Gap] = []
        communication, copies, host_steps = map(times_of, (trace.communication, trace.copies, trace.host_steps))
        # What an exposed time can be put down to: on a CPU that in which the thread stood, on a GPU what ran.
        causes = [*(trace.communication if trace.on_gpu else trace.stands), *trace.copies]
        causes.sort(key=lambda span: span.begin)
        for step in trace.steps:
            window = (step.begin, step.end)
            compute, sent, copied = trace.computing(step), inside(communication, *window), inside(copies, *window)
            under_way = union([*sent, *copied])
            exposed = minus(under_way, compute)
            operators = compute if trace.on_gpu else inside(trace.operators, *window)
            numbers = (
                [window], compute, operators, sent, copied, under_way, exposed, minus(minus(copied, sent), compute),
                inside(host_steps, *window),
            )  # fmt: skip
            self.steps.append(StepTimes(step.number, *(length(times) / 1000 for times in numbers)))
            gaps += _gaps(trace, step, exposed, [c for c in causes if c.end > step.begin and c.begin < step.end])
        self.gaps = sorted(gaps, key=lambda gap: -gap.length)

    @property
    def mean(self) -> StepTimes:
        """The average step; its overlap is that of all steps together."""
        return StepTimes(-1, *(sum(column) / len(self.steps) for column in list(zip(*self.steps, strict=True))[1:]))

    def groups(self) -> list[tuple[list[Gap], float]]:
        """The gaps of one phase and origin, the widest first, with their milliseconds; the longest of these first."""
        found: dict[tuple[str, str], list[Gap]] = {}
        for gap in self.gaps:
            found.setdefault((gap.phase, gap.cause.what), []).append(gap)
        groups = [(gaps, sum(gap.length for gap in gaps)) for gaps in found.values()]
        return sorted(groups, key=lambda group: -group[1])


def _gaps(trace: Trace, step: TraceStep, exposed: Times, causes: Sequence[TraceSpan]) -> Iterable[Gap]:
    """One for each piece of exposed time and each cause in it; what overlaps is put down to what began first."""
    by_launch = sorted(causes, key=lambda cause: cause.begin if cause.flight is None else cause.flight)
    first = next((_identity(cause) for cause in by_launch if cause.kind == GATHERS[0]), None)
    last = next((_identity(cause) for cause in by_launch[::-1] if cause.kind.startswith(REDUCTIONS)), None)
    for window in exposed:
        left = [window]
        for cause in causes:
            if not (piece := inside(left, cause.begin, cause.end)):
                continue
            left, at = minus(left, piece), piece[0][0]
            lead = None if cause.launched is None else max(0.0, at - cause.launched) / 1000
            moment = cause.launched if trace.on_gpu and cause.launched is not None else at  # the CPU runs ahead
            begin, phase, which = (at - step.begin) / 1000, trace.phase_at(moment), _identity(cause)
            yield Gap(step.number, begin, length(piece) / 1000, phase, cause, lead, which == first, which == last)
        for begin, end in left:
            unknown = TraceSpan(begin, end, "communication without a name")
            yield Gap(step.number, (begin - step.begin) / 1000, (end - begin) / 1000, "", unknown)


def _identity(cause: TraceSpan) -> tuple[float | None, int | None, str]:
    """Of a collective: its launch and its wait are two spans."""
    return cause.flight, cause.label.bucket, cause.label.note
