"""When partitioned parameters are fetched and released; the buckets see to where their bytes lie.

In the first optimizer step the coordinator *records* which buckets are used in which order, in forward and backward
passes alike: the trace. At the boundary the trace is compiled into a plan (``fetch_plan.py``), which later steps
follow. ``fetch_sub_module`` is called before a module runs and when the backward pass asks for another bucket; it does,
in this order: release what the plan lets go · launch mine · launch the prefetch, what the next uses need · wait for
mine. Launching before waiting is all there is to overlap: the next buckets travel while this one is computed with.

DeepSpeed releases at the end of a module. Here a bucket serves a run of modules, and at the end of one of them nothing
tells whether the next one will use it too: that is known when the next use comes, which begins with
``release_sub_module``. Nothing is fetched in between, so the most that is ever gathered is the same. And a backward
pass has no such end: it asks for weights one by one.

Evaluation has a trace of its own, kept apart by autograd's grad mode: a validation, within a step too, does not disturb
the plan of training. When a use comes that a plan does not expect, it is dropped with one line, and recorded again.

Sources: ``PartitionedParameterCoordinator``, ``fetch_sub_module``, ``release_sub_module``, ``InflightParamRegistry`` in
``partitioned_param_coordinator.py`` of [DeepSpeed]; [stage-3 guide], "Code Flow for Forward Pass".
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext

import torch

from deepzero.comm.collectives import Communicator
from deepzero.config.zero import ZeroConfig
from deepzero.runtime.zero.buffer_pool import BufferPool
from deepzero.runtime.zero.fetch_plan import FetchPlan, ModuleUse, compile_plan
from deepzero.runtime.zero.parameter_all_gather import BACKWARD, EVALUATION, FORWARD, ON_REQUEST, ON_REQUEST_BROADCAST
from deepzero.runtime.zero.partition_parameters import ZeroParameter, ZeroParamStatus
from deepzero.runtime.zero.partitioned_bucket import PartitionedBucket
from deepzero.utils.dispatch import outliving_pass
from deepzero.utils.errors import PartitionedUseError

log = logging.getLogger(__name__)


def in_backward() -> bool:
    """Whether autograd runs a backward pass on this thread now."""
    return torch._C._current_graph_task_id() != -1


NOTHING_PLANNED = ModuleUse((), False, "")
"""The plan's answer to a use for which it has nothing: only what the use itself needs is fetched."""

WARN_AFTER_DROPS = 10
"""Plans dropped before a warning that they do not last."""


