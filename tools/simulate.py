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
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deepzero.planning.calibrate
from deepzero.config.hydra_errors import plain_names
from deepzero.config.strict import ConfigError
from deepzero.launch.launcher import RankFailed, default_nproc, default_threads, launch, under_launcher
from deepzero.launch.rank_process import run_here
from deepzero.planning.calibrate import probe_to_file
from deepzero.planning.check_collective_order import check
from deepzero.planning.clusters import PRESETS, RANKS, Cluster, find_cluster
from deepzero.planning.simulate import simulate
from deepzero.runtime.build import TORCH_DTYPES
from deepzero.training.command_line import compose
from tools import composed

PROBE = deepzero.planning.calibrate.__file__
DIFFERENT = 3
"""Exit status: ranks launch different collectives."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print it.

    Returns:
        0; 1 where a probing rank failed; 2 for settings that cannot be used; 3 where ranks would go different ways.
    """
    arguments = _parser().parse_intermixed_args(argv)
    try:
        if arguments.probe:
            _probe(arguments)
            return 0
        if arguments.save:
            raise ConfigError("--save belongs to --probe: it is where the measured cluster goes")
        results, differences = _simulate_all(arguments)
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    except (ConfigError, OSError) as error:
        print(plain_names(str(error)), file=sys.stderr)
        return 2
    except RankFailed as error:
        print(error, file=sys.stderr)
        return 1
    return DIFFERENT if differences else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.simulate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    composed.add_arguments(parser)
    parser.add_argument(
        "--cluster", action="append", metavar="NAME[,FIELD=NUMBER]", help=f"{', '.join(PRESETS)}; may be given again"
    )
    parser.add_argument("--compare", action="append", default=[], metavar="KEY=VALUE …", help="settings beside others")
    parser.add_argument(
        "--wrong", action="append", default=[], metavar="RANK:MODULE", help="let a rank leave a module out"
    )
    parser.add_argument("--check", type=int, action="append", metavar="RANK", help="rehearse these ranks only")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("--probe", action="store_true", help="measure this machine (under torchrun: these) instead")
    parser.add_argument("--save", metavar="FILE.json", help="with --probe: where it goes, for --cluster FILE.json")
    return parser


def _probe(arguments: argparse.Namespace) -> None:
    """Measure on ranks of this machine, or as one of torchrun's; print the cluster, or save it."""
    others = (arguments.cluster, arguments.compare, arguments.wrong, arguments.check, arguments.json, arguments.program)
    if any(others) or arguments.config or arguments.ranks_per_node is not None:
        raise ConfigError(
            "--probe measures, and simulates nothing; it goes with --ranks, --device, --save, precision=…"
        )
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
            told = os.environ["RANK"] == "0"
        else:
            nproc = default_nproc() if arguments.ranks is None else arguments.ranks
            if nproc < 1:
                raise ConfigError(f"--ranks {nproc}: there has to be at least one")
            threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(default_threads(nproc)))}
            launch(PROBE, "probe_to_file", (str(path), dtype), nproc=nproc, environment={**device, **threads})
            told = True
        if told:
            print(path.read_text(encoding="utf-8"), end="")


def _simulate_all(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    composed.check_file("--json", arguments.json)
    wrong, results, different = dict(map(_wrong_rank, arguments.wrong)), [], False
    for cluster in [find_cluster(text) for text in arguments.cluster or ["h100"]]:
        for words in arguments.compare or [""]:
            found = composed.compose(_on(arguments, cluster), words.split())
            print(f"\n{found.name} {' '.join([*arguments.overrides, *words.split()])}".rstrip(), flush=True)
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
            settings = " ".join([*arguments.overrides, *words.split()])
            said = [str(difference) for difference in differences]
            results.append({"settings": settings, **simulated.as_dict(), "differences": said, "seconds": took})
            different = different or bool(differences)
    return results, different


def _on(arguments: argparse.Namespace, cluster: Cluster) -> argparse.Namespace:
    """The cluster's own number of ranks, and of ranks per node, where nobody has said another."""
    ranks = arguments.ranks if arguments.ranks is not None else RANKS.get(cluster.name, cluster.ranks_per_node)
    per_node = min(cluster.ranks_per_node, ranks) if arguments.ranks_per_node is None else arguments.ranks_per_node
    device = arguments.device or cluster.device_type
    return argparse.Namespace(**{**vars(arguments), "ranks": ranks, "ranks_per_node": per_node, "device": device})


def _wrong_rank(text: str) -> tuple[int, str]:
    rank, _, module = text.partition(":")
    if not rank.isdigit() or not module:
        raise ConfigError(f"--wrong {text}: give RANK:MODULE, for example 17:blocks.3.mlp")
    return int(rank), module


def _say(text: str) -> None:
    if sys.stderr.isatty():
        print(f"  {text} …", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
