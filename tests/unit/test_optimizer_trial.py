"""Elementwise or not: every optimizer of torch, some of other people, and no trace left in any of them."""

import types

import pytest
import torch

from deepzero.config.strict import ConfigError
from deepzero.config.zero import ZeroConfig
from deepzero.runtime.elementwise_check import borrowed, check_elementwise, settings_of, steps_in_turn
from tests.unit.test_optimizer_state import ALL as OF_TORCH

optim = torch.optim


def model_weights():
    """A matrix and a vector, as a model has them."""
    return [torch.linspace(-1.0, 1.0, 12).reshape(3, 4).requires_grad_(), torch.ones(4, requires_grad=True)]


class Custom(optim.Optimizer):
    """Descent with a twist that a subclass gives; counts its steps in three places."""

    def __init__(self, params, lr=0.1, **settings):
        super().__init__(params, {"lr": lr, "count": [0], **settings})
        self.steps, self.log = 0, []
        self.offset = torch.zeros(1)
        self.library = types  # a module cannot be copied
        self.me = self

    def change(self, grad, param, group):
        return grad

    @torch.no_grad()
    def step(self, closure=None):
        assert self.me is self
        self.steps += 1
        self.log.append(self.steps)
        self.offset += 1
        for group in self.param_groups:
            group["count"][0] += 1
            for param in group["params"]:
                self.state[param].setdefault("seen", torch.zeros_like(param)).add_(1)
                param.sub_(group["lr"] * self.change(param.grad, param, group))


class LayerNorm(Custom):
    """LAMB's and LARS' heart: the norm of the whole parameter."""

    def change(self, grad, param, group):
        return grad * param.norm() / grad.norm()


def changing(name, change):
    return type(name, (Custom,), {"change": lambda self, grad, param, group: change(self, grad, param, group)})


def clipped(self, grad, param, group):
    """By the norm of all gradients it sees, which under ZeRO is only a part of them."""
    total = sum(p.grad.square().sum() for g in self.param_groups for p in g["params"])
    return grad / max(1.0, total.sqrt() / group.get("limit", 1.0))


def matrix_alone(self, grad, param, group):
    if grad.dim() != 2:
        raise ValueError("needs a matrix")
    return grad


OptionalLayerNorm = changing(
    "OptionalLayerNorm", lambda self, grad, p, group: grad * p.norm() / grad.norm() if group["trust"] else grad
)
GlobalClip, MatrixOnly = changing("GlobalClip", clipped), changing("MatrixOnly", matrix_alone)
Noisy = changing("Noisy", lambda self, grad, *_: grad + torch.randn_like(grad))
Still = changing("Still", lambda self, grad, *_: torch.zeros_like(grad))
Breaks = changing("Breaks", lambda self, grad, *_: grad * float("nan"))


class NeedsClosure(Custom):
    """Evaluates the loss by itself."""

    def step(self, closure):
        closure()


class Wrapper(optim.Optimizer):
    """Lookahead's shape: another optimizer inside."""

    def __init__(self, inner):
        self.inner = inner
        self.param_groups, self.state = inner.param_groups, inner.state
        self.defaults = inner.defaults

    def step(self, closure=None):
        self.inner.step()


ELEMENTWISE = {
    **{name: make for name, make in OF_TORCH.items() if name != "Drifting"},
    "AdamW-lr-0": lambda p: optim.AdamW(p, lr=0.0),
    "AdamW-tiny-tensor-lr": lambda p: optim.AdamW(p, lr=torch.tensor(1e-8)),
    "Adagrad-fused": lambda p: optim.Adagrad(p, fused=True),
    "custom": Custom,
}

NOT_ELEMENTWISE = {
    "LBFGS": (optim.LBFGS, r"LBFGS failed in a trial.*closure"),
    "Adafactor": (optim.Adafactor, r"Adafactor gave other results for slices"),
    "SparseAdam": (optim.SparseAdam, r"SparseAdam failed in a trial.*dense gradients"),
    "layer norm": (LayerNorm, r"LayerNorm gave other results for slices"),
    "layer norm at lr 0": (lambda p: LayerNorm(p, lr=0.0), r"gave other results for slices"),
    "layer norm at a tiny lr": (lambda p: LayerNorm(p, lr=1e-12), r"gave other results for slices"),
    "global norm": (GlobalClip, r"GlobalClip gave other results for slices"),
    "global norm, rarely reached": (lambda p: GlobalClip(p, limit=50.0), r"GlobalClip gave other results for slices"),
    "noise": (Noisy, r"Noisy gave other results for slices"),
    "matrices": (MatrixOnly, r"MatrixOnly failed in a trial on such slices \(ValueError: needs a matrix\)"),
    "closure": (NeedsClosure, r"NeedsClosure failed in a trial.*closure"),
    "still": (Still, r"Still moved nothing in a trial of 3 steps"),
    "nan": (Breaks, r"Breaks gave other results for slices than for the whole, by up to nan"),
}


@pytest.mark.parametrize("make", ELEMENTWISE.values(), ids=ELEMENTWISE)
def test_elementwise_optimizers_pass(make):
    check_elementwise(make(model_weights()))


@pytest.mark.parametrize(("make", "message"), NOT_ELEMENTWISE.values(), ids=NOT_ELEMENTWISE)
def test_others_are_refused_and_told_why(make, message):
    with pytest.raises(ConfigError, match=r"1-D slice.*must be elementwise.*" + message + r".*; use AdamW"):
        check_elementwise(make(model_weights()))


