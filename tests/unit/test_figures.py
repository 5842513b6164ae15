"""The book's figures: the committed files show the numbers that the code gives today, and the pages show the files."""

import re

import pytest

from tests.unit.test_docs import DOCS, text
from tools.book import figures

RUNS = ("gathered_memory",)
"""Drawn from runs with two ranks."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in RUNS else name for name in figures.FIGURES]
)
def test_the_committed_figure_is_current(name):
    assert figures.problems(name) == []


def test_every_file_is_a_figure_of_the_command():
    assert sorted(path.stem for path in figures.FOLDER.iterdir()) == sorted(figures.FIGURES)


def test_what_is_drawn_holds_its_numbers_and_stays_on_its_card(tmp_path, monkeypatch):
    """And the same data give the same file."""
    canvas = figures.stages()
    for copy in ("first", "second"):
        canvas.save(tmp_path / copy / "stages.svg")
    assert (tmp_path / "first" / "stages.svg").read_bytes() == (tmp_path / "second" / "stages.svg").read_bytes()
    monkeypatch.setattr(figures, "FOLDER", tmp_path / "first")
    assert figures.problems("stages") == []
    canvas.text(300, 40, "words beyond the right edge")
    with pytest.raises(ValueError, match="'words beyond the right edge' does not fit"):
        canvas.save(tmp_path / "stages.svg")


def test_a_stale_figure_is_named_with_what_has_changed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(figures, "FOLDER", tmp_path)
    assert figures.main(["memory_16_bytes", "stages"]) == 0
    path = tmp_path / "memory_16_bytes.svg"
    path.write_text(path.read_text(encoding="utf-8").replace('"masters": 4', '"masters": 5'), encoding="utf-8")
    (tmp_path / "stages.svg").write_text("<svg/>", encoding="utf-8")
    assert figures.main(["--check", "memory_16_bytes", "stages"]) == 1
    told = capsys.readouterr().out
    assert re.search("memory_16_bytes.svg is not current.*: bytes: .*'masters': 5.* in the file, .*'masters': 4", told)
    assert "stages.svg is not current" in told


def test_pages_show_every_figure_and_say_what_it_shows():
    images = [image for page in DOCS.glob("*.md") for image in re.findall(r"!\[([^\]]*)\]\(([\w/.]+)\)", text(page))]
    assert [(said, path) for said, path in images if len(said) < 20 or not (DOCS / path).is_file()] == []
    assert {f"figures/{name}.svg" for name in figures.FIGURES} <= {path for _, path in images}
