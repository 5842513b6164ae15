"""Who takes part, and in which variants. A peer's *fastest* variant is the one that counts against deepzero.

A variant is a configuration that an expert of that system might choose; which one is best depends on the machine, so
``zero.py`` runs them all in its first round and keeps the ones near the front. This file holds names and options only,
and imports nothing heavy: the command line reads it before any rank starts.
"""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Variant:
    """One configuration of one contender."""

    name: str
    note: str  # what is special about it, for the table's legend
    options: dict[str, Any] = field(default_factory=dict)  # read by the contender's builder; every option is used there


@dataclass(frozen=True)
class Contender:
    """One row of the comparison."""

    name: str
    title: str
    builder: str  # `module:function` under `tools.bench`; called as `function(context, options)`
    variants: tuple[Variant, ...]
    needs: str | None = None  # a module that must be importable, else the contender is skipped with a line
    stage: int | None = None  # ZeRO stage, where it has one
    alone: bool = False  # takes part with `--ranks 1` only
    peer: str | None = None  # over whom the page of `gpu` gives its ratio
    late: bool = False  # its course of training is another one by definition, so its losses are shown and not judged

    @property
    def installed(self) -> bool:
        """Whether the module that it needs is there."""
        return self.needs is None or importlib.util.find_spec(self.needs) is not None


def _deepzero(stage: int) -> Contender:
    plain = Variant("plain", "reductions after the backward pass", {"zero": {"stage": stage, "overlap_comm": False}})
    overlap = Variant("overlap", "overlap_comm", {"zero": {"stage": stage, "overlap_comm": True}})
    gather = {"stage": stage, "overlap_comm": True, "overlap_param_gather": True}
    publish = Variant("gather", "overlap_comm, overlap_param_gather", {"zero": gather})
    variants = (plain, overlap, publish) if stage else (plain, overlap)
    return Contender(f"deepzero{stage}", f"deepzero stage {stage}", "engines:build", variants, stage=stage)


def _deepspeed(stage: int) -> Contender:
    def variant(name: str, note: str, optimizer: str = "torch", bucket: int = 50_000_000, **more: Any) -> Variant:
        gathering = "stage3_prefetch_bucket_size" if stage == 3 else "allgather_bucket_size"
        zero = {"stage": stage, "reduce_bucket_size": bucket, gathering: bucket, **more}
        return Variant(name, note, {"optimizer": optimizer, "zero": zero})

    variants = [
        variant("torch-adam", "torch AdamW fused, buckets 5e7"),
        variant("torch-small", "torch AdamW fused, buckets 5e6", bucket=5_000_000),
        variant("cpu-adam", "DeepSpeed's own Adam kernel, buckets 5e7", "own"),
    ]
    if stage == 3:
        note = "torch AdamW fused, parameters under 1e7 elements stay whole"
        variants.append(variant("torch-keep", note, stage3_param_persistence_threshold=10_000_000))
    else:
        # "Offloading" from CPU to CPU takes another path, which keeps one fp32 gradient buffer.
        note = "DeepSpeedCPUAdam with offload_optimizer"
        variants.append(variant("offload", note, "own", offload_optimizer={"device": "cpu"}))
    title, builder = f"DeepSpeed stage {stage}", "engines:build_deepspeed"
    return Contender(f"deepspeed{stage}", title, builder, tuple(variants), needs="deepspeed", stage=stage)


_HOST = Variant(
    "host", "overlap_comm, offload_optimizer",
    {"zero": {"stage": 2, "overlap_comm": True, "offload_optimizer": {"device": "cpu"}}},
)  # fmt: skip
_DDP = (
    Variant("bf16", "bf16 model, fp32 masters in the optimizer", {"mode": "bf16"}),
    Variant("bf16-large", "as bf16, buckets of 100 MiB", {"mode": "bf16", "bucket_mib": 100}),
    Variant("autocast", "fp32 model under torch.autocast(bf16)", {"mode": "autocast"}),
    Variant("autocast-hook", "as autocast, gradients sent as bf16 by a hook", {"mode": "autocast", "compress": True}),
)
_FSDP = (
    Variant("bf16", "per block, bf16 reduction", {"reduce": "bfloat16", "reshard": True}),
    Variant("fp32", "per block, fp32 reduction", {"reduce": "float32", "reshard": True}),
    Variant("bf16-keep", "as bf16, parameters stay whole until the backward", {"reduce": "bfloat16", "reshard": False}),
    Variant("fp32-keep", "as fp32, parameters stay whole until the backward", {"reduce": "float32", "reshard": False}),
)
_ALONE = Variant("bf16", "bf16 model, fp32 masters in the optimizer, no wrapper at all", {"mode": "bf16"})

