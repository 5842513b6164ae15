"""The global gradient norm, to the same bit in every stage, for every bucket size, in every order of arrival.

Floating-point sums depend on their order, and the order in which gradients lie in memory depends on bucket size and
stage. So the sum of squares is made in two parts, neither of which depends on the order:

1. **Blocks.** Parameters start at multiples of ``ALIGN`` elements and no part boundary falls inside an aligned block
   (see ``layout.py``). So the blocks of a parameter are the same in every layout, and the norm of each one, an fp32
   computed from its ``ALIGN`` elements alone, is too.
2. **Integers.** An fp32 block norm is ``m * 2**e`` with ``1 <= m < 2``. The square of m, rounded to fp32, is a multiple
   of ``2**-23``, so for each of the 256 exponents the squares are added as integers, which is exact and can be done in
   any order, over blocks, buckets, groups and ranks (an example: :class:`BlockNorms`). The ranks add their 256
   integers, the *bins*, with one small all-reduce; Python's big integers make the total; one square root rounds once.

The blocks are measured where the reduction has just written them, while they are in the core's cache
(:class:`BlockNorms`): a pass of its own over 46 M elements took 23 ms of a 700 ms step, one thread. A block whose
squares overflow fp32 (gradients near 1e19) counts as not finite, as it does in torch; one whose norm is below fp32's
normal range (1e-38) counts as zero.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch

from deepzero.device import elementwise_kernel
from deepzero.layout import ALIGN, Fragment

FRACTION_BITS = 23
EXPONENT_BINS = 256
"""Integers that ranks add up, one for each exponent. The last exponent is that of inf and NaN."""

ROWS_ON_GPU = 1024
"""At most, of bins, to which a GPU's threads add in turn. Nearly all norms of a step have one of ten exponents, and
additions to one address wait for each other: 6 million took 7.6 ms on an H200, in this many rows 0.3."""


def block_norms(grad: torch.Tensor, device_type: str = "", out: torch.Tensor | None = None) -> torch.Tensor:
    """The 2-norm of every aligned block of ``ALIGN`` elements, written to ``out`` if it is given.

    ``grad`` is 1-D fp32, of whole blocks. ``device_type`` is the kind of device on which the model computes, if
    ``grad`` does not lie there: the bits are those of there. Each fp32 norm depends on the elements of its block alone.
    """
    blocks = grad.view(-1, ALIGN)
    if (device_type or grad.device.type) == "cpu":
        return torch.linalg.vector_norm(blocks, dim=1, out=out)
    # A GPU reduction picks its order by the number of rows. Halving with elementwise adds has one order only.
    if kernels := _three_halvings(grad.device):
        of_squares, and_root = kernels
        norms = and_root(*of_squares(*blocks.view(-1, 8, ALIGN // 8).unbind(1)).unbind(1))
        return norms if out is None else out.copy_(norms)
    squares = blocks * blocks
    while squares.shape[1] > 1:
        first, second = squares.chunk(2, dim=1)
        squares = first + second
    # In fp64: a sixth of torch's fp32 roots on a CPU are not the nearest numbers, and a GPU's are.
    roots = squares.squeeze(1).to(torch.float64).sqrt_()
    return roots.to(torch.float32) if out is None else out.copy_(roots)


# Three halvings at once, of eight numbers that lie an eighth of a row apart. Each operation by the name of its own
# rounding: of a product and a sum the compiler would make one operation, which rounds once.
_THREE_HALVINGS = """
template <typename T> T three_halvings(T a, T b, T c, T d, T e, T f, T g, T h) {
  return __fadd_rn(__fadd_rn(__fadd_rn(a, e), __fadd_rn(c, g)), __fadd_rn(__fadd_rn(b, f), __fadd_rn(d, h)));
}
"""
_OF_SQUARES = """
template <typename T> T of_squares(T a, T b, T c, T d, T e, T f, T g, T h) {
  return three_halvings<T>(__fmul_rn(a, a), __fmul_rn(b, b), __fmul_rn(c, c), __fmul_rn(d, d),
                           __fmul_rn(e, e), __fmul_rn(f, f), __fmul_rn(g, g), __fmul_rn(h, h));
}
"""
_AND_ROOT = """
template <typename T> T and_root(T a, T b, T c, T d, T e, T f, T g, T h) {
  return __fsqrt_rn(three_halvings<T>(a, b, c, d, e, f, g, h));
}
"""


@functools.cache
def _three_halvings(device: torch.device) -> tuple[Callable[..., torch.Tensor], ...]:
    """The kernels of :func:`block_norms` for squares and for their sums; none where kernels are not compiled."""
    # Six halvings, each a kernel of its own, take four times as long, and the host half of its time for a bucket.
    kernels = (elementwise_kernel(_THREE_HALVINGS + last, device) for last in (_OF_SQUARES, _AND_ROOT))
    return tuple(kernel for kernel in kernels if kernel is not None)


def exact_square_sum(norms: torch.Tensor) -> torch.Tensor:
    """Add up ``norms ** 2`` (1-D fp32); each square is rounded once to fp32, the sum not at all.

    Returns int64 ``[EXPONENT_BINS]``: for each exponent field the sum of the squared mantissas, in units of ``2**-23``.
    """
    bits = norms.view(torch.int32)
    field = (bits >> FRACTION_BITS) & 0xFF  # a NaN may carry a sign
    # The bits of the same mantissa with exponent 0: m in [1, 2).
    mantissa = ((bits & 0x7FFFFF) | 0x3F800000).view(torch.float32)
    # Exact in float64 for 2**28 blocks (2**34 elements): m*m < 4 has 25 bits above 2**-23.
    squares = mantissa.square_().to(torch.float64)
    if field.device.type == "cpu":
        sums = torch.bincount(field, weights=squares, minlength=EXPONENT_BINS)
    else:  # torch's deterministic mode refuses bincount on a GPU, not index_add_
        rows = min(ROWS_ON_GPU, len(field) // EXPONENT_BINS + 1)
        starts = torch.arange(0, rows * EXPONENT_BINS, EXPONENT_BINS, dtype=torch.int32, device=field.device)
        field[: len(field) // rows * rows].view(-1, rows).add_(starts)  # what is left over goes to the first row
        sums = torch.zeros(rows * EXPONENT_BINS, dtype=torch.float64, device=field.device)
        sums = sums.index_add_(0, field, squares).view(rows, EXPONENT_BINS).sum(0)
    return (sums * (1 << FRACTION_BITS)).to(torch.int64)


class BlockNorms:
    """The block norms of a rank's share of the gradients, taken bucket by bucket as the sums are written.

    It has ``numel`` elements, a multiple of ``ALIGN``; ``device_type`` is what a dry run's device stands for.

    Example (the norms of two blocks are 24 = 1.5 * 2**4 and 32 = 1 * 2**5, and 1.5**2 * 4**4 + 1 * 4**5 = 40**2):
        >>> norms = BlockNorms(128, torch.device("cpu"))
        >>> norms.measure(0, torch.full((64,), 3.0), 0)
        >>> norms.measure(64, torch.full((64,), 4.0), 0)
        >>> bins = norms.norm_sq_partials().tolist()
        >>> {number - 127: squares / 2**23 for number, squares in enumerate(bins) if squares}, norm_from_bins(bins)
        ({4: 2.25, 5: 1.0}, 40.0)
    """

    def __init__(self, numel: int, device: torch.device, device_type: str = "") -> None:
        self._device_type = device_type or device.type
        self.norms = torch.zeros(numel // ALIGN, dtype=torch.float32, device=device)
        # The reducer's: indices of the buckets whose sums are still those that were measured.
        self.fresh: set[int] = set()
        # Of sums in host memory: to take them must not wait for the device. A block is 0 here or there.
        self._on_host: torch.Tensor | None = None

    def measure(self, start: int, chunk: torch.Tensor, lo: int) -> None:
        """Take the norms of ``chunk``, whose first element is number ``start + lo`` of the share; all of ``ALIGN``."""
        first = (start + lo) // ALIGN
        blocks = slice(first, first + chunk.numel() // ALIGN)
        here, there = self.norms, self._on_host
        if chunk.device != self.norms.device:
            if self._on_host is None:
                self._on_host = torch.zeros(self.norms.numel(), dtype=torch.float32)
            here, there = self._on_host, self.norms
        block_norms(chunk.float(), self._device_type, out=here[blocks])
        if there is not None:
            there[blocks].zero_()

    def norm_sq_partials(self) -> torch.Tensor:
        """int64 ``[EXPONENT_BINS]``, of everything measured."""
        bins = exact_square_sum(self.norms)
        return bins if self._on_host is None else bins + exact_square_sum(self._on_host).to(bins.device)

    def squares(self, fragments: Sequence[Fragment], count: int) -> torch.Tensor:
        """What was measured, by parameter: fp64 ``[count]`` on the CPU, sums of squares of this rank's fragments."""
        blocks = self.norms.to(torch.float64).square().cpu()
        if self._on_host is not None:
            blocks += self._on_host.to(torch.float64).square()
        found = torch.zeros(count, dtype=torch.float64)
        for fragment in fragments:
            first = fragment.shard_start // ALIGN  # a fragment begins where a block does
            found[fragment.slot.index] += blocks[first : first + -(-fragment.numel // ALIGN)].sum()
        return found


def norm_from_bins(bins: list[int]) -> float:
    """The square root, rounded once to float64, of ``EXPONENT_BINS`` integers that were added over all ranks.

    ``inf`` when any block was not finite.
    """
    if bins[-1]:
        return math.inf
    # Bin e counts squares of mantissas in units of 2**-23, each at exponent 2 * (e - 127). Zeros are in bin 0.
    total = sum(count << (2 * e) for e, count in enumerate(bins) if e)
    # sqrt(total * 2**-277) = sqrt(2 * total * 2**-278) = isqrt(2 * total << 2 * shift) / 2**(139 + shift). The 64 bits
    # more than the result has make it rounded once.
    shift = 64
    return math.isqrt(total << (2 * shift + 1)) / (1 << (139 + shift))
