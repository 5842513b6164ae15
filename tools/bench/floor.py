"""The floor: the parts that no ZeRO step can do without, each alone, with nothing else around it.

    forward_backward     the bf16 model, no communication, no optimizer
    adam_shard           fused AdamW on 1/W of the parameters, fp32, one flat tensor (stages 1 and 2)
    adam_full            the same on all of them (stage 0)
    reduce               every rank gets its 1/W of the bf16 gradients: the fastest way tried
    gather               every rank gets all bf16 parameters: the fastest way tried
    all_reduce           stage 0's alternative to both

``floor(stage 1 or 2) = forward_backward + adam_shard + reduce + gather``. All ranks do each part at the same time, so
they share memory bandwidth as they do in a real step. What is missing on purpose: casts, norms, clipping, the sum of
received gradients, any overlap. A step below the floor is possible where communication hides behind computation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tools.bench.peers import join
from tools.bench.rank import Built, Context, Step

PIECE_NUMEL = 25_000_000
"""Communication is also tried in pieces of about this many elements, all launched before the first wait."""
# torch 2.13 renamed both; releases before it have the older name alone.
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def build(context: Context, options: dict[str, Any]) -> Built:
    """All parts by name, each as a step function that ignores its batch unless it is ``forward_backward``."""
    join(context)
    ranks = context.work.ranks
    numel = sum(p.numel() for p in context.model.parameters())
    numel += -numel % ranks
    adam = {"adam_shard": _adam(context, numel // ranks), "adam_full": _adam(context, numel)}
    return Built({"forward_backward": _forward_backward(context), **adam, **_communication(context, numel)})


def _forward_backward(context: Context) -> Step:
    model = context.model.to(context.device, torch.bfloat16)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = model(inputs, targets)
        loss.backward()
        model.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _adam(context: Context, numel: int) -> Step:
    master = torch.zeros(numel, device=context.device)
    master.grad = torch.full_like(master, 1e-3)
    optimizer = torch.optim.AdamW([master], fused=True, **context.work.adamw)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        optimizer.step()
        return torch.zeros(())

    return step


def _communication(context: Context, numel: int) -> dict[str, Step]:
    ranks = context.work.ranks
    flat = torch.zeros(numel, dtype=torch.bfloat16, device=context.device)
    received = torch.zeros_like(flat)
    shard = torch.zeros(numel // ranks, dtype=torch.bfloat16, device=context.device)

    def cuts(count: int) -> list[slice]:
        size = -(-numel // count)
        size += -size % ranks
        return [slice(start, min(start + size, numel)) for start in range(0, numel, size)]

    def exchange(count: int) -> Step:
        return _all([partial(dist.all_to_all_single, received[cut], flat[cut]) for cut in cuts(count)])

    def gather(count: int) -> Step:
        parts = [(flat[cut], shard[cut.start // ranks : cut.stop // ranks]) for cut in cuts(count)]
        return _all([partial(ALL_GATHER, *part) for part in parts])

    pieces = max(1, round(numel / PIECE_NUMEL))
    return {
        "reduce_all_to_all": exchange(1),
        "reduce_all_to_all_pieces": exchange(pieces),
        "reduce_scatter": _all([partial(REDUCE_SCATTER, shard, flat)]),
        "gather": gather(1),
        "gather_pieces": gather(pieces),
        "all_reduce": _all([partial(dist.all_reduce, flat)]),
    }


def _all(collectives: list[Callable[..., Any]]) -> Step:
    """Launch everything, then wait for everything."""

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        for pending in [launch(async_op=True) for launch in collectives]:
            pending.wait()
        return torch.zeros(())

    return step
