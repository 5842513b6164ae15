"""Model states that are away: their bytes in host memory, their storages on the device empty.

A storage is the memory that any number of tensors are views of. Here whole storages are moved: their bytes go into one
arena of exactly that size, and ``storage.resize_(0)`` gives the device's memory back. No tensor is replaced. Masters,
parameters, parts of flat buffers, the optimizer's state: all of them stay the objects that they are, views of a storage
that has no memory for a while, and are right again when it has::

    Departure(...)    arena taken, copied down, storages emptied, tensors marked
    come_back()       storages filled, tensors unmarked, arena given back

**Torch reads through such a view without a look: the program would die.** So every tensor that a program can reach is
marked: it changes its class to one that answers questions about shape and dtype and raises for everything else.

Sources: ``runtime/zero/offload_states.py`` in DeepSpeed, which replaces each tensor by one on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deepzero.offload.arena import HostArena, Region
from deepzero.offload.copy_streams import HostDeviceCopier, PendingCopy, bytes_of_storage
from deepzero.runtime.zero.guards import METADATA

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
