"""A cluster's numbers: how long a collective takes by them, in closed form; what is read and what is refused."""

import dataclasses
import json

import pytest

from deepzero.comm.ledger import Sent
from deepzero.comm.topology import Nodes
from deepzero.config.strict import ConfigError
from deepzero.planning.clusters import PRESETS, RANKS, Cluster, find_cluster, read_cluster

SIMPLE = Cluster(
    "simple", 4, flops=1e12, efficiency=0.5, memory_bytes=1e9, memory_bandwidth=1e9,
    inside_bandwidth=100.0, node_bandwidth=10.0, inside_latency=0.5, between_latency=2.0,
    host_bytes=1e9, host_bandwidth=1e6, host_memory_bandwidth=1e6,
)  # fmt: skip


def test_an_op_takes_what_its_operations_memory_or_launch_take():
    assert SIMPLE.op_seconds(flops=1e12, moved=1e6) == 2.0
    assert SIMPLE.op_seconds(flops=1e6, moved=3e9) == 3.0
    slow = dataclasses.replace(SIMPLE, op_overhead=0.25)
    assert (slow.op_seconds(flops=0, moved=1e6), slow.op_seconds(flops=0, moved=1e9)) == (0.25, 1.0)


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


def test_presets_by_name_with_changes():
    assert set(RANKS) <= set(PRESETS)
    found = find_cluster("dgx_2h,node_bandwidth=5e9,ranks_per_node=8")
    assert (found.node_bandwidth, found.ranks_per_node) == (5e9, 8)
    assert dataclasses.replace(found, node_bandwidth=100e9, ranks_per_node=16) == PRESETS["dgx_2h"]


@pytest.mark.parametrize(("text", "said"), [
    ("h200", "cluster=h200: there are h100, azure_nc24r, dgx_2h"),
    ("", "there are h100"),
    ("h100,bandwidth=3", "'bandwidth' is no field; there are between_latency"),
    ("h100,flops", "flops= is no number"),
    ("h100,flops=fast", "flops=fast is no number"),
    ("h100,flops=nan", "flops=nan must be positive"),
    ("h100,flops=-1", "flops=-1 must be positive"),
    ("h100,ranks_per_node=0.5", "ranks_per_node=0.5 must be a whole number"),
    ("nowhere.json", "cluster=nowhere.json: "),
])  # fmt: skip
def test_what_is_no_cluster(text, said):
    with pytest.raises(ConfigError) as caught:
        find_cluster(text)
    assert said in str(caught.value)


def test_a_cluster_from_a_file(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(dataclasses.asdict(SIMPLE)))
    assert read_cluster(str(path)) == SIMPLE
    assert find_cluster(f"{path},flops=3").flops == 3


@pytest.mark.parametrize(("content", "said"), [
    ("[]", "holds no mapping"),
    ("{", "is no JSON"),
    ('{"name": "x"}', "lacks"),
    (json.dumps({**dataclasses.asdict(SIMPLE), "speed": 1}), "'speed' is no field"),
    (json.dumps({**dataclasses.asdict(SIMPLE), "flops": "much"}), "flops=much is no number"),
    (json.dumps({**dataclasses.asdict(SIMPLE), "device_type": "tpu"}), "device_type='tpu'"),
])  # fmt: skip
def test_a_file_that_is_none(tmp_path, content, said):
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        find_cluster(str(path))
    assert said in str(caught.value) and "bad.json" in str(caught.value)
