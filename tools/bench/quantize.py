"""Quantisation against a plain copy, in one process: ``python -m tools.bench.quantize``.

Packing and unpacking move bytes and compute nothing that a processor would call work, so a copy of the same number of
bf16 elements is the measure: bytes read and written a second. Packing bf16 in 8 bits reads 2 bytes an element and
writes 1.002; the values are not counted twice though the largest of a block is looked for before its codes are made.

Every contender runs once in each round, in an order that moves on from round to round, so that a slow second of the
machine meets all of them. All buffers are kept, compiling takes place before the first round, and the first round is
not counted. On a GPU each run is waited for.

The bars: the compiled kernel packs and unpacks 8 bits with at least half the copy's bandwidth, on a GPU 70 %. They
compare medians.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from deepzero.comm.quantization import Format, Quantizer
from tools.bench.arguments import multiple_of, positive
from tools.bench.cpu_adam import verdict
from tools.bench.engines import interleaved
from tools.bench.report import machine_facts, table
from tools.bench.stats import median
from tools.bench.workload import Workload

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
BARS = {"cpu": 0.5, "cuda": 0.7}
"""Of the copy's bandwidth, for ``compiled`` with 8 bits."""


@dataclass(frozen=True)
class Contender:
    """One row of the table."""

    name: str
    run: Callable[[], object]
    moved_bytes: float
    """Read and written, in one run."""
    barred: bool = False


def contenders(numel: int, block: int, device: torch.device, kernels: Sequence[str]) -> list[Contender]:
    """The copy, and both directions of each kernel for each width and dtype, on buffers of their own, all touched."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(numel, generator=generator).to(device)
    source = wide.to(torch.bfloat16)
    target = torch.zeros_like(source)
    found = [Contender("copy", lambda: target.copy_(source), 4.0 * numel)]
    for bits in (8, 4):
        form = Format(bits, block)
        packed = form.open(torch.zeros(form.message_bytes(numel), dtype=torch.uint8, device=device), numel)
        Quantizer(form, "plain").pack(wide, packed)
        for name, dtype in DTYPES.items():
            values = wide if dtype == torch.float32 else source
            back = torch.zeros_like(values)
            moved = numel * (values.element_size() + bits / 8 + 4 / block)
            for kernel in kernels:
                quantizer = Quantizer(form, kernel)
                quantizer.prepare(2 * numel, [dtype], device)
                barred = kernel == "compiled" and bits == 8

                def pack(quantizer=quantizer, values=values, packed=packed) -> None:  # type: ignore[no-untyped-def]
                    quantizer.pack(values, packed)

                def unpack(quantizer=quantizer, values=back, packed=packed) -> None:  # type: ignore[no-untyped-def]
                    quantizer.unpack(packed, values)

                found.append(Contender(f"int{bits} pack {name} {kernel}", pack, moved, barred))
                found.append(Contender(f"int{bits} unpack {name} {kernel}", unpack, moved, barred))
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def report(runners: Sequence[Contender], seconds: dict[str, list[float]], least: float) -> str:
    """The table of times and bandwidths, with the bars. ``of copy`` is the ratio of bandwidths."""
    copy = runners[0]
    rows = []
    for runner in runners:
        middle, best = median(seconds[runner.name]), min(seconds[runner.name])
        speed = runner.moved_bytes / middle
        ratio = speed / (copy.moved_bytes / median(seconds[copy.name]))
        best_ratio = runner.moved_bytes / best / (copy.moved_bytes / min(seconds[copy.name]))
        bar = f"{least:.2f} {verdict(ratio >= least)}" if runner.barred else ""
        times = [f"{middle * 1e3:.2f}", f"{best * 1e3:.2f}", f"{speed / 1e9:.1f}"]
        rows.append([runner.name, *times, f"{ratio:.2f}", f"{best_ratio:.2f}", bar])
    return table(["contender", "median ms", "best ms", "GB/s", "of copy", "of copy, bests", "bar"], rows)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print. Returns the exit status: 0, however the bars stand, for times are the machine's too."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--numel", type=multiple_of(64), default=1 << 25, help="elements of a message, a multiple of 64"
    )
    parser.add_argument("--block", type=multiple_of(64), default=2048, help="elements that share a scale")
    parser.add_argument("--rounds", type=positive, default=15)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=positive, default=os.cpu_count() or 1, help="default: all cores")
    parser.add_argument("--kernels", nargs="+", choices=("plain", "compiled"), default=["plain", "compiled"])
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this machine, or this build of torch, has no GPU")
    device = torch.device(options.device)
    before = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    load = os.getloadavg()[0]
    try:
        runners = contenders(options.numel, options.block, device, options.kernels)
        seconds = interleaved({one.name: one.run for one in runners}, options.rounds, partial(_wait, device))
    finally:
        torch.set_num_threads(before)
    print("\n".join(f"- {fact}" for fact in machine_facts(Workload())))
    where = f"{options.threads} threads" if device.type == "cpu" else torch.cuda.get_device_name()
    run = f"{options.numel:,} elements, blocks of {options.block}, {where}, {options.rounds} rounds"
    print(f"- {run}; load average before: {load:.2f}\n")
    print(report(runners, seconds, BARS[device.type]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
