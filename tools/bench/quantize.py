"""Quantisation against a plain copy, in one process: ``python -m tools.bench.quantize``.

Packing and unpacking move bytes and compute nothing that a processor would call work, so a copy of the same number of
bf16 elements is the measure: bytes read and written a second. Packing bf16 in 8 bits reads 2 bytes an element and
writes 1.002; the values are not counted twice though the largest of a block is looked for before its codes are made.

Every contender runs once in each round. All buffers are kept, compiling takes place before the first round, and the
first round is not counted. On a GPU each run is waited for.

The bars: the compiled kernel packs and unpacks 8 bits with at least half the copy's bandwidth, on a GPU 70 %. They
compare medians.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch

from deepzero.comm.quantization import Format, Quantizer
from deepzero.offload.optimizer_offload import cpu_threads
from deepzero.utils.closed_pipe import exit_with
from tools.bench.rank import synchronize
from tools.bench.report import print_machine, table
from tools.bench.timing import interleaved, multiple_of, parser_of

BARS = {"cpu": 0.5, "cuda": 0.7}  # of the copy's bandwidth, for `compiled` with 8 bits


Runs = dict[str, tuple[Callable[[], object], float]]
"""Contender to what it does, and to the bytes that it reads and writes."""


def contenders(numel: int, block: int, device: torch.device, kernels: Sequence[str]) -> Runs:
    """The copy, and both directions of each kernel for each width and dtype, on buffers of their own, all touched."""
    wide = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(device)
    source = wide.to(torch.bfloat16)
    found: Runs = {"copy": (partial(torch.zeros_like(source).copy_, source), 4.0 * numel)}
    for bits in (8, 4):
        form = Format(bits, block)
        packed = form.open(torch.zeros(form.message_bytes(numel), dtype=torch.uint8, device=device), numel)
        Quantizer(form, "plain").pack(wide, packed)
        for name, values in (("bf16", source), ("fp32", wide)):
            back = torch.zeros_like(values)
            moved = numel * (values.element_size() + bits / 8 + 4 / block)
            for kernel in kernels:
                quantizer = Quantizer(form, kernel)
                quantizer.prepare(2 * numel, [values.dtype], device)
                pack, unpack = partial(quantizer.pack, values, packed), partial(quantizer.unpack, packed, back)
                found[f"int{bits} pack {name} {kernel}"] = pack, moved
                found[f"int{bits} unpack {name} {kernel}"] = unpack, moved
    return found


def report(runs: Runs, seconds: dict[str, list[float]], least: float) -> str:
    """The table of times and bandwidths, with the bars. ``of copy`` is the ratio of bandwidths."""
    copied, rows = runs["copy"][1], []
    for name, (_, moved) in runs.items():
        middle, best = median(seconds[name]), min(seconds[name])
        ratio = moved / middle / (copied / median(seconds["copy"]))
        best_ratio = moved / best / (copied / min(seconds["copy"]))
        barred = name.startswith("int8") and name.endswith("compiled")
        bar = f"{least:.2f} {'met' if ratio >= least else 'MISSED'}" if barred else ""
        times = [f"{middle * 1e3:.2f}", f"{best * 1e3:.2f}", f"{moved / middle / 1e9:.1f}"]
        rows.append([name, *times, f"{ratio:.2f}", f"{best_ratio:.2f}", bar])
    return table(["contender", "median ms", "best ms", "GB/s", "of copy", "of copy, bests", "bar"], rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Returns the exit status: 0, however the bars stand, for times are the machine's too."""
    parser = parser_of("quantize", __doc__, rounds=(15, "that count"), threads=(os.cpu_count() or 1, "on CPU"))
    add = parser.add_argument
    add("--numel", type=multiple_of(64), default=1 << 25, help="elements of a message, a multiple of 64")
    add("--block", type=multiple_of(64), default=2048, help="elements that share a scale")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--kernels", nargs="+", choices=("plain", "compiled"), default=["plain", "compiled"])
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this machine, or this build of torch, has no GPU")
    device = torch.device(options.device)
    where = f"{options.threads} threads" if device.type == "cpu" else torch.cuda.get_device_name()
    print_machine(f"{options.numel:,} elements, blocks of {options.block}, {where}, {options.rounds} rounds")
    with cpu_threads(options.threads):
        runs = contenders(options.numel, options.block, device, options.kernels)
        acts = {name: act for name, (act, _) in runs.items()}
        seconds = interleaved(acts, options.rounds, partial(synchronize, device))
    print(report(runs, seconds, BARS[device.type]))
    return 0


if __name__ == "__main__":
    exit_with(main)
