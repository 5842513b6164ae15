"""State in advance: what torch would create, and not one bit of difference afterwards."""

import pytest
import torch

from deepzero.ops import CPUAdam
from deepzero.runtime.optimizer_state import allocate_state

optim = torch.optim
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Drifting(optim.Optimizer):
    """All that makes a trial hard to undo: moves without a gradient, counts, keeps values elsewhere, draws numbers."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "count": [0]})
        self.steps, self.made = 0, []

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            group["count"][0] += 1
            for param in group["params"]:
                if not (state := self.state[param]):
                    state["anchor"] = param.clone()
                    WITNESS.append(len(self.state))
                param.mul_(0.9).add_(torch.rand(())).sub_(0.01 * param.grad * self.steps * group["count"][0])


WITNESS = []
"""How many states :class:`Drifting` held when it made one."""


class SubAdam(optim.Adam):
    """Not exactly Adam, so nothing may be taken for granted."""


KNOWN = {
    "Adam": lambda p: optim.Adam(p, lr=0.01, weight_decay=0.1),
    "Adam-amsgrad": lambda p: optim.Adam(p, amsgrad=True, foreach=True),
    "Adam-loop": lambda p: optim.Adam(p, foreach=False),
    "AdamW": optim.AdamW,
    "AdamW-fused": lambda p: optim.AdamW(p, fused=True),
    "AdamW-fused-amsgrad": lambda p: optim.AdamW(p, fused=True, amsgrad=True),
    "AdamW-fused-tensor-lr": lambda p: optim.AdamW(p, lr=torch.tensor(0.01), fused=True),
    "CPUAdam": lambda p: CPUAdam(p, weight_decay=0.1),
    "RAdam": lambda p: optim.RAdam(p, decoupled_weight_decay=True, weight_decay=0.1),
    "NAdam": lambda p: optim.NAdam(p, momentum_decay=0.1),
    "Adamax": optim.Adamax,
    "Adadelta": optim.Adadelta,
    "RMSprop": optim.RMSprop,
    "RMSprop-all": lambda p: optim.RMSprop(p, momentum=0.9, centered=True),
    "SGD": optim.SGD,
    "SGD-fused": lambda p: optim.SGD(p, fused=True),
    "SGD-momentum": lambda p: optim.SGD(p, momentum=0.9, weight_decay=0.01),
    "SGD-momentum-loop": lambda p: optim.SGD(p, momentum=0.9, foreach=False),
    "SGD-momentum-fused": lambda p: optim.SGD(p, momentum=0.9, fused=True),
    "SGD-nesterov": lambda p: optim.SGD(p, momentum=0.9, nesterov=True),
    "SGD-nesterov-fused": lambda p: optim.SGD(p, momentum=0.9, nesterov=True, fused=True),
    "SGD-maximize": lambda p: optim.SGD(p, momentum=0.9, maximize=True),
}
"""State is made and stays."""

MADE_BY_CONSTRUCTOR = {"Adagrad": lambda p: optim.Adagrad(p, initial_accumulator_value=0.1)}
"""State is there already."""

TRIED = {
    "SGD-dampening": lambda p: optim.SGD(p, momentum=0.9, dampening=0.3),
    "Rprop": optim.Rprop,
    "ASGD": optim.ASGD,
    "SubAdam": lambda p: SubAdam(p, weight_decay=0.1, fused=True),
    "Drifting": Drifting,
}
"""State is tried out and taken back."""

ALL = {**KNOWN, **MADE_BY_CONSTRUCTOR, **TRIED}
ON_GPU = {
    "AdamW-capturable": lambda p: optim.AdamW(p, capturable=True),
    "NAdam-capturable": lambda p: optim.NAdam(p, capturable=True),
}


def masters(device="cpu"):
    """1-D fp32 leaves with zeros of either sign among the values; one is empty, as on a rank that owns nothing."""
    generator, out = torch.Generator().manual_seed(1), []
    for extent in (33, 0, 16):
        values = torch.randn(extent, generator=generator)
        values[1::5], values[2::5] = 0.0, -0.0
        out.append(values.to(device).requires_grad_())
    return out


def gradients(device):
    """Gradients of five steps, with zeros of either sign that move from step to step."""
    generator = torch.Generator().manual_seed(2)
    for step in range(5):
        out = []
        for extent in (33, 0, 16):
            values = torch.randn(extent, generator=generator)
            values[step::4], values[step + 1 :: 4] = -0.0, 0.0
            out.append(values.to(device))
        yield out


def bits(tensor):
    """A copy that is equal only where the bits are: -0.0 is not 0.0 here."""
    plain = tensor.detach().cpu().clone()
    return plain.view(torch.int32) if plain.dtype == torch.float32 else plain


def train(make, device, allocate):
    """Masters and states after each of five steps, as bits."""
    torch.manual_seed(3)
    leaves = masters(device)
    optimizer = make([{"params": leaves[:2]}, {"params": leaves[2:]}])
    if allocate:
        allocate_state(optimizer)
    seen = []
    for grads in gradients(device):
        for leaf, grad in zip(leaves, grads, strict=True):
            leaf.grad = grad
        optimizer.param_groups[0]["lr"] *= 0.9  # a schedule moves on between allocation and step
        optimizer.step()
        for leaf in leaves:
            seen.append(bits(leaf))
            state = optimizer.state.get(leaf, {})
            seen.extend(bits(state[key]) for key in sorted(state) if torch.is_tensor(state[key]))
    return seen


@pytest.mark.parametrize(("name", "device"), [
    *((name, "cpu") for name in ALL),
    # Drifting draws from the CPU's generator.
    *(pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in [*ALL, *ON_GPU] if name != "Drifting"),
])  # fmt: skip
def test_training_is_the_same_to_the_bit(name, device):
    without, with_state = (train({**ALL, **ON_GPU}[name], device, allocate) for allocate in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(without, with_state, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", KNOWN)
def test_state_is_what_the_first_step_would_make(name, device):
    made, stepped = masters(device), masters(device)
    early, late = KNOWN[name](made), KNOWN[name](stepped)
    allocate_state(early)
    for leaf in stepped:
        leaf.grad = torch.ones_like(leaf)
    late.step()
    for mine, its in zip(made, stepped, strict=True):
        expected = {key: value for key, value in late.state[its].items() if value is not None}
        assert set(early.state[mine]) == set(expected)
        for key, value in expected.items():
            got = early.state[mine][key]
            assert (got.shape, got.dtype, got.device) == (value.shape, value.dtype, value.device), key
            assert got.requires_grad is False
            assert value.dim() == 0 or value.numel() == 0 or got.data_ptr() != mine.data_ptr()


@pytest.mark.parametrize("name", TRIED)
def test_a_trial_is_taken_back(name):
    leaves = masters()
    optimizer = TRIED[name](leaves)
    before, attributes = [bits(leaf) for leaf in leaves], dict(vars(optimizer))
    random_state = torch.get_rng_state()
    leaves[0].grad = grad = torch.ones_like(leaves[0])
    allocate_state(optimizer)
    assert len(optimizer.state) == 0
    assert all(torch.equal(bits(a), b) for a, b in zip(leaves, before, strict=True))
    assert leaves[0].grad is grad
    assert leaves[1].grad is None
    assert all(vars(optimizer)[key] is value for key, value in attributes.items())
    assert optimizer.param_groups[0].get("count", [0]) == [0]
    assert torch.equal(torch.get_rng_state(), random_state)


def test_a_trial_holds_all_states_at_once():
    WITNESS.clear()
    allocate_state(Drifting(masters()))
    assert WITNESS == [1, 2, 3], "the third state was made while the first two were alive: the peak was reached"


def test_a_trial_is_taken_back_when_it_fails():
    class Fails(Drifting):
        def step(self, closure=None):
            super().step()
            raise MemoryError("no room for the state")

    leaves = masters()
    before = [bits(leaf) for leaf in leaves]
    optimizer = Fails(leaves)
    with pytest.raises(MemoryError):
        allocate_state(optimizer)
    assert all(torch.equal(bits(a), b) for a, b in zip(leaves, before, strict=True))
    assert (optimizer.steps, len(optimizer.state)) == (0, 0)
    assert [group["params"] for group in optimizer.param_groups] == [leaves]


@pytest.mark.parametrize("name", ["AdamW", "SGD-momentum", "Drifting"])
def test_state_that_is_there_stays(name):
    leaves = masters()
    optimizer = ALL[name](leaves)
    for leaf in leaves:
        leaf.grad = torch.ones_like(leaf)
    optimizer.step()
    kept = {leaf: dict(state) for leaf, state in optimizer.state.items()}
    assert kept
    allocate_state(optimizer)
    for leaf, state in kept.items():
        assert all(optimizer.state[leaf][key] is value for key, value in state.items())


def test_groups_differ():
    first, _, second = masters()
    optimizer = optim.SGD([{"params": [first], "momentum": 0.9}, {"params": [second], "momentum": 0.0}])
    allocate_state(optimizer)
    assert set(optimizer.state) == {first}


def test_counters_are_double_where_the_default_dtype_is():
    torch.set_default_dtype(torch.float64)
    try:
        assert [t.dtype for t in train(optim.Adam, "cpu", True)] == [t.dtype for t in train(optim.Adam, "cpu", False)]
        leaf = torch.ones(2, requires_grad=True)
        optimizer = optim.Adam([leaf])
        allocate_state(optimizer)
        assert optimizer.state[leaf]["step"].dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
