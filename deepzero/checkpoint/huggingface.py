"""Weights from elsewhere: plain safetensors, as Hugging Face writes them, seen as a checkpoint. Nothing is copied.

The files' headers say where each tensor lies; from them a :class:`Manifest` is made whose rows are those tensors, under
the names that this model has for them. Loading then goes its usual way, by ranges of elements, in every stage.

Names fit as they are, or all of them but for one prefix, which either side may have (``model.`` of a wrapper,
``transformer.`` that the hub's GPT-2 lacks). Of tied weights the files may hold one name, or several with the same
bits. Buffers may be absent. Buffers that a state dict of today leaves out (masks in old files) are passed over.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from deepzero.checkpoint.engine_state import EngineState, plain_name
from deepzero.checkpoint.errors import CheckpointError
from deepzero.checkpoint.export import INDEX_SUFFIX, MODEL_FILE
from deepzero.checkpoint.json_codec import TORCH_DTYPES
from deepzero.checkpoint.manifest import BUFFER, COMMIT, MARKS, PARAMETER, Manifest, ParameterInfo, Row, ShardInfo
from deepzero.checkpoint.reader import CheckpointReader, StoredTensor, portions, read_header

SUFFIX = ".safetensors"

Found = tuple[Path, StoredTensor]
"""A tensor's file, and where in it."""


def find_model(path: Path) -> Path | None:
    """Of plain safetensors the file that is opened first, the only one or the index; None: these are none.

    They are one such file, or a folder with a model and no checkpoint in it.
    """
    if any((path / name).exists() for name in MARKS):
        return None
    files = [path / MODEL_FILE, path / (MODEL_FILE + INDEX_SUFFIX)] if path.is_dir() else [path]
    models = [file for file in files if file.name.endswith((SUFFIX, SUFFIX + INDEX_SUFFIX)) and file.is_file()]
    return models[0] if models else None


def read_foreign(path: Path, tag: str | None, model: EngineState, weights: bool) -> CheckpointReader | None:
    """A reader of plain safetensors, whose manifest has the model's names; None: these are none.

    A CheckpointError: a file is missing or damaged, a tied weight has two values, a float is stored for an integer, or
    more than ``weights`` is wanted.
    """
    entry = find_model(path) if tag is None else None
    if entry is None:
        return None
    if path.is_file() and (path.parent / COMMIT).exists():
        raise CheckpointError(f"{path} is one rank's part of a checkpoint; give its folder, {path.parent}")
    if not weights:
        raise CheckpointError(
            f"{path} holds plain safetensors: weights, without the state of an optimizer; load_module_only=True "
            "loads them"
        )
    folder, indexed = entry.parent, _read_index(entry) if entry.name.endswith(INDEX_SUFFIX) else {}
    files = sorted(set(indexed.values())) or [entry.name]
    stored: dict[str, Found] = {}
    for file in files:
        if not (folder / file).is_file():
            raise CheckpointError(f"{folder / file} is missing, and the index names it")
        for tensor in read_header(folder / file)[1]:
            if tensor.name in stored:
                raise CheckpointError(f"{folder / file} and {stored[tensor.name][0].name} both hold {tensor.name!r}")
            stored[tensor.name] = folder / file, tensor
    for name, file in indexed.items():
        if name not in stored or stored[name][0].name != file:
            raise CheckpointError(f"{folder / file} does not hold {name!r}, and the index says that it does")
    return CheckpointReader(folder, _manifest(files, folder, stored, model), checked=False)


def _read_index(index: Path) -> dict[str, str]:
    """Tensor → file; a :class:`CheckpointError` where it is damaged, or names files elsewhere."""
    try:
        content = json.loads(index.read_bytes())
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


