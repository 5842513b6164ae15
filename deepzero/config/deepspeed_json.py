"""DeepSpeed's JSON config, read strictly into :class:`~deepzero.config.engine.EngineConfig`.

Every key is one of three things: implemented, and read; *satisfied*, when deepzero's only way is what the given value
asks for, or when the block asks for nothing because it is switched off; or refused, by name, with the list of what is
implemented. None is ignored. DeepSpeed itself ignores unknown keys at the top level, which is how a misspelt
``gradient_cliping`` trains for a week. Our own extension stands in the same mapping under ``comm``.
"""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields
from functools import partial
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
_IMPLEMENTED = (
    *_SCALARS, "activation_checkpointing", "checkpoint", "zero_optimization", "fp16", "bf16", "bfloat16", "comm",
    "optimizer", "scheduler", "data_types", "communication_data_type",
)  # fmt: skip
_DTYPE_NAMES = {
    **dict.fromkeys(("fp32", "float32"), "fp32"),
    **dict.fromkeys(("fp16", "float16", "half"), "fp16"),
    **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
}
_EITHER = (True, False)
_ZERO_SATISFIED: dict[str, tuple[tuple[Any, ...], str]] = {
    "contiguous_gradients": ((True,), "buckets are always contiguous"),
    "allgather_partitions": ((True,), "parameters are published by all-gather"),
    "round_robin_gradients": ((False,), "every bucket is balanced already"),
    "ignore_unused_parameters": ((True,), "a parameter without gradient counts as zeros"),
    "elastic_checkpoint": ((False,), ""),
    "load_from_fp32_weights": ((True,), ""),
    "stage3_model_persistence_threshold": (
        (sys.maxsize,),
        "leave it out: the sum of persistent parameters is not limited",
    ),
    "stage3_use_all_reduce_for_fetch_params": ((False,), "parameters are fetched by all-gather"),
    "stage3_module_granularity_threshold": ((0,), "declare leaf modules with set_z3_leaf_modules"),
    "stage3_gather_16bit_weights_on_model_save": (_EITHER, "save_16bit_model gathers the weights when it is called"),
    "use_multi_rank_bucket_allreduce": (_EITHER, "a bucket always goes to all of its owners"),
    "mics_hierarchical_params_gather": ((False,), "no gather leaves a group of mics_shard_size ranks"),
    "memory_efficient_linear": (_EITHER, "no view of a weight is ever saved"),
}
SATISFIED: dict[str, tuple[tuple[Any, ...], str]] = {
    "zero_allow_untested_optimizer": (_EITHER, "deepzero tests every optimizer by experiment"),
    "zero_force_ds_cpu_optimizer": (_EITHER, "the CPU steps with any elementwise optimizer"),
    "sparse_gradients": ((False,), "a sparse gradient is filled up"),
    "prescale_gradients": ((False,), "deepzero divides after the sum"),
    "gradient_predivide_factor": ((1, 1.0), "deepzero divides after the sum"),
    "wall_clock_breakdown": ((False,), "use the profiler"),
    "memory_breakdown": ((False,), "the ledger is always on"),
    "dump_state": ((False,), ""),
    "disable_allgather": ((False,), ""),
    "checkpoint.load_universal": (_EITHER, "every checkpoint can be loaded by any stage and number of ranks"),
    "checkpoint.tag_validation": (
        ("Warn", "Fail", "WARN", "FAIL", "warn", "fail"),
        "ranks that give different tags always raise",
    ),
    "checkpoint.use_node_local_storage": ((False,), "checkpoints lie in one folder that all ranks see"),
    **{f"zero_optimization.{key}": rule for key, rule in _ZERO_SATISFIED.items()},
    "bf16.check_grad_overflow": ((True,), "a gradient that is not finite always stops the run"),
    "bf16.immediate_grad_update": (_EITHER, "stage 2 always reduces gradients as they come, stages 0 and 1 never"),
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

_ZERO_NOT_IMPLEMENTED = (
    "allgather_sequential", "offload_optimizer.cpuadam_cores_perc", "offload_optimizer.super_offload",
    "compute_grad_norm", "enable_sanity_checks", "leaf_module", "legacy_stage1", "log_trace_cache_warnings",
    "override_module_apply", "parameter_alignment", "pipeline_loading_checkpoint", "stage3_allgather_sequential",
    "stage3_gather_fp16_weights_on_model_save", "zenflow", "zeropp_loco_param",
)  # fmt: skip
NOT_IMPLEMENTED = (
    "aio", "autotuning", "compile", "compression_training", "fp32_allreduce", "monitor_config", "nebula",
    "pipeline", "seq_parallel_communication_data_type", "sparse_attention", "tensor_parallel",
    *(f"zero_optimization.{key}" for key in _ZERO_NOT_IMPLEMENTED),
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
    try:
        return _read(config)
    except ConfigError as error:
        # The dataclasses name their keys as the command line does.
        text = re.sub(r"(?<![\w.])zero\.(?=\w)", "zero_optimization.", str(error))
        raise ConfigError(re.sub(r"(?<![\w.])precision\.(?=\w)", "fp16.", text)) from None


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=partial(_refuse_duplicates, path))
    except OSError as error:
        raise ConfigError(f"config {str(path)!r} cannot be read: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"config {str(path)!r} is not JSON: {error}") from None


def _refuse_duplicates(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    for key in sorted(keys):
        if keys.count(key) > 1:
            raise ConfigError(f"config {str(path)!r} has {key!r} twice in one object: leave one out")
    return dict(pairs)


def _read(mapping: Mapping[str, Any]) -> EngineConfig:
    given = _drop_satisfied(_drop_switched_off(mapping), "")
    _only(given, _IMPLEMENTED, "")
    for key in _SCALARS:
        if given.get(key) == "auto":
            raise ConfigError(f'{key}="auto" is for a trainer to fill in; write a number')
    settings: dict[str, Any] = {key: given[key] for key in _SCALARS if given.get(key) is not None}
    settings["zero"] = build(ZeroConfig, _zero_block(given), "zero_optimization")
    settings["precision"] = _precision(given)
    activations = _activation_checkpointing(given)
    settings["activation_checkpointing"] = build(ActivationCheckpointingConfig, activations, "activation_checkpointing")
    settings["comm"] = build(CommConfig, _block(given, "comm"), "comm")
    for name, kind in (("optimizer", OptimizerConfig), ("scheduler", SchedulerConfig)):
        if given.get(name) is not None:
            settings[name] = kind(*_typed(given, name))
    known = [name.removeprefix("checkpoint.") for name in SATISFIED if name.startswith("checkpoint.")]
    for key in _block(given, "checkpoint"):
        raise _refused(key, known, "checkpoint")
    types = _block(given, "data_types")
    _only(types, ["grad_accum_dtype"], "data_types")
    dtypes = {"data_types.grad_accum_dtype": types.get("grad_accum_dtype")}
    dtypes["communication_data_type"] = given.get("communication_data_type")
    for path, value in dtypes.items():
        if value is not None:
            if not isinstance(value, str) or value not in _DTYPE_NAMES:
                raise ConfigError(f"{path}={value!r} is not one of {', '.join(sorted(_DTYPE_NAMES))}")
            settings[path.rpartition(".")[2]] = _DTYPE_NAMES[value]
    return build(EngineConfig, settings)


def _refused(key: str, implemented: Iterable[str], where: str) -> ConfigError:
    path = f"{where}.{key}" if where else key
    if path in NOT_IMPLEMENTED:
        instead = f": {INSTEAD[path]}" if path in INSTEAD else ""
        return ConfigError(f"{path!r} is a DeepSpeed key that deepzero does not implement; leave it out{instead}")
    return unknown_key(key, implemented, where)


def _only(given: Iterable[str], known: Iterable[str], where: str) -> None:
    for key in given:
        if key not in known:
            raise _refused(key, known, where)


def _names(kind: type) -> list[str]:
    return [f.name for f in fields(kind)]


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


def _drop_satisfied(mapping: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Without the keys that need no reading; a value that deepzero does not fulfil is refused."""
    kept = {}
    for key, value in mapping.items():
        if (rule := SATISFIED.get(f"{where}{key}")) is None:
            kept[key] = value
        elif value not in rule[0]:
            why = f": {rule[1]}" if rule[1] else ""
            allowed = " or ".join(json.dumps(v) for v in rule[0])
            raise ConfigError(f"{where}{key}={value!r} is not implemented; {allowed} is{why}")
    return kept


def _block(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = given.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        switch = isinstance(value, bool) and name in ("bf16", "bfloat16", "fp16")
        example = f', like {{"enabled": {json.dumps(value)}}}' if switch else ""
        raise ConfigError(f"{name}={value!r} must be an object with settings{example}")
    if value.get("enabled") == "auto":
        raise ConfigError(f'{name}.enabled="auto" is for a trainer to fill in; write true or false')
    return _drop_satisfied(_chosen(value), f"{name}.")


def _chosen(block: Mapping[str, Any]) -> dict[str, Any]:
    """Without "auto", which is how Hugging Face's trainer writes "take the default"."""
    return {key: value for key, value in block.items() if value is not None and value != "auto"}


def _activation_checkpointing(given: Mapping[str, Any]) -> dict[str, Any]:
    """What deepzero reads of the block; the rest asks for nothing while it is false."""
    if given.get("activation_checkpointing") in (None, False):
        return {}
    known, read = _names(ActivationCheckpointingConfig), _block(given, "activation_checkpointing")
    for key, value in read.items():
        if key not in known and value is not False:
            raise ConfigError(
                f"activation_checkpointing.{key}={value!r} is not implemented; leave it out, or let it be false. "
                f"deepzero reads {', '.join(known)}; which blocks are checkpointed is the model's choice, with "
                "torch.utils.checkpoint"
            )
    return {key: value for key, value in read.items() if key in known}


def _zero_block(given: Mapping[str, Any]) -> dict[str, Any]:
    """``zero_optimization``, also with ``cpu_offload`` and ``cpu_offload_params``, the names before the two blocks."""
    zero = _block(given, "zero_optimization")
    pinned = zero.pop("cpu_offload_use_pin_memory", None)
    for older, name in (("cpu_offload", "offload_optimizer"), ("cpu_offload_params", "offload_param")):
        if older in zero and convert(bool, zero.pop(older), f"zero_optimization.{older}"):
            if zero.get(name) is not None:
                raise ConfigError(f"zero_optimization.{older} is the older word for {name}; keep {name}")
            zero[name] = {"device": "cpu"} if pinned is None else {"device": "cpu", "pin_memory": pinned}
    for name, kind in (("offload_optimizer", OffloadOptimizerConfig), ("offload_param", OffloadParamConfig)):
        if name in zero:
            zero[name] = _offload_block(zero[name], kind, f"zero_optimization.{name}")
    if not isinstance(zero.get("quantization", {}), Mapping):
        raise ConfigError(f"zero_optimization.quantization={zero['quantization']!r} must be an object with settings")
    _only(zero, _names(ZeroConfig), "zero_optimization")
    return zero


def _offload_block(block: Any, kind: type, where: str) -> dict[str, Any]:
    """One of the two blocks; what concerns NVMe alone has nothing to say where the device is the CPU, or none."""
    if not isinstance(block, Mapping):
        raise ConfigError(f"{where}={block!r} must be an object with settings")
    kept = {key: value for key, value in _chosen(block).items() if key not in NVME_ALONE}
    if kept.get("device") == "nvme":
        raise ConfigError(f'{where}.device="nvme" is not implemented; "cpu" is: host memory')
    if kept.get("super_offload") is False:
        del kept["super_offload"]
    _only(kept, _names(kind), where)
    if kept.get("device", "none") == "none":
        # Switched off; still checked, so that switching it on later brings no surprise.
        delayed = {"delayed_update": True} if "delay_after_steps" in kept else {}
        build(kind, {**kept, "device": "cpu", **delayed}, where)
        return {}
    return kept


def _precision(given: Mapping[str, Any]) -> PrecisionConfig:
    if "bf16" in given and "bfloat16" in given:
        raise ConfigError("bf16 and bfloat16 are two names of one block; give one of them")
    bf16, fp16 = _block(given, "bf16" if "bf16" in given else "bfloat16"), _block(given, "fp16")
    for name, block in (("bf16", bf16), ("fp16", fp16)):
        convert(bool, block.get("enabled", False), f"{name}.enabled")
    if bf16.get("enabled") and fp16.get("enabled"):
        raise ConfigError("bf16.enabled and fp16.enabled are both true; choose one")
    _only(bf16, ["enabled"], "bf16")
    # A block that is present but not enabled is still checked, so that enabling it later brings no surprise.
    scale = {key: value for key, value in fp16.items() if key != "enabled"}
    checked = build(PrecisionConfig, {**scale, "dtype": "fp16"}, "fp16")
    return checked if fp16.get("enabled") else PrecisionConfig("bf16" if bf16.get("enabled") else "fp32")


def _typed(given: Mapping[str, Any], name: str) -> tuple[str, dict[str, Any]]:
    block = given[name]
    if not isinstance(block, Mapping) or not isinstance(block.get("type"), str):
        raise ConfigError(f'{name} must be an object like {{"type": …, "params": {{…}}}}, got {block!r}')
    known = ("type", "params")
    for key in block:
        if key not in known and not difflib.get_close_matches(str(key), known):
            where = f'settings of the {name} itself stand in "params": {{"type": …, "params": {{"{key}": …}}}}'
            raise ConfigError(f"unknown config key {f'{name}.{key}'!r}: {where}")
    _only(block, known, name)
    params = block.get("params") or {}
    if not isinstance(params, Mapping):
        raise ConfigError(f"{name}.params={params!r} must be an object with settings")
    return block["type"], dict(params)
