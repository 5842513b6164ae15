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
    python -m tools.bench.zero --contenders muon2,muon0,deepzero2:plain   # each matrix with one owner, with W, AdamW
    python -m tools.bench.zero --device cuda --ranks 2 --micro-batch 8

Exit status: 0; 1 when a contender that is installed could not be measured; 2 for bad options; 3 with ``--strict`` when
a limit is missed or could not be measured.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from deepzero.utils.closed_pipe import exit_with
from tools.bench import report
from tools.bench.contenders import CONTENDERS, FLOOR, ON_REQUEST, Contender, Variant, by_name
from tools.bench.launch import Outcome, Plan, end_on_signals, run_variant
from tools.bench.report import Bar, compute_bars, floor_of, summarize
from tools.bench.timing import MODEL_OPTIONS, natural, parser_of, work_of
from tools.bench.workload import TINY

Entry = tuple[Contender, Variant]
Results = dict[tuple[str, str], list[Outcome]]  # (contender, variant) to its outcomes, one per round

DEFAULTS = {"rounds": (1, 5), "steps": (3, 8), "warmup": (1, 3)}
"""Option to its default of a quick run, and of another one."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; bad values end with one line and status 2."""
    names = ",".join(contender.name for contender in CONTENDERS)
    parser = parser_of(
        "zero", __doc__,
        rounds=(None, "rounds of all contenders (default 5; quick: 1)"),
        steps=(None, "timed steps per contender and round (default 8; quick: 3)"),
        ranks=(2, "processes"), threads=(1, "threads of each process, on CPU"), **MODEL_OPTIONS,
    )  # fmt: skip
    more = ", ".join(contender.name for contender in ON_REQUEST)
    parser.epilog = f"contenders: {names}; only where named: {more}; variants: CONTENDER:VARIANT picks one"
    add = parser.add_argument
    add("--warmup", type=natural, help="untimed steps before them (default 3; quick: 1)")
    add("--contenders", type=select_entries, default=names, metavar="A,B", help="who takes part (default: all)")
    add("--keep", type=float, default=1.10, help="after round 1, keep variants this close to the best (default 1.10)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: NCCL, one GPU per rank (default cpu)")
    add("--quick", action="store_true", help="a tiny model, for checking that everything runs")
    add("--timeout", type=float, default=600.0, help="seconds for one contender in one round (default 600)")
    add("--page", action="store_true", help="write docs/benchmarks/DATE-MACHINE.md")
    add("--machine", default=report.machine_slug(), help="MACHINE in the page's name (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write every sample")
    add("--logs", type=Path, metavar="FOLDER", help="keep what the ranks printed")
    add("--strict", action="store_true", help="end with status 3 when a limit is missed")
    options = parser.parse_args(arguments)
    for name, (quick, full) in DEFAULTS.items():
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else full)
    options.work = work_of(parser, options, **{name: getattr(options, name) for name in ("ranks", "threads", "device")})
    return options


def select_entries(text: str) -> list[Entry]:
    """An argparse type, whose errors list who is known: ``"ddp,zro:bf16"`` to pairs of contender and variant."""
    entries: list[Entry] = []
    for word in filter(None, text.split(",")):
        name, _, wanted = word.strip().partition(":")
        contender = by_name(name)
        chosen = [(contender, variant) for variant in contender.variants if wanted in ("", variant.name)]
        if not chosen:
            known = ", ".join(variant.name for variant in contender.variants)
            raise argparse.ArgumentTypeError(f"{name} has no variant {wanted!r}; it has: {known}")
        entries += chosen
    return entries


def taking_part(entries: list[Entry], ranks: int) -> list[Entry]:
    """Leave out whoever is not installed, with a line each, and who cannot take part with so many ranks."""
    entries = [(contender, variant) for contender, variant in entries if ranks == 1 or not contender.alone]
    for name, needs in {c.name: c.needs for c, _ in entries if not c.installed}.items():
        print(f"skipped {name}: {needs} is not installed", flush=True)
    return [entry for entry in entries if entry[0].installed]


def measure_idle(entries: list[Entry], plan: Plan) -> dict[tuple[str, str], int]:
    """Peak bytes of every variant with a tiny model: Python, torch, the contender's packages, its process group."""
    tiny = replace(TINY, ranks=plan.work.ranks, threads=plan.work.threads, device=plan.work.device)
    small = replace(plan, work=tiny, steps=1, warmup=1)
    outcomes = {(c.name, v.name): run_variant(c, v, small, "idle") for c, v in entries if c is not FLOOR}
    # One that fails here fails in round 1 too, and is reported there.
    idle = {name: outcome.peak_bytes for name, outcome in outcomes.items() if outcome.error is None}
    print(f"memory without the model: {len(idle)} variants measured", flush=True)
    return idle


