"""A parameter's fp32 master, gradient and optimizer state, to look at and to change, in every stage.

DeepSpeed's ``safe_get_*`` and ``safe_set_*``. *Full* is the whole parameter in its logical shape, on every rank;
*local* is this rank's fragment, 1-D: in stage 0 all of it, elsewhere what its optimizer steps on, possibly no element.
Fragments in rank order make the whole. Everything returned is an fp32 copy on the engine's device.

Every rank calls these functions in the same order, with the same parameter and, for the full setters, the same value.
Only the local functions for optimizer state, and ``safe_get_local_fp32_param``, send nothing.

**Gradients** exist from the end of a backward pass to ``engine.step()``. Meant is the gradient as the step will use it,
before clipping: summed over ranks and the micro-batches so far, divided by ranks, micro-batches of a step and loss
scale. In stages 0 and 1 gradients may still wait for the boundary; a getter then reduces this one parameter on the
side, as the boundary will, and the wait goes on. A setter reduces early all that waits, and replaces the sum; so it has
to come after the last backward pass of the step. The sum is what is kept: where the divisor is no power of two, the
mean of ``value * divisor`` may differ from ``value`` in its last bit, equally in all stages.

**Masters**: the parameter in the compute dtype follows at once, wherever the stage keeps it, and no bit of the fp32
value is lost. DeepSpeed changes the master alone; its parameter follows with the next step.

A parameter that is not trained has none of these: getters return None, setters raise.

An engine registers its parameters when it is built (:class:`TensorFragments`). The registry's references are weak.

Source: ``deepspeed/utils/tensor_fragment.py``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from deepzero.comm import process_group
from deepzero.comm.reduce_scatter import ALL_GATHER_GRADIENTS, ALL_REDUCE, REDUCE_SCATTER, BucketReducer
from deepzero.layout import Bucket, Fragment, ParamSlot, plan_layout
from deepzero.runtime.zero.gradient_reduction import GradientReducer
from deepzero.runtime.zero.optimizer_shard import MasterFragment, OptimizerShard, ParamGroup
from deepzero.runtime.zero.partitioned_param_coordinator import in_backward

SUFFIX = "_on_request"
ALL_GATHER = f"fragments.all_gather{SUFFIX}"
_OUTSIDE_STEP = {ALL_GATHER, *(kind + SUFFIX for kind in (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER_GRADIENTS))}

# ---- the registry ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ParameterAddress:
    """One entry of the registry; ``fragment`` is None for a parameter that is not trained."""

    param: nn.Parameter
    name: str
    fragment: ParamFragment | None
    engine: TensorFragments


_ADDRESSES: weakref.WeakValueDictionary[int, ParameterAddress] = weakref.WeakValueDictionary()
"""By the parameter's id. The entry holds the parameter, and so the id is its own, as long as the engine lives."""


def address_of(param: nn.Parameter) -> ParameterAddress:
    """The registry's entry for ``param``.

    Raises:
        ValueError: no engine has registered it.
        RuntimeError: its engine's states are offloaded (``offload_states``).
    """
    address = _ADDRESSES.get(id(param))
    if address is None:
        raise ValueError(
            f"a tensor of shape {tuple(param.shape)} is no parameter of an engine: pass one of engine.module's "
            "parameters, itself and not a copy or a view, after deepzero.initialize and before engine.destroy()"
        )
    if address.engine.away is not None:
        address.engine.away(f"parameter {address.name!r}")
    return address


