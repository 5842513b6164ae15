"""What the machine at hand can do, measured: the numbers of a :class:`~deepzero.planning.clusters.Cluster`.

All ranks measure at the same time, as they compute at the same time: what they share (cores, memory, the links of a
node) each then has its share of. Of every number the slowest rank's counts, for a step waits for that one.

- *Operations*: linear layers forward and backward in the compute dtype; ``efficiency`` is then 1. Attention apart:
  on a CPU its products, of a head's width, reach a third of their speed.
- *Memory*: what layer norms and GELUs reach of it, forward and backward. On a GPU that is the memory's bandwidth; a CPU
  core is slower at such functions than at reading, and it is they that a step is made of.
- *Host memory*: a large tensor copied, read and written.
- *An op's least time*: forward and backward pass of a network so small that nothing but launching takes time.
- *Links*: the collectives of ``comm/collectives.py``, at several sizes inside a node and, where there are several,
  between the ranks of the same number on each; seconds over bytes as a straight line, by least squares. And what of
  the processors a byte takes: on CPUs a rank computes less meanwhile.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from deepzero.comm import process_group
from deepzero.comm.chaos import Chaos
from deepzero.comm.collectives import Communicator
from deepzero.comm.ledger import Ledger
from deepzero.comm.topology import RankGroup, find_nodes
from deepzero.config.engine import ChaosConfig
from deepzero.device import accelerator_of
from deepzero.planning.clusters import Cluster
from deepzero.planning.op_cost import OpCost, WorkMeter

SIZES = (1 << 12, 1 << 16, 1 << 19, 1 << 21, 1 << 23)  # bytes that a rank contributes to a collective
# Of the layers that are timed: a micro-batch's tokens, a model's width. On a GPU launching must take no part of it.
ROWS_AND_WIDTH, ON_GPU = (512, 1024), (8192, 4096)
ROUNDS = 5  # the median of so many counts


def probe(dtype: torch.dtype, sizes: Sequence[int] = SIZES) -> Cluster:
    """Measure. A collective: every rank of the process group calls it, and gets the same cluster.

    Matrix products are made in ``dtype``; ``sizes`` are bytes of a rank's part, at least two different ones.
    """
    device, cpu = process_group.default_device(), torch.device("cpu")
    told = process_group.all_gather_object(process_group.ranks_of_host())
    nodes = find_nodes(None, process_group.world_size(), told)
    comm = Communicator(device, Ledger(), Chaos(ChaosConfig(), process_group.rank()), nodes)
    accelerator, host_bytes = accelerator_of(device), float(accelerator_of(cpu).total_memory(cpu))
    memory_bytes = float(accelerator.total_memory(device)) if accelerator.has_streams else host_bytes / nodes.per_node
    rows, width = ON_GPU if accelerator.has_streams else ROWS_AND_WIDTH
    products = [nn.Linear(width, width, bias=False) for _ in range(24)]  # more than a cache has room for
    others = [layer for _ in range(3) for layer in (nn.LayerNorm(width), nn.GELU())]
    tiny = [layer for _ in range(20) for layer in (nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU())]
    wide = torch.randn(rows, width, device=device).to(dtype).requires_grad_()
    product_ops, product_seconds = _timed(products, wide)
    attention_ops, attention_seconds = _timed([_Attention()], wide)
    function_ops, function_seconds = _timed(others, wide)
    tiny_ops, tiny_seconds = _timed(tiny, torch.zeros(2, 8, device=device))
    memory_bandwidth = sum(op.bytes for op in function_ops) / function_seconds
    if not accelerator.has_streams:  # there a product's traffic takes time of its own: ``Cluster.op_seconds``
        moving = sum(op.bytes for op in product_ops) / memory_bandwidth
        product_seconds = max(product_seconds - moving, product_seconds / 2)  # noise must not make it nothing
    flops = sum(op.flops for op in product_ops) / product_seconds
    mine = {
        "flops": flops,
        "attention_speed": min(1.0, sum(op.flops for op in attention_ops) / attention_seconds / flops),
        "memory_bandwidth": memory_bandwidth,
        "host_memory_bandwidth": _copy_bandwidth(cpu, cpu, 2) * nodes.per_node,
        "host_bandwidth": _copy_bandwidth(cpu, device, 1),
        "memory_bytes": memory_bytes,
    }
    # A rank of each node talks to its like: what leaves a node is what all its ranks send.
    links = [_link(comm, group, sizes) for group in comm.split(nodes.per_node)]
    everyone = process_group.all_gather_object((mine, tiny_seconds / len(tiny_ops), links))
    least = {key: min(theirs[0][key] for theirs in everyone) for key in mine}
    inner = _slowest([theirs[2][0] for theirs in everyone]) or (0.0, least["memory_bandwidth"], 0.0)
    outer = _slowest([theirs[2][1] for theirs in everyone]) or inner
    return Cluster(
        name="probed",
        ranks_per_node=nodes.per_node,
        efficiency=1.0,
        inside_bandwidth=inner[1],
        node_bandwidth=outer[1] * nodes.per_node,
        inside_latency=inner[0],
        between_latency=outer[0],
        host_bytes=host_bytes,
        device_type=device.type,
        op_overhead=max(theirs[1] for theirs in everyone),
        # Between processes of one host nothing but cores carries bytes.
        send_overhead=inner[2] if device.type == "cpu" else 0.0,
        **least,
    )


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Seconds over bytes as ``latency + bytes / bandwidth``, by least squares of the *relative* error.

    Relative, because the largest message would else decide alone. ``points`` are (bytes, seconds), of at least two
    different sizes. Returns the latency, not negative, and the bandwidth in bytes a second.

    Example:
        >>> fit_line([(1000, 2.5), (2000, 3.0), (4000, 4.0)])
        (2.0, 2000.0)
    """
    sizes, seconds = np.transpose(points)
    slope, latency = np.polyfit(sizes, seconds, 1, w=1 / seconds)
    if slope <= 0:  # noise: the largest message says what can be had at least
        slope, latency = seconds[sizes.argmax()] / sizes.max(), 0.0
    return max(0.0, round(float(latency), 12)), round(float(1 / slope), 6)


