"""What stage 3's hooks cost per module, in microseconds: ``python -m tools.bench.hooks``.

One rank, so that nothing travels, and layers so small that the arithmetic is a few microseconds. Each number of layers
is timed with the plain module and under stage 3, alternately; printed is the difference of medians, divided by layers.
If the cost per module grows with the model, the hooks do something that they should not.

Two settings: all layers in one bucket, so that a hook finds its parameters there (the cost of asking), and an
bucket for each layer, so that every module fetches, prefetches and releases (the cost of acting).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import nn

import deepzero
from tools.bench.stats import median

WIDTH = 16


def layers(count: int) -> nn.Module:
    """``count`` linear layers of ``WIDTH`` x ``WIDTH`` in a row."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)))


def seconds(step: Callable[[], None], repeats: int) -> list[float]:
    """Wall-clock seconds of each call."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        step()
        times.append(time.perf_counter() - started)
    return times


def cost_per_module(count: int, bucket: int, repeats: int) -> float:
    """Microseconds that stage 3 adds to forward and backward of one layer."""
    x = torch.ones(1, WIDTH)
    plain = layers(count)
    config = {
        "train_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": bucket},
    }
    engine, *_ = deepzero.initialize(model=layers(count), config=config)

    def plain_pass() -> None:
        plain(x).sum().backward()
        plain.zero_grad(set_to_none=True)

    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(repeats):
        theirs += seconds(plain_pass, 1)
        started = time.perf_counter()
        engine(x).sum().backward()
        ours.append(time.perf_counter() - started)
        engine.step()
    engine.destroy()
    return (median(ours) - median(theirs)) / count * 1e6


def main() -> None:
    """Print one row for each number of layers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[50, 200, 800])
    parser.add_argument("--repeats", type=int, default=30)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("layers   one bucket   a bucket each   (microseconds per module, forward and backward together)")
    for count in arguments.layers:
        asking = cost_per_module(count, 10**9, arguments.repeats)
        acting = cost_per_module(count, WIDTH * WIDTH, arguments.repeats)
        print(f"{count:6d} {asking:14.1f} {acting:18.1f}", flush=True)


if __name__ == "__main__":
    main()
