"""A group before it has tensors: its parameters, their layout, and what of it ``offload/`` puts into host memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepzero.layout import Bucket, FlatLayout

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class GroupPlan:
    """Which parameters are in a group, and where its tensors will live; by default nothing is offloaded.

    Whole buckets go to the host, in the order in which their gradients arrive: the first to arrive have the rest of the
    backward pass to travel in, and while the CPU is still busy with them the device steps on the last. In fp32 a
    parameter is its own master where both lie on the same side; elsewhere there is a separate fp32 master.
    """

    params: Sequence[nn.Parameter]  # in the order of the layout
    layout: FlatLayout
    optimizer_group: int | None  # None: no optimizer, no masters
    partitioned: bool  # stage 3: every rank keeps a part
    per_tensor: bool = False  # laid out so that no parameter is cut: the optimizer gets each in its shape
    own_masters: bool = False  # the parameters are fp32: their own masters, where both are on one side
    host_optimizer_buckets: int = 0  # so many, from the first, have masters, moments and reduced gradients on the host
    host_parameter_buckets: int = 0  # so many have this rank's part of their parameters there

    @property
    def trained(self) -> bool:
        """Whether an optimizer steps on it."""
        return self.optimizer_group is not None

    @property
    def host_optimizer_numel(self) -> int:
        """Elements of the shard, padding included, that the CPU steps on."""
        return sum(bucket.shard_numel for bucket in self.layout.buckets[: self.host_optimizer_buckets])

    @property
    def host_parameter_numel(self) -> int:
        """Elements of the shard, padding included, whose parameters are in host memory."""
        return sum(bucket.shard_numel for bucket in self.layout.buckets[: self.host_parameter_buckets])

    @property
    def host_master_span(self) -> range:
        """Elements of the shard with a separate master in host memory."""
        # In fp32 the first buckets, whose parameters are in host memory too, are their own masters.
        stop = self.host_optimizer_numel if self.trained else 0
        return range(min(self.host_parameter_numel, stop) if self.own_masters else 0, stop)

    @property
    def device_master_span(self) -> range:
        """Elements of the shard with a separate master on the device."""
        # In fp32 those alone whose parameters are in host memory, but which the device steps on.
        start = self.host_optimizer_numel
        if not self.trained:
            return range(0)
        return range(start, max(self.host_parameter_numel, start) if self.own_masters else self.layout.shard_numel)

    def own_masters_at(self, bucket: Bucket) -> bool:
        """Whether this bucket's parameters are their own masters."""
        return self.trained and self.own_masters and self.steps_on_host(bucket) == self.keeps_on_host(bucket)

    def steps_on_host(self, bucket: Bucket) -> bool:
        """Whether the CPU steps on this bucket."""
        return bucket.index < self.host_optimizer_buckets

    def keeps_on_host(self, bucket: Bucket) -> bool:
        """Whether this rank's part of the bucket's parameters is in host memory."""
        return bucket.index < self.host_parameter_buckets
