"""What a run is built of, as its settings say; and what of it can be refused before any rank is started."""

from __future__ import annotations

import torch

from deepzero.comm.topology import check_ranks
from deepzero.config.engine import resolve_batch
from deepzero.config.run import RunConfig
from deepzero.config.strict import ConfigError
from deepzero.data.corpus import Corpus, load_corpus
from deepzero.data.loader import TokenSequences
from deepzero.data.sampler import GlobalBatchSampler
from deepzero.models.gpt import GPT
from deepzero.models.hf import HFModel, check_library
from deepzero.offload.offload_plan import check_optimizer
from deepzero.planning.dry_run import TrainStep
from deepzero.profiling.trace import check_profiler
from deepzero.runtime.consistency import check_precision
from deepzero.runtime.elementwise_check import check_elementwise, steps_in_turn
from deepzero.runtime.invariance import dependences_of_settings, refuse_dependence
from deepzero.runtime.lr_schedules import build_scheduler
from deepzero.runtime.optimizers import build_optimizer
from deepzero.utils.compile import why_not_compiled
from deepzero.zero import set_z3_leaf_modules


def build_model(run: RunConfig, compiled: bool = True) -> GPT | HFModel:
    """Our own model, or Hugging Face's; blocks that choose experts by the data are leaves for stage 3.

    With ``train.compile`` each block is compiled, which stage 3 fetches as one; a rehearsal takes it as it is.
    """
    model = HFModel(run.model) if run.model.library == "hf" else GPT(run.model)
    if run.train.compile and compiled and isinstance(model, GPT):
        for block in model.blocks:
            block.compile()
    if run.engine.zero.stage == 3 and isinstance(model, HFModel) and (blocks := model.expert_blocks()):
        set_z3_leaf_modules(model, blocks)
    return model


def sequences(run: RunConfig, corpus: Corpus) -> tuple[TokenSequences, TokenSequences]:
    """The corpus for training and for validation, cut into sequences of the model's length."""
    shape = run.model
    train = TokenSequences(corpus.train, shape.block_size, "training corpus", shape.vocab_size)
    return train, TokenSequences(corpus.val, shape.block_size, "validation corpus", shape.vocab_size)


def program_of(run: RunConfig, world_size: int) -> TrainStep:
    """The run as something to rehearse: its model, settings and micro-batches, without its data."""
    shape = (resolve_batch(run.engine, world_size).micro_batch, run.model.block_size)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.zeros(shape, dtype=torch.long, device="meta")
        return ids, ids

    return TrainStep(lambda: build_model(run, compiled=False), batch, run.engine)


def threads_of_rank(run: RunConfig, device: str) -> int | None:
    """Intra-op threads that the settings give each rank; None where they leave it to the environment and the cores."""
    # One rank may use all cores and two share them; a CPU's kernels sum as their threads share the work.
    return 1 if run.engine.comm.world_size_invariant and device == "cpu" else run.launch.threads_per_rank


def preflight(run: RunConfig, world_size: int, device: str) -> None:
    """Raise what would fail on every rank, once and before any rank starts: batch, precision, optimizer, data."""
    if run.engine.comm.world_size_invariant:
        refuse_dependence(dependences_of_settings(run.engine, on_gpu=device != "cpu"))
        if device == "cpu" and (run.launch.threads_per_rank or 1) > 1:
            raise ConfigError(
                f"launch.threads_per_rank={run.launch.threads_per_rank}: comm.world_size_invariant=true takes one "
                "thread a rank, as kernels sum as threads share their work; leave it out"
            )
    batch = resolve_batch(run.engine, world_size)
    check_ranks(run.engine, world_size)
    check_precision(run.engine.precision.dtype, torch.device(device))
    check_profiler(run.profiler, run.train.steps, world_size)
    check_library(run.model)
    if run.train.compile:
        hf = "blocks are compiled with library=own" if run.model.library == "hf" else ""
        if problem := hf or why_not_compiled(device):
            raise ConfigError(f"train.compile=true: {problem}; leave it out")
    if run.engine.optimizer is None or run.engine.scheduler is None:
        raise ConfigError("train.py needs an optimizer and a scheduler: choose them with optimizer=… and scheduler=…")
    # A stand-in with as many param groups as the model gives: Muon has one for matrices and one for the rest.
    small = torch.nn.Sequential(torch.nn.Embedding(2, 2), torch.nn.Linear(2, 2))
    on_host = run.engine.zero.offload_optimizer.device != "none"
    optimizer = build_optimizer(run.engine.optimizer, small.parameters(), on_host, model=small)
    check_optimizer(run.engine.zero.offload_optimizer, optimizer)
    check_elementwise(optimizer, steps_in_turn(run.engine.zero, optimizer, world_size), run.engine.zero.stage > 0)
    build_scheduler(run.engine.scheduler, optimizer, run.train.steps)
    corpus, size = load_corpus(run.data), run.model.vocab_size
    if (ids := corpus.vocab_size) > size:
        raise ConfigError(f"model.vocab_size={size}: data={run.data.name} has token ids up to {ids - 1}: {ids} or more")
    train_data, _ = sequences(run, corpus)
    GlobalBatchSampler(len(train_data), batch.global_batch, run.train.seed)
