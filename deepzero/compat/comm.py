"""DeepSpeed's ``deepspeed.comm``: torch.distributed's collectives under DeepSpeed's names and keywords.

They are the script's own and stand in no ledger. What differs from torch: groups are joined by deepzero's ways
(:mod:`deepzero.comm.rendezvous`), so that no socket is open to strangers, and Python objects travel sealed.

Source: ``comm/comm.py`` of [DeepSpeed].
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlparse

import torch.distributed as dist
from torch.distributed import ProcessGroup, ReduceOp

from deepzero.comm import collectives, flight_recorder, process_group
from deepzero.comm.process_group import is_initialized
from deepzero.comm.rendezvous import behind_closed_doors
from deepzero.compat.log import log_dist
from deepzero.compat.names import TORCH_DISTRIBUTED_DEFAULT_PORT, default_pg_timeout
from deepzero.utils.errors import ConfigError

get_local_rank = process_group.local_rank
_SAME = (
    "all_gather all_reduce all_to_all all_to_all_single barrier batch_isend_irecv broadcast gather irecv is_available "
    "isend monitored_barrier recv reduce reduce_scatter scatter send get_global_rank get_rank get_world_size P2POp"
)
"""What torch has under the same name."""
_RENAMED = {
    "all_gather_into_tensor": collectives.ALL_GATHER,
    "allgather_fn": collectives.ALL_GATHER,
    "get_all_ranks_from_group": "get_process_group_ranks",
    "inference_all_reduce": "all_reduce",
    "reduce_scatter_fn": collectives.REDUCE_SCATTER,
    "reduce_scatter_tensor": collectives.REDUCE_SCATTER,
}
"""DeepSpeed's name → torch's."""
_MPI = [
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
]
"""What Open MPI, and MPICH and Intel MPI, tell their processes; in the order of :data:`_RANKS`."""
_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
NO_LOG = "deepzero has no log of single collectives; engine.report() has the ledger of a run, counted by category"


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta = default_pg_timeout,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Join the process group, and use this rank's GPU. Where the caller has joined one, do the second alone.

    Args:
        dist_backend: None: NCCL on GPUs, gloo on CPU.
        auto_mpi_discovery: without a launcher's variables take those of Open MPI, MPICH or Intel MPI. Their ranks have
            to be on one machine, or ``MASTER_ADDR`` names rank 0's.
        distributed_port: where such ranks meet.
        verbose: log on rank 0 what was discovered.
        timeout: of every collective; the default is ten minutes, or ``DEEPSPEED_TIMEOUT`` minutes.
        init_method: ``env://``, which is the default, ``tcp://address:port`` or ``file://path``.
        dist_init_required: False refuses to join one here.
        config: only its ``comms_logger`` is asked for, which has to be off.
        rank: of this process; wins over the environment's where it is not negative.
        world_size: how many ranks there are; in the same way.

    Raises:
        ConfigError: an argument that cannot be used, or what the environment lacks.
    """
    if not isinstance(timeout, timedelta):
        raise ConfigError(f"init_distributed(timeout={timeout!r}): give a datetime.timedelta")
    configure(config)
    if dist_init_required is False and not is_initialized():
        raise ConfigError("dist_init_required=False, but this process has joined no process group")
    if not is_initialized():
        if auto_mpi_discovery and "RANK" not in os.environ and rank < 0:
            _discover_mpi(distributed_port, verbose)
        given = {"RANK": rank, "WORLD_SIZE": world_size}
        os.environ.update({name: str(value) for name, value in given.items() if value >= 0})
        place = urlparse(init_method or "env://")
        if place.scheme == "tcp":
            os.environ.update(MASTER_ADDR=place.hostname or "", MASTER_PORT=str(place.port))
        elif place.scheme != "env":
            with behind_closed_doors():
                backend = dist_backend or ("nccl" if process_group.default_device().type == "cuda" else "gloo")
                dist.init_process_group(
                    backend, init_method=init_method, timeout=timeout, rank=rank, world_size=world_size
                )
            flight_recorder.observer()
    process_group.init_distributed(dist_backend, timeout.total_seconds())


def _discover_mpi(port: int, verbose: bool) -> None:
    """Set a launcher's variables from those of an MPI, where this process is one of its ranks."""
    for names in _MPI:
        if names[0] in os.environ:
            found = {ours: os.environ[name] for ours, name in zip(_RANKS, names, strict=True) if name in os.environ}
            if found.get("LOCAL_WORLD_SIZE") == found["WORLD_SIZE"]:
                found["MASTER_ADDR"] = "127.0.0.1"
            os.environ.update({"MASTER_PORT": str(port), **found})
            if verbose and found["RANK"] == "0":
                log_dist(f"ranks by MPI: {found}")
            return


