"""The closed forms of ZeRO: what a run will hold and send, said before it starts.

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
3 gathers twice and reduces once in every micro-batch, less what its plan saves (``fetch_plan.py``), which is known, and
put in here, when the first step has shown the order of modules.
Besides, ranks exchange one message of 2 KiB per step (``consistency.py``).

Sources: "Partitioning" and "Communication volume analysis" of the stage-2 notes; ZeRO paper, sections 3, 5 and 7.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch

from deepzero.comm.ledger import Traffic
from deepzero.comm.quantization import Format
from deepzero.comm.reduce_scatter import ALL_GATHER_GRADIENTS, ALL_REDUCE, REDUCE_SCATTER, chunk_for
from deepzero.comm.topology import Nodes
from deepzero.layout import Bucket, FlatLayout
from deepzero.offload.copy_streams import TO_DEVICE, TO_HOST
from deepzero.offload.offload_plan import OffloadPlan
from deepzero.runtime.consistency import AGREEMENT, OWN_WORDS
from deepzero.runtime.elementwise_check import borrowed, settings_of, state_like
from deepzero.runtime.grad_norm import WORDS
from deepzero.runtime.quantized_forms import mail_bytes, reduction_traffic
from deepzero.runtime.zero.stage_1_and_2 import ALL_GATHER


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


def moment_bytes_per_element(optimizer: torch.optim.Optimizer, device: torch.device, number: int | None = None) -> int:
    """Bytes of state that ``optimizer`` keeps for one element of a group: one step on a tensor of our own.

    Args:
        optimizer: still over the model's parameters; nothing of it changes.
        device: where its masters will lie.
        number: the group's; None: the first that has parameters.
    """
    extent = 64
    group = next(g for g in optimizer.param_groups if g["params"])
    if number is not None:
        group = optimizer.param_groups[number]
        if not group["params"]:
            return 0
    tensor = torch.zeros(extent, device=device).requires_grad_()
    tensor.grad = torch.zeros_like(tensor)
    settings, first = settings_of(group), group["params"][0]
    state = state_like(optimizer.state[first], first, tensor) if first in optimizer.state else {}
    with borrowed(optimizer) as lent:
        lent.param_groups = [{**settings, "params": [tensor]}]
        if state:
            lent.state[tensor] = state
        lent.step()
        kept = [
            v for entry in lent.state.values() for v in entry.values() if torch.is_tensor(v) and v.numel() == extent
        ]
    return sum(v.element_size() for v in kept)


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
        # What is partitioned travels as its buckets say: forecast.py.
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
