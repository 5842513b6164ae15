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
``offload_plan.py`` decides what is here and takes the memory.

Sources: [ZeRO-Offload], section 4: gradients leave as they are ready, and parameters come back in pieces while others
are stepped on; [ZeRO-Offload++] for ``ratio``.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from deepzero.comm.collectives import Communicator
from deepzero.comm.exact_sum import Measure
from deepzero.config.zero import OffloadOptimizerConfig
from deepzero.layout import Bucket, OffloadPlan
from deepzero.offload.copy_streams import (
    ADAM,
    FETCH,
    FETCH_BETWEEN_STEPS,
    SUMS_TO_DEVICE,
    TO_DEVICE,
    TO_HOST,
    HostDeviceCopier,
    OffloadStats,
    PendingCopy,
    Transfer,
)
from deepzero.offload.cpu_adam import CPUAdam
from deepzero.offload.pinned_arena import HostArena, Region, describe_bytes
from deepzero.runtime.optimizer_state import allocate_state
from deepzero.runtime.zero.optimizer_shard import GradOutput, OptimizerShard
from deepzero.runtime.zero.parameter_all_gather import PlainAllGather
from deepzero.runtime.zero.stage_1_and_2 import HostAllocator, ParamGroup

GRADIENTS, STAGING, MOMENTS = "host_gradients", "host_buffers", "host_moments"


