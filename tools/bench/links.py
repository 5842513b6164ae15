"""Steps over links of a given speed, and what a simulation says of them: ``python -m tools.bench.links``.

The benchmark starts itself again in a network namespace of its own, whose loopback device, which carries everything
that the ranks send each other, has a token bucket (``tc … tbf``). Each contender of ``zero`` is started once in a
round, and trains a block of steps at each speed in turn, so that a slow minute of the machine meets all speeds; the
order of contenders is another one in each round. ``0`` is no bucket: memory speed. Where namespaces or ``tc`` are not
allowed it says so; ``--speeds 0`` needs neither.

All ranks share the device, so one rank's link has a W-th of the speed that is printed. *x floor* is the step over its
stage's parts at that speed, each alone (``floor.py``). *Hidden* is the share of the time with something under way in
which the program did not stand still, as deepzero counts it in every step. *Predicted* is what ``tools.simulate`` says
for these links, everything else as it was probed here, just before the contender started; *in sequence* is the same
with computing, sending and copying one after the other, for on CPUs they share the cores.

``--between-nodes``: pairs of ranks pretend to be nodes, what a rank sends to another node goes through a simulated link
(``node_link.py``), a node's ranks share the speed that is printed, and the variants of ``zeropp`` take part. *Hidden*
and *exposed* are then a closed form's two ends for the variant's own step without a slow link, t0, and its bytes:
``max(t0, bytes/bandwidth)``, and ``t0 + bytes/bandwidth``; the last column asks whether the median is between them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
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
from tools.bench.launch import Outcome, Plan, end_on_signals
from tools.bench.timing import MODEL_OPTIONS, parser_of, work_of
from tools.bench.workload import Workload, build_model
from tools.bench.zero import Entry, run_rounds, select_entries, taking_part

INSIDE = "DEEPZERO_BENCH_LINKS"
CONTENDERS = (
    "deepzero0:overlap,deepzero1:overlap,deepzero1:gather,deepzero2:overlap,deepzero2:gather,deepzero3:overlap,"
    "deepzero3:gather,ddp:bf16,zro:bf16,fsdp2:bf16,deepspeed2:torch-adam,floor"
)
PER_NODE = 2  # ranks of a pretended node
Found = dict[tuple[str, float], list[Outcome]]  # contender with its variant, and speed, to what the rounds found


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


def predict(work: Workload, options: dict[str, Any], cluster: Cluster, gbit: float) -> tuple[float, float]:
    """Seconds of a step by simulation on links that carry so much: overlapped, and in sequence."""
    if gbit:
        speed = min(gbit * 1e9 / 8 / work.ranks, cluster.inside_bandwidth)
        cluster = replace(cluster, inside_bandwidth=speed, node_bandwidth=speed)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.zeros(work.micro_batch, work.block_size, dtype=torch.long, device="meta")
        return ids, ids

    settings = settings_of(work, options["zero"], **options.get("settings", {}))
    program = TrainStep(lambda: build_model(work), batch, load_engine_config(settings))
    line = simulate(dry_run(program, ClusterShape(work.ranks, work.ranks, "cpu")), cluster).timeline
    return line.seconds, sum(span.end - span.start for span in line.spans)


def probe(ranks: int, folder: str) -> Cluster:
    """This machine at memory speed, as ``tools.simulate --probe`` finds it."""
    environment, path = {"DEEPZERO_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}, str(Path(folder, "here.json"))
    launch(PROBE, "probe_to_file", (path, "bfloat16"), nproc=ranks, environment=environment)
    return read_cluster(path)


def measure(
    entries: list[Entry], plan: Plan, rounds: int, speeds: Sequence[float], before: Callable[[Entry], None]
) -> Found:
    """What the rounds found: of ``hidden`` each block's last step. ``before`` is called before each start of one."""
    found = defaultdict(list)
    for name, outcomes in run_rounds(entries, plan, rounds, before=before).items():
        for outcome in (one for one in outcomes if one.error is None):
            for place, speed in enumerate(speeds):
                block = slice(place * plan.steps, (place + 1) * plan.steps)
                seconds = {part: times[block] for part, times in outcome.seconds.items()}
                # The warm-up is the first block of all.
                facts = {**outcome.facts, "hidden": outcome.facts.get("hidden", [])[place + 1 : place + 2]}
                found[" ".join(name), speed].append(replace(outcome, seconds=seconds, facts=facts))
    return found


