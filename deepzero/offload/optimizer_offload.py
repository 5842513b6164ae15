"""ZeRO-Offload: the part of the optimizer's shard that lives in host memory, and its way there and back.

Masters, moments and reduced gradients of the first buckets are on the host, and the CPU steps on them. Three things
happen to such a bucket::

    3 gradient ready   its sum is written into a buffer on the device, and leaves for the host while autograd goes on
    5 step             the CPU steps on it, and writes the new parameters, cast, in the same pass over memory
    6 publish          they travel to the device, and from there to the other ranks, while the CPU steps on the next

    CPU     | step on 0 | step on 1 | step on 2 | ...
    copies              | 0 up      | 1 up      | 2 up ...
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
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from deepzero.comm.collectives import Communicator
from deepzero.config.zero import OffloadOptimizerConfig
from deepzero.layout import Bucket
from deepzero.offload.copy_streams import (
    ADAM,
    FETCH,
    FETCH_BETWEEN_STEPS,
    SUMS_TO_DEVICE,
    TO_DEVICE,
    TO_HOST,
    HostDeviceCopier,
    Transfer,
)
from deepzero.offload.cpu_adam import MOMENTS as MOMENT_NAMES
from deepzero.offload.cpu_adam import CPUAdam
from deepzero.offload.pinned_arena import HostArena, HostMemory, Region
from deepzero.placement import GroupPlan
from deepzero.runtime.optimizer_state import allocate_state
from deepzero.runtime.zero.optimizer_shard import GradOutput, OptimizerShard
from deepzero.runtime.zero.parameter_all_gather import PlainAllGather
from deepzero.runtime.zero.stage3 import HOST_PARAMETERS
from deepzero.runtime.zero.stage_1_and_2 import HostAllocator, ParamGroup

GRADIENTS, STAGING, MOMENTS = "host_gradients", "host_buffers", "host_moments"


@dataclass
class Offload:
    """The host's side of one rank: what is carved out of the arena, or of files, in the order of the plan."""

    arena: HostArena
    files: Mapping[str, HostMemory]  # by category: what lies in a file instead
    copier: HostDeviceCopier
    threads: int  # of the CPU's step
    settings: OffloadOptimizerConfig
    state_regions: list[Region]  # of each trained group: what its optimizer state takes
    sums: HostGradients | None
    staging: list[Region]
    make_shard: Callable[..., HostOptimizerShard]
    shard: HostOptimizerShard | None = None  # made by build_shard, where the CPU steps on anything
    # Of each trained group: the optimizer's state of what the CPU steps on, by its name there.
    columns: list[dict[str, torch.Tensor]] = field(default_factory=list)

    @property
    def memories(self) -> list[HostMemory]:
        """The arena, and the files."""
        return [self.arena, *dict.fromkeys(self.files.values())]

    def allocate(self, category: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """1-D memory of the arena, or of a file's mapping."""
        return self.files.get(category, self.arena).allocate(category, numel, dtype)

    def tensors(self, category: str) -> list[torch.Tensor]:
        """What was allocated under ``category``."""
        return self.files.get(category, self.arena).tensors(category)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory was allocated here."""
        return any(memory.holds(tensor) for memory in self.memories)

    def ledger_name(self, category: str) -> str:
        """The ledger's word for what is allocated under ``category``."""
        return category.replace(HostMemory.prefix, self.files.get(category, self.arena).prefix)

    def problem(self) -> RuntimeError | None:
        """That what lies in a file is half old, half new, if it is."""
        broken = [memory.broken for memory in self.memories if memory.broken is not None]
        return RuntimeError(broken[0]) if broken else None

    def drop_pages(self) -> None:
        """Give memory back in which pages of files lie."""
        for memory in self.memories:
            memory.drop_pages()

    def close(self) -> None:
        """Unlock the memory, end the files' threads; memory and disk space go back with the last tensor."""
        for memory in self.memories:
            memory.close()

    def plain_all_gather(self, bucket: Bucket, dtype: torch.dtype, comm: Communicator, where: str) -> PlainAllGather:
        """How a bucket's parameters on the host reach the device."""
        return HostAllGather(self.copier, HOST_PARAMETERS in self.files, bucket, dtype, comm, where)

    def allocate_state(self, optimizer: torch.optim.Optimizer, groups: Sequence[ParamGroup]) -> None:
        """Make the optimizer's state; for what the CPU steps on, one column for each kind of state."""
        if not (in_files := MOMENTS in self.files):
            allocate_state(optimizer)
        self.columns = [{} for _ in groups]
        for group, region, columns in zip(groups, self.state_regions, self.columns, strict=True):
            if not region.numel:
                continue
            room, extent = self.allocate(MOMENTS, region.numel, region.dtype), group.placement.host_optimizer_numel
            if in_files:  # CPUAdam's, made where it stays: host memory could not hold all of it, not for a while
                columns |= zip(MOMENT_NAMES, room.view(torch.float32).split(extent), strict=True)
            for fragment, master in zip(group.fragments, group.masters, strict=True):
                if fragment.shard_start >= extent:
                    continue
                if in_files:
                    state = optimizer.state[master]
                    state.setdefault("step", torch.zeros((), dtype=torch.float32, device="cpu"))
                    made = {name: state.get(name) for name in MOMENT_NAMES}
                else:
                    state = optimizer.state.get(master, {})
                    tensors = {key: value for key, value in state.items() if torch.is_tensor(value)}
                    made = {key: value for key, value in tensors.items() if value.dim() and value.shape == master.shape}
                for key, value in made.items():
                    if key not in columns:
                        column, room = room.tensor_split([extent * value.itemsize])
                        columns[key] = column.view(value.dtype)
                    mine = columns[key][fragment.shard_start :][: fragment.numel].view_as(master)
                    state[key] = mine if value is None else mine.copy_(value)
        if in_files:
            allocate_state(optimizer)

    def build_shard(
        self, optimizer: torch.optim.Optimizer, groups: Sequence[ParamGroup], *given: Any, **more: Any
    ) -> OptimizerShard:
        """Carve what gradients and staging need, and build the shard around it. Arguments are OptimizerShard's."""
        for group in groups:
            group.before_write = self.copier.finish_reads
        if self.sums is not None:
            self.shard = self.make_shard(self, self.sums, optimizer, groups, *given, **more)
        self.drop_pages()  # the first values of masters and parameters are in their files
        # Without a bucket to step on, only parameters are on the host.
        return self.shard if self.shard is not None else OptimizerShard(optimizer, groups, *given, **more)

    @property
    def uploads(self) -> list[HostParamUpload]:
        """The ways back of all buckets that the CPU steps on."""
        return self.shard.uploads if self.shard is not None else []

    def upload_masters(self) -> None:
        """Let the parameters follow masters on the host that have been loaded."""
        for upload in self.uploads:
            upload.upload_masters()
        self.drop_pages()

    def buffers_on_device(self) -> list[torch.Tensor]:
        """What is kept on the device for the copies."""
        return [buffer.memory for buffer in self.shard.gradients.buffers] if self.shard is not None else []

    def describe(self, optimizer: torch.optim.Optimizer) -> str:
        """One line: sizes, whether locked, threads, kernel; what lies in files, and how it gets there."""
        how = type(optimizer).__name__
        if isinstance(optimizer, CPUAdam):
            how = optimizer.describe()
        elif isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
            how = f"torch's {how}; CPUAdam would take one pass over memory"
        arena, *files = self.memories
        said = [f"offload per rank: {arena.describe()}", f"{self.threads} threads", how]
        return "; ".join([*said, *(file.describe() for file in files if file.nbytes)])


# ---- 1 fetch: parameters in host memory (offload_param) --------------------------------------------------------------


class HostAllGather(PlainAllGather):
    """The all-gather of a bucket whose shard lies in host memory, or in a file; every gather fetches it anew."""

    on_host = True

    def __init__(self, copier: HostDeviceCopier, in_file: bool, bucket: Bucket, *given: Any) -> None:
        super().__init__(bucket, *given)
        self.in_file = in_file
        self._copier, self._shard_padding = copier, bucket.padding_of(self.comm.rank)
        self._copy: Transfer | None = None
        self.comm.ledger.untracked_kinds.add(FETCH_BETWEEN_STEPS)

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
class StagingBuffer:
    """A place where one bucket after the other stops on its way, on the device or on the host.

    On the device, for a bucket's sum, which comes from the host if something is to be added to it::

        output                       reduce into it   leave                   finish (before it is used again)
        copy up what was there       add              copy down, own stream   the copy is there
        ---- free ----> taken --------------------------- in flight -------> free
    """

    memory: torch.Tensor
    copy: Transfer | None = None  # the last one that was launched, from here or to here
    taken: tuple[int, int] | None = None  # a reduction of this bucket, by group and number, writes into it

    def finish(self) -> None:
        """Wait for the last transfer: what is here is about to be read by the program, or written over."""
        copy, self.copy = self.copy, None
        if copy is not None:
            copy.finish()

    def is_over(self) -> bool:
        """Whether :meth:`finish` would not wait."""
        return self.copy is None or self.copy.is_over()


class HostGradients:
    """``grad_S`` of the trained groups' buckets that live on the host: planned first, then carved out of the arena.

    A sum arrives where the optimizer will read it. For the next micro-batch it goes up again while that one's gradients
    travel, and is added to on the device, contribution by contribution: the bits are those of sums that stay there. The
    way up is free at that time, and the CPU adds nothing.

    There are two ``copies`` while the last gradients' step may still run when the next ones come (delayed update), else
    one; and one buffer more than the reducer has, so that no reduction waits for the copy of the one before it.
    """

    copier: HostDeviceCopier

    def __init__(self, planned: Sequence[GroupPlan], copies: int, dtype: torch.dtype, buffer_count: int) -> None:
        self.copies, self._current = copies, 0
        self.largest = max(b.shard_numel for p in planned for b in p.layout.buckets if p.steps_on_host(b))
        self.regions = [Region(GRADIENTS, p.host_optimizer_numel, dtype) for p in planned for _ in range(copies)]
        self.buffer_count, self._sums = buffer_count, list[torch.Tensor]()
        self.buffers = deque[StagingBuffer]()  # the oldest first
        # The way down of each bucket's last sum, by group and number: it goes up again when it is there.
        self._down: dict[tuple[int, int], Transfer] = {}

    def carve(self, allocate: HostAllocator, copier: HostDeviceCopier) -> None:
        """Take the planned regions, and the buffers on the device."""
        self.copier, self._sums = copier, [allocate(*region) for region in self.regions]
        dtype = self.regions[0].dtype
        zeros = [torch.zeros(self.largest, dtype=dtype, device=copier.device) for _ in range(self.buffer_count)]
        self.buffers.extend(map(StagingBuffer, zeros))

    def sum_of(self, group: int, bucket: Bucket) -> torch.Tensor:
        """This rank's part of the bucket's sum, on the host; complete after :meth:`drain`."""
        return bucket.shard_of(self._sums[group * self.copies + self._current])

    def swap(self) -> None:
        """Let the next step's sums go to the other copy: this one's are in use."""
        self._current = (self._current + 1) % self.copies

    def output(self, group: int, bucket: Bucket, accumulate: bool, padding: int) -> GradOutput:
        """Where the reducer writes a bucket's sum: the oldest buffer. It leaves when it is written, in stream order.

        With ``accumulate`` what is on the host comes there first; ``padding`` elements of it belong to no parameter.
        """
        buffer = self.buffers[0]
        self.buffers.rotate(-1)
        if buffer.taken:
            raise RuntimeError("more reductions are under way than there are buffers for their sums")
        buffer.finish()
        target, key = self.sum_of(group, bucket), (group, bucket.index)
        source, where = buffer.memory[: bucket.shard_numel], f"bucket {bucket.index}"
        fetch = partial(self.copier.to_device, SUMS_TO_DEVICE, source, target, padding, where)
        # It left a whole micro-batch ago, if the model has many buckets; else it may be a reduction still, or several.
        if accumulate and all(other.taken != key for other in self.buffers) and self._down[key].is_over():
            buffer.copy = fetch()
        buffer.taken = key

        @contextlib.contextmanager
        def around_sum() -> Iterator[None]:
            if accumulate:
                if buffer.copy is None:
                    self._down[key].wait()  # of the reduction before: they end in the order in which they began
                    buffer.copy = fetch()
                buffer.copy.wait()
            yield
            buffer.copy = self._down[key] = self.copier.to_host(TO_HOST, target, source, padding, where)
            buffer.taken = None

        return source, around_sum

    def drain(self) -> None:
        """Wait for everything that has left, the oldest first. Afterwards the sums may be read."""
        for buffer in self.buffers:
            buffer.finish()

    def discard(self) -> None:
        """Free all buffers, also those that an exception has kept from leaving, or whose transfer has failed."""
        for buffer in self.buffers:
            with contextlib.suppress(RuntimeError):  # a disk's, in reading: nobody wants it any more
                buffer.finish()
            buffer.taken = None


# ---- 6 publish: back to the device -----------------------------------------------------------------------------------


class HostParamUpload:
    """One bucket's new parameters, from the CPU's step to where the model reads them.

    ``staging`` is where the CPU writes what travels: an empty one where the masters themselves do, or nothing does.
    """

    def __init__(self, shard: HostOptimizerShard, number: int, bucket: Bucket, staging: StagingBuffer) -> None:
        self._shard, self.number, self.bucket, self._staging = shard, number, bucket, staging
        self._staged = staging.memory if staging.memory.numel() else None
        self.group = shard.groups[number]
        inside = self.group.fragment_slice(bucket)
        self.fragments, self.masters = self.group.fragments[inside], self.group.masters[inside]
        self._on_host = self.group.placement.keeps_on_host(bucket)
        self.kept: torch.Tensor | None = None
        """Where the step writes parameters that live on the host, if not where they live."""

    def output_fragments(self) -> list[torch.Tensor | None]:
        """One tensor of the compute dtype and the master's shape for each fragment, which the CPU writes.

        An entry is None where the master is uploaded itself, or the parameter *is* the master, as in fp32 without
        files. Waits until the previous upload from the same memory has completed.
        """
        self._staging.finish()
        # offload_param: the step writes where parameters live, and nothing travels here. The program has stood still
        # for what was fetched from there: the agreement before the step is read behind the passes.
        memory = self._staged
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
        pairs = zip(runs, self.masters, strict=True)
        return [staged[start : start + numel].view(master.shape) for (start, numel), master in pairs]

    def where(self) -> tuple[int, str]:
        """The bucket's number and its first parameter, for traces."""
        return self.bucket.index, self.group.names[self.bucket.slots[0].index]

    def send(self) -> None:
        """Launch the copy of what the step has written, and tell the stage."""
        copy, memory, bucket = None, self._staged, self.bucket
        behind: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if not self._on_host:
            source = self.group.master_of(bucket) if memory is None else memory[: bucket.shard_numel]
            target, padding = self.group.param_shard(bucket), bucket.padding_of(self._shard.rank)
            with self.group.comm.ranges.span("publish", *self.where()):
                copy = self._shard.gradients.copier.to_device(
                    TO_DEVICE, target, source.detach(), padding, f"bucket {bucket.index}"
                )
            self._staging.copy = copy
            # Parameters that stay whole go on to the other ranks, behind the copy and on its own stream. A partitioned
            # bucket is waited for by its next fetch alone.
            if not self.group.placement.partitioned:
                behind = copy.afterwards(alone=bucket.world_size == 1)
        if self._shard.on_uploaded is not None:
            with behind:
                self._shard.on_uploaded(self.number, bucket, copy.wait if copy is not None else None)

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
    Arguments after ``host``, of which the shard is carved, and its ``sums`` are those of :class:`OptimizerShard`.
    """

    def __init__(self, host: Offload, sums: HostGradients, *given: Any, **more: Any) -> None:
        self.host, self.gradients = host, sums
        self.gradients.carve(host.allocate, host.copier)
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
                buffer = next(turns) if travels else StagingBuffer(torch.empty(0))
                self.uploads.append(HostParamUpload(self, number, bucket, buffer))

    # ---- 3, 4: reduced gradients arrive ------------------------------------------------------------------------------

    def grad_output(self, group: int, bucket: Bucket, accumulate: bool) -> GradOutput:
        """Where the reducer writes a bucket's sum: ``grad_S``, or a buffer that leaves for the host at once."""
        if not self.groups[group].placement.steps_on_host(bucket):
            return super().grad_output(group, bucket, accumulate)
        return self.gradients.output(group, bucket, accumulate, bucket.padding_of(self.rank))

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

    def step_in_turns(
        self, turns: Sequence[Sequence[tuple[int, Bucket]]], on_stepped: Callable[[int, Bucket], None]
    ) -> None:
        """As on the device; buckets in host memory leave in this order too, and tell the stage by ``on_uploaded``."""
        super().step_in_turns(turns, on_stepped)
        order = itertools.chain.from_iterable(turns)
        place = {(number, bucket.index): place for place, (number, bucket) in enumerate(order)}
        self.uploads.sort(key=lambda upload: place[upload.number, upload.bucket.index])

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
                self.host.copier.meter.legs[ADAM].add(bytes_of_step(self, upload.masters, outs), took, took)
                upload.send()
