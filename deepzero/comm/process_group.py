"""The process group: joining it, leaving it, and small talk between ranks (Python objects, not tensors).

``deepzero.initialize`` joins by itself when nobody has: with torchrun's environment variables where they are set, else
as a world of one rank, so that a script runs unchanged on a laptop without a launcher.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deepzero.comm import groups, pretended, watchdog
from deepzero.comm.meeting import agents_store, shared_by_attempts
from deepzero.config.parse import ConfigError

LAUNCH_FOLDER_VARIABLE = "DEEPZERO_LAUNCH_FOLDER"
"""The launcher names its folder for this attempt to start ranks, and finds in it …"""
JOINED = "joined"
"""… this file, once a rank has joined the process group."""
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def is_initialized() -> bool:
    """Whether this process has joined a group."""
    return pretended.current() is not None or _has_joined()


def _has_joined() -> bool:
    return dist.is_available() and dist.is_initialized()


def local_rank() -> int:
    """This rank's number on its machine, as the launcher says; 0 without a launcher."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def default_device() -> torch.device:
    """The GPU of this rank where there is one, else the CPU. ``DEEPZERO_DEVICE=cpu`` keeps a run off the GPUs."""
    if pretended.current() is not None:
        return torch.device("meta")
    if os.environ.get("DEEPZERO_DEVICE", "") == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank() % torch.cuda.device_count())


def init_distributed(backend: str | None = None, timeout_seconds: float = 600.0) -> None:
    """Join the process group; does nothing when this process has joined one already.

    Args:
        backend: ``gloo``, ``nccl`` or None for NCCL on GPUs and gloo on CPU.
        timeout_seconds: a collective that takes longer raises.

    Raises:
        ConfigError: some but not all of the launcher's environment variables are set.
    """
    if is_initialized():
        return
    device = default_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = backend or ("nccl" if device.type == "cuda" else "gloo")
    timeout = timedelta(seconds=timeout_seconds)
    present = [name for name in _LAUNCHER_VARIABLES if name in os.environ]
    device_id = device if backend == "nccl" else None
    if not present:
        # A world of one needs no network: a file of our own is the meeting point.
        handle, path = tempfile.mkstemp(prefix="deepzero-store-")
        os.close(handle)
        alone = dist.FileStore(path, 1)
        dist.init_process_group(backend, store=alone, rank=0, world_size=1, timeout=timeout, device_id=device_id)
        return
    if len(present) < len(_LAUNCHER_VARIABLES):
        missing = sorted(set(_LAUNCHER_VARIABLES) - set(present))
        raise ConfigError(
            f"{', '.join(present)} are set but {', '.join(missing)} are not; start with torchrun, or unset all"
        )
    if shared_by_attempts():
        store, rank, size = agents_store(timeout), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout, device_id=device_id)
    else:
        dist.init_process_group(backend, timeout=timeout, device_id=device_id)
    watchdog.current()  # from now on this rank answers when others ask where it is
    if folder := os.environ.get(LAUNCH_FOLDER_VARIABLE):
        with contextlib.suppress(OSError):  # a process that has outlived the launch
            Path(folder, JOINED).touch()


def shutdown() -> None:
    """Leave the process group, if this process has joined one."""
    if _has_joined():
        watchdog.leave("has left the process group")
        groups.forget()
        dist.destroy_process_group()


def backend_for(device: torch.device) -> str:
    """The backend that serves tensors of ``device``: a group may have one for each kind of device (``cpu:gloo,…``)."""
    if (who := pretended.current()) is not None:
        return who.backend
    if not _has_joined():
        return "none"
    return dist.group.WORLD._get_backend(device).name()  # type: ignore[union-attr]


def rank() -> int:
    """This process's number; 0 without a group."""
    if (who := pretended.current()) is not None:
        return who.rank
    return dist.get_rank() if _has_joined() else 0


def world_size() -> int:
    """How many ranks there are; 1 without a group."""
    if (who := pretended.current()) is not None:
        return who.world_size
    return dist.get_world_size() if _has_joined() else 1


def _talks() -> bool:
    """Whether there is anybody to talk to: pretended ranks all say what this one says."""
    return pretended.current() is None and world_size() > 1


def barrier() -> None:
    """Wait until every rank is here."""
    if _talks():
        with watchdog.current().blocking("barrier"):
            dist.barrier()


def broadcast_object(value: Any, src: int = 0) -> Any:
    """Every rank gets rank ``src``'s picklable ``value``."""
    if not _talks():
        return value
    box = [value]
    with watchdog.current().blocking("broadcast_object"):
        dist.broadcast_object_list(box, src=src)
    return box[0]


def broadcast_tensor(tensor: torch.Tensor, src: int) -> None:
    """Every rank's ``tensor`` becomes rank ``src``'s. Blocking: for what is not part of a step."""
    if _talks():
        with watchdog.current().blocking("broadcast_tensor"):
            dist.broadcast(tensor, src=src)


def all_gather_object(value: Any) -> list[Any]:
    """Every rank gets every rank's picklable ``value``, in rank order."""
    if not _talks():
        return [value] * world_size()
    box: list[Any] = [None] * world_size()
    with watchdog.current().blocking("all_gather_object"):
        dist.all_gather_object(box, value)
    return box


def gather_object(value: Any, dst: int = 0) -> list[Any] | None:
    """Rank ``dst`` gets every rank's picklable ``value``, in rank order; the others get None. A collective.

    torch sends as many bytes from each rank as the longest value has.
    """
    box: list[Any] | None = [value] * world_size() if rank() == dst else None
    if _talks():
        with watchdog.current().blocking("gather_object"):
            dist.gather_object(value, box, dst=dst)
    return box


def sum_in_rank_order(vector: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Every rank's vector, gathered and added in the order of ranks: the same bits on all, whoever came first.

    For small vectors, as each rank receives all of them.

    Args:
        vector: 1-D on the CPU, of the same length and dtype on every rank.
        device: where the group's backend wants it.

    Returns:
        The sum, on the CPU.
    """
    if not _talks():
        return vector * world_size()
    mine = vector.to(device)
    everyone = [torch.empty_like(mine) for _ in range(world_size())]
    with watchdog.current().blocking("sum_in_rank_order"):
        dist.all_gather(everyone, mine)
    total = torch.zeros_like(vector)
    for theirs in everyone:
        total += theirs.cpu()
    return total
