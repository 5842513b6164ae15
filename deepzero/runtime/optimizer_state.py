"""An optimizer's state before its first step: allocated in advance, and not a bit different later.

Torch creates optimizer state in the first ``step()``. For Adam that is twice the masters' memory, and it arrives after
the data was loaded, the model compiled and a first batch computed. A run that does not fit should say so at the start.

Source: the states are those that the classes in ``torch/optim/`` create in their first step; a test compares them with
it for each class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from deepzero.offload.cpu_adam import CPUAdam
from deepzero.runtime.elementwise_check import borrowed, settings_of, state_like


def allocate_state(optimizer: torch.optim.Optimizer) -> None:
    """Give the optimizer its state before step 0, so that running out of memory happens now and not an hour later.

    The classes of torch that start from constants get exactly the state that their first step would create, and keep
    it. For any other class one step is tried with zero gradients on each parameter in turn, all states are held until
    the last one is made, and everything is put back bit for bit: the peak was reached once, and the first real step
    creates the state itself. No later result changes by a bit in either case.

    Args:
        optimizer: over this rank's masters, 1-D fp32 leaves. State that is there already stays.

    Example:
        >>> master = torch.ones(3, requires_grad=True)
        >>> optimizer = torch.optim.AdamW([master])
        >>> allocate_state(optimizer)
        >>> sorted(optimizer.state[master])
        ['exp_avg', 'exp_avg_sq', 'step']
    """
    initial = _INITIAL.get(type(optimizer))
    unknown: list[tuple[Mapping[str, Any], torch.Tensor]] = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            if optimizer.state.get(param):
                continue
            state = None if initial is None else initial(group, param)
            if state is None:
                unknown.append((group, param))
            elif state:
                optimizer.state[param] = state
    if unknown:
        _reach_peak(optimizer, unknown)


def _reach_peak(optimizer: torch.optim.Optimizer, params: Sequence[tuple[Mapping[str, Any], torch.Tensor]]) -> None:
    # One parameter at a time: the copy that makes the way back exact is then as large as one master, not as all.
    with borrowed(optimizer) as lent, torch.no_grad():
        for group, param in params:
            kept, grad = param.detach().clone(), param.grad
            lent.param_groups = [{**settings_of(group), "params": [param]}]
            try:
                param.grad = torch.zeros_like(param)
                lent.step()
            finally:
                param.copy_(kept)
                param.grad = grad


def _step_count(group: Mapping[str, Any], param: torch.Tensor, value: float = 0.0) -> torch.Tensor:
    """Torch's counters are fp32 tensors, on the CPU unless a kernel on the device reads them."""
    fused = bool(group.get("fused"))
    wide = torch.get_default_dtype() == torch.float64 and not fused
    device = param.device if fused or group.get("capturable") else torch.device("cpu")
    return torch.full((), value, dtype=torch.float64 if wide else torch.float32, device=device)


def _zeros(param: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(param, requires_grad=False)


def _adam(group: Mapping[str, Any], param: torch.Tensor) -> dict[str, Any]:
    state = {"step": _step_count(group, param), "exp_avg": _zeros(param), "exp_avg_sq": _zeros(param)}
    if group["amsgrad"]:
        state["max_exp_avg_sq"] = _zeros(param)
    return state


def _cpu_adam(group: Mapping[str, Any], param: torch.Tensor) -> dict[str, Any]:
    return CPUAdam.initial_state(param)


def _radam(group: Mapping[str, Any], param: torch.Tensor) -> dict[str, Any]:
    return {"step": _step_count(group, param), "exp_avg": _zeros(param), "exp_avg_sq": _zeros(param)}


def _nadam(group: Mapping[str, Any], param: torch.Tensor) -> dict[str, Any]:
    counts = {"step": _step_count(group, param), "mu_product": _step_count(group, param, 1.0)}
    return {**counts, "exp_avg": _zeros(param), "exp_avg_sq": _zeros(param)}


def _adamax(group: Mapping[str, Any], param: torch.Tensor) -> dict[str, Any]:
    return {"step": _step_count(group, param), "exp_avg": _zeros(param), "exp_inf": _zeros(param)}


def _adadelta(group: Mapping[str, Any], param: torch.Tensor) -> dict[str, Any]:
    return {"step": _step_count(group, param), "square_avg": _zeros(param), "acc_delta": _zeros(param)}


def _rmsprop(group: Mapping[str, Any], param: torch.Tensor) -> dict[str, Any]:
    state = {"step": _step_count(group, param), "square_avg": _zeros(param)}
    if group["momentum"] > 0:
        state["momentum_buffer"] = _zeros(param)
    if group["centered"]:
        state["grad_avg"] = _zeros(param)
    return state


def _sgd(group: Mapping[str, Any], param: torch.Tensor) -> dict[str, Any] | None:
    if group["momentum"] == 0:
        return {}
    if group["dampening"] != 0:
        return None  # the first gradient enters undampened, which no initial value can imitate
    # The first step sets the momentum to the gradient; from here it computes momentum * buffer + gradient instead.
    # **Minus zero**, because -0.0 + g has the bits of g for every g, and 0.0 + g has not when g is -0.0.
    return {"momentum_buffer": torch.full_like(param, -0.0, requires_grad=False)}


def makes_state_in_advance(optimizer: torch.optim.Optimizer) -> bool:
    """Whether :func:`allocate_state` leaves state behind; else the optimizer makes its own in its first step."""
    return type(optimizer) in _INITIAL


_INITIAL: dict[type[torch.optim.Optimizer], Callable[[Mapping[str, Any], torch.Tensor], dict[str, Any] | None]] = {
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    CPUAdam: _cpu_adam,
    torch.optim.RAdam: _radam,
    torch.optim.NAdam: _nadam,
    torch.optim.Adamax: _adamax,
    torch.optim.Adadelta: _adadelta,
    torch.optim.RMSprop: _rmsprop,
    torch.optim.SGD: _sgd,
}
"""Exactly these classes: a subclass may do anything. Rprop and ASGD are not here: they start from the learning rate of
their first step, which a schedule may still change."""


def moment_bytes_per_element(optimizer: torch.optim.Optimizer, device: torch.device, number: int | None = None) -> int:
    """Bytes of state that ``optimizer`` keeps for one element of a group: one step on a tensor of our own.

    Args:
        optimizer: still over the model's parameters; nothing of it changes.
        device: where its masters will lie.
        number: the group's; None: the first that has parameters.
    """
    extent = 64
    group = next(g for g in optimizer.param_groups if g["params"])
    if number is not None:
        group = optimizer.param_groups[number]
        if not group["params"]:
            return 0
    tensor = torch.zeros(extent, device=device).requires_grad_()
    tensor.grad = torch.zeros_like(tensor)
    settings, first = settings_of(group), group["params"][0]
    state = state_like(optimizer.state[first], first, tensor) if first in optimizer.state else {}
    with borrowed(optimizer) as lent:
        lent.param_groups = [{**settings, "params": [tensor]}]
        if state:
            lent.state[tensor] = state
        lent.step()
        kept = [
            v for entry in lent.state.values() for v in entry.values() if torch.is_tensor(v) and v.numel() == extent
        ]
    return sum(v.element_size() for v in kept)
