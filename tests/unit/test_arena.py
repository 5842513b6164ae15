"""The arena is exact, carved in order, and refused in words; copies that are put off show who does not wait."""

import os
from unittest import mock

import pytest
import torch

from deepzero import device
from deepzero.comm.chaos import Chaos
from deepzero.comm.ledger import Ledger
from deepzero.config.engine import ChaosConfig
from deepzero.config.zero import OffloadOptimizerConfig, OffloadParamConfig
from deepzero.layout import plan_layout
from deepzero.offload import pinned_arena as arenas
from deepzero.offload.copy_streams import TO_DEVICE, TO_HOST, CopyStats, HostDeviceCopier, OffloadStats
from deepzero.offload.offload_plan import asks_for_pinning, most_count, nearest_count
from deepzero.offload.pinned_arena import (
    HostArena,
    HostMemoryError,
    PageLockError,
    Region,
    available_host_bytes,
    check_host_memory,
    required_bytes,
    zeros_on_large_pages,
)

CPU = torch.device("cpu")
PLAN = [
    Region("host_masters", 1000, torch.float32),
    Region("host_parameters", 0, torch.bfloat16),
    Region("host_parameters", 7, torch.bfloat16),
    Region("host_masters", 3, torch.float32),
]


def made(pin=True):
    return HostArena(PLAN, CPU, pin)


def test_who_cannot_lock_pages_is_told_of_no_limit():
    gpu = device.Accelerator("cuda")
    gpu.kind = "xpu"
    with device.use(gpu), pytest.raises(PageLockError, match="set pin_memory=false") as told:
        HostArena(PLAN, torch.device("xpu", 0), True)
    assert "ulimit" not in str(told.value) and "xpu cannot lock memory" in str(told.value)


def test_every_region_has_its_place_and_a_storage_of_its_own():
    arena = made()
    carved = [arena.allocate(region.category, region.numel, region.dtype) for region in PLAN]
    assert arena.nbytes == required_bytes(PLAN) == 4096 + 256 + 256
    for region, tensor in zip(PLAN, carved, strict=True):
        assert (tensor.numel(), tensor.dtype) == (region.numel, region.dtype)
        assert tensor.untyped_storage().nbytes() == region.bytes
        assert not tensor.any() and (region.numel == 0 or arena.holds(tensor))
    for number, tensor in enumerate(carved):
        tensor.fill_(number + 1)
    assert [set(tensor.tolist()) for tensor in carved] == [{1.0}, set(), {3.0}, {4.0}]
    assert arena.tensors("host_masters")[1].tolist() == [4.0] * 3
    assert not arena.holds(torch.zeros(3))
    assert not arena.pinned  # a CPU is its own host


def test_a_rehearsal_s_arena_knows_its_tensors():
    arena = HostArena(PLAN, torch.device("meta"), pin=True)
    carved = arena.allocate("host_masters", 1000, torch.float32)
    assert carved.is_meta and arena.holds(carved[5:9])
    assert not arena.holds(torch.empty(1000, device="meta"))


def test_memory_outlives_the_arena():
    arena = made()
    kept = arena.allocate("host_masters", 1000, torch.float32)
    arena.close()
    del arena
    kept.fill_(2)
    assert float(kept.sum()) == 2000


def test_the_plan_is_kept():
    arena = made()
    with pytest.raises(RuntimeError, match=r"plan has .*1000.* next, not .*999"):
        arena.allocate("host_masters", 999, torch.float32)
    empty = HostArena([], CPU, pin=True)
    with pytest.raises(RuntimeError, match="plan has nothing next"):
        empty.allocate("host_masters", 1, torch.float32)


def test_a_host_that_is_too_small(monkeypatch):
    plan = [Region("host_masters", 2**28, torch.float32), Region("host_moments", 2**29, torch.float32)]
    monkeypatch.setattr(arenas, "available_host_bytes", lambda: 8 * 3 * 2**30)
    check_host_memory(plan, 8)
    monkeypatch.setattr(arenas, "available_host_bytes", lambda: 8 * 3 * 2**30 - 1)
    said = r"needs 24 GiB of host memory, 3 GiB \(masters 1 GiB, moments 2 GiB\) for each of the 8 ranks"
    with pytest.raises(HostMemoryError, match=said):
        check_host_memory(plan, 8)
    monkeypatch.setattr(arenas, "_anonymous", mock.Mock(side_effect=OSError(12, os.strerror(12))))
    with pytest.raises(HostMemoryError, match="the system refuses 3 GiB"):
        HostArena(plan, CPU, pin=False)


