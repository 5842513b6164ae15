"""Where ranks meet under torchrun: a namespace of its own for each attempt, in the one store that all attempts share.

torchrun's agent keeps its store from one attempt to the next (torch 2.13; ``dynamic_rendezvous.py`` makes it once), and
hands it to the ranks as it is. So ranks that are started again find what the dead ones have written: gloo's addresses
of listeners that are gone ("Connection refused", in about every second restart), and our watchdog's word that a rank
has left. The number of the restart does not tell attempts apart, because each node counts for itself.

So the ranks agree on a new name first, in a way that old entries cannot disturb. Everybody else puts a question that
nobody has put before under ``question/<rank>``. Rank 0, which has made up the name, answers every question it finds,
old ones too, under the question itself, until each rank has signed in under the new name.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from deepzero.comm.elastic import RESTART_VARIABLE

POLL_SECONDS = 0.02


def shared_by_attempts() -> bool:
    """Whether this process is a rank of torchrun's, whose store may have seen earlier ranks."""
    torchrun = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return torchrun and RESTART_VARIABLE not in os.environ  # the launcher's agents, and their stores, are always new


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
