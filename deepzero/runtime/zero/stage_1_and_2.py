"""Stages 0, 1 and 2: plain data parallelism, partitioned optimizer states, and partitioned gradients.

All keep the parameters whole. Stages 1 and 2 give the optimizer this rank's partition of the fp32 masters, and
all-gather what it has written. They differ in what happens to gradients:

``stage 0``  is the twin that the others are tested against: every rank has all gradients, masters and moments, and
             takes the same step on the whole model. Each bucket is all-reduced when stage 1 would reduce-scatter it.
             The groups are *replicated*, and the reducer hands out whole sums. An exact all-reduce adds up as the
             reduce-scatter does, and then all-gathers the fp32 sums, unrounded: so every rank steps with the bits that
             one rank has in stage 1. Memory ``2Ψ + 2Ψ + KΨ``, and ``4Ψ`` for the sums.
``stage 1``  keeps gradients whole, adds up those of all micro-batches, and reduce-scatters the sums once per step, at
             the boundary. Memory ``2Ψ + 2Ψ + KΨ/W``. With ``overlap_comm`` the buckets of the last micro-batch leave,
             and are freed, while its backward pass goes on: then whole gradients are kept only between micro-batches.
``stage 2``  reduce-scatters each bucket of every micro-batch as soon as it is complete, while autograd goes on,
             and frees the gradients that left: they are whole only until then. Memory ``2Ψ + (2 + K)Ψ/W``.

Ψ is the number of parameters, K the bytes of optimizer state for each (12 for Adam), with 2-byte parameters and
gradients. Here sums are in ``grad_accum_dtype``, by default fp32: ``grad_S`` takes ``4Ψ/W``, in stage 2 instead of
``2Ψ/W``, in stage 1 beside it; and stages 0 and 1 sum several micro-batches in ``4Ψ`` instead of ``2Ψ``.

In elements each step sends: reduce-scatter ``Ψ(W-1)/W`` + all-gather ``Ψ(W-1)/W``, which is what stage 0's all-reduce
sends. With ``reduce_scatter=False`` stage 1 all-reduces the gradients as DeepSpeed's first release did, and uses a W-th
of what it receives: ``2Ψ + Ψ``, 1.5 times the volume for nothing. It is kept so that a test can count that.

The file follows a training step, by the numbers of ``engine.py``; 1 and 2 are stage 3's. How a bucket of gradients is
filled and sent is in ``gradient_reduction.py``, which all stages share.

[Note: the peak of building]
    Building peaks at training's memory or at the given model's, whichever is larger, and one parameter more. Example:
    13 billion fp32 parameters on each of 8 devices take 52 GB, and so does training them in stage 2; the whole model,
    flat buffer and masters at once would take 84.5. So parameters are taken one by one: rank 0's values arrive, and
    this rank keeps its *fragment* of them, in their own dtype, and frees the rest. When only fragments are left, the
    masters are allocated, then the flat buffer. Each fragment is copied into both, and one all-gather for each bucket
    puts the parameters together again, in the compute dtype.

[Note: why fragments]
    The optimizer gets one tensor for each fragment: a parameter's elements that this rank owns. For an elementwise
    optimizer one tensor for the whole partition would do, except for the last bit: the vector loop and the scalar tail
    of torch's kernels round differently, so the position of tails matters. Fragments end where the parameter ends or at
    multiples of ``ALIGN`` elements; so an element is in a tail here exactly if it is in a loop over the parameters
    themselves, in every stage, at every W.

Sources: [stage-1 notes], "Data Parallelism", "ZeRO Stage 1" and "Stage 1 Code"; P_os and P_os+g in [ZeRO], section 5,
and in [stage-2 notes]; [stage-1 post], ``allreduce_bucket``; ``runtime/zero/stage_1_and_2.py`` in [DeepSpeed], whose
names are kept.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from deepzero.comm.collectives import Communicator, Pending
from deepzero.layout import Bucket, Fragment
from deepzero.placement import GroupPlan
from deepzero.runtime.zero.guards import left_buffer_error, register_owner, unregister_owners

if TYPE_CHECKING:
    from deepzero.runtime.zero.gradient_reduction import GradientReducer

SETUP, SETUP_BROADCAST = "setup.gather", "setup.broadcast"
ALL_GATHER = "parameters.all_gather"
HOST_MASTERS = "host_masters"

HostAllocator = Callable[[str, int, torch.dtype], torch.Tensor]
"""(category, elements, dtype): 1-D host memory."""

# ---- 0 build: flat bit16 groups, data-parallel partitions, the fp32 partition of each group --------------------------


def get_data_parallel_partitions(flat: torch.Tensor, bucket: Bucket) -> tuple[torch.Tensor, ...]:
    """The W equal parts of one bucket of ``flat``, as views; part r belongs to rank r.

    Source: [stage-1 notes], "Stage 1 Code".
    """
    # DeepSpeed's function of this name cuts the whole flat buffer into W ranges; with one bucket the two agree, but for
    # the padding that makes ours equal.
    return bucket.of(flat).split(bucket.shard_numel)


@torch.no_grad()
def take_values(param: nn.Parameter, comm: Communicator) -> torch.Tensor:
    """Rank 0's values of one parameter, which is left without elements: 1-D, on ``comm.device``. A collective."""
    values = param.data.to(comm.device).contiguous().view(-1)
    # Only the caller refers to the values from here on. With the model on the device this is what keeps the peak of
    # building at one parameter above the model; see [Note: the peak of building].
    param.data = values.new_empty(0)
    comm.broadcast(SETUP_BROADCAST, values)
    return values


