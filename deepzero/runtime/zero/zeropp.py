"""ZeRO++ for parameters, in stage 3: quantised messages, and a second partition inside a node.

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

Sources: [ZeRO++], sections 3.1 and 3.2; [MiCS]; ``ds_secondary_tensor`` in [DeepSpeed]. What quantisation loses is
measured by ``runtime/quantization_monitor.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from deepzero.comm.collectives import Communicator, Pending
from deepzero.comm.ledger import Traffic
from deepzero.comm.quantization import Format, Quantizer
from deepzero.comm.topology import RankGroup
from deepzero.config.strict import ConfigError
from deepzero.config.zero import QuantizationConfig
from deepzero.runtime.zero.buffer_pool import BufferPool
from deepzero.runtime.zero.parameter_all_gather import TO_REPLICAS, TRAINING, PlainAllGather, shard_of
from deepzero.utils.storage import storage_ptr_of

if TYPE_CHECKING:
    from deepzero.runtime.zero.partitioned_bucket import PartitionedBucket

log = logging.getLogger(__name__)

# ---- how a bucket is gathered ----------------------------------------------------------------------------------------


class QuantizedAllGather(PlainAllGather):
    """qwZ: values for computing travel quantised, unquantised ones as ``plain``.

    Once the error meter has found quantised values too far off, all travel as ``plain``.

    ``pool`` (uint8) has room for W messages of any bucket in ``scratch_bytes``, so that all buffers serve all.
    """

    def __init__(self, plain: PlainAllGather, quantizer: Quantizer, pool: BufferPool, scratch_bytes: int) -> None:
        super().__init__(plain.in_layout, plain.dtype, plain.comm, plain.where)
        self.source = plain.source
        self._plain, self.scratch_bytes = plain, scratch_bytes
        self.quantizer: Quantizer = quantizer
        self.pool = pool
        self.message_bytes = quantizer.format.message_bytes(plain.in_layout.shard_numel)
        # Of the gather under way: what is decoded into, and where the pool's buffer for the messages is.
        self._gathered, self._address = torch.empty(0), 0

    @property
    def unquantized(self) -> PlainAllGather:
        """The all-gather of the shards as they are."""
        return self._plain

    def receive_into(self, gathered: torch.Tensor) -> torch.Tensor:
        """A buffer for the messages, to be decoded into ``gathered``."""
        self._gathered, self._messages = gathered, self._take(self.comm.world_size * self.message_bytes)
        return self._messages

    def finish(self) -> None:
        """Wait for the messages, and decode them: the bucket is complete."""
        if not self._messages.numel():
            return
        self.arrive()
        numel = self.in_layout.shard_numel
        # This rank's own message too: every rank computes with the same values. The messages are read on the stream
        # that has waited for them, before the buffer goes back to the pool.
        for rank, shard in enumerate(self._gathered.split(numel)):
            message = shard_of(self._messages, rank, self.comm.world_size)
            self.quantizer.unpack(self.quantizer.format.open(message, numel), shard)
        self._gathered = self._messages = message = torch.empty(0)  # no view is left of what others will overwrite
        self.release_message()

    def message(self, shard: torch.Tensor) -> torch.Tensor:
        """The shard, quantised."""
        self.make_message(shard, message := self._take(self.message_bytes))
        return message

    def release_message(self) -> None:
        """Give the buffer of quantised messages back."""
        address, self._address = self._address, 0
        self.pool.give(address)

    def make_message(self, values: torch.Tensor, message: torch.Tensor) -> None:
        """Quantise the shard's values."""
        self.quantizer.pack(values, self.quantizer.format.open(message, values.numel()))

    def _take(self, size: int) -> torch.Tensor:
        buffer = self.pool.take(self.scratch_bytes)
        self._address = storage_ptr_of(buffer)
        return buffer[:size]


