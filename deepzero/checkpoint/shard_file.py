"""One shard: written once, front to back, hashed on the way.

The file is safetensors' format, and safetensors reads it. It is written here because the library takes a copy of every
tensor first (``bytes``), holding Python's lock, while a training step wants both.

Source: the format is eight bytes of length, a JSON header, the data without holes; [safetensors], README.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import hashlib
import itertools
import json
import math
import os
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from deepzero.checkpoint.errors import CheckpointError
from deepzero.checkpoint.json_codec import DTYPES, ITEMSIZE
from deepzero.checkpoint.manifest import HEAD_ALIGN, Entry, Row, ShardInfo, block_bytes_for
from deepzero.durable import Flushes
from deepzero.utils.storage import as_bytes

WRITE_BYTES = 1 << 20
PAGE_BYTES = 4096
_DIRECT = getattr(os, "O_DIRECT", 0)


def make_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str]) -> bytes:
    """The first bytes of a file, up to the aligned data of ``tensors``: (name, dtype, shape), in the order of bytes."""
    header: dict[str, Any] = {"__metadata__": metadata}
    cursor = 0
    for name, dtype, shape in tensors:
        end = cursor + math.prod(shape) * ITEMSIZE[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [cursor, end]}
        cursor = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % HEAD_ALIGN)
    return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True)
class ShardPlan:
    """Where everything will lie in a shard, before a byte is written."""

    entries: tuple[Entry, ...]
    rows: tuple[Row, ...]
    header: bytes
    image: torch.Tensor | None = None
    """The whole file in memory, 1-D bytes at the start of a page: a snapshot, complete when its copies are."""

    @property
    def bytes(self) -> int:
        """Of the whole file."""
        return len(self.header) + sum(row.nbytes for row in self.rows)

    def copy_into(self, memory: torch.Tensor) -> ShardPlan:
        """The same plan with everything in ``memory``, 1-D bytes on the CPU; on a GPU the copies are only queued."""
        memory = memory[: self.bytes]
        memory[: len(self.header)].copy_(torch.frombuffer(bytearray(self.header), dtype=torch.uint8))
        for entry, row in zip(self.entries, self.rows, strict=True):
            copy = memory[row.offset : row.end].view(entry.tensor.dtype)
            copy.copy_(entry.tensor.detach(), non_blocking=True)
        return ShardPlan((), self.rows, self.header, memory)


def plan_shard(entries: Iterable[Entry], metadata: dict[str, str]) -> ShardPlan:
    """Lay out a shard; ``metadata`` are strings for safetensors' ``__metadata__``.

    The largest elements come first, so that each begins at a multiple of its size though there are no holes.
    """
    ordered = tuple(sorted(entries, key=lambda entry: -entry.tensor.element_size()))
    for entry in ordered:
        if entry.tensor.dtype not in DTYPES:
            raise CheckpointError(f"{entry.key}/{entry.name} is {entry.tensor.dtype}, which a checkpoint cannot hold")
    rows = [Row(e.key, e.name, DTYPES[e.tensor.dtype], e.start, e.tensor.numel(), 0) for e in ordered]
    names = Counter(row.tensor_name for row in rows)
    if twice := [name for name, count in names.items() if count > 1]:
        raise CheckpointError(f"two tensors of one shard are called {twice[0]!r}")
    head = make_header([(row.tensor_name, row.dtype, (row.numel,)) for row in rows], metadata)
    offsets = itertools.accumulate((row.nbytes for row in rows), initial=len(head))
    placed = (dataclasses.replace(row, offset=offset) for row, offset in zip(rows, offsets, strict=False))
    return ShardPlan(ordered, tuple(placed), head)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a 1-D contiguous tensor, in place where it is on the CPU."""
    return memoryview(as_bytes(tensor.cpu()).numpy())  # type: ignore[arg-type]


class BlockSums:
    """CRC-32 of each block of bytes that come in any portions."""

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes, self.crcs = block_bytes, list[int]()
        self._filled = block_bytes  # of the last block; a full one: another begins

    def update(self, view: memoryview) -> None:
        """The next portion."""
        while len(view):
            if self._filled == self.block_bytes:
                self.crcs.append(0)
                self._filled = 0
            part = view[: self.block_bytes - self._filled]
            self.crcs[-1] = zlib.crc32(part, self.crcs[-1])
            self._filled += len(part)
            view = view[len(part) :]


def put(file: BinaryIO, view: memoryview) -> None:
    """Every byte of every shard goes through here; a test can make the disk slow, or full."""
    while len(view):
        view = view[file.write(view) :]


def write_shard(path: Path, plan: ShardPlan, rank: int, progress: Callable[[int], None]) -> ShardInfo:
    """Write a new file and flush it to the disk, piece by piece; an ``OSError`` has its name.

    ``progress`` is called about once a second with the number of bytes written, and after each flush.
    """
    behind = plan.image is not None
    sums, sha256 = BlockSums(block_bytes_for(plan.bytes)), None if behind else hashlib.sha256()
    written, said = 0, time.monotonic()
    try:
        with _new_file(path, behind) as file:
            flushes = Flushes(file)
            for part in _portions_of(plan):
                sums.update(part)
                if sha256 is None:
                    _put_direct(file, part, written)
                else:
                    sha256.update(part)
                    put(file, part)
                written += len(part)
                if flushes.wrote(len(part)) or time.monotonic() - said > 1.0:
                    said = time.monotonic()
                    progress(written)
            flushes.flush()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    crc32 = "".join(f"{crc:08x}" for crc in sums.crcs)
    whole = None if sha256 is None else sha256.hexdigest()
    return ShardInfo(rank, plan.bytes, whole, sums.block_bytes, crc32, plan.rows)


def _portions_of(plan: ShardPlan) -> Iterator[memoryview]:
    """The file's bytes in order. Live tensors are looked at one by one: from a GPU each is a copy."""
    if plan.image is None:
        views = itertools.chain([memoryview(plan.header)], (bytes_of(entry.tensor) for entry in plan.entries))
    else:  # whole pages, and the rest
        image = bytes_of(plan.image)
        pages = len(image) // PAGE_BYTES * PAGE_BYTES
        views = itertools.chain([image[:pages], image[pages:]])
    for view in views:
        for start in range(0, len(view), WRITE_BYTES):
            yield view[start : start + WRITE_BYTES]


def _new_file(path: Path, direct: bool) -> BinaryIO:
    """A new file; a snapshot goes past the page cache, where that is possible.

    What training waits for is not the disk but the processor: to let the system copy 590 MB into fresh pages took 1.4 s
    of a core that a rank wanted, and to let the disk read them from our memory 0.06 s.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        handle = os.open(path, flags | _DIRECT * direct, 0o644)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # A file system that has no other way; some have made the file all the same.
        handle = os.open(path, flags & ~os.O_EXCL, 0o644)
    return os.fdopen(handle, "wb", buffering=0 if direct else WRITE_BYTES)


def _put_direct(file: BinaryIO, part: memoryview, offset: int) -> None:
    """Past the page cache but for the last bytes, which are less than a page, and where the disk asks for more."""
    if len(part) % PAGE_BYTES == 0:
        try:
            return put(file, part)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            file.seek(offset)
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) & ~_DIRECT)
    put(file, part)
