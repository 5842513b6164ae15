"""What a checkpoint is: names, shapes, byte ranges and hashes, as plain data; and whether a manifest makes sense.

[Note: a checkpoint on disk]
    ``FOLDER/latest``                     one line: the tag of the newest complete checkpoint;
    ``FOLDER/TAG/rank-00000-of-00004.safetensors`` …  one shard a rank;
    ``FOLDER/TAG/manifest.json``          everything else;
    ``FOLDER/TAG/COMMIT``                 written last: the manifest's SHA-256. Without it there is no checkpoint.

    A shard holds one-dimensional runs of elements. Each *row* of the manifest says which: ``key`` (``master``,
    ``exp_avg``, …), ``name`` of the parameter, ``start`` (of the run within the flattened parameter) and ``numel``, and
    where its bytes begin in the file. Rows of all shards together cover each parameter exactly once. So a reader goes
    **by parameter**, never by shard: what 4 ranks wrote in stage 3 is put together by 3 ranks in stage 1, or by a
    script with numpy, by asking which rows overlap the run that it wants.

    ``master`` is the fp32 value. A parameter in bf16 or fp16 is the master, rounded, and is not stored again; one that
    is not trained has no master and is stored as ``parameter``. Anything that all ranks hold alike is stored once.

    Every shard is cut into *blocks*, each with a CRC-32 in the manifest; a reader checks exactly those that it reads.
    ``sha256`` is of the whole file, if training waited for the save.

[Note: what is believed of a manifest]
    ``COMMIT`` shows that a manifest is what was written, and is no signature: who edits one can write a new hash. So
    nothing in it is trusted to be a number, a place in a file or the name of one before :func:`check_sound` has
    looked at it; a manifest that makes no sense is refused before anything is loaded. What makes sense and is not true
    cannot be noticed: another learning rate or step number, two rows of the same length or two names of the same shape
    exchanged, data changed together with its CRC-32.

The format is described for other programs in ``docs/checkpoints.md``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Any

import torch

from deepzero.checkpoint.errors import CheckpointError
from deepzero.checkpoint.json_codec import ITEMSIZE, decode, tensor_names

FORMAT, VERSION = "deepzero-checkpoint", 1
MANIFEST, COMMIT, LATEST = MARKS = "manifest.json", "COMMIT", "latest"
"""One of these shows that a folder is a checkpoint, or holds some."""

MASTER = "master"
"""fp32 values of a parameter that is trained."""
PARAMETER = "parameter"
"""Values of a parameter that is not trained, in its own dtype."""
BUFFER = "buffer"
RNG = "rng"
CLIENT = "client"
"""Tensors of the caller's ``client_state``, of a schedule, of anything that is not a parameter's."""
RESERVED = (MASTER, PARAMETER, BUFFER, RNG, CLIENT)
"""Keys that an optimizer's state cannot have."""
_BUFFER_OF_RANK = f"{BUFFER}-of-rank-"

MAX_BLOCKS, MIN_BLOCK_BYTES = 4096, 128
HEAD_ALIGN = 4096
"""The data of a shard begins at a multiple of this many bytes."""

COUNTERS = ("global_steps", "skipped_steps", "global_samples")
BATCH = ("global_batch", "micro_batch", "accumulation")
RNG_NUMBERS = {"python_version", "python_gauss", "numpy_kind", "numpy_position", "numpy_has_gauss", "numpy_gauss"}


def shard_name(rank: int, world_size: int) -> str:
    """The file of one rank."""
    return f"rank-{rank:05d}-of-{world_size:05d}.safetensors"


def buffer_key(rank: int) -> str:
    """The key of a buffer that is another on ``rank`` than on rank 0."""
    return f"{_BUFFER_OF_RANK}{rank}"


def is_own_buffer(key: Any) -> bool:
    """Whether a key is one of :func:`buffer_key`."""
    return str(key).startswith(_BUFFER_OF_RANK)


