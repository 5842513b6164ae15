"""What an engine meets in real models and real accidents."""

from __future__ import annotations

import contextlib
import io
import logging
import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepzero
from deepzero.runtime.agreement import RankMismatchError
from tests.distributed.training import LENGTH, VOCAB, TinyModel, config, make_batch, make_model, my_micro_batches

SGD = {"type": "SGD", "params": {"lr": 0.1}}


def start(model, **changes):
    engine, *_ = deepzero.initialize(model=model, config=config(**changes))
    return engine


def one_step(engine, rank, world, step=0):
    for ids, labels in my_micro_batches(step, rank, world, engine.batch.micro_batch, engine.batch.accumulation):
        engine.backward(engine(ids, labels))
        engine.step()
    return engine.last_step


# ---- fp16 ------------------------------------------------------------------------------------------------------------


def overflow(rank, world, stage):
    engine = start(make_model(), stage=stage, precision="fp16", fp16={"initial_scale_power": 8, "hysteresis": 1})
    records, hashes = [], []
    for step in range(6):
        ids, labels = my_micro_batches(step, rank, world, 2, 1)[0]
        loss = engine(ids, labels)
        engine.backward(loss * (math.inf if step == 2 and rank == 1 else 1.0))
        engine.step()
        records.append(engine.last_step)
        hashes.append(engine.params_sha256())
    return records, hashes, engine.skipped_steps, engine.global_steps, engine.loss_scale


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_fp16_overflow_on_one_rank_skips_on_all(ranks, stage):
    for records, hashes, skipped, steps, scale in ranks.run(overflow, stage, world_size=2):
        assert [r.skipped for r in records] == [False, False, True, False, False, False]
        assert [r.loss_scale for r in records] == [256, 256, 256, 128, 128, 128] and scale == 128
        assert hashes[2] == hashes[1] and len(set(hashes)) == 5
        assert (skipped, steps) == (1, 6)
        assert records[2].grad_norm == math.inf and all(math.isfinite(r.grad_norm) for r in records if not r.skipped)


def fp16_backward(rank, world, how):
    engine = start(make_model(), stage=2, precision="fp16", fp16={"loss_scale": 64}, optimizer=SGD)
    ids, labels = my_micro_batches(0, rank, world, 2, 1)[0]
    loss = engine(ids, labels)
    if how == "engine":
        engine.backward(loss)
    elif how == "scale":
        engine.scale(loss).backward()
    else:
        loss.backward()
    engine.step()
    return engine.params_sha256(), engine.last_step


def test_fp16_three_ways_to_call_backward(ranks):
    engine, scaled, plain = (ranks.run(fp16_backward, how, world_size=2)[0] for how in ("engine", "scale", "plain"))
    assert engine == scaled == plain
    assert engine[1].loss_scale == 64 and 0 < engine[1].grad_norm < 100


# ---- what is not finite ----------------------------------------------------------------------------------------------


def not_finite(rank, world, stage, precision):
    engine = start(make_model(), stage=stage, precision=precision, bucket=800)
    one_step(engine, rank, world)
    before = engine.params_sha256()
    ids, labels = my_micro_batches(1, rank, world, 2, 1)[0]
    loss = engine(ids, labels)
    if rank == 0:
        # One parameter only: its gradient becomes NaN on its way into .grad.
        engine.module.blocks[1][1].weight.register_hook(lambda grad: grad * math.nan)
        loss = engine(ids, labels)
    engine.backward(loss)
    with pytest.raises(deepzero.NonFiniteError) as error:
        engine.step()
    return str(error.value), engine.params_sha256() == before


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_nan_gradient_stops_and_names_the_parameter(ranks, stage, precision):
    for message, untouched in ranks.run(not_finite, stage, precision, world_size=2):
        assert message.startswith("step 2: the gradient of blocks.1.1.weight is not finite")
        assert untouched


# ---- parameters that are special -------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Frozen, unused, scalar and tied weights, a buffer, a weight used on rank 0 alone, nested outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.tiny = TinyModel()
        self.frozen = nn.Linear(VOCAB, 3)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(5, 5)
        self.sometimes = nn.Parameter(torch.ones(7))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("offset", torch.full((3,), 0.25))

    def forward(self, ids, labels, extra=False):
        """A nested output; the loss lies inside."""
        loss = self.tiny(ids, labels) * self.scale
        if extra:
            loss = loss + self.sometimes.sum()
        return {"loss": loss, "more": [self.offset * 2, (loss.detach(),)]}


