"""ZeRO-Offload on one NVIDIA GPU, everything in one call: ``python -m tools.bench.gpu offload``.

    bits       the GPU tests of offload, in a process of their own: passed, failed, and the failures' text
    speed      a GPT of 1.4 billion parameters in bf16 on one rank, each contender in a process of its own: deepzero's
               stage 2 without offload, with it, with ratio 0.5, with a delayed update, stage 3 with parameters in host
               memory too; and DeepSpeed's stages 2 and 3 with the same. Medians and minima, tokens/s, ratios, memory of
               device and host, GB/s of every part of the pipeline and how much of it was hidden, losses compared
    largest    the largest GPT of a ladder that trains three steps: from the largest that the closed forms say fits into
               the host's memory downwards
    speed      again, in another order, for as long as the budget lasts

It ends within ``--budget-seconds``; what no longer fits is skipped, and named. After every result ``results.json`` and
``page.md`` under ``--out`` are written anew, so that a run that is cut off has lost nothing. ``--page`` writes the page
to docs/benchmarks as well.

Examples::

    python -m tools.bench.gpu offload --page                       # the measurement of record, less than ten minutes
    python -m tools.bench.gpu offload --quick                      # tiny models, on a CPU too: does everything run?
    python -m tools.bench.gpu offload --parts speed --contenders s2,ds2 --rounds 3

Exit status: 0; 1 when something that was tried failed; 2 for bad options, or without a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import platform
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.bench import report
from tools.bench.gpu_offload import (
    ENTRIES,
    GIB,
    LADDER,
    LARGEST_ZERO,
    QUICK_LADDER,
    Entry,
    Rung,
    absent,
    parameters,
    rungs,
    speed_work,
)
from tools.bench.gpu_report import WITHOUT_GPU, page, sections
from tools.bench.gpu_run import Clock, Results, run_tests, run_worker
from tools.bench.launch import ROOT
from tools.bench.workload import Workload

PARTS = ("bits", "speed", "largest")
NEEDS_SECONDS = {"bits": 30.0, "speed": 40.0, "largest": 140.0}
"""A part, or a contender that has not run yet, is not begun with less than this left. Quick runs need a fifth."""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line; bad values end with one line and status 2."""
    names = [entry.name for entry in ENTRIES]
    parser = argparse.ArgumentParser(prog="python -m tools.bench.gpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("what", choices=("offload",), help="what to measure")
    add("--parts", default=",".join(PARTS), metavar="A,B", help="of bits, speed, largest (default: all)")
    add("--contenders", default=",".join(names), metavar="A,B", help=f"of the speed part: {', '.join(names)}")
    add("--budget-seconds", type=float, default=560.0, help="for everything together (default 560)")
    add("--timeout", type=float, default=150.0, help="for one process of the speed part (default 150)")
    add("--rounds", type=int, default=5, help="at most so many of the speed part (default 5; quick: 1)")
    add("--warmup", type=int, default=3, help="untimed steps of each process (default 3; quick: 1)")
    add("--blocks", type=int, default=3, help="samples of each process (default 3; quick: 2)")
    add("--steps", type=int, default=4, help="steps of a sample (default 4; quick: 2)")
    add("--layers", type=int, help="of the speed part's model (default 24)")
    add("--width", type=int, help="of the speed part's model, a multiple of 128 (default 2048)")
    add("--micro-batch", type=int, help="sequences a step (default 4)")
    add("--threads", type=int, default=0, help="of the CPU's step (default: all cores)")
    add("--host-gib", type=float, help="host memory for the largest model (default: what is available)")
    add("--reserve-gib", type=float, default=6.0, help="of it, for the process itself (default 6)")
    add("--quick", action="store_true", help="tiny models, on whatever there is: does everything run?")
    add("--out", type=Path, default=Path("outputs/bench-gpu"), help="results.json, page.md, logs (default %(default)s)")
    add("--page", action="store_true", help="write docs/benchmarks/DATE-MACHINE-offload.md too")
    add("--machine", default=report.machine_slug(), help="MACHINE in the page's name (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.warmup, options.blocks, options.steps = min(options.rounds, 1), 1, 2, 2
    for word, known in (("parts", PARTS), ("contenders", names)):
        chosen = [name for name in getattr(options, word).split(",") if name]
        if unknown := sorted(set(chosen) - set(known)):
            parser.error(f"--{word}: unknown {', '.join(unknown)}; there are: {', '.join(known)}")
        setattr(options, word, chosen)
    for name, least in (("rounds", 1), ("warmup", 0), ("blocks", 1), ("steps", 1), ("threads", 0)):
        if getattr(options, name) < least:
            parser.error(f"--{name}={getattr(options, name)}: must be at least {least}")
    return options


def pick(quick: bool) -> tuple[str, int]:
    """``cuda`` or ``cpu``, and the GPU's memory in bytes.

    Raises:
        SystemExit: there is no GPU, and this is not a quick run.
    """
    import torch

    if torch.cuda.is_available():
        return "cuda", int(torch.cuda.get_device_properties(0).total_memory)
    if not quick:
        print(
            "tools.bench.gpu: torch sees no NVIDIA GPU here, and without one these numbers would measure nothing. "
            "Run it on a machine that has one, or with --quick to see that everything runs.",
            file=sys.stderr,
        )
        raise SystemExit(2)
    return "cpu", 0


def chosen_work(options: argparse.Namespace, device: str) -> Workload:
    """The speed part's model, with whatever the command line changes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = options.threads or (cores if device == "cuda" else 1)
    work = speed_work(device, threads, options.quick)
    changes: dict[str, Any] = {}
    if options.layers:
        changes["n_layer"] = options.layers
    if options.width:
        changes.update(n_embd=options.width, n_head=max(1, options.width // 128))
    if options.micro_batch:
        changes["micro_batch"] = options.micro_batch
    return dataclasses.replace(work, **changes)


class Bench:
    """One run: the parts share the options, the clock, and the file of results."""

    def __init__(self, options: argparse.Namespace, device: str, device_bytes: int, scratch: Path) -> None:
        self.options, self.device, self.device_bytes, self.scratch = options, device, device_bytes, scratch
        self.work = chosen_work(options, device)
        self.clock = Clock(options.budget_seconds)
        self.out: Path = options.out.resolve()
        facts = [*report.machine_facts(self.work), f"commit {report.commit()}", report.load_fact(self.work)]
        if device == "cpu":
            facts.insert(0, WITHOUT_GPU)
        elif options.quick:
            facts.insert(0, "**Tiny models**: a quick run, whose numbers measure nothing")
        shown = {"facts": facts, "command": report.command_line("tools.bench.gpu"), "quick": options.quick}
        self.results = Results(self.out, {**shown, "device": device}, page)
        self._known_seconds: dict[str, float] = {}
        self._count = 0

    def has_time(self, what: str, seconds: float, kept_free: float = 0.0) -> bool:
        """Whether so many seconds are left; says so when they are not."""
        seconds = seconds / 5 if self.options.quick else seconds
        if self.clock.left() - kept_free >= seconds:
            return True
        left = f"{max(0.0, self.clock.left()):.0f} s of {self.clock.seconds:.0f} left"
        kept = f", {kept_free:.0f} of them kept free for the largest model" if kept_free else ""
        self.results.skip(f"{what}: needs some {seconds:.0f} s, {left}{kept}")
        return False

    def start(self, spec: dict[str, Any], timeout_seconds: float) -> dict[str, Any]:
        """One worker, within the budget."""
        self._count += 1
        if self.options.quick and spec["zero"]["stage"] == 3:  # all of a tiny model's parameters would stay whole
            spec = {**spec, "zero": {**spec["zero"], "stage3_param_persistence_threshold": 0}}
        limit = max(5.0, min(timeout_seconds, self.clock.left() - 5.0))
        return run_worker(spec, limit, self.scratch / str(self._count), self.out / "workers.log")

    # ---- bits --------------------------------------------------------------------------------------------------------

    def bits(self) -> None:
        """The GPU tests of offload."""
        if self.has_time("bits", NEEDS_SECONDS["bits"]):
            found = run_tests(min(180.0, self.clock.left() - 5.0), self.out, self.device)
            self.results.put("bits", found)
            counts = {name: found[name] for name in ("passed", "failed", "skipped", "error") if name in found}
            print(f"bits: {counts}", flush=True)

    # ---- speed -------------------------------------------------------------------------------------------------------

    def taking_part(self) -> list[Entry]:
        """The chosen contenders that are installed."""
        entries = [entry for entry in ENTRIES if entry.name in self.options.contenders]
        missing = {entry.library: absent(entry.library) for entry in entries}
        for reason in filter(None, missing.values()):
            self.results.skip(reason)
        entries = [entry for entry in entries if missing[entry.library] is None]
        if any(entry.library == "deepspeed" for entry in entries) and not _compiler():
            self.results.skip("a C++ compiler: there is none, and DeepSpeedCPUAdam is compiled when it is first used")
        return entries

    def speed(self, rounds: range, entries: list[Entry], kept_free: float) -> None:
        """Every contender once a round, each round beginning with another one."""
        options, names = self.options, {"warmup", "blocks", "steps"}
        lengths = {name: getattr(options, name) for name in names}
        speed = self.results.found.get("speed") or {"work": self.work.to_dict(), **lengths, "rows": {}}
        for number in rounds:
            first = number % max(len(entries), 1)
            for entry in (*entries[first:], *entries[:first]):
                rows = speed["rows"].setdefault(entry.name, [])
                if any("error" in row or "skipped" in row for row in rows):
                    continue
                what = f"{entry.title}, round {number + 1}"
                if not self.has_time(what, self._known_seconds.get(entry.name, NEEDS_SECONDS["speed"]), kept_free):
                    continue
                spec = {"name": entry.name, "library": entry.library, "zero": entry.zero, "work": self.work.to_dict()}
                row = self.start({**spec, **lengths}, options.timeout)
                self._known_seconds[entry.name] = row["wall_seconds"] * (5 if options.quick else 1)
                rows.append(row)
                self.results.put("speed", speed)
                if "skipped" in row:
                    self.results.skip(f"{entry.title}: {row['skipped']}")
                print(f"{what}: {outcome(row)}", flush=True)

    # ---- largest -----------------------------------------------------------------------------------------------------

    def largest(self) -> None:
        """Down the ladder until a model trains."""
        from deepzero.offload.pinned_arena import available_host_bytes

        available = available_host_bytes() or 0
        host = int(self.options.host_gib * GIB) if self.options.host_gib is not None else available
        usable = max(0, host - int(self.options.reserve_gib * GIB))
        ladder = QUICK_LADDER if self.options.quick else LADDER
        found: dict[str, Any] = {"available": available, "usable": usable, "attempts": []}
        self.results.put("largest", found)
        for rung in rungs(ladder, self.work, usable, self.device_bytes):
            if not self.has_time(f"the largest model, {_billions(rung)}", NEEDS_SECONDS["largest"]):
                return
            row = self.start(largest_spec(rung), self.clock.left())
            about = {"work": rung.work.to_dict(), "needed": rung.needed, "parts_on": rung.parts_on}
            losses = row.get("losses", [])
            trains = len(losses) == 3 and all(map(math.isfinite, losses)) and "error" not in row
            found["attempts"].append({**about, "elements": parameters(rung.work), "trains": trains, **row})
            self.results.put("largest", found)
            print(f"largest, {_billions(rung)}: {outcome(row)}", flush=True)
            if trains:
                return

    def failed(self) -> bool:
        """Whether something that was tried did not work."""
        found = self.results.found
        tests, rows = found.get("bits", {}), found.get("speed", {}).get("rows", {})
        largest = found.get("largest", {}).get("attempts", [])
        workers = any("error" in row for several in rows.values() for row in several)
        none_trains = bool(largest) and not any(attempt["trains"] for attempt in largest)
        return "error" in tests or tests.get("failed", 0) > 0 or workers or none_trains


def largest_spec(rung: Rung) -> dict[str, Any]:
    """Three steps, the first of which is not timed."""
    spec = {"name": f"largest-{_billions(rung)}", "library": "deepzero", "zero": LARGEST_ZERO, "bf16_sums": True}
    return {**spec, "parts_on": rung.parts_on, "work": rung.work.to_dict(), "warmup": 1, "blocks": 2, "steps": 1}


def outcome(row: dict[str, Any]) -> str:
    """One line about a worker."""
    if "skipped" in row:
        return f"skipped: {row['skipped']}"
    said = f"best {min(row['seconds']):.3f} s a step" if row.get("seconds") else "no step timed"
    return f"{said} ({row['wall_seconds']:.0f} s)" + (f"; failed: {row['error']}" if "error" in row else "")


def _billions(rung: Rung) -> str:
    return f"{parameters(rung.work) / 1e9:.4g} billion"


def _compiler() -> bool:
    return any(shutil.which(name) for name in (os.environ.get("CXX") or "c++", "g++", "clang++"))


def machine_name(options: argparse.Namespace, device: str) -> str:
    """For the page's name: the machine, its GPU, and what was measured."""
    gpu = ""
    if device == "cuda":
        import torch

        gpu = "-" + re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name(0).lower()).strip("-")
    return f"{options.machine or platform.machine()}{gpu}-offload" + ("-quick" if options.quick else "")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    device, device_bytes = pick(options.quick)
    with tempfile.TemporaryDirectory(prefix="deepzero-bench-") as scratch:
        bench = Bench(options, device, device_bytes, Path(scratch))
        print("\n".join(bench.results.found["facts"]), flush=True)
        if "bits" in options.parts:
            bench.bits()
        entries = bench.taking_part() if "speed" in options.parts else []
        kept_free = NEEDS_SECONDS["largest"] if "largest" in options.parts and not options.quick else 0.0
        bench.speed(range(1), entries, kept_free)
        if "largest" in options.parts:
            bench.largest()
        bench.speed(range(1, options.rounds), entries, 0.0)
    found = bench.results.found
    for title, body in sections(found):
        print(f"\n{title}\n\n{body}")
    print(f"\nwrote {os.path.relpath(bench.out / 'page.md')} after {bench.clock.elapsed():.0f} s")
    if options.page:
        folder = ROOT / "docs" / "benchmarks"
        name = machine_name(options, device)
        written = report.write_page(folder, name, found["facts"], sections(found), found["command"])
        print(f"wrote {os.path.relpath(written)}")
    return 1 if bench.failed() else 0


def _end(number: int, frame: object) -> None:
    """A plain ``kill`` (``timeout`` sends it too) ends like Ctrl-C: workers killed, scratch folder removed."""
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)
    sys.exit(main())
