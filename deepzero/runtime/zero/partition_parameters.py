"""Stage 3's parameters: where their bytes lie, whole or in parts. Nothing here knows in which order they are needed.

[Note: a partitioned parameter]
    A parameter of stage 3 has its home in an *interval* of the layout. Each rank keeps the W-th part of every interval
    for good (``shard_S``, all parts of a group end to end) and puts the whole interval together when one of its
    parameters is needed: one all-gather straight into a buffer, of which the parameters become views.

    ===============  ==============================================  ==============================================
    status           ``param.data``                                  memory on this rank
    ===============  ==============================================  ==============================================
    NOT_AVAILABLE    a placeholder: one element, stretched to the    numel / W
                     logical shape by strides of 0
    INFLIGHT         the placeholder still                           numel / W + numel
    AVAILABLE        a view of the interval's buffer                 numel / W + numel
    ===============  ==============================================  ==============================================

    ``param.shape`` is the logical shape in every state, and the *class* of the parameter tells whether its values are
    there: :class:`ZeroParameter` when they are, :class:`PartitionedParameter` when not. Torch calls
    ``PartitionedParameter.__torch_function__`` for whatever is done with such a parameter. Looking at shape, dtype or
    gradient is answered. A use of the values inside a forward or backward pass gathers them first: a parameter that is
    used outside its module is found in this way, without registration. Anything else raises and says what to do.
    (torch's own ``UninitializedParameter`` changes its class in the same way when it materializes.)

Sources: ``Init``, ``partition``, ``all_gather``, ``ZeroParamStatus`` and the ``ds_*`` names in DeepSpeed's
``partition_parameters.py``; P_os+g+p in the ZeRO paper, section 5.3.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from deepzero.comm.collectives import Communicator, Pending
from deepzero.layout import Interval, Slot
from deepzero.runtime.zero.buffer_pool import BufferPool
from deepzero.runtime.zero.metadata import METADATA, READS_WITHOUT_VALUES

_IDS = itertools.count()

write_through: Callable[[Any, Any, Any], Any] | None = None
"""Set while a model is constructed inside ``zero.Init``: called with every use of a partitioned parameter's values."""


class ZeroParamStatus(Enum):
    """What of a parameter is on this rank. See [Note: a partitioned parameter]."""

    NOT_AVAILABLE = 1
    """This rank's part. Leaves by ``launch``."""
    INFLIGHT = 2
    """This rank's part, and a buffer that is being filled. Leaves by ``wait``."""
    AVAILABLE = 3
    """This rank's part, and the whole. Leaves by ``release``."""


class PartitionedUseError(RuntimeError):
    """The values of a parameter were used, or written, while they were partitioned."""


class ParamRecord:
    """What ZeRO knows about one parameter."""

    def __init__(self, param: nn.Parameter, name: str) -> None:
        self.id = next(_IDS)
        self.name = name
        self.shape = param.shape
        self.numel = param.numel()
        self.stride = torch.empty(param.shape, device="meta").stride()
        self.home: PartitionedInterval | None = None
        self.slot: Slot | None = None
        self.placeholder: torch.Tensor | None = None
        """Kept: one element of the compute dtype, stretched to :attr:`shape`."""

    def placed(self) -> tuple[PartitionedInterval, Slot]:
        """The interval, and where in it."""
        if self.home is None or self.slot is None:
            raise RuntimeError(f"parameter {self.name!r} has no place in an interval yet")
        return self.home, self.slot


class ZeroParameter(nn.Parameter):
    """A parameter whose values are here. Its ``ds_*`` attributes are DeepSpeed's."""

    # As in nn.Parameter: nothing is intercepted.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _zero: ParamRecord

    @property
    def ds_id(self) -> int:
        """A number that no other parameter of this process has."""
        return self._zero.id

    @property
    def ds_numel(self) -> int:
        """Elements of the whole parameter."""
        return self._zero.numel

    @property
    def ds_shape(self) -> torch.Size:
        """Shape of the whole parameter."""
        return self._zero.shape

    @property
    def ds_tensor(self) -> torch.Tensor:
        """1-D: the elements of this parameter that this rank keeps; a view, possibly empty."""
        home, slot = self._zero.placed()
        return home.part_of(slot)

    @property
    def ds_status(self) -> ZeroParamStatus:
        """Whether the values are here."""
        return self._zero.placed()[0].status

    @property
    def ds_persist(self) -> bool:
        """Parameters below ``stage3_param_persistence_threshold`` are not partitioned, and have no such attribute."""
        return False


