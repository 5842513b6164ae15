"""ZeRO-Offload: the part of the optimizer's shard that lives in host memory, and its way there and back.

Masters, moments and reduced gradients of the first buckets are on the host, and the CPU steps on them. Three things
happen to such a bucket::

    3 gradient ready   its sum is written into a slot on the device, and leaves for the host while autograd goes on
    5 step             the CPU steps on it, and writes the new parameters, cast, in the same pass over memory
    6 publish          they travel to the device, and from there to the other ranks, while the CPU steps on the next

    CPU     | step on 0 | step on 1 | step on 2 | ...
    wire                | 0 up      | 1 up      | 2 up ...
    ranks                           | gather 0  | gather 1 ...       (stages 1 and 2)

:class:`HostOptimizerShard` implements ``runtime/zero/optimizer_shard.py``, which is all that the core sees of it.

Sources: section 4 of the ZeRO-Offload paper ("transferred to the CPU memory … as soon as they become available", "we
tile the parameters … and overlap"); ZeRO-Offload++ for ``ratio``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from deepzero.comm import profiler_ranges
from deepzero.comm.reduce_scatter import Measure
from deepzero.layout import Bucket, Fragment, OffloadPlan
from deepzero.offload.arena import HostArena, Region
from deepzero.offload.copy_streams import ADAM, TO_DEVICE, TO_HOST, HostDeviceCopier, OffloadStats, PendingCopy
from deepzero.runtime.zero.optimizer_shard import (
    GradOutput,
    MasterFragment,
    OptimizerShard,
    ParamGroup,
    SubGroup,
)

GRADIENTS, STAGING = "host_gradients", "host_buffers"

CHUNK = 1 << 17
"""Elements that are added at a time, and measured while they are in the core's cache."""

OnUploaded = Callable[[int, Bucket, "PendingCopy | None"], None]
"""(group, bucket, copy): new parameters are in place, or will be when the copy has arrived."""


# ---- 3 gradient ready: down to the host ------------------------------------------------------------------------------


@dataclass
class StagingSlot:
    """A place for one bucket's sum on the device, and one on the host for what has to be added there.

    ::

        acquire             grad_reduced            settle (before the slot is used again, or at the boundary)
        reduce into it      copy down, own stream   the copy is there; add it to the sum, take its norm
        ---- free ----> filled ------ in flight -------> arrived ------> free
    """

    device: torch.Tensor
    host: torch.Tensor
    copy: PendingCopy | None = None
    on_arrival: Callable[[], None] | None = None
    """What the host does with it when it has arrived."""
    taken: bool = False
    """A reduction writes into it."""

    def settle(self) -> None:
        """Wait for the slot's copy, and bring what it brought to where it belongs."""
        if self.copy is not None:
            self.copy.finish()
        if self.on_arrival is not None:
            self.on_arrival()
        self.copy = self.on_arrival = None


@dataclass(frozen=True)
class HostGradLayout:
    """What the arena holds for gradients: which buckets, and in how many copies."""

    counts: tuple[int, ...]
    """For each group, how many buckets, from the first, live on the host."""
    extents: tuple[int, ...]
    """For each group, elements of the shard that those buckets have, padding included."""
    copies: int
    """2 while the step of the last gradients may still run when the next ones come (delayed update), else 1."""
    dtype: torch.dtype
    largest_shard: int
    slots: int
    """One more than the reducer has buckets, so that no reduction waits for the copy of the one before it."""

    def regions(self) -> list[Region]:
        """The plan of the arena's part."""
        sums = [Region(GRADIENTS, extent, self.dtype) for extent in self.extents for _ in range(self.copies)]
        return sums + [Region(STAGING, self.largest_shard, torch.float32) for _ in range(self.slots)]


