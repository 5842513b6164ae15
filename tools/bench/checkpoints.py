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

import argparse
import importlib.util
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from tools.bench.engines import deepspeed_of, settings_of, step_of
from tools.bench.stats import median
from tools.bench.workload import TINY, Workload, batch, build_model, make_tokens, tokens_needed

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


def rank_program(library: str, settings: dict[str, Any]) -> None:
    """One rank: blocks of steps, then a load; rank 0 writes what it measured."""
    import torch.distributed as dist

    work, steps, folder = Workload(**settings["work"]), settings["steps"], Path(settings["folder"]) / library
    torch.set_num_threads(1)
    engine = make_engine(library, work, settings["stage"])
    rank = dist.get_rank()
    tokens, step = make_tokens(work.vocab_size, tokens_needed(work, steps)), step_of(engine)

    def block(mode: str) -> float:
        dist.barrier()
        started = time.perf_counter()
        for number in range(steps):
            step(*batch(work, tokens, number % steps, rank))
            if number == 0 and mode != "none":
                more = {"asynchronous": mode == "asynchronous"} if library == "deepzero" else {}
                engine.save_checkpoint(str(folder), tag="bench", **more)
        dist.barrier()
        return time.perf_counter() - started

    modes = [mode for mode in MODES if library == "deepzero" or mode != "asynchronous"]
    for mode in modes:
        block(mode)
    seconds: dict[str, list[float]] = {}
    for _ in range(settings["rounds"]):
        for mode in modes:
            seconds.setdefault(mode, []).append(block(mode))
    if library == "deepzero":
        engine.wait_for_checkpoint()
    loads = [_timed(lambda: engine.load_checkpoint(str(folder), tag="bench")) for _ in range(3)]
    if rank == 0:
        (Path(settings["folder"]) / f"{library}.json").write_text(json.dumps({"blocks": seconds, "loads": loads}))
    dist.barrier()


def _timed(act: Callable[[], Any]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def report(library: str, measured: dict[str, Any], size: int, steps: int) -> None:
    """Print one library's rows."""
    plain = measured["blocks"]["none"]
    print(f"{library}: {size / 1e9:.2f} GB on the disk; {steps} steps without a save {median(plain):.2f} s (median)")
    for mode, values in measured["blocks"].items():
        if mode != "none":
            ratio, best = median(values) / median(plain), min(values) / min(plain)
            cost = median(values) - median(plain)
            numbers = f"ratio {ratio:.3f} (minima {best:.3f})  +{cost:.2f} s"
            print(f"  with one {mode:12} save {median(values):7.2f} s  {numbers}")
    print(f"  load {median(measured['loads']):.2f} s")


def main() -> None:
    """Measure and print."""
    from deepzero.launch.launcher import launch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="steps in a block, one save in each")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=None, help="where checkpoints go; default: a temporary folder")
    parser.add_argument("--libraries", default="deepzero,deepspeed")
    parser.add_argument("--quick", action="store_true", help="a tiny model: does everything run?")
    given = parser.parse_args()
    work = TINY if given.quick else Workload()
    folder = Path(tempfile.mkdtemp(prefix="deepzero-bench-", dir=given.folder))
    settings = {
        "work": work.to_dict(), "steps": given.steps, "rounds": given.rounds, "stage": given.stage,
        "folder": str(folder),
    }  # fmt: skip
    environment = {"DEEPZERO_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    try:
        for library in given.libraries.split(","):
            if importlib.util.find_spec(library) is None:
                print(f"{library}: not installed")
                continue
            arguments = (library, settings)
            launch(str(Path(__file__).resolve()), "rank_program", arguments, nproc=work.ranks, environment=environment)
            size = sum(path.stat().st_size for path in (folder / library).rglob("*") if path.is_file())
            report(library, json.loads((folder / f"{library}.json").read_text()), size, given.steps)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
