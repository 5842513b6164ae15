"""What stage 3's hooks cost per module, in microseconds: ``python -m tools.bench.hooks``.

One rank, so that nothing travels, and layers so small that the arithmetic is a few microseconds. Each number of layers
is timed with the plain module and under stage 3, alternately; printed is the difference of medians, divided by layers.
If the cost per module grows with the model, the hooks do something that they should not.

Two settings: all layers in one bucket, so that a hook finds its parameters there (the cost of asking), and a bucket for
each layer, so that every module fetches, prefetches and releases (the cost of acting).
"""

from __future__ import annotations

from statistics import median

import torch
from torch import nn

import deepzero
from deepzero.offload.optimizer_offload import cpu_threads
from deepzero.utils.closed_pipe import exit_with
from tools.bench.report import columns
from tools.bench.timing import parser_of, positive, timed

WIDTH = 16


def layers(count: int) -> nn.Module:
    """``count`` linear layers of ``WIDTH`` x ``WIDTH`` in a row."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)))


def cost_per_module(count: int, bucket: int, repeats: int) -> float:
    """Microseconds that stage 3 adds to forward and backward of one layer."""
    x, plain = torch.ones(1, WIDTH), layers(count)
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": bucket}
    optimizer = {"type": "SGD", "params": {"lr": 0.0}}
    config = {"train_batch_size": 1, "optimizer": optimizer, "zero_optimization": zero}
    engine, *_ = deepzero.initialize(model=layers(count), config=config)
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(repeats):
        theirs.append(timed(lambda: (plain(x).sum().backward(), plain.zero_grad(set_to_none=True))))
        ours.append(timed(lambda: engine(x).sum().backward()))
        engine.step()
    engine.destroy()
    return (median(ours) - median(theirs)) / count * 1e6


def main() -> None:
    """Print one row for each number of layers."""
    parser = parser_of("hooks", __doc__, repeats=(30, "passes of each kind"))
    parser.add_argument("--layers", type=positive, nargs="+", default=[50, 200, 800])
    options = parser.parse_args()
    with cpu_threads(1):
        buckets = {"one bucket": 10**9, "a bucket each": WIDTH * WIDTH}
        rows = [(n, {name: cost_per_module(n, size, options.repeats) for name, size in buckets.items()})
                for n in options.layers]  # fmt: skip
    cells = {name: lambda row, name=name: f"{row[1][name]:.1f}" for name in buckets}
    print("microseconds per module, forward and backward together")
    print(columns(rows, layers=lambda row: str(row[0]), **cells))


if __name__ == "__main__":
    exit_with(main)
