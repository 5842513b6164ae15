"""How a bucket is put together: one all-gather over all ranks, or one of ZeRO++'s cheaper ways.

:func:`build_all_gather` chooses a bucket's strategy when stage 3 is built; a step only calls ``launch`` and ``finish``.

[Note: messages and partitions]
    On the wire a bucket is W equal *messages*, one from each rank: its shard as it is (:class:`PlainAllGather`), or
    quantised (:class:`QuantizedAllGather`, qwZ). The W messages lie side by side: in the bucket's own buffer, or,
    quantised, in a buffer of bytes from which the values are decoded when all have arrived. Every rank decodes every
    message, its own too: all compute with the same values, which are those of no rank's shard exactly.

    The *primary* partition is a rank's shard, one message of W. The *secondary* one (:class:`SecondaryAllGather`, hpZ)
    are the W/H messages that a rank keeps of a gathered bucket for its group of H consecutive ranks, a node: rank r
    those with numbers ``[r % H * W/H, (r % H + 1) * W/H)``. Together the group has all of them, so as long as the
    values do not change, the bucket can be gathered again inside the node, message by message as it was: with the same
    bits. That is so from the forward pass's gather until the next optimizer step; for frozen parameters, for the whole
    run::

        W = 4, H = 2    messages | m0 | m1 | m2 | m3 |
                        primary     0    1    2    3         one message each
                        secondary  0, 2      1, 3            ranks 0 and 2 keep m0 m1; 1 and 3 keep m2 m3

    Hybrid sharding (**MiCS**) is the same picture, with a secondary partition that is never stale: each step ends with
    every rank sending its new message to those that keep it, and then no gather leaves the group.

Volume of one gather per rank, n bytes a message: over all ranks ``(W-1) n``, of which ``(W-R) n`` leave a node of R;
inside ``(H-1) W/H n``. Memory of the secondary partition: ``W/H n``, for a bucket of Ψ elements ``cΨ/H`` (c bytes an
element, 1.002 with qwZ).

Sources: [ZeRO++], sections 3.1 and 3.2; [MiCS]; ``ds_secondary_tensor`` in [DeepSpeed].
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from deepzero.comm.chaos import storage_ptr_of
from deepzero.comm.collectives import Communicator, Pending
from deepzero.comm.ledger import Traffic
from deepzero.comm.quantization import Quantizer
from deepzero.comm.topology import RankGroup
from deepzero.layout import Bucket
from deepzero.runtime.zero.buffer_pool import BufferPool

if TYPE_CHECKING:
    from deepzero.runtime.zero.partitioned_bucket import PartitionedBucket

# The ledger's names for what is sent of parameters.
SETUP = "setup.gather"
FORWARD = "parameters.all_gather_forward"
BACKWARD = "parameters.all_gather_backward"
EVALUATION = "parameters.all_gather_evaluation"
ON_REQUEST = "parameters.all_gather_on_request"
ON_REQUEST_BROADCAST = "parameters.broadcast_on_request"
TO_REPLICAS = "parameters.publish_to_replicas"

TRAINING = (FORWARD, BACKWARD)


class PlainAllGather:
    """One all-gather over all ranks, again and again, of each rank's shard of one bucket as it is.

    The shard is on the device; ``offload/`` has the subclass for shards in host memory. ``where`` is the bucket's name
    for traces.
    """

    # Whether the shard lies in host memory.
    on_host = False

    # qwZ: how many bytes the messages take, beside the bucket's own buffer, while they are on their way.
    quantizer: Quantizer | None = None
    scratch_bytes = 0
    # hpZ and MiCS: the ranks that keep a secondary partition among them; whether each step renews that (MiCS), or it is
    # made once, as the parameters never change.
    group: RankGroup | None = None
    mics = frozen = False
    secondary_shard: torch.Tensor | None = None

    def __init__(self, bucket: Bucket, dtype: torch.dtype, comm: Communicator, where: str) -> None:
        self.bucket, self.dtype, self.comm, self.where = bucket, dtype, comm, where
        # Which brings this rank's shard to the device: for the strategies below the plain one that they are built on.
        self.source: PlainAllGather = self
        self.message_bytes = bucket.shard_numel * dtype.itemsize
        # Counted apart in the ledger: elements of a message that belong to no parameter, times the ranks it goes to.
        self._padding = (comm.world_size - 1) * bucket.padding_of(comm.rank)
        self._pending: Pending | None = None
        # The W messages of the gather under way.
        self._messages = torch.empty(0)

    @property
    def quantizes(self) -> bool:
        """Whether values for computing travel quantised."""
        return self.quantizer is not None

    @property
    def exact(self) -> PlainAllGather:
        """The strategy that brings the very values of the ranks' shards."""
        return self

    def launch(self, kind: str, into: PartitionedBucket) -> None:
        """Launch what fills ``into.gathered`` (1-D, ``[W * shard_numel]``), which belongs to it until :meth:`finish`.

        ``kind`` is the ledger's name for it.
        """
        # In place: this rank's message lies where the all-gather expects it, and the others' arrive beside it.
        messages = self.receive_into(into.gathered)
        mine = shard_of(messages, self.comm.rank, self.comm.world_size)
        with self.source.fetch_shard(kind, into.shard, mine) as values:
            # Already there if the source has copied it from the host, or if with one rank the shard is the buffer.
            if values.data_ptr() != mine.data_ptr():
                mine.copy_(values)
            # Inside the context: on a GPU it is ordered behind the source's copy, on the copy's stream.
            numel = self.bucket.shard_numel
            self._pending = self.comm.all_gather(kind, messages, self._padding, self.where, numel=numel)

    def receive_into(self, gathered: torch.Tensor) -> torch.Tensor:
        """Where the W messages of a gather that begins now lie side by side, until :meth:`finish`."""
        self._messages = gathered
        return gathered

    def arrive(self) -> None:
        """Wait until the messages are complete, for the current stream."""
        if self._pending is not None:
            self._pending.wait()
            # With one rank nothing was sent, and only the source's copy orders anything.
            self.source.wait_shard()
            self._pending = None

    def finish(self) -> None:
        """Wait until the bucket is complete, for the current stream. Harmless when it was already."""
        self.arrive()
        self._messages = torch.empty(0)  # a view kept here would keep the pool from reusing the buffer

    def unquantized(self) -> PlainAllGather:
        """The strategy without quantisation, for the gathers from now on; nothing is under way."""
        return self

    # ---- this rank's shard, on its way into its message --------------------------------------------------------------

    def fetch_shard(self, kind: str, shard: torch.Tensor, target: torch.Tensor) -> AbstractContextManager[torch.Tensor]:
        """A context in which the shard's values are on the device, for the stream that is current inside it.

        ``kind`` is the ledger's name for the gather that needs them, ``shard`` 1-D, ``[shard_numel]``, and ``target``
        as large, on the device: where values may be copied to.
        """
        return nullcontext(shard)

    def wait_shard(self) -> None:
        """Let the current stream wait for the last fetch."""

    # ---- messages to the ranks that keep them: see SecondaryAllGather.launch_to_replicas -----------------------------

    def message(self, shard: torch.Tensor) -> torch.Tensor:
        """The shard as it travels; until :meth:`release_message`."""
        return shard

    def release_message(self) -> None:
        """Take back what :meth:`message` gave: it has been sent."""

    def launch_to_replicas(self, bucket: PartitionedBucket) -> Pending | None:
        """Launch this rank's new message to the ranks that keep it. None: there are none."""
        return None

    # ---- what it will send -------------------------------------------------------------------------------------------

    @property
    def always_inside(self) -> bool:
        """Whether the secondary partition is never stale, so that every gather stays in the group."""
        return self.mics or self.frozen

    def forecast(self, inside: bool) -> Traffic:
        """What one gather sends, mean over ranks; with ``inside`` from the secondary partition."""
        world = self.comm.world_size
        return self._traffic(world - 1, world - self.comm.nodes.per_node, (world - 1) / world)

    def _traffic(self, sends: int, crossing: float, fraction: float) -> Traffic:
        """``sends`` messages a rank, ``crossing`` of them to other nodes; ``fraction`` of the bucket's elements."""
        true, size = self.bucket.true_numel(), self.message_bytes
        return Traffic(1, true * fraction, (self.bucket.numel - true) * fraction, size * sends, size * crossing)


