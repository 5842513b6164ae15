"""Promise 1: with ``comm.reduce=exact`` the stages give the same bits, whatever the buckets, overlap and timing."""

import pytest

from tests.distributed.pool import sampled
from tests.distributed.training import check_same_bits, config, train_each

BUCKETS = (200, 1500, 1_000_000)
FEW, STEPS = 3, 20


def variants(precision, **fixed):
    """Every stage with three bucket sizes, overlap on and off, and chaos."""
    for stage in (0, 1, 2):
        for number, bucket in enumerate(BUCKETS):
            yield config(stage=stage, precision=precision, bucket=bucket, overlap=number % 2 == 0, **fixed)
        yield config(stage=stage, precision=precision, bucket=BUCKETS[0], overlap=True, chaos=stage + 7, **fixed)
        yield config(stage=stage, precision=precision, bucket=BUCKETS[1], overlap=stage != 2, chaos=stage + 1, **fixed)


OFTEN, SLOW = [(2, "bf16", FEW), (3, "fp32", FEW)], [(4, "bf16", FEW)]


@pytest.mark.parametrize(
    ("world", "precision", "steps"), sampled(OFTEN, (2, 3, 4), ("fp32", "bf16"), (FEW, STEPS), slow=SLOW)
)
def test_stages_buckets_overlap_chaos(ranks, world, precision, steps):
    (losses, norms, _), _ = check_same_bits(ranks, list(variants(precision)), steps, world)
    assert len(set(losses)) == steps and all(before > 0 and after <= 0.5 + 1e-9 for before, after in norms)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_plain_backward(ranks, world):
    """``loss.backward()`` by the user is the same as ``engine.backward(loss)``."""
    settings = [config(stage=stage, precision="bf16", bucket=1500) for stage in (0, 1, 2, 3)]
    by_engine, by_user = (
        [[bits for bits, _ in per_rank] for per_rank in ranks.run(train_each, settings, 5, plain, world_size=world)]
        for plain in (False, True)
    )
    assert by_engine == by_user


def test_accumulation_in_twins(ranks):
    """Stages 0 and 1 sum micro-batches before they reduce, stage 2 after: twins agree to the bit for any bucket."""
    for stages in ((0, 1), (2,)):
        settings = [
            config(stage=stage, precision="bf16", bucket=bucket, gradient_accumulation_steps=3)
            for stage in stages
            for bucket in BUCKETS
        ]
        check_same_bits(ranks, settings, FEW)


def test_native_reduction_is_close(ranks):
    """The backend's own sum is another order of additions: close in fp32, not the same bits."""
    settings = [config(stage=stage, reduce=how, bucket=1500) for stage in (0, 1, 2) for how in ("exact", "native")]
    settings.append(config(stage=1, zero={"reduce_scatter": False}, bucket=1500))
    results = [bits for bits, _ in ranks.run(train_each, settings, 5, world_size=3)[0]]
    for losses, norms, _ in results[1:]:
        assert losses == pytest.approx(results[0][0], rel=1e-5)
        assert [n for n, _ in norms] == pytest.approx([n for n, _ in results[0][1]], rel=1e-4)
    # Stage 1 by all-reduce has the same contributions in the same order: the same bits.
    assert results[-1] == results[0]
