"""What stage 3 will send and hold in a step: from the model's extents before the first one, then from its plan.

The plan is what the coordinator executes, so what is read off it is no estimate. Before it is known, every bucket is
expected to be gathered twice in every micro-batch: the closed form ``2 * Ψ(W-1)/W``, less what ZeRO++ saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from deepzero.comm.ledger import Traffic
from deepzero.offload.copy_streams import FETCH
from deepzero.runtime.zero.fetch_plan import FetchAction, ModuleUse
from deepzero.runtime.zero.parameter_all_gather import TO_REPLICAS, ParameterAllGather
from deepzero.runtime.zero.partitioned_bucket import PartitionedBucket

FORWARD = "parameters.all_gather_forward"
BACKWARD = "parameters.all_gather_backward"


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
        rules = bucket.gather.rules
        kept = rules.inside is not None
        over_all = 0 if kept and (rules.replicated or rules.fixed) else 1 if kept else micro_batches
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
            bucket, rules = buckets[key], buckets[key].gather.rules
            kept = rules.inside is not None and (key in seen or rules.replicated or rules.fixed)
            seen.add(key)
            forms[BACKWARD if backward else FORWARD].add(bucket.gather.forecast(inside=kept))
            if bucket.shard_on_host and not kept:
                fetched.add(_from_host(bucket))
    traffic = {**forms, **_replicas(buckets), **({FETCH: fetched} if fetched.calls else {})}
    room = max((bucket.gather.rules.room for bucket in buckets), default=0)
    return Forecast(traffic, most_flying * room)


def _publishing(buckets: Sequence[PartitionedBucket]) -> int:
    """Buffers for quantised messages that a publication to replicas has under way at once."""
    sent = [i for i in buckets if i.gather.quantizes and i.gather.rules.replicated and not i.gather.rules.fixed]
    return min(len(sent), 2)


def secondary_bytes(gather: ParameterAllGather) -> int:
    """What hpZ or MiCS keep of a bucket on a rank: one H-th of it, as it travels."""
    group = gather.rules.inside
    if group is None or gather.comm.world_size == 1:
        return 0
    if gather.quantizes:
        return gather.message_room // group.size
    return gather.bucket.numel * gather.dtype.itemsize // group.size


def _from_host(bucket: PartitionedBucket) -> Traffic:
    """One part's way from host memory to the device."""
    world, true = bucket.comm.world_size, bucket.bucket.true_numel()
    part_bytes = bucket.bucket.shard_numel * bucket.gather.dtype.itemsize
    return Traffic(1, true / world, (bucket.numel - true) / world, part_bytes)


def _replicas(buckets: Sequence[PartitionedBucket]) -> dict[str, Traffic]:
    total = Traffic()
    for bucket in buckets:
        if bucket.gather.rules.replicated and not bucket.gather.rules.fixed:
            total.add(bucket.gather.forecast_share())
    return {TO_REPLICAS: total} if total.calls else {}
