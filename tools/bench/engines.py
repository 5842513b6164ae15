"""The engines of both libraries: their settings, one training step of theirs, and what they tell of offload."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
from torch import nn

from tools.bench.rank import Built, Context, Step
from tools.bench.timing import timed
from tools.bench.workload import Workload


def settings_of(work: Workload, zero: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The settings of either library, in DeepSpeed's words, with its defaults where nothing is said."""
    return {
        "train_micro_batch_size_per_gpu": work.micro_batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": work.clip,
        "bf16": {"enabled": True},
        # On CPU DeepSpeed's accelerator has no streams that could overlap.
        "zero_optimization": {"overlap_comm": work.device == "cuda", **zero},
        "optimizer": {"type": "AdamW", "params": {**work.adamw, "betas": [work.beta1, work.beta2]}},
        **more,
    }


def step_of(engine: Any) -> Step:
    """One optimizer step of an engine of either library."""

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = engine(inputs, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def build(context: Context, options: dict[str, Any]) -> Built:
    """Deepzero as its users run it, nothing tuned by hand. ``options``: ``zero``, and other ``settings``."""
    import deepzero

    config = settings_of(context.work, options["zero"], **options.get("settings", {}))
    engine = deepzero.initialize(model=context.model, config=config)[0]
    offloads, hidden = engine.describe_offload() is not None, list[float]()
    shard, in_optimizer = engine.zero.optimizer_shard, list[float]()
    if context.device.type == "cpu":  # on a GPU the step is only launched there
        step = shard.step
        vars(shard)["step"] = lambda divisor: in_optimizer.append(timed(lambda: step(divisor)))

    def facts(phase: str) -> dict[str, Any]:
        if phase == "block":
            hidden.append(engine.comm.overlap.metrics().get("comm/hidden_fraction", 0.0))
        if phase == "end":
            engine.finish_delayed_update()
            told = engine.report()
            sent = sum(entry["measured"]["between_node_bytes"] for entry in told["communication"].values())
            return {"between_node_bytes": sent, **({"memory": told["memory"]} if offloads else {})}
        if not offloads:
            return {"hidden": hidden}
        if phase == "build":
            return {"arena_bytes": engine.zero.offload.arena.nbytes, "described": engine.describe_offload()}
        return {"pipeline": engine.offload_report()}

    return Built({"step": step_of(engine)}, facts, {"optimizer": in_optimizer} if context.device.type == "cpu" else {})


def build_deepspeed(context: Context, options: dict[str, Any]) -> Built:
    """DeepSpeed with the optimizer that suits the machine. ``options``: ``zero``, and ``optimizer``.

    ``optimizer`` is ``torch`` (fused AdamW), ``own`` (DeepSpeed's kernel, which a C++ compiler makes on first use), or
    absent: the one that DeepSpeed chooses by its settings. Tried and slower on 2 cores, by processor time of one step:
    ``use_multi_rank_bucket_allreduce=false`` (2.2 s against 2.0 s), buckets of 5e8 (as 5e7, with more memory),
    ``reduce_scatter=false`` and ``contiguous_gradients=false`` (as the defaults). DeepSpeed's norm, taken in fp64 of a
    copy of each gradient, cannot be configured.
    """
    work, device, kind, optimizer = context.work, context.device, options.get("optimizer"), None
    params = list(context.model.parameters())
    if kind == "torch":
        optimizer = torch.optim.AdamW(params, fused=True, **work.adamw)
    elif kind == "own":
        optimizer = _own_adam(params, work, device.type == "cpu" or "offload_optimizer" in options["zero"])
    engine = deepspeed_of(context.model, settings_of(work, options["zero"]), device, optimizer)
    return Built({"step": step_of(engine)})


def _own_adam(params: list[nn.Parameter], work: Workload, on_host: bool) -> torch.optim.Optimizer:
    quiet_deepspeed(work.device)
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

    if on_host:
        return DeepSpeedCPUAdam(params, adamw_mode=True, **work.adamw)
    return FusedAdam(params, adam_w_mode=True, **work.adamw)


def quiet_deepspeed(device: str) -> None:
    """Import DeepSpeed for ``cpu`` or ``cuda``, and let it print errors only."""
    os.environ.setdefault("DS_ACCELERATOR", device)  # read when deepspeed is imported
    # torch 2.13 renamed collectives; DeepSpeed calls the old names, and would spend its steps on printing that.
    warnings.filterwarnings("ignore")
    from deepspeed.utils import logger

    logger.setLevel("ERROR")


def deepspeed_of(
    model: nn.Module, config: dict[str, Any], device: torch.device, optimizer: torch.optim.Optimizer | None = None
) -> Any:
    """A quiet engine of DeepSpeed's; with ``optimizer`` in place of the one that the settings name."""
    quiet_deepspeed(device.type)
    import deepspeed

    deepspeed.init_distributed(dist_backend="nccl" if device.type == "cuda" else "gloo", verbose=False)
    # bf16 has no loss scale that could react to an overflow; without the scan for it DeepSpeed is a tenth faster. A
    # client's own optimizer object is "untested" unless DeepSpeed knows its class.
    config = {**config, "bf16": {"enabled": True, "check_grad_overflow": False}, "steps_per_print": 10**9}
    if optimizer is not None:
        config = {**{k: v for k, v in config.items() if k != "optimizer"}, "zero_allow_untested_optimizer": True}
    params = None if optimizer is not None else list(model.parameters())
    return deepspeed.initialize(model=model, model_parameters=params, optimizer=optimizer, config=config)[0]
