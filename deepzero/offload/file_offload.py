"""ZeRO-Infinity's third tier: optimizer states in files, which come into host memory bucket by bucket.

What ``optimizer_offload.py`` keeps in host memory, masters, moments and reduced gradients, lies in a file of this
rank's (``file_store.py``), and with ``offload_param`` so do parameters; host memory has buffers alone. The device sees
no difference::

    1 fetch            parameters are read ahead in the last step's order, and go up from a buffer
    3 gradient ready   a sum comes down into a buffer, and goes on to the file; to be added to, it comes back
    5 step             while the CPU steps on a bucket, the next one is read, and the one before it is written

    disk    | read 0 | read 1    | write 0, read 2 | write 1, read 3 | ...
    CPU              | step on 0 | step on 1       | step on 2       | ...

Two objects take the place of the host's: :class:`FileCopier` moves a bucket between the device and a file in the two
verbs of a copy, and :class:`FileOptimizerShard` steps on buckets that are in memory for a while. Masters and the
optimizer's state are views of the file's mapping. For the time of a bucket's step they are views of the buffer that
has it; afterwards they are what they were, and whoever reads them finds what was written.

Source: [ZeRO-Infinity], sections 5.1.1 and 6.2; ``runtime/swap_tensor/pipelined_optimizer_swapper.py`` in [DeepSpeed].
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from deepzero.config.zero import ZeroConfig
from deepzero.offload.copy_streams import SUMS_TO_DEVICE, HostDeviceCopier, Transfer
from deepzero.offload.cpu_adam import MOMENTS as MOMENT_NAMES
from deepzero.offload.file_store import (
    FILE_FETCH,
    FILE_FETCH_BETWEEN_STEPS,
    FILE_READ,
    FILE_WRITE,
    FileStore,
    FileTransfer,
    in_blocks,
)
from deepzero.offload.optimizer_offload import (
    GRADIENTS,
    MOMENTS,
    STAGING,
    HostGradients,
    HostOptimizerShard,
    HostParamUpload,
    StagingBuffer,
)
from deepzero.offload.pinned_arena import HostArena, Region
from deepzero.placement import GroupPlan
from deepzero.runtime.zero.stage3 import HOST_PARAMETERS
from deepzero.runtime.zero.stage_1_and_2 import HOST_MASTERS
from deepzero.utils.storage import storage_ptr_of

STATES = 4
"""Of a bucket, as ``buffer_count`` counts: master, two moments, gradient."""


# ---- 0 build: the plan -----------------------------------------------------------------------------------------------


FILED = {
    HOST_MASTERS: "offload_optimizer", MOMENTS: "offload_optimizer", GRADIENTS: "offload_optimizer",
    HOST_PARAMETERS: "offload_param",
}  # fmt: skip
"""What of the arena's plan may lie in files instead, by category; and which block of settings says so, and where."""


def in_files(zero: ZeroConfig) -> set[str]:
    """The categories that do."""
    return {category for category, block in FILED.items() if getattr(zero, block).device == "nvme"}


