"""Steps over links of a given speed, throttled by the kernel: ``python -m tools.bench.links``.

The benchmark starts itself again in a network namespace of its own, whose loopback device, which carries everything
that the ranks send each other, has a token bucket (``tc … tbf``). Each contender of ``zero`` is started once in a
round, and trains a block of steps at each speed in turn, so that a slow minute of the machine meets all speeds; the
order of contenders is another one in each round. ``0`` is no bucket: memory speed.

All ranks share the device, so one rank's link has a W-th of the speed that is printed. *x floor* is the step over its
stage's parts at that speed, each alone (``floor.py``). *Hidden* is the share of the time with something under way in
which the program did not stand still, as deepzero counts it in every step. *Predicted* is what ``tools.simulate`` says
for these links, everything else as it was probed here. Where namespaces or ``tc`` are not allowed it says so.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from deepzero.config.deepspeed_json import load_engine_config
from deepzero.launch.launcher import launch
from deepzero.planning.calibrate import __file__ as PROBE
from deepzero.planning.clusters import Cluster, read_cluster
from deepzero.planning.dry_run import ClusterShape, TrainStep, dry_run
from deepzero.planning.simulate import simulate
from deepzero.utils.closed_pipe import exit_with
from tools.bench import report
from tools.bench.contenders import FLOOR
from tools.bench.engines import settings_of
from tools.bench.launch import Outcome, Plan, end_on_signals, run_variant
from tools.bench.timing import parser_of
from tools.bench.workload import TINY, Workload, build_model
from tools.bench.zero import SIZES, Entry, select_entries, taking_part

INSIDE = "DEEPZERO_BENCH_LINKS"
CONTENDERS = (
    "deepzero0:overlap,deepzero1:overlap,deepzero1:gather,deepzero2:overlap,deepzero2:gather,deepzero3:overlap,"
    "ddp:bf16,zro:bf16,fsdp2:bf16,deepspeed2:torch-adam,floor"
)


def bucket(gbit: float) -> tuple[str, ...]:
    """The command that gives the loopback device this speed, in 10^9 bits per second; 0: no limit."""
    limit = ("tbf", "rate", f"{gbit:g}gbit", "burst", "4mb", "latency", "200ms") if gbit else ("noqueue",)
    return ("tc", "qdisc", "replace", "dev", "lo", "root", *limit)


def refusal() -> str | None:
    """What keeps this machine from throttling; None: nothing."""
    trial = "ip link set lo up && " + " ".join(bucket(10))
    try:
        done = subprocess.run(["unshare", "-n", "sh", "-c", trial], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else done.stderr.strip() or f"status {done.returncode}"


def predict(work: Workload, zero: dict[str, Any], cluster: Cluster, gbit: float) -> float:
    """Seconds of a step by simulation, on links that carry so much."""
    if gbit:
        speed = min(gbit * 1e9 / 8 / work.ranks, cluster.inside_bandwidth)
        cluster = replace(cluster, inside_bandwidth=speed, node_bandwidth=speed)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.zeros(work.micro_batch, work.block_size, dtype=torch.long, device="meta")
        return ids, ids

    program = TrainStep(lambda: build_model(work), batch, load_engine_config(settings_of(work, zero)))
    return simulate(dry_run(program, ClusterShape(work.ranks, work.ranks, "cpu")), cluster).timeline.seconds


def measure(
    entries: list[Entry], plan: Plan, rounds: int, speeds: Sequence[float]
) -> dict[tuple[str, float], list[Outcome]]:
    """What the rounds found, by contender and speed: of ``hidden`` each block's last step."""
    found, shuffle = defaultdict(list), random.Random(0)
    for number in range(1, rounds + 1):
        shuffle.shuffle(entries)
        for contender, variant in entries:
            outcome = run_variant(contender, variant, plan, f"round{number}")
            print(f"round {number}/{rounds}  {contender.name} {variant.name}: {outcome}", flush=True)
            for place, speed in enumerate(speeds if outcome.error is None else ()):
                block = slice(place * plan.steps, (place + 1) * plan.steps)
                seconds = {part: times[block] for part, times in outcome.seconds.items()}
                # The warm-up is the first block of all.
                facts = {"hidden": outcome.facts.get("hidden", [])[place + 1 : place + 2]}
                found[f"{contender.name} {variant.name}", speed].append(replace(outcome, seconds=seconds, facts=facts))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. 0; 1 where a contender failed; 2 for bad options, or where throttling is not allowed."""
    parser = parser_of(
        "links", __doc__,
        rounds=(3, "starts of each contender"), steps=(4, "timed steps at each speed"), ranks=(2, "processes"),
        **{option: (None, f"of the model (default {getattr(Workload, field)})") for option, field in SIZES.items()},
    )  # fmt: skip
    add = parser.add_argument
    add("--speeds", type=float, nargs="+", default=[1, 3, 10, 25, 0], help="10^9 bits per second; 0: memory speed")
    add("--contenders", default=CONTENDERS, metavar="A,B", help="see tools.bench.zero")
    add("--timeout", type=float, default=300.0, help="seconds for one contender in one round (default 300)")
    add("--cluster", type=Path, metavar="FILE.json", help="what tools.simulate --probe has found here (default: probe)")
    add("--quick", action="store_true", help="a tiny model: does everything run?")
    add("--page", type=Path, metavar="FILE", help="also write the page there")
    options = parser.parse_args(arguments)
    sizes = {field: getattr(options, option) for option, field in SIZES.items() if getattr(options, option)}
    work = replace(TINY if options.quick else Workload(), ranks=options.ranks, **sizes)
    try:
        entries = select_entries(options.contenders)
    except ValueError as error:
        parser.error(str(error))
    if INSIDE not in os.environ:
        if problem := refusal():
            print(
                f"links: this machine throttles no links ({problem}); root, unshare and tc are needed", file=sys.stderr
            )
            return 2
        command = ["unshare", "-n", sys.executable, "-m", "tools.bench.links", *(arguments or sys.argv[1:])]
        with tempfile.TemporaryDirectory(prefix="deepzero-probe-") as folder:
            probed = str(options.cluster or Path(folder, "here.json"))
            if options.cluster is None:
                environment = {"DEEPZERO_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
                launch(PROBE, "probe_to_file", (probed, "bfloat16"), nproc=work.ranks, environment=environment)
            return subprocess.run(command, env={**os.environ, INSIDE: probed}).returncode
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    facts = [*report.machine_facts(work), f"commit {report.commit()}", report.load_fact(work)]
    entries, commands = taking_part(entries, work.ranks), tuple(map(bucket, options.speeds))
    with tempfile.TemporaryDirectory(prefix="deepzero-bench-") as folder:
        plan = Plan(work, 2, len(commands), options.steps, True, options.timeout, Path(folder), commands=commands)
        found = measure(entries, plan, options.rounds, options.speeds)
    cluster = read_cluster(os.environ[INSIDE])
    floors = {speed: report.floor_of(found["floor pieces", speed]) for speed in options.speeds}
    rows = []
    for contender, variant in sorted(entries, key=lambda entry: (entry[0].name, entry[1].name)):
        name, zero = f"{contender.name} {variant.name}", variant.options.get("zero")
        for speed in options.speeds:
            at = f"{speed:g} Gb/s" if speed else "memory"
            if contender is FLOOR and (floor := floors[speed]):
                sums = {stage: [f"{floor.seconds(stage, best):.3f}" for best in (False, True)] for stage in (1, 3)}
                rows += [[f"floor of stage {stage}", at, *sums[stage], "1.00", "-", "-"] for stage in sums]
            row = report.summarize(contender, variant, found[name, speed])
            if row is not None:
                hidden = [share for outcome in row.rounds for share in outcome.facts["hidden"]]
                ours = contender.builder == "engines:build" and zero
                rows.append([
                    name, at, f"{row.seconds:.3f}", f"{min(row.samples):.3f}", report.over_floor(row, floors[speed]),
                    f"{median(hidden):.0%}" if hidden else "-",
                    f"{predict(work, zero, cluster, speed):.3f}" if ours else "-",
                ])  # fmt: skip
    text = report.table(["contender", "links", "median s", "best s", "x floor", "hidden", "predicted s"], rows)
    print(f"\n{text}")
    if options.page is not None:
        link = f"{work.parameters:,} parameters, {work.ranks} ranks, {options.rounds} rounds of {options.steps} steps"
        page = report.page_text([*facts, link], [("Steps by the speed of links", text)], report.command_line("links"))
        options.page.write_text(page, encoding="utf-8")
    return 1 if any(not found[f"{c.name} {v.name}", options.speeds[0]] for c, v in entries) else 0


if __name__ == "__main__":
    end_on_signals()
    exit_with(main)
