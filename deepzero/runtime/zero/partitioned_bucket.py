"""The unit of stage 3's fetch and release: a bucket of the layout, of which this rank keeps a part.

Its three states are those of its parameters, and its verbs lead from one to the next: ``launch``, ``wait``,
``release``. See [Note: a partitioned parameter] in ``partition_parameters.py``. Nothing here knows when they are
called.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from deepzero.comm.collectives import Communicator, Pending
from deepzero.comm.streams import data_ptr_of, storage_ptr_of
from deepzero.layout import Bucket, ParamSlot
from deepzero.offload.copy_streams import HostDeviceCopier, PendingCopy
from deepzero.runtime.zero.buffer_pool import BufferPool
from deepzero.runtime.zero.parameter_all_gather import GatherConfig, ParameterAllGather
from deepzero.runtime.zero.partition_parameters import (
    PartitionedUseError,
    ZeroParameter,
    ZeroParamStatus,
    set_placeholder,
)

_NUMBERS = itertools.count()

SAMPLES = 512
"""Elements that are compared to find a write that left no other trace."""


class PartitionedBucket:
    """The unit of fetch and release: a bucket of the layout, its part on this rank, its parameters.

    Args:
        key: the coordinator's number for it.
        bucket: where it lies in the group.
        params: of the bucket's slots, in order; each gets its record's home here.
        shard: 1-D, this rank's part, ``bucket.shard_numel`` elements, in the compute dtype.
        comm: the ranks.
        pool: where buffers come from.
        wire: between host and device, where something is offloaded.
        shard_on_host: ``shard`` is in host memory.
        rules: how it travels, if not in one plain all-gather.
    """

    def __init__(
        self,
        key: int,
        bucket: Bucket,
        params: Sequence[ZeroParameter],
        shard: torch.Tensor,
        comm: Communicator,
        pool: BufferPool,
        wire: HostDeviceCopier | None = None,
        shard_on_host: bool = False,
        rules: GatherConfig | None = None,
    ) -> None:
        self.key, self.bucket, self.params, self._shard = key, bucket, list(params), shard
        self.gather = ParameterAllGather(bucket, shard.dtype, comm, rules or GatherConfig(), wire, f"bucket {key}")
        self.shard_on_host = shard_on_host
        # With one rank the part is the whole, and is used where it is, if that is the device.
        self._in_place = comm.world_size == 1 and not self.shard_on_host
        self._arrival: PendingCopy | None = None
        self.number = next(_NUMBERS)
        """Of this process, and the same on all ranks; keys are one engine's."""
        self.comm, self.pool = comm, pool
        self.status = ZeroParamStatus.NOT_AVAILABLE
        self.generation = 0
        """Counts changes of the values: a backward pass through older ones is refused."""
        self.buffer: torch.Tensor | None = None
        self.gather_refs = 0
        """Contexts that need the values here; meanwhile nobody else may release them."""
        self.away: str | None = None
        """Set while this rank's part has no memory (``offload_states``), with the reason."""
        self.release_when_unreferenced = False
        """Nobody but those contexts needs the values: the last one to end releases them."""
        self.on_demand: Callable[[list[PartitionedBucket], str], AbstractContextManager[None] | None] | None = None
        """Asked when values are used that are not here: a context in which these buckets are, or None."""
        self.before_write: Callable[[], None] | None = None
        """Raises while the values must not be written."""
        self.on_write: Callable[[PartitionedBucket, ZeroParameter], None] | None = None
        self.shown = False
        """AVAILABLE, and the parameters are views of the buffer."""
        self._whole: torch.Tensor | None = None
        self._versions: list[int] = []
        self._samples: torch.Tensor | None = None
        for param, slot in zip(self.params, bucket.slots, strict=True):
            param._zero.home, param._zero.slot = self, slot

    @property
    def shard(self) -> torch.Tensor:
        """1-D, this rank's part; what the CPU's step has sent has arrived."""
        self.refuse_away()
        if self._arrival is not None:
            self._arrival.wait()
            self._arrival = None
        return self._shard

    def refuse_away(self) -> None:
        """Raise when this rank's part is away."""
        if self.away is not None:
            raise PartitionedUseError(f"the values of {self.names} are not on the device: {self.away}")

    def finish_fetches(self) -> None:
        """Before the CPU writes over this rank's part: no copy reads it any more."""
        if self.gather.last_fetch is not None:
            self.gather.last_fetch.finish()
            self.gather.last_fetch = None

    def mark_updated(self, copy: PendingCopy | None) -> None:
        """This rank's part is new, or will be when ``copy`` has arrived: whoever reads it next waits for it."""
        self._arrival = copy
        self.generation += 1

    @torch.inference_mode(False)
    @torch.no_grad()
    def requantize(self, kind: str) -> None:
        """The inverse of :meth:`gather_exact`, with the bits that a gather for computing has. A collective.

        **Whether the values were exact for a while must not be seen later**: when this bucket would have been
        released in between, the next use had quantised ones.
        """
        if self.status is ZeroParamStatus.AVAILABLE and self.gather.quantizes and not self.gather.lossy:
            self.gather.launch(kind, self.whole, self._my_part, self.shard_on_host, self.generation, False, False)
            self.gather.finish()
            self.snapshot_versions()

    def launch_share(self) -> Pending | None:
        """MiCS: launch my new part to the ranks that keep it, if there are any."""
        return self.gather.share(self.shard, self.generation)

    @property
    def numel(self) -> int:
        """Elements of the whole, with padding."""
        return self.bucket.numel

    @property
    def names(self) -> str:
        """For messages: the first parameters of the bucket."""
        names = [param._zero.name for param in self.params]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    @property
    def whole(self) -> torch.Tensor:
        """1-D: the gathered bucket; while INFLIGHT it belongs to the all-gather."""
        if self._whole is None:
            raise RuntimeError(f"bucket {self.key} is {self.status.name}: its values are not here")
        return self._whole

    # ---- NOT_AVAILABLE → INFLIGHT → AVAILABLE → NOT_AVAILABLE --------------------------------------------------------

    @torch.inference_mode(False)
    @torch.no_grad()
    def launch(self, kind: str, exact: bool = True, keep: bool = False) -> None:
        """NOT_AVAILABLE → INFLIGHT: lay my part into a buffer and launch the all-gather of the others'.

        Args:
            kind: the ledger's name for it.
            exact: the very values; False, for computing with them: by the rules, quantised or from a secondary
                partition.
            keep: keep a secondary partition of what arrives, if there is to be one.
        """
        if self.status is not ZeroParamStatus.NOT_AVAILABLE:
            raise RuntimeError(f"bucket {self.key} is {self.status.name} and cannot be launched")
        self.refuse_away()
        self.buffer = self._shard_as_buffer() if self._in_place else self.pool.take(self.numel)
        self._whole = self.buffer[: self.numel]
        self.pool.owners[storage_ptr_of(self.buffer)] = (self, self.generation)
        self.gather.launch(kind, self._whole, self._my_part, self.shard_on_host, self.generation, exact, keep)
        self.status = ZeroParamStatus.INFLIGHT

    def _my_part(self) -> torch.Tensor:
        return self.shard

    @torch.inference_mode(False)
    @torch.no_grad()
    def gather_exact(self, kind: str) -> None:
        """AVAILABLE with quantised values: gather the very values into the same place."""
        if self.gather.lossy and self.buffer is not None:
            written = self.written()
            if written is not None:
                raise _write_lost(written, "would be lost")
            self.gather.launch(kind, self.whole, self._my_part, self.shard_on_host, self.generation, True, False)
            self.gather.finish()
            self.snapshot_versions()

    def _shard_as_buffer(self) -> torch.Tensor:
        """With one rank my part is the whole, and nothing is copied: the same memory under a storage of its own."""
        return torch.from_dlpack(self.shard) if not self.shard.is_meta else torch.empty_like(self.shard)

    def _give_back(self, buffer: torch.Tensor) -> None:
        """The end of a gathered bucket's buffer."""
        if not self._in_place:
            if self.comm.chaos.enabled and self.pool.is_alone(buffer):
                self.comm.chaos.poison(buffer)
            self.pool.give(buffer)

    @torch.inference_mode(False)
    @torch.no_grad()
    def wait(self, show: bool = True) -> None:
        """INFLIGHT → AVAILABLE: the values are here; with ``show`` the parameters become views of them."""
        if self.status is not ZeroParamStatus.INFLIGHT or self._whole is None:
            raise RuntimeError(f"bucket {self.key} is {self.status.name}: there is nothing to wait for")
        self.gather.finish()
        self.snapshot_versions()
        self.status = ZeroParamStatus.AVAILABLE
        if show:
            self.show()

    @torch.inference_mode(False)
    @torch.no_grad()
    def show(self) -> None:
        """AVAILABLE: the parameters become views of the buffer, if they are not."""
        if self.shown:
            return
        whole, first = self.whole, self.bucket.offset
        for param, slot in zip(self.params, self.bucket.slots, strict=True):
            record = param._zero
            param.__class__ = ZeroParameter
            param.data = whole.as_strided(record.shape, record.stride, slot.offset - first)
        self.shown = True

    @torch.inference_mode(False)
    @torch.no_grad()
    def hide(self) -> None:
        """AVAILABLE still, but the parameters become placeholders. A write that is lost is left to :meth:`release`."""
        if self.shown and not self.gather_refs and self.written() is None:
            self._set_placeholders()

    def _set_placeholders(self) -> None:
        for param in self.params:
            set_placeholder(param, self._shard.dtype, self.comm.device)
        self.shown = False

    def snapshot_versions(self) -> None:
        """What was written so far has been taken over."""
        self._versions = [param._version for param in self.params]
        # Quantised values are no part's: what they were is noted instead.
        lossy = self.gather.lossy and self.whole.device.type == "cpu"
        self._samples = self._mine()[:: self._sampling].clone() if lossy else None

    def snapshot_version(self, param: ZeroParameter) -> None:
        """The same for one parameter."""
        place = next(index for index, mine in enumerate(self.params) if mine is param)
        self._versions[place] = param._version

    def written(self) -> ZeroParameter | None:
        """A parameter that was written since it became available, if any: its part would not follow.

        A write in place counts up the version; an assignment to ``.data`` moves the parameter out of the buffer. A
        write through ``.data`` does neither: on a CPU a sample of this rank's part is compared with what it was, which
        sees whatever touches all of a parameter. (On a GPU the comparison would make the CPU wait.)
        """
        start = data_ptr_of(self.whole)
        for param, slot, version in zip(self.params, self.bucket.slots, self._versions, strict=True):
            inside = (slot.offset - self.bucket.offset) * self.whole.itemsize
            moved = self.shown and slot.numel and data_ptr_of(param) != start + inside
            if param._version != version or moved:
                return param
        if self.whole.device.type == "cpu" and self.status is ZeroParamStatus.AVAILABLE:
            mine, step = self._mine(), self._sampling
            expected = self.shard[::step] if self._samples is None else self._samples
            bits = torch.int32 if mine.itemsize == 4 else torch.int16
            if not torch.equal(mine[::step].view(bits), expected.view(bits)):
                if self._samples is None:
                    step, expected = 1, self.shard
                differs = (mine[::step].view(bits) != expected.view(bits)).nonzero()[0].item()
                place = self.bucket.part_start(self.comm.rank) + int(differs) * step
                found = [p for p, s in zip(self.params, self.bucket.slots, strict=True) if s.offset <= place < s.end]
                return found[0] if found else self.params[0]
        return None

    def _mine(self) -> torch.Tensor:
        """This rank's part of what is gathered."""
        return self.whole.split(self.bucket.shard_numel)[self.comm.rank]

    @property
    def _sampling(self) -> int:
        return max(1, self.bucket.shard_numel // SAMPLES)

    def refuse_writes(self) -> None:
        """Raise when :meth:`written` finds something."""
        param = self.written()
        if param is not None:
            raise _write_lost(param, "would be lost")

    @torch.inference_mode(False)
    @torch.no_grad()
    def release(self) -> None:
        """AVAILABLE → NOT_AVAILABLE: the parameters become placeholders, the buffer goes back to the pool."""
        if self.status is ZeroParamStatus.INFLIGHT:
            self.wait(show=False)  # a prefetch that nobody used
        if self.status is not ZeroParamStatus.AVAILABLE or self.buffer is None:
            raise RuntimeError(f"bucket {self.key} is {self.status.name} and cannot be released")
        written = self.written()
        self._let_go(self.buffer)
        if written is not None:
            raise _write_lost(written, "is lost")

    @torch.inference_mode(False)
    @torch.no_grad()
    def discard(self) -> None:
        """Release without a look at what was written: an exception has ended a write in the middle."""
        if self.status is ZeroParamStatus.INFLIGHT:
            self.wait(show=False)  # until then the buffer is the all-gather's
        if self.status is not ZeroParamStatus.AVAILABLE or self.buffer is None:
            raise RuntimeError(f"bucket {self.key} is {self.status.name} and cannot be discarded")
        # A view that is kept shows what was written, which is no parameter's value.
        self.pool.owners.pop(storage_ptr_of(self.buffer), None)
        self._let_go(self.buffer)

    def _let_go(self, buffer: torch.Tensor) -> None:
        if self.shown:
            self._set_placeholders()
        self.buffer = self._whole = None
        self.status = ZeroParamStatus.NOT_AVAILABLE
        self._give_back(buffer)

    def abandon(self) -> None:
        """Give the buffer back for good: the parameters have values of their own now."""
        if self.buffer is not None:
            self.pool.owners.pop(storage_ptr_of(self.buffer), None)
            self._give_back(self.buffer)
        self.params, self.buffer, self._whole, self.shown = [], None, None, False
        self.gather.drop_secondary()
        self.status = ZeroParamStatus.NOT_AVAILABLE

    # ---- reading and writing -----------------------------------------------------------------------------------------

    def value(self, slot: ParamSlot) -> torch.Tensor:
        """The whole parameter, AVAILABLE only: a view of the buffer."""
        record = self.params[[s.index for s in self.bucket.slots].index(slot.index)]._zero
        return self.whole.as_strided(record.shape, record.stride, slot.offset - self.bucket.offset)

    def part_of(self, slot: ParamSlot) -> torch.Tensor:
        """1-D: what this rank keeps of one parameter."""
        start, stop, first = self.range_of(slot)
        return self.shard[first : first + stop - start]

    def range_of(self, slot: ParamSlot) -> tuple[int, int, int]:
        """(first, one past the last) element of the parameter that this rank keeps, and where they lie in the part."""
        mine = self.bucket.part_start(self.comm.rank)
        lo, hi = max(slot.offset, mine), min(slot.end, mine + self.bucket.shard_numel)
        if lo >= hi:
            return 0, 0, 0
        return lo - slot.offset, hi - slot.offset, lo - mine

    @torch.no_grad()
    def write(self, param: ZeroParameter, values: torch.Tensor) -> None:
        """New values for one parameter, 1-D and whole, the same on every rank: this rank keeps its part."""
        if self.before_write is not None:
            self.before_write()
        slot = param._zero.placed()[1]
        start, stop, first = self.range_of(slot)
        self.shard[first : first + stop - start].copy_(values[start:stop])
        self.generation += 1
        self._write_gathered(param, values)
        if self.on_write is not None:
            self.on_write(self, param)

    @torch.no_grad()
    def _write_gathered(self, param: ZeroParameter, values: torch.Tensor) -> None:
        """The same for the buffer, if the bucket is gathered or on its way; it is no write by the user."""
        if self.status is ZeroParamStatus.NOT_AVAILABLE:
            return
        self.gather.finish()
        self.pool.owners[storage_ptr_of(self.whole)] = (self, self.generation)
        whole = self.value(param._zero.placed()[1])
        if values.data_ptr() != whole.data_ptr():
            whole.copy_(values.view(whole.shape))
        if self._samples is not None:
            self._samples = self._mine()[:: self._sampling].clone()


def send_to_replicas(buckets: Sequence[PartitionedBucket]) -> None:
    """Every rank's new parts go to the ranks that keep them: MiCS, and frozen parameters. A collective.

    Two are under way at a time, so that the messages of two need room.
    """
    under_way: deque[tuple[PartitionedBucket, Pending]] = deque()

    def finish() -> None:
        bucket, pending = under_way.popleft()
        pending.wait()
        bucket.gather.shared()

    for bucket in buckets:
        pending = bucket.launch_share()
        if pending is not None:
            under_way.append((bucket, pending))
        if len(under_way) == 2:
            finish()
    while under_way:
        finish()


def _write_lost(param: ZeroParameter, verb: str) -> PartitionedUseError:
    return PartitionedUseError(
        f"parameter {param._zero.name!r} was written while it was gathered for reading, and the write {verb}; write "
        "inside `with deepzero.zero.GatheredParameters(param, modifier_rank=0):`"
    )
