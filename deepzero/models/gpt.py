"""A decoder-only transformer, in GPT-2's style or in Llama's, from one :class:`~deepzero.config.run.ModelConfig`.

``V`` vocabulary · ``T`` tokens per sequence · ``B`` sequences · ``C`` width (``n_embd``) · ``H`` heads, ``G`` key/value
heads of width ``D = C/H`` · ``F`` feed-forward width · ``L`` blocks::

    ids [B,T] ── wte (+ wpe) ─► x [B,T,C] ─► L × { x += attn(norm(x));  x += mlp(norm(x)) } ─► norm ─► head ─► [B,T,V]

=============  =========================================  ===============================================
               GPT-2                                      Llama
=============  =========================================  ===============================================
position       learned table, added once                  rope: q and k turned by an angle per position
norm           layernorm (mean and variance)              rmsnorm (root of the mean square)
mlp            gelu(x W_up) W_down, F = 4C                silu(x W_gate) * (x W_up) W_down, F = 8/3 C
biases, head   yes, tied to wte                           no, its own matrix
=============  =========================================  ===============================================

Parameters (no bias, tied): ``V C + T C + L (C (H + 2G) D + C² + 2 C F + 2 norms) + norm``, with ``3 C F`` for swiglu,
without ``T C`` for rope. See ``configs/model/`` for shapes.

**It knows nothing of ZeRO**, but it is written so that ZeRO can own it. Every leaf gives its parameters their first
values inside its own constructor, so that it can be partitioned the moment it exists. Nothing is a buffer: the rope
table is computed in each forward pass, in fp32, hence ``model.bfloat16()`` cannot round it.

**Precision.** Parameters and activations have the engine's dtype. Not in 16 bits are the norms' statistics (torch
computes them in fp32 inside the kernel), the rope rotation, the softmax of attention (inside
``scaled_dot_product_attention``) and the cross-entropy (:mod:`deepzero.models.cross_entropy`).

Left out: key/value caching in ``generate``, padding, and attention masks besides the causal one (sequences are cut from
one stream, so none is short).

Sources: [GPT-2], [Llama], [rope], [swiglu], [grouped-query attention], [checkpointing]; [PaLM], appendix B, for the
count of FLOPs with which published MFUs are computed.
"""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepzero.config.run import ModelConfig
from deepzero.models.cross_entropy import cross_entropy
from deepzero.models.generate import TextGenerator

INIT_STD = 0.02
"""GPT-2's standard deviation of weights; the two projections into the residual stream get it divided by √(2L)."""

NORM_EPS = 1e-5
ROPE_BASE = 10_000.0
"""Positions turn with wavelengths from 2π up to 2π times this, over the pairs of a head."""


def ffn_width(config: ModelConfig) -> int:
    """Width ``F`` of the feed-forward layer.

    Example:
        >>> ffn_width(ModelConfig(n_embd=128)), ffn_width(ModelConfig(n_embd=128, activation="swiglu"))
        (512, 384)
    """
    if config.ffn_hidden is not None:
        return config.ffn_hidden
    if config.activation == "gelu":
        return 4 * config.n_embd
    # Three matrices instead of two: 8/3 C keeps the parameters of 4C. Rounded up to what matrix units like.
    return 64 * math.ceil(8 * config.n_embd / 3 / 64)


