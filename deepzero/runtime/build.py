"""Step 0 of a training step, build: from a model and an optimizer to ZeRO's tensors, in :func:`build_zero`.

In order: plan the layout over the parameters in the order their gradients will arrive · one by one, move, broadcast and
cut them, into flat buffers (stages 0-2) or shards (stage 3) · hand the optimizer the masters instead · allocate its
state, so that running out of memory happens now · put together what the later steps run through.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deepzero.comm.collectives import Communicator
from deepzero.comm.ledger import Ledger
from deepzero.comm.quantized_reduce import QuantizedReduce
from deepzero.comm.reduce_scatter import BucketReducer
from deepzero.config.engine import EngineConfig
from deepzero.config.strict import ConfigError
from deepzero.config.zero import ZeroConfig
from deepzero.device import accelerator_of
from deepzero.layout import choose_bucket_limit
from deepzero.offload.cpu_adam import CPUAdam
from deepzero.offload.offload_plan import agree_on_kernel, build_host, plan_offload
from deepzero.offload.optimizer_offload import Offload
from deepzero.placement import GroupPlan
from deepzero.runtime.consistency import TrainedParameters, place_buffers
from deepzero.runtime.elementwise_check import is_per_element
from deepzero.runtime.memory_model import build_ledger, predict_unquantized
from deepzero.runtime.optimizer_state import allocate_state, moment_bytes
from deepzero.runtime.per_tensor import StateBytes, is_per_tensor, plan_group
from deepzero.runtime.quantization_monitor import QuantizationMonitor
from deepzero.runtime.zero.gradient_reduction import GradientReducer, UnreducedGradients, reduce_order
from deepzero.runtime.zero.guards import check_unclaimed, lost_on_error
from deepzero.runtime.zero.optimizer_shard import OptimizerShard
from deepzero.runtime.zero.overlap_param_gather import OverlappedZeroStage1And2, OverlappedZeroStage3
from deepzero.runtime.zero.partition_plan import is_real, plan_partitioning
from deepzero.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepzero.runtime.zero.stage3 import ZeroStage3, partition_model
from deepzero.runtime.zero.stage_1_and_2 import ParamGroup, ZeroStage1And2, move_whole
from deepzero.runtime.zero.zeropp import build_quantizer

log = logging.getLogger(__name__)

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Dtypes:
    """The dtypes in which the model computes, in which gradients travel, and in which they are summed."""

    compute: torch.dtype
    wire: torch.dtype
    accumulation: torch.dtype

    @classmethod
    def of(cls, config: EngineConfig, world_size: int | None = None) -> Dtypes:
        """Gradients travel in ``communication_data_type``; by default, and with one rank, in the compute dtype."""
        compute = config.precision.dtype
        wire = (config.communication_data_type if world_size != 1 else None) or compute
        return cls(*(TORCH_DTYPES[name] for name in (compute, wire, config.grad_accum_dtype)))

    def cast(self, value: Any) -> Any:
        """An input of the model: a tensor of floats in the compute dtype, anything else as it is."""
        return value.to(self.compute) if torch.is_tensor(value) and value.is_floating_point() else value


@dataclass(frozen=True)
class ZeroComponents:
    """What step 0 leaves behind."""

    groups: list[ParamGroup]
    bucket_reducer: BucketReducer
    stage: ZeroStage1And2
    dtypes: Dtypes
    moments: list[StateBytes]
    """Of each optimizer group: what it keeps for a parameter."""
    offload: Offload | None
    """What lives in host memory, if anything does."""
    optimizer_shard: OptimizerShard
    """5: the optimizer over this rank's masters."""
    trained: TrainedParameters
    """Checked before every step: the same parameters train as at build."""
    meter: QuantizationMonitor | None = None
    """Of what is quantised, if anything is."""
    bytes_at_build: int = 0
    """In use on the device when everything stood."""

    @property
    def stage3(self) -> ZeroStage3 | None:
        """The stage, if its parameters are partitioned."""
        return self.stage if isinstance(self.stage, ZeroStage3) else None

    @property
    def all_groups(self) -> list[ParamGroup]:
        """All groups, those that are not trained (stage 3) too."""
        return [*self.groups, *(self.stage3.frozen_groups if self.stage3 is not None else ())]

    def offload_report(self) -> dict[str, dict[str, float]]:
        """This rank's pipeline between device and host in the last step, part by part; empty without offload.

        For ``gradients_to_host``, ``gradients_to_device`` (sums that are added to), ``optimizer_step``,
        ``parameters_to_device`` and ``parameters_fetch``: ``bytes``, ``seconds`` under way, ``gb_per_second``, and
        ``hidden``, the part of those seconds (0 to 1) in which program and compute stream both went on. Without a GPU
        only a delayed update is hidden.
        """
        if self.offload is None:
            return {}
        legs = self.offload.copier.meter.last_step
        return {kind.removeprefix("offload."): leg.as_dict() for kind, leg in legs.items()}

    def forget_residuals(self) -> None:
        """Drop what quantisation has kept and measured of gradients that are not used."""
        self.bucket_reducer.forget_residuals()
        if self.meter is not None:
            self.meter.restart()

    def drop_step(self, ledger: Ledger) -> None:
        """An optimizer step is not taken: what belongs to it is forgotten, the books are closed."""
        self.forget_residuals()
        ledger.close_step()

    def close_step(self, ledger: Ledger, applied: bool) -> None:
        """An optimizer step is complete: measure what is due, close the books."""
        if self.meter is not None:
            self.meter.close_step(applied)
        ledger.close_step()
        if self.offload is not None:
            self.offload.copier.close_step()

    def close(self) -> None:
        """The engine is destroyed: host memory is unlocked, and goes back to the system with its last tensor."""
        if self.offload is not None:
            self.offload.close()
        if self.stage3 is not None:
            self.stage3.coordinator.clear()


