"""The process group: joining it, leaving it, and small talk between ranks (Python objects, not tensors).

``deepzero.initialize`` joins by itself when nobody has: with torchrun's environment variables where they are set, or an
MPI's, else as a world of one rank, so that a script runs unchanged on a laptop without a launcher.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import json
import os
import pickle
import re
import secrets
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deepzero.comm import flight_recorder
from deepzero.comm.flight_recorder import DepartedRank
from deepzero.comm.rendezvous import JOINED, LAUNCH_FOLDER_VARIABLE, behind_closed_doors, discover_mpi, meet
from deepzero.device import accelerator, accelerator_of, installed
from deepzero.utils.errors import ConfigError
from deepzero.utils.storage import as_bytes

_LOCAL_RANKS = {"SLURM_LOCALID": "SLURM_PROCID", "OMPI_COMM_WORLD_LOCAL_RANK": "OMPI_COMM_WORLD_RANK"}
"""Who else tells a rank's number on its machine: the variable, and the one that says which rank it is about."""


# ---- joining and leaving ---------------------------------------------------------------------------------------------


def is_initialized() -> bool:
    """Whether this process has joined a group."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """This process's number; 0 without a group."""
    return dist.get_rank() if is_initialized() else 0


def world_size() -> int:
    """How many ranks there are; 1 without a group."""
    return dist.get_world_size() if is_initialized() else 1


def local_rank() -> int:
    """This rank's number on its machine, as its launcher says; 0 where nobody does. What is no number is refused."""
    return _told_local_rank()[1] or 0


def _told_local_rank() -> tuple[str, int | None]:
    """By torchrun and our launcher, else by Slurm or Open MPI: the variable, and what it says."""
    name = "LOCAL_RANK"
    if name not in os.environ:
        me = str(dist.get_rank()) if is_initialized() else os.environ.get("RANK")
        # A word about another rank was inherited: ranks that a script in a Slurm job starts all have the script's.
        told_us = (n for n, rank in _LOCAL_RANKS.items() if n in os.environ and me in (None, os.environ.get(rank)))
        name = next(told_us, name)
    if (told := os.environ.get(name)) is not None and not told.isdecimal():
        raise ConfigError(f"{name}={told!r} is not a rank's number on its machine: 0, 1, …; {_sees()}")
    return name, None if told is None else int(told)


def _sees() -> str:
    count = accelerator().device_count()
    return f"this process sees {count} GPU{'s' * (count != 1)}"


