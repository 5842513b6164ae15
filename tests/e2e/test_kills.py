"""Ranks that are killed at any instant, in the middle of a save above all: what was saved is there, whole, and right.

Two hundred lives in a row go on from each other's checkpoints (four without ``-m exhaustive``). After each kill the
folder is looked at from outside; at the start of each life the loaded bits and then every loss are compared with those
of a run that nobody has disturbed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from deepzero.checkpoint import checkpoint_dir as folders
from deepzero.checkpoint.verify import verify as check_all
from tests.e2e import runs
from tests.e2e.kill_program import DONE, FAILED, KEEP_LAST
from tests.e2e.runs import SOON

PROGRAM = str(runs.ROOT / "tests" / "e2e" / "kill_program.py")


@dataclasses.dataclass
class Line:
    """Lives that go on from each other: the same number of ranks and precision, any stage."""

    world: int
    precision: str
    folder: Path
    reference: Path
    until: int
    files: Path | None = None  # where optimizer states, and stage 3's parameters, lie in files
    generation: int = 0
    newest: int = 0  # the step that ``latest`` has named
    complete: int = 0  # checkpoints that lay there after the last kill

    @property
    def checkpoints(self):
        return self.folder / f"checkpoints{self.generation}"


@dataclasses.dataclass
class Tally:
    """What the kills have met."""

    kills: int = 0
    during_save: int = 0
    after_load: int = 0
    alone: int = 0  # ranks that survived the kill of the other one …
    slowest: float = 0.0  # … and the longest that one of them took to end by itself
    left_behind: int = 0  # folders of interrupted saves that lay there after a kill


class Zygote:
    """The process that forks the ranks; see kill_program.py."""

    def __init__(self, command, folder):
        self.command, self.folder = command, folder
        self.lives, self.ended, self._read, self._pids = 0, {}, 0, []
        (folder / "logs").mkdir()
        (folder / "jobs").touch()
        runs.wait_until((folder / "events").exists, "the imports")

    def begin(self, **job):
        """Fork a life's ranks."""
        self.lives += 1
        meeting = self.folder / f"meeting-{self.lives}"
        meeting.mkdir()
        self._pids, self.ended = [], {}
        self._hand({**job, "life": self.lives, "meeting": str(meeting), "logs": str(self.folder / "logs")})
        self.until(lambda: bool(self._pids), "a birth")
        return self._pids

    def end(self):
        self._hand({"end": True})

    def until(self, condition, what, timeout=SOON + 10):
        """Take note of events until ``condition`` is true."""
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not within {timeout} s\n{self.logs()}")
            assert self.command.process.poll() is None
            lines = (self.folder / "events").read_text().splitlines(keepends=True)
            for line in (line for line in lines[self._read :] if line.endswith("\n")):
                self._read += 1
                event = json.loads(line)
                self._pids = event.get("pids", self._pids)
                if "ended" in event:
                    self.ended[event["ended"]] = event["status"]
            time.sleep(0.002)

    def logs(self):
        """What the ranks of this life have printed."""
        files = sorted((self.folder / "logs").glob(f"life{self.lives}-*"))
        return "\n".join(f"--- {file.name}\n{file.read_text()}" for file in files)

    def _hand(self, job):
        with (self.folder / "jobs").open("a") as file:
            file.write(json.dumps(job) + "\n")


@pytest.fixture
def zygote(tmp_path):
    arguments = [sys.executable, "-W", "error", PROGRAM, str(tmp_path / "jobs"), str(tmp_path / "events")]
    (tmp_path / "jobs").touch()
    with runs.started(arguments, tmp_path) as command:
        zygote = Zygote(command, tmp_path)
        yield zygote
        zygote.end()
        done = command.wait()
        assert done.status == 0, done.err


def make_line(zygote, world, precision, until, in_files=False):
    """A line of lives, and the undisturbed run that they are compared with."""
    folder = zygote.folder / f"{precision}-{world}"
    folder.mkdir()
    line = Line(world, precision, folder, folder / "reference.json", until)
    if in_files:
        line.files = folder / "files"
        line.files.mkdir()
    record, files = str(line.reference), str(line.files or "")
    pids = zygote.begin(
        world=world, precision=precision, stage=2, until=until, folder=str(folder), record=record, files=files
    )
    zygote.until(lambda: len(zygote.ended) == len(pids), "the reference", 100)
    assert set(zygote.ended.values()) == {DONE}, zygote.logs()
    return line


def saving(folder):
    return any(folder.glob(f"{folders.SAVING}*"))


