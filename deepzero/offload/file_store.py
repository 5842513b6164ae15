"""A rank's scratch file: model states on a disk, read and written past the page cache, and mapped into memory.

ZeRO-Infinity's third tier. Each tensor of the file is a view of its mapping (``mmap``), so that whoever reads or writes
masters, moments or parameters now and then (checkpoints, ``safe_get_*``, a write to a parameter) finds an ordinary
tensor, whose pages the system fetches and drops as it needs memory. What touches all of it in every step goes another
way: :class:`FileTransfer` moves a bucket between the file and a staging buffer by direct I/O, in pieces, in a
few threads. The system keeps both ways coherent as long as they do not meet in the same
pages at the same time; they do not, as a step waits for its last write.

**Scratch, no checkpoint.** The file never has a name, or loses it at once, so no two runs share one, and whatever ends
the process leaves nothing. Its space is reserved before training starts: a disk that is full says so then.

Source: [ZeRO-Infinity], section 6.3 (DeepNVMe); ``runtime/swap_tensor`` in [DeepSpeed].
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import mmap
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait

import torch

from deepzero.config.strict import ConfigError
from deepzero.config.zero import ZeroConfig
from deepzero.offload.copy_streams import HostDeviceCopier, Transfer
from deepzero.offload.pinned_arena import HostMemory, Region, WithoutValues, describe_bytes
from deepzero.utils.formatting import binary_bytes
from deepzero.utils.storage import storage_ptr_of
from deepzero.utils.threads import thread_pool

BLOCK = 4096
"""Bytes. Direct I/O asks that offsets, lengths and addresses are multiples of a disk's block; this is one for all."""
PIECE_BYTES, THREADS = 4 << 20, 4
"""So much is moved by one call, and so many calls are under way."""
FILE_READ, FILE_WRITE, FILE_FETCH = "offload.file_read", "offload.file_write", "offload.file_fetch"
FILE_FETCH_BETWEEN_STEPS = "offload.file_fetch_between_steps"