class PartitionedParameter(ZeroParameter):
    """A parameter whose values are not here. See [Note: a partitioned parameter]."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Answer questions about metadata; gather for a use of the values, or raise."""
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in READS_WITHOUT_VALUES and isinstance(args[0], PartitionedParameter):
            return _detached(args[0], func)
        name = getattr(func, "__name__", str(func))
        if write_through is not None:
            return write_through(func, args, kwargs)
        if func is torch.Tensor.copy_ and isinstance(args[0], PartitionedParameter):
            return _write_part(*args, **kwargs)
        if partitioned_in(kwargs.get("out")):
            raise PartitionedUseError(_advice(partitioned_in(kwargs["out"])[0]._zero, f"written (out= of {name})"))
        # torch.nn.init passes its tensor by name.
        demand(parameters_in((args, kwargs)), name, first=args[0] if args else kwargs.get("tensor"))
        # Parameters have become whole where they are; what was detached from them earlier is replaced.
        args, kwargs = pytree.tree_map_only(PartitionedParameter, _whole_of_alias, (args, kwargs))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Names the logical shape and what this rank holds."""
        record = self._zero
        home, slot = record.placed()
        return (
            f"Parameter containing:\npartitioned tensor(name={record.name!r}, shape={tuple(record.shape)}, "
            f"dtype={home.shard.dtype}, status={home.status.name}, "
            f"{home.part_of(slot).numel()} of {record.numel} elements here)"
        )

    def __deepcopy__(self, memo: Any) -> Any:
        raise PartitionedUseError(_advice(self._zero, "copied"))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise PartitionedUseError(_advice(self._zero, "pickled or saved"))


def _advice(record: ParamRecord, verb: str) -> str:
    return (
        f"parameter {record.name!r} of shape {tuple(record.shape)} is partitioned (zero stage 3): its values are not "
        f"on this rank, and it cannot be {verb} here. Use `with deepzero.zero.GatheredParameters(param):` to read it, "
        "the same with modifier_rank=0 to write it, engine.module_state_dict() for the whole model"
    )


def partitioned_in(value: Any) -> list[PartitionedParameter]:
    """All partitioned parameters inside nested arguments, each once."""
    return [param for param in parameters_in(value) if isinstance(param, PartitionedParameter)]


def parameters_in(value: Any) -> list[ZeroParameter]:
    """All of stage 3's parameters inside nested arguments, whole ones too, each once."""
    found: dict[int, ZeroParameter] = {}
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, ZeroParameter):
            found[id(item)] = item
        elif isinstance(item, (list, tuple)):
            stack.extend(item)
        elif isinstance(item, dict):
            stack.extend(item.values())
    return list(found.values())


def demand(params: Sequence[ZeroParameter], name: str, first: Any) -> None:
    """Called for a use of values by torch's function ``name``: gather all of them together, or raise.

    Args:
        params: those that the function is given; what is whole already must stay while the rest is fetched.
        name: the function.
        first: its first argument, which operations in place write to.

    Raises:
        PartitionedUseError: a write, or a use outside a pass.
    """
    written = [param for param in params if param is first and _writes(name)]
    if written:
        raise PartitionedUseError(_advice(written[0]._zero, f"written ({name})"))
    homes = {home.key: home for home in (param._zero.placed()[0] for param in params)}
    missing = next(param for param in params if isinstance(param, PartitionedParameter))
    for on_demand in {home.on_demand for home in homes.values()}:
        asked = [home for _, home in sorted(homes.items()) if home.on_demand == on_demand]
        if on_demand is None or not on_demand(asked, f"{name} of {missing._zero.name}"):
            raise PartitionedUseError(_advice(missing._zero, f"used ({name})"))


def _writes(name: str) -> bool:
    """Torch's convention for operations in place; and assignment to ``.data`` or to elements."""
    return (name.endswith("_") and not name.endswith("__")) or name in ("__set__", "__setitem__")


def _whole_of_alias(alias: PartitionedParameter) -> torch.Tensor:
    home, slot = alias._zero.placed()
    return home.value(slot)