class TensorFragments:
    """The registry's entries of one engine, and what all of them need of it.

    Args:
        model: whose parameters are registered.
        groups: of the trained ones.
        step: has the optimizer, and one ``MasterFragment`` for each fragment of each group, in order.
        gradients: the reduced gradients.
        mean_divisor: what the sum of gradients is divided by for their mean, without loss scale.
        last_pass: whether the micro-batch under way is the last of its optimizer step.
        finish_delayed_update: called before anything is written.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[ParamGroup],
        step: OptimizerShard,
        gradients: GradientReducer,
        mean_divisor: Callable[[], float],
        last_pass: Callable[[], bool],
        finish_delayed_update: Callable[[], None],
    ) -> None:
        self.step, self.finish_delayed_update = step, finish_delayed_update
        self.optimizer, self.gradients = step.optimizer, gradients
        self.mean_divisor, self.last_pass = mean_divisor, last_pass
        self.comm = gradients.reducer.comm
        self.away: Callable[[str], None] | None = None
        """Set while model states are offloaded (``offload_states``): raises."""
        self.comm.ledger.untracked_kinds |= _OUTSIDE_STEP
        parts = iter(step.parts)
        fragments: dict[nn.Parameter, ParamFragment] = {}
        for number, group in enumerate(groups):
            for fragment in self._fragments_of(number, group, parts):
                fragments[group.params[fragment.slot.index]] = fragment
        self._addresses = [
            ParameterAddress(param, name, fragments.get(param), self) for name, param in model.named_parameters()
        ]
        for address in self._addresses:
            _ADDRESSES[id(address.param)] = address

    def _fragments_of(self, number: int, group: ParamGroup, parts: Iterator[MasterFragment]) -> list[ParamFragment]:
        mine = {fragment.slot.index: (fragment, next(parts)) for fragment in group.fragments}
        return [
            ParamFragment(
                self, group, number, slot, bucket, group.params[slot.index].shape, *mine.get(slot.index, (None, None))
            )
            for bucket in group.layout.buckets
            for slot in bucket.slots
        ]

    def forget(self) -> None:
        """The engine is destroyed: its parameters leave the registry."""
        for address in self._addresses:
            if _ADDRESSES.get(id(address.param)) is address:
                del _ADDRESSES[id(address.param)]
        self._addresses = []


@dataclass(frozen=True, eq=False)
class ParamFragment:
    """A trained parameter, and this rank's fragment of it."""

    engine: TensorFragments
    group: ParamGroup
    number: int
    """The group's."""
    slot: ParamSlot
    bucket: Bucket
    shape: torch.Size
    fragment: Fragment | None
    """None where this rank has no element of the parameter."""
    part: MasterFragment | None
    """Master and gradient of the fragment."""

    @property
    def numel(self) -> int:
        """Elements of this rank's fragment."""
        return self.fragment.numel if self.fragment is not None else 0

    # ---- fragments and wholes ----------------------------------------------------------------------------------------

    def copy_of(self, tensor: torch.Tensor | None) -> torch.Tensor:
        """A copy of this rank's fragment of something, 1-D, fp32; without elements for None."""
        if tensor is None:
            return torch.zeros(0, dtype=torch.float32, device=self.group.device)
        # On the device, also when it is kept in host memory: fragments are put together there.
        return tensor.detach().to(device=self.group.device, dtype=torch.float32, copy=True)

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's fragment of a whole parameter's extent, 1-D."""
        fragment = self.fragment
        return whole[:0] if fragment is None else whole[fragment.start : fragment.start + fragment.numel]

    def numel_of(self, rank: int) -> int:
        """Elements of ``rank``'s fragment."""
        if self.group.whole:
            return self.slot.numel
        first = self.bucket.part_start(rank)
        return max(0, min(self.slot.end, first + self.bucket.shard_numel) - max(self.slot.offset, first))

    def assemble(self, mine: torch.Tensor) -> torch.Tensor:
        """The parameter of which ``mine`` is this rank's fragment, in its shape, fp32. A collective."""
        comm = self.engine.comm
        counts = [self.numel_of(rank) for rank in range(comm.world_size)]
        largest = max(counts)
        if self.group.whole or comm.world_size == 1 or largest == 0:
            return mine.view(self.shape)
        gathered = torch.zeros(comm.world_size * largest, dtype=torch.float32, device=mine.device)
        parts = gathered.split(largest)
        parts[comm.rank][: mine.numel()].copy_(mine)
        padding = (comm.world_size - 1) * (largest - mine.numel())
        comm.all_gather(ALL_GATHER, gathered, padding, f"slot {self.slot.index}").wait()
        # Ranks own their fragments in ascending order.
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)]).view(self.shape)

    # ---- masters and optimizer state ---------------------------------------------------------------------------------

    def master(self) -> torch.Tensor:
        """A copy of this rank's fragment, with what was written into a whole parameter since the last step."""
        self.engine.step.wait_pending_update()
        if not self.group.partitioned and not self.engine.step.update_pending:
            self.group.sync_masters_from_params()
        return self.copy_of(self.part.master if self.part is not None else None)

    def has_state(self, key: str, name: str, everywhere: bool) -> bool:
        """Whether there is state of that name; False when there is none at all yet.

        Args:
            key: the optimizer's name for it.
            name: the parameter's, for the message.
            everywhere: ask all ranks, of which some may have no fragment. A collective.

        Raises:
            ValueError: the optimizer keeps other state, or a number for the whole parameter.
        """
        mine: list[str] = []
        if self.part is not None:
            master = self.part.master
            state = self.engine.optimizer.state.get(master, {})
            mine = [kept for kept, value in state.items() if torch.is_tensor(value) and value.shape == master.shape]
        ranks = process_group.all_gather_object(mine) if everywhere else [mine]
        known = sorted({kept for rank in ranks for kept in rank})
        if known and key not in known:
            raise ValueError(
                f"the optimizer keeps no state {key!r} for each element of parameter {name!r}; it keeps "
                f"{', '.join(known)}"
            )
        return bool(known)

    def state(self, key: str) -> torch.Tensor | None:
        """This rank's fragment of one state, as the optimizer holds it."""
        self.engine.step.wait_pending_update()
        return self.engine.optimizer.state[self.part.master][key] if self.part is not None else None

    # ---- gradients ---------------------------------------------------------------------------------------------------

    def divisor(self) -> torch.Tensor:
        """The number that makes sums to means, as the step uses it: fp32, one element."""
        return torch.tensor(self.engine.mean_divisor(), dtype=torch.float32, device=self.group.device)

    def gradient_sum(self) -> torch.Tensor:
        """This rank's fragment of the reduced sum as it would be now, 1-D, fp32; nothing changes. A collective."""
        gradients = self.engine.gradients
        if not gradients.reduced:
            return self.copy_of(self.cut(self._reduce_aside()))
        gradients.drain()
        return self.copy_of(self.part.grad if self.part is not None else None)

    def _reduce_aside(self) -> torch.Tensor:
        """Reduce this parameter's waiting gradients as the boundary will, into fresh memory; they go on waiting."""
        gradients = self.engine.gradients
        reducer, comm = gradients.reducer, self.engine.comm
        bucket = plan_layout([self.slot.numel], comm.world_size, max(self.slot.numel, 1)).buckets[0]
        aside = BucketReducer(
            comm, bucket.numel, reducer.wire_dtype, reducer.method, whole=True, depth=1, suffix=SUFFIX
        )
        output = torch.zeros(bucket.numel, dtype=self.engine.step.grad_dtype, device=self.group.device)
        send_buffer = aside.acquire(bucket, output, accumulate=False)
        send_buffer.zero_()
        waiting = gradients.source.waiting_of(self.group.params[self.slot.index])
        if waiting is not None:
            send_buffer[: self.slot.numel].copy_(waiting)
        aside.launch(bucket, output, accumulate=False)
        aside.drain()
        return output[: self.slot.numel]

    def set_gradient(self, mine: torch.Tensor) -> None:
        """Let the next step find this mean: reduce what waits, then replace this rank's fragment. A collective."""
        gradients = self.engine.gradients
        gradients.reduce_now()
        gradients.sums_changed(self.number, self.bucket)
        if self.part is not None:
            self.part.grad.copy_(mine * self.divisor())


