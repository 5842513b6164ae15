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

(halves of a block are two straight runs). The last block of a message may be shorter. Volume: ``bits/8 + 4/block``
bytes an element, 1.002 and 0.502 for blocks of 2048, where bf16 sends 2.

Two kernels do the work, on blocks as rows of a matrix: :class:`PlainKernel`, which needs no compiler, and a compiled
one, one pass over memory each way: :class:`CompiledKernel` on a CPU, ``triton_quantization.py`` on a GPU. **All give
the same bits**: each operation rounds once, in one order. Only the codes of a block with NaN or infinity mean nothing
and may differ.

Sources: [ZeRO++], sections 3.1 and 3.3; ``csrc/quantization`` in [DeepSpeed].
"""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from deepzero.device import accelerator_of
from deepzero.layout import ALIGN, round_up
from deepzero.utils.compile import CompilationError, compilation, compile_apart, compiled_once, why_not_compiled

if TYPE_CHECKING:
    from deepzero.comm.triton_quantization import TritonKernel

TINY = 2.0**-126
"""The smallest normal number of fp32: no scale is smaller, so that its inverse is finite."""

CHUNK, CHUNK_ON_GPU = 1 << 18, 1 << 22
"""Elements that the plain kernel widens at a time: 1 MiB stays in a core's L2 cache of 2 MiB. Shorter chunks cost more
in calls: packing takes a fifth longer with 2**16 (one core of a Xeon). On a GPU a chunk costs its calls alone."""

COMPILE_FROM = 1 << 23
"""Elements a step. Below, compiled code saves less than 2 ms (two cores), and compiling takes some ten seconds."""

WIDEST_ON_GPU = 1 << 14
"""Elements of the widest block that a GPU's compiled kernel takes. It holds a block in registers; one for wider blocks
would spill, and take minutes to compile."""

KERNELS = ("auto", "plain", "compiled")


def levels(bits: int) -> int:
    """L: codes reach from -L to L. 127 for 8 bits, 7 for 4."""
    return (1 << (bits - 1)) - 1


# ---- the format ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Format:
    """How numbers lie in a message: 8 or 4 ``bits`` each, ``block`` elements to a scale, a multiple of ``ALIGN``."""

    bits: int
    block: int

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"bits={self.bits} must be 8 or 4")
        if self.block < ALIGN or self.block % ALIGN:
            raise ValueError(f"block={self.block} must be a multiple of {ALIGN} elements, as every rank's part is")

    def blocks(self, numel: int) -> int:
        """Blocks of a message of ``numel`` elements."""
        return -(-numel // self.block)

    def message_bytes(self, numel: int) -> int:
        """Bytes of a message of ``numel`` elements, scales included; a multiple of 16."""
        return round_up(numel * self.bits // 8 + 4 * self.blocks(numel), 16)

    def open(self, message: torch.Tensor, numel: int) -> Packed:
        """Views of a message: 1-D ``uint8``, :meth:`message_bytes` long, its start aligned to 4 bytes.

        ``numel`` is a multiple of ``ALIGN``.
        """
        if numel < 0 or numel % ALIGN:
            raise ValueError(f"a message of {numel} elements: their number must be a multiple of {ALIGN}")
        if message.dim() != 1 or message.dtype != torch.uint8 or not message.is_contiguous():
            raise ValueError(f"a message must be 1-D, contiguous and uint8, not {_kind_of(message)}")
        if message.numel() < self.message_bytes(numel):
            needed = f"{numel} elements in {self.bits} bits, blocks of {self.block}, take {self.message_bytes(numel)}"
            raise ValueError(f"a message of {message.numel()} bytes is too short: {needed}")
        payload = numel * self.bits // 8
        scales = message[payload : payload + 4 * self.blocks(numel)].view(torch.float32)
        codes = message[:payload].view(torch.int8) if self.bits == 8 else message[:payload]
        return Packed(self, numel, codes, scales)


@dataclass(frozen=True)
class Packed:
    """A message, opened: 1-D ``codes``, ``int8`` or for 4 bits ``uint8``; 1-D fp32 ``scales``, one for each block."""

    format: Format
    numel: int
    codes: torch.Tensor
    scales: torch.Tensor

    def rows(self, start: int, stop: int) -> list[tuple[slice, torch.Tensor, torch.Tensor]]:
        """The blocks of elements ``start`` to ``stop`` as rows: those of full length, and a shorter last one.

        Both are multiples of the block size, or ``stop`` is the end. For each kind of row: which elements, codes
        ``[blocks, bytes of a block]``, scales ``[blocks, 1]``.
        """
        block, per = self.format.block, 8 // self.format.bits
        if start % block or (stop % block and stop != self.numel):
            raise ValueError(f"elements {start} to {stop} of {self.numel} are not whole blocks of {block}")
        full = stop // block * block
        return [
            (
                slice(lo, hi),
                self.codes[lo // per : hi // per].view(-1, width // per),
                self.scales[lo // block : -(-hi // block)][:, None],
            )
            for lo, hi, width in ((start, full, block), (full, stop, stop - full))
            if lo < hi
        ]

    def cut(self, start: int, stop: int) -> Packed:
        """Elements ``start`` to ``stop``, whole blocks or up to the end, as a message."""
        block, per = self.format.block, 8 // self.format.bits
        codes, scales = self.codes[start // per : stop // per], self.scales[start // block : -(-stop // block)]
        return Packed(self.format, stop - start, codes, scales)


def _kind_of(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)}, strides {tensor.stride()}, {tensor.dtype}"


# ---- packing and unpacking -------------------------------------------------------------------------------------------


class Quantizer:
    """Packs and unpacks messages of one format.

    Its kernel is ``plain`` torch, ``compiled``, or ``auto``: plain, unless :meth:`prepare` finds that compiling pays.

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
        self.format, self.request = form, kernel
        self.kernel = "compiled" if kernel == "compiled" else "plain"
        self.reason = "not prepared" if kernel == "auto" else "as asked for"
        self._plain: PlainKernel | DryRunKernel = PlainKernel()
        # By direction, dtype and device.
        self._compiled: dict[tuple[str, torch.dtype, torch.device], CompiledKernel | TritonKernel] = {}

    def prepare(self, numel: int, dtypes: Iterable[torch.dtype], device: torch.device | str = "cpu") -> None:
        """Decide on the kernel, and compile both directions, before training; raise if ``compiled`` cannot be had.

        ``numel`` elements will be packed and unpacked in a step, together, of these dtypes, on this device. What comes
        in others later takes the plain kernel: nothing is compiled in the middle of training.
        """
        device = torch.empty(0, device=device).device  # "cuda" is a wish, cuda:0 a device
        if substitute := _SUBSTITUTES.get(device.type):
            self._plain = substitute()
        if self.request == "plain" or (self.request == "compiled" and substitute):
            return
        if self.request == "auto":
            missing = _why_not_compiled(device, self.format.block)
            if numel < COMPILE_FROM:
                missing = f"{numel:,} elements a step are too few to compile for, below {COMPILE_FROM:,}"
            if missing:
                self.kernel, self.reason = "plain", missing
                return
        try:
            for direction, dtype in itertools.product(("pack", "unpack"), dtypes):
                variant = Variant(direction, dtype, self.format.bits, self.format.block, device)
                self._compiled[direction, dtype, device] = compiled(variant)
        except CompilationError as error:
            if self.request == "compiled":
                raise RuntimeError(
                    f"Quantizer(kernel='compiled'): {error}. Use kernel='plain', which needs no compiler, or 'auto'"
                ) from error
            warnings.warn(f"Quantizer: {error}. Using the plain kernel", RuntimeWarning, stacklevel=2)
            self.kernel, self.reason = "plain", f"compiling failed ({error})"
            self._compiled.clear()
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
        """Quantise 1-D contiguous ``values`` of any float dtype into a message of their number, of this format."""
        self._check(values, packed)
        if values.numel() != packed.numel:
            raise ValueError(f"{values.numel()} values do not fit a message of {packed.numel} elements")
        for where, codes, scales in packed.rows(0, packed.numel):
            rows = values[where].view(codes.shape[0], -1)
            self._kernel("pack", rows).encode(rows, codes, scales, self.format.bits)

    @torch.no_grad()
    def unpack(self, packed: Packed, values: torch.Tensor, start: int = 0) -> None:
        """Decode a range of whole blocks, ``start`` on, into 1-D contiguous ``values`` of any float dtype."""
        self._check(values, packed)
        stop = start + values.numel()
        if start < 0 or stop > packed.numel:
            raise ValueError(f"elements {start} to {stop} are not all in a message of {packed.numel} elements")
        for where, codes, scales in packed.rows(start, stop):
            rows = values[where.start - start : where.stop - start].view(codes.shape[0], -1)
            self._kernel("unpack", rows).decode(codes, scales, rows, self.format.bits)

    def _check(self, values: torch.Tensor, packed: Packed) -> None:
        if packed.format != self.format:
            raise ValueError(f"a message of {packed.format} was given to a quantizer of {self.format}")
        if values.dim() != 1 or not values.is_floating_point() or not values.is_contiguous():
            raise ValueError(f"values must be 1-D, contiguous and of a float dtype, not {_kind_of(values)}")

    def _kernel(self, direction: str, rows: torch.Tensor) -> PlainKernel | DryRunKernel | CompiledKernel | TritonKernel:
        """The one for these rows; a shorter last block is a row of its own, not worth a compilation."""
        whole_blocks = rows.shape[1] == self.format.block
        return (self._compiled.get((direction, rows.dtype, rows.device)) if whole_blocks else None) or self._plain


