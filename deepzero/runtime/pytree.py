"""What a model may return: tensors in tuples, lists, dicts, dataclasses, Hugging Face outputs, nested as they like."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch


def output_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor inside ``value``, in order."""
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from output_tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from output_tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from output_tensors(getattr(value, field.name))


def scalar_loss(value: Any) -> torch.Tensor | None:
    """The loss in a model's output, if there is one: the output itself, its ``loss`` entry, or its first tensor.

    Only for the log: a scalar that requires grad. Gradients never depend on this guess.
    """
    candidate: Any = value
    if isinstance(value, Mapping):
        candidate = value.get("loss")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        candidate = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}.get("loss")
    elif isinstance(value, (list, tuple)):
        candidate = value[0] if value else None
    if torch.is_tensor(candidate) and candidate.numel() == 1 and candidate.requires_grad:
        return candidate
    return None
