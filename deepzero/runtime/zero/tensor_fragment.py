"""A parameter's fp32 master, gradient and optimizer state, to look at and to change, in every stage.

DeepSpeed's ``safe_get_*`` and ``safe_set_*``. *Full* is the whole parameter in its logical shape, on every rank;
*local* is this rank's fragment, 1-D: in stage 0 all of it, elsewhere what its optimizer steps on, possibly no element.
Fragments in rank order make the whole. Everything returned is an fp32 copy on the engine's device. A parameter that is
not trained has none of these: getters return None, setters raise.

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

Source: [DeepSpeed], ``utils/tensor_fragment.py``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from deepzero.comm.reduce_scatter import ALL_GATHER_GRADIENTS, ALL_REDUCE, REDUCE_SCATTER, BucketReducer
from deepzero.layout import Bucket, Fragment, ParamSlot, plan_layout
from deepzero.runtime.zero.gradient_reduction import GradientReducer
from deepzero.runtime.zero.guards import fragments_of, register_fragments
from deepzero.runtime.zero.partitioned_param_coordinator import in_backward

SUFFIX = "_on_request"
ALL_GATHER = f"fragments.all_gather{SUFFIX}"
_OUTSIDE_STEP = {ALL_GATHER, *(kind + SUFFIX for kind in (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER_GRADIENTS))}

# ---- the registry ----------------------------------------------------------------------------------------------------


class TensorFragments:
    """One engine's parameters, which it registers when it is built, and what all of them need of it.

    The sum of ``gradients`` divided by ``mean_divisor()`` is their mean, without loss scale; ``is_reduction_boundary``
    is :class:`BackwardPasses`'s; ``finish_delayed_update`` is called before anything is written.
    """

    def __init__(
        self,
        model: nn.Module,
        gradients: GradientReducer,
        mean_divisor: Callable[[], float],
        is_reduction_boundary: Callable[[], bool],
        finish_delayed_update: Callable[[], None],
    ) -> None:
        self.gradients, self.step, self.finish_delayed_update = gradients, gradients.shard, finish_delayed_update
        self.mean_divisor, self.is_reduction_boundary, self.comm = mean_divisor, is_reduction_boundary, gradients.comm
        # Set while model states are offloaded (``offload_states``): raises.
        self.check_present: Callable[[str], None] | None = None
        self.comm.ledger.untracked_kinds |= _OUTSIDE_STEP
        self.names = {param: name for name, param in model.named_parameters()}
        self._fragments = {
            group.params[slot.index]: ParamFragment(self, number, slot, bucket)
            for number, group in enumerate(gradients.groups)
            for bucket in group.layout.buckets
            for slot in bucket.slots
        }
        register_fragments(self)

    def of(self, param: nn.Parameter) -> ParamFragment | None:
        """The parameter's fragment; None if it is not trained."""
        if self.check_present is not None:
            self.check_present(f"parameter {self.names[param]!r}")
        return self._fragments.get(param)

    def trained(self, param: nn.Parameter) -> ParamFragment:
        """The parameter's fragment, before something of it is written. Raises a ValueError if it is not trained."""
        if (fragment := self.of(param)) is None:
            raise ValueError(
                f"parameter {self.names[param]!r} is not trained (requires_grad=False, or in no optimizer group): it "
                "has no master, gradient or optimizer state to set; write it under deepzero.zero.GatheredParameters"
            )
        self.finish_delayed_update()
        return fragment

    def forget(self) -> None:
        """The engine is destroyed: it has no parameters any more."""
        self.names, self._fragments = {}, {}


def _engine_of(param: nn.Parameter) -> TensorFragments:
    if (engine := fragments_of(param)) is None:
        raise ValueError(
            f"a tensor of shape {tuple(param.shape)} is no parameter of an engine: pass one of engine.module's "
            "parameters, itself and not a copy or a view, after deepzero.initialize and before engine.destroy()"
        )
    return engine


