"""An optimizer's state before its first step: allocated in advance, and not a bit different later.

Torch creates optimizer state in the first ``step()``. For Adam that is twice the masters' memory, and it arrives after
the data was loaded, the model compiled and a first batch computed. A run that does not fit should say so at the start.

Source: [PyTorch]; the states are those that the classes in ``torch/optim/`` create in their first step, and a test
compares them for each class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from deepzero.config.strict import ConfigError
from deepzero.offload.cpu_adam import CPUAdam
from deepzero.runtime.elementwise_check import borrowed, settings_of, state_like
from deepzero.runtime.muon import Muon, inner_class
from deepzero.runtime.per_tensor import EXTENTS, StateBytes, is_per_tensor

Group = Mapping[str, Any]

_STATES: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.Adam: ("step", "exp_avg", "exp_avg_sq"),
    torch.optim.AdamW: ("step", "exp_avg", "exp_avg_sq"),
    torch.optim.RAdam: ("step", "exp_avg", "exp_avg_sq"),
    torch.optim.NAdam: ("step", "mu_product", "exp_avg", "exp_avg_sq"),
    torch.optim.Adamax: ("step", "exp_avg", "exp_inf"),
    torch.optim.Adadelta: ("step", "square_avg", "acc_delta"),
    torch.optim.RMSprop: ("step", "square_avg"),
    **({torch.optim.Muon: ("momentum_buffer",)} if hasattr(torch.optim, "Muon") else {}),
}
"""What each class starts with, from constants. Exactly these classes: a subclass may do anything. Rprop and ASGD are
left out: they start from the learning rate of their first step, which a schedule may still change."""


def allocate_state(optimizer: torch.optim.Optimizer) -> None:
    """Give the optimizer its state before step 0, so that running out of memory happens now and not an hour later.

    The classes of torch that start from constants get exactly the state that their first step would create, and keep
    it. For any other class one step is tried with zero gradients on each parameter in turn, all states are held until
    the last one is made, and everything is put back bit for bit: the peak was reached once, and the first real step
    creates the state itself. No later result changes by a bit in either case. State that is there already stays.

    Example:
        >>> master = torch.ones(3, requires_grad=True)
        >>> optimizer = torch.optim.AdamW([master])
        >>> allocate_state(optimizer)
        >>> sorted(optimizer.state[master])
        ['exp_avg', 'exp_avg_sq', 'step']
    """
    unknown: list[tuple[Group, torch.Tensor]] = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            if not optimizer.state.get(param):
                if (state := _initial_state(_class_of(optimizer, group), group, param)) is None:
                    unknown.append((group, param))
                elif state:
                    optimizer.state[param] = state
    if not unknown:
        return
    # One parameter at a time: the copy that makes the way back exact is then as large as one master, not as all.
    with borrowed(optimizer) as lent, torch.no_grad():
        for tried, param in unknown:
            kept, grad = param.detach().clone(), param.grad
            lent.param_groups = [{**settings_of(tried), "params": [param]}]
            try:
                param.grad = torch.zeros_like(param)
                lent.step()
            finally:
                param.copy_(kept)
                param.grad = grad


def _class_of(optimizer: torch.optim.Optimizer, group: Group) -> type[torch.optim.Optimizer]:
    """Whose state it has; a derived class may have another, unless it says (a dry run's) that it ``stands_for`` one."""
    found: type[torch.optim.Optimizer] = getattr(optimizer, "stands_for", type(optimizer))
    return inner_class(group) if found is Muon else found


def _initial_state(cls: type[torch.optim.Optimizer], group: Group, param: torch.Tensor) -> dict[str, Any] | None:
    """The state that the first step would make; None: it has to be tried."""
    if cls is CPUAdam:
        return CPUAdam.initial_state(param)
    if cls is torch.optim.SGD:
        if group["momentum"] == 0:
            return {}
        # The first step sets the momentum to the gradient; from here it computes momentum * buffer + gradient instead.
        # **Minus zero**, because -0.0 + g has the bits of g for every g, and 0.0 + g has not when g is -0.0. With
        # dampening the first gradient enters undampened, which no initial value can imitate.
        minus_zero = {"momentum_buffer": torch.full_like(param, -0.0, requires_grad=False)}
        return minus_zero if group["dampening"] == 0 else None
    if cls not in _STATES:
        return None
    more = {
        "max_exp_avg_sq": cls in (torch.optim.Adam, torch.optim.AdamW) and group["amsgrad"],
        "momentum_buffer": cls is torch.optim.RMSprop and group["momentum"] > 0,
        "grad_avg": cls is torch.optim.RMSprop and group["centered"],
    }
    counters = {"step": 0.0, "mu_product": 1.0}
    # Torch's counters are fp32 tensors, on the CPU unless a kernel on the device reads them.
    fused = bool(group.get("fused"))
    dtype = torch.float64 if torch.get_default_dtype() == torch.float64 and not fused else torch.float32
    device = param.device if fused or group.get("capturable") else torch.device("cpu")
    return {
        name: torch.full((), counters[name], dtype=dtype, device=device)
        if name in counters
        else torch.zeros_like(param, requires_grad=False)
        for name in (*_STATES[cls], *(name for name, kept in more.items() if kept))
    }


def makes_state_in_advance(optimizer: torch.optim.Optimizer) -> bool:
    """Whether :func:`allocate_state` leaves state behind; else the optimizer makes its own in its first step."""
    classes, one = [(_class_of(optimizer, group), group) for group in optimizer.param_groups], torch.empty(0)
    return all(_initial_state(cls, group, one) is not None for cls, group in classes)


def moment_bytes(optimizer: torch.optim.Optimizer, device: torch.device, number: int) -> StateBytes:
    """What an optimizer, which does not change, keeps for the parameters of its group ``number``.

    Found by one step on tensors of our own, on the ``device`` where masters will lie.
    """
    group = optimizer.param_groups[number]
    if not group["params"]:
        return StateBytes({})
    # What is cut is 1-D, whatever it was; what is whole keeps its dimensions, by which the state may go.
    kinds = {param.dim() for param in group["params"]} if is_per_tensor(optimizer, group) else {1}
    if max(kinds) > len(EXTENTS):
        raise ConfigError(
            f"a parameter of {max(kinds)} dimensions in a group that is per tensor, where {len(EXTENTS)} are the most: "
            "show it with fewer, or leave it to an elementwise group"
        )
    made: dict[int, list[torch.Tensor]] = {}
    first = group["params"][0]
    constructed = optimizer.state.get(first)
    for dims in kinds:
        tensor = torch.zeros(EXTENTS[:dims], device=device).requires_grad_()
        tensor.grad = torch.zeros_like(tensor)
        with borrowed(optimizer) as lent:
            lent.param_groups = [{**settings_of(group), "params": [tensor]}]
            if constructed:
                lent.state[tensor] = state_like(constructed, first, tensor, values=False)
            lent.step()
            made[dims] = [value for state in lent.state.values() for value in state.values() if torch.is_tensor(value)]
    return StateBytes.of_trial(made)
