"""Ranks that are started again, and ranks that leave in order when they are asked to stop."""

import os
import signal
import sys
import time

import pytest

from tests.e2e import runs
from tests.e2e.test_lost_ranks import PROGRAMS, TORCHRUN


def lines(path):
    """Of a text file."""
    return path.read_text(encoding="ascii").splitlines()


@pytest.mark.slow
def test_ranks_are_started_again(tmp_path):
    done = runs.finished([sys.executable, "-W", "error", PROGRAMS, "again", str(tmp_path)], tmp_path)
    assert done.out == "done\n"
    said = done.err.splitlines()
    assert len(said) == 2
    assert said[0].startswith("rank 1 was killed by signal 9 (SIGKILL)")
    assert said[0].endswith("; restart 1 of 3")
    assert said[1] == "rank 1 failed: ValueError: not yet; restart 2 of 3"
    assert [lines(tmp_path / f"attempts{rank}") for rank in range(2)] == [["0", "1", "2"]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.exhaustive), signal.SIGTERM])
def test_a_signal_between_two_attempts_ends_the_run(number, tmp_path):
    with runs.started([sys.executable, PROGRAMS, "pause", str(tmp_path)], tmp_path) as command:
        attempts = tmp_path / "attempts1"
        runs.wait_until(attempts.exists, "the first attempt")
        runs.wait_until(lambda: command.ranks() == [], "its end")
        time.sleep(1)  # the launcher is told a little later
        os.kill(command.process.pid, number)
        done = command.wait(30)
    assert done.out.splitlines() == ["before restart 1", f"interrupted by {number.value}"]
    assert lines(attempts) == ["0"]


@pytest.mark.parametrize(("launched_by", "number"), [
    ("launcher", signal.SIGINT),
    pytest.param("launcher", signal.SIGTERM, marks=pytest.mark.exhaustive),
    pytest.param("torchrun", signal.SIGINT, marks=pytest.mark.exhaustive),
    pytest.param("torchrun", signal.SIGTERM, marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_ctrl_c_and_sigterm_let_ranks_leave_in_order(launched_by, number, tmp_path):
    # As under nohup, which torchrun does not heed.
    nohup = ["sh", "-c", 'trap "" HUP; exec "$0" "$@"', sys.executable]
    start = TORCHRUN if launched_by == "torchrun" else nohup
    with runs.started([*start, PROGRAMS, "stop", str(tmp_path)], tmp_path) as command:
        runs.wait_until(lambda: len(list(tmp_path.glob("ready*"))) == 2, "two ranks")
        if launched_by == "launcher":
            os.kill(command.process.pid, signal.SIGHUP)
            time.sleep(0.5)
            assert len(command.ranks()) == 2
        os.kill(command.process.pid, number)
        done = command.wait(40)
    assert len(list(tmp_path.glob("left*"))) == 2
    if launched_by == "launcher":
        assert (done.out, done.err) == (f"interrupted by {number.value}\n", "")


@pytest.mark.parametrize(
    ("how", "signals", "said"),
    [
        ("stubborn", [signal.SIGINT, signal.SIGINT], 2),  # Ctrl-C twice takes no account of the request
        pytest.param("stubborn", [signal.SIGTERM], 15, marks=pytest.mark.exhaustive),
    ],
)
def test_the_end_comes_all_the_same(how, signals, said, tmp_path):
    with runs.started([sys.executable, PROGRAMS, how, str(tmp_path)], tmp_path) as command:
        runs.wait_until(lambda: len(list(tmp_path.glob("ready*"))) == 2, "two ranks")
        began = time.monotonic()
        for number in signals:
            os.kill(command.process.pid, number)
        done = command.wait(30)
        assert time.monotonic() - began < 15
    assert list(tmp_path.glob("left*")) == []
    assert (done.out, done.err) == (f"interrupted by {said}\n", "")


@pytest.mark.exhaustive
def test_a_note_survives_torchruns_restart(tmp_path):
    command_line = [*TORCHRUN, "--max-restarts=2", PROGRAMS, "note", str(tmp_path)]
    done = runs.finished(command_line, tmp_path, TMPDIR=str(tmp_path))
    assert done.status == 0, done.err  # torch's own meeting point would send every second one to dead listeners
    assert sorted(done.out.splitlines()) == [
        "rank 0, restart 0, note None",
        "rank 0, restart 1, note written by rank 0",
        "rank 0, restart 2, note written by rank 0",
        "rank 1, restart 0, note None",
        "rank 1, restart 1, note written by rank 0",
        "rank 1, restart 2, note written by rank 0",
    ]
