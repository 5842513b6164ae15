r"""Numbers on the wire as 8 or 4 bits each: block-wise symmetric quantisation, for ZeRO++'s qwZ and qgZ.

A *block* is a run of consecutive elements with one fp32 scale. With L = 127 (8 bits) or 7 (4 bits)::

    scale = max(absmax / L, 2**-126)        q = round(x / scale), half to even        decoded = q * scale

so q lies in [-L, L], and the error of an element is at most half a step of its block::

    |decoded - x| <= scale / 2 * (1 + 2**-14)       in fp32; a narrower dtype rounds ``decoded`` once more

Zero is exact, a constant block loses one rounding, and what is smaller than the smallest normal number becomes 0. **A
block that holds NaN or infinity decodes to NaN or infinity everywhere**: its scale is not finite. So an overflow in a
gradient is still seen by whoever looks at the sum.

A message of n elements is one ``uint8`` tensor, payload first, so that one send carries it::

    | payload: n * bits / 8 bytes | scales: 4 * ceil(n / block) bytes | up to 16 |

    8 bits  element i is byte i, an int8
    4 bits  a block of m elements is m/2 bytes: element i in the low half, element i + m/2 in the high half of byte i

(neighbours in one byte would have to be pulled apart element by element; halves of a block are two straight runs).
The last block of a message may be shorter.

Volume: ``bits/8 + 4/block`` bytes an element, 1.002 and 0.502 for blocks of 2048, where bf16 sends 2.

Sources: ZeRO++ (Wang et al. 2023), sections 3.1 and 3.3; DeepSpeed's ``csrc/quantization``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepzero.layout import ALIGN, round_up

TINY = 2.0**-126
"""The smallest normal number of fp32: no scale is smaller, so that its inverse is finite."""

CHUNK = 1 << 16
"""Elements that the plain kernel widens at a time; they stay in a core's cache."""


@dataclass(frozen=True)
class Format:
    """How numbers lie in a message."""

    bits: int
    """8 or 4."""
    block: int
    """Elements that share a scale, a multiple of ``ALIGN``."""

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"bits={self.bits} must be 8 or 4")
        if self.block < ALIGN or self.block % ALIGN:
            raise ValueError(f"block={self.block} must be a multiple of {ALIGN} elements, as every rank's part is")

    @property
    def levels(self) -> int:
        """L: codes reach from -L to L."""
        return 127 if self.bits == 8 else 7

    def blocks(self, numel: int) -> int:
        """Blocks of a message of ``numel`` elements."""
        return -(-numel // self.block)

    def message_bytes(self, numel: int) -> int:
        """Bytes of a message of ``numel`` elements, scales included; a multiple of 16."""
        return round_up(numel * self.bits // 8 + 4 * self.blocks(numel), 16)

    def open(self, message: torch.Tensor, numel: int) -> Packed:
        """Views of a message.

        Args:
            message: 1-D ``uint8``, :meth:`message_bytes` long, its start aligned to 4 bytes.
            numel: elements, a multiple of ``ALIGN``.
        """
        if numel % ALIGN:
            raise ValueError(f"a message of {numel} elements: their number must be a multiple of {ALIGN}")
        payload = numel * self.bits // 8
        scales = message[payload : payload + 4 * self.blocks(numel)].view(torch.float32)
        codes = message[:payload].view(torch.int8) if self.bits == 8 else message[:payload]
        return Packed(self, numel, codes, scales)


@dataclass(frozen=True)
class Packed:
    """A message, opened."""

    format: Format
    numel: int
    codes: torch.Tensor
    """1-D; ``int8``, or for 4 bits ``uint8``."""
    scales: torch.Tensor
    """1-D fp32, one for each block."""

    def rows(self, start: int, stop: int) -> list[tuple[slice, torch.Tensor, torch.Tensor]]:
        """The blocks of elements ``start`` to ``stop`` as rows: those of full length, and a shorter last one.

        Args:
            start: a multiple of the block size.
            stop: a multiple of the block size, or the end.

        Returns:
            For each: which elements, codes ``[blocks, bytes of a block]``, scales ``[blocks, 1]``.
        """
        block, per = self.format.block, 8 // self.format.bits
        if start % block or (stop % block and stop != self.numel):
            raise ValueError(f"elements {start} to {stop} of {self.numel} are not whole blocks of {block}")
        full = stop // block * block
        found = []
        for lo, hi, width in ((start, full, block), (full, stop, stop - full)):
            if lo < hi:
                scales = self.scales[lo // block : -(-hi // block)]
                found.append((slice(lo, hi), self.codes[lo // per : hi // per].view(-1, width // per), scales[:, None]))
        return found


# ---- the two directions, written down once: plain torch, the truth for every other kernel ---------------------------


def encode(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bits: int) -> None:
    """Quantise rows.

    Args:
        values: ``[blocks, elements]``, any float dtype; only read.
        codes: ``[blocks, elements * bits / 8]``, ``int8`` or ``uint8``; written.
        scales: ``[blocks, 1]`` fp32; written.
        bits: 8 or 4.
    """
    levels = 127 if bits == 8 else 7
    x = values.to(torch.float32)
    scale = (x.abs().amax(1, keepdim=True) * (1.0 / levels)).clamp_min(TINY)
    q = (x * (1.0 / scale)).round()
    scales.copy_(scale)
    if bits == 8:
        codes.copy_(q)
    else:
        low, high = q.to(torch.int32).chunk(2, 1)
        codes.copy_((low & 15) | ((high & 15) << 4))


def decode(codes: torch.Tensor, scales: torch.Tensor, values: torch.Tensor, bits: int) -> None:
    """The other way.

    Args:
        codes: as for :func:`encode`; only read.
        scales: ``[blocks, 1]`` fp32; only read.
        values: ``[blocks, elements]``, any float dtype; written.
        bits: 8 or 4.
    """
    if bits == 8:
        values.copy_(codes.to(torch.float32) * scales)
    else:
        wide = codes.to(torch.int32)
        half = values.shape[1] // 2
        # A shift to the left and back to the right spreads the sign of a half byte.
        values[:, :half].copy_(((wide << 28) >> 28).to(torch.float32) * scales)
        values[:, half:].copy_(((wide << 24) >> 28).to(torch.float32) * scales)


class Quantizer:
    """Packs and unpacks messages of one format.

    Args:
        form: of its messages.
    """

    def __init__(self, form: Format) -> None:
        self.format = form

    @torch.no_grad()
    def pack(self, values: torch.Tensor, packed: Packed) -> None:
        """Quantise 1-D ``values`` of any float dtype into a message of their number."""
        step = max(CHUNK // self.format.block, 1) * self.format.block
        for lo in range(0, packed.numel, step):
            for where, codes, scales in packed.rows(lo, min(lo + step, packed.numel)):
                encode(values[where].view(codes.shape[0], -1), codes, scales, self.format.bits)

    @torch.no_grad()
    def unpack(self, packed: Packed, values: torch.Tensor, start: int = 0) -> None:
        """Decode elements ``start`` to ``start + values.numel()``, whole blocks, into 1-D ``values``."""
        step = max(CHUNK // self.format.block, 1) * self.format.block
        stop = start + values.numel()
        for lo in range(start, stop, step):
            for where, codes, scales in packed.rows(lo, min(lo + step, stop)):
                piece = values[where.start - start : where.stop - start]
                decode(codes, scales, piece.view(codes.shape[0], -1), self.format.bits)