def odd_model(rank, world, stage):
    torch.manual_seed(0)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("deepzero").addHandler(handler)
    engine = start(Odd(), stage=stage, bucket=800, gradient_clipping=0, optimizer=SGD)
    frozen, unused = engine.module.frozen.weight.clone(), engine.module.unused.weight.clone()
    for step in range(3):
        ids, labels = my_micro_batches(step, rank, world, 2, 1)[0]
        out = engine(ids, labels, extra=rank == 0)
        engine.backward(out["loss"])
        engine.step()
    logging.getLogger("deepzero").removeHandler(handler)
    assert torch.equal(frozen, engine.module.frozen.weight) and torch.equal(unused, engine.module.unused.weight)
    assert engine.module.tiny.head.weight is engine.module.tiny.embed.weight
    named = [m for m in messages if "no gradient" in m]
    return engine.params_sha256(), engine.module.sometimes[0].item(), named


def test_frozen_unused_scalar_tied_and_used_on_one_rank(ranks):
    hashes = set()
    for stage in (0, 1, 2):
        results = ranks.run(odd_model, stage, world_size=3)
        hashes.update(r[0] for r in results)
        for rank, (_, sometimes, named) in enumerate(results):
            # Mean over three ranks of a gradient of 1 on one of them, three steps of 0.1.
            assert sometimes == pytest.approx(1 - 3 * 0.1 / 3)
            names = {m.split()[1] for m in named}
            assert names == {"unused.weight", "unused.bias"} | ({"sometimes"} if rank else set())
            assert len(named) == len(names), "each is said once"
    assert len(hashes) == 1


def groups_and_accumulated_dtypes(rank, world, stage):
    model = make_model()
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0, "lr": 0.02}]
    engine, optimizer, _, _ = deepzero.initialize(
        model=model, optimizer=torch.optim.AdamW(groups, lr=0.01, fused=True), config=config(stage=stage, bucket=900)
    )
    for step in range(4):
        one_step(engine, rank, world, step)
    assert [g["lr"] for g in optimizer.param_groups] == [0.01, 0.02] == engine.get_lr()
    assert all(p.dim() == 1 for g in optimizer.param_groups for p in g["params"])
    return engine.params_sha256(), engine.last_step.grad_norm


def test_parameter_groups(ranks):
    for world in (1, 2, 3):
        results = [ranks.run(groups_and_accumulated_dtypes, stage, world_size=world) for stage in (0, 1, 2)]
        assert all(r == results[0][0] for result in results for r in result)


def many_ranks_few_elements(rank, world, stage):
    torch.manual_seed(0)
    engine = start(nn.Linear(1, 1, bias=False), stage=stage, optimizer=SGD, train_micro_batch_size_per_gpu=1)
    engine.backward(engine(torch.tensor([[float(rank + 1)]])).sum())
    engine.step()
    return engine.module.weight.item(), engine.last_step.grad_norm


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_more_ranks_than_elements(ranks, stage):
    torch.manual_seed(0)
    initial = nn.Linear(1, 1, bias=False).weight.item()
    for weight, norm in ranks.run(many_ranks_few_elements, stage, world_size=4):
        assert norm == 2.5 and weight == pytest.approx(initial - 0.1 * 0.5)  # clipped to 0.5


# ---- backward passes of all kinds ------------------------------------------------------------------------------------


class Checkpointed(TinyModel):
    """The blocks recomputed in the backward pass; one weight is used inside and outside a checkpointed block."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, ids, labels):
        """As TinyModel, with each block under torch's checkpoint."""
        x = self.embed(ids)
        for block in self.blocks:

            def run(y, block=block):
                return y + block(y) + self.embed.weight.mean() * self.blocks[0][1].weight.mean()

            x = run(x) if self.reentrant is None else checkpoint(run, x, use_reentrant=self.reentrant)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def checkpointed(rank, world, stage, reentrant, plain):
    torch.manual_seed(0)
    engine = start(Checkpointed(reentrant), stage=stage, bucket=800, optimizer=SGD)
    for step in range(2):
        ids, labels = my_micro_batches(step, rank, world, 2, 1)[0]
        loss = engine(ids, labels)
        loss.backward() if plain else engine.backward(loss)
        engine.step()
    return [p.detach().clone() for p in engine.module.parameters()], engine.last_step.grad_norm


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("stage", [1, 2])
def test_activation_checkpointing(ranks, stage, plain):
    expected, norm = ranks.run(checkpointed, stage, None, plain, world_size=2)[0]
    for reentrant in (False, True):
        for parameters, ours in ranks.run(checkpointed, stage, reentrant, plain, world_size=2):
            assert ours == pytest.approx(norm, rel=1e-6)
            assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(parameters, expected, strict=True))


