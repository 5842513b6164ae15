"""Charts as SVG text: axes, lines, stacked areas, bars. No data of a run is known here.

A chart is 400 units wide, so that its letters keep their size in a column of a wide page and on a telephone. Colours
are CSS variables, so that a page decides them, and may have another set in the dark. Each has a title and a
description, which are read aloud, and show up under a pointer.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter

from deepzero.monitor.report.html import text

WIDTH, HEIGHT = 400.0, 220.0
LEFT, RIGHT, TOP, BOTTOM = 58.0, 12.0, 16.0, 34.0
MAX_POINTS = 400
"""Of a line; more than its pixels show nothing more."""

Points = Sequence[tuple[float, float | None]]
Piece = tuple[float, float, str, str]
"""Of a lane: begin, end, colour (name of a CSS variable), and what a pointer is told."""
Label = Callable[[float], str]


@dataclass(frozen=True)
class Line:
    """One series. A value that is None or not finite leaves a gap."""

    name: str
    points: Points
    colour: str
    """Name of a CSS variable, without dashes."""
    style: str = "solid"
    """``solid``, ``dashed``, or ``dots`` for single values."""


@dataclass(frozen=True)
class Layer:
    """One layer of a stack: a value for each instant, that holds until the next."""

    name: str
    values: Sequence[float]
    colour: str


@dataclass(frozen=True)
class Bar:
    """One bar, and what was expected of it."""

    name: str
    value: float
    expected: float | None
    note: str


@dataclass(frozen=True)
class Frame:
    """From values to places in the picture."""

    x: tuple[float, float]
    y: tuple[float, float]

    def across(self, value: float) -> float:
        """Place of an x value."""
        return LEFT + (WIDTH - LEFT - RIGHT) * (value - self.x[0]) / (self.x[1] - self.x[0])

    def up(self, value: float) -> float:
        """Place of a y value; large is high, which in SVG is small."""
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - self.y[0]) / (self.y[1] - self.y[0])


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers from ``low`` to ``high``, about so many and at least two: steps of 1, 2 or 5 times a power of ten.

    Example:
        >>> ticks(0, 9.3), ticks(1.97, 2.31), ticks(5, 5)
        ([0.0, 2.0, 4.0, 6.0, 8.0], [2.0, 2.1, 2.2, 2.3], [5.0])
    """
    raw = (high - low) / (about + 2)
    if not raw > sys.float_info.min:  # also where the range is so small that its power of ten would be 0
        return [float(low)]
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((size * power for size in (1, 2, 5) if raw <= size * power * (1 + 1e-9)), 10 * power)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    digits = max(0, 1 - math.floor(math.log10(step)))
    return [round(k * step, digits) for k in range(first, last + 1)]


def extent(values: Sequence[float], zero: bool = False) -> tuple[float, float]:
    """The least and the greatest, apart even where all are equal; with ``zero`` it begins there."""
    low, high = (0.0 if zero and min(values) >= 0 else min(values)), max(values)
    if high > low:
        return low, high
    gap = abs(high) * 0.1 or 1.0
    return (low, high + gap) if zero and low == 0 else (low - gap, high + gap)


def finite(points: Points) -> list[tuple[float, float]]:
    """Those that can be drawn."""
    return [(x, y) for x, y in points if y is not None and math.isfinite(x) and math.isfinite(y)]


def thin(points: Points, limit: int = MAX_POINTS) -> list[tuple[float, float | None]]:
    """At most about ``limit`` of them: of each stretch the lowest, the highest and a gap, so that no spike is lost."""
    if len(points) <= limit:
        return list(points)
    size, kept = math.ceil(2 * len(points) / limit), []
    for start in range(0, len(points), size):
        stretch = list(points[start : start + size])
        known = finite(stretch)
        chosen: list[tuple[float, float | None]] = []
        if known:
            chosen = [min(known, key=itemgetter(1)), max(known, key=itemgetter(1))]
        if len(known) < len(stretch):
            chosen.append(next(p for p in stretch if p[1] is None or not math.isfinite(p[1])))
        kept += sorted(set(chosen), key=lambda p: p[0])
    return kept


def _path(points: Points, frame: Frame) -> str:
    words, pen_down = [], False
    for x, y in points:
        if y is None or not math.isfinite(y):
            pen_down = False
            continue
        words.append(f"{'L' if pen_down else 'M'}{frame.across(x):.1f} {frame.up(y):.1f}")
        pen_down = True
    return "".join(words)


