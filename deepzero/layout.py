r"""One layout serves all stages: parameters end to end, cut into intervals, every interval cut into W equal parts.

This module is pure integers: no tensor, no process. It can be asked about 10,000 ranks on a laptop.

[Note: the tensors of ZeRO]
    ``W`` ranks · ``N`` true elements · ``P`` elements with padding · ``S = P / W`` a rank's share · ``B`` an interval.
    ZeRO's tensors are one-dimensional, and their names carry their extent:

    ``flat_P``    all parameters of a group, end to end, in the compute dtype (DeepSpeed's ``bit16_groups_flat``);
    ``master_S``  this rank's share in fp32, the only thing the optimizer sees (``single_partition_of_fp32_groups``);
    ``grad_S``    this rank's share of the reduced gradients;
    ``bucket_B``  one interval's gradients on their way to their owners, in the wire dtype.

    Parameters are laid out in the order in which their gradients arrive, each start aligned to ``ALIGN`` elements. An
    *interval* is a run of consecutive parameters, closed when the bucket size is reached, and padded to a multiple of
    ``W * ALIGN``. Rank r owns the r-th W-th part **of every interval**::

        interval 0                interval 1                        interval 2
        |  r0  |  r1  |  r2  |    |   r0    |   r1    |   r2    |   |  r0  |  r1  |  r2  |      flat_P
            \                          \                                \
             +--------------------------+---------------------------------+---> r0's master_S, grad_S

    So every bucket is one balanced reduce-scatter straight into ``grad_S``, and every publication one all-gather
    straight into the parameters' storage: no table of slices, no copy in, no copy out. DeepSpeed owns contiguous
    ranges instead (``get_data_parallel_partitions``; with one interval the two pictures are the same), and pays with
    buckets that belong to one or two ranks only. The picture here is that of "communication boundaries" in the
    DeepSpeed post on stage 1 with reduced communication.

    Because starts and parts are multiples of ``ALIGN``, no aligned block of a parameter is ever split between ranks.
    The gradient norm rests on that: see ``runtime/grad_norm.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGN = 64
"""Elements. 64 bf16 are 128 bytes: a pair of cache lines, and what NCCL's fast paths ask for."""

MIN_INTERVAL = 1 << 18
"""Elements. Below this, a collective's fixed cost outweighs what overlapping it could hide."""

TARGET_INTERVALS = 16
"""A bucket as large as the model overlaps with nothing; so the model is cut into about this many."""


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies. Offsets and lengths are in elements."""

    index: int
    """Position in the list of parameters that the layout was planned for."""
    offset: int
    """Start in ``flat_P``; a multiple of ``ALIGN``."""
    numel: int

    @property
    def end(self) -> int:
        """One past the last true element in ``flat_P``."""
        return self.offset + self.numel


@dataclass(frozen=True)
class Interval:
    """Stage 1 and 2's reduce bucket, and the unit in which parameters are published."""

    index: int
    offset: int
    """Start in ``flat_P``."""
    numel: int
    """Extent with padding; a multiple of ``W * ALIGN``."""
    shard_offset: int
    """Start of this interval's part in every rank's ``master_S`` and ``grad_S``."""
    slots: tuple[Slot, ...]
    world_size: int

    @property
    def part_numel(self) -> int:
        """Elements of one rank's part."""
        return self.numel // self.world_size

    def part_start(self, rank: int) -> int:
        """Start of ``rank``'s part in ``flat_P``."""
        return self.offset + rank * self.part_numel

    def true_numel(self) -> int:
        """Elements that belong to parameters."""
        return sum(slot.numel for slot in self.slots)

    def gaps(self) -> list[tuple[int, int]]:
        """Ranges that belong to no parameter, relative to the interval's start, in elements."""
        ranges, cursor = [], self.offset
        for slot in self.slots:
            if slot.offset > cursor:
                ranges.append((cursor - self.offset, slot.offset - self.offset))
            cursor = slot.end
        if cursor < self.offset + self.numel:
            ranges.append((cursor - self.offset, self.numel))
        return ranges

    def true_numel_of(self, rank: int) -> int:
        """Elements of ``rank``'s part that belong to parameters; the rest is padding."""
        lo = self.part_start(rank)
        hi = lo + self.part_numel
        return sum(max(0, min(hi, slot.end) - max(lo, slot.offset)) for slot in self.slots)


@dataclass(frozen=True)
class Piece:
    """A run of one parameter's elements that one rank owns: what the optimizer sees as one tensor."""

    slot: Slot
    start: int
    """First element, counted within the parameter; a multiple of ``ALIGN``."""
    shard_start: int
    """Where it lies in the rank's ``master_S`` and ``grad_S``."""
    numel: int


