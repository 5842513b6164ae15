"""Stage 3's parameters: where their bytes lie, whole or in parts. Nothing here knows in which order they are needed.

[Note: a partitioned parameter]
    A parameter of stage 3 has its home in a *bucket* of the layout. Each rank keeps the W-th part of every bucket
    for good (``shard_S``, all parts of a group end to end) and puts the whole bucket together when one of its
    parameters is needed: one all-gather straight into a buffer, of which the parameters become views.

    ===============  ==============================================  ==============================================
    status           ``param.data``                                  memory on this rank
    ===============  ==============================================  ==============================================
    NOT_AVAILABLE    a placeholder: one element, stretched to the    numel / W
                     logical shape by strides of 0
    INFLIGHT         the placeholder still                           numel / W + numel
    AVAILABLE        inside a module of the model, or for one        numel / W + numel
                     operation: a view of the bucket's buffer;
                     otherwise the placeholder
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
from contextlib import AbstractContextManager, ExitStack, nullcontext
from enum import Enum
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from deepzero.layout import ParamSlot
from deepzero.runtime.zero.guards import PartitionedUseError
from deepzero.runtime.zero.metadata_functions import METADATA, READS_WITHOUT_VALUES

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


class ParamStore(Protocol):
    """Where a parameter lies: what the parameter itself needs to know of its bucket (``partitioned_bucket.py``)."""

    number: int
    status: ZeroParamStatus
    shard: torch.Tensor
    on_demand: Any
    """Asked, with a list of buckets and a text, when values are used: a context that gathers them, or None."""

    def part_of(self, slot: ParamSlot) -> torch.Tensor:
        """1-D: what this rank keeps of one parameter."""

    def value(self, slot: ParamSlot) -> torch.Tensor:
        """The whole parameter, AVAILABLE only."""

    def write(self, param: ZeroParameter, values: torch.Tensor) -> None:
        """New values for one parameter."""


class ParamRecord:
    """What ZeRO knows about one parameter."""

    def __init__(self, param: nn.Parameter, name: str) -> None:
        self.id = next(_IDS)
        self.name = name
        self.shape = param.shape
        self.numel = param.numel()
        self.stride = torch.empty(param.shape, device="meta").stride()
        self.home: Any = None
        self.slot: ParamSlot | None = None
        self.placeholder: torch.Tensor | None = None
        """Kept: one element of the compute dtype, stretched to :attr:`shape`."""

    def placed(self) -> tuple[Any, ParamSlot]:
        """The bucket, and where in it."""
        if self.home is None or self.slot is None:
            raise RuntimeError(f"parameter {self.name!r} has no place in a bucket yet")
        return self.home, self.slot


class _DsAttributes:
    """DeepSpeed's names for what ZeRO knows about a parameter."""

    __slots__ = ()  # as nn.Parameter lies in memory, so that a parameter can change its class
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
        """1-D: the elements of this parameter that this rank keeps, or has to publish; a view, possibly empty."""
        home, slot = self._zero.placed()
        part: torch.Tensor = home.part_of(slot)
        return part

    @property
    def ds_status(self) -> ZeroParamStatus:
        """Whether the values are here."""
        status: ZeroParamStatus = self._zero.placed()[0].status
        return status

    @property
    def ds_persist(self) -> bool:
        """Whether the parameter is below ``stage3_param_persistence_threshold`` and stays whole."""
        return isinstance(self, PersistentParameter)


class PersistentParameter(_DsAttributes, nn.Parameter):
    """A parameter of stage 3 that stays whole on every rank: always AVAILABLE."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class ZeroParameter(_DsAttributes, nn.Parameter):
    """A parameter that is partitioned, whose values are here."""

    # As in nn.Parameter: nothing is intercepted.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


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
        with demand(parameters_in((args, kwargs)), name, first=args[0] if args else kwargs.get("tensor")):
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
    if record.home is not None and record.home.key < 0:  # a bucket of zero.Init's own
        return (
            f"parameter {record.name!r} of shape {tuple(record.shape)} is partitioned by zero.Init, and it cannot be "
            f"{verb} yet. Give the model to deepzero.initialize first, or use `with "
            "deepzero.zero.GatheredParameters(param):` to read it, the same with modifier_rank=0 to write it"
        )
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


def demand(params: Sequence[ZeroParameter], name: str, first: Any) -> ExitStack:
    """Called for a use of values by torch's function ``name``: gather all of them together, or raise.

    Args:
        params: those that the function is given; what is whole already must stay while the rest is fetched.
        name: the function.
        first: its first argument, which operations in place write to.

    Returns:
        A context: the values are there until it ends.

    Raises:
        PartitionedUseError: a write, or a use outside a pass.
    """
    written = [param for param in params if param is first and _writes(name)]
    if written:
        raise PartitionedUseError(_advice(written[0]._zero, f"written ({name})"))
    homes: dict[int, ParamStore] = {home.number: home for home in (param._zero.placed()[0] for param in params)}
    missing = next(param for param in params if isinstance(param, PartitionedParameter))
    with ExitStack() as uses:
        for on_demand in {home.on_demand for home in homes.values()}:
            asked = [home for _, home in sorted(homes.items()) if home.on_demand == on_demand]
            use = on_demand(asked, f"{name} of {missing._zero.name}") if on_demand is not None else None
            if use is None:
                raise PartitionedUseError(_advice(missing._zero, f"used ({name})"))
            uses.enter_context(use)
        return uses.pop_all()


def _writes(name: str) -> bool:
    """Torch's convention for operations in place; and assignment to ``.data`` or to elements."""
    return (name.endswith("_") and not name.endswith("__")) or name in ("__set__", "__setitem__")


def _whole_of_alias(alias: PartitionedParameter) -> torch.Tensor:
    home, slot = alias._zero.placed()
    with unseen():
        return home.value(slot)


_NOTHING = nullcontext()


def unseen() -> AbstractContextManager[Any]:
    """For operations of our own inside a model: selective checkpointing does not see them.

    It numbers the operations of a block, to find their results when the block runs again; what we fetch differs then.
    """
    if not (count := torch._C._len_torch_dispatch_stack()):  # as a rule; each hook of a module comes by
        return _NOTHING
    modes = (torch._C._get_dispatch_stack_at(place) for place in range(count))
    if any(isinstance(mode, (_CachingTorchDispatchMode, _CachedTorchDispatchMode)) for mode in modes):
        return _disable_current_modes()
    return _NOTHING


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
        with torch.inference_mode(False):  # kept beyond the pass that may be under way
            stub = torch.full((), torch.nan, device=device).to(dtype)
            placeholder = param._zero.placeholder = stub.expand(param._zero.shape)
    param.__class__ = ZeroParameter  # its setter of .data is not intercepted
    param.data = placeholder
    param.__class__ = PartitionedParameter
