"""A checkpoint, read by name: which rows of which shards overlap the elements that somebody wants.

Needs no process group: loading uses one on each rank, exporting uses one alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepzero.checkpoint.json_codec import TORCH_DTYPES, decode, tensor_names
from deepzero.checkpoint.manifest import CLIENT, ITEMSIZE, CheckpointError, Manifest, Row
from deepzero.checkpoint.shard_file import FileRange, ShardReader


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
