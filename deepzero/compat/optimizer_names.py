"""DeepSpeed's names on the optimizer that ``initialize`` returns, which stays the user's own object.

DeepSpeed wraps the optimizer; here its class becomes a subclass of itself, with one more base that answers what the
class does not know. Everything is read-only and looked up in the engine when it is asked for. Where DeepSpeed has one
flat tensor for each parameter group, here is one for each *fragment*, which is what the optimizer holds
([Note: why fragments] in ``stage_1_and_2.py``).

Source: the attributes of these names in ``runtime/zero/stage_1_and_2.py``, ``runtime/zero/stage3.py`` and
``runtime/fp16/loss_scaler.py`` of [DeepSpeed].
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any, ClassVar, cast

import torch
from torch import nn

from deepzero.comm.flight_recorder import world_group
from deepzero.runtime.engine import Engine
from deepzero.runtime.loss_scaler import GROWTH, DynamicLossScaler, LossScaler
from deepzero.runtime.zero.guards import check_unclaimed
from deepzero.runtime.zero.module_registry import z3_leaf_module
from deepzero.utils.errors import ConfigError, MisuseError


class LossScalerNames:
    """A live view of a loss scaler under DeepSpeed's names."""

    NAMES: ClassVar = {
        "cur_scale": "scale", "loss_scale": "scale", "cur_iter": "iteration", "scale_window": "window",
        "last_overflow_iter": "last_overflow_iteration", "min_scale": "min_scale", "min_loss_scale": "min_scale",
        "cur_hysteresis": "hysteresis_left", "delayed_shift": "hysteresis",
        "consecutive_hysteresis": "consecutive_hysteresis",
    }  # fmt: skip

    def __init__(self, scaler: LossScaler) -> None:
        self._scaler = scaler
        self.dynamic = self.dynamic_loss_scale = scaler.kind == "dynamic"
        self.scale_factor = GROWTH

    def __getattr__(self, name: str) -> Any:
        if name not in self.NAMES:
            raise AttributeError(f"a loss scaler has no attribute {name!r}; it has {', '.join(self.NAMES)}")
        return getattr(self._scaler, self.NAMES[name])


class LossScaleProfile(str, Enum):
    """Which of DeepSpeed's wrappers a loss scale's defaults are those of; a plain string does as well."""

    FUSED, UNFUSED = "fused", "unfused"


class LossScaleConfig(LossScalerNames):
    """A loss scale from DeepSpeed's arguments, as of ``DeepSpeedFP16Config``; an engine's is made from its config."""

    def __init__(
        self, low_precision_dtype: torch.dtype, dynamic_loss_scale: bool, static_loss_scale: float,
        dynamic_loss_args: Mapping[str, Any] | None, *, profile: str = LossScaleProfile.FUSED,
        initial_dynamic_scale: float | None = None,
    ) -> None:  # fmt: skip
        if profile not in PROFILES:
            raise ConfigError(f"LossScaleConfig(profile={profile!r}): it is one of {', '.join(PROFILES)}")
        self.use_grad_scaling = low_precision_dtype == torch.float16
        if self.use_grad_scaling and dynamic_loss_scale:
            given = dynamic_loss_args
            if given is None:
                first, least = PROFILES[profile]
                given = {"init_scale": initial_dynamic_scale or first, "min_scale": least}
            super().__init__(DynamicLossScaler(**{SCALE_ARGUMENTS.get(key, key): given[key] for key in given}))
        else:
            super().__init__(LossScaler(static_loss_scale if self.use_grad_scaling else 1.0))


def CreateLossScaler(
    dtype: torch.dtype, static_loss_scale: float, dynamic_scaling: bool, dynamic_loss_args: Mapping[str, Any] | None
) -> LossScalerNames:
    """A loss scaler from DeepSpeed's arguments. AssertionError: a dynamic one without ``dynamic_loss_args``."""
    if dtype == torch.float16 and dynamic_scaling and dynamic_loss_args is None:
        raise AssertionError("CreateLossScaler(dynamic_scaling=True) needs dynamic_loss_args")
    return LossScaleConfig(dtype, dynamic_scaling, static_loss_scale, dynamic_loss_args)


PROFILES: dict[str, tuple[float, float]] = {
    LossScaleProfile.FUSED: (2.0**32, 1.0), LossScaleProfile.UNFUSED: (2.0**16, 0.25),
}  # fmt: skip
"""DeepSpeed's profile → a dynamic scale's first and smallest, where no arguments say them."""
SCALE_ARGUMENTS = {
    "init_scale": "initial_scale", "scale_window": "window", "delayed_shift": "hysteresis",
    "consecutive_hysteresis": "consecutive_hysteresis", "min_scale": "min_scale",
}  # fmt: skip
"""DeepSpeed's names of a dynamic scale's arguments → ours."""


