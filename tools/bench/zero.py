"""deepzero against its peers, interleaved: ``python -m tools.bench.zero``.

    idle        every variant with a tiny model: the memory that the program takes without the model
    round 1     every variant of every contender, in random order, each in fresh processes
    selection   variants more than ``--keep`` times slower than their contender's best drop out
    rounds 2…   the rest again, in another order each time
    report      tables, the limits with their verdicts, losses; a dated page with ``--page``

A contender is started anew in every round, because all of them alive at once would not fit into a small machine's
memory, and because a process that got lucky with its memory layout should not stay lucky for the whole run.

Examples::

    python -m tools.bench.zero --quick                          # a tiny model: does everything run?
    python -m tools.bench.zero --rounds 5 --page                # the measurement of record, about an hour on 2 cores
    python -m tools.bench.zero --contenders deepzero1,ddp,floor --rounds 3
    python -m tools.bench.zero --device cuda --ranks 2 --micro-batch 8

Exit status: 0; 1 when a contender that is installed could not be measured; 2 for bad options; 3 with ``--strict`` when
a limit is missed or could not be measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: python tools/bench/zero.py
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from tools.bench import report
from tools.bench.bars import Bar, Measured, compute_bars, floor_of, summarize
from tools.bench.contenders import CONTENDERS, FLOOR, Contender, Variant, by_name
from tools.bench.launch import MIB, ROOT, Outcome, Plan, run_variant
from tools.bench.stats import median
from tools.bench.workload import TINY, Workload, make_tokens, tokens_needed

Results = dict[tuple[str, str], list[Outcome]]
"""(contender, variant) to its outcomes, one per round."""

SIZES = {"layers": "n_layer", "width": "n_embd", "heads": "n_head", "vocab": "vocab_size", "tokens": "block_size"}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line; bad values end with one line and status 2."""
    names = ",".join(contender.name for contender in CONTENDERS)
    epilog = f"contenders: {names}; variants: CONTENDER:VARIANT picks one"
    parser = argparse.ArgumentParser(prog="python -m tools.bench.zero", description=__doc__, epilog=epilog)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--contenders", default=names, metavar="A,B", help="who takes part (default: all)")
    add("--rounds", type=int, help="rounds of all contenders (default 5; quick: 1)")
    add("--steps", type=int, help="timed steps per contender and round (default 8; quick: 3)")
    add("--warmup", type=int, help="untimed steps before them (default 3; quick: 1)")
    add("--keep", type=float, default=1.10, help="after round 1, keep variants this close to the best (default 1.10)")
    add("--ranks", type=int, default=2, help="processes (default 2)")
    add("--threads", type=int, default=1, help="threads of each process, on CPU (default 1)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: NCCL, one GPU per rank (default cpu)")
    add("--micro-batch", type=int, default=1, help="sequences per rank and step (default 1)")
    add("--quick", action="store_true", help="a tiny model, for checking that everything runs")
    for option, field in SIZES.items():
        add(f"--{option}", type=int, help=f"of the model (default {getattr(Workload, field)})")
    add("--timeout", type=float, default=600.0, help="seconds for one contender in one round (default 600)")
    add("--page", action="store_true", help="write docs/benchmarks/DATE-MACHINE.md")
    add("--machine", default=report.machine_slug(), help="MACHINE in the page's name (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write every sample")
    add("--logs", type=Path, metavar="FOLDER", help="keep what the ranks printed")
    add("--strict", action="store_true", help="end with status 3 when a limit is missed")
    options = parser.parse_args(arguments)
    for name, quick, full in (("rounds", 1, 5), ("steps", 3, 8), ("warmup", 1, 3)):
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else full)
    for name, least in (("rounds", 1), ("steps", 1), ("warmup", 0), ("ranks", 1), ("threads", 1), ("micro_batch", 1)):
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')}={getattr(options, name)}: must be at least {least}")
    work = workload_of(options)
    if work.n_head < 1 or work.n_embd < 1 or work.n_embd % work.n_head:
        parser.error(f"--width {work.n_embd} does not divide by --heads {work.n_head}: give both, or a multiple")
    try:
        options.entries = select_entries(options.contenders)
    except ValueError as error:
        parser.error(str(error))
    return options


