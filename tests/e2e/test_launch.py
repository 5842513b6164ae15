"""Ranks that fail, are killed or are interrupted: what the user is told, and that no process stays behind."""

import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from tests import doors
from tests.e2e import runs

PROGRAMS = str(runs.ROOT / "tests" / "e2e" / "programs.py")


def launch(how, folder):
    """``programs.py HOW``, whose end must leave no process."""
    with runs.started([sys.executable, "-W", "error", PROGRAMS, how, str(folder)], folder) as command:
        done = command.wait()
        assert command.processes() == {}
    assert done.status == 0
    return done


def test_an_exception_on_one_rank(tmp_path):
    done = launch("raise", tmp_path)
    lines = done.out.splitlines()
    assert lines[0] == "RankFailed: rank 1 failed: ValueError: rank 1 has had enough"
    assert "programs.py" in lines[1]
    assert len(lines) == 3
    assert done.err == ""  # neither the agent's page nor rank 0's lost connection


@pytest.mark.slow
def test_a_rank_killed_by_the_kernel(tmp_path):
    done = launch("kill", tmp_path)
    assert done.out.startswith("RankFailed: rank 1 was killed by signal 9 (SIGKILL)")
    assert "out of memory" in done.out
    assert done.err == ""


@pytest.mark.slow
def test_a_rank_that_leaves(tmp_path):
    done = launch("exit", tmp_path)
    assert done.out.startswith("RankFailed: rank 1 failed: SystemExit: 5")
    assert done.err == ""


@pytest.mark.slow
def test_a_save_under_way_at_the_end_of_the_program(tmp_path):
    launch("save", tmp_path)
    assert (tmp_path / "checkpoints" / "latest").read_text() == "last\n"


@pytest.mark.exhaustive
def test_a_save_under_way_when_all_ranks_fail(tmp_path):
    done = launch("save and fail", tmp_path)
    assert "all ranks alike" in done.out
    assert (tmp_path / "checkpoints" / "latest").read_text() == "last\n"


@pytest.mark.exhaustive
def test_settings_that_only_a_rank_can_judge(tmp_path):
    done = launch("config", tmp_path)
    assert done.out == "ConfigError: zero.stage=7: no such stage\n"
    assert done.err == ""


@pytest.mark.parametrize(
    ("signals", "said"),
    [
        pytest.param([signal.SIGINT], "interrupted by 2\n", marks=pytest.mark.slow),
        pytest.param([signal.SIGINT, signal.SIGINT], "interrupted by 2\n", marks=pytest.mark.exhaustive),
        pytest.param([signal.SIGTERM], "interrupted by 15\n", marks=pytest.mark.exhaustive),
    ],
    ids=["ctrl-c", "ctrl-c-twice", "sigterm"],
)
def test_signals_to_the_launcher(signals, said, tmp_path):
    with runs.started([sys.executable, PROGRAMS, "sleep", str(tmp_path)], tmp_path) as command:
        runs.wait_until(lambda: len(list(tmp_path.glob("alive*"))) == 2, "two ranks")
        assert len(command.ranks()) == 2
        began = time.monotonic()
        for number in signals:
            os.kill(command.process.pid, number)
        done = command.wait(30)
        assert time.monotonic() - began < 15
        assert command.processes() == {}
    assert (done.out, done.err) == (said, "")


def test_a_stranger_on_this_machine_changes_nothing(tmp_path):
    """Nobody else gets as far as a connection, and it finds no store."""
    evidence = tmp_path / "evidence"
    with runs.started([sys.executable, PROGRAMS, "talk", str(tmp_path)], tmp_path) as command:
        runs.wait_until(lambda: len(list(tmp_path.glob("alive*"))) == 2, "two ranks")
        found = command.listening()
        assert len(found) >= 2, "gloo has a socket on each rank"
        assert doors.beyond(found) == []
        assert doors.listening([command.process.pid]) == set(), "the launcher listens nowhere"
        assert {doors.poke(port, evidence) for _, port in sorted(found)} == {False}, "none is a store"
        os.kill(command.process.pid, signal.SIGINT)
        os.kill(command.process.pid, signal.SIGINT)
        done = command.wait(30)
        assert command.processes() == {}
    assert (done.out, done.err) == ("interrupted by 2\n", "")  # the ranks have talked until then
    assert not evidence.exists()
    assert not Path((tmp_path / "folder").read_text()).exists()


@pytest.mark.slow
def test_a_killed_launcher_leaves_no_orphan(tmp_path):
    with runs.started([sys.executable, PROGRAMS, "sleep", str(tmp_path)], tmp_path) as command:
        runs.wait_until(lambda: len(list(tmp_path.glob("alive*"))) == 2, "two ranks")
        command.process.kill()
        runs.wait_until(lambda: command.processes() == {}, "the ranks' end", 15)


