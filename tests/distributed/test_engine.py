"""What an engine meets in real models and real accidents."""

import math
import weakref
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepzero
from tests.distributed.pool import on_ranks, sampled
from tests.distributed.training import (
    LENGTH,
    SGD,
    VOCAB,
    WHOLE,
    TinyModel,
    built,
    check_alike,
    config,
    go,
    log_lines,
    make_batch,
    make_model,
    my_micro_batches,
    one_step,
    start,
    step_from,
    step_on,
)


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_ranks()
def test_fp16_overflow_on_one_rank_skips_on_all(rank, world, stage):
    engine = start(make_model(), stage=stage, precision="fp16", fp16={"initial_scale_power": 8, "hysteresis": 1})
    records, hashes = [], []
    for step in range(6):
        loss = engine(*my_micro_batches(step, rank, world, 2, 1)[0])
        step_from(engine, loss * (math.inf if step == 2 and rank == 1 else 1.0))
        records.append(engine.last_step)
        hashes.append(engine.params_sha256())
    assert [r.skipped for r in records] == [False, False, True, False, False, False]
    assert [r.loss_scale for r in records] == [256, 256, 256, 128, 128, 128] and engine.loss_scale == 128
    assert hashes[2] == hashes[1] and len(set(hashes)) == 5
    assert (engine.skipped_steps, engine.global_steps) == (1, 6)
    assert records[2].grad_norm == math.inf and all(math.isfinite(r.grad_norm) for r in records if not r.skipped)


@on_ranks()
def test_fp16_four_ways_to_call_backward(rank, world):
    for scale, count in ((64, 1), (0.5, 2)):
        settings = {"fp16": {"loss_scale": scale}, "gradient_accumulation_steps": count, "optimizer": SGD}
        found = []
        for backward in (
            lambda engine, loss: engine.backward(loss),
            lambda engine, loss: engine.scale(loss).backward(),
            lambda engine, loss: engine.backward(loss / engine.batch.accumulation, scale_wrt_gas=False),
            lambda engine, loss: loss.backward(),
        ):
            engine = start(make_model(), stage=2, precision="fp16", **settings)
            for micro_batch in my_micro_batches(0, rank, world, 2, count):
                backward(engine, engine(*micro_batch))
                engine.step()
            found.append((engine.params_sha256(), engine.last_step))
        by_engine, scaled, divided, plain = found
        assert by_engine == scaled == divided
        assert by_engine[1].loss_scale == scale and 0 < by_engine[1].grad_norm < 100
        # A plain pass is scaled at the parameters: the same but for what underflows on the way.
        assert plain[1].grad_norm == pytest.approx(by_engine[1].grad_norm, rel=1e-3)
        assert plain[1].loss == by_engine[1].loss


@pytest.mark.parametrize(
    ("stage", "precision"), sampled([(0, "fp32"), (1, "bf16"), (2, "fp32"), (2, "bf16")], (0, 1, 2), ("fp32", "bf16"))
)
@on_ranks()
def test_nan_gradient_stops_and_names_the_parameter(rank, world, stage, precision):
    engine = start(make_model(), stage=stage, precision=precision, bucket=800)
    one_step(engine, rank, world)
    before = engine.params_sha256()
    if rank == 0:
        # One parameter only: its gradient becomes NaN on its way into .grad.
        engine.module.blocks[1][1].weight.register_hook(lambda grad: grad * math.nan)
    engine.backward(engine(*my_micro_batches(1, rank, world, 2, 1)[0]))
    with pytest.raises(deepzero.NonFiniteError, match=r"^step 2: the gradient of blocks\.1\.1\.weight is not finite"):
        engine.step()
    assert engine.params_sha256() == before


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks()
def test_bf16_skips_such_steps_where_it_is_asked_to(rank, world, stage):
    """DeepSpeed's ``bf16.check_grad_overflow``: nothing moves, the schedule neither; the next batch is trained on."""
    warm_up = {"type": "WarmupLR", "params": {"warmup_num_steps": 2, "warmup_max_lr": 0.1}}
    asked = {"bf16": {"enabled": True, "check_grad_overflow": True}, "scheduler": warm_up}
    engine = built(config(stage=stage, precision="bf16", bucket=800) | asked)
    go(engine, rank, world, 0, 2)
    before, lr = engine.params_sha256(), engine.get_lr()
    bad = engine.module.blocks[1][1].weight.register_hook(lambda grad: grad * (math.inf if rank == 0 else 1))
    for skipped in (1, 2):
        assert one_step(engine, rank, world, skipped).skipped and not engine.was_step_applied()
        assert (engine.skipped_steps, engine.params_sha256(), engine.get_lr()) == (skipped, before, lr)
    bad.remove()
    assert not one_step(engine, rank, world, 3).skipped and engine.params_sha256() != before
    engine.module.blocks[1][1].weight.register_hook(lambda grad: grad * math.inf)
    for step in range(4, 8):
        one_step(engine, rank, world, step)
    with pytest.raises(deepzero.NonFiniteError, match="gradients are not finite, in 5 optimizer steps in a row"):
        one_step(engine, rank, world, 8)


