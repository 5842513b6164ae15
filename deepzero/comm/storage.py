"""Which memory a tensor lies in, as a number: the same for all views of it, another for any other memory in use."""

from __future__ import annotations

import torch


def memory_of(tensor: torch.Tensor) -> int:
    """Where the tensor's memory begins; of what has none (the meta device), the number of torch's handle for it."""
    storage = tensor.untyped_storage()
    return int(storage.data_ptr() or storage._cdata)


def place_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The memory, and how many bytes into it the tensor's first element lies."""
    return memory_of(tensor), int(tensor.storage_offset()) * tensor.itemsize
