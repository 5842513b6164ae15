"""One whole model as safetensors files that Hugging Face's libraries read: out of a checkpoint, or from an engine.

``model.safetensors``; or, above the maximum size, ``model-00001-of-00003.safetensors`` … and
``model.safetensors.index.json``, which says what is where. Tied weights are stored once; the file's metadata names the
others, as ``safetensors.torch.save_model`` does it: ``{other name: stored name}``.

Values of trained parameters are the fp32 masters, rounded once to the wanted dtype. Floating buffers and parameters
that were not trained are converted as well, which is what ``model.to(dtype).save_pretrained(…)`` writes; integers stay.
Where every byte will lie is known before the first value is asked for, so nothing is collected: memory holds the piece
that is being written (:data:`PIECE_BYTES`), and what is read of a checkpoint is compared with its CRC-32.

**A model appears whole.** Files are written into a hidden folder inside the output folder, flushed, then renamed. The
file that a reader opens first (the index, or the only file) comes last; when an older model is replaced, that file of
it goes first. A reader never sees parts of two models. When anything fails, what was there before is there again.

Commands: ``python -m tools.export``; ``engine.save_16bit_model``. Source: DeepSpeed's ``zero_to_fp32.py``, which holds
the whole model.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch

from deepzero.checkpoint import shard_file
from deepzero.checkpoint.checkpoint_dir import complete_beside, find, read_manifest
from deepzero.checkpoint.engine_state import EngineState
from deepzero.checkpoint.errors import CheckpointError, reason
from deepzero.checkpoint.json_codec import DTYPES, ITEMSIZE, TORCH_DTYPES
from deepzero.checkpoint.manifest import BUFFER, COMMIT, LATEST, MANIFEST, MASTER, PARAMETER, Manifest
from deepzero.checkpoint.reader import CheckpointReader, ReadRequest
from deepzero.checkpoint.shard_file import make_header
from deepzero.comm import process_group
from deepzero.comm.process_group import raise_on_all_ranks
from deepzero.durable import Flushes, flush_folder, flush_parents, write_whole
from deepzero.runtime.zero.partition_parameters import GatheredParameters

MODEL_FILE = "model.safetensors"
INDEX_SUFFIX = ".index.json"
EXPORTING = ".exporting-"
"""Begins the name of the hidden folder; one that was left by a killed process may be removed."""
PIECE_BYTES = 64 << 20
"""A larger tensor is written in pieces of about so many bytes."""
DEFAULT_MAX_SHARD = "5GB"
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class TensorPlan:
    """One tensor of the model that is going to be written."""

    name: str
    dtype: str
    """safetensors' name of it."""
    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()
    """Further names, of tied weights."""

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.numel * ITEMSIZE[self.dtype]

    def fragments(self) -> Iterator[tuple[int, int]]:
        """(first, one past the last) element of each piece, at most :data:`PIECE_BYTES` of fp32 values."""
        step = max(1, PIECE_BYTES // max(4, ITEMSIZE[self.dtype]))
        for start in range(0, self.numel, step):
            yield start, min(start + step, self.numel)


def parse_size(text: str | int) -> int:
    """A number of bytes as Hugging Face writes it: ``"5GB"`` is 5 · 10⁹, ``"5GiB"`` is 5 · 2³⁰.

    Raises:
        CheckpointError: it is not a positive number with one of the units.

    Example:
        >>> parse_size("5GB"), parse_size("1.5 MiB"), parse_size(700)
        (5000000000, 1572864, 700)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    size = int(float(match[1]) * _UNITS[match[2].upper()]) if match and match[2].upper() in _UNITS else 0
    if size < 1:
        raise CheckpointError(f"maximum shard size {text!r} is not a size; write 5GB, 500MB or 2GiB")
    return size


def check_filename(filename: str) -> None:
    """Refuse a name under which no safetensors file should be found.

    Raises:
        CheckpointError: it ends in ``.bin`` or ``.pt``, or is a path.
    """
    if filename.endswith((".bin", ".pt", ".pth")):
        raise CheckpointError(
            f"{filename!r} would be taken for a pickle, and deepzero writes none: a model is saved as safetensors; "
            f"leave the name out ({MODEL_FILE}), or choose one that ends in .safetensors"
        )
    if not filename.endswith(".safetensors") or filename != os.path.basename(filename) or filename.startswith("."):
        raise CheckpointError(f"{filename!r} should be a plain file name that ends in .safetensors, like {MODEL_FILE}")


def divide(plans: Sequence[TensorPlan], max_bytes: int) -> list[list[TensorPlan]]:
    """Tensors by file, in their order; a file is closed before it would be too large. One tensor is never divided.

    Within a file the largest elements come first, so that each tensor begins at a multiple of its element's size.

    Example:
        >>> plans = [TensorPlan(name, "F32", (size,)) for name, size in (("a", 2), ("b", 3), ("c", 9))]
        >>> [[plan.name for plan in file] for file in divide(plans, 20)]
        [['a', 'b'], ['c']]
    """
    files: list[list[TensorPlan]] = [[]]
    filled = 0
    for plan in plans:
        if files[-1] and filled + plan.nbytes > max_bytes:
            files.append([])
            filled = 0
        files[-1].append(plan)
        filled += plan.nbytes
    return [sorted(file, key=lambda plan: -ITEMSIZE[plan.dtype]) for file in files]


class ModelWriter:
    """Writes one model. A context: leaving it by an exception leaves nothing behind.

    Args:
        folder: where the files go; made if it is not there.
        plans: all tensors.
        max_shard_bytes: of one file's tensors.
        filename: of the only file; the others' names are made from it.
        replace: an older model of this name may be replaced.
        extra: further small files by name, such as ``config.json``.

    Raises:
        CheckpointError: when it is entered: a model is there already, the disk is too small, the folder is unfit.
    """

    def __init__(
        self,
        folder: Path,
        plans: Sequence[TensorPlan],
        max_shard_bytes: int,
        filename: str = MODEL_FILE,
        replace: bool = False,
        extra: dict[str, bytes] | None = None,
    ) -> None:
        check_filename(filename)
        self.folder, self.replace, self.extra = folder, replace, extra or {}
        self.files = divide(plans, max_shard_bytes)
        self.total_bytes = sum(plan.nbytes for plan in plans)
        self._stem = filename.removesuffix(".safetensors")
        many = len(self.files) > 1
        self.entry = filename + (INDEX_SUFFIX if many else "")
        """What a reader opens first."""
        self.names = [
            f"{self._stem}-{number:05d}-of-{len(self.files):05d}.safetensors" if many else filename
            for number in range(1, len(self.files) + 1)
        ]
        self._temporary = folder / f"{EXPORTING}{uuid.uuid4().hex[:12]}"
        self._made: list[Path] = []
        self._file: BinaryIO | None = None

    @property
    def order(self) -> list[TensorPlan]:
        """The tensors in the order in which their values have to come."""
        return [plan for file in self.files for plan in file]

    # ---- open --------------------------------------------------------------------------------------------------------

    def __enter__(self) -> ModelWriter:
        try:
            self._open_folder()
        except BaseException as error:
            self._clean()
            if isinstance(error, OSError):
                raise CheckpointError(f"cannot write to {self.folder}: {error.strerror}") from None
            raise
        return self

    def _open_folder(self) -> None:
        if any((self.folder / name).exists() for name in (MANIFEST, COMMIT, LATEST)):
            raise CheckpointError(f"{self.folder} holds checkpoints; choose another folder for the model")
        if self.folder.exists() and not self.folder.is_dir():
            raise CheckpointError(f"{self.folder} is a file; name the folder that the model's files go to")
        there = self._older()
        if there and not self.replace:
            raise CheckpointError(
                f"{self.folder} holds {there[0].name} already, and nothing is overwritten unasked: choose another "
                "folder, or replace it with --force (force=True)"
            )
        missing = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        for path in reversed(missing):
            path.mkdir(exist_ok=True)
            self._made.append(path)
        free = shutil.disk_usage(self.folder).free
        if self.total_bytes > free:
            raise CheckpointError(
                f"{self.folder}: the model needs {self.total_bytes / 1e9:.3f} GB and the disk has {free / 1e9:.3f} GB "
                "left; make room, or choose another folder"
            )
        self._temporary.mkdir()

    def _older(self) -> list[Path]:
        """Files of a model of this name that is there already; what readers open first comes first."""
        first = [f"{self._stem}.safetensors", f"{self._stem}.safetensors{INDEX_SUFFIX}"]
        parts = sorted(self.folder.glob("*.safetensors")) if self.folder.is_dir() else []
        pattern = re.compile(rf"{re.escape(self._stem)}-\d{{5,}}-of-\d{{5,}}\.safetensors")
        names = [*first, *(path.name for path in parts if pattern.fullmatch(path.name)), *self.extra]
        return [self.folder / name for name in names if (self.folder / name).exists()]

    # ---- write -------------------------------------------------------------------------------------------------------

    def write(self, values: Iterator[tuple[TensorPlan, int, torch.Tensor]]) -> None:
        """Write everything, and make it the model of the folder.

        Args:
            values: for each of :attr:`order`, and in it, (tensor, first element, 1-D values of its dtype).

        Raises:
            CheckpointError: the disk fails, or the values are not those that were planned.
        """
        try:
            for name, plans in zip(self.names, self.files, strict=True):
                self._write_file(self._temporary / name, plans, values)
            for name, content in self.extra.items():
                write_whole(self._temporary / name, content)
            if len(self.files) > 1:
                write_whole(self._temporary / self.entry, self._index())
            self._install()
        except OSError as error:
            raise CheckpointError(
                f"{error.filename or self.folder}: {error.strerror}; the model was not written, and what was there "
                "before is untouched"
            ) from None

    def _write_file(
        self, path: Path, plans: Sequence[TensorPlan], values: Iterator[tuple[TensorPlan, int, torch.Tensor]]
    ) -> None:
        metadata = {"format": "pt"} | {alias: plan.name for plan in plans for alias in plan.aliases}
        with open(path, "xb", buffering=shard_file.WRITE_BYTES) as file:
            flushes = Flushes(file)
            header = make_header(((plan.name, plan.dtype, plan.shape) for plan in plans), metadata)
            shard_file.put(file, memoryview(header))
            for plan in plans:
                done = 0
                while done < plan.numel:
                    given, start, fragment = next(values)
                    if (given.name, start, fragment.dtype) != (plan.name, done, TORCH_DTYPES[plan.dtype]):
                        raise CheckpointError(f"{path}: {given.name!r} from {start} came, {plan.name!r} was planned")
                    shard_file.put(file, shard_file.bytes_of(fragment.contiguous()))
                    flushes.wrote(fragment.nbytes)
                    done += fragment.numel()
            flushes.flush()

    def _index(self) -> bytes:
        where = {plan.name: name for name, plans in zip(self.names, self.files, strict=True) for plan in plans}
        content = {"metadata": {"total_size": self.total_bytes}, "weight_map": dict(sorted(where.items()))}
        return json.dumps(content, indent=2).encode() + b"\n"

    # ---- install -----------------------------------------------------------------------------------------------------

    def _install(self) -> None:
        """Out with the old model, in with the new one, entry file last; back again when that fails."""
        aside = self._temporary / "older"
        aside.mkdir()
        moved: list[list[tuple[Path, Path]]] = []
        parts = [name for name in (*self.names, *self.extra) if name != self.entry]
        older = self._older()
        if older == [self.folder / self.entry] and not parts:
            older = []  # one file instead of one file: a single rename, and at any instant one of them is there
        entries = (f"{self._stem}.safetensors", f"{self._stem}.safetensors{INDEX_SUFFIX}")
        stages = [
            [(old, aside / old.name) for old in older if old.name in entries],
            [(old, aside / old.name) for old in older if old.name not in entries]
            + [(self._temporary / name, self.folder / name) for name in parts],
            [(self._temporary / self.entry, self.folder / self.entry)],
        ]
        try:
            for stage in filter(None, stages):
                moved.append([])
                for source, target in stage:
                    source.replace(target)
                    moved[-1].append((source, target))
                flush_folder(self.folder)  # a power cut must not take an earlier stage and leave a later one
            flush_parents(self.folder)
        except BaseException:
            for back in reversed(moved):
                for source, target in reversed(back):
                    target.replace(source)
                flush_folder(self.folder)
            raise
        self._made.clear()
        shutil.rmtree(self._temporary, ignore_errors=True)

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        self._clean()

    def _clean(self) -> None:
        """Whatever is not the finished model."""
        shutil.rmtree(self._temporary, ignore_errors=True)
        while self._made:
            with contextlib.suppress(OSError):  # somebody has put something there
                self._made.pop().rmdir()


def convert(values: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """Values in another floating dtype.

    Args:
        values: 1-D.
        dtype: wanted.
        name: of the parameter, for the message.

    Raises:
        CheckpointError: a finite value is too large for fp16.
    """
    converted = values.to(dtype)
    if dtype is torch.float16 and not torch.equal(torch.isinf(converted), torch.isinf(values)):
        largest = values[torch.isfinite(values)].abs().max().item()
        raise CheckpointError(f"{name!r} has a value of {largest:.6g}, which fp16 cannot hold; export bf16 or fp32")
    return converted


def wanted_dtype(stored: str, dtype: torch.dtype) -> str:
    """In which dtype a tensor is written: floating ones in ``dtype``, others (integers, bool) as they are.

    Example:
        >>> wanted_dtype("F32", torch.bfloat16), wanted_dtype("I64", torch.bfloat16)
        ('BF16', 'I64')
    """
    return DTYPES[dtype] if TORCH_DTYPES[stored].is_floating_point else stored


# ---- out of a checkpoint ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exported:
    """What an export has written."""

    folder: Path
    files: tuple[str, ...]
    tensors: int
    bytes: int
    """Of all tensors."""
    left_out: tuple[str, ...]
    """Parameters that the checkpoint does not hold."""


@dataclass(frozen=True)
class _Source:
    """Where the values of one tensor come from."""

    key: str
    name: str
    """In the checkpoint."""
    plan: TensorPlan


def export(
    checkpoint: str | Path,
    out: str | Path,
    dtype: str = "bf16",
    *,
    tag: str | None = None,
    max_shard_size: str | int = DEFAULT_MAX_SHARD,
    strip_prefix: str = "",
    hf_config: str | Path | None = None,
    force: bool = False,
    partial: bool = False,
) -> Exported:
    """Write the model of a checkpoint into a folder. No process group.

    Args:
        checkpoint: one, or the folder that checkpoints were saved to.
        out: the folder that ``model.safetensors`` goes to.
        dtype: ``bf16``, ``fp16`` or ``fp32``.
        tag: which checkpoint; None: the one that ``latest`` names.
        max_shard_size: of one file, in bytes or as ``"5GB"``.
        strip_prefix: taken from the front of every name, such as ``model.`` of a wrapper.
        hf_config: a ``config.json`` that is copied beside the model.
        force: replace a model that is there.
        partial: allow a checkpoint that was saved without the parameters that are not trained.

    Raises:
        CheckpointError: the checkpoint is damaged, lacks parameters, does not fit the wish; or ``out`` holds a model,
            cannot be written, has no room. Nothing is left behind.
    """
    if dtype not in PRECISIONS:
        raise CheckpointError(f"dtype {dtype!r} is not one of {', '.join(PRECISIONS)}")
    max_bytes = parse_size(max_shard_size)
    with _naming_another(checkpoint, tag):
        path = find(checkpoint, tag)
        manifest = read_manifest(path)
    reader = CheckpointReader(path, manifest)
    sources, left_out = _sources(manifest, reader, PRECISIONS[dtype], strip_prefix)
    if left_out and not partial:
        raise CheckpointError(
            f"{path} was saved without parameters that are not trained ({left_out[0]!r} and {len(left_out) - 1} more); "
            "--partial (partial=True) exports the others"
        )
    by_name = {source.plan.name: source for source in sources}
    extra = {} if hf_config is None else {"config.json": _small_file(Path(hf_config))}
    plans = [source.plan for source in sources]
    with ModelWriter(Path(out), plans, max_bytes, MODEL_FILE, replace=force, extra=extra) as writer:
        writer.write(_values(reader, [by_name[plan.name] for plan in writer.order]))
    return Exported(Path(out), tuple(writer.names), len(plans), writer.total_bytes, tuple(left_out))


@contextlib.contextmanager
def _naming_another(checkpoint: str | Path, tag: str | None) -> Iterator[None]:
    """Damage that is found inside is raised with the newest complete checkpoint beside it."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(error.text, complete_beside(checkpoint, tag)) from None


def _small_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None


def _sources(
    manifest: Manifest, reader: CheckpointReader, dtype: torch.dtype, prefix: str
) -> tuple[list[_Source], list[str]]:
    """Every tensor of the model, parameters first, each in the model's order; and what is not stored."""
    sources, left_out = [], []
    for name, info in manifest.parameters.items():
        key = MASTER if MASTER in info.tensors else PARAMETER
        if info.numel and not reader.has(key, name):
            left_out.append(name)
            continue
        aliases = tuple(_stripped(alias, prefix) for alias in info.aliases)
        plan = TensorPlan(_stripped(name, prefix), wanted_dtype(info.dtype, dtype), info.shape, aliases)
        sources.append(_Source(key, name, plan))
    for name, buffer in manifest.buffers.items():
        plan = TensorPlan(_stripped(name, prefix), wanted_dtype(buffer["dtype"], dtype), tuple(buffer["shape"]))
        sources.append(_Source(BUFFER, name, plan))
    return sources, left_out


def _stripped(name: str, prefix: str) -> str:
    if not name.startswith(prefix) or name == prefix:
        raise CheckpointError(
            f"{name!r} does not begin with {prefix!r}, which --strip-prefix would take from all names"
        )
    return name.removeprefix(prefix)


def _values(reader: CheckpointReader, sources: list[_Source]) -> Iterator[tuple[TensorPlan, int, torch.Tensor]]:
    """The values, piece by piece; the memory of one piece is used again for the next of its size."""
    for source in sources:
        plan, dtype = source.plan, TORCH_DTYPES[source.plan.dtype]
        for start, stop in plan.fragments():
            values = torch.empty(stop - start, dtype=reader.stored_dtype(source.key, source.name))
            with _naming_another(reader.path.parent, reader.path.name):
                reader.read([ReadRequest(source.key, source.name, start, values)])
            yield plan, start, convert(values, dtype, plan.name) if dtype.is_floating_point else values


# ---- from a running engine -------------------------------------------------------------------------------------------


def save_gathered(
    holdings: EngineState, folder: Path, filename: str, with_frozen: bool, max_shard_size: str | int
) -> None:
    """Write the model in the compute dtype. A collective.

    Args:
        holdings: the model state.
        folder: where the files go.
        filename: of the only file; those of several are named after it.
        with_frozen: also parameters that are not trained.
        max_shard_size: of one file.

    Raises:
        CheckpointError: on every rank.
    """
    problem, writer, tensors = None, None, {}
    try:
        tensors = _tensors(holdings, with_frozen)
        plans = [_plan(name, *found, holdings.compute_dtype) for name, found in tensors.items()]
        writer = ModelWriter(folder, plans, parse_size(max_shard_size), filename, replace=True)
    except CheckpointError as error:
        problem = str(error)
    raise_on_all_ranks(problem, CheckpointError)
    mine = (str(folder), filename, max_shard_size, with_frozen)
    first = process_group.broadcast_object(mine)
    other = None if mine == first else f"save_16bit_model{mine}, but rank 0 calls it with {first}; pass the same"
    raise_on_all_ranks(other, CheckpointError)
    if writer is None:
        raise CheckpointError("the model was not planned")
    values = _gathered(writer.order, {name: tensor for name, (tensor, _) in tensors.items()})
    problem = None
    if process_group.rank() == 0:
        try:
            with writer:
                writer.write(_converted(values))
        except Exception as error:  # a full disk, no memory: the others are told below
            problem = reason(error)
    # The other ranks gather and drop; so does rank 0 with what is left after an error. The ranks stay in step.
    for _ in values:
        pass
    raise_on_all_ranks(problem, CheckpointError)


def _tensors(holdings: EngineState, with_frozen: bool) -> dict[str, tuple[torch.Tensor, tuple[str, ...]]]:
    """Parameters, then buffers: by name, the tensor and its other names."""
    trained = holdings.trained()
    found: dict[str, tuple[torch.Tensor, tuple[str, ...]]] = {
        name: (param, tuple(aliases))
        for param, (name, *aliases) in holdings.names().items()
        if with_frozen or name in trained
    }
    return found | {name: (buffer, ()) for name, buffer in holdings.buffers().items()}


def _plan(name: str, tensor: torch.Tensor, aliases: tuple[str, ...], dtype: torch.dtype) -> TensorPlan:
    if tensor.dtype not in DTYPES:
        raise CheckpointError(f"{name!r} is {tensor.dtype}, which cannot be saved")
    return TensorPlan(name, wanted_dtype(DTYPES[tensor.dtype], dtype), tuple(tensor.shape), aliases)


def _gathered(
    plans: list[TensorPlan], tensors: dict[str, torch.Tensor]
) -> Iterator[tuple[TensorPlan, int, torch.Tensor]]:
    """Piece by piece, in the tensors' own dtypes and on their device."""
    for plan in plans:
        tensor = tensors[plan.name]
        with GatheredParameters(tensor if isinstance(tensor, torch.nn.Parameter) else []):
            flat = tensor.detach().reshape(-1)
            for start, stop in plan.fragments():
                yield plan, start, flat[start:stop]


def _converted(
    values: Iterator[tuple[TensorPlan, int, torch.Tensor]],
) -> Iterator[tuple[TensorPlan, int, torch.Tensor]]:
    """On rank 0 only: what it cannot convert must not stop the others' gathering."""
    for plan, start, fragment in values:
        dtype = TORCH_DTYPES[plan.dtype]
        yield plan, start, convert(fragment, dtype, plan.name).cpu() if dtype.is_floating_point else fragment.cpu()
