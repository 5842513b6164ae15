"""Verify: what is wrong with a checkpoint on disk, all that can be told apart, by file and tensor. No process group.

Loading stops at the first damage. This goes on: COMMIT, the manifest's hash, presence and size of every file, the
CRC-32 of every block and the SHA-256 of the whole, the safetensors header against the manifest's rows, rows against
parameters, and files that nobody has written.

Command: ``python -m tools.verify``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, repeat
from pathlib import Path

from deepzero.checkpoint.checkpoint_dir import find, others
from deepzero.checkpoint.errors import CheckpointError
from deepzero.checkpoint.json_codec import ITEMSIZE
from deepzero.checkpoint.manifest import COMMIT, MANIFEST, Manifest, ShardInfo, check_sound, row_problems, shard_name
from deepzero.checkpoint.reader import READ_BYTES, merge, read_header
from deepzero.checkpoint.shard_file import BlockSums
from deepzero.utils.formatting import listed


@dataclass
class VerifyReport:
    """What was found."""

    path: Path
    problems: list[str] = field(default_factory=list)
    """One line each, beginning with the file; empty: the checkpoint is whole."""
    manifest: Manifest | None = None
    bytes: int = 0
    """Read, of all shards."""
    not_stored: list[str] = field(default_factory=list)
    """Parameters that were left out when it was saved (not trained)."""


def verify(checkpoint: str | Path, tag: str | None = None) -> VerifyReport:
    """Check one checkpoint: one itself, or that of a tag in the folder of several; None: that of ``latest``.

    A CheckpointError says that there is nothing of that name to look at.
    """
    report = VerifyReport(find(checkpoint, tag, whole=False))
    report.problems += _check_manifest(report)
    if (manifest := report.manifest) is not None:
        for check in (_check_files, _check_extra, _check_rows):
            report.problems += _understood(check(report, manifest))
        try:
            check_sound(manifest, MANIFEST)
        except CheckpointError as error:  # what loading would refuse, where nothing above has found it
            report.problems = report.problems or [str(error).replace(" ", ": ", 1)]
    return report


def whole_beside(checkpoint: str | Path, tag: str | None) -> Path | None:
    """The newest other checkpoint of the folder in which nothing is wrong; None when there is none."""
    return next((path for path in others(checkpoint, tag) if not verify(path).problems), None)


def _understood(problems: Iterable[str]) -> Iterator[str]:
    """A manifest whose hash is wrong may hold anything; what cannot be understood is damage, too."""
    try:
        yield from problems
    except OSError as error:
        yield f"{error.filename}: {error.strerror}"
    except Exception as error:
        yield f"{MANIFEST}: cannot be followed ({type(error).__name__}: {error}); it is damaged"


def _check_manifest(report: VerifyReport) -> Iterator[str]:
    """COMMIT and the manifest, which the report gets."""
    raw: dict[str, bytes] = {}
    for name in (COMMIT, MANIFEST):
        try:
            raw[name] = (report.path / name).read_bytes()
        except OSError as error:
            yield f"{name}: is missing" if isinstance(error, FileNotFoundError) else f"{name}: {error.strerror}"
    if COMMIT in raw and not re.fullmatch(rb"[0-9a-f]{64}\n?", raw[COMMIT]):
        yield f"{COMMIT}: is not one SHA-256"
        del raw[COMMIT]
    if MANIFEST not in raw:
        return
    if COMMIT in raw and hashlib.sha256(raw[MANIFEST]).hexdigest() != raw[COMMIT].decode().strip():
        yield f"{MANIFEST}: is not what was written: its SHA-256 is not the one in {COMMIT}"
    try:
        report.manifest = Manifest.from_json(raw[MANIFEST], MANIFEST)
    except CheckpointError as error:
        yield f"{MANIFEST}: {str(error).removeprefix(f'{MANIFEST} ')}; nothing else can be checked"


def _check_files(report: VerifyReport, manifest: Manifest) -> Iterator[str]:
    # Only these names are opened: a manifest may say anything.
    expected = {shard_name(rank, manifest.world_size) for rank in range(manifest.world_size)}
    for name in sorted(expected ^ set(manifest.files)):
        wrong = "should be in it" if name in expected else "is no shard of these ranks"
        yield f"{MANIFEST}: {name} {wrong}, of {manifest.world_size} ranks"
    for name, info in sorted(manifest.files.items()):
        if (report.path / name).is_file():
            whole = chain(_check_bytes(report, name, info), _check_header(report.path / name, manifest.id, info))
            yield from _understood(whole)
        else:
            yield f"{name}: is missing, with {listed([row.tensor_name for row in info.rows])}"


def _check_bytes(report: VerifyReport, name: str, info: ShardInfo) -> Iterator[str]:
    """Size, every block's CRC-32, and in the same pass the SHA-256."""
    path, sums, sha256, read = report.path / name, BlockSums(info.block_bytes), hashlib.sha256(), 0
    if (size := path.stat().st_size) != info.bytes:
        yield f"{name}: has {size} bytes and should have {info.bytes}"
    if len(info.crc32) != 8 * info.blocks:
        raise ValueError(f"{len(info.crc32)} digits of CRC-32 for {info.blocks} blocks of {name}")
    with open(path, "rb", buffering=0) as file:
        while portion := file.read(READ_BYTES):
            sha256.update(portion)
            sums.update(memoryview(portion)[: max(0, info.bytes - read)])  # without what was appended to the file
            read += len(portion)
    report.bytes += read
    found = [*sums.crcs, *repeat(None, info.blocks - len(sums.crcs))]  # none of what was cut off
    bad = [(number, number + 1) for number, crc in enumerate(found) if crc != info.block_crc(number)]
    for first, last in merge(bad):
        start, end = first * info.block_bytes, min(last * info.block_bytes, info.bytes)
        yield from (
            f"{name}: bytes {start} to {end} are not what was written: {what}" for what in _lost(info, start, end)
        )
    if not bad and info.sha256 is not None and sha256.hexdigest() != info.sha256:
        yield f"{name}: its SHA-256 is not the manifest's"


