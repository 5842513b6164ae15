"""DeepSpeed's config classes, for scripts that make or read them: pydantic models, as they are there.

Their fields are those of deepzero's dataclasses and tables, so that a key is written down once.

Source: [DeepSpeed], ``runtime/config.py``, ``config_utils.py``, ``precision_config.py``, ``zero/config.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, make_dataclass
from enum import IntEnum
from functools import reduce
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from deepzero.comm import process_group
from deepzero.compat.optimizer_names import SCALE_ARGUMENTS
from deepzero.config import deepspeed_keys as keys
from deepzero.config.deepspeed_json import _chosen, _renamed, load_engine_config, read_mapping
from deepzero.config.engine import EngineConfig, PrecisionConfig, resolve_batch
from deepzero.config.strict import ConfigError, build
from deepzero.config.zero import OffloadOptimizerConfig, OffloadParamConfig, ZeroConfig

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_OFF = (bool, False)
_Nothing = make_dataclass("_Nothing", ())


class ZeroStageEnum(IntEnum):
    """The stages by name."""

    disabled, optimizer_states, gradients, weights = range(4)
    max_stage = 3


class DeepSpeedConfigModel(BaseModel):
    """A strict pydantic model; ``"auto"`` takes a field's default, and an older field hands its value on to the newer.

    That is a field whose ``json_schema_extra`` has ``deprecated``, ``new_param`` and perhaps ``new_param_fn``. Raises
    an AssertionError, as in DeepSpeed, where both are given.
    """

    model_config = ConfigDict(
        validate_default=True, validate_assignment=True, use_enum_values=True, populate_by_name=True, extra="forbid",
        arbitrary_types_allowed=True, protected_namespaces=(),
    )  # fmt: skip

    def __init__(self, strict: bool = False, **data: Any) -> None:
        super().__init__(**{key: value for key, value in data.items() if strict or value != "auto"})
        for name in sorted(self.model_fields_set):
            marks: Any = type(self).model_fields[name].json_schema_extra or {}
            if marks.get("deprecated") and marks.get("set_new_param", True):
                *places, last = marks["new_param"].split(".")
                there = reduce(getattr, places, self)
                if last in there.model_fields_set:
                    raise AssertionError(f"{name} is an older name of {marks['new_param']}: give one of them")
                setattr(there, last, marks.get("new_param_fn", lambda value: value)(getattr(self, name)))


def _model(name: str, where: str, settings: type, **more: Any) -> Any:
    """A model with what deepzero reads at ``where``, with what its tables know of there, and with ``more``."""
    hints, known = get_type_hints(settings), {path: values[0] for path, (values, _) in keys.SATISFIED.items()}
    known |= {path: rule[0] for path, rule in keys.STEERING.items()}
    known |= dict.fromkeys((*keys.MOOT, *keys.NOT_IMPLEMENTED))
    found: dict[str, Any] = {field.name: (hints[field.name], field.default) for field in fields(settings)}
    for path, default in known.items():
        if path.rpartition(".")[0] == where:
            found[path.rpartition(".")[2]] = (Any if default is None else type(default), default)
    for key in [key for key in found if key.startswith("stage3_")]:
        kind, default = found.pop(key)
        found[key.removeprefix("stage3_")] = (kind, Field(default, alias=key))
    return create_model(name, __base__=DeepSpeedConfigModel, __module__=__name__, **found | more)


def _older(name: str, make: Any) -> Any:
    return bool | None, Field(None, json_schema_extra={"deprecated": True, "new_param": name, "new_param_fn": make})


_NVME = {"nvme_path": (Any, None), "fast_init": _OFF}
DeepSpeedZeroOffloadParamConfig: Any = _model(
    "DeepSpeedZeroOffloadParamConfig", "zero_optimization.offload_param", OffloadParamConfig, **_NVME
)
_Optimizer: Any = _model("_Optimizer", "zero_optimization.offload_optimizer", OffloadOptimizerConfig, **_NVME)


class DeepSpeedZeroOffloadOptimizerConfig(_Optimizer):
    """``zero_optimization.offload_optimizer``."""

    pipeline = property(lambda self: self.pipeline_read or self.pipeline_write)


_Zero: Any = _model(
    "_Zero", "zero_optimization", ZeroConfig,
    reduce_bucket_size=(int, Field(ZeroConfig.reduce_bucket_size, gt=0)), quantization=(Any, None),
    offload_param=(DeepSpeedZeroOffloadParamConfig | None, None), cpu_offload_use_pin_memory=(bool | None, None),
    offload_optimizer=(DeepSpeedZeroOffloadOptimizerConfig | None, None), overlap_comm=(bool | None, None),
    cpu_offload=_older("offload_optimizer", lambda on: {"device": "cpu"} if on else None),
    cpu_offload_param=_older("offload_param", lambda on: {"device": "cpu"} if on else None),
    stage3_gather_fp16_weights_on_model_save=_older("gather_16bit_weights_on_model_save", bool),
)  # fmt: skip


class DeepSpeedZeroConfig(_Zero):
    """``zero_optimization`` with DeepSpeed's defaults. What does not go with its stage is refused by ``initialize``."""

    def __init__(self, **data: Any) -> None:
        super().__init__(**data)
        if self.__dict__["overlap_comm"] is None:
            self.__dict__["overlap_comm"] = self.stage == 3


