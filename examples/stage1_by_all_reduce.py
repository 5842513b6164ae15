"""Stage 1 as it was first published: gradients by all-reduce, of which each rank then uses a W-th.

    python examples/stage1_by_all_reduce.py                four gloo ranks
    python examples/stage1_by_all_reduce.py --ranks 2      the factor is 1.5 for any number of ranks

One optimizer step of a small bf16 model, twice: ``zero.reduce_scatter=true`` and ``false``. Bytes are those that the
ledger counted at the collectives, beside the closed form's. Exit status 1: a claim fails.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import deepzero
from deepzero.comm import process_group
from deepzero.launch.launcher import RankFailed, launch
from deepzero.monitor.terminal import say
from deepzero.utils.closed_pipe import exit_with

WIDTH, BATCH = 64, 8


def config(reduce_scatter: bool) -> dict[str, object]:
    """DeepSpeed's JSON for stage 1. ``comm.reduce=native``: the sums are the backend's, in bf16, as they were then."""
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 1, "reduce_scatter": reduce_scatter, "overlap_comm": False},
        "comm": {"reduce": "native"},
    }


@dataclass(frozen=True)
class Counted:
    """What one rank counted in one step, in bytes."""

    sent: dict[str, tuple[float, float]]  # by kind of collective: counted, predicted
    held: int  # reduced gradients that are on this rank
    used: int  # of these, what its optimizer reads

    @property
    def total(self) -> float:
        """All that was sent."""
        return sum(counted for counted, _ in self.sent.values())


def one_step(reduce_scatter: bool) -> Counted:
    """One step of stage 1. A collective."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.GELU(), nn.Linear(WIDTH, WIDTH, bias=False))
    engine, *_ = deepzero.initialize(model=model, config=config(reduce_scatter))
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(engine.global_rank))
    engine.backward(engine(x.bfloat16()).float().square().mean())
    engine.step()
    report = engine.comm.ledger.report()["communication"]
    sent = {
        kind: (entry["measured"]["bytes"], entry["predicted"]["bytes"])
        for kind, entry in report.items()
        if not kind.startswith("agreement")
    }
    shard = engine.zero.optimizer_shard
    counted = Counted(
        sent, held=sum(grads.nbytes for grads in shard.grad_S), used=sum(grad.nbytes for grad in shard.grads.values())
    )
    engine.destroy()
    return counted


def tell(scattered: Counted, reduced: Counted, world_size: int) -> Iterator[str]:
    """Both steps side by side, a line at a time, and what must hold of them."""
    for title, step in (("zero.reduce_scatter=true", scattered), ("zero.reduce_scatter=false", reduced)):
        yield f"{title}: bytes sent by rank 0 of {world_size}, counted (predicted)"
        for kind, (counted, predicted) in step.sent.items():
            yield f"  {kind:<26}{counted:>8,.0f}  ({predicted:,.0f})"
        yield f"  {'all':<26}{step.total:>8,.0f}"
        yield f"  reduced gradients: {step.held:,} bytes held, {step.used:,} of them used"
    claims = {
        f"all-reduce sends {reduced.total / scattered.total:.2f} times as much": reduced.total == 1.5 * scattered.total,
        f"a rank uses 1/{world_size} of what it received": reduced.held == world_size * reduced.used,
        "every count is its prediction": all(a == b for step in (scattered, reduced) for a, b in step.sent.values()),
    }
    for claim, holds in claims.items():
        yield f"{'OK' if holds else 'FAILED'}: {claim}"


def program() -> None:
    """One rank: a step each way; rank 0 tells."""
    process_group.init_distributed("gloo", timeout_seconds=120)
    scattered, reduced = one_step(reduce_scatter=True), one_step(reduce_scatter=False)
    # The last ranks' parts end with padding, so rank 0's numbers are the round ones.
    lines = list(tell(scattered, reduced, process_group.world_size())) if process_group.rank() == 0 else []
    process_group.shutdown()
    say("\n".join(lines), sys.stdout)
    if any(line.startswith("FAILED") for line in lines):
        raise SystemExit("a claim does not hold")


def main() -> int:
    """Start the ranks. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Stage 1 by all-reduce and by reduce-scatter, counted.")
    parser.add_argument("--ranks", type=int, default=4, help="gloo processes, 2 to 16 (default 4)")
    ranks = parser.parse_args().ranks
    if not 2 <= ranks <= 16:
        parser.error(f"--ranks {ranks}: 2 to 16 ranks, please; one rank sends nothing")
    environment = {"DEEPZERO_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    try:
        launch(str(Path(__file__).resolve()), "program", (), nproc=ranks, environment=environment)
    except RankFailed as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    exit_with(main)
