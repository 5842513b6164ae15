"""Values for a model that was constructed on the ``meta`` device, where tensors have shapes and no memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from deepzero.utils.errors import ConfigError


@torch.no_grad()
def materialize(model: nn.Module, device: torch.device, done: Callable[[nn.Module], None]) -> None:
    """Give values on ``device`` to parameters on the ``meta`` device, module by module: ``done`` gets each at once.

    Values are those that each module's ``reset_parameters`` draws, in the order of ``model.modules()``; a module that
    cannot make them raises a ConfigError.
    """
    advice = "construct the model inside deepzero.zero.Init() instead"
    for name, module in model.named_modules():
        params = {key: param for key, param in module._parameters.items() if param is not None}
        metas = {key: param for key, param in params.items() if param.is_meta}
        whole = [key for key in params if key not in metas]
        empty = {key: b for key, b in module._buffers.items() if b is not None and b.is_meta}
        if not metas and not empty:
            continue
        reset: Any = getattr(module, "reset_parameters", None)
        problem, meta = "", f"module {name!r} ({type(module).__name__}) is on the meta device and"
        if not callable(reset):
            problem = f"{meta} has no reset_parameters() to make its values; {advice}"
        elif empty and not type(module).__module__.startswith("torch.nn"):
            # Torch's own modules fill their buffers there (BatchNorm's); others usually make them once, in __init__.
            problem = f"{meta} its reset_parameters() need not fill buffer {next(iter(empty))!r}; {advice}"
        elif whole and metas:
            problem = (
                f"module {name!r} has {next(iter(metas))!r} on the meta device and values in {whole[0]!r}, which "
                "reset_parameters() would overwrite; load all of its parameters, or none"
            )
        if problem:
            raise ConfigError(problem)
        for param in dict.fromkeys(metas.values()):  # each once, whatever its names
            # The object stays the same one: optimizers and tied modules hold it.
            made = nn.Parameter(torch.empty_like(param, device=device), param.requires_grad)
            torch.utils.swap_tensors(param, made)
        for key, buffer in empty.items():
            module._buffers[key] = torch.zeros_like(buffer, device=device)
        reset()
        done(module)
