"""ZeRO-Offload on one NVIDIA GPU: ``python -m tools.bench.offload``, a part of ``python -m tools.bench.gpu``.

    speed      a GPT of 1.4 billion parameters in bf16 on one rank, each contender in a process of its own: deepzero's
               stage 2 without offload, with it, with ratio 0.5, with a delayed update, stage 3 with parameters in host
               memory too; and DeepSpeed's stages 2 and 3 with the same. Medians and minima, tokens/s, ratios, memory of
               device and host, GB/s of every part of the pipeline and how much of it was hidden, losses compared
    largest    the largest GPT of a ladder that trains three steps: from the largest that the closed forms say fits into
               the host's memory, and for which there is time, downwards
    speed      again, in another order, for as long as the budget lasts

It ends within ``--budget-seconds``; what no longer fits is skipped, and named. After every result ``results.json`` and
``page.md`` under ``--out`` are written anew, so that a run that is cut off has lost nothing.

Examples::

    python -m tools.bench.offload --quick                      # tiny models, on a CPU too: does everything run?
    python -m tools.bench.offload --parts speed --contenders s2,ds2 --rounds 3

Exit status: 0; 1 when something that was tried failed; 2 for bad options, or without a GPU; 3 when there was no time
for a contender, or for any of the models that might be the largest.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from deepzero.monitor.metrics_file import put
from deepzero.offload.pinned_arena import available_host_bytes
from deepzero.utils.closed_pipe import exit_with
from tools.bench import report
from tools.bench.contenders import BOTH, OFFLOAD, Contender, Variant
from tools.bench.launch import GIB, Outcome, Plan, end_on_signals, run_variant
from tools.bench.report import Measured, columns, summarize
from tools.bench.timing import multiple_of, natural, parser_of
from tools.bench.workload import TINY, Workload

PARTS = ("speed", "largest")
NEEDS_SECONDS = {"speed": (15.0, 18.0), "largest": (20.0, 17.0)}
"""What a contender that has not run yet, or a largest model, is not begun without: seconds, and more for each billion
parameters. Quick runs need a fifth."""
KEPT_FREE = 0.25  # of the budget, for the largest model
FREE_AGAIN_SECONDS = 15.0


# ---- which model fits ------------------------------------------------------------------------------------------------
# Host memory for one rank that offloads everything, in bytes for each parameter (docs/offload.md, "Memory"): compute 2,
# master 4, Adam's moments 8, gradients (grad_accum_dtype=bf16) 2; and the shards that zero.Init made, until the engine
# has moved them in, if they wait on the host. Beside these stands the process itself.

HOST_BYTES, INIT_BYTES = 16, 2
PLAIN_BYTES = 20
"""For each parameter on the device without offload: compute 2, gradients 4, master 4, moments 8, and what building it
in fp32 leaves over."""

LADDER = (
    (24, 2048), (32, 2560), (36, 3072), (32, 3584), (32, 3840), (30, 4096), (32, 4096), (34, 4096), (36, 4096),
    (39, 4096), (48, 4096), (40, 5120), (44, 5120), (44, 6144), (80, 5120),
)  # fmt: skip
"""Layers and widths: 1.4, 2.8, 4.4, 5.3, 6.1, 6.5, 6.9, 7.3, 7.7, 8.3, 10, 13, 14, 21 and 26 billion parameters."""
QUICK_LADDER = ((1, 64), (2, 64), (2, 96))


def needs_seconds(part: str, work: Workload) -> float:
    """How much time must be left for a model."""
    start, each = NEEDS_SECONDS[part]
    return start + each * work.parameters / 1e9


def shaped(base: Workload, n_layer: int, n_embd: int, **more: Any) -> Workload:
    """``base`` with this shape, in heads of 128."""
    return replace(base, n_layer=n_layer, n_embd=n_embd, n_head=max(1, n_embd // 128), **more)


def speed_work(device: str, threads: int, quick: bool) -> Workload:
    """The model of the speed part: 1.4 billion parameters, or a tiny one.

    The learning rate is low: a large model without warm-up would make two courses of bf16 noise.
    """
    if quick:
        return replace(TINY, ranks=1, device=device, threads=threads)
    sizes = {"vocab_size": 50304, "block_size": 1024, "micro_batch": 4, "ranks": 1}
    return shaped(Workload(**sizes, threads=threads, device=device, lr=2e-5), 24, 2048)


def host_bytes_needed(work: Workload, init_on: str) -> int:
    """What training with everything in host memory takes there at its peak, without the process itself.

    ``init_on``: where ``zero.Init`` keeps the shards until the engine moves them in, ``cpu`` or ``device``.
    """
    return (HOST_BYTES + (INIT_BYTES if init_on == "cpu" else 0)) * work.parameters


@dataclass(frozen=True)
class Rung:
    """A model that should fit, and how."""

    work: Workload
    init_on: str
    needed: int

    @property
    def size(self) -> str:
        return f"{self.work.parameters / 1e9:.4g} billion"


def rungs(ladder: Sequence[tuple[int, int]], base: Workload, host_bytes: int, device_bytes: int) -> list[Rung]:
    """The shapes that the closed forms say fit, the largest first, with activation checkpointing.

    While the engine is built, the shards of ``zero.Init`` wait in host memory, where there is room for them, and else
    on the device, where at most a half of the memory is for them.
    """
    found = []
    for layers, width in ladder:
        work = shaped(base, layers, width, checkpointing=True)
        on_host, on_device = host_bytes_needed(work, "cpu"), host_bytes_needed(work, "device")
        if on_host <= host_bytes:
            found.append(Rung(work, "cpu", on_host))
        elif on_device <= host_bytes and INIT_BYTES * work.parameters <= device_bytes // 2:
            found.append(Rung(work, "device", on_device))
    return sorted(found, key=lambda rung: -rung.work.parameters)


# ---- the run ---------------------------------------------------------------------------------------------------------


class Bench:
    """One run: the parts share the options, the budget, and the files of results."""

    def __init__(self, options: argparse.Namespace, work: Workload, device_bytes: int, scratch: Path) -> None:
        self.options, self.work, self.device_bytes, self.scratch = options, work, device_bytes, scratch
        self.started, self.out = time.monotonic(), options.out.resolve()
        facts = [*report.gpu_facts(work, options.quick), f"commit {report.commit()}", report.load_fact(work)]
        self.found: dict[str, Any] = {"facts": facts, "skipped": []}
        self._known_seconds: dict[str, float] = {}
        self._count = 0
        self.out.mkdir(parents=True, exist_ok=True)
        self.save()

    def left(self) -> float:
        """Seconds until the budget is spent: everything has to be over then."""
        return self.options.budget_seconds - (time.monotonic() - self.started)

    def save(self, **parts: Any) -> None:
        """Add a part's result, whole or so far, and write both files anew."""
        self.found.update(parts)
        put(self.out / "results.json", json.dumps(self.found, indent=1, default=vars))
        page = report.page_text(self.found["facts"], sections(self.found), report.command_line("offload"))
        put(self.out / "page.md", page)

    def skip(self, what: str) -> None:
        """Say that something is left out, here and on the page."""
        print(f"skipped: {what}", flush=True)
        self.save(skipped=[*self.found["skipped"], what])

    def has_time(self, what: str, seconds: float, kept_free: float = 0.0) -> bool:
        """Whether so many seconds are left; says so when they are not."""
        seconds = seconds / 5 if self.options.quick else seconds
        if self.left() - kept_free >= seconds:
            return True
        left = f"{max(0.0, self.left()):.0f} s of {self.options.budget_seconds:.0f} left"
        kept = f", {kept_free:.0f} of them kept free for the largest model" if kept_free else ""
        self.skip(f"{what}: needs some {seconds:.0f} s, {left}{kept}")
        return False

    def run(self, contender: Contender, options: dict[str, Any], **plan: Any) -> Outcome:
        """One contender in a process of its own, within the budget."""
        zero = options["zero"]
        if self.options.quick and zero["stage"] == 3:  # all of a tiny model's parameters would stay whole
            options = {**options, "zero": {**zero, "stage3_param_persistence_threshold": 0}}
        limit = max(5.0, min(plan.pop("timeout_seconds"), self.left() - 5.0))
        free_before = available_host_bytes() or 0
        self._count += 1
        variant = Variant("gpu", "", options)
        made = Plan(timeout_seconds=limit, folder=self.scratch, each=False, **plan)
        outcome = run_variant(contender, variant, made, f"{self._count}")
        with open(self.out / "workers.log", "ab") as log:
            printed = self.scratch / f"{self._count}-{contender.name}-gpu" / "0.log"
            log.write(f"\n=== {contender.name}\n".encode() + printed.read_bytes())
        # A hundred GiB of locked pages take seconds to come back.
        until = time.monotonic() + FREE_AGAIN_SECONDS
        while (available_host_bytes() or 0) < free_before - 2 * GIB and time.monotonic() < until:
            time.sleep(0.2)
        return outcome

    def taking_part(self) -> list[Contender]:
        """The chosen contenders that are installed, and that the device can hold."""
        chosen = [contender for contender in OFFLOAD if contender.name in self.options.contenders]
        for needs in sorted({contender.needs for contender in chosen if not contender.installed}):
            self.skip(f"{needs} is not installed")
        chosen = [contender for contender in chosen if contender.installed]
        compilers = (os.environ.get("CXX") or "c++", "g++", "clang++")
        if any(contender.needs for contender in chosen) and not any(map(shutil.which, compilers)):
            self.skip("a C++ compiler: there is none, and DeepSpeedCPUAdam is compiled when it is first used")
        needed, has = PLAIN_BYTES * self.work.parameters, self.device_bytes
        too_large = [] if self.work.device == "cpu" or needed <= 0.9 * has else [c for c in chosen if not offloads(c)]
        for contender in too_large:
            sizes = f"{needed / GIB:.0f} GiB on the device without offload, which has {has / GIB:.0f}"
            self.skip(f"{contender.title}: {sizes}")
        return [contender for contender in chosen if contender not in too_large]

    def speed(self, rounds: range, contenders: list[Contender], kept_free: float) -> None:
        """Every contender once a round, each round beginning with another one."""
        lengths = {name: getattr(self.options, name) for name in ("warmup", "blocks", "steps")}
        speed = self.found.get("speed") or {"work": self.work, **lengths, "rows": {}}
        needed = needs_seconds("speed", self.work)
        for number in rounds:
            first = number % max(len(contenders), 1)
            for contender in (*contenders[first:], *contenders[:first]):
                rows = speed["rows"].setdefault(contender.name, [])
                if any(row.error for row in rows):
                    continue
                what = f"{contender.title}, round {number + 1}"
                if not self.has_time(what, self._known_seconds.get(contender.name, needed), kept_free):
                    continue
                plan = {**lengths, "work": self.work, "place": "device", "timeout_seconds": self.options.timeout}
                row = self.run(contender, contender.variants[0].options, **plan)
                self._known_seconds[contender.name] = row.wall_seconds * (5 if self.options.quick else 1)
                rows.append(row)
                self.save(speed=speed)
                print(f"{what}: {row}", flush=True)

    def largest(self) -> None:
        """Down the ladder until a model trains: three steps, the first of which is not timed."""
        available = available_host_bytes() or 0
        host = available if self.options.host_gib is None else int(self.options.host_gib * GIB)
        usable = max(0, host - int(self.options.reserve_gib * GIB))
        attempts: list[dict[str, Any]] = []
        self.save(largest={"available": available, "usable": usable, "attempts": attempts})
        ladder = QUICK_LADDER if self.options.quick else LADDER
        settings = {"zero": {"stage": 3, **BOTH}, "settings": {"data_types": {"grad_accum_dtype": "bf16"}}}
        for rung in rungs(ladder, self.work, usable, self.device_bytes):
            if not self.has_time(f"the largest model, {rung.size}", needs_seconds("largest", rung.work)):
                continue
            plan = {"warmup": 1, "blocks": 2, "steps": 1, "place": f"init-{rung.init_on}"}
            contender = Contender(f"largest-{rung.work.parameters}", rung.size, "engines:build", ())
            row = self.run(contender, settings, work=rung.work, timeout_seconds=self.left(), **plan)
            trains = row.error is None and len(row.losses) == 3 and all(map(math.isfinite, row.losses))
            attempts.append({"rung": rung, "trains": trains, "row": row})
            self.save()
            print(f"largest, {rung.size}: {row}", flush=True)
            if trains:
                return

    def is_late(self, contenders: list[Contender]) -> bool:
        """Whether there was no time for one of these, or for any of the models that might be the largest."""
        rows = self.found.get("speed", {}).get("rows", {})
        skipped = any(text.startswith("the largest model, ") for text in self.found["skipped"])
        none_tried = skipped and not self.found["largest"]["attempts"]
        return none_tried or not all(rows.get(contender.name) for contender in contenders)

    def failed(self) -> bool:
        """Whether something that was tried did not work."""
        rows = self.found.get("speed", {}).get("rows", {})
        attempts = self.found.get("largest", {}).get("attempts", [])
        workers = any(row.error for several in rows.values() for row in several)
        none_trains = bool(attempts) and not any(attempt["trains"] for attempt in attempts)
        return workers or none_trains


