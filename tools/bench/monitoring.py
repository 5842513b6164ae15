"""What watching a run costs, in step time: ``python -m tools.bench.monitoring``.

One rank with as many threads as it is given, so that nothing else waits and a logger's thread has to take its time from
somewhere. The batch is enlarged until a step takes ``--step-ms``. Five ways of watching the same engine take turns in
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

import io
import os
import random
import tempfile
import time
from pathlib import Path
from statistics import fmean, median

import torch

import deepzero
from deepzero.config.run import LoggerConfig, ModelConfig
from deepzero.models.gpt import GPT
from deepzero.monitor.async_logger import Background
from deepzero.monitor.monitor import Monitor, Workload, make_monitor
from deepzero.offload.optimizer_offload import cpu_threads
from deepzero.utils.closed_pipe import exit_with
from tools.bench.report import print_machine, table
from tools.bench.timing import natural, parser_of, timed

WAYS: dict[str, tuple[str, ...] | None] = {
    "none": None, "jsonl": (), "wandb": ("wandb",), "tensorboard": ("tensorboard",), "all": ("wandb", "tensorboard"),
}  # fmt: skip
LIMIT = 1.01  # the bar: all loggers on cost at most 1 % of step time
TOKENS = 64


class Step:
    """One optimizer step of a GPT under stage 2, with the batch that makes it take about ``seconds``."""

    def __init__(self, seconds: float) -> None:
        optimizer = {"type": "AdamW", "params": {"lr": 1e-4}}
        zero = {"gradient_clipping": 1.0, "zero_optimization": {"stage": 2}, "train_batch_size": 1}
        torch.manual_seed(0)
        shape = ModelConfig(n_layer=2, n_head=4, n_embd=128, block_size=TOKENS)
        self.engine, *_ = deepzero.initialize(model=GPT(shape), config={"optimizer": optimizer, **zero})
        self.batch, self.tokens = 1, torch.randint(shape.vocab_size, (1, TOKENS + 1))
        while (took := self.shortest()) < 0.9 * seconds:
            self.batch = max(self.batch + 1, round(self.batch * seconds / took))
            self.tokens = torch.randint(shape.vocab_size, (self.batch, TOKENS + 1))

    def shortest(self) -> float:
        """Seconds of the shortest of some steps: what the machine does when nobody disturbs it."""
        # The first three touch memory for the first time.
        return min([timed(self) for _ in range(13)][3:])

    def __call__(self) -> None:
        self.engine.backward(self.engine(self.tokens[:, :-1].contiguous(), self.tokens[:, 1:].contiguous()))
        self.engine.step()


def watcher(names: tuple[str, ...], folder: Path) -> Monitor:
    """A monitor as train.py has it, whose terminal is nobody's."""
    work = Workload(10**6, 1000, 1e6, 1, None, 1.0)
    cfg = LoggerConfig(names=names, wandb_mode="offline")
    return make_monitor(work, cfg, folder, {"bench": "monitoring"}, stream=io.StringIO())


def block(step: Step, monitor: Monitor | None, count: int, extra: dict[str, float]) -> list[float]:
    """Seconds of ``count`` steps under one way of watching."""
    seconds = []
    for number in range(count):
        started = time.perf_counter()
        step()
        if monitor is not None:
            record = {**vars(step.engine.last_step), **step.engine.step_metrics(), **extra}
            monitor.step(record, time.perf_counter() - started)
            for sink in monitor.sinks if number == count - 1 else ():
                if isinstance(sink, Background):
                    sink.settle()
        seconds.append(time.perf_counter() - started)
    return seconds


def measure(step: Step, rounds: int, count: int, extra: dict[str, float], folder: Path) -> dict[str, list[list[float]]]:
    """Way → round → seconds of each step."""
    monitors = {way: None if names is None else watcher(names, folder / way) for way, names in WAYS.items()}
    order, found = random.Random(0), {way: [] for way in WAYS}
    for number in range(rounds + 1):
        for way in order.sample(list(WAYS), len(WAYS)):
            seconds = block(step, monitors[way], count, extra)
            found[way] += [seconds] if number else []  # the first round warms up: W&B's first row takes 0.3 s
    for monitor in filter(None, monitors.values()):
        monitor.stopped("the benchmark is over", {})
    return found


def report(found: dict[str, list[list[float]]]) -> str:
    """One line for each way, and the verdict."""
    pooled = {way: [second for part in rounds for second in part] for way, rounds in found.items()}
    means = {way: [fmean(part) for part in rounds] for way, rounds in found.items()}
    ratios = {way: median(values) / median(pooled["none"]) for way, values in pooled.items()}
    rows = []
    for way, values in pooled.items():
        own = median([mine / plain for mine, plain in zip(means[way], means["none"], strict=True)])
        numbers = (ratios[way], min(values) / min(pooled["none"]), own)
        times = (f"{median(values) * 1e3:.3f}", f"{min(values) * 1e3:.3f}")
        rows.append([way, *times, *(f"{number:.4f}" for number in numbers)])
    verdict = f"{'pass' if ratios['all'] <= LIMIT else 'FAIL'} ({ratios['all'] - 1:+.2%})"
    lines = table(["way", "median ms", "min ms", "of medians", "of minima", "round by round"], rows)
    return f"{lines}\n\nbar: all loggers on cost at most {LIMIT - 1:.0%}, by medians: {verdict}"


def main() -> None:
    """Measure and print."""
    parser = parser_of(
        "monitoring", __doc__, step_ms=(50, "a step is made to take"), rounds=(20, "that count"),
        block=(20, "steps of one way in a row"), threads=(os.cpu_count() or 1, "of the step"),
    )  # fmt: skip
    parser.add_argument("--extra", type=natural, default=10, help="more numbers in each step's entry")
    options = parser.parse_args()
    with cpu_threads(options.threads), tempfile.TemporaryDirectory(prefix="deepzero-monitoring-") as folder:
        step = Step(options.step_ms / 1000)
        batches = f"batch {step.batch} of {TOKENS} tokens, {options.rounds} rounds of {options.block} steps"
        print_machine(f"{options.threads} threads; {batches}")
        extra = {f"extra/number_{i}": i + 0.5 for i in range(options.extra)}
        found = measure(step, options.rounds, options.block, extra, Path(folder))
    print(report(found), flush=True)
    step.engine.destroy()


if __name__ == "__main__":
    exit_with(main)
