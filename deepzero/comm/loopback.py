"""Closed doors: where all ranks are on one machine, their sockets listen on its loopback address alone.

Nothing here imports torch: the launcher prepares its ranks' environment without it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

LAUNCH_FOLDER_VARIABLE = "DEEPZERO_LAUNCH_FOLDER"
"""The launcher names its folder for this attempt to start ranks, which has …"""
STORE = "store"
"""… the file at which they meet, and …"""
JOINED = "joined"
"""… this one, once a rank has joined the process group."""
LOOPBACK = "127.0.0.1"


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
    if not on_one_machine():
        yield
        return
    before = {name: os.environ.get(name) for name in loopback_variables()}
    os.environ.update(loopback_variables())
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
