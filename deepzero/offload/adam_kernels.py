"""Adam's arithmetic on the CPU in one pass over memory: the lines to compile, and chunks that stay in cache.

A step reads the gradient and reads and writes the parameter and two moments; nothing is computed that a processor would
call work. So time is bytes. With a bf16 gradient and a bf16 copy of the new parameter, 28 bytes an element must move::

    read  grad 2   param 4   exp_avg 4   exp_avg_sq 4        write  param 4   exp_avg 4   exp_avg_sq 4   out 2

Casting the whole gradient to fp32 first and the whole parameter to bf16 afterwards moves 40, and that is what a fused
Adam with casts around it does. Three ways to move 28:

``chunked``    torch's own fused kernel on :data:`CHUNK` elements at a time, between a cast of the gradient into a
               scratch and a cast of the parameter out of the cache.
``compiled``   :func:`adam_lines`, ten lines, through ``torch.compile`` on whole tensors. Needs a C++ compiler.
``numba``      the same lines through Numba, which brings its own compiler.

**What decides the bits.** ``chunked`` gives torch's: its vector loop may contract a multiplication and an addition
into one rounding, and its scalar loop over the last few elements does so elsewhere. Chunks are multiples of 64
elements, as the shares of torch's threads are, so that the same elements fall into the scalar loop for every chunk size
and thread count.
``compiled`` and ``numba`` round after each operation (contraction is off), so that an element's bits depend on its own
numbers alone, and are those of :func:`adam_lines` run line by line in plain torch; each compiled function is compared
with that once, before it is used (:mod:`deepzero.offload.adam_compiled`).

Sources: ZeRO-Offload (Ren et al. 2021), section 5, "Optimized CPU execution"; DeepSpeed's
``csrc/adam/cpu_adam_impl.cpp`` does it with hand-written vector intrinsics. Left out: AMSGrad, maximization.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch

from deepzero.offload.threads import in_threads

CHUNK = 3 << 16
"""Elements, a multiple of 64. What is touched twice of a chunk, 8 bytes an element, stays in a core's L2 cache; shorter
chunks would cost more in calls, some ten microseconds for each."""

BLOCK = 8
"""Chunks that a thread takes at once from what is left, at most."""

Variant: TypeAlias = "tuple[torch.dtype, torch.dtype, torch.dtype | None, bool]"
"""What is compiled separately: dtypes of parameter, gradient and output (None: no output), and ``beta1 > 0.5``."""

Lines: TypeAlias = Callable[..., None]


@dataclass(frozen=True)
class Segment:
    """The tensors of one parameter: all contiguous, of one shape, on one device."""

    param: torch.Tensor
    """fp32; bf16 or fp16 are widened for the arithmetic and rounded back."""
    exp_avg: torch.Tensor
    """fp32, the mean of gradients."""
    exp_avg_sq: torch.Tensor
    """fp32, the mean of squared gradients."""
    grad: torch.Tensor
    """bf16, fp16, fp32 or fp64. Only read."""
    out: torch.Tensor | None
    """Where the new parameter is written once more, in bf16, fp16 or fp32."""

    @property
    def variant(self) -> tuple[torch.dtype, torch.dtype, torch.dtype | None]:
        """Dtypes of parameter, gradient and output."""
        return self.param.dtype, self.grad.dtype, None if self.out is None else self.out.dtype

    def pieces(self, start: int, end: int, size: int) -> Iterable[tuple[Any, ...]]:
        """Views of ``size`` elements of all five, side by side, from ``start`` on; the last ones may be shorter."""
        tensors = (self.param, self.exp_avg, self.exp_avg_sq, self.grad)
        views = [tensor.detach().view(-1)[start:end].split(size) for tensor in tensors]
        outs = itertools.repeat(None) if self.out is None else self.out.detach().view(-1)[start:end].split(size)
        return zip(*views, outs, strict=False)


@dataclass(frozen=True)
class Numbers:
    """The hyper-parameters of one parameter in one step."""

    step: float
    """This step's number, from 1."""
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    """AdamW's decay of the parameter; otherwise Adam's, which adds to the gradient."""
    bias_correction: bool
    scale: float
    """Gradients are divided by it; a number that fp32 can hold."""

    def tensor(self) -> torch.Tensor:
        """fp32 ``[9]`` for :func:`adam_lines`, each number computed in float64 and rounded once, as torch does it."""
        correction1 = 1.0 - self.beta1**self.step if self.bias_correction else 1.0
        correction2 = 1.0 - self.beta2**self.step if self.bias_correction else 1.0
        l2, decay = (0.0, 1.0 - self.lr * self.weight_decay) if self.decoupled else (self.weight_decay, 1.0)
        numbers = [self.scale, l2, decay, 1.0 - self.beta1, self.beta2, 1.0 - self.beta2]
        return torch.tensor([*numbers, self.lr / correction1, math.sqrt(correction2), self.eps], dtype=torch.float32)


class Kernel(Protocol):
    """One way of doing a step's arithmetic on CPU tensors."""

    name: str

    def ready(self, variants: Iterable[Variant]) -> None:
        """Make what these need. Called before anything is written."""

    def update(self, segment: Segment, numbers: Numbers) -> None:
        """One step on one parameter."""


# ---- chunked ---------------------------------------------------------------------------------------------------------


