"""Stage 3's parameters: partitioned at construction (``zero.Init``), gathered for a while (``GatheredParameters``).

[Note: a partitioned parameter]
    A parameter of stage 3 lies in a *bucket* of the layout (``partitioned_bucket.py``). Each rank keeps the W-th part
    of every bucket for good, its shard (``shard_S``: all of them end to end), and puts the whole bucket together when
    one of its parameters is needed: one all-gather straight into a buffer, of which the parameters become views.

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

    ``param.shape`` is the logical shape in every state. ``param.ds_status`` is AVAILABLE only while the parameter shows
    its values, and its *class* says the same: :class:`ZeroParameter` while it is a view of them,
    :class:`PartitionedParameter` while it is a placeholder. Torch calls ``PartitionedParameter.__torch_function__`` for
    whatever is done with a placeholder. Shape, dtype and gradient may be read. A use of the values inside a forward or
    backward pass gathers them first, so a parameter may be used outside its module without being registered
    (``register_external_parameter`` lets it come earlier). Anything else raises and says what to do.

Sources: ``Init``, ``_partition_param``, ``GatheredParameters``, ``ZeroParamStatus`` and the ``ds_*`` names in
``partition_parameters.py`` of [DeepSpeed]; ``_all_gather_params`` in [stage-3 guide]; P_os+g+p in [ZeRO], section 5.3.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from deepzero.comm import process_group
from deepzero.comm.collectives import Communicator, process_communicator
from deepzero.config.deepspeed_json import load_block, load_zero_config
from deepzero.config.engine import EngineConfig
from deepzero.device import accelerator_of
from deepzero.layout import ParamSlot, plan_layout
from deepzero.runtime.zero import guards
from deepzero.runtime.zero.buffer_pool import BufferPool, references, return_freed_memory
from deepzero.runtime.zero.module_registry import register_external_parameter
from deepzero.runtime.zero.parameter_all_gather import (
    ON_REQUEST,
    ON_REQUEST_BROADCAST,
    PlainAllGather,
    send_to_replicas,
)
from deepzero.runtime.zero.partition_plan import is_real
from deepzero.runtime.zero.partitioned_bucket import INIT_KEY, PartitionedBucket, ZeroParamStatus
from deepzero.runtime.zero.stage_1_and_2 import SETUP, SETUP_BROADCAST
from deepzero.utils.dispatch import hide_from_checkpointing, outliving_pass
from deepzero.utils.errors import ConfigError, PartitionedUseError
from deepzero.utils.meta_device import materialize

if TYPE_CHECKING:
    from deepzero.runtime.zero.stage_1_and_2 import ParamGroup

log = logging.getLogger(__name__)
_warn_once = functools.cache(log.warning)

_IDS = itertools.count()

# ---- the parameter ---------------------------------------------------------------------------------------------------


class ParamRecord:
    """One parameter's identity, and the place of its values; ``param._record``."""

    def __init__(self, param: nn.Parameter, name: str) -> None:
        self.id, self.name = next(_IDS), name
        self.shape = param.shape
        self.numel = param.numel()
        # In a bucket elements lie in the order of the shape, whatever the parameter's own strides were.
        self.stride = torch.empty(param.shape, device="meta").stride()
        # A partitioned parameter lies in a bucket, at a slot. A persistent one that is trained: in a group, at a slot.
        self.bucket: PartitionedBucket | None = None
        self.slot: ParamSlot | None = None
        self.group: ParamGroup | None = None
        # One element of the compute dtype, stretched to ``shape``; made once, as a bucket is released often.
        self.placeholder: Tensor | None = None
        # What keeps it gathered between ``param.all_gather()`` and ``param.partition()``.
        self.open_gather: GatheredParameters | None = None

    def placed(self) -> tuple[PartitionedBucket, ParamSlot]:
        """The bucket, and where in it."""
        if self.bucket is None or self.slot is None:
            raise RuntimeError(f"parameter {self.name!r} has no place in a bucket yet")
        return self.bucket, self.slot


