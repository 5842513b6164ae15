"""Stage 3's part of step 0: which parameters are partitioned, over which buckets, and with which limits."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from deepzero.comm.collectives import Communicator
from deepzero.config.zero import ZeroConfig
from deepzero.layout import FlatLayout, bucket_limit, plan_layout
from deepzero.offload.offload_plan import OffloadPlan
from deepzero.runtime.zero.buffer_pool import BufferPool
from deepzero.runtime.zero.fetch_plan import FetchLimits
from deepzero.runtime.zero.flat_param_group import FlatParamGroup, take_values
from deepzero.runtime.zero.grad_accumulator import ParamGroup
from deepzero.runtime.zero.offload_setup import GroupLayout
from deepzero.runtime.zero.parameter_all_gather import GatherConfig
from deepzero.runtime.zero.partition_parameters import PartitionedParameter
from deepzero.runtime.zero.partitioned_bucket import PartitionedBucket, send_to_replicas
from deepzero.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepzero.runtime.zero.partitioned_param_group import HostMemory, PartitionedParamGroup, unpartition
from deepzero.runtime.zero.zeropp import build_quantizer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Partitioning:
    """What step 0 of stage 3 leaves behind."""

    groups: list[ParamGroup]
    """Of trainable parameters: partitioned ones, and FlatGroups of persistent ones."""
    frozen: list[PartitionedParamGroup]
    coordinator: PartitionedParameterCoordinator
    pool: BufferPool
    messages: BufferPool | None
    """qwZ: buffers for quantised messages."""

    def gather_buffers(self) -> list[torch.Tensor]:
        """What is gathered, or on its way, and what is kept for the next time."""
        return [*self.pool.buffers(), *(self.messages.buffers() if self.messages is not None else ())]

    def most_gathered(self) -> int:
        """The most bytes of :meth:`gather_buffers` in this pass."""
        pools = (self.pool, *([self.messages] if self.messages is not None else []))
        return sum(pool.most_numel * pool.dtype.itemsize for pool in pools)

    def secondaries(self) -> list[torch.Tensor]:
        """HpZ and MiCS: what this rank keeps for its group."""
        kept = [bucket.gather.secondary for bucket in self.coordinator.buckets]
        return [secondary for secondary in kept if secondary is not None]

    def clear(self) -> None:
        """Let go of free buffers."""
        self.pool.clear()
        if self.messages is not None:
            self.messages.clear()


def fetch_limits(config: ZeroConfig, limit: int) -> FetchLimits:
    """DeepSpeed's three numbers, for a model of which a bucket holds at most ``limit`` elements.

    They are upper limits, with defaults (5e7, 1e9, 1e9) that are made for models of many billions: taken literally, a
    model below 1e9 elements would be gathered once and never released between forward and backward. So looking ahead
    and keeping are limited to what one bucket holds, which for a model of N elements is about N/16.
    """
    return FetchLimits(
        prefetch_numel=min(config.stage3_prefetch_bucket_size, limit),
        reuse_numel=min(config.stage3_max_reuse_distance, limit),
        live_numel=config.stage3_max_live_parameters,
    )


@dataclass(frozen=True)
class PartitioningPlan:
    """What will be partitioned, before anything is."""

    groups: list[GroupLayout]
    """Of trained parameters, then of frozen ones."""
    limit: int
    """Elements of a bucket."""


def plan_partitioning(
    names: Mapping[nn.Parameter, str], chosen: Sequence[Sequence[nn.Parameter]], config: ZeroConfig, world_size: int
) -> PartitioningPlan:
    """Which parameters are cut, over which buckets. Pure numbers.

    Args:
        names: every parameter's.
        chosen: the trainable parameters of each optimizer group, in the order in which their gradients arrive.
        config: thresholds and limits.
        world_size: W.
    """
    threshold = config.stage3_param_persistence_threshold
    trained = {param for params in chosen for param in params}
    frozen = [p for p in reversed(list(names)) if p not in trained and is_real(p) and p.numel() > threshold]
    total = sum(param.numel() for params in (*chosen, frozen) for param in params)
    limit = bucket_limit(total, config.reduce_bucket_size, config.allgather_bucket_size)
    limit = min(limit, max(config.stage3_max_live_parameters // 2, 1))

    def planned(params: Sequence[nn.Parameter], optimizer_group: int | None, partitioned: bool) -> GroupLayout:
        layout = plan_layout([p.numel() for p in params], world_size, limit)
        return GroupLayout(params, layout, optimizer_group, partitioned)

    groups = []
    for index, params in enumerate(chosen):
        for partitioned in (True, False):
            some = [p for p in params if (p.numel() > threshold) is partitioned]
            if some:
                groups.append(planned(some, index, partitioned))
    if frozen:
        groups.append(planned(frozen, None, True))
    return PartitioningPlan(groups, limit)


def partition_model(
    names: Mapping[nn.Parameter, str],
    plan: PartitioningPlan,
    placements: Sequence[OffloadPlan],
    config: ZeroConfig,
    comm: Communicator,
    dtype: torch.dtype,
    offload: HostMemory | None,
) -> Partitioning:
    """Cut the parameters, group by group; on any device, whole or partitioned already by ``zero.Init``.

    Args:
        names: every parameter's.
        plan: from :func:`plan_partitioning`.
        placements: of its groups.
        config: thresholds and limits.
        comm: the ranks.
        dtype: compute dtype.
        offload: where host memory is; None: nothing is offloaded.
    """
    partitioned = {param for group in plan.groups if group.partitioned for param in group.params}
    trained = {param for group in plan.groups if group.optimizer_group is not None for param in group.params}
    for param in (p for p in names if p not in partitioned):
        if isinstance(param, PartitionedParameter):
            unpartition(param)
        if param not in trained:
            place_whole(param, comm, dtype if is_real(param) else param.dtype)
    pool = BufferPool(dtype, comm.device, config.stage3_max_live_parameters)
    gathered = {
        frozen: [g.layout for g in plan.groups if g.partitioned and (g.optimizer_group is None) is frozen]
        for frozen in (False, True)
    }
    rules, messages = gather_rules(config, comm, dtype, gathered)
    if comm.rank == 0 and comm.world_size > 1:
        _name_idle_switches(config, gathered)
    groups: list[ParamGroup] = []
    frozen: list[PartitionedParamGroup] = []
    buckets: list[PartitionedBucket] = []
    for group, placement in zip(plan.groups, placements, strict=True):
        labels, index = [names[p] for p in group.params], group.optimizer_group
        if group.partitioned:
            made = PartitionedParamGroup(
                labels, group.params, group.layout, dtype, comm, pool, len(buckets), index, placement, offload,
                rules[index is None],
            )  # fmt: skip
            buckets.extend(made.buckets)
            if index is None:
                frozen.append(made)
            else:
                groups.append(made)
        elif index is not None:
            arena = offload.arena if offload is not None else None
            groups.append(
                FlatParamGroup(labels, group.params, group.layout, dtype, comm, False, index, placement, arena)
            )
    largest = max((bucket.numel for bucket in buckets), default=0)
    coordinator = PartitionedParameterCoordinator(buckets, fetch_limits(config, plan.limit), 2 * largest, comm)
    send_to_replicas(buckets)
    return Partitioning(groups, frozen, coordinator, pool, messages)


def _name_idle_switches(config: ZeroConfig, layouts: Mapping[bool, Sequence[FlatLayout]]) -> None:
    """Say which of ZeRO++'s settings have nothing to work on in this model."""
    threshold = config.stage3_param_persistence_threshold
    for name, works, why in (
        ("zero_quantized_weights", any(layouts.values()), ""),
        ("zero_hpz_partition_size", any(layouts.values()), ""),
        ("mics_shard_size", any(layouts.values()), ""),
        ("zero_quantized_nontrainable_weights", bool(layouts[True]), "frozen "),
    ):
        if getattr(config, name) not in (False, 1, -1) and not works:
            log.warning(
                "zero.%s does nothing here: no %sparameter has more than stage3_param_persistence_threshold=%d "
                "elements, so none is partitioned", name, why, threshold,
            )  # fmt: skip


