"""Simulated streams: a run on CPUs that finds missing waits in the code for a GPU. ``debug=streams``.

The rank's device is a GPU, and its tensors are the CPU's: what is made with ``device=cuda`` is *device* memory, all
else *host* memory. Nothing runs beside the program, so that results do not depend on the day. What a GPU would
be free to do in another order is computed instead, from who has waited for whom (``happens_before.py``).

- An access that nothing orders after a conflicting one is a :class:`Race`: of streams, copies, collectives, threads.
- An operation on host and on device memory at once raises :class:`MixedDevices`, copies and numbers apart.
- Memory goes back to the stream that it was allocated on when its last reference goes. If another stream may still be
  using it then, that is :class:`FreedInUse`, of which the program hears at its next operation.
- A copy without page-locked memory makes the program wait, whatever ``non_blocking`` says. That is allowed, and listed.

Two modes of torch see operations: one where Python calls them, which says where tensors lie, and one below autograd,
which keeps account. A :class:`SimulatedAccelerator` takes the place of the real one and makes streams and events;
:class:`Transport` takes that of ``torch.distributed`` and launches collectives as NCCL does. What passes by all of
them is interposed (:func:`_interposed`), as ThreadSanitizer does it with pthread's functions. What a compiled kernel or
numpy does with a pointer is seen as far as torch is asked for the pointer's tensor.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from deepzero import device
from deepzero.comm import flight_recorder
from deepzero.comm.collectives import ALL_GATHER, REDUCE_SCATTER
from deepzero.comm.happens_before import Agent, FreedInUse, Machine, MixedDevices, Race, StreamFault, place_of, stack
from deepzero.utils.exit_hooks import before_the_end

__all__ = ["FreedInUse", "Machine", "MixedDevices", "Race", "StreamFault", "simulate_streams", "simulated_streams"]

CPU = torch.device("cpu")
LOOKS = {"numpy", "__array__", "tolist", "__dlpack__"}
"""The program looks at the values itself, and torch's dispatcher does not hear of it."""


# ---- what torch is told ----------------------------------------------------------------------------------------------


class _Operations(TorchDispatchMode):
    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # the other mode has seen what there was to see
            if not self.machine.open:
                return func(*args, **(kwargs or {}))
            return self.machine.operation(func, args, kwargs or {})


def _is_meta(what: Any) -> bool:
    with torch._C.DisableTorchFunction():
        if isinstance(what, torch.Tensor):
            return what.is_meta
        return isinstance(what, (str, torch.device)) and str(what) == "meta"


def _side_of(where: Any) -> str:
    return "device" if torch.device(where).type == "cuda" else "host"


