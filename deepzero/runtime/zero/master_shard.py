"""The fp32 masters of one group's share, wherever they live: on the device, in host memory, or in the parameters."""

from __future__ import annotations

import torch

from deepzero.offload.arena import HostArena, Region
from deepzero.offload.offload_plan import OffloadPlan

HOST_MASTERS = "host_masters"


def master_regions(placement: OffloadPlan) -> list[Region]:
    """What the arena has to hold for one group's masters."""
    span = placement.host_masters
    return [Region(HOST_MASTERS, span.numel, torch.float32)] if span.numel else []


class MasterShard:
    """Separate fp32 masters over a rank's share.

    Args:
        placement: which of them there are, and where.
        arena: where those in host memory are; None where nothing is offloaded. The others have no memory before
            :meth:`allocate`.
    """

    def __init__(self, placement: OffloadPlan, arena: HostArena | None) -> None:
        self.placement = placement
        self.on_host: torch.Tensor | None = None
        if placement.host_masters.numel:
            if arena is None:
                raise RuntimeError("masters in host memory need an arena")
            self.on_host = arena.allocate(HOST_MASTERS, placement.host_masters.numel, torch.float32)
        self.on_device: torch.Tensor | None = None

    def allocate(self, device: torch.device) -> None:
        """Take the memory of those that are not offloaded."""
        if self.placement.device_masters.numel:
            self.on_device = torch.zeros(self.placement.device_masters.numel, dtype=torch.float32, device=device)

    def at(self, start: int, numel: int) -> torch.Tensor | None:
        """Masters of ``numel`` elements of the share from ``start`` on; None where the parameters are their own."""
        for span, storage in (
            (self.placement.host_masters, self.on_host),
            (self.placement.device_masters, self.on_device),
        ):
            if storage is not None and span.holds(start):
                return storage[start - span.start : start - span.start + numel]
        return None
