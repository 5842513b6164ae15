"""Bits that do not depend on the number of ranks: what they take, and what stands in the way.

[Note: one order of sums]
    A step has M micro-batches, of which W ranks make M/W each. Number v of them is the one that rank ``v % W`` makes in
    its micro-step ``v // W``. With a fixed M and a fixed micro-batch a run has the same bits at every W that divides M:

    the data        micro-batch v is the same sequences (``data/sampler.py``)
    random numbers  those of micro-batch v are drawn from generators seeded by run, step and v (:func:`seed_generators`)
    gradients       ``((g_0 + g_1) + g_2) + …``: a reduction adds rank 0's, rank 1's, … to what the ones before it have
                    left, in fp32, each rounded to the wire's dtype by itself (``comm/exact_sum.py``)
    norm, loss      sums that are exact, hence without an order (``grad_norm.py``, ``consistency.py:sum_rounded_once``)
    the step        element by element; the divisor is M times the loss scale

    The first two are the program's, which calls ``engine.seed_micro_batch(seed)`` before each forward pass. Stages 0
    and 1 add up a rank's micro-batches before they reduce, unless ``comm.world_size_invariant`` asks for this order,
    which costs them a reduction for each.

Outside of it are a weight that gets several gradients in one backward pass (reentrant checkpointing), several backward
passes for one micro-batch, and a loss that the program divides by the accumulation itself, which depends on W.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from deepzero.config.engine import BatchSizes, EngineConfig
from deepzero.config.strict import ConfigError
from deepzero.device import accelerator_of


def dependences_of_settings(config: EngineConfig, on_gpu: bool) -> list[str]:
    """Those of :func:`dependences` that the settings alone tell, before there are ranks or a model."""
    zero, compute = config.zero, config.precision.dtype
    wire, ratio = config.communication_data_type or compute, zero.offload_optimizer.ratio
    qwz = zero.zero_quantized_weights or zero.zero_quantized_nontrainable_weights
    reasons = {
        "sums are the backend's (set comm.reduce=exact)":  # qgZ adds up by itself, on every backend
            (config.comm.reduce or on_gpu) in ("native", True) and not zero.zero_quantized_gradients,
        f"stage {zero.stage} sums a rank's micro-batches first (set comm.world_size_invariant=true, or stage 2 or 3)":
            zero.stage < 2 and not config.comm.world_size_invariant,
        "qgZ rounds sums of a node (leave zero.zero_quantized_gradients out)": zero.zero_quantized_gradients,
        "one rank alone sends no weights for qwZ to round (leave zero.zero_quantized_weights out)": qwz,
        f"each reduction is rounded to {config.grad_accum_dtype} (set grad_accum_dtype=fp32)":
            config.grad_accum_dtype != "fp32",
        f"one rank alone sends nothing that {wire} would round (leave communication_data_type out)":
            wire not in (compute, "fp32"),
        "how much of a bucket the CPU steps on differs (set zero.offload_optimizer.ratio=1)": on_gpu and ratio < 1,
    }  # fmt: skip
    return [reason for reason, holds in reasons.items() if holds]


def dependences(config: EngineConfig, model: nn.Module, device: torch.device) -> list[str]:
    """Why the bits of a run depend on the number of ranks: what is set, and what to set; empty where they do not."""
    on_gpu = device.type != "cpu"
    reasons = {
        f"kernels sum as {torch.get_num_threads()} threads share their work (set OMP_NUM_THREADS=1)":
            not on_gpu and torch.get_num_threads() > 1,
        "kernels may sum in any order (call torch.use_deterministic_algorithms(True))":
            on_gpu and not torch.are_deterministic_algorithms_enabled(),
        "running statistics are each rank's own (BatchNorm, InstanceNorm)":
            any(isinstance(module, _NormBase) and module.track_running_stats for module in model.modules()),
    }  # fmt: skip
    return dependences_of_settings(config, on_gpu) + [reason for reason, holds in reasons.items() if holds]


def refuse_dependence(reasons: list[str]) -> None:
    """Raise a :class:`ConfigError` that names the reasons, if there are any."""
    if reasons:
        raise ConfigError(
            f"comm.world_size_invariant=true, but bits depend on the number of ranks: {'; '.join(reasons)}"
        )


def describe(reasons: list[str], batch: BatchSizes, device: torch.device) -> str:
    """One line for people.

    Example:
        >>> describe([], BatchSizes(global_batch=24, micro_batch=2, accumulation=3, world_size=4), torch.device("cpu"))
        'bits   the same at every number of ranks that divides 12, with micro-batches of 2, with one thread each'
        >>> describe(["kernels may sum in any order"], BatchSizes(24, 2, 3, 4), torch.device("cpu"))
        'bits   depend on the number of ranks: kernels may sum in any order'
    """
    if reasons:
        return f"bits   depend on the number of ranks: {'; '.join(reasons)}"
    count, threads = batch.accumulation * batch.world_size, ", with one thread each" if device.type == "cpu" else ""
    same = f"the same at every number of ranks that divides {count}, with micro-batches of {batch.micro_batch}"
    return f"bits   {same}{threads}"


def seed_generators(device: torch.device, seed: int, step: int, micro_batch: int) -> None:
    """Seed Python's, numpy's and torch's generators, on the CPU and on ``device``, by a hash of three integers."""
    number = int.from_bytes(hashlib.blake2b(f"{seed} {step} {micro_batch}".encode(), digest_size=8).digest(), "little")
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    torch.default_generator.manual_seed(number)  # 1 µs; torch.manual_seed notes 400 µs of where it was called from
    if (accelerator := accelerator_of(device)).has_streams:
        accelerator.manual_seed(number, device)


def describe_bits(engine: Any) -> str:
    """One line: whether the run's bits depend on the number of ranks, and why."""
    return describe(dependences(engine.config, engine.module, engine.comm.device), engine.batch, engine.comm.device)


def seed_micro_batch(engine: Any, seed: int) -> None:
    """Seed Python's, numpy's and torch's generators for the micro-batch that comes next, whichever rank makes it.

    Called before its forward pass it makes dropout a function of ``seed``, step and micro-batch: the same on any number
    of ranks, and after a resume.
    """
    number = engine.micro_steps % engine.batch.accumulation * engine.comm.world_size + engine.comm.rank
    seed_generators(engine.comm.device, seed, engine.global_steps, number)
