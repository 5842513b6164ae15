"""Which of Adam's kernels an optimizer uses for its lifetime: one question, asked before its first step."""

from __future__ import annotations

from collections.abc import Sequence

from deepzero.offload.adam_compiled import CompiledAdam, warn, why_not
from deepzero.offload.adam_kernels import ChunkedAdam, Kernel, Variant
from deepzero.utils.compile import CompilationError

COMPILE_FROM = 1 << 23
"""Elements. Below, a step saves less than 2 ms by being compiled; compiling takes ten seconds in C++, one in Numba."""

COMPILERS = {"compiled": "a C++ compiler", "numba": "Numba"}
"""In the order in which ``auto`` tries them: the C++ compiler's code is a fifth faster, and the bits are the same."""

KERNELS = ("auto", "chunked", *COMPILERS)


def choose_kernel(request: str, numel: int, variants: Sequence[Variant]) -> tuple[Kernel, str]:
    """The kernel for the lifetime of an optimizer.

    Args:
        request: one of :data:`KERNELS`.
        numel: elements that a step updates.
        variants: what the first step needs; compiled here, so that a failure is known before anything is written.

    Returns:
        The kernel, and why it was chosen, in a few words.

    Raises:
        RuntimeError: ``compiled`` or ``numba`` was asked for and cannot be had.
    """
    if request == "chunked":
        return ChunkedAdam(), "as asked for"
    if request == "auto":
        return _choose(numel, variants)
    try:
        CompiledAdam(True, request).ready(variants)
    except CompilationError as error:
        raise RuntimeError(
            f"CPUAdam(kernel={request!r}): {error}. Use kernel='chunked', which needs no compiler, or 'auto'"
        ) from error
    return CompiledAdam(True, request), "as asked for"


def _choose(numel: int, variants: Sequence[Variant]) -> tuple[Kernel, str]:
    if numel < COMPILE_FROM:
        return ChunkedAdam(), f"{numel:,} elements are too few to compile for, below {COMPILE_FROM:,}"
    without: list[str] = []  # what could not be had, and why
    for name, compiler in COMPILERS.items():
        missing = why_not(name)
        if not missing:
            try:
                CompiledAdam(True, name).ready(variants)
            except CompilationError as error:
                missing = f"compiling failed ({error})"
                warn(f"the {name} kernel is not used: {error}")
            else:
                return CompiledAdam(False, name), "; ".join([f"{numel:,} elements and {compiler}", *without])
        without.append(missing)
    return ChunkedAdam(), "; ".join(without)
