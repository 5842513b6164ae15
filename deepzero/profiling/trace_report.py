"""A trace's summary for the terminal, and as one HTML file with plots: no script, nothing fetched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from deepzero.monitor.report import svg
from deepzero.monitor.report.html import document, figures, legend, paragraph, section, table, text
from deepzero.profiling.trace_advice import advise
from deepzero.profiling.trace_events import Times, TraceSpan, inside, times_of
from deepzero.profiling.trace_summary import StepTimes, TraceSummary
from deepzero.utils.formatting import short_bytes, text_columns

WIDEST = 8
APART = 0.05  # of a step: ranks whose work differs by less are called equal
COLUMNS = ("step", "length", "compute", "operators", "commun.", "copies", "exposed", "overlap")
NOTHING = "nothing: little of the steps is exposed"
PARTS = {
    "computing alone": "c1",
    "computing, communication or copies hidden": "c5",
    "exposed": "bad",
    "neither": "rule",
}
PHASES = {"forward": "c3", "backward": "c1", "boundary": "c2", "agree": "c8", "step": "c7", "publish": "c4"}
INTRODUCTION = (
    "Milliseconds of an average step. Exposed: communication or copies were under way, and the rank computed nothing "
    "meanwhile. Overlap: the part of what was under way that was hidden behind computation."
)


def between_ranks(summaries: Sequence[TraceSummary]) -> str:
    """Which rank the others wait for, in a sentence; empty for the traces of one rank.

    Steps are equally long on all ranks, since collectives hold them together. Who stands still for collectives the
    least is waited for; to copies between its host and device a rank gives time as to computing.
    """
    found: dict[int, list[float]] = {}
    for summary in summaries:
        mean = summary.mean
        found.setdefault(summary.trace.rank, []).append(mean.length - mean.exposed + mean.exposed_copies)
    if len(found) < 2:
        return ""
    busy = {rank: sum(times) / len(times) for rank, times in found.items()}
    slowest, quickest = max(busy, key=busy.__getitem__), min(busy, key=busy.__getitem__)
    ahead, whole = busy[slowest] - busy[quickest], max(summary.mean.length for summary in summaries)
    if ahead < APART * whole:
        return f"No rank holds up the others: at work for {busy[quickest]:.2f} to {busy[slowest]:.2f} ms a step."
    return (
        f"Rank {slowest} is at work the longest, for {busy[slowest]:.2f} ms of {whole:.2f} ms a step, rank {quickest} "
        f"the least, for {busy[quickest]:.2f} ms: for up to {ahead:.2f} ms of it the others wait for rank {slowest}."
    )


def _heading(summary: TraceSummary) -> str:
    trace = summary.trace
    of = f" of {trace.world_size}" if trace.world_size else ""
    return f"rank {trace.rank}{of}, {'GPU' if trace.on_gpu else 'CPU'}, {trace.path.name}"


def _lead_in(summary: TraceSummary) -> str:
    """How long the rank stood still, and how much was hidden."""
    mean = summary.mean
    if mean.under_way == 0:
        return "Nothing was sent or copied in these steps."
    return (
        f"Of {mean.length:.2f} ms a step the rank stood still for {mean.exposed:.2f} ms "
        f"({mean.exposed / mean.length:.0%}); of what was under way {mean.overlap or 0:.0%} was hidden."
    )


def _row(step: StepTimes, name: str = "") -> list[str]:
    """One step's cells under :data:`COLUMNS`, milliseconds."""
    numbers = (step.length, step.compute, step.operators, step.communication, step.copies, step.exposed)
    overlap = "-" if step.overlap is None else f"{step.overlap:.0%}"
    return [name or str(step.step), *(f"{number:.2f}" for number in numbers), overlap]


def _rows(summary: TraceSummary) -> list[list[str]]:
    return [*map(_row, summary.steps), _row(summary.mean, "mean")]


def _waits(summary: TraceSummary) -> list[list[str]]:
    """What the rank stood still for: the head and the widest rows of a table, milliseconds of an average step."""
    steps, groups, rows = len(summary.steps), summary.groups(), []
    for gaps, total in groups[:WIDEST]:
        widest, collectives = gaps[0], len({gap.collective for gap in gaps})
        often = [f"{total / steps:.2f}", f"{collectives / steps:.3g}"]
        rows.append([widest.phase or "outside", widest.cause.what, *often, f"{widest.length:.2f}", str(widest.step)])
    if rest := groups[WIDEST:]:
        total = sum(total for _, total in rest)
        rows.append(["", f"in {len(rest)} other places", f"{total / steps:.2f}", "", "", ""])
    return [["in", "stood still for", "ms a step", "a step", "widest, ms", "in step"], *rows] if rows else []


def _advice(summary: TraceSummary) -> list[str]:
    lines = []
    for key, direction, reason, milliseconds in advise(summary):
        what = f"{key}: {direction}. " if key else ""
        lines.append(f"{milliseconds:.2f} ms a step. {what}{reason[:1].upper()}{reason[1:]}.")
    return lines


# ---- for the terminal ------------------------------------------------------------------------------------------------


def render(summaries: Sequence[TraceSummary]) -> str:
    """All traces, one after the other; times in milliseconds."""
    return "\n\n".join(filter(None, [between_ranks(summaries), *map(_one, summaries)]))


