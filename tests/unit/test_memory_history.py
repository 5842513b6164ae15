"""The GPU allocator's history beside a trace: what is asked of torch, and what its failure costs. No GPU is needed."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from deepzero.comm.profiler_ranges import Ranges
from deepzero.config.run import ProfilerConfig
from deepzero.device import Accelerator
from deepzero.profiling.trace import Recording, trace


@pytest.mark.parametrize(("running", "with_stack", "calls"), [
    (False, False, [{"context": "state", "stacks": "python", "max_entries": 100_000}, {"enabled": None}]),
    (False, True, [{"context": "all", "stacks": "python", "max_entries": 100_000}, {"enabled": None}]),
    (True, False, []),
])  # fmt: skip
def test_the_history_ends_without_raising(tmp_path, monkeypatch, running, with_stack, calls):
    asked, ranges = [], Ranges()

    def history(**given):
        asked.append(given)
        if "enabled" in given:
            raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", history)
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: running, raising=False)
    recording = Recording(tmp_path, "rank0", None, ProfilerConfig(with_stack=with_stack), Accelerator("cuda"), ranges)
    profiler = SimpleNamespace(current_action=torch.profiler.ProfilerAction.RECORD)
    recording.drive(cast(torch.profiler.profile, profiler), lambda: None)
    assert ranges.recorder is not None
    recording.end()
    recording.end()
    assert ranges.recorder is None
    assert asked == calls


@pytest.mark.parametrize("kind", [None, "cpu", "cuda"])
def test_a_gpu_is_watched_only_by_a_run_on_it(tmp_path, monkeypatch, kind):
    asked = []

    def profile(**options):
        asked.extend(options["activities"])
        raise StopIteration  # enough is known

    monkeypatch.setattr(torch.profiler, "profile", profile)
    device = torch.device(kind) if kind else None
    with pytest.raises(RuntimeError), trace(ProfilerConfig(enabled=True), tmp_path, 0, None, device):
        pass
    assert (torch.profiler.ProfilerActivity.CUDA in asked) == (kind == "cuda")
