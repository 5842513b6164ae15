"""Step 0 of offloading: what lives in host memory, one arena for all of it, and the parts that work there.

``zero.offload_optimizer.ratio`` asks for a part of the optimizer's states on the host and the rest on the device (the
"twin flow" of ZeRO-Offload++); ``zero.offload_param`` for stage 3's parameters, ``max_in_cpu`` elements at most. In the
order of the run: :func:`plan_offload` decides, group by group, from the layouts alone · :func:`build_host` adds up the
arena to the byte, checks on every rank that its host can hold it, and takes it · groups carve masters and parameters as
they are built · :meth:`Offload.move_moments` carves the optimizer's state, :meth:`Offload.build_shard` the rest.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepzero.comm import process_group
from deepzero.comm.collectives import Communicator
from deepzero.comm.process_group import raise_on_all_ranks
from deepzero.config.strict import ConfigError
from deepzero.config.zero import OffloadOptimizerConfig, OffloadParamConfig, ZeroConfig
from deepzero.layout import Bucket, FlatLayout, OffloadPlan
from deepzero.offload.arena import (
    HostArena,
    HostMemoryError,
    Region,
    check_host_memory,
    describe_bytes,
    threads_per_rank,
    usable_cores,
)
from deepzero.offload.copy_streams import HostDeviceCopier, OffloadStats
from deepzero.offload.cpu_adam import CPUAdam
from deepzero.offload.delayed_update import DelayedOptimizerShard
from deepzero.offload.optimizer_offload import (
    HostGradients,
    HostGradLayout,
    HostOptimizerShard,
    HostParamUpload,
    Staging,
    staged_numels,
    staging_regions,
)
from deepzero.offload.param_fetch import HostShard
from deepzero.runtime.zero.optimizer_shard import HOST_MASTERS, GroupLayout, OptimizerShard, ParamGroup
from deepzero.runtime.zero.stage3 import HOST_PARAMETERS

log = logging.getLogger(__name__)

MOMENTS = "host_moments"


@dataclass(frozen=True)
class HostMemory:
    """Where offloaded tensors live, and the way there."""

    arena: HostArena
    wire: HostDeviceCopier

    def allocate(self, category: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """1-D memory of the arena."""
        return self.arena.allocate(category, numel, dtype)

    def finish_reads(self) -> None:
        """Wait until no copy reads the arena."""
        self.wire.finish_reads()

    def source_of(self, bucket: Bucket, comm: Communicator, where: str) -> HostShard:
        """How a shard in host memory reaches the device."""
        return HostShard(self.wire, bucket, comm, where)


def parameter_regions(placement: OffloadPlan, dtype: torch.dtype) -> list[Region]:
    """What the arena has to hold for one group's partitioned parameters."""
    numel = placement.parameter_numel
    return [Region(HOST_PARAMETERS, numel, dtype)] if numel else []


def nearest_count(layout: FlatLayout, target: float) -> int:
    """How many buckets, from the first, come nearest to ``target`` elements of the whole, padding included.

    Example:
        >>> from deepzero.layout import plan_layout
        >>> layout = plan_layout([1000] * 8, world_size=2, bucket_limit=1000)
        >>> [nearest_count(layout, ratio * layout.padded_numel) for ratio in (0.0, 0.3, 0.5, 1.0)]
        [0, 2, 4, 8]
    """
    best, taken, nearest = 0, 0, abs(target)
    for count, bucket in enumerate(layout.buckets, start=1):
        taken += bucket.numel
        if abs(taken - target) < nearest:
            best, nearest = count, abs(taken - target)
    return best


def most_count(layout: FlatLayout, limit: int | None) -> int:
    """How many buckets, from the first, keep at most ``limit`` elements on each rank; None: all.

    Example:
        >>> from deepzero.layout import plan_layout
        >>> layout = plan_layout([1000] * 4, world_size=2, bucket_limit=1000)
        >>> [most_count(layout, limit) for limit in (None, 0, 1100, 10_000)]
        [4, 0, 2, 4]
    """
    if limit is None:
        return len(layout.buckets)
    taken = 0
    for count, bucket in enumerate(layout.buckets):
        taken += bucket.shard_numel
        if taken > limit:
            return count
    return len(layout.buckets)


def plan_offload(planned: Sequence[GroupLayout], config: ZeroConfig, dtype: torch.dtype) -> list[OffloadPlan]:
    """Where each group's tensors live.

    Args:
        planned: all groups, in the order in which they will be built.
        config: ``offload_optimizer`` and ``offload_param``.
        dtype: compute dtype.
    """
    optimizer, param = config.offload_optimizer, config.offload_param
    left = param.max_in_cpu
    placements = []
    for group in planned:
        trained = group.optimizer_group is not None
        steps = keeps = 0
        if trained and optimizer.device == "cpu":
            steps = nearest_count(group.layout, optimizer.ratio * group.layout.padded_numel)
        if group.partitioned and param.device == "cpu":
            keeps = most_count(group.layout, left)
        placed = OffloadPlan(group.layout, steps, keeps, own_masters=dtype == torch.float32, trained=trained)
        left = None if left is None else left - placed.parameter_numel
        placements.append(placed)
    return placements


