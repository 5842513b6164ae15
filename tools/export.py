"""A model out of a checkpoint: ``python -m tools.export CHECKPOINT OUT --dtype bf16``; see ``docs/export.md``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from deepzero.checkpoint.errors import CheckpointError
from deepzero.checkpoint.export import DEFAULT_MAX_SHARD, PRECISIONS, export
from deepzero.utils.closed_pipe import exit_with


def main(arguments: list[str] | None = None) -> int:
    """Export, say what was written. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.export", description="One model out of a checkpoint.")
    parser.add_argument("checkpoint", type=Path, help="a checkpoint, or the folder that checkpoints were saved to")
    parser.add_argument("out", type=Path, help="the folder for model.safetensors")
    parser.add_argument("--dtype", choices=list(PRECISIONS), help="of floating parameters and buffers; has to be given")
    parser.add_argument("--tag", help="which checkpoint of the folder; default: the one that 'latest' names")
    parser.add_argument("--max-shard-size", default=DEFAULT_MAX_SHARD, help="of one file; default: %(default)s")
    parser.add_argument("--strip-prefix", default="", metavar="PREFIX", help="take it from the front of every name")
    parser.add_argument("--hf-config", type=Path, metavar="FILE", help="copy it to OUT/config.json")
    parser.add_argument("--force", action="store_true", help="replace a model that is there")
    parser.add_argument("--partial", action="store_true", help="leave out parameters that were not saved")
    options = parser.parse_args(arguments)
    if options.dtype is None:
        parser.error("say which numbers are wanted: --dtype bf16 or fp16, or --dtype fp32, the masters themselves")
    try:
        done = export(**vars(options))
    except (CheckpointError, OSError) as error:
        print("export:", str(error).replace("with tag=", "with --tag"), file=sys.stderr)
        return 1
    print(f"{done.folder}: {done.tensors} tensors, {done.bytes} bytes in {', '.join(done.files)}")
    for name in done.left_out:
        print(f"left out, for the checkpoint does not hold it: {name}")
    return 0


if __name__ == "__main__":
    exit_with(main)
