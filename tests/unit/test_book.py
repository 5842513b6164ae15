"""The book: one order of chapters, one form for each, figures that follow from a plan, sources shown whole."""

import ast
import re
import shlex
from html import unescape

import pytest

from tests.unit.test_docs import DOCS, PAGES, ROOT, fenced, text
from tools import plan, walk
from tools.book.annotate import Annotated, document
from tools.measure_house import reading_path

NAV = re.findall(r"^ +- .*: (\S+)\.md$", text(ROOT / "mkdocs.yml"), re.M)
SPINE = NAV[1:9]
HEAD = re.compile(r"\*Chapter (\d) of 8 · \d+ minutes · run it:\* `python .+`$", re.M)
SECTIONS = ("## Side by side", "## In the code", "## Two questions")


def without_blocks(page):
    """A chapter's own words: no programs, transcripts, comments."""
    return re.sub(r"^```.*?^```|<!--.*?-->", "", page, flags=re.M | re.S)


def test_index_site_and_readme_have_one_order_of_all_pages():
    index = re.findall(r"\]\((\w+)\.md\)", text(DOCS / "index.md"))
    assert ["index", *dict.fromkeys(index)] == NAV
    assert sorted(NAV) == sorted(page.stem for page in DOCS.glob("*.md"))
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


def test_the_chapters_are_short():
    words = {name: len(without_blocks(text(DOCS / f"{name}.md")).split()) for name in SPINE}
    assert sum(words.values()) <= 12_000, words


def test_lines_are_short():
    """But rows of tables, which wrap where they are shown, and pages that a benchmark has written."""
    pages = [page for page in PAGES if page.parent.name != "benchmarks"]
    lines = [(page.name, line) for page in pages for line in text(page).splitlines() if line[:1] != "|"]
    assert [(page, line) for page, line in lines if len(line) > 160] == []


def planned(command, capsys):
    assert plan.main(shlex.split(command.partition("tools.plan ")[2])) == 0
    return capsys.readouterr().out


def test_the_plan_in_the_chapter_on_stage_3(capsys):
    chapter = text(DOCS / "stage3.md")
    printed = planned(re.search(r"run it:\* `([^`]+)`", chapter)[1], capsys)
    quoted = next(block for block in fenced(DOCS / "stage3.md") if "prefetch at wte" in block)
    assert {line.strip() for line in quoted.splitlines()} <= {line.strip() for line in printed.splitlines()}
    for figure in ("328.4 MB", "482.8 MB"):
        assert figure in printed and figure in chapter
    assert "2.625 Ψ" in printed and "2.625 Ψ" in chapter
    # The same model in the comment of its experiment, stage 2 on 8 GPUs: the paper's form, and with fp32 sums.
    numel = int(re.search(r"([\d,]+) parameters", printed)[1].replace(",", ""))
    comment = text(ROOT / "configs/experiment/gpt2_1_3b.yaml")
    for form in (2 + 14 / 8, 2 + 16 / 8):
        assert f"{form * numel / 1e9:.2f} GB" in comment


@pytest.mark.slow
def test_the_bytes_between_nodes_in_the_chapter_on_bytes(capsys):
    """In GB: gather forward, gather backward, reduction (with MiCS also what is published)."""
    page = "\n".join(fenced(DOCS / "zeropp.md")).replace("\\\n", " ")
    rows = re.findall(
        r"^\| (?:stage 3|qwZ|hpZ|qgZ|all three|MiCS)[^|]*\|(.*?\|.*?\|.*?)\|", text(DOCS / "communication.md"), re.M
    )
    commands = re.findall(r"^python -m tools.plan .*", page, re.M)
    assert len(commands) == len(rows) == 6
    for command, row in zip(commands, rows, strict=True):
        found = re.findall(
            r"(?:gather_|reduce_|publish_)\S+ +\d+ +\S+ [kMG]?B +(?:(\S+) ([MG])B)?", planned(command, capsys)
        )
        sent = [round(float(number) / (1000 if unit == "M" else 1), 3) for number, unit in found if number and unit]
        assert sorted(sent) == sorted(float(n) for n in re.findall(r"[\d.]+", row) if float(n)), command


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
