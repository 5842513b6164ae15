"""The link between device and host: copies in two verbs, counted, timed, and disturbed by chaos mode.

*Launch* (:meth:`HostDeviceCopier.to_host`, :meth:`HostDeviceCopier.to_device`) returns a :class:`Transfer`. Who
reads the result on the device says ``copy.wait()``: the current stream goes on when the bytes are there. Who reads it
on the host, or is about to write over the source, says ``copy.finish()``: the program goes on when the bytes have left.

On a GPU there is one stream for each direction, as there is one copy engine for each. A copy begins when what was
issued before it on the current stream is done, and no stream ever waits for a whole other stream.

Without a GPU a copy is made in line. Then nothing could come too early, and no test could find who forgets to wait; so
chaos mode *puts copies off*: by chance, a copy is made when somebody waits for it, and not before. A result that is
read without waiting is then the old one, and a source that is written over too early arrives wrong.

Sources: [ZeRO-Offload], section 4, for the flow of data; ``async_inplace_copy_grad_to_fp32_buffer_from_gpu`` in
``stage_1_and_2.py`` of [DeepSpeed], which is anything but asynchronous with pages that are not locked.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from deepzero.comm.chaos import Chaos
from deepzero.comm.ledger import Ledger
from deepzero.comm.profiler_ranges import Ranges
from deepzero.device import Stream, accelerator_of

TO_HOST = "offload.gradients_to_host"
SUMS_TO_DEVICE = "offload.gradients_to_device"
"""What earlier micro-batches have left, to be added to."""
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
    """One part of the pipeline: what it moved, and how long that took."""

    bytes: int = 0
    seconds: float = 0.0  # during which bytes were under way
    waited_seconds: float = 0.0  # of them, those in which the program, or the compute stream, stood still for it

    def add(self, moved: int, seconds: float, waited: float) -> None:
        """One more piece of work."""
        self.bytes += moved
        self.seconds += seconds
        self.waited_seconds += waited

    def as_dict(self) -> dict[str, float]:
        """Bytes, GB/s, and which part of the time was hidden behind other work (0 to 1)."""
        hidden, speed = 0.0, 0.0
        if self.seconds > 0:
            hidden, speed = 1.0 - min(1.0, self.waited_seconds / self.seconds), self.bytes / self.seconds / 1e9
        return {"bytes": self.bytes, "seconds": self.seconds, "gb_per_second": speed, "hidden": hidden}


class OffloadStats:
    """The legs of the pipeline, by kind: of the step under way and of the last one."""

    def __init__(self) -> None:
        self.legs, self.last_step = defaultdict[str, CopyStats](CopyStats), dict[str, CopyStats]()
        # A GPU's copies, whose events are read when they have happened.
        self.timed: deque[PendingCopy] = deque()

    def close_step(self) -> None:
        """An optimizer step is complete. On a GPU copies may still run: they count in the step in which they end."""
        while self.timed and (times := self.timed[0].times()) is not None:
            copy = self.timed.popleft()
            self.legs[copy.kind].add(copy.nbytes, *times)
        self.last_step, self.legs = dict(self.legs), defaultdict(CopyStats)


class Transfer:
    """Bytes under way. Source and destination belong to it until :meth:`wait` or :meth:`finish` has returned."""

    _stream: Stream | None = None  # on which it was launched

    def wait(self) -> None:
        """The current stream goes on when the destination is complete."""
        raise NotImplementedError

    def finish(self) -> None:
        """The program goes on when the destination is complete."""
        raise NotImplementedError

    def is_over(self) -> bool:
        """Whether nothing is left to do, as far as the program knows."""
        raise NotImplementedError

    @contextlib.contextmanager
    def afterwards(self, alone: bool = False) -> Iterator[None]:
        """What is issued inside comes after the transfer: on its own stream, or, without one, after its end.

        ``alone``: nothing is issued, as there is only one rank; so the transfer may still be put off.
        """
        if self._stream is None and not alone:
            self.finish()
        with self._stream.running() if self._stream is not None else contextlib.nullcontext():
            yield


class PendingCopy(Transfer):
    """A copy under way. ``stream`` is the one on which it was launched, None without a GPU.

    ``put_off`` makes a copy that has not begun.
    """

    def __init__(
        self, chaos: Chaos, kind: str, nbytes: int, stream: Stream | None, put_off: Callable[[], None] | None
    ) -> None:
        self.kind, self.nbytes = kind, nbytes
        self._chaos, self._stream, self._put_off = chaos, stream, put_off
        self._waited, self._blocked_seconds, self._lock = False, 0.0, threading.Lock()
        if stream is not None:
            # Two around the copy, and two around the place where the compute stream waited for it.
            event = accelerator_of(stream.device).event
            events = (event(stream.device, timing=True) for _ in range(4))
            self.begin, self.end, self._before, self._after = events

    def wait(self) -> None:
        """The current stream goes on when the destination is complete. Waiting twice is harmless."""
        if self._waited:
            return
        if self._stream is not None:
            self._before.record()
            self.end.wait()
            self._after.record()
        self._waited = True
        self._catch_up()

    def finish(self) -> None:
        """The program goes on when the destination is complete and the source may be written over."""
        if self._stream is not None and not self.end.query():
            began = time.perf_counter()
            self.end.synchronize()
            self._blocked_seconds += time.perf_counter() - began
        self._catch_up()

    def is_over(self) -> bool:
        """Whether nothing is left to do, as far as the program knows."""
        return self._put_off is None and (self._stream is None or self.end.query())

    def times(self) -> tuple[float, float] | None:
        """Of a GPU's copy, the seconds that it took, and those that somebody stood still for it; None: not over yet."""
        if not self.end.query() or (self._waited and not self._after.query()):
            return None
        stalled = self._before.seconds_until(self._after) if self._waited else 0.0
        return self.begin.seconds_until(self.end), self._blocked_seconds + stalled

    def _catch_up(self) -> None:
        if self._put_off is None:
            return
        with self._lock:  # a delayed update's thread and the forward pass may wait for the same copy
            if self._put_off is not None:
                self._chaos.delay()
                self._put_off()
                self._put_off = None


