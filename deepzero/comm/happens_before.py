"""Who has touched which bytes, and whether that was in order: the account that simulated streams keep.

**Agents** work in an order of their own: each thread of the program, each stream, and the network, which stands for
NCCL's stream. Each has a vector clock. Events, waits for a collective, synchronisations, and the starts, ends and
futures of threads carry clocks from one agent to another: what has happened before.

**Accesses.** Each operation of torch, each collective and each look of the program at a tensor reads or writes a range
of bytes of a storage, as an agent. Two of them by different agents, one of them writing, must be ordered by the clocks,
whatever the timing was; else there is a :class:`Race`, with both stacks, and with the wait that is missing. Within an
agent's order operations are complete: what a kernel does inside is not looked at.

This is FastTrack without its compression of clocks, as ThreadSanitizer has it for the threads of a program.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

log = logging.getLogger(__name__)

NO_VALUES = {
    "empty_like", "zeros_like", "ones_like", "full_like", "new_zeros", "new_empty", "new_full", "set_", "resize_",
}  # fmt: skip
"""What asks for a tensor's shape alone."""
COPIES = {"copy_", "_to_copy", "_foreach_copy_"}
INDEXES = {"index", "index_put_", "_index_put_impl_", "_unsafe_index"}
"""Take index tensors from either side."""
STANDS_STILL = {"_local_scalar_dense", "equal", "nonzero", "is_nonzero", "masked_select"}
"""The program waits for their result."""
DEPTH = 12
"""Frames of a stack that are kept."""

Stack: TypeAlias = list[tuple[CodeType, int]]


class StreamFault(RuntimeError):
    """What goes wrong on a GPU, on some days."""


class Race(StreamFault):
    """Bytes are used while another agent may still be reading or writing them."""


class MixedDevices(StreamFault):
    """One operation on host memory and device memory."""


class FreedInUse(StreamFault):
    """Memory has gone back to the allocator, and a stream may still be using it."""


class Agent:
    """A thread of the program, a stream, or the network: something that works in its own order."""

    def __init__(self, name: str, thread: bool = False) -> None:
        self.name, self.thread = name, thread
        self.clock: dict[Agent, int] = {}
        self.at = 0
        # Where events were recorded on it: for the words about the wait that is missing.
        self.records: deque[tuple[int, Stack]] = deque(maxlen=256)
        # Of a stream: where it was, in its own order, when memory of its went back to the allocator.
        self.freed: tuple[int, Stack] | None = None

    def knows(self, clock: dict[Agent, int]) -> None:
        """What this agent does from now on comes after ``clock``."""
        for agent, at in clock.items():
            if at > self.clock.get(agent, 0):
                self.clock[agent] = at

    def steps(self) -> int:
        """It does one thing more; its number."""
        self.at += 1
        self.clock[self] = self.at
        return self.at


class Access(NamedTuple):
    """Bytes ``[lo, hi)`` of a storage, read or written as the ``at``-th thing that ``agent`` does."""

    lo: int
    hi: int
    writes: bool
    agent: Agent
    at: int
    what: str
    stack: Stack

    def words(self) -> str:
        """Who does what."""
        return f"{self.agent.name} {'writes' if self.writes else 'reads'} ({self.what})"


class Memory:
    """What is known of one storage."""

    def __init__(self, home: Agent) -> None:
        self.side: str | None = None  # None: nobody has said yet
        self.home = home  # the stream that the allocator gives it to again; of host memory, nobody's
        self.accesses: list[Access] = []  # the last ones that matter; an alias has those of its original
        self.start = 0  # of an alias, in bytes of its original
        self.nbytes = 0  # as counted among the device's
        self.pinned = self.borrowed = False  # borrowed: somebody else gives the bytes back
        self.alive: weakref.ref[Any] | None = None


class _Thread(threading.local):
    """A thread's agent, and the streams that it is running on, the current one last."""

    def __init__(self, machine: Machine) -> None:
        self.agent = machine.agents.setdefault(
            threading.current_thread(), Agent(f"thread {threading.current_thread().name}", thread=True)
        )
        self.streams = [machine.compute]


