"""``offload_states``: model states on the host between two phases of a program, in DeepSpeed's categories.

Whoever alternates training with something else on the same GPU, for example with generation by another engine, moves
model states into host memory and back. By category (DeepSpeed's words)::

    optim_states             the optimizer's state of this rank's masters (Adam: both moments)
    hp_params                fp32 masters
    lp_params                parameters in the compute dtype: the flat buffers, or in stage 3 this rank's share;
                             frozen parameters too
    lp_grads                 gradients, reduced and unreduced
    contiguous_grad_buffer   the reducer's buckets

In fp32 the parameters are their own masters: one storage, and whichever of the two is named, both are away. What
``zero.offload_optimizer`` and ``zero.offload_param`` keep in host memory is there already, and stays; so do buffers of
the model and norms of gradient blocks. Whatever needs what is away raises, on every rank.

Whole storages are moved: their bytes go into one arena of exactly that size, and ``storage.resize_(0)`` gives the
device's memory back. No tensor is replaced: masters, parameters, the optimizer's state stay the objects that they are,
views of a storage that has no memory for a while, and are right again when it has. **Torch reads through such a view
without a look: the program would die.** So every tensor that a program can reach is marked: it changes its class to one
that answers questions about shape and dtype and raises for everything else.

Source: ``offload_states`` and ``reload_states`` in [DeepSpeed], ``runtime/engine.py`` and
``runtime/zero/offload_states.py``, which replaces each tensor by one on the CPU; for stage 3 and without
``offload_optimizer`` alone.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from enum import Enum
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import nn

from deepzero.comm import process_group
from deepzero.device import accelerator_of
from deepzero.offload.copy_streams import HostDeviceCopier, OffloadStats, Transfer, bytes_of_storage
from deepzero.offload.pinned_arena import HostArena, HostMemoryError, Region, available_host_bytes, required_bytes
from deepzero.runtime.engine import Engine
from deepzero.runtime.zero.buffer_pool import references
from deepzero.runtime.zero.guards import METADATA
from deepzero.runtime.zero.partition_parameters import ZeroParameter, ZeroParamStatus
from deepzero.runtime.zero.partitioned_param_coordinator import in_backward
from deepzero.runtime.zero.stage3 import PartitionedParamGroup
from deepzero.runtime.zero.zeropp import secondary_shards

STATES = ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")
NEEDS = {"forward": ("lp_params",), "backward": ("lp_params", "lp_grads", "contiguous_grad_buffer")}
"""Which states a call needs; those that are not listed need all."""
# The ledger's words for what is away, in memory, and for the copies. They are no part of a step.
HOST_STATES, STATES_TO_HOST, STATES_TO_DEVICE = "host_states", "states.to_host", "states.to_device"
ADVICE = "in host memory (engine.offload_states); call engine.reload_states() first"


class StatesOffloadedError(RuntimeError):
    """Something was asked for that needs model states which are away."""


# ---- tensors whose values are away -----------------------------------------------------------------------------------


class _Away:
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer questions about metadata, raise for anything else."""
        if func in METADATA or func is torch.Tensor.untyped_storage:  # the storage is there; it is empty
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        shapes = [f" of shape {tuple(t.shape)}" for t in args if isinstance(t, (OffloadedTensor, OffloadedParameter))]
        name = getattr(func, "__name__", func)
        raise StatesOffloadedError(f"{name}: the values of a tensor{shapes[0] if shapes else ''} are away, {ADVICE}")


class OffloadedTensor(_Away, torch.Tensor):
    """A tensor whose values are away."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Shape and whereabouts."""
        return f"tensor(shape={tuple(self.shape)}, dtype={self.dtype}, away in host memory)"


class OffloadedParameter(_Away, nn.Parameter):
    """A parameter whose values are away."""

    __repr__ = OffloadedTensor.__repr__  # type: ignore[assignment]


Leaving: TypeAlias = "list[tuple[torch.UntypedStorage, bool]]"
"""Storages, each with whether anybody needs what is in it: else it comes back as zeros."""


def plan(leaving: Leaving) -> list[Region]:
    """The arena for what has to be kept: a region of bytes for each storage."""
    return [Region(HOST_STATES, storage.nbytes(), torch.uint8) for storage, keep in leaving if keep]


