"""What stage 3 will send and hold in a step: from the model's extents before the first one, then from its plan.

The plan is what the coordinator executes, so what is read off it is no estimate. Before it is known, every bucket is
expected to be gathered twice in every micro-batch: the closed form ``2 * Ψ(W-1)/W``, less what ZeRO++ saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from deepzero.comm.ledger import Ledger, Traffic
from deepzero.offload.copy_streams import FETCH
from deepzero.runtime.zero.fetch_plan import FetchAction, ModuleUse
from deepzero.runtime.zero.parameter_all_gather import (
    BACKWARD,
    FORWARD,
    TO_REPLICAS,
    PlainAllGather,
    SecondaryAllGather,
)
from deepzero.runtime.zero.partitioned_bucket import PartitionedBucket
from deepzero.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator


@dataclass
class Forecast:
    """Of one rank, mean over ranks."""

    traffic: dict[str, Traffic] = field(default_factory=dict)
    message_bytes: int = 0
    """The most that buffers for quantised messages take at any time."""


def expected(buckets: Sequence[PartitionedBucket], micro_batches: int) -> dict[str, Traffic]:
    """One step's traffic without a plan: every bucket forward and backward in every micro-batch."""
    forward, backward = Traffic(), Traffic()
    for bucket in buckets:
        kept = bucket.gather.group is not None
        over_all = 0 if bucket.gather.always_inside else 1 if kept else micro_batches
        forward.add(bucket.gather.forecast(inside=False), over_all)
        forward.add(bucket.gather.forecast(inside=True), micro_batches - over_all)
        backward.add(bucket.gather.forecast(inside=kept), micro_batches)
    return {FORWARD: forward, BACKWARD: backward, **_replicas(buckets)}


def planned(buckets: Sequence[PartitionedBucket], uses: Sequence[ModuleUse], plan: Sequence[FetchAction]) -> Forecast:
    """What every later step will send and hold, by its plan."""
    forms, fetched = {FORWARD: Traffic(), BACKWARD: Traffic()}, Traffic()
    # hpZ: what has been gathered over all ranks since the last step is kept inside the node.
    seen: set[int] = set()
    flying: set[int] = set()
    most_flying = _publishing(buckets)
    for use, action in zip(uses, plan, strict=True):
        launched = [(key, use.backward) for key in action.fetch] + list(action.prefetch)
        flying |= {key for key, _ in launched}
        most_flying = max(most_flying, sum(buckets[key].gather.quantizes for key in flying))
        flying -= set(use.keys)
        for key, backward in launched:
            bucket, gather = buckets[key], buckets[key].gather
            kept = gather.group is not None and (key in seen or gather.always_inside)
            seen.add(key)
            forms[BACKWARD if backward else FORWARD].add(gather.forecast(inside=kept))
            if bucket.gather.shard_on_host and not kept:
                fetched.add(_from_host(bucket))
    traffic = {**forms, **_replicas(buckets), **({FETCH: fetched} if fetched.calls else {})}
    room = max((bucket.gather.scratch_bytes for bucket in buckets), default=0)
    return Forecast(traffic, most_flying * room)


def predict(coordinator: PartitionedParameterCoordinator, ledger: Ledger) -> None:
    """Put into the ledger what later steps will send and hold by their plans, which know all savings."""
    training, evaluation = coordinator.training, coordinator.evaluation
    plans = [(trace.uses, trace.plan) for trace in (training, evaluation) if trace.plan is not None]
    forecasts = [planned(coordinator.buckets, *plan) for plan in plans]
    if training.plan is not None:
        ledger.predicted_traffic.update(forecasts[0].traffic)
    messages = max(forecast.message_bytes for forecast in forecasts)
    itemsize = max((bucket.gather.dtype.itemsize for bucket in coordinator.buckets), default=0)
    ledger.predicted_memory["gathered"] = coordinator.most_gathered_numel() * itemsize + messages


def _publishing(buckets: Sequence[PartitionedBucket]) -> int:
    """Buffers for quantised messages that a publication to replicas has under way at once."""
    sent = [bucket for bucket in buckets if bucket.gather.quantizes and bucket.gather.mics]
    return min(len(sent), 2)


def secondary_bytes(gather: PlainAllGather) -> int:
    """What hpZ or MiCS keep of a bucket on a rank: one H-th of it, as it travels."""
    return gather.kept_messages * gather.message_bytes if isinstance(gather, SecondaryAllGather) else 0


def _from_host(bucket: PartitionedBucket) -> Traffic:
    """One part's way from host memory to the device."""
    world, true = bucket.gather.comm.world_size, bucket.bucket.true_numel()
    part_bytes = bucket.bucket.shard_numel * bucket.gather.dtype.itemsize
    return Traffic(1, true / world, (bucket.numel - true) / world, part_bytes)


def _replicas(buckets: Sequence[PartitionedBucket]) -> dict[str, Traffic]:
    total = Traffic()
    for bucket in buckets:
        if isinstance(bucket.gather, SecondaryAllGather) and bucket.gather.mics:
            total.add(bucket.gather.forecast_publish())
    return {TO_REPLICAS: total} if total.calls else {}
