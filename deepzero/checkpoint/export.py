"""One whole model as safetensors files that Hugging Face's libraries read: out of a checkpoint, or from an engine.

``model.safetensors``; or, above the maximum size, ``model-00001-of-00003.safetensors`` … and
``model.safetensors.index.json``, which says what is where. Tied weights are stored once; the file's metadata names the
others, as ``safetensors.torch.save_model`` does it: ``{other name: stored name}``.

Values of trained parameters are the fp32 masters, rounded once to the wanted dtype. Floating buffers and parameters
that were not trained are converted as well, which is what ``model.to(dtype).save_pretrained(…)`` writes; integers stay.
Where every byte will lie is known before the first value is asked for, so nothing is collected: memory holds the piece
that is being written (:data:`PIECE_BYTES`). What is read of a checkpoint of ours is compared with its CRC-32.

**A model appears whole.** Files are written into a hidden folder inside the output folder, flushed, then renamed. The
file that a reader opens first (the index, or the only file) comes last; when an older model is replaced, that file of
it goes first. One file takes another's place at once. A reader never sees parts of two models. When anything fails,
what was there before is there again.

Commands: ``python -m tools.export``; ``engine.save_16bit_model``. Source: ``zero_to_fp32.py`` in [DeepSpeed], which
holds the whole model.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import shutil
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from deepzero.checkpoint import shard_file
from deepzero.checkpoint.checkpoint_dir import complete_beside, room_for
from deepzero.checkpoint.engine_state import EngineState
from deepzero.checkpoint.errors import CheckpointError, agree_on, naming, own_words, together
from deepzero.checkpoint.json_codec import DTYPES, ITEMSIZE, TORCH_DTYPES
from deepzero.checkpoint.manifest import MARKS, Entry
from deepzero.checkpoint.reader import CheckpointReader, read_own
from deepzero.comm import process_group
from deepzero.durable import Flushes, flush_folder, flush_parents, write_whole
from deepzero.runtime.diagnostics import gathered_in_turn

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
    """One tensor of the model to be written: safetensors' name of its dtype, further names where it is tied."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * ITEMSIZE[self.dtype]

    def pieces(self) -> Iterator[tuple[int, int]]:
        """(first, one past the last) element of each piece, at most :data:`PIECE_BYTES` of fp32 values."""
        step, numel = max(1, PIECE_BYTES // max(4, ITEMSIZE[self.dtype])), math.prod(self.shape)
        return ((start, min(start + step, numel)) for start in range(0, numel, step))


def parse_size(text: str | int) -> int:
    """A number of bytes as Hugging Face writes it: ``"5GB"`` is 5 · 10⁹, ``"5GiB"`` is 5 · 2³⁰.

    Example:
        >>> parse_size("5GB"), parse_size("1.5 MiB"), parse_size(700)
        (5000000000, 1572864, 700)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    size = int(float(match[1]) * _UNITS.get(match[2].upper(), 0)) if match else 0
    if size < 1:
        raise CheckpointError(f"maximum shard size {text!r} is not a size; write 5GB, 500MB or 2GiB")
    return size


def check_filename(filename: str) -> None:
    """Raise a :class:`CheckpointError` for a name under which no safetensors file should be found."""
    if filename.endswith((".bin", ".pt", ".pth")):
        raise CheckpointError(
            f"{filename!r} would be taken for a pickle, and deepzero writes none: a model is saved as safetensors; "
            f"leave the name out ({MODEL_FILE}), or choose one that ends in .safetensors"
        )
    if not filename.endswith(".safetensors") or filename != os.path.basename(filename) or filename.startswith("."):
        raise CheckpointError(f"{filename!r} should be a plain file name that ends in .safetensors, like {MODEL_FILE}")


def divide(plans: Iterable[TensorPlan], max_bytes: int) -> list[list[TensorPlan]]:
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


# ---- writing ---------------------------------------------------------------------------------------------------------


def write_model(
    folder: Path,
    files: Sequence[Sequence[TensorPlan]],
    values: Iterator[torch.Tensor],
    filename: str = MODEL_FILE,
    replace: bool = False,
    extra: dict[str, bytes] | None = None,
) -> tuple[str, ...]:
    """Write one model, and make it the model of the folder; whatever fails leaves nothing behind.

    Args:
        folder: where the files go; made if it is not there.
        files: all tensors, as :func:`divide` gives them.
        values: of each of them, in this order, 1-D :meth:`~TensorPlan.pieces` of its dtype on the CPU.
        filename: of the only file; the others' names, which are returned, are made from it.
        replace: an older model of this name may be replaced.
        extra: further small files by name, such as ``config.json``.
    """
    entry, names = filename, [filename]
    small, total = dict(extra or {}), sum(plan.nbytes for plans in files for plan in plans)
    if len(files) > 1:
        entry = filename + INDEX_SUFFIX
        stem, count = filename.removesuffix(".safetensors"), len(files)
        names = [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        where = {plan.name: name for name, plans in zip(names, files, strict=True) for plan in plans}
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        small[entry] = json.dumps(content, indent=2).encode() + b"\n"
    temporary = folder / f"{EXPORTING}{uuid.uuid4().hex[:12]}"
    made: list[Path] = []
    try:
        with saying(lambda error: f"cannot write to {folder}: {error.strerror}"):
            older = _older(folder, filename, extra or {})
            _check_folder(folder, older, replace)
            for path in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
                path.mkdir(exist_ok=True)
                made.append(path)
            room_for(folder, "the model", total, "choose another folder")
            temporary.mkdir()
        untouched = "the model was not written, and what was there before is untouched"
        with saying(lambda error: f"{error.filename or folder}: {error.strerror}; {untouched}"):
            for name, plans in zip(names, files, strict=True):
                _write_file(temporary / name, plans, values)
            for name, raw in small.items():
                write_whole(temporary / name, raw)
            _install(temporary, older, entry, [name for name in (*names, *small) if name != entry])
        made.clear()
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        for path in reversed(made):
            with contextlib.suppress(OSError):  # somebody has put something there
                path.rmdir()
    return tuple(names)


@contextlib.contextmanager
def saying(words: Callable[[OSError], str]) -> Iterator[None]:
    """What the system says inside is raised as a :class:`CheckpointError` of these words."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(words(error)) from None


def _older(folder: Path, filename: str, extra: Iterable[str]) -> list[Path]:
    """Files of a model of this name that is there already; what readers open first comes first."""
    pattern = re.compile(rf"{re.escape(filename.removesuffix('.safetensors'))}-\d{{5,}}-of-\d{{5,}}\.safetensors")
    parts = sorted(path.name for path in folder.glob("*.safetensors") if pattern.fullmatch(path.name))
    names = (filename, filename + INDEX_SUFFIX, *parts, *extra)
    return [folder / name for name in names if (folder / name).exists()]


def _check_folder(folder: Path, older: list[Path], replace: bool) -> None:
    if any((folder / name).exists() for name in MARKS):
        raise CheckpointError(f"{folder} holds checkpoints; choose another folder for the model")
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; name the folder that the model's files go to")
    if older and not replace:
        instead = "choose another folder, or replace it with --force (force=True)"
        raise CheckpointError(f"{folder} holds {older[0].name} already, and nothing is overwritten unasked: {instead}")


def _write_file(path: Path, plans: Sequence[TensorPlan], values: Iterator[torch.Tensor]) -> None:
    metadata = {"format": "pt"} | {alias: plan.name for plan in plans for alias in plan.aliases}
    with open(path, "xb", buffering=shard_file.WRITE_BYTES) as file:
        flushes = Flushes(file)
        header = shard_file.make_header(((plan.name, plan.dtype, plan.shape) for plan in plans), metadata)
        shard_file.put(file, memoryview(header))
        for plan in plans:
            for first, last in plan.pieces():
                piece = next(values, None)
                if piece is None or piece.nbytes != (last - first) * ITEMSIZE[plan.dtype]:
                    raise AssertionError(f"{plan.name}, elements {first} to {last}: the reader is out of step")
                shard_file.put(file, shard_file.bytes_of(piece.contiguous()))
                flushes.wrote(piece.nbytes)
        flushes.flush()


def _install(temporary: Path, older: list[Path], entry: str, parts: list[str]) -> None:
    """Out with the old model, in with the new one, entry file last; back again when that fails."""
    folder, aside = temporary.parent, temporary / "older"
    aside.mkdir()
    moved: list[list[tuple[Path, Path]]] = []
    if older == [folder / entry] and not parts:
        # One file instead of one file: a single rename, and at any instant one of them is there.
        with contextlib.suppress(OSError):  # where a file system has no links, it goes as others go
            os.link(older[0], aside / entry)
            moved, older = [[(older[0], aside / entry)]], []
    one = entry.removesuffix(INDEX_SUFFIX)
    entries = (one, one + INDEX_SUFFIX)
    stages = [
        [(old, aside / old.name) for old in older if old.name in entries],
        [(old, aside / old.name) for old in older if old.name not in entries]
        + [(temporary / name, folder / name) for name in parts],
        [(temporary / entry, folder / entry)],
    ]
    try:
        for stage in filter(None, stages):
            moved.append([])
            for source, target in stage:
                source.replace(target)
                moved[-1].append((source, target))
            flush_folder(folder)  # a power cut must not take an earlier stage and leave a later one
        flush_parents(folder)
    except BaseException:
        for back in reversed(moved):
            for source, target in reversed(back):
                target.replace(source)
            flush_folder(folder)
        raise


def convert(values: torch.Tensor, plan: TensorPlan) -> torch.Tensor:
    """1-D values in the dtype of the plan, on the CPU; a finite one that is too large for fp16 is refused."""
    converted = values.to(TORCH_DTYPES[plan.dtype])
    if plan.dtype == "F16" and not torch.equal(torch.isinf(converted), torch.isinf(values)):
        largest = values[torch.isfinite(values)].abs().max().item()
        raise CheckpointError(f"{plan.name!r} has a value of {largest:.6g}, which fp16 cannot hold; use bf16 or fp32")
    return converted.cpu()


def _wanted(stored: str, dtype: torch.dtype) -> str:
    """In which dtype a tensor is written: floating ones in ``dtype``, others (integers, bool) as they are."""
    return DTYPES[dtype] if TORCH_DTYPES[stored].is_floating_point else stored


# ---- out of a checkpoint ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exported:
    """What an export has written, and the names of parameters that the checkpoint does not hold."""

    folder: Path
    files: tuple[str, ...]
    tensors: int
    bytes: int
    left_out: tuple[str, ...]


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
    read: Callable[[str | Path, str | None], CheckpointReader] | None = None,
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
        read: opens it; None: it is one of ours.

    Raises:
        CheckpointError: the checkpoint is damaged, lacks parameters, does not fit the wish; or ``out`` holds a model,
            cannot be written, has no room. Nothing is left behind.
    """
    if dtype not in PRECISIONS:
        raise CheckpointError(f"dtype {dtype!r} is not one of {', '.join(PRECISIONS)}")
    max_bytes = parse_size(max_shard_size)
    with naming(lambda: complete_beside(checkpoint, tag)):
        reader = (read or read_own)(checkpoint, tag)
    path = reader.path
    sources: dict[TensorPlan, tuple[str, str]] = {}  # → its key and name in the checkpoint
    left_out = []
    for key, name, stored_as, shape, others in reader.model_tensors():
        if math.prod(shape) and reader.extent(key, name) is None:
            left_out.append(name)
            continue
        short, *aliases = (_stripped(known, strip_prefix) for known in (name, *others))
        sources[TensorPlan(short, _wanted(stored_as, PRECISIONS[dtype]), shape, tuple(aliases))] = key, name
    if left_out and not partial:
        raise CheckpointError(
            f"{path} was saved without parameters that are not trained ({left_out[0]!r} and {len(left_out) - 1} more); "
            "--partial (partial=True) exports the others"
        )
    extra = {}
    if hf_config is not None:
        with saying(lambda error: f"{hf_config}: {error.strerror}"):
            extra["config.json"] = Path(hf_config).read_bytes()
    files = divide(sources, max_bytes)

    def values() -> Iterator[torch.Tensor]:
        for plan in itertools.chain(*files):
            key, name = sources[plan]
            for start, stop in plan.pieces():
                _, stored = reader.extent(key, name) or (0, None)
                piece = torch.empty(stop - start, dtype=stored, device="cpu")
                with naming(lambda: complete_beside(path.parent, path.name)):
                    reader.read([Entry(key, name, start, piece)])
                yield convert(piece, plan)

    folder = Path(os.path.expanduser(out))
    names = write_model(folder, files, values(), MODEL_FILE, force, extra)
    return Exported(folder, names, len(sources), sum(plan.nbytes for plan in sources), tuple(left_out))


def _stripped(name: str, prefix: str) -> str:
    if not name.startswith(prefix) or name == prefix:
        raise CheckpointError(
            f"{name!r} does not begin with {prefix!r}, which --strip-prefix would take from all names"
        )
    return name.removeprefix(prefix)


# ---- from a running engine -------------------------------------------------------------------------------------------


def save_gathered(
    holdings: EngineState, folder: Path, filename: str, with_frozen: bool, max_shard_size: str | int
) -> None:
    """Write the model in the compute dtype, ``with_frozen`` also what is not trained. All ranks do, or all raise."""
    with together(own_words):
        check_filename(filename)
        tensors: dict[TensorPlan, torch.Tensor] = {}
        trained = holdings.trained()
        found: list[tuple[torch.Tensor, list[str]]]
        found = [(p, names) for p, names in holdings.names().items() if with_frozen or names[0] in trained]
        found += [(buffer, names) for _, _, buffer, names in holdings.named_buffers()]
        for tensor, (name, *aliases) in found:
            if tensor.dtype not in DTYPES:
                raise CheckpointError(f"{name!r} is {tensor.dtype}, which cannot be saved")
            dtype = _wanted(DTYPES[tensor.dtype], holdings.compute_dtype)
            tensors[TensorPlan(name, dtype, tuple(tensor.shape), tuple(aliases))] = tensor
        files = divide(tensors, parse_size(max_shard_size))
    agree_on("save_16bit_model", {
        "save_dir": str(folder), "save_filename": filename, "exclude_frozen_parameters": not with_frozen,
        "max_shard_size": max_shard_size,
    })  # fmt: skip

    def gathered() -> Iterator[tuple[TensorPlan, torch.Tensor]]:
        """Piece by piece, in the tensors' own dtypes and on their device."""
        plans = list(itertools.chain(*files))
        for tensor, plan in zip(gathered_in_turn(tensors[plan] for plan in plans), plans, strict=True):
            flat = tensor.detach().reshape(-1)
            for start, stop in plan.pieces():
                yield plan, flat[start:stop]

    pieces = gathered()
    with together():
        try:
            if process_group.rank() == 0:  # what it cannot convert must not stop the others' gathering
                write_model(folder, files, (convert(piece, plan) for plan, piece in pieces), filename, replace=True)
        except Exception:
            deque(pieces, maxlen=0)
            raise
        # The other ranks gather and drop; so does rank 0 with what is left after an error. The ranks stay in step.
        deque(pieces, maxlen=0)