class HostGradients:
    """``grad_S`` of the buckets that live on the host.

    The first micro-batch of a step arrives where the optimizer will read it. Later ones arrive in the slot's host half
    and are added by the CPU, in the accumulation dtype and in the order of the micro-batches, which gives the bits that
    adding on the device gives.

    Args:
        plan: sizes.
        arena: is carved here, as ``plan.regions`` says.
        wire: to the host.
    """

    def __init__(self, plan: HostGradLayout, arena: HostArena, wire: HostDeviceCopier) -> None:
        self.plan, self.wire = plan, wire
        self._sums = [[arena.allocate(GRADIENTS, n, plan.dtype) for _ in range(plan.copies)] for n in plan.extents]
        self._current = 0
        # fp32, whatever the sums are kept in: what is added to a narrower sum is added unrounded.
        self._slots = [
            StagingSlot(torch.zeros(plan.largest_shard, dtype=torch.float32, device=wire.device), host)
            for host in [arena.allocate(STAGING, plan.largest_shard, torch.float32) for _ in range(plan.slots)]
        ]
        self._next = 0

    def holds(self, group: int, bucket: Bucket) -> bool:
        """Whether the host has this bucket's sums."""
        return bucket.index < self.plan.counts[group]

    def sum_of(self, group: int, bucket: Bucket) -> torch.Tensor:
        """This rank's part of the bucket's sum, on the host; complete after :meth:`drain`."""
        return bucket.shard_of(self._sums[group][self._current])

    def swap(self) -> None:
        """Let the next step's sums go to the other copy: this one's are in use."""
        self._current = (self._current + 1) % self.plan.copies

    def acquire(self, bucket: Bucket, accumulate: bool) -> tuple[StagingSlot, torch.Tensor]:
        """The oldest slot, free, and where in it the bucket's sum is to be written.

        Args:
            bucket: what will be reduced.
            accumulate: it will be added to a sum that is on the host; then it travels in fp32.
        """
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        if slot.taken:
            raise RuntimeError("more reductions are under way than there are slots for their sums")
        slot.settle()
        slot.taken = True
        dtype = torch.float32 if accumulate else self.plan.dtype
        return slot, slot.device.view(dtype)[: bucket.shard_numel]

    def leave(
        self, slot: StagingSlot, group: int, bucket: Bucket, accumulate: bool, padding: int, measure: Measure | None
    ) -> None:
        """Launch the copy of a slot's sum. Called where the sum was written, in stream order.

        Args:
            slot: from :meth:`acquire`.
            group: the bucket's.
            bucket: what was reduced.
            accumulate: as for :meth:`acquire`.
            padding: elements of the shard that belong to no parameter.
            measure: sees the sum on the host when something was added to it.
        """
        target, where = self.sum_of(group, bucket), f"bucket {bucket.index}"
        if accumulate:
            arrived = slot.host[: bucket.shard_numel]
            slot.copy = self.wire.to_host(TO_HOST, arrived, slot.device[: bucket.shard_numel], padding, where)
            slot.on_arrival = lambda: _add(target, arrived, measure)
        else:
            source = slot.device.view(self.plan.dtype)[: bucket.shard_numel]
            slot.copy = self.wire.to_host(TO_HOST, target, source, padding, where)
        slot.taken = False

    def drain(self) -> None:
        """Wait for everything that has left. Afterwards the sums may be read."""
        for step in range(len(self._slots)):
            self._slots[(self._next + step) % len(self._slots)].settle()

    def discard(self) -> None:
        """Free all slots, also those that an exception has kept from leaving."""
        self.drain()
        for slot in self._slots:
            slot.taken = False

    def buffers(self) -> list[torch.Tensor]:
        """What is kept on the device."""
        return [slot.device for slot in self._slots]


@torch.no_grad()
def _add(target: torch.Tensor, arrived: torch.Tensor, measure: Measure | None) -> None:
    """``target += arrived``, in chunks that are measured while they are in the core's cache."""
    for lo in range(0, target.numel(), CHUNK):
        chunk = target[lo : lo + CHUNK]
        chunk.add_(arrived[lo : lo + CHUNK])
        if measure is not None:
            measure(chunk, lo)


# ---- 6 publish: back to the device -----------------------------------------------------------------------------------


def staged_numels(placement: OffloadPlan, dtype: torch.dtype) -> list[int]:
    """Elements of the buckets whose new parameters go through staging."""
    if dtype == torch.float32:
        return []  # the masters themselves are sent
    layout = placement.layout
    return [i.shard_numel for i in layout.buckets if placement.steps_on_host(i) and not placement.keeps_on_host(i)]


def staging_regions(numels: Sequence[int], dtype: torch.dtype, whole: bool) -> list[Region]:
    """What the arena has to hold for staging: two buffers in turn; with ``whole`` one for each of ``numels``."""
    if not numels:
        return []
    extents = list(numels) if whole else [max(numels)] * min(2, len(numels))
    return [Region(STAGING, extent, dtype) for extent in extents]


class Staging:
    """Buffers that are written by the CPU and read by copies, in turn.

    A delayed update keeps what it wrote until the next boundary, and so has a buffer for every bucket.
    """

    def __init__(self, regions: Sequence[Region], arena: HostArena) -> None:
        self._buffers = [arena.allocate(STAGING, region.numel, region.dtype) for region in regions]
        self._copies: list[PendingCopy | None] = [None] * len(regions)

    def take(self, turn: int, numel: int) -> tuple[int, torch.Tensor]:
        """The buffer whose turn it is, when what it held has left."""
        number = turn % len(self._buffers)
        copy = self._copies[number]
        if copy is not None:
            copy.finish()
        return number, self._buffers[number][:numel]

    def sent(self, number: int, copy: PendingCopy) -> None:
        """Let the buffer belong to ``copy``."""
        self._copies[number] = copy