def build_zero(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: EngineConfig, comm: Communicator, micro_batches: int
) -> ZeroComponents:
    """Step 0: everything that has to stand before the first forward pass.

    ``model`` may be on any device; afterwards it is on ``comm.device``, its trainable parameters views of flat buffers,
    in stage 3 placeholders. ``optimizer`` is over parameters of ``model``; afterwards over this rank's masters.
    """
    dtypes, settings = Dtypes.of(config, comm.world_size), config.zero
    names = {param: name for name, param in model.named_parameters()}
    # Autograd reaches the last layer first. Registration order backwards is the best guess without a run.
    arrival = {param: place for place, param in enumerate(reversed(list(names)))}

    # ---- plan, from sizes alone: what can be refused is refused before a tensor has moved
    check_unclaimed(names)
    chosen = choose_parameters(names, arrival, optimizer)
    # What state an optimizer keeps is found by trying it: on the CPU where that will step, or where the device is meta.
    on_cpu = settings.offload_optimizer.device != "none" or comm.device.type == "meta"
    steps_on = torch.device("cpu") if on_cpu else comm.device
    moments = [moment_bytes(optimizer, steps_on, index) for index in range(len(optimizer.param_groups))]
    per_tensor = {index for index, group in enumerate(optimizer.param_groups) if is_per_tensor(optimizer, group)}
    if settings.stage == 3:
        planned, lookahead = plan_partitioning(names, chosen, settings, comm.world_size, per_tensor)
    else:
        planned, lookahead = plan_groups(chosen, config, comm.world_size, per_tensor), 0
    planned = plan_offload(planned, settings, dtypes.compute)
    # A second bucket is filled while the first is under way; with one rank, or without overlap, none ever is.
    depth = 2 if settings.overlap_comm and comm.world_size > 1 else 1
    # The arena comes before the parameters are cut: masters and shards are carved from it as they are made.
    offload = build_host(
        planned, settings, comm, (dtypes.compute, dtypes.accumulation),
        [kept.per_element for kept in moments], depth, optimizer,
    )  # fmt: skip

    # ---- move: once parameters have been cut, the model is of no use to anybody if an error ends this
    with lost_on_error(model):
        model.zero_grad()  # gradients from before belong to no step
        coordinator: PartitionedParameterCoordinator | None = None
        if settings.stage == 3:
            place_buffers(model, comm, dtypes.compute)
            host = (None, None) if offload is None else (offload.allocate, offload.plain_all_gather)
            all_groups, coordinator = partition_model(names, planned, lookahead, settings, comm, dtypes.compute, *host)
        else:
            all_groups = place_model(model, planned, config, comm, offload)
        groups = [group for group in all_groups if group.placement.trained]  # stage 3 has frozen ones, too
        if isinstance(optimizer, CPUAdam):
            agree_on_kernel(optimizer, dtypes.accumulation, dtypes.compute, planned, comm)
        # Its state is made for fragments of masters now, not in the first step: a run that does not fit ends here.
        set_optimizer_params(optimizer, groups)
        if offload is None:
            allocate_state(optimizer)
        else:
            offload.allocate_state(optimizer, groups)

        # ---- put together: gradients (3, 4), the optimizer's step (5), the stage that publishes (6)
        every_pass = settings.stage >= 2 or config.comm.world_size_invariant
        # Only gradients that stay whole over several micro-batches need a wider buffer in which they are summed.
        unreduced = UnreducedGradients(groups, None if every_pass or micro_batches == 1 else dtypes.accumulation)
        # One reducer and one launching order for all groups: ranks pair collectives by the order of their launches.
        reducer = _build_reducer(groups, config, comm, dtypes, depth)
        order = reduce_order(groups, arrival)
        shard = _build_optimizer_shard(optimizer, groups, config, reducer, dtypes, offload)
        gradients = GradientReducer(shard, order, unreduced, reducer, every_pass, settings.overlap_comm)
        stage = _build_stage(model, gradients, all_groups, coordinator, settings)
        if offload is not None and offload.shard is not None:
            # The CPU steps bucket by bucket; the parameters of one are published while it steps on the next.
            offload.shard.on_uploaded = stage.uploaded
        trained = TrainedParameters(model, groups)
        built = ZeroComponents(groups, reducer, stage, dtypes, moments, offload, shard, trained)
        build_ledger(built, optimizer, config, comm, micro_batches)
        monitor = QuantizationMonitor(
            groups, coordinator.buckets if coordinator is not None else [], reducer.strategy,
            settings.quantization, comm, lambda: predict_unquantized(built, comm, micro_batches),
        )  # fmt: skip
        in_use = accelerator_of(comm.device).memory_allocated(comm.device)
        return dataclasses.replace(built, meter=monitor if monitor.measures else None, bytes_at_build=in_use)


