"""Export: one whole model out of a checkpoint, as safetensors that Hugging Face's libraries load. No process group.

Values of trained parameters are the fp32 masters, rounded once to the wanted dtype. Floating buffers and parameters
that were not trained are converted as well, which is what ``model.to(dtype).save_pretrained(…)`` writes; integers stay.

Memory holds one piece of one parameter (:data:`~deepzero.checkpoint.model_file.PIECE_BYTES`) and a read buffer; every
block that is read is compared with its CRC-32.

Command: ``python -m tools.export``. Source: DeepSpeed's ``zero_to_fp32.py``, which holds the whole model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from deepzero.checkpoint.checkpoint_dir import complete_beside, find, read_manifest
from deepzero.checkpoint.json_codec import TORCH_DTYPES
from deepzero.checkpoint.manifest import BUFFER, MASTER, PARAMETER, CheckpointError, Manifest
from deepzero.checkpoint.model_file import (
    DEFAULT_MAX_SHARD,
    MODEL_FILE,
    ModelWriter,
    TensorPlan,
    convert,
    parse_size,
    wanted_dtype,
)
from deepzero.checkpoint.reader import CheckpointReader, ReadRequest

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


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
    """Write the model of a checkpoint into a folder.

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
