"""Which stage, offload and micro-batch for a model on given GPUs: what fits, the fastest first, and the command to run.

    python -m tools.advise model=gpt2_1_3b --ranks 8 --cluster h100
    python -m tools.advise model=llama_7b --ranks 8 --cluster h100 --memory-gb 24 --host-gb 512 --global-batch 64

What is given as KEY=VALUE stays as it is. Exit status: 0, 2 for settings that cannot be used, 3 where nothing fits.
How it searches: ``deepzero/planning/autotune.py``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from deepzero.comm.topology import find_nodes
from deepzero.config.hydra_errors import plain_names
from deepzero.config.strict import ConfigError
from deepzero.planning.autotune import Search, as_dict, text
from deepzero.planning.clusters import PRESETS, RANKS, Cluster, find_cluster
from deepzero.planning.dry_run import ClusterShape
from deepzero.planning.search_space import HEADROOM, Question
from deepzero.training.build_model import program_of
from deepzero.training.command_line import compose

NOTHING = 3
"""Exit status: no setting fits."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print it."""
    arguments = _parser().parse_intermixed_args(argv)
    try:
        target = Path(arguments.json) if arguments.json else None
        if target is not None and not target.resolve().parent.is_dir():
            raise ConfigError(f"--json {target}: there is no folder {target.resolve().parent}; make it first")
        advice = Search(question_of(arguments)).run()
        if target is not None:
            target.write_text(json.dumps(as_dict(advice), indent=1) + "\n", encoding="utf-8")
    except (ConfigError, OSError) as error:
        print(plain_names(str(error)), file=sys.stderr)
        return 2
    except RuntimeError as error:
        if "meta tensor" not in str(error):
            raise
        print(f"this model reads values while it runs, so that it cannot be rehearsed: {error}", file=sys.stderr)
        return 2
    print(text(advice))
    return 0 if advice.options or advice.waiting else NOTHING


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.advise", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("overrides", nargs="*", metavar="KEY=VALUE", help="as for train.py: model=gpt2_1_3b; they stay as they are")
    add("--cluster", default="h100", metavar="NAME[,FIELD=NUMBER]", help=f"{', '.join(PRESETS)}; default h100")
    add("--ranks", type=int, metavar="W", help="GPUs; default: one node's, or as many as the preset had")
    add("--ranks-per-node", type=int, metavar="R", help="GPUs that share a machine; default: the cluster's, or all")
    add("--memory-gb", type=float, metavar="GB", help="of one GPU, 10^9 bytes; default: the cluster's")
    add("--host-gb", type=float, metavar="GB", help="of one node's host; default: the cluster's")
    add("--headroom", type=float, default=HEADROOM, metavar="PART", help=f"of both to leave free; default {HEADROOM}")
    add("--global-batch", type=int, metavar="N", help="sequences of an optimizer step; default: whatever is fastest")
    add("--lossy", action="store_true", help="also try what changes bits: qwZ and qgZ")
    add("--rehearsals", type=int, default=12, metavar="N", help="at most so many settings are rehearsed (default 12)")
    add("--seconds", type=float, default=50.0, help="time to take, but for the first rehearsal (default 50)")
    add("--json", metavar="FILE", help="also write all figures there")
    return parser


def question_of(arguments: argparse.Namespace) -> Question:
    """The command line, checked.

    Raises:
        ConfigError: a number that cannot be, or an override that train.py would not take.
    """
    for name in ("ranks", "ranks_per_node", "global_batch", "rehearsals"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: there has to be at least one")
    for name in ("memory_gb", "host_gb", "seconds"):
        value = getattr(arguments, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ConfigError(f"--{name.replace('_', '-')} {value}: must be a positive number")
    if not 0 <= arguments.headroom < 1:
        raise ConfigError(f"--headroom {arguments.headroom}: must be a part, from 0 to below 1; a tenth is {HEADROOM}")
    cluster = _cluster(arguments)
    world = _world(arguments, cluster)
    run = compose(arguments.overrides)
    if run.launch.nproc not in (None, world.world_size):
        raise ConfigError(
            f"launch.nproc={run.launch.nproc}: advice is for {world.world_size} ranks (--ranks); leave it out"
        )
    return Question(
        words=tuple(arguments.overrides),
        compose=compose,
        make=program_of,
        cluster=cluster,
        world=world,
        headroom=arguments.headroom,
        global_batch=arguments.global_batch,
        lossy=arguments.lossy,
        rehearsals=arguments.rehearsals,
        seconds=arguments.seconds,
        tell=_say,
    )


def _cluster(arguments: argparse.Namespace) -> Cluster:
    cluster = find_cluster(arguments.cluster)
    if arguments.memory_gb is not None:
        cluster = dataclasses.replace(cluster, memory_bytes=arguments.memory_gb * 1e9)
    if arguments.host_gb is not None:
        cluster = dataclasses.replace(cluster, host_bytes=arguments.host_gb * 1e9)
    return cluster


def _world(arguments: argparse.Namespace, cluster: Cluster) -> ClusterShape:
    ranks = arguments.ranks or RANKS.get(cluster.name, cluster.ranks_per_node)
    per_node = arguments.ranks_per_node or min(cluster.ranks_per_node, ranks)
    if arguments.ranks_per_node is None and ranks % per_node:
        raise ConfigError(
            f"--ranks {ranks}: {cluster.name} has {per_node} on a node, which does not divide it; say --ranks-per-node"
        )
    find_nodes(per_node, ranks)  # says which numbers would divide
    return ClusterShape(ranks, per_node, "cpu" if cluster.device_type == "cpu" else "cuda")


def _say(what: str) -> None:
    print(f"  {what} …", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
