"""What can be refused before any rank is started: batch, precision, optimizer, schedule, data."""

from __future__ import annotations

import torch

from deepzero.comm.topology import check_ranks
from deepzero.config.engine import resolve_batch
from deepzero.config.run import RunConfig
from deepzero.config.strict import ConfigError
from deepzero.data.corpus import load_corpus
from deepzero.data.sampler import GlobalBatchSampler
from deepzero.models.hf import check_library
from deepzero.profiling.trace import check_profiler
from deepzero.runtime.consistency import check_precision
from deepzero.runtime.lr_schedules import build_scheduler
from deepzero.runtime.optimizers import build_optimizer, check_elementwise
from deepzero.training.build_model import sequences


def preflight(run: RunConfig, world_size: int, device: str) -> None:
    """Raise what would fail on every rank, once and before any rank starts: batch, precision, optimizer, data."""
    batch = resolve_batch(run.engine, world_size)
    check_ranks(run.engine, world_size)
    check_precision(run.engine.precision.dtype, torch.device(device))
    check_profiler(run.profiler, run.train.steps, world_size)
    check_library(run.model)
    if run.engine.optimizer is None or run.engine.scheduler is None:
        raise ConfigError("train.py needs an optimizer and a scheduler: choose them with optimizer=… and scheduler=…")
    optimizer = build_optimizer(run.engine.optimizer, [torch.nn.Parameter(torch.zeros(1))])
    check_elementwise(optimizer)
    build_scheduler(run.engine.scheduler, optimizer, run.train.steps)
    corpus = load_corpus(run.data)
    if corpus.vocab_size > run.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size={run.model.vocab_size}: data={run.data.name} has {corpus.vocab_size} different tokens"
        )
    train_data, _ = sequences(run, corpus)
    GlobalBatchSampler(len(train_data), batch.global_batch, run.train.seed)
