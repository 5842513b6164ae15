"""One rank of one contender, as a process: ``python -m tools.bench.rank SPEC.json``.

The order is the same for everybody, so that times and memory mean the same:

    import      torch, the model's code and the contender's own packages
    build       the fp32 model from the seed, then whatever the contender makes of it; *build peak*
    warm up     untimed steps: first touches, compiled kernels, rebuilt buckets
    time        steps one after the other with nothing between them; *step peak*
    write       one JSON file, before the process group is left, so that a noisy exit loses nothing

Peak memory is the kernel's VmHWM (the process's largest resident size ever). It is reset between build and steps, where
the kernel allows that, to tell the two apart; the reported peak is the larger one. What the imports alone take is not
read here, since every package imports some of itself late: ``zero.py`` runs each variant once with a tiny model for
that.
On CUDA the peak is what torch's allocator reserved.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tools.bench.group import barrier, leave
from tools.bench.workload import Workload, batch, build_model

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""One optimizer step on one micro-batch; returns this rank's loss, detached."""


@dataclass(frozen=True)
class Context:
    """What a builder gets."""

    work: Workload
    rank: int
    device: torch.device
    model: nn.Module
    """fp32, on the CPU, the same values on every rank."""


def peak_resident() -> int:
    """The process's largest resident size in bytes: VmHWM, which can be reset, where there is a ``/proc``."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except FileNotFoundError:
        pass
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


def reset_peak(device: torch.device) -> None:
    """Start a new peak, where the kernel allows it; otherwise build and steps share one."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak(device: torch.device) -> int:
    """Peak bytes of this rank since :func:`reset_peak`."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else peak_resident()


def pick_device(work: Workload, local_rank: int) -> torch.device:
    """This rank's device, made current; on CPU the number of threads is set too."""
    if work.device == "cuda":
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    torch.set_num_threads(work.threads)
    return torch.device("cpu")


def timed_steps(
    step: Step, context: Context, tokens: np.ndarray, warmup: int, steps: int
) -> tuple[list[float], list[float], float]:
    """Run ``warmup + steps`` steps.

    Returns:
        Seconds of each timed step; this rank's loss of every step, the untimed ones included; and the processor time of
        one timed step, over all threads of this process.
    """
    seconds: list[float] = []
    losses: list[torch.Tensor] = []
    cpu_start = 0.0
    for number in range(warmup + steps):
        inputs, targets = (t.to(context.device) for t in batch(context.work, tokens, number, context.rank))
        if number == warmup:
            barrier()
            _synchronize(context.device)
            cpu_start = time.process_time()
        # Only the wait for this rank's own device stands between two steps, as in a training loop that logs its loss.
        start = time.perf_counter()
        losses.append(step(inputs, targets))
        _synchronize(context.device)
        if number >= warmup:
            seconds.append(time.perf_counter() - start)
    cpu_seconds = (time.process_time() - cpu_start) / steps
    return seconds, [float(loss) for loss in losses], cpu_seconds


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def run(spec: dict[str, Any], rank: int) -> dict[str, Any]:
    """Everything between import and write; see the module's docstring."""
    work = Workload(**spec["work"])
    device = pick_device(work, int(os.environ["LOCAL_RANK"]))
    module, function = spec["builder"].split(":")
    build = getattr(importlib.import_module(f"tools.bench.{module}"), function)
    tokens = np.load(spec["tokens"])
    context = Context(work, rank, device, build_model(work))
    built = build(context, spec["options"])
    pieces: dict[str, Step] = built if isinstance(built, dict) else {"step": built}
    # The builder may have replaced the model's parameters; holding the context's model as well would count it twice
    # only if the builder had copied it, which a user's script would do too.
    build_peak = peak(device)
    reset_peak(device)

    seconds: dict[str, list[float]] = {}
    losses: dict[str, list[float]] = {}
    cpu_seconds: dict[str, float] = {}
    for name, step in pieces.items():
        barrier()
        timed = timed_steps(step, context, tokens, spec["warmup"], spec["steps"])
        seconds[name], losses[name], cpu_seconds[name] = timed
    return {
        "seconds": seconds,
        "losses": next(iter(losses.values())),
        "cpu_seconds": cpu_seconds,
        "build_peak_bytes": build_peak,
        "step_peak_bytes": peak(device),
        "parameters": sum(p.numel() for p in context.model.parameters()),
    }


def end_with_parent() -> None:
    """Ask Linux to kill this rank when the benchmark that started it dies, even of a signal it cannot catch."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def main() -> None:
    """Read the spec, run, write ``RANK.json`` beside it."""
    end_with_parent()
    spec_file = Path(sys.argv[1])
    rank = int(os.environ["RANK"])
    result = run(json.loads(spec_file.read_text()), rank)
    target = spec_file.parent / f"{rank}.json"
    partial = target.with_suffix(".partial")
    partial.write_text(json.dumps(result))
    partial.replace(target)
    leave()


if __name__ == "__main__":
    main()
