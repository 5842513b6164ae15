"""``deepzero.zero``: DeepSpeed's ``deepspeed.zero``. Public names only."""

from deepzero.runtime.zero.guards import PartitionedUseError
from deepzero.runtime.zero.module_registry import (
    register_external_parameter,
    set_z3_leaf_modules,
    unregister_external_parameter,
    unset_z3_leaf_modules,
    z3_leaf_module,
)
from deepzero.runtime.zero.partition_parameters import GatheredParameters, Init, ZeroParamStatus

MiCS_Init = Init
"""DeepSpeed's name for scripts with ``mics_shard_size``: which ranks keep what is decided by ``initialize``."""

__all__ = [
    "GatheredParameters",
    "Init",
    "MiCS_Init",
    "PartitionedUseError",
    "ZeroParamStatus",
    "register_external_parameter",
    "set_z3_leaf_modules",
    "unregister_external_parameter",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
]