def _detached(param: PartitionedParameter, func: Any) -> PartitionedParameter:
    """``param.detach()``, ``param.data``: a tensor of the logical shape that still knows it is partitioned."""
    with torch._C.DisableTorchFunctionSubclass():
        plain = func(param)
    alias: PartitionedParameter = torch.Tensor._make_subclass(PartitionedParameter, plain, False)
    alias._zero = param._zero
    return alias


@torch.no_grad()
def _write_part(target: Any, source: torch.Tensor, non_blocking: bool = False) -> Any:
    """``param.copy_(whole)``, as ``load_state_dict`` does it: every rank has the whole value and keeps its part."""
    if not isinstance(target, PartitionedParameter) or isinstance(source, PartitionedParameter):
        raise PartitionedUseError(f"cannot copy from a partitioned parameter: {source!r}")
    home, _ = target._zero.placed()
    values = source.detach().expand(target._zero.shape).reshape(-1)
    home.write(target, values)
    return target


def set_placeholder(param: ZeroParameter, dtype: torch.dtype, device: torch.device) -> None:
    """The parameter's values are not here any more; its shape is. NaN, should anybody read it in spite of all."""
    placeholder = param._zero.placeholder
    if placeholder is None or placeholder.dtype != dtype or placeholder.device != device:
        stub = torch.full((), torch.nan, device=device).to(dtype)
        placeholder = param._zero.placeholder = stub.expand(param._zero.shape)
    param.__class__ = ZeroParameter  # its setter of .data is not intercepted
    param.data = placeholder
    param.__class__ = PartitionedParameter


Demand = Callable[[list["PartitionedInterval"], str], bool]
"""Asked when values of partitioned parameters are used: gather their intervals and return True, or return False."""


