r"""Numbers on the wire as 8 or 4 bits each: block-wise symmetric quantisation, for ZeRO++'s qwZ and qgZ.

A *block* is a run of consecutive elements with one fp32 scale. With L = 127 (8 bits) or 7 (4 bits)::

    scale = max(absmax / L, 2**-126)        q = round(x / scale), half to even        decoded = q * scale

so q lies in [-L, L], and the error of an element is at most half a step of its block::

    |decoded - x| <= scale / 2 * (1 + 2**-14)       in fp32; a narrower dtype rounds ``decoded`` once more

Zero is exact, a constant block loses one rounding, and what is smaller than half the smallest normal number becomes 0.
**A block that holds NaN or infinity decodes to NaN or infinity everywhere**: its scale is not finite. So an overflow in
a gradient is still seen by whoever looks at the sum.

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

import warnings
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from deepzero.comm import dry_run
from deepzero.comm.quantize_kernels import CompiledKernel, PlainKernel, Variant, compiled, levels
from deepzero.layout import ALIGN, round_up
from deepzero.utils.compile import CompilationError, why_not_compiled


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
        return levels(self.bits)

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

        Raises:
            ValueError: another number of elements, or a tensor that cannot be such a message.
        """
        if numel < 0 or numel % ALIGN:
            raise ValueError(f"a message of {numel} elements: their number must be a multiple of {ALIGN}")
        if message.dim() != 1 or message.dtype != torch.uint8 or not message.is_contiguous():
            kind = f"{tuple(message.shape)}, strides {message.stride()}, {message.dtype}"
            raise ValueError(f"a message must be 1-D, contiguous and uint8, not {kind}")
        if message.numel() < self.message_bytes(numel):
            needed = f"{numel} elements in {self.bits} bits, blocks of {self.block}, take {self.message_bytes(numel)}"
            raise ValueError(f"a message of {message.numel()} bytes is too short: {needed}")
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


COMPILE_FROM = 1 << 23
"""Elements a step. Below, compiled code saves less than 2 ms (two cores), and compiling takes some ten seconds."""

KERNELS = ("auto", "plain", "compiled")


