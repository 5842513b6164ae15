"""DeepSpeed stages 1, 2 and 3, quiet, with the optimizer and the buckets that suit the machine.

On CPU DeepSpeed runs on its CPU accelerator over gloo. Its best Adam there is either its own compiled CPU kernel
(``DeepSpeedCPUAdam``, needs a C++ compiler on first use) or torch's fused one; both are variants. ``overlap_comm`` is
on for CUDA and off for CPU, whose accelerator has no streams.

Tried and slower on 2 cores, by processor time of one step: ``use_multi_rank_bucket_allreduce=false`` (2.2 s against
2.0 s), buckets of 5e8 (as 5e7, with more memory), ``reduce_scatter=false`` and ``contiguous_gradients=false`` (as the
defaults). DeepSpeed's norm, taken in fp64 of a copy of each gradient, cannot be configured.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cuda" if os.environ.get("DEEPZERO_BENCH_DEVICE") == "cuda" else "cpu")

import deepspeed  # the accelerator is chosen at import
import torch
from deepspeed.utils import logger

from tools.bench.rank import Context, Step


def _optimizer(context: Context, options: dict[str, Any], params: Any) -> torch.optim.Optimizer:
    if options["optimizer"] == "torch":
        return torch.optim.AdamW(params, fused=True, **context.work.adamw)
    if context.device.type == "cpu" or "offload_optimizer" in options.get("zero", {}):
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(params, adamw_mode=True, **context.work.adamw)
    from deepspeed.ops.adam import FusedAdam

    return FusedAdam(params, adam_w_mode=True, **context.work.adamw)


def _config(context: Context, options: dict[str, Any]) -> dict[str, Any]:
    stage = options["stage"]
    zero: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": options["bucket"],
        "overlap_comm": context.device.type == "cuda",
        "stage3_prefetch_bucket_size" if stage == 3 else "allgather_bucket_size": options["bucket"],
        **options.get("zero", {}),
    }
    return {
        "train_micro_batch_size_per_gpu": context.work.micro_batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": context.work.clip,
        # bf16 has no loss scale that could react to an overflow; without the scan for it DeepSpeed is a tenth faster.
        "bf16": {"enabled": True, "check_grad_overflow": False},
        "zero_optimization": zero,
        # A client's own optimizer object is "untested" unless DeepSpeed knows its class.
        "zero_allow_untested_optimizer": True,
        "wall_clock_breakdown": False,
        "steps_per_print": 10**9,
    }


def build(context: Context, options: dict[str, Any]) -> Step:
    """One DeepSpeed engine."""
    logger.setLevel("ERROR")
    # torch 2.13 renamed collectives; DeepSpeed 0.19 calls the old names and would spend its steps on printing that.
    warnings.filterwarnings("ignore", message=".*is deprecated.*", category=FutureWarning)
    deepspeed.init_distributed(dist_backend="nccl" if context.device.type == "cuda" else "gloo", verbose=False)
    engine, *_ = deepspeed.initialize(
        model=context.model,
        optimizer=_optimizer(context, options, context.model.parameters()),
        config=_config(context, options),
    )

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = engine(inputs, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step
