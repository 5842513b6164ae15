"""What saving costs a training run, and how long loading takes: ``python -m tools.bench.checkpoints``.

Blocks of 20 steps follow each other on the same ranks: with an asynchronous save after the first step, with a
synchronous one, without any; again and again, in turn, so that a slow minute of the machine meets all three. Printed
are medians of the blocks' seconds and their ratio to the blocks without a save. A first save of each kind is not
counted: it makes the memory that later ones use again.

DeepSpeed, where it is installed, does the same in processes of its own: its ``save_checkpoint`` blocks.

The model is the one of ``tools.bench.zero``, and the worst case: few tokens a step, so that there is little training
to hide a save behind. The folder should be on the disk that checkpoints would go to (``--folder``).
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch

from deepzero.utils.closed_pipe import exit_with
from tools.bench.engines import deepspeed_of, settings_of, step_of
from tools.bench.timing import parser_of, timed
from tools.bench.workload import TINY, Workload, batch, build_model, tokens_for

MODES = ("none", "asynchronous", "none", "synchronous")
"""Blocks in turn; the blocks without a save stand on both sides of each that has one."""


def make_engine(library: str, work: Workload, stage: int) -> Any:
    """An engine of deepzero or of DeepSpeed over the same model."""
    model, config = build_model(work), settings_of(work, {"stage": stage})
    if library == "deepzero":
        import deepzero

        return deepzero.initialize(model=model, config=config)[0]
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **work.adamw)
    return deepspeed_of(model, config, torch.device("cpu"), optimizer)


def rank_program(library: str, work: Workload, steps: int, rounds: int, stage: int, folder: str) -> None:
    """One rank: blocks of steps, then a load; rank 0 writes what it measured."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    engine, target = make_engine(library, work, stage), str(Path(folder, library))
    tokens, step, rank = tokens_for(work, steps), step_of(engine), dist.get_rank()

    def block(mode: str) -> None:
        for number in range(steps):
            step(*batch(work, tokens, number, rank))
            if number == 0 and mode != "none":
                more = {"asynchronous": mode == "asynchronous"} if library == "deepzero" else {}
                engine.save_checkpoint(target, tag="bench", **more)
        dist.barrier()

    modes = [mode for mode in MODES if library == "deepzero" or mode != "asynchronous"]
    seconds: dict[str, list[float]] = {mode: [] for mode in modes}
    for number in range(rounds + 1):
        for mode in modes:
            dist.barrier()
            took = timed(lambda mode=mode: block(mode))
            seconds[mode] += [took] if number else []
    if library == "deepzero":
        engine.wait_for_checkpoint()
    loads = [timed(lambda: engine.load_checkpoint(target, tag="bench")) for _ in range(3)]
    if rank == 0:
        Path(folder, f"{library}.json").write_text(json.dumps({"blocks": seconds, "loads": loads}))
    dist.barrier()


def report(library: str, measured: dict[str, Any], size: int, steps: int) -> None:
    """Print one library's rows."""
    plain = measured["blocks"].pop("none")
    print(f"{library}: {size / 1e9:.2f} GB on the disk; {steps} steps without a save {median(plain):.2f} s (median)")
    for mode, values in measured["blocks"].items():
        ratio, best = median(values) / median(plain), min(values) / min(plain)
        numbers = f"ratio {ratio:.3f} (minima {best:.3f})  +{median(values) - median(plain):.2f} s"
        print(f"  with one {mode:12} save {median(values):7.2f} s  {numbers}")
    print(f"  load {median(measured['loads']):.2f} s")


def main() -> None:
    """Measure and print."""
    from deepzero.launch.launcher import launch

    steps = (20, "steps in a block, one save in each")
    parser = parser_of("checkpoints", __doc__, steps=steps, rounds=(4, "that count"))
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=None, help="where checkpoints go; default: a temporary folder")
    parser.add_argument("--libraries", default="deepzero,deepspeed")
    parser.add_argument("--quick", action="store_true", help="a tiny model: does everything run?")
    given = parser.parse_args()
    work = TINY if given.quick else Workload()
    environment = {"DEEPZERO_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="deepzero-bench-", dir=given.folder, ignore_cleanup_errors=True) as name:
        for library in given.libraries.split(","):
            if importlib.util.find_spec(library) is None:
                print(f"{library}: not installed")
                continue
            arguments = (library, work, given.steps, given.rounds, given.stage, name)
            launch(__file__, "rank_program", arguments, nproc=work.ranks, environment=environment)
            size = sum(path.stat().st_size for path in Path(name, library).rglob("*") if path.is_file())
            report(library, json.loads(Path(name, f"{library}.json").read_text()), size, given.steps)


if __name__ == "__main__":
    exit_with(main)
