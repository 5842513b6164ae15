"""Buckets: gradients on their way from every rank to the rank that owns them.

A bucket holds one bucket in the wire dtype. The reducer owns a fixed number of them (two when communication overlaps
with the backward pass, one when it does not) and keeps them for the whole run: fresh memory costs several times the
copy that fills it. The life of a bucket::

    acquire            launch                  finish                             acquire again
    copy gradients in  send parts to owners    sum the W received parts in fp32
    ---- free ----> filled ---- in flight ---> received ----> written to grad_S ----> free

Two ways of summing:

``exact``   every part travels in the wire dtype to its owner, who adds the W contributions in fp32 **in rank order**.
            The sum of an element then depends on nothing but its W contributions: not on the bucket it travelled in,
            not on the stage, not on timing. It is also more accurate than adding in bf16 hop by hop along a ring.
``native``  the backend's reduce-scatter or all-reduce in the wire dtype.

Volume per rank: a bucket of B elements sends ``(W-1)/W * B``, in both. Beside ``exact`` a third way may be given,
which takes some of the buckets: qgZ, in few bits, in ``quantized_reduce.py``.

Sources: the bucket of stage 1 with reduced communication (DeepSpeed post), ``allreduce_bucket`` and
``reduce_ipg_grads`` in DeepSpeed's ``stage_1_and_2.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

import torch

from deepzero.comm import profiler_ranges
from deepzero.comm.collectives import Communicator, Pending
from deepzero.comm.dry_run import real_device_type
from deepzero.comm.streams import BufferEvent, SideStream
from deepzero.layout import Bucket

SUM_CHUNK = 1 << 17
"""Elements. The sum runs over pieces this long, whose fp32 scratch (512 KiB) stays in the core's cache."""

DEVICE_CHUNK = 1 << 24
"""The same where chunks only cost launches: on a GPU, for parts that long. 128 MiB of scratch at the most."""


def chunk_for(device: torch.device, shard_numel: int) -> int:
    """Elements to sum at a time on ``device``, where no part is longer than ``shard_numel``."""
    return SUM_CHUNK if real_device_type(device) == "cpu" else max(SUM_CHUNK, min(shard_numel, DEVICE_CHUNK))


REDUCE_SCATTER = "gradients.reduce_scatter"
ALL_REDUCE = "gradients.all_reduce"
ALL_GATHER_GRADIENTS = "gradients.all_gather"

Measure = Callable[[torch.Tensor, int], None]
"""Called with each finished chunk of a sum, and where in the sum it starts, while the chunk is in the core's cache."""


Key: TypeAlias = tuple[int, int]
"""Which bucket: its group's number, and its own within the group."""


class EncodedPart(Protocol):
    """A contribution that has to be decoded to be read."""

    def read(self, start: int, values: torch.Tensor) -> None:
        """Write elements ``start`` to ``start + values.numel()`` into 1-D fp32 ``values``."""


Part: TypeAlias = torch.Tensor | EncodedPart


def sum_chunk(total: torch.Tensor, parts: Sequence[Part], start: int, scratch: torch.Tensor) -> None:
    """``total = parts[0] + parts[1] + …`` in fp32, left to right, of the elements from ``start`` on.

    Args:
        total: 1-D fp32; written.
        parts: in rank order.
        start: a multiple of the chunk's size, where parts are coded.
        scratch: fp32, ``total``'s extent.
    """
    _widen(parts[0], start, total)
    for part in parts[1:]:
        # A mixed-dtype add would widen into fresh memory; the kept scratch is already in cache.
        _widen(part, start, scratch)
        total.add_(scratch)


def _widen(part: Part, start: int, values: torch.Tensor) -> None:
    if isinstance(part, torch.Tensor):
        values.copy_(part[start : start + values.numel()])
    else:
        part.read(start, values)


def sum_in_rank_order(
    output: torch.Tensor,
    parts: Sequence[Part],
    accumulate: bool,
    scratch: torch.Tensor,
    factor: float = 1.0,
    on_chunk: Measure | None = None,
) -> None:
    """``output = parts[0] + parts[1] + …`` in fp32, left to right; with ``accumulate``, ``output += (that sum)``.

    Args:
        output: 1-D; fp32, or a narrower dtype into which the fp32 sum is rounded once.
        parts: in rank order; 1-D tensors of ``output``'s extent, any float dtype, or what decodes to such.
        accumulate: add to what ``output`` holds.
        scratch: fp32, two chunks of elements, on the same device; where parts are coded, of whole blocks each.
        factor: multiplies the sum, not what ``output`` holds already.
        on_chunk: sees what ``output`` holds in the end.
    """
    if output.is_meta:  # a rehearsal: nothing to add up, and nothing to keep in a cache
        output.copy_(output)
        if on_chunk is not None:
            on_chunk(output, 0)
        return
    size = scratch.numel() // 2
    in_place = output.dtype == torch.float32 and not accumulate
    for lo in range(0, output.numel(), size):
        target = output[lo : lo + size]
        total = target if in_place else scratch[: target.numel()]
        sum_chunk(total, parts, lo, scratch[size : size + target.numel()])
        if factor != 1.0:
            total.mul_(factor)
        if accumulate:
            target.add_(total)
        elif not in_place:
            target.copy_(total)
        if on_chunk is not None:
            on_chunk(target, lo)


