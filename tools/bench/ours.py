"""deepzero as its users run it: ``initialize``, ``backward``, ``step``, and nothing tuned by hand."""

from __future__ import annotations

from typing import Any

import torch

import deepzero
from tools.bench.rank import Context, Step


def build(context: Context, options: dict[str, Any]) -> Step:
    """Stage ``options["stage"]``, ``overlap_comm`` as ``options["overlap"]`` says, ``options["offload"]``."""
    work = context.work
    zero = {"stage": options["stage"], "overlap_comm": options["overlap"]}
    if options.get("offload"):
        zero["offload_optimizer"] = {"device": "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": work.micro_batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": work.clip,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {**work.adamw, "betas": [work.beta1, work.beta2]}},
    }
    engine, *_ = deepzero.initialize(model=context.model, config=config)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = engine(inputs, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step
