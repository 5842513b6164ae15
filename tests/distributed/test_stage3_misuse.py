"""What users do to partitioned parameters that they should not, or that is rare: it works, or it raises and goes on."""

from functools import partial
from operator import methodcaller
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import deepzero
from deepzero import zero
from deepzero.health.desync_watchdog import RankLeftError
from deepzero.runtime.consistency import RankMismatchError
from deepzero.runtime.zero import gradient_reduction
from deepzero.runtime.zero.parameter_all_gather import BACKWARD, FORWARD
from deepzero.runtime.zero.partition_parameters import ZeroParameter
from deepzero.zero import GatheredParameters, PartitionedUseError
from tests.distributed.pool import on_ranks
from tests.distributed.test_stage3_models import Base, Moe, Unused, batch, make
from tests.distributed.training import WHOLE, config, same_in_stages_2_and_3, start, step_from, step_on


def engine_of(frozen=False, kind="base", **changes):
    model = make(kind)
    model.second.weight.requires_grad_(not frozen)
    changes.setdefault("bucket", 10**6)  # everything in one bucket
    return start(model, stage=3, zero=WHOLE, **changes)


def step(engine, rank, number=0):
    step_on(engine, engine.zero.dtypes.cast(batch(number, rank)))
    return engine.last_step.loss, engine.last_step.grad_norm


def neighbours(rank, world):
    """A write to a parameter that only shares the bucket with the one that is gathered."""
    engine = engine_of()
    first, second = engine.module.first, engine.module.second
    for modifier in (0, None):
        gathered = GatheredParameters(first.weight, modifier_rank=modifier)
        with pytest.raises(PartitionedUseError, match=r"'second.bias' was written"), gathered, torch.no_grad():
            second.bias.fill_(7.0)
    with GatheredParameters([second.bias, first.weight], modifier_rank=0):
        assert not (second.bias == 7).any()
        first.weight.data = torch.full((37, 24), 2.0)
    with GatheredParameters(first.weight):
        assert (first.weight == 2).all()
    with GatheredParameters(engine.module.parameters(), modifier_rank=0):
        nn.utils.vector_to_parameters(torch.full((37 * 25 + 24 * 38 + 48,), 0.5), engine.module.parameters())
    with GatheredParameters(first.weight), GatheredParameters(first.weight, modifier_rank=1), torch.no_grad():
        first.weight.mul_(2)
    with GatheredParameters(engine.module.parameters()):
        assert (first.weight == 1).all() and (second.weight == 0.5).all()
    step(engine, rank)


def clamp(module, *_):
    module.weight.data.clamp_(-0.01, 0.01)


def through_data(rank, world):
    """A write through ``.data`` in the forward pass leaves no trace in the version; it is found all the same."""
    # A bucket for each weight: what is found by comparing parts is found by every rank that has one.
    engine = engine_of(bucket=100)
    step(engine, rank)
    spoil = engine.module.first.register_forward_hook(clamp)
    with pytest.raises(PartitionedUseError, match=r"first.weight' was written"):
        step(engine, rank, 1)
    spoil.remove()
    engine.discard_gradients()
    step(engine, rank)  # it goes on


def two_steps(engine, rank):
    return [step(engine, rank, number) for number in (0, 1)]


@pytest.mark.parametrize(("precision", "modifier"), [("fp32", None), ("bf16", 0)])
@on_ranks()
def test_what_is_held_over_a_step_or_a_load_has_the_new_values(rank, world, tmp_path, precision, modifier):
    """And the next forward pass computes with them. What is held when the engine ends stays, whole and plain."""
    held, plain = (engine_of(bucket=100, precision=precision, frozen=True) for _ in range(2))
    first, second = held.module.first, held.module.second
    with GatheredParameters([first.weight, second.weight], modifier_rank=modifier):
        first.bias.all_gather()
        assert two_steps(held, rank) == two_steps(plain, rank)
        first.bias.partition()
    assert held.params_sha256() == plain.params_sha256()
    plain.save_checkpoint(tmp_path)
    step(held, rank)
    with GatheredParameters(second.weight, modifier_rank=0), torch.no_grad():
        second.weight.zero_()
    context = GatheredParameters([first.weight, second.weight], modifier_rank=modifier)
    with context:
        held.load_checkpoint(tmp_path)
        with GatheredParameters(plain.module.parameters()):
            assert torch.equal(first.weight, plain.module.first.weight)
            assert torch.equal(second.weight, plain.module.second.weight)
    assert held.params_sha256() == plain.params_sha256()
    with context:
        held.destroy()
    with GatheredParameters(plain.module.parameters()):
        pairs = zip(held.module.parameters(), plain.module.parameters(), strict=True)
        assert all(type(mine) is nn.Parameter and torch.equal(mine, other) for mine, other in pairs)


