"""One object that the training loop talks to; everything that watches a run hangs on it.

Every rank has a monitor, so that the loop has no ``if rank == 0``; only rank 0's has sinks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepzero.config.run import LoggerConfig
from deepzero.monitor.async_logger import Background, Kind, Sink, Tell, finish_all
from deepzero.monitor.metrics_file import (
    METRICS,
    SUMMARY,
    MetricsFile,
    kept_metrics,
    write_failed_summary,
    write_summary,
)
from deepzero.monitor.report.sections import write_report_or_tell
from deepzero.monitor.tensorboard_logger import TensorBoard
from deepzero.monitor.terminal import Terminal, ledger_table, printable
from deepzero.monitor.throughput import rates
from deepzero.monitor.wandb_logger import WandB
from deepzero.utils.exit_hooks import before_the_end
from deepzero.utils.formatting import short_bytes


@dataclass(frozen=True)
class Workload:
    """What the monitor must know of a run to speak of its speed; None: not known."""

    total_steps: int
    tokens_per_step: int
    flops_per_token: float  # forward and backward
    world_size: int
    peak_flops: float | None  # one device's, per second
    bytes_per_token: float | None  # for bits per byte


@dataclass
class Monitor:
    """Turns what the loop reports into entries, and hands them to the sinks."""

    workload: Workload
    run_dir: Path
    sinks: list[Sink] = field(default_factory=list)
    terminal: Terminal | None = None  # also one of the sinks; None on ranks that are silent
    started: float = field(default_factory=time.perf_counter)
    tokens_seen: int = 0
    validations: list[float] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)  # the last step's entry
    first_step: int = 0  # steps that were taken before this start of the run
    left_out: int = 0  # entries that `metrics.jsonl` could not take

    def line(self, text: str) -> None:
        """Tell the person at the terminal."""
        if self.terminal is not None:
            self.terminal.line(text)

    def step(self, record: Mapping[str, Any], seconds: float) -> None:
        """An optimizer step is over, ``seconds`` after the first micro-batch's data were asked for.

        ``record`` holds ``step, loss, lr, grad_norm, grad_norm_clipped, loss_scale, skipped``, and what else there is.
        """
        work = self.workload
        self.tokens_seen += work.tokens_per_step
        speed = rates(work.tokens_per_step, seconds, work.flops_per_token, work.world_size, work.peak_flops)
        counts = {"tokens": work.tokens_per_step, "tokens_seen": self.tokens_seen, "step_seconds": seconds}
        self.last = {**record, **counts, **speed}
        self._pass_on("train", self.last)

    def validation(self, step: int, loss: float) -> None:
        """A validation after ``step`` optimizer steps is over; ``loss`` in nats per token."""
        self.validations.append(loss)
        per_token = self.workload.bytes_per_token
        bits = None if per_token is None else loss / math.log(2) / per_token
        entry = {"step": step, "val_loss": loss, "val_bits_per_byte": bits, "tokens_seen": self.tokens_seen}
        self._pass_on("validation", entry)

    def _pass_on(self, kind: Kind, entry: Mapping[str, Any]) -> None:
        """To every sink. One that cannot write is said once and tried again with the next entry."""
        for sink in self.sinks:
            try:
                sink.write(kind, entry)
            except OSError as error:
                if not self.left_out:
                    self.line(f"{error}; training goes on, and what cannot be written is left out")
                self.left_out += 1

    def stopped(self, reason: str, config: Mapping[str, Any]) -> None:
        """The run leaves before its end, and may be continued: the summary says so until then.

        It may be killed soon, so what cannot be made again goes first: the report comes last, and loggers end without.
        """
        watched = bool(self.sinks)
        if watched:
            write_failed_summary(self.run_dir, reason, config, time.perf_counter() - self.started)
        self._close({"status": "stopped", "error": reason, "steps": self.last.get("step", 0)})
        if watched:
            write_report_or_tell(self.run_dir, self.line)

    def broken_off(self) -> None:
        """The program ends, perhaps with an error: what loggers still hold must not be lost. Nothing after the end."""
        self._close({"status": "failed", "steps": self.last.get("step", 0)})

    def _close(self, summary: Mapping[str, Any]) -> None:
        sinks, self.sinks = self.sinks, []
        finish_all(sinks, summary)
        if self.left_out:
            self.line(f"{METRICS}: {self.left_out} entries could not be written")
            self.left_out = 0

    def finish(self, facts: Mapping[str, Any]) -> None:
        """The run is over: write the summary, close all sinks, print the table.

        ``facts`` are the loop's: ``params_sha256, model_numel, world_size, memory, communication, off_the_forms,
        remarks, peak_rss_bytes, sample, config …``.
        """
        if self.last.get("step", 0) <= self.first_step:
            # This start took no step: nothing was held or sent that could be compared with what was predicted.
            facts = {**facts, "memory": None, "communication": None, "off_the_forms": [], "remarks": []}
        summary = {
            "status": "finished",
            "steps": self.last.get("step", 0),
            "loss": self.last.get("loss"),
            "val_loss_first": self.validations[0] if self.validations else None,
            "val_loss": self.validations[-1] if self.validations else None,
            "tokens_seen": self.tokens_seen,
            "wall_seconds": time.perf_counter() - self.started,
            "resumed_from_step": self.first_step or None,
            **facts,
        }
        if self.sinks:
            try:
                write_summary(self.run_dir, summary)
            except OSError as error:  # the checkpoints are saved, and the same numbers follow on the terminal
                self.line(f"{SUMMARY}: {error}")
            write_report_or_tell(self.run_dir, self.line)  # before W&B closes, which takes it along
        self._close(summary)
        if self.terminal is not None:
            self.terminal.line(_last_words(summary, self.run_dir))


def make_monitor(
    workload: Workload,
    cfg: LoggerConfig,
    run_dir: Path,
    config: Mapping[str, Any],
    first_step: int = 0,
    tokens_seen: int = 0,
    validated_again: bool = True,
    **options: Any,
) -> Monitor:
    """Rank 0's monitor, with every sink that ``cfg`` asks for; each logger in a thread of its own.

    ``config`` is all settings, for loggers that show them. Before this start the run has taken ``first_step`` steps,
    with ``tokens_seen``; it begins with a validation where ``validated_again``. ``options`` are :class:`Terminal`'s.
    """
    terminal = Terminal(workload.total_steps, **options)
    earlier = kept_metrics(run_dir, first_step, validated_again)
    validations = [entry["val_loss"] for entry in earlier if "val_loss" in entry]
    last = next((entry for entry in reversed(earlier) if "loss" in entry), {"step": first_step})
    monitor = Monitor(
        workload, run_dir, [MetricsFile(run_dir, earlier), terminal], terminal,
        tokens_seen=tokens_seen, validations=validations, last=last, first_step=first_step,
    )  # fmt: skip
    makers: dict[str, Callable[[Tell], Sink]] = {
        "wandb": lambda tell: WandB(cfg, run_dir, config, first_step, tell),
        "tensorboard": lambda _: TensorBoard(run_dir, config, first_step),
    }
    loggers = [Background(name, makers[name], terminal.line) for name in dict.fromkeys(cfg.names)]
    for logger in loggers:  # all of them start at the same time
        logger.start()
    monitor.sinks += loggers
    before_the_end(monitor.broken_off)
    return monitor


def _last_words(summary: Mapping[str, Any], run_dir: Path) -> str:
    lines = []
    if summary.get("sample"):
        lines += ["", "---- sample ----", printable(str(summary["sample"])), "----------------"]
    if summary["memory"] is not None:
        told = [*summary.get("off_the_forms", ()), *summary.get("remarks", ())]
        lines += ["", ledger_table(summary), *(f"! {line}" for line in told)]
    else:
        lines += ["", "nothing was left to train"]
    of_ranks = f", largest of {summary['world_size']} ranks" * (summary["world_size"] > 1)
    lines.append(f"peak resident memory{of_ranks}: {short_bytes(summary['peak_rss_bytes'])}")
    if summary["val_loss"] is not None:
        first = summary["val_loss_first"]  # None: an earlier start's was no number
        lines.append(f"validation loss {'-' if first is None else f'{first:.4f}'} -> {summary['val_loss']:.4f}")
    before, steps = summary["resumed_from_step"] or 0, summary["steps"]
    in_all = f", {steps} in all" if before else ""
    lines.append(f"{steps - before} steps in {summary['wall_seconds']:.1f} s{in_all}; {run_dir / SUMMARY}")
    return "\n".join(lines)