# ---- fp32 masters ----------------------------------------------------------------------------------------------------
# All of the functions below raise ValueError for a tensor that is no engine's parameter; setters also for a parameter
# that is not trained and for a value with another number of elements.


@torch.no_grad()
def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """The parameter's fp32 master in its logical shape, a copy; None if it is not trained. A collective."""
    fragment = address_of(param).fragment
    return fragment.assemble(fragment.master()) if fragment is not None else None


@torch.no_grad()
def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Change the fp32 master, and the parameter with it. ``value`` is the same on every rank. A collective."""
    fragment = _trained(param)
    fragment.group.write(fragment.slot.index, _flat(fragment, value, fragment.slot.numel, "the parameter"))


@torch.no_grad()
def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's fragment of :func:`safe_get_full_fp32_param`, 1-D, possibly empty. Nothing is sent."""
    fragment = address_of(param).fragment
    return fragment.master() if fragment is not None else None


@torch.no_grad()
def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Change this rank's fragment of the master; the parameter follows on all ranks. A collective."""
    fragment = _trained(param)
    whole = fragment.assemble(_flat(fragment, value, fragment.numel, "this rank's fragment")).reshape(-1)
    fragment.group.write(fragment.slot.index, whole)


# ---- gradients -------------------------------------------------------------------------------------------------------
# These raise RuntimeError inside a backward pass; setters everywhere but between the last backward pass of an optimizer
# step and ``engine.step()``. Gradients are not multiplied by the loss scale.