@pytest.mark.parametrize("frozen", [False, True])
@on_ranks()
def test_a_write_on_one_rank_is_refused_on_all_and_leaves_nothing_behind(rank, world, frozen):
    """Rank 1 alone writes what stays gathered until the boundary; the step after that is a first step."""
    engine, healthy = engine_of(frozen=frozen), engine_of(frozen=frozen)
    spoiled = engine.module.second if frozen else engine.module.first
    hook = spoiled.register_forward_hook(clamp) if rank == 1 else None
    with pytest.raises(RuntimeError if rank == 0 else PartitionedUseError, match="weight' was written") as error:
        step(engine, rank, 1)
    assert str(error.value).startswith("rank 1: ") == (rank == 0)
    if hook is not None:
        hook.remove()
    assert two_steps(engine, rank) == two_steps(healthy, rank)


@on_ranks()
def test_a_step_that_breaks_off_at_the_boundary_is_begun_again(rank, world):
    engine = engine_of()
    broken = [("engine.agree", RankMismatchError("other collectives")), ("engine._prepare_step", ValueError("sums"))]
    for place, error in broken:
        with mock.patch(f"deepzero.runtime.{place}", side_effect=error), pytest.raises(type(error)):
            step(engine, rank, 1)
        with pytest.raises(RuntimeError, match=r"optimizer step broke off .* call engine.discard_gradients"):
            engine(batch(0, rank))
        engine.discard_gradients()
    # Nobody is left to agree with.
    left = mock.patch.object(engine.zero.trained, "check", side_effect=RankLeftError("rank 7 has left"))
    with left, mock.patch("deepzero.runtime.engine.agree", side_effect=AssertionError), pytest.raises(RankLeftError):
        step(engine, rank, 1)
    engine.discard_gradients()
    assert two_steps(engine, rank) == two_steps(engine_of(), rank)


def load_on_the_way(rank, world):
    """Between micro-batches the next bucket travels already: a write must not be overtaken by it."""
    engine = engine_of(bucket=700, gradient_accumulation_steps=2)
    for number in range(2):
        for _ in range(2):
            step_on(engine, batch(number, rank))
    step_on(engine, batch(2, rank))
    state = {name: torch.full_like(value, 0.125) for name, value in engine.module_state_dict().items()}
    engine.load_module_state_dict(state)
    with GatheredParameters(engine.module.parameters()):
        assert all((param == 0.125).all() for param in engine.module.parameters())
    before = float(engine(batch(3, rank)).detach())
    reference = make("base")
    reference.load_state_dict(state)
    assert before == pytest.approx(float(reference(batch(3, rank)).detach()))


def gather_between(rank, world):
    """Gathers between forward and backward, while a prefetch is under way."""
    engine = engine_of(bucket=700)
    for number in range(4):
        loss = engine(batch(number, rank))
        engine.params_sha256()
        with GatheredParameters(engine.module.parameters()):
            pass
        step_from(engine, loss)


def inference(rank, world):
    """What is first made in inference mode serves training too: an engine, its buffers, what its end makes."""
    engine = torch.inference_mode()(start)(make("base"), stage=3, zero=WHOLE, bucket=700)
    for number in range(3):
        with torch.inference_mode():
            engine(batch(number, rank))
        step(engine, rank, number)
    torch.inference_mode()(engine.destroy)()
    engine.module(batch(3, rank)).backward()


def two_engines(rank, world):
    """An average of two models' weights, gathered together."""
    student, teacher = engine_of(bucket=700), engine_of(bucket=700)
    step(student, rank)
    pairs = list(zip(student.module.parameters(), teacher.module.parameters(), strict=True))
    with GatheredParameters([p for pair in pairs for p in pair], modifier_rank=0), torch.no_grad():
        for mine, other in pairs:
            other.lerp_(mine, 1.0)
    assert student.params_sha256() == teacher.params_sha256()
    with pytest.raises(deepzero.ConfigError, match="belongs to another engine"):
        start(nn.Sequential(student.module), stage=3)
    step(student, rank, 1)


