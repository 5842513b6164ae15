"""A GPU that is not there: the code for one runs on the CPU, and what a GPU would not forgive raises.

Inside :func:`null_gpu` this rank's device is ``cuda:0``. Its tensors are the CPU's, and say that they are not: what
was made with ``device=cuda`` is "device", everything else "host" (:class:`_Faces`, a ``TorchFunctionMode``). Every
operation is looked at (:class:`_Operations`, a ``TorchDispatchMode``):

- **Sides.** An operation on host and device tensors together raises, copies and numbers apart, as do ``numpy()`` of a
  device tensor and everything else that a GPU refuses.
- **Order.** Streams, events, collectives and the program itself are *agents*, each with a vector clock. Whoever touches
  bytes that another agent touched before, one of them writing, must have been ordered after it: by an event, by a
  wait for a collective, by a synchronisation. Otherwise :class:`Race` says who did what and where. So a wait or a gate
  that is left out is found without a GPU, whatever the timing.

Collectives behave as NCCL's do: launched behind the current stream, on a stream of their own; ``wait`` orders the
current stream. What they carry is carried at once. With ``mirrors``, this process is rank 0 of so many, alone: the
others send what it would have sent them. Memory that is freed and given to somebody else is not modelled, nor
are threads of the program, which all count as one.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import warnings
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from deepzero.comm import process_group
from deepzero.comm.collectives import Communicator, DryRunCommunicator, DryRunRank
from deepzero.offload import pinned_arena
from deepzero.runtime.zero.partition_parameters import PartitionedParameter
from tests.distributed.one_of_many import Mirrored, one_of_many

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
NO_VALUES = {
    "empty_like", "zeros_like", "ones_like", "full_like", "new_zeros", "new_empty", "new_full", "set_", "resize_",
}  # fmt: skip
"""What asks for a tensor's shape alone."""
COPIES = {"copy_", "_to_copy", "_foreach_copy_"}
INDEXES = {"index", "index_put_", "_index_put_impl_", "_unsafe_index"}
"""Take index tensors from either side."""
STANDS_STILL = {"_local_scalar_dense", "equal", "nonzero", "is_nonzero", "masked_select"}
"""The program waits for their result."""


class MixedSides(RuntimeError):
    """One operation on host memory and device memory."""


class Race(RuntimeError):
    """Bytes are used that somebody else may still be reading or writing."""


class Agent:
    """The program, or a stream: something that works in its own order."""

    def __init__(self, name):
        self.name, self.clock, self.at = name, {}, 0

    def knows(self, clock):
        """What this agent does from now on comes after ``clock``."""
        for agent, at in clock.items():
            self.clock[agent] = max(at, self.clock.get(agent, 0))

    def steps(self):
        self.at += 1
        self.clock[self] = self.at
        return self.at


class Machine:
    """Who has touched which bytes, and on which side they are."""

    def __init__(self):
        self.host, self.network = Agent("the program"), Agent("the network")
        self.streams = []
        self._sides, self._touched, self._kept = {}, {}, {}
        self.crossings = []
        """Copies between the sides that the program stood still for, as (where, bytes)."""
        self.refuses_to_lock = False
        self.locked = set()
        """Addresses of page-locked memory."""

    @property
    def current(self):
        return self.streams[-1]

    # ---- sides -------------------------------------------------------------------------------------------------------

    def key(self, tensor):
        with torch._C.DisableTorchFunctionSubclass():
            storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._kept:  # as long as this refers to it, the number is nobody else's
            self._kept[key] = StorageWeakRef(storage)
            if len(self._kept) % 5000 == 0:
                for old in [k for k, ref in self._kept.items() if ref.expired()]:
                    for table in (self._kept, self._sides, self._touched):
                        table.pop(old, None)
        return key

    def side(self, tensor):
        return self._sides.get(self.key(tensor), "host")

    def settled(self, tensor):
        return self.key(tensor) in self._sides

    def lies(self, value, side):
        for tensor in tree_leaves(value):
            if isinstance(tensor, torch.Tensor):
                self._sides[self.key(tensor)] = side
        return value

    # ---- order -------------------------------------------------------------------------------------------------------

    def touch(self, agent, tensor, writes, what):
        """``agent`` reads or writes a tensor's bytes."""
        if not tensor.numel() or tensor.layout is not torch.strided:
            return
        lo = tensor.storage_offset() * tensor.itemsize
        hi = lo + (1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))) * tensor.itemsize
        earlier, kept = self._touched.get(self.key(tensor), []), []
        at, place = agent.steps(), _line()
        for entry in earlier:
            begin, end, wrote, who, when, did, where = entry
            apart = end <= lo or hi <= begin
            if not apart and (writes or wrote) and who is not agent and agent.clock.get(who, 0) < when:
                raise Race(
                    f"{agent.name} {'writes' if writes else 'reads'} ({what}, {_place()}) what {who.name} "
                    f"{'writes' if wrote else 'reads'} ({did}, {_words(where)}), and nothing orders the two"
                )
            covered = lo <= begin and end <= hi
            if not (covered and (writes or (who is agent and not wrote))):
                kept.append(entry)
        self._touched[self.key(tensor)] = [*kept, (lo, hi, writes, agent, at, what, place)]

    def launch(self):
        """Work is issued on the current stream; it comes after all that the program knows."""
        self.current.knows(self.host.clock)
        return self.current

    def stand_still(self):
        """The program waits for the current stream."""
        self.host.knows(self.current.clock)

    def operation(self, func, tensors, written):
        """One call of the dispatcher."""
        name = func._schema.name.split("::")[1]
        known = [t for t in tensors if self.settled(t)]
        sides = {self.side(t) for t in known if t.dim() or name in COPIES}
        if sides == {"host", "device"} and name not in COPIES | INDEXES:
            told = [f"{self.side(t)} {tuple(t.shape)}" for t in tensors]
            raise MixedSides(f"{name} of {', '.join(told)}, {_place()}")
        on_device = "device" in {self.side(t) for t in known}
        agent = self.launch() if on_device else self.host
        for tensor in tensors:
            if name not in NO_VALUES:
                self.touch(agent, tensor, any(tensor is one for one in written), name)
        return name, "device" if on_device else "host"


