"""Small talk that one rank alone hears."""

from deepzero.comm import process_group
from deepzero.comm.process_group import FakeRank, fake_process_group


def told(rank, world_size):
    return process_group.gather_object({"rank": rank, "x": "y" * rank}), process_group.gather_object(rank, dst=1)


def test_one_rank_hears_all(ranks):
    first, second = ranks.run(told, world_size=2)
    assert first == ([{"rank": 0, "x": ""}, {"rank": 1, "x": "y"}], None)
    assert second == (None, [0, 1])


def test_alone_and_pretended():
    assert process_group.gather_object(7) == [7]
    for rank, heard in ((0, [7, 7, 7]), (1, None)):
        with fake_process_group(FakeRank(rank, 3, "cpu", 3)):
            assert process_group.gather_object(7) == heard
