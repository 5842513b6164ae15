"""Which memory a tensor has."""

import torch


def storage_ptr_of(tensor: torch.Tensor) -> int:
    """Where the tensor's memory begins; of what has none (the meta device), the number of torch's handle for it."""
    storage = tensor.untyped_storage()
    return int(storage.data_ptr() or storage._cdata)
