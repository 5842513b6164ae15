"""ZeRO++ for parameters, in stage 3: quantised messages, a second partition inside a node, and what they lose.

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

[Note: what quantisation loses]
    The worth of a quantised bucket is its signal-to-noise ratio, over all ranks::

        SNR = 10 log10( sum x**2 / sum (x - decoded)**2 )   in dB

    6 dB are one bit. For numbers of a bell curve in blocks of 2048, 8 bits give some 42 dB and 4 bits 17; a block in
    which one number is much larger than the rest has less, as the scale is that one's: 15 dB in 8 bits at the worst,
    when all the rest is half a step and rounded to 0 or a whole one.

    Every ``meter_every`` steps, the first included, weights are measured on each rank's own shard, as it would be sent,
    and gradients as they are sent. Ranks then add up their sums, in rank order, so that all come to the same decision:
    a bucket below ``min_weight_snr_db`` or ``min_gradient_snr_db`` travels unquantised from the next step on, which is
    logged once. A step that is skipped is not measured; the next one is. The decision is not saved: a run that goes on
    from a checkpoint measures in its first step, and decides again.

Sources: [ZeRO++], sections 3.1 and 3.2; [MiCS]; ``ds_secondary_tensor`` in [DeepSpeed]. Section 5.3 of [ZeRO++]
compares loss curves and no more; the measure of what is lost is deepzero's own.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from deepzero.comm.collectives import Communicator, Pending
from deepzero.comm.ledger import Traffic
from deepzero.comm.quantization import CHUNK, Format, Quantizer
from deepzero.comm.quantized_reduce import QuantizedReduce
from deepzero.comm.reduce_scatter import Key
from deepzero.comm.topology import RankGroup
from deepzero.config.strict import ConfigError
from deepzero.config.zero import QuantizationConfig
from deepzero.runtime.zero.buffer_pool import BufferPool
from deepzero.runtime.zero.parameter_all_gather import TO_REPLICAS, TRAINING, PlainAllGather, shard_of
from deepzero.utils.storage import storage_ptr_of

if TYPE_CHECKING:
    from deepzero.runtime.zero.partitioned_bucket import PartitionedBucket
    from deepzero.runtime.zero.stage_1_and_2 import ParamGroup

log = logging.getLogger(__name__)

METER = "quantization.all_gather"

NO_NOISE_DB = 400.0
"""The ratio reported where nothing was lost; more than fp64 could tell apart."""

# ---- how a bucket is gathered ----------------------------------------------------------------------------------------


class QuantizedAllGather(PlainAllGather):
    """qwZ: values for computing travel quantised, exact ones as ``plain``.

    Once the error meter has found quantised values too far off, all travel as ``plain``.

    ``pool`` (uint8) has room for W messages of any bucket in ``scratch_bytes``, so that all buffers serve all.
    """

    def __init__(self, plain: PlainAllGather, quantizer: Quantizer, pool: BufferPool, scratch_bytes: int) -> None:
        super().__init__(plain.layout, plain.dtype, plain.comm, plain.where)
        self.source = plain.source
        self._plain, self.scratch_bytes = plain, scratch_bytes
        self.quantizer: Quantizer = quantizer
        self.pool = pool
        self.message_bytes = quantizer.format.message_bytes(plain.layout.shard_numel)
        # Of the gather under way: what is decoded into, and where the pool's buffer for the messages is.
        self._gathered, self._address = torch.empty(0), 0

    @property
    def exact(self) -> PlainAllGather:
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
        numel = self.layout.shard_numel
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
        super().__init__(inner.layout, inner.dtype, inner.comm, inner.where)
        self.inner, self.source, self.quantizer = inner, inner.source, inner.quantizer
        self.scratch_bytes, self.message_bytes = inner.scratch_bytes, inner.message_bytes
        self.group: RankGroup = group
        self.mics, self.kept_for_good = mics and not frozen, frozen
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
            inner.launch(kind, into)  # from a disk it may raise, and then nothing arrives
            self._arriving, self._for_training = into.generation, training or self.kept_for_good
            return
        # The group's secondary shards, end to end, are the W messages: what arrives is bit for bit what arrived first.
        messages = inner.receive_into(into.gathered)
        shard_of(messages, group.index, group.size).copy_(self.secondary_shard)
        first, kept = group.index * self.kept_messages, self.kept_messages
        padding = (group.size - 1) * sum(self.layout.padding_of(first + i) for i in range(kept))
        numel = kept * self.layout.shard_numel
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
        return SecondaryAllGather(self.inner.unquantized(), self.group, self.mics, self.kept_for_good)

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
        padding = len(keepers - {rank}) * self.layout.padding_of(rank)
        return self.comm.exchange(TO_REPLICAS, send, recv, padding, self.where, numel=self.layout.shard_numel)

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
        world, numel, size = self.comm.world_size, self.layout.shard_numel, self.message_bytes
        to = [self.keepers_of(rank) - {rank} for rank in range(world)]
        true = sum(len(others) * self.layout.true_numel_of(rank) for rank, others in enumerate(to))
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


# ---- quantizers, and the monitor of what they lose -------------------------------------------------------------------


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


class QuantizationMonitor:
    """Measures, reports and decides.

    ``groups`` are those of the trained parameters, in the reducer's order; of ``buckets``, those of all partitioned
    parameters, the ones that travel quantised are measured, and of gradients those that ``quantized_grads`` takes.
    ``changed`` is called when something is quantised no more.
    """

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        buckets: Sequence[PartitionedBucket],
        quantized_grads: QuantizedReduce | None,
        settings: QuantizationConfig,
        comm: Communicator,
        changed: Callable[[], None],
    ) -> None:
        self.buckets, self.quantized_grads = [bucket for bucket in buckets if bucket.gather.quantizes], quantized_grads
        self.names: dict[Key, str] = {
            (number, bucket.index): short_name([group.names[slot.index] for slot in bucket.slots])
            for number, group in enumerate(groups)
            for bucket in group.layout.buckets
            if quantized_grads is not None and quantized_grads.takes((number, bucket.index))
        }
        self.settings, self.comm, self._changed, self.steps = settings, comm, changed, 0
        # What was measured last, in dB, by bucket; empty before the first measurement.
        self.weights: dict[str, float] = {}
        self.gradients: dict[str, float] = {}
        # What goes unquantised since it fell below a bound: ``weights of …``, ``gradients of …``.
        self.unquantized: list[str] = []
        self.fresh = False
        """Whether the last step was measured."""
        comm.ledger.untracked_kinds.add(METER)
        self.restart()

    @property
    def measures(self) -> bool:
        """Whether there is anything to measure in any step."""
        return self.settings.meter_every > 0 and bool(self.buckets or self.quantized_grads)

    def readings(self) -> dict[str, Any]:
        """The last measurement: ``weights`` and ``gradients`` in dB by bucket, and what goes ``unquantized`` since."""
        return {"weights": dict(self.weights), "gradients": dict(self.gradients), "unquantized": [*self.unquantized]}

    def _due(self) -> bool:
        """Whether the step under way, counted from 0, is measured."""
        return self.settings.meter_every > 0 and self.steps % self.settings.meter_every == 0

    def close_step(self, applied: bool) -> None:
        """An optimizer step is complete. A collective, if it was one that is measured.

        One that was skipped is not ``applied``: it counts for nothing, and the next one is measured in its place.
        """
        self.fresh = applied and self._due()
        if self.fresh:
            self._measure()
        self.steps += int(applied)
        self.restart()

    def restart(self) -> None:
        """A step begins, or begins anew: gradients are measured as they are sent, which is switched on before."""
        if self.quantized_grads is not None:
            self.quantized_grads.metering = self._due()

    def metrics(self) -> dict[str, float]:
        """For the loggers: every bucket's ratio and the worst, after a step that was measured; else nothing."""
        if not self.fresh:
            return {}
        found: dict[str, float] = {}
        for what, ratios in (("weights", self.weights), ("gradients", self.gradients)):
            found |= {f"quantization/{what}_snr_db/{name}": ratio for name, ratio in ratios.items()}
            if ratios:
                found[f"quantization/{what}_snr_db_min"] = min(ratios.values())
        return {**found, "quantization/unquantized": float(len(self.unquantized))}

    # ---- how ---------------------------------------------------------------------------------------------------------

    def _measure(self) -> None:
        weights = [bucket for bucket in self.buckets if bucket.gather.quantizes]
        reduce = self.quantized_grads
        gradients = [key for key in self.names if reduce is not None and reduce.takes(key)]
        sent = reduce.measured if reduce is not None else {}
        mine = [self._of_weights(bucket) for bucket in weights] + [sent.get(key, (0.0, 0.0)) for key in gradients]
        sums = self._over_ranks(mine)
        self.weights, self.gradients = {}, {}
        before = len(self.unquantized)
        for bucket, pair in zip(weights, sums, strict=False):
            if self._note_ratio("weights", short_name([param._zero.name for param in bucket.params]), pair):
                # Nothing is gathered now. Both names, so that the old strategy's secondary shard is freed.
                bucket.gather = bucket.gathered_by = bucket.gather.unquantized()
        for key, pair in zip(gradients, sums[len(weights) :], strict=True):
            if self._note_ratio("gradients", self.names[key], pair) and reduce is not None:
                reduce.exact_buckets.add(key)
        if len(self.unquantized) > before:
            self._changed()

    def _of_weights(self, bucket: PartitionedBucket) -> tuple[float, float]:
        """This rank's shard, quantised and back, in whole blocks: squares of the values and of their errors."""
        quantizer, shard = bucket.gather.quantizer, bucket.shard
        if quantizer is None:
            return 0.0, 0.0
        step = max(CHUNK // quantizer.format.block, 1) * quantizer.format.block
        size, device = min(step, shard.numel()), self.comm.device
        message = torch.empty(quantizer.format.message_bytes(size), dtype=torch.uint8, device=device)
        decoded = torch.empty(size, dtype=torch.float32, device=device)
        total = torch.zeros(2, dtype=torch.float64, device=device)
        for chunk in shard.split(step):
            values, numel = chunk.to(device), chunk.numel()
            packed = quantizer.format.open(message[: quantizer.format.message_bytes(numel)], numel)
            quantizer.pack(values, packed)
            quantizer.unpack(packed, decoded[:numel])
            wide = values.to(torch.float64)
            total += torch.stack([wide.square().sum(), (wide - decoded[:numel]).square().sum()])
        signal, noise = total.tolist()
        return signal, noise

    def _over_ranks(self, mine: list[tuple[float, float]]) -> list[tuple[float, float]]:
        """Every rank's sums, added in rank order: the same numbers on all ranks."""
        if not mine:
            return []
        values = torch.tensor(mine, dtype=torch.float64).reshape(-1)
        whole = torch.zeros(self.comm.world_size, values.numel(), dtype=torch.float64, device=self.comm.device)
        rows = whole.unbind()
        rows[self.comm.rank].copy_(values)
        self.comm.all_gather(METER, whole.view(-1), where="error meter").wait()
        return [(signal, noise) for signal, noise in sum(rows, torch.zeros_like(rows[0])).view(-1, 2).tolist()]

    def _note_ratio(self, what: str, name: str, sums: tuple[float, float]) -> bool:
        """Note a ratio. Returns whether it is below the bound, so that ``name`` travels unquantised from now on."""
        signal, noise = sums
        if not (math.isfinite(signal) and math.isfinite(noise)) or signal == 0:
            return False
        ratio = 10 * math.log10(signal / noise) if noise > 0 else NO_NOISE_DB
        (self.weights if what == "weights" else self.gradients)[name] = ratio
        bound = self.settings.bound_db("weight" if what == "weights" else "gradient")
        if bound is None or ratio >= bound:
            return False
        self.unquantized.append(f"{what} of {name}")
        if self.comm.rank == 0:
            log.warning(
                "the quantised %s of %s have a signal-to-noise ratio of %.1f dB, below zero.quantization.min_%s_snr_db,"
                " which is %g: they travel unquantised from now on",
                what, name, ratio, what.removesuffix("s"), bound,
            )  # fmt: skip
        return True


def short_name(names: Sequence[str]) -> str:
    """A bucket's name in logs: its first parameter's, and how many more it has.

    Example:
        >>> short_name(["head.weight"]), short_name(["a.weight", "a.bias", "b.weight"])
        ('head.weight', 'a.weight+2')
    """
    return names[0] + (f"+{len(names) - 1}" if len(names) > 1 else "")
