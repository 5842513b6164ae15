"""The way back: from what the CPU's step has written to the parameters, interval by interval.

An interval of the layout is a sub-group of the CPU's step. While the CPU updates interval k+1, the new parameters of
interval k travel to the device, and from there to the other ranks::

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

from deepzero.comm import ranges
from deepzero.layout import Interval, Piece
from deepzero.offload.arena import HostArena, Region
from deepzero.offload.placement import Placement
from deepzero.offload.wire import TO_DEVICE, Copy, Wire
from deepzero.runtime.zero.gradients import ParameterGroup
from deepzero.runtime.zero.sharded_step import MasterPart

STAGING = "host_buffers"

Arrived = Callable[[int, Interval, "Copy | None"], None]
"""(group, interval, copy): new parameters are in place, or will be when the copy has arrived."""


def staged_parts(placement: Placement, dtype: torch.dtype) -> list[int]:
    """Elements of the intervals whose new parameters go through staging."""
    if dtype == torch.float32:
        return []  # the masters themselves are sent
    layout = placement.layout
    return [i.part_numel for i in layout.intervals if placement.steps_on_host(i) and not placement.keeps_on_host(i)]


def staging_regions(parts: Sequence[int], dtype: torch.dtype, whole: bool) -> list[Region]:
    """Two buffers for the largest of ``parts``; with ``whole`` one for each."""
    if not parts:
        return []
    extents = list(parts) if whole else [max(parts)] * min(2, len(parts))
    return [Region(STAGING, extent, dtype) for extent in extents]


class Staging:
    """Buffers that are written by the CPU and read by copies, in turn."""

    def __init__(self, regions: Sequence[Region], arena: HostArena) -> None:
        self._buffers = [arena.carve(STAGING, region.numel, region.dtype) for region in regions]
        self._copies: list[Copy | None] = [None] * len(regions)

    def take(self, turn: int, numel: int) -> tuple[int, torch.Tensor]:
        """The buffer whose turn it is, when what it held has left."""
        number = turn % len(self._buffers)
        copy = self._copies[number]
        if copy is not None:
            copy.finish()
        return number, self._buffers[number][:numel]

    def sent(self, number: int, copy: Copy) -> None:
        """The buffer belongs to ``copy`` now."""
        self._copies[number] = copy


class WayBack:
    """One interval's new parameters, from the CPU's step to where the model reads them.

    Args:
        number: the group's.
        group: to which the interval belongs.
        interval: which the CPU steps on.
        rank: this rank.
        wire: to the device.
        staging: None where nothing goes through it.
        turn: how many of those before it go through staging.
        arrived: told when something is on its way, or there.
    """

    def __init__(
        self,
        number: int,
        group: ParameterGroup,
        interval: Interval,
        rank: int,
        wire: Wire,
        staging: Staging | None,
        turn: int,
        arrived: Arrived,
    ) -> None:
        self.number, self.group, self.interval, self.wire, self._arrived = number, group, interval, wire, arrived
        first, last = interval.shard_offset, interval.shard_offset + interval.part_numel
        placed = [(piece, m) for piece, m in zip(group.pieces, group.masters, strict=True)]
        inside = [(piece, master) for piece, master in placed if first <= piece.shard_start < last]
        self.pieces: list[Piece] = [piece for piece, _ in inside]
        self.masters = [master for _, master in inside]
        self.parts: list[MasterPart] = []
        """Masters and gradients, in the order of :attr:`pieces`; put in by whoever knows the gradients."""
        self._padding = interval.part_numel - interval.true_numel_of(rank)
        self._on_host = group.placement.keeps_on_host(interval)
        self._staging = staging if group.dtype != torch.float32 and not self._on_host else None
        self._turn = turn
        self._taken: tuple[int, torch.Tensor] | None = None
        self._copy: Copy | None = None

    def outs(self) -> list[torch.Tensor | None]:
        """Where the step writes the new parameters, piece by piece; None: the master is what is sent, or is it."""
        if self._copy is not None:
            self._copy.finish()
            self._copy = None
        if self._on_host:
            self.group.may_overwrite(self.interval)
            if self.group.dtype == torch.float32 and self.group.placement.own_masters_at(self.interval):
                return [None] * len(self.pieces)
            return [self.group.share_of(piece) for piece in self.pieces]
        if self._staging is None:
            return [None] * len(self.pieces)
        self._taken = self._staging.take(self._turn, self.interval.part_numel)
        staged = self._taken[1]
        cursor, runs = 0, [(piece.shard_start - self.interval.shard_offset, piece.numel) for piece in self.pieces]
        for start, numel in runs:  # padding between parameters is zero on the device, too
            staged[cursor:start].zero_()
            cursor = start + numel
        staged[cursor:].zero_()
        return [staged[start : start + numel] for start, numel in runs]

    def where(self) -> tuple[int, str]:
        """The interval's number and its first parameter, for traces."""
        return self.interval.index, self.group.names[self.interval.slots[0].index]

    def send(self) -> None:
        """The step has written: launch the copy, and say so."""
        where = f"interval {self.interval.index}"
        if self._on_host:
            self._arrived(self.number, self.interval, None)
            return
        source = self._taken[1] if self._taken is not None else self.group.master_of(self.interval)
        target = self.group.target_of(self.interval)
        with ranges.span("publish", *self.where()):
            copy = self.wire.to_device(TO_DEVICE, target, source.detach(), self._padding, where)
        if self._taken is not None and self._staging is not None:
            self._staging.sent(self._taken[0], copy)
        else:
            self._copy = copy
        self._taken = None
        self._arrived(self.number, self.interval, copy)

    @torch.no_grad()
    def lay(self) -> None:
        """Send what the masters hold, without a step: they have been loaded."""
        for out, master in zip(self.outs(), self.masters, strict=True):
            if out is not None:
                out.copy_(master)
        self.send()
