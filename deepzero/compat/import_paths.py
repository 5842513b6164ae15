"""DeepSpeed's import paths, and where deepzero has what scripts take from them. One line for each of its modules.

A module's line names homes in deepzero and what is taken from each: ``home: name name``, with ``there=here`` where
deepzero calls a thing otherwise and ``*`` for all that a home has. Homes are imported when a name is asked for, the
first that has it wins. An empty line is a module that scripts import for what is below it.

What deepzero does not have on purpose stands behind ``!`` and the feature that it lacks: such names can be imported, as
scripts import more than they use, and raise when they are called.
"""

from __future__ import annotations

from typing import Any

DIFFERENCES = "docs/coming_from_deepspeed.md"
VERSION = "0.19.8"
"""The release of DeepSpeed that deepzero answers for."""

_LINES = {
    "": "deepzero: DeepSpeedEngine initialize init_distributed add_config_arguments; "
    "deepzero.compat.names: * __version__ __version_major__ __version_minor__ __version_patch__ __git_hash__ "
    "__git_branch__; "
    "deepzero.compat.accelerator: get_accelerator; deepzero.compat.log: logger log_dist; "
    "!inference engine: init_inference InferenceEngine; !tensor parallelism: tp_model_init; "
    "!pipeline parallelism: PipelineModule PipelineEngine",
    "accelerator": "deepzero.compat.accelerator: *",
    "accelerator.abstract_accelerator": "deepzero.compat.accelerator: DeepSpeedAccelerator",
    "accelerator.real_accelerator": "deepzero.compat.accelerator: *",
    "checkpoint": "deepzero.compat.checkpoint_names: *",
    "checkpoint.constants": "deepzero.compat.checkpoint_names: *",
    "checkpoint.ds_to_universal": "deepzero.compat.zero_to_fp32: main=convert_to_universal",
    "checkpoint.utils": "deepzero.compat.checkpoint_names: *",
    "comm": "deepzero.compat.comm: *",
    "comm.comm": "deepzero.compat.comm: *",
    "constants": "deepzero.compat.names: TORCH_DISTRIBUTED_DEFAULT_PORT default_pg_timeout",
    "git_version_info": "deepzero.compat.names: version git_hash git_branch",
    "launcher": "",
    "launcher.runner": "deepzero.compat.names: DEEPSPEED_ENVIRONMENT_NAME",
    "ops": "deepzero.compat.names: __compatible_ops__",
    "ops.adam": "deepzero.ops.adam: *",
    "ops.adam.cpu_adam": "deepzero.ops.adam: *",
    "ops.adam.fused_adam": "deepzero.ops.adam: *",
    "runtime": "",
    "runtime.activation_checkpointing": "",
    "runtime.base_optimizer": "",
    "runtime.config": "deepzero.config.strict: DeepSpeedConfigError=ConfigError",
    "runtime.engine": "deepzero: DeepSpeedEngine",
    "runtime.fp16": "",
    "runtime.fp16.loss_scaler": "deepzero.runtime.loss_scaler: *",
    "runtime.lr_schedules": "deepzero.runtime.lr_schedules: *",
    "runtime.zero": "deepzero.zero: *",
    "runtime.zero.partition_parameters": "deepzero.zero: *",
    "utils": "deepzero.utils: *; deepzero.compat.log: *",
    "utils.logging": "deepzero.compat.log: *",
    "utils.tensor_fragment": "deepzero.utils: *",
    "utils.zero_to_fp32": "deepzero.compat.zero_to_fp32: *",
    "utils.z3_leaf_module": "deepzero.zero: *",
    "zero": "deepzero.zero: *",
    # Features that deepzero does not have.
    "inference": "!inference engine: InferenceEngine",
    "moe": "",
    "moe.layer": "!mixture of experts: MoE",
    "pipe": "!pipeline parallelism: PipelineModule LayerSpec TiedLayerSpec",
}


def _read(line: str) -> list[tuple[str, dict[str, str]]]:
    """A line's homes, and for each the names here by the names there."""
    homes = [part.partition(": ") for part in line.split("; ") if part]
    return [
        (home, {there: here or there for there, _, here in (name.partition("=") for name in names.split())})
        for home, _, names in homes
    ]


MODULES = {("deepspeed." + path).rstrip("."): _read(line) for path, line in _LINES.items()}
"""Each module's homes, in the order in which they are asked."""


def absence(name: str) -> str:
    """The words about a name that deepzero does not have."""
    return f"deepzero, which is here in DeepSpeed's place, has no {name}; {DIFFERENCES} says what it has and what not"


def refused_class(name: str, feature: str) -> type:
    """What stands for a name that belongs to a feature which deepzero does not have: its subclasses raise as well."""

    def refuse(cls: type, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"deepzero has no {feature}, so no {name}; see {DIFFERENCES}")

    return type(name, (), {"__new__": refuse, "__doc__": f"Not in deepzero, which has no {feature}."})
