"""Collectives that time out, and ranks that vanish: who waits for whom, in words, the same ones on every rank.

The process group of such a test is of no use afterwards, so each call makes one of its own (see test_divergence.py).
Ranks that are really killed or stopped: tests/e2e/test_launch.py.
"""

import contextlib
import io
import threading
import time

import pytest
import torch.distributed as dist

from deepzero.comm import process_group
from deepzero.comm.flight_recorder import DepartedRank, FlightRecorder, State
from deepzero.comm.process_group import StoreMailbox
from deepzero.health import desync_watchdog, hang_report
from deepzero.health.desync_watchdog import NcclWatchdog, RankLeftError, Watchdog
from deepzero.health.hang_report import CollectiveTimeoutError, Diagnosis, RollCall, summary, within
from tests.distributed.test_divergence import dogs_of, joined, one_exchange, stand, state

LOST = RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:15558")
TIMED_OUT = RuntimeError("Timed out waiting 3000ms for recv operation to complete")


def test_a_state_travels():
    trail = FlightRecorder()
    assert State.from_json(trail.state(3, "x.py:1").to_json()) == trail.state(3, "x.py:1")
    trail.waiting, trail.step = trail.launch("gather", "a"), 7
    assert State.from_json(trail.state(3, "").to_json()) == trail.state(3, "")
    assert trail.state(3, "x.py:1").text() == "step 7, at x.py:1, waiting for collective 1, gather of a"
    trail.position = "forward of blocks.3.mlp"
    assert trail.place() == "step 7, forward of blocks.3.mlp"


BUSY = (
    "a collective did not complete within 3 s (comm.timeout_seconds): rank 0 and rank 2 wait for rank 1, which has not "
    "launched collective 2, gather of b: rank 1's own code is running at data.py:88\n"
    "  rank 0: step 12, in forward of b, at data.py:88, waiting for collective 2, gather of b\n"
    "  rank 1: step 12, in forward of a, at data.py:88, its own code is running, after collective 1, gather of a\n"
)


@pytest.mark.parametrize(("states", "gone", "world", "said"), [
    ({0: state("ab", 2), 1: state("a"), 2: state("ab", 2)}, {}, 3, BUSY),
    ({0: state("ab", 2)}, {}, 2, "rank 0 waits in collective 2, gather of b, for rank 1, which does not answer:"),
    ({0: state("ab", 2), 1: state("ac", 2)}, {}, 2, "has launched collective 2, gather of c in place of coll"),
    ({0: state("ab", 2), 1: state("ab", 2)}, {}, 2, "rank 0 and rank 1 wait for collective 2, gather of b, wh"),
    ({0: state("ab", 2)}, {1: DepartedRank(1, "has failed: E")}, 2, "for rank 1, which has failed: E"),
    ({0: state("abc", 3), 1: state("ab", 2)}, {}, 2, "rank 1 is waiting for collective 2, gather of b"),
    ({0: state("a")}, {}, 2, "rank 1: does not answer: killed, stopped, or its machine is gone"),
])  # fmt: skip
def test_summary(states, gone, world, said):
    text = summary(states, gone, world, 3.0)
    assert said in text and text.endswith("raise comm.timeout_seconds")


@contextlib.contextmanager
def waiting_dogs(world, running=()):
    """Watchdogs in one process; their ranks have launched a collective, and wait in it or run."""
    with dogs_of(world) as dogs:
        for rank, dog in enumerate(dogs):
            stand(dog, "a")
            dog.flight_recorder.waiting = None if rank in running else dog.flight_recorder.waiting
        yield dogs


def test_a_rank_without_a_sign_of_life(monkeypatch):
    monkeypatch.setattr(hang_report, "ROLL_CALL_SECONDS", 1.0)
    monkeypatch.setattr(desync_watchdog, "TICK_SECONDS", 0.1)  # it answers at every other tick: with 0.5 just in time
    with waiting_dogs(3, running=[2]) as dogs:  # busy in its own code; its watchdog answers
        dogs[1]._stop.set()  # as after SIGKILL: no thread and no word
        dogs[1]._thread.join(5)
        began = time.monotonic()
        with pytest.raises(RankLeftError) as error:
            dogs[0].explain(LOST)
        assert time.monotonic() - began < hang_report.ASKING_SECONDS + 1
        assert str(error.value) == (
            "rank 1 gave no sign of life: it was killed or its machine is gone. "
            "Rank 0 still needs it: it is waiting for collective 1, gather of a"
        )
        assert error.value.peer_left
        began = time.monotonic()
        with pytest.raises(RankLeftError, match=r"rank 1 gave no sign of life.*Rank 2 still needs it"):
            dogs[2].explain(LOST)  # later: it is established by now
        assert time.monotonic() - began < 2


@pytest.mark.exhaustive
def test_a_lost_connection_between_living_ranks_stays_what_it_is():
    with waiting_dogs(2) as dogs:
        dogs[0].explain(LOST)
        dogs[1].explain(RuntimeError("something else"))


