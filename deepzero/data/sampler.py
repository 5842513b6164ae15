"""Which sequences are in the global batch of step k: a pure function of seed, global batch size and k.

Ranks, micro-batch and accumulation only cut the batch: 8 ranks, and 2 ranks with 4 accumulated micro-batches, see the
same sequences at the same step, which makes their losses comparable. To resume, ask for the next step.

The sequences of all steps form one endless stream: a shuffled pass over the corpus (an *epoch*), then another, shuffled
anew. Step k takes positions ``k·G … (k+1)·G - 1`` of it, ``G`` being the global batch, which may straddle two epochs.

**The shuffle is computed, not stored.** Position ``p`` of epoch ``e`` goes through a keyed bijection of ``0 … n-1``: a
Feistel network, the construction behind block ciphers. ``p`` is two halves of equal bits; each round replaces
``(left, right)`` by ``(right, left xor hash(right, key))``, which is invertible whatever the hash is. The network
permutes ``0 … 4^b - 1``; a result outside ``0 … n-1`` is sent through again until it falls inside (*cycle walking*),
less than four times on average. Step 1,000,000 costs the same as step 0, memory does not grow with the corpus, and no
generator is involved whose stream numpy may change between versions: integers only.

Sources: [Feistel rounds] (why a few are enough), [cycle walking], [SplitMix64] (the hash).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from deepzero.config.strict import ConfigError

Indices = npt.NDArray[np.int64]

ROUNDS = 6
MOST_SEQUENCES = 100_000_000  # in a global batch: every rank draws the numbers of all of them, which take 0.8 GB
_MASK = (1 << 64) - 1


class GlobalBatchSampler:
    """The sequences of each step; see the module.

    Args:
        num_sequences: sequences in the corpus.
        global_batch: sequences per optimizer step, over all ranks and micro-batches (DeepSpeed's ``train_batch_size``).
        seed: another seed, another order.

    Raises:
        ConfigError: a number that cannot be.

    Example:
        >>> sampler = GlobalBatchSampler(num_sequences=6, global_batch=3, seed=0)
        >>> sorted(np.concatenate([sampler.indices(0), sampler.indices(1)]).tolist())
        [0, 1, 2, 3, 4, 5]
    """

    def __init__(self, num_sequences: int, global_batch: int, seed: int) -> None:
        if num_sequences < 1:
            raise ConfigError(f"a sampler needs at least one sequence, got {num_sequences}")
        if not 1 <= global_batch <= MOST_SEQUENCES:
            raise ConfigError(f"train_batch_size={global_batch} must be at least 1 and at most {MOST_SEQUENCES:,}")
        self._first_step = self._first_position = 0
        self.num_sequences, self.global_batch, self.seed = num_sequences, global_batch, seed

    def go_on(self, step: int, position: int) -> None:
        """Let ``step`` begin at ``position`` of the stream: a run that goes on with another global batch.

        With the same one nothing changes: position is ``step`` times global batch.
        """
        self._first_step, self._first_position = step, position

    def indices(self, step: int) -> Indices:
        """Sequence numbers of the global batch of ``step`` (counted from 0): int64 [global_batch]."""
        if step < self._first_step:
            raise ValueError(f"step={step} must not be below {self._first_step}")
        start = self._first_position + (step - self._first_step) * self.global_batch
        stream = np.arange(start, start + self.global_batch, dtype=np.int64)
        epochs, positions = np.divmod(stream, self.num_sequences)
        batch = np.empty_like(positions)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            batch[here] = permute(positions[here], self.num_sequences, self.seed, int(epoch))
        return batch

    def rank_indices(self, step: int, micro_step: int, rank: int, micro_batch: int, world_size: int) -> Indices:
        """What one rank takes in one micro-step, both counted from 0: int64 [micro_batch].

        The global batch is cut as ``[micro_step][rank][micro_batch]``: over all ranks and micro-steps every sequence is
        taken exactly once.

        Raises:
            ConfigError: the global batch does not divide into such pieces.
            ValueError: a rank or micro-step that does not exist.
        """
        per_micro_step = micro_batch * world_size
        if micro_batch < 1 or world_size < 1 or self.global_batch % per_micro_step:
            raise ConfigError(
                f"train_batch_size={self.global_batch} must be micro-batch x ranks x accumulation, "
                f"and {micro_batch} x {world_size} does not divide it"
            )
        accumulation = self.global_batch // per_micro_step
        if not (0 <= rank < world_size and 0 <= micro_step < accumulation):
            raise ValueError(
                f"rank={rank} of {world_size}, micro_step={micro_step} of {accumulation}: no such part of the batch"
            )
        return self.indices(step).reshape(accumulation, world_size, micro_batch)[micro_step, rank]


def permute(positions: Indices, size: int, seed: int, epoch: int) -> Indices:
    """Where a shuffle of ``0 … size-1``, chosen by ``seed`` and ``epoch``, sends ``positions``: int64, as they are.

    Distinct positions give distinct results.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = [_key(seed, epoch, number) for number in range(ROUNDS)]
    result = _feistel(positions.astype(np.uint64), half, keys)
    while (outside := result >= size).any():
        result[outside] = _feistel(result[outside], half, keys)
    return result.astype(np.int64)


def _feistel(values: npt.NDArray[np.uint64], half: int, keys: list[np.uint64]) -> npt.NDArray[np.uint64]:
    """A bijection of ``0 … 2^(2 half) - 1``."""
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << shift) | right


def _key(seed: int, epoch: int, number: int) -> np.uint64:
    """A round key: seed, epoch and round number, each stirred in after the last."""
    key = np.zeros(1, np.uint64)
    for part in (seed, epoch, number):
        key = _mix(key ^ np.uint64(part & _MASK))
    return np.uint64(key[0])


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64: unsigned arithmetic modulo 2^64, which is what numpy's arrays do."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
