"""What a model may return, nested as it likes (tuples, dicts, dataclasses, Hugging Face outputs); a loss's graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterator, Mapping
from typing import Any

import torch


def _entries(value: Any) -> Mapping[Any, Any]:
    """What is one level below ``value``, by key, field or position."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    return {}


def output_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor inside ``value``, in order."""
    if torch.is_tensor(value):
        yield value
    else:
        for item in _entries(value).values():
            yield from output_tensors(item)


def scalar_loss(value: Any) -> torch.Tensor | None:
    """The loss in a model's output, if there is one: the output itself, its ``loss`` entry, or a tuple's first.

    Only for the log: a scalar that requires grad. Gradients never depend on this guess.
    """
    entries = _entries(value)
    found = value if torch.is_tensor(value) else entries.get(0 if isinstance(value, (list, tuple)) else "loss")
    return found if torch.is_tensor(found) and found.numel() == 1 and found.requires_grad else None


def graph_has(loss: torch.Tensor, ids: Container[int]) -> bool:
    """Whether the graph of a loss ends at a parameter whose ``id`` is one of these: most do close by."""
    nodes, seen = [loss.grad_fn], set[Any]()
    while nodes:
        if (node := nodes.pop()) is not None and node not in seen:
            if id(getattr(node, "variable", None)) in ids:
                return True
            seen.add(node)
            nodes += [before for before, _ in node.next_functions]
    return False