@dataclass(frozen=True)
class Row:
    """A run of elements in a shard."""

    key: str
    name: str
    dtype: str
    start: int
    """First element, within the flattened tensor."""
    numel: int
    offset: int
    """Of its first byte in the file."""

    @property
    def nbytes(self) -> int:
        """Bytes of the run."""
        return self.numel * ITEMSIZE[self.dtype]

    @property
    def end(self) -> int:
        """One past its last byte in the file."""
        return self.offset + self.nbytes

    @property
    def tensor_name(self) -> str:
        """Under which safetensors finds it."""
        return f"{self.key}/{self.name}"


@dataclass(frozen=True)
class Entry:
    """A run of elements on its way into a shard, or out of one.

    In the tensor that is stored under ``key`` and ``name`` it begins at ``start``. Here it is 1-D and contiguous; what
    is read is converted to its dtype.
    """

    key: str
    name: str
    start: int
    tensor: torch.Tensor


@dataclass(frozen=True)
class ShardInfo:
    """One file of a checkpoint."""

    rank: int
    bytes: int
    sha256: str | None
    """None for an asynchronous save, where it would cost training more than all the rest; the CRC-32s are there, and
    the SHA-256 of the manifest that holds them is in ``COMMIT``."""
    block_bytes: int
    crc32: str
    """Eight hexadecimal digits for each block, in order."""
    rows: tuple[Row, ...]

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> ShardInfo:
        """The inverse of :func:`dataclasses.asdict`."""
        return cls(**{**content, "rows": tuple(Row(**row) for row in content["rows"])})

    def block_crc(self, block: int) -> int:
        """The CRC-32 that block number ``block`` should have."""
        return int(self.crc32[8 * block : 8 * block + 8], 16)

    @property
    def blocks(self) -> int:
        """How many there are."""
        return -(-self.bytes // self.block_bytes)


@dataclass(frozen=True)
class ParameterInfo:
    """One parameter, whole."""

    shape: tuple[int, ...]
    dtype: str
    """safetensors' name of the dtype that the model computes in."""
    trained: bool
    optimizer_group: int | None
    aliases: tuple[str, ...] = ()
    """Other names of the same parameter (tied weights)."""
    tensors: dict[str, str] = field(default_factory=dict)
    """What is stored of it: key → dtype."""
    state: dict[str, Any] = field(default_factory=dict)
    """What the optimizer keeps for the parameter as a whole, such as ``step``; see ``json_codec.py``."""

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def values_key(self) -> str:
        """Under which its values are stored: the master where there is one."""
        return MASTER if MASTER in self.tensors else PARAMETER


@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint but the elements."""

    id: str
    """Of this save; every shard carries it."""
    tag: str
    written: str
    """UTC, ISO 8601."""
    versions: dict[str, str]
    world_size: int
    zero_stage: int
    precision: str
    batch: dict[str, int]
    counters: dict[str, int]
    parameters: dict[str, ParameterInfo]
    buffers: dict[str, dict[str, Any]]
    layout: list[dict[str, Any]]
    """Of each group: the parameters' names and where they lie. For those who want to know; reading needs only rows."""
    optimizer: dict[str, Any]
    lr_scheduler: dict[str, Any] | None
    loss_scaler: dict[str, Any]
    client_state: Any
    rng_numbers: list[dict[str, Any]]
    """Of each rank: what of its generators' state is no tensor."""
    config: dict[str, Any]
    files: dict[str, ShardInfo]

    def other_micro_batch(self, micro_batch: int) -> str:
        """What is said where a run goes on with micro-batches of this size, if gradients are rounded otherwise then."""
        was = self.batch.get("micro_batch", micro_batch)  # DeepSpeed's checkpoints do not say
        if was == micro_batch:
            return ""
        count = self.batch["global_batch"] // was
        return f"the checkpoint's steps had {count} micro-batches of {was} sequences, this run's are of {micro_batch}"

    def to_json(self) -> str:
        """Valid JSON, with a line for each parameter, buffer, group and file."""
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        return "{\n" + ",\n".join(f"{json.dumps(key)}: {_by_lines(value)}" for key, value in content.items()) + "\n}\n"

    @classmethod
    def from_json(cls, text: str | bytes, where: str) -> Manifest:
        """Read the JSON of a manifest; a CheckpointError, with its file's name ``where``, if it is none of ours."""
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{where} is not JSON ({error}); the checkpoint is damaged") from None
        if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
            raise CheckpointError(f"{where} is no manifest of a deepzero checkpoint (its 'format' is not {FORMAT!r})")
        version, writers = content.pop("version", None), content.get("versions")
        if version != VERSION:
            writer = writers.get("deepzero", "unknown") if isinstance(writers, dict) else "unknown"
            raise CheckpointError(
                f"{where} has version {version!r}, and this deepzero reads version {VERSION}; load it with the one "
                f"that wrote it ({writer}) or a newer one"
            )
        try:
            content["parameters"] = {
                name: ParameterInfo(**{**value, "shape": tuple(value["shape"]), "aliases": tuple(value["aliases"])})
                for name, value in content["parameters"].items()
            }
            content["files"] = {name: ShardInfo.from_dict(value) for name, value in content["files"].items()}
            return cls(**content)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{where} is not a whole manifest ({type(error).__name__}: {error})") from None


def _pythons(value: Any) -> Any:
    """A config may hold numbers of numpy's or torch's, which are written as Python's."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"object of type {type(value).__name__} is not JSON serializable")


_json = partial(json.dumps, allow_nan=False, default=_pythons)


def _by_lines(value: Any) -> str:
    """JSON of a mapping or a list with a line for each item."""
    items = value.values() if isinstance(value, dict) else value
    if not isinstance(value, (dict, list)) or not any(isinstance(item, (dict, list)) for item in items):
        return _json(value)
    texts = [_json(item) for item in items]
    if isinstance(value, list):
        return "[\n " + ",\n ".join(texts) + "\n]"
    return "{\n " + ",\n ".join(f"{json.dumps(key)}: {text}" for key, text in zip(value, texts, strict=True)) + "\n}"


def block_bytes_for(total: int) -> int:
    """The block size of a file of ``total`` bytes: a power of two, about :data:`MAX_BLOCKS` blocks.

    Example:
        >>> block_bytes_for(100_000), block_bytes_for(590_000_000)
        (128, 262144)
    """
    return max(MIN_BLOCK_BYTES, 1 << (-(-total // MAX_BLOCKS) - 1).bit_length())


# ---- whether it makes sense ------------------------------------------------------------------------------------------


class InvalidManifest(ValueError):
    """What makes no sense."""


def check_sound(manifest: Manifest, where: str) -> None:
    """Refuse a manifest, of a file called ``where``, by a CheckpointError with the first thing that makes no sense."""
    try:
        _check_fields(manifest, "it")
        for name, info in manifest.files.items():
            _check_file(name, info, manifest.world_size)
        ranks = {info.rank for info in manifest.files.values()}
        files, world = len(manifest.files), manifest.world_size
        _need(len(ranks) == files == world, f"'files' has {files} files of {len(ranks)} ranks, and there are {world}")
        _check_parameters(manifest)
        for place, problem in row_problems(manifest):
            raise InvalidManifest(f"{place}: {problem}")
        _check_values(manifest)
    except InvalidManifest as error:
        raise CheckpointError(f"{where} makes no sense: {error}") from None
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        # A list where a mapping should be, a key that is missing: whatever was edited, it is said as this.
        raise CheckpointError(f"{where} makes no sense ({type(error).__name__}: {error})") from None


def row_problems(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Whether the rows of all shards together are each thing that should be there, each element once.

    Yields the file and what is wrong, for every gap, overlap, wrong dtype, and tensor that is missing or too many.
    """
    rows: dict[tuple[str, str], list[tuple[Row, str]]] = {}
    for file, info in manifest.files.items():
        for row in info.rows:
            rows.setdefault((row.key, row.name), []).append((row, file))
    expected: dict[tuple[str, str], tuple[int, str | None]] = {}  # → elements and dtype that the manifest promises
    for name, param in manifest.parameters.items():
        numel = _numel_of(param.shape, f"parameter {name!r}")
        if numel and (param.trained or param.tensors) and (MASTER if param.trained else PARAMETER) not in param.tensors:
            yield MANIFEST, f"parameter {name!r} has no values"
        expected.update({(key, name): (numel, dtype) for key, dtype in param.tensors.items()})
    for name, buffer in manifest.buffers.items():
        expected[BUFFER, name] = _numel_of(buffer["shape"], f"buffer {name!r}"), buffer["dtype"]
        aliases = buffer.get("aliases", [])  # of a module that is used under several names
        _need(isinstance(aliases, list) and all(isinstance(alias, str) for alias in aliases), f"{name!r}: {aliases!r}")
    schedule = manifest.lr_scheduler["state"] if manifest.lr_scheduler else None
    states = [info.state for info in manifest.parameters.values()]
    for name, shape in tensor_names([manifest.client_state, schedule, states]).items():
        expected[CLIENT, name] = _numel_of(shape, f"{CLIENT}/{name}"), None
    for (key, name), promised in expected.items():
        yield from _covered(rows.pop((key, name), []), f"{key} of {name!r}", *promised)
    for (key, name), found in rows.items():
        if is_own_buffer(key) and (BUFFER, name) in expected:
            yield from _covered(found, f"{key} of {name!r}", *expected[BUFFER, name])
        elif key == RNG:
            yield from _covered(found, f"{key} of {name!r}", sum(row.numel for row, _ in found), None)
        else:
            yield found[0][1], f"holds {key} of {name!r}, which the manifest does not know"


def _covered(found: list[tuple[Row, str]], what: str, numel: int, dtype: str | None) -> Iterator[tuple[str, str]]:
    """What is wrong with the rows of one tensor; ``dtype`` None: they only have to be alike."""
    cursor = 0
    dtype = found[0][0].dtype if dtype is None and found else dtype
    for row, file in sorted(found, key=lambda item: (item[0].start, item[0].numel)):
        stop = row.start + row.numel
        if row.start > cursor:
            yield MANIFEST, f"no shard has elements {cursor} to {row.start} of {what}"
        elif row.start < cursor and row.numel:
            yield file, f"elements {row.start} to {min(cursor, stop)} of {what} are stored twice"
        if stop > numel:
            yield file, f"{what} has elements up to {stop}, and should have {numel}"
        if row.dtype != dtype:
            yield file, f"{what} is {row.dtype}, and should be {dtype}"
        cursor = max(cursor, stop)
    if cursor < numel:
        yield MANIFEST, f"no shard has elements {cursor} to {numel} of {what}"


def _need(condition: bool, what: str) -> None:
    if not condition:
        raise InvalidManifest(what)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**62


def _numel_of(shape: Any, what: str) -> int:
    _need(isinstance(shape, (list, tuple)) and all(map(_is_count, shape)), f"the shape of {what} is {shape!r}")
    return math.prod(shape)


def _check_fields(thing: Manifest | ParameterInfo | ShardInfo | Row, what: str) -> None:
    """Every field is what its annotation says; numbers are not negative, and some are not 0."""
    kinds = {kind.__name__: kind for kind in (bool, str, dict, list, tuple)}
    for entry in fields(thing):
        value, kind = getattr(thing, entry.name), str(entry.type).partition("[")[0]
        good = _is_count(value) if kind == "int" else isinstance(value, kinds.get(kind, object))
        good = good or (value is None and str(entry.type).endswith("None"))
        good = good and (value != 0 or entry.name not in ("world_size", "block_bytes"))
        _need(good, f"{entry.name!r} of {what} is {value!r}")


def _check_file(name: str, info: ShardInfo, world_size: int) -> None:
    _need(re.fullmatch(r"[^./\\\0][^/\\\0]*", name) is not None, f"{name!r} is no name of a file")
    _check_fields(info, name)
    _need(info.rank < world_size, f"{name} is of rank {info.rank}")
    sha256 = info.sha256 is None or re.fullmatch(r"[0-9a-f]{64}", str(info.sha256)) is not None
    _need(sha256, f"'sha256' of {name} is {info.sha256!r}")
    crcs = re.fullmatch(r"[0-9a-f]*", info.crc32) is not None and len(info.crc32) == 8 * info.blocks
    _need(crcs, f"'crc32' of {name} is not eight hexadecimal digits for each of {info.blocks} blocks")
    for row in info.rows:
        _check_fields(row, f"the row {row.key}/{row.name} of {name}")
        _need(row.dtype in ITEMSIZE, f"the row {row.tensor_name} of {name} has dtype {row.dtype!r}")
    # A shard has no holes: so a row of another place or length is noticed, if only one was changed.
    rows = sorted(info.rows, key=lambda row: (row.offset, row.nbytes))
    for row, following in zip(rows, [*(row.offset for row in rows[1:]), info.bytes], strict=True):
        label = f"the row {row.tensor_name} of {name}"
        _need(row.end == following, f"{label} ends at byte {row.end}, and what follows begins at {following}")


def _check_parameters(manifest: Manifest) -> None:
    names = [known for name, info in manifest.parameters.items() for known in (name, *info.aliases)]
    _need(len(set(names)) == len(names), "two parameters have one name")
    for name, info in manifest.parameters.items():
        _check_fields(info, f"parameter {name!r}")
        _need(info.dtype in ITEMSIZE, f"parameter {name!r} has dtype {info.dtype!r}")
        for key, encoded in info.state.items():
            _check_scalar(encoded, f"{key!r} of parameter {name!r}")


def _check_scalar(encoded: Any, what: str) -> None:
    value = encoded
    if isinstance(encoded, dict) and "dtype" in encoded:
        _need(encoded["dtype"] in ITEMSIZE, f"{what} has dtype {encoded['dtype']!r}")
        _need(_numel_of(encoded["shape"], what) == 1, f"{what} has shape {encoded['shape']}")
        value = encoded["value"]
    number = decode(value, _ANY_TENSORS)
    _need(value is encoded or isinstance(number, (bool, int, float)), f"{what} is {number!r}")


def _check_values(manifest: Manifest) -> None:
    """Counters are numbers; client state, schedule and the optimizer's settings can be read."""
    counts = {key: manifest.counters[key] for key in COUNTERS} | {key: manifest.batch[key] for key in BATCH}
    for key, value in counts.items():
        _need(_is_count(value) and (value > 0 or key in COUNTERS), f"{key!r} is {value!r}")
    _need(len(manifest.rng_numbers) == manifest.world_size, f"'rng_numbers' is of {len(manifest.rng_numbers)} ranks")
    for rank, numbers in enumerate(manifest.rng_numbers):
        _need(set(numbers) >= RNG_NUMBERS, f"'rng_numbers' of rank {rank} has the keys {sorted(numbers)}")
    for what, kept in (("optimizer", manifest.optimizer), ("schedule", manifest.lr_scheduler)):
        _need(kept is None or isinstance(kept["class"], str), f"the {what}'s class is {kept and kept['class']!r}")
    for group in (*manifest.optimizer["groups"], {"own": manifest.optimizer.get("own")}):
        for key, encoded in group.items():
            decode(encoded, {})
            if key in manifest.optimizer.get("from_steps", ()):
                _check_scalar(encoded, f"{key!r} of a group of the optimizer")
    for encoded in (manifest.client_state, manifest.lr_scheduler and manifest.lr_scheduler["state"]):
        decode(encoded, _ANY_TENSORS)


class _AnyTensor:
    """Stands for all tensors of a value that is decoded for a trial: nothing is allocated by a number in a manifest."""

    def reshape(self, *_: Any) -> _AnyTensor:
        return self

    numpy = __getitem__ = reshape


_ANY_TENSORS: Any = _AnyTensor()
