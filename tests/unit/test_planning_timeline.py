"""A cluster's numbers, and events with them to seconds: steps made by hand, whose times are known."""

import dataclasses
import json

import pytest

from deepzero.comm.ledger import Event, Sent, Traffic
from deepzero.comm.topology import Nodes
from deepzero.config.strict import ConfigError
from deepzero.offload.copy_streams import FETCH, TO_DEVICE
from deepzero.planning import plan
from deepzero.planning.clusters import PRESETS, RANKS, Cluster, find_cluster, read_cluster
from deepzero.planning.dry_run import DryRunResult, launched
from deepzero.planning.op_cost import OpCost
from deepzero.planning.simulate import simulate

SIMPLE = Cluster(
    "simple", 4, flops=1e12, efficiency=0.5, memory_bytes=1e9, memory_bandwidth=1e9,
    inside_bandwidth=100.0, node_bandwidth=10.0, inside_latency=0.5, between_latency=2.0,
    host_bytes=1e9, host_bandwidth=1e6, host_memory_bandwidth=1e6,
)  # fmt: skip
CLUSTER = Cluster(
    "by hand", 2, flops=20.0, efficiency=0.5, memory_bytes=1000, memory_bandwidth=10.0,
    inside_bandwidth=10.0, node_bandwidth=1.0, inside_latency=1e-12, between_latency=1e-12,
    host_bytes=500, host_bandwidth=5.0, host_memory_bandwidth=8.0,
)  # fmt: skip


# ---- how long a collective takes, in closed form; what is read as a cluster and what is refused ----------------------


def test_an_op_takes_what_its_operations_memory_or_launch_take():
    product, copied = OpCost(10**12, 10**6, "product"), OpCost(0, 3 * 10**6, "copy")
    assert SIMPLE.op_seconds(product) == 2.0
    assert SIMPLE.op_seconds(OpCost(10**6, 3 * 10**9, "product")) == 3.0
    slow = dataclasses.replace(SIMPLE, op_overhead=0.25, attention_speed=0.4)
    assert [slow.op_seconds(OpCost(0, moved, "function")) for moved in (10**6, 10**9)] == [0.25, 1.0]
    assert [slow.op_seconds(product._replace(kind=kind)) for kind in ("product", "attention")] == [2.0, 5.0]
    # What only copies goes at the memory's speed, which on CPUs is the host's, shared by 4 ranks.
    cpu = dataclasses.replace(SIMPLE, device_type="cpu")
    assert [cluster.op_seconds(copied) for cluster in (SIMPLE, cpu)] == [3e6 / 1e9, 3e6 / (1e6 / 4)]
    # And a product takes its traffic beside its operations there.
    assert [cluster.op_seconds(OpCost(10**12, 10**9, "product")) for cluster in (SIMPLE, cpu)] == [2.0, 3.0]


