"""Stage 3: partitioned parameters, besides gradients and optimizer states.

A rank keeps a W-th part of every parameter and puts a bucket together just in time, twice per micro-batch: for the
forward and for the backward pass. Memory ``(c + a + K)Ψ/W`` (c bytes of the compute dtype, a of ``grad_S``, K of
masters and moments), plus what is gathered at the moment. Volume per step: all-gather ``Ψ(W-1)/W`` forward, the same
backward, reduce-scatter ``Ψ(W-1)/W``: three in place of stage 2's two. What saves some of it: the last buckets of the
forward pass are the first of the backward pass, and stay; weights that no backward formula reads (embeddings) are not
fetched for it; parameters of at most ``stage3_param_persistence_threshold`` elements stay whole, and travel once per
step.

One parameter's way, in the numbers of a training step: **0** ``PartitionedParamGroup`` cuts it → **1** ``ModuleHooks``
→ ``fetch_sub_module`` → its bucket is gathered, the parameter is a view of it → **2** ``release_sub_module``; the next
fetch lets it go → **3** the backward pass asks for the saved weight: fetched once more → **4** its gradient is
complete: ``GradientReducer`` sends it to its owners → **5** ``reduce_gradients`` → **6** ``ShardedStep.step``, by
sub-groups → **7** ``publish``: cast into ``shard_S``; nothing is sent but for persistent parameters.

Sources: P_os+g+p in the ZeRO paper (sections 5.3 and 7.2.2); DeepSpeed's ``stage3.py``.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import nn

from deepzero.comm.collectives import Communicator
from deepzero.comm.reduce_scatter import BucketReducer
from deepzero.layout import Bucket, ParamSlot
from deepzero.offload.copy_streams import PendingCopy
from deepzero.offload.host_gradients import HostGradients
from deepzero.runtime.zero.gradient_reduction import BucketRef, GradAccumulator, GradientReducer
from deepzero.runtime.zero.module_hooks import ModuleHooks
from deepzero.runtime.zero.partition_parameters import (
    ParamRecord,
    PersistentParameter,
    ZeroParameter,
    ZeroParamStatus,
)
from deepzero.runtime.zero.partitioned_bucket import send_to_replicas
from deepzero.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepzero.runtime.zero.partitioned_param_group import PartitionedParamGroup
from deepzero.runtime.zero.sharded_step import ParamGroup
from deepzero.runtime.zero.stage_1_and_2 import FlatParamGroup, ZeroStage1And2


class PersistentStore:
    """Where persistent parameters lie: in a flat buffer, whole on every rank."""

    status = ZeroParamStatus.AVAILABLE

    def __init__(self, group: FlatParamGroup) -> None:
        self.group = group
        self._mine = {fragment.slot.index: fragment for fragment in group.fragments}

    def part_of(self, slot: ParamSlot) -> torch.Tensor:
        """1-D: what this rank's optimizer updates of one parameter."""
        fragment = self._mine.get(slot.index)
        flat = self.group.flat_P[slot.offset : slot.end]
        return flat[:0] if fragment is None else flat[fragment.start : fragment.start + fragment.numel]


class UntrainedHome:
    """Where a parameter lies that is whole and that no optimizer updates: by itself, whole on every rank."""

    status = ZeroParamStatus.AVAILABLE

    def __init__(self, param: nn.Parameter) -> None:
        self._param = weakref.ref(param)

    def part_of(self, slot: ParamSlot) -> torch.Tensor:
        """1-D: all of it."""
        param = self._param()
        return torch.zeros(0) if param is None else param.detach().reshape(-1)


def mark_persistent(model: nn.Module, groups: Sequence[FlatParamGroup]) -> None:
    """Give parameters that stay whole what DeepSpeed's users look at: ``ds_id``, ``ds_status`` and the like."""
    places: dict[nn.Parameter, tuple[PersistentStore, ParamSlot]] = {}
    for group in groups:
        home = PersistentStore(group)
        places |= {param: (home, slot) for param, slot in zip(group.params, group.layout.slots, strict=True)}
    for name, param in model.named_parameters():
        if type(param) is nn.Parameter:
            record = ParamRecord(param, name)
            whole = UntrainedHome(param), ParamSlot(0, 0, param.numel())
            record.home, record.slot = places.get(param, whole)
            param.__class__ = PersistentParameter
            param._zero = record  # type: ignore[attr-defined]


