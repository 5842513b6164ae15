"""What a rank has launched, what it waits for, where it is: kept by each rank, sent only when something is wrong.

Each rank numbers its collectives and keeps a rolling fingerprint of them (:class:`FlightRecorder`): two ranks have
launched the same collectives in the same order exactly if they have the same fingerprint at the same number. This costs
a checksum for each collective. What other ranks get to read of it is a :class:`State`, by way of a
``process_group.StoreMailbox``.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

from deepzero.comm.profiler_ranges import Ranges

if TYPE_CHECKING:
    import torch.distributed as dist

REMEMBERED = 64  # collectives that a recorder keeps; only ones that ranks disagree about are ever looked up
_TAG_BIT = 0x4000_0000
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_PYTHON = os.path.dirname(os.__file__) + os.sep


class CollectiveRecord(NamedTuple):
    """One collective of one rank; ``fingerprint`` is that of this and all collectives before, counted from 1."""

    sequence: int
    fingerprint: int
    kind: str
    where: str

    def text(self) -> str:
        """For messages."""
        return f"collective {self.sequence}, {self.kind}" + (f" of {self.where}" if self.where else "")

    @property
    def tag(self) -> int:
        """The tag of its messages on gloo: one for each collective, so that no rank takes a message for another one.

        The highest bit keeps it away from the small numbers that a script uses for its own send and recv.
        """
        return _TAG_BIT | (self.fingerprint & (_TAG_BIT - 1))


class FlightRecorder:
    """What one rank has launched and what it waits for. Written by the thread that trains, read by the watchdog."""

    def __init__(self) -> None:
        self.sequence = self.fingerprint = 0
        self.recent: deque[CollectiveRecord] = deque(maxlen=REMEMBERED)
        self.waiting: CollectiveRecord | None = None  # the collective that is being waited for right now
        self.position = ""  # where in the model this rank is, for messages: ``forward of blocks.3.mlp``
        self.step = 0  # the optimizer step that this rank is in, from 1 on; 0 when nobody counts

    def launch(self, kind: str, where: str) -> CollectiveRecord:
        """Enter a collective that is about to be launched."""
        self.sequence += 1
        self.fingerprint = crc32(f"{kind}|{where};".encode(), self.fingerprint)
        record = CollectiveRecord(self.sequence, self.fingerprint, kind, where)
        self.recent.append(record)
        return record

    def place(self) -> str:
        """Step and position, as far as they are known: ``step 12, forward of blocks.3.mlp``."""
        return _place(self.step, self.position)

    def state(self, beat: int, line: str) -> State:
        """This rank as others may read it."""
        recent = {item.sequence: item for item in list(self.recent)}
        return State(beat, self.position, line, self.sequence, self.waiting, recent, self.step)


@dataclass
class State:
    """One rank, as it is written to the store."""

    beat: int  # grows with every post of this rank
    position: str
    line: str  # of the program, outside of deepzero and torch; empty when unknown
    sequence: int  # of the last collective launched
    waiting: CollectiveRecord | None  # None: its own code is running
    recent: dict[int, CollectiveRecord] = field(default_factory=dict)
    step: int = 0
    seconds: float = 0.0  # since when it stands there, as far as its watchdog has looked; 0 when nobody has

    def to_json(self) -> str:
        """The inverse of :meth:`from_json`."""
        return json.dumps({**asdict(self), "waiting": self.waiting, "recent": list(self.recent.values())})

    @classmethod
    def from_json(cls, text: str | bytes) -> State:
        """What another rank has written."""
        values = json.loads(text)
        waiting, launches = values.pop("waiting"), [CollectiveRecord(*item) for item in values.pop("recent")]
        recent = {item.sequence: item for item in launches}
        return cls(**values, waiting=CollectiveRecord(*waiting) if waiting else None, recent=recent)

    def place(self) -> str:
        """As :meth:`FlightRecorder.place`."""
        return _place(self.step, self.position)

    def lacks(self, launch: CollectiveRecord) -> bool:
        """Whether this rank has not launched what another waits for, or something else in its place."""
        ours = self.recent.get(launch.sequence)
        return self.sequence < launch.sequence or (ours is not None and ours.fingerprint != launch.fingerprint)

    def doing(self) -> str:
        """What it is waiting for, or what it has launched last."""
        if self.waiting is not None:
            return f"waiting for {self.waiting.text()}"
        last = self.recent.get(self.sequence)
        return f"its own code is running, {f'after {last.text()}' if last else 'before any collective'}"

    def text(self) -> str:
        """Where this rank is."""
        step = f"step {self.step}" if self.step else ""
        places = [step, self.position and f"in {self.position}", self.line and f"at {self.line}", self.doing()]
        return ", ".join(filter(None, places))


def _place(step: int, position: str) -> str:
    return ", ".join(filter(None, [f"step {step}" if step else "", position]))


class DepartedRank(NamedTuple):
    """A rank that has left after its ``sequence``-th collective; ``reason`` completes "rank 3 …"."""

    sequence: int
    reason: str


class DesyncError(RuntimeError):
    """A collective failed and an observer found out why: it is raised in place of the backend's error."""

    peer_left = False  # whether it is the echo of what happened to another rank


