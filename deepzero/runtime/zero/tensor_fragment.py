"""Looking at a parameter's fp32 master, gradient and optimizer state, and changing them, in every stage.

DeepSpeed's ``safe_get_*`` and ``safe_set_*``. *Full* is the whole parameter in its logical shape, on every rank;
*local* is this rank's piece, 1-D: in stage 0 all of it, elsewhere what its optimizer steps on, possibly no element.
Pieces in rank order make the whole. Everything returned is a copy in fp32.

Every rank calls them, in the same order, with the same parameter, and, for the full setters, with the same value. Only
the local functions for optimizer state, and ``safe_get_local_fp32_param``, get by without the other ranks.

**Gradients** exist from the end of a backward pass to ``engine.step()``. What is meant is the gradient as the step will
use it, before clipping: summed over ranks and over the micro-batches so far, and divided by ranks, micro-batches of a
step, and loss scale. In stages 0 and 1 gradients may still wait for the boundary; a getter then reduces this one
parameter on the side, as the boundary will, and the wait goes on. A setter reduces early all that waits, and replaces
the sum; so it has to come after the last backward pass of the step. It is the sum that is kept: where ranks times
micro-batches times loss scale is no power of two, the mean of ``value * divisor`` may differ from ``value`` in its last
bit, equally in all stages.

**Masters**: the parameter in the compute dtype follows at once, wherever the stage keeps it, and no bit of the fp32
value is lost. DeepSpeed changes the master alone; its parameter follows with the next step.

A parameter that is not trained has nothing of all this: getters return None, setters raise.

Source: ``deepspeed/utils/tensor_fragment.py``.
"""

from __future__ import annotations

import torch
from torch import nn

from deepzero.runtime.zero.fragments import ParamFragment, address_of
from deepzero.runtime.zero.partitioned_param_coordinator import in_backward

# ---- fp32 masters ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """The parameter's fp32 master, whole. A collective.

    Args:
        param: one of the engine's parameters.

    Returns:
        A copy in the parameter's logical shape; None for a parameter that is not trained.

    Raises:
        ValueError: a tensor that is no engine's parameter.
    """
    fragment = address_of(param).fragment
    return _whole(fragment, fragment.master()) if fragment is not None else None


@torch.no_grad()
def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Change the parameter's fp32 master, and the parameter with it. A collective.

    Args:
        param: one of the engine's parameters.
        value: as many elements, the same on every rank.

    Raises:
        ValueError: a tensor that is no engine's parameter, one that is not trained, or a value of another size.
    """
    fragment = _trained(param)
    fragment.group.write(fragment.slot.index, _flat(fragment, value, fragment.slot.numel, "the parameter"))


@torch.no_grad()
def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's piece of :func:`safe_get_full_fp32_param`, 1-D. Nothing is sent.

    Args:
        param: one of the engine's parameters.

    Returns:
        A copy, possibly without elements; None for a parameter that is not trained.

    Raises:
        ValueError: a tensor that is no engine's parameter.
    """
    fragment = address_of(param).fragment
    return fragment.master() if fragment is not None else None


@torch.no_grad()
def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Change this rank's piece of the master; the parameter follows on all ranks. A collective.

    Args:
        param: one of the engine's parameters.
        value: as many elements as this rank's piece has.

    Raises:
        ValueError: a tensor that is no engine's parameter, one that is not trained, or a value of another size.
    """
    fragment = _trained(param)
    whole = fragment.assemble(_flat(fragment, value, fragment.numel, "this rank's piece"))
    fragment.group.write(fragment.slot.index, whole)


# ---- gradients -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """The mean gradient so far, whole; see the module's text. A collective.

    Args:
        param: one of the engine's parameters.

    Returns:
        A copy in the parameter's logical shape, zeros where the parameter was not used. None for a parameter that is
        not trained, and as long as no backward pass has ended since the last step.

    Raises:
        ValueError: a tensor that is no engine's parameter.
        RuntimeError: called from within a backward pass.
    """
    fragment = address_of(param).fragment
    mine = _mean(fragment)
    return _whole(fragment, mine) if fragment is not None and mine is not None else None


@torch.no_grad()
def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Change the mean gradient that ``engine.step()`` will use. Its norm, for clipping, is the new one's. A collective.

    Args:
        param: one of the engine's parameters.
        value: as many elements, the same on every rank; not multiplied by the loss scale.

    Raises:
        ValueError: a tensor that is no engine's parameter, one that is not trained, or a value of another size.
        RuntimeError: not between the last backward pass of an optimizer step and ``engine.step()``.
    """
    fragment = _trained(param)
    whole = _flat(fragment, value, fragment.slot.numel, "the parameter")
    _write_gradient(fragment, address_of(param).name, fragment.cut(whole))


@torch.no_grad()
def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's piece of :func:`safe_get_full_grad`, 1-D. A collective.

    Args:
        param: one of the engine's parameters.

    Returns:
        A copy, possibly without elements; None where the whole would be None.

    Raises:
        ValueError: a tensor that is no engine's parameter.
        RuntimeError: called from within a backward pass.
    """
    return _mean(address_of(param).fragment)


@torch.no_grad()
def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Change this rank's piece of the mean gradient that ``engine.step()`` will use. A collective.

    Args:
        param: one of the engine's parameters.
        value: as many elements as this rank's piece has; not multiplied by the loss scale.

    Raises:
        ValueError: a tensor that is no engine's parameter, one that is not trained, or a value of another size.
        RuntimeError: not between the last backward pass of an optimizer step and ``engine.step()``.
    """
    fragment = _trained(param)
    _write_gradient(fragment, address_of(param).name, _flat(fragment, value, fragment.numel, "this rank's piece"))


