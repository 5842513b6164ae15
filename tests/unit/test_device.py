"""The device module: which accelerator a process has, what the real one asks of torch, and that nobody asks past it."""

import re
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from deepzero import device
from deepzero.comm import process_group
from deepzero.device import Accelerator, NullAccelerator, accelerator, accelerator_of, installed
from deepzero.launch.launcher import default_nproc
from deepzero.utils.errors import ConfigError

CPU, GPU = torch.device("cpu"), torch.device("cuda", 3)


def public(kind):
    return {name for name in dir(kind) if not name.startswith("_")}


def test_no_other_file_asks_for_cuda():
    files = [path for path in Path(device.__file__).parent.rglob("*.py") if path != Path(device.__file__)]
    found = [path for path in files if re.search(r"\btorch\s*\.\s*(cuda|xpu|accelerator)\b", path.read_text("utf-8"))]
    assert found == []


def test_the_process_s_accelerator(monkeypatch):
    monkeypatch.delenv("DEEPZERO_DEVICE", raising=False)
    found = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: found[-1])
    for kind, expected in ((None, "cpu"), ("mps", "cpu"), ("cuda", "cuda")):
        found.append(None if kind is None else torch.device(kind))
        assert accelerator().kind == installed().kind == expected
    monkeypatch.setenv("DEEPZERO_DEVICE", "cpu")
    assert accelerator().kind == "cpu" and installed().kind == "cuda"
    assert accelerator_of(GPU).kind == "cuda" and not accelerator_of(torch.device("meta")).has_streams
    monkeypatch.setenv("DEEPZERO_DEVICE", "CPU")
    for asks in (process_group.init_distributed, default_nproc):
        with pytest.raises(
            ConfigError, match=r"^DEEPZERO_DEVICE=CPU in the environment: it must be one of auto, cpu, cuda$"
        ):
            asks()


def test_another_one_is_given_to_all_threads():
    other, seen = Accelerator("cuda"), []
    with device.use(other):
        thread = threading.Thread(target=lambda: seen.extend([accelerator(), accelerator_of(GPU), accelerator_of(CPU)]))
        thread.start()
        thread.join()
    assert seen[:2] == [other, other] and type(seen[2]) is NullAccelerator
    assert accelerator_of(GPU) is not other


def test_nothing_runs_beside_a_cpu():
    null, order = accelerator_of(CPU), []
    event = null.event(CPU, timing=True)
    event.record()
    event.wait()
    event.synchronize()
    with null.stream(CPU).running():
        order.append(event.query())
    assert order == [True] and event.seconds_until(null.event(CPU)) == 0.0
    assert all(0 < asked(CPU) < null.total_memory(CPU) for asked in (null.memory_allocated, null.max_memory_allocated))
    assert null.device_count() == null.current_stream(CPU).key == 0
    null.synchronize(CPU), null.set_device(CPU), null.empty_cache(), null.lock_pages(0, 0, CPU)
    state, numbers = null.rng_state(CPU), torch.rand(2)
    null.manual_seed(3, CPU), null.set_rng_state(state, CPU)
    assert torch.equal(torch.rand(2), numbers)
    thread_start = null.thread_start()
    thread_start()
    with null.within(null.current_device()):
        assert null.supports_bf16(CPU) and null.device_name(CPU) == "cpu"


def test_a_stream_and_an_event_name_their_device(monkeypatch):
    """The program's current device may be another."""
    asked, gpu = [], Accelerator("cuda")
    current, side = (SimpleNamespace(stream_id=number) for number in (7, 8))
    work = SimpleNamespace(query=lambda: True, elapsed_time=lambda _: 2.0)
    work.record = work.wait = lambda stream: asked.append(stream)
    gpu.module = SimpleNamespace(
        Event=lambda enable_timing: asked.append(enable_timing) or work, Stream=lambda d: asked.append(d) or side,
        current_stream=lambda d: asked.append(d) or current, stream=lambda stream: device.nullcontext(stream),
    )  # fmt: skip
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda d: asked.append(d) or current)
    monkeypatch.setattr(torch._C, "_accelerator_getStream", lambda index: current if index == GPU.index else side)
    first, second = gpu.event(GPU), gpu.event(GPU, timing=True)
    first.record()
    second.wait()
    with gpu.stream(GPU).running() as inside:
        assert inside is side
    assert asked == [False, True, GPU, current, GPU, current, GPU]
    assert (
        gpu.current_stream(GPU).key == gpu.stream(GPU).current_key() == 7
        and first.query()
        and first.seconds_until(second) == 0.002
    )


@pytest.mark.parametrize(("kind", "code", "words"), [("cuda", 2, "CUDA error 2"), ("xpu", 0, "xpu cannot lock memory")])
def test_pages_that_cannot_be_locked(kind, code, words, monkeypatch):
    gpu = Accelerator("cuda")
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: code)
    gpu.kind, gpu.module = kind, SimpleNamespace(device=lambda d: device.nullcontext(), cudart=lambda: runtime)
    kernel = mock.Mock()
    kernel.fill_.side_effect = RuntimeError("CUDA error: invalid argument")
    monkeypatch.setattr(torch, "empty", lambda numel, device: kernel)
    with pytest.raises(OSError, match=words):
        gpu.lock_pages(4096, 4096, GPU)
    assert kernel.fill_.call_count == bool(code)  # CUDA's last error is taken by a kernel of its own


def test_what_torch_must_have():
    """The names that the real one calls, in this torch: without a GPU nothing else would miss them."""
    for name in ("current_accelerator", "device_count", "current_device_index", "set_device_index", "synchronize",
                 "memory_allocated", "max_memory_allocated", "empty_cache"):  # fmt: skip
        assert callable(getattr(torch.accelerator, name)), name
    for kind in ("cuda", "xpu"):
        module = torch.get_device_module(kind)
        for name in ("Event", "Stream", "stream", "current_stream", "device", "is_initialized", "get_device_name",
                     "get_device_properties", "get_rng_state", "set_rng_state", "is_bf16_supported"):  # fmt: skip
            assert callable(getattr(module, name)), (kind, name)
    assert {"_record_memory_history", "_dump_snapshot"} <= set(dir(torch.get_device_module("cuda").memory))
    assert public(NullAccelerator) == public(Accelerator)
