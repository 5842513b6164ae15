"""The ring: the worked example of the sources at every iteration, uneven cuts, all dtypes, real collectives, bytes."""

import itertools
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from deepzero.comm import ring
from deepzero.comm.ring import Phase
from examples import ring as worked_example
from tests.distributed.pool import on_ranks

ROOT = Path(__file__).parents[2]

# The tables of sources/000…: per iteration what GPU 0..3 sends (chunk, values), and what the receiver then holds.
REDUCE_SCATTER = [
    ([(0, [1.0, 2.0]), (1, [4.0, 5.0]), (2, [5.5, 6.5]), (3, [8.5, 9.5])],
     [(3, [15.5, 17.5]), (0, [3.0, 5.0]), (1, [7.5, 9.5]), (2, [12.0, 14.0])]),
    ([(3, [15.5, 17.5]), (0, [3.0, 5.0]), (1, [7.5, 9.5]), (2, [12.0, 14.0])],
     [(2, [17.0, 20.0]), (3, [23.5, 26.5]), (0, [4.5, 7.5]), (1, [12.0, 15.0])]),
    ([(2, [17.0, 20.0]), (3, [23.5, 26.5]), (0, [4.5, 7.5]), (1, [12.0, 15.0])],
     [(1, [15.0, 19.0]), (2, [23.0, 27.0]), (3, [31.0, 35.0]), (0, [7.0, 11.0])]),
]  # fmt: skip
SUMS = [[7.0, 11.0], [15.0, 19.0], [23.0, 27.0], [31.0, 35.0]]
ALL_GATHER = [
    ([1, 2, 3, 0], [{0, 1}, {1, 2}, {2, 3}, {0, 3}]),
    ([0, 1, 2, 3], [{0, 1, 3}, {0, 1, 2}, {1, 2, 3}, {0, 2, 3}]),
    ([3, 0, 1, 2], [{0, 1, 2, 3}] * 4),
]
"""Per iteration: the chunk that GPU 0..3 sends, and the finished chunks that each then has."""
AVERAGE = [1.75, 2.75, 3.75, 4.75, 5.75, 6.75, 7.75, 8.75]

SIZES = (0, 1, 2, 3, 4, 5, 7, 8, 33, 1000)
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def assert_tables(hops):
    """The hops are those of the sources, number by number."""
    assert len(hops) == 2 * 3 * 4
    by_place = {(h.phase, h.iteration, h.rank): h for h in hops}
    for iteration, (sends, holds) in enumerate(REDUCE_SCATTER, 1):
        for rank in range(4):
            hop = by_place[Phase.REDUCE_SCATTER, iteration, rank]
            assert (hop.sent_chunk, hop.sent) == sends[rank]
            assert (hop.received_chunk, hop.received) == sends[rank - 1]
            assert (hop.received_chunk, hop.result) == holds[rank]
    known = [{chunk} for chunk, _ in REDUCE_SCATTER[-1][1]]
    for iteration, (sends, holds) in enumerate(ALL_GATHER, 1):
        for rank in range(4):
            hop = by_place[Phase.ALL_GATHER, iteration, rank]
            assert (hop.sent_chunk, hop.sent) == (sends[rank], SUMS[sends[rank]])
            assert (hop.received_chunk, hop.result) == (sends[rank - 1], SUMS[sends[rank - 1]])
            known[rank].add(hop.received_chunk)
            assert known[rank] == holds[rank]


def numbers(rank, numel, dtype):
    """Gradients of a rank, different on every rank and the same in every process."""
    generator = torch.Generator().manual_seed(1000 * numel + rank)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def example(rank, world_size):
    """The sources' example on real ranks."""
    hops = []
    tensor = worked_example.gradients(rank)
    ring.all_reduce(tensor, watch=hops.append)
    return hops, tensor.tolist()


def compare_with_real_collectives(rank, world_size):
    """Ring and backend side by side, for all sizes and dtypes; the averages, for the test to compare with others."""
    averages = []
    for dtype, numel in itertools.product(DTYPES, SIZES):
        tolerance = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 8 * torch.finfo(dtype).eps}
        mine = numbers(rank, numel, dtype)
        total = mine.clone()
        dist.all_reduce(total)
        summed = mine.clone()
        ring.all_reduce(summed, average=False)
        torch.testing.assert_close(summed, total, **tolerance)
        mean = mine.clone()
        ring.all_reduce(mean)
        assert torch.equal(mean, summed / world_size)
        averages.append(mean.tolist())

        part = ring.reduce_scatter(mine.clone())
        chunk = (rank + 1) % world_size
        assert torch.equal(part, ring.cut(summed, world_size)[chunk]), "all-gather copies bits"
        if numel and numel % world_size == 0:
            real = torch.empty_like(part)
            dist.reduce_scatter(real, ring.cut(mine, world_size)[-1:] + ring.cut(mine, world_size)[:-1])
            own = [torch.empty_like(part) for _ in range(world_size)]
            dist.all_gather(own, part.contiguous())
            assert torch.equal(torch.cat(own[-1:] + own[:-1]), summed), "rank r has chunk r+1"

        filled = torch.full_like(mine, torch.nan)
        ring.cut(filled, world_size)[chunk].copy_(part)
        ring.all_gather(filled)
        assert torch.equal(filled, summed), "nothing but the own chunk counts"
    return averages


