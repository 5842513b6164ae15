"""DeepSpeed's ``deepspeed.ops.adam``: the CPU Adam, and the fused one, under the names that they have there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from deepzero.offload.cpu_adam import CPUAdam

DeepSpeedCPUAdam = CPUAdam


class _MadeByTorch(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.optim.Adam)  # torch's AdamW is one


class FusedAdam(metaclass=_MadeByTorch):
    """Torch's Adam or AdamW in its fused kernel, made with DeepSpeed's arguments; and what ``isinstance`` asks for.

    Args:
        params: tensors or parameter groups.
        lr: learning rate.
        bias_correction: True, the only one: torch's always corrects. ``CPUAdam`` can do without.
        betas: decay of the running means of the gradient and of its square.
        eps: added to the denominator.
        adam_w_mode: AdamW; False: Adam, whose decay is added to the gradient.
        weight_decay: decay rate.
        amsgrad: False, the only one, as there.
        set_grad_none: True, the only one: the argument of ``zero_grad`` says otherwise.

    Returns:
        A ``torch.optim.AdamW`` or ``torch.optim.Adam``.

    Raises:
        ValueError: another value of an argument that has only one.
        TypeError: of a subclass, as it would get torch's class and none of its own methods.

    Source: ``ops/adam/fused_adam.py`` of [DeepSpeed].
    """

    def __new__(  # type: ignore[misc]  # noqa: D102
        cls,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> torch.optim.Optimizer:
        if cls is not FusedAdam:
            raise TypeError(
                f"{cls.__name__} derives from FusedAdam, which is no class of its own in deepzero but makes torch's: "
                "derive from torch.optim.AdamW or torch.optim.Adam and give it fused=True"
            )
        if (bias_correction, amsgrad, set_grad_none) != (True, False, True):
            raise ValueError(
                f"FusedAdam(bias_correction={bias_correction}, amsgrad={amsgrad}, set_grad_none={set_grad_none}): "
                "deepzero's is torch's own, which has True, False and True here"
            )
        kind = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
        return kind(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)


__all__ = ["CPUAdam", "DeepSpeedCPUAdam", "FusedAdam"]
