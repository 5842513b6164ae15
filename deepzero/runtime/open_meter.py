"""The error meter of a run, over whatever of it is quantised; and the closed forms that follow its decisions."""

from __future__ import annotations

from deepzero.comm.collectives import Communicator
from deepzero.comm.ledger import SECONDARY
from deepzero.comm.quantized_reduce import BETWEEN, INSIDE
from deepzero.config.engine import EngineConfig
from deepzero.runtime.quantized_forms import reduction_traffic
from deepzero.runtime.zero.forecast import expected, secondary_bytes
from deepzero.runtime.zero.partitioned_bucket import PartitionedBucket, send_to_replicas
from deepzero.runtime.zero.quantization_monitor import QuantizationMonitor, short_name
from deepzero.runtime.zero_components import ZeroComponents


def build_quantization_monitor(
    built: ZeroComponents, config: EngineConfig, comm: Communicator, micro_batches: int
) -> QuantizationMonitor | None:
    """None where nothing is quantised, or nobody wants to know.

    Args:
        built: with its ledger open.
        config: the settings.
        comm: the ranks.
        micro_batches: accumulation steps.
    """
    partitioning, quantized_grads = built.partitioning, built.quantized_grads
    everything = partitioning.coordinator.buckets if partitioning is not None else []
    buckets = [bucket for bucket in everything if bucket.gather.quantizes]
    idle = config.zero.quantization.meter_every == 0 or comm.device.type == "meta"  # a rehearsal has nothing to read
    if idle or not (buckets or quantized_grads):
        return None
    names = {
        (number, bucket.index): short_name([group.names[slot.index] for slot in bucket.slots])
        for number, group in enumerate(built.groups)
        for bucket in group.layout.buckets
        if quantized_grads is not None and quantized_grads.takes((number, bucket.index))
    }

    def changed() -> None:
        _predict_anew(built, comm, everything, micro_batches, config.zero.stage)

    return QuantizationMonitor(buckets, quantized_grads, names, config.zero.quantization, comm, changed)


def _predict_anew(
    built: ZeroComponents, comm: Communicator, buckets: list[PartitionedBucket], micro_batches: int, stage: int
) -> None:
    """Something goes unquantised from now on: every later step sends more."""
    ledger, quantized_grads = comm.ledger, built.quantized_grads
    if built.partitioning is not None:
        with ledger.aside():  # those that have changed their form have nothing in it yet
            send_to_replicas(buckets)
        ledger.predicted_traffic |= expected(buckets, micro_batches) if buckets else {}
        built.partitioning.coordinator.predict_anew()
        ledger.predicted_memory[SECONDARY] = sum(secondary_bytes(bucket.gather) for bucket in buckets)
    if quantized_grads is not None:
        layouts = [group.layout for group in built.groups]
        for kind in (INSIDE, BETWEEN):
            ledger.predicted_traffic.pop(kind, None)
        ledger.predicted_traffic |= reduction_traffic(
            layouts, comm.nodes, quantized_grads.format, built.dtypes.wire.itemsize,
            lambda group, bucket: not quantized_grads.takes((group, bucket)), micro_batches if stage >= 2 else 1,
        )  # fmt: skip
