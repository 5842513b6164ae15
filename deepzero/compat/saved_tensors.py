"""``ds_status`` of a tensor that autograd hands back, for scripts that import ``ZeroParamStatus``.

What an autograd function has saved passes through stage 3's hooks, and torch makes a new tensor of what they return:
the weight's values, gathered, without the attributes of the parameter. DeepSpeed has no such hooks, so there the
parameter itself comes back, and TRL's fused losses ask it whether to gather it. Here the answer is: it is there.
"""

from __future__ import annotations

import torch
from torch import nn

from deepzero.zero import ZeroParamStatus

__all__ = ["ZeroParamStatus"]


def _status(tensor: torch.Tensor) -> ZeroParamStatus:
    """AVAILABLE for a tensor; a parameter has a status only where it belongs to an engine or ``zero.Init``."""
    if isinstance(tensor, nn.Parameter):
        raise AttributeError(f"{type(tensor).__name__!r} object has no attribute 'ds_status'")
    return ZeroParamStatus.AVAILABLE


# A property, as those of torch's own: torch.compile asks the class for each of its names, and for their setters.
torch.Tensor.ds_status = property(_status)  # type: ignore[attr-defined]
