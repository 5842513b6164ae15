"""``deepzero.utils.safe_*``: a parameter's master, gradient and optimizer state, read and written in every stage."""

import itertools

import pytest
import torch
from torch import nn

import deepzero
from deepzero import utils
from deepzero.runtime.zero import guards
from deepzero.runtime.zero.guards import fragments_of
from deepzero.zero import GatheredParameters
from tests.distributed.pool import on_ranks, sampled
from tests.distributed.training import WHOLE, make_batch, make_model, my_micro_batches, one_step, start

STAGES = (0, 1, 2, 3)
MOMENTS = ("exp_avg", "exp_avg_sq")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def build(stage, precision, persist=0, zero=None, **changes):
    """Small buckets; stage 3 with everything partitioned, unless ``persist`` is larger."""
    zero = {**(zero or {}), **({"stage3_param_persistence_threshold": persist} if stage == 3 else {})}
    return start(make_model(), stage=stage, precision=precision, bucket=1500, zero=zero, **changes)


def backward(engine, rank, world, step=0, before_last=None):
    """All backward passes of a step; the last ``engine.step()`` is the caller's."""
    batches = my_micro_batches(step, rank, world, engine.batch.micro_batch, engine.batch.accumulation)
    for number, (ids, labels) in enumerate(batches):
        engine.backward(engine(ids, labels))
        if number + 1 < len(batches):
            if before_last is not None:
                before_last()
            engine.step()


BY_HAND = pytest.mark.exhaustive
TWO_STAGES = [1, 3, *(pytest.param(stage, marks=BY_HAND) for stage in (0, 2))]


def values_for(engine, seed, scale=1.0):
    """The same on every rank; fp32 values that bf16 cannot hold."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(p.shape, generator=generator) * scale for name, p in engine.module.named_parameters()}


def mine(engine, name, whole):
    """This rank's fragment of a whole: where it begins is found with a parameter that counts its elements."""
    param = dict(engine.module.named_parameters())[name]
    kept = utils.safe_get_full_fp32_param(param)
    utils.safe_set_full_fp32_param(param, torch.arange(float(param.numel())))
    places = utils.safe_get_local_fp32_param(param).long()
    utils.safe_set_full_fp32_param(param, kept)
    return whole.flatten()[places]


def set_and_step(rank, world, stage, precision, local, changes):
    engine = build(stage, precision, **changes)
    named = dict(engine.module.named_parameters())
    one_step(engine, rank, world)
    masters, first, second = (values_for(engine, seed) for seed in (1, 2, 3))
    gradients = values_for(engine, 4, 1e-2)

    def put(name, whole, setter, *key):
        full, local_setter = getattr(utils, f"safe_set_full_{setter}"), getattr(utils, f"safe_set_local_{setter}")
        value = mine(engine, name, whole) if local else whole
        (local_setter if local else full)(named[name], value, *key)

    chosen = ["blocks.0.1.weight", "embed.weight", "norm.bias"]
    for name in chosen:
        put(name, masters[name], "fp32_param")
        put(name, first[name], "optimizer_state", "exp_avg")
        put(name, second[name].abs(), "optimizer_state", "exp_avg_sq")
    before = {name: param.clone() for name, param in zip(named, whole_of(engine), strict=True)}
    backward(engine, rank, world, 1)
    for name in chosen[:2]:
        put(name, gradients[name], "grad")
    found = [utils.safe_get_full_grad(param) for param in named.values()]
    for name in chosen:
        assert torch.equal(utils.safe_get_full_fp32_param(named[name]), masters[name])
        assert torch.equal(utils.safe_get_full_optimizer_state(named[name], "exp_avg"), first[name])
        assert torch.equal(before[name], masters[name].to(DTYPES[precision]))
    for name in chosen[:2]:
        grad = found[list(named).index(name)]
        exact = world & (world - 1) == 0
        assert torch.equal(grad, gradients[name]) if exact else torch.allclose(grad, gradients[name], rtol=2e-7, atol=0)
    engine.step()
    record = engine.last_step
    fp32 = [utils.safe_get_full_fp32_param(param) for param in named.values()]
    one_step(engine, rank, world, 2)
    return found, fp32, record.grad_norm, record.grad_norm_clipped, engine.last_step.loss, engine.params_sha256()


