"""From the order in which buckets are used to a plan: what is released, fetched and prefetched at each use.

Pure integers: no tensor, no process. The coordinator records the *trace* of a step (or of an evaluation's forward
pass), compiles it here, and executes the plan in the next ones. One *use* of a trace is a set of buckets that are
needed at the same moment: those of a module's parameters in the forward pass, or the bucket of a saved weight in the
backward pass. A use that needs nothing beyond the one before it is not listed: ten modules in one bucket are one use.

Source: ``fetch_sub_module`` and ``__params_to_release`` in ``partitioned_param_coordinator.py`` of [DeepSpeed], for the
meaning of the three limits, which are ``stage3_prefetch_bucket_size``, ``stage3_max_reuse_distance`` (both limited once
more by ``partition_plan.py:limit_lookahead``) and ``stage3_max_live_parameters``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

NEVER = 1 << 62


@dataclass
class ModuleUse:
    """One use of buckets, and its release, fetch and prefetch, in this order.

    In a plan these three say what to do; in the record of a pass, what was done.
    """

    keys: tuple[int, ...]
    """The buckets needed, sorted."""
    backward: bool
    where: str
    """The module, or in a backward pass the first parameter of the bucket, for error texts and the profiler."""
    on_demand: bool = False
    """It was noticed only because the bucket was not gathered: in the next step it may go unnoticed."""
    recompute: int = 0
    """Which checkpointed block is recomputed here (autograd keeps views of its weights); 0: none."""
    completes: set[int] = field(default_factory=set)
    """Buckets whose gradients became complete between this use and the next."""
    release: tuple[int, ...] = ()
    fetch: tuple[int, ...] = ()
    """In a plan only predictions read it: the coordinator fetches those of ``keys`` that are not gathered, which are
    the same. The record of a pass has prefetches here, too."""
    prefetch: tuple[tuple[int, bool], ...] = ()
    """With each bucket, whether it is for a backward pass."""

    @property
    def launches(self) -> list[tuple[int, bool]]:
        """The all-gathers of this use in order: the bucket's key, and whether it is for a backward pass."""
        return [*((key, self.backward) for key in self.fetch), *self.prefetch]


FetchPlan = tuple[ModuleUse, ...]
"""One optimizer step, or one evaluation's forward pass, use by use. The coordinator executes this object."""


def compile_plan(
    trace: Sequence[ModuleUse], numel: Mapping[int, int], prefetch_numel: int, reuse_numel: int, max_live_numel: int
) -> FetchPlan:
    """The plan for a trace: what is released, fetched and prefetched at each of its uses.

    release   what is not needed soon: no further use in the trace, or more than ``reuse_numel`` elements of other
              parameters in between. A bucket whose gradients are not complete yet, and that the same backward pass will
              use again, stays. When ``max_live_numel`` would be exceeded, what is needed last goes first.
    fetch     what this use needs and is not there.
    prefetch  what the next uses need, in their order, until ``prefetch_numel`` elements are fetched and not yet used.

    Example:
        >>> uses = [ModuleUse((i,), backward=False, where="") for i in (0, 1, 2)]
        >>> uses += [ModuleUse((i,), backward=True, where="") for i in (2, 1, 0)]
        >>> # bucket 2 is used last forward and first backward: one use
        >>> plan = compile_plan(uses[:3] + uses[4:], {0: 8, 1: 8, 2: 8}, 8, 8, max_live_numel=24)
        >>> [(use.release, use.fetch, [key for key, _ in use.prefetch]) for use in plan]
        [((), (0,), [1]), ((0,), (), [2]), ((), (), [0]), ((2,), (), []), ((1,), (), [])]
    """
    # What is gathered, or on its way, when the walk stands at a use, and what of it is not used yet. Both are equal on
    # all ranks, because the trace is.
    live: set[int] = set()
    ahead: set[int] = set()
    # Positions of each bucket's uses, the last first. The walk pops those that it has passed: it needs the next use of
    # every live bucket at every use, and is linear in the length of the trace that way.
    coming: dict[int, list[int]] = {}
    for position in reversed(range(len(trace))):
        for key in trace[position].keys:
            coming.setdefault(key, []).append(position)

    def next_use(key: int, position: int) -> int:
        while coming[key] and coming[key][-1] <= position:
            coming[key].pop()
        return coming[key][-1] if coming[key] else NEVER

    def to_release(position: int, use: ModuleUse) -> list[int]:
        # Sorted, as everything here that is a set: the order of releases decides which buffer is used again, and must
        # not depend on a set's order, which differs between processes.
        idle = {key: next_use(key, position) for key in sorted(live - set(use.keys))}
        # A prefetch stays until its use: else it would travel twice.
        chosen = [k for k in idle if k not in ahead and _is_far(k, trace, position, idle[k], numel, reuse_numel)]
        # Above the limit, what is used last goes first, prefetched or not. What this use needs is never released, so a
        # single module that is larger than the limit is gathered all the same.
        kept = sorted(idle.keys() - chosen, key=lambda key: (idle[key], key))
        total = sum(numel[key] for key in (*use.keys, *kept))
        while kept and total > max_live_numel:
            chosen.append(kept.pop())
            total -= numel[chosen[-1]]
        return chosen

    def to_prefetch(position: int) -> list[tuple[int, bool]]:
        chosen: list[tuple[int, bool]] = []
        # Fetched ahead and not used yet: at most prefetch_numel, plus the bucket that reaches it. So a bucket larger
        # than the limit can be prefetched; with a limit of 0 nothing is.
        waiting = sum(numel[key] for key in ahead)
        held = sum(numel[key] for key in live)
        for use in trace[position + 1 :]:
            for key in (key for key in use.keys if key not in live):
                # The first that does not fit ends the search: a smaller one behind it would take the room, and the
                # order of collectives would no longer be that of the uses.
                if waiting >= prefetch_numel or held + numel[key] > max_live_numel:
                    return chosen
                chosen.append((key, use.backward))
                live.add(key)
                ahead.add(key)
                waiting += numel[key]
                held += numel[key]
        return chosen

    plan = []
    for position, use in enumerate(trace):
        # Release before fetch: the buffers that are given back here are those that the fetch fills.
        fetch = tuple(key for key in use.keys if key not in live)
        release = tuple(to_release(position, use))
        live.difference_update(release)
        ahead.difference_update(release, use.keys)
        live.update(fetch)
        # Prefetch last: it travels while this use computes.
        plan.append(replace(use, release=release, fetch=fetch, prefetch=tuple(to_prefetch(position))))
    return tuple(plan)


def _is_far(
    key: int, trace: Sequence[ModuleUse], position: int, next_use: int, numel: Mapping[int, int], reuse_numel: int
) -> bool:
    """Whether a live bucket is not needed soon: at ``position`` in the trace, when its next use is at ``next_use``."""
    if next_use == NEVER:
        return True
    # A bucket that this backward pass will still add gradients to stays, however far its next use is: the gradients of
    # a bucket leave together, and until then autograd needs its weights again.
    between = trace[position:next_use]
    complete = any(key in use.completes for use in between)
    if not complete and trace[next_use].backward and all(use.backward for use in between):
        return False
    # DeepSpeed's reuse distance: elements of different parameters used in between. A bucket counts once, however often
    # it is used.
    passed: set[int] = set()
    distance = 0
    for use in between:
        distance += sum(numel[other] for other in use.keys if other not in passed)
        passed.update(use.keys)
        if distance > reuse_numel:
            return True
    return False
