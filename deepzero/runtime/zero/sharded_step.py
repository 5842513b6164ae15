"""The optimizer step on this rank's share: unscale and clip, step. Shared by all stages, composed.

Step 4 of a training step. Before it, every rank holds the *sum* over ranks and micro-batches of its part of the
gradients, times the loss scale. Mean, loss scale and clipping are one division:

    g = sum / (ranks * micro-batches * loss_scale * clip)       clip = max(1, (norm + 1e-6) / max_norm)

It happens in fp32 after all additions, so nothing can overflow or underflow on the way, and it is exact whenever the
divisor is a power of two. A divisor of one is skipped: then the optimizer sees the very bits that autograd produced.
torch's fused optimizers divide while they step (``grad_scale``), which saves a pass over memory; others get
:func:`unscale_and_clip_grads` first. Both divide by the same fp32 number, and so give the same bits.

The scale that is divided out is the one that multiplied this step's loss. DeepSpeed updates the scale first, and halves
the gradient of every step on which the scale doubles.

With ``zero.offload_optimizer`` the step goes sub-group by sub-group: first what is left on the device, which a GPU does
while the CPU goes on; then, in host memory, one bucket of the layout after the other (``param_upload.py``).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from deepzero.comm import profiler_ranges
from deepzero.layout import Bucket, FlatLayout, Fragment
from deepzero.offload.copy_streams import ADAM, OffloadStats
from deepzero.offload.cpu_adam import CPUAdam
from deepzero.offload.offload_plan import OffloadPlan
from deepzero.runtime.zero.master_shard import MasterShard


class ParamGroup(Protocol):
    """A group of parameters, whole (``FlatParamGroup``) or partitioned (``PartitionedParamGroup``)."""

    names: list[str]
    layout: FlatLayout
    whole: bool
    """Masters and gradients of everything on every rank (stage 0)."""
    dtype: torch.dtype
    device: torch.device
    masters: list[torch.Tensor]
    fragments: list[Fragment]
    optimizer_group: Any
    before_write: Callable[[], None] | None
    """Asked before parameters are written from outside; raises while they must not be."""
    placement: OffloadPlan
    master_store: MasterShard

    @property
    def parameter_storage(self) -> list[torch.Tensor]:
        """What this rank keeps of the parameters on its device: all of them, or its share."""

    def master_of(self, bucket: Bucket) -> torch.Tensor:
        """The masters of this rank's part of ``bucket``, padding included."""

    def param_shard(self, bucket: Bucket) -> torch.Tensor:
        """This rank's part of ``bucket`` in the compute dtype, padding included."""

    def wait_for_fetches(self, bucket: Bucket) -> None:
        """Before new parameters are written where they live."""

    def param_fragment(self, fragment: Fragment) -> torch.Tensor:
        """This rank's piece of one parameter in the compute dtype."""

    def written(self) -> list[str]:
        """Names of parameters that were written since the last step."""

    def bump_param_versions(self) -> None:
        """Values were written between two steps, by nobody outside."""

    def sync_masters_from_params(self) -> None:
        """Before a step: what was written into parameters is kept, or refused."""

    def write(self, index: int, values: torch.Tensor) -> None:
        """New values, 1-D, whole and fp32, for one parameter and its master."""

    def release(self) -> None:
        """Let the parameters belong to nobody again."""

    @property
    def params(self) -> Sequence[nn.Parameter]:
        """In the order of the layout."""


@dataclass(frozen=True)
class MasterFragment:
    """One optimizer tensor and where its gradient lies."""

    master: torch.Tensor
    """fp32 leaf that the optimizer holds."""
    grad: torch.Tensor
    """Reduced gradient, the master's extent, in the accumulation dtype."""


class ParamUpload(Protocol):
    """The way from a step in host memory to the parameters; see ``param_upload.py``."""

    parts: list[MasterFragment]

    def outs(self) -> list[torch.Tensor | None]:
        """Where the new parameters are written in the compute dtype, part by part."""

    def send(self) -> None:
        """They are written."""

    def where(self) -> tuple[int, str]:
        """The bucket's number and its first parameter, for traces."""


@dataclass(frozen=True)
class HostStepPlan:
    """What the CPU steps on, how, and who counts."""

    ways: Sequence[ParamUpload]
    threads: int
    meter: OffloadStats


@dataclass(frozen=True)
class SubGroup:
    """Parts that are stepped on together."""

    parts: Sequence[MasterFragment]
    back: ParamUpload | None = None
    """Of a sub-group in host memory."""
    masters: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, parts: Sequence[MasterFragment], back: ParamUpload | None = None) -> SubGroup:
        """With its masters."""
        return cls(parts, back, [part.master for part in parts])


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


@contextlib.contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """So many threads for the CPU's kernels inside, as before afterwards."""
    before = torch.get_num_threads()
    try:
        if count != before:
            torch.set_num_threads(count)
        yield
    finally:
        if count != before:
            torch.set_num_threads(before)


