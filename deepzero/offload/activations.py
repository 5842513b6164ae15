"""Saved activations in host memory: what autograd keeps for the backward pass waits there instead of on the device.

With activation checkpointing a model of L layers keeps L inputs of blocks, and nothing else; at long sequences these
fill a GPU all the same. They are written once in the forward pass and read once in the backward pass, in reverse order,
so they can travel while the device computes::

    forward    pack        launch the copy down; two copies later the compute stream waits for it, the tensor is let go
    backward   unpack      launch the copy up; launch that of the tensor packed before it, which is needed next; wait

torch's non-reentrant checkpoint saves its inputs in a node of autograd's, the reentrant one too, and both save what is
inside their blocks out of sight of hooks that were there before. So hooks on saved tensors around the whole forward
pass see exactly what is kept until the backward pass. Without checkpointing that is every activation.

What moves is a *storage*: two tensors on one storage, or one that is saved twice, are copied once and keep their
strides. Autograd notices when a saved tensor was changed in place before it is used; here a change may also come
between pack and a copy that is under way. The same look at the tensor's version finds both, and raises.

Sources: ``cpu_checkpointing`` in ``runtime/activation_checkpointing/checkpointing.py`` of [DeepSpeed];
``torch.autograd.graph.save_on_cpu`` of [PyTorch], which allocates anew in every step.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import TensorWeakRef

from deepzero.offload.copy_streams import HostDeviceCopier, OffloadStats, Transfer, bytes_of_storage
from deepzero.offload.pinned_arena import HostArena, PageLockError, Region
from deepzero.runtime.engine import Engine
from deepzero.runtime.zero.partition_parameters import ZeroParameter
from deepzero.utils.saved_tensor import check_version, keep, kept, same_counter

log = logging.getLogger(__name__)

ACTIVATIONS_TO_HOST, ACTIVATIONS_TO_DEVICE = "offload.activations_to_host", "offload.activations_to_device"
HOST_ACTIVATIONS = "host_activations"
"""The ledger's word for the buffers."""
LEAVING = 2
"""Storages that are on their way down and still on the device: one that travels, one that waits."""
SMALLEST_PART = 4
"""A storage moves when a saved tensor has at least so great a part of it: q, k and v of one projection have a third."""
SPARE_BYTES = 64 << 20
"""Free buffers that are always kept."""


class HostBuffers:
    """Page-locked buffers, kept and used again by size: a model saves the same sizes in every step.

    Where the system refuses to lock pages, one line says so and nothing is locked from then on. With ``poison`` a
    buffer is overwritten before it is used again.
    """

    def __init__(self, device: torch.device, pin: bool, poison: bool) -> None:
        self.device, self.pin, self.poison = device, pin, poison
        # By size: buffers, each with the copies that it was used for last.
        self._free: dict[int, list[tuple[torch.Tensor, list[Transfer]]]] = {}
        self._arenas: dict[int, HostArena] = {}

    def take(self, nbytes: int) -> torch.Tensor:
        """1-D bytes, that many exactly; contents are whatever was there."""
        if free := self._free.get(nbytes):
            buffer, copies = free.pop()
            if self.poison:
                # The next copy comes after these in the streams' order; what the CPU writes does not.
                for copy in copies:
                    copy.finish()
                buffer.fill_(0xFF)  # NaN in every dtype
            return buffer
        self._make_room()
        region = Region(HOST_ACTIVATIONS, nbytes, torch.uint8)
        try:
            arena = HostArena([region], self.device, self.pin)
        except PageLockError:
            self.pin = False
            log.warning(
                "the system refuses to lock pages for activations in host memory: from here on their copies are slower "
                "and never in the background (said once). Raise the limit of locked memory (ulimit -l); "
                "activation_checkpointing.cpu_checkpointing_pin_memory=false does without"
            )
            arena = HostArena([region], self.device, False)
        made = arena.allocate(*region)
        self._arenas[made.data_ptr()] = arena
        return made

    def _make_room(self) -> None:
        """Sequences of ever other lengths need ever other sizes: give up the free ones when they outweigh the used."""
        free = sum(nbytes * len(some) for nbytes, some in self._free.items())
        used = sum(arena.nbytes for arena in self._arenas.values()) - free
        if free > max(used, SPARE_BYTES):
            for buffer, _ in itertools.chain(*self._free.values()):
                self._arenas.pop(buffer.data_ptr()).close()
            self._free.clear()

    def give(self, buffer: torch.Tensor, copies: list[Transfer]) -> None:
        """Nobody needs what is in it. ``copies`` are done, or come before the next one in the streams' order."""
        self._free.setdefault(buffer.numel(), []).append((buffer, copies))

    def tensors(self) -> list[torch.Tensor]:
        """All of them, for the ledger."""
        return [tensor for arena in self._arenas.values() for tensor in arena.tensors(HOST_ACTIVATIONS)]


