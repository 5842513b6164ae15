"""Whatever keeps a weight of stage 3 until the backward pass sees its values: the bits of stage 2, under poison."""

import itertools
import random

import pytest
import torch

import deepzero
from tests.distributed.pool import on_ranks
from tests.distributed.random_models import Part, RandomModel, Recipe, calm, plain_settings, trained
from tests.distributed.training import WHOLE, config, step_on
from tests.distributed.weight_uses import CHECKPOINTINGS, USES, WIDTH

FROZEN = (1.0, 0.5, 0.0)
"""The share of weights that are frozen; the first layer's are trained."""
AXES = (FROZEN, CHECKPOINTINGS, (("fp32", False), ("bf16", True), ("fp16", False)))
"""Frozen, how it is checkpointed, the precision and whether ``zero.Init`` cuts the model."""


def batch(step, rank):
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def compared(rank, world, cases):
    """The cases in which stage 3 differs from stage 2: two blocks of one use, of which the second runs no hook."""
    different = []
    for use, frozen, how, (precision, init) in cases:
        parts = [Part(use, how, bare=bare) for bare in (False, True)]
        recipe = Recipe(0, parts, frozen, precision)
        zero = {**WHOLE, "stage3_prefetch_bucket_size": 200}
        expected = trained(recipe, plain_settings(recipe, 2), rank)
        found = trained(recipe, calm(plain_settings(recipe, 3, bucket=300, zero=zero, chaos=1)), rank, init)
        if found != expected:
            different.append(f"{use} {frozen} {how} {precision} init={init}: {found} is not {expected}")
    return different


@on_ranks()
def test_values_show_inside_a_pass_only_and_what_is_kept_stays(rank, world):
    """A parameter shows its values inside a pass, however long its bucket stays gathered; what is kept stays."""
    engine, *_ = deepzero.initialize(
        model=RandomModel(Recipe(0, [Part("addmm", "none")] * 2, 0.0)),
        config=config(stage=3, bucket=10**6, zero=WHOLE, chaos=1),
    )
    layer, kept = engine.module.blocks[0].after, []
    whole = engine.module_state_dict()["blocks.0.after.weight"].clone()
    hook = layer.register_forward_hook(
        lambda module, *_: kept.extend([module.weight.t(), module.weight.detach(), module.weight.data])
    )
    loss = engine(batch(0, rank))
    assert engine.stage.coordinator.live_numel > 0
    with pytest.raises(deepzero.zero.PartitionedUseError, match="partitioned"):
        layer.weight.sum()
    with deepzero.zero.GatheredParameters(layer.weight):
        layer.weight.sum()
    with pytest.raises(deepzero.zero.PartitionedUseError, match="partitioned"):
        layer.weight.sum()
    engine.backward(loss)
    engine.step()
    hook.remove()
    for step in range(2):
        step_on(engine, batch(step, rank))
    assert len(kept) == 3 and all(map(torch.equal, kept, (whole.t(), whole, whole)))


def test_some_ways_to_keep_a_weight(ranks):
    """One of each use, and adapters in checkpointed blocks in every precision; the exhaustive marker runs all."""
    chance = random.Random(0)
    cases = [(use, *map(chance.choice, AXES)) for use in USES]
    cases += [("lora", 0.5, "non_reentrant", made) for made in AXES[2]]
    for different in ranks.run(compared, cases, world_size=2, timeout=110):
        assert not different, "\n".join(different)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("use", USES)
def test_all_ways_to_keep_a_weight(ranks, use):
    for different in ranks.run(compared, list(itertools.product([use], *AXES)), world_size=2, timeout=400):
        assert not different, "\n".join(different)