class Linear(nn.Linear):
    """``nn.Linear`` that draws its weight from N(0, std²) and zeroes its bias, while it is constructed."""

    def __init__(self, in_features: int, out_features: int, bias: bool, std: float = INIT_STD) -> None:
        self.std = std  # nn.Linear's constructor calls reset_parameters, which reads it
        super().__init__(in_features, out_features, bias=bias)

    def reset_parameters(self) -> None:
        """Draw the weight anew and zero the bias."""
        nn.init.normal_(self.weight, mean=0.0, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """``nn.Embedding`` with GPT-2's initial values."""

    def reset_parameters(self) -> None:
        """Draw the table anew."""
        nn.init.normal_(self.weight, mean=0.0, std=INIT_STD)


class TiedHead(nn.Module):
    """The output head that *is* the token embedding: the same Parameter object, seen by two modules.

    Its gradient is complete only when both uses have been differentiated, which is at the very end of the backward
    pass: the embedding is the first module of the forward one.
    """

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight  # [V, C]

    def forward(self, x: Tensor) -> Tensor:
        """[..., C] to logits [..., V]."""
        return F.linear(x, self.weight)


def make_norm(config: ModelConfig) -> nn.Module:
    """Layer norm or RMS norm over the last dimension. Both kernels widen 16-bit input to fp32 for the statistics."""
    if config.norm == "layernorm":
        return nn.LayerNorm(config.n_embd, eps=NORM_EPS, bias=config.bias)
    return nn.RMSNorm(config.n_embd, eps=NORM_EPS)


def rope_table(tokens: int, head_width: int, device: torch.device) -> Tensor:
    """Cosines, then sines, of rope's angles ``t · base^(-2i/D)``: fp32 [2, T, 1, D/2]; the 1 broadcasts over heads."""
    pairs = torch.arange(0, head_width, 2, dtype=torch.float32, device=device)
    frequencies = ROPE_BASE ** (-pairs / head_width)
    angles = torch.arange(tokens, dtype=torch.float32, device=device).unsqueeze(1) * frequencies
    return torch.stack((angles.cos(), angles.sin())).unsqueeze(2)


def apply_rope(x: Tensor, table: Tensor) -> Tensor:
    """Turn each pair ``(x_i, x_{i+D/2})`` of every head of ``x`` [B, T, heads, D] by its position's angle, in fp32."""
    cos, sin = table[0], table[1]
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention; with ``G < H``, groups of ``H/G`` query heads share a key/value head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.n_kv_head = config.n_kv_head or config.n_head
        self.head_width = config.n_embd // config.n_head
        self.dropout = config.dropout
        heads = self.n_head + 2 * self.n_kv_head
        # One matrix for queries, keys and values: one large product instead of three, and x is read once.
        self.qkv = Linear(config.n_embd, heads * self.head_width, bias=config.bias)
        self.proj = Linear(config.n_embd, config.n_embd, bias=config.bias, std=INIT_STD / math.sqrt(2 * config.n_layer))

    def forward(self, x: Tensor, rope: Tensor | None) -> Tensor:
        """[B, T, C] to [B, T, C]; ``rope`` is :func:`rope_table` or None."""
        batch, tokens, width = x.shape
        heads = self.qkv(x).view(batch, tokens, -1, self.head_width)
        if rope is None:
            q, k, v = heads.split((self.n_head, self.n_kv_head, self.n_kv_head), dim=2)
        else:
            turning, v = heads.split((self.n_head + self.n_kv_head, self.n_kv_head), dim=2)
            q, k = apply_rope(turning, rope).split((self.n_head, self.n_kv_head), dim=2)
        # [B, T, heads, D] -> [B, heads, T, D]: strides only. The kernel applies the causal mask by index, and its
        # result lies in memory as [B, T, H, D], so that the reshape copies nothing either.
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
            enable_gqa=self.n_kv_head != self.n_head,
        )
        return cast(Tensor, self.proj(mixed.transpose(1, 2).reshape(batch, tokens, width)))