def beside_an_open_init(rank, world):
    """A model is built while another one trains: only its own parameters are written by constructors."""

    def step_inside(engine, number):
        second = engine.module.second
        with zero.Init():
            layer = nn.Linear(37, 24)
            with torch.no_grad():
                layer.weight.copy_(second.weight)
            with GatheredParameters([layer.weight, second.weight]):
                assert torch.equal(layer.weight, second.weight)
            for param in (second.weight, second.bias) if isinstance(second.weight, ZeroParameter) else ():
                with pytest.raises(PartitionedUseError, match="cannot be written"):
                    nn.init.ones_(param)
            return step(engine, rank, number)

    same_in_stages_2_and_3(lambda stage: make("outside"), step_inside)


def sparse(rank, world):
    """Autograd saves a sparse matrix beside the weights."""
    torch.manual_seed(0)
    matrix = torch.eye(6).to_sparse()

    class Graph(Base):
        def forward(self, x):
            return super().forward(torch.sparse.mm(matrix, x + self.second(self.first(x))))

    same_in_stages_2_and_3(lambda stage: Graph(), lambda engine, number: step(engine, rank, number))


def checkpointed_engine(rank, world):
    def checkpointed_step(engine, number):
        step_from(engine, checkpoint(engine, batch(number, rank), use_reentrant=False))
        return engine.last_step.grad_norm

    same_in_stages_2_and_3(lambda stage: make("base"), checkpointed_step)


def mixed_meta(rank, world):
    layer = nn.Linear(3, 3)
    layer.bias = nn.Parameter(torch.empty(3, device="meta"))
    with pytest.raises(deepzero.ConfigError, match="'bias' on the meta device and values in 'weight'"):
        zero.Init(module=layer)


def broken_off(rank, world):
    """An exception inside ``GatheredParameters`` arrives as it is, however the write was made."""
    engine = engine_of(bucket=700)
    weight = engine.module.first.weight
    before = engine.params_sha256()
    with pytest.raises(KeyError), GatheredParameters(weight, modifier_rank=0):
        weight.data = torch.full((37, 24), 2.0)
        raise KeyError
    refused = pytest.raises(ValueError, match=r"of shape \(37, 24\) was given")
    with torch.no_grad() if rank else refused, GatheredParameters(weight, modifier_rank=0):
        weight.data = torch.ones(37 if rank else 1, 24)  # on one rank alone: the others do not wait for its values
    with pytest.raises(KeyError), GatheredParameters(weight), torch.no_grad():
        weight.fill_(2.0)
        raise KeyError
    assert engine.params_sha256() == before
    step(engine, rank)


def written_elsewhere(rank, world):
    """An assignment to ``.data`` of a parameter that is whole anyway is taken over, or refused, as of another."""
    for stage, settings in ((2, {}), (3, {"stage3_param_persistence_threshold": 100})):
        engine = start(make("base"), stage=stage, zero=settings)
        bias = engine.module.first.bias
        with torch.inference_mode(), GatheredParameters(bias, modifier_rank=0):
            bias.data = torch.full(bias.shape, 2.0 + rank, dtype=torch.float64)
        refused = pytest.raises(ValueError, match=r"of shape \(37,\) was given \(5,\)")
        with torch.no_grad() if rank else refused, GatheredParameters(bias, modifier_rank=0):
            bias.data = bias.data if rank else torch.ones(5)
        assert bias.dtype == torch.float32 and (bias == 2).all()
        step(engine, rank)


def turned_where_it_lies(rank, world):
    """An operation in place that changes strides alone is a write too."""
    engine = start(nn.Linear(6, 6), stage=3, zero=WHOLE)
    weight = engine.module.weight
    with GatheredParameters(weight, modifier_rank=0), torch.no_grad():
        before = weight.detach().clone()
        weight.t_()
    with GatheredParameters(weight):
        assert torch.equal(weight, before.T)
    with pytest.raises(PartitionedUseError, match="cannot be written"):
        weight.set_(before)


