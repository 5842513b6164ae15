"""CPUAdam against its peers and against a plain copy, in one process: ``python -m tools.bench.cpu_adam``.

The step of ZeRO-Offload: a bf16 gradient comes in, fp32 parameter and moments are updated, a bf16 copy of the parameter
goes out. Every contender works on the same tensors, one step each in turn:

- ``deepspeed``: DeepSpeedCPUAdam, between a cast of the gradient into a kept fp32 tensor and one of the parameter;
- ``torch``: ``torch.optim.AdamW(fused=True)`` between the same casts;
- ``chunked`` and ``compiled``: CPUAdam's kernels;
- ``copy``: ``dst.copy_(src)`` of the bytes that a step cannot avoid, 28 for each element (a copy of n bytes moves 2 n).

The bars compare medians. Compiling takes place before the first round, and the first round is not counted.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable, Sequence
from statistics import median

import torch

from deepzero.offload.optimizer_offload import cpu_threads
from deepzero.ops import CPUAdam
from deepzero.utils.closed_pipe import exit_with
from tools.bench.engines import quiet_deepspeed
from tools.bench.report import print_machine, table
from tools.bench.timing import interleaved, parser_of

OURS = ("chunked", "compiled")
NAMES = ("deepspeed", "torch", *OURS, "copy")
BYTES_PER_ELEMENT = 28  # gradient 2, parameter and moments 12 read and 12 written, output 2
BARS = (
    ("compiled", "deepspeed", 0.60), ("compiled", "torch", 0.60), ("chunked", "deepspeed", 0.80),
    ("chunked", "torch", 0.80), ("compiled", "copy", 1 / 0.9),
)  # fmt: skip
"""(who, over whom, at most): ratios of medians. The last one is 90 % of the copy's bandwidth."""
SETTINGS = {"lr": 1e-3, "weight_decay": 0.1}


def contenders(names: Sequence[str], n: int) -> dict[str, Callable[[], object]]:
    """One step of each, ready to run, on ``n`` elements that all share: all touched, gradient and output in bf16."""
    generator = torch.Generator().manual_seed(0)
    param = torch.randn(n, generator=generator).requires_grad_()
    grad = torch.randn(n, generator=generator).mul_(1e-2).to(torch.bfloat16)
    # The fp32 gradient is kept by those who need one: fresh memory would cost them more.
    moments, grad_fp32, out = (torch.zeros(n), torch.zeros(n)), grad.float(), grad.clone()

    def adopt(optimizer: torch.optim.Optimizer, step: float | torch.Tensor) -> None:
        optimizer.state[param] = {"step": step, "exp_avg": moments[0], "exp_avg_sq": moments[1]}

    def ours(kernel: str) -> Callable[[], object]:
        optimizer = CPUAdam([param], kernel=kernel, **SETTINGS)
        adopt(optimizer, torch.zeros(()))
        optimizer.prepare(torch.bfloat16, torch.bfloat16)
        return lambda: optimizer.step([grad], [out])

    def peer(name: str) -> Callable[[], object]:
        if name == "torch":
            optimizer: torch.optim.Optimizer = torch.optim.AdamW([param], fused=True, **SETTINGS)
        else:
            with warnings.catch_warnings():
                quiet_deepspeed("cpu")
                from deepspeed.ops.adam import DeepSpeedCPUAdam  # its first import compiles it

                optimizer = DeepSpeedCPUAdam([param], adamw_mode=True, **SETTINGS)
        adopt(optimizer, torch.zeros(()) if name == "torch" else 0)

        @torch.no_grad()
        def step() -> None:
            param.grad = grad_fp32.copy_(grad)
            optimizer.step()
            param.grad = None
            out.copy_(param)

        return step

    def copy() -> Callable[[], object]:
        source = torch.ones(n * BYTES_PER_ELEMENT // 2, dtype=torch.uint8)
        target = torch.zeros_like(source)
        return lambda: target.copy_(source)

    return {name: copy() if name == "copy" else ours(name) if name in OURS else peer(name) for name in names}


def report(seconds: dict[str, list[float]], n: int) -> str:
    """The table of times, and the bars."""
    middle = {name: median(values) for name, values in seconds.items()}
    peers = [name for name in ("deepspeed", "torch", "copy") if name in middle]
    rows = []
    for name, values in seconds.items():
        speed = BYTES_PER_ELEMENT * n / middle[name] / 1e9
        times = [f"{middle[name] * 1e3:.1f}", f"{min(values) * 1e3:.1f}", f"{speed:.1f}"]
        rows.append([name, *times, *(f"{middle[name] / middle[peer]:.2f}" for peer in peers)])
    bars = [
        [who, whom, f"{ratio:.2f}", f"{limit:.2f}", "met" if ratio <= limit else "MISSED"]
        for who, whom, limit in BARS
        if who in middle and whom in middle and (ratio := middle[who] / middle[whom])
    ]
    head = ["contender", "median ms", "best ms", "GB/s of 28 B", *(f"/ {peer}" for peer in peers)]
    return table(head, rows) + "\n\n" + table(["who", "over", "ratio", "limit", "verdict"], bars)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Returns the exit status: 0, however the bars stand, for times are the machine's too."""
    parser = parser_of(
        "cpu_adam", __doc__,
        elements=(50_000_000, "updated"), rounds=(40, "that count"), threads=(os.cpu_count() or 1, "that step"),
    )  # fmt: skip
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES), help="these contenders")
    options = parser.parse_args(arguments)
    names = list(options.only)
    if "deepspeed" in names and importlib.util.find_spec("deepspeed") is None:
        names.remove("deepspeed")
        print("DeepSpeed is not installed: its DeepSpeedCPUAdam is left out")
    print_machine(f"{options.elements:,} elements, {options.threads} threads, {options.rounds} rounds")
    with cpu_threads(options.threads):
        seconds = interleaved(contenders(names, options.elements), options.rounds)
    print(report(seconds, options.elements))
    return 0


if __name__ == "__main__":
    exit_with(main)
