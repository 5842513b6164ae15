"""What ``mkdocs build`` does for the book besides Markdown: the hooks that ``mkdocs.yml`` names.

- Formulas, ``$…$`` and ``$$…$$``, become MathML, which browsers draw without a script or a font of ours.
- Pointers such as ``deepzero/layout.py:Bucket.of`` become links to a page that shows the file (``annotate.py``), at the
  symbol. Every file that some page points at has one; those of the README's reading path are in its order, and in the
  navigation. Each says which pages point at it.
- Cells of tables are given their column's name, which a narrow screen shows in front of them.

All that is made here exists in the built site only.
"""

from __future__ import annotations

import itertools
import logging
import re
import sys
from html import escape, unescape
from pathlib import Path

from latex2mathml.converter import convert
from markdown import Extension, Markdown
from markdown.inlinepatterns import InlineProcessor
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from mkdocs.structure.toc import get_toc

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # mkdocs loads this file by its path

from tools.book.annotate import Annotated, breakable  # noqa: E402
from tools.measure_house import reading_path  # noqa: E402

log = logging.getLogger("mkdocs.hooks.book")  # a warning here fails `mkdocs build --strict`

POINTER = r"((?:deepzero|tests|tools|configs|examples)/[\w/.]*\w\.\w+|train\.py|\.ci/run)(?::([A-Za-z_][\w.]*))?"
IN_MARKDOWN = re.compile(f"`{POINTER}`")
IN_HTML = re.compile(rf"<a\b.*?</a>|<pre\b.*?</pre>|<code>{POINTER}</code>", re.DOTALL)
OUTSIDE = re.compile(r"\]\(\.\./(?![a-z_]+\.md\))([\w/.-]+)\)")  # not from a page below docs/ to one in it

sources: dict[str, Annotated] = {}
used: dict[str, dict[str, list[str]]] = {}  # file → symbol or "" → pages that point there


def page_of(path: str) -> str:
    """Where a file's page lies in the site's sources."""
    return f"source/{path.lstrip('.')}.md"


# ---- formulas --------------------------------------------------------------------------------------------------------


class Formula(InlineProcessor):
    """``$$…$$`` on lines of its own, or ``$…$`` in a sentence. Code has been taken out before."""

    def handleMatch(self, m: re.Match[str], data: str) -> tuple[str, int, int]:  # type: ignore[override]
        """The formula as MathML, kept from further Markdown."""
        text, display = (m[1], "block") if m[1] else (m[2], "inline")
        try:
            found = convert(unescape(text), display=display)
        except Exception as error:
            log.warning("formula %r: %s", text, error)
            found = escape(text)
        return self.md.htmlStash.store(found), m.start(0), m.end(0)


class Formulas(Extension):
    """Registers :class:`Formula` behind code spans, and before everything that might read a backslash or ``_``."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Called by Markdown."""
        formula = Formula(r"\$\$(.+?)\$\$|(?<![\\\w$])\$(?=\S)([^$]+?)(?<=\S)\$(?![\w$])", md)
        md.inlinePatterns.register(formula, "formula", 185)


# ---- the pages of source files ---------------------------------------------------------------------------------------


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Formulas; and the reading path as the last part of the navigation."""
    config.markdown_extensions.append(Formulas())  # type: ignore[arg-type]
    listed = [{path.rpartition("/")[2]: page_of(path)} for path in reading_path(ROOT)]
    config.nav = [*(config.nav or []), {"Annotated sources": listed}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """A page for every file that some page points at, and for the reading path."""
    on_path = reading_path(ROOT)
    sources.clear()
    used.clear()
    used.update({path: {} for path in on_path})
    for file in files.documentation_pages():
        text = Path(file.abs_src_path or "").read_text(encoding="utf-8")
        text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        for path, symbol in [*IN_MARKDOWN.findall(text), *((path, "") for path in OUTSIDE.findall(text))]:
            pages = used.setdefault(path, {}).setdefault(symbol, [])
            if file.src_uri not in pages:
                pages.append(file.src_uri)
    for path in used:
        if not (ROOT / path).is_file():
            pages = ", ".join(itertools.chain(*used[path].values()))
            log.warning("%s, to which %s points, is no file", path, pages)
            continue
        sources[path] = Annotated(path, (ROOT / path).read_text(encoding="utf-8"))
        level = InclusionLevel.INCLUDED if path in on_path else InclusionLevel.NOT_IN_NAV
        content = f"---\nhide: [navigation, toc]\ntitle: {path}\n---\n# `{path}`\n"
        files.append(File.generated(config, page_of(path), content=content, inclusion=level))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to files outside docs/ lead to their pages; what is in ``<details>`` is Markdown."""
    markdown = OUTSIDE.sub(lambda link: f"]({page_of(link[1])})", markdown)
    return re.sub(r"^<details>", '<details markdown="1">', markdown, flags=re.MULTILINE)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Pointers and tables; a source file's page is made here."""
    if not page.file.src_uri.startswith("source/"):
        return labelled(IN_HTML.sub(lambda found: pointer(found, page, files), html))
    source = sources[page.meta["title"]]
    back = {symbol: links_back(pages, page, files) for symbol, pages in used[source.path].items()}
    page.toc = get_toc(source.contents())  # type: ignore[arg-type]
    names = [name for name in source.symbols if "." not in name]
    inside = " · ".join(f'<a href="#{name}"><code>{name}</code></a>' for name in names)
    return "\n".join([
        f"<h1><code>{breakable(source.path)}</code></h1>{back.get('', '')}",
        f'<p class="dz-back">In this file: {inside}</p>' if inside else "",
        f'<div class="dz-head">{source.title_prose}</div>',
        f'<div class="dz-source">{source.html(back)}</div>',
    ])  # fmt: skip


def links_back(pages: list[str], page: Page, files: Files) -> str:
    """Links to the pages that point here, in the order of mkdocs' files."""
    links = []
    for uri in pages:
        target = files.get_file_from_path(uri)
        if target is not None and target.page is not None:
            links.append(f'<a href="{target.url_relative_to(page.file)}">{escape(str(target.page.title))}</a>')
    return f'<p class="dz-back">Used in {", ".join(links)}</p>' if links else ""


def pointer(found: re.Match[str], page: Page, files: Files) -> str:
    """One pointer as a link, if its file has a page. Links, and blocks of code, stay as they are."""
    path, symbol = found[1], found[2]
    target = files.get_file_from_path(page_of(path)) if path else None
    if target is None:
        return found[0]
    if symbol and symbol not in sources[path].symbols:
        log.warning("%s points at %s:%s, which is not there", page.file.src_uri, path, symbol)
    text = breakable(f"{path}:{symbol}" if symbol else path)
    url = target.url_relative_to(page.file) + (f"#{symbol}" if symbol else "")
    return f'<a class="dz-pointer" href="{url}"><code>{text}</code></a>'


def labelled(html: str) -> str:
    """Tables for narrow screens: names may be broken, and each cell has its column's, as rows become cards there."""

    def one(table: re.Match[str]) -> str:
        heads = re.findall(r"<th\b[^>]*>(.*?)</th>", table[0], re.DOTALL)
        names = [re.sub("<.*?>", "", head).strip() for head in heads]
        cells = itertools.cycle(escape(name, quote=True) for name in names)
        found = re.sub(r"<td\b([^>]*)>", lambda cell: f'<td data-label="{next(cells)}"{cell[1]}>', table[0])
        return re.sub(r"<code>([^<]+)</code>", lambda code: f"<code>{breakable(unescape(code[1]))}</code>", found)

    return re.sub(r"<table>.*?</table>", one, html, flags=re.DOTALL)
