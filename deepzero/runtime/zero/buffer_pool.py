"""Buffers for gathered buckets, kept and reused; and which of them a step takes, computed before it runs.

[Note: buffers and who still holds them]
    Buffers are kept and reused (:class:`BufferPool`): fresh memory costs several times the copy into it. But what a
    bucket showed may still be held when it is released, in one of two ways.

    *A view* (``w = self.weight.t()`` kept across modules, ``detach()``, ``.data``, an attribute of a custom function's
    ``ctx``, numpy's or dlpack's alias, a result that selective checkpointing keeps) refers to the buffer's storage.
    **A buffer is reused, and poisoned under chaos, only when nothing else refers to its storage**; until then the view
    keeps its values. On a GPU the caching allocator is such a pool already, ordered by streams. With one rank the
    buffer is this rank's shard itself, and a view sees the next step, as it does in stages 0-2.

    *The parameter's object* refers to no storage in particular: it shows values while they are there, and NaN when they
    are not. Its class intercepts a use by Python (``PartitionedParameter``), not one by autograd's C++; and hooks that
    keep saved tensors may have been given the object: non-reentrant checkpointing keeps that of a frozen weight while
    it runs a block again. So **the object is never handed out**, by two rules in ``module_hooks.py``: parameters show
    their values only while a module of the model runs, or for one operation; and from its start our saved-tensor hooks
    are the innermost. They hand out a :class:`~deepzero.runtime.zero.module_hooks.SavedWeight`, which holds no memory,
    or, to hooks that count and keep what is saved, a view.

    Out of reach of these rules are hooks that a ``forward`` method enters in its middle and that keep an object as it
    is (``saved_tensors_hooks(lambda t: t, ...)`` around ``x @ self.weight``; ``save_on_cpu`` on a CPU), when no module
    and no parameter from elsewhere is used before it: then the backward pass reads NaN. Most gradients of it are NaN,
    with which no step is taken; that of ``abs`` is 0. So are such hooks inside ``GatheredParameters``.

[Note: which buffers a step takes]
    A buffer that is kept for the next bucket is at least as large as it, and often larger; and one that a view still
    shows cannot be taken again. So memory is more than the sum of what is gathered, and depends on the order of
    takings. :func:`simulate` makes the pool's choices over plain numbers before the step (or the evaluation) runs.

    A *recompute* is a block of activation checkpointing that the backward pass runs again. With torch's non-reentrant
    checkpointing autograd keeps views of its weights until the backward pass is through the block: until then their
    buffers are not free, released or not.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from deepzero.comm.chaos import Chaos
from deepzero.runtime.zero.fetch_plan import FetchPlan, ModuleUse
from deepzero.utils.storage import storage_ptr_of

ROUNDS = 8
"""Rounds of simulation after which :func:`stable_sizes` stops; a second one rarely takes what the first did not."""


class BufferPool:
    """Kept 1-D buffers of one dtype and device, and what later steps will take of them.

    See [Note: buffers and who still holds them] and [Note: which buffers a step takes]. Free buffers go before all
    together exceed ``limit_numel`` elements. ``chaos`` poisons what is given back. ``reuses`` is by default False on a
    GPU, whose caching allocator is a pool already, ordered by streams; there views are the allocator's matter, too.
    ``alias`` gives a tensor's memory a second storage.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        limit_numel: int = 0,
        chaos: Chaos | None = None,
        reuses: bool | None = None,
        alias: Callable[[torch.Tensor], torch.Tensor] = torch.from_dlpack,
    ) -> None:
        self._alias = alias
        self.dtype, self.device, self._chaos = dtype, device, chaos
        self._most_allowed = self.limit_numel = limit_numel
        self.reuses = device.type in ("cpu", "meta") if reuses is None else reuses
        self._free: list[torch.Tensor] = []
        # By storage pointer, which is a buffer's *address* here, whichever of its elements a view begins with.
        self._taken: dict[int, torch.Tensor] = {}
        # Address -> (bucket, generation) whose values the buffer holds. The entry outlives give() until the buffer is
        # refilled, so a view that autograd saves after a release is still recognised as that parameter; whether the
        # pool has already reused the memory must not decide it.
        self.contents: dict[int, tuple[Any, int]] = {}
        self._alone = references(torch.empty(1, dtype=dtype, device=device))
        # Where the buffers that were planned lie; None: nothing is known, and all are kept.
        self._planned: set[int] | None = None
        # Whether a free buffer serves only what has its very size.
        self._exact_fit = False
        self.most_numel = 0
        """The most elements of all buffers at any time of this step."""
        # ---- what later steps will take, from their plans, and from the steps in which these were recorded
        # Elements of each bucket that takes a buffer, by key; given by the coordinator.
        self.bucket_numels: Mapping[int, int] = {}
        self.uses: list[ModuleUse] = []
        """Of the step under way, with what was released and fetched at each."""
        # Keys of buckets of which autograd saves no view: biases. Found out in the steps that are recorded.
        self._never_held: set[int] = set()
        self._sizes: list[int] = []
        self._most_planned: int | None = None
        self._most_recorded = 0

    # ---- between two steps -------------------------------------------------------------------------------------------

    def end_step(self) -> None:
        """Have what the plans need, once there is one, and nothing else.

        Nothing is gathered now: what a step holds does not depend on what an evaluation before it gathered.
        """
        self.uses = []
        if self._most_planned is not None:
            self.settle(self._sizes, self._most_allowed if self._sizes else self._most_planned)

    @torch.inference_mode(False)  # what an evaluation's end makes is the next step's
    def settle(self, sizes: Sequence[int], limit_numel: int) -> None:
        """Between two steps: have free buffers of ``sizes`` (elements), and keep no others from now on.

        Without sizes a buffer is kept for what has its very size, within ``limit_numel`` elements of all together.
        """
        self.limit_numel, self._exact_fit = limit_numel, not sizes
        if self._exact_fit:
            self._planned = set()
            self._trim(0)
        else:
            missing, free, self._free = sorted(sizes), self._free, []
            for buffer in free:
                if buffer.numel() in missing and self.is_alone(buffer):
                    missing.remove(buffer.numel())
                    self._free.append(buffer)
                else:
                    self.contents.pop(storage_ptr_of(buffer), None)
            self._free += [self._new(numel) for numel in missing]
            self._planned = {storage_ptr_of(buffer) for buffer in self._free}

    def begin_step(self) -> None:
        """Begin a step with the buffers that were planned for it, or with none while nothing is."""
        if self._planned is None:
            self.clear()
        self.most_numel = self.numel()

    # ---- within a step -----------------------------------------------------------------------------------------------

    def take(self, numel: int, shard: torch.Tensor | None = None) -> torch.Tensor:
        """A buffer of ``numel`` elements or more, with old contents.

        With one rank the ``shard`` is the bucket: then the "buffer" is its memory, and nothing is copied. Its storage
        is another one, which begins with the bucket and not with ``shard_S``: by its address views are known.
        """
        if shard is not None:
            return self._alias(shard)
        fitting = [b for b in self._free if b.numel() == numel or (b.numel() > numel and not self._exact_fit)]
        if usable := [b for b in fitting if self.is_alone(b)]:
            buffer = min(usable, key=torch.Tensor.numel)
            # By identity: ``remove`` would compare elements.
            self._free = [b for b in self._free if b is not buffer]
        else:
            self._trim(numel)
            buffer = self._new(numel)
        self._taken[storage_ptr_of(buffer)] = buffer
        self.most_numel = max(self.most_numel, self.numel())
        return buffer

    def give(self, address: int) -> bool:
        """The buffer there may be used again, as soon as no view of it is held. Returns whether that is so already."""
        # By address: a tensor that the caller handed over would itself be one that refers to the memory.
        buffer = self._taken.pop(address)
        if alone := self.is_alone(buffer):
            self._poison(buffer)
        extra = self._planned is not None and not self._exact_fit and address not in self._planned
        if self.reuses and not extra:
            self._free.append(buffer)
        else:
            self.contents.pop(address, None)  # the allocator may put anything here
        return alone

    def _new(self, numel: int) -> torch.Tensor:
        buffer = torch.empty(numel, dtype=self.dtype, device=self.device)
        self._poison(buffer)
        return buffer

    def _poison(self, buffer: torch.Tensor) -> None:
        # Chaos: what reads a buffer before it is filled, or after its release, finds NaN.
        if self._chaos is not None and self._chaos.enabled:
            self._chaos.poison(buffer)

    def is_alone(self, buffer: torch.Tensor) -> bool:
        """Whether nothing but this tensor refers to its memory."""
        return references(buffer) <= self._alone

    def clear(self) -> None:
        """Let go of all buffers that are free, and of who was where: other memory will lie there."""
        self._free = []
        # With one rank a bucket's shard is its buffer, which is not ours: what a context holds of it stays known.
        self.contents = {at: of for at, of in self.contents.items() if at in self._taken or of[0].gather_refs}

    def _trim(self, numel: int) -> None:
        """Make room: free buffers, the smallest first, while all together would exceed the limit."""
        # What a view still shows would take its memory all the same.
        for buffer in sorted(filter(self.is_alone, self._free), key=torch.Tensor.numel):
            if self.numel() + numel <= self.limit_numel:
                break
            self._free = [b for b in self._free if b is not buffer]
            self.contents.pop(storage_ptr_of(buffer), None)

    def numel(self) -> int:
        """Elements of all buffers, free or taken."""
        return sum(buffer.numel() for buffer in self.buffers())

    def buffers(self, free: bool = True, taken: bool = True) -> list[torch.Tensor]:
        """All buffers, or those that wait for a bucket (``free``), or those that hold one (``taken``)."""
        return [*(self._free if free else ()), *(self._taken.values() if taken else ())]

    def most_bytes(self) -> int:
        """The most bytes of all buffers in this step."""
        return self.most_numel * self.dtype.itemsize

    # ---- which buffers a step takes ----------------------------------------------------------------------------------

    @property
    def predicted_numel(self) -> int:
        """The most elements of all buffers at any time of a training step to come."""
        return max(self._most_recorded, sum(self._sizes) or self._most_planned or 0)

    def released(self, key: int, alone: bool) -> None:
        """A bucket has been released for the last of :attr:`uses`; ``alone``: no view of its buffer is held."""
        use = self.uses[-1]
        use.release += (key,)
        if alone and use.recompute and self.reuses:
            block = itertools.takewhile(lambda other: other.recompute == use.recompute, reversed(self.uses))
            if any(key in other.keys for other in block):
                self._never_held.add(key)

    def note_recorded(self) -> None:
        """The step that ends now was the first, or left the plan: what it took is noted."""
        reuses = self.reuses and self._most_planned is None
        _, most, _ = simulate(self._held_uses(self.uses), self._sizes, self.bucket_numels, reuses, self._most_allowed)
        self._most_recorded = max(self._most_recorded, most)

    def expect(self, plans: Sequence[FetchPlan]) -> None:
        """From now on steps follow these plans, in any order."""
        steps = [self._held_uses(plan) for plan in plans]
        self._sizes = stable_sizes(steps, self.bucket_numels) if self.reuses else []
        if sum(self._sizes) > self._most_allowed:
            # So tight that buffers are made for each size anew: then no more is held than is gathered.
            self._sizes = []
        most = (simulate(uses, [], self.bucket_numels, False, 0)[2] for uses in steps)
        self._most_planned = max(most, default=0)
        if self.reuses:  # the recorded step's buffers went as they came, and left holes: 2 % of a peak of 820 MiB
            return_freed_memory()

    def _held_uses(self, uses: Sequence[ModuleUse]) -> list[ModuleUse]:
        """``uses`` without what keeps no buffer: on a GPU the recomputes, elsewhere the buckets of ``_never_held``."""
        if not self.reuses:
            return [replace(use, recompute=0) for use in uses]
        return [replace(use, keys=tuple(key for key in use.keys if key not in self._never_held)) for use in uses]


