"""Communication: collectives over ranks, counted in the ledger. It imports nothing that launches or watches ranks.

``deepzero.comm`` is also DeepSpeed's ``deepspeed.comm``, for scripts: its names come from ``deepzero/compat/comm.py``
when they are asked for. One is taken: ``reduce_scatter`` is a module here, and there the function.
"""

from importlib import import_module
from typing import Any

_DEEPSPEEDS = (
    "P2POp ProcessGroup ReduceOp all_gather all_gather_into_tensor all_gather_object all_reduce all_to_all "
    "all_to_all_single allgather_fn barrier batch_isend_irecv broadcast broadcast_object_list configure "
    "destroy_process_group gather get_all_ranks_from_group get_global_rank get_local_rank get_rank get_world_group "
    "get_world_size has_all_gather_into_tensor has_all_reduce_coalesced has_coalescing_manager "
    "has_reduce_scatter_tensor inference_all_reduce init_distributed irecv is_available is_initialized isend "
    "log_summary monitored_barrier new_group recv reduce reduce_scatter_fn reduce_scatter_tensor scatter send"
)
"""Spelt out here: Python asks for each module of this folder as well before it imports it."""


def __getattr__(name: str) -> Any:
    if name not in _DEEPSPEEDS.split():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("deepzero.compat.comm"), name)
