"""Where a run begins, is saved and is left: its folder, the meeting with other ranks, checkpoints, the request to stop.

**A command that is refused leaves no folder.** Hydra makes the run folder before anybody has looked at the settings. So
a callback of Hydra's (:class:`FoldersBefore`, in ``configs/train.yaml``) notes beforehand which folder is there, and
:func:`remove_unused` takes away what came below it and stayed empty. Files come when the run begins: Hydra's record
too (:meth:`deepzero.training.resume.Command.keep`), which Hydra itself would write at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from deepzero.checkpoint.checkpoint_dir import LOCK, RUN_CHECKPOINTS, acquire, holds, point_latest
from deepzero.checkpoint.errors import CheckpointError, OtherModel
from deepzero.comm import process_group
from deepzero.comm.simulated_streams import simulate_streams
from deepzero.compat.deepspeed_engine import DeepSpeedEngine
from deepzero.config.engine import resolve_batch
from deepzero.config.run import RunConfig
from deepzero.config.strict import ConfigError
from deepzero.data.sampler import GlobalBatchSampler
from deepzero.launch import rank_process
from deepzero.launch.rank_process import leave, stop_signal
from deepzero.monitor.metrics_file import METRICS, clear
from deepzero.monitor.monitor import Monitor
from deepzero.training.resume import Command, find_start, keep_global_batch, manifest_of, tag_of, way_out

RUN_FOLDER_NOTE = "run-folder"
"""A rank leaves the folder's name for the attempts after this one."""
_EMPTY = {LOCK, "multirun.yaml"}
"""What lies in a folder in which no run has begun: our lock, and what Hydra writes of a sweep."""


class FoldersBefore:
    """Hydra's callback: which folder was there before Hydra made any. Hydra builds it, and keeps it to itself."""

    noted: ClassVar[tuple[Path, Path, bool] | None] = None
    """The folder that Hydra makes, the nearest above it (or it) that was there before, and whether it is a sweep's."""

    def on_run_start(self, config: Any, **_: Any) -> None:
        """Before the folder of a run."""
        self._note(Path(config.hydra.run.dir).resolve(), False)

    def on_multirun_start(self, config: Any, **_: Any) -> None:
        """Before the folder of a sweep."""
        self._note(Path(config.hydra.sweep.dir).resolve(), True)

    def _note(self, path: Path, sweep: bool) -> None:
        there = next(folder for folder in (path, *path.parents) if folder.exists())
        type(self).noted = path, there, sweep

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda **_: None  # other events say nothing of folders


def sweep_folder() -> Path | None:
    """The folder of the sweep that this process has begun; None: of no sweep."""
    return FoldersBefore.noted[0] if FoldersBefore.noted is not None and FoldersBefore.noted[2] else None


def remove_unused(run_dir: Path | None = None) -> None:
    """Remove a folder that Hydra has made and no run has begun in, and those above it as far as Hydra has made them.

    ``run_dir`` is one of a sweep's; None: the folder of the run, or of the whole sweep.
    """
    if FoldersBefore.noted is None:
        return
    folder, stays = (run_dir or FoldersBefore.noted[0]).resolve(), FoldersBefore.noted[1]
    with contextlib.suppress(OSError):  # what holds something stays
        found = list(folder.iterdir()) if stays in folder.parents else []
        # Two runs that start in one second have one name for their folders: the lock of the other one stays.
        if {path.name for path in found} <= (_EMPTY if holds(folder) else _EMPTY - {LOCK}):
            for path in found:
                path.unlink()
        while stays in folder.parents:
            folder.rmdir()
            folder = folder.parent


def take(run_dir: Path) -> None:
    """Take the right to write in the run folder, for one process, which has it until it ends.

    Raises:
        ConfigError: another run has it, or nothing can be written there.
    """
    try:
        acquire(run_dir)
    except CheckpointError as error:
        raise ConfigError(f"hydra.run.dir: {error}") from None
    except OSError as error:
        raise cannot_write(run_dir, error) from None


def cannot_write(run_dir: Path, error: OSError) -> ConfigError:
    """What to say of a folder that cannot be made or written to when the run begins."""
    full = "make room there, or " if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else ""
    choose = f"{full}choose another hydra.run.dir (hydra.sweep.dir of a sweep)"
    return ConfigError(f"cannot write {error.filename or run_dir}: {error.strerror}; {choose}")


def has_begun(run_dir: Path, since: float) -> bool:
    """Whether ranks that were started at ``since`` (``time.time()``) have begun to write there."""
    return (run_dir / METRICS).exists() and (run_dir / METRICS).stat().st_mtime >= since


