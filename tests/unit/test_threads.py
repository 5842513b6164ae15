"""Threads work on the device of whoever starts them."""

import threading

import pytest
import torch

from deepzero.offload import pinned_arena
from deepzero.utils.threads import start_thread, thread_pool


@pytest.fixture
def chosen(monkeypatch):
    """A process that has chosen GPU 3; filled with the device that each thread has chosen, 0 where it has not."""
    devices = {threading.get_ident(): 3}

    def choose(device):
        devices[threading.get_ident()] = device

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: devices.get(threading.get_ident(), 0))
    monkeypatch.setattr(torch.cuda, "set_device", choose)
    return devices


def test_a_thread_has_its_starter_s_device(chosen):
    seen = []

    def look(what):
        thread = threading.current_thread()
        seen.append((what, torch.cuda.current_device(), thread.daemon))

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
            return torch.cuda.current_device()

        assert list(pool.map(look, range(2))) == [3, 3]


def test_without_cuda_nothing_is_asked(monkeypatch):
    """To ask for the current device would make a context."""

    def refuse(*_):
        raise AssertionError("asked")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    for name in ("current_device", "set_device"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    ran = []
    start_thread(ran.append, "deepzero-test", 1).join()
    assert ran == [1]


def test_pages_are_unlocked_on_their_device(monkeypatch):
    """Whichever thread collects the garbage."""
    inside = []
    told = []

    class Within:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            inside.append(self.device)

        def __exit__(self, *_):
            inside.pop()

    class Cudart:
        def cudaHostUnregister(self, address):
            told.append((address, list(inside)))

    monkeypatch.setattr(torch.cuda, "device", Within)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "cudart", Cudart)
    gpu = torch.device("cuda", 3)
    pinned_arena._unlock(4096, gpu)
    assert told == [(4096, [gpu])]
