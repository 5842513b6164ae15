"""Reduced gradients that live in host memory: how a bucket's sum leaves the device while the backward pass goes on.

The sum of a bucket is written into a *slot* on the device and leaves for the host at once. The first micro-batch of a
step lands where the optimizer will read it. Later ones land in the slot's host half and are added there by the CPU, in
the accumulation dtype and in the order of the micro-batches, which gives the bits that adding on the device gives::

    acquire slot        launch                    settle (before the slot is used again, or at the boundary)
    reduce into it      copy down, on its stream  the copy is there; add it to the sum, take its norm
    ---- free ----> filled ------- in flight -------> landed ------> free

There is one slot more than there are buckets, so that no reduction waits for the copy of the one before it.

Source: section 4.1 of the ZeRO-Offload paper ("transferred to the CPU memory … as soon as they become available").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from deepzero.layout import Bucket
from deepzero.offload.arena import HostArena, Region
from deepzero.offload.copy_streams import TO_HOST, HostDeviceCopier, PendingCopy

GRADIENTS, LANDING = "host_gradients", "host_buffers"

CHUNK = 1 << 17
"""Elements that are added at a time, and measured while they are in the core's cache."""

Measure = Callable[[torch.Tensor, int], None]
"""As in ``reduce_scatter.py``: called with each finished chunk of a sum, and where in the sum it starts."""


@dataclass
class StagingSlot:
    """A place for one part's sum on the device, and one on the host for what has to be added."""

    device: torch.Tensor
    staging: torch.Tensor
    copy: PendingCopy | None = None
    then: Callable[[], None] | None = None
    """What the host does with it when it has landed."""
    taken: bool = False
    """A reduction writes into it."""

    def settle(self) -> None:
        """The slot's copy has arrived, and what it brought is where it belongs."""
        if self.copy is not None:
            self.copy.finish()
        if self.then is not None:
            self.then()
        self.copy = self.then = None


@dataclass(frozen=True)
class HostGradLayout:
    """What the arena holds for gradients: which buckets, and in how many copies."""

    counts: tuple[int, ...]
    """Of each group: how many buckets, from the first, live on the host."""
    extents: tuple[int, ...]
    """Of each group: elements of the share that those buckets have, padding included."""
    copies: int
    """2 while the step of the last gradients may still run when the next ones come (delayed update), else 1."""
    dtype: torch.dtype
    largest_part: int
    slots: int

    def regions(self) -> list[Region]:
        """The plan of the arena's part."""
        sums = [Region(GRADIENTS, extent, self.dtype) for extent in self.extents for _ in range(self.copies)]
        return sums + [Region(LANDING, self.largest_part, torch.float32) for _ in range(self.slots)]


class HostGradients:
    """``grad_S`` of the buckets that live on the host.

    Args:
        plan: sizes.
        arena: is carved here, as ``plan.regions`` says.
        wire: to the host.
    """

    def __init__(self, plan: HostGradLayout, arena: HostArena, wire: HostDeviceCopier) -> None:
        self.plan, self.wire = plan, wire
        self.counts = plan.counts
        self._sums = [[arena.allocate(GRADIENTS, n, plan.dtype) for _ in range(plan.copies)] for n in plan.extents]
        self._current = 0
        landings = [arena.allocate(LANDING, plan.largest_part, torch.float32) for _ in range(plan.slots)]
        # fp32, whatever the sums are kept in: what is added to a narrower sum is added unrounded.
        self._slots = [
            StagingSlot(torch.zeros(plan.largest_part, dtype=torch.float32, device=wire.device), staging)
            for staging in landings
        ]
        self._next = 0

    def holds(self, group: int, bucket: Bucket) -> bool:
        """Whether the host has this bucket's sums."""
        return bucket.index < self.counts[group]

    def sum_of(self, group: int, bucket: Bucket) -> torch.Tensor:
        """This rank's part of the bucket's sum, on the host; complete after :meth:`drain`."""
        return self._sums[group][self._current][bucket.shard_offset : bucket.shard_offset + bucket.shard_numel]

    def swap(self) -> None:
        """The sums of this step are in use; the next ones go to the other copy."""
        self._current = (self._current + 1) % self.plan.copies

    def stage(self, bucket: Bucket, accumulate: bool) -> tuple[StagingSlot, torch.Tensor]:
        """The oldest slot, free, and where in it the bucket's sum is to be written.

        Args:
            bucket: what will be reduced.
            accumulate: it will be added to a sum that is on the host; then it travels in fp32.
        """
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        if slot.taken:
            raise RuntimeError("more reductions are under way than there are slots for their sums")
        slot.settle()
        slot.taken = True
        dtype = torch.float32 if accumulate else self.plan.dtype
        return slot, slot.device.view(dtype)[: bucket.shard_numel]

    def leave(
        self, slot: StagingSlot, group: int, bucket: Bucket, accumulate: bool, padding: int, measure: Measure | None
    ) -> None:
        """The slot's sum is written: launch its copy. Called where it was written, in stream order.

        Args:
            slot: from :meth:`stage`.
            group: the bucket's.
            bucket: what was reduced.
            accumulate: as for :meth:`stage`.
            padding: elements of the part that belong to no parameter.
            measure: sees the sum on the host when something was added to it.
        """
        target, where = self.sum_of(group, bucket), f"bucket {bucket.index}"
        if accumulate:
            staging = slot.staging[: bucket.shard_numel]
            slot.copy = self.wire.to_host(TO_HOST, staging, slot.device[: bucket.shard_numel], padding, where)
            slot.then = lambda: _add(target, staging, measure)
        else:
            source = slot.device.view(self.plan.dtype)[: bucket.shard_numel]
            slot.copy = self.wire.to_host(TO_HOST, target, source, padding, where)
        slot.taken = False

    def drain(self) -> None:
        """Everything that has left has arrived. Afterwards the sums may be read."""
        for step in range(len(self._slots)):
            self._slots[(self._next + step) % len(self._slots)].settle()

    def discard(self) -> None:
        """Nothing that is under way is wanted, also not what an exception has kept from leaving."""
        self.drain()
        for slot in self._slots:
            slot.taken = False

    def buffers(self) -> list[torch.Tensor]:
        """Kept on the device, for the ledger."""
        return [slot.device for slot in self._slots]


@torch.no_grad()
def _add(target: torch.Tensor, landed: torch.Tensor, measure: Measure | None) -> None:
    """``target += landed``, in chunks that are measured while they are in the core's cache."""
    for lo in range(0, target.numel(), CHUNK):
        chunk = target[lo : lo + CHUNK]
        chunk.add_(landed[lo : lo + CHUNK])
        if measure is not None:
            measure(chunk, lo)