def at_its_start(run: RunConfig, run_dir: Path, world_size: int) -> RunConfig:
    """The run as it begins: one that goes on from a checkpoint keeps its global batch, on any number of ranks.

    Raises:
        ConfigError: there is nothing to begin with where the settings say.
    """
    path = find_start(run.train.resume, run_dir, rank_process.restart_count() > 0)
    if path is not None:
        manifest = manifest_of(path, run.train.steps)
        engine = keep_global_batch(run.engine, manifest, world_size)
        if engine.comm.world_size_invariant and (
            other := manifest.other_micro_batch(resolve_batch(engine, world_size).micro_batch)
        ):
            raise ConfigError(f"comm.world_size_invariant=true, but {other}; start a number of ranks that divides them")
        return dataclasses.replace(run, engine=engine)
    if run.train.init_from is not None and not Path(run.train.init_from).expanduser().exists():
        raise ConfigError(f"train.init_from={run.train.init_from}: no such file or folder")
    return run


def join(run: RunConfig, run_dir_name: str) -> Path:
    """Meet the other ranks; returns the run folder: rank 0's, or that of the attempts before this one."""
    if run.engine.comm.simulated_streams:
        simulate_streams()  # before the model is built
    process_group.init_distributed(timeout_seconds=run.engine.comm.timeout_seconds)
    # A host that joins a running job may get rank 0, and would begin a folder of its own.
    earlier = [note for note in process_group.all_gather_object(rank_process.recall(RUN_FOLDER_NOTE)) if note]
    run_dir = Path(earlier[0] if earlier else process_group.broadcast_object(run_dir_name)).resolve()
    rank_process.remember(RUN_FOLDER_NOTE, str(run_dir))
    return run_dir


def load_start(
    run: RunConfig, run_dir: Path, engine: DeepSpeedEngine, sampler: GlobalBatchSampler, command: Command
) -> int:
    """Load what the run begins with, if anything; returns how many steps have been taken already."""
    path = process_group.broadcast_object(find_start(run.train.resume, run_dir, rank_process.restart_count() > 0))
    try:
        if path is not None:
            _, client_state = engine.load_checkpoint(path)
            if client_state is None:  # for a folder that is not there, which is where a run begins
                raise CheckpointError(f"{path} was there when the run looked for it, and is gone")
            saved = client_state.get("data")
            sampler.go_on(engine.global_steps, engine.global_samples)
            if (now := data_of(run, sampler)) != saved and engine.global_rank == 0:
                _tell(f"the checkpoint was trained on {saved}, this run goes on with {now}")
        elif run.train.init_from is not None:
            engine.load_checkpoint(run.train.init_from, load_module_only=True)
    except CheckpointError as error:  # the message says it all, and another attempt would read the same files
        weights_fit = path is not None and not isinstance(error, OtherModel)
        advice = f"; train.resume=null train.init_from={path} takes the weights alone" if weights_fit else ""
        raise ConfigError(error.text + (way_out(error.beside) or advice)) from None
    if engine.global_rank == 0:  # not before: a run that is refused removes nothing
        try:
            if path is not None and path.parent == run_dir / RUN_CHECKPOINTS and not path.name.startswith("."):
                point_latest(path)  # the run goes back to it, and restarts follow
            when = clear(run_dir, going_on=engine.global_steps > 0)
            command.keep(run_dir)
        except OSError as error:
            raise cannot_write(run_dir, error) from None
        if when is not None and path is None and rank_process.restart_count() == 0:
            _tell(f"replacing the run of {when:%Y-%m-%d %H:%M:%S} in {run_dir}")
    return engine.global_steps


def _tell(text: str) -> None:
    with contextlib.suppress(OSError):  # that standard output is gone is said at the first step
        print(text, flush=True)


def data_of(run: RunConfig, sampler: GlobalBatchSampler) -> dict[str, Any]:
    """What the order of the data depends on; the position in it is the number of sequences seen."""
    return {"data": run.data.name, "sequences": sampler.num_sequences, "seed": run.train.seed}


def save_if_due(run: RunConfig, run_dir: Path, engine: DeepSpeedEngine, sampler: GlobalBatchSampler) -> None:
    """A checkpoint every so many steps, after the last step, and before the run leaves."""
    every, step, last = run.train.save_every, engine.global_steps, run.train.steps
    if every and (step % every == 0 or step == last or engine.stopping):
        engine.save_checkpoint(
            run_dir / RUN_CHECKPOINTS,
            tag_of(step),
            client_state={"data": data_of(run, sampler)},
            asynchronous=run.train.save_async and not engine.stopping,
            keep_last=run.train.keep_last,
        )


def stop(run: RunConfig, run_dir: Path, engine: DeepSpeedEngine, monitor: Monitor, command: Command) -> NoReturn:
    """Leave in order: every rank is here, and the checkpoint is on the disk."""
    engine.wait_for_checkpoint()
    number = stop_signal()
    monitor.line(f"stopped after step {engine.global_steps}; saved")
    if command.by_torchrun:  # nobody else will say it
        monitor.line(command.way_on(run_dir, run.train.steps))
    monitor.stopped(f"stopped by {number.name}", dataclasses.asdict(run))
    engine.barrier()
    leave(128 + number)
