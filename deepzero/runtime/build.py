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
from deepzero.layout import FlatLayout, interval_limit, plan_layout
from deepzero.runtime.closed_forms import (
    Counts,
    StateSizes,
    moment_bytes_per_element,
    padding_memory,
    predicted_memory,
    predicted_traffic,
)
from deepzero.runtime.optimizers import allocate_state
from deepzero.runtime.zero.build_stage3 import Partitioning, partition_model, place_buffers
from deepzero.runtime.zero.flat_group import FlatGroup, check_unclaimed
from deepzero.runtime.zero.gradients import GradientSource, ParameterGroup, schedule
from deepzero.runtime.zero.stage3 import ZeroStage3
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


def choose_parameters(
    names: dict[nn.Parameter, str], arrival: dict[nn.Parameter, int], optimizer: torch.optim.Optimizer
) -> list[list[nn.Parameter]]:
    """The trainable parameters of each optimizer group, in the order in which their gradients are expected.

    Raises:
        ConfigError: the optimizer holds tensors that are not trainable parameters of the model, or one of them twice.
    """
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
    if not any(param.numel() for params in chosen for param in params):
        raise ConfigError("the optimizer holds no trainable parameter; ZeRO has nothing to partition")
    return chosen


def build_groups(
    names: dict[nn.Parameter, str],
    chosen: Sequence[Sequence[nn.Parameter]],
    config: EngineConfig,
    comm: Communicator,
    dtype: torch.dtype,
) -> list[FlatGroup]:
    """Stages 0-2: plan the layout and move the trainable parameters into it, one group per optimizer group."""
    total = sum(param.numel() for params in chosen for param in params)
    limit = interval_limit(total, config.zero.reduce_bucket_size, config.zero.allgather_bucket_size)
    groups = []
    for index, params in enumerate(chosen):
        if params:
            layout = plan_layout([p.numel() for p in params], comm.world_size, limit)
            whole = config.zero.stage == 0
            labels = [names[p] for p in params]
            groups.append(FlatGroup(labels, params, layout, dtype, comm.device, comm.rank, whole, index))
    return groups


def hand_over_masters(optimizer: torch.optim.Optimizer, groups: Sequence[ParameterGroup]) -> None:
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


def _cut_state(optimizer: torch.optim.Optimizer, group: ParameterGroup, states: list[dict[str, Any]]) -> None:
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

    groups: list[ParameterGroup]
    source: GradientSource
    reducer: BucketReducer
    stage: ZeroStage0 | ZeroStage1And2 | ZeroStage3
    dtypes: Dtypes
    moment_bytes: int
    partitioning: Partitioning | None
    """Stage 3's."""


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
    stage = config.zero.stage
    names = {param: name for name, param in model.named_parameters()}
    # Autograd reaches the last layer first. Registration order backwards is the best guess without a run.
    arrival = {param: place for place, param in enumerate(reversed(list(names)))}
    check_unclaimed(names)
    chosen = choose_parameters(names, arrival, optimizer)
    moment_bytes = moment_bytes_per_element(optimizer, comm.device)
    partitioning: Partitioning | None = None
    groups: list[ParameterGroup]
    if stage == 3:
        place_buffers(model, comm)
        partitioning = partition_model(model, names, chosen, config.zero, comm, dtypes.compute)
        groups = partitioning.groups
    else:
        place_model(model, comm)
        cast_frozen(model, dtypes.compute)
        groups = list(build_groups(names, chosen, config, comm, dtypes.compute))
    hand_over_masters(optimizer, groups)
    allocate_state(optimizer)
    # Only gradients that stay whole over several micro-batches need a wider place to be summed in.
    source = GradientSource(groups, dtypes.accumulation if stage < 2 and micro_batches > 1 else None)
    reducer = _build_reducer(groups, config, comm, dtypes)
    order, overlap = schedule(groups, arrival), config.zero.overlap_comm
    engine_stage: ZeroStage0 | ZeroStage1And2 | ZeroStage3
    if partitioning is not None:
        engine_stage = ZeroStage3(
            model, groups, partitioning.frozen, order, source, reducer, comm,
            partitioning.coordinator, dtypes.accumulation,
        )  # fmt: skip
    elif stage == 0:
        engine_stage = ZeroStage0(_flat(groups), order, source, reducer, dtypes.accumulation)
    else:
        engine_stage = ZeroStage1And2(
            _flat(groups), order, source, reducer, comm, stage == 2, overlap, dtypes.accumulation
        )
    built = Built(groups, source, reducer, engine_stage, dtypes, moment_bytes, partitioning)
    _open_ledger(built, optimizer, config, comm, micro_batches)
    return built


def _flat(groups: Sequence[ParameterGroup]) -> list[FlatGroup]:
    return [group for group in groups if isinstance(group, FlatGroup)]


def _build_reducer(
    groups: Sequence[ParameterGroup], config: EngineConfig, comm: Communicator, dtypes: Dtypes
) -> BucketReducer:
    method = config.comm.reduce or ("native" if comm.backend == "nccl" else "exact")
    whole = config.zero.stage == 0 or not config.zero.reduce_scatter
    capacity = max(group.layout.largest_interval for group in groups)
    depth = 2 if config.zero.overlap_comm and comm.world_size > 1 else 1
    return BucketReducer(comm, capacity, dtypes.wire, method, whole, depth)


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
    persistent, frozen = _layouts_of_stage3(built)
    counts = Counts.of(layouts, persistent, frozen)
    padding = padding_memory(counts, comm.world_size, sizes)
    memory = {**predicted_memory(counts.true, comm.world_size, sizes), "buckets": built.reducer.buffer_bytes()}
    traffic = predicted_traffic(layouts, comm.world_size, sizes, persistent, frozen)
    ledger.predict({**memory, "padding": sum(padding.values())}, traffic)

    def moments() -> list[torch.Tensor]:
        return [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)]

    stores = [*built.groups, *(built.partitioning.frozen if built.partitioning is not None else ())]
    ledger.watch("parameters", lambda: [group.parameter_storage for group in stores], padding["parameters"])
    ledger.watch("masters", lambda: [group.master_storage for group in built.groups], padding["masters"])
    ledger.watch("gradients", built.stage.gradients.held_gradients, padding["gradients"])
    ledger.watch("moments", moments, padding["moments"])
    ledger.watch("buckets", built.reducer.buffers)
    if built.partitioning is not None:
        ledger.watch("gathered", built.partitioning.pool.buffers)


def _layouts_of_stage3(built: Built) -> tuple[list[FlatLayout], list[FlatLayout]]:
    """Layouts of persistent and of frozen parameters."""
    if built.partitioning is None:
        return [], []
    frozen = [group.layout for group in built.partitioning.frozen]
    return [group.layout for group in built.groups if isinstance(group, FlatGroup)], frozen
