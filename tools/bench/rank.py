"""One rank of one contender, as a process: ``python -m tools.bench.rank SPEC.json``.

The order is the same for everybody, so that times and memory mean the same:

    build       the fp32 model from the seed, then whatever the contender makes of it; *build seconds, build peak*
    warm up     untimed steps: first touches, compiled kernels, rebuilt buckets, the recorded plan of stage 3
    time        blocks of steps with nothing between them; *step peak*
    end         a delayed update is finished; what the host holds

After every one of them, and after every block, ``RANK.json`` is written anew, so that a process that is ended in the
middle has still said how far it came; ``done`` is written before the process group is left, so that a noisy exit loses
nothing. A sample is one step, after which this rank's own device is waited for as in a loop that logs its loss; or
(``each: false``) the mean of a block, in which nothing waits: a copy that runs into the next step is part of offload's
design, and a wait after every step would take that away.

Peak memory is the kernel's VmHWM (the process's largest resident size ever). It is reset between build and steps, where
the kernel allows that, to tell the two apart; the reported peak is the larger one. On CUDA it is what torch's allocator
reserved. What the imports alone take is not read here, since every package imports some of itself late: ``zero.py``
runs each variant once with a tiny model for that.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import pkgutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from deepzero.device import accelerator_of
from deepzero.monitor.metrics_file import put
from deepzero.offload.pinned_arena import available_host_bytes
from tools.bench.node_link import throttle
from tools.bench.workload import Workload, batch, build_model

CPU = torch.device("cpu")
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""One optimizer step on one micro-batch; returns this rank's loss, detached."""


@dataclass(frozen=True)
class Context:
    """What a builder gets."""

    work: Workload
    rank: int
    device: torch.device
    model: nn.Module  # fp32, the same values on every rank; on the CPU, unless the spec wants it drawn elsewhere


@dataclass(frozen=True)
class Built:
    """What a builder returns: steps by the name of the piece that they time (the floor has several), and facts.

    ``facts`` is called with ``build``, ``block`` and ``end``, and returns what is to be noted after that phase.
    """

    steps: dict[str, Step]
    facts: Callable[[str], dict[str, Any]] = lambda phase: {}
    inside: dict[str, list[float]] = field(default_factory=dict)
    """Parts of a step, to which the step itself adds seconds."""


class Memory:
    """Peaks of this rank on its device, and what the host has less since this object was made."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._before, self._taken = device, available_host_bytes() or 0, 0
        if device.type == "cuda":
            torch.cuda.init()  # its peaks cannot be reset before
        self.reset()

    def reset(self) -> None:
        """Start a new peak, where the kernel allows it; otherwise build and steps share one."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int:
        """Peak bytes since :meth:`reset`."""
        return torch.cuda.max_memory_reserved(self.device) if self.device.type == "cuda" else self.resident()

    def facts(self) -> dict[str, int]:
        """The most that the allocator had given out, and that the system had less, pinned pages included."""
        self._taken = max(self._taken, self._before - (available_host_bytes() or 0))
        device = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0
        return {"device_bytes": device, "host_bytes": self._taken, "resident_bytes": self.resident()}

    def resident(self) -> int:
        """This process's largest resident size, in bytes."""
        return accelerator_of(CPU).max_memory_allocated(CPU)


