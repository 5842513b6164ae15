"""Writing text with a language model, token by token. For a look at a sample, not for serving: nothing is cached."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepzero.config.run import ModelConfig


class TextGenerator(nn.Module):
    """A language model that can write; ``model(ids, last_only=True)`` gives the last position's logits [B, 1, V]."""

    config: ModelConfig

    @torch.no_grad()
    def generate(
        self, ids: Tensor, max_new_tokens: int, temperature: float = 1.0, generator: torch.Generator | None = None
    ) -> Tensor:
        """Append ``max_new_tokens`` sampled tokens, one at a time. Dropout is off meanwhile.

        Args:
            ids: int64 [B, T], the prompt; when it is longer than ``block_size``, its end is what the model sees.
            max_new_tokens: how many to append.
            temperature: logits are divided by it; 0 takes the likeliest token.
            generator: source of randomness, on any device; None: torch's global one.

        Returns:
            int64 [B, T + max_new_tokens].

        Raises:
            ValueError: a negative temperature or count.
            FloatingPointError: the model's logits are not finite, so there is nothing to choose from.
        """
        if temperature < 0 or max_new_tokens < 0:
            raise ValueError(f"temperature={temperature} and max_new_tokens={max_new_tokens} must not be negative")
        was_training = self.training
        self.eval()
        try:
            for _ in range(max_new_tokens):
                # Through __call__, not forward: whoever has put hooks on this module sees these passes too.
                logits = self(ids[:, -self.config.block_size :], last_only=True)[:, -1].float()
                if not bool(torch.isfinite(logits).all()):
                    raise FloatingPointError("the model's logits are not finite, and no token can be chosen from them")
                if temperature == 0:
                    chosen = logits.argmax(dim=-1, keepdim=True)
                else:
                    chances = F.softmax(logits / temperature, dim=-1)
                    there = chances if generator is None else chances.to(generator.device)
                    chosen = torch.multinomial(there, 1, generator=generator).to(logits.device)
                ids = torch.cat((ids, chosen), dim=1)
        finally:
            self.train(was_training)
        return ids
