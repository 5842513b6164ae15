"""``zero.overlap_param_gather``: 6 publish runs under the step and the next forward pass; in stage 3, 1 fetch does.

Without it ``engine.step()`` ends when every bucket of parameters has arrived from the ranks that own its parts. On a
slow link that is a wait for bytes of which most are needed much later. With it::

    optimizer | step on A | step on B | step on C |  engine.step() is over
    wire                  | A to all ranks | B to all ranks | C ...
    forward                                       | A's module | B's module | wait for C | C's module

Buckets are stepped on, and sent, in the order in which the next forward pass uses them: that of their reduction,
backwards. It is the same on all ranks, whatever their modules do. Bytes and bits are those of stages 1 and 2.
Stage 3, whose forward pass fetches in any case, does the first of it early: :class:`OverlappedZeroStage3`.

[Note: nobody reads an old parameter]
    A parameter whose bucket is under way is *hidden*: its class is :class:`HiddenParameter`, and its memory a NaN. A
    program may do anything between two steps, so there are three nets, each for what falls through the one before:

    *a module runs*       its forward pre-hook waits for the buckets of its own parameters. In eval mode the hook waits
                          for all: torch's fast paths there read the parameters of other modules.
    *a parameter is used* ``HiddenParameter.__torch_function__`` waits for its bucket: ``state_dict``, ``param.sum()``,
                          ``.data``, ``copy.deepcopy``, ``torch.save``, a collective, an optimizer, compiled code, a
                          scripted function that is given it.
    *no hook would run*   ``engine.step()`` itself waits before it returns. So it is where anything but the parameters
                          refers to the flat buffer's memory (a view, numpy's array, a graph that saved one), which is
                          counted; where the model is, or has, compiled or scripted code; and for parameters of a class
                          of their own.

    What remains are readers of which torch tells nobody: C++ code that is handed a parameter of a module that is not
    called, ``torch.func`` transforms over the engine's own parameters, ``tensor.set_(param)``. They find NaN, never old
    values. And what has an address alone: a ``data_ptr()`` that was noted before the step, an alias that a hook of the
    optimizer takes while it steps, one that was gained between two steps while another, held since the engine was
    built, was lost. There the program uses the parameter once, and goes on.

Source: ``overlap_param_gather`` of [Megatron-LM], whose users promise that a forward pass comes next.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from deepzero.comm.collectives import Pending
from deepzero.device import Stream, accelerator_of
from deepzero.layout import Bucket
from deepzero.runtime.zero.buffer_pool import references
from deepzero.runtime.zero.fetch_plan import ModuleUse
from deepzero.runtime.zero.gradient_reduction import GradientReducer
from deepzero.runtime.zero.guards import METADATA, notice_scripted_calls
from deepzero.runtime.zero.parameter_all_gather import FORWARD
from deepzero.runtime.zero.partitioned_bucket import PartitionedBucket, ZeroParamStatus
from deepzero.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepzero.runtime.zero.stage3 import PartitionedParamGroup, ZeroStage3
from deepzero.runtime.zero.stage_1_and_2 import ParamGroup, ZeroStage1And2
from deepzero.utils.compile import is_compiled
from deepzero.utils.dispatch import outliving_pass
from deepzero.utils.errors import PartitionedUseError
from deepzero.utils.exit_hooks import before_the_end

UNDER_WAY: weakref.WeakSet[BucketUnderWay | OverlappedZeroStage3] = weakref.WeakSet()
"""Of all engines: hooks are plain functions without a reference to one, so that modules can be copied and pickled.

