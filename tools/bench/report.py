"""Tables for the terminal, and the same tables as a dated page under ``docs/benchmarks``.

One renderer serves both: Markdown tables with padded columns read well on a terminal too.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from tools.bench.bars import Bar, Floor, Measured, fastest, loss_disagreement
from tools.bench.launch import MIB, ROOT, version_of
from tools.bench.workload import Workload

LOSS_STEPS = 10
LOSS_TOLERANCE = 0.01
"""Variants whose losses differ by more than this, relatively, do not do the same work. bf16 noise is some 0.2 %;
masters that start from bf16-rounded parameters instead of the fp32 ones add about as much."""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with padded columns; the first column is left-aligned, the others right.

    Example:
        >>> print(table(["who", "s"], [["ddp", "1.00"]]))
        | who |    s |
        |:----|-----:|
        | ddp | 1.00 |
    """
    cells = [list(head), *map(list, rows)]
    widths = [max(3 if i else 1, *(len(row[i]) for row in cells)) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        padded = [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "|".join(":" + "-" * (w + 1) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(widths)) + "|"
    return "\n".join([line(cells[0]), rule, *(line(row) for row in cells[1:])])


def step_table(rows: Sequence[Measured], floor: Floor | None, work: Workload) -> str:
    """Step time and memory of every variant; a star marks the variant that counts in the speed bars."""
    stars = {id(fastest(rows, row.contender.name)) for row in rows}
    lines = []
    for row in rows:
        stage = row.contender.stage
        # Peers without a stage number stand beside the floor that does their communication: all-reduce, or scattered.
        below = floor.seconds(0 if row.contender.name in ("ddp", "deepzero0") else stage or 1) if floor else None
        lines.append(
            [
                row.contender.title + (" *" if id(row) in stars else ""),
                row.variant.name,
                f"{row.median_seconds:.3f}",
                f"{row.best_seconds:.3f}",
                f"{row.cpu_seconds:.3f}",
                str(row.samples),
                f"{work.tokens_per_step / row.median_seconds:.0f}",
                f"{row.median_seconds / below:.2f}" if below else "-",
                f"{row.peak_bytes / MIB:.0f}",
                "-" if row.model_bytes is None else f"{row.model_bytes / MIB:.0f}",
                f"{row.build_peak_bytes / MIB:.0f}",
                f"{row.step_peak_bytes / MIB:.0f}",
            ]
        )
    head = ["contender", "variant", "median s", "best s", "cpu s", "steps", "tokens/s", "x floor"]
    head += ["peak MiB", "of the model", "at build", "at steps"]
    return table(head, lines)


def ratio_table(rows: Sequence[Measured]) -> str:
    """Median step time of each deepzero stage over each peer's fastest variant: below 1 deepzero is faster."""
    names = list(dict.fromkeys(row.contender.name for row in rows))
    ours = [name for name in names if name.startswith("deepzero")]
    peers = [name for name in names if not name.startswith("deepzero")]
    best = {name: fastest(rows, name) for name in names}
    lines = [
        [name, *(f"{best[name].median_seconds / best[peer].median_seconds:.2f}" for peer in peers)]  # type: ignore[union-attr]
        for name in ours
    ]
    return table(["step time over", *peers], lines)


def floor_table(floor: Floor) -> str:
    """The parts of the floor, and what they add up to for each stage."""
    lines = [[name, f"{floor.median_parts[name]:.4f}", f"{floor.best_parts[name]:.4f}"] for name in floor.median_parts]
    for stage, title in ((0, "floor of stage 0"), (1, "floor of stages 1 and 2"), (3, "floor of stage 3")):
        lines.append([title, f"{floor.seconds(stage):.4f}", f"{floor.seconds(stage, best=True):.4f}"])
    return table(["part, alone", "median s", "best s"], lines)


def bar_table(bars: Sequence[Bar]) -> str:
    """Every limit with its value and verdict."""
    lines = [
        [bar.name, bar.against, "-" if bar.value is None else f"{bar.value:.3f}", f"{bar.limit:.2f}", bar.verdict]
        for bar in bars
    ]
    return table(["deepzero", "over", "ratio", "limit", "verdict"], lines)


def loss_table(rows: Sequence[Measured]) -> str:
    """Losses of the first steps, and one line on how well they agree; see :data:`LOSS_TOLERANCE`."""
    count = min([LOSS_STEPS, *(len(row.losses) for row in rows)])
    lines = [[f"{r.contender.name} {r.variant.name}", *(f"{loss:.4f}" for loss in r.losses[:count])] for r in rows]
    distance, step, who = loss_disagreement(rows, count)
    verdict = "the same work within bf16 noise" if distance <= LOSS_TOLERANCE else "**NOT the same work**"
    note = f"Largest distance from the middle: {distance:.2%}, at step {step}, by {who}: {verdict}."
    return table(["loss at step", *map(str, range(count))], lines) + "\n\n" + note


def legend(rows: Sequence[Measured]) -> str:
    """What each variant's name means."""
    return "\n".join(f"- {r.contender.name} {r.variant.name}: {r.variant.note}" for r in rows)


def machine_facts(work: Workload) -> list[str]:
    """Processor, memory, system and versions, one line each."""
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    facts = [f"{_processor()}, {os.cpu_count()} cores, {gib:.0f} GiB memory, {platform.system()} {platform.release()}"]
    if work.device == "cuda":
        import torch

        facts.append(f"GPU: {torch.cuda.get_device_name()} x {torch.cuda.device_count()}, CUDA {torch.version.cuda}")
    versions = [f"{name} {version_of(name)}" for name in ("torch", "deepspeed", "numpy") if version_of(name)]
    facts.append(f"Python {platform.python_version()}, " + ", ".join(versions))
    return facts


def load_fact(work: Workload) -> str:
    """Who else was busy on this machine when the run began: times taken beside other work compare nothing."""
    load = os.getloadavg()[0]
    # The load average still remembers a minute of whatever ran before; half a core's worth is no competitor.
    busy = load > 0.5 and work.device == "cpu"
    return f"load average before the run: {load:.2f}" + (" (**busy**: do not trust the times)" if busy else "")


def _processor() -> str:
    try:
        names = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except FileNotFoundError:
        names = []
    return re.sub(r"\s+", " ", names[0]) if names else platform.processor() or platform.machine()


def machine_slug() -> str:
    """A file-name part for this machine, from its core count and processor: ``2-cores-intel-xeon-processor``."""
    name = re.sub(r"\((r|tm)\)", "", _processor().lower())
    return f"{os.cpu_count()}-cores-" + re.sub(r"[^a-z0-9]+", "-", name).strip("-")


def commit() -> str:
    """The checkout's commit, and whether its files differ from it."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=30)
        return done.stdout.strip() if done.returncode == 0 else ""

    number = git("rev-parse", "--short=12", "HEAD")
    if not number:
        return "not a git checkout"
    return number + (" with uncommitted changes" if git("status", "--porcelain", "--untracked-files=no") else "")


def command_line(module: str = "tools.bench.zero") -> str:
    """The command as a reader would repeat it, without this machine's paths."""
    words = [f"python -m {module}", *sys.argv[1:]]
    return re.sub(r" --out[ =]\S+", "", " ".join(words))


def write_page(
    folder: Path, machine: str, facts: Sequence[str], sections: Sequence[tuple[str, str]], command: str | None = None
) -> Path:
    """Write ``<date>-<machine>.md``, with a number behind it when that page exists: a record is never overwritten."""
    folder.mkdir(parents=True, exist_ok=True)
    today = date.today().isoformat()
    target, number = folder / f"{today}-{machine}.md", 2
    while target.exists():
        target, number = folder / f"{today}-{machine}-{number}.md", number + 1
    target.write_text(page_text(today, facts, sections, command or command_line()))
    return target


def page_text(today: str, facts: Sequence[str], sections: Sequence[tuple[str, str]], command: str) -> str:
    """A page: facts of the machine, the command, then every section."""
    lines = [f"# Benchmark of {today}", "", *(f"- {fact}" for fact in facts), f"- command: `{command}`", ""]
    for title, body in sections:
        lines += [f"## {title}", "", body, ""]
    return "\n".join(lines)