class ParamFragment:
    """A trained parameter, in ``slot`` of a bucket of the engine's group ``number``, and this rank's fragment of it."""

    def __init__(self, engine: TensorFragments, number: int, slot: ParamSlot, bucket: Bucket) -> None:
        self.engine, self.number, self.slot, self.bucket = engine, number, slot, bucket
        self.group = group = engine.gradients.groups[number]
        self.name, self.shape = group.names[slot.index], group.params[slot.index].shape
        # None where this rank has no element of the parameter.
        self.fragment: Fragment | None
        self.master: torch.Tensor | None
        self.fragment, self.master = group.fragment_and_master(slot.index) or (None, None)

    # ---- fragments and wholes ----------------------------------------------------------------------------------------

    def copy_of(self, tensor: torch.Tensor | None) -> torch.Tensor:
        """A copy of this rank's fragment of something, 1-D, fp32; without elements for None."""
        if tensor is None:
            return torch.zeros(0, dtype=torch.float32, device=self.group.device)
        # On the device, also when it is kept in host memory: fragments are put together there.
        return tensor.detach().to(device=self.group.device, dtype=torch.float32, copy=True).reshape(-1)

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's fragment of a whole parameter's extent, 1-D."""
        fragment = self.fragment
        return whole[:0] if fragment is None else whole[fragment.start : fragment.start + fragment.numel]

    def given(self, value: torch.Tensor, local: bool) -> torch.Tensor:
        """A value that was given for the whole parameter, or for this rank's fragment: 1-D, fp32, on the device."""
        numel, what = self.slot.numel, "the parameter"
        if local:
            numel, what = self.fragment.numel if self.fragment is not None else 0, "this rank's fragment"
        if value.numel() != numel:
            raise ValueError(
                f"a value of shape {tuple(value.shape)} has {value.numel()} elements; {what} has {numel} of the whole "
                f"shape {tuple(self.shape)}"
            )
        return value.detach().to(device=self.group.device, dtype=torch.float32).reshape(-1)

    def assemble(self, mine: torch.Tensor) -> torch.Tensor:
        """The parameter of which ``mine`` is this rank's fragment, in its shape, fp32. A collective."""
        comm, slot = self.engine.comm, self.slot
        counts = [self.bucket.fragment(slot, rank).numel for rank in range(comm.world_size)]
        largest = max(counts)
        if self.group.replicated or comm.world_size == 1 or largest == 0:
            return mine.view(self.shape)
        gathered = torch.zeros(comm.world_size * largest, dtype=torch.float32, device=mine.device)
        fragments = gathered.split(largest)
        fragments[comm.rank][: mine.numel()].copy_(mine)
        padding = (comm.world_size - 1) * (largest - mine.numel())
        comm.all_gather(ALL_GATHER, gathered, padding, f"slot {slot.index}").wait()
        # Ranks own their fragments in ascending order.
        return torch.cat([whole[:count] for whole, count in zip(fragments, counts, strict=True)]).view(self.shape)

    # ---- masters and optimizer state ---------------------------------------------------------------------------------

    def copy_of_master(self) -> torch.Tensor:
        """A copy of this rank's fragment, with what was written into a whole parameter since the last step."""
        self.engine.step.wait_pending_update()
        if not self.engine.step.update_pending:
            self.group.sync_masters_from_params(refuse=not self.group.placement.partitioned)
        return self.copy_of(self.master)

    def has_state(self, key: str, everywhere: bool) -> bool:
        """Whether there is state of that name; False when there is none at all yet.

        With ``everywhere`` all ranks are asked, of which some may have no fragment: a collective.

        Raises:
            ValueError: the optimizer keeps other state, or a number for the whole parameter.
        """
        mine: list[str] = []
        others: list[str] = []
        if self.master is not None:
            state, shape = self.engine.step.optimizer.state.get(self.master, {}), self.master.shape
            mine = [kept for kept, value in state.items() if torch.is_tensor(value) and value.shape == shape]
            others = [f"{kept} (of another shape)" for kept in state if kept not in mine and kept != "step"]
        ranks = self.engine.comm.all_gather_object((mine, others)) if everywhere else [(mine, others)]
        known, rest = (sorted({kept for rank in ranks for kept in rank[which]}) for which in (0, 1))
        if (known or rest) and key not in known:
            raise ValueError(
                f"the optimizer keeps no state {key!r} for each element of parameter {self.name!r}; it keeps "
                f"{', '.join(known + rest)}"
            )
        return bool(known)

    def state(self, key: str) -> torch.Tensor | None:
        """This rank's fragment of one state, as the optimizer holds it."""
        self.engine.step.wait_pending_update()
        return self.engine.step.optimizer.state[self.master][key] if self.master is not None else None

    def copy_of_state(self, key: str, everywhere: bool) -> torch.Tensor | None:
        """A copy of this rank's fragment of one state; None while there is none."""
        # Without ``everywhere`` a rank that has no fragment cannot tell which state there is.
        if (everywhere or self.master is not None) and not self.has_state(key, everywhere):
            return None
        return self.copy_of(self.state(key))

    def set_state(self, key: str, mine: torch.Tensor, everywhere: bool) -> None:
        """Change this rank's fragment of one state."""
        if not self.has_state(key, everywhere):
            raise ValueError(
                f"the optimizer has no state {key!r} for parameter {self.name!r} yet; it makes its state in its first "
                "step"
            )
        if (state := self.state(key)) is not None:
            state.copy_(mine.view_as(state))

    # ---- gradients ---------------------------------------------------------------------------------------------------

    def divisor(self) -> torch.Tensor:
        """The number that makes sums to means, as the step uses it: fp32, one element."""
        return torch.tensor(self.engine.mean_divisor(), dtype=torch.float32, device=self.group.device)

    def gradient(self) -> torch.Tensor | None:
        """This rank's fragment of the mean gradient as it would be now, 1-D, fp32; nothing changes. A collective."""
        gradients = self.engine.gradients
        if not gradients.backward_ended:
            return None
        if gradients.reduced:
            gradients.reduce_now()  # waits; stage 0 may gather whole sums, once for all parameters
            mine = self.copy_of(self.engine.step.grads[self.master] if self.master is not None else None)
        else:
            mine = self.copy_of(self.cut(self._reduce_aside()))
        return mine.div_(self.divisor())

    def _reduce_aside(self) -> torch.Tensor:
        """Reduce this parameter's waiting gradients as the boundary will, into fresh memory; they go on waiting."""
        gradients = self.engine.gradients
        reducer, comm = gradients.bucket_reducer, self.engine.comm
        bucket = plan_layout([self.slot.numel], comm.world_size, max(self.slot.numel, 1)).buckets[0]
        aside = BucketReducer(
            comm, bucket.numel, reducer.wire_dtype, reducer.method, whole_sums=True, depth=1, suffix=SUFFIX
        )
        output = torch.zeros(bucket.numel, dtype=self.engine.step.grad_S[0].dtype, device=self.group.device)
        send_buffer = aside.acquire(bucket, output, accumulate=False)
        send_buffer.zero_()
        waiting = gradients.unreduced.waiting_of(self.group.params[self.slot.index])
        if waiting is not None:
            send_buffer[: self.slot.numel].copy_(waiting)
        aside.launch(bucket, output, accumulate=False)
        aside.drain()
        return output[: self.slot.numel]

    def set_gradient(self, mine: torch.Tensor) -> None:
        """Let the next step find this mean: reduce what waits, then replace this rank's fragment. A collective."""
        _refuse_inside_a_pass()
        gradients = self.engine.gradients
        if not gradients.backward_ended or not self.engine.is_reduction_boundary():
            when = "no backward pass has ended since the last step"
            if gradients.backward_ended:
                when = "further micro-batches of this step (gradient_accumulation_steps, no_sync) will add to it"
            raise RuntimeError(
                f"the gradient of parameter {self.name!r} cannot be set now: {when}. Set it after the last backward "
                "pass of an optimizer step and before engine.step()"
            )
        gradients.reduce_now()
        gradients.sums_changed(self.number, self.bucket)
        if self.master is not None:
            self.engine.step.grads[self.master].copy_((mine * self.divisor()).view(self.master.shape))


