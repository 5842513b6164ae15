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


SLOW, EXHAUSTIVE = pytest.mark.slow, pytest.mark.exhaustive
KILLED = "RankFailed: rank 1 was killed by signal 9 (SIGKILL)"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise", "RankFailed: rank 1 failed: ValueError: rank 1 has had enough\n"),
        pytest.param("kill", KILLED, marks=EXHAUSTIVE),
        pytest.param("exit", "RankFailed: rank 1 failed: SystemExit: 5", marks=EXHAUSTIVE),
        pytest.param("save", "done\n", marks=SLOW),
        pytest.param("save and fail", "RankFailed: rank ", marks=EXHAUSTIVE),
        # What would only happen again is not started again.
        pytest.param("never", "RankFailed: rank", marks=EXHAUSTIVE),
        pytest.param("config", "ConfigError: zero.stage=7: no such stage\n", marks=EXHAUSTIVE),
    ],
)
def test_what_becomes_of_ranks(how, said, tmp_path):
    """What a rank has failed of is said once, without the agent's page or another rank's lost connection."""
    done = runs.finished([sys.executable, "-W", "error", PROGRAMS, how, str(tmp_path)], tmp_path)
    assert (done.status, done.err) == (0, "") and done.out.startswith(said)
    lines = done.out.splitlines()
    assert how != "raise" or ("programs.py" in lines[1] and len(lines) == 3)
    assert how != "kill" or "out of memory" in done.out
    assert how != "config" or len(lines) == 1
    if how.startswith("save"):  # one that was under way at the end of the program
        assert (tmp_path / "checkpoints" / "latest").read_text() == "last\n"
        assert how == "save" or "all ranks alike" in done.out


@pytest.mark.parametrize(("signals", "said"), [
    pytest.param([signal.SIGINT], "interrupted by 2\n", marks=EXHAUSTIVE),
    pytest.param([signal.SIGINT, signal.SIGINT], "interrupted by 2\n", marks=SLOW),
    pytest.param([signal.SIGTERM], "interrupted by 15\n", marks=pytest.mark.exhaustive),
], ids=["ctrl-c", "ctrl-c-twice", "sigterm"])  # fmt: skip
def test_signals_to_the_launcher(signals, said, tmp_path):
    with runs.started([sys.executable, PROGRAMS, "sleep", str(tmp_path)], tmp_path) as command:
        runs.wait_until(lambda: len(list(tmp_path.glob("alive*"))) == 2, "two ranks")
        assert len(command.ranks()) == 2
        began = time.monotonic()
        for number in signals:
            os.kill(command.process.pid, number)
        done = command.wait(30)
        assert time.monotonic() - began < 15
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
    more = ["train.steps=60", "train.eval_every=0", "train.log_every=20", f"hydra.run.dir='{run_dir}'"]
    arguments = [sys.executable, runs.TRAIN, *tiny, *more, "optimizer.betas=[0.9, 0.95]"]
    metrics = run_dir / "metrics.jsonl"
    with runs.started(arguments, tmp_path, PATH="/usr/bin:/bin") as command:  # another Python's, or none's
        runs.wait_until(lambda: metrics.exists() and metrics.stat().st_size > 1000, "the first steps")
        os.killpg(command.process.pid, signal.SIGINT)
        done = command.wait(40)
    assert done.status == 130
    step, summary = runs.steps_taken(run_dir), runs.summary(run_dir)
    assert 2 <= step < 60
    stopped, way_on = done.err.splitlines()
    assert stopped == f"stopped by SIGINT; what there is lies in {run_dir}"
    assert (summary["status"], summary["error"], summary["steps"]) == ("stopped", "stopped by SIGINT", step)
    report = (run_dir / "report.html").read_text(encoding="utf-8")
    assert "The run did not finish: stopped by SIGINT." in report
    said, again = way_on.split("; to go on: ")
    assert said == f"saved after step {step}"
    done = runs.finished(["bash", "-c", f"exec {again}"], elsewhere)  # to the letter, and from anywhere
    assert (done.status, done.err) == (0, "")
    assert f"going on after step {step}" in done.out
    assert done.out.splitlines()[-1].startswith("saved after step 60; to go on to more steps: ")
    assert " train.steps=120 " in done.out.splitlines()[-1]
    assert [entry["step"] for entry in runs.entries(run_dir)[0]] == list(range(1, 61))
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


@pytest.mark.exhaustive
def test_under_torchrun_the_failing_rank_speaks(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = runs.finished([*torchrun, PROGRAMS, "raise", str(tmp_path)], tmp_path)
    assert done.status == 1
    said = [line for line in done.err.splitlines() if line.startswith("rank ")]
    assert said == ["rank 1 failed: ValueError: rank 1 has had enough"]
    # torchrun's own report names the same root cause.
    assert "rank 1 has had enough" in done.err[done.err.index("Root Cause") :]


@pytest.mark.exhaustive
def test_under_torchrun_an_error_is_said_once(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = runs.finished([*torchrun, runs.TRAIN, "zero.stagee=1"], tmp_path)
    assert done.status == 1
    assert done.out == ""
    assert done.err.splitlines()[0].startswith("unknown config key 'zero.stagee'. Did you mean 'zero.stage'?")
    assert done.err.count("unknown config key") == 2  # and once more in torchrun's own report
    assert list(tmp_path.iterdir()) == []
