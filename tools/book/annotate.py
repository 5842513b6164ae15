"""A source file as a page: its prose on the left, its code on the right.

Prose is what a reader of the file reads anyway: docstrings, comments that have lines of their own, the texts below
constants. A Python file is cut at each of them; the rest of the code stays together. Nothing is imported or executed.
"""

from __future__ import annotations

import ast
import io
import re
import textwrap
import tokenize
from dataclasses import dataclass, field
from html import escape

from pygments import lex
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_for_filename
from pygments.util import ClassNotFound

HEADING = re.compile(r"-{2,} (.+?) -{2,}$")
DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
TEXT = re.compile(
    r"``(?P<code>.+?)``|:(?:\w+:)?\w+:`(?P<role>[^`]+)`|`(?P<single>[^`\s][^`]*)`|\*\*(?P<bold>\S.*?)\*\*"
    r"|(?<![\w*])\*(?P<italic>[^\s*][^*\n]*)\*(?!\w)",
    re.DOTALL,
)
DRAWN = re.compile(r"\S {3,}\S|[─│┌└►→╲]{2,}|^\s*>>> |[-=]{4,}|^ *[|+/\\].*[|+/\\] *$")
"""A line of a table, of a drawing or of an example."""
TITLE = re.compile(r"\[Note.*\]$|(Args|Returns|Raises|Example|Source|Sources):$")
ITEM = re.compile(r"- |\d+\. |[\w*]+(, [\w*]+)*: |``[^`]+``  ")
"""The beginning of a list's item: of numbered ones, of arguments, of literals with what they mean."""


@dataclass
class Row:
    """Code from line ``first`` to before ``end``, 1-based, and the prose that belongs to it."""

    first: int
    end: int = 0
    names: list[str] = field(default_factory=list)  # dotted names of what is defined here
    heading: str = ""
    prose: list[str] = field(default_factory=list)  # HTML


class Annotated:
    """One file: ``rows``, and the lines of prose, which are not shown again as code.

    ``symbols`` are the dotted names of its classes and functions, in order.
    """

    def __init__(self, path: str, text: str) -> None:
        self.path, self.text = path, text
        self.prose_lines: set[int] = set()
        self._marks: dict[int, Row] = {}
        self.title_prose = ""
        self.symbols: list[str] = []
        if path.endswith(".py"):
            self._read_tree(ast.parse(text))
            self._read_comments()
        marks = {1: Row(1), **self._marks}
        self.rows = [marks[line] for line in sorted(marks)]
        ends = [row.first for row in self.rows[1:]] + [len(text.splitlines()) + 1]
        for row, end in zip(self.rows, ends, strict=True):
            row.end = end

    def _row(self, line: int) -> Row:
        return self._marks.setdefault(line, Row(line))

    # ---- where prose is ----------------------------------------------------------------------------------------------

    def _read_tree(self, tree: ast.Module) -> None:
        if tree.body and (found := self._string(tree.body[0])):
            self.title_prose = document(found)
        self._read_body(tree.body, "")

    def _string(self, node: ast.stmt | None) -> str:
        """The text of a statement that is only a string, whose lines are taken out of the code; "" for any other."""
        value = node.value if isinstance(node, ast.Expr) else None
        if node is None or not isinstance(value, ast.Constant) or not isinstance(value.value, str):
            return ""
        self.prose_lines.update(range(node.lineno, (node.end_lineno or 0) + 1))
        return value.value

    def _read_body(self, body: list[ast.stmt], outer: str, owner: Row | None = None) -> None:
        for before, node in zip([None, *body], body, strict=False):
            if isinstance(node, DEFINITIONS):
                name = f"{outer}{node.name}"
                text = self._string(node.body[0])
                # What an undocumented constructor takes is said by its class: they share a row.
                shared = owner if node.name == "__init__" and not text else None
                row = shared or self._row(min([node.lineno, *(one.lineno for one in node.decorator_list)]))
                row.names.append(name)
                self.symbols.append(name)
                if text:
                    row.prose.append(document(text))
                if isinstance(node, ast.ClassDef):
                    self._read_body(node.body, f"{name}.", row)
            elif isinstance(before, (ast.Assign, ast.AnnAssign)) and (text := self._string(node)):
                self._row(before.lineno).prose.append(document(text))  # the text below a constant, beside it

    def _read_comments(self) -> None:
        block: list[tuple[int, str]] = []
        for token in [*tokenize.generate_tokens(io.StringIO(self.text).readline)]:
            alone = token.type == tokenize.COMMENT and token.line.strip().startswith("#")
            if block and (not alone or token.start[0] != block[-1][0] + 1) and token.type != tokenize.NL:
                self._comment(block)
                block = []
            if alone:
                block.append((token.start[0], token.string))

    def _comment(self, block: list[tuple[int, str]]) -> None:
        lines = [re.sub(r"^# ?", "", text) for _, text in block]
        self.prose_lines.update(number for number, _ in block)
        row = self._row(block[0][0])
        if found := HEADING.match(block[0][1].lstrip("# ")):
            row.heading, lines = found[1], lines[1:]
        if lines:
            row.prose.append(document("\n".join(lines)))

    # ---- the page ----------------------------------------------------------------------------------------------------

    def html(self, used_in: dict[str, str]) -> str:
        """The rows. ``used_in``: dotted name to the HTML of the links back from it."""
        code = highlighted(self.path, self.text)
        return "\n".join(self._row_html(row, code, used_in) for row in self.rows)

    def _row_html(self, row: Row, code: list[str], used_in: dict[str, str]) -> str:
        prose = []
        if row.heading:
            prose.append(f'<h2 id="{slug(row.heading)}">{escape(row.heading)}</h2>')
        for name in row.names:
            level = 4 if "." in name else 3
            prose.append(f'<h{level} id="{name}"><code>{breakable(name)}</code></h{level}>{used_in.get(name, "")}')
        shown = [line for line in range(row.first, row.end) if line not in self.prose_lines]
        while shown and not code[shown[-1] - 1].strip():
            shown.pop()
        while shown and not code[shown[0] - 1].strip():
            shown.pop(0)
        lines = "\n".join(f'<a id="L{line}" href="#L{line}" data-line="{line}"></a>{code[line - 1]}' for line in shown)
        right = f'<div class="highlight" data-search-exclude><pre><code>{lines}\n</code></pre></div>' if shown else ""
        if row.first == 1 and right and not row.prose:
            return f'<details class="dz-code"><summary>Imports and names</summary>{right}</details>'
        left = "\n".join([*prose, *row.prose])
        if not left and not right:
            return ""
        return f'<div class="dz-row"><div class="dz-prose">{left}</div><div class="dz-code">{right}</div></div>'

    def contents(self) -> list[dict[str, object]]:
        """The table of contents, as Python-Markdown's ``toc_tokens``: headings, classes and functions, methods."""
        found: list[dict[str, object]] = []
        for row in self.rows:
            named = [(name, name.count(".")) for name in row.names]
            for name, depth in [(row.heading, -1), *named] if row.heading else named:
                entry = {"level": 2 + depth, "id": slug(name) if depth < 0 else name, "children": []}
                entry["name"] = entry["html"] = escape(name.rpartition(".")[2] if depth > 0 else name)
                owner = next((one for one in found if depth > 0 and one["id"] == name.partition(".")[0]), None)
                (found if owner is None else owner["children"]).append(entry)  # type: ignore[union-attr]
        return found


