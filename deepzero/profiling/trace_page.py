"""A trace's summary as one HTML file: the tables of the terminal, and plots; no script, nothing fetched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from deepzero.monitor.report import svg
from deepzero.monitor.report.html import document, figure, figures, legend, paragraph, section, table, text
from deepzero.profiling.trace_advice import advise
from deepzero.profiling.trace_events import Times, TraceSpan, TraceStep, computing, inside, times_of
from deepzero.profiling.trace_summary import TraceSummary
from deepzero.profiling.trace_text import COLUMNS, WIDEST, advice_line, between_ranks, heading, lead_in, mean, row
from deepzero.utils.formatting import short_bytes

NUMBERS = tuple(range(len(COLUMNS)))
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


def page(summaries: Sequence[TraceSummary]) -> str:
    """Returns the HTML page about all traces."""
    rows = [row(mean(summary), str(summary.trace.rank)) for summary in summaries]
    compared = between_ranks(summaries)
    return document(
        "What the trace means",
        "<h1>What the trace means</h1>"
        + paragraph(INTRODUCTION)
        + table(["rank", *COLUMNS[1:]], rows, NUMBERS)
        + (paragraph(compared) if compared else "")
        + "".join(_rank(summary, f"t{place}") for place, summary in enumerate(summaries)),
    )


def _rank(summary: TraceSummary, ident: str) -> str:
    steps, gaps = len(summary.steps), summary.groups()[:WIDEST]
    widest = max(summary.steps, key=lambda step: step.exposed)
    step = next(step for step in summary.trace.steps if step.number == widest.step)
    head = ["ms a step", "for", "in", "a step", "widest, ms"]
    lines = [
        (f"{gap.total / steps:.2f}", gap.what, gap.phase or "outside", f"{gap.count / steps:.3g}",
         f"{gap.widest.length:.2f}")
        for gap in gaps
    ]  # fmt: skip
    advice = "".join(f"<li>{text(advice_line(one))}</li>" for one in advise(summary))
    return section(
        heading(summary),
        paragraph(lead_in(summary)),
        table(COLUMNS, [*(row(step) for step in summary.steps), row(mean(summary), "mean")], NUMBERS),
        figure("Where the steps go", _steps(summary, ident), legend((name, c, "") for name, c in PARTS.items())),
        figure(f"Step {step.number}, over time", _timeline(summary, step, ident), _keys()),
        figures([_held(summary, ident)]),
        table(head, lines, (0, 3, 4)) if gaps else "",
        f"<p>What to try:</p><ul>{advice or '<li>Nothing: little of the steps is exposed.</li>'}</ul>",
    )


def _keys() -> str:
    return legend((name, colour, "") for name, colour in PHASES.items())


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
    end = max(step.length for step in summary.steps)
    return svg.lane_chart(f"{ident}-steps", "Where the steps go", "A bar for each step", lanes, end, "milliseconds")


def _timeline(summary: TraceSummary, step: TraceStep, ident: str) -> str:
    """Rows over the time of one step: phases, computing, communication, copies, exposed."""
    trace = summary.trace

    def plain(times: Times, colour: str) -> list[svg.Piece]:
        shown = inside(times, step.begin, step.end)
        return [((b - step.begin) / 1000, (e - step.begin) / 1000, colour, "") for b, e in shown]

    def named(spans: Iterable[TraceSpan], colour: str) -> list[svg.Piece]:
        kept = [span for span in spans if span.end > step.begin and span.begin < step.end]
        return [
            (*plain([(s.begin, s.end)], colour)[0][:3], f"{s.name}: {(s.end - s.begin) / 1000:.2f} ms")
            for s in kept
            if s.end > s.begin
        ]

    phases = [
        piece
        for verb, colour in PHASES.items()
        for piece in named([phase for phase in trace.phases if phase.label and phase.label.verb == verb], colour)
    ]
    lanes = [("phase", phases), ("compute", plain(computing(trace, step), "c1"))]
    if trace.device == "cpu":
        lanes.append(("operators", plain(trace.operators, "c5")))
    lanes.append(("communication", plain(times_of(trace.communication), "c8")))
    if trace.copies:
        lanes.append(("copies", named(trace.copies, "c2")))
    exposed = [
        (gap.begin, gap.begin + gap.length, "bad", f"{gap.what}: {gap.length:.2f} ms")
        for gap in reversed(summary.gaps)
        if gap.step == step.number
    ]
    lanes.append(("exposed", exposed))
    end, desc = (step.end - step.begin) / 1000, "What the rank did when; point at a piece to see what it is"
    return svg.lane_chart(f"{ident}-timeline", f"Step {step.number}", desc, lanes, end, "milliseconds")


def _held(summary: TraceSummary, ident: str) -> str:
    """The ledger's categories on top of each other. What is held between two samples is not seen."""
    samples = summary.trace.held
    names = [
        name for name in dict.fromkeys(n for _, held in samples for n in held) if any(h.get(name) for _, h in samples)
    ]
    layers = [
        svg.Layer(name, [held.get(name, 0.0) for _, held in samples], f"c{1 + place % 8}")
        for place, name in enumerate(names)
    ]
    times = [(moment - samples[0][0]) / 1000 for moment, _ in samples]
    title = "Bytes held, by category"
    drawn = svg.stacked_chart(f"{ident}-held", title, title, times, layers, (), "milliseconds", short_bytes)
    return figure(title, drawn, legend((one.name, one.colour, short_bytes(max(one.values))) for one in layers))
