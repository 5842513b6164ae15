"""Promise 1 for stage 3: the bits of stage 2, whatever is prefetched, kept, persistent, checkpointed or late."""

import pytest

from tests.distributed.pool import sampled
from tests.distributed.training import WHOLE, as_predicted, check_same_bits, config

FEW, STEPS = 3, 20


def cases_of(precision):
    yield config(stage=2, precision=precision), "plain"
    for prefetch in (0, 1000, 50_000_000):
        zero = {**WHOLE, "stage3_prefetch_bucket_size": prefetch}
        yield config(stage=3, precision=precision, bucket=1500, overlap=True, zero=zero), "plain"
    yield config(stage=3, precision=precision), "plain"  # everything persistent
    yield config(stage=3, precision=precision, bucket=1500, overlap=True, zero=WHOLE), "init"
    two_buckets = {**WHOLE, "stage3_max_live_parameters": 4000, "stage3_max_reuse_distance": 0}
    yield config(stage=3, precision=precision, bucket=1500, zero=two_buckets), "plain"
    some = {"stage3_param_persistence_threshold": 100, "sub_group_size": 700}
    yield config(stage=3, precision=precision, bucket=200, zero=some, chaos=5), "plain"
    yield config(stage=3, precision=precision, bucket=1500, zero=WHOLE, chaos=6, overlap=True), "plain"
    yield config(stage=3, precision=precision, bucket=1500, zero=WHOLE), "checkpoint"
    yield config(stage=3, precision=precision, bucket=1500, zero=two_buckets, chaos=7), "checkpoint"
    yield config(stage=3, precision=precision, bucket=1500, zero=WHOLE), "reentrant"


OFTEN, SLOW = [(1, "fp32", FEW), (2, "bf16", FEW), (3, "fp32", FEW)], [(4, "bf16", FEW)]


@pytest.mark.parametrize(
    ("world", "precision", "steps"), sampled(OFTEN, (1, 2, 3, 4), ("fp32", "bf16"), (FEW, STEPS), slow=SLOW)
)
def test_same_bits_as_stage_2(ranks, world, precision, steps):
    (losses, *_), _ = check_same_bits(ranks, list(cases_of(precision)), steps, world)
    assert len(set(losses)) == steps


def test_accumulation(ranks):
    """Stages 2 and 3 both add up micro-batches after the sum over ranks; also with evaluations in between."""
    more = {"precision": "bf16", "gradient_accumulation_steps": 3}
    settings = [config(stage=2, **more)]
    for zero in (WHOLE, {**WHOLE, "stage3_prefetch_bucket_size": 0}):
        settings.append(config(stage=3, bucket=1500, overlap=True, zero=zero, **more))
    check_same_bits(ranks, [(one, "reentrant") for one in settings], FEW)
    for world in (1, 2):  # what is gathered anew after an evaluation is no part of the step that it interrupts
        for report in check_same_bits(ranks, settings, FEW, world, evaluated=True)[1]:
            as_predicted(report["communication"])


def test_fp16(ranks):
    """Overflow, skipped steps and all."""
    fp16 = {"initial_scale_power": 16, "loss_scale_window": 4, "hysteresis": 1}
    settings = [config(stage=s, precision="fp16", fp16=fp16, bucket=1500, zero=WHOLE) for s in (2, 3)]
    (_, norms, _), _ = check_same_bits(ranks, settings, 6)
    assert {norm == float("inf") for norm, _ in norms} == {True, False}