def whole_of(engine):
    with GatheredParameters(engine.module.parameters()):
        return [param.detach().clone() for param in engine.module.parameters()]


def same(a, b):
    tensors = all(all(map(torch.equal, one, other)) for one, other in zip(a[:2], b[:2], strict=True))
    return tensors and a[2:] == b[2:]


SOME = [
    *((stage, local, {"persist": 100} if stage == 3 else {"zero": {"reduce_scatter": False}})
      for stage in (1, 3) for local in (False, True)),
    (1, True, {}), (3, True, {}),
]  # fmt: skip
ALL = list(itertools.product(STAGES, (False, True), ({}, {"overlap": True, "chaos": 3})))


@pytest.mark.parametrize(("precision", "world", "cases"), [
    ("bf16", 2, SOME),
    *(pytest.param(*case, ALL, marks=BY_HAND) for case in itertools.product(("bf16", "fp32"), (2, 3))),
])  # fmt: skip
def test_what_was_set_is_used_in_every_stage(ranks, precision, world, cases):
    """Whole or this rank's fragment; also of whole sums, and of persistent parameters."""
    reference = ranks.run(set_and_step, 0, precision, False, {}, world_size=world)[0]
    assert reference[2] > 0.5 == pytest.approx(reference[3], rel=1e-4)  # clipped, by the norm of what was set
    for stage, local, changes in cases:
        for result in ranks.run(set_and_step, stage, precision, local, changes, world_size=world):
            assert same(result, reference), (stage, local, changes)


def fragments(rank, world, stage):
    engine = build(stage, "bf16")
    one_step(engine, rank, world)
    backward(engine, rank, world, 1)
    kinds = [("fp32_param",), ("grad",), *(("optimizer_state", key) for key in MOMENTS)]
    return {
        name: [
            tuple(getattr(utils, f"safe_get_{scope}_{kind}")(param, *key) for scope in ("full", "local"))
            for kind, *key in kinds
        ]
        for name, param in engine.module.named_parameters()
    }


@pytest.mark.parametrize("stage", TWO_STAGES)
def test_local_fragments_make_the_whole(ranks, stage):
    results = ranks.run(fragments, stage, world_size=3)
    for name, kinds in results[0].items():
        for number, (full, _) in enumerate(kinds):
            parts = [result[name][number][1] for result in results]
            assert all(part.dim() == 1 and part.dtype == torch.float32 for part in parts)
            assert torch.equal(parts[0] if stage == 0 else torch.cat(parts), full.flatten()), name
            assert all(torch.equal(result[name][number][0], full) for result in results)


@pytest.mark.parametrize(("world", "precision", "reduce"), sampled(
    [(2, "fp32", "exact"), (3, "bf16", "native"), (2, "fp16", "exact")],
    (1, 2, 3), ("fp32", "bf16", "fp16"), ("exact", "native"),
))  # fmt: skip
@on_ranks(None)
def test_what_is_found_is_what_the_step_uses(rank, world, reduce, precision):
    """By a step with SGD. What plain torch has: ``test_plain_torch.py:test_one_rank_is_the_plain_loop``."""
    for stage in STAGES:
        more = {"fp16": {"initial_scale_power": 10}} if precision == "fp16" else {}
        engine = start(
            make_model(), stage=stage, bucket=1500, precision=precision, reduce=reduce, zero=WHOLE, gradient_clipping=0,
            gradient_accumulation_steps=2, overlap=True, optimizer={"type": "SGD", "params": {"lr": 1.0}}, **more,
        )  # fmt: skip
        params = list(engine.module.parameters())
        assert utils.safe_get_full_grad(params[0]) is utils.safe_get_local_grad(params[0]) is None
        before = [utils.safe_get_full_fp32_param(param) for param in params]
        backward(engine, rank, world, before_last=lambda some=params[0]: utils.safe_get_full_grad(some))
        grads, again = ([utils.safe_get_full_grad(param) for param in params] for _ in range(2))
        assert all(map(torch.equal, grads, again)), "looking changes nothing"
        assert all(g.dtype == torch.float32 and g.shape == b.shape for g, b in zip(grads, before, strict=True))
        engine.step()
        assert engine.was_step_applied() and utils.safe_get_full_grad(params[0]) is None
        after = [utils.safe_get_full_fp32_param(param) for param in params]
        assert all(torch.equal(b - g, a) for b, g, a in zip(before, grads, after, strict=True))
        assert all(torch.equal(a.to(DTYPES[precision]), p) for a, p in zip(after, whole_of(engine), strict=True))


class HalfFrozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen, self.trained, self.unused = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.trained(self.frozen(x)).square().mean()


@pytest.mark.parametrize("stage", TWO_STAGES)
@on_ranks()
def test_nothing_there(rank, world, stage):
    engine = start(HalfFrozen(), stage=stage, precision="bf16", zero=WHOLE)
    frozen, trained, unused = (getattr(engine.module, n).weight for n in ("frozen", "trained", "unused"))
    engine.backward(engine(torch.ones(2, 6, dtype=torch.bfloat16)))
    assert utils.safe_get_full_grad(unused).count_nonzero() == 0 < utils.safe_get_full_grad(trained).count_nonzero()
    for get in ("fp32_param", "grad"):
        assert getattr(utils, f"safe_get_full_{get}")(frozen) is None
        assert getattr(utils, f"safe_get_local_{get}")(frozen) is None
        for scope in ("full", "local"):
            with pytest.raises(ValueError, match=r"'frozen\.weight' is not trained"):
                getattr(utils, f"safe_set_{scope}_{get}")(frozen, torch.ones(6, 6))
    assert utils.safe_get_full_optimizer_state(frozen, "exp_avg") is None
    assert utils.safe_get_local_optimizer_state(frozen, "exp_avg") is None
    for stranger in (nn.Parameter(torch.ones(3)), trained.detach()):
        with pytest.raises(ValueError, match="is no parameter of an engine"):
            utils.safe_get_full_fp32_param(stranger)
    with pytest.raises(ValueError, match=r"no state 'momentum'.*it keeps exp_avg, exp_avg_sq"):
        utils.safe_get_full_optimizer_state(trained, "momentum")
    with pytest.raises(ValueError, match="no state 'step' for each element"):
        utils.safe_set_full_optimizer_state(trained, torch.ones(6, 6), "step")
    with pytest.raises(ValueError, match=r"shape \(5,\) has 5 elements; the parameter has 36"):
        utils.safe_set_full_grad(trained, torch.ones(5))
    engine.step()
    with pytest.raises(RuntimeError, match="no backward pass has ended since the last step"):
        utils.safe_set_full_grad(trained, torch.ones(6, 6))
    engine.destroy()
    with pytest.raises(ValueError, match="is no parameter of an engine"):
        utils.safe_get_full_fp32_param(trained)


def untimely(rank, world, stage):
    engine = build(stage, "bf16", gradient_accumulation_steps=2)
    param, messages = engine.module.blocks[0][1].weight, []

    def inside(_):
        with pytest.raises(RuntimeError, match="a backward pass is under way"):
            utils.safe_get_full_grad(param)
        messages.append("inside")

    def between():
        so_far = utils.safe_get_full_grad(param)
        assert so_far.count_nonzero() > 0
        with pytest.raises(RuntimeError, match="further micro-batches of this step"):
            utils.safe_set_full_grad(param, so_far)
        messages.append("between")

    handle = engine.module.norm.weight.register_hook(inside)
    backward(engine, rank, world, 0, before_last=between)
    handle.remove()
    # Once set, further gradients of the same micro-batch are added, and none is lost.
    value = torch.full_like(utils.safe_get_full_grad(param), 0.5)
    utils.safe_set_full_grad(param, value)
    other = engine.module.norm.bias
    bias = utils.safe_get_full_grad(other)
    engine.backward(engine(*make_batch(5, 2)))
    assert (utils.safe_get_full_grad(param) - value).count_nonzero() > 0
    assert (utils.safe_get_full_grad(other) - bias).count_nonzero() > 0
    total = [utils.safe_get_full_grad(p) for p in engine.module.parameters()]
    engine.step()
    engine.discard_gradients()
    backward(engine, rank, world, 1)
    engine.discard_gradients()
    assert utils.safe_get_full_grad(param) is None
    return messages, total, engine.last_step.grad_norm


