"""Ways to use a weight, and models of blocks that do. For the tests that compare stage 3 with stage 2."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

WIDTH = 12
"""Of what goes through a model: ``x`` is [rows, WIDTH]."""


class Use(nn.Module):
    """``forward(x)`` is ``run(self, x)``, which makes as many rows of WIDTH with ``weight``, ``other`` and ``bias``."""

    def __init__(
        self, run: Callable[[Any, Any], Any], shape: tuple[int, ...] = (WIDTH, WIDTH), other: tuple[int, ...] = ()
    ) -> None:
        super().__init__()
        self.run = run
        self.weight = nn.Parameter(torch.randn(shape) * 0.2)
        if other:
            self.other = nn.Parameter(torch.randn(other) * 0.2)
        self.bias = nn.Parameter(torch.randn(WIDTH) * 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, x)


class Inner(nn.Module):
    """``forward(x)`` is ``run(inner, x)``."""

    def __init__(self, make: Callable[[], nn.Module], run: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.inner, self.run = make(), run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self.inner, x)


class Keeps(torch.autograd.Function):
    """Keeps one weight where autograd sees it, and the other where it does not, with a view of the first."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, x @ weight)
        ctx.other, ctx.view = other, weight.t()
        return (x @ weight) @ other

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, weight, hidden = ctx.saved_tensors
        inner = grad @ ctx.other.t()
        return (inner @ weight.t() + inner @ ctx.view) / 2, x.t() @ inner, hidden.t() @ grad


def attention(m, x):
    """Over rows that are parameters."""
    keys, values = m.weight[None, None], m.other[None, None]
    return F.scaled_dot_product_attention(x[None, None], keys, values)[0, 0] + m.bias


def bmm(m, x):
    return x + torch.bmm(x[:4].reshape(2, 2, WIDTH), m.weight.expand(2, WIDTH, WIDTH)).sum((0, 1)) + m.bias


class Local(Use):
    """A view made before other modules run, and used after them."""

    def __init__(self) -> None:
        super().__init__(Local.around)
        self.between = nn.Sequential(nn.Linear(WIDTH, 31), nn.GELU(), nn.Linear(31, WIDTH))

    def around(self, x):
        kept, itself = self.weight.t(), self.weight
        return x + self.between(torch.tanh(x)) @ kept + self.between(x @ itself) + self.bias


class Neighbour(nn.Module):
    """A weight of a module that does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.addmm(self.idle.bias, torch.tanh(x), self.idle.weight)


class Lora(nn.Module):
    """As PEFT has it; whether the whole weight is frozen is up to who freezes."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Parameter(torch.randn(2, WIDTH) * 0.2)

    def forward(self, x):
        return self.base(x) + self.down(x) @ self.up


USES: dict[str, Callable[[], nn.Module]] = {
    "addmm": partial(Use, lambda m, x: torch.addmm(m.bias, x, m.weight)),
    "matmul": partial(Use, lambda m, x: torch.matmul(x, m.weight) + m.bias),
    "at": partial(Use, lambda m, x: torch.tanh(x @ m.weight) @ m.other + m.bias, other=(WIDTH, WIDTH)),
    "linear": partial(Use, lambda m, x: F.linear(x, m.weight, m.bias)),
    "einsum": partial(Use, lambda m, x: torch.einsum("nc,cd->nd", x, m.weight) + m.bias),
    "conv": partial(Use, lambda m, x: F.conv1d(x.t()[None], m.weight, m.bias, padding=1)[0].t(), (WIDTH, WIDTH, 3)),
    "embedding": partial(Use, lambda m, x: x * F.embedding(torch.arange(len(x)) % 5, m.weight) + m.bias, (5, WIDTH)),
    "layer_norm": partial(Use, lambda m, x: F.layer_norm(x, (WIDTH,), m.weight, m.bias), (WIDTH,)),
    "attention": partial(Use, attention, (7, WIDTH), (7, WIDTH)),
    "custom": partial(Use, lambda m, x: Keeps.apply(x, m.weight, m.other) + m.bias, other=(WIDTH, WIDTH)),
    "bmm": partial(Use, bmm),
    "twice": partial(Use, lambda m, x: torch.tanh(x @ m.weight) @ m.weight.t() + m.bias),
    "elementwise": partial(Use, lambda m, x: x * m.weight.exp() + m.bias, (WIDTH,)),
    # Parts of a weight, by an index and by a narrow view.
    "sliced": partial(
        Use, lambda m, x: x @ m.weight[:WIDTH] + x @ m.weight.narrow(0, WIDTH, WIDTH) + m.bias, (2 * WIDTH, WIDTH)
    ),
    # torch's parametrization: the weight is made anew in each forward pass.
    "weight_norm": partial(Inner, lambda: weight_norm(nn.Linear(WIDTH, WIDTH)), lambda inner, x: inner(x)),
    "lstm": partial(Inner, lambda: nn.LSTM(WIDTH, WIDTH), lambda inner, x: inner(x[:, None])[0][:, 0]),
    "encoder": partial(
        Inner,
        lambda: nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0),
        lambda inner, x: inner(x[:, None])[:, 0],
    ),
    # Views without a graph, ``detach()`` and ``.data``, beside the weight itself.
    "detached": partial(Use, lambda m, x: x @ (m.weight - m.weight.detach() / 2) + x @ m.weight.data / 4 + m.bias),
    "local": Local,
    "neighbour": Neighbour,
    "lora": Lora,
}

CHECKPOINTINGS = ("none", "reentrant", "non_reentrant", "selective")


def policy_of(save: str) -> Callable[..., CheckpointPolicy]:
    """What selective checkpointing keeps: the results of matrix products, or of everything but these."""
    products = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}

    def policy(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        kept = (operation in products) == (save == "products")
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def checkpointed(how: str, run: Callable[..., torch.Tensor], *given: torch.Tensor) -> torch.Tensor:
    """``run(*given)``, kept or run again in the backward pass; ``how`` may have ``+`` what else is around it."""
    how, _, around = how.partition("+") if torch.is_grad_enabled() else ("none", "", "")
    if around == "save_on_cpu":
        with save_on_cpu():
            return checkpointed(how, run, *given)
    if how == "none":
        return run(*given)
    if how == "nested":
        return checkpointed("non_reentrant", lambda *x: checkpointed("non_reentrant", run, *x), *given)
    if how == "selective":
        policy = policy_of(around or "products")
        return checkpoint(
            run, *given, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
        )
    return checkpoint(run, *given, use_reentrant=how == "reentrant")