def test_what_a_host_has(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 100 kB\nMemAvailable:      64 kB\n")
    assert available_host_bytes(meminfo, tmp_path) == 64 * 1024
    for name, value in (("memory.max", "50000"), ("memory.current", "20000"), ("memory.stat", "inactive_file 5000\n")):
        (tmp_path / name).write_text(value)
    assert available_host_bytes(meminfo, tmp_path) == 35000
    (tmp_path / "memory.max").write_text("max")
    assert available_host_bytes(meminfo, tmp_path) == 64 * 1024
    assert available_host_bytes(tmp_path / "nothing", tmp_path) is None


def test_large_pages():
    for shape in ((3,), (2048, 1024)):
        made = zeros_on_large_pages(torch.Size(shape))
        assert made.shape == shape and not made.any()
        assert torch.equal(made.add_(1), torch.ones(shape))


def wire(seed, max_delay_ms=0.0):
    chaos = Chaos(ChaosConfig(enabled=seed is not None, seed=seed or 0, max_delay_ms=max_delay_ms), rank=0)
    return HostDeviceCopier(CPU, Ledger(), chaos, OffloadStats())


def test_copies_are_counted_and_timed():
    lane = wire(None)
    host, device = torch.zeros(10), torch.arange(10.0)
    lane.to_host(TO_HOST, host, device, padding=2).finish()
    lane.to_device(TO_DEVICE, device[:5], host[5:]).wait()
    assert host.tolist() == list(range(10)) and device.tolist() == [5, 6, 7, 8, 9, 5, 6, 7, 8, 9]
    down = lane.ledger.traffic[TO_HOST]
    assert (down.calls, down.elements, down.padding_elements, down.bytes) == (1, 8, 2, 40)
    lane.meter.close_step()
    leg = lane.meter.last_step[TO_HOST].as_dict()
    assert leg["bytes"] == 40 and leg["seconds"] > 0 and leg["hidden"] == 0
    assert CopyStats().as_dict() == {"bytes": 0, "seconds": 0.0, "gb_per_second": 0.0, "hidden": 0.0}
    with pytest.raises(RuntimeError, match=r"cannot copy 10 x torch.float32 to 10 x torch.bfloat16"):
        lane.to_host(TO_HOST, host.bfloat16(), device)


def test_chaos_puts_copies_off_until_somebody_waits():
    """The one who forgets to wait reads the old values, sooner or later; the one who waits never does."""
    lane, early = wire(1), []
    for _ in range(50):
        host, device = torch.zeros(4), torch.ones(4)
        copy = lane.to_host(TO_HOST, host, device)
        early.append(float(host.sum()))
        copy.finish()
        copy.wait()
        assert host.tolist() == [1, 1, 1, 1]
        with lane.to_device(TO_DEVICE, device, torch.full((4,), 2.0)).afterwards():
            assert device.tolist() == [2, 2, 2, 2]
    assert set(early) == {0.0, 4.0}


@pytest.mark.parametrize(("optimizer", "param", "locked"), [
    ({"device": "cpu"}, {}, True),
    ({"device": "cpu", "pin_memory": False}, {}, False),
    ({"device": "cpu", "pin_memory": False}, {"device": "cpu"}, False),
    ({"device": "cpu", "pin_memory": False}, {"device": "cpu", "pin_memory": False}, False),
    ({"device": "cpu"}, {"device": "cpu", "pin_memory": False}, False),
])  # fmt: skip
def test_either_side_may_refuse_locked_pages(optimizer, param, locked):
    assert asks_for_pinning(OffloadOptimizerConfig(**optimizer), OffloadParamConfig(**param)) == locked


def test_whole_buckets_go_to_the_host():
    """The number that comes nearest to a ratio; and the most that keep within a limit for each rank."""
    layout = plan_layout([1000] * 8, world_size=2, bucket_limit=1000)
    assert [nearest_count(layout, part * layout.padded_numel) for part in (0.0, 0.3, 0.5, 1.0)] == [0, 2, 4, 8]
    assert [most_count(layout, limit) for limit in (None, 0, 1100, 10_000)] == [8, 0, 2, 8]