_PIECES = Variant("pieces", "forward + backward, fused Adam, collectives: each alone")
FLOOR = Contender("floor", "the floor", "floor:build", (_PIECES,))
"""Not a contender: the parts of a step without anything around them. Timed in every round like the others."""

CONTENDERS: tuple[Contender, ...] = (
    *map(_deepzero, range(4)),
    Contender("deepzero2-offload", "deepzero stage 2, optimizer on the host", "engines:build", (_HOST,), stage=2),
    Contender("plain", "plain PyTorch loop", "peers:build_plain", (_ALONE,), alone=True),
    Contender("ddp", "DDP", "peers:build_ddp", _DDP),
    Contender("zro", "DDP + ZeroRedundancyOptimizer", "peers:build_zro", _DDP),
    Contender("fsdp2", "FSDP2", "peers:build_fsdp2", _FSDP),
    *map(_deepspeed, (1, 2, 3)),
    FLOOR,
)


def _muon(stage: int) -> Contender:
    """Under ZeRO every matrix has one owner; in stage 0 every rank orthogonalises all of them."""
    options = {"zero": {"stage": stage}, "settings": {"optimizer": {"type": "Muon", "params": MUON}}}
    variant = Variant("plain", "every rank steps all of it" if stage == 0 else "one owner for each matrix", options)
    return Contender(f"muon{stage}", f"Muon, stage {stage}", "engines:build", (variant,), stage=stage, late=True)


MUON = {"lr": 1e-4, "muon_lr": 0.02}
_QWZ, _QGZ = {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}
_HPZ, _MICS = {"zero_hpz_partition_size": 2}, {"mics_shard_size": 2}
_ZEROPP: dict[str, dict[str, Any]] = {
    "stage3": {}, "qwz": _QWZ, "hpz": _HPZ, "qgz": _QGZ, "all": {**_QWZ, **_HPZ, **_QGZ}, "mics": _MICS,
    "mics-both": {**_MICS, **_QWZ, **_QGZ},
}  # fmt: skip
_ON_NODES = {"stage": 3, "overlap_comm": True, "stage3_param_persistence_threshold": 1000}
ZEROPP = Contender(
    "zeropp", "ZeRO++ on pretended nodes of two ranks", "engines:build",
    tuple(
        Variant(name, ", ".join(more), {"zero": {**_ON_NODES, **more}, "settings": {"comm": {"ranks_per_node": 2}}})
        for name, more in _ZEROPP.items()
    ), stage=3,
)  # fmt: skip
ON_REQUEST: tuple[Contender, ...] = (*map(_muon, range(4)), ZEROPP)  # who takes part only where it is named

CPU: dict[str, Any] = {"device": "cpu", "pin_memory": True}


def _offload(name: str, title: str, stage: int, peer: str | None = None, late: bool = False, **more: Any) -> Contender:
    """A contender of ``gpu offload``; ``more`` of ``zero_optimization`` is the same for both libraries."""
    deepspeed = name.startswith("ds")
    builder, needs = ("engines:build_deepspeed", "deepspeed") if deepspeed else ("engines:build", None)
    variant = Variant("gpu", title, {"zero": {"stage": stage, **more}})
    return Contender(name, title, builder, (variant,), needs, stage, peer=peer, late=late)


BOTH = {"offload_optimizer": CPU, "offload_param": CPU}
OFFLOAD: tuple[Contender, ...] = (
    _offload("s2", "deepzero 2", 2, "ds2", offload_optimizer=CPU),
    _offload("ds2", "DeepSpeed 2", 2, offload_optimizer=CPU),
    _offload("s3", "deepzero 3, parameters too", 3, "ds3", **BOTH),
    _offload("ds3", "DeepSpeed 3, parameters too", 3, **BOTH),
    _offload("plain", "deepzero 2, no offload", 2),
    _offload("s2-half", "deepzero 2, ratio 0.5", 2, "ds2", offload_optimizer={**CPU, "ratio": 0.5}),
    _offload(
        "s2-late", "deepzero 2, delayed", 2, "ds2", late=True,
        offload_optimizer={**CPU, "delayed_update": True, "delay_after_steps": 0},
    ),
)  # fmt: skip
"""In the order of the first round: whoever must not be missing comes first."""


def by_name(name: str) -> Contender:
    """Look a contender of ``zero`` or ``links`` up, for their command lines."""
    known = {contender.name: contender for contender in (*CONTENDERS, *ON_REQUEST)}
    if name not in known:
        raise argparse.ArgumentTypeError(f"unknown contender {name!r}; there are: {', '.join(known)}")
    return known[name]
