"""What loggers make of an entry and of a ledger: names of metrics, rows of tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MEMORY_COLUMNS = ("category", "predicted_bytes", "measured_bytes", "measured/predicted")
COMMUNICATION_COLUMNS = (
    "kind", "predicted_bytes", "measured_bytes", "measured/predicted", "calls", "elements", "padding_elements",
)  # fmt: skip

Row = list[Any]


def scalars(prefix: str, entry: Mapping[str, Any]) -> dict[str, float]:
    """Every number of an entry but the step, under the name that loggers show it by.

    W&B and TensorBoard make a section of what stands before the first slash, so a name that has one keeps its own.

    Args:
        prefix: the section of names without a slash, ``train`` or ``validation``.
        entry: what ``metrics.jsonl`` gets. What is not a number, ``None`` for one, has no place here.

    Example:
        >>> scalars("train", {"step": 3, "loss": 2.5, "skipped": False, "mfu": None, "comm/hidden_fraction": 0.75})
        {'train/loss': 2.5, 'train/skipped': 0.0, 'comm/hidden_fraction': 0.75}
    """
    return {
        key if "/" in key else f"{prefix}/{key}": float(value)
        for key, value in entry.items()
        if key != "step" and isinstance(value, (int, float))
    }


def memory_rows(summary: Mapping[str, Any]) -> list[Row]:
    """Bytes held by one rank, by category, in the order of ``MEMORY_COLUMNS``; empty when nothing was trained.

    Example:
        >>> memory_rows({"memory": {"masters": {"predicted": 40, "measured": 40}, "activations": {"predicted": None,
        ...     "measured": 9}}})
        [['masters', 40, 40, 1.0], ['activations', None, 9, None]]
    """
    held = summary.get("memory") or {}
    return [[name, v["predicted"], v["measured"], _ratio(v["predicted"], v["measured"])] for name, v in held.items()]


def communication_rows(summary: Mapping[str, Any]) -> list[Row]:
    """What one rank sends in one step, by kind, in the order of ``COMMUNICATION_COLUMNS``; empty likewise."""
    rows: list[Row] = []
    for kind, values in (summary.get("communication") or {}).items():
        measured = values["measured"]
        predicted = None if values["predicted"] is None else values["predicted"]["bytes"]
        counts = [measured[name] for name in ("calls", "elements", "padding_elements")]
        rows.append([kind, predicted, measured["bytes"], _ratio(predicted, measured["bytes"]), *counts])
    return rows


def _ratio(predicted: float | None, measured: float) -> float | None:
    return measured / predicted if predicted else None