class ParameterOffloadNames:
    """What is taken of stage 3's hooks around a generation: nothing has to be removed, as gathered parameters stay."""

    def __init__(self, engine: Engine) -> None:
        self.module, self.forward_hooks, self.backward_hooks = self, list[Any](), list[Any]()
        self.named_parameters = engine.module.named_parameters

    def ds_external_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """None that the modules do not find themselves."""
        return iter(())

    def _register_deepspeed_module(self, module: Any) -> None:
        """The hooks are there."""


def _groups(engine: Engine, of: Callable[[Any], Iterable[Any]]) -> list[Any]:
    return [item for group in engine.zero.groups for item in of(group)]


def _averaged_gradients(engine: Engine) -> dict[int, list[torch.Tensor]]:
    """Copies of this rank's fragments of the means, times the loss scale, by optimizer group; empty before a pass.

    There is one for each trained parameter, in the group's order, without elements where this rank owns none.
    """
    gradients, shard, means = engine.zero.stage.gradients, engine.zero.optimizer_shard, dict[Any, torch.Tensor]()
    if not gradients.reduced:
        return {}
    gradients.drain()
    divisor, dtype = engine.comm.world_size * engine.batch.accumulation, engine.zero.dtypes.accumulation
    none = next(iter(shard.grads.values()), torch.empty(0, dtype=dtype, device=engine.comm.device)).new_empty(0)
    for group in engine.zero.groups:
        means |= dict.fromkeys(group.params, none)
        for fragment, master in zip(group.fragments, group.masters, strict=True):
            means[group.params[fragment.slot.index]] = shard.grads[master] / divisor
    order = enumerate(vars(engine.optimizer)["_deepzero_order"])
    return {number: [means[param] for param in params if param in means] for number, params in order}


def _inner(engine: Engine) -> torch.optim.Optimizer:
    """The optimizer again, in its own class and over the same attributes.

    It has no ``optimizer``, so that who unwraps for as long as there is one comes to an end.
    """
    held = vars(engine.optimizer)
    if "_deepzero_inner" not in held:
        inner: torch.optim.Optimizer = object.__new__(type(engine.optimizer).__bases__[0])
        inner.__dict__ = held
        held["_deepzero_inner"] = inner
    return cast("torch.optim.Optimizer", held["_deepzero_inner"])


_OURS = ("_deepzero_engine", "_deepzero_order", "_deepzero_inner")
"""What the optimizer's attributes have of these lines while it belongs to an engine."""
READ: dict[str, Callable[[Engine], Any]] = {
    "overflow": lambda engine: engine.last_step is not None and engine.last_step.skipped,
    **dict.fromkeys(("loss_scale", "cur_scale"), lambda engine: engine.scaler.scale),
    **dict.fromkeys(("loss_scaler", "loss_scale_config"), lambda engine: LossScalerNames(engine.scaler)),
    "dynamic_loss_scale": lambda engine: engine.scaler.kind == "dynamic",
    "_global_grad_norm": lambda engine: engine.last_step.grad_norm if engine.last_step is not None else 0.0,
    "clip_grad": lambda engine: engine.config.gradient_clipping,
    **dict.fromkeys(("dtype", "low_precision_dtype"), lambda engine: engine.zero.dtypes.compute),
    "gradient_accumulation_dtype": lambda engine: engine.zero.dtypes.accumulation,
    "needs_scaler": lambda engine: lambda: engine.scaler.kind == "dynamic",
    "partition_count": lambda engine: engine.comm.world_size,
    "dp_process_group": lambda engine: world_group(),
    "optimizer": _inner,
    "averaged_gradients": _averaged_gradients,
}
"""Attribute → what it reads, in every stage."""
READ_1_AND_2 = READ | {
    "bit16_groups": lambda engine: engine.zero.stage.bit16_groups,
    # Aliases, complete: a stage whose all-gathers go on after the step counts who refers to the buffers.
    "bit16_groups_flat": lambda engine: (
        engine.prepare_writes() or [flat.detach() for flat in engine.zero.stage.bit16_groups_flat]
    ),
    "parallel_partitioned_bit16_groups": lambda engine: [
        bucket for group in engine.zero.stage.parallel_partitioned_bit16_groups for bucket in group
    ],
    "single_partition_of_fp32_groups": lambda engine: _groups(engine, lambda group: group.masters),
    "nccl_start_alignment_factor": lambda engine: 2,
}
READ_3 = READ | {
    "parameter_offload": ParameterOffloadNames,
    "module": lambda engine: engine.module,
    "leaf_parameters": lambda engine: {
        module: list(module.parameters()) for module in engine.module.modules() if z3_leaf_module(module)
    },
    "fp16_groups": lambda engine: _groups(engine, lambda its: [[its.params[f.slot.index]] for f in its.fragments]),
    "fp16_partitioned_groups_flat": lambda engine: _groups(engine, lambda its: map(its.param_fragment, its.fragments)),
    "fp32_partitioned_groups_flat": lambda engine: _groups(engine, lambda group: group.masters),
}


