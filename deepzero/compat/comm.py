"""DeepSpeed's ``deepspeed.comm``: torch.distributed's collectives under DeepSpeed's names and keywords.

They are the script's own and stand in no ledger. What differs from torch: groups are joined by deepzero's ways
(:mod:`deepzero.comm.rendezvous`), so that no socket is open to strangers, and Python objects travel sealed.

Source: ``comm/comm.py`` of [DeepSpeed].
"""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any
from urllib.parse import urlparse

import torch.distributed as dist

from deepzero.comm import _DEEPSPEEDS, collectives, flight_recorder, process_group
from deepzero.comm.rendezvous import behind_closed_doors, discover_mpi
from deepzero.compat.utilities import TORCH_DISTRIBUTED_DEFAULT_PORT, default_pg_timeout
from deepzero.config.deepspeed_json import read_mapping
from deepzero.runtime.zero.overlap_param_gather import end_all, wait_for_all
from deepzero.utils.errors import ConfigError

is_initialized = process_group.is_initialized
get_local_rank = process_group.local_rank

NAMES = {*_DEEPSPEEDS.split(), "reduce_scatter"}  # the one is a module there
_RENAMED = {
    "all_gather_into_tensor": collectives.ALL_GATHER,
    "allgather_fn": collectives.ALL_GATHER,
    "get_all_ranks_from_group": "get_process_group_ranks",
    "inference_all_reduce": "all_reduce",
    "reduce_scatter_fn": collectives.REDUCE_SCATTER,
    "reduce_scatter_tensor": collectives.REDUCE_SCATTER,
}
"""DeepSpeed's name → torch's."""


def init_distributed(
    dist_backend: str | None = None, auto_mpi_discovery: bool = True,
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT, verbose: bool = True,
    timeout: timedelta = default_pg_timeout, init_method: str | None = None, dist_init_required: bool | None = None,
    config: Any = None, rank: int = -1, world_size: int = -1, *, backend: str | None = None,
    timeout_seconds: float | None = None,
) -> None:  # fmt: skip
    """Join the process group, and use this rank's GPU. Where the caller has joined one, do the second alone.

    Args:
        dist_backend: None: NCCL on GPUs, gloo on CPU.
        auto_mpi_discovery: without a launcher's variables take those of Open MPI, MPICH or Intel MPI. Their ranks have
            to be on one machine, or ``MASTER_ADDR`` names rank 0's.
        distributed_port: where such ranks meet; the default one yields to ``MASTER_PORT``.
        verbose: print on rank 0 what was discovered.
        timeout: of every collective; the default is ten minutes, or ``DEEPSPEED_TIMEOUT`` minutes.
        init_method: ``env://``, which is the default, ``tcp://address:port`` or ``file://path``.
        dist_init_required: False refuses to join one here.
        config: a configuration as a mapping or its file's path, for :func:`configure`.
        rank: of this process; wins over the environment's where it is not negative.
        world_size: how many ranks there are; in the same way.
        backend: deepzero's word for ``dist_backend``.
        timeout_seconds: the ``timeout`` as a number.

    Raises:
        ConfigError: an argument that cannot be used, or what the environment lacks.
        NotImplementedError: ``config`` asks for DeepSpeed's ``comms_logger``.
    """
    for ours, theirs, both in (
        ("backend", "dist_backend", None not in (backend, dist_backend)),
        ("timeout_seconds", "timeout", timeout_seconds is not None and timeout is not default_pg_timeout),
    ):
        if both:
            raise ConfigError(f"init_distributed was given {ours} and {theirs}, which are one thing: leave one out")
    dist_backend = dist_backend or backend
    timeout = timeout if timeout_seconds is None else timedelta(seconds=timeout_seconds)
    if not isinstance(timeout, timedelta):
        raise ConfigError(f"init_distributed(timeout={timeout!r}): give a datetime.timedelta, or timeout_seconds=")
    if type(auto_mpi_discovery) is not bool:
        told = f"init_distributed(auto_mpi_discovery={auto_mpi_discovery!r})"  # type: ignore[unreachable]
        raise ConfigError(f"{told}: give True or False; a time-out is timeout_seconds=")
    configure(config)
    if dist_init_required is False and not is_initialized():
        raise ConfigError("dist_init_required=False, but this process has joined no process group")
    if not is_initialized():
        if auto_mpi_discovery and rank < 0:
            discover_mpi(None if distributed_port == TORCH_DISTRIBUTED_DEFAULT_PORT else distributed_port, verbose)
        given = {"RANK": rank, "WORLD_SIZE": world_size}
        os.environ.update({name: str(value) for name, value in given.items() if value >= 0})
        place = urlparse(init_method or "env://")
        if place.scheme == "tcp":
            os.environ.update(MASTER_ADDR=place.hostname or "", MASTER_PORT=str(place.port))
        elif place.scheme != "env":
            backend = dist_backend or ("nccl" if process_group.default_device().type == "cuda" else "gloo")
            with behind_closed_doors():
                dist.init_process_group(backend, init_method, timeout, world_size, rank)
            flight_recorder.observer()  # this rank answers when others ask where it is
    process_group.init_distributed(dist_backend, timeout.total_seconds(), mpi=auto_mpi_discovery)


