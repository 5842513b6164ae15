"""Whether a manifest makes sense: types, ranges, and rows that hold everything exactly once.

``COMMIT`` shows that a manifest is what was written, and is no signature: who edits a manifest can write a new hash.
So nothing in it is trusted to be a number, a place in a file or the name of one before it was looked at; a manifest
that makes no sense is refused before anything is loaded.

What makes sense and is not true cannot be noticed: another learning rate or step number, the places of two rows of the
same length exchanged, names of two parameters of the same shape exchanged, data changed together with its CRC-32.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from deepzero.checkpoint.json_codec import decode, tensor_names
from deepzero.checkpoint.manifest import BUFFER, CLIENT, ITEMSIZE, RNG, CheckpointError, Manifest, Row, ShardInfo

RNG_NUMBERS = ("python_version", "python_gauss", "numpy_kind", "numpy_position", "numpy_has_gauss", "numpy_gauss")
COUNTERS = ("global_steps", "skipped_steps", "global_samples")
BATCH = ("global_batch", "micro_batch", "accumulation")


class _InvalidManifest(Exception):
    """What makes no sense."""


def check_sound(manifest: Manifest, where: str) -> None:
    """Refuse a manifest that makes no sense.

    Args:
        manifest: as it was read.
        where: the file's name, for messages.

    Raises:
        CheckpointError: with the first thing that was found.
    """
    try:
        _numbers(manifest)
        for name, info in manifest.files.items():
            _file(name, info, manifest.world_size)
        _need(len(manifest.files) == manifest.world_size, f"'files' has {len(manifest.files)} of its files")
        _need(len({info.rank for info in manifest.files.values()}) == manifest.world_size, "two files of one rank")
        extents = _extents(row for info in manifest.files.values() for row in info.rows)
        _stored_tensors(manifest, extents)
        _values(manifest, extents)
    except _InvalidManifest as error:
        raise CheckpointError(f"{where} makes no sense: {error}") from None
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        # A list where a mapping should be, a key that is missing: whatever was edited, it is said as this.
        raise CheckpointError(f"{where} makes no sense ({type(error).__name__}: {error})") from None


def _need(condition: bool, what: str) -> None:
    if not condition:
        raise _InvalidManifest(what)


def _count(value: Any, what: str, least: int = 0) -> int:
    _need(type(value) is int and least <= value < 2**62, f"{what} is {value!r}")
    return int(value)


def _numbers(manifest: Manifest) -> None:
    _count(manifest.world_size, "'world_size'", 1)
    _count(manifest.zero_stage, "'zero_stage'")
    for key in ("id", "tag", "written", "precision"):
        _need(isinstance(getattr(manifest, key), str), f"{key!r} is {getattr(manifest, key)!r}")
    for key in COUNTERS:
        _count(manifest.counters[key], f"'counters', {key!r}")
    for key in BATCH:
        _count(manifest.batch[key], f"'batch', {key!r}", 1)
    for key in ("versions", "config", "loss_scaler"):
        _need(isinstance(getattr(manifest, key), dict), f"{key!r} is {getattr(manifest, key)!r}")
    _need(len(manifest.rng_numbers) == manifest.world_size, f"'rng_numbers' is of {len(manifest.rng_numbers)} ranks")
    for rank, numbers in enumerate(manifest.rng_numbers):
        _need(set(RNG_NUMBERS) <= set(numbers), f"'rng_numbers' of rank {rank} has the keys {sorted(numbers)}")


def _file(name: str, info: ShardInfo, world_size: int) -> None:
    _need(re.fullmatch(r"[^./\\\0][^/\\\0]*", name) is not None, f"{name!r} is no name of a file")
    _need(_count(info.rank, f"the rank of {name}") < world_size, f"{name} is of rank {info.rank}")
    _count(info.bytes, f"'bytes' of {name}")
    _count(info.block_bytes, f"'block_bytes' of {name}", 1)
    _need(
        info.sha256 is None or re.fullmatch(r"[0-9a-f]{64}", str(info.sha256)) is not None,
        f"'sha256' of {name} is {info.sha256!r}",
    )
    crcs = re.fullmatch(r"[0-9a-f]*", info.crc32) is not None and len(info.crc32) == 8 * info.blocks
    _need(crcs, f"'crc32' of {name} is not eight hexadecimal digits for each of {info.blocks} blocks")
    for row in info.rows:
        label = f"the row {row.key}/{row.name} of {name}"
        _need(isinstance(row.key, str) and isinstance(row.name, str), f"{label} has no name")
        _need(row.dtype in ITEMSIZE, f"{label} has dtype {row.dtype!r}")
        for key in ("start", "numel", "offset"):
            _count(getattr(row, key), f"{key!r} of {label}")
    # A shard has no holes: so a row of another place or length is noticed, if only one was changed.
    rows = sorted(info.rows, key=lambda row: (row.offset, row.nbytes))
    for row, following in zip(rows, [*(row.offset for row in rows[1:]), info.bytes], strict=True):
        end = row.offset + row.nbytes
        label = f"the row {row.key}/{row.name} of {name}"
        _need(end == following, f"{label} ends at byte {end}, and what follows begins at {following}")


def _extents(rows: Iterable[Row]) -> dict[tuple[str, str], tuple[int, str]]:
    """Elements and dtype of everything that is stored, by key and name; each element exactly once."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row.key, row.name), []).append(row)
    extents = {}
    for (key, name), parts in found.items():
        cursor = 0
        for row in sorted(parts, key=lambda row: (row.start, row.numel)):
            _need(row.start == cursor, f"element {min(cursor, row.start)} of {key}/{name} is not there exactly once")
            _need(row.dtype == parts[0].dtype, f"{key}/{name} has dtypes {parts[0].dtype} and {row.dtype}")
            cursor += row.numel
        extents[key, name] = cursor, parts[0].dtype
    return extents


