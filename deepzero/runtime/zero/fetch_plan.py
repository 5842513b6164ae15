"""From the order in which buckets are used to a plan: what is fetched, prefetched and released at each use.

Pure integers: no tensor, no process. The coordinator records the *trace* of one optimizer step, compiles it here, and
follows the plan in the steps after it. So the plan is not a picture of what the runtime does, it is what it executes.

A trace is a list of *uses*. One use is a set of buckets that are needed at the same moment: those of a module's
parameters in the forward pass, and the bucket of a saved weight in the backward pass. Uses that need nothing beyond
the one before them are not listed: ten modules in one bucket are one use.

At each use, in this order:

release   what is not needed soon: no further use in the trace, or more than ``reuse_numel`` elements of other
          parameters in between. A bucket whose gradients are not complete yet, and that the same backward pass will
          use again, stays. When ``live_numel`` would be exceeded, what is needed last goes first.
fetch     what this use needs and is not there.
prefetch  what the next uses need, in their order, until ``prefetch_numel`` elements are fetched and not yet used.

Sources: ``fetch_sub_module`` and ``__params_to_release`` in DeepSpeed's ``partitioned_param_coordinator.py`` for the
meaning of the three numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

NEVER = 1 << 62


@dataclass(frozen=True)
class FetchLimits:
    """All in elements."""

    prefetch_numel: int
    """``stage3_prefetch_bucket_size``: how much may be fetched ahead of its use."""
    reuse_numel: int
    """``stage3_max_reuse_distance``: what is used again within so many elements of other parameters is kept."""
    live_numel: int
    """``stage3_max_live_parameters``: how much may be gathered at any time, fetches under way included."""


@dataclass
class ModuleUse:
    """One entry of a trace."""

    keys: tuple[int, ...]
    """The buckets needed, sorted."""
    backward: bool
    where: str
    """The module, for messages and traces."""
    on_demand: bool = False
    """Noticed only because the bucket was not there: it may be missing the next time."""
    run: int = 0
    """The number of the checkpointed block that runs again here, and whose weights autograd keeps views of; 0: none."""
    completes: set[int] = field(default_factory=set)
    """Buckets whose gradients became complete between this use and the next."""


@dataclass(frozen=True)
class FetchAction:
    """What happens at one use, in the order of the fields."""

    release: tuple[int, ...]
    fetch: tuple[int, ...]
    """For the predictions; the coordinator fetches what of its use is not there, which is the same."""
    prefetch: tuple[tuple[int, bool], ...]
    """With each bucket, whether it is for a backward pass."""


@dataclass(frozen=True)
class FetchPlan:
    """One optimizer step: what is used, and what happens at each use. The coordinator executes this object."""

    uses: tuple[ModuleUse, ...]
    actions: tuple[FetchAction, ...]
    """One for each use."""
    numel: dict[int, int]
    """Elements of each bucket: the plan is about these."""
    limits: FetchLimits
    """What it keeps to."""


def compile_plan(trace: Sequence[ModuleUse], numel: Mapping[int, int], limits: FetchLimits) -> list[FetchAction]:
    """One action for every use.

    Args:
        trace: the uses of one optimizer step, in order.
        numel: elements of each bucket, padding included.
        limits: what may be held.

    Example:
        >>> uses = [ModuleUse((i,), backward=False, where="") for i in (0, 1, 2)]
        >>> uses += [ModuleUse((i,), backward=True, where="") for i in (2, 1, 0)]
        >>> # bucket 2 is used last forward and first backward: one use
        >>> plan = compile_plan(uses[:3] + uses[4:], {0: 8, 1: 8, 2: 8}, FetchLimits(8, 8, 24))
        >>> [(a.release, a.fetch, [key for key, _ in a.prefetch]) for a in plan]
        [((), (0,), [1]), ((0,), (), [2]), ((), (), [0]), ((2,), (), []), ((1,), (), [])]
    """
    return _Planner(trace, numel, limits).run()


class _Planner:
    """Walks along the trace with the set of live buckets."""

    def __init__(self, trace: Sequence[ModuleUse], numel: Mapping[int, int], limits: FetchLimits) -> None:
        self.trace, self.numel, self.limits = trace, numel, limits
        # What is gathered, or on its way, when the walk stands at a use. Equal on all ranks, because the trace is.
        self.live: set[int] = set()
        self.ahead: set[int] = set()
        """Fetched and not used yet."""
        # Positions of each bucket's uses, ascending, and a cursor into them that only moves forward: the walk asks for
        # the next use of every live bucket at every use, and is linear in the length of the trace that way.
        self.uses: dict[int, list[int]] = {}
        for position, use in enumerate(trace):
            for key in use.keys:
                self.uses.setdefault(key, []).append(position)
        self._cursor = dict.fromkeys(self.uses, 0)

    def run(self) -> list[FetchAction]:
        plan = []
        for position, use in enumerate(self.trace):
            needed = [key for key in use.keys if key not in self.live]
            # Release before fetch: the buffers that are given back here are those that the fetch fills.
            released = self._release(position, use, needed)
            self.live.update(needed)
            self.ahead.difference_update(use.keys)
            # Prefetch last: it travels while this use computes.
            plan.append(FetchAction(tuple(released), tuple(needed), tuple(self._prefetch(position))))
        return plan

    def _release(self, position: int, use: ModuleUse, needed: Sequence[int]) -> list[int]:
        # Sorted, as everything here that is a set: the order of releases decides which buffer is used again, and must
        # not depend on a set's order, which differs between processes.
        idle = sorted(self.live - set(use.keys))
        next_use = {key: self._next_use(key, position) for key in idle}
        released = [key for key in idle if key not in self.ahead and self._is_far(key, position, next_use[key])]
        # Above live_numel, what is used last goes first, prefetched or not. What this use needs is never released, so a
        # single module that is larger than the limit is gathered all the same.
        kept = sorted(set(idle) - set(released), key=lambda key: (next_use[key], key))
        total = sum(self.numel[key] for key in {*use.keys, *kept})
        while kept and total > self.limits.live_numel:
            released.append(kept.pop())
            total -= self.numel[released[-1]]
        self.live.difference_update(released)
        self.ahead.difference_update(released)
        return released

    def _next_use(self, key: int, position: int) -> int:
        """The position of the first use after ``position``, or ``NEVER``."""
        places, cursor = self.uses[key], self._cursor[key]
        while cursor < len(places) and places[cursor] <= position:
            cursor += 1
        self._cursor[key] = cursor
        return places[cursor] if cursor < len(places) else NEVER

    def _is_far(self, key: int, position: int, next_use: int) -> bool:
        if next_use == NEVER:
            return True
        # A bucket that this backward pass will still add gradients to stays, however far its next use is: the gradients
        # of a bucket leave together, and until then autograd needs its weights again.
        between = self.trace[position:next_use]
        complete = any(key in use.completes for use in between)
        if not complete and self.trace[next_use].backward and all(use.backward for use in between):
            return False
        # DeepSpeed's reuse distance: elements of different parameters used in between. A bucket counts once, however
        # often it is used.
        passed: set[int] = set()
        distance = 0
        for use in between:
            for other in set(use.keys) - passed:
                passed.add(other)
                distance += self.numel[other]
                if distance > self.limits.reuse_numel:
                    return True
        return False

    def _prefetch(self, position: int) -> list[tuple[int, bool]]:
        chosen: list[tuple[int, bool]] = []
        # Fetched ahead and not used yet: at most prefetch_numel, plus the bucket that reaches it. So a bucket larger
        # than the limit can be prefetched; with a limit of 0 nothing is.
        waiting = sum(self.numel[key] for key in self.ahead)
        held = sum(self.numel[key] for key in self.live)
        for use in self.trace[position + 1 :]:
            for key in use.keys:
                if key in self.live:
                    continue
                size = self.numel[key]
                # The first that does not fit ends the search: a smaller one behind it would take the room, and the
                # order of collectives would no longer be that of the uses.
                if waiting >= self.limits.prefetch_numel or held + size > self.limits.live_numel:
                    return chosen
                chosen.append((key, use.backward))
                self.live.add(key)
                self.ahead.add(key)
                waiting += size
                held += size
        return chosen
