"""The account of a run: the closed forms put into the ledger, and which tensors are measured against them."""

from __future__ import annotations

from collections import Counter
from functools import partial

import torch

from deepzero.comm.collectives import Communicator
from deepzero.comm.ledger import HOST_CATEGORIES, SECONDARY, Ledger, Traffic
from deepzero.comm.quantized_reduce import BETWEEN, INSIDE
from deepzero.comm.streams import storage_ptr_of
from deepzero.config.engine import EngineConfig
from deepzero.layout import FlatLayout
from deepzero.offload.offload_plan import MOMENTS
from deepzero.offload.optimizer_offload import GRADIENTS, STAGING
from deepzero.runtime.closed_forms import (
    Counts,
    HostElements,
    StateSizes,
    bucket_bytes,
    offloaded_memory,
    padding_memory,
    predicted_memory,
    predicted_traffic,
    predicted_wire,
    wire_bytes,
)
from deepzero.runtime.forecast import expected, predict, secondary_bytes
from deepzero.runtime.quantized_forms import reduction_traffic, residual_bytes
from deepzero.runtime.zero.optimizer_shard import HOST_MASTERS
from deepzero.runtime.zero.parameter_all_gather import send_to_replicas
from deepzero.runtime.zero.stage3 import HOST_PARAMETERS, PartitionedParamGroup
from deepzero.runtime.zero_components import ZeroComponents


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
