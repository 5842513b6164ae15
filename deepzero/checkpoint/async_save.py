"""Saving, second half: shards to the disk, by a thread of its own if wanted, and one commit for all ranks.

    1  agree      the folder can be written to and has room; no other save is under way      all ranks together
    2  collect    which runs go where (``save_plan.py``)                                         all ranks together
    3  snapshot   asynchronous saves only: a copy of this rank's share, in memory that is kept for the next save
    4  write      this rank's shard, hashed on the way, flushed                               each rank for itself
    5  commit     rank 0, when all shards are there: manifest, mark, rename, ``latest``; then what is too old goes

Steps 1-3 are what training waits for; 4 and 5 run in a thread. The thread talks to the other ranks' threads through
notes (``StoreMailbox``), never through the process group, which belongs to the training thread. On Linux it
has the lowest priority, which helps where a core is idle now and then; where none is, what it costs is its processor
time, and that is kept small (``shard_file.py``). When training has found that a rank is gone, the thread waits no
longer either.

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
from pathlib import Path

import torch

from deepzero.checkpoint import checkpoint_dir as folders
from deepzero.checkpoint.errors import CheckpointError, reason
from deepzero.checkpoint.manifest import Manifest, Row, ShardInfo, shard_name
from deepzero.checkpoint.save_plan import SavePlan, with_files
from deepzero.checkpoint.shard_file import ShardPlan, write_shard
from deepzero.comm import flight_recorder, process_group
from deepzero.comm.ledger import SNAPSHOT
from deepzero.comm.process_group import StoreMailbox
from deepzero.durable import flush_parents
from deepzero.offload.pinned_arena import HostArena, Region
from deepzero.utils.threads import start_thread

log = logging.getLogger(__name__)

FIRST_POLL_SECONDS, POLL_SECONDS = 0.001, 0.02
BEAT_SECONDS = 1.0
GONE_SECONDS = 30.0
"""A rank whose process has given no sign for so long was killed; one whose disk hangs still gives signs."""
LOWEST_PRIORITY = 19

_UNDER_WAY: set[Path] = set()
"""Folders that savers of this process write to: two engines may save to one folder, and none clears the other's."""
_FOLDERS = threading.Lock()
"""Held while one of them renames and removes: in between things have names that the other would not understand."""


@dataclass(frozen=True)
class Target:
    """Where a save goes."""

    folder: Path
    tag: str
    save_latest: bool
    keep_last: int | None
    """Remove older checkpoints of like tags; None: keep all."""


