"""What loggers have written, read by their own makers' readers, and compared with ``metrics.jsonl`` line by line."""

import functools
import json
import os
import struct
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from deepzero.monitor.metrics_file import read_metrics

Row = dict[str, Any]
Rows = dict[tuple[str, int], Row]
"""By kind, ``train`` or ``validation``, and step."""


@functools.cache
def wandb_records(file: Path) -> list[dict[str, Any]]:
    """Every record of a ``.wandb`` file, as ``wandb leet inspect`` reads it: the reader inside W&B itself."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    # Its own start-up must not look for a network, nor depend on the caller's warnings.
    env = {k: v for k, v in os.environ.items() if k != "PYTHONWARNINGS"} | {"WANDB_ERROR_REPORTING": "false"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    if "No such command" in done.stderr:
        pytest.skip("this release of wandb has no `wandb leet inspect`")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def wandb_files(run_dir: Path) -> list[Path]:
    """One for each start of the run, in order."""
    return sorted((run_dir / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)


def wandb_rows(run_dir: Path) -> Rows:
    """The history of an offline run, all its starts; of a step that was taken twice, the later row."""
    rows: Rows = {}
    for file in wandb_files(run_dir):
        for record in wandb_records(file):
            if record["type"] == "history":
                item = record["history"]["item"]
                for kind, mark in (("train", "train/loss"), ("validation", "validation/val_loss")):
                    if mark in item:
                        rows[kind, item["step"]] = item
    return rows


def tensorboard_rows(run_dir: Path) -> Rows:
    """The scalars of the event files, as TensorBoard's server reads them."""
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    reader = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={SCALARS: 0})
    reader.Reload()
    rows: Rows = defaultdict(dict)
    for tag in reader.Tags()["scalars"]:
        for event in reader.Scalars(tag):
            rows["validation" if tag.startswith("validation/") else "train", event.step][tag] = event.value
    return dict(rows)


def as_fp32(value: float) -> float:
    """TensorBoard keeps 24 bits."""
    number: float = struct.unpack("f", struct.pack("f", value))[0]
    return number


def compare(run_dir: Path, rows: Mapping[tuple[str, int], Row], kept: Callable[[float], float] = float) -> None:
    """Every number of ``metrics.jsonl`` is in the logger's rows, as it has ``kept`` it; there is no row beside them."""
    entries = read_metrics(run_dir)
    assert entries
    found = {("train" if "loss" in entry else "validation", entry["step"]): entry for entry in entries}
    assert set(rows) == set(found)
    for (kind, step), entry in found.items():
        row = rows[kind, step]
        for key, value in entry.items():
            name = key if "/" in key else f"{kind}/{key}"
            if key == "step":
                continue
            if value is None:  # not finite, or not known
                assert row.get(name) in (None, "NaN", "Infinity", "-Infinity"), (name, step)
            else:
                assert row[name] == kept(value), (name, step)