@torch.no_grad()
def move_whole(param: nn.Parameter, comm: Communicator, dtype: torch.dtype) -> None:
    """Move a parameter that is in no group to the device, whole, with rank 0's values, in ``dtype``. A collective."""
    shape = param.shape  # taking the values leaves the parameter without elements
    param.data = take_values(param, comm).to(dtype).view(shape)


def any_on(params: Sequence[nn.Parameter], device: torch.device) -> bool:
    """Whether any of ``params`` takes memory of ``device``."""
    return any(param.device == device for param in params)


class ParamGroup:
    """The trainable parameters of one optimizer group, in one flat buffer of the compute dtype, and their fp32 masters.

    Every parameter becomes a *view* of :attr:`flat_P`. From then on, whatever an all-gather writes there is in the
    model: publishing needs no copy out. In fp32 the parameters are their own masters: the optimizer steps on views of
    the flat buffer, and nothing is held twice. Building a group is a collective. See [Note: the tensors of ZeRO] in
    ``layout.py``.

    Args:
        names: the parameters' names, in the order of the layout.
        planned: the parameters, on any device, and where each will lie, with or without a master beside it; they take
            rank 0's values.
        dtype: compute dtype.
        comm: the ranks, and the device.
        allocate_host: gives host memory; None where nothing is offloaded.
        replicated: stage 0: this rank has masters and gradients of everything, not of its shard.
    """

    optimizer_group: Any = property(attrgetter("placement.optimizer_group"), doc="Its index, if it is trained.")

    def __init__(
        self,
        names: Sequence[str],
        planned: GroupPlan,
        dtype: torch.dtype,
        comm: Communicator,
        allocate_host: HostAllocator | None = None,
        replicated: bool = False,
    ) -> None:
        self.names, self.layout, self.dtype, self.replicated = list(names), planned.layout, dtype, replicated
        self.params: Sequence[nn.Parameter] = list(planned.params)
        self.comm = comm
        # Called before the program, or a load, writes a parameter: waits until nobody reads the old values, or raises.
        self.before_write: Callable[[], None] = lambda: None
        self.fragments = self.layout.whole_fragments() if replicated else self.layout.fragments(comm.rank)
        # A parameter's index -> its fragment's, in ``fragments``; a small parameter may lie wholly on other ranks.
        self._fragment_numbers = {fragment.slot.index: number for number, fragment in enumerate(self.fragments)}
        # Where tensors lie is counted in elements of this rank's shard. A replicated group's is the whole layout.
        mine = dataclasses.replace(planned.layout, world_size=1) if replicated else planned.layout
        self.placement = dataclasses.replace(planned, layout=mine)
        self.masters_on_host: torch.Tensor | None = None
        if self.placement.host_master_span:
            if allocate_host is None:
                raise RuntimeError("masters in host memory need an arena")
            self.masters_on_host = allocate_host(HOST_MASTERS, len(self.placement.host_master_span), torch.float32)
        self.masters_on_device: torch.Tensor | None = None
        shapes = [param.shape for param in self.params]
        self._keep_fragments()
        # **The optimizer's tensors**: fp32 leaves, one for each fragment, views of ``master_S``; where the parameters
        # are their own masters, views of these. See [Note: why fragments].
        self.masters: list[torch.Tensor] = []
        for fragment in self.fragments if self.placement.trained else ():
            separate = self.separate_masters(fragment.shard_start, fragment.numel)
            master = (self.param_fragment(fragment) if separate is None else separate).detach()
            shown = master.view(shapes[fragment.slot.index]) if planned.per_tensor else master
            self.masters.append(shown.requires_grad_())
        self._attach_params(shapes)

    @property
    def device(self) -> torch.device:
        """This rank's, where the flat buffer lies."""
        return self.comm.device

    # ---- 0 build: see [Note: the peak of building] -------------------------------------------------------------------

    @torch.no_grad()
    def _keep_fragments(self) -> None:
        """Parameter by parameter, keep this rank's fragment of rank 0's values, in the masters and in its dtype."""

        def into_master(fragment: Fragment, values: torch.Tensor) -> torch.Tensor:
            """Copy into the fragment's master, and return it; the values themselves where it has none, so far."""
            # As they were *before* the cast; DeepSpeed makes masters from cast ones, and throws the lower bits of an
            # initialisation away.
            master = self.separate_masters(fragment.shard_start, fragment.numel)
            return values if master is None else master.copy_(values)

        # Where the model is on the device, its memory has to be free before masters and parameters take theirs: until
        # then the fragments wait here. Else they go to their places at once.
        on_device = any_on(self.params, self.device)
        fragments_kept: dict[int, torch.Tensor] = {}
        if not on_device:
            self.allocate_masters()
            self._allocate_params()
        for index, param in enumerate(self.params):
            register_owner(param, self.names[index])
            # Whole on this rank until the end of the loop's turn: the only parameter that is.
            values = self._take_values(index)
            if (number := self._fragment_numbers.get(index)) is not None:
                fragment = self.fragments[number]
                part = values[fragment.start : fragment.start + fragment.numel]
                # A master in host memory is there already, and final at once: it takes no memory of the device.
                kept = into_master(fragment, part)
                if not on_device:
                    self.param_fragment(fragment).copy_(part)
                else:  # not a view, which would keep the whole parameter's memory
                    fragments_kept[number] = part.clone() if kept is part else kept
            del values
        if not on_device:
            return
        # Nothing but fragments is left of the model, so the masters go where the model was.
        self.allocate_masters()
        for number, part in fragments_kept.items():
            fragment = self.fragments[number]
            if fragment.shard_start not in self.placement.host_master_span:
                fragments_kept[number] = into_master(fragment, part)
        self._allocate_params()
        for number in list(fragments_kept):  # one by one, so that a fragment is held twice only while it is copied
            self.param_fragment(self.fragments[number]).copy_(fragments_kept.pop(number))

    def _take_values(self, index: int) -> torch.Tensor:
        """1-D and whole: rank 0's values of one parameter, which is left without them."""
        return take_values(self.params[index], self.comm)

    def allocate_masters(self) -> None:
        """Take the memory of the masters on the device."""
        if self.placement.device_master_span:
            # Zeros: no step changes padding, and it is cast and sent with the rest.
            numel = len(self.placement.device_master_span)
            self.masters_on_device = torch.zeros(numel, dtype=torch.float32, device=self.device)

    def _allocate_params(self) -> None:
        # Zeros: padding travels with the parameters, and must not be a NaN that was there before.
        self.flat_P = torch.zeros(self.layout.padded_numel, dtype=self.dtype, device=self.device)

    @torch.no_grad()
    def _attach_params(self, shapes: Sequence[torch.Size]) -> None:
        """The parameters become views of :attr:`flat_P`, with all ranks' fragments in it."""
        # Every rank has cast its own fragments, and gets the others' cast: the bytes of the compute dtype travel.
        for each in self.layout.buckets if not self.replicated else ():
            self.comm.all_gather(SETUP, each.of(self.flat_P)).wait()
        # The optimizer never sees the parameters again, the model nothing else.
        for param, slot, shape in zip(self.params, self.layout.slots, shapes, strict=True):
            param.data = self.flat_P[slot.offset : slot.end].view(shape)
        # A step compares with these, to find parameters that the program wrote or transposed since the last one.
        self._shapes, self._versions = list(shapes), [param._version for param in self.params]

    # ---- the group's tensors -----------------------------------------------------------------------------------------

    def separate_masters(self, start: int, numel: int) -> torch.Tensor | None:
        """1-D, fp32: masters of the shard's ``[start, start + numel)``; None where the parameters are their own."""
        on_host = (self.placement.host_master_span, self.masters_on_host)
        on_device = (self.placement.device_master_span, self.masters_on_device)
        for span, storage in (on_host, on_device):
            # A bucket lies on one side, and what callers ask for lies within one bucket.
            if storage is not None and start in span:
                return storage[start - span.start :][:numel]
        return None

    def fragment_and_master(self, index: int) -> tuple[Fragment, torch.Tensor] | None:
        """This rank's fragment of a parameter, and its master; None: it has no element here, or is not trained."""
        number = self._fragment_numbers.get(index)
        if number is None or not self.placement.trained:
            return None
        return self.fragments[number], self.masters[number]

    def master_of(self, bucket: Bucket) -> torch.Tensor:
        """1-D, fp32, with padding: the masters of :meth:`param_shard`, which in fp32 may be that tensor itself."""
        found = self.separate_masters(*self.part_of(bucket))
        return self.param_shard(bucket) if found is None else found

    def part_of(self, bucket: Bucket) -> tuple[int, int]:
        """Start and elements, in this rank's shard, of its part of ``bucket``; if :attr:`replicated`, of all of it."""
        return (bucket.offset, bucket.numel) if self.replicated else (bucket.shard_offset, bucket.shard_numel)

    def fragment_slice(self, bucket: Bucket) -> slice:
        """Which of :attr:`fragments`, and of :attr:`masters`, lie in ``bucket``; none crosses the end of a part."""
        first, numel = self.part_of(bucket)
        starts = [fragment.shard_start for fragment in self.fragments]
        return slice(bisect_left(starts, first), bisect_left(starts, first + numel))

    @property
    def parameter_storage(self) -> list[torch.Tensor]:
        """What this rank keeps of the parameters on its device: all of them, or its shard."""
        return [self.flat_P]

    def param_shard(self, bucket: Bucket) -> torch.Tensor:
        """1-D, compute dtype: this rank's part of ``bucket``, with padding; all of it where :attr:`replicated`."""
        if self.replicated:
            return bucket.of(self.flat_P)
        return self.flat_P[bucket.part_start(self.comm.rank) :][: bucket.shard_numel]

    def param_fragment(self, fragment: Fragment) -> torch.Tensor:
        """This rank's elements of one parameter: 1-D, compute dtype."""
        return self.flat_P[fragment.slot.offset + fragment.start :][: fragment.numel]

    # ---- writes by the program ---------------------------------------------------------------------------------------

    def written(self) -> list[str]:
        """Names of parameters that were written since the last step."""
        pairs = zip(self.names, self.params, self._versions, strict=True)
        return [name for name, param, version in pairs if param._version != version]

    @torch.no_grad()
    def sync_masters_from_params(self, refuse: bool = True) -> None:
        """Take what was written into parameters since the last step (``load_state_dict``, an init) into the masters.

        Raises:
            RuntimeError: with ``refuse``, a parameter no longer lies in the flat buffer, or not as it did.
        """
        # Else the next publication would silently overwrite it from the masters. A write through ``param.data`` leaves
        # no trace in the parameter's version and cannot be seen.
        data_ptr, itemsize = self.comm.data_ptr, self.flat_P.itemsize
        start = data_ptr(self.flat_P)
        for index, (param, slot) in enumerate(zip(self.params, self.layout.slots, strict=True)):
            # A parameter without elements has no address.
            moved = param.dtype != self.dtype or (slot.numel and data_ptr(param) != start + slot.offset * itemsize)
            turned = param.shape != self._shapes[index] or not param.is_contiguous()
            if refuse and (moved or turned):
                raise left_buffer_error(param, self.names[index], None if moved else self._shapes[index])
            if param._version != self._versions[index]:
                self._versions[index] = param._version
                self._master_follows(index)

    def _master_follows(self, index: int) -> None:
        """Let this rank's part of a master take over what was written into the parameter, in the compute dtype."""
        mine = self.fragment_and_master(index)
        # Parameters that are their own masters have nothing to follow.
        if mine is not None and self.separate_masters(mine[0].shard_start, mine[0].numel) is not None:
            fragment, master = mine[0], mine[1].view(-1)
            values = self.param_fragment(fragment).to(master.device)
            # Where a value is its master's, rounded, nothing was written, and the master keeps the bits that rounding
            # loses. By torch.where, as an if would make the CPU wait for the GPU, parameter by parameter.
            master.copy_(torch.where(master.to(values.dtype) == values, master, values.to(torch.float32)))

    def bump_param_versions(self) -> None:
        """Tell autograd that every parameter has changed: it does not see what is written into the flat buffer."""
        # A backward pass that still holds the old values then raises instead of using the new ones.
        with torch._C.DisableTorchFunctionSubclass():  # no detour through Python for a number
            torch.autograd.graph.increment_version(self.params)
            self._versions = [param._version for param in self.params]

    @torch.no_grad()
    def write(self, index: int, values: torch.Tensor) -> None:
        """Write new values into one parameter, and into this rank's fragment of its master, which keeps all bits.

        Args:
            index: position in :attr:`params`.
            values: 1-D, whole, fp32, the same on every rank.
        """
        self._write_param(index, values)
        if (mine := self.fragment_and_master(index)) is not None:
            fragment, master = mine
            master.view(-1).copy_(values[fragment.start :][: fragment.numel])

    def _write_param(self, index: int, values: torch.Tensor) -> None:
        self.before_write()
        slot, param = self.layout.slots[index], self.params[index]
        self.flat_P[slot.offset : slot.end].copy_(values)
        # A backward pass may still need the old values, so the version goes up; the master follows by itself.
        torch.autograd.graph.increment_version(param)
        self._versions[index] = param._version

    def destroy(self) -> None:
        """Let the parameters belong to no engine; they go on lying in the flat buffer."""
        unregister_owners(self.params)


