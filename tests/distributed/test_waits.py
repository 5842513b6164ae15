"""What takes waits out of the package finds them, and simulated streams notice."""

import pytest

from tools import waits


def test_waits_are_found_by_their_syntax():
    found = {str(site): site for site in waits.sites()}
    assert "comm/reduce_scatter.py BucketReducer.acquire: buffers.free.wait()" in found
    handed = [site for site in found.values() if not site.called]
    assert "checkpoint/async_save.py Saver._snapshot: copies.synchronize" in map(str, handed)
    assert not any(site.file == "device.py" for site in found.values())


def test_a_sample_of_waits_is_noticed():
    known = waits.baselines(found := waits.sites(), ("stage 2", "offload"))
    reached = [site for site in found if any(site in known[program].passed for program in known)]
    assert len(reached) > 5
    sample = "acquire: buffers.free.wait()", "_finish: inflight.pending.wait()", "Pending.wait: work.wait()"
    for site in (*sample, "OffloadedStorages.come_back: copy.wait()"):
        (wait,) = (one for one in reached if str(one).endswith(site))
        assert waits.notices(wait, known) is not None, site


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_each_wait_is_noticed():
    assert waits.main([]) == 0
