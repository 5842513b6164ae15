"""The measuring of the house: each row counts what it says, on a small repository that is written for it."""

from pathlib import Path

import pytest

from tests import ROOT
from tools import measure_house
from tools.measure_house import Row, Source, read, reading_path, rows

TREE = {
    "train.py": "import deepzero\n",
    "README.md": "## Reading it\n\n1. `deepzero/layout.py` (5 min): the layout\n",
    "deepzero/layout.py": '"""What it is."""\n\n# Why.\nx = 1  # because\n\n\ndef f():\n    """Doc."""\n    return x\n',
    "deepzero/runtime/zero/stage3.py": "class A:\n    def __init__(self, x, *, y): self.a, self.b = x, y\n",
}


def measured(root: Path, files: dict[str, str]) -> dict[str, Row]:
    """The rows of the small repository with ``files`` added or replaced."""
    for name, text in {**TREE, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return {row.what: row for row in rows(root, read(root))}


def test_lines_comments_and_classes_are_counted(tmp_path: Path) -> None:
    table = measured(tmp_path, {})
    assert table["lines of deepzero/"].now == 11
    assert (table["lines of deepzero/runtime/"].now, table["lines of deepzero/runtime/zero/"].now) == (0, 2)
    assert table["lines of the reading path"].now == 9
    assert Source("x.py", TREE["deepzero/layout.py"]).comments_and_code() == (1, 3)
    assert table["comments per 100 lines of code on it"].now == pytest.approx(33.3)
    assert table["classes in runtime/zero"].now == 1
    assert (table["methods of the largest class"].now, table["attributes of the largest class"].now) == (1, 2)
    assert table["constructor parameters"].now == 2
    assert all(row.kept for row in table.values())


OFFLOAD, BRANCHES = "files of runtime/zero that import offload", "branches for dry runs in the core"
STATE, THREADS = "module-level mutable state", "threads started past utils/threads.py"
TWICE, FILES = "class names defined twice in the package", "files of more than 800 lines"
FUNCTIONS = "functions of more than 80 lines"


@pytest.mark.parametrize(("path", "text", "what"), [
    ("deepzero/runtime/zero/x.py", "def f():\n    from deepzero.offload import arena\n", OFFLOAD),
    ("deepzero/comm/x.py", "def f(t):\n    return 1 if t.is_meta else 2\n", BRANCHES),
    ("deepzero/x.py", "n = 0\ndef f():\n    global n\n    n = 1\n", STATE),
    ("deepzero/x.py", "R = {}\ndef f(k):\n    R[k] = 1\n", STATE),
    ("deepzero/x.py", "R: list = []\ndef f(k):\n    R.append(k)\n", STATE),
    ("deepzero/x.py", "import threading\nthreading.Thread(target=print).start()\n", THREADS),
    ("deepzero/x.py", "from threading import Thread\nclass T(Thread): ...\n", THREADS),
    ("deepzero/x.py", "class A: ...\n", TWICE),
    ("tests/x.py", "#\n" * 801, FILES),
    ("tools/x.py", "def f():\n" + "    1\n" * 80, FUNCTIONS),
])  # fmt: skip
def test_planted(path: str, text: str, what: str, tmp_path: Path) -> None:
    assert measured(tmp_path, {path: text})[what].now == 1


def test_bases_in_the_package_count_and_protocols_do_not(tmp_path: Path) -> None:
    text = "class B(Protocol):\n  def p(self): ...\nclass C:\n  def q(self): ...\nclass D(C, B):\n  def r(self): ...\n"
    row = measured(tmp_path, {"deepzero/x.py": text})["methods of the largest class"]
    assert (row.now, row.note.partition(";")[0]) == (2, "D")


def test_above_a_budget_the_status_is_1(tmp_path, capsys, monkeypatch) -> None:
    measured(tmp_path, {})
    assert measure_house.main([str(tmp_path)]) == 0
    monkeypatch.setitem(measure_house.FOLDERS, "deepzero", (10, 5))
    assert measure_house.main([str(tmp_path)]) == 1
    assert capsys.readouterr().out.endswith("house: budget exceeded: lines of deepzero/\n")
    with pytest.raises(SystemExit, match="2"):
        measure_house.main([str(tmp_path / "nowhere")])
    assert "nowhere is not the repository: there is no train.py" in capsys.readouterr().err


def test_the_reading_path_is_named_in_the_readme() -> None:
    assert 14 <= len(reading_path(ROOT)) <= 16
    assert all((ROOT / name).is_file() for name in reading_path(ROOT))
