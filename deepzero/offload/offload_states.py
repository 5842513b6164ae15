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
``zero.offload_optimizer`` and ``zero.offload_param`` keep in host memory is there already, and stays. Buffers of the
model stay on the device, as do norms of gradient blocks (a sixty-fourth of the gradients). A forward pass needs
``lp_params``, a backward pass the gradients and buckets too, everything else all of it; whatever needs what is away
raises, on every rank.

A storage is the memory that any number of tensors are views of. Here whole storages are moved: their bytes go into one
arena of exactly that size, and ``storage.resize_(0)`` gives the device's memory back. No tensor is replaced. Masters,
parameters, parts of flat buffers, the optimizer's state: all of them stay the objects that they are, views of a storage
that has no memory for a while, and are right again when it has::

    OffloadedStorages(...)   arena taken, copied down, storages emptied, tensors marked
    come_back()              storages filled, tensors unmarked, arena given back

**Torch reads through such a view without a look: the program would die.** So every tensor that a program can reach is
marked: it changes its class to one that answers questions about shape and dtype and raises for everything else.

Sources: ``offload_states`` and ``reload_states`` in DeepSpeed's ``runtime/engine.py`` and
``runtime/zero/offload_states.py``, which replaces each tensor by one on the CPU; for stage 3 and without
``offload_optimizer`` alone.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from deepzero.comm import process_group
from deepzero.offload.activations import HOST_ACTIVATIONS, HostActivations
from deepzero.offload.arena import HostArena, HostMemoryError, Region, available_host_bytes, required_bytes
from deepzero.offload.copy_streams import HostDeviceCopier, OffloadStats, PendingCopy, bytes_of_storage
from deepzero.runtime.engine import Engine
from deepzero.runtime.zero.buffer_pool import references
from deepzero.runtime.zero.guards import METADATA
from deepzero.runtime.zero.partition_parameters import ZeroParameter, ZeroParamStatus
from deepzero.runtime.zero.partitioned_param_coordinator import in_backward
from deepzero.runtime.zero.stage3 import PartitionedParamGroup

STATES = ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")
"""What can be moved, in DeepSpeed's words."""

NEEDS = {"forward": ("lp_params",), "backward": ("lp_params", "lp_grads", "contiguous_grad_buffer")}
"""Which states a call needs; those that are not listed need all."""

HOST_STATES = "host_states"
"""The ledger's word for what is away, in memory."""
STATES_TO_HOST, STATES_TO_DEVICE = "states.to_host", "states.to_device"
"""And for the copies. They are no part of a step."""

ADVICE = "in host memory (engine.offload_states); call engine.reload_states() first"


class StatesOffloadedError(RuntimeError):
    """Something was asked for that needs model states which are away."""


def _answer(func: Any, args: Any, kwargs: Any) -> Any:
    if func in METADATA or func is torch.Tensor.untyped_storage:  # the storage is there; it is empty
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))
    shapes = [tuple(t.shape) for t in args if isinstance(t, (OffloadedTensor, OffloadedParameter))]
    of = f" of shape {shapes[0]}" if shapes else ""
    raise StatesOffloadedError(f"{getattr(func, '__name__', func)}: the values of a tensor{of} are away, {ADVICE}")


