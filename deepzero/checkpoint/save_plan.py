"""Saving, first half: from an engine to the plan of a shard and the facts of a manifest. Nothing is written yet."""

from __future__ import annotations

import dataclasses
import hashlib
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import numpy as np
import torch

from deepzero.checkpoint import rng
from deepzero.checkpoint.engine_state import EngineState, plain_name
from deepzero.checkpoint.errors import CheckpointError, reason
from deepzero.checkpoint.json_codec import DTYPES, encode
from deepzero.checkpoint.manifest import (
    BUFFER,
    CLIENT,
    MASTER,
    PARAMETER,
    RESERVED,
    RNG,
    Manifest,
    ParameterInfo,
    ShardInfo,
)
from deepzero.checkpoint.shard_file import Entry, ShardPlan, bytes_of, plan_shard
from deepzero.comm import process_group


@dataclass(frozen=True)
class TrainingState:
    """What an engine tells besides its tensors; see :class:`Manifest` for the fields of the same names."""

    zero_stage: int
    precision: str
    batch: dict[str, int]
    counters: dict[str, int]
    loss_scaler: dict[str, Any]
    lr_scheduler: Any
    """An object with ``state_dict()``, or None."""
    config: dict[str, Any]
    deepzero_version: str


@dataclass(frozen=True)
class _RankPlan:
    """What one rank tells the others."""

    rows: list[tuple[str, str, str]]
    """(key, name, dtype)."""
    scalars: dict[str, Any]
    rng_numbers: dict[str, Any]
    bytes: int


@dataclass(frozen=True)
class SavePlan:
    """What a save needs to know."""

    plan: ShardPlan
    """Of this rank's shard, over the live tensors."""
    manifest: Manifest
    """Without files; the same on all ranks but for what only rank 0 has (client state, schedule)."""
    total_bytes: int
    """Of all shards."""


def collect(
    holdings: EngineState,
    facts: TrainingState,
    client_state: Mapping[str, Any],
    save_id: str,
    tag: str,
    with_frozen: bool,
) -> SavePlan:
    """Plan the shards. A collective; nothing is written.

    Args:
        holdings: the model state.
        facts: the rest.
        client_state: the caller's; rank 0's counts.
        save_id: of this save.
        tag: its name.
        with_frozen: store parameters that are not trained.

    Raises:
        CheckpointError: on every rank, when one has something that a checkpoint cannot hold.
    """
    comm = holdings.comm
    entries = _buffers(holdings)
    tensors: dict[str, torch.Tensor] = {}
    encoded_client = schedule = problem = None
    try:
        if comm.rank == 0:
            encoded_client = encode(dict(client_state), "client_state", tensors)
            schedule = _schedule(facts.lr_scheduler, tensors)
        rng_tensors, rng_numbers = rng.capture(comm.device)
        entries += [*_trained(holdings), *(_untrained(holdings) if with_frozen else ())]
        entries += [Entry(RNG, f"{comm.rank}.{name}", 0, tensor) for name, tensor in rng_tensors.items()]
        entries += [Entry(CLIENT, name, 0, tensor) for name, tensor in tensors.items()]
        plan = plan_shard(entries, {"format": "pt", "deepzero_id": save_id, "rank": str(comm.rank)})
        names = [(row.key, row.name, row.dtype) for row in plan.rows]
        mine = _RankPlan(names, _scalars(holdings), rng_numbers, plan.bytes)
    except Exception as error:  # a caller's object may raise anything; the other ranks wait
        problem = reason(error)
    process_group.raise_on_all_ranks(problem, lambda text: CheckpointError(f"nothing was saved. {text}"))
    everyone: list[_RankPlan] = process_group.all_gather_object(mine)
    manifest = _manifest(holdings, facts, save_id, tag, everyone)
    manifest = dataclasses.replace(manifest, client_state=encoded_client, lr_scheduler=schedule)
    return SavePlan(plan, manifest, sum(theirs.bytes for theirs in everyone))


def _manifest(
    holdings: EngineState, facts: TrainingState, save_id: str, tag: str, everyone: list[_RankPlan]
) -> Manifest:
    stored: dict[str, dict[str, str]] = {}
    for theirs in everyone:
        for key, name, dtype in theirs.rows:
            if key not in (RNG, CLIENT, BUFFER) and not key.startswith(f"{BUFFER}-of-rank-"):
                stored.setdefault(name, {})[key] = dtype
    merged = {name: state for theirs in reversed(everyone) for name, state in theirs.scalars.items()}
    versions = {"deepzero": facts.deepzero_version, "torch": torch.__version__, "numpy": np.__version__}
    groups = [
        {key: _plain(value, f"optimizer group {number}, {key!r}") for key, value in _settings(group).items()}
        for number, group in enumerate(holdings.optimizer.param_groups)
    ]
    buffers = {
        name: {"shape": list(buffer.shape), "dtype": DTYPES[buffer.dtype]}
        for name, buffer in holdings.buffers().items()
    }
    return Manifest(
        id=save_id,
        tag=tag,
        written=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        versions={**versions, "python": platform.python_version(), "byteorder": sys.byteorder},
        world_size=holdings.comm.world_size,
        zero_stage=facts.zero_stage,
        precision=facts.precision,
        batch=facts.batch,
        counters=facts.counters,
        parameters=_parameters(holdings, stored, merged),
        buffers=buffers,
        layout=[_layout(group) for group in (*holdings.groups, *holdings.frozen)],
        optimizer={"class": class_name(holdings.optimizer), "groups": groups},
        lr_scheduler=None,
        loss_scaler=facts.loss_scaler,
        client_state=None,
        rng_numbers=[theirs.rng_numbers for theirs in everyone],
        config=facts.config,
        files={},
    )


