"""The optimizer's shard: fp32 masters, moments and reduced gradients of what this rank owns, and the step over them.

Step 5 of a training step. Before it, every rank holds the *sum* over ranks and micro-batches of its part of the
gradients, times the loss scale. Mean, loss scale and clipping are one division:

    g = sum / (ranks * micro-batches * loss_scale * clip)       clip = max(1, (norm + 1e-6) / max_norm)

It happens in fp32 after all additions (fp16's native sums: see ``BucketReducer._launch_native``), so nothing can
underflow on the way, and is exact for powers of two. A divisor of one is skipped: then the optimizer sees the very bits
that autograd produced. torch's fused optimizers (by ``grad_scale``) and CPUAdam divide while they step, which saves a
pass over memory; others get :func:`unscale_and_clip_grads` first. All divide by the same number, to the same bits.

The scale that is divided out is the one that multiplied this step's loss. DeepSpeed updates the scale first, and halves
the gradient of every step on which the scale doubles.

All stages share :class:`OptimizerShard`. It is all that the core sees of offloading, too: with
``zero.offload_optimizer`` the engine is built with the shard of ``offload/optimizer_offload.py`` in its place, part of
which lies in host memory.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deepzero.comm.collectives import Communicator
from deepzero.comm.exact_sum import Measure
from deepzero.comm.reduce_scatter import AroundSum
from deepzero.layout import Bucket, FlatLayout, Fragment, OffloadPlan

HOST_MASTERS = "host_masters"

HostAllocator = Callable[[str, int, torch.dtype], torch.Tensor]
"""(category, elements, dtype): 1-D host memory."""


# ---- 0 build: the masters of one group -------------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupLayout:
    """A group of parameters with its layout, before it has tensors."""

    params: Sequence[nn.Parameter]
    layout: FlatLayout
    optimizer_group: int | None  # None: not trained
    partitioned: bool  # stage 3: every rank keeps a part
    per_tensor: bool = False  # laid out so that no parameter is cut: the optimizer gets each in its shape


class ParamGroup:
    """A group of parameters over one layout, and this rank's fp32 masters of them: ``master_S``.

    Two kinds: whole on every rank (``FlatParamGroup``: stages 0-2, stage 3's persistent parameters), or partitioned
    (``PartitionedParamGroup``). Layout, fragments and masters are the same in both.

    Args:
        names: the parameters' names, in the order of the layout.
        planned: the parameters, and where each lies.
        dtype: compute dtype.
        comm: the ranks, and the device.
        placement: which elements have a master beside the parameter, and on which side it lies.
        allocate_host: gives host memory; None where nothing is offloaded.
        whole: stage 0: this rank has masters and gradients of everything, not of its shard.
    """

    partitioned = False  # stage 3: the parameters are gathered bucket by bucket; else they are whole on every rank
    params: Sequence[nn.Parameter]  # in the order of the layout

    def __init__(
        self,
        names: Sequence[str],
        planned: GroupLayout,
        dtype: torch.dtype,
        comm: Communicator,
        placement: OffloadPlan,
        allocate_host: HostAllocator | None,
        whole: bool = False,
    ) -> None:
        self.names, self.layout, self.dtype, self.whole = list(names), planned.layout, dtype, whole
        self.shapes, self.per_tensor = [param.shape for param in planned.params], planned.per_tensor
        self.comm, self.device = comm, comm.device
        self.optimizer_group: Any = planned.optimizer_group  # its index; None: not trained
        # Called before parameters are written from outside; may refuse.
        self.before_write: Callable[[], None] | None = None
        self.placement = placement
        self.fragments = self.layout.whole_fragments() if whole else self.layout.fragments(comm.rank)
        # Index of a parameter -> number of its fragment here; a small parameter may lie wholly on other ranks.
        self._numbers = {fragment.slot.index: number for number, fragment in enumerate(self.fragments)}
        self.masters_on_host: torch.Tensor | None = None
        if placement.host_masters:
            if allocate_host is None:
                raise RuntimeError("masters in host memory need an arena")
            self.masters_on_host = allocate_host(HOST_MASTERS, len(placement.host_masters), torch.float32)
        # Not yet: while the model is being moved, its memory is still taken. See [Note: the peak of building] in
        # ``stage_1_and_2.py``.
        self.masters_on_device: torch.Tensor | None = None
        # **The optimizer's tensors**: fp32 leaves, one for each fragment. See [Note: why fragments] there.
        self.masters: list[torch.Tensor] = []

    # ---- the masters -------------------------------------------------------------------------------------------------

    def allocate_masters(self) -> None:
        """Take the memory of the masters on the device, when that of the model is free."""
        if self.placement.device_masters:
            # Zeros: padding is stepped on by nobody, and cast and sent with the rest.
            numel = len(self.placement.device_masters)
            self.masters_on_device = torch.zeros(numel, dtype=torch.float32, device=self.device)

    def separate_masters(self, start: int, numel: int) -> torch.Tensor | None:
        """Masters of the shard's elements ``[start, start + numel)``; None where the parameters are their own."""
        sides = (
            (self.placement.host_masters, self.masters_on_host), (self.placement.device_masters, self.masters_on_device)
        )  # fmt: skip
        for span, storage in sides:
            # A bucket lies on one side, and whatever is asked for lies within a bucket.
            if storage is not None and start in span:
                return storage[start - span.start :][:numel]
        return None

    def cut_masters(self) -> None:
        """Make :attr:`masters`: views of ``master_S``; where the parameters are their own masters, views of these."""
        for fragment in self.fragments if self.optimizer_group is not None else ():
            separate = self.separate_masters(fragment.shard_start, fragment.numel)
            master = self.param_fragment(fragment) if separate is None else separate
            shown = master.detach().view(self.shapes[fragment.slot.index]) if self.per_tensor else master.detach()
            self.masters.append(shown.requires_grad_())

    def separate_master(self, index: int) -> tuple[Fragment, torch.Tensor] | None:
        """This rank's fragment of a parameter, and its master, 1-D; None: it has none, or the parameter is its own."""
        number = self._numbers.get(index)
        if number is None or self.separate_masters(self.fragments[number].shard_start, 0) is None:
            return None
        return self.fragments[number], self.masters[number].detach().view(-1)

    def master_of(self, bucket: Bucket) -> torch.Tensor:
        """The masters of what :meth:`param_shard` names, padding included; in fp32 it is that tensor itself."""
        mine = (bucket.offset, bucket.numel) if self.whole else (bucket.shard_offset, bucket.shard_numel)
        found = self.separate_masters(*mine)
        return self.param_shard(bucket) if found is None else found

    # ---- the parameters, which the two kinds keep in different places ------------------------------------------------

    @property
    def parameter_storage(self) -> list[torch.Tensor]:
        """What this rank keeps of the parameters on its device: all of them, or its shard."""
        raise NotImplementedError

    def param_shard(self, bucket: Bucket) -> torch.Tensor:
        """This rank's part of ``bucket`` in the compute dtype, padding included; all of it where :attr:`whole`."""
        raise NotImplementedError

    def param_fragment(self, fragment: Fragment) -> torch.Tensor:
        """This rank's elements of one parameter: 1-D, compute dtype."""
        raise NotImplementedError

    def write(self, index: int, values: torch.Tensor) -> None:
        """Write values (1-D, whole, fp32, the same on every rank) into one parameter and, with all bits, its master."""
        raise NotImplementedError

    def sync_masters_from_params(self) -> None:
        """Take what was written into parameters since the last step into the masters, or refuse it."""
        raise NotImplementedError

    def release(self) -> None:
        """Let the parameters belong to no engine."""
        raise NotImplementedError

    # What follows is for parameters that stay whole; partitioned ones show values only while a module runs.

    def refresh_data_ptrs(self) -> None:
        """Note where the parameters lie after ``offload_states`` has moved them."""

    def written(self) -> list[str]:
        """Names of parameters that were written since the last step; a write to a gathered one is refused at once."""
        return []

    def bump_param_versions(self) -> None:
        """Tell autograd that parameters were written between two steps; a partitioned bucket counts generations."""


# ---- 5 step ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MasterFragment:
    """One tensor of the optimizer's, and where its gradient lies."""

    master: torch.Tensor  # fp32 leaf; 1-D, or in a per-tensor group the parameter's shape
    grad: torch.Tensor  # reduced: a sum, of the master's shape, in the accumulation dtype


SubGroup = Sequence[MasterFragment]
"""Fragments that are stepped on together."""

GradOutput = tuple[torch.Tensor, Measure | None, AroundSum]
"""Where a bucket's sum is written; who sees the finished sum, chunk by chunk; and the context of the writing: what is
added to may come from elsewhere, where the sum then goes."""

OnePassStep = Callable[..., Any]
"""``CPUAdam.step``: widens ``grads``, divides by ``scale``, steps on masters ``only``, casts into ``out``."""


def clip_divisor(norm: float, max_norm: float) -> float:
    """What gradients of global norm ``norm`` are divided by so that the norm becomes at most ``max_norm``.

    ``max_norm = 0`` switches clipping off. torch multiplies by ``max_norm / (norm + 1e-6)``; this is its inverse.

    Example:
        >>> clip_divisor(10.0, 2.0), clip_divisor(1.0, 2.0), clip_divisor(10.0, 0.0)
        (5.0000005, 1.0, 1.0)
    """
    return max(1.0, (norm + 1e-6) / max_norm) if max_norm > 0 else 1.0


def unscale_and_clip_grads(grads: Sequence[torch.Tensor], divisor: torch.Tensor) -> None:
    """Divide gradients in place by a one-element fp32 tensor."""
    for grad in grads:
        grad.div_(divisor)


class OptimizerShard:
    """What this rank's optimizer holds, and its step.

    Args:
        optimizer: the user's; its param groups hold exactly the groups' masters.
        groups: all trained groups.
        grad_dtype: accumulation dtype, of ``grad_S``.
        rank: this rank.
        whole_sums: the reducer hands out whole sums (stage 0, or ``reduce_scatter=False``), not this rank's part.
        sub_group_size: step on at most this many elements at a time (a fragment is never cut); None: on all. What the
            optimizer makes besides its state, and gradients that have to be widened, then exist for one sub-group only.
        one_pass: the optimizer's way to step in one pass over memory, if it has one.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        groups: Sequence[ParamGroup],
        grad_dtype: torch.dtype,
        rank: int,
        whole_sums: bool = False,
        sub_group_size: int | None = None,
        one_pass: OnePassStep | None = None,
    ) -> None:
        self.optimizer, self.groups, self.rank = optimizer, list(groups), rank
        self.grad_dtype, self.whole_sums = grad_dtype, whole_sums
        # Kept for the whole run: fresh memory costs several times the sum that is written into it.
        extent = lambda group: group.layout.padded_numel if whole_sums else self._device_numel(group)
        self.grad_S = [torch.zeros(extent(group), dtype=grad_dtype, device=group.device) for group in groups]
        masters = (master for group in self.groups for master in group.masters)
        pairs = zip(masters, self._grad_fragments(), strict=True)
        self.parts = [MasterFragment(master, grad.view_as(master)) for master, grad in pairs]
        # Masters and gradients stay where they are from step to step, so the fragments are cut once.
        self._master_ids = {id(part.master) for part in self.parts}
        self.sub_groups = cut_into_sub_groups(self._device_parts(), sub_group_size)
        # Called with a sub-group's number when the device has stepped on it.
        self.on_stepped: Callable[[int], None] = lambda number: None
        self._one_pass = one_pass
        # torch's contract with GradScaler: such an optimizer divides by the attribute ``grad_scale`` while it steps.
        self._divides = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        # The user has the same optimizer object in hand, and must not step with it.
        self._allowed = False
        optimizer.register_step_pre_hook(self._refuse_direct_step)

    def _device_numel(self, group: ParamGroup) -> int:
        """Elements of the group's shard whose reduced gradients are on the device."""
        return group.layout.shard_numel

    def _device_parts(self) -> list[MasterFragment]:
        """The fragments that the device steps on."""
        return self.parts

    # ---- 3, 4: reduced gradients arrive ------------------------------------------------------------------------------

    def grad_output(self, group: int, bucket: Bucket, accumulate: bool, measure: Measure | None) -> GradOutput:
        """Where the reducer writes the sum of a bucket's gradients: bucket ``bucket`` of ``groups[group]``."""
        # ``accumulate``: it is added to what this step has brought already; here that happens in place, in ``grad_S``.
        # ``measure`` sees the result while it is in the core's cache.
        if self.whole_sums:
            # Stage 0 steps on all of it. Stage 1 with reduce_scatter=False uses a W-th of what it receives.
            return bucket.of(self.grad_S[group]), measure, contextlib.nullcontext
        start = self.groups[group].layout.shard_numel - self.grad_S[group].numel()  # what comes before is on the host
        return bucket.shard_of(self.grad_S[group], start), measure, contextlib.nullcontext

    def grad_shard(self, group: int, bucket: Bucket) -> torch.Tensor:
        """This rank's part of a bucket's reduced gradients: 1-D, ``bucket.shard_numel`` elements."""
        output, *_ = self.grad_output(group, bucket, False, None)
        return output.split(bucket.shard_numel)[self.rank] if self.whole_sums else output

    def _grad_fragments(self) -> Iterator[torch.Tensor]:
        """This rank's fragment of every parameter's sum, in the order of the groups' fragments."""
        for g, group in enumerate(self.groups):
            starts = [bucket.shard_offset for bucket in group.layout.buckets]
            for fragment in group.fragments:
                if group.whole:  # a fragment is a whole parameter, which lies as in flat_P
                    yield self.grad_S[g][fragment.shard_start :][: fragment.numel]
                    continue
                # No fragment crosses the end of its bucket's shard.
                bucket = group.layout.buckets[bisect.bisect_right(starts, fragment.shard_start) - 1]
                yield self.grad_shard(g, bucket)[fragment.shard_start - bucket.shard_offset :][: fragment.numel]

    def drain_grads(self) -> None:
        """Wait for gradients that are on their way elsewhere. None are, on the device."""

    def discard_grads(self) -> None:
        """Forget gradients that are on their way elsewhere."""

    # ---- 4 boundary, 5 step ------------------------------------------------------------------------------------------

    def before_step(self) -> None:
        """4: check that the masters are the optimizer's, and let them take over what was written into parameters.

        Raises:
            RuntimeError: the optimizer holds other parameters than at build, or a parameter was moved away.
        """
        # By identity: a tensor that compares equal has another gradient.
        held = [id(param) for group in self.optimizer.param_groups for param in group["params"]]
        if len(held) != len(self._master_ids) or not self._master_ids.issuperset(held):
            raise RuntimeError(
                "the optimizer's parameters have changed since deepzero.initialize (add_param_group, an assignment to "
                "param_groups): ZeRO has no gradients for the new ones. Build the optimizer with all groups first"
            )
        for group in self.groups:
            group.sync_masters_from_params()

    def step(self, divisor: float) -> None:
        """Unscale and clip by ``divisor`` (see the module's text), then step. The model is new when it is published."""
        # One after the other: what the optimizer makes besides its state is freed before the next one needs it.
        for number, sub_group in enumerate(self.sub_groups):
            if sub_group:
                self._optimizer_step(sub_group, divisor)
            self.on_stepped(number)

    def step_by_bucket(self, order: Sequence[tuple[int, Bucket]], on_stepped: Callable[[int, Bucket], None]) -> None:
        """Let :meth:`step` go bucket by bucket, in ``order``, and call ``on_stepped`` with each of the device's."""
        # The number of a group, and a bucket of it; this rank may have no fragment there.
        here = [(g, bucket) for g, bucket in order if not self.groups[g].placement.steps_on_host(bucket)]
        self.sub_groups = [self.parts_of(g, bucket) for g, bucket in here]
        self.on_stepped = lambda number: on_stepped(*here[number])

    def parts_of(self, g: int, bucket: Bucket) -> list[MasterFragment]:
        """This rank's part of a bucket of ``groups[g]``, as the optimizer's tensors."""
        first = sum(len(group.fragments) for group in self.groups[:g])
        starts = [fragment.shard_start for fragment in self.groups[g].fragments]
        lo, hi = (
            bisect.bisect_left(starts, at) for at in (bucket.shard_offset, bucket.shard_offset + bucket.shard_numel)
        )
        return self.parts[first + lo : first + hi]

    @torch.no_grad()
    def _optimizer_step(
        self, sub_group: SubGroup, divisor: float, outs: list[torch.Tensor | None] | None = None
    ) -> None:
        """Step on one sub-group, and cast the new value of each fragment into its tensor of ``outs``, if it has one."""
        # CPUAdam casts in its one pass over memory; behind any other optimizer each fragment is copied.
        try:
            self._allowed = True
            if self._one_pass is not None:
                grads, masters = [part.grad for part in sub_group], [part.master for part in sub_group]
                self._one_pass(grads=grads, out=outs, scale=divisor, only=masters)
            else:
                self._unscale_and_step(sub_group, divisor)
                for part, out in zip(sub_group, outs or [], strict=outs is not None):
                    if out is not None:
                        out.copy_(part.master.view(-1))
        finally:
            self._allowed = False

    def _unscale_and_step(self, parts: SubGroup, divisor: float) -> None:
        """Step with one of torch's optimizers, which pass over parameters without ``.grad``: other sub-groups'."""
        # fp32 sums are the gradients themselves, divided in place below; narrower ones are widened, for this sub-group.
        for part in parts:
            part.master.grad = part.grad if part.grad.dtype == torch.float32 else part.grad.to(torch.float32)
        grads = [part.master.grad for part in parts if part.master.grad is not None]
        # Filled on the gradients' device (``torch.tensor`` would make the CPU wait), as fused kernels ask for it.
        scale = torch.full((), divisor, dtype=torch.float32, device=grads[0].device) if grads else None
        fused_division = self._divides and divisor != 1.0
        if divisor != 1.0 and not fused_division and scale is not None:
            unscale_and_clip_grads(grads, scale)
        try:
            if fused_division:
                self.optimizer.grad_scale = scale  # type: ignore[attr-defined]
                # None: ranks have agreed on finiteness before, and no kernel is to look again.
                self.optimizer.found_inf = None  # type: ignore[attr-defined]
            self.optimizer.step()
        finally:
            # A later step without division must not find the old scale.
            if fused_division:
                del self.optimizer.grad_scale, self.optimizer.found_inf  # type: ignore[attr-defined]
        for part in parts:
            part.master.grad = None  # grad_S is kept, and the next reduction writes into it

    def _refuse_direct_step(self, *_: object) -> None:
        if not self._allowed:
            raise RuntimeError(
                "optimizer.step() was called directly; under ZeRO this rank's optimizer holds a share of the "
                "parameters and its gradients are not reduced yet. Call engine.step() instead"
            )

    # ---- updates that are not applied in their own step (``offload/delayed_update.py``) ------------------------------

    # An update is being made, or is made and not sent. Never so without a delay.
    update_pending = False

    def wait_pending_update(self) -> None:
        """Wait until masters and moments may be read: no thread steps on them."""

    def apply_pending_update(self) -> bool:
        """Send what a delayed update has written; the next publication brings it into the model. A collective.

        Returns:
            Whether there was one.
        """
        return False

    def drop_pending_update(self) -> None:
        """Forget a delayed update: everything is about to be replaced."""

    def set_applied_steps(self, steps: int) -> None:
        """Go on after so many applied steps, by which a delay may begin late."""


def cut_into_sub_groups(parts: Sequence[MasterFragment], limit: int | None) -> list[list[MasterFragment]]:
    """Consecutive fragments, at most ``limit`` elements together unless one alone has more."""
    groups: list[list[MasterFragment]] = [[]]
    total = 0
    for part in parts:
        if groups[-1] and limit is not None and total + part.master.numel() > limit:
            groups.append([])
            total = 0
        groups[-1].append(part)
        total += part.master.numel()
    return groups
