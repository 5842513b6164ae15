"""What the tests of checkpoints share: training in stretches, and everything that has to have the same bits."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import deepzero
from deepzero.checkpoint.engine_state import EngineState
from deepzero.checkpoint.errors import CheckpointError
from deepzero.comm import process_group
from tests.distributed.training import make_model, one_step, start

GLOBAL_BATCH = 12
"""Divides by 1, 2, 3 and 4 ranks."""


def settings(stage: int, **changes: Any) -> dict[str, Any]:
    """Arguments of ``start``: a bucket size that makes several buckets, persistent parameters in stage 3."""
    zero = {"stage3_param_persistence_threshold": 100} if stage == 3 else {}
    return {"stage": stage, "bucket": 900, "zero": zero, **changes}


def engine_for(world: int, stage: int, micro: int | None = None, **changes: Any) -> deepzero.Engine:
    """An engine with a global batch of :data:`GLOBAL_BATCH` sequences, with dropout-free model and a schedule."""
    accumulation = changes.get("gradient_accumulation_steps", 1)
    size = micro or GLOBAL_BATCH // world // accumulation
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 30, "warmup_max_lr": 1e-2}}
    given = {"train_micro_batch_size_per_gpu": size, "scheduler": schedule, **settings(stage, **changes)}
    model = given.pop("model", None)
    # By identity: a compiled model has no truth value.
    return start(make_model() if model is None else model, **given)


def steps(engine: deepzero.Engine, rank: int, world: int, until: int) -> list[tuple[Any, ...]]:
    """Train up to step ``until``; losses, norms, learning rate and loss scale of each step."""
    records = []
    while engine.global_steps < until:
        r = one_step(engine, rank, world, engine.global_steps)
        records.append((r.step, r.loss, r.lr, r.grad_norm, r.grad_norm_clipped, r.loss_scale, r.skipped))
    return records


def fingerprints(engine: deepzero.Engine) -> dict[str, str]:
    """SHA-256 of every parameter's whole master and moments, by name; the same for all stages and numbers of ranks."""
    holdings: EngineState = engine.checkpointer.holdings()
    mine: dict[tuple[str, str], list[tuple[int, bytes]]] = {}
    for run in holdings.runs():
        for key, tensor in {"master": run.master, **holdings.optimizer_state(run)[0]}.items():
            content = run.cut(tensor).contiguous().view(torch.uint8).numpy().tobytes()
            mine.setdefault((run.name, key), []).append((run.start, content))
    everyone = process_group.all_gather_object(mine)
    merged: dict[tuple[str, str], list[tuple[int, bytes]]] = {}
    for theirs in everyone:
        for key, runs in theirs.items():
            merged.setdefault(key, []).extend(runs)
    return {
        f"{name}/{key}": hashlib.sha256(b"".join(content for _, content in sorted(runs))).hexdigest()
        for (name, key), runs in sorted(merged.items())
    }


def said(act: Callable[..., Any], *args: Any, **kwargs: Any) -> str | None:
    """The CheckpointError of a call; None: it went well."""
    try:
        act(*args, **kwargs)
    except CheckpointError as error:
        return str(error)
    return None


def train_and_save(rank: int, world: int, folder: Path | None, stage: int, until: int, changes: dict[str, Any]) -> Any:
    """Train from the beginning, save into ``folder`` if there is one; records, hash and fingerprints."""
    engine = engine_for(world, stage, **changes)
    records = steps(engine, rank, world, until)
    if folder is not None:
        engine.save_checkpoint(folder, client_state={"until": until})
    result = records, engine.params_sha256(), fingerprints(engine)
    engine.destroy()
    return result


def load_and_train(rank: int, world: int, folder: Path, stage: int, until: int, changes: dict[str, Any]) -> Any:
    """Load ``folder`` into a new engine and go on; fingerprints after loading, records, the last hash."""
    engine = engine_for(world, stage, **changes)
    _, client_state = engine.load_checkpoint(folder)
    loaded = engine.params_sha256(), fingerprints(engine)
    result = loaded, steps(engine, rank, world, until), engine.params_sha256(), client_state
    engine.destroy()
    return result
