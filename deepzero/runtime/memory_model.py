"""What a run will hold and send, predicted before it starts: the closed forms of ZeRO, and a ledger to compare with.

With Ψ true elements, W ranks, c bytes of the compute dtype, a bytes of the accumulation dtype, m bytes of optimizer
moments per element (8 for Adam), and x bytes of a separate fp32 master (4; 0 in fp32, whose parameters are their own
masters):

===========  ==========  ==================================  ============  ============
stage        parameters  gradients                           masters       moments
===========  ==========  ==================================  ============  ============
0            cΨ          uΨ + aΨ                             xΨ            mΨ
1            cΨ          uΨ + aΨ/W                           xΨ/W          mΨ/W
2            cΨ          aΨ/W                                xΨ/W          mΨ/W
3            cΨ/W        aΨ/W                                xΨ/W          mΨ/W
===========  ==========  ==================================  ============  ============

u is what unreduced gradients take: c; or a when several micro-batches are summed in a wider dtype; or nothing in
stages 0 and 1 with ``overlap_comm`` and a single micro-batch, whose gradients leave as they come. Stage 1 by all-reduce
holds ``aΨ`` in place of ``aΨ/W``. With 2-byte gradients and x + m = K, stage 2 is the paper's ``2Ψ + (2+K)Ψ/W``, stage
1 its ``4Ψ + KΨ/W`` and the reduced share, ``aΨ/W``, beside it, stage 3 its ``(4+K)Ψ/W``, and what is gathered at the
moment.
Stage 3's persistent parameters take c bytes on every rank, its frozen ones a W-th of that.

Sent by one rank per optimizer step, in elements, mean over ranks: one reduce-scatter or all-gather of all parameters is
``Ψ(W-1)/W``. Stages 0, 1 and 2 send two of them; stage 1 by all-reduce three; stage 2 reduces every micro-batch; stage
3 gathers twice and reduces once in every micro-batch, less what its plan saves (``fetch_plan.py``). The plan is what
the coordinator executes, so what is read off it, once the first step has shown the order of modules, is no estimate.
Besides, ranks exchange one message of 2 KiB per step (``consistency.py``).

Sources: [stage-2 notes], "Partitioning" and "Communication volume analysis"; [ZeRO], sections 3, 5 and 7.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING

import torch

from deepzero.comm.collectives import Communicator
from deepzero.comm.exact_sum import chunk_for
from deepzero.comm.ledger import HOST_CATEGORIES, SECONDARY, SPARE, Ledger, Traffic
from deepzero.comm.quantization import Format
from deepzero.comm.quantized_reduce import BETWEEN, INSIDE
from deepzero.comm.reduce_scatter import ALL_GATHER_GRADIENTS, ALL_REDUCE, REDUCE_SCATTER
from deepzero.comm.topology import Nodes
from deepzero.config.engine import EngineConfig
from deepzero.config.zero import ZeroConfig
from deepzero.layout import Bucket, FlatLayout
from deepzero.offload.copy_streams import FETCH, SUMS_TO_DEVICE, TO_DEVICE, TO_HOST
from deepzero.offload.file_store import FILE_FETCH, FILE_READ, FILE_WRITE, in_blocks
from deepzero.offload.optimizer_offload import GRADIENTS, MOMENTS, STAGING, HostAllGather
from deepzero.placement import GroupPlan
from deepzero.runtime.consistency import AGREEMENT, OWN_WORDS
from deepzero.runtime.grad_norm import EXPONENT_BINS
from deepzero.runtime.zero.fetch_plan import FetchPlan, ModuleUse
from deepzero.runtime.zero.parameter_all_gather import BACKWARD, FORWARD, TO_REPLICAS, send_to_replicas
from deepzero.runtime.zero.partitioned_bucket import PartitionedBucket
from deepzero.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepzero.runtime.zero.stage3 import HOST_PARAMETERS, PartitionedParamGroup
from deepzero.runtime.zero.stage_1_and_2 import ALL_GATHER, HOST_MASTERS, ParamGroup
from deepzero.runtime.zero.zeropp import SecondaryAllGather, secondary_shards
from deepzero.utils.storage import storage_ptr_of

if TYPE_CHECKING:
    from deepzero.runtime.build import ZeroComponents

# ---- closed forms: integers in, bytes and traffic out ----------------------------------------------------------------


@dataclass(frozen=True)
class StateSizes:
    """Bytes per element, and how the run is cut."""

    compute: int
    accumulation: int
    moments: float
    wire: int
    stage: int
    overlap: bool
    micro_batches: int
    whole_reduce: bool  # gradients are all-reduced: stage 0, or stage 1 with reduce_scatter=False
    exact: bool
    quantized_grads: Format | None = None  # qgZ's messages; None: gradients travel in the wire dtype
    invariant: bool = False  # comm.world_size_invariant

    @property
    def every_pass(self) -> bool:
        """Whether each micro-batch is reduced, and not their sum."""
        return self.stage >= 2 or self.invariant

    @property
    def unreduced(self) -> int:
        """The u of the module's text: bytes per element of whole gradients before they are reduced."""
        if self.every_pass or (self.overlap and self.micro_batches == 1):
            return 0
        return self.compute if self.micro_batches == 1 else max(self.compute, self.accumulation)

    @property
    def reductions(self) -> int:
        """How often a step reduces every gradient."""
        return self.micro_batches if self.every_pass else 1


