"""``initialize``, its engine and ``zero.Init`` behind ``import deepspeed``, where they do as DeepSpeed does.

``deepzero.initialize`` makes fp32 masters of the values that a model has, so that nothing is lost. DeepSpeed casts the
model to the compute dtype before, and a script that runs in its place shall have the losses that it had there. The
engine of this module is the other door's, and rounds the model before it is built. And plain tensors have a
``ds_status``, for scripts that ask those that autograd hands back.

Source: ``_cast_module_mixed_precision``, ``_configure_zero_optimizer`` and ``scale`` in ``runtime/engine.py``,
``Init._set_dtype`` in ``runtime/zero/partition_parameters.py`` of [DeepSpeed].
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from deepzero.checkpoint.errors import CheckpointError
from deepzero.compat.deepspeed_engine import DeepSpeedEngine
from deepzero.compat.parameters import DeepSpeedInit, is_zero_param
from deepzero.config.deepspeed_json import load_engine_config, read_mapping
from deepzero.config.engine import EngineConfig
from deepzero.offload.cpu_adam import CPUAdam
from deepzero.runtime import initialize as door
from deepzero.runtime.build import Dtypes
from deepzero.runtime.consistency import TrainedParameters
from deepzero.runtime.muon import Muon
from deepzero.runtime.zero.partitioned_bucket import ZeroParamStatus
from deepzero.utils.errors import ConfigError, MisuseError

TESTED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, CPUAdam, Muon)
"""Optimizers that ``"zero_allow_untested_optimizer": false`` lets pass; where it is left out, all are tried."""


@functools.wraps(door.initialize)
def initialize(*given: Any, **named: Any) -> Any:
    """``deepzero.initialize`` of a model whose values are rounded to the compute dtype, but for those of ``Init``."""
    call = inspect.signature(door.initialize).bind(*given, **named).arguments
    arguments = {name: call.get(name) for name in ("config", "config_params", "args")}
    try:
        settings = load_engine_config(config := door.given_config(**arguments))
    except ConfigError:  # initialize says so on every rank
        return door.initialize(*given, **named)
    if settings.zero.stage and isinstance(optimizer := call.get("optimizer"), torch.optim.Optimizer):
        _refuse_where_asked(optimizer, settings, {} if isinstance(config, EngineConfig) else read_mapping(config or {}))
    return door.initialize(**call | dict.fromkeys(arguments) | {"config": config, "engine_class": EngineInPlace})


def _refuse_where_asked(optimizer: torch.optim.Optimizer, settings: EngineConfig, says: Mapping[str, Any]) -> None:
    """Raise for an optimizer object that DeepSpeed refuses by default, where the config spells that default out."""
    name, offloads = type(optimizer).__name__, settings.zero.offload_optimizer.device != "none"
    if offloads and says.get("zero_force_ds_cpu_optimizer") is True and not isinstance(optimizer, CPUAdam):
        raise SlowOptimizer(f"zero_force_ds_cpu_optimizer=true: {name} is no DeepSpeedCPUAdam; with false it will do")
    if says.get("zero_allow_untested_optimizer") is False and type(optimizer) not in TESTED:
        raise ConfigError(
            f"zero_allow_untested_optimizer=false: {name} is none of those that DeepSpeed has tested; leave the key "
            "out, and deepzero finds out by itself whether an optimizer can be sharded"
        )


class SlowOptimizer(CheckpointError, ConfigError):
    """DeepSpeed raises its ``ZeRORuntimeException`` here, whose place a ``CheckpointError`` takes (import_paths.py)."""


class EngineInPlace(DeepSpeedEngine):
    """The engine of this ``initialize``; it rounds last of all, as what is refused leaves an older engine going on."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, config: EngineConfig, *rest: Any) -> None:
        for param in model.parameters():
            if param.is_floating_point() and not is_zero_param(param):
                param.data.copy_(param.data.to(Dtypes.of(config).compute))
        super().__init__(model, optimizer, config, *rest)
        self.zero.trained.__class__ = MayFreeze

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """As the engine's own, with DeepSpeed's words for what is no loss."""
        if loss.numel() != 1 or loss.grad_fn is None:
            raise MisuseError(f"engine.scale needs a scalar tensor with a grad_fn, it got one of {tuple(loss.shape)}")
        return super().scale(loss)


class MayFreeze(TrainedParameters):
    """A parameter that is frozen when a step is taken has no gradient from that pass, and goes on by its momentum."""

    def check(self) -> None:
        """As the engine's own, but for those that have been frozen."""
        frozen = [param for param in self._trained if not param.requires_grad]
        try:
            for param in frozen:
                param.requires_grad_(True)
            super().check()
        finally:
            for param in frozen:
                param.requires_grad_(False)


class RoundedInit(DeepSpeedInit):
    """``deepzero.zero.Init`` whose ``dtype``, where none is given, is that in which ``config`` lets the model train."""

    def _dtype_of(self, settings: Any) -> torch.dtype | None:
        if isinstance(settings, EngineConfig):
            return Dtypes.of(settings).compute
        blocks = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16}
        given = {key: block for key, block in read_mapping(settings).items() if isinstance(block, Mapping)}
        return next((dtype for key, dtype in blocks.items() if given.get(key, {}).get("enabled") is True), None)


def _status(tensor: torch.Tensor) -> ZeroParamStatus:
    """AVAILABLE for a tensor; a parameter has a status only where it belongs to an engine or ``zero.Init``."""
    if isinstance(tensor, nn.Parameter):
        raise AttributeError(f"{type(tensor).__name__!r} object has no attribute 'ds_status'")
    return ZeroParamStatus.AVAILABLE


# What an autograd function has saved passes through stage 3's hooks, and torch makes a new tensor of what they return:
# the weight's values, without the attributes of the parameter. DeepSpeed has no such hooks, so there the parameter
# comes back, and TRL's fused losses ask it whether to gather it. A property, as those of torch's own: torch.compile
# asks the class for each of its names, and for their setters.
torch.Tensor.ds_status = property(_status)  # type: ignore[attr-defined]
