"""Block-wise quantisation of rows, three times: the truth in plain torch, the same bits without fresh memory, compiled.

The format is that of ``comm/quantization.py``; here a block is a row of a matrix. Time is bytes, for nothing is
computed that a processor would call work: packing bf16 in 8 bits reads 2 bytes an element and writes 1.

``encode``, ``decode``  the truth: a line for each step, every temporary fresh memory, which costs several times the
                        copy. Every other kernel is compared with it.
``PlainKernel``         the same steps on :data:`CHUNK` elements at a time in kept scratch. Needs no compiler.
``CompiledKernel``      the same steps through ``torch.compile``: one pass over memory each way.

**All three give the same bits on a CPU**: each operation rounds once, in one order, and what has no rounding (whole
numbers below 2**24, powers of two) may take any way. The compiled code is compared with the truth before it is first
used. On a GPU the decoded bits must be equal too, as all ranks decode; a code may differ by one where a compiler's
division rounds otherwise, which the rank that encodes decides alone. The codes of a block with NaN or infinity mean
nothing and may differ: its scale alone makes it decode to NaN or infinity.

What the compiler is given is written so that inductor makes one loop over rows of it, around one loop that finds the
largest and one that writes codes, the row still in the nearest cache:

- the row length is a constant; only the number of rows is dynamic;
- the largest of each row is *returned*: as soon as the scales are written in the same function, a third loop over rows
  in steps of 16 splits the fused one, and the values are read from memory twice;
- codes become whole numbers by way of int32, which is quicker than from fp32 to int8 at once (7.0 ms against 8.2 to
  pack 2**25 bf16);
- half bytes are taken apart in fp32, exactly: with shifts of int32 unpacking takes four times as long;
- the halves of a row are two tensors; slices that are written inside become masks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from deepzero.utils.compile import CompilationError, compilation, compile_apart, why_not_compiled

TINY = 2.0**-126
"""The smallest normal number of fp32: no scale is smaller, so that its inverse is finite."""

CHUNK = 1 << 18
"""Elements that the plain kernel widens at a time, 1 MiB; they stay in a core's L2 cache of 2 MiB. Shorter chunks cost
more in calls: packing takes a fifth longer with 2**16 (one core of a Xeon)."""


def levels(bits: int) -> int:
    """L: codes reach from -L to L. 127 for 8 bits, 7 for 4."""
    return (1 << (bits - 1)) - 1


# ---- the truth -------------------------------------------------------------------------------------------------------


def encode(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bits: int) -> None:
    """Quantise rows.

    Args:
        values: ``[blocks, elements]``, any float dtype; only read.
        codes: ``[blocks, elements * bits / 8]``, ``int8`` or ``uint8``; written.
        scales: ``[blocks, 1]`` fp32; written.
        bits: 8 or 4.
    """
    x = values.to(torch.float32)
    scale = (x.abs().amax(1, keepdim=True) * (1.0 / levels(bits))).clamp_min(TINY)
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


# ---- plain -----------------------------------------------------------------------------------------------------------


class PlainKernel:
    """:func:`encode` and :func:`decode` in place, in scratch that each thread keeps: 5 bytes for each of ``CHUNK``."""

    name = "plain"

    def __init__(self) -> None:
        self._kept = threading.local()

    def _scratch(self, name: str, dtype: torch.dtype, shape: torch.Size, device: torch.device) -> torch.Tensor:
        """Room for a chunk, good until the next chunk **on the same stream**: streams do not wait for each other."""
        kept: dict[Any, torch.Tensor] = self._kept.__dict__
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        key = f"{name} {device} {stream}"
        room = kept.get(key)
        if room is None or room.numel() < shape.numel():
            room = torch.empty(max(shape.numel(), CHUNK), dtype=dtype, device=device)
            kept[key] = room
        return room[: shape.numel()].view(shape)

    def encode(self, values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bits: int) -> None:
        """As the function, on whole matrices of contiguous rows."""
        step = max(CHUNK // values.shape[1], 1)
        for v, c, s in zip(values.split(step), codes.split(step), scales.split(step), strict=True):
            self._encode(v, c, s, bits)

    def _encode(self, values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bits: int) -> None:
        x = self._scratch("wide", torch.float32, values.shape, values.device)
        wide = values if values.dtype == torch.float32 else x.copy_(values)
        # The largest and the negated smallest: a pass over absolute values would need room for them.
        torch.maximum(wide.amax(1, keepdim=True), wide.amin(1, keepdim=True).neg_(), out=scales)
        scales.mul_(1.0 / levels(bits)).clamp_min_(TINY)
        torch.mul(wide, scales.reciprocal(), out=x).round_()
        if bits == 8:
            codes.copy_(x)
            return
        q = self._scratch("codes", torch.int8, values.shape, values.device).copy_(x).view(torch.uint8)
        low, high = q.chunk(2, 1)
        torch.bitwise_or(low.bitwise_and_(15), high.bitwise_left_shift_(4), out=codes.view(torch.uint8))

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, values: torch.Tensor, bits: int) -> None:
        """As the function, on whole matrices of contiguous rows."""
        step = max(CHUNK // values.shape[1], 1)
        for c, s, v in zip(codes.split(step), scales.split(step), values.split(step), strict=True):
            self._decode(c, s, v, bits)

    def _decode(self, codes: torch.Tensor, scales: torch.Tensor, values: torch.Tensor, bits: int) -> None:
        narrow = values.dtype != torch.float32
        x = self._scratch("wide", torch.float32, values.shape, values.device) if narrow else values
        if bits == 8:
            x.copy_(codes)
        else:
            low, high = x.chunk(2, 1)
            half = self._scratch("codes", torch.int8, codes.shape, codes.device)
            # A shift to the left and back to the right spreads the sign of a half byte.
            torch.bitwise_left_shift(codes.view(torch.int8), 4, out=half)
            low.copy_(half.bitwise_right_shift_(4))
            high.copy_(torch.bitwise_right_shift(codes.view(torch.int8), 4, out=half))
        x.mul_(scales)
        if narrow:
            values.copy_(x)


# ---- compiled --------------------------------------------------------------------------------------------------------


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
    """Write ``values``, all as for :func:`decode`."""
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
    """What is compiled separately."""

    direction: str
    """``pack`` or ``unpack``."""
    dtype: torch.dtype
    """Of the values."""
    bits: int
    block: int
    """Elements of a row."""
    device: torch.device
    """With its index: the code is for one GPU."""


_COMPILED: dict[Variant, Callable[..., Any]] = {}
_COMPILING = threading.Lock()


class CompiledKernel:
    """The compiled lines. Each method's first call for a :class:`Variant` in the process takes seconds.

    Raises:
        CompilationError: from both methods: no compiler, a failed compilation, or a result with other bits.
    """

    name = "compiled"

    def encode(self, values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bits: int) -> None:
        """As the function, on whole matrices of contiguous rows."""
        _run_pack(compiled(Variant("pack", values.dtype, bits, values.shape[1], values.device)), values, codes, scales)

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, values: torch.Tensor, bits: int) -> None:
        """As the function, on whole matrices of contiguous rows."""
        lines = compiled(Variant("unpack", values.dtype, bits, values.shape[1], values.device))
        _run_unpack(lines, codes, scales, values)


def _run_pack(lines: Callable[..., Any], values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    # A thread's first question for their number makes it take on the process's; the compiled code does not ask.
    torch.get_num_threads()
    per_byte = values.shape[1] // codes.shape[1]
    top = lines(values, codes.view(torch.int8))
    scales.copy_(top.mul_(1.0 / levels(8 // per_byte)).clamp_min_(TINY))


def _run_unpack(lines: Callable[..., Any], codes: torch.Tensor, scales: torch.Tensor, values: torch.Tensor) -> None:
    torch.get_num_threads()
    halves = (values,) if codes.shape == values.shape else values.chunk(2, 1)
    lines(codes.view(torch.int8), scales, *halves)


def compiled(variant: Variant) -> Callable[..., Any]:
    """The compiled lines of a variant, checked.

    Raises:
        CompilationError: no compiler, a failed compilation, or a result with other bits than the truth.
    """
    found = _COMPILED.get(variant)
    if found is None:
        with _COMPILING:
            found = _COMPILED.get(variant)
            if found is None:
                found = _COMPILED[variant] = _compile_and_check(variant)
    return found


def _compile(variant: Variant) -> Callable[..., Any]:
    found: dict[tuple[str, int], Callable[..., Any]] = {
        ("pack", 8): pack8_lines,
        ("pack", 4): pack4_lines,
        ("unpack", 8): unpack8_lines,
        ("unpack", 4): unpack4_lines,
    }
    words = (variant.direction, variant.bits, variant.block, variant.dtype, variant.device)
    name = "_".join(str(word).removeprefix("torch.").replace(":", "") for word in words)
    return compile_apart(found[variant.direction, variant.bits], name, variant.device.type)


@torch.no_grad()
def _compile_and_check(variant: Variant) -> Callable[..., Any]:
    missing = why_not_compiled(variant.device.type)
    if missing:
        raise CompilationError(missing)
    from torch._dynamo import mark_dynamic  # seconds; only who compiles waits for them

    values, codes, scales, truth = _sample(variant)
    finite = torch.isfinite(values).all(1)
    with compilation():
        lines = _compile(variant)
        got_codes, got_scales, got = codes.clone(), scales.clone(), torch.zeros_like(values)
        # Separate tensors of the right strides, so that the compiler sees no two views of one storage, one of them
        # written: in use the halves of a row are, and do not overlap.
        if variant.direction == "pack":
            tensors = [values, torch.zeros_like(codes).view(torch.int8)]
        else:
            halves = [got] if variant.bits == 8 else [torch.zeros_like(values).chunk(2, 1)[i] for i in (0, 1)]
            tensors = [codes.view(torch.int8), scales, *halves]
        tensors = [tensor.detach() for tensor in tensors]
        for tensor in tensors:
            mark_dynamic(tensor, 0)
        lines(*tensors)
        for rows in (slice(None), slice(1)):  # one row is a size that compilers like to treat apart
            if variant.direction == "pack":
                _run_pack(lines, values[rows], got_codes.zero_()[rows], got_scales.zero_()[rows])
                _check_pack(got_codes[rows], got_scales[rows], codes[rows], scales[rows], finite[rows], variant)
            else:
                _run_unpack(lines, codes[rows], scales[rows], got.zero_()[rows])
                same = torch.equal(got[rows][finite[rows]], truth[rows][finite[rows]])
                if not same or torch.isfinite(got[rows][~finite[rows]]).any():
                    raise _other_bits(variant)
    return lines


def _check_pack(
    got: torch.Tensor,
    got_scales: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    finite: torch.Tensor,
    variant: Variant,
) -> None:
    same = torch.equal(got_scales[finite], scales[finite]) and not torch.isfinite(got_scales[~finite]).any()
    if variant.device.type == "cpu":
        same = same and torch.equal(got[finite], codes[finite])
    else:  # one step of a scale of 1 in the decoded codes: at most one code apart
        shape, ones = (len(got), variant.block), torch.ones_like(scales)
        ours, theirs = (torch.empty(shape, device=got.device) for _ in range(2))
        decode(got, ones, ours, variant.bits)
        decode(codes, ones, theirs, variant.bits)
        same = same and bool(((ours - theirs)[finite].abs() <= 1).all())
    if not same:
        raise _other_bits(variant)


def _other_bits(variant: Variant) -> CompilationError:
    return CompilationError(
        f"the compiler's code to {variant.direction} {variant.bits} bits gives other bits than plain torch; "
        "is a flag like -ffast-math set?"
    )


def _sample(variant: Variant) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of every kind, and what the truth makes of them: values, codes, scales, decoded values."""
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
    encode(values, codes, scales, variant.bits)
    decode(codes, scales, decoded, variant.bits)
    return values, codes, scales, decoded
