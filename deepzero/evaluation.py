"""What a run is judged by: the loss on data that it has not seen, and a text that the model writes."""

from __future__ import annotations

import logging

import numpy as np
import torch

from deepzero.comm import process_group
from deepzero.compat.deepspeed_engine import DeepSpeedEngine
from deepzero.config.run import TrainConfig
from deepzero.data.corpus import Corpus
from deepzero.data.loader import TokenSequences, batches_on
from deepzero.models.gpt import GPT
from deepzero.models.hf import HFModel

log = logging.getLogger(__name__)


@torch.no_grad()
def validate(engine: DeepSpeedEngine, data: TokenSequences, batches: int) -> float:
    """Mean loss over evenly spaced sequences, the same ones however many ranks share them.

    Every rank makes the same number of forward passes, which partitioned parameters need; what a rank has too few of is
    run on its first sequence and not counted.
    """
    wanted = min(batches * engine.batch.global_batch, len(data))
    chosen = np.unique(np.linspace(0, len(data) - 1, wanted).astype(np.int64))
    size, world = engine.batch.micro_batch, engine.world_size
    total = torch.zeros(2, dtype=torch.float64)  # sum of losses, sequences
    engine.eval()
    # Micro-batch by micro-batch in turn: which sequences are together does not depend on the number of ranks.
    starts = range(engine.global_rank * size, len(chosen) + engine.global_rank * size, size * world)
    parts = [chosen[start : start + size] for start in starts]
    given = batches_on(engine.device, (data.batch(part if len(part) else chosen[:1]) for part in parts))
    for part, batch in zip(parts, given, strict=True):
        total += torch.tensor([float(engine(*batch)) * len(part), len(part)], dtype=torch.float64)
    engine.train()
    losses, count = process_group.gather_and_sum(total, engine.device).tolist()
    return losses / count


def sample(engine: DeepSpeedEngine, model: GPT | HFModel, corpus: Corpus, settings: TrainConfig) -> str | None:
    """Text that the model writes, from rank 0, beginning like a new file where the corpus has a sign for that.

    None, and a line that says why, where the model has nothing to say any more. Partitioned parameters are gathered by
    all ranks together: in stage 3 all of them write the same text.
    """
    text = None
    if engine.global_rank == 0 or engine.zero_optimization_stage() == 3:
        separator = corpus.separator
        new_file = separator is not None and bool((corpus.train[: 1 << 24] == separator).any())
        prompt = [separator] if new_file else corpus.val[:16].tolist()
        ids = torch.tensor([prompt], dtype=torch.int64, device=engine.device)
        generator = torch.Generator(engine.device).manual_seed(settings.seed)
        try:
            with torch.no_grad():
                ids = model.generate(ids, settings.sample_tokens, settings.sample_temperature, generator)
            text = corpus.decode(ids[0, 1 if new_file else 0 :].tolist())
        except FloatingPointError as error:  # the run's other results are to be written all the same
            if engine.global_rank == 0:
                log.warning("no sample after step %d: %s", engine.global_steps, error)
    engine.barrier()
    return text
