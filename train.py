"""Train a GPT under ZeRO: ``python train.py zero.stage=2``. ``python train.py --help`` lists what can be chosen.

Hydra composes ``configs/`` → one frozen ``RunConfig``, checked as far as it can be before anything is started → ranks,
started here or by torchrun (all of this: :mod:`deepzero.training.command_line`) → :func:`train`, the program of each
rank, with the loop.
"""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import time
from pathlib import Path
from typing import Any, NoReturn

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the imports take seconds: Ctrl-C ends them without a traceback
if "RANK" in os.environ:  # under torchrun; read by torch when it is imported: no C++ text above our own errors
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
from omegaconf import DictConfig

import deepzero
from deepzero.checkpoint.checkpoint_dir import RUN_CHECKPOINTS
from deepzero.comm import process_group
from deepzero.compat.deepspeed_engine import DeepSpeedEngine
from deepzero.config.run import RunConfig
from deepzero.data.corpus import load_corpus
from deepzero.data.loader import batches_on
from deepzero.data.sampler import GlobalBatchSampler
from deepzero.evaluation import sample, validate
from deepzero.launch.rank_process import leave, on_stop_request, stop_signal
from deepzero.monitor.monitor import Monitor
from deepzero.profiling.trace import trace
from deepzero.training.build_model import build_model, sequences
from deepzero.training.command_line import CommandLine
from deepzero.training.reporting import StepTimeline, build_monitor, final_facts
from deepzero.training.run_folder import Command, data_of, join, load_start, tag_of
from deepzero.utils.closed_pipe import exit_with


def train(run: RunConfig, run_dir_name: str, command: Command) -> None:
    """Build everything, train, validate, sample, sum up. Every rank runs this, however it was started."""
    run_dir = join(run, run_dir_name)
    torch.autograd.set_detect_anomaly(run.debug.detect_anomaly)
    corpus = load_corpus(run.data)
    torch.manual_seed(run.train.seed)  # the same initial parameters on every rank
    model = build_model(run)
    engine, *_ = deepzero.initialize(model=model, config=run.engine, total_steps=run.train.steps)
    train_data, val_data = sequences(run, corpus)
    sampler = GlobalBatchSampler(len(train_data), engine.batch.global_batch, run.train.seed)
    first_step = load_start(run, run_dir, engine, sampler, command)
    monitor = build_monitor(run, run_dir, engine, model, corpus)
    timeline = StepTimeline(run, run_dir, engine, first_step)
    if run.train.save_every:
        on_stop_request(engine.request_stop)

    mine = (engine.global_rank, engine.batch.micro_batch, engine.world_size)
    batches = batches_on(engine.device, (
        train_data.batch(sampler.rank_indices(step, k, *mine))
        for step in range(first_step, run.train.steps) for k in range(engine.batch.accumulation)
    ))  # fmt: skip
    watched = (engine.ledger.held_now, engine.device, engine.comm.ranges)
    with trace(run.profiler, run_dir, engine.global_rank, *watched) as end_of_step:
        for step in range(first_step, run.train.steps):
            if run.train.eval_every and step % run.train.eval_every == 0:
                monitor.validation(step, validate(engine, val_data, run.train.eval_batches))
            timeline.begin(step + 1)
            started = time.perf_counter()
            for _ in range(engine.batch.accumulation):
                input_ids, labels = next(batches)
                engine.seed_micro_batch(run.train.seed)  # dropout: by the micro-batch's place in the run, not by rank
                loss = engine(input_ids, labels)
                if run.debug.inject_overflow_at == step + 1 and engine.global_rank == 0:
                    loss = loss * math.inf
                engine.backward(loss)
                engine.step()
            monitor.step(step_record(run, engine), time.perf_counter() - started)
            timeline.end(step + 1, monitor.line)
            save_if_due(run, run_dir, engine, sampler)
            end_of_step()
            if engine.stopping:
                break
    if engine.stopping and engine.global_steps < run.train.steps:  # the profiler has written its trace
        stop(run, run_dir, engine, monitor, command)

    on_stop_request(None)
    engine.wait_for_checkpoint()
    if run.train.eval_every:
        monitor.validation(run.train.steps, validate(engine, val_data, run.train.eval_batches))
    text = sample(engine, model, corpus, run.train) if run.train.sample_tokens else None
    monitor.finish(final_facts(run, engine, text))
    process_group.shutdown()
    timeline.complete(run, monitor.line)


def step_record(run: RunConfig, engine: DeepSpeedEngine) -> dict[str, Any]:
    """What the step that has just ended says of itself. Every rank calls it: layers' norms are a collective."""
    every = run.logger.gradient_norms_every
    norms = engine.gradient_norms() if every and engine.global_steps % every == 0 else {}
    return {**vars(engine.last_step), **engine.step_metrics(), **norms}


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


COMMAND_LINE = CommandLine(train, Path(__file__).resolve())


def job(cfg: DictConfig) -> None:
    """One run, or one point of a sweep, as Hydra composed it: settings, then ranks, which run :func:`train`."""
    COMMAND_LINE.job(cfg)


if __name__ == "__main__":
    exit_with(lambda: COMMAND_LINE.run(job))