def offloads(contender: Contender) -> bool:
    return "offload_optimizer" in contender.variants[0].options["zero"]


# ---- the page --------------------------------------------------------------------------------------------------------


def sections(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Title and body of every part that there is something of, as far as the run has come."""
    parts: dict[str, str] = {}
    left_out = [f"- {text}" for text in found["skipped"]]
    if speed := found.get("speed"):
        rows = measured(speed["rows"])
        late = [row.contender.title for row in rows if row.contender.late]
        reference = next((row.contender.title for row in [*filter(lambda r: offloads(r.contender), rows), *rows]), None)
        losses = {row.contender.title: row.losses for row in rows}
        left_out += [f"- {name}: {row.error}" for name, tried in speed["rows"].items() for row in tried if row.error]
        parts.update({
            "Setting": setting(speed),
            "Speed and memory": speed_table(rows, speed["work"]) if rows else "",
            "The pipeline of the last step": pipeline_table(rows),
            "Losses": report.loss_table(losses, reference, late) if rows else "",
            "Host memory of deepzero": memory_lines(rows),
        })  # fmt: skip
    if "largest" in found:
        parts["The largest model that trains"] = largest_text(found["largest"])
    parts["Left out and failed"] = "\n".join(left_out)
    return [(title, body) for title, body in parts.items() if body]


def measured(rows: dict[str, list[Outcome]]) -> list[Measured]:
    """Those with samples, also of workers that were ended in the middle."""
    found = [summarize(c, c.variants[0], rows.get(c.name, []), ended=True) for c in OFFLOAD]
    return [row for row in found if row]


def setting(speed: dict[str, Any]) -> str:
    """What the contenders did."""
    work = speed["work"]
    return (
        f"GPT of {work.parameters / 1e9:.3g} billion parameters, {work.n_layer} layers, width {work.n_embd}, "
        f"vocabulary {work.vocab_size}; {work.micro_batch} x {work.block_size} tokens a step; one rank on "
        f"{work.device}, {work.threads} threads; bf16 with fp32 masters, AdamW, clipping at {work.clip}. In each round "
        f"every contender in a fresh process: {speed['warmup']} untimed steps, then {speed['blocks']} blocks of "
        f"{speed['steps']}; a sample is a block's time over its steps. *Host* is what the system has less while it "
        "runs, *arena* deepzero's one allocation in it. *Device*: the most that torch's allocator had given out during "
        "the steps."
    )


def _gib(rounds: Sequence[Outcome]) -> dict[str, str]:
    """The most of any round, in GiB, or a dash."""
    most = {name: max(one.facts.get(f"{name}_bytes", 0) for one in rounds) for name in ("device", "host", "arena")}
    return {name: f"{value / GIB:.2f}" if value else "-" for name, value in most.items()}


def speed_table(rows: Sequence[Measured], work: Workload) -> str:
    """Medians and minima over all rounds, and the ratio to DeepSpeed's same stage."""
    by_name = {row.contender.name: row for row in rows}

    def over(row: Measured, pick: Any) -> str:
        peer = by_name.get(row.contender.peer)
        return f"{pick(row.samples) / pick(peer.samples):.2f}" if peer else "-"

    return columns(rows, **{
        "contender": lambda row: row.contender.title,
        "median s": lambda row: f"{row.seconds:.3f}",
        "best s": lambda row: f"{min(row.samples):.3f}",
        "samples": lambda row: str(len(row.samples)),
        "tokens/s": lambda row: f"{work.tokens_per_step / row.seconds:.0f}",
        "/ DeepSpeed": lambda row: over(row, median),
        "of best": lambda row: over(row, min),
        "device GiB": lambda row: _gib(row.rounds)["device"],
        "host GiB": lambda row: _gib(row.rounds)["host"],
        "arena GiB": lambda row: _gib(row.rounds)["arena"],
        "build s": lambda row: f"{row.middle(lambda outcome: outcome.facts['build_seconds']):.0f}",
    })  # fmt: skip


def pipeline_table(rows: Sequence[Measured]) -> str:
    """``engine.offload_report()``: which part moved how much, how fast, and how much of that cost no time."""
    lines = []
    for row in rows:
        for part, leg in row.rounds[-1].facts.get("pipeline", {}).items():
            numbers = (f"{leg['bytes'] / 1e9:.3f}", f"{leg['seconds']:.3f}", f"{leg['gb_per_second']:.1f}")
            lines.append([row.contender.title, part, *numbers, f"{leg['hidden']:.0%}"])
    return report.table(["contender", "part", "GB", "seconds", "GB/s", "hidden"], lines) if lines else ""


def memory_lines(rows: Sequence[Measured]) -> str:
    """The engine's own words, and the ledger where it differs from its closed form."""
    lines = []
    for row in rows:
        facts = row.rounds[-1].facts
        if "described" in facts:
            lines.append(f"- {row.contender.title}: {facts['described']}")
        for category, sizes in facts.get("memory", {}).items():
            known = category.startswith("host_") and sizes["predicted"] is not None
            if known and sizes["predicted"] != sizes["measured"]:
                lines.append(f"  - **{category}: predicted {sizes['predicted']:,}, measured {sizes['measured']:,}**")
    return "\n".join(lines)


def largest_text(found: dict[str, Any]) -> str:
    """Every attempt, the last of which may have trained."""
    lines, said, errors = [], [], []
    for one in found["attempts"]:
        rung, row, work = one["rung"], one["row"], one["rung"].work
        sizes, speeds = _gib([row]), ["-", "-"]
        if seconds := row.seconds.get("step"):
            speeds = [f"{median(seconds):.2f}", f"{work.tokens_per_step / median(seconds):.0f}"]
        gib = [f"{rung.needed / GIB:.2f}", sizes["host"], sizes["arena"], sizes["device"]]
        build, verdict = f"{row.facts.get('build_seconds', math.nan):.0f}", "trains" if one["trains"] else "no"
        lines.append([rung.size, f"{work.n_layer} x {work.n_embd}", rung.init_on, *gib, build, *speeds, verdict])
        if one["trains"]:
            said.append(f"Losses {[round(loss, 3) for loss in row.losses]}. {row.facts.get('described', '')}")
        if row.error:
            errors.append(f"{rung.size}:\n\n{report.block(row.error)}")
    head = ["parameters", "layers x width", "built on", "needed GiB", "host GiB", "arena GiB", "device GiB", "build s"]
    rows = report.table([*head, "s a step", "tokens/s", "verdict"], lines)
    room = f"The host had {found['available'] / GIB:.1f} GiB, of which {found['usable'] / GIB:.1f} were to be used."
    how = (
        "Stage 3, optimizer and parameters in host memory, grad_accum_dtype=bf16, activation checkpointing, built in "
        "zero.Init(dtype=bfloat16), whose shards wait where *built on* says. *Needed* is the closed form's host memory."
    )
    none = "None was tried: no shape fits, or there was no time."
    return "\n\n".join([how, room, rows if lines else none, *said, *errors])


# ---- the command -----------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; bad values end with one line and status 2."""
    names = [contender.name for contender in OFFLOAD]
    parser = parser_of(
        "offload", __doc__,
        rounds=(5, "at most so many of the speed part; quick: 1"),
        blocks=(3, "samples of each process; quick: 2"),
        steps=(4, "steps of a sample; quick: 2"),
        layers=(None, "of the speed part's model (default 24)"),
        micro_batch=(None, "sequences a step (default 4)"),
    )  # fmt: skip
    add = parser.add_argument
    add("--width", type=multiple_of(128), help="of the speed part's model, a multiple of 128 (default 2048)")
    add("--parts", default=",".join(PARTS), metavar="A,B", help="of speed, largest (default: all)")
    add("--contenders", default=",".join(names), metavar="A,B", help=f"of the speed part: {', '.join(names)}")
    add("--budget-seconds", type=float, default=560.0, help="for everything together (default 560)")
    add("--timeout", type=float, default=150.0, help="for one process of the speed part (default 150)")
    add("--warmup", type=natural, default=3, help="untimed steps of each process (default 3; quick: 1)")
    add("--threads", type=natural, default=0, help="of the CPU's step (default: all cores)")
    add("--host-gib", type=float, help="host memory for the largest model (default: what is available)")
    add("--reserve-gib", type=float, default=6.0, help="of it, for the process itself (default 6)")
    add("--quick", action="store_true", help="tiny models, on whatever there is: does everything run?")
    add("--out", type=Path, default=Path("outputs/bench-offload"), help="results, page, logs (default %(default)s)")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.warmup, options.blocks, options.steps = min(options.rounds, 1), 1, 2, 2
    for word, known in (("parts", PARTS), ("contenders", names)):
        chosen = [name for name in getattr(options, word).split(",") if name]
        if unknown := sorted(set(chosen) - set(known)):
            parser.error(f"--{word}: unknown {', '.join(unknown)}; there are: {', '.join(known)}")
        setattr(options, word, chosen)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    import torch

    options = parse(arguments)
    cuda = torch.cuda.is_available()
    if not cuda and not options.quick:
        return report.no_gpu("offload")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    work = speed_work("cuda" if cuda else "cpu", options.threads or (cores if cuda else 1), options.quick)
    work = replace(work, n_layer=options.layers or work.n_layer, micro_batch=options.micro_batch or work.micro_batch)
    if options.width:
        work = shaped(work, work.n_layer, options.width)
    device_bytes = int(torch.cuda.get_device_properties(0).total_memory) if cuda else 0
    with tempfile.TemporaryDirectory(prefix="deepzero-bench-") as scratch:
        bench = Bench(options, work, device_bytes, Path(scratch))
        print("\n".join(bench.found["facts"]), flush=True)
        contenders = bench.taking_part() if "speed" in options.parts else []
        kept_free = KEPT_FREE * options.budget_seconds if "largest" in options.parts and not options.quick else 0.0
        bench.speed(range(1), contenders, kept_free)
        if "largest" in options.parts:
            bench.largest()
        bench.speed(range(1, options.rounds), contenders, 0.0)
    for title, body in sections(bench.found):
        print(f"\n{title}\n\n{body}")
    print(f"\nwrote {os.path.relpath(bench.out / 'page.md')} after {time.monotonic() - bench.started:.0f} s")
    return 1 if bench.failed() else 3 if bench.is_late(contenders) else 0


if __name__ == "__main__":
    end_on_signals()
    exit_with(main)
