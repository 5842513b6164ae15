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
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cuda" if os.environ.get("DEEPZERO_BENCH_DEVICE") == "cuda" else "cpu")

import deepspeed  # noqa: F401  (here, so that its import is not measured as a part of building)
import torch

from tools.bench.engines import deepspeed_of, settings_of, step_of
from tools.bench.rank import Context, Step


def _optimizer(context: Context, options: dict[str, Any], params: Any) -> torch.optim.Optimizer:
    if options["optimizer"] == "torch":
        return torch.optim.AdamW(params, fused=True, **context.work.adamw)
    if context.device.type == "cpu" or "offload_optimizer" in options.get("zero", {}):
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(params, adamw_mode=True, **context.work.adamw)
    from deepspeed.ops.adam import FusedAdam

    return FusedAdam(params, adam_w_mode=True, **context.work.adamw)


def build(context: Context, options: dict[str, Any]) -> Step:
    """One DeepSpeed engine."""
    stage = options["stage"]
    zero: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": options["bucket"],
        "overlap_comm": context.device.type == "cuda",
        "stage3_prefetch_bucket_size" if stage == 3 else "allgather_bucket_size": options["bucket"],
        **options.get("zero", {}),
    }
    optimizer = _optimizer(context, options, context.model.parameters())
    return step_of(deepspeed_of(context.model, settings_of(context.work, zero), context.device, optimizer))
