"""Stage 3: partitioned parameters, besides gradients and optimizer states.

A rank keeps a W-th of every bucket of parameters, and puts a bucket together just in time, twice per micro-batch: for
the forward and for the backward pass. Memory ``(c + a + K)Ψ/W`` (Ψ parameters; c bytes of the compute dtype, a of
``grad_S``, K of masters and moments), plus what is gathered at the moment. Volume per step: all-gather ``Ψ(W-1)/W``
forward, the same backward, reduce-scatter ``Ψ(W-1)/W``: three in place of stage 2's two. What saves some of it: the
last buckets of the forward pass are the first of the backward pass, and stay; weights that no backward formula reads
(embeddings) are not fetched for it; parameters of at most ``stage3_param_persistence_threshold`` elements stay whole,
and travel once per step.

[Note: one parameter's way]
    Function by function, in the order of a step. To follow a parameter read these; what else their files hold is
    building, bookkeeping, and uses that are refused.

    0 build           ``stage_1_and_2.py:ParamGroup._keep_fragments``: a fragment stays, in ``shard_S`` and master
    1 fetch           ``module_hooks.py:pre_forward``: its module is about to run, and needs its bucket
                      ``partitioned_param_coordinator.py:fetch_sub_module``: launch mine, launch the next, wait for mine
                      ``partitioned_bucket.py:launch``: into a buffer, which ``buffer_pool.py:BufferPool.take`` gives
                      ``parameter_all_gather.py:PlainAllGather.launch``: each rank's shard, to all ranks, in place
                      ``partitioned_bucket.py:wait``, ``show``: complete; the parameter is a view of the buffer
                      ``module_hooks.py:pack``: autograd saves the weight, and is given where to find it instead
    2 release         ``partitioned_param_coordinator.py:release_sub_module``, from the next fetch
                      ``partitioned_bucket.py:release``: a placeholder; the buffer goes back, by ``BufferPool.give``
    1 fetch           ``module_hooks.py:unpack``: the backward pass asks for the weight; ``fetch_sub_module`` as before
    3 gradient ready  ``ZeroStage3.reduce_ready_gradient``: it leaves as in stage 2, by ``gradient_reduction.py``; while
                      recording, ``_launched`` notes that its bucket has left: from there a fetch may release it
    4 boundary        ``ZeroStage3.end_passes``: all is released, and the order of fetches becomes a plan
                      (``ModuleTrace.close``, ``compile_plan``); ``reduce_gradients``: the last sums have arrived
    5 step            ``optimizer_shard.py:OptimizerShard.step``, on the masters
    6 publish         ``PartitionedParamGroup.cast_masters``: into ``shard_S``; only persistent parameters are sent

Sources: P_os+g+p in [ZeRO], sections 5.3 and 7.2.2; [stage-3 guide]; ``stage3.py`` in [DeepSpeed].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from deepzero.comm.collectives import Communicator
from deepzero.config.zero import ZeroConfig
from deepzero.layout import Bucket, Fragment
from deepzero.placement import GroupPlan
from deepzero.runtime.zero.gradient_reduction import GradientReducer
from deepzero.runtime.zero.guards import check_writes, unregister_owners
from deepzero.runtime.zero.module_hooks import ModuleHooks
from deepzero.runtime.zero.parameter_all_gather import PlainAllGather, send_to_replicas
from deepzero.runtime.zero.partition_parameters import (
    ParamRecord,
    PartitionedParameter,
    PersistentParameter,
    ZeroParameter,
    ZeroParamStatus,
    _all_gather_params,
    as_zero_parameter,
    unpartition,
)
from deepzero.runtime.zero.partition_plan import build_pool, gather_builders, is_real, limit_lookahead
from deepzero.runtime.zero.partitioned_bucket import PartitionedBucket, renew_copies
from deepzero.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepzero.runtime.zero.stage_1_and_2 import HostAllocator, ParamGroup, ZeroStage1And2, move_whole, take_values

HostGather = Callable[[Bucket, torch.dtype, Communicator, str], PlainAllGather]
"""As :class:`PlainAllGather`, for a shard in host memory."""

# ---- 0 build: the whole model ----------------------------------------------------------------------------------------


def partition_model(
    names: Mapping[nn.Parameter, str],
    planned: Sequence[GroupPlan],
    lookahead: int,
    config: ZeroConfig,
    comm: Communicator,
    dtype: torch.dtype,
    allocate: HostAllocator | None,
    host_gather: HostGather | None,
) -> tuple[list[ParamGroup], PartitionedParameterCoordinator]:
    """Cut the parameters, group by group; on any device, whole or partitioned already by ``zero.Init``.

    ``planned`` and ``lookahead`` (elements) are from :func:`plan_partitioning`; ``dtype`` is the compute dtype;
    ``allocate`` and ``host_gather`` belong to what lives in host memory. Returns the groups as they were planned, the
    frozen ones last, and what fetches their buckets.
    """
    partitioned = {param for group in planned if group.partitioned for param in group.params}
    trained = {param for group in planned if group.trained for param in group.params}
    for param in (p for p in names if p not in partitioned):
        # ``zero.Init`` cuts everything, as nothing tells it which parameters will be persistent.
        if isinstance(param, PartitionedParameter):
            unpartition(param)
        if param not in trained:
            move_whole(param, comm, dtype if is_real(param) else param.dtype)
    pool = build_pool(dtype, config, comm)
    for_trained, for_frozen, messages = gather_builders(planned, config, comm, dtype)

    groups: list[ParamGroup] = []
    buckets: list[PartitionedBucket] = []

    def build_bucket(group: PartitionedParamGroup, in_layout: Bucket) -> PartitionedBucket:
        key = len(buckets)
        make = PlainAllGather if host_gather is None or not group.placement.keeps_on_host(in_layout) else host_gather
        plain = make(in_layout, dtype, comm, f"bucket {key}")
        strategy = for_trained(plain) if group.placement.trained else for_frozen(plain)
        params = [group.params[slot.index] for slot in in_layout.slots]
        buckets.append(PartitionedBucket(key, in_layout, params, group.param_shard(in_layout), strategy, pool, group))
        return buckets[-1]

    for group in planned:
        labels = [names[p] for p in group.params]
        if group.partitioned:
            groups.append(PartitionedParamGroup(labels, group, dtype, comm, allocate, build_bucket))
        else:
            groups.append(ParamGroup(labels, group, dtype, comm, allocate))
    # While the order of modules is recorded, room for two buckets: the one in use and the next.
    largest = max((bucket.in_layout.numel for bucket in buckets), default=0)
    limits, pools = limit_lookahead(config, lookahead), [pool, *messages]
    coordinator = PartitionedParameterCoordinator(buckets, limits, 2 * largest, comm, pools)
    # MiCS, and frozen parameters under hpZ: the first gather finds its secondary shards already.
    send_to_replicas(buckets)
    return groups, coordinator


# ---- 0 build: one group of partitioned parameters --------------------------------------------------------------------

HOST_PARAMETERS = "host_parameters"
WRITTEN = -1  # in place of the version of a parameter whose master has not followed yet


class PartitionedParamGroup(ParamGroup):
    """One group of partitioned parameters: ``shard_S``, ``master_S``, and the buckets over them.

    What stages 1 and 2 keep whole (``flat_P``) is here put together bucket by bucket, when it is needed. Masters,
    fragments and the order of elements in a rank's shard are the same in both. Frozen parameters are partitioned too,
    in groups of their own that no optimizer sees, without masters.

    ``names`` and ``planned.params`` are in the order of the layout; the parameters become partitioned, and those that
    ``zero.Init`` has cut are cut anew. ``allocate`` gives what lives in host memory; ``build_bucket`` makes a bucket of
    the layout when its shard is filled.
    """

    params: list[ZeroParameter]

    def __init__(
        self,
        names: Sequence[str],
        planned: GroupPlan,
        dtype: torch.dtype,
        comm: Communicator,
        allocate: HostAllocator | None,
        build_bucket: Callable[[PartitionedParamGroup, Bucket], PartitionedBucket],
    ) -> None:
        # Where shard_S lies; master_S is the base class's.
        self.shard_on_host: torch.Tensor | None = None
        if planned.host_parameter_numel and allocate is not None:
            self.shard_on_host = allocate(HOST_PARAMETERS, planned.host_parameter_numel, dtype)
        # Around a write to the shard; may refuse.
        self.around_write: Callable[[], AbstractContextManager[None]] = nullcontext
        super().__init__(names, planned, dtype, comm, allocate)
        self.buckets = [build_bucket(self, bucket) for bucket in self.layout.buckets]

    def _take_values(self, index: int) -> torch.Tensor:
        """1-D and whole: rank 0's values, or what ``zero.Init`` has partitioned. A placeholder is left."""
        param = as_zero_parameter(self.params[index], self.names[index])
        if (bucket := param._record.bucket) is None:
            values = take_values(param, self.comm)
        else:
            _all_gather_params([bucket])
            values = bucket.value(param).reshape(-1)
            bucket.release()  # the view outlives it: while it is held, the pool does not use the buffer again
            param._record.bucket = param._record.slot = None  # its shard is needed no more
        param.hide(self.dtype, self.device)
        return values

    def _allocate_params(self) -> None:
        numel = self.layout.shard_numel - self.placement.host_parameter_numel
        self.shard_on_device = torch.zeros(numel, dtype=self.dtype, device=self.device)

    def _attach_params(self, shapes: Sequence[torch.Size]) -> None:
        """The parameters are placeholders; buckets lie over views of ``shard_S``, and show them."""
        self._versions = [0] * len(self.params)

    # ---- the group's tensors -----------------------------------------------------------------------------------------

    @property
    def parameter_storage(self) -> list[torch.Tensor]:
        """What this rank keeps of the parameters on its device: its shard, or what of it is not in host memory."""
        return [self.shard_on_device]

    def _shard(self, start: int, numel: int) -> torch.Tensor:
        """``shard_S[start : start + numel]``, wherever it lies; no bucket's shard crosses from host to device."""
        cut = self.placement.host_parameter_numel
        if self.shard_on_host is not None and start < cut:
            return self.shard_on_host[start : start + numel]
        return self.shard_on_device[start - cut : start - cut + numel]

    def param_shard(self, bucket: Bucket) -> torch.Tensor:
        """This rank's shard of ``bucket``: 1-D ``[shard_numel]``, compute dtype, padding included."""
        return self._shard(bucket.shard_offset, bucket.shard_numel)

    def param_fragment(self, fragment: Fragment) -> torch.Tensor:
        """This rank's elements of one parameter: 1-D, compute dtype."""
        return self._shard(fragment.shard_start, fragment.numel)

    # ---- writes by the program ---------------------------------------------------------------------------------------

    @contextmanager
    @torch.no_grad()
    def writing(self, param: ZeroParameter | None = None) -> Iterator[None]:
        """A context for a write to the shard; the master of ``param`` takes over what was written before a step."""
        if param is not None:
            self.before_write()
            self._versions[param._record.placed()[1].index] = WRITTEN
        with self.around_write():
            yield

    def write(self, index: int, values: torch.Tensor) -> None:
        """As in stages 1 and 2."""
        with self.writing():  # in fp32 the master is the shard
            super().write(index, values)

    def _write_param(self, index: int, values: torch.Tensor) -> None:
        # The master takes over the cast values; then :meth:`write` adds the bits that the cast has lost.
        self.params[index]._record.placed()[0].write(self.params[index], values)

    @torch.no_grad()
    def sync_masters_from_params(self, refuse: bool = True) -> None:
        """Before a step; not at each write: values that come and go between steps (an average's) take no bits along.

        With ``refuse`` a write to a gathered parameter raises that was not permitted.
        """
        for bucket in self.buckets:
            if refuse and bucket.status is ZeroParamStatus.AVAILABLE:
                check_writes(bucket, every_element=bucket.gather_refs > 0)  # what the program holds is gathered anew
        for index in (index for index, version in enumerate(self._versions) if version == WRITTEN):
            self._versions[index] = 0
            self._master_follows(index)

    def written(self) -> list[str]:
        """None: in stage 3 a write is refused, or marked where it is permitted."""
        return []

    # ---- 6 publish ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def cast_masters(self, bucket: PartitionedBucket) -> None:
        """6: cast the masters of a bucket on which the device steps into its shard. Nothing is sent."""
        if (masters := self.separate_masters(*self.part_of(bucket.in_layout))) is not None:
            bucket.shard.copy_(masters)
        # In fp32 the optimizer has written the shard itself. Either way graphs of older values end here.
        bucket.mark_updated(None)

    @torch.no_grad()
    def destroy(self) -> None:
        """Let the parameters belong to no engine: whole, plain parameters. A collective."""
        for bucket in self.buckets:
            _all_gather_params([bucket])
            # Each parameter takes a copy of its values, so one bucket is held twice at a time and not the model.
            unregister_owners(bucket.params)
            for param in bucket.params:
                unpartition(param)
            bucket.params = []  # they have values of their own now
            bucket.release(discard=True)
            bucket.strategy.secondary_shard = None


