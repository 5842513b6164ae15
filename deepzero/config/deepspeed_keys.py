"""DeepSpeed's keys that deepzero does not read, and what becomes of each, in tables.

Source: [DeepSpeed], ``runtime/config.py``, ``runtime/zero/config.py`` and ``runtime/zero/offload_config.py``.
"""

from __future__ import annotations

import sys
from dataclasses import fields
from typing import Any

from deepzero.config.zero import ZeroConfig

_ON_OR_OFF = (True, False)
_OFF_OR_ON = (False, True)
_NO = (False,)
_Rules = dict[str, tuple[tuple[Any, ...], str]]
_ZERO_SATISFIED: _Rules = {
    "ignore_unused_parameters": ((True,), "a parameter without gradient counts as zeros"),
    "legacy_stage1": (_NO, "there is one stage 1"),
    "log_trace_cache_warnings": (_OFF_OR_ON, "rank 0 says when modules come in another order, the 1st and 10th time"),
    "memory_efficient_linear": (_ON_OR_OFF, "autograd keeps no view of a weight from a forward pass"),
    "override_module_apply": (_ON_OR_OFF, "a later constructor may write to what is partitioned"),
    "parameter_alignment": (_OFF_OR_ON, "every parameter starts aligned"),
    "stage3_model_persistence_threshold": ((sys.maxsize,), "lower stage3_param_persistence_threshold instead"),
    "stage3_gather_16bit_weights_on_model_save": (_OFF_OR_ON, "save_16bit_model gathers the weights when called"),
    "use_multi_rank_bucket_allreduce": (_ON_OR_OFF, "a bucket always goes to all of its owners"),
}
SATISFIED: _Rules = {
    "zero_allow_untested_optimizer": (_OFF_OR_ON, "each is tried; false refuses in DeepSpeed's place alone"),
    "zero_force_ds_cpu_optimizer": (_ON_OR_OFF, "any elementwise one will do; true refuses in DeepSpeed's place"),
    "gradient_allreduce_op": (("mean",), "a gradient is the mean over ranks; multiply the loss for a sum"),
    "managed_gradient_accumulation": ((True,), "see set_gradient_accumulation_boundary"),
    "disable_allgather": (_NO, "parameters are published by all-gather"),
    "disable_python_gc": (_NO, "call gc.disable() in the script"),
    "sequence_parallel_size": ((1,), "there is no sequence parallelism"),
    "checkpoint.tag_validation": (
        ("WARN", "FAIL", "IGNORE", "Warn", "Fail", "Ignore", "warn", "fail", "ignore"),
        "ranks that give different tags always raise",
    ),
    "checkpoint.use_node_local_storage": (_NO, "checkpoints lie in one folder that all ranks see"),
    **{f"zero_optimization.{key}": rule for key, rule in _ZERO_SATISFIED.items()},
    "bf16.immediate_grad_update": (_OFF_OR_ON, "overlap_comm, or stages 2 and 3, reduce gradients as they come"),
    "bf16.bf16_master_weights_and_grads": (_NO, "masters are fp32"),
    "bf16.bf16_optimizer_states": (_NO, "the optimizer's states are fp32"),
    "fp16.fp16_master_weights_and_grads": (_NO, "masters are fp32"),
}
"""Keys that deepzero fulfils without reading, with the values for which that is true, DeepSpeed's default first, and
why."""