@dataclass
class Offload:
    """The host's side of one rank."""

    side: HostMemory
    meter: OffloadStats
    threads: int
    settings: OffloadOptimizerConfig
    rooms: list[Region]
    """Of each trained group: what its optimizer state takes."""
    sums: HostGradLayout | None
    staging: list[Region]
    shard: HostOptimizerShard | None = None
    """Made by :meth:`build_shard`, where the CPU steps on anything."""

    @property
    def arena(self) -> HostArena:
        """What everything lies in."""
        return self.side.arena

    def move_moments(self, optimizer: torch.optim.Optimizer, groups: Sequence[ParamGroup]) -> None:
        """Let the optimizer's state for what the CPU steps on lie in the arena."""
        for group, plan in zip(groups, self.rooms, strict=True):
            if not plan.numel:
                continue
            room, extent, taken = (
                self.arena.allocate(MOMENTS, plan.numel, plan.dtype),
                group.placement.optimizer_numel,
                0,
            )
            columns: dict[str, torch.Tensor] = {}
            for fragment, master in zip(group.fragments, group.masters, strict=True):
                state = optimizer.state.get(master, {}) if fragment.shard_start < extent else {}
                for key, value in state.items():
                    if not torch.is_tensor(value) or value.dim() == 0 or value.shape != master.shape:
                        continue
                    if key not in columns:
                        size = extent * value.itemsize
                        columns[key] = room[taken : taken + size].view(value.dtype)
                        taken += size
                    home = columns[key][fragment.shard_start : fragment.shard_start + fragment.numel]
                    state[key] = home.copy_(value)

    def build_shard(
        self,
        optimizer: torch.optim.Optimizer,
        groups: Sequence[ParamGroup],
        grad_dtype: torch.dtype,
        rank: int,
        **more: Any,
    ) -> OptimizerShard:
        """Carve what gradients and staging need, and build the optimizer's shard around it.

        Args:
            optimizer: as for :class:`OptimizerShard`, and what follows.
            groups: all trained groups.
            grad_dtype: accumulation dtype.
            rank: this rank.
            more: the rest.
        """
        for group in groups:
            if group.before_write is None:  # partitioned groups have it since they were built
                group.before_write = self.side.finish_reads
        if self.sums is None:  # only parameters are on the host
            return OptimizerShard(optimizer, groups, grad_dtype, rank, **more)
        gradients = HostGradients(self.sums, self.arena, self.side.wire)
        staging = Staging(self.staging, self.arena) if self.staging else None
        given = (gradients, staging, self.threads, self.meter, optimizer, groups, grad_dtype, rank)
        if self.settings.delayed_update:
            self.shard = DelayedOptimizerShard(self.settings.delay_after_steps, *given, **more)
        else:
            self.shard = HostOptimizerShard(*given, **more)
        return self.shard

    @property
    def uploads(self) -> list[HostParamUpload]:
        """The ways back of all buckets that the CPU steps on."""
        return self.shard.uploads if self.shard is not None else []

    def upload_masters(self) -> None:
        """Let the parameters follow masters on the host that have been loaded."""
        for upload in self.uploads:
            upload.upload_masters()

    def buffers_on_device(self) -> list[torch.Tensor]:
        """What is kept on the device for the copies."""
        return self.shard.gradients.buffers() if self.shard is not None else []

    def describe(self, optimizer: torch.optim.Optimizer) -> str:
        """One line: sizes, whether locked, threads, kernel."""
        locked = "page-locked" if self.arena.pinned else "not page-locked"
        how = type(optimizer).__name__
        if isinstance(optimizer, CPUAdam):
            how = optimizer.describe()
        elif isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
            how = f"torch's {how}; CPUAdam would take one pass over memory"
        sizes = describe_bytes(self.arena.regions)
        return f"offload per rank: {sizes} of host memory, {locked}; {self.threads} threads; {how}"


