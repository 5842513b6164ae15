"""A step on a cluster, in words and numbers: how long, how much of it waiting for what, whether it fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepzero.planning import plan
from deepzero.planning.clusters import Cluster
from deepzero.planning.dry_run import DryRunResult
from deepzero.planning.event_simulator import SimulatedTimeline, play
from deepzero.utils.formatting import short_bytes, short_number, short_seconds


@dataclass(frozen=True)
class Simulated:
    """One rank's step on one cluster."""

    rehearsal: DryRunResult
    cluster: Cluster
    timeline: SimulatedTimeline
    tokens: int | None
    """Of a global batch."""

    @property
    def device_bytes(self) -> int:
        """The most that a rank's device holds at any time, activations included."""
        found = plan.memory(self.rehearsal)
        return sum(size for name, size in found.items() if not name.startswith("host_"))

    @property
    def host_bytes_per_node(self) -> int:
        """Host bytes of all ranks of a node together."""
        return self.rehearsal.host_bytes * self.rehearsal.nodes.per_node

    @property
    def fits(self) -> bool:
        """In the device's memory, and in the host's."""
        host = self.host_bytes_per_node <= self.cluster.host_bytes
        return host and self.device_bytes <= self.cluster.memory_bytes

    @property
    def exposed_share(self) -> float:
        """What part of the step the device waits (0 to 1)."""
        return self.timeline.exposed_seconds / self.timeline.seconds if self.timeline.seconds else 0.0

    @property
    def flops_utilization(self) -> float:
        """What part of the device's peak is reached, recomputation counted as work."""
        return sum(self.rehearsal.work.flops) / (self.timeline.seconds * self.cluster.flops)

    def as_dict(self) -> dict[str, Any]:
        """Returns the figures as plain numbers, for a JSON file."""
        line = self.timeline
        return {
            "cluster": self.cluster.name,
            "world_size": self.rehearsal.nodes.world_size,
            "step_seconds": line.seconds,
            "compute_seconds": line.compute_seconds,
            "network_seconds": line.network_seconds,
            "exposed_seconds": line.exposed_seconds,
            "exposed_by_kind": line.exposed_by_kind(),
            "tokens_per_second": self.tokens / line.seconds if self.tokens else None,
            "device_bytes": self.device_bytes,
            "host_bytes_per_node": self.host_bytes_per_node,
            "fits": self.fits,
        }

    def lines(self) -> list[str]:
        """Returns the result as lines for a terminal."""
        line, nodes = self.timeline, self.rehearsal.nodes
        speed = f", {short_number(self.tokens / line.seconds)} tokens/s" if self.tokens else ""
        room = "fits" if self.fits else "DOES NOT FIT"
        found = [
            f"{self.cluster.name}: {nodes.world_size} ranks, {nodes.count} node{'s' if nodes.count > 1 else ''} of "
            f"{nodes.per_node}",
            f"  step {short_seconds(line.seconds)}{speed}, {self.flops_utilization:.0%} of the peak; compute "
            f"{short_seconds(line.compute_seconds)}, network busy {short_seconds(line.network_seconds)}, waited for "
            f"{short_seconds(line.exposed_seconds)} ({self.exposed_share:.0%} of the step)",
        ]
        found += [
            f"    waits {short_seconds(waited):>10} for {kind}" for kind, waited in line.exposed_by_kind().items()
        ]
        found.append(f"  memory {short_bytes(self.device_bytes)} of {short_bytes(self.cluster.memory_bytes)}: {room}")
        if self.rehearsal.host_bytes:
            found[-1] += f"; host {short_bytes(self.host_bytes_per_node)} of {short_bytes(self.cluster.host_bytes)}"
        return found


def simulate(rehearsal: DryRunResult, cluster: Cluster, tokens: int | None = None) -> Simulated:
    """The rehearsed step on such a cluster."""
    return Simulated(rehearsal, cluster, play(rehearsal, cluster), tokens)
