"""What a program may do with gradients between two steps: nothing of a step is lost, or counted twice."""

import contextlib
import math
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from torch import nn

import deepzero
from deepzero import zero
from deepzero.runtime.consistency import agree
from deepzero.runtime.grad_norm import EXPONENT_BINS
from deepzero.utils import safe_get_full_grad
from tests.distributed.pool import on_ranks
from tests.distributed.test_stage3_models import Moe, batch
from tests.distributed.training import (
    SGD,
    WHOLE,
    check_alike,
    go,
    make_batch,
    make_model,
    my_micro_batches,
    one_step,
    start,
    step_from,
    step_on,
)

HOST = {"offload_optimizer": {"device": "cpu"}}


def clear(engine):
    """Whatever a program may clear gradients with."""
    for owner in (engine, engine.optimizer, engine.module):
        owner.zero_grad()
        owner.zero_grad(set_to_none=False)


@pytest.mark.parametrize(("stage", "settings"), [
    (0, {}), (1, {}), (1, {"overlap": True, "precision": "bf16"}), (1, {"zero": HOST, "precision": "bf16"}), (2, {}),
    (2, {"zero": HOST}), (3, {"zero": WHOLE}), (3, {"zero": {**WHOLE, **HOST}, "precision": "bf16"}),
])  # fmt: skip
@on_ranks()
def test_zero_grad_is_harmless_at_any_time(rank, world, stage, settings):
    """Two steps of two micro-batches, with ``zero_grad`` in every place where a program may have it."""
    found = []
    for maybe in (lambda engine: None, clear):
        engine = start(make_model(), stage=stage, bucket=800, gradient_accumulation_steps=2, **settings)
        norms = []
        for step in range(2):
            for ids, labels in my_micro_batches(step, rank, world, 2, 2):
                maybe(engine)
                loss = engine(ids, labels)
                maybe(engine)
                engine.backward(loss)
                maybe(engine)
                engine.step()
            norms.append((engine.last_step.loss, engine.last_step.grad_norm))
        found.append((norms, engine.params_sha256()))
    assert found[0] == found[1]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks()