def build_host(
    planned: Sequence[GroupLayout],
    placements: Sequence[OffloadPlan],
    config: ZeroConfig,
    comm: Communicator,
    dtypes: tuple[torch.dtype, torch.dtype],
    moment_bytes: Sequence[int],
    depth: int,
    moments_in_arena: bool,
) -> Offload | None:
    """Take the arena; None where nothing is offloaded. A collective: all ranks get theirs, or all raise.

    Args:
        planned: all groups, in the order in which they will be built.
        placements: of each.
        config: the settings.
        comm: the ranks.
        dtypes: compute dtype, accumulation dtype.
        moment_bytes: per element, of each optimizer group.
        depth: buckets of the reducer.
        moments_in_arena: the optimizer's state exists before its first step. Else it makes its own, elsewhere in host
            memory, and the arena has no room for it; but the host must have.

    Raises:
        ConfigError: a host cannot hold it; says which part takes how much.
    """
    settings, param = config.offload_optimizer, config.offload_param
    if settings.device == "none" and param.device == "none":
        return None
    compute, accumulation = dtypes
    trained = [(g, p) for g, p in zip(planned, placements, strict=True) if g.optimizer_group is not None]
    regions: list[Region] = []
    for group, placed in zip(planned, placements, strict=True):
        regions += parameter_regions(placed, compute) if group.partitioned else []
        masters = len(placed.host_masters)
        regions += [Region(HOST_MASTERS, masters, torch.float32)] if masters else []
    rooms = [Region(MOMENTS, p.optimizer_numel * moment_bytes[g.optimizer_group or 0], torch.uint8) for g, p in trained]
    elsewhere = [] if moments_in_arena else [room for room in rooms if room.numel]
    if elsewhere:
        rooms = [Region(MOMENTS, 0, torch.uint8) for _ in rooms]
    sums: HostGradLayout | None = None
    if any(placed.optimizer_buckets for _, placed in trained):
        largest = max(i.shard_numel for _, p in trained for i in p.layout.buckets if p.steps_on_host(i))
        extents = tuple(placed.optimizer_numel for _, placed in trained)
        counts = tuple(placed.optimizer_buckets for _, placed in trained)
        sums = HostGradLayout(counts, extents, 2 if settings.delayed_update else 1, accumulation, largest, depth + 1)
    staged = [numel for _, placed in trained for numel in staged_numels(placed, compute)]
    staging = staging_regions(staged, compute, settings.delayed_update)
    regions += [room for room in rooms if room.numel] + (sums.regions() if sums is not None else []) + staging
    neighbours, threads = _neighbours(settings.threads, comm.rank)
    _agree(lambda: _check_threads(settings.threads))
    if comm.device.type != "meta":  # a rehearsal is about another host
        _agree(lambda: check_host_memory([*regions, *elsewhere], neighbours))
    arena = _take_arena(regions, comm.device, settings, param)
    if comm.rank == 0:
        _say_what_stays(planned, placements, param)
    meter = OffloadStats()
    wire = HostDeviceCopier(comm.device, comm.ledger, comm.chaos, meter)
    return Offload(HostMemory(arena, wire), meter, threads, settings, rooms, sums, staging)


def _neighbours(wanted: int | None, rank: int) -> tuple[int, int]:
    """Ranks of this host, and threads for this one's step."""
    everyone = process_group.all_gather_object((socket.gethostname(), usable_cores()))
    mine = everyone[rank]
    # Ranks that are bound to cores of their own share them with nobody.
    sharing = sum(host == mine[0] and bool(cores & mine[1]) for host, cores in everyone)
    neighbours = sum(host == mine[0] for host, _ in everyone)
    return neighbours, wanted or threads_per_rank(sharing, len(mine[1]))


def _check_threads(wanted: int | None) -> None:
    cores = len(usable_cores())
    if wanted is not None and wanted > 4 * cores:
        raise ConfigError(
            f"zero.offload_optimizer.threads={wanted}: this rank has {cores} cores, and more than {4 * cores} "
            "threads would only wait for each other"
        )


def _take_arena(
    regions: Sequence[Region],
    device: torch.device,
    optimizer: OffloadOptimizerConfig,
    param: OffloadParamConfig,
) -> HostArena:
    pin = (optimizer.device == "cpu" and optimizer.pin_memory) or (param.device == "cpu" and param.pin_memory)
    taken: list[HostArena] = []
    try:
        _agree(lambda: taken.append(HostArena(regions, device, pin)))
    except ConfigError:
        for arena in taken:
            arena.close()
        raise
    return taken[0]


def _say_what_stays(
    planned: Sequence[GroupLayout], placements: Sequence[OffloadPlan], param: OffloadParamConfig
) -> None:
    """A limit that leaves parameters on the device is easily one that was meant for something else."""
    pairs = zip(planned, placements, strict=True)
    left = sum(p.layout.shard_numel - p.parameter_numel for g, p in pairs if g.partitioned)
    if param.device == "cpu" and left:
        log.warning(
            "zero.offload_param.max_in_cpu=%s leaves %d elements of a rank's part on the device; leave it out to keep "
            "all of them in host memory (in DeepSpeed it limits what NVMe does not hold)",
            param.max_in_cpu,
            left,
        )


def _agree(attempt: Callable[[], None]) -> None:
    """All ranks succeed, or all raise, with the words of the first that did not."""
    problem = None
    try:
        attempt()
    except (HostMemoryError, ConfigError) as error:
        problem = str(error)
    raise_on_all_ranks(problem, ConfigError)
