"""DeepSpeed's config classes, as scripts make and read them: the rows are what DeepSpeed 0.19.8 answers."""

import math
from operator import attrgetter

import pytest
import torch
from pydantic import Field, ValidationError

from deepzero.compat.config_models import (
    DeepSpeedConfig,
    DeepSpeedConfigModel,
    DeepSpeedFP16Config,
    DeepSpeedZeroConfig,
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
    ZeroStageEnum,
    get_bfloat16_config,
)
from deepzero.compat.optimizer_names import CreateLossScaler, LossScaleConfig, LossScaleProfile
from deepzero.config.strict import ConfigError

BIG = 500_000_000


@pytest.mark.parametrize(("given", "name", "value"), [
    ({}, "stage", 0), ({"stage": ZeroStageEnum.gradients}, "stage", 2), ({}, "reduce_bucket_size", BIG),
    ({"reduce_bucket_size": 2e8}, "reduce_bucket_size", 200_000_000),
    ({"reduce_bucket_size": "auto"}, "reduce_bucket_size", BIG),
    ({"stage": 2}, "overlap_comm", False), ({"stage": 3}, "overlap_comm", True),
    ({"stage": 3, "overlap_comm": False}, "overlap_comm", False),
    ({"stage3_prefetch_bucket_size": 12}, "prefetch_bucket_size", 12),
    ({"max_reuse_distance": 12}, "max_reuse_distance", 12),
    ({"zero_hpz_partition_size": 4}, "zero_hpz_partition_size", 4),
    ({"stage3_gather_fp16_weights_on_model_save": True}, "gather_16bit_weights_on_model_save", True),
    ({}, "gather_16bit_weights_on_model_save", False), ({}, "pipeline_loading_checkpoint", False),
    ({"stage3_adaptive_prefetch_min_size": 5}, "adaptive_prefetch_min_size", 5),
    ({}, "adaptive_prefetch_max_size", BIG), ({}, "memory_efficient_linear", True),
    ({}, "round_robin_gradients", False), ({}, "zenflow", None),
    ({}, "offload_param", None), ({"offload_param": {}}, "offload_param.device", "none"),
    ({"cpu_offload_param": True}, "offload_param", DeepSpeedZeroOffloadParamConfig(device="cpu")),
    ({"cpu_offload": True}, "offload_optimizer", DeepSpeedZeroOffloadOptimizerConfig(device="cpu")),
    ({"offload_optimizer": {"ratio": 0.3}}, "offload_optimizer.ratio", 0.3),
    ({"offload_optimizer": {"pipeline_write": True}}, "offload_optimizer.pipeline", True),
    ({"offload_optimizer": {}}, "offload_optimizer.pipeline", False),
])  # fmt: skip
def test_zero_config(given, name, value):
    assert attrgetter(name)(DeepSpeedZeroConfig(**given)) == value


@pytest.mark.parametrize("given", [
    {"reduce_bucket_size": 0}, {"stagee": 1}, {"offload_param": {"device": "gpu"}}, {"stage": "two"},
])  # fmt: skip
def test_zero_config_refuses(given):
    with pytest.raises(ValidationError):
        DeepSpeedZeroConfig(**given)


@pytest.mark.parametrize(("name", "value", "words"), [
    ("loss_scale", -1, "positive"), ("loss_scale", math.inf, "finite"), ("loss_scale", math.nan, "finite"),
    ("loss_scale", True, "must be a number"), ("loss_scale", [], "must be a number"), ("loss_scale_window", 0, "small"),
    ("loss_scale_window", {}, "must be an integer"), ("min_loss_scale", -1, "too small"), ("los_scale", 1, "los_scale"),
])  # fmt: skip
def test_fp16_numbers(name, value, words):
    assert DeepSpeedFP16Config(loss_scale="3", loss_scale_window="2").loss_scale_window == 2
    with pytest.raises(ValidationError, match=words):
        DeepSpeedFP16Config(enabled=True, **{name: value})


