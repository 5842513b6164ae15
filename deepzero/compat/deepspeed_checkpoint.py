"""DeepSpeed's own checkpoints, seen as deepzero's: a manifest whose rows lie in ``.pt`` files. Nothing is copied.

A ``.pt`` file is a zip archive without compression: a pickle that says what is there, and behind it the bytes of each
tensor, one after the other. So a run of elements has a place in the file, which is all that a row of a
:class:`~deepzero.checkpoint.manifest.Manifest` needs. Rank 0 makes the manifest from the pickles; then every rank reads
the runs that it holds, in any stage and among any number of ranks, as from a checkpoint of our own.

[Note: where DeepSpeed keeps a parameter]
    *Stages 1 and 2*: parameters of a group are laid end to end and cut once for each rank; a rank's file has its part
    (``single_partition_of_fp32_groups``, and moments like it). Their order is that of ``param_shapes``; what says where
    they lie, ``param_slice_mappings``, is wrong with ``round_robin_gradients``, and so is what is converted by it.
    *Stage 3*: each parameter is cut for itself, into W parts of ``ceil(numel / W)``; a rank's file has its parts of a
    sub-group end to end (``fp32_flat_groups``).
    *Universal*: a folder ``zero/NAME`` for each parameter, with ``fp32.pt``, ``exp_avg.pt`` and so on, whole.
    Names and shapes of what is trained, buffers and all that is not trained are in the ``model_states`` files.

**No pickle is executed.** ``torch.load(weights_only=True)`` makes tensors, containers and numbers; DeepSpeed's few
classes become an empty one, which keeps their attributes. Any other name in a pickle is refused; where weights are
enough, what it names becomes an empty object that nobody looks at.
"""

from __future__ import annotations

import logging
import math
import re
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from deepzero.checkpoint.checkpoint_dir import check_tag, latest_tag
from deepzero.checkpoint.errors import CheckpointError
from deepzero.checkpoint.json_codec import DTYPES, FACTORIES, encode
from deepzero.checkpoint.manifest import (
    BUFFER,
    CLIENT,
    COMMIT,
    COUNTERS,
    LATEST,
    MASTER,
    PARAMETER,
    Manifest,
    ParameterInfo,
    Row,
    ShardInfo,
    row_problems,
)
from deepzero.checkpoint.reader import CheckpointReader, Run, read_rows
from deepzero.compat.optimizer_names import LossScalerNames
from deepzero.utils.formatting import listed

log = logging.getLogger(__name__)

LATEST_UNIVERSAL = "latest_universal"  # names the checkpoint that was converted last
_FILE = re.compile(r"(?:(?:bf16_|fp16_)?zero_pp_rank_(\d+)_)?mp_rank_(\d+)_?(model|optim)_states\.pt")
"""A file's rank (none where one file serves all), its place in a model that is divided, and what it holds."""
_OWN = {
    "module", "optimizer", "shared_params", "lr_scheduler", "data_sampler", "random_ltd", "dp_world_size",
    "mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version", "buffer_names",
    "param_shapes", "frozen_param_shapes", "frozen_param_fragments", *COUNTERS,
}  # fmt: skip
"""Keys of a ``model_states`` file that are DeepSpeed's; the others are the caller's client state."""

Piece = tuple[str, str, str, torch.Tensor, int, int, int]
"""Key, parameter, file; a tensor of that file; first element within the parameter and within the tensor; how many."""


class _Inert:
    """Stands for an object of DeepSpeed's: its attributes, and nothing that it could do."""

    def __init__(self, *_: Any) -> None: ...


class _Foreign(_Inert):
    """Stands for an object of the caller's, or for a function's result: for nothing."""

    def __setstate__(self, _: Any) -> None: ...


def _with_factory(factory: Any = None, *_: Any) -> Any:
    """Stands for a defaultdict, which torch does not fill; ``encode`` knows it by its attribute."""
    made = OrderedDict[Any, Any]()
    made.default_factory = factory  # type: ignore[attr-defined]
    return made