def ranks_of_host() -> int | None:
    """How many ranks this rank's machine has, as torchrun says it (``LOCAL_WORLD_SIZE``); None: nobody has said."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(told) if told.isdecimal() and int(told) > 0 else None


def default_device() -> torch.device:
    """The GPU of this rank where there is one, else the CPU. ``DEEPZERO_DEVICE=cpu`` keeps a run off the GPUs.

    A ConfigError: there are several ranks and nobody has told this one's number on its machine; or that has no GPU of
    the number; or :func:`refuse_missing_gpu`.
    """
    if not (mine := accelerator()).has_streams:
        refuse_missing_gpu()
        return torch.device("cpu")
    if is_initialized() and (bound := dist.group.WORLD.bound_device_id) is not None:  # type: ignore[union-attr]
        return bound  # the user has joined, and said which
    (name, number), gpus = _told_local_rank(), mine.device_count()
    if number is None:
        ranks = world_size() if is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
        if ranks > 1 and os.environ.get("LOCAL_WORLD_SIZE") != "1":
            raise ConfigError(
                f"LOCAL_RANK is not set: rank {rank() if is_initialized() else os.environ.get('RANK')} of {ranks} "
                f"cannot know which of {gpus} GPUs is its own; set LOCAL_RANK to its number on its machine, start with "
                "torchrun, or join the process group with device_id"
            )
        return mine.current_device()
    if number >= gpus:
        raise ConfigError(
            f"{name}={number}: {_sees()} only; start as many ranks on a machine as it has GPUs, or all of them with "
            "DEEPZERO_DEVICE=cpu. Where each rank is shown its own GPU alone (CUDA_VISIBLE_DEVICES, Slurm's "
            "--gpus-per-task), set LOCAL_RANK=0 or show it all"
        )
    return torch.device(mine.kind, number)


def cpu_is_meant() -> bool:
    """Whether ``DEEPZERO_DEVICE=cpu`` keeps the run off the GPUs; a ConfigError for a word that it does not know."""
    word, known = os.environ.get("DEEPZERO_DEVICE", ""), dict.fromkeys(("auto", "cpu", "cuda", installed().kind))
    if word and word not in known:
        raise ConfigError(f"DEEPZERO_DEVICE={word} in the environment: it must be one of {', '.join(known)}")
    return word == "cpu"


_DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/dev/kfd"))
"""What the drivers of NVIDIA's and AMD's GPUs leave to be seen."""


def missing_gpu() -> str | None:
    """Why there is no GPU to run on; None where there is one, and where nothing tells that one is meant."""
    if accelerator().has_streams:
        return None
    if torch.version.cuda or torch.version.hip:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = "" if shown is None else f" (CUDA_VISIBLE_DEVICES={shown})"
        return f"torch {torch.__version__} is built for GPUs and finds none to use{why}; nvidia-smi may say why"
    if _DRIVERS[0].exists():
        return f"this machine has an NVIDIA driver, and torch {torch.__version__} is built for the CPU alone"
    return None


def refuse_missing_gpu() -> None:
    """A rank of a launch takes the CPU only where that is meant: the others, on other machines, may be on GPUs.

    torch's usual build is one for GPUs, on a laptop too: so something else must tell of a GPU, a driver or
    ``CUDA_VISIBLE_DEVICES``; and a launcher this rank's number on its machine.
    """
    meant = cpu_is_meant() or not (torch.version.cuda or torch.version.hip)
    told = re.match(r"\d|GPU|MIG", os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    if meant or not (told or any(map(Path.exists, _DRIVERS))) or (why := missing_gpu()) is None:
        return
    name, number = _told_local_rank()
    if number is not None:
        raise ConfigError(f"{name}={number}: {_sees()}: {why}. Mend that, or run all ranks with DEEPZERO_DEVICE=cpu")


@functools.cache
def say_cpu(why: str) -> None:
    """Say once, on rank 0, that the CPU is used where a GPU may have been meant, and nothing refuses it."""
    if os.environ.get("RANK", "0") == "0":
        print(f"running on the CPU: {why}. DEEPZERO_DEVICE=cpu says that this is meant", file=sys.stderr, flush=True)


def init_distributed(
    backend: str | None = None, timeout_seconds: float = 600.0, mpi: bool = True, port: int | None = None
) -> None:
    """Join the process group, and use this rank's GPU. Where the caller has joined one, do the second alone.

    Without a ``backend`` it is NCCL on GPUs and gloo on CPU. A collective that takes longer than the time-out raises.
    ``mpi``: ask an MPI's variables where no launcher's are set; its ranks meet at ``port``, if that is given.
    """
    if mpi and not is_initialized():
        discover_mpi(port)
    meant, device = cpu_is_meant(), default_device()
    accelerator_of(device).set_device(device)
    if device.type == "cpu" and not meant and (why := missing_gpu()):
        say_cpu(why)
    if is_initialized():
        return
    backend = backend or accelerator_of(device).backend or dist.get_default_backend_for_device(device)
    timeout = timedelta(seconds=timeout_seconds)
    place = meet(timeout)
    where = {} if place is None else dict(zip(("store", "rank", "world_size"), place, strict=True))
    with behind_closed_doors():
        device_id = device if backend == "nccl" else None
        dist.init_process_group(backend, timeout=timeout, device_id=device_id, **where)  # type: ignore[arg-type]
    flight_recorder.observer()  # from now on this rank answers when others ask where it is
    if folder := os.environ.get(LAUNCH_FOLDER_VARIABLE):
        with contextlib.suppress(OSError):  # a process that has outlived the launch
            Path(folder, JOINED).touch()


def shutdown() -> None:
    """Leave the process group, if this process has joined one."""
    if is_initialized():
        flight_recorder.leave("has left the process group")
        flight_recorder.observer().subgroups.clear()  # they end with it
        dist.destroy_process_group()


def backend_for(device: torch.device) -> str:
    """The backend that serves tensors of ``device``: a group may have one for each kind of device (``cpu:gloo,…``)."""
    return dist.group.WORLD._get_backend(device).name() if is_initialized() else "none"  # type: ignore[union-attr]


# ---- what the program sends itself -----------------------------------------------------------------------------------


def ask_class_first(check: Callable[..., None]) -> Callable[..., None]:
    """``check``, a check of torch's own by which every collective begins, that calls a tensor's ``before_collective``.

    Before torch 2.13 most collectives ask no ``__torch_function__``, but take a tensor's memory. What a partitioned
    parameter shows has one element of it, whatever its shape says: gloo would write over its end.
    """

    @functools.wraps(check)
    def asking(tensors: Any, name: str) -> None:
        for tensor in tensors if isinstance(tensors, list) else [tensors]:
            if hasattr(type(tensor), "before_collective"):
                tensor.before_collective()
        check(tensors, name)

    return asking


if dist.is_available():
    for _check in ("_check_single_tensor", "_check_tensor_list"):
        setattr(dist.distributed_c10d, _check, ask_class_first(getattr(dist.distributed_c10d, _check)))

# ---- small talk ------------------------------------------------------------------------------------------------------


def _talks() -> bool:
    """Whether there is anybody to talk to."""
    return world_size() > 1


def barrier() -> None:
    """Wait until every rank is here."""
    if _talks():
        with flight_recorder.observer().blocking("barrier"):
            dist.barrier()


def broadcast_object(value: Any, src: int = 0, group: dist.ProcessGroup | None = None) -> Any:
    """Every rank, or every one of ``group``, gets rank ``src``'s picklable ``value``."""
    if not _talks():
        return value
    with _watched("broadcast_object", group):
        sealed = _seal(value) if rank() == src else torch.empty(0, dtype=torch.uint8)
        size = torch.tensor([sealed.numel()], device=_talking_device())
        dist.broadcast(size, src, group)
        box = sealed.to(size.device) if rank() == src else torch.empty(int(size), dtype=torch.uint8, device=size.device)
        dist.broadcast(box, src, group)
    return _unseal(box) if rank() != src else value


