"""Stages 1 and 2: partitioned optimizer states, and partitioned gradients.

Both keep the parameters whole, give the optimizer this rank's ``master_S`` alone, and publish what it wrote with one
all-gather per bucket. They differ in what happens to gradients:

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
``finish_gradients`` flushes what is left and waits → **4** ``ShardedStep.step`` → **5** ``publish``. Steps 2 and 3 are
in ``gradient_reduction.py``, which stage 3 shares.

Sources: "ZeRO Stage 1" and "Stage 1 Code" of the stage-1 notes; P_os and P_os+g of the ZeRO paper (section 5); the
DeepSpeed post on stage 1 with reduced communication; DeepSpeed's ``runtime/zero/stage_1_and_2.py``, whose names are
kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from deepzero.comm.collectives import Communicator, Pending
from deepzero.comm.reduce_scatter import BucketReducer
from deepzero.layout import Bucket
from deepzero.offload.copy_streams import PendingCopy
from deepzero.offload.host_gradients import HostGradients
from deepzero.runtime.zero.flat_param_group import FlatParamGroup
from deepzero.runtime.zero.grad_accumulator import BucketRef, GradAccumulator
from deepzero.runtime.zero.gradient_reduction import GradientReducer
from deepzero.runtime.zero.publish import PendingAllGather, all_gather_arrived, all_gather_dp_groups


class ZeroStage1And2:
    """Partitioned optimizer states (stage 1), and gradients (stage 2).

    Args:
        groups: built with ``whole=False``.
        order: the buckets in launching order, the same on all ranks.
        source: the unreduced gradients.
        reducer: sends them to their owners.
        comm: publishes parameters.
        partition_gradients: False is stage 1, True is stage 2.
        overlap: stage 1 reduces its last micro-batch during the backward pass.
        grad_dtype: dtype of ``grad_S``.
        host: has the gradients that live in host memory; None: none do.
    """

    def __init__(
        self,
        groups: Sequence[FlatParamGroup],
        order: Sequence[BucketRef],
        source: GradAccumulator,
        reducer: BucketReducer,
        comm: Communicator,
        partition_gradients: bool,
        overlap: bool,
        grad_dtype: torch.dtype,
        host: HostGradients | None = None,
    ) -> None:
        self.groups, self.comm = list(groups), comm
        self.gradients = GradientReducer(
            groups, order, source, reducer, partition_gradients, overlap, grad_dtype, host=host
        )
        self._arrivals: list[PendingAllGather] = []
        self.bit16_groups = [group.params for group in groups]
        self.bit16_groups_flat = [group.flat_P for group in groups]
        self.parallel_partitioned_bit16_groups = [group.partitions for group in groups]
        self.single_partition_of_fp32_groups = [group.masters for group in groups]

    def gradient_ready(self, param: nn.Parameter, boundary: bool) -> None:
        """2 gradient ready."""
        self.gradients.gradient_ready(param, boundary)

    def backward_end(self, boundary: bool) -> None:
        """The end of a backward pass."""
        self.gradients.backward_end(boundary)

    def forget_pass(self) -> None:
        """The end of a pass that left no gradient."""

    def end_passes(self) -> None:
        """Nothing is gathered."""

    def finish_gradients(self) -> None:
        """3 boundary."""
        self.gradients.finish_gradients()

    def arrived(self, group: int, bucket: Bucket, copy: PendingCopy | None) -> None:
        """4, on the host: my part of a bucket is new; it goes to the others while the CPU steps on the next."""
        self._arrivals.append(all_gather_arrived(self.groups[group], bucket, copy, self.comm))

    def publish(self) -> None:
        """5: every rank gets every part of every bucket. Parameters are views of the flat buffers: that is all."""
        gathers: list[PendingAllGather | Pending]
        gathers, self._arrivals = [*self._arrivals, *all_gather_dp_groups(self.groups, self.comm)], []
        for gather in gathers:
            gather.wait()

    def discard_gradients(self) -> None:
        """Forget this step's gradients, also those under way."""
        self.gradients.discard_gradients()

    def before_writes(self) -> None:
        """Whole parameters may be written at any time between passes."""

    def destroy(self) -> None:
        """The parameters belong to nobody again."""
        for group in self.groups:
            group.release()
