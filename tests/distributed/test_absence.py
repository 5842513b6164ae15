"""A rank that is alive but absent: one of those that wait for it says so, with its place, and says it again.

Clocks are made up, and where ranks are real the absent one comes when it has been missed: nothing depends on speed.
"""

import contextlib
import io
import time
from unittest import mock

import pytest
import torch.distributed as dist

from deepzero.comm import process_group
from deepzero.comm.flight_recorder import FlightRecorder, State
from deepzero.comm.process_group import StoreMailbox
from deepzero.config.engine import CommConfig
from deepzero.health import desync_watchdog, hang_report
from deepzero.health.hang_report import RollCall
from tests.distributed.pool import on_ranks
from tests.distributed.test_divergence import communicator, joined, one_exchange
from tests.distributed.training import make_model, my_micro_batches, start, step_from


class Ranks:
    """Trails of ranks and what looks after them, without threads, at a clock of their own."""

    def __init__(self, launches, host_waits=True, silent=(), running=()):
        store, world = dist.HashStore(), len(launches)
        self.boards = [StoreMailbox("absence", store, rank, world) for rank in range(world)]
        self.trails = [FlightRecorder() for _ in launches]
        self.looks = [RollCall(b, t, 0, host_waits) for b, t in zip(self.boards, self.trails, strict=True)]
        self.now, self.silent, self.host_waits = 0.0, silent, host_waits
        for rank, wheres in enumerate(launches):
            for where in wheres:
                self.launch(rank, where)
        self.run(*running)

    def launch(self, rank, where):
        """A collective at which the rank's host stands still, if hosts do."""
        trail = self.trails[rank]
        trail.step, trail.position = 12, f"forward of {where}"
        launch = trail.launch("gather", where)
        trail.waiting = launch if self.host_waits else None

    def run(self, *ranks):
        """Their own code runs."""
        for rank in ranks:
            self.trails[rank].waiting = None

    def until(self, now, capsys):
        """What is printed, and when, while every thread looks once a second."""
        said = []
        while self.now < now:
            self.now += 1
            for rank, look in enumerate(self.looks):
                if rank not in self.silent:
                    look.look(self.now)
            text = capsys.readouterr().err
            said += [(self.now, text)] if text else []
        return said


def test_rank_0_says_who_is_missing_and_again_each_minute(capsys):
    ranks = Ranks(["ab", "a", "ab"], running=[1])
    said = ranks.until(200, capsys)
    assert said[0][1] == (
        "waiting for 31 s (step 12, forward of b): rank 0 and rank 2 wait for rank 1, which has not launched "
        "collective 2, gather of b: rank 1's own code is running\n"
        "  rank 1, for 30 s: step 12, in forward of a, its own code is running, after collective 1, gather of a\n"
    )
    assert [when for when, _ in said] == [32, 93, 154]
    # One answer to each question: in between nothing is sent.
    assert State.from_json(ranks.boards[1].get("here/1") or "").seconds == pytest.approx(152, abs=1)
    assert "waiting for 92 s" in said[1][1] and "rank 1, for 91 s" in said[1][1]
    ranks.launch(1, "b")
    ranks.run(0, 1, 2)
    assert ranks.until(400, capsys) == []  # nobody waits any more
    ranks.launch(0, "c")
    [(when, text)] = ranks.until(450, capsys)
    assert when == 432 and "rank 0 waits in" not in text and "rank 0 waits for rank 1, which has not launched" in text


def test_short_waits_and_slow_networks(capsys):
    ranks = Ranks(["", ""])
    for second in range(300):  # rank 1 waits most of the time, never long
        ranks.launch(1, "a")
        if second % 29 == 0:
            ranks.launch(0, "a")
            ranks.run(0, 1)
            ranks.until(ranks.now + 1, capsys)
    assert ranks.until(ranks.now + 29, capsys) == []
    assert "which every rank has launched: its messages do not arrive" in Ranks(["a", "a"]).until(40, capsys)[0][1]


def left():
    ranks = Ranks(["ab", "a"], silent=(1,))
    ranks.boards[1].leave(1, "has ended its program")
    return ranks


WHO = "rank 1 and rank 2 wait for rank 0, which has not"
ON_NCCL = (
    "(step 12, forward of c): rank 0 and rank 2 wait for rank 1, which has not launched collective 3, gather of c: "
    "rank 1's own code is running\n  rank 1, for 30 s: step 12, in forward of b, its own"
)


