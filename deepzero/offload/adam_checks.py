"""What CPUAdam refuses before it writes anything: each message says what, where, and what to do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from deepzero.comm.process_group import real_device_type

PARAM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of parameters, and of what is written into ``out``."""

GRAD_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def one_number(value: float | torch.Tensor, name: str) -> float:
    """As fp32 holds it."""
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise ValueError(f"CPUAdam.step(): {name} has shape {list(value.shape)}; give a number or a one-element tensor")
    try:
        number = torch.tensor(float(value), dtype=torch.float32).item()
    except (TypeError, ValueError) as error:
        raise TypeError(f"CPUAdam.step(): {name}={value!r} is not a number") from error
    if not 0.0 < number < math.inf:
        raise ValueError(
            f"CPUAdam.step(): {name}={float(value)}, but gradients are divided by it: it must be positive "
            "and finite in fp32"
        )
    return number


def check_numbers(group: Mapping[str, Any], where: str) -> None:
    """Hyper-parameters that a step could not use."""
    if group.get("amsgrad"):
        raise ValueError(f"{where}: amsgrad=True is not implemented by CPUAdam; torch.optim.AdamW has it")
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"{where}: betas={betas!r} must be two numbers")
    for i, beta in enumerate(betas):
        if not 0.0 <= float(beta) < 1.0:
            raise ValueError(f"{where}: betas[{i}]={float(beta)} must be at least 0 and below 1")
    for name in ("lr", "eps", "weight_decay"):
        if not 0.0 <= float(group[name]) < math.inf:
            raise ValueError(f"{where}: {name}={float(group[name])} must be finite and not negative")


def check_param(param: torch.Tensor, name: str, placeholders: bool = False) -> None:
    """A parameter that a step could not update; before the first step a placeholder may stand for it."""
    if param.dtype not in PARAM_DTYPES:
        raise ValueError(f"{name} has dtype {param.dtype}; CPUAdam takes {listed(PARAM_DTYPES)}")
    with torch._C.DisableTorchFunctionSubclass():  # zero.Init leaves one element, spread; a master takes its place
        fits = param.layout == torch.strided and (param.is_contiguous() or (placeholders and not any(param.stride())))
    if not fits:
        raise ValueError(f"{name} of shape {list(param.shape)} is not contiguous; give CPUAdam param.contiguous()")
    if real_device_type(param.device) not in ("cpu", "cuda"):
        raise ValueError(f"{name} lies on {param.device}; CPUAdam steps parameters on cpu and cuda")


def check_tensor(tensor: Any, what: str, param: torch.Tensor, dtypes: Sequence[torch.dtype]) -> None:
    """A gradient, output or moment that does not fit its parameter."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{what} is {type(tensor).__name__}, not a tensor")
    if tensor.layout != torch.strided:
        raise ValueError(f"{what} is sparse ({tensor.layout}); CPUAdam needs it dense: to_dense()")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{what} has dtype {tensor.dtype}; CPUAdam takes {listed(dtypes)}")
    if tensor.shape != param.shape:
        raise ValueError(f"{what} has shape {list(tensor.shape)}, the parameter has {list(param.shape)}")
    if tensor.device != param.device:
        raise ValueError(f"{what} lies on {tensor.device}, the parameter on {param.device}; copy it there first")
    if not tensor.is_contiguous():
        raise ValueError(f"{what} of shape {list(tensor.shape)} is not contiguous; pass a contiguous tensor")


def listed(dtypes: Sequence[torch.dtype]) -> str:
    """Names of dtypes."""
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def subset(
    only: Sequence[torch.Tensor], places: Mapping[int, tuple[str, dict[str, Any], torch.Tensor]]
) -> list[tuple[str, dict[str, Any], torch.Tensor]]:
    """The parameters of ``only=`` with what is known of them."""
    chosen = []
    for i, param in enumerate(only):
        if id(param) not in places:
            raise ValueError(f"CPUAdam.step(only=...): only[{i}] is not a parameter of this optimizer")
        chosen.append(places[id(param)])
    if len({id(param) for param in only}) != len(chosen):
        raise ValueError("CPUAdam.step(only=...) names a parameter twice, which would be stepped twice")
    return chosen
