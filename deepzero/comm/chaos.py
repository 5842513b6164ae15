"""Chaos mode, which finds races.

A race in a ZeRO implementation reads a buffer too early or refills it too early, and gives a slightly wrong gradient on
a busy machine once a week. Under chaos it gives NaN, at once, in a test: what is released is overwritten, and each rank
sleeps where the others do not expect it. Results must keep their bits; the tests compare them with a calm run.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from deepzero.config.engine import ChaosConfig


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
