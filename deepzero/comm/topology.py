"""Which ranks share a node, and groups of ranks that talk among themselves.

Links inside a node are 10 to 20 times as fast as those between nodes, so what matters of a byte is whether it leaves
its node. Ranks are numbered node by node, as launchers do it: rank r is on node ``r // R``, R ranks to a node. On one
machine nodes can be pretended (``comm.ranks_per_node``): everything runs, and is counted, as if there were several.

Two families of groups cover what ZeRO++ and hybrid sharding need, both over runs of ``size`` consecutive ranks::

    size 2 of W = 6        inside: (0 1) (2 3) (4 5)        across: (0 2 4) (1 3 5)

Sources: [ZeRO++], sections 3.2 and 3.3; [MiCS], section 3; ``utils/groups.py`` in [DeepSpeed].
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch.distributed as dist

from deepzero.comm import flight_recorder
from deepzero.comm.rendezvous import behind_closed_doors
from deepzero.utils.errors import ConfigError

if TYPE_CHECKING:
    from deepzero.config.engine import EngineConfig


@dataclass(frozen=True)
class Nodes:
    """How ranks are spread over nodes, ``per_node`` to each, which divides ``world_size``. Pure integers."""

    world_size: int
    per_node: int

    @property
    def count(self) -> int:
        """How many nodes there are."""
        return self.world_size // self.per_node

    def of(self, rank: int) -> int:
        """The node of ``rank``."""
        return rank // self.per_node

    def leaving(self, rank: int, peers: Collection[int]) -> int:
        """How many of ``peers`` are on another node than ``rank``; for all ranks without asking each of them."""
        if len(peers) == self.world_size:
            return self.world_size - self.per_node
        return sum(self.of(peer) != self.of(rank) for peer in peers)

    def crossing_inside(self, size: int) -> float:
        """How many of a rank's ``size - 1`` peers in its run of ``size`` ranks are on other nodes, mean over ranks."""
        total = 0
        for run in split_ranks(self.world_size, size)[0]:
            total += sum(number * (size - number) for number in Counter(map(self.of, run)).values())
        return total / self.world_size

    @property
    def share_between(self) -> float:
        """What part of a message to every other rank leaves the node: ``(W - R) / (W - 1)``."""
        return (self.world_size - self.per_node) / max(self.world_size - 1, 1)


def find_nodes(ranks_per_node: int | None, world_size: int, ranks_of_hosts: Sequence[int | None] = ()) -> Nodes:
    """The nodes of this run.

    Without ``comm.ranks_per_node`` it goes by what the launcher told each rank (``ranks_of_hosts``: every rank's
    ``process_group.ranks_of_host()``: **all ranks have to come to the same nodes**). Where it has told nothing, or
    machines differ in size, all ranks count as one node.

    Example:
        >>> find_nodes(2, world_size=6).count
        3
    """
    if world_size == 1:
        return Nodes(1, 1)
    if ranks_per_node is None:
        local = ranks_of_hosts[0] if len(set(ranks_of_hosts)) == 1 else None
        return Nodes(world_size, local if local is not None and world_size % local == 0 else world_size)
    if world_size % ranks_per_node:
        raise ConfigError(
            f"comm.ranks_per_node={ranks_per_node}: does not divide the {world_size} ranks of this run; nodes have "
            f"{divisors_text(world_size)} ranks (zeropp=all and zeropp=hpz begin with 2: set comm.ranks_per_node and "
            "zero.zero_hpz_partition_size)"
        )
    return Nodes(world_size, ranks_per_node)


def divisors_text(number: int) -> str:
    """For messages: ``1, 2, 3 or 6``."""
    return " or ".join(", ".join(str(i) for i in range(1, number + 1) if number % i == 0).rsplit(", ", 1))


def check_ranks(config: EngineConfig, world_size: int) -> None:
    """Refuse sizes that do not divide the ranks. A run of one rank takes any: it has nothing to divide."""
    find_nodes(config.comm.ranks_per_node, world_size)
    for name in ("zero_hpz_partition_size", "mics_shard_size"):
        size = getattr(config.zero, name)
        if world_size > 1 and size > 0 and world_size % size:
            raise ConfigError(
                f"zero.{name}={size}: does not divide the {world_size} ranks of this run, so they cannot be cut into "
                f"groups of {size}; {divisors_text(world_size)} would"
            )


