"""After a collective has failed: the roll is called, and what the ranks answer says whose fault it was.

Two failures say nothing by themselves. A collective *timed out* (``comm.timeout_seconds``): some rank has not come, but
which, and what does it do instead? And a *connection was lost*, without a word from the rank at its other end: which
one was killed? In both cases the rank that has noticed calls the roll on the ``StoreMailbox``. Every rank answers with
its ``State``: a rank that waits or sleeps in its own code by the thread of its watchdog, which looks for a call once a
second. Whoever has not answered after :data:`ROLL_CALL_SECONDS` is taken to be gone. The first rank that has found out
writes the verdict, and all raise that: ``timeout``, :class:`CollectiveTimeoutError`, with who waits for whom and where
each rank is (each also prints its own place, for logs that are kept rank by rank); or ``missing``, ``RankLeftError``,
with the ranks that gave no sign of life. When the store is gone too, nobody can be asked, and the error stays what it
was; :func:`within` sees to it that asking ends.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple, TypeVar

from deepzero.comm.flight_recorder import CollectiveRecord, DepartedRank, DesyncError, FlightRecorder, State, user_line
from deepzero.comm.process_group import StoreMailbox
from deepzero.utils.threads import start_thread

ROLL_CALL_SECONDS = 3.0  # who has not answered by then is taken to be gone
ASKING_SECONDS = 5.0  # a store that has not answered by then is gone too
POLL_SECONDS = 0.1
SHOWN = 8  # ranks that one sentence names; the others are counted
CONNECTION, TIMEOUT, MISSING = "connection", "timeout", "missing"

_TIMED_OUT = re.compile(r"timed out waiting (\d+)\s*ms", re.IGNORECASE)
_LOST = re.compile(r"connection|pair closure|broken pipe", re.IGNORECASE)
_NO_ANSWER = "does not answer: killed, stopped, or its machine is gone"
_ADVICE = "Where a rank is only slow (it loads data, validates, writes a checkpoint), raise comm.timeout_seconds"

T = TypeVar("T")


class CollectiveTimeoutError(DesyncError):
    """A collective did not complete in ``comm.timeout_seconds``. The message, the same on every rank, says why.

    It is an ``echo`` where another rank says it already.
    """

    def __init__(self, text: str, echo: bool = False) -> None:
        super().__init__(text)
        self.peer_left = echo


class Diagnosis(NamedTuple):
    """What is to be raised on every rank, and the rank that found it."""

    kind: str
    author: int
    text: str

    def write(self, board: StoreMailbox) -> None:
        """Post it, unless there is one."""
        board.set_first("verdict", json.dumps(self))

    @staticmethod
    def read(board: StoreMailbox) -> Diagnosis | None:
        """The one that was posted first."""
        text = board.get("verdict")
        return None if text is None else Diagnosis(*json.loads(text))


class StateCollector:
    """One rank's part in calling the roll: it answers, and it calls.

    Args:
        board: where the calls and the answers are.
        trail: of this rank.
        trainer: number of the thread that trains.
    """

    def __init__(self, board: StoreMailbox, trail: FlightRecorder, trainer: int) -> None:
        self._board, self._trail, self._trainer = board, trail, trainer
        self._failure = ""
        self._heard: str | None = None
        self._lock, self._said = threading.Lock(), False

    def answer(self) -> None:
        """Answer a call, if there is one that has not been answered. For the watchdog's thread."""
        call = self._board.get("call")
        if call is not None and call != self._heard:
            self._heard = call
            self._post()
            if call != CONNECTION:
                self.say()

    def hold(self, failure: str, timeout_seconds: float = 0.0) -> None:
        """Call the roll, and post a verdict if the answers give one. For the rank whose collective has failed.

        ``failure`` is :data:`TIMEOUT`, after ``timeout_seconds``, or :data:`CONNECTION`.
        """
        self._failure = failure
        self._post()
        if failure == TIMEOUT:
            # Over an earlier call for a lost connection: on gloo one rank's time-out closes the others' connections.
            self._board.set("call", f"{timeout_seconds:g}")
            self.say()
        else:
            self._board.set_first("call", CONNECTION)
        if (found := self._listen()) is not None:
            found.write(self._board)

    def say(self) -> None:
        """Print where this rank is, once."""
        with self._lock:
            said, self._said = self._said, True
        if not said:
            print(f"where rank {self._board.rank} is: {self._state().text()}", file=sys.stderr, flush=True)

    def _listen(self) -> Diagnosis | None:
        board, end = self._board, time.monotonic() + ROLL_CALL_SECONDS
        states = {board.rank: self._state()}
        while True:
            over = time.monotonic() >= end
            for rank in range(board.world_size):
                if rank not in states and (text := board.get(f"answer/{rank}")) is not None:
                    states[rank] = State.from_json(text)
            gone, call = board.gone(), board.get("call")
            timed_out = call not in (None, CONNECTION)
            if Diagnosis.read(board) is not None or (gone and not timed_out):
                return None
            silent = [rank for rank in range(board.world_size) if rank not in states and rank not in gone]
            if timed_out and (over or not silent):
                return Diagnosis(TIMEOUT, board.rank, summary(states, gone, board.world_size, float(call or 0)))
            if over:
                return Diagnosis(MISSING, board.rank, _missing_text(silent)) if silent else None
            time.sleep(POLL_SECONDS)

    def _post(self) -> None:
        self._board.set(f"answer/{self._board.rank}", self._state().to_json())

    def _state(self) -> State:
        return replace(self._trail.state(0, user_line(self._trainer)), failure=self._failure)


