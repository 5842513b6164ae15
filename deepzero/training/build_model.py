"""What a run is built of, as its settings say: the model, the sequences that it is trained on."""

from __future__ import annotations

import torch

from deepzero.config.engine import resolve_batch
from deepzero.config.run import RunConfig
from deepzero.data.corpus import Corpus
from deepzero.data.loader import TokenSequences
from deepzero.models.gpt import GPT
from deepzero.models.hf import HFModel
from deepzero.planning.dry_run import TrainStep
from deepzero.zero import set_z3_leaf_modules


def build_model(run: RunConfig) -> GPT | HFModel:
    """Our own model, or Hugging Face's; blocks that choose experts by the data are leaves for stage 3."""
    model = HFModel(run.model) if run.model.library == "hf" else GPT(run.model)
    if run.engine.zero.stage == 3 and (blocks := model.expert_blocks()):
        set_z3_leaf_modules(model, blocks)
    return model


def sequences(run: RunConfig, corpus: Corpus) -> tuple[TokenSequences, TokenSequences]:
    """The corpus for training and for validation, cut into sequences of the model's length."""
    size, vocabulary = run.model.block_size, run.model.vocab_size
    return (
        TokenSequences(corpus.train, size, "training corpus", vocabulary),
        TokenSequences(corpus.val, size, "validation corpus", vocabulary),
    )


def program_of(run: RunConfig, world_size: int) -> TrainStep:
    """The run as something to rehearse: its model, settings and micro-batches, without its data."""
    shape = (resolve_batch(run.engine, world_size).micro_batch, run.model.block_size)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.zeros(shape, dtype=torch.long, device="meta")
        return ids, ids

    return TrainStep(lambda: build_model(run), batch, run.engine)