class ChunkedAdam:
    """Torch's fused kernel on one chunk after the other, in as many threads as torch has.

    Args:
        chunk: elements, a multiple of 64. No result depends on it.
    """

    name = "chunked"

    def __init__(self, chunk: int = CHUNK) -> None:
        if chunk <= 0 or chunk % 64:
            raise ValueError(f"chunk={chunk} must be a positive multiple of 64, as the shares of torch's threads are")
        self.chunk = chunk
        # For each thread, kept: fresh memory costs more than the casts. One optimizer does not step twice at once.
        self._scratch: list[_Scratch] = []

    def ready(self, variants: Iterable[Variant]) -> None:
        """Nothing to make."""

    def update(self, segment: Segment, numbers: Numbers) -> None:
        """One step on one parameter."""
        # The fused kernel writes the divided gradient back, and the gradient is the caller's: it divides a copy.
        scale = None if numbers.scale == 1.0 else torch.tensor(numbers.scale, dtype=torch.float32)
        fused = _fused(numbers, scale)
        none: list[torch.Tensor] = []
        steps = [torch.tensor(_counted(numbers), dtype=torch.float32)]
        copies_grad = segment.grad.dtype != torch.float32 or scale is not None
        copies_param = segment.param.dtype != torch.float32
        numel, threads = segment.param.numel(), torch.get_num_threads()
        # Each thread comes back several times, so that one which lost its core leaves the rest to the others.
        block = self.chunk * max(1, min(BLOCK, numel // (4 * threads * self.chunk)))
        starts = deque(range(0, numel, block))
        threads = max(1, min(threads, len(starts)))
        while len(self._scratch) < threads:
            self._scratch.append(_Scratch(self.chunk))

        def work(i: int) -> None:
            scratch = self._scratch[i]
            while True:
                try:
                    start = starts.popleft()
                except IndexError:  # nothing is left
                    return
                for param, exp_avg, exp_avg_sq, grad, out in segment.pieces(start, start + block, self.chunk):
                    wide = scratch.widened(param, 0) if copies_param else param
                    if copies_grad:
                        grad = scratch.widened(grad, 1)
                    fused([wide], [grad], [exp_avg], [exp_avg_sq], none, steps)
                    if copies_param:
                        param.copy_(wide)
                    if out is not None:
                        out.copy_(param)

        in_threads(threads, work)


class _Scratch:
    """fp32 room for a chunk of the parameter and one of the gradient; touched when it is first used."""

    def __init__(self, chunk: int) -> None:
        self.rooms = torch.empty(2, chunk, dtype=torch.float32).unbind()

    def widened(self, narrow: torch.Tensor, which: int) -> torch.Tensor:
        """A chunk in fp32, good until the next one is widened into the same room."""
        room, n = self.rooms[which], narrow.numel()
        return (room if n == room.numel() else room[:n]).copy_(narrow)


def _counted(numbers: Numbers) -> float:
    """The step number for the fused kernel. Both corrections are ``1 - beta**step``, which is exactly 1 at infinity."""
    return numbers.step if numbers.bias_correction else math.inf


def _fused(numbers: Numbers, scale: torch.Tensor | None) -> Callable[..., None]:
    """Torch's fused kernel with everything but the lists of tensors filled in; built once, as it is called often."""
    return functools.partial(
        torch._fused_adamw_ if numbers.decoupled else torch._fused_adam_,
        lr=numbers.lr,
        beta1=numbers.beta1,
        beta2=numbers.beta2,
        weight_decay=numbers.weight_decay,
        eps=numbers.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=scale,
    )


def update_on_device(segment: Segment, numbers: Numbers) -> None:
    """One step where the tensors lie on a GPU: torch's fused kernel on the whole tensor, casts around it."""
    device = segment.param.device
    scale = None if numbers.scale == 1.0 else torch.full((), numbers.scale, dtype=torch.float32, device=device)
    step = torch.full((), _counted(numbers), dtype=torch.float32, device=device)
    param, grad = segment.param.detach(), segment.grad.detach()
    # As on the CPU, the kernel writes the divided gradient back, so it gets a copy.
    grad = grad.to(torch.float32, copy=scale is not None)
    wide = param.to(torch.float32)
    _fused(numbers, scale)([wide], [grad], [segment.exp_avg], [segment.exp_avg_sq], [], [step])
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
    compiled function serves both modes with and without a scale.

    Args:
        root: the square root, ``torch.sqrt`` for the compiler and :func:`exact_root` for plain torch.
        small_weight: ``1 - beta1 < 0.5``; the two forms of the same line lose nothing near a weight of 0, or of 1.
        param: fp32, or narrower and widened here.
        exp_avg: fp32.
        exp_avg_sq: fp32.
        grad: any float dtype.
        out: receives the new parameter too; None with a narrow ``param``, which is rounded before it is passed on.
        numbers: :meth:`Numbers.tensor`. Numbers in a tensor change without a recompilation.
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
        *flat, numbers = tensors
        pieces = [None if t is None else t.split(CHUNK) for t in flat]
        for i in range(len(pieces[0] or ())):
            chunk: list[Any] = [None if piece is None else piece[i] for piece in pieces]
            adam_lines(exact_root, small_weight, *[*chunk, numbers])

    return lines