def two_losses(rank, world, stage):
    """Two backward passes before one step: their gradients add up, as in torch."""
    engine = start(make_model(), stage=stage, bucket=800, optimizer=SGD, gradient_clipping=0)
    first, second = (my_micro_batches(step, rank, world, 2, 1)[0] for step in (0, 1))
    engine.backward(engine(*first))
    engine.backward(engine(*second))
    engine.step()
    return [p.detach().clone() for p in engine.module.parameters()]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_two_backward_passes_before_a_step(ranks, stage):
    model = make_model()
    for step in (0, 1):
        ids, labels = make_batch(step, 4)
        model(ids, labels).backward()
    with torch.no_grad():
        expected = [p - 0.1 * p.grad for p in model.parameters()]
    for ours in ranks.run(two_losses, stage, world_size=2):
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, expected, strict=True))


def evaluation_and_dropped_gradients(rank, world, stage):
    """no_grad evaluation between micro-batches changes nothing; zero_grad drops what was accumulated."""
    hashes = []
    for disturb in (False, True):
        engine = start(make_model(), stage=stage, bucket=800, gradient_accumulation_steps=2)
        if disturb:
            ids, labels = make_batch(50, 2)
            engine.backward(engine(ids, labels))
            engine.zero_grad()
        for step in range(3):
            for ids, labels in my_micro_batches(step, rank, world, 2, 2):
                engine.backward(engine(ids, labels))
                engine.step()
                if disturb:
                    engine.eval()
                    with torch.no_grad():
                        assert math.isfinite(engine(*make_batch(99, 3)).item())
                    engine.train()
        hashes.append((engine.params_sha256(), engine.last_step, engine.micro_steps, engine.global_steps))
    return hashes


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_evaluation_and_zero_grad_in_between(ranks, stage):
    for calm, disturbed in ranks.run(evaluation_and_dropped_gradients, stage, world_size=2):
        assert calm == disturbed and calm[2:] == (6, 3)


