"""What ranks must agree on, and how they find out: before the first step, and in every step.

Ranks that disagree hang each other or, worse, train. Before the first step each rank tells the others what it was
configured with and which parameters it has; a difference is raised on *every* rank, with what differs and on which
rank.

In each step they exchange one small message (:class:`StepAgreement`): the exact sum of squares of the gradients, from
which all compute the same norm, and the losses, from which all compute the same mean. It travels as integers in a
single all-reduce, which is exact and has no order.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deepzero.comm import process_group
from deepzero.comm.collectives import Communicator
from deepzero.config.parse import ConfigError
from deepzero.runtime.grad_norm import WORDS, norm_from_words

AGREEMENT = "agreement.all_reduce"


class RankMismatchError(RuntimeError):
    """Ranks were started with different settings or different models."""


def describe_parameters(model: nn.Module) -> list[str]:
    """One line per parameter: name, shape, dtype, whether it is trained."""
    return [f"{name} {tuple(p.shape)} {p.dtype} trained={p.requires_grad}" for name, p in model.named_parameters()]


def check_ranks_agree(config: Any, parameters: Sequence[str]) -> None:
    """Raise on every rank when configuration or parameters differ between ranks.

    Args:
        config: a dataclass of settings.
        parameters: from :func:`describe_parameters`.

    Raises:
        RankMismatchError: names the first difference and both ranks.
    """
    mine = {**_flatten(dataclasses.asdict(config)), "number of parameters": len(parameters)}
    mine.update({f"parameter {i}": text for i, text in enumerate(parameters)})
    everyone = process_group.all_gather_object(mine)
    for rank, theirs in enumerate(everyone[1:], start=1):
        for key in [*everyone[0], *(k for k in theirs if k not in everyone[0])]:
            ours, other = everyone[0].get(key, "absent"), theirs.get(key, "absent")
            if ours != other:
                raise RankMismatchError(
                    f"ranks 0 and {rank} differ in {key}: {ours!r} on rank 0, {other!r} on rank {rank}. "
                    "Start all ranks with the same configuration and the same model"
                )


def _flatten(mapping: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        if isinstance(value, dict):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = repr(value)
    return flat


def double_to_bits(value: float) -> int:
    """The 64 bits of a double, as a signed integer."""
    return struct.unpack("<q", struct.pack("<d", value))[0]


def bits_to_double(bits: int) -> float:
    """The inverse of :func:`double_to_bits`."""
    return struct.unpack("<d", struct.pack("<q", bits))[0]


@dataclass(frozen=True)
class StepAgreement:
    """What all ranks know alike about a step before the optimizer runs."""

    norm: float
    """2-norm of the summed gradients: times ranks, micro-batches and loss scale. ``inf``: not finite."""
    loss: float
    """Mean over ranks of each rank's mean over its micro-batches; NaN when no loss was seen."""

    @property
    def finite(self) -> bool:
        """Whether every gradient of every rank is finite."""
        return math.isfinite(self.norm)


def agree(comm: Communicator, square_words: torch.Tensor, loss: float) -> StepAgreement:
    """One all-reduce: norm and loss, the same bits on every rank.

    Args:
        comm: the ranks.
        square_words: from ``grad_norm.square_sum_words``, this rank's share.
        loss: this rank's mean loss.
    """
    losses = torch.zeros(comm.world_size, dtype=torch.int64)
    losses[comm.rank] = double_to_bits(loss)
    words = torch.cat([square_words, losses.to(square_words.device)])
    comm.all_reduce(AGREEMENT, words).wait()
    numbers = words.tolist()
    total = 0.0
    for bits in numbers[WORDS:]:
        total += bits_to_double(bits)
    return StepAgreement(norm_from_words(numbers[:WORDS]), total / comm.world_size)


def check_precision(dtype: str, device: torch.device) -> None:
    """Raise a :class:`ConfigError` when ``device`` cannot compute in ``dtype``."""
    if dtype == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(device)
        raise ConfigError(f"precision=bf16: {name} has no bf16 arithmetic; use precision=fp16 or precision=fp32")