class Odd(nn.Module):
    """Frozen, unused, scalar and tied weights, a buffer, a weight used on rank 0 alone, nested outputs."""

    def __init__(self):
        super().__init__()
        self.tiny = TinyModel()
        self.frozen = nn.Linear(VOCAB, 3)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(5, 5)
        self.sometimes = nn.Parameter(torch.ones(7))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("offset", torch.full((3,), 0.25))

    def forward(self, ids, labels, extra=False):
        loss = self.tiny(ids, labels) * self.scale
        if extra:
            loss = loss + self.sometimes.sum()
        return {"loss": loss, "more": [self.offset * 2, (loss.detach(),)]}


@on_ranks(3)
def test_frozen_unused_scalar_tied_and_used_on_one_rank(rank, world):
    hashes = set()
    for stage in (0, 1, 2):
        torch.manual_seed(0)
        engine = start(Odd(), stage=stage, bucket=800, gradient_clipping=0, optimizer=SGD)
        model = engine.module
        frozen, unused = model.frozen.weight.clone(), model.unused.weight.clone()
        for step in range(3):
            step_from(engine, engine(*my_micro_batches(step, rank, world, 2, 1)[0], extra=rank == 0)["loss"])
        assert torch.equal(frozen, model.frozen.weight) and torch.equal(unused, model.unused.weight)
        assert model.tiny.head.weight is model.tiny.embed.weight
        # Mean over three ranks of a gradient of 1 on one of them, three steps of 0.1.
        assert model.sometimes[0].item() == pytest.approx(1 - 3 * 0.1 / 3)
        hashes.add(engine.params_sha256())
    assert len(hashes) == 1


class Several(TinyModel):
    """Loss and logits, as Hugging Face models return them."""

    def forward(self, ids, labels):
        logits = self.logits(ids)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


@on_ranks()
def test_several_outputs_are_scaled_once(rank, world):
    norms = []
    for by_engine, precision in ((True, "fp32"), (True, "fp16"), (False, "fp16")):
        torch.manual_seed(0)
        engine = start(Several(), stage=2, precision=precision, fp16={"loss_scale": 8}, optimizer=SGD)
        out = engine(*my_micro_batches(0, rank, world, 2, 1)[0])
        loss = out["loss"] + 0.1 * out["logits"].pow(2).mean()
        engine.backward(loss) if by_engine else loss.backward()
        engine.step()
        norms.append(engine.last_step.grad_norm)
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-2)


@on_ranks()
def test_native_fp16_with_accumulation(rank, world):
    changes = {"precision": "fp16", "fp16": {"loss_scale": 8}, "gradient_accumulation_steps": 2, "optimizer": SGD}
    norms = [
        one_step(start(make_model(), stage=stage, reduce=reduce, bucket=800, **changes), rank, world).grad_norm
        for stage in (0, 1, 2)
        for reduce in ("exact", "native")
    ]
    assert norms == pytest.approx([norms[0]] * 6, rel=1e-2)


