"""Stage 3 under models as they are: each situation trains with the bits of stage 2.

How a weight may be used, and kept until the backward pass: ``test_stage3_held.py``.
"""

import copy
import dataclasses
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.convert_frame import register_bytecode_hook
from torch.autograd import forward_ad
from torch.nn import functional as F

import deepzero
from deepzero import zero
from deepzero.utils.compile import is_compiled
from tests.distributed.pool import on_ranks, sampled
from tests.distributed.training import (
    WHOLE,
    check_alike,
    config,
    same_in_stages_2_and_3,
    scripted,
    start,
    step_from,
    step_on,
)

WIDTH = 24


class Base(nn.Module):
    """Two layers and a loss; subclasses say what is between."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, 37)
        self.second = nn.Linear(37, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.norm(self.second(F.gelu(self.first(x)))).pow(2).mean() + self.first(x).mean()


class OutsideItsModule(Base):
    """A weight is used by a function, a view of it is kept across modules, and a module returns its parameter."""

    def __init__(self):
        super().__init__()
        self.table = Table()

    def forward(self, x):
        kept = self.second.weight.t()
        y = F.linear(x, self.first.weight, self.first.bias)
        y = self.first(self.norm(F.linear(F.gelu(y), self.second.weight))) + y
        return (y @ kept + self.table()).pow(2).mean()


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.values = nn.Parameter(torch.linspace(0, 1, WIDTH))

    def forward(self):
        return self.values


class Unused(Base):
    """No gradient for one layer, and a parameter that is not part of any layout: empty."""

    def __init__(self):
        super().__init__()
        self.idle = nn.Linear(50, 50)
        self.nothing = nn.Parameter(torch.zeros(0))


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    parts: dict
    time: float = dataclasses.field(init=False)  # nothing sets it


class Nested(Base):
    def forward(self, x):
        hidden = self.first(x)
        return Output(super().forward(x), {"hidden": (hidden, None)})


class Directional(Base):
    """Its loss has a derivative along a direction: autograd saves tangents, of which some are zeros without memory."""

    def forward(self, x):
        with warnings.catch_warnings(), forward_ad.dual_level():
            warnings.simplefilter("ignore")  # torch's own, of its decompositions
            loss = forward_ad.unpack_dual(super().forward(forward_ad.make_dual(x, x.flip(0))))
            return loss.primal + loss.tangent.square()


class Parametrized(Base):
    """Weights are parametrized for the time of a forward pass, as PEFT's ``target_parameters`` are."""

    def forward(self, x):
        nn.utils.parametrize.register_parametrization(self.norm, "weight", nn.Tanh())
        early = self.first(x).mean()  # shows its bucket, and with it the next one's weight
        nn.utils.parametrize.register_parametrization(self.second, "weight", nn.Tanh())
        loss = super().forward(x) + early
        for module in (self.norm, self.second):
            nn.utils.parametrize.remove_parametrizations(module, "weight", leave_parametrized=False)
        return loss


MODELS = {"direction": Directional, "base": Base, "outside": OutsideItsModule, "unused": Unused, "nested": Nested,
          "parametrized": Parametrized}  # fmt: skip


def batch(step, rank):
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def make(kind):
    torch.manual_seed(0)
    return MODELS[kind]()


def check(rank, kind, precision, forwards=1):
    """Stage 2, and stage 3 in three settings: the same losses, norms and hash."""
    settings = [config(stage=2, precision=precision)]
    for bucket, fetch in ((700, {}), (700, {"stage3_prefetch_bucket_size": 0}), (10**6, {})):
        settings.append(config(stage=3, precision=precision, bucket=bucket, overlap=True, zero={**WHOLE, **fetch}))
    settings[-1]["comm"]["chaos"] = {"enabled": True, "max_delay_ms": 0.2}
    outcomes = []
    for one in settings:
        engine, *_ = deepzero.initialize(model=make(kind), config=one)
        seen = []
        for step in range(3):
            dtype = torch.bfloat16 if precision == "bf16" else torch.float32
            inputs = [batch(step + 10 * k, rank).to(dtype) for k in range(forwards)]
            outputs = [engine(x) for x in inputs]
            step_from(engine, sum((out.loss if isinstance(out, Output) else out).float() for out in outputs))
            seen.append((engine.last_step.loss, engine.last_step.grad_norm))
        outcomes.append((seen, engine.params_sha256()))
        assert one["zero_optimization"]["stage"] == 2 or engine.stage.coordinator.training.dropped == 0
    assert outcomes == [outcomes[0]] * len(settings)
    check_alike(outcomes[0])