In stage 3 a module's own hooks wait; it is here to be ended, since the step that it has fetched for may not come.
"""
_CHANGES = threading.RLock()  # around whatever changes or walks it: any thread may wait

# Answered without the values; the stand-in is not contiguous, and the parameter is.
_WITHOUT_VALUES = METADATA - {torch.Tensor.is_contiguous, torch.Tensor.is_shared, torch.Tensor.is_pinned}

Hidden = tuple[nn.Parameter, torch.Tensor, torch.Tensor]
"""A parameter, its view of the flat buffer, and what it shows while that is not complete."""


class BucketUnderWay:
    """One bucket on its way: its parameters are hidden from here until :meth:`wait`, which any thread may call.

    ``wait_upload`` is :meth:`ZeroStage1And2.launch_all_gather`'s, ``home`` the stream of the engine.
    """

    def __init__(
        self, params: Sequence[Hidden], wait_upload: Callable[[], None] | None, gather: Pending, home: Stream
    ) -> None:
        self._params, self._wait_upload, self._gather = params, wait_upload, gather
        # A GPU's stream that first uses a parameter may be one of the program's own. The engine's waits in any case.
        self._home, self._complete = home, accelerator_of(home.device).event(home.device)
        self._lock = threading.RLock()
        with _CHANGES:
            UNDER_WAY.add(self)
        for param, _, stand_in in params:
            param.data = stand_in
            param.__class__ = HiddenParameter
            param._under_way = self  # type: ignore[attr-defined]

    def wait(self) -> None:
        """Return when the values may be read, in stream order on a GPU; the parameters show them. Twice is harmless."""
        with self._lock:
            if self not in UNDER_WAY:
                self._complete.wait()  # another stream has waited, and this one not yet
                return
            with self._home.running():
                if self._wait_upload is not None:
                    self._wait_upload()
                self._gather.wait()
                self._complete.record()
            self._complete.wait()
            for param, values, stand_in in self._params:
                with torch._C.DisableTorchFunctionSubclass():
                    # Elsewhere it is by ``set_``, of which torch tells nobody: the next step sees that, and raises.
                    if torch._C._is_alias_of(param, stand_in):  # type: ignore[attr-defined]
                        param.data = values
                # Last: as long as a parameter is of this class, others who come upon it wait at the lock.
                param.__class__ = nn.Parameter
                vars(param).pop("_under_way", None)
            with _CHANGES:
                UNDER_WAY.discard(self)


class HiddenParameter(nn.Parameter):
    """A parameter whose bucket is under way. See [Note: nobody reads an old parameter]."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer questions about metadata; wait for the buckets of what is used, then do what was asked for."""
        kwargs = kwargs or {}
        if func in _WITHOUT_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        used = hidden_in((args, kwargs))
        for param in used:
            wait_for(param)
        if not used:  # it is inside of something that pytree does not open, or another thread has waited meanwhile
            wait_for_all()
        return func(*args, **kwargs)

    def before_collective(self) -> None:
        """See ``process_group.py``: torch is about to take the memory of what is shown."""
        wait_for(self)

    # Of nn.Parameter's own methods these make a parameter of the same class.
    def __deepcopy__(self, memo: Any) -> nn.Parameter:
        wait_for(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        wait_for(self)
        return self.__reduce_ex__(protocol)


def hidden_in(value: Any) -> list[HiddenParameter]:
    """All hidden parameters inside nested arguments."""
    if not UNDER_WAY:
        return []
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, HiddenParameter)]


def wait_for(param: nn.Parameter) -> None:
    """Wait for a parameter's bucket, whereupon it is a plain parameter; it may be one already."""
    bucket = vars(param).get("_under_way")
    if bucket is not None:
        bucket.wait()


def all_under_way() -> tuple[BucketUnderWay, ...]:
    """Every bucket of every engine that is under way now."""
    with _CHANGES:
        return tuple(one for one in UNDER_WAY if isinstance(one, BucketUnderWay))


def wait_for_all() -> None:
    """Wait for every bucket of every engine."""
    for bucket in all_under_way():
        bucket.wait()


def end_all() -> None:
    """Wait for all that is on its way, and give up what was fetched for a step that does not come: the group ends."""
    with _CHANGES:
        everything = tuple(UNDER_WAY)
    for one in everything:
        with contextlib.suppress(RuntimeError):  # a rank that is gone; whoever needs its part has the error
            one.wait() if isinstance(one, BucketUnderWay) else one.coordinator.release_all(discard=True)


# Others may read, and save, what this rank still sends.
before_the_end(end_all)


