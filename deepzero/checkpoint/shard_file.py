"""One shard: written once, front to back, hashed on the way; read by byte ranges, checked block by block.

The file is safetensors' format, and safetensors reads it. It is written here because the library takes a copy of every
tensor first (``bytes``), holding Python's lock, while a training step wants both; and read here with ``pread`` instead
of a memory map: a file that has become shorter is then an error, and not a dead process (SIGBUS).

Source: the format is eight bytes of length, a JSON header, the data without holes; safetensors' README.
"""

from __future__ import annotations

import bisect
import dataclasses
import errno
import fcntl
import hashlib
import os
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from deepzero.checkpoint.headers import make_header
from deepzero.checkpoint.json_codec import DTYPES, TORCH_DTYPES
from deepzero.checkpoint.manifest import ITEMSIZE, CheckpointError, Row, ShardInfo, block_bytes_for
from deepzero.durable import Flushes

WRITE_BYTES = 1 << 20
PAGE_BYTES = 4096
READ_BYTES = 8 << 20


@dataclass(frozen=True)
class Entry:
    """A run of elements on its way into a shard."""

    key: str
    name: str
    start: int
    tensor: torch.Tensor
    """1-D and contiguous."""


@dataclass(frozen=True)
class ShardPlan:
    """Where everything will lie in a shard, before a byte is written."""

    entries: tuple[Entry, ...]
    rows: tuple[Row, ...]
    header: bytes
    image: memoryview | None = None
    """The whole file in memory, at the start of a page: a snapshot."""

    @property
    def bytes(self) -> int:
        """Of the whole file."""
        return len(self.header) + sum(row.nbytes for row in self.rows)

    def copy_into(self, memory: torch.Tensor) -> ShardPlan:
        """The same plan with everything in ``memory``, 1-D bytes on the CPU; on a GPU the copies are only queued."""
        memory = memory[: self.bytes]
        memory[: len(self.header)].copy_(torch.frombuffer(bytearray(self.header), dtype=torch.uint8))
        with torch.no_grad():
            for entry, row in zip(self.entries, self.rows, strict=True):
                copy = memory[row.offset : row.offset + row.nbytes].view(entry.tensor.dtype)
                copy.copy_(entry.tensor.detach(), non_blocking=True)
        return ShardPlan((), self.rows, self.header, memoryview(memory.numpy()))  # type: ignore[arg-type]


def plan_shard(entries: Iterable[Entry], metadata: dict[str, str]) -> ShardPlan:
    """Lay out a shard.

    The largest elements come first, so that each begins at a multiple of its size though there are no holes.

    Args:
        entries: no two of one key and name.
        metadata: strings for safetensors' ``__metadata__``.
    """
    ordered = sorted(entries, key=lambda entry: -entry.tensor.element_size())
    relative: list[Row] = []
    cursor = 0
    for entry in ordered:
        if entry.tensor.dtype not in DTYPES:
            raise CheckpointError(f"{entry.key}/{entry.name} is {entry.tensor.dtype}, which a checkpoint cannot hold")
        row = Row(entry.key, entry.name, DTYPES[entry.tensor.dtype], entry.start, entry.tensor.numel(), cursor)
        relative.append(row)
        cursor += row.nbytes
    names = Counter(row.tensor_name for row in relative)
    if twice := [name for name, count in names.items() if count > 1]:
        raise CheckpointError(f"two tensors of one shard are called {twice[0]!r}")
    head = make_header([(row.tensor_name, row.dtype, (row.numel,)) for row in relative], metadata)
    rows = [dataclasses.replace(row, offset=row.offset + len(head)) for row in relative]
    return ShardPlan(tuple(ordered), tuple(rows), head)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a 1-D contiguous tensor, in place where it is on the CPU."""
    return memoryview(tensor.detach().cpu().view(torch.uint8).numpy())  # type: ignore[arg-type]


class _Digest:
    """CRC-32 of each block, and SHA-256 of everything if there is time, of bytes that come in any portions."""

    def __init__(self, block_bytes: int, whole: bool) -> None:
        self.block_bytes, self._sha256 = block_bytes, hashlib.sha256() if whole else None
        self._crcs: list[int] = []
        self._crc = self._filled = 0

    def update(self, view: memoryview) -> None:
        if self._sha256 is not None:
            self._sha256.update(view)
        while len(view):
            part = view[: self.block_bytes - self._filled]
            self._crc = zlib.crc32(part, self._crc)
            self._filled += len(part)
            view = view[len(part) :]
            if self._filled == self.block_bytes:
                self._close()

    def _close(self) -> None:
        self._crcs.append(self._crc)
        self._crc = self._filled = 0

    def whole(self) -> str | None:
        return self._sha256.hexdigest() if self._sha256 is not None else None

    def crc32(self) -> str:
        if self._filled:
            self._close()
        return "".join(f"{crc:08x}" for crc in self._crcs)


def put(file: BinaryIO, view: memoryview) -> None:
    """Every byte of every shard goes through here; a test can make the disk slow, or full."""
    while len(view):
        view = view[file.write(view) :]


def write_shard(path: Path, plan: ShardPlan, rank: int, progress: Callable[[int], None]) -> ShardInfo:
    """Write the file and flush it to the disk, piece by piece.

    Args:
        path: a new file.
        plan: from :func:`plan_shard`.
        rank: whose it is.
        progress: called about once a second with the number of bytes written, and after each flush.

    Raises:
        OSError: what the system says, with the file's name.
    """
    behind = plan.image is not None
    digest = _Digest(block_bytes_for(plan.bytes), whole=not behind)
    written, said = 0, time.monotonic()
    try:
        with _new_file(path, behind) as file:
            flushes = Flushes(file)
            for part in _portions_of(plan):
                digest.update(part)
                if behind:
                    _put_direct(file, part, written)
                else:
                    put(file, part)
                written += len(part)
                if flushes.wrote(len(part)) or time.monotonic() - said > 1.0:
                    said = time.monotonic()
                    progress(written)
            flushes.flush()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    return ShardInfo(rank, plan.bytes, digest.whole(), digest.block_bytes, digest.crc32(), plan.rows)


def _portions_of(plan: ShardPlan) -> Iterator[memoryview]:
    """The file's bytes in order. Live tensors are looked at one by one: from a GPU each is a copy."""
    if plan.image is not None:
        whole_pages = len(plan.image) // PAGE_BYTES * PAGE_BYTES
        yield from _cut(plan.image[:whole_pages])
        yield from _cut(plan.image[whole_pages:])
        return
    yield memoryview(plan.header)
    for entry in plan.entries:
        yield from _cut(bytes_of(entry.tensor))