def with_files(manifest: Manifest, files: Mapping[str, ShardInfo]) -> Manifest:
    """The manifest, complete."""
    return dataclasses.replace(manifest, files=dict(files))


def _trained(holdings: EngineState) -> list[Entry]:
    """Key by key, so that what a reader wants of one key lies together."""
    by_key: dict[str, list[Entry]] = {}
    for group in holdings.groups:
        for run in holdings.runs(group):
            moments = holdings.moments(run)
            _check_keys(moments, run.name)
            for key, tensor in {MASTER: run.master, **moments}.items():
                by_key.setdefault(key, []).append(Entry(key, run.name, run.start, run.cut(tensor)))
    return [entry for entries in by_key.values() for entry in entries]


def _check_keys(state: Mapping[Any, Any], name: str) -> None:
    """The optimizer's own names stand beside ours in a row: one of ours would take the other's place."""
    for key in state:
        if not isinstance(key, str) or key in RESERVED or key.startswith(f"{BUFFER}-of-rank-"):
            raise CheckpointError(
                f"the optimizer calls what it keeps for parameter {name!r} {key!r}, a name that a checkpoint uses "
                f"itself (or no name); let the optimizer use a string that is none of {', '.join(RESERVED)}"
            )


def _untrained(holdings: EngineState) -> list[Entry]:
    entries = [Entry(PARAMETER, name, piece.start, shard) for name, piece, shard in holdings.frozen_runs()]
    whole = {name: tensor for name, tensor in holdings.replicated().items() if tensor.numel()}
    owner = holdings.shares({name: tensor.nbytes for name, tensor in whole.items()})
    mine = [name for name in whole if owner[name] == holdings.comm.rank]
    return entries + [Entry(PARAMETER, name, 0, whole[name].detach().contiguous().reshape(-1)) for name in mine]


def buffer_key(rank: int) -> str:
    """The key of a buffer that is another on ``rank`` than on rank 0."""
    return f"{BUFFER}-of-rank-{rank}"


def _buffers(holdings: EngineState) -> list[Entry]:
    """Rank 0's, and of another rank those that differ (running statistics, each rank's own). A collective."""
    flat = {name: buffer.detach().contiguous().reshape(-1) for name, buffer in holdings.buffers().items()}
    digests = {name: hashlib.sha256(bytes_of(tensor)).hexdigest() for name, tensor in flat.items() if tensor.numel()}
    first = process_group.broadcast_object(digests)
    rank = holdings.comm.rank
    if rank == 0:
        return [Entry(BUFFER, name, 0, flat[name].clone()) for name in digests]
    differs = [name for name, digest in digests.items() if digest != first.get(name)]
    return [Entry(buffer_key(rank), name, 0, flat[name].clone()) for name in differs]


def _scalars(holdings: EngineState) -> dict[str, Any]:
    """Of each parameter that this rank has a run of; 0-dimensional tensors become numbers with their dtype."""
    found = {}
    for group in holdings.groups:
        for run in holdings.runs(group):
            state = holdings.scalars(run)
            _check_keys(state, run.name)
            values = {key: _scalar(value, f"optimizer state {key!r} of {run.name}") for key, value in state.items()}
            found[run.name] = values
    return found


def _scalar(value: Any, where: str) -> Any:
    if torch.is_tensor(value):
        return {"dtype": DTYPES[value.dtype], "shape": list(value.shape), "value": _plain(value.item(), where)}
    return _plain(value, where)


def _plain(value: Any, where: str) -> Any:
    """A value of the optimizer's in JSON. Its tensors would have no row, and what was saved could not be loaded."""
    tensors: dict[str, torch.Tensor] = {}
    encoded = encode(value, where, tensors)
    if tensors:
        raise CheckpointError(f"{next(iter(tensors))} is a tensor inside of a list; such a setting cannot be saved")
    return encoded


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """A param group without its parameters; numbers that are tensors (a capturable learning rate) as numbers."""
    return {k: v.item() if torch.is_tensor(v) and v.numel() == 1 else v for k, v in group.items() if k != "params"}


def _schedule(scheduler: Any, tensors: dict[str, torch.Tensor]) -> dict[str, Any] | None:
    if scheduler is None or not callable(getattr(scheduler, "state_dict", None)):
        return None
    return {"class": class_name(scheduler), "state": encode(scheduler.state_dict(), "lr_scheduler", tensors)}


def class_name(thing: Any) -> str:
    """Module and name of an object's class."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _parameters(
    holdings: EngineState, stored: dict[str, dict[str, str]], scalars: dict[str, Any]
) -> dict[str, ParameterInfo]:
    group_of = {name: group.optimizer_group for name, (group, _) in holdings.trained().items()}
    found = {}
    for param, (name, *aliases) in holdings.names().items():
        trained = name in group_of
        floating = param.is_floating_point()
        found[name] = ParameterInfo(
            shape=tuple(param.shape),
            dtype=DTYPES[holdings.compute_dtype if trained and floating else param.dtype],
            trained=trained,
            optimizer_group=group_of.get(name),
            aliases=tuple(aliases),
            tensors=stored.get(name, {}),
            state=scalars.get(name, {}),
        )
    return found


def _layout(group: Any) -> dict[str, Any]:
    return {
        "parameters": [plain_name(name) for name in group.names],
        "optimizer_group": group.optimizer_group,
        "world_size": group.layout.world_size,
        "slots": [[slot.offset, slot.numel] for slot in group.layout.slots],
        "buckets": [[i.offset, i.numel, i.shard_offset] for i in group.layout.buckets],
    }
