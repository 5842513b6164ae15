"""Which buffers a pass takes, said before it runs: the pool's choices (``buffer_pool.py``) over plain numbers.

What is gathered at the same time is known from the plan. But a buffer that is kept for the next bucket is at least as
large as it, and often larger; and one that a view still shows cannot be taken again. So memory is more than the sum of
what is gathered, and depends on the order of takings.

A *run* is a block of activation checkpointing that the backward pass runs again. With torch's non-reentrant
checkpointing autograd keeps views of its weights until the backward pass is through the block: until then their buffers
are not free, released or not.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from deepzero.comm.process_group import real_device_type
from deepzero.runtime.zero.buffer_pool import BufferPool
from deepzero.runtime.zero.fetch_plan import FetchAction, ModuleUse

ROUNDS = 8
"""Passes after which it is taken for stable; a second one rarely takes anything that the first did not."""


@dataclass
class Moment:
    """One use of buckets, and what was released and taken for it, in this order."""

    keys: tuple[int, ...]
    run: int
    released: list[int] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)


def moments_of(uses: Sequence[ModuleUse], plan: Sequence[FetchAction]) -> list[Moment]:
    """What a pass along ``plan`` will do."""
    return [
        Moment(use.keys, use.run, list(action.release), [*action.fetch, *(key for key, _ in action.prefetch)])
        for use, action in zip(uses, plan, strict=True)
    ]


class Shelf:
    """The pool without memory.

    Args:
        sizes: elements of the buffers that it begins with.
        numel: elements of each bucket that takes a buffer.
        keeps: buffers that it did not begin with are kept as well when they are given back.
        limit: free buffers go, the smallest first, before all together exceed so many elements.
    """

    def __init__(self, sizes: Sequence[int], numel: Mapping[int, int], keeps: bool, limit: int) -> None:
        self.free, self.numel, self.keeps, self.limit = list(sizes), numel, keeps, limit
        self._taken: dict[int, tuple[int, bool]] = {}
        self._shown: list[tuple[int, bool]] = []
        self.most = self.most_live = 0
        """Elements of all buffers at any time; of those that are taken, or still shown."""

    def follow(self, moments: Sequence[Moment]) -> None:
        """One pass; afterwards everything is free."""
        run, seen = 0, set[int]()
        for moment in moments:
            if moment.run != run:
                run, seen = moment.run, set()
                self._end_run()
            for key in moment.released:
                if key in self._taken:
                    self._give(self._taken.pop(key), run > 0 and key in seen)
            seen.update(moment.keys)
            for key in moment.taken:
                if key in self.numel and key not in self._taken:
                    self._taken[key] = self._take(self.numel[key])
        self._end_run()
        for buffer in self._taken.values():
            self._give(buffer, False)
        self._taken = {}

    def _take(self, numel: int) -> tuple[int, bool]:
        fitting = [size for size in self.free if size >= numel]
        size = min(fitting, default=numel)
        if fitting:
            self.free.remove(size)
        else:
            self.free.sort()
            while self.free and self._total() + numel > self.limit:
                self.free.pop(0)
        self.most = max(self.most, self._total() + size)
        self.most_live = max(self.most_live, sum(size for size, _ in self._taken.values()) + size + self._still_shown())
        return size, not fitting

    def _total(self) -> int:
        return sum(self.free) + sum(size for size, _ in self._taken.values()) + self._still_shown()

    def _still_shown(self) -> int:
        return sum(size for size, _ in self._shown)

    def _give(self, buffer: tuple[int, bool], shown: bool) -> None:
        if shown:
            self._shown.append(buffer)
        elif self.keeps or not buffer[1]:
            self.free.append(buffer[0])

    def _end_run(self) -> None:
        shown, self._shown = self._shown, []
        for buffer in shown:
            self._give(buffer, False)


def stable_sizes(passes: Sequence[Sequence[Moment]], numel: Mapping[int, int]) -> list[int]:
    """Buffers with which none of ``passes`` takes another one, in whatever order they come.

    Example:
        >>> step = [Moment((0,), 0, [], [0, 1]), Moment((1,), 0, [0], []), Moment((2,), 0, [1], [2])]
        >>> stable_sizes([step], {0: 64, 1: 256, 2: 128})
        [64, 256]
    """
    sizes: list[int] = []
    for _ in range(ROUNDS):
        before = sizes
        for moments in passes:
            shelf = Shelf(sizes, numel, keeps=True, limit=1 << 62)
            shelf.follow(moments)
            sizes = sorted(shelf.free)
        if sizes == before:
            break
    return sizes


class BufferForecast:
    """What the pool of one coordinator will hold, from its plans, and from the passes in which they were recorded.

    Args:
        numel: elements of each bucket that takes a buffer.
        limit: ``stage3_max_live_parameters``.
        device: on a GPU nothing is kept, and views are the caching allocator's matter.
    """

    def __init__(self, numel: Mapping[int, int], limit: int, device: torch.device) -> None:
        self._numel, self._limit, self._keeps = numel, limit, real_device_type(device) == "cpu"
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
        now = self.moments[-1]
        now.released.append(key)
        if alone and now.run and self._keeps:
            run = itertools.takewhile(lambda moment: moment.run == now.run, reversed(self.moments))
            if any(key in moment.keys for moment in run):
                self._never_shown.add(key)

    def recorded(self) -> None:
        """The pass that ends now was the first of its kind, or left the plan."""
        shelf = Shelf(self._sizes, self._numel, self._keeps and self._most_planned is None, self._limit)
        shelf.follow(self._seen(self.moments))
        self._most_recorded = max(self._most_recorded, shelf.most)

    def expect(self, passes: Sequence[Sequence[Moment]]) -> None:
        """From now on passes are these, in any order."""
        passes = [self._seen(moments) for moments in passes]
        self._sizes = stable_sizes(passes, self._numel) if self._keeps else []
        if sum(self._sizes) > self._limit:
            # So tight that buffers are made for each size anew: then no more is held than is gathered.
            self._sizes = []
        self._most_planned = 0
        for moments in passes:
            shelf = Shelf([], self._numel, False, 0)
            shelf.follow(moments)
            self._most_planned = max(self._most_planned, shelf.most_live)

    def settle(self, pool: BufferPool) -> None:
        """Let the pool have what the plans need, once there is one."""
        if self._most_planned is not None:
            pool.settle(self._sizes, self._limit if self._sizes else self._most_planned)

    def _seen(self, moments: Sequence[Moment]) -> list[Moment]:
        if not self._keeps:
            return [replace(moment, run=0) for moment in moments]
        hidden = self._never_shown
        return [replace(moment, keys=tuple(k for k in moment.keys if k not in hidden)) for moment in moments]