def _frames():
    """Those of the package, from here outwards."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("deepzero."):
            yield frame
        frame = frame.f_back


def _line():
    """The innermost line of the package, as cheaply as can be: it is asked for at every operation."""
    frame = next(_frames(), None)
    return None if frame is None else (frame.f_globals["__name__"], frame.f_code.co_name, frame.f_lineno)


def _words(line):
    return "outside of the package" if line is None else "{}.{}:{}".format(line[0].rpartition(".")[2], *line[1:])


def _place():
    """The two innermost ones, in words."""
    found = [(f.f_globals["__name__"], f.f_code.co_name, f.f_lineno) for f in itertools.islice(_frames(), 2)]
    return " < ".join(_words(line) for line in found or [None])


class _Operations(TorchDispatchMode):
    def __init__(self, machine):
        super().__init__()
        self.machine = machine

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunction():  # the other mode has seen what there was to see
            return self._call(func, args, kwargs or {})

    def _call(self, func, args, kwargs):
        machine = self.machine
        returns = func._schema.returns
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        if view or func.namespace == "c10d":  # how bytes really travel is not what is modelled
            return func(*args, **kwargs)
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        given = [*zip(func._schema.arguments, args, strict=False)]
        given += [(a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs]
        written = [
            t
            for argument, value in given
            if argument.alias_info is not None and argument.alias_info.is_write
            for t in tree_leaves(value)
            if isinstance(t, torch.Tensor)
        ]
        if not tensors:
            return func(*args, **kwargs)
        crosses = len({machine.side(t) for t in tensors}) == 2
        name, side = machine.operation(func, tensors, written)
        result = func(*args, **kwargs)
        if name in STANDS_STILL and side == "device":
            machine.stand_still()
        if crosses and name in COPIES and not (kwargs.get("non_blocking") or (len(args) > 2 and args[2])):
            machine.stand_still()
            machine.crossings.append((_place(), tensors[-1].nbytes))
        for made in tree_leaves(result):
            if isinstance(made, torch.Tensor) and not machine.settled(made):
                machine.lies(made, side)
        for tensor in tensors:  # what C++ has made out of nothing belongs to whom it is used with
            if not machine.settled(tensor):
                machine.lies(tensor, side)
        return result


def _side_of(device):
    return "device" if torch.device(device).type == "cuda" else "host"


class _Faces(TorchFunctionMode):
    def __init__(self, machine):
        super().__init__()
        self.machine = machine

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, machine = dict(kwargs or {}), self.machine
        asked = getattr(func, "__self__", None)
        if asked is torch.Tensor.device:
            return GPU if machine.side(args[0]) == "device" else CPU
        if asked is torch.Tensor.is_cuda:
            return machine.side(args[0]) == "device"
        name = getattr(func, "__name__", "")
        if name in ("numpy", "__array__") and machine.side(args[0]) == "device":
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        if func in (torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda):
            return self._moved(func, args, kwargs)
        kwargs.pop("pin_memory", None)
        if kwargs.get("device") is not None:
            side, kwargs["device"] = _side_of(kwargs["device"]), CPU
            return machine.lies(func(*args, **kwargs), side)
        result = func(*args, **kwargs)
        made_of = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if isinstance(result, torch.Tensor) and not made_of and not machine.settled(result):
            machine.lies(result, "host")
        return result

    def _moved(self, func, args, kwargs):
        """``to``, ``cpu`` and ``cuda``: a copy where the sides differ."""
        machine, tensor, rest = self.machine, args[0], list(args[1:])
        device = kwargs.get("device")
        if func is not torch.Tensor.to:
            device, rest, kwargs = CPU if func is torch.Tensor.cpu else GPU, [], {}
        elif rest and isinstance(rest[0], torch.Tensor):
            device, rest = (GPU if machine.side(rest[0]) == "device" else CPU), [rest[0].dtype, *rest[1:]]
        elif rest and not isinstance(rest[0], torch.dtype):
            device, rest = rest[0], rest[1:]
        asked = {**kwargs, **dict(zip(("dtype", "non_blocking", "copy"), rest, strict=False))}
        dtype, side = asked.get("dtype") or tensor.dtype, machine.side(tensor) if device is None else _side_of(device)
        if side == machine.side(tensor):
            return torch.Tensor.to(tensor, dtype, copy=bool(asked.get("copy")))
        changed = torch.Tensor.to(tensor, dtype)
        target = machine.lies(torch.empty_like(changed), side)
        moved = _Move.apply(changed, target, machine) if changed.requires_grad else target.copy_(changed)
        if not asked.get("non_blocking"):
            machine.stand_still()
        return moved


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx, source, target, machine):
        ctx.machine, ctx.side = machine, machine.side(source)
        return target.copy_(source).view_as(target)

    @staticmethod
    def backward(ctx, grad):
        back = ctx.machine.lies(torch.empty_like(grad), ctx.side)
        return back.copy_(grad), None, None


# ---- streams, events, collectives ------------------------------------------------------------------------------------


def _stream_class(machine):
    class Stream(Agent):
        cuda_stream = 0

        def __init__(self, device=None, name="a side stream"):
            super().__init__(name)
            self.device = GPU

        def wait_event(self, event):
            self.knows(machine.host.clock)
            self.knows(event.clock)

        def synchronize(self):
            machine.host.knows(self.clock)

    return Stream


def _event_class(machine):
    class Event:
        def __init__(self, *_, **__):
            self.clock = {}

        def record(self, stream=None):
            (stream or machine.current).knows(machine.host.clock)
            self.clock = dict((stream or machine.current).clock)

        def wait(self, stream=None):
            (stream or machine.current).knows(self.clock)

        def synchronize(self):
            machine.host.knows(self.clock)

        def query(self):
            """Over only when the program knows it already: a GPU may be as slow as it likes."""
            return all(machine.host.clock.get(agent, 0) >= at for agent, at in self.clock.items())

        def elapsed_time(self, other):
            return 1.0

    return Event


class _Work:
    """NCCL's: waiting orders the current stream."""

    def __init__(self, machine, clock):
        self.machine, self.clock = machine, clock

    def wait(self, *_):
        self.machine.current.knows(self.clock)