# ---- plan ------------------------------------------------------------------------------------------------------------


def check_params(names: dict[nn.Parameter, str], optimizer: torch.optim.Optimizer) -> set[nn.Parameter]:
    """All parameters of the optimizer, which have to be the model's, each once, and some of which have to train."""
    seen: set[nn.Parameter] = set()
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if param not in names:
                raise ConfigError(
                    f"optimizer group {index} holds a tensor of shape {tuple(param.shape)} that is not a parameter of "
                    "the model given to initialize; build the optimizer from model.parameters()"
                )
            if param in seen:
                raise ConfigError(f"parameter {names[param]!r} is in the optimizer twice; leave it out of one group")
            seen.add(param)
    if optimizer.param_groups and not any(param.requires_grad and param.numel() for param in seen):
        raise ConfigError("the optimizer holds no trainable parameter; set requires_grad, or give none to evaluate")
    return seen


def choose_parameters(
    names: dict[nn.Parameter, str], arrival: dict[nn.Parameter, int], optimizer: torch.optim.Optimizer
) -> list[list[nn.Parameter]]:
    """The trainable parameters of each optimizer group, in the order in which their gradients are expected."""
    seen = check_params(names, optimizer)
    if left_out := [name for param, name in names.items() if param.requires_grad and param not in seen]:
        log.warning(
            "%d trainable parameters are in no optimizer group and will not change: %s …", len(left_out), left_out[0]
        )
    # In the order of arrival neighbours share a bucket, which is complete, and leaves, while the pass goes on.
    return [
        sorted((p for p in group["params"] if p.requires_grad), key=arrival.__getitem__)
        for group in optimizer.param_groups
    ]


def plan_groups(
    chosen: Sequence[Sequence[nn.Parameter]], config: EngineConfig, world_size: int, per_tensor: Container[int] = ()
) -> list[GroupPlan]:
    """Stages 0-2: layouts of the trainable parameters, one for each optimizer group, some ``per_tensor``."""
    # One limit for all groups: buckets of a small group are not cut smaller than those of a large one.
    total = sum(param.numel() for params in chosen for param in params)
    limit = choose_bucket_limit(total, config.zero.reduce_bucket_size, config.zero.allgather_bucket_size)
    plan = lambda params, index: plan_group(params, world_size, limit, index in per_tensor, config.zero.shard_align)
    return [
        GroupPlan(params, plan(params, index), index, False, index in per_tensor)
        for index, params in enumerate(chosen)
        if params
    ]


# ---- move ------------------------------------------------------------------------------------------------------------


def place_model(
    model: nn.Module, planned: Sequence[GroupPlan], config: EngineConfig, comm: Communicator, offload: Offload | None
) -> list[ParamGroup]:
    """Stages 0-2: move the model to the device, with rank 0's values, the trainable parameters into flat buffers."""
    # ``_apply`` moves buffers, and lets a module do what else it does when it is moved; parameters stay where they are.
    # ``place_buffers`` then gives the buffers rank 0's values.
    moved: dict[torch.Tensor, torch.Tensor] = {}  # a buffer that two modules share stays one
    model._apply(lambda t: t if isinstance(t, nn.Parameter) else moved.setdefault(t, t.to(comm.device)))
    dtype, names = Dtypes.of(config).compute, {param: name for name, param in model.named_parameters()}
    place_buffers(model, comm, dtype)
    # Parameters in no group, frozen or not, have no master and no place in the layout; each is cast by itself.
    placed = {param for group in planned for param in group.params}
    for param in (p for p in names if p not in placed):
        move_whole(param, comm, dtype if is_real(param) else param.dtype)
    # Group by group: within one, the model's memory is freed before its masters and its flat buffer are taken.
    allocate, replicated = offload.allocate if offload is not None else None, config.zero.stage == 0
    return [ParamGroup([names[p] for p in group.params], group, dtype, comm, allocate, replicated) for group in planned]


