"""Ranks that fail, are killed, stopped, interrupted or started again: what is told; no process stays behind."""

import contextlib
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from tests import doors
from tests.e2e import runs, shared
from tests.e2e.runs import PROGRAMS, SOON, TORCHRUN

SLOW, EXHAUSTIVE = pytest.mark.slow, pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("how", "said"),
    [
        pytest.param("raise", "RankFailed: rank 1 failed: ValueError: rank 1 has had enough\n", marks=SLOW),
        pytest.param("exit", "RankFailed: rank 1 failed: SystemExit: 5", marks=EXHAUSTIVE),
        pytest.param("save", "done\n", marks=SLOW),
        pytest.param("save and fail", "RankFailed: rank ", marks=EXHAUSTIVE),
        pytest.param("save and lose", "RankFailed: rank ", marks=SLOW),
        # What would only happen again is not started again.
        pytest.param("never", "RankFailed: rank", marks=EXHAUSTIVE),
        pytest.param("config", "ConfigError: zero.stage=7: no such stage\n", marks=EXHAUSTIVE),
    ],
)
def test_what_becomes_of_ranks(how, said, tmp_path):
    """What a rank has failed of is said once, without the agent's page or another rank's lost connection."""
    done = runs.finished([sys.executable, "-W", "error", PROGRAMS, how, str(tmp_path)], tmp_path)
    assert done.out.startswith(said) and done.status == 0
    if how == "save and lose":  # by the end of the program, which does not end well
        assert "/checkpoints/last was not saved: " in done.out and not (tmp_path / "checkpoints" / "latest").exists()
        return
    assert done.err == ""
    lines = done.out.splitlines()
    assert how != "raise" or ("programs.py" in lines[1] and len(lines) == 3)
    assert how != "config" or len(lines) == 1
    if how.startswith("save"):  # one that was under way at the end of the program
        assert (tmp_path / "checkpoints" / "latest").read_text() == "last"
        assert how == "save" or "all ranks alike" in done.out


def test_a_killed_rank_ends_the_run(killed):
    assert killed.out.startswith("RankFailed: rank 1 was killed by signal 9 (SIGKILL)")
    assert "out of memory" in killed.out and killed.err == "" and killed.seconds < SOON


@pytest.mark.parametrize(("how", "signals", "said"), [
    pytest.param("sleep", [signal.SIGINT], 2, marks=EXHAUSTIVE),
    pytest.param("sleep", [signal.SIGINT, signal.SIGINT], 2, marks=EXHAUSTIVE),
    pytest.param("sleep", [signal.SIGTERM], 15, marks=EXHAUSTIVE),
    # Ranks that were asked to leave in order, and do not: Ctrl-C twice takes no account of the request.
    pytest.param("stubborn", [signal.SIGINT, signal.SIGINT], 2, marks=SLOW),
    pytest.param("stubborn", [signal.SIGTERM], 15, marks=EXHAUSTIVE),
])  # fmt: skip
def test_signals_to_the_launcher(how, signals, said, tmp_path):
    with runs.started([sys.executable, PROGRAMS, how, str(tmp_path)], tmp_path) as command:
        sign = "alive*" if how == "sleep" else "ready*"
        runs.wait_until(lambda: len(list(tmp_path.glob(sign))) == 2, "two ranks")
        assert len(command.ranks()) == 2
        began = time.monotonic()
        for pause, number in enumerate(signals):
            time.sleep(1.1 * pause)  # what comes sooner is the same Ctrl-C once more
            os.kill(command.process.pid, number)
        done = command.wait(30)
        assert time.monotonic() - began < (4 if len(signals) > 1 else 15)
    assert list(tmp_path.glob("left*")) == []
    assert (done.out, done.err) == (f"interrupted by {said}\n", "")


@pytest.mark.slow
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
        done = command.wait(30)
    assert (done.out, done.err) == ("interrupted by 2\n", "")  # the ranks have talked until then
    assert not evidence.exists()
    assert not Path((tmp_path / "folder").read_text()).exists()


@pytest.mark.slow
@pytest.mark.parametrize("start", [[sys.executable], TORCHRUN], ids=["launcher", "torchrun"])
def test_a_killed_launcher_leaves_no_orphan(start, tmp_path):
    with runs.started([*start, PROGRAMS, "sleep", str(tmp_path)], tmp_path) as command:
        runs.wait_until(lambda: len(list(tmp_path.glob("alive*"))) == 2, "two ranks")
        command.process.kill()
        runs.wait_until(lambda: command.processes() == {}, "the ranks' end", 15)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.slow