@pytest.mark.parametrize(("given", "nodes", "seconds"), [
    # A ring inside one node: 3 steps of latency, and every byte through this rank's link.
    ((300, 0, 4, True), (4, 4), 3 * 0.5 + 300 / 100),
    # 8 ranks of 2 nodes: 700 bytes through the own link, the other node's 400 once through the node's.
    ((700, 400, 8, True), (8, 4), 2 * 2.0 + 7 * 0.5 + max(700 / 100, 400 / 10)),
    # By pairs each of the 4 ranks of a node sends 400 bytes out: 1,600 through the node's link.
    ((700, 400, 8, False), (8, 4), 2.0 + max(1600 / 10, 300 / 100)),
    ((300, 0, 4, False), (4, 4), 0.5 + 300 / 100),
    # Nobody to talk to.
    ((0, 0, 8, True), (8, 4), 0.0),
    ((300, 0, 1, False), (1, 1), 0.0),
])  # fmt: skip
def test_how_long_a_collective_takes(given, nodes, seconds):
    nbytes, between, ranks, ring = given
    assert SIMPLE.collective_seconds(Sent(nbytes // 2, nbytes, between, ranks, ring), Nodes(*nodes)) == seconds


def test_presets_by_name_and_clusters_from_files_with_changes(tmp_path):
    assert set(RANKS) <= set(PRESETS)
    found = find_cluster("dgx_2h,node_bandwidth=5e9,ranks_per_node=8")
    assert (found.node_bandwidth, found.ranks_per_node) == (5e9, 8)
    assert dataclasses.replace(found, node_bandwidth=100e9, ranks_per_node=16) == PRESETS["dgx_2h"]
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(dataclasses.asdict(SIMPLE)))
    assert read_cluster(str(path)) == SIMPLE and find_cluster(f"{path},flops=3").flops == 3


def file_of(**changes):
    return json.dumps({**dataclasses.asdict(SIMPLE), **changes})


@pytest.mark.parametrize(("text", "content", "said"), [
    ("h200", None, "cluster=h200: there are h100, azure_nc24r, dgx_2h"),
    ("", None, "there are h100"),
    ("h100,bandwidth=3", None, "'bandwidth' is no field; there are attention_speed, between_latency"),
    ("h100,flops", None, "flops= is no number"),
    ("h100,flops=fast", None, "flops=fast is no number"),
    ("h100,flops=nan", None, "flops=nan must be positive"),
    ("h100,flops=-1", None, "flops=-1 must be positive"),
    ("h100,ranks_per_node=0.5", None, "ranks_per_node=0.5 must be a whole number"),
    ("nowhere.json", None, "cluster=nowhere.json: "),
    ("bad.json", "[]", "cluster=bad.json holds no mapping"),
    ("bad.json", "{", "cluster=bad.json is no JSON"),
    ("bad.json", '{"name": "x"}', "cluster=bad.json lacks"),
    ("bad.json", file_of(speed=1), "cluster=bad.json: 'speed' is no field"),
    ("bad.json", file_of(flops="much"), "cluster=bad.json: flops=much is no number"),
    ("bad.json", file_of(device_type="tpu"), "cluster=bad.json: device_type='tpu'"),
])  # fmt: skip
def test_what_is_no_cluster(text, content, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / text).write_text(content)
    with pytest.raises(ConfigError) as caught:
        find_cluster(text)
    assert said in str(caught.value)


# ---- events to seconds -----------------------------------------------------------------------------------------------

GATHER, REDUCE, DOWN = "parameters.all_gather_forward", "gradients.reduce_scatter", "offload.gradients_to_host"
PUBLISH = Event("publish", "", "", None, 0)


def launch(kind, where, nbytes, at=0):
    return Event("launch", kind, f"bucket {where}", Sent(nbytes // 2, nbytes, 0, 2), at)


def wait(kind, where, at=0):
    return Event("wait", kind, f"bucket {where}", None, at)


def copy(kind, where, nbytes, at=0):
    return Event("copy", kind, f"bucket {where}", Sent(nbytes // 2, nbytes, 0, 1), at)


def step_of(events, ops, **changes):
    """Op n moves ``ops[n]`` bytes, of which the device moves 10 a second."""
    made = DryRunResult(
        rank=0, nodes=Nodes(2, 2), device_type="cuda", stage=3, model_numel=100, events=events, recording=[],
        work=[OpCost(0, moved, "function") for moved in ops], trace=None, memory={"parameters": 100, "gradients": 40},
        held={"parameters": 100}, peak_bytes=300, traffic={},
        predicted={GATHER: Traffic(2, 100, 0, 200)}, host_bytes=0, trail=[launched(e) for e in events],
        gradients=[], points=[], fetched={"bucket 0": "wte", "bucket 1": "blocks.0"},
        reduced={"bucket 0": "head"}, micro_batches=1,
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def played(events, ops, **changes):
    return simulate(step_of(events, ops, **changes), CLUSTER).timeline


@pytest.mark.parametrize(("events", "ops", "seconds", "exposed"), [
    ([launch(GATHER, 0, 50), wait(GATHER, 0)], [100], 15, {GATHER: 5}),
    # What is overlapped costs nothing, or the rest.
    ([launch(GATHER, 0, 50), wait(GATHER, 0, 1)], [100], 10, {}),
    ([launch(GATHER, 0, 50, 1), wait(GATHER, 0, 2)], [100, 20, 30], 15 + 3, {GATHER: 3}),
    # The network carries one after the other.
    ([launch(GATHER, 0, 50), launch(REDUCE, 0, 30), wait(REDUCE, 0, 1), wait(GATHER, 0, 1)], [10], 8, {REDUCE: 7}),
    # Each wait ends the launch of its own bucket, in order.
    ([launch(GATHER, 0, 10), launch(GATHER, 1, 40), wait(GATHER, 1), launch(GATHER, 0, 20), wait(GATHER, 0),
      wait(GATHER, 0)], [], 1 + 4 + 2, {GATHER: 7}),
    # What a step leaves under way the next one waits for, behind its first operation.
    ([wait(GATHER, 0, 1), launch(GATHER, 0, 50, 1)], [20], 5, {GATHER: 3}),
])  # fmt: skip
def test_what_is_not_overlapped_is_waited_for(events, ops, seconds, exposed):
    line = played(events, ops)
    assert (line.seconds, line.busy("compute")) == pytest.approx((seconds, sum(ops) / 10))
    assert line.exposed_by_kind() == pytest.approx(exposed)
    assert line.exposed_seconds == pytest.approx(sum(exposed.values()))
    assert line.busy("network") == pytest.approx(sum(e.sent.bytes for e in events if e.what == "launch") / 10)


def test_what_is_published_under_way_leaves_as_its_part_of_the_step_is_done():
    gather, step = "parameters.all_gather", Event("step", "", "", None, 1)
    events = [wait(gather, 0), wait(gather, 1, 1), launch(gather, 0, 40, 1), launch(gather, 1, 20, 1), step]
    line = played(events, [10], held={"masters": 20, "moments": 40}, memory={}, model_numel=60)
    # 8 + 4 seconds of the optimizer: the first bucket leaves 4 seconds before their end, the second with it, and the
    # first is there: the next step waits for the second, beside its one second of computing.
    assert line.seconds == pytest.approx(12 + 2)
    assert line.exposed_by_kind() == pytest.approx({gather: 1})
    assert line.busy("network") == pytest.approx(6) and line.busy("compute") == pytest.approx(13)
    # Of a larger model the rest is stepped on when both have left.
    line = played(events, [10], held={"masters": 20, "moments": 40}, memory={}, model_numel=120)
    assert line.seconds == pytest.approx(12 + 1) and line.exposed_by_kind() == {}


@pytest.mark.parametrize(("overhead", "ops", "at", "seconds"), [
    (0.05, [100], 1, 12.5),  # half as fast for 5 seconds
    (0.1, [100], 1, 15),  # not at all: memory speed, where cores do nothing else meanwhile
    (0.05, [20], 1, 5),  # the wait takes it in
    (0.05, [100, 20], 2, 12 + 2.5),
])  # fmt: skip
def test_a_cpu_computes_more_slowly_while_its_cores_send(overhead, ops, at, seconds):
    events = [launch(GATHER, 0, 50), wait(GATHER, 0, at)]
    line = simulate(step_of(events, ops), dataclasses.replace(CLUSTER, send_overhead=overhead)).timeline
    assert line.seconds == pytest.approx(seconds)


def test_between_device_and_host():
    """A part that comes from the host is gathered after it has come; the two directions do not hinder each other."""
    line = played([copy(FETCH, 0, 20), launch(GATHER, 0, 50), wait(GATHER, 0)], [10])
    assert [span.lane for span in line.spans] == ["to_device", "network", "compute"]
    assert line.seconds == pytest.approx(20 / 5 + 5 + 1)
    line = played([copy(DOWN, 0, 20), copy(FETCH, 1, 20)], [10])
    assert [(span.lane, span.start) for span in line.spans[:2]] == [("to_host", 0), ("to_device", 0)]


def test_the_host_steps_on_a_piece_before_that_leaves():
    held = {"host_masters": 4 * 10, "host_moments": 8 * 10, "host_gradients": 2 * 10}
    line = played([copy(TO_DEVICE, 0, 20), PUBLISH], [], held=held)
    # 10 elements, 2 x 12 + 2 bytes each, for both ranks of the node, at 8 bytes a second; then 20 bytes at 5.
    assert line.seconds == pytest.approx(10 * 26 * 2 / 8 + 20 / 5)
    assert set(line.exposed_by_kind()) == {TO_DEVICE, "optimizer step"}


def test_a_delayed_update_runs_beside_the_step_and_holds_up_what_leaves():
    held = {"host_masters": 4 * 10, "host_moments": 8 * 10, "host_gradients": 2 * 2 * 10}
    events = [copy(DOWN, 0, 20, 1), copy(TO_DEVICE, 0, 20, 1), dataclasses.replace(PUBLISH, at=1)]
    host, back = 10 * 26 * 2 / 8, 20 / 5
    for passes in (30, 1000):  # the forward and backward pass end before the CPU does, or after it
        line = played(events, [passes], held=held, delayed=True)
        assert line.seconds == pytest.approx(max(passes / 10, host) + back)
        assert sum(span.lane == "host" for span in line.spans) == 1
        assert played(events, [passes], held=held).seconds > line.seconds


def test_the_device_steps_in_two_passes_over_its_states():
    line = played([Event("step", "", "", None, 0)], [], held={"masters": 40, "moments": 80})
    assert line.seconds == line.busy("compute") == pytest.approx((2 * 120 + 40) / 10)


def test_a_cluster_says_whether_it_fits_and_how_fast_it_is():
    events = [launch(GATHER, 0, 50), wait(GATHER, 0)]
    found = simulate(step_of(events, [100], host_bytes=250), CLUSTER, tokens=30)
    assert found.device_bytes == 100 + 40 + 160 and found.host_bytes_per_node == 500 and found.fits
    assert found.as_dict()["tokens_per_second"] == pytest.approx(2) and found.exposed_share == pytest.approx(1 / 3)
    assert "step 15 s, 2 tokens/s" in (text := "\n".join(found.lines())) and "fits" in text
    small = simulate(step_of(events, [100], host_bytes=251), CLUSTER)
    assert not small.fits and "DOES NOT FIT" in "\n".join(small.lines())
    assert small.as_dict()["tokens_per_second"] is None


def test_a_plan_as_text_and_as_a_mapping():
    ready = [Event("gradient_ready", "", name) for name in "ab"]
    fetch = Event("fetch", "prefetch at blocks.0", "bucket 1")
    rehearsal = step_of([fetch, launch(GATHER, 1, 50), wait(GATHER, 1), *ready, launch(REDUCE, 0, 50, 1)], [10])
    found = plan.as_dict(rehearsal)
    assert [(row["number"], row["what"], row["names"], row["gradients"]) for row in found["moves"]] == [
        (1, "fetch", "blocks.0", 0), (2, "launch", "blocks.0", 0), (3, "wait", "blocks.0", 0), (4, "launch", "head", 2),
    ]  # fmt: skip
    assert found["memory"] == {"parameters": 100, "gradients": 40, "activations": 160}
    text = plan.text(rehearsal)
    assert "for prefetch at blocks.0" in text and "after 2 gradients (head)" in text and "1.000 Ψ" in text
    assert "… and 2 more" in plan.text(rehearsal, moves=1) and "in order" not in plan.text(rehearsal, moves=0)
