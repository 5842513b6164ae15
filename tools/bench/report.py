"""What the rounds amount to: ratios, the floor, the limits that deepzero is held to, tables, and the dated page.

A peer counts with its fastest variant in the speed bars and with its *leanest* variant in the memory bars, so a peer
may win on both although no single configuration of it does. deepzero counts with one variant, its fastest, in all.
One renderer serves terminal and page: Markdown tables with padded columns read well on a terminal too.
"""

from __future__ import annotations

import importlib.util
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

from deepzero.device import installed
from deepzero.monitor.throughput import peak_flops, rates
from tools.bench.contenders import Contender, Variant
from tools.bench.launch import MIB, ROOT, Outcome
from tools.bench.workload import Workload

LOSS_STEPS = 10
LOSS_TOLERANCE = 0.01
"""Contenders whose losses differ by more than this, relatively, do not do the same work. bf16 noise is some 0.2 %;
masters that start from bf16-rounded parameters instead of the fp32 ones add about as much."""

REDUCE_WAYS = ("reduce_all_to_all", "reduce_all_to_all_pieces", "reduce_scatter")
GATHER_WAYS = ("gather", "gather_pieces")
SPEED_LIMITS: dict[int, dict[str, float]] = {
    1: {"deepspeed1": 0.60, "zro": 0.85, "ddp": 0.90, "floor": 1.20},
    2: {"deepspeed2": 0.60, "zro": 0.85, "ddp": 0.90, "floor": 1.20},
    3: {"deepspeed3": 0.62, "fsdp2": 0.70, "floor": 1.25},
}
"""By stage: largest step time, relative to a peer or to the floor."""
ALONE_LIMIT = 1.05  # of stage 3 on one rank, over a plain loop


# ---- what was measured -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """One variant over all of its rounds; times in seconds per step, memory in bytes of the largest rank.

    Samples of all rounds are pooled: a median spans the whole run, and a machine that slows down for a while slows
    every contender of that round alike.
    """

    contender: Contender
    variant: Variant
    rounds: tuple[Outcome, ...]  # with samples
    idle_bytes: float | None = None  # peak of the same program with a tiny model; None where that was not measured

    @property
    def samples(self) -> list[float]:
        return [second for outcome in self.rounds for second in outcome.seconds["step"]]

    @property
    def seconds(self) -> float:
        """The median."""
        return median(self.samples)

    def median_of(self, piece: str) -> str:
        """The median of a part of the step, in seconds; a dash where the contender does not time it."""
        samples = [second for outcome in self.rounds for second in outcome.seconds.get(piece, ())]
        return f"{median(samples):.3f}" if samples else "-"

    @property
    def losses(self) -> list[float]:
        """Of the first round."""
        return self.rounds[0].losses

    def middle(self, read: Callable[[Outcome], float]) -> float:
        """The median over rounds."""
        return median(map(read, self.rounds))

    @property
    def peak_bytes(self) -> float:
        return self.middle(lambda outcome: outcome.peak_bytes)

    @property
    def model_bytes(self) -> float | None:
        """What the model itself costs: the peak without the interpreter, torch and the contender's own packages."""
        return None if self.idle_bytes is None else self.peak_bytes - self.idle_bytes

    @property
    def label(self) -> str:
        return f"{self.contender.name} ({self.variant.name})"


def summarize(
    contender: Contender, variant: Variant, outcomes: Iterable[Outcome], idle: float | None = None, ended: bool = False
) -> Measured | None:
    """Pool the rounds that worked, with ``ended`` those that were cut off too; None where there is no sample."""
    good = [outcome for outcome in outcomes if (ended or outcome.error is None) and outcome.seconds.get("step")]
    return Measured(contender, variant, tuple(good), idle) if good else None


@dataclass(frozen=True)
class Floor:
    """Seconds of each part, median and best, and their sums."""

    medians: Mapping[str, float]
    bests: Mapping[str, float]

    def seconds(self, stage: int, best: bool = False) -> float:
        """The floor of a stage: forward and backward + Adam + the fastest way to do its communication."""
        parts = self.bests if best else self.medians
        gather = min(parts[way] for way in GATHER_WAYS)
        scattered = min(parts[way] for way in REDUCE_WAYS) + gather
        if stage == 0:
            return parts["forward_backward"] + parts["adam_full"] + min(parts["all_reduce"], scattered)
        return parts["forward_backward"] + parts["adam_shard"] + scattered + (gather if stage == 3 else 0.0)