@pytest.mark.parametrize("by", ["torchrun", "mpirun"])
def test_two_nodes(by, watched, tiny, tmp_path):
    """As torchrun starts them, or as Open MPI tells its processes what they are."""
    torchrun = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=test", "--local-addr=127.0.0.1",
    ]  # fmt: skip
    arguments = [*(torchrun if by == "torchrun" else [sys.executable]), runs.TRAIN, *tiny, "train.steps=30"]
    told, port = [dict[str, str](), dict[str, str]()], str(free_port())
    for rank in "01" if by == "mpirun" else "":
        mpi = {"RANK": rank, "LOCAL_RANK": rank, "SIZE": "2", "LOCAL_SIZE": "2"}
        told[int(rank)] = {f"OMPI_COMM_WORLD_{name}": value for name, value in mpi.items()} | {"MASTER_PORT": port}
    nodes = [tmp_path / "node0", tmp_path / "node1"]
    for node in nodes:
        node.mkdir()
    with runs.started(arguments, nodes[0], **told[0]) as first, runs.started(arguments, nodes[1], **told[1]) as second:
        ends = [first.wait(), second.wait()]
    assert [done.status for done in ends] == [0, 0], ends[0].err + ends[1].err
    # One run folder, on the node that has rank 0, whichever that is; the other node's folder stays empty.
    run_dirs = [path.parent for node in nodes for path in node.rglob("summary.json")]
    assert len(run_dirs) == 1
    assert (run_dirs[0] / ".hydra" / "config.yaml").exists()
    assert sorted(len(list(node.iterdir())) for node in nodes) == [0, 1]
    assert sorted("validation loss" in done.out for done in ends) == [False, True]
    # However they were started, two ranks compute the same.
    two_nodes, one_node = runs.summary(run_dirs[0]), runs.summary(watched[0])
    assert two_nodes["params_sha256"] == one_node["params_sha256"]
    assert two_nodes["world_size"] == 2


def test_tasks_of_srun_are_no_runs_of_their_own(tiny, tmp_path):
    done = runs.refused(*tiny, cwd=tmp_path, SLURM_STEP_NUM_TASKS="4")
    assert done.status == 2 and done.err.startswith("SLURM_STEP_NUM_TASKS=4: this process is one of 4, and nothing")
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive
def test_under_torchrun_the_failing_rank_speaks(tmp_path):
    done = runs.finished([*TORCHRUN, PROGRAMS, "raise", str(tmp_path)], tmp_path)
    assert done.status == 1
    said = [line for line in done.err.splitlines() if line.startswith("rank ")]
    assert said == ["rank 1 failed: ValueError: rank 1 has had enough"]
    # torchrun's own report names the same root cause.
    assert "rank 1 has had enough" in done.err[done.err.index("Root Cause") :]
    done = runs.finished([*TORCHRUN, PROGRAMS, "lose", str(tmp_path)], tmp_path)  # without a word
    assert re.search(r"rank +: 1 .*\n +exitcode +: -9", done.err) and done.seconds < SOON, done.err


@contextlib.contextmanager
def plain_ranks(how, world, folder):
    """Ranks that no launcher looks after, so that nobody ends the survivors; they meet in ``folder``."""
    shared = {"WORLD_SIZE": str(world), "DEEPZERO_LAUNCH_FOLDER": str(folder)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # for them to know that they are ranks
    with contextlib.ExitStack() as stack:
        command = [sys.executable, "-W", "error", PROGRAMS, how, str(folder)]
        yield [
            stack.enter_context(runs.started(command, folder, RANK=str(rank), LOCAL_RANK=str(rank), **shared))
            for rank in range(world)
        ]


@pytest.mark.slow
def test_survivors_name_the_killed_rank(tmp_path):
    with plain_ranks("lose", 3, tmp_path) as (first, killed, last):
        assert killed.wait().status == -signal.SIGKILL
        began = time.monotonic()
        ends = [first.wait(SOON), last.wait(SOON)]
        assert time.monotonic() - began < SOON
    for rank, done in zip((0, 2), ends, strict=True):
        assert done.status == 1
        assert f"rank {rank} failed: RankLeftError: rank 1 gave no sign of life: it was killed or its mach" in done.err
        assert f"Rank {rank} still needs it: it is in step 5, backward, waiting for collective 5" in done.err


@pytest.mark.exhaustive
def test_a_stopped_rank_does_not_answer(tmp_path):
    with plain_ranks("freeze", 3, tmp_path) as (first, stopped, last):
        ends = [first.wait(SOON + 30), last.wait(SOON + 30)]
        os.kill(stopped.process.pid, signal.SIGKILL)
    texts = {re.search(r"CollectiveTimeoutError: (.*\n(?:  rank .*\n)*)", done.err)[1] for done in ends}
    assert len(texts) == 1
    lines = texts.pop().splitlines()
    assert "collective did not complete within 6 s (comm.timeout_seconds): rank 0 and rank 2 wait " in lines[0]
    assert "for rank 1, which does not answer: killed, stopped, or its machine is gone" in lines[0]
    assert lines[2] == "  rank 1: does not answer: killed, stopped, or its machine is gone"
    for rank, done in zip((0, 2), ends, strict=True):
        assert f"where rank {rank} is: step 5, in backward, at programs.py:" in done.err


def lines(path):
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


def test_ctrl_c_and_sigterm_let_ranks_leave_in_order(asked):
    done, left = asked
    assert (left, done.out, done.err) == (2, "interrupted by 2\n", "")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("launched_by", "number"), [("launcher", signal.SIGTERM), ("torchrun", signal.SIGINT), ("torchrun", signal.SIGTERM)]
)
def test_sigterm_and_torchrun_let_them_leave_too(launched_by, number, tmp_path):
    done, left = shared.asked(tmp_path, [], launched_by, number)
    assert left == 2
    assert launched_by == "torchrun" or (done.out, done.err) == (f"interrupted by {number.value}\n", "")


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
