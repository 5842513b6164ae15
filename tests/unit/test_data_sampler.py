"""The order of the data: what it depends on, what it must not depend on, and that nothing is lost or repeated."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepzero.config.strict import ConfigError
from deepzero.data.sampler import GlobalBatchSampler, permute


def test_frozen_order():
    """Frozen: a change of these numbers changes every run that is resumed."""
    assert GlobalBatchSampler(100, 8, seed=1234).indices(0).tolist() == FROZEN_STEP_0
    assert GlobalBatchSampler(100, 8, seed=1234).indices(1_000_000).tolist() == FROZEN_STEP_1E6


@settings(deadline=None)
@given(size=st.integers(1, 3000), seed=st.integers(-(2**40), 2**70), epoch=st.integers(0, 2**40))
def test_permute_is_a_permutation(size, seed, epoch):
    result = permute(np.arange(size), size, seed, epoch)
    assert result.dtype == np.int64
    assert np.array_equal(np.sort(result), np.arange(size))


def test_permute_of_a_large_corpus():
    size = 10**12 + 7  # no array of this size exists
    positions = np.random.default_rng(0).integers(0, size, 10_000)
    result = permute(positions, size, seed=1, epoch=2)
    assert result.min() >= 0 and result.max() < size
    assert len(np.unique(result)) == len(np.unique(positions))


def test_permute_mixes():
    size = 10_000
    result = permute(np.arange(size), size, seed=0, epoch=0)
    # Neighbours are no longer neighbours, and positions say nothing about places.
    assert abs(np.corrcoef(np.arange(size), result)[0, 1]) < 0.03
    assert (np.abs(np.diff(result)) < 10).mean() < 0.01
    # Every place is reached from every tenth equally: 10 x 10 cells, expected 100 each.
    cells = np.histogram2d(np.arange(size), result, bins=10)[0]
    assert cells.min() > 60 and cells.max() < 140
    other = permute(np.arange(size), size, seed=0, epoch=1)
    assert (result == other).mean() < 0.001


def test_small_shuffles_take_many_forms():
    """Of 4 things there are 24 orders; 400 epochs should show all of them."""
    assert len({tuple(permute(np.arange(4), 4, 9, epoch)) for epoch in range(400)}) == 24


@pytest.mark.parametrize(("num_sequences", "global_batch"), [(12, 4), (13, 4), (7, 7), (5, 8), (1, 3), (1000, 32)])
def test_epochs_without_repetition(num_sequences, global_batch):
    sampler = GlobalBatchSampler(num_sequences, global_batch, seed=3)
    steps = 3 * num_sequences // global_batch + 2
    stream = np.concatenate([sampler.indices(step) for step in range(steps)])
    for epoch in range(3):
        one = stream[epoch * num_sequences : (epoch + 1) * num_sequences]
        assert np.array_equal(np.sort(one), np.arange(num_sequences)), epoch
    if num_sequences >= 12:
        assert not np.array_equal(stream[:num_sequences], stream[num_sequences : 2 * num_sequences])


def test_seed_matters():
    one, two = (GlobalBatchSampler(1000, 64, seed).indices(0) for seed in (1, 2))
    assert not np.array_equal(one, two)


def test_resumable_from_the_step_alone():
    straight = GlobalBatchSampler(50, 8, seed=3)
    history = [straight.indices(step) for step in range(30)]
    resumed = GlobalBatchSampler(50, 8, seed=3)
    for step in (17, 29, 3):
        assert np.array_equal(resumed.indices(step), history[step])


@pytest.mark.parametrize("step", [0, 5, 123])
def test_ranks_and_micro_steps_cut_the_global_batch(step):
    sampler = GlobalBatchSampler(100, 24, seed=1)
    whole = sampler.indices(step)
    for world_size in (1, 2, 3, 4, 6):
        for micro_batch in (1, 2, 4):
            accumulation, rest = divmod(24, world_size * micro_batch)
            if rest:
                continue
            pieces = [
                sampler.rank_indices(step, micro_step, rank, micro_batch, world_size)
                for micro_step in range(accumulation)
                for rank in range(world_size)
            ]
            assert all(piece.shape == (micro_batch,) for piece in pieces)
            # Not the same set only: the same order, so that one rank with one large batch is the same sum.
            assert np.array_equal(np.concatenate(pieces), whole)


def test_bad_numbers():
    sampler = GlobalBatchSampler(100, 24, seed=1)
    with pytest.raises(ConfigError, match=r"train_batch_size=24 .* 5 x 2 does not divide it"):
        sampler.rank_indices(0, 0, 0, micro_batch=5, world_size=2)
    with pytest.raises(ConfigError, match="0 x 2"):
        sampler.rank_indices(0, 0, 0, micro_batch=0, world_size=2)
    with pytest.raises(ValueError, match="rank=2 of 2"):
        sampler.rank_indices(0, 0, 2, micro_batch=4, world_size=2)
    with pytest.raises(ValueError, match="micro_step=3 of 3"):
        sampler.rank_indices(0, 3, 0, micro_batch=4, world_size=2)
    with pytest.raises(ValueError, match="step=-1"):
        sampler.indices(-1)
    with pytest.raises(ConfigError, match="at least one sequence"):
        GlobalBatchSampler(0, 4, seed=0)
    with pytest.raises(ConfigError, match="train_batch_size=0"):
        GlobalBatchSampler(4, 0, seed=0)


FROZEN_STEP_0 = [95, 33, 72, 73, 70, 88, 17, 47]
FROZEN_STEP_1E6 = [14, 47, 82, 48, 13, 9, 8, 53]
