"""Verify: everything that can be wrong with a checkpoint on disk, all of it, by file and tensor. No process group.

Loading stops at the first damage. This goes on: COMMIT, the manifest's hash, presence and size of every file, the
CRC-32 of every block and the SHA-256 of the whole, the safetensors header against the manifest's rows, rows against
parameters, and files that nobody has written.

Command: ``python -m tools.verify``.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from deepzero.checkpoint.checkpoint_dir import check_tag, complete_tags, find, latest_tag, others
from deepzero.checkpoint.errors import CheckpointError
from deepzero.checkpoint.json_codec import ITEMSIZE
from deepzero.checkpoint.manifest import COMMIT, MANIFEST, Manifest, ShardInfo, row_problems, shard_name
from deepzero.checkpoint.reader import READ_BYTES, merge, read_header


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
    """Check one checkpoint.

    Args:
        checkpoint: one, or the folder that checkpoints were saved to.
        tag: which one; None: the one that ``latest`` names.

    Raises:
        CheckpointError: there is nothing of that name to look at.
    """
    report = VerifyReport(_locate(Path(checkpoint), tag))
    _check_manifest(report)
    if report.manifest is None:
        return report
    for check in (_check_files, _check_extra, _check_rows):
        _guarded(report, check)
    return report


def whole_beside(checkpoint: str | Path, tag: str | None) -> Path | None:
    """The newest other checkpoint of the folder in which nothing is wrong; None when there is none."""
    return next((path for path in others(checkpoint, tag) if not verify(path).problems), None)


def _guarded(report: VerifyReport, check: Callable[[VerifyReport, Manifest], None]) -> None:
    """A manifest whose hash is wrong may hold anything; what cannot be understood is damage, too."""
    if report.manifest is None:
        return
    try:
        check(report, report.manifest)
    except OSError as error:
        report.problems.append(f"{error.filename}: {error.strerror}")
    except Exception as error:
        report.problems.append(f"{MANIFEST}: cannot be followed ({type(error).__name__}: {error}); it is damaged")


def _locate(folder: Path, tag: str | None) -> Path:
    """As :func:`find`, but a checkpoint without its COMMIT is one to look at."""
    try:
        return find(folder, tag)
    except CheckpointError:
        if tag is None and not (folder / MANIFEST).exists():
            tag = latest_tag(folder) if folder.is_dir() else None
            if tag is None:
                raise
        if tag is not None:
            check_tag(tag)
        path = folder if tag is None else folder / tag
        if not path.is_dir() or path.name in complete_tags(folder):
            raise
        return path


# ---- COMMIT and manifest ---------------------------------------------------------------------------------------------


def _check_manifest(report: VerifyReport) -> None:
    commit = _read(report, COMMIT)
    if commit is not None and not re.fullmatch(rb"[0-9a-f]{64}\n?", commit):
        report.problems.append(f"{COMMIT}: is not one SHA-256")
        commit = None
    raw = _read(report, MANIFEST)
    if raw is None:
        return
    if commit is not None and hashlib.sha256(raw).hexdigest() != commit.decode().strip():
        report.problems.append(f"{MANIFEST}: is not what was written: its SHA-256 is not the one in {COMMIT}")
    try:
        report.manifest = Manifest.from_json(raw.decode("utf-8"), MANIFEST)
    except (CheckpointError, ValueError, RecursionError) as error:
        text = str(error).removeprefix(f"{MANIFEST} ")
        report.problems.append(f"{MANIFEST}: {text}; nothing else can be checked")


def _read(report: VerifyReport, name: str) -> bytes | None:
    try:
        return (report.path / name).read_bytes()
    except FileNotFoundError:
        report.problems.append(f"{name}: is missing")
    except OSError as error:
        report.problems.append(f"{name}: {error.strerror}")
    return None


# ---- files -----------------------------------------------------------------------------------------------------------


def _check_files(report: VerifyReport, manifest: Manifest) -> None:
    # Only these names are opened: a manifest may say anything.
    expected = {shard_name(rank, manifest.world_size) for rank in range(manifest.world_size)}
    for name in sorted(expected ^ set(manifest.files)):
        wrong = "should be in it" if name in expected else "is no shard of these ranks"
        report.problems.append(f"{MANIFEST}: {name} {wrong}, of {manifest.world_size} ranks")
    for name, info in sorted(manifest.files.items()):
        if not (report.path / name).is_file():
            report.problems.append(f"{name}: is missing, with {_shortened([row.tensor_name for row in info.rows])}")
            continue

        def check(report: VerifyReport, manifest: Manifest, name: str = name, info: ShardInfo = info) -> None:
            _check_bytes(report, name, info)
            _check_header(report, manifest, name, info)

        _guarded(report, check)


def _check_bytes(report: VerifyReport, name: str, info: ShardInfo) -> None:
    """Size, every block's CRC-32, and in the same pass the SHA-256."""
    size = (report.path / name).stat().st_size
    if size != info.bytes:
        report.problems.append(f"{name}: has {size} bytes and should have {info.bytes}")
    if len(info.crc32) != 8 * info.blocks:
        raise ValueError(f"{len(info.crc32)} digits of CRC-32 for {info.blocks} blocks of {name}")
    digest = hashlib.sha256()
    bad: list[tuple[int, int]] = []
    number = 0
    for block in _blocks(report.path / name, info.block_bytes):
        digest.update(block)
        report.bytes += len(block)
        own = block[: max(0, info.bytes - number * info.block_bytes)]  # without what was appended to the file
        if number < info.blocks and zlib.crc32(own) != info.block_crc(number):
            bad.append((number, number + 1))
        number += 1
    if number < info.blocks:
        bad.append((number, info.blocks))
    for first, last in merge(bad):
        report.problems += _lost(name, info, first * info.block_bytes, min(last * info.block_bytes, info.bytes))
    if not bad and info.sha256 is not None and digest.hexdigest() != info.sha256:
        report.problems.append(f"{name}: its SHA-256 is not the manifest's")


