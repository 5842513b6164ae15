"""What hooks on saved tensors keep as it is: by no cycle, and with autograd's own check of versions."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def keep(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """What a hook gives autograd for a tensor that stays where it is; :func:`kept` is the way back."""
    # An operation's own output (exp, softmax) refers to the node that will hold this pair: a cycle that no collector
    # sees. A detached one shares memory and version, and autograd gives it the node again.
    return (tensor if tensor.is_leaf else tensor.detach()), tensor._version


def kept(pair: tuple[torch.Tensor, int]) -> torch.Tensor:
    """The tensor that :func:`keep` was given, if it is as it was."""
    tensor, version = pair
    if tensor._version != version:  # asked here too: a call for each saved tensor would cost
        check_version(version, tensor)
    return tensor


def check_version(version: int, tensor: torch.Tensor, shape: Sequence[int] | None = None) -> None:
    """Raise a RuntimeError in torch's words when ``tensor`` has another version; ``shape`` it had when it was saved.

    Torch compares versions of what it keeps itself, and cannot of what hooks have packed: a tensor that was changed in
    place since would give wrong gradients without a word.
    """
    if tensor._version != version:
        of = "" if tensor.is_nested else f" of shape {tuple(tensor.shape if shape is None else shape)}"
        raise RuntimeError(
            f"one of the variables needed for gradient computation has been modified by an inplace operation: a "
            f"{tensor.dtype} tensor{of} is at version {tensor._version}, and version {version} was saved"
        )


def same_counter(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether what writes to ``one`` raises the version of ``other``, too, as of a tensor and its views."""
    with torch.autograd._unsafe_preserve_version_counter(one):
        before = other._version
        torch.autograd.graph.increment_version(one)
        return other._version != before
