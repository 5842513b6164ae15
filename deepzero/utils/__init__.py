"""``deepzero.utils``: what scripts import from DeepSpeed's ``deepspeed.utils``; and helpers that need nothing else.

The public names are loaded when they are asked for, so that the lowest rooms can import ``deepzero.utils.formatting``.
"""

import importlib
from typing import Any

_HOME = {
    "deepzero.runtime.zero.module_registry": ("set_z3_leaf_modules", "unset_z3_leaf_modules", "z3_leaf_module"),
    "deepzero.runtime.zero.tensor_fragment": (
        "safe_get_full_fp32_param",
        "safe_get_full_grad",
        "safe_get_full_optimizer_state",
        "safe_get_local_fp32_param",
        "safe_get_local_grad",
        "safe_get_local_optimizer_state",
        "safe_set_full_fp32_param",
        "safe_set_full_grad",
        "safe_set_full_optimizer_state",
        "safe_set_local_fp32_param",
        "safe_set_local_grad",
        "safe_set_local_optimizer_state",
    ),
}
__all__ = [name for names in _HOME.values() for name in names]


def __getattr__(name: str) -> Any:
    for module, names in _HOME.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'deepzero.utils' has no attribute {name!r}")
