"""Where ranks meet: a store of keys and values, and who can reach it.

*Started by our launcher* they share a file that only their user can open: on Linux one in memory, to which a name in
the launch's folder leads, elsewhere one in that folder. No socket listens for it, so no stranger can write what a rank
would act on; and it is faster than torch's ``TCPStore`` on the loopback address (26 µs to read a key, 118 µs there). It
keeps all that was ever written, so nothing large is posted again and again.

*On one machine by other means* (``MASTER_ADDR=127.0.0.1``, or as many ranks here as there are) rank 0 has a
``TCPStore``. That ignores the address it is given and listens on all of them, unless it is handed a socket that
listens already: it gets one that is bound to the loopback address.

*Over several machines* the store is torch's, open to whoever reaches its port.

**torchrun** has one store for all attempts. Its agent keeps it from one attempt to the next (torch 2.13;
``dynamic_rendezvous.py`` makes it once), and hands it to the ranks as it is. So ranks that are started again find what
the dead ones have written: gloo's addresses of listeners that are gone ("Connection refused", in about every second
restart), and our watchdog's word that a rank has left. The number of the restart does not tell attempts apart, because
each node counts for itself.

So the ranks agree on a new name first, in a way that old entries cannot disturb. Everybody else puts a question that
nobody has put before under ``question/<rank>``. Rank 0, which has made up the name, answers every question it finds,
old ones too, under the question itself, until each rank has signed in under the new name.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from deepzero.comm.loopback import LAUNCH_FOLDER_VARIABLE, LOOPBACK, STORE, on_one_machine
from deepzero.config.strict import ConfigError

POLL_SECONDS = 0.02
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_HOSTED: dict[int, dist.TCPStore] = {}
"""Rank 0's stores by port, kept: a group that is joined after another one's end meets at the same port."""


def meet(timeout: timedelta) -> tuple[dist.Store, int, int] | None:
    """The store of this rank's world, its number, and how many ranks there are; None: by torch's ``env://``.

    Raises:
        ConfigError: some but not all of the launcher's environment variables are set, or the port is taken.
    """
    folder = os.environ.get(LAUNCH_FOLDER_VARIABLE)
    present = [name for name in _VARIABLES if name in os.environ]
    if folder is None and not present:
        return dist.HashStore(), 0, 1
    missing = sorted({"RANK", "WORLD_SIZE"} - set(present) if folder else set(_VARIABLES) - set(present))
    if missing:
        raise ConfigError(
            f"{', '.join(present)} are set but {', '.join(missing)} are not; start with torchrun, or unset all"
        )
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if folder is not None:
        store: dist.Store = dist.FileStore(str(Path(folder) / STORE))
        store.set_timeout(timeout)
    elif shared_by_attempts():
        store = agents_store(timeout)
    elif on_one_machine() and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        store = fresh(_loopback_store(rank, timeout), rank, world_size, timeout)
    else:
        return None
    return store, rank, world_size


def _loopback_store(rank: int, timeout: timedelta) -> dist.TCPStore:
    """The store that rank 0 has on this machine's own port."""
    port = int(os.environ["MASTER_PORT"])
    if rank != 0:
        return dist.TCPStore(LOOPBACK, port, is_master=False, timeout=timeout)
    if port not in _HOSTED:
        try:
            _HOSTED[port] = host_store(port, timeout)
        except OSError as error:
            raise ConfigError(f"MASTER_PORT={port}: rank 0 cannot listen there: {error}; choose another") from None
    return _HOSTED[port]


def host_store(port: int, timeout: timedelta) -> dist.TCPStore:
    """A store on this machine's loopback address, which this process has; port 0 takes a free one."""
    with socket.create_server((LOOPBACK, port), backlog=1024) as listener:
        port = listener.getsockname()[1]
        # The store closes the socket that it is handed, so it must not belong to Python any more.
        return dist.TCPStore(
            LOOPBACK, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
        )


def shared_by_attempts() -> bool:
    """Whether this process is a rank of torchrun's, whose store may have seen earlier ranks."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def agents_store(timeout: timedelta) -> dist.Store:
    """This attempt's part of the agent's store. Returns when all ranks are there."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, world_size, is_master=False, timeout=timeout)
    return fresh(store, rank, world_size, timeout)


def fresh(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """A part of ``store`` that is the same for these ranks and that nobody has ever written to.

    Args:
        store: possibly with what earlier ranks have left in it.
        rank: this rank.
        world_size: how many there are now; all of them call this.
        timeout: for the last of them to come.

    Raises:
        RuntimeError: some have not come.
    """
    new = uuid.uuid4().hex
    meeting = dist.PrefixStore("deepzero/meeting", store)
    if rank != 0:
        meeting.set(f"question/{rank}", new)
        answer = f"answer/{new}"
        meeting.wait([answer], timeout)
        name = meeting.get(answer).decode()
        meeting.set(f"here/{name}/{rank}", "")
        return dist.PrefixStore(f"deepzero/attempt/{name}", store)
    end = time.monotonic() + timeout.total_seconds()
    missing = set(range(1, world_size))
    answered = set()
    while missing:
        for peer in sorted(missing):
            if meeting.check([f"question/{peer}"]):
                question = meeting.get(f"question/{peer}").decode()
                if question not in answered:
                    meeting.set(f"answer/{question}", new)
                    answered.add(question)
            if meeting.check([f"here/{new}/{peer}"]):
                missing.remove(peer)
        if missing and time.monotonic() > end:
            raise RuntimeError(f"ranks {sorted(missing)} have not come within {timeout.total_seconds():g} s")
        time.sleep(POLL_SECONDS if missing else 0)
    return dist.PrefixStore(f"deepzero/attempt/{new}", store)