_ZERO_STEERING: dict[str, tuple[bool | int, str]] = {
    "contiguous_gradients": (True, "buckets are always contiguous"),
    "allgather_partitions": (True, "parameters are published by all-gather"),
    "round_robin_gradients": (False, "every bucket is balanced already"),
    "elastic_checkpoint": (False, "every checkpoint can be loaded by any number of ranks"),
    "load_from_fp32_weights": (True, "masters are always restored from fp32 values"),
    "pipeline_loading_checkpoint": (False, "a rank reads nothing but its own part of a checkpoint"),
    "compute_grad_norm": (True, "the norm travels with the ranks' agreement on a step"),
    "enable_sanity_checks": (False, "the checks are always on"),
    "mics_hierarchical_params_gather": (False, "no gather leaves a group of mics_shard_size ranks"),
    "stage3_use_all_reduce_for_fetch_params": (False, "parameters are fetched by all-gather"),
    "stage3_allgather_sequential": (False, "parameters are gathered into their place, without a copy"),
    "stage3_adaptive_prefetch_bucket_size": (False, "how far to fetch ahead is planned before the step"),
    "stage3_adaptive_prefetch_min_size": (10_000_000, "how far to fetch ahead is planned before the step"),
    "stage3_adaptive_prefetch_max_size": (500_000_000, "how far to fetch ahead is planned before the step"),
    "stage3_module_granularity_threshold": (0, "a bucket is fetched at once, however small its modules are"),
}
_IN_MODEL = "what is computed again is the model's choice, by torch.utils.checkpoint"
STEERING: dict[str, tuple[bool | int | float, str]] = {
    "prescale_gradients": (False, "the mean is the same: gradients are divided once, at the end"),
    "gradient_predivide_factor": (1.0, "the mean is the same: gradients are divided once, at the end"),
    "wall_clock_breakdown": (False, "nothing is printed; in torch.profiler the phases of a step have names"),
    "sparse_gradients": (False, "a sparse gradient is filled up, and the mean is the same"),
    "memory_breakdown": (False, "nothing is printed; engine.report() has the ledger"),
    "dump_state": (False, "nothing is printed"),
    **{f"zero_optimization.{key}": rule for key, rule in _ZERO_STEERING.items()},
    "activation_checkpointing.partition_activations": (False, "no two ranks share a model's activations"),
    "activation_checkpointing.contiguous_memory_optimization": (False, _IN_MODEL),
    "activation_checkpointing.number_checkpoints": (0, _IN_MODEL),
    "activation_checkpointing.synchronize_checkpoint_boundary": (False, _IN_MODEL),
    "activation_checkpointing.profile": (False, "nothing is printed"),
    "optimizer.torch_adam": (False, "torch_adam is read among the optimizer's params"),
    "optimizer.legacy_fusion": (False, "there is one optimizer for fp16"),
}
"""Keys whose every value leads to the same training, with DeepSpeed's default, and what happens here."""

NVME_ALONE = (
    "buffer_count", "buffer_size", "fast_init", "nvme_path", "pipeline", "pipeline_read", "pipeline_write",
)  # fmt: skip
"""Keys of the offload blocks that DeepSpeed reads for NVMe alone: beside ``"device": "cpu"`` they say nothing."""
NVME_MOOT = {"fast_init": bool, "pipeline": bool}
"""Those that say nothing beside ``"device": "nvme"`` either: a new file is zero, ``pipeline`` follows from others."""

MOOT: dict[str, tuple[type, str]] = {
    "aio": (dict, "libaio"),
    "pipeline": (dict, "a PipelineModule"),
    "seq_parallel_communication_data_type": (str, "sequence parallelism"),
    "use_data_before_expert_parallelism": (bool, "parallel experts"),
    "vocabulary_size": (int, "a warning of DeepSpeed's"),
    "zero_optimization.save_muon_momentum_buffer_in_memory": (bool, "Muon beside NVMe"),
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": (float, "super_offload"),
}
"""Keys that concern something alone which deepzero has not, so that they say nothing: the kind of value, and what."""

DOTTED = tuple(
    f"zero_optimization.{size}"
    for size in ("reduce_bucket_size", "stage3_param_persistence_threshold", "stage3_prefetch_bucket_size")
)
"""Keys of one word with a dot, at the top: TRL writes these, of the engine that a reference model gets, where nobody
looks for a size. They change no result."""

