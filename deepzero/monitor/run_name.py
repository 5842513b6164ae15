"""What a run is called where nobody has named it: by what was typed, which is how it differs from the default run."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from deepzero.config.run import LoggerConfig

LIMIT = 128  # characters of a name; W&B's limit for the names of projects and groups, and more than a table shows
_ELSEWHERE = ("hydra.", "logger", "launch.device", "launch.max_restarts")
"""How it is watched and where it lies says nothing about a run."""


def name_of(overrides: Sequence[str], limit: int = LIMIT) -> str | None:
    """The overrides of a command line, as typed, in one line; of a path the last part. None: nothing is to be said.

    A name of more than ``limit`` characters ends in a digest of the whole.

    Example:
        >>> name_of(["zero.stage=2", "optimizer.lr=3e-4", "logger=wandb", "hydra.run.dir=run", "data.path='/a/b.txt'"])
        'zero.stage=2,optimizer.lr=3e-4,data.path=b.txt'
        >>> name_of(["zero.stage=2", "optimizer.lr=3e-4"], limit=20)
        'zero.stage=~6c55c623'
        >>> name_of(["logger=wandb"]) is None
        True
    """
    said = []
    for override in overrides:
        if not override.lstrip("+~").startswith(_ELSEWHERE):
            key, equals, value = override.partition("=")
            value = value.strip("'\"")
            said.append(key + equals + (Path(value).name or value if "/" in value else value))
    name = ",".join(said)
    if len(name) > limit:
        name = f"{name[: limit - 9]}~{hashlib.sha256(os.fsencode(name)).hexdigest()[:8]}"
    return name or None


def named(cfg: LoggerConfig, overrides: Sequence[str], sweep_dir: str | None) -> LoggerConfig:
    """Fill in what ``logger.*`` leaves open: the name by what was typed, the group by the folder of the sweep that the
    run belongs to, if it does. W&B's own variables count as settings.
    """
    name, group = cfg.run_name, cfg.group
    if name is None and not os.environ.get("WANDB_NAME"):
        name = name_of(overrides)
    if group is None and sweep_dir is not None and not os.environ.get("WANDB_RUN_GROUP"):
        group = sweep_dir[-LIMIT:]  # of a long path the end, where the date is
    return dataclasses.replace(cfg, run_name=name, group=group)
