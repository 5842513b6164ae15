"""Which memory a tensor has, and its bytes."""

import torch


def storage_ptr_of(tensor: torch.Tensor) -> int:
    """Where the tensor's memory begins; of what has none the number of torch's handle for it.

    The meta device's has none, and what ``torch.cond``, scans and their like trace a function with.
    """
    storage = tensor.untyped_storage()
    try:
        return int(storage.data_ptr() or storage._cdata)
    except RuntimeError:  # a fake or functional tensor's, which refuses the question
        return int(storage._cdata)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as 1-D uint8, of a contiguous tensor."""
    # A view as bytes wants a stride of 1, and where there is but one element any stride counts as contiguous.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