@dataclass
class Offload:
    """The host's side of one rank: what is carved out of the arena, in the order of its plan, and the way there."""

    arena: HostArena
    wire: HostDeviceCopier
    threads: int  # of the CPU's step
    settings: OffloadOptimizerConfig
    rooms: list[Region]  # of each trained group: what its optimizer state takes
    sums: HostGradients | None
    staging: list[Region]
    shard_class: type[HostOptimizerShard]
    shard: HostOptimizerShard | None = None  # made by build_shard, where the CPU steps on anything

    @property
    def meter(self) -> OffloadStats:
        """Bytes and seconds of the pipeline."""
        return self.wire.meter

    def allocate(self, category: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """1-D memory of the arena."""
        return self.arena.allocate(category, numel, dtype)

    def tensors(self, category: str) -> list[torch.Tensor]:
        """What was allocated under ``category``."""
        return self.arena.tensors(category)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory was allocated here."""
        return self.arena.holds(tensor)

    def ledger_name(self, category: str) -> str:
        """The ledger's word for what is allocated under ``category``."""
        return category

    def check_states(self) -> None:
        """Raise where what lies here is damaged. Memory does not fail; files do."""

    def states_replaced(self) -> None:
        """A checkpoint with the optimizer's states has been loaded."""

    def close_step(self) -> None:
        """An optimizer step is complete."""
        self.meter.close_step()

    def close(self) -> None:
        """Unlock the memory, which goes back to the system with its last tensor."""
        self.arena.close()

    def finish_reads(self) -> None:
        """Wait until no copy reads the arena."""
        self.wire.finish_reads()

    def plain_all_gather(self, bucket: Bucket, dtype: torch.dtype, comm: Communicator, where: str) -> PlainAllGather:
        """How a bucket's parameters in host memory reach the device."""
        return HostAllGather(self.wire, bucket, dtype, comm, where)

    def allocate_state(self, optimizer: torch.optim.Optimizer, groups: Sequence[ParamGroup]) -> None:
        """Make the optimizer's state; for what the CPU steps on in the arena, one column for each kind of state."""
        allocate_state(optimizer)
        for group, plan in zip(groups, self.rooms, strict=True):
            if not plan.numel:
                continue
            room, extent = self.allocate(MOMENTS, plan.numel, plan.dtype), group.placement.optimizer_numel
            columns: dict[str, torch.Tensor] = {}
            for fragment, master in zip(group.fragments, group.masters, strict=True):
                state = optimizer.state.get(master, {}) if fragment.shard_start < extent else {}
                for key, value in state.items():
                    if torch.is_tensor(value) and value.dim() and value.shape == master.shape:
                        if key not in columns:
                            column, room = room.tensor_split([extent * value.itemsize])
                            columns[key] = column.view(value.dtype)
                        column = columns[key][fragment.shard_start :][: fragment.numel]
                        state[key] = column.view_as(value).copy_(value)

    def build_shard(
        self, optimizer: torch.optim.Optimizer, groups: Sequence[ParamGroup], *given: Any, **more: Any
    ) -> OptimizerShard:
        """Carve what gradients and staging need, and build the shard around it. Arguments are OptimizerShard's."""
        for group in groups:
            group.before_write = self.finish_reads
        if self.sums is None:  # only parameters are on the host
            return OptimizerShard(optimizer, groups, *given, **more)
        self.shard = self.shard_class(self, optimizer, groups, *given, **more)
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
        return [slot.device for slot in self.shard.gradients.slots] if self.shard is not None else []

    def describe(self, optimizer: torch.optim.Optimizer) -> str:
        """One line: sizes, whether locked, threads, kernel."""
        how = type(optimizer).__name__
        if isinstance(optimizer, CPUAdam):
            how = optimizer.describe()
        elif isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
            how = f"torch's {how}; CPUAdam would take one pass over memory"
        locked = "page-locked" if self.arena.pinned else "not page-locked"
        sizes = describe_bytes(self.arena.regions)
        return f"offload per rank: {sizes} of host memory, {locked}; {self.threads} threads; {how}"


# ---- 1 fetch: parameters in host memory (offload_param) --------------------------------------------------------------


class HostAllGather(PlainAllGather):
    """The all-gather of a bucket whose shard lies in host memory; every gather copies it to the device anew."""

    on_host = True

    def __init__(
        self, copier: HostDeviceCopier, bucket: Bucket, dtype: torch.dtype, comm: Communicator, where: str
    ) -> None:
        super().__init__(bucket, dtype, comm, where)
        self._copier, self._shard_padding = copier, bucket.padding_of(comm.rank)
        self._copy: PendingCopy | None = None
        comm.ledger.untracked_kinds.add(FETCH_BETWEEN_STEPS)

    @contextlib.contextmanager
    def fetch_shard(self, kind: str, shard: torch.Tensor, target: torch.Tensor) -> Iterator[torch.Tensor]:
        """Copy the shard to ``target``. Inside the context the current stream is behind the copy.

        What is launched there is ordered behind the copy on the copy's own stream: the model goes on computing, as it
        does while others send.
        """
        counted = FETCH_BETWEEN_STEPS if kind in self.comm.ledger.untracked_kinds else FETCH
        self._copy = self._copier.to_device(counted, target, shard, self._shard_padding, self.where)
        with self._copy.afterwards(alone=self.comm.world_size == 1):
            yield target

    def wait_shard(self) -> None:
        """Let the current stream wait for the copy."""
        if self._copy is not None:
            self._copy.wait()


# ---- 3 gradient ready: down to the host ------------------------------------------------------------------------------


@dataclass
class StagingSlot:
    """A place on the device for one bucket's sum, which comes from the host if something is to be added to it.

    ::

        output                       reduce into it   leave                   settle (before the slot is used again)
        copy up what was there       add              copy down, own stream   the copy is there
        ---- free ----> taken --------------------------- in flight -------> free
    """

    device: torch.Tensor
    copy: Transfer | None = None  # the last one that was launched
    taken: bool = False  # a reduction writes into it

    def settle(self) -> None:
        """Wait for the slot's copy."""
        if self.copy is not None:
            self.copy.finish()
            self.copy = None


class HostGradients:
    """``grad_S`` of the trained groups' buckets that live on the host: planned first, then carved out of the arena.

    A sum arrives where the optimizer will read it. For the next micro-batch it goes up again while that one's gradients
    travel, and is added to on the device, contribution by contribution: the bits are those of sums that stay there. The
    way up is free at that time, and the CPU adds nothing.

    Args:
        placements: of the groups, some of whose buckets are on the host.
        copies: 2 while the last gradients' step may still run when the next ones come (delayed update), else 1.
        dtype: accumulation dtype.
        slots: one more than the reducer has buckets, so that no reduction waits for the copy of the one before it.
    """

    wire: HostDeviceCopier

    def __init__(self, placements: Sequence[OffloadPlan], copies: int, dtype: torch.dtype, slots: int) -> None:
        self.copies, self._current, self._next = copies, 0, 0
        self.largest = max(b.shard_numel for p in placements for b in p.layout.buckets if p.steps_on_host(b))
        self.regions = [Region(GRADIENTS, p.optimizer_numel, dtype) for p in placements for _ in range(copies)]
        self.slot_count, self._sums = slots, list[torch.Tensor]()
        self.buffers: list[Region] = []  # further ones of the arena's, beside the sums
        self.slots: list[StagingSlot] = []
        # The way down of each bucket's last sum, by group and bucket: it goes up again when it is there.
        self._down: dict[tuple[int, int], Transfer] = {}

    def carve(self, allocate: HostAllocator, wire: HostDeviceCopier) -> None:
        """Take the planned regions, and the slots on the device."""
        self.wire, self._sums = wire, [allocate(*region) for region in self.regions]
        dtype = self.regions[0].dtype
        self.slots = [
            StagingSlot(torch.zeros(self.largest, dtype=dtype, device=wire.device)) for _ in range(self.slot_count)
        ]

    def sum_of(self, group: int, bucket: Bucket) -> torch.Tensor:
        """This rank's part of the bucket's sum, on the host; complete after :meth:`drain`."""
        return bucket.shard_of(self._sums[group * self.copies + self._current])

    def swap(self) -> None:
        """Let the next step's sums go to the other copy: this one's are in use."""
        self._current = (self._current + 1) % self.copies

    def output(self, group: int, bucket: Bucket, accumulate: bool, padding: int, measure: Measure | None) -> GradOutput:
        """Where the reducer writes a bucket's sum: the oldest slot. It leaves when it is written, in stream order.

        With ``accumulate`` what is on the host comes there first; ``padding`` elements of it belong to no parameter;
        ``measure`` sees the finished sum.
        """
        slot = self.slots[self._next]
        self._next = (self._next + 1) % len(self.slots)
        if slot.taken:
            raise RuntimeError("more reductions are under way than there are slots for their sums")
        slot.settle()
        slot.taken, target, key = True, self.sum_of(group, bucket), (group, bucket.index)
        source, where = slot.device[: bucket.shard_numel], f"bucket {bucket.index}"
        down = self._down.pop(key, None)

        fetch = partial(self._fetch, slot, target, padding, where)
        # It left a whole micro-batch ago, if the model has many buckets; else it may be a reduction still.
        if accumulate and down is not None and down.is_over():
            slot.copy = fetch()

        @contextlib.contextmanager
        def there_and_back() -> Iterator[None]:
            if accumulate:
                if slot.copy is None:
                    (down or self._down[key]).wait()
                    slot.copy = fetch()
                slot.copy.wait()
            yield
            slot.copy = self._down[key] = self._leave(slot, target, padding, where)
            slot.taken = False

        return source, measure, there_and_back

    def _fetch(self, slot: StagingSlot, sums: torch.Tensor, padding: int, where: str) -> Transfer:
        """Launch: a bucket's sums on the host into its slot."""
        return self.wire.to_device(SUMS_TO_DEVICE, slot.device[: sums.numel()], sums, padding, where)

    def _leave(self, slot: StagingSlot, sums: torch.Tensor, padding: int, where: str) -> Transfer:
        """Launch the way back."""
        return self.wire.to_host(TO_HOST, sums, slot.device[: sums.numel()], padding, where)

    def drain(self) -> None:
        """Wait for everything that has left, the oldest first. Afterwards the sums may be read."""
        for slot in (*self.slots[self._next :], *self.slots[: self._next]):
            slot.settle()

    def discard(self) -> None:
        """Free all slots, also those that an exception has kept from leaving."""
        self.drain()
        for slot in self.slots:
            slot.taken = False


# ---- 6 publish: back to the device -----------------------------------------------------------------------------------


@dataclass
class StagingBuffer:
    """What the CPU has written and a copy reads: a buffer that some uploads use in turn, or masters (None)."""

    memory: torch.Tensor | None = None
    copy: PendingCopy | None = None

    def finish(self) -> None:
        """Wait until the last copy has left: the CPU is about to write over what it reads."""
        if self.copy is not None:
            self.copy.finish()
            self.copy = None


class HostParamUpload:
    """One bucket's new parameters, from the CPU's step to where the model reads them.

    ``staging`` is where the CPU writes what travels.
    """

    def __init__(self, shard: HostOptimizerShard, number: int, bucket: Bucket, staging: StagingBuffer) -> None:
        self._shard, self.number, self.bucket, self._staging = shard, number, bucket, staging
        self.group = shard.groups[number]
        inside = self.group.inside(bucket)
        self.fragments, self.masters = self.group.fragments[inside], self.group.masters[inside]
        self._on_host = self.group.placement.keeps_on_host(bucket)
        self.kept: torch.Tensor | None = None
        """Where the step writes parameters that live on the host, if not where they live."""

    def output_fragments(self) -> list[torch.Tensor | None]:
        """One tensor of the compute dtype for each fragment, into which the CPU writes the updated parameter.

        An entry is None in fp32 runs: there the master is uploaded itself, or the parameter *is* the master. Waits
        until the previous upload from the same memory has completed.
        """
        self._staging.finish()
        # offload_param: the step writes where parameters live, and nothing travels here. The program has stood still
        # for what was fetched from there: the agreement before the step is read behind the passes.
        memory = self._staging.memory
        if self._on_host:
            own = self.group.placement.own_masters_at(self.bucket)
            memory = None if own else self.group.param_shard(self.bucket) if self.kept is None else self.kept
        if memory is None:
            return [None] * len(self.fragments)
        staged, cursor = memory[: self.bucket.shard_numel], 0
        runs = [(fragment.shard_start - self.bucket.shard_offset, fragment.numel) for fragment in self.fragments]
        for start, numel in [*runs, (staged.numel(), 0)]:  # padding between parameters is zero on the device, too
            staged[cursor:start].zero_()
            cursor = start + numel
        return [staged[start : start + numel] for start, numel in runs]

    def where(self) -> tuple[int, str]:
        """The bucket's number and its first parameter, for traces."""
        return self.bucket.index, self.group.names[self.bucket.slots[0].index]

    def send(self) -> None:
        """Launch the copy of what the step has written, and tell the stage."""
        copy, memory, bucket = None, self._staging.memory, self.bucket
        behind: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if not self._on_host:
            source = self.group.master_of(bucket) if memory is None else memory[: bucket.shard_numel]
            target, padding = self.group.param_shard(bucket), bucket.padding_of(self._shard.rank)
            with self.group.comm.ranges.span("publish", *self.where()):
                copy = self._shard.gradients.wire.to_device(
                    TO_DEVICE, target, source.detach(), padding, f"bucket {bucket.index}"
                )
            self._staging.copy = copy
            # Parameters that stay whole go on to the other ranks, behind the copy and on its own stream. A partitioned
            # bucket is waited for by its next fetch alone.
            if not self.group.partitioned:
                behind = copy.afterwards(alone=bucket.world_size == 1)
        if self._shard.on_uploaded is not None:
            with behind:
                self._shard.on_uploaded(self.number, bucket, copy.wait if copy is not None else None)

    @torch.no_grad()
    def upload_masters(self) -> None:
        """Send what the masters hold, without a step: they have been loaded."""
        for out, master in zip(self.output_fragments(), self.masters, strict=True):
            if out is not None:
                out.copy_(master.view(-1))
        self.send()


# ---- 5 step ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """So many threads for the CPU's kernels inside, as before afterwards."""
    before = torch.get_num_threads()
    if before == count:  # setting them throws away what libraries have cached
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def bytes_of_step(shard: OptimizerShard, masters: Sequence[torch.Tensor], outs: Sequence[torch.Tensor | None]) -> int:
    """Bytes that a one-pass step reads and writes: masters and moments twice, gradients and new parameters once."""
    states = [t for m in masters for t in shard.optimizer.state.get(m, {}).values() if torch.is_tensor(t) and t.dim()]
    once = [*(shard.grads[m] for m in masters), *(out for out in outs if out is not None)]
    return 2 * sum(t.nbytes for t in (*masters, *states)) + sum(t.nbytes for t in once)


class HostOptimizerShard(OptimizerShard):
    """An :class:`OptimizerShard` whose first buckets are in host memory.

    The step goes sub-group by sub-group: first what is left on the device, which a GPU does while the CPU goes on;
    then, in host memory, one bucket after the other. A bucket's parameters leave while the next one is updated.
    Arguments after ``host``, of which the shard is carved, are those of :class:`OptimizerShard`.
    """

    def __init__(self, host: Offload, *given: Any, **more: Any) -> None:
        if host.sums is None:
            raise RuntimeError("no bucket is on the host")
        self.host = host
        self.gradients = host.sums
        self.gradients.carve(host.allocate, host.wire)
        staging = [StagingBuffer(host.allocate(*region)) for region in host.staging]
        self.on_uploaded: Callable[[int, Bucket, Callable[[], None] | None], None] | None = None
        """The stage's: new parameters of (group, bucket) are in place (None), or are when the function returns."""
        super().__init__(*given, **more)
        # In turn. A delayed update keeps what it wrote until the next boundary, and has a buffer for every bucket.
        turns = itertools.cycle(staging)
        self.uploads: list[HostParamUpload] = []
        for number, group in enumerate(self.groups):
            for bucket in (b for b in group.layout.buckets if group.placement.steps_on_host(b)):
                travels = bool(staging) and not group.placement.keeps_on_host(bucket)
                buffer = next(turns) if travels else StagingBuffer()
                self.uploads.append(HostParamUpload(self, number, bucket, buffer))

    # ---- 3, 4: reduced gradients arrive ------------------------------------------------------------------------------

    def grad_output(self, group: int, bucket: Bucket, accumulate: bool, measure: Measure | None) -> GradOutput:
        """Where the reducer writes a bucket's sum: ``grad_S``, or a slot that leaves for the host at once."""
        if not self.groups[group].placement.steps_on_host(bucket):
            return super().grad_output(group, bucket, accumulate, measure)
        return self.gradients.output(group, bucket, accumulate, bucket.padding_of(self.rank), measure)

    def grad_shard(self, group: int, bucket: Bucket) -> torch.Tensor:
        """This rank's part of a bucket's reduced gradients, on either side."""
        if self.groups[group].placement.steps_on_host(bucket):
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

    def step_by_bucket(self, order: Sequence[tuple[int, Bucket]], on_stepped: Callable[[int, Bucket], None]) -> None:
        """As on the device; buckets in host memory leave in ``order`` too, and tell the stage by ``on_uploaded``."""
        super().step_by_bucket(order, on_stepped)
        turn = {(number, bucket.index): place for place, (number, bucket) in enumerate(order)}
        self.uploads.sort(key=lambda upload: turn[upload.number, upload.bucket.index])

    def _in_memory(self) -> Generator[HostParamUpload]:
        """The buckets, one after the other, each in host memory until the next one is asked for."""
        yield from self.uploads

    def _step_on_host(self, divisor: float) -> None:
        with cpu_threads(self.host.threads), contextlib.closing(self._in_memory()) as uploads:
            for upload in uploads:
                outs = upload.output_fragments()
                began = time.perf_counter()
                with upload.group.comm.ranges.span("step", *upload.where()):
                    self._optimizer_step(upload.masters, divisor, outs)
                took = time.perf_counter() - began
                self.host.meter.legs[ADAM].add(bytes_of_step(self, upload.masters, outs), took, took)
                upload.send()