@dataclass
class BucketBuffers:
    """One bucket and what it receives. Gates order its filling, its flight and its emptying on a GPU."""

    send: torch.Tensor
    """1-D, wire dtype, the largest bucket's extent."""
    recv_buffer: torch.Tensor
    """1-D ``uint8``: whatever a way of summing receives, or packs before it sends it. One room for all of them."""
    filled: BufferEvent
    free: BufferEvent


@dataclass
class InflightReduce:
    """A bucket between :meth:`BucketReducer.launch` and the sum in its output."""

    buffers: BucketBuffers
    bucket: Bucket
    key: Key
    output: torch.Tensor
    accumulate: bool
    on_chunk: Measure | None
    on_reduced: Callable[[], None] | None
    place: str = ""
    """The bucket's first parameter, for traces."""
    parts: list[Part] = field(default_factory=list)
    """What has to be added up when ``pending`` is over."""
    pending: Pending | None = None
    second_hop: Callable[[], None] | None = None
    """A second exchange comes after ``pending``: waits for the first, launches it, and puts its ``parts`` and
    ``pending`` in their place."""

    def sent(self) -> list[torch.Tensor]:
        """W views of the bucket, the part of every owner."""
        return list(self.buffers.send[: self.bucket.numel].split(self.bucket.shard_numel))


class ReduceStrategy(Protocol):
    """Another way of summing, for some of the buckets: between the bucket and the parts that are added up."""

    chunk: int
    """Elements to decode at a time: whole blocks, a multiple of ``ALIGN``, near ``SUM_CHUNK``."""

    def takes(self, key: Key) -> bool:
        """Whether this bucket goes this way; the same answer on all ranks."""

    def mail_bytes(self, capacity: int) -> int:
        """What it needs of a bucket of ``capacity`` elements."""

    def launch(self, inflight: InflightReduce, scratch: torch.Tensor) -> None:
        """Start the exchange, and set the flight's ``parts``, ``pending`` and ``second_hop``; never wait.

        Args:
            inflight: its bucket is filled.
            scratch: fp32, two chunks.
        """

    def kept(self) -> list[torch.Tensor]:
        """What it keeps beside the buckets, from one reduction to the next."""

    def forget(self) -> None:
        """What was reduced last does not count, or belongs to another run: drop all that is kept of it."""


