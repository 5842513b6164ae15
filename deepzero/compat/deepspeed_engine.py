"""The engine that ``deepzero.initialize`` returns: the core's, with checkpoints and DeepSpeed's other methods.

:class:`~deepzero.runtime.engine.Engine` is a training step and nothing else. What this class adds is made of parts that
the core does not import: a :class:`~deepzero.checkpoint.checkpointer.Checkpointer`, a
:class:`~deepzero.offload.offload_states.StateOffloader`, offloaded activations, a printer. They enter by its callbacks.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from deepzero.checkpoint.checkpointer import Checkpointer
from deepzero.comm import process_group
from deepzero.comm.collectives import Communicator
from deepzero.compat import deepspeed_checkpoint, engine_batches, engine_checkpoints, zero_to_fp32
from deepzero.compat import parameters as _parameters  # noqa: F401  stage 3's get DeepSpeed's verbs
from deepzero.compat.engine_getters import EngineGetters
from deepzero.compat.lr_schedules import name_scheduler
from deepzero.compat.optimizer_names import FrozenParameters, NoOptimizer, dress, refuse_to_train, undress
from deepzero.config.engine import EngineConfig
from deepzero.offload import offload_states as states_on_host
from deepzero.offload.activations import build_host_activations
from deepzero.runtime.engine import StepRecord
from deepzero.runtime.zero.guards import lost_on_error
from deepzero.utils.errors import ConfigError, MisuseError


def print_progress(engine: EngineGetters, record: StepRecord) -> None:
    """One line for every ``steps_per_print`` optimizer steps."""
    if record.step % (engine.config.steps_per_print or 1) == 0:
        line = f"step={record.step}, skipped={engine.skipped_steps}, lr={engine.get_lr()}, loss={record.loss:.6g}"
        print(f"{line}, grad_norm={record.grad_norm:.6g}, loss_scale={record.loss_scale:g}", flush=True)


class DeepSpeedEngine(EngineGetters):
    """A model, its optimizer and this rank's part of ZeRO, under DeepSpeed's names. Made by ``deepzero.initialize``.

    Arguments are those of :class:`~deepzero.runtime.engine.Engine`.
    """

    made: ClassVar[weakref.WeakSet[DeepSpeedEngine]] = weakref.WeakSet()

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, config: EngineConfig, lr_scheduler: Any = None,
        total_steps: int | None = None, comm: Communicator | None = None,
    ) -> None:  # fmt: skip
        in_order = [list(group["params"]) for group in optimizer.param_groups]  # before it holds fragments
        # What is frozen here is so for as long as this engine lives, whether it is destroyed or forgotten.
        self.frozen_parameters = FrozenParameters(model, optimizer)
        weakref.finalize(self, self.frozen_parameters.thaw).atexit = False
        try:
            super().__init__(model, optimizer, config, lr_scheduler, total_steps, comm)
            with lost_on_error(model):  # which has the model, and is of no use to anybody
                dress(self, in_order)
                name_scheduler(self.lr_scheduler)
                if isinstance(self.optimizer, NoOptimizer):
                    self.callbacks.preconditions.append(refuse_to_train)
                self.checkpointer = Checkpointer(self, (deepspeed_checkpoint.read,))
                self.offloader = states_on_host.StateOffloader(self, self.checkpointer.wait)
                if config.activation_checkpointing.cpu_checkpointing:
                    build_host_activations(self)
                if config.steps_per_print is not None and self.global_rank == 0:
                    self.callbacks.after_step.append(partial(print_progress, self))
                self.made.add(self)
        except BaseException:
            self.frozen_parameters.thaw()
            raise

    # ---- checkpoints, and the model's values -------------------------------------------------------------------------

    save_checkpoint = engine_checkpoints.save_checkpoint
    load_checkpoint = engine_checkpoints.load_checkpoint
    wait_for_checkpoint = engine_checkpoints.wait_for_checkpoint
    save_16bit_model = save_fp16_model = engine_checkpoints.save_16bit_model
    module_state_dict = engine_checkpoints.module_state_dict
    load_module_state_dict = engine_checkpoints.load_module_state_dict
    _consolidated_16bit_state_dict = engine_checkpoints.consolidated_16bit_state_dict
    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict
    _change_recovery_script_permissions = staticmethod(zero_to_fp32.make_executable)

    def empty_partition_cache(self) -> None:
        """Let go of gathered parameters, and of their free buffers."""
        self.check("empty_partition_cache")
        self.zero.stage.prepare_writes()
        if self.zero.stage3 is not None:
            self.zero.stage3.coordinator.clear()

    def compile(self, backend: Any = "inductor", compile_kwargs: Mapping[str, Any] | None = None) -> None:
        """Compile the module with ``torch.compile``: stages 0 to 2, whose parameters stay; a MisuseError in stage 3."""
        if self.config.zero.stage == 3:
            raise MisuseError(
                "engine.compile in zero stage 3 would compile the hooks that fetch parameters; compile the model or "
                "its blocks (block.compile()) before deepzero.initialize, which fetches each of them as one"
            )
        self.module.compile(**{**(compile_kwargs or {}), "backend": backend})

    # ---- batches -----------------------------------------------------------------------------------------------------

    deepspeed_io = engine_batches.deepspeed_io
    set_train_batch_size = engine_batches.set_train_batch_size
    set_train_micro_batch_size = engine_batches.set_train_micro_batch_size

    # ---- when gradients are reduced ----------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear ``.grad`` of the model's parameters, where no gradient of the step under way is: as DeepSpeed's.

        It drops the step's sums where the script itself accumulates, in a step with :meth:`no_sync`, and where others'
        passes alone (a GAN's generator's, the script's own loss.backward()) have left them. Micro-batches stay counted.
        """
        self.module.zero_grad(set_to_none)
        foreign = self.passes.count > 0 and not self.passes.any_given_loss
        foreign = foreign and self.micro_steps % self.batch.accumulation == 0
        if foreign or self.state.step_without_sync == self.global_steps:
            count = self.micro_steps
            self.discard_gradients()
            self.micro_steps = count

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Reduce this step's gradients now, and not in :meth:`step`. A collective, after the step's last backward pass.

        In stages 2 and 3 this waits for the last. ``bucket_size`` may be DeepSpeed's default, or the configuration's.
        """
        if bucket_size not in (None, 500_000_000, self.config.zero.reduce_bucket_size):
            raise ConfigError(
                f"allreduce_gradients(bucket_size={bucket_size}): buckets are made by initialize; leave it out, and "
                "set zero_optimization.reduce_bucket_size"
            )
        self._check_pass("allreduce_gradients")
        if not self._is_reduction_boundary() or not self.zero.stage.gradients.backward_ended:
            raise MisuseError(
                "allreduce_gradients: further micro-batches of this optimizer step are to come, or none has been; call "
                "it after its last backward pass, and before engine.step()"
            )
        # As a step: one that breaks off here leaves sums of which some are of all ranks.
        self.state.undecided = True
        self.zero.stage.gradients.reduce_now()
        self.state.undecided = False

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """One optimizer step's backward passes: no step inside; in stages 0 and 1 one reduction, after them all.

        Stages 2 and 3 do not keep whole gradients; there each pass is reduced as it comes, to the same sums.
        """
        if self.state.inside_no_sync:
            raise MisuseError("coalesce_grad_reduction inside no_sync, or inside another one: leave that first")
        self.state.inside_no_sync = True
        try:
            yield
        finally:
            self.state.inside_no_sync = False

    # ---- states on the host ------------------------------------------------------------------------------------------

    offload_states = states_on_host.offload_states
    reload_states = states_on_host.reload_states

    def destroy(self) -> None:
        """Let go of the model: it keeps its values and may be given to ``initialize`` again. Twice is harmless."""
        if not self.state.destroyed:
            self.reload_states()  # the model keeps its values
            super().destroy()
            try:
                self.checkpointer.close()
            finally:  # the last save may have failed
                undress(self.optimizer)
                self.frozen_parameters.thaw()

    @classmethod
    def of(cls, model: Any) -> DeepSpeedEngine | None:
        """The engine that has this very model."""
        return next((one for one in cls.made if one.module is model and not one.state.destroyed), None)

    # ---- ranks -------------------------------------------------------------------------------------------------------

    barrier = staticmethod(process_group.barrier)

    def request_stop(self) -> None:
        """Ask for an orderly end; from any thread of any rank. After the next step ``engine.stopping`` is True on all.

        The word travels with the step's agreement, so that all leave the loop at the same place.
        """
        self.state.asked_to_stop = True