def stopped_by_ctrl_c(rank, world):
    """Torch calls no hook of the modules under way, which are under way no more."""
    engine = engine_of(bucket=700)
    handle = engine.module.first.register_forward_hook(mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        engine(batch(0, rank))
    handle.remove()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    with pytest.raises(PartitionedUseError, match="partitioned"):
        engine.module.first.weight.sum()
    step(engine, rank)


def broken_off_when_gathered(rank, world):
    """The same for a bucket that is gathered already, and hidden: it is hidden afterwards."""
    engine = engine_of()
    weight = engine.module.first.weight
    loss = engine(batch(0, rank))
    with pytest.raises(KeyError), GatheredParameters(weight):
        raise KeyError
    with pytest.raises(PartitionedUseError, match="partitioned"):
        weight.sum()
    with pytest.raises(KeyError), GatheredParameters(weight), torch.no_grad():
        weight[0, 0] = 2.0  # of rank 0's part; no sample of rank 1 sees it
        raise KeyError
    with pytest.raises(PartitionedUseError, match=r"'first.weight' was written"):
        engine.stage.coordinator.release_all()
    del loss
    step(engine, rank)


class Tail(nn.Sequential):
    """A leaf."""


def gradient_of_the_input(rank, world):
    """``torch.autograd.grad`` completes a leaf and leaves no gradient: the next pass knows nothing of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 24), Tail(nn.Linear(24, 24)))
    zero.set_z3_leaf_modules(model, [Tail])
    engine, *_ = deepzero.initialize(model=model, config=config(stage=3, bucket=100, zero=WHOLE))
    x = batch(0, rank).requires_grad_()
    with mock.patch.object(gradient_reduction.log, "warning") as said:
        for number in range(2):
            torch.autograd.grad(engine(x).sum(), x)
            engine.backward(engine(batch(number, rank)).pow(2).mean())
            with pytest.raises(PartitionedUseError, match="partitioned"):
                model[1][0].weight.sum()  # outside of all modules nothing is shown, of a leaf neither
            engine.step()
    assert not said.called, said.call_args


def sent_by_the_program(rank, world):
    """Before torch 2.13 most collectives take a tensor's memory, of which a placeholder has one element."""
    engine = deepzero.initialize(model=nn.Linear(24, 24), config=config(stage=3, bucket=100, zero=WHOLE))[0]
    weight, whole = engine.module.weight, torch.zeros(24, 24)
    calls = [lambda p: dist.broadcast(p, 0), lambda p: dist.reduce(p, 0), dist.all_reduce, lambda p: dist.isend(p, 1)]
    calls += [lambda p: dist.scatter(p, None if rank else [whole, whole]), lambda p: dist.P2POp(dist.irecv, p, 1)]
    calls += [lambda p: dist.all_gather([p, p], whole), lambda p: dist.all_gather([whole, whole], p)]
    for number, call in enumerate(calls):
        with torch.no_grad(), pytest.raises(PartitionedUseError, match="partitioned"):
            call(weight if number % 2 else weight.data)
    with zero.GatheredParameters(weight), torch.no_grad():
        dist.broadcast(weight, 0)


def hooks_without_a_name(rank, world):
    """Somebody's saved-tensor hooks may be any callables."""

    def hooked_step(engine, number):
        with torch.autograd.graph.saved_tensors_hooks(partial(torch.clone), methodcaller("clone")):
            return step(engine, rank, number)

    same_in_stages_2_and_3(lambda stage: make("base"), hooked_step)


class Sensitive(Base):
    def forward(self, x):
        with torch.enable_grad():
            loss = super().forward(x.requires_grad_())
        return loss if torch.is_grad_enabled() else torch.autograd.grad(loss, x)


def a_shorter_step(rank, world):
    """A step that ends before its plan makes another, and predictions follow it; evaluations are no part of them."""
    engine = start(Sensitive(), stage=3, bucket=700, zero=WHOLE)
    for number in range(4):
        engine.backward(engine(batch(number, rank)))
        with torch.no_grad():
            engine(batch(99, rank))
        if number < 2:
            engine(batch(number, rank))
        engine.step()
    assert engine.stage.coordinator.training.dropped == 1
    sent = engine.ledger.report()["communication"]
    assert all(sent[kind]["predicted"]["calls"] == sent[kind]["measured"]["calls"] for kind in (FORWARD, BACKWARD))


class Recomputed(Unused):
    def forward(self, x):
        block = lambda x: F.linear(F.linear(x, self.first.weight), self.second.weight)
        return super().forward(checkpoint(block, x, use_reentrant=False))


def named_for_their_gradients(rank, world):
    """Parameters tell autograd where gradients arrive; uses of values in a block that runs again are noticed."""

    def named_step(engine, number):
        module, x = engine.module, batch(number, rank)
        named = [module.first.weight, module.norm.bias]
        grads = torch.autograd.grad(engine(x), [*named, module.idle.weight], materialize_grads=True)
        engine(x).backward(inputs=named)
        engine.step()
        return [grad.tolist() for grad in grads], engine.last_step.grad_norm

    same_in_stages_2_and_3(lambda stage: Recomputed(), named_step)


def evaluated_within(rank, world):
    """Evaluations between micro-batches and inside of them, in every other step: the plan of training stays."""

    def evaluated_step(odd, engine, number):
        @torch.no_grad()
        def evaluate():
            for _ in range(2 * (number % 2 == odd)):
                engine(batch(99, rank))

        for micro_batch in (batch(number, rank), batch(number + 10, rank)):
            evaluate()
            loss = engine(micro_batch)
            evaluate()
            step_from(engine, loss)
        return engine.last_step.loss, engine.last_step.grad_norm

    for odd in (0, 1):
        for size in (700, 10**6):
            how = {"bucket": size, "gradient_accumulation_steps": 2}
            same_in_stages_2_and_3(lambda stage: make("outside"), partial(evaluated_step, odd), 4, **how)


def evaluated_in_vain(rank, world):
    """An evaluation that ends in an error, on one rank alone too, leaves the step and its plan as they were."""
    spoil = lambda table, *_: table.values.fill_(5.0)
    engine, healthy = (engine_of(kind="outside", bucket=700) for _ in range(2))
    interrupt = mock.Mock(side_effect=KeyboardInterrupt)
    for number, spoils in enumerate([None, None, spoil if rank == 0 else None, interrupt]):
        loss = engine(batch(number, rank))
        handle = engine.module.table.register_forward_hook(spoils or (lambda *_: None))
        with pytest.raises((PartitionedUseError, KeyboardInterrupt)) if spoils else torch.no_grad(), torch.no_grad():
            engine(batch(99, rank))
        handle.remove()
        step_from(engine, loss)
        assert step(healthy, rank, number) == (engine.last_step.loss, engine.last_step.grad_norm)
    assert engine.stage.coordinator.training.dropped == 0


CASES = [neighbours, through_data, load_on_the_way, gather_between, inference, two_engines, sparse, checkpointed_engine]
CASES += [beside_an_open_init, mixed_meta, broken_off, written_elsewhere, turned_where_it_lies, stopped_by_ctrl_c]
CASES += [broken_off_when_gathered, gradient_of_the_input, sent_by_the_program, hooks_without_a_name, a_shorter_step]
CASES += [named_for_their_gradients, evaluated_within, evaluated_in_vain]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_it(ranks, case):
    ranks.run(case, world_size=2)


@on_ranks()
def test_experts_in_two_forward_passes(rank, world):
    """Two forward passes before one backward pass: each rank's experts get their gradients at other moments."""

    def experts(stage):
        model = Moe()
        if stage == 3:
            zero.set_z3_leaf_modules(model, ["Experts"])
        return model

    def two_forwards(engine, number):
        choice = (torch.arange(6) % 2 + rank + number) % 3
        step_from(engine, engine(batch(number, rank), choice) + engine(batch(number + 10, rank), (choice + rank) % 3))
        return engine.last_step.grad_norm

    same_in_stages_2_and_3(experts, two_forwards, 4, overlap=True)


@on_ranks()
def test_everything_in_a_leaf(rank, world):
    """A leaf whose input needs no gradient: complete at the end of each backward pass."""

    def leaf(stage):
        model = make("base")
        if stage == 3:
            zero.set_z3_leaf_modules(model, [Base])
        return model

    def micro_batch(engine, number):
        step_on(engine, batch(number, rank).bfloat16())
        assert engine.config.zero.stage == 2 or not any(p.grad is not None for p in engine.module.parameters())

    same_in_stages_2_and_3(leaf, micro_batch, 6, precision="bf16", bucket=None, gradient_accumulation_steps=3)


@on_ranks(1)
def test_fp16_engine_after_engine(rank, world):
    """An engine after an engine: nothing of the first one's loss scale is left."""
    model, norms = make("base"), []
    for _ in range(2):
        engine = start(model, stage=2, precision="fp16", fp16={"initial_scale_power": 4}, gradient_clipping=0.0)
        engine(batch(0, rank).half()).float().backward()
        engine.step()
        norms.append(engine.last_step.grad_norm)
        engine.destroy()
    assert norms[1] < 4 * norms[0], norms
