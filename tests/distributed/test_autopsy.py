"""Collectives that time out, and ranks that vanish: who waits for whom, in words, the same ones on every rank.

The process group of such a test is of no use afterwards, so each call makes one of its own (see test_divergence.py).
Ranks that are really killed or stopped: tests/e2e/test_lost_ranks.py.
"""

import contextlib
import io
import threading
import time

import pytest
import torch
import torch.distributed as dist

from deepzero.comm import process_group
from deepzero.comm.collectives import Communicator
from deepzero.comm.flight_recorder import DepartedRank, FlightRecorder, State
from deepzero.comm.ledger import Ledger
from deepzero.comm.process_group import StoreMailbox
from deepzero.comm.streams import Chaos
from deepzero.config.engine import ChaosConfig
from deepzero.health import desync_watchdog, hang_report
from deepzero.health.desync_watchdog import NcclStallReporter, NcclWatchdog, RankLeftError, Watchdog
from deepzero.health.hang_report import (
    CollectiveTimeoutError,
    Diagnosis,
    failure_of,
    summary,
    within,
)
from tests.distributed.test_divergence import one_exchange

LOST = RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:15558")
TIMED_OUT = RuntimeError("Timed out waiting 3000ms for recv operation to complete")


def state(launches, waits, **values):
    """A rank that has launched one collective a letter, and waits for the last or runs."""
    trail = FlightRecorder()
    for where in launches:
        trail.waiting = trail.launch("gather", where)
    trail.waiting = trail.waiting if waits else None
    trail.step, trail.position = 12, f"forward of {launches[-1]}"
    found = trail.state(1, "data.py:88")
    for name, value in values.items():
        setattr(found, name, value)
    return State.from_json(found.to_json())


def test_a_state_travels():
    trail = FlightRecorder()
    assert State.from_json(trail.state(3, "x.py:1").to_json()) == trail.state(3, "x.py:1")
    trail.waiting, trail.step = trail.launch("gather", "a"), 7
    assert State.from_json(trail.state(3, "").to_json()) == trail.state(3, "")
    assert trail.state(3, "x.py:1").text() == "step 7, at x.py:1, waiting for collective 1, gather of a"
    trail.position = "forward of blocks.3.mlp"
    assert trail.place() == "step 7, forward of blocks.3.mlp"


def test_summary_of_a_rank_that_is_busy():
    text = summary({0: state("ab", True), 1: state("a", False), 2: state("ab", True)}, {}, 3, 600.0)
    lines = text.splitlines()
    assert lines[0] == (
        "a collective did not complete within 600 s (comm.timeout_seconds): rank 0 and rank 2 wait for rank 1, which "
        "has not launched collective 2, gather of b: rank 1's own code is running at data.py:88"
    )
    assert lines[1] == "  rank 0: step 12, in forward of b, at data.py:88, waiting for collective 2, gather of b"
    assert lines[2].endswith("at data.py:88, its own code is running, after collective 1, gather of a")
    assert lines[-1].endswith("raise comm.timeout_seconds")


@pytest.mark.parametrize(("states", "gone", "world", "said"), [
    ({0: state("ab", True)}, {}, 2, "rank 0 waits in collective 2, gather of b, for rank 1, which does not answer:"),
    ({0: state("ab", True), 1: state("ac", True)}, {}, 2, "has launched collective 2, gather of c in place of coll"),
    ({0: state("ab", True), 1: state("ab", True)}, {}, 2, "rank 0 and rank 1 wait for collective 2, gather of b, wh"),
    ({0: state("ab", True)}, {1: DepartedRank(1, "has failed: E")}, 2, "for rank 1, which has failed: E"),
    ({0: state("abc", True), 1: state("ab", True)}, {}, 2, "rank 1 is waiting for collective 2, gather of b"),
    ({0: state("a", False)}, {}, 2, "rank 1: does not answer: killed, stopped, or its machine is gone"),
])  # fmt: skip
def test_summary(states, gone, world, said):
    assert said in summary(states, gone, world, 3.0)


def test_what_the_roll_is_called_for():
    assert failure_of(LOST)[0] == hang_report.CONNECTION
    assert failure_of(TIMED_OUT) == (hang_report.TIMEOUT, 3.0)
    assert failure_of(RuntimeError("CUDA out of memory"))[0] == ""


def dogs_of(name, world):
    """Watchdogs with their threads, in one process; their ranks have launched a collective, and wait in it."""
    store = dist.HashStore()
    dogs = [Watchdog(StoreMailbox(name, store, rank, world), seconds=1e9) for rank in range(world)]
    for dog in dogs:
        dog.trail.waiting = dog.trail.launch("gather", "a")
    return dogs


def dead(dog):
    """As after SIGKILL: no thread and no word."""
    dog._stop.set()
    dog._thread.join(5)


