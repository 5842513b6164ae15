"""Adam's arithmetic on the CPU in one pass over memory: two kernels, and which of them an optimizer steps with.

A step reads the gradient and reads and writes the parameter and two moments; nothing is computed that a processor would
call work, so time is bytes. With a bf16 gradient and a bf16 copy of the new parameter, 28 bytes an element must move; a
fused Adam between a cast of the whole gradient and one of the whole parameter moves 40. Two ways to move 28:

``chunked``    torch's own fused kernel on :data:`CHUNK` elements at a time, between two casts in the cache.
``compiled``   :func:`adam_lines`, ten lines, through ``torch.compile`` on whole tensors. Needs a C++ compiler.

**What decides the bits.** ``chunked`` gives torch's: its vector loop may contract a multiplication and an addition into
one rounding, and its scalar loop over the last few elements does so elsewhere. Chunks are multiples of 64 elements, as
the shares of torch's threads are, so that the same elements fall into the scalar loop for every chunk size and thread
count. ``compiled`` rounds after each operation (contraction is off): an element's bits depend on its own numbers
alone, and are those of :func:`adam_lines` in plain torch, with which it is compared before it is used.

Sources: [Adam]; [AdamW]; [ZeRO-Offload], section 5, "Optimized CPU execution"; [DeepSpeed]'s
``csrc/adam/cpu_adam_impl.cpp`` does it with hand-written vector intrinsics. Left out: AMSGrad, maximization.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeAlias

import torch

from deepzero.utils.compile import CompilationError, compilation, compile_apart, compiled_once, why_not_compiled
from deepzero.utils.threads import thread_pool

CHUNK = 3 << 16
"""Elements, a multiple of 64. What is touched twice of a chunk, 8 bytes an element, stays in a core's L2 cache; shorter
chunks would cost more in calls, some ten microseconds for each."""
BLOCK = 8
"""Chunks that a thread takes at once from what is left, at most."""
SAMPLE = 2051
"""Elements that a kernel is compiled and checked with: full vectors, and a rest."""
COMPILE_FROM = 1 << 23
"""Elements. Below, a step saves less than 2 ms by being compiled, which takes ten seconds."""
KERNELS = ("auto", "chunked", "compiled")

# What is compiled separately: dtypes of parameter, gradient and output (None: no output), and ``beta1 > 0.5``.
Variant: TypeAlias = "tuple[torch.dtype, torch.dtype, torch.dtype | None, bool]"
Lines: TypeAlias = Callable[..., None]
Kernel: TypeAlias = "ChunkedAdam | CompiledAdam"


class Segment(NamedTuple):
    """The tensors of one parameter: all contiguous, of one shape, on one device."""

    param: torch.Tensor  # fp32; bf16 or fp16 are widened for the arithmetic and rounded back
    exp_avg: torch.Tensor  # fp32, the mean of gradients
    exp_avg_sq: torch.Tensor  # fp32, the mean of squared gradients
    grad: torch.Tensor  # bf16, fp16, fp32 or fp64; only read
    out: torch.Tensor | None = None  # the new parameter is written here once more, in bf16, fp16 or fp32

    def flat(self) -> list[Any]:
        """All five as 1-D views."""
        return [None if tensor is None else tensor.detach().view(-1) for tensor in self]


class Numbers(NamedTuple):
    """The hyper-parameters of one parameter in one step; ``step`` counts from 1."""

    step: float
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool  # AdamW's decay of the parameter; otherwise Adam's, which adds to the gradient
    bias_correction: bool
    scale: float  # gradients are divided by it; a number that fp32 can hold

    @classmethod
    def of(cls, group: Mapping[str, Any], step: float, scale: float) -> Numbers:
        """Those of a parameter group, whose numbers may be tensors."""
        lr, eps, weight_decay = (float(group[name]) for name in ("lr", "eps", "weight_decay"))
        beta1, beta2 = map(float, group["betas"])
        modes = group["decoupled_weight_decay"], group["bias_correction"]
        return cls(step, lr, beta1, beta2, eps, weight_decay, *modes, scale)

    def tensor(self) -> torch.Tensor:
        """fp32 ``[9]`` for :func:`adam_lines`, each number computed in float64 and rounded once, as torch does it."""
        correction1 = 1.0 - self.beta1**self.step if self.bias_correction else 1.0
        correction2 = 1.0 - self.beta2**self.step if self.bias_correction else 1.0
        l2, decay = (0.0, 1.0 - self.lr * self.weight_decay) if self.decoupled else (self.weight_decay, 1.0)
        numbers = [self.scale, l2, decay, 1.0 - self.beta1, self.beta2, 1.0 - self.beta2]
        return torch.tensor([*numbers, self.lr / correction1, math.sqrt(correction2), self.eps], dtype=torch.float32)


# ---- threads ---------------------------------------------------------------------------------------------------------


def in_threads(starts: range, act: Callable[[int, int], None]) -> None:
    """``act(thread, start)`` for all ``starts``, in as many threads as torch has, inside which torch uses one core.

    Torch divides every operation among its own threads and waits for all of them at its end. A pass over memory in
    chunks makes hundreds of such waits, and GNU's OpenMP waits by spinning: where the cores have other work too, the
    thread that spins keeps the one it waits for from its core, and a step on 50 M elements took 2.7 s instead of 0.12 s
    (two cores, load 5). Threads that take start after start from a common heap wait once, at the end.

    ``act`` sees gradients switched off. What it raises is raised here, after all threads have ended.
    """
    left = iter(starts)  # of all threads: a range gives its next number in one step under Python's lock

    def work(thread: int) -> None:
        with torch.no_grad():  # a thread has its own gradient mode
            for start in left:
                act(thread, start)

    if (count := min(torch.get_num_threads(), len(starts))) <= 1:
        work(0)
        return
    with _MAKING:
        pool = _pool(os.getpid(), count)
    errors = [future.exception() for future in [pool.submit(work, thread) for thread in range(count)]]
    if raised := [error for error in errors if error is not None]:
        raise raised[0]


_MAKING = threading.Lock()


@functools.cache
def _pool(_process: int, count: int) -> ThreadPoolExecutor:
    """Threads are kept; a fork copies the executor and not its threads, so each process has its own."""
    before, met = torch.get_num_threads(), threading.Barrier(count)

    def begin() -> None:
        torch.get_num_threads()  # a new thread's first look sets it to the process's number, also after it has been set
        torch.set_num_threads(1)
        met.wait()

    pool = thread_pool(count, "deepzero-offload")
    for future in [pool.submit(begin) for _ in range(count)]:
        future.result()
    # A thread's number of threads is its own, but torch also gives the last one that was set to threads yet to come.
    torch.set_num_threads(before)
    return pool


# ---- chunked ---------------------------------------------------------------------------------------------------------


class ChunkedAdam:
    """Torch's fused kernel on one chunk (of a multiple of 64 elements; no bit depends on it) after the other."""

    name, chunk = "chunked", CHUNK

    def __init__(self) -> None:
        # For each thread fp32 room for a chunk of the parameter and one of the gradient. Kept: fresh memory costs more
        # than the casts. One optimizer does not step twice at once.
        self._rooms: list[tuple[torch.Tensor, ...]] = []

    def ready(self, variants: Iterable[Variant]) -> None:
        """Nothing has to be made."""

    def update(self, segment: Segment, numbers: Numbers) -> None:
        """One step on one parameter."""
        flat, numel, threads = segment.flat(), segment.param.numel(), torch.get_num_threads()
        fused = _fused(numbers, segment.param.device)
        # The fused kernel writes the divided gradient back, and the gradient is the caller's: it divides a copy.
        copies_grad = segment.grad.dtype != torch.float32 or numbers.scale != 1.0
        copies_param = segment.param.dtype != torch.float32
        # Each thread comes back several times, so that one which lost its core leaves the rest to the others.
        block = self.chunk * max(1, min(BLOCK, numel // (4 * threads * self.chunk)))
        starts = range(0, numel, block)
        while len(self._rooms) < min(threads, len(starts)):
            self._rooms.append(torch.empty(2, self.chunk, dtype=torch.float32).unbind())

        def work(thread: int, start: int) -> None:
            views = [itertools.repeat(None) if t is None else t[start : start + block].split(self.chunk) for t in flat]
            for param, exp_avg, exp_avg_sq, grad, out in zip(*views, strict=False):
                # Views are made for the last chunk alone: they cost a part of what a chunk does.
                wide, divided = self._rooms[thread]
                if (n := param.numel()) < self.chunk:
                    wide, divided = wide[:n], divided[:n]
                wide = wide.copy_(param) if copies_param else param
                fused(wide, divided.copy_(grad) if copies_grad else grad, exp_avg, exp_avg_sq)
                if copies_param:
                    param.copy_(wide)
                if out is not None:
                    out.copy_(param)

        in_threads(starts, work)


def _fused(numbers: Numbers, device: torch.device) -> Lines:
    """Torch's fused kernel for parameter, gradient and both moments, all fp32."""
    number = functools.partial(torch.full, (), dtype=torch.float32, device=device)
    # Both corrections are ``1 - beta**step``, which is exactly 1 at infinity.
    step = [number(fill_value=numbers.step if numbers.bias_correction else math.inf)]
    kernel = functools.partial(
        torch._fused_adamw_ if numbers.decoupled else torch._fused_adam_,
        lr=numbers.lr, beta1=numbers.beta1, beta2=numbers.beta2, weight_decay=numbers.weight_decay, eps=numbers.eps,
        amsgrad=False, maximize=False, grad_scale=None if numbers.scale == 1.0 else number(fill_value=numbers.scale),
    )  # fmt: skip
    return lambda param, grad, exp_avg, exp_avg_sq: kernel([param], [grad], [exp_avg], [exp_avg_sq], [], step)


def update_on_device(segment: Segment, numbers: Numbers) -> None:
    """One step where the tensors lie on a GPU: torch's fused kernel on the whole tensor, casts around it."""
    param = segment.param.detach()
    wide = param.to(torch.float32)
    # As on the CPU, the kernel writes the divided gradient back, so it gets a copy.
    grad = segment.grad.detach().to(torch.float32, copy=numbers.scale != 1.0)
    _fused(numbers, param.device)(wide, grad, segment.exp_avg, segment.exp_avg_sq)
    if wide is not param:
        param.copy_(wide)
    if segment.out is not None:
        segment.out.detach().copy_(param)


# ---- the lines -------------------------------------------------------------------------------------------------------


def adam_lines(
    root: Callable[[torch.Tensor], torch.Tensor],
    small_weight: bool,
    param: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    out: torch.Tensor | None,
    numbers: torch.Tensor,
) -> None:
    """Adam and AdamW, written down once: what is compiled, and what the compiled is compared with.

    Dividing by a scale of 1, adding 0 times the parameter and multiplying it by a decay of 1 change no bit, so one
    compiled function serves both modes with and without a scale. ``root`` is ``torch.sqrt`` for the compiler and
    :func:`exact_root` for plain torch; ``small_weight`` is ``1 - beta1 < 0.5``, as the two forms of a mean lose nothing
    near a weight of 0, or of 1; ``out`` is None with a narrow ``param``, which is rounded before it is passed on;
    ``numbers`` is :meth:`Numbers.tensor`, as numbers in a tensor change without a recompilation.
    """
    scale, l2, decay, weight, beta2, weight2, step_size, correction2, eps = numbers.unbind()
    wide = param.to(torch.float32)
    g = grad.to(torch.float32) / scale + wide * l2
    m = exp_avg + weight * (g - exp_avg) if small_weight else g - (1.0 - weight) * (g - exp_avg)
    v = exp_avg_sq * beta2 + weight2 * g * g
    wide = wide * decay - step_size * m / (root(v) / correction2 + eps)
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)
    param.copy_(wide)
    if out is not None:
        out.copy_(wide)


def exact_root(v: torch.Tensor) -> torch.Tensor:
    """The square root, rounded once, as a processor's instruction has it. MKL's, in ``torch.sqrt``, is not always."""
    return v.to(torch.float64).sqrt().to(torch.float32)


def line_by_line(small_weight: bool) -> Lines:
    """``adam_lines`` in plain torch, without its first two arguments, by chunks: its temporaries are fresh memory."""

    def lines(*tensors: Any) -> None:
        views = [itertools.repeat(None) if t is None else t.split(CHUNK) for t in tensors[:-1]]
        for chunk in zip(*views, strict=False):
            given: list[Any] = [*chunk, tensors[-1]]
            adam_lines(exact_root, small_weight, *given)

    return lines


# ---- compiled --------------------------------------------------------------------------------------------------------


class CompiledAdam:
    """:func:`adam_lines`, compiled once for each ``Variant`` by ``torch.compile``.

    With ``strict`` what cannot be compiled raises. Otherwise a variant that is first met in the middle of training and
    cannot be compiled runs line by line, with a warning: slower, the same bits.
    """

    name = "compiled"

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self._plain: dict[Variant, Lines] = {}  # what could not be compiled

    def ready(self, variants: Iterable[Variant]) -> None:
        """Compile; raises a :class:`CompilationError` only with ``strict``."""
        for variant in map(_without_narrow_out, variants):
            try:
                if variant not in self._plain:
                    compiled(variant)
            except CompilationError as error:
                if self.strict:
                    raise
                _warn(f"{error}. This step and later ones run uncompiled for these dtypes: slower, with the same bits")
                self._plain[variant] = line_by_line(variant[3])

    def update(self, segment: Segment, numbers: Numbers) -> None:
        """One step on one parameter."""
        *flat, out = segment.flat()
        small_weight = numbers.beta1 > 0.5
        variant = _without_narrow_out((flat[0].dtype, flat[3].dtype, None if out is None else out.dtype, small_weight))
        # A thread's first question for their number makes it take on the process's; the compiled code does not ask.
        torch.get_num_threads()
        # torch.compile treats sizes 0 and 1 as constants of the program. The lines are quick enough for them.
        lines = self._plain.get(variant) if flat[0].numel() > 1 else line_by_line(small_weight)
        lines = lines or compiled(variant)
        lines(*flat, None if variant[2] is None else out, numbers.tensor())
        if out is not None and variant[2] is None:
            out.copy_(flat[0])


def _without_narrow_out(variant: Variant) -> Variant:
    """A narrow parameter is rounded before it is passed on, and inductor may leave out a rounding on the way."""
    return variant if variant[0] == torch.float32 else (variant[0], variant[1], None, variant[3])


@compiled_once
def compiled(variant: Variant) -> Lines:
    """``adam_lines`` without its first two arguments, compiled. The first call takes seconds.

    A CompilationError: no compiler, a failed compilation, or a result with other bits than the lines themselves.
    """
    if missing := why_not_compiled():
        raise CompilationError(missing)
    with compilation():
        got, expected = _sample(variant), _sample(variant)
        lines = _by_torch(variant, got)
        lines(*got)
    adam_lines(exact_root, variant[3], *expected)
    for one, other in zip(got, expected, strict=True):
        if one is not None and other is not None and not torch.equal(one, other):
            raise CompilationError(
                "the compiled code gives other bits than the same lines in torch, so they would depend on where an "
                "element lies; is a flag like -ffast-math set?"
            )
    return lines


def _by_torch(variant: Variant, sample: list[Any]) -> Lines:
    """One function for all lengths, numbers and thread counts."""
    from torch._dynamo import mark_dynamic  # seconds; only who compiles waits for them

    for tensor in sample[:5]:
        if tensor is not None:
            mark_dynamic(tensor, 0)
    names = "_".join(str(dtype).removeprefix("torch.") for dtype in variant[:3])
    call = compile_apart(adam_lines, f"adam_{names}{'' if variant[3] else '_large_weight'}")
    return functools.partial(call, torch.sqrt, variant[3])


def _sample(variant: Variant) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    param, m, v, grad = (torch.randn(SAMPLE, generator=generator, dtype=torch.float32) for _ in range(4))
    numbers = Numbers(3.0, 0.01, 0.9 if variant[3] else 0.3, 0.99, 1e-8, 0.1, True, True, 3.0)
    out = None if variant[2] is None else torch.zeros(SAMPLE, dtype=variant[2])
    return [param.to(variant[0]), m, v.square_(), grad.to(variant[1]), out, numbers.tensor()]


# ---- which one -------------------------------------------------------------------------------------------------------


def choose_kernel(request: str, numel: int, variants: Sequence[Variant]) -> tuple[Kernel, str]:
    """The kernel for the lifetime of an optimizer whose step updates ``numel`` elements, and why, in a few words.

    ``variants`` are what the first step needs; compiled here, so that a failure is known before anything is written. A
    kernel that is not there, for which an optimizer that was pickled long ago may ask, is a ValueError.
    """
    if request not in KERNELS:
        raise ValueError(f"CPUAdam has no kernel {request!r}; there are {', '.join(KERNELS)}")
    if request == "chunked":
        return ChunkedAdam(), "as asked for"
    if not (strict := request == "compiled") and numel < COMPILE_FROM:
        return ChunkedAdam(), f"{numel:,} elements are too few to compile for, below {COMPILE_FROM:,}"
    if not strict and (missing := why_not_compiled()):
        return ChunkedAdam(), missing
    try:
        CompiledAdam(True).ready(variants)
    except CompilationError as error:
        if strict:
            advice = "Use kernel='chunked', which needs no compiler, or 'auto'"
            raise RuntimeError(f"CPUAdam(kernel='compiled'): {error}. {advice}") from error
        _warn(f"the compiled kernel is not used: {error}")
        return ChunkedAdam(), f"compiling failed ({error})"
    return CompiledAdam(strict), "as asked for" if strict else f"{numel:,} elements and a C++ compiler"


def _warn(message: str) -> None:
    warnings.warn(f"CPUAdam: {message}", RuntimeWarning, stacklevel=2)
