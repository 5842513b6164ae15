"""The engine: forward, backward, step, over whichever stage of ZeRO the configuration asks for.

One optimizer step, with the numbers that the comments, the book and the order test share:

    0 build      once: flat buffers, masters, optimizer state            ``build.py``
    1 fetch · 2 release      stage 3 alone, inside forward and backward passes
    3 gradient ready         autograd completes a gradient; stage 2 sends complete buckets
    4 boundary   after the last micro-batch: flush, wait
    5 step       agree on finiteness and norm, unscale and clip, optimizer on the masters
    6 publish    cast into the flat buffer, gather the buckets; stage 3: cast into the shards

Names and counters are DeepSpeed's (``runtime/engine.py``): ``micro_steps`` counts calls of :meth:`Engine.step`,
``global_steps`` optimizer steps whether applied or skipped, ``skipped_steps`` those that overflowed, ``global_samples``
sequences. The learning-rate schedule advances with every applied step.

Three intended differences. A plain ``loss.backward()`` works in every stage and precision: fp16's loss scale is then
applied to each parameter's gradient, too late for what has underflowed, and said so. NaN gradients in bf16 and fp32
stop the run instead of silently skipping steps (bf16's ``check_grad_overflow`` skips a few). And gradients are
averaged, unscaled and clipped by one fp32 division after all additions (``optimizer_shard.py``, which names the one
exception: fp16 summed by the backend).

Checkpoints, ``offload_states``, offloaded activations and printing enter through the engine's :class:`Callbacks`: what
``deepzero.initialize`` returns, a :class:`~deepzero.compat.deepspeed_engine.DeepSpeedEngine`, fills them, and has
DeepSpeed's getters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from deepzero.comm import process_group
from deepzero.comm.collectives import Communicator, open_communicator
from deepzero.comm.flight_recorder import DesyncError
from deepzero.comm.ledger import Ledger
from deepzero.config.engine import EngineConfig, resolve_batch
from deepzero.runtime.backward_passes import BackwardPasses
from deepzero.runtime.build import ZeroComponents, build_zero
from deepzero.runtime.consistency import StepAgreement, agree
from deepzero.runtime.diagnostics import find_bad_gradient
from deepzero.runtime.loss_scaler import build_loss_scaler
from deepzero.runtime.lr_schedules import build_scheduler
from deepzero.runtime.zero.optimizer_shard import clip_divisor
from deepzero.runtime.zero.tensor_fragment import TensorFragments
from deepzero.utils.errors import MisuseError

# Skipped optimizer steps in a row, with losses that no smaller scale can help, after which training stops: a skipped
# step leaves the parameters as they are, so when five global batches give no finite loss, the sixth will not. DeepSpeed
# halves its scale down to the minimum first: with 65536 and hysteresis, 18 steps.
HOPELESS_STEPS = 5


class NonFiniteError(RuntimeError):
    """Gradients are inf or NaN, and there is no loss scale to lower, or that cannot help. Nothing was updated."""


@dataclass(frozen=True)
class StepRecord:
    """What happened in one optimizer step; the same on all ranks."""

    step: int  # counted from 1
    loss: float  # mean over ranks and micro-batches; NaN when the engine saw no scalar loss
    lr: float  # learning rate of the first param group, as used in this step
    grad_norm: float  # global 2-norm of the averaged, unscaled gradients before clipping
    grad_norm_clipped: float
    loss_scale: float  # the scale that multiplied this step's loss
    skipped: bool  # fp16 overflow: parameters, moments and schedule are as before


@dataclass
class StepState:
    """Where in an optimizer step the engine is."""

    # What set_gradient_accumulation_boundary has decided; None: every ``accumulation``-th micro-batch is one.
    boundary: bool | None = None
    inside_no_sync: bool = False
    step_without_sync: int = -1  # the optimizer step in which ``no_sync`` was entered last
    undecided: bool = False  # from the boundary (4) until the ranks have agreed (5): gradients may still be dropped
    applied: bool = False  # the last call of ``step`` has updated the parameters
    asked_to_stop: bool = False  # ``request_stop`` was called on this rank
    stopping: bool = False  # on all ranks since a step in which one had been asked to: time to save and leave
    hopeless_steps: int = 0  # skipped in a row, where no smaller loss scale can help: see ``_check_finite``
    broke_off: str | None = None  # which step or load did, and left the values of two steps mixed: a load must follow
    destroyed: bool = False


@dataclass
class Callbacks:
    """Where optional features enter an engine, so that the path of a step has no branch for any of them."""

    # Called with a call's name before it runs; each raises when that call cannot be made now.
    preconditions: list[Callable[[str], None]] = field(default_factory=list)
    # Contexts that every forward pass runs in.
    around_forward: list[Callable[[], contextlib.AbstractContextManager[None]]] = field(default_factory=list)
    # Called after each optimizer step, applied or skipped: features, then the program (it may set ``on_step``).
    after_step: list[Callable[[StepRecord], None]] = field(default_factory=list)
    on_step: list[Callable[[StepRecord], None]] = field(default_factory=list)


class Engine(nn.Module):
    """A model, its optimizer and this rank's part of ZeRO. ``deepzero.initialize`` makes one, of a derived class.

    Args:
        model: the user's module, as it is.
        optimizer: over parameters of ``model``.
        config: the settings; batch sizes are resolved for the number of ranks.
        lr_scheduler: anything with ``step()``; None builds the one that ``config.scheduler`` names, if any.
        total_steps: length of the run in optimizer steps, for schedules that end with it.
        comm: the ranks; None: those of this process's group. A dry run gives its own.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: EngineConfig,
        lr_scheduler: Any = None,
        total_steps: int | None = None,
        comm: Communicator | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        # ---- 0 build. What can still be refused comes before the model is touched.
        self.comm = comm or open_communicator(config, process_group.default_device(), Ledger())
        self.batch = resolve_batch(config, self.comm.world_size)
        # Its scale is 1 and stays 1 except in fp16, so what follows multiplies and divides by it in every precision.
        self.scaler = build_loss_scaler(config.precision)
        self.lr_scheduler = lr_scheduler
        if lr_scheduler is None and config.scheduler is not None:
            self.lr_scheduler = build_scheduler(config.scheduler, optimizer, total_steps)
        # From here on the model's parameters are views of flat buffers, or shards, and the optimizer's are masters.
        self.zero = build_zero(model, optimizer, config, self.comm, self.batch.accumulation)
        self.module, self.optimizer = model, optimizer
        self.callbacks = Callbacks(around_forward=[self.zero.stage.unwinding])
        # Autograd's hooks come after the parameters were given their new storage: a hook lives on the accumulation node
        # of a parameter, which keeps the device and dtype that the parameter had when the node was made.
        self.passes = BackwardPasses(self.zero.stage, self.scaler, self._is_reduction_boundary, self.check)
        self.fragments = TensorFragments(
            model, self.zero.stage.gradients, self._mean_divisor, self._is_reduction_boundary,
            self.finish_delayed_update,
        )  # fmt: skip

        self.micro_steps = self.global_steps = self.skipped_steps = self.global_samples = 0
        self.last_step: StepRecord | None = None
        self.state = StepState()
        # From here on what is sent and allocated belongs to training, and is compared with the predictions.
        self.comm.ledger.close_setup()

    # ---- forward: 1 fetch, 2 release ---------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own output. In training its tensors are watched, so that a plain backward is noticed too.

        Stage 3 fetches and releases parameters in hooks of the modules (``module_hooks.py``); stages 0-2 communicate
        nothing here.
        """
        self._check_pass("forward")
        # What is sent from here on is filed, in the flight recorder and in messages, under the step that is to come.
        self.comm.flight_recorder.step = self.global_steps + 1
        # Parameters are in the compute dtype, and torch's matrix products mix no dtypes; integers stay as they are.
        if self.config.precision.auto_cast:
            args, kwargs = pytree.tree_map(self.zero.dtypes.cast, (args, kwargs))
        with contextlib.ExitStack() as stack:
            for context in self.callbacks.around_forward:
                stack.enter_context(context())
            stack.enter_context(self.comm.ranges.span("forward"))
            outputs = self.module(*args, **kwargs)
        # Without a graph (evaluation, generation) no backward pass can begin at these outputs.
        if torch.is_grad_enabled():
            self.passes.watch_outputs(outputs)
        return outputs

    def check(self, call: str) -> None:
        """Raise when ``call`` cannot be made now: states are on the host, or a step or a load broke off half-way."""
        for refuse in self.callbacks.preconditions:
            refuse(call)

    def _check_pass(self, call: str) -> None:
        """:meth:`check`; and the gradients so far must be those of whole passes."""
        if self.state.destroyed:
            raise MisuseError(f"{call} after engine.destroy(): give the model to deepzero.initialize again")
        self.check(call)
        if self.state.undecided or self.passes.aborted():
            step = "optimizer step broke off before ranks had agreed on it"
            backward = "backward pass broke off before its end"
            raise RuntimeError(
                f"the last {step if self.state.undecided else backward}, and its gradients are incomplete; call "
                "engine.discard_gradients() on every rank, then begin the optimizer step again with its first "
                "micro-batch"
            )

    # ---- backward: 1 fetch, 2 release, 3 gradient ready --------------------------------------------------------------

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Compute gradients; stages 2 and 3 reduce them as they come. A plain ``loss.backward()`` is the same, except
        in fp16, where it lacks the loss scale until its gradients are there.

        Args:
            loss: a scalar of this micro-batch. The mean over micro-batches and ranks is taken of the gradients, later.
            retain_graph: as in torch.
            scale_wrt_gas: False when the caller has divided the loss by the number of micro-batches himself.

        Returns:
            The loss divided by the number of micro-batches, as DeepSpeed returns it.
        """
        self._check_pass("backward")
        _check_loss("backward", loss)
        # The loss itself is not divided: the mean is part of the one division at the boundary (``optimizer_shard.py``).
        steps = self.batch.accumulation
        self.passes.run(loss, 1 if scale_wrt_gas else steps, retain_graph)
        return loss.detach() / steps if scale_wrt_gas else loss.detach()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale, for ``engine.scale(loss).backward()``. A term left out would weigh less."""
        _check_loss("scale", loss)
        return self.passes.scale(loss)

    def _is_reduction_boundary(self) -> bool:
        return self.is_gradient_accumulation_boundary() and not self.state.inside_no_sync

    # ---- step: 4 boundary, 5 step, 6 publish -------------------------------------------------------------------------

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """End a micro-batch; after the last one of a step: boundary, optimizer step, publish.

        Args:
            lr_kwargs: passed to the scheduler's ``step``.

        Raises:
            NonFiniteError: inf or NaN gradients in bf16 or fp32, or, where they are skipped, for so long that no loss
                scale is to blame. As all below, on all ranks, and parameters and moments are untouched.
            LossScaleError: gradients overflow at the minimum loss scale.
            RuntimeError: other parameters train than when the engine was built; or, on this rank, no backward pass has
                run since the last boundary, or the last one broke off.
        """
        if self.state.inside_no_sync:
            raise MisuseError("It is illegal to call Engine.step() inside no_sync context manager: leave that first")
        self._check_pass("engine.step()")
        if self.passes.count == 0:
            raise RuntimeError(
                f"engine.step(): no backward pass has run on rank {self.comm.rank} since optimizer step "
                f"{self.global_steps}; without gradients weight decay and momentum alone would change the weights. "
                "Call engine.backward(loss) once for each engine.step(); another pass counts if it reaches a trained "
                "parameter"
            )
        # Until the step is taken the answer of was_step_applied() is no, whatever the step before did.
        self.state.applied = False
        # Here gradients, parameters and activations of a micro-batch are all in memory: the ledger measures its peak.
        self.comm.ledger.sample_step()
        boundary = self.is_gradient_accumulation_boundary()
        try:
            if boundary:
                self._take_model_step(lr_kwargs or {})
        finally:
            self.comm.flight_recorder.position = ""  # what a rank does from here on is the program's own code
            # Counted also when the step raises: a program that catches the error goes on with the next micro-batch.
            self.micro_steps += 1
            if boundary:
                self.passes.count, self.passes.any_given_loss = 0, False

    def _take_model_step(self, lr_kwargs: dict[str, Any]) -> None:
        ledger, zero = self.comm.ledger, self.zero
        self.state.undecided = True
        # 4 boundary: end the passes, flush, wait. A rank in trouble does so too: the others count on its collectives.
        with self.comm.ranges.span("boundary"):
            trouble = _prepare_step(zero)
            zero.stage.reduce_gradients()
            trouble = trouble or zero.optimizer_shard.memory_problem()
        ledger.note("boundary")
        # 5 step: agree on finiteness and norm, unscale and clip, optimizer on the masters. Only in the agreement do
        # ranks exchange what one of them has found alone, so all of that travels in it.
        with self.comm.ranges.span("agree"):
            bins = zero.stage.gradients.norm_sq_partials()
            micro_batches = self.batch.accumulation
            loss = self.passes.take_loss(micro_batches)
            agreement = agree(self.comm, bins, loss, micro_batches, self.state.asked_to_stop, trouble is not None)
        # From here on all ranks have the same agreement, so they take the same branch of everything below.
        self.state.undecided = False
        self.state.stopping = agreement.stop
        # These gradients are divided by the scale that multiplied their loss: it is read before it is updated.
        scale, mean_divisor = self.scaler.scale, self._mean_divisor()
        lr = self.optimizer.param_groups[0].get("lr")  # a user's own optimizer may have none
        lr = float("nan" if lr is None else lr)  # a number: in a tensor, the schedule would change it later
        _raise_or_rescale(self, agreement, trouble)
        # The norm was taken of sums that still carry the loss scale, the ranks and the micro-batches. Dividing the norm
        # in place of the gradients leaves one pass over them: the optimizer divides by mean_divisor * clip as it reads.
        norm = agreement.norm / mean_divisor
        clip = clip_divisor(norm, self.config.gradient_clipping) if agreement.finite else 1.0
        if agreement.finite:
            self.state.broke_off = f"optimizer step {self.global_steps + 1} broke off"
            with self.comm.ranges.span("step"):
                zero.optimizer_shard.step(mean_divisor * clip)
            ledger.note("step")
            with self.comm.ranges.span("publish"):  # 6
                zero.stage.publish()
            self.state.broke_off = None
            ledger.note("publish")
        else:
            # An overflow: parameters, moments and schedule stay. In fp16 the next batch tries the smaller scale.
            self.skipped_steps += 1
            zero.forget_residuals()
            self.finish_delayed_update()  # an update that is ready would otherwise be two steps late
        self.state.applied = agreement.finite
        self.global_steps += 1
        self.global_samples += self.batch.global_batch
        self.last_step = record = StepRecord(
            self.global_steps, agreement.loss, lr, norm, norm / clip, scale, skipped=not agreement.finite
        )
        zero.close_step(ledger, agreement.finite)
        self.comm.overlap.close_step()
        # A skipped step is no step of the schedule: its learning rate was not used.
        if self.lr_scheduler is not None and agreement.finite:
            self.lr_scheduler.step(**lr_kwargs)
        # Last: an observer that raises leaves an engine whose step is complete.
        for observe in (*self.callbacks.after_step, *self.callbacks.on_step):
            observe(record)

    def _mean_divisor(self) -> float:
        """The divisor that makes the sum of this step's scaled gradients over ranks and micro-batches their mean."""
        return self.comm.world_size * self.batch.accumulation * self.scaler.scale

    # ---- accumulation ------------------------------------------------------------------------------------------------

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch under way is the last of its optimizer step. Ask before :meth:`step`."""
        if self.state.boundary is not None:
            return self.state.boundary
        return (self.micro_steps + 1) % self.batch.accumulation == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Decide by hand, until the next call, whether :meth:`step` acts; the mean stays of ``batch.accumulation``."""
        self.state.boundary = is_boundary

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """As in DDP: no reduction inside. Stages 0 and 1 reduce before the boundary with ``overlap_comm`` alone."""
        if self.zero.stage.gradients.every_pass:
            what = "comm.world_size_invariant, which reduces every micro-batch in the order of the global batch; set "
            what += "it to false"
            if (stage := self.config.zero.stage) >= 2:
                what = f"zero.stage={stage}, which is there to avoid the whole gradients that it would keep. Without "
                what += "it each micro-batch is reduced as it comes, to the same sums; with zero.stage=1 once per step"
            raise MisuseError(f"the no_sync context manager is incompatible with {what}")
        if self.state.inside_no_sync:
            raise MisuseError("no_sync context manager reentry is unsupported: it is entered already")
        self.state.inside_no_sync = True
        self.state.step_without_sync = self.global_steps
        try:
            yield
        finally:
            self.state.inside_no_sync = False

    def discard_gradients(self) -> None:
        """Drop the gradients of this optimizer step, also those already reduced or under way. On every rank.

        The step begins again with its first micro-batch.
        """
        # Hooks first, so that no pass under way hands on another gradient; then what the stage has of them.
        self.passes.discard()
        self.zero.stage.discard_gradients()
        if self.state.undecided:
            self.state.undecided = False
            self.zero.drop_step(self.comm.ledger)
        # Back to the first micro-batch, or the boundary would come after fewer of them than the mean divides by.
        self.micro_steps -= self.micro_steps % self.batch.accumulation

    # ---- parameters and masters, between steps -----------------------------------------------------------------------

    def finish_delayed_update(self) -> None:
        """Bring a delayed update that is not applied yet into the parameters now. A collective."""
        # Saving does so by itself: a checkpoint holds one state, not two halves of a step. It changes the course of
        # training as if this step had not been delayed; a run that is continued takes the same course.
        if not self.zero.optimizer_shard.update_pending:
            return
        # Stage 3 may hold parameters that were fetched ahead, with values of before the update.
        self.prepare_writes()
        self.zero.optimizer_shard.apply_pending_update()
        # Its bytes are beside the step's: the predictions are of a step without it.
        with self.comm.ledger.outside_step():
            self.zero.stage.publish()

    def prepare_writes(self) -> None:
        """Parameters and masters are about to be written: nothing old stays gathered, or on its way from the host."""
        self.zero.stage.prepare_writes()
        if self.zero.offload is not None:
            self.zero.offload.copier.finish_reads()

    def destroy(self) -> None:
        """Let go of the model: it keeps its values and may be given to ``initialize`` again. Twice is harmless."""
        if self.state.destroyed:
            return
        with contextlib.suppress(RuntimeError):  # an update that failed has said so
            self.finish_delayed_update()
        # Hooks before storage: no hook of ours may run on a parameter that is whole again.
        self.state.destroyed = True
        self.passes.remove()
        self.fragments.forget()
        self.zero.stage.destroy()
        self.zero.close()


