"""DeepSpeed's import paths, and where deepzero has what scripts take from them: one table of its modules.

Modules that have the same names share an entry; ``.`` is ``deepspeed`` itself. An entry names homes in deepzero and
what is taken from each: ``home: name name``, with ``there=here`` where deepzero calls a thing otherwise and ``*`` for
all public names of a home. Homes are imported when a name is asked for; the first that has it wins. An empty entry is
of modules that scripts import for what is below them.

Two homes are none. ``=`` has words: a name's is what stands behind it, else the name in small letters. ``!`` and a
feature stand before what deepzero does not have on purpose: such names can be imported, subclassed and asked about by
``isinstance``, as scripts import more than they use, and raise when they are called.
"""

from __future__ import annotations

import functools
from typing import Any

DIFFERENCES = "docs/coming_from_deepspeed.md"
VERSION = "0.19.8"
"""The release of DeepSpeed that deepzero answers for."""

_LOG = "deepzero.compat.utilities: log_dist log_dist_once logger set_log_level_from_string warning_once"
_ESTIMATES = "!estimate by DeepSpeed's formula (tools/plan.py has its own): "
_NAMES = "deepzero.compat.optimizer_names:"
_INTERNALS = "!such step of its own: "
_CONFIG = "deepzero.compat.config_models:"
_VERSION = f"=: version={VERSION} git_hash=deepzero git_branch=deepzero"
_LINES = {
    ".": "deepzero.compat.front: initialize; deepzero: DeepSpeedEngine init_distributed add_config_arguments; "
    f"{_VERSION} __version__={VERSION} __git_hash__=deepzero __git_branch__=deepzero; "
    "deepzero.compat.utilities: HAS_TRITON __version_major__ __version_minor__ __version_patch__; "
    "deepspeed.utils: log_dist logger get_accelerator; deepspeed.comm: dist=comm; "
    "deepspeed.runtime.config: DeepSpeedConfig DeepSpeedConfigError; deepspeed.pipe: PipelineModule; "
    "deepzero.zero: OnDevice; "
    "!inference engine: init_inference InferenceEngine DeepSpeedInferenceConfig default_inference_config; "
    "!tensor parallelism: tp_model_init set_autotp_mode; !pipeline parallelism: PipelineEngine; "
    "!hybrid engine: DeepSpeedHybridEngine; !transformer kernels: DeepSpeedTransformerLayer "
    "DeepSpeedTransformerConfig replace_transformer_layer; !data loader of its own: DeepSpeedDataLoader",
    "accelerator accelerator.real_accelerator": "deepzero.compat.accelerator: *",
    "accelerator.abstract_accelerator": "deepzero.compat.accelerator: DeepSpeedAccelerator",
    "checkpoint": "deepspeed.checkpoint.constants: *; deepspeed.checkpoint.utils: *",
    "checkpoint.constants": "=: BASE_OPTIMIZER_STATE CLIP_GRAD DS_VERSION FP32_FLAT_GROUPS FP32_GROUPS LOSS_SCALER "
    "OPTIMIZER_STATE_DICT PARAM PARAM_GROUPS PARAM_SHAPES SINGLE_PARTITION_OF_FP32_GROUPS UNIVERSAL_CHECKPOINT_INFO "
    "ZERO_STAGE PARTITION_COUNT BUFFER_NAMES",
    "checkpoint.ds_to_universal": "deepzero.compat.zero_to_fp32: main=convert_to_universal",
    "checkpoint.utils": "deepzero.compat.utilities: clone_tensors_for_torch_save get_model_ckpt_name_for_rank",
    "checkpointing runtime.activation_checkpointing.checkpointing": "deepzero.compat.utilities: checkpoint configure "
    "non_reentrant_checkpoint=checkpoint",
    "comm comm.comm": f"deepzero.compat.comm: *; deepzero.compat.accelerator: get_accelerator; {_LOG}",
    "constants": "deepzero.compat.utilities: TORCH_DISTRIBUTED_DEFAULT_PORT default_pg_timeout",
    "git_version_info": f"{_VERSION}; deepzero.compat.utilities: torch_info",
    "launcher moe runtime runtime.activation_checkpointing runtime.fp16": "",
    "launcher.runner": "=: DEEPSPEED_ENVIRONMENT_NAME=.deepspeed_env; !launcher beside torchrun: main parse_args",
    "moe.layer": "!mixture of experts: MoE",
    "moe.utils": "deepzero.compat.utilities: is_moe_param split_params_into_different_moe_groups_for_optimizer",
    "ops": "deepzero.compat.utilities: __compatible_ops__=compatible_ops",
    "ops.adam ops.adam.cpu_adam ops.adam.fused_adam": "deepzero.ops.adam: *; "
    "!ZenFlow: ZenFlowCPUAdam ZenFlowSelectiveAdamW",
    "ops.lamb": "!Lamb: FusedLamb",
    "ops.lion": "!Lion: FusedLion DeepSpeedCPULion",
    "ops.adagrad": "!Adagrad on the host: DeepSpeedCPUAdagrad",
    "ops.aio ops.op_builder ops.op_builder.cpu ops.op_builder.cuda utils.groups": "deepzero.compat.utilities: *",
    "pipe runtime.pipe runtime.pipe.module": "!pipeline parallelism: PipelineModule LayerSpec TiedLayerSpec",
    "runtime.base_optimizer": f"{_NAMES} ZeROOptimizer DeepSpeedOptimizer=ZeROOptimizer",
    "runtime.bf16_optimizer": "!optimizer wrapper: BF16_Optimizer",
    "runtime.config": "deepzero.config.strict: DeepSpeedConfigError=ConfigError; =: ADAM_OPTIMIZER=adam "
    f"ADAMW_OPTIMIZER=adamw; {_CONFIG} DeepSpeedConfig ZeroStageEnum get_bfloat16_config get_float16_config "
    "get_gradient_clipping",
    "runtime.config_utils": f"{_CONFIG} DeepSpeedConfigModel",
    "runtime.constants": "=: ROUTE_TRAIN=train ROUTE_PREDICT=predict ROUTE_EVAL=eval TRAIN_BATCH_SIZE OPTIMIZER FP16 "
    "TRAIN_MICRO_BATCH_SIZE_PER_GPU GRADIENT_ACCUMULATION_STEPS GRADIENT_CLIPPING SCHEDULER BFLOAT16=bf16",
    "runtime.dataloader": "deepzero.compat.utilities: RepeatingLoader; !data loader of its own: DeepSpeedDataLoader",
    "runtime.engine": "deepzero: DeepSpeedEngine; !timers: EngineTimers",
    "runtime.fp16.fused_optimizer": "!optimizer wrapper: FP16_Optimizer",
    "runtime.fp16.loss_scaler": f"deepzero.runtime.loss_scaler: *; {_NAMES} LossScaleConfig "
    "LossScaleProfile CreateLossScaler; =: INITIAL_LOSS_SCALE=init_scale SCALE_WINDOW DELAYED_SHIFT "
    "CONSECUTIVE_HYSTERESIS MIN_LOSS_SCALE=min_scale",
    "runtime.fp16.unfused_optimizer": "!optimizer wrapper: FP16_UnfusedOptimizer",
    "runtime.lr_schedules": "deepzero.compat.lr_schedules: *",
    "runtime.pipe.engine": "!pipeline parallelism: PipelineEngine",
    "runtime.pipe.topology": "!pipeline parallelism: PipeDataParallelTopology PipeModelDataParallelTopology "
    "ProcessTopology",
    "runtime.precision_config": f"{_CONFIG} DeepSpeedBF16Config DeepSpeedFP16Config get_bfloat16_config "
    "get_float16_config",
    "runtime.swap_tensor": "deepzero.compat.utilities: MIN_SWAPPABLE_BYTES",
    "runtime.utils": "deepzero.compat.utilities: move_to_device see_memory_usage set_random_seed "
    f"required_torch_version; {_INTERNALS} CheckOverflow call_to_str clip_grad_norm_ get_global_norm get_weight_norm "
    "DummyOptim; !pipeline parallelism: partition_balanced partition_uniform PartitionedTensor",
    "runtime.zero": "deepzero.compat.front: Init=RoundedInit MiCS_Init=RoundedInit; deepzero.zero: *",
    "runtime.zero.config": f"{_CONFIG} DeepSpeedZeroConfig ZeroStageEnum DeepSpeedZeroOffloadParamConfig "
    "DeepSpeedZeroOffloadOptimizerConfig",
    "runtime.zero.contiguous_memory_allocator": "!memory that can be defragmented: ContiguousMemoryAllocator",
    "runtime.zero.linear": f"{_INTERNALS} LinearFunctionForZeroStage3 LinearModuleForZeroStage3 zero3_linear_wrap",
    "runtime.zero.mics": "deepzero.compat.front: MiCS_Init=RoundedInit",
    "runtime.zero.offload_config": "deepzero.zero: OffloadDeviceEnum OffloadStateTypeEnum; "
    f"{_CONFIG} DeepSpeedZeroOffloadParamConfig DeepSpeedZeroOffloadOptimizerConfig",
    "runtime.zero.offload_states": "deepzero.zero: get_state_devices",
    "runtime.zero.parameter_offload": f"{_NAMES} DeepSpeedZeRoOffload=NoOptimizer; {_INTERNALS} ZeROOrderedDict",
    "runtime.zero.partition_parameters zero.partition_parameters": "deepzero.compat.front: Init=RoundedInit "
    "ZeroParamStatus; deepzero.zero: *; torch: _orig_torch_arange=arange; "
    "deepzero.compat.accelerator: get_accelerator; deepspeed.runtime.zero.linear: zero3_linear_wrap; "
    "deepzero.compat.utilities: zero_wrapper_for_fp_tensor_constructor; "
    f"{_INTERNALS} AllGatherCoalescedHandle AllGatherHandle InsertPostInitMethodToModuleSubClasses "
    "MultipleAllGatherHandles partitioned_param_data_shape",
    "runtime.zero.partitioned_param_coordinator": "deepzero.runtime.zero.partitioned_param_coordinator: "
    f"PartitionedParameterCoordinator; {_INTERNALS} InflightParamRegistry",
    "runtime.zero.stage3": f"{_NAMES} DeepSpeedZeroOptimizer_Stage3; deepspeed.runtime.zero: *; "
    f"{_ESTIMATES} estimate_zero3_model_states_mem_needs estimate_zero3_model_states_mem_needs_all_live "
    "estimate_zero3_model_states_mem_needs_all_cold",
    "runtime.zero.stage_1_and_2": f"{_NAMES} DeepSpeedZeroOptimizer; {_INTERNALS} split_half_float_double; "
    f"{_ESTIMATES} estimate_zero2_model_states_mem_needs estimate_zero2_model_states_mem_needs_all_live "
    "estimate_zero2_model_states_mem_needs_all_cold",
    "runtime.zero.tiling": "deepzero.zero: TiledLinear TiledLinearReturnBias",
    "runtime.zero.utils": "deepzero.checkpoint.errors: ZeRORuntimeException=CheckpointError; "
    "deepzero.zero: is_zero_param",
    "utils": "deepzero.utils: *; deepzero.compat.utilities: *; deepzero.compat.accelerator: get_accelerator",
    "utils.init_on_device": "deepzero.zero: OnDevice",
    "utils.logging": _LOG,
    "utils.tensor_fragment": "deepzero.utils: *",
    "utils.timer": "!timers: NoopTimer SynchronizedWallClockTimer ThroughputTimer",
    "utils.torch": "deepzero.compat.utilities: required_torch_version",
    "utils.z3_leaf_module": "deepzero.zero: *",
    "utils.zero_to_fp32": "deepzero.compat.zero_to_fp32: *",
    "zero": "deepspeed.runtime.zero: *",
}


def _read(line: str) -> list[tuple[str, dict[str, str]]]:
    """A line's homes, and for each the names here by the names there."""
    homes = [part.split(":") for part in line.split("; ") if part]
    return [
        (home, {there: here or there for there, _, here in (name.partition("=") for name in names.split())})
        for home, names in homes
    ]


MODULES = {f"deepspeed.{path}".rstrip("."): _read(line) for paths, line in _LINES.items() for path in paths.split()}
"""Each module's homes, in the order in which they are asked."""


def absence(name: str) -> str:
    """The words about a name that deepzero does not have."""
    return f"deepzero, which is here in DeepSpeed's place, has no {name}; {DIFFERENCES} says what it has and what not"


@functools.cache
def refused_class(name: str, feature: str) -> type:
    """What stands for a name that belongs to a feature which deepzero does not have: its subclasses raise as well."""

    def refuse(cls: type, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"deepzero has no {feature}, so no {name}; see {DIFFERENCES}")

    return type(name, (), {"__new__": refuse, "__doc__": f"Not in deepzero, which has no {feature}."})