class ZeroParameter(nn.Parameter):
    """A partitioned parameter that shows its values, a view of its bucket; with DeepSpeed's attributes."""

    # As in nn.Parameter: nothing is intercepted.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _record: ParamRecord
    # Whether the parameter has at most ``stage3_param_persistence_threshold`` elements: it stays whole.
    ds_persist = False

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """What parametrize does, to set a parameter to itself, is no write."""
        return self if args and args[0] is self else super().set_(*args, **kwargs)

    ds_id = property(attrgetter("_record.id"), doc="A number that no other parameter of this process has.")
    ds_numel = property(attrgetter("_record.numel"), doc="Elements of the whole parameter.")
    ds_shape = property(attrgetter("_record.shape"), doc="Shape of the whole parameter.")

    @property
    def ds_tensor(self) -> Tensor:
        """1-D: this rank's elements of the parameter, those which its optimizer updates; a view, possibly empty."""
        bucket, slot = self._record.placed()
        return bucket.fragment_of(slot)

    @property
    def ds_status(self) -> ZeroParamStatus:
        """AVAILABLE while the parameter shows its values; its bucket may be gathered earlier, and stay so longer."""
        bucket = self._record.placed()[0]
        hidden = bucket.status is ZeroParamStatus.AVAILABLE and not bucket.shown
        return ZeroParamStatus.NOT_AVAILABLE if hidden else bucket.status

    def show(self, values: Tensor) -> None:
        """Become ``values``, a view of the gathered bucket."""
        self.__class__ = ZeroParameter  # its setter of .data is not intercepted
        self.data = values

    def hide(self, dtype: torch.dtype, device: torch.device) -> None:
        """Become a placeholder: the shape without the values, and NaN, should anything read it in spite of all."""
        # No view of the buffer may stay, or the pool could not use it again: ``show`` replaces the view.
        placeholder = self._record.placeholder
        if placeholder is None or placeholder.dtype != dtype or placeholder.device != device:
            with torch.inference_mode(False):  # kept beyond the pass that may be under way
                stub = torch.full((), torch.nan, device=device).to(dtype)
                placeholder = self._record.placeholder = stub.expand(self._record.shape)
        self.show(placeholder)
        self.__class__ = PartitionedParameter

    def __deepcopy__(self, memo: Any) -> Any:
        bucket = self._record.bucket  # None: persistent
        if bucket is not None and bucket.key == INIT_KEY and (Init.entered or isinstance(self, PartitionedParameter)):
            init = Init.entered[0] if Init.entered else Init(remote_device="cpu" if bucket.shard.is_cpu else None)
            return memo.setdefault(id(self), init._copy(self))  # cut as well
        if isinstance(self, PartitionedParameter):  # a copy would be a placeholder that belongs to no bucket
            raise guards.use_error(self._record, "copied")
        return memo.setdefault(id(self), nn.Parameter(self.data.clone(), self.requires_grad))

    def __reduce_ex__(self, protocol: Any) -> Any:  # pickled, saved or copied it is the engine's no more
        return nn.Parameter(self.data.clone(), self.requires_grad).__reduce_ex__(protocol)


class PersistentParameter(nn.Parameter):
    """A parameter of stage 3 that stays whole on every rank: always AVAILABLE."""

    # A class beside ZeroParameter, not below it: to the hooks and the coordinator only that one means "partitioned".
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _record: ParamRecord
    ds_persist, ds_status = True, ZeroParamStatus.AVAILABLE
    ds_id, ds_numel, ds_shape = ZeroParameter.ds_id, ZeroParameter.ds_numel, ZeroParameter.ds_shape
    __deepcopy__, __reduce_ex__ = ZeroParameter.__deepcopy__, ZeroParameter.__reduce_ex__

    @property
    def ds_tensor(self) -> Tensor:
        """1-D: what this rank's optimizer updates of the parameter; all of an untrained one."""
        group, slot = self._record.group, self._record.slot
        if group is None or slot is None:
            return self.detach().reshape(-1)
        mine = group.fragment_and_master(slot.index)
        return group.param_fragment(mine[0]) if mine is not None else group.flat_P[:0]