class OffloadedStorages:
    """Storages that leave together, each once, none of them empty; they come back by :meth:`come_back`.

    Tensors on them that are ``reachable``, which a program may read meanwhile, are marked. Copies may be under way
    afterwards; what is issued on the device then comes after them. Without memory for the arena nothing changes.
    """

    def __init__(
        self, leaving: Leaving, reachable: Iterable[torch.Tensor], copier: HostDeviceCopier, pin: bool
    ) -> None:
        self._copier, regions = copier, plan(leaving)
        self.arena = HostArena(regions, copier.device, pin)
        rooms = (self.arena.allocate(*region) for region in regions)
        # Each with its size, and the room for what is in it.
        self._gone = [(storage, storage.nbytes(), next(rooms) if keep else None) for storage, keep in leaving]
        self._copies: list[Transfer] = []
        kept = [(room, bytes_of_storage(storage, copier.device)) for storage, _, room in self._gone if room is not None]
        for copy in [copier.to_host(STATES_TO_HOST, *pair) for pair in kept]:
            copy.wait()  # in the stream: memory that is given back is the next kernel's
        for storage, *_ in self._gone:
            storage.resize_(0)
        gone = {storage._cdata for storage, *_ in self._gone}
        self._marked: list[tuple[torch.Tensor, type]] = []
        for tensor in reachable:
            if isinstance(tensor, (OffloadedTensor, OffloadedParameter)) or tensor.layout is not torch.strided:
                continue
            if tensor.untyped_storage()._cdata in gone:
                self._marked.append((tensor, type(tensor)))
                tensor.__class__ = OffloadedParameter if isinstance(tensor, nn.Parameter) else OffloadedTensor

    def come_back(self) -> None:
        """Fill the storages again, and unmark the tensors; :meth:`close` is to be called later.

        Where the device has no room, which torch says, everything is as it was before.
        """
        try:
            for storage, nbytes, _ in self._gone:
                storage.resize_(nbytes)
        except RuntimeError:
            for storage, *_ in self._gone:
                storage.resize_(0)
            raise
        for storage, _, kept in self._gone:
            target = bytes_of_storage(storage, self._copier.device)
            if kept is None:
                target.zero_()
            else:
                self._copies.append(self._copier.to_device(STATES_TO_DEVICE, target, kept))
        for copy in self._copies:
            copy.wait()
        for tensor, kind in self._marked:
            tensor.__class__ = kind
        self._gone, self._marked = [], []

    def close(self) -> None:
        """Give the arena back, when the copies from it have arrived: to unlock pages is to wait for all of them."""
        self._copies = []
        self.arena.close()
        self._copier.meter.close_step()


def offload_states(  # noqa: D417  of an engine, which has it as a method
    self: Any, include: Iterable[str | Enum] | str | None = None, device: Any = "cpu", pin_memory: bool = True,
    non_blocking: bool = False,
) -> None:  # fmt: skip
    """Move model states to host memory and give the device's memory back. A collective.

    Gradients of an optimizer step that is not complete are kept; an asynchronous save is waited for. Views that the
    program itself holds of moved tensors (a ``state_dict`` that was taken before) must not be read meanwhile.

    Args:
        include: which, of :data:`STATES` or DeepSpeed's ``OffloadStateTypeEnum``; None: all.
        device: ``cpu``, the only one.
        pin_memory: lock the host's pages, without which copies are slow and never in the background.
        non_blocking: return while copies are under way, which the device does before what is issued afterwards. The
            memory is then this process's; without, it is given back to the system.

    Raises a ValueError for an unknown name or device, a HostMemoryError on every rank where a host has not enough
    (nothing is moved), a RuntimeError inside a backward pass or ``GatheredParameters`` and after ``destroy``.
    """
    self.offloader.offload(include, device, pin_memory, non_blocking)


def reload_states(self: Any, non_blocking: bool = False) -> None:
    """Move what is away back to the device, with ``non_blocking`` in the background: it waits for itself.

    A torch.OutOfMemoryError says that there is no room; what has not come back yet is still away.
    """
    self.offloader.reload(non_blocking)


