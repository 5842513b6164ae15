"""Is a checkpoint whole? ``python -m tools.verify CHECKPOINT``; see ``docs/export.md``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from deepzero.checkpoint.errors import CheckpointError
from deepzero.checkpoint.verify import verify, whole_beside
from deepzero.utils.closed_pipe import exit_with


def main(arguments: list[str] | None = None) -> int:
    """Print all damage, or a table. Returns the exit status: 0 when nothing is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tools.verify", description="Check every byte of a checkpoint.")
    parser.add_argument("checkpoint", type=Path, help="a checkpoint, or the folder that checkpoints were saved to")
    parser.add_argument("--tag", help="which checkpoint of the folder; default: the one that 'latest' names")
    options = parser.parse_args(arguments)
    try:
        report = verify(options.checkpoint, options.tag)
    except (CheckpointError, OSError) as error:
        print("verify:", str(error).replace("with tag=", "with --tag"), file=sys.stderr)
        return 1
    for problem in report.problems:
        print(problem)
    if report.problems or report.manifest is None:
        print(f"{report.path}: {len(report.problems)} problem{'s' * (len(report.problems) != 1)}", file=sys.stderr)
        if (whole := whole_beside(report.path.parent, report.path.name)) is not None:
            print(f"{whole} beside it is whole", file=sys.stderr)
        return 1
    manifest, infos = report.manifest, report.manifest.parameters.values()
    lines = {
        "ranks": manifest.world_size,
        "stage": manifest.zero_stage,
        "precision": manifest.precision,
        "step": manifest.counters["global_steps"],
        "parameters": f"{sum(info.numel for info in infos)} elements in {len(infos)} tensors",
        "bytes": f"{report.bytes} in {len(manifest.files)} files, all as written",
    }
    if report.not_stored:
        lines["not stored"] = f"{len(report.not_stored)} parameters that are not trained"
    print(f"{report.path} is whole", *(f"  {name:<11} {value}" for name, value in lines.items()), sep="\n")
    return 0


if __name__ == "__main__":
    exit_with(main)
