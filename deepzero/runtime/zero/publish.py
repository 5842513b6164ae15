"""Publish: whole parameters that every rank has a part of, in stages 1 and 2; stage 3's persistent parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deepzero.comm import profiler_ranges
from deepzero.comm.collectives import Communicator, Pending
from deepzero.layout import Bucket
from deepzero.offload.copy_streams import PendingCopy
from deepzero.runtime.zero.flat_param_group import FlatParamGroup

ALL_GATHER = "parameters.all_gather"


@torch.no_grad()
def all_gather_dp_groups(groups: Sequence[FlatParamGroup], comm: Communicator) -> list[Pending]:
    """Cast each master into my part of its bucket and launch the bucket's all-gather at once, in place.

    Buckets that the CPU has stepped on are not among them: :func:`all_gather_arrived` launches those.

    Args:
        groups: built with ``whole=False``.
        comm: the ranks.

    Source: the function of this name in DeepSpeed's ``runtime/utils.py``.
    """
    gathers = []
    for group in groups:
        for bucket in group.layout.buckets:
            if not group.placement.steps_on_host(bucket):
                mine = group.param_shard(bucket)
                if group.dtype != torch.float32:
                    mine.copy_(group.master_of(bucket))
                gathers.append(_all_gather(group, bucket, comm))
    return gathers


@dataclass(frozen=True)
class PendingAllGather:
    """A bucket that comes from the host, and goes on to the other ranks."""

    copy: PendingCopy | None
    gather: Pending

    def wait(self) -> None:
        """Whole, for the current stream. With one rank nothing is gathered, and the copy alone is waited for."""
        if self.copy is not None:
            self.copy.wait()
        self.gather.wait()


def all_gather_arrived(
    group: FlatParamGroup, bucket: Bucket, copy: PendingCopy | None, comm: Communicator
) -> PendingAllGather:
    """My part of ``bucket`` is on its way from the host: launch the bucket's all-gather behind it."""
    if copy is None:
        return PendingAllGather(None, _all_gather(group, bucket, comm))
    with copy.afterwards(alone=comm.world_size == 1):
        return PendingAllGather(copy, _all_gather(group, bucket, comm))


def _all_gather(group: FlatParamGroup, bucket: Bucket, comm: Communicator) -> Pending:
    whole = group.flat_P[bucket.offset : bucket.offset + bucket.numel]
    padding = (comm.world_size - 1) * (bucket.shard_numel - bucket.true_numel_of(comm.rank))
    where = f"bucket {bucket.index}"
    with profiler_ranges.span("publish", bucket.index, group.names[bucket.slots[0].index]):
        return comm.all_gather(ALL_GATHER, whole, padding, where)
