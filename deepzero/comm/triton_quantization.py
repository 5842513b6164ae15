"""The quantiser's kernel for GPUs, in Triton: messages of ``quantization.py``, to the bit.

A program of the GPU takes some blocks of a message whole: their values stay in registers between the search for the
largest and the codes, so that memory is read once. Each block has one division, which is rounded as IEEE says;
Triton's ``/`` is not. No product is followed by a sum, with which it would be fused. So the bits are plain torch's.

Only this file imports Triton, and only ``quantization.py`` imports it, where there is a GPU.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from deepzero.device import accelerator_of

ELEMENTS = 2048
"""Bytes of codes that one program writes, at least: 16 for each of its 128 threads. For blocks of 2048 the best choice
of rows (1 to 8) and warps (1 to 8) is at most some 8 % faster (H200)."""


@triton.jit
def _magnitude(x):
    """The largest absolute value of each row, as bits: NaN's are above infinity's, and those above all others."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1, keep_dims=True)


@triton.jit(do_not_specialize=["blocks"], do_not_specialize_on_alignment=["scales"])
def _pack(values, codes, scales, blocks, inverse_levels, tiny, block: tl.constexpr, bits: tl.constexpr,
          rows: tl.constexpr, width: tl.constexpr):  # fmt: skip
    """A program's ``[rows, width]`` bytes of codes; ``width`` is a power of two, not below a block's bytes."""
    payload: tl.constexpr = block * bits // 8
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)[:, None]
    i = tl.arange(0, width)[None, :]
    inside = (row < blocks) & (i < payload)
    x = tl.load(values + row * block + i, mask=inside, other=0.0).to(tl.float32)
    top = _magnitude(x)
    if bits == 4:
        y = tl.load(values + row * block + payload + i, mask=inside, other=0.0).to(tl.float32)
        top = tl.maximum(top, _magnitude(y))
    scale = tl.maximum(top.to(tl.float32, bitcast=True) * inverse_levels, tiny, propagate_nan=tl.PropagateNan.ALL)
    inverse = tl.div_rn(1.0, scale)
    q = libdevice.rint(x * inverse).to(tl.int32)
    if bits == 4:
        q = (q & 15) | (libdevice.rint(y * inverse).to(tl.int32) << 4)
    tl.store(codes + row * payload + i, q.to(tl.int8), mask=inside)
    tl.store(scales + row, scale, mask=row < blocks)


@triton.jit(do_not_specialize=["blocks"], do_not_specialize_on_alignment=["scales"])
def _unpack(codes, scales, values, blocks, block: tl.constexpr, bits: tl.constexpr, rows: tl.constexpr,
            width: tl.constexpr):  # fmt: skip
    """The same bytes read, and their ``[rows, block]`` values written."""
    payload: tl.constexpr = block * bits // 8
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)[:, None]
    i = tl.arange(0, width)[None, :]
    inside = (row < blocks) & (i < payload)
    q = tl.load(codes + row * payload + i, mask=inside, other=0).to(tl.int32)
    scale = tl.load(scales + row, mask=row < blocks, other=0.0)
    if bits == 4:
        high = (q >> 4).to(tl.float32) * scale
        tl.store(values + row * block + payload + i, high.to(values.dtype.element_ty), mask=inside)
        q = (q << 28) >> 28  # spreads the sign of the low half
    tl.store(values + row * block + i, (q.to(tl.float32) * scale).to(values.dtype.element_ty), mask=inside)


class TritonKernel:
    """Calls as of :class:`~deepzero.comm.quantization.PlainKernel`, and its bits.

    A code is of ``1 / inverse_levels`` levels either side of 0, and no scale is below ``tiny``.
    """

    def __init__(self, inverse_levels: float, tiny: float) -> None:
        self._numbers = inverse_levels, tiny

    def encode(self, values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bits: int) -> None:
        """Quantise rows."""
        given = (values, codes.view(torch.int8), scales, len(values), *self._numbers)
        self._launch(_pack, given, values, bits)

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, values: torch.Tensor, bits: int) -> None:
        """Decode rows."""
        self._launch(_unpack, (codes.view(torch.int8), scales, values, len(values)), values, bits)

    @staticmethod
    def _launch(kernel: triton.JITFunction, given: tuple[object, ...], values: torch.Tensor, bits: int) -> None:
        blocks, block = values.shape
        width = triton.next_power_of_2(block * bits // 8)
        rows = max(1, ELEMENTS // width)
        warps = min(16, max(4, width // 512))
        with accelerator_of(values.device).within(values.device):  # Triton launches on the current one
            kernel[(triton.cdiv(blocks, rows),)](*given, block, bits, rows, width, num_warps=warps)
