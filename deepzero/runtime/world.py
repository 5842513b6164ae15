"""What a configuration asks of the number of ranks: nodes and partition sizes that divide it."""

from __future__ import annotations

import logging

import torch

from deepzero.comm import process_group
from deepzero.comm.chaos import Chaos
from deepzero.comm.collectives import Communicator
from deepzero.comm.groups import Nodes, divisors_text, find_nodes
from deepzero.comm.ledger import Ledger
from deepzero.config.engine import EngineConfig
from deepzero.config.parse import ConfigError

log = logging.getLogger(__name__)


def check_ranks(config: EngineConfig, world_size: int) -> Nodes:
    """The nodes of a run over ``world_size`` ranks.

    Raises:
        ConfigError: a size that does not divide the ranks.
    """
    nodes = find_nodes(config.comm.ranks_per_node, world_size)
    zero = config.zero
    for name, size in (
        ("zero_hpz_partition_size", zero.zero_hpz_partition_size),
        ("mics_shard_size", zero.mics_shard_size),
    ):
        if size > 0 and world_size % size:
            raise ConfigError(
                f"zero.{name}={size}: does not divide the {world_size} ranks of this run, so they cannot be cut into "
                f"groups of {size}; {divisors_text(world_size)} would"
            )
    return nodes


def open_communicator(config: EngineConfig, device: torch.device, ledger: Ledger) -> Communicator:
    """The collectives of one engine; says once what is odd about its groups."""
    rank, world_size = process_group.rank(), process_group.world_size()
    nodes, size = check_ranks(config, world_size), config.zero.secondary_size
    if size > nodes.per_node and nodes.count > 1 and rank == 0:
        name = "mics_shard_size" if config.zero.mics_shard_size == size else "zero_hpz_partition_size"
        log.warning(
            "zero.%s=%d is more than the %d ranks of a node: gathers inside the group leave the node", name, size,
            nodes.per_node,
        )  # fmt: skip
    return Communicator(device, ledger, Chaos(config.comm.chaos, rank), nodes)