def _one(summary: TraceSummary) -> str:
    table_of_steps = text_columns([COLUMNS, *_rows(summary)], left=0)
    lines = [_heading(summary), f"  {_lead_in(summary)}", "", *(f"  {line}" for line in table_of_steps)]
    if waits := _waits(summary):
        lines += ["", *(f"  {line.rstrip()}" for line in text_columns(waits, left=2))]
    return "\n".join([*lines, "", "  what to try:", *(f"  - {line}" for line in _advice(summary) or [NOTHING])])


# ---- as a page -------------------------------------------------------------------------------------------------------


def page(summaries: Sequence[TraceSummary]) -> str:
    """Returns the HTML page about all traces."""
    rows = [_row(summary.mean, str(summary.trace.rank)) for summary in summaries]
    return document("What the trace means", [
        "<h1>What the trace means</h1>",
        paragraph(INTRODUCTION),
        table(["rank", *COLUMNS[1:]], rows, range(len(COLUMNS))),
        paragraph(between_ranks(summaries)),
        *(_rank(summary, f"t{place}") for place, summary in enumerate(summaries)),
    ])  # fmt: skip


def _rank(summary: TraceSummary, ident: str) -> str:
    waits = _waits(summary)
    advice = "".join(f"<li>{text(line)}</li>" for line in _advice(summary) or [f"{NOTHING.capitalize()}."])
    return section(
        _heading(summary),
        paragraph(_lead_in(summary)),
        table(COLUMNS, _rows(summary), range(len(COLUMNS))),
        _steps(summary, ident),
        _timeline(summary, ident),
        figures([_held(summary, ident)]),
        table(waits[0], waits[1:], range(2, 6)) if waits else "",
        f"<p>What to try:</p><ul>{advice}</ul>",
    )


def _steps(summary: TraceSummary, ident: str) -> str:
    """One bar a step: computing alone, computing beside what was under way, exposed, neither."""
    lanes = []
    for step in summary.steps:
        alone, left = max(0.0, step.compute - step.hidden), max(0.0, step.length - step.compute - step.exposed)
        pieces, at = [], 0.0
        for (name, colour), part in zip(PARTS.items(), (alone, step.hidden, step.exposed, left), strict=True):
            pieces.append((at, at + part, colour, f"{name}: {part:.2f} ms"))
            at += part
        lanes.append((str(step.step), pieces))
    end, note = max(step.length for step in summary.steps), legend((name, c, "") for name, c in PARTS.items())
    return svg.lane_chart(f"{ident}-steps", "Where the steps go", lanes, end, "milliseconds", note)


def _timeline(summary: TraceSummary, ident: str) -> str:
    """Rows over the time of the step that has the most exposed: phases, computing, communication, copies, exposed."""
    trace, worst = summary.trace, max(summary.steps, key=lambda step: step.exposed).step
    step = next(step for step in trace.steps if step.number == worst)

    def plain(times: Times, colour: str, words: str = "") -> list[svg.Piece]:
        shown = inside(times, step.begin, step.end)
        return [((b - step.begin) / 1000, (e - step.begin) / 1000, colour, words) for b, e in shown]

    def named(spans: Iterable[TraceSpan], colour: str) -> list[svg.Piece]:
        said = ((s, f"{s.name}: {(s.end - s.begin) / 1000:.2f} ms") for s in spans)
        return [piece for s, words in said for piece in plain([(s.begin, s.end)], colour, words)]

    of_phases = ((colour, [p for p in trace.phases if p.label.verb == verb]) for verb, colour in PHASES.items())
    phases = [piece for colour, spans in of_phases for piece in named(spans, colour)]
    exposed = [
        (gap.begin, gap.begin + gap.length, "bad", f"{gap.cause.what}: {gap.length:.2f} ms")
        for gap in reversed(summary.gaps)
        if gap.step == step.number
    ]
    lanes = {
        "phase": phases,
        "compute": plain(trace.computing(step), "c1"),
        "operators": plain(trace.operators, "c5"),
        "communication": plain(times_of(trace.communication), "c8"),
        "copies": named(trace.copies, "c2"),
        "exposed": exposed,
    }
    shown = [(name, pieces) for name, pieces in lanes.items() if pieces or name not in ("operators", "copies")]
    end, note = (step.end - step.begin) / 1000, legend((name, colour, "") for name, colour in PHASES.items())
    return svg.lane_chart(f"{ident}-timeline", f"Step {step.number}, over time", shown, end, "milliseconds", note)


def _held(summary: TraceSummary, ident: str) -> str:
    """The ledger's categories on top of each other. What is held between two samples is not seen."""
    if len(samples := summary.trace.held) < 2:
        return ""
    begin, lines = samples[0][0], list[svg.Line]()
    names = dict.fromkeys(name for _, held in samples for name, size in held.items() if size)
    for place, name in enumerate(names):
        sizes = [((at - begin) / 1000, held.get(name, 0.0)) for at, held in samples]
        most = short_bytes(max(size for _, size in sizes))
        lines.append(svg.Line(name, sizes, f"c{1 + place % 8}", "area", most))
    return svg.chart(f"{ident}-held", "Bytes held, by category", lines, "milliseconds", short_bytes)