@pytest.mark.slow
def test_ctrl_c_saves_and_says_the_command_that_goes_on(tiny, tmp_path):
    elsewhere, run_dir = tmp_path / "elsewhere", tmp_path / "my (first) run"
    elsewhere.mkdir()
    more = ["train.steps=120", "train.eval_every=0", "train.log_every=40", f"hydra.run.dir='{run_dir}'"]
    arguments = [sys.executable, runs.TRAIN, *tiny, *more, "optimizer.betas=[0.9, 0.95]"]
    metrics = run_dir / "metrics.jsonl"
    with runs.started(arguments, tmp_path, PATH="/usr/bin:/bin") as command:  # another Python's, or none's
        runs.wait_until(lambda: metrics.exists() and metrics.stat().st_size > 1000, "the first steps")
        os.killpg(command.process.pid, signal.SIGINT)
        done = command.wait(40)
        assert command.processes() == {}
    assert done.status == 130
    step, summary = runs.steps_taken(run_dir), runs.summary(run_dir)
    assert 2 <= step < 120
    stopped, way_on = done.err.splitlines()
    assert stopped == f"stopped by SIGINT; what there is lies in {run_dir}"
    assert (summary["status"], summary["error"], summary["steps"]) == ("stopped", "stopped by SIGINT", step)
    report = (run_dir / "report.html").read_text(encoding="utf-8")
    assert "The run did not finish: stopped by SIGINT." in report
    said, again = way_on.split("; to go on: ")
    assert said == f"saved after step {step}"
    with runs.started(["bash", "-c", f"exec {again}"], elsewhere) as command:  # to the letter, and from anywhere
        done = command.wait()
        assert command.processes() == {}
    assert (done.status, done.err) == (0, "")
    assert f"going on after step {step}" in done.out
    assert done.out.splitlines()[-1].startswith("saved after step 120; to go on to more steps: ")
    assert " train.steps=240 " in done.out.splitlines()[-1]
    assert [entry["step"] for entry in runs.entries(run_dir)[0]] == list(range(1, 121))
    assert list(elsewhere.iterdir()) == []


def free_port():
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.slow
def test_torchrun_with_two_nodes(tiny, sweep, tmp_path):
    torchrun = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=test", "--local-addr=127.0.0.1",
    ]  # fmt: skip
    arguments = [*torchrun, runs.TRAIN, *tiny, "zero.stage=2"]
    nodes = [tmp_path / "node0", tmp_path / "node1"]
    for node in nodes:
        node.mkdir()
    with runs.started(arguments, nodes[0]) as first, runs.started(arguments, nodes[1]) as second:
        ends = [first.wait(), second.wait()]
        assert first.processes() == second.processes() == {}
    assert [done.status for done in ends] == [0, 0], ends[0].err + ends[1].err
    # One run folder, on the node that has rank 0, whichever that is; the other node's folder stays empty.
    run_dirs = [path.parent for node in nodes for path in node.rglob("summary.json")]
    assert len(run_dirs) == 1
    assert (run_dirs[0] / ".hydra" / "config.yaml").exists()
    assert sorted(len(list(node.iterdir())) for node in nodes) == [0, 1]
    assert sorted("validation loss" in done.out for done in ends) == [False, True]
    # However they were started, two ranks compute the same.
    alone = runs.summary(sweep[0] / "2")
    assert runs.summary(run_dirs[0])["params_sha256"] == alone["params_sha256"]
    assert runs.summary(run_dirs[0])["world_size"] == 2


@pytest.mark.slow
def test_under_torchrun_the_failing_rank_speaks(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    with runs.started([*torchrun, PROGRAMS, "raise", str(tmp_path)], tmp_path) as command:
        done = command.wait()
        assert command.processes() == {}
    assert done.status == 1
    said = [line for line in done.err.splitlines() if line.startswith("rank ")]
    assert said == ["rank 1 failed: ValueError: rank 1 has had enough"]
    # torchrun's own report names the same root cause.
    assert "rank 1 has had enough" in done.err[done.err.index("Root Cause") :]


@pytest.mark.exhaustive
def test_under_torchrun_an_error_is_said_once(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    with runs.started([*torchrun, runs.TRAIN, "zero.stagee=1"], tmp_path) as command:
        done = command.wait()
        assert command.processes() == {}
    assert done.status == 1
    assert done.out == ""
    assert done.err.splitlines()[0].startswith("unknown config key 'zero.stagee'. Did you mean 'zero.stage'?")
    assert done.err.count("unknown config key") == 2  # and once more in torchrun's own report
    assert list(tmp_path.iterdir()) == []