class SecondaryAllGather(PlainAllGather):
    """hpZ and MiCS: gathers inside ``group`` while its secondary partition holds the present values, else by ``inner``.

    With ``mics`` the secondary partition is renewed at the end of each step; with ``frozen`` it is made once, as the
    parameters never change.
    """

    def __init__(self, inner: PlainAllGather, group: RankGroup, mics: bool, frozen: bool) -> None:
        super().__init__(inner.in_layout, inner.dtype, inner.comm, inner.where)
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
    def unquantized(self) -> PlainAllGather:
        """Itself, unless messages are quantised, which are not the very values."""
        return self.inner.unquantized if self.quantizes else self

    def launch(self, kind: str, into: PartitionedBucket) -> None:
        """Inside the group if the secondary shards serve this gather; else over all ranks, to be kept in them."""
        training, group, inner = kind in TRAINING, self.group, self.inner
        if self._generation != into.generation or (training and not self._for_training):
            inner.launch(kind, into)  # from a disk it may raise, and then nothing arrives
            self._arriving, self._for_training = into.generation, training or self.frozen
            return
        # The group's secondary shards, end to end, are the W messages: what arrives is bit for bit what arrived first.
        messages = inner.receive_into(into.gathered)
        shard_of(messages, group.index, group.size).copy_(self.secondary_shard)
        first, kept = group.index * self.kept_messages, self.kept_messages
        padding = (group.size - 1) * sum(self.in_layout.padding_of(first + i) for i in range(kept))
        numel = kept * self.in_layout.shard_numel
        inner._pending = self.comm.all_gather(kind, messages, padding, self.where, group, numel)

    def finish(self) -> None:
        """Wait until the bucket is complete, and keep this rank's messages of it for the group."""
        self.inner.arrive()
        if self._arriving is not None:
            # Messages as they came, before they are decoded: whoever gathers them again gets the same bits.
            self.secondary_shard.copy_(shard_of(self.inner._messages, self.group.index, self.group.size))
            self._generation, self._arriving = self._arriving, None
        self.inner.finish()

    def without_quantization(self) -> PlainAllGather:
        """The strategy without quantisation, with an empty secondary shard of the other size."""
        return SecondaryAllGather(self.inner.without_quantization(), self.group, self.mics, self.frozen)

    # ---- the new shard goes to those that keep it: MiCS, and frozen parameters ---------------------------------------

    def launch_to_replicas(self, bucket: PartitionedBucket) -> Pending | None:
        """Launch this rank's new message to all ranks that keep it, one in each group. None: theirs are stale (hpZ)."""
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
        padding = len(keepers - {rank}) * self.in_layout.padding_of(rank)
        return self.comm.exchange(TO_REPLICAS, send, recv, padding, self.where, numel=self.in_layout.shard_numel)

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
        world, numel, size = self.comm.world_size, self.in_layout.shard_numel, self.message_bytes
        to = [self.keepers_of(rank) - {rank} for rank in range(world)]
        true = sum(len(others) * self.in_layout.true_numel_of(rank) for rank, others in enumerate(to))
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
    strategy = plain if quantization is None else QuantizedAllGather(plain, *quantization)
    return strategy if group is None else SecondaryAllGather(strategy, group, mics, frozen)


def secondary_shards(buckets: Iterable[PartitionedBucket]) -> list[torch.Tensor]:
    """HpZ and MiCS: the secondary shards, which this rank keeps for its group."""
    return [shard for bucket in buckets if (shard := bucket.strategy.secondary_shard) is not None]


# ---- quantizers ------------------------------------------------------------------------------------------------------


def build_quantizer(
    what: str, bits: int, settings: QuantizationConfig, numel: int, dtypes: Iterable[torch.dtype], comm: Communicator
) -> Quantizer:
    """A quantizer of ``bits`` an element, its kernel chosen and compiled. A collective; rank 0 logs the kernel.

    All kernels decode to the same bits, so ranks need not have the same one. ``numel`` is how many elements of
    ``dtypes`` are packed and unpacked in a step, together; ``what`` names them (``weights``, ``gradients``).

    Raises:
        ConfigError: on every rank; ``kernel=compiled`` cannot be had on one.
    """
    quantizer, problem = Quantizer(Format(bits, settings.block_size), settings.kernel), None
    try:
        quantizer.prepare(numel, dtypes, comm.device)
    except RuntimeError as error:
        problem = str(error)
    if settings.kernel == "compiled":
        comm.raise_on_all_ranks(problem, lambda text: ConfigError(f"zero.quantization.kernel='compiled': {text}"))
    if comm.rank == 0:
        log.info("%s: %s", what, quantizer.describe())
    return quantizer
