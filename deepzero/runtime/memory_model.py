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

u is what unreduced gradients take: c; or a when several micro-batches are summed in a wider dtype; or nothing in stage
1 with ``overlap_comm`` and a single micro-batch, whose gradients leave as they come. Stage 1 by all-reduce holds ``aΨ``
in place of ``aΨ/W``. With 2-byte gradients (``grad_accum_dtype`` = compute dtype) and x + m = K, stage 2 is the paper's
``2Ψ + (2+K)Ψ/W``; stage 1 is its ``4Ψ + KΨ/W`` and the reduced share, ``aΨ/W``, beside it; stage 3 is its
``(4+K)Ψ/W``, and what is gathered at the moment. Stage 3's persistent parameters take c bytes on every rank, its frozen
ones a W-th of that.

Sent by one rank per optimizer step, in elements, mean over ranks: one reduce-scatter or all-gather of all parameters is
``Ψ(W-1)/W``. Stages 0, 1 and 2 send two of them; stage 1 by all-reduce three; stage 2 reduces every micro-batch; stage
3 gathers twice and reduces once in every micro-batch, less what its plan saves (``fetch_plan.py``). The plan is what
the coordinator executes, so what is read off it, once the first step has shown the order of modules, is no estimate.
Besides, ranks exchange one message of 2 KiB per step (``consistency.py``).

Sources: "Partitioning" and "Communication volume analysis" of the stage-2 notes; ZeRO paper, sections 3, 5 and 7.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial

import torch

from deepzero.comm.collectives import Communicator
from deepzero.comm.ledger import HOST_CATEGORIES, SECONDARY, Ledger, Traffic
from deepzero.comm.quantization import Format
from deepzero.comm.quantized_reduce import BETWEEN, INSIDE
from deepzero.comm.reduce_scatter import ALL_GATHER_GRADIENTS, ALL_REDUCE, REDUCE_SCATTER, chunk_for
from deepzero.comm.streams import storage_ptr_of
from deepzero.comm.topology import Nodes
from deepzero.config.engine import EngineConfig
from deepzero.layout import Bucket, FlatLayout, OffloadPlan
from deepzero.offload.copy_streams import FETCH, TO_DEVICE, TO_HOST
from deepzero.offload.offload_plan import MOMENTS
from deepzero.offload.optimizer_offload import GRADIENTS, STAGING
from deepzero.runtime.consistency import AGREEMENT, OWN_WORDS
from deepzero.runtime.grad_norm import WORDS
from deepzero.runtime.zero.fetch_plan import FetchPlan
from deepzero.runtime.zero.optimizer_shard import HOST_MASTERS
from deepzero.runtime.zero.parameter_all_gather import (
    BACKWARD,
    FORWARD,
    TO_REPLICAS,
    PlainAllGather,
    SecondaryAllGather,
    send_to_replicas,
)
from deepzero.runtime.zero.partitioned_bucket import PartitionedBucket
from deepzero.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepzero.runtime.zero.stage3 import HOST_PARAMETERS, PartitionedParamGroup
from deepzero.runtime.zero.stage_1_and_2 import ALL_GATHER
from deepzero.runtime.zero_components import ZeroComponents

# ---- closed forms: integers in, bytes and traffic out ----------------------------------------------------------------


@dataclass(frozen=True)
class StateSizes:
    """Bytes per element, and how the run is cut."""

    compute: int
    accumulation: int
    moments: int
    wire: int
    stage: int
    overlap: bool
    micro_batches: int
    whole_reduce: bool
    """Gradients are all-reduced: stage 0, or stage 1 with ``reduce_scatter=False``."""
    exact: bool
    quantized_grads: Format | None = None
    """qgZ's messages; None: gradients travel in the wire dtype."""

    @property
    def unreduced(self) -> int:
        """The u of the module's text: bytes per element of whole gradients before they are reduced."""
        if self.stage >= 2 or (self.stage == 1 and self.overlap and self.micro_batches == 1):
            return 0
        return self.compute if self.micro_batches == 1 else max(self.compute, self.accumulation)


@dataclass(frozen=True)
class Elements:
    """Elements of all groups; those of persistent and frozen parameters are stage 3's."""

    trained: int
    persistent: int = 0
    """Of the trained ones: whole on every rank."""
    frozen: int = 0
    """Partitioned, not trained."""


