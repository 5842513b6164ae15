"""Which part of a layout lives in host memory: what ``offload/`` decides, and the stages go by. Pure integers."""

from __future__ import annotations

from dataclasses import dataclass

from deepzero.layout import Bucket, FlatLayout


@dataclass(frozen=True)
class OffloadPlan:
    """Where one group's tensors live: counts of buckets from the first, and what follows from them.

    Whole buckets go to the host, in the order in which their gradients arrive: the first to arrive have the rest of the
    backward pass to travel in, and while the CPU is still busy with them the device steps on the last. In fp32 a
    parameter is its own master where both lie on the same side; elsewhere there is a separate fp32 master.
    """

    layout: FlatLayout
    optimizer_buckets: int  # masters, moments and reduced gradients of so many are in host memory
    parameter_buckets: int  # this rank's part of the parameters of so many
    own_masters: bool  # the parameters are fp32: their own masters, where both are on one side
    trained: bool = True  # False: no optimizer, no masters

    @classmethod
    def on_device(cls, layout: FlatLayout, own_masters: bool, trained: bool = True) -> OffloadPlan:
        """Nothing is offloaded."""
        return cls(layout, 0, 0, own_masters, trained)

    @property
    def optimizer_numel(self) -> int:
        """Elements of the shard, padding included, that the CPU steps on."""
        return sum(bucket.shard_numel for bucket in self.layout.buckets[: self.optimizer_buckets])

    @property
    def parameter_numel(self) -> int:
        """Elements of the shard, padding included, whose parameters are in host memory."""
        return sum(bucket.shard_numel for bucket in self.layout.buckets[: self.parameter_buckets])

    @property
    def host_masters(self) -> range:
        """Elements of the shard with a separate master in host memory."""
        # In fp32 the first buckets, whose parameters are in host memory too, are their own masters.
        stop = self.optimizer_numel if self.trained else 0
        return range(min(self.parameter_numel, stop) if self.own_masters else 0, stop)

    @property
    def device_masters(self) -> range:
        """Elements of the shard with a separate master on the device."""
        # In fp32 those alone whose parameters are in host memory, but which the device steps on.
        start = self.optimizer_numel
        if not self.trained:
            return range(0)
        return range(start, max(self.parameter_numel, start) if self.own_masters else self.layout.shard_numel)

    def own_masters_at(self, bucket: Bucket) -> bool:
        """Whether this bucket's parameters are their own masters."""
        return self.trained and self.own_masters and self.steps_on_host(bucket) == self.keeps_on_host(bucket)

    def steps_on_host(self, bucket: Bucket) -> bool:
        """Whether the CPU steps on this bucket."""
        return bucket.index < self.optimizer_buckets

    def keeps_on_host(self, bucket: Bucket) -> bool:
        """Whether this rank's part of the bucket's parameters is in host memory."""
        return bucket.index < self.parameter_buckets
