"""A rank's scratch file: model states on a disk, read and written past the page cache, and mapped into memory.

ZeRO-Infinity's third tier. Each tensor of the file is a view of its mapping (``mmap``), so that whoever reads or writes
masters, moments or parameters now and then (checkpoints, ``safe_get_*``, a write to a parameter) finds an ordinary
tensor, whose pages the system fetches and drops as it needs memory. What touches all of it in every step goes another
way: :meth:`FileStore.read` and :meth:`FileStore.write` move a bucket between the file and a staging buffer by
direct I/O, in pieces, in a few threads. The system keeps both ways coherent as long as they do not meet in the same
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

from deepzero.comm.chaos import storage_ptr_of
from deepzero.config.strict import ConfigError
from deepzero.offload.copy_streams import HostDeviceCopier, Transfer
from deepzero.offload.pinned_arena import Region, describe_bytes
from deepzero.utils.formatting import binary_bytes
from deepzero.utils.threads import thread_pool

BLOCK = 4096
"""Bytes. Direct I/O asks that offsets, lengths and addresses are multiples of a disk's block; this is one for all."""
PIECE_BYTES, THREADS = 4 << 20, 4
"""So much is moved by one call, and so many calls are under way."""
FILE_READ, FILE_WRITE, FILE_FETCH = "offload.file_read", "offload.file_write", "offload.file_fetch"
FILE_FETCH_BETWEEN_STEPS = "offload.file_fetch_between_steps"

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""A view of a tensor of the file, and what it is read into or written from: of the same bytes."""


def file_bytes(regions: Sequence[Region]) -> int:
    """The exact size of a file: each region begins at a block."""
    return sum(-(-region.bytes // BLOCK) * BLOCK for region in regions)


class FileTransfer(Transfer):
    """Reads or writes under way. The buffers belong to it until :meth:`finish` has returned; to wait is the same."""

    def __init__(self, begin: Callable[[], list[Future[float]]], put_off: bool, end: Callable[..., None]) -> None:
        self._begin, self._end, self._began = begin, end, 0.0
        self._futures: list[Future[float]] | None = None
        self._finished = False
        if not put_off:
            self._launch()

    def _launch(self) -> list[Future[float]]:
        if self._futures is None:
            self._began, self._futures = time.perf_counter(), self._begin()
        return self._futures

    def finish(self) -> None:
        """The program goes on when every byte is where it should be.

        Raises:
            RuntimeError: the disk has failed.
        """
        if not self._finished:
            futures, began = self._launch(), time.perf_counter()
            wait(futures)  # all of them, also behind one that has failed: the buffers are free afterwards
            self._finished = True
            self._end(futures, self._began, time.perf_counter() - began)

    def wait(self) -> None:
        """As :meth:`finish`: a disk knows nothing of streams."""
        self.finish()

    def is_over(self) -> bool:
        """Whether nothing is left to do, as far as the program knows."""
        return self._futures is not None and all(future.done() for future in self._futures)


class FileStore:
    """One nameless file for ``regions``, carved in order; ``where`` is the setting that gave its folder.

    Raises:
        ConfigError: no such folder, no permission, no room; nothing is left behind.
    """

    def __new__(cls, where: str, folder: str, regions: Sequence[Region], device: torch.device) -> FileStore:
        """The kind of store that belongs to ``device``."""
        return super().__new__({"meta": DryRunStore}.get(device.type, FileStore))

    def __init__(self, where: str, folder: str, regions: Sequence[Region], device: torch.device) -> None:
        self.where, self.folder, self.regions, self.nbytes = where, folder, list(regions), file_bytes(regions)
        self.direct = True  # reads and writes go past the page cache
        self.broken: str | None = None
        self._carved: list[tuple[str, torch.Tensor]] = []
        self._starts: dict[int, int] = {}  # of each carved tensor's storage: where it begins in the file
        self._next = self._offset = 0
        self._reserve(device)

    def _reserve(self, device: torch.device) -> None:
        setting = f"{self.where}={self.folder!r}"
        if not hasattr(os, "posix_fallocate") or not hasattr(os, "preadv"):
            raise ConfigError(f"{setting}: files need Linux (posix_fallocate, preadv)")
        if not os.path.isdir(self.folder):
            raise ConfigError(f"{setting} is not a folder; make it, on a local disk, on every host")
        try:
            # Without a name from the first instant on, where the file system can; else unlinked at once.
            with tempfile.TemporaryFile(dir=self.folder, prefix="deepzero-", buffering=0) as file:
                self._descriptor = descriptor = os.dup(file.fileno())
        except OSError as error:
            raise ConfigError(f"{setting}: no file can be made there ({error.strerror})") from None
        self._close = weakref.finalize(self, os.close, descriptor)
        if shutil.disk_usage(self.folder).free < self.nbytes:
            gc.collect()  # an engine that was destroyed may lie in a cycle, and hold its file
        free = shutil.disk_usage(self.folder).free
        try:
            os.posix_fallocate(descriptor, 0, max(self.nbytes, 1))
            self._memory = mmap.mmap(descriptor, max(self.nbytes, 1), flags=mmap.MAP_SHARED)
        except OSError as error:
            self._close()
            raise ConfigError(
                f"{setting}: {describe_bytes(self.regions)} are needed there for each rank of this host, and "
                f"{binary_bytes(free)} were free ({error.strerror}); make room, choose another folder, use more hosts, "
                "or lower zero.offload_optimizer.ratio"
            ) from None
        with contextlib.suppress(OSError, AttributeError):
            self._memory.madvise(mmap.MADV_DONTFORK)  # a data worker has nothing to look for here
        self.direct = self._switch_to_direct() if self.nbytes else True
        self._pool = thread_pool(THREADS, "deepzero-files")

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

    def attach(self, wire: HostDeviceCopier) -> None:
        """Who counts and times transfers, and puts them off; before the first one."""
        self._wire = wire

    def allocate(self, category: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The next region of the plan, zero: a 1-D tensor of ``numel`` elements, whose memory is the file."""
        wanted = Region(category, numel, dtype)
        if self.regions[self._next : self._next + 1] != [wanted]:
            raise RuntimeError(f"the file's plan has {self.regions[self._next :][:1]} next, not {wanted}")
        self._next += 1
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        carved = self._carve(wanted, self._offset)
        self._starts[storage_ptr_of(carved)] = self._offset
        self._offset += file_bytes([wanted])
        self._carved.append((category, carved))
        return carved

    def _carve(self, region: Region, start: int) -> torch.Tensor:
        return torch.frombuffer(self._memory, dtype=region.dtype, count=region.numel, offset=start)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory is the file's."""
        return tensor.numel() > 0 and storage_ptr_of(tensor) in self._starts

    def tensors(self, category: str) -> list[torch.Tensor]:
        """What was carved under ``category``, for the ledger."""
        return [tensor for name, tensor in self._carved if name == category]

    # ---- by direct I/O -----------------------------------------------------------------------------------------------

    def read(self, pairs: Pairs, padding: int, where: str, kind: str = FILE_READ) -> FileTransfer:
        """Launch: from the file into buffers, of bucket ``where``, with ``padding`` elements of padding in each.

        A buffer begins at a multiple of :data:`BLOCK`, as each view does. ``kind`` is the ledger's word.
        """
        self._record(kind, pairs, padding, where)
        return self._launch(kind, os.preadv, pairs, None)

    def write(self, pairs: Pairs, padding: int, where: str, after: Callable[[], None] | None = None) -> FileTransfer:
        """Launch: from buffers into the file, when ``after()``, called in a thread, has returned; as :meth:`read`."""
        self._record(FILE_WRITE, pairs, padding, where)
        return self._launch(FILE_WRITE, os.pwritev, pairs, after)

    def check(self) -> None:
        """Raise a RuntimeError where a transfer has failed: what is in the file is half old, half new."""
        if self.broken is not None:
            raise RuntimeError(self.broken)

    def _record(self, kind: str, pairs: Pairs, padding: int, where: str) -> None:
        numel, moved = sum(view.numel() for view, _ in pairs), sum(view.nbytes for view, _ in pairs)
        self._wire.ledger.record(kind, numel, moved, padding * len(pairs), where=where, what="file")

    def _launch(
        self, kind: str, call: Callable[..., int], pairs: Pairs, after: Callable[[], None] | None
    ) -> FileTransfer:
        moved = sum(view.nbytes for view, _ in pairs)

        def begin() -> list[Future[float]]:
            return [self._pool.submit(self._move, call, *piece, after) for piece in self._pieces(pairs)]

        def end(futures: list[Future[float]], began: float, waited: float) -> None:
            error = next((found for found in (future.exception() for future in futures) if found is not None), None)
            if error is not None:
                told = f"{self.where}={self.folder!r}: the disk has failed ({error})"
                if kind == FILE_WRITE:  # reading damages nothing
                    told += ", and what lies there is half old, half new; load a checkpoint"
                    self.broken = told
                raise RuntimeError(told) from error
            took = max((future.result() for future in futures), default=began) - began
            self._wire.meter.legs[kind].add(moved, took, waited)

        self._wire.chaos.delay()
        return FileTransfer(begin, self._wire.chaos.puts_off(), end)

    def _pieces(self, pairs: Pairs) -> list[tuple[int, int, int]]:
        """Address in memory, offset in the file, bytes."""
        found = list[tuple[int, int, int]]()
        for view, buffer in pairs:
            start = self._starts[storage_ptr_of(view)] + int(view.storage_offset()) * view.itemsize
            for at in range(0, view.nbytes, PIECE_BYTES):
                found.append((buffer.data_ptr() + at, start + at, min(PIECE_BYTES, view.nbytes - at)))
        return found

    def _move(
        self, call: Callable[..., int], address: int, offset: int, nbytes: int, after: Callable[[], None] | None
    ) -> float:
        """One piece, in a thread; the time of its end."""
        if after is not None:
            after()
        memory, done = memoryview((ctypes.c_char * nbytes).from_address(address)), 0
        while done < nbytes:
            moved = call(self._descriptor, [memory[done:]], offset + done)
            if moved == 0:
                raise OSError(f"the file ends at byte {offset + done}")
            done += moved
        return time.perf_counter()

    # ---- the mapping -------------------------------------------------------------------------------------------------

    def drop_pages(self) -> None:
        """Write out what was written through the mapping, and give its memory back to the system."""
        self._memory.flush()
        self._memory.madvise(mmap.MADV_DONTNEED)  # the pages stay in the file: it is shared, not private
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """End the threads. The space goes back to the disk when the last carved tensor is gone."""
        self._pool.shutdown()
        self._close()
        self._carved, self._starts = [], {}


class DryRunStore(FileStore):
    """A file that is not there, of tensors without values: a dry run is about another host's disk."""

    def _reserve(self, device: torch.device) -> None:
        self._device = device

    def _carve(self, region: Region, start: int) -> torch.Tensor:
        return torch.empty(region.numel, dtype=region.dtype, device=self._device)

    def _launch(self, *_: object) -> FileTransfer:
        return FileTransfer(list, False, lambda *_: None)

    def drop_pages(self) -> None:
        """There are none."""

    def close(self) -> None:
        """Forget the tensors."""
        self._carved, self._starts = [], {}
