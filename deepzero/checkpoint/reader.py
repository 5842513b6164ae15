"""Reading: by name from a checkpoint, by byte ranges from a file, block by block compared with the manifest's CRC-32.

Needs no process group: loading uses a :class:`CheckpointReader` on each rank, exporting uses one alone. Tensors are
read with ``pread`` and not through a memory map: a file that has become shorter is then an error, and not a dead
process (SIGBUS). Headers are read, and compared with the file's size, by the safetensors library.
"""

from __future__ import annotations

import bisect
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from deepzero.checkpoint.errors import CheckpointError
from deepzero.checkpoint.json_codec import ITEMSIZE, TORCH_DTYPES, decode, tensor_names
from deepzero.checkpoint.manifest import CLIENT, Manifest, Row, ShardInfo

READ_BYTES = 8 << 20


# ---- a checkpoint ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReadRequest:
    """Elements that somebody wants."""

    key: str
    name: str
    start: int
    into: torch.Tensor
    """1-D; gets the elements ``start … start + numel``, converted to its dtype."""


class CheckpointReader:
    """Reads from a folder of shards.

    Args:
        path: the folder.
        manifest: of it.
        checked: compare every block that is read with the manifest's CRC-32. Off for files that are no shards.
    """

    def __init__(self, path: Path, manifest: Manifest, checked: bool = True) -> None:
        self.path, self.manifest, self.checked = path, manifest, checked
        self.bytes_read = 0
        self._rows: dict[tuple[str, str], list[tuple[Row, str]]] = {}
        for file, info in manifest.files.items():
            for row in info.rows:
                self._rows.setdefault((row.key, row.name), []).append((row, file))
        for rows in self._rows.values():
            rows.sort(key=lambda item: item[0].start)

    def has(self, key: str, name: str) -> bool:
        """Whether anything is stored under these names."""
        return (key, name) in self._rows

    def fragments(self, wanted: Iterable[ReadRequest]) -> dict[str, list[FileRange]]:
        """What has to be read, by file.

        Raises:
            CheckpointError: elements that no row holds.
        """
        found: dict[str, list[FileRange]] = {}
        for want in wanted:
            cursor, end = want.start, want.start + want.into.numel()
            for row, file in self._rows.get((want.key, want.name), ()):
                stop = min(end, row.start + row.numel)
                if row.start <= cursor < stop:
                    offset = row.offset + (cursor - row.start) * ITEMSIZE[row.dtype]
                    into = want.into[cursor - want.start : stop - want.start]
                    found.setdefault(file, []).append(FileRange(offset, stop - cursor, row.dtype, into))
                    cursor = stop
            if cursor < end:
                raise CheckpointError(
                    f"{self.path} has no element {cursor} of {want.key} of {want.name!r}; the checkpoint is not whole"
                )
        return found

    def read(self, wanted: Iterable[ReadRequest]) -> dict[str, list[tuple[int, int]]]:
        """Fill what is wanted; returns the runs of blocks that were read, by file."""
        runs = {}
        for file, fragments in sorted(self.fragments(wanted).items()):
            reader = self._reader(file)
            runs[file] = reader.read(fragments)
            self.bytes_read += reader.bytes_read
        return runs

    def check(self, file: str, runs: Sequence[tuple[int, int]]) -> None:
        """Read runs of blocks only to see that they are right."""
        reader = self._reader(file)
        reader.check(runs)
        self.bytes_read += reader.bytes_read

    def value(self, encoded: Any) -> Any:
        """A value of the manifest with the tensors it refers to."""
        tensors = {}
        wanted = []
        for name in tensor_names(encoded):
            rows = self._rows.get((CLIENT, name), [])
            numel = sum(row.numel for row, _ in rows)
            dtype = TORCH_DTYPES[rows[0][0].dtype] if rows else torch.float32
            tensors[name] = torch.empty(numel, dtype=dtype)
            wanted.append(ReadRequest(CLIENT, name, 0, tensors[name]))
        self.read(wanted)
        return decode(encoded, tensors)

    def stored_numel(self, key: str, name: str) -> int:
        """Elements stored under these names."""
        return sum(row.numel for row, _ in self._rows.get((key, name), ()))

    def stored_dtype(self, key: str, name: str) -> torch.dtype:
        """Dtype of what is stored under these names."""
        return TORCH_DTYPES[self._rows[(key, name)][0][0].dtype]

    def _reader(self, file: str) -> ShardReader:
        return ShardReader(self.path / file, self.manifest.files[file] if self.checked else None)


# ---- one file --------------------------------------------------------------------------------------------------------


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


# ---- headers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a safetensors file, ours or somebody else's."""

    name: str
    dtype: str
    """safetensors' name of it."""
    shape: tuple[int, ...]
    offset: int
    """Of its first byte in the file."""

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


def read_header(path: Path) -> tuple[dict[str, str], list[StoredTensor]]:
    """The metadata of a safetensors file, and its tensors in the order of their bytes.

    Raises:
        CheckpointError: with the file's name: it cannot be read, is shortened, is no safetensors file, has a dtype that
            is not supported.
    """
    try:
        size = path.stat().st_size
        with safe_open(path, "pt") as file:
            metadata = dict(file.metadata() or {})
            slices = {name: file.get_slice(name) for name in file.offset_keys()}
            kinds = [(name, piece.get_dtype(), tuple(piece.get_shape())) for name, piece in slices.items()]
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} is damaged, truncated or no safetensors file ({error}); it has {path.stat().st_size} bytes"
        ) from None
    for name, dtype, _ in kinds:
        if dtype not in ITEMSIZE:
            raise CheckpointError(f"{path}: tensor {name!r} has dtype {dtype}; known are {', '.join(sorted(ITEMSIZE))}")
    # Tensors lie one after the other, to the end of the file: the library has seen to that.
    offset = size - sum(math.prod(shape) * ITEMSIZE[dtype] for _, dtype, shape in kinds)
    tensors = []
    for name, dtype, shape in kinds:
        tensors.append(StoredTensor(name, dtype, shape, offset))
        offset += math.prod(shape) * ITEMSIZE[dtype]
    return metadata, tensors
