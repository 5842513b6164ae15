"""Events and a cluster's numbers to seconds: steps made by hand, whose times are known."""

import dataclasses

import pytest

from deepzero.comm.ledger import Event, Sent, Traffic
from deepzero.comm.topology import Nodes
from deepzero.offload.copy_streams import FETCH, TO_DEVICE
from deepzero.planning import plan
from deepzero.planning.clusters import Cluster
from deepzero.planning.dry_run import DryRunResult, launched
from deepzero.planning.op_cost import Work
from deepzero.planning.simulate import play, simulate

CLUSTER = Cluster(
    "by hand", 2, flops=20.0, efficiency=0.5, memory_bytes=1000, memory_bandwidth=10.0,
    inside_bandwidth=10.0, node_bandwidth=1.0, inside_latency=1e-12, between_latency=1e-12,
    host_bytes=500, host_bandwidth=5.0, host_memory_bandwidth=8.0,
)  # fmt: skip
GATHER, REDUCE = "parameters.all_gather_forward", "gradients.reduce_scatter"


def launch(kind, where, nbytes, at):
    return Event("launch", kind, where, Sent(nbytes // 2, nbytes, 0, 2), at)


def wait(kind, where, at):
    return Event("wait", kind, where, None, at)


def copy(kind, where, nbytes, at):
    return Event("copy", kind, where, Sent(nbytes // 2, nbytes, 0, 1), at)


def step_of(events, ops, **changes):
    """Op n moves ``ops[n]`` bytes, of which the device moves 10 a second."""
    made = DryRunResult(
        rank=0, nodes=Nodes(2, 2), device_type="cuda", stage=3, model_numel=100, events=events, recording=[],
        work=Work([0] * len(ops), ops), plan=None, memory={"parameters": 100, "gradients": 40},
        held={"parameters": 100}, peak_bytes=300, traffic={},
        predicted={GATHER: Traffic(2, 100, 0, 200)}, host_bytes=0, trail=[launched(e) for e in events],
        gradients=[], points=[], fetched={"bucket 0": "wte", "bucket 1": "blocks.0"},
        reduced={"bucket 0": "head"}, micro_batches=1,
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def played(events, ops, **changes):
    return play(step_of(events, ops, **changes), CLUSTER)


def test_what_is_not_overlapped_is_waited_for():
    line = played([launch(GATHER, "bucket 0", 50, 0), wait(GATHER, "bucket 0", 0)], [100])
    assert (line.seconds, line.compute_seconds) == (pytest.approx(15), 10)
    assert line.exposed_by_kind() == {GATHER: pytest.approx(5)}


def test_what_is_overlapped_whole_costs_nothing():
    line = played([launch(GATHER, "bucket 0", 50, 0), wait(GATHER, "bucket 0", 1)], [100])
    assert line.seconds == 10 and line.network_seconds == pytest.approx(5) and line.exposed_seconds == 0


def test_what_is_overlapped_in_part_costs_the_rest():
    line = played([launch(GATHER, "bucket 0", 50, 1), wait(GATHER, "bucket 0", 2)], [100, 20, 30])
    assert line.exposed_seconds == pytest.approx(3) and line.seconds == pytest.approx(15 + 3)


def test_the_network_carries_one_after_the_other():
    events = [launch(GATHER, "bucket 0", 50, 0), launch(REDUCE, "bucket 0", 30, 0)]
    line = played([*events, wait(REDUCE, "bucket 0", 1), wait(GATHER, "bucket 0", 1)], [10])
    assert line.seconds == pytest.approx(8) and line.exposed_by_kind() == {REDUCE: pytest.approx(7)}


def test_each_wait_ends_the_launch_of_its_own_bucket_in_order():
    events = [launch(GATHER, "bucket 0", 10, 0), launch(GATHER, "bucket 1", 40, 0)]
    events += [wait(GATHER, "bucket 1", 0), launch(GATHER, "bucket 0", 20, 0)]
    line = played([*events, wait(GATHER, "bucket 0", 0), wait(GATHER, "bucket 0", 0)], [])
    assert line.seconds == pytest.approx(1 + 4 + 2)


def test_a_part_that_comes_from_the_host_is_gathered_after_it_has_come():
    events = [copy(FETCH, "bucket 0", 20, 0), launch(GATHER, "bucket 0", 50, 0), wait(GATHER, "bucket 0", 0)]
    line = played(events, [10])
    assert [span.lane for span in line.spans] == ["to_device", "network", "compute"]
    assert line.seconds == pytest.approx(20 / 5 + 5 + 1)


def test_the_two_directions_do_not_hinder_each_other():
    line = played([copy("offload.gradients_to_host", "bucket 0", 20, 0), copy(FETCH, "bucket 1", 20, 0)], [10])
    assert [(span.lane, span.start) for span in line.spans[:2]] == [("to_host", 0), ("to_device", 0)]


def test_the_host_steps_on_a_piece_before_that_leaves():
    held = {"host_masters": 4 * 10, "host_moments": 8 * 10, "host_gradients": 2 * 10}
    events = [copy(TO_DEVICE, "bucket 0", 20, 0), Event("publish", "", "", None, 0)]
    line = played(events, [], held=held)
    # 10 elements, 2 x 12 + 2 bytes each, for both ranks of the node, at 8 bytes a second; then 20 bytes at 5.
    assert line.seconds == pytest.approx(10 * 26 * 2 / 8 + 20 / 5)
    assert set(line.exposed_by_kind()) == {TO_DEVICE, "optimizer step"}


def test_a_delayed_update_runs_beside_the_step_and_holds_up_what_leaves():
    held = {"host_masters": 4 * 10, "host_moments": 8 * 10, "host_gradients": 2 * 2 * 10}
    events = [copy("offload.gradients_to_host", "bucket 0", 20, 1), copy(TO_DEVICE, "bucket 0", 20, 1)]
    events.append(Event("publish", "", "", None, 1))
    host, back = 10 * 26 * 2 / 8, 20 / 5
    for passes in (30, 1000):  # the forward and backward pass end before the CPU does, or after it
        line = played(events, [passes], held=held, delayed=True)
        assert line.seconds == pytest.approx(max(passes / 10, host) + back)
        assert sum(span.lane == "host" for span in line.spans) == 1
        assert played(events, [passes], held=held).seconds > line.seconds


def test_the_device_steps_in_two_passes_over_its_states():
    held = {"masters": 40, "moments": 80}
    line = played([Event("step", "", "", None, 0)], [], held=held)
    assert line.seconds == line.compute_seconds == pytest.approx((2 * 120 + 40) / 10)


def test_a_cluster_says_whether_it_fits_and_how_fast_it_is():
    events = [launch(GATHER, "bucket 0", 50, 0), wait(GATHER, "bucket 0", 0)]
    found = simulate(step_of(events, [100], host_bytes=250), CLUSTER, tokens=30)
    assert found.device_bytes == 100 + 40 + 160 and found.host_bytes_per_node == 500 and found.fits
    assert found.as_dict()["tokens_per_second"] == pytest.approx(2)
    assert found.exposed_share == pytest.approx(1 / 3)
    assert "step 15 s, 2 tokens/s" in (text := "\n".join(found.lines())) and "fits" in text
    small = simulate(step_of(events, [100], host_bytes=251), CLUSTER)
    assert not small.fits and "DOES NOT FIT" in "\n".join(small.lines())
    assert small.as_dict()["tokens_per_second"] is None


def test_a_plan_as_text_and_as_a_mapping():
    events = [
        Event("fetch", "prefetch at blocks.0", "bucket 1"),
        launch(GATHER, "bucket 1", 50, 0),
        wait(GATHER, "bucket 1", 0),
        Event("gradient_ready", "", "a"),
        Event("gradient_ready", "", "b"),
        launch(REDUCE, "bucket 0", 50, 1),
    ]
    rehearsal = step_of(events, [10])
    found = plan.as_dict(rehearsal)
    assert [(row["number"], row["what"], row["names"], row["gradients"]) for row in found["moves"]] == [
        (1, "fetch", "blocks.0", 0), (2, "launch", "blocks.0", 0), (3, "wait", "blocks.0", 0), (4, "launch", "head", 2),
    ]  # fmt: skip
    assert found["memory"] == {"parameters": 100, "gradients": 40, "activations": 160}
    text = plan.text(rehearsal)
    assert "for prefetch at blocks.0" in text and "after 2 gradients (head)" in text and "1.000 Ψ" in text
    assert "… and 2 more" in plan.text(rehearsal, moves=1) and "in order" not in plan.text(rehearsal, moves=0)
