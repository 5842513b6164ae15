"""Which loggers there are, and one of each that is asked for. None of them can stop a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from deepzero.config.run import LoggerConfig
from deepzero.monitor.async_logger import Background, Sink, Tell
from deepzero.monitor.tensorboard_logger import TensorBoard
from deepzero.monitor.wandb_logger import WandB


def make_loggers(
    cfg: LoggerConfig, run_dir: Path, config: Mapping[str, Any], first_step: int, tell: Tell
) -> list[Background]:
    """What ``logger.names`` asks for, each in a thread of its own.

    Args:
        cfg: which, and how.
        run_dir: the run folder.
        config: all settings, for loggers that show them.
        first_step: steps that were taken before this start of the run.
        tell: prints a line.
    """
    makers: dict[str, Callable[[Tell], Sink]] = {
        "wandb": lambda say: WandB(cfg, run_dir, config, first_step, say),
        "tensorboard": lambda _: TensorBoard(run_dir, config, first_step),
    }
    loggers = [Background(name, makers[name], tell) for name in dict.fromkeys(cfg.names)]
    for logger in loggers:  # all of them start at the same time
        logger.start()
    return loggers
