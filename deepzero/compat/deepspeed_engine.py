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
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from deepzero.checkpoint.checkpoint_dir import latest_tag
from deepzero.checkpoint.checkpointer import Checkpointer
from deepzero.checkpoint.errors import CheckpointError
from deepzero.checkpoint.export import DEFAULT_MAX_SHARD
from deepzero.comm import process_group
from deepzero.comm.collectives import Communicator
from deepzero.compat import deepspeed_checkpoint, zero_to_fp32
from deepzero.compat import parameters as _parameters  # noqa: F401  stage 3's get DeepSpeed's verbs
from deepzero.compat.deepspeed_checkpoint import LATEST_UNIVERSAL
from deepzero.compat.engine_getters import EngineGetters
from deepzero.compat.lr_schedules import name_scheduler
from deepzero.compat.optimizer_names import NoOptimizer, dress, freeze, refuse_to_train, undress, unfreeze
from deepzero.config.engine import EngineConfig, resolve_batch
from deepzero.config.strict import ConfigError
from deepzero.device import accelerator_of
from deepzero.offload.activations import build_host_activations
from deepzero.offload.offload_states import StateOffloader
from deepzero.runtime.diagnostics import whole_state_dict
from deepzero.runtime.engine import StepRecord
from deepzero.utils.errors import MisuseError

ROUTES = ("train", "eval", "predict")
"""What a loader of ``deepspeed_io`` is for."""


