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
===========  ==========  ==================================  ============  ============

u is what unreduced gradients take: c; or a when several micro-batches are summed in a wider dtype; or nothing in stage
1 with ``overlap_comm`` and a single micro-batch, whose gradients leave as they come. Stage 1 by all-reduce holds ``aΨ``
in place of ``aΨ/W``. With 2-byte gradients (``grad_accum_dtype`` = compute dtype) and x + m = K, stage 2 is the paper's
``2Ψ + (2+K)Ψ/W``; stage 1 is its ``4Ψ + KΨ/W`` and the reduced share, ``aΨ/W``, beside it.

Sent by one rank per optimizer step, in elements, mean over ranks: one reduce-scatter or all-gather of all parameters is
``Ψ(W-1)/W``. Stages 0, 1 and 2 send two of them; stage 1 by all-reduce three; stage 2 reduces every micro-batch.
Besides, ranks exchange one message of 2 KiB per step (``agreement.py``).

Sources: "Partitioning" and "Communication volume analysis" of the stage-2 notes; ZeRO paper, sections 3, 5 and 7.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deepzero.comm.bucket import ALL_GATHER_GRADIENTS, ALL_REDUCE, REDUCE_SCATTER
from deepzero.comm.ledger import Traffic
from deepzero.layout import FlatLayout
from deepzero.runtime.agreement import AGREEMENT
from deepzero.runtime.grad_norm import WORDS
from deepzero.runtime.optimizer_trial import borrowed, settings_of, state_like
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

    @property
    def unreduced(self) -> int:
        """The u of the module's text: bytes per element of whole gradients before they are reduced."""
        if self.stage == 2 or (self.stage == 1 and self.overlap and self.micro_batches == 1):
            return 0
        return self.compute if self.micro_batches == 1 else max(self.compute, self.accumulation)


def moment_bytes_per_element(optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """Bytes of state that ``optimizer`` keeps for one element of its first group: one step on a tensor of our own.

    Args:
        optimizer: still over the model's parameters; nothing of it changes.
        device: where its masters will lie.
    """
    extent = 64
    group = next(g for g in optimizer.param_groups if g["params"])
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


def predicted_memory(numel: int, world_size: int, sizes: StateSizes) -> dict[str, int]:
    """Bytes of one rank by category; the table above.

    Called with the number of *padding* elements it gives what padding takes in each category.
    """
    share = 1 if sizes.stage == 0 else world_size
    reduced = numel * sizes.accumulation // (1 if sizes.whole_reduce else world_size)
    master = 0 if sizes.compute == 4 else 4
    return {
        "parameters": numel * sizes.compute,
        "gradients": numel * sizes.unreduced + reduced,
        "masters": numel * master // share,
        "moments": numel * sizes.moments // share,
    }


def padding_memory(padding: int, world_size: int, sizes: StateSizes) -> dict[str, int]:
    """Bytes that the layout's ``padding`` elements take in each category: flat buffers have them, tensors of autograd
    (``param.grad``) and of the optimizer (moments) have none.
    """
    forms = {**predicted_memory(padding, world_size, sizes), "moments": 0}
    if sizes.unreduced == sizes.compute:
        forms["gradients"] -= padding * sizes.unreduced
    return forms


def predicted_traffic(layouts: Sequence[FlatLayout], world_size: int, sizes: StateSizes) -> dict[str, Traffic]:
    """One optimizer step's traffic by kind, mean over ranks; true elements and padding apart."""
    true = sum(layout.numel for layout in layouts)
    padding = sum(layout.padded_numel for layout in layouts) - true
    calls = sum(len(layout.intervals) for layout in layouts)
    share = (world_size - 1) / world_size

    def sent(times: int, itemsize: int, halves: int = 1) -> Traffic:
        traffic = Traffic()
        traffic.add(
            Traffic(
                calls, halves * true * share, halves * padding * share, halves * (true + padding) * share * itemsize
            ),
            times,
        )
        return traffic

    times = sizes.micro_batches if sizes.stage == 2 else 1
    forms: dict[str, Traffic] = {}
    if sizes.whole_reduce and not sizes.exact:
        forms[ALL_REDUCE] = sent(times, sizes.wire, halves=2)
    else:
        forms[REDUCE_SCATTER] = sent(times, sizes.wire)
        if sizes.whole_reduce and world_size > 1:
            forms[ALL_GATHER_GRADIENTS] = sent(1, sizes.accumulation)
    if sizes.stage > 0:
        forms[ALL_GATHER] = sent(1, sizes.compute)
    message = 2 * (world_size - 1) * (WORDS + world_size) // world_size
    forms[AGREEMENT] = Traffic(1, message, 0, 8 * message)
    return forms
