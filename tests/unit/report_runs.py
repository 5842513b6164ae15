"""Run folders made by hand, for the tests of the report: what a run of two ranks under stage 2 would leave."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from deepzero.config.run import RunConfig, TrainConfig
from deepzero.monitor.metrics_file import to_json

NUMEL = 1000


def line(step: int, **changes: Any) -> dict[str, Any]:
    known = {
        "step": step, "loss": 5.0 - 0.1 * step, "lr": 1e-3, "grad_norm": 1.0, "grad_norm_clipped": 1.0,
        "loss_scale": 1.0, "skipped": False, "tokens": 100, "tokens_seen": 100 * step, "step_seconds": 0.1,
        "tokens_per_second": 1000.0,
    }  # fmt: skip
    return {**known, **changes}


def config(stage: int = 2, dtype: str = "bf16", accum: str = "bf16", steps: int = 10) -> dict[str, Any]:
    """The settings as ``summary.json`` has them; gradients are summed as the textbook counts them."""
    settings = dataclasses.asdict(RunConfig(train=TrainConfig(steps=steps)))
    settings["engine"]["zero"]["stage"] = stage
    settings["engine"]["precision"]["dtype"] = dtype
    settings["engine"]["grad_accum_dtype"] = accum
    return settings


def account(held: dict[str, int], sent: dict[str, float] | None = None) -> dict[str, Any]:
    """``memory`` and ``communication``, measured as predicted."""
    memory = {name: {"predicted": size, "measured": size, "largest": size} for name, size in held.items()}
    memory["activations"] = {"predicted": None, "measured": 500, "largest": 600}  # type: ignore[dict-item]
    traffic = {"calls": 1, "elements": 500, "padding_elements": 0, "between_node_bytes": 0}
    sent = {"gradients.reduce_scatter": 1000.0, "parameters.all_gather": 1000.0} if sent is None else sent
    both = {kind: {**traffic, "bytes": size} for kind, size in sent.items()}
    return {"memory": memory, "communication": {k: {"predicted": v, "measured": v} for k, v in both.items()}}


STAGE_2 = {"parameters": 2 * NUMEL, "gradients": NUMEL, "masters": 2 * NUMEL, "moments": 4 * NUMEL, "buckets": 300}
"""Bytes of one of two ranks: 2Ψ + 14Ψ/2 = 9Ψ, and buckets."""


def summary(**changes: Any) -> dict[str, Any]:
    known = {
        "status": "finished", "steps": 10, "loss": 4.0, "val_loss_first": 5.0, "val_loss": 4.1, "tokens_seen": 1000,
        "wall_seconds": 1.1, "resumed_from_step": None, "params_sha256": "ab" * 32, "model_numel": NUMEL,
        "world_size": 2, "skipped_steps": 0, "sample": "def f():", "config": config(),
        "environment": {"torch": "2.13.0", "commit": "0123456789ab"},
    }  # fmt: skip
    return {**known, **account(STAGE_2), **changes}


def timeline(ranks: int = 2, peak: int = 9300, entries: list[Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Three events on every rank, unless the ranks' entries are given."""
    base = {"parameters": 2000, "masters": 2000, "moments": 4000}
    points = [
        {"number": 0, "what": "begin", "kind": "", "where": "", "seconds": 0.0, "held": base},
        {"number": 4, "what": "gradient_ready", "kind": "", "where": "", "seconds": 0.04,
         "held": {**base, "gradients": peak - 8000}},
        {"number": 9, "what": "end", "kind": "", "where": "", "seconds": 0.1, "held": {**base, "gradients": 1000}},
    ]  # fmt: skip
    rank = {"seconds": 0.1, "weighing_seconds": 0.001, "events": 10, "problem": None, "points": points}
    entries = entries if entries is not None else [rank] * ranks
    known = {"step": 3, "seconds": 0.1, "world_size": len(entries), "model_numel": NUMEL, **account(STAGE_2)}
    return {**known, "ranks": entries, "predicted": None, **changes}


def folder(
    path: Path,
    steps: list[dict[str, Any]] | None = None,
    end: dict[str, Any] | None = None,
    recorded: dict[str, Any] | None = None,
) -> Path:
    """Write a run folder: ten steps unless others are given, and what else there is."""
    path.mkdir(parents=True)
    lines = [line(step) for step in range(1, 11)] if steps is None else steps
    validations = [{"step": 0, "val_loss": 5.0}, {"step": 10, "val_loss": 4.1}] if lines else []
    text = "".join(to_json(entry) + "\n" for entry in [*validations, *lines])
    (path / "metrics.jsonl").write_text(text, encoding="utf-8")
    for name, value in (("summary.json", end), ("timeline.json", recorded)):
        if value is not None:
            (path / name).write_text(json.dumps(value), encoding="utf-8")
    return path
