"""The power goes at any instant: what was saved is there, whole, and newest; and no flush is made for nothing."""

import errno
import itertools
import json
import os
import shutil
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load

from deepzero.checkpoint import checkpoint_dir as folders
from deepzero.checkpoint.errors import CheckpointError
from deepzero.checkpoint.export import TensorPlan, divide, write_model
from deepzero.checkpoint.verify import verify
from deepzero.comm import process_group
from deepzero.compat import zero_to_fp32
from deepzero.monitor.metrics_file import MetricsFile, kept_metrics, write_summary
from deepzero.training.run_folder import find_start
from tests.distributed.checkpoints import engine_for, fingerprints, steps
from tests.distributed.power import Recorder, idle_flushes, key, lay, losses, read

SAVES = (
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


class Found(NamedTuple):
    """What a run finds on a disk: steps; 0 is none."""

    begins: int = 0  # ``train.resume=auto`` goes on from it
    latest: int = 0  # is loaded without a tag
    best: int = 0


class Reader:
    """Looks at disks, at equal ones once; :attr:`disks` has one for each step that is loaded from some."""

    def __init__(self, place):
        self.place, self._number, self._known, self._steps, self.disks = place, itertools.count(), {}, {}, {}
        (place / "store").mkdir()

    def look(self, tree):
        """A :class:`Found`, or what is broken, in words."""
        if (state := key(tree)) not in self._known:
            path = self.place / str(next(self._number))
            lay(tree, path, self.place / "store")
            try:
                self._known[state] = found = self._found(path, path / "run" / "checkpoints")
                self.disks.setdefault(found.begins, path)
            except Exception as error:
                self._known[state] = f"broken: {type(error).__name__}: {error}"
        return self._known[state]

    def _found(self, path, folder):
        if (script := folder / zero_to_fp32.SCRIPT).exists():
            assert script.read_text() == zero_to_fp32._TEXT, "the script is cut short"
        for tag in folders.complete_tags(folder):
            self._step(folder / tag)
        if not (folder / "latest").exists() and not folders.complete_tags(folder):
            with pytest.raises(CheckpointError):
                folders.find(folder, None)
            return Found()
        begins = self._step(find_start("auto", path / "run"))
        folders.clear_remains(folder)  # as the next run's first save does
        assert self._step(find_start("auto", path / "run")) == begins
        best = self._step(folder / "best") if (folder / "best").exists() else 0
        named = self._step(folders.find(folder, None)) if (folder / "latest").exists() else 0
        assert named in (0, begins)
        return Found(begins, named, best)

    def _step(self, path):
        files = frozenset((file.name, file.stat().st_ino) for file in path.iterdir())
        if files not in self._steps:
            report = verify(path)
            assert not report.problems, f"{path.name}: {report.problems[0]}"
            self._steps[files] = report.manifest.counters["global_steps"]
        return self._steps[files]


def ignored(name):
    """Nobody reads it; it is removed, whatever it is."""
    return name.startswith((folders.SAVING, folders.DELETING)) or name.endswith((".tmp", ".lock"))


def lost(told, found):
    told = told or {"latest": 0, "best": 0}
    return isinstance(found, str) or found.latest < told["latest"] or found.best < told["best"]


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
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


class Killed(BaseException):
    """Nothing of the process goes on."""


def saved_twice(rank, world, folder):
    engine = engine_for(world, 2)
    for step in (1, 2):
        steps(engine, rank, world, step)
        engine.save_checkpoint(folder, tag=f"step_{step}")
    engine.destroy()


def test_what_a_killed_process_had_no_time_to_flush(ranks, tmp_path, monkeypatch):
    """Killed between a renaming and its flush; the next process sees the new name, and removes what it stands for."""
    folder = tmp_path / "root" / "run" / "checkpoints"
    ranks.run(saved_twice, folder, world_size=1)
    recorder = Recorder(tmp_path / "root", tmp_path / "log")
    recorder.mark({"latest": 2, "best": 0})
    shutil.copytree(folder / "step_2", tmp_path / "again")
    flush = folders.flush_folder

    def kill(path):
        if path == folder:
            raise Killed
        flush(path)

    def commit_again():
        temporary = folder / ".saving-0123456789ab-step_2"
        shutil.move(tmp_path / "again", temporary)
        for file in temporary.iterdir():
            with open(file) as there:
                os.fsync(there.fileno())
        folders.commit(folder, temporary, folders.read_manifest(temporary), True)

    settled = len(read(tmp_path / "log"))
    for killed in (commit_again, partial(folders.prune, folder, "step_2", 1)):
        with recorder.recording():
            with monkeypatch.context() as patch, pytest.raises(Killed):
                patch.setattr(folders, "flush_folder", kill)
                killed()
            folders.clear_remains(folder)
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "latest", "step_2", "zero_to_fp32.py"]
    reader = Reader(tmp_path)
    events = read(tmp_path / "log")
    search = partial(losses, look=reader.look, lost=lost, ignored=ignored, settled=settled)
    assert next(search(events, chance=Random(0)), None) is None
    needed = {event[2] for event in events if event[0] == "flush"} - idle_flushes(events, search)
    assert any("clear_remains" in site for site in needed)


