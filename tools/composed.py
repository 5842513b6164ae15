"""What ``tools.plan``, ``tools.simulate`` and ``tools.advise`` have in common: settings from the command line.

The same words as for ``train.py`` (``zero.stage=3 model=gpt2_1_3b``), a DeepSpeed JSON in their place, or a program of
your own: ``--program FILE.py:FUNCTION``, called without arguments, returns a ``deepzero.planning.dry_run.TrainStep``.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepzero.comm.topology import check_ranks, find_nodes
from deepzero.config.deepspeed_json import load_engine_config
from deepzero.config.engine import resolve_batch
from deepzero.config.hydra_errors import plain_names
from deepzero.config.run import RunConfig
from deepzero.config.strict import ConfigError
from deepzero.launch.launcher import default_nproc
from deepzero.planning.clusters import RANKS, Cluster
from deepzero.planning.dry_run import ClusterShape, TrainStep
from deepzero.training import command_line
from deepzero.training.build_model import program_of

BESIDE_JSON = ("model", "data", "train", "launch")


@dataclass(frozen=True)
class Composed:
    """What will be rehearsed, and where."""

    program: TrainStep
    world: ClusterShape
    tokens: int | None  # of a global batch; None: a program of one's own does not say
    name: str


def tool(main: Callable[[Sequence[str] | None], int]) -> Callable[..., int]:
    """A tool's ``main``: settings that cannot be used are one message, and status 2."""

    @functools.wraps(main)
    def run(argv: Sequence[str] | None = None) -> int:
        try:
            return main(argv)
        except ConfigError as error:
            print(plain_names(str(error)), file=sys.stderr)
        except BrokenPipeError:  # ``exit_with``'s affair
            raise
        except OSError as error:
            print(error, file=sys.stderr)
        return 2

    return run


def parser_of(name: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser with what every tool takes: overrides, a number of ranks, a file for the figures."""
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=f"python -m tools.{name}", description=doc, formatter_class=shape)
    add = parser.add_argument
    add("overrides", nargs="*", metavar="KEY=VALUE", help="as for train.py: zero.stage=3 model=gpt2_1_3b")
    add("--ranks", type=int, metavar="W", help="how many; default: the cluster's, or as many as train.py starts here")
    add("--ranks-per-node", type=int, metavar="R", help="ranks that share a machine; default: the cluster's, 8, or all")
    add("--json", metavar="FILE", help="also write all of it there")
    return parser


def add_program(parser: argparse.ArgumentParser) -> None:
    """What else can be rehearsed than ``train.py`` with these words, and on what."""
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), help="what the ranks run on; default: cuda, or as here without --ranks")
    add("--config", metavar="JSON", help="a DeepSpeed config in place of the engine's settings")
    add("--program", metavar="FILE:FUNCTION", help="a function that returns a TrainStep of your own")


def compose(arguments: argparse.Namespace, overrides: Sequence[str] = ()) -> Composed:
    """Settings, and further overrides, to a program and a world.

    Raises:
        ConfigError: whatever does not fit, as in a run.
    """
    words = [*arguments.overrides, *overrides]
    if arguments.program is not None:
        if words or arguments.config:
            raise ConfigError("--program has settings of its own; leave out the others")
        return Composed(load_program(arguments.program), _world(arguments, None), None, arguments.program)
    run = command_line.compose(words)
    if arguments.config:
        keys = {word: word.partition("=")[0].lstrip("+~").partition(".")[0] for word in words}
        if strangers := [word for word, key in keys.items() if key not in BESIDE_JSON]:
            raise ConfigError(f"--config has the engine's settings; write {', '.join(strangers)} there")
        run = dataclasses.replace(run, engine=load_engine_config(arguments.config))
    world = _world(arguments, run.launch.nproc)
    run = with_a_batch(run) if arguments.ranks else command_line.with_fallback_batch(run)
    check_ranks(run.engine, world.world_size)
    tokens = resolve_batch(run.engine, world.world_size).global_batch * run.model.block_size
    return Composed(program_of(run, world.world_size), world, tokens, run.model.name)


def with_a_batch(run: RunConfig) -> RunConfig:
    """Where nothing says how large a batch is, one sequence per rank: ``--ranks`` asks about another cluster."""
    engine = run.engine
    if engine.train_batch_size is None and engine.train_micro_batch_size_per_gpu is None:
        engine = dataclasses.replace(engine, train_micro_batch_size_per_gpu=1)
    return dataclasses.replace(run, engine=engine)


def at_least_one(arguments: argparse.Namespace, *names: str) -> None:
    """Raise :class:`ConfigError` for an option that is 0 or negative."""
    for name in names:
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: there has to be at least one")


def on_cluster(arguments: argparse.Namespace, cluster: Cluster) -> argparse.Namespace:
    """The cluster's own number of ranks, and of ranks per node, where nobody has said another."""
    ranks = arguments.ranks if arguments.ranks is not None else RANKS.get(cluster.name, cluster.ranks_per_node)
    per_node = min(cluster.ranks_per_node, ranks) if arguments.ranks_per_node is None else arguments.ranks_per_node
    return argparse.Namespace(**{**vars(arguments), "ranks": ranks, "ranks_per_node": per_node})


def _world(arguments: argparse.Namespace, nproc: int | None) -> ClusterShape:
    at_least_one(arguments, "ranks", "ranks_per_node")
    ranks = arguments.ranks or nproc or default_nproc(arguments.device or "auto")
    per_node = arguments.ranks_per_node or min(8, ranks)
    if arguments.ranks_per_node is not None:
        try:
            find_nodes(per_node, ranks)  # says which numbers would divide
        except ConfigError as error:
            raise ConfigError(str(error).replace("comm.ranks_per_node=", "--ranks-per-node ")) from None
    elif ranks % per_node:
        per_node = ranks
    kind = arguments.device or ("cpu" if arguments.ranks is None and not torch.cuda.is_available() else "cuda")
    return ClusterShape(ranks, per_node, kind)


def check_file(option: str, path: str | None) -> None:
    """Refuse a file that cannot be written, before any work is done for it.

    Raises:
        ConfigError: its folder is not there, or it is a folder itself.
    """
    if path is not None and (not Path(path).parent.is_dir() or Path(path).is_dir()):
        raise ConfigError(f"{option} {path}: give a file in a folder that exists")


def write_json(path: str | None, value: Any) -> None:
    """Write the figures where a file was asked for."""
    if path is not None:
        Path(path).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def load_program(text: str) -> TrainStep:
    """``FILE.py:FUNCTION`` → what the function returns.

    Raises:
        ConfigError: no such file or function, or it returns something else.
    """
    path, _, name = text.rpartition(":")
    if not Path(path or text).is_file():
        raise ConfigError(f"--program {text}: give FILE.py:FUNCTION; there is no file {path or text!r}")
    if not path:
        raise ConfigError(f"--program {text}: give FILE.py:FUNCTION; no function is named")
    spec = importlib.util.spec_from_file_location(f"program_{Path(path).stem}", path)  # json.py is not to be json
    if spec is None or spec.loader is None:
        raise ConfigError(f"--program {text}: {path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"--program {text}: {path} has no function {name!r}")
    program = function()
    if not isinstance(program, TrainStep):
        kind = type(program).__name__
        article = "an" if kind[0] in "aeiou" else "a"
        raise ConfigError(f"--program {text}: {name}() returned {article} {kind}, not a TrainStep")
    return program
