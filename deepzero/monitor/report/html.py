"""HTML's frame: one file that holds its style, asks nobody for anything, and needs no script.

All that comes from a run goes through :func:`text` before it becomes HTML; a sample or an error may hold anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from deepzero.monitor.terminal import printable

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1b1f24; --soft: #5b6470; --rule: #d9dee4; --box: #f5f7f9;
  --c1: #0072b2; --c2: #d98f00; --c3: #009e73; --c4: #cc79a7; --c5: #56b4e9; --c6: #d55e00; --c7: #7a5cc0;
  --c8: #8a929b; --good: #1a7f37; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171b; --ink: #e6e9ec; --soft: #a2abb5; --rule: #353c44;
  --box: #1d2228; --c1: #4da6e0; --c2: #f0b13c; --c3: #2fc79a; --c4: #e09cc3; --c5: #8fd0f7; --c6: #f5853d;
  --c7: #a98fe8; --c8: #7d8791; --good: #57c46f; --bad: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1240px; padding: 20px 16px 48px; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .3rem; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .5rem; border-bottom: 1px solid var(--rule); padding-bottom: .2rem; }
p, ul { margin: .4rem 0; max-width: 78ch; }
.lead { font-size: 1.1rem; }
.soft, figcaption p, .legend { color: var(--soft); }
.status { font-weight: 600; }
.good { color: var(--good); } .bad { color: var(--bad); }
.cards, .figures { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 170px), 1fr)); }
.cards { margin: 1rem 0; }
.card { background: var(--box); border-radius: 8px; padding: 10px 12px; }
.card b { display: block; font-size: 1.25rem; line-height: 1.3; }
.card span { color: var(--soft); font-size: .85rem; }
.figures { grid-template-columns: repeat(auto-fill, minmax(min(100%, 380px), 1fr)); gap: 20px; margin: .6rem 0; }
.figures.large { grid-template-columns: repeat(auto-fill, minmax(min(100%, 440px), 1fr)); }
figure { margin: 0; min-width: 0; }
figure b { font-size: .95rem; }
figcaption { font-size: .85rem; }
.chart { display: block; width: 100%; max-width: 620px; height: auto; font: 11px system-ui, sans-serif; }
.chart.full { max-width: none; } .chart text { fill: var(--soft); }
.grid { stroke: var(--rule); stroke-width: 1; }
.axis, .mark { stroke: var(--soft); stroke-width: 1; } .mark { stroke-dasharray: 2 2; }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.cross { fill: none; stroke: var(--bad); stroke-width: 1.6; }
.expected { stroke: var(--ink); stroke-width: 2.5; }
.legend { list-style: none; margin: 2px 0; padding: 0; display: flex; flex-wrap: wrap; gap: 0 14px; font-size: .85rem; }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 5px; }
.legend i.dash { height: 0; border-radius: 0; border-top: 2px dashed var(--ink); vertical-align: middle; width: 16px; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; }
th, td { padding: 3px 14px 3px 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--rule);
  overflow-wrap: normal; }
td { overflow-wrap: anywhere; } td:not(.n) { min-width: 5em; } td:first-child { min-width: 9em; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; } td.n { white-space: nowrap; }
.limits { padding-left: 1.1rem; } .limits li { margin: .5rem 0; }
pre { background: var(--box); border-radius: 8px; padding: 10px 12px; white-space: pre-wrap; overflow-wrap: anywhere;
  font-size: .85rem; margin: .4rem 0; }
code { font-size: .92em; } summary { cursor: pointer; }
@media (max-width: 600px) { h1 { font-size: 1.3rem; } table { font-size: .8rem; } th, td { padding-right: 8px; }
  th { overflow-wrap: anywhere; } td.n { white-space: normal; }
  .wide thead { display: none; } .wide table, .wide tbody, .wide tr, .wide td { display: block; text-align: left; }
  .wide tr { padding: 6px 0; border-bottom: 1px solid var(--rule); } .wide td { border: 0; padding: 0; }
  .wide td { display: flex; justify-content: space-between; gap: 12px; } .wide td:first-child { font-weight: 600; }
  .wide td::before { content: attr(data-head); color: var(--soft); font-weight: 400; } }
@media print { details { display: block; } figure { break-inside: avoid; } }
"""
WIDE = 3
"""Columns of a table that a telephone can show beside each other."""
# No policy lets anything in; what a run writes cannot fetch or run anything even if it came through unescaped.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def text(value: object) -> str:
    """Anything as HTML: escaped, without control characters."""
    return escape(printable(str(value)))


def document(title: str, parts: Iterable[str]) -> str:
    """An HTML document with the style, around its parts."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(title)}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join([*filter(None, parts), "</body></html>\n"])
    )


def section(title: str, *parts: str) -> str:
    """A heading and what stands under it; nothing when there is nothing."""
    filled = [part for part in parts if part]
    return "\n".join([f"<section><h2>{text(title)}</h2>", *filled, "</section>"]) if filled else ""


def paragraph(words: object, style: str = "") -> str:
    """Plain words as a paragraph; nothing without any."""
    of_class = f' class="{style}"' if style else ""
    return f"<p{of_class}>{text(words)}</p>" if words else ""


def table(head: Sequence[str], rows: Iterable[Sequence[object]], numbers: Sequence[int] = ()) -> str:
    """A table of plain words, the columns ``numbers`` to the right. None is a dash.

    A narrow window shows a table of many columns as a list for each row, its cells with the heads before them.
    """
    wide = len(head) > WIDE
    heads = [f' data-head="{text(name)}"' * wide for name in head]
    style = [' class="n"' if place in numbers else "" for place in range(len(head))]
    top = "".join(f"<th{s}>{text(name)}</th>" for s, name in zip(style, head, strict=True))
    lines = []
    for row in rows:
        cells = zip(style, heads, ["–" if cell is None else text(cell) for cell in row], strict=True)
        lines.append("<tr>" + "".join(f"<td{s}{h}>{cell}</td>" for s, h, cell in cells) + "</tr>")
    body = f"<thead><tr>{top}</tr></thead><tbody>{''.join(lines)}</tbody>"
    return f'<div class="table{" wide" * wide}"><table>{body}</table></div>'


def cards(entries: Iterable[tuple[str, str]]) -> str:
    """Figures that are read first: the figure, and what it is."""
    boxes = [f'<div class="card"><b>{text(value)}</b><span>{text(name)}</span></div>' for value, name in entries]
    return f'<div class="cards">{"".join(boxes)}</div>'


def figures(pictures: Iterable[str], large: bool = False) -> str:
    """Charts beside each other where there is room, three or, ``large``, two; nothing without any."""
    joined = "".join(pictures)
    return f'<div class="figures{" large" * large}">{joined}</div>' if joined else ""


def legend(entries: Iterable[tuple[str, str, str]]) -> str:
    """Name, colour (a CSS variable; ``ink`` is a dashed outline's) and a value of each series."""
    items = []
    for name, colour, value in entries:
        mark = '<i class="dash"></i>' if colour == "ink" else f'<i style="background:var(--{colour})"></i>'
        items.append(f"<li>{mark}{text(f'{name} {value}'.rstrip())}</li>")
    return f'<ul class="legend">{"".join(items)}</ul>'


def folded(title: str, *parts: str) -> str:
    """Something long that opens at a click, without a script."""
    return f"<details><summary>{text(title)}</summary>{''.join(parts)}</details>"