def write_numbers(folder, number, max_bytes):
    files = divide([TensorPlan(name, "F32", (100,)) for name in "abc"], max_bytes)
    values = itertools.repeat(torch.full((100,), float(number)))
    write_model(folder, files, values, replace=True, extra={"config.json": str(number).encode()})


def find_model(tree):
    """The number of the model that a reader opens; 0: it finds none."""
    files = tree.get("new", {}).get("model", {})
    single, index = files.get("model.safetensors"), files.get("model.safetensors.index.json")
    if single is None and index is None:
        return 0
    try:
        assert single is None or index is None, "two models"
        parts = {"model.safetensors"} if index is None else set(json.loads(index)["weight_map"].values())
        tensors = {name: value for part in parts for name, value in load(files[part]).items()}
        numbers = {value for tensor in tensors.values() for value in tensor.tolist()} | {float(files["config.json"])}
        assert sorted(tensors) == ["a", "b", "c"] and len(numbers) == 1, numbers
        return int(numbers.pop())
    except Exception as error:
        return f"broken: {type(error).__name__}: {error}"


def test_a_model_appears_whole(tmp_path, monkeypatch):
    """Of several files over several, over one, one over several; and one that fails when all but its index is there."""
    (tmp_path / "root").mkdir()
    recorder = Recorder(tmp_path / "root", tmp_path / "log")
    out = tmp_path / "root" / "new" / "model"
    replace = Path.replace

    def refuse(source, target):
        if target.name.endswith("index.json") and target.parent == out and "older" not in source.parts:
            raise OSError(errno.EIO, "Input/output error")
        replace(source, target)

    with recorder.recording():
        for number, max_bytes in enumerate((500, 500, 5000, 500, 500, 5000), start=1):
            with monkeypatch.context() as patch, pytest.raises(CheckpointError) if number == 5 else nullcontext():
                if number == 5:
                    patch.setattr(Path, "replace", refuse)
                write_numbers(out, number, max_bytes)
            recorder.mark(4 if number == 5 else number)

    known = {}

    def look(tree):
        return known[state] if (state := key(tree)) in known else known.setdefault(state, find_model(tree))

    def lost(told, found):
        return isinstance(found, str) or found not in (0, told, (told or 0) + 1, (told or 0) + 2)

    def lost_when_told(told, found):
        return lost(told, found) or (told is not None and found == 0)

    search = partial(losses, look=look, ignored=lambda name: name.startswith(".exporting"))

    def both(events, first=0, chance=None):
        yield from search(events, lost=lost, first=first, chance=chance)
        for number in (at for at, event in enumerate(events) if event[0] == "mark" and at >= first):
            yield from search(events[: number + 1], lost=lost_when_told, first=number, chance=chance)

    events = read(tmp_path / "log")
    assert next(both(events, chance=Random(0)), None) is None
    assert idle_flushes(events, both) == set()


def test_small_files_of_a_run(tmp_path):
    """A run goes on: of its metrics there is what it keeps, of its summary the old or the new one."""
    run = tmp_path / "root" / "run"
    earlier = MetricsFile(run)
    for step in range(1, 6):
        earlier.write("train", {"step": step, "loss": 1.0})
    earlier.finish({})
    write_summary(run, {"number": 0})
    recorder = Recorder(tmp_path / "root", tmp_path / "log")
    recorder.mark("begin")
    settled = len(read(tmp_path / "log"))
    with recorder.recording():
        going_on = MetricsFile(run, kept_metrics(run, 3))
        going_on.write("train", {"step": 4, "loss": 1.0})
        write_summary(run, {"number": 1})
        going_on.write("train", {"step": 5, "loss": 1.0})
        write_summary(run, {"number": 2})
        going_on.finish({})

    def look(tree):
        place = tmp_path / "look"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        for name, content in tree["run"].items():
            (place / name).write_bytes(content)
        try:
            assert [entry["step"] for entry in kept_metrics(place, 3)] == [1, 2, 3]
            MetricsFile(place, kept_metrics(place, 3)).finish({})
            return json.loads((place / "summary.json").read_text())["number"]
        except Exception as error:
            return f"broken: {type(error).__name__}: {error}"

    search = partial(losses, look=look, lost=lambda told, found: isinstance(found, str), settled=settled)
    search = partial(search, ignored=lambda name: name.startswith("."))
    events = read(tmp_path / "log")
    assert next(search(events, chance=Random(0)), None) is None
    assert idle_flushes(events, search) == set()