def destroy_process_group(group: ProcessGroup | None = None) -> None:
    """Leave a group; without one that of all ranks, and so all."""
    process_group.shutdown() if group in (None, dist.group.WORLD) else dist.destroy_process_group(group)


def new_group(ranks: list[int]) -> ProcessGroup:
    """Make a group of some ranks. A collective of all."""
    with behind_closed_doors():
        return dist.new_group(ranks)


def get_world_group() -> ProcessGroup | None:
    """The group of all ranks."""
    return dist.group.WORLD


def initialize_mesh_device(mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]) -> Any:
    """Torch's device mesh over all ranks."""
    with behind_closed_doors():
        return dist.init_device_mesh(
            process_group.default_device().type, mesh_shape, mesh_dim_names=tuple(mesh_dim_names)
        )


# ---- Python objects: sealed, since what arrives is unpickled ---------------------------------------------------------


def all_gather_object(object_list: list[Any], obj: Any, group: ProcessGroup | None = None) -> None:
    """Fill ``object_list`` with every rank's ``obj``, which pickles, in rank order."""
    object_list[:] = process_group.all_gather_object(obj, group)


def broadcast_object_list(
    object_list: list[Any], src: int = 0, group: ProcessGroup | None = None, device: Any = None
) -> None:
    """Fill every rank's list with rank ``src``'s objects, which pickle. ``device``: always the backend's own."""
    object_list[:] = process_group.broadcast_object(list(object_list), src, group)


# ---- several tensors at once -----------------------------------------------------------------------------------------


def all_gather_coalesced(outputs: list[Any], inputs: list[Any], group: Any = None, async_op: bool = False) -> Any:
    """:func:`all_gather_into_tensor` of each input into the output beside it."""
    gather = getattr(dist, collectives.ALL_GATHER)
    return _all_of([gather(*pair, group, True) for pair in zip(outputs, inputs, strict=True)], async_op)


def all_reduce_coalesced(tensors: list[Any], op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
    """:func:`all_reduce` of each tensor."""
    return _all_of([dist.all_reduce(tensor, op, group, True) for tensor in tensors], async_op)


def _all_of(works: list[Any], async_op: bool) -> Any:
    handle = SimpleNamespace(wait=lambda: [work.wait() for work in works])
    return handle if async_op else handle.wait()


# ---- what is named as in torch ---------------------------------------------------------------------------------------


def __getattr__(name: str) -> Any:
    if name.startswith("has_") and name[4:] in __dir__():
        return lambda: True
    if name not in _RENAMED and name not in _SAME.split():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    here = getattr(dist, _RENAMED.get(name, name))
    # torch knows the two by themselves in a P2POp.
    return here if name in ("P2POp", "isend", "irecv") else _with_deepspeeds_keywords(here)


def __dir__() -> list[str]:
    return sorted({*globals(), *_RENAMED, *_SAME.split()})


def _with_deepspeeds_keywords(call: Callable[..., Any]) -> Callable[..., Any]:
    """``call`` with DeepSpeed's names of tensors. ``log_name`` and ``debug`` label an entry of a log that is not."""
    known = inspect.signature(call).parameters
    names = {"output_tensor": "output", "tensor": "input", "input_tensor": "input"}
    if "input_tensor" in known:
        names = {"tensor": "input_tensor"}

    @functools.wraps(call)
    def forwarded(*args: Any, prof: bool = False, log_name: str = "", debug: str = "", **keywords: Any) -> Any:
        if prof:
            raise NotImplementedError(f"{call.__name__}(prof=True): {NO_LOG}")
        keywords = {key if key in known else names.get(key, key): value for key, value in keywords.items()}
        if call is dist.get_process_group_ranks and not args:
            keywords.setdefault("group", dist.group.WORLD)
        return call(*args, **keywords)

    return forwarded


def configure(deepspeed_config: Any = None, enabled: bool | None = None, **details: Any) -> None:
    """Nothing to configure: the log of collectives is off.

    Raises:
        NotImplementedError: it shall be on.
    """
    found = deepspeed_config if isinstance(deepspeed_config, Mapping) else {}
    if enabled or found.get("comms_logger", {}).get("enabled"):
        raise NotImplementedError(f"comms_logger: {NO_LOG}")


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> None:
    """Not here.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(f"log_summary: {NO_LOG}")
