"""A simulated link between nodes, under every collective of a process.

What a rank sends to other nodes takes ``bytes / bandwidth`` seconds: the bytes are those that the ledger counts,
launches queue up behind each other on a rank's link, and a collective's wait returns only when its bytes would have
arrived. What stays inside a node, and everything else, takes what it takes here.
"""

from __future__ import annotations

import time
from typing import Any


class Link:
    """One rank's way to other nodes: a queue that carries so many bytes a second; 0: any number."""

    def __init__(self) -> None:
        self.bytes_per_second = 0.0
        self._free_at = 0.0
        self.noted = 0.0
        """Bytes of the launch that the ledger has entered last."""

    def arrival(self) -> float:
        """When what was noted last will have arrived, on the clock of ``time.perf_counter``."""
        sent, self.noted = self.noted, 0.0
        if not self.bytes_per_second or not sent:
            return 0.0
        self._free_at = max(time.perf_counter(), self._free_at) + sent / self.bytes_per_second
        return self._free_at


def throttle() -> Link:
    """Put one link under every collective of this process."""
    from deepzero.comm.collectives import Pending
    from deepzero.comm.ledger import Ledger

    link = Link()
    record, begin, wait = Ledger.record, Pending.__init__, Pending.wait

    def recorded(self: Ledger, *entry: Any, **more: Any) -> None:
        record(self, *entry, **more)
        link.noted = entry[4] if len(entry) > 4 else 0.0

    def launched(self: Pending, *arguments: Any) -> None:
        begin(self, *arguments)
        self.__dict__["arrival"] = link.arrival()

    def waited(self: Pending) -> None:
        wait(self)
        time.sleep(max(0.0, self.__dict__.get("arrival", 0.0) - time.perf_counter()))

    Ledger.record, Pending.__init__, Pending.wait = recorded, launched, waited
    return link
