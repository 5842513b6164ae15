"""Step 0 of offloading: what lives in host memory, and one arena for all of it.

``zero.offload_optimizer.ratio`` asks for a part of the optimizer's states on the host and the rest on the device (the
"twin flow" of ZeRO-Offload++); ``zero.offload_param`` for stage 3's parameters, ``max_in_cpu`` elements at most. In the
order of the run: :func:`plan_offload` decides, group by group, from the layouts alone · :func:`build_host` adds up the
arena to the byte, checks on every rank that its host can hold it, and takes it · groups carve masters and parameters as
they are built · :class:`~deepzero.offload.optimizer_offload.Offload` carves the optimizer's state, gradients, staging.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from deepzero.comm.collectives import Communicator
from deepzero.config.strict import ConfigError
from deepzero.config.zero import OffloadOptimizerConfig, OffloadParamConfig, ZeroConfig
from deepzero.layout import FlatLayout
from deepzero.offload.copy_streams import HostDeviceCopier, OffloadStats
from deepzero.offload.cpu_adam import CPUAdam
from deepzero.offload.delayed_update import DelayedOptimizerShard
from deepzero.offload.file_offload import FileBuffers, FileCopier, FileOptimizerShard, in_files
from deepzero.offload.optimizer_offload import MOMENTS, STAGING, HostGradients, HostOptimizerShard, Offload
from deepzero.offload.pinned_arena import HostArena, HostMemory, HostMemoryError, Region
from deepzero.placement import GroupPlan
from deepzero.runtime.optimizer_state import makes_state_in_advance
from deepzero.runtime.zero.stage3 import HOST_PARAMETERS
from deepzero.runtime.zero.stage_1_and_2 import HOST_MASTERS

log = logging.getLogger(__name__)


def nearest_count(layout: FlatLayout, target: float) -> int:
    """How many buckets, from the first, come nearest to ``target`` elements of the whole, padding included."""
    taken = list(itertools.accumulate((bucket.numel for bucket in layout.buckets), initial=0))
    return min(range(len(taken)), key=lambda count: abs(taken[count] - target))


def most_count(layout: FlatLayout, limit: int | None) -> int:
    """How many buckets, from the first, keep at most ``limit`` elements on each rank; None: all."""
    if limit is None:
        return len(layout.buckets)
    return bisect_right(list(itertools.accumulate(bucket.shard_numel for bucket in layout.buckets)), limit)


def plan_offload(planned: Sequence[GroupPlan], config: ZeroConfig, dtype: torch.dtype) -> list[GroupPlan]:
    """The groups with where their tensors live, in the order of building; ``dtype`` is the compute dtype."""
    optimizer, param = config.offload_optimizer, config.offload_param
    left = param.max_in_cpu
    placed = []
    for group in planned:
        steps = keeps = 0
        if group.trained and optimizer.device != "none":
            steps = nearest_count(group.layout, optimizer.ratio * group.layout.padded_numel)
        if group.partitioned and param.device != "none":
            keeps = most_count(group.layout, left)
        own = dtype == torch.float32
        placed.append(replace(group, own_masters=own, host_optimizer_buckets=steps, host_parameter_buckets=keeps))
        left = None if left is None else left - placed[-1].host_parameter_numel
    return placed


def build_host(
    planned: Sequence[GroupPlan],
    config: ZeroConfig,
    comm: Communicator,
    dtypes: tuple[torch.dtype, torch.dtype],
    moment_bytes: Sequence[int],
    depth: int,
    optimizer: torch.optim.Optimizer,
) -> Offload | None:
    """Take the arena, and the files; None where nothing is offloaded. A collective: all ranks get theirs, or all raise.

    ``planned`` are all groups, in the order in which they will be built; ``dtypes`` the compute and the accumulation
    dtype; ``moment_bytes`` are per element, of each optimizer group; ``depth`` are the reducer's buckets. If the state
    of ``optimizer`` exists only from its first step on, it makes that elsewhere in host memory, and the arena has no
    room for it; but the host must have.
    """
    settings, param = config.offload_optimizer, config.offload_param
    if settings.device == "none" and param.device == "none":
        return None
    plan = HostPlan.of(planned, config, dtypes, moment_bytes, depth, optimizer)
    neighbours, threads = _neighbours(settings.threads, comm)
    filed = in_files(config)
    made = (comm.device, comm.ledger, comm.chaos, OffloadStats(), comm.ranges)
    copier = FileCopier(*made) if filed else HostDeviceCopier(*made)
    make_shard: Callable[..., HostOptimizerShard]
    make_shard = DelayedOptimizerShard if settings.delayed_update else HostOptimizerShard
    files: Mapping[str, HostMemory] = {}
    with contextlib.ExitStack() as undo:
        with comm.together(ConfigError, ConfigError, HostMemoryError):
            if (wanted := settings.threads) is not None and wanted > 4 * (cores := len(usable_cores())):
                raise ConfigError(
                    f"zero.offload_optimizer.threads={wanted}: this rank has {cores} cores, and more than {4 * cores} "
                    "threads would only wait for each other"
                )
            check_optimizer(settings, optimizer)
            buffers = FileBuffers.plan(config, planned, plan.sums, *dtypes)
            in_memory = [*itertools.chain(*buffers), *(r for r in plan.regions if r.category not in filed)]
            arena = HostArena(in_memory, comm.device, asks_for_pinning(settings, param), plan.elsewhere, neighbours)
            undo.callback(arena.close)
            if isinstance(copier, FileCopier):
                undo.callback(copier.close)
                copier.open(plan.regions, config)
                files, make_shard = copier.files, partial(FileOptimizerShard, copier, copier.carve(buffers, arena))
        undo.pop_all()
    on_device = sum(g.layout.shard_numel - g.host_parameter_numel for g in planned if g.partitioned)
    if comm.rank == 0 and param.device == "cpu" and on_device:
        # A limit that leaves parameters on the device is easily one that was meant for something else.
        log.warning(
            "zero.offload_param.max_in_cpu=%s leaves %d elements of a rank's part on the device; leave it out to keep "
            "all of them in host memory (in DeepSpeed it limits what NVMe does not hold)",
            param.max_in_cpu,
            on_device,
        )
    return Offload(arena, files, copier, threads, settings, plan.state_regions, plan.sums, plan.staging, make_shard)


class HostPlan(NamedTuple):
    """All that is allocated, in order; what the host must have beside it; and, each by itself, what is carved late."""

    regions: list[Region]
    elsewhere: list[Region]
    state_regions: list[Region]
    sums: HostGradients | None
    staging: list[Region]

    @classmethod
    def of(
        cls,
        planned: Sequence[GroupPlan],
        config: ZeroConfig,
        dtypes: tuple[torch.dtype, torch.dtype],
        moment_bytes: Sequence[int],
        depth: int,
        optimizer: torch.optim.Optimizer,
    ) -> HostPlan:
        """The arguments are those of :func:`build_host`."""
        settings, (compute, accumulation) = config.offload_optimizer, dtypes
        regions: list[Region] = []
        for group in planned:
            kept = Region(HOST_PARAMETERS, group.host_parameter_numel if group.partitioned else 0, compute)
            masters = Region(HOST_MASTERS, len(group.host_master_span), torch.float32)
            regions += [region for region in (kept, masters) if region.numel]
        stepped = [group for group in planned if group.trained]
        state_regions = [
            Region(MOMENTS, group.host_optimizer_numel * moment_bytes[group.optimizer_group], torch.uint8)
            for group in planned
            if group.optimizer_group is not None
        ]
        elsewhere = [] if makes_state_in_advance(optimizer) else [region for region in state_regions if region.numel]
        if elsewhere:
            state_regions = [Region(MOMENTS, 0, torch.uint8) for _ in state_regions]
        sums = None
        if any(group.host_optimizer_buckets for group in stepped):
            sums = HostGradients(stepped, 2 if settings.delayed_update else 1, accumulation, depth + 1)
        staging = staging_regions(stepped, compute, settings)
        regions += [region for region in state_regions if region.numel]
        regions += (sums.regions if sums is not None else []) + staging
        return cls(regions, elsewhere, state_regions, sums, staging)


def check_optimizer(settings: OffloadOptimizerConfig, optimizer: torch.optim.Optimizer) -> None:
    """Raise a ConfigError where ``optimizer`` cannot step on one bucket at a time, and that is asked for."""
    ways = (
        ("device='nvme'", settings.device == "nvme", "bucket by bucket", "device=cpu"),
        ("delayed_update", settings.delayed_update, "in a thread of its own", "switch delayed_update off"),
    )
    for name, asked, how, instead in ways:
        if asked and not isinstance(optimizer, CPUAdam):
            raise ConfigError(
                f"zero.offload_optimizer.{name} steps {how}, with CPUAdam alone, and the optimizer is "
                f"{type(optimizer).__name__}; choose optimizer=cpu_adam (in a JSON Adam or AdamW), or {instead}"
            )


def staging_regions(planned: Sequence[GroupPlan], dtype: torch.dtype, settings: OffloadOptimizerConfig) -> list[Region]:
    """What the arena has to hold for new parameters on their way: two buffers in turn, one for each late bucket.

    In fp32 the masters themselves are sent, where they lie in memory.
    """
    plans = planned if dtype != torch.float32 or settings.device == "nvme" else []
    numels = [b.shard_numel for p in plans for b in p.layout.buckets if p.steps_on_host(b) and not p.keeps_on_host(b)]
    if not settings.delayed_update:
        numels = [max(numels, default=0)] * min(2, len(numels))
    return [Region(STAGING, numel, dtype) for numel in numels]


def asks_for_pinning(optimizer: OffloadOptimizerConfig, param: OffloadParamConfig) -> bool:
    """Whether the arena that both sides share is locked: unless one of them says no."""
    return all(side.pin_memory for side in (optimizer, param) if side.device != "none")


def usable_cores() -> frozenset[int]:
    """Numbers of the cores that this process may run on."""
    return frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


def _neighbours(wanted: int | None, comm: Communicator) -> tuple[int, int]:
    """Ranks of this host, and threads for this one's step."""
    everyone = comm.all_gather_object((socket.gethostname(), usable_cores()))
    here, mine = everyone[comm.rank]
    neighbours = [cores for host, cores in everyone if host == here]
    # Ranks that are bound to cores of their own share them with nobody.
    sharing = sum(bool(cores & mine) for cores in neighbours)
    return len(neighbours), wanted or max(1, len(mine) // max(sharing, 1))


def agree_on_kernel(
    optimizer: CPUAdam,
    accumulation: torch.dtype,
    compute: torch.dtype,
    planned: Sequence[GroupPlan],
    comm: Communicator,
) -> None:
    """All ranks step with one kernel, chosen for the whole model: no bit depends on how it is cut. A collective."""
    offloads = any(group.host_optimizer_buckets for group in planned)
    # The optimizer still holds the model's parameters, which may lie on a GPU, or be what ``zero.Init`` has left of
    # them: neither their device nor their dtype is that of the masters which the CPU will step on.
    masters = 0
    if offloads or comm.device.type == "cpu":
        masters = sum(p.numel() for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
    sends = offloads and compute != torch.float32  # in fp32 the master itself is what is sent
    with comm.together(ConfigError, RuntimeError):  # kernel="compiled", and there is none
        optimizer.prepare(accumulation, compute if sends else None, masters)
    kernels = comm.all_gather_object(optimizer.kernel)
    # Where one host cannot compile, or compiling fails there, all use the chunks: their bits differ.
    if "chunked" in kernels and optimizer.kernel != "chunked":
        optimizer.use("chunked", f"because rank {kernels.index('chunked')} cannot compile")
