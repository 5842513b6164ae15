"""What stage 3 will send and hold in a step: from the model's extents before the first one, then from its plan.

The plan is what the coordinator executes, so what is read off it is no estimate. Before it is known, every interval is
expected to be gathered twice in every micro-batch: the closed form ``2 * Ψ(W-1)/W``, less what ZeRO++ saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from deepzero.comm.ledger import Traffic
from deepzero.offload.wire import FETCH
from deepzero.runtime.zero.fetch_plan import Action, Use
from deepzero.runtime.zero.interval_gather import TO_REPLICAS, IntervalGather
from deepzero.runtime.zero.partitioned_interval import PartitionedInterval

FORWARD = "parameters.all_gather_forward"
BACKWARD = "parameters.all_gather_backward"


@dataclass
class Forecast:
    """Of one rank, mean over ranks."""

    traffic: dict[str, Traffic] = field(default_factory=dict)
    message_bytes: int = 0
    """The most that buffers for quantised messages take at any time."""


def expected(intervals: Sequence[PartitionedInterval], micro_batches: int) -> dict[str, Traffic]:
    """One step's traffic without a plan: every interval forward and backward in every micro-batch."""
    forward, backward = Traffic(), Traffic()
    for interval in intervals:
        rules = interval.gather.rules
        kept = rules.inside is not None
        over_all = 0 if kept and (rules.replicated or rules.fixed) else 1 if kept else micro_batches
        forward.add(interval.gather.forecast(inside=False), over_all)
        forward.add(interval.gather.forecast(inside=True), micro_batches - over_all)
        backward.add(interval.gather.forecast(inside=kept), micro_batches)
    return {FORWARD: forward, BACKWARD: backward, **_replicas(intervals)}


def planned(intervals: Sequence[PartitionedInterval], uses: Sequence[Use], plan: Sequence[Action]) -> Forecast:
    """What every later step will send and hold, by its plan."""
    forms, fetched = {FORWARD: Traffic(), BACKWARD: Traffic()}, Traffic()
    # hpZ: what has been gathered over all ranks since the last step is kept inside the node.
    seen: set[int] = set()
    flying: set[int] = set()
    most_flying = _publishing(intervals)
    for use, action in zip(uses, plan, strict=True):
        launched = [(key, use.backward) for key in action.fetch] + list(action.prefetch)
        flying |= {key for key, _ in launched}
        most_flying = max(most_flying, sum(intervals[key].gather.quantizes for key in flying))
        flying -= set(use.keys)
        for key, backward in launched:
            interval, rules = intervals[key], intervals[key].gather.rules
            kept = rules.inside is not None and (key in seen or rules.replicated or rules.fixed)
            seen.add(key)
            forms[BACKWARD if backward else FORWARD].add(interval.gather.forecast(inside=kept))
            if interval.shard_on_host and not kept:
                fetched.add(_from_host(interval))
    traffic = {**forms, **_replicas(intervals), **({FETCH: fetched} if fetched.calls else {})}
    room = max((interval.gather.rules.room for interval in intervals), default=0)
    return Forecast(traffic, most_flying * room)


def _publishing(intervals: Sequence[PartitionedInterval]) -> int:
    """Buffers for quantised messages that a publication to replicas has under way at once."""
    sent = [i for i in intervals if i.gather.quantizes and i.gather.rules.replicated and not i.gather.rules.fixed]
    return min(len(sent), 2)


def secondary_bytes(gather: IntervalGather) -> int:
    """What hpZ or MiCS keep of an interval on a rank: one H-th of it, as it travels."""
    group = gather.rules.inside
    if group is None or gather.comm.world_size == 1:
        return 0
    if gather.quantizes:
        return gather.message_room // group.size
    return gather.interval.numel * gather.dtype.itemsize // group.size


def _from_host(interval: PartitionedInterval) -> Traffic:
    """One part's way from host memory to the device."""
    world, true = interval.comm.world_size, interval.interval.true_numel()
    part_bytes = interval.interval.part_numel * interval.gather.dtype.itemsize
    return Traffic(1, true / world, (interval.numel - true) / world, part_bytes)


def _replicas(intervals: Sequence[PartitionedInterval]) -> dict[str, Traffic]:
    total = Traffic()
    for interval in intervals:
        if interval.gather.rules.replicated and not interval.gather.rules.fixed:
            total.add(interval.gather.forecast_share())
    return {TO_REPLICAS: total} if total.calls else {}
