"""Adam's lines as machine code where no C++ compiler is: Numba's, which brings LLVM along as a Python package.

:func:`~deepzero.offload.adam_kernels.adam_lines` says what is computed, on whole tensors; :func:`_adam` says it again
for one element after the other, operation by operation in the same order, which is all that Numba can read. Both have
the same bits: nothing here may contract, reorder or approximate (Numba's ``fastmath`` is off), and each variant is
compared with the lines before it is used (:mod:`deepzero.offload.adam_compiled`).

A step goes through the tensors in blocks of :data:`BLOCK` elements. What is narrow is widened into a room of a block's
extent, in the cache; the arithmetic runs from there; what is to be narrow is rounded on its way out. Three short loops
in place of one, because LLVM turns a loop into vector instructions only when it can tell that its arrays do not
overlap, and asks no more than eight such questions a loop.

Which NaN comes out of a NaN is another matter: here that of bf16 is 0x7FC0, and torch's vector loops write 0xFFFF.

Imported late: Numba takes a second.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from deepzero.offload.adam_kernels import Lines, Variant
from deepzero.offload.threads import in_threads

BLOCK = 1024
"""Elements: five arrays of them and their rooms stay in a core's L1 cache."""

# nogil: threads of Python run side by side. error_model: a division by zero is infinite and not an exception, which
# would keep the loop from vector instructions.
_compile = njit(nogil=True, error_model="numpy")


# ---- numbers of 16 bits, which Numba does not have: read and written as uint16 ---------------------------------------


@intrinsic
def _float_of(_context: Any, _bits: Any) -> Any:
    """The fp32 number with these 32 bits."""
    return types.float32(types.uint32), lambda _c, build, _s, given: build.bitcast(given[0], ir.FloatType())


@intrinsic
def _bits_of(_context: Any, _number: Any) -> Any:
    """The 32 bits of an fp32 number."""
    return types.uint32(types.float32), lambda _c, build, _s, given: build.bitcast(given[0], ir.IntType(32))


@intrinsic
def _float_of_half(_context: Any, _bits: Any) -> Any:
    """The fp16 number with these 16 bits, in fp32."""

    def generate(_c: Any, build: Any, _s: Any, given: Any) -> Any:
        return build.fpext(build.bitcast(given[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), generate


@intrinsic
def _half_of(_context: Any, _number: Any) -> Any:
    """The 16 bits of an fp32 number rounded to fp16, to nearest, ties to even."""

    def generate(_c: Any, build: Any, _s: Any, given: Any) -> Any:
        return build.bitcast(build.fptrunc(given[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), generate


# Reading returns the fp32 array to compute with: the room, filled, or the source itself.


@_compile
def _read_fp32(source, _room):  # type: ignore[no-untyped-def]
    return source


@_compile
def _read_fp64(source, room):  # type: ignore[no-untyped-def]
    for i in range(len(source)):
        room[i] = np.float32(source[i])
    return room


@_compile
def _read_bf16(source, room):  # type: ignore[no-untyped-def]
    for i in range(len(source)):
        room[i] = _float_of(np.uint32(np.uint32(source[i]) << np.uint32(16)))  # Numba shifts into 64 bits
    return room


@_compile
def _read_fp16(source, room):  # type: ignore[no-untyped-def]
    for i in range(len(source)):
        room[i] = _float_of_half(source[i])
    return room


@_compile
def _write_nowhere(_wide, _target):  # type: ignore[no-untyped-def]
    pass


@_compile
def _write_fp32(wide, target):  # type: ignore[no-untyped-def]
    for i in range(len(wide)):
        target[i] = wide[i]


@_compile
def _write_bf16(wide, target):  # type: ignore[no-untyped-def]
    for i in range(len(wide)):
        bits = _bits_of(wide[i])
        # Half of what is cut off rounds up, an exact half only to an even number.
        rounded = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        target[i] = np.uint16(rounded if wide[i] == wide[i] else np.uint32(0x7FC0))  # or else: not a number


@_compile
def _write_fp16(wide, target):  # type: ignore[no-untyped-def]
    for i in range(len(wide)):
        target[i] = _half_of(wide[i])


_READ = {torch.float32: _read_fp32, torch.bfloat16: _read_bf16, torch.float16: _read_fp16, torch.float64: _read_fp64}
_WRITE = {torch.float32: _write_fp32, torch.bfloat16: _write_bf16, torch.float16: _write_fp16}


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


def numba_lines(variant: Variant) -> Lines:
    """``adam_lines`` without its first two arguments, for some dtypes. The first call compiles, in about a second.

    Args:
        variant: dtypes of parameter, gradient and output, and which of the two forms of the mean.

    Raises:
        RuntimeError: fp16 on a processor without instructions for it.
    """
    param, grad, out, small_weight = variant
    if torch.float16 in variant and _lacks_fp16():
        raise RuntimeError("this processor has no instructions that convert fp16")
    functions = (
        _READ[param],
        _write_nowhere if param == torch.float32 else _WRITE[param],  # fp32 is updated where it lies
        _READ[grad],
        _write_nowhere if out is None else _WRITE[out],
        _mean_small_weight if small_weight else _mean_large_weight,
    )

    def lines(*tensors: Any) -> None:
        updated, *others, written, numbers = tensors
        arrays = [_array(t) for t in (updated, *others, updated if written is None else written, numbers)]
        numel, threads = len(arrays[0]), torch.get_num_threads()
        # Each thread comes back a few times, so that one which lost its core leaves the rest to the others. Not more
        # often: it may have to wait for Python's lock, up to 5 ms while another thread computes in Python.
        share = max(BLOCK, numel if threads == 1 else numel // (4 * threads))
        starts = deque(range(0, numel, share))

        def work(_thread: int) -> None:
            while True:
                try:
                    start = starts.popleft()
                except IndexError:  # nothing is left
                    return
                _blocks(*functions, *arrays, start, min(start + share, numel))

        in_threads(max(1, min(threads, len(starts))), work)

    return lines


def _lacks_fp16() -> bool:
    """LLVM would call functions that are not there, and end the process."""
    triple, _, features = cpu_target.target_context.codegen().magic_tuple()
    return str(triple).startswith(("x86", "i686")) and "+f16c" not in str(features)


def _array(tensor: torch.Tensor) -> Any:
    """The tensor's memory as NumPy's array; 16 bits of any float as uint16."""
    return (tensor.view(torch.uint16) if tensor.element_size() == 2 else tensor).numpy()