def test_zero_grad_drops_what_a_generator_left(rank, world, stage):
    """As in plain torch's loop: the loss of a GAN's generator goes through the engine of its discriminator."""
    hashes = []
    for trains in (False, True):
        torch.manual_seed(rank)
        generator, discriminator = (start(nn.Linear(4, 4), stage=stage, optimizer=SGD, zero=WHOLE) for _ in range(2))
        for noise in torch.randn(3, 5, 4):
            discriminator.zero_grad()
            discriminator.backward(discriminator(noise).square().mean())
            discriminator.zero_grad()
            discriminator.step()
            if trains:
                generator.backward(discriminator(generator(noise)).mean())
                generator.step()
        hashes.append(discriminator.params_sha256())
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize("stage", [0, 1])
@on_ranks()
def test_no_sync_is_the_programs_own_accumulation(rank, world, stage):
    """Inside, what DeepSpeed refuses is refused in its words; ``zero_grad`` drops what has come, as in torch."""
    hashes = []
    for disturb in (False, True):
        engine = start(make_model(), stage=stage, bucket=800)
        one_step(engine, rank, world)
        first, last = my_micro_batches(1, rank, world, 2, 2)
        if disturb:
            with engine.no_sync():
                engine.backward(engine(*make_batch(50, 2)))
                with pytest.raises(AssertionError, match=r"illegal to call Engine\.step"):
                    engine.step()
                with pytest.raises(AssertionError, match="reentry is unsupported"), engine.no_sync():
                    pass
            engine.zero_grad()
            assert safe_get_full_grad(engine.module.norm.weight) is None
        with engine.no_sync():
            engine.backward(engine(*first))
        step_on(engine, *last)
        engine.zero_grad()
        one_step(engine, rank, world, 2)
        hashes.append((engine.last_step.grad_norm, engine.params_sha256(), engine.micro_steps))
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize("stage", [0, 1])
@on_ranks()
def test_zero_grad_keeps_the_count_of_micro_batches(rank, world, stage):
    """``no_sync`` in every other micro-batch, ``zero_grad`` before and ``step`` after each: every second one acts."""
    engine = start(make_model(), stage=stage, gradient_accumulation_steps=2)
    for i in range(6):
        engine.zero_grad()
        with engine.no_sync() if i % 2 == 0 else contextlib.nullcontext():
            engine.backward(engine(*make_batch(i, 2)))
        engine.step()
        assert (engine.micro_steps, engine.global_steps) == (i + 1, (i + 1) // 2)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks()
def test_discarded_gradients_leave_nothing(rank, world, stage):
    """It begins the step again, with its first micro-batch; evaluations between micro-batches change nothing."""
    results = []
    for disturb in (False, True):
        engine = start(make_model(), stage=stage, bucket=800, zero=WHOLE, gradient_accumulation_steps=3)
        if disturb:
            for _ in range(2):
                step_on(engine, *make_batch(50, 2))
            engine.discard_gradients()
            assert safe_get_full_grad(engine.module.norm.weight) is None
            with pytest.raises(RuntimeError, match="no backward pass has run"):
                engine.step()
        for micro_batch in my_micro_batches(0, rank, world, 2, 3):
            step_on(engine, *micro_batch)
            if disturb:
                engine.eval()
                with torch.no_grad():
                    engine(*make_batch(99, 3))
                engine.train()
        results.append((engine.last_step, engine.micro_steps, engine.global_steps, engine.params_sha256()))
    assert results[0] == results[1] and results[0][1:3] == (3, 1)


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks()
def test_a_gradient_that_is_assigned_by_hand_is_refused(rank, world, stage):
    engine = start(make_model(), stage=stage, optimizer=SGD)
    before = engine.params_sha256()
    engine.backward(engine(*my_micro_batches(0, rank, world, 2, 1)[0]))
    if rank == 1:
        engine.module.norm.weight.grad = torch.ones_like(engine.module.norm.weight)
    with pytest.raises(RuntimeError, match=r"'norm.weight' has a .grad that was assigned by hand"):
        engine.step()
    engine.zero_grad()
    unchanged = engine.params_sha256() == before
    one_step(engine, rank, world)
    assert unchanged


class SparseTwice(nn.Module):
    """An embedding with sparse gradients, to which a dense one may come."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 4, sparse=True)

    def forward(self, ids, dense):
        return (self.embed.weight if dense else self.embed(ids)).square().sum()


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_ranks()
def test_sparse_and_dense_gradients_add_up(rank, world, stage):
    for dense in ([False], [False, False], [False, True], [True, False]):
        few = {"gradient_accumulation_steps": len(dense), "gradient_clipping": 0}
        engine = start(SparseTwice(), stage=stage, optimizer=SGD, **few)
        expected = engine.module.embed.weight.detach().clone().requires_grad_()
        for some in dense:
            for ids in (torch.tensor([1, 5, 5]), torch.tensor([5, 2, 7])):
                (expected if some else expected[ids]).square().sum().backward()
            step_on(engine, torch.tensor([[1, 5, 5], [5, 2, 7]][rank]), some)
        mean = expected.grad / len(dense) / world
        assert torch.allclose(engine.module.embed.weight, expected.detach() - 0.1 * mean)
        check_alike(engine.params_sha256())


class Energy(nn.Module):
    """A scalar of its input, of which programs take derivatives."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 1)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))).mean()


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (1, "fp16"), (2, "fp16"), (3, "fp32"), (3, "fp16")])
@on_ranks()
def test_autograd_grad_is_no_backward_pass(rank, world, stage, precision):
    """Derivatives by the input, by a parameter, in training and in evaluation: no backward pass of training's."""
    results = []
    for disturb in (False, True):
        torch.manual_seed(0)
        fp16 = {"fp16": {"loss_scale": 64}} if precision == "fp16" else {}
        engine = start(
            Energy(), stage=stage, precision=precision, gradient_accumulation_steps=2,
            zero=WHOLE, **fp16,
        )  # fmt: skip
        dtype = engine.module.first.weight.dtype
        for step in range(4):
            x = torch.full((3, 6), 0.1 * (step + rank + 1), dtype=dtype)
            if disturb:
                for training in (True, False):
                    engine.train(training)
                    probe = x.clone().requires_grad_()
                    (by_input,) = torch.autograd.grad(engine(probe), probe)
                    torch.autograd.grad(engine.scale(engine(probe)), probe)
                    out = engine(probe)
                    with zero.GatheredParameters(engine.module.second.bias):  # as every use of a parameter itself
                        (by_weight,) = torch.autograd.grad(out * 2, engine.module.second.bias)
                    assert float(by_input.abs().sum()) > 0 and float(by_weight) == 2.0
                    with pytest.raises(RuntimeError, match="not have been used"):
                        torch.autograd.grad(engine(probe), torch.ones(1, requires_grad=True))
                engine.train()
                if step == 0:
                    with pytest.raises(RuntimeError, match="no backward pass has run"):
                        engine.step()
            loss = engine(x)
            scaled = engine.scale(loss) if step % 2 else None
            if disturb:
                torch.autograd.grad(engine(probe), probe)
            engine.backward(loss) if scaled is None else scaled.backward()
            engine.step()
        results.append((engine.last_step, engine.micro_steps, engine.params_sha256()))
    assert results[0] == results[1]


