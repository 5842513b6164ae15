"""``logger=tensorboard``: event files in ``tensorboard/`` of the run folder. ``tensorboard --logdir RUN_FOLDER``.

All numbers of a step make one event: torch's ``add_scalar`` would make one event, and one trip through its queue, for
each of them. A run that goes on from a checkpoint hides what an earlier start had written of later steps; a run that
replaces another one hides all of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from deepzero.monitor.async_logger import Kind
from deepzero.monitor.metrics_file import scalars, to_json
from deepzero.monitor.terminal import ledger_table
from deepzero.utils.formatting import flatten

FOLDER = "tensorboard"
WATCHED = ("train/loss", "train/tokens_per_second", "validation/val_loss")  # columns of the HParams view


class TensorBoard:
    """A writer of event files, from ``first_step`` on; ``config`` becomes a text and the HParams view."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any], first_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        threading.excepthook = _without_its_traceback(threading.excepthook)
        purge = first_step + 1 if first_step else 0
        # A rank that is killed does not close its writer, and somebody may be looking: on disk after a second.
        self._writer = SummaryWriter(str(run_dir / FOLDER), purge_step=purge, flush_secs=1)
        self._text("config", to_json(config, indent=2), first_step)
        settings = {key: value for key, value in flatten(config).items() if isinstance(value, (bool, int, float, str))}
        *starts, self._end = hparams(settings, dict.fromkeys(WATCHED))
        self._file = cast(Any, self._writer.file_writer)  # it is None only after close()
        for start in starts:
            self._file.add_summary(start)
        self._writer.flush()

    def write(self, kind: Kind, entry: Mapping[str, Any]) -> None:
        """Write all numbers."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=number) for tag, number in scalars(kind, entry).items()]
        self._file.add_summary(Summary(value=values), entry["step"])

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The ledger and the sample as texts, then close."""
        if summary.get("memory") is not None:
            self._text("ledger", ledger_table(summary), summary["steps"])
        if summary.get("sample"):
            self._text("sample", str(summary["sample"]), summary["steps"])
        if summary.get("status") == "finished":
            self._file.add_summary(self._end)
        self._writer.close()

    def _text(self, name: str, text: str, step: int) -> None:
        """As Markdown that is shown letter by letter."""
        self._writer.add_text(name, "\n".join("    " + line for line in text.splitlines()), step)


def _without_its_traceback(hook: Callable[[threading.ExceptHookArgs], Any]) -> Callable[..., Any]:
    """A full disk ends the writer's own thread. The next entry says so here, in a line; so the thread need not."""

    def said_later(args: threading.ExceptHookArgs) -> None:
        if not (isinstance(args.exc_value, OSError) and type(args.thread).__module__.startswith("tensorboard.")):
            hook(args)

    return said_later
