"""The error meter of a run, over whatever of it is quantised; and the closed forms that follow its decisions."""

from __future__ import annotations

from deepzero.comm.collectives import Communicator
from deepzero.comm.ledger import SECONDARY
from deepzero.comm.quantized_bucket import BETWEEN, INSIDE
from deepzero.config.engine import EngineConfig
from deepzero.runtime.built import Built
from deepzero.runtime.quantized_forms import reduction_traffic
from deepzero.runtime.zero.error_meter import ErrorMeter, short_name
from deepzero.runtime.zero.forecast import expected, secondary_bytes
from deepzero.runtime.zero.partitioned_interval import PartitionedInterval, send_to_replicas


def open_meter(built: Built, config: EngineConfig, comm: Communicator, micro_batches: int) -> ErrorMeter | None:
    """None where nothing is quantised, or nobody wants to know.

    Args:
        built: with its ledger open.
        config: the settings.
        comm: the ranks.
        micro_batches: accumulation steps.
    """
    partitioning, few_bits = built.partitioning, built.few_bits
    everything = partitioning.coordinator.intervals if partitioning is not None else []
    intervals = [interval for interval in everything if interval.gather.quantizes]
    idle = config.zero.quantization.meter_every == 0 or comm.device.type == "meta"  # a rehearsal has nothing to read
    if idle or not (intervals or few_bits):
        return None
    names = {
        (number, interval.index): short_name([group.names[slot.index] for slot in interval.slots])
        for number, group in enumerate(built.groups)
        for interval in group.layout.intervals
        if few_bits is not None and few_bits.takes((number, interval.index))
    }

    def changed() -> None:
        _predict_anew(built, comm, everything, micro_batches, config.zero.stage)

    return ErrorMeter(intervals, few_bits, names, config.zero.quantization, comm, changed)


def _predict_anew(
    built: Built, comm: Communicator, intervals: list[PartitionedInterval], micro_batches: int, stage: int
) -> None:
    """Something goes unquantised from now on: every later step sends more."""
    ledger, few_bits = comm.ledger, built.few_bits
    if built.partitioning is not None:
        with ledger.aside():  # those that have changed their form have nothing in it yet
            send_to_replicas(intervals)
        ledger.predicted_traffic |= expected(intervals, micro_batches) if intervals else {}
        built.partitioning.coordinator.predict_anew()
        ledger.predicted_memory[SECONDARY] = sum(secondary_bytes(interval.gather) for interval in intervals)
    if few_bits is not None:
        layouts = [group.layout for group in built.groups]
        for kind in (INSIDE, BETWEEN):
            ledger.predicted_traffic.pop(kind, None)
        ledger.predicted_traffic |= reduction_traffic(
            layouts, comm.nodes, few_bits.format, built.dtypes.wire.itemsize,
            lambda group, interval: not few_bits.takes((group, interval)), micro_batches if stage >= 2 else 1,
        )  # fmt: skip
