"""Gradients on their way from every rank to the rank that owns them: the reduce-scatter of all stages.

Stage 0, and stage 1 with ``reduce_scatter=False``, want whole sums: exact ones are then all-gathered, native ones come
from an all-reduce.

A reducer owns a fixed number of buffers, each as long as the largest bucket (two when communication overlaps with the
backward pass, one when it does not), and keeps them for the whole run: fresh memory costs several times the copy that
fills it. The life of a buffer::

    acquire            launch                  _finish                            acquire again
    copy gradients in  send shards to owners   sum the W received shards in fp32
    ---- free ----> filled ---- in flight ---> received ----> written to grad_S ----> free

Two ways of summing:

``exact``   every shard travels in the wire dtype to its owner, who adds the W contributions in fp32 **in rank order**,
            one by one, to what earlier micro-batches have left. The sum then depends on the contributions alone: not on
            bucket, stage, timing or W (``invariance.py``); it is also more accurate than adding in bf16 along a ring.
``native``  the backend's reduce-scatter or all-reduce in the wire dtype.

Volume per rank: a bucket of B elements sends ``(W-1)/W * B`` in both ways, and as much again for whole sums. Beside
``exact`` a *strategy* may take some of the buckets: qgZ, which sends few bits (``quantized_reduce.py``).

Sources: [stage-1 post] for the bucket; ``allreduce_bucket`` and ``reduce_ipg_grads`` in ``stage_1_and_2.py`` of
[DeepSpeed].
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

from deepzero.comm.collectives import Communicator, Pending
from deepzero.comm.exact_sum import Measure, Term, chunk_for
from deepzero.device import StreamEvent, accelerator_of
from deepzero.layout import Bucket

if TYPE_CHECKING:
    from deepzero.comm.quantized_reduce import QuantizedReduce

REDUCE_SCATTER = "gradients.reduce_scatter"
ALL_REDUCE = "gradients.all_reduce"
ALL_GATHER_GRADIENTS = "gradients.all_gather"

BucketKey: TypeAlias = tuple[int, int]
"""Which bucket: its group's number, and its own within the group."""
AroundSum: TypeAlias = Callable[[], contextlib.AbstractContextManager[None]]
"""A context around the writing of a sum. Offload's copies the earlier sum up before, the new one down behind it."""


# ---- what is in flight -----------------------------------------------------------------------------------------------


@dataclass
class BucketBuffers:
    """A bucket's send buffer and what it receives. The events order filling, flight and emptying on a GPU."""

    send: torch.Tensor  # 1-D, wire dtype, the largest bucket's extent
    # 1-D uint8: what is received, in whatever dtype, and what qgZ packs before it sends it.
    recv_buffer: torch.Tensor
    filled: StreamEvent  # the gradients are in `send`
    free: StreamEvent  # the sum has been read out of `recv_buffer`


@dataclass
class InflightReduce:
    """A bucket between :meth:`BucketReducer.launch` and the sum in its output."""

    buffers: BucketBuffers
    bucket: Bucket
    key: BucketKey
    output: torch.Tensor
    accumulate: bool
    on_chunk: Measure | None
    around_sum: AroundSum
    first_param: str  # name of the bucket's first parameter, for traces
    terms: list[Term] = field(default_factory=list)  # what has to be added up when `pending` is over
    factor: float = 1.0  # multiplies each of the terms
    pending: Pending | None = None
    # qgZ alone: waits for `pending`, launches a second exchange, and puts its `terms` and `pending` in their place.
    second_hop: Callable[[], None] | None = None

    def sent(self) -> list[torch.Tensor]:
        """W views of the send buffer: each owner's part."""
        return list(self.buffers.send[: self.bucket.numel].chunk(self.bucket.world_size))


# ---- the reducer -----------------------------------------------------------------------------------------------------


