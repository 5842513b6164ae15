"""deepzero: the Zero Redundancy Optimizer, complete and readable. Public names only.

A name is loaded when it is first used, so that ``deepzero.launch`` can be imported without torch. Here the parts
that do not know each other meet: the watchdog of ``health/`` observes the process groups of ``comm/``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from deepzero.comm.flight_recorder import GroupObserver, observe_groups_with
from deepzero.version import __version__

if TYPE_CHECKING:
    from deepzero import comm, ops, utils, zero
    from deepzero.checkpoint.errors import CheckpointError
    from deepzero.compat import accelerator
    from deepzero.compat.accelerator import get_accelerator
    from deepzero.compat.comm import init_distributed
    from deepzero.compat.deepspeed_engine import DeepSpeedEngine
    from deepzero.config.strict import ConfigError
    from deepzero.runtime.engine import NonFiniteError
    from deepzero.runtime.initialize import add_config_arguments, initialize

    Engine = DeepSpeedEngine

_MODULES = {"accelerator": "compat.accelerator", "comm": "comm", "ops": "ops", "utils": "utils", "zero": "zero"}
_HOMES = {
    "CheckpointError": "checkpoint.errors",
    "ConfigError": "config.strict",
    "DeepSpeedEngine": "compat.deepspeed_engine",
    "NonFiniteError": "runtime.engine",
    "add_config_arguments": "runtime.initialize",
    "get_accelerator": "compat.accelerator",
    "init_distributed": "compat.comm",
    "initialize": "runtime.initialize",
}

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DeepSpeedEngine",
    "Engine",
    "NonFiniteError",
    "__version__",
    "accelerator",
    "add_config_arguments",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "ops",
    "utils",
    "zero",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{_MODULES[name]}")
    if name == "Engine":  # what `initialize` returns
        name = "DeepSpeedEngine"
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _watch_group() -> GroupObserver:
    from deepzero.health.desync_watchdog import watch_group

    return watch_group()


observe_groups_with(_watch_group)
