"""The way back: from what the CPU's step has written to the parameters, bucket by bucket.

A bucket of the layout is a sub-group of the CPU's step. While the CPU updates bucket k+1, the new parameters of
bucket k travel to the device, and from there to the other ranks::

    CPU     | step on 0 | step on 1 | step on 2 | ...
    wire                | 0 up      | 1 up      | 2 up ...
    ranks                           | gather 0  | gather 1 ...       (stages 1 and 2)

The step writes each parameter in the compute dtype, in the same pass over memory, into a staging buffer of the arena.
There are two, and each is written again only when its copy has left. A delayed update keeps what it wrote until the
next boundary, and so has staging for all of it. Where the parameters themselves live in host memory the step writes
straight into them, and nothing travels here.

Sources: section 4.2 of the ZeRO-Offload paper ("we tile the parameters … and overlap"); ZeRO-Offload++ for ``ratio``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from deepzero.comm import profiler_ranges
from deepzero.layout import Bucket, Fragment
from deepzero.offload.arena import HostArena, Region
from deepzero.offload.copy_streams import TO_DEVICE, HostDeviceCopier, PendingCopy
from deepzero.offload.offload_plan import OffloadPlan
from deepzero.runtime.zero.sharded_step import MasterFragment, ParamGroup

STAGING = "host_buffers"

OnUploaded = Callable[[int, Bucket, "PendingCopy | None"], None]
"""(group, bucket, copy): new parameters are in place, or will be when the copy has arrived."""


def staged_parts(placement: OffloadPlan, dtype: torch.dtype) -> list[int]:
    """Elements of the buckets whose new parameters go through staging."""
    if dtype == torch.float32:
        return []  # the masters themselves are sent
    layout = placement.layout
    return [i.shard_numel for i in layout.buckets if placement.steps_on_host(i) and not placement.keeps_on_host(i)]


def staging_regions(parts: Sequence[int], dtype: torch.dtype, whole: bool) -> list[Region]:
    """Two buffers for the largest of ``parts``; with ``whole`` one for each."""
    if not parts:
        return []
    extents = list(parts) if whole else [max(parts)] * min(2, len(parts))
    return [Region(STAGING, extent, dtype) for extent in extents]


class Staging:
    """Buffers that are written by the CPU and read by copies, in turn."""

    def __init__(self, regions: Sequence[Region], arena: HostArena) -> None:
        self._buffers = [arena.allocate(STAGING, region.numel, region.dtype) for region in regions]
        self._copies: list[PendingCopy | None] = [None] * len(regions)

    def take(self, turn: int, numel: int) -> tuple[int, torch.Tensor]:
        """The buffer whose turn it is, when what it held has left."""
        number = turn % len(self._buffers)
        copy = self._copies[number]
        if copy is not None:
            copy.finish()
        return number, self._buffers[number][:numel]

    def sent(self, number: int, copy: PendingCopy) -> None:
        """The buffer belongs to ``copy`` now."""
        self._copies[number] = copy


class HostParamUpload:
    """One bucket's new parameters, from the CPU's step to where the model reads them.

    Args:
        number: the group's.
        group: to which the bucket belongs.
        bucket: which the CPU steps on.
        rank: this rank.
        wire: to the device.
        staging: None where nothing goes through it.
        turn: how many of those before it go through staging.
        arrived: told when something is on its way, or there.
    """

    def __init__(
        self,
        number: int,
        group: ParamGroup,
        bucket: Bucket,
        rank: int,
        wire: HostDeviceCopier,
        staging: Staging | None,
        turn: int,
        arrived: OnUploaded,
    ) -> None:
        self.number, self.group, self.bucket, self.wire, self._arrived = number, group, bucket, wire, arrived
        first, last = bucket.shard_offset, bucket.shard_offset + bucket.shard_numel
        placed = [(fragment, m) for fragment, m in zip(group.fragments, group.masters, strict=True)]
        inside = [(fragment, master) for fragment, master in placed if first <= fragment.shard_start < last]
        self.fragments: list[Fragment] = [fragment for fragment, _ in inside]
        self.masters = [master for _, master in inside]
        self.parts: list[MasterFragment] = []
        """Masters and gradients, in the order of :attr:`fragments`; put in by whoever knows the gradients."""
        self._padding = bucket.padding_of(rank)
        self._on_host = group.placement.keeps_on_host(bucket)
        self._staging = staging if group.dtype != torch.float32 and not self._on_host else None
        self._turn = turn
        self._taken: tuple[int, torch.Tensor] | None = None
        self._copy: PendingCopy | None = None

    def outs(self) -> list[torch.Tensor | None]:
        """Where the step writes the new parameters, piece by piece; None: the master is what is sent, or is it."""
        if self._copy is not None:
            self._copy.finish()
            self._copy = None
        if self._on_host:
            self.group.wait_for_fetches(self.bucket)
            if self.group.dtype == torch.float32 and self.group.placement.own_masters_at(self.bucket):
                return [None] * len(self.fragments)
            return [self.group.param_fragment(fragment) for fragment in self.fragments]
        if self._staging is None:
            return [None] * len(self.fragments)
        self._taken = self._staging.take(self._turn, self.bucket.shard_numel)
        staged = self._taken[1]
        cursor, runs = (
            0,
            [(fragment.shard_start - self.bucket.shard_offset, fragment.numel) for fragment in self.fragments],
        )
        for start, numel in runs:  # padding between parameters is zero on the device, too
            staged[cursor:start].zero_()
            cursor = start + numel
        staged[cursor:].zero_()
        return [staged[start : start + numel] for start, numel in runs]

    def where(self) -> tuple[int, str]:
        """The bucket's number and its first parameter, for traces."""
        return self.bucket.index, self.group.names[self.bucket.slots[0].index]

    def send(self) -> None:
        """The step has written: launch the copy, and say so."""
        where = f"bucket {self.bucket.index}"
        if self._on_host:
            self._arrived(self.number, self.bucket, None)
            return
        source = self._taken[1] if self._taken is not None else self.group.master_of(self.bucket)
        target = self.group.param_shard(self.bucket)
        with profiler_ranges.span("publish", *self.where()):
            copy = self.wire.to_device(TO_DEVICE, target, source.detach(), self._padding, where)
        if self._taken is not None and self._staging is not None:
            self._staging.sent(self._taken[0], copy)
        else:
            self._copy = copy
        self._taken = None
        self._arrived(self.number, self.bucket, copy)

    @torch.no_grad()
    def lay(self) -> None:
        """Send what the masters hold, without a step: they have been loaded."""
        for out, master in zip(self.outs(), self.masters, strict=True):
            if out is not None:
                out.copy_(master)
        self.send()
