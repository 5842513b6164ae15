"""The ring all-reduce of the sources, number by number: four gloo processes, eight gradients each.

    python examples/ring.py                        the sources' example
    python examples/ring.py --ranks 3 --numel 10   another one, uneven ones included

The algorithm is `deepzero/comm/ring.py`; here is what tells its story and checks it. Exit status 1: a claim fails.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from deepzero.comm import process_group
from deepzero.comm.ring import Hop, Phase, all_reduce, cut, elements_sent, simulate
from deepzero.launch.launcher import RankFailed, launch
from deepzero.monitor.terminal import say
from deepzero.utils.closed_pipe import exit_with


def gradients(rank: int, world_size: int = 4, numel: int = 8) -> torch.Tensor:
    """The example's gradients of one rank: 1, 2, 3 … plus 0, 1, 0.5 and 1.5 on ranks 0 to 3.

    Example:
        >>> gradients(rank=3).tolist()
        [2.5, 3.5, 4.5, 5.5, 6.5, 7.5, 8.5, 9.5]
    """
    offset = {0: 0.0, 1: 1.0, 2: 0.5, 3: 1.5}.get(rank, rank / 2)
    return torch.arange(1, numel + 1, dtype=torch.float32) + offset


def tell(hops: Sequence[Hop], world_size: int, numel: int) -> Iterator[str]:
    """The story of an all-reduce in the notation of the sources, a line at a time, from what the ranks reported."""
    starts = [gradients(rank, world_size, numel) for rank in range(world_size)]
    for rank, start in enumerate(starts):
        yield f"GPU {rank}: {start.tolist()}"
    yield f"Average: {torch.stack(starts).mean(0).tolist()}"
    yield ""
    for rank, start in enumerate(starts):
        yield f"GPU {rank}: {_row([chunk.tolist() for chunk in cut(start, world_size)])}"
    known: list[dict[int, list[float]]] = [{} for _ in starts]
    sizes = [chunk.numel() for chunk in cut(starts[0], world_size)]
    for phase in Phase:
        for iteration in range(1, world_size):
            now = sorted((h for h in hops if (h.phase, h.iteration) == (phase, iteration)), key=lambda h: h.rank)
            yield ""
            yield f"--- {phase.value}, iteration {iteration} of {world_size - 1} ---"
            for hop in now:
                yield f"GPU {hop.rank} sends Chunk {hop.sent_chunk} {hop.sent} to GPU {(hop.rank + 1) % world_size}"
            yield ""
            for hop in now:
                if phase is Phase.ALL_GATHER or iteration == world_size - 1:
                    known[hop.rank][hop.received_chunk] = hop.result
                if phase is Phase.REDUCE_SCATTER:
                    total = f"GPU {hop.rank}: Chunk {hop.received_chunk} = {hop.own} + {hop.received} = {hop.result}"
                    done = f" ✓ (sum of all {world_size} GPUs for Chunk {hop.received_chunk})"
                    yield total + (done if iteration == world_size - 1 else "")
            if phase is Phase.ALL_GATHER or iteration == world_size - 1:
                yield from [""] if phase is Phase.REDUCE_SCATTER else []
                for rank in range(world_size):
                    chunks = [known[rank].get(chunk, ["?"] * size) for chunk, size in enumerate(sizes)]
                    yield f"GPU {rank}: {_row(chunks)}"
    if known[0]:
        sums = [known[0][chunk] for chunk in range(world_size)]
        yield ""
        yield f"All GPUs: {_row([[f'{value}/{world_size}' for value in chunk] for chunk in sums])}"
        yield f"        = {_row([[value / world_size for value in chunk] for chunk in sums])}"


def _row(chunks: Sequence[Sequence[object]]) -> str:
    return " | ".join("[" + ", ".join(map(str, chunk)) + "]" for chunk in chunks)


def check(hops: Sequence[Hop], results: Sequence[list[float]], real: list[float], numel: int) -> Iterator[str]:
    """What must hold of a run, one OK or FAILED line each.

    Args:
        hops: all hops of all ranks.
        results: each rank's tensor after the ring.
        real: the same average by the backend's own all-reduce.
        numel: N.
    """
    world_size = len(results)
    copies = [gradients(rank, world_size, numel) for rank in range(world_size)]
    order = sorted(hops, key=lambda h: (list(Phase).index(h.phase), h.iteration, h.rank))
    sent = [sum(len(hop.sent) for hop in hops if hop.rank == rank) for rank in range(world_size)]
    last = [h for h in hops if h.phase is Phase.REDUCE_SCATTER and h.iteration == world_size - 1]
    predicted = [elements_sent(numel, world_size, rank) for rank in range(world_size)]
    claims = {
        "every rank has the same result": all(result == results[0] for result in results),
        "it is the average": torch.allclose(torch.tensor(results[0]), torch.stack(copies).mean(0)),
        "it equals the backend's own all_reduce": torch.allclose(torch.tensor(results[0]), torch.tensor(real)),
        "every hop is that of the simulation in one process": simulate(copies) == order,
        "after Reduce-Scatter, GPU r holds Chunk (r+1) mod W": all(
            h.received_chunk == (h.rank + 1) % world_size for h in last
        ),
        f"elements sent by each GPU: {sent}, predicted {predicted}": sent == predicted,
    }
    for claim, holds in claims.items():
        yield f"{'OK' if holds else 'FAILED'}: {claim}"


def program(numel: int) -> None:
    """One rank: all-reduce its gradients by the ring; rank 0 tells what all have done."""
    process_group.init_distributed("gloo", timeout_seconds=120)
    rank, world_size = process_group.rank(), process_group.world_size()
    hops: list[Hop] = []
    tensor, real = gradients(rank, world_size, numel), gradients(rank, world_size, numel)
    all_reduce(tensor, watch=hops.append)
    dist.all_reduce(real)
    reports = process_group.gather_object((hops, tensor.tolist()))
    process_group.shutdown()
    if reports is None:
        return
    every_hop = [hop for hops, _ in reports for hop in hops]
    claims = list(check(every_hop, [result for _, result in reports], (real / world_size).tolist(), numel))
    say("\n".join([*tell(every_hop, world_size, numel), "", *claims]), sys.stdout)
    if not all(claim.startswith("OK") for claim in claims):
        raise SystemExit("a claim does not hold")


def main() -> int:
    """Start the ranks. Returns the exit status."""
    parser = argparse.ArgumentParser(description="The ring all-reduce, worked out.")
    parser.add_argument("--ranks", type=int, default=4, help="gloo processes (default 4, as in the sources)")
    parser.add_argument("--numel", type=int, default=8, help="gradients per rank (default 8, as in the sources)")
    options = parser.parse_args()
    if not 1 <= options.ranks <= 16 or not 1 <= options.numel <= 1000:
        parser.error(f"--ranks {options.ranks} --numel {options.numel}: 1 to 16 ranks and 1 to 1000 gradients, please")
    environment = {"DEEPZERO_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    try:
        launch(str(Path(__file__).resolve()), "program", (options.numel,), nproc=options.ranks, environment=environment)
    except RankFailed as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    exit_with(main)
