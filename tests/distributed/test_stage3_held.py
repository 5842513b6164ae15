"""Whatever keeps a weight of stage 3 until the backward pass sees its values: the bits of stage 2, under poison."""

import contextlib
import functools
import itertools
import random

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import deepzero
from deepzero.zero import GatheredParameters
from tests.distributed.pool import on_ranks
from tests.distributed.random_models import Part, RandomModel, Recipe, calm, plain_settings, trained
from tests.distributed.training import WHOLE, config, same_in_stages_2_and_3, start, step_from, step_on
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
    with GatheredParameters(layer.weight):
        layer.weight.sum()
    with pytest.raises(deepzero.zero.PartitionedUseError, match="partitioned"):
        layer.weight.sum()
    step_from(engine, loss)
    hook.remove()
    for step in range(2):
        step_on(engine, batch(step, rank))
    assert len(kept) == 3 and all(map(torch.equal, kept, (whole.t(), whole, whole)))


PENALTIES = {
    "L1": lambda w: w.abs().sum(),
    "L2": lambda w: w.pow(2).sum(),
    "norm": torch.norm,
    "gram": lambda w: (w @ w.t()).tanh().sum() if w.dim() == 2 else w.exp().sum(),
}
MICRO_BATCHES = 2


def penalised(rank, engine, number, kind, place):
    """One micro-batch with a penalty on all weights, built inside a context; the backward pass runs outside."""
    weights, saving = list(engine.module.parameters()), contextlib.nullcontext()
    together = [weights] if place != "each alone" else weights
    if place == "save_on_cpu":
        saving = torch.autograd.graph.save_on_cpu()

    def penalty(*_):
        total = 0.0
        for some in together:
            with GatheredParameters(some):
                total = total + sum(map(PENALTIES[kind], [some] if some is not weights else weights))
        with torch.no_grad(), GatheredParameters(weights):  # a log in between
            assert all(weight.isfinite().all() for weight in weights)
        return 0.01 * total

    first = penalty() if place == "before" else None
    with GatheredParameters(weights) if place == "around" else contextlib.nullcontext():
        loss = engine(batch(number, rank))
    with saving:
        if place == "checkpoint":
            first = checkpoint(penalty, torch.zeros((), requires_grad=True), use_reentrant=False)
        loss = loss + (penalty() if first is None else first)
    engine.backward(loss)
    engine.step()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    return loss.item()


def model_of(_):
    return RandomModel(Recipe(0, [Part("addmm", "none")] * 2, 0.0))


@on_ranks(None)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("place", ["before", "behind", "around", "each alone", "save_on_cpu", "checkpoint"])
def test_a_penalty_built_inside_gathered_parameters(rank, world, place):
    """Whatever autograd saves of weights there is what the backward pass reads outside."""
    for kind in PENALTIES:
        step = functools.partial(penalised, rank, kind=kind, place=place)
        chaos = {"bucket": 300, "chaos": 1, "gradient_accumulation_steps": MICRO_BATCHES}
        same_in_stages_2_and_3(model_of, step, 3 * MICRO_BATCHES, **chaos)


@on_ranks()
def test_a_penalty_of_other_values_raises(rank, world):
    """A step, a write, no hooks: the backward pass never goes through other values than the penalty's."""
    engine = start(model_of(3), stage=3, zero=WHOLE)
    weights = list(engine.module.parameters())

    def refused(match, penalty):
        with pytest.raises(RuntimeError, match=match):
            engine.backward(engine(batch(0, rank)) + penalty)
        engine.discard_gradients()

    with GatheredParameters(weights):
        penalty = weights[0].abs().sum()
        slope = torch.autograd.grad(weights[0].pow(3).sum(), weights[0], create_graph=True)[0]
    engine.backward(slope.sum())  # a double backward pass is one through the weights in the context
    engine.step()
    refused("saw older values of .*engine.step", penalty)
    with GatheredParameters(weights, modifier_rank=0):
        penalty = weights[0].abs().sum()
        weights[0].data.mul_(2)
    refused("saw older values of .*a modifier_rank", penalty)
    with GatheredParameters(weights, modifier_rank=0):
        penalty = weights[0].t().abs().sum()
        with torch.no_grad():
            weights[0].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            penalty.backward()
        weights[0].abs().sum().backward()
    engine.discard_gradients()
    scale = torch.ones((), requires_grad=True)
    with GatheredParameters(weights):
        if rank == 0:  # alone: of what the context holds
            torch.autograd.grad(weights[-1].pow(2).sum(), weights[-1])
        probe, values = (weights[0].detach() * scale).sum(), weights[0].detach().sum()
    step_on(engine, batch(0, rank))
    probe.backward()  # of the values that there were
    assert scale.grad == values
    with contextlib.suppress(ZeroDivisionError), GatheredParameters(weights):
        raise ZeroDivisionError
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    step_on(engine, batch(0, rank))


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
