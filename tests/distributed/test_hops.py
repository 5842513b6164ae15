"""Short ways: how many of deepzero's own functions stand between a hook and torch's collective, as it runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import deepzero
from deepzero.comm import profiler_ranges
from tests.distributed.training import config, make_model, my_micro_batches

PACKAGE = str(Path(deepzero.__file__).parent)
COLLECTIVES = {
    "isend", "all_gather_single", "all_gather_into_tensor", "all_to_all", "all_to_all_single",
    "reduce_scatter_single", "reduce_scatter_tensor",
}  # fmt: skip


def ways(run, begins):
    """Functions of deepzero's, outermost first, on the stack of each collective that starts below one of ``begins``."""
    found = set()

    def profile(frame, event, arg):
        if event != "call" or frame.f_code.co_name not in COLLECTIVES or "distributed" not in frame.f_code.co_filename:
            return
        way = []
        while frame is not None:
            code = frame.f_code
            if code.co_filename.startswith(PACKAGE):
                way.append(code.co_name)
                if code.co_name in begins:
                    found.add(tuple(reversed(way)))
                    break
            frame = frame.f_back

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return sorted(found)


def way_of_a_fetch(rank, world, zero, observed):
    given = config(stage=3, bucket=800, zero={"stage3_param_persistence_threshold": 0, **zero})
    engine, *_ = deepzero.initialize(model=make_model(), config=given)
    engine.ledger.trace = observed
    micro = engine.train_micro_batch_size_per_gpu()
    ids, labels = my_micro_batches(0, rank, world, micro, 1)[0]
    if observed:
        profiler_ranges.start(profiler_ranges.Recorder())
    try:
        found = ways(lambda: engine(ids, labels), {"pre_forward"})
    finally:
        if observed:
            profiler_ranges.stop()
    engine.destroy()
    return found


@pytest.mark.parametrize("observed", [False, True])
def test_from_a_module_to_its_all_gather(ranks, observed):
    found = ranks.run(way_of_a_fetch, {}, observed, world_size=2)[0]
    assert found and max(map(len, found)) <= 6, found