@dataclass(frozen=True)
class Counts:
    """Elements that belong to parameters, and elements of padding."""

    true: Elements
    padding: Elements

    @classmethod
    def of(
        cls, layouts: Sequence[FlatLayout], persistent: Sequence[FlatLayout], frozen: Sequence[FlatLayout]
    ) -> Counts:
        """Count.

        Args:
            layouts: of all trained groups, persistent ones among them.
            persistent: of those alone.
            frozen: of frozen groups.
        """
        true = [sum(layout.numel for layout in some) for some in (layouts, persistent, frozen)]
        padded = [sum(layout.padded_numel for layout in some) for some in (layouts, persistent, frozen)]
        return cls(Elements(*true), Elements(*(p - t for p, t in zip(padded, true, strict=True))))


def predicted_memory(elements: Elements, world_size: int, sizes: StateSizes) -> dict[str, int]:
    """Bytes of one rank by category; the table above.

    Called with the *padding* elements it gives what padding takes in each category.
    """
    numel = elements.trained
    whole = elements.persistent if sizes.stage == 3 else numel
    parted = numel - whole + elements.frozen
    share = 1 if sizes.stage == 0 else world_size
    reduced = numel * sizes.accumulation // (1 if sizes.whole_reduce else world_size)
    master = 0 if sizes.compute == 4 else 4
    return {
        "parameters": whole * sizes.compute + parted * sizes.compute // world_size,
        "gradients": numel * sizes.unreduced + reduced,
        "masters": numel * master // share,
        "moments": numel * sizes.moments // share,
    }


@dataclass(frozen=True)
class HostElements:
    """Elements on each side, over all ranks: of all groups, true or padding."""

    host_optimizer: int
    device_optimizer: int
    host_masters: int
    device_masters: int
    host_parameters: int
    device_parameters: int
    """Of partitioned groups alone."""
    sent: int
    """The CPU steps on them, and their parameters are on the device."""

    @classmethod
    def of(cls, placements: Sequence[tuple[OffloadPlan, bool, bool]], count: Callable[[Bucket], int]) -> HostElements:
        """Count.

        Args:
            placements: of every group, whether it is trained, and whether its parameters are partitioned.
            count: elements of a bucket, the true ones or the others.
        """
        sums = dict.fromkeys((f.name for f in fields(cls)), 0)
        for placed, trained, partitioned in placements:
            for bucket in placed.layout.buckets:
                numel = count(bucket)
                side = "host" if placed.steps_on_host(bucket) else "device"
                sums[f"{side}_optimizer"] += numel if trained else 0
                sums[f"{side}_masters"] += numel if trained and not placed.own_masters_at(bucket) else 0
                kept = "host" if placed.keeps_on_host(bucket) else "device"
                sums[f"{kept}_parameters"] += numel if partitioned else 0
                sums["sent"] += numel if (side, kept) == ("host", "device") else 0
        return cls(**sums)


