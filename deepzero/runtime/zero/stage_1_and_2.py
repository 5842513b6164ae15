"""Stages 1 and 2: partitioned optimizer states, and partitioned gradients.

Both keep the parameters whole, give the optimizer this rank's ``master_S`` alone, and publish what it wrote with one
all-gather per interval. They differ in what happens to gradients:

``stage 1``  accumulates them whole, and reduce-scatters once per optimizer step, in the boundary. Memory
             ``2Ψ + 2Ψ + KΨ/W``. With ``overlap_comm`` the buckets of the last micro-batch leave, and are freed, while
             its backward pass goes on: whole gradients then exist only where earlier micro-batches have to be kept.
``stage 2``  reduce-scatters each bucket of every micro-batch as soon as it is full, while autograd goes on, and frees
             the gradients that left. Whole gradients never exist. Memory ``2Ψ + (2 + K)Ψ/W``.

(with 2-byte parameters and gradients. A rank's reduced share ``grad_S`` is fp32 here: ``4Ψ/W`` in place of stage 2's
``2Ψ/W``, and on top in stage 1.)

Volume per step of both: reduce-scatter ``Ψ(W-1)/W`` + all-gather ``Ψ(W-1)/W``, the same as plain data parallelism. With
``reduce_scatter=False`` stage 1 all-reduces the gradients as DeepSpeed's first release did, and uses a W-th of what it
receives: ``2Ψ + Ψ``, 1.5 times the volume for nothing. It is kept as a twin so that a test can count that.

One gradient's way, in the numbers of a training step: autograd completes ``param.grad`` → **2** ``gradient_ready`` lays
it into the bucket and frees it → the bucket is full: ``reducer.launch`` sends its parts to their owners → **3**
``finish_gradients`` flushes what is left and waits → **4** ``ShardedStep.step`` → **5** ``publish``.

Sources: "ZeRO Stage 1" and "Stage 1 Code" of the stage-1 notes; P_os and P_os+g of the ZeRO paper (section 5); the
DeepSpeed post on stage 1 with reduced communication; DeepSpeed's ``runtime/zero/stage_1_and_2.py``, whose names are
kept.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from deepzero.comm.bucket import BucketReducer
from deepzero.comm.collectives import Communicator, Pending
from deepzero.layout import Interval
from deepzero.runtime.grad_norm import BlockNorms
from deepzero.runtime.zero.flat_group import FlatGroup
from deepzero.runtime.zero.gradients import GradientSource, Scheduled
from deepzero.runtime.zero.sharded_step import MasterPart

ALL_GATHER = "parameters.all_gather"


class ZeroStage1And2:
    """Partitioned optimizer states (stage 1), and gradients (stage 2).

    Args:
        groups: built with ``whole=False``.
        order: the intervals in launching order, the same on all ranks.
        source: the unreduced gradients.
        reducer: sends them to their owners.
        comm: publishes parameters.
        partition_gradients: False is stage 1, True is stage 2.
        overlap: stage 1 reduces its last micro-batch during the backward pass.
        grad_dtype: dtype of ``grad_S``.
    """

    def __init__(
        self,
        groups: Sequence[FlatGroup],
        order: Sequence[Scheduled],
        source: GradientSource,
        reducer: BucketReducer,
        comm: Communicator,
        partition_gradients: bool,
        overlap: bool,
        grad_dtype: torch.dtype,
    ) -> None:
        self.order, self.source, self.reducer, self.comm = list(order), source, reducer, comm
        self.partition_gradients, self.overlap = partition_gradients, overlap
        self.groups = list(groups)
        self.bit16_groups = [group.params for group in groups]
        self.bit16_groups_flat = [group.flat_P for group in groups]
        self.parallel_partitioned_bit16_groups = [group.partitions for group in groups]
        self.single_partition_of_fp32_groups = [group.masters for group in groups]
        # With reduce_scatter=False the reducer hands out whole sums, of which this rank then uses its W-th part.
        extents = [g.layout.padded_numel if reducer.whole else g.layout.shard_numel for g in groups]
        self.grad_S = [
            torch.zeros(extent, dtype=grad_dtype, device=group.device)
            for extent, group in zip(extents, groups, strict=True)
        ]
        # Of every group, taken as the sums are written; and which intervals' are up to date.
        self._norms = [BlockNorms(group.layout.shard_numel, group.device) for group in groups]
        self._measured: set[tuple[int, int]] = set()
        # Position in ``order`` within this backward pass, which gradients have arrived in it, and how many are missing
        # in each interval.
        self._cursor = 0
        self._arrived: set[nn.Parameter] = set()
        self._place = {
            groups[entry.group].params[slot.index]: position
            for position, entry in enumerate(order)
            for slot in entry.interval.slots
        }
        self._missing = [len(entry.interval.slots) for entry in order]
        # Whether grad_S holds earlier micro-batches, to which the next reduction adds.
        self._accumulated = False

    # ---- 2: gradient ready -------------------------------------------------------------------------------------------

    def gradient_ready(self, param: nn.Parameter, boundary: bool) -> None:
        """2: keep the gradient, or launch every interval that is now complete and next in order.

        Args:
            param: its ``.grad`` is complete.
            boundary: this is the last micro-batch of the optimizer step.
        """
        self.source.accumulate(param)
        if not self._leaves_now(boundary):
            return
        if param not in self._arrived:
            self._arrived.add(param)
            self._missing[self._place[param]] -= 1
        while self._cursor < len(self.order) and self._missing[self._cursor] == 0:
            self._reduce(self.order[self._cursor], boundary)
            self._cursor += 1

    def _leaves_now(self, boundary: bool) -> bool:
        """Whether gradients of the backward pass under way are sent as they come."""
        return self.partition_gradients or (self.overlap and boundary)

    def backward_end(self, boundary: bool) -> None:
        """Launch what no further gradient will complete. A parameter without gradient counts as zeros."""
        if not self._leaves_now(boundary) or not self._arrived:
            return
        for entry in self.order[self._cursor :]:
            self._reduce(entry, boundary)
        # A weight that is used inside and outside a reentrantly checkpointed block gets two gradients in one pass, and
        # the second may come after its bucket left. It is sent after the first and added to it.
        for entry in self.order:
            if self.source.waiting(entry):
                self._reduce(entry, boundary, again=True)
        self._end_of_pass()
        self._accumulated = True

    def _end_of_pass(self) -> None:
        self._cursor = 0
        self._arrived.clear()
        self._missing = [len(entry.interval.slots) for entry in self.order]

    def _reduce(self, entry: Scheduled, boundary: bool, again: bool = False) -> None:
        """Lay one interval into a bucket, free its gradients, and send it to its owners.

        At the boundary nothing is added to the sum afterwards, so its block norms are taken as it is written.
        """
        key = (entry.group, entry.interval.index)
        self._measured.discard(key)
        measure = None
        if boundary and not self.reducer.whole:
            measure = partial(self._norms[entry.group].measure, entry.interval.shard_offset)
            self._measured.add(key)
        output, accumulate = self._sum_of(entry.group, entry.interval), self._accumulated or again
        bucket = self.reducer.acquire(entry.interval, output, accumulate)
        self.source.fill(entry, bucket, name_unused=not again)
        self.reducer.launch(entry.interval, output, accumulate, measure)

    # ---- 3: boundary -------------------------------------------------------------------------------------------------

    def finish_gradients(self) -> None:
        """3 boundary: flush and wait. What has left during the backward pass has only its last buckets to wait for."""
        if not self._accumulated:
            # Stage 1 without overlap; or no backward pass at all since the last step: zeros, as every rank would send.
            for entry in self.order:
                self._reduce(entry, boundary=True)
        self.reducer.drain()
        self._accumulated = False

    def _sum_of(self, group: int, interval: Interval) -> torch.Tensor:
        """Where the reducer writes: this rank's part of the interval, or all of it with ``reduce_scatter=False``."""
        if self.reducer.whole:
            return self.grad_S[group][interval.offset : interval.offset + interval.numel]
        return self.grad_S[group][interval.shard_offset : interval.shard_offset + interval.part_numel]

    # ---- 4: step -----------------------------------------------------------------------------------------------------

    def _my_sum(self, group: int, interval: Interval) -> torch.Tensor:
        """This rank's part of an interval's reduced gradients."""
        grad = self._sum_of(group, interval)
        return grad.split(interval.part_numel)[self.comm.rank] if self.reducer.whole else grad

    def master_parts(self) -> list[MasterPart]:
        """This rank's piece of every parameter."""
        parts = []
        for g, group in enumerate(self.groups):
            sums = {interval.shard_offset: self._my_sum(g, interval) for interval in group.layout.intervals}
            starts = sorted(sums)
            for piece, master in zip(group.pieces, group.masters, strict=True):
                start = starts[bisect.bisect_right(starts, piece.shard_start) - 1]
                grad = sums[start][piece.shard_start - start :][: piece.numel]
                parts.append(MasterPart(master, grad))
        return parts

    def square_words(self) -> torch.Tensor:
        """This rank's share of the global norm, see ``grad_norm.py``: its own part of every interval."""
        for entry in self.order:
            if (entry.group, entry.interval.index) not in self._measured:
                mine = self._my_sum(entry.group, entry.interval)
                self._norms[entry.group].measure(entry.interval.shard_offset, mine, 0)
        self._measured.clear()
        return torch.stack([norms.square_words() for norms in self._norms]).sum(0)

    # ---- 5: publish --------------------------------------------------------------------------------------------------

    def publish(self) -> None:
        """5: every rank gets every part of every interval. Parameters are views of the flat buffers: that is all."""
        for gather in self.all_gather_dp_groups():
            gather.wait()

    @torch.no_grad()
    def all_gather_dp_groups(self) -> list[Pending]:
        """Cast each master into my part of its interval and launch the interval's all-gather at once, in place."""
        gathers = []
        for group in self.groups:
            for interval in group.layout.intervals:
                partitions = group.partitions[interval.index]
                if group.dtype != torch.float32:
                    partitions[self.comm.rank].copy_(group.master_of(interval))
                whole = group.flat_P[interval.offset : interval.offset + interval.numel]
                padding = (self.comm.world_size - 1) * (interval.part_numel - interval.true_numel_of(self.comm.rank))
                where = f"interval {interval.index}"
                gathers.append(self.comm.all_gather(ALL_GATHER, partitions, whole, padding, where))
        return gathers

    # ---- bookkeeping -------------------------------------------------------------------------------------------------

    def discard_gradients(self) -> None:
        """Forget this step's gradients, also those under way."""
        self.reducer.drain()
        self.source.discard()
        self._end_of_pass()
        self._measured.clear()
        self._accumulated = False

    def held_gradients(self) -> list[torch.Tensor]:
        """Tensors counted as gradients."""
        return [*self.source.held(), *self.grad_S]