def broadcast_tensor(tensor: torch.Tensor, src: int, kind: str = "broadcast_tensor") -> None:
    """Every rank's ``tensor`` becomes rank ``src``'s, in place. Blocking: for what is not part of a step."""
    if _talks():
        mine = tensor.detach()
        sent = mine.contiguous()  # itself, or a copy: of `channels_last`
        with flight_recorder.observer().blocking(kind):
            # As bytes: a model's buffers and frozen parameters have dtypes that no backend takes (uint16, fp8, bits).
            dist.broadcast(as_bytes(sent), src=src)
        if sent is not mine:
            mine.copy_(sent)


def all_gather_object(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank, or every one of ``group``, gets every one's picklable ``value``, in rank order."""
    return _collect("all_gather_object", value, None, group) or []


def gather_object(value: Any, dst: int = 0) -> list[Any] | None:
    """Rank ``dst`` gets every rank's picklable ``value``, in rank order; the others get None. A collective."""
    return _collect("gather_object", value, dst)


def _watched(kind: str, group: dist.ProcessGroup | None) -> contextlib.AbstractContextManager[Any]:
    """What all ranks do is counted by the watchdog. What some do is not: the others' counts would differ."""
    return contextlib.nullcontext() if group is not None else flight_recorder.observer().blocking(kind)


def _collect(kind: str, value: Any, dst: int | None, group: dist.ProcessGroup | None = None) -> list[Any] | None:
    """Every rank's ``value`` on rank ``dst``, or on all."""
    hears = dst in (None, rank())
    if not _talks():
        return [value] if hears else None
    with _watched(kind, group):
        sealed, device = _seal(value), _talking_device()
        lengths = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
        dist.all_gather(lengths, torch.tensor([sealed.numel()], device=device), group)
        sizes = [int(length) for length in lengths]
        mine = torch.zeros(max(sizes), dtype=torch.uint8)
        mine[: sealed.numel()] = sealed
        mine = mine.to(device)
        boxes = [torch.empty_like(mine) for _ in sizes] if hears else None
        if dst is None:
            dist.all_gather(boxes, mine, group)
        else:
            dist.gather(mine, boxes, dst=dst)
    return None if boxes is None else [_unseal(box[:size]) for box, size in zip(boxes, sizes, strict=True)]


def raise_on_all_ranks(problem: str | Exception | None, error: Callable[[str], Exception] = RuntimeError) -> None:
    """Raise on every rank when one has a ``problem`` (in words or as it was raised), so that none waits. A collective.

    A rank raises its own exception, where it has one; else ``error`` with the words of the first rank that has a
    problem, behind ``rank 3: `` where this rank has not found the same.
    """
    mine = None if problem is None else str(problem) or type(problem).__name__
    texts = all_gather_object(mine)
    if isinstance(problem, Exception):
        raise problem
    for rank_of_text, text in enumerate(texts):
        if text is not None:
            raise error(text if text == mine or rank_of_text == rank() else f"rank {rank_of_text}: {text}")


def gather_and_sum(vector: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Every rank's small vector, gathered and added in the order of ranks: the same bits on all, whoever came first.

    1-D on the CPU, as the sum is, of one length and dtype on every rank; ``device`` is where the backend wants it.
    """
    if not _talks():
        return vector.clone()
    mine = vector.to(device)
    everyone = [torch.empty_like(mine) for _ in range(world_size())]
    with flight_recorder.observer().blocking("gather_and_sum"):
        dist.all_gather(everyone, mine)
    total = torch.zeros_like(vector)
    for theirs in everyone:
        total += theirs.cpu()
    return total


def _talking_device() -> torch.device:
    """Where the group's backend wants small talk."""
    try:
        dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    except RuntimeError:
        return accelerator().current_device()
    return torch.device("cpu")


def _secret() -> bytes:
    """What only ranks of this group have: the first of them to need one leaves it at the store where all have met."""
    if (group := flight_recorder.observer()).secret is None:
        store = dist.distributed_c10d._get_default_store()
        group.secret = store.compare_set("deepzero/secret", "", secrets.token_hex(32))
    return group.secret


def _seal(value: Any) -> torch.Tensor:
    """Bytes that prove that a rank of this group has sent them. gloo takes messages from whoever connects first."""
    pickled = pickle.dumps(value)
    return torch.frombuffer(bytearray(hmac.digest(_secret(), pickled, "sha256") + pickled), dtype=torch.uint8)


def _unseal(sealed: torch.Tensor) -> Any:
    """What a rank has sealed. Anything else is not unpickled, since that could run anything, and is a RuntimeError."""
    message = sealed.cpu().numpy().tobytes()
    digest, pickled = message[:32], message[32:]
    if not hmac.compare_digest(digest, hmac.digest(_secret(), pickled, "sha256")):
        raise RuntimeError(
            f"a message of {len(message)} bytes was not sent by a rank of this run: somebody else has connected to its "
            "ports; see docs/launching.md, Who can reach a run"
        )
    return pickle.loads(pickled)


class StoreMailbox:
    """Short texts from rank to rank through the store at which the ranks have met, beside the process group.

    For threads that must not disturb the order of collectives (a checkpoint's writer), and for when collectives hang
    (the watchdog). Nothing here waits: a store that is asked for a key that is not there yet would make all others who
    ask it wait as well.

    Its ``name`` is the same on all ranks, and never used before in ``store``. What is None is the process group's; the
    store that of this process alone where it has joined none.
    """

    def __init__(
        self, name: str, store: dist.Store | None = None, rank: int | None = None, world_size: int | None = None
    ) -> None:
        self.rank = dist.get_rank() if rank is None and is_initialized() else (rank or 0)
        self.world_size = dist.get_world_size() if world_size is None and is_initialized() else (world_size or 1)
        if store is None:
            store = dist.HashStore() if self.world_size == 1 else dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore(f"deepzero/{name}", store)

    def set(self, key: str, text: str) -> None:
        """Write it, over whatever is there; a folder's name in it may be no UTF-8."""
        try:
            self._store.set(key, text.encode("utf-8", "surrogatepass"))  # type: ignore[arg-type]
        except dist.DistNetworkError as error:
            gone = "the store where the ranks have met is gone with the process that had it, torchrun's agent or rank 0"
            raise dist.DistNetworkError(f"{gone}: {error}") from None

    def set_first(self, key: str, text: str) -> None:
        """Write it unless another rank was faster: all raise the same text."""
        self._store.compare_set(key, "", text)

    def add(self, key: str, amount: int) -> int:
        """Count up, from 0, and return the count: no two ranks get the same."""
        return self._store.add(key, amount)

    def get(self, key: str) -> str | None:
        """The text, or None: a plain ``get`` of a missing key would wait for it."""
        return self._store.get(key).decode("utf-8", "surrogatepass") if self._store.check([key]) else None

    def remove(self, key: str) -> None:
        """Take a text away that everybody has read."""
        with contextlib.suppress(RuntimeError):  # some stores cannot
            self._store.delete_key(key)

    def leave(self, sequence: int, reason: str) -> None:
        """Say that this rank will not come back; ``sequence`` is that of the last collective that it launched."""
        self.set(f"gone/{self.rank}", json.dumps([sequence, reason]))

    def gone(self) -> dict[int, DepartedRank]:
        """The other ranks that have said so."""
        texts = {rank: self.get(f"gone/{rank}") for rank in range(self.world_size) if rank != self.rank}
        return {rank: DepartedRank(*json.loads(text)) for rank, text in texts.items() if text is not None}
