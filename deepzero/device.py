"""The accelerator, once: which device a rank computes on, its streams and events, its memory, its random numbers.

Everything that deepzero asks of a GPU it asks an :class:`Accelerator`, and no other file says ``torch.cuda``. There are
three kinds of it. The *real* one stands over torch.accelerator, and over ``torch.cuda``, ``torch.xpu`` or whichever
module torch has for the device. It is written for CUDA, and for ROCm (which torch calls cuda), XPU and NPU as far as
torch's names go: it has been tried on CUDA alone. The *null* one is the CPU's: nothing runs beside the program, so an
event is always over and a stream is the caller's own order, and the same code runs. A *simulated* one looks on: it is
given to :func:`use`, and finds what would be a race on a real one.

**Order is said on the current stream alone.** A :class:`Stream` is one on which work runs beside the compute stream;
a :class:`StreamEvent` is one event of one buffer, recorded where the work is issued and waited for where the buffer is
needed. Nothing waits for a whole stream, and nothing needs ``record_stream``: buffers live as long as their owner, so
the caching allocator never reuses one in flight.

**CUDA's current device belongs to a thread**, and is GPU 0 in a new one: :meth:`Accelerator.thread_start`.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch


class StreamEvent:
    """One event of one buffer on ``device``: *record* it where the work is issued, *wait* for it where it is needed."""

    def __init__(self, module: Any, device: torch.device, timing: bool) -> None:
        self._event = module.Event(enable_timing=timing)
        # The device is named: the program's current one may be another.
        self._current_stream = functools.partial(module.current_stream, device)

    def record(self) -> None:
        """Everything issued so far on the current stream must be done before a waiter goes on."""
        self._event.record(self._current_stream())

    def wait(self) -> None:
        """The current stream goes on only after the recorded work; at once if none was recorded."""
        self._event.wait(self._current_stream())

    def synchronize(self) -> None:
        """The program goes on only after the recorded work."""
        self._event.synchronize()

    def query(self) -> bool:
        """Whether the recorded work is done, or none was recorded."""
        return bool(self._event.query())

    def seconds_until(self, later: StreamEvent) -> float:
        """From this event's work to that of ``later``; both are made with ``timing``, and over."""
        return float(self._event.elapsed_time(later._event)) / 1000


class NullEvent(StreamEvent):
    """Where nothing runs beside the program, what was issued is done."""

    def __init__(self) -> None:
        pass

    def record(self) -> None:
        """Nothing is under way."""

    wait = synchronize = record

    def query(self) -> bool:
        """It is done."""
        return True

    def seconds_until(self, later: StreamEvent) -> float:
        """No time passes between what is done at once."""
        return 0.0


class Stream:
    """A stream beside the compute stream. Neither waits for the other by itself: events order them."""

    def __init__(
        self,
        running: Callable[[], AbstractContextManager[object]],
        device: torch.device,
        key: int,
        current_key: Callable[[], int],
    ) -> None:
        self.running, self.device, self.key, self.current_key = running, device, key, current_key
        """``with stream.running():`` issues work on this stream; on a device without streams, in the caller's order.
        ``key`` is a number that no other stream of the device has, ``current_key()`` that of this thread's: it is asked
        for every gradient, and takes none of the objects that ``current_stream`` makes.
        """


def _named(module: Any, stream: Any, d: torch.device) -> Stream:
    current_key = lambda: int(torch._C._accelerator_getStream(d.index).stream_id)
    return Stream(functools.partial(module.stream, stream), d, int(stream.stream_id), current_key)