def _refuse_inside_a_pass() -> None:
    if in_backward():
        raise RuntimeError(
            "a backward pass is under way, and gradients of the step are complete only when it has ended; call this "
            "after it and before engine.step()"
        )


# ---- fp32 masters ----------------------------------------------------------------------------------------------------
# All of the functions below raise ValueError for a tensor that is no engine's parameter; setters also for a parameter
# that is not trained and for a value with another number of elements.


@torch.no_grad()
def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """The parameter's fp32 master in its logical shape, a copy; None if it is not trained. A collective."""
    fragment = _engine_of(param).of(param)
    return fragment.assemble(fragment.copy_of_master()) if fragment is not None else None


@torch.no_grad()
def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Change the fp32 master, and the parameter with it. ``value`` is the same on every rank. A collective."""
    fragment = _engine_of(param).trained(param)
    fragment.group.write(fragment.slot.index, fragment.given(value, local=False))


@torch.no_grad()
def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's fragment of :func:`safe_get_full_fp32_param`, 1-D, possibly empty. Nothing is sent."""
    fragment = _engine_of(param).of(param)
    return fragment.copy_of_master() if fragment is not None else None


@torch.no_grad()
def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Change this rank's fragment of the master; the parameter follows on all ranks. A collective."""
    fragment = _engine_of(param).trained(param)
    fragment.group.write(fragment.slot.index, fragment.assemble(fragment.given(value, local=True)).reshape(-1))


