"""The engine that ``deepzero.initialize`` returns: the core's, with checkpoints and DeepSpeed's other methods.

:class:`~deepzero.runtime.engine.Engine` is a training step and nothing else. What this class adds is made of parts that
the core does not import: a :class:`~deepzero.checkpoint.checkpointer.Checkpointer`, a
:class:`~deepzero.offload.offload_states.StateOffloader`, offloaded activations, a printer. Each of them enters through
one of the core's lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepzero.checkpoint.checkpointer import Checkpointer
from deepzero.checkpoint.export import DEFAULT_MAX_SHARD
from deepzero.comm import process_group
from deepzero.comm.collectives import Communicator
from deepzero.compat import parameters as _parameters  # noqa: F401  stage 3's get DeepSpeed's verbs
from deepzero.compat.engine_getters import EngineGetters
from deepzero.config.engine import EngineConfig
from deepzero.offload.activations import build_host_activations
from deepzero.offload.offload_states import StateOffloader
from deepzero.runtime.diagnostics import gather_report, params_sha256, used_bytes, whole_state_dict
from deepzero.runtime.engine import StepRecord


class DeepSpeedEngine(EngineGetters):
    """A model, its optimizer and this rank's part of ZeRO, under DeepSpeed's names. Made by ``deepzero.initialize``.

    Arguments are those of :class:`~deepzero.runtime.engine.Engine`.
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
        numel = sum(param.numel() for param in model.parameters())  # before stage 3 takes their elements away
        super().__init__(model, optimizer, config, lr_scheduler, total_steps, comm)
        self.model_numel, self.bytes_at_build = numel, used_bytes(self.device)
        self.checkpointer = Checkpointer(self)
        self.offloader = StateOffloader(self, self.checkpointer.wait)
        if config.activation_checkpointing.cpu_checkpointing:
            self.activations = build_host_activations(self)
        if config.steps_per_print is not None and self.global_rank == 0:
            self.on_step.append(self._print_progress)

    def _print_progress(self, record: StepRecord) -> None:
        if record.step % (self.config.steps_per_print or 1) == 0:
            print(
                f"step={record.step}, skipped={self.skipped_steps}, lr={self.get_lr()}, loss={record.loss:.6g}, "
                f"grad_norm={record.grad_norm:.6g}, loss_scale={record.loss_scale:g}",
                flush=True,
            )

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        asynchronous: bool = False,
        keep_last: int | None = None,
    ) -> bool:
        """Save everything that training needs to go on. A collective; atomic: the folder ``tag`` appears when whole.

        Args:
            save_dir: the folder that checkpoints lie in; made if it is not there.
            tag: name of this one; None: ``global_step`` and the number. A checkpoint of this name is replaced.
            client_state: of rank 0, given back by :meth:`load_checkpoint`: numbers, strings, lists, tuples,
                dictionaries, tensors, arrays.
            save_latest: let the file ``latest`` name it, which is what is loaded without a tag.
            exclude_frozen_parameters: leave out parameters that are not trained.
            asynchronous: return after a copy was taken in memory, and write in the background. The next save, the end
                of the program and :meth:`wait_for_checkpoint` wait for the end of this one.
            keep_last: remove older checkpoints whose tags differ from ``tag`` by digits only, but for the newest.

        Returns:
            True, as in DeepSpeed.

        Raises:
            CheckpointError: on every rank. What was saved before is untouched. An asynchronous save's failure is raised
                by the next call that waits for it.

        Source: ``save_checkpoint`` in ``runtime/engine.py`` of [DeepSpeed].
        """
        with_frozen = not exclude_frozen_parameters
        self.checkpointer.save(save_dir, tag, client_state, save_latest, with_frozen, asynchronous, keep_last)
        return True

    def wait_for_checkpoint(self) -> None:
        """Return when the last asynchronous save is on the disk.

        Raises:
            CheckpointError: it failed.
        """
        self.checkpointer.wait()

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str | None = None,
        exclude_frozen_parameters: bool = False,
        max_shard_size: str | int = DEFAULT_MAX_SHARD,
    ) -> bool:
        """Save the model in the compute dtype as safetensors that Hugging Face's libraries read. A collective.

        Parameters are gathered one by one and written by rank 0 as they come. A model that is there is replaced when
        the new one is complete. The files are those of ``python -m tools.export`` with this dtype.

        Args:
            save_dir: the folder; made if it is not there.
            save_filename: of the file; None: ``model.safetensors``.
            exclude_frozen_parameters: leave out parameters that are not trained.
            max_shard_size: a larger model is divided among several files and an index.

        Returns:
            True, as in DeepSpeed.

        Raises:
            CheckpointError: on every rank; what was there before is untouched. A name that ends in ``.bin`` or ``.pt``
                is refused, as nothing is ever pickled.

        Source: ``save_16bit_model`` in ``runtime/engine.py`` of [DeepSpeed], which writes ``pytorch_model.bin``.
        """
        self.checkpointer.save_16bit_model(save_dir, save_filename, not exclude_frozen_parameters, max_shard_size)
        return True

    save_fp16_model = save_16bit_model

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str, dict[str, Any]]:
        """Go on where a checkpoint was saved, by any number of ranks in any stage. A collective.

        Args:
            load_dir: the folder that checkpoints were saved to, or one checkpoint. With ``load_module_only`` also a
                folder with ``model.safetensors`` or its index, or one safetensors file: see ``docs/export.md``.
            tag: which one; None: the one that ``latest`` names.
            load_module_strict: False loads the parameters and buffers that model and checkpoint have in common.
            load_optimizer_states: False leaves moments and hyper-parameters of the optimizer as they are.
            load_lr_scheduler_states: False leaves the schedule where it is.
            load_module_only: parameters, their masters and buffers, and nothing else: no counters either.

        Returns:
            The checkpoint's path and the client state that was saved with it.

        Raises:
            CheckpointError: on every rank, with the file and what is wrong. It is of another model, is not complete, is
                damaged. Damage in the middle of a file may be found when some tensors are filled already; then every
                use of the engine raises until a load succeeds.

        Source: ``load_checkpoint`` in ``runtime/engine.py`` of [DeepSpeed]; there a missing ``latest`` is a warning.
        """
        return self.checkpointer.load(
            load_dir, tag, load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only
        )

    # ---- the model's values ------------------------------------------------------------------------------------------

    def module_state_dict(self) -> dict[str, Any]:
        """The model's own state dict, in the compute dtype, whole on every rank; stage 3: a collective, a copy.

        Parameters that are tied in the model are one tensor in stage 3's copy too.
        """
        return whole_state_dict(self.module) if self.config.zero.stage == 3 else self.module.state_dict()

    def load_module_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load values into the model on every rank; the masters follow before the next step."""
        self.check("load_module_state_dict")
        self.finish_delayed_update()
        self.before_writes()
        self.module.load_state_dict(state_dict, strict=strict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear ``.grad`` of the model's parameters, where no gradient of the step under way is: harmless at any time.

        As in DeepSpeed, so that scripts which call it before every micro-batch accumulate all the same.
        ``discard_gradients`` drops what has been accumulated.
        """
        self.module.zero_grad(set_to_none)

    # ---- states on the host ------------------------------------------------------------------------------------------

    def offload_states(
        self,
        include: Iterable[str | Enum] | str | None = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move model states to host memory and give the device's memory back. A collective.

        What is away already stays away. Gradients of an optimizer step that is not complete are kept; an asynchronous
        save is waited for. Views that the program itself holds of moved tensors (a ``state_dict`` that was taken
        before) must not be read meanwhile.

        Args:
            include: which, of :data:`STATES` or DeepSpeed's ``OffloadStateTypeEnum``; None: all.
            device: ``cpu``, the only one.
            pin_memory: lock the host's pages, without which copies are slow and never in the background.
            non_blocking: return while copies are under way. The device is in order: what is issued there afterwards
                comes after them. The memory is then this process's, for whatever it computes; without, it is given back
                to the system, and other processes have it.

        Raises:
            ValueError: an unknown name or device.
            HostMemoryError: a host has not enough memory; on every rank, and nothing has been moved.
            RuntimeError: inside a backward pass or ``GatheredParameters``, after a pass that broke off, after
                ``destroy``.
        """
        self.offloader.offload(include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move everything that is away back to the device, to the bits that it had. Nothing to do is no error.

        Args:
            non_blocking: return while copies are under way; the device waits for them by itself.

        Raises:
            torch.OutOfMemoryError: the device has no room for it. What has not come back yet is still away.
        """
        self.offloader.reload(non_blocking)

    def destroy(self) -> None:
        """Let go of the model: it keeps its values and may be given to ``initialize`` again. Twice is harmless."""
        if not self.state.destroyed:
            self.reload_states()  # the model keeps its values
            super().destroy()
            self.checkpointer.close()

    # ---- the whole run -----------------------------------------------------------------------------------------------

    def params_sha256(self) -> str:
        """SHA-256 of the full parameters' bytes in the compute dtype, in name order. A collective."""
        return params_sha256(self.module)

    def report(self) -> dict[str, Any]:
        """The ledger of all ranks, predicted beside measured. A collective; see ``diagnostics.gather_report``."""
        return gather_report(self.ledger, self.device, self.bytes_at_build)

    # ---- ranks -------------------------------------------------------------------------------------------------------

    def eval_mean(self, values: torch.Tensor) -> torch.Tensor:
        """Mean over ranks, in rank order, of a 1-D tensor of doubles. A collective."""
        return process_group.gather_and_sum(values.detach().double().cpu(), self.device) / self.world_size

    def barrier(self) -> None:
        """Wait until every rank is here."""
        process_group.barrier()

    def request_stop(self) -> None:
        """Ask for an orderly end; from any thread of any rank. After the next step ``engine.stopping`` is True on all.

        A signal reaches ranks at different instants, and some of them perhaps a step later. The word travels with the
        step's agreement, at no cost, so that all leave the loop at the same place.
        """
        self.state.asked_to_stop = True
