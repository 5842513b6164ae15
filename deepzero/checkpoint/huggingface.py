"""Weights from elsewhere: plain safetensors, as Hugging Face writes them, seen as a checkpoint. Nothing is copied.

The files' headers say where each tensor lies; from them a :class:`Manifest` is made whose rows are those tensors, under
the names that this model has for them. Loading then goes its usual way, by ranges of elements, in every stage.

Names fit as they are, or all of them but for one prefix, which either side may have (``model.`` of a wrapper,
``transformer.`` that the hub's GPT-2 lacks). Of tied weights the files may hold one name, or several with the same
bits. Buffers may be absent. Buffers that a state dict of today leaves out (masks in old files) are passed over.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepzero.checkpoint.errors import CheckpointError
from deepzero.checkpoint.export import INDEX_SUFFIX, MODEL_FILE
from deepzero.checkpoint.json_codec import DTYPES, TORCH_DTYPES
from deepzero.checkpoint.manifest import (
    BUFFER,
    COMMIT,
    LATEST,
    MANIFEST,
    PARAMETER,
    Manifest,
    ParameterInfo,
    Row,
    ShardInfo,
)
from deepzero.checkpoint.reader import FileRange, ShardReader, StoredTensor, read_header

SUFFIX = ".safetensors"
COMPARE_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class ModelNames:
    """What the model calls its tensors."""

    parameters: dict[str, tuple[str, ...]]
    """The name that ZeRO uses → all names."""
    buffers: dict[str, torch.Tensor]
    """Those of a state dict."""
    others: frozenset[str]
    """Of buffers that no state dict has."""
    floating: dict[str, bool]
    """Of each parameter."""

    def known(self) -> set[str]:
        """Every name that a file may use."""
        return {known for names in self.parameters.values() for known in names} | {*self.buffers} | {*self.others}


@dataclass(frozen=True)
class _Found:
    """A tensor and its file."""

    file: str
    tensor: StoredTensor


def is_foreign(load_dir: str | Path, tag: str | None) -> bool:
    """Whether these are plain safetensors: one such file, or a folder with a model and no checkpoint in it."""
    path = Path(load_dir)
    if tag is not None or any((path / name).exists() for name in (LATEST, MANIFEST, COMMIT)):
        return False
    if path.is_dir():
        return any((path / name).is_file() for name in (MODEL_FILE, MODEL_FILE + INDEX_SUFFIX))
    return path.name.endswith((SUFFIX, SUFFIX + INDEX_SUFFIX)) and path.is_file()


def read_foreign(load_dir: str | Path, names: ModelNames) -> tuple[Path, Manifest]:
    """A manifest of plain safetensors, in the model's names.

    Args:
        load_dir: for which :func:`is_foreign` is true.
        names: of the model.

    Returns:
        The folder of the files, and the manifest; its rows hold ``parameter`` and ``buffer`` only.

    Raises:
        CheckpointError: a file is missing or damaged; a tied weight has two values; a float is stored for an integer.
    """
    folder, files = _files(Path(load_dir))
    stored: dict[str, _Found] = {}
    for file in files:
        for tensor in read_header(folder / file)[1]:
            if tensor.name in stored:
                raise CheckpointError(f"{folder / file} and {stored[tensor.name].file} both hold {tensor.name!r}")
            stored[tensor.name] = _Found(file, tensor)
    for name, file in files_of_index(folder, Path(load_dir)).items():
        if name not in stored or stored[name].file != file:
            raise CheckpointError(f"{folder / file} does not hold {name!r}, and the index says that it does")
    renamed = rename(stored, names.known())
    return folder, _manifest(folder, files, renamed, names)


# ---- files -----------------------------------------------------------------------------------------------------------


def _files(path: Path) -> tuple[Path, list[str]]:
    """The folder, and the names of the files in it that make the model."""
    if path.is_file() and path.name.endswith(SUFFIX):
        return path.parent, [path.name]
    if path.is_dir() and (path / MODEL_FILE).is_file():
        return path, [MODEL_FILE]
    folder = path if path.is_dir() else path.parent
    files = sorted(set(files_of_index(folder, path).values()))
    for file in files:
        if not (folder / file).is_file():
            raise CheckpointError(f"{folder / file} is missing, and the index names it")
    return folder, files


def files_of_index(folder: Path, path: Path) -> dict[str, str]:
    """Tensor → file, of the index that ``path`` is or whose folder it is; empty where there is none to follow.

    Raises:
        CheckpointError: it is damaged, or names files elsewhere.
    """
    index = path if path.name.endswith(INDEX_SUFFIX) and path.is_file() else folder / (MODEL_FILE + INDEX_SUFFIX)
    if path.name.endswith(SUFFIX) or (path.is_dir() and (path / MODEL_FILE).is_file()):
        return {}
    try:
        content = json.loads(index.read_bytes().decode("utf-8"))
    except OSError as error:
        raise CheckpointError(f"{index}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{index} is not JSON ({error}); it is damaged") from None
    where = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(where, dict) or not where or not all(isinstance(file, str) for file in where.values()):
        raise CheckpointError(f"{index} has no weight_map from tensors to files; it is damaged")
    for file in where.values():
        if not file.endswith(SUFFIX) or file != Path(file).name:
            raise CheckpointError(f"{index} names {file!r}, which is no safetensors file of the same folder")
    return where


# ---- names -----------------------------------------------------------------------------------------------------------


def rename(stored: Mapping[str, _Found], known: set[str]) -> dict[str, _Found]:
    """The files' tensors under names of the model, when one prefix makes them all fit; else as they are.

    Example:
        >>> sorted(rename({"h.0": 1, "wte": 2}, {"transformer.h.0", "transformer.wte", "lm_head"}))
        ['transformer.h.0', 'transformer.wte']
        >>> sorted(rename({"model.h.0": 1, "model.wte": 2}, {"h.0", "wte"}))
        ['h.0', 'wte']
    """
    if not stored or all(name in known for name in stored):
        return dict(stored)
    first = next(iter(stored))
    added = {name[: -len(first)] for name in known if name.endswith(f".{first}")}
    removed = {first[: -len(name)] for name in known if first.endswith(f".{name}")}
    for prefix in sorted(added, key=len):
        if all(prefix + name in known for name in stored):
            return {prefix + name: found for name, found in stored.items()}
    for prefix in sorted(removed, key=len):
        if all(name.startswith(prefix) and name.removeprefix(prefix) in known for name in stored):
            return {name.removeprefix(prefix): found for name, found in stored.items()}
    return dict(stored)


# ---- manifest --------------------------------------------------------------------------------------------------------


def _manifest(folder: Path, files: list[str], stored: dict[str, _Found], names: ModelNames) -> Manifest:
    stored = {name: found for name, found in stored.items() if name not in names.others}
    rows: dict[str, list[Row]] = {file: [] for file in files}
    parameters: dict[str, ParameterInfo] = {}
    buffers: dict[str, dict[str, Any]] = {}
    for name, known in names.parameters.items():
        present = [stored.pop(other) for other in known if other in stored]
        if present:
            _same_values(folder, present)
            found, aliases = present[0], tuple(other for other in known if other != name)
            _same_kind(folder, found, names.floating[name])
            parameters[name] = _parameter(found.tensor, aliases)
            rows[found.file].append(_row(PARAMETER, name, found.tensor))
    for name, found in stored.items():
        if name in names.buffers:
            _same_kind(folder, found, names.buffers[name].is_floating_point())
            buffers[name] = {"shape": list(found.tensor.shape), "dtype": found.tensor.dtype}
            rows[found.file].append(_row(BUFFER, name, found.tensor))
        else:
            parameters[name] = _parameter(found.tensor, ())  # unknown here: comparing will say so
    shards = {
        file: ShardInfo(0, (folder / file).stat().st_size, "", 1, "", tuple(rows_of)) for file, rows_of in rows.items()
    }
    return Manifest(
        id="",
        tag="",
        written="",
        versions={},
        world_size=0,  # no rank's own buffers or generators are in it
        zero_stage=0,
        precision="",
        batch={},
        counters={},
        parameters=parameters,
        buffers=buffers,
        layout=[],
        optimizer={},
        lr_scheduler=None,
        loss_scaler={},
        client_state={},
        rng_numbers=[],
        config={},
        files=shards,
    )


def _parameter(tensor: StoredTensor, aliases: tuple[str, ...]) -> ParameterInfo:
    tensors = {PARAMETER: tensor.dtype} if tensor.numel else {}
    return ParameterInfo(tensor.shape, tensor.dtype, False, None, aliases, tensors)


def _row(key: str, name: str, tensor: StoredTensor) -> Row:
    return Row(key, name, tensor.dtype, 0, tensor.numel, tensor.offset)


def _same_kind(folder: Path, found: _Found, floating: bool) -> None:
    """Between floats values are converted; a float for an integer is a mistake."""
    if TORCH_DTYPES[found.tensor.dtype].is_floating_point != floating:
        kind = "floating" if floating else "not floating"
        raise CheckpointError(
            f"{folder / found.file} holds {found.tensor.name!r} in {found.tensor.dtype}, and here it is {kind}"
        )


def _same_values(folder: Path, present: list[_Found]) -> None:
    """Tensors that are one parameter here must be one value there.

    Raises:
        CheckpointError: the model ties what the files do not.
    """
    first = present[0]
    for other in present[1:]:
        a, b = first.tensor, other.tensor
        equal = (a.shape, a.dtype) == (b.shape, b.dtype)
        for start in range(0, a.numel if equal else 0, COMPARE_ELEMENTS):
            count = min(COMPARE_ELEMENTS, a.numel - start)
            equal = equal and torch.equal(*(_bits(folder, found, start, count) for found in (first, other)))
        if not equal:
            raise CheckpointError(
                f"{folder} holds different tensors {a.name!r} and {b.name!r}, which are one parameter (tied) here: one "
                "of them would be lost. Build the model without tying them"
            )


def _bits(folder: Path, found: _Found, start: int, count: int) -> torch.Tensor:
    """Elements as bytes, so that a NaN is equal to itself."""
    dtype = TORCH_DTYPES[found.tensor.dtype]
    into = torch.empty(count, dtype=dtype)
    offset = found.tensor.offset + start * dtype.itemsize
    ShardReader(folder / found.file, None).read([FileRange(offset, count, DTYPES[dtype], into)])
    return into.view(torch.uint8)


def model_names(
    parameters: Mapping[torch.nn.Parameter, Iterable[str]], buffers: dict[str, torch.Tensor], all_buffers: Iterable[str]
) -> ModelNames:
    """Names as an engine's holdings give them.

    Args:
        parameters: all names of each parameter, the one that ZeRO uses first.
        buffers: those of a state dict.
        all_buffers: the names of all buffers.
    """
    named = {tuple(names): param for param, names in parameters.items()}
    return ModelNames(
        {names[0]: names for names in named},
        buffers,
        frozenset(all_buffers) - {*buffers},
        {names[0]: param.is_floating_point() for names, param in named.items()},
    )
