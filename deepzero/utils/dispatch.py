"""Operations of our own inside of a model: unseen by torch's dispatch modes, and by the pass that is under way."""

from __future__ import annotations

from contextlib import AbstractContextManager, ContextDecorator, nullcontext
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


class outliving_pass(ContextDecorator):
    """What is made within, or in a function so decorated, outlives the pass under way: no graph, no inference tensors.

    ``torch.no_grad`` and ``torch.inference_mode(False)`` together are the same for 5 µs; a fetch comes by ten times.
    """

    def _recreate_cm(self) -> AbstractContextManager[Any]:  # type: ignore[override]
        # Nothing has to change in a backward pass, nor within another such function. Each call notes what was before.
        changes = torch.is_grad_enabled() or torch.is_inference_mode_enabled()
        return outliving_pass() if changes else _NOTHING

    def __enter__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._mode = torch.inference_mode(False) if torch.is_inference_mode_enabled() else _NOTHING
        self._mode.__enter__()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *raised: Any) -> None:
        torch._C._set_grad_enabled(self._grad)
        self._mode.__exit__(*raised)
