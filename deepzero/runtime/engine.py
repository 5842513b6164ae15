"""The engine: forward, backward, step, over whichever stage of ZeRO the configuration asks for.

One optimizer step, with the numbers that the comments, the book and the order test share:

    0 build      once: flat buffers, masters, optimizer state            ``build.py``
    1 forward    ``engine(batch)``; no communication in stages 0-2
    2 gradient ready     autograd completes a gradient; stage 2 sends full buckets
    3 boundary   after the last micro-batch: flush, wait
    4 step       agree on finiteness and norm, unscale and clip, optimizer on the masters
    5 publish    cast into the flat buffer, gather the buckets

Names and counters are DeepSpeed's (``runtime/engine.py``): ``micro_steps`` counts calls of :meth:`Engine.step`,
``global_steps`` optimizer steps whether applied or skipped, ``skipped_steps`` those that overflowed, ``global_samples``
sequences. The learning-rate schedule advances with every applied step.

Three intended differences. A plain ``loss.backward()`` works in every stage and precision: fp16's loss scale is then
applied to each parameter's gradient, too late for what has underflowed, and said so. NaN gradients in bf16 and fp32
stop the run instead of silently skipping steps. And gradients are averaged, unscaled and clipped by one fp32 division
after all additions (``sharded_step.py``).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from deepzero.comm import process_group, profiler_ranges
from deepzero.comm.collectives import open_communicator
from deepzero.comm.flight_recorder import DesyncError
from deepzero.comm.ledger import Ledger
from deepzero.comm.process_group import raise_on_all_ranks
from deepzero.config.engine import EngineConfig, resolve_batch
from deepzero.runtime.build import build_step, build_zero
from deepzero.runtime.consistency import StepAgreement, agree
from deepzero.runtime.diagnostics import find_bad_gradient, gather_report, params_sha256, used_bytes, whole_state_dict
from deepzero.runtime.engine_checkpoints import EngineCheckpoints
from deepzero.runtime.loss_scaler import build_loss_scaler
from deepzero.runtime.lr_schedules import build_scheduler
from deepzero.runtime.pytree import output_tensors, scalar_loss
from deepzero.runtime.trained import TrainedParameters
from deepzero.runtime.zero.flat_param_group import lost_on_error
from deepzero.runtime.zero.fragments import TensorFragments
from deepzero.runtime.zero.grad_accumulator import GradientHooks
from deepzero.runtime.zero.sharded_step import clip_divisor

log = logging.getLogger(__name__)


BAD_LOSSES = 5
"""Skipped optimizer steps in a row whose losses are not finite, after which fp16 training stops.

A smaller loss scale makes no difference to a forward pass. One bad batch is skipped, and so are a few; but a skipped
step leaves the parameters as they are, so when five global batches in a row give no finite loss, the sixth will not.
DeepSpeed halves its scale down to the minimum first: with 65536 and hysteresis, 18 steps.
"""


class NonFiniteError(RuntimeError):
    """Gradients are inf or NaN, and there is no loss scale to lower, or that cannot help. Nothing was updated."""


@dataclass(frozen=True)
class StepRecord:
    """What happened in one optimizer step; the same on all ranks."""

    step: int
    """Counted from 1."""
    loss: float
    """Mean over ranks and micro-batches; NaN when the engine saw no scalar loss."""
    lr: float
    """Of the first param group, as used in this step."""
    grad_norm: float
    """Global 2-norm of the averaged, unscaled gradients before clipping."""
    grad_norm_clipped: float
    """The same after clipping."""
    loss_scale: float
    """The scale that multiplied this step's loss."""
    skipped: bool
    """fp16 overflow: parameters, moments and schedule are as before."""


