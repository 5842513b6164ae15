"""Publish: whole parameters that every rank has a part of, in stages 1 and 2; stage 3's persistent parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deepzero.comm import ranges
from deepzero.comm.collectives import Communicator, Pending
from deepzero.layout import Interval
from deepzero.offload.wire import Copy
from deepzero.runtime.zero.flat_group import FlatGroup

ALL_GATHER = "parameters.all_gather"


@torch.no_grad()
def all_gather_dp_groups(groups: Sequence[FlatGroup], comm: Communicator) -> list[Pending]:
    """Cast each master into my part of its interval and launch the interval's all-gather at once, in place.

    Intervals that the CPU has stepped on are not among them: :func:`all_gather_arrived` launches those.

    Args:
        groups: built with ``whole=False``.
        comm: the ranks.

    Source: the function of this name in DeepSpeed's ``runtime/utils.py``.
    """
    gathers = []
    for group in groups:
        for interval in group.layout.intervals:
            if not group.placement.steps_on_host(interval):
                mine = group.target_of(interval)
                if group.dtype != torch.float32:
                    mine.copy_(group.master_of(interval))
                gathers.append(_all_gather(group, interval, comm))
    return gathers


@dataclass(frozen=True)
class Arrival:
    """An interval that comes from the host, and goes on to the other ranks."""

    copy: Copy | None
    gather: Pending

    def wait(self) -> None:
        """Whole, for the current stream. With one rank nothing is gathered, and the copy alone is waited for."""
        if self.copy is not None:
            self.copy.wait()
        self.gather.wait()


def all_gather_arrived(group: FlatGroup, interval: Interval, copy: Copy | None, comm: Communicator) -> Arrival:
    """My part of ``interval`` is on its way from the host: launch the interval's all-gather behind it."""
    if copy is None:
        return Arrival(None, _all_gather(group, interval, comm))
    with copy.afterwards(alone=comm.world_size == 1):
        return Arrival(copy, _all_gather(group, interval, comm))


def _all_gather(group: FlatGroup, interval: Interval, comm: Communicator) -> Pending:
    whole = group.flat_P[interval.offset : interval.offset + interval.numel]
    padding = (comm.world_size - 1) * (interval.part_numel - interval.true_numel_of(comm.rank))
    where = f"interval {interval.index}"
    with ranges.span("publish", interval.index, group.names[interval.slots[0].index]):
        return comm.all_gather(ALL_GATHER, whole, padding, where)