def wait_before_forward(module: nn.Module, _: Any) -> None:
    """A forward pre-hook: the module's own parameters are there before it runs, in eval mode all parameters."""
    if torch.compiler.is_compiling() or not UNDER_WAY:  # compiled code's guards use the parameters, and wait
        return
    if not module.training:
        wait_for_all()
    for param in module._parameters.values():
        if isinstance(param, HiddenParameter):
            wait_for(param)


class OverlappedZeroStage1And2(ZeroStage1And2):
    """Stages 1 and 2, whose buckets are published as they are stepped on, and waited for when they are used.

    Arguments are :class:`ZeroStage1And2`'s, and the model, whose modules get a hook.
    """

    def __init__(self, model: nn.Module, groups: Sequence[ParamGroup], gradients: GradientReducer) -> None:
        super().__init__(groups, gradients, gradients.comm)
        notice_scripted_calls(hidden_in)
        self._modules = list(model.modules())
        opaque = any(map(is_opaque, self._modules))
        self._handles = [
            module.register_forward_pre_hook(wait_before_forward, prepend=True)
            for module in self._modules
            if any(param.requires_grad for param in module.parameters()) and not opaque
        ]
        self._hidden = [[self._hide(group, bucket) for bucket in group.layout.buckets] for group in groups]
        self._home = self._current_stream()
        # In the order of their launch; and those of them for which ``step`` has to wait.
        self._under_way: list[BucketUnderWay] = []
        self._without_hook: list[BucketUnderWay] = []
        self._sent: set[tuple[int, int]] = set()  # in this step: group, and bucket of it
        for group in groups:
            group.before_write = partial(self._wait_before_write, group.before_write)
        # Last: what refers to the flat buffers now is this engine's.
        self._holders, self._exposed = [holders(flat) for flat in self.bit16_groups_flat], set[int]()
        # The forward pass uses first what the backward pass reaches last.
        gradients.shard.step_in_turns([[ref] for ref in gradients.order[::-1]], self.publish_bucket)

    def _hide(self, group: ParamGroup, bucket: Bucket) -> list[Hidden]:
        """What is needed to hide a bucket's parameters, and to show them again."""
        nan = torch.full((), torch.nan, device=group.device).to(group.dtype)
        params = [group.params[slot.index] for slot in bucket.slots]
        # A class of its own might be what the program relies on, and would be gone while another one stands there.
        return [(param, param.data, nan.expand(param.shape)) for param in params if type(param) is nn.Parameter]

    def _current_stream(self) -> Stream:
        device = self.comm.device
        return accelerator_of(device).current_stream(device)

    # ---- 4 boundary --------------------------------------------------------------------------------------------------

    def end_passes(self) -> None:
        """4: wait for what no module has used. This step reads, and then writes, what those gathers send."""
        self._home = self._current_stream()  # here, as ``launch_all_gather`` may be called on the upload's
        self.wait_all_gathers()

    def wait_all_gathers(self) -> None:
        """Wait for all-gathers that are under way; then see which groups' parameters can be read without a hook."""
        self._sent.clear()  # of a step that raised
        while self._under_way:
            self._under_way[0].wait()
            self._under_way.pop(0)
        # Now, as messages under way refer to the buffers too.
        opaque = any(is_opaque(module) for module in self._modules)
        now = [holders(flat) for flat in self.bit16_groups_flat]
        self._exposed = {i for i, (a, b) in enumerate(zip(now, self._holders, strict=True)) if opaque or a != b}
        # One that was held when the engine was built, and is gone, must not hide one that comes later.
        self._holders = list(map(min, now, self._holders))

    # ---- 5 step, 6 publish -------------------------------------------------------------------------------------------

    def launch_all_gather(self, group: int, bucket: Bucket, wait_upload: Callable[[], None] | None) -> None:
        """Launch the all-gather of a bucket that is stepped on, and hide its parameters until it is complete."""
        self._sent.add((group, bucket.index))
        super().launch_all_gather(group, bucket, wait_upload)
        parts = self._hidden[group][bucket.index]
        self._under_way.append(BucketUnderWay(parts, *self._gathers.pop(), self._home))
        if group in self._exposed or len(parts) < len(bucket.slots):
            self._without_hook.append(self._under_way[-1])

    def publish_bucket(self, i: int, bucket: Bucket) -> None:
        """Publish a bucket that has not left while the others were stepped on: all, when a checkpoint is loaded."""
        if (i, bucket.index) not in self._sent:
            super().publish_bucket(i, bucket)

    def publish(self) -> None:
        """6: everything is under way. Wait for what could be read without a hook, see the note."""
        self.all_gather_dp_groups()
        self._sent.clear()
        while self._without_hook:
            self._without_hook.pop().wait()

    # ---- between steps -----------------------------------------------------------------------------------------------

    def _wait_before_write(self, before_write: Callable[[], None]) -> None:
        self.wait_all_gathers()
        before_write()

    def prepare_writes(self) -> None:
        """Wait: nothing may be on its way to what is about to be written."""
        self.wait_all_gathers()

    def destroy(self) -> None:
        """Let the parameters, complete and plain, belong to no engine."""
        try:
            self.wait_all_gathers()
        finally:  # a peer may be gone
            for handle in self._handles:
                handle.remove()
            super().destroy()


