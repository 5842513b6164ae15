"""The engine that ``deepzero.initialize`` returns: the core's, with checkpoints and DeepSpeed's other methods.

:class:`~deepzero.runtime.engine.Engine` is a training step and nothing else. What this class adds is made of parts that
the core does not import: a :class:`~deepzero.checkpoint.checkpointer.Checkpointer`, a
:class:`~deepzero.offload.offload_states.StateOffloader`, offloaded activations, a printer. Each of them enters through
one of the core's lists.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from deepzero.checkpoint.checkpointer import Checkpointer
from deepzero.comm import process_group
from deepzero.comm.collectives import Communicator
from deepzero.compat import deepspeed_checkpoint, engine_checkpoints, zero_to_fp32
from deepzero.compat import parameters as _parameters  # noqa: F401  stage 3's get DeepSpeed's verbs
from deepzero.compat.engine_getters import EngineGetters
from deepzero.compat.lr_schedules import name_scheduler
from deepzero.compat.optimizer_names import FrozenParameters, NoOptimizer, dress, refuse_to_train, undress
from deepzero.config.engine import EngineConfig, resolve_batch
from deepzero.config.strict import ConfigError
from deepzero.device import accelerator_of
from deepzero.offload.activations import build_host_activations
from deepzero.offload.offload_states import StateOffloader
from deepzero.runtime.engine import StepRecord
from deepzero.runtime.zero.guards import lost_on_error
from deepzero.utils.errors import MisuseError

ROUTES = ("train", "eval", "predict")
"""What a loader of ``deepspeed_io`` is for."""


def print_progress(engine: EngineGetters, record: StepRecord) -> None:
    """One line for every ``steps_per_print`` optimizer steps."""
    if record.step % (engine.config.steps_per_print or 1) == 0:
        line = f"step={record.step}, skipped={engine.skipped_steps}, lr={engine.get_lr()}, loss={record.loss:.6g}"
        print(f"{line}, grad_norm={record.grad_norm:.6g}, loss_scale={record.loss_scale:g}", flush=True)


def refuse_stream(call: str, dataset: Any, world_size: int) -> None:
    """Raise a ConfigError for a dataset that several ranks cannot share out."""
    if isinstance(dataset, IterableDataset) and world_size > 1:
        raise ConfigError(
            f"{call}: an IterableDataset has no indices to share out: each of {world_size} ranks would train on the "
            "same samples. Let its iterator give this rank's share (torch.distributed.get_rank()), and make a torch "
            "DataLoader of it instead"
        )


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
                self.optimizer_order = in_order
                self.bytes_at_build = accelerator_of(self.device).memory_allocated(self.device)
                dress(self)
                name_scheduler(self.lr_scheduler)
                if isinstance(self.optimizer, NoOptimizer):
                    self.preconditions.append(refuse_to_train)
                self.checkpointer = Checkpointer(self, (deepspeed_checkpoint.read,))
                self.offloader = StateOffloader(self, self.checkpointer.wait)
                if config.activation_checkpointing.cpu_checkpointing:
                    self.activations = build_host_activations(self)
                if config.steps_per_print is not None and self.global_rank == 0:
                    self.on_step.append(partial(print_progress, self))
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
        self.zero.stage.before_writes()
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

    def deepspeed_io(
        self, dataset: Dataset[Any], batch_size: int | None = None, route: str = "train", pin_memory: bool = True,
        data_sampler: Sampler[Any] | None = None, collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DataLoader[Any]:  # fmt: skip
        """A loader of this rank's micro-batches, as many on every rank.

        The last one may be smaller, and the first samples come twice where the ranks do not divide their number; with
        ``dataloader_drop_last`` both are dropped instead. The route ``train`` has an order that
        ``loader.sampler.set_epoch`` shuffles anew; others keep the dataset's. ``collate_fn`` is ``initialize``'s where
        none is given. Raises a ConfigError for a route that is none and for an iterable dataset on several ranks.
        """
        if route not in ROUTES:
            raise ConfigError(f"deepspeed_io(route={route!r}): routes are {', '.join(ROUTES)}")
        if data_sampler is None:
            refuse_stream("deepspeed_io", dataset, self.world_size)
        collate_fn = collate_fn or self.collate_fn
        drop_last = self.config.dataloader_drop_last
        if data_sampler is None and not isinstance(dataset, IterableDataset):
            ranks, shuffle = (self.world_size, self.global_rank), route == "train"
            data_sampler = DistributedSampler(dataset, *ranks, shuffle=shuffle, drop_last=drop_last)
        return DataLoader(
            dataset, batch_size or self.batch.micro_batch, sampler=data_sampler, collate_fn=collate_fn,
            pin_memory=pin_memory and accelerator_of(self.device).has_streams, num_workers=num_local_io_workers or 0,
            drop_last=drop_last,
        )  # fmt: skip

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Let further optimizer steps have other numbers of micro-batches. Between two steps; on every rank.

        What the report predicts is still of the number that the engine was built with. Raises a ConfigError where it
        does not divide, and a MisuseError within a step or where wider sums have no room (stages 0 and 1 in 16 bits).
        """
        whole = dataclasses.replace(self.config, train_batch_size=train_batch_size, gradient_accumulation_steps=None,
                                    train_micro_batch_size_per_gpu=self.batch.micro_batch)  # fmt: skip
        batch, dtypes = resolve_batch(whole, self.world_size), self.zero.dtypes
        if self.passes.count:
            raise MisuseError("set_train_batch_size within an optimizer step: call it after engine.step()")
        narrow = dtypes.compute != dtypes.accumulation and all(flat is None for flat in self.zero.unreduced.flat)
        if batch.accumulation > 1 and not self.zero.stage.gradients.every_pass and narrow:
            raise MisuseError(
                f"set_train_batch_size({train_batch_size}): the engine was built for one micro-batch, and the sum of "
                f"{batch.accumulation} would be kept in {dtypes.compute}. Start with gradient_accumulation_steps of at "
                "least 2, or use zero stage 2 or 3"
            )
        self.batch = batch
        self.micro_steps -= self.micro_steps % batch.accumulation  # the next micro-batch is the first of its step

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Say how many sequences a micro-batch has from now on, for the count of samples. On every rank."""
        if micro_batch_size < 1:
            raise ConfigError(f"set_train_micro_batch_size({micro_batch_size}): a micro-batch has at least 1 sequence")
        batch = self.batch
        samples = micro_batch_size * batch.accumulation * batch.world_size
        self.batch = dataclasses.replace(batch, micro_batch=micro_batch_size, global_batch=samples)

    # ---- when gradients are reduced ----------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear ``.grad`` of the model's parameters, where no gradient of the step under way is.

        As in DeepSpeed it is harmless where the engine accumulates, so that scripts may call it before every
        micro-batch. In a step with :meth:`no_sync` the script accumulates itself: there the sums of the step
        are dropped, and its micro-batches stay counted.
        """
        self.module.zero_grad(set_to_none)
        if self.state.step_without_sync == self.global_steps:
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
        if not self._is_reduction_boundary() or not self.zero.stage.gradients.present:
            raise MisuseError(
                "allreduce_gradients: further micro-batches of this optimizer step are to come, or none has been; call "
                "it after its last backward pass, and before engine.step()"
            )
        self.zero.stage.gradients.reduce_now()

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

    def offload_states(
        self, include: Iterable[str | Enum] | str | None = None, device: Any = "cpu", pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:  # fmt: skip
        """Move model states to host memory and give the device's memory back. A collective.

        Gradients of an optimizer step that is not complete are kept; an asynchronous save is waited for. Views that the
        program itself holds of moved tensors (a ``state_dict`` that was taken before) must not be read meanwhile.

        Args:
            include: which, of :data:`STATES` or DeepSpeed's ``OffloadStateTypeEnum``; None: all.
            device: ``cpu``, the only one.
            pin_memory: lock the host's pages, without which copies are slow and never in the background.
            non_blocking: return while copies are under way, which the device does before what is issued afterwards. The
                memory is then this process's; without, it is given back to the system.

        Raises a ValueError for an unknown name or device, a HostMemoryError on every rank where a host has not enough
        (nothing is moved), a RuntimeError inside a backward pass or ``GatheredParameters`` and after ``destroy``.
        """
        self.offloader.offload(include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move what is away back to the device, with ``non_blocking`` in the background: it waits for itself.

        A torch.OutOfMemoryError says that there is no room; what has not come back yet is still away.
        """
        self.offloader.reload(non_blocking)

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

    def eval_mean(self, values: torch.Tensor) -> torch.Tensor:
        """Mean over ranks, in rank order, of a 1-D tensor of doubles. A collective."""
        return process_group.gather_and_sum(values.detach().double().cpu(), self.device) / self.world_size

    barrier = staticmethod(process_group.barrier)

    def request_stop(self) -> None:
        """Ask for an orderly end; from any thread of any rank. After the next step ``engine.stopping`` is True on all.

        The word travels with the step's agreement, so that all leave the loop at the same place.
        """
        self.state.asked_to_stop = True
