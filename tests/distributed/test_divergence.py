"""Ranks that take different paths: every rank raises within seconds and says where all of them are.

A group whose waits were broken is of no use any more, so these tests run on ranks without a process group and make one
of their own for each call, with the default time-out of ten minutes: whoever hangs, hangs.
"""

import contextlib
import threading
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepzero
from deepzero.comm import flight_recorder, process_group
from deepzero.comm.chaos import Chaos
from deepzero.comm.collectives import Communicator
from deepzero.comm.flight_recorder import CollectiveRecord, DepartedRank, FlightRecorder, State
from deepzero.comm.ledger import Ledger
from deepzero.comm.process_group import StoreMailbox
from deepzero.config.engine import ChaosConfig
from deepzero.health import desync_watchdog
from deepzero.health.desync_watchdog import RankDivergenceError, RankLeftError, Watchdog
from tests.distributed.pool import on_ranks
from tests.distributed.training import SGD, config, make_model, my_micro_batches, start, step_on

BY_HAND = pytest.mark.exhaustive


def state(launches, waits_for=None):
    """A rank as another reads it: it launched a collective a letter, and waits for that of this number, or runs."""
    trail = FlightRecorder()
    for number, where in enumerate(launches, 1):
        launched = trail.launch("gather", where)
        trail.waiting = launched if number == waits_for else trail.waiting
    trail.step, trail.position = 12, f"forward of {launches[-1]}"
    return State.from_json(trail.state(1, "data.py:88").to_json())


@pytest.mark.parametrize(("trails", "gone", "expected"), [
    ({0: ("ab", 2), 1: ("ac", 2)}, {}, [0, 1]),
    ({0: ("ab", 2), 1: ("ab", 2)}, {}, []),  # a slow network
    ({0: ("ab", 2), 1: ("ab", 1)}, {}, []),
    ({0: ("abc", 3), 1: ("ab", 2)}, {}, []),  # rank 1 has what it needs and will launch c
    ({0: ("ab", 2)}, {}, []),  # rank 1 is running
    ({0: ("ab", 2), 1: ("ac", 2), 2: ("ab", 2)}, {}, [0, 1, 2]),
    ({0: ("ab", 2), 1: ("abc", 3), 2: ("a", 1)}, {}, []),
    ({0: ("ab", 2)}, {1: DepartedRank(1, "has failed")}, [0]),
    ({0: ("ab", 2)}, {1: DepartedRank(2, "has ended its program")}, []),
])  # fmt: skip
def test_who_is_stuck(trails, gone, expected):
    assert desync_watchdog.stuck({rank: state(*trail) for rank, trail in trails.items()}, gone) == expected


def test_verdict_names_everything():
    text = desync_watchdog.verdict({0: state("ab", 2), 2: state("ac", 2)}, {}, 3)
    for said in (
        "rank 0: step 12, in forward of b, at data.py:88, waiting for collective 2, gather of b",
        "rank 1: its own code is running",
        "rank 0 launched collective 2, gather of b; rank 2 launched collective 2, gather of c",
        "set_z3_leaf_modules",
    ):
        assert said in text


def test_tags_differ():
    trail = FlightRecorder()
    tags = {trail.launch("gather", "a").tag for _ in range(1000)}
    assert len(tags) == 1000 and all(2**30 <= tag < 2**31 for tag in tags)
    assert CollectiveRecord(1, 0, "gather", "").text() == "collective 1, gather"


@contextlib.contextmanager
def dogs_of(world):
    """Watchdogs with their threads, in one process, which find nothing by themselves."""
    store = dist.HashStore()
    with mock.patch.object(desync_watchdog, "DIVERGENCE_SECONDS", 1e9):
        dogs = [Watchdog(StoreMailbox("dogs", store, rank, world)) for rank in range(world)]
        yield dogs
        for dog in dogs:
            dog.leave("is done")


def stand(dog, where):
    """Its rank launches a collective and waits in it."""
    dog.flight_recorder.waiting = dog.flight_recorder.launch("gather", where)


def look(dog):
    """One round of the thread, without the thread."""
    return dog._look(dog.flight_recorder.waiting)


def test_a_wait_that_goes_on_is_posted_in_full_once(monkeypatch):
    """A store that is a file keeps each post."""
    posted = []
    with dogs_of(2) as (dog, other):
        monkeypatch.setattr(
            dog._board, "set", lambda *post: (posted.append(post[0]), StoreMailbox.set(dog._board, *post))
        )
        for where in "ab":
            stand(dog, where)
            stand(other, where)
            for _ in range(5):
                assert not look(dog) and not look(other)
    assert posted.count("state/0") == 2 and posted.count("beat/0") == 10


