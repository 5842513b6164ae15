"""A trace's summary as one HTML file: plots in SVG, no script, nothing that is fetched from anywhere."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from deepzero.profiling.trace_advice import advise
from deepzero.profiling.trace_events import Times, TraceSpan, TraceStep, computing, inside, times_of
from deepzero.profiling.trace_summary import TraceSummary
from deepzero.profiling.trace_text import COLUMNS, WIDEST, between_ranks, heading, lead_in, mean, row

WIDTH, LANE, BAR = 1000.0, 16.0, 18.0
"""Of a plot and its rows, in the units of its view box; it is as wide as the page."""
COLORS = {"compute": "#3b7dd8", "communication": "#9aa5b1", "exposed": "#d64545", "copies": "#e0a030"}
HELD_COLORS = ("#3b7dd8", "#6aa84f", "#e0a030", "#8e63ce", "#d64545", "#45818e", "#9aa5b1", "#c27ba0", "#7f6000")

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2733; background: #fff; margin: 0 auto; padding: 1rem;
  max-width: 1100px; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; overflow-wrap: anywhere; }
h3 { font-size: 1rem; margin: 1.4rem 0 .4rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .15rem .6rem; border-bottom: 1px solid #e3e7eb; white-space: nowrap; }
td.words, th.words { text-align: left; white-space: normal; min-width: 14rem; overflow-wrap: anywhere; }
tr.mean td { font-weight: 600; } svg { display: block; width: 100%; } code { overflow-wrap: anywhere; }
.key { display: inline-block; margin-right: 1.1rem; } .key i { display: inline-block; width: .8rem; height: .8rem;
  margin-right: .35rem; vertical-align: -1px; }
.bar { display: flex; align-items: center; gap: .5rem; margin: .25rem 0; }
.bar b { flex: 0 0 3.2rem; font-weight: 400; text-align: right; } .bar div { flex: 1; } .lane { display: flex;
  align-items: center; gap: .5rem; margin: 2px 0; } .lane b { flex: 0 0 6.4rem; font-weight: 400; font-size: .85rem;
  text-align: right; } .lane div { flex: 1; min-width: 0; } p.note { color: #55606c; font-size: .88rem; }
"""


def page(summaries: Sequence[TraceSummary]) -> str:
    """The whole page."""
    body = "".join(_rank(summary) for summary in summaries)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>What the trace means</title>'
        f"<style>{STYLE}</style></head><body><h1>What the trace means</h1>{_overview(summaries)}{body}</body></html>\n"
    )


def _overview(summaries: Sequence[TraceSummary]) -> str:
    rows = [[*row(mean(summary), str(summary.trace.rank))] for summary in summaries]
    head = ["rank", *COLUMNS[1:]]
    compared = between_ranks(summaries)
    return (
        "<p>Milliseconds of an average step. <em>Exposed</em>: communication or copies were under way, and the rank "
        "computed nothing meanwhile. <em>Overlap</em>: the part of what was under way that was hidden behind "
        f"computation.</p>{_table(head, rows)}" + (f"<p>{html.escape(compared)}</p>" if compared else "")
    )


def _rank(summary: TraceSummary) -> str:
    rows = [row(step) for step in summary.steps]
    gaps = summary.groups()
    widest = max(summary.steps, key=lambda step: step.exposed)
    step = next(step for step in summary.trace.steps if step.number == widest.step)
    advice = "".join(
        f"<li><strong>{a.milliseconds:.2f} ms a step.</strong> "
        + (f"<code>{html.escape(a.key)}</code>: {html.escape(a.direction)}. " if a.key else "")
        + f"{html.escape(a.reason[:1].upper() + a.reason[1:])}.</li>"
        for a in advise(summary)
    )
    return (
        f"<h2>{html.escape(heading(summary))}</h2><p>{html.escape(lead_in(summary))}</p>"
        f"{_table(COLUMNS, rows, row(mean(summary), 'mean'))}<h3>Where the steps go</h3>{_bars(summary)}"
        f"<h3>Step {step.number}, over time</h3>{_timeline(summary, step)}"
        + (f"<h3>Bytes held, by category</h3>{_held(summary)}" if len(summary.trace.held) > 1 else "")
        + (f"<h3>What it stood still for</h3>{_gap_table(summary)}" if gaps else "")
        + f"<h3>What to try</h3><ul>{advice or '<li>Nothing: little of the steps is exposed.</li>'}</ul>"
    )