def in_blocks(nbytes: int) -> int:
    """So many bytes, rounded up to whole blocks."""
    return -(-nbytes // BLOCK) * BLOCK


def check_folders(config: ZeroConfig) -> None:
    """Raise a :class:`ConfigError` where a folder for files is not there, before anything has been made."""
    for side in (config.offload_optimizer, config.offload_param):
        if side.device == "nvme" and not os.path.isdir(side.nvme_path or ""):
            where = f"{side.where}.nvme_path={side.nvme_path!r}"
            raise ConfigError(f"{where} is not a folder; make it, on a local disk, on every host")


class FileTransfer(Transfer):
    """Reads or writes under way: each from or to a view of a file, and a buffer, which belongs to it until its end.

    ``kind`` is the ledger's word: :data:`FILE_WRITE` goes into the files, when ``after()``, called in a thread, has
    returned; any other comes from there, and ``onward`` launches what follows when all has come.
    """

    def __init__(
        self,
        copier: HostDeviceCopier,
        kind: str,
        moves: Sequence[tuple[FileStore, torch.Tensor, torch.Tensor]],
        after: Callable[[], None] | None = None,
        onward: Callable[[], Transfer] | None = None,
    ) -> None:
        self._copier, self._kind, self._moves, self._after, self._onward = copier, kind, moves, after, onward
        self._futures: list[Future[float]] | None = None
        self._began, self._finished = 0.0, False
        copier.chaos.delay()
        if not copier.chaos.puts_off():
            self._launch()

    def _launch(self) -> list[Future[float]]:
        if self._futures is None:
            self._began, how = time.perf_counter(), (self._kind == FILE_WRITE, self._after)
            self._futures = [one for store, view, room in self._moves for one in store.submit(view, room, *how)]
        return self._futures

    def finish(self) -> None:
        """The program goes on when every byte is where it should be. A disk that fails in reading raises.

        Where it has failed in writing, the file is ``broken``, as all ranks learn at the next boundary: one that broke
        off in a pass would let the others wait.
        """
        if self._finished:
            return
        futures, began = self._launch(), time.perf_counter()
        wait(futures)  # all of them, also behind one that has failed: the buffers are free afterwards
        self._finished, waited = True, time.perf_counter() - began
        done = [future.result() for future in futures if self._kind != FILE_WRITE or future.exception() is None]
        took = max(done, default=self._began) - self._began
        self._copier.meter.legs[self._kind].add(sum(view.nbytes for _, view, _ in self._moves), took, waited)

    def wait(self) -> None:
        """As :meth:`finish`, as a disk knows nothing of streams; the current stream waits for what goes ``onward``."""
        self.finish()
        if self._onward is not None:
            self._onward().wait()

    def is_over(self) -> bool:
        """Whether nothing is left to do, as far as the program knows."""
        return self._futures is not None and all(future.done() for future in self._futures)


class FileStore(HostMemory):
    """One nameless file; ``where`` is the setting that gave its folder, for errors, which leave nothing behind."""

    align = BLOCK
    prefix = "file_"

    def __new__(cls, where: str, folder: str, regions: Sequence[Region], device: torch.device) -> FileStore:
        """The kind of store that belongs to ``device``."""
        return super().__new__({"meta": DryRunStore}.get(device.type, FileStore))

    def __init__(self, where: str, folder: str, regions: Sequence[Region], device: torch.device) -> None:
        super().__init__(regions, device)
        self.where, self.folder = where, folder
        self.direct = True  # reads and writes go past the page cache
        self._reserve()

    def _reserve(self) -> None:
        setting = f"{self.where}={self.folder!r}"
        if not hasattr(os, "posix_fallocate") or not hasattr(os, "preadv"):
            raise ConfigError(f"{setting}: files need Linux (posix_fallocate, preadv)")
        try:
            # Without a name from the first instant on, where the file system can; else unlinked at once.
            with tempfile.TemporaryFile(dir=self.folder, prefix="deepzero-", buffering=0) as file:
                self._descriptor = descriptor = os.dup(file.fileno())
        except OSError as error:
            problem = f"no file can be made there ({error.strerror}); choose a folder that this user may write to"
            raise ConfigError(f"{setting}: {problem}") from None
        close = self._ends.callback(weakref.finalize(self, os.close, descriptor))
        if shutil.disk_usage(self.folder).free < self.nbytes:
            gc.collect()  # an engine that was destroyed may lie in a cycle, and hold its file
        free = shutil.disk_usage(self.folder).free
        try:
            os.posix_fallocate(descriptor, 0, max(self.nbytes, 1))
            self._memory = mmap.mmap(descriptor, max(self.nbytes, 1), flags=mmap.MAP_SHARED)
        except OSError as error:
            close()
            raise ConfigError(
                f"{setting}: {describe_bytes(self.regions)} are needed there for each rank of this host, and "
                f"{binary_bytes(free)} were free ({error.strerror}); make room, choose another folder, use more hosts, "
                "or lower zero.offload_optimizer.ratio"
            ) from None
        with contextlib.suppress(OSError, AttributeError):
            self._memory.madvise(mmap.MADV_DONTFORK)  # a data worker has nothing to look for here
        self.direct = self._switch_to_direct() if self.nbytes else True
        self._pool = thread_pool(THREADS, "deepzero-files")
        self._ends.callback(self._pool.shutdown)

    def _switch_to_direct(self) -> bool:
        """Whether the file system takes direct I/O, by which the mapping is seen, and which the mapping sees."""
        descriptor, room, alike = self._descriptor, mmap.mmap(-1, BLOCK), False
        try:
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        except OSError:
            return False
        with contextlib.suppress(OSError):
            self._memory[0] = 1
            alike = os.preadv(descriptor, [room], 0) == BLOCK and room[0] == 1
            room[0] = 0
            alike = os.pwritev(descriptor, [room], 0) == BLOCK and self._memory[0] == 0 and alike
        if not alike:  # through the page cache they are the same bytes
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
            self._memory[0] = 0
        return alike

    # ---- by direct I/O -----------------------------------------------------------------------------------------------

    def submit(
        self, view: torch.Tensor, buffer: torch.Tensor, writing: bool, after: Callable[[], None] | None
    ) -> list[Future[float]]:
        """Move the bytes of a view of this file from a buffer, or into it, in threads; the times of the pieces' ends.

        A buffer begins at a multiple of :data:`BLOCK`, as each view does. Those of a piece whose move fails raise a
        RuntimeError.
        """
        start = self._starts[storage_ptr_of(view)] + int(view.storage_offset()) * view.itemsize
        pieces = range(0, view.nbytes, PIECE_BYTES)
        ends = (min(at + PIECE_BYTES, view.nbytes) for at in pieces)
        return [
            self._pool.submit(self._move, buffer.data_ptr() + at, start + at, end - at, writing, after)
            for at, end in zip(pieces, ends, strict=True)
        ]

    def _move(self, address: int, offset: int, nbytes: int, writing: bool, after: Callable[[], None] | None) -> float:
        if after is not None:
            after()
        memory, done = memoryview((ctypes.c_char * nbytes).from_address(address)), 0
        try:
            while done < nbytes:
                moved = (os.pwritev if writing else os.preadv)(self._descriptor, [memory[done:]], offset + done)
                if moved == 0:
                    raise OSError(f"the file ends at byte {offset + done}")
                done += moved
        except OSError as error:
            told = f"{self.where}={self.folder!r}: the disk has failed ({error})"
            if writing:  # reading damages nothing
                told += ", and what lies there is half old, half new; load a checkpoint"
                self.broken = told
            raise RuntimeError(told) from error
        return time.perf_counter()

    def describe(self) -> str:
        """Sizes, where, and how they are moved."""
        how = "direct I/O" if self.direct else "through the page cache: the file system takes no direct I/O"
        return f"{describe_bytes(self.regions)} in a file in {self.folder}, {how}"

    # ---- the mapping -------------------------------------------------------------------------------------------------

    def drop_pages(self) -> None:
        """Write out what was written through the mapping, and give its memory back to the system."""
        self._memory.flush()
        self._memory.madvise(mmap.MADV_DONTNEED)  # the pages stay in the file: it is shared, not private
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


class DryRunStore(WithoutValues, FileStore):
    """The file of a dry run: what would be moved is counted."""

    def submit(self, *_: object) -> list[Future[float]]:
        """Nothing is moved."""
        return []

    def drop_pages(self) -> None:
        """There are none."""