_CLASSES: dict[str, Callable[..., Any]] = {
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": _Inert,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": _Inert,
    "deepspeed.runtime.zero.config.ZeroStageEnum": _Inert,
    "deepspeed.utils.tensor_fragment.fragment_address": _Inert,
    "collections.defaultdict": _with_factory,
    **{f"{module}.{name}": kind for module in ("builtins", "__builtin__") for name, kind in FACTORIES.items()},
}
"""What DeepSpeed pickles besides tensors, containers and numbers, and what stands for it; of callers' client states a
dictionary with a factory."""


class TorchFileReader(CheckpointReader):
    """Reads rows out of ``.pt`` files, whose only sums are those of the archive: of each tensor as a whole."""

    checks_files = True

    def check(self, file: str, runs: Iterable[Run]) -> None:
        """Compare the whole file with its sums."""
        try:
            with zipfile.ZipFile(self.path / file) as archive:
                bad = archive.testzip()
        except (OSError, zipfile.BadZipFile, zlib.error) as error:
            bad = str(error)
        if bad is not None:
            raise CheckpointError(f"{self.path / file} is damaged: {bad} is not what was written")


def read(load_dir: Path, tag: str | None, _: Any = None, weights: bool = False) -> CheckpointReader | None:
    """A reader of the checkpoint of DeepSpeed's that is meant; None: it is none.

    Without a ``tag`` it is that of ``latest``, or where there is none of ``latest_universal``, or ``load_dir`` itself.
    Where ``weights`` are enough, client state and schedule may hold anything. Raises a CheckpointError for what is
    missing or damaged, no plain data, or has no place in deepzero.
    """
    if tag is not None:
        check_tag(tag)
    known = tag
    for file in (LATEST, LATEST_UNIVERSAL):
        if known is None and (known := latest_tag(load_dir, file)) is not None:
            check_tag(known, f"{load_dir / file} is damaged: {known!r} cannot be the name of a checkpoint")
    paths = [load_dir / tag] if tag else [load_dir, load_dir / (known or "")]
    files = {path: [file.name for file in path.glob("*mp_rank_*_states.pt")] for path in paths}
    path = next((path for path, found in files.items() if found and not (path / COMMIT).exists()), None)
    if path is None:
        return None
    try:
        return TorchFileReader(path, _Checkpoint(path, files[path], weights).manifest(), checked=False)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{path} is not as DeepSpeed 0.9 to 0.19 writes checkpoints ({what})") from error


