"""``ds_status`` of a tensor that autograd hands back, for scripts that import ``ZeroParamStatus``.

What an autograd function has saved passes through stage 3's hooks, and torch makes a new tensor of what they return:
the weight's values, gathered, without the attributes of the parameter. DeepSpeed has no such hooks, so there the
parameter itself comes back, and TRL's fused losses ask it whether to gather it. Here the answer is: it is there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from deepzero.zero import ZeroParamStatus

__all__ = ["ZeroParamStatus"]


class _StatusOfPlainTensors:
    """AVAILABLE for a tensor; a parameter has a status only where it belongs to an engine or ``zero.Init``."""

    def __get__(self, tensor: torch.Tensor | None, kind: type) -> Any:
        if tensor is None or isinstance(tensor, nn.Parameter):
            raise AttributeError(f"{kind.__name__!r} object has no attribute 'ds_status'")
        return ZeroParamStatus.AVAILABLE


torch.Tensor.ds_status = _StatusOfPlainTensors()  # type: ignore[attr-defined]