class Machine:
    """Who has touched which bytes, on which side they are, and who comes after whom."""

    def __init__(self) -> None:
        self.gpu = torch.device("cuda", 0)  # until the rank has chosen
        self.compute, self.network = Agent("the compute stream"), Agent("the network")
        self.streams = [self.compute, self.network]
        self.agents: weakref.WeakKeyDictionary[threading.Thread, Agent] = weakref.WeakKeyDictionary()
        self.here = _Thread(self)
        self.here.agent.name = "the program"
        self.memories: dict[int, Memory] = {}
        self.crossings: list[tuple[str, int]] = []
        """Copies between the sides that the program stood still for, as (where, bytes)."""
        self.blocking: dict[str, int] = {}
        """Of them, those that were asked not to block: where → bytes."""
        self.locked: dict[int, int] = {}
        """Page-locked memory that torch has not allocated: addresses and bytes."""
        self.namers: list[Callable[[torch.Tensor], str]] = []
        """Each says what a tensor is in ZeRO's words; "" if it does not know."""
        self.late: list[StreamFault] = []
        """Faults that were found where nothing can be raised."""
        self.waits: list[str] = []
        """Where the program stood still for the current stream."""
        self.allocated = self.peak = self.operations = 0
        self.open = True
        self._lock = threading.RLock()

    # ---- sides -------------------------------------------------------------------------------------------------------

    def memory(self, tensor: torch.Tensor) -> Memory:
        """That of a tensor's storage."""
        with torch._C.DisableTorchFunctionSubclass():
            storage = tensor.untyped_storage()
        key = storage._cdata
        if (found := self.memories.get(key)) is None:
            found = self.memories[key] = Memory(self.here.streams[-1])
            # The number is nobody else's for as long as the storage lives.
            found.alive = weakref.ref(storage, lambda _: self.freed(self.memories.pop(key)))
        return found

    def side(self, tensor: torch.Tensor) -> str:
        """``device`` or ``host``."""
        return self.memory(tensor).side or "host"

    def lies(self, value: Any, side: str, **known: Any) -> Any:
        """From now on all tensors of ``value`` are on this side."""
        for tensor in tree_leaves(value):
            if isinstance(tensor, torch.Tensor):
                memory = self.memory(tensor)
                memory.side = side
                vars(memory).update(known)
                if side == "device" and not (memory.nbytes or memory.borrowed):
                    self._allocate(memory, tensor.untyped_storage().nbytes())
        return value

    def _allocate(self, memory: Memory, nbytes: int) -> None:
        """Memory of the device: what its stream has given back last may be given to it, and still be in use there."""
        self._count(memory, nbytes)
        if memory.home.freed is not None:
            at, where = memory.home.freed
            what = "memory that was freed since, and that this may be"
            memory.accesses.append(Access(0, nbytes, True, memory.home, at, what, where))

    def _count(self, memory: Memory, nbytes: int) -> None:
        self.allocated += nbytes - memory.nbytes
        self.peak, memory.nbytes = max(self.peak, self.allocated), nbytes

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a GPU could copy from or to it while the program goes on."""
        address = tensor.data_ptr()
        return self.memory(tensor).pinned or any(0 <= address - lo < size for lo, size in self.locked.items())

    # ---- order -------------------------------------------------------------------------------------------------------

    def launch(self) -> Agent:
        """Work is issued on the current stream: it comes after all that this thread knows."""
        stream: Agent = self.here.streams[-1]
        stream.knows(self.here.agent.clock)
        return stream

    @contextlib.contextmanager
    def running(self, stream: Agent) -> Iterator[None]:
        """Inside, ``stream`` is this thread's current one."""
        self.here.streams.append(stream)
        try:
            yield
        finally:
            self.here.streams.pop()

    def stand_still(self) -> None:
        """The program waits for the current stream."""
        self.waits.append(place_of(stack()))
        self.here.agent.knows(self.here.streams[-1].clock)

    def touch(self, agent: Agent, tensor: torch.Tensor, writes: bool, what: str, place: Stack | None = None) -> None:
        """``agent`` reads or writes a tensor's bytes."""
        if tensor.layout is not torch.strided or not tensor.numel():
            return
        memory, size = self.memory(tensor), tensor.itemsize
        lo: Any = memory.start + tensor.storage_offset() * size
        extent: Any = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        with self._lock:
            new = Access(lo, lo + extent * size, writes, agent, agent.steps(), what, place or stack())
            kept = []
            for old in memory.accesses:
                if writes or old.writes:
                    apart = old.hi <= new.lo or new.hi <= old.lo
                    if not apart and old.agent is not agent and agent.clock.get(old.agent, 0) < old.at:
                        raise Race(self._race(tensor, old, new))
                covered = new.lo <= old.lo and old.hi <= new.hi
                if not (covered and (writes or (old.agent is agent and not old.writes))):
                    kept.append(old)
            memory.accesses[:] = [*kept, new]

    def freed(self, memory: Memory) -> None:
        """Its memory goes back: a device's to the stream that it was allocated on, which may give it away at once."""
        if not self.open or memory.borrowed:
            return
        self._count(memory, 0)
        if memory.side == "device":
            memory.home.freed = memory.home.at, stack()
        # torch's allocator of page-locked memory waits by itself.
        for old in memory.accesses if not memory.pinned else ():
            knows = [memory.home, self.here.agent] if memory.side == "device" else [self.here.agent]
            if not old.agent.thread and all(a is not old.agent and a.clock.get(old.agent, 0) < old.at for a in knows):
                text = (
                    f"memory of the {memory.side} is given back while {old.words()}, and nothing orders the two.\n"
                    f"  it is given back at\n{_lines(stack())}\n  {old.words()} at\n{_lines(old.stack)}\n  missing: "
                    + self._missing(knows[0], old)
                )
                self.late.append(FreedInUse(text))
                return

    # ---- words -------------------------------------------------------------------------------------------------------

    def name_of(self, tensor: torch.Tensor) -> str:
        """A tensor in ZeRO's words, its shape and its dtype."""
        said = f"{self.side(tensor)} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        found = []
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            for namer in self.namers:
                with contextlib.suppress(Exception):  # a fault is reported in any case
                    found.append(namer(tensor))
        return " · ".join([*filter(None, found), said])

    def _race(self, tensor: torch.Tensor, old: Access, new: Access) -> str:
        lo, hi = max(old.lo, new.lo), min(old.hi, new.hi)
        return (
            f"{new.words()} what {old.words()}, and nothing orders the two: bytes {lo} to {hi} of\n"
            f"  {self.name_of(tensor)}\n  {new.words()} at\n{_lines(new.stack)}\n  {old.words()} at\n"
            f"{_lines(old.stack)}\n  missing: {self._missing(new.agent, old)}"
        )

    def _missing(self, agent: Agent, old: Access) -> str:
        if old.agent is self.network:
            return f"{agent.name} waits for the collective: Pending.wait() before the second access"
        if old.agent.thread:
            verb = "an operation launched by that thread, or one that has joined it" if not agent.thread else "a join"
            return f"{agent.name} comes after {old.agent.name}: {verb}, a future's result or a synchronised event"
        verb = "synchronize() or finish()" if agent.thread else "wait()"
        for at, where in old.agent.records:
            if at >= old.at:
                return f"{verb} of the event that {old.agent.name} has recorded behind it at\n{_lines(where[:1])}"
        return f"an event recorded on {old.agent.name} behind it, and {verb} of that event on {agent.name}"

    # ---- what was called ---------------------------------------------------------------------------------------------

    def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
        """One call of the dispatcher, made and accounted for."""
        schema = func._schema
        name = schema.name.split("::")[1]
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        if view or not tensors:
            return func(*args, **kwargs)
        if self.late:
            raise self.late.pop(0)
        self.operations += 1
        known = [(t, m.side) for t in tensors if (m := self.memory(t)).side is not None]
        sides = {side for t, side in known if t.dim() or name in COPIES}
        if len(sides) == 2 and name not in COPIES | INDEXES:
            mixed = "\n  ".join(self.name_of(t) for t in tensors)
            raise MixedDevices(f"{name} of host and device memory:\n  {mixed}\n  at\n{_lines(stack())}")
        on_device = any(side == "device" for _, side in known)
        agent, place = self.launch() if on_device else self.here.agent, stack()
        if name not in NO_VALUES:
            written = _written(schema, args, kwargs)
            everything = func.namespace == "c10d"  # blocking small talk: the schema does not say what it writes
            for tensor in tensors:
                # A number of the host is passed to the kernel, and indexes are copied first: the program reads them.
                passed = on_device and name not in COPIES and self.side(tensor) == "host"
                writes = everything or any(tensor is one for one in written)
                self.touch(self.here.agent if passed else agent, tensor, writes, name, place)
        result = func(*args, **kwargs)
        side = "device" if on_device else "host"
        if on_device and name in STANDS_STILL:
            self.stand_still()
        if len(sides) == 2 and name in COPIES:
            host = next(t for t, where in known if where == "host")
            blocks = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
            if blocks or not self.is_pinned(host):
                self.stand_still()
                self.crossings.append((place_of(place), host.nbytes))
                if not blocks:
                    self._blocks(*self.crossings[-1])
        # What is new lies where it was made; what C++ has made out of nothing belongs to whom it is used with.
        for tensor in [*tree_leaves(result), *tensors]:
            if isinstance(tensor, torch.Tensor) and self.memory(tensor).side is None:
                self.lies(tensor, side)
                if name not in NO_VALUES and not any(tensor is given for given in tensors):
                    self.touch(agent, tensor, True, name, place)
        return result

    def look(self, tensor: torch.Tensor, what: str) -> None:
        """The program looks at values by itself; where they are the device's, torch copies them and waits."""
        if self.side(tensor) == "device":
            self.touch(self.launch(), tensor, False, what)
            self.stand_still()
        else:
            self.touch(self.here.agent, tensor, False, what)

    def _blocks(self, place: str, nbytes: int) -> None:
        if place not in self.blocking:
            log.info("%s: a copy blocks, whatever non_blocking says: its memory is not page-locked (said once)", place)
        self.blocking[place] = self.blocking.get(place, 0) + nbytes

    def close(self) -> None:
        """Nothing is looked at any more. What was found too late to be raised is raised."""
        self.open = False
        if self.late:
            raise self.late.pop(0)