def select_entries(text: str) -> list[tuple[Contender, Variant]]:
    """``"ddp,zro:bf16"`` to pairs of contender and variant.

    Raises:
        ValueError: an unknown contender or variant; the message lists the known ones.
    """
    entries: list[tuple[Contender, Variant]] = []
    for word in filter(None, text.split(",")):
        name, _, wanted = word.strip().partition(":")
        contender = by_name(name)
        chosen = [v for v in contender.variants if wanted in ("", v.name)]
        if not chosen:
            known = ", ".join(variant.name for variant in contender.variants)
            raise ValueError(f"{name} has no variant {wanted!r}; it has: {known}")
        entries.extend((contender, variant) for variant in chosen)
    return entries


def workload_of(options: argparse.Namespace) -> Workload:
    """The default or the tiny model, with whatever the command line changes."""
    changes: dict[str, Any] = {"ranks": options.ranks, "threads": options.threads, "device": options.device}
    changes["micro_batch"] = options.micro_batch
    changes.update({field: getattr(options, o) for o, field in SIZES.items() if getattr(options, o) is not None})
    return dataclasses.replace(TINY if options.quick else Workload(), **changes)


def installed(entries: list[tuple[Contender, Variant]], ranks: int) -> list[tuple[Contender, Variant]]:
    """Leave out whoever is not installed, with a line each, and who cannot take part with so many ranks."""
    entries = [(contender, variant) for contender, variant in entries if ranks == 1 or not contender.alone]
    missing = {contender.name: contender.missing() for contender, _ in entries}
    for name, module in missing.items():
        if module:
            print(f"skipped {name}: {module} is not installed", flush=True)
    return [entry for entry in entries if not missing[entry[0].name]]


def measure_idle(entries: list[tuple[Contender, Variant]], plan: Plan) -> dict[tuple[str, str], int]:
    """Peak bytes of every variant with a tiny model: Python, torch, the contender's packages, its process group."""
    tiny = dataclasses.replace(TINY, ranks=plan.work.ranks, threads=plan.work.threads, device=plan.work.device)
    tokens_file = plan.tokens_file.with_name("tiny.npy")
    np.save(tokens_file, make_tokens(tiny.vocab_size, tokens_needed(tiny, 2)))
    small = dataclasses.replace(plan, work=tiny, steps=1, warmup=1, tokens_file=tokens_file)
    idle: dict[tuple[str, str], int] = {}
    for contender, variant in entries:
        if contender is not FLOOR:
            outcome = run_variant(contender, variant, small, "idle")
            # One that fails here fails in round 1 too, and is reported there.
            if outcome.error is None:
                idle[contender.name, variant.name] = outcome.peak_bytes
    print(f"memory without the model: {len(idle)} variants measured", flush=True)
    return idle


def run_rounds(entries: list[tuple[Contender, Variant]], plan: Plan, rounds: int, keep: float) -> Results:
    """All rounds; after the first one slow and failing variants drop out."""
    results: Results = {(c.name, v.name): [] for c, v in entries}
    shuffle = random.Random(0)
    alive = list(entries)
    for number in range(1, rounds + 1):
        # Another order each round: whoever runs after a hungry neighbour should not always be the same.
        shuffle.shuffle(alive)
        for contender, variant in alive:
            outcome = run_variant(contender, variant, plan, f"round{number}")
            results[contender.name, variant.name].append(outcome)
            print(progress(number, rounds, contender, variant, outcome), flush=True)
        if number == 1:
            alive = survivors(alive, results, keep)
    return results


def progress(number: int, rounds: int, contender: Contender, variant: Variant, outcome: Outcome) -> str:
    """One line per variant and round."""
    head = f"round {number}/{rounds}  {contender.name} {variant.name}:"
    if outcome.error:
        return f"{head} failed. {outcome.error}"
    name = next(iter(outcome.seconds))
    return (
        f"{head} {name} median {median(outcome.seconds[name]):.3f} s, best {min(outcome.seconds[name]):.3f} s, "
        f"peak {outcome.peak_bytes / MIB:.0f} MiB  ({outcome.wall_seconds:.0f} s)"
    )


def survivors(alive: list[tuple[Contender, Variant]], results: Results, keep: float) -> list[tuple[Contender, Variant]]:
    """The variants within ``keep`` times their contender's best median; the floor has no rivals and stays."""
    medians: dict[tuple[str, str], float] = {}
    for contender, variant in alive:
        row = summarize(contender, variant, results[contender.name, variant.name], None)
        if row is not None:
            medians[contender.name, variant.name] = row.median_seconds
    kept: list[tuple[Contender, Variant]] = []
    for contender, variant in alive:
        mine = medians.get((contender.name, variant.name))
        best = min((m for (name, _), m in medians.items() if name == contender.name), default=None)
        worked = any(outcome.error is None for outcome in results[contender.name, variant.name])
        if (contender is FLOOR and worked) or (mine is not None and best is not None and mine <= keep * best):
            kept.append((contender, variant))
    return kept


