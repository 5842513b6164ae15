"""Stage 0: plain data parallelism, the twin that the other stages are tested against.

Every rank holds everything: parameters, gradients, masters and moments. At the boundary the gradients are summed over
ranks with all-reduces, bucket by bucket, and every rank takes the same optimizer step on the whole model.

Memory per rank with 2-byte parameters and gradients: ``2Ψ + 2Ψ + KΨ`` (K = 12 for Adam), plus ``4Ψ`` for the sums,
which are kept in fp32. Volume per step: an all-reduce is a reduce-scatter and an all-gather, ``2Ψ(W-1)/W``.

In ``reduce=exact`` the second half of the all-reduce carries the fp32 sums, unrounded: that is what makes the same bits
as stages 1 and 2, where a rank uses the fp32 sum of its part without sending it anywhere.

The gradients' way is that of all stages (``gradient_reduction.py``), with a reducer that hands out whole sums. Left out
on purpose: overlap with the backward pass.

Sources: "Data Parallelism" of the stage-1 notes, ``allreduce_bucket`` of the DeepSpeed post on reduced communication.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from deepzero.runtime.zero.gradient_reduction import GradientReducer
from deepzero.runtime.zero.stage_1_and_2 import FlatParamGroup


class ZeroStage0:
    """Replicated states, all-reduced gradients.

    Args:
        groups: built with ``whole=True``: masters of everything, on every rank.
        gradients: its ``BucketReducer`` was built with ``whole=True``, too. Nothing overlaps, every pass accumulates.
    """

    def __init__(self, groups: Sequence[FlatParamGroup], gradients: GradientReducer) -> None:
        self.groups, self.gradients = list(groups), gradients

    # ---- 3 gradient ready --------------------------------------------------------------------------------------------

    def reduce_ready_gradient(self, param: nn.Parameter, boundary: bool) -> None:
        """3: add the gradient to those of earlier micro-batches. Nothing is sent before the boundary."""
        self.gradients.reduce_ready_gradient(param, boundary)

    def backward_end(self, boundary: bool) -> None:
        """End a backward pass."""
        self.gradients.backward_end(boundary)

    def forget_pass(self) -> None:
        """End a pass that left no gradient."""
        self.gradients.forget_pass()

    # ---- 4 boundary --------------------------------------------------------------------------------------------------

    def end_passes(self) -> None:
        """Do nothing: whole parameters have not been gathered for the passes."""

    def reduce_gradients(self) -> None:
        """4: all-reduce every bucket."""
        self.gradients.reduce_gradients()

    # ---- 6 publish ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def publish(self) -> None:
        """6: every rank has every new master; cast them into the model. Nothing is sent."""
        for group in self.groups:
            for bucket in group.layout.buckets:
                if group.dtype != torch.float32:  # else the parameters are the masters
                    group.param_shard(bucket).copy_(group.master_of(bucket))

    # ---- between steps -----------------------------------------------------------------------------------------------

    def discard_gradients(self) -> None:
        """Forget this step's gradients."""
        self.gradients.discard_gradients()

    def before_writes(self) -> None:
        """Do nothing: whole parameters may be written at any time between passes."""

    def destroy(self) -> None:
        """Let the parameters belong to no engine."""
        for group in self.groups:
            group.release()