class Saver:
    """Saves one engine's checkpoints, one at a time.

    Args:
        device: where the model state lives.
        silence_seconds: a rank whose disk has taken nothing for so long is given up.
    """

    def __init__(self, device: torch.device, silence_seconds: float) -> None:
        self.device, self.silence_seconds = device, silence_seconds
        self.rank, self.world_size = process_group.rank(), process_group.world_size()
        # All ranks ask one store, and rank 0 asks it for each rank: together about as often, however many there are.
        self.poll_seconds = POLL_SECONDS * max(1.0, self.world_size / 16)
        self._arena: HostArena | None = None
        self._thread: threading.Thread | None = None
        self._failure: str | None = None
        self._locked: Path | None = None

    # ---- what training waits for -------------------------------------------------------------------------------------

    def save(self, target: Target, collect: Callable[[str], SavePlan], asynchronous: bool) -> None:
        """Save, or begin to. A collective.

        Args:
            target: where.
            collect: gives the plan for a save of the given id; a collective.
            asynchronous: return after the snapshot.

        Raises:
            CheckpointError: on every rank; nothing was replaced.
        """
        self.wait()
        save_id = str(process_group.broadcast_object(uuid.uuid4().hex[:12]))
        job = _Job(self, target, save_id)
        try:
            job.rank_0_first("prepared", lambda: self._prepare(target))
            collected = collect(save_id)
            job.rank_0_first("opened", lambda: self._open(target.folder, job.temporary, collected.total_bytes))
        except BaseException:
            job.end_beating()
            raise
        if not asynchronous:
            job.run(collected)
            self._raise_failure()
            return
        try:
            plan, ready = self._snapshot(collected.plan)
            copied = dataclasses.replace(collected, plan=plan)
            thread = start_thread(job.run_behind, "deepzero-save", copied, ready)
        except Exception as error:  # no memory: the other ranks must not wait for this one's shard, or word
            job.give_up(reason(error))
            raise
        self._thread = thread

    def wait(self) -> None:
        """Return when no save is under way.

        Raises:
            CheckpointError: the last one failed.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._raise_failure()

    def held(self) -> list[torch.Tensor]:
        """Memory of snapshots."""
        return list(self._arena.tensors(SNAPSHOT)) if self._arena is not None else []

    def close(self) -> None:
        """Wait, and let others write to the folder."""
        try:
            self.wait()
        finally:
            self._release_memory()
            if self._locked is not None:
                folders.release(self._locked)
                self._locked = None

    def failed(self, reason: str) -> None:
        """Remember why a save was given up, and say so at once."""
        self._failure = reason
        if self.rank == 0:
            log.error("%s", reason)

    def _raise_failure(self) -> None:
        reason, self._failure = self._failure, None
        if reason is not None:
            raise CheckpointError(reason)

    def _prepare(self, target: Target) -> None:
        folder = target.folder
        if self._locked is not None and os.path.realpath(self._locked) != os.path.realpath(folder):
            folders.release(self._locked)
            self._locked = None
        if self._locked is None:
            folders.acquire(folder)
            self._locked = folder
            flush_parents(folder)
        with _FOLDERS:
            folders.clear_remains(folder, _UNDER_WAY)
        folders.check_replaceable(folder / target.tag)

    def _open(self, folder: Path, temporary: Path, total_bytes: int) -> None:
        folders.room_for(folder, total_bytes)
        temporary.mkdir()
        _UNDER_WAY.add(temporary)

    def _snapshot(self, plan: ShardPlan) -> tuple[ShardPlan, Callable[[], None]]:
        """Copy everything into memory of our own; on a GPU the copies are queued before the next step's kernels."""
        if self._arena is None or self._arena.regions[0].numel < plan.bytes:
            self._release_memory()  # not both at once
            # It begins at a page, which writing past the page cache asks for.
            self._arena = HostArena([Region(SNAPSHOT, plan.bytes, torch.uint8)], self.device, pin=True)
            self._arena.allocate(SNAPSHOT, plan.bytes, torch.uint8)
        (memory,) = self._arena.tensors(SNAPSHOT)
        copied = plan.copy_into(memory)
        ready: Callable[[], None] = _nothing
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.device))  # the program's current device may be another
            ready = event.synchronize
        return copied, ready

    def _release_memory(self) -> None:
        if self._arena is not None:
            self._arena.close()
            self._arena = None


def _nothing() -> None:
    """On a CPU a copy is there when it returns."""


