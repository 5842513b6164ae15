"""Writing text with a language model, token by token. For a look at a sample, not for serving: nothing is cached."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@torch.no_grad()
def generate(
    model: nn.Module,
    block_size: int,
    ids: Tensor,
    max_new_tokens: int,
    temperature: float,
    generator: torch.Generator | None,
) -> Tensor:
    """Append ``max_new_tokens`` sampled tokens to ``ids``. Dropout is off meanwhile.

    Args:
        model: ``model(ids, last_only=True)`` gives the last position's logits [B, 1, V].
        block_size: how many tokens the model sees.
        ids: int64 [B, T].
        max_new_tokens: how many to append.
        temperature: logits are divided by it; 0 takes the likeliest token.
        generator: source of randomness, on any device; None: torch's global one.

    Raises:
        ValueError: a negative temperature or count.
        FloatingPointError: the model's logits are not finite, so there is nothing to choose from.
    """
    if temperature < 0 or max_new_tokens < 0:
        raise ValueError(f"temperature={temperature} and max_new_tokens={max_new_tokens} must not be negative")
    was_training = model.training
    model.eval()
    try:
        for _ in range(max_new_tokens):
            # Through __call__, not forward: whoever has put hooks on this module sees these passes too.
            logits = model(ids[:, -block_size:], last_only=True)[:, -1].float()
            if not bool(torch.isfinite(logits).all()):
                raise FloatingPointError("the model's logits are not finite, and no token can be chosen from them")
            ids = torch.cat((ids, _sample(logits, temperature, generator)), dim=1)
    finally:
        model.train(was_training)
    return ids


def _sample(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    """One token per row of ``logits`` [B, V], as [B, 1]."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    chances = F.softmax(logits / temperature, dim=-1)
    if generator is None:
        return torch.multinomial(chances, 1)
    return torch.multinomial(chances.to(generator.device), 1, generator=generator).to(logits.device)
