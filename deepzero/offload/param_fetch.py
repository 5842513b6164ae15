"""Parameters in host memory (``offload_param``): the way of a shard to the device, ahead of its bucket's all-gather."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from deepzero.comm.collectives import Communicator
from deepzero.layout import Bucket
from deepzero.offload.copy_streams import FETCH, FETCH_BETWEEN_STEPS, HostDeviceCopier, PendingCopy
from deepzero.runtime.zero.parameter_all_gather import DeviceShard


class HostShard(DeviceShard):
    """The source of a bucket's shard that lies in host memory; every gather copies it to the device anew.

    Args:
        copier: between host and device.
        bucket: whose shard it is.
        comm: the ranks.
        where: the bucket's name, for traces.
    """

    on_host = True

    def __init__(self, copier: HostDeviceCopier, bucket: Bucket, comm: Communicator, where: str) -> None:
        self._copier, self._comm, self._where = copier, comm, where
        self._padding = bucket.padding_of(comm.rank)
        self._copy: PendingCopy | None = None
        self._last: PendingCopy | None = None
        comm.ledger.untracked_kinds.add(FETCH_BETWEEN_STEPS)

    @contextmanager
    def fetch(self, kind: str, shard: torch.Tensor, place: torch.Tensor) -> Iterator[torch.Tensor]:
        """Copy the shard to ``place``. Inside the context the current stream is behind the copy.

        What is launched there is ordered behind the copy on the copy's own stream: the model goes on computing, as it
        does while others send.
        """
        between = kind in self._comm.ledger.untracked_kinds
        counted = FETCH_BETWEEN_STEPS if between else FETCH
        self._copy = self._last = self._copier.to_device(counted, place, shard, self._padding, self._where)
        with self._copy.afterwards(alone=self._comm.world_size == 1):
            yield place

    def wait(self) -> None:
        """Let the current stream wait for the copy."""
        if self._copy is not None:
            self._copy.wait()
            self._copy = None

    def finish(self) -> None:
        """Block until the last copy has read the shard: the CPU will overwrite it."""
        if self._last is not None:
            self._last.finish()
            self._last = None
