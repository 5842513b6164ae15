"""The wire between device and host: copies in two verbs, counted, timed, and disturbed by chaos mode.

*Launch* (:meth:`HostDeviceCopier.to_host`, :meth:`HostDeviceCopier.to_device`) returns a :class:`PendingCopy`. Who
reads the result on the device says ``copy.wait()``: the current stream goes on when the bytes are there. Who reads it
on the host, or is about to write over the source, says ``copy.finish()``: the program goes on when the bytes have left.

On a GPU there is one stream for each direction, as there is one copy engine for each. A copy begins when what was
issued before it on the current stream is done, and no stream ever waits for a whole other stream.

Without a GPU a copy is made in line. Then nothing could come too early, and no test could find who forgets to wait; so
chaos mode *puts copies off*: by chance, a copy is made when somebody waits for it, and not before. A result that is
read without waiting is then the old one, and a source that is written over too early arrives wrong.

Source: the data flow of the ZeRO-Offload paper, section 4; ``async_inplace_copy_grad_to_fp32_buffer_from_gpu`` in
DeepSpeed's ``stage_1_and_2.py``, which is anything but asynchronous with pages that are not locked.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from deepzero.comm import profiler_ranges
from deepzero.comm.ledger import Ledger
from deepzero.comm.streams import Chaos

TO_HOST = "offload.gradients_to_host"
TO_DEVICE = "offload.parameters_to_device"
FETCH = "offload.parameters_fetch"
FETCH_BETWEEN_STEPS = "offload.parameters_fetch_between_steps"
"""For evaluation and on request."""
ADAM = "offload.optimizer_step"


@torch.inference_mode(False)
def bytes_of_storage(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    """A whole storage as 1-D bytes, with a version counter of its own: no view is seen as written."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (storage.nbytes(),), (1,))


@dataclass
class CopyStats:
    """One part of the pipeline: what it moved, how long that took, and how long somebody waited for it."""

    bytes: int = 0
    seconds: float = 0.0
    """During which bytes were under way."""
    waited_seconds: float = 0.0
    """Of them, those in which the program, or the compute stream, stood still for it."""

    def add(self, moved: int, seconds: float, waited: float) -> None:
        """One more piece of work."""
        self.bytes += moved
        self.seconds += seconds
        self.waited_seconds += waited

    def as_dict(self) -> dict[str, float]:
        """Bytes, GB/s, and which part of the time was hidden behind other work (0 to 1)."""
        hidden = 1.0 - min(1.0, self.waited_seconds / self.seconds) if self.seconds > 0 else 0.0
        speed = self.bytes / self.seconds / 1e9 if self.seconds > 0 else 0.0
        return {"bytes": self.bytes, "seconds": self.seconds, "gb_per_second": speed, "hidden": hidden}


class OffloadStats:
    """The legs of the pipeline, of the step under way and of the last one."""

    def __init__(self) -> None:
        self.legs: dict[str, CopyStats] = {}
        self.last_step: dict[str, CopyStats] = {}
        self._open: deque[_Timing] = deque()

    def leg(self, kind: str) -> CopyStats:
        """The step's account of ``kind``."""
        return self.legs.setdefault(kind, CopyStats())

    def later(self, timing: _Timing) -> None:
        """A GPU's copy: its events are read when they have happened."""
        self._open.append(timing)

    def close_step(self) -> None:
        """An optimizer step is complete. On a GPU copies may still run: they count in the step in which they end."""
        while self._open and self._open[0].is_over():
            timing = self._open.popleft()
            self.leg(timing.kind).add(timing.bytes, timing.seconds(), timing.waited())
        self.last_step, self.legs = self.legs, {}


class _Timing:
    """The events of one copy on a GPU: begin, end, and around the place where the compute stream waited."""

    def __init__(self, kind: str, moved: int) -> None:
        self.kind, self.bytes = kind, moved
        self.begin, self.end, self.before, self.after = (torch.cuda.Event(enable_timing=True) for _ in range(4))
        self.in_stream = False
        self.blocked_seconds = 0.0

    def is_over(self) -> bool:
        return bool(self.end.query()) and (not self.in_stream or bool(self.after.query()))

    def seconds(self) -> float:
        return float(self.begin.elapsed_time(self.end)) / 1000

    def waited(self) -> float:
        stalled = float(self.before.elapsed_time(self.after)) / 1000 if self.in_stream else 0.0
        return self.blocked_seconds + stalled