def rename(stored: Mapping[str, Any], known: set[str]) -> dict[str, Any]:
    """The files' tensors under names of the model, when one prefix makes them all fit; else as they are.

    Example:
        >>> sorted(rename({"h.0": 1, "wte": 2}, {"transformer.h.0", "transformer.wte", "lm_head"}))
        ['transformer.h.0', 'transformer.wte']
        >>> sorted(rename({"model.h.0": 1, "model.wte": 2}, {"h.0", "wte"}))
        ['h.0', 'wte']
    """
    first = next(iter(stored), "")
    added = sorted({name[: -len(first)] for name in known if name.endswith(f".{first}")}, key=len)
    removed = sorted({first[: -len(name)] for name in known if first.endswith(f".{name}")}, key=len)
    for prefix, put in [("", True), *((prefix, True) for prefix in added), *((prefix, False) for prefix in removed)]:
        if put or all(name.startswith(prefix) for name in stored):
            renamed = {prefix + name if put else name.removeprefix(prefix): found for name, found in stored.items()}
            if all(name in known for name in renamed):
                return renamed
    return dict(stored)


def _manifest(files: list[str], folder: Path, stored: dict[str, Found], model: EngineState) -> Manifest:
    names, state_dict = {tuple(names): param for param, names in model.names().items()}, model.buffers()
    every = {plain_name(name) for name, _ in model.model.named_buffers(remove_duplicate=False)}
    stored = rename(stored, {known for aliases in names for known in aliases} | every | set(state_dict))
    rows: dict[str, list[Row]] = {file: [] for file in files}
    parameters: dict[str, ParameterInfo] = {}
    buffers: dict[str, dict[str, Any]] = {}

    def take(key: str, name: str, found: Found, floating: bool) -> StoredTensor:
        file, tensor = found
        # Between floats values are converted; a float for an integer is a mistake.
        if TORCH_DTYPES[tensor.dtype].is_floating_point != floating:
            kind = "floating" if floating else "not floating"
            raise CheckpointError(f"{file} holds {tensor.name!r} in {tensor.dtype}, and here it is {kind}")
        rows[file.name].append(tensor.row(key, name))
        return tensor

    for (name, *aliases), param in names.items():
        present = [stored.pop(known) for known in (name, *aliases) if known in stored]
        for other in present[1:]:
            _need_same_bits(present[0], other)
        if present:
            tensor = take(PARAMETER, name, present[0], param.is_floating_point())
            parameters[name] = _parameter(tensor, tuple(aliases))
    for name, found in stored.items():
        if name in state_dict:
            tensor = take(BUFFER, name, found, state_dict[name].is_floating_point())
            buffers[name] = {"shape": list(tensor.shape), "dtype": tensor.dtype}
        elif name not in every:
            parameters[name] = _parameter(found[1], ())  # unknown here: comparing will say so
    shards = {file: ShardInfo(0, (folder / file).stat().st_size, "", 1, "", tuple(rows[file])) for file in files}
    # Weights, and nothing else. Of 0 ranks: none has buffers or generators of its own there.
    nothing: dict[str, Any] = {entry.name: {} for entry in fields(Manifest)} | {"world_size": 0, "lr_scheduler": None}
    return Manifest(**nothing | {"parameters": parameters, "buffers": buffers, "files": shards})


def _parameter(tensor: StoredTensor, aliases: tuple[str, ...]) -> ParameterInfo:
    tensors = {PARAMETER: tensor.dtype} if tensor.numel else {}
    return ParameterInfo(tensor.shape, tensor.dtype, False, None, aliases, tensors)


def _need_same_bits(first: Found, second: Found) -> None:
    """Tensors that are one parameter here must be one value there, to the bit: a NaN is equal to itself."""
    (file, a), (_, b) = first, second
    places = [(path, tensor.row(PARAMETER, tensor.name)) for path, tensor in (first, second)]
    pairs = zip(*(portions(path, None, [(row.offset, row.end)]) for path, row in places), strict=False)
    if (a.shape, a.dtype) != (b.shape, b.dtype) or any(bytes(one) != bytes(other) for (_, one), (_, other) in pairs):
        raise CheckpointError(
            f"{file.parent} holds different tensors {a.name!r} and {b.name!r}, which are one parameter (tied) here: "
            "one of them would be lost. Build the model without tying them"
        )