def mark_persistent(model: nn.Module, groups: Sequence[ParamGroup]) -> None:
    """Give parameters that stay whole DeepSpeed's attributes: ``ds_id``, ``ds_status`` and the like."""
    slots = {p: (g, s) for g in groups for p, s in zip(g.params, g.layout.slots, strict=True)}
    for name, param in model.named_parameters():
        if type(param) is nn.Parameter and param.numel():
            record = ParamRecord(param, name)
            record.group, record.slot = slots.get(param, (None, None))
            param.__class__ = PersistentParameter
            param._record = record  # type: ignore[attr-defined]


# ---- 1 to 6 ----------------------------------------------------------------------------------------------------------


class ZeroStage3(ZeroStage1And2):
    """Partitioned parameters, gradients, optimizer states. Inherited methods treat persistent parameters as stage 2.

    ``model`` gets the hooks; ``gradients`` are those of all trainable parameters, partitioned or persistent: one
    reducer serves both, so that buckets are launched in one order. ``groups`` afterwards are the persistent ones.
    """

    def __init__(
        self,
        model: nn.Module,
        gradients: GradientReducer,
        groups: Sequence[ParamGroup],
        coordinator: PartitionedParameterCoordinator,
    ) -> None:
        super().__init__([group for group in groups if not group.placement.partitioned], gradients, gradients.comm)
        self._model, self.coordinator = model, coordinator
        partitioned = [group for group in groups if isinstance(group, PartitionedParamGroup)]
        self.trained_groups = [group for group in partitioned if group.placement.trained]
        self.frozen_groups = [group for group in partitioned if not group.placement.trained]
        # Buckets whose shards have this step's values already: ``overlap_param_gather.py`` casts some of them earlier.
        self._updated: set[PartitionedBucket] = set()
        mark_persistent(model, self.groups)
        gradients.on_launched = self._launched
        self._at_boundary = False
        # 1 fetch, 2 release: the hooks call the coordinator. A leaf module's backward pass is over when its input has a
        # gradient: experts without tokens get none any more.
        leaf_done = lambda params: gradients.leaf_grads_complete(params, self._at_boundary)
        self.hooks = ModuleHooks(model, self.coordinator, leaf_done)
        gradients.leaf_params = self.hooks.leaf_params

    # ---- 3 gradient ready --------------------------------------------------------------------------------------------

    def reduce_ready_gradient(self, param: nn.Parameter, is_reduction_boundary: bool) -> None:
        """3: launch every bucket whose gradients are complete and that is next in order."""
        # Leaf modules are sent outside of this call, when their input has its gradient (``leaf_done``).
        self._at_boundary = is_reduction_boundary
        # For error messages: where each rank was, when ranks have stopped making the same calls.
        if (record := vars(param).get("_record")) is not None:
            self.comm.flight_recorder.position = f"backward, gradient of {record.name}"
        super().reduce_ready_gradient(param, is_reduction_boundary)

    def _bucket_of(self, group: int, bucket: Bucket) -> PartitionedBucket | None:
        """``bucket`` of ``gradients.groups[group]``, with its tensors; None: its parameters are persistent."""
        found = self.gradients.groups[group]
        return found.buckets[bucket.index] if isinstance(found, PartitionedParamGroup) else None

    def _launched(self, group: int, bucket: Bucket) -> None:
        # While the order is recorded, note that this bucket's gradients are complete: the plan may release it then.
        if (found := self._bucket_of(group, bucket)) is not None:
            self.coordinator.training.completed(found.key)

    def backward_end(self, is_reduction_boundary: bool) -> None:
        """End a backward pass."""
        self.hooks.end_of_backward()
        super().backward_end(is_reduction_boundary)

    def forget_pass(self) -> None:
        """End a pass that left no gradient, though it may have gone through leaf modules."""
        self.hooks.end_of_backward()
        super().forget_pass()

    # ---- 4 boundary --------------------------------------------------------------------------------------------------

    def end_passes(self) -> None:
        """4: release everything, as the step makes its values old; also where a write is found, which raises."""
        self.coordinator.end_passes()

    # ---- 5 step: the optimizer's, over this rank's masters -----------------------------------------------------------

    def uploaded(self, group: int, bucket: Bucket, wait_upload: Callable[[], None] | None) -> None:
        """5, on the host: this rank's shard of a bucket is new. Only the next fetch of it waits for its copy.

        Persistent parameters go to the other ranks while the CPU steps on the next bucket.
        """
        if (found := self._bucket_of(group, bucket)) is None:
            self.launch_all_gather(self.groups.index(self.gradients.groups[group]), bucket, wait_upload)
        else:
            found.mark_updated(wait_upload)

    # ---- 6 publish ---------------------------------------------------------------------------------------------------

    def publish(self) -> None:
        """6: cast masters into ``shard_S``; gather persistent parameters only, and with MiCS renew secondary shards."""
        # Launched first, waited for last: persistent parameters travel while the others' masters are cast, and while
        # secondary shards are renewed.
        self.all_gather_dp_groups()
        for group in self.trained_groups:
            for bucket in group.buckets:
                # Where the CPU steps, its kernel has written the cast parameters, and ``uploaded`` has counted them.
                if not group.placement.steps_on_host(bucket.in_layout) and bucket not in self._updated:
                    group.cast_masters(bucket)
        renew_copies([bucket for group in self.trained_groups for bucket in group.buckets])
        self.wait_all_gathers()

    # ---- between steps -----------------------------------------------------------------------------------------------

    def discard_gradients(self) -> None:
        """Forget this step's gradients, also those under way, and a pass that broke off."""
        # The hooks first: while a module counts as under way, its parameters stay shown.
        self.hooks.reset()
        self.coordinator.reset()
        super().discard_gradients()

    def prepare_writes(self) -> None:
        """Release everything: a write to a partitioned parameter goes into every rank's shard."""
        self.coordinator.release_all()

    def unwinding(self) -> AbstractContextManager[None]:
        """A context for a forward pass: whatever ends it, no module stays under way."""
        return self.hooks.unwinding()

    def destroy(self) -> None:
        """Whole, plain parameters again; no hooks. A collective."""
        # Gathered buckets and hooks first: a parameter that becomes plain must not be a view of a buffer.
        self.coordinator.release_all()
        self.hooks.remove()
        super().destroy()
        for param in self._model.parameters():
            if isinstance(param, PersistentParameter):
                del param._record
                param.__class__ = nn.Parameter  # type: ignore[assignment]
        for group in (*self.trained_groups, *self.frozen_groups):
            group.destroy()
