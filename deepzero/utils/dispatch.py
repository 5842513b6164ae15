"""Operations inside a model that torch's dispatch modes do not see."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

_NOTHING = nullcontext()


def hide_from_checkpointing() -> AbstractContextManager[Any]:
    """Hide operations of our own inside a model from selective checkpointing.

    It numbers the operations of a block, to find their results when the block runs again; what we fetch differs then.
    """
    if not (count := torch._C._len_torch_dispatch_stack()):  # as a rule; each hook of a module comes by
        return _NOTHING
    modes = (torch._C._get_dispatch_stack_at(place) for place in range(count))
    if any(isinstance(mode, (_CachingTorchDispatchMode, _CachedTorchDispatchMode)) for mode in modes):
        return _disable_current_modes()
    return _NOTHING