def bytes_on_the_wire(rank, world_size, numel, dtype):
    """Bytes and messages that this rank hands to the backend in one all-reduce, counted at the backend's door."""
    sent, real = [], dist.batch_isend_irecv

    def counting(messages):
        for message in messages:
            if message.op is dist.isend:
                assert message.peer == (rank + 1) % world_size
                sent.append(message.tensor.numel() * message.tensor.element_size())
        return real(messages)

    with mock.patch.object(dist, "batch_isend_irecv", counting):
        ring.all_reduce(numbers(rank, numel, dtype))
    return sum(sent), len(sent)


def test_the_sources_example_on_four_ranks_and_simulated(ranks):
    answers, tensors = ranks.run(example, world_size=4), [worked_example.gradients(rank) for rank in range(4)]
    assert_tables([hop for hops, _ in answers for hop in hops])
    assert_tables(ring.simulate(tensors))
    assert [result for _, result in answers] == [tensor.tolist() for tensor in tensors] == [AVERAGE] * 4


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_equal_to_the_real_collectives(ranks, world_size):
    """And to the simulation: bit for bit, on every rank."""
    answers, expected = ranks.run(compare_with_real_collectives, world_size=world_size), []
    for dtype, numel in itertools.product(DTYPES, SIZES):
        tensors = [numbers(rank, numel, dtype) for rank in range(world_size)]
        ring.simulate(tensors)
        expected.append(tensors[0].tolist())
    assert answers == [expected] * world_size


@pytest.mark.parametrize(("world_size", "numel", "dtype"), [
    (2, 10, torch.float32), (4, 8, torch.bfloat16),
    *((*case, torch.float64) for case in ((1, 5), (3, 10), (4, 3), (4, 1), (3, 0))),
])  # fmt: skip
def test_volume(ranks, world_size, numel, dtype):
    """Twice the share of the others where chunks are equal; as predicted where they are uneven or empty."""
    answers, others = ranks.run(bytes_on_the_wire, numel, dtype, world_size=world_size), world_size - 1
    predicted = [dtype.itemsize * ring.elements_sent(numel, world_size, rank) for rank in range(world_size)]
    assert [sent for sent, _ in answers] == predicted
    assert sum(predicted) == dtype.itemsize * 2 * others * numel, "over all ranks nothing is lost"
    if dtype != torch.float64:
        assert answers == [(2 * others * numel // world_size * dtype.itemsize, 2 * others)] * world_size


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks(None)
def test_large_chunks_do_not_deadlock(rank, world_size):
    """Chunks far larger than a socket's buffer: ranks that only sent at first would wait for each other for ever."""
    tensor = torch.full((6_000_001,), float(rank))
    ring.all_reduce(tensor)
    assert bool((tensor == tensor[0]).all())
    assert tensor[0].item() == (world_size - 1) / 2


@on_ranks(3)
def test_shapes_and_refusals(rank, world_size):
    """Any contiguous shape, parameters included, in place; what cannot work is refused before anything is sent."""
    parameter = torch.nn.Parameter(torch.full((3, 5), float(rank)))
    ring.all_reduce(parameter)
    assert parameter.shape == (3, 5)
    assert parameter.unique().tolist() == [(world_size - 1) / 2]
    whole = torch.full((3,), rank)
    ring.all_reduce(whole, average=False)
    assert whole.tolist() == [sum(range(world_size))] * 3
    turned = torch.full((3,), rank * 1j)
    ring.all_reduce(turned)
    assert turned.tolist() == [(world_size - 1) / 2 * 1j] * 3
    with pytest.raises(ValueError, match=r"torch.int64.*average=False"):
        ring.all_reduce(torch.ones(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"contiguous.*\(1, 3\)"):
        ring.all_reduce(torch.ones(4, 3).t())


def test_without_a_process_group():
    tensor = torch.tensor([1.0, 2.0])
    assert ring.reduce_scatter(tensor).tolist() == [1.0, 2.0]
    ring.all_reduce(tensor)
    assert tensor.tolist() == [1.0, 2.0]


@settings(deadline=None, max_examples=60)
@given(world_size=st.integers(1, 12), numel=st.integers(0, 40))
def test_any_number_of_ranks_and_elements(world_size, numel):
    tensors = [torch.arange(numel, dtype=torch.float64) * (rank + 1) for rank in range(world_size)]
    expected = torch.stack(tensors).sum(0)
    hops = ring.simulate(tensors, average=False)
    assert all(torch.equal(tensor, expected) for tensor in tensors)
    assert len(hops) == 2 * (world_size - 1) * world_size
    for rank in range(world_size):
        own = [hop for hop in hops if hop.rank == rank]
        assert sum(len(hop.sent) for hop in own) == ring.elements_sent(numel, world_size, rank)
        for before, after in itertools.pairwise(own):
            assert after.sent_chunk == before.received_chunk, "what arrives is passed on"


def test_the_story_of_one_rank():
    assert list(worked_example.tell([], 1, 2)) == ["GPU 0: [1.0, 2.0]", "Average: [1.0, 2.0]", "", "GPU 0: [1.0, 2.0]"]


def test_the_example_says_when_a_claim_fails():
    hops = ring.simulate([worked_example.gradients(rank) for rank in range(4)])
    assert all(line.startswith("OK") for line in worked_example.check(hops, [AVERAGE] * 4, AVERAGE, 8))
    wrong = list(worked_example.check(hops[1:], [AVERAGE] * 3 + [[0.0] * 8], [0.0] * 8, 8))
    assert [line.startswith("FAILED") for line in wrong] == [True, False, True, True, False, True]
