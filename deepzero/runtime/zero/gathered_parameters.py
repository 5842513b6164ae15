"""``GatheredParameters``: partitioned parameters, whole for the time of a ``with``; to read, or to write.

Collective: every rank enters with the same parameters. Reading needs no more; a write is made on ``modifier_rank``,
whose values all ranks take over when the context ends, each keeping its part. Parameters that are whole anyway (stages
0-2, persistent ones) may be among them.

A write to a partitioned parameter without ``modifier_rank`` would vanish; it raises. One to a whole parameter stays, as
it does outside; it has to be the same on all ranks.

Source: ``GatheredParameters`` in DeepSpeed's ``partition_parameters.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from deepzero.comm import process_group
from deepzero.runtime.zero.module_hooks import register_external_parameter
from deepzero.runtime.zero.partition_parameters import (
    PartitionedUseError,
    ZeroParameter,
    ZeroParamStatus,
)
from deepzero.runtime.zero.partitioned_interval import PartitionedInterval, send_to_replicas
from deepzero.runtime.zero.partitioned_param_coordinator import ON_REQUEST, ON_REQUEST_BROADCAST


class GatheredParameters:
    """Gather on entry, partition on exit. May be nested.

    Args:
        params: one parameter, or any iterable of them; those that are not partitioned are allowed, and None (the bias
            of a layer without) is passed over.
        modifier_rank: the rank whose writes count; None for reading.
        fwd_module: register the parameters with this module, which will use them in its forward pass.
        enabled: False does nothing.

    Example (any stage, one rank)::

        with deepzero.zero.GatheredParameters(model.head.weight, modifier_rank=0):
            model.head.weight.zero_()
    """

    def __init__(
        self,
        params: nn.Parameter | Iterable[nn.Parameter | None] | None,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        self.enabled, self.modifier_rank = enabled, modifier_rank
        if not enabled:
            return
        if isinstance(params, nn.Module):
            raise TypeError("GatheredParameters takes parameters, got a module; pass module.parameters()")
        listed = [params] if params is None or isinstance(params, torch.Tensor) else list(params)
        for param in listed:
            if param is not None and not isinstance(param, nn.Parameter):
                raise TypeError(f"GatheredParameters takes parameters, got a {type(param).__name__}")
        self.params = list(dict.fromkeys(param for param in listed if param is not None))
        world = process_group.world_size()
        if modifier_rank is not None and not 0 <= modifier_rank < world:
            raise ValueError(f"modifier_rank={modifier_rank} is not one of the {world} ranks")
        self.partitioned = [param for param in self.params if isinstance(param, ZeroParameter)]
        homes = {home.number: home for home in (param._zero.placed()[0] for param in self.partitioned)}
        self.intervals: list[PartitionedInterval] = [homes[number] for number in sorted(homes)]
        for param in self.partitioned if fwd_module is not None else ():
            register_external_parameter(fwd_module, param)  # type: ignore[arg-type]

    @torch.no_grad()
    def __enter__(self) -> None:
        if not self.enabled:
            return
        for interval in self.intervals:
            interval.refuse_away()
        for interval in self.intervals:
            interval.pins += 1
            if interval.status is ZeroParamStatus.NOT_AVAILABLE:
                interval.launch(ON_REQUEST)
                interval.only_pinned = True
        self._hidden = [interval for interval in self.intervals if not interval.shown]
        for interval in self.intervals:
            if interval.status is ZeroParamStatus.INFLIGHT:
                interval.wait()
            interval.show()
            interval.refine(ON_REQUEST)

    @torch.no_grad()
    def __exit__(self, kind: Any, *_: object) -> None:
        if not self.enabled:
            return
        complete = False
        try:
            if kind is None:
                if self.modifier_rank is not None:
                    self._take_over(self.modifier_rank)
                self._refuse_other_writes()
                complete = True
        finally:
            for interval in self.intervals:
                if complete:  # else a write that nobody has taken over is left for the release to refuse
                    interval.permit_writes()
                interval.pins -= 1
                if interval.pins == 0 and interval.only_pinned:
                    interval.only_pinned = False
                    interval.release() if complete else interval.discard()
                elif interval.pins == 0:
                    if complete:
                        interval.coarsen(ON_REQUEST)
                    if interval in self._hidden:
                        interval.hide()

    def _refuse_other_writes(self) -> None:
        """A write that nobody has taken over: without ``modifier_rank``, or to a neighbour in the same interval."""
        for interval in self.intervals:
            interval.refuse_writes()
        for param in self.partitioned:
            home, slot = param._zero.placed()
            start, stop, _ = home.range_of(slot)
            mine = home.value(slot).reshape(-1)[start:stop]
            if not _same_bits(mine, home.part_of(slot).to(mine.device)):  # an offloaded part is in host memory
                raise PartitionedUseError(
                    f"parameter {param._zero.name!r} was written inside GatheredParameters without modifier_rank: the "
                    "write would be lost. Pass modifier_rank=0 (every rank enters, rank 0's values count)"
                )

    def _take_over(self, source: int) -> None:
        for param in self.params:
            if not isinstance(param, ZeroParameter):
                values = param.detach().clone()
                process_group.broadcast_tensor(values, source)
                param.copy_(values)  # in sight of the engine, which looks at the parameter's version
                continue
            home, slot = param._zero.placed()
            values = home.value(slot)
            if param.numel() and param.data_ptr() != values.data_ptr():
                values.copy_(param.data)  # ``param.data = …`` has put it elsewhere
                param.data = values
            home.comm.broadcast(ON_REQUEST_BROADCAST, values, source)
            home.write(param, values.reshape(-1))
            home.permit_write(param)
        if self.intervals:
            with self.intervals[0].comm.ledger.aside():
                send_to_replicas(self.intervals)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, NaN included."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
