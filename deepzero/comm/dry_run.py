"""A world that is not there: one rank of thousands, alone in one process, with tensors that have no memory.

A *rehearsal* (``deepzero/planning/``) runs the engine's own code on torch's ``meta`` device, where a tensor has a shape
and no values, while :func:`fake_process_group` lasts: this process then is, say, rank 17 of 1,024, every collective is
counted and none is started, and whatever ranks tell each other, all of them say the same. What the code then launches,
in which order and how large, is what it would launch there.

torch has a process group of its own that does nothing (``torch.testing._internal.distributed.fake_pg``). It would have
to be *the* process group, so that no run could be rehearsed in a process that is itself a rank of another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class FakeRank:
    """Who this process is taken to be."""

    rank: int
    world_size: int
    device_type: Literal["cpu", "cuda"]
    """What the meta device stands for: it decides what a buffer is kept for, and how gradients are summed."""
    ranks_of_host: int
    """Of the ranks that share a machine, for ``comm.ranks_per_node=null``."""

    @property
    def backend(self) -> str:
        """What would serve such a device."""
        return "nccl" if self.device_type == "cuda" else "gloo"


_current: FakeRank | None = None


def current() -> FakeRank | None:
    """Who this process is taken to be now; None: who it is."""
    return _current


@contextlib.contextmanager
def fake_process_group(who: FakeRank) -> Iterator[None]:
    """Inside, this process is ``who``.

    Raises:
        ValueError: a rank that such a world does not have.
    """
    global _current
    if not 0 <= who.rank < who.world_size:
        raise ValueError(f"rank {who.rank} of {who.world_size} ranks: they are numbered 0 to {who.world_size - 1}")
    before, _current = _current, who
    try:
        yield
    finally:
        _current = before


def real_device_type(device: torch.device) -> str:
    """``cpu`` or ``cuda``: the kind of a device, of the meta device in a rehearsal what it stands for."""
    if device.type == "meta" and _current is not None:
        return _current.device_type
    return device.type