class DeepSpeedEngine(EngineGetters):
    """A model, its optimizer and this rank's part of ZeRO, under DeepSpeed's names. Made by ``deepzero.initialize``.

    Arguments are those of :class:`~deepzero.runtime.engine.Engine`.
    """

    made: ClassVar[weakref.WeakSet[DeepSpeedEngine]] = weakref.WeakSet()

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, config: EngineConfig, lr_scheduler: Any = None,
        total_steps: int | None = None, comm: Communicator | None = None,
    ) -> None:  # fmt: skip
        numel = sum(param.numel() for param in model.parameters())  # before stage 3 takes their elements away
        in_order = [list(group["params"]) for group in optimizer.param_groups]  # before it holds fragments
        # What is frozen here is so for as long as this engine lives, whether it is destroyed or forgotten.
        self._frozen = freeze(model, optimizer)
        self._unfreeze = weakref.finalize(self, unfreeze, self._frozen)
        self._unfreeze.atexit = False
        try:
            super().__init__(model, optimizer, config, lr_scheduler, total_steps, comm)
            self.model_numel, self.bytes_at_build = numel, accelerator_of(self.device).memory_allocated(self.device)
            self.optimizer_order = in_order
            self._add_parts()
        except BaseException:
            self._unfreeze()
            raise

    def _add_parts(self) -> None:
        """What DeepSpeed's engine has and the core's has not."""
        self.made.add(self)
        self._step_without_sync = -1  # the optimizer step in which ``no_sync`` was entered last
        self.collate_fn: Callable[[list[Any]], Any] | None = None
        dress(self)
        name_scheduler(self.lr_scheduler)
        if isinstance(self.optimizer, NoOptimizer):
            self.preconditions.append(refuse_to_train)
        self.checkpointer = Checkpointer(self, (deepspeed_checkpoint.read,))
        self.offloader = StateOffloader(self, self.checkpointer.wait)
        if self.config.activation_checkpointing.cpu_checkpointing:
            self.activations = build_host_activations(self)
        if self.config.steps_per_print is not None and self.global_rank == 0:
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
        self, save_dir: str | Path, tag: str | None = None, client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True, exclude_frozen_parameters: bool = False, asynchronous: bool = False,
        keep_last: int | None = None,
    ) -> bool:  # fmt: skip
        """Save everything that training needs to go on; True. A collective; atomic: the folder appears when whole.

        Args:
            save_dir: the folder that checkpoints lie in; made if it is not there.
            tag: name of this one; None: ``global_step`` and the number. A checkpoint of this name is replaced.
            client_state: of rank 0, given back by :meth:`load_checkpoint`: numbers, strings, lists, tuples,
                dictionaries, tensors, arrays.
            save_latest: let the file ``latest`` name it, which is what is loaded without a tag.
            exclude_frozen_parameters: leave out parameters that are not trained.
            asynchronous: return after a copy was taken in memory, and write in the background. The next save, the end
                of the program and :meth:`wait_for_checkpoint` wait for it, and raise what it failed with.
            keep_last: remove older checkpoints whose tags differ from ``tag`` by digits only, but for the newest.

        Raises a CheckpointError on every rank; what was saved before is untouched.

        Source: ``save_checkpoint`` in ``runtime/engine.py`` of [DeepSpeed].
        """
        with_frozen = not exclude_frozen_parameters
        self.checkpointer.save(save_dir, tag, client_state, save_latest, with_frozen, asynchronous, keep_last)
        if self.global_rank == 0:
            zero_to_fp32.leave_script(Path(save_dir).expanduser())
        return True

    _change_recovery_script_permissions = staticmethod(zero_to_fp32.make_executable)

    def wait_for_checkpoint(self) -> None:
        """Return when the last asynchronous save is on the disk, or raise a CheckpointError if it failed."""
        self.checkpointer.wait()

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str | None = None, exclude_frozen_parameters: bool = False,
        max_shard_size: str | int = DEFAULT_MAX_SHARD,
    ) -> bool:  # fmt: skip
        """Save the model in the compute dtype as safetensors that Hugging Face's libraries read; True. A collective.

        Parameters are gathered one by one and written by rank 0 as they come, as by ``python -m tools.export``. A model
        that is there is replaced when the new one is complete.

        Args:
            save_dir: the folder; made if it is not there.
            save_filename: of the file; None: ``model.safetensors``. A name in ``.bin`` or ``.pt`` is a file of
                ``torch.save``, undivided (no ``max_shard_size``), for which rank 0's host holds the whole model.
            exclude_frozen_parameters: leave out parameters that are not trained.
            max_shard_size: a larger model is divided among several files and an index.

        Raises a CheckpointError on every rank; what was there before is untouched.

        Source: ``save_16bit_model`` in ``runtime/engine.py`` of [DeepSpeed], which writes ``pytorch_model.bin``.
        """
        if str(save_filename).endswith((".bin", ".pt")):
            self.check("save_16bit_model")
            self.finish_delayed_update()
            path = Path(save_dir).expanduser() / str(save_filename)
            state_dict = partial(self._consolidated_16bit_state_dict, exclude_frozen_parameters)
            zero_to_fp32.save_by_torch(path, state_dict, max_shard_size)
            return True
        self.checkpointer.save_16bit_model(save_dir, save_filename, not exclude_frozen_parameters, max_shard_size)
        return True

    save_fp16_model = save_16bit_model

    def load_checkpoint(
        self, load_dir: str | Path, tag: str | None = None, load_module_strict: bool = True,
        load_optimizer_states: bool = True, load_lr_scheduler_states: bool = True, load_module_only: bool = False,
        custom_load_fn: None = None,
    ) -> tuple[str, dict[str, Any]] | tuple[None, None]:  # fmt: skip
        """Go on where a checkpoint was saved, by any number of ranks in any stage. A collective.

        Args:
            load_dir: the folder that checkpoints were saved to, or one checkpoint: deepzero's, or DeepSpeed's own of
                stages 1 to 3 and universal ones (``docs/checkpoints.md``). With ``load_module_only`` also a folder
                with ``model.safetensors`` or its index, or one safetensors file: see ``docs/export.md``.
            tag: which one; None: the one that ``latest`` names, or with ``checkpoint.load_universal`` the one of
                ``latest_universal`` if that is there.
            load_module_strict: False loads the parameters and buffers that model and checkpoint have in common.
            load_optimizer_states: False leaves moments and hyper-parameters of the optimizer as they are.
            load_lr_scheduler_states: False leaves the schedule where it is.
            load_module_only: parameters, their masters and buffers, and nothing else: no counters either.
            custom_load_fn: not here, and refused: values go into partitions, by ranges of elements.

        Returns:
            The checkpoint's path and the client state that was saved with it; twice None, with a warning, where
            nothing has been saved yet: no folder, or an empty one (but weights alone have to be there).

        Raises:
            CheckpointError: on every rank, with the file and what is wrong: of another model, not complete, damaged.
                Where that is found when some tensors are filled, every use of the engine raises until a load succeeds.

        Source: ``load_checkpoint`` in ``runtime/engine.py`` of [DeepSpeed]; there a missing ``latest`` is a warning
        also where checkpoints are.
        """
        if custom_load_fn is not None:
            raise CheckpointError(
                "load_checkpoint(custom_load_fn=…): deepzero fills partitions and has no whole state dict to give; "
                "give the model other names or values before deepzero.initialize, or use load_module_strict=False"
            )
        latest = Path(load_dir).expanduser() / LATEST_UNIVERSAL
        if tag is None and self.config.load_universal and latest.is_file():
            tag = latest_tag(latest.parent, LATEST_UNIVERSAL)
        return self.checkpointer.load(
            load_dir, tag, load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only
        )

    # ---- the model's values ------------------------------------------------------------------------------------------

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """The model's own state dict, in the compute dtype, whole on every rank; stage 3: a collective, a copy.

        Parameters that are tied in the model are one tensor in stage 3's copy too.
        """
        if self.config.zero.stage == 3 or exclude_frozen_parameters:
            return whole_state_dict(self.module, not exclude_frozen_parameters)
        return self.module.state_dict()

    def load_module_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load values into the model on every rank; the masters follow before the next step."""
        self.check("load_module_state_dict")
        self.finish_delayed_update()
        self.before_writes()
        self.module.load_state_dict(state_dict, strict=strict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear ``.grad`` of the model's parameters, where no gradient of the step under way is.

        As in DeepSpeed it is harmless where the engine accumulates, so that scripts may call it before every
        micro-batch. In a step with :meth:`no_sync` the script accumulates itself: there the sums of the step
        are dropped, and its micro-batches stay counted.
        """
        self.module.zero_grad(set_to_none)
        if self._step_without_sync == self.global_steps:
            count = self.micro_steps
            self.discard_gradients()
            self.micro_steps = count

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """As in DDP: no reduction inside, and :meth:`zero_grad` drops what has been accumulated in this step."""
        with super().no_sync():
            self._step_without_sync = self.global_steps
            yield

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """The model's whole state dict in the compute dtype on rank 0's CPU; None on other ranks. A collective."""
        state = whole_state_dict(self.module, not exclude_frozen_parameters, on_cpu_of_rank_0=True)
        return state if self.global_rank == 0 else None

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def empty_partition_cache(self) -> None:
        """Let go of gathered parameters, and of their free buffers."""
        self.check("empty_partition_cache")
        self.zero.stage.before_writes()
        if self.zero.stage3 is not None:
            self.zero.stage3.clear()

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
        if data_sampler is None and isinstance(dataset, IterableDataset) and self.world_size > 1:
            raise ConfigError(
                f"an IterableDataset has no indices to share out: each of {self.world_size} ranks would train on the "
                "same samples. Let its iterator give this rank's share (torch.distributed.get_rank()), and make a "
                "torch DataLoader of it instead of training_data= or deepspeed_io"
            )
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
        if self.passes.count or self.micro_steps % self.batch.accumulation:
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
            self.checkpointer.close()
            undress(self.optimizer)
            self._unfreeze()

    @classmethod
    def of(cls, model: Any) -> DeepSpeedEngine | None:
        """The engine that has this very model."""
        return next((one for one in cls.made if one.module is model and not one.state.destroyed), None)

    @contextlib.contextmanager
    def unfrozen(self) -> Iterator[None]:
        """What this engine has frozen requires gradients inside, as after :meth:`destroy`."""
        unfreeze(self._frozen)
        try:
            yield
        finally:
            unfreeze(self._frozen, trains=False)

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