def test_sub_groups_are_of_a_rank_s_share():
    """Of 20,000 elements: two ranks step twice each, four once, unless one of them may have all."""
    zero, weight = ZeroConfig(stage=3, sub_group_size=6000), torch.zeros(20_000, requires_grad=True)
    in_turn = lambda group: [steps_in_turn(zero, Custom([group]), world_size) for world_size in (1, 2, 4)]
    assert in_turn({"params": [weight]}) == [True, True, False]
    assert in_turn({"params": [weight], "per_tensor": True}) == [True] * 3


def test_every_group_is_tried():
    first, second = model_weights()
    groups = [{"params": [first], "trust": False}, {"params": [second], "trust": True}]
    with pytest.raises(ConfigError, match="OptionalLayerNorm gave other results"):
        check_elementwise(OptionalLayerNorm(groups, trust=False))
    groups[1]["trust"] = False
    check_elementwise(OptionalLayerNorm(groups, trust=False))


def test_an_empty_group_is_passed_over():
    optimizer = OptionalLayerNorm([{"params": model_weights(), "trust": False}], trust=True)
    optimizer.param_groups.append({**settings_of(optimizer.param_groups[0]), "trust": True, "params": []})
    check_elementwise(optimizer)


def test_a_wrapper_is_refused_before_it_touches_the_real_weights():
    weights = model_weights()
    before = [w.detach().clone() for w in weights]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    with pytest.raises(ConfigError, match=r"Wrapper holds another optimizer in its attribute 'inner'.*pass the inner"):
        check_elementwise(Wrapper(Custom(weights)))
    assert all(torch.equal(a, b) for a, b in zip(weights, before, strict=True))


class TestNoTrace:
    @pytest.mark.parametrize("make", [*ELEMENTWISE.values(), LayerNorm, Noisy, NeedsClosure])
    def test_all_is_as_before(self, make):
        weights = model_weights()
        weights[0].grad = torch.full_like(weights[0], 3.0)
        optimizer, called = make(weights), []
        optimizer.register_step_pre_hook(lambda *args: called.append("pre"))
        optimizer.register_step_post_hook(lambda *args: called.append("post"))
        attributes = dict(vars(optimizer))
        settings = [repr(settings_of(group)) for group in optimizer.param_groups]
        state = {
            p: {k: v.clone() if torch.is_tensor(v) else v for k, v in s.items()} for p, s in optimizer.state.items()
        }
        values, random_state = [w.detach().clone() for w in weights], torch.get_rng_state()

        try:
            check_elementwise(optimizer)
        except ConfigError:
            assert make in (LayerNorm, Noisy, NeedsClosure)

        assert set(vars(optimizer)) == set(attributes)
        assert all(vars(optimizer)[name] is value for name, value in attributes.items()), "the very same objects"
        assert [repr(settings_of(group)) for group in optimizer.param_groups] == settings
        assert set(optimizer.state) == set(state)
        for param, values_of in state.items():
            for key, value in values_of.items():
                assert torch.equal(torch.as_tensor(optimizer.state[param][key]), torch.as_tensor(value))
        assert all(torch.equal(a, b) for a, b in zip(weights, values, strict=True))
        assert torch.equal(weights[0].grad, torch.full_like(weights[0], 3.0)) and weights[1].grad is None
        assert called == [] and torch.equal(torch.get_rng_state(), random_state)
        if isinstance(optimizer, Custom):
            assert (optimizer.steps, optimizer.log, optimizer.offset.item()) == (0, [], 0.0)

    def test_with_a_torch_scheduler_around_the_step_and_state_of_earlier_steps(self):
        weights = model_weights()
        optimizer = optim.AdamW(weights, lr=0.1, fused=True)
        scheduler = optim.lr_scheduler.LambdaLR(optimizer, lambda k: 0.5**k)
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        step, kept = optimizer.step, {p: {k: v.clone() for k, v in s.items()} for p, s in optimizer.state.items()}
        check_elementwise(optimizer)
        assert optimizer.step is step
        for param, state in kept.items():
            assert all(torch.equal(optimizer.state[param][k], v) for k, v in state.items())
        optimizer.step()
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 0.05

    def test_after_an_error_inside(self):
        optimizer = Custom(model_weights())
        attributes = dict(vars(optimizer))
        with pytest.raises(KeyError), borrowed(optimizer) as lent:
            assert lent is optimizer
            assert lent.param_groups == []
            lent.something_new = 1
            raise KeyError
        assert vars(optimizer) == attributes

    def test_the_other_ranks_numbers_are_the_same(self):
        """All ranks must come to the same verdict whatever their random generators have done before."""
        verdicts = set()
        for seed in (0, 1):
            torch.manual_seed(seed)
            with pytest.raises(ConfigError) as caught:
                check_elementwise(LayerNorm(model_weights()))
            verdicts.add(str(caught.value))
        assert len(verdicts) == 1


def test_parameters_that_stay_whole_may_have_norms():
    """As in stage 0, where a parameter loses nothing but its shape."""
    check_elementwise(LayerNorm(model_weights()), cut=False)
    with pytest.raises(ConfigError, match="Adafactor gave other results"):
        check_elementwise(optim.Adafactor(model_weights()), cut=False)
    with pytest.raises(ConfigError, match="needs a matrix"):
        check_elementwise(MatrixOnly(model_weights()), cut=False)