def sections_of(
    entries: list[tuple[Contender, Variant]], results: Results, idle: dict[tuple[str, str], int], plan: Plan
) -> tuple[list[tuple[str, str]], list[Bar]]:
    """Title and body of every part of the report, and the bars among them."""
    work = plan.work
    found = [summarize(c, v, results[c.name, v.name], idle.get((c.name, v.name))) for c, v in entries]
    rows: list[Measured] = [row for row in found if row is not None]
    floor = floor_of(results.get((FLOOR.name, FLOOR.variants[0].name), []))
    bars = compute_bars(rows, floor)
    setting = (
        f"GPT of {work.n_layer} layers, width {work.n_embd}, vocabulary {work.vocab_size}, {work.block_size} tokens, "
        f"micro-batch {work.micro_batch}; {work.ranks} ranks on {work.device}"
        + (f", {work.threads} thread(s) each" if work.device == "cpu" else "")
        + f"; bf16 with fp32 masters, AdamW, clipping at {work.clip}. {plan.steps} timed steps after {plan.warmup} "
        "untimed ones per round, each step the slowest rank's; medians over all rounds. Memory is that of the largest "
        "rank; *of the model*: without what the same program takes for a tiny model. Build: until the first step."
    )
    sections = [("Setting", setting)]
    if rows:
        sections.append(("Step time and memory", report.step_table(rows, floor, work)))
        sections.append(("Ratios of medians", report.ratio_table(rows)))
    if floor:
        sections.append(("The floor", report.floor_table(floor)))
    sections.append(("Limits", report.bar_table(bars)))
    if rows:
        sections.append(("Losses", report.loss_table(rows)))
        sections.append(("Variants", report.legend(rows)))
    failed = [f"- {c} {v}: {o.error}" for (c, v), outcomes in results.items() for o in outcomes if o.error]
    if failed:
        sections.append(("Failed", "\n".join(failed)))
    return sections, bars


def unmeasured(results: Results) -> list[str]:
    """Contenders of which no variant worked in any round."""
    names = {name for name, _ in results}
    worked = {name for (name, _), outcomes in results.items() if any(o.error is None for o in outcomes)}
    return sorted(names - worked)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    work = workload_of(options)
    # The commit is read before the run: the checkout may move on while it lasts.
    facts = [*report.machine_facts(work), f"commit {report.commit()}", report.load_fact(work)]
    print("\n".join(facts), flush=True)
    entries = installed(options.entries, options.ranks)
    with tempfile.TemporaryDirectory(prefix="deepzero-bench-") as scratch:
        folder = options.logs.resolve() if options.logs else Path(scratch)
        tokens_file = Path(scratch) / "tokens.npy"
        count = tokens_needed(work, options.steps + options.warmup)
        np.save(tokens_file, make_tokens(work.vocab_size, count))
        plan = Plan(work, options.steps, options.warmup, options.timeout, tokens_file, folder)
        idle = {} if options.quick else measure_idle(entries, plan)
        results = run_rounds(entries, plan, options.rounds, options.keep)
    sections, bars = sections_of(entries, results, idle, plan)
    for title, body in sections:
        print(f"\n{title}\n\n{body}")
    if options.json:
        samples = {f"{c}:{v}": [dataclasses.asdict(o) for o in outcomes] for (c, v), outcomes in results.items()}
        options.json.write_text(json.dumps({"work": work.to_dict(), "outcomes": samples}, indent=1))
    if options.page:
        page = report.write_page(ROOT / "docs" / "benchmarks", options.machine, facts, sections)
        print(f"\nwrote {os.path.relpath(page)}")
    if absent := unmeasured(results):
        print(f"\nnot measured: {', '.join(absent)}", file=sys.stderr)
        return 1
    return 3 if options.strict and any(bar.verdict != "pass" for bar in bars) else 0


def _end(number: int, frame: object) -> None:
    """A plain ``kill`` (``timeout`` sends it too) ends like Ctrl-C: ranks killed, scratch folder removed."""
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)
    sys.exit(main())