_FP16: Any = _model("_FP16", "fp16", PrecisionConfig, enabled=_OFF, dtype=(str, "fp16"))
DeepSpeedBF16Config: Any = _model("DeepSpeedBF16Config", "bf16", _Nothing, enabled=_OFF, check_grad_overflow=_OFF)


class DeepSpeedFP16Config(_FP16):
    """``fp16``, its numbers checked as ``initialize`` checks them."""

    @model_validator(mode="before")
    @classmethod
    def _checked(cls, data: dict[str, Any]) -> dict[str, Any]:
        known = {field.name: data[field.name] for field in fields(PrecisionConfig) if field.name in data}
        checked = build(PrecisionConfig, known, "fp16")
        return data | {name: getattr(checked, name) for name in known}

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """What DeepSpeed's ``LossScaleConfig`` takes."""
        rest = (self.loss_scale_window, self.hysteresis, self.consecutive_hysteresis, self.min_loss_scale)
        return dict(zip(SCALE_ARGUMENTS, (2**self.initial_scale_power, *rest), strict=True))


def get_gradient_clipping(param_dict: Mapping[str, Any]) -> float:
    """The config's largest gradient norm."""
    return param_dict.get("gradient_clipping", EngineConfig.gradient_clipping)


def get_float16_config(param_dict: Mapping[str, Any]) -> Any:
    """The block ``fp16`` of a config."""
    return DeepSpeedFP16Config(**_chosen(param_dict.get("fp16") or {}))


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> Any:
    """The block ``bf16`` or ``bfloat16`` of a config."""
    return DeepSpeedBF16Config(**_chosen(param_dict.get("bf16") or param_dict.get("bfloat16") or {}))


class DeepSpeedConfig:
    """A whole config, from whatever ``initialize`` takes, with DeepSpeed's names for what is in it.

    Raises a ConfigError for what ``initialize`` would refuse, and an AssertionError, as DeepSpeed does, for batch sizes
    that do not go together. ``mpu`` and ``mesh_device`` are model parallelism's, and refused.
    """

    def __init__(self, config: Any, mpu: None = None, mesh_device: None = None) -> None:
        if mpu is not None or mesh_device is not None:
            raise ConfigError("mpu and mesh_device are for model parallelism, which deepzero does not have")
        given = self._param_dict = dict(read_mapping(config))
        settings = load_engine_config(given)
        for name in (*_BATCH, "gradient_clipping", "steps_per_print"):
            setattr(self, name, getattr(settings, name))
        block = given.get("zero_optimization")
        self.zero_optimization_stage, self.zero_enabled = settings.zero.stage, settings.zero.stage > 0
        block = _renamed(_chosen(block), "zero_optimization.") if isinstance(block, Mapping) else {}
        numbers = {key: getattr(settings.zero, key, text) for key, text in block.items() if isinstance(text, str)}
        self.zero_config = DeepSpeedZeroConfig(**{"stage": settings.zero.stage} | block | numbers)
        self.float16_config, self.bfloat16_config = get_float16_config(given), get_bfloat16_config(given)
        for name in ("optimizer", "scheduler"):
            for part in ("type", "params"):
                setattr(self, f"{name}_{part}".replace("_type", "_name"), (given.get(name) or {}).get(part))
        self.world_size = process_group.world_size() if process_group.is_initialized() else 1
        self._configure_train_batch_size()

    def _configure_train_batch_size(self) -> None:
        try:
            found = resolve_batch(EngineConfig(**{name: getattr(self, name) for name in _BATCH}), self.world_size)
        except ConfigError as error:
            raise AssertionError(str(error)) from None
        for name, value in zip(_BATCH, (found.global_batch, found.micro_batch, found.accumulation), strict=True):
            setattr(self, name, value)