def _nccl(machine, method, uses, mirrored):
    """A collective of the communicator, on the network's stream."""

    def collective(self, kind, *args, **kwargs):
        self._pairwise = True  # how the bytes really travel
        machine.network.knows(machine.launch().clock)
        touched = uses(self, *args, **kwargs)
        for tensor, writes in touched:
            machine.touch(machine.network, tensor, writes, kind)
        pending = method(self, kind, *args, **kwargs)
        for work in filter(None, pending.works):
            work.wait()
        if isinstance(self, DryRunCommunicator):
            with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
                mirrored(self, *args, **kwargs)
        if touched:
            pending.works = [_Work(machine, dict(machine.network.clock))]
        return pending

    return collective


def _exchanged(comm, send, recv, padding=0, where="", group=None, numel=None):
    among = group or comm.everybody
    return [
        *((send[q], False) for q in among.peers if send[q].numel()),
        *((recv[q], True) for q in among.peers if recv[q].numel()),
    ]


def _mirror_exchange(comm, send, recv, padding=0, where="", group=None, numel=None):
    for q in (group or comm.everybody).peers:
        if recv[q].numel() == send[q].numel():
            recv[q].copy_(send[q])


def _mirror_reduce_scatter(comm, output, whole, *_, **__):
    torch.mul(whole[: output.numel()], comm.world_size, out=output)