class BucketReducer:
    """Sends buckets to their owners and adds up what arrives.

    Args:
        comm: the ranks.
        capacity: elements of the largest bucket that will ever be reduced.
        wire_dtype: in which gradients travel.
        method: ``exact`` or ``native``; see the module's text.
        whole_sums: every rank gets the whole sum (an all-reduce) instead of its own part of it (a reduce-scatter).
        depth: buffers; 1 waits for each reduction before the next bucket is filled.
        suffix: ends the ledger's names for what is sent.
        strategy: takes some of the buckets; the others have to go the ``exact`` way, in parts. None: there is no other.
    """

    def __init__(
        self,
        comm: Communicator,
        capacity: int,
        wire_dtype: torch.dtype,
        method: Literal["exact", "native"],
        whole_sums: bool,
        depth: int,
        suffix: str = "",
        strategy: QuantizedReduce | None = None,
    ) -> None:
        self.comm, self.method, self.whole_sums, self.depth = comm, method, whole_sums, depth
        self.wire_dtype, self.suffix, self.strategy = wire_dtype, suffix, strategy
        if strategy is not None and (whole_sums or method != "exact"):
            raise ValueError(f"method={method!r}, whole_sums={whole_sums}: a strategy needs exact sums of parts")
        # For sums, so that the compute stream goes on with the backward pass. On a CPU all runs in one order.
        self._side_stream = accelerator_of(comm.device).stream(comm.device)
        chunk = strategy.chunk if strategy is not None else chunk_for(comm.device_type, capacity // comm.world_size)
        self._scratch = torch.zeros(2 * chunk, dtype=torch.float32, device=comm.device)
        self._all_buffers = tuple(self._allocate(capacity) for _ in range(depth))
        # Those that may be filled. One that is being launched or finished is neither here nor in flight.
        self._free_buffers = deque(self._all_buffers)
        self._in_flight: deque[InflightReduce] = deque()
        self._gathers: list[Pending] = []

    def _allocate(self, capacity: int) -> BucketBuffers:
        device, world_size = self.comm.device, self.comm.world_size
        # exact: the other ranks' shards, ours stays in the send buffer; native: the shard that the backend writes.
        shards = world_size - 1 if self.method == "exact" else int(not self.whole_sums)
        recv_bytes = shards * (capacity // world_size) * self.wire_dtype.itemsize
        if self.strategy is not None:
            recv_bytes = max(recv_bytes, self.strategy.messages_bytes(capacity))
        send = torch.empty(capacity, dtype=self.wire_dtype, device=device)
        recv_buffer = torch.empty(recv_bytes, dtype=torch.uint8, device=device)
        return BucketBuffers(send, recv_buffer, *(accelerator_of(device).event(device) for _ in range(2)))

    def buffers(self) -> list[torch.Tensor]:
        """All memory that is kept from step to step, and whose values are not."""
        return [self._scratch, *(b.send for b in self._all_buffers), *(b.recv_buffer for b in self._all_buffers)]

    def residuals(self) -> list[torch.Tensor]:
        """What a reduction leaves for the next one: error feedback's residuals."""
        return self.strategy.residuals() if self.strategy is not None else []

    def rescale(self, factor: float) -> None:
        """The next gradients are ``factor`` times as large (another loss scale): so is what :meth:`residuals` holds."""
        for residual in self.residuals() if factor != 1.0 else ():
            residual.mul_(factor)

    def forget_residuals(self) -> None:
        """Drop what :meth:`residuals` holds: it belongs to another run, or does not count. Nothing may be under way."""
        for residual in self.residuals():
            residual.zero_()

    # ---- 3 gradient ready: fill, send --------------------------------------------------------------------------------

    def acquire(self, bucket: Bucket, output: torch.Tensor, accumulate: bool) -> torch.Tensor:
        """The memory to fill with ``bucket``'s gradients, 1-D, ``bucket.numel`` elements.

        Waits for the oldest reduction when all buffers are in use. ``output`` and ``accumulate`` are :meth:`launch`'s.
        """
        if self.comm.world_size == 1 and not accumulate:
            return output  # nothing travels, and the caller fills it directly
        while not self._free_buffers:
            self._finish(self._in_flight.popleft())
        buffers = self._free_buffers[0]  # stays at the head until ``launch`` takes it: one acquire, one launch
        # The side stream may still read the bucket before: wait for this buffer, and for nothing else on that stream.
        buffers.free.wait()
        return buffers.send[: bucket.numel]

    def launch(
        self,
        bucket: Bucket,
        output: torch.Tensor,
        accumulate: bool,
        on_chunk: Measure | None = None,
        around_sum: AroundSum = contextlib.nullcontext,
        group: int = 0,
        first_param: str = "",
    ) -> None:
        """Send the bucket that :meth:`acquire` gave. ``output`` is valid after :meth:`drain`.

        Args:
            bucket: what the buffer holds.
            output: 1-D: this rank's part of the sum; with ``whole_sums`` all of it, or the part if
                :meth:`gather_sums` follows.
            accumulate: add to ``output`` instead of replacing it.
            on_chunk: called with each chunk of ``output`` when it is written. Not with ``whole_sums``.
            around_sum: makes the context in which ``output`` is written; offload's copies it from and to the host.
            group: the number of the bucket's group.
            first_param: the name of the bucket's first parameter, for traces and messages.
        """
        if self.comm.world_size == 1 and not accumulate:
            self._end_in_place(bucket, output, on_chunk, around_sum)
            return
        buffers = self._free_buffers.popleft()
        buffers.filled.record()
        key = (group, bucket.index)
        inflight = InflightReduce(buffers, bucket, key, output, accumulate, on_chunk, around_sum, first_param)
        if self.strategy is not None and self.strategy.takes(key):
            # What packs and unpacks runs beside the backward pass, on the side stream from here to the sum.
            with self._side_stream.running():
                buffers.filled.wait()
                self.strategy.launch(inflight, self._scratch)
        elif self.method == "exact":
            self._launch_exact(inflight)
        else:
            self._launch_native(inflight)
        # qgZ's second exchange of the bucket before, whose first one had the time of a whole bucket to arrive. **All
        # ranks launch it at this moment**: everything is launched in one order.
        self._launch_second_hops()
        self._in_flight.append(inflight)
        if self.depth == 1:
            self._finish(self._in_flight.popleft())

    def _launch_exact(self, inflight: InflightReduce) -> None:
        bucket, outgoing, me = inflight.bucket, inflight.sent(), self.comm.rank
        shard, received = bucket.shard_numel, inflight.buffers.recv_buffer.view(self.wire_dtype)
        # Where each rank's contribution to our shard arrives: one after the other, ours left out.
        starts = [(q - (q > me)) * shard for q in range(self.comm.world_size)]
        recv = [received[:0] if q == me else received[lo : lo + shard] for q, lo in enumerate(starts)]
        kind, where = REDUCE_SCATTER + self.suffix, f"bucket {bucket.index}"
        inflight.pending = self.comm.exchange(kind, outgoing, recv, self._padding(bucket), where)
        # Our own contribution is added from the send buffer, in its place in rank order: it does not travel.
        inflight.terms = [outgoing[q] if q == me else recv[q] for q in range(self.comm.world_size)]

    def _padding(self, bucket: Bucket) -> int:
        """How many of the elements of the other owners' shards are padding."""
        return bucket.numel - bucket.true_numel() - bucket.padding_of(self.comm.rank)

    def _launch_native(self, inflight: InflightReduce) -> None:
        bucket, where = inflight.bucket, f"bucket {inflight.bucket.index}"
        send, world = inflight.buffers.send[: bucket.numel], self.comm.world_size
        if self.wire_dtype == torch.float16:
            # A sum of W fp16 numbers can leave fp16's range where their mean cannot.
            send.div_(world)
            inflight.factor = float(world)  # undoes it, when the sum is in fp32
        if self.whole_sums:
            padding = 2 * (world - 1) * (bucket.numel - bucket.true_numel()) // world
            inflight.pending = self.comm.all_reduce(ALL_REDUCE + self.suffix, send, padding, where)
            inflight.terms = [send]
        else:
            shard = inflight.buffers.recv_buffer.view(self.wire_dtype)[: bucket.shard_numel]
            kind, padding = REDUCE_SCATTER + self.suffix, self._padding(bucket)
            inflight.pending = self.comm.reduce_scatter(kind, shard, send, padding, where)
            inflight.terms = [shard]

    def _launch_second_hops(self) -> None:
        for inflight in self._in_flight:
            if inflight.second_hop is not None:
                with self._side_stream.running():
                    inflight.second_hop()

    # ---- 3 or 4: wait, add up ----------------------------------------------------------------------------------------

    def _finish(self, inflight: InflightReduce) -> None:
        """Wait for one reduction, add it up into its output, and free its buffers."""
        bucket, comm, buffers = inflight.bucket, self.comm, inflight.buffers
        if inflight.first_param:
            comm.flight_recorder.position = f"reduction of the bucket of {inflight.first_param}"
        with self._side_stream.running(), comm.ranges.span("reduce", bucket.index, inflight.first_param, "sum"):
            # The side stream reads our own contribution, which the compute stream has written.
            buffers.filled.wait()
            if inflight.second_hop is not None:
                inflight.second_hop()
            if inflight.pending is not None:
                inflight.pending.wait()
            # Where the output is this rank's part alone, the sums are gathered at the boundary, or there is one rank.
            gather_follows = self.whole_sums and self.method == "exact" and bucket.shard_numel < inflight.output.numel()
            output = inflight.output.split(bucket.shard_numel)[comm.rank] if gather_follows else inflight.output
            with inflight.around_sum():
                terms, factor, on_chunk = inflight.terms, inflight.factor, inflight.on_chunk
                comm.sum_in_rank_order(output, terms, inflight.accumulate, self._scratch, factor, on_chunk=on_chunk)
            comm.chaos.poison(buffers.send, buffers.recv_buffer)
            if gather_follows:
                self.gather_sums(bucket, inflight.output)
            # The next bucket may be laid into these buffers when the side stream has come to this point.
            buffers.free.record()
        self._free_buffers.append(buffers)

    def gather_sums(self, bucket: Bucket, output: torch.Tensor) -> None:
        """Launch the second half of an exact all-reduce: the fp32 sums in ``output`` go to everybody, unrounded."""
        padding = (self.comm.world_size - 1) * bucket.padding_of(self.comm.rank)
        kind, where = ALL_GATHER_GRADIENTS + self.suffix, f"bucket {bucket.index}"
        self._gathers.append(self.comm.all_gather(kind, output, padding, where))

    def drain(self) -> None:
        """Finish everything under way. Afterwards the outputs may be read on the current stream.

        All ranks call it at the same place of a step: what is under way may have a second exchange before it.
        """
        self._launch_second_hops()
        while self._in_flight:
            self._finish(self._in_flight.popleft())
        for gather in self._gathers:
            gather.wait()
        self._gathers = []
        # The current stream goes on behind the last sum from each of the buffers.
        for buffers in self._free_buffers:
            buffers.free.wait()

    def _end_in_place(
        self, bucket: Bucket, output: torch.Tensor, on_chunk: Measure | None, around_sum: AroundSum
    ) -> None:
        # One rank: nothing travels, and the gradients are in ``output``. The launch is counted all the same.
        kind = ALL_REDUCE if self.whole_sums and self.method == "native" else REDUCE_SCATTER
        self.comm.exchange(kind + self.suffix, [output], [output], 0, f"bucket {bucket.index}").wait()
        with around_sum():
            if on_chunk is not None:
                on_chunk(output, 0)