def _lost(info: ShardInfo, start: int, end: int) -> Iterator[str]:
    """Each tensor of which something lies in the damaged bytes, and the header."""
    if start < min((row.offset for row in info.rows), default=info.bytes):
        yield "the header"
    for row in sorted(info.rows, key=lambda row: row.offset):
        if row.nbytes and row.offset < end and row.end > start:
            size = ITEMSIZE[row.dtype]
            first = row.start + max(0, start - row.offset) // size
            last = row.start + min(row.numel, -(-(end - row.offset) // size))
            yield f"{row.key} of {row.name!r}, elements {first} to {last}"


def _check_header(path: Path, save_id: str, info: ShardInfo) -> Iterator[str]:
    try:
        metadata, tensors = read_header(path)
    except CheckpointError as error:
        yield f"{path.name}: {str(error).removeprefix(str(path)).removeprefix(':').strip()}"
        return
    save, rank = metadata.get("deepzero_id"), metadata.get("rank")
    if save != save_id:
        yield f"{path.name}: is of save {save!r}, and the manifest of save {save_id!r}"
    if rank != str(info.rank):
        yield f"{path.name}: is of rank {rank}, and the manifest says rank {info.rank}"
    theirs = {tensor.name: tensor for tensor in tensors}
    for row in info.rows:
        name, tensor = row.tensor_name, theirs.pop(row.tensor_name, None)
        if tensor is None:
            yield f"{path.name}: its header has no {name!r}"
        elif (tensor.dtype, tensor.shape, tensor.offset) != (row.dtype, (row.numel,), row.offset):
            yield (
                f"{path.name}: {name!r} is {tensor.dtype} {list(tensor.shape)} at byte {tensor.offset} in its header, "
                f"and {row.dtype} [{row.numel}] at byte {row.offset} in the manifest"
            )
    yield from (f"{path.name}: its header has {other!r}, the manifest has not" for other in theirs)


def _check_extra(report: VerifyReport, manifest: Manifest) -> Iterator[str]:
    known = {MANIFEST, COMMIT, *manifest.files}
    for name in sorted(path.name for path in report.path.iterdir() if path.name not in known):
        yield f"{name}: is no file of this checkpoint"


def _check_rows(report: VerifyReport, manifest: Manifest) -> Iterator[str]:
    infos = manifest.parameters.items()
    report.not_stored += [name for name, info in infos if info.numel and not info.tensors and not info.trained]
    yield from (f"{place}: {problem}" for place, problem in row_problems(manifest))
