"""Step 0 of a training step, build: from a model and an optimizer to ZeRO's tensors.

In order: move and broadcast the parameters · plan the layout over them in the order their gradients will arrive · move
them into flat buffers · hand the optimizer the masters instead · allocate its state, so that running out of memory
happens now.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deepzero.comm.bucket import BucketReducer
from deepzero.comm.collectives import Communicator
from deepzero.config.engine import EngineConfig
from deepzero.config.parse import ConfigError
from deepzero.layout import interval_limit, plan_layout
from deepzero.runtime.closed_forms import (
    StateSizes,
    moment_bytes_per_element,
    padding_memory,
    predicted_memory,
    predicted_traffic,
)
from deepzero.runtime.optimizers import allocate_state
from deepzero.runtime.zero.flat_group import FlatGroup
from deepzero.runtime.zero.gradients import GradientSource, schedule
from deepzero.runtime.zero.stage_0 import ZeroStage0
from deepzero.runtime.zero.stage_1_and_2 import ZeroStage1And2

log = logging.getLogger(__name__)

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Dtypes:
    """Three settings, not one: what the model computes in, what travels, what gradients are summed in."""

    compute: torch.dtype
    wire: torch.dtype
    accumulation: torch.dtype

    @classmethod
    def of(cls, config: EngineConfig) -> Dtypes:
        """The compute dtype is also the wire dtype unless ``communication_data_type`` says otherwise."""
        compute = TORCH_DTYPES[config.precision.dtype]
        wire = TORCH_DTYPES[config.communication_data_type or config.precision.dtype]
        return cls(compute, wire, TORCH_DTYPES[config.grad_accum_dtype])


def place_model(model: nn.Module, comm: Communicator) -> None:
    """Move the model to its device, and give every rank rank 0's values.

    Parameters travel before they are cast, so that masters start from rank 0's full-precision values. Buffers keep
    their dtype, as in DeepSpeed.
    """
    model.to(comm.device)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if not tensor.is_contiguous():
                tensor.data = tensor.data.contiguous()
            comm.broadcast("setup.broadcast", tensor.data)


def cast_frozen(model: nn.Module, dtype: torch.dtype) -> None:
    """Frozen parameters have no master and no place in the layout; they are cast where they are."""
    for param in model.parameters():
        if not param.requires_grad and param.is_floating_point():
            param.data = param.data.to(dtype)


def build_groups(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: EngineConfig, comm: Communicator, dtype: torch.dtype
) -> tuple[list[FlatGroup], dict[nn.Parameter, int]]:
    """Plan the layout and move the trainable parameters into it, one group per optimizer group.

    Returns:
        The groups, and for every parameter its place in the expected order of arrival.

    Raises:
        ConfigError: the optimizer holds tensors that are not trainable parameters of ``model``, or one of them twice.
    """
    names = {param: name for name, param in model.named_parameters()}
    # Autograd reaches the last layer first. Registration order backwards is the best guess without a run.
    arrival = {param: place for place, param in enumerate(reversed(list(names)))}
    seen: set[nn.Parameter] = set()
    chosen: list[list[nn.Parameter]] = []
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if param not in names:
                raise ConfigError(
                    f"optimizer group {index} holds a tensor of shape {tuple(param.shape)} that is not a parameter of "
                    "the model given to initialize; build the optimizer from model.parameters()"
                )
            if param in seen:
                raise ConfigError(f"parameter {names[param]!r} is in the optimizer twice")
            seen.add(param)
        chosen.append(sorted((p for p in group["params"] if p.requires_grad), key=arrival.__getitem__))
    left_out = [name for param, name in names.items() if param.requires_grad and param not in seen]
    if left_out:
        log.warning(
            "%d trainable parameters are in no optimizer group and will not change: %s …", len(left_out), left_out[0]
        )
    total = sum(param.numel() for params in chosen for param in params)
    if total == 0:
        raise ConfigError("the optimizer holds no trainable parameter; ZeRO has nothing to partition")
    limit = interval_limit(total, config.zero.reduce_bucket_size, config.zero.allgather_bucket_size)
    groups = []
    for index, params in enumerate(chosen):
        if params:
            layout = plan_layout([p.numel() for p in params], comm.world_size, limit)
            whole = config.zero.stage == 0
            labels = [names[p] for p in params]
            groups.append(FlatGroup(labels, params, layout, dtype, comm.device, comm.rank, whole, index))
    return groups, arrival


def hand_over_masters(optimizer: torch.optim.Optimizer, groups: Sequence[FlatGroup]) -> None:
    """The optimizer sees only the masters from now on; what state it had is cut the same way.

    Optimizers that make state when they are constructed (Adagrad), or that were loaded, keep it: state of a parameter's
    extent is laid out and cut as the parameter is, in fp32; a number is carried over.
    """
    old_state = dict(optimizer.state)
    for group in optimizer.param_groups:
        group["params"] = []
    for flat_group in groups:
        optimizer.param_groups[flat_group.optimizer_group]["params"].extend(flat_group.masters)
    optimizer.state.clear()
    for flat_group in groups:
        states = [old_state.get(param) for param in flat_group.params]
        if any(states):
            _cut_state(optimizer, flat_group, [state or {} for state in states])


def _cut_state(optimizer: torch.optim.Optimizer, group: FlatGroup, states: list[dict[str, Any]]) -> None:
    """Cut one group's optimizer state as its parameters are cut."""
    for piece, master in zip(group.pieces, group.masters, strict=True):
        for key, value in states[piece.slot.index].items():
            if torch.is_tensor(value) and value.dim() > 0 and value.numel() == piece.slot.numel:
                cut = value.reshape(-1)[piece.start : piece.start + piece.numel]
                value = cut.to(device=group.device, dtype=torch.float32, copy=True)
            elif torch.is_tensor(value):
                value = value.clone()
            optimizer.state[master][key] = value


