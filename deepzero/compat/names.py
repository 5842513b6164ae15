"""Constants that scripts and libraries read from DeepSpeed."""

import os
from datetime import timedelta

import torch

from deepzero.compat.import_paths import VERSION

__version_major__, __version_minor__, __version_patch__ = map(int, VERSION.split("."))
HAS_TRITON = False
MIN_SWAPPABLE_BYTES = 2**20
TORCH_DISTRIBUTED_DEFAULT_PORT = 29500
default_pg_timeout = timedelta(minutes=int(os.environ.get("DEEPSPEED_TIMEOUT", "10")))
"""How long a collective may take; minutes in the environment, as there."""


def _short(number: str | None) -> str:
    return ".".join((number or "0.0").split(".")[:2])


torch_info = {
    "version": _short(torch.__version__),
    "cuda_version": _short(torch.version.cuda),
    "hip_version": _short(torch.version.hip),
    "nccl_version": "0.0",
    "bf16_support": True,
}
"""What torch was built for; ``0.0`` where it was not, and for NCCL, which a program asks for itself."""
