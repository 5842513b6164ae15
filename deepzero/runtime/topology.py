"""What a configuration asks of the number of ranks: nodes and partition sizes that divide it."""

from __future__ import annotations

import logging

import torch

from deepzero.comm import process_group
from deepzero.comm.chaos import Chaos
from deepzero.comm.collectives import Communicator
from deepzero.comm.groups import Nodes, divisors_text, find_nodes, told_by_launcher
from deepzero.comm.ledger import Ledger
from deepzero.config.engine import EngineConfig
from deepzero.config.strict import ConfigError

log = logging.getLogger(__name__)


def check_ranks(config: EngineConfig, world_size: int) -> None:
    """Refuse sizes that do not divide the ranks. A run of one rank takes any: it has nothing to divide.

    Raises:
        ConfigError: which, why, and which would.
    """
    if world_size == 1:
        return
    find_nodes(config.comm.ranks_per_node, world_size)
    for name in ("zero_hpz_partition_size", "mics_shard_size"):
        size = getattr(config.zero, name)
        if size > 0 and world_size % size:
            raise ConfigError(
                f"{name}={size}: does not divide the {world_size} ranks of this run, so they cannot be cut into groups "
                f"of {size}; {divisors_text(world_size)} would"
            )


def open_communicator(config: EngineConfig, device: torch.device, ledger: Ledger) -> Communicator:
    """The collectives of one engine; rank 0 says what is odd about its groups. A collective."""
    rank, world_size = process_group.rank(), process_group.world_size()
    check_ranks(config, world_size)
    told = process_group.all_gather_object(told_by_launcher())
    nodes = find_nodes(config.comm.ranks_per_node, world_size, told)
    if rank == 0:
        for line in _oddities(config, nodes, told):
            log.warning(line)
    return Communicator(device, ledger, Chaos(config.comm.chaos, rank), nodes)


def _oddities(config: EngineConfig, nodes: Nodes, told: list[int | None]) -> list[str]:
    zero, lines = config.zero, []
    name = "mics_shard_size" if zero.mics_shard_size > 0 else "zero_hpz_partition_size"
    size = getattr(zero, name)
    if nodes.world_size == 1:
        if size > 1 or zero.zero_quantized_gradients or zero.zero_quantized_weights:
            lines.append("one rank: nothing travels, so ZeRO++'s settings do nothing in this run")
        return lines
    if config.comm.ranks_per_node is None and len(set(told)) > 1:
        sizes = ", ".join(str(number) for number in sorted({number or 0 for number in told}))
        lines.append(
            f"machines have different numbers of ranks ({sizes}): all ranks count as one node, and nothing is said to "
            "travel between nodes; comm.ranks_per_node can name a number that divides all"
        )
    if size > 1 and nodes.count > 1 and nodes.per_node % size:
        lines.append(
            f"{name}={size} does not divide the {nodes.per_node} ranks of a node: some of its groups lie on two nodes, "
            "and gathers inside a group leave the node"
        )
    if nodes.count == 1 and (size > 1 or zero.zero_quantized_gradients or zero.zero_quantized_weights):
        only = all(nodes.world_size % size for size in range(2, nodes.world_size))
        each, which = ("1", "") if only else ("R", f" for an R below {nodes.world_size} that divides it")
        lines.append(
            f"all {nodes.world_size} ranks are one node, between which ZeRO++ has nothing to save: start ranks on more "
            f"nodes, or pretend some, with comm.ranks_per_node={each} zero.zero_hpz_partition_size={each}{which}"
        )
    elif name == "zero_hpz_partition_size" and size == nodes.world_size:
        lines.append(f"{name}={size} is all ranks: the second partition is the first once more, and saves nothing")
    return lines