class ZeROOptimizer:
    """A base that an optimizer gets while it belongs to an engine, in stage 0 this one itself."""

    NAMES = READ

    def __getattr__(self, name: str) -> Any:
        reference = vars(self).get("_deepzero_engine")
        engine = reference() if reference is not None and name in self.NAMES else None
        if engine is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self.NAMES[name](engine)


class DeepSpeedZeroOptimizer(ZeROOptimizer):
    """The base in stages 1 and 2."""

    NAMES = READ_1_AND_2


class DeepSpeedZeroOptimizer_Stage3(ZeROOptimizer):
    """The base in stage 3."""

    NAMES = READ_3


class NoOptimizer(torch.optim.Optimizer):
    """Stands in an engine that evaluates and does not train: no parameter, no state, no step."""

    def __init__(self) -> None:
        super().__init__([{"params": []}], {})
        self.param_groups = []


def refuse_to_train(call: str) -> None:
    """A precondition of an engine with a :class:`NoOptimizer`."""
    if call in ("backward", "engine.step()"):
        raise MisuseError(
            f"{call}: this engine evaluates only, as neither initialize nor its config named an optimizer; pass "
            'optimizer=, or set "optimizer": {"type": …} in the config'
        )


def _as_its_own_class(optimizer: torch.optim.Optimizer, _protocol: Any) -> Any:
    """How a dressed one is pickled and copied: as its own class has it, and without the engine."""
    dressed = type(optimizer)
    own: Any = dressed.__bases__[0]
    # Protocol 0's way to make an object, in every protocol: the later ones insist on the class that the object has.
    reduced = own.__reduce_ex__(optimizer, 0)
    if isinstance(reduced, str):
        return reduced
    make, given, *rest = reduced
    if rest and isinstance(rest[0], dict):
        rest[0] = {name: value for name, value in rest[0].items() if name not in _OURS}
    return make, tuple(own if one is dressed else one for one in given), *rest


def dress(engine: Engine, in_order: list[list[nn.Parameter]]) -> None:
    """Give the engine's optimizer DeepSpeed's names; it answers to its own class's name as before.

    ``in_order`` has the parameters of each of its groups, as the program gave them.
    """
    stage, cls = engine.config.zero.stage, type(engine.optimizer)
    base = (ZeROOptimizer, DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3)[stage]
    like: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    # A class that is made here cannot be found by its name, which is what pickle does.
    like["__reduce_ex__"] = _as_its_own_class
    vars(engine.optimizer).update(_deepzero_engine=weakref.ref(engine), _deepzero_order=in_order)
    engine.optimizer.__class__ = type(cls.__name__, (cls, base), like)


def undress(optimizer: torch.optim.Optimizer) -> None:
    """Give the optimizer its own class back."""
    held = vars(optimizer)
    if [held.pop(name) for name in _OURS if name in held]:
        optimizer.__class__ = type(optimizer).__bases__[0]


class FrozenParameters:
    """Without an optimizer no parameter requires a gradient, so that none gets one; until :meth:`thaw`.

    Held weakly: what waits for an engine's end must not keep its model until then.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._params: list[weakref.ref[nn.Parameter]] = []
        if isinstance(optimizer, NoOptimizer):
            check_unclaimed({param: name for name, param in model.named_parameters()})
            self._params = [weakref.ref(param) for param in model.parameters() if param.requires_grad]
            self._require_grad(False)

    def _require_grad(self, required: bool) -> None:
        for reference in self._params:
            if (param := reference()) is not None:
                param.requires_grad_(required)

    def thaw(self) -> None:
        """Let them require gradients again, once and for all."""
        self._require_grad(True)
        self._params = []

    @contextmanager
    def thawed(self) -> Iterator[None]:
        """They require gradients inside."""
        self._require_grad(True)
        try:
            yield
        finally:
            self._require_grad(False)