def _written(schema: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that a call writes."""
    given = [*zip(schema.arguments, args, strict=False)]
    given += [(a, kwargs[a.name]) for a in schema.arguments if a.name in kwargs]
    values = [value for a, value in given if a.alias_info is not None and a.alias_info.is_write]
    return [t for t in tree_leaves(values) if isinstance(t, torch.Tensor)]


# ---- stacks ----------------------------------------------------------------------------------------------------------

_OURS = str(Path(__file__).with_name("simulated_streams.py"))
_SKIPPED = (__file__, _OURS, contextlib.__file__, functools.__file__, threading.__file__)


@functools.cache
def _is_foreign(file: str) -> bool:
    """Whether its frames are left out of stacks: torch's, this file's."""
    return file in _SKIPPED or "/torch/" in file or file.startswith("<")


def stack() -> Stack:
    """The program's innermost frames, as cheaply as can be: it is asked for at every operation."""
    frame, found = sys._getframe(1), Stack()
    while frame is not None and len(found) < DEPTH:
        if not _is_foreign(frame.f_code.co_filename):
            found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back  # type: ignore[assignment]
    return found


def _line(code: CodeType, place: int) -> int:
    return next((line for lo, hi, line in code.co_lines() if lo <= place < hi and line), code.co_firstlineno)


def _short(file: str) -> str:
    return "/".join(file.split("/")[-3:])


def _lines(stack: Stack) -> str:
    return "\n".join(
        f"    {_short(code.co_filename)}:{_line(code, at)} {getattr(code, 'co_qualname', code.co_name)}"
        for code, at in stack
    )


def place_of(stack: Stack) -> str:
    """The innermost frame of the package."""
    inside = [f"{_short(c.co_filename)}:{_line(c, at)}" for c, at in stack if "/deepzero/" in c.co_filename]
    return next(iter(inside), "outside of the package")