@dataclass(frozen=True)
class FlatLayout:
    """The layout of one group of parameters over ``world_size`` ranks."""

    world_size: int
    slots: tuple[Slot, ...]
    intervals: tuple[Interval, ...]

    @property
    def numel(self) -> int:
        """N: true elements."""
        return sum(slot.numel for slot in self.slots)

    @property
    def padded_numel(self) -> int:
        """P: elements with padding."""
        return self.intervals[-1].offset + self.intervals[-1].numel if self.intervals else 0

    @property
    def shard_numel(self) -> int:
        """S = P / W: elements of one rank's share."""
        return self.padded_numel // self.world_size

    @property
    def largest_interval(self) -> int:
        """B: elements a bucket must be able to hold."""
        return max((interval.numel for interval in self.intervals), default=0)

    def pieces(self, rank: int) -> list[Piece]:
        """What ``rank`` owns, in the order in which it lies in the shard: at most one piece of every parameter.

        Example:
            >>> plan = plan_layout([100, 60], world_size=2, interval_limit=1 << 20)
            >>> [(p.slot.index, p.start, p.shard_start, p.numel) for p in plan.pieces(rank=0)]
            [(0, 0, 0, 100)]
            >>> [(p.slot.index, p.start, p.shard_start, p.numel) for p in plan.pieces(rank=1)]
            [(1, 0, 0, 60)]
        """
        pieces = []
        for interval in self.intervals:
            first = interval.part_start(rank)
            for slot in interval.slots:
                lo, hi = max(slot.offset, first), min(slot.end, first + interval.part_numel)
                if lo < hi:
                    pieces.append(Piece(slot, lo - slot.offset, interval.shard_offset + lo - first, hi - lo))
        return pieces

    def whole_pieces(self) -> list[Piece]:
        """Every parameter in one piece, lying as in ``flat_P``: what a rank owns when nothing is partitioned."""
        return [Piece(slot, 0, slot.offset, slot.numel) for slot in self.slots if slot.numel]


def interval_limit(numel: int, reduce_bucket_size: int, allgather_bucket_size: int) -> int:
    """How many elements an interval may hold before it is closed.

    DeepSpeed's bucket sizes are upper limits, and stay so. Their default, 5e8, is larger than most models, and one
    bucket as large as the model cannot overlap with the backward pass that fills it; so a small model is cut into
    about ``TARGET_INTERVALS`` buckets of at least ``MIN_INTERVAL`` elements.

    Args:
        numel: elements of all groups together.
        reduce_bucket_size: ``zero.reduce_bucket_size``, elements.
        allgather_bucket_size: ``zero.allgather_bucket_size``, elements.

    Example:
        >>> interval_limit(100_000_000, 500_000_000, 500_000_000)
        6250000
        >>> interval_limit(100_000_000, 1_000_000, 500_000_000)
        1000000
    """
    return min(reduce_bucket_size, allgather_bucket_size, max(-(-numel // TARGET_INTERVALS), MIN_INTERVAL))


def plan_layout(numels: Sequence[int], world_size: int, interval_limit: int, align: int = ALIGN) -> FlatLayout:
    """Lay parameters end to end and cut them into intervals. See [Note: the tensors of ZeRO].

    A parameter is never cut: one that is larger than ``interval_limit`` is an interval by itself.

    Args:
        numels: elements of each parameter, in the order in which their gradients arrive.
        world_size: W.
        interval_limit: an interval is closed before it would exceed this many elements (padding not counted).
        align: elements to which parameter starts and parts are aligned.

    Returns:
        The layout; ``slots[i]`` belongs to ``numels[i]``.

    Raises:
        ValueError: ``world_size`` or ``interval_limit`` below 1, or a negative number of elements.

    Example:
        >>> layout = plan_layout([1000, 100, 2000, 200], world_size=4, interval_limit=1200)
        >>> [(i.offset, i.numel, [s.index for s in i.slots]) for i in layout.intervals]
        [(0, 1280, [0, 1]), (1280, 2048, [2]), (3328, 256, [3])]
        >>> layout.numel, layout.padded_numel, layout.shard_numel
        (3300, 3584, 896)
    """
    if world_size < 1 or interval_limit < 1 or any(n < 0 for n in numels):
        raise ValueError(
            f"cannot lay out {len(numels)} parameters over {world_size} ranks in buckets of {interval_limit}"
        )
    slots: list[Slot] = []
    intervals: list[Interval] = []
    pending: list[Slot] = []
    start = cursor = 0

    def close() -> None:
        nonlocal start, cursor, pending
        extent = max(round_up(cursor - start, world_size * align), world_size * align)
        intervals.append(Interval(len(intervals), start, extent, start // world_size, tuple(pending), world_size))
        start = cursor = start + extent
        pending = []

    for index, numel in enumerate(numels):
        if pending and cursor + numel - start > interval_limit:
            close()
        slot = Slot(index, cursor, numel)
        slots.append(slot)
        pending.append(slot)
        cursor = round_up(cursor + numel, align)
    if pending:
        close()
    return FlatLayout(world_size, tuple(slots), tuple(intervals))
