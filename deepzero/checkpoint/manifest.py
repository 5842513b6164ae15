"""What a checkpoint is: names, shapes, byte ranges and hashes, as plain data. No tensor is touched here.

[Note: a checkpoint on disk]
    ``FOLDER/latest``                     one line: the tag of the newest complete checkpoint;
    ``FOLDER/TAG/rank-00000-of-00004.safetensors`` …  one shard a rank;
    ``FOLDER/TAG/manifest.json``          everything else;
    ``FOLDER/TAG/COMMIT``                 written last: the manifest's SHA-256. Without it there is no checkpoint.

    A shard holds one-dimensional runs of elements. Each *row* of the manifest says which: ``key`` (``master``,
    ``exp_avg``, …), ``name`` of the parameter, ``start`` (of the run within the flattened parameter) and ``numel``, and
    where its bytes begin in the file. Rows of all shards together cover each parameter exactly once. So a reader goes
    **by parameter**, never by shard: what was written by 4 ranks in stage 3 is put together by 3 ranks in stage 1, or
    by a script with numpy, by asking which rows overlap the run that it wants.

    ``master`` is the fp32 value. A parameter in bf16 or fp16 is the master, rounded, and is not stored again; one that
    is not trained has no master and is stored as ``parameter``. Anything that all ranks hold alike is stored once.

    Every shard is cut into *blocks* of ``block_bytes``, each with a CRC-32 in the manifest. A reader needs some byte
    ranges only, and checks exactly the blocks that it reads; ``sha256`` is of the whole file,
    if training waited for the save. The manifest's own hash
    is in ``COMMIT``: so nothing can be changed without being noticed.

The format is described for other programs in ``docs/checkpoints.md``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FORMAT = "deepzero-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
COMMIT = "COMMIT"
LATEST = "latest"

MASTER = "master"
"""fp32 values of a parameter that is trained."""
PARAMETER = "parameter"
"""Values of a parameter that is not trained, in the compute dtype."""
BUFFER = "buffer"
RNG = "rng"
CLIENT = "client"
"""Tensors of the caller's ``client_state``, of a schedule, of anything that is not a parameter's."""
RESERVED = (MASTER, PARAMETER, BUFFER, RNG, CLIENT)
"""Keys that an optimizer's state cannot have."""

MAX_BLOCKS = 4096
MIN_BLOCK_BYTES = 128
HEAD_ALIGN = 4096
"""The data of a shard begins at a multiple of this many bytes."""

ITEMSIZE = {
    "F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2, "U8": 1, "I8": 1, "BOOL": 1,
}  # fmt: skip
"""safetensors' dtypes that occur, and their bytes."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message names the file, and says what to do.

    Args:
        text: the message.
        beside: where a checkpoint is damaged, another one of the same folder that is complete.
    """

    says_it_all = True
    """Frames would tell a user nothing: see ``describe`` of ``launch/rank_process.py``."""

    def __init__(self, text: str, beside: Path | None = None) -> None:
        super().__init__(text)
        self.text, self.beside = text, beside

    def __str__(self) -> str:
        if self.beside is None:
            return self.text
        return f"{self.text}; {said_complete(self.beside)}: load it with tag={self.beside.name!r} from there"


def said_complete(path: Path) -> str:
    """What is known of a checkpoint whose bytes nobody has read, and who reads them."""
    return f"{path} is complete (whether it is whole, `python -m tools.verify` says)"


def reason(error: Exception) -> str:
    """An error in words, for the other ranks."""
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"


def shard_name(rank: int, world_size: int) -> str:
    """The file of one rank."""
    return f"rank-{rank:05d}-of-{world_size:05d}.safetensors"


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
    def tensor_name(self) -> str:
        """Under which safetensors finds it."""
        return f"{self.key}/{self.name}"


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

    def to_json(self) -> str:
        """Valid JSON, with a line for each parameter, buffer, group and file."""
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        lines = [f"{json.dumps(key)}: {_by_lines(value)}" for key, value in content.items()]
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @classmethod
    def from_json(cls, text: str, where: str) -> Manifest:
        """Read a manifest.

        Args:
            text: its JSON.
            where: the file's name, for messages.

        Raises:
            CheckpointError: not a manifest, or one of a newer version.
        """
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
            content["parameters"] = {name: _parameter(value) for name, value in content["parameters"].items()}
            content["files"] = {name: _shard(value) for name, value in content["files"].items()}
            return cls(**content)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{where} is not a whole manifest ({type(error).__name__}: {error})") from None


def _by_lines(value: Any) -> str:
    """JSON of a mapping or a list with a line for each item."""
    if isinstance(value, dict) and any(isinstance(item, (dict, list)) for item in value.values()):
        items = [f" {json.dumps(key)}: {json.dumps(item, allow_nan=False)}" for key, item in value.items()]
        return "{\n" + ",\n".join(items) + "\n}"
    if isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        return "[\n" + ",\n".join(f" {json.dumps(item, allow_nan=False)}" for item in value) + "\n]"
    return json.dumps(value, allow_nan=False)


def _parameter(value: Mapping[str, Any]) -> ParameterInfo:
    return ParameterInfo(**{**value, "shape": tuple(value["shape"]), "aliases": tuple(value["aliases"])})


def _shard(value: Mapping[str, Any]) -> ShardInfo:
    return ShardInfo(**{**value, "rows": tuple(Row(**row) for row in value["rows"])})


def block_bytes_for(total: int) -> int:
    """The block size of a file of ``total`` bytes: a power of two, about :data:`MAX_BLOCKS` blocks.

    Example:
        >>> block_bytes_for(100_000), block_bytes_for(590_000_000)
        (128, 262144)
    """
    size = MIN_BLOCK_BYTES
    while size * MAX_BLOCKS < total:
        size *= 2
    return size
