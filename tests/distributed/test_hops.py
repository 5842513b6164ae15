"""Short ways: how many functions of deepzero's own stand between a hook of torch's and torch's collective."""

import contextlib
import os
import sys

import pytest

import deepzero
from deepzero.comm.profiler_ranges import Recorder
from tests.distributed.pool import on_ranks
from tests.distributed.training import WHOLE, built, config, my_micro_batches

PACKAGE = os.path.dirname(deepzero.__file__) + os.sep


@contextlib.contextmanager
def chains(collectives, hooks):
    """The ways from torch's ``hooks``, which call deepzero's, to torch's ``collectives``: lists of (file, function)."""
    found = []

    def look(frame, event, _):
        if event != "call" or frame.f_code.co_name not in collectives or "distributed" not in frame.f_code.co_filename:
            return
        if frame.f_code.co_filename.startswith(PACKAGE):
            return
        chain = []
        while frame is not None and frame.f_code.co_name not in hooks:
            code = frame.f_code
            # A comprehension is no function of a reader's (and from Python 3.12 on none of the interpreter's).
            if code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
                chain.append((code.co_filename.removeprefix(PACKAGE), getattr(code, "co_qualname", code.co_name)))
            frame = frame.f_back
        if frame is not None:  # else the call did not come from a hook
            found.append(chain[::-1])

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield found
    finally:
        sys.setprofile(before)


@contextlib.contextmanager
def observers(engine, watched):
    """With the ledger's events and a profiler's ranges recorded, or with neither."""
    engine.comm.ledger.trace = watched
    if watched:
        engine.comm.ranges.start(Recorder())
    try:
        yield
    finally:
        engine.comm.ranges.stop()


def check(chain, most):
    """At most so many functions, and no return to a file that was left."""
    told = "\n".join(f"{number} {file}: {name}" for number, (file, name) in enumerate(chain, 1))
    files = [file for (file, _), (before, _) in zip(chain, [("", ""), *chain], strict=False) if file != before]
    assert len(chain) <= most, told
    assert len(files) == len(set(files)), told


@pytest.mark.parametrize("watched", [False, True], ids=["alone", "watched"])
@pytest.mark.parametrize("offload", [False, True], ids=["device", "host"])
@on_ranks()
def test_from_a_gradient_to_its_bucket(rank, world, watched, offload):
    zero = {"offload_optimizer": {"device": "cpu"}} if offload else {}
    engine = built(config(stage=2, bucket=800, zero=zero))
    loss = engine(*my_micro_batches(0, rank, world, 2, 1)[0])
    with observers(engine, watched), chains({"isend"}, {"_engine_run_backward"}) as found:
        engine.backward(loss)
    engine.step()
    engine.destroy()
    inside = [chain for chain in found if chain[0][1].endswith("_gradient_ready")]
    assert len(inside) > 3  # buckets leave while gradients are still to come
    for chain in inside:
        assert [file for file, _ in chain if "stage_1_and_2" in file or "gradient_reduction" in file]
        check(chain, 7)


@pytest.mark.parametrize("watched", [False, True], ids=["alone", "watched"])
@pytest.mark.parametrize("quantized", [False, True], ids=["plain", "qwZ"])
@on_ranks()
def test_from_a_module_to_its_all_gather(rank, world, watched, quantized):
    engine = built(config(stage=3, bucket=800, zero={**WHOLE, "zero_quantized_weights": quantized}))
    with observers(engine, watched), chains({"isend"}, {"_call_impl"}) as found:
        engine(*my_micro_batches(0, rank, world, 2, 1)[0])
    engine.destroy()
    assert len(found) > 3
    for chain in found:
        assert chain[0][1].endswith("pre_forward") and "fetch_sub_module" in chain[1][1]
        check(chain, 6)