def simulate(
    uses: Sequence[ModuleUse], sizes: Sequence[int], numel: Mapping[int, int], reuses: bool, limit: int
) -> tuple[list[int], int, int]:
    """One step of a pool without memory, which begins with buffers of ``sizes`` elements.

    ``uses`` are those of the step, with what is released and launched at each; ``numel`` has the elements of each
    bucket that takes a buffer. With ``reuses`` buffers that the pool did not begin with are kept as well when they are
    given back. Free buffers go, the smallest first, before all together exceed ``limit`` elements. Returns the buffers
    at the end, when all are free; the most elements of all buffers at any time; and the most of those that are taken,
    or of which a view is held.
    """
    free, most, most_live = list(sizes), 0, 0
    # Size of each buffer, and whether the pool did not begin with it: those taken, by bucket; those given back of which
    # autograd still holds a view, as the checkpointed block that runs again has used them.
    taken: dict[int, tuple[int, bool]] = {}
    held: list[tuple[int, bool]] = []
    recompute, seen = 0, set[int]()

    def live() -> int:
        return sum(size for size, _ in (*taken.values(), *held))

    def free_all(buffers: Sequence[tuple[int, bool]]) -> None:
        free.extend(size for size, new in buffers if reuses or not new)

    for use in uses:
        if use.recompute != recompute:
            recompute, seen = use.recompute, set()
            free_all(held)
            held = []
        for key in (key for key in use.release if key in taken):
            buffer = taken.pop(key)
            if recompute > 0 and key in seen:
                held.append(buffer)
            else:
                free_all([buffer])
        seen.update(use.keys)
        for key in (key for key, _ in use.launches if key in numel and key not in taken):
            size = min((size for size in free if size >= numel[key]), default=0)
            new = size == 0
            if new:
                size = numel[key]
                free.sort()
                while free and sum(free) + live() + size > limit:
                    free.pop(0)
            else:
                free.remove(size)
            taken[key] = (size, new)
            most, most_live = max(most, sum(free) + live()), max(most_live, live())
    free_all([*held, *taken.values()])
    return free, most, most_live


