"""One GPU, one rank: the same bits as plain torch on the same device; buckets and lanes under accumulation."""

from __future__ import annotations

import pytest
import torch

import deepzero
from deepzero.comm import process_group
from deepzero.zero import GatheredParameters
from tests.distributed.training import config, make_batch, make_model

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def on_the_gpu(monkeypatch):
    """A world of one rank on the GPU; the suite otherwise keeps ranks off it."""
    monkeypatch.delenv("DEEPZERO_DEVICE", raising=False)
    yield
    process_group.shutdown()


def train(steps=10, **changes):
    engine, *_ = deepzero.initialize(model=make_model(), config=config(gradient_clipping=0, **changes))
    for step in range(steps):
        for k in range(engine.gradient_accumulation_steps()):
            ids, labels = (t.to(engine.device) for t in make_batch(step + 100 * k, 2))
            engine.backward(engine(ids, labels))
            engine.step()
    with GatheredParameters(engine.module.parameters()):
        values = [p.detach().clone() for p in engine.module.parameters()]
    return values, engine.params_sha256()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_same_bits_as_a_plain_loop(stage):
    zero = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    parameters, _ = train(stage=stage, bucket=1500, overlap=True, zero=zero)
    plain = make_model().cuda()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    for step in range(10):
        ids, labels = (t.cuda() for t in make_batch(step, 2))
        optimizer.zero_grad()
        plain(ids, labels).backward()
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(parameters, plain.parameters(), strict=True))


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_buckets_and_chaos(precision):
    hashes = {
        # One rank needs buckets only to add a second micro-batch to the first, which stage 2 does.
        train(stage=2, precision=precision, bucket=bucket, overlap=overlap, gradient_accumulation_steps=2, **chaos)[1]
        for bucket, overlap, chaos in ((200, True, {"chaos": 3}), (1500, False, {}), (10**6, True, {}))
    }
    assert len(hashes) == 1


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_resume_to_the_bit(stage, asynchronous, tmp_path):
    """The snapshot is queued before the next step's kernels: what is saved is the state of the save."""

    def steps(engine, until):
        while engine.global_steps < until:
            ids, labels = (t.to(engine.device) for t in make_batch(engine.global_steps, 2))
            engine.backward(engine(ids, labels))
            engine.step()
        return engine.params_sha256()

    settings = config(stage=stage, precision="bf16", bucket=1500)
    engine, *_ = deepzero.initialize(model=make_model(), config=settings)
    steps(engine, 5)
    engine.save_checkpoint(tmp_path, asynchronous=asynchronous)
    straight = steps(engine, 10)
    generator = torch.cuda.get_rng_state(engine.device)
    engine.destroy()
    other, *_ = deepzero.initialize(model=make_model(seed=1), config=settings)
    other.load_checkpoint(tmp_path)
    assert steps(other, 10) == straight
    assert torch.equal(torch.cuda.get_rng_state(other.device), generator)
    other.destroy()
