"""``deepzero.utils``: what scripts import from DeepSpeed's ``deepspeed.utils``; and helpers that need nothing else.

The public names are loaded when they are asked for, so that the lowest rooms can import ``deepzero.utils.formatting``.
"""

import importlib
from typing import Any

_HOME = {
    "deepzero.compat.parameters": (
        "OnDevice",
        "get_z3_leaf_modules",
        "safe_update_full_grad_vectorized",
        "set_z3_leaf_module",
        "set_z3_leaf_modules_by_name",
        "set_z3_leaf_modules_by_suffix",
        "z3_leaf_parameter",
    ),
    "deepzero.runtime.zero.module_registry": ("set_z3_leaf_modules", "unset_z3_leaf_modules", "z3_leaf_module"),
    # safe_get_full_fp32_param, safe_set_local_optimizer_state, …
    "deepzero.runtime.zero.tensor_fragment": tuple(
        f"safe_{verb}_{extent}_{what}"
        for verb, extent in (("get", "full"), ("get", "local"), ("set", "full"), ("set", "local"))
        for what in ("fp32_param", "grad", "optimizer_state")
    ),
}
__all__ = [name for names in _HOME.values() for name in names]


def __getattr__(name: str) -> Any:
    for module, names in _HOME.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'deepzero.utils' has no attribute {name!r}")
