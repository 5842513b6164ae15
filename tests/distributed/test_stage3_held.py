"""Whatever keeps a weight of stage 3 until the backward pass sees its values: the bits of stage 2, under poison."""

import itertools
import math
import random

import pytest
import torch
from torch import nn

import deepzero
from tests.distributed.pool import on_ranks
from tests.distributed.random_models import Part, RandomModel, Recipe, calm, plain_settings, trained
from tests.distributed.training import WHOLE, config, same_in_stages_2_and_3, step_on
from tests.distributed.weight_uses import CHECKPOINTINGS, USES, WIDTH, Lora, checkpointed

FROZEN = (1.0, 0.5, 0.0)
"""The share of weights that are frozen; the first layer's are trained."""
CASES = list(itertools.product(USES, FROZEN, CHECKPOINTINGS, (False, True)))


def batch(step, rank):
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def compared(rank, world, cases):
    """The cases in which stage 3 differs from stage 2: two blocks of one use, of which the second runs no hook."""
    different = []
    for use, frozen, how, init in cases:
        parts = [Part(use, how, bare=bare) for bare in (False, True)]
        recipe = Recipe(0, parts, frozen, "bf16" if init else "fp32")
        zero = {**WHOLE, "stage3_prefetch_bucket_size": 200}
        expected = trained(recipe, plain_settings(recipe, 2), rank)
        found = trained(recipe, calm(plain_settings(recipe, 3, bucket=300, zero=zero, chaos=1)), rank, init)
        if found != expected:
            different.append(f"{use} {frozen} {how} init={init}: {found} is not {expected}")
    return different


class Adapted(nn.Module):
    """The standard recipe: adapters, with each block checkpointed."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(Lora(), nn.Tanh(), Lora()) for _ in range(4))
        for block in self.blocks:
            for layer in block[::2]:
                layer.base.requires_grad_(False)

    def forward(self, x):
        for block in self.blocks:
            x = x + checkpointed("non_reentrant", block, x)
        return x.float().pow(2).mean()


@on_ranks()
def test_adapters_with_checkpointed_blocks(rank, world):
    for precision, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16), ("fp32", torch.float32)):
        more = {"fp16": {"initial_scale_power": 8}} if precision == "fp16" else {}
        seen = []

        def step(engine, number, dtype=dtype, seen=seen):
            step_on(engine, batch(number, rank).to(dtype))
            assert math.isfinite(engine.last_step.grad_norm) and not engine.last_step.skipped
            seen.append((engine.last_step.loss, engine.last_step.grad_norm))
            return seen[-1]

        same_in_stages_2_and_3(lambda stage: Adapted(), step, 3, precision=precision, bucket=300, **more)
        assert seen[0] != seen[-1]


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
    """One of each use; the exhaustive marker runs all."""
    chance = random.Random(0)
    cases = [(use, *map(chance.choice, (FROZEN, CHECKPOINTINGS, (False, True)))) for use in USES]
    for different in ranks.run(compared, cases, world_size=2, timeout=110):
        assert not different, "\n".join(different)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("use", USES)
def test_all_ways_to_keep_a_weight(ranks, use):
    cases = [case for case in CASES if case[0] == use]
    for different in ranks.run(compared, cases, world_size=2, timeout=400):
        assert not different, "\n".join(different)
