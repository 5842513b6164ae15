"""The one-step delayed update, against a plain loop that is late in the same way; and who must wait for it."""

from __future__ import annotations

import pytest
import torch

import deepzero
from deepzero.config.parse import ConfigError
from deepzero.ops import CPUAdam
from deepzero.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from tests.distributed.test_offload import CPU_ADAM, go, settings
from tests.distributed.training import make_batch, make_model

AFTER = 2


def late(stage, after=AFTER, ratio=1.0, **more):
    offload = {"delayed_update": True, "delay_after_steps": after}
    return settings(stage, ratio, offload=offload, gradient_clipping=0.0, **{"precision": "bf16", **more})


def made(case):
    model = make_model()
    return deepzero.initialize(model=model, config=case)[0], model


def by_hand(rank, world, steps):
    """fp32, the whole batch at once: gradients of step t are applied after the gradients of step t + 1 were taken."""
    model = make_model()
    optimizer = CPUAdam(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses, waiting = [], None
    for step in range(steps):
        ids, labels = make_batch(step, 2 * world)
        optimizer.zero_grad()
        loss = model(ids, labels)
        loss.backward()
        losses.append(loss.item())
        grads = [param.grad.clone() for param in model.parameters()]
        if waiting is not None:
            optimizer.step(waiting)
            waiting = None
        if step < AFTER:
            optimizer.step(grads)
        else:
            waiting = grads
    return losses


def by_engine(rank, world, cases, steps):
    found = []
    for case in cases:
        engine, _ = made(case)
        found.append((go(engine, rank, world, 0, steps), engine.params_sha256()))
        engine.destroy()
    return found


def test_is_late_by_one_step(ranks):
    steps = 8
    expected = ranks.run(by_hand, steps, world_size=2)[0]
    cases = [late(stage, precision="fp32") for stage in (1, 2, 3)]
    for per_rank in ranks.run(by_engine, cases, steps, world_size=2):
        for losses, _ in per_rank:
            assert losses == pytest.approx(expected, rel=2e-4)
    prompt = ranks.run(by_engine, [settings(2, 1.0, gradient_clipping=0.0)], steps, world_size=2)[0][0][0]
    # The first forward pass that an update is missing from is that of the step after the first late one.
    assert prompt[: AFTER + 1] == pytest.approx(expected[: AFTER + 1], rel=2e-4)
    assert abs(prompt[AFTER + 1] / expected[AFTER + 1] - 1) > 1e-2


@pytest.mark.parametrize("accumulation", [1, 3])
def test_same_bits_in_all_stages(ranks, accumulation):
    """Whatever the thread, chaos and the buckets do. (Stage 1 sums micro-batches in another order than 2 and 3.)"""
    stages = (1, 2, 3) if accumulation == 1 else (2, 3)
    cases = [
        late(stage, chaos=seed, bucket=bucket, gradient_accumulation_steps=accumulation)
        for stage in stages
        for seed, bucket in ((None, 200), (1, 1500), (2, 200))
    ]
    results = ranks.run(by_engine, cases, 7, world_size=2)
    assert all(found == results[0][0] for per_rank in results for found in per_rank)


def test_half_of_it(ranks):
    """What stays on the device is not late; the bits are the same whatever the timing."""
    cases = [late(2, ratio=0.5, chaos=seed) for seed in (None, 1, 2)]
    results = ranks.run(by_engine, cases, 7, world_size=2)
    assert all(found == results[0][0] for per_rank in results for found in per_rank)


def saves(rank, world, folder):
    straight, _ = made(late(2))
    losses = go(straight, rank, world, 0, 5)
    straight.save_checkpoint(folder)
    losses += go(straight, rank, world, 5, 8)
    sha = straight.params_sha256()
    straight.destroy()
    for steps in (0, 4):
        again, _ = made(late(2, chaos=3))
        go(again, rank, world, 0, steps)  # after four an update is on its way when everything is replaced
        again.load_checkpoint(folder)
        # The delay of a run that goes on counts its steps from the beginning of the run.
        assert losses[5:] == go(again, rank, world, 5, 8)
        assert again.params_sha256() == sha
        again.destroy()


def test_checkpoint(ranks, tmp_path):
    """Saving finishes the update, so a checkpoint is one state; who goes on from it takes the same course."""
    ranks.run(saves, str(tmp_path), world_size=2)


def looks_and_writes(rank, world):
    engine, model = made(late(2))
    go(engine, rank, world, 0, 4)
    param = model.norm.weight
    before = param.detach().clone()
    master = safe_get_full_fp32_param(param)  # waits for the thread
    assert torch.equal(param, before) and not torch.equal(master.to(before.dtype), before)
    with torch.no_grad():
        param.add_(1)
    with pytest.raises(RuntimeError, match="written while a delayed update is on its way"):
        go(engine, rank, world, 4, 5)
    engine.zero_grad()
    engine.destroy()

    engine, model = made(late(3))
    go(engine, rank, world, 0, 4)
    param = model.blocks[0][1].weight
    late_write = pytest.raises(RuntimeError, match="finish_delayed_update")
    with late_write, deepzero.zero.GatheredParameters(param, modifier_rank=0), torch.no_grad():
        param.mul_(0)
    engine.finish_delayed_update()
    with deepzero.zero.GatheredParameters(param, modifier_rank=0), torch.no_grad():
        param.mul_(0)
    go(engine, rank, world, 4, 6)
    safe_set_full_fp32_param(param, torch.ones(param.shape))
    with deepzero.zero.GatheredParameters(param):
        assert bool((param == 1).all())
    engine.destroy()


def test_readers_and_writers(ranks):
    ranks.run(looks_and_writes, world_size=2)


def misused(rank, world):
    model = make_model()
    case = late(2)
    del case["optimizer"]
    with pytest.raises(ConfigError, match="CPUAdam alone"):
        deepzero.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=case)
    assert CPU_ADAM["type"] == "CPUAdam"


def test_other_optimizers_are_refused(ranks):
    ranks.run(misused, world_size=2)