@pytest.mark.parametrize("stage", TWO_STAGES)
def test_untimely(ranks, stage):
    both = (ranks.run(untimely, each, world_size=2) for each in (stage, 0))
    for result, reference in zip(*both, strict=True):
        assert set(result[0]) == {"inside", "between"}
        for ours, theirs in zip(result[1], reference[1], strict=True):
            assert torch.allclose(ours, theirs, atol=1e-3, rtol=1e-2)  # bf16 on the way, once or twice
        assert result[2] == pytest.approx(reference[2], rel=1e-2)


@pytest.mark.parametrize("stage", TWO_STAGES)
@on_ranks()
def test_masters_keep_every_bit(rank, world, stage):
    engine = build(stage, "bf16")
    param = engine.module.blocks[0][1].weight
    value = torch.full(param.shape, 1 + 1e-5)
    # Values that the user loads into the parameter are in the master at once, and are not rounded by it.
    state = {name: tensor * 2 for name, tensor in engine.module_state_dict().items()}
    expected = state["blocks.0.1.weight"].float()
    engine.load_module_state_dict(state)
    assert torch.equal(utils.safe_get_full_fp32_param(param), expected)
    utils.safe_set_full_fp32_param(param, value)
    one_step(engine, rank, world)
    drift = (utils.safe_get_full_fp32_param(param) - value * (1 - 1e-3)).abs().max()
    assert drift < 1.0001e-2  # AdamW's first step is lr; the master started from all bits of value
    # Gathered, the buffer follows too.
    utils.safe_set_full_fp32_param(param, value)
    with GatheredParameters(param):
        utils.safe_set_full_fp32_param(param, value * 3)
        assert torch.equal(param.detach().float(), (value * 3).bfloat16().float())
    assert torch.equal(utils.safe_get_full_fp32_param(param), value * 3)
    with GatheredParameters(param, modifier_rank=0), torch.no_grad():
        utils.safe_set_full_fp32_param(param, value * 5)
        param[0] = 7.0
    found = utils.safe_get_full_fp32_param(param)
    assert torch.equal(found[1:], (value * 5)[1:]) and bool((found[0] == 7).all())
    # A backward pass through values that are no longer there is refused.
    loss = engine(*make_batch(rank, 2))
    utils.safe_set_full_fp32_param(param, value)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|has changed|changed"):
        engine.backward(loss)


@pytest.mark.parametrize("stage", TWO_STAGES)
@on_ranks()
def test_asking_is_no_part_of_a_step_and_leaves_nothing_behind(rank, world, stage):
    engine = build(stage, "bf16")
    one_step(engine, rank, world)
    expected = engine.ledger.last_step
    backward(engine, rank, world, 1)
    for param in engine.module.parameters():
        utils.safe_get_full_grad(param)
        utils.safe_get_full_fp32_param(param)
    engine.step()
    assert engine.ledger.last_step.keys() == expected.keys()
    assert any(kind.endswith("_on_request") for kind in engine.ledger.between_steps)
    assert {fragments_of(param) for param in engine.module.parameters()} == {engine.fragments}
    engine.destroy()
    assert {fragments_of(param) for param in engine.module.parameters()} == {None}
    assert not any(param in guards._OWNERS for param in engine.module.parameters())


def test_names():
    assert utils.set_z3_leaf_modules is deepzero.zero.set_z3_leaf_modules
    # Seven more stand in compat/, for DeepSpeed's scripts.
    assert len(utils.__all__) == 15 + 7 and all(hasattr(utils, name) for name in utils.__all__)