class ZeroStage3:
    """Partitioned parameters, gradients and optimizer states.

    Args:
        model: gets the hooks.
        groups: of trainable parameters, partitioned or persistent.
        frozen: groups of partitioned parameters that are not trained.
        order: the buckets in the order in which their gradients are launched.
        source: the unreduced gradients.
        reducer: sends them to their owners.
        comm: the ranks.
        coordinator: over the buckets of all partitioned groups.
        grad_dtype: dtype of ``grad_S``.
        host: has the gradients that live in host memory; None: none do.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[ParamGroup],
        frozen: Sequence[PartitionedParamGroup],
        order: Sequence[BucketRef],
        source: GradAccumulator,
        reducer: BucketReducer,
        comm: Communicator,
        coordinator: PartitionedParameterCoordinator,
        grad_dtype: torch.dtype,
        host: HostGradients | None = None,
    ) -> None:
        self.comm, self.coordinator, self.groups = comm, coordinator, list(groups)
        self.partitioned = [group for group in groups if isinstance(group, PartitionedParamGroup)]
        self.frozen = list(frozen)
        self._key_of = {
            (g, made.bucket.index): made.key
            for g, group in enumerate(groups)
            if isinstance(group, PartitionedParamGroup)
            for made in group.buckets
        }
        self.gradients = GradientReducer(
            groups,
            order,
            source,
            reducer,
            every_pass=True,
            overlap=True,
            grad_dtype=grad_dtype,
            launched=self._launched,
            host=host,
        )
        # Whole parameters are stage 2's. One reducer serves both kinds of groups: buckets are launched in one order.
        self.persistent = ZeroStage1And2([g for g in groups if isinstance(g, FlatParamGroup)], self.gradients, comm)
        mark_persistent(model, self.persistent.groups)
        self._model = model
        self._boundary = False
        self.hooks = ModuleHooks(model, coordinator, self._leaf_done)
        self.gradients.leaf_params = self.hooks.leaf_params

    # ---- 1, 2, 3: forward and backward, see module_hooks.py ----------------------------------------------------------

    # ---- 4: gradient ready -------------------------------------------------------------------------------------------

    def reduce_ready_gradient(self, param: nn.Parameter, boundary: bool) -> None:
        """4: launch every bucket whose gradients are complete and that is next in order."""
        self._boundary = boundary
        if isinstance(param, ZeroParameter):
            self.comm.position = f"backward, gradient of {param._zero.name}"
        self.gradients.reduce_ready_gradient(param, boundary)

    def _launched(self, entry: BucketRef) -> None:
        key = self._key_of.get((entry.group, entry.bucket.index))
        if key is not None:
            self.coordinator.gradients_complete(key)

    def _leaf_done(self, params: Sequence[nn.Parameter]) -> None:
        """A leaf module's backward pass is over: experts without tokens get no gradient any more."""
        self.gradients.leaf_grads_complete(params, self._boundary)

    def backward_end(self, boundary: bool) -> None:
        """The end of a backward pass."""
        self.hooks.end_of_backward()
        self.gradients.backward_end(boundary)

    def forget_pass(self) -> None:
        """The end of a pass that left no gradient; one through a leaf module may have counted it as complete."""
        self.hooks.end_of_backward()
        self.gradients.forget_pass()

    # ---- 5: boundary -------------------------------------------------------------------------------------------------

    def end_passes(self) -> None:
        """5 boundary: what is gathered becomes old with this step. It is released also when a write to it raises."""
        self.coordinator.end_step()

    def reduce_gradients(self) -> None:
        """5 boundary: then flush and wait."""
        self.gradients.reduce_gradients()

    # ---- 7: publish --------------------------------------------------------------------------------------------------

    def arrived(self, group: int, bucket: Bucket, copy: PendingCopy | None) -> None:
        """6, on the host: my part of a bucket is new. Whoever fetches it next waits for its copy, and nobody else.

        Persistent parameters go to the other ranks while the CPU steps on the next bucket.
        """
        found = self.groups[group]
        if isinstance(found, PartitionedParamGroup):
            found.arrived(bucket, copy)
        elif isinstance(found, FlatParamGroup):
            self.persistent.arrived(self.persistent.groups.index(found), bucket, copy)

    def publish(self) -> None:
        """7: cast masters into ``shard_S``; gather persistent parameters only, and with MiCS tell the other groups."""
        self.persistent.all_gather_dp_groups()
        for group in self.partitioned:
            group.publish()
        send_to_replicas([bucket for group in self.partitioned for bucket in group.buckets])
        self.persistent.wait_all_gathers()

    # ---- bookkeeping -------------------------------------------------------------------------------------------------

    def discard_gradients(self) -> None:
        """Forget this step's gradients, also those under way, and a pass that broke off."""
        self.hooks.reset()
        self.coordinator.reset()
        self.gradients.discard_gradients()

    def before_writes(self) -> None:
        """Nothing stays gathered: what is written to a partitioned parameter goes into every rank's part."""
        self.coordinator.release_all()

    def destroy(self) -> None:
        """Whole, plain parameters again; no hooks. A collective."""
        self.coordinator.release_all()
        self.hooks.remove()
        self.persistent.destroy()
        for param in self._model.parameters():
            if isinstance(param, PersistentParameter):
                del param._zero
                param.__class__ = nn.Parameter  # type: ignore[assignment]
        for partitioned in (*self.partitioned, *self.frozen):
            partitioned.release()
