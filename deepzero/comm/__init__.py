"""Communication: collectives over ranks, counted in the ledger. It imports nothing that launches or watches ranks.

``deepzero.comm`` is also DeepSpeed's ``deepspeed.comm``, for scripts: its names come from ``deepzero/compat/comm.py``
when they are asked for. One is taken: ``reduce_scatter`` is a module here, and there the function.
"""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(import_module("deepzero.compat.comm"), name)