class PartitionedInterval:
    """The unit of fetch and release: an interval of the layout, its part on this rank, its parameters.

    Args:
        key: the coordinator's number for it.
        interval: where it lies in the group.
        params: of the interval's slots, in order; each gets its record's home here.
        shard: 1-D, this rank's part, ``interval.part_numel`` elements, in the compute dtype.
        comm: the ranks.
        pool: where buffers come from.
    """

    def __init__(
        self,
        key: int,
        interval: Interval,
        params: Sequence[ZeroParameter],
        shard: torch.Tensor,
        comm: Communicator,
        pool: BufferPool,
    ) -> None:
        self.key, self.interval, self.params, self.shard = key, interval, list(params), shard
        self.comm, self.pool = comm, pool
        self.status = ZeroParamStatus.NOT_AVAILABLE
        self.generation = 0
        """Counts changes of the values: a backward pass through older ones is refused."""
        self.buffer: torch.Tensor | None = None
        self.pins = 0
        """Contexts that need the values here; meanwhile nobody else may release them."""
        self.only_pinned = False
        """Nobody but those contexts needs the values: the last one to end releases them."""
        self.on_demand: Demand | None = None
        self.on_write: Callable[[PartitionedInterval, ZeroParameter], None] | None = None
        self._pending: Pending | None = None
        self._whole: torch.Tensor | None = None
        self._versions: list[int] = []
        self._padding = (comm.world_size - 1) * (interval.part_numel - interval.true_numel_of(comm.rank))
        for param, slot in zip(self.params, interval.slots, strict=True):
            param._zero.home, param._zero.slot = self, slot

    @property
    def numel(self) -> int:
        """Elements of the whole, with padding."""
        return self.interval.numel

    @property
    def names(self) -> str:
        """For messages: the first parameters of the interval."""
        names = [param._zero.name for param in self.params]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    @property
    def whole(self) -> torch.Tensor:
        """1-D: the gathered interval; while INFLIGHT it belongs to the all-gather."""
        if self._whole is None:
            raise RuntimeError(f"interval {self.key} is {self.status.name}: its values are not here")
        return self._whole

    # ---- NOT_AVAILABLE → INFLIGHT → AVAILABLE → NOT_AVAILABLE --------------------------------------------------------

    @torch.no_grad()
    def launch(self, kind: str) -> None:
        """NOT_AVAILABLE → INFLIGHT: lay my part into a buffer and launch the all-gather of the others'."""
        if self.status is not ZeroParamStatus.NOT_AVAILABLE:
            raise RuntimeError(f"interval {self.key} is {self.status.name} and cannot be launched")
        self.buffer = self.pool.take(self.numel)
        self._whole = self.buffer[: self.numel]
        self.pool.owners[self.buffer.data_ptr()] = self
        parts = self._whole.split(self.interval.part_numel)
        parts[self.comm.rank].copy_(self.shard)
        self._pending = self.comm.all_gather(kind, parts, self._whole, self._padding, f"interval {self.key}")
        self.status = ZeroParamStatus.INFLIGHT

    @torch.no_grad()
    def wait(self) -> None:
        """INFLIGHT → AVAILABLE: the parameters become views of the buffer."""
        if self.status is not ZeroParamStatus.INFLIGHT or self._pending is None or self._whole is None:
            raise RuntimeError(f"interval {self.key} is {self.status.name}: there is nothing to wait for")
        self._pending.wait()
        self._pending = None
        first = self.interval.offset
        for param, slot in zip(self.params, self.interval.slots, strict=True):
            record = param._zero
            param.__class__ = ZeroParameter
            param.data = self._whole.as_strided(record.shape, record.stride, slot.offset - first)
        self.permit_writes()
        self.status = ZeroParamStatus.AVAILABLE

    def permit_writes(self) -> None:
        """What was written so far has been taken over."""
        self._versions = [param._version for param in self.params]

    def refuse_writes(self) -> None:
        """Raise when a parameter was written in place since it became available: its part would not follow."""
        for param, version in zip(self.params, self._versions, strict=True):
            if param._version != version:
                raise PartitionedUseError(
                    f"parameter {param._zero.name!r} was written while it was gathered for reading, and the write "
                    "would be lost; write inside `with deepzero.zero.GatheredParameters(param, modifier_rank=0):`"
                )

    @torch.no_grad()
    def release(self) -> None:
        """AVAILABLE → NOT_AVAILABLE: the parameters become placeholders, the buffer goes back to the pool."""
        if self.status is ZeroParamStatus.INFLIGHT:
            self.wait()  # a prefetch that nobody used
        if self.status is not ZeroParamStatus.AVAILABLE or self.buffer is None:
            raise RuntimeError(f"interval {self.key} is {self.status.name} and cannot be released")
        self.refuse_writes()
        for param in self.params:
            set_placeholder(param, self.shard.dtype, self.shard.device)
        buffer, self.buffer, self._whole = self.buffer, None, None
        del self.pool.owners[buffer.data_ptr()]
        self.status = ZeroParamStatus.NOT_AVAILABLE
        if self.comm.chaos.enabled and self.pool.is_alone(buffer):
            self.comm.chaos.poison(buffer)
        self.pool.give(buffer)

    # ---- reading and writing -----------------------------------------------------------------------------------------

    def value(self, slot: Slot) -> torch.Tensor:
        """The whole parameter, AVAILABLE only: a view of the buffer."""
        record = self.params[[s.index for s in self.interval.slots].index(slot.index)]._zero
        return self.whole.as_strided(record.shape, record.stride, slot.offset - self.interval.offset)

    def part_of(self, slot: Slot) -> torch.Tensor:
        """1-D: what this rank keeps of one parameter."""
        start, stop, first = self.range_of(slot)
        return self.shard[first : first + stop - start]

    def range_of(self, slot: Slot) -> tuple[int, int, int]:
        """(first, one past the last) element of the parameter that this rank keeps, and where they lie in the part."""
        mine = self.interval.part_start(self.comm.rank)
        lo, hi = max(slot.offset, mine), min(slot.end, mine + self.interval.part_numel)
        if lo >= hi:
            return 0, 0, 0
        return lo - slot.offset, hi - slot.offset, lo - mine

    @torch.no_grad()
    def write(self, param: ZeroParameter, values: torch.Tensor) -> None:
        """New values for one parameter, 1-D and whole, the same on every rank: this rank keeps its part."""
        home, slot = param._zero.placed()
        start, stop, first = home.range_of(slot)
        home.shard[first : first + stop - start].copy_(values[start:stop])
        home.generation += 1
        if home.on_write is not None:
            home.on_write(home, param)

    @torch.no_grad()
    def write_gathered(self, param: ZeroParameter, values: torch.Tensor) -> None:
        """The same for the buffer, if the interval is gathered or on its way; it is no write by the user."""
        if self.status is ZeroParamStatus.NOT_AVAILABLE:
            return
        if self._pending is not None:
            self._pending.wait()
        whole = self.value(param._zero.placed()[1])
        whole.copy_(values.view(whole.shape))
