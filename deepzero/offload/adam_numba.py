"""Adam's lines as machine code where no C++ compiler is: Numba's, which brings LLVM along as a Python package.

:func:`~deepzero.offload.adam_kernels.adam_lines` says what is computed, on whole tensors; :func:`_adam` says it again
for one element after the other, operation by operation in the same order, which is all that Numba can read. Both have
the same bits: nothing here may contract, reorder or approximate (Numba's ``fastmath`` is off). Which NaN comes out of a
NaN is another matter: here that of bf16 is 0x7FC0, and torch's vector loops write 0xFFFF.

A step goes through the tensors in blocks of :data:`BLOCK` elements. What is narrow is widened into a room of a block's
extent, in the cache; the arithmetic runs from there; what is to be narrow is rounded on its way out. Three short loops
in place of one, because LLVM turns a loop into vector instructions only when it can tell that its arrays do not
overlap, and asks no more than eight such questions a loop.

Imported late: Numba takes a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

BLOCK = 1024
"""Elements: five arrays of them and their rooms stay in a core's L1 cache."""

# nogil: threads of Python run side by side. error_model: a division by zero is infinite and not an exception, which
# would keep the loop from vector instructions.
_compile = njit(nogil=True, error_model="numpy")


# ---- numbers of 16 bits, which Numba does not have: read and written as uint16 ---------------------------------------


def _instruction(result: Any, argument: Any, generate: Callable[[Any, Any], Any]) -> Any:
    """A function of one number, for compiled code alone; ``generate(builder, value)`` writes its LLVM instructions."""

    @intrinsic
    def instruction(_context: Any, _value: Any) -> Any:
        return result(argument), lambda _context, builder, _signature, given: generate(builder, given[0])

    return instruction


_float, _half = ir.FloatType(), ir.HalfType()
_float_of = _instruction(types.float32, types.uint32, lambda b, bits: b.bitcast(bits, _float))
_bits_of = _instruction(types.uint32, types.float32, lambda b, number: b.bitcast(number, ir.IntType(32)))
_fp16_of = _instruction(types.float32, types.uint16, lambda b, bits: b.fpext(b.bitcast(bits, _half), _float))
# To nearest, ties to even.
_bits_of_fp16 = _instruction(
    types.uint16, types.float32, lambda b, number: b.bitcast(b.fptrunc(number, _half), ir.IntType(16))
)


@_compile
def _bf16_of(bits):  # type: ignore[no-untyped-def]
    return _float_of(np.uint32(np.uint32(bits) << np.uint32(16)))  # Numba shifts into 64 bits


@_compile
def _bits_of_bf16(number):  # type: ignore[no-untyped-def]
    bits = _bits_of(number)
    # Half of what is cut off rounds up, an exact half only to an even number.
    rounded = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.uint16(rounded if number == number else np.uint32(0x7FC0))  # or else: not a number


def _loop(convert: Any) -> Any:
    """A compiled ``target[i] = convert(source[i])``, which returns ``target``."""
    convert = _compile(convert) if not hasattr(convert, "py_func") else convert

    @_compile
    def loop(source, target):  # type: ignore[no-untyped-def]
        for i in range(len(source)):
            target[i] = convert(source[i])
        return target

    return loop


@_compile
def _as_it_is(source, _target):  # type: ignore[no-untyped-def]
    return source


# Reading returns the fp32 array to compute with: the room, filled, or the source itself.
_READ = {
    torch.float32: _as_it_is,
    torch.float64: _loop(lambda number: np.float32(number)),
    torch.bfloat16: _loop(_bf16_of),
    torch.float16: _loop(lambda bits: _fp16_of(bits)),
}
_WRITE = {
    torch.float32: _loop(lambda number: number),
    torch.bfloat16: _loop(_bits_of_bf16),
    torch.float16: _loop(lambda number: _bits_of_fp16(number)),
}


# ---- the step --------------------------------------------------------------------------------------------------------


@_compile
def _mean_small_weight(exp_avg, g, weight):  # type: ignore[no-untyped-def]
    return exp_avg + weight * (g - exp_avg)


@_compile
def _mean_large_weight(exp_avg, g, weight):  # type: ignore[no-untyped-def]
    return g - (np.float32(1.0) - weight) * (g - exp_avg)


@_compile
def _adam(mean, param, exp_avg, exp_avg_sq, grad, numbers):  # type: ignore[no-untyped-def]
    """``adam_lines`` for fp32 arrays of one extent."""
    scale, l2, decay, weight, beta2 = numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]
    weight2, step_size, correction2, eps = numbers[5], numbers[6], numbers[7], numbers[8]
    for i in range(len(param)):
        g = grad[i] / scale + param[i] * l2
        m = mean(exp_avg[i], g, weight)
        v = exp_avg_sq[i] * beta2 + weight2 * g * g
        exp_avg[i] = m
        exp_avg_sq[i] = v
        param[i] = param[i] * decay - step_size * m / (np.sqrt(v) / correction2 + eps)


@_compile
def _blocks(  # type: ignore[no-untyped-def]
    read_param, write_param, read_grad, write_out, mean,
    param, exp_avg, exp_avg_sq, grad, out, numbers, start, end,
):  # fmt: skip
    """Elements ``start`` to ``end`` of all arrays, block by block."""
    rooms = np.empty((2, BLOCK), np.float32)
    for a in range(start, end, BLOCK):
        b = min(a + BLOCK, end)
        wide = read_param(param[a:b], rooms[0, : b - a])
        g = read_grad(grad[a:b], rooms[1, : b - a])
        _adam(mean, wide, exp_avg[a:b], exp_avg_sq[a:b], g, numbers)
        write_param(wide, param[a:b])
        write_out(wide, out[a:b])


def numba_lines(variant: tuple[torch.dtype, torch.dtype, torch.dtype | None, bool]) -> Callable[..., None]:
    """A part of ``adam_lines``: takes the first and the last element's number, and what that takes after its first two.

    The first call compiles, in about a second.

    Args:
        variant: dtypes of parameter, gradient and output (None: no output), and ``beta1 > 0.5``.

    Raises:
        RuntimeError: fp16 on a processor without instructions for it.
    """
    param, grad, out, small_weight = variant
    if torch.float16 in variant and _lacks_fp16():
        raise RuntimeError("this processor has no instructions that convert fp16")
    functions = (
        _READ[param],
        _as_it_is if param == torch.float32 else _WRITE[param],  # fp32 is updated where it lies
        _READ[grad],
        _as_it_is if out is None else _WRITE[out],
        _mean_small_weight if small_weight else _mean_large_weight,
    )

    def lines(start: int, end: int, *tensors: Any) -> None:
        arrays = [_array(tensors[0] if tensor is None else tensor) for tensor in tensors]
        _blocks(*functions, *arrays, start, min(end, len(arrays[0])))

    return lines


def _lacks_fp16() -> bool:
    """LLVM would call functions that are not there, and end the process."""
    triple, _, features = cpu_target.target_context.codegen().magic_tuple()
    return str(triple).startswith(("x86", "i686")) and "+f16c" not in str(features)


def _array(tensor: torch.Tensor) -> Any:
    """The tensor's memory as NumPy's array; 16 bits of any float as uint16."""
    return (tensor.view(torch.uint16) if tensor.element_size() == 2 else tensor).numpy()
