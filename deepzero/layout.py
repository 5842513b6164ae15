r"""One layout serves all stages: parameters end to end, cut into buckets, every bucket cut into W equal parts.

This module is pure integers, and needs no process: it can be asked about 10,000 ranks on a laptop.

[Note: the tensors of ZeRO]
    ``W`` ranks · ``N`` true elements · ``P`` elements with padding · ``S = P / W`` a rank's shard · ``B`` a bucket.
    ZeRO's tensors are one-dimensional, and their names carry their extent. In texts and comments (and in the code, as):

    ``flat_P``    all parameters of a group, end to end, in the compute dtype (also DeepSpeed's ``bit16_groups_flat``);
    ``shard_S``   stage 3: this rank's shard of the parameters, compute dtype (``shard_on_device``, ``shard_on_host``);
    ``master_S``  this rank's shard in fp32, all that the optimizer sees (``masters_on_device``, ``masters_on_host``;
                  bucket by bucket ``single_partition_of_fp32_groups``). fp32 parameters are their own masters;
    ``grad_S``    this rank's shard of the reduced gradients, in stage 0 all P (a list, one tensor a group);
    ``send``      a bucket's gradients on their way to their owners, in the wire dtype (of ``BucketBuffers``).

    Parameters lie in the order in which their gradients arrive, each start aligned to ``ALIGN`` elements, and are cut:

    ``bucket``    a run of consecutive parameters, closed before it exceeds the bucket size, and padded to a multiple of
                  ``W * ALIGN``; it travels as one (``runtime/per_tensor.py`` gives each parameter in it one owner);
    ``part``      one of the W equal pieces of a bucket. Rank r owns the r-th part **of every bucket**;
    ``shard``     all parts of one rank, end to end: S elements. The shard *of a bucket* is a rank's part of it;
    ``fragment``  the elements of one parameter in a rank's part: the optimizer gets one tensor for each;
    ``partition`` DeepSpeed's word for a rank's share; *partitioned* parameters are stage 3's. With three ranks::

        bucket 0                bucket 1                        bucket 2
        |  r0  |  r1  |  r2  |    |   r0    |   r1    |   r2    |   |  r0  |  r1  |  r2  |      flat_P
            \                          \                                \
             +--------------------------+---------------------------------+---> r0's master_S, grad_S

    So every bucket is one balanced reduce-scatter straight into ``grad_S``, and every publication one all-gather
    straight into the parameters' storage: no table of slices, and no copy but that of gradients into their bucket.
    (DeepSpeed's ranks own contiguous ranges of it all: ``docs/layout.md`` has the reasons for ours.)

    Because starts and parts are multiples of ``ALIGN``, no aligned block of a parameter is ever split between ranks.
    The gradient norm rests on that: see ``runtime/grad_norm.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ALIGN = 64
"""Elements. 64 bf16 are 128 bytes: a pair of cache lines, and what NCCL's fast paths ask for."""

MIN_BUCKET_NUMEL = 1 << 18
"""Elements. Below this, a collective's fixed cost outweighs what overlapping it could hide."""

TARGET_BUCKETS = 16
"""A bucket as large as the model overlaps with nothing; so the model is cut into about this many."""


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class ParamSlot:
    """Where one parameter lies. Offsets and lengths are in elements."""

    index: int  # in the list of parameters that the layout was planned for
    offset: int  # start in the group's flat order (flat_P in stages 0-2); a multiple of ALIGN
    numel: int

    @property
    def end(self) -> int:
        """One past the last true element in ``flat_P``."""
        return self.offset + self.numel


