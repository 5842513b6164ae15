"""``profiler=torch``: torch.profiler over a few steps, as traces in the run folder.

The files are Chrome traces, ``traces/rank0.<time>.pt.trace.json``. ``tensorboard --logdir RUN_FOLDER`` shows them with
torch-tb-profiler (kernels, memory, communication against computation); https://ui.perfetto.dev opens them one by one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from deepzero.config.parse import ConfigError
from deepzero.config.run import ProfilerConfig


def check_profiler(cfg: ProfilerConfig, steps: int, world_size: int) -> None:
    """Raise a :class:`ConfigError` for a profiler that would record nothing."""
    if not cfg.enabled:
        return
    needed = cfg.wait + cfg.warmup + cfg.active
    if cfg.active < 1:
        raise ConfigError(f"profiler.active={cfg.active}: at least one step must be recorded")
    if steps < needed:
        raise ConfigError(
            f"train.steps={steps}: the profiler needs profiler.wait {cfg.wait} + profiler.warmup {cfg.warmup} + "
            f"profiler.active {cfg.active} = {needed} steps"
        )
    strangers = [rank for rank in cfg.ranks if not 0 <= rank < world_size]
    if strangers or not cfg.ranks:
        raise ConfigError(f"profiler.ranks={list(cfg.ranks)}: give some of the ranks 0 to {world_size - 1}")


@contextlib.contextmanager
def trace(cfg: ProfilerConfig, run_dir: Path, rank: int) -> Iterator[Callable[[], None]]:
    """Profile the steps inside, when this rank is one of those that record.

    Args:
        cfg: which steps and which ranks.
        run_dir: gets a folder ``traces``.
        rank: this rank.

    Yields:
        A function to be called at the end of every optimizer step.
    """
    if not cfg.enabled or rank not in cfg.ranks:
        yield lambda: None
        return
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(
        activities=activities,
        schedule=torch.profiler.schedule(wait=cfg.wait, warmup=cfg.warmup, active=cfg.active, repeat=1),
        on_trace_ready=torch.profiler.tensorboard_trace_handler(str(run_dir / "traces"), worker_name=f"rank{rank}"),
        record_shapes=True,
        profile_memory=True,
    ) as profiler:
        yield profiler.step