class OverlappedZeroStage3(ZeroStage3):
    """Stage 3, which steps first on what the next forward pass uses first, and fetches it under the rest of the step.

    What the plan launches at its first use is launched here, in the same order. The next step counts the bytes, and
    waits for them at that use; until then the program may do anything, but write into a shard unseen.
    """

    def __init__(
        self,
        model: nn.Module,
        gradients: GradientReducer,
        groups: Sequence[ParamGroup],
        coordinator: PartitionedParameterCoordinator,
    ) -> None:
        super().__init__(model, gradients, groups, coordinator)
        # Fetched under the step, in this order; what of it is still to come.
        self._first: list[PartitionedBucket] = []
        self._to_fetch: list[PartitionedBucket] = []
        # What was launched, until the first use; and the versions of its groups' shards when the step had ended, until
        # it is released.
        self._ahead: list[PartitionedBucket] = []
        self._sent: dict[PartitionedParamGroup, int] = {}
        coordinator.adopt_ahead, coordinator.on_release_all = self._adopt_ahead, self._forget
        for group in (*self.trained_groups, *self.frozen_groups):
            group.around_write = partial(self._around_write, group)

    # ---- 4 boundary --------------------------------------------------------------------------------------------------

    def end_passes(self) -> None:
        """4: release everything; then see what the step to come fetches, which is stepped on first."""
        self._ahead = []
        super().end_passes()
        plan, buckets = self.coordinator.training.plan, self.coordinator.buckets
        launches = [buckets[key] for key, _ in plan[0].launches] if plan is not None else []
        # All is released but what the program holds gathered.
        first = list(itertools.takewhile(may_go_ahead, launches))
        if first != self._first:  # the plan is new
            order = self.gradients.order[::-1]  # about that of use
            turns = [[ref for ref in order if (self._bucket_of(*ref) in first) is now] for now in (True, False)]
            self.gradients.shard.step_in_turns(turns, self._stepped)
        self._first, self._to_fetch = first, first.copy()
        # Frozen parameters are always what they were.
        self._updated = {bucket for bucket in first if bucket.param_group in self.frozen_groups}

    # ---- 5 step, 6 publish -------------------------------------------------------------------------------------------

    def uploaded(self, group: int, bucket: Bucket, wait_upload: Callable[[], None] | None) -> None:
        """5, on the host: as without the overlap, and then fetch what can be."""
        super().uploaded(group, bucket, wait_upload)
        if (partitioned := self._bucket_of(group, bucket)) is not None:
            self._launch_updated(partitioned)

    def _stepped(self, group: int, bucket: Bucket) -> None:
        partitioned = self._bucket_of(group, bucket)
        if partitioned is not None and partitioned.param_group is not None and partitioned in self._first:
            partitioned.param_group.cast_masters(partitioned)
            self._launch_updated(partitioned)

    @outliving_pass()
    def _launch_updated(self, *updated: PartitionedBucket) -> None:
        """1 fetch: launch, in their order, the fetches whose shards are new, as now those of ``updated`` are."""
        self._updated.update(updated)
        ledger, ranges = self.comm.ledger, self.comm.ranges
        while self._to_fetch and self._to_fetch[0] in self._updated:
            bucket = self._to_fetch.pop(0)
            ledger.note("fetch", "ahead of the next step", f"bucket {bucket.key}")
            with ranges.span("fetch", bucket.key, "the step", "ahead"), ledger.outside_step(next_step=True):
                bucket.launch(FORWARD, may_quantize=True)
            self.coordinator.count_live(bucket.key, "the step")
            self._ahead.append(bucket)
            with _CHANGES:
                UNDER_WAY.add(self)

    def publish(self) -> None:
        """6: what was fetched ahead has been cast; from here on it has to be as it was sent."""
        self._launch_updated()  # frozen ones, where no trained one comes before or after them
        super().publish()
        self._forget()
        owners = {bucket.param_group for bucket in self._ahead if bucket.param_group is not None}
        for bucket in itertools.chain.from_iterable(group.buckets for group in owners):
            bucket.wait_for_update()  # an upload that is put off would count as a write by the program
        self._sent = {group: group.shard_on_device._version for group in owners}

    # ---- between steps -----------------------------------------------------------------------------------------------

    def _adopt_ahead(self, use: ModuleUse) -> list[int]:
        """The first use of the step's: what is here goes into its record."""
        ahead, self._ahead = [bucket.key for bucket in self._ahead], []
        if ahead:
            use.fetch = tuple(key for key in ahead if key in self.coordinator.live)
            for group in list(self._sent):
                self._check_as_sent(group)
            self._sent = {}
        return ahead

    def _check_as_sent(self, group: PartitionedParamGroup) -> None:
        """Raise a :class:`PartitionedUseError` if the shard was written behind a fetch of the step's."""
        if self._sent.get(group) not in (None, group.shard_on_device._version):
            raise PartitionedUseError(
                f"a shard was written between two steps (by ds_tensor, or in fp32 by an optimizer's tensor) when "
                f"zero.overlap_param_gather had sent parts of it to the next forward pass: its parameters are "
                f"{', '.join(group.names[:3])}{' …' * (len(group.names) > 3)}. Write inside "
                "`with deepzero.zero.GatheredParameters(param, modifier_rank=0):`, or switch the setting off"
            )

    @contextlib.contextmanager
    def _around_write(self, group: PartitionedParamGroup) -> Iterator[None]:
        """What is gathered will follow a write by the program; one before it may have been seen by nobody."""
        self._check_as_sent(group)
        yield
        if group in self._sent:
            self._sent[group] = group.shard_on_device._version

    def _forget(self) -> None:
        """All is released, and will be fetched anew. The next step still counts what was sent ahead of it, once."""
        self._to_fetch, self._updated, self._sent = [], set(), {}


def may_go_ahead(bucket: PartitionedBucket) -> bool:
    """Whether a bucket may be fetched under the step before the one that uses it.

    Not where the program holds it gathered; nor with qwZ, whose meter may let it travel in another way from the next
    step on; nor with MiCS, which first renews what it gathers from; nor from host memory, into which the CPU still
    writes.
    """
    strategy = bucket.strategy
    held = bucket.status is not ZeroParamStatus.NOT_AVAILABLE
    return not (held or strategy.quantizes or strategy.mics or strategy.source.on_host)


def is_opaque(module: nn.Module) -> bool:
    """Whether code runs there of which Python sees nothing: compiled or scripted."""
    return is_compiled(module) or isinstance(module, torch.jit.ScriptModule)


def holders(flat: torch.Tensor) -> int:
    """How many tensors and handles refer to a tensor's storage, Python's handle of the storage counted as often as it
    is held.
    """
    storage = flat.untyped_storage()
    return references(flat) + sys.getrefcount(storage)
