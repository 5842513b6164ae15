"""Ranks that are killed or stopped in the middle of training: the others say whom they miss, and soon."""

import contextlib
import os
import re
import signal
import sys
import time

import pytest

from tests.e2e import runs

PROGRAMS = str(runs.ROOT / "tests" / "e2e" / "programs.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
SOON = 30.0


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
    assert lines[0].startswith(
        "a collective did not complete within 6 s (comm.timeout_seconds): rank 0 and rank 2 wait "
    )
    assert "for rank 1, which does not answer: killed, stopped, or its machine is gone" in lines[0]
    assert lines[2] == "  rank 1: does not answer: killed, stopped, or its machine is gone"
    for rank, done in zip((0, 2), ends, strict=True):
        assert f"where rank {rank} is: step 5, in backward, at programs.py:" in done.err


@pytest.mark.parametrize("launched_by", ["launcher", pytest.param("torchrun", marks=pytest.mark.exhaustive)])
def test_a_killed_rank_ends_the_run(launched_by, tmp_path):
    start = TORCHRUN if launched_by == "torchrun" else [sys.executable]
    with runs.started([*start, PROGRAMS, "lose", str(tmp_path)], tmp_path) as command:
        alive = [tmp_path / f"alive{rank}" for rank in range(2)]
        runs.wait_until(lambda: all(path.exists() for path in alive), "two ranks")
        began = time.monotonic()
        done = command.wait()
        assert time.monotonic() - began < SOON
    if launched_by == "torchrun":
        assert re.search(r"rank +: 1 .*\n +exitcode +: -9", done.err), done.err
    else:
        assert done.out.startswith("RankFailed: rank 1 was killed by signal 9 (SIGKILL)")