def gather_rules(
    config: ZeroConfig, comm: Communicator, dtype: torch.dtype, layouts: Mapping[bool, Sequence[FlatLayout]]
) -> tuple[dict[bool, GatherConfig], BufferPool | None]:
    """How buckets travel, those of frozen parameters under True; and where quantised messages have room.

    With one rank nothing travels, and nothing is quantised. A collective.

    Args:
        config: the settings.
        comm: the ranks.
        dtype: compute dtype.
        layouts: of all partitioned groups, those of frozen parameters under True.
    """
    size = config.secondary_size
    if comm.world_size == 1:
        return {False: GatherConfig(), True: GatherConfig(fixed=True)}, None
    replicated = config.mics_shard_size > 0
    inside = comm.split(size)[0] if size > 1 or replicated else None
    quantized = {
        False: config.zero_quantized_weights,
        True: config.zero_quantized_weights or config.zero_quantized_nontrainable_weights,
    }
    messages = BufferPool(torch.uint8, comm.device, config.stage3_max_live_parameters) if quantized[True] else None
    settings, quantizer, room = config.quantization, None, 0
    if quantized[True]:
        # Every rank decodes everything twice, and encodes its own part.
        chosen = [layout for frozen in (False, True) if quantized[frozen] for layout in layouts[frozen]]
        numel = 2 * sum(layout.padded_numel for layout in chosen)
        quantizer = build_quantizer("weights", settings.weight_bits, settings, numel, [dtype], comm)
        part = max((layout.largest_bucket for layout in chosen), default=0) // comm.world_size
        room = comm.world_size * quantizer.format.message_bytes(part)
    rules = {
        frozen: GatherConfig(
            inside,
            replicated,
            quantizer if quantized[frozen] else None,
            messages if quantized[frozen] else None,
            room if quantized[frozen] else 0,
            frozen,
        )
        for frozen in (False, True)
    }
    return rules, messages


def is_real(param: nn.Parameter) -> bool:
    """Whether its elements are numbers that can be cast; two to a byte are not."""
    return param.is_floating_point() and param.dtype is not getattr(torch, "float4_e2m1fn_x2", None)


@torch.no_grad()
def place_whole(param: nn.Parameter, comm: Communicator, dtype: torch.dtype) -> None:
    """What is in no group goes to the device as a whole, with rank 0's values, in ``dtype``."""
    shape = param.shape
    param.data = take_values(param, comm).to(dtype).view(shape)


@torch.no_grad()
def place_buffers(model: nn.Module, comm: Communicator) -> None:
    """Buffers go to the device and take rank 0's values; they keep their dtype, as in DeepSpeed."""
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                moved = buffer.to(comm.device).resolve_conj().resolve_neg().contiguous()
                comm.broadcast("setup.broadcast", moved)
                module._buffers[key] = moved