def _shape(shape: Any, what: str) -> int:
    """Elements of a shape."""
    _need(isinstance(shape, (list, tuple)), f"the shape of {what} is {shape!r}")
    return math.prod(_count(extent, f"an extent of {what}") for extent in shape)


def _stored_tensors(manifest: Manifest, extents: Mapping[tuple[str, str], tuple[int, str]]) -> None:
    """The rows are of the parameters and buffers that the manifest names, and all there."""
    names = [known for name, info in manifest.parameters.items() for known in (name, *info.aliases)]
    _need(len(set(names)) == len(names), "two parameters have one name")
    expected = {}
    for name, info in manifest.parameters.items():
        numel = _shape(info.shape, f"parameter {name!r}")
        _need(info.dtype in ITEMSIZE, f"parameter {name!r} has dtype {info.dtype!r}")
        _need(type(info.trained) is bool, f"'trained' of parameter {name!r} is {info.trained!r}")
        expected.update({(key, name): (numel, dtype) for key, dtype in info.tensors.items()})
        for key, encoded in info.state.items():
            _number(encoded, f"{key!r} of parameter {name!r}")
    for name, buffer in manifest.buffers.items():
        numel = _shape(buffer["shape"], f"buffer {name!r}")
        if numel:
            expected[BUFFER, name] = numel, buffer["dtype"]
    here = {}
    for (key, name), extent in extents.items():
        if key.startswith(f"{BUFFER}-of-rank-"):
            _need(extent == expected.get((BUFFER, name)), f"{key}/{name} is not of the extent of the buffer")
        elif key not in (RNG, CLIENT):
            here[key, name] = extent
    for place in {**expected, **here}:
        label = "/".join(place)
        there, wanted = here.get(place), expected.get(place)
        _need(there == wanted, f"{label} is {wanted or 'nothing'} by its name and {there or 'nothing'} by its rows")


def _number(encoded: Any, what: str) -> None:
    """State that the optimizer keeps for a parameter as a whole."""
    if isinstance(encoded, dict) and "dtype" in encoded:
        _need(encoded["dtype"] in ITEMSIZE, f"{what} has dtype {encoded['dtype']!r}")
        _need(_shape(encoded["shape"], what) == 1, f"{what} has shape {encoded['shape']}")
        encoded = encoded["value"]
        value = decode(encoded, {})
        _need(isinstance(value, (bool, int, float)), f"{what} is {value!r}")
    decode(encoded, {})


class _AnyTensor:
    """Stands for a tensor in a value that is decoded for a trial."""

    def reshape(self, _: Any) -> _AnyTensor:
        return self

    def numpy(self) -> _AnyTensor:
        return self


def _values(manifest: Manifest, extents: Mapping[tuple[str, str], tuple[int, str]]) -> None:
    """Client state, schedule and the optimizer's settings are values that can be read."""
    _decodes(manifest.client_state, "'client_state'", extents)
    optimizer, schedule = manifest.optimizer, manifest.lr_scheduler
    _need(isinstance(optimizer["class"], str), f"the optimizer's class is {optimizer['class']!r}")
    for number, group in enumerate(optimizer["groups"]):
        for key, encoded in group.items():
            _decodes(encoded, f"{key!r} of optimizer group {number}", {})
    if schedule is not None:
        _need(isinstance(schedule["class"], str), f"the schedule's class is {schedule['class']!r}")
        _decodes(schedule["state"], "'lr_scheduler'", extents)


def _decodes(encoded: Any, what: str, extents: Mapping[tuple[str, str], tuple[int, str]]) -> None:
    names = tensor_names(encoded)
    for name, shape in names.items():
        _need((CLIENT, name) in extents, f"{what} refers to {CLIENT}/{name}, which no row holds")
        numel = _shape(shape, f"{CLIENT}/{name}")
        _need(
            numel == extents[CLIENT, name][0],
            f"{CLIENT}/{name} has shape {shape} and {extents[CLIENT, name][0]} elements",
        )
    stand_ins: dict[str, Any] = {name: _AnyTensor() for name in names}
    decode(encoded, stand_ins)