def _blocks(path: Path, block_bytes: int) -> Iterator[memoryview]:
    """The file in blocks; the memory is used again."""
    wanted = max(1, READ_BYTES // block_bytes) * block_bytes
    buffer = bytearray(min(wanted, path.stat().st_size + 1))  # a damaged manifest may give any block size
    with open(path, "rb", buffering=0) as file:
        while True:
            filled = 0
            while filled < len(buffer) and (count := file.readinto(memoryview(buffer)[filled:])):
                filled += count
            for start in range(0, filled, block_bytes):
                yield memoryview(buffer)[start : min(start + block_bytes, filled)]
            if filled < len(buffer):
                return


def _lost(name: str, info: ShardInfo, start: int, end: int) -> Iterator[str]:
    """One line for each tensor of which something lies in the damaged bytes, and for the header."""
    where = f"{name}: bytes {start} to {end} are not what was written"
    if start < min((row.offset for row in info.rows), default=info.bytes):
        yield f"{where}: the header"
    for row in sorted(info.rows, key=lambda row: row.offset):
        if row.nbytes and row.offset < end and row.offset + row.nbytes > start:
            size = ITEMSIZE[row.dtype]
            first = row.start + max(0, start - row.offset) // size
            last = row.start + min(row.numel, -(-(end - row.offset) // size))
            yield f"{where}: {row.key} of {row.name!r}, elements {first} to {last}"


def _check_header(report: VerifyReport, manifest: Manifest, name: str, info: ShardInfo) -> None:
    try:
        metadata, tensors = read_header(report.path / name)
    except CheckpointError as error:
        text = str(error).removeprefix(str(report.path / name)).removeprefix(":").strip()
        report.problems.append(f"{name}: {text}")
        return
    save, rank = metadata.get("deepzero_id"), metadata.get("rank")
    if save != manifest.id:
        report.problems.append(f"{name}: is of save {save!r}, and the manifest of save {manifest.id!r}")
    if rank != str(info.rank):
        report.problems.append(f"{name}: is of rank {rank}, and the manifest says rank {info.rank}")
    theirs_by_name = {tensor.name: tensor for tensor in tensors}
    for row in info.rows:
        tensor = theirs_by_name.pop(row.tensor_name, None)
        if tensor is None:
            report.problems.append(f"{name}: its header has no {row.tensor_name!r}")
            continue
        there = (tensor.dtype, tensor.shape, tensor.offset)
        if there != (row.dtype, (row.numel,), row.offset):
            report.problems.append(
                f"{name}: {row.tensor_name!r} is {tensor.dtype} {list(tensor.shape)} at byte {tensor.offset} in its "
                f"header, and {row.dtype} [{row.numel}] at byte {row.offset} in the manifest"
            )
    report.problems += [f"{name}: its header has {other!r}, the manifest has not" for other in theirs_by_name]


def _check_extra(report: VerifyReport, manifest: Manifest) -> None:
    known = {MANIFEST, COMMIT, *manifest.files}
    for path in sorted(report.path.iterdir()):
        if path.name not in known:
            report.problems.append(f"{path.name}: is no file of this checkpoint")


def _check_rows(report: VerifyReport, manifest: Manifest) -> None:
    report.not_stored += [
        name for name, info in manifest.parameters.items() if info.numel and not info.tensors and not info.trained
    ]
    report.problems += [f"{place}: {problem}" for place, problem in row_problems(manifest)]


def _shortened(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