class _Job:
    """One save, from the first byte to the commit, on one rank."""

    def __init__(self, saver: Saver, target: Target, save_id: str) -> None:
        self.saver, self.target = saver, target
        self.temporary = folders.temporary_folder(target.folder, target.tag, save_id)
        self.channel = StoreMailbox(f"save/{save_id}")
        self.watchdog = flight_recorder.observer()
        self.over = threading.Event()
        self.heart: threading.Thread | None = None
        self.hearts = {rank: _HeartbeatTimeout(GONE_SECONDS) for rank in range(saver.world_size)}
        self._begin_beating()

    def rank_0_first(self, what: str, act: Callable[[], None]) -> None:
        """Rank 0 acts, the others wait for its word, and all raise when it could not."""
        if self.saver.rank != 0:
            problem = self._word(what)
        else:
            problem = ""
            try:
                act()
            except CheckpointError as error:
                problem = str(error)
            except Exception as error:  # whatever it is: the others wait for this rank's word
                problem = f"{reason(error)}. Nothing was saved; what was saved before is untouched"
            self.channel.set(what, problem)
        if problem:
            raise CheckpointError(problem)

    def give_up(self, problem: str) -> None:
        """Instead of :meth:`run`, on a rank that cannot write: the others are told."""
        self.channel.set(f"{self.saver.rank}/failed", problem)
        self.end_beating()
        if self.saver.rank == 0:
            shutil.rmtree(self.temporary, ignore_errors=True)
            _UNDER_WAY.discard(self.temporary)
            self.channel.set("verdict", f"rank 0: {problem}")

    def run_behind(self, collected: SavePlan, ready: Callable[[], None]) -> None:
        """The thread: after the snapshot is complete, out of the training thread's way."""
        with contextlib.suppress(AttributeError, OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        self.run(collected, ready)

    def run(self, collected: SavePlan, ready: Callable[[], None] = _nothing) -> None:
        """4 write, 5 commit. Failures are remembered, not raised: nobody sees what a thread of its own raises."""
        try:
            problem = self._write_and_commit(collected, ready)
        except Exception as error:
            problem = reason(error)
        finally:
            self.end_beating()
            _UNDER_WAY.discard(self.temporary)
        if problem is not None:
            self.saver.failed(
                f"checkpoint {self.target.folder / self.target.tag} was not saved: {problem}. "
                "What was saved before is untouched"
            )

    def _begin_beating(self) -> None:
        """Let the others see that this process lives, also while the system writes and says nothing.

        From the first on: a program that is about to end may start no more threads.
        """

        def beat() -> None:
            with contextlib.suppress(Exception):  # the store may be gone before this rank is
                while not self.over.wait(BEAT_SECONDS):
                    self.channel.set(f"{self.saver.rank}/beat", str(time.monotonic_ns()))

        if self.saver.world_size > 1:
            self.channel.set(f"{self.saver.rank}/beat", "begun")
            self.heart = start_thread(beat, "deepzero-save-beat")

    def end_beating(self) -> None:
        """There is nothing more that others wait for."""
        self.over.set()
        if self.heart is not None and self.heart.is_alive():
            self.heart.join(BEAT_SECONDS)  # a store that hangs must not hold up more than the save

    def _lost(self, rank: int) -> str | None:
        """Why nothing more will come from ``rank``; None: it may be slow, but it is there."""
        verdict = self.watchdog.found()
        if verdict is not None:
            return verdict
        beat = self.channel.get(f"{rank}/beat")
        if beat is not None and self.hearts[rank].over(beat):
            return f"rank {rank} gave no sign of life for {GONE_SECONDS:.0f} s: it was killed or its machine is gone"
        return None

    def _write_and_commit(self, collected: SavePlan, ready: Callable[[], None]) -> str | None:
        rank = self.saver.rank
        info: ShardInfo | None = None
        try:
            ready()
            path = self.temporary / shard_name(rank, self.saver.world_size)
            info = write_shard(path, collected.plan, rank, self._alive)
            if rank != 0:
                self.channel.set(f"{rank}/written", _shard_text(info))
        except Exception as error:
            self.channel.set(f"{rank}/failed", reason(error))
        return self._commit(collected.manifest, info) if rank == 0 else self._verdict()

    def _alive(self, written: int) -> None:
        self.channel.set(f"{self.saver.rank}/progress", str(written))

    def _commit(self, manifest: Manifest, mine: ShardInfo | None) -> str | None:
        """Rank 0: when all shards are there, make them a checkpoint; tell the others."""
        problem, files = self._gather(mine)
        if problem is None:
            with _FOLDERS:
                problem = self._install(with_files(manifest, files))
        if problem is not None:
            shutil.rmtree(self.temporary, ignore_errors=True)
        self.channel.set("verdict", problem or "")
        if problem is None:
            with _FOLDERS:
                self._prune()
        self.channel.set("pruned", "")
        return problem

    def _install(self, manifest: Manifest) -> str | None:
        try:
            folders.commit(self.target.folder, self.temporary, manifest, self.target.save_latest)
        except Exception as error:
            return reason(error)
        return None

    def _prune(self) -> None:
        """Remove old checkpoints but for ``keep_last`` with the new one; a failure is only said."""
        if self.target.keep_last is not None:
            try:
                folders.prune(self.target.folder, self.target.tag, self.target.keep_last)
            except (OSError, CheckpointError) as error:  # ``latest`` may be damaged
                log.warning("%s: old checkpoints could not be removed (%s)", self.target.folder, reason(error))

    def _gather(self, mine: ShardInfo | None) -> tuple[str | None, dict[str, ShardInfo]]:
        size = self.saver.world_size
        files = {} if mine is None else {shard_name(0, size): mine}
        patience = {rank: _HeartbeatTimeout(self.saver.silence_seconds) for rank in range(size)}
        often = min(BEAT_SECONDS, self.saver.silence_seconds / 4)  # a store that is a file keeps each note
        told = -math.inf
        while True:
            for rank in range(size):
                reason = self.channel.get(f"{rank}/failed")
                if reason is not None:
                    return f"rank {rank}: {reason}", {}
                text = None if shard_name(rank, size) in files else self.channel.get(f"{rank}/written")
                if text is not None:
                    files[shard_name(rank, size)] = _shard_from(text)
                if shard_name(rank, size) in files:
                    continue
                if rank != 0 and (lost := self._lost(rank)) is not None:
                    return lost, {}
                if patience[rank].over(self.channel.get(f"{rank}/progress")):
                    return self._silent(rank), {}
            if len(files) == size:
                return None, files
            if (now := time.monotonic()) >= told + often:
                self._alive(int(1e9 * now))
                told = now
            time.sleep(self.saver.poll_seconds)

    def _verdict(self) -> str | None:
        """The other ranks wait for rank 0's word: the checkpoint is complete for all, or for none."""
        text = self._word("verdict")
        if not text:
            self._word("pruned")  # else they would wait for that in their next collective
        for key in ("written", "failed", "progress", "beat"):
            self.channel.remove(f"{self.saver.rank}/{key}")
        if text:
            # Rank 0 has removed it, and this rank may have written since; whoever comes last leaves nothing.
            shutil.rmtree(self.temporary, ignore_errors=True)
        return text or None

    def _word(self, what: str) -> str:
        """Rank 0's, "" if all is well; or why it will not come."""
        patience, pause = _HeartbeatTimeout(self.saver.silence_seconds), FIRST_POLL_SECONDS
        while (text := self.channel.get(what)) is None:
            if patience.over(self.channel.get("0/progress")):
                return self._silent(0)
            if (lost := self._lost(0)) is not None:
                return lost
            time.sleep(pause)
            pause = min(2 * pause, self.saver.poll_seconds)
        return text

    def _silent(self, rank: int) -> str:
        seconds = self.saver.silence_seconds
        return f"rank {rank}'s disk has taken nothing for {seconds:g} s (comm.save_timeout_seconds)"


class _HeartbeatTimeout:
    """Ends when a note has not changed for so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._since, self._last = seconds, time.monotonic(), ""

    def over(self, note: str | None) -> bool:
        if (note or "") != self._last:
            self._since, self._last = time.monotonic(), note or ""
        return time.monotonic() - self._since > self._seconds


def _shard_text(info: ShardInfo) -> str:
    return json.dumps(dataclasses.asdict(info))


def _shard_from(text: str) -> ShardInfo:
    content = json.loads(text)
    return ShardInfo(**{**content, "rows": tuple(Row(**row) for row in content["rows"])})