class ModuleTrace:
    """The uses of one optimizer step, or of one evaluation (``what``), in order; complete, the next one's plan."""

    def __init__(self, what: str, bucket_numels: dict[int, int], limits: ZeroConfig, is_rank0: bool) -> None:
        self.what, self.bucket_numels, self.limits, self.is_rank0 = what, bucket_numels, limits, is_rank0
        self._recorded: list[ModuleUse] = []
        # None while the order is recorded.
        self.plan: FetchPlan | None = None
        # Index, in the step, of the use under way; -1 before the first.
        self.position = -1
        # Keys that an evaluation has released though training's plan had not: gathering them again is counted apart.
        self.evicted: set[int] = set()
        self.interrupted: frozenset[int] = frozenset()  # keys of the use that an evaluation has interrupted
        self.dropped = 0

    def advance(self, use: ModuleUse) -> ModuleUse | None:
        """The next use. Returns the plan's, which says what happens at it; None while recording."""
        if self.interrupted.issuperset(use.keys) and not use.on_demand:
            return NOTHING_PLANNED  # the interrupted use goes on; it was counted when it began
        following = self.position + 1
        if self.plan is not None:
            # A use on demand goes unnoticed where the bucket is gathered anyway: such uses of the plan are passed over.
            uses, position = self.plan, following
            while position < len(uses) and uses[position].keys != use.keys and uses[position].on_demand:
                position += 1
            if position < len(uses) and uses[position].keys == use.keys:
                self.position = position
                return uses[position]
            if use.on_demand:  # a new one: it is fetched, and the plan's next use is still to come
                return NOTHING_PLANNED
            self._drop(self.plan, following, use.where)
        self._recorded.append(use)
        self.position = following
        return None

    def _drop(self, plan: FetchPlan, following: int, where: str) -> None:
        if self.dropped == 0 and self.is_rank0:
            expected = plan[following].where if following < len(plan) else "the end"
            log.warning(
                "%s: the order of modules changed at %s (before: %s); recording it anew", self.what, where, expected
            )
        self.dropped += 1
        if self.dropped == WARN_AFTER_DROPS and self.is_rank0:
            log.warning(
                "%s: the order of modules has changed %d times; without a plan that lasts nothing is prefetched",
                self.what, WARN_AFTER_DROPS,
            )  # fmt: skip
        # The step has followed the plan so far, so only the rest is recorded anew.
        self._recorded, self.plan = list(plan[:following]), None

    def completed(self, key: int) -> None:
        """The backward pass has all gradients of a bucket: a plan need not keep it gathered for them any longer."""
        if self.plan is None and self._recorded:
            self._recorded[-1].completes.add(key)

    def close(self) -> bool:
        """Compile what was recorded, if anything; the next use is the first again. Returns whether the plan is new."""
        before, end = self.plan, self.position + 1
        # A step that ended before its plan did drops it; what came makes a new plan.
        if self.plan is not None and not all(use.on_demand for use in self.plan[end:]):
            self._drop(self.plan, end, "the end")
        if self.plan is None and self._recorded:
            limits = self.limits
            self.plan = compile_plan(
                self._recorded, self.bucket_numels, limits.stage3_prefetch_bucket_size,
                limits.stage3_max_reuse_distance, limits.stage3_max_live_parameters,
            )  # fmt: skip
        self.position, self.interrupted = -1, frozenset()
        return self.plan is not before

    def reset(self) -> None:
        """Begin again at the first use, after a pass that broke off. What was recorded of it is dropped."""
        self._recorded = []
        self.position, self.interrupted = -1, frozenset()