def one_life(zygote, line, chance, tally):
    """A life, its end, and what it leaves."""
    alive = line.folder / f"alive{zygote.lives}"
    alive.mkdir()
    pids = zygote.begin(
        world=line.world, precision=line.precision, stage=chance.choice([1, 2, 3]), until=line.until,
        folder=str(line.checkpoints), reference=str(line.reference), alive=str(alive), slow=chance.uniform(0.05, 0.3),
        files=str(line.files or ""),
    )  # fmt: skip
    if tally.kills % 3 == 0:  # in a save, as soon as there is one
        zygote.until(lambda: saving(line.checkpoints) or zygote.ended, "a save")
        time.sleep(chance.uniform(0.0, 0.25))
    elif tally.kills % 3 == 1:  # training, saving or between
        zygote.until(lambda: len(list(alive.glob("loaded*"))) == line.world or zygote.ended, "the first step")
        time.sleep(chance.uniform(0.0, 0.8))
    else:  # at any time from the fork on: it joins, loads, trains
        time.sleep(chance.uniform(0.0, 0.8))
    tally.after_load += line.newest > 0 and len(list(alive.glob("loaded*"))) == line.world
    kill(zygote, line, pids, chance, tally, joined=len(list(alive.glob("joined*"))) == line.world)
    look_from_outside(line, tally, zygote)


def kill(zygote, line, pids, chance, tally, joined):
    """SIGKILL to some of the ranks; the others end by themselves."""
    # Who waits at the store for a rank that has not come yet has nobody to miss; a launcher would end it.
    victims = chance.choice([pids, pids[:1], pids[-1:]]) if joined else pids
    before = saving(line.checkpoints)
    for pid in victims:
        if pid not in zygote.ended:
            os.kill(pid, signal.SIGKILL)
    tally.during_save += before and saving(line.checkpoints)
    tally.kills += 1
    began = time.monotonic()
    zygote.until(lambda: len(zygote.ended) == len(pids), "the end of those who were not killed")
    if survivors := [pid for pid in pids if pid not in victims]:
        tally.alone += len(survivors)
        tally.slowest = max(tally.slowest, time.monotonic() - began)
        assert time.monotonic() - began < SOON
    for pid, status in zygote.ended.items():
        expected = {-signal.SIGKILL, DONE} if pid in victims else {FAILED, DONE}
        assert status in expected, f"status {status}\n{zygote.logs()}"


def look_from_outside(line, tally, zygote):
    """What the folder holds: whole checkpoints, the newest named, and little else."""
    folder = line.checkpoints
    assert line.files is None or list(line.files.iterdir()) == []
    if not folder.exists():
        assert line.newest == 0
        return
    complete = folders.complete_tags(folder)
    for tag in complete:
        verify(folder / tag)
    if (latest := folders.latest_tag(folder)) is not None:
        newest = verify(folders.find(folder, None))
        assert newest >= line.newest, zygote.logs()
        line.newest = newest
    assert latest is not None or line.newest == 0, "once there was a checkpoint"
    names, hidden = [path.name for path in folder.iterdir()], (folders.SAVING, folders.REPLACED, folders.DELETING)
    left = [name for name in names if name.startswith(hidden)]
    beside = {"latest", ".latest.tmp", "zero_to_fp32.py", ".zero_to_fp32.py.tmp", folders.LOCK}
    assert set(names) - set(left) <= {*complete, *beside}, names
    # A kill between a commit and the removal of what is too old leaves one too many; the next save takes it along.
    assert len(complete) <= max(KEEP_LAST, line.complete) + 1
    line.complete = len(complete)
    assert all(sum(name.startswith(kind) for name in left) <= 1 for kind in hidden), names
    tally.left_behind += len(left)
    if line.newest > line.until - 30:
        line.generation, line.newest, line.complete = line.generation + 1, 0, 0


def verify(path):
    """Compare every hash of a checkpoint; its step."""
    report = check_all(path)
    assert report.problems == [] and report.manifest is not None
    return report.manifest.counters["global_steps"]


def kills(zygote, lines, count, seed):
    tally, chance = Tally(), random.Random(seed)
    while tally.kills < count:
        one_life(zygote, lines[tally.kills // 3 % len(lines)], chance, tally)
    print(tally)
    return tally


THREE = ((2, "bf16"), (2, "fp32"), (1, "bf16"))


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("lines", "count"), [
    pytest.param(THREE[:1], 3, marks=pytest.mark.slow), pytest.param(THREE[:2], 50, marks=pytest.mark.exhaustive)
], ids=["three", "fifty"])  # fmt: skip
def test_kills_with_states_in_files(zygote, lines, count):
    """What was saved is there as ever, and of the files nothing."""
    kills(zygote, [make_line(zygote, *place, 60, in_files=True) for place in lines], count, 3)


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("lines", "until", "count", "seed", "during_save", "after_load"), [
    pytest.param(THREE[:1], 60, 4, 0, 1, 0, marks=pytest.mark.slow),
    pytest.param(THREE[1:2], 60, 12, 2, 3, 0, marks=pytest.mark.exhaustive),
    pytest.param(THREE, 150, 200, 1, 60, 60, marks=pytest.mark.exhaustive),
], ids=["four", "twelve", "two hundred"])  # fmt: skip
def test_kills(zygote, lines, until, count, seed, during_save, after_load):
    tally = kills(zygote, [make_line(zygote, *place, until) for place in lines], count, seed)
    assert tally.during_save >= during_save and tally.after_load >= after_load
