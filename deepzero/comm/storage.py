"""Which memory a tensor lies in, as a number: the same for all views of it, another for any other memory in use."""

from __future__ import annotations

import torch


def storage_ptr_of(tensor: torch.Tensor) -> int:
    """Where the tensor's memory begins; of what has none (the meta device), the number of torch's handle for it."""
    storage = tensor.untyped_storage()
    return int(storage.data_ptr() or storage._cdata)


def data_ptr_of(tensor: torch.Tensor) -> int:
    """Where its first element lies: ``data_ptr()``, and on the meta device a number that bytes can be added to as well.

    What has no elements lies nowhere, at 0.
    """
    if not tensor.is_meta:
        return int(tensor.data_ptr())
    if not tensor.numel():
        return 0
    return (int(tensor.untyped_storage()._cdata) << 64) + int(tensor.storage_offset()) * tensor.itemsize


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory under a storage of its own, so that views of the alias are told from views of the tensor.

    On the meta device, where there is no memory, a tensor of the same kind.
    """
    return torch.empty_like(tensor) if tensor.is_meta else torch.from_dlpack(tensor)
