"""Charts as SVG text: lines, stacked areas, bars, lanes. No data of a run is known here.

A chart is 400 units wide, so that its letters keep their size in a column of a wide page and on a telephone. Colours
are CSS variables, so that a page decides them, and may have another set in the dark. Each has a title and a
description, which are read aloud, and show up under a pointer.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import NamedTuple

from deepzero.monitor.report.html import legend, text

WIDTH, HEIGHT = 400.0, 220.0
LEFT, RIGHT, TOP, BOTTOM = 58.0, 12.0, 16.0, 34.0
BASE = HEIGHT - BOTTOM
MAX_POINTS = 400  # of a line; more than its pixels show nothing more

Point = tuple[float, float | None]
Piece = tuple[float, float, str, str]
"""Of a lane: begin, end, colour (name of a CSS variable), and what a pointer is told."""
Label = Callable[[float], str]


class Line(NamedTuple):
    """One series. A value that is None or not finite leaves a gap."""

    name: str
    points: Sequence[Point]
    colour: str  # name of a CSS variable, without dashes
    style: str = "solid"
    """``solid``, ``dashed``, ``dots`` for single values, or ``area``: on top of the areas before it, at the same
    instants; a value holds until the next one."""
    words: str = ""  # behind its name, in the legend


Bar = tuple[str, float, "float | None", str]  # name, value, what was expected of it, and a note


class Frame(NamedTuple):
    """From values to places in the picture."""

    x: tuple[float, float]
    y: tuple[float, float]

    def across(self, value: float) -> float:
        """Place of an x value."""
        return LEFT + (WIDTH - LEFT - RIGHT) * (value - self.x[0]) / (self.x[1] - self.x[0])

    def up(self, value: float) -> float:
        """Place of a y value; large is high, which in SVG is small."""
        return BASE - (BASE - TOP) * (value - self.y[0]) / (self.y[1] - self.y[0])

    def path(self, points: Iterable[Point]) -> str:
        """The points joined, with gaps."""
        words, verb = [], "M"
        for x, y in points:
            known = y is not None and math.isfinite(y)
            if known:
                words.append(f"{verb}{self.across(x):.1f} {self.up(y or 0.0):.1f}")
            verb = "L" if known else "M"
        return "".join(words)


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


def finite(points: Iterable[Point]) -> list[tuple[float, float]]:
    """Those that can be drawn."""
    return [(x, y) for x, y in points if y is not None and math.isfinite(x) and math.isfinite(y)]


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """At most about ``limit`` of them: of each stretch the lowest, the highest and a gap, so that no spike is lost."""
    if len(points) <= limit:
        return list(points)
    size, kept = math.ceil(2 * len(points) / limit), list[Point]()
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        known = finite(stretch)
        chosen: set[Point] = {min(known, key=itemgetter(1)), max(known, key=itemgetter(1))} if known else set()
        if len(known) < len(stretch):
            chosen.add(next(p for p in stretch if p[1] is None or not math.isfinite(p[1])))
        kept += sorted(chosen, key=itemgetter(0))
    return kept


def tag(name: str, body: str = "", **attributes: str | float) -> str:
    """An SVG element. Numbers get one decimal, and ``_`` in a name becomes ``-``; ``body`` is markup."""
    words = [
        f' {key.rstrip("_").replace("_", "-")}="{value if isinstance(value, str) else format(round(value, 1), "g")}"'
        for key, value in attributes.items()
    ]
    return f"<{name}{''.join(words)}>{body}</{name}>" if body else f"<{name}{''.join(words)}/>"


def figure(
    ident: str, title: str, desc: str, parts: Iterable[str], note: str, height: float = HEIGHT, width: float = WIDTH
) -> str:
    """A drawing with its title above, and a note (HTML) under it; ``ident`` is unique on the page."""
    style = "chart" if width == WIDTH else "chart full"
    return (
        f'<figure><b>{text(title)}</b><svg class="{style}" role="img" viewBox="0 0 {width:g} {height:g}" '
        f'aria-labelledby="{ident}-t {ident}-d"><title id="{ident}-t">{text(title)}</title>'
        f'<desc id="{ident}-d">{text(desc)}</desc>{"".join(parts)}</svg><figcaption>{note}</figcaption></figure>'
    )


def _x_axis(
    place: Callable[[float], float], values: Sequence[float], base: float, label: Label, width: float = WIDTH
) -> list[str]:
    parts = []
    for x, value in zip(map(place, values), values, strict=True):
        anchor = "end" if x > width - 30 else "middle"
        parts.append(tag("line", class_="axis", x1=x, x2=x, y1=base, y2=base + 4))
        parts.append(tag("text", text(label(value)), x=x, y=base + 15, text_anchor=anchor))
    return parts


def _axes(frame: Frame, x_name: str, x_label: Label, y_label: Label) -> list[str]:
    parts = _x_axis(frame.across, ticks(*frame.x, about=5), BASE, x_label)
    for value in ticks(*frame.y):
        y = frame.up(value)
        parts.append(tag("line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y))
        parts.append(tag("text", text(y_label(value)), x=LEFT - 5, y=y + 3.5, text_anchor="end"))
    parts.append(tag("line", class_="axis", x1=LEFT, x2=WIDTH - RIGHT, y1=BASE, y2=BASE))
    middle = (LEFT + WIDTH - RIGHT) / 2
    return [*parts, tag("text", text(x_name), x=middle, y=HEIGHT - 4, text_anchor="middle")]


def _stroke(line: Line, frame: Frame) -> str:
    """A line, or its single values as dots."""
    known, tip = finite(line.points), tag("title", text(line.name))
    colour = f"var(--{line.colour})"
    if line.style == "dots" or len(known) == 1:
        dots = (tag("circle", tip, cx=frame.across(x), cy=frame.up(y), r=3.2, fill=colour) for x, y in known)
        return "".join(dots)
    dash = {"stroke_dasharray": "5 3"} if line.style == "dashed" else {}
    return tag("path", tip, class_="line", d=frame.path(line.points), stroke=colour, **dash)


def _stairs(points: Sequence[tuple[float, float]]) -> list[Point]:
    """A value holds until the next one; stretches that are flat need no point in between."""
    places: list[Point] = [points[0]]
    for (_, before), (time, value) in itertools.pairwise(points):
        places += [(time, before), (time, value)] if value != before else []
    return [*places, points[-1]]


def _marks(marks: Sequence[tuple[float, str]], frame: Frame) -> list[str]:
    """Upright lines; words that would touch are written together."""
    parts, groups, last = [], list[tuple[float, list[str]]](), -WIDTH
    for time, word in marks:
        x = frame.across(time)
        parts.append(tag("line", class_="mark", x1=x, x2=x, y1=TOP, y2=BASE))
        if x - last < 24:
            groups[-1][1].append(word)
        else:
            groups.append((x, [word]))
        last = x
    for x, words in groups:
        anchor = "end" if x > WIDTH - 40 else "middle"
        parts.append(tag("text", text("·".join(words)), x=x, y=TOP - 5, text_anchor=anchor))
    return parts


def chart(
    ident: str,
    title: str,
    lines: Sequence[Line],
    x_name: str,
    y_label: Label,
    *,
    note: str = "",
    x_label: Label = "{:g}".format,
    zero: bool = False,
    crosses: Sequence[float] = (),
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """A figure of areas and lines, which lie over them, above one x axis; empty when there is nothing to draw.

    ``y_label`` and ``x_label`` make a tick's words, unit included; ``x_name`` stands under the axis. ``zero``: the y
    axis begins at zero, as it does with areas. ``crosses`` are x values that get a cross at the lower edge, ``marks``
    upright lines with a short word, in order. Under the picture stand a legend, unless there is one line without words,
    and ``note``, which is HTML.
    """
    known = [(line, found) for line in lines if (found := finite(line.points))]
    if not known:
        return ""
    desc = "; ".join(
        f"{line.name} from {y_label(ys[0])} to {y_label(ys[-1])}, largest {y_label(max(ys))}"
        for line, found in known
        for ys in [[y for _, y in found]]
    )
    areas = [found for line, found in known if line.style == "area"]
    tops = [[(x, 0.0) for x, _ in areas[0]]] if areas else []
    for found in areas:
        tops.append([(x, low + y) for (x, low), (_, y) in zip(tops[-1], found, strict=True)])
    heights = [y for found in (*(found for _, found in known), *tops) for _, y in found]
    times = [x for _, found in known for x, _ in found] + list(crosses) + [0.0] * bool(areas)
    frame = Frame(extent(times), extent(heights, zero or bool(areas)))
    parts = _axes(frame, x_name, x_label, y_label)
    for line, low, high in zip([line for line, _ in known if line.style == "area"], tops, tops[1:], strict=False):
        d = frame.path([*_stairs(high), *_stairs(low)[::-1]]) + "Z"
        parts.append(tag("path", tag("title", text(line.name)), class_="area", d=d, fill=f"var(--{line.colour})"))
    parts += _marks(marks, frame)
    parts += [_stroke(line._replace(points=thin(line.points)), frame) for line, _ in known if line.style != "area"]
    for at in dict.fromkeys(f"{frame.across(x) - 3:.1f}" for x in crosses):  # a long run's may lie on each other
        parts.append(tag("path", class_="cross", d=f"M{at} {BASE - 7:g}l6 6m0 -6l-6 6"))
    if len(lines) > 1 or lines[0].words:
        from_the_top = [line for line in reversed(lines) if line.style == "area"]
        order = [*from_the_top, *(line for line in lines if line.style != "area")]
        note = legend((line.name, line.colour, line.words) for line in order) + note
    return figure(ident, title, desc, parts, note)


def bar_chart(ident: str, title: str, bars: Sequence[Bar], note: str = "") -> str:
    """A figure of bars, each under its name, with a mark where it was expected to end; empty without bars."""
    if not bars:
        return ""
    scale = (WIDTH - 20) / (max(max(value, expected or 0.0) for _, value, expected, _ in bars) or 1.0)
    parts, row = [], 34.0
    for place, (name, value, expected, words) in enumerate(bars):
        top = 4 + place * row
        parts.append(tag("text", text(name), x=4, y=top + 11))
        parts.append(tag("text", text(words), x=WIDTH - 4, y=top + 11, text_anchor="end"))
        tip, width = tag("title", text(f"{name}: {words}")), max(1.0, scale * value)
        parts.append(tag("rect", tip, x=4, y=top + 16, width=width, height=11, rx=2, fill="var(--c1)"))
        if expected is not None:
            x = 4 + scale * expected
            parts.append(tag("line", class_="expected", x1=x, x2=x, y1=top + 13, y2=top + 30))
    desc = "; ".join(f"{name}: {words}" for name, _, _, words in bars)
    return figure(ident, title, desc, parts, note, 8 + row * len(bars))


def lane_chart(
    ident: str, title: str, lanes: Sequence[tuple[str, Sequence[Piece]]], end: float, x_name: str, note: str
) -> str:
    """A figure of lanes with names, one below the other, over one axis from 0 to ``end``; as wide as the page."""
    wide, left, high = 1000.0, 100.0, 18.0
    scale, base = (wide - left - RIGHT) / end, high * len(lanes)
    parts = []
    for place, (name, pieces) in enumerate(lanes):
        top = place * high
        parts.append(tag("text", text(name), x=left - 6, y=top + 12, text_anchor="end"))
        for begin, stop, colour, words in pieces:
            x, width = f"{left + begin * scale:.2f}", f"{max((stop - begin) * scale, 0.4):.2f}"
            tip = tag("title", text(words)) if words else ""
            parts.append(tag("rect", tip, x=x, y=top + 1, width=width, height=high - 2, fill=f"var(--{colour})"))
    parts += _x_axis(lambda value: left + value * scale, ticks(0.0, end, about=8), base, "{:g}".format, wide)
    parts.append(tag("text", text(x_name), x=left - 6, y=base + 15, text_anchor="end"))
    desc = f"{', '.join(name for name, _ in lanes)}; point at a piece to see what it is"
    return figure(ident, title, desc, parts, note, base + 20, wide)
