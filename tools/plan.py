"""What a run will hold, send and fetch, in order, without running it: ``python -m tools.plan zero.stage=3 --ranks 64``.

Source: the engine's own code, on tensors without memory; see ``deepzero/planning/dry_run.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

from deepzero.config.strict import ConfigError
from deepzero.planning import plan
from deepzero.planning.dry_run import dry_run
from deepzero.utils.closed_pipe import exit_with
from tools import composed


@composed.tool
def main(argv: Sequence[str] | None = None) -> int:
    """Print it; 0, or 2 for settings that cannot be used."""
    parser = composed.parser_of("plan", __doc__)
    composed.add_program(parser)
    parser.add_argument("--rank", type=int, default=0, help="whose plan (default 0)")
    parser.add_argument("--moves", type=int, metavar="N", help="rows of the table of moves; default: all; 0: none")
    arguments = parser.parse_intermixed_args(argv)
    composed.check_file("--json", arguments.json)
    if arguments.moves is not None and arguments.moves < 0:
        raise ConfigError(f"--moves {arguments.moves}: give 0 or more rows")
    found = composed.compose(arguments)
    if not 0 <= arguments.rank < found.world.world_size:
        raise ConfigError(f"--rank {arguments.rank}: there are ranks 0 to {found.world.world_size - 1}")
    rehearsal = dry_run(found.program, found.world, arguments.rank)
    composed.write_json(arguments.json, plan.as_dict(rehearsal))
    print(plan.text(rehearsal, arguments.moves))
    return 0


if __name__ == "__main__":
    exit_with(main)
