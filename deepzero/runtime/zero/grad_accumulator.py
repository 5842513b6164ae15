"""Gradients between autograd and the bucket: when they are ready, where they wait, how they are laid into a bucket.

Three small parts, used by all stages:

:class:`GradientHooks`   tells a stage that a parameter's gradient is complete, and that the backward pass has ended,
                         for ``engine.backward(loss)`` and for a plain ``loss.backward()`` alike.
:class:`GradAccumulator`  what waits to be sent: taken out of ``param.grad`` as it comes, so that no ``zero_grad`` of
                         the program's reaches it; while micro-batches are accumulated in a wider dtype than the
                         parameters', in a flat buffer over the layout.
:func:`schedule`         the one order in which all ranks launch buckets.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd import Variable

from deepzero.comm import process_group
from deepzero.layout import Bucket, FlatLayout, Fragment
from deepzero.offload.offload_plan import OffloadPlan
from deepzero.runtime.zero.buffer_pool import references
from deepzero.runtime.zero.master_shard import MasterShard

log = logging.getLogger(__name__)


class ParamGroup(Protocol):
    """What gradients need to know of a group, whole (``FlatParamGroup``) or partitioned (``PartitionedParamGroup``)."""

    names: list[str]
    layout: FlatLayout
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
class BucketRef:
    """One bucket in the launching order."""

    group: int
    bucket: Bucket


def schedule(groups: Sequence[ParamGroup], arrival: dict[nn.Parameter, int]) -> list[BucketRef]:
    """The order in which buckets are launched: by the expected arrival of their last gradient.

    Every rank launches in this order, whatever the order in which its own gradients arrive; ranks that launched as
    gradients come would pair different buckets as soon as one of them skips a branch of the model.

    Args:
        groups: all groups.
        arrival: for every parameter, its place in the expected order of arrival.
    """
    entries = [
        (max(arrival[group.params[slot.index]] for slot in bucket.slots), g, bucket)
        for g, group in enumerate(groups)
        for bucket in group.layout.buckets
    ]
    entries.sort(key=lambda entry: (entry[0], entry[1], entry[2].index))
    return [BucketRef(g, bucket) for _, g, bucket in entries]


class GradientHooks:
    """Calls ``ready(param)`` for each completed gradient, and ``end(reached)`` once at the end of each backward pass.

    The end is a callback of the autograd engine, queued from inside the pass. It must be queued from the *outermost*
    pass: reentrant activation checkpointing runs passes inside the pass, which end earlier. So the engine arms the
    hooks from the gradients of the model's outputs (:meth:`arm`), which come first; a parameter's gradient arms them
    only when nothing else has.

    ``torch.autograd.grad`` runs the same hooks of outputs, and accumulates nothing: ``reached`` says whether any
    parameter got a gradient.
    """

    def __init__(
        self, params: Iterable[nn.Parameter], ready: Callable[[nn.Parameter], None], end: Callable[[bool], None]
    ) -> None:
        self._ready, self._end = ready, end
        self._armed = self._reached = False
        self._handles = [param.register_post_accumulate_grad_hook(self._on_gradient) for param in params]

    def backward_aborted(self) -> bool:
        """Whether a backward pass has reached parameters, never ended, and is not under way now."""
        if torch._C._current_graph_task_id() != -1:
            return False
        if not self._reached:
            self._armed = False  # one that broke off before it reached a parameter has left nothing behind
        return self._reached

    def arm(self) -> None:
        """Ask to be called at the end of the backward pass that is under way."""
        if not self._armed:
            self._armed = True
            Variable._execution_engine.queue_callback(self._on_end)

    def disarm(self) -> None:
        """Forget a backward pass that broke off with an exception."""
        self._armed = self._reached = False

    def remove(self) -> None:
        """Leave the parameters as they were."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _on_gradient(self, param: nn.Parameter) -> None:
        self.arm()
        self._reached = True
        with torch._C.DisableTorchFunctionSubclass():  # asking for .grad needs no values: no detour through Python
            self._ready(param)

    def _on_end(self) -> None:
        reached = self._reached
        self.disarm()
        self._end(reached)