class PartitionedParameterCoordinator:
    """Fetches and releases buckets along the trace.

    A bucket's position in ``buckets`` is its key. Gathered buckets lie in the first of ``pools``, quantised messages
    (qwZ) in the second. ``limits`` are :func:`limit_lookahead`'s. While the order is recorded, at most
    ``recording_numel`` elements are held, or what one use needs.
    """

    def __init__(
        self,
        buckets: Sequence[PartitionedBucket],
        limits: ZeroConfig,
        recording_numel: int,
        comm: Communicator,
        pools: Sequence[BufferPool],
    ) -> None:
        self.buckets, self.limits, self.comm = list(buckets), limits, comm
        comm.ledger.untracked_kinds |= {EVALUATION, ON_REQUEST, ON_REQUEST_BROADCAST}
        # Called when plans, or the buckets' all-gather strategies, have changed; the memory model predicts from them.
        self.on_plan: Callable[[], None] = lambda: None
        self._recording_numel = min(recording_numel, limits.stage3_max_live_parameters)
        # Elements that a gathered bucket takes, padding included. With one rank none, so no limit releases it early.
        self.bucket_numels = {bucket.key: 0 if bucket.shard_is_buffer else bucket.in_layout.numel for bucket in buckets}
        self.training, self.evaluation = (
            ModuleTrace(what, self.bucket_numels, limits, comm.rank == 0) for what in ("training", "evaluation")
        )
        self._trace = self.training
        # Keys of the use under way: its buckets are gathered, and stay so until the next use.
        self.current: frozenset[int] = frozenset()
        # Keys of the buckets that are gathered or in flight, by last use, the oldest first.
        self.live: dict[int, None] = {}
        # Set by ``overlap_param_gather.py``, whose step fetches for the next one. Called at every use in training, with
        # its record: returns the keys of what was fetched ahead, and is counted already.
        self.adopt_ahead: Callable[[ModuleUse], Sequence[int]] = lambda use: ()
        self.on_release_all: Callable[[], None] = lambda: None  # called when all is released
        self.pool, self.pools = pools[0], pools
        self.pool.bucket_numels = {key: numel for key, numel in self.bucket_numels.items() if numel}
        self._to_simulate = False  # plans are new, and their buffers are not found out yet
        # The block of activation checkpointing that is recomputed now (0: none); how many there were in this step.
        self._recomputing = self._blocks_recomputed = 0
        self.live_numel = self.max_live_numel = 0

    # ---- what the hooks call -----------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """The outermost module is entered: in training the trace goes on, an evaluation begins at its first use."""
        if in_backward():
            # Hooks on saved tensors are there: non-reentrant checkpointing's, which keep views as they are.
            if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
                self._blocks_recomputed += 1
                self._recomputing = self._blocks_recomputed
                # Its first module begins a new use, even of buckets that are here: from there on views are kept.
                self.current = self.training.interrupted = frozenset()
        elif torch.is_grad_enabled():
            self._switch(self.training)
        else:
            if self.training.position < 0:  # between two steps: what was fetched ahead for the next one is released
                self.release_all()
            self._switch(self.evaluation)
            self._trace.reset()

    def end_forward(self, broken_off: bool) -> None:
        """The outermost module is left. An evaluation releases all; ``broken_off``: its plan stays as it was."""
        if in_backward():
            self._recomputing = 0
        elif self._trace is self.evaluation:
            changed = not broken_off and self._trace.close()
            try:
                self.release_all(discard=broken_off)
            finally:  # also where a write raises: on the other ranks the evaluation ends all the same
                if changed:
                    self._plans_changed()
                if self.training.position < 0:
                    self.pool.end_step()
                self._switch(self.training)  # now, as the begin of a backward pass goes unnoticed

    def _switch(self, trace: ModuleTrace) -> None:
        if trace is not self._trace:
            self._trace.interrupted = self.current or self._trace.interrupted
            if trace is self.evaluation:
                self.training.evicted.update(self.live)
            self._trace, self.current = trace, frozenset()

    @outliving_pass()  # once, around all that happens to buckets
    def fetch_sub_module(
        self, keys: tuple[int, ...], where: str, on_demand: bool = False, show_params: bool = True
    ) -> None:
        """1 fetch: gather buckets, and prefetch, before a module's forward pass and in its backward pass.

        Args:
            keys: bucket numbers, sorted: of a module's parameters and those registered for it, or of a saved weight.
            where: the module or parameter, for events and messages.
            on_demand: noticed only because the bucket was not there; it need not be noticed every time.
            show_params: they are used themselves, and not only views of the buckets.
        """
        if not on_demand and self.current.issuperset(keys):
            # The same buckets as the module before: no new use.
            for key in keys if show_params else ():
                self.buckets[key].show()
            return
        if on_demand or self._trace.interrupted.issuperset(keys):
            # With a use on demand the module's own buckets stay gathered; with one that goes on behind an evaluation
            # all of its buckets come back, so that the modules that follow in it make no new use.
            keys = tuple(sorted(self.current.union(self._trace.interrupted, keys)))
        use, planned = self._note_use(keys, where, on_demand)
        ahead = self.adopt_ahead(use) if self._trace is self.training else ()
        # Release before fetching: the buffers that become free are those that the fetch takes.
        self.release_sub_module(keys, planned)
        # Mine first, as it is needed first. The order is that of the plan or of the keys, so the same on all ranks:
        # collectives that ranks launch in different orders are paired wrongly, and hang or exchange garbage.
        fetches = [(key, use.backward, "") for key in keys if key not in self.live]
        if planned is not None:
            fetches += [(key, backward, "prefetch") for key, backward in planned.prefetch if key not in self.live]
        for key, backward, note in fetches:
            bucket = self.buckets[key]
            kind = BACKWARD if backward else FORWARD
            if self._trace is self.evaluation:
                kind = EVALUATION
            self.comm.ledger.note("fetch", f"{note} at {where}" if note else where, bucket.strategy.where)
            if bucket.status is ZeroParamStatus.NOT_AVAILABLE:  # else GatheredParameters has it
                # What was launched ahead, or before an evaluation, and released since, is counted already.
                counted_before = key in ahead or key in self._trace.evicted
                counted = self.comm.ledger.outside_step() if counted_before else nullcontext()
                with self.comm.ranges.span("fetch", key, where, note), counted:
                    bucket.launch(kind, may_quantize=True)
                use.fetch += (key,)
            self.count_live(key, where)
        if not on_demand:  # what the module uses next is compared with its own buckets
            self.current = frozenset(keys)
            self._trace.interrupted = frozenset()
        # All is launched before anything is waited for: while this rank waits, and then computes, the next ones travel.
        for key in keys:
            bucket = self.buckets[key]
            # DeepSpeed's InflightParamRegistry lists them; GatheredParameters may have waited in between.
            if bucket.status is ZeroParamStatus.INFLIGHT:
                with self.comm.ranges.waiting_for_module(where):
                    bucket.wait()
            if show_params and not bucket.shown:
                bucket.show()  # the parameters become views of it
            self.live.pop(key, None)
            self.live[key] = None  # last in the order of use

    def _note_use(self, keys: tuple[int, ...], where: str, on_demand: bool) -> tuple[ModuleUse, ModuleUse | None]:
        """The record of a use that begins, and what is planned for it; None: nothing, as the order is recorded."""
        backward = in_backward()
        self.comm.flight_recorder.position = f"{'backward' if backward else 'forward'} of {where}"
        use = ModuleUse(keys, backward, where, on_demand, self._recomputing)
        planned = self._trace.advance(use)
        if not self.pool.uses:
            self.training.evicted.clear()
            self.pool.begin_step()
            for messages in self.pools[1:]:  # of one size, kept from step to step
                messages.most_numel = messages.numel()
        self.pool.uses.append(use)  # what is held at each use tells the pool how many buffers the plan will take
        return use, planned

    def release_sub_module(self, next_keys: tuple[int, ...], planned: ModuleUse | None) -> None:
        """2: before ``next_keys`` are fetched, release what the modules before needed and the plan lets go.

        While recording (``planned`` is None) there is nothing to look ahead to: what was used longest ago goes, so that
        little more than two buckets is held.
        """
        for key in planned.release if planned is not None else ():
            self.pool.released(key, self._release(key))  # True: no view of it is held
        # A use on demand that the plan does not have may need room that the plan did not leave.
        limit = self._recording_numel if planned is None else self.limits.stage3_max_live_parameters
        total = self.live_numel + sum([self.bucket_numels[key] for key in next_keys if key not in self.live])
        if total <= limit:  # nearly always: with one rank all are live, and are not looked through
            return
        for key in [key for key in self.live if key not in next_keys]:
            total -= self.bucket_numels[key]
            self.pool.released(key, self._release(key))
            if total <= limit:
                break

    def end_passes(self) -> None:
        """The boundary: the trace of training is complete, and all values are about to change.

        Raises:
            PartitionedUseError: a gathered parameter was written. The step has ended as on the other ranks.
        """
        self._switch(self.training)
        try:
            self.release_all()
        finally:  # the other ranks, whose program wrote nothing, end the step, and so does this one
            if self.training.close():
                self.pool.note_recorded()
                self._plans_changed()
            elif self._to_simulate:
                self.predict_anew()
            self._blocks_recomputed = 0
            self.pool.end_step()

    def _plans_changed(self) -> None:
        # Simulating costs several passes over the plan. Where plans do not last, it waits until one has lasted a step.
        self.predict_anew(simulate=max(self.training.dropped, self.evaluation.dropped) < WARN_AFTER_DROPS)

    def follow(self, plan: FetchPlan) -> None:
        """Let training follow a rehearsed plan from its next use on, which has to be the first of a step."""
        self.training.plan = plan
        self.predict_anew()
        self.pool.end_step()

    def plans(self) -> list[FetchPlan]:
        """The plans that there are, training's first."""
        return [trace.plan for trace in (self.training, self.evaluation) if trace.plan is not None]

    def predict_anew(self, simulate: bool = True) -> None:
        """A plan is new, or buckets travel in another way: what later steps send and hold follows from the plans.

        With ``simulate`` the buffers that the plans take are found out too; that costs several passes over them.
        """
        if not (plans := self.plans()):
            return
        if simulate:
            self.pool.expect(plans)
        self._to_simulate = not simulate
        self.on_plan()

    def reset(self) -> None:
        """A pass broke off; what it has written to parameters goes with it."""
        self.release_all(discard=True)
        self.training.reset()
        self._recomputing = self._blocks_recomputed = 0
        self.pool.end_step()

    @outliving_pass()
    def hide_all(self) -> None:
        """The outermost module is left: buckets stay gathered, but their parameters become placeholders."""
        for key in self.live:
            if self.buckets[key].shown:
                self.buckets[key].hide_unused()

    @outliving_pass()
    def release_all(self, discard: bool = False) -> None:
        """Release every bucket; with ``discard`` without a check for writes."""
        self.current = frozenset()
        self.on_release_all()
        if self.pool.uses:
            self.pool.uses.append(ModuleUse((), False, "", release=tuple(self.live)))
        refused: Exception | None = None
        for key in list(self.live):
            try:
                self._release(key, discard)
            except PartitionedUseError as error:  # the others are released all the same
                refused = error
        # Raised last: a bucket that stayed gathered would show old values in the next step.
        if refused is not None:
            raise refused

    def has(self, bucket: PartitionedBucket) -> bool:
        """Whether the bucket is one of this engine's."""
        return 0 <= bucket.key < len(self.buckets) and self.buckets[bucket.key] is bucket

    def clear(self) -> None:
        """Let go of free buffers."""
        for pool in self.pools:
            pool.clear()

    # ---- one bucket more, one less ---------------------------------------------------------------------------------

    def count_live(self, key: int, where: str) -> None:
        """Count a bucket that was launched among those that are gathered, until it is released."""
        self.live_numel += self.bucket_numels[key]
        # Over the limit for the first time.
        if self.live_numel > self.limits.stage3_max_live_parameters >= self.max_live_numel and self.comm.rank == 0:
            log.warning(
                "%s needs %d gathered elements at once, more than stage3_max_live_parameters=%d (said once)",
                where, self.live_numel, self.limits.stage3_max_live_parameters,
            )  # fmt: skip
        self.max_live_numel = max(self.max_live_numel, self.live_numel)
        self.live[key] = None
        self.buckets[key].release_when_unreferenced = False

    def _release(self, key: int, discard: bool = False) -> bool:
        """Release a bucket, unless ``GatheredParameters`` holds it. Returns whether no view of its buffer is held."""
        bucket = self.buckets[key]
        self._trace.evicted.discard(key)
        if key not in self.live:
            return bucket.status is ZeroParamStatus.NOT_AVAILABLE
        del self.live[key]
        self.live_numel -= self.bucket_numels[key]
        # A prefetch that was not used: until it has arrived, the all-gather writes into the buffer.
        if bucket.status is ZeroParamStatus.INFLIGHT:
            bucket.wait()
        if bucket.gather_refs:
            # The program reads it inside GatheredParameters, whose end will release it.
            bucket.release_when_unreferenced = True
            return False
        self.comm.ledger.note("release", "", bucket.strategy.where)
        with self.comm.ranges.span("release", key, bucket.params[0]._record.name if bucket.params else ""):
            return bucket.release(discard)


def keys_of(params: Iterable[ZeroParameter]) -> tuple[int, ...]:
    """The buckets of ``params``, sorted."""
    return tuple(sorted({param._record.placed()[0].key for param in params}))
