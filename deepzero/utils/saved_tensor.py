"""The version check of autograd, for what goes through hooks on saved tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def check_version(version: int, tensor: torch.Tensor, shape: Sequence[int] | None = None) -> None:
    """Raise a RuntimeError in torch's words when ``tensor`` has another version; ``shape`` it had when it was saved.

    Torch compares versions of what it keeps itself, and cannot of what hooks have packed: a tensor that was changed in
    place since, or a weight by a step, would give wrong gradients without a word.
    """
    if tensor._version != version:
        of = "" if tensor.is_nested else f" of shape {tuple(tensor.shape if shape is None else shape)}"
        raise RuntimeError(
            f"one of the variables needed for gradient computation has been modified by an inplace operation: a "
            f"{tensor.dtype} tensor{of} is at version {tensor._version}, and version {version} was saved"
        )