# ---- 4, 5: what keeps a step from being taken ------------------------------------------------------------------------


def _prepare_step(zero: ZeroComponents) -> RuntimeError | None:
    """4: update masters, check what trains, end stage 3's passes; return what keeps this rank from a step."""
    found = None
    for prepare in (zero.optimizer_shard.before_step, zero.trained.check, zero.stage.end_passes):
        try:
            prepare()
        except DesyncError:
            raise  # no agreement will come about
        except RuntimeError as error:
            found = found or error
    return found


def _raise_or_rescale(engine: Engine, agreement: StepAgreement, trouble: RuntimeError | None) -> None:
    """Raise, on all ranks, where this step cannot be taken: nothing was updated. Else update the loss scale."""
    zero, scale = engine.zero, engine.scaler.scale
    try:
        if agreement.trouble:
            # All ranks raise, with the text of one that is in trouble. Texts travel in a second collective, for which
            # only such steps pay.
            engine.comm.raise_on_all_ranks(trouble)
        _check_finite(engine, agreement)
        engine.scaler.update(not agreement.finite)
    except BaseException:
        zero.drop_step(engine.comm.ledger)
        raise
    zero.bucket_reducer.rescale(engine.scaler.scale / scale)  # what error feedback keeps has the old scale


def _check_finite(engine: Engine, agreement: StepAgreement) -> None:
    """Stop before anything is updated, and say where it began, when no smaller loss scale can help."""
    state, precision, step = engine.state, engine.config.precision, engine.global_steps + 1
    # In fp16 a smaller scale helps gradients, but no loss that is not finite itself; in bf16 there is no scale.
    hopeless = not agreement.finite and (agreement.bad_losses or precision.check_grad_overflow)
    state.hopeless_steps = state.hopeless_steps + 1 if hopeless else 0
    losses = ", ".join(f"{value} on rank {rank}" for rank, value in agreement.bad_losses)
    if state.hopeless_steps >= HOPELESS_STEPS:
        what = f"the loss is not finite ({losses})" if losses else "gradients are not finite"
        raise NonFiniteError(
            f"step {step}: {what}, in {state.hopeless_steps} optimizer steps in a row. Parameters and states are those "
            f"of step {step - state.hopeless_steps}. Look at the data and the first weights, lower the learning "
            f"rate{', or leave fp16' if precision.dtype == 'fp16' else ''}"
        )
    if agreement.finite or precision.skips_overflow:
        return
    where = find_bad_gradient(engine.module, engine.zero.optimizer_shard)
    began = f"nor was the loss: {losses}" if losses else f"loss {agreement.loss}"
    raise NonFiniteError(
        f"step {step}: the gradient of {where} is not finite ({began}). Parameters and optimizer state are "
        "those of the step before. Look at the data, lower the learning rate or clip gradients; "
        "torch.autograd.detect_anomaly (debug=anomaly of train.py) finds the operation"
    )


def _check_loss(call: str, loss: Any) -> None:
    """Refuse what no backward pass can begin at: a model's whole output, say, in place of the loss in it."""
    got = type(loss).__name__
    if isinstance(loss, torch.Tensor):
        if loss.numel() == 1 and loss.requires_grad:
            return
        got = f"shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}"
    raise ValueError(f"engine.{call} needs a scalar loss that requires grad, got {got}")
