"""Which of several errors is the cause, and how it is told. The processes themselves: tests/e2e/test_launch.py."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from pathlib import Path

import pytest

from deepzero.checkpoint.errors import CheckpointError
from deepzero.comm import launcher, rank_process
from deepzero.comm.desync_watchdog import RankDivergenceError, RankLeftError
from deepzero.comm.launcher import RankFailed, default_threads, under_launcher
from deepzero.comm.rank_process import RankReport, describe, load_program, read_reports, root_cause, write_report
from deepzero.config.strict import ConfigError

ECHOES = [
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:15558",
    "[../gloo/transport/tcp/pair.cc:598] Read error: Connection reset by peer",
    "writev [127.0.0.1]:1: Broken pipe",
    "NCCL error in: ProcessGroupNCCL.cpp, remote process exited or there was a network error",
    "Timed out waiting 1800000ms for recv operation to complete",
    "Application timeout caused pair closure",
]


def caught(error: BaseException, rank: int = 0) -> RankReport:
    """``error`` as a rank would report it."""
    try:
        raise error
    except BaseException as raised:
        return describe(raised, rank)


@pytest.mark.parametrize("message", ECHOES)
def test_lost_peers_are_recognised(message: str) -> None:
    assert caught(RuntimeError(message)).peer_gone


@pytest.mark.parametrize(
    "error",
    [ValueError("Connection closed by peer"), RuntimeError("CUDA out of memory"), KeyError("x"), OSError("disk")],
)
def test_other_errors_are_causes(error: Exception) -> None:
    assert not caught(error).peer_gone


def test_the_watchdogs_errors_know_whose_fault_it_is() -> None:
    for error, echo in ((RankLeftError("rank 1 has left"), True), (RankDivergenceError("different paths"), False)):
        try:
            raise error from RuntimeError(ECHOES[-1])
        except RuntimeError as raised:
            assert describe(raised, 0).peer_gone == echo


def test_an_echo_that_was_wrapped() -> None:
    try:
        try:
            raise RuntimeError(ECHOES[0])
        except RuntimeError as inner:
            raise RuntimeError("the reduction of bucket 3 failed") from inner
    except RuntimeError as error:
        report = describe(error, 2)
    assert report.peer_gone
    assert report.title.splitlines()[0] == "RuntimeError: the reduction of bucket 3 failed"
    assert "caused by RuntimeError" in report.title


def test_the_cause_is_the_earliest_that_is_no_echo() -> None:
    echo, late, cause = (
        caught(e, rank) for rank, e in enumerate((RuntimeError(ECHOES[0]), ValueError("b"), ValueError("a")))
    )
    reports = [
        RankReport(**{**vars(echo), "seconds": 1.0}),
        RankReport(**{**vars(late), "seconds": 3.0}),
        RankReport(**{**vars(cause), "seconds": 2.0}),
    ]
    found = root_cause(reports)
    assert found is not None
    assert found.title == "ValueError: a"
    assert root_cause([]) is None


def test_the_frames_are_the_users() -> None:
    report = caught(ValueError("x"))
    assert "test_rank_process.py" in report.frames
    assert report.text().startswith("rank 0 failed: ValueError: x\n")


def test_settings_need_no_frames() -> None:
    report = caught(ConfigError("zero.stage=7: no"))
    assert report.kind == "config"
    assert report.text() == "zero.stage=7: no"


def test_a_checkpoints_error_needs_no_frames() -> None:
    try:
        raise CheckpointError("the disk has 0.001 GB left")
    except CheckpointError as error:
        report = describe(error, 0)
    assert report.text() == "rank 0 failed: CheckpointError: the disk has 0.001 GB left"
    assert "test_rank_process.py" in report.full


def test_reports_travel_through_files(tmp_path: Path) -> None:
    first, second = caught(ValueError("é"), 0), caught(RuntimeError(ECHOES[0]), 1)
    for report in (first, second):
        write_report(tmp_path, report)
    assert read_reports(tmp_path) == [first, second]


def test_a_report_that_cannot_be_written_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "program.py").write_text(
        "def fail(job):\n    job.unlink()\n    job.parent.rmdir()\n    raise ValueError(7)\n"
    )
    path = tmp_path / "launch" / "job.pickle"
    path.parent.mkdir()
    job = {"parent": os.getppid(), "sys_path": sys.path, "file": str(tmp_path / "program.py"), "name": "fail"}
    path.write_bytes(pickle.dumps({**job, "args": pickle.dumps((path,))}))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(rank_process.faulthandler, "enable", lambda: None)
    monkeypatch.setattr(rank_process, "watch", lambda parent: None)
    monkeypatch.setattr(rank_process, "leave", sys.exit)
    with pytest.raises(SystemExit, match=f"^{rank_process.FAILURE_EXIT}$"):
        rank_process.main(str(path))
    assert capsys.readouterr().err.startswith("rank 1 failed: ValueError: 7\n")


def test_a_killed_rank_comes_before_the_echo_it_left() -> None:
    echo = caught(RuntimeError(ECHOES[0]), 0)
    error = launcher._failure([echo], {0: 1, 1: -signal.SIGKILL})
    assert str(error).startswith("rank 1 was killed by signal 9 (SIGKILL); when nobody")
    error = launcher._failure([echo], {0: 1, 1: -signal.SIGSEGV})
    assert str(error) == "rank 1 was killed by signal 11 (SIGSEGV)"


def test_a_rank_that_the_agent_ended_is_not_the_cause() -> None:
    error = launcher._failure([caught(ValueError("x"), 1)], {0: -signal.SIGTERM, 1: 1})
    assert isinstance(error, RankFailed)
    assert error.headline == "rank 1 failed: ValueError: x"
    assert "Traceback" in error.full


def test_a_rank_without_a_word() -> None:
    assert "rank 2 ended with exit status 3" in str(launcher._failure([], {2: 3}))


def test_a_rank_that_refuses_its_settings() -> None:
    error = launcher._failure([caught(ConfigError("no"), 1), caught(RuntimeError(ECHOES[1]), 0)], {0: 1, 1: 2})
    assert isinstance(error, ConfigError)
    assert str(error) == "no"


def test_programs_are_found_by_file(tmp_path: Path) -> None:
    file = tmp_path / "a_program_for_ranks.py"
    file.write_text("def go():\n    return __name__\n\nNUMBER = 3\n")
    assert load_program(str(file), "go")() == "a_program_for_ranks"  # type: ignore[func-returns-value]
    assert load_program(str(file), "go") is load_program(str(file), "go")
    with pytest.raises(TypeError, match="NUMBER"):
        load_program(str(file), "NUMBER")
    del sys.modules["a_program_for_ranks"]


def test_threads_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert [default_threads(n) for n in (1, 2, 3, 8, 16)] == [8, 4, 2, 1, 1]


def test_a_launcher_is_known_by_all_its_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    for name in names:
        monkeypatch.setenv(name, "1")
    assert under_launcher()
    monkeypatch.delenv("LOCAL_RANK")
    assert not under_launcher()