class OffloadedTensor(torch.Tensor):
    """A tensor whose values are away."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer questions about metadata, raise for anything else."""
        return _answer(func, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Shape and whereabouts."""
        return f"tensor(shape={tuple(self.shape)}, dtype={self.dtype}, away in host memory)"


class OffloadedParameter(nn.Parameter):
    """A parameter whose values are away."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer questions about metadata, raise for anything else."""
        return _answer(func, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Shape and whereabouts."""
        return f"Parameter(shape={tuple(self.shape)}, dtype={self.dtype}, away in host memory)"


@dataclass(frozen=True)
class StorageSpec:
    """One storage that is to leave."""

    storage: torch.UntypedStorage
    keep: bool
    """False: nobody needs what is in it, and it comes back as zeros."""


class OffloadedStorages:
    """Storages that leave together.

    Args:
        leaving: each storage once, none of them empty.
        reachable: tensors that a program may read meanwhile; those on these storages are marked.
        wire: the way to the host and back.
        pin: lock the arena's pages.
        non_blocking: return while copies are under way; what is issued on the device afterwards comes after them.

    Raises:
        HostMemoryError: there is no memory for the arena. Nothing has changed.
    """

    def __init__(
        self,
        leaving: Sequence[StorageSpec],
        reachable: Iterable[torch.Tensor],
        wire: HostDeviceCopier,
        pin: bool,
        non_blocking: bool,
    ) -> None:
        self._wire = wire
        self._leaving = [(one.storage, one.storage.nbytes(), one.keep) for one in leaving]
        regions = plan(leaving)
        self.arena = HostArena(regions, wire.device, pin)
        self._kept = [self.arena.allocate(HOST_STATES, region.numel, region.dtype) for region in regions]
        self._marked: list[tuple[torch.Tensor, type]] = []
        self._copies: list[PendingCopy] = []
        homes = [storage for storage, _, keep in self._leaving if keep]
        copies = [
            wire.to_host(STATES_TO_HOST, kept, bytes_of_storage(storage, wire.device))
            for kept, storage in zip(self._kept, homes, strict=True)
        ]
        for copy in copies:
            # The stream waits in either case: memory that is given back is the next kernel's.
            copy.wait()
            if not non_blocking:
                copy.finish()
        gone = set()
        for storage, _, _ in self._leaving:
            gone.add(storage._cdata)
            storage.resize_(0)
        self._mark(reachable, gone)

    def _mark(self, reachable: Iterable[torch.Tensor], gone: set[int]) -> None:
        for tensor in reachable:
            if isinstance(tensor, (OffloadedTensor, OffloadedParameter)) or tensor.layout is not torch.strided:
                continue
            if tensor.untyped_storage()._cdata in gone:
                self._marked.append((tensor, type(tensor)))
                away = OffloadedParameter if isinstance(tensor, nn.Parameter) else OffloadedTensor
                tensor.__class__ = away

    def tensors(self) -> list[torch.Tensor]:
        """What the arena holds, for the ledger."""
        return self.arena.tensors(HOST_STATES)

    def come_back(self, non_blocking: bool) -> None:
        """Fill the storages again, and unmark the tensors.

        Args:
            non_blocking: return while copies are under way; :meth:`close` is then to be called later.

        Raises:
            torch.OutOfMemoryError: the device has no room. Everything is as it was before.
        """
        grown: list[torch.UntypedStorage] = []
        try:
            for storage, nbytes, _ in self._leaving:
                grown.append(storage)
                storage.resize_(nbytes)
        except RuntimeError:
            for storage in grown:
                storage.resize_(0)
            raise
        kept = iter(self._kept)
        for storage, _, keep in self._leaving:
            target = bytes_of_storage(storage, self._wire.device)
            if keep:
                self._copies.append(self._wire.to_device(STATES_TO_DEVICE, target, next(kept)))
            else:
                target.zero_()
        for copy in self._copies:
            copy.wait()
        for tensor, kind in self._marked:
            tensor.__class__ = kind
        self._leaving, self._marked = [], []
        if not non_blocking:
            self.close()

    def close(self) -> None:
        """Give the arena back, when the copies from it have arrived."""
        for copy in self._copies:
            copy.finish()
        self._copies, self._kept = [], []
        self.arena.close()
        self._wire.meter.close_step()


def plan(leaving: Sequence[StorageSpec]) -> list[Region]:
    """The arena for what has to be kept: a region of bytes for each storage."""
    return [Region(HOST_STATES, one.storage.nbytes(), torch.uint8) for one in leaving if one.keep]


class StateOffloader:
    """Moves one engine's model states between the device and host memory.

    Args:
        engine: its ``preconditions`` get one more: what needs states that are away is refused.
        wait_for_saves: returns when no asynchronous save reads model states.
    """

    def __init__(self, engine: Engine, wait_for_saves: Callable[[], None]) -> None:
        self.engine, self._wait_for_saves = engine, wait_for_saves
        self.offloaded: tuple[OffloadedStorages, ...] = ()
        """Away, one for each call of :meth:`offload`."""
        # Back; perhaps the last bytes are still on their way.
        self._reloading: tuple[OffloadedStorages, ...] = ()
        self.away: frozenset[str] = frozenset()
        """Which categories are away, on any rank."""
        self._forward_hook: Any = None
        self._wire: HostDeviceCopier | None = None
        engine.preconditions.append(self.check_present)

    def offload(
        self,
        include: Iterable[str | Enum] | str | None,
        device: Any,
        pin_memory: bool,
        non_blocking: bool,
    ) -> None:
        """``engine.offload_states``. A collective."""
        chosen = _chosen(include)
        place = str(device.value if isinstance(device, Enum) else device)
        if place != "cpu":
            raise ValueError(f"offload_states(device={place!r}): model states can be moved to 'cpu' alone")
        self._come_to_rest("lp_params" in chosen or "hp_params" in chosen)
        with torch._C.DisableTorchFunctionSubclass():
            leaving, moved = self._storages_of(chosen)
            reachable = self._reachable()
        moved = self._check_hosts(leaving, moved)
        storages = None
        problem = None
        try:
            if leaving:
                storages = OffloadedStorages(leaving, reachable, self._copier(), pin_memory, non_blocking)
        except HostMemoryError as error:
            problem = f"{error} (or pass pin_memory=False to offload_states)" if pin_memory else str(error)
        try:
            process_group.raise_on_all_ranks(problem, lambda text: HostMemoryError(f"offload_states: {text}"))
        except HostMemoryError:
            if storages is not None:
                storages.come_back(non_blocking=False)
            self._after_return()
            raise
        self.offloaded = (*self.offloaded, *([storages] if storages is not None else []))
        self.away |= moved
        self._post_notices()
        self.engine.comm.ledger.sample()
        if self.engine.comm.device.type == "cuda" and not non_blocking:
            torch.cuda.empty_cache()  # for other processes: another engine generates, perhaps

    def reload(self, non_blocking: bool) -> None:
        """``engine.reload_states``."""
        self._close_reloaded()
        while self.offloaded:
            storages = self.offloaded[0]
            storages.come_back(non_blocking)
            self._reloading = (*self._reloading, storages)
            self.offloaded = self.offloaded[1:]
        self.away = frozenset()
        self._after_return()
        if not non_blocking:
            self._close_reloaded()

    def _after_return(self) -> None:
        for group in self.engine.zero.stores:
            group.refresh_data_ptrs()
        self._post_notices()

    def check_present(self, call: str) -> None:
        """Raise when ``call`` needs what is away."""
        if call != "forward":  # a forward pass begins while copies arrive: the stream waits for them, the host does not
            self._close_reloaded()
        missing = [name for name in NEEDS.get(call, STATES) if name in self.away]
        if missing:
            raise StatesOffloadedError(f"{call}: {', '.join(missing)} are away, {ADVICE}")

    # ---- 1: at rest --------------------------------------------------------------------------------------------------

    def _come_to_rest(self, parameters: bool) -> None:
        """Nothing is under way that reads or writes model states; with ``parameters`` nothing is gathered."""
        if self.engine.state.destroyed:
            raise RuntimeError("offload_states after engine.destroy(): there is nothing to move")
        if in_backward():
            raise RuntimeError("offload_states inside a backward pass: call it between two passes")
        if self.engine.passes.aborted():
            raise RuntimeError(
                "offload_states: the last backward pass broke off before its end; call engine.discard_gradients() first"
            )
        self.engine.finish_delayed_update()
        self._wait_for_saves()
        self._close_reloaded()
        self.engine.zero.reducer.drain()
        self.engine.zero.optimizer_shard.drain_grads()
        partitioning = self.engine.zero.partitioning
        if parameters and partitioning is not None and "lp_params" not in self.away:
            partitioning.coordinator.release_all()
            for bucket in partitioning.coordinator.buckets:
                if bucket.status is not ZeroParamStatus.NOT_AVAILABLE:
                    raise RuntimeError(f"offload_states inside GatheredParameters({bucket.names}): leave it first")
                _ = bucket.shard  # what is on its way to it from the host has arrived
            partitioning.clear()

    def _close_reloaded(self) -> None:
        for storages in self._reloading:
            storages.close()
        self._reloading = ()

    # ---- 2: which storages -------------------------------------------------------------------------------------------

    def _storages_of(self, chosen: frozenset[str]) -> tuple[list[StorageSpec], frozenset[str]]:
        """The storages of some categories, each once; and all categories that have one of these."""
        owners: dict[int, set[str]] = {}
        storages: dict[int, torch.UntypedStorage] = {}
        kept: set[int] = set()
        for category in STATES:
            for tensor, keep in self._tensors_of(category):
                if tensor.layout is not torch.strided or tensor.device.type != self.engine.comm.device.type:
                    continue
                storage = tensor.untyped_storage()
                # What the program brought along (memory of numpy, of a file) is not ours to free.
                if storage.nbytes() and storage.resizable() and not self._in_arena(tensor):
                    storages.setdefault(storage._cdata, storage)
                    owners.setdefault(storage._cdata, set()).add(category)
                    kept |= {storage._cdata} if keep else set()
        found = [key for key, names in owners.items() if names & chosen]
        moved = frozenset().union(*(owners[key] for key in found))
        return [StorageSpec(storages[key], key in kept) for key in found], moved

    def _in_arena(self, tensor: torch.Tensor) -> bool:
        return self.engine.zero.offload is not None and self.engine.zero.offload.arena.holds(tensor)

    def _tensors_of(self, category: str) -> list[tuple[torch.Tensor, bool]]:
        """A category's tensors, and whether anybody needs what is in them."""
        zero, gradients = self.engine.zero, self.engine.zero.stage.gradients
        if category == "optim_states":
            return [
                (t, True) for state in self.engine.optimizer.state.values() for t in state.values() if _has_extent(t)
            ]
        if category == "hp_params":
            separate = [group.master_shard.on_device for group in zero.groups]
            own = [(master, True) for group in zero.groups for master in group.masters]
            return [*((t, True) for t in separate if t is not None), *own]
        if category == "lp_params":
            shares = [(t, True) for group in zero.stores for t in group.parameter_storage]
            if zero.partitioning is not None:
                shares += [(t, True) for t in zero.partitioning.secondaries()]
            return shares + [(t, True) for t in self._plain_parameters()]
        if category == "lp_grads":
            # Between two optimizer steps the sums are those of the last one, which nobody needs.
            return [(t, gradients.present) for t in gradients.held_gradients()]
        there = zero.offload.buffers_on_device() if zero.offload is not None else []
        return [*((t, True) for t in zero.reducer.kept()), *((t, False) for t in (*zero.reducer.buffers(), *there))]

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
        found: list[torch.Tensor] = [p for p in self.engine.module.parameters() if not isinstance(p, ZeroParameter)]
        found += [p.grad for p in self.engine.module.parameters() if p.grad is not None]
        found += [master for group in self.engine.zero.groups for master in group.masters]
        found += [t for state in self.engine.optimizer.state.values() for t in state.values() if _has_extent(t)]
        return found + [part.grad for part in self.engine.zero.optimizer_shard.parts]

    # ---- 3: on every rank or on none ---------------------------------------------------------------------------------

    def _check_hosts(self, leaving: list[StorageSpec], moved: frozenset[str]) -> frozenset[str]:
        """Whether every host has room for its ranks' arenas. Returns what any rank moves.

        Raises:
            HostMemoryError: one has not.
        """
        here = socket.gethostname()
        everyone = process_group.all_gather_object((here, required_bytes(plan(leaving)), moved, available_host_bytes()))
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
        if self._forward_hook is not None:
            self._forward_hook.remove()
            self._forward_hook = None
        if "lp_params" in self.away:
            self._forward_hook = self.engine.module.register_forward_pre_hook(
                lambda *_: self.check_present("forward"), prepend=True
            )
        self.engine.fragments.away = self.check_present if self.away else None
        notice = f"lp_params are away, {ADVICE}" if "lp_params" in self.away else None
        for group in self.engine.zero.stores:
            if isinstance(group, PartitionedParamGroup):
                for bucket in group.buckets:
                    bucket.away = notice if not bucket.gather.shard_on_host else None

    def _copier(self) -> HostDeviceCopier:
        if self._wire is None:
            ledger = self.engine.comm.ledger
            self._wire = HostDeviceCopier(self.engine.comm.device, ledger, self.engine.comm.chaos, OffloadStats())
            ledger.untracked_kinds |= {STATES_TO_HOST, STATES_TO_DEVICE}
            ledger.watch(HOST_STATES, lambda: [t for storages in self.offloaded for t in storages.tensors()])
        return self._wire


def _has_extent(value: Any) -> bool:
    """A tensor that is no counter."""
    return torch.is_tensor(value) and value.dim() > 0


def _chosen(include: Iterable[str | Enum] | str | None) -> frozenset[str]:
    if include is None:
        return frozenset(STATES)
    listed = [include] if isinstance(include, (str, Enum)) else list(include)
    names = [str(one.value if isinstance(one, Enum) else one) for one in listed]
    for name in names:
        if name not in STATES:
            raise ValueError(f"offload_states(include=[{name!r}]): there are {', '.join(STATES)}")
    return frozenset(names)


def build_host_activations(engine: Engine) -> HostActivations:
    """``activation_checkpointing.cpu_checkpointing``: what autograd keeps in a forward pass goes to host memory."""
    settings, ledger = engine.config.activation_checkpointing, engine.comm.ledger

    def lasting() -> list[torch.Tensor]:
        """Not activations: parameters and buffers. Partitioned parameters are known by their hooks."""
        whole = [param for param in engine.module.parameters() if not isinstance(param, ZeroParameter)]
        return [*whole, *engine.module.buffers()]

    wire = HostDeviceCopier(engine.comm.device, ledger, engine.comm.chaos, OffloadStats())
    made = HostActivations(
        wire, lasting, settings.cpu_checkpointing_min_bytes, settings.cpu_checkpointing_pin_memory
    )  # fmt: skip
    ledger.watch(HOST_ACTIVATIONS, made.buffers.tensors)
    engine.around_forward.append(made.watching)
    return made