class PendingCopy:
    """A copy under way. Source and destination belong to it until :meth:`wait` or :meth:`finish` has returned."""

    def __init__(
        self,
        chaos: Chaos,
        put_off: Callable[[], None] | None = None,
        stream: torch.cuda.Stream | None = None,
        timing: _Timing | None = None,
    ) -> None:
        self._chaos, self._put_off, self._stream, self._timing = chaos, put_off, stream, timing
        self._waited = False
        self._lock = threading.Lock()

    def wait(self) -> None:
        """The current stream goes on when the destination is complete. Waiting twice is harmless."""
        if self._waited:
            return
        self._waited = True
        if self._timing is not None and self._stream is not None:
            stream = torch.cuda.current_stream(self._stream.device)
            self._timing.before.record(stream)
            stream.wait_event(self._timing.end)
            self._timing.after.record(stream)
            self._timing.in_stream = True
        self._catch_up()

    @contextlib.contextmanager
    def afterwards(self, alone: bool = False) -> Iterator[None]:
        """What is issued inside comes after the copy, on the copy's own stream; without streams, after its end.

        Args:
            alone: nothing is issued, as there is only one rank; so the copy may still be put off.
        """
        if self._stream is None:
            if not alone:
                self.finish()
            yield
        else:
            with torch.cuda.stream(self._stream):
                yield

    def finish(self) -> None:
        """The program goes on when the destination is complete and the source may be written over."""
        if self._timing is not None and not self._timing.end.query():
            began = time.perf_counter()
            self._timing.end.synchronize()
            self._timing.blocked_seconds += time.perf_counter() - began
        self._catch_up()

    def is_over(self) -> bool:
        """Whether nothing is left to do, as far as the program knows."""
        return self._put_off is None and (self._timing is None or self._timing.end.query())

    def _catch_up(self) -> None:
        if self._put_off is None:
            return
        with self._lock:  # a delayed update's thread and the forward pass may wait for the same copy
            if self._put_off is not None:
                self._chaos.delay()
                self._put_off()
                self._put_off = None


class HostDeviceCopier:
    """Copies between ``device`` and host.

    Args:
        device: where the model computes; a CPU is its own host, and copies are made in line.
        ledger: every copy is counted there.
        chaos: puts copies off, when enabled.
        meter: times them.
    """

    def __init__(self, device: torch.device, ledger: Ledger, chaos: Chaos, meter: OffloadStats) -> None:
        self.device, self.ledger, self.chaos, self.meter = device, ledger, chaos, meter
        streams = device.type == "cuda"
        self._down = torch.cuda.Stream(device) if streams else None
        self._up = torch.cuda.Stream(device) if streams else None
        # From host memory, in the order of their launches; none that is over is before one that is not.
        self._reading: deque[PendingCopy] = deque()

    def to_host(
        self, kind: str, host: torch.Tensor, source: torch.Tensor, padding: int = 0, where: str = ""
    ) -> PendingCopy:
        """Launch ``host.copy_(source)``: when the current stream is done with ``source``, on the stream downwards.

        Args:
            kind: the ledger's name for it.
            host: 1-D, in the arena.
            source: 1-D on the device, of the same dtype: a conversion would go through fresh memory.
            padding: how many of the elements are padding.
            where: which bucket, for traces.
        """
        return self._launch("D2H", kind, host, source, self._down, padding, where)

    def to_device(
        self, kind: str, target: torch.Tensor, host: torch.Tensor, padding: int = 0, where: str = ""
    ) -> PendingCopy:
        """Launch ``target.copy_(host)``, when the current stream is done with ``target``; as :meth:`to_host`."""
        while self._reading and self._reading[0].is_over():
            self._reading.popleft()
        self._reading.append(self._launch("H2D", kind, target, host, self._up, padding, where))
        return self._reading[-1]

    def finish_reads(self) -> None:
        """Before the program writes to host memory out of turn: no copy reads any of it."""
        for copy in self._reading:
            copy.finish()
        self._reading.clear()

    def _launch(
        self,
        verb: str,
        kind: str,
        target: torch.Tensor,
        source: torch.Tensor,
        stream: torch.cuda.Stream | None,
        padding: int,
        where: str,
    ) -> PendingCopy:
        if target.dtype != source.dtype or target.numel() != source.numel():
            raise RuntimeError(
                f"{kind}: cannot copy {source.numel()} x {source.dtype} to {target.numel()} x {target.dtype}"
            )
        self.chaos.delay()
        self.ledger.record(kind, source.numel(), source.nbytes, padding, where=where, what="copy")
        if stream is None:
            return self._in_line(verb, kind, target, source, where)
        timing = _Timing(kind, source.nbytes)
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream), profiler_ranges.moving(verb, kind, where):
            stream.wait_event(ready)
            timing.begin.record(stream)
            target.copy_(source, non_blocking=True)
            timing.end.record(stream)
        self.meter.later(timing)
        return PendingCopy(self.chaos, None, stream, timing)

    def _in_line(self, verb: str, kind: str, target: torch.Tensor, source: torch.Tensor, where: str) -> PendingCopy:
        def copy() -> None:
            began = time.perf_counter()
            with torch.no_grad(), profiler_ranges.moving(verb, kind, where):
                target.copy_(source)
            took = time.perf_counter() - began
            self.meter.leg(kind).add(source.nbytes, took, took)

        if self.chaos.puts_off():
            return PendingCopy(self.chaos, copy)
        copy()
        return PendingCopy(self.chaos)