def _mirror_all_reduce(comm, tensor, *_, **__):
    tensor.mul_(comm.world_size)


MIRRORS = {"exchange": _mirror_exchange, "reduce_scatter": _mirror_reduce_scatter, "all_reduce": _mirror_all_reduce}
"""What a collective of the communicator does among ranks that all have what this one has."""


class _Cudart:
    def __init__(self, machine):
        self.machine = machine

    def cudaHostRegister(self, address, nbytes, flags):
        if self.machine.refuses_to_lock:
            return 2
        self.machine.locked.add(address)
        return 0


def _inside(mode, function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        with mode:
            return function(*args, **kwargs)

    return call


def _cuda(machine):
    """What takes the place of ``torch.cuda``'s names."""

    @contextlib.contextmanager
    def running(on):
        machine.streams.append(on)
        try:
            yield
        finally:
            machine.streams.pop()

    def synchronize(device=None):
        for agent in (machine.compute, machine.network):
            machine.host.knows(agent.clock)

    cudart = _Cudart(machine)
    return {
        "Stream": type(machine.compute),
        "Event": _event_class(machine),
        "stream": running,
        "current_stream": lambda device=None: machine.current,
        "synchronize": synchronize,
        "device": lambda device: contextlib.nullcontext(),
        "set_device": lambda device: None,
        "cudart": lambda: cudart,
        "empty_cache": lambda: None,
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
        "is_bf16_supported": lambda **_: True,
        "get_device_name": lambda device=None: "a GPU that is not there",
    }


def _collectives(machine):
    """What takes the place of the communicator's methods."""
    gather = Communicator.all_gather

    def all_gather(self, *args, **kwargs):
        self._pairwise = True
        return gather(self, *args, **kwargs)

    uses = {
        "exchange": _exchanged,
        "all_reduce": lambda comm, tensor, *_, **__: [(tensor, True)],
        "reduce_scatter": lambda comm, output, whole, *_, **__: [(whole, False), (output, True)],
    }
    return {
        "all_gather": all_gather,
        **{name: _nccl(machine, getattr(Communicator, name), used, MIRRORS[name]) for name, used in uses.items()},
    }


def _torch(machine):
    """What makes tensors unseen by both modes."""
    again = torch.from_dlpack

    def from_dlpack(tensor):
        with torch._C.DisableTorchFunction():
            return machine.lies(again(tensor), machine.side(tensor))

    def on_host(make):
        return lambda *args, **kwargs: machine.lies(make(*args, **kwargs), "host")

    return {name: on_host(getattr(torch, name)) for name in ("frombuffer", "from_numpy")} | {"from_dlpack": from_dlpack}


def _hooks(faces):
    """Torch puts a mode aside while it runs a function for it, and what the function calls back is without it."""
    push = torch._C._autograd._push_saved_tensors_default_hooks
    answers = PartitionedParameter.__dict__["__torch_function__"].__func__
    yield torch.autograd, "_engine_run_backward", _inside(faces, torch.autograd._engine_run_backward)
    yield (
        torch._C._autograd,
        "_push_saved_tensors_default_hooks",
        lambda pack, unpack: push(_inside(faces, pack), _inside(faces, unpack)),
    )
    yield PartitionedParameter, "__torch_function__", classmethod(_inside(faces, answers))


@contextlib.contextmanager
def null_gpu(mirrors=0):
    """Inside, this rank computes on ``cuda:0``; yields the machine."""
    machine = Machine()
    machine.compute = _stream_class(machine)(name="the compute stream")
    machine.streams = [machine.compute]
    faces = _Faces(machine)
    replaced = [
        (process_group, "default_device", lambda: GPU),
        # Also when garbage is collected after the end of this.
        (pinned_arena, "_unlock", lambda address, device: machine.locked.remove(address)),
        *((torch.cuda, name, value) for name, value in _cuda(machine).items()),
        *((Communicator, name, value) for name, value in _collectives(machine).items()),
        *((torch, name, value) for name, value in _torch(machine).items()),
        *_hooks(faces),
    ]
    with contextlib.ExitStack() as stack:
        for holder, name, value in replaced:
            stack.enter_context(mock.patch.object(holder, name, value))
        if mirrors:
            who = DryRunRank(0, mirrors, "cuda", mirrors)
            stack.enter_context(one_of_many(who, Mirrored, str(GPU)))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message=".*CUDA is not available.*")
        stack.enter_context(_Operations(machine))
        stack.enter_context(faces)
        yield machine
