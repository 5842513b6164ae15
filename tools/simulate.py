"""Thousands of ranks on a laptop: does every rank launch the same, how long does a step take, does it fit?

    python -m tools.simulate model=gpt3_175b zero.stage=3 --ranks 1024 --cluster h100
    python -m tools.simulate --compare zero.stage=1 --compare zero=stage1_allreduce --cluster dgx_2h model=gpt2_1_3b

Each telling rank is rehearsed (``deepzero/planning/sequence.py``), the rehearsal is played on the cluster's numbers
(``deepzero/planning/timeline.py``).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepzero.config.parse import ConfigError
from deepzero.config.words import plain_names
from deepzero.planning.clusters import PRESETS, RANKS, Cluster, find_cluster
from deepzero.planning.sequence import check
from deepzero.planning.simulate import simulate
from tools import composed

DIFFERENT = 3
"""Exit status: ranks launch different collectives."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print it; 0, 2 for settings that cannot be used, 3 where ranks would wait for each other for ever."""
    arguments = _parser().parse_args(argv)
    try:
        results, differences = _simulate_all(arguments)
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    except (ConfigError, OSError) as error:
        print(plain_names(str(error)), file=sys.stderr)
        return 2
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
    return parser


def _simulate_all(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
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
            print(f"  ranks {names} rehearsed in {took:.1f} s: {verdict}, {len(rehearsals[0].trail):,} collectives")
            for difference in differences:
                print(f"  {difference}")
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
    ranks = arguments.ranks or RANKS.get(cluster.name, cluster.ranks_per_node)
    per_node = arguments.ranks_per_node or min(cluster.ranks_per_node, ranks)
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
