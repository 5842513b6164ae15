"""The pool of ranks itself: answers, errors, death, silence, leaks, and that nothing stays behind."""

import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from deepzero.comm import process_group
from tests.distributed.pool import LeakedState, RankDied, RankError, RankPool, RankTimeout

ROOT = Path(__file__).parents[2]


class Odd(Exception):
    """An exception that does not survive pickling."""

    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


def sum_of_ranks(rank, world_size, start):
    x = start + rank
    dist.all_reduce(x)
    return rank, x.tolist()


def surroundings(rank, world_size):
    """What a test may rely on."""
    return {
        "pid": os.getpid(),
        "threads": torch.get_num_threads(),
        "random": torch.rand(3).tolist(),
        "env": (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ.get("LEFT_BEHIND")),
        "groups": len(dist.distributed_c10d._world.pg_map),
        "group": (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else None,
    }


def leave_environment(rank, world_size, folder):
    """Leaves harmless traces that the pool undoes."""
    dist.new_group([0, 1])
    os.environ["LEFT_BEHIND"] = "yes"
    os.chdir(folder)
    torch.manual_seed(99)


def stay_silent(rank, world_size):
    time.sleep(3600)


def misbehave(rank, world_size, how, bad):
    """One rank does as ``how`` says while the others wait for it."""
    if rank != bad:
        dist.barrier()
    elif how == "raise":
        raise KeyError(f"rank {rank} has no such key")
    elif how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "warn":
        warnings.warn("careful", UserWarning, stacklevel=1)
    elif how == "unpicklable":
        raise Odd(3, 4)
    elif how == "assert":
        seventeen = 17
        assert seventeen == 18
    elif how == "skip":
        pytest.skip("not today")
    elif how == "dtype":
        torch.set_default_dtype(torch.float64)
    elif how == "group":
        dist.destroy_process_group()
    elif how == "destructor":  # Python only prints such an error

        class Bad:
            def __del__(self):
                raise ValueError("in the background")

        Bad()


def own_group(rank, world_size):
    """Initialises and destroys a process group, as a test of initialisation does."""
    process_group.init_distributed(backend="gloo")
    x = torch.ones(1)
    dist.all_reduce(x)
    process_group.shutdown()
    return x.item()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_answers_in_rank_order(ranks, world_size):
    total = world_size * 10.0 + sum(range(world_size))
    answers = ranks.run(sum_of_ranks, torch.full((2,), 10.0), world_size=world_size)
    assert answers == [(r, [total, total]) for r in range(world_size)]


def test_ranks_are_reused_and_start_from_the_same_state(ranks, tmp_path):
    first = ranks.run(surroundings)
    ranks.run(leave_environment, str(tmp_path))
    assert first == ranks.run(surroundings)
    assert len({answer["pid"] for answer in first}) == 2
    for rank, answer in enumerate(first):
        assert answer["threads"] == 1
        assert answer["groups"] == 1
        assert answer["env"] == (rank, 2, None)
        assert answer["group"] == (rank, 2)


def test_exception_has_its_type_and_traceback(ranks):
    began = time.monotonic()
    with pytest.raises(KeyError, match="rank 1 has no such key") as caught:
        ranks.run(misbehave, "raise", 1)
    assert "in misbehave" in str(caught.value.__cause__)
    assert "rank 0 of 2 has not answered and is here" in str(caught.value.__cause__), "the waiting rank is shown"
    assert time.monotonic() - began < 20
    assert ranks.run(surroundings)[1]["group"] == (1, 2), "new ranks answer"


def test_a_dead_rank_is_reported_at_once(ranks):
    ranks.run(surroundings)
    began = time.monotonic()
    with pytest.raises(RankDied, match="rank 0 of 2 died in misbehave: signal SIGKILL"):
        ranks.run(misbehave, "die", 0)
    assert time.monotonic() - began < 10
    os.kill(ranks.run(surroundings)[1]["pid"], signal.SIGKILL)  # between two calls
    time.sleep(0.2)
    with pytest.raises(RankDied, match="rank 1 of 2"):
        ranks.run(surroundings)
    assert len(ranks.run(surroundings)) == 2


def test_silence_shows_the_stack(ranks):
    with pytest.raises(RankTimeout, match=r"no answer within 0.5 s") as caught:
        ranks.run(stay_silent, world_size=1, timeout=0.5)
    assert "stay_silent" in str(caught.value).split("is here")[1]


@pytest.mark.parametrize(("how", "error", "said"), [
    ("warn", UserWarning, "careful"),  # a warning is an error on a rank too
    ("unpicklable", RankError, "Odd: 3 and 4"),
    ("assert", AssertionError, ""),
    ("skip", pytest.skip.Exception, "not today"),
    ("dtype", LeakedState, "get_default_dtype"),
    pytest.param("group", LeakedState, "default process group", marks=pytest.mark.exhaustive),
    pytest.param("destructor", LeakedState, "background", marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_what_comes_of_a_rank(ranks, how, error, said):
    with pytest.raises(error, match=said or None) as caught:
        ranks.run(misbehave, how, 0, world_size=1)
    assert how != "assert" or "seventeen = 17" in str(caught.value.__cause__), "as pytest would have shown it"
    assert ranks.run(own_group, world_size=1, process_group=False) == [1.0]


def test_ranks_without_process_group_may_make_their_own(ranks):
    assert ranks.run(surroundings, process_group=False)[0]["group"] is None
    assert ranks.run(own_group, process_group=False) == [2.0, 2.0]
    assert ranks.run(own_group, process_group=False) == [2.0, 2.0], "the second rendezvous meets at a fresh store"


def test_what_cannot_work_is_refused(ranks):
    with pytest.raises(ValueError, match="world_size=7"):
        ranks.run(surroundings, world_size=7)
    with pytest.raises(ValueError, match="module level"):
        ranks.run(lambda rank, world_size: None)


def test_close_leaves_no_process():
    pool = RankPool()
    pool.run(surroundings, world_size=2)
    pids = pool.pids()
    assert len(pids) == 2
    pool.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize(
    "end",
    [pytest.param(signal.SIGINT, marks=pytest.mark.exhaustive), pytest.param(signal.SIGKILL, marks=pytest.mark.slow)],
)
def test_ranks_end_with_their_session(end, tmp_path):
    program = tmp_path / "session.py"
    # A shell starts its background jobs with Ctrl-C ignored, and that is inherited.
    program.write_text(
        "import signal\n"
        "from tests.distributed.pool import RankPool\n"
        "from tests.distributed.test_pool import stay_silent, surroundings\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "if __name__ == '__main__':\n"
        "    pool = RankPool()\n"
        "    pool.run(surroundings)\n"
        "    print(*pool.pids(), flush=True)\n"
        "    pool.run(stay_silent)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    session = subprocess.Popen([sys.executable, str(program)], env=environment, **pipes)
    try:
        assert session.stdout is not None
        pids = [int(pid) for pid in session.stdout.readline().split()]
        session.send_signal(end)
        session.wait(60)
    finally:
        session.kill()
        session.wait(60)
        session.stdout.close()
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while any(_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_running(pid) for pid in pids)


def _running(pid):
    """Alive, and not a zombie that waits for an init process to reap it."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):  # gone before it was opened, or before it was read
        return False
