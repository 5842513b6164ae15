"""Where a run begins, is saved and is left: meeting the other ranks in one folder, checkpoints, the request to stop."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path
from typing import Any, NoReturn

from deepzero.checkpoint.folder import latest_tag, point_latest
from deepzero.checkpoint.format import CheckpointError
from deepzero.checkpoint.resume import CHECKPOINTS, find_start, tag_of, way_out
from deepzero.comm import elastic, process_group
from deepzero.comm.rank_process import leave
from deepzero.config.parse import ConfigError
from deepzero.config.run import RunConfig
from deepzero.data.sampler import GlobalBatchSampler
from deepzero.monitor.files import clear
from deepzero.monitor.monitor import Monitor
from deepzero.runtime.engine import Engine

RUN_FOLDER_NOTE = "run-folder"
"""A rank leaves the folder's name for the attempts after this one."""


def join(run: RunConfig, run_dir_name: str) -> Path:
    """Meet the other ranks; returns the run folder: rank 0's, or that of the attempts before this one."""
    process_group.init_distributed(timeout_seconds=run.engine.comm.timeout_seconds)
    # A host that joins a running job may get rank 0, and would begin a folder of its own.
    earlier = [note for note in process_group.all_gather_object(elastic.recall(RUN_FOLDER_NOTE)) if note]
    run_dir = Path(earlier[0] if earlier else process_group.broadcast_object(run_dir_name)).resolve()
    elastic.remember(RUN_FOLDER_NOTE, str(run_dir))
    return run_dir


def load_start(run: RunConfig, run_dir: Path, engine: Engine, sampler: GlobalBatchSampler) -> int:
    """Load what the run begins with, if anything; returns how many steps have been taken already."""
    path = process_group.broadcast_object(find_start(run.train.resume, run_dir, elastic.restart_count() > 0))
    try:
        if path is not None:
            saved = engine.load_checkpoint(path)[1].get("data")
            sampler.go_on(engine.global_steps, engine.global_samples)
            if (now := data_of(run, sampler)) != saved and engine.global_rank == 0:
                print(f"the checkpoint was trained on {saved}, this run goes on with {now}", flush=True)
        elif run.train.init_from is not None:
            engine.load_checkpoint(run.train.init_from, load_module_only=True)
    except CheckpointError as error:  # the message says it all, and another attempt would read the same files
        advice = f"; train.resume=null train.init_from={path} takes the weights alone" if path is not None else ""
        raise ConfigError(error.text + (way_out(error.whole) or advice)) from None
    if engine.global_rank == 0:  # not before: a run that is refused removes nothing
        own = path is not None and path.parent == run_dir / CHECKPOINTS and not path.name.startswith(".")
        if path is not None and own and path.name != latest_tag(path.parent):
            point_latest(path)  # the run goes back to it, and restarts follow
        when = clear(run_dir, going_on=engine.global_steps > 0)
        if when is not None and path is None and elastic.restart_count() == 0:
            print(f"replacing the run of {when:%Y-%m-%d %H:%M:%S} in {run_dir}", flush=True)
    return engine.global_steps


def data_of(run: RunConfig, sampler: GlobalBatchSampler) -> dict[str, Any]:
    """What the order of the data depends on; the position in it is the number of sequences seen."""
    return {"data": run.data.name, "sequences": sampler.num_sequences, "seed": run.train.seed}


def save_if_due(run: RunConfig, run_dir: Path, engine: Engine, sampler: GlobalBatchSampler) -> None:
    """A checkpoint every so many steps, after the last step, and before the run leaves."""
    every, step, last = run.train.save_every, engine.global_steps, run.train.steps
    if every and (step % every == 0 or step == last or engine.stopping):
        engine.save_checkpoint(
            run_dir / CHECKPOINTS,
            tag_of(step),
            client_state={"data": data_of(run, sampler)},
            asynchronous=run.train.save_async and not engine.stopping,
            keep_last=run.train.keep_last,
        )


def stop(run: RunConfig, engine: Engine, monitor: Monitor) -> NoReturn:
    """Leave in order: every rank is here, and the checkpoint is on the disk."""
    engine.wait_for_checkpoint()
    monitor.line(f"stopped by SIGTERM after step {engine.global_steps}; saved, and the same command goes on")
    monitor.stopped("stopped by SIGTERM", dataclasses.asdict(run))  # under torchrun nobody else will say it
    engine.barrier()
    leave(128 + signal.SIGTERM)
