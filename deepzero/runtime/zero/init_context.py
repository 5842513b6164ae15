"""``zero.Init``: partition parameters while a model is constructed, so that it never stands whole on one rank.

Inside the context the constructor of every module class is wrapped: when a module is complete, its own parameters are
cut at once, and what is not this rank's is freed. At most one module's parameters are whole at any time. Every rank
runs the same constructors with the same seed; rank 0's values count, as everywhere.

What comes later writes to parameters that are partitioned already (``init.normal_(self.child.weight)``, Hugging Face's
``post_init``). Such a write gathers the parameter, runs, and partitions it again; so the initial values are those of
the unpartitioned model with the same seed, bit for bit.

Until ``initialize`` knows the optimizer's groups and bucket sizes, each parameter is a bucket by itself. Then it is
cut anew, one parameter at a time.

A model that was made on the ``meta`` device has no values; :func:`materialize` makes them module by module with
``reset_parameters``.

Source: ``Init`` and ``InsertPostInitMethodToModuleSubClasses`` in DeepSpeed's ``partition_parameters.py``.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from deepzero.comm import process_group
from deepzero.comm.collectives import Communicator
from deepzero.comm.ledger import Ledger
from deepzero.comm.streams import Chaos
from deepzero.config.deepspeed_json import load_engine_config
from deepzero.config.engine import ChaosConfig, EngineConfig
from deepzero.config.strict import ConfigError
from deepzero.layout import plan_layout
from deepzero.runtime.zero import partition_parameters
from deepzero.runtime.zero.buffer_pool import BufferPool, references
from deepzero.runtime.zero.partition_parameters import (
    PartitionedParameter,
    ZeroParameter,
    ZeroParamStatus,
    partitioned_in,
    set_placeholder,
)
from deepzero.runtime.zero.partitioned_bucket import PartitionedBucket
from deepzero.runtime.zero.partitioned_param_group import SETUP, as_zero_parameter

log = logging.getLogger(__name__)

TRIM_BYTES = 64 << 20
"""Freed parameters, between two calls of :func:`return_freed_memory`."""

_TO_EMPTY = nn.Module.to_empty

_ACTIVE: list[Init] = []
"""The contexts entered and not left, the innermost last."""

_OPEN: dict[PartitionedBucket, int] = {}
"""Buckets that a write inside the context made whole, and how many references to each are our own."""


class Init:
    """Partition every parameter as soon as the module that owns it is constructed.

    Args:
        module: an existing model to partition, at once; then there is no need for ``with``. Parameters on ``meta`` are
            given values, see :func:`materialize`.
        data_parallel_group: None: all ranks, the only group there is.
        mem_efficient_linear: accepted for DeepSpeed's sake: no linear layer saves a view of its weight here anyway.
        remote_device: ``"cpu"`` keeps the parts in host memory until ``initialize``; None on the rank's device.
        pin_memory: with ``remote_device="cpu"``, in page-locked memory; without CUDA in ordinary memory, with a line.
        config_dict_or_path: a DeepSpeed config; it must ask for stage 3.
        config: the older name of that; one of the two.
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

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: EngineConfig | Mapping[str, Any] | str | Path | None = None,
        config: EngineConfig | Mapping[str, Any] | str | Path | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.enabled, self.dtype = enabled, dtype
        if not enabled:
            return
        if data_parallel_group is not None:
            raise ConfigError("zero.Init: data_parallel_group is not implemented; parameters are cut over all ranks")
        if remote_device not in (None, "none", "cpu"):
            raise ConfigError(f'zero.Init: remote_device={remote_device!r} is not implemented; "cpu" and None are')
        if dtype is not None and not dtype.is_floating_point:
            raise ConfigError(f"zero.Init: dtype={dtype} is not a floating-point dtype")
        if config is not None and config_dict_or_path is not None:
            raise ConfigError("zero.Init: the configuration is given twice (config_dict_or_path, config); give it once")
        given = config_dict_or_path if config_dict_or_path is not None else config
        if given is not None and (stage := load_engine_config(given).zero.stage) != 3:
            raise ConfigError(
                f"zero.Init partitions parameters, which is stage 3, and the config says "
                f"zero_optimization.stage={stage}; set it to 3, or pass enabled=False"
            )
        process_group.init_distributed()
        device = process_group.default_device()
        self.comm = Communicator(device, Ledger(), Chaos(ChaosConfig(), process_group.rank()))
        self._home = torch.device("cpu") if remote_device == "cpu" else device
        self._pin = pin_memory and self._home.type == "cpu" and torch.cuda.is_available()
        if pin_memory and not torch.cuda.is_available() and self.comm.rank == 0:
            _say_not_pinned()
        self._pools: dict[torch.dtype, BufferPool] = {}
        self._freed_bytes = 0
        self._wrapped: list[tuple[type[nn.Module], Callable[..., None]]] = []
        self._under_construction: set[int] = set()
        if module is not None:
            materialize(module, self)
            for part in module.modules():
                self._partition_own(part)

    # ---- the context -------------------------------------------------------------------------------------------------

    def __enter__(self) -> Init:
        if not self.enabled:
            return self
        self._default_dtype = torch.get_default_dtype()
        if self.dtype is not None:
            torch.set_default_dtype(self.dtype)
        if not _ACTIVE:
            partition_parameters.write_through = _write_through
            for cls in _subclasses(nn.Module):
                self._wrap(cls)
            hook: Any = classmethod(functools.partial(_new_subclass, self))
            nn.Module.__init_subclass__ = hook  # type: ignore[method-assign]
            given_memory: Any = _to_empty
            nn.Module.to_empty = given_memory  # type: ignore[method-assign]
        _ACTIVE.append(self)
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        if not self.enabled:
            return
        _ACTIVE.pop()
        torch.set_default_dtype(self._default_dtype)
        if not _ACTIVE:
            del nn.Module.__init_subclass__
            nn.Module.to_empty = _TO_EMPTY  # type: ignore[method-assign]
            for cls, original in reversed(self._wrapped):
                cls.__init__ = original
            self._wrapped = []
            self._under_construction.clear()
            partition_parameters.write_through = None
            try:
                # The others may not have had this rank's exception, and would not take part in a broadcast.
                if kind is None:
                    _cut_again(only_unseen=False)
            finally:
                _discard(list(_OPEN))

    def _wrap(self, cls: type[nn.Module]) -> None:
        """Let the class's constructor end with a partitioning, if it has one of its own."""
        original = cls.__dict__.get("__init__")
        if original is None or cls.__module__.startswith("torch.jit"):
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
            if outermost and _ACTIVE:
                _cut_again(only_unseen=True)
                _ACTIVE[-1]._partition_own(module)

        self._wrapped.append((cls, original))
        cls.__init__ = construct  # type: ignore[assignment, method-assign]

    # ---- partitioning ------------------------------------------------------------------------------------------------

    def _partition_own(self, module: nn.Module) -> None:
        for name, param in module._parameters.items():
            if param is None or isinstance(param, ZeroParameter) or nn.parameter.is_lazy(param) or param.is_meta:
                continue
            if param.is_floating_point() and param.numel() > 0:
                self.partition(param, f"{type(module).__name__}.{name}")

    @torch.no_grad()
    def partition(self, param: nn.Parameter, name: str) -> None:
        """Cut one parameter: rank 0's values, of which this rank keeps a W-th."""
        comm = self.comm
        made = as_zero_parameter(param, name)
        values = param.data.to(comm.device, self.dtype or param.dtype).contiguous().reshape(-1)
        comm.broadcast("setup.broadcast", values)
        layout = plan_layout([values.numel()], comm.world_size, values.numel())
        bucket = layout.buckets[0]
        pool = self._pools.setdefault(values.dtype, BufferPool(values.dtype, comm.device, 0))
        shard = torch.zeros(bucket.shard_numel, dtype=values.dtype, device=self._home, pin_memory=self._pin)
        on_host = self._home.type != comm.device.type
        home = PartitionedBucket(-1 - made._zero.id, bucket, [made], shard, comm, pool, shard_on_host=on_host)
        home.write(made, values)
        self._freed_bytes += values.nbytes
        del values
        set_placeholder(made, shard.dtype, self._home)
        if self._freed_bytes >= TRIM_BYTES:
            self._freed_bytes = 0
            return_freed_memory()


