"""Who takes part, and in which variants. A peer's *fastest* variant is the one that counts against deepzero.

A variant is a configuration that an expert of that system might choose; which one is best depends on the machine, so
the benchmark runs them all in its first round and keeps the ones near the front (see ``zero.py``). This file holds
names and options only, and imports nothing heavy: the command line reads it before any rank starts.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Variant:
    """One configuration of one contender."""

    name: str
    note: str
    """What is special about it, for the table's legend."""

    options: dict[str, Any] = field(default_factory=dict)
    """Read by the contender's builder; every option is used there."""


@dataclass(frozen=True)
class Contender:
    """One row of the comparison."""

    name: str
    title: str
    builder: str
    """``module:function`` under ``tools.bench``; called as ``function(context, options) -> step function``."""

    variants: tuple[Variant, ...]
    needs: tuple[str, ...] = ()
    """Modules that must be importable, else the contender is skipped with a line."""

    stage: int | None = None
    """ZeRO stage, where it has one."""

    alone: bool = False
    """Takes part with ``--ranks 1`` only."""

    def missing(self) -> str | None:
        """The first needed module that is not installed, or None."""
        for name in self.needs:
            try:
                found = importlib.util.find_spec(name) is not None
            except ModuleNotFoundError:  # a parent package is missing
                found = False
            if not found:
                return name
        return None


def _deepzero(stage: int) -> Contender:
    plain = Variant("plain", "reductions after the backward pass", {"stage": stage, "overlap": False})
    overlap = Variant("overlap", "overlap_comm", {"stage": stage, "overlap": True})
    return Contender(
        f"deepzero{stage}",
        f"deepzero stage {stage}",
        "engines:build",
        (plain, overlap),
        needs=("deepzero.runtime.engine",),
        stage=stage,
    )


def _deepzero_offload(stage: int) -> Contender:
    host = Variant("host", "overlap_comm, offload_optimizer", {"stage": stage, "overlap": True, "offload": True})
    return Contender(
        f"deepzero{stage}-offload",
        f"deepzero stage {stage}, optimizer on the host",
        "engines:build",
        (host,),
        needs=("deepzero.runtime.engine",),
        stage=stage,
    )


def _deepspeed(stage: int) -> Contender:
    torch_adam = {"stage": stage, "bucket": 50_000_000, "optimizer": "torch"}
    cpu_adam = {**torch_adam, "optimizer": "cpu_adam"}
    variants = [
        Variant("torch-adam", "torch AdamW fused, buckets 5e7", torch_adam),
        Variant("torch-small", "torch AdamW fused, buckets 5e6", {**torch_adam, "bucket": 5_000_000}),
        Variant("cpu-adam", "DeepSpeed's own Adam kernel, buckets 5e7", cpu_adam),
    ]
    if stage == 3:
        keep = {"stage3_param_persistence_threshold": 10_000_000}
        note = "torch AdamW fused, parameters under 1e7 elements stay whole"
        variants.append(Variant("torch-keep", note, {**torch_adam, "zero": keep}))
    else:
        # "Offloading" from CPU to CPU takes another path, which keeps one fp32 gradient buffer.
        offload = {"offload_optimizer": {"device": "cpu"}}
        variants.append(Variant("offload", "DeepSpeedCPUAdam with offload_optimizer", {**cpu_adam, "zero": offload}))
    return Contender(
        f"deepspeed{stage}",
        f"DeepSpeed stage {stage}",
        "peer_deepspeed:build",
        tuple(variants),
        needs=("deepspeed",),
        stage=stage,
    )


_DDP_VARIANTS = (
    Variant("bf16", "bf16 model, fp32 masters in the optimizer", {"mode": "bf16"}),
    Variant(
        "bf16-large",
        "bf16 model, fp32 masters in the optimizer, buckets of 100 MiB",
        {"mode": "bf16", "bucket_mib": 100},
    ),
    Variant("autocast", "fp32 model under torch.autocast(bf16)", {"mode": "autocast"}),
    Variant(
        "autocast-hook",
        "torch.autocast(bf16), gradients sent as bf16 by a communication hook",
        {"mode": "autocast", "compress": True},
    ),
)

_FSDP_VARIANTS = (
    Variant("bf16", "per block, bf16 reduction", {"reduce": "bf16", "reshard": True}),
    Variant("fp32", "per block, fp32 reduction", {"reduce": "fp32", "reshard": True}),
    Variant(
        "bf16-keep", "bf16 reduction, parameters stay whole until the backward", {"reduce": "bf16", "reshard": False}
    ),
    Variant(
        "fp32-keep", "fp32 reduction, parameters stay whole until the backward", {"reduce": "fp32", "reshard": False}
    ),
)

FLOOR = Contender(
    "floor",
    "the floor",
    "floor:build",
    (Variant("pieces", "forward + backward, fused Adam, collectives: each alone"),),
)
"""Not a contender: the parts of a step without anything around them. Timed in every round like the others."""

CONTENDERS: tuple[Contender, ...] = (
    _deepzero(0),
    _deepzero(1),
    _deepzero(2),
    _deepzero(3),
    _deepzero_offload(2),
    Contender(
        "plain",
        "plain PyTorch loop",
        "peers:build_plain",
        (Variant("bf16", "bf16 model, fp32 masters in the optimizer, no wrapper at all", {"mode": "bf16"}),),
        alone=True,
    ),
    Contender("ddp", "DDP", "peers:build_ddp", _DDP_VARIANTS),
    Contender("zro", "DDP + ZeroRedundancyOptimizer", "peers:build_zro", _DDP_VARIANTS),
    Contender("fsdp2", "FSDP2", "peers:build_fsdp2", _FSDP_VARIANTS),
    _deepspeed(1),
    _deepspeed(2),
    _deepspeed(3),
    FLOOR,
)


def by_name(name: str) -> Contender:
    """Look a contender up.

    Raises:
        ValueError: nobody has that name; the message lists those who are there.
    """
    for contender in CONTENDERS:
        if contender.name == name:
            return contender
    raise ValueError(f"unknown contender {name!r}; there are: {', '.join(c.name for c in CONTENDERS)}")