@on_ranks()
def test_autograd_grad_through_experts(rank, world):
    """Through leaf modules of stage 3, which count themselves as complete by a gradient of their input."""
    results = []
    for disturb in (False, True):
        torch.manual_seed(0)
        model = Moe()
        zero.set_z3_leaf_modules(model, ["Experts"])
        engine = start(model, stage=3, bucket=700, zero=WHOLE, gradient_accumulation_steps=2)
        for step in range(4):
            choice = (torch.arange(6) + rank + step) % 3
            x, probe = (batch(step, rank).requires_grad_() for _ in range(2))
            loss = engine(x, choice)
            if disturb:
                torch.autograd.grad(loss, x, retain_graph=True)
                torch.autograd.grad(engine(probe, choice), probe)
            engine.backward(loss)
            if disturb:  # between the last gradient and the step that takes it
                torch.autograd.grad(engine(probe, choice), probe)
            engine.step()
        results.append((engine.last_step, engine.params_sha256()))
    assert results[0] == results[1]


@on_ranks()
def test_leaf_modules_that_share_a_bucket(rank, world):
    """Each is complete once in a pass, and their bucket leaves once."""
    model = Moe()
    zero.set_z3_leaf_modules(model, ["Experts"])
    engine = start(model, stage=3, bucket=10**6, zero=WHOLE)
    engine.ledger.trace = True
    step_on(engine, batch(0, rank), (torch.arange(6) + rank) % 3)
    assert [(e.what, e.kind) for e in engine.ledger.events].count(("launch", "gradients.reduce_scatter")) == 1


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("here")


