"""Ways to use a weight, and models of blocks that do. For the tests that compare stage 3 with stage 2."""

from __future__ import annotations

from collections.abc import Callable
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
    """``forward(x)`` returns as many rows of WIDTH, made with ``weight``, ``other`` and ``bias``."""

    weight_shape: tuple[int, ...] = (WIDTH, WIDTH)
    other_shape: tuple[int, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(self.weight_shape) * 0.2)
        if self.other_shape:
            self.other = nn.Parameter(torch.randn(self.other_shape) * 0.2)
        self.bias = nn.Parameter(torch.randn(WIDTH) * 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Addmm(Use):
    def forward(self, x):
        return torch.addmm(self.bias, x, self.weight)


class Matmul(Use):
    def forward(self, x):
        return torch.matmul(x, self.weight) + self.bias


class At(Use):
    other_shape = (WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(x @ self.weight) @ self.other + self.bias


class Linear(Use):
    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


class Einsum(Use):
    def forward(self, x):
        return torch.einsum("nc,cd->nd", x, self.weight) + self.bias


class Conv(Use):
    weight_shape = (WIDTH, WIDTH, 3)

    def forward(self, x):
        return F.conv1d(x.t()[None], self.weight, self.bias, padding=1)[0].t()


class Embedding(Use):
    weight_shape = (5, WIDTH)

    def forward(self, x):
        rows = torch.arange(len(x)) % self.weight_shape[0]
        return x * F.embedding(rows, self.weight) + self.bias


class LayerNorm(Use):
    weight_shape = (WIDTH,)

    def forward(self, x):
        return F.layer_norm(x, (WIDTH,), self.weight, self.bias)


class Attention(Use):
    """Over rows that are parameters."""

    weight_shape = (7, WIDTH)
    other_shape = (7, WIDTH)

    def forward(self, x):
        keys, values = self.weight[None, None], self.other[None, None]
        return F.scaled_dot_product_attention(x[None, None], keys, values)[0, 0] + self.bias


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


class Custom(Use):
    other_shape = (WIDTH, WIDTH)

    def forward(self, x):
        return Keeps.apply(x, self.weight, self.other) + self.bias


OPERATIONS: dict[str, type[Use]] = {
    "addmm": Addmm,
    "matmul": Matmul,
    "at": At,
    "linear": Linear,
    "einsum": Einsum,
    "conv": Conv,
    "embedding": Embedding,
    "layer_norm": LayerNorm,
    "attention": Attention,
    "custom": Custom,
}


class Bmm(Use):
    def forward(self, x):
        pairs = x[:4].reshape(2, 2, WIDTH)
        return x + torch.bmm(pairs, self.weight.expand(2, WIDTH, WIDTH)).sum((0, 1)) + self.bias


class TwiceTransposed(Use):
    def forward(self, x):
        return torch.tanh(x @ self.weight) @ self.weight.t() + self.bias


class Elementwise(Use):
    weight_shape = (WIDTH,)

    def forward(self, x):
        return x * self.weight.exp() + self.bias


class Sliced(Use):
    """A part of a weight, by an index and by a narrow view."""

    weight_shape = (2 * WIDTH, WIDTH)

    def forward(self, x):
        return x @ self.weight[:WIDTH] + x @ self.weight.narrow(0, WIDTH, WIDTH) + self.bias


class Normed(nn.Module):
    """torch's parametrization: the weight is made anew in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return self.inner(x)


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(WIDTH, WIDTH)

    def forward(self, x):
        return self.inner(x[:, None])[0][:, 0]


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0)

    def forward(self, x):
        return self.inner(x[:, None])[:, 0]


class Detached(Use):
    """Views without a graph, ``detach()`` and ``.data``, beside the weight itself."""

    def forward(self, x):
        return x @ (self.weight - self.weight.detach() / 2) + x @ self.weight.data / 4 + self.bias


class Local(Use):
    """A view made before other modules run, and used after them."""

    def __init__(self) -> None:
        super().__init__()
        self.between = nn.Sequential(nn.Linear(WIDTH, 31), nn.GELU(), nn.Linear(31, WIDTH))

    def forward(self, x):
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
    **OPERATIONS,
    "bmm": Bmm,
    "twice": TwiceTransposed,
    "elementwise": Elementwise,
    "sliced": Sliced,
    "weight_norm": Normed,
    "lstm": Lstm,
    "encoder": Encoder,
    "detached": Detached,
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
