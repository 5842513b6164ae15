"""The sources' tables of bytes, each computed from deepzero's closed forms.

    python examples/tables.py                 all of them
    python examples/tables.py --table four    one: four, paper, ten, factors, volume, clusters

The forms are those that every run is compared with (``deepzero/runtime/memory_model.py``). GB are 10^9 bytes. What does
not fit into a device's memory is marked with an x; activations come on top of everything here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from deepzero.comm.topology import Nodes
from deepzero.layout import plan_layout
from deepzero.planning.clusters import PRESETS, RANKS
from deepzero.runtime.memory_model import Elements, StateSizes, predicted_memory, predicted_traffic
from deepzero.utils.closed_pipe import exit_with

GB = 1e9
STAGES = (0, 1, 2, 3)
A100 = 80e9


def sizes(stage: int, sums: int | None = None, micro_batches: int = 1, by_all_reduce: bool = False) -> StateSizes:
    """bf16 parameters and gradients, Adam with fp32 masters, no overlap.

    ``sums`` are the bytes of a reduced gradient: 4 is deepzero's default. None counts as the paper does: 2 bytes of
    gradient for each parameter, either whole (stages 0 and 1) or as the owner's share (2 and 3), and nothing beside.
    """
    accumulation = (0 if stage < 2 else 2) if sums is None else sums
    return StateSizes(
        compute=2, accumulation=accumulation, moments=8, wire=2, stage=stage, overlap=False,
        micro_batches=micro_batches, whole_reduce=stage == 0 or by_all_reduce, exact=False,
    )  # fmt: skip


def held(numel: float, ranks: int, stage: int, sums: int | None = None) -> int:
    """Bytes of model states on one rank."""
    return sum(predicted_memory(Elements(int(numel)), ranks, sizes(stage, sums)).values())


def four() -> Iterator[str]:
    """Four weights on four ranks."""
    yield "Four weights on four ranks, bytes on each rank"
    yield "stage   weights  gradients  masters  moments   total   all ranks   without masters   deepzero, fp32 sums"
    for stage in STAGES:
        forms = predicted_memory(Elements(4), 4, sizes(stage))
        states = f"{forms['parameters']:>10}{forms['gradients']:>11}{forms['masters']:>9}{forms['moments']:>9}"
        total = sum(forms.values())
        bare = total - forms["masters"]
        yield f"{stage:>5}{states}{total:>8}{4 * total:>12}{bare:>18}{held(4, 4, stage, sums=4):>22}"


def paper() -> Iterator[str]:
    """Figure 1 of the ZeRO paper."""
    yield "7.5 billion parameters on 64 ranks (figure 1 of the paper), GB on each rank"
    yield "stage    paper   deepzero, fp32 sums"
    for stage in STAGES:
        yield f"{stage:>5}{held(7.5e9, 64, stage) / GB:>9.1f}{held(7.5e9, 64, stage, sums=4) / GB:>22.1f}"


def ten() -> Iterator[str]:
    """The stage-1 notes' first example."""
    yield "10 billion parameters on devices of 80 GB, GB on each rank"
    yield f"fp32, four numbers of 4 bytes: {10e9 * 4 * 4 / GB:.0f}"
    yield f"bf16 with masters, 2 + 2 + 12 bytes: {held(10e9, 1, 0) / GB:.0f}"
    yield "ranks      stage 0    stage 1    stage 2    stage 3"
    for ranks in (1, 2, 4, 8, 64):
        yield f"{ranks:>5}   {''.join(_marked(held(10e9, ranks, stage), A100) for stage in STAGES)}"


def factors() -> Iterator[str]:
    """How many times less than stage 0; and what the stage-1 notes' 25 to 50 % are."""
    yield "Stage 0's bytes over the stage's; last column: what stage 1 saves in fp32 without masters"
    yield "ranks      stage 1    stage 2    stage 3    saved, 16 -> 8 + 8/N bytes"
    for ranks in (2, 4, 8, 64, 1024):
        numel = 1024 * 1024
        cells = "".join(f"{held(numel, 1, 0) / held(numel, ranks, stage):>10.2f}x" for stage in (1, 2, 3))
        yield f"{ranks:>5}  {cells}{1 - (8 + 8 / ranks) / 16:>18.1%}"


def sent(stage: int, micro_batches: int = 1, by_all_reduce: bool = False) -> float:
    """Bytes that one of eight ranks sends in a step of 32 equal layers, 7 billion parameters, without padding."""
    layouts = [plan_layout([int(7e9) // 32] * 32, world_size=8, bucket_limit=1)]
    # In stage 3 the all-gather is that of the other stages, but twice in every micro-batch; a real run's plan saves a
    # part of these (docs/stage3.md).
    forms = predicted_traffic(layouts, Nodes(8, 8), sizes(min(stage, 2), None, micro_batches, by_all_reduce))
    gathers = 2 * micro_batches if stage == 3 else 1
    counts = {
        kind: traffic.elements * (gathers if kind == "parameters.all_gather" else 1) for kind, traffic in forms.items()
    }
    return 2 * sum(count for kind, count in counts.items() if not kind.startswith("agreement"))


def volume() -> Iterator[str]:
    """The stage-3 guide's 7 B on 8 GPUs."""
    yield "7 billion bf16 parameters in 32 layers on 8 ranks, GB that one rank sends in a step"
    yield f"one layer gathered or reduced once: {sent(1) / 2 / 32 / GB:.3f}     all layers: {sent(1) / 2 / GB:.2f}"
    yield "                      1 micro-batch   4 micro-batches"
    rows: dict[str, Callable[[int], float]] = {
        "stage 0": lambda n: sent(0, n),
        "stage 1": lambda n: sent(1, n),
        "stage 1, all-reduce": lambda n: sent(1, n, by_all_reduce=True),
        "stage 2": lambda n: sent(2, n),
        "stage 3": lambda n: sent(3, n),
    }
    for name, of in rows.items():
        yield f"{name:<22}{of(1) / GB:>13.2f}{of(4) / GB:>18.2f}"


def clusters() -> Iterator[str]:
    """The two clusters of the post on reduced communication."""
    for name, ranks in RANKS.items():
        memory = PRESETS[name].memory_bytes
        yield from [""] if name != next(iter(RANKS)) else []
        yield f"{name}: {ranks} ranks of {memory / GB:.0f} GB, GB on each rank"
        yield "parameters   stage 0    stage 1    stage 2    stage 3"
        for numel in (1.5e9, 7.5e9, 10e9, 20e9, 100e9):
            cells = "".join(_marked(held(numel, ranks, stage), memory) for stage in STAGES)
            yield f"{numel / GB:>9g} B{cells}"
        most = "".join(f"{memory / (held(1 << 20, ranks, stage) / (1 << 20)) / GB:>9.1f} B" for stage in STAGES)
        yield f"{'most':>11}{most}"


def _marked(size: float, memory: float) -> str:
    return f"{size / GB:>9.1f}{' ' if size <= memory else 'x'} "


TABLES = {table.__name__: table for table in (four, paper, ten, factors, volume, clusters)}


def main() -> int:
    """Print the tables. Returns the exit status."""
    parser = argparse.ArgumentParser(description="The sources' tables of bytes, computed.")
    parser.add_argument("--table", choices=list(TABLES), help="this one alone")
    chosen = parser.parse_args().table
    for number, name in enumerate([chosen] if chosen else TABLES):
        print(*([""] if number else []), *(line.rstrip() for line in TABLES[name]()), sep="\n")
    return 0


if __name__ == "__main__":
    exit_with(main)