@dataclass(frozen=True)
class Bucket:
    """The unit in which gradients are reduced and parameters published; in stage 3, fetched and released."""

    index: int
    offset: int  # start in the group's flat order
    numel: int  # with padding; a multiple of W * ALIGN
    shard_offset: int  # start of this bucket's part in every rank's master_S, grad_S, shard_S
    slots: tuple[ParamSlot, ...]
    world_size: int
    _true_numels: dict[int, int] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Cache of :meth:`true_numel_of`, by rank: every launch counts the padding that it sends."""

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's part."""
        return self.numel // self.world_size

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """This bucket's elements of a ``flat_P``, as a view."""
        return flat[self.offset : self.offset + self.numel]

    def shard_of(self, shard: torch.Tensor, start: int = 0) -> torch.Tensor:
        """This bucket's elements of a rank's ``master_S`` or ``grad_S``, as a view; ``shard`` begins at ``start``."""
        # Where the first buckets' parts are in host memory, the device has the end of the shard alone.
        return shard[self.shard_offset - start : self.shard_offset - start + self.shard_numel]

    def part_start(self, rank: int) -> int:
        """Start of ``rank``'s part in ``flat_P``."""
        return self.offset + rank * self.shard_numel

    def true_numel(self) -> int:
        """Elements that belong to parameters."""
        return sum(slot.numel for slot in self.slots)

    def fragment(self, slot: ParamSlot, rank: int) -> Fragment:
        """The elements of one parameter in ``rank``'s part; possibly none."""
        # A part may hold the end of one parameter, whole ones, and the beginning of another; the last ranks' parts may
        # hold padding alone. lo and hi are multiples of ALIGN, or the parameter's own end, whatever W is: so W does not
        # decide which elements the scalar tail of a vectorised kernel takes.
        first = self.part_start(rank)
        lo, hi = max(slot.offset, first), min(slot.end, first + self.shard_numel)
        if lo >= hi:
            return Fragment(slot, 0, self.shard_offset, 0)
        return Fragment(slot, lo - slot.offset, self.shard_offset + lo - first, hi - lo)

    def true_numel_of(self, rank: int) -> int:
        """Elements of ``rank``'s part that belong to parameters; the rest is padding."""
        if rank not in self._true_numels:
            self._true_numels[rank] = sum(self.fragment(slot, rank).numel for slot in self.slots)
        return self._true_numels[rank]

    def padding_of(self, rank: int) -> int:
        """Elements of ``rank``'s part that belong to no parameter."""
        return self.shard_numel - self.true_numel_of(rank)

    def gaps(self) -> list[tuple[int, int]]:
        """Ranges that belong to no parameter, relative to the bucket's start, in elements."""
        # Behind each slot: up to ALIGN - 1 elements, because the next parameter starts aligned. Behind the last one:
        # what fills the bucket up to a multiple of W * ALIGN, so that its W shards are equal. ``per_tensor.py`` fills
        # every rank's part by itself.
        ends = [self.offset, *(slot.end for slot in self.slots)]
        starts = [*(slot.offset for slot in self.slots), self.offset + self.numel]
        return [(a - self.offset, b - self.offset) for a, b in zip(ends, starts, strict=True) if a < b]


@dataclass(frozen=True)
class Fragment:
    """A run of one parameter's elements that one rank owns: what the optimizer sees as one tensor."""

    slot: ParamSlot
    start: int  # first element, counted within the parameter; a multiple of ALIGN
    shard_start: int  # where it lies in the rank's master_S and grad_S
    numel: int


@dataclass(frozen=True)
class FlatLayout:
    """The layout of one group of parameters over ``world_size`` ranks."""

    world_size: int
    slots: tuple[ParamSlot, ...]
    buckets: tuple[Bucket, ...]

    @property
    def numel(self) -> int:
        """N: true elements."""
        return sum(slot.numel for slot in self.slots)

    @property
    def padded_numel(self) -> int:
        """P: elements with padding."""
        # A group without parameters has no buckets, and takes part in nothing.
        return self.buckets[-1].offset + self.buckets[-1].numel if self.buckets else 0

    @property
    def shard_numel(self) -> int:
        """S = P / W: elements of one rank's shard."""
        return self.padded_numel // self.world_size

    @property
    def largest_bucket(self) -> int:
        """B: elements, with padding, of the largest bucket."""
        return max((bucket.numel for bucket in self.buckets), default=0)

    def fragments(self, rank: int) -> list[Fragment]:
        """What ``rank`` owns, in the order in which it lies in the shard: at most one fragment of every parameter.

        Example:
            >>> plan = plan_layout([100, 60], world_size=2, bucket_limit=1 << 20)
            >>> [[(f.slot.index, f.start, f.shard_start, f.numel) for f in plan.fragments(rank)] for rank in (0, 1)]
            [[(0, 0, 0, 100)], [(1, 0, 0, 60)]]
        """
        found = (bucket.fragment(slot, rank) for bucket in self.buckets for slot in bucket.slots)
        return [fragment for fragment in found if fragment.numel]

    def whole_fragments(self) -> list[Fragment]:
        """Every parameter as one fragment, lying as in ``flat_P``: what a rank owns when nothing is partitioned."""
        # A parameter without elements has no fragment: an optimizer would keep empty moments for it.
        slots = (slot for bucket in self.buckets for slot in bucket.slots)
        return [Fragment(slot, 0, slot.offset, slot.numel) for slot in slots if slot.numel]


