"""Disks that are full or closed, writers that meet, tags that are saved twice: nothing that was saved is lost."""

import dataclasses
import errno
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from deepzero import durable
from deepzero.checkpoint import async_save, shard_file
from deepzero.checkpoint import checkpoint_dir as folders
from deepzero.checkpoint import export as exporting
from deepzero.comm import process_group
from tests.distributed.checkpoints import engine_for, fingerprints, said, steps
from tests.distributed.pool import on_ranks

ROOT = Path(__file__).resolve().parents[2]


def names(folder):
    """What lies in a folder but the script, the same on all ranks."""
    process_group.barrier()
    found = sorted(path.name for path in folder.iterdir() if path.name != "zero_to_fp32.py")
    process_group.barrier()
    return found


def only(when, where, name, *value, **how):
    """An attribute is another inside, if ``when``."""
    return patch.object(where, name, *value, **how) if when else nullcontext()


def scarce(space):
    """In place of ``put``: the disk takes ``space`` more bytes."""
    put, left = shard_file.put, [space]

    def put_if_there_is_room(file, view):
        left[0] -= len(view)
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        put(file, view)

    return put_if_there_is_room


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("victim", [0, 1])
@on_ranks()
def test_the_disk_is_full_in_the_middle_of_a_save(rank, world, tmp_path, victim, asynchronous):
    engine = engine_for(world, 2)
    steps(engine, rank, world, 1)
    engine.save_checkpoint(tmp_path)
    kept = fingerprints(engine)
    steps(engine, rank, world, 2)
    with only(rank == victim, shard_file, "put", scarce(5000)):
        message = said(engine.save_checkpoint, tmp_path, asynchronous=asynchronous)
        assert (message is None) == asynchronous
        message = message or said(engine.wait_for_checkpoint)
    assert said(engine.wait_for_checkpoint) is None, "it is said once"
    assert names(tmp_path) == [".lock", "global_step1", "latest"]
    engine.load_checkpoint(tmp_path)
    assert (engine.global_steps, fingerprints(engine)) == (1, kept)
    steps(engine, rank, world, 2)
    engine.save_checkpoint(tmp_path, asynchronous=asynchronous)
    engine.wait_for_checkpoint()
    assert names(tmp_path) == [".lock", "global_step1", "global_step2", "latest"]
    engine.load_checkpoint(tmp_path)
    assert f"checkpoint {tmp_path}/global_step2 was not saved: rank {victim}: " in message
    assert f"rank-0000{victim}-of-00002.safetensors: No space left on device" in message
    assert message.endswith("What was saved before is untouched")


@on_ranks()
def test_a_save_that_fails_while_the_other_rank_writes(rank, world, tmp_path):
    """Rank 0 removes what there is, and rank 1 has made its file just then: the folder is not empty, and stays."""
    engine = engine_for(world, 2)
    with only(rank == 0, shard_file, "put", scarce(5000)), only(rank == 0, async_save.shutil, "rmtree"):
        message = said(engine.save_checkpoint, tmp_path)
        assert names(tmp_path) == [".lock"]
    assert "rank 0: " in message


@on_ranks()
def test_a_commit_that_fails_and_a_disk_too_full_beforehand(rank, world, tmp_path):
    """The shards are there, and the manifest cannot be written; what cannot be pruned stays."""
    engine = engine_for(world, 1)
    engine.save_checkpoint(tmp_path, tag="first")

    def refuse(path, content):
        raise OSError(errno.EIO, "Input/output error", str(path))

    with patch.object(folders, "write_whole", refuse):
        assert "manifest.json: Input/output error" in said(engine.save_checkpoint, tmp_path, tag="second")
    assert names(tmp_path) == [".lock", "first", "latest"]

    def refuse_latest(path, content):
        if path.name == "latest":
            refuse(path, content)
        durable.write_whole(path, content)

    before = folders.read_manifest(tmp_path / "first")
    for tag in ("first", "second"):  # in the place of another, and of none
        with patch.object(folders, "write_whole", refuse_latest):
            assert "latest: Input/output error" in said(engine.save_checkpoint, tmp_path, tag=tag)
        assert names(tmp_path) == [".lock", "first", "latest"]
        assert folders.read_manifest(tmp_path / "first") == before
    with only(rank == 0, folders, "prune", side_effect=OSError(errno.EACCES, "no", "old")):
        engine.save_checkpoint(tmp_path, tag="third", keep_last=1)
    assert folders.latest_tag(tmp_path) == "third", "complete, whatever became of the old ones"
    process_group.barrier()
    if rank == 0:
        (tmp_path / "latest").write_bytes(b"\xff")
    engine.save_checkpoint(tmp_path, tag="third", save_latest=False, keep_last=1)
    with only(rank == 0, shutil, "disk_usage", return_value=SimpleNamespace(free=1000)):
        too_full = said(engine.save_checkpoint, tmp_path, tag="fourth")
    assert names(tmp_path) == [".lock", "first", "latest", "third"]
    assert too_full.startswith(f"{tmp_path}: a checkpoint needs ")
    assert "kB and the disk has 1 kB left; make room" in too_full


