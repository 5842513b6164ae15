"""Ranks that take different paths: found out, and made to raise, instead of waiting for each other for ever.

A collective ends when all ranks have launched it. When rank 0 goes through one module and rank 1 through another, each
waits for a collective that the other never launches, and nothing happens until ``comm.timeout_seconds`` have passed.

**The trail.** Each rank numbers its collectives and keeps a rolling fingerprint of them (:class:`Trail`): two ranks
have launched the same collectives in the same order exactly if they have the same fingerprint at the same number. This
costs a checksum for each collective, and nothing is sent.

**The watchdog.** A thread looks twice a second at what this rank waits for. Only when one wait has lasted for
:data:`DIVERGENCE_SECONDS` does it talk to the others, by the store at which the ranks have met (a side channel: the
process group itself is what hangs). It posts its rank's state and reads the states of the others who wait too.

**The proof.** A rank is slow because it validates, writes a checkpoint or sits in a debugger; that is no divergence,
however long it takes. So time proves nothing here. A rank *may go on* when it is not waiting, or when every rank whose
launch it lacks may go on. Those who wait and may not go on, by this rule, wait for each other (:func:`stuck`). States
are read at different times; so each rank of such a circle has to be found in the very same wait twice, and then all of
them were in it at the one moment between.

**The end.** The verdict, a text that names each rank's place, goes to the store. Then each watchdog breaks its rank's
wait: gloo lets a receive that timed out fail every operation of the group (``ProcessGroup.abort`` does nothing in gloo,
tried with torch 2.13). What the wait raises is replaced by :class:`RankDivergenceError` with the verdict.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist

DIVERGENCE_SECONDS = 3.0
"""A wait that has lasted longer is looked into."""
TICK_SECONDS = 0.5
REMEMBERED = 64
"""How many collectives the trail keeps; only ones that ranks disagree about are ever looked up."""

SILENT_LOOKS = 4
"""A post that has not changed in so many looks is an old one."""

_BREAK_TAG = 0x5A53
_TAG_BIT = 0x4000_0000
_LEFT = "a rank has left, and others wait for it:"
_ADVICE = (
    "All ranks have to run the same modules in the same order, and as many forward passes, backward passes and steps. "
    "A module that chooses among its children by the data (a mixture of experts) is to be marked with "
    "set_z3_leaf_modules"
)


class RankDivergenceError(RuntimeError):
    """Ranks wait for different collectives; the message says where each of them is. Raised on every rank."""

    peer_left = False
    """Whether it is the echo of what happened to another rank."""


class RankLeftError(RankDivergenceError):
    """Another rank has ended while this one still needs it."""

    peer_left = True


class Launch(NamedTuple):
    """One collective of one rank."""

    sequence: int
    """1 for the first collective of the process group."""
    fingerprint: int
    """Of this and all collectives before."""
    kind: str
    where: str

    def text(self) -> str:
        """For messages."""
        return f"collective {self.sequence}, {self.kind}" + (f" of {self.where}" if self.where else "")

    @property
    def tag(self) -> int:
        """Of its messages on gloo: differs between collectives, so that no rank takes a message for another one.

        The highest bit keeps it away from the small numbers that a script uses for its own send and recv.
        """
        return _TAG_BIT | (self.fingerprint & (_TAG_BIT - 1))


class Trail:
    """What one rank has launched and what it waits for. Written by the thread that trains, read by the watchdog."""

    def __init__(self) -> None:
        self.sequence = self.fingerprint = 0
        self.recent: deque[Launch] = deque(maxlen=REMEMBERED)
        self.waiting: Launch | None = None
        """The collective that is being waited for right now."""
        self.position = ""
        """Where in the model this rank is, in words, for messages: ``forward of blocks.3.mlp``."""

    def launch(self, kind: str, where: str) -> Launch:
        """Enter a collective that is about to be launched."""
        self.sequence += 1
        self.fingerprint = crc32(f"{kind}|{where};".encode(), self.fingerprint)
        launch = Launch(self.sequence, self.fingerprint, kind, where)
        self.recent.append(launch)
        return launch


@dataclass
class State:
    """One waiting rank, as it is written to the store."""

    beat: int
    """Grows with every post of this rank."""
    position: str
    line: str
    """Of the program, outside of deepzero and torch; empty when unknown."""
    sequence: int
    """Of the last collective launched."""
    waiting: Launch
    recent: dict[int, Launch] = field(default_factory=dict)

    def to_json(self) -> str:
        """The inverse of :meth:`from_json`."""
        values = [self.beat, self.position, self.line, self.sequence, self.waiting, list(self.recent.values())]
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: str | bytes) -> State:
        """What another rank has written."""
        beat, position, line, sequence, waiting, recent = json.loads(text)
        launches = [Launch(*values) for values in recent]
        return cls(beat, position, line, sequence, Launch(*waiting), {item.sequence: item for item in launches})

    def lacks(self, launch: Launch) -> bool:
        """Whether this rank has not launched what another waits for, or something else in its place."""
        if self.sequence < launch.sequence:
            return True
        ours = self.recent.get(launch.sequence)
        return ours is not None and ours.fingerprint != launch.fingerprint

    def text(self) -> str:
        """Where this rank is."""
        places = [self.position and f"in {self.position}", self.line and f"at {self.line}"]
        return ", ".join([place for place in places if place] + [f"waiting for {self.waiting.text()}"])


class Gone(NamedTuple):
    """A rank that has left."""

    sequence: int
    """Of the last collective that it launched."""
    reason: str
    """Completes "rank 3 …"."""


def stuck(states: Mapping[int, State], gone: Mapping[int, Gone]) -> list[int]:
    """The waiting ranks that can never go on.

    Args:
        states: of the ranks that wait.
        gone: ranks that have left. All others are taken to be running.
    """
    hopeless = {rank for rank in states if rank not in gone}
    while True:
        still = set()
        for rank in hopeless:
            launch = states[rank].waiting
            never = any(launch.sequence > peer.sequence for peer in gone.values())
            # Who lacks a launch of somebody hopeless is hopeless; who lacks those of running ranks alone is not.
            if never or any(states[peer].lacks(launch) for peer in hopeless if peer != rank):
                still.add(rank)
        if still == hopeless:
            return sorted(hopeless)
        hopeless = still


def verdict(states: Mapping[int, State], gone: Mapping[int, Gone], world_size: int) -> str:
    """What every rank raises."""
    missed = any(peer.sequence < state.waiting.sequence for peer in gone.values() for state in states.values())
    lines = [_LEFT if missed else "ranks have taken different paths and wait for each other:"]
    for rank in range(world_size):
        if rank in gone:
            lines.append(f"  rank {rank}: {gone[rank].reason}")
        elif rank in states:
            lines.append(f"  rank {rank}: {states[rank].text()}")
        else:
            lines.append(f"  rank {rank}: its own code is running, it waits for nobody")
    return "\n".join([*lines, *_first_difference(states), _ADVICE])


def _first_difference(states: Mapping[int, State]) -> list[str]:
    """The first collective that is not the same everywhere, as far back as the trails go."""
    first, *others = sorted(states)
    for sequence in sorted(states[first].recent):
        mine = states[first].recent[sequence]
        for rank in others:
            theirs = states[rank].recent.get(sequence)
            if theirs is not None and theirs.fingerprint != mine.fingerprint:
                what = f"rank {first} launched {mine.text()}; rank {rank} launched {theirs.text()}"
                return [f"  the first difference: {what}"]
    return []


class Watchdog:
    """One rank's trail and the thread that looks after it, for one process group.

    Args:
        store: where the ranks have met.
        rank: this rank.
        world_size: how many there are; one rank is not watched.
        name: of this group, the same on every rank and never used before in ``store``.
        seconds: a wait that has lasted longer is looked into; None: :data:`DIVERGENCE_SECONDS`.
    """

    def __init__(
        self, store: dist.Store | None, rank: int, world_size: int, name: str, seconds: float | None = None
    ) -> None:
        self.trail = Trail()
        self._store = store if world_size > 1 else None
        self._rank, self._world_size, self._name, self._seconds = rank, world_size, name, seconds
        # Weak: a group that is destroyed has to close its connections, whoever still holds a communicator.
        self._group = weakref.ref(dist.group.WORLD) if dist.is_initialized() else None
        self._beat = 0
        self._verdict: str | None = None
        self._found: dict[int, tuple[int, int]] = {}
        self._beats: dict[int, int] = {}
        self._heard: dict[int, tuple[int, int]] = {}
        self._trainer = threading.get_ident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="deepzero-divergence", daemon=True)
        if self._store is not None:
            self._thread.start()

    @property
    def of_current_group(self) -> bool:
        """Whether this process is still in the group that this one watches."""
        if self._group is None or not dist.is_initialized():
            return self._group is None and not dist.is_initialized()
        return self._group() is dist.group.WORLD

    @contextlib.contextmanager
    def blocking(self, kind: str, where: str = "") -> Iterator[None]:
        """Around a collective that returns when it is complete."""
        self.trail.waiting = self.trail.launch(kind, where)
        try:
            yield
        except RuntimeError as error:
            self.explain(error)
            raise
        finally:
            self.trail.waiting = None

    def explain(self, error: RuntimeError) -> None:
        """Raise what is behind ``error`` of a collective, if that is known; else return.

        A verdict is written before any wait is broken, and a rank says that it leaves before it does. So whatever there
        is to know is in the store when this rank sees its connection close.
        """
        if self._store is None or isinstance(error, RankDivergenceError):
            return
        gone: dict[int, Gone] = {}
        text = self._verdict
        with contextlib.suppress(Exception):  # a store that has died too leaves the error as it is
            text = text or self._get("verdict")
            gone = self._gone()
        if text is not None:
            raise (RankLeftError if text.startswith(_LEFT) else RankDivergenceError)(text) from error
        lost = "connection" in str(error).lower()
        gone = {rank: peer for rank, peer in gone.items() if lost or peer.sequence < self.trail.sequence}
        if gone:
            who = "; ".join(f"rank {rank} {peer.reason}" for rank, peer in gone.items())
            raise RankLeftError(f"{who}. Rank {self._rank} still needs it: {self._here()}") from error

    def leave(self, reason: str) -> None:
        """Tell the others that this rank will not come back, and stop watching.

        Args:
            reason: completes "rank 3 …".
        """
        if self._stop.is_set():
            return
        self._stop.set()
        if self._store is not None:
            self._thread.join(2 * TICK_SECONDS)
            where = f" ({self.trail.position})" if self.trail.position else ""
            with contextlib.suppress(Exception):
                self._set(f"gone/{self._rank}", json.dumps([self.trail.sequence, reason + where]))

    def _run(self) -> None:
        """The thread. It ends with the group, and when the store cannot be reached: then nobody can be asked."""
        seen: Launch | None = None
        ticks = 0
        with contextlib.suppress(Exception):
            while not self._stop.wait(TICK_SECONDS) and self.of_current_group:
                waiting = self.trail.waiting
                # The object, not its value: one that is seen again is one wait, without a clock in the hot path.
                ticks = ticks + 1 if waiting is seen else 0
                seen = waiting
                threshold = DIVERGENCE_SECONDS if self._seconds is None else self._seconds
                if waiting is not None and ticks * TICK_SECONDS >= threshold and self._look(waiting):
                    self._break_waits()
                    return

    def _look(self, waiting: Launch) -> bool:
        """Post this rank's state, read the others'; True when there is a verdict."""
        self._beat += 1
        trail = self.trail
        recent = {item.sequence: item for item in list(trail.recent)}
        mine = State(self._beat, trail.position, self._line(), trail.sequence, waiting, recent)
        if trail.waiting is not waiting:
            return False
        self._set(f"state/{self._rank}", mine.to_json())
        self._verdict = self._get("verdict")
        if self._verdict is not None:
            return True
        states = {self._rank: mine}
        for peer in range(self._world_size):
            text = None if peer == self._rank else self._get(f"state/{peer}")
            if text is not None:
                state = State.from_json(text)
                beat, looks = self._heard.get(peer, (0, 0))
                self._heard[peer] = (state.beat, looks + 1 if state.beat == beat else 0)
                # A rank that goes on leaves its last post behind; who posts no more is running.
                if self._heard[peer][1] < SILENT_LOOKS:
                    states[peer] = state
        gone = self._gone()
        circle = {rank: states[rank] for rank in stuck(states, gone)}
        if not self._confirmed(circle):
            return False
        self._set_first("verdict", verdict(circle, gone, self._world_size))
        self._verdict = self._get("verdict")
        return True

    def _confirmed(self, circle: Mapping[int, State]) -> bool:
        """Whether all of ``circle`` were in these same waits at one moment.

        Two beats on, since the next post may have been put together before this rank read the last one.
        """
        found = {rank: (state.waiting.sequence, state.sequence) for rank, state in circle.items()}
        if not circle or found != self._found:
            self._found, self._beats = found, {rank: state.beat for rank, state in circle.items()}
            return False
        return all(state.beat >= self._beats[rank] + 2 for rank, state in circle.items())

    def _break_waits(self) -> None:
        """Make every operation of the group fail, on this rank and, since the connections close, on the others."""
        peer = (self._rank + 1) % self._world_size
        work = dist.irecv(torch.zeros(1), peer, tag=_BREAK_TAG)
        if work is not None:
            work.wait(timedelta(milliseconds=1))

    def _line(self) -> str:
        """The line of the user's program at which the training thread is."""
        frame = sys._current_frames().get(self._trainer)
        ours = os.path.dirname(os.path.dirname(__file__)) + os.sep
        while frame is not None:
            path = frame.f_code.co_filename
            if not path.startswith((ours, "<")) and f"{os.sep}torch{os.sep}" not in path and "contextlib" not in path:
                return f"{os.path.basename(path)}:{frame.f_lineno}"
            frame = frame.f_back
        return ""

    def _here(self) -> str:
        waiting, position = self.trail.waiting, self.trail.position
        last = waiting or (self.trail.recent[-1] if self.trail.recent else None)
        doing = f"{'waiting for' if waiting else 'after'} {last.text()}" if last else "before any collective"
        return f"it is in {position}, {doing}" if position else f"it is {doing}"

    def _gone(self) -> dict[int, Gone]:
        texts = {rank: self._get(f"gone/{rank}") for rank in range(self._world_size) if rank != self._rank}
        return {rank: Gone(*json.loads(text)) for rank, text in texts.items() if text is not None}

    def _key(self, key: str) -> str:
        return f"deepzero/{self._name}/{key}"

    def _set(self, key: str, value: str) -> None:
        if self._store is not None:
            self._store.set(self._key(key), value)

    def _set_first(self, key: str, value: str) -> None:
        """Set it unless another rank was faster: all raise the same text."""
        if self._store is not None:
            self._store.compare_set(self._key(key), "", value)

    def _get(self, key: str) -> str | None:
        """The value, or None: a plain ``get`` of a missing key would wait for it."""
        if self._store is None or not self._store.check([self._key(key)]):
            return None
        return self._store.get(self._key(key)).decode()


