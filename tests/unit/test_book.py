"""The book: one order of chapters, one form for each, figures and commands that are there, sources shown whole."""

import ast
import re
from html import unescape

import pytest

from tests.unit.test_docs import DOCS, ROOT, text
from tools import walk
from tools.book.annotate import Annotated, document
from tools.measure_house import reading_path

NAV = re.findall(r"^ +- .*: (\S+)\.md$", text(ROOT / "mkdocs.yml"), re.M)
SPINE = NAV[1:9]
HEAD = re.compile(r"\*Chapter (\d) of 8 · \d+ minutes · run it:\* `python .+`$", re.M)
SECTIONS = ("## Side by side", "## In the code", "## Two questions")


def without_blocks(page):
    """A chapter's own words: no programs, transcripts, comments."""
    return re.sub(r"^```.*?^```|<!--.*?-->", "", page, flags=re.M | re.S)


def test_index_site_and_readme_have_one_order():
    index = re.findall(r"\]\((\w+)\.md\)", text(DOCS / "index.md"))
    assert list(dict.fromkeys(index)) == NAV[1:]
    section = re.search(r"^## The book\n.*?(?=^## )", text(ROOT / "README.md"), re.M | re.S)
    readme = re.findall(r"\]\(docs/(\w+)\.md\)", section[0])
    assert [name for name in readme if name != "index"] == SPINE


@pytest.mark.parametrize("name", SPINE)
def test_a_chapter_has_its_form(name):
    page = text(DOCS / f"{name}.md")
    assert page.splitlines()[0].startswith("# ")
    assert [found[1] for found in HEAD.finditer(page)] == [str(SPINE.index(name) + 1)]
    assert [page.count(f"\n{section}\n") for section in SECTIONS] == [1, 1, 1]
    questions, _, answers = page.partition("\n## Two questions\n")[2].partition('<details markdown="1">')
    assert answers.count("</details>") == 1 and "<summary>Answer</summary>" in answers
    assert [re.findall(r"^\d\.", part, re.M) for part in (questions, answers)] == [["1.", "2."]] * 2
    *_, last = page.strip().split("\n\n")
    following = SPINE[SPINE.index(name) + 1 :][:1] or NAV[11:12]
    assert last.startswith("Next: ") and f"({following[0]}.md)" in last
    code = page.partition("\n## In the code\n")[2].partition("\n## ")[0]
    pointers = re.findall(r"`(?:deepzero|examples)/[\w/]+\.py:[\w.]+`", code)
    assert 5 <= len(pointers) <= 12


def test_the_chapters_are_short_and_their_lines_too():
    words = {name: len(without_blocks(text(DOCS / f"{name}.md")).split()) for name in SPINE}
    assert sum(words.values()) <= 12_000, words
    lines = [(name, line) for name in SPINE for line in text(DOCS / f"{name}.md").splitlines() if line[:1] != "|"]
    long = [f"{name}: {line[:60]} …" for name, line in lines if len(line) > 160]
    assert not long


def test_figures_exist_and_are_shown():
    pages = "\n".join(text(page) for page in DOCS.glob("*.md"))
    shown = set(re.findall(r"!\[[^\]]+\]\(([\w/.]+)\)", pages))
    assert {name for name in shown if not (DOCS / name).is_file()} == set()
    # A comment keeps the place of a figure that is still to be linked.
    kept = {f"figures/{name}.svg" for name in re.findall(r"<!-- figure: (\w+) -->", pages)}
    assert {f"figures/{path.name}" for path in (DOCS / "figures").iterdir()} <= shown | kept


@pytest.mark.parametrize("path", reading_path(ROOT))
def test_an_annotated_file_is_shown_whole(path):
    """Every line of code once, with its number; every class and function has an anchor; no prose is lost."""
    source = text(ROOT / path)
    annotated = Annotated(path, source)
    page = f"<div>{annotated.title_prose}</div>{annotated.html({})}"
    rows = re.findall(r'data-line="(\d+)"></a>(.*)$', page, re.M)
    numbers = [int(number) for number, _ in rows]
    assert numbers == sorted(set(numbers))
    lines = source.splitlines()
    for number, (_, html) in zip(numbers, rows, strict=True):
        assert unescape(re.sub("<[^>]*>", "", html)) == lines[number - 1]
    elsewhere = annotated.prose_lines.union(numbers)
    assert not [line for number, line in enumerate(lines, 1) if line.strip() and number not in elsewhere]
    names = [node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    assert all(f'id="{name}"' in page for name in names)
    words = re.sub(r"\W+", "", unescape(re.sub("<[^>]*>", "", page)))
    for line in (re.sub(r":\w+:`[^`]*`", "", lines[number - 1]) for number in annotated.prose_lines):
        assert all(word in words for word in re.findall(r"[A-Za-z]{4,}", line) if f"`{word}" not in line), line


def test_docstrings_become_paragraphs_lists_and_drawings():
    given = ["One ``a < b``.", "", "    Args:", "        x: first,", "            and more.", "        y: second."]
    made = [
        "<p>One <code>a &lt; b</code>.</p>",
        '<p class="dz-title">Args:</p>',
        *["<ul>", "<li>x: first, and more.</li>", "<li>y: second.</li>", "</ul>"],
    ]
    assert document("\n".join(given)).splitlines() == made
    assert document("    r0   r1   r2") == '<pre class="dz-text">r0   r1   r2</pre>'


@pytest.mark.parametrize("hop", walk.HOPS, ids=lambda hop: hop.name)
def test_the_functions_of_the_walk_have_the_lines_that_it_quotes(hop):
    place, quoted = walk.in_source(hop)
    gone = [what for what in hop.quotes.split("|") if not any(what in line for line in quoted.values())]
    assert not gone, f"{hop.name} ({place}) has no such line: correct HOPS in tools/walk.py"
