"""CPUAdam against its peers and against a plain copy, in one process: ``python -m tools.bench.cpu_adam``.

The step of ZeRO-Offload: a bf16 gradient comes in, fp32 parameter and moments are updated, a bf16 copy of the parameter
goes out. Every contender works on the same tensors, one step each in turn, in an order that moves on from round to
round, so that a slow second of the machine meets all of them:

- ``deepspeed``: DeepSpeedCPUAdam, between a cast of the gradient into a kept fp32 tensor and one of the parameter;
- ``torch``: ``torch.optim.AdamW(fused=True)`` between the same casts;
- ``chunked``, ``numba`` and ``compiled``: CPUAdam's kernels;
- ``copy``: ``dst.copy_(src)`` of the bytes that a step cannot avoid, 28 for each element (a copy of n bytes moves 2 n).

The bars compare medians. Compiling takes place before the first round, and the first round is not counted.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from deepzero.ops import CPUAdam
from tools.bench.engines import interleaved
from tools.bench.report import machine_facts, table
from tools.bench.stats import median
from tools.bench.workload import Workload

OURS = ("chunked", "numba", "compiled")
NAMES = ("deepspeed", "torch", *OURS, "copy")
BYTES_PER_ELEMENT = 28
"""Gradient 2, parameter and moments 12 read and 12 written, output 2."""

BARS = (
    ("compiled", "deepspeed", 0.60),
    ("compiled", "torch", 0.60),
    ("numba", "deepspeed", 0.80),
    ("numba", "torch", 0.80),
    ("chunked", "deepspeed", 0.80),
    ("chunked", "torch", 0.80),
    ("compiled", "copy", 1 / 0.9),
)
"""(who, over whom, at most): ratios of medians. The last one is 90 % of the copy's bandwidth."""


@dataclass(frozen=True)
class Tensors:
    """What all contenders share."""

    param: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    grad: torch.Tensor
    """bf16."""
    grad_fp32: torch.Tensor
    """Kept by those who need it: fresh memory would cost them more."""
    out: torch.Tensor
    """bf16."""

    @classmethod
    def make(cls, n: int) -> Tensors:
        """Of ``n`` elements, all touched."""
        generator = torch.Generator().manual_seed(0)
        param = torch.randn(n, generator=generator).requires_grad_()
        grad = torch.randn(n, generator=generator).mul_(1e-2).to(torch.bfloat16)
        return cls(param, torch.zeros(n), torch.zeros(n), grad, grad.float(), grad.clone())

    def adopt(self, optimizer: torch.optim.Optimizer, step: float | torch.Tensor) -> None:
        """Make the shared moments the optimizer's state."""
        optimizer.state[self.param] = {"step": step, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}


def contender(name: str, shared: Tensors) -> Callable[[], None]:
    """One step of ``name``, ready to run."""
    if name == "copy":
        source = torch.ones(shared.param.numel() * BYTES_PER_ELEMENT // 2, dtype=torch.uint8)
        target = torch.zeros_like(source)

        def copy() -> None:
            target.copy_(source)

        return copy
    settings = {"lr": 1e-3, "weight_decay": 0.1}
    if name in OURS:
        ours = CPUAdam([shared.param], kernel=name, **settings)  # type: ignore[arg-type]
        shared.adopt(ours, torch.zeros(()))
        ours.prepare(torch.bfloat16, torch.bfloat16)
        return lambda: ours.step([shared.grad], [shared.out])
    if name == "torch":
        peer: torch.optim.Optimizer = torch.optim.AdamW([shared.param], fused=True, **settings)
        shared.adopt(peer, torch.zeros(()))
    else:
        peer = deepspeed_adam(shared.param, settings)
        shared.adopt(peer, 0)

    @torch.no_grad()
    def step() -> None:
        shared.param.grad = shared.grad_fp32.copy_(shared.grad)
        peer.step()
        shared.param.grad = None
        shared.out.copy_(shared.param)

    return step


def deepspeed_adam(param: torch.Tensor, settings: dict[str, float]) -> torch.optim.Optimizer:
    """DeepSpeedCPUAdam. Its first import compiles it."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from deepspeed.ops.adam import DeepSpeedCPUAdam
        from deepspeed.utils import logger

        logger.setLevel("ERROR")
        optimizer: torch.optim.Optimizer = DeepSpeedCPUAdam([param], adamw_mode=True, **settings)
    return optimizer


def measure(names: Sequence[str], n: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each round, for each contender."""
    shared = Tensors.make(n)
    return interleaved({name: contender(name, shared) for name in names}, rounds)


def report(seconds: dict[str, list[float]], n: int) -> str:
    """The table of times, and the bars."""
    middle = {name: median(values) for name, values in seconds.items()}
    peers = [name for name in ("deepspeed", "torch", "copy") if name in middle]
    rows = [
        [
            name,
            f"{middle[name] * 1e3:.1f}",
            f"{min(values) * 1e3:.1f}",
            f"{BYTES_PER_ELEMENT * n / middle[name] / 1e9:.1f}",
            *(f"{middle[name] / middle[peer]:.2f}" for peer in peers),
        ]
        for name, values in seconds.items()
    ]
    bars = [
        [who, whom, f"{middle[who] / middle[whom]:.2f}", f"{limit:.2f}", verdict(middle[who] / middle[whom] <= limit)]
        for who, whom, limit in BARS
        if who in middle and whom in middle
    ]
    head = ["contender", "median ms", "best ms", "GB/s of 28 B", *(f"/ {peer}" for peer in peers)]
    return table(head, rows) + "\n\n" + table(["who", "over", "ratio", "limit", "verdict"], bars)


def verdict(holds: bool) -> str:
    """One word."""
    return "met" if holds else "MISSED"


def main(arguments: list[str] | None = None) -> int:
    """Measure and print. Returns the exit status: 0, however the bars stand, for times are the machine's too."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--elements", type=int, default=50_000_000)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="default: all cores")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES), help="these contenders")
    options = parser.parse_args(arguments)
    names = list(options.only)
    if "deepspeed" in names and importlib.util.find_spec("deepspeed") is None:
        names.remove("deepspeed")
        print("DeepSpeed is not installed: its DeepSpeedCPUAdam is left out")
    before = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    load = os.getloadavg()[0]
    try:
        seconds = measure(names, options.elements, options.rounds)
    finally:
        torch.set_num_threads(before)
    print("\n".join(f"- {fact}" for fact in machine_facts(Workload())))
    run = f"{options.elements:,} elements, {options.threads} threads, {options.rounds} rounds"
    print(f"- {run}; load average before: {load:.2f}\n")
    print(report(seconds, options.elements))
    return 0


if __name__ == "__main__":
    sys.exit(main())
