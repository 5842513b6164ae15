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
from collections import namedtuple
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from deepzero import durable
from deepzero.checkpoint import async_save, shard_file
from deepzero.checkpoint import checkpoint_dir as folders
from deepzero.checkpoint import export as exporting
from deepzero.checkpoint.errors import CheckpointError
from deepzero.comm import process_group
from deepzero.offload.arena import ALIGN_BYTES
from tests.distributed.checkpoints import engine_for, fingerprints, steps
from tests.distributed.pool import on_ranks
from tests.distributed.test_checkpoint_bad_input import said

ROOT = Path(__file__).resolve().parents[2]


def names(folder):
    """What lies in a folder, the same on all ranks."""
    process_group.barrier()
    found = sorted(path.name for path in folder.iterdir())
    process_group.barrier()
    return found


def full_after(space, patch):
    """The disk takes ``space`` more bytes."""
    put, left = shard_file.put, [space]

    def scarce(file, view):
        left[0] -= len(view)
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        put(file, view)

    patch.setattr(shard_file, "put", scarce)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("victim", [0, 1])
@on_ranks()
def test_the_disk_is_full_in_the_middle_of_a_save(rank, world, tmp_path, victim, asynchronous):
    stage = 2
    engine = engine_for(world, stage)
    steps(engine, rank, world, 1)
    engine.save_checkpoint(tmp_path)
    kept = fingerprints(engine)
    steps(engine, rank, world, 2)
    with pytest.MonkeyPatch.context() as patch:
        if rank == victim:
            full_after(5000, patch)
        message = said(engine.save_checkpoint, tmp_path, asynchronous=asynchronous)
        assert (message is None) == asynchronous
        message = message or said(engine.wait_for_checkpoint)
    assert said(engine.wait_for_checkpoint) is None, "it is said once"
    left = names(tmp_path)
    engine.load_checkpoint(tmp_path)
    assert (engine.global_steps, fingerprints(engine)) == (1, kept)
    steps(engine, rank, world, 2)
    engine.save_checkpoint(tmp_path, asynchronous=asynchronous)
    engine.wait_for_checkpoint()
    assert names(tmp_path) == [".lock", "global_step1", "global_step2", "latest"]
    engine.load_checkpoint(tmp_path)
    engine.destroy()
    assert f"checkpoint {tmp_path}/global_step2 was not saved: rank {victim}: " in message
    assert f"rank-0000{victim}-of-00002.safetensors: No space left on device" in message
    assert message.endswith("What was saved before is untouched")
    assert left == [".lock", "global_step1", "latest"]


@on_ranks()
def test_a_save_that_fails_while_the_other_rank_writes(rank, world, tmp_path):
    """Rank 0 removes what there is, and rank 1 has made its file just then: the folder is not empty, and stays."""
    engine = engine_for(world, 2)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            full_after(5000, patch)
            patch.setattr(async_save.shutil, "rmtree", lambda *args, **kwargs: None)
        message = said(engine.save_checkpoint, tmp_path)
        left = names(tmp_path)
    engine.destroy()
    assert "rank 0: " in message
    assert left == [".lock"]