class QuantizedAllGather(PlainAllGather):
    """qwZ: values for computing travel quantised, exact ones as ``plain``.

    Once the error meter has found quantised values too far off, all travel as ``plain``.

    ``buffers`` (uint8) has room for W messages of any bucket in ``scratch_bytes``, so that all buffers serve all.
    """

    def __init__(self, plain: PlainAllGather, quantizer: Quantizer, buffers: BufferPool, scratch_bytes: int) -> None:
        super().__init__(plain.bucket, plain.dtype, plain.comm, plain.where)
        self.source = plain.source
        self._plain, self.scratch_bytes = plain, scratch_bytes
        self.quantizer: Quantizer = quantizer
        self.buffers: BufferPool = buffers
        self.message_bytes = quantizer.format.message_bytes(plain.bucket.shard_numel)
        # Of the gather under way: what is decoded into, and where the pool's buffer for the messages is.
        self._gathered, self._address = torch.empty(0), 0

    @property
    def exact(self) -> PlainAllGather:
        """The all-gather of the shards as they are."""
        return self._plain

    def launch(self, kind: str, into: PartitionedBucket) -> None:
        """As :meth:`PlainAllGather.launch`, in quantised messages."""
        messages = self.receive_into(into.gathered)
        rank, world, numel = self.comm.rank, self.comm.world_size, self.bucket.shard_numel
        # A shard in host memory is copied to where its decoded values will overwrite it.
        with self.source.fetch_shard(kind, into.shard, shard_of(into.gathered, rank, world)) as values:
            self._pack(values, shard_of(messages, rank, world))
            self._pending = self.comm.all_gather(kind, messages, self._padding, self.where, numel=numel)

    def receive_into(self, gathered: torch.Tensor) -> torch.Tensor:
        """A buffer for the messages, to be decoded into ``gathered``."""
        self._gathered, self._messages = gathered, self._take(self.comm.world_size * self.message_bytes)
        return self._messages

    def finish(self) -> None:
        """Wait for the messages, and decode them: the bucket is complete."""
        if not self._messages.numel():
            return
        self.arrive()
        numel = self.bucket.shard_numel
        # This rank's own message too: every rank computes with the same values. The messages are read on the stream
        # that has waited for them, before the buffer goes back to the pool.
        for rank, shard in enumerate(self._gathered.split(numel)):
            message = shard_of(self._messages, rank, self.comm.world_size)
            self.quantizer.unpack(self.quantizer.format.open(message, numel), shard)
        self._gathered = self._messages = message = torch.empty(0)  # no view is left of what others will overwrite
        self.release_message()

    def unquantized(self) -> PlainAllGather:
        """The all-gather of the shards as they are."""
        return self._plain

    def message(self, shard: torch.Tensor) -> torch.Tensor:
        """The shard, quantised."""
        self._pack(shard, message := self._take(self.message_bytes))
        return message

    def release_message(self) -> None:
        """Give the buffer of quantised messages back."""
        address, self._address = self._address, 0
        self.buffers.give(address)

    def _pack(self, values: torch.Tensor, message: torch.Tensor) -> None:
        self.quantizer.pack(values, self.quantizer.format.open(message, values.numel()))

    def _take(self, size: int) -> torch.Tensor:
        buffer = self.buffers.take(max(size, self.scratch_bytes))
        self._address = storage_ptr_of(buffer)
        return buffer[:size]


