"""DeepSpeed's JSON config, read strictly into :class:`~deepzero.config.engine.EngineConfig`.

Every key is one of three things: implemented, and read; *satisfied*, when deepzero's only way is what the given value
asks for, or when the block asks for nothing because it is switched off; or refused, by name, with the list of what is
implemented. None is ignored. DeepSpeed itself ignores unknown
keys at the top level, which is how a misspelt ``gradient_cliping`` trains for a week.

Our own extension stands in the same mapping under ``comm``.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from deepzero.config.engine import (
    ActivationCheckpointingConfig,
    CommConfig,
    EngineConfig,
    OptimizerConfig,
    PrecisionConfig,
    SchedulerConfig,
)
from deepzero.config.strict import ConfigError, build, convert, unknown_key
from deepzero.config.zero import OffloadOptimizerConfig, OffloadParamConfig, ZeroConfig

_SCALARS = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
    "steps_per_print",
)  # fmt: skip
_BLOCKS = (
    "activation_checkpointing", "checkpoint", "zero_optimization", "fp16", "bf16", "bfloat16", "comm", "optimizer",
    "scheduler", "data_types",
)  # fmt: skip
_DTYPE_NAMES = {
    **dict.fromkeys(("fp32", "float32"), "fp32"),
    **dict.fromkeys(("fp16", "float16", "half"), "fp16"),
    **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
}

SATISFIED: dict[str, tuple[tuple[Any, ...], str]] = {
    "zero_allow_untested_optimizer": ((True, False), "deepzero tests every optimizer by experiment"),
    "zero_force_ds_cpu_optimizer": ((True, False), "the CPU steps with any elementwise optimizer"),
    "sparse_gradients": ((False,), "a sparse gradient is filled up"),
    "prescale_gradients": ((False,), "deepzero divides after the sum"),
    "gradient_predivide_factor": ((1, 1.0), "deepzero divides after the sum"),
    "wall_clock_breakdown": ((False,), "use the profiler"),
    "memory_breakdown": ((False,), "the ledger is always on"),
    "dump_state": ((False,), ""),
    "checkpoint.load_universal": ((True, False), "every checkpoint can be loaded by any stage and number of ranks"),
    "checkpoint.tag_validation": (
        ("Warn", "Fail", "WARN", "FAIL", "warn", "fail"),
        "ranks that give different tags always raise",
    ),
    "checkpoint.use_node_local_storage": ((False,), "checkpoints lie in one folder that all ranks see"),
    "disable_allgather": ((False,), ""),
    "zero_optimization.contiguous_gradients": ((True,), "buckets are always contiguous"),
    "zero_optimization.allgather_partitions": ((True,), "parameters are published by all-gather"),
    "zero_optimization.round_robin_gradients": ((False,), "every bucket is balanced already"),
    "zero_optimization.ignore_unused_parameters": ((True,), "a parameter without gradient counts as zeros"),
    "zero_optimization.elastic_checkpoint": ((False,), ""),
    "zero_optimization.load_from_fp32_weights": ((True,), ""),
    "zero_optimization.stage3_model_persistence_threshold": (
        (sys.maxsize,),
        "leave it out: the sum of persistent parameters is not limited",
    ),
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": ((False,), "parameters are fetched by all-gather"),
    "zero_optimization.stage3_module_granularity_threshold": ((0,), "declare leaf modules with set_z3_leaf_modules"),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": (
        (True, False),
        "save_16bit_model gathers the weights when it is called",
    ),
    "zero_optimization.use_multi_rank_bucket_allreduce": ((True, False), "a bucket always goes to all of its owners"),
    "zero_optimization.mics_hierarchical_params_gather": (
        (False,),
        "no gather leaves a group of mics_shard_size ranks",
    ),
    "zero_optimization.memory_efficient_linear": ((True, False), "no view of a weight is ever saved"),
    "bf16.check_grad_overflow": ((True,), "a gradient that is not finite always stops the run"),
    "bf16.immediate_grad_update": (
        (True, False),
        "stage 2 always reduces gradients as they come, stages 0 and 1 never",
    ),
    "fp16.fp16_master_weights_and_grads": ((False,), "masters are fp32"),
    "bf16.bf16_master_weights_and_grads": ((False,), "masters are fp32"),
}
"""Keys that deepzero fulfils without reading, with the values for which that is true, and why."""

NVME_ALONE = (
    "buffer_count", "buffer_size", "fast_init", "nvme_path", "pipeline", "pipeline_read", "pipeline_write",
)  # fmt: skip
"""Keys of the offload blocks that DeepSpeed reads for NVMe alone: beside ``"device": "cpu"`` they say nothing."""

SWITCHED_OFF = (
    "amp", "comet", "comms_logger", "csv_monitor", "curriculum_learning", "data_efficiency", "eigenvalue",
    "elasticity", "flops_profiler", "hybrid_engine", "progressive_layer_drop", "tensorboard", "wandb",
)  # fmt: skip
"""Blocks of DeepSpeed's that ask for nothing while ``enabled`` is false or absent, whatever else stands in them."""