class Quantizer:
    """Packs and unpacks messages of one format.

    Args:
        form: of its messages.
        kernel: ``plain`` torch, ``compiled``, or ``auto``: plain, unless :meth:`prepare` finds that compiling pays.
            Both give the same bits on a CPU; see ``comm/quantize_kernels.py``.

    Example:
        >>> form = Format(bits=8, block=64)
        >>> message = torch.empty(form.message_bytes(128), dtype=torch.uint8)
        >>> packed, back = form.open(message, 128), torch.empty(128)
        >>> quantizer = Quantizer(form)
        >>> quantizer.pack(torch.arange(128.0), packed)
        >>> quantizer.unpack(packed, back)
        >>> bool(((back - torch.arange(128.0)).abs() <= packed.scales.repeat_interleave(64) / 2 * (1 + 2**-14)).all())
        True
    """

    def __init__(self, form: Format, kernel: str = "auto") -> None:
        if kernel not in KERNELS:
            raise ValueError(f"Quantizer(kernel={kernel!r}) must be one of {', '.join(KERNELS)}")
        self.format = form
        self.request = kernel
        self.kernel = "compiled" if kernel == "compiled" else "plain"
        self.reason = "not prepared" if kernel == "auto" else "as asked for"
        self._plain = PlainKernel()
        self._compiled = CompiledKernel()
        # (direction, dtype, device) that turned out not to compile, in the middle of training.
        self._uncompiled: set[tuple[str, torch.dtype, torch.device]] = set()

    def prepare(self, numel: int, dtypes: Iterable[torch.dtype], device: torch.device | str = "cpu") -> None:
        """Decide on the kernel, and compile both directions, before training.

        Args:
            numel: elements packed and unpacked in a step, together.
            dtypes: of the values that will come.
            device: where they lie.

        Raises:
            RuntimeError: ``compiled`` was asked for and cannot be had.
        """
        if self.request == "plain" or dry_run.current() is not None:  # a rehearsal runs none
            return
        device = torch.empty(0, device=device).device  # "cuda" is a wish, cuda:0 a device
        if self.request == "auto":
            missing = why_not_compiled(device.type)
            if numel < COMPILE_FROM:
                missing = f"{numel:,} elements a step are too few to compile for, below {COMPILE_FROM:,}"
            if missing:
                self.kernel, self.reason = "plain", missing
                return
        try:
            for dtype in dtypes:
                for direction in ("pack", "unpack"):
                    compiled(Variant(direction, dtype, self.format.bits, self.format.block, device))
        except CompilationError as error:
            if self.request == "compiled":
                raise RuntimeError(
                    f"Quantizer(kernel='compiled'): {error}. Use kernel='plain', which needs no compiler, or 'auto'"
                ) from error
            _warn(f"{error}. Using the plain kernel")
            self.kernel, self.reason = "plain", f"compiling failed ({error})"
            return
        if self.request == "auto":
            tool = "a C++ compiler" if device.type == "cpu" else "Triton"
            self.kernel, self.reason = "compiled", f"{numel:,} elements a step and {tool}"

    def describe(self) -> str:
        """Format, kernel, and why this kernel, in a line."""
        bits, block = self.format.bits, self.format.block
        return f"Quantizer: {bits} bits, blocks of {block}: {self.kernel} kernel, {self.reason}"

    @torch.no_grad()
    def pack(self, values: torch.Tensor, packed: Packed) -> None:
        """Quantise into a message of their number.

        Args:
            values: 1-D, contiguous, any float dtype; only read.
            packed: of this quantizer's format and as many elements; written.

        Raises:
            ValueError: another format or number of elements, or values of another shape or kind.
        """
        self._check(values, packed)
        if values.numel() != packed.numel:
            raise ValueError(f"{values.numel()} values do not fit a message of {packed.numel} elements")
        if values.is_meta:  # a rehearsal: one pass, and nothing to keep
            values.clone()
            return
        for where, codes, scales in packed.rows(0, packed.numel):
            rows = values[where].view(codes.shape[0], -1)
            self._kernel("pack", rows).encode(rows, codes, scales, self.format.bits)

    @torch.no_grad()
    def unpack(self, packed: Packed, values: torch.Tensor, start: int = 0) -> None:
        """Decode a range of whole blocks.

        Args:
            packed: of this quantizer's format; only read.
            values: 1-D, contiguous, any float dtype; written.
            start: the first element to decode, a multiple of the block size; ``values.numel()`` are decoded.

        Raises:
            ValueError: another format, a range of other than whole blocks or beyond the end, or values of another shape
                or kind.
        """
        self._check(values, packed)
        stop = start + values.numel()
        if start < 0 or stop > packed.numel:
            raise ValueError(f"elements {start} to {stop} are not all in a message of {packed.numel} elements")
        if values.is_meta:
            values.copy_(values)
            return
        for where, codes, scales in packed.rows(start, stop):
            rows = values[where.start - start : where.stop - start].view(codes.shape[0], -1)
            self._kernel("unpack", rows).decode(codes, scales, rows, self.format.bits)

    def _check(self, values: torch.Tensor, packed: Packed) -> None:
        if packed.format != self.format:
            raise ValueError(f"a message of {packed.format} was given to a quantizer of {self.format}")
        if values.dim() != 1 or not values.is_floating_point() or not values.is_contiguous():
            kind = f"{tuple(values.shape)}, strides {values.stride()}, {values.dtype}"
            raise ValueError(f"values must be 1-D, contiguous and of a float dtype, not {kind}")

    def _kernel(self, direction: str, rows: torch.Tensor) -> PlainKernel | CompiledKernel:
        """The one for these rows; a shorter last block is a row of its own, not worth a compilation."""
        if self.kernel == "plain" or rows.shape[1] != self.format.block:
            return self._plain
        if self.request == "compiled":
            return self._compiled
        case = (direction, rows.dtype, rows.device)
        if case not in self._uncompiled:
            try:
                compiled(Variant(direction, rows.dtype, self.format.bits, self.format.block, rows.device))
                return self._compiled
            except CompilationError as error:
                self._uncompiled.add(case)
                _warn(f"{error}. The plain kernel will {direction} {rows.dtype} here from now on: slower")
        return self._plain


def _warn(message: str) -> None:
    warnings.warn(f"Quantizer: {message}", RuntimeWarning, stacklevel=3)