def _median_seconds(work: Callable[[], object], device: torch.device) -> float:
    """After one round that does not count."""
    seconds = []
    for _ in range(ROUNDS + 1):
        process_group.barrier()
        began = time.perf_counter()
        work()
        accelerator_of(device).synchronize(device)
        seconds.append(time.perf_counter() - began)
    return sorted(seconds[1:])[ROUNDS // 2]


class _Attention(nn.Module):
    """Heads of 64 wide, which look at what came before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.view(1, len(x), -1, 64).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).reshape_as(x)


def _timed(layers: Sequence[nn.Module], x: torch.Tensor) -> tuple[list[OpCost], float]:
    """The ops of a forward and a backward pass, **counted as a rehearsal counts them**, and seconds."""
    network, gradient = nn.Sequential(*layers).to(x.device, x.dtype), torch.ones_like(x)
    x = x.detach().requires_grad_(x.requires_grad)

    def work() -> None:
        network.zero_grad(set_to_none=True)
        network(x).backward(gradient)

    with WorkMeter(x.device.type) as meter:
        work()
    return meter.work, _median_seconds(work, x.device)


def _copy_bandwidth(source: torch.device, target: torch.device, passes: int) -> float:
    """Bytes a second of a copy; ``passes`` 2 counts what is read and what is written."""
    size = 1 << (28 if target.type == "cuda" else 25)
    given = torch.zeros(size, dtype=torch.uint8, device=source, pin_memory=source.type != target.type)
    taken = torch.zeros(size, dtype=torch.uint8, device=target)
    return passes * size / _median_seconds(lambda: taken.copy_(given, non_blocking=True), target)


def _link(comm: Communicator, group: RankGroup, sizes: Sequence[int]) -> tuple[float, float, float] | None:
    """Latency and bandwidth among a group's ranks, and processor seconds a byte of the largest message.

    None: nobody is there to talk to. All groups measure at once.
    """
    if group.size == 1:
        return None
    points, busy = [], 0.0
    for size in sizes:
        recv = list(torch.zeros(group.size, size, dtype=torch.uint8, device=comm.device).unbind())
        send = [torch.zeros_like(part) for part in recv]

        def exchange(send: list[torch.Tensor] = send, recv: list[torch.Tensor] = recv) -> None:
            comm.exchange("probe", send, recv, group=group).wait()

        began = time.process_time()
        points.append(((group.size - 1) * size, _median_seconds(exchange, comm.device)))
        busy = (time.process_time() - began) / (ROUNDS + 1)
    return *fit_line(points), busy / points[-1][0]


def _slowest(links: Sequence[tuple[float, float, float] | None]) -> tuple[float, float, float] | None:
    if not (there := [link for link in links if link is not None]):
        return None
    latency, bandwidth, busy = zip(*there, strict=True)
    return max(latency), min(bandwidth), max(busy)


def probe_to_file(path: str, dtype: str) -> None:
    """A rank's program: join, measure, and let rank 0 write the cluster into ``path``, for ``--cluster FILE.json``."""
    process_group.init_distributed()
    found = probe(getattr(torch, dtype))
    if process_group.rank() == 0:
        Path(path).write_text(json.dumps(dataclasses.asdict(found), indent=1) + "\n", encoding="utf-8")
    process_group.barrier()
    process_group.shutdown()