@on_ranks()
def test_a_commit_that_fails_and_a_disk_too_full_beforehand(rank, world, tmp_path):
    """The shards are there, and the manifest cannot be written."""
    engine = engine_for(world, 1)
    engine.save_checkpoint(tmp_path, tag="first")
    with pytest.MonkeyPatch.context() as patch:

        def refuse(path, content):
            raise OSError(errno.EIO, "Input/output error", str(path))

        patch.setattr(folders, "write_whole", refuse)
        message = said(engine.save_checkpoint, tmp_path, tag="second")
    left = names(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(folders, "prune", lambda *args: (_ for _ in ()).throw(OSError(errno.EACCES, "no", "old")))
        engine.save_checkpoint(tmp_path, tag="third", keep_last=1)
    assert folders.latest_tag(tmp_path) == "third", "complete, whatever became of the old ones"
    process_group.barrier()
    if rank == 0:
        (tmp_path / "latest").write_bytes(b"\xff")
    engine.save_checkpoint(tmp_path, tag="third", save_latest=False, keep_last=1)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(shutil, "disk_usage", lambda _: namedtuple("Usage", "free")(1000))
        too_full = said(engine.save_checkpoint, tmp_path, tag="fourth")
    assert names(tmp_path) == [".lock", "first", "latest", "third"]
    engine.destroy()
    assert "manifest.json: Input/output error" in message
    assert left == [".lock", "first", "latest"]
    assert too_full.startswith(f"{tmp_path}: a checkpoint needs 0.000 GB and the disk has 0.000 GB left; make room")


@pytest.mark.parametrize("victim", [0, 1])
@on_ranks()
def test_no_memory_for_the_copy(rank, world, tmp_path, victim):
    """One rank cannot take its copy: it says so itself, the others hear of it."""
    engine = engine_for(world, 2)
    with pytest.MonkeyPatch.context() as patch:
        if rank == victim:
            patch.setattr(async_save.Saver, "_snapshot", lambda *_: (_ for _ in ()).throw(MemoryError("no memory")))
        began = time.monotonic()
        with pytest.raises(MemoryError) if rank == victim else nullcontext():
            engine.save_checkpoint(tmp_path, asynchronous=True)
        message = said(engine.wait_for_checkpoint)
        assert time.monotonic() - began < 10
    assert rank == victim or f"rank {victim}: MemoryError: no memory" in message
    assert names(tmp_path) == [".lock"]
    engine.save_checkpoint(tmp_path)
    engine.destroy()


@on_ranks()
def test_folders_that_cannot_be_written(rank, world, tmp_path):
    file = tmp_path / "file"
    file.touch()
    engine = engine_for(world, 1)
    for place in (file, file / "below", Path("/proc/deepzero"), tmp_path / ("x" * 300)):
        message = said(engine.save_checkpoint, place)
        assert message.startswith(f"cannot write to {place}: ") and message.endswith("; choose another folder")
    steps(engine, rank, world, 1)
    engine.destroy()


HOLD = """
import os, sys, time
from pathlib import Path
from deepzero.checkpoint.checkpoint_dir import acquire, holds
acquire(Path(sys.argv[1]))
if os.fork() == 0:
    print("forked", holds(Path(sys.argv[1])), flush=True)
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
            assert other.stdout.readline() == "forked False\n"
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
    engine.destroy()


@on_ranks()
def test_old_checkpoints_are_removed(rank, world, tmp_path):
    """Those of like tags, and never the one that ``latest`` names."""
    engine = engine_for(world, 1)
    engine.save_checkpoint(tmp_path, tag="best")
    kept = {1: "step_1", 2: "step_1 step_2", 9: "step_2 step_9", 10: "step_10 step_9"}
    for until in (1, 2, 9, 10, 11, 12, 13):
        steps(engine, rank, world, until)
        few = {"keep_last": 2} if until <= 10 else {"keep_last": 1, "save_latest": False}
        engine.save_checkpoint(tmp_path, tag=f"step_{until}", **few)
        assert names(tmp_path) == [".lock", "best", "latest", *kept.get(until, f"step_10 step_{until}").split()]
    engine.load_checkpoint(tmp_path)
    assert engine.global_steps == 10
    engine.destroy()


def test_an_unfinished_save_is_said(tmp_path):
    (tmp_path / ".saving-0123456789ab-x").mkdir()
    with pytest.raises(CheckpointError, match="its only save was interrupted"):
        folders.find(tmp_path, None)


def test_the_lock_is_held_as_long_as_somebody_of_this_process_holds_it(tmp_path):
    lock = tmp_path / folders.LOCK
    lock.write_text("process 1 on a machine with a name that is longer than that of any other, by far " * 2)
    folders.acquire(tmp_path)
    folders.acquire(tmp_path)
    assert lock.read_text() == f"process {os.getpid()} on {socket.gethostname()}"
    folders.release(tmp_path)
    assert folders.holds(tmp_path)
    folders.release(tmp_path)
    assert not folders.holds(tmp_path)
    with lock.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while it is locked


def test_a_slow_save_gives_signs_of_life(tmp_path, monkeypatch):
    told, enough = [], threading.Event()

    def post(key, text):
        told.append((key, text))
        if len(told) == 4:
            enough.set()

    monkeypatch.setattr(async_save, "BEAT_SECONDS", 0.001)
    monkeypatch.setattr(async_save, "StoreMailbox", lambda name: SimpleNamespace(set=post))
    job = async_save._Job(SimpleNamespace(rank=1, world_size=2), SimpleNamespace(folder=tmp_path, tag="slow"), "0" * 12)
    assert enough.wait(60)
    job.end()
    assert {key for key, _ in told} == {"1/beat"} and len(set(told)) == len(told)


def two_engines(rank, world, folder):
    """Both write at the same time, slowly, and one of them fails in its thread."""
    first, second = engine_for(world, 2), engine_for(world, 2)
    put = shard_file.put
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_file, "put", lambda file, view: (time.sleep(0.1), put(file, view)))
        first.save_checkpoint(folder, tag="first", asynchronous=True)
        second.save_checkpoint(folder, tag="second", asynchronous=True)
        found = [said(first.wait_for_checkpoint), said(second.wait_for_checkpoint)]
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(async_save._Job, "_write_and_commit", lambda *_: 1 / 0)
        patch.setattr(async_save, "GONE_SECONDS", 1.0)
        first.save_checkpoint(folder, tag="third", asynchronous=True)
        found.append(said(first.wait_for_checkpoint))
    first.destroy()
    second.destroy()
    return found, said(first.save_checkpoint, folder), said(first.load_checkpoint, folder)


def test_two_engines_of_one_program_and_a_thread_that_fails(ranks, tmp_path):
    for rank, (found, save, load) in enumerate(ranks.run(two_engines, tmp_path)):
        assert found[:2] == [None, None]
        assert ("gave no sign of life" if rank else "ZeroDivisionError") in found[2]
        assert "the engine was destroyed" in save and "the engine was destroyed" in load
    assert {"first", "second"} < set(names(tmp_path))


def over_something_else(rank, world, folder):
    engine = engine_for(world, 1)
    found = [said(engine.save_checkpoint, folder, tag=tag) for tag in ("plots", "notes", "empty")]
    engine.destroy()
    return found


def test_what_is_no_checkpoint_is_not_replaced(ranks, tmp_path):
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "loss.png").write_text("mine")
    (tmp_path / "notes").write_text("mine")
    (tmp_path / "empty").mkdir()
    for plots, notes, empty in ranks.run(over_something_else, tmp_path):
        assert f"{tmp_path}/plots is there and is no checkpoint of deepzero" in plots
        assert f"{tmp_path}/notes is there and is no checkpoint of deepzero" in notes
        assert empty is None
    assert (tmp_path / "plots" / "loss.png").read_text() == (tmp_path / "notes").read_text() == "mine"


@on_ranks()
def test_ranks_that_pass_other_arguments(rank, world, tmp_path):
    engine = engine_for(world, 1)
    engine.save_checkpoint(tmp_path)
    found = [
        said(engine.save_checkpoint, tmp_path, exclude_frozen_parameters=rank == 1),
        said(engine.load_checkpoint, tmp_path, load_optimizer_states=rank == 0),
        said(engine.load_checkpoint, tmp_path if rank == 0 else tmp_path / "elsewhere"),
    ]
    engine.destroy()
    saved, loaded, elsewhere = found
    assert "save_checkpoint: this rank passes exclude_frozen_parameters=True, but rank 0 False" in saved
    assert "load_checkpoint: this rank passes load_optimizer_states=False, but rank 0 True" in loaded
    assert "load_checkpoint: this rank passes load_dir=" in elsewhere


@on_ranks()
def test_what_kills_have_left_is_removed_after_the_next_save(rank, world, tmp_path):
    """Kills between a commit and the removal of old checkpoints leave one more each; the next save takes them along."""
    engine = engine_for(world, 2)
    steps(engine, rank, world, 1)
    for number in range(1, 6):
        engine.save_checkpoint(tmp_path, tag=f"step_{number}")
    seen = []
    commit = folders.commit

    def counting(*arguments):
        seen.append(len(folders.complete_tags(tmp_path)))
        commit(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folders, "commit", counting)
        engine.save_checkpoint(tmp_path, tag="step_6", keep_last=2)
    assert seen == ([5] if rank == 0 else [])
    engine.barrier()
    assert folders.complete_tags(tmp_path) == ["step_5", "step_6"]
    engine.destroy()


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

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_file, "put", particular)
        engine.save_checkpoint(tmp_path, asynchronous=True)
        engine.wait_for_checkpoint()
    kept = fingerprints(engine)
    steps(engine, rank, world, 2)
    engine.load_checkpoint(tmp_path)
    assert refused and fingerprints(engine) == kept
    engine.destroy()


def slow(engine, rank, victim, folder, asynchronous, tag):
    """Each flush of one rank takes longer than a collective may."""
    flush = os.fsync
    with pytest.MonkeyPatch.context() as patch:
        if rank == victim:
            patch.setattr(os, "fsync", lambda handle: (time.sleep(0.1), flush(handle)))
        engine.save_checkpoint(folder, tag=tag, asynchronous=asynchronous, keep_last=1)
        return said(engine.wait_for_checkpoint)


@on_ranks()
def test_a_flush_that_takes_longer_than_a_collective_may(rank, world, tmp_path):
    """On either rank, waited for or not: the checkpoint is whole, and the one before is removed after that."""
    engine = engine_for(world, 2, comm={"timeout_seconds": 0.03})
    cases = [(victim, behind) for victim in (0, 1) for behind in (False, True)]
    for number, (victim, behind) in enumerate(cases):
        steps(engine, rank, world, number + 1)
        assert slow(engine, rank, victim, tmp_path, behind, f"step_{number}") is None
        assert names(tmp_path) == [".lock", "latest", f"step_{number}"]
    kept = fingerprints(engine)
    steps(engine, rank, world, 9)
    engine.load_checkpoint(tmp_path)
    assert fingerprints(engine) == kept
    engine.destroy()


@on_ranks()
def test_a_disk_that_hangs(rank, world, tmp_path):
    """The other rank gives up after comm.save_timeout_seconds, and the checkpoint before is what it was."""
    # Its flush returns after the save was given up, and not before.
    victim = 1
    engine = engine_for(world, 2, comm={"save_timeout_seconds": 0.3})
    engine.save_checkpoint(tmp_path, tag="step_1")
    flush, given_up = os.fsync, threading.Event()

    def hang(handle):
        given_up.wait()
        flush(handle)

    with pytest.MonkeyPatch.context() as patch:
        if rank == victim:
            patch.setattr(os, "fsync", hang)
        engine.save_checkpoint(tmp_path, tag="step_2", asynchronous=True, keep_last=1)
        message = None if rank == victim else said(engine.wait_for_checkpoint)
        process_group.barrier()
        given_up.set()
        message = said(engine.wait_for_checkpoint) if rank == victim else message
    left = names(tmp_path)
    engine.load_checkpoint(tmp_path)
    engine.destroy()
    assert "rank 1's disk has taken nothing for 0.3 s (comm.save_timeout_seconds)" in message
    assert left == [".lock", "latest", "step_1"]


def test_rank_0_says_once_a_second_that_it_waits_for_a_shard(monkeypatch):
    """At every look it would fill a store that is a file, which keeps each note."""
    now, posted = [0.0], []
    clock = {"monotonic": lambda: now[0], "monotonic_ns": lambda: int(1e9 * now[0])}
    monkeypatch.setattr(async_save, "time", SimpleNamespace(**clock, sleep=lambda s: now.append(now.pop() + s)))
    info = async_save.ShardInfo(1, 8, "", 8, [], ())
    job = object.__new__(async_save._Job)
    job.saver = SimpleNamespace(rank=0, world_size=2, silence_seconds=1800, poll_seconds=0.02)
    job._lost = lambda rank, patience: None
    written = json.dumps(dataclasses.asdict(info))
    job.channel = SimpleNamespace(
        get=lambda key: written if key == "1/written" and now[0] > 10 else None,
        set=lambda key, text: posted.append((key, text)),
    )
    assert len(job._gather(info)) == 2
    assert len(posted) == len(set(posted)) == 10 and {key for key, _ in posted} == {"0/progress"}


@on_ranks()
def test_no_flush_has_much_to_write(rank, world, tmp_path):
    """How much each flush had to write, and what was told to the others after it."""
    folder = tmp_path / "checkpoints"
    engine = engine_for(world, 2)
    told, sizes, flush, put, alive = [], [0], os.fsync, shard_file.put, async_save._Job._alive
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(durable, "FLUSH_BYTES", 8192)
        patch.setattr(shard_file, "WRITE_BYTES", 4096)
        patch.setattr(exporting, "PIECE_BYTES", 4096)
        patch.setattr(shard_file, "put", lambda file, view: (put(file, view), sizes.append(sizes.pop() + len(view))))
        patch.setattr(os, "fsync", lambda handle: (flush(handle), sizes.append(0)))
        patch.setattr(async_save._Job, "_alive", lambda job, written: (told.append(written), alive(job, written)))
        for asynchronous in (False, True):
            engine.save_checkpoint(folder, tag=f"behind={asynchronous}", asynchronous=asynchronous)
            engine.wait_for_checkpoint()
        engine.save_16bit_model(folder.with_name("model"))
    engine.load_checkpoint(folder, tag="behind=False")
    engine.load_checkpoint(folder, tag="behind=True")
    engine.destroy()
    assert sum(sizes) > 20_000 and max(sizes) <= 8192 + 2 * 4096
    assert {8192, 16384} <= set(told)


def test_a_copy_locks_no_more_than_it_needs(monkeypatch):
    """On a GPU: the bytes of the shard, in memory that is used again, and one piece of it at a time."""
    locked = {}

    class Runtime:
        @staticmethod
        def cudaHostRegister(address, nbytes, flags):
            locked[address] = nbytes
            return 0

        @staticmethod
        def cudaHostUnregister(address):
            del locked[address]

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda stream: None, synchronize=None))
    found = async_save.Saver(torch.device("cuda"), 1.0)
    needed = []
    for numel in (700_000, 300_000, 1_100_000):
        values = torch.arange(numel, dtype=torch.float32)
        plan = shard_file.plan_shard([shard_file.Entry("master", "w", 0, values)], {})
        copied, _ = found._snapshot(plan)
        assert bytes(copied.image) == plan.header + values.numpy().tobytes()
        needed.append(plan.bytes)
        (size,) = locked.values()
        assert max(needed) <= size < max(needed) + ALIGN_BYTES
        assert [tensor.nbytes for tensor in found.held()] == [max(needed)]
    found.close()
    assert locked == {} and found.held() == []