class Chosen(nn.Module):
    """Six weights, of which the caller names those that are used."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 1, bias=False) for _ in range(6))

    def forward(self, x, used):
        return sum(self.layers[i](x).sum() for i in used)


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_ranks()
def test_unused_parameters_are_named_in_one_line(rank, world, stage):
    with log_lines() as messages:
        engine = start(Chosen(), stage=stage, bucket=4, optimizer=SGD)
        engine.module.layers[5].requires_grad_(False)  # of which the step says another thing
        with pytest.raises(RuntimeError, match=r"layers.5.weight' was frozen"):
            step_on(engine, torch.ones(2, 4), [0])
        engine.module.layers[5].requires_grad_(True)
        for used in ([0], [0, 1], [1]):
            step_on(engine, torch.ones(2, 4), used)
    said = "no gradient in this backward pass, so it counts as zeros (said once): "
    unused = ["layers.4.weight, layers.3.weight, layers.2.weight and 1 more", "layers.5.weight", "layers.0.weight"]
    assert [m for m in messages if "no gradient" in m] == [[said + names for names in unused], []][rank]


@pytest.mark.parametrize("world", [1, 2, 3])
@on_ranks(None)
def test_parameter_groups(rank, world):
    results = set()
    for stage in (0, 1, 2):
        model = make_model()
        decay, rest = ([p for p in model.parameters() if (p.dim() > 1) == matrix] for matrix in (True, False))
        groups = [{"params": decay, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0, "lr": 0.02}]
        adamw = torch.optim.AdamW(groups, lr=0.01, fused=True)
        settings = config(stage=stage, bucket=900)
        engine, optimizer, *_ = deepzero.initialize(model=model, optimizer=adamw, config=settings)
        go(engine, rank, world, 0, 4)
        assert [g["lr"] for g in optimizer.param_groups] == [0.01, 0.02] == engine.get_lr()
        assert all(p.dim() == 1 for g in optimizer.param_groups for p in g["params"])
        results.add((engine.params_sha256(), engine.last_step.grad_norm))
    assert len(results) == 1
    check_alike(results)


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_ranks(4)
def test_more_ranks_than_elements(rank, world, stage):
    engine = start(nn.Linear(1, 1, bias=False), stage=stage, optimizer=SGD, train_micro_batch_size_per_gpu=1)
    initial = engine.module.weight.item()
    step_from(engine, engine(torch.tensor([[float(rank + 1)]])).sum())
    assert engine.last_step.grad_norm == 2.5
    assert engine.module.weight.item() == pytest.approx(initial - 0.1 * 0.5)  # clipped to 0.5


class Checkpointed(TinyModel):
    """The blocks recomputed in the backward pass; one weight is used inside and outside a checkpointed block."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant

    def through(self, block, x):
        def run(y):
            return y + block(y) + self.embed.weight.mean() * self.blocks[0][1].weight.mean()

        return run(x) if self.reentrant is None else checkpoint(run, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize(("stage", "plain"), sampled([(1, True), (2, False)], (1, 2), (False, True)))
@on_ranks()
def test_activation_checkpointing(rank, world, stage, plain):
    engines = []
    for reentrant in (None, False, True):
        torch.manual_seed(0)
        engines.append(start(Checkpointed(reentrant), stage=stage, bucket=800, optimizer=SGD))
        for step in range(2):
            loss = engines[-1](*my_micro_batches(step, rank, world, 2, 1)[0])
            loss.backward() if plain else engines[-1].backward(loss)
            engines[-1].step()
    for engine in engines[1:]:
        assert engine.last_step.grad_norm == pytest.approx(engines[0].last_step.grad_norm, rel=1e-6)
        both = zip(engine.module.parameters(), engines[0].module.parameters(), strict=True)
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in both)


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_ranks()
def test_two_backward_passes_before_a_step(rank, world, stage):
    """Their gradients add up, as in torch."""
    model = make_model()
    for step in (0, 1):
        model(*make_batch(step, 4)).backward()
    expected = [p.detach() - 0.1 * p.grad for p in model.parameters()]
    engine = start(make_model(), stage=stage, bucket=800, optimizer=SGD, gradient_clipping=0)
    first, second = (my_micro_batches(step, rank, world, 2, 1)[0] for step in (0, 1))
    engine.backward(engine(*first))
    step_on(engine, *second)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(engine.module.parameters(), expected, strict=True))


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@on_ranks()
def test_a_backward_pass_that_reached_no_parameter_leaves_nothing(rank, world, precision, again):
    """It broke off in the head; the program goes on, with another forward pass or (``again``) with the same graph."""
    scale = {"fp16": {"loss_scale": 8}} if precision == "fp16" else {}
    found, broken = [], []

    def maybe(grad):
        if broken:
            raise ValueError(broken.pop())

    for breaks in (False, True):
        engine = start(make_model(), stage=1, precision=precision, optimizer=SGD, **scale)
        engine.module.norm.register_forward_hook(lambda module, args, out: out.register_hook(maybe) and None)
        batch = make_batch(0, 2)
        loss = engine(*batch)
        if breaks:
            broken.append("broken on purpose")
            with pytest.raises(ValueError, match="on purpose"):
                (engine.scale(loss * 3) if scale else loss * 3).backward(retain_graph=True)
        (loss if again else engine(*batch)).backward()
        engine.step()
        found.append((engine.last_step.loss, engine.last_step.grad_norm, engine.params_sha256()))
    assert found[0] == found[1]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks()