class SecondaryAllGather(PlainAllGather):
    """hpZ and MiCS: gathers inside ``group`` while its secondary partition holds the present values, else by ``inner``.

    With ``mics`` the secondary partition is renewed at the end of each step; with ``frozen`` it is made once, as the
    parameters never change.
    """

    def __init__(self, inner: PlainAllGather, group: RankGroup, mics: bool, frozen: bool) -> None:
        super().__init__(inner.bucket, inner.dtype, inner.comm, inner.where)
        self.inner, self.source, self.quantizer = inner, inner.source, inner.quantizer
        self.scratch_bytes, self.message_bytes = inner.scratch_bytes, inner.message_bytes
        self.group: RankGroup = group
        self.mics, self.frozen = mics and not frozen, frozen
        # W/H: how many messages a rank keeps for its group. They are kept as they travel, so quantised ones as bytes.
        self.kept_messages = self.comm.world_size // group.size
        dtype = torch.uint8 if self.quantizes else self.dtype
        numel = self.kept_messages * self.message_bytes // dtype.itemsize
        self.secondary_shard: torch.Tensor = torch.zeros(numel, dtype=dtype, device=self.comm.device)
        # Of the values in the secondary shard, which serves gathers of this generation only; -1: it is empty.
        self._generation = -1
        # What an evaluation has kept serves evaluations alone: else the bytes that a training step sends would depend
        # on whether an evaluation came before it, and could not be predicted.
        self._for_training = False
        # The generation that the gather under way will leave in the secondary shard; None: it leaves nothing.
        self._arriving: int | None = None

    @property
    def exact(self) -> PlainAllGather:
        """Itself, unless messages are quantised, which are not the very values."""
        return self.inner.exact if self.quantizes else self

    def launch(self, kind: str, into: PartitionedBucket) -> None:
        """Inside the group if the secondary shards serve this gather; else over all ranks, to be kept in them."""
        training, group, inner = kind in TRAINING, self.group, self.inner
        if self._generation != into.generation or (training and not self._for_training):
            self._arriving, self._for_training = into.generation, training or self.frozen
            inner.launch(kind, into)
            return
        # The group's secondary shards, end to end, are the W messages: what arrives is bit for bit what arrived first.
        messages = inner.receive_into(into.gathered)
        shard_of(messages, group.index, group.size).copy_(self.secondary_shard)
        first, kept = group.index * self.kept_messages, self.kept_messages
        padding = (group.size - 1) * sum(self.bucket.padding_of(first + i) for i in range(kept))
        numel = kept * self.bucket.shard_numel
        inner._pending = self.comm.all_gather(kind, messages, padding, self.where, group, numel)

    def finish(self) -> None:
        """Wait until the bucket is complete, and keep this rank's messages of it for the group."""
        self.inner.arrive()
        if self._arriving is not None:
            # Messages as they came, before they are decoded: whoever gathers them again gets the same bits.
            self.secondary_shard.copy_(shard_of(self.inner._messages, self.group.index, self.group.size))
            self._generation, self._arriving = self._arriving, None
        self.inner.finish()

    def unquantized(self) -> PlainAllGather:
        """The strategy without quantisation, with an empty secondary shard of the other size."""
        return SecondaryAllGather(self.inner.unquantized(), self.group, self.mics, self.frozen)

    # ---- the new shard goes to those that keep it: MiCS, and frozen parameters ---------------------------------------

    def launch_to_replicas(self, bucket: PartitionedBucket) -> Pending | None:
        """Launch this rank's new message to all ranks that keep it, one in each group; None with hpZ."""
        secondary, rank, world = self.secondary_shard, self.comm.rank, self.comm.world_size
        if not self.always_inside:
            return None
        # Offloaded shards are in host memory, from which nothing is sent.
        message = self.inner.message(bucket.shard.to(self.comm.device))
        recv = [secondary[:0]] * world
        # What this rank keeps comes from ``kept_messages`` consecutive ranks, message by message.
        for number, kept in enumerate(secondary.split(secondary.numel() // self.kept_messages)):
            recv[self.group.index * self.kept_messages + number] = kept
        keepers = self.keepers_of(rank)
        # What a rank keeps of its own does not travel.
        if rank in keepers:
            recv[rank].copy_(message)
        send = [message if q in keepers else message[:0] for q in range(world)]
        self._messages = message  # it belongs to the exchange until release_message
        self._generation, self._for_training = bucket.generation, True
        padding = len(keepers - {rank}) * self.bucket.padding_of(rank)
        return self.comm.exchange(TO_REPLICAS, send, recv, padding, self.where, numel=self.bucket.shard_numel)

    def release_message(self) -> None:
        """Let go of what :meth:`launch_to_replicas` has sent."""
        self._messages = torch.empty(0)
        self.inner.release_message()

    def keepers_of(self, rank: int) -> set[int]:
        """The ranks, one in each group, that keep ``rank``'s message."""
        return {first + rank // self.kept_messages for first in range(0, self.comm.world_size, self.group.size)}

    # ---- what it will send -------------------------------------------------------------------------------------------

    def forecast(self, inside: bool) -> Traffic:
        """As :meth:`PlainAllGather.forecast`."""
        if not inside:
            return super().forecast(False)
        size, kept = self.group.size, self.kept_messages
        return self._traffic((size - 1) * kept, kept * self.comm.nodes.crossing_inside(size), (size - 1) / size)

    def forecast_to_replicas(self) -> Traffic:
        """What :meth:`launch_to_replicas` sends, mean over ranks: some keep their own message, and send one less."""
        world, numel, size = self.comm.world_size, self.bucket.shard_numel, self.message_bytes
        to = [self.keepers_of(rank) - {rank} for rank in range(world)]
        true = sum(len(others) * self.bucket.true_numel_of(rank) for rank, others in enumerate(to))
        sends = sum(map(len, to))
        crossing = sum(self.comm.nodes.leaving(rank, others) for rank, others in enumerate(to))
        return Traffic(1, true / world, (sends * numel - true) / world, size * sends / world, size * crossing / world)


def build_all_gather(
    plain: PlainAllGather,
    group: RankGroup | None = None,
    mics: bool = False,
    frozen: bool = False,
    quantization: tuple[Quantizer, BufferPool, int] | None = None,
) -> PlainAllGather:
    """The strategy of a bucket. With one rank nothing travels: nothing is quantised, or kept a second time.

    ``group``, ``mics`` and ``frozen`` are those of :class:`SecondaryAllGather`; None: there is none. ``quantization``
    has the quantizer, the buffers for messages and their bytes; None: messages are shards as they are.
    """
    if plain.comm.world_size == 1:
        return plain
    gather = plain if quantization is None else QuantizedAllGather(plain, *quantization)
    return gather if group is None else SecondaryAllGather(gather, group, mics, frozen)


def send_to_replicas(buckets: Iterable[PartitionedBucket]) -> None:
    """Send every rank's new shards to the ranks that keep them: MiCS, and frozen parameters. A collective.

    Two are under way at a time, so that quantised messages need two buffers.
    """
    under_way: deque[tuple[PlainAllGather, Pending]] = deque()

    def finish() -> None:
        gather, pending = under_way.popleft()
        pending.wait()
        gather.release_message()

    for bucket in buckets:
        pending = bucket.gather.launch_to_replicas(bucket)
        if pending is not None:
            under_way.append((bucket.gather, pending))
        if len(under_way) == 2:
            finish()
    while under_way:
        finish()


def shard_of(whole: torch.Tensor, index: int, count: int) -> torch.Tensor:
    """One of ``count`` equal shards. Of thousands one is wanted, and a view of each would cost more than the gather."""
    numel = whole.numel() // count
    return whole[index * numel : (index + 1) * numel]
