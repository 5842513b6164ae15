"""DeepSpeed's getters: what an engine says of its sizes, settings and last step. Nothing here changes the engine.

Source: the properties and methods of these names in ``runtime/engine.py`` of [DeepSpeed].
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from deepzero.checkpoint.checkpointer import Checkpointer
from deepzero.checkpoint.manifest import shard_name
from deepzero.comm import process_group
from deepzero.comm.flight_recorder import world_group
from deepzero.runtime import diagnostics, invariance
from deepzero.runtime.engine import Engine

_SAME = "zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients"
_ZERO = "reduce_scatter overlap_comm sub_group_size reduce_bucket_size allgather_bucket_size"
_ZERO_3 = "max_live_parameters max_reuse_distance prefetch_bucket_size param_persistence_threshold"
PLACES: dict[str, str] = {
    "gradient_clipping": "config.gradient_clipping", "steps_per_print": "config.steps_per_print",
    "zero_optimization_stage": "config.zero.stage", "zero_partial_offload": "config.zero.offload_optimizer.ratio",
    "fp16_auto_cast": "config.precision.auto_cast", "load_universal_checkpoint": "config.load_universal",
    "get_data_parallel_rank": "comm.rank",
    "train_batch_size": "batch.global_batch", "train_micro_batch_size_per_gpu": "batch.micro_batch",
    "gradient_accumulation_steps": "batch.accumulation", "was_step_applied": "state.applied",
    **{name: f"config.zero.{name}" for name in _SAME.split()},
    **{f"zero_{name}": f"config.zero.{name}" for name in _ZERO.split()},
    **{f"zero_{name}": f"config.zero.stage3_{name}" for name in _ZERO_3.split()},
}  # fmt: skip
"""Method → where its answer stands in the engine."""

ANSWERS: dict[str, Callable[[Any], Any]] = {
    "zero_optimization": lambda its: its.config.zero.stage > 0,
    "zero_optimization_partition_gradients": lambda its: its.config.zero.stage >= 2,
    "zero_optimization_partition_weights": lambda its: its.config.zero.stage == 3,
    "zero_cpu_offload": lambda its: its.config.zero.offload_optimizer.device == "cpu",
    "zero_nvme_offload_optimizer": lambda its: its.config.zero.offload_optimizer.device == "nvme",
    "zero_use_cpu_optimizer": lambda its: its.config.zero.offload_optimizer.device != "none",
    "zero_offload_optimizer": lambda its: _used(its.config.zero.offload_optimizer),
    "zero_offload_param": lambda its: _used(its.config.zero.offload_param),
    "fp16_enabled": lambda its: its.config.precision.dtype == "fp16",
    "bfloat16_enabled": lambda its: its.config.precision.dtype == "bf16",
    "initial_dynamic_scale": lambda its: 2**its.config.precision.initial_scale_power,
    "dynamic_loss_scale": lambda its: its.config.precision.dtype == "fp16" and not its.config.precision.loss_scale,
    "optimizer_name": lambda its: its.config.optimizer.target.lower() if its.config.optimizer else its._given_optimizer,
    "optimizer_params": lambda its: dict(its.config.optimizer.params) if its.config.optimizer else None,
    "scheduler_name": lambda its: its.config.scheduler.type if its.config.scheduler else None,
    "scheduler_params": lambda its: dict(its.config.scheduler.params) if its.config.scheduler else None,
    # Sizes of a step and of a micro-batch, micro-batches; the norm before clipping, ``inf`` when a step was skipped.
    "get_batch_info": lambda its: (its.batch.global_batch, its.batch.micro_batch, its.batch.accumulation),
    "get_global_grad_norm": lambda its: its.last_step.grad_norm if its.last_step is not None else None,
    "get_lr": lambda its: [group.get("lr", 0.0) for group in its.optimizer.param_groups],
    "get_mom": lambda its: [group.get("betas", group.get("momentum", 0.0)) for group in its.optimizer.param_groups],
}
"""Method → its answer, worked out of the engine."""
ALWAYS: list[tuple[Any, str]] = [
    (True, "postscale_gradients managed_gradient_accumulation checkpoint_tag_validation_enabled "
           "checkpoint_tag_validation_fail zero_contiguous_gradients "
           "zero_allgather_partitions zero_load_from_fp32_weights zero_ignore_unused_parameters zero_compute_grad_norm "
           "zero_gather_16bit_weights_on_model_save zero_allow_untested_optimizer zero_multi_rank_bucket_allreduce"),
    (False, "wall_clock_breakdown memory_breakdown dump_state flops_profiler_enabled autotuning_enabled "
            "data_efficiency_enabled data_sampling_enabled curriculum_learning_enabled random_ltd_enabled "
            "use_node_local_storage zero_elastic_checkpoint zero_legacy_stage1 "
            "zero_round_robin_gradients zero_force_ds_cpu_optimizer zero_allgather_sequential super_offload "
            "is_sanity_checks_enabled is_deepcompile_enabled is_deepcompile_active fp16_master_weights_and_gradients "
            "bf16_master_weights_and_gradients bf16_optimizer_states sparse_gradients_enabled"),
    (0, "get_tensor_parallel_rank get_model_parallel_rank zero_module_granularity_threshold"),
    (1, "autotp_size"),
    (1.0, "gradient_predivide_factor"),
    (sys.maxsize, "zero_model_persistence_threshold"),
    (None, "get_sequence_parallel_group zenflow_config"),
]  # fmt: skip
"""Answers that are the same in every run, and the methods that give them: deepzero has no other way."""

NOT_HERE = {
    "pipeline parallelism is not implemented":
        "train_batch eval_batch",
    "the profiler and the ledger of deepzero take their place":
        "timers tput_timer engine_timers get_wall_clock_timers flops_profiler print_forward_breakdown aio_config "
        "swap_tensor_config",
    "runs are logged by deepzero.monitor, or by a function in engine.on_step":
        "monitor summary_events",
    "curriculum learning, data sampling and token dropping are not implemented":
        "set_custom_curriculum_learning_schedule set_data_post_process_func data_efficiency_config "
        "data_sampling_config curriculum_learning_config random_ltd_config random_ltd_initialize",
    "gradients are reduced bucket by bucket, see engine.allreduce_gradients":
        "allreduce_bucket allreduce_and_copy allreduce_no_retain buffered_allreduce_fallback sparse_allreduce "
        "sparse_allreduce_bucket sparse_allreduce_no_retain sparse_all_gather all_gather_scalar clip_fp32_gradients",
    "there are no compiler passes of its own":
        "register_compile_pass get_compile_time get_deepcompile_backend get_deepspeed_compile_backend "
        "get_autosp_backend get_autotp_backend",
    "DeepSpeed's own mixtures of experts are not implemented":
        "load_moe_state_dict num_experts moe_layers",
}  # fmt: skip
"""Why a name is missing, and which names."""


def _used(block: Any) -> Any:
    return block if block.device != "none" else None


def _file_of_states(engine: Engine, checkpoints_path: str | Path, tag: str, expp_rank: int = 0) -> str:
    """The file of a checkpoint that has this rank's optimizer states, and the parameters that they belong to."""
    return str(Path(checkpoints_path, tag, shard_name(engine.comm.rank, engine.comm.world_size)))


