"""The global gradient norm, to the same bit in every stage, for every bucket size, in every order of arrival.

Floating-point sums depend on their order, and the order in which gradients lie in memory depends on bucket size and
stage. So the sum of squares is made in two parts, neither of which depends on the order:

1. **Blocks.** Parameters start at multiples of ``ALIGN`` elements and no part boundary falls inside an aligned block
   (see ``layout.py``). So the blocks of a parameter are the same in every layout, and the norm of each one, an fp32
   computed from its ``ALIGN`` elements alone, is too.
2. **Integers.** An fp32 block norm is ``m * 2**e`` with a 24-bit integer m. Its square is the integer ``m*m`` at
   exponent ``2e``. For each of the 256 exponents the squares are added as integers, in two halves of 24 bits, which is
   exact and can be done in any order, over blocks, intervals, groups and ranks. The ranks add their 512 integers with
   one small all-reduce; Python's big integers make the total, and one square root rounds once.

Cost on 49 M elements, one thread: 15 ms for the blocks, as much as ``torch.linalg.vector_norm`` needs, and a few
milliseconds for the integers.

A block whose squares overflow fp32 (gradients near 1e19) counts as not finite, as it does in torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from deepzero.layout import ALIGN

EXPONENTS = 256
HALF_BITS = 24
NON_FINITE = EXPONENTS - 1
"""The exponent field of inf and NaN."""

WORDS = 2 * EXPONENTS
"""Integers that ranks add up."""


def block_norms(grad: torch.Tensor) -> torch.Tensor:
    """The 2-norm of every aligned block of ``ALIGN`` elements.

    Args:
        grad: 1-D, a multiple of ``ALIGN`` elements, fp32.

    Returns:
        fp32, ``grad.numel() // ALIGN`` elements; each depends on the elements of its block alone.
    """
    blocks = grad.view(-1, ALIGN)
    if grad.device.type == "cpu":
        return torch.linalg.vector_norm(blocks, dim=1)
    # A GPU reduction picks its order by the number of rows. Halving with elementwise adds has one order only.
    squares = blocks * blocks
    while squares.shape[1] > 1:
        half = squares.shape[1] // 2
        squares = squares[:, :half] + squares[:, half:]
    return squares.squeeze(1).sqrt()


def exact_square_sum(norms: torch.Tensor) -> torch.Tensor:
    """Add up ``norms ** 2`` without rounding.

    Args:
        norms: 1-D fp32, not negative.

    Returns:
        int64 ``[WORDS]``: for each exponent field the sum of the high, then of the low halves of the squared mantissas.
    """
    bits = norms.view(torch.int32)
    exponent = (bits >> 23) & 0xFF
    mantissa = (bits & 0x7FFFFF) | ((exponent > 0).to(torch.int32) << 23)
    square = mantissa.to(torch.int64).square_()
    field = exponent.clamp(min=1).to(torch.int64)
    # float64 weights are exact here: halves below 2**24, and 2**29 blocks (2**35 elements) before 2**53 is reached.
    high = _histogram(field, (square >> HALF_BITS).to(torch.float64))
    low = _histogram(field, (square & ((1 << HALF_BITS) - 1)).to(torch.float64))
    return torch.cat([high, low]).to(torch.int64)


def _histogram(field: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum of ``weights`` by exponent. torch's deterministic mode refuses bincount on a GPU, not index_add_."""
    if field.device.type == "cpu":
        return torch.bincount(field, weights=weights, minlength=EXPONENTS)
    return torch.zeros(EXPONENTS, dtype=torch.float64, device=field.device).index_add_(0, field, weights)


def square_sum_words(grads: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The exact sum of squares of this rank's gradients, ready to be added to the other ranks'.

    Args:
        grads: 1-D tensors, each a multiple of ``ALIGN`` elements; padding is zero.
        device: where they lie.

    Returns:
        int64 ``[WORDS]`` on ``device``.

    Example:
        >>> words = square_sum_words([torch.full((64,), 3.0), torch.full((64,), 4.0)], torch.device("cpu"))
        >>> norm_from_words(words.tolist())
        40.0
    """
    total = torch.zeros(WORDS, dtype=torch.int64, device=device)
    for grad in grads:
        total += exact_square_sum(block_norms(grad.to(torch.float32)))
    return total


def norm_from_words(words: list[int]) -> float:
    """The square root of the sum, rounded once to float64.

    Args:
        words: ``WORDS`` integers, added over all ranks.

    Returns:
        The norm; ``inf`` when any block was not finite.
    """
    high, low = words[:EXPONENTS], words[EXPONENTS:]
    if high[NON_FINITE] or low[NON_FINITE]:
        return math.inf
    # A mantissa m at exponent field e stands for m * 2**(e - 150); a square for m*m * 2**(2e - 300).
    total = sum(((h << HALF_BITS) + l) << (2 * e) for e, (h, l) in enumerate(zip(high, low, strict=True)))
    shift = 64
    return math.isqrt(total << (2 * shift)) / (1 << (150 + shift))