NOT_IMPLEMENTED = (
    "aio", "autotuning", "compile", "compression_training", "fp32_allreduce", "monitor_config", "nebula",
    "pipeline", "seq_parallel_communication_data_type", "sparse_attention", "tensor_parallel",
    "zero_optimization.allgather_sequential", "zero_optimization.offload_optimizer.cpuadam_cores_perc",
    "zero_optimization.offload_optimizer.super_offload", "zero_optimization.compute_grad_norm",
    "zero_optimization.enable_sanity_checks", "zero_optimization.leaf_module", "zero_optimization.legacy_stage1",
    "zero_optimization.log_trace_cache_warnings", "zero_optimization.override_module_apply",
    "zero_optimization.parameter_alignment", "zero_optimization.pipeline_loading_checkpoint",
    "zero_optimization.stage3_allgather_sequential", "zero_optimization.stage3_gather_fp16_weights_on_model_save",
    "zero_optimization.zenflow", "zero_optimization.zeropp_loco_param",
)  # fmt: skip
"""Keys that DeepSpeed has and deepzero has not, so that nobody looks for a spelling mistake in them."""

INSTEAD = {
    "zero_optimization.zeropp_loco_param": "error feedback is zero_optimization.quantization.error_feedback, a bool",
}
"""What deepzero has in their place."""