def draw_model(place: str, work: Workload, device: torch.device) -> nn.Module:
    """The model on the ``cpu``, or on the ``device`` (a CPU would take a minute for some billions of values).

    ``init-cpu`` and ``init-device``: inside ``zero.Init(dtype=bfloat16)``, whose shards wait on that side.
    """
    if place == "cpu":
        return build_model(work)
    with contextlib.ExitStack() as stack:
        if place.startswith("init-"):
            from deepzero.zero import Init

            remote = "cpu" if place == "init-cpu" else None
            stack.enter_context(Init(dtype=torch.bfloat16, remote_device=remote))
        stack.enter_context(device)
        return build_model(work)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed_block(
    step: Step, batches: list[list[torch.Tensor]], device: torch.device, each: bool
) -> tuple[list[float], list[torch.Tensor], float]:
    """Run one step for each batch, with nothing else between the marks of the clock.

    Returns:
        Seconds of each step, or their mean; this rank's losses; and the processor time of all threads together.
    """
    losses: list[torch.Tensor] = []
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
    synchronize(device)
    cpu_started, marks = time.process_time(), [time.perf_counter()]
    for number, (inputs, targets) in enumerate(batches, 1):
        losses.append(step(inputs, targets))
        if each or number == len(batches):
            synchronize(device)
            marks.append(time.perf_counter())
    cpu_seconds, steps = time.process_time() - cpu_started, 1 if each else len(batches)
    return [(end - start) / steps for start, end in itertools.pairwise(marks)], losses, cpu_seconds


def run(spec: dict[str, Any], rank: int, note: Callable[..., None]) -> None:
    """Everything from build to end; see the module's docstring. ``note`` adds facts to the file."""
    work, blocks, steps = Workload(**spec["work"]), spec["blocks"], spec["steps"]
    device = torch.device("cpu")
    if work.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.set_num_threads(work.threads)
    build = pkgutil.resolve_name(f"tools.bench.{spec['builder']}")
    tokens = np.load(spec["tokens"])

    link = throttle() if spec["between_nodes"] else None
    memory, started = Memory(device), time.perf_counter()
    # The builder may replace the model's parameters. That this context holds the model counts them twice only where
    # the builder has copied it, and then a user's script would hold it too.
    context = Context(work, rank, device, draw_model(spec["place"], work, device))
    built: Built = build(context, spec["options"])
    synchronize(device)
    facts = {"build_seconds": time.perf_counter() - started, **memory.facts(), **built.facts("build")}
    note(parameters=work.parameters, build_peak_bytes=memory.peak(), facts=facts)
    memory.reset()

    seconds: dict[str, list[float]] = {}
    cpu_seconds: dict[str, float] = {}
    all_losses: dict[str, list[float]] = {}
    for name, step in built.steps.items():
        seconds[name], all_losses[name], cpu_used, done = [], [], 0.0, 0
        for number, count in enumerate([spec["warmup"]] + [steps] * blocks):
            if number and spec["commands"] and rank == 0:  # links as fast as this block is to find them
                subprocess.run(spec["commands"][number - 1], check=True)
            if number and link is not None:
                link.bytes_per_second = spec["between_nodes"][number - 1]
            batches = [[t.to(device) for t in batch(work, tokens, done + i, rank)] for i in range(count)]
            took, losses, cpu = timed_block(step, batches, device, spec["each"])
            all_losses[name] += [float(loss) for loss in losses]
            done += count
            if not number:  # the warm-up
                for several in built.inside.values():
                    several.clear()
            else:
                seconds[name] += took
                cpu_used += cpu
                cpu_seconds[name] = cpu_used / (number * steps)
            facts.update({**memory.facts(), **built.facts("block")})
            measured = {"cpu_seconds": cpu_seconds, "step_peak_bytes": memory.peak()}
            note(**measured, seconds={**seconds, **built.inside}, losses=next(iter(all_losses.values())), facts=facts)
    facts.update(built.facts("end"))
    note(done=True, facts={**facts, **memory.facts()})


def main() -> None:
    """Read the spec, run, keep ``RANK.json`` beside it up to date."""
    if sys.platform == "linux":
        # Linux kills this rank when the benchmark that started it dies, even of a signal that cannot be caught; and
        # ends it before others when memory runs out: the one that waits for it has to tell.
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
    spec_file, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    known: dict[str, Any] = {"done": False}

    def note(**more: Any) -> None:
        known.update(more)
        put(spec_file.with_name(f"{rank}.json"), json.dumps(known))

    run(json.loads(spec_file.read_text()), rank, note)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
