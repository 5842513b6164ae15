"""The engine's checkpoints: ``save_checkpoint``, ``load_checkpoint``, ``save_16bit_model``, in DeepSpeed's names.

What is saved of which tensor, and how, is in ``deepzero/checkpoint/``; here stands what only the engine knows: its
counters, its schedule, and what has to happen around a save and a load. Apart from :mod:`~deepzero.runtime.engine` so
that the training step can be read there without it.
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepzero.checkpoint.async_save import Saver, Target
from deepzero.checkpoint.checkpoint_dir import check_tag
from deepzero.checkpoint.engine_state import EngineState
from deepzero.checkpoint.json_codec import decode
from deepzero.checkpoint.load import Loader, LoadOptions, naming_another, open_checkpoint
from deepzero.checkpoint.manifest import CheckpointError, reason
from deepzero.checkpoint.model_file import DEFAULT_MAX_SHARD, MODEL_FILE
from deepzero.checkpoint.save_16bit_model import save_gathered
from deepzero.checkpoint.save_plan import SavePlan, TrainingState, class_name, collect
from deepzero.comm import process_group
from deepzero.comm.collectives import Communicator
from deepzero.comm.ledger import SNAPSHOT
from deepzero.comm.process_group import raise_on_all_ranks
from deepzero.runtime.engine_offload import EngineOffload
from deepzero.runtime.loss_scaler import LossScaler
from deepzero.runtime.zero.partitioned_bucket import send_to_replicas
from deepzero.runtime.zero.stage3 import ZeroStage3
from deepzero.runtime.zero.stage_0 import ZeroStage0
from deepzero.runtime.zero.stage_1_and_2 import ZeroStage1And2
from deepzero.runtime.zero_components import ZeroComponents
from deepzero.utils.exit_hooks import before_the_end
from deepzero.version import __version__

log = logging.getLogger(__name__)

_SAVERS: weakref.WeakSet[Saver] = weakref.WeakSet()


@before_the_end
def _finish_saves() -> None:
    """A program that ends just after an asynchronous save has its checkpoint."""
    for saver in list(_SAVERS):
        try:
            saver.wait()
        except CheckpointError as error:
            log.error("%s", error)


def _agree_on(call: str, arguments: dict[str, Any]) -> None:
    """Raise on every rank when one calls with other arguments than rank 0. A collective."""
    first = process_group.broadcast_object(arguments)
    other = [
        f"{name}={value!r}, but rank 0 {first[name]!r}" for name, value in arguments.items() if value != first[name]
    ]
    raise_on_all_ranks(
        f"{call}: this rank passes {other[0]}; pass the same on all ranks" if other else None, CheckpointError
    )


def _check_named(call: str, folder: str | Path) -> None:
    """Raise on every rank when one names no folder: an empty setting would mean the current one. A collective."""
    raise_on_all_ranks(
        None if str(folder).strip() else f'{call}({folder!r}): no folder is named; "." is the current one',
        CheckpointError,
    )


class EngineCheckpoints(EngineOffload):
    """Saving and loading of an engine."""

    module: nn.Module
    device: torch.device
    comm: Communicator
    stage: ZeroStage0 | ZeroStage1And2 | ZeroStage3
    lr_scheduler: Any
    micro_steps: int
    global_steps: int
    skipped_steps: int
    global_samples: int
    _zero: ZeroComponents
    _scaler: LossScaler
    _backward_passes: int
    _destroyed: bool
    discard_gradients: Any
    _half_loaded: str | None = None
    """Set while model state is a mixture of two states, with the reason."""

    # ---- save --------------------------------------------------------------------------------------------------------

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

        Source: ``save_checkpoint`` in DeepSpeed's ``runtime/engine.py``.
        """
        _check_named("save_checkpoint", save_dir)
        self.finish_delayed_update()
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        save_dir = Path(save_dir).expanduser().absolute()  # the program may change its folder while a thread writes
        arguments = {
            "save_dir": str(save_dir), "tag": tag, "save_latest": save_latest,
            "exclude_frozen_parameters": exclude_frozen_parameters, "asynchronous": asynchronous,
            "keep_last": keep_last,
        }  # fmt: skip
        holdings = self._holdings()
        self._agree_to_save(arguments)

        def gather(save_id: str) -> SavePlan:
            return collect(
                holdings, self._facts(), client_state or {}, save_id, tag, with_frozen=not exclude_frozen_parameters
            )

        if self._saver is None:
            self._saver = Saver(self.device, self.config.comm.save_timeout_seconds)
            _SAVERS.add(self._saver)
            self.comm.ledger.watch(SNAPSHOT, self._saver.held)
        self._saver.save(Target(save_dir, tag, save_latest, keep_last), gather, asynchronous)
        return True

    def _agree_to_save(self, arguments: dict[str, Any]) -> None:
        """Raise on every rank what speaks against a save on one."""
        problem = None
        try:
            self._refuse_half_loaded()
            self._refuse_away("save_checkpoint")
            check_tag(arguments["tag"])
            if (keep_last := arguments["keep_last"]) is not None and keep_last < 1:
                raise CheckpointError(f"keep_last={keep_last} must be at least 1")
            for group in self._zero.groups:
                group.sync_masters_from_params()
        except RuntimeError as error:
            problem = str(error)
        raise_on_all_ranks(problem, CheckpointError)
        _agree_on("save_checkpoint", arguments)
        if self._backward_passes and self.global_rank == 0:
            log.warning(
                "save_checkpoint within optimizer step %d: the gradients of its micro-batches so far are not saved; a "
                "run that loads this goes on at the step's first micro-batch",
                self.global_steps + 1,
            )

    def wait_for_checkpoint(self) -> None:
        """Return when the last asynchronous save is on the disk.

        Raises:
            CheckpointError: it failed.
        """
        if self._saver is not None:
            self._saver.wait()

    # ---- one whole model ---------------------------------------------------------------------------------------------

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

        Source: ``save_16bit_model`` in DeepSpeed's ``runtime/engine.py``, which writes ``pytorch_model.bin``.
        """
        _check_named("save_16bit_model", save_dir)
        self.finish_delayed_update()
        name = MODEL_FILE if save_filename is None else save_filename
        problem = None
        try:
            self._refuse_half_loaded()
            self._refuse_away("save_16bit_model")
        except RuntimeError as error:
            problem = str(error)
        raise_on_all_ranks(problem, CheckpointError)
        with self.comm.ledger.aside(), torch.no_grad():
            save_gathered(
                self._holdings(), Path(save_dir).expanduser(), name, not exclude_frozen_parameters, max_shard_size
            )
        return True

    save_fp16_model = save_16bit_model

    def _holdings(self) -> EngineState:
        if self._destroyed:
            raise CheckpointError("the engine was destroyed; give the model to deepzero.initialize again")
        partitioning = self._zero.partitioning
        frozen = partitioning.frozen if partitioning is not None else []
        return EngineState(self.module, self.optimizer, self._zero.groups, frozen, self.comm, self._zero.dtypes.compute)

    def _facts(self) -> TrainingState:
        return TrainingState(
            zero_stage=self.config.zero.stage,
            precision=self.config.precision.dtype,
            batch={
                "global_batch": self.batch.global_batch,
                "micro_batch": self.batch.micro_batch,
                "accumulation": self.batch.accumulation,
            },
            counters={
                "global_steps": self.global_steps,
                "skipped_steps": self.skipped_steps,
                "global_samples": self.global_samples,
            },
            loss_scaler=self._scaler.state_dict(),
            lr_scheduler=self.lr_scheduler,
            config=dataclasses.asdict(self.config),
            deepzero_version=__version__,
        )

    # ---- load --------------------------------------------------------------------------------------------------------

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

        Source: ``load_checkpoint`` in DeepSpeed's ``runtime/engine.py``; there a missing ``latest`` is a warning.
        """
        _check_named("load_checkpoint", load_dir)
        self._refuse_away("load_checkpoint")
        self.wait_for_checkpoint()
        load_dir = Path(load_dir).expanduser()
        arguments = {
            "load_dir": str(load_dir), "tag": tag, "load_module_strict": load_module_strict,
            "load_optimizer_states": load_optimizer_states, "load_lr_scheduler_states": load_lr_scheduler_states,
            "load_module_only": load_module_only,
        }  # fmt: skip
        _agree_on("load_checkpoint", arguments)
        holdings = self._holdings()
        tag = None if tag is None else str(tag)
        with naming_another(load_dir, tag):
            reader = open_checkpoint(load_dir, tag, holdings if load_module_only else None)
        optimizer = load_optimizer_states and not load_module_only
        loader = Loader(holdings, reader, LoadOptions(optimizer, load_module_strict, buffers=reader.checked))
        loader.compare()
        saved = self._saved_schedule(loader) if load_lr_scheduler_states and not load_module_only else None
        with naming_another(load_dir, tag):
            schedule = loader.values(saved)
            client_state = loader.values(reader.manifest.client_state)
            self._fill(loader)
        self._take_over(loader, schedule, optimizer, load_module_only)
        return str(reader.path), client_state

    def _take_over(self, loader: Loader, schedule: Any, optimizer: bool, module_only: bool) -> None:
        """What is no tensor: hyper-parameters, schedule, counters, generators. Then the load is complete."""
        problem = None
        try:
            if optimizer:
                loader.apply_optimizer()
            if schedule is not None:
                self.lr_scheduler.load_state_dict(schedule)
            if not module_only:
                self._take_counters(loader, optimizer)
        except Exception as error:  # a schedule of the caller's may raise anything
            what = "what it says of optimizer, schedule or generators does not fit"
            problem = f"{loader.reader.path}: {what}: {reason(error)}"
        raise_on_all_ranks(problem, CheckpointError)
        self._half_loaded = None
        if optimizer:
            self._say_other_rates(loader)

    def _say_other_rates(self, loader: Loader) -> None:
        """A schedule with other settings goes on at its own rates: wanted, perhaps, and said."""
        there = [decode(group.get("lr"), {}) for group in loader.manifest.optimizer["groups"]]
        here = [float(group["lr"]) for group in self.optimizer.param_groups]
        if there != here and self.global_rank == 0:
            log.warning(
                "the learning rate goes on at %s, and the checkpoint's was %s: this run's schedule, or its settings, "
                "are others than those of the run that was saved",
                here,
                there,
            )

    def _fill(self, loader: Loader) -> None:
        """Values into tensors, and from masters into the parameters. The caller says when all is loaded."""
        self._sharded_step.forget()
        self._before_writes()
        self.discard_gradients()
        self._zero.reducer.forget()
        self._half_loaded = f"{loader.reader.path} was loaded in part only"
        with self.comm.ledger.aside(), torch.no_grad():
            loader.read()
            if self._zero.offload is not None:
                self._zero.offload.lay()
            self.stage.publish()
        for group in loader.holdings.frozen:
            for bucket in group.buckets:
                bucket.generation += 1
            with self.comm.ledger.aside():
                send_to_replicas(group.buckets)

    def _saved_schedule(self, loader: Loader) -> Any:
        """The schedule's state as it is stored, when there is one here and there.

        Raises:
            CheckpointError: they are not of one kind.
        """
        saved = loader.manifest.lr_scheduler
        if saved is None or not callable(getattr(self.lr_scheduler, "load_state_dict", None)):
            return None
        if saved["class"] != class_name(self.lr_scheduler):
            raise CheckpointError(
                f"{loader.reader.path} has the state of schedule {saved['class']}, and this run's is "
                f"{class_name(self.lr_scheduler)}; load_lr_scheduler_states=False leaves the schedule as it is"
            )
        return saved["state"]

    def _take_counters(self, loader: Loader, optimizer: bool) -> None:
        manifest = loader.manifest
        self.global_steps = manifest.counters["global_steps"]
        self.skipped_steps = manifest.counters["skipped_steps"]
        self.global_samples = manifest.counters["global_samples"]
        self.micro_steps = self.global_steps * self.batch.accumulation
        self._sharded_step.set_applied_steps(self.global_steps - self.skipped_steps)
        if optimizer:
            loader.restore_rng()
            if manifest.precision == self.config.precision.dtype == "fp16":
                self._scaler.load_state_dict(manifest.loss_scaler)

    def _refuse_half_loaded(self) -> None:
        if self._half_loaded is not None:
            raise CheckpointError(
                f"{self._half_loaded}: the engine holds a mixture of two states. Load another one, or start again"
            )
