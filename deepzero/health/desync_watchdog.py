"""Ranks that take different paths: found out, and made to raise, instead of waiting for each other for ever.

A collective ends when all ranks have launched it. When rank 0 goes through one module and rank 1 through another, each
waits for a collective that the other never launches, and nothing happens until ``comm.timeout_seconds`` have passed.

**The watchdog.** A thread of each rank looks twice a second at what its rank waits for (``FlightRecorder.waiting``).
Only when one wait has lasted for :data:`DIVERGENCE_SECONDS` does it talk to the others, by the store at which the ranks
have met (the process group itself is what hangs): it posts its rank's state and reads those of the others who wait.

**The proof.** A rank is slow because it validates, writes a checkpoint or sits in a debugger; that is no divergence,
however long it takes. So time proves nothing here. A rank *may go on* when it is not waiting, or when every rank whose
launch it lacks may go on. Those who wait and may not go on, by this rule, wait for each other (:func:`stuck`). States
are read at different times; so each rank of such a circle has to be found in the very same wait twice, and then all of
them were in it at the one moment between.

**The end.** The verdict, a text that names each rank's place, goes to the store. Then each watchdog breaks its rank's
wait: gloo lets a receive that timed out fail every operation of the group (``ProcessGroup.abort`` does nothing in gloo,
tried with torch 2.13). What the wait raises is replaced by :class:`RankDivergenceError` with the verdict; who misses a
rank that has left raises :class:`RankLeftError` with its reason. For other failures, and while nothing is proved, see
:mod:`deepzero.health.hang_report`.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from deepzero.comm import flight_recorder
from deepzero.comm.flight_recorder import CollectiveRecord, DepartedRank, DesyncError, GroupObserver, State, user_line
from deepzero.comm.process_group import StoreMailbox
from deepzero.health.hang_report import (
    ASKING_SECONDS,
    CONNECTION,
    MISSING,
    TIMEOUT,
    CollectiveTimeoutError,
    Diagnosis,
    RollCall,
    Standstill,
    failure_of,
    within,
)
from deepzero.utils.threads import start_thread

DIVERGENCE_SECONDS = 3.0  # a wait that has lasted longer is looked into
TICK_SECONDS = 0.5
ROLL_CALL_TICKS = 2  # every so many ticks the thread looks whether the roll is called, and who is absent
SILENT_LOOKS = 4  # a post that has not changed in so many looks is an old one

_BREAK_TAG = 0x5A53
_DIFFERENT = "ranks have taken different paths and wait for each other:"
_LEFT = "a rank has left, and others wait for it:"
_ADVICE = (
    "All ranks have to run the same modules in the same order, and as many forward passes, backward passes and steps. "
    "A module that chooses among its children by the data (a mixture of experts) is to be marked with "
    "set_z3_leaf_modules"
)


class RankDivergenceError(DesyncError):
    """Ranks wait for different collectives; the message says where each of them is. Raised on every rank."""


class RankLeftError(RankDivergenceError):
    """Another rank has ended while this one still needs it."""

    peer_left = True


def stuck(states: Mapping[int, State], gone: Mapping[int, DepartedRank]) -> list[int]:
    """The waiting ranks that can never go on: a greatest fixed point, computed from states and not from time.

    ``states`` are those of the ranks that wait. Ranks that are neither there nor in ``gone`` are taken to be running.
    """
    hopeless = {rank for rank in states if rank not in gone}
    while True:
        still = set()
        for rank in hopeless:
            if (launch := states[rank].waiting) is None:
                continue
            never = any(launch.sequence > peer.sequence for peer in gone.values())
            # Who lacks a launch of somebody hopeless is hopeless; who lacks those of running ranks alone is not.
            if never or any(states[peer].lacks(launch) for peer in hopeless if peer != rank):
                still.add(rank)
        if still == hopeless:
            return sorted(hopeless)
        hopeless = still


def verdict(states: Mapping[int, State], gone: Mapping[int, DepartedRank], world_size: int) -> str:
    """What every rank raises."""
    launches = [state.waiting for state in states.values() if state.waiting is not None]
    missed = any(peer.sequence < launch.sequence for peer in gone.values() for launch in launches)
    lines = [_LEFT if missed else _DIFFERENT]
    for rank in range(world_size):
        running = states[rank].text() if rank in states else "its own code is running, it waits for nobody"
        lines.append(f"  rank {rank}: {gone[rank].reason if rank in gone else running}")
    # The first collective that is not the same everywhere, as far back as the trails go.
    first, *others = sorted(states)
    for sequence, mine in sorted(states[first].recent.items()):
        for rank in others:
            if (theirs := states[rank].recent.get(sequence)) is not None and theirs.fingerprint != mine.fingerprint:
                what = f"rank {first} launched {mine.text()}; rank {rank} launched {theirs.text()}"
                return "\n".join([*lines, f"  the first difference: {what}", _ADVICE])
    return "\n".join([*lines, _ADVICE])


class Watchdog(GroupObserver):
    """One rank's flight recorder and the thread that looks after it, where gloo does the waiting.

    The ``board`` is this group's, under a name never used before in its store.
    """

    def __init__(self, board: StoreMailbox) -> None:
        super().__init__()
        self._board, self._beat, self._posted = board, 0, ""
        self._verdict: Diagnosis | None = None
        # The circle that the last look has found, and the beats of its ranks then: found again, it is proved.
        self._found: dict[int, tuple[CollectiveRecord | None, int]] = {}
        self._beats: dict[int, int] = {}
        # For each peer its last beat, and in how many looks it has been the last.
        self._heard: dict[int, tuple[int, int]] = {}
        self._trainer = threading.get_ident()
        self._stop, self._leaves = threading.Event(), False
        self._roll_call = RollCall(board, self.flight_recorder, self._trainer)
        self._thread = start_thread(self._run, "deepzero-divergence")

    def explain(self, error: RuntimeError) -> None:
        """Raise what is behind ``error`` of a collective, if that can be found out; else return, after some seconds.

        A verdict is written before any wait is broken, and a rank says that it leaves before it does. So whatever there
        is to know is in the store when this rank sees its connection close; and where nothing is, the roll is called.
        """
        if isinstance(error, DesyncError):
            return
        found = self._known(self._verdict) if self._verdict else within(ASKING_SECONDS, lambda: self._find(error))
        if found is not None:
            raise found from error

    def _find(self, error: RuntimeError) -> RuntimeError | None:
        """What is to be raised in place of ``error``, from what the other ranks say."""
        failure, seconds = failure_of(error)
        if (found := Diagnosis.read(self._board) or self._missed(failure)) is None and failure:
            self._roll_call.hold(failure, seconds)
            found = Diagnosis.read(self._board) or self._missed(failure)
        if isinstance(found, Diagnosis):
            if found.kind == TIMEOUT:
                self._roll_call.say()
            return self._known(found)
        return found

    def _known(self, found: Diagnosis) -> RuntimeError:
        if found.kind == TIMEOUT:
            return CollectiveTimeoutError(found.text, echo=found.author != self._board.rank)
        if found.kind == MISSING:
            return self._left(found.text)
        return (RankLeftError if found.text.startswith(_LEFT) else RankDivergenceError)(found.text)

    def _missed(self, failure: str) -> RankLeftError | None:
        """The ranks that have said that they leave, and that this one needs."""
        gone, lost = self._board.gone().items(), failure == CONNECTION
        who = [
            f"rank {rank} {peer.reason}" for rank, peer in gone if lost or peer.sequence < self.flight_recorder.sequence
        ]
        return self._left("; ".join(who)) if who else None

    def _left(self, who: str) -> RankLeftError:
        waiting, place = self.flight_recorder.waiting, self.flight_recorder.place()
        last = waiting or (self.flight_recorder.recent[-1] if self.flight_recorder.recent else None)
        doing = f"{'waiting for' if waiting else 'after'} {last.text()}" if last else "before any collective"
        here = f"in {place}, {doing}" if place else doing
        return RankLeftError(f"{who}. Rank {self._board.rank} still needs it: it is {here}")

    def found(self) -> str | None:
        """The verdict, once there is one: the ranks will not go on together. For threads that wait beside training."""
        known = self._verdict or Diagnosis.read(self._board)
        return None if known is None else known.text

    def leave(self, reason: str) -> None:
        """Tell the others that this rank will not come back, and stop watching; ``reason`` completes "rank 3 …"."""
        if not self._stop.is_set():
            self._leaves = True  # the thread may be in a slow store until the group is gone
            self.end()
            self._say_gone(reason)

    def end(self) -> None:
        """Stop watching. Where the group is gone already, the thread tells the others that, and then ends."""
        self._stop.set()
        # A thread that is in the store, not in Python, when Python shuts down ends the process with SIGABRT (before
        # 3.14: it may not take the lock again, and is ended in code that may not be left).
        self._thread.join(2 * TICK_SECONDS)

    def _say_gone(self, reason: str) -> None:
        where = self.flight_recorder.place()
        with contextlib.suppress(Exception):
            self._board.leave(self.flight_recorder.sequence, reason + (f" ({where})" if where else ""))

    def _run(self) -> None:
        """The thread. It ends with the group, and when the store cannot be reached: then nobody can be asked."""
        standstill, looks = Standstill(self.flight_recorder), 0
        with contextlib.suppress(Exception):
            while not self._stop.wait(TICK_SECONDS) and self.of_current_group:
                waiting, (stands, _) = self.flight_recorder.waiting, standstill.look(time.monotonic())
                if waiting is not None and stands >= DIVERGENCE_SECONDS and self._look(waiting):
                    # Every operation of the group fails then, here and, since the connections close, on the others.
                    peer = (self._board.rank + 1) % self._board.world_size
                    if (work := dist.irecv(torch.zeros(1), peer, tag=_BREAK_TAG)) is not None:
                        work.wait(timedelta(milliseconds=1))
                    return
                looks += 1
                if looks % ROLL_CALL_TICKS == 0:
                    self._roll_call.look(time.monotonic())
        if not (self._leaves or self.of_current_group):
            self._say_gone("has destroyed the process group")

    def _look(self, waiting: CollectiveRecord) -> bool:
        """Post this rank's state, read the others'; True when there is a verdict."""
        board = self._board
        self._beat += 1
        mine = self.flight_recorder.state(0, user_line(self._trainer))
        if mine.waiting is not waiting or self.flight_recorder.waiting is not waiting:
            return False
        if (full := mine.to_json()) != self._posted:  # kilobytes, and a store that is a file keeps each post
            board.set(f"state/{board.rank}", full)
            self._posted = full
        board.set(f"beat/{board.rank}", str(self._beat))
        mine.beat = self._beat
        self._verdict = Diagnosis.read(board)
        if self._verdict is not None:
            return True
        states = {board.rank: mine}
        for peer in range(board.world_size):
            # The beat comes first: a state that is read after it was there at that beat, or is newer.
            posted = None if peer == board.rank else board.get(f"beat/{peer}")
            text = posted and board.get(f"state/{peer}")
            if posted and text:
                state = State.from_json(text)
                state.beat = int(posted)
                beat, looks = self._heard.get(peer, (0, 0))
                self._heard[peer] = (state.beat, looks + 1 if state.beat == beat else 0)
                # A rank that goes on leaves its last post behind; who posts no more is running.
                if self._heard[peer][1] < SILENT_LOOKS:
                    states[peer] = state
        gone = board.gone()
        circle = {rank: states[rank] for rank in stuck(states, gone)}
        found = {rank: (state.waiting, state.sequence) for rank, state in circle.items()}
        if not circle or found != self._found:
            self._found, self._beats = found, {rank: state.beat for rank, state in circle.items()}
            return False
        # Whether all of them were in these same waits at one moment: two beats on, since the next post may have been
        # put together before this rank read the last one.
        if any(state.beat < self._beats[rank] + 2 for rank, state in circle.items()):
            return False
        Diagnosis("divergence", board.rank, verdict(circle, gone, board.world_size)).write(board)
        self._verdict = Diagnosis.read(board)
        return True


class NcclWatchdog(GroupObserver):
    """The flight recorder and a thread that prints, where NCCL does the waiting: it breaks nothing off.

    NCCL's waits hold up the GPU and not the CPU, and its own watchdog ends the process at the process group's time-out.
    At nine tenths of it each rank, launching or not, prints one line: where it is. It has not run on several GPUs.
    """

    def __init__(self, board: StoreMailbox, timeout_seconds: float) -> None:
        super().__init__()
        self._seconds = 0.9 * timeout_seconds
        self._roll_call = RollCall(board, self.flight_recorder, threading.get_ident(), host_waits=False)
        self._stop = threading.Event()  # before the thread, which asks for it at once
        self._thread = start_thread(self._run, "deepzero-divergence")

    def leave(self, reason: str) -> None:
        """Stop watching. The others hear of it from NCCL."""
        self.end()

    def end(self) -> None:
        """Stop watching; :meth:`Watchdog.end` says why the thread is waited for."""
        self._stop.set()
        self._thread.join(2 * TICK_SECONDS)

    def _run(self) -> None:
        looks, answers = 0, True
        while not self._stop.wait(TICK_SECONDS) and self.of_current_group:
            if text := self._roll_call.standstill(time.monotonic(), self._seconds):
                print(text, file=sys.stderr, flush=True)
            looks += 1
            if answers and looks % ROLL_CALL_TICKS == 0:
                # A store that is gone, or hangs, must not keep this thread from what it says by itself.
                answers = within(ASKING_SECONDS, partial(self._roll_call.look, time.monotonic())) is not None


def watch_group() -> GroupObserver:
    """An observer for the process group that this process is in now. For ``flight_recorder.observe_groups_with``."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return GroupObserver()
    atexit.unregister(_program_ends)  # once, however many groups there are
    atexit.register(_program_ends)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    # Every rank observes the groups that meet at this store in the same order.
    name = f"group{store.add(f'deepzero/groups/{rank}', 1)}"
    if _speaks_gloo():
        return Watchdog(StoreMailbox(name, store, rank, world_size))
    # A connection of its own: NCCL's first launch waits in the store for rank 0, and holds it meanwhile.
    beside = StoreMailbox(name, store.clone(), rank, world_size)  # type: ignore[attr-defined]
    return NcclWatchdog(beside, _timeout_seconds())


def _program_ends() -> None:
    error = getattr(sys, "last_value", None)
    flight_recorder.leave("has ended its program" if error is None else f"has failed: {type(error).__name__}: {error}")


def _speaks_gloo() -> bool:
    """NCCL's waits do not hold up the CPU, so that there is nothing to see, and nothing that could be broken."""
    try:
        return dist.group.WORLD._get_backend(torch.device("cpu")).name() == "gloo"  # type: ignore[union-attr]
    except RuntimeError:
        return False


def _timeout_seconds() -> float:
    """Of the group's GPU backend."""
    try:
        options = dist.group.WORLD._get_backend(torch.device("cuda")).options  # type: ignore[union-attr]
        return float(options._timeout.total_seconds())
    except (RuntimeError, AttributeError):
        return 600.0
