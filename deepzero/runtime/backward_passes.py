"""Backward passes: noticed however they begin, so that gradients are reduced, scaled and counted alike.

A script may call ``engine.backward(loss)``, ``engine.scale(loss).backward()`` or plain ``loss.backward()``, any number
of times, from any outputs. :class:`BackwardPasses` sees each pass through three kinds of hooks: on a forward pass's
outputs (the begin, and the loss), on every trained parameter (step 3, gradient ready), and autograd's at the end.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from deepzero.runtime.consistency import sum_rounded_once
from deepzero.runtime.home_stream import HomeStream, weakly
from deepzero.runtime.loss_scaler import LossScaler
from deepzero.runtime.pytree import graph_has, output_tensors, scalar_loss
from deepzero.runtime.zero.stage_1_and_2 import ZeroStage1And2

log = logging.getLogger(__name__)


class BackwardPasses:
    """Drives a stage of ZeRO from autograd's hooks, and keeps the losses of an optimizer step.

    Args:
        stage: any of the stages; ``build.py:_build_stage`` chooses it.
        scaler: its scale multiplies losses.
        is_reduction_boundary: whether the micro-batch under way is its step's last one, and not inside ``no_sync``.
        check: called with ``"backward"`` where a pass begins; raises when no pass may run.
    """

    def __init__(
        self,
        stage: ZeroStage1And2,
        scaler: LossScaler,
        is_reduction_boundary: Callable[[], bool],
        check: Callable[[str], None],
    ) -> None:
        self._stage, self._scaler, self._comm = stage, scaler, stage.comm
        self._is_reduction_boundary, self._check = is_reduction_boundary, check
        self.count, self.any_given_loss = 0, False
        """Backward passes that have ended since the last boundary; whether one began at a loss given to this engine."""
        # Losses of this step's micro-batches, detached: reading one would make the CPU wait for the GPU.
        self._losses: list[torch.Tensor] = []
        # The rest is about the backward pass under way. Its loss is the one that was given to engine.backward or
        # engine.scale, or else the sum of what the model's outputs contribute (``_output_gradient``).
        self._given_loss: torch.Tensor | None = None
        self._seen_loss: torch.Tensor | None = None
        self._inside_backward = False  # engine.backward runs it
        self._loss_is_scaled = False  # its loss carries the loss scale
        self._given_trains = False  # its given loss depends on a trained parameter
        self._reached_param = False  # it has reached a trained parameter
        self._at_boundary = False  # it belongs to the step's last micro-batch
        # The function that autograd was asked to call at its end, as a weak reference. None before the pass is noticed;
        # dead when it broke off, as autograd has dropped the function.
        self._end_callback: Callable[[], Callable[..., None] | None] | None = None
        self._warned_unscaled = False
        # Autograd may call hooks on several streams; these run on the one of the forward pass (``home_stream.py``).
        self._home = HomeStream(stage.comm.device)
        ready = self._home.hook(weakly(self._gradient_ready), of_param=True)
        trained = [param for group in stage.gradients.groups for param in group.params]
        self._trained = {id(param) for param in trained}
        self._handles = [param.register_post_accumulate_grad_hook(ready) for param in trained]

    # ---- where a pass begins -----------------------------------------------------------------------------------------

    def watch_outputs(self, outputs: Any) -> None:
        """Hooks on the tensors of a forward pass's output, so that a plain ``loss.backward()`` is noticed too."""
        self._home.set_to_current()
        loss = scalar_loss(outputs)
        # By identity: a loss that stands in the output twice is one loss.
        for tensor in {id(tensor): tensor for tensor in output_tensors(outputs)}.values():
            if tensor.requires_grad and not tensor.is_leaf:
                value = tensor.detach().float().reshape(()) if tensor is loss else None
                tensor.register_hook(self._home.hook(partial(self._output_gradient, value)))

    def run(self, loss: torch.Tensor, micro_batches: int, retain_graph: bool) -> None:
        """``engine.backward``: one pass from ``loss``, which the caller has divided by ``micro_batches``, usually 1."""
        # The factor below undoes the caller's division: the step divides once, also by the number of micro-batches
        # (``optimizer_shard.py``).
        self._given_loss = loss.detach() * micro_batches if micro_batches != 1 else loss.detach()
        self._inside_backward = True
        factor = self._scaler.scale * micro_batches
        ended_before = self.count
        try:
            with self._comm.ranges.span("backward"):
                self._scale_loss(loss, factor).backward(retain_graph=retain_graph)
            if self.count == ended_before:  # the pass met no hook of ours, so autograd was not asked to call ``_end``
                self._at_boundary = self._is_reduction_boundary()
                self._end()
        except BaseException:
            if self._end_callback is not None:
                self._end_callback = lambda: None  # dead, though a thread of autograd's may hold it for a moment more
            raise
        finally:
            self._inside_backward = self._loss_is_scaled = False
            self._given_loss = None

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale; a backward pass that begins there counts ``loss`` as its loss."""
        loss.register_hook(partial(self._given_pass_begins, loss.detach(), graph_has(loss, self._trained)))
        return self._scale_loss(loss, self._scaler.scale)

    def _scale_loss(self, loss: torch.Tensor, factor: float) -> torch.Tensor:
        """``loss * factor``, marked: a backward pass that begins there carries the loss scale."""
        self._check("backward")
        if factor == 1 and self._scaler.scale == 1:
            return loss
        with torch.enable_grad():  # a backward pass may begin under no_grad
            scaled = loss * factor
        scaled.register_hook(self._scaled_pass_begins)
        return scaled

    def _scaled_pass_begins(self, _: torch.Tensor) -> None:
        self._ensure_end_callback()
        self._loss_is_scaled = True

    def _given_pass_begins(self, loss: torch.Tensor, trains: bool, _: torch.Tensor) -> None:
        self._ensure_end_callback()
        # engine.scale may be called for several losses of one pass: their sum is its loss. A loss that was given to
        # engine.backward is already the whole.
        if not self._inside_backward:
            self._given_loss = loss if self._given_loss is None else self._given_loss + loss
        self._given_trains |= trains

    def _output_gradient(self, value: torch.Tensor | None, grad: torch.Tensor) -> None:
        """A backward pass has reached the model's output: ask for its end, and note what the loss was."""
        self._check("backward")
        self._ensure_end_callback()
        if value is not None:
            # A loss that the program puts together from several outputs is taken to be linear in each of them: then
            # an output contributes its value times its gradient.
            part = value * grad.detach().float().reshape(())
            self._seen_loss = part if self._seen_loss is None else self._seen_loss + part

    def _ensure_end_callback(self) -> None:
        """Ask autograd to call :meth:`_end` at the end of the backward pass that is under way, unless it was asked."""
        # It must be asked in the *outermost* pass: reentrant checkpointing runs passes inside it, which end earlier.
        # The model's outputs get their gradients first, and call this; else a parameter's hook does.
        if self._end_callback is not None:
            # It was asked; or an earlier pass broke off after it had reached a parameter, and :meth:`aborted` says so
            # until its gradients are dropped.
            if self._reached_param or self._end_callback() is not None:
                return
            self._drop_broken_pass()
        end = self._home.hook(self._end)
        self._end_callback, self._at_boundary = weakref.ref(end), self._is_reduction_boundary()
        Variable._execution_engine.queue_callback(end)

    # ---- 3 gradient ready --------------------------------------------------------------------------------------------

    def _gradient_ready(self, param: nn.Parameter) -> None:
        """Autograd's own hook, of each parameter whose ``.grad`` is complete."""
        if not self._reached_param:  # the first of the pass
            self._ensure_end_callback()
            self._reached_param = True
        self._comm.ledger.note("gradient_ready")
        with torch._C.DisableTorchFunctionSubclass():  # asking for .grad needs no values: no detour through Python
            # Only fp16 has a scale other than 1. A pass that began at a scaled loss has scaled every gradient already.
            if self._scaler.scale != 1 and not self._loss_is_scaled and param.grad is not None:
                param.grad = self._with_loss_scale(param.grad)
            self._stage.reduce_ready_gradient(param, self._at_boundary)

    @torch.no_grad()
    def _with_loss_scale(self, grad: torch.Tensor) -> torch.Tensor:
        """A plain ``loss.backward()`` in fp16: the step will divide by the scale, so multiply here at the latest."""
        if not self._warned_unscaled:
            self._warned_unscaled = True
            log.warning(
                "fp16: loss.backward() ran on a loss without loss scale, so small gradients may have vanished; "
                "use engine.backward(loss) or engine.scale(loss).backward() (said once)"
            )
        return grad * self._scaler.scale  # not in place: autograd's tensor may be a view of another's

    def _end(self) -> None:
        """End a pass, and keep its loss. One that reached no parameter (``torch.autograd.grad``) is not counted."""
        given = self._given_loss
        loss = given if given is not None else self._seen_loss
        # A given loss whose graph has no trained parameter (an empty batch, say) counts as a pass all the same.
        counts = self._reached_param or self._inside_backward or (given is not None and not self._given_trains)
        self._reset_pass()
        if not counts:
            self._stage.forget_pass()
            return
        try:
            self._stage.backward_end(self._at_boundary)
        except BaseException:
            # Some of its buckets were sent, others were not: from here on :meth:`aborted` says that the pass broke off.
            self._reached_param, self._end_callback = True, lambda: None
            raise
        self.count += 1
        self.any_given_loss |= given is not None
        if loss is not None:
            self._losses.append(loss)
        self._comm.ledger.note("backward_end")

    def _reset_pass(self) -> None:
        self._reached_param = self._loss_is_scaled = self._given_trains = False
        self._end_callback = self._given_loss = self._seen_loss = None

    # ---- between steps -----------------------------------------------------------------------------------------------

    def take_loss(self, micro_batches: int) -> float | None:
        """The sum of this rank's losses over the micro-batches, or None. Once a step the CPU waits for the losses."""
        losses = [self._comm.read(loss.reshape(1))[0] for loss in self._losses]
        self._losses = []
        # A micro-batch may have had several backward passes, or none: the mean loss counts once per micro-batch.
        return sum_rounded_once(losses) * (micro_batches / len(losses)) if losses else None

    def aborted(self) -> bool:
        """Whether a backward pass has reached parameters, never ended, and is not under way now."""
        will_end = self._end_callback is not None and self._end_callback() is not None
        if torch._C._current_graph_task_id() != -1 or self._inside_backward or will_end:
            return False  # one is under way, in this thread or in another
        if self._end_callback is not None and not self._reached_param:
            self._drop_broken_pass()
        return self._reached_param

    def _drop_broken_pass(self) -> None:
        """Forget a pass that broke off before it reached a parameter, and what the stage has counted of it."""
        self._reset_pass()
        self._stage.forget_pass()

    def discard(self) -> None:
        """Forget the passes of this optimizer step, also one that broke off."""
        self._reset_pass()
        self._losses, self.count, self.any_given_loss = [], 0, False

    def remove(self) -> None:
        """Leave the parameters as they were, without hooks."""
        for handle in self._handles:
            handle.remove()