class Group:
    """Stands for a process group."""


@pytest.mark.parametrize("ends", ["the program ends", "another group is joined"])
def test_a_group_that_the_program_has_destroyed_leaves_no_thread(monkeypatch, ends):
    """It might be in the store when Python shuts down, which aborts the process."""
    store, observers, world = dist.HashStore(), flight_recorder.GroupObservers(), Group()
    monkeypatch.setattr(flight_recorder, "world_group", lambda: world)
    monkeypatch.setattr(desync_watchdog, "TICK_SECONDS", 60.0)
    observers.observe_with(lambda: Watchdog(StoreMailbox("dogs", store, 0, 2)))
    dog = observers.present()
    world = None
    if ends == "the program ends":
        observers.leave("has ended its program")
    else:
        observers.observe_with(flight_recorder.GroupObserver)
        assert observers.present() is not dog
    assert not dog._thread.is_alive()
    assert StoreMailbox("dogs", store, 1, 2).gone()[0].reason == "has destroyed the process group"


def test_the_last_word_of_a_rank_that_leaves_is_its_own(monkeypatch):
    """Its thread may be in a slow store until the group is gone."""
    store, asked, answers, world = dist.HashStore(), threading.Event(), threading.Event(), Group()
    monkeypatch.setattr(flight_recorder, "world_group", lambda: world)
    monkeypatch.setattr(desync_watchdog, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(desync_watchdog.RollCall, "look", lambda *_: (asked.set(), answers.wait()))
    dog = Watchdog(StoreMailbox("dogs", store, 0, 2))
    assert asked.wait(10)
    dog.leave("has left the process group")
    world = None
    answers.set()
    dog._thread.join(10)
    assert StoreMailbox("dogs", store, 1, 2).gone()[0].reason == "has left the process group"


def test_an_old_post_is_no_waiting_rank():
    with dogs_of(4) as dogs:
        for dog, where in zip(dogs, "abcc", strict=True):
            stand(dog, where)
        dogs[3].leave("has failed")  # a rank that has left after the same launch holds up nobody
        assert not look(dogs[2])  # rank 2 waited once and runs now; 0 and 1 wait for each other
        assert any(look(dogs[0]) or look(dogs[1]) for _ in range(20))
        for dog in dogs[:2]:
            assert look(dog)
            with pytest.raises(RankDivergenceError, match=r"(?s)2: its own code is run.*3: has failed") as error:
                dog.explain(RuntimeError("Connection closed by peer"))
            assert not error.value.peer_left


def test_who_goes_on_is_left_alone():
    with dogs_of(2) as dogs:
        for where in "ace":  # each waits long for the other, in turn
            for dog, other in (dogs, dogs[::-1]):
                stand(dog, where)
                assert not any(look(dog) for _ in range(6))
                other.flight_recorder.launch("gather", where)
                dog.flight_recorder.waiting = None


def communicator(rank):
    return Communicator(torch.device("cpu"), Ledger(), Chaos(ChaosConfig(), rank))


@contextlib.contextmanager
def joined(seconds=0.2, tick=0.1, **settings):
    """A process group of this call's own, and a watchdog that is quicker than the default."""
    with mock.patch.multiple(desync_watchdog, DIVERGENCE_SECONDS=seconds, TICK_SECONDS=tick):
        process_group.init_distributed(backend="gloo", **settings)
        try:
            yield communicator(process_group.rank())
        finally:
            process_group.shutdown()


def one_exchange(comm, where, elements=5):
    send = [torch.full((elements,), float(comm.rank))] * comm.world_size
    recv = [torch.full((elements,), -1.0) for _ in range(comm.world_size)]
    comm.exchange("parameters.all_gather", send, recv, where=where).wait()
    return [t[0].item() for t in recv]


def take_different_paths(rank, world, how):
    with joined() as comm:
        one_exchange(comm, "the first")
        started = time.monotonic()
        with pytest.raises(RankDivergenceError) as error:
            comm.flight_recorder.position = f"forward of blocks.{rank}"
            if how == "blocking" and rank == 0:
                process_group.all_gather_object("a")
            elif how == "blocking" and rank == 1:
                comm.all_reduce("agreement.all_reduce", torch.zeros(7)).wait()
            elif how == "blocking":
                comm.broadcast("setup", torch.zeros(7), src=1)
            else:  # small messages: nothing but the tag keeps them apart
                # Ranks 0 and 1 differ while rank 2 is busy; it finds out when it comes.
                time.sleep(8 if how == "running" and rank == 2 else 0)
                one_exchange(comm, f"bucket {rank}")
        return str(error.value), time.monotonic() - started


@pytest.mark.parametrize(
    ("how", "world"),
    [("exchange", 2), *(pytest.param(how, 3, marks=BY_HAND) for how in ("exchange", "blocking", "running"))],
)
def test_different_collectives(ranks, how, world):
    ends = ranks.run(take_different_paths, how, world_size=world, process_group=False)
    (text,) = {text for text, _ in ends}  # all say the same
    for rank in range(world if how != "running" else 2):
        assert f"rank {rank}: in forward of blocks.{rank}, at test_divergence.py:" in text
    if how == "exchange":
        assert "waiting for collective 2, parameters.all_gather of bucket 0" in text
        assert "the first difference: rank 0 launched collective 2" in text
    assert all(seconds < 15 for _, seconds in ends)


@pytest.mark.exhaustive
@on_ranks(3, process_group=False)
def test_a_slow_rank_is_no_divergence(rank, world):
    with joined() as comm:
        out = [one_exchange(comm, "before")]
        time.sleep(5 if rank == 0 else 0)
        out.append(one_exchange(comm, "after", 200_000))
        process_group.barrier()
        assert out == [[-1.0 if q == rank else float(q) for q in range(3)]] * 2


@pytest.mark.slow
@on_ranks(process_group=False)
def test_one_rank_runs_one_backward_pass_more(rank, world):
    with joined(desync_watchdog.DIVERGENCE_SECONDS):
        engine = start(make_model(), stage=2, optimizer=SGD, bucket=800)
        batch = my_micro_batches(0, rank, world, 2, 1)[0]
        started = time.monotonic()
        with pytest.raises(RankDivergenceError) as error:
            for _ in range(1 + rank):
                engine.backward(engine(*batch))
            engine.step()
        assert time.monotonic() - started < 15
    text = str(error.value)
    assert all(f"rank {r}: step 1, in reduction of the bucket of " in text for r in range(2))
    assert "waiting for collective" in text and "gradients.reduce_scatter" in text


@on_ranks(process_group=False)
def test_a_rank_that_leaves_is_named(rank, world):
    with joined() as comm:
        one_exchange(comm, "the first")
        if rank == 1:
            comm.flight_recorder.position = "step 1"
            return
        with pytest.raises(RankLeftError) as error:
            one_exchange(comm, "the second")
    text = str(error.value)
    assert "rank 1 has left the process group (step 1). Rank 0 still needs it" in text
    assert "waiting for collective 2, parameters.all_gather of the second" in text


@on_ranks(process_group=False)
def test_the_thread_ends_with_its_group(rank, world):
    """Destroying the group without a word ends the thread too, and the next group starts afresh."""
    with joined() as comm:
        first = comm.observer
        # Under its own prefix: in the same one a fast rank would read the address that a slow one had before.
        store = dist.PrefixStore("second", dist.distributed_c10d._get_default_store())
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        second = flight_recorder.observer()
        process_group.barrier()
        first._thread.join(5)
        alive = first._thread.is_alive(), second._thread.is_alive()
    second._thread.join(5)
    assert (first is not second, *alive, second._thread.is_alive()) == (True, False, True, False)


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.left, self.right = (nn.Linear(16, 16, bias=False) for _ in range(3))

    def forward(self, x, way):
        return ((self.right if way else self.left)(self.first(x))).sum()


@on_ranks(process_group=False)
def test_stage_3_names_the_modules(rank, world):
    """Each message has both ranks' modules, and what to do about experts."""
    with joined():
        settings = config(stage=3, bucket=256, zero={"stage3_param_persistence_threshold": 0})
        engine, *_ = deepzero.initialize(model=Branching(), config=settings)
        step_on(engine, torch.ones(2, 16), 0)
        started = time.monotonic()
        with pytest.raises(RankDivergenceError) as error:
            engine.backward(engine(torch.ones(2, 16), rank))
        seconds = time.monotonic() - started
    for said in ("in reduction of the bucket of right.weight", "in forward of right", "set_z3_leaf_modules"):
        assert said in str(error.value)
    assert seconds < 15
