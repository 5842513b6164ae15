"""Numbers at their border: exactly full, exactly adjacent, nothing at all. Most were found by ``tools/mutate.py``."""

import random
from pathlib import Path

import numpy as np
import torch

from deepzero.checkpoint import rng
from deepzero.checkpoint.manifest import Row, ShardInfo
from deepzero.checkpoint.reader import damage
from deepzero.runtime.zero.optimizer_shard import cut_into_sub_groups


def test_a_sub_group_may_be_exactly_full():
    masters = [torch.zeros(numel) for numel in (2, 3, 1, 4, 9, 4)]
    numels = [[master.numel() for master in group] for group in cut_into_sub_groups(masters, 5)]
    assert numels == [[2, 3], [1, 4], [9], [4]]
    assert [len(group) for group in cut_into_sub_groups(masters, None)] == [len(masters)]


def test_a_damaged_block_names_the_tensors_that_it_touches():
    rows = tuple(Row("param", name, "F32", 0, 25, 100 * place) for place, name in enumerate("abcdef"))
    info = ShardInfo(0, 600, None, 200, "0" * 24, rows)
    assert damage(Path("x"), info, 1) == "x is damaged: bytes 200 to 400 are not what was written (param/c, param/d)"
    two = ShardInfo(0, 550, None, 400, "0" * 16, rows)
    assert "bytes 0 to 400 are not what was written (param/a, param/b, param/c and 1 more)" in damage(Path("x"), two, 0)
    assert "bytes 400 to 550 " in damage(Path("x"), two, 1)
    assert "(the header)" in damage(Path("x"), ShardInfo(0, 9, None, 9, "0" * 8, ()), 0)


def test_every_generator_goes_on_where_it_was():
    def draw():
        return [torch.rand(()).item(), random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()]

    draw()  # one half of a pair of Gaussian numbers is kept by Python and by numpy
    state = rng.capture(torch.device("cpu"))
    expected = draw()
    assert draw() != expected
    rng.restore(*state, torch.device("cpu"))
    assert draw() == expected
