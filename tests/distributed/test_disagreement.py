"""Ranks that disagree, and models and optimizers that cannot be partitioned: said by name, on all ranks, no hang."""

import pytest
import torch
from torch import nn

import deepzero
from deepzero.runtime.consistency import RankMismatchError
from tests.distributed.pool import on_ranks
from tests.distributed.training import SGD, TinyModel, config, make_batch, make_model, my_micro_batches, one_step, start


def one_rank_differs(rank, world, what):
    model, settings, optimizer = make_model(), config(stage=1), None
    if what == "invalid":
        settings["train_batch_size"] = 4 + rank
    elif what == "optimizer":
        optimizer = (torch.optim.AdamW if rank else torch.optim.SGD)(model.parameters(), lr=0.1)
    elif what == "lr":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (rank + 1))
    elif what == "groups":
        chosen = list(model.parameters())[rank:]
        optimizer = torch.optim.SGD(chosen, lr=0.1)
    elif what == "buffer":
        model.register_buffer("extra", torch.zeros(4 + rank))
    with pytest.raises((RankMismatchError, deepzero.ConfigError)) as error:
        deepzero.initialize(model=model, optimizer=optimizer, config=settings)
    return f"{type(error.value).__name__}: {error.value}"


@pytest.mark.parametrize(("what", "words"), [
    ("optimizer", "optimizer class: SGD on rank 0, AdamW on rank 1"),
    ("lr", "optimizer group 0 lr: 0.1 on rank 0, 0.2 on rank 1"),
    ("groups", "optimizer group 0 params"),
    ("buffer", "buffer 0: extra (4,) torch.float32 on rank 0, extra (5,)"),
])  # fmt: skip
def test_one_rank_differs(ranks, what, words):
    assert all(words in message for message in ranks.run(one_rank_differs, what, world_size=2))


def test_one_rank_cannot_start(ranks):
    ours, theirs = ranks.run(one_rank_differs, "invalid", world_size=2)
    assert "RankMismatchError: could not start: rank 1: train_batch_size=5" in ours
    assert theirs.startswith("ConfigError: train_batch_size=5")


class SharedMemory(nn.Module):
    """Two parameter objects in one storage."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.ones(4))
        self.b = nn.Parameter(self.a.data)


@on_ranks()
def test_refused_by_name(rank, world):
    for model, words in (
        (SharedMemory(), "share memory"),
        (nn.Linear(2, 2, dtype=torch.float64), "float64"),
        (nn.Linear(2, 2, dtype=torch.complex64), "complex64"),
    ):
        with pytest.raises(deepzero.ConfigError, match=words):
            deepzero.initialize(model=model, config=config(stage=1, optimizer=SGD))
    # A refusal leaves the model free: the corrected call works.
    model = make_model()
    with pytest.raises(deepzero.ConfigError):
        start(model, stage=1, scheduler={"type": "warmup_cosine", "params": {"warmup_steps": 1}})
    engine = start(model, stage=1)
    engine.optimizer.add_param_group({"params": [torch.zeros(3, requires_grad=True)]})
    engine.backward(engine(*my_micro_batches(0, rank, world, 2, 1)[0]))
    with pytest.raises(RuntimeError, match="add_param_group"):
        engine.step()


class Several(TinyModel):
    """Loss and logits, as Hugging Face models return them."""

    def forward(self, ids, labels):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        logits = self.head(self.norm(x)).float()
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def several_outputs(rank, world, how, precision):
    torch.manual_seed(0)
    engine = start(Several(), stage=2, precision=precision, fp16={"loss_scale": 8}, optimizer=SGD)
    out = engine(*my_micro_batches(0, rank, world, 2, 1)[0])
    loss = out["loss"] + 0.1 * out["logits"].pow(2).mean()
    engine.backward(loss) if how == "engine" else loss.backward()
    engine.step()
    return engine.last_step.grad_norm


def test_several_outputs_are_scaled_once(ranks):
    expected = ranks.run(several_outputs, "engine", "fp32", world_size=2)[0]
    for how in ("engine", "plain"):
        assert ranks.run(several_outputs, how, "fp16", world_size=2)[0] == pytest.approx(expected, rel=1e-2)


def fp16_accumulated(rank, world, stage, reduce):
    changes = {"precision": "fp16", "fp16": {"loss_scale": 8}, "gradient_accumulation_steps": 2, "optimizer": SGD}
    engine = start(make_model(), stage=stage, reduce=reduce, bucket=800, **changes)
    one_step(engine, rank, world, 0)
    return engine.last_step.grad_norm


def test_native_fp16_with_accumulation(ranks):
    norms = [
        ranks.run(fp16_accumulated, stage, reduce, world_size=2)[0]
        for stage in (0, 1, 2)
        for reduce in ("exact", "native")
    ]
    assert norms == pytest.approx([norms[0]] * 6, rel=1e-2)


def sparse(rank, world, stage):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1))
    engine = start(model, stage=stage, optimizer=SGD)
    engine.backward(engine(make_batch(0, 2)[0] % 10).mean())
    engine.step()
    return engine.params_sha256()


def test_sparse_gradients(ranks):
    assert len({h for stage in (0, 1, 2) for h in ranks.run(sparse, stage, world_size=2)}) == 1
