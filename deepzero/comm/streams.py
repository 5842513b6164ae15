"""Streams and events, once, behind a null object where there is no GPU.

A *lane* is a side stream on which the reducer sums received buckets while the compute stream goes on with the backward
pass. A *gate* is one event of one buffer. Every buffer has two: ``filled`` (its writer is done) and ``free`` (its
reader is done), and whoever needs the buffer waits for *that* gate only. Nothing here waits for a whole stream, and
nothing needs ``record_stream``: buffers live as long as their owner, so the caching allocator never reuses one in
flight.

On CPU a lane runs in line and a gate is always open: the same code runs, and chaos mode takes the place of timing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class BufferEvent:
    """One event of one buffer: *record* it where the work is issued, *wait* for it where the buffer is needed."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        self._device = device
        self._recorded = False

    def record(self) -> None:
        """Everything issued so far on the current stream must be done before a waiter goes on."""
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))
            self._recorded = True

    def wait(self) -> None:
        """The current stream goes on only after the recorded work; a gate that was never recorded is open."""
        if self._event is not None and self._recorded:
            self._event.wait(torch.cuda.current_stream(self._device))


class SideStream:
    """A side stream of ``device``; on a device without streams, the caller's own order."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Work issued inside runs on this lane. The lane does not wait for the caller's stream by itself."""
        if self._stream is None:
            yield
        else:
            with torch.cuda.stream(self._stream):
                yield
