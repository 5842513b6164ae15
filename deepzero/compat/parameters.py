"""DeepSpeed's words for stage 3's parameters, over what is there: verbs on a parameter, ``Init``'s keywords, leaves.

``param.all_gather()`` and ``param.partition()`` are the two ends of a ``GatheredParameters``. They are added to the
classes of parameters here, so that the core has one way to gather outside of a pass, and not two.

Sources: ``partition_parameters.py``, ``offload_config.py``, ``offload_states.py`` and ``stage3.py`` in
``runtime/zero/``, ``utils/tensor_fragment.py``, ``utils/z3_leaf_module.py``, ``init_on_device.py`` of [DeepSpeed].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from deepzero.comm import process_group
from deepzero.comm.flight_recorder import world_group
from deepzero.config.deepspeed_json import load_zero_config
from deepzero.config.engine import EngineConfig
from deepzero.config.strict import ConfigError
from deepzero.runtime.zero.guards import fragments_of
from deepzero.runtime.zero.module_registry import LEAF, z3_leaf_module
from deepzero.runtime.zero.parameter_all_gather import PlainAllGather
from deepzero.runtime.zero.partition_parameters import GatheredParameters, Init, PersistentParameter, ZeroParameter
from deepzero.runtime.zero.partitioned_bucket import ZeroParamStatus
from deepzero.runtime.zero.tensor_fragment import safe_get_full_grad, safe_set_full_grad

ZeroParamType = Enum("ZeroParamType", "NORMAL PARTITIONED REMOTE")


class OffloadDeviceEnum(str, Enum):
    """Where a config may keep a state: on the device, in host memory, in files."""

    none, cpu, nvme = "none", "cpu", "nvme"


class OffloadStateTypeEnum(str, Enum):
    """What ``engine.offload_states(include=…)`` moves."""

    optim_states, hp_params, lp_params = "optim_states", "hp_params", "lp_params"
    lp_grads, contiguous_grad_buffer = "lp_grads", "contiguous_grad_buffer"


def get_state_devices(model: Any, state: OffloadStateTypeEnum) -> set[torch.device]:
    """The devices on which an engine's tensors of this kind are now."""
    if state.value not in model.offloader.away:
        return {tensor.device for tensor, _ in model.offloader.states()[state.value]} or {model.device}
    # The reducer's buckets are not kept: what is in them has been used.
    return set() if state is OffloadStateTypeEnum.contiguous_grad_buffer else {torch.device("cpu")}


# ---- verbs on a parameter --------------------------------------------------------------------------------------------


class Gathered:
    """The handle of a gather that is over."""

    def wait(self, handle_dependency: bool = True) -> None:
        """Return at once."""


def all_gather(
    param: ZeroParameter, param_list: Iterable[nn.Parameter] | None = None, async_op: bool = False, hierarchy: int = 0
) -> Gathered:
    """Gather these parameters (None: this one), outside of passes, until :func:`partition`. A collective.

    It is over when it returns, with ``async_op`` too; ``hierarchy`` indents DeepSpeed's log.
    """
    for one in [param] if param_list is None else param_list:
        if isinstance(one, ZeroParameter) and one._record.open_gather is None:
            one._record.open_gather = GatheredParameters(one)
            one._record.open_gather.gather()
    return Gathered()


def all_gather_coalesced(
    param: ZeroParameter, params: Iterable[nn.Parameter], safe_mode: bool = False, quantize: bool = False
) -> Gathered:
    """:func:`all_gather` of several; ``safe_mode`` asks for checks that every gather makes."""
    if quantize:
        raise NotImplementedError(
            "param.all_gather_coalesced(quantize=True): gathers outside of passes give the very values; leave it out, "
            "and set zero_quantized_weights in initialize's configuration for those of the passes"
        )
    return all_gather(param, params)


def partition(
    param: ZeroParameter, param_list: Iterable[nn.Parameter] | None = None, hierarchy: int = 0,
    has_been_updated: bool = False, free_data: bool = True,
) -> None:  # fmt: skip
    """End :func:`all_gather`. A write is taken over with ``has_been_updated``, from rank 0; else it raises."""
    if not free_data:
        raise NotImplementedError(
            "param.partition(free_data=False): a partitioned parameter keeps no whole value here; leave it out, and "
            "call partition when the value has been used"
        )
    for one in [param] if param_list is None else param_list:
        if isinstance(one, ZeroParameter) and (context := one._record.open_gather) is not None:
            one._record.open_gather = None
            context.modifier_rank = 0 if has_been_updated else None
            context.release(None)


def ds_summary(param: ZeroParameter) -> dict[str, Any]:
    """What DeepSpeed's messages say of a parameter."""
    shapes = {"shape": param.shape, "ds_shape": param.ds_shape, "ds_tensor.shape": param.ds_tensor.shape}
    grad_shape = tuple(param.grad.shape) if param.grad is not None else None
    numels = {"numel": param.numel(), "ds_numel": param.ds_numel, "grad_shape": grad_shape}
    said = {"id": param.ds_id, "status": param.ds_status.name, "persist": param.ds_persist}
    return said | numels | {name: tuple(shape) for name, shape in shapes.items()}


