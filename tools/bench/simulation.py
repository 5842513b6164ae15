"""How far off is a simulated step? Real steps beside simulated ones: ``python -m tools.bench.simulation``.

    probe      the ranks measure this machine, as ``python -m tools.simulate --probe`` does
    train      the same ranks train each case for some steps; the median step of the slowest rank counts
    simulate   each case is rehearsed, and played on the probed cluster
    report     measured beside simulated seconds, and the error; a dated page with ``--page FILE``

On CPUs the ranks' computing and sending share the cores, so that overlap, which the model believes in, hardly exists.
The table therefore has both ends: ``overlapped``, what the simulator says, and ``in sequence``, computing, sending and
copying one after the other. What is measured should lie between them, or near the second.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

import deepzero
from deepzero.comm import process_group
from deepzero.config.deepspeed_json import load_engine_config
from deepzero.config.run import ModelConfig
from deepzero.config.strict import ConfigError
from deepzero.launch.launcher import RankFailed, launch
from deepzero.models.gpt import GPT
from deepzero.planning.calibrate import probe
from deepzero.planning.clusters import Cluster
from deepzero.planning.dry_run import ClusterShape, TrainStep, dry_run
from deepzero.planning.simulate import simulate
from tools.bench import report
from tools.bench.arguments import positive
from tools.bench.workload import Workload

CASES: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 2, optimizer on the host": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}
WARMUP = 2


@dataclass(frozen=True)
class Row:
    """One case."""

    case: str
    measured_seconds: float
    simulated_seconds: float
    sequence_seconds: float
    """Simulated, nothing overlapped."""

    @property
    def error(self) -> float:
        """Of the simulated step, relative to the measured one: 0.1 is a tenth too long."""
        return self.simulated_seconds / self.measured_seconds - 1


def settings(case: str, micro_batch: int) -> dict[str, Any]:
    """A DeepSpeed config."""
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"reduce_bucket_size": 5_000_000, "allgather_bucket_size": 5_000_000, **CASES[case]},
    }


def measure(path: str, model: ModelConfig, micro_batch: int, steps: int) -> None:
    """A rank's program: probe, then train every case; rank 0 writes what came out."""
    process_group.init_distributed()
    cluster = probe(torch.bfloat16)
    found = {case: _step_seconds(settings(case, micro_batch), model, micro_batch, steps) for case in CASES}
    everyone = process_group.all_gather_object(found)
    if process_group.rank() == 0:
        slowest = {case: max(theirs[case] for theirs in everyone) for case in CASES}
        Path(path).write_text(json.dumps({"cluster": vars(cluster), "seconds": slowest}), encoding="utf-8")
    process_group.barrier()
    process_group.shutdown()


def _step_seconds(config: dict[str, Any], model: ModelConfig, micro_batch: int, steps: int) -> float:
    torch.manual_seed(0)
    engine, *_ = deepzero.initialize(model=GPT(model), config=config)
    ids = torch.randint(0, model.vocab_size, (micro_batch, model.block_size), device=engine.device)
    seconds = []
    for _ in range(WARMUP + steps):
        process_group.barrier()
        began = time.perf_counter()
        engine.backward(engine(ids, ids))
        engine.step()
        seconds.append(time.perf_counter() - began)
    engine.destroy()
    return statistics.median(seconds[WARMUP:])


def predict(case: str, cluster: Cluster, model: ModelConfig, micro_batch: int, ranks: int) -> tuple[float, float]:
    """Seconds of a step, overlapped and in sequence."""

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.zeros(micro_batch, model.block_size, dtype=torch.long, device="meta")
        return ids, ids

    program = TrainStep(lambda: GPT(model), batch, load_engine_config(settings(case, micro_batch)))
    line = simulate(dry_run(program, ClusterShape(ranks, ranks, "cpu")), cluster).timeline
    return line.seconds, sum(span.end - span.start for span in line.spans)


def table(rows: Sequence[Row]) -> str:
    """For the terminal and the page."""
    cells = [
        [
            row.case,
            f"{row.measured_seconds * 1e3:.0f}",
            f"{row.simulated_seconds * 1e3:.0f}",
            f"{row.error:+.0%}",
            f"{row.sequence_seconds * 1e3:.0f}",
            f"{row.sequence_seconds / row.measured_seconds - 1:+.0%}",
        ]
        for row in rows
    ]
    return report.table(["case", "measured ms", "overlapped ms", "error", "in sequence ms", "error"], cells)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.simulation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=positive, default=2)
    parser.add_argument("--steps", type=positive, default=8, help="timed steps of each case (default 8)")
    parser.add_argument("--micro-batch", type=positive, default=2, help="sequences per rank and step (default 2)")
    parser.add_argument("--layers", type=positive, default=6)
    parser.add_argument("--width", type=positive, default=512, help="a multiple of 64")
    parser.add_argument("--tokens", type=positive, default=256, help="per sequence")
    parser.add_argument("--page", type=Path, metavar="FILE", help="also write the page there")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, simulate, print. 0, however large the error is; 1 where a rank failed; 2 for bad options."""
    options = _parse(arguments)
    if options.width % 64:
        print(f"--width {options.width}: heads are 64 wide; give a multiple of 64", file=sys.stderr)
        return 2
    model = ModelConfig(
        n_layer=options.layers, n_embd=options.width, n_head=options.width // 64, block_size=options.tokens,
        vocab_size=8192,
    )  # fmt: skip
    load = report.load_fact(Workload())
    environment = {"DEEPZERO_DEVICE": "cpu", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    with tempfile.TemporaryDirectory(prefix="deepzero-simulation-") as folder:
        path = Path(folder) / "found.json"
        work = (str(path), model, options.micro_batch, options.steps)
        try:
            launch(__file__, "measure", work, nproc=options.ranks, environment=environment)
        except (RankFailed, ConfigError) as error:
            print(error, file=sys.stderr)
            return 1
        found = json.loads(path.read_text(encoding="utf-8"))
    cluster = Cluster(**found["cluster"])
    rows = [
        Row(case, seconds, *predict(case, cluster, model, options.micro_batch, options.ranks))
        for case, seconds in found["seconds"].items()
    ]
    text = table(rows)
    print(text)
    if options.page is not None:
        numbers = "\n".join(f"- {name}: {value:.4g}" for name, value in vars(cluster).items() if type(value) is float)
        size = sum(p.numel() for p in GPT(model).parameters())
        facts = [*report.machine_facts(Workload()), load, f"commit {report.commit()}", f"{size:,} parameters, bf16"]
        sections = [("Steps, measured and simulated", text), ("The probed cluster", numbers)]
        command = report.command_line("tools.bench.simulation")
        page = report.page_text(date.today().isoformat(), facts, sections, command)
        options.page.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
