"""What an engine holds, parameter by parameter: the runs of elements that a checkpoint stores and that loading fills.

The one place that relates the layout of ZeRO's tensors to the rows of a manifest. Saving takes the runs as they are,
and its first half is here: from an engine to the plan of a shard and the facts of a manifest, without a byte written
(:func:`collect`). Loading fills the same runs with what rows of any layout hold.
"""

from __future__ import annotations

import hashlib
import logging
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

from deepzero.checkpoint import rng
from deepzero.checkpoint.errors import CheckpointError, reason, together
from deepzero.checkpoint.json_codec import DTYPES, encode
from deepzero.checkpoint.manifest import (
    BUFFER,
    CLIENT,
    MASTER,
    PARAMETER,
    RESERVED,
    RNG,
    Entry,
    Manifest,
    ParameterInfo,
    buffer_key,
    is_own_buffer,
)
from deepzero.checkpoint.shard_file import ShardPlan, bytes_of, plan_shard
from deepzero.comm import process_group
from deepzero.comm.collectives import Communicator
from deepzero.runtime.zero.stage3 import PartitionedParamGroup
from deepzero.runtime.zero.stage_1_and_2 import ParamGroup
from deepzero.version import __version__

log = logging.getLogger(__name__)


def plain_name(name: str) -> str:
    """A parameter's name without what ``torch.compile`` puts into the names of modules that it wraps."""
    return name.replace("_orig_mod.", "")


def class_name(thing: Any) -> str:
    """Module and name of an object's class."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, 1-D."""
    return tensor.detach().view(-1)


@dataclass(frozen=True)
class StateRun:
    """Elements of one trained parameter that this rank stores and reads: from ``start`` within the parameter.

    The optimizer's tensor is this run or, in stage 0, the whole parameter; in it the run begins at ``first``.
    """

    name: str
    start: int
    numel: int
    master: torch.Tensor
    first: int
    per_tensor: bool = False  # the whole parameter, in its shape

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """The run, 1-D, out of a tensor of the master's extent."""
        return flat(tensor)[self.first : self.first + self.numel]