def _of_strategy(read: Callable[[PlainAllGather], Any]) -> property:
    """What the strategy by which a parameter's bucket is gathered says; None of a persistent one."""

    def answer(param: Any) -> Any:
        bucket = getattr(param._record, "bucket", None)
        return read(bucket.strategy) if bucket is not None else None

    return property(answer)


def _assign(view: PartitionView, values: torch.Tensor) -> None:
    param, plain = view._param, view._plain
    persistent = isinstance(param, PersistentParameter)
    if persistent or param._record.placed()[0].status is not ZeroParamStatus.NOT_AVAILABLE:
        raise RuntimeError(
            f"an assignment to ds_tensor.data of parameter {param._record.name!r}, which is whole on this rank (from "
            "its fetch to engine.step) or on its way to it, would leave the ranks with different values; write after "
            "the step, or inside GatheredParameters(param, modifier_rank=0)"
        )
    values, (bucket, _) = values.reshape(view.shape), param._record.placed()
    with bucket.param_group.writing(param) if bucket.param_group is not None else nullcontext():
        plain.copy_(values)
    bucket.generation += 1


class PartitionView(torch.Tensor):
    """A ``ds_tensor``, which is a view of a partition: ``ds_tensor.data = values`` writes into that, and its master.

    What is computed from it, copied and saved is a plain tensor. Values of another size raise a RuntimeError, as does
    an assignment while the parameter is whole on the rank.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _plain: Any = torch.Tensor.data
    _param: Any
    data = property(lambda view: view._plain, _assign)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self._plain.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain.__reduce_ex__(protocol)


def _with_view(kind: Any) -> property:
    read = kind.ds_tensor.fget

    def ds_tensor(param: Any) -> PartitionView:
        view: PartitionView = read(param).as_subclass(PartitionView)
        view._param = param
        return view

    return property(ds_tensor)


for _kind in (ZeroParameter, PersistentParameter):
    _kind.ds_tensor = _with_view(_kind)  # type: ignore[method-assign, assignment]
    for _name, _verb in {
        **{verb.__name__: verb for verb in (all_gather, all_gather_coalesced, partition, ds_summary)},
        # DeepSpeed's count of the modules that keep a parameter gathered, which trl clears before it generates. Here
        # buckets are counted, and what is cleared is a set of the program's own.
        "ds_active_sub_modules": property(lambda param: set()),
        "ds_process_group": property(lambda param: world_group()),
        # HpZ's and MiCS's secondary partition: here of the parameter's bucket, in the messages that travel; and the
        # group of ranks that keep it among them. None without.
        "ds_secondary_tensor": _of_strategy(lambda strategy: strategy.secondary_shard),
        "ds_zero_param_process_group": _of_strategy(lambda strategy: strategy.group and strategy.group.handle),
    }.items():
        setattr(_kind, _name, _verb)


def is_zero_param(parameter: Any) -> bool:
    """Whether stage 3 has this parameter, partitioned or persistent."""
    return isinstance(parameter, (ZeroParameter, PersistentParameter))


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
) -> None:
    """Replace the gradient of each parameter by ``update_func(gradient, parameter)``, both whole. A collective.

    As ``safe_set_full_grad``, after the last backward pass of a step; what has no gradient is passed over.
    """
    for param in param_list:
        if (gradient := safe_get_full_grad(param)) is not None:
            safe_set_full_grad(param, update_func(gradient, param))


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """The engine with all of its parameters whole: many forward passes that fetch nothing."""
    with GatheredParameters(model.module.parameters()):
        yield model


# ---- leaf modules by name --------------------------------------------------------------------------------------------


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that have been declared leaves."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    """Whether an engine in stage 3 has this parameter in a leaf module."""
    engine = fragments_of(model)
    return engine is not None and model in engine.gradients.leaf_params


def set_z3_leaf_modules_by_suffix(
    model: nn.Module,
    module_name_suffixes: Iterable[str],
    flag: bool = True,
    raise_if_not_found: bool = True,
    matches: Callable[[str, str], bool] = str.endswith,
) -> tuple[list[nn.Module], list[str]]:
    """Declare modules by the end of their names. Returns them, and the endings that none has (else a ValueError)."""
    endings, names = list(module_name_suffixes), dict(model.named_modules())
    found = [module for name, module in names.items() if any(matches(name, end) for end in endings)]
    missing = [end for end in endings if not any(matches(name, end) for name in names)]
    if missing and raise_if_not_found:
        raise ValueError(f"the model has no module named {', '.join(missing)}")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found, missing


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """:func:`set_z3_leaf_modules_by_suffix` by whole names, as in ``model.named_modules()``."""
    return set_z3_leaf_modules_by_suffix(model, module_names, flag, raise_if_not_found, str.__eq__)


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Declare this very module a leaf, or not."""
    model.__dict__[LEAF] = flag


