"""A GPU's day: what wants to be known on one GPU, in one call and one page: ``python -m tools.bench.gpu all``.

    tests      pytest -m gpu: bits against plain torch, two ranks on the one GPU, waits of a step, streams, offload
    stages     stages 1 to 3 on one rank against a plain loop, FSDP2 and DeepSpeed: tokens/s, MFU, peak memory
    offload    speed, the hidden part of each copy and the largest model, against DeepSpeed
    quantize   the kernels that pack and unpack, against the bandwidth of a copy
    trace      a traced run of ``train.py``: what limits it, and the allocator's memory snapshot

Every part is a program of its own with a time limit. What it has printed is kept under ``--out`` with its status and
the commit, so that ``all`` goes on with the parts that are not there yet, after an error or a machine that went away;
a part that is named runs anew. ``--page`` writes the page, of all parts that there are, to docs/benchmarks.

Examples::

    python -m tools.bench.gpu all --page            # the measurement of record, less than ten minutes
    python -m tools.bench.gpu quantize trace        # these two again
    python -m tools.bench.gpu all --quick           # tiny models, on a CPU too: does everything run?

Exit status: 0; 1 when a part failed; 2 for bad options, or without a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepzero.device import installed
from deepzero.monitor.metrics_file import put
from deepzero.utils.closed_pipe import exit_with
from tools.bench import report
from tools.bench.launch import ROOT, end_all, end_on_signals, environment_of, start, tail
from tools.bench.timing import parser_of
from tools.bench.workload import Workload

Command = list[str]
TAIL_CHARACTERS = 12_000  # of what a part has printed, on the page
STAGES = ",".join(["plain", "fsdp2:bf16", *(f"deepzero{s}:overlap,deepspeed{s}:torch-adam" for s in (1, 2, 3))])
"""Nobody has anybody to talk to: one variant each."""
GPU_TESTS = ("tests/gpu", "tests/compat/test_comm.py", "tests/unit/test_cpu_adam_step.py",
             "tests/unit/test_optimizer_state.py")  # fmt: skip
"""Where there are tests marked ``gpu``: to collect all others would take longer than to run these."""


@dataclass(frozen=True)
class Part:
    """A title, a limit in seconds, and the programs: words behind ``python``, given --quick, cuda or cpu, a folder."""

    title: str
    seconds: float
    programs: Callable[[bool, str, Path], list[Command]]


def _tests(quick: bool, device: str, folder: Path) -> list[Command]:
    # It is bits that are asked for here: a warning of another torch is no failure, nor is a plugin that is not there.
    words = ["-q", "-p", "no:cacheprovider", "-W", "default", "-o", "addopts=--strict-markers"]
    if importlib.util.find_spec("xdist"):  # a test of small kernels leaves a GPU idle, and most of a machine's cores
        words += ["-n", str(min(8, os.cpu_count() or 1))]
    return [["-m", "pytest", "-m", "gpu", *GPU_TESTS, *words]]


def _stages(quick: bool, device: str, folder: Path) -> list[Command]:
    words = ["-m", "tools.bench.zero", "--device", device, "--ranks", "1", "--rounds", "1", "--contenders", STAGES]
    sizes = {"layers": 24, "width": 1024, "heads": 16, "vocab": 50304, "tokens": 1024, "micro-batch": 8, "steps": 20}
    full = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    return [[*words, *(["--quick"] if quick else full), "--timeout", "60", "--json", str(folder / "stages.json")]]


def _offload(quick: bool, device: str, folder: Path) -> list[Command]:
    words = ["--out", str(folder / "offload"), "--budget-seconds", "200", "--rounds", "1"]
    # 0.5 billion parameters: a contender needs half the time that it needs for the 1.4 billion of the default.
    return [["-m", "tools.bench.offload", *words, *(["--quick"] if quick else ["--layers", "12", "--width", "1536"])]]


def _quantize(quick: bool, device: str, folder: Path) -> list[Command]:
    words = ["--numel", "65536", "--rounds", "2", "--kernels", "plain"] if quick else []
    return [["-m", "tools.bench.quantize", "--device", device, *words]]


def _trace(quick: bool, device: str, folder: Path) -> list[Command]:
    run = folder / f"run-{time.time_ns()}"
    model = ["model=gpt2_124m", "train.steps=12", "train.eval_every=0", "train.sample_tokens=0"]
    model += ["train_micro_batch_size_per_gpu=4", "train_batch_size=4"]
    words = ["profiler=torch", f"launch.device={device}", "launch.nproc=1", "zero.stage=3", f"hydra.run.dir={run}"]
    first = ["train.py", *(["experiment=smoke"] if quick else model), *words]
    return [first, ["-m", "tools.trace_report", str(run)]]


PARTS = {
    "tests": Part("Tests on the GPU", 120.0, _tests),
    "stages": Part("Stages 1 to 3 on one rank", 170.0, _stages),
    "offload": Part("Offload", 210.0, _offload),
    "quantize": Part("Quantisation", 40.0, _quantize),
    "trace": Part("A traced run", 60.0, _trace),
}


def run_program(command: Command, log: Path, limit: float, device: str) -> str | None:
    """Run it, its output behind ``log``'s; says what was wrong, None: nothing."""
    process = start([sys.executable, *command], log, ROOT, environment_of(device))
    try:
        status = process.wait(limit)
        return None if status == 0 else f"ended with status {status}"
    except subprocess.TimeoutExpired:
        return f"not done after {limit:.0f} s"
    finally:
        end_all([process])


