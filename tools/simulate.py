"""Thousands of ranks on a laptop: does every rank launch the same, how long does a step take, does it fit?

    python -m tools.simulate model=gpt3_175b zero.stage=3 --ranks 1024 --cluster h100
    python -m tools.simulate --probe --ranks 2 --save here.json
    python -m tools.simulate --cluster here.json --ranks 2 zero.stage=2
    python -m tools.simulate --compare zero.stage=1 --compare zero=stage1_allreduce --cluster dgx_2h model=gpt2_1_3b

Each telling rank is rehearsed (``deepzero/planning/check_collective_order.py``), the rehearsal is played on the
cluster's numbers (``deepzero/planning/simulate.py``). ``--probe`` measures instead what the machine at hand can
do, on ranks that it starts, or on those that torchrun has started it as (``deepzero/planning/calibrate.py``).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deepzero.planning.calibrate
from deepzero.config.strict import ConfigError
from deepzero.launch.launcher import RankFailed, default_nproc, default_threads, launch, under_launcher
from deepzero.launch.rank_process import run_here
from deepzero.planning.calibrate import probe_to_file
from deepzero.planning.check_collective_order import check
from deepzero.planning.clusters import PRESETS, Cluster, find_cluster
from deepzero.planning.simulate import simulate
from deepzero.runtime.build import TORCH_DTYPES
from deepzero.training.command_line import compose
from deepzero.utils.closed_pipe import exit_with
from tools import composed

PROBE = deepzero.planning.calibrate.__file__
DIFFERENT = 3  # exit status: ranks launch different collectives


@composed.tool
def main(argv: Sequence[str] | None = None) -> int:
    """Print it.

    Returns:
        0; 1 where a probing rank failed; 2 for settings that cannot be used; 3 where ranks would go different ways.
    """
    parser = composed.parser_of("simulate", __doc__)
    composed.add_program(parser)
    add = parser.add_argument
    add("--cluster", action="append", metavar="NAME[,FIELD=NUMBER]", help=f"{', '.join(PRESETS)}; may be given again")
    add("--compare", action="append", default=[], metavar="KEY=VALUE …", help="settings beside others")
    add("--wrong", action="append", default=[], metavar="RANK:MODULE", help="let a rank leave a module out")
    add("--check", type=int, action="append", metavar="RANK", help="rehearse these ranks only")
    add("--probe", action="store_true", help="measure this machine (under torchrun: these) instead")
    add("--save", metavar="FILE.json", help="with --probe: where it goes, for --cluster FILE.json")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.probe:
        try:
            _probe(arguments)
        except RankFailed as error:
            print(error, file=sys.stderr)
            return 1
        return 0
    if arguments.save:
        raise ConfigError("--save belongs to --probe: it is where the measured cluster goes")
    composed.check_file("--json", arguments.json)
    wrong = dict(map(_wrong_rank, arguments.wrong))
    clusters = [find_cluster(text) for text in arguments.cluster or ["h100"]]
    settings = arguments.compare or [""]
    results = [_simulate(arguments, cluster, words, wrong) for cluster in clusters for words in settings]
    composed.write_json(arguments.json, results)
    return DIFFERENT if any(result["differences"] for result in results) else 0


def _probe(arguments: argparse.Namespace) -> None:
    """Measure on ranks of this machine, or as one of torchrun's; print the cluster, or save it."""
    others = ("cluster", "compare", "wrong", "check", "json", "program", "config")
    if any(getattr(arguments, name) for name in others) or arguments.ranks_per_node is not None:
        what = "--probe measures, and simulates nothing"
        raise ConfigError(f"{what}; it goes with --ranks, --device, --save, precision=…")
    composed.check_file("--save", arguments.save)
    if arguments.save and not arguments.save.endswith(".json"):
        raise ConfigError(f"--save {arguments.save}: --cluster knows a file by its name's end, which has to be .json")
    dtype = str(TORCH_DTYPES[compose(arguments.overrides).engine.precision.dtype]).removeprefix("torch.")
    device = {"DEEPZERO_DEVICE": arguments.device} if arguments.device else {}
    with tempfile.TemporaryDirectory(prefix="deepzero-probe-") as folder:
        path = Path(arguments.save or Path(folder) / "probed.json").absolute()
        if under_launcher():
            if arguments.ranks is not None:
                raise ConfigError("--ranks: torchrun has started the ranks; leave it out")
            os.environ.update(device)
            run_here(probe_to_file, str(path), dtype)
        else:
            composed.at_least_one(arguments, "ranks")
            nproc = arguments.ranks or default_nproc(arguments.device or "auto")
            threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(default_threads(nproc))}
            launch(PROBE, "probe_to_file", (str(path), dtype), nproc=nproc, environment={**device, **threads})
        if not under_launcher() or os.environ["RANK"] == "0":
            print(path.read_text(encoding="utf-8"), end="")


def _simulate(arguments: argparse.Namespace, cluster: Cluster, words: str, wrong: dict[int, str]) -> dict[str, Any]:
    """One setting on one cluster, printed, and as figures."""
    settings = " ".join([*arguments.overrides, *words.split()])
    here = composed.on_cluster(arguments, cluster)
    here.device = arguments.device or cluster.device_type
    found = composed.compose(here, words.split())
    print(f"\n{found.name} {settings}".rstrip(), flush=True)
    began = time.perf_counter()
    rehearsals, differences = check(found.program, found.world, wrong, arguments.check, _say)
    took = time.perf_counter() - began
    names = ", ".join(str(r.rank) for r in rehearsals)
    verdict = "all go the same way" if not differences else "THEY GO DIFFERENT WAYS"
    if len(rehearsals) == 1:
        verdict = "one alone, compared with none"
    print(f"  ranks {names} rehearsed in {took:.1f} s: {verdict}, {len(rehearsals[0].trail):,} collectives")
    for difference in differences:
        print(f"  {difference}")
    for rank in sorted(set(wrong) - {difference.rank for difference in differences}):
        print(f"  rank {rank} without {wrong[rank]} does what the others do")
    usual = [r for r in rehearsals if r.rank not in wrong] or rehearsals
    simulated = simulate(usual[0], cluster, found.tokens)
    print("\n".join("  " + line for line in simulated.lines()), flush=True)
    said = [str(difference) for difference in differences]
    return {"settings": settings, **simulated.as_dict(), "differences": said, "seconds": took}


def _wrong_rank(text: str) -> tuple[int, str]:
    rank, _, module = text.partition(":")
    if not rank.isdigit() or not module:
        raise ConfigError(f"--wrong {text}: give RANK:MODULE, for example 17:blocks.3.mlp")
    return int(rank), module


def _say(text: str) -> None:
    if sys.stderr.isatty():
        print(f"  {text} …", file=sys.stderr, flush=True)


if __name__ == "__main__":
    exit_with(main)