# ---- contexts of construction ----------------------------------------------------------------------------------------

_INIT_REFUSED = {
    "zero_param_parallel_group": "hpZ's groups are made by initialize, from zero_hpz_partition_size",
    "zero_quantized_weights": "initialize reads the key of this name; construction is exact",
    "zero_quantized_nontrainable_weights": "initialize reads the key of this name; construction is exact",
    "param_swapper": "initialize makes the files of offload_param",
    "tensor_overrides": "without dtype= a constructor's dtypes stay, and its devices always do",
}
_INIT_TAKEN = ("config", "mem_efficient_linear", "mpu", "sequence_data_parallel_group")


class DeepSpeedInit(Init):
    """``zero.Init`` with DeepSpeed's keywords: those of ``runtime/zero/partition_parameters.py:Init``, and these.

    Args:
        data_parallel_group, or sequence_data_parallel_group: a group of all ranks, the only ones that there are.
        mem_efficient_linear: either will do: no linear layer saves a view of its weight here.
        remote_device: None: ``"cpu"`` where the config has ``offload_param``.
        config_dict_or_path: of it ``zero_optimization`` alone is read; ``"auto"`` elsewhere does no harm.
        config: the older name of that; one of the two.
        others: ``mpu``, one without model parallelism; the rest raises unless it says nothing.
    """

    shut: ClassVar[list[Init]] = []
    """Contexts that :func:`shutdown_init_context` has left, the outermost last."""

    def __init__(
        self, module: nn.Module | None = None, data_parallel_group: Any = None, *,
        remote_device: str | None = None, pin_memory: bool = False,
        config_dict_or_path: EngineConfig | Mapping[str, Any] | str | Path | None = None, enabled: bool = True,
        dtype: torch.dtype | None = None, **others: Any,
    ) -> None:  # fmt: skip
        if unknown := others.keys() - {*_INIT_TAKEN, *_INIT_REFUSED}:
            raise TypeError(f"zero.Init has no keyword {', '.join(sorted(unknown))}")
        groups = (data_parallel_group, others.get("sequence_data_parallel_group"))
        sizes = [group.size() for group in groups if group is not None]
        if (mpu := others.get("mpu")) is not None:
            sizes.append(mpu.get_data_parallel_world_size())
        problems = [f"{name}: {why}; leave it out" for name, why in _INIT_REFUSED.items() if others.get(name)]
        if set(sizes) - {process_group.world_size()}:
            ranks = f"{process_group.world_size()} ranks, and a group of {sizes[0]} was given"
            problems.append(f"data_parallel_group is not implemented; parameters are cut over all {ranks}")
        settings = [one for one in (others.get("config"), config_dict_or_path) if one is not None]
        if len(settings) > 1:
            problems.append("the configuration is given twice (config_dict_or_path, config); give it once")
        if enabled and problems:
            raise ConfigError(f"zero.Init: {problems[0]}")
        if enabled and settings:
            device = load_zero_config(settings[0]).offload_param.device
            remote_device = remote_device or ("cpu" if device == "nvme" else device)
            dtype = dtype or self._dtype_of(settings[0])
        super().__init__(module, remote_device, pin_memory, settings[0] if settings else None, enabled, dtype)

    def _dtype_of(self, settings: Any) -> torch.dtype | None:
        """The dtype where none is given: None, the constructor's."""

    def __exit__(self, error_type: Any, *error: object) -> None:
        # Shut and not restored, it has been left already; from here on there is nothing to restore.
        if self in self.shut:
            self.shut.remove(self)
        else:
            super().__exit__(error_type, *error)


def shutdown_init_context() -> None:
    """Let modules be constructed as without ``Init``, until :func:`restore_init_context` or the end of its ``with``."""
    while Init.entered:
        context = Init.entered[-1]
        context.__exit__(None)
        DeepSpeedInit.shut.append(context)


def restore_init_context() -> None:
    """Enter again what :func:`shutdown_init_context` has left, where its ``with`` has not ended."""
    while DeepSpeedInit.shut:
        DeepSpeedInit.shut.pop().__enter__()


class OnDevice:
    """Tensors made inside without a device lie on ``device``, those without a dtype have ``dtype``; others stay."""

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> None:
        self.dtype, self.device, self.enabled = dtype, device, enabled
        self._left = list[ExitStack]()  # one for each time it is entered, also inside itself

    def __enter__(self) -> None:
        with ExitStack() as stack:
            if self.enabled:
                stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(self.dtype)
                stack.enter_context(torch.device(self.device))
            self._left.append(stack.pop_all())

    def __exit__(self, *error: object) -> None:
        self._left.pop().close()
