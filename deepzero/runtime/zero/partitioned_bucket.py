"""The unit of stage 3's fetch and release: a bucket of the layout, of which this rank keeps a shard.

Its three states are those of its parameters, and its verbs lead from one to the next: ``launch``, ``wait``,
``release``. See [Note: a partitioned parameter] in ``partition_parameters.py``. The coordinator decides when they are
called.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from enum import Enum
from typing import TYPE_CHECKING

import torch

from deepzero.layout import Bucket, ParamSlot
from deepzero.runtime.zero import guards
from deepzero.runtime.zero.buffer_pool import BufferPool
from deepzero.runtime.zero.parameter_all_gather import ON_REQUEST, PlainAllGather, send_to_replicas
from deepzero.utils.dispatch import outliving_pass
from deepzero.utils.storage import storage_ptr_of

if TYPE_CHECKING:
    from deepzero.runtime.zero.module_hooks import ModuleHooks
    from deepzero.runtime.zero.partition_parameters import ZeroParameter
    from deepzero.runtime.zero.stage3 import PartitionedParamGroup

_NUMBERS = itertools.count()

INIT_KEY = -1
"""The key of buckets that ``zero.Init`` has made: one for each parameter, until ``initialize`` lays them out anew."""


class ZeroParamStatus(Enum):
    """What of a bucket is on this rank. See [Note: a partitioned parameter], also for ``param.ds_status``."""

    NOT_AVAILABLE = 1
    """This rank's shard. Leaves by ``launch``."""
    INFLIGHT = 2
    """This rank's shard, and a buffer that is being filled. Leaves by ``wait``."""
    AVAILABLE = 3
    """This rank's shard, and the whole. Leaves by ``release``."""