def choose_bucket_limit(numel: int, reduce_bucket_size: int, allgather_bucket_size: int) -> int:
    """How many elements a bucket may hold before it is closed.

    DeepSpeed's bucket sizes are upper limits, and stay so. Their default, 5e8, is larger than most models, and one
    bucket as large as the model cannot overlap with the backward pass that fills it; so a small model is cut into
    about ``TARGET_BUCKETS`` buckets, by a limit of at least ``MIN_BUCKET_NUMEL`` elements. All numbers are elements,
    ``numel`` of all groups together.

    Example:
        >>> choose_bucket_limit(10**8, 5 * 10**8, 5 * 10**8), choose_bucket_limit(10**8, 10**6, 5 * 10**8)
        (6250000, 1000000)
    """
    return min(reduce_bucket_size, allgather_bucket_size, max(-(-numel // TARGET_BUCKETS), MIN_BUCKET_NUMEL))


def plan_layout(
    numels: Sequence[int], world_size: int, bucket_limit: int, align: int = ALIGN, shard_align: int | None = None
) -> FlatLayout:
    """Lay parameters end to end and cut them into buckets. See [Note: the tensors of ZeRO].

    A parameter is never cut: one that is larger than ``bucket_limit`` is a bucket by itself.

    Args:
        numels: elements of each parameter, in the order in which their gradients arrive; ``slots[i]`` is that of
            ``numels[i]``.
        world_size: W.
        bucket_limit: a bucket is closed before it would exceed this many elements, without the padding at its end.
        align: elements to which parameter starts are aligned.
        shard_align: elements to which a rank's part of a bucket is padded, a multiple of ``align``, the default.

    Raises:
        ValueError: ``world_size`` or ``bucket_limit`` below 1, or a negative number of elements.

    Example:
        >>> layout = plan_layout([1000, 100, 2000, 200], world_size=4, bucket_limit=1200)
        >>> [(b.offset, b.numel, [slot.index for slot in b.slots]) for b in layout.buckets]
        [(0, 1280, [0, 1]), (1280, 2048, [2]), (3328, 256, [3])]
        >>> layout.numel, layout.padded_numel, layout.shard_numel
        (3300, 3584, 896)
    """
    if world_size < 1 or bucket_limit < 1 or any(n < 0 for n in numels):
        raise ValueError(
            f"cannot lay out {len(numels)} parameters over {world_size} ranks in buckets of {bucket_limit}"
        )
    # At least one aligned block for each rank, also for parameters without elements: no rank's shard is empty, so every
    # rank takes part in every collective.
    least = world_size * (shard_align or align)
    slots: list[ParamSlot] = []
    buckets: list[Bucket] = []
    start = 0  # of the bucket, in flat_P
    while len(slots) < len(numels):
        inside: list[ParamSlot] = []
        cursor = start
        for index in range(len(slots), len(numels)):
            # Closed before the limit would be exceeded, not after: the limit bounds memory, up to padding. A parameter
            # that is larger than the limit opens a bucket, in which it stays alone.
            if inside and cursor + numels[index] - start > bucket_limit:
                break
            inside.append(ParamSlot(index, cursor, numels[index]))
            cursor = round_up(cursor + numels[index], align)
        extent = max(round_up(cursor - start, least), least)
        # start is a sum of extents, each a multiple of W; so start // W is the sum of the shards before this one.
        buckets.append(Bucket(len(buckets), start, extent, start // world_size, tuple(inside), world_size))
        slots += inside
        start += extent
    return FlatLayout(world_size, tuple(slots), tuple(buckets))
