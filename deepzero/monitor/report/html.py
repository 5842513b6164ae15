"""HTML's frame: one file that holds its style (``page.css``), asks nobody for anything, and needs no script.

All that comes from a run goes through :func:`text` before it becomes HTML; a sample or an error may hold anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from deepzero.monitor.terminal import printable

STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
WIDE = 3  # columns of a table that a telephone can show beside each other
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
        f"<title>{text(title)}</title><style>\n{STYLE}</style></head>\n<body>\n"
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
