"""A small corpus, and three real runs that several tests look at."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import runs


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some hundred kilobytes of text in three files."""
    folder = tmp_path_factory.mktemp("corpus")
    for number, line in enumerate(("for i in range(10):\n    print(i)\n", "def f(x):\n    return x\n", "x = [1, 2]\n")):
        (folder / f"{number}.txt").write_text(line * 2000, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def tiny(corpus: Path) -> list[str]:
    """Overrides of the smallest sensible run, in fp32 so that results do not depend on how a batch is cut."""
    return [*runs.TINY, f"data.path={corpus}", "precision=fp32"]


@pytest.fixture(scope="session")
def sweep(tmp_path_factory: pytest.TempPathFactory, tiny: list[str]) -> tuple[Path, runs.Done]:
    """``-m zero.stage=0,1,2,3`` on two ranks: its folder, and what it printed."""
    cwd = tmp_path_factory.mktemp("sweep")
    done = runs.train("-m", "zero.stage=0,1,2,3", *tiny, "hydra.sweep.dir=out", cwd=cwd, timeout=110)
    assert done.status == 0, done.err
    return cwd / "out", done
