"""What a run will hold, send and fetch, in order, without running it: ``python -m tools.plan zero.stage=3 --ranks 64``.

Source: the engine's own code, on tensors without memory; see ``deepzero/planning/dry_run.py``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from deepzero.config.hydra_errors import plain_names
from deepzero.config.strict import ConfigError
from deepzero.planning import plan
from deepzero.planning.dry_run import dry_run
from tools import composed


def main(argv: Sequence[str] | None = None) -> int:
    """Print it; 0, or 2 for settings that cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m tools.plan", description=__doc__)
    composed.add_arguments(parser)
    parser.add_argument("--rank", type=int, default=0, help="whose plan (default 0)")
    parser.add_argument("--moves", type=int, metavar="N", help="rows of the table of moves; default: all; 0: none")
    parser.add_argument("--json", metavar="FILE", help="also write all of it there, waits included")
    arguments = parser.parse_intermixed_args(argv)
    try:
        composed.check_file("--json", arguments.json)
        if arguments.moves is not None and arguments.moves < 0:
            raise ConfigError(f"--moves {arguments.moves}: give 0 or more rows")
        found = composed.compose(arguments)
        if not 0 <= arguments.rank < found.world.world_size:
            raise ConfigError(f"--rank {arguments.rank}: there are ranks 0 to {found.world.world_size - 1}")
        rehearsal = dry_run(found.program, found.world, arguments.rank)
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(plan.as_dict(rehearsal), indent=1) + "\n", encoding="utf-8")
    except (ConfigError, OSError) as error:
        print(plain_names(str(error)), file=sys.stderr)
        return 2
    print(plan.text(rehearsal, arguments.moves))
    return 0


if __name__ == "__main__":
    sys.exit(main())
