"""Gradients: from autograd, through a bucket, to this rank's ``grad_S``. All stages share this file.

Steps 3 and 4 of a training step. One gradient's way::

    autograd completes param.grad   BackwardPasses._gradient_ready (backward_passes.py) -> the stage's
                                    reduce_ready_gradient -> GradientReducer.reduce_ready_gradient
    it is taken out of param.grad   UnreducedGradients.take: it waits, or is added to what waits
    its bucket is complete          GradientReducer._reduce_bucket: UnreducedGradients.fill copies and frees it
    the bucket leaves               BucketReducer.launch (comm/reduce_scatter.py): each part to its owner
    the sum arrives                 in grad_S: this rank's shard, or all of it (stage 0)
    the boundary                    GradientReducer.reduce_gradients: what is left leaves; wait

Stages 2 and 3 (with ``comm.world_size_invariant`` all) send the buckets of every micro-batch while autograd goes on,
stages 0 and 1 the sums of all micro-batches once. All ranks launch buckets in one order, each as soon as it is complete
and next. One that is incomplete when the backward pass ends leaves too, with zeros for the gradients that are missing.

Sources: ``reduce_ipg_grads``, ``reduce_ready_partitions_and_remove_grads`` and
``independent_gradient_partition_epilogue`` in ``stage_1_and_2.py`` of [DeepSpeed].
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import nn

from deepzero.comm.exact_sum import Measure
from deepzero.comm.reduce_scatter import BucketReducer
from deepzero.layout import Bucket
from deepzero.runtime.grad_norm import BlockNorms
from deepzero.runtime.zero.buffer_pool import references
from deepzero.runtime.zero.optimizer_shard import OptimizerShard
from deepzero.runtime.zero.stage_1_and_2 import ParamGroup
from deepzero.utils.dispatch import outliving_pass

log = logging.getLogger(__name__)

BucketRef = tuple[int, Bucket]
"""One bucket in the order of reduction: the number of its group, and the bucket of that group's layout."""


def reduce_order(groups: Sequence[ParamGroup], arrival: dict[nn.Parameter, int]) -> list[BucketRef]:
    """The order in which buckets are launched: by the place in ``arrival`` of their last gradient."""
    # Every rank launches in this order, whatever the order in which its own gradients arrive; ranks that launched as
    # gradients come would pair different buckets as soon as one of them skips a branch of the model.
    last_arrival = lambda ref: max(arrival[groups[ref[0]].params[slot.index]] for slot in ref[1].slots)
    return sorted(((g, bucket) for g, group in enumerate(groups) for bucket in group.layout.buckets), key=last_arrival)