def picture(ident: str, title: str, desc: str, body: str, height: float = HEIGHT, width: float = WIDTH) -> str:
    """The ``svg`` element around a drawing; ``ident`` is unique on the page."""
    style = "chart" if width == WIDTH else "chart full"
    return (
        f'<svg class="{style}" role="img" viewBox="0 0 {width:g} {height:g}" aria-labelledby="{ident}-t {ident}-d">'
        f'<title id="{ident}-t">{text(title)}</title><desc id="{ident}-d">{text(desc)}</desc>{body}</svg>'
    )


def axes(frame: Frame, x_name: str, x_label: Label, y_label: Label) -> str:
    """Grid, ticks and their labels."""
    parts = []
    for value in ticks(*frame.y):
        y = frame.up(value)
        parts.append(f'<line class="grid" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 5:g}" y="{y + 3.5:.1f}" text-anchor="end">{text(y_label(value))}</text>')
    base = HEIGHT - BOTTOM
    for value in ticks(*frame.x, about=5):
        x = frame.across(value)
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{base:g}" y2="{base + 4:g}"/>')
        anchor = "end" if x > WIDTH - 30 else "middle"
        parts.append(f'<text x="{x:.1f}" y="{base + 15:g}" text-anchor="{anchor}">{text(x_label(value))}</text>')
    parts.append(f'<line class="axis" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{base:g}" y2="{base:g}"/>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle:g}" y="{HEIGHT - 4:g}" text-anchor="middle">{text(x_name)}</text>')
    return "".join(parts)


def _stroke(line: Line, frame: Frame) -> str:
    """A line, or its single values as dots."""
    points = thin(line.points)
    known = finite(points)
    tip = f"<title>{text(line.name)}</title>"
    if line.style == "dots" or len(known) == 1:
        return "".join(
            f'<circle cx="{frame.across(x):.1f}" cy="{frame.up(y):.1f}" r="3.2" fill="var(--{line.colour})">{tip}'
            "</circle>" for x, y in known
        )  # fmt: skip
    dash = ' stroke-dasharray="5 3"' if line.style == "dashed" else ""
    return f'<path class="line" d="{_path(points, frame)}" stroke="var(--{line.colour})"{dash}>{tip}</path>'


def line_chart(
    ident: str,
    title: str,
    desc: str,
    lines: Sequence[Line],
    x_name: str,
    y_label: Label,
    *,
    x_label: Label = "{:g}".format,
    zero: bool = False,
    crosses: Sequence[float] = (),
) -> str:
    """Lines over one x axis; the empty string when there is nothing to draw.

    Args:
        ident: unique on the page.
        title: read aloud.
        desc: the same, longer.
        lines: what is drawn.
        x_name: under the axis.
        y_label: a tick's words, unit included.
        x_label: the same for x.
        zero: the y axis begins at zero.
        crosses: x values that get a cross at the lower edge.
    """
    known = [point for line in lines for point in finite(line.points)]
    if not known:
        return ""
    frame = Frame(extent([x for x, _ in known] + list(crosses)), extent([y for _, y in known], zero))
    base = HEIGHT - BOTTOM
    body = axes(frame, x_name, x_label, y_label) + "".join(_stroke(line, frame) for line in lines)
    for at in dict.fromkeys(f"{frame.across(x) - 3:.1f}" for x in crosses):  # a long run's may lie on each other
        body += f'<path class="cross" d="M{at} {base - 7:g}l6 6m0 -6l-6 6"/>'
    return picture(ident, title, desc, body)


def stacked_chart(
    ident: str,
    title: str,
    desc: str,
    times: Sequence[float],
    layers: Sequence[Layer],
    outlines: Sequence[Line],
    x_name: str,
    y_label: Label,
    *,
    x_label: Label = "{:g}".format,
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """Areas on top of each other, in steps, with outlines over them; the empty string without two instants.

    Args:
        ident: unique on the page.
        title: read aloud.
        desc: the same, longer.
        times: of the values of every layer.
        layers: the lowest first.
        outlines: drawn over the areas, as they are.
        x_name: under the axis.
        y_label: a tick's words, unit included.
        x_label: the same for x.
        marks: upright lines with a short word, in order.
    """
    if len(times) < 2 or not layers:
        return ""
    sums = [sum(values) for values in zip(*(layer.values for layer in layers), strict=True)]
    over = [y for line in outlines for _, y in finite(line.points)]
    frame = Frame(extent([0.0, *times]), extent([0.0, *sums, *over], zero=True))
    low, areas = [0.0] * len(times), []
    for layer in layers:
        high = [a + b for a, b in zip(low, layer.values, strict=True)]
        upper, lower = _stairs(times, high, frame), _stairs(times, low, frame)[::-1]
        d = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in upper + lower) + "Z"
        areas.append(
            f'<path class="area" d="{d}" fill="var(--{layer.colour})"><title>{text(layer.name)}</title></path>'
        )
        low = high
    body = axes(frame, x_name, x_label, y_label) + "".join(areas) + _marks(marks, frame)
    return picture(ident, title, desc, body + "".join(_stroke(line, frame) for line in outlines))