def table(
    entries: list[Entry], found: Found, work: Workload, speeds: Sequence[float], clusters: dict[str, list[Cluster]]
) -> str:
    """A row for each contender at each speed, of the floor one for each stage that has its own."""
    floors, rows = {speed: report.floor_of(found["floor pieces", speed]) for speed in speeds}, []
    for contender, variant in sorted(entries, key=lambda entry: (entry[0].name, entry[1].name)):
        name = f"{contender.name} {variant.name}"
        for speed in speeds:
            at = f"{speed:g} Gb/s" if speed else "memory"
            if contender is FLOOR and (floor := floors[speed]):
                sums = {stage: [f"{floor.seconds(stage, best):.3f}" for best in (False, True)] for stage in (1, 3)}
                rows += [[f"floor of stage {stage}", at, *sums[stage], "1.00", "-", "-", "-"] for stage in sums]
            row = report.summarize(contender, variant, found[name, speed])
            if row is not None:
                hidden = [share for outcome in row.rounds for share in outcome.facts["hidden"]]
                told = [predict(work, variant.options, cluster, speed) for cluster in clusters.get(name, [])]
                ends = [f"{median(ends):.3f}" for ends in zip(*told, strict=True)] or ["-", "-"]
                over, share = report.over_floor(row, floors[speed]), f"{median(hidden):.0%}" if hidden else "-"
                rows.append([name, at, f"{row.seconds:.3f}", f"{min(row.samples):.3f}", over, share, *ends])
    head = ["contender", "links", "median s", "best s", "x floor", "hidden", "predicted s", "in sequence s"]
    return report.table(head, rows)


def table_between_nodes(entries: list[Entry], found: Found, speeds: Sequence[float]) -> str:
    """A row for each variant at each speed, in the order of the contenders; ratios are to the first of them."""

    def rows() -> Iterator[list[str]]:
        for speed in speeds:
            first: tuple[float, float] | None = None
            for contender, variant in entries:
                name = f"{contender.name} {variant.name}"
                row, free = (report.summarize(contender, variant, found[name, at]) for at in (speed, 0))
                if row is None or free is None:
                    continue
                sent = row.rounds[0].facts["between_node_bytes"]
                first = first or (row.seconds, sent)
                ends = ["", "", ""]
                if speed:
                    travel = sent / rank_bandwidth(speed)
                    low, high = max(free.seconds, travel), free.seconds + travel
                    between = low <= row.seconds * 1.05 and row.seconds <= high * 1.05
                    ends = [f"{low:.3f}", f"{high:.3f}", "yes" if between else "no"]
                ratios = [f"{row.seconds / first[0]:.3f}", f"{sent / 1e6:.2f}", f"{sent / first[1]:.3f}"]
                at = f"{speed:g} Gb/s" if speed else "not throttled"
                yield [variant.name, at, f"{row.seconds:.3f}", *ratios, *ends]

    head = ["variant", "link of a node", "median s", "of the first", "MB to other nodes, a rank and step"]
    return report.table([*head, "of the first", "hidden s", "exposed s", "between the two"], rows())


