"""Buffers for gathered buckets, kept and reused.

[Note: buffers and who still holds them]
    Buffers are kept and reused (:class:`BufferPool`): fresh memory costs several times the copy into it. But somebody
    may still hold what a bucket showed when it is released, in one of two ways.

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

    Once the order of a step is known, every pass begins with exactly the buffers that the plans need
    (:meth:`BufferPool.settle`, ``buffer_plan.py``), whatever was gathered in between: so what is held is known, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from deepzero.comm.process_group import real_device_type
from deepzero.comm.streams import storage_ptr_of


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
        # Where the buffers that were planned lie; None: nothing is known, and all are kept.
        self._planned: set[int] | None = None
        self._exact = False
        self.most_numel = 0
        """The most elements of all buffers at any time of this pass."""

    @torch.inference_mode(False)  # what an evaluation's end makes is the next step's
    def settle(self, sizes: Sequence[int], limit_numel: int) -> None:
        """Between two passes: have free buffers of ``sizes``, and keep no others from now on.

        Args:
            sizes: elements of each. Empty: a buffer is kept for what has its very size.
            limit_numel: free buffers go before all together exceed so many elements.
        """
        self.limit_numel, self._exact = limit_numel, not sizes
        if self._exact:
            self._planned = set()
            self._trim(0)
        elif real_device_type(self.device) == "cpu":
            missing, free, self._free = sorted(sizes), self._free, []
            for buffer in free:
                if buffer.numel() in missing and self.is_alone(buffer):
                    missing.remove(buffer.numel())
                    self._free.append(buffer)
                else:
                    self.owners.pop(storage_ptr_of(buffer), None)
            self._free += [torch.empty(numel, dtype=self.dtype, device=self.device) for numel in missing]
            self._planned = {storage_ptr_of(buffer) for buffer in self._free}

    def begin_pass(self) -> None:
        """A pass begins, with what was planned for it; while nothing is, with nothing."""
        if self._planned is None:
            self.clear()
        self.count_anew()

    def count_anew(self) -> None:
        """:attr:`most_numel` begins again with what is held now."""
        self.most_numel = self.numel()

    def take(self, numel: int) -> torch.Tensor:
        """A buffer of ``numel`` elements or more; its contents are whatever was there."""
        fitting = [b for b in self._free if b.numel() == numel or (b.numel() > numel and not self._exact)]
        usable = [b for b in fitting if self.is_alone(b)]
        if usable:
            buffer = min(usable, key=torch.Tensor.numel)
            self._free = [b for b in self._free if b is not buffer]
        else:
            self._trim(numel)
            buffer = torch.empty(numel, dtype=self.dtype, device=self.device)
        self._taken[storage_ptr_of(buffer)] = buffer
        self.most_numel = max(self.most_numel, self.numel())
        return buffer

    def give(self, buffer: torch.Tensor) -> None:
        """The buffer may be used again, as soon as nobody holds a view of it."""
        del self._taken[storage_ptr_of(buffer)]
        extra = self._planned is not None and not self._exact and storage_ptr_of(buffer) not in self._planned
        if real_device_type(self.device) == "cpu" and not extra:
            self._free.append(buffer)
        else:
            self.owners.pop(storage_ptr_of(buffer), None)  # the allocator may give this place to anybody

    def is_alone(self, buffer: torch.Tensor) -> bool:
        """Whether nothing but this tensor refers to its memory."""
        return references(buffer) <= self._alone

    def clear(self) -> None:
        """Let go of all buffers that are free, and of who was where: other memory will lie there."""
        self._free = []
        self.owners = {place: owner for place, owner in self.owners.items() if place in self._taken}

    def _trim(self, numel: int) -> None:
        """Make room: free buffers, the smallest first, while all together would exceed the limit."""
        # What a view still shows would take its memory all the same.
        for buffer in sorted(filter(self.is_alone, self._free), key=torch.Tensor.numel):
            if self.numel() + numel <= self.limit_numel:
                break
            self._free = [b for b in self._free if b is not buffer]
            self.owners.pop(storage_ptr_of(buffer), None)

    def numel(self) -> int:
        """Elements of all buffers, free or taken."""
        return sum(b.numel() for b in (*self._free, *self._taken.values()))

    def buffers(self) -> list[torch.Tensor]:
        """For the ledger."""
        return [*self._free, *self._taken.values()]


def references(tensor: torch.Tensor) -> int:
    """How many tensors and handles refer to the tensor's storage."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