def set_optimizer_params(optimizer: torch.optim.Optimizer, groups: Sequence[ParamGroup]) -> None:
    """The optimizer sees only the masters from now on; what state it had is cut the same way."""
    # What was made by the constructor (Adagrad) or loaded stays: cut as the parameter is, in fp32; a number as it is.
    old_state = dict(optimizer.state)
    optimizer.state.clear()
    for param_group in optimizer.param_groups:
        param_group["params"] = []
    for group in groups:
        optimizer.param_groups[group.optimizer_group]["params"].extend(group.masters)
        for fragment, master in zip(group.fragments, group.masters, strict=True):
            param = group.params[fragment.slot.index]
            for key, value in old_state.get(param, {}).items():
                if is_per_element(key, value, param.shape):
                    cut = value.reshape(-1)[fragment.start : fragment.start + fragment.numel].view(master.shape)
                    value = cut.to(device=master.device, dtype=torch.float32, copy=True)
                elif torch.is_tensor(value):
                    value = value.clone()
                optimizer.state[master][key] = value


# ---- put together ----------------------------------------------------------------------------------------------------


def _build_optimizer_shard(
    optimizer: torch.optim.Optimizer,
    groups: Sequence[ParamGroup],
    config: EngineConfig,
    reducer: BucketReducer,
    dtypes: Dtypes,
    offload: Offload | None,
) -> OptimizerShard:
    """The optimizer over this rank's masters, for step 5: on the device, on the host, or on both."""
    if offload is not None and reducer.comm.rank == 0:
        log.info(offload.describe(optimizer))
    build = OptimizerShard if offload is None else offload.build_shard
    sub_group_size = config.zero.sub_group_size if config.zero.stage == 3 else None
    # ``optimizer.step`` is looked up at each call: schedulers wrap it.
    one_pass = (lambda **given: optimizer.step(**given)) if isinstance(optimizer, CPUAdam) else None
    return build(
        optimizer, groups, dtypes.accumulation, reducer.comm.rank,
        whole_sums=reducer.whole_sums, sub_group_size=sub_group_size, one_pass=one_pass,
    )  # fmt: skip


def _build_stage(
    model: nn.Module, gradients: GradientReducer, groups: Sequence[ParamGroup],
    coordinator: PartitionedParameterCoordinator | None, settings: ZeroConfig,
) -> ZeroStage1And2:  # fmt: skip
    overlap = settings.overlap_param_gather and gradients.comm.world_size > 1
    if coordinator is not None:
        return (OverlappedZeroStage3 if overlap else ZeroStage3)(model, gradients, groups, coordinator)
    if overlap:
        return OverlappedZeroStage1And2(model, groups, gradients)
    return ZeroStage1And2(groups, gradients, gradients.comm)


def _build_reducer(
    groups: Sequence[ParamGroup], config: EngineConfig, comm: Communicator, dtypes: Dtypes, depth: int
) -> BucketReducer:
    quantization, strategy = config.zero.quantization, None
    if config.zero.zero_quantized_gradients and comm.world_size > 1:  # qgZ, where anything travels
        # Persistent parameters (norms, biases) are few bytes, and the most sensitive ones: several would share a scale,
        # though the magnitudes of their gradients have nothing to do with each other.
        exact = {g for g, group in enumerate(groups) if config.zero.stage == 3 and not group.placement.partitioned}
        layouts = [group.layout for group in groups]
        numel = 2 * sum(layout.padded_numel for layout in layouts)  # packed and unpacked in a step
        dtypes_on_the_way = {dtypes.wire, torch.float32}
        quantizer = build_quantizer(
            "gradients", quantization.gradient_bits, quantization, numel, dtypes_on_the_way, comm
        )
        strategy = QuantizedReduce(comm, layouts, dtypes.wire, quantizer, frozenset(exact), quantization.error_feedback)
    # NCCL sums in its own order, at its own speed; elsewhere exact sums are the faster ones too (docs/log.md).
    method = config.comm.reduce or ("native" if comm.backend == "nccl" and strategy is None else "exact")
    whole = config.zero.stage == 0 or not config.zero.reduce_scatter
    capacity = max((group.layout.largest_bucket for group in groups), default=0)
    return BucketReducer(comm, capacity, dtypes.wire, method, whole, depth, strategy=strategy)
