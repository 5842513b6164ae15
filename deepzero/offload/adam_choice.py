"""Which of Adam's kernels an optimizer uses for its lifetime: one question, asked before its first step."""

from __future__ import annotations

from collections.abc import Sequence

from deepzero.comm.compiling import CompilationError, why_not_compiled
from deepzero.offload.adam_kernels import (
    ChunkedAdam,
    CompiledAdam,
    Kernel,
    Variant,
    warn,
)

COMPILE_FROM = 1 << 23
"""Elements. Below, a step saves less than 2 ms by being compiled, and compiling takes some ten seconds."""


def choose_kernel(request: str, numel: int, variants: Sequence[Variant]) -> tuple[Kernel, str]:
    """The kernel for the lifetime of an optimizer.

    Args:
        request: ``auto``, ``chunked`` or ``compiled``.
        numel: elements that a step updates.
        variants: what the first step needs; compiled here, so that a failure is known before anything is written.

    Returns:
        The kernel, and why it was chosen, in a few words.

    Raises:
        RuntimeError: ``compiled`` was asked for and cannot be had.
    """
    if request == "chunked":
        return ChunkedAdam(), "as asked for"
    if request == "auto":
        if numel < COMPILE_FROM:
            return ChunkedAdam(), f"{numel:,} elements are too few to compile for, below {COMPILE_FROM:,}"
        missing = why_not_compiled()
        if missing:
            return ChunkedAdam(), missing
    try:
        CompiledAdam(strict=True).ready(variants)
    except CompilationError as error:
        if request == "compiled":
            raise RuntimeError(
                f"CPUAdam(kernel='compiled'): {error}. Use kernel='chunked', which needs no compiler, or 'auto'"
            ) from error
        warn(f"{error}. Using the chunked kernel")
        return ChunkedAdam(), f"compiling failed ({error})"
    if request == "compiled":
        return CompiledAdam(strict=True), "as asked for"
    return CompiledAdam(strict=False), f"{numel:,} elements and a C++ compiler"
