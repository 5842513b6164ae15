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
from deepzero.runtime.zero.guards import PartitionedUseError
from deepzero.runtime.zero.module_hooks import register_external_parameter
from deepzero.runtime.zero.partition_parameters import (
    ZeroParameter,
    ZeroParamStatus,
)
from deepzero.runtime.zero.partitioned_bucket import PartitionedBucket, send_to_replicas
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
        self.buckets: list[PartitionedBucket] = [homes[number] for number in sorted(homes)]
        for param in self.partitioned if fwd_module is not None else ():
            register_external_parameter(fwd_module, param)  # type: ignore[arg-type]

    @torch.no_grad()
    def __enter__(self) -> None:
        if not self.enabled:
            return
        for bucket in self.buckets:
            bucket.refuse_away()
        for bucket in self.buckets:
            bucket.gather_refs += 1
            if bucket.status is ZeroParamStatus.NOT_AVAILABLE:
                bucket.launch(ON_REQUEST)
                bucket.release_when_unreferenced = True
        self._hidden = [bucket for bucket in self.buckets if not bucket.shown]
        for bucket in self.buckets:
            if bucket.status is ZeroParamStatus.INFLIGHT:
                bucket.wait()
            bucket.show()
            bucket.gather_exact(ON_REQUEST)

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
            for bucket in self.buckets:
                if complete:  # else a write that nobody has taken over is left for the release to refuse
                    bucket.snapshot_versions()
                bucket.gather_refs -= 1
                if bucket.gather_refs == 0 and bucket.release_when_unreferenced:
                    bucket.release_when_unreferenced = False
                    bucket.release() if complete else bucket.discard()
                elif bucket.gather_refs == 0:
                    if complete:
                        bucket.requantize(ON_REQUEST)
                    if bucket in self._hidden:
                        bucket.hide()

    def _refuse_other_writes(self) -> None:
        """A write that nobody has taken over: without ``modifier_rank``, or to a neighbour in the same bucket."""
        for bucket in self.buckets:
            bucket.refuse_writes()
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
            home.snapshot_version(param)
        if self.buckets:
            with self.buckets[0].comm.ledger.aside():
                send_to_replicas(self.buckets)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, NaN included."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
