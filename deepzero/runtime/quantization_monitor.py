"""What quantisation loses, measured while training: the error meter of qwZ and qgZ.

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

Section 5.3 of [ZeRO++] compares loss curves and no more; the measure of what is lost is deepzero's own.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from deepzero.comm.collectives import Communicator
from deepzero.comm.quantization import CHUNK
from deepzero.comm.quantized_reduce import QuantizedReduce
from deepzero.comm.reduce_scatter import BucketKey
from deepzero.config.zero import QuantizationConfig

if TYPE_CHECKING:
    from deepzero.runtime.zero.partitioned_bucket import PartitionedBucket
    from deepzero.runtime.zero.stage_1_and_2 import ParamGroup

log = logging.getLogger(__name__)

METER = "quantization.all_gather"

NO_NOISE_DB = 400.0
"""The ratio reported where nothing was lost; more than fp64 could tell apart."""


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
        self.buckets = [bucket for bucket in buckets if bucket.strategy.quantizes]
        self.quantized_grads = quantized_grads
        self.names: dict[BucketKey, str] = {
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
            self.quantized_grads.meter(self._due())

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
        weights = [bucket for bucket in self.buckets if bucket.strategy.quantizes]
        reduce = self.quantized_grads
        gradients = [key for key in self.names if reduce is not None and reduce.takes(key)]
        sent = reduce.measured if reduce is not None else {}
        mine = [self._of_weights(bucket) for bucket in weights] + [sent.get(key, (0.0, 0.0)) for key in gradients]
        sums = self._over_ranks(mine)
        self.weights, self.gradients = {}, {}
        before = len(self.unquantized)
        for bucket, pair in zip(weights, sums, strict=False):
            if self._note_ratio("weights", short_name([param._record.name for param in bucket.params]), pair):
                # Nothing is gathered now. Both names, so that the old strategy's secondary shard is freed.
                bucket.strategy = bucket.gathered_by = bucket.strategy.without_quantization()
        for key, pair in zip(gradients, sums[len(weights) :], strict=True):
            if self._note_ratio("gradients", self.names[key], pair) and reduce is not None:
                reduce.exact_buckets.add(key)
        if len(self.unquantized) > before:
            self._changed()

    def _of_weights(self, bucket: PartitionedBucket) -> tuple[float, float]:
        """This rank's shard, quantised and back, in whole blocks: squares of the values and of their errors."""
        quantizer, shard = bucket.strategy.quantizer, bucket.shard
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
