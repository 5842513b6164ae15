"""Windows over a stream of tokens."""

import numpy as np
import pytest
import torch

from deepzero.config.strict import ConfigError
from deepzero.data.loader import TokenSequences


@pytest.mark.parametrize("dtype", [np.uint8, "<u2", np.int64])
def test_every_token_but_the_first_is_a_target_once(dtype):
    tokens = np.arange(41).astype(dtype)
    sequences = TokenSequences(tokens, block_size=8)
    assert len(sequences) == 5
    inputs, targets = sequences.batch(np.arange(5))
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.is_contiguous() and targets.is_contiguous()
    assert inputs.flatten().tolist() == list(range(40))
    assert targets.flatten().tolist() == list(range(1, 41))


def test_uneven_rest_is_not_used():
    assert len(TokenSequences(np.arange(9), 8)) == 1
    assert len(TokenSequences(np.arange(16), 8)) == 1
    assert len(TokenSequences(np.arange(17), 8)) == 2


def test_order_is_that_of_the_indices():
    inputs, _ = TokenSequences(np.arange(41), 8).batch(np.array([4, 0, 4]))
    assert inputs[:, 0].tolist() == [32, 0, 32]


def test_memory_mapped_file(tmp_path):
    np.arange(1000, dtype="<u2").tofile(tmp_path / "x.bin")
    tokens = np.memmap(tmp_path / "x.bin", dtype="<u2", mode="r")
    inputs, targets = TokenSequences(tokens, 10).batch(np.array([98]))
    assert inputs[0].tolist() == list(range(980, 990)) and targets[0, -1] == 990
    inputs += 1  # a copy: the file is read-only


def test_too_short_for_one_sequence():
    message = r"the validation corpus has 8 tokens.*model\.block_size=8 needs 9.*smaller model\.block_size"
    with pytest.raises(ConfigError, match=message):
        TokenSequences(np.arange(8), 8, "validation corpus")
    with pytest.raises(ConfigError, match="has 0 tokens"):
        TokenSequences(np.zeros(0, np.uint8), 8)
    with pytest.raises(ConfigError, match=r"shape \(2, 9\)"):
        TokenSequences(np.zeros((2, 9), np.uint8), 8)


def test_token_outside_the_vocabulary():
    sequences = TokenSequences(np.array([1, 2, 3, 4, 5, 300, 7]), 3, "training corpus", vocab_size=300)
    assert sequences.batch(np.array([0]))[0].tolist() == [[1, 2, 3]]
    message = r"token id 300 in the training corpus.*model\.vocab_size to at least 301 \(it is 300\)"
    with pytest.raises(ConfigError, match=message):
        sequences.batch(np.array([0, 1]))


@pytest.mark.parametrize("index", [-1, 5])
def test_no_such_sequence(index):
    with pytest.raises(IndexError, match=f"sequence {index} of the corpus, which has 5"):
        TokenSequences(np.arange(41), 8).batch(np.array([index]))
