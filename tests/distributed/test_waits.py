"""What takes waits out of the package finds them, and simulated streams notice."""

import random

import pytest

from tools import waits

PROGRAMS = ("stage 2", "offload")


def test_waits_are_found_by_their_syntax():
    found = {str(site): site for site in waits.sites()}
    assert "comm/reduce_scatter.py BucketReducer.acquire: buffers.free.wait()" in found
    handed = [site for site in found.values() if not site.called]
    assert "checkpoint/async_save.py Saver._snapshot: copies.synchronize" in map(str, handed)
    assert not any(site.file == "device.py" for site in found.values())


@pytest.mark.slow
def test_a_sample_of_waits_is_noticed():
    found = waits.sites()
    known = waits.baselines(found, PROGRAMS)
    reached = [site for site in found if any(site in calm.passed for calm in known.values())]
    assert len(reached) > 10
    sure = [site for site in reached if site.file.startswith("comm")]
    for site in random.Random(1).sample(sure, 3):
        assert waits.notices(site, known) is not None, site


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_each_wait_is_noticed():
    assert waits.main([]) == 0