class ZeroStage1And2:
    """Partitioned optimizer states (stage 1) and gradients (stage 2), over whole parameters; or neither (stage 0).

    What makes the stage is given: stage 0 has ``replicated`` groups, and from stage 2 on the reducer's ``every_pass``
    is true. Stage 3 derives from this class, whose groups are then those of persistent parameters alone.

    Args:
        groups: the groups of whole parameters; in stage 0 with ``replicated=True``.
        gradients: reduces them into ``grad_S``: every micro-batch in stage 2, once per step in stages 0 and 1.
        comm: the ranks.
    """

    def __init__(self, groups: Sequence[ParamGroup], gradients: GradientReducer, comm: Communicator) -> None:
        self.groups, self.gradients, self.comm = list(groups), gradients, comm
        # DeepSpeed's names. One entry for each optimizer group; where DeepSpeed has a partition, here is one for each
        # bucket of the group, as every rank owns a W-th of every bucket.
        self.bit16_groups = [group.params for group in groups]
        self.bit16_groups_flat = [group.flat_P for group in groups]
        self.single_partition_of_fp32_groups = [
            [group.master_of(bucket).detach() for bucket in group.layout.buckets] for group in groups
        ]
        # Under way: the upload of this rank's part, where that comes from the host, and the all-gather behind it.
        self._gathers: list[tuple[Callable[[], None] | None, Pending]] = []

    @property
    def parallel_partitioned_bit16_groups(self) -> list[list[tuple[torch.Tensor, ...]]]:
        """Every rank's part of every bucket."""
        parts = get_data_parallel_partitions
        return [[parts(group.flat_P, bucket) for bucket in group.layout.buckets] for group in self.groups]

    # ---- 3 gradient ready --------------------------------------------------------------------------------------------

    def reduce_ready_gradient(self, param: nn.Parameter, is_reduction_boundary: bool) -> None:
        """3: the gradient waits; in stage 2 its bucket leaves as soon as all of its gradients are there."""
        self.gradients.reduce_ready_gradient(param, is_reduction_boundary)

    def backward_end(self, is_reduction_boundary: bool) -> None:
        """End a backward pass."""
        self.gradients.backward_end(is_reduction_boundary)

    def forget_pass(self) -> None:
        """End a pass that left no gradient."""
        self.gradients.forget_pass()

    # ---- 4 boundary --------------------------------------------------------------------------------------------------

    def end_passes(self) -> None:
        """Do nothing: whole parameters have not been gathered for the passes."""

    def reduce_gradients(self) -> None:
        """4: stage 1 reduces all buckets, stage 2 those that are left; both wait."""
        self.gradients.reduce_gradients()

    # ---- 5 step ------------------------------------------------------------------------------------------------------

    # ``OptimizerShard.step`` (optimizer_shard.py), the same in every stage: ``_unscale_and_step`` divides grad_S's
    # fragments (``unscale_and_clip_grads``, if the optimizer's kernel does not), then steps on their masters, the
    # fragments of ``single_partition_of_fp32_groups``.

    def uploaded(self, group: int, bucket: Bucket, wait_upload: Callable[[], None] | None) -> None:
        """5, where the CPU steps: this rank's part of a bucket has new values, here or on their way to the device.

        ``group`` is an index of ``gradients.groups``: here they are :attr:`groups`, in stage 3 partitioned ones too.
        """
        self.launch_all_gather(group, bucket, wait_upload)

    # ---- 6 publish ---------------------------------------------------------------------------------------------------

    def launch_all_gather(self, group: int, bucket: Bucket, wait_upload: Callable[[], None] | None) -> None:
        """Launch the all-gather of a bucket of ``groups[group]``. Where the CPU steps, it goes on with the next bucket.

        ``wait_upload`` lets the current stream wait until this rank's part has come from the host; None: it is there.
        """
        # In place: my part lies in ``whole``, and the others' arrive beside it, so nothing is copied. Behind an upload
        # the caller launches this on the upload's own stream, and the compute stream waits for neither yet.
        whole = bucket.of(self.bit16_groups_flat[group])
        sent_padding = (self.comm.world_size - 1) * bucket.padding_of(self.comm.rank)
        with self.comm.ranges.span("publish", bucket.index, self.groups[group].names[bucket.slots[0].index]):
            gather = self.comm.all_gather(ALL_GATHER, whole, sent_padding, f"bucket {bucket.index}")
        self._gathers.append((wait_upload, gather))

    def publish(self) -> None:
        """6: send my part of every bucket to all ranks. Parameters are views of the buckets, so the model is new."""
        self.all_gather_dp_groups()
        self.wait_all_gathers()

    def all_gather_dp_groups(self) -> None:
        """Publish every bucket: cast its masters into my part of it, and launch its all-gather, in place.

        Source: the function of this name in ``runtime/utils.py`` of [DeepSpeed].
        """
        # Bucket by bucket, so that one is cast while the one before it travels.
        for i, group in enumerate(self.groups):
            for bucket in group.layout.buckets:
                if not group.placement.steps_on_host(bucket):  # else ``uploaded`` has launched it
                    self.publish_bucket(i, bucket)
            group.bump_param_versions()

    @torch.no_grad()
    def publish_bucket(self, i: int, bucket: Bucket) -> None:
        """Cast the masters of a bucket of ``groups[i]`` into my part of it, and launch its all-gather."""
        group = self.groups[i]
        # In fp32 the masters are the flat buffer's own elements, and the step has written them there.
        if group.dtype != torch.float32:
            group.param_shard(bucket).copy_(self.single_partition_of_fp32_groups[i][bucket.index])
        if not group.replicated:  # else every rank has every new master
            self.launch_all_gather(i, bucket, None)

    def wait_all_gathers(self) -> None:
        """Wait for all-gathers that are under way."""
        gathers, self._gathers = self._gathers, []
        for wait_upload, gather in gathers:
            if wait_upload is not None:
                wait_upload()  # with one rank there is no all-gather that would wait for the upload
            gather.wait()

    # ---- between steps -----------------------------------------------------------------------------------------------

    def discard_gradients(self) -> None:
        """Forget this step's gradients, also those under way."""
        self.gradients.discard_gradients()

    def prepare_writes(self) -> None:
        """Do nothing: whole parameters may be written at any time between passes."""

    def unwinding(self) -> AbstractContextManager[None]:
        """A context for a forward pass, which cleans up after an exception. Here there is nothing to clean up."""
        return nullcontext()

    def destroy(self) -> None:
        """Let the parameters belong to no engine."""
        for group in self.groups:
            group.destroy()
