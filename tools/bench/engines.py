"""What benchmarks of engines share: the settings, deepzero's or DeepSpeed's engine over them, one training step."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from tools.bench.rank import Context, Step
from tools.bench.workload import Workload


def settings_of(work: Workload, zero: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The settings of either library, in DeepSpeed's words, with its defaults where nothing is said."""
    return {
        "train_micro_batch_size_per_gpu": work.micro_batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": work.clip,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {**work.adamw, "betas": [work.beta1, work.beta2]}},
        **more,
    }


def deepspeed_of(
    model: nn.Module, config: dict[str, Any], device: torch.device, optimizer: torch.optim.Optimizer | None = None
) -> Any:
    """A quiet engine of DeepSpeed's; with ``optimizer`` in place of the one that the settings name."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)  # read when deepspeed is imported
    # torch 2.13 renamed collectives; DeepSpeed calls the old names, and would spend its steps on printing that.
    warnings.filterwarnings("ignore")
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel("ERROR")
    deepspeed.init_distributed(dist_backend="nccl" if device.type == "cuda" else "gloo", verbose=False)
    # bf16 has no loss scale that could react to an overflow; without the scan for it DeepSpeed is a tenth faster. A
    # client's own optimizer object is "untested" unless DeepSpeed knows its class.
    config = {**config, "bf16": {"enabled": True, "check_grad_overflow": False}, "steps_per_print": 10**9}
    if optimizer is not None:
        config = {**{k: v for k, v in config.items() if k != "optimizer"}, "zero_allow_untested_optimizer": True}
    params = None if optimizer is not None else list(model.parameters())
    return deepspeed.initialize(model=model, model_parameters=params, optimizer=optimizer, config=config)[0]


def step_of(engine: Any) -> Step:
    """One optimizer step of an engine of either library."""

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = engine(inputs, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def build(context: Context, options: dict[str, Any]) -> Step:
    """Deepzero as its users run it, nothing tuned by hand: ``options`` are stage, overlap and offload."""
    import deepzero

    zero = {"stage": options["stage"], "overlap_comm": options["overlap"]}
    if options.get("offload"):
        zero["offload_optimizer"] = {"device": "cpu"}
    return step_of(deepzero.initialize(model=context.model, config=settings_of(context.work, zero))[0])


def interleaved(
    runs: Mapping[str, Callable[[], object]], rounds: int, wait: Callable[[], object] = lambda: None
) -> dict[str, list[float]]:
    """Seconds of each round for each run, in an order that moves on from round to round; the first is not counted.

    Args:
        runs: what is timed, by name.
        rounds: that count.
        wait: until the device has nothing left to do.
    """
    names, seconds = list(runs), {name: list[float]() for name in runs}
    for number in range(rounds + 1):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            wait()
            started = time.perf_counter()
            runs[name]()
            wait()
            if number:
                seconds[name].append(time.perf_counter() - started)
    return seconds