@dataclass(frozen=True)
class Elements:
    """Elements of all groups over all ranks, of parameters or of padding; and what of them is on the host."""

    trained: int
    persistent: int = 0  # stage 3's: whole on every rank, and trained
    frozen: int = 0  # stage 3's: partitioned, not trained
    host_optimizer: int = 0  # the CPU steps on them
    host_parameters: int = 0  # of partitioned groups alone
    sent: int = 0  # the CPU steps on them, and their parameters are on the device
    brought: int = 0  # the device steps on them, and their parameters are on the host

    @classmethod
    def of(cls, stores: Iterable[ParamGroup], count: Callable[[Bucket], int]) -> Elements:
        """Add up what ``count`` finds in each bucket of the groups."""
        found = Counter(dict.fromkeys((f.name for f in fields(cls)), 0))
        for group in stores:
            trained = group.placement.trained
            for bucket in group.layout.buckets:
                numel = count(bucket)
                steps, keeps = group.placement.steps_on_host(bucket), group.placement.keeps_on_host(bucket)
                found["trained"] += numel * trained
                found["persistent"] += numel * (trained and not group.placement.partitioned)
                found["frozen"] += numel * (not trained)
                found["host_optimizer"] += numel * steps
                found["host_parameters"] += numel * keeps
                found["sent"] += numel * (steps and not keeps)
                found["brought"] += numel * (trained and keeps and not steps)
        return cls(**found)


def predicted_memory(elements: Elements, world_size: int, sizes: StateSizes, copies: int = 1) -> dict[str, int]:
    """Bytes of one rank by category; the table above, and where a part is offloaded the same for the host.

    The host has ``copies`` of the reduced gradients.
    """
    numel, host = elements.trained, elements.host_optimizer
    whole = elements.persistent if sizes.stage == 3 else numel
    shards = numel - whole + elements.frozen - elements.host_parameters
    # fp32 parameters are their own masters where both lie on one side.
    own = sizes.compute == 4
    masters, host_masters = (elements.brought, elements.sent) if own else (numel - host, host)
    every_rank = world_size if sizes.stage == 0 else 1
    forms = {
        "parameters": (whole * world_size + shards) * sizes.compute,
        "gradients": numel * sizes.unreduced * world_size
        + (numel - host) * sizes.accumulation * (world_size if sizes.whole_reduce else 1),
        "masters": 4 * masters * every_rank,
        "moments": sizes.moments * (numel - host) * every_rank,
        "host_parameters": sizes.compute * elements.host_parameters,
        GRADIENTS: copies * sizes.accumulation * host,
        HOST_MASTERS: 4 * host_masters,
        MOMENTS: sizes.moments * host,
    }
    offloads = host or elements.host_parameters
    return {
        category: int(total) // world_size
        for category, total in forms.items()
        if offloads or category not in HOST_CATEGORIES
    }


