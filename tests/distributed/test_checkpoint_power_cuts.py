"""The power goes at any instant: what was saved is there, whole, and newest; and no flush of a save is there for nothing."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from deepzero.checkpoint import folder as folders
from deepzero.checkpoint.format import CheckpointError
from deepzero.checkpoint.resume import find_start
from deepzero.checkpoint.verify import verify
from deepzero.comm import process_group
from tests.distributed.checkpoints import engine_for, fingerprints, steps
from tests.distributed.power import Recorder, Tree, idle_flushes, key, lay, losses, read

SAVES: tuple[tuple[int, str, dict[str, Any]], ...] = (
    (1, "step_1", {}),
    (2, "step_2", {"asynchronous": True}),
    (3, "step_3", {"keep_last": 2}),
    (4, "step_3", {}),
    (5, "best", {"save_latest": False}),
    (6, "step_6", {"asynchronous": True, "keep_last": 1}),
)
"""(after step, tag, how): into a new folder, behind, over an old one of the same tag, without ``latest``."""


def save_all(rank, world, root, log):
    """Saves are recorded; after each it is marked what the caller may rely on."""
    engine = engine_for(world, 2)
    recorder, told = Recorder(root, log), {"latest": 0, "best": 0}
    known = {}
    for step, tag, how in SAVES:
        steps(engine, rank, world, step)
        with recorder.recording():
            engine.save_checkpoint(root / "run" / "checkpoints", tag=tag, **how)
            engine.wait_for_checkpoint()
        told["best" if tag == "best" else "latest"] = step
        if rank == 0:
            recorder.mark(dict(told))
        known[step] = fingerprints(engine)
        process_group.barrier()
    engine.destroy()
    return known


def load_all(rank, world, places, known):
    """From each disk, in the order of its steps."""
    engine = engine_for(world, 2)
    for step, place in places.items():
        engine.load_checkpoint(find_start("auto", place / "run"))
        assert (engine.global_steps, fingerprints(engine)) == (step, known[step])
    engine.destroy()


@dataclass(frozen=True)
class Found:
    """What a run finds on a disk."""

    begins: int
    """Step that ``train.resume=auto`` goes on from; 0: it begins."""
    latest: int
    """Step of the checkpoint that is loaded without a tag; 0: there is none."""
    best: int


class Reader:
    """Looks at disks, at equal ones once."""

    def __init__(self, place: Path) -> None:
        self.place, self._number = place, itertools.count()
        self._known: dict[Any, Any] = {}
        self._steps: dict[Any, int] = {}
        self.disks: dict[int, Path] = {}
        """A disk for each step that is loaded from some."""
        (place / "store").mkdir()

    def look(self, tree: Tree) -> Any:
        """A :class:`Found`, or what is broken, in words."""
        state = key(tree)
        if state not in self._known:
            path = self.place / str(next(self._number))
            lay(tree, path, self.place / "store")
            try:
                self._known[state] = found = self._found(path, path / "run" / "checkpoints")
                self.disks.setdefault(found.begins, path)
            except Exception as error:
                self._known[state] = f"broken: {type(error).__name__}: {error}"
        return self._known[state]

    def _found(self, path: Path, folder: Path) -> Found:
        if not folder.is_dir():
            return Found(0, 0, 0)
        for tag in folders.complete_tags(folder):
            self._step(folder / tag)
        if not (folder / "latest").exists() and not folders.complete_tags(folder):
            with pytest.raises(CheckpointError):
                folders.find(folder, None)
            return Found(0, 0, 0)
        begins = self._step(find_start("auto", path / "run"))
        folders.clear_remains(folder)  # as the next run's first save does
        assert self._step(find_start("auto", path / "run")) == begins
        best = self._step(folder / "best") if (folder / "best").exists() else 0
        named = self._step(folders.find(folder, None)) if (folder / "latest").exists() else 0
        assert named in (0, begins)
        return Found(begins, named, best)

    def _step(self, path: Path) -> int:
        files = frozenset((file.name, file.stat().st_ino) for file in path.iterdir())
        if files not in self._steps:
            report = verify(path)
            assert not report.problems, f"{path.name}: {report.problems[0]}"
            self._steps[files] = report.manifest.counters["global_steps"]
        return self._steps[files]


def ignored(name: str) -> bool:
    """Nobody reads it; it is removed, whatever it is."""
    return name.startswith((folders.SAVING, folders.DELETING)) or name.endswith((".tmp", ".lock"))


def lost(told: Any, found: Any) -> bool:
    told = told or {"latest": 0, "best": 0}
    return isinstance(found, str) or found.latest < told["latest"] or found.best < told["best"]


@pytest.mark.parametrize("world", [1, 2])
def test_saves(ranks, tmp_path, world):
    root, log = tmp_path / "root", tmp_path / "log"
    root.mkdir()
    known, *_ = ranks.run(save_all, root, log, world_size=world)
    events, reader = read(log), Reader(tmp_path)
    search = partial(losses, look=reader.look, lost=lost, ignored=ignored)
    assert next(search(events, chance=Random(0)), None) is None
    assert set(reader.disks) == {0, 1, 2, 3, 4, 6}
    places = {step: path for step, path in sorted(reader.disks.items()) if step}
    ranks.run(load_all, places, known, world_size=world)
    assert idle_flushes(events, search) == set()
