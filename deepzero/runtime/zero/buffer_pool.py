"""Buffers for gathered buckets, kept and reused; and which of them a pass takes, computed before it runs.

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
    and no parameter from elsewhere is used before it: then the gradient is NaN, with which no step is taken.

[Note: which buffers a pass takes]
    A buffer that is kept for the next bucket is at least as large as it, and often larger; and one that a view still
    shows cannot be taken again. So memory is more than the sum of what is gathered, and depends on the order of
    takings. :func:`simulate` makes the pool's choices over plain numbers before the pass runs.

    A *run* is a block of activation checkpointing that the backward pass runs again. With torch's non-reentrant
    checkpointing autograd keeps views of its weights until the backward pass is through the block: until then their
    buffers are not free, released or not.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from deepzero.comm.streams import Chaos, storage_ptr_of
from deepzero.runtime.zero.fetch_plan import FetchPlan

ROUNDS = 8
"""Passes after which it is taken for stable; a second one rarely takes anything that the first did not."""


class BufferPool:
    """Kept 1-D buffers of one dtype and device. See [Note: buffers and who still holds them].

    Free buffers go before all together exceed ``limit_numel`` elements. ``chaos`` poisons what is given back.
    ``keeps`` is by default False on a GPU, whose caching allocator is a pool already, ordered by streams. ``alias``
    gives a tensor's memory a second storage.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        limit_numel: int = 0,
        chaos: Chaos | None = None,
        keeps: bool | None = None,
        alias: Callable[[torch.Tensor], torch.Tensor] = torch.from_dlpack,
    ) -> None:
        self.dtype, self.device, self.limit_numel, self._chaos = dtype, device, limit_numel, chaos
        self._alias = alias
        self.keeps = device.type in ("cpu", "meta") if keeps is None else keeps
        self._free: list[torch.Tensor] = []
        self._taken: dict[int, torch.Tensor] = {}
        # Storage pointer -> (bucket, generation) whose values the buffer holds. The entry outlives give() until the
        # buffer is refilled, so a view that autograd saves after a release is still recognised as that parameter;
        # whether the pool has already reused the memory must not decide it.
        self.owners: dict[int, tuple[Any, int]] = {}
        self._alone = references(torch.empty(1, dtype=dtype, device=device))
        # Where the buffers that were planned lie; None: nothing is known, and all are kept.
        self._planned: set[int] | None = None
        # Whether a free buffer serves only what has its very size.
        self._exact = False
        self.most_numel = 0
        """The most elements of all buffers at any time of this pass."""

    @torch.inference_mode(False)  # what an evaluation's end makes is the next step's
    def settle(self, sizes: Sequence[int], limit_numel: int) -> None:
        """Between two passes: have free buffers of ``sizes`` (elements), and keep no others from now on.

        Without sizes a buffer is kept for what has its very size, within ``limit_numel`` elements of all together.
        """
        self.limit_numel, self._exact = limit_numel, not sizes
        if self._exact:
            self._planned = set()
            self._trim(0)
        elif self.keeps:
            missing, free, self._free = sorted(sizes), self._free, []
            for buffer in free:
                if buffer.numel() in missing and self.is_alone(buffer):
                    missing.remove(buffer.numel())
                    self._free.append(buffer)
                else:
                    self.owners.pop(storage_ptr_of(buffer), None)
            self._free += [self._new(numel) for numel in missing]
            self._planned = {storage_ptr_of(buffer) for buffer in self._free}

    def begin_pass(self) -> None:
        """Begin a pass with the buffers that were planned for it, or with none while nothing is."""
        if self._planned is None:
            self.clear()
        self.most_numel = self.numel()

    def take(self, numel: int, shard: torch.Tensor | None = None) -> torch.Tensor:
        """A buffer of ``numel`` elements or more, with old contents.

        With one rank the ``shard`` is the bucket: then the "buffer" is its memory, under a storage of its own by which
        views of it are told from the shard, and nothing is copied.
        """
        if shard is not None:
            return self._alias(shard)
        fitting = [b for b in self._free if b.numel() == numel or (b.numel() > numel and not self._exact)]
        usable = [b for b in fitting if self.is_alone(b)]
        if usable:
            buffer = min(usable, key=torch.Tensor.numel)
            self._free = [b for b in self._free if b is not buffer]
        else:
            self._trim(numel)
            buffer = self._new(numel)
        self._taken[storage_ptr_of(buffer)] = buffer
        self.most_numel = max(self.most_numel, self.numel())
        return buffer

    def give(self, buffer: torch.Tensor) -> None:
        """The buffer may be used again, as soon as no view of it is held."""
        place = storage_ptr_of(buffer)
        del self._taken[place]
        if self.is_alone(buffer):
            self._poison(buffer)
        extra = self._planned is not None and not self._exact and place not in self._planned
        if self.keeps and not extra:
            self._free.append(buffer)
        else:
            self.owners.pop(place, None)  # the allocator may put anything here

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
        return sum(buffer.numel() for buffer in self.buffers())

    def buffers(self) -> list[torch.Tensor]:
        """All buffers, free or taken."""
        return [*self._free, *self._taken.values()]


# ---- which buffers a pass takes --------------------------------------------------------------------------------------

Moment = tuple[tuple[int, ...], int, list[int], list[int]]
"""One use of buckets: its keys, its run (0: none), and the keys that were released and then taken for it."""


def moments_of(plan: FetchPlan) -> list[Moment]:
    """What a pass along ``plan`` will do."""
    return [(use.keys, use.run, list(use.release), [key for key, _ in use.launches]) for use in plan.uses]