@dataclass(frozen=True)
class EngineState:
    """An engine's model state, and who else has it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    groups: Sequence[ParamGroup]
    frozen: Sequence[PartitionedParamGroup]
    """Groups of partitioned parameters that are not trained."""
    comm: Communicator
    compute_dtype: torch.dtype
    from_steps: set[str]
    """Keys that steps, of this run or of one that was loaded, have put into the optimizer's groups."""

    def masters(self, group: ParamGroup) -> dict[int, torch.Tensor]:
        """The masters that this rank holds of one group, by the parameter's index in it."""
        return {fragment.slot.index: m for fragment, m in zip(group.fragments, group.masters, strict=True)}

    def runs(self) -> Iterator[StateRun]:
        """This rank's runs, in the order of its shares. In stage 0, too, each rank has its part."""
        for group in self.groups:
            masters = self.masters(group)
            for fragment in group.layout.fragments(self.comm.rank):
                first, master = fragment.start if group.replicated else 0, masters[fragment.slot.index]
                name = plain_name(group.names[fragment.slot.index])
                yield StateRun(name, fragment.start, fragment.numel, master, first, group.placement.per_tensor)

    def frozen_runs(self) -> Iterator[Entry]:
        """This rank's elements of partitioned parameters that are not trained."""
        for group in self.frozen:
            for fragment in group.fragments:
                name = plain_name(group.names[fragment.slot.index])
                yield Entry(PARAMETER, name, fragment.start, group.param_fragment(fragment))

    def optimizer_state(self, run: StateRun) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """What the optimizer keeps for each element, of the master's shape; and for a parameter as a whole.

        A tensor that is neither is refused, where other ranks have parts of the parameter.
        """
        moments: dict[str, torch.Tensor] = {}
        scalars: dict[str, Any] = {}
        state = self.optimizer.state.get(run.master, {})
        for key, value in state.items():
            if torch.is_tensor(value) and value.dim() > 0 and value.shape == run.master.shape:
                # What is read and written as one run has to lie so.
                moments[key] = state[key] = value.contiguous()
            elif torch.is_tensor(value) and value.numel() != 1 and not run.per_tensor:
                raise CheckpointError(
                    f"the optimizer keeps {key!r} of shape {tuple(value.shape)} for parameter {run.name!r}, which is "
                    "neither one value for each element nor a number; such state cannot be saved"
                )
            else:
                scalars[key] = value
        return moments, scalars

    # ---- what all ranks hold alike -----------------------------------------------------------------------------------

    def names(self) -> dict[nn.Parameter, list[str]]:
        """All names of each parameter, the one that ZeRO uses first."""
        names: dict[nn.Parameter, list[str]] = {}
        for name, param in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(param, []).append(plain_name(name))
        return names

    def replicated(self) -> dict[str, torch.Tensor]:
        """Parameters that are whole and have no master: not trained, or in no group of the optimizer."""
        groups: list[ParamGroup] = [*self.groups, *self.frozen]
        elsewhere = {param for group in groups for param in group.params}
        return {names[0]: p.data for p, names in self.names().items() if p not in elsewhere}

    def named_buffers(self) -> Iterator[tuple[nn.Module, str, torch.Tensor, list[str]]]:
        """The buffers that belong into a state dict: module and key, the tensor, its names by all those of the module.

        A module with extra state, which may be any object, is refused.
        """
        places: dict[nn.Module, list[str]] = {}
        for prefix, module in self.model.named_modules(remove_duplicate=False):
            places.setdefault(module, []).append(prefix)
        for module, prefixes in places.items():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                raise CheckpointError(
                    f"module {prefixes[0]!r} has extra state (get_extra_state), which deepzero's checkpoints do not "
                    "hold; keep it in buffers, or save it through client_state"
                )
            for key, buffer in module._buffers.items():
                if buffer is not None and key not in module._non_persistent_buffers_set:
                    yield module, key, buffer, [plain_name(f"{prefix}.{key}".lstrip(".")) for prefix in prefixes]

    def buffers(self) -> dict[str, torch.Tensor]:
        """Each module's buffers by the module's first name; what two modules share stands under both names."""
        return {names[0]: buffer for _, _, buffer, names in self.named_buffers()}

    def make_buffers_writable(self) -> None:
        """Put a copy in the place of a buffer that values cannot be read into: a transposed or an inference tensor."""
        copies: dict[torch.Tensor, torch.Tensor] = {}
        for module, key, buffer, _ in self.named_buffers():
            if buffer.is_inference() or not buffer.is_contiguous():
                if buffer not in copies:
                    copies[buffer] = buffer.clone(memory_format=torch.contiguous_format)
                module._buffers[key] = copies[buffer]

    def trained(self) -> dict[str, ParamGroup]:
        """Every trained parameter's group."""
        return {plain_name(name): group for group in self.groups for name in group.names}

    def shares(self, sizes: dict[str, int]) -> dict[str, int]:
        """Who stores or reads what all hold alike: name → rank, so that ranks have about the same number of bytes."""
        load, owner = [0] * self.comm.world_size, {}
        for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
            owner[name] = load.index(min(load))
            load[owner[name]] += sizes[name]
        return owner


# ---- saving, first half ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavePlan:
    """This rank's shard, over the live tensors; the manifest without files; the bytes of all shards.

    Manifests are the same on all ranks but for what only rank 0 has (client state, schedule).
    """

    plan: ShardPlan
    manifest: Manifest
    total_bytes: int


