"""The chapters' form; and their figures that follow from a plan, computed again."""

import re
import shlex

import pytest

from tests.unit.test_docs import DOCS, PAGES, ROOT, fenced, text
from tools import plan


def test_lines_are_short():
    """But rows of tables, which wrap where they are shown, and pages that a benchmark has written."""
    pages = [page for page in PAGES if page.parent.name != "benchmarks"]
    lines = [(page.name, line) for page in pages for line in text(page).splitlines() if line[:1] != "|"]
    assert [(page, line) for page, line in lines if len(line) > 160] == []


def planned(command, capsys):
    """What ``python -m tools.plan …`` prints."""
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
