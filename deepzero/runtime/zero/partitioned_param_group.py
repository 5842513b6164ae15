"""One group of partitioned parameters: ``shard_S``, ``master_S``, and the buckets over them (stage 3's step 0).

The counterpart of :class:`~deepzero.runtime.zero.flat_param_group.FlatParamGroup`, over the same layout: what is kept
whole there (``flat_P``) is here put together bucket by bucket, when it is needed. Masters, pieces and the order of
elements in a rank's share are the same in both.

Frozen parameters are partitioned too, in groups of their own that no optimizer sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from deepzero.comm.collectives import Communicator
from deepzero.config.strict import ConfigError
from deepzero.layout import Bucket, FlatLayout, Fragment
from deepzero.offload.arena import HostArena, Region
from deepzero.offload.copy_streams import HostDeviceCopier, PendingCopy
from deepzero.offload.offload_plan import OffloadPlan
from deepzero.runtime.zero.buffer_pool import BufferPool
from deepzero.runtime.zero.flat_param_group import SETUP, follow, take_values
from deepzero.runtime.zero.guards import register_owner, release_owner
from deepzero.runtime.zero.master_shard import MasterShard
from deepzero.runtime.zero.parameter_all_gather import GatherConfig
from deepzero.runtime.zero.partition_parameters import (
    ParamRecord,
    ZeroParameter,
    ZeroParamStatus,
    set_placeholder,
)
from deepzero.runtime.zero.partitioned_bucket import PartitionedBucket

HOST_PARAMETERS = "host_parameters"


@dataclass(frozen=True)
class HostMemory:
    """Where offloaded tensors live, and the way there."""

    arena: HostArena
    wire: HostDeviceCopier


def parameter_regions(placement: OffloadPlan, dtype: torch.dtype) -> list[Region]:
    """What the arena has to hold for one group's partitioned parameters."""
    numel = placement.parameter_numel
    return [Region(HOST_PARAMETERS, numel, dtype)] if numel else []