class ShardedStep:
    """Runs the user's optimizer over this rank's masters.

    Args:
        optimizer: its param groups hold exactly the masters.
        parts: one for each master.
        sub_group_size: step on at most this many elements at a time (one part is never cut); None: on all. What the
            optimizer makes besides its state, and gradients that have to be widened, then exist for one sub-group only.
        host: the parts that are in host memory; None: there are none.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parts: Sequence[MasterFragment],
        sub_group_size: int | None = None,
        host: HostStepPlan | None = None,
    ) -> None:
        self.optimizer, self.parts, self.host = optimizer, list(parts), host
        ways = host.ways if host is not None else ()
        there = {id(part.master) for way in ways for part in way.parts}
        here = [part for part in self.parts if id(part.master) not in there]
        self.update_pending = False
        """Whether an update is on its way: see ``delayed_update.py``."""
        self.on_device = [SubGroup.of(some) for some in _sub_groups(here, sub_group_size) if some]
        self.on_host = [SubGroup.of(way.parts, way) for way in ways]
        # torch's contract with GradScaler: such an optimizer divides by the attribute ``grad_scale`` while it steps.
        self._divides = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        self._allowed = False
        self._masters = {id(part.master) for part in self.parts}
        optimizer.register_step_pre_hook(self._refuse_direct_step)

    def _refuse_direct_step(self, *_: object) -> None:
        if not self._allowed:
            raise RuntimeError(
                "optimizer.step() was called directly; under ZeRO this rank's optimizer holds a share of the "
                "parameters and its gradients are not reduced yet. Call engine.step() instead"
            )

    def before_step(self, groups: Sequence[ParamGroup]) -> None:
        """Before anything of a step: the masters are the optimizer's, and have what was written into parameters."""
        self._check_masters()
        for group in groups:
            group.sync_masters_from_params()

    def join(self) -> None:
        """Masters and moments may be read: nothing runs behind anybody's back here; see ``delayed_update.py``."""

    def finish(self) -> bool:
        """Nothing is late."""
        return False

    def forget(self) -> None:
        """Nothing is on its way."""

    def set_applied_steps(self, steps: int) -> None:
        """The run goes on after so many applied steps, which only a delay that begins late has to know."""

    def step(self, divisor: float) -> None:
        """Unscale and clip, then step. The masters are new afterwards; the model is not, until they are published.

        Args:
            divisor: the number by which the reduced sums are divided; see the module's text.
        """
        for group in self.on_device:
            self.step_sub_group(group, divisor, None)
        self.step_on_host(divisor)

    def _check_masters(self) -> None:
        """Raise when the optimizer's parameters are no longer the masters."""
        held = [id(param) for group in self.optimizer.param_groups for param in group["params"]]
        if len(held) != len(self._masters) or not self._masters.issuperset(held):
            raise RuntimeError(
                "the optimizer's parameters have changed since deepzero.initialize (add_param_group, an assignment to "
                "param_groups): ZeRO has no gradients for the new ones. Build the optimizer with all groups first"
            )

    def step_on_host(self, divisor: float) -> None:
        """The sub-groups in host memory; each one's parameters leave while the next one is updated."""
        if self.host is None:
            return
        leg = self.host.meter.leg(ADAM)
        with cpu_threads(self.host.threads):
            for group in self.on_host:
                if group.back is None:
                    continue
                outs = group.back.outs()
                began = time.perf_counter()
                with profiler_ranges.span("step", *group.back.where()):
                    self.step_sub_group(group, divisor, outs)
                took = time.perf_counter() - began
                leg.add(bytes_of_step(self.optimizer, group, outs), took, took)
                group.back.send()

    @torch.no_grad()
    def step_sub_group(self, group: SubGroup, divisor: float, outs: list[torch.Tensor | None] | None) -> None:
        """One sub-group.

        Args:
            group: which.
            divisor: as for :meth:`step`.
            outs: where the new parameters are written, cast; None: nowhere.
        """
        try:
            self._allowed = True
            if isinstance(self.optimizer, CPUAdam):
                # One pass: it widens, divides, steps and casts chunk by chunk.
                grads = [part.grad for part in group.parts]
                self.optimizer.step(grads=grads, out=outs, scale=divisor, only=group.masters)
            else:
                self._step_any(group.parts, divisor)
                for part, out in zip(group.parts, outs or [], strict=outs is not None):
                    if out is not None:
                        out.copy_(part.master)
        finally:
            self._allowed = False

    def _step_any(self, parts: Sequence[MasterFragment], divisor: float) -> None:
        """Torch's optimizers pass over parameters without gradient: those of the other sub-groups."""
        for part in parts:
            part.master.grad = part.grad if part.grad.dtype == torch.float32 else part.grad.to(torch.float32)
        grads = [part.master.grad for part in parts if part.master.grad is not None]
        scale = torch.tensor(divisor, dtype=torch.float32, device=grads[0].device) if grads else None
        fused_division = self._divides and divisor != 1.0
        if divisor != 1.0 and not fused_division and scale is not None:
            unscale_and_clip_grads(grads, scale)
        try:
            if fused_division:
                self.optimizer.grad_scale = scale  # type: ignore[attr-defined]
                self.optimizer.found_inf = None  # type: ignore[attr-defined]
            self.optimizer.step()
        finally:
            if fused_division:
                del self.optimizer.grad_scale, self.optimizer.found_inf  # type: ignore[attr-defined]
        for part in parts:
            part.master.grad = None


def bytes_of_step(optimizer: torch.optim.Optimizer, group: SubGroup, outs: Sequence[torch.Tensor | None]) -> int:
    """Bytes that a one-pass step reads and writes: masters and moments twice, gradients and new parameters once."""
    states = [t for m in group.masters for t in optimizer.state.get(m, {}).values() if torch.is_tensor(t) and t.dim()]
    kept = sum(t.nbytes for t in [*group.masters, *states])
    return 2 * kept + sum(part.grad.nbytes for part in group.parts) + sum(o.nbytes for o in outs if o is not None)


def _sub_groups(parts: Sequence[MasterFragment], limit: int | None) -> list[list[MasterFragment]]:
    groups: list[list[MasterFragment]] = [[]]
    total = 0
    for part in parts:
        if groups[-1] and limit is not None and total + part.master.numel() > limit:
            groups.append([])
            total = 0
        groups[-1].append(part)
        total += part.master.numel()
    return groups