class Breaks(nn.Module):
    """Raises in its backward pass when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(LENGTH, LENGTH), nn.Linear(LENGTH, LENGTH)
        self.broken = False

    def forward(self, x):
        """Two layers with a hook between that may raise."""
        y = self.b(x)
        if y.requires_grad:
            y.register_hook(self._maybe)
        return self.a(y).pow(2).mean()

    def _maybe(self, grad):
        if self.broken:
            raise ValueError("broken on purpose")
        return grad


def broken_backward(rank, world, stage):
    engine = start(Breaks(), stage=stage, bucket=10, optimizer=SGD)
    x = torch.ones(2, LENGTH)
    engine.module.broken = True
    with pytest.raises(ValueError, match="on purpose"):
        engine.backward(engine(x))
    with pytest.raises(RuntimeError, match="broke off"):
        engine(x)
    engine.zero_grad()
    engine.module.broken = False
    engine.backward(engine(x))
    engine.step()
    return engine.last_step.grad_norm


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_backward_that_raises(ranks, stage):
    norms = ranks.run(broken_backward, stage, world_size=2)
    assert norms[0] == norms[1] > 0


# ---- misuse ----------------------------------------------------------------------------------------------------------


def direct_optimizer_step(rank, world):
    engine = start(make_model(), stage=2)
    engine.backward(engine(*make_batch(0, 2)))
    with pytest.raises(RuntimeError, match=r"engine\.step"):
        engine.optimizer.step()
    with pytest.raises(RuntimeError, match="use stage 1"), engine.no_sync():
        pass
    with pytest.raises(ValueError, match="scalar loss"):
        engine.backward(torch.ones(3, requires_grad=True))
    engine.step()


def test_misuse(ranks):
    ranks.run(direct_optimizer_step, world_size=2)


def writes_between_steps(rank, world, stage, precision):
    engine = start(make_model(), stage=stage, precision=precision, bucket=800, optimizer=SGD)
    one_step(engine, rank, world)
    saved = {name: value.clone() for name, value in engine.module_state_dict().items()}
    hashes = []
    for _ in range(2):
        engine.load_module_state_dict(saved)
        one_step(engine, rank, world, step=1)
        hashes.append(engine.params_sha256())
    return hashes


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_loading_weights_reaches_the_masters(ranks, stage, precision):
    for first, second in ranks.run(writes_between_steps, stage, precision, world_size=2):
        assert first == second


def taken_away(rank, world):
    model = make_model()
    engine = start(model, stage=2, precision="bf16")
    with pytest.raises(deepzero.ConfigError, match="belongs to another engine"):
        start(model, stage=2, precision="bf16")
    model.float()
    engine.backward(engine(*my_micro_batches(0, rank, world, 2, 1)[0]))
    with pytest.raises(RuntimeError, match=r"has left ZeRO's flat buffer: it is now torch\.float32"):
        engine.step()
    engine.destroy()
    one_step(start(model, stage=1), rank, world)


def test_model_moved_or_wrapped_twice(ranks):
    ranks.run(taken_away, world_size=2)


def progress(rank, world):
    engine = start(make_model(), stage=1, steps_per_print=2)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        for step in range(4):
            one_step(engine, rank, world, step)
    return out.getvalue().splitlines()


def test_steps_per_print(ranks):
    lines, silent = ranks.run(progress, world_size=2)
    assert [line.split(",")[0] for line in lines] == ["step=2", "step=4"] and not silent


def different(rank, world, what):
    changes = {"stage": 1}
    model = make_model()
    if what == "config":
        changes["gradient_clipping"] = 1.0 + rank
    elif what == "shape" and rank == 1:
        torch.manual_seed(0)
        model = TinyModel(hidden=38)
    elif what == "frozen" and rank == 1:
        model.norm.bias.requires_grad_(False)
    with pytest.raises(RankMismatchError) as error:
        start(model, **changes)
    return str(error.value)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("config", "gradient_clipping: '1.0' on rank 0, '2.0' on rank 1"),
        ("shape", "(38, 24)"),
        ("frozen", "trained=False"),
    ],
)
def test_ranks_that_differ_all_raise(ranks, what, words):
    messages = ranks.run(different, what, world_size=3)
    assert all(words in message for message in messages)


def different_values(rank, world):
    torch.manual_seed(rank)
    engine = start(TinyModel(), stage=2)
    return engine.params_sha256()


def test_rank_0s_values_win(ranks):
    assert len(set(ranks.run(different_values, world_size=3))) == 1


def not_elementwise(rank, world):
    model = make_model()
    with pytest.raises(deepzero.ConfigError, match="elementwise"):
        deepzero.initialize(model=model, optimizer=torch.optim.LBFGS(model.parameters()), config=config(stage=1))
    with pytest.raises(deepzero.ConfigError, match="not a parameter of the model"):
        deepzero.initialize(model=model, optimizer=torch.optim.SGD([torch.zeros(3)], lr=1.0), config=config(stage=1))


def test_optimizers_that_do_not_fit(ranks):
    ranks.run(not_elementwise, world_size=2)


# ---- front door ------------------------------------------------------------------------------------------------------


class Numbers(torch.utils.data.Dataset):
    """Twelve samples."""

    def __len__(self):
        return 12

    def __getitem__(self, i):
        return torch.full((4,), float(i)), i


def front_door(rank, world):
    model = nn.Linear(4, 1)
    settings = config(stage=2, precision="bf16", scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 4}})
    del settings["optimizer"]
    engine, optimizer, loader, scheduler = deepzero.initialize(
        model=model,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.5),
        training_data=Numbers(),
        config=settings,
    )
    assert optimizer is engine.optimizer and scheduler is engine.lr_scheduler and len(loader) == 12 // world // 2
    seen = []
    for x, index in loader:
        seen += index.tolist()
        engine.backward(engine(x.bfloat16()).float().mean())
        engine.step()
        assert engine.was_step_applied()
    assert engine.global_steps == len(loader) and engine.global_samples == 12
    assert model.weight.dtype == torch.bfloat16 and engine.get_lr()[0] > 0
    return sorted(seen)


def test_front_door(ranks):
    parts = ranks.run(front_door, world_size=2)
    assert sorted(parts[0] + parts[1]) == list(range(12))