class HostParamUpload:
    """One bucket's new parameters, from the CPU's step to where the model reads them.

    Args:
        number: the group's.
        group: to which the bucket belongs.
        bucket: which the CPU steps on.
        rank: this rank.
        wire: to the device.
        staging: None where nothing goes through it.
        turn: how many of those before it go through staging.
        on_uploaded: called when something is on its way, or there.
    """

    def __init__(
        self,
        number: int,
        group: ParamGroup,
        bucket: Bucket,
        rank: int,
        wire: HostDeviceCopier,
        staging: Staging | None,
        turn: int,
        on_uploaded: OnUploaded,
    ) -> None:
        self.number, self.group, self.bucket, self.wire, self._uploaded = number, group, bucket, wire, on_uploaded
        first, last = bucket.shard_offset, bucket.shard_offset + bucket.shard_numel
        inside = [
            (fragment, master)
            for fragment, master in zip(group.fragments, group.masters, strict=True)
            if first <= fragment.shard_start < last
        ]
        self.fragments: list[Fragment] = [fragment for fragment, _ in inside]
        self.masters = [master for _, master in inside]
        self._padding = bucket.padding_of(rank)
        self._on_host = group.placement.keeps_on_host(bucket)
        self._staging = staging if group.dtype != torch.float32 and not self._on_host else None
        self._turn = turn
        self._taken: tuple[int, torch.Tensor] | None = None
        self._copy: PendingCopy | None = None

    def output_fragments(self) -> list[torch.Tensor | None]:
        """One tensor of the compute dtype for each fragment, into which the CPU writes the updated parameter.

        An entry is None in fp32 runs: there the master is uploaded itself, or the parameter *is* the master. Waits
        until the previous upload from the same memory has completed.
        """
        if self._copy is not None:
            self._copy.finish()
            self._copy = None
        if self._on_host:  # offload_param: the step writes where the parameters live, and nothing travels here
            self.group.wait_for_fetches(self.bucket)
            if self.group.dtype == torch.float32 and self.group.placement.own_masters_at(self.bucket):
                return [None] * len(self.fragments)
            return [self.group.param_fragment(fragment) for fragment in self.fragments]
        if self._staging is None:
            return [None] * len(self.fragments)
        self._taken = self._staging.take(self._turn, self.bucket.shard_numel)
        staged, cursor = self._taken[1], 0
        runs = [(fragment.shard_start - self.bucket.shard_offset, fragment.numel) for fragment in self.fragments]
        for start, numel in runs:  # padding between parameters is zero on the device, too
            staged[cursor:start].zero_()
            cursor = start + numel
        staged[cursor:].zero_()
        return [staged[start : start + numel] for start, numel in runs]

    def where(self) -> tuple[int, str]:
        """The bucket's number and its first parameter, for traces."""
        return self.bucket.index, self.group.names[self.bucket.slots[0].index]

    def send(self) -> None:
        """Launch the copy of what the step has written."""
        if self._on_host:
            self._uploaded(self.number, self.bucket, None)
            return
        source = self._taken[1] if self._taken is not None else self.group.master_of(self.bucket)
        target, where = self.group.param_shard(self.bucket), f"bucket {self.bucket.index}"
        with profiler_ranges.span("publish", *self.where()):
            copy = self.wire.to_device(TO_DEVICE, target, source.detach(), self._padding, where)
        if self._taken is not None and self._staging is not None:
            self._staging.sent(self._taken[0], copy)
        else:
            self._copy = copy
        self._taken = None
        self._uploaded(self.number, self.bucket, copy)

    @torch.no_grad()
    def upload_masters(self) -> None:
        """Send what the masters hold, without a step: they have been loaded."""
        for out, master in zip(self.output_fragments(), self.masters, strict=True):
            if out is not None:
                out.copy_(master)
        self.send()


# ---- 5 step ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """So many threads for the CPU's kernels inside, as before afterwards."""
    before = torch.get_num_threads()
    try:
        if count != before:
            torch.set_num_threads(count)
        yield
    finally:
        if count != before:
            torch.set_num_threads(before)


def bytes_of_step(optimizer: torch.optim.Optimizer, group: SubGroup, outs: Sequence[torch.Tensor | None]) -> int:
    """Bytes that a one-pass step reads and writes: masters and moments twice, gradients and new parameters once."""
    states = [t for m in group.masters for t in optimizer.state.get(m, {}).values() if torch.is_tensor(t) and t.dim()]
    kept = sum(t.nbytes for t in [*group.masters, *states])
    return 2 * kept + sum(part.grad.nbytes for part in group.parts) + sum(o.nbytes for o in outs if o is not None)