class UnreducedGradients:
    """The unreduced gradients of all groups: as autograd made them, or summed over micro-batches in a flat buffer.

    They are taken out of ``param.grad`` as they come, so that no ``zero_grad`` of the program's reaches them.

    Args:
        groups: all groups.
        sum_dtype: dtype in which micro-batches are summed before they are reduced; None sums them in the
            parameters' dtype, as autograd does in ``param.grad``.
    """

    def __init__(self, groups: Sequence[ParamGroup], sum_dtype: torch.dtype | None) -> None:
        self.groups = list(groups)
        # The parameters that had no gradient when their bucket was filled in this pass, and those named before.
        self._unused: list[str] = []
        self._unused_named: set[str] = set()
        # By ``id(param)``, here and below: torch hashes a tensor in Python, too slowly for so many look-ups a step.
        self._slot_of = {
            id(param): (g, slot)
            for g, group in enumerate(groups)
            for param, slot in zip(group.params, group.layout.slots, strict=True)
        }
        # Gradients that wait to be sent: autograd's own tensors, or views of the flat buffers. A second one of a
        # pass waits apart, even while the first is here: so a sum's bits do not depend on when its bucket is sent.
        self._waiting: dict[int, torch.Tensor] = {}
        self._second: dict[int, torch.Tensor] = {}
        # How many references a storage has that nothing but one tensor holds: such a gradient is added to in place.
        self._sole_references = references(torch.empty(0))
        # By bucket and send buffer: the views into which gradients are copied, each with its parameter's id, and the
        # padding between them. Cut once, as buffers are kept. The views keep the storage, so its handle stays its own.
        self._targets: dict[tuple[int, ...], tuple[list[tuple[int, torch.Tensor]], list[torch.Tensor]]] = {}
        # Of each group, a wider buffer in which micro-batches are summed, or None: a sum in bf16 loses bits.
        wider = lambda group: sum_dtype is not None and sum_dtype.itemsize > group.dtype.itemsize
        zeros = lambda group: torch.zeros(group.layout.padded_numel, dtype=sum_dtype, device=group.device)
        self.flat = [zeros(group) if wider(group) else None for group in self.groups]

    def held(self) -> list[torch.Tensor]:
        """Tensors counted as gradients: those that wait now, and the flat buffers."""
        own = (grad for param_id, grad in self._waiting.items() if self.flat[self._slot_of[param_id][0]] is None)
        return [*own, *self._second.values(), *(flat for flat in self.flat if flat is not None)]

    def take(self, param: nn.Parameter, again: bool = False) -> None:
        """Take a gradient out of ``param.grad``, and add it to what waits; in the wider buffer, if there is one.

        ``again``: it is the parameter's second one in a pass whose gradients leave as they come.
        """
        if (grad := param.grad) is None:
            return
        if grad.requires_grad:  # with create_graph=True it would keep its graph alive
            grad = grad.detach()
        param.grad = None  # the tensor is freed when ``fill`` has copied it, or at once where a sum takes it in
        param_id = id(param)
        g, slot = self._slot_of[param_id]
        flat, waiting = (None, self._second) if again else (self.flat[g], self._waiting)
        if flat is None and param_id not in waiting:  # most gradients, and nothing more is done for them
            waiting[param_id] = grad
        else:
            wider = flat[slot.offset : slot.end].view(grad.shape) if flat is not None else None
            self._add(waiting, param_id, grad, wider)

    @outliving_pass()
    def _add(
        self, waiting: dict[int, torch.Tensor], param_id: int, grad: torch.Tensor, wider: torch.Tensor | None
    ) -> None:
        # ``wider``: a view of the wider buffer, if there is one. What the step before left there is overwritten.
        before = waiting.get(param_id)
        if wider is None:
            waiting[param_id] = grad if before is None else self._sum(before, grad)
        else:
            waiting[param_id] = wider.copy_(_dense(grad)) if before is None else before.add_(_dense(grad))

    def _sum(self, before: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """The sum in autograd's order and dtype: with a sparse part it is as dense as the other one."""
        if before.is_sparse:
            return before.add_(grad) if grad.is_sparse else grad + before
        # Autograd may leave views of one gradient in several parameters (a sum of two flattened ones).
        return before.add_(grad) if references(before) <= self._sole_references else before + grad

    def waiting_of(self, param: nn.Parameter) -> torch.Tensor | None:
        """1-D: what waits to be sent next of one parameter, or None."""
        grad = self._waiting.get(id(param), self._second.get(id(param)))
        return _dense(grad).reshape(-1) if grad is not None else None

    def any_waiting(self, g: int, bucket: Bucket) -> bool:
        """Whether any gradient of a bucket waits to be sent."""
        if not (self._waiting or self._second):  # as at the end of nearly every pass
            return False
        ids = [id(self.groups[g].params[slot.index]) for slot in bucket.slots]
        return any(param_id in self._waiting or param_id in self._second for param_id in ids)

    @outliving_pass()
    def fill(self, g: int, bucket: Bucket, send_buffer: torch.Tensor, name_unused: bool = True) -> None:
        """Lay a bucket's gradients into ``send_buffer`` and free them. A parameter without gradient counts as zeros.

        ``send_buffer`` is 1-D, the bucket's extent, in the wire dtype. With ``name_unused`` such parameters are named.
        """
        target_key = (g, bucket.index, send_buffer.untyped_storage()._cdata, int(send_buffer.storage_offset()))
        if target_key not in self._targets:
            cut = []
            for slot in bucket.slots:
                param = self.groups[g].params[slot.index]
                cut.append((id(param), send_buffer[slot.offset - bucket.offset :][: slot.numel].view(param.shape)))
            self._targets[target_key] = cut, [send_buffer[lo:hi] for lo, hi in bucket.gaps()]
        views, gaps = self._targets[target_key]
        for gap in gaps:
            gap.zero_()  # padding is summed and measured too, and the buffer held another bucket
        targets, gradients = list[torch.Tensor](), list[torch.Tensor]()
        for (param_id, target), slot in zip(views, bucket.slots, strict=True):
            if (grad := self._waiting.pop(param_id, None)) is None:
                grad = self._second.pop(param_id, None)
            if grad is not None:
                targets.append(target)
                gradients.append(_dense(grad))
            else:  # an unused parameter; every rank sends every bucket, whatever its own pass has reached
                target.zero_()
                if name_unused and self.groups[g].params[slot.index].requires_grad:
                    self._unused.append(self.groups[g].names[slot.index])
        # One call copies them all, and casts. Only the list holds them now: they are freed when this returns.
        if targets:
            torch._foreach_copy_(targets, gradients)

    def forget_pass(self) -> None:
        """Forget which parameters a pass left out: it is over, and says nothing about the next one."""
        self._unused = []

    def name_unused(self) -> None:
        """Log on rank 0, after a pass, the unused parameters that were not named before. Other ranks' may differ."""
        new = [name for name in self._unused if name not in self._unused_named]
        self._unused_named.update(new)
        self.forget_pass()
        if new and self.groups[0].comm.rank == 0:
            names = ", ".join(new[:3]) + (f" and {len(new) - 3} more" if len(new) > 3 else "")
            log.warning("no gradient in this backward pass, so it counts as zeros (said once): %s", names)

    def discard(self) -> None:
        """Drop everything that waits."""
        self._waiting.clear()
        self._second.clear()
        self.forget_pass()
        for group in self.groups:
            free_grad_in_param_list(group.params)


def _dense(grad: torch.Tensor) -> torch.Tensor:
    """``nn.Embedding(sparse=True)`` makes sparse gradients, which are filled up."""
    return grad.to_dense() if grad.is_sparse else grad


def free_grad_in_param_list(params: Iterable[nn.Parameter]) -> None:
    """Let go of the gradients of ``params``; their memory is free for the next ones."""
    # DeepSpeed calls its function of this name in the step, for gradients of other ranks' partitions. Here
    # ``UnreducedGradients.fill`` frees a gradient as soon as it lies in its bucket, so that it is never held twice.
    for param in params:
        param.grad = None


class GradientReducer:
    """Reduces gradients bucket by bucket into ``grad_S``.

    It decides when a bucket leaves, and with what; its :class:`BucketReducer` sends it and adds up what arrives.

    Args:
        shard: has ``grad_S``, where the sums go.
        order: the buckets in launching order, the same on all ranks.
        unreduced: the gradients that wait to be sent.
        bucket_reducer: sends them to their owners; with its ``whole_sums`` every rank gets the whole sum.
        every_pass: reduce every micro-batch instead of the sum of all of them.
        overlap: where ``every_pass`` is False, reduce the last micro-batch during its backward pass.
    """

    def __init__(
        self,
        shard: OptimizerShard,
        order: Sequence[BucketRef],
        unreduced: UnreducedGradients,
        bucket_reducer: BucketReducer,
        every_pass: bool,
        overlap: bool,
    ) -> None:
        self.shard, self.order, self.unreduced, self.bucket_reducer = shard, list(order), unreduced, bucket_reducer
        self.comm = bucket_reducer.comm
        self.groups, self.every_pass, self.overlap = shard.groups, every_pass, overlap
        # Stage 3's: called with a group's number and its bucket, whose gradients are complete and have been sent.
        self.on_launched: Callable[[int, Bucket], None] | None = None
        # Parameters of stage 3's leaf modules (set_z3_leaf_modules). Which of their gradients come, and in which order,
        # may differ between ranks; so all at once count as complete, at a moment that is the same on all ranks.
        self.leaf_params: set[nn.Parameter] = set()
        # Block norms of this rank's part of each group, taken as the sums are written.
        self._norms = [
            BlockNorms(group.layout.shard_numel, group.device, group.comm.device_type) for group in self.groups
        ]
        # Of the backward pass under way: the position in ``order`` of the bucket that is sent next, which parameters'
        # gradients have arrived (by id), for how many gradients each bucket still waits (by position).
        self._cursor = 0
        self._arrived: set[int] = set()
        self._position = {
            id(self.groups[g].params[slot.index]): position
            for position, (g, bucket) in enumerate(order)
            for slot in bucket.slots
        }
        self._missing = [*(len(bucket.slots) for _, bucket in order), 1]  # the last one: behind the end, never complete
        self._pass_began = False
        # Buckets that are sent twice in this pass, by position: a leaf module with parameters there was complete twice.
        self._sent_twice: set[int] = set()
        # Since the last step a backward pass has ended; gradients were sent, and the next ones are added to their sums.
        self.backward_ended = self.reduced = False
        # Buckets whose whole sums have been gathered since their last reduction, so that every rank has them.
        self._whole_gathered: set[tuple[int, int]] = set()

    # ---- 3 gradient ready --------------------------------------------------------------------------------------------

    def reduce_ready_gradient(self, param: nn.Parameter, is_reduction_boundary: bool) -> None:
        """3: keep the gradient, or launch every bucket that is now complete and next in order.

        ``is_reduction_boundary``: of the last micro-batch of the optimizer step, and not inside ``no_sync``.
        """
        sent_now = self._sent_now(is_reduction_boundary)
        # A second gradient of one pass (see backward_end) must not overtake the first, whose bucket may be on its way.
        self.unreduced.take(param, again=sent_now and id(param) in self._arrived)
        if not sent_now:
            return
        self._pass_began = True
        if self.leaf_params and param in self.leaf_params:
            return
        self._count(param)
        # Most gradients end here. The one that completes the next bucket launches it, and the complete ones behind it.
        while not self._missing[self._cursor]:
            self._reduce_bucket(*self.order[self._cursor], is_reduction_boundary)
            self._cursor += 1

    def leaf_grads_complete(self, params: Iterable[nn.Parameter], is_reduction_boundary: bool) -> None:
        """Count all gradients of some :attr:`leaf_params` as arrived; those that did not come count as zeros."""
        if not self._sent_now(is_reduction_boundary):
            return
        self._pass_began = True
        mine = [param for param in params if id(param) in self._position]
        self._sent_twice.update(self._position[id(param)] for param in mine if id(param) in self._arrived)
        for param in mine:
            self._count(param)
        while not self._missing[self._cursor]:
            self._reduce_bucket(*self.order[self._cursor], is_reduction_boundary)
            self._cursor += 1

    def _count(self, param: nn.Parameter) -> None:
        if (param_id := id(param)) not in self._arrived:
            self._arrived.add(param_id)
            self._missing[self._position[param_id]] -= 1

    def _sent_now(self, is_reduction_boundary: bool) -> bool:
        """Whether gradients of this backward pass are sent as they come."""
        # Once some of this step have been sent, those of a further pass are sent too, and added to them.
        return self.every_pass or (self.overlap and is_reduction_boundary) or self.reduced

    def backward_end(self, is_reduction_boundary: bool) -> None:
        """Launch what no further gradient will complete. A parameter without gradient counts as zeros."""
        self.backward_ended = True
        if not self._sent_now(is_reduction_boundary):
            return
        # Also where the pass has reached no parameter on this rank: on others it has, and they have sent their buckets.
        for g, bucket in self.order[self._cursor :]:
            self._reduce_bucket(g, bucket, is_reduction_boundary)
        # A weight that is used inside and outside a reentrantly checkpointed block gets two gradients in one pass. The
        # second is sent after the first and added to it, also where the first's bucket was still here when it came:
        # the sum's bits do not depend on what else is in the bucket.
        # Of a leaf module ranks have different gradients, but all have seen it complete equally often: that decides.
        for position, (g, bucket) in enumerate(self.order):
            if position in self._sent_twice or self.unreduced.any_waiting(g, bucket):
                self._reduce_bucket(g, bucket, is_reduction_boundary, again=True)
        self.unreduced.name_unused()
        self.forget_pass()
        self.reduced = True

    def forget_pass(self) -> None:
        """Begin anew: the next gradient belongs to another backward pass."""
        self._cursor = 0
        self._pass_began = False
        self._sent_twice.clear()
        self._arrived.clear()
        self._missing = [*(len(bucket.slots) for _, bucket in self.order), 1]
        self.unreduced.forget_pass()

    def _reduce_bucket(self, g: int, bucket: Bucket, is_reduction_boundary: bool, again: bool = False) -> None:
        """Lay the gradients of a bucket of group ``g`` into a buffer, free them, and send them to their owners."""
        norms = self._norms[g]
        norms.fresh.discard(bucket.index)
        self._whole_gathered.discard((g, bucket.index))
        measure: Measure | None = None
        if is_reduction_boundary and not self.bucket_reducer.whole_sums:
            # Nothing is added to this sum afterwards, so its block norms are taken while it is in the core's cache.
            measure = partial(norms.measure, bucket.shard_offset)
            norms.fresh.add(bucket.index)
        # Sums of a step's later passes are added to the first's, in the order of the global batch: ``invariance.py``.
        accumulate = self.reduced or again
        output, around_sum = self.shard.grad_output(g, bucket, accumulate)
        if self.every_pass and self.bucket_reducer.whole_sums:
            output = self.shard.grad_shard(g, bucket)  # ``reduce_now`` gathers the others' parts at the boundary
        first_param = self.groups[g].names[bucket.slots[0].index]  # for traces
        with self.comm.ranges.span("reduce", bucket.index, first_param):
            # Waits only where all buffers are under way: the oldest is then added up, and filled anew.
            send_buffer = self.bucket_reducer.acquire(bucket, output, accumulate)
            self.unreduced.fill(g, bucket, send_buffer, name_unused=not again)
            self.bucket_reducer.launch(bucket, output, accumulate, measure, around_sum, g, first_param)
        if self.on_launched is not None:
            self.on_launched(g, bucket)

    # ---- 4 boundary --------------------------------------------------------------------------------------------------

    def reduce_gradients(self) -> None:
        """4: flush and wait. Of what has left during the backward pass only the last buckets have to be waited for."""
        self.reduce_now()
        self.backward_ended = self.reduced = False

    def reduce_now(self) -> None:
        """Send what waits, if nothing has been sent in this step; wait for what is under way."""
        if not self.reduced:
            # Stages 0 and 1 without overlap. Or this rank has no gradient: it sends zeros, as the others wait for them.
            for g, bucket in self.order:
                self._reduce_bucket(g, bucket, is_reduction_boundary=True)
            self.unreduced.name_unused()
        self.drain()
        # ``world_size_invariant`` in stages 0 and 1: passes left each rank its part of the sums; now all get the whole.
        if self.every_pass and self.bucket_reducer.whole_sums and self.comm.world_size > 1:
            for g, bucket in self.order:
                if (g, bucket.index) not in self._whole_gathered:  # all ranks agree: each of them reduces every bucket
                    self.bucket_reducer.gather_sums(bucket, bucket.of(self.shard.grad_S[g]))
            self.drain()
            self._whole_gathered.update((g, bucket.index) for g, bucket in self.order)
        self.reduced = True

    def drain(self) -> None:
        """Wait for everything that is under way."""
        self.bucket_reducer.drain()
        self.shard.drain_grads()

    def sums_changed(self, group: int, bucket: Bucket) -> None:
        """Take the norms of this bucket anew before the step: the program has written into its sums."""
        self._norms[group].fresh.discard(bucket.index)

    # ---- 5 step: what the norm reads ---------------------------------------------------------------------------------

    def norm_sq_partials(self) -> torch.Tensor:
        """This rank's shares of the global norm, int64 ``[EXPONENT_BINS]``, which ranks add up: ``grad_norm.py``."""
        # Nearly all buckets were measured when their sums were written. Left are those that the last micro-batch did
        # not add to, and those that were changed since.
        for g, bucket in self.order:
            if bucket.index not in self._norms[g].fresh:
                self._norms[g].measure(bucket.shard_offset, self.shard.grad_shard(g, bucket), 0)
        for norms in self._norms:
            norms.fresh.clear()
        return torch.stack([norms.norm_sq_partials() for norms in self._norms]).sum(0)

    def param_norm_sq(self) -> list[torch.Tensor]:
        """Sums of squares of this rank's part of the last norm's sums, by parameter: fp64, one tensor a group."""
        rank = self.comm.rank
        return [
            norms.squares(group.layout.fragments(rank), len(group.names))
            for norms, group in zip(self._norms, self.groups, strict=True)
        ]

    # ---- between steps -----------------------------------------------------------------------------------------------

    def discard_gradients(self) -> None:
        """Forget this step's gradients, also those under way."""
        # What is under way cannot be called back: all ranks wait for it here, and nobody reads the sums.
        self.bucket_reducer.drain()
        if self.reduced or self._pass_began:
            # Error feedback would carry what was lost of these gradients into the next ones. Where nothing was sent, a
            # program merely drops its gradients after every step, and what was lost before still counts.
            self.bucket_reducer.forget_residuals()
        self.shard.discard_grads()
        self.unreduced.discard()
        self.forget_pass()
        for norms in self._norms:
            norms.fresh.clear()
        self.backward_ended = self.reduced = False

    def held_gradients(self) -> list[torch.Tensor]:
        """Tensors counted as gradients."""
        return [*self.unreduced.held(), *self.shard.grad_S]
