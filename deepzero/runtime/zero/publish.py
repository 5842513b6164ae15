"""Publish: whole parameters that every rank has a part of, in stages 1 and 2; stage 3's persistent parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepzero.comm.collectives import Communicator, Pending
from deepzero.runtime.zero.flat_group import FlatGroup

ALL_GATHER = "parameters.all_gather"


@torch.no_grad()
def all_gather_dp_groups(groups: Sequence[FlatGroup], comm: Communicator) -> list[Pending]:
    """Cast each master into my part of its interval and launch the interval's all-gather at once, in place.

    Args:
        groups: built with ``whole=False``.
        comm: the ranks.

    Source: the function of this name in DeepSpeed's ``runtime/utils.py``.
    """
    gathers = []
    for group in groups:
        for interval in group.layout.intervals:
            partitions = group.partitions[interval.index]
            if group.dtype != torch.float32:
                partitions[comm.rank].copy_(group.master_of(interval))
            whole = group.flat_P[interval.offset : interval.offset + interval.numel]
            padding = (comm.world_size - 1) * (interval.part_numel - interval.true_numel_of(comm.rank))
            where = f"interval {interval.index}"
            gathers.append(comm.all_gather(ALL_GATHER, partitions, whole, padding, where))
    return gathers