def collect(
    holdings: EngineState, facts: dict[str, Any], lr_scheduler: Any, client_state: Mapping[str, Any], with_frozen: bool
) -> SavePlan:
    """Plan the shards. A collective; nothing is written. When one has what a checkpoint cannot hold, all ranks raise.

    ``facts`` are what an engine tells besides, under the names of :class:`Manifest`; ``id`` and ``tag`` among them. Of
    ``client_state``, the caller's, rank 0's counts. ``with_frozen``: with parameters that are not trained.
    """
    comm, entries = holdings.comm, _buffers(holdings)
    tensors: dict[str, torch.Tensor] = {}
    encoded_client = schedule = None
    with together(error=lambda text: CheckpointError(f"nothing was saved. {text}")):  # objects may raise anything
        if comm.rank == 0:
            encoded_client = encode(dict(client_state), "client_state", tensors)
            if callable(getattr(lr_scheduler, "state_dict", None)):
                state = encode(lr_scheduler.state_dict(), "lr_scheduler", tensors)
                schedule = {"class": class_name(lr_scheduler), "state": state}
        added = _added(holdings)
        rng_tensors, rng_numbers = rng.capture(comm.device)
        trained, scalars = _trained(holdings, own := dict[str, torch.Tensor]())
        entries += trained + (_untrained(holdings) if with_frozen else [])
        entries += [Entry(RNG, f"{comm.rank}.{name}", 0, tensor) for name, tensor in rng_tensors.items()]
        entries += [Entry(CLIENT, name, 0, tensor) for name, tensor in (tensors | own).items()]
        plan = plan_shard(entries, {"format": "pt", "deepzero_id": facts["id"], "rank": str(comm.rank)})
        parameters = [row for row in plan.rows if row.key not in (RNG, CLIENT, BUFFER) and not is_own_buffer(row.key)]
        stored = [(row.name, row.key, row.dtype) for row in parameters]
    everyone = process_group.all_gather_object((stored, scalars, rng_numbers, plan.bytes))
    dtypes: dict[str, dict[str, str]] = {}
    for rows, *_ in everyone:
        for name, key, dtype in rows:
            dtypes.setdefault(name, {})[key] = dtype
    states = {name: state for _, theirs, *_ in reversed(everyone) for name, state in theirs.items()}
    versions = {"deepzero": __version__, "torch": torch.__version__, "numpy": np.__version__}
    groups = [
        {k: _setting(holdings, k, v, f"optimizer group {n}, {k!r}") for k, v in group.items() if k != "params"}
        for n, group in enumerate(holdings.optimizer.param_groups)
    ]
    manifest = Manifest(
        **facts,
        written=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        versions={**versions, "python": platform.python_version(), "byteorder": sys.byteorder},
        world_size=comm.world_size,
        parameters=_parameters(holdings, dtypes, states),
        buffers={
            name: {"shape": list(buffer.shape), "dtype": DTYPES[buffer.dtype]} | ({"aliases": more} if more else {})
            for _, _, buffer, (name, *more) in holdings.named_buffers()
        },
        layout=[
            {
                "parameters": [plain_name(name) for name in group.names],
                "optimizer_group": group.optimizer_group,
                "world_size": group.layout.world_size,
                "slots": [[slot.offset, slot.numel] for slot in group.layout.slots],
                "buckets": [[bucket.offset, bucket.numel, bucket.shard_offset] for bucket in group.layout.buckets],
            }
            for group in (*holdings.groups, *holdings.frozen)
        ],
        optimizer={
            "class": class_name(holdings.optimizer),
            "groups": groups,
            "from_steps": sorted(holdings.from_steps),
            "own": added,
        },
        lr_scheduler=schedule,
        client_state=encoded_client,
        rng_numbers=[numbers for _, _, numbers, _ in everyone],
        files={},
    )
    return SavePlan(plan, manifest, sum(nbytes for *_, nbytes in everyone))


def _trained(holdings: EngineState, own: dict[str, torch.Tensor]) -> tuple[list[Entry], dict[str, Any]]:
    """This rank's masters and moments, and by name what the optimizer keeps for a parameter as a whole.

    Of the latter, tensors (Adafactor's rows and columns) are put into ``own``, each under a name of its own.
    """
    by_key: dict[str, list[Entry]] = {}  # so that what a reader wants of one key lies together
    scalars = {}
    for run in holdings.runs():
        moments, rest = holdings.optimizer_state(run)
        for key in (*moments, *rest):
            # The optimizer's own names stand beside ours in a row: one of ours would take the other's place.
            if not isinstance(key, str) or key in RESERVED or is_own_buffer(key):
                raise CheckpointError(
                    f"the optimizer calls what it keeps for parameter {run.name!r} {key!r}, a name that a checkpoint "
                    f"uses itself (or no name); let the optimizer use a string that is none of {', '.join(RESERVED)}"
                )
        for key, tensor in {MASTER: run.master, **moments}.items():
            by_key.setdefault(key, []).append(Entry(key, run.name, run.start, run.cut(tensor)))
        scalars[run.name] = {key: _scalar(v, f"optimizer state {key!r} of {run.name}", own) for key, v in rest.items()}
    return [entry for entries in by_key.values() for entry in entries], scalars


def _untrained(holdings: EngineState) -> list[Entry]:
    whole = {name: tensor for name, tensor in holdings.replicated().items() if tensor.numel()}
    owner = holdings.shares({name: tensor.nbytes for name, tensor in whole.items()})
    mine = [name for name in whole if owner[name] == holdings.comm.rank]
    entries = (Entry(PARAMETER, name, 0, whole[name].detach().contiguous().reshape(-1)) for name in mine)
    return [*holdings.frozen_runs(), *entries]


