"""The work that every contender does: one GPT, one stream of tokens, one set of optimizer numbers.

All contenders build the model from the same seed in fp32, read the same tokens in the same order, and train with AdamW
on fp32 masters with fp32 moments under bf16 computation, the global gradient norm clipped. What a contender may choose
freely is *how* it does that.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn


@dataclass(frozen=True)
class Workload:
    """Sizes and numbers of one benchmark run; travels to every rank as JSON."""

    n_layer: int = 12
    n_embd: int = 768
    n_head: int = 12
    vocab_size: int = 8192
    block_size: int = 256  # tokens per sequence
    micro_batch: int = 1  # sequences per rank and step; there is no accumulation
    ranks: int = 2
    threads: int = 1  # intra-op threads of each rank, on CPU
    device: str = "cpu"  # `cpu` (gloo) or `cuda` (NCCL, one GPU per rank)
    lr: float = 1e-4  # low and constant, so that the losses of the contenders stay comparable without a warm-up
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0  # largest global gradient norm
    seed: int = 1234
    checkpointing: bool = False  # activation checkpointing: blocks are computed again in the backward pass

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step over all ranks."""
        return self.ranks * self.micro_batch * self.block_size

    @property
    def adamw(self) -> dict[str, Any]:
        """Keyword arguments of ``torch.optim.AdamW``."""
        betas = (self.beta1, self.beta2)
        return {"lr": self.lr, "betas": betas, "eps": self.eps, "weight_decay": self.weight_decay}

    @property
    def parameters(self) -> int:
        """Elements of the GPT: two tables of the vocabulary, positions, blocks, norms and biases; 97,835,520 here."""
        width = self.n_embd
        block = 12 * width * width + 13 * width
        return 2 * self.vocab_size * width + self.block_size * width + self.n_layer * block + 2 * width


TINY = Workload(n_layer=2, n_embd=64, n_head=2, vocab_size=256, block_size=32)
"""``--quick``: the same path through the code in seconds; its times mean nothing."""


def build_model(work: Workload) -> nn.Module:
    """The GPT in fp32 on torch's default device: ``forward(input_ids, labels) -> mean cross-entropy``; untied head.

    Every contender and every rank gets the same initial values. They depend on the device.
    """
    from deepzero.config.run import ModelConfig
    from deepzero.models.gpt import GPT

    torch.manual_seed(work.seed)
    sizes = {name: getattr(work, name) for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd")}
    return GPT(ModelConfig(name="bench", tied=False, activation_checkpointing=work.checkpointing, **sizes))


def make_tokens(vocab_size: int, count: int) -> np.ndarray:
    """``count`` tokens of the Python standard library's source, as int64 in ``[0, vocab_size)``.

    Two bytes make one token. The ``vocab_size - 1`` most frequent pairs get the numbers from 1, frequent ones first;
    every other pair is token 0. So the text is real and uses the whole vocabulary.
    """
    folder, text = Path(sysconfig.get_paths()["stdlib"]), bytearray()
    # Modules of the top folder, in name order: some 6 MB, enough for thousands of steps, read in milliseconds.
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= 2 * count:
            break
    if not text:
        raise FileNotFoundError(f"no Python source in {folder}; the benchmark reads its text there")
    data = np.resize(np.frombuffer(bytes(text), dtype=np.uint8), 2 * count)  # a text too short is repeated
    pairs = data[0::2].astype(np.int64) * 256 + data[1::2]
    common = np.argsort(-np.bincount(pairs, minlength=65536), kind="stable")[: vocab_size - 1]
    numbers = np.zeros(65536, dtype=np.int64)
    numbers[common] = np.arange(1, len(common) + 1)
    return numbers[pairs]


def tokens_for(work: Workload, steps: int) -> np.ndarray:
    """The tokens that ``steps`` optimizer steps read, the last target included."""
    return make_tokens(work.vocab_size, steps * work.tokens_per_step + 1)


def batch(work: Workload, tokens: np.ndarray, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of one rank in one step, both int64 ``[micro_batch, block_size]``, on the CPU."""
    size = work.micro_batch * work.block_size
    start = step * work.tokens_per_step + rank * size
    window = torch.from_numpy(np.ascontiguousarray(tokens[start : start + size + 1]))
    shape = (work.micro_batch, work.block_size)
    return window[:-1].view(shape), window[1:].view(shape)