def _table(head: Iterable[str], rows: Iterable[Sequence[str]], last: Sequence[str] | None = None) -> str:
    def cells(values: Iterable[str], tag: str) -> str:
        return "".join(f"<{tag}>{html.escape(value)}</{tag}>" for value in values)

    body = "".join(f"<tr>{cells(values, 'td')}</tr>" for values in rows)
    body += f'<tr class="mean">{cells(last, "td")}</tr>' if last is not None else ""
    return f'<div class="scroll"><table><tr>{cells(head, "th")}</tr>{body}</table></div>'


def _gap_table(summary: TraceSummary) -> str:
    steps = len(summary.steps)
    body = "".join(
        f'<tr><td>{group.total / steps:.2f}</td><td class="words">{html.escape(group.what)}</td>'
        f"<td>{group.phase or 'outside'}</td><td>{group.count / steps:.3g}</td><td>{group.widest.length:.2f}</td></tr>"
        for group in summary.groups()[:WIDEST]
    )
    head = '<tr><th>ms a step</th><th class="words">for</th><th>in</th><th>a step</th><th>widest, ms</th></tr>'
    return f'<div class="scroll"><table>{head}{body}</table></div>'


# ---- plots -----------------------------------------------------------------------------------------------------------


def _svg(height: float, content: str, title: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH:g} {height:g}" preserveAspectRatio="none" style="height:{height:g}px" role="img">'
        f"<title>{html.escape(title)}</title>{content}</svg>"
    )


def _rect(x: float, width: float, height: float, color: str, title: str = "") -> str:
    inner = f"<title>{html.escape(title)}</title>" if title else ""
    return f'<rect x="{x:.2f}" y="0" width="{max(width, 0.4):.2f}" height="{height:g}" fill="{color}">{inner}</rect>'


def _key(entries: dict[str, str]) -> str:
    spans = "".join(
        f'<span class="key"><i style="background:{c}"></i>{html.escape(n)}</span>' for n, c in entries.items()
    )
    return f'<p class="note">{spans}</p>'


def _bars(summary: TraceSummary) -> str:
    """One bar a step: computing alone, computing beside what was under way, exposed, neither."""
    longest = max(step.length for step in summary.steps)
    colors = {
        "computing alone": COLORS["compute"], "computing, communication or copies hidden": "#9cc3f5",
        "exposed": COLORS["exposed"], "neither": "#e9edf1",
    }  # fmt: skip
    bars = ""
    for step in summary.steps:
        alone = max(0.0, step.compute - step.hidden)
        parts = (alone, step.hidden, step.exposed, max(0.0, step.length - step.compute - step.exposed))
        x, content = 0.0, ""
        for (name, color), part in zip(colors.items(), parts, strict=True):
            width = part / longest * WIDTH
            content += _rect(x, width, BAR, color, f"{name}: {part:.2f} ms") if part > 0 else ""
            x += width
        bars += f'<div class="bar"><b>{step.step}</b><div>{_svg(BAR, content, f"step {step.step}")}</div></div>'
    return _key(colors) + bars