class PartitionedParameter(ZeroParameter):
    """A partitioned parameter that shows a placeholder. See [Note: a partitioned parameter]."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Answer questions about metadata; gather for a use of the values, or raise."""
        kwargs = kwargs or {}
        # What is not listed counts as a use of the values: also functions that torch will add.
        if func in guards.METADATA or (func in guards.FILLS and not partitioned_in((args[1:], dict(kwargs, input=0)))):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in guards.READS_WITHOUT_VALUES and isinstance(args[0], PartitionedParameter):
            return _detached(args[0], func)
        if func in (torch.autograd.backward, torch.autograd.grad):
            return _differentiate(func, args, kwargs)
        if func in guards.MOVES and guards.changes_nothing(func, *args, **kwargs):
            return args[0]
        name = getattr(func, "__name__", str(func))
        # A constructor inside zero.Init may do anything with parameters that the context has cut.
        if Init.entered and any(p._record.placed()[0].key == INIT_KEY for p in parameters_in((args, kwargs))):
            return Init.entered[0]._write_through(func, args, kwargs)
        if func is Tensor.copy_ and isinstance(args[0], PartitionedParameter):
            return _copy_into_shard(*args, **kwargs)
        # A result written into a parameter would be this rank's alone.
        if partitioned_in(kwargs.get("out")):
            raise guards.use_error(partitioned_in(kwargs["out"])[0]._record, f"written (out= of {name})")
        first = args[0] if args else kwargs.get("tensor")  # torch.nn.init passes it by name
        with gather_on_use(parameters_in((args, kwargs)), name, first):
            # The parameters show their values now. Tensors detached from them earlier do not, and are replaced.
            value_of = lambda alias: alias._record.placed()[0].value(alias)
            with hide_from_checkpointing():
                args, kwargs = pytree.tree_map_only(PartitionedParameter, value_of, (args, kwargs))
            return func(*args, **kwargs)

    def before_collective(self) -> None:
        """See ``process_group.py``: torch is about to take the memory of what is shown."""
        raise guards.use_error(self._record, "sent or received by a collective of the program's")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Names the logical shape and what this rank holds."""
        record = self._record
        bucket, slot = record.placed()
        return (
            f"Parameter containing:\npartitioned tensor(name={record.name!r}, shape={tuple(record.shape)}, "
            f"dtype={bucket.shard.dtype}, status={bucket.status.name}, "
            f"{bucket.fragment_of(slot).numel()} of {record.numel} elements here)"
        )

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """A write like others, though torch tells no subclass of this one."""
        return self if args and args[0] is self else self.__torch_function__(Tensor.set_, (), (self, *args), kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise guards.use_error(self._record, "pickled or saved")


def as_zero_parameter(param: nn.Parameter, name: str) -> ZeroParameter:
    """The same object, with a record. A subclass of Parameter, whose behaviour would be lost, raises a ConfigError."""
    if isinstance(param, ZeroParameter):
        param._record.name = name
        return param
    # Its class is what changes with its state, so it must not be one that carries behaviour (bitsandbytes, torchao).
    if type(param) is not nn.Parameter:
        raise ConfigError(f"parameter {name!r} is a {type(param).__name__}; stage 3 partitions plain nn.Parameter only")
    guards.notice_scripted_calls(partitioned_in)
    param.__class__ = ZeroParameter
    assigned: ZeroParameter = param  # type: ignore[assignment]
    assigned._record = ParamRecord(param, name)
    return assigned


@outliving_pass()
def _all_gather_params(buckets: Sequence[PartitionedBucket], kind: str = SETUP) -> None:
    """Gather the very values of ``buckets``, outside of passes: launch all, then wait. A collective.

    In passes ``PartitionedParameterCoordinator.fetch_sub_module`` does (DeepSpeed's ``__all_gather_params`` there).
    """
    for bucket in buckets:
        if bucket.status is ZeroParamStatus.NOT_AVAILABLE:
            bucket.launch(kind)
    for bucket in buckets:
        # A bucket that the coordinator has prefetched is on its way already.
        if bucket.status is ZeroParamStatus.INFLIGHT:
            bucket.wait()


@outliving_pass()
def unpartition(param: ZeroParameter) -> None:
    """A plain parameter again, with its values. A collective, unless its bucket is gathered."""
    bucket, _ = param._record.placed()
    gathered = bucket.status is ZeroParamStatus.AVAILABLE
    _all_gather_params([bucket])
    # A copy, as the buffer goes back to the pool, or to the next parameter of the bucket.
    values = bucket.value(param).clone()
    if not gathered:
        bucket.release()
    param.show(values)
    del param._record
    param.__class__ = nn.Parameter  # type: ignore[assignment]


# ---- a use of partitioned values -------------------------------------------------------------------------------------


def parameters_in(value: Any) -> list[ZeroParameter]:
    """All partitioned parameters inside nested arguments, whether they show their values or not, each once."""
    # By hand: torch's pytree takes twice as long, and every use on demand passes here.
    found: dict[int, ZeroParameter] = {}
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, ZeroParameter):
            found[id(item)] = item
        elif isinstance(item, (list, tuple, dict)):
            stack.extend(item.values() if isinstance(item, dict) else item)
    return list(found.values())


def partitioned_in(value: Any) -> list[PartitionedParameter]:
    """Those of :func:`parameters_in` that are placeholders now."""
    return [param for param in parameters_in(value) if isinstance(param, PartitionedParameter)]


def gather_on_use(params: Sequence[ZeroParameter], name: str, first: Any) -> ExitStack:
    """A context in which the values of ``params`` are there, for a use of them by torch's function ``name``.

    ``first`` is the function's first argument, which operations in place write to. All are gathered together: what is
    whole already must stay while the rest is fetched.

    Raises:
        PartitionedUseError: a write, or a use outside a pass.
    """
    if (guards.writes_in_place(name) or name == "__setitem__") and any(param is first for param in params):
        raise guards.use_error(first._record, f"written ({name})")
    buckets = buckets_of(params)
    missing = next(param for param in params if isinstance(param, PartitionedParameter))
    with ExitStack() as uses:
        # Entered together: fetching one bucket must not release another that the same operation reads.
        # One call for the buckets of each engine, in the order that is the same on all ranks.
        for hooks in dict.fromkeys(bucket.hooks for bucket in buckets):
            asked = [bucket for bucket in buckets if bucket.hooks is hooks]
            use = hooks.fetch_on_demand(asked, f"{name} of {missing._record.name}") if hooks is not None else None
            if use is None:
                raise guards.use_error(missing._record, f"used ({name})")
            uses.enter_context(use)
        return uses.pop_all()


def buckets_of(params: Iterable[Tensor]) -> list[PartitionedBucket]:
    """The buckets of those that are partitioned, each once, in the order that is the same on all ranks."""
    partitioned = (param for param in params if isinstance(param, ZeroParameter))
    return sorted({param._record.placed()[0] for param in partitioned}, key=attrgetter("number"))


def _differentiate(func: Any, args: Any, kwargs: Any) -> Any:
    """``backward(inputs=…)`` and ``autograd.grad``: parameters say where gradients arrive; no values are read."""
    zeros = kwargs.pop("materialize_grads", False)  # made below, as torch cannot make zeros of a gradient edge
    with torch._C.DisableTorchFunctionSubclass():  # not around the pass, whose own uses are to be noticed
        edge_of = torch.autograd.graph.get_gradient_edge
        edges, kwargs = pytree.tree_map_only(PartitionedParameter, edge_of, (args, kwargs))
    grads = func(*edges, **kwargs)
    if not zeros:
        return grads
    with torch._C.DisableTorchFunctionSubclass():
        return tuple(torch.zeros_like(p) if g is None else g for g, p in zip(grads, args[1], strict=True))


def _detached(param: PartitionedParameter, func: Any) -> PartitionedParameter:
    """``param.detach()``, ``param.data``: a tensor of the logical shape, which is partitioned as well."""
    with torch._C.DisableTorchFunctionSubclass():
        plain = func(param)
    alias: PartitionedParameter = Tensor._make_subclass(PartitionedParameter, plain, False)
    alias._record = param._record
    return alias


@torch.no_grad()
def _copy_into_shard(target: Any, source: Tensor, non_blocking: bool = False) -> Any:
    """``param.copy_(whole)``, as ``load_state_dict`` does it: every rank has the whole value and keeps its fragment."""
    if isinstance(source, PartitionedParameter):
        raise PartitionedUseError(f"cannot copy from a partitioned parameter: {source!r}")
    # Nothing is sent: a state_dict that is loaded is the same on all ranks.
    target._record.placed()[0].write(target, source.detach().expand(target._record.shape).reshape(-1))
    return target


# ---- zero.Init -------------------------------------------------------------------------------------------------------
# Inside the context the constructor of every module class is wrapped: when a module is complete, its own parameters are
# cut at once, and the rest is freed, so that at most one module's parameters are whole. Every rank runs the same
# constructors with the same seed; rank 0's values count. Later constructors write to parameters that are partitioned
# already (``init.normal_(self.child.weight)``, Hugging Face's ``post_init``): such a write gathers the parameter, runs,
# and partitions it again. So the initial values are those of the unpartitioned model with the same seed, bit for bit.
# Until ``initialize`` has the optimizer's groups and bucket sizes, each parameter is a bucket by itself.
# DeepSpeed wraps constructors in the same way: ``InsertPostInitMethodToModuleSubClasses``.

TRIM_BYTES = 64 << 20
"""Freed parameters, between two calls of :func:`return_freed_memory`."""

_TO_EMPTY = nn.Module.to_empty


class Init:
    """Partition every parameter as soon as the module that owns it is constructed.

    Args:
        module: an existing model to partition, at once; then there is no need for ``with``. Parameters on ``meta`` are
            given values by ``reset_parameters``.
        remote_device: ``"cpu"`` keeps the shards in host memory until ``initialize``; None on the rank's device.
        pin_memory: with ``remote_device="cpu"``, in page-locked memory, where there is CUDA.
        config: a DeepSpeed config; it must ask for stage 3.
        enabled: False does nothing.
        dtype: make parameters in this dtype. None keeps the constructor's: fp32 values become the fp32 masters,
            whatever the precision of training, and so the bits are those of a model built without ``Init``.

    Raises:
        ConfigError: settings that cannot be used.

    Example:
        >>> with Init(dtype=torch.bfloat16):
        ...     layer = nn.Linear(8, 8)
        >>> layer.weight.shape, layer.weight.ds_numel, layer.weight.ds_status.name
        (torch.Size([8, 8]), 64, 'NOT_AVAILABLE')
    """

    entered: ClassVar[list[Init]] = []
    """The contexts entered and not left, the innermost last; of the process, as the constructors that they wrap are."""
    communicator: ClassVar[Communicator | None] = None
    """A dry run's, while it builds a model."""

    def __init__(
        self,
        module: nn.Module | None = None,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config: EngineConfig | Mapping[str, Any] | str | Path | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.enabled, self.dtype = enabled, dtype
        if not enabled:
            return
        if remote_device not in (None, "none", "cpu"):
            raise ConfigError(f'zero.Init: remote_device={remote_device!r} is not implemented; "cpu" and None are')
        if dtype is not None and not dtype.is_floating_point:
            raise ConfigError(f"zero.Init: dtype={dtype} is not a floating-point dtype")
        if config is not None and (stage := load_zero_config(config).stage) != 3:
            raise ConfigError(
                "zero.Init partitions parameters, which is stage 3, and the config says zero_optimization.stage="
                f"{stage}; set it to 3, or pass enabled=False"
            )
        self.comm = self.communicator or process_communicator(load_block(config or {}, "comm"))
        self._shard_device = torch.device("cpu") if remote_device == "cpu" else self.comm.device
        self._pin = pin_memory and remote_device == "cpu" and accelerator_of(self.comm.device).has_streams
        if pin_memory and not accelerator_of(self.comm.device).has_streams and self.comm.rank == 0:
            _warn_once("zero.Init: pin_memory=True does nothing without a GPU: its memory is ordinary (said once)")
        self._pools: dict[torch.dtype, BufferPool] = {}
        self._freed_bytes = 0
        # Constructors as they were, and the ids of modules that are inside of one.
        self._wrapped: list[tuple[type[nn.Module], Callable[..., None]]] = []
        self._under_construction: set[int] = set()
        # In the outermost context: what writes have made whole, and how many references to each bucket are our own.
        self._open: dict[GatheredParameters, list[int]] = {}
        if module is not None:
            materialize(module, self.comm.device, self._partition_own)
            for inside in module.modules():
                self._partition_own(inside)

    def __enter__(self) -> Init:
        if not self.enabled:
            return self
        self._default_dtype = torch.get_default_dtype()
        if self.dtype is not None:
            torch.set_default_dtype(self.dtype)
        # A context inside a context adds its dtype alone; classes are wrapped once.
        if not self.entered:
            for cls in _subclasses(nn.Module):
                self._wrap(cls)
            # A module class that is defined inside the context is wrapped like the others.
            hook: Any = classmethod(functools.partial(_new_subclass, self))
            nn.Module.__init_subclass__ = hook  # type: ignore[method-assign]
            nn.Module.to_empty = _to_empty  # type: ignore[assignment, method-assign]
        self.entered.append(self)
        return self

    def __exit__(self, error_type: Any, *_: object) -> None:
        if not self.enabled:
            return
        self.entered.pop()
        torch.set_default_dtype(self._default_dtype)
        if not self.entered:
            del nn.Module.__init_subclass__
            nn.Module.to_empty = _TO_EMPTY  # type: ignore[method-assign]
            for cls, original in reversed(self._wrapped):
                cls.__init__ = original
            self._wrapped = []
            self._under_construction.clear()
            try:
                # The others may not have had this rank's exception, and would not take part in a broadcast.
                if error_type is None:
                    self._partition_again(only_unviewed=False)
            finally:
                while self._open:  # what a write made whole is forgotten; the shards stay as they were
                    self._open.popitem()[0].release(error_type or RuntimeError)

    def _wrap(self, cls: type[nn.Module]) -> None:
        """Let the class's constructor end with a partitioning, if it has one of its own."""
        if (original := cls.__dict__.get("__init__")) is None or cls.__module__.startswith("torch.jit"):
            return

        @functools.wraps(original)
        def construct(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            # Constructors call those of their base classes: the module is complete when the outermost one returns.
            outermost = id(module) not in self._under_construction
            self._under_construction.add(id(module))
            try:
                original(module, *args, **kwargs)
            finally:
                if outermost:
                    self._under_construction.discard(id(module))
            if outermost and self.entered:
                self.entered[0]._partition_again(only_unviewed=True)
                self.entered[-1]._partition_own(module)

        self._wrapped.append((cls, original))
        cls.__init__ = construct  # type: ignore[assignment, method-assign]

    def _partition_own(self, module: nn.Module) -> None:
        """Cut a module's own parameters, not those of modules inside it."""
        for name, param in module._parameters.items():
            if param is not None and _can_be_partitioned(param):
                self._partition_param(param, f"{type(module).__name__}.{name}", self.dtype or param.dtype)

    @torch.no_grad()
    def _partition_param(self, param: nn.Parameter, name: str, dtype: torch.dtype) -> ZeroParameter:
        """Cut one parameter for ``Init``, in ``dtype``; the engine's own cut is ``stage_1_and_2.py:ParamGroup``."""
        comm, zero_param = self.comm, as_zero_parameter(param, name)
        # Rank 0's values count: constructors may draw random numbers that are not seeded alike.
        values = param.data.to(comm.device, dtype).contiguous().reshape(-1)
        comm.broadcast(SETUP_BROADCAST, values)
        in_layout = plan_layout([values.numel()], comm.world_size, values.numel()).buckets[0]
        pool = self._pools.setdefault(values.dtype, BufferPool(values.dtype, comm.device))
        shard = torch.zeros(in_layout.shard_numel, dtype=values.dtype, device=self._shard_device, pin_memory=self._pin)
        strategy = PlainAllGather(in_layout, values.dtype, comm, name)
        bucket = PartitionedBucket(INIT_KEY, in_layout, [zero_param], shard, strategy, pool)
        bucket.write(zero_param, values)  # this rank's elements of them; the rest is freed
        self._freed_bytes += values.nbytes
        del values
        zero_param.hide(shard.dtype, comm.device)
        if self._freed_bytes >= TRIM_BYTES:
            self._freed_bytes = 0
            return_freed_memory()
        return zero_param

    # ---- writes inside the context -----------------------------------------------------------------------------------

    @torch.no_grad()
    def _write_through(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Read and write partitioned parameters: gather, run, take rank 0's values, cut again.

        When the result is a view of the parameter (``init.zeros_(weight[padding_idx])``), it may be written later: then
        the parameter stays whole until the view is gone. When the operation raises, nothing is taken over.
        """
        # First cut what earlier writes have left whole, so that at most one operation's parameters are whole.
        self._partition_again(only_unviewed=True)
        params = partitioned_in((args, kwargs))
        # The parameters themselves: ``params`` may be aliases of them.
        records = {param._record for param in params}
        themselves = [p for bucket in buckets_of(params) for p in bucket.params if p._record in records]
        context = GatheredParameters(themselves, modifier_rank=0)
        context.kinds = SETUP, SETUP_BROADCAST
        context.gather()
        # The references that are ours: any more are views, through which a later line of the constructor may write.
        counts = [references(bucket.gathered) for bucket in context.buckets]
        try:
            result = _with_views(func, args, kwargs, params)
        except BaseException as error:
            # Now, as the traceback holds views: they would pass for views through which the program may write.
            context.release(type(error))
            raise
        self._open[context] = counts
        self._partition_again(only_unviewed=True)
        return result

    def _copy(self, param: ZeroParameter) -> Tensor:
        """What ``copy.deepcopy`` makes of a parameter: one that is cut as well; of its ``.data`` a plain tensor."""
        values = self._write_through(torch.clone, (param,), {})
        if all(param is not one for one in param._record.placed()[0].params):
            return values
        return self._partition_param(nn.Parameter(values, param.requires_grad), param._record.name, values.dtype)

    def _partition_again(self, only_unviewed: bool) -> None:
        """Partition what a write made whole; with ``only_unviewed``, where no view of it is held any more."""
        for context, counts in list(self._open.items()):
            held = (references(bucket.gathered) > own for bucket, own in zip(context.buckets, counts, strict=True))
            if not (only_unviewed and any(held)):
                del self._open[context]
                context.release(None)


def _can_be_partitioned(param: nn.Parameter) -> bool:
    """Whether ``param`` has memory, elements that can be cast, and was not cut with another of its modules before."""
    # A lazy parameter has no shape yet. One on ``meta`` gets its values by ``to_empty`` or :func:`materialize`.
    has_values = not (isinstance(param, ZeroParameter) or nn.parameter.is_lazy(param) or param.is_meta)
    return has_values and is_real(param) and param.numel() > 0


def _with_views(func: Any, args: Any, kwargs: Any, params: list[PartitionedParameter]) -> Any:
    """Call ``func`` with views in place of gathered parameters; ``set_`` and ``t_`` change the parameter itself."""
    replaced = partitioned_in(params) if guards.writes_in_place(getattr(func, "__name__", "")) else params
    views = {id(param): param._record.placed()[0].value(param) for param in replaced}
    new_args, new_kwargs = pytree.tree_map_only(Tensor, lambda t: views.get(id(t), t), (args, kwargs))
    result = func(*new_args, **new_kwargs)
    returned = [given for given in pytree.tree_leaves((args, kwargs)) if views.get(id(given)) is result]
    views.clear()
    del new_args, new_kwargs
    return returned[0] if returned else result  # an operation in place returns what it was given


def _subclasses(cls: type[nn.Module]) -> set[type[nn.Module]]:
    """All that exist, each once."""
    return set().union(*({child} | _subclasses(child) for child in cls.__subclasses__()))


@functools.wraps(_TO_EMPTY)
def _to_empty(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """A module from ``meta`` gets memory (``torch.nn.utils.skip_init``): it is cut like one that was constructed."""
    made = _TO_EMPTY(module, *args, **kwargs)
    for inside in made.modules():
        Init.entered[-1]._partition_own(inside)
    return made


def _new_subclass(context: Init, cls: type[nn.Module], **kwargs: Any) -> None:
    super(nn.Module, cls).__init_subclass__(**kwargs)
    context._wrap(cls)


# ---- GatheredParameters ----------------------------------------------------------------------------------------------


class GatheredParameters:
    """Partitioned parameters, whole for the time of a ``with``, to read or to write. A collective; may be nested.

    Every rank enters with the same parameters. A write is made on ``modifier_rank``, whose values all ranks take over
    when the context ends, each keeping its shard. A write to a partitioned parameter without ``modifier_rank`` would
    vanish; it raises. Parameters that are whole anyway (stages 0-2, persistent ones) may be among them; a write to one
    stays, as it does outside, and has to be the same on all ranks. A step or a load inside shows its new values.
    What is computed inside may run backward outside, but not with ``modifier_rank``, whose end counts as a write.

    Args:
        params: one parameter, or any iterable of them; None (the bias of a layer without) is passed over.
        modifier_rank: the rank whose writes count; None for reading.
        fwd_module: register the parameters with this module, which will use them in its forward pass.
        enabled: False does nothing.

    Example (any stage, one rank)::

        with deepzero.zero.GatheredParameters(model.head.weight, modifier_rank=0):
            model.head.weight.zero_()
    """

    # The ledger's names for what is gathered, and for what ``modifier_rank`` sends.
    kinds = ON_REQUEST, ON_REQUEST_BROADCAST

    def __init__(
        self,
        params: nn.Parameter | Iterable[nn.Parameter | None] | None,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        if not enabled:
            params = modifier_rank = fwd_module = None
        self.modifier_rank = modifier_rank
        if isinstance(params, nn.Module):
            raise TypeError("GatheredParameters takes parameters, got a module; pass module.parameters()")
        listed = [params] if params is None or isinstance(params, Tensor) else list(params)
        for param in listed:
            if param is not None and not isinstance(param, Tensor):
                raise TypeError(f"GatheredParameters takes parameters, got a {type(param).__name__}")
        self.params = list(dict.fromkeys(param for param in listed if param is not None))
        world = process_group.world_size()
        if modifier_rank is not None and not 0 <= modifier_rank < world:
            raise ValueError(f"modifier_rank={modifier_rank} is not one of the {world} ranks")
        self.buckets = buckets_of(self.params)
        self._pushed = 0  # pairs of hooks on saved tensors
        if fwd_module is not None:
            for param in parameters_in(self.params):
                register_external_parameter(fwd_module, param)

    def __enter__(self) -> None:
        self.gather()
        # What autograd saves from here on outlives the values: a place is kept instead, as it is inside of modules.
        if torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]  # not in torch.func
            for hooks in dict.fromkeys(bucket.hooks for bucket in self.buckets):
                self._pushed += hooks is not None and hooks.push_saved_tensor_hooks()

    def __exit__(self, error_type: Any, *_: object) -> None:
        while self._pushed:
            torch._C._autograd._pop_saved_tensors_default_hooks()
            self._pushed -= 1
        self.release(error_type)

    @outliving_pass()
    def gather(self) -> None:
        """Enter without hooks on saved tensors, for callers that leave in another order, by :meth:`release`."""
        # Before anything is launched: a rank that raised in the middle would leave the others waiting.
        for bucket in self.buckets:
            guards.check_on_device(bucket)
        if self.modifier_rank is not None:  # of parameters that are whole anyway: a write may replace their data
            self._data = {param: param.data for param in self.params if not isinstance(param, ZeroParameter)}
        # Those that the coordinator has gathered, while no module of theirs is under way, are hidden again afterwards.
        self._hidden = [bucket for bucket in self.buckets if not bucket.shown]
        # From here on the coordinator does not release them.
        for bucket in self.buckets:
            bucket.gather_refs += 1
            bucket.release_when_unreferenced |= bucket.status is ZeroParamStatus.NOT_AVAILABLE
        try:
            _all_gather_params(self.buckets, self.kinds[0])
            for bucket in self.buckets:
                bucket.show()
                # Values that were here already may have come quantised; the program reads the very values.
                bucket.gather_again(self.kinds[0], may_quantize=False)
        except BaseException as error:  # from a disk, say: what has been gathered is released
            _all_gather_params([b for b in self.buckets if b.status is ZeroParamStatus.INFLIGHT], self.kinds[0])
            self.release(type(error))
            raise

    @outliving_pass()
    def release(self, error_type: Any) -> None:
        """Leave the context: take over what was written, if nothing was raised, and release what nobody else needs."""
        complete = False
        try:
            # After an exception nothing is taken over: the other ranks may not have had it, and would not broadcast.
            if error_type is None:
                if self.modifier_rank is not None:
                    self._take_over(self.modifier_rank)
                # A write that was not taken over is refused: without ``modifier_rank``, or to a neighbour in a bucket.
                for bucket in self.buckets:
                    if bucket.params:  # else its engine was destroyed meanwhile: they have their values for good
                        guards.check_writes(bucket, every_element=True)  # there is time for that here
                complete = True
        finally:
            for bucket in self.buckets:
                if complete:  # else a write that was not taken over is left for the release to refuse
                    guards.accept_writes(bucket)
                bucket.gather_refs -= 1
                # An outer context still reads the values; its end does what follows.
                if bucket.gather_refs:
                    continue
                if bucket.release_when_unreferenced:
                    bucket.release_when_unreferenced = False
                    if bucket.status is ZeroParamStatus.AVAILABLE:
                        bucket.release(discard=not complete)
                    continue
                # A pass uses the bucket too, and goes on with the values that it had before this context.
                if complete:
                    bucket.gather_again(self.kinds[0], may_quantize=True)
                if bucket in self._hidden:
                    bucket.hide_unused()

    def _take_over(self, source: int) -> None:
        wrong = ""
        for param in self.params:
            if not isinstance(param, ZeroParameter):
                values = self._data.get(param, param.data)  # its engine may have been destroyed meanwhile
                wrong = guards.take_back(param, values) or wrong
                process_group.broadcast_tensor(values, source)
                torch.autograd.graph.increment_version(param)  # by this the engine sees the write, on all ranks
                continue
            bucket, _ = param._record.placed()
            values = bucket.value(param)
            wrong = guards.take_back(param, values) or wrong
            # Rank ``source``'s values fill every rank's buffer, in place; then each keeps its fragment of them.
            bucket.strategy.comm.broadcast(self.kinds[1], values, source)
            bucket.write(param, values.reshape(-1))
            guards.accept_write(param)
        # Secondary shards that are never stale (MiCS, frozen parameters) get the new values.
        if self.buckets:
            with self.buckets[0].strategy.comm.ledger.outside_step():
                send_to_replicas(self.buckets)
        if wrong:
            raise ValueError(wrong)