class HostOptimizerShard(OptimizerShard):
    """An :class:`OptimizerShard` whose first buckets are in host memory.

    The step goes sub-group by sub-group: first what is left on the device, which a GPU does while the CPU goes on;
    then, in host memory, one bucket after the other. A bucket's parameters leave while the next one is updated.

    Args:
        gradients: the buckets that are on the host, and their sums.
        staging: where the CPU writes parameters that travel; None where none do.
        threads: of the CPU's step.
        meter: counts bytes and seconds.
        optimizer: as for :class:`OptimizerShard`, and what follows.
        groups: all trained groups.
        grad_dtype: accumulation dtype.
        rank: this rank.
        more: ``sub_group_size`` and ``one_pass``.
    """

    def __init__(
        self,
        gradients: HostGradients,
        staging: Staging | None,
        threads: int,
        meter: OffloadStats,
        optimizer: torch.optim.Optimizer,
        groups: Sequence[ParamGroup],
        grad_dtype: torch.dtype,
        rank: int,
        **more: Any,
    ) -> None:
        self.gradients, self.threads, self.meter = gradients, threads, meter
        self.on_uploaded: OnUploaded | None = None
        """The stage's: the new parameters of a bucket are on their way to the device, or there."""
        self.uploads: list[HostParamUpload] = []
        turn = 0
        for g, group in enumerate(groups):
            for bucket in (i for i in group.layout.buckets if group.placement.steps_on_host(i)):
                wire = gradients.wire
                self.uploads.append(HostParamUpload(g, group, bucket, rank, wire, staging, turn, self._uploaded))
                turn += not group.placement.keeps_on_host(bucket)
        super().__init__(optimizer, groups, grad_dtype, rank, **more)
        by_master = {id(part.master): part for part in self.parts}
        self.on_host = [
            (SubGroup([by_master[id(master)] for master in upload.masters]), upload) for upload in self.uploads
        ]

    def _uploaded(self, group: int, bucket: Bucket, copy: PendingCopy | None) -> None:
        if self.on_uploaded is not None:
            self.on_uploaded(group, bucket, copy)

    def _device_numel(self, group: ParamGroup) -> int:
        return group.layout.shard_numel - group.placement.optimizer_numel

    def _device_parts(self) -> list[MasterFragment]:
        there = {id(master) for upload in self.uploads for master in upload.masters}
        return [part for part in self.parts if id(part.master) not in there]

    # ---- 3, 4: reduced gradients arrive ------------------------------------------------------------------------------

    def grad_output(self, group: int, bucket: Bucket, accumulate: bool, measure: Measure | None) -> GradOutput:
        """Where the reducer writes a bucket's sum: ``grad_S``, or a slot that leaves for the host at once."""
        if not self.gradients.holds(group, bucket):
            return super().grad_output(group, bucket, accumulate, measure)
        slot, output = self.gradients.acquire(bucket, accumulate)
        # What is added on the host is measured there.
        there = measure if accumulate else None
        leave = partial(self.gradients.leave, slot, group, bucket, accumulate, bucket.padding_of(self.rank), there)
        return GradOutput(output, None if accumulate else measure, leave)

    def grad_shard(self, group: int, bucket: Bucket) -> torch.Tensor:
        """This rank's part of a bucket's reduced gradients, on either side."""
        if self.gradients.holds(group, bucket):
            return self.gradients.sum_of(group, bucket)
        return super().grad_shard(group, bucket)

    def drain_grads(self) -> None:
        """Wait for gradients on their way to the host."""
        self.gradients.drain()

    def discard_grads(self) -> None:
        """Forget gradients on their way to the host."""
        self.gradients.discard()

    # ---- 5: step -----------------------------------------------------------------------------------------------------

    def step(self, divisor: float) -> None:
        """Step on the device, then bucket by bucket on the host, from where new parameters leave at once."""
        super().step(divisor)
        self._step_on_host(divisor)

    def _step_on_host(self, divisor: float) -> None:
        leg = self.meter.leg(ADAM)
        with cpu_threads(self.threads):
            for sub_group, upload in self.on_host:
                outs = upload.output_fragments()
                began = time.perf_counter()
                with profiler_ranges.span("step", *upload.where()):
                    self._optimizer_step(sub_group, divisor, outs)
                took = time.perf_counter() - began
                leg.add(bytes_of_step(self.optimizer, sub_group, outs), took, took)
                upload.send()

    def upload_masters(self) -> None:
        """Let the parameters follow masters that have been loaded."""
        for upload in self.uploads:
            upload.upload_masters()
