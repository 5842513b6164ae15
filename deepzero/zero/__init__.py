"""``deepzero.zero``: DeepSpeed's ``deepspeed.zero``. Public names only."""

from deepzero.compat.parameters import (
    DeepSpeedInit,
    OffloadDeviceEnum,
    OffloadStateTypeEnum,
    OnDevice,
    ZeroParamType,
    get_state_devices,
    get_z3_leaf_modules,
    is_zero_param,
    restore_init_context,
    safe_update_full_grad_vectorized,
    set_z3_leaf_module,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    shutdown_init_context,
    unwrap_model_for_generation,
    z3_leaf_parameter,
)
from deepzero.runtime.zero.module_registry import (
    register_external_parameter,
    set_z3_leaf_modules,
    unregister_external_parameter,
    unset_z3_leaf_modules,
    z3_leaf_module,
)
from deepzero.runtime.zero.partition_parameters import GatheredParameters, ZeroParamStatus
from deepzero.utils.errors import PartitionedUseError
from deepzero.zero.tiled_linear import TiledLinear, TiledLinearReturnBias

Init = MiCS_Init = DeepSpeedInit
"""The second name is for scripts with ``mics_shard_size``: which ranks keep what is decided by ``initialize``."""

__all__ = [
    "GatheredParameters",
    "Init",
    "MiCS_Init",
    "OffloadDeviceEnum",
    "OffloadStateTypeEnum",
    "OnDevice",
    "PartitionedUseError",
    "TiledLinear",
    "TiledLinearReturnBias",
    "ZeroParamStatus",
    "ZeroParamType",
    "get_state_devices",
    "get_z3_leaf_modules",
    "is_zero_param",
    "register_external_parameter",
    "restore_init_context",
    "safe_update_full_grad_vectorized",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "shutdown_init_context",
    "unregister_external_parameter",
    "unset_z3_leaf_modules",
    "unwrap_model_for_generation",
    "z3_leaf_module",
    "z3_leaf_parameter",
]
