"""The exact sum of every rank's contribution to a shard: in fp32, in the order of ranks, chunk by chunk.

A sum in bf16 or fp16 would lose what one in fp32 keeps, and floating-point additions in another order give other bits.
So each element's contributions are widened and added left to right, rank 0's first, to what earlier micro-batches have
left: one sum in the order of the global batch, **however many ranks share it**. It runs over chunks that stay in the
core's cache, where also the gradient norm is taken of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

SUM_CHUNK = 1 << 17
"""Elements. The sum runs over chunks this long, whose fp32 scratch (512 KiB, twice) stays in the core's cache."""
DEVICE_CHUNK = 1 << 24
"""The same where chunks only cost launches: on a GPU, for shards that long. 128 MiB of scratch at the most."""

Measure: TypeAlias = Callable[[torch.Tensor, int], None]
"""Called with each finished chunk of a sum, and where in the sum it starts, while the chunk is in the core's cache."""
Term: TypeAlias = torch.Tensor | Callable[[int, torch.Tensor], None]
"""One rank's contribution to a sum: a 1-D tensor; or, for encoded values, ``decode(start, values)``, which writes the
elements from ``start`` on into 1-D fp32 ``values``."""


def chunk_for(device_type: str, shard_numel: int) -> int:
    """Returns how many elements to sum at a time on a device of this kind: no shard is longer than ``shard_numel``."""
    return SUM_CHUNK if device_type == "cpu" else max(SUM_CHUNK, min(shard_numel, DEVICE_CHUNK))


def sum_chunk(
    total: torch.Tensor,
    terms: Sequence[Term],
    start: int,
    scratch: torch.Tensor,
    accumulate: bool = False,
    factor: float = 1.0,
) -> None:
    """``total = terms[0] + terms[1] + …`` in fp32, left to right, of the elements from ``start`` on.

    ``total`` and ``scratch`` are 1-D fp32, of one extent; ``start`` is a multiple of it where terms are encoded. With
    ``accumulate`` the sum begins with what ``total`` holds; ``factor`` multiplies each term.
    """
    for number, term in enumerate(terms):
        added = accumulate or number > 0
        # A mixed-dtype add would widen into fresh memory; the kept scratch is already in cache.
        values = scratch if added else total
        if isinstance(term, torch.Tensor):
            values.copy_(term[start : start + values.numel()])
        else:
            term(start, values)
        if factor != 1.0:
            values.mul_(factor)
        if added:
            total.add_(scratch)


def sum_in_rank_order(
    output: torch.Tensor,
    terms: Sequence[Term],
    accumulate: bool,
    scratch: torch.Tensor,
    factor: float = 1.0,
    on_chunk: Measure | None = None,
) -> None:
    """``output = terms[0] + terms[1] + …`` in fp32, left to right; ``accumulate``: ``((output + terms[0]) + …)``.

    Args:
        output: 1-D; fp32, or a narrower dtype into which the fp32 sum is rounded once.
        terms: in rank order; 1-D tensors of ``output``'s extent, any float dtype, or what decodes to such.
        accumulate: begin with what ``output`` holds.
        scratch: fp32, two chunks of elements, on the same device; where terms are encoded, of whole blocks each.
        factor: multiplies the terms, not what ``output`` holds already.
        on_chunk: called with what ``output`` holds in the end.
    """
    size = scratch.numel() // 2
    for lo in range(0, output.numel(), size):
        target = output[lo : lo + size]
        # An fp32 output is its own scratch, and a chunk is written once.
        total = target if output.dtype == torch.float32 else scratch[: target.numel()]
        if accumulate and total is not target:
            total.copy_(target)
        sum_chunk(total, terms, lo, scratch[size : size + target.numel()], accumulate, factor)
        if total is not target:
            target.copy_(total)
        if on_chunk is not None:
            on_chunk(target, lo)
