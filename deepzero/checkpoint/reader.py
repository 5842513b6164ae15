"""Reading: by name from a checkpoint, by byte ranges from a file, block by block compared with the manifest's CRC-32.

Needs no process group: loading uses a :class:`CheckpointReader` on each rank, exporting uses one alone. Tensors are
read with ``pread`` and not through a memory map: a file that has become shorter is then an error, and not a dead
process (SIGBUS). Headers are read, and compared with the file's size, by the safetensors library.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from deepzero.checkpoint.checkpoint_dir import find, read_manifest
from deepzero.checkpoint.errors import CheckpointError
from deepzero.checkpoint.json_codec import ITEMSIZE, TORCH_DTYPES, decode, tensor_names
from deepzero.checkpoint.manifest import BUFFER, CLIENT, Entry, Manifest, Row, ShardInfo
from deepzero.utils.formatting import listed

READ_BYTES = 8 << 20

Run = tuple[int, int]
"""Blocks of a file: the first, and one past the last."""


class CheckpointReader:
    """Reads from a folder of shards; ``checked`` by the manifest's CRC-32s, which files that are no shards have not."""

    checks_files = False
    """Whether :meth:`check` looks at a whole file, and what is read is not looked at by itself."""

    def __init__(self, path: Path, manifest: Manifest, checked: bool = True) -> None:
        self.path, self.manifest, self.checked = path, manifest, checked
        self._rows: dict[tuple[str, str], list[tuple[Row, str]]] = {}
        for file, info in manifest.files.items():
            for row in info.rows:
                self._rows.setdefault((row.key, row.name), []).append((row, file))
        for rows in self._rows.values():
            rows.sort(key=lambda item: item[0].start)

    def extent(self, key: str, name: str) -> tuple[int, torch.dtype] | None:
        """Elements and dtype of what is stored under these names; None: nothing is."""
        rows = [row for row, _ in self._rows.get((key, name), ())]
        return (sum(row.numel for row in rows), TORCH_DTYPES[rows[0].dtype]) if rows else None

    def model_tensors(self) -> Iterator[tuple[str, str, str, tuple[int, ...], Sequence[str]]]:
        """Key, name, dtype, shape and further names of every parameter and buffer, whether or not it was saved."""
        for name, info in self.manifest.parameters.items():
            yield info.values_key, name, info.dtype, info.shape, info.aliases
        for name, buffer in self.manifest.buffers.items():
            yield BUFFER, name, buffer["dtype"], tuple(buffer["shape"]), buffer.get("aliases", ())

    def read(self, wanted: Iterable[Entry]) -> dict[str, list[Run]]:
        """Fill what is wanted, or raise a CheckpointError; returns the runs of blocks that were read, by file."""
        found: dict[str, list[tuple[Row, torch.Tensor]]] = {}
        for want in wanted:
            cursor, end = want.start, want.start + want.tensor.numel()
            for row, file in self._rows.get((want.key, want.name), ()):
                stop = min(end, row.start + row.numel)
                if row.start <= cursor < stop:
                    offset = row.offset + (cursor - row.start) * ITEMSIZE[row.dtype]
                    part = dataclasses.replace(row, start=cursor, numel=stop - cursor, offset=offset)
                    found.setdefault(file, []).append((part, want.tensor[cursor - want.start : stop - want.start]))
                    cursor = stop
            if cursor < end:
                raise CheckpointError(
                    f"{self.path} has no element {cursor} of {want.key} of {want.name!r}; the checkpoint is not whole"
                )
        infos = self.manifest.files if self.checked else {}
        return {file: read_rows(self.path / file, infos.get(file), parts) for file, parts in sorted(found.items())}

    def check(self, file: str, runs: Iterable[Run]) -> None:
        """Read runs of blocks only to see that they are right."""
        for _ in portions(self.path / file, self.manifest.files[file] if self.checked else None, runs):
            pass

    def value(self, encoded: Any) -> Any:
        """A value of the manifest with the tensors it refers to."""
        tensors = {}
        for name in tensor_names(encoded):
            numel, dtype = self.extent(CLIENT, name) or (0, torch.float32)
            tensors[name] = torch.empty(numel, dtype=dtype, device="cpu")
        self.read([Entry(CLIENT, name, 0, tensor) for name, tensor in tensors.items()])
        return decode(encoded, tensors)


def read_own(load_dir: str | Path, tag: str | None) -> CheckpointReader:
    """A reader of a checkpoint of ours; raises what :func:`find` and :func:`read_manifest` do."""
    path = find(load_dir, tag)
    return CheckpointReader(path, read_manifest(path))


# ---- one file --------------------------------------------------------------------------------------------------------


