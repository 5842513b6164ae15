"""DeepSpeed's logger, and its ways of logging on some ranks only. Source: ``utils/logging.py`` of [DeepSpeed]."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Sequence

from deepzero.comm import process_group


@functools.cache
def _made() -> logging.Logger:
    made = logging.getLogger("DeepSpeed")
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] %(message)s"))
    made.addHandler(handler)
    made.setLevel(logging.INFO)
    made.propagate = False
    # As DeepSpeed has them on its logger, too.
    made.warning_once = functools.cache(made.warning)  # type: ignore[attr-defined]
    made.log_dist_once = lambda *words, **more: log_dist_once(*words, **more)  # type: ignore[attr-defined]
    return made


logger = _made()
"""What libraries set levels of; what it says goes to standard output, as there."""
warning_once = logger.warning_once  # type: ignore[attr-defined]


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on these ranks; with -1 among them on all. Without ranks on none, but where no group has been joined."""
    if not process_group.is_initialized() or (ranks and (-1 in ranks or process_group.rank() in ranks)):
        logger.log(level, f"[Rank {process_group.rank()}] {message}")


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """:func:`log_dist`, and not again with these words."""
    _log_dist_once(message, tuple(ranks or ()), level)


_log_dist_once = functools.cache(log_dist)


def set_log_level_from_string(level: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level by its name, in any case; ValueError where no level has this name."""
    (custom_logger or logger).setLevel(level.upper())
