"""deepzero: the Zero Redundancy Optimizer, complete and readable. Public names only."""

from deepzero import utils, zero
from deepzero.checkpoint.errors import CheckpointError
from deepzero.comm.process_group import init_distributed
from deepzero.compat.deepspeed_engine import DeepSpeedEngine
from deepzero.config.strict import ConfigError
from deepzero.runtime.engine import NonFiniteError
from deepzero.runtime.initialize import add_config_arguments, initialize
from deepzero.version import __version__

Engine = DeepSpeedEngine
"""What ``initialize`` returns."""

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DeepSpeedEngine",
    "Engine",
    "NonFiniteError",
    "__version__",
    "add_config_arguments",
    "init_distributed",
    "initialize",
    "utils",
    "zero",
]