class _Checkpoint:
    """One checkpoint of DeepSpeed's: what its files say, and the rows that are found in them."""

    def __init__(self, path: Path, found: list[str], weights: bool) -> None:
        self.path, self.weights, self.rows = path, weights, dict[str, list[Row]]()
        models, optims = (self._by_rank(found, kind) for kind in ("model", "optim"))
        self.models = {file: self.load(file) for file in models}
        self.first, self.said = models[0], self.models[models[0]]
        self.shapes: list[dict[str, Any]] = self.said["param_shapes"] or []
        self.ranks = {file: self.load(file)["optimizer_state_dict"] for file in optims}
        file, own = next(iter(self.ranks.items()), ("", dict[str, Any]()))
        if (path / "zero").is_dir():
            file = "zero/optimizer_state.pt"
            own = self.load(file)
            zero = self.said["ds_config"].get("zero_optimization") or {}
            dealt_out = zero.get("round_robin_gradients") and zero.get("stage") in (1, 2)
            if dealt_out and self.said.get("dp_world_size", 2) != 1:
                raise CheckpointError(
                    f"{path} was converted from a run with round_robin_gradients, whose parameters DeepSpeed's "
                    "ds_to_universal puts into each other's places; load the checkpoint that was converted"
                )
        self.scaler, base = getattr(own.get("loss_scaler"), "__dict__", None), _base(own)
        groups = own.get("param_groups", base.get("param_groups", []))
        self.groups = [{key: self.number(file, value) for key, value in group.items()} for group in groups]
        self.numbers: dict[int, dict[str, Any]] = {index: {} for index in range(len(self.shapes))}
        """What the optimizer keeps besides vectors, for each flat tensor: of rank 0, like all ranks'."""
        for group in self.groups:
            for index in group["params"] if "step" in group else ():  # DeepSpeed's FusedAdam counts by group
                self.numbers[index]["step"] = group["step"]
        for index, kept in base.get("state", {}).items():
            self.numbers[index] |= {key: self.number(file, v) for key, v in kept.items() if not _is_vector(v)}

    def _by_rank(self, found: list[str], kind: str) -> list[str]:
        """The files of one kind, in the order of ranks, which must be all and of a whole model."""
        matches = [(match, name) for name in found if (match := _FILE.fullmatch(name)) and match[3] == kind]
        if any(int(match[2]) for match, _ in matches) or any(self.path.glob("*expert*")):
            raise CheckpointError(f"{self.path} is of a model that was divided (tensors, stages, experts): not here")
        by_rank = sorted((int(match[1] or 0), name) for match, name in matches)
        ranks = [rank for rank, _ in by_rank]
        if ranks != list(range(len(ranks))) or (kind == "model" and not ranks):
            have = ", ".join(map(str, ranks)) or "no rank"
            raise CheckpointError(f"{self.path} lacks {kind}_states files, or has two of a rank: it has {have}'s")
        return [name for _, name in by_rank]

    # ---- one file ----------------------------------------------------------------------------------------------------

    def load(self, file: str) -> Any:
        """What a ``.pt`` file says; its tensors have a place and no values."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        path = self.path / file
        if not zipfile.is_zipfile(path):
            raise CheckpointError(f"{path} is missing, truncated, or was not written by torch.save")
        try:
            inert: list[Any] = [(kind, name) for name, kind in _CLASSES.items()]
            if self.weights:  # what else there is stands for nothing, and nobody looks at it
                unsafe = set(torch.serialization.get_unsafe_globals_in_checkpoint(path)) - set(_CLASSES)
                inert += [(_Foreign, name) for name in unsafe]
            with FakeTensorMode(), torch.serialization.safe_globals(inert):
                return torch.load(path, map_location="cpu", weights_only=True)
        except UnpicklingError as error:
            foreign = set(torch.serialization.get_unsafe_globals_in_checkpoint(path)) - set(_CLASSES)
            what = listed(sorted(foreign)) or str(error).splitlines()[0]
            alone = "" if self.weights else "load_module_only=True takes the weights alone. "
            raise CheckpointError(
                f"{path} holds what is no plain data ({what}), and nothing in it is executed. {alone}If you trust it, "
                "allow these with torch.serialization.add_safe_globals"
            ) from None
        except (RuntimeError, OSError, EOFError) as error:
            raise CheckpointError(f"{path} is damaged: {str(error).splitlines()[0]}") from None

    def number(self, file: str, value: Any) -> Any:
        """A number that may be a tensor, which is then read."""
        if not torch.is_tensor(value):
            return value
        into = torch.empty(1, dtype=value.dtype, device="cpu")
        read_rows(self.path / file, None, [(Row("", "", DTYPES[value.dtype], 0, 1, _place(value)), into)])
        return into.item()

    def row(self, piece: Piece) -> str:
        """Take note of a piece; returns its dtype, in safetensors' word."""
        key, name, file, tensor, start, first, numel = piece
        if not tensor.is_contiguous() or first + numel > tensor.numel():
            raise CheckpointError(f"{self.path / file}: {key} of {name!r} is too short, or not laid out in one piece")
        dtype, offset = DTYPES[tensor.dtype], _place(tensor) + first * tensor.element_size()
        self.rows.setdefault(file, []).append(Row(key, name, dtype, start, numel, offset))
        return dtype

    # ---- where things lie --------------------------------------------------------------------------------------------

    def pieces(self) -> Iterator[Piece]:
        """Masters and moments of what is trained, whether or not they are needed."""
        for rank, (file, own) in enumerate(self.ranks.items()):
            masters = own.get("fp32_flat_groups") or own["single_partition_of_fp32_groups"]
            for index, master in enumerate(masters):
                kept = {MASTER: master, **_base(own)["state"].get(index, {})}
                cut = self._partitions if "fp32_flat_groups" in own else self._slices
                for name, *where in cut(index, rank):
                    yield from ((key, name, file, value, *where) for key, value in kept.items() if _is_vector(value))
        for index, shapes in enumerate(self.shapes if not self.ranks and self.groups else ()):
            for name, shape in shapes.items():
                for path in sorted((self.path / "zero" / name).glob("*.pt")):
                    file = path.relative_to(self.path).as_posix()
                    content = self.load(file)
                    value = content["param"] if isinstance(content, Mapping) else content
                    if _is_vector(value):
                        key = MASTER if path.stem == "fp32" else path.stem
                        yield key, name, file, value, 0, 0, math.prod(shape)
                    else:
                        self.numbers[index][path.stem] = self.number(file, value)

    def _slices(self, index: int, rank: int) -> Iterator[tuple[str, int, int, int]]:
        """Stages 1 and 2: what one rank has of each parameter of a group: first element there and here, how many."""
        masters = [own["single_partition_of_fp32_groups"][index] for own in self.ranks.values()]
        shapes, at = self.shapes[index].items(), -rank * masters[0].numel()
        paddings = next(iter(self.ranks.values())).get("param_alignment_paddings") or {index: [0] * len(shapes)}
        for (name, shape), padding in zip(shapes, paddings[index], strict=True):
            start, end = max(0, -at), min(math.prod(shape), masters[rank].numel() - at)
            if start < end:
                yield name, start, at + start, end - start
            at += math.prod(shape) + padding

    def _partitions(self, index: int, rank: int) -> Iterator[tuple[str, int, int, int]]:
        """Stage 3: the same of a sub-group."""
        first = 0
        for name, shape in self.shapes[index].items():
            start, numel, each = _part(shape, rank, len(self.ranks))
            yield name, start, first, numel
            first += each

    def _untrained(self) -> Iterator[tuple[Piece, tuple[int, ...]]]:
        """What is not trained: of every rank in stage 3, else whole in the one file; and its shape."""
        known = {*self.said["buffer_names"], *(self.said.get("shared_params") or {})}.union(*self.shapes)
        if len(self.models) > 1 or self.first.startswith("zero_pp"):
            for rank, (file, said) in enumerate(self.models.items()):
                for name, tensor in (said["frozen_param_fragments"] or {}).items():
                    shape = said["frozen_param_shapes"][name]
                    start, numel, _ = _part(shape, rank, len(self.models))
                    yield (PARAMETER, name, file, tensor, start, 0, numel), shape
            return
        for name, tensor in self.said["module"].items():
            if name not in known:
                yield (PARAMETER, name, self.first, tensor, 0, 0, tensor.numel()), tensor.shape

    # ---- the manifest ------------------------------------------------------------------------------------------------

    def manifest(self) -> Manifest:
        """Everything but the elements, as a checkpoint of our own would have it."""
        buffers, module = {}, self.said["module"]
        for name in self.said["buffer_names"]:
            dtype = self.row((BUFFER, name, self.first, module[name], 0, 0, module[name].numel()))
            buffers[name] = {"shape": list(module[name].shape), "dtype": dtype}
        tensors: dict[str, torch.Tensor] = {}
        client = self._client_state(tensors)
        if (schedule := None if self.weights else self.said["lr_scheduler"]) is not None:
            schedule = {"class": "", "state": encode(schedule, "lr_scheduler", tensors)}
        for name, tensor in tensors.items():
            self.row((CLIENT, name, self.first, tensor, 0, 0, tensor.numel()))
        parameters = self._parameters()
        rows = self.rows.items()
        settings = [{key: _setting(v) for key, v in group.items() if key != "params"} for group in self.groups]
        nothing: dict[str, Any] = {entry.name: {} for entry in fields(Manifest)}
        manifest = Manifest(**nothing | {
            "tag": self.path.name, "world_size": len(self.models), "precision": self._precision(),
            "counters": {key: int(self.said[key]) for key in COUNTERS}, "loss_scaler": self._loss_scale(),
            "optimizer": {"class": "", "groups": settings}, "client_state": client, "lr_scheduler": schedule,
            "parameters": parameters, "buffers": buffers,
            "files": {f: ShardInfo(0, (self.path / f).stat().st_size, None, 1, "", tuple(own)) for f, own in rows},
        })  # fmt: skip
        for place, problem in row_problems(manifest):
            raise CheckpointError(f"{self.path} is not whole ({place}): {problem}")
        return manifest

    def _client_state(self, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        """What the caller has saved, as far as a checkpoint of ours could hold it; not for the sake of weights."""
        pairs: list[Any] = []
        for key in () if self.weights else [key for key in self.said if key not in _OWN]:
            found: dict[str, torch.Tensor] = {}
            try:
                kept = encode({key: self.said[key]}, "client_state", found)
            except CheckpointError as error:
                log.warning("%s: %s; it is left out, and everything else is read", self.path / self.first, error)
                continue
            pairs += kept.get("$dict") or [list(pair) for pair in kept.items()]
            tensors |= found
        return {"$dict": pairs}

    def _parameters(self) -> dict[str, ParameterInfo]:
        found: dict[str, ParameterInfo] = {}
        aliases: dict[str, tuple[str, ...]] = {}
        for alias, name in (self.said.get("shared_params") or {}).items():
            aliases[name] = (*aliases.get(name, ()), alias)
        for piece, shape in self._untrained():
            name, dtype = piece[1], self.row(piece)
            found[name] = ParameterInfo(tuple(shape), dtype, False, None, aliases.get(name, ()), {PARAMETER: dtype})
        keys = {piece[0]: self.row(piece) for piece in self.pieces()}
        # A flat tensor is of one group; in stage 3 a group has several, one for each of its sub-groups.
        group_of = {index: number for number, group in enumerate(self.groups) for index in group["params"]}
        computed = {"bf16": "BF16", "fp16": "F16"}.get(self._precision(), "F32")
        for index, shapes in enumerate(self.shapes):
            numbers = {key: _scalar(value) for key, value in self.numbers[index].items()}
            for name, shape in shapes.items():  # with all keys: one that is missing will be named
                known = aliases.get(name, ())
                found[name] = ParameterInfo(tuple(shape), computed, True, group_of.get(index), known, keys, numbers)
        return found

    def _precision(self) -> str:
        config = self.said["ds_config"]
        kinds = [kind for kind in ("fp16", "bf16", "bfloat16") if (config.get(kind) or {}).get("enabled") is True]
        return kinds[0].replace("bfloat", "bf") if kinds else "fp32"

    def _loss_scale(self) -> dict[str, Any]:
        scaler = self.scaler or {"cur_scale": 1.0, "dynamic": False}
        if not scaler["dynamic"]:
            return {"kind": "static", "scale": float(scaler["cur_scale"])}
        theirs = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
        return {"kind": "dynamic"} | {LossScalerNames.NAMES[key]: scaler[key] for key in theirs}


def _base(own: Any) -> Any:
    """The state dict of the optimizer that DeepSpeed's wraps: in stage 3 under another name."""
    base = own.get("optimizer_state_dict", own.get("base_optimizer_state", {}))
    if not isinstance(base, Mapping):
        raise TypeError("elastic_checkpoint leaves out the optimizer's settings")
    return base


def _part(shape: Any, rank: int, world: int) -> tuple[int, int, int]:
    """One rank's part of a parameter that stage 3 has cut: first element, how many, and how many with padding."""
    numel, each = math.prod(shape), -(-math.prod(shape) // world)
    start = min(numel, rank * each)
    return start, min(numel - start, each), each


def _place(tensor: torch.Tensor) -> int:
    """Of a tensor's first byte in its file."""
    whole: Any = tensor.untyped_storage()._checkpoint_offset
    return int(whole) + int(tensor.storage_offset()) * tensor.element_size()


def _is_vector(value: Any) -> bool:
    return torch.is_tensor(value) and value.dim() > 0


def _scalar(value: Any) -> Any:
    """A number as torch's optimizers keep theirs."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    encoded = encode(float(value) if number else value, "the optimizer's state", {})
    return {"dtype": "F32", "shape": [], "value": encoded} if number else encoded


def _setting(value: Any) -> Any:
    return encode(tuple(value) if isinstance(value, list) else value, "the optimizer's settings", {})