class Parked:
    """One storage in host memory. When no graph needs it any more, its buffer goes back by itself."""

    def __init__(self, tensor: torch.Tensor, buffers: HostBuffers, serial: int) -> None:
        storage = tensor.untyped_storage()
        self.serial, self.nbytes, self.version = serial, storage.nbytes(), tensor._version
        # An alias shares the version counter; without the memory.
        self.watch = tensor.detach()
        self.watch.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self.host = buffers.take(self.nbytes)
        # While this refers to it, no other storage gets the same identity.
        self.source = StorageWeakRef(storage)
        # Its bytes on the device, while somebody uses them; and the same, kept until another one is used: what two
        # functions saved, one after the other, is fetched once.
        self.here: Callable[[], torch.Tensor | None] = lambda: None
        self.flat: torch.Tensor | None = None
        # The backward pass that has used it, or for which it has been fetched ahead.
        self.asked_by = -1
        self.copies: list[Transfer] = []  # down, and up
        weakref.finalize(self, buffers.give, self.host, self.copies).atexit = False


class Saved:
    """What autograd holds in place of a tensor: which storage, and how the tensor lies in it."""

    __slots__ = ("dtype", "offset", "parked", "shape", "stride")

    def __init__(self, tensor: torch.Tensor, parked: Parked) -> None:
        self.parked, self.dtype = parked, tensor.dtype
        self.shape, self.stride, self.offset = tensor.shape, tensor.stride(), tensor.storage_offset()


