"""What a cluster can do, in a few numbers, and how long a collective takes by them.

The model is bandwidth and latency, with two kinds of links: inside a node, each rank has one of its own; between nodes,
the ranks of a node share what leaves it. A message of n bytes takes ``latency + n / bandwidth``.

Figures: NVLink 4 and InfiniBand HDR as in [single number] (900 GB/s, both ways together; 200 Gb/s a port, and a port
per GPU); the two clusters, their nodes and their bandwidth between nodes as in the table of [stage-1 post]. Peak rates
and memory are the makers'. Latencies are typical ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepzero.comm.ledger import Sent
from deepzero.comm.topology import Nodes
from deepzero.config.strict import ConfigError
from deepzero.planning.op_cost import OpCost


@dataclass(frozen=True)
class Cluster:
    """Bandwidths in bytes per second and one direction, latencies in seconds, memory in bytes."""

    name: str
    ranks_per_node: int
    flops: float  # of one device per second, in 16-bit matrix products: the maker's peak
    efficiency: float  # what part of the peak real matrix products reach
    memory_bytes: float
    memory_bandwidth: float
    inside_bandwidth: float  # of one rank's link inside its node
    node_bandwidth: float  # of all that leaves a node
    inside_latency: float
    between_latency: float
    host_bytes: float  # memory of one node's host
    host_bandwidth: float  # between a device and its host, for one rank
    host_memory_bandwidth: float  # of a node's host memory, which its ranks share when the CPU steps
    device_type: str = "cuda"
    op_overhead: float = 0.0
    """Seconds that no op takes less than: launching it, where nothing runs ahead. 0 where a GPU's queue is never empty;
    on a CPU it is measured."""
    send_overhead: float = 0.0
    """Seconds of a rank's cores for each byte of its collectives: a CPU computes on the cores that send. 0 on a GPU."""

    attention_speed: float = 1.0
    """What attention reaches of the speed of matrix products. 1 where it is not told apart; on a CPU it is measured."""

    @property
    def copy_bandwidth(self) -> float:
        """Of a rank that copies, casts, adds: of its device's memory, which on CPUs is the host's, shared by ranks."""
        return self.host_memory_bandwidth / self.ranks_per_node if self.device_type == "cpu" else self.memory_bandwidth

    def op_seconds(self, op: OpCost) -> float:
        """An op takes as long as its operations, its memory traffic or its launch, whichever is most.

        On a CPU a product takes the first two together: its time over rows is a line from its weights' traffic upwards.
        """
        speed = self.flops * self.efficiency * (self.attention_speed if op.kind == "attention" else 1.0)
        bandwidth = self.copy_bandwidth if op.kind == "copy" else self.memory_bandwidth
        computing, moving = op.flops / speed, op.bytes / bandwidth
        one_by_one = self.device_type == "cpu" and op.kind == "product"
        return max(computing + moving if one_by_one else max(computing, moving), self.op_overhead)

    def collective_seconds(self, sent: Sent, nodes: Nodes) -> float:
        """From the launch to the end, with nothing else on the links."""
        if sent.ranks <= 1 or not sent.bytes:
            return 0.0
        across = sent.between_node_bytes > 0
        if sent.ring:
            # The backend's own collectives: a byte enters each node once, however many ranks are there, and passes
            # every rank's link inside; each of the W steps pays a latency. What a rank would send directly to the
            # W - R ranks elsewhere is what a ring brings into each node.
            carried = max(sent.bytes / self.inside_bandwidth, sent.between_node_bytes / self.node_bandwidth)
            hops_between = sent.ranks // nodes.per_node if across else 0
            return hops_between * self.between_latency + (sent.ranks - 1) * self.inside_latency + carried
        # Pairs ("exact" sums and all-to-alls): each rank sends straight to each other, so that what leaves a node is
        # the sum over its ranks; the first message pays the latency, the others follow at once.
        leaves = nodes.per_node * sent.between_node_bytes / self.node_bandwidth
        stays = (sent.bytes - sent.between_node_bytes) / self.inside_bandwidth
        return (self.between_latency if across else self.inside_latency) + max(leaves, stays)


