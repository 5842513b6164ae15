"""ZeRO-Infinity's third tier: optimizer states in files, which come into host memory bucket by bucket.

What ``optimizer_offload.py`` keeps in host memory, masters, moments and reduced gradients, lies in a file of this
rank's (``file_store.py``); host memory has buffers alone. The device sees no difference::

    3 gradient ready   a sum comes down into a slot's buffer, and goes on to the file; to be added to, it comes back
    5 step             while the CPU steps on a bucket, the next one is read, and the one before it is written

    disk    | read 0 | read 1    | write 0, read 2 | write 1, read 3 | ...
    CPU              | step on 0 | step on 1       | step on 2       | ...

Masters and the optimizer's state are views of the file's mapping. For the time of a bucket's step they are views of the
buffer that has it; afterwards they are what they were, and whoever reads them finds what was written.

Source: [ZeRO-Infinity], sections 5.1.1 and 6.2; ``runtime/swap_tensor/pipelined_optimizer_swapper.py`` in [DeepSpeed].
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from deepzero.comm.chaos import storage_ptr_of
from deepzero.comm.collectives import Communicator
from deepzero.config.strict import ConfigError
from deepzero.config.zero import OffloadOptimizerConfig, OffloadParamConfig, ZeroConfig
from deepzero.layout import Bucket, OffloadPlan
from deepzero.offload.copy_streams import HostDeviceCopier, Transfer
from deepzero.offload.cpu_adam import MOMENTS as MOMENT_NAMES
from deepzero.offload.cpu_adam import CPUAdam
from deepzero.offload.file_store import BLOCK, FILE_FETCH, FILE_FETCH_BETWEEN_STEPS, FileStore
from deepzero.offload.optimizer_offload import (
    GRADIENTS,
    MOMENTS,
    STAGING,
    HostAllGather,
    HostGradients,
    HostOptimizerShard,
    HostParamUpload,
    Offload,
    StagingSlot,
)
from deepzero.offload.pinned_arena import Region, describe_bytes
from deepzero.runtime.optimizer_state import allocate_state
from deepzero.runtime.zero.optimizer_shard import OptimizerShard
from deepzero.runtime.zero.parameter_all_gather import PlainAllGather
from deepzero.runtime.zero.stage3 import HOST_PARAMETERS
from deepzero.runtime.zero.stage_1_and_2 import HOST_MASTERS, HostAllocator, ParamGroup

STATES = 4
"""Of a bucket, as ``buffer_count`` counts: master, two moments, gradient."""


# ---- 0 build: the plan -----------------------------------------------------------------------------------------------


def open_stores(
    regions: Sequence[Region], optimizer: OffloadOptimizerConfig, param: OffloadParamConfig, device: torch.device
) -> Iterator[tuple[FileStore, list[str]]]:
    """Make the files, one after the other, with the categories of ``regions`` that lie in each.

    Raises:
        ConfigError: one cannot be made.
    """
    for settings, categories in files_of(optimizer, param):
        mine = [region for region in regions if region.category in categories]
        yield FileStore(f"{settings.where}.nvme_path", settings.nvme_path or "", mine, device), categories


def files_of(
    optimizer: OffloadOptimizerConfig, param: OffloadParamConfig
) -> list[tuple[OffloadOptimizerConfig | OffloadParamConfig, list[str]]]:
    """What of the arena's plan lies in files instead: whose settings say where, and by category."""
    both: list[tuple[OffloadOptimizerConfig | OffloadParamConfig, list[str]]] = [
        (optimizer, [HOST_MASTERS, MOMENTS, GRADIENTS]), (param, [HOST_PARAMETERS])
    ]  # fmt: skip
    return [(settings, categories) for settings, categories in both if settings.device == "nvme"]


def check_optimizer(settings: OffloadOptimizerConfig, optimizer: torch.optim.Optimizer) -> None:
    """Raise a ConfigError where files are asked for, and ``optimizer`` does not step bucket by bucket."""
    if settings.device == "nvme" and not isinstance(optimizer, CPUAdam):
        raise ConfigError(
            f"zero.offload_optimizer.device='nvme' steps bucket by bucket, with CPUAdam alone, and the optimizer is "
            f"{type(optimizer).__name__}; choose CPUAdam (Adam or AdamW in the config), or device=cpu"
        )