def floor_of(outcomes: Iterable[Outcome]) -> Floor | None:
    """Pool the floor's rounds part by part; None when none worked."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    if not good:
        return None
    pooled = {part: [s for o in good for s in o.seconds[part]] for part in good[0].seconds}
    return Floor({p: median(s) for p, s in pooled.items()}, {p: min(s) for p, s in pooled.items()})


def over_floor(row: Measured, floor: Floor | None) -> str:
    """A step over the floor of its stage; peers without a stage number beside the one that does their communication."""
    stage = 0 if row.contender.name in ("ddp", "deepzero0") else row.contender.stage or 1
    return f"{row.seconds / floor.seconds(stage):.2f}" if floor else "-"


def fastest(rows: Iterable[Measured], name: str) -> Measured | None:
    """The variant of contender ``name`` with the lowest median, if any was measured."""
    return min((row for row in rows if row.contender.name == name), key=lambda row: row.seconds, default=None)


# ---- limits ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bar:
    """One limit. ``value`` is None where a side of the comparison was not measured."""

    name: str
    against: str
    value: float | None
    limit: float

    @property
    def verdict(self) -> str:
        """pass, FAIL, or not measured."""
        return "not measured" if self.value is None else "pass" if self.value <= self.limit else "FAIL"


def compute_bars(rows: Sequence[Measured], floor: Floor | None) -> list[Bar]:
    """All bars of stages 1, 2 and 3, in the order of the table."""
    bars: list[Bar] = []
    for stage, limits in SPEED_LIMITS.items():
        ours = fastest(rows, f"deepzero{stage}")

        mine = ours.seconds if ours else None
        compared = []  # what, against whom, ours, theirs, the limit
        for name, limit in limits.items():
            peer = fastest(rows, name)
            theirs = floor.seconds(stage) if name == "floor" and floor else peer.seconds if peer else None
            compared.append(("step time", peer.label if peer else name, mine, theirs, limit))
        if stage == 3 and (alone := fastest(rows, "plain")):
            compared.append(("step time, one rank", alone.label, mine, alone.seconds, ALONE_LIMIT))
        for what, key in (("peak memory", "peak_bytes"), ("memory of the model", "model_bytes")):
            others = [row for row in rows if row.contender.name in limits and getattr(row, key) is not None]
            leanest = min(others, key=lambda row: getattr(row, key), default=None)
            against = f"leanest: {leanest.label if leanest else 'no peer'}"
            compared.append((what, against, getattr(ours, key, None), getattr(leanest, key, None), 1.0))
        for what, against, mine, theirs, limit in compared:
            value = mine / theirs if mine is not None and theirs is not None and theirs > 0 else None
            bars.append(Bar(f"stage {stage} {what}", against, value, limit))
    return bars


# ---- tables ----------------------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table with padded columns; the first column is left-aligned, the others right.

    Example:
        >>> print(table(["who", "s"], [["ddp", "1.00"]]))
        | who |    s |
        |:----|-----:|
        | ddp | 1.00 |
    """
    cells = [list(head), *map(list, rows)]
    widths = [max(3 if i else 1, *(len(row[i]) for row in cells)) for i in range(len(head))]
    rule = [":" + "-" * (width + 1) if i == 0 else "-" * (width + 1) + ":" for i, width in enumerate(widths)]
    padded = [[c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
              for row in cells]  # fmt: skip
    lines = [f"| {' | '.join(row)} |" for row in padded]
    return "\n".join([lines[0], f"|{'|'.join(rule)}|", *lines[1:]])


def block(text: str) -> str:
    """What a program has printed, as it stands."""
    return f"```text\n{text.strip()}\n```"


def columns(items: Iterable[Any], **cells: Callable[[Any], str]) -> str:
    """A table with one row for each item; ``cells`` maps the heads to what stands below them."""
    return table(list(cells), [[cell(item) for cell in cells.values()] for item in items])


def step_table(rows: Sequence[Measured], floor: Floor | None, work: Workload) -> str:
    """Step time and memory of every variant; a star marks the variant that counts in the speed bars."""
    stars = {id(fastest(rows, row.contender.name)) for row in rows}
    return columns(rows, **{
        "contender": lambda row: row.contender.title + (" *" if id(row) in stars else ""),
        "variant": lambda row: row.variant.name,
        "median s": lambda row: f"{row.seconds:.3f}",
        "best s": lambda row: f"{min(row.samples):.3f}",
        "cpu s": lambda row: f"{row.middle(lambda o: o.cpu_seconds['step']):.3f}",
        "optimizer s": lambda row: row.median_of("optimizer"),
        "steps": lambda row: str(len(row.samples)),
        "tokens/s": lambda row: f"{work.tokens_per_step / row.seconds:.0f}",
        "MFU": lambda row: _mfu(work, row.seconds),
        "x floor": lambda row: over_floor(row, floor),
        "peak MiB": lambda row: f"{row.peak_bytes / MIB:.0f}",
        "of the model": lambda row: "-" if row.model_bytes is None else f"{row.model_bytes / MIB:.0f}",
        "at build": lambda row: f"{row.middle(lambda o: o.build_peak_bytes) / MIB:.0f}",
        "at steps": lambda row: f"{row.middle(lambda o: o.step_peak_bytes) / MIB:.0f}",
    })  # fmt: skip


def _mfu(work: Workload, seconds: float) -> str:
    """Which part of the devices' peak the model's own operations are; a dash on a CPU, and where none is known."""
    gpu = installed()
    peak = peak_flops(gpu.device_name(gpu.current_device()), "bf16") if work.device == "cuda" else None
    products = work.parameters - (work.vocab_size + work.block_size) * work.n_embd  # without the lookup tables
    flops = 6 * products + 12 * work.n_layer * work.n_embd * work.block_size
    return f"{rates(work.tokens_per_step, seconds, flops, work.ranks, peak)['mfu']:.1%}" if peak else "-"


def ratio_table(rows: Sequence[Measured]) -> str:
    """Median step time of each deepzero stage over each peer's fastest variant: below 1 deepzero is faster."""
    best = {row.contender.name: fastest(rows, row.contender.name).seconds for row in rows}
    ours, peers = ([name for name in best if name.startswith("deepzero") is mine] for mine in (True, False))
    lines = [[name, *(f"{best[name] / best[peer]:.2f}" for peer in peers)] for name in ours]
    return table(["step time over", *peers], lines)


def floor_table(floor: Floor) -> str:
    """The parts of the floor, and what they add up to for each stage."""
    lines = [[name, f"{floor.medians[name]:.4f}", f"{floor.bests[name]:.4f}"] for name in floor.medians]
    for stage, title in ((0, "floor of stage 0"), (1, "floor of stages 1 and 2"), (3, "floor of stage 3")):
        lines.append([title, f"{floor.seconds(stage):.4f}", f"{floor.seconds(stage, best=True):.4f}"])
    return table(["part, alone", "median s", "best s"], lines)


def bar_table(bars: Sequence[Bar]) -> str:
    """Every limit with its value and verdict."""
    lines = []
    for bar in bars:
        ratio = "-" if bar.value is None else f"{bar.value:.3f}"
        lines.append([bar.name, bar.against, ratio, f"{bar.limit:.2f}", bar.verdict])
    return table(["deepzero", "over", "ratio", "limit", "verdict"], lines)


def distances(losses: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Step by step, the relative distance; infinite where one is not finite."""
    pairs = zip(losses, reference, strict=False)
    return [abs(a - b) / abs(b) if math.isfinite(a) and math.isfinite(b) else math.inf for a, b in pairs]


def loss_table(losses: Mapping[str, Sequence[float]], reference: str | None = None, late: Sequence[str] = ()) -> str:
    """Losses of the first steps, how far each is from the others, and whether all do the same work.

    Args:
        losses: of each contender.
        reference: whom the others are compared with; None: the middle of all that are judged.
        late: whose course is another one by definition; they have only to be finite.
    """
    count = min(LOSS_STEPS, *map(len, losses.values()))
    judged = [several for name, several in losses.items() if name not in late] or losses.values()
    middle = losses[reference] if reference else [median(step) for step in zip(*judged, strict=False)][:count]
    far = {name: max(distances(several, middle), default=0.0) for name, several in losses.items()}
    wrong = [name for name in losses if far[name] > (sys.float_info.max if name in late else LOSS_TOLERANCE)]
    lines = []
    for name, several in losses.items():
        away = "the same" if list(several) == list(middle) else f"{far[name]:.3%}"
        lines.append([name, *(f"{loss:.4f}" for loss in several[:count]), f"{several[-1]:.4f}", away])
    head = ["loss at step", *map(str, range(count)), "last", f"furthest from {reference or 'the middle'}"]
    verdict = f"**NOT the same work: {', '.join(wrong)}.**" if wrong else "All do the same work within bf16 noise."
    unjudged = f" Another course by definition, not judged: {', '.join(late)}." if late else ""
    return f"{table(head, lines)}\n\n{verdict} The limit is {LOSS_TOLERANCE:.0%}; bf16 noise is some 0.2 %.{unjudged}"


# ---- the machine, the page -------------------------------------------------------------------------------------------


def machine_facts(work: Workload) -> list[str]:
    """Processor, memory, system and versions, one line each."""
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    facts = [f"{_processor()}, {os.cpu_count()} cores, {gib:.0f} GiB memory, {platform.system()} {platform.release()}"]
    if work.device == "cuda":
        import torch

        facts.append(f"GPU: {torch.cuda.get_device_name()} x {torch.cuda.device_count()}, CUDA {torch.version.cuda}")
    installed = [name for name in ("torch", "deepspeed", "numpy") if importlib.util.find_spec(name)]
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in installed)
    return [*facts, f"Python {platform.python_version()}, {versions}"]


WITHOUT_GPU = "**No GPU took part.** Tiny models on the CPU, to see that everything runs: no number measures anything"


def gpu_facts(work: Workload, quick: bool) -> list[str]:
    """The machine's facts on the page of a benchmark of one GPU, first what its numbers are not."""
    small = ["**Tiny models**: a quick run, whose numbers measure nothing"] if quick else []
    return [*([WITHOUT_GPU] if work.device == "cpu" else small), *machine_facts(work)]


def no_gpu(command: str) -> int:
    """Say that a benchmark of one GPU is of no use here. Returns the exit status."""
    print(
        f"tools.bench.{command}: torch sees no NVIDIA GPU here, and without one these numbers would measure nothing. "
        "Run it on a machine that has one, or with --quick to see that everything runs.",
        file=sys.stderr,
    )
    return 2


def load_fact(work: Workload) -> str:
    """Who else was busy on this machine when the run began: times taken beside other work compare nothing."""
    load = os.getloadavg()[0]
    # The load average still remembers a minute of whatever ran before; half a core's worth is no competitor.
    busy = load > 0.5 and work.device == "cpu"
    return f"load average before the run: {load:.2f}" + (" (**busy**: do not trust the times)" if busy else "")


def print_machine(run: str) -> None:
    """The machine, and what is measured on it, as the head of a benchmark of one thing."""
    print("\n".join(f"- {fact}" for fact in machine_facts(Workload())))
    print(f"- {run}; load average before: {os.getloadavg()[0]:.2f}\n", flush=True)


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else []
    return re.sub(r"\s+", " ", names[0]) if names else platform.processor() or platform.machine()


def slug(text: str) -> str:
    """What may stand in a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def machine_slug() -> str:
    """This machine by its core count and processor: ``2-cores-intel-xeon-processor``."""
    return f"{os.cpu_count()}-cores-" + slug(re.sub(r"\((r|tm)\)", "", _processor().lower()))


def commit() -> str:
    """The checkout's commit, and whether its files differ from it."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=30)
        return done.stdout.strip() if done.returncode == 0 else ""

    number = git("rev-parse", "--short=12", "HEAD")
    changed = number and git("status", "--porcelain", "--untracked-files=no")
    return (number or "not a git checkout") + (" with uncommitted changes" if changed else "")


def command_line(module: str) -> str:
    """The command as a reader would repeat it, without this machine's paths."""
    return re.sub(r" --out[ =]\S+", "", " ".join([f"python -m tools.bench.{module}", *sys.argv[1:]]))


def page_text(facts: Sequence[str], sections: Iterable[tuple[str, str]], command: str) -> str:
    """A page: facts of the machine, the command, then every section's title and body."""
    head = [f"# Benchmark of {date.today().isoformat()}", "", *(f"- {fact}" for fact in facts)]
    return "\n".join([*head, f"- command: `{command}`", "", *(f"## {title}\n\n{body}\n" for title, body in sections)])


def write_page(machine: str, text: str, folder: Path = ROOT / "docs" / "benchmarks") -> Path:
    """Write ``<date>-<machine>.md``, with a number behind it when that page exists: a record is never overwritten."""
    folder.mkdir(parents=True, exist_ok=True)
    stem, number = f"{date.today().isoformat()}-{machine}", 2
    target = folder / f"{stem}.md"
    while target.exists():
        target, number = folder / f"{stem}-{number}.md", number + 1
    target.write_text(text)
    print(f"wrote {os.path.relpath(target)}")
    return target