_groups = 0
_current: Watchdog | None = None


def current() -> Watchdog:
    """The watchdog of the process group that this process is in now; made when it is first asked for."""
    global _current, _groups
    if _current is None or not _current.of_current_group:
        if _groups == 0:
            atexit.register(_program_ends)
        _groups += 1
        if dist.is_initialized():
            store = dist.distributed_c10d._get_default_store() if _speaks_gloo() else None
            _current = Watchdog(store, dist.get_rank(), dist.get_world_size(), f"group{_groups}")
        else:
            _current = Watchdog(None, 0, 1, "alone")
    return _current


def leave(reason: str) -> None:
    """Tell the other ranks that this one leaves, if it is in a group. See :meth:`Watchdog.leave`."""
    if _current is not None and _current.of_current_group:
        _current.leave(reason)


def _program_ends() -> None:
    error = getattr(sys, "last_value", None)
    leave("has ended its program" if error is None else f"has failed: {type(error).__name__}: {error}")


def _speaks_gloo() -> bool:
    """NCCL's waits do not hold up the CPU, so that there is nothing to see, and nothing that could be broken."""
    try:
        return dist.group.WORLD._get_backend(torch.device("cpu")).name() == "gloo"  # type: ignore[union-attr]
    except RuntimeError:
        return False