def test_a_rank_without_a_sign_of_life():
    dogs = dogs_of("silent", 3)
    dead(dogs[1])
    dogs[2].trail.waiting = None  # busy in its own code; its watchdog answers
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
        dogs[2].explain(LOST)  # later: it is known by now
    assert time.monotonic() - began < 2
    for dog in dogs:
        dog.leave("is done")


@pytest.mark.exhaustive
def test_a_lost_connection_between_living_ranks_stays_what_it_is():
    dogs = dogs_of("living", 2)
    dogs[0].explain(LOST)
    dogs[1].explain(RuntimeError("something else"))
    for dog in dogs:
        dog.leave("is done")


def test_a_lost_connection_may_be_anothers_time_out(capsys):
    """On gloo the rank that times out closes its connections, and the others may notice before it has said so."""
    dogs = dogs_of("both", 3)
    dogs[2].trail.waiting = None
    ends = []

    def lose():
        try:
            dogs[1].explain(LOST)
        except RuntimeError as error:
            ends.append(error)

    thread = threading.Thread(target=lose)
    thread.start()
    time.sleep(0.3)
    with pytest.raises(CollectiveTimeoutError) as error:
        dogs[0].explain(TIMED_OUT)
    thread.join(10)
    assert [str(end) for end in ends] == [str(error.value)]
    assert sorted([ends[0].peer_left, error.value.peer_left]) == [False, True]
    said = capsys.readouterr().err.splitlines()
    assert sorted(line.split(":")[0] for line in said) == [f"where rank {rank} is" for rank in range(3)]
    for dog in dogs:
        dog.leave("is done")


class BrokenStore(dist.Store):
    """A store whose process was stopped, or is gone."""

    def __init__(self, hangs):
        super().__init__()
        self.hangs = hangs

    def check(self, keys):
        """Hang, or fail."""
        time.sleep(60 if self.hangs else 0)
        raise dist.DistNetworkError("Connection reset by peer")

    get = set = compare_set = check


@pytest.mark.parametrize("hangs", [False, True])
def test_without_a_store_the_error_stays_what_it_is(hangs, monkeypatch):
    monkeypatch.setattr(desync_watchdog, "ASKING_SECONDS", 0.5)
    dog = Watchdog(StoreMailbox("broken", BrokenStore(hangs), 0, 2), seconds=1e9)
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
    trail, still = FlightRecorder(), NcclStallReporter(100.0)
    assert not any(still.look(trail, now) for now in (0.0, 500.0))  # nothing was launched
    trail.launch("gather", "a")
    trail.step, trail.position = 3, "backward"
    looks = [now for now in range(600, 1000, 10) if still.look(trail, float(now))]
    assert looks == [690]
    trail.launch("gather", "b")
    assert [now for now in range(1000, 1200, 10) if still.look(trail, float(now))] == [1090]
    said = "where rank 1 is, nothing launched for 90 s: step 3, in backward, at x.py:2, its own code is running"
    assert still.text(trail, 1, "x.py:2").startswith(said)


@pytest.mark.slow
def test_the_thread_beside_nccl_prints(capsys):
    dog = NcclWatchdog(StoreMailbox("nccl", dist.HashStore(), 1, 2), NcclStallReporter(1.0))
    dog.trail.launch("gather", "a")
    time.sleep(2.5)
    dog.leave("is done")
    assert capsys.readouterr().err.count("where rank 1 is") == 1
    dog.explain(TIMED_OUT)


def sleep_through(rank, world, blocking):
    """Rank 1 sleeps while the others wait; what is raised, what is printed, when."""
    process_group.init_distributed(backend="gloo", timeout_seconds=4)
    comm = Communicator(torch.device("cpu"), Ledger(), Chaos(ChaosConfig(), rank))
    printed = io.StringIO()
    try:
        one_exchange(comm, "the first")
        comm.position, comm.step = "forward of blocks.3.mlp", 12
        began = time.monotonic()
        with contextlib.redirect_stderr(printed), pytest.raises(CollectiveTimeoutError) as error:
            if rank == 1:
                time.sleep(10)
            if blocking:
                process_group.all_gather_object("bucket 3")
            else:
                one_exchange(comm, "bucket 3")
        return str(error.value), printed.getvalue(), time.monotonic() - began, error.value.peer_left
    finally:
        process_group.shutdown()


SLEEPERS = [pytest.param(2, True, marks=pytest.mark.exhaustive), pytest.param(3, False, marks=pytest.mark.exhaustive)]


@pytest.mark.parametrize(("world", "blocking"), SLEEPERS)
def test_a_rank_that_sleeps_is_named(ranks, world, blocking):
    ends = ranks.run(sleep_through, blocking, world_size=world, process_group=False)
    assert len({text for text, *_ in ends}) == 1  # all say the same
    text = ends[0][0]
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