def stable_sizes(steps: Sequence[Sequence[ModuleUse]], numel: Mapping[int, int]) -> list[int]:
    """Buffers with which none of ``steps`` takes another one, in whatever order they come.

    Example:
        >>> first = ModuleUse((0,), False, "", fetch=(0, 1))  # 1 ahead of its use
        >>> then = ModuleUse((1,), False, "", release=(0,)), ModuleUse((2,), False, "", release=(1,), fetch=(2,))
        >>> stable_sizes([[first, *then]], {0: 64, 1: 256, 2: 128})
        [64, 256]
    """
    sizes: list[int] = []
    for _ in range(ROUNDS):
        before = sizes
        for uses in steps:
            sizes = sorted(simulate(uses, sizes, numel, reuses=True, limit=1 << 62)[0])
        if sizes == before:
            break
    return sizes


def references(tensor: torch.Tensor) -> int:
    """How many tensors and handles refer to the tensor's storage."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def return_freed_memory() -> None:
    """Ask the C library to give freed pages back to the system.

    glibc keeps chunks below 32 MiB in its heap, where a few small objects between them make new holes of the old ones:
    a model of 3 GB took 0.9 GB more than its shard on some ranks. Other C libraries, and systems, have no such call.
    """
    if sys.platform == "linux":
        if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
            trim(0)