def bucket_buffers(
    zero: ZeroConfig, placements: Sequence[OffloadPlan], compute: torch.dtype, accumulation: torch.dtype
) -> list[Region]:
    """What the arena has to hold for the buckets that are in memory at a time for their step."""
    numels = [b.shard_numel for placed in placements for b in placed.layout.buckets if placed.steps_on_host(b)]
    size = bytes_of_bucket(zero, compute.itemsize, accumulation.itemsize) * max(numels, default=0)
    count = min(zero.offload_optimizer.buffer_count // STATES, len(numels)) if size else 0
    return [buffer_region(size) for _ in range(count)]


def bytes_of_bucket(zero: ZeroConfig, compute: int, accumulation: int) -> int:
    """Bytes for each element of a bucket that a step has of what lies in files."""
    states = zero.offload_optimizer.device == "nvme"
    # Master and moments are fp32; the gradient is a sum. fp32 parameters are their own masters, where both lie there.
    params = zero.offload_param.device == "nvme" and not (states and compute == 4)
    return states * (4 * (1 + len(MOMENT_NAMES)) + accumulation) + params * compute


def fetch_buffers(param: OffloadParamConfig, placements: Sequence[OffloadPlan], dtype: torch.dtype) -> list[Region]:
    """What the arena has to hold for parameters between the file and the device.

    Raises:
        ConfigError: a bucket's part is larger than ``buffer_size``.
    """
    numels = [b.shard_numel for placed in placements for b in placed.layout.buckets if placed.keeps_on_host(b)]
    if param.device != "nvme" or not numels:
        return []
    rule = f"a bucket has {max(numels)} elements on a rank; raise it, or lower zero.reduce_bucket_size"
    param.need(max(numels) <= param.buffer_size, "buffer_size", rule)
    return [buffer_region(max(numels) * dtype.itemsize) for _ in range(min(param.buffer_count, len(numels)))]


def buffer_region(nbytes: int) -> Region:
    """Room in the arena for a buffer of so many bytes that begins at a block."""
    return Region(STAGING, nbytes + BLOCK, torch.uint8)


def at_a_block(room: torch.Tensor) -> torch.Tensor:
    """The part of a :func:`buffer_region` that direct I/O takes."""
    return room[-room.data_ptr() % BLOCK :]


def finish_all(transfers: Iterable[Transfer | BucketBuffer]) -> None:
    """Wait for all of them, and raise the first error afterwards: nothing is under way when this has returned."""
    failed: RuntimeError | None = None
    for transfer in transfers:
        try:
            transfer.finish()
        except RuntimeError as error:
            failed = failed or error
    if failed is not None:
        raise failed


# ---- what lies where -------------------------------------------------------------------------------------------------


@dataclass
class FileOffload(Offload):
    """An :class:`Offload` part of which lies in files instead of the arena."""

    stores: dict[str, FileStore] = field(default_factory=dict)  # by the category of what lies there
    buffers: list[Region] = field(default_factory=list)  # of a bucket each
    fetches: list[Region] = field(default_factory=list)  # of a bucket's parameters each
    columns: list[dict[str, torch.Tensor]] = field(default_factory=list)  # of each trained group: its moments
    ahead: ReadAhead | None = None
    files: list[FileStore] = field(default_factory=list)  # the same, each once

    def __post_init__(self) -> None:
        self.files = list(dict.fromkeys(self.stores.values()))
        for store in self.files:
            store.attach(self.wire)
        if isinstance(self.sums, FileGradients):
            self.sums.store = self.stores[GRADIENTS]
        if self.fetches:
            self.ahead = ReadAhead(self.stores[HOST_PARAMETERS])

    def allocate(self, category: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """1-D memory of the arena, or of a file's mapping."""
        return self.stores.get(category, self.arena).allocate(category, numel, dtype)

    def tensors(self, category: str) -> list[torch.Tensor]:
        """What was allocated under ``category``."""
        return self.stores.get(category, self.arena).tensors(category)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory was allocated here."""
        return super().holds(tensor) or self.store_of(tensor) is not None

    def store_of(self, tensor: torch.Tensor) -> FileStore | None:
        """The file that a tensor lies in, if it does."""
        return next((store for store in self.files if store.holds(tensor)), None)

    def ledger_name(self, category: str) -> str:
        """The ledger's word for what is allocated under ``category``."""
        return category.replace("host_", "file_") if category in self.stores else category

    def allocate_state(self, optimizer: torch.optim.Optimizer, groups: Sequence[ParamGroup]) -> None:
        """Make the optimizer's state; what is in files is made there, as host memory could not hold it for a while."""
        if MOMENTS not in self.stores:
            self.columns = [{} for _ in groups]
            super().allocate_state(optimizer, groups)
            return
        for group, plan in zip(groups, self.rooms, strict=True):
            extent, columns = group.placement.optimizer_numel, dict[str, torch.Tensor]()
            if plan.numel:
                rooms = self.allocate(MOMENTS, plan.numel, plan.dtype).split(plan.numel // len(MOMENT_NAMES))
                columns = {name: room.view(torch.float32) for name, room in zip(MOMENT_NAMES, rooms, strict=True)}
            self.columns.append(columns)
            for fragment, master in zip(group.fragments, group.masters, strict=True):
                if fragment.shard_start < extent:
                    state = optimizer.state[master]
                    state.setdefault("step", torch.zeros((), dtype=torch.float32))
                    for name, column in columns.items():
                        mine = column[fragment.shard_start :][: fragment.numel]
                        state[name] = mine.copy_(state[name]) if name in state else mine
        allocate_state(optimizer)

    def plain_all_gather(self, bucket: Bucket, dtype: torch.dtype, comm: Communicator, where: str) -> PlainAllGather:
        """How a bucket's parameters in host memory, or in a file, reach the device."""
        if self.ahead is None:
            return super().plain_all_gather(bucket, dtype, comm, where)
        return FileAllGather(self.ahead, self.wire, bucket, dtype, comm, where)

    def finish_reads(self) -> None:
        """Before parameters are written out of turn: nothing that was read before is used after."""
        super().finish_reads()
        if self.ahead is not None:
            self.ahead.discard()

    def check_states(self) -> None:
        """Raise a RuntimeError where a disk has left states half old, half new."""
        for store in self.files:
            store.check()

    def states_replaced(self) -> None:
        """All states have been loaded: what a disk has left half done, too."""
        for store in self.files:
            store.broken = None

    def close_step(self) -> None:
        """An optimizer step is complete: the next one is likely to fetch in the same order."""
        super().close_step()
        if self.ahead is not None:
            self.ahead.restart()

    def build_shard(self, *given: Any, **more: Any) -> OptimizerShard:
        """As in host memory. What the first values of masters and parameters have left in memory goes."""
        if self.ahead is not None:
            self.ahead.carve([at_a_block(self.allocate(*region)) for region in self.fetches])
        shard = super().build_shard(*given, **more)
        self.drop_pages()
        return shard

    def upload_masters(self) -> None:
        """Let the parameters follow masters that have been loaded."""
        super().upload_masters()
        self.drop_pages()

    def drop_pages(self) -> None:
        """Give memory back in which pages of the files lie."""
        for store in self.files:
            store.drop_pages()

    def describe(self, optimizer: torch.optim.Optimizer) -> str:
        """One line: sizes, whether locked, threads, kernel; what lies in files, and how it gets there."""
        said = super().describe(optimizer)
        for store in (store for store in self.files if any(region.numel for region in store.regions)):
            how = "direct I/O" if store.direct else "through the page cache: the file system takes no direct I/O"
            said += f"; {describe_bytes(store.regions)} in a file in {store.folder}, {how}"
        return said

    def close(self) -> None:
        """Unlock the memory, end the files' threads; memory and disk space go back with the last tensor."""
        super().close()
        for store in self.files:
            store.close()


# ---- 1 fetch: parameters in files (offload_param) --------------------------------------------------------------------


@dataclass(frozen=True)
class FileFetch:
    """A bucket's part of the parameters, 1-D ``[shard_numel]`` of the file, ``padding`` of them padding."""

    where: str
    view: torch.Tensor
    padding: int


class ReadAhead:
    """Parameters' way from a file into a few buffers, in the order in which the last step fetched them.

    A bucket that is fetched is there already if the order is the last step's; else it is read now, and what was read in
    vain is dropped. Between steps, in evaluation, nothing is read ahead.
    """

    def __init__(self, store: FileStore) -> None:
        self._store = store
        self._free = deque[tuple[torch.Tensor, Transfer | None]]()  # with the copy that reads it; first used, first out
        self._order, self._last = list[FileFetch](), list[FileFetch]()  # of this step so far, and of the last one
        # Read ahead: which version of the parameters, into which buffer. The first is the next one to be fetched.
        self._coming = deque[tuple[int, torch.Tensor, Transfer]]()

    def carve(self, rooms: Iterable[torch.Tensor]) -> None:
        """Take the buffers, of bytes."""
        self._free.extend((room, None) for room in rooms)

    @contextlib.contextmanager
    def values(self, fetch: FileFetch, in_step: bool) -> Iterator[tuple[torch.Tensor, list[Transfer]]]:
        """The part in host memory, and a list for the copy that is launched from there inside."""
        if in_step:
            if [known.where for known in self._last[len(self._order) :][:1]] != [fetch.where]:
                self._last = []  # another order than last time
            self._order.append(fetch)
        room, copies = self._arrived(fetch, in_step), list[Transfer]()
        try:
            yield room[: fetch.view.nbytes].view(fetch.view.dtype), copies
        finally:
            self._free.append((room, next(iter(copies), None)))
        while in_step and self._free and (coming := self._last[len(self._order) + len(self._coming) :][:1]):
            self._coming.append((coming[0].view._version, *self._read(coming[0], FILE_FETCH)))

    def _arrived(self, fetch: FileFetch, in_step: bool) -> torch.Tensor:
        if not in_step or not self._last:
            self.discard()
        if self._coming:
            version, room, read = self._coming.popleft()
            self._finish(room, read)
            if version == fetch.view._version:
                return room
            self._free.append((room, None))
            self.discard()  # it was written since, and so may be what follows
        room, read = self._read(fetch, FILE_FETCH if in_step else FILE_FETCH_BETWEEN_STEPS)
        self._finish(room, read)
        return room

    def _finish(self, room: torch.Tensor, read: Transfer) -> None:
        try:
            read.finish()
        except RuntimeError:
            self._free.append((room, None))
            raise

    def _read(self, fetch: FileFetch, kind: str) -> tuple[torch.Tensor, Transfer]:
        room, copy = self._free.popleft()
        if copy is not None:
            copy.finish()
        values = room[: fetch.view.nbytes].view(fetch.view.dtype)
        return room, self._store.read([(fetch.view, values)], fetch.padding, fetch.where, kind)

    def discard(self) -> None:
        """Use nothing that has been read: parameters are about to be written."""
        while self._coming:
            _, room, read = self._coming.popleft()
            with contextlib.suppress(RuntimeError):  # nobody wants it any more
                read.finish()
            self._free.append((room, None))

    def restart(self) -> None:
        """A step is complete: its order is what the next one's is compared with."""
        self.discard()
        self._order, self._last = [], self._order


class FileAllGather(HostAllGather):
    """The all-gather of a bucket whose shard lies in a file; every gather reads it anew. Arguments are as there."""

    def __init__(self, ahead: ReadAhead, *given: Any) -> None:
        super().__init__(*given)
        self._ahead = ahead
        self.comm.ledger.untracked_kinds.add(FILE_FETCH_BETWEEN_STEPS)

    @contextlib.contextmanager
    def fetch_shard(self, kind: str, shard: torch.Tensor, target: torch.Tensor) -> Iterator[torch.Tensor]:
        """Read the shard if it is not there yet, and copy it to ``target``; as in the base class."""
        fetch = FileFetch(self.where, shard, self._shard_padding)
        here = self._ahead.values(fetch, self.comm.ledger.in_step(kind))
        with here as (values, copies), super().fetch_shard(kind, values, target) as there:
            copies += [self._copy] if self._copy is not None else []
            yield there


# ---- 3 gradient ready: down to the host, on to the file --------------------------------------------------------------


class SumFromFile(Transfer):
    """A bucket's sums, from the file into a buffer and on to the device."""

    def __init__(self, read: Transfer, copy: Callable[[], Transfer]) -> None:
        self._read, self._copy = read, copy

    def wait(self) -> None:
        """The program waits for the disk, the current stream for the copy."""
        self._read.finish()
        self._copy().wait()

    def finish(self) -> None:
        """It is not wanted any more: wait until the buffer is free."""
        self._read.finish()

    def is_over(self) -> bool:
        """Nobody asks."""
        return False


class FileGradients(HostGradients):
    """:class:`HostGradients` whose sums lie in a file; each slot has a buffer in host memory, on the way."""

    store: FileStore

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        size = self.largest * self.regions[0].dtype.itemsize
        self.buffers = [buffer_region(size) for _ in range(self.slot_count)]
        self._rooms: dict[int, torch.Tensor] = {}

    def carve(self, allocate: HostAllocator, wire: HostDeviceCopier) -> None:
        """Take the planned regions, and the slots on the device with their buffers."""
        super().carve(allocate, wire)
        for slot, region in zip(self.slots, self.buffers, strict=True):
            self._rooms[id(slot)] = at_a_block(allocate(*region)).view(slot.device.dtype)

    def discard(self) -> None:
        """Free all slots, also those whose transfer has failed: nobody reads what it has left."""
        for slot in self.slots:
            with contextlib.suppress(RuntimeError):
                slot.settle()
        super().discard()

    def _fetch(self, slot: StagingSlot, sums: torch.Tensor, padding: int, where: str) -> Transfer:
        room = self._rooms[id(slot)][: sums.numel()]
        up = partial(super()._fetch, slot, room, padding, where)
        return SumFromFile(self.store.read([(sums, room)], padding, where), up)

    def _leave(self, slot: StagingSlot, sums: torch.Tensor, padding: int, where: str) -> Transfer:
        room = self._rooms[id(slot)][: sums.numel()]
        down = super()._leave(slot, room, padding, where)
        return self.store.write([(sums, room)], padding, where, after=down.finish)


# ---- 5 step ----------------------------------------------------------------------------------------------------------


class BucketBuffer:
    """Host memory for what a step needs of one bucket, one bucket after the other.

    ::

        read             finish          in_place           write             finish (before it is read into again)
        from the file    it is there     it is stepped on   into the file     it has left
    """

    def __init__(self, memory: torch.Tensor, host: FileOffload) -> None:
        self._memory, self._host = memory, host
        self._transfers: list[Transfer] = []
        self._pieces: list[tuple[FilePiece, torch.Tensor]] = []

    def read(self, pieces: Sequence[FilePiece], padding: int, where: str) -> None:
        """Launch: what lies in files comes."""
        self._pieces, start = [], 0
        for piece in pieces:
            end = start + piece.view.nbytes
            self._pieces.append((piece, self._memory[start:end].view(piece.view.dtype)))
            start = end
        self._host.wire.chaos.poison(self._memory)
        self._move(FileStore.read, [pair for pair in self._pieces if pair[0].comes], padding, where)

    def write(self, padding: int, where: str) -> None:
        """Launch the way back of what the step has changed."""
        self._move(FileStore.write, [pair for pair in self._pieces if pair[0].leaves], padding, where)

    def _move(
        self, how: Callable[..., Transfer], pairs: Sequence[tuple[FilePiece, torch.Tensor]], padding: int, where: str
    ) -> None:
        moved: dict[FileStore, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for piece, room in pairs:
            moved.setdefault(piece.store, []).append((piece.view, room))
        self._transfers = [how(store, mine, padding, where) for store, mine in moved.items()]

    def finish(self) -> None:
        """Wait until every transfer is over, also behind one that has failed, whose error is raised then."""
        transfers, self._transfers = self._transfers, []
        finish_all(transfers)

    def is_over(self) -> bool:
        """Whether :meth:`finish` would not wait."""
        return all(transfer.is_over() for transfer in self._transfers)

    @contextlib.contextmanager
    def in_place(self, upload: HostParamUpload) -> Iterator[None]:
        """Inside, the optimizer's tensors, and where it writes parameters, are this memory, not the file's mapping."""
        homes = [(tensor, tensor.data) for piece, _ in self._pieces for tensor in piece.tensors]
        try:
            for piece, room in self._pieces:
                upload.kept = upload.kept if piece.comes else room
                for tensor in piece.tensors:
                    start = tensor.storage_offset() - piece.view.storage_offset()
                    tensor.data = room[start : start + tensor.numel()]
            yield
        finally:
            upload.kept = None
            for tensor, home in homes:
                tensor.data = home


@dataclass(frozen=True)
class FilePiece:
    """One state of a bucket: a view of the file, 1-D ``[shard_numel]``, and the tensors that view a part of it."""

    store: FileStore
    view: torch.Tensor
    tensors: Sequence[torch.Tensor]
    comes: bool = True  # a step reads it
    leaves: bool = True  # a step changes it


class FileOptimizerShard(HostOptimizerShard):
    """A :class:`HostOptimizerShard` whose buckets come from files, are stepped on in a few buffers, and go back."""

    host: FileOffload

    def __init__(self, host: FileOffload, *given: Any, **more: Any) -> None:
        super().__init__(host, *given, **more)
        rooms = [at_a_block(host.allocate(*plan)) for plan in host.buffers]
        self._buffers = [BucketBuffer(room, host) for room in rooms]

    def _pieces(self, upload: HostParamUpload) -> list[FilePiece]:
        """What of a bucket lies in files."""
        state, masters, bucket, group = self.optimizer.state, upload.masters, upload.bucket, upload.group
        found = list[FilePiece]()

        def add(view: torch.Tensor, tensors: Sequence[torch.Tensor], comes: bool = True, leaves: bool = True) -> None:
            if (store := self.host.store_of(view)) is None:
                return
            if any(storage_ptr_of(tensor) != storage_ptr_of(view) for tensor in tensors):
                raise RuntimeError(
                    "the optimizer's state was replaced by tensors that do not lie in its file (load_state_dict); load "
                    "it by engine.load_checkpoint, or copy it into the tensors that were there"
                )
            found.append(FilePiece(store, view, tensors, comes, leaves))

        add(group.master_of(bucket).detach(), masters)
        for name, flat in self.host.columns[upload.number].items():
            add(bucket.shard_of(flat), [state[master][name] for master in masters])
        add(self.gradients.sum_of(upload.number, bucket), [self.grads[master] for master in masters], leaves=False)
        if group.placement.keeps_on_host(bucket) and not group.placement.own_masters_at(bucket):
            add(group.param_shard(bucket), (), comes=False)
        return found

    def _in_memory(self) -> Generator[HostParamUpload]:
        """The buckets, one after the other; others are read and written meanwhile, as the settings say."""
        # What could be wrong is found before a bucket is touched.
        settings, ahead = self.host.settings, iter([(upload, self._pieces(upload)) for upload in self.uploads])
        free, coming = deque(self._buffers), deque[tuple[HostParamUpload, BucketBuffer]]()

        def read_next() -> bool:
            for upload, pieces in itertools.islice(ahead, 1):
                buffer = free.popleft()
                buffer.finish()  # what it held has left
                buffer.read(pieces, upload.bucket.padding_of(self.rank), f"bucket {upload.bucket.index}")
                coming.append((upload, buffer))
                return True
            return False

        for store in self.host.files:
            store.check()
        if self.host.ahead is not None:
            self.host.ahead.discard()
        try:
            read_next()
            while coming:
                upload, buffer = coming.popleft()
                buffer.finish()
                # One ahead, though its buffer may have to leave first; more where buffers are at hand.
                while settings.pipeline_read and free and (not coming or free[0].is_over()) and read_next():
                    pass
                with buffer.in_place(upload):
                    yield upload
                buffer.write(upload.bucket.padding_of(self.rank), f"bucket {upload.bucket.index}")
                if not settings.pipeline_write:
                    buffer.finish()
                free.append(buffer)
                if not settings.pipeline_read:
                    read_next()
        finally:
            # Whoever reads states outside of a step reads them through the mapping: nothing may be under way.
            finish_all(self._buffers)