@dataclass(frozen=True)
class Built:
    """What step 0 leaves behind."""

    groups: list[FlatGroup]
    source: GradientSource
    reducer: BucketReducer
    stage: ZeroStage0 | ZeroStage1And2
    dtypes: Dtypes
    moment_bytes: int


def build_zero(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: EngineConfig, comm: Communicator, micro_batches: int
) -> Built:
    """Step 0: everything that has to stand before the first forward pass.

    Args:
        model: on any device; afterwards on ``comm.device``, its trainable parameters views of flat buffers.
        optimizer: over parameters of ``model``; afterwards over this rank's masters.
        config: the settings.
        comm: the ranks.
        micro_batches: accumulation steps.

    Raises:
        ConfigError: an optimizer that is not elementwise, or that does not fit the model.
    """
    dtypes = Dtypes.of(config)
    place_model(model, comm)
    cast_frozen(model, dtypes.compute)
    groups, arrival = build_groups(model, optimizer, config, comm, dtypes.compute)
    moment_bytes = moment_bytes_per_element(optimizer, comm.device)
    hand_over_masters(optimizer, groups)
    allocate_state(optimizer)
    order = schedule(groups, arrival)
    stage = config.zero.stage
    # Only gradients that stay whole over several micro-batches need a wider place to be summed in.
    wider = dtypes.accumulation if stage < 2 and micro_batches > 1 else None
    source = GradientSource(groups, wider)
    method = config.comm.reduce or ("native" if comm.backend == "nccl" else "exact")
    whole = stage == 0 or not config.zero.reduce_scatter
    capacity = max(group.layout.largest_interval for group in groups)
    depth = 2 if config.zero.overlap_comm and comm.world_size > 1 else 1
    reducer = BucketReducer(comm, capacity, dtypes.wire, method, whole, depth)
    engine_stage: ZeroStage0 | ZeroStage1And2
    if stage == 0:
        engine_stage = ZeroStage0(groups, order, source, reducer, dtypes.accumulation)
    else:
        overlap = config.zero.overlap_comm
        engine_stage = ZeroStage1And2(groups, order, source, reducer, comm, stage == 2, overlap, dtypes.accumulation)
    built = Built(groups, source, reducer, engine_stage, dtypes, moment_bytes)
    _open_ledger(built, optimizer, config, comm, micro_batches)
    return built


def _open_ledger(
    built: Built, optimizer: torch.optim.Optimizer, config: EngineConfig, comm: Communicator, micro_batches: int
) -> None:
    """Put the closed forms in, and say which tensors are measured against them."""
    ledger, dtypes = comm.ledger, built.dtypes
    sizes = StateSizes(
        compute=dtypes.compute.itemsize,
        accumulation=dtypes.accumulation.itemsize,
        moments=built.moment_bytes,
        wire=dtypes.wire.itemsize,
        stage=config.zero.stage,
        overlap=config.zero.overlap_comm,
        micro_batches=micro_batches,
        whole_reduce=built.reducer.whole,
        exact=built.reducer.method == "exact",
    )
    layouts = [group.layout for group in built.groups]
    numel = sum(layout.numel for layout in layouts)
    padding = padding_memory(sum(layout.padded_numel for layout in layouts) - numel, comm.world_size, sizes)
    memory = {**predicted_memory(numel, comm.world_size, sizes), "buckets": built.reducer.buffer_bytes()}
    ledger.predict({**memory, "padding": sum(padding.values())}, predicted_traffic(layouts, comm.world_size, sizes))

    def moments() -> list[torch.Tensor]:
        return [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)]

    ledger.watch("parameters", lambda: [group.flat_P for group in built.groups], padding["parameters"])
    ledger.watch("masters", lambda: [group.master_storage for group in built.groups], padding["masters"])
    ledger.watch("gradients", built.stage.held_gradients, padding["gradients"])
    ledger.watch("moments", moments, padding["moments"])
    ledger.watch("buckets", built.reducer.buffers)