@pytest.mark.parametrize(("kind", "precision"), sampled([(kind, "bf16") for kind in MODELS], MODELS, ("bf16", "fp32")))
@on_ranks()
def test_same_bits(rank, world, kind, precision):
    """In fp32 "base" and "outside" are in ``test_two_forwards_before_one_backward``."""
    check(rank, kind, precision)


@pytest.mark.parametrize("world", [1, 3])
@on_ranks(None)
def test_two_forwards_before_one_backward(rank, world):
    for kind in ("base", "outside"):
        check(rank, kind, "fp32", 2)


class Stack(nn.Module):
    """Blocks to be compiled, one by one or all together."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = x + F.gelu(block(x))
        return x.pow(2).mean()


@pytest.mark.slow
@on_ranks(timeout=110)
def test_compiled_blocks(rank, world):
    def stack(how):
        torch.compiler.reset()
        model = Stack()
        if how == "all":
            model.compile(backend="aot_eager")
        for number, block in enumerate(model.blocks):
            if how == "in place":
                block.compile(backend="aot_eager")
            elif how == "wrapped":
                model.blocks[number] = torch.compile(block, backend="aot_eager")
        return model

    def step(engine, number):
        step_on(engine, batch(number, rank))
        seen[how].append((engine.last_step.loss, engine.last_step.grad_norm))
        return seen[how][-1]

    seen = {"in place": [], "wrapped": [], "all": []}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dynamo looks at .grad of tensors that have none
        for how in seen:
            same_in_stages_2_and_3(lambda stage, how=how: stack(how), step)
    assert seen["in place"] == seen["wrapped"] == seen["all"]


@on_ranks(1)
def test_compiled_around_the_hooks(rank, world):
    """What autograd saves between two of our modules' hooks passes ``pack`` inside compiled code; it stays as it is."""
    model, compiled = Stack(), list[str]()
    engine = start(model, stage=3, bucket=100, zero=WHOLE)
    model.forward = torch.compile(model.forward, backend="eager")
    with warnings.catch_warnings(), register_bytecode_hook(lambda code, _: compiled.append(code.co_filename)):
        warnings.simplefilter("ignore")  # as above
        step_on(engine, batch(0, rank))
    assert not any(name.startswith(deepzero.__path__[0]) for name in compiled)
    assert compiled or torch.__version__ < (2, 12)  # which leaves a forward method with such hooks to Python


def scaled_(by, x, weights: list[torch.Tensor]):
    return x * by.sum() + (weights[0] > 0).sum()  # it writes to nothing, in spite of its name


class TracedWithoutMemory(OutsideItsModule):
    """``torch.cond`` traces both branches with tensors that have no memory; a scripted function tells no subclass."""

    def __init__(self):
        super().__init__()
        self.scaled = scripted(scaled_)

    def forward(self, x):
        bias = self.norm.bias
        x = torch.cond(x.sum() > 0, lambda x: (x + bias).sin(), lambda x: x.exp() * bias, (self.norm(x),))
        return super().forward(self.scaled(self.table.values, x, [self.second.weight]))


@on_ranks()
def test_scripted_functions_and_higher_order_operators(rank, world):
    def step(engine, number):
        step_on(engine, batch(number, rank))
        return engine.last_step.loss, engine.last_step.grad_norm

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        same_in_stages_2_and_3(lambda stage: TracedWithoutMemory(), step)