def read_rows(path: Path, info: ShardInfo | None, parts: Iterable[tuple[Row, torch.Tensor]]) -> list[Run]:
    """Read some of a file's rows into 1-D tensors of any dtype and device, whole blocks at a time.

    A safetensors file that is nobody's shard has no ``info``: nothing is checked then. Returns the runs of blocks that
    were read and found right, ascending and apart.
    """
    parts = sorted((part for part in parts if part[0].numel), key=lambda part: part[0].offset)
    block = info.block_bytes if info is not None else 1
    spans = sorted((row.offset // block, -(-row.end // block)) for row, _ in parts)
    # Without blocks each row is read by itself, from its start: so no element lies across two portions.
    runs = merge(spans) if info is not None else spans
    starts = [row.offset for row, _ in parts]
    widest = max((row.nbytes for row, _ in parts), default=0)
    for offset, data in portions(path, info, runs):
        first, last = bisect.bisect_left(starts, offset - widest), bisect.bisect_left(starts, offset + len(data))
        for row, into in parts[first:last]:
            if row.end > offset:
                _copy_out(row, into, offset, data)
    return runs


def portions(path: Path, info: ShardInfo | None, runs: Iterable[Run]) -> Iterator[tuple[int, memoryview]]:
    """(offset in the file, bytes) of runs of blocks, checked; the memory is used again for the next portion."""
    runs, block_bytes = list(runs), info.block_bytes if info is not None else 1
    size = info.bytes if info is not None else max((last for _, last in runs), default=0)
    # No larger than the longest run: most parameters are small, and clearing memory takes time, too.
    step = max(1, min(READ_BYTES // block_bytes, max((last - first for first, last in runs), default=1)))
    buffer = bytearray(step * block_bytes)
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    try:
        for first, last in runs:
            for block in range(first, last, step):
                offset = block * block_bytes
                view = memoryview(buffer)[: min(min(block + step, last) * block_bytes, size) - offset]
                fill(path, file, view, offset)
                for number in range(-(-len(view) // block_bytes) if info is not None else 0):
                    part = view[number * block_bytes : (number + 1) * block_bytes]
                    if info is not None and zlib.crc32(part) != info.block_crc(block + number):
                        raise CheckpointError(damage(path, info, block + number))
                yield offset, view
    finally:
        os.close(file)


def fill(path: Path, file: int, view: memoryview, offset: int) -> None:
    """Every byte of every tensor that is read comes through here, where a disk fails or a file is too short."""
    done = 0
    while done < len(view):
        try:
            count = os.preadv(file, [view[done:]], offset + done)
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}; the disk cannot read it") from None
        if count == 0:
            expected = f"{offset + len(view)} were expected"
            raise CheckpointError(f"{path} ends after {offset + done} bytes, {expected}: it is truncated")
        done += count


def damage(path: Path, info: ShardInfo, block: int) -> str:
    """What is said of a block with another CRC-32."""
    start, end = block * info.block_bytes, min((block + 1) * info.block_bytes, info.bytes)
    inside = [row.tensor_name for row in info.rows if row.offset < end and row.end > start]
    what = listed(inside) or "the header"
    return f"{path} is damaged: bytes {start} to {end} are not what was written ({what})"


def _copy_out(row: Row, into: torch.Tensor, offset: int, data: memoryview) -> None:
    """The elements of ``row`` that lie in ``data``. Portions end at blocks, and no element lies across two."""
    size = ITEMSIZE[row.dtype]
    first = max(0, -(-(offset - row.offset) // size))
    last = min(row.numel, (offset + len(data) - row.offset) // size)
    if first < last:
        begin = row.offset + first * size - offset
        # Copied once more, aligned: a plain safetensors file may begin its data anywhere.
        piece = bytearray(data[begin : begin + (last - first) * size]) if begin % size else data[begin:]
        into[first:last].copy_(torch.frombuffer(piece, dtype=TORCH_DTYPES[row.dtype], count=last - first))


def merge(spans: Iterable[Run]) -> list[Run]:
    """Sorted runs made disjoint.

    Example:
        >>> merge([(0, 2), (1, 3), (5, 6), (6, 8)])
        [(0, 3), (5, 8)]
    """
    merged: list[Run] = []
    for first, last in spans:
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged


def remaining(blocks: int, runs: Iterable[Run]) -> list[Run]:
    """The runs of ``0 … blocks-1`` that ``runs`` leave out.

    Example:
        >>> remaining(8, [(0, 3), (5, 7)])
        [(3, 5), (7, 8)]
    """
    taken = merge(sorted([(0, 0), *runs, (blocks, blocks)]))
    return [(before[1], after[0]) for before, after in itertools.pairwise(taken)]


# ---- headers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a safetensors file, ours or somebody else's, and where in the file it begins."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def row(self, key: str, name: str) -> Row:
        """All of it under these names."""
        return Row(key, name, self.dtype, 0, self.numel, self.offset)


def read_header(path: Path) -> tuple[dict[str, str], list[StoredTensor]]:
    """The metadata of a safetensors file, and its tensors in the order of their bytes; or a CheckpointError."""
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
            f"{path} is damaged, truncated or no safetensors file ({error}); it has {size} bytes"
        ) from None
    for name, dtype, _ in kinds:
        if dtype not in ITEMSIZE:
            raise CheckpointError(f"{path}: tensor {name!r} has dtype {dtype}; known are {', '.join(sorted(ITEMSIZE))}")
    # Tensors lie one after the other, to the end of the file: the library has seen to that.
    sizes = [math.prod(shape) * ITEMSIZE[dtype] for _, dtype, shape in kinds]
    offsets = itertools.accumulate(sizes, initial=size - sum(sizes))
    return metadata, [StoredTensor(*kind, offset) for kind, offset in zip(kinds, offsets, strict=False)]