class BucketReducer:
    """Sends buckets to their owners and adds up what arrives.

    Args:
        comm: the ranks.
        capacity: elements of the largest bucket that will ever be reduced.
        wire_dtype: dtype in which gradients travel.
        method: ``exact`` or ``native``; see the module's text.
        whole: every rank gets the whole sum (an all-reduce) instead of its own part (a reduce-scatter).
        depth: buckets; 1 waits for each reduction before the next is filled.
        suffix: ends the ledger's names for what is sent.
        strategy: takes some of the buckets; the others go the ``exact`` way. None: there is no other.
    """

    def __init__(
        self,
        comm: Communicator,
        capacity: int,
        wire_dtype: torch.dtype,
        method: Literal["exact", "native"],
        whole: bool,
        depth: int,
        suffix: str = "",
        strategy: ReduceStrategy | None = None,
    ) -> None:
        self.comm, self.method, self.whole, self.depth = comm, method, whole, depth
        self.wire_dtype, self.suffix, self.strategy = wire_dtype, suffix, strategy
        if strategy is not None and (whole or method != "exact"):
            raise ValueError(f"method={method!r}, whole={whole}: another way stands beside exact sums of parts only")
        self._lane = SideStream(comm.device)
        chunk = strategy.chunk if strategy is not None else chunk_for(comm.device, capacity // comm.world_size)
        self._scratch = torch.zeros(2 * chunk, dtype=torch.float32, device=comm.device)
        self._all_buffers = tuple(self._allocate(capacity) for _ in range(depth))
        # Those that may be filled. One that is being launched or finished is neither here nor in flight.
        self._free_buffers = deque(self._all_buffers)
        self._in_flight: deque[InflightReduce] = deque()
        self._gathers: list[Pending] = []

    def _allocate(self, capacity: int) -> BucketBuffers:
        """Zeroed, so that the padding behind a shorter bucket is never read as garbage."""
        comm = self.comm
        part = capacity // comm.world_size
        # exact: the other ranks' parts, ours stays in the bucket; native: the part that the backend writes.
        received = part * (comm.world_size - 1) if self.method == "exact" else (0 if self.whole else part)
        recv_buffer = received * self.wire_dtype.itemsize
        if self.strategy is not None:
            recv_buffer = max(recv_buffer, self.strategy.mail_bytes(capacity))
        return BucketBuffers(
            torch.zeros(capacity, dtype=self.wire_dtype, device=comm.device),
            torch.zeros(recv_buffer, dtype=torch.uint8, device=comm.device),
            BufferEvent(comm.device),
            BufferEvent(comm.device),
        )

    def buffers(self) -> list[torch.Tensor]:
        """Everything that is kept and means nothing between two reductions."""
        return [self._scratch, *(b.send for b in self._all_buffers), *(b.recv_buffer for b in self._all_buffers)]

    def kept(self) -> list[torch.Tensor]:
        """What a reduction leaves for the next one: error feedback's residuals."""
        return self.strategy.kept() if self.strategy is not None else []

    def rescale(self, factor: float) -> None:
        """The next gradients are ``factor`` times as large: so is what :meth:`kept` holds of the last ones."""
        for kept in self.kept() if factor != 1.0 else ():
            kept.mul_(factor)

    def forget(self) -> None:
        """Drop what :meth:`kept` holds. Nothing may be under way."""
        if self.strategy is not None:
            self.strategy.forget()

    def _reduces_in_place(self, accumulate: bool) -> bool:
        """With one rank nothing travels, and the bucket is the destination unless that holds something already."""
        return self.comm.world_size == 1 and not accumulate

    def acquire(self, bucket: Bucket, output: torch.Tensor, accumulate: bool) -> torch.Tensor:
        """The bucket to fill with ``bucket``; waits for the oldest one when all are in flight.

        Args:
            bucket: what will be laid into it.
            output: as for :meth:`launch`.
            accumulate: as for :meth:`launch`.

        Returns:
            1-D, the bucket's extent.
        """
        if self._reduces_in_place(accumulate):
            return output
        while not self._free_buffers:
            self._finish(self._in_flight.popleft())
        buffers = self._free_buffers[0]
        buffers.free.wait()
        return buffers.send[: bucket.numel]

    def launch(
        self,
        bucket: Bucket,
        output: torch.Tensor,
        accumulate: bool,
        on_chunk: Measure | None = None,
        on_reduced: Callable[[], None] | None = None,
        group: int = 0,
        place: str = "",
    ) -> None:
        """Send the bucket that :meth:`acquire` gave. ``output`` is valid after :meth:`drain`.

        Args:
            bucket: what the bucket holds.
            output: this rank's part of the sum, ``bucket.shard_numel`` elements; with ``whole``, all of it.
            accumulate: add to ``output`` instead of replacing it.
            on_chunk: sees all of this rank's part of ``output``, in chunks, when it is written. Not with ``whole``.
            on_reduced: called in stream order when ``output`` is written, to take it elsewhere. It is added there, so
                with ``on_reduced`` nothing is added here.
            group: the number of the bucket's group.
            place: the bucket's first parameter, for traces.
        """
        if self._reduces_in_place(accumulate):
            kind = ALL_REDUCE if self.whole and self.method == "native" else REDUCE_SCATTER
            self.comm.exchange(kind + self.suffix, [output], [output], 0, f"bucket {bucket.index}").wait()
            if on_chunk is not None:
                on_chunk(output, 0)
            if on_reduced is not None:
                on_reduced()
            return
        buffers = self._free_buffers.popleft()
        buffers.filled.record()
        key = (group, bucket.index)
        inflight = InflightReduce(
            buffers, bucket, key, output, accumulate and on_reduced is None, on_chunk, on_reduced, place
        )
        if self.strategy is not None and self.strategy.takes(key):
            # What packs and unpacks runs beside the backward pass, in the lane's order from here to the sum.
            with self._lane.running():
                buffers.filled.wait()
                self.strategy.launch(inflight, self._scratch)
        elif self.method == "exact":
            self._launch_exact(inflight)
        else:
            self._launch_native(inflight)
        # **The moment of a second exchange is the same on all ranks**, as launches are: after the launch that follows.
        # Until then the first one had the time of a whole bucket.
        self._go_on()
        self._in_flight.append(inflight)
        if self.depth == 1:
            self._finish(self._in_flight.popleft())

    def _launch_exact(self, inflight: InflightReduce) -> None:
        bucket, parts, me = inflight.bucket, inflight.sent(), self.comm.rank
        recv = self._receivers(inflight.buffers.recv_buffer.view(self.wire_dtype), bucket)
        kind, where = REDUCE_SCATTER + self.suffix, f"bucket {bucket.index}"
        inflight.pending = self.comm.exchange(kind, parts, recv, self._padding(bucket), where)
        inflight.parts = [parts[q] if q == me else recv[q] for q in range(self.comm.world_size)]

    def _padding(self, bucket: Bucket) -> int:
        """How many of the elements of the other owners' parts are padding."""
        mine = bucket.padding_of(self.comm.rank)
        return bucket.numel - bucket.true_numel() - mine

    def _receivers(self, recv: torch.Tensor, bucket: Bucket) -> list[torch.Tensor]:
        """W views: where each rank's contribution to our part arrives. Our own entry is empty."""
        part, me = bucket.shard_numel, self.comm.rank
        slots = [q - (q > me) for q in range(self.comm.world_size)]
        return [recv[:0] if q == me else recv[slots[q] * part : (slots[q] + 1) * part] for q in range(len(slots))]

    def _launch_native(self, inflight: InflightReduce) -> None:
        bucket, where = inflight.bucket, f"bucket {inflight.bucket.index}"
        send, world = inflight.buffers.send[: bucket.numel], self.comm.world_size
        if self.wire_dtype == torch.float16:
            # A sum of W fp16 numbers can leave fp16's range where their mean cannot.
            send.div_(world)
        if self.whole:
            padding = 2 * (world - 1) * (bucket.numel - bucket.true_numel()) // world
            inflight.pending, inflight.parts = (
                self.comm.all_reduce(ALL_REDUCE + self.suffix, send, padding, where),
                [send],
            )
            return
        part = inflight.buffers.recv_buffer.view(self.wire_dtype)[: bucket.shard_numel]
        kind, padding = REDUCE_SCATTER + self.suffix, self._padding(bucket)
        inflight.pending, inflight.parts = self.comm.reduce_scatter(kind, part, send, padding, where), [part]

    def _go_on(self) -> None:
        """Second exchanges, where first ones are under way."""
        for inflight in self._in_flight:
            if inflight.second_hop is not None:
                with self._lane.running():
                    inflight.second_hop()

    def _finish(self, inflight: InflightReduce) -> None:
        """Wait for one reduction, add it up into its output, and free its bucket."""
        bucket, comm = inflight.bucket, self.comm
        comm.position = f"reduction of the bucket of {inflight.place}" if inflight.place else comm.position
        with self._lane.running(), profiler_ranges.span("reduce", bucket.index, inflight.place, "sum"):
            inflight.buffers.filled.wait()
            if inflight.second_hop is not None:
                inflight.second_hop()
            if inflight.pending is not None:
                inflight.pending.wait()
            output = inflight.output
            if self.whole and self.method == "exact":
                output = output.split(bucket.shard_numel)[comm.rank]
            # Undo the division of _launch_native, now that the sum is in fp32.
            factor = float(comm.world_size) if self.method == "native" and self.wire_dtype == torch.float16 else 1.0
            sum_in_rank_order(output, inflight.parts, inflight.accumulate, self._scratch, factor, inflight.on_chunk)
            comm.chaos.poison(inflight.buffers.send, inflight.buffers.recv_buffer)
            if self.whole and self.method == "exact":
                self._gather(inflight.output, bucket)
            if inflight.on_reduced is not None:
                inflight.on_reduced()
            inflight.buffers.free.record()
        self._free_buffers.append(inflight.buffers)

    def _gather(self, whole: torch.Tensor, bucket: Bucket) -> None:
        """The second half of an exact all-reduce: the fp32 sums go to everybody, unrounded."""
        comm = self.comm
        padding = (comm.world_size - 1) * bucket.padding_of(comm.rank)
        kind, where = ALL_GATHER_GRADIENTS + self.suffix, f"bucket {bucket.index}"
        self._gathers.append(comm.all_gather(kind, whole, padding, where))

    def drain(self) -> None:
        """Finish everything under way. Afterwards the outputs may be read on the current stream.

        Of all ranks at the same place: what is under way may have a second exchange before it.
        """
        self._go_on()
        while self._in_flight:
            self._finish(self._in_flight.popleft())
        for gather in self._gathers:
            gather.wait()
        self._gathers = []
        for buffers in self._free_buffers:
            buffers.free.wait()
