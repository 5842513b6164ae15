"""The optimizer step on this rank's share: unscale and clip, step. Shared by all stages, composed.

Step 4 of a training step. Before it, every rank holds the *sum* over ranks and micro-batches of its part of the
gradients, times the loss scale. Mean, loss scale and clipping are one division:

    g = sum / (ranks * micro-batches * loss_scale * clip)       clip = max(1, (norm + 1e-6) / max_norm)

It happens in fp32 after all additions, so nothing can overflow or underflow on the way, and it is exact whenever the
divisor is a power of two. A divisor of one is skipped: then the optimizer sees the very bits that autograd produced.
torch's fused optimizers divide while they step (``grad_scale``), which saves a pass over memory; others get
:func:`unscale_and_clip_grads` first. Both divide by the same fp32 number, and so give the same bits.

The scale that is divided out is the one that multiplied this step's loss. DeepSpeed updates the scale first, and halves
the gradient of every step on which the scale doubles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MasterPart:
    """One optimizer tensor and where its gradient lies."""

    master: torch.Tensor
    """fp32 leaf that the optimizer holds."""
    grad: torch.Tensor
    """Reduced gradient, the master's extent, in the accumulation dtype."""


def clip_divisor(norm: float, max_norm: float) -> float:
    """What gradients of global norm ``norm`` are divided by so that the norm becomes at most ``max_norm``.

    ``max_norm = 0`` switches clipping off. torch multiplies by ``max_norm / (norm + 1e-6)``; this is its inverse.

    Example:
        >>> clip_divisor(10.0, 2.0), clip_divisor(1.0, 2.0), clip_divisor(10.0, 0.0)
        (5.0000005, 1.0, 1.0)
    """
    return max(1.0, (norm + 1e-6) / max_norm) if max_norm > 0 else 1.0


def unscale_and_clip_grads(grads: Sequence[torch.Tensor], divisor: torch.Tensor) -> None:
    """Divide gradients in place by a one-element fp32 tensor."""
    for grad in grads:
        grad.div_(divisor)


class ShardedStep:
    """Runs the user's optimizer over this rank's masters.

    Args:
        optimizer: its param groups hold exactly the masters.
        parts: one for each master.
        sub_group_size: step on at most this many elements at a time (one part is never cut); None: on all. What the
            optimizer makes besides its state, and gradients that have to be widened, then exist for one sub-group only.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, parts: Sequence[MasterPart], sub_group_size: int | None = None
    ) -> None:
        self.optimizer, self.parts = optimizer, list(parts)
        self.sub_groups = _sub_groups(self.parts, sub_group_size)
        # torch's contract with GradScaler: such an optimizer divides by the attribute ``grad_scale`` while it steps.
        self._divides = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        self._allowed = False
        self._masters = {id(part.master) for part in self.parts}
        optimizer.register_step_pre_hook(self._refuse_direct_step)

    def _refuse_direct_step(self, *_: object) -> None:
        if not self._allowed:
            raise RuntimeError(
                "optimizer.step() was called directly; under ZeRO this rank's optimizer holds a share of the "
                "parameters and its gradients are not reduced yet. Call engine.step() instead"
            )

    @torch.no_grad()
    def step(self, divisor: float) -> None:
        """Unscale and clip, then step. The masters are new afterwards; the model is not, until they are published.

        Args:
            divisor: the number by which the reduced sums are divided; see the module's text.
        """
        held = [id(param) for group in self.optimizer.param_groups for param in group["params"]]
        if len(held) != len(self._masters) or not self._masters.issuperset(held):
            raise RuntimeError(
                "the optimizer's parameters have changed since deepzero.initialize (add_param_group, an assignment to "
                "param_groups): ZeRO has no gradients for the new ones. Build the optimizer with all groups first"
            )
        for parts in self.sub_groups:
            self._step_sub_group(parts, divisor)

    def _step_sub_group(self, parts: Sequence[MasterPart], divisor: float) -> None:
        """Torch's optimizers pass over parameters without gradient: those of the other sub-groups."""
        for part in parts:
            part.master.grad = part.grad if part.grad.dtype == torch.float32 else part.grad.to(torch.float32)
        grads = [part.master.grad for part in parts if part.master.grad is not None]
        scale = torch.tensor(divisor, dtype=torch.float32, device=grads[0].device) if grads else None
        fused_division = self._divides and divisor != 1.0
        if divisor != 1.0 and not fused_division and scale is not None:
            unscale_and_clip_grads(grads, scale)
        try:
            self._allowed = True
            if fused_division:
                self.optimizer.grad_scale = scale  # type: ignore[attr-defined]
                self.optimizer.found_inf = None  # type: ignore[attr-defined]
            self.optimizer.step()
        finally:
            self._allowed = False
            if fused_division:
                del self.optimizer.grad_scale, self.optimizer.found_inf  # type: ignore[attr-defined]
        for part in parts:
            part.master.grad = None


def _sub_groups(parts: Sequence[MasterPart], limit: int | None) -> list[list[MasterPart]]:
    groups: list[list[MasterPart]] = [[]]
    total = 0
    for part in parts:
        if groups[-1] and limit is not None and total + part.master.numel() > limit:
            groups.append([])
            total = 0
        groups[-1].append(part)
        total += part.master.numel()
    return groups