class Day:
    """The results under ``out``, which another call has begun, perhaps."""

    def __init__(self, out: Path, quick: bool, device: str) -> None:
        self.out, self.quick, self.device = out.resolve(), quick, device
        self.out.mkdir(parents=True, exist_ok=True)
        self.file = self.out / f"results-{device}{'-quick' if quick else ''}.json"
        self.found: dict[str, dict[str, Any]] = json.loads(self.file.read_text()) if self.file.exists() else {}

    def is_done(self, name: str) -> bool:
        """Whether the part has worked, with this very code."""
        known = self.found.get(name, {"error": "not run", "commit": ""})
        return known["error"] is None and known["commit"] == report.commit()

    def run(self, name: str, left: float) -> None:
        """Run a part in at most ``left`` seconds, and note what came of it."""
        part, began, error, said = PARTS[name], time.monotonic(), None, []
        for number, command in enumerate(part.programs(self.quick, self.device, self.out)):
            log = self.out / f"{name}-{number}.log"
            log.unlink(missing_ok=True)
            limit = min(part.seconds, left) - (time.monotonic() - began)
            error = run_program(command, log, max(1.0, limit), self.device)
            said.append(tail(log, TAIL_CHARACTERS))
            if error is not None:
                break
        known = {"error": error, "said": said, "seconds": time.monotonic() - began, "commit": report.commit()}
        self.found[name] = known
        put(self.file, json.dumps(self.found, indent=1))
        print(f"{name}: {error or 'done'} ({known['seconds']:.0f} s)", flush=True)

    def page(self) -> str:
        """All parts that there are, in their order, and which are not."""
        facts = report.gpu_facts(Workload(device=self.device), self.quick)
        sections = []
        for name, part in PARTS.items():
            known = self.found.get(name)
            if known is None:
                sections.append((part.title, "It has not run."))
                continue
            how = f"**{known['error']}**" if known["error"] else "It has run to its end"
            how += f", in {known['seconds']:.0f} s, at commit {known['commit']}."
            sections.append((part.title, "\n\n".join([how, *map(report.block, known["said"])])))
        text = report.page_text(facts, sections, report.command_line("gpu"))
        return text.replace(f"{self.out}{os.sep}", "").replace(f"{ROOT}{os.sep}", "")  # this machine's paths


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; bad values end with one line and status 2."""
    parser = parser_of("gpu", __doc__)
    add = parser.add_argument
    add("parts", nargs="+", choices=("all", *PARTS), metavar="PART", help=f"all, or of {', '.join(PARTS)}")
    add("--budget-seconds", type=float, default=590.0, help="for everything together (default 590)")
    add("--quick", action="store_true", help="tiny models, on whatever there is: does everything run?")
    add("--out", type=Path, default=Path("outputs/bench-gpu"), help="results and logs (default %(default)s)")
    add("--page", action="store_true", help="write docs/benchmarks/DATE-MACHINE-GPU.md")
    add("--machine", default=report.machine_slug(), help="MACHINE in the page's name (default: %(default)s)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; returns the exit status."""
    options, gpu = parse(arguments), installed()
    if gpu.kind != "cuda" and not options.quick:
        return report.no_gpu("gpu")
    day, began = Day(options.out, options.quick, "cuda" if gpu.kind == "cuda" else "cpu"), time.monotonic()
    chosen = [name for name in PARTS if name in options.parts or ("all" in options.parts and not day.is_done(name))]
    for name in chosen:
        left = options.budget_seconds - (time.monotonic() - began)
        if left < 5.0:
            print(f"{name}: no time is left; call again to go on with it", flush=True)
            continue
        day.run(name, left)
    page, name = day.page(), "cpu" if day.device == "cpu" else report.slug(gpu.device_name(gpu.current_device()))
    put(day.out / "page.md", page)
    print(f"wrote {os.path.relpath(day.out / 'page.md')} after {time.monotonic() - began:.0f} s")
    if options.page:
        report.write_page(f"{options.machine}-{name}{'-quick' if options.quick else ''}", page)
    return 1 if any(day.found.get(part, {"error": "no time"})["error"] for part in chosen) else 0


if __name__ == "__main__":
    end_on_signals()
    exit_with(main)