class Engine(EngineCheckpoints):
    """A model, its optimizer and its share of ZeRO. Made by ``deepzero.initialize``.

    Args:
        model: the user's module, as it is.
        optimizer: over parameters of ``model``.
        config: the settings; batch sizes are resolved for the number of ranks.
        lr_scheduler: anything with ``step()``; None builds the one that ``config.scheduler`` names, if any.
        total_steps: for schedules that end with the run.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: EngineConfig,
        lr_scheduler: Any = None,
        total_steps: int | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.global_rank, self.world_size = process_group.rank(), process_group.world_size()
        self.local_rank = process_group.local_rank()
        self.device = process_group.default_device()
        self.batch = resolve_batch(config, self.world_size)
        self.model_numel = sum(p.numel() for p in model.parameters())

        # 0 build
        self.ledger = Ledger()
        self.comm = open_communicator(config, self.device, self.ledger)
        # What can still be refused comes before the model is touched.
        self._scaler = build_loss_scaler(config.precision)
        self.lr_scheduler = lr_scheduler
        if lr_scheduler is None and config.scheduler is not None:
            self.lr_scheduler = build_scheduler(config.scheduler, optimizer, total_steps)
        self._zero = build_zero(model, optimizer, config, self.comm, self.batch.accumulation)
        self.module = model
        self.optimizer = optimizer
        self.stage = self._zero.stage
        with lost_on_error(model):
            self._sharded_step = build_step(self._zero, optimizer, config)
        trained = [param for group in self._zero.groups for param in group.params]
        self._hooks = GradientHooks(trained, self._gradient_ready, self._backward_end)
        self._trained = TrainedParameters(model, self._zero.groups)
        self._fragments = TensorFragments(
            model, self._zero.groups, self._sharded_step, self.stage.gradients,
            self._mean_divisor, self._is_reduction_boundary, self.finish_delayed_update,
        )  # fmt: skip

        self.micro_steps = self.global_steps = self.skipped_steps = self.global_samples = 0
        self.last_step: StepRecord | None = None
        self.training_dataloader: DataLoader[Any] | None = None
        # Backward passes that have ended since the last boundary; skipped steps in a row for want of a finite loss.
        self._backward_passes = self._bad_losses = 0
        self._boundary_override: bool | None = None
        self._inside_no_sync = self._step_applied = self._destroyed = False
        self._asked_to_stop = False
        self._boundary_open = False  # gradients are neither agreed on nor dropped
        self.stopping = False
        """All ranks know, since the last step, that one has been asked to stop: time to save and leave."""
        # Losses of this step's micro-batches, detached: reading one would make the CPU wait for the GPU.
        self._losses: list[torch.Tensor] = []
        # The loss of the backward pass under way: as given to us, or put together from the outputs it went through.
        self._given_loss: torch.Tensor | None = None
        self._seen_loss: torch.Tensor | None = None
        # Whether the backward pass under way is engine.backward's, and whether it carries the loss scale.
        self._inside_backward = self._loss_is_scaled = self._warned_unscaled = False
        self.ledger.close_setup()
        self._bytes_at_build = used_bytes(self.device)

    # ---- 1: forward --------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """1: the module's own output. In training its tensors are watched, so that a plain backward is noticed too."""
        self._refuse_broken_pass()
        self.comm.step = self.global_steps + 1
        if self.config.precision.auto_cast:
            args, kwargs = pytree.tree_map(self._cast_input, (args, kwargs))
        with self._watch_activations(), profiler_ranges.span("forward"):
            outputs = self.module(*args, **kwargs)
        if torch.is_grad_enabled():
            loss = scalar_loss(outputs)
            for tensor in output_tensors(outputs):
                if tensor.requires_grad and not tensor.is_leaf:
                    value = tensor.detach().float().reshape(()) if tensor is loss else None
                    tensor.register_hook(partial(self._output_gradient, value))
        return outputs

    def _refuse_broken_pass(self) -> None:
        self._refuse_half_loaded()
        if self._boundary_open or self._hooks.backward_aborted():
            what = "optimizer step broke off before ranks had agreed on it"
            if not self._boundary_open:
                what = "backward pass broke off before its end"
            raise RuntimeError(
                f"the last {what}, and its gradients are incomplete; call "
                "engine.discard_gradients() on every rank, then begin the optimizer step again with its first "
                "micro-batch"
            )

    def _cast_input(self, value: Any) -> Any:
        if torch.is_tensor(value) and value.is_floating_point():
            return value.to(self._zero.dtypes.compute)
        return value

    # ---- 2: backward -------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """2: compute gradients; stage 2 reduces them as they come. Equivalent to a plain ``loss.backward()``.

        Args:
            loss: a scalar of this micro-batch. The mean over micro-batches and ranks is taken of the gradients, later.
            retain_graph: as in torch.
            scale_wrt_gas: False when the caller has divided the loss by the number of micro-batches himself.

        Returns:
            The loss divided by the number of micro-batches, as DeepSpeed returns it.
        """
        _check_loss("backward", loss)
        self._refuse_broken_pass()
        steps = self.batch.accumulation
        self._given_loss = loss.detach() if scale_wrt_gas else loss.detach() * steps
        self._inside_backward = True
        # The mean over micro-batches is part of the boundary's division; undo it for a caller who has taken it.
        factor = self._scaler.scale * (1 if scale_wrt_gas else steps)
        try:
            with profiler_ranges.span("backward"):
                self._scale_loss(loss, factor).backward(retain_graph=retain_graph)
        finally:
            self._inside_backward = self._loss_is_scaled = False
            self._given_loss = None
        return loss.detach() / steps if scale_wrt_gas else loss.detach()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale, for ``engine.scale(loss).backward()``."""
        _check_loss("scale", loss)
        loss.register_hook(partial(self._given_pass_begins, loss.detach()))
        return self._scale_loss(loss, self._scaler.scale)

    def _scale_loss(self, loss: torch.Tensor, factor: float) -> torch.Tensor:
        """``loss * factor``, marked: a backward pass that begins there is known to carry the loss scale."""
        self._refuse_away("backward")
        if factor == 1:
            return loss
        scaled = loss * factor
        scaled.register_hook(self._scaled_pass_begins)
        return scaled

    def _scaled_pass_begins(self, _: torch.Tensor) -> None:
        self._hooks.arm()
        self._loss_is_scaled = True

    def _given_pass_begins(self, loss: torch.Tensor, _: torch.Tensor) -> None:
        self._hooks.arm()
        self._given_loss = loss

    @torch.no_grad()
    def _apply_loss_scale_to_grad(self, param: nn.Parameter) -> None:
        """fp16, a plain ``loss.backward()``: the step will divide by the scale, so multiply here at the latest."""
        if self._loss_is_scaled or self._scaler.scale == 1 or param.grad is None:
            return
        if not self._warned_unscaled:
            self._warned_unscaled = True
            log.warning(
                "fp16: loss.backward() ran on a loss without loss scale, so small gradients may have vanished; "
                "use engine.backward(loss) or engine.scale(loss).backward() (said once)"
            )
        param.grad = param.grad * self._scaler.scale  # not in place: autograd's tensor may be a view of another's

    def _output_gradient(self, value: torch.Tensor | None, grad: torch.Tensor) -> None:
        """A backward pass has reached the model's output: ask for its end, and note what the loss was.

        A loss that the user put together from several outputs is linear in each: value times gradient is its share.
        """
        self._refuse_away("backward")
        self._hooks.arm()
        if value is not None:
            share = value * grad.detach().float().reshape(())
            self._seen_loss = share if self._seen_loss is None else self._seen_loss + share

    def _gradient_ready(self, param: nn.Parameter) -> None:
        self.ledger.note("gradient_ready")
        if self._scaled:
            self._apply_loss_scale_to_grad(param)
        self.stage.gradient_ready(param, self._is_reduction_boundary())

    def _backward_end(self, reached: bool) -> None:
        """The end of a pass. One that reached no parameter (``torch.autograd.grad``) is none of training's."""
        loss = self._given_loss if self._given_loss is not None else self._seen_loss
        self._given_loss = self._seen_loss = None
        self._loss_is_scaled = False
        if not reached and not self._inside_backward:
            self.stage.forget_pass()
            return
        self._backward_passes += 1
        if loss is not None:
            self._losses.append(loss)
        self.stage.backward_end(self._is_reduction_boundary())
        self.ledger.note("backward_end")

    def _is_reduction_boundary(self) -> bool:
        return self.is_gradient_accumulation_boundary() and not self._inside_no_sync

    # ---- 3, 4, 5: step -----------------------------------------------------------------------------------------------

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """End a micro-batch; after the last one of a step: boundary, optimizer step, publish.

        Args:
            lr_kwargs: passed to the scheduler's ``step``.

        Raises:
            NonFiniteError: inf or NaN gradients in bf16 or fp32, or in fp16 for so long that no loss scale is to
                blame; on all ranks. Parameters and moments are untouched.
            RuntimeError: no backward pass has run since the last boundary, or the last one broke off; or, on all
                ranks, other parameters train than when the engine was built.
        """
        if self._destroyed:
            raise RuntimeError("engine.step() after engine.destroy(): give the model to deepzero.initialize again")
        if self._inside_no_sync:
            raise RuntimeError("engine.step() inside engine.no_sync(): leave the context first")
        self._refuse_broken_pass()
        self._refuse_away("engine.step()")
        if self._backward_passes == 0:
            raise RuntimeError(
                f"engine.step(): no backward pass has run on rank {self.global_rank} since optimizer step "
                f"{self.global_steps}; without gradients weight decay and momentum alone would change the weights. "
                "Call engine.backward(loss) once for each engine.step(); another pass counts if it reaches a trained "
                "parameter"
            )
        self._step_applied = False
        self.ledger.sample()
        boundary = self.is_gradient_accumulation_boundary()
        try:
            if boundary:
                self._take_model_step(lr_kwargs or {})
        finally:
            self.comm.position = ""  # the program's own code
            self.micro_steps += 1
            if boundary:
                self._backward_passes = 0

    def _take_model_step(self, lr_kwargs: dict[str, Any]) -> None:
        self._boundary_open = True
        # 3 boundary: flush, wait. A rank in trouble does so too, as the others count on it.
        with profiler_ranges.span("boundary"):
            trouble = self._trouble()
            self.stage.finish_gradients()
        self.ledger.note("boundary")
        # 4 step: agree on finiteness and norm, unscale and clip, optimizer on the masters.
        with profiler_ranges.span("agree"):
            words, loss = self.stage.gradients.norm_sq_partials(), self._mean_loss()
            agreement = agree(self.comm, words, loss, self._asked_to_stop, trouble is not None)
        self._boundary_open = False
        self.stopping = agreement.stop
        if agreement.trouble:
            self._raise_together(trouble)
        scale, mean_divisor = self._scaler.scale, self._mean_divisor()
        lr = self.optimizer.param_groups[0]["lr"]
        self._check_finite(agreement)
        if self._scaled:
            self._scaler.update(not agreement.finite)
            self._zero.reducer.rescale(self._scaler.scale / scale)
        norm = agreement.norm / mean_divisor
        clip = clip_divisor(norm, self.config.gradient_clipping) if agreement.finite else 1.0
        if agreement.finite:
            with profiler_ranges.span("step"):
                self._sharded_step.step(mean_divisor * clip)
            self.ledger.note("step")
            # 5 publish: cast into the flat buffer, gather the buckets.
            with profiler_ranges.span("publish"):
                self.stage.publish()
            self.ledger.note("publish")
        else:
            self.skipped_steps += 1
            self._zero.forget_gradients()
            self.finish_delayed_update()  # what is ready is not to be two steps late
        self._step_applied = agreement.finite
        self.global_steps += 1
        self.global_samples += self.batch.global_batch
        self.last_step = StepRecord(
            self.global_steps, agreement.loss, lr, norm, norm / clip, scale, skipped=not agreement.finite
        )
        self._zero.close_step(self.ledger, agreement.finite)
        self.comm.overlap.close_step()
        if self.lr_scheduler is not None and agreement.finite:
            self.lr_scheduler.step(**lr_kwargs)
        self._print_progress(self.last_step)

    def _mean_divisor(self) -> float:
        """What the sum of this step's gradients is divided by for their mean, without loss scale."""
        return self.world_size * self.batch.accumulation * self._scaler.scale

    @property
    def _scaled(self) -> bool:
        return self.config.precision.dtype == "fp16"

    def _trouble(self) -> RuntimeError | None:
        """What keeps this rank from taking the step: what was done to the model or to the optimizer since the last."""
        found = None
        for check in (
            partial(self._sharded_step.before_step, self._zero.groups), self._trained.check, self.stage.end_passes
        ):  # fmt: skip
            try:
                check()
            except DesyncError:
                raise  # no agreement will come about
            except RuntimeError as error:
                found = found or error
        return found

    def _raise_together(self, mine: RuntimeError | None) -> None:
        """Some rank is in trouble, and all know it: the others raise too, with its text. Nothing was updated."""
        self._drop_step()
        raise_on_all_ranks(mine)

    def _drop_step(self) -> None:
        self._zero.forget_gradients()
        self.ledger.close_step()

    def _mean_loss(self) -> float | None:
        losses, self._losses = self._losses, []
        return sum(float(loss) for loss in losses if not loss.is_meta) / len(losses) if losses else None

    def _check_finite(self, agreement: StepAgreement) -> None:
        """Stop before anything is updated, and say where it began, when no smaller loss scale can help."""
        hopeless = not agreement.finite and bool(agreement.bad_losses)
        self._bad_losses = self._bad_losses + 1 if hopeless else 0
        if self._bad_losses >= BAD_LOSSES:
            self._drop_step()
            losses = ", ".join(f"{value} on rank {rank}" for rank, value in agreement.bad_losses)
            raise NonFiniteError(
                f"step {self.global_steps + 1}: the loss is not finite ({losses}), in {self._bad_losses} optimizer "
                "steps in a row. The forward pass gives it before the loss scale multiplies it, so no smaller scale "
                f"helps. Parameters and optimizer state are those of step {self.global_steps + 1 - self._bad_losses}. "
                "Look at the data and at the weights that the run began with, lower the learning rate, or train in "
                "bf16, whose range activations do not leave"
            )
        if agreement.finite or self._scaled:
            return
        self._drop_step()
        where = find_bad_gradient(self.module, self._zero.groups, self._sharded_step.parts)
        raise NonFiniteError(
            f"step {self.global_steps + 1}: the gradient of {where} is not finite (loss {agreement.loss}). "
            "Parameters and optimizer state are those of the step before. Lower the learning rate, clip gradients, or "
            "look at the data; debug=anomaly finds the operation"
        )

    # ---- accumulation ------------------------------------------------------------------------------------------------

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch under way is the last of its optimizer step. Ask before :meth:`step`."""
        if self._boundary_override is not None:
            return self._boundary_override
        return (self.micro_steps + 1) % self.batch.accumulation == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Decide by hand, until the next call, whether :meth:`step` acts."""
        self._boundary_override = is_boundary

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """As in DDP: no reduction inside. Stages 0 and 1 reduce at the boundary alone, so nothing changes for them."""
        stage = self.config.zero.stage
        if stage >= 2:
            raise RuntimeError(
                f"no_sync would keep whole gradients, which is what zero.stage={stage} is there to avoid. Without it "
                "each micro-batch is reduced as it comes, to the same sums; with zero.stage=1 once per step"
            )
        if self._inside_no_sync:
            raise RuntimeError("no_sync is entered already")
        self._inside_no_sync = True
        try:
            yield
        finally:
            self._inside_no_sync = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear ``.grad`` of the model's parameters, where no gradient of the step under way is: harmless at any time.

        As in DeepSpeed, so that scripts which call it before every micro-batch accumulate all the same.
        :meth:`discard_gradients` drops what has been accumulated.
        """
        self.module.zero_grad(set_to_none)

    def discard_gradients(self) -> None:
        """Drop the gradients of this optimizer step, also those already reduced or under way. On every rank.

        The step begins again with its first micro-batch.
        """
        self._hooks.disarm()
        self._losses, self._loss_is_scaled = [], False
        self._given_loss = self._seen_loss = None
        self.stage.discard_gradients()
        if self._boundary_open:
            self._boundary_open = False
            self._drop_step()
        self._backward_passes = 0
        self.micro_steps -= self.micro_steps % self.batch.accumulation

    # ---- what others ask ---------------------------------------------------------------------------------------------

    def get_global_grad_norm(self) -> float | None:
        """Norm of the last step's gradients before clipping; ``inf`` when it was skipped, None before the first."""
        return self.last_step.grad_norm if self.last_step is not None else None

    def was_step_applied(self) -> bool:
        """Whether the last call of :meth:`step` changed the parameters."""
        return self._step_applied

    @property
    def loss_scale(self) -> float:
        """The scale that the next loss is multiplied by; 1 outside fp16."""
        return self._scaler.scale

    cur_scale = loss_scale

    def params_sha256(self) -> str:
        """SHA-256 of the full parameters' bytes in the compute dtype, in name order."""
        return params_sha256(self.module)

    def report(self) -> dict[str, Any]:
        """The ledger of all ranks, predicted beside measured. A collective; see ``inspect.gather_report``."""
        return gather_report(self.ledger, self.device, self._bytes_at_build)

    def module_state_dict(self) -> dict[str, Any]:
        """The model's own state dict, in the compute dtype, whole on every rank; stage 3: a collective, a copy.

        Parameters that are tied in the model are one tensor in stage 3's copy too.
        """
        return whole_state_dict(self.module) if self.config.zero.stage == 3 else self.module.state_dict()

    def load_module_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load values into the model on every rank; the masters follow before the next step."""
        self._refuse_away("load_module_state_dict")
        self.finish_delayed_update()
        self._before_writes()
        self.module.load_state_dict(state_dict, strict=strict)

    def destroy(self) -> None:
        """Let go of the model: it keeps its values and may be given to ``initialize`` again. Twice is harmless."""
        if self._destroyed:
            return
        self.reload_states()
        with contextlib.suppress(RuntimeError):  # an update that failed has said so
            self.finish_delayed_update()
        self._destroyed = True
        self._hooks.remove()
        self._fragments.forget()
        self.stage.destroy()
        self._zero.close()
        if self._saver is not None:
            self._saver.close()


def _check_loss(call: str, loss: torch.Tensor) -> None:
    """Refuse what no backward pass can begin at."""
    if loss.numel() != 1 or not loss.requires_grad:
        raise ValueError(
            f"engine.{call} needs a scalar loss that requires grad, got shape {tuple(loss.shape)}, "
            f"requires_grad={loss.requires_grad}"
        )