@pytest.mark.parametrize(("stage", "by_engine"), [(0, False), (1, True), (2, False), (2, True), (3, False)])
@on_ranks(1)
def test_half_a_pass_is_not_forgotten_by_the_next_one(rank, world, stage, by_engine):
    """Two forward passes come first; the first one's backward pass breaks off behind the last layer's gradients."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Identity(), nn.Linear(3, 3))
    engine = start(model, stage=stage, zero=WHOLE)
    handle = model[1].register_forward_hook(lambda module, args, out: Breaks.apply(out))
    first = engine(torch.ones(1, 3)).sum()
    handle.remove()
    second = engine(torch.ones(1, 3)).sum()
    with pytest.raises(ArithmeticError):
        engine.backward(first) if by_engine else first.backward()
    if not by_engine:
        second.backward()
    for refused in (engine.step, lambda: engine(torch.ones(1, 3))):
        with pytest.raises(RuntimeError, match=r"backward pass broke off .* call engine.discard_gradients"):
            refused()
    engine.discard_gradients()
    step_from(engine, engine(torch.ones(1, 3)).sum())
    assert engine.last_step.grad_norm > 0


class Unused(nn.Linear):
    """A leaf module without tokens: its gradients are complete, though there is none, when its input has one."""

    def forward(self, x):
        return x + 1


@on_ranks(1)
def test_half_a_pass_behind_a_leaf_module_leaves_no_count(rank, world):
    model = nn.Sequential(nn.Linear(3, 3), nn.Identity(), Unused(3, 3))
    zero.set_z3_leaf_modules(model, [Unused])
    engine = start(model, stage=3, zero=WHOLE)
    handle = model[1].register_forward_hook(lambda module, args, out: Breaks.apply(out))
    with pytest.raises(ArithmeticError):
        engine(torch.ones(1, 3)).sum().backward()
    handle.remove()
    engine.ledger.trace = True
    engine.backward(engine(torch.ones(1, 3)).sum())
    assert [(e.what, e.kind) for e in engine.ledger.events].count(("launch", "gradients.reduce_scatter")) == 1


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(1)
def test_what_raises_while_buckets_leave_leaves_no_step(rank, world, stage):
    """At the end of a pass, where they have waited for a parameter that it does not reach; or before the step."""
    hashes = []
    for disturb in (False, True):
        model = make_model()
        model.unused = nn.Linear(3, 3)
        engine = start(model, stage=stage, bucket=800, zero=WHOLE)
        if disturb:
            reducer = engine.zero.bucket_reducer
            full = mock.patch.object(reducer, "launch", side_effect=[None, MemoryError("on purpose")])
            with full, pytest.raises(MemoryError, match="on purpose"):
                engine.backward(engine(*make_batch(1, 2)))
                engine.allreduce_gradients()
            with pytest.raises(RuntimeError, match=r"broke off .* call engine.discard_gradients"):
                engine.step()
            engine.discard_gradients()
        one_step(engine, rank, world)
        hashes.append((engine.last_step, engine.params_sha256()))
    assert hashes[0] == hashes[1]


class SaysItTwice(nn.Linear):
    def forward(self, x):
        loss = super().forward(x).square().mean()
        return loss, {"loss": loss}


@on_ranks(1)
def test_each_loss_of_a_pass_is_logged_once(rank, world):
    engine = start(SaysItTwice(3, 3), optimizer=SGD)
    for backward in (lambda a, b: (a + b).backward(), lambda a, b: (engine.scale(a) + engine.scale(b)).backward()):
        losses = [engine(torch.full((1, 3), value))[0] for value in (1.0, 2.0)]
        backward(*losses)
        engine.step()
        assert engine.last_step.loss == pytest.approx(sum(losses).item())


class TwoWays(nn.Module):
    def __init__(self):
        super().__init__()
        self.trained, self.frozen = nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x, trained):
        return (self.trained if trained else self.frozen)(x).square().sum()


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_ranks()
def test_a_pass_that_reaches_no_parameter_on_one_rank(rank, world, stage):
    """It counts as zeros, whatever the other micro-batches of the step are."""
    norms = []
    for maker in (None, start):
        torch.manual_seed(0)
        model = TwoWays()
        engine = maker(model, stage=stage, gradient_accumulation_steps=3, overlap=True) if maker else model
        for k in range(3):
            for r in range(world) if maker is None else [rank]:
                loss = engine(torch.full((2, 6), k + r + 1.0, requires_grad=True), r == 0 or k == 1)
                if maker is None:
                    (loss / world / 3).backward()
                elif k == 2:
                    engine.scale(loss).backward()
                else:
                    engine.backward(loss)
            if maker:
                engine.step()
        if maker is None:
            norms.append(float(torch.cat([p.grad.reshape(-1) for p in model.trained.parameters()]).norm()))
        else:
            norms.append(pytest.approx(engine.last_step.grad_norm, rel=1e-6))
    assert norms[0] == norms[1]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@on_ranks()
def test_a_loss_of_no_parameter_on_one_rank(rank, world, precision):
    """Of an empty batch, say, and not of the engine's outputs: it counts as zeros."""
    norms = []
    for begin in ("backward", "backward", *(["scale"] if precision == "fp16" else [])):
        scale = {"fp16": {"loss_scale": 4}} if precision == "fp16" else {}
        engine = start(make_model(), stage=2, precision=precision, gradient_accumulation_steps=2, **scale)
        for ids, labels in my_micro_batches(0, 0, 1, 2, 2):
            empty = torch.zeros((), requires_grad=True) if norms else engine(ids, labels) * 0
            loss = empty if rank else engine(ids, labels)
            if begin == "backward" or rank == 0:
                with torch.no_grad():  # as torch's own backward may be called
                    engine.backward(loss)
            else:
                engine.scale(loss).backward()
            engine.step()
        norms.append(engine.last_step.grad_norm)
    assert len(set(norms)) == 1


@on_ranks(1)
def test_a_forward_pass_of_another_thread_while_a_backward_pass_is_under_way(rank, world):
    """Of an evaluation, say, before it has reached a parameter and when it has."""
    found = []
    for meanwhile in (None, "before", "after"):
        engine = start(make_model(), stage=2, precision="fp16", fp16={"loss_scale": 64})
        ids, labels = my_micro_batches(0, 0, 1, 2, 1)[0]
        loss = engine(ids, labels)
        evaluate, seen = torch.no_grad()(lambda: engine(ids, labels)), []  # noqa: B023
        with ThreadPoolExecutor(1) as pool:
            look = lambda _: seen.append(pool.submit(evaluate).result())  # noqa: B023
            if meanwhile == "before":
                loss.register_hook(look)
            elif meanwhile == "after":
                list(engine.module.parameters())[-1].register_post_accumulate_grad_hook(look)
            engine.backward(loss)
        assert len(seen) == bool(meanwhile)
        engine.step()
        found.append((engine.last_step.grad_norm, engine.last_step.loss))
    assert len(set(found)) == 1