class PartitionedParamGroup:
    """The tensors of one group whose parameters are partitioned.

    Args:
        names: the parameters' names, in the order of the layout.
        params: in the order of the layout. They become partitioned; those that ``zero.Init`` has cut are cut anew.
        layout: where each lies.
        dtype: compute dtype.
        comm: the ranks.
        pool: buffers of that dtype.
        first_key: the coordinator's number of the first bucket.
        optimizer_group: index of the optimizer's param group, or None for frozen parameters, which have no masters.
        placement: what of it lives in host memory; None: nothing.
        offload: the arena where that is, and the wire to it.
        rules: how buckets travel, if not in plain all-gathers.
    """

    def __init__(
        self,
        names: Sequence[str],
        params: Sequence[nn.Parameter],
        layout: FlatLayout,
        dtype: torch.dtype,
        comm: Communicator,
        pool: BufferPool,
        first_key: int,
        optimizer_group: int | None,
        placement: OffloadPlan | None = None,
        offload: HostMemory | None = None,
        rules: GatherConfig | None = None,
    ) -> None:
        self.names, self.layout, self.dtype = list(names), layout, dtype
        self.comm, self.device, self.optimizer_group = comm, comm.device, optimizer_group
        self.before_write: Callable[[], None] | None = offload.wire.finish_reads if offload is not None else None
        own, trained = dtype == torch.float32, optimizer_group is not None
        self.placement = placement or OffloadPlan.on_device(layout, own, trained)
        cut = self.placement.parameter_numel
        self.shard_on_host: torch.Tensor | None = None
        if cut and offload is not None:
            self.shard_on_host = offload.arena.allocate(HOST_PARAMETERS, cut, dtype)
        self.master_store = MasterShard(self.placement, offload.arena if offload is not None else None)
        self.fragments = layout.fragments(comm.rank)
        self._mine = {fragment.slot.index: number for number, fragment in enumerate(self.fragments)}
        self.params = self._move_in(params)
        self.masters = [self._master_of(fragment) for fragment in self.fragments] if optimizer_group is not None else []
        self.buckets: list[PartitionedBucket] = []
        for bucket in layout.buckets:
            inside = [self.params[slot.index] for slot in bucket.slots]
            shard = self.share(bucket.shard_offset, bucket.shard_numel)
            wire = offload.wire if offload is not None else None
            on_host = self.placement.keeps_on_host(bucket)
            key = first_key + bucket.index
            made = PartitionedBucket(key, bucket, inside, shard, comm, pool, wire, on_host, rules)
            made.on_write, made.before_write = self._accept_write, self._may_write
            self.buckets.append(made)
        self._index = {param: index for index, param in enumerate(self.params)}

    @property
    def parameter_storage(self) -> list[torch.Tensor]:
        """What this rank keeps of the parameters on its device: its share, or what of it is not in host memory."""
        return [self.shard_on_device]

    def share(self, start: int, numel: int) -> torch.Tensor:
        """``shard_S[start : start + numel]``, wherever it lies; no run crosses from host to device."""
        cut = self.placement.parameter_numel
        if self.shard_on_host is not None and start < cut:
            return self.shard_on_host[start : start + numel]
        return self.shard_on_device[start - cut : start - cut + numel]

    def param_shard(self, bucket: Bucket) -> torch.Tensor:
        """This rank's part of ``bucket`` in the compute dtype, padding included."""
        return self.share(bucket.shard_offset, bucket.shard_numel)

    def param_fragment(self, fragment: Fragment) -> torch.Tensor:
        """This rank's elements of one parameter, 1-D, in the compute dtype."""
        return self.share(fragment.shard_start, fragment.numel)

    def _master_of(self, fragment: Fragment) -> torch.Tensor:
        """A leaf that the optimizer may update; in fp32 the share is its own master."""
        found = self.master_store.at(fragment.shard_start, fragment.numel)
        return (self.param_fragment(fragment) if found is None else found).detach().requires_grad_()

    def master_of(self, bucket: Bucket) -> torch.Tensor:
        """The masters of this rank's part of ``bucket``, padding included."""
        found = self.master_store.at(bucket.shard_offset, bucket.shard_numel)
        return self.share(bucket.shard_offset, bucket.shard_numel) if found is None else found

    def _separate(self, number: int) -> torch.Tensor | None:
        """The master of a piece, unless the piece is its own."""
        fragment = self.fragments[number]
        if self.optimizer_group is None:
            return None
        return self.masters[number] if self.master_store.at(fragment.shard_start, fragment.numel) is not None else None

    @torch.no_grad()
    def _move_in(self, params: Sequence[nn.Parameter]) -> list[ZeroParameter]:
        """This rank's pieces in share and masters; the rest is let go, one by one. See [Note: the peak of building].

        Where the model is on the device, the pieces wait until what it takes there is free.
        """
        waits = lies_on(params, self.device)
        if not waits:
            self._allocate()
        kept: dict[int, torch.Tensor] = {}
        made = []
        for index, param in enumerate(params):
            register_owner(param, self.names[index])
            made.append(as_zero_parameter(param, self.names[index]))
            values, number = self._whole_values(made[-1]), self._mine.get(index)
            if number is not None:
                fragment = self.fragments[number]
                mine = values[fragment.start : fragment.start + fragment.numel]
                if waits:
                    kept[number] = mine.clone()
                else:
                    self._lay(number, mine)
            del values
            made[-1]._zero.home = made[-1]._zero.slot = None
            set_placeholder(made[-1], self.dtype, self.device)
        if waits:
            self._allocate()
        for number in list(kept):
            self._lay(number, kept.pop(number))
        return made

    def _allocate(self) -> None:
        numel = self.layout.shard_numel - self.placement.parameter_numel
        self.shard_on_device = torch.zeros(numel, dtype=self.dtype, device=self.device)
        self.master_store.allocate(self.device)

    def _lay(self, number: int, mine: torch.Tensor) -> None:
        """A piece of one parameter into the share, and into its master as it was before the cast."""
        fragment = self.fragments[number]
        self.param_fragment(fragment).copy_(mine)
        master = self.master_store.at(fragment.shard_start, fragment.numel)
        if master is not None:
            master.copy_(mine)

    def _whole_values(self, param: ZeroParameter) -> torch.Tensor:
        """1-D and whole: rank 0's values, or what ``zero.Init`` has partitioned."""
        if param._zero.home is not None:
            home, slot = param._zero.placed()
            home.launch(SETUP)
            home.wait()
            values = home.value(slot).reshape(-1)
            home.release()
            return values
        return take_values(param, self.comm)

    @torch.no_grad()
    def _accept_write(self, bucket: PartitionedBucket, param: ZeroParameter) -> None:
        """The part of ``param`` is new: its master follows."""
        number = self._mine.get(self._index[param])
        master = self._separate(number) if number is not None else None
        if number is not None and master is not None:
            follow(master, self.param_fragment(self.fragments[number]))

    @torch.no_grad()
    def write(self, index: int, values: torch.Tensor) -> None:
        """New values for one parameter: this rank's piece of it, and of its master, which keeps all bits of them.

        Args:
            index: position in :attr:`params`.
            values: 1-D, whole, fp32, the same on every rank.
        """
        param, number = self.params[index], self._mine.get(index)
        home, _ = param._zero.placed()
        home.write(param, values)
        if number is not None:
            fragment = self.fragments[number]
            self.masters[number].copy_(values[fragment.start : fragment.start + fragment.numel])

    def written(self) -> list[str]:
        """None: a write to a gathered parameter is refused where it happens."""
        return []

    def _may_write(self) -> None:
        if self.before_write is not None:
            self.before_write()

    def bump_param_versions(self) -> None:
        """A graph that has saved the old ones is known by its generation."""

    def sync_masters_from_params(self) -> None:
        """Before a step: a write to a gathered parameter is refused; permitted ones have been taken over already."""
        for bucket in self.buckets:
            if bucket.status is ZeroParamStatus.AVAILABLE:
                bucket.refuse_writes()

    @torch.no_grad()
    def publish(self) -> None:
        """Step 7: cast the masters into the share, but for those that the CPU has stepped on. Nothing is sent."""
        for bucket in self.buckets:
            if not self.placement.steps_on_host(bucket.bucket):
                found = self.master_store.at(bucket.bucket.shard_offset, bucket.bucket.shard_numel)
                if found is not None:
                    bucket.shard.copy_(found)
                bucket.generation += 1

    def wait_for_fetches(self, bucket: Bucket) -> None:
        """Before the CPU writes a bucket's new parameters where they live: no fetch reads the old ones any more."""
        self.buckets[bucket.index].finish_fetches()

    def arrived(self, bucket: Bucket, copy: PendingCopy | None) -> None:
        """The CPU has stepped on a bucket, and what it wrote is here, or on its way in ``copy``."""
        self.buckets[bucket.index].mark_updated(copy)

    @torch.no_grad()
    def release(self) -> None:
        """Let the parameters belong to nobody again: whole, plain parameters. A collective."""
        for bucket in self.buckets:
            if bucket.status is ZeroParamStatus.NOT_AVAILABLE:
                bucket.launch(SETUP)
            if bucket.status is ZeroParamStatus.INFLIGHT:
                bucket.wait()
            for param in bucket.params:
                release_owner(param)
                unpartition(param)
            bucket.abandon()


