"""A small corpus, and real runs that several tests look at."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import struct
import sys
import termios
import time
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


@pytest.fixture(scope="session")
def watched(tmp_path_factory: pytest.TempPathFactory, tiny: list[str]) -> tuple[Path, str]:
    """A run on a terminal, with everything that can watch one; nobody is logged in anywhere."""
    cwd = tmp_path_factory.mktemp("watched")
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    arguments = [*tiny, "train.steps=30", "logger=all", "profiler=torch", "profiler.ranks=[0,1]", "hydra.run.dir=run"]
    nobody = {"HOME": str(cwd), "NETRC": str(cwd / "none")}
    with runs.started([sys.executable, runs.TRAIN, *arguments], cwd, stdout=follower, **nobody) as command:
        os.close(follower)
        places: set[tuple[str, int]] = set()
        seen = _read_all(leader, command, places)
        (cwd / "listening.json").write_text(json.dumps(sorted(places)), encoding="ascii")
        assert command.process.wait(10) == 0
        assert command.processes() == {}
    os.close(leader)
    return cwd / "run", seen


def _read_all(leader: int, command: runs.Command, places: set[tuple[str, int]]) -> str:
    seen, end = b"", time.monotonic() + runs.TIMEOUT_SECONDS
    while time.monotonic() < end:
        ready, _, _ = select.select([leader], [], [], 0.2)
        places.update(command.listening())
        if ready:
            try:
                seen += os.read(leader, 65536)
            except OSError:  # the other side is closed
                break
        elif command.process.poll() is not None:
            break
    return seen.decode("utf-8", "replace")
