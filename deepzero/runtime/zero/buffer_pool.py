"""Buffers for gathered intervals, kept and reused.

[Note: buffers and who still holds them]
    Buffers are kept and reused (:class:`BufferPool`): fresh memory costs several times the copy into it. But somebody
    may still hold a view of a parameter when its interval is released: ``w = self.weight.t()`` kept across modules, a
    module that returns its parameter, a weight that a checkpointed block saved while it was run again. So a buffer is
    reused only when nobody else refers to its storage; until then the view stays valid. On a GPU the caching allocator
    is such a pool already, ordered by streams.
"""

from __future__ import annotations

from typing import Any

import torch

from deepzero.comm.pretended import stands_for
from deepzero.comm.storage import memory_of


class BufferPool:
    """Kept one-dimensional buffers of one dtype and device. See [Note: buffers and who still holds them]."""

    def __init__(self, dtype: torch.dtype, device: torch.device, limit_numel: int) -> None:
        self.dtype, self.device, self.limit_numel = dtype, device, limit_numel
        self._free: list[torch.Tensor] = []
        self._taken: dict[int, torch.Tensor] = {}
        self.owners: dict[int, tuple[Any, int]] = {}
        """Whose values, of which generation, a buffer holds, by where it begins: also after the release, as long as it
        is not filled anew. So it does not depend on timing whether autograd is known to save a weight, or an old view
        of it."""
        self._alone = references(torch.empty(1, dtype=dtype, device=device))

    def take(self, numel: int) -> torch.Tensor:
        """A buffer of ``numel`` elements or more; its contents are whatever was there."""
        usable = [b for b in self._free if b.numel() >= numel and references(b) <= self._alone]
        if usable:
            buffer = min(usable, key=torch.Tensor.numel)
            self._free = [b for b in self._free if b is not buffer]
        else:
            self._trim(numel)
            buffer = torch.empty(numel, dtype=self.dtype, device=self.device)
        self._taken[memory_of(buffer)] = buffer
        return buffer

    def give(self, buffer: torch.Tensor) -> None:
        """The buffer may be used again, as soon as nobody holds a view of it."""
        del self._taken[memory_of(buffer)]
        if stands_for(self.device) == "cpu":
            self._free.append(buffer)
        else:
            self.owners.pop(memory_of(buffer), None)  # the allocator will give this place to anybody

    def is_alone(self, buffer: torch.Tensor) -> bool:
        """Whether nothing but this tensor refers to its memory."""
        return references(buffer) <= self._alone

    def clear(self) -> None:
        """Let go of all buffers that are free, and of who was where: other memory will lie there."""
        self._free = []
        self.owners = {place: owner for place, owner in self.owners.items() if place in self._taken}

    def _trim(self, numel: int) -> None:
        """Make room: free buffers, the smallest first, while all together would exceed the limit."""
        self._free.sort(key=torch.Tensor.numel)
        while self._free and self.numel() + numel > self.limit_numel:
            self.owners.pop(memory_of(self._free.pop(0)), None)

    def numel(self) -> int:
        """Elements of all buffers, free or taken."""
        return sum(b.numel() for b in (*self._free, *self._taken.values()))

    def buffers(self) -> list[torch.Tensor]:
        """For the ledger."""
        return [*self._free, *self._taken.values()]


def references(tensor: torch.Tensor) -> int:
    """How many tensors and handles refer to the tensor's storage."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