def test_a_graph_of_before_the_step_raises(rank, world, stage):
    """As in torch, where it would use the new weights; one of a skipped step, or of this accumulation, may run."""
    for zero in ({}, {"overlap_param_gather": True})[: 1 if stage == 0 else 2]:
        for precision in ("fp32", "fp16"):
            scale = {"fp16": {"loss_scale": 8}} if precision == "fp16" else {}
            engine = start(make_model(), stage=stage, precision=precision, zero=zero, optimizer=SGD, **scale)
            old = engine(*make_batch(0, 2))
            if scale:  # an overflow
                step_from(engine, engine(*make_batch(0, 2)) * math.inf)
                engine.backward(old, retain_graph=True)
                engine.backward(old, retain_graph=True)
            step_on(engine, *make_batch(1, 2))
            assert engine.was_step_applied()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                engine.backward(old)
            engine.discard_gradients()
            one_step(engine, rank, world)


@on_ranks()
def test_an_optimizer_that_raises_leaves_a_mixture_that_only_a_load_ends(rank, world, tmp_path):
    """Nor a gradient on its masters, or the next step would step on them with those of every sub-group."""
    engine = start(make_model(), stage=3, zero={"sub_group_size": 100})
    engine.save_checkpoint(tmp_path)
    raises = mock.patch.object(engine.optimizer, "step", side_effect=[None, ValueError("on purpose")])
    with raises, pytest.raises(ValueError, match="on purpose"):
        one_step(engine, rank, world)
    assert all(master.grad is None for group in engine.zero.groups for master in group.masters)
    for call in (lambda: one_step(engine, rank, world), lambda: engine.save_checkpoint(tmp_path / "never")):
        with pytest.raises(RuntimeError, match="optimizer step 1 broke off: the engine holds a mixture of two states"):
            call()
    with pytest.raises(RuntimeError, match="load the optimizer's states too"):
        engine.load_checkpoint(tmp_path, load_module_only=True)
    engine.load_checkpoint(tmp_path)
    one_step(engine, rank, world)


class InPlace(nn.Linear):
    """Changes what autograd has saved."""

    def forward(self, x):
        y = super().forward(x).exp()
        loss = y.sum()
        y.add_(1)
        return loss


@pytest.mark.parametrize("settings", [{}, {"activation_checkpointing": {"cpu_checkpointing": True}}])
@on_ranks(1)
def test_a_change_in_place_is_noticed_behind_hooks_on_saved_tensors(rank, world, settings):
    for stage in (2, 3):
        engine = start(InPlace(LENGTH, 3), stage=stage, zero=WHOLE, **settings)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            engine.backward(engine(torch.ones(2, LENGTH)))


class TwoOutputs(nn.Linear):
    """One for the loss, and one that saves itself for a backward pass that does not come."""

    def forward(self, x):
        y = super().forward(x)
        return y.square().mean(), y.softmax(-1)


@pytest.mark.parametrize("settings", [{}, {"activation_checkpointing": {"cpu_checkpointing": True}}])
@on_ranks(1)
def test_an_output_without_a_backward_pass_is_freed_behind_hooks_on_saved_tensors(rank, world, settings):
    for stage in (2, 3):
        engine = start(TwoOutputs(LENGTH, 3), stage=stage, zero=WHOLE, **settings)
        loss, output = engine(torch.ones(2, LENGTH))
        engine.backward(loss)
        ref = weakref.ref(output)
        del loss, output
        assert ref() is None