class MLP(nn.Module):
    """The feed-forward layer. swiglu's gate and up matrices are one, cut after the product.

    gelu is the exact one (with erf), as in nanoGPT: GPT-2's tanh approximation differs by less than 5e-4, and its
    backward pass is 2.4 times slower on a CPU.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden = ffn_width(config)
        self.gated = config.activation == "swiglu"
        self.up = Linear(config.n_embd, 2 * hidden if self.gated else hidden, bias=config.bias)
        self.down = Linear(hidden, config.n_embd, bias=config.bias, std=INIT_STD / math.sqrt(2 * config.n_layer))

    def forward(self, x: Tensor) -> Tensor:
        """[..., C] to [..., C], each position by itself."""
        x = self.up(x)
        if self.gated:
            gate, up = x.chunk(2, dim=-1)
            return cast(Tensor, self.down(F.silu(gate) * up))
        return cast(Tensor, self.down(F.gelu(x)))


class Block(nn.Module):
    """One layer: ``x += attn(norm(x)); x += mlp(norm(x))``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm_1 = make_norm(config)
        self.attn = Attention(config)
        self.norm_2 = make_norm(config)
        self.mlp = MLP(config)
        self.dropout = config.dropout

    def forward(self, x: Tensor, rope: Tensor | None) -> Tensor:
        """[B, T, C] to [B, T, C]; ``rope`` as for :class:`Attention`."""
        x = x + self._drop(self.attn(self.norm_1(x), rope))
        return x + self._drop(self.mlp(self.norm_2(x)))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class GPT(TextGenerator):
    """The model. ``torch.manual_seed(s)`` before the constructor fixes every initial value.

    Example:
        >>> model = GPT(ModelConfig(n_layer=1, n_embd=8, n_head=2, block_size=4))
        >>> ids = torch.tensor([[1, 2, 3, 4]])
        >>> model(ids).shape, model(ids, labels=ids).shape
        (torch.Size([1, 4, 256]), torch.Size([]))
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = Embedding(config.vocab_size, config.n_embd)
        self.wpe = Embedding(config.block_size, config.n_embd) if config.position == "learned" else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = make_norm(config)
        head = TiedHead(self.wte) if config.tied else Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head: nn.Module = head

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, *, last_only: bool = False) -> Tensor:
        """Logits, or the loss.

        Args:
            input_ids: int64 [B, T], T at most ``block_size``.
            labels: int64 [B, T], the token that *follows* each input. **They are not shifted here**, other than in
                Hugging Face's models: ``labels[:, t]`` is compared with the prediction at ``t``.
            last_only: logits of the last position alone, [B, 1, V]: what generating needs.

        Returns:
            Logits [B, T, V] in the parameters' dtype, or with ``labels`` their mean cross-entropy, a scalar in fp32.

        Raises:
            ValueError: a sequence longer than the model's block, or shapes that differ.
        """
        if input_ids.dim() != 2 or input_ids.shape[1] == 0:
            raise ValueError(f"input_ids must be [batch, tokens] with at least one token, got {tuple(input_ids.shape)}")
        config, tokens, rope = self.config, input_ids.shape[1], None
        if tokens > config.block_size:
            raise ValueError(f"a sequence of {tokens} tokens is longer than model.block_size={config.block_size}")
        if labels is not None and (last_only or labels.shape != input_ids.shape):
            raise ValueError(
                f"labels {tuple(labels.shape)} must have the shape of input_ids {tuple(input_ids.shape)}, "
                f"and last_only={last_only} goes without labels"
            )
        x = self.wte(input_ids)
        if self.wpe is not None:
            x = x + self.wpe(torch.arange(tokens, device=input_ids.device))
        else:
            rope = rope_table(tokens, config.n_embd // config.n_head, input_ids.device)
        if config.dropout:
            x = F.dropout(x, config.dropout, self.training)
        again = config.activation_checkpointing and self.training and torch.is_grad_enabled()
        # With checkpointing only x survives the forward pass; the backward pass runs the block again. The state of the
        # random generator is worth saving only where something random happens inside.
        keep_rng = config.dropout > 0
        for block in self.blocks:
            if again:
                x = checkpoint(block, x, rope, use_reentrant=False, preserve_rng_state=keep_rng)
            else:
                x = block(x, rope)
        logits = cast(Tensor, self.lm_head(self.norm(x[:, -1:] if last_only else x)))
        if labels is None:
            return logits
        return cross_entropy(logits.flatten(0, 1), labels.flatten())

    def num_parameters(self) -> int:
        """Elements of all parameters, a tied weight counted once."""
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self) -> float:
        """Floating-point operations of forward and backward for one token: ``6 N + 12 L C T``.

        ``N`` counts the weights that take part in a matrix product: those of the blocks and of the head, not the lookup
        tables (a tied head counts, as head), biases or norms; each costs two operations in the forward pass, four in
        the backward pass. Attention adds two products of T by C per layer and token, the same three times, the masked
        half included (PaLM's convention). Recomputation by activation checkpointing does not count: that is what makes
        MFUs comparable.
        """
        c = self.config
        width, kv_width = c.n_embd, (c.n_kv_head or c.n_head) * (c.n_embd // c.n_head)
        attention = width * (width + 2 * kv_width) + width * width
        mlp = (3 if c.activation == "swiglu" else 2) * width * ffn_width(c)
        multiplied = c.n_layer * (attention + mlp) + c.vocab_size * width
        return 6.0 * multiplied + 12.0 * c.n_layer * width * c.block_size