@pytest.mark.parametrize(("ranks", "times", "lines", "said"), [
    (Ranks(["a", "ab", "ab"], running=[0]), [32, 93], 2, WHO),  # another says it when rank 0 is missing
    (Ranks(["ab", "a", "ab"], silent=(1,)), [34, 97], 1,  # its thread does not answer
     "wait in collective 2, gather of b, for rank 1, which does not answer: killed, stopped"),
    (left(), [32, 93], 1, "rank 1, which has ended its program"),
    (Ranks(["ab", *["a"] * 30], running=range(1, 31)), [32, 93], 9, "23 more"),  # many fit on the screen
    (Ranks(["a", *["ab"] * 30], running=[0]), [32, 93], 2, "rank 7 and 23 more wait for rank 0, which has"),
    # Where waits do not hold up the host, as on NCCL, who has launched most waits for who has launched less.
    (Ranks(["abc", "ab", "abc"], host_waits=False), [32, 93], 2, ON_NCCL),
    (Ranks(["ab", "abc", "abc"], host_waits=False), [32, 93], 2, WHO),  # rank 0 stands too, and says nothing
    (Ranks(["ab", "ab"], host_waits=False), [], 0, ""),  # all validate, or one long kernel
    (Ranks(["", ""], host_waits=False), [], 0, ""),
])  # fmt: skip
def test_what_is_said_in_a_hundred_seconds(ranks, times, lines, said, capsys):
    found = ranks.until(100, capsys)
    assert [when for when, _ in found] == times
    assert said in "".join(text for _, text in found[:1])
    assert all(text.count("\n") == lines and text.count("waiting for ") == 1 for _, text in found)


class Posts(io.StringIO):
    """A stderr whose lines the other ranks can read."""

    def __init__(self, name):
        super().__init__()
        self.channel = StoreMailbox(name)

    def write(self, text):
        written = super().write(text)
        self.channel.set("said", self.getvalue())
        return written


@contextlib.contextmanager
def impatient():
    """A process group of this call's own, where a short wait is told, and told again."""
    with (
        mock.patch.multiple(hang_report, NOTICE_SECONDS=0.1, AGAIN_SECONDS=0.1),
        joined(desync_watchdog.DIVERGENCE_SECONDS, tick=0.02, timeout_seconds=110) as comm,
    ):
        yield comm


def come_when_missed(rank, world, missing):
    """All that the ranks print: the missing one comes when it was missed twice."""
    channels = [f"stderr of {peer}" for peer in range(world)]
    with impatient():
        engine = start(make_model(), stage=2)
        batch = my_micro_batches(0, rank, world, 2, 1)[0]
        posts = Posts(channels[rank])
        with contextlib.redirect_stderr(posts):
            for step in range(2):
                loss = engine(*batch)
                if rank == missing and step == 1:
                    while sum((StoreMailbox(c).get("said") or "").count("waiting for") for c in channels) < 2:
                        time.sleep(0.02)
                step_from(engine, loss)
        return posts.getvalue()


@pytest.mark.parametrize(("missing", "speaker"), [(1, 0), pytest.param(0, 1, marks=pytest.mark.exhaustive)])
def test_ranks_that_train(ranks, missing, speaker):
    said = ranks.run(come_when_missed, missing, world_size=2, process_group=False)
    assert said[missing] == ""
    first, place, *_ = said[speaker].splitlines()
    assert "(step 2, reduction of the bucket of " in first
    assert f"rank {speaker} waits for rank {missing}, which has not launched collective " in first
    assert f": rank {missing}'s own code is running at test_absence.py:" in first
    assert place.startswith(f"  rank {missing}, for ") and "step 2, at test_absence.py:" in place


def beside(rank, world):
    """What the thread beside NCCL prints, on ranks whose hosts do not wait."""
    with mock.patch.object(desync_watchdog, "_speaks_gloo", lambda: False), impatient() as comm:
        posts = Posts("stderr of 0") if rank == 0 else io.StringIO()
        one_exchange(comm, "the first")
        with contextlib.redirect_stderr(posts):
            if rank == 0:
                comm.flight_recorder.launch("gather", "blocks.3")  # and the host goes on
            while StoreMailbox("stderr of 0").get("said") is None:
                time.sleep(0.02)
            process_group.barrier()
        return posts.getvalue()


def test_ranks_beside_nccl(ranks):
    said = ranks.run(beside, world_size=2, process_group=False)
    assert said[1] == ""
    assert "rank 0 waits for rank 1, which has not launched collective 2, gather of blocks.3: rank 1's own" in said[0]


@on_ranks()
def test_a_launch_may_stand_still(rank, world):
    """What the watchdog sees while a launch itself blocks, as gloo's do when its buffers are full; and afterwards."""
    comm, seen, send = communicator(rank), [], dist.isend

    def look(*given, **named):
        seen.append(comm.flight_recorder.waiting)
        return send(*given, **named)

    with mock.patch.object(dist, "isend", look):
        one_exchange(comm, "here")
    assert ([launch.where for launch in seen], comm.flight_recorder.waiting) == (["here"], None)


def test_a_side_channel_of_one_rank():
    channel = StoreMailbox("alone")
    assert channel.get("a") is None
    channel.set("a", "b")
    assert channel.get("a") == "b"
    channel.remove("a")
    assert channel.get("a") is None


def test_the_buckets_are_far_apart():
    assert (hang_report.NOTICE_SECONDS, hang_report.AGAIN_SECONDS) == (30, 60)
    assert CommConfig().timeout_seconds >= 10 * hang_report.NOTICE_SECONDS
