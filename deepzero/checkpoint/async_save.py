"""Saving, second half: shards to the disk, by a thread of its own if wanted, and one commit for all ranks.

    1  agree      the folder can be written to and has room; no other save is under way      all ranks together
    2  collect    which runs go where (``engine_state.py``)                                  all ranks together
    3  snapshot   asynchronous saves only: a copy of this rank's share, in memory that is kept for the next save
    4  write      this rank's shard, hashed on the way, flushed                              each rank for itself
    5  commit     rank 0, when all shards are there: manifest, mark, rename, ``latest``; then what is too old goes

Steps 1-3 are what training waits for; 4 and 5 run in a thread, on Linux of the lowest priority. It talks to the other
ranks' threads through notes (``StoreMailbox``), never through the process group, which belongs to the training thread.
When training has found that a rank is gone, the thread waits no longer either.

**Nobody waits for a disk in a collective**, whose time-out (``comm.timeout_seconds``) is made for networks. Ranks wait
for each other's disks by notes too, for as long as the other one's process lives and something has reached its disk
within ``comm.save_timeout_seconds``. So a disk is taken in steps, each of which is told (``durable.py``).

A save that fails is removed, the checkpoint before it stays what it was, and every rank raises: at once, or for an
asynchronous save at the next one or in :meth:`Saver.wait`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from deepzero.checkpoint import checkpoint_dir as folders
from deepzero.checkpoint.engine_state import SavePlan
from deepzero.checkpoint.errors import CheckpointError, reason
from deepzero.checkpoint.manifest import Manifest, ShardInfo, shard_name
from deepzero.checkpoint.shard_file import ShardPlan, write_shard
from deepzero.comm import flight_recorder, process_group
from deepzero.comm.ledger import SNAPSHOT
from deepzero.comm.process_group import StoreMailbox
from deepzero.device import accelerator_of
from deepzero.durable import flush_parents
from deepzero.offload.pinned_arena import HostArena, PageLockError, Region
from deepzero.utils.threads import start_thread

log = logging.getLogger(__name__)

FIRST_POLL_SECONDS, POLL_SECONDS = 0.001, 0.02
BEAT_SECONDS = 1.0
GONE_SECONDS = 30.0
"""A rank whose process has given no sign for so long was killed; one whose disk hangs still gives signs."""
LOWEST_PRIORITY = 19

_FOLDERS = threading.Lock()
"""Held while a thread renames and removes: in between things have names that another engine would not understand."""


@dataclass(frozen=True)
class Target:
    """Where a save goes, and how many of like tags stay; None: all."""

    folder: Path
    tag: str
    save_latest: bool
    keep_last: int | None


class Saver:
    """Saves one engine's checkpoints, one at a time; a rank whose disk is silent for too long is given up."""

    def __init__(self, device: torch.device, silence_seconds: float) -> None:
        self.device, self.silence_seconds = device, silence_seconds
        self.rank, self.world_size = process_group.rank(), process_group.world_size()
        # All ranks ask one store, and rank 0 asks it for each rank: together about as often, however many there are.
        self.poll_seconds = POLL_SECONDS * max(1.0, self.world_size / 16)
        self.failure: str | None = None
        """Why the last save was given up; raised once."""
        self._arena: HostArena | None = None
        self._pin = True
        self._thread: threading.Thread | None = None
        self._locked: Path | None = None

    # ---- what training waits for -------------------------------------------------------------------------------------

    def save(self, target: Target, collect: Callable[[str], SavePlan], asynchronous: bool) -> None:
        """Save, or begin to: ``asynchronous`` returns after the snapshot. A collective, as is ``collect``, given an id.

        A CheckpointError is raised on every rank; nothing was replaced then.
        """
        self.wait()
        save_id = str(process_group.broadcast_object(uuid.uuid4().hex[:12]))
        job = _Job(self, target, save_id)
        try:
            job.rank_0_first("prepared", partial(self._prepare, target))
            collected = collect(save_id)
            job.rank_0_first("opened", partial(job.open, collected))
        except BaseException:
            job.end()
            raise
        if not asynchronous:
            job.run(collected)
            self.wait()
            return
        try:
            plan, ready = self._snapshot(collected.plan)
            copied = dataclasses.replace(collected, plan=plan)
            self._thread = start_thread(job.run, "deepzero-save", copied, ready)
        except BaseException as error:  # no memory: the other ranks must not wait for this one's shard, or word
            job.give_up(reason(error))  # raised by the next :meth:`wait`, as on them: ranks stay in step
            if not isinstance(error, Exception):
                raise

    def wait(self) -> None:
        """Return when no save is under way; raise a :class:`CheckpointError` where the last one failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self.failure = self.failure, None
        if failure is not None:
            raise CheckpointError(failure)

    def held(self) -> list[torch.Tensor]:
        """Memory of snapshots."""
        return list(self._arena.tensors(SNAPSHOT)) if self._arena is not None else []

    def close(self) -> None:
        """Wait, and let others write to the folder."""
        try:
            self.wait()
        finally:
            self._release_memory()
            self._unlock()

    def _prepare(self, target: Target) -> None:
        folder = target.folder
        moved = self._locked is not None and os.path.realpath(self._locked) != os.path.realpath(folder)
        if moved or not folders.holds(folder):  # another folder, or the old one was removed or renamed
            self._unlock()
        if self._locked is None:
            folders.acquire(folder)
            self._locked = folder
            flush_parents(folder)
        with _FOLDERS:
            folders.clear_remains(folder)
        folders.check_replaceable(folder / target.tag)

    def _unlock(self) -> None:
        if self._locked is not None:
            folders.release(self._locked)
            self._locked = None

    def _snapshot(self, plan: ShardPlan) -> tuple[ShardPlan, Callable[[], None]]:
        """Copy everything into memory of our own; on a GPU the copies are queued before the next step's kernels."""
        if self._arena is None or self._arena.regions[0].numel < plan.bytes:
            self._release_memory()  # not both at once
            # It begins at a page, which writing past the page cache asks for.
            regions = [Region(SNAPSHOT, plan.bytes, torch.uint8)]
            try:
                self._arena = HostArena(regions, self.device, self._pin)
            except PageLockError:
                self._pin = False
                log.warning("the system refuses to lock pages: training waits for the snapshots' copies (said once)")
                self._arena = HostArena(regions, self.device, self._pin)
            self._arena.allocate(SNAPSHOT, plan.bytes, torch.uint8)
        (memory,) = self._arena.tensors(SNAPSHOT)
        copied = plan.copy_into(memory)
        copies = accelerator_of(self.device).event(self.device)
        copies.record()
        return copied, copies.synchronize

    def _release_memory(self) -> None:
        if self._arena is not None:
            self._arena.close()
            self._arena = None


