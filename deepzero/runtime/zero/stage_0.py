"""Stage 0: plain data parallelism, the twin that the other stages are tested against.

Every rank holds everything: parameters, gradients, masters and moments. At the boundary the gradients are summed over
ranks with all-reduces, bucket by bucket, and every rank takes the same optimizer step on the whole model.

Memory per rank with 2-byte parameters and gradients: ``2Ψ + 2Ψ + KΨ`` (K = 12 for Adam), plus ``4Ψ`` for the sums,
which are kept in fp32. Volume per step: an all-reduce is a reduce-scatter and an all-gather, ``2Ψ(W-1)/W``.

In ``reduce=exact`` the second half of the all-reduce carries the fp32 sums, unrounded: that is what makes the bits
of stage 1, where a rank uses the fp32 sum of its part without sending it anywhere.

The gradients' way is that of all stages (``gradient_reduction.py``), with a reducer that hands out whole sums. Left out
on purpose: overlap with the backward pass.

Sources: [stage-1 notes], "Data Parallelism"; [stage-1 post], ``allreduce_bucket``.
"""

from __future__ import annotations

import torch

from deepzero.runtime.zero.stage_1_and_2 import ZeroStage1And2


class ZeroStage0(ZeroStage1And2):
    """Replicated states, all-reduced gradients: stage 1 with one partition, which every rank has.

    Its groups are built with ``whole=True``, masters of everything on every rank, and its ``BucketReducer`` hands out
    whole sums.
    """

    # 3 gradient ready: the gradient is added to those of earlier micro-batches; nothing is sent before the boundary,
    # but with ``comm.world_size_invariant``. 4 boundary: every bucket is all-reduced. 5 step: all step on everything.

    @torch.no_grad()
    def publish(self) -> None:
        """6: every rank has every new master; cast them into the model. Nothing is sent."""
        for group in self.groups:
            for bucket in group.layout.buckets:
                # In fp32 the parameters are the masters.
                if group.dtype != torch.float32:
                    group.param_shard(bucket).copy_(group.master_of(bucket))