def oddities(config: EngineConfig, nodes: Nodes, ranks_of_hosts: list[int | None]) -> list[str]:
    """What a user of ZeRO++ may not have meant by these groups, a line each."""
    zero, world_size, lines = config.zero, nodes.world_size, []
    name = "mics_shard_size" if zero.mics_shard_size > 0 else "zero_hpz_partition_size"
    size = getattr(zero, name)
    plusplus = size > 1 or zero.zero_quantized_gradients or zero.zero_quantized_weights
    if world_size == 1:
        return ["one rank: nothing travels, so ZeRO++'s settings do nothing in this run"] if plusplus else []
    if config.comm.ranks_per_node is None and len(set(ranks_of_hosts)) > 1:
        sizes = ", ".join(str(number) for number in sorted({number or 0 for number in ranks_of_hosts}))
        lines.append(
            f"machines have different numbers of ranks ({sizes}): all ranks count as one node, and nothing is said to "
            "travel between nodes; comm.ranks_per_node can name a number that divides all"
        )
    if size > 1 and nodes.count > 1 and nodes.per_node % size:
        lines.append(
            f"{name}={size} does not divide the {nodes.per_node} ranks of a node: some of its groups lie on two nodes, "
            "and gathers inside a group leave the node"
        )
    if nodes.count == 1 and plusplus:
        prime = all(world_size % size for size in range(2, world_size))
        each, which = ("1", "") if prime else ("R", f" for an R below {world_size} that divides it")
        lines.append(
            f"all {world_size} ranks are one node, between which ZeRO++ has nothing to save: start ranks on more "
            f"nodes, or pretend some, with comm.ranks_per_node={each} zero.zero_hpz_partition_size={each}{which}"
        )
    elif name == "zero_hpz_partition_size" and size == world_size:
        lines.append(f"{name}={size} is all ranks: the second partition is the first once more, and saves nothing")
    return lines


@dataclass(frozen=True)
class RankGroup:
    """Some ranks in the order of their numbers, this one at ``index``.

    ``handle`` is the backend's communicator; None: the one of all ranks, through which pairs of ranks find each other.
    """

    ranks: tuple[int, ...]
    index: int
    handle: dist.ProcessGroup | None

    @cached_property
    def size(self) -> int:
        """How many."""
        return len(self.ranks)

    @cached_property
    def peers(self) -> list[int]:
        """Places of the others. Each rank begins with its successor: no rank is everybody's first target."""
        return [(self.index + step) % self.size for step in range(1, self.size)]


def split_ranks(world_size: int, size: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """The groups *inside* runs of ``size`` consecutive ranks, and those *across* them. Pure integers.

    Example:
        >>> split_ranks(4, 2)
        ([(0, 1), (2, 3)], [(0, 2), (1, 3)])
    """
    inside = [tuple(range(first, first + size)) for first in range(0, world_size, size)]
    return inside, [tuple(range(first, world_size, size)) for first in range(size)]


def make_group(groups: Sequence[tuple[int, ...]], rank: int, with_handle: bool) -> RankGroup:
    """This rank's one of several groups. With a handle a collective of all ranks; made once in a process group.

    ``groups`` are all of them, the same on every rank, in the same order.
    """
    mine = next(group for group in groups if rank in group)
    handles = flight_recorder.observer().subgroups if with_handle else {}
    for group in groups if with_handle else ():
        # Every rank has made the same groups so far, so that all find one here or all make it.
        if group not in handles:
            # With the run's time-out: torch gives a new group its own default, whatever that of the whole world is.
            world = dist.group.WORLD
            timeout = world._get_backend(world._device_types[0]).options._timeout  # type: ignore[union-attr]
            with behind_closed_doors():
                handles[group] = dist.new_group(list(group), timeout=timeout)
    return RankGroup(mine, mine.index(rank), handles.get(mine))