class _Devices(TorchFunctionMode):
    """Tensors say which device they are on, and can be made on it and moved to it."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, machine = dict(kwargs or {}), self.machine
        if not machine.open:
            return func(*args, **kwargs)
        if any(map(_is_meta, (*args[:2], kwargs.get("device")))):
            return func(*args, **kwargs)  # a dry run's, without values
        asked, name = getattr(func, "__self__", None), getattr(func, "__name__", "")
        if asked is torch.Tensor.device:
            return machine.gpu if machine.side(args[0]) == "device" else CPU
        if asked is torch.Tensor.is_cuda:
            return machine.side(args[0]) == "device"
        if name in LOOKS:
            if name != "tolist" and machine.side(args[0]) == "device":
                raise TypeError("can't convert cuda:0 device type tensor to numpy")
            machine.look(args[0], name)
        if name == "is_pinned":
            return machine.is_pinned(args[0])
        if name == "pin_memory":
            return machine.lies(args[0].detach().clone(), "host", pinned=True)
        if func in (torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda):
            return self._moved(func, args, kwargs)
        pinned = bool(kwargs.pop("pin_memory", False))
        if kwargs.get("device") is not None:
            side, kwargs["device"] = _side_of(kwargs["device"]), CPU
            return machine.lies(func(*args, **kwargs), side, pinned=pinned)
        result = func(*args, **kwargs)
        made_of = any(isinstance(t, torch.Tensor) for t in tree_leaves((args, kwargs)))
        if isinstance(result, torch.Tensor) and not made_of and machine.memory(result).side is None:
            machine.lies(result, "host", pinned=pinned)
        return result

    def _moved(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        """``to``, ``cpu`` and ``cuda``: a copy where the sides differ."""
        machine, tensor, rest = self.machine, args[0], list(args[1:])
        where = kwargs.get("device")
        if func is not torch.Tensor.to:
            where, rest, kwargs = CPU if func is torch.Tensor.cpu else machine.gpu, [], {}
        elif rest and isinstance(rest[0], torch.Tensor):
            where, rest = (machine.gpu if machine.side(rest[0]) == "device" else CPU), [rest[0].dtype, *rest[1:]]
        elif rest and not isinstance(rest[0], torch.dtype):
            where, rest = rest[0], rest[1:]
        asked = {**kwargs, **dict(zip(("dtype", "non_blocking", "copy"), rest, strict=False))}
        dtype, side = asked.get("dtype") or tensor.dtype, machine.side(tensor) if where is None else _side_of(where)
        if side == machine.side(tensor):
            return torch.Tensor.to(tensor, dtype, copy=bool(asked.get("copy")))
        changed, blocks = torch.Tensor.to(tensor, dtype), not asked.get("non_blocking")
        # torch locks the memory into which it copies without blocking.
        target = machine.lies(torch.empty_like(changed), side, pinned=side == "host" and not blocks)
        if changed.requires_grad:
            return _Move.apply(changed, target, machine, blocks)
        return target.copy_(changed, non_blocking=not blocks)


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Any, target: Any, machine: Machine, blocks: bool) -> Any:
        ctx.machine, ctx.side = machine, machine.side(source)
        return target.copy_(source, non_blocking=not blocks).view_as(target)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        back = ctx.machine.lies(torch.empty_like(grad), ctx.side)
        return back.copy_(grad), None, None, None


# ---- streams, events, collectives ------------------------------------------------------------------------------------


class _Event(device.StreamEvent):
    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._clock: dict[Agent, int] = {}

    def record(self) -> None:
        stream = self._machine.launch()
        stream.records.append((stream.at, stack()))
        self._clock = dict(stream.clock)

    def wait(self) -> None:
        self._machine.launch().knows(self._clock)

    def synchronize(self) -> None:
        self._machine.here.agent.knows(self._clock)

    def query(self) -> bool:
        """Over only when the program knows it already: a GPU may be as slow as it likes."""
        known = self._machine.here.agent.clock
        return all(known.get(agent, 0) >= at for agent, at in self._clock.items())

    def seconds_until(self, later: device.StreamEvent) -> float:
        return 1e-3


class _Work:
    """NCCL's: waiting orders the current stream, and until then the tensors live."""

    def __init__(self, machine: Machine, tensors: Sequence[torch.Tensor]) -> None:
        self._machine, self._tensors, self._clock = machine, tensors, dict(machine.network.clock)

    def wait(self, *_: Any) -> None:
        self._machine.launch().knows(self._clock)
        self._tensors = ()


def _others(whole: torch.Tensor, mine: torch.Tensor) -> list[torch.Tensor]:
    start = mine.storage_offset() - whole.storage_offset()
    return [whole[:start], whole[start + mine.numel() :]]


_TOUCHES: dict[str, Callable[..., tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]]] = {
    "all_to_all": lambda outputs, inputs: (inputs, outputs),
    # In place: this rank's part is read where it lies, and not written.
    ALL_GATHER: lambda whole, mine: ([mine], _others(whole, mine)),
    REDUCE_SCATTER: lambda output, whole: ([whole], [output]),
    "all_reduce": lambda tensor: ([], [tensor]),
}
"""Function of ``torch.distributed`` → what the network reads and writes."""


