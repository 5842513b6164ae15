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

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from deepzero.comm.reduce_scatter import AroundSum
from deepzero.layout import Bucket
from deepzero.runtime.zero.stage_1_and_2 import ParamGroup

# ---- 5 step ----------------------------------------------------------------------------------------------------------

GradOutput = tuple[torch.Tensor, AroundSum]
"""Where a bucket's sum is written, and the context around the writing."""

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
    """Divide gradients in place by a one-element fp32 tensor, in which loss scale and clipping are one."""
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
        self.whole_sums = whole_sums
        # Kept for the whole run: fresh memory costs several times the sum that is written into it.
        on_device = lambda group: group.layout.shard_numel - group.placement.host_optimizer_numel
        extents = [group.layout.padded_numel if whole_sums else on_device(group) for group in groups]
        self.grad_S = [
            torch.zeros(extent, dtype=grad_dtype, device=group.device)
            for group, extent in zip(groups, extents, strict=True)
        ]
        self._outputs: dict[tuple[int, int], torch.Tensor] = {}  # where a bucket's sums go in them, cut once
        # By master, as torch keeps an optimizer's state: its gradient, a view of ``grad_S`` in the master's shape. Both
        # stay where they are from step to step, so the views are cut once.
        self.grads = self.cut_grads()
        self._sub_group_size = sub_group_size
        # The masters on which the device steps (the CPU may step on the first buckets), cut into sub-groups.
        stepped = (
            master for group in self.groups for fragment, master in zip(group.fragments, group.masters, strict=True)
            if fragment.shard_start >= group.placement.host_optimizer_numel
        )  # fmt: skip
        self.sub_groups = cut_into_sub_groups(stepped, sub_group_size)
        # Called with a sub-group's number when the device has stepped on it.
        self.on_stepped: Callable[[int], None] = lambda number: None
        self._one_pass = one_pass
        # The user has the same optimizer object in hand, and must not step with it.
        self._stepping = False
        optimizer.register_step_pre_hook(self._refuse_direct_step)

    # ---- 3, 4: reduced gradients arrive ------------------------------------------------------------------------------

    def grad_output(self, group: int, bucket: Bucket, accumulate: bool) -> GradOutput:
        """Where the reducer writes the sum of a bucket's gradients: bucket ``bucket`` of ``groups[group]``."""
        # With ``accumulate`` the reducer adds to what ``output`` holds: the sums of this step's earlier passes.
        if (output := self._outputs.get((group, bucket.index))) is None:
            sums, whole = self.grad_S[group], self.whole_sums
            start = self.groups[group].layout.shard_numel - sums.numel()  # what comes before is on the host
            # Stage 0 steps on all of it. Stage 1 with reduce_scatter=False uses a W-th of what it receives.
            output = self._outputs[group, bucket.index] = bucket.of(sums) if whole else bucket.shard_of(sums, start)
        return output, contextlib.nullcontext

    def grad_shard(self, group: int, bucket: Bucket) -> torch.Tensor:
        """This rank's part of a bucket's reduced gradients: 1-D, ``bucket.shard_numel`` elements."""
        output, _ = self.grad_output(group, bucket, accumulate=False)
        return output.split(bucket.shard_numel)[self.rank] if self.whole_sums else output

    def cut_grads(self) -> dict[torch.Tensor, torch.Tensor]:
        """:attr:`grads`, as the sums lie now."""
        grads: dict[torch.Tensor, torch.Tensor] = {}
        for g, group in enumerate(self.groups):
            for bucket in group.layout.buckets:
                sums = bucket.of(self.grad_S[g]) if group.replicated else self.grad_shard(g, bucket)
                first, _ = group.part_of(bucket)
                inside = group.fragment_slice(bucket)
                for fragment, master in zip(group.fragments[inside], group.masters[inside], strict=True):
                    grads[master] = sums[fragment.shard_start - first :][: fragment.numel].view_as(master)
        return grads

    def drain_grads(self) -> None:
        """Wait for gradients that are on their way to the host. Here none are."""

    def discard_grads(self) -> None:
        """Forget gradients that are on their way to the host."""

    def memory_problem(self) -> RuntimeError | None:
        """An error where sums or states are damaged, as after a write to a full disk; else None, as always here."""
        return None

    # ---- 4 boundary, 5 step ------------------------------------------------------------------------------------------

    def before_step(self) -> None:
        """4: check that the masters are the optimizer's, and let them take over what was written into parameters.

        Raises:
            RuntimeError: the optimizer holds other parameters than at build, or a parameter was moved away.
        """
        # By identity: a tensor that compares equal has another gradient.
        held = [id(param) for group in self.optimizer.param_groups for param in group["params"]]
        if len(held) != len(self.grads) or not set(map(id, self.grads)).issuperset(held):
            raise RuntimeError(
                "the optimizer's parameters have changed since deepzero.initialize (add_param_group, an assignment to "
                "param_groups): ZeRO has no gradients for the new ones. Build the optimizer with all groups first"
            )
        for group in self.groups:
            group.sync_masters_from_params()

    def step(self, divisor: float) -> None:
        """Unscale and clip by ``divisor`` (see the module's text), then step. The model gets the values in step 6."""
        # One after the other: what the optimizer makes besides its state is freed before the next one needs it.
        for number, sub_group in enumerate(self.sub_groups):
            if sub_group:
                self._optimizer_step(sub_group, divisor)
            self.on_stepped(number)

    def step_in_turns(
        self, turns: Sequence[Sequence[tuple[int, Bucket]]], on_stepped: Callable[[int, Bucket], None]
    ) -> None:
        """Let :meth:`step` go through buckets in ``turns``, and behind a turn call ``on_stepped`` with its buckets.

        Each bucket, with the number of its group, is in one turn. Those on which the CPU steps are left out.
        """
        self.sub_groups, last_of = [], dict[int, list[tuple[int, Bucket]]]()
        for turn in turns:
            here = [(g, bucket) for g, bucket in turn if not self.groups[g].placement.steps_on_host(bucket)]
            # A bucket may have no fragment on this rank.
            masters = [m for g, bucket in here for m in self.groups[g].masters[self.groups[g].fragment_slice(bucket)]]
            self.sub_groups += cut_into_sub_groups(masters, self._sub_group_size)
            last_of[len(self.sub_groups) - 1] = here

        def stepped(number: int) -> None:
            for g, bucket in last_of.get(number, ()):
                on_stepped(g, bucket)

        self.on_stepped = stepped

    @torch.no_grad()
    def _optimizer_step(
        self, masters: Sequence[torch.Tensor], divisor: float, outs: list[torch.Tensor | None] | None = None
    ) -> None:
        """Step on ``masters``, and cast the new value of each into its tensor of ``outs``, if it has one."""
        # CPUAdam casts in its one pass over memory; behind any other optimizer each fragment is copied.
        try:
            self._stepping = True
            if self._one_pass is not None:
                self._one_pass(grads=[self.grads[m] for m in masters], out=outs, scale=divisor, only=masters)
            else:
                self._unscale_and_step(masters, divisor)
                for master, out in zip(masters, outs, strict=True) if outs is not None else ():
                    if out is not None:
                        out.copy_(master)
        finally:
            self._stepping = False

    def _unscale_and_step(self, masters: Sequence[torch.Tensor], divisor: float) -> None:
        """Divide, and step with one of torch's optimizers. It steps on what has a ``.grad``: on ``masters`` alone."""
        # fp32 sums are the gradients themselves, divided in place below; narrower ones are widened, for this sub-group.
        grads = [self.grads[master].to(torch.float32) for master in masters]
        # Filled on the gradients' device (``torch.tensor`` would make the CPU wait), as fused kernels ask for it.
        divide_by = torch.full((), divisor, dtype=torch.float32, device=grads[0].device if grads else None)
        # torch's contract with GradScaler: such an optimizer divides by the attribute ``grad_scale`` while it steps.
        fused_division = divisor != 1.0 and bool(getattr(self.optimizer, "_step_supports_amp_scaling", False))
        if divisor != 1.0 and not fused_division:
            unscale_and_clip_grads(grads, divide_by)
        try:
            for master, grad in zip(masters, grads, strict=True):
                master.grad = grad
            if fused_division:
                self.optimizer.grad_scale = divide_by  # type: ignore[attr-defined]
                # None: ranks have agreed on finiteness before, and no kernel is to look again.
                self.optimizer.found_inf = None  # type: ignore[attr-defined]
            self.optimizer.step()
        finally:
            # The next call, on other masters, must find neither this scale nor these gradients.
            if fused_division:
                del self.optimizer.grad_scale, self.optimizer.found_inf  # type: ignore[attr-defined]
            for master in masters:
                master.grad = None  # grad_S is kept, and the next reduction writes into it

    def _refuse_direct_step(self, *_: object) -> None:
        if not self._stepping:
            raise RuntimeError(
                "optimizer.step() was called directly; under ZeRO this rank's optimizer holds a share of the "
                "parameters and its gradients are not reduced yet. Call engine.step() instead"
            )

    # ---- updates that are not applied in their own step (``offload/delayed_update.py``) ------------------------------

    # An update is being computed, or is not yet sent. Never so without a delay.
    update_pending = False

    def wait_pending_update(self) -> None:
        """Wait until no thread steps on masters and moments, so that they may be read."""

    def apply_pending_update(self) -> None:
        """Send what a delayed update has written; the next publication brings it into the model. A collective."""

    def drop_pending_update(self) -> None:
        """Drop a delayed update, as all values are about to be replaced."""

    def set_applied_steps(self, steps: int) -> None:
        """Go on from a checkpoint after so many applied steps: a delay may be set to begin at a later one."""


def cut_into_sub_groups(masters: Iterable[torch.Tensor], limit: int | None) -> list[list[torch.Tensor]]:
    """Consecutive masters, at most ``limit`` elements together unless one alone has more."""
    groups: list[list[torch.Tensor]] = [[]]
    total = 0
    for master in masters:
        if groups[-1] and limit is not None and total + master.numel() > limit:
            groups.append([])
            total = 0
        groups[-1].append(master)
        total += master.numel()
    return groups