# ---- optimizer state -------------------------------------------------------------------------------------------------


@torch.no_grad()
def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """What the optimizer keeps for each element of the parameter (``exp_avg``), whole. A collective.

    Args:
        param: one of the engine's parameters.
        optim_state_key: the optimizer's name for it.

    Returns:
        A copy in the parameter's logical shape; None for a parameter that is not trained, and while the optimizer has
        no such state for any element.

    Raises:
        ValueError: a tensor that is no engine's parameter; a key that the optimizer does not have, or that holds one
            number for the whole parameter (``step``).
    """
    fragment = address_of(param).fragment
    mine = _state(param, optim_state_key, everywhere=True)
    return _whole(fragment, mine) if fragment is not None and mine is not None else None


@torch.no_grad()
def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Change what the optimizer keeps for each element of the parameter. A collective.

    Args:
        param: one of the engine's parameters.
        value: as many elements, the same on every rank.
        optim_state_key: the optimizer's name for it.

    Raises:
        ValueError: as the getter, and for a parameter that is not trained, a value of another size, no state yet.
    """
    fragment = _trained(param)
    whole = _flat(fragment, value, fragment.slot.numel, "the parameter")
    _write_state(fragment, address_of(param).name, fragment.cut(whole), optim_state_key, everywhere=True)


@torch.no_grad()
def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """This rank's piece of :func:`safe_get_full_optimizer_state`, 1-D. Nothing is sent.

    Args:
        param: one of the engine's parameters.
        optim_state_key: the optimizer's name for it.

    Returns:
        A copy, without elements where this rank has no piece; None for a parameter that is not trained, and while the
        optimizer has no such state for this rank's piece.

    Raises:
        ValueError: as :func:`safe_get_full_optimizer_state`.
    """
    return _state(param, optim_state_key, everywhere=False)


@torch.no_grad()
def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Change this rank's piece of what the optimizer keeps for each element of the parameter. Nothing is sent.

    Args:
        param: one of the engine's parameters.
        value: as many elements as this rank's piece has.
        optim_state_key: the optimizer's name for it.

    Raises:
        ValueError: as :func:`safe_set_full_optimizer_state`.
    """
    fragment = _trained(param)
    mine = _flat(fragment, value, fragment.numel, "this rank's piece")
    if fragment.part is not None:
        _write_state(fragment, address_of(param).name, mine, optim_state_key, everywhere=False)


# ---- what they share -------------------------------------------------------------------------------------------------


def _trained(param: nn.Parameter) -> ParamFragment:
    address = address_of(param)
    if address.fragment is None:
        raise ValueError(
            f"parameter {address.name!r} is not trained (requires_grad=False, or in no optimizer group): it has no "
            "master, gradient or optimizer state to set; write it under deepzero.zero.GatheredParameters"
        )
    address.fragment.engine.finish_delayed_update()
    return address.fragment


def _flat(fragment: ParamFragment, value: torch.Tensor, numel: int, what: str) -> torch.Tensor:
    """1-D, fp32, on the engine's device."""
    if value.numel() != numel:
        raise ValueError(
            f"a value of shape {tuple(value.shape)} has {value.numel()} elements; {what} has {numel} of the whole "
            f"shape {tuple(fragment.shape)}"
        )
    return value.detach().to(device=fragment.group.device, dtype=torch.float32).reshape(-1)


def _whole(fragment: ParamFragment, mine: torch.Tensor) -> torch.Tensor:
    return fragment.assemble(mine).view(fragment.shape)


def _mean(fragment: ParamFragment | None) -> torch.Tensor | None:
    """This rank's piece of the mean gradient, or None."""
    _refuse_inside_a_pass()
    if fragment is None or not fragment.engine.gradients.present:
        return None
    return fragment.gradient_sum().div_(fragment.divisor())


def _refuse_inside_a_pass() -> None:
    if in_backward():
        raise RuntimeError(
            "a backward pass is under way, and gradients of the step are complete only when it has ended; call this "
            "after it and before engine.step()"
        )


def _write_gradient(fragment: ParamFragment, name: str, mine: torch.Tensor) -> None:
    _refuse_inside_a_pass()
    engine = fragment.engine
    if not engine.gradients.present or not engine.last_pass():
        when = "no backward pass has ended since the last step"
        if engine.gradients.present:
            when = "further micro-batches of this step (gradient_accumulation_steps, no_sync) will add to it"
        raise RuntimeError(
            f"the gradient of parameter {name!r} cannot be set now: {when}. Set it after the last backward pass of an "
            "optimizer step and before engine.step()"
        )
    fragment.set_gradient(mine)


def _state(param: nn.Parameter, key: str, everywhere: bool) -> torch.Tensor | None:
    """A copy of this rank's piece of the state, or None. Without ``everywhere`` a rank without a piece asks nobody."""
    address = address_of(param)
    fragment = address.fragment
    if fragment is None:
        return None
    asks = everywhere or fragment.part is not None
    if asks and not fragment.has_state(key, address.name, everywhere):
        return None
    return fragment.copy_of(fragment.state(key))


def _write_state(fragment: ParamFragment, name: str, mine: torch.Tensor, key: str, everywhere: bool) -> None:
    if not fragment.has_state(key, name, everywhere):
        raise ValueError(
            f"the optimizer has no state {key!r} for parameter {name!r} yet; it makes its state in its first step"
        )
    state = fragment.state(key)
    if state is not None:
        state.copy_(mine)