@on_ranks()
def test_an_engine_goes_whose_last_save_has_failed(rank, world, tmp_path):
    engine = engine_for(world, 2)
    optimizer, dressed = engine.optimizer, type(engine.optimizer)
    with only(rank == 0, folders, "commit", side_effect=OSError(errno.EIO, "Input/output error")):
        engine.save_checkpoint(tmp_path, asynchronous=True)
        assert "Input/output error" in said(engine.destroy)
    assert type(optimizer) is dressed.__bases__[0] and not folders.holds(tmp_path)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("what", [MemoryError, KeyboardInterrupt])
@on_ranks()
def test_no_copy(rank, world, tmp_path, victim, what):
    """One rank cannot take its copy: the next save raises on all, and the ranks stay in step."""
    engine, began = engine_for(world, 2), time.monotonic()
    raises = pytest.raises(what) if rank == victim and what is KeyboardInterrupt else nullcontext()
    with raises, only(rank == victim, async_save.Saver, "_snapshot", side_effect=what("no memory")):
        engine.save_checkpoint(tmp_path, asynchronous=True)
    message = said(engine.save_checkpoint, tmp_path)
    assert time.monotonic() - began < 10
    assert f"{what.__name__}: no memory" in message and (rank == victim or f"rank {victim}: " in message)
    assert names(tmp_path) == [".lock"]
    engine.save_checkpoint(tmp_path)


@on_ranks()
def test_places_that_cannot_be_written_or_are_taken(rank, world, tmp_path):
    """What is no checkpoint is not replaced."""
    if rank == 0:
        (tmp_path / "file").touch()
        (tmp_path / "empty").mkdir()
        (tmp_path / "plots").mkdir()
        for name in ("notes", "plots/loss.png"):
            (tmp_path / name).write_text("mine")
    process_group.barrier()
    engine, file = engine_for(world, 1), tmp_path / "file"
    for place in (file, file / "below", Path("/proc/deepzero"), tmp_path / ("x" * 300)):
        message = said(engine.save_checkpoint, place)
        assert message.startswith(f"cannot write to {place}: ") and message.endswith("; choose another folder")
    for tag in ("plots", "notes"):
        message = said(engine.save_checkpoint, tmp_path, tag=tag)
        assert f"{tmp_path}/{tag} is there and is no checkpoint of deepzero" in message
    engine.save_checkpoint(tmp_path, tag="empty")
    assert {(tmp_path / name).read_text() for name in ("notes", "plots/loss.png")} == {"mine"}
    steps(engine, rank, world, 1)


@on_ranks(1)
def test_a_clock_that_was_put_back(rank, world, tmp_path):
    engine, tomorrow = engine_for(world, 1), time.time() + 86400
    for number in range(4):
        engine.save_checkpoint(tmp_path, tag=f"t{number}", keep_last=2)
        if number == 1:
            os.utime(tmp_path / "t1" / "COMMIT", (tomorrow, tomorrow))
    assert folders.complete_tags(tmp_path) == ["t2", "t3"]


@on_ranks()
def test_a_folder_of_which_each_host_has_its_own(rank, world, tmp_path):
    engine, write = engine_for(world, 1), async_save.write_shard
    on_its_host = lambda path, *given: write(tmp_path / "elsewhere" / path.name, *given)
    with patch.object(async_save, "write_shard", on_its_host if rank else write):
        message = said(engine.save_checkpoint, tmp_path)
    assert "rank 1: " in message and "on a disk that their hosts share" in message


