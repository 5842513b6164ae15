"""Threads of one core each: their number, their errors, and a process that forks."""

import multiprocessing
import threading

import pytest
import torch

from deepzero.offload.adam_kernels import in_threads


@pytest.fixture(autouse=True)
def three():
    """Three threads; puts the number back."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_each_uses_one_thread_and_the_caller_keeps_its_own():
    meet, seen, later = threading.Barrier(3, timeout=30), [], []

    def act(i, start):
        meet.wait()
        torch.randn(100_000).add_(1.0)
        seen.append((i, torch.get_num_threads(), torch.is_grad_enabled(), threading.current_thread().name))

    with torch.enable_grad():
        in_threads(range(3), act)
        assert torch.is_grad_enabled()
    assert [(i, n, grad) for i, n, grad, _ in sorted(seen)] == [(i, 1, False) for i in range(3)]
    assert len({name for *_, name in seen}) == 3
    # As does a thread that is started later.
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert later == [torch.get_num_threads()] == [3]


def test_an_error_is_raised_after_all_have_ended():
    meet, ended = threading.Barrier(3, timeout=30), []

    def act(_, start):
        meet.wait()
        if start == 0:
            raise ValueError("number 0")
        ended.append(start)

    with pytest.raises(ValueError, match="number 0"):
        in_threads(range(3), act)
    assert sorted(ended) == [1, 2]


def test_every_start_is_taken_once_and_one_alone_here():
    for starts in (range(0), range(1), range(0, 1000, 7)):
        seen = []
        in_threads(starts, lambda _, start, seen=seen: seen.append((start, threading.current_thread())))
        assert sorted(start for start, _ in seen) == list(starts)
        assert len(starts) != 1 or seen[0][1] is threading.current_thread()


def _in_a_child(answers):
    seen = []
    in_threads(range(2), lambda _, start: seen.append(start))
    answers.put(sorted(seen))


# Python 3.12 and later warn of what is tried here.
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_process_starts_its_own():
    in_threads(range(2), lambda *_: None)
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=_in_a_child, args=(answers,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert answers.get() == [0, 1]