def run_rounds(
    entries: list[Entry], plan: Plan, rounds: int, keep: float | None = None,
    before: Callable[[Entry], None] = lambda _entry: None,
) -> Results:  # fmt: skip
    """All rounds; after the first one slow and failing variants drop out, unless ``keep`` is None.

    ``before`` is called before each start of an entry.
    """
    results: Results = {(c.name, v.name): [] for c, v in entries}
    shuffle, alive = random.Random(0), list(entries)
    for number in range(1, rounds + 1):
        # Another order each round: whoever runs after a hungry neighbour should not always be the same.
        shuffle.shuffle(alive)
        for contender, variant in alive:
            before((contender, variant))
            outcome = run_variant(contender, variant, plan, f"round{number}")
            results[contender.name, variant.name].append(outcome)
            print(f"round {number}/{rounds}  {contender.name} {variant.name}: {outcome}", flush=True)
        if number == 1 and keep is not None:
            alive = survivors(alive, results, keep)
    return results


def survivors(alive: list[Entry], results: Results, keep: float) -> list[Entry]:
    """The variants within ``keep`` times their contender's best median; the floor has no rivals and stays."""
    rows = [row for c, v in alive if (row := summarize(c, v, results[c.name, v.name]))]
    near = {row.label for row in rows if row.seconds <= keep * report.fastest(rows, row.contender.name).seconds}
    floor_works = floor_of(results.get((FLOOR.name, FLOOR.variants[0].name), [])) is not None
    return [(c, v) for c, v in alive if f"{c.name} ({v.name})" in near or (c is FLOOR and floor_works)]


def sections_of(
    entries: list[Entry], results: Results, idle: dict[tuple[str, str], int], plan: Plan
) -> tuple[list[tuple[str, str]], list[Bar]]:
    """Title and body of every part of the report, and the bars among them."""
    work = plan.work
    names = [(c, v, (c.name, v.name)) for c, v in entries]
    rows = [row for c, v, name in names if (row := summarize(c, v, results[name], idle.get(name)))]
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
    failed = [f"- {c} {v}: {o.error}" for (c, v), outcomes in results.items() for o in outcomes if o.error]
    losses = {f"{row.contender.name} {row.variant.name}": row.losses for row in rows}
    late = [f"{row.contender.name} {row.variant.name}" for row in rows if row.contender.late]
    sections = {
        "Setting": setting,
        "Step time and memory": rows and report.step_table(rows, floor, work),
        "Ratios of medians": rows and report.ratio_table(rows),
        "The floor": floor and report.floor_table(floor),
        "Limits": report.bar_table(bars),
        "Losses": rows and report.loss_table(losses, late=late),
        "Variants": "\n".join(f"- {row.contender.name} {row.variant.name}: {row.variant.note}" for row in rows),
        "Failed": "\n".join(failed),
    }
    return [(title, body) for title, body in sections.items() if body], bars


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    options = parse(arguments)
    work = options.work
    # The commit is read before the run: the checkout may move on while it lasts.
    facts = [*report.machine_facts(work), f"commit {report.commit()}", report.load_fact(work)]
    print("\n".join(facts), flush=True)
    entries = taking_part(options.contenders, options.ranks)
    with tempfile.TemporaryDirectory(prefix="deepzero-bench-") as scratch:
        folder = options.logs.resolve() if options.logs else Path(scratch)
        plan = Plan(work, options.warmup, 1, options.steps, True, options.timeout, folder)
        # On a GPU memory is the allocator's, without what the program takes.
        idle = {} if options.quick or options.device == "cuda" else measure_idle(entries, plan)
        results = run_rounds(entries, plan, options.rounds, options.keep)
    sections, bars = sections_of(entries, results, idle, plan)
    for title, body in sections:
        print(f"\n{title}\n\n{body}")
    if options.json:
        samples = {f"{c}:{v}": [asdict(outcome) for outcome in outcomes] for (c, v), outcomes in results.items()}
        options.json.write_text(json.dumps({"work": asdict(work), "outcomes": samples}, indent=1))
    if options.page:
        report.write_page(options.machine, report.page_text(facts, sections, report.command_line("zero")))
    worked = {name for (name, _), outcomes in results.items() if any(o.error is None for o in outcomes)}
    if absent := sorted({name for name, _ in results} - worked):
        print(f"\nnot measured: {', '.join(absent)}", file=sys.stderr)
        return 1
    return 3 if options.strict and any(bar.verdict != "pass" for bar in bars) else 0


if __name__ == "__main__":
    end_on_signals()
    exit_with(main)