def _cut(view: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(view), WRITE_BYTES):
        yield view[start : start + WRITE_BYTES]


def _new_file(path: Path, direct: bool) -> BinaryIO:
    """A new file; a snapshot goes past the page cache, where that is possible.

    What training waits for is not the disk but the processor: to let the system copy 590 MB into fresh pages took 1.4 s
    of a core that a rank wanted, and to let the disk read them from our memory 0.06 s.
    """
    flag = getattr(os, "O_DIRECT", 0) if direct else 0
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        handle = os.open(path, flags | flag, 0o644)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        handle = os.open(path, flags, 0o644)  # a file system that has no other way
    return os.fdopen(handle, "wb", buffering=0 if direct else WRITE_BYTES)


def _put_direct(file: BinaryIO, part: memoryview, offset: int) -> None:
    """Past the page cache but for the last bytes, which are less than a page, and where the disk asks for more."""
    if len(part) % PAGE_BYTES == 0:
        try:
            put(file, part)
            return
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            file.seek(offset)
    _use_page_cache(file)
    put(file, part)


def _use_page_cache(file: BinaryIO) -> None:
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    fcntl.fcntl(file, fcntl.F_SETFL, flags & ~getattr(os, "O_DIRECT", 0))


# ---- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FileRange:
    """Bytes of a shard, and where their elements go."""

    offset: int
    """In the file."""
    numel: int
    dtype: str
    into: torch.Tensor
    """1-D, ``numel`` elements, of any dtype and device."""

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.offset + self.numel * ITEMSIZE[self.dtype]


