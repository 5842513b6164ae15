"""The order of a step, read from the ledger: the numbers of docs/step.md, asserted."""

import pytest

from tests.distributed.pool import on_ranks
from tests.distributed.training import make_model, one_step, start

REDUCE, GATHER, AGREE = "gradients.reduce_scatter", "parameters.all_gather", "agreement.all_reduce"


def events(rank, world, **changes):
    """Of one step; and the number of buckets."""
    engine = start(make_model(), bucket=800, **changes)
    engine.ledger.trace = True
    one_step(engine, rank, world)
    return [(e.what, e.kind, e.where) for e in engine.ledger.events], len(engine.zero.groups[0].layout.buckets)


def positions(log, what, kind=""):
    return [i for i, (w, k, _) in enumerate(log) if w == what and (not kind or k == kind)]


@pytest.mark.parametrize("overlap", [False, True])
@on_ranks()
def test_stage_2_reduces_during_the_backward_pass(rank, world, overlap):
    log, buckets = events(rank, world, stage=2, overlap=overlap)
    launches, end = positions(log, "launch", REDUCE), positions(log, "backward_end")[0]
    assert len(launches) == buckets > 3
    # 3: most buckets leave while gradients are still to come; all have left when the pass ends.
    assert launches[-1] < end and launches[0] < positions(log, "gradient_ready")[-1]
    # In the order of the layout, on every rank.
    assert [log[i][2] for i in launches] == [f"bucket {k}" for k in range(buckets)]
    # With two buffers, the second bucket leaves before the first has been waited for; with one, never.
    assert (launches[1] < positions(log, "wait", REDUCE)[0]) is overlap
    check_tail(log, end)


@pytest.mark.parametrize("overlap", [False, True])
@on_ranks()
def test_stage_1_reduces_once(rank, world, overlap):
    log, buckets = events(rank, world, stage=1, gradient_accumulation_steps=3, overlap=overlap)
    launches, ends = positions(log, "launch", REDUCE), positions(log, "backward_end")
    assert len(launches) == buckets and len(ends) == 3
    # After the last backward pass, or during it; never in an earlier one.
    assert launches[0] > ends[1] and (launches[0] > ends[2]) is not overlap
    check_tail(log, max(launches[-1], ends[2]) if not overlap else ends[2])


@pytest.mark.parametrize("overlap", [False, True])
@on_ranks()
def test_stage_0_reduces_and_gathers_gradients(rank, world, overlap):
    log, buckets = events(rank, world, stage=0, overlap=overlap)
    launches, end = positions(log, "launch", REDUCE), positions(log, "backward_end")[0]
    assert len(launches) == len(positions(log, "launch", "gradients.all_gather")) == buckets
    assert (launches[0] < end) is overlap
    assert not positions(log, "launch", GATHER)


def check_tail(log, after):
    """4 boundary → 5 agree, step → 6 publish, each once, everything waited for before the next."""
    boundary, agree = positions(log, "boundary")[0], positions(log, "launch", AGREE)[0]
    step, publish = positions(log, "step")[0], positions(log, "publish")[0]
    gathers = positions(log, "launch", GATHER)
    assert after < boundary < agree < step < gathers[0] <= gathers[-1] < publish
    assert positions(log, "wait", REDUCE)[-1] < boundary and positions(log, "wait", GATHER)[-1] < publish
    assert len(positions(log, "wait")) == len(positions(log, "launch"))
