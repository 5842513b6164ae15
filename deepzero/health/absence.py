"""A rank that is alive but absent: while the others wait for it, one of them says so.

A rank that hangs in its data loader, sits in a debugger or prints for long makes the others wait up to
``comm.timeout_seconds``, ten minutes by default. That is no fault, and nothing is broken off; but whoever looks at the
terminal wants to know. So when a wait has lasted :data:`NOTICE_SECONDS`, the rank that waits asks all ranks where they
are, over the ``StoreMailbox``, and the threads of their watchdogs answer. Whoever waits with the lowest number prints
the answer (:func:`notice`): rank 0, unless it is rank 0 that is missing. It is asked and said again every
:data:`AGAIN_SECONDS`.

**Who waits.** On gloo a rank waits when its host does (``FlightRecorder.waiting``). NCCL's waits hold up the GPU and
not the host. But a rank that is waited for has launched less: there the ranks that have launched most, and nothing
since, wait for those that have launched less; and where all have launched the same there is nothing to say.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace

from deepzero.comm.flight_recorder import CollectiveRecord, DepartedRank, FlightRecorder, State, user_line
from deepzero.comm.process_group import StoreMailbox
from deepzero.health.hang_report import ROLL_CALL_SECONDS, SHOWN, wait_texts

NOTICE_SECONDS = 30.0  # a wait that has lasted so long is told …
AGAIN_SECONDS = 60.0  # … and told again so often


class Absence:
    """One rank's part: it answers, it asks, and it says what it has heard.

    Args:
        board: where questions and answers are.
        trail: of this rank.
        trainer: number of the thread that trains.
        host_waits: False where waits do not hold up the host.
    """

    def __init__(self, board: StoreMailbox, trail: FlightRecorder, trainer: int, host_waits: bool) -> None:
        self._board, self._trail, self._trainer, self._host_waits = board, trail, trainer, host_waits
        self._seen: tuple[int, CollectiveRecord | None] = (0, None)
        self._since: float | None = None
        self._due = NOTICE_SECONDS
        self._answered = 0
        # The number of the question that this rank has asked last, and when; None: it has its answer.
        self._asked: tuple[int, float] | None = None

    def look(self, now: float) -> float:
        """Answer, ask or say, whatever it is time for. For the watchdog's thread, about once a second.

        ``now`` is in seconds, of any clock that does not jump. Returns how long this rank has stood where it is.
        """
        seen = (self._trail.sequence, self._trail.waiting)
        if self._since is None or seen != self._seen:
            self._seen, self._since, self._due, self._asked = seen, now, NOTICE_SECONDS, None
        stands = now - self._since
        asked = int(self._board.get("ask") or 0)
        if asked > self._answered:
            self._answered = asked
            self._board.set(f"here/{self._board.rank}", self._state(asked, stands).to_json())
        waits = self._trail.waiting is not None if self._host_waits else self._trail.sequence > 0
        if waits and stands >= self._due:
            if self._asked is None:
                self._asked = self._board.add("ask", 1), now
            else:  # a later look
                question, when = self._asked
                text = self._heard(self._state(question, stands), now - when >= ROLL_CALL_SECONDS)
                if text is not None:
                    self._asked, self._due = None, stands + AGAIN_SECONDS
                    print(text, end="", file=sys.stderr, flush=True)
        return stands

    def _state(self, beat: int, stands: float) -> State:
        return replace(self._trail.state(beat, user_line(self._trainer)), seconds=stands)

    def _heard(self, mine: State, over: bool) -> str | None:
        """What is to be said; empty: nothing, or not by this rank; None: not yet, answers are missing."""
        board, states = self._board, {self._board.rank: mine}
        for peer in range(board.world_size):
            text = board.get(f"here/{peer}") if peer != board.rank else None
            state = None if text is None else State.from_json(text)
            if state is None or state.beat < mine.beat:
                continue
            states[peer] = state
            # It will say so itself; and who has launched more on NCCL waits for this rank, not this rank for it.
            if peer < board.rank and (state.waiting if self._host_waits else state.sequence >= mine.sequence):
                return ""
        gone = board.gone()
        if not over and len(states.keys() | gone.keys()) < board.world_size:
            return None
        if not self._host_waits:  # who has launched most waits for that, unless nobody has launched less
            most = max(state.sequence for state in states.values())
            less = any(state.sequence < most for state in states.values())
            states = {q: replace(s, waiting=s.recent.get(most) if less else None) for q, s in states.items()}
        return notice(states, gone, board)


def notice(states: Mapping[int, State], gone: Mapping[int, DepartedRank], board: StoreMailbox) -> str:
    """Who waits for whom, since when and in what; then a line for each rank that is waited for. Empty: nobody waits."""
    waits, me = wait_texts(states, gone, board.world_size), states[board.rank]
    if not waits or me.waiting is None:
        return ""
    absent = [rank for rank, state in sorted(states.items()) if state.waiting is None]
    lines = [f"waiting for {me.seconds:.0f} s{f' ({me.place()})' if me.place() else ''}: {'; '.join(waits)}"]
    lines += [f"  rank {rank}, for {states[rank].seconds:.0f} s: {states[rank].text()}" for rank in absent[:SHOWN]]
    return "".join(f"{line}\n" for line in lines)
