"""Streams, events and memory, once, behind a null object where there is no GPU; and chaos, which finds races in them.

A :class:`SideStream` is where the reducer sums received buckets while the compute stream goes on with the backward
pass. A :class:`BufferEvent` is one event of one buffer. Every buffer has two: ``filled`` (its writer is done) and
``free`` (its reader is done), and whoever needs the buffer waits for *that* event only. Nothing here waits for a whole
stream, and nothing needs ``record_stream``: buffers live as long as their owner, so the caching allocator never reuses
one in flight. On CPU a side stream runs in line and an event is always over: the same code runs.

**Chaos mode.** A race in a ZeRO implementation reads a buffer too early or refills it too early, and gives a slightly
wrong gradient on a busy machine once a week. Under chaos it gives NaN, at once, in a test: what is released is
overwritten, and each rank sleeps where the others do not expect it. Results must keep their bits; the tests compare
them with a calm run.
"""

from __future__ import annotations

import contextlib
import random
import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from deepzero.config.engine import ChaosConfig


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
        """The current stream goes on only after the recorded work; at once if none was recorded."""
        if self._event is not None and self._recorded:
            self._event.wait(torch.cuda.current_stream(self._device))


class SideStream:
    """A side stream of ``device``; on a device without streams, the caller's own order."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def running(self) -> contextlib.AbstractContextManager[object]:
        """Work issued inside runs on this stream, which does not wait for the caller's by itself."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


class Chaos:
    """Draws delays for one rank. When disabled, every method returns at once."""

    def __init__(self, config: ChaosConfig, rank: int) -> None:
        self.enabled = config.enabled
        self._max_seconds = config.max_delay_ms / 1000
        # Own generator: the run's random numbers must be the same with chaos on and off.
        self._random = random.Random(config.seed * 1_000_003 + rank)

    def delay(self) -> None:
        """Sleep for a random while, often not at all."""
        if self.enabled and self._random.random() < 0.5:
            time.sleep(self._random.random() * self._max_seconds)

    def puts_off(self) -> bool:
        """Whether a copy between device and host is made only when it is waited for (``copy_streams.py``)."""
        return self.enabled and self._random.random() < 0.5

    def poison(self, *buffers: torch.Tensor | None) -> None:
        """Overwrite buffers that nobody may read any more."""
        for buffer in buffers if self.enabled else ():
            if buffer is not None and buffer.is_floating_point():
                buffer.fill_(float("nan"))
            elif buffer is not None and buffer.dtype == torch.uint8:
                buffer.fill_(255)  # quantised messages: their scales are NaN


def storage_ptr_of(tensor: torch.Tensor) -> int:
    """Where the tensor's memory begins; of what has none (the meta device), the number of torch's handle for it."""
    storage = tensor.untyped_storage()
    return int(storage.data_ptr() or storage._cdata)