class Transport:
    """In place of ``torch.distributed``: collectives as NCCL launches them, carried by the group's own backend.

    A collective is launched behind the current stream and runs as the network. Its bytes travel at once.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def __getattr__(self, name: str) -> Callable[..., _Work]:
        return functools.partial(self._launch, name)

    def _launch(self, name: str, *tensors: Any, group: Any = None, async_op: bool = True) -> _Work:
        machine, launched = self.machine, flight_recorder.observer().flight_recorder.waiting
        what = "a collective" if launched is None else f"{launched.kind} {launched.where}".strip()
        reads, writes = _TOUCHES[name](*tensors)
        with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
            machine.network.knows(machine.launch().clock)
            for tensor in (*reads, *writes):
                machine.touch(machine.network, tensor, any(tensor is one for one in writes), what)
            self.carry(name, *tensors, group=group)
        return _Work(machine, [*reads, *writes])

    def carry(self, name: str, *tensors: Any, group: Any) -> None:
        """Do it. What is empty is not exchanged, and gloo has ``all_to_all`` for one tensor alone."""
        if name != "all_to_all":
            getattr(dist, name)(*tensors, group=group)
            return
        outputs, inputs = tensors
        among: Any = group or dist.group.WORLD
        works = [among.send([t], q, 0) for q, t in enumerate(inputs) if t.numel()]
        works += [among.recv([t], q, 0) for q, t in enumerate(outputs) if t.numel()]
        for work in works:
            work.wait()


class SimulatedAccelerator(device.NullAccelerator):
    """A GPU that is not there."""

    has_streams, backend = True, "gloo"
    transport_class = Transport

    def __init__(self) -> None:
        super().__init__()
        self.kind, self.machine = "cuda", Machine()

    def device_count(self) -> int:
        """As many as anybody asks for: each rank has one of its own."""
        return 1 << 16

    def current_device(self) -> torch.device:
        """The one that the rank has chosen."""
        return self.machine.gpu

    def set_device(self, d: torch.device) -> None:
        """From now on all tensors of this process are on ``d``."""
        self.machine.gpu = d

    def device_name(self, d: torch.device) -> str:
        """It has no maker."""
        return "simulated streams"

    def collectives(self, torch_distributed: Any, backend: str) -> tuple[Any, str]:
        """NCCL's."""
        return self.transport_class(self.machine), "nccl"

    def thread_start(self) -> Callable[[], None]:
        """The new thread comes after this one, and is looked at, too."""
        machine, clock = self.machine, dict(self.machine.here.agent.clock)

        def begin() -> None:
            machine.here.agent.knows(clock)
            _Operations(machine).__enter__()
            _Devices(machine).__enter__()

        return begin

    def stream(self, d: torch.device) -> device.Stream:
        """An agent, named after the line that asks for it."""
        made = Agent(f"side stream {len(self.machine.streams) - 1} of {place_of(stack())}")
        self.machine.streams.append(made)
        return self._named(made, d)

    def current_stream(self, d: torch.device) -> device.Stream:
        """This thread's."""
        return self._named(self.machine.here.streams[-1], d)

    def _named(self, stream: Any, d: torch.device) -> device.Stream:
        key, here = self.machine.streams.index, self.machine.here
        running = functools.partial(self.machine.running, stream)
        return device.Stream(running, d, key(stream), lambda: key(here.streams[-1]))

    def event(self, d: torch.device, timing: bool = False) -> device.StreamEvent:
        """A clock that is carried."""
        return _Event(self.machine)

    def synchronize(self, d: torch.device) -> None:
        """The program waits for everything."""
        for agent in self.machine.streams:
            self.machine.here.agent.knows(agent.clock)

    def memory_allocated(self, d: torch.device) -> int:
        """Bytes of device memory that somebody refers to."""
        return self.machine.allocated

    def max_memory_allocated(self, d: torch.device) -> int:
        """The most so far."""
        return self.machine.peak

    def lock_pages(self, address: int, nbytes: int, d: torch.device) -> None:
        """Note it."""
        self.machine.locked[address] = nbytes

    def unlock_pages(self, address: int, d: torch.device) -> None:
        """Note it, when everything is done."""
        self.synchronize(d)
        del self.machine.locked[address]

    pin = device.Accelerator.pin


# ---- the program's own order -----------------------------------------------------------------------------------------


class _Inside:
    """A function that runs inside of ``modes()``. Who looks at it sees the function: whose method it is, its name."""

    def __init__(self, modes: Callable[[], Any], function: Any) -> None:
        self._modes, self._function = modes, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._modes():
            return self._function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)


def _kinds(kind: type) -> Iterator[type]:
    inside: type
    for inside in kind.__subclasses__():
        yield inside
        yield from _kinds(inside)