@pytest.mark.parametrize("stage", [0, 2])
@on_ranks()
def test_gradient_penalty(rank, world, stage):
    """With ``create_graph=True``: one backward pass, whose loss is the whole one."""

    def loss_of(model, at):
        x = torch.full((3, 6), 0.5 + at, requires_grad=True)
        out = model(x)
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        return out + slope.square().sum()

    torch.manual_seed(0)
    model = Energy()
    losses = [loss_of(model, at) for at in range(world)]
    mean = sum(losses) / world
    mean.backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
    torch.manual_seed(0)
    engine = start(Energy(), stage=stage, optimizer=SGD, gradient_clipping=0)
    loss = loss_of(engine, rank)
    step_from(engine, loss)
    assert engine.last_step.loss == pytest.approx(mean.item()) and engine.last_step.grad_norm == pytest.approx(norm)
    assert loss.item() == pytest.approx(losses[rank].item())


@pytest.mark.parametrize(("stage", "scale"), [(1, 0), (3, 64)])
@on_ranks()
def test_a_nan_loss_is_no_overflow_for_ever(rank, world, stage, scale):
    settings = {"fp16": {"loss_scale": scale, "initial_scale_power": 10}}
    engine = start(make_model(), stage=stage, precision="fp16", zero=WHOLE, **settings)
    one_step(engine, rank, world)
    kept = engine.params_sha256()
    with pytest.raises(deepzero.NonFiniteError) as error:
        for step in range(1, 20):
            # Four bad steps and a good one in between are an accident; five in a row are not.
            bad = rank == 1 and step != 5
            step_from(engine, engine(*my_micro_batches(step, rank, world, 2, 1)[0]) * (math.nan if bad else 1.0))
    assert (step, engine.params_sha256() != kept, engine.skipped_steps) == (10, True, 8)
    text = str(error.value)
    assert text.startswith("step 11: the loss is not finite (nan on rank 1), in 5 optimizer steps in a row")
    assert "those of step 6" in text
    bins = torch.zeros(EXPONENT_BINS, dtype=torch.int64)
    assert [found for found, _ in agree(engine.comm, bins, math.nan if rank else None, 1).bad_losses] == [1]


@on_ranks()
def test_gradients_that_overflow_at_the_smallest_scale_raise(rank, world):
    engine = start(make_model(), stage=2, precision="fp16", fp16={"initial_scale_power": 2, "hysteresis": 1})
    engine.module.norm.weight.register_hook(lambda grad: grad * math.inf)
    with pytest.raises(RuntimeError, match="although the loss scale is at its minimum, 1, after 3 optimizer steps"):
        go(engine, rank, world, 0, 9)
    assert engine.skipped_steps == 2 and engine.comm.ledger.steps == 3


@on_ranks(1)
def test_one_rank_rounds_nothing_for_the_way(rank, world):
    """Nor the micro-batches after the first, which are added to its sum."""
    found = set()
    for wire in ({}, {"communication_data_type": "bf16"}):
        engine = start(make_model(), stage=2, gradient_accumulation_steps=2, **wire)
        found.add((one_step(engine, rank, world).grad_norm, engine.params_sha256()))
    assert len(found) == 1


class OneGradient(nn.Module):
    """Autograd leaves views of one tensor in the gradients of ``a`` and ``b``."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.full((8, 4), 0.5)) for _ in range(2))
        self.c = nn.Parameter(torch.ones(32))

    def forward(self, x):
        return ((self.a.view(-1) + self.b.view(-1)) * x + self.c * x).sum()


@on_ranks()
def test_a_gradient_that_parameters_share_is_added_up_once(rank, world):
    norms = set()
    for stage in range(4):
        engine = start(OneGradient(), stage=stage, gradient_accumulation_steps=3, zero=WHOLE)
        places = set()
        for k in range(3):
            engine.backward(engine(torch.arange(32.0) + k + rank))
            if stage < 2 and engine.stage.gradients.unreduced._waiting:
                places.add(engine.stage.gradients.unreduced.waiting_of(engine.module.c).data_ptr())
            engine.step()
        assert stage >= 2 or len(places) == 1  # what nobody shares is added to in place
        norms.add(engine.last_step.grad_norm)
    mean = sum(torch.arange(32.0) + k + r for k in range(3) for r in range(world)) / 3 / world
    assert [*norms] == [pytest.approx(3**0.5 * float(mean.norm()), rel=1e-6)]
    check_alike(norms)