class HostActivations:
    """Hooks on saved tensors, and what they moved over ``copier``, which is their own.

    What ``params()``, asked at every forward pass, names stays on the device, and so do storages below
    ``min_bytes``. ``pin`` locks the pages of host buffers, where the system lets them be locked.
    """

    def __init__(
        self, copier: HostDeviceCopier, params: Callable[[], Iterable[torch.Tensor]], min_bytes: int, pin: bool = True
    ) -> None:
        self.copier, self._parameters, self.min_bytes = copier, params, min_bytes
        self.buffers = HostBuffers(copier.device, pin, copier.chaos.enabled)
        self._serials = itertools.count()
        # By the storage's identity, and by serial: the one before was packed before it, so is needed after it.
        self._parked: weakref.WeakValueDictionary[int, Parked] = weakref.WeakValueDictionary()
        self._by_serial: weakref.WeakValueDictionary[int, Parked] = weakref.WeakValueDictionary()
        self._leaving: deque[tuple[torch.Tensor, Parked, Transfer]] = deque()
        # Fetched ahead, by serial: nobody has asked for them yet.
        self._ahead: dict[int, tuple[torch.Tensor, Transfer]] = {}
        self._used: Callable[[], Parked | None] = lambda: None  # fetched last
        self._stays: set[int] = set()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Around a forward pass. Without gradients nothing is saved, and nothing happens."""
        if not torch.is_grad_enabled():
            yield
            return
        while self._ahead:  # of a backward pass that ended before it came so far
            flat, copy = self._ahead.popitem()[1]
            copy.wait()
            del flat  # not before the wait is in the stream
        self._stays = {tensor.untyped_storage()._cdata for tensor in self._parameters()}
        next(self._serials)  # before the first of a pass there is none
        self.copier.meter.close_step()
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self._settle(0)

    # ---- forward -----------------------------------------------------------------------------------------------------

    def _moves(self, tensor: torch.Tensor) -> bool:
        """Whether it is the plain view of a storage that is worth a copy, and no parameter's."""
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_nested:
            return False
        if tensor.device != self.copier.device or tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
            return False  # more than bytes in a storage
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        # What is a small part of it may be a batch that is a view of a whole data set.
        enough = nbytes >= self.min_bytes and tensor.nbytes * SMALLEST_PART >= nbytes > 0
        return enough and storage._cdata not in self._stays

    def _pack(self, tensor: torch.Tensor) -> Any:
        """Launch the copy down; or the tensor itself is kept, and stays."""
        if not self._moves(tensor):
            return keep(tensor)
        storage = tensor.untyped_storage()
        parked = self._parked.get(storage._cdata)
        # One version counter for the whole storage, or it may have been written since: unsafe_chunk's parts, of which
        # an LSTM's cell is made, have one each.
        if parked is None or parked.version != tensor._version or not same_counter(parked.watch, tensor):
            parked = Parked(tensor, self.buffers, next(self._serials))
            self._parked[storage._cdata] = self._by_serial[parked.serial] = parked
            copy = self.copier.to_host(ACTIVATIONS_TO_HOST, parked.host, bytes_of_storage(storage, tensor.device))
            parked.copies.append(copy)
            # The tensor lives until its copy has left; the buffer belongs to the copy as long.
            self._leaving.append((tensor, parked, copy))
            self._settle(LEAVING)
        return Saved(tensor, parked)

    def _settle(self, keep: int) -> None:
        """Let go of what has left, but for the last ``keep``.

        The device waits, the program does not: memory that is free is the next kernel's.
        """
        while len(self._leaving) > keep:
            tensor, _, copy = self._leaving.popleft()
            copy.wait()
            del tensor  # not before the wait is in the stream

    # ---- backward ----------------------------------------------------------------------------------------------------

    def _unpack(self, saved: Any) -> Any:
        """The tensor again, with the strides it had. May be called more than once."""
        if type(saved) is tuple:  # it stays
            return kept(saved)
        check_version(saved.parked.version, saved.parked.watch, saved.shape)
        flat = self._fetch(saved.parked)
        with torch.no_grad():
            whole = flat[: flat.numel() // saved.dtype.itemsize * saved.dtype.itemsize].view(saved.dtype)
            return whole.as_strided(saved.shape, saved.stride, saved.offset)

    @torch.no_grad()
    def _fetch(self, parked: Parked) -> torch.Tensor:
        """Its bytes on the device: they are there, or are on their way, or are launched now."""
        self._settle(0)
        task = torch._C._current_graph_task_id()
        here = parked.here()
        ahead = self._ahead.pop(parked.serial, None)
        copy: Transfer | None = None
        if here is None:
            here, copy = ahead if ahead is not None else self._launch(parked)
            parked.here = TensorWeakRef(here)
        if (used := self._used()) is not None:
            used.flat = None
        parked.flat, self._used, parked.asked_by = here, weakref.ref(parked), task
        before = self._by_serial.get(parked.serial - 1)
        if before is not None and task != -1 and before.asked_by != task:
            before.asked_by = task
            if before.here() is None:
                self._ahead[before.serial] = self._launch(before)
        if copy is not None:
            copy.wait()  # behind the launch of the next one, which travels meanwhile
        return here

    def _launch(self, parked: Parked) -> tuple[torch.Tensor, Transfer]:
        flat = torch.empty(parked.nbytes, dtype=torch.uint8, device=self.copier.device)
        parked.copies.append(self.copier.to_device(ACTIVATIONS_TO_DEVICE, flat, parked.host))
        return flat, parked.copies[-1]


def build_host_activations(engine: Engine) -> None:
    """``activation_checkpointing.cpu_checkpointing``: what autograd keeps in a forward pass goes to host memory."""
    settings, comm = engine.config.activation_checkpointing, engine.comm

    def lasting() -> list[torch.Tensor]:
        """Not activations: parameters and buffers. Partitioned parameters are known by their hooks."""
        whole = [param for param in engine.module.parameters() if not isinstance(param, ZeroParameter)]
        return [*whole, *engine.module.buffers()]

    copier = HostDeviceCopier(comm.device, comm.ledger, comm.chaos, OffloadStats(), comm.ranges)
    smallest, pin = settings.cpu_checkpointing_min_bytes, settings.cpu_checkpointing_pin_memory
    made = HostActivations(copier, lasting, smallest, pin)
    comm.ledger.watch(HOST_ACTIVATIONS, made.buffers.tensors)
    engine.callbacks.around_forward.append(made.watching)