def _interposed(machine: Machine) -> Iterator[tuple[Any, str, Any]]:
    """What has to be heard of and passes by torch's modes: (holder, name, value)."""
    devices = functools.partial(_Devices, machine)
    # Torch puts a mode aside while it runs a function for it, and what the function calls back is without it.
    yield torch.autograd, "_engine_run_backward", _Inside(devices, torch.autograd._engine_run_backward)
    push = torch._C._autograd._push_saved_tensors_default_hooks
    hooks = lambda pack, unpack: push(_Inside(devices, pack), _Inside(devices, unpack))
    yield torch._C._autograd, "_push_saved_tensors_default_hooks", hooks

    for kind in _kinds(torch.Tensor):
        answers = vars(kind).get("__torch_function__")
        if kind.__module__.startswith("deepzero.") and isinstance(answers, classmethod):
            yield kind, "__torch_function__", classmethod(_Inside(devices, answers.__func__))

    # Makers that neither mode sees.
    def borrowing(make: Any) -> Any:
        return lambda *args, **kwargs: machine.lies(make(*args, **kwargs), "host", borrowed=True)

    def from_dlpack(tensor: Any, again: Any = torch.from_dlpack) -> Any:
        with torch._C.DisableTorchFunction():
            made, of = again(tensor), machine.memory(tensor)
            start = of.start + tensor.storage_offset() * tensor.itemsize
            return machine.lies(made, of.side or "host", accesses=of.accesses, start=start, borrowed=True)

    class Generator(torch.Generator):
        def __new__(cls, where: Any = "cpu") -> Any:
            return super().__new__(cls, CPU)  # type: ignore[call-arg]

    yield torch, "Generator", Generator

    # Optimizers ask C++ which tensors are on one device.
    def grouped(lists: Any, indices: bool = False, group: Any = torch._C._group_tensors_by_device_and_dtype) -> Any:
        found: dict[Any, tuple[list[list[Any]], list[int]]] = {}
        for (where, dtype), (tensors, there) in group(lists, True).items():
            for place, number in enumerate(there):
                where = machine.gpu if machine.side(tensors[0][place]) == "device" else CPU
                columns, numbers = found.setdefault((where, dtype), ([[] for _ in tensors], []))
                for column, some in zip(columns, tensors, strict=True):
                    column.extend(some[place : place + 1])
                numbers.append(number)
        return found

    yield torch._C, "_group_tensors_by_device_and_dtype", grouped
    yield torch, "frombuffer", borrowing(torch.frombuffer)
    yield torch, "from_numpy", borrowing(torch.from_numpy)
    yield torch, "from_dlpack", from_dlpack
    yield torch.utils.dlpack, "to_dlpack", lambda tensor: tensor  # a capsule would not tell whose memory it has

    def resize_(storage: Any, nbytes: int, resize: Any = torch.UntypedStorage.resize_) -> Any:
        if (memory := machine.memories.get(storage._cdata)) is not None:
            if nbytes < storage.nbytes():
                machine.freed(memory)
                memory.accesses.clear()
            memory.home = machine.here.streams[-1]
            if memory.side == "device":
                machine._count(memory, nbytes)
        return resize(storage, nbytes)

    yield torch.UntypedStorage, "resize_", resize_
    yield from _threads(machine)


def _threads(machine: Machine) -> Iterator[tuple[Any, str, Any]]:
    """A thread's end and a future carry clocks, as a lock's release does in ThreadSanitizer."""
    clocks: weakref.WeakKeyDictionary[Any, dict[Agent, int]] = weakref.WeakKeyDictionary()

    def join(thread: Any, timeout: Any = None, join: Any = threading.Thread.join) -> None:
        join(thread, timeout)
        if not thread.is_alive() and thread in machine.agents:
            machine.here.agent.knows(machine.agents[thread].clock)

    def gives(method: Any) -> Any:
        def give(future: Any, value: Any) -> Any:
            clocks[future] = dict(machine.here.agent.clock)
            return method(future, value)

        return give

    def takes(method: Any) -> Any:
        def take(future: Any, timeout: Any = None) -> Any:
            try:
                return method(future, timeout)
            finally:
                machine.here.agent.knows(clocks.get(future, {}))

        return take

    def submit(pool: Any, work: Any, /, *args: Any, submit: Any = ThreadPoolExecutor.submit, **kwargs: Any) -> Any:
        clock = dict(machine.here.agent.clock)

        def after(*args: Any, **kwargs: Any) -> Any:
            machine.here.agent.knows(clock)
            return work(*args, **kwargs)

        return submit(pool, after, *args, **kwargs)

    yield threading.Thread, "join", join
    yield from ((Future, name, gives(getattr(Future, name))) for name in ("set_result", "set_exception"))
    yield from ((Future, name, takes(getattr(Future, name))) for name in ("result", "exception"))
    yield ThreadPoolExecutor, "submit", submit


@contextlib.contextmanager
def simulated_streams(accelerator: SimulatedAccelerator | None = None) -> Iterator[Machine]:
    """Inside, this rank computes on ``cuda:0``, and is looked at. Yields who looks."""
    accelerator = accelerator or SimulatedAccelerator()
    machine = accelerator.machine
    with contextlib.ExitStack() as stack:
        for holder, name, value in list(_interposed(machine)):
            own = vars(holder).get(name)
            stack.callback(*((delattr, holder, name) if own is None else (setattr, holder, name, own)))
            setattr(holder, name, value)
        stack.enter_context(device.use(accelerator))
        stack.enter_context(_Operations(machine))
        stack.enter_context(_Devices(machine))
        yield machine
    machine.close()


def simulate_streams() -> Machine:
    """From now on, until the process ends: :func:`simulated_streams`. Once is enough."""
    running = device.installed()
    if isinstance(running, SimulatedAccelerator):
        return running.machine
    held = contextlib.ExitStack()
    machine = held.enter_context(simulated_streams())
    before_the_end(held.close)
    return machine
