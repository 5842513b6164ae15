"""Ranks that are killed at any instant, in the middle of a save above all: what was saved is there, whole, and right.

Two hundred lives in a row go on from each other's checkpoints (four without ``-m exhaustive``). After each kill the
folder is looked at from outside; at the start of each life the loaded bits and then every loss are compared with those
of a run that nobody has disturbed.
"""

import atexit
import dataclasses
import functools
import os
import pickle
import random
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path

import pytest
import torch

from deepzero.checkpoint import async_save, shard_file
from deepzero.checkpoint import checkpoint_dir as folders
from deepzero.checkpoint.verify import verify as check_all
from deepzero.comm import process_group
from deepzero.health import hang_report
from tests.distributed.pool import ready_to_fork
from tests.distributed.training import make_model, one_step, start
from tests.e2e import runs
from tests.e2e.runs import SOON

DONE, WRONG, FAILED = 0, 3, 4
"""How a rank ends by itself; WRONG: a checkpoint has given other bits than were saved."""
SAVE_EVERY = 3
KEEP_LAST = 2


@dataclasses.dataclass
class Line:
    """Lives that go on from each other: the same number of ranks and precision, any stage."""

    world: int
    precision: str
    folder: Path
    until: int
    files: Path | None = None  # where optimizer states, and stage 3's parameters, lie in files
    generation: int = 0
    newest: int = 0  # the step that ``latest`` has named
    complete: int = 0  # checkpoints that lay there after the last kill

    @property
    def checkpoints(self):
        return self.folder / f"checkpoints{self.generation}"

    @property
    def reference(self):
        """Losses and hashes of the undisturbed run, by step."""
        return self.folder / "reference.pickle"

    def engine(self, stage):
        zero = {}
        if self.files is not None:
            files = {"device": "nvme", "nvme_path": str(self.files)}
            zero["offload_optimizer"] = {**files, "buffer_count": 12, "pipeline_read": True, "pipeline_write": True}
            zero |= {"offload_param": files} if stage == 3 else {}
        comm = {"timeout_seconds": 60}
        return start(make_model(), stage=stage, bucket=900, precision=self.precision, comm=comm, zero=zero)


# ---- what a rank does ------------------------------------------------------------------------------------------------


class Wrong(Exception):
    """Other bits than the reference's."""


def undisturbed(line, rank, here):
    engine, losses, hashes = line.engine(2), {}, {}
    for step in range(line.until):
        losses[step + 1] = one_step(engine, rank, line.world, step).loss
        hashes[step + 1] = engine.params_sha256()
    if rank == 0:
        line.reference.write_bytes(pickle.dumps((losses, hashes)))
    engine.destroy()


def live(line, rank, here, stage, slowness):
    """Go on from the newest checkpoint, compare with the reference, train and save."""
    losses, hashes = pickle.loads(line.reference.read_bytes())
    engine = line.engine(stage)
    (here / f"joined{rank}").touch()
    slow_disk(slowness)
    if folders.latest_tag(line.checkpoints) is not None:
        _, client = engine.load_checkpoint(line.checkpoints)
        if (engine.global_steps, engine.params_sha256()) != (client["step"], hashes[client["step"]]):
            raise Wrong(f"loaded step {engine.global_steps} where step {client['step']} was saved, or other bits")
    (here / f"loaded{rank}").touch()
    while (step := engine.global_steps + 1) <= line.until:
        if (loss := one_step(engine, rank, line.world, step - 1).loss) != losses[step]:
            raise Wrong(f"step {step}: loss {loss}")
        if step % SAVE_EVERY == 0:  # by turns in the background and not
            behind = step // SAVE_EVERY % 2 == 0
            engine.save_checkpoint(
                line.checkpoints, f"step_{step}", {"step": step}, asynchronous=behind, keep_last=KEEP_LAST
            )
    engine.wait_for_checkpoint()
    engine.destroy()


