"""Stage 0: naive data parallelism, the twin that the other stages are tested against.

Every rank holds everything: parameters, gradients, masters and moments. After the backward pass the gradients are
summed over ranks with all-reduces, bucket by bucket, and every rank takes the same optimizer step on the whole model.

Memory per rank with 2-byte parameters and gradients: ``2Ψ + 2Ψ + KΨ`` (K = 12 for Adam), plus ``4Ψ`` for the sums,
which are kept in fp32. Volume per step: an all-reduce is a reduce-scatter and an all-gather, ``2Ψ(W-1)/W``.

In ``reduce=exact`` the second half of the all-reduce carries the fp32 sums, unrounded: that is what makes the same bits
as stages 1 and 2, where a rank uses the fp32 sum of its part without sending it anywhere.

Left out on purpose: overlap with the backward pass. This file is to be read first.

Sources: "Data Parallelism" of the stage-1 notes, ``allreduce_bucket`` of the DeepSpeed post on reduced communication.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from deepzero.comm import profiler_ranges
from deepzero.comm.reduce_scatter import BucketReducer
from deepzero.layout import Bucket
from deepzero.runtime.grad_norm import BlockNorms, square_sum_words
from deepzero.runtime.zero.grad_accumulator import BucketRef, GradAccumulator
from deepzero.runtime.zero.sharded_step import MasterFragment
from deepzero.runtime.zero.stage_1_and_2 import FlatParamGroup


class ZeroStage0:
    """Replicated states, all-reduced gradients.

    Args:
        groups: built with ``whole=True``.
        order: the buckets in launching order.
        source: the unreduced gradients.
        reducer: built with ``whole=True``.
        grad_dtype: dtype of the reduced gradients.
    """

    def __init__(
        self,
        groups: Sequence[FlatParamGroup],
        order: Sequence[BucketRef],
        source: GradAccumulator,
        reducer: BucketReducer,
        grad_dtype: torch.dtype,
    ) -> None:
        self.groups, self.order, self.source, self.reducer = list(groups), list(order), source, reducer
        self.grad_dtype = grad_dtype
        self.grad_P = [torch.zeros(g.layout.padded_numel, dtype=grad_dtype, device=g.device) for g in groups]
        self._norms = [BlockNorms(group.layout.padded_numel, group.device) for group in self.groups]
        self.present = False
        """Whether a backward pass has ended since the last step."""
        self.reduced = False
        """Whether this step's gradients are in ``grad_P``; else they wait in the source."""

    @property
    def gradients(self) -> ZeroStage0:
        """What has the gradients: a part of the other stages, here the stage itself."""
        return self

    def _sum_of(self, entry: BucketRef) -> torch.Tensor:
        bucket = entry.bucket
        return self.grad_P[entry.group][bucket.offset : bucket.offset + bucket.numel]

    def master_parts(self) -> list[MasterFragment]:
        """Every parameter whole: the optimizer of each rank steps on all of them."""
        return [
            MasterFragment(master, grad[fragment.shard_start : fragment.shard_start + fragment.numel])
            for group, grad in zip(self.groups, self.grad_P, strict=True)
            for fragment, master in zip(group.fragments, group.masters, strict=True)
        ]

    def norm_sq_partials(self) -> torch.Tensor:
        """This rank's share of the global norm, see ``grad_norm.py``: rank 0 adds all, as everybody has the same."""
        if self.reducer.comm.rank != 0:
            return square_sum_words([], self.reducer.comm.device)
        for entry in self.order:
            self._norms[entry.group].measure(entry.bucket.offset, self._sum_of(entry), 0)
        return torch.stack([norms.norm_sq_partials() for norms in self._norms]).sum(0)

    def param_norm_sq(self) -> list[torch.Tensor]:
        """Of every group, by parameter: sums of squares of the sums that the norm was last of; zeros but on rank 0."""
        return [
            norms.squares(group.fragments, len(group.names))
            for norms, group in zip(self._norms, self.groups, strict=True)
        ]

    def gradient_ready(self, param: nn.Parameter, boundary: bool) -> None:
        """2: it waits in the source, or is added to the wider accumulation buffer."""
        self.source.accumulate(param)

    def backward_end(self, boundary: bool) -> None:
        """Nothing leaves before the boundary, unless earlier gradients of this step had to."""
        self.present = True
        if self.reduced:
            self._reduce()

    def forget_pass(self) -> None:
        """The end of a pass that left no gradient."""

    def end_passes(self) -> None:
        """Nothing is gathered."""

    def finish_gradients(self) -> None:
        """3 boundary: all-reduce every bucket."""
        self.reduce_now()
        self.present = self.reduced = False

    def reduce_now(self) -> None:
        """All-reduce what waits, if that has not been done in this step."""
        if not self.reduced:
            self._reduce()
            self.reduced = True

    def _reduce(self) -> None:
        for entry in self.order:
            first = self.groups[entry.group].names[entry.bucket.slots[0].index]
            with profiler_ranges.span("reduce", entry.bucket.index, first):
                send_buffer = self.reducer.acquire(entry.bucket, self._sum_of(entry), accumulate=self.reduced)
                self.source.fill(entry, send_buffer, name_unused=not self.reduced)
                self.reducer.launch(entry.bucket, self._sum_of(entry), accumulate=self.reduced, place=first)
        self.source.name_unused()
        self.reducer.drain()

    def drain(self) -> None:
        """Everything that is under way has arrived."""
        self.reducer.drain()

    def written(self, group: int, bucket: Bucket) -> None:
        """Somebody has changed sums of this bucket: nothing is remembered of them here."""

    def publish(self) -> None:
        """5: every rank has every new master; cast them into the model."""
        for group in self.groups:
            for bucket in group.layout.buckets:
                if group.dtype != torch.float32:
                    group.param_shard(bucket).copy_(group.master_of(bucket))

    def discard_gradients(self) -> None:
        """Forget this step's gradients."""
        self.source.discard()
        self.present = self.reduced = False

    def held_gradients(self) -> list[torch.Tensor]:
        """Tensors counted as gradients."""
        return [*self.source.held(), *self.grad_P]

    def before_writes(self) -> None:
        """Whole parameters may be written at any time between passes."""

    def destroy(self) -> None:
        """The parameters belong to nobody again."""
        for group in self.groups:
            group.release()