def test_a_scripts_own_model():
    class Own(DeepSpeedConfigModel):
        count: int = 0
        word: str | None = Field(None, json_schema_extra={
            "deprecated": True, "new_param": "words", "new_param_fn": lambda word: [word]})  # fmt: skip
        words: list[str] | None = None
        size: int = Field(0, alias="size_alias")

    assert Own(word="a").words == ["a"] and Own(words=["b"]).words == ["b"]
    assert (Own(size=1).size, Own(size_alias=2).size, Own(count="auto").count) == (1, 2, 0)
    with pytest.raises(AssertionError, match="word is an older name of words"):
        Own(word="a", words=["b"])
    for wrong in ({"count": "a"}, {"words": "a"}, {"other": 1}):
        with pytest.raises(ValidationError):
            Own(**wrong)


def test_a_whole_config():
    given = {"train_batch_size": 8, "zero_optimization": {"stage": 2, "cpu_offload": True}, "fp16": {"enabled": True},
             "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}  # fmt: skip
    config = DeepSpeedConfig(given)
    sizes = config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
    assert sizes == (8, 8, 1)
    assert config.zero_enabled and config.zero_config.offload_optimizer.device == "cpu"
    assert config.float16_config.enabled and not config.bfloat16_config.enabled
    assert (config.optimizer_name, config.optimizer_params, config.scheduler_name) == ("Adam", {"lr": 0.1}, None)
    taken = {"stage": "2", "reduce_bucket_size": "5e8", "allgather_bucket_size": None, "cpu_offload_params": False}
    checked = DeepSpeedConfig({**given, "zero_optimization": taken, "bf16": {"check_grad_overflow": True}})
    assert (checked.zero_config.stage, checked.zero_config.reduce_bucket_size) == (2, 5 * 10**8)
    assert get_bfloat16_config({"bfloat16": {"enabled": True}}).enabled
    with pytest.raises(AssertionError, match="neither is given"):
        DeepSpeedConfig({})
    with pytest.raises(ConfigError, match="unknown config key"):
        DeepSpeedConfig({**given, "gradient_cliping": 1})


def test_a_loss_scale_from_deepspeeds_arguments():
    given = DeepSpeedFP16Config(initial_scale_power=8, loss_scale_window=2, hysteresis=3).dynamic_loss_scale_args()
    assert given == {"init_scale": 256, "scale_window": 2, "delayed_shift": 3, "consecutive_hysteresis": False,
                     "min_scale": 1}  # fmt: skip
    scale = LossScaleConfig(torch.float16, True, 0, given)
    assert (scale.cur_scale, scale.scale_window, scale.cur_hysteresis, scale.dynamic_loss_scale) == (256, 2, 3, True)
    assert LossScaleConfig(torch.float16, False, 128.0, None).cur_scale == 128.0
    assert LossScaleConfig(torch.bfloat16, True, 0, None).cur_scale == 1.0
    for keywords, found in (({}, (2**32, 1)), ({"profile": "unfused"}, (2**16, 0.25)),
                            ({"profile": LossScaleProfile.UNFUSED}, (2**16, 0.25)),
                            ({"profile": LossScaleProfile.FUSED}, (2**32, 1)),
                            ({"initial_dynamic_scale": 8.0}, (8, 1))):  # fmt: skip
        scale = LossScaleConfig(torch.float16, True, 0, None, **keywords)
        assert (scale.cur_scale, scale.min_loss_scale) == found and scale.use_grad_scaling
    assert not LossScaleConfig(torch.bfloat16, True, 0, None).use_grad_scaling
    with pytest.raises(ConfigError, match="fused, unfused"):
        LossScaleConfig(torch.float16, True, 0, None, profile="other")
    with pytest.raises(TypeError, match="surprise"):
        LossScaleConfig(torch.float16, True, 0, None, surprise=1)
    assert CreateLossScaler(torch.float16, 128.0, False, None).loss_scale == 128.0
    assert CreateLossScaler(torch.float16, 1.0, True, given).loss_scale == 256
    assert CreateLossScaler(torch.float32, 128.0, True, None).loss_scale == 1.0
    with pytest.raises(AssertionError, match="dynamic_loss_args"):
        CreateLossScaler(torch.float16, 128.0, True, None)