# ---- gradients -------------------------------------------------------------------------------------------------------
# These raise RuntimeError inside a backward pass; setters everywhere but between the last backward pass of an optimizer
# step and ``engine.step()``. Gradients are not multiplied by the loss scale.


@torch.no_grad()
def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """The mean gradient so far in the parameter's shape, zeros where it was not used. A collective.

    None for a parameter that is not trained, and as long as no backward pass has ended since the last step.
    """
    mine = safe_get_local_grad(param)
    fragment = _engine_of(param).of(param)
    return fragment.assemble(mine) if fragment is not None and mine is not None else None


@torch.no_grad()
def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Change the mean gradient, and thereby the norm, that ``engine.step()`` will use. A collective.

    ``value`` is the same on every rank.
    """
    fragment = _engine_of(param).trained(param)
    fragment.set_gradient(fragment.cut(fragment.given(value, local=False)))


@torch.no_grad()
def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's fragment of :func:`safe_get_full_grad`, 1-D, possibly empty. A collective."""
    fragment = _engine_of(param).of(param)
    _refuse_inside_a_pass()
    return fragment.gradient() if fragment is not None else None


@torch.no_grad()
def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Change this rank's fragment of the mean gradient that ``engine.step()`` will use. A collective."""
    fragment = _engine_of(param).trained(param)
    fragment.set_gradient(fragment.given(value, local=True))


# ---- optimizer state -------------------------------------------------------------------------------------------------
# ``optim_state_key`` is the optimizer's name (``exp_avg``). ValueError for one that it does not have, or that holds one
# number for the whole parameter (``step``); for setters also while there is no state yet.


@torch.no_grad()
def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """What the optimizer keeps for each element, in the parameter's shape. A collective.

    None for a parameter that is not trained, and while the optimizer has no such state for any element.
    """
    fragment = _engine_of(param).of(param)
    mine = fragment.copy_of_state(optim_state_key, everywhere=True) if fragment is not None else None
    return fragment.assemble(mine) if fragment is not None and mine is not None else None


@torch.no_grad()
def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Change what the optimizer keeps for each element. ``value`` is the same on every rank. A collective."""
    fragment = _engine_of(param).trained(param)
    fragment.set_state(optim_state_key, fragment.cut(fragment.given(value, local=False)), everywhere=True)


@torch.no_grad()
def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """This rank's fragment of :func:`safe_get_full_optimizer_state`, 1-D, possibly empty. Nothing is sent."""
    fragment = _engine_of(param).of(param)
    return fragment.copy_of_state(optim_state_key, everywhere=False) if fragment is not None else None


@torch.no_grad()
def safe_set_local_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Change this rank's fragment of what the optimizer keeps for each element. Nothing is sent."""
    fragment = _engine_of(param).trained(param)
    mine = fragment.given(value, local=True)
    if fragment.master is not None:
        fragment.set_state(optim_state_key, mine, everywhere=False)