# ---- the plain kernel ------------------------------------------------------------------------------------------------
#
# Every kernel has two calls, on blocks as rows: `encode(values, codes, scales, bits)` reads the first and writes the
# others, `decode(codes, scales, values, bits)` the other way. `values` are [blocks, elements] of any float dtype,
# `codes` [blocks, elements * bits / 8] int8 or uint8, `scales` [blocks, 1] fp32; the first two contiguous.


class PlainKernel:
    """In plain torch, some elements at a time, in scratch that each thread keeps: 5 bytes an element.

    Fresh memory for every temporary would cost several times the copy that fills it.
    """

    def __init__(self) -> None:
        self._kept = threading.local()

    def _scratch(self, name: str, dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
        """Room for a chunk, good until the next chunk **on the same stream**: streams do not wait for each other."""
        kept: dict[str, torch.Tensor] = self._kept.__dict__
        device, numel = like.device, like.numel()
        key = f"{name} {device} {accelerator_of(device).current_stream(device).key}"
        if key not in kept or kept[key].numel() < numel:
            kept[key] = torch.empty(max(numel, CHUNK), dtype=dtype, device=device)
        return kept[key][:numel].view(like.shape)

    def encode(self, values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bits: int) -> None:
        """Quantise rows."""
        step = max(chunk_on(values.device) // values.shape[1], 1)
        for v, c, s in zip(values.split(step), codes.split(step), scales.split(step), strict=True):
            x = self._scratch("wide", torch.float32, v)
            wide = v if v.dtype == torch.float32 else x.copy_(v)
            # The largest and the negated smallest: a pass over absolute values would need room for them.
            torch.maximum(wide.amax(1, keepdim=True), wide.amin(1, keepdim=True).neg_(), out=s)
            s.mul_(1.0 / levels(bits)).clamp_min_(TINY)
            torch.mul(wide, s.reciprocal(), out=x).round_()
            if bits == 8:
                c.copy_(x)
            else:
                low, high = self._scratch("codes", torch.int8, v).copy_(x).view(torch.uint8).chunk(2, 1)
                torch.bitwise_or(low.bitwise_and_(15), high.bitwise_left_shift_(4), out=c.view(torch.uint8))

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, values: torch.Tensor, bits: int) -> None:
        """Decode rows."""
        step = max(chunk_on(values.device) // values.shape[1], 1)
        for c, s, v in zip(codes.split(step), scales.split(step), values.split(step), strict=True):
            narrow = v.dtype != torch.float32
            x = self._scratch("wide", torch.float32, v) if narrow else v
            if bits == 8:
                x.copy_(c)
            else:
                (low, high), half, c = x.chunk(2, 1), self._scratch("codes", torch.int8, c), c.view(torch.int8)
                # A shift to the left and back to the right spreads the sign of a half byte.
                low.copy_(torch.bitwise_left_shift(c, 4, out=half).bitwise_right_shift_(4))
                high.copy_(torch.bitwise_right_shift(c, 4, out=half))
            x.mul_(s)
            if narrow:
                v.copy_(x)


def chunk_on(device: torch.device) -> int:
    """How many elements the plain kernel takes at a time."""
    return CHUNK_ON_GPU if accelerator_of(device).has_streams else CHUNK


class DryRunKernel:
    """A dry run's: one pass over the values each way, and nothing to keep."""

    def encode(self, values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bits: int) -> None:
        """Read ``values``."""
        values.clone()

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, values: torch.Tensor, bits: int) -> None:
        """Write ``values``."""
        values.copy_(values)


_SUBSTITUTES = {"meta": DryRunKernel}
"""By kind of device: the kernel where values are not there."""


# ---- the compiled kernel of a CPU ------------------------------------------------------------------------------------
#
# What the compiler is given is written so that inductor makes one loop over rows of it, around one loop that finds the
# largest and one that writes codes, the row still in the nearest cache:
#
# - the row length is a constant; only the number of rows is dynamic;
# - the largest of each row is *returned*: as soon as the scales are written in the same function, a third loop over
#   rows in steps of 16 splits the fused one, and the values are read from memory twice;
# - codes become whole numbers by way of int32, which is quicker than from fp32 to int8 at once (7.0 ms against 8.2 to
#   pack 2**25 bf16);
# - half bytes are taken apart in fp32, exactly: with shifts of int32 unpacking takes four times as long;
# - the halves of a row are two tensors; slices that are written inside become masks.


def pack8_lines(values: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Write ``int8`` codes ``[blocks, elements]``, and return the largest of each row, fp32 ``[blocks, 1]``."""
    x = values.to(torch.float32)
    top = x.abs().amax(1, keepdim=True)
    codes.copy_((x * _inverse(x, top, 127)).round().to(torch.int32))
    return top


def pack4_lines(values: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """The same with ``int8`` codes ``[blocks, elements / 2]``, two in a byte."""
    x = values.to(torch.float32)
    top = x.abs().amax(1, keepdim=True)
    low, high = (x * _inverse(x, top, 7)).round().to(torch.int32).chunk(2, 1)
    codes.copy_((low & 15) | (high << 4))
    return top


def _inverse(x: torch.Tensor, top: torch.Tensor, most: int) -> torch.Tensor:
    """The inverse of each row's scale, ``[blocks, 1]``.

    C++ may not keep it in a register: a store of an ``int8`` could have changed what it is computed from, so it would
    be divided anew for every vector of codes. As the result of a reduction it is computed once a row. The reduction
    must run over elements of the row to be in the row's loop; 0 times a finite number adds nothing.
    """
    inverse = 1.0 / (top * (1.0 / most)).clamp_min(TINY)
    return (x[:, :32] * 0.0 + inverse).amax(1, keepdim=True)


def unpack8_lines(codes: torch.Tensor, scales: torch.Tensor, values: torch.Tensor) -> None:
    """Write ``values``."""
    values.copy_(codes.to(torch.float32) * scales)


def unpack4_lines(codes: torch.Tensor, scales: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> None:
    """The same from ``int8`` codes ``[blocks, elements / 2]``, the halves of a row apart.

    A byte b is 16 high + low when low is not negative, else 16 (high + 1) + low: so high is b / 16 rounded down, and
    low is b less 16 times b / 16 rounded to the nearest, as low is within -7 and 7. All exact.
    """
    b = codes.to(torch.float32)
    sixteenth = b * 0.0625
    low.copy_((b - 16.0 * sixteenth.round()) * scales)
    high.copy_(sixteenth.floor() * scales)


class Variant(NamedTuple):
    """What is compiled separately: for ``pack`` or ``unpack``, a dtype of the values, a row length, one GPU."""

    direction: str
    dtype: torch.dtype
    bits: int
    block: int
    device: torch.device


class CompiledKernel:
    """The compiled lines of a :class:`Variant`, which has one of the two directions."""

    def __init__(self, lines: Callable[..., Any]) -> None:
        self.lines = lines

    def encode(self, values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bits: int) -> None:
        """Quantise rows."""
        # A thread's first question for their number makes it take on the process's; the compiled code does not ask.
        torch.get_num_threads()
        top = self.lines(values, codes.view(torch.int8))
        scales.copy_(top.mul_(1.0 / levels(bits)).clamp_min_(TINY))

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, values: torch.Tensor, bits: int) -> None:
        """Decode rows."""
        torch.get_num_threads()
        self.lines(codes.view(torch.int8), scales, *((values,) if bits == 8 else values.chunk(2, 1)))


def _why_not_compiled(device: torch.device, block: int) -> str:
    if device.type != "cpu" and block > WIDEST_ON_GPU:
        return f"blocks of {block:,} elements are too wide for a GPU's registers, above {WIDEST_ON_GPU:,}"
    return why_not_compiled(device.type)


@compiled_once
@torch.no_grad()
def compiled(variant: Variant) -> CompiledKernel | TritonKernel:
    """The compiled kernel of a variant, compared with the plain one. The first call in a process takes seconds.

    A CompilationError: no compiler, a failed compilation, or a result with other bits than the plain kernel's.
    """
    if missing := _why_not_compiled(variant.device, variant.block):
        raise CompilationError(missing)
    values, codes, scales, truth = _sample(variant)
    finite = torch.isfinite(values).all(1)
    with compilation():
        kernel = (_compile if variant.device.type == "cpu" else _triton_kernel)(variant, values, codes, scales)
        got_codes, got_scales, got = codes.clone(), scales.clone(), torch.zeros_like(values)
        for rows in (slice(None), slice(1)):  # one row is a size that compilers like to treat apart
            whole, odd = finite[rows], ~finite[rows]
            if variant.direction == "pack":
                kernel.encode(values[rows], got_codes.zero_()[rows], got_scales.zero_()[rows], variant.bits)
                same = torch.equal(got_codes[rows][whole], codes[rows][whole])
                found, expected = got_scales[rows], scales[rows]
            else:
                kernel.decode(codes[rows], scales[rows], got.zero_()[rows], variant.bits)
                same, found, expected = True, got[rows], truth[rows]
            if not (same and torch.equal(found[whole], expected[whole])) or torch.isfinite(found[odd]).any():
                raise CompilationError(
                    f"the compiler's code to {variant.direction} {variant.bits} bits gives other bits than plain "
                    "torch; is a flag like -ffast-math set?"
                )
    return kernel


def _triton_kernel(variant: Variant, *_: torch.Tensor) -> TritonKernel:
    """Compiled at its first launch."""
    from deepzero.comm.triton_quantization import TritonKernel  # a CPU's torch brings no Triton

    return TritonKernel(1.0 / levels(variant.bits), TINY)


def _compile(variant: Variant, values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> CompiledKernel:
    """Compiled by a first call, for any number of rows."""
    from torch._dynamo import mark_dynamic  # seconds; only who compiles waits for them

    kernel, as_int8 = CompiledKernel(_lines(variant)), torch.zeros_like(codes).view(torch.int8)
    # Separate tensors of the right strides, so that the compiler sees no two views of one storage, one of them written:
    # in use the halves of a row are, and do not overlap.
    parts = 1 if variant.bits == 8 else 2
    halves = [torch.zeros_like(values).chunk(parts, 1)[i] for i in range(parts)]
    given = [values, as_int8] if variant.direction == "pack" else [codes.view(torch.int8), scales, *halves]
    tensors = [tensor.detach() for tensor in given]
    for tensor in tensors:
        mark_dynamic(tensor, 0)
    kernel.lines(*tensors)
    return kernel


def _lines(variant: Variant) -> Callable[..., Any]:
    lines = {"pack8": pack8_lines, "pack4": pack4_lines, "unpack8": unpack8_lines, "unpack4": unpack4_lines}
    words = (variant.direction, variant.bits, variant.block, variant.dtype)
    name = "_".join(str(word).removeprefix("torch.") for word in words)
    return compile_apart(lines[f"{variant.direction}{variant.bits}"], name)  # type: ignore[arg-type]


def _sample(variant: Variant) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of every kind, and what the plain kernel makes of them: values, codes, scales, decoded values."""
    block, top = variant.block, levels(variant.bits)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, block, generator=generator, dtype=torch.float32)
    x[1] = 0
    x[2] *= 2.0**-130  # denormal, for those who have such numbers
    x[3] = (x[3] / x[3].abs().max()).clamp(-1, 1) * torch.finfo(variant.dtype).max
    x[4] = (torch.arange(block) % (2 * top) - top) + 0.5  # halves between two codes, with a scale of 1
    x[4, 0] = top
    x[5] *= torch.logspace(-30, 4, block)
    x[6] = -3.0
    x[7, block // 2] = torch.nan
    x[8, 1] = -torch.inf
    values = x.to(device=variant.device, dtype=variant.dtype)
    # A scale may lie anywhere in a message: code for scales at an address of 16 bytes would be for some only.
    scales = torch.zeros(len(x) + 1, device=variant.device)[1:, None]
    width, dtype = block * variant.bits // 8, torch.int8 if variant.bits == 8 else torch.uint8
    codes, decoded = torch.zeros(len(x), width, dtype=dtype, device=variant.device), torch.zeros_like(values)
    PlainKernel().encode(values, codes, scales, variant.bits)
    PlainKernel().decode(codes, scales, decoded, variant.bits)
    return values, codes, scales, decoded
