"""Which of several errors is the cause, and how it is told. The processes themselves: tests/e2e/test_launch.py."""

import os
import pickle
import signal
import sys

import pytest

from deepzero.checkpoint.errors import CheckpointError
from deepzero.config.strict import ConfigError
from deepzero.health.desync_watchdog import RankDivergenceError, RankLeftError
from deepzero.launch import launcher, rank_process
from deepzero.launch.launcher import RankFailed, default_threads, under_launcher
from deepzero.launch.rank_process import RankReport, describe, load_program, read_reports, root_cause, write_report

ECHOES = [
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:15558",
    "[../gloo/transport/tcp/pair.cc:598] Read error: Connection reset by peer",
    "writev [127.0.0.1]:1: Broken pipe",
    "NCCL error in: ProcessGroupNCCL.cpp, remote process exited or there was a network error",
    "Timed out waiting 1800000ms for recv operation to complete",
    "Application timeout caused pair closure",
]


def caught(error, rank=0):
    try:
        raise error
    except BaseException as raised:
        return describe(raised, rank)


def test_lost_peers_are_told_from_causes():
    assert all(caught(RuntimeError(message)).peer_gone for message in ECHOES)
    causes = [ValueError("Connection closed by peer"), RuntimeError("CUDA out of memory"), KeyError("x"), OSError("d")]
    assert not any(caught(error).peer_gone for error in causes)


@pytest.mark.parametrize(("error", "echo"), [
    (RankLeftError("rank 1 has left"), True),  # the watchdog has found out whose fault it is
    (RankDivergenceError("different paths"), False),
    (RuntimeError("the reduction of bucket 3 failed"), True),
])  # fmt: skip
def test_an_echo_that_was_wrapped(error, echo):
    error.__cause__ = RuntimeError(ECHOES[0])
    report = caught(error, 2)
    assert report.peer_gone == echo and "caused by RuntimeError" in report.title
    assert report.title.splitlines()[0] == f"{type(error).__name__}: {error}"


def test_the_cause_is_the_earliest_that_is_no_echo():
    told = ((RuntimeError(ECHOES[0]), 1.0), (ValueError("b"), 3.0), (ValueError("a"), 2.0))
    reports = [RankReport(**{**vars(caught(e, rank)), "seconds": at}) for rank, (e, at) in enumerate(told)]
    assert root_cause(reports).title == "ValueError: a" and root_cause([]) is None


def test_the_frames_are_the_users_and_settings_need_none():
    report = caught(ValueError("x"))
    assert "test_rank_process.py" in report.frames and report.text().startswith("rank 0 failed: ValueError: x\n")
    report = caught(ConfigError("zero.stage=7: no"))
    assert (report.kind, report.text()) == ("config", "zero.stage=7: no")
    report = caught(CheckpointError("the disk has 0.001 GB left"))
    assert report.text() == "rank 0 failed: CheckpointError: the disk has 0.001 GB left"
    assert "test_rank_process.py" in report.full


def test_reports_travel_through_files(tmp_path):
    first, second = caught(ValueError("é"), 0), caught(RuntimeError(ECHOES[0]), 1)
    for report in (first, second):
        write_report(tmp_path, report)
    assert read_reports(tmp_path) == [first, second]


def test_a_report_that_cannot_be_written_is_said(tmp_path, monkeypatch, capsys):
    (tmp_path / "program.py").write_text("def fail(job):\n job.unlink()\n job.parent.rmdir()\n raise ValueError(7)\n")
    path = tmp_path / "launch" / "job.pickle"
    path.parent.mkdir()
    job = {"parent": os.getppid(), "file": str(tmp_path / "program.py"), "name": "fail"}
    path.write_bytes(pickle.dumps({**job, "args": pickle.dumps((path,))}))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(rank_process, "watch", lambda parent: None)
    monkeypatch.setattr(rank_process, "leave", sys.exit)
    with pytest.raises(SystemExit, match=f"^{rank_process.FAILURE_EXIT}$"):
        rank_process.main(str(path))
    assert capsys.readouterr().err.startswith("rank 1 failed: ValueError: 7\n")


def test_what_the_launcher_makes_of_ends():
    """A killed rank comes before the echo it left; one that the agent ended is not the cause."""
    echo = caught(RuntimeError(ECHOES[0]), 0)
    error = launcher._failure([echo], {0: 1, 1: -signal.SIGKILL})
    assert str(error).startswith("rank 1 was killed by signal 9 (SIGKILL); when nobody")
    error = launcher._failure([echo], {0: 1, 1: -signal.SIGBUS})
    assert str(error).startswith("rank 1 was killed by signal 7 (SIGBUS); a file that it has mapped was cut short")
    error = launcher._failure([echo], {0: 1, 1: -signal.SIGSEGV})
    assert str(error) == "rank 1 was killed by signal 11 (SIGSEGV)"
    error = launcher._failure([caught(ValueError("x"), 1)], {0: -signal.SIGTERM, 1: 1})
    assert isinstance(error, RankFailed) and error.headline == "rank 1 failed: ValueError: x"
    assert "Traceback" in error.full
    assert "rank 2 ended with exit status 3" in str(launcher._failure([], {2: 3})), "without a word"
    error = launcher._failure([caught(ConfigError("no"), 1), caught(RuntimeError(ECHOES[1]), 0)], {0: 1, 1: 2})
    assert isinstance(error, ConfigError) and str(error) == "no"
    assert str(launcher._failure([], {0: -35})) == "rank 0 was killed by signal 35 (real-time)"
    # A rank that somebody has sent SIGTERM, whether or not the others have left with it.
    for reports, codes in (([], {0: 143, 1: 143}), ([echo], {0: 1, 1: 143})):
        assert str(launcher._failure(reports, codes)) == "stopped by SIGTERM"
    assert "rank 0 ended with exit status 143" in str(launcher._failure([], {0: 143, 1: 3}))


def test_programs_are_found_by_file(tmp_path):
    file = tmp_path / "a_program_for_ranks.py"
    file.write_text("def go():\n    return __name__\n\nNUMBER = 3\n")
    assert load_program(str(file), "go")() == "a_program_for_ranks"
    assert load_program(str(file), "go") is load_program(str(file), "go")
    with pytest.raises(TypeError, match="NUMBER"):
        load_program(str(file), "NUMBER")
    del sys.modules["a_program_for_ranks"]


def test_threads_are_shared_out(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert [default_threads(n) for n in (1, 2, 3, 8, 16)] == [8, 4, 2, 1, 1]


def test_a_launcher_is_known_by_all_its_variables(monkeypatch):
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    monkeypatch.delenv("LOCAL_RANK", raising=False)  # which Slurm and Open MPI say by other names
    for name in names:
        monkeypatch.setenv(name, "2")
    assert under_launcher()
    monkeypatch.setenv("WORLD_SIZE", "1")  # as a notebook may have it, for every program
    assert not under_launcher()
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert under_launcher()
    monkeypatch.delenv("MASTER_ADDR")
    assert not under_launcher()