def slow_disk(seconds):
    """Writing takes its time, and so does everything around a commit: there are instants to be killed at."""
    put, replace, flush = shard_file.put, Path.replace, folders.flush_folder

    def slow_put(file, view):
        put(file, view[: len(view) // 2])
        time.sleep(seconds / 40)
        put(file, view[len(view) // 2 :])

    def slow_replace(self, target):
        time.sleep(seconds / 20)
        moved = replace(self, target)
        time.sleep(seconds / 20)
        return moved

    def slow_flush(path):
        time.sleep(seconds / 20)
        flush(path)

    # Those who can wait have thirty seconds, and three.
    async_save.GONE_SECONDS, async_save.BEAT_SECONDS, hang_report.ROLL_CALL_SECONDS = 2.0, 0.5, 1.0
    shard_file.put, folders.flush_folder = slow_put, slow_flush
    Path.replace = slow_replace


def born(act, line, rank, here, *given):
    """A process of its own; it ends as a program does, with what is registered for its end."""
    log = os.open(here / f"rank{rank}.txt", os.O_WRONLY | os.O_CREAT, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(line.world))
    os.environ["DEEPZERO_LAUNCH_FOLDER"] = str(here)
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    status = DONE
    try:
        act(line, rank, here, *given)
        process_group.shutdown()
    except BaseException as error:
        traceback.print_exc()
        status = WRONG if isinstance(error, Wrong) else FAILED
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


# ---- lives, and how they end -----------------------------------------------------------------------------------------


class Lives:
    """One life after another; each rank is a copy of a process that has imported everything."""

    def __init__(self, folder):
        self.folder, self.count, self.ranks = folder, 0, []

    def begin(self, act, line, *given):
        """The ranks of the next life; where they meet, leave signs of life, and print."""
        for rank in self.ranks:
            rank.close()  # it has ended
        self.count += 1
        self.here = self.folder / f"life{self.count}"
        self.here.mkdir()
        fork = functools.partial(ready_to_fork().Process, target=born, daemon=True)
        self.ranks = [fork(args=(act, line, number, self.here, *given)) for number in range(line.world)]
        for rank in self.ranks:
            rank.start()
        return self.ranks

    def ended(self):
        return [rank for rank in self.ranks if rank.exitcode is not None]

    def all_have(self, sign):
        return len(list(self.here.glob(f"{sign}[0-9]"))) == len(self.ranks)

    def until(self, condition, what, timeout=SOON + 10):
        try:
            runs.wait_until(condition, what, timeout, every=0.002)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.printed()}") from None

    def until_all_ended(self, timeout=SOON + 10):
        self.until(lambda: len(self.ended()) == len(self.ranks), "the end of those who were not killed", timeout)

    def printed(self):
        return "\n".join(f"--- {file.name}\n{file.read_text()}" for file in sorted(self.here.glob("rank*.txt")))


@pytest.fixture
def lives(tmp_path):
    """No rank outlives the test."""
    lives = Lives(tmp_path)
    yield lives
    for rank in lives.ranks:
        rank.kill()
        rank.join()


def make_line(lives, world, precision, until, in_files=False):
    """A line of lives, and the undisturbed run that they are compared with."""
    line = Line(world, precision, lives.folder / f"{precision}-{world}", until)
    line.folder.mkdir()
    if in_files:
        line.files = line.folder / "files"
        line.files.mkdir()
    ranks = lives.begin(undisturbed, line)
    lives.until_all_ended(100)
    assert {rank.exitcode for rank in ranks} == {DONE}, lives.printed()
    return line


@dataclasses.dataclass
class Tally:
    kills: int = 0
    during_save: int = 0
    after_load: int = 0
    alone: int = 0  # ranks that survived the kill of the other one …
    slowest: float = 0.0  # … and the longest that one of them took to end by itself
    left_behind: int = 0  # folders of interrupted saves that lay there after a kill


def saving(folder):
    return any(folder.glob(f"{folders.SAVING}*"))


def one_life(lives, line, chance, tally):
    lives.begin(live, line, chance.choice([1, 2, 3]), chance.uniform(0.05, 0.3))
    if tally.kills % 3 == 0:  # in a save, as soon as there is one
        lives.until(lambda: saving(line.checkpoints) or lives.ended(), "a save")
        time.sleep(chance.uniform(0.0, 0.25))
    elif tally.kills % 3 == 1:  # training, saving or between
        lives.until(lambda: lives.all_have("loaded") or lives.ended(), "the first step")
        time.sleep(chance.uniform(0.0, 0.8))
    else:  # at any time from the fork on: it joins, loads, trains
        time.sleep(chance.uniform(0.0, 0.8))
    tally.after_load += line.newest > 0 and lives.all_have("loaded")
    kill(lives, line, chance, tally)
    look_from_outside(line, tally, lives)


def kill(lives, line, chance, tally):
    """SIGKILL to some of the ranks; the others end by themselves."""
    # Who waits at the store for a rank that has not come yet has nobody to miss; a launcher would end it.
    ranks = lives.ranks
    victims = chance.choice([ranks, ranks[:1], ranks[-1:]]) if lives.all_have("joined") else ranks
    before = saving(line.checkpoints)
    for rank in victims:
        rank.kill()
    tally.during_save += before and saving(line.checkpoints)
    tally.kills += 1
    began = time.monotonic()
    lives.until_all_ended()
    if survivors := [rank for rank in ranks if rank not in victims]:
        tally.alone += len(survivors)
        tally.slowest = max(tally.slowest, time.monotonic() - began)
        assert time.monotonic() - began < SOON
    for rank in ranks:
        expected = {-signal.SIGKILL, DONE} if rank in victims else {FAILED, DONE}
        assert rank.exitcode in expected, f"status {rank.exitcode}\n{lives.printed()}"


def look_from_outside(line, tally, lives):
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
        assert newest >= line.newest, lives.printed()
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


def kills(lives, lines, count, seed):
    tally, chance = Tally(), random.Random(seed)
    while tally.kills < count:
        one_life(lives, lines[tally.kills // 3 % len(lines)], chance, tally)
    print(tally)
    return tally


THREE = ((2, "bf16"), (2, "fp32"), (1, "bf16"))


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("lines", "count"), [
    pytest.param(THREE[:1], 3, marks=pytest.mark.slow), pytest.param(THREE[:2], 50, marks=pytest.mark.exhaustive)
], ids=["three", "fifty"])  # fmt: skip
def test_kills_with_states_in_files(lives, lines, count):
    """What was saved is there as ever, and of the files nothing."""
    kills(lives, [make_line(lives, *place, 60, in_files=True) for place in lines], count, 3)


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("lines", "until", "count", "seed", "during_save", "after_load"), [
    pytest.param(THREE[:1], 60, 4, 0, 1, 0, marks=pytest.mark.slow),
    pytest.param(THREE[1:2], 60, 12, 2, 3, 0, marks=pytest.mark.exhaustive),
    pytest.param(THREE, 150, 200, 1, 60, 60, marks=pytest.mark.exhaustive),
], ids=["four", "twelve", "two hundred"])  # fmt: skip
def test_kills(lives, lines, until, count, seed, during_save, after_load):
    tally = kills(lives, [make_line(lives, *place, until) for place in lines], count, seed)
    assert tally.during_save >= during_save and tally.after_load >= after_load