def load_engine_config(config: EngineConfig | Mapping[str, Any] | str | Path | None) -> EngineConfig:
    """Whatever ``deepzero.initialize(config=…)`` was given, as an :class:`EngineConfig`.

    Args:
        config: an EngineConfig, a mapping in DeepSpeed's shape, or the path of a JSON file with one.

    Raises:
        ConfigError: a file that is missing or is not JSON, or a setting that cannot be used.

    Example:
        >>> load_engine_config({"train_batch_size": 8, "zero_optimization": {"stage": 2}}).zero.stage
        2
    """
    if isinstance(config, EngineConfig):
        return config
    if config is None:
        raise ConfigError(
            "initialize needs config=: a DeepSpeed-style dict, the path of a JSON file, or an EngineConfig"
        )
    if isinstance(config, (str, Path)):
        config = _read_json(Path(config))
    if not isinstance(config, Mapping):
        raise ConfigError(f"config must be a mapping or the path of a JSON file, got {type(config).__name__}")
    return from_deepspeed(config)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_refuse_duplicates)
    except OSError as error:
        raise ConfigError(f"config {str(path)!r} cannot be read: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"config {str(path)!r} is not JSON: {error}") from None


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise ConfigError(f"config has {twice[0]!r} twice in one object")
    return dict(pairs)


def from_deepspeed(mapping: Mapping[str, Any]) -> EngineConfig:
    """A mapping in DeepSpeed's shape. See :func:`load_engine_config`."""
    try:
        return _read(mapping)
    except ConfigError as error:
        # The dataclasses name their keys as the command line does.
        text = re.sub(r"(?<![\w.])zero\.(?=\w)", "zero_optimization.", str(error))
        raise ConfigError(re.sub(r"(?<![\w.])precision\.(?=\w)", "fp16.", text)) from None


def _read(mapping: Mapping[str, Any]) -> EngineConfig:
    given = _drop_satisfied(_drop_switched_off(mapping), "")
    for key in given:
        if key not in (*_SCALARS, *_BLOCKS, "communication_data_type"):
            raise _refused(key, (*_SCALARS, *_BLOCKS, "communication_data_type"), "")
        if key in _SCALARS and given[key] == "auto":
            raise ConfigError(f'{key}="auto" is for a trainer to fill in; write a number')
    settings: dict[str, Any] = {key: given[key] for key in _SCALARS if given.get(key) is not None}
    settings["zero"] = build(ZeroConfig, _zero_block(given), "zero_optimization")
    settings["precision"] = _precision(given)
    settings["activation_checkpointing"] = build(
        ActivationCheckpointingConfig, _activation_checkpointing(given), "activation_checkpointing"
    )
    settings["comm"] = build(CommConfig, _block(given, "comm"), "comm")
    if given.get("optimizer") is not None:
        settings["optimizer"] = OptimizerConfig(*_typed(given, "optimizer"))
    if given.get("scheduler") is not None:
        settings["scheduler"] = SchedulerConfig(*_typed(given, "scheduler"))
    for key in _block(given, "checkpoint"):
        known = [name.removeprefix("checkpoint.") for name in SATISFIED if name.startswith("checkpoint.")]
        raise _refused(key, known, "checkpoint")
    types = _block(given, "data_types")
    for key in types:
        if key != "grad_accum_dtype":
            raise unknown_key(key, ["grad_accum_dtype"], "data_types")
    if types.get("grad_accum_dtype") is not None:
        settings["grad_accum_dtype"] = _dtype(types["grad_accum_dtype"], "data_types.grad_accum_dtype")
    if given.get("communication_data_type") is not None:
        settings["communication_data_type"] = _dtype(given["communication_data_type"], "communication_data_type")
    return build(EngineConfig, settings)


def _refused(key: str, implemented: Iterable[str], where: str) -> ConfigError:
    path = f"{where}.{key}" if where else key
    if path in NOT_IMPLEMENTED:
        instead = f": {INSTEAD[path]}" if path in INSTEAD else ""
        return ConfigError(f"{path!r} is a DeepSpeed key that deepzero does not implement; leave it out{instead}")
    return unknown_key(key, implemented, where)


def _drop_switched_off(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Without the blocks that ask for nothing; one that is switched on is refused."""
    kept = dict(mapping)
    for name in SWITCHED_OFF:
        block = kept.pop(name, None)
        if block is not None and not (isinstance(block, Mapping) and block.get("enabled", False) is False):
            raise ConfigError(
                f'{name!r} is a DeepSpeed key that deepzero does not implement; leave it out, or set "enabled": false'
            )
    return kept


def _activation_checkpointing(given: Mapping[str, Any]) -> dict[str, Any]:
    """What deepzero reads of the block; the rest asks for nothing while it is false."""
    block = given.get("activation_checkpointing")
    if block in (None, False):
        return {}
    known = [f.name for f in fields(ActivationCheckpointingConfig)]
    read = _block(given, "activation_checkpointing")
    for key, value in read.items():
        if key not in known and value is not False:
            raise ConfigError(
                f"activation_checkpointing.{key}={value!r} is not implemented; leave it out, or let it be false. "
                f"deepzero reads {', '.join(known)}; which blocks are checkpointed is the model's choice, with "
                "torch.utils.checkpoint"
            )
    return {key: value for key, value in read.items() if key in known}


def _zero_block(given: Mapping[str, Any]) -> dict[str, Any]:
    """``zero_optimization``."""
    zero = _older_words(_block(given, "zero_optimization"))
    for name, kind in (("offload_optimizer", OffloadOptimizerConfig), ("offload_param", OffloadParamConfig)):
        if name in zero:
            zero[name] = _offload_block(zero[name], kind, f"zero_optimization.{name}")
    if not isinstance(zero.get("quantization", {}), Mapping):
        raise ConfigError(f"zero_optimization.quantization={zero['quantization']!r} must be an object with settings")
    known = [f.name for f in fields(ZeroConfig)]
    for key in zero:
        if key not in known:
            raise _refused(key, known, "zero_optimization")
    return zero


def _older_words(zero: dict[str, Any]) -> dict[str, Any]:
    """``cpu_offload`` and ``cpu_offload_params``, DeepSpeed's names before the two blocks."""
    pinned = zero.pop("cpu_offload_use_pin_memory", None)
    for older, name in (("cpu_offload", "offload_optimizer"), ("cpu_offload_params", "offload_param")):
        if older in zero and convert(bool, zero.pop(older), f"zero_optimization.{older}"):
            if zero.get(name) is not None:
                raise ConfigError(f"zero_optimization.{older} is the older word for {name}; keep {name}")
            zero[name] = {"device": "cpu"} if pinned is None else {"device": "cpu", "pin_memory": pinned}
    return zero


def _offload_block(block: Any, kind: type, where: str) -> dict[str, Any]:
    """One of the two blocks; what concerns NVMe alone has nothing to say where the device is the CPU, or none."""
    if not isinstance(block, Mapping):
        raise ConfigError(f"{where}={block!r} must be an object with settings")
    given = {key: value for key, value in block.items() if value is not None and value != "auto"}
    if given.get("device") == "nvme":
        raise ConfigError(f'{where}.device="nvme" is not implemented; "cpu" is: host memory')
    known = [f.name for f in fields(kind)]
    kept = {key: value for key, value in given.items() if key not in NVME_ALONE}
    if kept.get("super_offload") is False:
        del kept["super_offload"]
    for key in kept:
        if key not in known:
            raise _refused(key, known, where)
    if kept.get("device", "none") == "none":
        # Switched off; still checked, so that switching it on later brings no surprise.
        build(
            kind, {**kept, "device": "cpu", **({"delayed_update": True} if "delay_after_steps" in kept else {})}, where
        )
        return {}
    return kept


def _drop_satisfied(mapping: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Without the keys that need no reading; a value that deepzero does not fulfil is refused."""
    kept = {}
    for key, value in mapping.items():
        rule = SATISFIED.get(f"{where}{key}")
        if rule is None:
            kept[key] = value
        elif value not in rule[0]:
            allowed = " or ".join(json.dumps(v) for v in rule[0])
            raise ConfigError(
                f"{where}{key}={value!r} is not implemented; {allowed} is" + (f": {rule[1]}" if rule[1] else "")
            )
    return kept


def _block(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = given.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name}={value!r} must be an object with settings")
    if value.get("enabled") == "auto":
        raise ConfigError(f'{name}.enabled="auto" is for a trainer to fill in; write true or false')
    # "auto" is how Hugging Face's trainer writes "take the default".
    chosen = {k: v for k, v in value.items() if v is not None and v != "auto"}
    return _drop_satisfied(chosen, f"{name}.")


def _precision(given: Mapping[str, Any]) -> PrecisionConfig:
    if "bf16" in given and "bfloat16" in given:
        raise ConfigError("bf16 and bfloat16 are two names of one block; give one of them")
    bf16 = _block(given, "bf16" if "bf16" in given else "bfloat16")
    fp16 = _block(given, "fp16")
    for name, block in (("bf16", bf16), ("fp16", fp16)):
        convert(bool, block.get("enabled", False), f"{name}.enabled")
    if bf16.get("enabled") and fp16.get("enabled"):
        raise ConfigError("bf16.enabled and fp16.enabled are both true; choose one")
    for key in bf16:
        if key != "enabled":
            raise unknown_key(key, ["enabled"], "bf16")
    # A block that is present but not enabled is still checked, so that enabling it later brings no surprise.
    scale = {key: value for key, value in fp16.items() if key != "enabled"}
    dtype = "bf16" if bf16.get("enabled") else "fp16" if fp16.get("enabled") else "fp32"
    checked = build(PrecisionConfig, {**scale, "dtype": "fp16"}, "fp16")
    return checked if dtype == "fp16" else PrecisionConfig(dtype=dtype)  # type: ignore[arg-type]


def _typed(given: Mapping[str, Any], name: str) -> tuple[str, dict[str, Any]]:
    block = given[name]
    if not isinstance(block, Mapping) or not isinstance(block.get("type"), str):
        raise ConfigError(f'{name} must be an object like {{"type": …, "params": {{…}}}}, got {block!r}')
    for key in block:
        if key not in ("type", "params"):
            raise unknown_key(key, ["type", "params"], name)
    params = block.get("params") or {}
    if not isinstance(params, Mapping):
        raise ConfigError(f"{name}.params={params!r} must be an object with settings")
    return block["type"], dict(params)


def _dtype(value: Any, where: str) -> str:
    if not isinstance(value, str) or value not in _DTYPE_NAMES:
        raise ConfigError(f"{where}={value!r} is not one of {', '.join(sorted(_DTYPE_NAMES))}")
    return _DTYPE_NAMES[value]
