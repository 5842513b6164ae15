"""Which stage, offload and micro-batch for a model on given GPUs: what fits, the fastest first, and the command to run.

    python -m tools.advise model=gpt2_1_3b --ranks 8 --cluster h100
    python -m tools.advise model=llama_7b --ranks 8 --cluster h100 --memory-gb 24 --host-gb 512 --global-batch 64

What is given as KEY=VALUE stays as it is. Exit status: 0, 2 for settings that cannot be used, 3 where nothing fits.
How it searches: ``deepzero/planning/autotune.py``.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Sequence

from deepzero.comm.topology import find_nodes
from deepzero.config.strict import ConfigError
from deepzero.planning.autotune import Search, as_dict, text
from deepzero.planning.clusters import PRESETS, find_cluster
from deepzero.planning.dry_run import ClusterShape
from deepzero.planning.search_space import HEADROOM, Question
from deepzero.training.build_model import program_of
from deepzero.training.command_line import compose
from deepzero.utils.closed_pipe import exit_with
from tools import composed

NOTHING = 3  # exit status: no setting fits


@composed.tool
def main(argv: Sequence[str] | None = None) -> int:
    """Print it."""
    parser = composed.parser_of("advise", __doc__)
    add = parser.add_argument
    add("--cluster", default="h100", metavar="NAME[,FIELD=NUMBER]", help=f"{', '.join(PRESETS)}; default h100")
    add("--memory-gb", type=float, metavar="GB", help="of one GPU, 10^9 bytes; default: the cluster's")
    add("--host-gb", type=float, metavar="GB", help="of one node's host; default: the cluster's")
    add("--headroom", type=float, default=HEADROOM, metavar="PART", help=f"of both to leave free; default {HEADROOM}")
    add("--global-batch", type=int, metavar="N", help="sequences of an optimizer step; default: whatever is fastest")
    add("--lossy", action="store_true", help="also try what changes bits: qwZ and qgZ")
    add("--rehearsals", type=int, default=12, metavar="N", help="at most so many settings are rehearsed (default 12)")
    add("--seconds", type=float, default=50.0, help="time to take, but for the first rehearsal (default 50)")
    arguments = parser.parse_intermixed_args(argv)
    composed.check_file("--json", arguments.json)
    advice = Search(question_of(arguments)).run()
    composed.write_json(arguments.json, as_dict(advice))
    print(text(advice))
    return 0 if advice.options or advice.waiting else NOTHING


def question_of(arguments: argparse.Namespace) -> Question:
    """The command line, checked.

    Raises:
        ConfigError: a number that cannot be, or an override that train.py would not take.
    """
    composed.at_least_one(arguments, "ranks", "ranks_per_node", "global_batch", "rehearsals")
    for name in ("memory_gb", "host_gb", "seconds"):
        value = getattr(arguments, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ConfigError(f"--{name.replace('_', '-')} {value}: must be a positive number")
    if not 0 <= arguments.headroom < 1:
        raise ConfigError(f"--headroom {arguments.headroom}: must be a part, from 0 to below 1; a tenth is {HEADROOM}")
    cluster = find_cluster(arguments.cluster)
    sizes = {"memory_bytes": arguments.memory_gb, "host_bytes": arguments.host_gb}
    cluster = dataclasses.replace(cluster, **{key: gb * 1e9 for key, gb in sizes.items() if gb is not None})
    here = composed.on_cluster(arguments, cluster)
    if arguments.ranks_per_node is None and here.ranks % here.ranks_per_node:
        rule = f"{cluster.name} has {here.ranks_per_node} on a node, which does not divide it; say --ranks-per-node"
        raise ConfigError(f"--ranks {here.ranks}: {rule}")
    find_nodes(here.ranks_per_node, here.ranks)  # says which numbers would divide
    run = compose(arguments.overrides)
    if run.launch.nproc not in (None, here.ranks):
        raise ConfigError(f"launch.nproc={run.launch.nproc}: advice is for {here.ranks} ranks (--ranks); leave it out")
    return Question(
        words=tuple(arguments.overrides),
        compose=compose,
        make=program_of,
        cluster=cluster,
        world=ClusterShape(here.ranks, here.ranks_per_node, "cpu" if cluster.device_type == "cpu" else "cuda"),
        headroom=arguments.headroom,
        global_batch=arguments.global_batch,
        lossy=arguments.lossy,
        rehearsals=arguments.rehearsals,
        seconds=arguments.seconds,
        tell=lambda what: print(f"  {what} …", file=sys.stderr, flush=True),
    )


if __name__ == "__main__":
    exit_with(main)