class HostDeviceCopier:
    """Copies between ``device`` and host, counted in ``ledger``, timed by ``meter``, named in ``ranges``.

    A CPU is its own host: copies are made in line, or put off by ``chaos``.
    """

    def __init__(
        self, device: torch.device, ledger: Ledger, chaos: Chaos, meter: OffloadStats, ranges: Ranges | None = None
    ) -> None:
        self._ranges = ranges or Ranges()
        self.device, self.ledger, self.chaos, self.meter = device, ledger, chaos, meter
        self._accelerator = accelerator_of(device)
        ways = ("D2H", "H2D") if self._accelerator.has_streams else ()
        self._streams = {way: self._accelerator.stream(device) for way in ways}
        # From host memory, in the order of their launches; none that is over is before one that is not.
        self._reading: deque[PendingCopy] = deque()

    def to_host(
        self, kind: str, host: torch.Tensor, source: torch.Tensor, padding: int = 0, where: str = ""
    ) -> Transfer:
        """Launch ``host.copy_(source)``: when the current stream is done with ``source``, on the stream downwards.

        Both are 1-D and of one dtype: a conversion would go through fresh memory. ``kind`` is the ledger's name for the
        copy, ``padding`` says how many of the elements are padding, ``where`` names the bucket, for traces.
        """
        return self._launch("D2H", kind, host, source, padding, where)

    def to_device(
        self, kind: str, target: torch.Tensor, host: torch.Tensor, padding: int = 0, where: str = ""
    ) -> Transfer:
        """Launch ``target.copy_(host)``, when the current stream is done with ``target``; as :meth:`to_host`."""
        while self._reading and self._reading[0].is_over():
            self._reading.popleft()
        self._reading.append(self._launch("H2D", kind, target, host, padding, where))
        return self._reading[-1]

    def finish_reads(self) -> None:
        """Before the program writes to host memory out of turn: no copy reads any of it."""
        for copy in self._reading:
            copy.finish()
        self._reading.clear()

    def close_step(self) -> None:
        """An optimizer step is complete."""
        self.meter.close_step()

    def _launch(
        self, way: str, kind: str, target: torch.Tensor, source: torch.Tensor, padding: int, where: str
    ) -> PendingCopy:
        if target.dtype != source.dtype or target.numel() != source.numel():
            sizes = f"{source.numel()} x {source.dtype} to {target.numel()} x {target.dtype}"
            raise RuntimeError(f"{kind}: cannot copy {sizes}")
        self.chaos.delay()
        self.ledger.record(kind, source.numel(), source.nbytes, padding, where=where, what="copy")
        if self._streams:
            stream, ready = self._streams[way], self._accelerator.event(self.device)
            copy = PendingCopy(self.chaos, kind, source.nbytes, stream, None)
            # Both tensors are the compute stream's until here: the copy begins behind what has been issued there.
            ready.record()
            with stream.running(), self._ranges.moving(way, kind, where):
                ready.wait()
                copy.begin.record()
                target.copy_(source, non_blocking=True)
                copy.end.record()
            self.meter.timed.append(copy)
            return copy

        def in_line() -> None:
            began = time.perf_counter()
            with torch.no_grad(), self._ranges.moving(way, kind, where):
                target.copy_(source)
            took = time.perf_counter() - began
            self.meter.legs[kind].add(source.nbytes, took, took)

        put_off = self.chaos.puts_off()
        if not put_off:
            in_line()
        return PendingCopy(self.chaos, kind, source.nbytes, None, in_line if put_off else None)