class EngineGetters(Engine):
    """An :class:`Engine` with DeepSpeed's getters."""

    checkpointer: Checkpointer
    training_dataloader: DataLoader[Any] | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None

    model_numel = property(lambda self: sum(param.numel() for param in self.module.parameters()))
    stopping = property(attrgetter("state.stopping"))
    global_rank = property(attrgetter("comm.rank"))
    world_size = dp_world_size = property(attrgetter("comm.world_size"))
    data_parallel_group = seq_data_parallel_group = property(lambda self: world_group())
    client_optimizer = basic_optimizer = property(attrgetter("optimizer"))
    # With these Lightning's Fabric takes an engine for the optimizer, and its ``optimizer.step()`` is the engine's.
    param_groups, defaults = property(attrgetter("optimizer.param_groups")), property(attrgetter("optimizer.defaults"))
    inside_no_sync_ctxt = property(attrgetter("state.inside_no_sync"))
    is_compiled = property(lambda self: self.module._compiled_call_impl is not None)
    # The name of what no block names; without any the engine has no parameter groups.
    _given_optimizer = property(lambda self: type(self.optimizer).__name__ if self.optimizer.param_groups else None)
    mp_world_size = 1
    sparse_tensor_module_names: frozenset[str] = frozenset()  # nothing is reduced sparse
    mpu = seq_parallel_group = None
    pipeline_parallelism = has_moe_layers = False
    local_rank = property(lambda self: process_group.local_rank())
    device = property(attrgetter("comm.device"))
    ledger = property(attrgetter("comm.ledger"))
    stage = property(attrgetter("zero.stage"))
    on_step = property(attrgetter("callbacks.on_step"), lambda self, value: setattr(self.callbacks, "on_step", value))
    loss_scale = cur_scale = property(attrgetter("scaler.scale"))  # of the next loss; 1 outside fp16

    _get_optimizer_ckpt_name = _file_of_states

    # deepzero's own, of ``runtime/``.
    describe_bits, seed_micro_batch = invariance.describe_bits, invariance.seed_micro_batch
    describe_offload, quantization_report = diagnostics.describe_offload, diagnostics.quantization_report
    gradient_norms, params_sha256 = diagnostics.gradient_norms, diagnostics.params_sha256
    report, step_metrics = diagnostics.gather_report, diagnostics.step_metrics
    offload_report = property(attrgetter("zero.offload_report"))

    def __getattr__(self, name: str) -> Any:
        """What the engine has not is the module's, as in DeepSpeed: ``engine.generate``."""
        if isinstance(getattr(type(self), name, None), property):
            # Python asks here after an AttributeError inside a property too: raise that one, and ask no module.
            return object.__getattribute__(self, name)
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = vars(self).get("_modules", {}).get("module")
            with contextlib.suppress(AttributeError):
                return getattr(module, name)
        for why, names in NOT_HERE.items():
            if name in names.split():
                raise AttributeError(f"the engine has no {name}: {why}")
        raise AttributeError(f"neither {type(self).__name__} nor its module has an attribute {name!r}")


def _answered(name: str, answer: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def getter(self: EngineGetters) -> Any:
        return answer(self)

    getter.__name__, getter.__qualname__ = name, f"EngineGetters.{name}"
    getter.__doc__ = f"What the engine says of it. Source: ``{name}`` of [DeepSpeed]'s engine."
    return getter


GETTERS: dict[str, Callable[[Any], Any]] = {
    **{name: attrgetter(place) for name, place in PLACES.items()},
    **ANSWERS,
    **{name: partial(lambda value, _: value, value) for value, names in ALWAYS for name in names.split()},
}
for _name, _answer in GETTERS.items():
    setattr(EngineGetters, _name, _answered(_name, _answer))