def test_a_lost_connection_may_be_anothers_time_out(capsys):
    """On gloo the rank that times out closes its connections, and the others may notice before it has said so."""
    ends = []

    def lose(dog):
        try:
            dog.explain(LOST)
        except RuntimeError as error:
            ends.append(error)

    with waiting_dogs(3, running=[2]) as dogs:
        thread = threading.Thread(target=lose, args=[dogs[1]])
        thread.start()
        time.sleep(0.3)
        with pytest.raises(CollectiveTimeoutError) as error:
            dogs[0].explain(TIMED_OUT)
        thread.join(10)
        assert [str(end) for end in ends] == [str(error.value)]
        assert sorted([ends[0].peer_left, error.value.peer_left]) == [False, True]
        said = capsys.readouterr().err.splitlines()
        assert sorted(line.split(":")[0] for line in said) == [f"where rank {rank} is" for rank in range(3)]


class BrokenStore(dist.Store):
    """A store whose process was stopped, or is gone."""

    def __init__(self, hangs):
        super().__init__()
        self.hangs = hangs

    def check(self, keys):
        time.sleep(60 if self.hangs else 0)
        raise dist.DistNetworkError("Connection reset by peer")

    get = set = compare_set = check


@pytest.mark.parametrize("hangs", [False, True])
def test_without_a_store_the_error_stays_what_it_is(hangs, monkeypatch):
    monkeypatch.setattr(desync_watchdog, "ASKING_SECONDS", 0.5)
    monkeypatch.setattr(desync_watchdog, "DIVERGENCE_SECONDS", 1e9)
    dog = Watchdog(StoreMailbox("broken", BrokenStore(hangs), 0, 2))
    began = time.monotonic()
    dog.explain(LOST)
    dog.explain(TIMED_OUT)
    assert time.monotonic() - began < 5
    dog._stop.set()


def test_within():
    assert within(5, lambda: 3) == 3
    assert within(5, lambda: [][0]) is None
    assert within(0.1, lambda: time.sleep(5)) is None


def test_the_first_verdict_counts():
    board = StoreMailbox("first", dist.HashStore(), 0, 2)
    assert Diagnosis.read(board) is None
    Diagnosis("timeout", 0, "a").write(board)
    Diagnosis("missing", 1, "b").write(board)
    assert Diagnosis.read(board) == Diagnosis("timeout", 0, "a")


def test_standing_still_is_said_once():
    """What the thread does beside NCCL, by a made-up clock."""
    trail = FlightRecorder()
    still = RollCall(StoreMailbox("still", dist.HashStore(), 1, 2), trail, 0, host_waits=False)
    assert not any(still.standstill(now, 90.0) for now in (0.0, 500.0))  # nothing was launched
    trail.launch("gather", "a")
    trail.step, trail.position = 3, "backward"
    said = {now: text for now in range(600, 1000, 10) if (text := still.standstill(now, 90.0))}
    assert [*said] == [690] and said[690].startswith(
        "where rank 1 is, nothing launched for 90 s: step 3, in backward, its own code is running"
    )
    trail.launch("gather", "b")
    assert [now for now in range(1000, 1200, 10) if still.standstill(now, 90.0)] == [1090]


@pytest.mark.slow
def test_the_thread_beside_nccl_prints(capsys, monkeypatch):
    monkeypatch.setattr(desync_watchdog, "TICK_SECONDS", 0.1)
    dog = NcclWatchdog(StoreMailbox("nccl", dist.HashStore(), 1, 2), 0.5)
    dog.flight_recorder.launch("gather", "a")
    time.sleep(1.2)
    dog.leave("is done")
    assert capsys.readouterr().err.count("where rank 1 is") == 1
    dog.explain(TIMED_OUT)


def sleep_through(rank, world, blocking):
    """Rank 1 sleeps while the others wait; what is raised, what is printed, when."""
    printed = io.StringIO()
    with joined(desync_watchdog.DIVERGENCE_SECONDS, timeout_seconds=4) as comm:
        one_exchange(comm, "the first")
        comm.flight_recorder.position, comm.flight_recorder.step = "forward of blocks.3.mlp", 12
        began = time.monotonic()
        with contextlib.redirect_stderr(printed), pytest.raises(CollectiveTimeoutError) as error:
            time.sleep(10 if rank == 1 else 0)
            if blocking:
                process_group.all_gather_object("bucket 3")
            else:
                one_exchange(comm, "bucket 3")
        return str(error.value), printed.getvalue(), time.monotonic() - began, error.value.peer_left


@pytest.mark.exhaustive
@pytest.mark.parametrize(("world", "blocking"), [(2, True), (3, False)])
def test_a_rank_that_sleeps_is_named(ranks, world, blocking):
    ends = ranks.run(sleep_through, blocking, world_size=world, process_group=False)
    (text,) = {text for text, *_ in ends}  # all say the same
    waiting = "rank 0 waits" if world == 2 else "rank 0 and rank 2 wait"
    what = "all_gather_object" if blocking else "parameters.all_gather of bucket 3"
    first = f"{waiting} for rank 1, which has not launched collective 2, {what}: "
    assert text.startswith("a collective did not complete within 4 s (comm.timeout_seconds): " + first)
    assert "rank 1's own code is running at test_autopsy.py:" in text.splitlines()[0]
    assert "  rank 0: step 12, in forward of blocks.3.mlp, at test_" in text
    for rank, (_, printed, seconds, _) in enumerate(ends):
        assert printed.count("where rank") == 1
        assert printed.startswith(f"where rank {rank} is: step 12, in forward of blocks.3.mlp, at test_")
        assert seconds < 20
    assert [echo for *_, echo in ends].count(False) == 1  # one of them says it