class FileBuffers(NamedTuple):
    """What the arena holds for what lies in files, before anything else in it: so each buffer begins at a block."""

    sums: list[Region]  # one for each buffer of the reducer's
    buckets: list[Region]  # one for each bucket that is in memory at a time for its step
    fetches: list[Region]  # one for each bucket whose parameters are between the file and the device

    @classmethod
    def plan(
        cls,
        zero: ZeroConfig,
        planned: Sequence[GroupPlan],
        sums: HostGradients | None,
        compute: torch.dtype,
        accumulation: torch.dtype,
    ) -> FileBuffers:
        """For all groups; a ConfigError where the part of a bucket of parameters is larger than ``buffer_size``."""
        optimizer, param = zero.offload_optimizer, zero.offload_param
        states, params = optimizer.device == "nvme", param.device == "nvme"
        stepped = [b.shard_numel for p in planned if p.trained for b in p.layout.buckets if p.steps_on_host(b)]
        kept = [b.shard_numel for p in planned if p.partitioned for b in p.layout.buckets if p.keeps_on_host(b)]
        kept = kept if params else []
        if kept:
            rule = f"a bucket has {max(kept)} elements on a rank; raise it, or lower zero.reduce_bucket_size"
            param.need(max(kept) <= param.buffer_size, "buffer_size", rule)
        # Bytes of an element that a step has of what lies in files. Master and moments are fp32; the gradient is a sum;
        # fp32 parameters are their own masters, where both lie there.
        size = states * (4 * (1 + len(MOMENT_NAMES)) + accumulation.itemsize)
        size += compute.itemsize * (params and not (states and compute == torch.float32))

        def buffers(count: int, numel: int, itemsize: int) -> list[Region]:
            return [Region(STAGING, in_blocks(numel * itemsize), torch.uint8)] * count

        return cls(
            buffers(sums.buffer_count, sums.largest, accumulation.itemsize) if sums is not None and states else [],
            buffers(min(optimizer.buffer_count // STATES, len(stepped)) if size else 0, max(stepped, default=0), size),
            buffers(min(param.buffer_count, len(kept)), max(kept, default=0), compute.itemsize),
        )


# ---- 1 fetch, 3 gradient ready: between the device and a file --------------------------------------------------------


class FileCopier(HostDeviceCopier):
    """A :class:`HostDeviceCopier` whose host side may lie in files: then a transfer goes through a buffer."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.files: dict[str, FileStore] = {}  # by the category of what lies in each
        self.ahead = ReadAhead(self)
        self._spare: list[torch.Tensor] = []
        self._through: dict[int, torch.Tensor] = {}  # by storage of a buffer on the device: host memory beside it
        self.ledger.untracked_kinds.add(FILE_FETCH_BETWEEN_STEPS)

    def open(self, regions: Sequence[Region], zero: ZeroConfig) -> None:
        """Make the files, or raise a ConfigError: then whoever called closes those that are there."""
        for block in sorted({FILED[category] for category in in_files(zero)}):
            mine = [region for region in regions if FILED.get(region.category) == block]
            store = FileStore(f"zero.{block}.nvme_path", getattr(zero, block).nvme_path, mine, self.device)
            self.files |= {category: store for category, its in FILED.items() if its == block}

    def close(self) -> None:
        """Let go of the files."""
        for store in self.files.values():
            store.close()

    def carve(self, buffers: FileBuffers, arena: HostArena) -> list[torch.Tensor]:
        """Take the buffers from the arena; returns those of a step."""
        self._spare, buckets, fetches = ([arena.allocate(*region) for region in some] for some in buffers)
        self.ahead.free.extend(map(StagingBuffer, fetches))
        return buckets

    def store_of(self, tensor: torch.Tensor) -> FileStore | None:
        """The file that a tensor lies in, if it does."""
        return next((store for store in self.files.values() if store.holds(tensor)), None)

    def _room_for(self, staged: torch.Tensor) -> torch.Tensor:
        """Host memory beside a buffer on the device, the same in every step."""
        key = staged.untyped_storage()._cdata
        if key not in self._through:
            self._through[key] = self._spare.pop()
        return self._through[key].view(staged.dtype)[: staged.numel()]

    def move(
        self,
        kind: str,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        padding: int,
        where: str,
        after: Callable[[], None] | None = None,
        onward: Callable[[], Transfer] | None = None,
    ) -> FileTransfer:
        """Launch what moves views of files from buffers or into them, of bucket ``where``; see :class:`FileTransfer`.

        Each has ``padding`` elements of padding.
        """
        moves = [(store, view, room) for view, room in pairs if (store := self.store_of(view)) is not None]
        numel, moved = sum(view.numel() for view, _ in pairs), sum(view.nbytes for view, _ in pairs)
        self.ledger.record(kind, numel, moved, padding * len(pairs), where=where, what="file")
        return FileTransfer(self, kind, moves, after, onward)

    def to_host(
        self, kind: str, host: torch.Tensor, source: torch.Tensor, padding: int = 0, where: str = ""
    ) -> Transfer:
        """Launch ``host.copy_(source)``; to a file, down into that memory, and on from there when it has come."""
        if self.store_of(host) is None:
            return super().to_host(kind, host, source, padding, where)
        room = self._room_for(source)
        down = super().to_host(kind, room, source, padding, where)
        return self.move(FILE_WRITE, [(host, room)], padding, where, after=down.finish)

    def to_device(
        self, kind: str, target: torch.Tensor, host: torch.Tensor, padding: int = 0, where: str = ""
    ) -> Transfer:
        """Launch ``target.copy_(host)``; out of a file, when it has been read: sums now, parameters perhaps before."""
        if self.store_of(host) is None:
            return super().to_device(kind, target, host, padding, where)
        if kind == SUMS_TO_DEVICE:
            room = self._room_for(target)
            up = partial(super().to_device, kind, target, room, padding, where)
            return self.move(FILE_READ, [(host, room)], padding, where, onward=up)
        with self.ahead.arrived(FileFetch(where, host, padding), self.ledger.in_step(kind)) as buffer:
            values = in_front(buffer.memory, host)
            buffer.copy = super().to_device(kind, target, values, padding, where)
            return buffer.copy

    def finish_reads(self) -> None:
        """As in the base class; and nothing is used that was read of files before."""
        super().finish_reads()
        self.ahead.discard()

    def close_step(self) -> None:
        """An optimizer step is complete: the next one is likely to fetch in the same order."""
        super().close_step()
        self.ahead.restart()


def in_front(room: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The first bytes of a buffer, as a tensor of the extent and dtype of ``like``."""
    return room[: like.nbytes].view(like.dtype)


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

    def __init__(self, copier: FileCopier) -> None:
        self._copier = copier
        self.free = deque[StagingBuffer]()  # the first used first
        self._order, self._last = list[FileFetch](), list[FileFetch]()  # of this step so far, and of the last one
        # Read ahead: which version of the parameters, into which buffer. The first is the next one to be fetched.
        self._coming = deque[tuple[int, StagingBuffer]]()

    @contextlib.contextmanager
    def arrived(self, fetch: FileFetch, in_step: bool) -> Iterator[StagingBuffer]:
        """The part in host memory. What is launched inside, from there, is waited for before the buffer's next use."""
        if in_step:
            if [known.where for known in self._last[len(self._order) :][:1]] != [fetch.where]:
                self._last = []  # another order than last time
            self._order.append(fetch)
        # If it was written since it was read, so may be what follows.
        if not in_step or not self._last or (self._coming and self._coming[0][0] != fetch.view._version):
            self.discard()
        if not self._coming:
            self._read(fetch, FILE_FETCH if in_step else FILE_FETCH_BETWEEN_STEPS)
        _, buffer = self._coming.popleft()
        try:
            buffer.finish()
            yield buffer
        finally:
            self.free.append(buffer)
        # Nobody stands still for the buffer that was used last: the next fetch finds it free.
        while in_step and self.free and self.free[0].is_over():
            if not (coming := self._last[len(self._order) + len(self._coming) :][:1]):
                break
            self._read(coming[0], FILE_FETCH)

    def _read(self, fetch: FileFetch, kind: str) -> None:
        self.free[0].finish()  # it stays free if that fails
        buffer = self.free.popleft()
        pairs = [(fetch.view, in_front(buffer.memory, fetch.view))]
        buffer.copy = self._copier.move(kind, pairs, fetch.padding, fetch.where)
        self._coming.append((fetch.view._version, buffer))

    def discard(self) -> None:
        """Use nothing that has been read: parameters are about to be written."""
        while self._coming:
            _, buffer = self._coming.popleft()
            with contextlib.suppress(RuntimeError):  # nobody wants it any more
                buffer.finish()
            self.free.append(buffer)

    def restart(self) -> None:
        """A step is complete: its order is what the next one's is compared with."""
        self.discard()
        self._order, self._last = [], self._order


# ---- 5 step ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FilePiece:
    """One state of a bucket: a view of the file, 1-D ``[shard_numel]``, and the tensors that view a part of it."""

    view: torch.Tensor
    tensors: Sequence[torch.Tensor]
    comes: bool = True  # a step reads it
    leaves: bool = True  # a step changes it


class BucketBuffer(StagingBuffer):
    """Host memory for what a step needs of one bucket, one bucket after the other.

    ::

        read             finish          in_place           write             finish (before it is read into again)
        from the file    it is there     it is stepped on   into the file     it has left
    """

    def read(self, copier: FileCopier, upload: HostParamUpload, pieces: Sequence[FilePiece], rank: int) -> None:
        """Launch: what lies in files comes."""
        self.upload, self._pieces, start = upload, list[tuple[FilePiece, torch.Tensor]](), 0
        for piece in pieces:
            self._pieces.append((piece, in_front(self.memory[start:], piece.view)))
            start += piece.view.nbytes
        copier.chaos.poison(self.memory)
        padding, where = upload.bucket.padding_of(rank), f"bucket {upload.bucket.index}"
        self._launch = partial(copier.move, padding=padding, where=where)
        self._move(FILE_READ, [(piece.view, room) for piece, room in self._pieces if piece.comes])

    def write(self) -> None:
        """Launch the way back of what the step has changed."""
        self._move(FILE_WRITE, [(piece.view, room) for piece, room in self._pieces if piece.leaves])

    def _move(self, kind: str, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.copy = self._launch(kind, pairs) if pairs else None

    @contextlib.contextmanager
    def in_place(self) -> Iterator[HostParamUpload]:
        """Inside, the optimizer's tensors, and where it writes parameters, are this memory, not the file's mapping."""
        homes = [(tensor, tensor.data) for piece, _ in self._pieces for tensor in piece.tensors]
        try:
            for piece, room in self._pieces:
                self.upload.kept = self.upload.kept if piece.comes else room
                for tensor in piece.tensors:
                    start = tensor.storage_offset() - piece.view.storage_offset()
                    tensor.data = room[start : start + tensor.numel()].view(tensor.shape)
            yield self.upload
        finally:
            self.upload.kept = None
            for tensor, home in homes:
                tensor.data = home


class FileOptimizerShard(HostOptimizerShard):
    """A :class:`HostOptimizerShard` whose buckets come from files, are stepped on in ``rooms`` in turn, and go back."""

    def __init__(self, copier: FileCopier, rooms: Sequence[torch.Tensor], *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self._copier = copier
        self._buffers = list(map(BucketBuffer, rooms))
        self._found: list[tuple[HostParamUpload, list[FilePiece]]] = []  # what comes into them in this step

    def before_step(self) -> None:
        """As in the base class; what could be wrong with the states is found before anything is stepped on."""
        super().before_step()
        self._found = [(upload, self._pieces(upload)) for upload in self.uploads]

    def memory_problem(self) -> RuntimeError | None:
        """A file into which a write has failed, in this step or before."""
        return self.host.problem()

    def _pieces(self, upload: HostParamUpload) -> list[FilePiece]:
        """What of a bucket lies in files."""
        state, masters, bucket, group = self.optimizer.state, upload.masters, upload.bucket, upload.group
        found = list[FilePiece]()

        def add(view: torch.Tensor, tensors: Sequence[Any], comes: bool = True, leaves: bool = True) -> None:
            if self._copier.store_of(view) is None:
                return
            if any(tensor is None or storage_ptr_of(tensor) != storage_ptr_of(view) for tensor in tensors):
                raise RuntimeError(
                    "the optimizer's state was replaced by tensors that do not lie in its file (load_state_dict); load "
                    "it by engine.load_checkpoint, or copy it into the tensors that were there"
                )
            found.append(FilePiece(view, tensors, comes, leaves))

        add(group.master_of(bucket).detach(), masters)
        for name, column in self.host.columns[upload.number].items():
            add(bucket.shard_of(column), [state[master].get(name) for master in masters])
        add(self.gradients.sum_of(upload.number, bucket), [self.grads[master] for master in masters], leaves=False)
        if group.placement.keeps_on_host(bucket) and not group.placement.own_masters_at(bucket):
            add(group.param_shard(bucket), (), comes=False)
        return found

    def _in_memory(self) -> Generator[HostParamUpload]:
        """The buckets, one after the other; others are read and written meanwhile, as the settings say."""
        settings, left = self.host.settings, deque(self._found)
        free, coming = deque(self._buffers), deque[BucketBuffer]()

        def read_next() -> None:
            buffer = free.popleft()
            buffer.finish()  # what it held has left
            buffer.read(self._copier, *left.popleft(), self.rank)
            coming.append(buffer)

        self._copier.ahead.discard()
        try:
            read_next()
            while coming:
                buffer = coming.popleft()
                buffer.finish()
                # One ahead, though its buffer may have to leave first; more where buffers are at hand.
                while left and settings.pipeline_read and free and (not coming or free[0].is_over()):
                    read_next()
                with buffer.in_place() as upload:
                    yield upload
                buffer.write()
                if not settings.pipeline_write:
                    buffer.finish()
                free.append(buffer)
                if left and not settings.pipeline_read:
                    read_next()
        finally:
            # Whoever reads states outside of a step reads them through the mapping: nothing may be under way.
            with contextlib.ExitStack() as all_of_them:
                for buffer in reversed(self._buffers):
                    all_of_them.callback(buffer.finish)