SWITCHED_OFF = (
    "amp", "autotuning", "comet", "comms_logger", "csv_monitor", "curriculum_learning", "data_efficiency", "eigenvalue",
    "elasticity", "expert_parallel", "flops_profiler", "hybrid_engine", "nebula", "progressive_layer_drop",
    "tensorboard", "torch_autocast", "wandb", "compile", "tensor_parallel",
)  # fmt: skip
"""Blocks of DeepSpeed's that ask for nothing while their switch is false or absent, whatever else stands in them."""
SWITCH: dict[str, tuple[str, tuple[Any, ...]]] = {
    "compile": ("deepcompile", (False,)),
    "tensor_parallel": ("autotp_size", (0, 1)),
}
"""The switch's name where it is not ``enabled``, and what is off."""
INSIDE = {
    "compile": (
        "deepcompile", "autoep_non_moe", "free_activation", "free_activation_threshold", "offload_activation",
        "offload_activation_pin_memory", "offload_opt_states", "double_buffer", "symmetric_memory", "debug_log",
        "offload_parameters", "sync_before_reduce", "sync_after_reduce", "sync_before_allgather",
        "sync_after_allgather", "keep_int_input_tensors", "keep_all_input_tensors", "passes",
    ),
    "aio": (
        "block_size", "queue_depth", "intra_op_parallelism", "thread_count", "single_submit", "overlap_events",
        "use_gds",
    ),
    "tensor_parallel.tp": ("enabled", "tp_size", "tp_grain_size", "mpu", "tp_group"),
    "tensor_parallel": (
        "dtype", "autotp_size", "tp_overlap_comm", "vocab_parallel_lm_head", "vocab_parallel_ce_backend",
        "tensor_parallel", "tp", "injection_policy_tuple", "partition_config", "preset_model", "keep_module_on_host",
        "replace_with_kernel_inject", "kernel_inject",
    ),
}  # fmt: skip
"""All that may stand in these blocks, where nothing else would find a misspelt word."""

_ZERO_NOT_IMPLEMENTED = ("leaf_module", "offload_optimizer.super_offload", "zenflow", "zeropp_loco_param")
NOT_IMPLEMENTED = (
    "compression_training", "data_types.buffer_dtype", "data_types.keep_in_fp32_modules", "data_types.param_dtype",
    "datastates_ckpt", "ddp_bf16", "fp32_allreduce", "graph_harvesting", "log_level", "monitor_config",
    "quantize_training", "sparse_attention", "timers", "weight_quantization", "checkpoint.parallel_write",
    "checkpoint.writer", "checkpoint.checkpoint_serialization",
    *(f"zero_optimization.{key}" for key in _ZERO_NOT_IMPLEMENTED),
)  # fmt: skip
"""Keys that DeepSpeed has and deepzero has not, so that nobody looks for a spelling mistake in them."""
BY_PRESENCE: dict[str, tuple[Any, ...]] = {
    "zero_optimization.zenflow": (False,),
    "zero_optimization.zeropp_loco_param": (),
}
"""Those that are switched on by any block, an empty one too, with the values beside null that ask for nothing."""

INSTEAD = {
    "amp": "use bf16 or fp16",
    "torch_autocast": "use bf16 or fp16",
    "fp32_allreduce": 'write "communication_data_type": "fp32"',
    "flops_profiler": "use profiler=torch",
    "csv_monitor": "metrics.jsonl has what train.py measures",
    "elasticity": "a checkpoint can be loaded by any number of ranks",
    "zero_optimization.leaf_module": "call deepzero.zero.set_z3_leaf_modules before initialize",
    "zero_optimization.zeropp_loco_param": (
        "it is of older DeepSpeeds; error feedback is zero_optimization.quantization.error_feedback, a bool"
    ),
}
"""What deepzero has in their place."""

OLDER = {
    "bfloat16": "bf16",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
    "zero_optimization.cpu_offload_params": "cpu_offload_param",
    **{
        f"zero_optimization.{key.removeprefix('stage3_')}": key
        for key in (*(field.name for field in fields(ZeroConfig)), *_ZERO_SATISFIED, *_ZERO_STEERING)
        if key.startswith("stage3_")
    },
}  # fmt: skip
"""Other spellings that DeepSpeed reads, with the one that is read here: the names before a change, those of fields."""
