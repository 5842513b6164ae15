"""Which checkpoint a run of ``train.py`` begins with, and with which batch. Plain files and numbers, no process group.

A run keeps its checkpoints in its own folder. ``train.resume=auto`` goes on from the newest of them; so the same
command, with the same run folder, is how a run is continued, by hand, by a scheduler or by a launcher.
"""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

from deepzero.checkpoint.checkpoint_dir import (
    RUN_CHECKPOINTS,
    complete_beside,
    complete_tags,
    find,
    latest_tag,
    read_manifest,
)
from deepzero.checkpoint.errors import CheckpointError, said_complete
from deepzero.checkpoint.manifest import Manifest
from deepzero.config.engine import EngineConfig, resolve_batch
from deepzero.config.strict import ConfigError

CHECKPOINTS = RUN_CHECKPOINTS
"""Inside the run folder."""


def tag_of(step: int) -> str:
    """The tag of a run's checkpoint after ``step`` optimizer steps."""
    return f"step_{step:08d}"


def find_start(resume: str | None, run_dir: Path, restarted: bool = False) -> Path | None:
    """The checkpoint that a run begins with; None for the beginning.

    Args:
        resume: ``train.resume``. A checkpoint in the run folder itself is where the run goes back to; any other place
            counts until this run has saved something.
        run_dir: the run folder.
        restarted: the ranks were started again by a launcher: what this run has saved goes before everything.

    Raises:
        ConfigError: there is none where ``resume`` says, or the run folder holds some that ``resume`` does not want.
    """
    own, tag = run_dir / CHECKPOINTS, None
    try:
        if resume is not None and not restarted and Path(resume).expanduser().resolve().parent == own.resolve():
            tag = Path(resume).name
            return find(own, tag)
        if resume is not None or restarted:
            # ``latest`` is written after the first checkpoint has appeared: a kill may come between.
            newest = latest_tag(own) or next(reversed(complete_tags(own)), None)
            if newest is not None:
                return find(own, newest)
        if resume is None and not restarted and complete_tags(own):
            raise ConfigError(
                f"train.resume=null, and {own} holds checkpoints of an earlier run ({', '.join(complete_tags(own))}): "
                "train.resume=auto goes on from them; to begin anew choose another hydra.run.dir, or remove them"
            )
        if resume is None or resume == "auto":
            return None
        return find(resume, None)
    except CheckpointError as error:
        beside = complete_beside(own if complete_tags(own) else resume or own, tag)
        raise ConfigError(f"train.resume={resume or 'null'}: {error}{way_out(beside)}") from None


def way_out(beside: Path | None) -> str:
    """What resumes instead of a damaged checkpoint, to stand behind what is wrong with it."""
    if beside is None:
        return ""
    return f"; {said_complete(beside)}: the same command with train.resume={beside} goes on from there"


def manifest_of(path: Path, total_steps: int) -> Manifest:
    """The manifest of the checkpoint that a run of ``total_steps`` begins with.

    Raises:
        ConfigError: it is damaged, or has more steps behind it than the run is to take.
    """
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        raise ConfigError(f"{error}{way_out(complete_beside(path.parent, path.name))}") from None
    taken = manifest.counters["global_steps"]
    if taken > total_steps:
        raise ConfigError(f"train.steps={total_steps}: {path} was saved after step {taken}; name at least as many")
    return manifest


def keep_global_batch(config: EngineConfig, manifest: Manifest, world_size: int) -> EngineConfig:
    """The same global batch on any number of ranks: the micro-batch as it was or smaller, more of them or fewer.

    A run that names another ``train_batch_size`` than the checkpoint's gets what it names; and the micro-batch or the
    accumulation that it names, where the global batch can be cut like that. The number of ranks being the same says
    nothing: the checkpoint may be of a run that had already gone on with fewer of them than it began with.

    Raises:
        ConfigError: the global batch does not divide by the number of ranks.

    Example (24 sequences as 4 ranks x 1 x 6; on 3 ranks)::

        >>> from types import SimpleNamespace
        >>> saved = SimpleNamespace(world_size=4, batch={"global_batch": 24, "micro_batch": 6, "accumulation": 1})
        >>> kept = keep_global_batch(EngineConfig(train_batch_size=24), saved, world_size=3)
        >>> kept.train_batch_size, kept.train_micro_batch_size_per_gpu
        (24, 4)
    """
    total = manifest.batch["global_batch"]
    if config.train_batch_size not in (None, total):
        return config
    micro = config.train_micro_batch_size_per_gpu
    if micro is not None or config.gradient_accumulation_steps is not None:
        named = dataclasses.replace(config, train_batch_size=total)
        with contextlib.suppress(ConfigError):
            resolve_batch(named, world_size)
            return named
    if total % world_size:
        raise ConfigError(
            f"the checkpoint was trained with train_batch_size={total}, which {world_size} ranks cannot share evenly; "
            f"start a number of ranks that divides it, or set another train_batch_size"
        )
    share = total // world_size
    largest = max(
        size for size in range(1, min(micro or manifest.batch["micro_batch"], share) + 1) if share % size == 0
    )
    return dataclasses.replace(
        config, train_batch_size=total, train_micro_batch_size_per_gpu=largest, gradient_accumulation_steps=None
    )