def rank_bandwidth(gbit: float) -> float:
    """Bytes a second of one rank, of a node's link."""
    return gbit * 1e9 / 8 / PER_NODE


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. 0; 1 where a contender failed; 2 for bad options, or where throttling is not allowed."""
    parser = parser_of(
        "links", __doc__, rounds=(3, "starts of each contender"), steps=(4, "timed steps at each speed"),
        ranks=(None, "processes (default 2; between nodes 4)"), **MODEL_OPTIONS,
    )  # fmt: skip
    add = parser.add_argument
    add("--speeds", type=float, nargs="+", default=[1, 3, 10, 25, 0], help="10^9 bits per second; 0: memory speed")
    add("--between-nodes", action="store_true", help="only what pretended nodes of two ranks send each other")
    several = "see tools.bench.zero (default: most; between nodes zeropp)"
    add("--contenders", type=select_entries, metavar="A,B", help=several)
    add("--timeout", type=float, default=300.0, help="seconds for one contender in one round (default 300)")
    add("--cluster", type=Path, metavar="FILE.json", help="what tools.simulate --probe has found here (default: probe)")
    add("--quick", action="store_true", help="a tiny model: does everything run?")
    add("--page", type=Path, metavar="FILE", help="also write the page there")
    options = parser.parse_args(arguments)
    nodes, speeds = options.between_nodes, options.speeds
    if bad := [speed for speed in speeds if not 0 <= speed < float("inf")]:
        parser.error(f"--speeds: {bad[0]:g} is not a number of at least 0")
    work = work_of(parser, options, ranks=options.ranks or (2 * PER_NODE if nodes else 2))
    if nodes:
        if work.ranks % PER_NODE or work.ranks == PER_NODE:
            parser.error(f"--between-nodes: {work.ranks} ranks are no nodes of {PER_NODE}")
        speeds = [0, *(speed for speed in speeds if speed)]  # a step without a slow link is what others are held to
    entries = options.contenders or select_entries("zeropp" if nodes else CONTENDERS)
    throttled = any(speeds) and not nodes
    if throttled and INSIDE not in os.environ:
        return _start_again(arguments)
    if throttled:
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    facts = [*report.machine_facts(work), f"commit {report.commit()}", report.load_fact(work)]
    entries = taking_part(entries, work.ranks)
    with tempfile.TemporaryDirectory(prefix="deepzero-bench-") as folder:
        plan = Plan(
            work, 3 if nodes else 2, len(speeds), options.steps, True, options.timeout, Path(folder),
            commands=tuple(map(bucket, speeds)) if throttled else (),
            between_nodes=tuple(map(rank_bandwidth, speeds)) if nodes else (),
        )  # fmt: skip
        clusters: dict[str, list[Cluster]] = defaultdict(list)

        def before(entry: Entry) -> None:
            if entry[0].builder == "engines:build" and not nodes:
                if throttled:
                    subprocess.run(bucket(0), check=True)
                here = read_cluster(str(options.cluster)) if options.cluster else probe(work.ranks, folder)
                clusters[f"{entry[0].name} {entry[1].name}"].append(here)

        found = measure(entries, plan, options.rounds, speeds, before)
    text = table_between_nodes(entries, found, speeds) if nodes else table(entries, found, work, speeds, clusters)
    print(f"\n{text}")
    if options.page is not None:
        link = f"{work.parameters:,} parameters, {work.ranks} ranks, {options.rounds} rounds of {options.steps} steps"
        page = report.page_text([*facts, link], [("Steps by the speed of links", text)], report.command_line("links"))
        options.page.write_text(page, encoding="utf-8")
    return 1 if any(not found[f"{c.name} {v.name}", speeds[0]] for c, v in entries) else 0


def _start_again(arguments: Sequence[str] | None) -> int:
    """Run this command once more, in a network namespace of its own, whose links can be throttled."""
    if problem := refusal():
        print(f"links: this machine throttles no links ({problem}); root, unshare and tc are needed", file=sys.stderr)
        return 2
    command = ["unshare", "-n", sys.executable, "-m", "tools.bench.links", *(arguments or sys.argv[1:])]
    return subprocess.run(command, env={**os.environ, INSIDE: "1"}).returncode


if __name__ == "__main__":
    end_on_signals()
    exit_with(main)
