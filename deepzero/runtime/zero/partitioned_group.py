"""One group of partitioned parameters: ``shard_S``, ``master_S``, and the intervals over them (stage 3's step 0).

The counterpart of :class:`~deepzero.runtime.zero.flat_group.FlatGroup`, over the same layout: what is kept whole there
(``flat_P``) is here put together interval by interval, when it is needed. Masters, pieces and the order of elements in
a rank's share are the same in both.

Frozen parameters are partitioned too, in groups of their own that no optimizer sees.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from deepzero.comm.collectives import Communicator
from deepzero.config.parse import ConfigError
from deepzero.layout import FlatLayout, Interval, Piece
from deepzero.runtime.zero.buffer_pool import BufferPool
from deepzero.runtime.zero.flat_group import claim, disclaim, follow
from deepzero.runtime.zero.partition_parameters import (
    ParamRecord,
    PartitionedParameter,
    ZeroParameter,
    ZeroParamStatus,
    set_placeholder,
)
from deepzero.runtime.zero.partitioned_interval import PartitionedInterval

SETUP = "setup.gather"


class PartitionedGroup:
    """The tensors of one group whose parameters are partitioned.

    Args:
        names: the parameters' names, in the order of the layout.
        params: in the order of the layout. They become partitioned; those that ``zero.Init`` has cut are cut anew.
        layout: where each lies.
        dtype: compute dtype.
        comm: the ranks.
        pool: buffers of that dtype.
        first_key: the coordinator's number of the first interval.
        optimizer_group: index of the optimizer's param group, or None for frozen parameters, which have no masters.
    """

    def __init__(
        self,
        names: Sequence[str],
        params: Sequence[nn.Parameter],
        layout: FlatLayout,
        dtype: torch.dtype,
        comm: Communicator,
        pool: BufferPool,
        first_key: int,
        optimizer_group: int | None,
    ) -> None:
        self.names, self.layout, self.dtype = list(names), layout, dtype
        self.comm, self.device, self.optimizer_group = comm, comm.device, optimizer_group
        self.shard_S = torch.zeros(layout.shard_numel, dtype=dtype, device=comm.device)
        self.master_storage: torch.Tensor | None = None
        if dtype != torch.float32 and optimizer_group is not None:
            self.master_storage = torch.zeros(layout.shard_numel, dtype=torch.float32, device=comm.device)
        self.pieces = layout.pieces(comm.rank)
        self.masters = [self._master_of(piece) for piece in self.pieces] if optimizer_group is not None else []
        self._mine = {piece.slot.index: number for number, piece in enumerate(self.pieces)}
        self.params = [self._move_in(index, param) for index, param in enumerate(params)]
        self.intervals: list[PartitionedInterval] = []
        for interval in layout.intervals:
            inside = [self.params[slot.index] for slot in interval.slots]
            shard = self.shard_S[interval.shard_offset : interval.shard_offset + interval.part_numel]
            made = PartitionedInterval(first_key + interval.index, interval, inside, shard, comm, pool)
            made.on_write = self._accept_write
            self.intervals.append(made)
        self._index = {param: index for index, param in enumerate(self.params)}

    @property
    def parameter_storage(self) -> torch.Tensor:
        """What this rank keeps of the parameters: its share."""
        return self.shard_S

    def _master_of(self, piece: Piece) -> torch.Tensor:
        """A leaf that the optimizer may update; in fp32 the share is its own master."""
        storage = self.shard_S if self.master_storage is None else self.master_storage
        return storage[piece.shard_start : piece.shard_start + piece.numel].detach().requires_grad_()

    def master_of(self, interval: Interval) -> torch.Tensor:
        """The masters of this rank's part of ``interval``, padding included."""
        storage = self.shard_S if self.master_storage is None else self.master_storage
        return storage[interval.shard_offset : interval.shard_offset + interval.part_numel]

    @torch.no_grad()
    def _move_in(self, index: int, param: nn.Parameter) -> ZeroParameter:
        """Keep this rank's piece of one parameter in share and master. The rest is freed by its placeholder."""
        claim(param, self.names[index])
        values = self._whole_values(index, param)
        number = self._mine.get(index)
        if number is not None:
            piece = self.pieces[number]
            mine = values[piece.start : piece.start + piece.numel]
            self.shard_S[piece.shard_start : piece.shard_start + piece.numel].copy_(mine)
            if self.master_storage is not None:
                self.masters[number].copy_(mine)
        made = as_zero_parameter(param, self.names[index])
        made._zero.home = made._zero.slot = None
        set_placeholder(made, self.dtype, self.device)
        return made

    def _whole_values(self, index: int, param: nn.Parameter) -> torch.Tensor:
        """1-D and whole: rank 0's values, or what ``zero.Init`` has partitioned."""
        if isinstance(param, PartitionedParameter):
            home, slot = param._zero.placed()
            home.launch(SETUP)
            home.wait()
            values = home.value(slot).reshape(-1)
            home.release()
            return values
        if param.device != self.device:
            param.data = param.data.to(self.device)
        values = param.data.contiguous().reshape(-1)
        self.comm.broadcast("setup.broadcast", values)
        return values

    @torch.no_grad()
    def _accept_write(self, interval: PartitionedInterval, param: ZeroParameter) -> None:
        """The part of ``param`` is new: its master follows."""
        number = self._mine.get(self._index[param]) if self.master_storage is not None else None
        if number is None:
            return
        piece = self.pieces[number]
        follow(self.masters[number], self.shard_S[piece.shard_start : piece.shard_start + piece.numel])

    @torch.no_grad()
    def write(self, index: int, values: torch.Tensor) -> None:
        """New values for one parameter: this rank's piece of it, and of its master, which keeps all bits of them.

        Args:
            index: position in :attr:`params`.
            values: 1-D, whole, fp32, the same on every rank.
        """
        param, number = self.params[index], self._mine.get(index)
        home, _ = param._zero.placed()
        home.write(param, values)
        if number is not None:
            piece = self.pieces[number]
            self.masters[number].copy_(values[piece.start : piece.start + piece.numel])

    def take_over_writes(self) -> None:
        """Before a step: a write to a gathered parameter is refused; permitted ones have been taken over already."""
        for interval in self.intervals:
            if interval.status is ZeroParamStatus.AVAILABLE:
                interval.refuse_writes()

    @torch.no_grad()
    def publish(self) -> None:
        """Step 7: cast the masters into the share. Nothing is sent."""
        for interval in self.intervals:
            if self.master_storage is not None:
                interval.shard.copy_(self.master_of(interval.interval))
            interval.generation += 1

    @torch.no_grad()
    def release(self) -> None:
        """Let the parameters belong to nobody again: whole, plain parameters. A collective."""
        for interval in self.intervals:
            if interval.status is ZeroParamStatus.NOT_AVAILABLE:
                interval.launch(SETUP)
            if interval.status is ZeroParamStatus.INFLIGHT:
                interval.wait()
            for param in interval.params:
                disclaim(param)
                make_whole(param)
            interval.abandon()


@torch.no_grad()
def make_whole(param: ZeroParameter) -> None:
    """A plain parameter again, with its values. A collective, unless its interval is gathered."""
    home, slot = param._zero.placed()
    gathered = home.status is ZeroParamStatus.AVAILABLE
    if not gathered:
        home.launch(SETUP)
        home.wait()
    values = home.value(slot).clone()
    if not gathered:
        home.release()
    param.__class__ = ZeroParameter
    param.data = values
    del param._zero
    param.__class__ = nn.Parameter  # type: ignore[assignment]


def as_zero_parameter(param: nn.Parameter, name: str) -> ZeroParameter:
    """The same object, with a record.

    Raises:
        ConfigError: a subclass of Parameter whose behaviour would be lost.
    """
    if isinstance(param, ZeroParameter):
        param.__class__ = ZeroParameter
        param._zero.name = name
        return param
    if type(param) is not nn.Parameter:
        raise ConfigError(f"parameter {name!r} is a {type(param).__name__}; stage 3 partitions plain nn.Parameter only")
    record = ParamRecord(param, name)
    param.__class__ = ZeroParameter
    assigned: ZeroParameter = param  # type: ignore[assignment]
    assigned._zero = record
    return assigned
