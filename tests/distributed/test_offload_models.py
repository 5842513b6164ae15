"""Offload for models and optimizers of other kinds: frozen weights, one rank, state made late, exceptions half-way."""

import pytest
import torch

import deepzero
from deepzero.comm.reduce_scatter import BucketReducer
from tests.distributed.pool import on_ranks
from tests.distributed.test_offload import settings
from tests.distributed.training import built, check_alike, check_same_bits, go, make_model, my_micro_batches


def adapted(rank, world, case, init):
    """Large weights are frozen, norms and biases trained, as adapters do it."""
    torch.manual_seed(0)
    with deepzero.zero.Init(enabled=init):
        model = make_model()
    for param in model.parameters():
        param.requires_grad = param.dim() == 1
    engine = built(case, model)
    losses = go(engine, rank, world, 0, 4)
    memory = engine.report()["memory"]
    sha = engine.params_sha256()
    engine.destroy()
    return losses, sha, memory


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_frozen_weights_in_host_memory(ranks, world):
    more = {"precision": "bf16", "bucket": 500}
    plain = ranks.run(adapted, settings(3, **more), False, world_size=world)[0]
    for init in (False, True):
        for chaos in (None, 3):
            found = ranks.run(adapted, settings(3, 1.0, param=True, chaos=chaos, **more), init, world_size=world)[0]
            assert found[:2] == plain[:2]
            frozen = sum(p.numel() for p in make_model().parameters() if p.dim() == 2)
            assert found[2]["host_parameters"]["measured"] >= 2 * frozen / world
            assert found[2]["masters"]["measured"] == 0


@pytest.mark.parametrize("stage", [3, *(pytest.param(stage, marks=pytest.mark.exhaustive) for stage in (1, 2))])
def test_one_rank(ranks, stage):
    """Nothing is gathered that copies could hide behind."""
    more = {"precision": "bf16"}
    cases = [settings(stage, **more)] + [settings(stage, 1.0, chaos=seed, **more) for seed in (None, 1, 2, 3)]
    if stage == 3:
        cases += [settings(3, 1.0, param=True, chaos=seed, **more) for seed in (None, 4, 5)]
    check_same_bits(ranks, cases, 5, 1)


class Late(torch.optim.Optimizer):
    """Momentum that is made in the first step, by a class that nobody knows."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in (p for p in group["params"] if p.grad is not None):
                state = self.state[param]
                if not state:
                    state["seen"] = torch.zeros_like(param)
                state["seen"].mul_(0.9).add_(param.grad)
                param.sub_(state["seen"], alpha=group["lr"])


@on_ranks()
def test_state_that_is_made_late(rank, world):
    """It lies outside of the arena, which has no room for it, and is counted where it is: on the host."""
    found = []
    for ratio in (None, 1.0):
        model, case = make_model(), settings(2, ratio, precision="bf16")
        del case["optimizer"]
        engine = built(case, model, optimizer=Late(model.parameters()))
        go(engine, rank, world, 0, 3)
        found.append((engine.params_sha256(), engine.report()["memory"]))
    (plain, held), (offloaded, memory) = found
    assert plain == offloaded and memory["moments"]["measured"] == 0
    assert memory["host_moments"]["measured"] == pytest.approx(held["moments"]["measured"], rel=0.01)


@on_ranks()
def test_a_reduction_that_fails_can_be_repeated(rank, world):
    engine = built(settings(2, 1.0, precision="bf16"))
    go(engine, rank, world, 0, 1)
    ids, labels = my_micro_batches(1, rank, world, engine.batch.micro_batch, 1)[0]
    acquire = BucketReducer.acquire

    def full(self, bucket, *rest):
        if bucket.index == 3:
            raise torch.OutOfMemoryError("no room")
        return acquire(self, bucket, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BucketReducer, "acquire", full)
        with pytest.raises(torch.OutOfMemoryError):
            engine.backward(engine(ids, labels))
    engine.discard_gradients()
    go(engine, rank, world, 1, 3)
    check_alike(engine.params_sha256())


@on_ranks()
def test_destroyed_and_built_again(rank, world):
    model = make_model()
    for _ in range(3):
        engine = built(settings(2, 1.0, precision="bf16", chaos=1), model)
        go(engine, rank, world, 0, 2)
        arena = engine.zero.offload.arena
        engine.destroy()
        assert not arena.pinned and arena.tensors("host_masters") == []
    check_alike([p.detach().float().sum().item() for p in model.parameters()])
