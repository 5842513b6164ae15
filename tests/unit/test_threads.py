"""Threads work on the device of whoever starts them; threads of one core each: number, errors, a process that forks."""

import contextlib
import multiprocessing
import threading
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from deepzero.device import Accelerator, use
from deepzero.offload.adam_kernels import in_threads
from deepzero.utils.threads import start_thread, thread_pool


@pytest.fixture
def chosen(monkeypatch):
    """A process that has chosen GPU 3; filled with the device that each thread has chosen, 0 where it has not."""
    devices = {threading.get_ident(): 3}

    def choose(device):
        devices[threading.get_ident()] = device.index

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: devices.get(threading.get_ident(), 0))
    monkeypatch.setattr(torch.accelerator, "set_device_index", choose)
    with use(Accelerator("cuda")):
        yield devices


def test_a_thread_has_its_starter_s_device(chosen):
    seen = []

    def look(what):
        seen.append((what, torch.accelerator.current_device_index(), threading.current_thread().daemon))

    start_thread(look, "deepzero-test", "first").join()
    start_thread(look, "deepzero-test", "second", daemon=False).join()
    assert seen == [("first", 3, True), ("second", 3, False)]
    start_thread(lambda: start_thread(look, "deepzero-test", "third").join(), "deepzero-test").join()
    assert seen[2] == ("third", 3, True)


def test_a_pool_s_threads_too(chosen):
    with thread_pool(2, "deepzero-test") as pool:
        meet = threading.Barrier(2, timeout=30)

        def look(_):
            meet.wait()
            return torch.accelerator.current_device_index()

        assert list(pool.map(look, range(2))) == [3, 3]


def test_without_cuda_nothing_is_asked(monkeypatch):
    """To ask for the current device would make a context."""
    asked = mock.Mock()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    for name in ("current_device_index", "set_device_index"):
        monkeypatch.setattr(torch.accelerator, name, asked)
    ran = []
    with use(Accelerator("cuda")):
        start_thread(ran.append, "deepzero-test", 1).join()
    assert ran == [1] and not asked.called


def test_pages_are_unlocked_on_their_device(monkeypatch):
    """Whichever thread collects the garbage."""
    inside, told = [], []

    @contextlib.contextmanager
    def within(device):
        inside.append(device)
        yield
        inside.pop()

    runtime = SimpleNamespace(cudaHostUnregister=lambda address: told.append((address, list(inside))))
    monkeypatch.setattr(torch.cuda, "device", within)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    gpu = torch.device("cuda", 3)
    Accelerator("cuda").unlock_pages(4096, gpu)
    assert told == [(4096, [gpu])]


@pytest.fixture(autouse=True)
def three():
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