class GroupObserver:
    """What belongs to one process group of this process; its collectives report to it.

    This one keeps the flight recorder and does no more. ``health/desync_watchdog.py`` has one that also finds out why
    a collective does not end; it is injected with :func:`observe_groups_with`, so ``comm/`` does not depend on it.
    """

    def __init__(self) -> None:
        self.flight_recorder = FlightRecorder()
        self.ranges = Ranges()  # of all engines of the group
        self.secret: bytes | None = None  # see ``process_group._secret``
        self.abandoned: list[Sequence[dist.Work | None]] = []  # under way, and nobody will wait for them
        self.subgroups: dict[tuple[int, ...], dist.ProcessGroup] = {}  # of some ranks, see ``topology.py``
        # Weak: a group that is destroyed has to close its connections, whoever still holds a communicator.
        world = world_group()
        self._group = None if world is None else weakref.ref(world)

    @property
    def of_current_group(self) -> bool:
        """Whether this process is still in the group that this one observes."""
        world = world_group()
        return (None if self._group is None else self._group()) is world and (self._group is None) == (world is None)

    @contextlib.contextmanager
    def blocked_in(self, record: CollectiveRecord, span: AbstractContextManager[None]) -> Iterator[None]:
        """Around a call in which this rank may have to wait for others: a launch, a wait. ``span`` is its range."""
        # From here to `finally` the watchdog sees this rank wait, and in what; a rank that computes is nobody's fault.
        self.flight_recorder.waiting = record
        try:
            with span:
                yield
        except RuntimeError as error:
            # It raises an error of its own, if it finds out why the group is broken. This rank still counts as waiting
            # meanwhile: the others' messages say in which collective it failed.
            self.explain(error)
            raise
        finally:
            self.flight_recorder.waiting = None

    def blocking(self, kind: str) -> AbstractContextManager[None]:
        """Around a collective that returns when it is complete."""
        return self.blocked_in(self.flight_recorder.launch(kind, ""), self.ranges.span("wait", note=kind))

    def explain(self, error: RuntimeError) -> None:
        """Raise a :class:`DesyncError` in place of a collective's ``error`` where the reason is found; else return."""

    def found(self) -> str | None:
        """Why the ranks will not go on together, once that is established. For threads that wait beside training."""
        return None

    def leave(self, reason: str) -> None:
        """Tell the other ranks that this one will not come back; ``reason`` completes "rank 3 …"."""

    def end(self) -> None:
        """Stop watching. Where the group is gone already, the other ranks are told that."""


class GroupObservers:
    """Who observes the process group that this process is in: one observer for each group that it joins."""

    def __init__(self) -> None:
        self._make: Callable[[], GroupObserver] = GroupObserver
        self._present: GroupObserver | None = None

    def observe_with(self, make: Callable[[], GroupObserver]) -> None:
        """From now on ``make()`` is called once for each process group that this process joins."""
        self._make = make

    def present(self) -> GroupObserver:
        """The observer of the process group that this process is in now; made when it is first asked for."""
        if self._present is None or not self._present.of_current_group:
            if self._present is not None:
                self._present.end()
            self._present = self._make()
        return self._present

    def leave(self, reason: str) -> None:
        """Tell the other ranks that this one leaves, if it is in a group. See :meth:`GroupObserver.leave`."""
        if self._present is not None and self._present.of_current_group:
            self._present.leave(reason)
        elif self._present is not None:
            self._present.end()


_OBSERVERS = GroupObservers()
observe_groups_with, observer, leave = _OBSERVERS.observe_with, _OBSERVERS.present, _OBSERVERS.leave


def world_group() -> dist.ProcessGroup | None:
    """The process group that this process is in; None without one, and where torch has not been imported."""
    torch_dist = sys.modules.get("torch.distributed")
    return torch_dist.group.WORLD if torch_dist is not None and torch_dist.is_initialized() else None


def user_line(thread: int) -> str:
    """The line of the user's program at which ``thread`` is: outside of deepzero, torch and Python's own library."""
    frame = sys._current_frames().get(thread)
    torch_folder = os.path.dirname(sys.modules["torch"].__file__ or "") + os.sep if "torch" in sys.modules else _OURS
    while frame is not None:
        path = frame.f_code.co_filename
        library = path.startswith(_PYTHON) and f"{os.sep}site-packages{os.sep}" not in path
        if not library and not path.startswith((_OURS, torch_folder, "<")):
            return f"{os.path.basename(path)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
