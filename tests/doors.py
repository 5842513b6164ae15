"""Who listens where: what a process of a run has opened, read from the kernel's tables; and what a stranger can do."""

import contextlib
import ipaddress
import os
import pickle
import socket
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_LISTEN = "0A"
KEYS = ("/default_pg/0//0", "/deepzero/secret", "/torch.rendezvous.run")
"""Names under which ranks and torch write, as they stand in a store: its client puts the first slash."""


def listening(pids: Iterable[int]) -> set[tuple[str, int]]:
    """Address and port of every TCP socket at which one of these processes listens."""
    ours = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has just ended
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    ours.add(os.readlink(link))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN and f"socket:[{fields[9]}]" in ours:
                address, port = fields[1].split(":")
                # The kernel prints words of the machine's own byte order.
                words = [int(address[start : start + 8], 16) for start in range(0, len(address), 8)]
                packed = struct.pack(f"={len(words)}I", *words)
                found.add((str(ipaddress.ip_address(packed)), int(port, 16)))
    return found


def beyond(sockets: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """Those that other machines can reach."""
    return sorted(place for place in sockets if not ipaddress.ip_address(place[0]).is_loopback)


class Payload:
    """Unpickled, it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def poke(port: int, evidence: Path) -> bool:
    """As a stranger on this machine: write a pickle to whatever listens there. Returns whether it was a store."""
    # By hand, since torch's client waits for ever for the answer of what is no store.
    payload = pickle.dumps(Payload(evidence))
    hello = struct.pack("=BI", 0, 0x3C85F7CE)
    writes = [b"\1" + struct.pack("=Q", len(text)) + text for text in map(str.encode, KEYS)]
    body = struct.pack("=Q", len(payload)) + payload
    ping = struct.pack("=BI", 13, 7)
    with socket.create_connection(("127.0.0.1", port), timeout=1) as stranger:
        stranger.sendall(hello + b"".join(write + body for write in writes) + ping)
        try:
            return stranger.recv(4) == struct.pack("=I", 7)
        except (TimeoutError, ConnectionError):
            return False