class Accelerator:
    """The real one, of torch's ``kind`` (``cuda``, ``xpu``, ``npu``). A method's ``d`` is a device of that kind."""

    has_streams = True
    """Whether something runs beside the program."""
    backend: str | None = None
    """Of the process group that serves it; None: the one that torch has for it (``nccl``, ``xccl``)."""
    in_use: ClassVar[list[Accelerator]] = []
    """Those that :func:`use` has put in the place of the machine's, on all threads: the last one counts."""

    def __init__(self, kind: str) -> None:
        self.kind, self.module = kind, torch.get_device_module(kind)
        self.batch_stream = functools.cache(self.stream)
        """The one of each device on which batches come; torch has but 32, and gives them out again and again."""

    # ---- which one ---------------------------------------------------------------------------------------------------

    def device_count(self) -> int:
        """How many this process sees."""
        return int(torch.accelerator.device_count())

    def current_device(self) -> torch.device:
        """This thread's."""
        return torch.device(self.kind, torch.accelerator.current_device_index())

    def set_device(self, d: torch.device) -> None:
        """From now on this thread's is ``d``."""
        torch.accelerator.set_device_index(d)

    def within(self, d: torch.device) -> AbstractContextManager[object]:
        """Inside, this thread's is ``d``."""
        context: AbstractContextManager[object] = self.module.device(d)
        return context

    def thread_start(self) -> Callable[[], None]:
        """What a thread that this one starts does first: it takes this thread's device, if this thread has one.

        Whatever asks CUDA anything on a thread that has not, waiting for an event included, makes a context on GPU 0:
        half a gigabyte for each other rank of the machine. To ask where there is no context would make one, too.
        """
        if not self.module.is_initialized():
            return lambda: None
        return functools.partial(self.set_device, self.current_device())

    def device_name(self, d: torch.device) -> str:
        """As its maker calls it."""
        return str(self.module.get_device_name(d))

    def supports_bf16(self, d: torch.device) -> bool:
        """Whether it computes in bf16 itself, without going through fp32."""
        if self.kind == "cuda":
            with self.within(d):  # torch asks about the current one
                return bool(self.module.is_bf16_supported(including_emulation=False))
        return bool(self.module.is_bf16_supported())

    def collectives(self, torch_distributed: Any, backend: str) -> tuple[Any, str]:
        """Who starts the collectives of its tensors, and in whose manner: torch, in that of the group's ``backend``."""
        return torch_distributed, backend

    # ---- order -------------------------------------------------------------------------------------------------------

    def stream(self, d: torch.device) -> Stream:
        """A stream of its own."""
        return _named(self.module, self.module.Stream(d), d)

    def current_stream(self, d: torch.device) -> Stream:
        """This thread's."""
        return _named(self.module, torch.accelerator.current_stream(d), d)

    def event(self, d: torch.device, timing: bool = False) -> StreamEvent:
        """An event, not recorded yet; with ``timing``, one that says when."""
        return StreamEvent(self.module, d, timing)

    def synchronize(self, d: torch.device) -> None:
        """The program goes on when everything is done on all streams. **Never in a step.**"""
        torch.accelerator.synchronize(d)

    # ---- memory ------------------------------------------------------------------------------------------------------

    def total_memory(self, d: torch.device) -> int:
        """Bytes that it has."""
        return int(self.module.get_device_properties(d).total_memory)

    def memory_allocated(self, d: torch.device) -> int:
        """Bytes of tensors in it, in this process."""
        return int(torch.accelerator.memory_allocated(d))

    def max_memory_allocated(self, d: torch.device) -> int:
        """The most that it was so far."""
        return int(torch.accelerator.max_memory_allocated(d))

    def empty_cache(self) -> None:
        """Give what no tensor uses back, for other processes."""
        torch.accelerator.empty_cache()

    def lock_pages(self, address: int, nbytes: int, d: torch.device) -> None:
        """Lock host memory that ``d`` copies from and to, as it stands: torch's own pinned memory is rounded up.

        Raises:
            OSError: the system refuses, or this kind of device has no way to lock memory that it has not allocated.
        """
        if self.kind != "cuda":
            raise OSError(errno.ENOTSUP, f"{self.kind} cannot lock memory that it has not allocated")
        with self.within(d):
            result = int(self.module.cudart().cudaHostRegister(address, nbytes, 0))
        if result != 0:
            # CUDA keeps its last error, and the next kernel would raise it, whoever launches it: this one takes it.
            with contextlib.suppress(RuntimeError):
                torch.empty(1, device=d).fill_(0)
            raise OSError(errno.EPERM, f"CUDA error {result}")

    def unlock_pages(self, address: int, d: torch.device) -> None:
        """Unlock it. Whoever waited for a copy did so in a stream, at most: its end comes before it loses its pages."""
        self.synchronize(d)
        with self.within(d):  # garbage is collected by whichever thread comes along
            self.module.cudart().cudaHostUnregister(address)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a CPU tensor in locked memory, which is not used again before copies from it are over.

        A tensor that is in locked memory is returned itself: its owner must not write to it before they are.
        """
        return tensor.pin_memory()

    # ---- random numbers ----------------------------------------------------------------------------------------------

    def rng_state(self, d: torch.device) -> torch.Tensor:
        """1-D uint8 on the CPU: the state of its generator."""
        state: torch.Tensor = self.module.get_rng_state(d)
        return state

    def manual_seed(self, seed: int, d: torch.device) -> None:
        """Begin anew, by ``seed``."""
        with self.within(d):
            self.module.manual_seed(seed)

    def set_rng_state(self, state: torch.Tensor, d: torch.device) -> None:
        """Go on from :meth:`rng_state`'s."""
        self.module.set_rng_state(state, d)