def failure_of(error: BaseException) -> tuple[str, float]:
    """What the roll is called for (empty: for nothing), and how many seconds a collective has waited.

    Example:
        >>> failure_of(RuntimeError("Timed out waiting 3000ms for recv operation to complete"))
        ('timeout', 3.0)
        >>> failure_of(RuntimeError("Connection closed by peer [127.0.0.1]:1234"))
        ('connection', 0.0)
        >>> failure_of(RuntimeError("CUDA out of memory"))
        ('', 0.0)
    """
    if timed_out := _TIMED_OUT.search(str(error)):
        return TIMEOUT, int(timed_out[1]) / 1000
    return (CONNECTION if _LOST.search(str(error)) else ""), 0.0


# ---- in words --------------------------------------------------------------------------------------------------------
#
# `states` are those of the ranks that have answered, `gone` the ranks that have left; of the others nothing is known.


def _shorten(words: list[str]) -> list[str]:
    """The first of many, and how many more there are."""
    return words if len(words) <= SHOWN else [*words[: SHOWN - 1], f"{len(words) - SHOWN + 1} more"]


def listed(ranks: Iterable[int]) -> str:
    """In words.

    Example:
        >>> listed([0, 2, 3])
        'rank 0, rank 2 and rank 3'
        >>> listed(range(100))
        'rank 0, rank 1, rank 2, rank 3, rank 4, rank 5, rank 6 and 93 more'
    """
    *most, last = _shorten([f"rank {rank}" for rank in ranks])
    return f"{', '.join(most)} and {last}" if most else last


def _missing_text(ranks: list[int]) -> str:
    it = "it was killed or its machine is" if len(ranks) == 1 else "they were killed or their machines are"
    return f"{listed(ranks)} gave no sign of life: {it} gone"


def summary(states: Mapping[int, State], gone: Mapping[int, DepartedRank], world_size: int, seconds: float) -> str:
    """What every rank raises after a time-out: who waits for whom in the first line, then where each rank is."""
    waits = "; ".join(wait_texts(states, gone, world_size))
    lines = [f"a collective did not complete within {seconds:g} s (comm.timeout_seconds): {waits}"]
    for rank in range(world_size):
        place = states[rank].text() if rank in states else gone[rank].reason if rank in gone else _NO_ANSWER
        lines.append(f"  rank {rank}: {place}")
    return "\n".join([*lines, _ADVICE])


def wait_texts(states: Mapping[int, State], gone: Mapping[int, DepartedRank], world_size: int) -> list[str]:
    """A sentence for each collective that is waited for: who waits for whom, and why in vain."""
    waits: dict[CollectiveRecord, list[int]] = {}
    for rank, state in sorted(states.items()):
        if state.waiting is not None:
            waits.setdefault(state.waiting, []).append(rank)
    silent = [rank for rank in range(world_size) if rank not in states and rank not in gone]
    texts = []
    for launch, ranks in sorted(waits.items()):
        culprits = [f"rank {rank}, which {_NO_ANSWER}" for rank in silent]
        culprits += [f"rank {q}, which {peer.reason}" for q, peer in gone.items() if peer.sequence < launch.sequence]
        culprits += [_culprit(q, state, launch) for q, state in sorted(states.items()) if state.lacks(launch)]
        who, what = f"{listed(ranks)} {'waits' if len(ranks) == 1 else 'wait'}", launch.text()
        if not culprits:
            texts.append(f"{who} for {what}, which every rank has launched: its messages do not arrive")
        else:
            first = "" if states.keys() - set(ranks) and not silent else f" in {what},"
            texts.append(f"{who}{first} for {', and for '.join(_shorten(culprits))}")
    return texts


def _culprit(rank: int, state: State, launch: CollectiveRecord) -> str:
    """A rank that has not launched what others wait for, and what it does instead."""
    instead = state.recent.get(launch.sequence)
    did = f"has launched {instead.text()} in place of" if instead else "has not launched"
    own = f"rank {rank}'s own code is running" + (f" at {state.line}" if state.line else "")
    now = own if state.waiting is None else f"rank {rank} is {state.doing()}"
    return f"rank {rank}, which {did} {launch.text()}: {now}"


def within(seconds: float, ask: Callable[[], T]) -> T | None:
    """What ``ask()`` returns; None when it raises or takes longer: the store may be gone, or its machine stopped."""
    answers: list[T] = []

    def run() -> None:
        with contextlib.suppress(Exception):
            answers.append(ask())

    start_thread(run, "deepzero-autopsy").join(seconds)
    return answers[0] if answers else None