def _buffers(holdings: EngineState) -> list[Entry]:
    """Rank 0's, and of another rank those that differ (running statistics, each rank's own). A collective."""
    values = {name: buffer.detach().contiguous().reshape(-1) for name, buffer in holdings.buffers().items()}
    digests = {name: hashlib.sha256(bytes_of(tensor)).hexdigest() for name, tensor in values.items() if tensor.numel()}
    first, rank = process_group.broadcast_object(digests), holdings.comm.rank
    kept = [name for name, digest in digests.items() if rank == 0 or digest != first.get(name)]
    return [Entry(buffer_key(rank) if rank else BUFFER, name, 0, values[name].clone()) for name in kept]


def _scalar(value: Any, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    """A tensor of one element becomes a number with its dtype; a larger one is put into ``tensors``."""
    if torch.is_tensor(value) and value.numel() != 1:
        return encode(value, where, tensors)
    if torch.is_tensor(value):
        return {"dtype": DTYPES[value.dtype], "shape": list(value.shape), "value": _plain(value.item(), where)}
    encoded = _plain(value, where)
    # A dictionary of the optimizer's is told from a number with its dtype by the form that any keys may have.
    number_like = isinstance(encoded, dict) and "dtype" in encoded
    return {"$dict": [list(pair) for pair in encoded.items()]} if number_like else encoded


def _plain(value: Any, where: str) -> Any:
    """A value of the optimizer's in JSON. Its tensors would have no row, and what was saved could not be loaded."""
    tensors: dict[str, torch.Tensor] = {}
    encoded = encode(value, where, tensors)
    if tensors:
        what = f"{next(iter(tensors))} is a tensor"
        raise CheckpointError(f"{what}, which cannot be saved in a list or dictionary, nor as a setting of a group")
    return encoded


def _setting(holdings: EngineState, key: str, value: Any, where: str) -> Any:
    """A group's setting. A tensor of one element goes as a number; one that steps have put there has its dtype, too."""
    if torch.is_tensor(value) and value.numel() == 1:
        if key in holdings.from_steps and value.dtype in DTYPES:
            return {**_scalar(value, where, {}), "device": value.device.type}
        value = value.item()
    return _plain(value, where) if torch.is_tensor(value) else _scalar(value, where, {})


def _added(holdings: EngineState) -> Any:
    """What a class, or a hook, adds in ``state_dict()`` to torch's two entries, which are stored in other places.

    All of it or, with a warning, nothing: a tensor may be of a shard, which no other number of ranks could take.
    """
    tensors: dict[str, torch.Tensor] = {}
    try:
        whole = holdings.optimizer.state_dict().items()
        added = {key: value for key, value in whole if key not in ("state", "param_groups")}
        encoded = encode(added, "the optimizer's state_dict()", tensors)
        if tensors:
            raise CheckpointError(f"{next(iter(tensors))} is a tensor, which may be of this rank's shard alone")
    except Exception as error:  # a class of the caller's may raise anything; the rest can be saved
        if holdings.comm.rank == 0:
            _say_once(
                "what the optimizer's state_dict() has besides 'state' and 'param_groups' is not saved, all else is; "
                f"a run that loads the checkpoint keeps its own: {reason(error)}"
            )
        return {}
    return encoded


@cache
def _say_once(text: str) -> None:
    log.warning("%s", text)


def _parameters(
    holdings: EngineState, dtypes: dict[str, dict[str, str]], states: dict[str, Any]
) -> dict[str, ParameterInfo]:
    groups, found = holdings.trained(), {}
    for param, (name, *aliases) in holdings.names().items():
        group = groups.get(name)
        computed = group is not None and param.is_floating_point()
        if param.dtype not in DTYPES:
            raise CheckpointError(f"nothing was saved. {name!r} is {param.dtype}, which a checkpoint cannot hold")
        found[name] = ParameterInfo(
            shape=tuple(param.shape),
            dtype=DTYPES[holdings.compute_dtype if computed else param.dtype],
            trained=group is not None,
            optimizer_group=group.optimizer_group if group is not None else None,
            aliases=tuple(aliases),
            tensors=dtypes.get(name, {}),
            state=states.get(name, {}),
        )
    return found