class _Job:
    """One save, from the first byte to the commit, on one rank."""

    def __init__(self, saver: Saver, target: Target, save_id: str) -> None:
        self.saver, self.target = saver, target
        self.temporary = target.folder / f"{folders.SAVING}{save_id}-{target.tag}"
        self.channel = StoreMailbox(f"save/{save_id}")
        self.watchdog = flight_recorder.observer()
        self.hearts = {rank: _HeartbeatTimeout(GONE_SECONDS) for rank in range(saver.world_size)}
        self._over = threading.Event()
        self._heart: threading.Thread | None = None
        if saver.world_size > 1:
            # From the first on: a program that is about to end may start no more threads.
            self.channel.set(f"{saver.rank}/beat", "begun")
            self._heart = start_thread(self._beat, "deepzero-save-beat")

    def _beat(self) -> None:
        """Let the others see that this process lives, also while the system writes and says nothing."""
        with contextlib.suppress(Exception):  # the store may be gone before this rank is
            while not self._over.wait(BEAT_SECONDS):
                self.channel.set(f"{self.saver.rank}/beat", str(time.monotonic_ns()))

    def end(self) -> None:
        """There is nothing more that others wait for."""
        self._over.set()
        if self._heart is not None and self._heart.is_alive():
            self._heart.join(BEAT_SECONDS)  # a store that hangs must not hold up more than the save
        folders.written_to.discard(self.temporary.name)

    def rank_0_first(self, what: str, act: Callable[[], None]) -> None:
        """Rank 0 acts, the others wait for its word, and all raise when it could not."""
        problem = ""
        if self.saver.rank != 0:
            problem = self._word(what)
        else:
            try:
                act()
            except CheckpointError as error:
                problem = str(error)
            except Exception as error:  # whatever it is: the others wait for this rank's word
                problem = f"{reason(error)}. Nothing was saved; what was saved before is untouched"
            self.channel.set(what, problem)
        if problem:
            raise CheckpointError(problem)

    def open(self, collected: SavePlan) -> None:
        """Make the folder that is written to."""
        dataclasses.replace(collected.manifest, parameters={}, layout=[]).to_json()  # refuses what JSON cannot hold
        fewer = "keep fewer (train.keep_last). What was saved before is untouched"
        folders.room_for(self.target.folder, "a checkpoint", collected.total_bytes, fewer)
        folders.written_to.add(self.temporary.name)
        self.temporary.mkdir()

    def give_up(self, problem: str) -> None:
        """Instead of :meth:`run`, on a rank that cannot write: the others are told."""
        self.channel.set(f"{self.saver.rank}/failed", problem)
        if self.saver.rank == 0:
            shutil.rmtree(self.temporary, ignore_errors=True)
            self.channel.set("verdict", f"rank 0: {problem}")
        self.end()
        self._failed(problem)

    def _failed(self, problem: str) -> None:
        where = self.target.folder / self.target.tag
        self.saver.failure = f"checkpoint {where} was not saved: {problem}. What was saved before is untouched"
        if self.saver.rank == 0:
            log.error("%s", self.saver.failure)

    def run(self, collected: SavePlan, ready: Callable[[], None] | None = None) -> None:
        """4 write, 5 commit; a thread does it when its snapshot is ``ready``.

        Failures are remembered, not raised: nobody sees what a thread of its own raises.
        """
        if ready is not None:  # out of the training thread's way
            with contextlib.suppress(AttributeError, OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        try:
            problem = self._write_and_commit(collected, ready or (lambda: None))
        except Exception as error:
            problem = reason(error)
        finally:
            self.end()
        if problem:
            self._failed(problem)

    def _write_and_commit(self, collected: SavePlan, ready: Callable[[], None]) -> str:
        """What went wrong; "" if nothing did."""
        rank, info = self.saver.rank, None
        try:
            ready()
            path = self.temporary / shard_name(rank, self.saver.world_size)
            info = write_shard(path, collected.plan, rank, self._alive)
            if rank != 0:
                self.channel.set(f"{rank}/written", json.dumps(dataclasses.asdict(info)))
        except Exception as error:
            elsewhere = "; all ranks write into one folder, which has to be on a disk that their hosts share"
            missing = rank > 0 and isinstance(error, FileNotFoundError)  # rank 0 has made it
            self.channel.set(f"{rank}/failed", reason(error) + elsewhere * missing)
        return self._commit(collected.manifest, info) if rank == 0 else self._verdict()

    def _alive(self, written: int) -> None:
        self.channel.set(f"{self.saver.rank}/progress", str(written))

    # ---- rank 0 ------------------------------------------------------------------------------------------------------

    def _commit(self, manifest: Manifest, mine: ShardInfo | None) -> str:
        """When all shards are there, make them a checkpoint; tell the others."""
        problem, target = "", self.target
        try:
            manifest = dataclasses.replace(manifest, files=self._gather(mine))
            with _FOLDERS:
                folders.commit(target.folder, self.temporary, manifest, target.save_latest)
        except Exception as error:
            problem = reason(error)
            shutil.rmtree(self.temporary, ignore_errors=True)
        self.channel.set("verdict", problem)
        if not problem and target.keep_last is not None:
            try:
                with _FOLDERS:
                    folders.prune(target.folder, target.tag, target.keep_last)
            except Exception as error:  # ``latest`` may be damaged; and the others wait
                log.warning("%s: old checkpoints could not be removed (%s)", target.folder, reason(error))
        self.channel.set("pruned", "")
        return problem

    def _gather(self, mine: ShardInfo | None) -> dict[str, ShardInfo]:
        """Every rank's shard, when it is written; a :class:`CheckpointError` where one will not be."""
        size = self.saver.world_size
        files = {} if mine is None else {shard_name(0, size): mine}
        patience = {rank: _HeartbeatTimeout(self.saver.silence_seconds) for rank in range(size)}
        often = min(BEAT_SECONDS, self.saver.silence_seconds / 4)  # a store that is a file keeps each note
        told = -math.inf
        while True:
            for rank in range(size):
                if (problem := self.channel.get(f"{rank}/failed")) is not None:
                    raise CheckpointError(f"rank {rank}: {problem}")
                if (name := shard_name(rank, size)) in files:
                    continue
                if (text := self.channel.get(f"{rank}/written")) is not None:
                    files[name] = ShardInfo.from_dict(json.loads(text))
                elif (lost := self._lost(rank, patience[rank])) is not None:
                    raise CheckpointError(lost)
            if len(files) == size:
                return files
            if (now := time.monotonic()) >= told + often:
                self._alive(int(1e9 * now))
                told = now
            time.sleep(self.saver.poll_seconds)

    # ---- who waits for whom ------------------------------------------------------------------------------------------

    def _verdict(self) -> str:
        """The other ranks wait for rank 0's word: the checkpoint is complete for all, or for none."""
        if not (text := self._word("verdict")):
            self._word("pruned")  # else they would wait for that in their next collective
        for key in ("written", "failed", "progress", "beat"):
            self.channel.remove(f"{self.saver.rank}/{key}")
        if text:
            # Rank 0 has removed it, and this rank may have written since; whoever comes last leaves nothing.
            shutil.rmtree(self.temporary, ignore_errors=True)
        return text

    def _word(self, what: str) -> str:
        """Rank 0's, "" if all is well; or why it will not come."""
        patience, pause = _HeartbeatTimeout(self.saver.silence_seconds), FIRST_POLL_SECONDS
        while (text := self.channel.get(what)) is None:
            if (lost := self._lost(0, patience)) is not None:
                return lost
            time.sleep(pause)
            pause = min(2 * pause, self.saver.poll_seconds)
        return text

    def _lost(self, rank: int, patience: _HeartbeatTimeout) -> str | None:
        """Why nothing more will come from ``rank``; None: it may be slow, but it is there."""
        if (verdict := self.watchdog.found()) is not None:
            return verdict
        if (beat := self.channel.get(f"{rank}/beat")) is not None and self.hearts[rank].over(beat):
            return f"rank {rank} gave no sign of life for {GONE_SECONDS:.0f} s: it was killed or its machine is gone"
        if patience.over(self.channel.get(f"{rank}/progress")):
            seconds = self.saver.silence_seconds
            return f"rank {rank}'s disk has taken nothing for {seconds:g} s (comm.save_timeout_seconds)"
        return None


class _HeartbeatTimeout:
    """Ends when a note has not changed for so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._since, self._last = seconds, time.monotonic(), ""

    def over(self, note: str | None) -> bool:
        if (note or "") != self._last:
            self._since, self._last = time.monotonic(), note or ""
        return time.monotonic() - self._since > self._seconds