def test_both_ways_to_compile_are_known():
    wrapped, called = torch.compile(nn.Linear(2, 2), backend="eager"), nn.Linear(2, 2)
    called.compile(backend="eager")
    assert [is_compiled(module) for module in (wrapped, called, nn.Linear(2, 2))] == [True, True, False]


class Experts(nn.Module):
    """Each sample goes to one of three experts, chosen by the data: on some rank one gets nothing."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, choice):
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (choice == number).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]))
        return out


class Moe(Base):
    def __init__(self):
        super().__init__()
        self.moe = nn.ModuleList(Experts() for _ in range(2))

    def forward(self, x, choice):
        x = self.norm(x)
        for layer in self.moe:
            x = x + layer(x, choice)
        return super().forward(x)


@pytest.mark.parametrize("world", [2, 3])
@on_ranks(None)
def test_leaf_modules_for_experts_without_tokens(rank, world):
    def experts(stage):
        model = Moe()
        if stage == 3:
            assert zero.set_z3_leaf_modules(model, [Experts]) == list(model.moe)
            model.first._z3_leaf = False  # as DeepSpeed unsets it
            assert zero.z3_leaf_module(model.moe[0]) and not zero.z3_leaf_module(model.first)
        return model

    def step(engine, number):
        # Rank r never uses expert r in even steps; in odd ones all tokens go to one expert.
        choice = (torch.arange(6) % 2 + rank + 1) % 3 if number % 2 == 0 else torch.full((6,), (number + rank) % 3)
        step_on(engine, batch(number, rank), choice)
        return engine.last_step.loss, engine.last_step.grad_norm

    same_in_stages_2_and_3(experts, step, 5, overlap=True)


@pytest.mark.parametrize("kind", [Base, Moe])
@on_ranks()
def test_a_copy_of_a_live_model_fetches_nothing(rank, world, kind):
    """``copy.deepcopy`` takes hooks along: a reference model, within a step of the model that it is a copy of."""
    models, given = [], [torch.zeros(6).long()] if kind is Moe else []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(kind())
    zero.set_z3_leaf_modules(models[0], [Experts], raise_if_not_found=False)
    engine, plain = start(models[0], stage=3, bucket=100, zero=WHOLE), models[1]
    with zero.GatheredParameters(list(engine.module.parameters())):
        reference = copy.deepcopy(engine.module)
    engine.ledger.trace = True
    for number in range(3):
        loss, begun = engine(batch(number, rank), *given), len(engine.ledger.events)
        found, expected = (model(batch(number, rank), *given) for model in (reference, plain))
        found.backward()
        expected.backward()
        assert len(engine.ledger.events) == begun and torch.equal(found, expected)
        engine.backward(loss)
        engine.step()
    for param, other in zip(reference.parameters(), plain.parameters(), strict=True):
        assert type(param) is nn.Parameter and (other.grad is None or torch.equal(param.grad, other.grad))
    with torch.no_grad():  # one that shares parameters is the model itself
        assert torch.equal(copy.copy(engine.module)(batch(0, rank), *given), engine(batch(0, rank), *given))
    other = start(reference, stage=3, bucket=100, zero=WHOLE)  # an engine of its own: the hooks of both run
    loss = engine(batch(3, rank), *given)
    step_on(other, batch(3, rank), *given)
    engine.backward(loss)
    engine.step()
    engine.destroy()
    step_on(other, batch(4, rank), *given)


@pytest.mark.parametrize("late", [False, True])
@on_ranks(1)
def test_registered_external_parameter(rank, world, late):
    """A parameter that is registered, before or after a first step, is fetched with the module that uses it."""
    model = OutsideItsModule()
    if not late:
        zero.register_external_parameter(model, model.first.weight)
        model = copy.deepcopy(model)  # uses its own
        with pytest.raises(TypeError):
            zero.register_external_parameter(model, 3)
    engine = start(model, stage=3, bucket=100, zero=WHOLE)
    if late:
        step_on(engine, batch(0, rank))
        zero.register_external_parameter(model, model.first.weight)
    engine.ledger.trace = True
    engine(batch(0, rank))
    fetched = [e for e in engine.ledger.events if e.what == "fetch"]
    first = next(e for e in fetched if e.where == f"bucket {model.first.weight._record.bucket.key}")
    zero.unregister_external_parameter(model, model.first.weight)
    with pytest.raises(ValueError, match="not registered"):
        zero.unregister_external_parameter(model, model.first.weight)
    assert first.kind == "OutsideItsModule"


@on_ranks()
def test_what_cannot_be_done_is_refused(rank, world):
    engine, *_ = deepzero.initialize(model=make("base"), config=config(stage=3, bucket=700, zero=WHOLE))
    x = batch(0, rank)
    loss = engine(x)
    with pytest.raises(RuntimeError, match="double backward"):
        loss.backward(create_graph=True)
    engine.discard_gradients()
    old = engine(x)
    step_on(engine, x)
    with pytest.raises(RuntimeError, match=r"saw older values of .*engine.step"):
        old.backward()
    engine.discard_gradients()
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        engine(x[:, :5])
    step_on(engine, x)

    @torch.no_grad()
    def spoil(module, *_):
        module.weight.add_(1.0)

    engine.module.norm.register_forward_hook(spoil)
    with pytest.raises(RuntimeError, match="was written while it was gathered"):
        engine(x)
        engine.step()


@on_ranks()
def test_generation_between_steps(rank, world):
    """A loop of forward passes without gradients, then training: two traces, neither disturbs the other."""
    engine, *_ = deepzero.initialize(model=make("base"), config=config(stage=3, bucket=700, zero=WHOLE))
    x = batch(0, rank)
    for _ in range(3):
        step_on(engine, x)
        with torch.no_grad():
            for _ in range(4):
                engine.module(x)
            assert engine.stage.coordinator.live_numel == 0
    coordinator = engine.stage.coordinator
    assert coordinator.training.dropped == coordinator.evaluation.dropped == 0
    assert coordinator.training.plan is not None and coordinator.evaluation.plan is not None


@on_ranks()
def test_values_that_come_and_go_leave_the_masters_their_bits(rank, world):
    """An average's, for an evaluation: masters follow what is there when the next step begins, not each write."""

    def swapped_step(engine, number):
        params, x = list(engine.module.parameters()), batch(number, rank).bfloat16()
        step_on(engine, x)
        losses = []
        for _ in range(2):
            with zero.GatheredParameters(params, modifier_rank=0), torch.no_grad():
                kept = [param.detach().clone() for param in params]
                for param in params:
                    param.mul_(0.7)
            with torch.no_grad():
                losses.append(float(engine(x)))
            with zero.GatheredParameters(params, modifier_rank=0), torch.no_grad():
                for param, values in zip(params, kept, strict=True):
                    param.copy_(values)
        return losses, engine.last_step.loss, engine.last_step.grad_norm

    same_in_stages_2_and_3(lambda stage: make("base"), swapped_step, precision="bf16")


class Changing(Base):
    order = 0

    def forward(self, x):
        return self.norm(x).mean() + super().forward(x) if self.order else super().forward(x)


@on_ranks()
def test_another_order_is_recorded_anew(rank, world):
    model = Changing()
    engine, *_ = deepzero.initialize(model=model, config=config(stage=3, bucket=700, zero=WHOLE))
    for step in range(6):
        model.order = step // 3
        step_on(engine, batch(step, rank))
    coordinator = engine.stage.coordinator
    plan = coordinator.training.plan
    completed = [key for use in plan if use.backward for key in use.completes]
    assert sorted(completed) == sorted(coordinator.bucket_numels)  # each bucket's gradients, once
    assert (coordinator.training.dropped, coordinator.training.plan is not None) == (1, True)
