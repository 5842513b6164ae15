"""Where the ranks are, and who waits for whom: asked and told when a rank is absent, and when a collective has failed.

**A rank that is alive but absent** (in its data loader, in a debugger) makes the others wait up to
``comm.timeout_seconds``. Nothing is broken off; but when a wait has lasted :data:`NOTICE_SECONDS`, the rank that waits
asks all ranks where they are, over the ``StoreMailbox``, and the threads of their watchdogs answer. Whoever waits with
the lowest number prints the answer, and again every :data:`AGAIN_SECONDS`.

**A collective that failed** says little by itself. It *timed out*: which rank has not come, and what does it do
instead? A *connection was lost*: which rank was killed? Whoever has noticed asks too; who has not answered after
:data:`ROLL_CALL_SECONDS` is taken to be gone. The first rank that has found out posts a :class:`Diagnosis`, and all
raise that. When the store is gone too, nobody can be asked, and the error stays what it was (:func:`within`).
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

NOTICE_SECONDS, AGAIN_SECONDS = 30.0, 60.0  # a wait that has lasted so long is told, and told again so often
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


class Standstill:
    """How long a rank has stood where it is, as one thread has seen it: it looks, and nobody else does."""

    def __init__(self, recorder: FlightRecorder) -> None:
        self._recorder = recorder
        self._seen: tuple[int, CollectiveRecord | None] | None = None
        self._since = 0.0

    def look(self, now: float) -> tuple[float, bool]:
        """Seconds at second ``now`` of any clock that does not jump; and whether the rank has moved since the last."""
        seen = (self._recorder.sequence, self._recorder.waiting)
        if moved := seen != self._seen:
            self._seen, self._since = seen, now
        return now - self._since, moved


class RollCall:
    """One rank's part: it asks where the ranks are, it answers, and it says what it has heard.

    **Who waits.** On gloo a rank waits when its host does (``FlightRecorder.waiting``). NCCL's waits hold up the GPU
    and not the host. But a rank that is waited for has launched less: there the ranks that have launched most, and
    nothing since, wait for those that have launched less; where all have launched the same there is nothing to say.

    ``trainer`` is the number of the thread that trains. A thread that asks the store (:meth:`look`) may hang there, and
    come back while another one already calls :meth:`standstill`: neither changes what the other reads.
    """

    def __init__(self, board: StoreMailbox, recorder: FlightRecorder, trainer: int, host_waits: bool = True) -> None:
        self._board, self._recorder, self._trainer, self._host_waits = board, recorder, trainer, host_waits
        # Of :meth:`look`.
        self._asking, self._due = Standstill(recorder), NOTICE_SECONDS
        self._answered = 0
        # The number of the question that this rank has asked last while it waits, and when; None: it has its answer.
        self._asked: tuple[int, float] | None = None
        # Of :meth:`standstill`.
        self._alone, self._told = Standstill(recorder), False
        self._lock, self._said = threading.Lock(), False  # of every thread

    def standstill(self, now: float, seconds: float) -> str:
        """What is to be printed, once, when nothing was launched for so long; empty: nothing. Without the store."""
        stands, moved = self._alone.look(now)
        self._told = self._told and not moved
        if stands < seconds or self._told or self._recorder.sequence == 0:
            return ""
        self._told, where = True, self._state(0, 0.0).text()
        return f"where rank {self._board.rank} is, nothing launched for {seconds:.0f} s: {where}"

    def look(self, now: float) -> bool:
        """Answer, ask or say, whatever it is time for, and return True. For the watchdog's thread, once a second."""
        board, (stands, moved) = self._board, self._asking.look(now)
        if moved:
            self._due, self._asked = NOTICE_SECONDS, None
        asked = int(board.get("ask") or 0)
        if asked > self._answered:
            self._answered = asked
            self._post(asked, stands)
            if board.get("call") not in (None, CONNECTION):
                self.say()
        waits = self._recorder.waiting is not None if self._host_waits else self._recorder.sequence > 0
        if waits and stands >= self._due:
            if self._asked is None:
                self._asked = board.add("ask", 1), now
            else:  # a later look
                text = self._heard(self._asked[0], stands, now - self._asked[1] >= ROLL_CALL_SECONDS)
                if text is not None:
                    self._asked, self._due = None, stands + AGAIN_SECONDS
                    print(text, end="", file=sys.stderr, flush=True)
        return True

    def hold(self, failure: str, timeout_seconds: float = 0.0) -> None:
        """Call the roll, and post a verdict if the answers give one. For the rank whose collective has failed.

        ``failure`` is :data:`TIMEOUT`, after ``timeout_seconds``, or :data:`CONNECTION`.
        """
        board, end = self._board, time.monotonic() + ROLL_CALL_SECONDS
        if failure == TIMEOUT:
            # Over an earlier call for a lost connection: on gloo one rank's time-out closes the others' connections.
            board.set("call", f"{timeout_seconds:g}")
            self.say()
        else:
            board.set_first("call", CONNECTION)
        question, states = board.add("ask", 1), dict[int, State]()
        self._post(question, 0.0)
        while True:
            over = time.monotonic() >= end
            # Who has answered is not read again: many ranks ask the one store.
            states.update(self._answers(question, [rank for rank in range(board.world_size) if rank not in states]))
            gone, call = board.gone(), board.get("call")
            timed_out = call not in (None, CONNECTION)
            if Diagnosis.read(board) is not None or (gone and not timed_out):
                return
            silent = [rank for rank in range(board.world_size) if rank not in states and rank not in gone]
            if timed_out and (over or not silent):
                text = summary(states, gone, board.world_size, float(call or 0))
                Diagnosis(TIMEOUT, board.rank, text).write(board)
                return
            if over and silent:
                it = "it was killed or its machine is" if len(silent) == 1 else "they were killed or their machines are"
                Diagnosis(MISSING, board.rank, f"{listed(silent)} gave no sign of life: {it} gone").write(board)
            if over:
                return
            time.sleep(POLL_SECONDS)

    def say(self) -> None:
        """Print where this rank is, once."""
        with self._lock:
            said, self._said = self._said, True
        if not said:
            print(f"where rank {self._board.rank} is: {self._state(0, 0.0).text()}", file=sys.stderr, flush=True)

    def _state(self, question: int, stands: float) -> State:
        return replace(self._recorder.state(question, user_line(self._trainer)), seconds=stands)

    def _post(self, question: int, stands: float) -> None:
        self._board.set(f"here/{self._board.rank}", self._state(question, stands).to_json())

    def _answers(self, question: int, ranks: Iterable[int]) -> dict[int, State]:
        """Of those ``ranks`` that have answered this question or a later one."""
        texts = {rank: self._board.get(f"here/{rank}") for rank in ranks}
        states = {rank: State.from_json(text) for rank, text in texts.items() if text is not None}
        return {rank: state for rank, state in states.items() if state.beat >= question}

    def _heard(self, question: int, stands: float, over: bool) -> str | None:
        """What is to be said; empty: nothing, or not by this rank; None: not yet, answers are missing."""
        board, mine = self._board, self._state(question, stands)
        states, gone = {**self._answers(question, range(board.world_size)), board.rank: mine}, board.gone()
        for peer in range(board.rank):
            state = states.get(peer)
            # It will say so itself; and who has launched more on NCCL waits for this rank, not this rank for it.
            if state and (state.waiting if self._host_waits else state.sequence >= mine.sequence):
                return ""
        if not over and len(states.keys() | gone.keys()) < board.world_size:
            return None
        if not self._host_waits:  # who has launched most waits for that, unless nobody has launched less
            most = max(state.sequence for state in states.values())
            less = any(state.sequence < most for state in states.values())
            states = {q: replace(s, waiting=s.recent.get(most) if less else None) for q, s in states.items()}
        return notice(states, gone, board)


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


