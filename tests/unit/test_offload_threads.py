"""Threads of one core each: their number, their errors, and a process that forks."""

import multiprocessing
import threading

import pytest
import torch

from deepzero.offload.threads import in_threads


@pytest.fixture(autouse=True)
def restored():
    """Puts the number of threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_each_uses_one_thread_and_the_caller_keeps_its_own():
    torch.set_num_threads(3)
    meet, seen = threading.Barrier(4, timeout=30), []

    def act(i):
        meet.wait()
        torch.randn(100_000).add_(1.0)
        seen.append((i, torch.get_num_threads(), torch.is_grad_enabled(), threading.current_thread().name))

    with torch.enable_grad():
        in_threads(4, act)
        assert torch.is_grad_enabled()
    assert [(i, n, grad) for i, n, grad, _ in sorted(seen)] == [(i, 1, False) for i in range(4)]
    assert len({name for *_, name in seen}) == 4
    assert torch.get_num_threads() == 3


def test_a_thread_started_later_gets_the_process_number():
    torch.set_num_threads(3)
    in_threads(2, lambda i: None)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert seen == [3]


def test_an_error_is_raised_after_all_have_ended():
    ended = []

    def act(i):
        if i == 0:
            raise ValueError("number 0")
        ended.append(i)

    with pytest.raises(ValueError, match="number 0"):
        in_threads(3, act)
    assert sorted(ended) == [1, 2]


def test_one_runs_here():
    names = []
    in_threads(1, lambda i: names.append(threading.current_thread()))
    assert names == [threading.current_thread()]


def _in_a_child(answers):
    seen = []
    in_threads(2, seen.append)
    answers.put(sorted(seen))


# Python 3.12 and later warn of what is tried here.
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_process_starts_its_own():
    in_threads(2, lambda i: None)
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=_in_a_child, args=(answers,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert answers.get() == [0, 1]