def bucket_bytes(
    layouts: Sequence[FlatLayout], world_size: int, device_type: str, sizes: StateSizes, nodes: Nodes
) -> int:
    """What gradients on their way take on the device: D buckets of B elements and what they receive, and scratch.

    Exact sums receive the other ranks' parts, the backend's own reduce-scatter one part; qgZ's messages have room in
    the same place.
    """
    capacity = max((layout.largest_bucket for layout in layouts), default=0)
    part = capacity // world_size
    received = part * (world_size - 1) if sizes.exact else (0 if sizes.whole_reduce else part)
    received_bytes, chunk = received * sizes.wire, chunk_for(device_type, part)
    if sizes.quantized_grads is not None:
        received_bytes = max(received_bytes, messages_bytes(part, nodes, sizes.quantized_grads))
        chunk = max(chunk // sizes.quantized_grads.block, 1) * sizes.quantized_grads.block
    depth = 2 if sizes.overlap and world_size > 1 else 1
    return depth * (capacity * sizes.wire + received_bytes) + 2 * chunk * 4


def offload_bytes(
    zero: ZeroConfig, planned: Sequence[GroupPlan], sizes: StateSizes, world_size: int
) -> tuple[int, int]:
    """What an offloaded step takes beside its state, on the device and in the host's memory.

    On the device one buffer more than there are send buffers, each for the largest part's sum. On the host two buffers
    for new parameters that are not fp32, or with a delayed update one for each bucket (masters in files are not sent
    themselves, so there fp32 parameters have buffers, too); and those before files: for sums as many as on the device,
    for steps, and for fetches, each of which begins at a block. ``planned`` are all groups.
    """
    optimizer, param, files = zero.offload_optimizer, zero.offload_param, zero.offload_optimizer.device == "nvme"
    stepped = [(p, b) for p in planned if p.trained for b in p.layout.buckets if p.steps_on_host(b)]
    kept = [b.shard_numel for p in planned if p.partitioned for b in p.layout.buckets if p.keeps_on_host(b)]
    largest = max((bucket.shard_numel for _, bucket in stepped), default=0)
    slots, part_bytes = 3 if sizes.overlap and world_size > 1 else 2, largest * sizes.accumulation
    sent = [b.shard_numel for p, b in stepped if not p.keeps_on_host(b)] if sizes.compute < 4 or files else []
    staged = sum(sent) if optimizer.delayed_update else max(sent, default=0) * min(2, len(sent))
    host, states = staged * sizes.compute, 0  # bytes of an element's states, as they stand before a step
    if files and stepped:
        host += slots * in_blocks(part_bytes)
        states += 12 + sizes.accumulation  # master, two moments, sum
    if param.device == "nvme":
        host += min(param.buffer_count, len(kept)) * in_blocks(max(kept, default=0) * sizes.compute)
        states += sizes.compute if sizes.compute < 4 or not states else 0
    host += min(optimizer.buffer_count // 4, len(stepped)) * in_blocks(largest * states)
    return slots * part_bytes, host


def predicted_traffic(
    layouts: Sequence[FlatLayout], nodes: Nodes, sizes: StateSizes, persistent: Sequence[FlatLayout] = ()
) -> dict[str, Traffic]:
    """One optimizer step's traffic by kind, mean over ranks; true elements and padding apart.

    ``persistent`` are, in stage 3, those of ``layouts`` that stay whole. What is partitioned is in :func:`expected`.
    """
    times, world_size = sizes.reductions, nodes.world_size
    forms: dict[str, Traffic] = {}
    if sizes.quantized_grads is not None:
        exact = {group for group, layout in enumerate(layouts) if layout in persistent}
        goes_exact = lambda group, _: group in exact
        forms |= reduction_traffic(layouts, nodes, sizes.quantized_grads, sizes.wire, goes_exact, times)
    elif sizes.whole_reduce and not sizes.exact:
        forms[ALL_REDUCE] = _one_collective(layouts, nodes, sizes.wire, times, halves=2)
    else:
        forms[REDUCE_SCATTER] = _one_collective(layouts, nodes, sizes.wire, times)
        if sizes.whole_reduce and world_size > 1:
            forms[ALL_GATHER_GRADIENTS] = _one_collective(layouts, nodes, sizes.accumulation)
    if sizes.stage in (1, 2) or persistent:
        forms[ALL_GATHER] = _one_collective(persistent or layouts, nodes, sizes.compute)
    message = 2 * (world_size - 1) * (EXPONENT_BINS + world_size + OWN_WORDS) // world_size
    forms[AGREEMENT] = Traffic(1, message, 0, 8 * message, 8 * message * nodes.share_between)
    return forms


def _one_collective(
    layouts: Sequence[FlatLayout], nodes: Nodes, itemsize: int, times: int = 1, halves: int = 1
) -> Traffic:
    """``times`` reduce-scatters or all-gathers of everything; ``halves=2``: all-reduces."""
    true = sum(layout.numel for layout in layouts)
    padding = sum(layout.padded_numel for layout in layouts) - true
    calls = sum(len(layout.buckets) for layout in layouts)
    share = halves * (nodes.world_size - 1) / nodes.world_size
    sent_bytes = (true + padding) * share * itemsize
    traffic = Traffic()
    traffic.add(Traffic(calls, true * share, padding * share, sent_bytes, sent_bytes * nodes.share_between), times)
    return traffic


# ---- closed forms of quantised reductions (qgZ; ``quantized_reduce.py``) ---------------------------------------------


def reduction_traffic(
    layouts: Sequence[FlatLayout],
    nodes: Nodes,
    form: Format,
    wire: int,
    goes_exact: Callable[[int, int], bool],
    times: int = 1,
) -> dict[str, Traffic]:
    """``times`` reductions of everything, mean over ranks, by kind.

    With R ranks on each of N nodes and parts of p elements, a rank sends (R-1) N parts inside its node, and N-1 to
    other nodes; of true elements of a bucket the (R-1)/R-th and the (N-1)/W-th part, in the mean over ranks.

    ``goes_exact``, of a group's number and a bucket's within it: the bucket is not quantised, and ``wire`` bytes an
    element travel.

    Example:
        >>> from deepzero.layout import plan_layout
        >>> layout = plan_layout([1 << 20], world_size=4, bucket_limit=1 << 20)
        >>> forms = reduction_traffic([layout], Nodes(4, 2), Format(4, 2048), 2, lambda group, index: False)
        >>> {kind: (t.elements / 2**20, t.bytes / 2**20, t.between_node_bytes / 2**20) for kind, t in forms.items()}
        {'gradients.reduce_inside_node': (0.5, 0.2509765625, 0.0),
         'gradients.reduce_between_nodes': (0.25, 0.12548828125, 0.12548828125)}
    """
    forms: dict[str, Traffic] = {}
    world, inside, count = nodes.world_size, nodes.per_node, nodes.count
    for group, layout in enumerate(layouts):
        for bucket in layout.buckets:
            true, padding = bucket.true_numel(), bucket.numel - bucket.true_numel()
            # For each kind: how many parts a rank sends, and how many of these leave the node.
            part_bytes = form.message_bytes(bucket.shard_numel)
            sends = [(INSIDE, (inside - 1) * count, 0), (BETWEEN, count - 1, count - 1)]
            if goes_exact(group, bucket.index):
                part_bytes = wire * bucket.shard_numel
                sends = [(REDUCE_SCATTER, world - 1, world - inside)]
            for kind, parts, leaving in sends:
                sent = (parts * true / world, parts * padding / world, parts * part_bytes, leaving * part_bytes)
                if parts:
                    forms.setdefault(kind, Traffic()).add(Traffic(1, *sent), times)
    return forms


def messages_bytes(shard_numel: int, nodes: Nodes, form: Format) -> int:
    """Room for one bucket's messages, both ways, and for the sum inside a node, where something follows it.

    Example:
        >>> messages_bytes(4096, Nodes(4, 2), Format(4, 2048)) / 4096
        7.0234375
    """
    inside, count = nodes.per_node, nodes.count
    messages = 2 * ((inside - 1) * count + count - 1) * form.message_bytes(shard_numel)
    return messages + (4 * shard_numel if inside > 1 and count > 1 else 0)


def residual_bytes(layouts: Sequence[FlatLayout], nodes: Nodes, wire: int) -> int:
    """Error feedback's bytes on each rank, of the layouts that are quantised: padded elements, ``wire`` bytes each.

    Example:
        >>> from deepzero.layout import plan_layout
        >>> residual_bytes([plan_layout([4096], world_size=4, bucket_limit=4096)], Nodes(4, 2), 2)
        6144
    """
    parts = (nodes.per_node - 1) * nodes.count + nodes.count - 1
    return wire * parts * sum(layout.shard_numel for layout in layouts)


# ---- stage 3: before and after its plan is known ---------------------------------------------------------------------


def expected(buckets: Sequence[PartitionedBucket], micro_batches: int) -> dict[str, Traffic]:
    """One step's traffic without a plan: every bucket forward and backward in every micro-batch."""
    passes = (False, True) * micro_batches
    uses = [ModuleUse((b.key,), backward, "", fetch=(b.key,)) for backward in passes for b in buckets]
    return planned(buckets, tuple(uses))[0] if buckets else {}


def planned(buckets: Sequence[PartitionedBucket], plan: FetchPlan) -> tuple[dict[str, Traffic], int]:
    """What every later step will send by its plan, and the most that buffers for quantised messages will take."""
    forms, fetched = {FORWARD: Traffic(), BACKWARD: Traffic()}, Traffic()
    # hpZ: what has been gathered over all ranks since the last step is kept inside the node.
    seen: set[int] = set()
    flying: set[int] = set()
    # A publication to replicas has at most two buffers for quantised messages under way.
    most_flying = min(2, sum(bucket.strategy.quantizes and bucket.strategy.mics for bucket in buckets))
    for use in plan:
        flying |= {key for key, _ in use.launches}
        most_flying = max(most_flying, sum(buckets[key].strategy.quantizes for key in flying))
        flying -= set(use.keys)
        for key, backward in use.launches:
            bucket, strategy = buckets[key], buckets[key].strategy
            kept = strategy.group is not None and (key in seen or strategy.always_inside)
            seen.add(key)
            forms[BACKWARD if backward else FORWARD].add(strategy.forecast(inside=kept))
            if strategy.source.on_host and not kept:  # this rank's part comes from host memory first
                world, true = strategy.comm.world_size, bucket.in_layout.true_numel()
                part_bytes = bucket.in_layout.shard_numel * strategy.dtype.itemsize
                fetched.add(Traffic(1, true / world, (bucket.in_layout.numel - true) / world, part_bytes))
    traffic = {**forms, **_replicas(buckets), **({FETCH: fetched} if fetched.calls else {})}
    sources = [bucket.strategy.source for bucket in buckets]
    if fetched.calls and any(isinstance(source, HostAllGather) and source.in_file for source in sources):
        traffic[FILE_FETCH] = fetched
    return traffic, most_flying * max((bucket.strategy.scratch_bytes for bucket in buckets), default=0)


def predict(coordinator: PartitionedParameterCoordinator, ledger: Ledger) -> None:
    """Put into the ledger what later steps will send and hold by their plans, which contain all savings."""
    buckets = coordinator.buckets
    forecasts = [planned(buckets, plan) for plan in coordinator.plans()]
    if coordinator.training.plan is not None:
        ledger.predicted_traffic.update(forecasts[0][0])
    itemsize = max((bucket.strategy.dtype.itemsize for bucket in buckets), default=0)
    messages = max(message_bytes for _, message_bytes in forecasts)
    ledger.predicted_memory["gathered"] = coordinator.pool.predicted_numel * itemsize + messages


def secondary_bytes(buckets: Iterable[PartitionedBucket]) -> int:
    """What hpZ or MiCS keep of the buckets on a rank: one H-th of each, as it travels."""
    found = [bucket.strategy for bucket in buckets if isinstance(bucket.strategy, SecondaryAllGather)]
    return sum(strategy.kept_messages * strategy.message_bytes for strategy in found)


def _replicas(buckets: Sequence[PartitionedBucket]) -> dict[str, Traffic]:
    total = Traffic()
    for bucket in buckets:
        if isinstance(bucket.strategy, SecondaryAllGather) and bucket.strategy.mics:
            total.add(bucket.strategy.forecast_to_replicas())
    return {TO_REPLICAS: total} if total.calls else {}


# ---- the ledger of a run: predictions, and the tensors that are measured against them --------------------------------


def build_ledger(
    built: ZeroComponents,
    optimizer: torch.optim.Optimizer,
    config: EngineConfig,
    comm: Communicator,
    micro_batches: int,
) -> None:
    """Put the closed forms in, and name the tensors that are measured against them."""
    ledger, dtypes, offload = comm.ledger, built.dtypes, built.offload
    sizes = StateSizes(
        compute=dtypes.compute.itemsize,
        accumulation=dtypes.accumulation.itemsize,
        moments=0,  # see _states
        wire=dtypes.wire.itemsize,
        stage=config.zero.stage,
        overlap=config.zero.overlap_comm,
        micro_batches=micro_batches,
        whole_reduce=built.bucket_reducer.whole_sums,
        exact=built.bucket_reducer.method == "exact",
        quantized_grads=built.bucket_reducer.strategy.format if built.bucket_reducer.strategy is not None else None,
        invariant=config.comm.world_size_invariant,
    )
    layouts = [group.layout for group in built.groups]
    persistent = [g.layout for g in built.groups if built.stage3 is not None and not g.placement.partitioned]
    memory, padding = _states(built, comm.world_size, sizes)
    traffic = predicted_traffic(layouts, comm.nodes, sizes, persistent)
    memory["buckets"] = bucket_bytes(layouts, comm.world_size, comm.device_type, sizes, comm.nodes)
    if offload is not None:
        traffic |= _copies(built, comm.world_size, sizes) | _file_traffic(built, comm.world_size, sizes)
        placements = [group.placement for group in built.all_groups]
        on_device, memory[STAGING] = offload_bytes(config.zero, placements, sizes, comm.world_size)
        memory["buckets"] += on_device
        memory = {offload.ledger_name(category): size for category, size in memory.items()}
    if built.stage3 is not None:
        coordinator = built.stage3.coordinator
        coordinator.on_plan = partial(predict, coordinator, ledger)
        traffic |= expected(coordinator.buckets, micro_batches)
        memory[SECONDARY] = secondary_bytes(coordinator.buckets)
    if built.bucket_reducer.strategy is not None and config.zero.quantization.error_feedback:
        quantized = [layout for layout in layouts if layout not in persistent]
        memory["buckets"] += residual_bytes(quantized, comm.nodes, sizes.wire)
    ledger.predict({**memory, "padding": padding}, traffic)
    _watch(built, optimizer, ledger)


def predict_unquantized(built: ZeroComponents, comm: Communicator, micro_batches: int) -> None:
    """Predict later steps anew: a bucket goes unquantised from now on, so every later step sends more."""
    ledger, quantized_grads = comm.ledger, built.bucket_reducer.strategy
    if built.stage3 is not None:
        coordinator = built.stage3.coordinator
        with ledger.outside_step():  # secondary partitions that have changed their form are empty
            send_to_replicas(coordinator.buckets)
        ledger.predicted_traffic |= expected(coordinator.buckets, micro_batches)
        coordinator.predict_anew()
        ledger.predicted_memory[SECONDARY] = secondary_bytes(coordinator.buckets)
    if quantized_grads is not None:
        for kind in (INSIDE, BETWEEN):
            ledger.predicted_traffic.pop(kind, None)
        ledger.predicted_traffic |= reduction_traffic(
            [group.layout for group in built.groups], comm.nodes, quantized_grads.format, built.dtypes.wire.itemsize,
            lambda group, bucket: not quantized_grads.takes((group, bucket)),
            micro_batches if built.stage.gradients.every_pass else 1,
        )  # fmt: skip


def _rest(bucket: Bucket) -> int:
    return bucket.numel - bucket.true_numel()


def _states(built: ZeroComponents, world: int, sizes: StateSizes) -> tuple[dict[str, int], int]:
    """Bytes of model states by category, and the bytes of padding in all of them."""
    offload = built.offload
    copies = offload.sums.copies if offload is not None and offload.sums is not None else 1
    true, rest = (Elements.of(built.all_groups, count) for count in (Bucket.true_numel, _rest))
    memory, padding = (predicted_memory(elements, world, sizes, copies) for elements in (true, rest))
    # Moments are counted by optimizer group, of which each may keep other ones.
    kept, rooms = Counter[str](), 0
    for group in built.groups:
        states = built.moments[group.optimizer_group]
        for bucket in group.layout.buckets:
            side = MOMENTS if group.placement.steps_on_host(bucket) else "moments"
            kept[side] += sum(states.of(group.params[slot.index].shape) for slot in bucket.slots)
            rooms += states.per_element * _rest(bucket) * (side == MOMENTS)
    share = 1 if sizes.stage == 0 else world
    memory |= {side: kept[side] // share for side in ("moments", MOMENTS) if side in memory}
    padding[MOMENTS] = rooms // world
    # Flat buffers have padding, tensors of autograd and of the optimizer have none; rooms for moments have.
    padding["moments"] = 0
    if offload is not None and not any(region.numel for region in offload.state_regions):
        padding[MOMENTS] = 0  # the optimizer makes its own, without padding
    if sizes.unreduced == sizes.compute:
        padding["gradients"] -= rest.trained * sizes.unreduced
    return memory, sum(padding.values())


def _copies(built: ZeroComponents, world: int, sizes: StateSizes) -> dict[str, Traffic]:
    """One step's copies between device and host, mean over ranks: gradients down, new parameters up.

    Before each micro-batch but the first the sums go up, to be added to. Parameters that live in host memory travel
    when they are fetched, which is in stage 3's plan.
    """
    true, rest = (Elements.of(built.all_groups, count) for count in (Bucket.true_numel, _rest))
    stepped = [(g.placement, b) for g in built.groups for b in g.layout.buckets if g.placement.steps_on_host(b)]
    sent = [bucket for placement, bucket in stepped if not placement.keeps_on_host(bucket)]

    def traffic(calls: int, true: int, rest: int, itemsize: int) -> Traffic:
        return Traffic(calls, true / world, rest / world, (true / world + rest / world) * itemsize)

    forms = {kind: Traffic() for kind in (TO_HOST, SUMS_TO_DEVICE, TO_DEVICE)}
    sums = traffic(len(stepped), true.host_optimizer, rest.host_optimizer, sizes.accumulation)
    forms[TO_HOST].add(sums, sizes.reductions)
    forms[SUMS_TO_DEVICE].add(sums, sizes.reductions - 1)
    forms[TO_DEVICE].add(traffic(len(sent), true.sent, rest.sent, sizes.compute))
    return {kind: form for kind, form in forms.items() if form.calls}


def _file_traffic(built: ZeroComponents, world: int, sizes: StateSizes) -> dict[str, Traffic]:
    """One step's reads and writes of files, mean over ranks: gradients as they come, each state once in the step."""
    offload, forms = built.offload, {FILE_READ: Traffic(), FILE_WRITE: Traffic()}
    in_file = lambda category: offload is not None and offload.ledger_name(category) != category
    states, params = in_file(MOMENTS), in_file(HOST_PARAMETERS)
    for placement, bucket in ((g.placement, b) for g in built.groups for b in g.layout.buckets):
        if not placement.steps_on_host(bucket):
            continue
        own, kept = placement.own_masters_at(bucket), placement.keeps_on_host(bucket)
        # Elements that come and go for each of the bucket's, and their bytes.
        both = [4] * (params if own else states) + [4] * (2 * states)
        reads, writes = both + [sizes.accumulation] * states, both + [sizes.compute] * (params and kept and not own)
        sums, true = [sizes.accumulation] * states, bucket.true_numel() / world
        for kind, moved, times in (
            (FILE_READ, reads, 1), (FILE_READ, sums, sizes.reductions - 1),
            (FILE_WRITE, writes, 1), (FILE_WRITE, sums, sizes.reductions),
        ):  # fmt: skip
            rest, nbytes = bucket.shard_numel - true, sum(moved) * bucket.shard_numel
            if moved:
                forms[kind].add(Traffic(1, len(moved) * true, len(moved) * rest, nbytes), times)
    return {kind: form for kind, form in forms.items() if form.calls}


def _watch(built: ZeroComponents, optimizer: torch.optim.Optimizer, ledger: Ledger) -> None:
    """Which tensors are measured, and how much of each is padding: what is more than this rank's fragments."""
    offload, stage3 = built.offload, built.stage3

    def states_of(masters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        # Counters of steps, 4 bytes for each tensor, are no moments, and lie on the host.
        states = (optimizer.state.get(master, {}) for master in masters)
        return [t for state in states for t in state.values() if torch.is_tensor(t) and t.dim()]

    def stepped_on_host() -> list[torch.Tensor]:
        return states_of(m for upload in offload.uploads for m in upload.masters) if offload is not None else []

    def host_moments() -> list[torch.Tensor]:
        if offload is None:
            return []
        # The arena's rooms, whether this rank has a fragment in them or padding alone; and what was made elsewhere.
        return [*offload.tensors(MOMENTS), *(t for t in stepped_on_host() if not offload.holds(t))]

    def moments() -> list[torch.Tensor]:
        there = {storage_ptr_of(t) for t in host_moments()}
        return [t for t in states_of(optimizer.state) if storage_ptr_of(t) not in there]

    def buckets() -> list[torch.Tensor]:
        on_wire = offload.buffers_on_device() if offload is not None else ()
        return [*built.bucket_reducer.buffers(), *on_wire, *built.bucket_reducer.residuals()]

    padding = _padding(built)
    parameters = lambda: [t for group in built.all_groups for t in group.parameter_storage]
    ledger.watch("parameters", parameters, padding["parameters"])
    ledger.watch("masters", lambda: [group.masters_on_device for group in built.groups], padding["masters"])
    ledger.watch("gradients", built.stage.gradients.held_gradients, padding["gradients"])
    ledger.watch("moments", moments, padding["moments"])
    ledger.watch("buckets", buckets)
    if stage3 is not None:
        pools, gathered_buckets = stage3.coordinator.pools, stage3.coordinator.buckets
        gathered = lambda: [buffer for pool in pools for buffer in pool.buffers(free=False)]
        ledger.watch("gathered", gathered, most=lambda: sum(pool.most_bytes() for pool in pools))
        # Kept for the next gather, on a CPU; a GPU's allocator keeps it.
        ledger.watch(SPARE, lambda: [buffer for pool in pools for buffer in pool.buffers(taken=False)])
        if secondary_shards(gathered_buckets):
            ledger.watch(SECONDARY, lambda: secondary_shards(gathered_buckets))
    if offload is not None:
        inside = sum(t.nbytes for t in stepped_on_host() if offload.holds(t))
        padding[MOMENTS] = sum(t.nbytes for t in offload.tensors(MOMENTS)) - inside
        for category in HOST_CATEGORIES:
            held = host_moments if category == MOMENTS else partial(offload.tensors, category)
            ledger.watch(offload.ledger_name(category), held, padding[category])


def _padding(built: ZeroComponents) -> Counter[str]:
    """Bytes of this rank's flat tensors that are in none of its fragments, by category; measured, not predicted."""
    found: Counter[str] = Counter()

    def count(category: str, tensor: torch.Tensor | None, numel: int) -> None:
        if tensor is not None:
            found[category] += tensor.nbytes - numel * tensor.itemsize

    for group in built.all_groups:
        fragments, placement = group.fragments, group.placement
        if isinstance(group, PartitionedParamGroup):
            on_host = sum(f.numel for f in fragments if f.shard_start < placement.host_parameter_numel)
            count("parameters", group.shard_on_device, sum(f.numel for f in fragments) - on_host)
            count(HOST_PARAMETERS, group.shard_on_host, on_host)
        else:
            count("parameters", group.parameter_storage[0], group.layout.numel)
        for category, span, tensor in (
            ("masters", placement.device_master_span, group.masters_on_device),
            (HOST_MASTERS, placement.host_master_span, group.masters_on_host),
        ):
            count(category, tensor, sum(f.numel for f in fragments if f.shard_start in span))
    offload, on_host = built.offload, 0
    gradients = built.stage.gradients
    for group, flat, mine in zip(built.groups, gradients.unreduced.flat, gradients.shard.grad_S, strict=True):
        count("gradients", flat, group.layout.numel)
        kept = sum(f.numel for f in group.fragments if f.shard_start >= group.placement.host_optimizer_numel)
        count("gradients", mine, group.layout.numel if built.bucket_reducer.whole_sums else kept)
        on_host += sum(f.numel for f in group.fragments) - kept
    if offload is not None and offload.sums is not None:
        held = sum(t.nbytes for t in offload.tensors(GRADIENTS))
        found[GRADIENTS] = held - offload.sums.copies * built.dtypes.accumulation.itemsize * on_host
    return found