@torch.no_grad()
def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """The mean gradient so far in the parameter's shape, zeros where it was not used. A collective.

    None for a parameter that is not trained, and as long as no backward pass has ended since the last step.
    """
    fragment = address_of(param).fragment
    mine = _mean(fragment)
    return fragment.assemble(mine) if fragment is not None and mine is not None else None


@torch.no_grad()
def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Change the mean gradient, and thereby the norm, that ``engine.step()`` will use. A collective.

    ``value`` is the same on every rank.
    """
    fragment = _trained(param)
    whole = _flat(fragment, value, fragment.slot.numel, "the parameter")
    _write_gradient(fragment, address_of(param).name, fragment.cut(whole))


@torch.no_grad()
def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's fragment of :func:`safe_get_full_grad`, 1-D, possibly empty. A collective."""
    return _mean(address_of(param).fragment)


@torch.no_grad()
def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Change this rank's fragment of the mean gradient that ``engine.step()`` will use. A collective."""
    fragment = _trained(param)
    _write_gradient(fragment, address_of(param).name, _flat(fragment, value, fragment.numel, "this rank's fragment"))


# ---- optimizer state -------------------------------------------------------------------------------------------------
# ``optim_state_key`` is the optimizer's name (``exp_avg``). ValueError for one that it does not have, or that holds one
# number for the whole parameter (``step``); for setters also while there is no state yet.


@torch.no_grad()
def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """What the optimizer keeps for each element, in the parameter's shape. A collective.

    None for a parameter that is not trained, and while the optimizer has no such state for any element.
    """
    fragment = address_of(param).fragment
    mine = _state(param, optim_state_key, everywhere=True)
    return fragment.assemble(mine) if fragment is not None and mine is not None else None


@torch.no_grad()
def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Change what the optimizer keeps for each element. ``value`` is the same on every rank. A collective."""
    fragment = _trained(param)
    whole = _flat(fragment, value, fragment.slot.numel, "the parameter")
    _write_state(fragment, address_of(param).name, fragment.cut(whole), optim_state_key, everywhere=True)


@torch.no_grad()
def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """This rank's fragment of :func:`safe_get_full_optimizer_state`, 1-D, possibly empty. Nothing is sent."""
    return _state(param, optim_state_key, everywhere=False)


@torch.no_grad()
def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Change this rank's fragment of what the optimizer keeps for each element. Nothing is sent."""
    fragment = _trained(param)
    mine = _flat(fragment, value, fragment.numel, "this rank's fragment")
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


def _mean(fragment: ParamFragment | None) -> torch.Tensor | None:
    """This rank's fragment of the mean gradient, or None."""
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
    """A copy of this rank's fragment of the state, or None."""
    address = address_of(param)
    fragment = address.fragment
    if fragment is None:
        return None
    # Without ``everywhere`` a rank that has no fragment cannot know which state there is.
    if (everywhere or fragment.part is not None) and not fragment.has_state(key, address.name, everywhere):
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