@functools.cache
def _say_not_pinned() -> None:
    log.warning("zero.Init: pin_memory=True has no effect without CUDA: parts stay in ordinary memory (said once)")


def return_freed_memory() -> None:
    """Ask the C library to give freed pages back to the system.

    glibc keeps chunks below 32 MiB in its heap, where a few small objects between them make new holes of the old ones:
    a model of 3 GB took 0.9 GB more than its share on some ranks. Other C libraries, and systems, have no such call.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _subclasses(cls: type[nn.Module]) -> Iterator[type[nn.Module]]:
    """All that exist, each once."""
    seen: set[type] = set()
    stack = [cls]
    while stack:
        for child in stack.pop().__subclasses__():
            if child not in seen:
                seen.add(child)
                stack.append(child)
                yield child


@functools.wraps(_TO_EMPTY)
def _to_empty(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """A module from ``meta`` gets memory (``torch.nn.utils.skip_init``): it is cut like one that was constructed."""
    made = _TO_EMPTY(module, *args, **kwargs)
    for part in made.modules():
        _ACTIVE[-1]._partition_own(part)
    return made


def _new_subclass(context: Init, cls: type[nn.Module], **kwargs: Any) -> None:
    """A module class is defined inside the context: it is wrapped like the others."""
    super(nn.Module, cls).__init_subclass__(**kwargs)
    context._wrap(cls)


@torch.no_grad()
def _write_through(func: Any, args: Any, kwargs: Any) -> Any:
    """Inside ``Init`` a partitioned parameter may be read and written: gather, run, take rank 0's values, cut again.

    When the result is a view of the parameter (``init.zeros_(weight[padding_idx])``), it may be written later: then the
    parameter stays whole until nobody holds the view. When the operation raises, nothing is taken over.
    """
    _cut_again(only_unseen=True)
    params = partitioned_in((args, kwargs))
    homes = list({param._zero.id: param._zero.placed()[0] for param in params}.values())
    try:
        for home in homes:
            home.launch(SETUP)
        for home in homes:
            home.wait()
            _OPEN[home] = references(home.whole)
        result = _with_views(func, args, kwargs, params)
    except BaseException:
        # Now, as the traceback holds views: they would pass for somebody's who may still write.
        _discard(homes)
        raise
    _cut_again(only_unseen=True)
    return result


def _with_views(func: Any, args: Any, kwargs: Any, params: list[PartitionedParameter]) -> Any:
    """Call ``func`` with views of gathered parameters in their places."""
    # The parameters themselves are whole now, where they are; it is aliases (detach, data) that have to be replaced.
    whole = {id(param): param._zero.placed() for param in params}
    views = {key: home.value(slot) for key, (home, slot) in whole.items()}
    new_args, new_kwargs = pytree.tree_map_only(torch.Tensor, lambda t: views.get(id(t), t), (args, kwargs))
    result = func(*new_args, **new_kwargs)
    returned = [given for given in pytree.tree_leaves((args, kwargs)) if views.get(id(given)) is result]
    views.clear()
    del new_args, new_kwargs
    if returned:
        result = returned[0]  # an operation in place returns what it was given
    return result


@torch.no_grad()
def _cut_again(only_unseen: bool) -> None:
    """Partition what a write made whole; with ``only_unseen``, where no view of it is held any more."""
    for home, alone in list(_OPEN.items()):
        if only_unseen and references(home.whole) > alone:
            continue
        del _OPEN[home]
        try:
            values = home.value(home.bucket.slots[0]).reshape(-1)
            home.comm.broadcast("setup.broadcast", values)
            home.write(home.params[0], values)
            home.snapshot_versions()
            del values
            home.release()
        except BaseException:
            _discard([home])
            raise


@torch.no_grad()
def _discard(homes: list[PartitionedBucket]) -> None:
    """Forget what a write made whole; the parts stay as they were. Nothing is sent."""
    for home in homes:
        _OPEN.pop(home, None)
        if home.status is not ZeroParamStatus.NOT_AVAILABLE:
            home.discard()


@torch.no_grad()
def materialize(model: nn.Module, context: Init) -> None:
    """Give values to parameters on the ``meta`` device, module by module, and cut them at once.

    Values are those that each module's ``reset_parameters`` draws, in the order of ``model.modules()``.

    Raises:
        ConfigError: a module with parameters or buffers on ``meta`` that cannot make them.
    """
    device = context.comm.device
    for name, module in model.named_modules():
        metas = {key: p for key, p in module._parameters.items() if p is not None and p.is_meta}
        empty = {key: b for key, b in module._buffers.items() if b is not None and b.is_meta}
        if not metas and not empty:
            continue
        reset = getattr(module, "reset_parameters", None)
        if not callable(reset):
            raise ConfigError(
                f"module {name!r} ({type(module).__name__}) is on the meta device and has no reset_parameters() to "
                "make its values; construct the model inside deepzero.zero.Init() instead"
            )
        if empty and not type(module).__module__.startswith("torch.nn"):
            raise ConfigError(
                f"buffer {next(iter(empty))!r} of module {name!r} is on the meta device, and reset_parameters() need "
                "not fill it; construct the model inside deepzero.zero.Init() instead"
            )
        whole = [key for key, param in module._parameters.items() if param is not None and not param.is_meta]
        if whole and metas:
            raise ConfigError(
                f"module {name!r} has {next(iter(metas))!r} on the meta device and values in {whole[0]!r}, which "
                "reset_parameters() would overwrite; load all of its parameters, or none"
            )
        for param in metas.values():
            if param.is_meta:
                # The object stays the same one: optimizers and tied modules hold it.
                torch.utils.swap_tensors(
                    param, nn.Parameter(torch.empty_like(param, device=device), param.requires_grad)
                )
        for key, buffer in empty.items():
            module._buffers[key] = torch.zeros_like(buffer, device=device)
        reset()
        context._partition_own(module)