def lies_on(params: Sequence[nn.Parameter], device: torch.device) -> bool:
    """Whether any of them takes memory of the device."""
    return any(param.device == device for param in params)


@torch.no_grad()
def unpartition(param: ZeroParameter) -> None:
    """A plain parameter again, with its values. A collective, unless its bucket is gathered."""
    home, slot = param._zero.placed()
    gathered = home.status is ZeroParamStatus.AVAILABLE
    if not gathered:
        home.launch(SETUP)
        home.wait()
    values = home.value(slot).clone()
    if not gathered:
        home.release()
    param.__class__ = ZeroParameter
    param.data = values
    del param._zero
    param.__class__ = nn.Parameter  # type: ignore[assignment]


def as_zero_parameter(param: nn.Parameter, name: str) -> ZeroParameter:
    """The same object, with a record.

    Raises:
        ConfigError: a subclass of Parameter whose behaviour would be lost.
    """
    if isinstance(param, ZeroParameter):
        param.__class__ = ZeroParameter
        param._zero.name = name
        return param
    if type(param) is not nn.Parameter:
        raise ConfigError(f"parameter {name!r} is a {type(param).__name__}; stage 3 partitions plain nn.Parameter only")
    record = ParamRecord(param, name)
    param.__class__ = ZeroParameter
    assigned: ZeroParameter = param  # type: ignore[assignment]
    assigned._zero = record
    return assigned