class GradAccumulator:
    """The unreduced gradients of all groups: as autograd made them, or summed over micro-batches in a flat buffer.

    Args:
        groups: all groups.
        accumulate_dtype: dtype in which micro-batches are summed before they are reduced; None sums them in the
            parameters' dtype, as autograd does in ``param.grad``.
    """

    def __init__(self, groups: Sequence[ParamGroup], accumulate_dtype: torch.dtype | None) -> None:
        self.groups = list(groups)
        # The parameters that had no gradient when their bucket was filled in this pass, and those named before.
        self._unused: list[str] = []
        self._unused_named: set[str] = set()
        self._gaps = {(g, i.index): i.gaps() for g, group in enumerate(groups) for i in group.layout.buckets}
        self._place = {
            param: (g, slot)
            for g, group in enumerate(groups)
            for param, slot in zip(group.params, group.layout.slots, strict=True)
        }
        # What waits: autograd's own tensors, or which parameters' places in the flat buffers are filled.
        self._grads: dict[nn.Parameter, torch.Tensor] = {}
        self._arrived: set[nn.Parameter] = set()
        self._later: dict[nn.Parameter, torch.Tensor] = {}
        self._alone = references(torch.empty(0))
        self.flat: list[torch.Tensor | None] = [None] * len(self.groups)
        for g, group in enumerate(self.groups):
            if accumulate_dtype is not None and accumulate_dtype.itemsize > group.dtype.itemsize:
                self.flat[g] = torch.zeros(group.layout.padded_numel, dtype=accumulate_dtype, device=group.device)

    def held(self) -> list[torch.Tensor]:
        """Tensors counted as gradients: those that wait now, and the flat buffers."""
        return [*self._grads.values(), *self._later.values(), *(flat for flat in self.flat if flat is not None)]

    @torch.no_grad()
    def accumulate(self, param: nn.Parameter, again: bool = False) -> None:
        """Take a gradient out of ``param.grad``, and add it to what waits; in the wider buffer, if there is one.

        Args:
            param: its ``.grad`` is complete.
            again: it is the parameter's second one in a pass whose gradients leave as they come. It waits apart and is
                sent after the first, also where the first is still here: the sum's bits do not depend on the buckets.
        """
        if param.grad is None:
            return
        grad, param.grad = param.grad.detach(), None  # with create_graph=True it would keep its graph alive
        g, slot = self._place[param]
        flat = self.flat[g]
        if flat is None or again:
            waiting = self._later if again else self._grads
            before = waiting.get(param)
            waiting[param] = grad if before is None else self._sum(before, grad)
        elif param in self._arrived:
            flat[slot.offset : slot.end].add_(_dense(grad))
        else:
            flat[slot.offset : slot.end].copy_(_dense(grad))
            self._arrived.add(param)

    def _sum(self, before: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """In autograd's order and dtype: a sum with a sparse part is as dense as the other one."""
        if before.is_sparse:
            return before.add_(grad) if grad.is_sparse else grad + before
        # Autograd may leave views of one gradient in several parameters (a sum of two flattened ones).
        return before.add_(grad) if references(before) <= self._alone else before + grad

    def waiting_of(self, param: nn.Parameter) -> torch.Tensor | None:
        """1-D: what waits to be sent next of one parameter, or None."""
        g, slot = self._place[param]
        flat = self.flat[g]
        if flat is not None and param in self._arrived:
            return flat[slot.offset : slot.end]
        grad = self._grads.get(param, self._later.get(param))
        return _dense(grad) if grad is not None else None

    def _sent(self, param: nn.Parameter) -> None:
        """What :meth:`waiting_of` gave has been laid into a bucket."""
        if param in self._arrived:
            self._arrived.discard(param)
        elif self._grads.pop(param, None) is None:
            del self._later[param]

    def waiting(self, entry: BucketRef) -> bool:
        """Whether any gradient of a bucket waits to be sent."""
        if not (self._grads or self._arrived or self._later):  # as at the end of nearly every pass
            return False
        params = [self.groups[entry.group].params[slot.index] for slot in entry.bucket.slots]
        return any(param in waiting for param in params for waiting in (self._grads, self._arrived, self._later))

    @torch.no_grad()
    def fill(self, entry: BucketRef, send_buffer: torch.Tensor, name_unused: bool = True) -> None:
        """Lay a bucket's gradients into ``send_buffer`` and free them. A parameter without gradient counts as zeros.

        Args:
            entry: which bucket.
            send_buffer: the bucket's extent, in the wire dtype.
            name_unused: :meth:`name_unused` will say which parameters got no gradient.
        """
        group, bucket = self.groups[entry.group], entry.bucket
        for lo, hi in self._gaps[entry.group, bucket.index]:
            send_buffer[lo:hi].zero_()
        for slot in bucket.slots:
            param = group.params[slot.index]
            place = send_buffer[slot.offset - bucket.offset : slot.end - bucket.offset]
            waiting = self.waiting_of(param)
            if waiting is not None:
                place.copy_(waiting)
                self._sent(param)
            else:
                place.zero_()
                self._unused += [group.names[slot.index]] if name_unused else []

    def forget_pass(self) -> None:
        """A pass that left no gradient is over: what was missing in it says nothing about the next one."""
        self._unused = []

    def name_unused(self) -> None:
        """After a pass, a line of rank 0's for all that were not named before. Others' may differ: it is a notice."""
        new = [name for name in self._unused if name not in self._unused_named]
        self._unused_named.update(new)
        self.forget_pass()
        if new and process_group.rank() == 0:
            names = ", ".join(new[:3]) + (f" and {len(new) - 3} more" if len(new) > 3 else "")
            log.warning("no gradient in this backward pass, so it counts as zeros (said once): %s", names)

    def discard(self) -> None:
        """Drop everything that waits."""
        self._grads.clear()
        self._arrived.clear()
        self._later.clear()
        self.forget_pass()
        for group in self.groups:
            free_grad_in_param_list(group.params)


def _dense(grad: torch.Tensor) -> torch.Tensor:
    """One-dimensional view of a gradient; ``nn.Embedding(sparse=True)`` makes sparse ones, which are filled up."""
    return (grad.to_dense() if grad.is_sparse else grad).reshape(-1)


def free_grad_in_param_list(params: Iterable[nn.Parameter]) -> None:
    """Let go of the gradients of ``params``; their memory is free for the next ones."""
    for param in params:
        param.grad = None
