"""Saving and loading of an engine: what only the engine has, around the tensors that ``deepzero/checkpoint/`` moves.

Counters, schedule, loss scale; and what must happen before a save and after a load. The methods that users call, with
DeepSpeed's names and arguments, are those of :class:`deepzero.compat.deepspeed_engine.DeepSpeedEngine`.
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from deepzero.checkpoint.async_save import Saver, Target
from deepzero.checkpoint.checkpoint_dir import check_tag
from deepzero.checkpoint.engine_state import EngineState, SavePlan, class_name, collect
from deepzero.checkpoint.errors import CheckpointError, NoCheckpoint, agree_on, as_folder, own_words, reason, together
from deepzero.checkpoint.export import MODEL_FILE, save_gathered
from deepzero.checkpoint.huggingface import read_foreign
from deepzero.checkpoint.json_codec import decode
from deepzero.checkpoint.load import Format, Loader, naming_another, open_checkpoint
from deepzero.checkpoint.manifest import BATCH, COUNTERS
from deepzero.comm.ledger import SNAPSHOT
from deepzero.runtime.engine import Engine, StepRecord
from deepzero.runtime.zero.partitioned_bucket import renew_copies
from deepzero.utils.exit_hooks import before_the_end

log = logging.getLogger(__name__)


def _finish(reference: weakref.ref[Saver]) -> None:
    if (saver := reference()) is not None:
        saver.wait()


class Checkpointer:
    """Saves and loads one engine's training state: model, optimizer, schedule and counters.

    Its ``preconditions`` get one more: an engine that holds a mixture of two states refuses everything but another
    load. ``formats`` are of other programs' checkpoints that can be loaded, beside plain safetensors.
    """

    def __init__(self, engine: Engine, formats: Sequence[Format] = ()) -> None:
        self.engine, self.formats = engine, (read_foreign, *formats)
        self.saver = Saver(engine.comm.device, engine.config.comm.save_timeout_seconds)
        self._weights_alone = False  # what broke off is a load without optimizer states
        # Keys of the optimizer's groups: as the last step began, and those that steps have put there.
        self._before_step, self._from_steps = self._group_keys(), set[str]()
        engine.callbacks.after_step.append(self._note_keys)
        engine.callbacks.preconditions.append(self.check_loaded)
        # A program that ends just after an asynchronous save has its checkpoint. Weakly: what is left to be done at
        # the program's end must not keep an engine in memory until then.
        before_the_end(partial(_finish, weakref.ref(self.saver)))
        self.wait, self.close = self.saver.wait, self.saver.close

    def check_loaded(self, call: str) -> None:
        """Raise when a step or a load broke off half-way, unless ``call`` loads another state."""
        if (why := self.engine.state.broke_off) is not None and not call.startswith("load_"):
            raise CheckpointError(f"{why}: the engine holds a mixture of two states. Load another one, or start again")
        if call == "engine.step()":
            self._before_step = self._group_keys()
        # Of what a step meets all ranks learn at its boundary; one that raised before it would let the others wait.
        step = call in ("backward", "engine.step()") or (call == "forward" and torch.is_grad_enabled())
        problem = self.engine.zero.offload.problem() if self.engine.zero.offload is not None else None
        if problem is not None and not step and not call.startswith("load_"):
            raise problem

    def _group_keys(self) -> set[str]:
        return {key for group in self.engine.optimizer.param_groups for key in group}

    def _note_keys(self, *_: StepRecord) -> None:
        self._from_steps |= self._group_keys() - self._before_step

    def holdings(self) -> EngineState:
        """The engine's model state, as a checkpoint stores it."""
        engine, zero = self.engine, self.engine.zero
        if engine.state.destroyed:
            raise CheckpointError("the engine was destroyed; give the model to deepzero.initialize again")
        if engine.state.broke_off is not None:  # a step, perhaps, of which no callback was told
            self._note_keys()
        frozen = zero.stage3.frozen_groups if zero.stage3 is not None else []
        compute = zero.dtypes.compute
        return EngineState(engine.module, engine.optimizer, zero.groups, frozen, engine.comm, compute, self._from_steps)

    # ---- save --------------------------------------------------------------------------------------------------------

    def save(
        self,
        save_dir: str | Path,
        tag: str | None,
        client_state: Mapping[str, Any] | None,
        save_latest: bool,
        with_frozen: bool,
        asynchronous: bool,
        keep_last: int | None,
    ) -> None:
        """``engine.save_checkpoint``. A collective."""
        engine = self.engine
        folder = as_folder("save_checkpoint", save_dir).absolute()  # the program may move on while a thread writes
        engine.finish_delayed_update()
        tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
        holdings = self.holdings()
        with together(own_words):
            engine.check("save_checkpoint")
            check_tag(tag)
            if keep_last is not None and (keep_last < 1 or not hasattr(keep_last, "__index__")):
                raise CheckpointError(f"keep_last={keep_last} must be at least 1, and a whole number")
            for group in engine.zero.groups:
                group.sync_masters_from_params()
        agree_on("save_checkpoint", {
            "save_dir": str(folder), "tag": tag, "save_latest": save_latest,
            "exclude_frozen_parameters": not with_frozen, "asynchronous": asynchronous, "keep_last": keep_last,
        })  # fmt: skip
        if engine.passes.count and engine.comm.rank == 0:
            log.warning(
                "save_checkpoint within optimizer step %d: the gradients of its micro-batches so far are not saved; a "
                "run that loads this goes on at the step's first micro-batch",
                engine.global_steps + 1,
            )

        def gather(save_id: str) -> SavePlan:
            facts = {
                "id": save_id,
                "tag": tag,
                "zero_stage": engine.config.zero.stage,
                "precision": engine.config.precision.dtype,
                "batch": {name: getattr(engine.batch, name) for name in BATCH},
                "counters": {name: getattr(engine, name) for name in COUNTERS},
                "loss_scaler": engine.scaler.state_dict(),
                "config": dataclasses.asdict(engine.config),
            }
            return collect(holdings, facts, engine.lr_scheduler, client_state or {}, with_frozen)

        engine.comm.ledger.watch(SNAPSHOT, self.saver.held)
        self.saver.save(Target(folder, tag, save_latest, keep_last), gather, asynchronous)

    def save_16bit_model(
        self, save_dir: str | Path, filename: str | None, with_frozen: bool, max_shard_size: str | int
    ) -> None:
        """``engine.save_16bit_model``. A collective."""
        folder = as_folder("save_16bit_model", save_dir)
        self.engine.finish_delayed_update()
        with together(own_words):
            self.engine.check("save_16bit_model")
        with self.engine.comm.ledger.outside_step(), torch.no_grad():
            name = MODEL_FILE if filename is None else filename
            save_gathered(self.holdings(), folder, name, with_frozen, max_shard_size)

    # ---- load --------------------------------------------------------------------------------------------------------

    def load(
        self,
        load_dir: str | Path,
        tag: str | None,
        strict: bool,
        optimizer_states: bool,
        lr_scheduler_states: bool,
        module_only: bool,
    ) -> tuple[str, dict[str, Any]] | tuple[None, None]:
        """``engine.load_checkpoint``. A collective."""
        folder = as_folder("load_checkpoint", load_dir)
        with together(own_words):
            self.engine.check("load_checkpoint")
            why = None if self._weights_alone else self.engine.state.broke_off
            if why is not None and (module_only or not optimizer_states):
                raise CheckpointError(f"{why}: load the optimizer's states too, or start again")
        self.wait()
        agree_on("load_checkpoint", {
            "load_dir": str(folder), "tag": tag, "load_module_strict": strict,
            "load_optimizer_states": optimizer_states, "load_lr_scheduler_states": lr_scheduler_states,
            "load_module_only": module_only,
        })  # fmt: skip
        holdings = self.holdings()
        tag = None if tag is None else str(tag)
        try:
            with naming_another(folder, tag):
                reader = open_checkpoint(folder, tag, holdings, module_only, self.formats)
        except NoCheckpoint as error:
            if module_only:  # who wants weights has them somewhere: no run begins so
                raise
            if self.engine.comm.rank == 0:
                log.warning("%s; nothing was loaded, and the run begins", error)
            return None, None
        optimizer = optimizer_states and not module_only
        loader = Loader(holdings, reader, optimizer, strict)
        loader.compare()  # from here to _fill nothing has changed, and the engine may go on as it was
        saved = self._saved_schedule(loader) if lr_scheduler_states and not module_only else None
        with naming_another(folder, tag):
            schedule = loader.values(saved)
            client_state = loader.values(reader.manifest.client_state)
            self._fill(loader)
        self._weights_alone &= module_only  # what follows is more than weights
        what = f"{reader.path}: what it says of optimizer, schedule or generators does not fit"
        with together(lambda error: f"{what}: {reason(error)}"):  # a schedule of the caller's may raise anything
            if optimizer:
                loader.apply_optimizer()
            if schedule is not None:
                self.engine.lr_scheduler.load_state_dict(schedule)
            if not module_only:
                self._take_counters(loader, optimizer)
        self.engine.state.broke_off, self._weights_alone = None, False
        if (offload := self.engine.zero.offload) is not None and optimizer:
            for memory in offload.memories:
                memory.broken = None
        there = [decode(group.get("lr"), {}) for group in reader.manifest.optimizer.get("groups", ())]
        here = [None if (lr := group.get("lr")) is None else float(lr) for group in self.engine.optimizer.param_groups]
        if optimizer and there != here and self.engine.comm.rank == 0:
            # A schedule with other settings goes on at its own rates: wanted, perhaps, and said.
            log.warning(
                "the learning rate goes on at %s, and the checkpoint's was %s: this run's schedule, or its settings, "
                "are others than those of the run that was saved (a curve over all steps stretches with their number, "
                "unless the scheduler's total_steps, or total_num_steps, is given as it was)",
                *(", ".join(f"{lr:.6g}" if isinstance(lr, float) else str(lr) for lr in lrs) for lrs in (here, there)),
            )
        return str(reader.path), client_state

    def _saved_schedule(self, loader: Loader) -> Any:
        """The stored state of the schedule, where there is one here and there; raises where they differ in kind."""
        saved, schedule = loader.manifest.lr_scheduler, self.engine.lr_scheduler
        if saved is None or not callable(getattr(schedule, "load_state_dict", None)):
            return None
        # Where the class is not known (""), the names of what the schedule keeps have to do.
        alike = saved["class"] or saved["state"].keys() == schedule.state_dict().keys()
        if not alike or saved["class"] not in ("", class_name(schedule)):
            raise CheckpointError(
                f"{loader.reader.path} has the state of schedule {saved['class'] or sorted(saved['state'])}, and this "
                f"run's is {class_name(schedule)}; load_lr_scheduler_states=False leaves the schedule as it is"
            )
        return saved["state"]

    def _fill(self, loader: Loader) -> None:
        """Values into tensors, and from masters into the parameters. Until all is loaded the engine takes no step."""
        engine, zero = self.engine, self.engine.zero
        # All that is under way or kept of the state before goes first: later it would land on the loaded values.
        with together(own_words):  # stage 3 refuses a write to what is gathered, on the rank that wrote
            engine.prepare_writes()
        zero.optimizer_shard.drop_pending_update()
        engine.discard_gradients()
        zero.bucket_reducer.forget_residuals()
        # What broke off in a load of weights alone, another one ends.
        self._weights_alone = not loader.optimizer and (engine.state.broke_off is None or self._weights_alone)
        engine.state.broke_off = f"{loader.reader.path} was loaded in part only"
        with engine.comm.ledger.outside_step(), torch.no_grad():
            loader.read()
            masters_lie_in = engine.config.zero.offload_optimizer.nvme_path or "host memory"
            with together(lambda error: f"masters in {masters_lie_in} cannot be loaded: {own_words(error)}"):
                if zero.offload is not None:
                    zero.offload.upload_masters()
            zero.stage.publish()
            for group in loader.holdings.frozen:
                for bucket in group.buckets:
                    bucket.generation += 1
                renew_copies(group.buckets)

    def _take_counters(self, loader: Loader, optimizer: bool) -> None:
        engine, manifest = self.engine, loader.manifest
        for name in COUNTERS:
            setattr(engine, name, manifest.counters[name])
        engine.micro_steps = engine.global_steps * engine.batch.accumulation
        engine.zero.optimizer_shard.set_applied_steps(engine.global_steps - engine.skipped_steps)
        if optimizer:
            other = manifest.other_micro_batch(engine.batch.micro_batch)
            if other and engine.comm.rank == 0:
                log.warning("other bits from here on: %s", other)
            loader.restore_rng()
            if manifest.precision == engine.config.precision.dtype == "fp16":
                if (kind := manifest.loss_scaler.get("kind")) == engine.scaler.kind:
                    engine.scaler.load_state_dict(manifest.loss_scaler)
                elif engine.comm.rank == 0:
                    log.warning("the loss scale is %s, as this run has it: it was %s", engine.scaler.kind, kind)
