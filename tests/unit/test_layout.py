"""The layout: pure integers, for any parameters, any number of ranks, any bucket size."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepzero.layout import ALIGN, MIN_BUCKET_NUMEL, choose_bucket_limit, plan_layout

numels = st.lists(st.integers(0, 5000), min_size=1, max_size=30)
worlds = st.integers(1, 9)
limits = st.integers(1, 20_000)


@given(numels, worlds, limits)
@settings(max_examples=200, deadline=None)
def test_every_element_has_one_owner(sizes, world, limit):
    layout = plan_layout(sizes, world, limit)
    assert layout.numel == sum(sizes)
    everything = [fragment for rank in range(world) for fragment in layout.fragments(rank)]
    for slot, size in zip(layout.slots, sizes, strict=True):
        cursor = 0
        for lo, numel in sorted((fragment.start, fragment.numel) for fragment in everything if fragment.slot is slot):
            assert lo == cursor and numel > 0
            cursor = lo + numel
        assert cursor == size
    assert [fragment.numel for fragment in layout.whole_fragments()] == [size for size in sizes if size]


@given(numels, worlds, limits)
@settings(max_examples=200, deadline=None)
def test_buckets_tile_the_flat_buffer_in_equal_parts(sizes, world, limit):
    layout = plan_layout(sizes, world, limit)
    cursor = shard = 0
    for bucket in layout.buckets:
        assert bucket.offset == cursor and bucket.shard_offset == shard
        assert bucket.shard_numel * world == bucket.numel and bucket.shard_numel % ALIGN == 0
        assert sum(bucket.true_numel_of(r) for r in range(world)) == bucket.true_numel()
        # A bucket holds no more than the limit, unless one parameter alone is larger.
        first, last = bucket.slots[0], bucket.slots[-1]
        assert len(bucket.slots) == 1 or last.end - first.offset <= limit
        cursor += bucket.numel
        shard += bucket.shard_numel
    assert cursor == layout.padded_numel and shard == layout.shard_numel


@given(numels, worlds, limits)
@settings(max_examples=100, deadline=None)
def test_no_aligned_block_of_a_parameter_is_split(sizes, world, limit):
    layout = plan_layout(sizes, world, limit)
    for slot in layout.slots:
        assert slot.offset % ALIGN == 0
    for rank in range(world):
        fragments = layout.fragments(rank)
        assert all(fragment.start % ALIGN == 0 and fragment.shard_start % ALIGN == 0 for fragment in fragments)
        starts = [fragment.shard_start for fragment in fragments]
        assert starts == sorted(set(starts)) and all(p.shard_start + p.numel <= layout.shard_numel for p in fragments)


def test_shards_are_the_same_pieces_in_every_rank_order():
    """One bucket is the classic picture: rank r owns the r-th W-th of the whole (get_data_parallel_partitions)."""
    (bucket,) = plan_layout([1000, 24], world_size=4, bucket_limit=1 << 30).buckets
    assert [bucket.part_start(r) for r in range(4)] == [0, 320, 640, 960]


def test_world_larger_than_a_parameter():
    layout = plan_layout([3], world_size=8, bucket_limit=100)
    assert [len(layout.fragments(r)) for r in range(8)] == [1] + [0] * 7
    assert layout.padded_numel == 8 * ALIGN


def test_ten_thousand_ranks():
    layout = plan_layout([12288 * 12288] * 8 + [12288] * 8, world_size=10_000, bucket_limit=500_000_000)
    assert layout.numel == 8 * (12288 * 12288 + 12288)
    assert layout.shard_numel * 10_000 == layout.padded_numel


def test_bucket_limit_is_an_upper_limit():
    assert choose_bucket_limit(10**9, 5 * 10**8, 10**7) == 10**7
    assert choose_bucket_limit(10**9, 5 * 10**8, 5 * 10**8) == 62_500_000
    assert choose_bucket_limit(1000, 5 * 10**8, 5 * 10**8) == MIN_BUCKET_NUMEL
    assert choose_bucket_limit(1000, 10, 5 * 10**8) == 10


@pytest.mark.parametrize("bad", [([5], 0, 10), ([5], 2, 0), ([-1], 2, 10)])
def test_bad_input(bad):
    with pytest.raises(ValueError, match="cannot lay out"):
        plan_layout(*bad)
