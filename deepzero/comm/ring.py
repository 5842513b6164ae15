"""The ring: all-reduce, reduce-scatter and all-gather from nothing but *send to the right, receive from the left*.

This is the way in to everything else in ``comm/``. Data-parallel ranks have each computed gradients on their own data
and need the average. If one rank collected them all, its link would carry W - 1 times the gradients, in and out, and
everybody else would wait. On a ring every link works all the time, and a rank holds one chunk more than it began with.

The ranks stand in a circle and each cuts its tensor into W chunks, one for each rank::

          0 ───▶ 1            rank 0   [ chunk 0 | chunk 1 | chunk 2 | chunk 3 ]
          ▲      │            rank 1   [ chunk 0 | chunk 1 | chunk 2 | chunk 3 ]
          │      ▼            rank 2   [ chunk 0 | chunk 1 | chunk 2 | chunk 3 ]
          3 ◀─── 2            rank 3   [ chunk 0 | chunk 1 | chunk 2 | chunk 3 ]

**Reduce-Scatter**, W-1 iterations. In the first, rank r sends chunk r to rank r+1, which adds it to its own chunk r.
From then on a rank passes on the chunk that it has just added to, so a partial sum travels round the circle and grows
at every stop. After W-1 hops it is complete: rank r ends with the sum of chunk (r+1) mod W, and of no other.

**All-Gather**, W-1 iterations. The same circle, but a chunk that arrives is final: it is written over the old one and
passed on. **All-Reduce** is the one after the other, then a division by W for the average.

Volume. A rank sends W-1 chunks of N/W elements in each phase, so N·(W-1)/W for a reduce-scatter or an all-gather and
2·N·(W-1)/W for an all-reduce: nearly independent of W, and nothing can do with less. ZeRO's accounts rest on this: a
step that reduce-scatters gradients and all-gathers parameters costs what the plain all-reduce did. When N does not
divide, the first N mod W chunks have one element more (the rule of ``get_data_parallel_partitions``).

What the real collectives do otherwise. A sum that travels is rounded at every hop to the dtype it travels in, and
begins at another rank for every chunk: its bits depend on how the tensor was cut. ``reduce=exact`` sends the parts
directly and adds them in fp32 in rank order instead. NCCL splits chunks further: a hop's sending overlaps its adding.

``python examples/ring.py`` runs the four-rank example of the sources on four gloo processes and prints every number.

Sources: [stage-1 notes], "Ring AllReduce"; [single number], "AllGather in practice"; [ring].
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from deepzero.comm import process_group


class Phase(enum.Enum):
    """What happens to a chunk that arrives: added to one's own, or written over it."""

    REDUCE_SCATTER = "Reduce-Scatter"
    ALL_GATHER = "All-Gather"


class Hop(NamedTuple):
    """What one rank did in one iteration, from 1 on, with the numbers: a record for readers and tests.

    ``own`` is the receiving rank's chunk before, ``result`` after.
    """

    phase: Phase
    iteration: int
    rank: int
    sent_chunk: int
    sent: list[float]
    received_chunk: int
    own: list[float]
    received: list[float]
    result: list[float]


Watch = Callable[[Hop], None]


def route(phase: Phase, iteration: int, rank: int, world_size: int) -> tuple[int, int]:
    """Which chunk a rank sends to its right neighbour in iteration 1 to W-1, and which one arrives from its left.

    What arrives is sent in the next iteration.

    Example:
        >>> [route(Phase.REDUCE_SCATTER, t, rank=0, world_size=4) for t in (1, 2, 3)]
        [(0, 3), (3, 2), (2, 1)]
        >>> [route(Phase.ALL_GATHER, t, rank=0, world_size=4) for t in (1, 2, 3)]
        [(1, 0), (0, 3), (3, 2)]
    """
    # A reduce-scatter begins with one's own chunk, an all-gather with the one that is finished here by then: r + 1.
    first = rank if phase is Phase.REDUCE_SCATTER else rank + 1
    # In each iteration a rank passes on what has arrived in the one before, which is one chunk to the left.
    sent = (first - (iteration - 1)) % world_size
    return sent, (sent - 1) % world_size


def cut(tensor: torch.Tensor, world_size: int) -> list[torch.Tensor]:
    """The W chunks of a contiguous tensor, as 1-D views; the first N mod W have one element more.

    Example:
        >>> [chunk.tolist() for chunk in cut(torch.arange(5), 3)]
        [[0, 1], [2, 3], [4]]
    """
    if not tensor.is_contiguous():
        raise ValueError(f"the ring works in place on contiguous tensors, got strides {tensor.stride()}")
    # Parameters may take part; what happens to their memory here is nothing for autograd to record.
    return list(torch.tensor_split(tensor.detach().view(-1), world_size))