def _stairs(times: Sequence[float], values: Sequence[float], frame: Frame) -> list[tuple[float, float]]:
    """A value holds until the next one; stretches that are flat need no point in between."""
    places = [(frame.across(times[0]), frame.up(values[0]))]
    for time, before, value in zip(times[1:], values, values[1:], strict=False):
        if value != before:
            places += [(frame.across(time), frame.up(before)), (frame.across(time), frame.up(value))]
    return [*places, (frame.across(times[-1]), frame.up(values[-1]))]


def _marks(marks: Sequence[tuple[float, str]], frame: Frame) -> str:
    """Upright lines; words that would touch are written together."""
    parts, groups, last = [], list[tuple[float, list[str]]](), -WIDTH
    for time, word in marks:
        x = frame.across(time)
        parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP:g}" y2="{HEIGHT - BOTTOM:g}"/>')
        if x - last < 24:
            groups[-1][1].append(word)
        else:
            groups.append((x, [word]))
        last = x
    for x, words in groups:
        anchor = "end" if x > WIDTH - 40 else "middle"
        parts.append(f'<text x="{x:.1f}" y="{TOP - 5:g}" text-anchor="{anchor}">{text("·".join(words))}</text>')
    return "".join(parts)


def bar_chart(ident: str, title: str, desc: str, bars: Sequence[Bar], label: Label) -> str:
    """Bars from the left, each under its name, with a mark where it was expected to end; empty without bars."""
    if not bars:
        return ""
    most = max(max(bar.value, bar.expected or 0.0) for bar in bars) or 1.0
    parts, row, wide = [], 34.0, WIDTH - 20
    for place, bar in enumerate(bars):
        top = 4 + place * row
        parts.append(f'<text x="4" y="{top + 11:g}">{text(bar.name)}</text>')
        parts.append(f'<text x="{WIDTH - 4:g}" y="{top + 11:g}" text-anchor="end">{text(bar.note)}</text>')
        parts.append(
            f'<rect x="4" y="{top + 16:g}" width="{max(1.0, wide * bar.value / most):.1f}" height="11" rx="2"'
            f' fill="var(--c1)"><title>{text(bar.name)}: {text(label(bar.value))}</title></rect>'
        )
        if bar.expected is not None:
            x = 4 + wide * bar.expected / most
            parts.append(f'<line class="expected" x1="{x:.1f}" x2="{x:.1f}" y1="{top + 13:g}" y2="{top + 30:g}"/>')
    return picture(ident, title, desc, "".join(parts), 8 + row * len(bars))


def lane_chart(
    ident: str, title: str, desc: str, lanes: Sequence[tuple[str, Sequence[Piece]]], end: float, x_name: str
) -> str:
    """Lanes with names, one below the other, over one axis from 0 to ``end``; as wide as the page."""
    wide, left, high = 1000.0, 100.0, 18.0
    scale, base = (wide - left - RIGHT) / end, high * len(lanes)
    parts = []
    for place, (name, pieces) in enumerate(lanes):
        top = place * high
        parts.append(f'<text x="{left - 6:g}" y="{top + 12:g}" text-anchor="end">{text(name)}</text>')
        for begin, stop, colour, words in pieces:
            size = f'x="{left + begin * scale:.2f}" width="{max((stop - begin) * scale, 0.4):.2f}"'
            tip = f"<title>{text(words)}</title>" if words else ""
            parts.append(f'<rect {size} y="{top + 1:g}" height="{high - 2:g}" fill="var(--{colour})">{tip}</rect>')
    for value in ticks(0.0, end, about=8):
        x = left + value * scale
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{base:g}" y2="{base + 4:g}"/>')
        parts.append(f'<text x="{x:.1f}" y="{base + 15:g}" text-anchor="middle">{value:g}</text>')
    parts.append(f'<text x="{left - 6:g}" y="{base + 15:g}" text-anchor="end">{text(x_name)}</text>')
    return picture(ident, title, desc, "".join(parts), base + 20, wide)