def slug(heading: str) -> str:
    """The anchor of a heading, of which no symbol has the same."""
    return "section-" + re.sub(r"\W+", "-", heading.lower()).strip("-")


def breakable(name: str) -> str:
    """A long name that may be broken behind its separators."""
    return re.sub(r"([/:._=])", r"\1<wbr>", escape(name))


def highlighted(path: str, text: str) -> list[str]:
    """The lines of a file as HTML, in Pygments' classes, for which the theme has colours in light and in dark."""
    try:
        lexer = get_lexer_for_filename(path, stripnl=False)
    except ClassNotFound:
        lexer = get_lexer_for_filename("x.sh" if text.startswith("#!") else "x.txt", stripnl=False)
    out = io.StringIO()
    HtmlFormatter(nowrap=True).format(lex(text, lexer), out)
    return out.getvalue().split("\n")


# ---- docstrings and comments as HTML ---------------------------------------------------------------------------------


def inline(text: str) -> str:
    """Literals, roles, bold and italics."""

    def one(found: re.Match[str]) -> str:
        if found["bold"]:
            return f"<strong>{inline(found['bold'])}</strong>"
        if found["italic"]:
            return f"<em>{inline(found['italic'])}</em>"
        name = found["code"] or found["single"] or found["role"]
        if found["role"]:  # :class:`~a.b.Name` and :class:`text <a.b.Name>`
            name = name.rpartition(".")[2] if name.startswith("~") else name.partition(" <")[0]
        return f"<code>{escape(name)}</code>"

    out, last = [], 0
    for found in TEXT.finditer(text):
        out += [escape(text[last : found.start()]), one(found)]
        last = found.end()
    return "".join([*out, escape(text[last:])])


def document(text: str) -> str:
    """A docstring or comment: paragraphs, lists, literal blocks and tables as they stand."""
    first, _, rest = text.partition("\n")
    lines = f"{first.strip()}\n{textwrap.dedent(rest)}".strip("\n")
    blocks = [block.splitlines() for block in re.split(r"\n\s*\n", lines) if block.strip()]
    return "\n".join(line for block in blocks for line in block_html(block))


def block_html(block: list[str]) -> list[str]:
    """One block: text that is drawn, a title with what is indented below it, a list, or a paragraph."""
    head, below = block[0], block[1:]
    if any(DRAWN.search(line) for line in block):
        text = escape(textwrap.dedent("\n".join(block)))
        return ['<pre class="dz-text">' + re.sub(r"``(.+?)``", r"<b>\1</b>", text) + "</pre>"]
    if TITLE.match(head) and all(line.startswith("  ") for line in below):
        inside = block_html(textwrap.dedent("\n".join(below)).splitlines()) if below else []
        return [f'<p class="dz-title">{inline(head)}</p>', *inside]
    items = [" ".join(item.split()) for item in re.split(r"\n(?! )", "\n".join(block))]
    if len(items) > 1 and all(ITEM.match(item) for item in items):
        return ["<ul>", *(f"<li>{inline(item.removeprefix('- '))}</li>" for item in items), "</ul>"]
    return [f"<p>{inline(re.sub('::$', ':', ' '.join(line.strip() for line in block)))}</p>"]
