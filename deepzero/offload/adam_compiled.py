"""Adam's lines, compiled: by ``torch.compile`` where there is a C++ compiler, or by Numba; the same bits from both.

What is compiled is compared with the lines in plain torch, bit for bit, before it updates anything.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

import torch

from deepzero.offload.adam_kernels import Lines, Numbers, Segment, Variant, adam_lines, exact_root, line_by_line
from deepzero.utils.compile import CompilationError, compilation, compile_apart, why_not_compiled

SAMPLE = 2051
"""Elements of the tensors that a kernel is compiled and checked with: full vectors and blocks, and a rest."""


def why_not(name: str) -> str:
    """Why this kernel cannot be had here, as far as can be told without trying; empty when it seems possible.

    Args:
        name: ``compiled`` or ``numba``.
    """
    if name == "compiled":
        return why_not_compiled()
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        return "Numba is switched off by NUMBA_DISABLE_JIT"
    try:
        return "" if find_spec("numba") is not None else "no Numba (pip install 'deepzero[numba]')"
    except ValueError as error:  # something else stands under its name
        return f"no Numba ({error})"


class CompiledAdam:
    """:func:`~deepzero.offload.adam_kernels.adam_lines`, compiled once for each :data:`Variant` in the process.

    Args:
        strict: what cannot be compiled raises. Otherwise a variant that is first met in the middle of training and
            cannot be compiled runs line by line, with a warning: slower, the same bits.
        name: by whom, ``compiled`` (``torch.compile``) or ``numba``.
    """

    def __init__(self, strict: bool, name: str = "compiled") -> None:
        self.strict, self.name = strict, name
        self._plain: dict[Variant, Lines] = {}
        """What could not be compiled."""

    def ready(self, variants: Iterable[Variant]) -> None:
        """Compile.

        Raises:
            CompilationError: only with ``strict``.
        """
        for variant in map(_without_narrow_out, variants):
            if variant in self._plain:
                continue
            try:
                compiled(self.name, variant)
            except CompilationError as error:
                if self.strict:
                    raise
                warn(f"{error}. This step and later ones run uncompiled for these dtypes: slower, with the same bits")
                self._plain[variant] = line_by_line(variant[3])

    def update(self, segment: Segment, numbers: Numbers) -> None:
        """One step on one parameter."""
        variant = _without_narrow_out((*segment.variant, numbers.beta1 > 0.5))
        # A thread's first question for their number makes it take on the process's; the compiled code does not ask.
        torch.get_num_threads()
        flat = [t.detach().view(-1) for t in (segment.param, segment.exp_avg, segment.exp_avg_sq, segment.grad)]
        out = None if segment.out is None else segment.out.detach().view(-1)
        # torch.compile treats sizes 0 and 1 as constants of the program. The lines are quick enough for them.
        lines = self._plain.get(variant) if flat[0].numel() > 1 else line_by_line(variant[3])
        lines = lines or compiled(self.name, variant)
        lines(*flat, None if variant[2] is None else out, numbers.tensor())
        if out is not None and variant[2] is None:
            out.copy_(flat[0])


def _without_narrow_out(variant: Variant) -> Variant:
    """A narrow parameter is rounded before it is passed on, and inductor may leave out a rounding on the way."""
    return variant if variant[0] == torch.float32 else (variant[0], variant[1], None, variant[3])


_COMPILED: dict[tuple[str, Variant], Lines] = {}
_COMPILING = threading.Lock()


def compiled(name: str, variant: Variant) -> Lines:
    """``adam_lines``, compiled for some dtypes, without its first two arguments. The first call takes seconds.

    Args:
        name: ``compiled`` or ``numba``.
        variant: the dtypes, and which of the two forms of the mean.

    Raises:
        CompilationError: no compiler, a failed compilation, or a result with other bits than the lines themselves.
    """
    found = _COMPILED.get((name, variant))
    if found is None:
        with _COMPILING:
            found = _COMPILED.get((name, variant))
            if found is None:
                found = _COMPILED[name, variant] = _compile_and_check(name, variant)
    return found


def _compile_and_check(name: str, variant: Variant) -> Lines:
    missing = why_not(name)
    if missing:
        raise CompilationError(missing)
    with compilation("Numba" if name == "numba" else "torch.compile"):
        got, expected = _sample(variant), _sample(variant)
        lines = (_by_numba if name == "numba" else _by_torch)(variant, got)
        lines(*got)
    adam_lines(exact_root, variant[3], *expected)
    for one, other in zip(got, expected, strict=True):
        if one is not None and other is not None and not torch.equal(one, other):
            flag = "; is a flag like -ffast-math set?" if name == "compiled" else ""
            raise CompilationError(
                "the compiled code gives other bits than the same lines in torch, so they would depend on where "
                f"an element lies{flag}"
            )
    return lines


def _by_torch(variant: Variant, given: list[Any]) -> Lines:
    """One function for all lengths, numbers and thread counts."""
    from torch._dynamo import mark_dynamic  # seconds; only who compiles waits for them

    for tensor in given[:5]:
        if tensor is not None:
            mark_dynamic(tensor, 0)
    small_weight = variant[3]
    names = "_".join(str(dtype).removeprefix("torch.") for dtype in variant[:3])
    call = compile_apart(adam_lines, f"adam_{names}{'' if small_weight else '_large_weight'}")

    def lines(*tensors: torch.Tensor | None) -> None:
        call(torch.sqrt, small_weight, *tensors)

    return lines


def _by_numba(variant: Variant, _given: list[Any]) -> Lines:
    from deepzero.offload.adam_numba import numba_lines  # a second

    return numba_lines(variant)


def _sample(variant: Variant) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    param, m, v, grad = (torch.randn(SAMPLE, generator=generator, dtype=torch.float32) for _ in range(4))
    numbers = Numbers(3.0, 0.01, 0.9 if variant[3] else 0.3, 0.99, 1e-8, 0.1, True, True, 3.0)
    out = None if variant[2] is None else torch.zeros(SAMPLE, dtype=variant[2])
    return [param.to(variant[0]), m, v.square_(), grad.to(variant[1]), out, numbers.tensor()]


def warn(message: str) -> None:
    """Say it as a Python warning."""
    warnings.warn(f"CPUAdam: {message}", RuntimeWarning, stacklevel=2)