class MemoryHistory:
    """The history that torch's allocator keeps of an accelerator's memory."""

    def __init__(self, its: Accelerator) -> None:
        self._its = its

    def start(self, stacks: bool, max_entries: int) -> bool:
        """Record what is allocated and freed, and who has allocated what lives; with ``stacks``, what was freed, too.

        False: nothing was started, since the program records already or torch has no history for this device.
        """
        if (known := getattr(torch._C, f"_{self._its.kind}_isHistoryEnabled", None)) is None or known():
            return False
        # Frames of C++ cost far more than those of Python.
        context = "all" if stacks else "state"
        self._its.module.memory._record_memory_history(context=context, stacks="python", max_entries=max_entries)
        return True

    def stop(self) -> None:
        """Record it no more."""
        self._its.module.memory._record_memory_history(enabled=None)

    def dump(self, path: str) -> None:
        """Write what was recorded, for https://pytorch.org/memory_viz; nothing where torch has no history."""
        if hasattr(self._its.module.memory, "_dump_snapshot"):
            self._its.module.memory._dump_snapshot(path)


class NullAccelerator(Accelerator):
    """The CPU's, and that of tensors without values: memory is what this process has of the host's."""

    has_streams, backend = False, "gloo"

    def __init__(self) -> None:
        super().__init__("cpu")

    def device_count(self) -> int:
        """There is none."""
        return 0

    def current_device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    def _nothing(self, *_: Any, **__: Any) -> None:
        """There is nothing to choose, nothing is under way, kept or locked."""

    set_device = synchronize = empty_cache = lock_pages = unlock_pages = _nothing

    def within(self, d: torch.device) -> AbstractContextManager[object]:
        """There is nothing to choose."""
        return nullcontext()

    def thread_start(self) -> Callable[[], None]:
        """A thread has nothing to choose."""
        return self._nothing

    def device_name(self, d: torch.device) -> str:
        """``cpu``."""
        return self.kind

    def supports_bf16(self, d: torch.device) -> bool:
        """Every CPU does, some slowly."""
        return True

    def stream(self, d: torch.device) -> Stream:
        """The caller's own order."""
        return Stream(nullcontext, d, 0, lambda: 0)

    current_stream = stream

    def event(self, d: torch.device, timing: bool = False) -> StreamEvent:
        """One that is always over."""
        return NullEvent()

    def total_memory(self, d: torch.device) -> int:
        """Bytes of the machine."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def memory_allocated(self, d: torch.device) -> int:
        """Bytes resident now; the peak so far where the system does not say."""
        try:
            with open("/proc/self/statm", encoding="ascii") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            return self.max_memory_allocated(d)

    def max_memory_allocated(self, d: torch.device) -> int:
        """The most that was resident so far.

        Linux's own high-water mark, where there is one: ``getrusage`` counts a child's memory from before it became
        itself, when it still was a copy of its parent.
        """
        with contextlib.suppress(OSError), open("/proc/self/status", encoding="ascii", errors="replace") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return tensor

    def rng_state(self, d: torch.device) -> torch.Tensor:
        """The CPU's generator is the host's."""
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, d: torch.device) -> None:
        """As :meth:`rng_state` gave it."""
        torch.set_rng_state(state)

    def manual_seed(self, seed: int, d: torch.device) -> None:
        """The one generator's."""
        torch.default_generator.manual_seed(seed)


# ---- whose it is -----------------------------------------------------------------------------------------------------

_NULL = NullAccelerator()


@contextlib.contextmanager
def use(accelerator: Accelerator) -> Iterator[None]:
    """Inside, on all threads, ``accelerator`` is this process's. What was built before keeps the one that it has."""
    Accelerator.in_use.append(accelerator)
    try:
        yield
    finally:
        Accelerator.in_use.remove(accelerator)


@functools.cache
def _real(kind: str) -> Accelerator:
    return Accelerator(kind)


def installed() -> Accelerator:
    """The machine's: that of :func:`use`, else the one that torch finds, else the null one."""
    if Accelerator.in_use:
        return Accelerator.in_use[-1]
    found = torch.accelerator.current_accelerator(check_available=True)
    # mps has neither streams nor collectives.
    return _NULL if found is None or found.type == "mps" else _real(found.type)


def accelerator() -> Accelerator:
    """This process's: the machine's, unless ``DEEPZERO_DEVICE=cpu`` keeps the run off it."""
    return _NULL if os.environ.get("DEEPZERO_DEVICE") == "cpu" and not Accelerator.in_use else installed()


def accelerator_of(d: torch.device) -> Accelerator:
    """The one that serves ``d``: the null one for the CPU and for ``meta``."""
    if d.type in ("cpu", "meta"):
        return _NULL
    return Accelerator.in_use[-1] if Accelerator.in_use else _real(d.type)


def elementwise_kernel(source: str, d: torch.device) -> Callable[..., torch.Tensor] | None:
    """A kernel for ``d`` by ``source``: a C++ template of a function of up to eight elements; None where there is none.

    It is compiled when it is first called with a dtype, in half a second, and kept in torch's folder of kernels.
    """
    its = accelerator_of(d)
    # Not ROCm, which torch calls cuda: its compiler may round a product and a sum once, whatever they are called.
    real = its.kind == "cuda" and not isinstance(its, NullAccelerator) and torch.version.hip is None
    return torch.cuda.jiterator._create_jit_fn(source) if real else None
