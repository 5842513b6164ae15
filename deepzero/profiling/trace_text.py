"""A trace's summary for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from deepzero.profiling.trace_advice import Advice, advise
from deepzero.profiling.trace_summary import GapKind, StepTimes, TraceSummary

WIDEST = 8
APART = 0.05
"""Of a step: ranks whose work differs by less are called equal."""
COLUMNS = ("step", "length", "compute", "operators", "commun.", "copies", "exposed", "overlap")


def heading(summary: TraceSummary) -> str:
    """A line that names rank, device and file."""
    trace = summary.trace
    of = f" of {trace.world_size}" if trace.world_size else ""
    return f"rank {trace.rank}{of}, {'GPU' if trace.device == 'cuda' else 'CPU'}, {trace.path.name}"


def row(step: StepTimes, name: str = "") -> list[str]:
    """One step's cells under :data:`COLUMNS`, milliseconds."""
    numbers = (step.length, step.compute, step.operators, step.communication, step.copies, step.exposed)
    overlap = "-" if step.overlap is None else f"{step.overlap:.0%}"
    return [name or str(step.step), *(f"{number:.2f}" for number in numbers), overlap]


def mean(summary: TraceSummary) -> StepTimes:
    """The average step; its overlap is that of all steps together."""
    count = len(summary.steps)
    names = (
        "length", "compute", "operators", "communication", "copies", "under_way", "exposed", "exposed_copies",
        "host_steps",
    )  # fmt: skip
    return StepTimes(-1, *(summary.total(name) / count for name in names))


def gap_line(group: GapKind, steps: int) -> str:
    """One origin of gaps: how much of a step, in which phase, for what."""
    phase = group.phase or "outside"
    wide = f"widest {group.widest.length:.2f} in step {group.widest.step}"
    return f"{group.total / steps:9.2f}  {phase:<8}  {group.what}; {group.count / steps:.3g} a step, {wide}"


def advice_line(advice: Advice) -> str:
    """One setting, and why."""
    what = f"{advice.key}: {advice.direction}. " if advice.key else ""
    return f"{advice.milliseconds:.2f} ms a step. {what}{advice.reason[:1].upper()}{advice.reason[1:]}."


def lead_in(summary: TraceSummary) -> str:
    """One sentence: how long the rank stood still, and how much was hidden."""
    average = mean(summary)
    if average.under_way == 0:
        return "Nothing was sent or copied in these steps."
    return (
        f"Of {average.length:.2f} ms a step the rank stood still for {average.exposed:.2f} ms "
        f"({average.exposed / average.length:.0%}); of what was under way {average.overlap or 0:.0%} was hidden."
    )


def between_ranks(summaries: Sequence[TraceSummary]) -> str:
    """Which rank the others wait for, in a sentence; empty for the traces of one rank.

    Steps are equally long on all ranks, since collectives hold them together. Who stands still for collectives the
    least is waited for; to copies between its host and device a rank gives time as to computing.
    """
    found: dict[int, list[StepTimes]] = {}
    for summary in summaries:
        found.setdefault(summary.trace.rank, []).append(mean(summary))
    if len(found) < 2:
        return ""
    busy = {
        rank: sum(step.length - step.exposed + step.exposed_copies for step in steps) / len(steps)
        for rank, steps in found.items()
    }
    slowest, quickest = max(busy, key=busy.__getitem__), min(busy, key=busy.__getitem__)
    ahead, whole = busy[slowest] - busy[quickest], max(step.length for steps in found.values() for step in steps)
    if ahead < APART * whole:
        return f"No rank holds up the others: at work for {busy[quickest]:.2f} to {busy[slowest]:.2f} ms a step."
    return (
        f"Rank {slowest} is at work the longest, for {busy[slowest]:.2f} ms of {whole:.2f} ms a step, rank {quickest} "
        f"the least, for {busy[quickest]:.2f} ms: for up to {ahead:.2f} ms of it the others wait for rank {slowest}."
    )


def render(summaries: Sequence[TraceSummary]) -> str:
    """All traces, one after the other; times in milliseconds."""
    compared = between_ranks(summaries)
    return "\n\n".join([*([compared] if compared else []), *(_one(summary) for summary in summaries)])


def _one(summary: TraceSummary) -> str:
    rows = [list(COLUMNS), *(row(step) for step in summary.steps), row(mean(summary), "mean")]
    widths = [max(len(cells[k]) for cells in rows) for k in range(len(COLUMNS))]
    table = ["  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)) for cells in rows]
    lines = [heading(summary), f"  {lead_in(summary)}", "", *(f"  {line}" for line in table)]
    groups = summary.groups()
    if groups:
        lines += ["", "  what it stood still for, milliseconds of an average step:"]
        lines += [gap_line(group, len(summary.steps)) for group in groups[:WIDEST]]
        rest = groups[WIDEST:]
        if rest:
            left = sum(group.total for group in rest) / len(summary.steps)
            lines.append(f"{left:9.2f}  in {len(rest)} other places")
    found = advise(summary)
    lines += ["", "  what to try:"]
    lines += [f"  - {advice_line(advice)}" for advice in found] or ["  - nothing: little of the steps is exposed"]
    return "\n".join(lines)
