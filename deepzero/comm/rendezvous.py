"""Where ranks meet: a store of keys and values, and who can reach it and them.

*Started by our launcher* they share a file that only their user can open, on Linux in memory: no socket listens for it,
so no stranger can write what a rank would act on, and a key is read in 26 µs (torch's ``TCPStore``: 118). It keeps
all that was ever written. *On one machine by other means* (``MASTER_ADDR=127.0.0.1``, or as many ranks here as there
are) rank 0 has a ``TCPStore`` on the loopback address. *Over several machines* the store is torch's, open to whoever
reaches its port. **torchrun** has one store for all attempts (torch 2.13), with what dead ranks have left: see
:func:`fresh`.

Nothing here imports torch before ranks meet: the launcher prepares their environment without it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

from deepzero.utils.errors import ConfigError

if TYPE_CHECKING:
    import torch.distributed as dist

LAUNCH_FOLDER_VARIABLE = "DEEPZERO_LAUNCH_FOLDER"
"""The launcher names its folder for this attempt to start ranks, which has the file at which they meet (``STORE``), and
the file ``JOINED`` once a rank has joined the process group."""
STORE, JOINED = "store", "joined"
LOOPBACK = "127.0.0.1"
POLL_SECONDS = 0.02
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
MPI_PORT = 29500
"""Where ranks of an MPI meet, where nothing says another port."""
_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_MPI = [
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
]
"""The same from Open MPI, and from MPICH and Intel MPI."""
MPI_SIZES = tuple(names[1] for names in _MPI)
"""Where MPIs say how many processes they have started, as Slurm's ``srun`` says it in ``SLURM_STEP_NUM_TASKS``."""


def on_one_machine() -> bool:
    """Whether all ranks of this process's world are known to be on this machine."""
    world_size, here = os.environ.get("WORLD_SIZE", "1"), os.environ.get("LOCAL_WORLD_SIZE")
    address = os.environ.get("MASTER_ADDR", "")
    nearby = address in ("localhost", "::1") or address.startswith("127.")
    return world_size in ("1", here) or nearby or LAUNCH_FOLDER_VARIABLE in os.environ


def loopback_variables() -> dict[str, str]:
    """What makes gloo and NCCL listen on the loopback address; by default it is that of the machine's name, or any."""
    name = "lo0" if sys.platform == "darwin" else "lo"
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}