def simulate(
    moments: Sequence[Moment], sizes: Sequence[int], numel: Mapping[int, int], keeps: bool, limit: int
) -> tuple[list[int], int, int]:
    """One pass of a pool without memory, which begins with buffers of ``sizes`` elements.

    ``numel`` has the elements of each bucket that takes a buffer. With ``keeps`` buffers that the pool did not begin
    with are kept as well when they are given back. Free buffers go, the smallest first, before all together exceed
    ``limit`` elements. Returns the buffers at the end, when all are free; the most elements of all buffers at any time;
    and the most of those that are taken, or still shown by a view.
    """
    free, most, most_live = list(sizes), 0, 0
    # Size of each buffer, and whether the pool did not begin with it: those taken, by bucket; those given back of which
    # autograd still holds a view, as the checkpointed block that runs again has used them.
    taken: dict[int, tuple[int, bool]] = {}
    shown: list[tuple[int, bool]] = []
    run, seen = 0, set[int]()

    def live() -> int:
        return sum(size for size, _ in (*taken.values(), *shown))

    def free_all(buffers: Sequence[tuple[int, bool]]) -> None:
        free.extend(size for size, new in buffers if keeps or not new)

    for keys, now, released, wanted in moments:
        if now != run:
            run, seen = now, set()
            free_all(shown)
            shown = []
        for key in (key for key in released if key in taken):
            buffer = taken.pop(key)
            if run > 0 and key in seen:
                shown.append(buffer)
            else:
                free_all([buffer])
        seen.update(keys)
        for key in (key for key in wanted if key in numel and key not in taken):
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
    free_all([*shown, *taken.values()])
    return free, most, most_live


def stable_sizes(passes: Sequence[Sequence[Moment]], numel: Mapping[int, int]) -> list[int]:
    """Buffers with which none of ``passes`` takes another one, in whatever order they come.

    Example:
        >>> step = [((0,), 0, [], [0, 1]), ((1,), 0, [0], []), ((2,), 0, [1], [2])]
        >>> stable_sizes([step], {0: 64, 1: 256, 2: 128})
        [64, 256]
    """
    sizes: list[int] = []
    for _ in range(ROUNDS):
        before = sizes
        for moments in passes:
            sizes = sorted(simulate(moments, sizes, numel, keeps=True, limit=1 << 62)[0])
        if sizes == before:
            break
    return sizes


class BufferForecast:
    """What the pool of one coordinator will hold, from its plans, and from the passes in which they were recorded.

    ``numel`` has the elements of each bucket that takes a buffer; ``limit`` is ``stage3_max_live_parameters``. Without
    ``keeps`` views are the caching allocator's matter.
    """

    def __init__(self, numel: Mapping[int, int], limit: int, keeps: bool) -> None:
        self._numel, self._limit, self._keeps = numel, limit, keeps
        self.moments: list[Moment] = []
        """Of the pass under way."""
        # Autograd saves no view of what lies in them: biases. Found out in the passes that are recorded.
        self._never_shown: set[int] = set()
        self._sizes: list[int] = []
        self._most_planned: int | None = None
        self._most_recorded = 0

    @property
    def most_numel(self) -> int:
        """The most elements that the pool holds at any time of a training pass."""
        return max(self._most_recorded, sum(self._sizes) or self._most_planned or 0)

    def released(self, key: int, alone: bool) -> None:
        """A bucket has been released for the last of :attr:`moments`; whether nothing shows its buffer."""
        _, run, released, _ = self.moments[-1]
        released.append(key)
        if alone and run and self._keeps:
            block = itertools.takewhile(lambda moment: moment[1] == run, reversed(self.moments))
            if any(key in keys for keys, *_ in block):
                self._never_shown.add(key)

    def recorded(self) -> None:
        """The pass that ends now was the first of its kind, or left the plan."""
        keeps = self._keeps and self._most_planned is None
        _, most, _ = simulate(self._seen(self.moments), self._sizes, self._numel, keeps, self._limit)
        self._most_recorded = max(self._most_recorded, most)

    def expect(self, plans: Sequence[FetchPlan]) -> None:
        """From now on passes follow these plans, in any order."""
        passes = [self._seen(moments_of(plan)) for plan in plans]
        self._sizes = stable_sizes(passes, self._numel) if self._keeps else []
        if sum(self._sizes) > self._limit:
            # So tight that buffers are made for each size anew: then no more is held than is gathered.
            self._sizes = []
        self._most_planned = max((simulate(moments, [], self._numel, False, 0)[2] for moments in passes), default=0)

    def settle(self, pool: BufferPool) -> None:
        """Let the pool have what the plans need, once there is one."""
        if self._most_planned is not None:
            pool.settle(self._sizes, self._limit if self._sizes else self._most_planned)

    def _seen(self, moments: Sequence[Moment]) -> list[Moment]:
        """``moments`` without the runs, or without the buckets, of which no view keeps a buffer."""
        if not self._keeps:
            return [(keys, 0, released, taken) for keys, _, released, taken in moments]
        hidden = self._never_shown
        return [(tuple(k for k in keys if k not in hidden), *more) for keys, *more in moments]  # type: ignore[misc]


def references(tensor: torch.Tensor) -> int:
    """How many tensors and handles refer to the tensor's storage."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def return_freed_memory() -> None:
    """Ask the C library to give freed pages back to the system.

    glibc keeps chunks below 32 MiB in its heap, where a few small objects between them make new holes of the old ones:
    a model of 3 GB took 0.9 GB more than its shard on some ranks. Other C libraries, and systems, have no such call.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
