"""Short texts from rank to rank beside the process group, for threads that must not disturb its collectives.

A writer of checkpoints works in the background while the training thread launches collectives; two threads in one
process group would mix up their order. So it speaks through the store at which the ranks have met. Nothing here
waits: a store that is asked for a key that is not there yet would make all others who ask wait as well.
"""

from __future__ import annotations

import contextlib

import torch.distributed as dist


class SideChannel:
    """A board for the ranks' notes.

    Args:
        name: the same on all ranks, and never used before.
    """

    def __init__(self, name: str) -> None:
        self._prefix = f"deepzero/side/{name}"
        self._notes: dict[str, str] = {}
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        self._store = None if alone else dist.distributed_c10d._get_default_store()

    def post(self, key: str, text: str) -> None:
        """Write a note, or write over one."""
        if self._store is None:
            self._notes[key] = text
        else:
            self._store.set(f"{self._prefix}/{key}", text)

    def look(self, key: str) -> str | None:
        """A note; None when there is none yet."""
        if self._store is None:
            return self._notes.get(key)
        name = f"{self._prefix}/{key}"
        return self._store.get(name).decode() if self._store.check([name]) else None

    def remove(self, key: str) -> None:
        """Take a note down that everybody has read."""
        self._notes.pop(key, None)
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # some stores cannot
                self._store.delete_key(f"{self._prefix}/{key}")
