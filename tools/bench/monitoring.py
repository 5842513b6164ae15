"""What watching a run costs, in step time: ``python -m tools.bench.monitoring``.

One rank with as many threads as it is given, so that nothing else waits and a logger's thread has to take its time from
somewhere. The model is enlarged until a step takes ``--step-ms``. Five ways of watching the same engine take turns in
blocks of ``--block`` steps, in another order in every round:

- ``none``: no monitor at all;
- ``jsonl``: ``metrics.jsonl``, which every run writes, and the line on the terminal, which goes to nowhere here;
- ``wandb`` (offline), ``tensorboard``: that and the logger;
- ``all``: that and both.

A step is timed as the loop in train.py has it, the report included. Before a block ends, its loggers have to be done
with what they were given, and the time for that is added to the block's last step: work that a thread has not yet done
is not work that was saved. Ratios are to ``none``, by medians and by minima; and by the medians of each round's own
ratio, since a machine that others use changes more from round to round than loggers cost. ``--extra`` numbers are
added to each step's entry, for what stage 3, offload and the error meter report.
"""

from __future__ import annotations

import argparse
import io
import os
import platform
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import deepzero
from deepzero.config.run import LoggerConfig, ModelConfig
from deepzero.models.gpt import GPT
from deepzero.monitor.async_logger import Background
from deepzero.monitor.monitor import Monitor, Workload, make_monitor
from tools.bench.arguments import positive
from tools.bench.stats import median

WAYS: dict[str, tuple[str, ...] | None] = {
    "none": None, "jsonl": (), "wandb": ("wandb",), "tensorboard": ("tensorboard",), "all": ("wandb", "tensorboard"),
}  # fmt: skip
LIMIT = 1.01
"""The bar: all loggers on cost at most 1 % of step time."""

LAYERS = 2
TOKENS = 64


class Step:
    """One optimizer step of a GPT under stage 2, with the batch that makes it take long enough.

    Args:
        seconds: that a step should take.
    """

    def __init__(self, seconds: float) -> None:
        self.batch = 1
        config: dict[str, Any] = {
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 2},
            "gradient_accumulation_steps": 1,
        }
        torch.manual_seed(0)
        shape = ModelConfig(n_layer=LAYERS, n_head=4, n_embd=128, block_size=TOKENS)
        model = GPT(shape)
        self.engine, *_ = deepzero.initialize(model=model, config={**config, "train_batch_size": 1})
        self.tokens = torch.randint(shape.vocab_size, (1, TOKENS + 1))
        while (took := self.shortest()) < 0.9 * seconds:
            self.batch = max(self.batch + 1, round(self.batch * seconds / took))
            self.tokens = torch.randint(shape.vocab_size, (self.batch, TOKENS + 1))

    def shortest(self) -> float:
        """Seconds of the shortest of some steps: what the machine does when nobody disturbs it."""
        for _ in range(3):  # memory that is touched for the first time
            self()
        return min(_timed(self) for _ in range(10))

    def __call__(self) -> None:
        """Forward, backward, step."""
        self.engine.backward(self.engine(self.tokens[:, :-1].contiguous(), self.tokens[:, 1:].contiguous()))
        self.engine.step()


def _timed(act: Callable[[], Any]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def watcher(names: tuple[str, ...], folder: Path) -> Monitor:
    """A monitor as train.py has it, whose terminal is nobody's."""
    work = Workload(10**6, 1000, 1e6, 1, None, 1.0)
    cfg = LoggerConfig(names=names, wandb_mode="offline")
    return make_monitor(work, cfg, folder, {"bench": "monitoring"}, stream=io.StringIO())


def settle(monitor: Monitor) -> None:
    """Wait until all loggers are done with what they were given."""
    for sink in monitor.sinks:
        if isinstance(sink, Background):
            sink.settle()


def block(step: Step, monitor: Monitor | None, count: int, extra: dict[str, float]) -> list[float]:
    """Seconds of ``count`` steps under one way of watching."""
    seconds = []
    for number in range(count):
        started = time.perf_counter()
        step()
        if monitor is not None:
            record = {**vars(step.engine.last_step), **step.engine.step_metrics(), **extra}
            monitor.step(record, time.perf_counter() - started)
            if number == count - 1:
                settle(monitor)
        seconds.append(time.perf_counter() - started)
    return seconds


def measure(step: Step, rounds: int, count: int, extra: dict[str, float], folder: Path) -> dict[str, list[list[float]]]:
    """Way → round → seconds of each step."""
    monitors = {way: None if names is None else watcher(names, folder / way) for way, names in WAYS.items()}
    order, found = random.Random(0), {way: [] for way in WAYS}
    for number in range(rounds + 1):
        for way in order.sample(list(WAYS), len(WAYS)):
            seconds = block(step, monitors[way], count, extra)
            if number:  # the first round warms up: W&B's first row takes 0.3 s
                found[way].append(seconds)
    for monitor in filter(None, monitors.values()):
        monitor.stopped("the benchmark is over", {})
    return found


def table(found: dict[str, list[list[float]]]) -> list[str]:
    """One line for each way, and the verdict."""
    pooled = {way: [second for part in rounds for second in part] for way, rounds in found.items()}
    means = {way: [sum(part) / len(part) for part in rounds] for way, rounds in found.items()}
    lines = [f"{'':12}{'median ms':>11}{'min ms':>10}{'of medians':>12}{'of minima':>11}{'round by round':>16}"]
    ratios = {}
    for way, values in pooled.items():
        own = median([mine / plain for mine, plain in zip(means[way], means["none"], strict=True)])
        ratios[way] = median(values) / median(pooled["none"])
        lowest = min(values) / min(pooled["none"])
        lines.append(
            f"{way:12}{median(values) * 1e3:11.3f}{min(values) * 1e3:10.3f}{ratios[way]:12.4f}{lowest:11.4f}{own:16.4f}"
        )
    verdict = "pass" if ratios["all"] <= LIMIT else "FAIL"
    return [
        *lines,
        f"bar: all loggers on cost at most {LIMIT - 1:.0%}, by medians: {verdict} ({ratios['all'] - 1:+.2%})",
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=positive, default=50)
    parser.add_argument("--rounds", type=positive, default=20)
    parser.add_argument("--block", type=positive, default=20)
    parser.add_argument("--threads", type=positive, default=os.cpu_count() or 1)
    parser.add_argument("--extra", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    step = Step(arguments.step_ms / 1000)
    extra = {f"extra/number_{i}": i + 0.5 for i in range(arguments.extra)}
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {arguments.threads} threads, torch "
        f"{torch.__version__}; batch {step.batch} of {TOKENS} tokens, "
        f"{arguments.rounds} rounds of {arguments.block} steps"
    )
    with tempfile.TemporaryDirectory(prefix="deepzero-monitoring-") as folder:
        found = measure(step, arguments.rounds, arguments.block, extra, Path(folder))
    print("\n".join(table(found)), flush=True)
    step.engine.destroy()


if __name__ == "__main__":
    main()