@on_ranks()
def test_a_name_that_is_no_text(rank, world, tmp_path):
    """The other ranks hear what is wrong with it."""
    engine, name = engine_for(world, 1), os.fsdecode(b"na\xffme")
    engine.save_checkpoint(tmp_path / name)
    (tmp_path / name / "file").touch()
    assert said(engine.save_checkpoint, tmp_path / name / "file").startswith(
        f"cannot write to {tmp_path / name}/file: "
    )
    assert "cannot name a checkpoint" in said(engine.save_checkpoint, tmp_path, tag=name)
    steps(engine, rank, world, 1)


HOLD = """
import os, sys, time
from pathlib import Path
from deepzero.checkpoint.checkpoint_dir import acquire, holds
acquire(Path(sys.argv[1]))
mine = open(sys.argv[1] + ".pid", "w+")
mine.write(Path(sys.argv[1], ".lock").read_text())
mine.flush()
if os.fork() == 0:
    print("forked", holds(Path(sys.argv[1])), os.fstat(mine.fileno()).st_size > 0, flush=True)
    sys.stdin.read()
    os._exit(0)
time.sleep(60)
"""


def save_here(rank, world, folder):
    engine = engine_for(world, 1)
    message = said(engine.save_checkpoint, folder, tag="mine")
    engine.destroy()
    return message