def elements_sent(numel: int, world_size: int, rank: int) -> int:
    """Elements that a rank sends in an all-reduce of ``numel`` elements, exactly.

    In the first phase a rank sends every chunk but the one it ends with, (r+1) mod W; in the second, every chunk but
    the one that its right neighbour ended with. With equal chunks that is 2·N·(W-1)/W.

    Example:
        >>> [elements_sent(8, 4, rank) for rank in range(4)]
        [12, 12, 12, 12]
        >>> [elements_sent(5, 3, rank) for rank in range(3)]
        [7, 7, 6]
    """
    # Uneven chunks cost ranks differently: who leaves out a long one sends an element less.
    sizes = [numel // world_size + (chunk < numel % world_size) for chunk in range(world_size)]
    return 2 * numel - sizes[(rank + 1) % world_size] - sizes[(rank + 2) % world_size] if world_size > 1 else 0


def reduce_scatter(tensor: torch.Tensor, watch: Watch | None = None) -> torch.Tensor:
    """Sum over ranks, in place; this rank gets its part, chunk (r+1) mod W, a 1-D view into ``tensor``.

    The other chunks hold partial sums that mean nothing. ``watch`` is told every hop.
    """
    # After hop t this rank's chunk (r - t) mod W is the sum over t + 1 ranks: the one with which its journey began, and
    # those that it has passed. After W - 1 hops it is the sum over all, and that chunk is (r + 1) mod W.
    return _travel(Phase.REDUCE_SCATTER, tensor, watch)[(process_group.rank() + 1) % process_group.world_size()]


def all_gather(tensor: torch.Tensor, watch: Watch | None = None) -> None:
    """Every rank gets every finished chunk of a ``tensor`` that :func:`reduce_scatter` has left, over the others."""
    # No arithmetic here: every rank ends with the very bits that one rank has computed.
    _travel(Phase.ALL_GATHER, tensor, watch)


def all_reduce(tensor: torch.Tensor, average: bool = True, watch: Watch | None = None) -> None:
    """Average (or sum) over ranks, in place, with the same bits on every rank.

    ``tensor`` is contiguous, of one shape and dtype on every rank; to average, of one that is no integer.
    """
    # Refused before anything is sent: a rank that raised in the middle would leave its neighbours waiting for it.
    if average and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"the average of {tensor.dtype} is no integer: use average=False or a floating-point dtype")
    reduce_scatter(tensor, watch)
    all_gather(tensor, watch)
    # Every rank divides the same bits, so the averages are the same too. In fp16 the sum may have overflowed by now,
    # which is why training divides before it sends (`reduce=native`) or adds in fp32 (`reduce=exact`).
    if average:
        tensor.detach().div_(process_group.world_size())


def _travel(phase: Phase, tensor: torch.Tensor, watch: Watch | None) -> list[torch.Tensor]:
    """The W - 1 iterations of one rank: send right, receive from the left, add or overwrite. Returns the chunks."""
    rank, world_size = process_group.rank(), process_group.world_size()
    chunks = cut(tensor, world_size)
    for iteration in range(1, world_size):
        sent, own = route(phase, iteration, rank, world_size)
        received = torch.empty_like(chunks[own])
        # **Both are launched before either is waited for.** If every rank first sent and only then received, all would
        # wait for a receiver that is itself waiting: whether that hangs depends on how much the network buffers, that
        # is, on N. With N < W some chunks are empty; both ends see which, and no message is sent.
        right, left = (rank + 1) % world_size, (rank - 1) % world_size
        messages = [dist.P2POp(dist.isend, chunks[sent], right)] if chunks[sent].numel() else []
        messages += [dist.P2POp(dist.irecv, received, left)] if received.numel() else []
        for work in dist.batch_isend_irecv(messages) if messages else []:
            work.wait()
        _arrive(Hop(phase, iteration, rank, sent, [], own, [], [], []), chunks[sent], chunks[own], received, watch)
    return chunks


def _arrive(hop: Hop, sent: torch.Tensor, own: torch.Tensor, received: torch.Tensor, watch: Watch | None) -> None:
    """What the receiver does with a chunk: the only difference between the two phases."""
    # Numbers are copied out of the tensors only where somebody looks on: they are about to be overwritten.
    before = own.tolist() if watch else []
    if hop.phase is Phase.REDUCE_SCATTER:
        own.add_(received)
    else:
        own.copy_(received)
    if watch:
        watch(hop._replace(sent=sent.tolist(), own=before, received=received.tolist(), result=own.tolist()))


def simulate(tensors: Sequence[torch.Tensor], average: bool = True) -> list[Hop]:
    """The all-reduce of W ranks inside one process, in place, hop by hop: the same additions, hence the same bits.

    Takes one tensor per rank, of one shape and dtype. Returns every hop, by phase, iteration, rank.

    Example:
        >>> a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])
        >>> hops = simulate([a, b])
        >>> a.tolist(), b.tolist(), len(hops)
        ([2.0, 4.0], [2.0, 4.0], 4)
    """
    hops: list[Hop] = []
    world_size = len(tensors)
    chunks = [cut(tensor, world_size) for tensor in tensors]
    for phase in Phase:
        for iteration in range(1, world_size):
            routes = [route(phase, iteration, rank, world_size) for rank in range(world_size)]
            # All ranks send at the same time: what arrives is what the left neighbour had before this iteration.
            wire = [chunks[rank][sent].clone() for rank, (sent, _) in enumerate(routes)]
            for rank, (sent, own) in enumerate(routes):
                hop = Hop(phase, iteration, rank, sent, [], own, [], [], [])
                _arrive(hop, wire[rank], chunks[rank][own], wire[rank - 1], hops.append)
    for tensor in tensors if average else ():
        tensor.detach().div_(world_size)
    return hops
