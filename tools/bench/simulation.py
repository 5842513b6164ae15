"""How far off is a simulated step? Real steps beside simulated ones: ``python -m tools.bench.simulation``.

    probe      the ranks measure this machine, as ``python -m tools.simulate --probe`` does
    train      the same ranks train each case for some steps; the median step of the slowest rank counts
    simulate   each case is rehearsed, and played on the probed cluster
    report     measured beside simulated seconds, and the error; a dated page with ``--page FILE``

On CPUs the ranks' computing and sending share the cores, so that little can overlap. The table therefore has two
columns: ``overlapped``, what the simulator says, and ``in sequence``, computing, sending and copying one after the
other.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
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
from deepzero.utils.closed_pipe import exit_with
from tools.bench import report
from tools.bench.timing import multiple_of, parser_of, timed
from tools.bench.workload import Workload

CASES: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"stage": stage} for stage in range(4)},
    "stage 2, optimizer on the host": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
}
WARMUP = 2


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
        seconds.append(timed(lambda: (engine.backward(engine(ids, ids)), engine.step())))
    engine.destroy()
    return median(seconds[WARMUP:])


def predict(case: str, cluster: Cluster, model: ModelConfig, micro_batch: int, ranks: int) -> tuple[float, float]:
    """Seconds of a step, overlapped and in sequence."""

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.zeros(micro_batch, model.block_size, dtype=torch.long, device="meta")
        return ids, ids

    program = TrainStep(lambda: GPT(model), batch, load_engine_config(settings(case, micro_batch)))
    line = simulate(dry_run(program, ClusterShape(ranks, ranks, "cpu")), cluster).timeline
    return line.seconds, sum(span.end - span.start for span in line.spans)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, simulate, print. 0, however large the error is; 1 where a rank failed; 2 for bad options."""
    parser = parser_of(
        "simulation", __doc__,
        ranks=(2, "processes"), steps=(8, "timed steps of each case"), micro_batch=(2, "sequences per rank and step"),
        layers=(6, "of the model"), tokens=(256, "per sequence"),
    )  # fmt: skip
    parser.add_argument("--width", type=multiple_of(64), default=512, help="heads are 64 wide (default 512)")
    parser.add_argument("--page", type=Path, metavar="FILE", help="also write the page there")
    options = parser.parse_args(arguments)
    sizes = {"n_layer": options.layers, "n_embd": options.width, "n_head": options.width // 64}
    model = ModelConfig(**sizes, block_size=options.tokens, vocab_size=8192)
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
    cluster, rows = Cluster(**found["cluster"]), []
    for case, measured in found["seconds"].items():
        ends = predict(case, cluster, model, options.micro_batch, options.ranks)
        cells = [text for end in ends for text in (f"{end * 1e3:.0f}", f"{end / measured - 1:+.0%}")]
        rows.append([case, f"{measured * 1e3:.0f}", *cells])
    text = report.table(["case", "measured ms", "overlapped ms", "error", "in sequence ms", "error"], rows)
    print(text)
    if options.page is not None:
        numbers = "\n".join(f"- {name}: {value:.4g}" for name, value in vars(cluster).items() if type(value) is float)
        size = sum(p.numel() for p in GPT(model).parameters())
        facts = [*report.machine_facts(Workload()), load, f"commit {report.commit()}", f"{size:,} parameters, bf16"]
        sections = [("Steps, measured and simulated", text), ("The probed cluster", numbers)]
        page = report.page_text(facts, sections, report.command_line("simulation"))
        options.page.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    exit_with(main)