@contextlib.contextmanager
def behind_closed_doors() -> Iterator[None]:
    """Around whatever opens the backend's sockets: nobody outside this machine can reach them, if all ranks are on it.

    The user's own ``GLOO_SOCKET_IFNAME`` does not count then: it is for ranks on several machines.
    """
    variables = loopback_variables() if on_one_machine() else {}
    before = {name: os.environ.pop(name, None) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            del os.environ[name]
            if value is not None:
                os.environ[name] = value


def discover_mpi(port: int | None = None, verbose: bool = True) -> None:
    """Set a launcher's variables from those of an MPI, where this process is one of its ranks and has no others.

    A ``port`` wins over ``MASTER_PORT``. There is a ConfigError where ranks may be on several machines and
    ``MASTER_ADDR`` is not set, and where one rank is alone though another launcher has started several.
    """
    for names in _MPI if "RANK" not in os.environ else ():
        found = {ours: os.environ[name] for ours, name in zip(_RANKS, names, strict=True) if name in os.environ}
        if not {"RANK", "WORLD_SIZE"} <= found.keys():
            continue
        if found["WORLD_SIZE"] == "1":
            refuse_several()
        if found["WORLD_SIZE"] in ("1", found.get("LOCAL_WORLD_SIZE")):
            found["MASTER_ADDR"] = LOOPBACK
        elif "MASTER_ADDR" not in os.environ:
            told = ", ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)
            raise ConfigError(f"ranks by MPI ({told}): set MASTER_ADDR to the name of the machine that rank 0 is on")
        found["MASTER_PORT"] = str(port or os.environ.get("MASTER_PORT", MPI_PORT))
        os.environ.update(found)
        if verbose and found["RANK"] == "0":
            print(f"ranks by MPI: {found}", flush=True)
        return


def meet(timeout: timedelta) -> tuple[dist.Store, int, int] | None:
    """The store of this rank's world, its number, and how many ranks there are; None: by torch's ``env://``.

    A ConfigError: some but not all of the launcher's environment variables are set, or say what cannot be; another
    launcher has started several processes, and none knows its rank; or the port is taken.
    """
    import torch.distributed as dist

    folder = os.environ.get(LAUNCH_FOLDER_VARIABLE)
    present = [name for name in _VARIABLES if name in os.environ]
    if folder is None and not present:
        refuse_several()
        return dist.HashStore(), 0, 1
    missing = sorted({"RANK", "WORLD_SIZE"} - set(present) if folder else set(_VARIABLES) - set(present))
    if missing:
        raise ConfigError(
            f"{', '.join(present)} are set but {', '.join(missing)} are not; start with torchrun, or unset all"
        )
    world_size = _number("WORLD_SIZE", 1, 1 << 31)
    rank = _number("RANK", 0, world_size)
    if folder is not None:
        path = os.path.join(folder, STORE)  # of a link what it leads to: what cleans /tmp may take the folder
        file = dist.FileStore(os.readlink(path) if os.path.islink(path) else path)
        file.set_timeout(timeout)
        return fresh(file, rank, world_size, timeout), rank, world_size  # a group was perhaps joined, and left, before
    if world_size == 1:  # alone it meets nobody, and needs no port
        return dist.HashStore(), 0, 1
    port = _number("MASTER_PORT", 1, 1 << 16)
    agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if shared_by_attempts():
        store = dist.TCPStore(os.environ["MASTER_ADDR"], port, world_size, is_master=False, timeout=timeout)
    elif not on_one_machine() or agents:
        return None
    elif rank != 0:
        store = dist.TCPStore(LOOPBACK, port, is_master=False, timeout=timeout)
    else:
        try:
            store = _hosted(port)
        except OSError as error:
            raise ConfigError(f"MASTER_PORT={port}: rank 0 cannot listen there: {error}; choose another") from None
        store.set_timeout(timeout)
    return fresh(store, rank, world_size, timeout), rank, world_size


def _number(name: str, least: int, end: int) -> int:
    """What a launcher's variable says, from ``least`` up to, but not including, ``end``."""
    told = os.environ[name]
    if not (told.isdecimal() and least <= int(told) < end):
        raise ConfigError(
            f"{name}={told!r} must be a whole number from {least} to {end - 1}; start with torchrun, or set it"
        )
    return int(told)


def refuse_several() -> None:
    """Each process alone would train a model of its own, and all of them write into the same folders."""
    for name in ("SLURM_STEP_NUM_TASKS", *MPI_SIZES):
        if (told := os.environ.get(name, "1")).isdecimal() and int(told) > 1:
            raise ConfigError(
                f"{name}={told}: this process is one of {told}, and nothing tells it {', '.join(_VARIABLES)}. Start "
                "torchrun once on each machine, or mpirun of Open MPI, MPICH or Intel MPI, or set these for each rank. "
                "Where each is meant to be a run of its own, set RANK=0, WORLD_SIZE=1, MASTER_ADDR=127.0.0.1, "
                "MASTER_PORT=0 and LOCAL_RANK=$SLURM_LOCALID, or what else numbers it on its machine"
            )


@functools.cache
def _hosted(port: int) -> dist.TCPStore:
    """Rank 0's store at a port, kept: a group that is joined after another one's end meets at the same port."""
    return host_store(port, timedelta(seconds=600))


def host_store(port: int, timeout: timedelta) -> dist.TCPStore:
    """A store on this machine's loopback address, which this process has; port 0 takes a free one."""
    import torch.distributed as dist

    with socket.create_server((LOOPBACK, port), backlog=1024) as listener:
        port = listener.getsockname()[1]
        # A store listens on all addresses unless it is handed a socket that listens already; it closes that itself.
        return dist.TCPStore(
            LOOPBACK, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
        )


def shared_by_attempts() -> bool:
    """Whether this process is a rank of torchrun's, whose store may have seen earlier ranks."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def fresh(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """A part of ``store`` that is the same for these ranks and that nobody has ever written to.

    Ranks that torchrun starts again find gloo's addresses of listeners that are gone ("Connection refused", in about
    every second restart), and the watchdog's word that a rank has left. The number of the restart does not tell
    attempts apart, as each node counts for itself. So all ``world_size`` ranks agree on a new name: each but rank 0
    puts a question that nobody has put before under ``question/<rank>``. Rank 0, which has made up the name, answers
    every question it finds, old ones too, under the question itself, until each has signed in under the new name, or
    ``timeout`` is over.
    """
    import torch.distributed as dist

    name = uuid.uuid4().hex
    meeting = dist.PrefixStore("deepzero/meeting", store)
    if rank != 0:
        meeting.set(f"question/{rank}", name)
        answer = f"answer/{name}"
        meeting.wait([answer], timeout)
        name = meeting.get(answer).decode()
        meeting.set(f"here/{name}/{rank}", "")
        return dist.PrefixStore(f"deepzero/attempt/{name}", store)
    end, missing, answered = time.monotonic() + timeout.total_seconds(), set(range(1, world_size)), set()
    while missing:
        for peer in sorted(missing):
            asked = f"question/{peer}"
            if meeting.check([asked]) and (question := meeting.get(asked).decode()) not in answered:
                meeting.set(f"answer/{question}", name)
                answered.add(question)
            if meeting.check([f"here/{name}/{peer}"]):
                missing.remove(peer)
        if missing and time.monotonic() > end:
            raise RuntimeError(f"ranks {sorted(missing)} have not come within {timeout.total_seconds():g} s")
        time.sleep(POLL_SECONDS if missing else 0)
    return dist.PrefixStore(f"deepzero/attempt/{name}", store)