H100_HDR = Cluster(
    "h100", 8, flops=989e12, efficiency=0.5, memory_bytes=80e9, memory_bandwidth=3.35e12,
    inside_bandwidth=450e9, node_bandwidth=8 * 25e9, inside_latency=3e-6, between_latency=10e-6,
    host_bytes=2e12, host_bandwidth=50e9, host_memory_bandwidth=400e9,
)  # fmt: skip
AZURE_NC24R = Cluster(
    "azure_nc24r", 4, flops=112e12, efficiency=0.4, memory_bytes=16e9, memory_bandwidth=900e9,
    inside_bandwidth=12e9, node_bandwidth=5e9, inside_latency=10e-6, between_latency=20e-6,
    host_bytes=448e9, host_bandwidth=12e9, host_memory_bandwidth=100e9,
)  # fmt: skip
DGX_2H = Cluster(
    "dgx_2h", 16, flops=130e12, efficiency=0.4, memory_bytes=32e9, memory_bandwidth=900e9,
    inside_bandwidth=150e9, node_bandwidth=100e9, inside_latency=5e-6, between_latency=10e-6,
    host_bytes=1.5e12, host_bandwidth=12e9, host_memory_bandwidth=200e9,
)  # fmt: skip
PRESETS = {cluster.name: cluster for cluster in (H100_HDR, AZURE_NC24R, DGX_2H)}
RANKS = {"azure_nc24r": 32, "dgx_2h": 128}  # as the post's table has them
_MAY_BE_ZERO = ("inside_latency", "between_latency", "op_overhead", "send_overhead")
_OPTIONAL = {"op_overhead", "send_overhead", "attention_speed"}  # files of earlier probes lack some
_NUMBERS = {f.name for f in dataclasses.fields(Cluster)} - {"name", "device_type"}


def find_cluster(text: str) -> Cluster:
    """A preset by name, or a file, with changes: ``h100``, ``h100,node_bandwidth=100e9`` or ``probed.json,flops=1e12``.

    Example:
        >>> find_cluster("dgx_2h,node_bandwidth=5e9").node_bandwidth
        5000000000.0
    """
    name, *changes = text.split(",")
    if not name.endswith(".json") and name not in PRESETS:
        raise ConfigError(
            f"cluster={name}: there are {', '.join(PRESETS)}, each with changes as in h100,flops=3e14, and files that "
            "python -m tools.simulate --probe --save FILE.json writes"
        )
    numbers: dict[str, Any] = {}
    for change in changes:
        key, _, value = change.partition("=")
        numbers[key] = value
        with contextlib.suppress(ValueError):
            numbers[key] = float(value)
    cluster = read_cluster(name) if name.endswith(".json") else PRESETS[name]
    return dataclasses.replace(cluster, **_checked(f"cluster={text}", numbers))


def _checked(where: str, numbers: dict[str, Any]) -> dict[str, Any]:
    """Fields of a cluster, each a number that can be; or a :class:`ConfigError` that begins with ``where``."""
    for key, value in numbers.items():
        if key not in _NUMBERS:
            raise ConfigError(f"{where}: {key!r} is no field; there are {', '.join(sorted(_NUMBERS))}")
        if type(value) not in (int, float):
            raise ConfigError(f"{where}: {key}={value} is no number")
        if not (0 < value < math.inf or (value == 0 and key in _MAY_BE_ZERO)):
            raise ConfigError(f"{where}: {key}={value:g} must be positive")
        if key == "ranks_per_node" and value != int(value):
            raise ConfigError(f"{where}: {key}={value:g} must be a whole number")
    return {key: int(value) if key == "ranks_per_node" else value for key, value in numbers.items()}


def read_cluster(path: str) -> Cluster:
    """A cluster from a JSON file: a mapping of all fields, as ``--probe --save`` writes it."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError(f"cluster={path} is no JSON: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cluster={path}: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"cluster={path} holds no mapping of a cluster's fields")
    words = {key: found.pop(key) for key in ("name", "device_type") if key in found}
    numbers = _checked(f"cluster={path}", found)
    if lacking := sorted((_NUMBERS | {"name"}) - {*words, *numbers} - _OPTIONAL):
        raise ConfigError(f"cluster={path} lacks {', '.join(lacking)}")
    if words.get("device_type", "cuda") not in ("cpu", "cuda"):
        raise ConfigError(f"cluster={path}: device_type={words['device_type']!r} is neither cpu nor cuda")
    return Cluster(**words, **numbers)