def test_another_run_writes_to_the_folder(ranks, tmp_path):
    """Until it ends, and be it by SIGKILL; what it has forked (a data worker) may live on."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout.readline() == "forked False True\n"
            for message in ranks.run(save_here, tmp_path):
                assert message.startswith(f"another run writes to {tmp_path} (process {other.pid} on ")
            assert [path.name for path in tmp_path.iterdir()] == [".lock"]
        finally:
            other.send_signal(signal.SIGKILL)
        other.wait()
        assert ranks.run(save_here, tmp_path) == [None, None]
        # And the ranks have given it back.
        folders.acquire(tmp_path)
        folders.release(tmp_path)
        other.stdin.close()
        assert other.stdout.read() == "", "the worker has ended by itself"


def test_the_lock_is_held_as_long_as_somebody_of_this_process_holds_it(tmp_path):
    lock = tmp_path / folders.LOCK
    lock.write_text("process 1 on a machine with a name that is longer than that of any other, by far " * 2)
    folders.acquire(tmp_path)
    folders.acquire(tmp_path)
    assert lock.read_text() == f"process {os.getpid()} on {socket.gethostname()}"
    with lock.open() as other:
        for held in (True, False):
            folders.release(tmp_path)
            assert folders.holds(tmp_path) == held
            with pytest.raises(BlockingIOError) if held else nullcontext():
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    opened = os.open
    lock.write_text("process 2 of another user")

    def refuse(path, flags, *mode):
        if Path(path) == lock and flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return opened(path, flags, *mode)

    with patch.object(os, "open", refuse):
        folders.acquire(tmp_path)
    assert folders.holds(tmp_path) and lock.read_text() == "process 2 of another user"
    with lock.open() as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    folders.release(tmp_path)
    before = len(os.listdir("/dev/fd"))
    folders.acquire(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    folders.release(tmp_path / "run")
    assert len(os.listdir("/dev/fd")) == before, "given back, though the folder is gone"


@on_ranks()
def test_a_folder_that_is_removed_or_renamed_between_two_saves(rank, world, tmp_path):
    engine, folder = engine_for(world, 1), tmp_path / "run"
    for how in (shutil.rmtree, lambda path: path.rename(tmp_path / "old"), None):
        engine.save_checkpoint(folder)
        assert names(folder) == [".lock", "global_step0", "latest"]
        if rank == 0 and how is not None:
            how(folder)
        process_group.barrier()


@on_ranks()
def test_the_same_tag_again(rank, world, tmp_path):
    engine = engine_for(world, 2)
    for until in (1, 2, 3):
        steps(engine, rank, world, until)
        engine.save_checkpoint(tmp_path, tag="same")
        assert names(tmp_path) == [".lock", "latest", "same"]
        assert folders.read_manifest(tmp_path / "same").counters["global_steps"] == until
    process_group.barrier()
    if rank == 0:  # as a kill between the two renames leaves it
        (tmp_path / "same").rename(tmp_path / ".replaced-0123456789ab-same")
    process_group.barrier()
    engine.load_checkpoint(tmp_path)
    assert engine.global_steps == 3
    engine.save_checkpoint(tmp_path, tag="other", save_latest=False)
    assert names(tmp_path) == [".lock", "latest", "other", "same"]


@on_ranks()
def test_old_checkpoints_are_removed(rank, world, tmp_path):
    """Those of like tags, after the new one is there, and never the one that ``latest`` names."""
    engine, seen, commit = engine_for(world, 1), [], folders.commit
    engine.save_checkpoint(tmp_path, tag="best")
    kept = {1: "step_1", 2: "step_1 step_2", 9: "step_2 step_9", 10: "step_10 step_9"}
    for until in (1, 2, 9, 10, 11, 12, 13):
        steps(engine, rank, world, until)
        few = {"keep_last": 2} if until <= 10 else {"keep_last": 1, "save_latest": False}
        engine.save_checkpoint(tmp_path, tag=f"step_{until}", **few)
        assert names(tmp_path) == [".lock", "best", "latest", *kept.get(until, f"step_10 step_{until}").split()]
    engine.load_checkpoint(tmp_path)
    assert engine.global_steps == 10
    # Kills between a commit and the removal of old checkpoints leave one more each; the next save takes them along.
    for number in range(1, 6):
        engine.save_checkpoint(tmp_path, tag=f"turn_{number}")

    def counting(*arguments):
        seen.append(sum(tag.startswith("turn") for tag in folders.complete_tags(tmp_path)))
        commit(*arguments)

    with patch.object(folders, "commit", counting):
        engine.save_checkpoint(tmp_path, tag="turn_6", keep_last=2)
    assert seen == ([5] if rank == 0 else [])
    assert names(tmp_path)[-2:] == ["turn_5", "turn_6"] and len(names(tmp_path)) == 7


def test_a_slow_save_gives_signs_of_life(tmp_path):
    told, enough = [], threading.Event()

    def post(key, text):
        told.append((key, text))
        if len(told) == 4:
            enough.set()

    mailbox = patch.object(async_save, "StoreMailbox", lambda name: SimpleNamespace(set=post))
    with patch.object(async_save, "BEAT_SECONDS", 0.001), mailbox:
        saver, target = SimpleNamespace(rank=1, world_size=2), SimpleNamespace(folder=tmp_path, tag="slow")
        job = async_save._Job(saver, target, "0" * 12)
        assert enough.wait(60)
        job.end()
    assert {key for key, _ in told} == {"1/beat"} and len(set(told)) == len(told)


@on_ranks()
def test_two_engines_of_one_program_and_a_thread_that_fails(rank, world, tmp_path):
    """Both write at the same time, slowly, and one of them fails in its thread."""
    first, second = engine_for(world, 2), engine_for(world, 2)
    put = shard_file.put
    with patch.object(shard_file, "put", lambda file, view: (time.sleep(0.1), put(file, view))):
        first.save_checkpoint(tmp_path, tag="first", asynchronous=True)
        second.save_checkpoint(tmp_path, tag="second", asynchronous=True)
        assert said(first.wait_for_checkpoint) is said(second.wait_for_checkpoint) is None
    failing = only(rank == 0, async_save._Job, "_write_and_commit", side_effect=ZeroDivisionError)
    with failing, patch.object(async_save, "GONE_SECONDS", 1.0):
        first.save_checkpoint(tmp_path, tag="third", asynchronous=True)
        assert ("gave no sign of life" if rank else "ZeroDivisionError") in said(first.wait_for_checkpoint)
    first.destroy()
    second.destroy()
    assert {"first", "second"} < set(names(tmp_path))
    for call in (first.save_checkpoint, first.load_checkpoint):
        assert "the engine was destroyed" in said(call, tmp_path)


@on_ranks()
def test_a_disk_that_wants_the_page_cache(rank, world, tmp_path):
    """A disk that refuses what goes past the page cache, after it has taken a part of it."""
    engine = engine_for(world, 2)
    steps(engine, rank, world, 1)
    put, refused = shard_file.put, []

    def particular(file, view):
        if not refused:
            refused.append(file)
            file.write(view[: shard_file.PAGE_BYTES])
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        put(file, view)

    with patch.object(shard_file, "put", particular):
        engine.save_checkpoint(tmp_path, asynchronous=True)
        engine.wait_for_checkpoint()
    kept = fingerprints(engine)
    steps(engine, rank, world, 2)
    engine.load_checkpoint(tmp_path)
    assert refused and fingerprints(engine) == kept


@pytest.mark.parametrize("behind", [1, pytest.param(0, marks=pytest.mark.exhaustive)])
@on_ranks()
def test_a_flush_that_takes_longer_than_a_collective_may(rank, world, tmp_path, behind):
    """On either rank, waited for or not: the checkpoint is whole, and the one before is removed after that."""
    engine, flush = engine_for(world, 2, comm={"timeout_seconds": 0.03}), os.fsync
    for number, victim in enumerate((1 - behind, behind)):
        steps(engine, rank, world, number + 1)
        with only(rank == victim, os, "fsync", lambda handle: (time.sleep(0.05), flush(handle))):
            engine.save_checkpoint(tmp_path, tag=f"step_{number}", asynchronous=victim == behind, keep_last=1)
            assert said(engine.wait_for_checkpoint) is None
        assert names(tmp_path) == [".lock", "latest", f"step_{number}"]
    kept = fingerprints(engine)
    steps(engine, rank, world, 9)
    engine.load_checkpoint(tmp_path)
    assert fingerprints(engine) == kept


@on_ranks()
def test_a_disk_that_hangs(rank, world, tmp_path):
    """The other rank gives up after comm.save_timeout_seconds, and the checkpoint before is what it was."""
    engine_for(world, 2).save_checkpoint(tmp_path, tag="step_1")  # which on a busy machine may take longer
    victim, engine = 1, engine_for(world, 2, comm={"save_timeout_seconds": 0.3})
    flush, given_up = os.fsync, threading.Event()  # its flush returns after the save was given up, and not before
    with only(rank == victim, os, "fsync", lambda handle: (given_up.wait(), flush(handle))):
        engine.save_checkpoint(tmp_path, tag="step_2", asynchronous=True, keep_last=1)
        message = None if rank == victim else said(engine.wait_for_checkpoint)
        process_group.barrier()
        given_up.set()
        message = message or said(engine.wait_for_checkpoint)
    assert names(tmp_path) == [".lock", "latest", "step_1"]
    engine.load_checkpoint(tmp_path)
    assert "rank 1's disk has taken nothing for 0.3 s (comm.save_timeout_seconds)" in message


def test_rank_0_says_once_a_second_that_it_waits_for_a_shard():
    """At every look it would fill a store that is a file, which keeps each note."""
    now, posted = [0.0], []
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds))
    info = async_save.ShardInfo(1, 8, "", 8, [], ())
    job = object.__new__(async_save._Job)
    job.saver = SimpleNamespace(rank=0, world_size=2, silence_seconds=1800, poll_seconds=0.02)
    job._lost = lambda rank, patience: None
    written = json.dumps(dataclasses.asdict(info))
    job.channel = SimpleNamespace(
        get=lambda key: written if key == "1/written" and now[0] > 10 else None,
        set=lambda key, text: posted.append((key, text)),
    )
    with patch.object(async_save, "time", clock):
        assert len(job._gather(info)) == 2
    assert len(posted) == len(set(posted)) == 10 and {key for key, _ in posted} == {"0/progress"}


@on_ranks()
def test_no_flush_has_much_to_write(rank, world, tmp_path):
    """How much each flush had to write, and what was told to the others after it."""
    folder, engine = tmp_path / "checkpoints", engine_for(world, 2)
    told, sizes, flush, put, alive = [], [0], os.fsync, shard_file.put, async_save._Job._alive
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(durable, "FLUSH_BYTES", 8192)
        patches.setattr(shard_file, "WRITE_BYTES", 4096)
        patches.setattr(exporting, "PIECE_BYTES", 4096)
        patches.setattr(shard_file, "put", lambda file, view: (put(file, view), sizes.append(sizes.pop() + len(view))))
        patches.setattr(os, "fsync", lambda handle: (flush(handle), sizes.append(0)))
        patches.setattr(async_save._Job, "_alive", lambda job, written: (told.append(written), alive(job, written)))
        for asynchronous in (False, True):
            engine.save_checkpoint(folder, tag=f"behind={asynchronous}", asynchronous=asynchronous)
            engine.wait_for_checkpoint()
        engine.save_16bit_model(folder.with_name("model"))
    for asynchronous in (False, True):
        engine.load_checkpoint(folder, tag=f"behind={asynchronous}")
    assert sum(sizes) > 20_000 and max(sizes) <= 8192 + 2 * 4096
    assert {8192, 16384} <= set(told)
