"""Reduced gradients, partitioned: from autograd to this rank's ``grad_S``. Shared by stages 1, 2 and 3, composed.

Steps 2 and 3 of a training step. Gradients leave bucket by bucket, in one order on all ranks, each as soon as it is
complete and next; what no gradient has completed when the backward pass ends counts as zeros.

Sources: ``reduce_ipg_grads`` and ``independent_gradient_partition_epilogue`` in DeepSpeed's ``stage_1_and_2.py``.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import nn

from deepzero.comm import profiler_ranges
from deepzero.comm.reduce_scatter import BucketReducer, Measure
from deepzero.layout import Bucket
from deepzero.offload.host_gradients import HostGradients
from deepzero.runtime.grad_norm import BlockNorms
from deepzero.runtime.zero.grad_accumulator import BucketRef, GradAccumulator, ParamGroup
from deepzero.runtime.zero.sharded_step import MasterFragment


class GradientReducer:
    """``grad_S``, and the way to it.

    Args:
        groups: each with this rank's masters.
        order: the buckets in launching order, the same on all ranks.
        source: the unreduced gradients.
        reducer: sends them to their owners.
        every_pass: reduce every micro-batch (stages 2 and 3) instead of the sum of all of them (stage 1).
        overlap: where ``every_pass`` is False, reduce the last micro-batch during its backward pass.
        grad_dtype: dtype of ``grad_S``.
        launched: called with each bucket whose gradients are complete and have been sent.
        host: has the sums that live in host memory; None: none do.
    """

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        order: Sequence[BucketRef],
        source: GradAccumulator,
        reducer: BucketReducer,
        every_pass: bool,
        overlap: bool,
        grad_dtype: torch.dtype,
        launched: Callable[[BucketRef], None] | None = None,
        host: HostGradients | None = None,
    ) -> None:
        self.groups, self.order, self.source, self.reducer = list(groups), list(order), source, reducer
        self.every_pass, self.overlap, self.grad_dtype = every_pass, overlap, grad_dtype
        self._launched, self._host = launched, host
        self.leaf_params: set[nn.Parameter] = set()
        """Parameters of leaf modules. Which of their gradients come, and in which order, may differ between ranks; so
        they count as complete all at once, at a moment that is the same on all ranks."""
        # With reduce_scatter=False the reducer hands out whole sums, of which this rank then uses its W-th part.
        extents = [
            g.layout.padded_numel if reducer.whole else g.layout.shard_numel - g.placement.optimizer_numel
            for g in groups
        ]
        self.grad_S = [
            torch.zeros(extent, dtype=grad_dtype, device=group.device)
            for extent, group in zip(extents, groups, strict=True)
        ]
        # Of every group, taken as the sums are written; and which buckets' are up to date.
        self._norms = [BlockNorms(group.layout.shard_numel, group.device) for group in groups]
        self._measured: set[tuple[int, int]] = set()
        # Position in ``order`` within this backward pass, which gradients have arrived in it, and how many are missing
        # in each bucket.
        self._cursor = 0
        self._arrived: set[nn.Parameter] = set()
        self._place = {
            groups[entry.group].params[slot.index]: position
            for position, entry in enumerate(order)
            for slot in entry.bucket.slots
        }
        self._missing = [len(entry.bucket.slots) for entry in order]
        self._pass_began = False
        # How often leaf modules with parameters in a bucket were complete in this pass, by position.
        self._completions: dict[int, int] = {}
        self.present = False
        """Whether a backward pass has ended since the last step."""
        self.reduced = False
        """Whether ``grad_S`` holds gradients of this step, to which the next reduction adds; else they wait in the
        source."""

    # ---- 2: gradient ready -------------------------------------------------------------------------------------------

    def gradient_ready(self, param: nn.Parameter, boundary: bool) -> None:
        """2: keep the gradient, or launch every bucket that is now complete and next in order.

        Args:
            param: its ``.grad`` is complete.
            boundary: this is the last micro-batch of the optimizer step.
        """
        leaves = self._leaves_now(boundary)
        self.source.accumulate(param, again=leaves and param in self._arrived)
        if not leaves:
            return
        self._pass_began = True
        if param not in self.leaf_params:
            self._count(param)
            self._launch_complete(boundary)

    def leaf_grads_complete(self, params: Iterable[nn.Parameter], boundary: bool) -> None:
        """All gradients of some of :attr:`leaf_params` are there; those that did not come count as zeros."""
        if self._leaves_now(boundary):
            self._pass_began = True
            mine = [param for param in params if param in self._place]
            for position in {self._place[param] for param in mine}:
                self._completions[position] = self._completions.get(position, 0) + 1
            for param in mine:
                self._count(param)
            self._launch_complete(boundary)

    def _count(self, param: nn.Parameter) -> None:
        if param not in self._arrived:
            self._arrived.add(param)
            self._missing[self._place[param]] -= 1

    def _launch_complete(self, boundary: bool) -> None:
        while self._cursor < len(self.order) and self._missing[self._cursor] == 0:
            self._reduce(self.order[self._cursor], boundary)
            self._cursor += 1

    def _leaves_now(self, boundary: bool) -> bool:
        """Whether gradients of the backward pass under way are sent as they come."""
        return self.every_pass or (self.overlap and boundary) or self.reduced

    def backward_end(self, boundary: bool) -> None:
        """Launch what no further gradient will complete. A parameter without gradient counts as zeros."""
        self.present = True
        if not self._leaves_now(boundary) or not self._pass_began:
            return
        for entry in self.order[self._cursor :]:
            self._reduce(entry, boundary)
        # A weight that is used inside and outside a reentrantly checkpointed block gets two gradients in one pass. The
        # second is sent after the first and added to it, also where the first's bucket was still here when it came:
        # the sum's bits do not depend on what else is in the bucket.
        # Leaf modules: what waits differs between ranks, how often they were complete does not.
        for position, entry in enumerate(self.order):
            if self._completions.get(position, 0) > 1 or self.source.waiting(entry):
                self._reduce(entry, boundary, again=True)
        self.source.name_unused()
        self.forget_pass()
        self.reduced = True

    def forget_pass(self) -> None:
        """The next gradient belongs to another backward pass."""
        self._cursor = 0
        self._pass_began = False
        self._completions.clear()
        self._arrived.clear()
        self._missing = [len(entry.bucket.slots) for entry in self.order]
        self.source.forget_pass()

    def _reduce(self, entry: BucketRef, boundary: bool, again: bool = False) -> None:
        """Lay one bucket into a bucket, free its gradients, and send it to its owners.

        At the boundary nothing is added to the sum afterwards, so its block norms are taken as it is written.
        """
        key = (entry.group, entry.bucket.index)
        self._measured.discard(key)
        measure: Measure | None = None
        if boundary and not self.reducer.whole:
            measure = partial(self._norms[entry.group].measure, entry.bucket.shard_offset)
            self._measured.add(key)
        accumulate = self.reduced or again
        output, measure, leave = self._destination(entry, accumulate, measure)
        first = self.groups[entry.group].names[entry.bucket.slots[0].index]
        with profiler_ranges.span("reduce", entry.bucket.index, first):
            send_buffer = self.reducer.acquire(entry.bucket, output, accumulate)
            self.source.fill(entry, send_buffer, name_unused=not again)
            self.reducer.launch(entry.bucket, output, accumulate, measure, leave, entry.group, first)
        if self._launched is not None:
            self._launched(entry)

    def _destination(
        self, entry: BucketRef, accumulate: bool, measure: Measure | None
    ) -> tuple[torch.Tensor, Measure | None, Callable[[], None] | None]:
        """Where the sum is written, who measures it there, and what happens to it then."""
        group, bucket = entry.group, entry.bucket
        if self._host is None or not self._host.holds(group, bucket):
            return self._sum_of(group, bucket), measure, None
        slot, output = self._host.stage(bucket, accumulate)
        padding = bucket.padding_of(self.reducer.comm.rank)
        # What is added on the host is measured there.
        there = measure if accumulate else None
        leave = partial(self._host.leave, slot, group, bucket, accumulate, padding, there)
        return output, None if accumulate else measure, leave

    # ---- 3: boundary -------------------------------------------------------------------------------------------------

    def finish_gradients(self) -> None:
        """3 boundary: flush and wait. What has left during the backward pass has only its last buckets to wait for."""
        self.reduce_now()
        self.present = self.reduced = False

    def reduce_now(self) -> None:
        """Send what waits, if nothing has been sent in this step; wait for what is under way."""
        if not self.reduced:
            # Stage 1 without overlap; or no gradient at all since the last step: zeros, as every rank would send.
            for entry in self.order:
                self._reduce(entry, boundary=True)
            self.source.name_unused()
        self.drain()
        self.reduced = True

    def drain(self) -> None:
        """Everything that is under way has arrived."""
        self.reducer.drain()
        if self._host is not None:
            self._host.drain()

    def written(self, group: int, bucket: Bucket) -> None:
        """Somebody has changed sums of this bucket: its norms have to be taken anew."""
        self._measured.discard((group, bucket.index))

    def _sum_of(self, group: int, bucket: Bucket) -> torch.Tensor:
        """Where the reducer writes: this rank's part of the bucket, or all of it with ``reduce_scatter=False``."""
        if self.reducer.whole:
            return self.grad_S[group][bucket.offset : bucket.offset + bucket.numel]
        start = bucket.shard_offset - self.groups[group].placement.optimizer_numel
        return self.grad_S[group][start : start + bucket.shard_numel]

    # ---- 4: step -----------------------------------------------------------------------------------------------------

    def _my_sum(self, group: int, bucket: Bucket) -> torch.Tensor:
        """This rank's part of a bucket's reduced gradients."""
        if self._host is not None and self._host.holds(group, bucket):
            return self._host.sum_of(group, bucket)
        grad = self._sum_of(group, bucket)
        return grad.split(bucket.shard_numel)[self.reducer.comm.rank] if self.reducer.whole else grad

    def master_parts(self) -> list[MasterFragment]:
        """This rank's piece of every parameter."""
        masters = (master for group in self.groups for master in group.masters)
        return [MasterFragment(master, grad) for master, grad in zip(masters, self._pieces_of_sums(), strict=True)]

    def _pieces_of_sums(self) -> Iterator[torch.Tensor]:
        """This rank's piece of every parameter's sum, in the order of the groups' pieces."""
        for g, group in enumerate(self.groups):
            starts = [bucket.shard_offset for bucket in group.layout.buckets]
            for fragment in group.fragments:
                bucket = group.layout.buckets[bisect.bisect_right(starts, fragment.shard_start) - 1]
                yield self._my_sum(g, bucket)[fragment.shard_start - bucket.shard_offset :][: fragment.numel]

    def swap_host_sums(self, parts: Sequence[MasterFragment]) -> None:
        """The optimizer still reads this step's sums on the host: the next step's go to their other copy.

        Args:
            parts: from :meth:`master_parts`; their gradients are turned to that copy.
        """
        if self._host is not None:
            self._host.swap()
            for part, grad in zip(parts, self._pieces_of_sums(), strict=True):
                part.grad.set_(grad)  # type: ignore[call-overload]

    def norm_sq_partials(self) -> torch.Tensor:
        """This rank's share of the global norm, see ``grad_norm.py``: its own part of every bucket."""
        for entry in self.order:
            if (entry.group, entry.bucket.index) not in self._measured:
                mine = self._my_sum(entry.group, entry.bucket)
                self._norms[entry.group].measure(entry.bucket.shard_offset, mine, 0)
        self._measured.clear()
        return torch.stack([norms.norm_sq_partials() for norms in self._norms]).sum(0)

    def param_norm_sq(self) -> list[torch.Tensor]:
        """Of every group, by parameter: sums of squares of this rank's part of the sums that the norm was last of."""
        return [
            norms.squares(group.fragments, len(group.names))
            for norms, group in zip(self._norms, self.groups, strict=True)
        ]

    # ---- bookkeeping -------------------------------------------------------------------------------------------------

    def discard_gradients(self) -> None:
        """Forget this step's gradients, also those under way."""
        self.drain()
        if self.reduced or self._pass_began:
            # Error feedback would carry what was lost of these gradients into the next ones. Where nothing was sent, a
            # program merely drops its gradients after every step, and what was lost before still counts.
            self.reducer.forget()
        if self._host is not None:
            self._host.discard()
        self.source.discard()
        self.forget_pass()
        self._measured.clear()
        self.present = self.reduced = False

    def held_gradients(self) -> list[torch.Tensor]:
        """Tensors counted as gradients."""
        return [*self.source.held(), *self.grad_S]