class StateOffloader:
    """Moves one engine's model states between the device and host memory; what needs those that are away is refused.

    ``wait_for_saves()`` returns when no asynchronous save reads model states.
    """

    def __init__(self, engine: Engine, wait_for_saves: Callable[[], None]) -> None:
        self.engine, self._wait_for_saves = engine, wait_for_saves
        self.offloaded: list[tuple[OffloadedStorages, frozenset[str]]] = []  # away, by call; the categories of each
        self._reloading: list[OffloadedStorages] = []  # back; perhaps the last bytes are still on their way
        self.away: frozenset[str] = frozenset()  # of categories; alike on all ranks unless a reload failed on some
        self._forward_hook: Any = None
        engine.callbacks.preconditions.append(self.check_present)

    @cached_property
    def _copier(self) -> HostDeviceCopier:
        comm = self.engine.comm
        comm.ledger.untracked_kinds |= {STATES_TO_HOST, STATES_TO_DEVICE}
        comm.ledger.watch(HOST_STATES, lambda: [t for one, _ in self.offloaded for t in one.arena.tensors(HOST_STATES)])
        return HostDeviceCopier(comm.device, comm.ledger, comm.chaos, OffloadStats(), comm.ranges)

    def offload(
        self, include: Iterable[str | Enum] | str | None, device: Any, pin_memory: bool, non_blocking: bool
    ) -> None:
        """See :func:`offload_states`."""
        chosen = _chosen(include)
        if (place := str(device.value if isinstance(device, Enum) else device)) != "cpu":
            raise ValueError(f"offload_states(device={place!r}): model states can be moved to 'cpu' alone")
        self._come_to_rest("lp_params" in chosen or "hp_params" in chosen)
        with torch._C.DisableTorchFunctionSubclass():
            leaving, moved = self._storages_of(chosen)
            reachable = self._reachable()
        moved = self._check_hosts(leaving, moved)
        made, advice = None, " (or pass pin_memory=False to offload_states)" if pin_memory else ""
        error = lambda text: HostMemoryError(f"offload_states: {text}{advice}")
        try:
            with self.engine.comm.together(error, HostMemoryError):
                made = OffloadedStorages(leaving, reachable, self._copier, pin_memory) if moved else None
        except HostMemoryError:
            if made is not None:
                made.come_back()
                made.close()
            raise
        self.offloaded += [(made, moved)] if made is not None else []
        self._post_notices()
        self.engine.comm.ledger.sample()
        if not non_blocking:  # for other processes: another engine generates, perhaps
            accelerator_of(self.engine.comm.device).empty_cache()

    def reload(self, non_blocking: bool) -> None:
        """See :func:`reload_states`."""
        self._close_reloaded()
        try:
            while self.offloaded:  # one that has no room on the device stays in the list
                self.offloaded[0][0].come_back()
                self._reloading.append(self.offloaded.pop(0)[0])
        finally:
            self._post_notices()
            if not non_blocking:
                self._close_reloaded()

    def _close_reloaded(self) -> None:
        while self._reloading:
            self._reloading.pop(0).close()

    def check_present(self, call: str) -> None:
        """Raise when ``call`` needs what is away."""
        if call != "forward":  # a forward pass begins while copies arrive: the stream waits for them, the host does not
            self._close_reloaded()
        if missing := [name for name in NEEDS.get(call, STATES) if name in self.away]:
            raise StatesOffloadedError(f"{call}: {', '.join(missing)} are away, {ADVICE}")

    # ---- 1: at rest --------------------------------------------------------------------------------------------------

    def _come_to_rest(self, parameters: bool) -> None:
        """Nothing is under way that reads or writes model states; with ``parameters`` nothing is gathered."""
        engine = self.engine
        if engine.state.destroyed:
            raise RuntimeError("offload_states after engine.destroy(): there is nothing to move")
        if in_backward():
            raise RuntimeError("offload_states inside a backward pass: call it between two passes")
        if engine.passes.aborted():
            raise RuntimeError(
                "offload_states: the last backward pass broke off before its end; call engine.discard_gradients() first"
            )
        engine.finish_delayed_update()
        self._wait_for_saves()
        self._close_reloaded()
        engine.zero.bucket_reducer.drain()
        engine.zero.optimizer_shard.drain_grads()
        stage3 = engine.zero.stage3
        if parameters and "lp_params" not in self.away:
            engine.prepare_writes()
        if parameters and stage3 is not None and "lp_params" not in self.away:
            for bucket in stage3.coordinator.buckets:
                if bucket.status is not ZeroParamStatus.NOT_AVAILABLE:
                    raise RuntimeError(f"offload_states inside GatheredParameters({bucket.label}): leave it first")
                _ = bucket.shard  # what is on its way to it from the host has arrived
            stage3.coordinator.clear()

    # ---- 2: which storages -------------------------------------------------------------------------------------------

    def _storages_of(self, chosen: frozenset[str]) -> tuple[Leaving, frozenset[str]]:
        """The storages of some categories, each once; and all categories that have one of these."""
        # By its identity: a storage, the categories that have it, and which of them need what is in it.
        found: dict[int, tuple[torch.UntypedStorage, set[str], set[str]]] = {}
        for category, tensors in self.states().items():
            for tensor, keep in tensors:
                if tensor.layout is not torch.strided or tensor.device.type != self.engine.comm.device.type:
                    continue
                storage = tensor.untyped_storage()
                # What the program brought along (memory of numpy, of a file) is not ours to free; nor is the arena's.
                if storage.nbytes() and storage.resizable():
                    _, owners, needed = found.setdefault(storage._cdata, (storage, set(), set()))
                    owners.add(category)
                    needed |= {category} if keep else set()
        leaving = [one for one in found.values() if one[1] & chosen]
        moved = frozenset().union(*(owners for _, owners, _ in leaving))
        return [(storage, bool(needed)) for storage, _, needed in leaving], moved

    def states(self) -> dict[str, list[tuple[torch.Tensor, bool]]]:
        """Each category's tensors, and whether anybody needs what is in them."""
        zero, stage3 = self.engine.zero, self.engine.zero.stage3
        gradients, offload = zero.stage.gradients, zero.offload
        separate = [t for group in zero.groups if (t := group.masters_on_device) is not None]
        params = [t for group in zero.all_groups for t in group.parameter_storage] + self._plain_parameters()
        tensors = {
            "optim_states": self._optimizer_states(),
            "hp_params": separate + [master for group in zero.groups for master in group.masters],
            "lp_params": [*params, *(secondary_shards(stage3.coordinator.buckets) if stage3 is not None else ())],
            "lp_grads": list(gradients.held_gradients()),
            "contiguous_grad_buffer": list(zero.bucket_reducer.residuals()),
        }
        # Between two optimizer steps the sums are those of the last one, which nobody needs.
        ended = gradients.backward_ended
        found = {name: [(t, name != "lp_grads" or ended) for t in some] for name, some in tensors.items()}
        buffers = [*zero.bucket_reducer.buffers(), *(offload.buffers_on_device() if offload is not None else ())]
        found["contiguous_grad_buffer"] += [(buffer, False) for buffer in buffers]
        return found

    def _optimizer_states(self) -> list[torch.Tensor]:
        """Those that are no counters."""
        values = (value for state in self.engine.optimizer.state.values() for value in state.values())
        return [value for value in values if torch.is_tensor(value) and value.dim() > 0]

    def _plain_parameters(self) -> list[torch.Tensor]:
        """Frozen ones outside of stage 3, where nobody but this model refers to their memory."""
        lying: dict[int, list[nn.Parameter]] = {}
        mine = {id(param) for group in self.engine.zero.groups for param in group.params}
        for param in self.engine.module.parameters():
            if id(param) not in mine and not isinstance(param, ZeroParameter):
                lying.setdefault(param.untyped_storage()._cdata, []).append(param)
        alone = references(torch.empty(1))
        return [some[0] for some in lying.values() if references(some[0]) <= alone + len(some) - 1]

    def _reachable(self) -> list[torch.Tensor]:
        """Tensors that a program comes upon."""
        zero, params = self.engine.zero, list(self.engine.module.parameters())
        found: list[torch.Tensor] = [param for param in params if not isinstance(param, ZeroParameter)]
        found += [param.grad for param in params if param.grad is not None]
        found += [master for group in zero.groups for master in group.masters]
        return [*found, *self._optimizer_states(), *zero.optimizer_shard.grads.values()]

    # ---- 3: on every rank or on none ---------------------------------------------------------------------------------

    def _check_hosts(self, leaving: Leaving, moved: frozenset[str]) -> frozenset[str]:
        """Raise where a host has no room for its ranks' arenas. Returns what any rank moves."""
        mine = (socket.gethostname(), required_bytes(plan(leaving)), moved, available_host_bytes())
        everyone = process_group.all_gather_object(mine)
        for host in sorted({entry[0] for entry in everyone}):
            needed = sum(entry[1] for entry in everyone if entry[0] == host)
            known = [entry[3] for entry in everyone if entry[0] == host and entry[3] is not None]
            if known and needed > (free := min(known)):
                raise HostMemoryError(
                    f"offload_states needs {needed / 2**30:.2f} GiB of memory on host {host}, and "
                    f"{free / 2**30:.2f} GiB are available; pass include= with less, or free memory"
                )
        return frozenset().union(*(entry[2] for entry in everyone))

    # ---- 4: whoever asks is told -------------------------------------------------------------------------------------

    def _post_notices(self) -> None:
        """Where states are used, it is known whether they are here."""
        self.away = frozenset().union(*(states for _, states in self.offloaded))
        if self._forward_hook is not None:
            self._forward_hook.remove()
            self._forward_hook = None
        notice = f"lp_params are away, {ADVICE}" if "lp_params" in self.away else None
        if notice is not None:
            self._forward_hook = self.engine.module.register_forward_pre_hook(
                lambda *_: self.check_present("forward"), prepend=True
            )
        self.engine.fragments.check_present = self.check_present if self.away else None
        for group in self.engine.zero.all_groups:
            for bucket in group.buckets if isinstance(group, PartitionedParamGroup) else ():
                bucket.offloaded_notice = notice if not bucket.strategy.source.on_host else None


def _chosen(include: Iterable[str | Enum] | str | None) -> frozenset[str]:
    listed = [include] if isinstance(include, (str, Enum)) else STATES if include is None else list(include)
    names = [str(one.value if isinstance(one, Enum) else one) for one in listed]
    for name in names:
        if name not in STATES:
            raise ValueError(f"offload_states(include=[{name!r}]): there are {', '.join(STATES)}")
    return frozenset(names)