def within(seconds: float, ask: Callable[[], T]) -> T | None:
    """What ``ask()`` returns; None when it raises or takes longer: the store may be gone, or its machine stopped."""
    answers: list[T] = []

    def run() -> None:
        with contextlib.suppress(Exception):
            answers.append(ask())

    start_thread(run, "deepzero-autopsy").join(seconds)
    return answers[0] if answers else None


# ---- in words --------------------------------------------------------------------------------------------------------
#
# `states` are those of the ranks that have answered, `gone` the ranks that have left; of the others nothing is known.


def _shorten(words: list[str]) -> list[str]:
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


def summary(states: Mapping[int, State], gone: Mapping[int, DepartedRank], world_size: int, seconds: float) -> str:
    """What every rank raises after a time-out: who waits for whom in the first line, then where each rank is."""
    waits = "; ".join(wait_texts(states, gone, world_size))
    lines = [f"a collective did not complete within {seconds:g} s (comm.timeout_seconds): {waits}"]
    for rank in range(world_size):
        place = states[rank].text() if rank in states else gone[rank].reason if rank in gone else _NO_ANSWER
        lines.append(f"  rank {rank}: {place}")
    return "\n".join([*lines, _ADVICE])


def notice(states: Mapping[int, State], gone: Mapping[int, DepartedRank], board: StoreMailbox) -> str:
    """Who waits for whom, since when and in what; then a line for each rank that is waited for. Empty: nobody waits."""
    waits, me = wait_texts(states, gone, board.world_size), states[board.rank]
    if not waits or me.waiting is None:
        return ""
    absent = [rank for rank, state in sorted(states.items()) if state.waiting is None]
    lines = [f"waiting for {me.seconds:.0f} s{f' ({me.place()})' if me.place() else ''}: {'; '.join(waits)}"]
    lines += [f"  rank {rank}, for {states[rank].seconds:.0f} s: {states[rank].text()}" for rank in absent[:SHOWN]]
    return "".join(f"{line}\n" for line in lines)


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
