"""The scratch file: what is moved is what was there, a full disk is one error, and nothing is left."""

import os
import resource
import subprocess

import pytest
import torch

from deepzero.config.strict import ConfigError
from deepzero.offload import file_store
from deepzero.offload.file_store import BLOCK, FILE_READ, FILE_WRITE, FileStore, FileTransfer, in_blocks
from deepzero.offload.pinned_arena import HostArena, Region, required_bytes
from tests.unit import test_arena

CPU = torch.device("cpu")
PLAN = [Region("host_masters", 4_000_000, torch.float32), Region("host_moments", 4096 * 3, torch.uint8)]


@pytest.fixture
def store(tmp_path):
    made = opened(tmp_path)
    yield made
    made.close()


@pytest.fixture(params=[None, 2], ids=["calm", "chaos"])
def wire(request):
    return test_arena.wire(request.param, max_delay_ms=0.1)


def opened(folder):
    return FileStore("zero.offload_optimizer.nvme_path", str(folder), PLAN, CPU)


def buffer(numel):
    """Room for so many fp32 elements that direct I/O takes."""
    region = Region("host_buffers", in_blocks(4 * numel), torch.uint8)
    return HostArena([region], CPU, False).allocate(*region)[: 4 * numel].view(torch.float32)


def test_both_ways_find_what_the_other_has_written(store, wire, tmp_path):
    """The mapping and direct I/O; in several pieces, and a part from the middle."""
    masters, part = store.allocate(*PLAN[0]), slice(1 << 20, 3 << 20)
    moments = store.allocate(*PLAN[1])
    assert store.nbytes == required_bytes(PLAN, BLOCK) == 16_003_072 + 4096 * 3 and list(tmp_path.iterdir()) == []
    assert not masters.any() and store.holds(masters[part]) and not store.holds(buffer(8))
    room = buffer(2 << 20).fill_(-1.0)
    for turn in range(3):
        masters.copy_(torch.arange(len(masters)))
        FileTransfer(wire, FILE_READ, [(store, masters[part], room)]).finish()
        assert torch.equal(room, masters[part])
        room.mul_(turn + 2)
        FileTransfer(wire, FILE_WRITE, [(store, masters[part], room)]).finish()
        assert torch.equal(masters[part], room) and masters[part.stop] == part.stop
        store.drop_pages()
    assert not moments.any()
    for kind in (FILE_READ, FILE_WRITE):
        assert wire.meter.legs[kind].bytes == 3 * 4 * (2 << 20)


def test_a_file_system_whose_mappings_are_apart(tmp_path, monkeypatch):
    """Direct reads that do not see what the mapping has written: then everything goes through the page cache."""
    with monkeypatch.context() as patched:
        patched.setattr(file_store.os, "preadv", lambda _, rooms, at: file_store.BLOCK)
        made = opened(tmp_path)
    assert not made.direct and not made.allocate(*PLAN[0]).any()
    made.close()


def test_a_write_waits_for_what_it_is_after(store, wire):
    masters, room, order = store.allocate(*PLAN[0]), buffer(4096), []
    moves = [(store, masters[:4096], room)]
    write = FileTransfer(wire, FILE_WRITE, moves, after=lambda: order.append(room.fill_(7.0)))
    write.finish()
    assert order and masters[:4096].eq(7.0).all() and write.is_over()


def test_a_limit_of_the_file_size_is_one_error(tmp_path):
    """The same way as a disk without room, by which nothing is left."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(ConfigError, match=r"nvme_path='.*': 15.3 MiB .* needed .* were free \(File too large\)"):
            opened(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_disk_that_is_full(tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(tmp_path)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        with pytest.raises(ConfigError, match=r"No space left on device"):
            opened(tmp_path)
        assert os.statvfs(tmp_path).f_bfree == os.statvfs(tmp_path).f_blocks
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_file_that_ends_too_early(store, wire, monkeypatch):
    masters, room = store.allocate(*PLAN[0]), buffer(4096)
    with monkeypatch.context() as patched:
        patched.setattr(file_store.os, "preadv", lambda *_: 0)
        read = FileTransfer(wire, FILE_READ, [(store, masters[:4096], room)])
        with pytest.raises(RuntimeError, match=r"the disk has failed \(the file ends at byte 0\)"):
            read.finish()
    assert store.broken is None  # reading damages nothing
