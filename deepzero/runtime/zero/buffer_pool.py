"""Buffers for gathered intervals, kept and reused.

[Note: buffers and who still holds them]
    Buffers are kept and reused (:class:`BufferPool`): fresh memory costs several times the copy into it. But somebody
    may still hold what an interval showed when it is released, in one of two ways.

    *A view* (``w = self.weight.t()`` kept across modules, ``detach()``, ``.data``, an attribute of a custom function's
    ``ctx``, numpy's or dlpack's alias, a result that selective checkpointing keeps) refers to the buffer's storage.
    **A buffer is reused, and poisoned under chaos, only when nobody else refers to its storage**; until then the view
    keeps its values. On a GPU the caching allocator is such a pool already, ordered by streams. With one rank the
    buffer is this rank's part itself, and a view sees the next step, as it does in stages 0-2.

    *The parameter's object* refers to no storage in particular: it shows values while they are there, and NaN when they
    are not. Python asks before it uses one (``PartitionedParameter``); autograd's C++ does not, and whoever keeps saved
    tensors may have been given the object itself: non-reentrant checkpointing keeps that of a frozen weight while it
    runs a block again. So **nobody outside is given one**, by two rules in ``module_hooks.py``: parameters show their
    values only while a module of the model runs, or for one operation; and from its start our saved-tensor hooks are
    the innermost. They hand out a :class:`~deepzero.runtime.zero.module_hooks.SavedWeight`, which holds no memory, or,
    to those who count and keep what is saved, a view.

    What the rules do not reach are hooks that a ``forward`` method enters in its middle and that keep an object as it
    is (``saved_tensors_hooks(lambda t: t, ...)`` around ``x @ self.weight``; ``save_on_cpu`` on a CPU), when no module
    and no parameter from elsewhere is used before it: then the gradient is NaN, which no step takes.
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
