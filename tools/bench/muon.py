"""What one owner for each matrix saves: ``python -m tools.bench.muon``.

Three engines in each rank, which step in turn on the same tokens: Muon under ZeRO, whose matrices have one owner each;
the naive form, in which every rank orthogonalises all of them (stage 0); and AdamW under the same ZeRO. *Optimizer* is
the part of a step that the optimizer takes on a rank, the slowest rank's. Step times hold the reduction and the
publication, in which stage 0 sends as many bytes.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from deepzero.launch.launcher import launch
from deepzero.utils.closed_pipe import exit_with
from tools.bench import report
from tools.bench.engines import settings_of, step_of
from tools.bench.timing import interleaved, parser_of
from tools.bench.workload import TINY, Workload, build_model, tokens_for
from tools.bench.zero import SIZES

MUON = {"type": "Muon", "params": {"lr": 1e-4, "muon_lr": 0.02}}


def contenders(stage: int) -> dict[str, tuple[int, dict[str, Any]]]:
    """Stage and optimizer's block by name."""
    adamw = {"type": "AdamW", "params": {"lr": 1e-4}}
    return {f"Muon, stage {stage}": (stage, MUON), "Muon, naive": (0, MUON), f"AdamW, stage {stage}": (stage, adamw)}


def on_rank(sizes: dict[str, Any], stage: int, rounds: int, file: str) -> None:
    """One rank: build all engines, step in turn; rank 0 writes seconds of steps and of the optimizer's part."""
    import deepzero
    from deepzero.comm import process_group

    work = Workload(**sizes)
    tokens = torch.from_numpy(tokens_for(work, 1))
    first = process_group.rank() * work.micro_batch * work.block_size
    pieces = [tokens[first + lag :][: work.micro_batch * work.block_size] for lag in (0, 1)]
    inputs, targets = (piece.view(work.micro_batch, work.block_size) for piece in pieces)
    runs: dict[str, Callable[[], object]] = {}
    inside: dict[str, list[float]] = {}
    for name, (number, optimizer) in contenders(stage).items():
        engine = deepzero.initialize(
            model=build_model(work), config=settings_of(work, {"stage": number}, optimizer=optimizer)
        )[0]
        shard, inside[name] = engine.zero.optimizer_shard, []

        def timed_step(divisor: float, real: Any = shard.step, spent: list[float] = inside[name]) -> None:
            began = time.perf_counter()
            real(divisor)
            spent.append(time.perf_counter() - began)

        vars(shard)["step"] = timed_step
        runs[name] = partial(step_of(engine), inputs, targets)
    seconds = interleaved(runs, rounds, process_group.barrier)
    everyone = process_group.all_gather_object((seconds, {name: spent[1:] for name, spent in inside.items()}))
    if process_group.rank() == 0:
        slowest = [{name: list(map(max, *(r[k][name] for r in everyone))) for name in seconds} for k in (0, 1)]
        Path(file).write_text(json.dumps(slowest))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = parser_of(
        "muon", __doc__, rounds=(8, "timed steps of each"), ranks=(2, "processes"), stage=(2, "1, 2 or 3"),
        **{option: (None, f"of the model (default {getattr(Workload, field)})") for option, field in SIZES.items()},
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="a tiny model: does everything run?")
    parser.add_argument("--page", type=Path, metavar="FILE", help="also write the page there")
    options = parser.parse_args(arguments)
    sizes = {field: getattr(options, option) for option, field in SIZES.items() if getattr(options, option)}
    work = replace(TINY if options.quick else Workload(), ranks=options.ranks, **sizes)
    facts = [*report.machine_facts(work), f"commit {report.commit()}", report.load_fact(work)]
    with tempfile.TemporaryDirectory(prefix="deepzero-bench-") as folder:
        file = str(Path(folder, "seconds.json"))
        environment = {"DEEPZERO_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
        given = (asdict(work), options.stage, options.rounds, file)
        launch(__file__, "on_rank", given, nproc=work.ranks, environment=environment)
        steps, inside = json.loads(Path(file).read_text())
    rows = [
        [name, f"{median(steps[name]):.3f}", f"{min(steps[name]):.3f}", f"{median(inside[name]):.3f}",
         f"{min(inside[name]):.3f}"] for name in steps
    ]  # fmt: skip
    text = report.table(["contender", "step, median s", "best s", "optimizer, median s", "best s"], rows)
    print(text)
    if options.page is not None:
        about = f"{work.parameters:,} parameters, {work.ranks} ranks, {options.rounds} steps of each, in turn"
        page = report.page_text([*facts, about], [("Muon by its owner", text)], report.command_line("muon"))
        options.page.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    exit_with(main)