def configure(deepspeed_config: Any = None, enabled: bool | None = None, **details: Any) -> None:
    """Nothing to configure: a NotImplementedError where collectives shall be logged, a ConfigError for a bad file."""
    if isinstance(deepspeed_config, str | os.PathLike):
        deepspeed_config = read_mapping(deepspeed_config)
    block = deepspeed_config.get("comms_logger") if isinstance(deepspeed_config, Mapping) else None
    if enabled or (block.get("enabled") if isinstance(block, Mapping) else block):
        log_summary()


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> None:
    """Not here: a NotImplementedError, always."""
    ledger = "engine.report() has the ledger of a run, counted by category"
    raise NotImplementedError(f"deepzero has no comms_logger, which logs single collectives; {ledger}")


# ---- groups ----------------------------------------------------------------------------------------------------------


def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
    """Leave a group; without one that of all ranks, and so all."""
    wait_for_all()  # what is still on its way needs the group, and whoever asked for it has its error
    end_all()
    process_group.shutdown() if group in (None, dist.group.WORLD) else dist.destroy_process_group(group)


def new_group(ranks: list[int]) -> dist.ProcessGroup:
    """Make a group of some ranks. A collective of all."""
    with behind_closed_doors():
        return dist.new_group(ranks)


def get_world_group() -> dist.ProcessGroup | None:
    """The group of all ranks."""
    return dist.group.WORLD


def _outside(call: str, group: dist.ProcessGroup | None) -> bool:
    """Whether this rank has no part in what ``group`` does; it is told, as by torch."""
    outside = group is not None and is_initialized() and dist.get_rank(group) < 0
    if outside:
        warnings.warn(f"{call}: rank {dist.get_rank()} is not in this group and gets nothing", stacklevel=3)
    return outside


# ---- collectives -----------------------------------------------------------------------------------------------------


def all_gather_object(object_list: list[Any], obj: Any, group: dist.ProcessGroup | None = None) -> None:
    """Fill ``object_list`` with every rank's ``obj``, which pickles, in rank order. Outside the group it stays."""
    if not _outside("all_gather_object", group):
        object_list[:] = process_group.all_gather_object(obj, group)


def broadcast_object_list(
    object_list: list[Any], src: int = 0, group: dist.ProcessGroup | None = None, device: Any = None
) -> None:
    """Fill every rank's list with rank ``src``'s objects, which pickle. They travel on the backend's own ``device``."""
    if not _outside("broadcast_object_list", group):
        object_list[:] = process_group.broadcast_object(list(object_list), src, group)


def __getattr__(name: str) -> Any:
    if name in NAMES and hasattr(dist, _RENAMED.get(name, name)):
        here = getattr(dist, _RENAMED.get(name, name))
        # torch knows isend and irecv by themselves in a P2POp.
        return here if isinstance(here, type) or name in ("isend", "irecv") else _with_deepspeeds_keywords(here)
    if name.startswith("has_"):
        return lambda: name.removeprefix("has_") in __dir__()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *NAMES})


def _with_deepspeeds_keywords(call: Callable[..., Any]) -> Callable[..., Any]:
    """``call`` with DeepSpeed's names of tensors. ``log_name`` and ``debug`` label a line of the log that is not."""
    known = inspect.signature(call).parameters
    tensor = "input_tensor" if "input_tensor" in known else "input"
    names = {"output_tensor": "output", "tensor": tensor, "input_tensor": tensor}

    @functools.wraps(call)
    def forwarded(*args: Any, prof: bool = False, log_name: str = "", debug: str = "", **keywords: Any) -> Any:
        configure(enabled=prof)
        keywords = {key if key in known else names.get(key, key): value for key, value in keywords.items()}
        if call is dist.get_process_group_ranks and not args:
            keywords.setdefault("group", dist.group.WORLD)
        return call(*args, **keywords)

    return forwarded
