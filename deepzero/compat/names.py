"""Constants that scripts and libraries read from DeepSpeed."""

import os
from datetime import timedelta

from deepzero.compat.import_paths import VERSION as __version__

version = __version__
git_hash = git_branch = __git_hash__ = __git_branch__ = "deepzero"
__version_major__, __version_minor__, __version_patch__ = map(int, version.split("."))
TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
default_pg_timeout = timedelta(minutes=int(os.environ.get("DEEPSPEED_TIMEOUT", "10")))
"""How long a collective may take; minutes in the environment, as there."""
DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"
"""The file that launchers on several machines read variables from."""
__compatible_ops__ = {"cpu_adam": True, "fused_adam": True, "utils": True, "async_io": False}
"""DeepSpeed's compiled operations by name, and whether deepzero has them: those of Adam need no compiler here."""
HAS_TRITON = False
