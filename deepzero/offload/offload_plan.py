"""Which part of a rank's share lives in host memory. Pure integers.

``zero.offload_optimizer.ratio`` asks for a part of the optimizer's states on the host and the rest on the device (the
"twin flow" of ZeRO-Offload++); ``zero.offload_param`` for stage 3's parameters, ``max_in_cpu`` elements at most. Whole
buckets go to the host, in the order in which their gradients arrive: the first to arrive have the rest of the
backward pass to travel in, and while the CPU is still busy with them the device steps on the last.

In fp32 a parameter is its own master where both lie on the same side; elsewhere there is a separate fp32 master.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepzero.layout import Bucket, FlatLayout


@dataclass(frozen=True)
class BucketRange:
    """A run of elements of a rank's share."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Elements."""
        return self.stop - self.start

    def holds(self, place: int) -> bool:
        """Whether the element is inside."""
        return self.start <= place < self.stop


@dataclass(frozen=True)
class OffloadPlan:
    """Where one group's tensors live: counts of buckets from the first, and what follows from them."""

    layout: FlatLayout
    optimizer_buckets: int
    """Masters, moments and reduced gradients of so many buckets are in host memory."""
    parameter_buckets: int
    """This rank's part of the parameters of so many."""
    own_masters: bool
    """The parameters are fp32: their own masters, where both are on one side."""
    trained: bool = True
    """False: no optimizer, no masters."""

    @classmethod
    def on_device(cls, layout: FlatLayout, own_masters: bool, trained: bool = True) -> OffloadPlan:
        """Nothing is offloaded."""
        return cls(layout, 0, 0, own_masters, trained)

    def _numel(self, count: int) -> int:
        return sum(bucket.shard_numel for bucket in self.layout.buckets[:count])

    @property
    def optimizer_numel(self) -> int:
        """Elements of the share, padding included, that the CPU steps on."""
        return self._numel(self.optimizer_buckets)

    @property
    def parameter_numel(self) -> int:
        """Elements of the share, padding included, whose parameters are in host memory."""
        return self._numel(self.parameter_buckets)

    @property
    def host_masters(self) -> BucketRange:
        """Separate masters in host memory."""
        stop = self.optimizer_numel if self.trained else 0
        return BucketRange(min(self.parameter_numel, stop) if self.own_masters else 0, stop)

    @property
    def device_masters(self) -> BucketRange:
        """Separate masters on the device."""
        start = self.optimizer_numel
        if not self.trained:
            return BucketRange(0, 0)
        return BucketRange(start, max(self.parameter_numel, start) if self.own_masters else self.layout.shard_numel)

    def own_masters_at(self, bucket: Bucket) -> bool:
        """Whether this bucket's parameters are their own masters."""
        return self.trained and self.own_masters and self.steps_on_host(bucket) == self.keeps_on_host(bucket)

    def steps_on_host(self, bucket: Bucket) -> bool:
        """Whether the CPU steps on this bucket."""
        return bucket.index < self.optimizer_buckets

    def keeps_on_host(self, bucket: Bucket) -> bool:
        """Whether this rank's part of the bucket's parameters is in host memory."""
        return bucket.index < self.parameter_buckets


def nearest_count(layout: FlatLayout, target: float) -> int:
    """How many buckets, from the first, come nearest to ``target`` elements of the whole, padding included.

    Example:
        >>> from deepzero.layout import plan_layout
        >>> layout = plan_layout([1000] * 8, world_size=2, bucket_limit=1000)
        >>> [nearest_count(layout, ratio * layout.padded_numel) for ratio in (0.0, 0.3, 0.5, 1.0)]
        [0, 2, 4, 8]
    """
    best, taken, nearest = 0, 0, abs(target)
    for count, bucket in enumerate(layout.buckets, start=1):
        taken += bucket.numel
        if abs(taken - target) < nearest:
            best, nearest = count, abs(taken - target)
    return best


def most_count(layout: FlatLayout, limit: int | None) -> int:
    """How many buckets, from the first, keep at most ``limit`` elements on each rank; None: all.

    Example:
        >>> from deepzero.layout import plan_layout
        >>> layout = plan_layout([1000] * 4, world_size=2, bucket_limit=1000)
        >>> [most_count(layout, limit) for limit in (None, 0, 1100, 10_000)]
        [4, 0, 2, 4]
    """
    if limit is None:
        return len(layout.buckets)
    taken = 0
    for count, bucket in enumerate(layout.buckets):
        taken += bucket.shard_numel
        if taken > limit:
            return count
    return len(layout.buckets)
