"""Runs that begin in DeepSpeed and go on here: a model with everything that a checkpoint has to tell apart.

``data/deepspeed.tar.xz`` has what DeepSpeed 0.19.8 wrote of :data:`RUNS` after four steps, and what it made of them in
five more. It was made by this file, in an environment with deepspeed, once for each::

    DS_ACCELERATOR=cpu RANK=0 WORLD_SIZE=1 … python -m tests.distributed.moved_runs FOLDER stage1-fp32

Beside them lies ``stage3-bf16``, two ranks' checkpoint after four steps of the same model with ``nn.Linear`` in the
place of :class:`Affine`; DeepSpeed's next loss on rank 0 is :data:`NEXT_LOSS`.
"""

import os
import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

RUNS = {"stage1-fp32": (1, "fp32", 1), "stage2-bf16": (2, "bf16", 2), "stage3-fp16": (3, "fp16", 2)}
"""Name → stage, precision and ranks; of each there is its universal conversion, too."""
SAVED, UNTIL = 4, 9
"""Steps until the checkpoint, and until the end."""
NEXT_LOSS = 5.575675010681152
VOCAB, WIDTH = 11, 6


class Affine(nn.Linear):
    """Its bias is added for itself, as DeepSpeed's stage 3 computes: in bf16 that is another rounding."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight) + self.bias


class Model(nn.Module):
    """A tied weight, a frozen layer, a buffer; nothing divides by 2 ranks evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.frozen = Affine(WIDTH, 5).requires_grad_(False)
        self.back = Affine(5, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Parameter(torch.linspace(0.5, 1.5, 5))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([1.5, 0.5, 1.0, 1.0, 2.0, 1.0]))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = x + self.back(torch.tanh(self.frozen(x)) * self.gate)
        logits = self.head(self.norm(x) * self.scale.to(x.dtype))
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), ((3 * ids + 1) % VOCAB).flatten())


def optimizer_for(model: nn.Module) -> torch.optim.Optimizer:
    trained = [param for param in model.parameters() if param.requires_grad]
    decay, rest = ([param for param in trained if (param.dim() > 1) == matrix] for matrix in (True, False))
    return torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=1e-2)


def settings(stage: int, precision: str) -> dict[str, Any]:
    """A schedule, clipping; in fp16 the first steps overflow, and one micro-batch makes a step.

    DeepSpeed divides the loss by the micro-batches, so that with two its fp16 gradients overflow one doubling later.
    """
    warmup = {"warmup_num_steps": 20, "warmup_max_lr": 1e-2, "warmup_type": "linear"}
    kinds = {"fp32": {}, "bf16": {"enabled": True}}
    kinds["fp16"] = {"enabled": True, "initial_scale_power": 18, "hysteresis": 1}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1 if precision == "fp16" else 2,
        "gradient_clipping": 1.0,
        "scheduler": {"type": "WarmupLR", "params": warmup},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 500},
        **({precision: kinds[precision]} if kinds[precision] else {}),
    }


def train(engine: Any, first: int, until: int, rank: int) -> list[float]:
    """This rank's losses, of every micro-batch of the steps ``first … until``."""
    losses = []
    for step in range(first, until):
        for micro in range(engine.gradient_accumulation_steps()):
            generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
            loss = engine(torch.randint(0, VOCAB, (2, 7), generator=generator))
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
    return losses


CLIENT_STATE = {"epoch": 3, "seen": torch.arange(5), "nested": {"a": [1, (2, None)]}, "universal_checkpoint_info": {}}


def main(folder: str, name: str) -> None:
    """Train with DeepSpeed, save, convert, and go on."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.checkpoint.ds_to_universal import main as convert
    from deepspeed.utils import safe_get_full_fp32_param

    stage, precision, _ = RUNS[name]
    rank, out = int(os.environ["RANK"]), f"{folder}/{name}"
    get_accelerator().is_fp16_supported = lambda: True  # slowly, on a CPU
    torch.manual_seed(0)
    model = Model()
    config = settings(stage, precision) | {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer_for(model), config=config)
    train(engine, 0, SAVED, rank)
    engine.save_checkpoint(out, tag="own", client_state=CLIENT_STATE)
    truth = {"scale": float(engine.optimizer.loss_scaler.cur_scale), "skipped": engine.skipped_steps, "values": {}}
    for key, param in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([param], enabled=stage == 3):
            value = param.detach().float().clone()
        truth["values"][key] = {"master": safe_get_full_fp32_param(param) if param.requires_grad else value}
    losses = train(engine, SAVED, UNTIL, rank)
    gathered: list[Any] = [None] * deepspeed.comm.get_world_size()
    torch.distributed.all_gather_object(gathered, losses)
    if rank == 0:
        given = SimpleNamespace(num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False)
        given.input_folder, given.output_folder = f"{out}/own", f"{out}/universal"
        given.strict, given.inject_missing_state = True, False
        convert(given)
        for key in truth["values"]:
            for moment in ("exp_avg", "exp_avg_sq") if engine.module.get_parameter(key).requires_grad else ():
                found = torch.load(f"{out}/universal/zero/{key}/{moment}.pt")
                truth["values"][key][moment] = found["param"] if isinstance(found, dict) else found
        torch.save({**truth, "losses": gathered, "lr": engine.get_lr()}, f"{out}/truth.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