def offloaded_memory(
    whole: int, trained: int, elements: HostElements, world_size: int, sizes: StateSizes, copies: int
) -> dict[str, int]:
    """Bytes of one rank by category where a part is in host memory; for the device :func:`predicted_memory`'s forms.

    Args:
        whole: elements of parameters that every rank keeps whole.
        trained: elements of all trained parameters.
        elements: on each side.
        world_size: W.
        sizes: bytes per element.
        copies: of the reduced gradients on the host.
    """
    forms = {
        "parameters": whole * sizes.compute * world_size + elements.device_parameters * sizes.compute,
        "gradients": trained * sizes.unreduced * world_size + elements.device_optimizer * sizes.accumulation,
        "masters": 4 * elements.device_masters,
        "moments": sizes.moments * elements.device_optimizer,
        "host_parameters": sizes.compute * elements.host_parameters,
        "host_gradients": copies * sizes.accumulation * elements.host_optimizer,
        "host_masters": 4 * elements.host_masters,
        "host_moments": sizes.moments * elements.host_optimizer,
    }
    return {category: total // world_size for category, total in forms.items()}


def predicted_wire(
    elements: HostElements, padding: HostElements, world_size: int, sizes: StateSizes, calls: tuple[int, int]
) -> dict[str, Traffic]:
    """One step's copies between device and host, mean over ranks: gradients down, new parameters up.

    The first micro-batch's gradients travel in the accumulation dtype; later ones, which are added on the host, in
    fp32. Parameters that live in host memory travel when they are fetched, which stage 3's plan knows.

    Args:
        elements: true ones.
        padding: the others.
        world_size: W.
        sizes: bytes per element.
        calls: buckets that the CPU steps on, and how many of them have their parameters on the device.
    """
    down, up = Traffic(), Traffic()
    true, rest = elements.host_optimizer / world_size, padding.host_optimizer / world_size
    times = sizes.micro_batches if sizes.stage >= 2 else 1
    for number in range(times):
        itemsize = sizes.accumulation if number == 0 else 4
        down.add(Traffic(calls[0], true, rest, (true + rest) * itemsize))
    true, rest = elements.sent / world_size, padding.sent / world_size
    up.add(Traffic(calls[1], true, rest, (true + rest) * sizes.compute))
    return {kind: traffic for kind, traffic in ((TO_HOST, down), (TO_DEVICE, up)) if traffic.calls}


def padding_memory(counts: Counts, world_size: int, sizes: StateSizes) -> dict[str, int]:
    """Bytes that the layout's padding elements take in each category: flat buffers have them, tensors of autograd
    (``param.grad``) and of the optimizer (moments) have none.
    """
    forms = {**predicted_memory(counts.padding, world_size, sizes), "moments": 0}
    if sizes.unreduced == sizes.compute:
        forms["gradients"] -= counts.padding.trained * sizes.unreduced
    return forms


def bucket_bytes(
    layouts: Sequence[FlatLayout], world_size: int, device: torch.device, sizes: StateSizes, nodes: Nodes
) -> int:
    """What gradients on their way take on the device: D buckets of B elements and what they receive, and scratch.

    Exact sums receive the other ranks' parts, the backend's own reduce-scatter one part; qgZ's messages have room in
    the same place.
    """
    capacity = max(layout.largest_bucket for layout in layouts)
    part = capacity // world_size
    received = part * (world_size - 1) if sizes.exact else (0 if sizes.whole_reduce else part)
    mail, chunk = received * sizes.wire, chunk_for(device, part)
    if sizes.quantized_grads is not None:
        mail = max(mail, mail_bytes(part, nodes, sizes.quantized_grads))
        chunk = max(chunk // sizes.quantized_grads.block, 1) * sizes.quantized_grads.block
    depth = 2 if sizes.overlap and world_size > 1 else 1
    return depth * (capacity * sizes.wire + mail) + 2 * chunk * 4


def wire_bytes(placements: Sequence[OffloadPlan], sizes: StateSizes, world_size: int, delayed: bool) -> tuple[int, int]:
    """What an offloaded step takes beside its state, on the device and on the host.

    A slot for each bucket and one more on both sides, of the largest part in fp32; and on the host two buffers for new
    parameters that are not fp32, or with a delayed update one for each bucket.
    """
    parts = [(p, i) for p in placements for i in p.layout.buckets if p.steps_on_host(i)]
    if not parts:
        return 0, 0
    slots = 3 if sizes.overlap and world_size > 1 else 2
    staging = slots * max(bucket.shard_numel for _, bucket in parts) * 4
    sent = [i.shard_numel for p, i in parts if not p.keeps_on_host(i)] if sizes.compute < 4 else []
    staged = sum(sent) if delayed else max(sent, default=0) * min(2, len(sent))
    return staging, staging + staged * sizes.compute


def predicted_traffic(
    layouts: Sequence[FlatLayout],
    nodes: Nodes,
    sizes: StateSizes,
    persistent: Sequence[FlatLayout] = (),
) -> dict[str, Traffic]:
    """One optimizer step's traffic by kind, mean over ranks; true elements and padding apart.

    Args:
        layouts: of all trained groups.
        nodes: the ranks, and which of them share one.
        sizes: bytes per element, and how the run is cut.
        persistent: stage 3: of those of ``layouts`` that stay whole.
    """
    times, world_size = sizes.micro_batches if sizes.stage >= 2 else 1, nodes.world_size
    forms: dict[str, Traffic] = {}
    if sizes.quantized_grads is not None:
        exact = {group for group, layout in enumerate(layouts) if layout in persistent}
        goes_exact = lambda group, _: group in exact
        forms |= reduction_traffic(layouts, nodes, sizes.quantized_grads, sizes.wire, goes_exact, times)
    elif sizes.whole_reduce and not sizes.exact:
        forms[ALL_REDUCE] = one_collective(layouts, nodes, sizes.wire, times, halves=2)
    else:
        forms[REDUCE_SCATTER] = one_collective(layouts, nodes, sizes.wire, times)
        if sizes.whole_reduce and world_size > 1:
            forms[ALL_GATHER_GRADIENTS] = one_collective(layouts, nodes, sizes.accumulation)
    if sizes.stage in (1, 2):
        forms[ALL_GATHER] = one_collective(layouts, nodes, sizes.compute)
    if sizes.stage == 3 and persistent:
        # What is partitioned travels as its buckets say: ``expected``, below.
        forms[ALL_GATHER] = one_collective(persistent, nodes, sizes.compute)
    message = 2 * (world_size - 1) * (WORDS + world_size + OWN_WORDS) // world_size
    forms[AGREEMENT] = Traffic(1, message, 0, 8 * message, 8 * message * nodes.share_between)
    return forms


def one_collective(
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

    Args:
        layouts: of all groups.
        nodes: W, R and N; more than one rank.
        form: of the messages.
        wire: bytes per element of what goes the exact way.
        goes_exact: of a group's number and a bucket's within it.
        times: how often a step reduces.

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
            # For each kind: how many parts a rank sends, their bytes, and how many of these leave the node.
            if goes_exact(group, bucket.index):
                part_bytes = wire * bucket.shard_numel
                sends = [(REDUCE_SCATTER, world - 1, part_bytes, (world - inside) * part_bytes)]
            else:
                part_bytes = form.message_bytes(bucket.shard_numel)
                sends = [
                    (INSIDE, (inside - 1) * count, part_bytes, 0),
                    (BETWEEN, count - 1, part_bytes, (count - 1) * part_bytes),
                ]
            for kind, parts, nbytes, between in sends:
                if parts:
                    sent = Traffic(1, parts * true / world, parts * padding / world, parts * nbytes, between)
                    forms.setdefault(kind, Traffic()).add(sent, times)
    return forms


def mail_bytes(shard_numel: int, nodes: Nodes, form: Format) -> int:
    """Room for one bucket's messages, both ways, and for the sum inside a node, where something follows it.

    Example:
        >>> mail_bytes(4096, Nodes(4, 2), Format(4, 2048)) / 4096
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


def planned(buckets: Sequence[PartitionedBucket], plan: FetchPlan) -> Forecast:
    """What every later step will send and hold, by its plan."""
    forms, fetched = {FORWARD: Traffic(), BACKWARD: Traffic()}, Traffic()
    # hpZ: what has been gathered over all ranks since the last step is kept inside the node.
    seen: set[int] = set()
    flying: set[int] = set()
    most_flying = _publishing(buckets)
    for use in plan.uses:
        flying |= {key for key, _ in use.launches}
        most_flying = max(most_flying, sum(buckets[key].gather.quantizes for key in flying))
        flying -= set(use.keys)
        for key, backward in use.launches:
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
    forecasts = [planned(coordinator.buckets, plan) for plan in coordinator.plans()]
    if coordinator.training.plan is not None:
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


# ---- the ledger of a run: predictions, and the tensors that are measured against them --------------------------------


def build_ledger(
    built: ZeroComponents,
    optimizer: torch.optim.Optimizer,
    config: EngineConfig,
    comm: Communicator,
    micro_batches: int,
) -> None:
    """Put the closed forms in, and say which tensors are measured against them."""
    ledger, dtypes, world = comm.ledger, built.dtypes, comm.world_size
    sizes = StateSizes(
        compute=dtypes.compute.itemsize,
        accumulation=dtypes.accumulation.itemsize,
        moments=built.moment_bytes,
        wire=dtypes.wire.itemsize,
        stage=config.zero.stage,
        overlap=config.zero.overlap_comm,
        micro_batches=micro_batches,
        whole_reduce=built.reducer.whole,
        exact=built.reducer.method == "exact",
        quantized_grads=built.quantized_grads.format if built.quantized_grads is not None else None,
    )
    layouts = [group.layout for group in built.groups]
    persistent, frozen = _layouts_of_stage3(built)
    counts = Counts.of(layouts, persistent, frozen)
    memory = predicted_memory(counts.true, world, sizes)
    padding = padding_memory(counts, world, sizes)
    traffic = predicted_traffic(layouts, comm.nodes, sizes, persistent)
    if built.offload is not None:
        memory, padding = _with_host(built, counts, world, sizes)
        traffic |= _wire(built, world, sizes)

    if built.partitioning is not None:
        coordinator = built.partitioning.coordinator
        coordinator.on_plan = partial(predict, coordinator, ledger)
        buckets = coordinator.buckets
        traffic |= expected(buckets, micro_batches) if buckets else {}
        memory[SECONDARY] = sum(secondary_bytes(bucket.gather) for bucket in buckets)
    memory["buckets"] = bucket_bytes(layouts, world, comm.device, sizes, comm.nodes)
    if built.offload is not None:
        delayed = config.zero.offload_optimizer.delayed_update
        placements = [group.placement for group in built.groups]
        on_device, memory[STAGING] = wire_bytes(placements, sizes, world, delayed)
        memory["buckets"] += on_device
    if built.quantized_grads is not None and config.zero.quantization.error_feedback:
        memory["buckets"] += residual_bytes([x for x in layouts if x not in persistent], comm.nodes, sizes.wire)
    ledger.predict({**memory, "padding": sum(padding.values())}, traffic)
    _watch(built, optimizer, ledger)


def predict_unquantized(built: ZeroComponents, comm: Communicator, micro_batches: int, stage: int) -> None:
    """Predict later steps anew: a bucket goes unquantised from now on, so every later step sends more."""
    ledger, quantized_grads = comm.ledger, built.quantized_grads
    if built.partitioning is not None:
        buckets = built.partitioning.coordinator.buckets
        with ledger.aside():  # secondary partitions that have changed their form are empty
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


def _bucket_buffers(built: ZeroComponents) -> list[torch.Tensor]:
    """What is kept for gradients on their way, and means nothing in between."""
    return [*built.reducer.buffers(), *(built.offload.buffers_on_device() if built.offload is not None else ())]


def _watch(built: ZeroComponents, optimizer: torch.optim.Optimizer, ledger: Ledger) -> None:
    """Which tensors are measured, and how much of each is padding: what is more than this rank's pieces."""

    def stepped_on_host() -> list[torch.Tensor]:
        uploads = built.offload.uploads if built.offload is not None else []
        masters = [master for upload in uploads for master in upload.masters]
        states = (optimizer.state.get(master, {}) for master in masters)
        return [t for state in states for t in state.values() if torch.is_tensor(t) and t.dim()]

    def host_moments() -> list[torch.Tensor]:
        if built.offload is None:
            return []
        made = stepped_on_host()
        # The arena's rooms, whether this rank has a piece in them or padding alone; and what was made elsewhere.
        return [*built.offload.arena.tensors(MOMENTS), *(t for t in made if not built.offload.arena.holds(t))]

    def moments() -> list[torch.Tensor]:
        # Counters of steps, 4 bytes for each tensor, are no moments, and lie on the host.
        kept = [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t) and t.dim()]
        there = {storage_ptr_of(t) for t in host_moments()}
        return [t for t in kept if storage_ptr_of(t) not in there]

    padding = _padding(built)

    ledger.watch("parameters", lambda: [t for g in built.stores for t in g.parameter_storage], padding["parameters"])
    ledger.watch("masters", lambda: [group.master_shard.on_device for group in built.groups], padding["masters"])
    ledger.watch("gradients", built.stage.gradients.held_gradients, padding["gradients"])
    ledger.watch("moments", moments, padding["moments"])
    ledger.watch("buckets", lambda: [*_bucket_buffers(built), *built.reducer.kept()])
    if built.partitioning is not None:
        ledger.watch("gathered", built.partitioning.gather_buffers, most=built.partitioning.most_gathered)
        if built.partitioning.secondaries():
            ledger.watch(SECONDARY, built.partitioning.secondaries)
    if built.offload is not None:
        for category in HOST_CATEGORIES:
            held = host_moments if category == MOMENTS else partial(built.offload.arena.tensors, category)
            if category == MOMENTS:
                inside = sum(t.nbytes for t in stepped_on_host() if built.offload.arena.holds(t))
                padding[MOMENTS] = sum(t.nbytes for t in built.offload.arena.tensors(MOMENTS)) - inside
            ledger.watch(category, held, padding.get(category, 0))


def _with_host(
    built: ZeroComponents, counts: Counts, world: int, sizes: StateSizes
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes by category, and what of each is padding, where a part is in host memory."""
    offload = built.offload
    copies = offload.sums.copies if offload is not None and offload.sums is not None else 1
    whole = counts.true.persistent if sizes.stage == 3 else counts.true.trained
    whole_padding = counts.padding.persistent if sizes.stage == 3 else counts.padding.trained
    true, rest = _elements(built)
    memory = offloaded_memory(whole, counts.true.trained, true, world, sizes, copies)
    padding = offloaded_memory(whole_padding, counts.padding.trained, rest, world, sizes, copies)
    # Flat buffers have padding, tensors of autograd and of the optimizer have none; rooms for moments have.
    padding["moments"] = 0
    if offload is not None and not any(room.numel for room in offload.rooms):
        padding[MOMENTS] = 0  # the optimizer makes its own, without padding
    if sizes.unreduced == sizes.compute:
        padding["gradients"] -= counts.padding.trained * sizes.unreduced
    return memory, padding


def _padding(built: ZeroComponents) -> dict[str, int]:
    """Bytes of this rank's flat tensors that are in none of its pieces, by category; measured, not predicted."""
    found: Counter[str] = Counter()

    def count(category: str, tensor: torch.Tensor | None, numel: int) -> None:
        if tensor is not None:
            found[category] += tensor.nbytes - numel * tensor.itemsize

    for group in built.stores:
        fragments, placement, store = group.fragments, group.placement, group.master_shard
        if isinstance(group, PartitionedParamGroup):
            on_host = sum(p.numel for p in fragments if p.shard_start < placement.parameter_numel)
            count("parameters", group.shard_on_device, sum(p.numel for p in fragments) - on_host)
            count(HOST_PARAMETERS, group.shard_on_host, on_host)
        else:
            count("parameters", group.parameter_storage[0], group.layout.numel)
        for category, span, tensor in (
            ("masters", placement.device_masters, store.on_device),
            (HOST_MASTERS, placement.host_masters, store.on_host),
        ):
            count(category, tensor, sum(p.numel for p in fragments if span.holds(p.shard_start)))
    sums, whole = built.optimizer_shard.grad_S, built.reducer.whole
    for group, flat, mine in zip(built.groups, built.source.flat, sums, strict=True):
        count("gradients", flat, group.layout.numel)
        there = group.placement.optimizer_numel
        kept = sum(p.numel for p in group.fragments if p.shard_start >= there)
        count("gradients", mine, group.layout.numel if whole else kept)
    if built.offload is not None and built.offload.sums is not None:
        of_host = [p for g in built.groups for p in g.fragments if p.shard_start < g.placement.optimizer_numel]
        size = built.dtypes.accumulation.itemsize
        held = sum(t.nbytes for t in built.offload.arena.tensors(GRADIENTS))
        found[GRADIENTS] = held - built.offload.sums.copies * size * sum(p.numel for p in of_host)
    return found


def _elements(built: ZeroComponents) -> tuple[HostElements, HostElements]:
    stores = built.stores
    placed = [(group.placement, group.optimizer_group is not None, group.partitioned) for group in stores]
    true = HostElements.of(placed, lambda bucket: bucket.true_numel())
    return true, HostElements.of(placed, lambda bucket: bucket.numel - bucket.true_numel())


def _wire(built: ZeroComponents, world: int, sizes: StateSizes) -> dict[str, Traffic]:
    true, rest = _elements(built)
    inside = [(g.placement, i) for g in built.groups for i in g.layout.buckets if g.placement.steps_on_host(i)]
    sent = [bucket for placement, bucket in inside if not placement.keeps_on_host(bucket)]
    return predicted_wire(true, rest, world, sizes, (len(inside), len(sent)))


def _layouts_of_stage3(built: ZeroComponents) -> tuple[list[FlatLayout], list[FlatLayout]]:
    """Layouts of persistent and of frozen parameters."""
    if built.partitioning is None:
        return [], []
    frozen = [group.layout for group in built.partitioning.frozen]
    return [group.layout for group in built.groups if not group.partitioned], frozen