class PartitionedBucket:
    """A bucket of the layout with its tensors: this rank's shard, and while it is gathered the whole of it.

    Args:
        key: the coordinator's number for it, or ``INIT_KEY``.
        in_layout: the same bucket in its group's layout: where the parameters lie in it, in integers.
        params: the parameters of its slots, in order.
        shard: 1-D ``[in_layout.shard_numel]``, compute dtype.
        strategy: how it is gathered for computing.
        pool: where its buffer comes from.
        param_group: the parameters' group; None for the buckets of ``zero.Init``, which has no masters.
    """

    def __init__(
        self,
        key: int,
        in_layout: Bucket,
        params: Sequence[ZeroParameter],
        shard: torch.Tensor,
        strategy: PlainAllGather,
        pool: BufferPool,
        param_group: PartitionedParamGroup | None = None,
    ) -> None:
        self.key, self.in_layout, self.params, self._shard = key, in_layout, list(params), shard
        self.strategy, self.pool, self.param_group = strategy, pool, param_group
        # Unique in this process, and the same on all ranks, which gather in its order; keys are one engine's.
        self.number = next(_NUMBERS)
        # With one rank the shard is the bucket: it is used where it is, unless the device would have to copy it.
        on_device = not strategy.source.on_host and shard.device.type == pool.device.type
        self.shard_is_buffer = strategy.comm.world_size == 1 and on_device
        self.status = ZeroParamStatus.NOT_AVAILABLE
        # Counts changes of the values: a backward pass that saved older ones is refused.
        self.generation = 0
        self._gathered: torch.Tensor | None = None
        # The strategy by which the values here came, or are coming: ``strategy``, or its unquantised one.
        self.gathered_by = strategy
        # Whether the parameters are views of what is gathered; only while AVAILABLE.
        self.shown = False
        # How many ``GatheredParameters`` contexts need the values: until the last of them ends the bucket stays
        # gathered. Whether that one has to release it, as nobody else needs the values.
        self.gather_refs = 0
        self.release_when_unreferenced = False
        # While ``offload_states`` has taken the shard's memory: what an error says of it.
        self.offloaded_notice: str | None = None
        # The engine's hooks on modules, which fetch for uses outside of modules too; None for buckets of ``zero.Init``.
        self.hooks: ModuleHooks | None = None
        # What ``guards.py`` compares with, to find a write: versions of the parameters, and values of a sample.
        self.accepted: tuple[list[int], torch.Tensor | None] = ([], None)
        self._wait_for_update: Callable[[], None] | None = None
        for param, slot in zip(self.params, in_layout.slots, strict=True):
            param._record.bucket, param._record.slot = self, slot

    @property
    def shard(self) -> torch.Tensor:
        """1-D ``[shard_numel]``, complete for the current stream."""
        guards.check_on_device(self)
        self.wait_for_update()
        return self._shard

    def wait_for_update(self) -> None:
        """Let the current stream wait for what the last step has written, if that is still on its way."""
        if self._wait_for_update is not None:
            self._wait_for_update()
            self._wait_for_update = None

    def mark_updated(self, wait: Callable[[], None] | None) -> None:
        """The shard has new values, or will have them after ``wait``, which the next reader calls."""
        self._wait_for_update = wait
        self.generation += 1

    @property
    def gathered(self) -> torch.Tensor:
        """1-D ``[in_layout.numel]``, in a buffer of the pool: the whole bucket. While INFLIGHT it is being filled."""
        if self._gathered is None:
            raise RuntimeError(f"bucket {self.key} is {self.status.name}: its values are not here")
        return self._gathered

    @property
    def label(self) -> str:
        """The first parameters of the bucket, for messages."""
        names = [param._record.name for param in self.params]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    # ---- NOT_AVAILABLE → INFLIGHT → AVAILABLE → NOT_AVAILABLE --------------------------------------------------------
    # What is made here outlives the pass under way, perhaps one of inference: all but release is in ``outliving_pass``.

    def launch(self, kind: str, may_quantize: bool = False) -> None:
        """NOT_AVAILABLE → INFLIGHT: take a buffer and launch the all-gather, ``kind`` in the ledger, into it.

        ``may_quantize``: modules will compute with the values, which qwZ quantises. Else the very values come, as the
        program reads them.
        """
        self._expect(ZeroParamStatus.NOT_AVAILABLE, "launched")
        guards.check_on_device(self)
        buffer = self.pool.take(self.in_layout.numel, self._shard if self.shard_is_buffer else None)
        self._gathered = buffer
        if buffer.numel() > self.in_layout.numel:  # the pool gives what it has
            self._gathered = buffer[: self.in_layout.numel]
        # From here on a view of this memory counts as a view of this bucket's values: ``module_hooks.py:pack``.
        address = storage_ptr_of(buffer)
        self.pool.contents[address] = (self, self.generation)
        self.gathered_by = self.strategy if may_quantize else self.strategy.unquantized
        try:
            self.gathered_by.launch(kind, self)
        except BaseException:  # from a disk, say: nothing is under way, and the bucket is as it was
            self.gathered_by.finish()  # gives back the memory for messages
            self._gathered = buffer = None  # type: ignore[assignment]
            del self.pool.contents[address]
            if not self.shard_is_buffer:
                self.pool.give(address)
            raise
        self.status = ZeroParamStatus.INFLIGHT

    def wait(self) -> None:
        """INFLIGHT → AVAILABLE: the values are here; the parameters are placeholders until :meth:`show`."""
        self._expect(ZeroParamStatus.INFLIGHT, "waited for")
        # The current stream waits, not the host: what is computed with the values is ordered behind their arrival.
        self.gathered_by.finish()
        guards.accept_writes(self)
        self.status = ZeroParamStatus.AVAILABLE

    def show(self) -> None:
        """AVAILABLE: the parameters become views of what is gathered, if they are not."""
        if not self.shown:
            # Views, not copies: a bucket of a thousand parameters costs a thousand small objects and no memory.
            whole, start = self.gathered, self.in_layout.offset
            for param, slot in zip(self.params, self.in_layout.slots, strict=True):
                param.show(whole.as_strided(param._record.shape, param._record.stride, slot.offset - start))
            self.shown = True

    def hide(self) -> None:
        """AVAILABLE still, but the parameters become placeholders, if they are not."""
        if self.shown:
            for param in self.params:
                param.hide(self._shard.dtype, self.strategy.comm.device)
            self.shown = False

    def hide_unused(self) -> None:
        """:meth:`hide`, unless a context needs the values, or one was written: :meth:`release` has to find that."""
        if self.shown and not self.gather_refs and guards.modified_param(self) is None:
            self.hide()

    def release(self, discard: bool = False) -> bool:
        """AVAILABLE → NOT_AVAILABLE: the parameters become placeholders, the buffer goes back to the pool.

        With ``discard`` writes are not looked for: an exception has ended one in the middle. Returns whether no view of
        the buffer is held any more; with one rank always, as the buffer is the shard and is not used again.

        Raises:
            PartitionedUseError: a parameter was written. It is released all the same.
        """
        self._expect(ZeroParamStatus.AVAILABLE, "released")
        written = None if discard else guards.modified_param(self)
        address = storage_ptr_of(self.gathered)
        if discard:  # a view that is kept shows what was written, which is no parameter's value
            self.pool.contents.pop(address, None)
        # All references of ours go before the pool counts those that are left: only the program's keep a buffer from
        # being used again.
        self.hide()
        self._gathered = None
        self.status = ZeroParamStatus.NOT_AVAILABLE
        unviewed = self.shard_is_buffer or self.pool.give(address)
        if written is not None:
            raise guards.write_lost(written, "is lost")
        return unviewed

    @outliving_pass()
    def gather_again(self, kind: str, may_quantize: bool) -> None:
        """AVAILABLE: the very values in place of quantised ones, or the reverse, in the same memory. A collective.

        Without quantisation nothing happens. **That it was unquantised for a while must not be seen later**: had this
        bucket been released in between, its next use would have had quantised ones.
        """
        strategy = self.strategy if may_quantize else self.strategy.unquantized
        if self.status is not ZeroParamStatus.AVAILABLE or strategy.quantizes is self.gathered_by.quantizes:
            return
        if self.gathered_by.quantizes:
            guards.check_writes(self)
        self._refill(kind, strategy)

    def _refill(self, kind: str, strategy: PlainAllGather) -> None:
        # Into the same buffer, so that views which modules and autograd hold have the new values, too.
        self.gathered_by = strategy
        strategy.launch(kind, self)
        strategy.finish()
        self.pool.contents[storage_ptr_of(self.gathered)] = (self, self.generation)
        guards.accept_writes(self)

    @outliving_pass()
    def renew_held(self) -> None:
        """After a step or a load: gather the new values into a bucket that the program holds gathered. A collective."""
        if self.gather_refs:
            self._refill(ON_REQUEST, self.gathered_by)

    def _expect(self, status: ZeroParamStatus, verb: str) -> None:
        if self.status is not status:
            raise RuntimeError(f"bucket {self.key} is {self.status.name} and cannot be {verb}")

    # ---- reading and writing -----------------------------------------------------------------------------------------

    def value(self, param: ZeroParameter) -> torch.Tensor:
        """The whole parameter, AVAILABLE only: a view of what is gathered, in the parameter's shape and strides."""
        record = param._record
        return self.gathered.as_strided(record.shape, record.stride, record.placed()[1].offset - self.in_layout.offset)

    def fragment_of(self, slot: ParamSlot) -> torch.Tensor:
        """1-D: this rank's elements of one parameter, in its shard."""
        mine = self.in_layout.fragment(slot, self.strategy.comm.rank)
        return self.shard[mine.shard_start - self.in_layout.shard_offset :][: mine.numel]

    @torch.no_grad()
    def write(self, param: ZeroParameter, values: torch.Tensor) -> None:
        """New values for one parameter, 1-D and whole, the same on every rank: this rank keeps its fragment."""
        # The group has waited for fetches that read a shard in host memory; afterwards its masters follow.
        slot = param._record.placed()[1]
        mine = self.in_layout.fragment(slot, self.strategy.comm.rank)
        with self.param_group.writing(param) if self.param_group is not None else nullcontext():
            self.fragment_of(slot).copy_(values[mine.start :][: mine.numel])
        self.generation += 1
        # What is gathered, or on its way, follows: in place, after the all-gather, which would overwrite it.
        if self.status is not ZeroParamStatus.NOT_AVAILABLE:
            self.gathered_by.finish()
            self.pool.contents[storage_ptr_of(self.gathered)] = (self, self.generation)
            shown = self.value(param)
            if values.data_ptr() != shown.data_ptr():
                shown.copy_(values.view(shown.shape))
            guards.accept_values(self)


def renew_copies(buckets: Sequence[PartitionedBucket]) -> None:
    """The shards have new values: secondary shards follow, and what the program holds gathered. A collective."""
    send_to_replicas(buckets)
    for bucket in buckets:
        bucket.renew_held()