class ShardReader:
    """Reads one shard, whole blocks at a time, and counts what it read.

    Args:
        path: the file.
        info: what the manifest says of it; None for a safetensors file that is nobody's shard: nothing is checked then.
    """

    def __init__(self, path: Path, info: ShardInfo | None) -> None:
        self.path, self.info = path, info
        self.bytes_read = 0
        self._block = info.block_bytes if info is not None else 1
        try:
            self._size = path.stat().st_size
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from None

    def blocks(self, fragments: Iterable[FileRange]) -> list[tuple[int, int]]:
        """Runs (first, one past the last) of the blocks that hold the fragments, ascending and apart."""
        spans = sorted((f.offset // self._block, -(-f.end // self._block)) for f in fragments if f.numel)
        # Without blocks each fragment is read by itself, from its start: so no element lies across two portions.
        return merge(spans) if self.info is not None else spans

    def read(self, fragments: Iterable[FileRange]) -> list[tuple[int, int]]:
        """Fill the fragments' tensors; returns the runs of blocks that were read and found right."""
        ordered = sorted((f for f in fragments if f.numel), key=lambda fragment: fragment.offset)
        runs = self.blocks(ordered)
        starts = [fragment.offset for fragment in ordered]
        widest = max((fragment.end - fragment.offset for fragment in ordered), default=0)
        for offset, data in self._portions(runs):
            end = offset + len(data)
            first = bisect.bisect_left(starts, offset - widest)
            for fragment in ordered[first : bisect.bisect_left(starts, end)]:
                if fragment.end > offset:
                    _copy_out(fragment, offset, data)
        return runs

    def check(self, runs: Iterable[tuple[int, int]]) -> None:
        """Read runs of blocks only to see that they are right."""
        for _ in self._portions(runs):
            pass

    def _portions(self, runs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, memoryview]]:
        """(offset in the file, bytes) of runs of blocks, checked; the memory is used again for the next portion."""
        runs = list(runs)
        # No larger than the longest run: most parameters are small, and clearing memory takes time, too.
        step = min(max(1, READ_BYTES // self._block), max((last - first for first, last in runs), default=1))
        buffer = bytearray(step * self._block)
        try:
            file = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"{self.path}: {error.strerror}") from None
        try:
            for first, last in runs:
                for block in range(first, last, step):
                    offset = block * self._block
                    wanted = min(min(block + step, last) * self._block, self._size) - offset
                    view = memoryview(buffer)[:wanted]
                    self._fill(file, view, offset)
                    self._check(view, block)
                    yield offset, view
        finally:
            os.close(file)

    def _fill(self, file: int, view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):
            try:
                count = os.preadv(file, [view[done:]], offset + done)
            except OSError as error:
                raise CheckpointError(f"{self.path}: {error.strerror}; the disk cannot read it") from None
            if count == 0:
                raise CheckpointError(
                    f"{self.path} ends after {offset + done} bytes, {self._size} were expected: it is truncated"
                )
            done += count
        self.bytes_read += done

    def _check(self, view: memoryview, first: int) -> None:
        if self.info is None:
            return
        for number in range(-(-len(view) // self._block)):
            part = view[number * self._block : (number + 1) * self._block]
            if zlib.crc32(part) != self.info.block_crc(first + number):
                raise CheckpointError(damage(self.path, self.info, first + number))


def damage(path: Path, info: ShardInfo, block: int) -> str:
    """What is said of a block with another CRC-32."""
    start, end = block * info.block_bytes, min((block + 1) * info.block_bytes, info.bytes)
    inside = [row.tensor_name for row in info.rows if row.offset < end and row.offset + row.nbytes > start]
    what = ", ".join(inside[:3]) + (f" and {len(inside) - 3} more" if len(inside) > 3 else "")
    return f"{path} is damaged: bytes {start} to {end} are not what was written ({what or 'the header'})"


def _copy_out(fragment: FileRange, offset: int, data: memoryview) -> None:
    """The elements of ``fragment`` that lie in ``data``. Portions end at blocks, and no element lies across two."""
    size = ITEMSIZE[fragment.dtype]
    first = max(0, -(-(offset - fragment.offset) // size))
    last = min(fragment.numel, (offset + len(data) - fragment.offset) // size)
    if first < last:
        begin = fragment.offset + first * size - offset
        # Copied once more, aligned: a plain safetensors file may begin its data anywhere.
        piece = bytearray(data[begin : begin + (last - first) * size]) if begin % size else data[begin:]
        values = torch.frombuffer(piece, dtype=TORCH_DTYPES[fragment.dtype], count=last - first)
        fragment.into[first:last].copy_(values)


def merge(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted runs made disjoint.

    Example:
        >>> merge([(0, 2), (1, 3), (5, 6), (6, 8)])
        [(0, 3), (5, 8)]
    """
    merged: list[tuple[int, int]] = []
    for first, last in spans:
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged


def remaining(blocks: int, runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The runs of ``0 … blocks-1`` that ``runs`` leave out.

    Example:
        >>> remaining(8, [(0, 3), (5, 7)])
        [(3, 5), (7, 8)]
    """
    left, cursor = [], 0
    for first, last in merge(sorted(runs)):
        if first > cursor:
            left.append((cursor, first))
        cursor = max(cursor, last)
    if cursor < blocks:
        left.append((cursor, blocks))
    return left