def _timeline(summary: TraceSummary, step: TraceStep) -> str:
    """Rows over the time of one step: phases, computing, communication, copies, exposed."""
    trace = summary.trace
    scale = WIDTH / (step.end - step.begin)

    def rects(times: Times, color: str) -> str:
        shown = inside(times, step.begin, step.end)
        return "".join(_rect((b - step.begin) * scale, (e - b) * scale, LANE, color) for b, e in shown)

    def named(spans: Iterable[TraceSpan], color: str) -> str:
        kept = [s for s in spans if s.end > step.begin and s.begin < step.end]
        return "".join(
            _rect(
                (max(s.begin, step.begin) - step.begin) * scale,
                (min(s.end, step.end) - max(s.begin, step.begin)) * scale,
                LANE, color, f"{s.name}: {(s.end - s.begin) / 1000:.2f} ms",
            )
            for s in kept
        )  # fmt: skip

    shades = {
        "forward": "#cfe3cf",
        "backward": "#bcd3ec",
        "boundary": "#f0d9b5",
        "agree": "#dcdcdc",
        "step": "#d8c9e8",
        "publish": "#f3c6c6",
    }
    phases = "".join(named([p for p in trace.phases if p.label and p.label.verb == v], c) for v, c in shades.items())
    gaps = "".join(
        _rect(
            gap.begin * 1000 * scale,
            gap.length * 1000 * scale,
            LANE,
            COLORS["exposed"],
            f"{gap.what}: {gap.length:.2f} ms",
        )
        for gap in reversed(summary.gaps)
        if gap.step == step.number
    )
    lanes = {"phase": phases, "compute": rects(computing(trace, step), COLORS["compute"])}
    if trace.device == "cpu":
        lanes["operators"] = rects(trace.operators, "#6fa3e8")
    lanes["communication"] = rects(times_of(trace.communication), COLORS["communication"])
    if trace.copies:
        lanes["copies"] = named(trace.copies, COLORS["copies"])
    lanes["exposed"] = gaps
    rows = "".join(f'<div class="lane"><b>{n}</b><div>{_svg(LANE, c, n)}</div></div>' for n, c in lanes.items())
    width = (
        f'<p class="note">The width is {(step.end - step.begin) / 1000:.2f} ms. Point at a piece to see what it is.</p>'
    )
    return _key(shades) + rows + width


def _held(summary: TraceSummary) -> str:
    """Stacked areas of the ledger's categories, as samples: a step at each."""
    samples, height = summary.trace.held, 140.0
    begin, end = samples[0][0], samples[-1][0]
    names = [
        name for name in dict.fromkeys(n for _, held in samples for n in held) if any(h.get(name) for _, h in samples)
    ]
    most = max(sum(held.values()) for _, held in samples) or 1.0
    scale = WIDTH / max(end - begin, 1e-9)
    base = [0.0] * len(samples)
    content, colors = "", {}
    for number, name in enumerate(names):
        color = HELD_COLORS[number % len(HELD_COLORS)]
        top = [low + held.get(name, 0) for low, (_, held) in zip(base, samples, strict=True)]
        x = [(moment - begin) * scale for moment, _ in samples]
        upper = _staircase(x, [height - value / most * height for value in top])
        lower = _staircase(x, [height - value / most * height for value in base])
        points = " ".join(f"{a:.2f},{b:.2f}" for a, b in [*upper, *reversed(lower)])
        largest = max(held.get(name, 0) for _, held in samples)
        content += f'<polygon points="{points}" fill="{color}"><title>{html.escape(name)}</title></polygon>'
        colors[f"{name} {_short(largest)}"] = color
        base = top
    marks = ", ".join(_short(most * part / 4) for part in (1, 2, 3))
    text = f"Upwards from 0 to {_short(most)}, the most at once, with lines at {marks}; to the right "
    text += f"{(end - begin) / 1000:.2f} ms."
    text += " What is held between two samples is not seen."
    lines = "".join(  # a quarter of the height each, so that a height can be read
        f'<line x1="0" x2="{WIDTH:g}" y1="{height * part / 4:g}" y2="{height * part / 4:g}" stroke="#1d2733" '
        f'stroke-opacity=".25" stroke-dasharray="4 4"/>'
        for part in range(1, 4)
    )
    return _key(colors) + _svg(height, content + lines, "bytes held") + f'<p class="note">{text}</p>'


def _staircase(x: Sequence[float], y: Sequence[float]) -> list[tuple[float, float]]:
    """A sample holds until the next one."""
    points = [(x[0], y[0])]
    for k in range(1, len(x)):
        points += [(x[k], y[k - 1]), (x[k], y[k])]
    return points


def _short(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
