"""States in files: the bits, the account and the checkpoints of host memory; what is refused; what is left behind."""

import contextlib
import errno
import fcntl
import itertools
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from deepzero.config.strict import ConfigError
from deepzero.utils import safe_get_full_fp32_param
from tests.distributed import test_offload as in_memory
from tests.distributed.pool import on_ranks, sampled
from tests.distributed.training import Wide, built, check_same_bits, go

ENV = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2]), "OMP_NUM_THREADS": "1"}
STEPS, BUCKET = 3, 12_000
PIPELINED = {"buffer_count": 12, "pipeline_read": True, "pipeline_write": True}


def settings(stage, folder, param=None, ratio=1.0, optimizer=True, pipeline=PIPELINED, **more):
    """As in ``test_offload.py``; with ``param`` (its block) stage 3's parameters too, or alone."""
    case = in_memory.settings(stage, ratio, param is not None, **{"bucket": BUCKET, **more})
    zero = case["zero_optimization"]
    if optimizer:
        zero["offload_optimizer"] |= {"device": "nvme", "nvme_path": str(folder), **pipeline}
    if param is not None:
        zero["offload_param"] = {"device": "nvme", "nvme_path": str(folder), **param}
    return case


def check_cases(ranks, cases, world):
    """The first case's bits in all; counted is predicted."""
    (losses, *_), reports = check_same_bits(ranks, [(case, "wide") for case in cases], STEPS, world)
    assert len(set(losses)) > 1
    for number, report in enumerate(reports):
        in_memory.check_account(report, number)
    return reports


FP16 = {"precision": "fp16", "fp16": {"initial_scale_power": 16, "hysteresis": 1}}  # the first step overflows
MORE = {
    "bf16": {"precision": "bf16"},
    "fp32": {"precision": "fp32"},
    "fp16": FP16,
    "three micro-batches": {"precision": "bf16", "gradient_accumulation_steps": 3},
    "narrow sums": {
        "precision": "bf16", "data_types": {"grad_accum_dtype": "bf16"}, "gradient_accumulation_steps": 2,
    },
    "parts of one rank": {"precision": "bf16", "bucket": 200},
}  # fmt: skip
OFTEN = [(2, 2, "bf16"), (3, 2, "fp16"), (1, 2, "three micro-batches")]


@pytest.mark.parametrize(("stage", "world", "name"), sampled(OFTEN, (1, 2, 3), (1, 2, 4), MORE, slow=[(3, 2, "fp32")]))
def test_same_bits_and_counted_bytes(ranks, tmp_path, stage, world, name):
    """Of the CPU's tier; with chaos, with a part of the states, one bucket at a time, and with parameters in files."""
    more = {"bucket": BUCKET, **MORE[name]}
    cases = [in_memory.settings(stage, 1.0, **more)]
    cases += [settings(stage, tmp_path, chaos=seed, **more) for seed in (None, 3)]
    cases += [settings(stage, tmp_path, ratio=0.5, pipeline={}, chaos=4, **more)]
    if stage < 3:
        overlapped = settings(stage, tmp_path, chaos=8, **more)
        overlapped["zero_optimization"]["overlap_param_gather"] = True
        cases.append(overlapped)
    else:
        cases += [settings(3, tmp_path, {}, chaos=seed, **more) for seed in (None, 5)]
        cases += [settings(3, tmp_path, {"buffer_count": 1}, ratio=0.5, chaos=6, **more)]
        cases += [settings(3, tmp_path, {"buffer_count": 2}, optimizer=False, chaos=7, **more)]
    held = check_cases(ranks, cases, world)[1]["memory"]
    assert held["host_buffers"]["measured"] > 0 and held["file_moments"]["measured"] > 0
    assert not any(held.get(f"host_{states}", {"measured": 0})["measured"] for states in ("masters", "moments"))
    assert list(tmp_path.iterdir()) == []


# ---- what is refused, and what is left -------------------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "words"), [
    ({"nvme_path": None}, "device=nvme needs the files' folder"),
    ({"nvme_path": "{folder}/nowhere"}, r"^zero_optimization\.offload_optimizer\.nvme_path='.*' is not a folder; make"),
    ({"nvme_path": "/proc"}, "no file can be made there"),
    ({"buffer_count": 4, "pipeline_read": True}, "at least 8"),
    ({"buffer_count": 11, "pipeline_read": True, "pipeline_write": True}, "at least 12"),
    ({"delayed_update": True}, r"delayed_update=True: needs zero_optimization\.offload_optimizer\.device=cpu"),
    ({"device": "gpu"}, "not one of none, cpu, nvme"),
    ({"fast_init": "perhaps"}, "fast_init='perhaps' must be"),
    ({"device": "cpu", "pipeline": "perhaps"}, "pipeline='perhaps' must be"),
    ({"device": "cpu", "buffer_count": "many"}, "buffer_count='many' must be a number|an integer"),
], ids=str)  # fmt: skip
@on_ranks()
def test_bad_settings(rank, world, changes, words, tmp_path):
    given = {key: value.format(folder=tmp_path) if isinstance(value, str) else value for key, value in changes.items()}
    case = settings(2, tmp_path, pipeline={})
    case["zero_optimization"]["offload_optimizer"] |= given
    with pytest.raises(ConfigError, match=words) as caught:
        built(case, Wide)
    assert list(tmp_path.iterdir()) == [] and len(caught.traceback) == 3, "no frames of who has found it"


@pytest.mark.parametrize(("param", "words"), [
    ({"max_in_cpu": 900}, "beside nvme all parameters are in files"),
    ({"buffer_size": 100}, "a bucket has .* elements on a rank"),
    ({"nvme_path": ""}, "nvme_path=''"),
], ids=str)  # fmt: skip
@on_ranks()
def test_bad_settings_of_parameters(rank, world, param, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        built(settings(3, tmp_path, param, pipeline={}), Wide)


@on_ranks()
def test_a_disk_without_room_is_refused_before_anything_is_moved(rank, world, tmp_path):
    """On all ranks, though one of them alone has no room; afterwards the same model trains elsewhere."""
    model = Wide()

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with contextlib.ExitStack() as patches:
        if rank == 1:
            patches.enter_context(mock.patch("os.posix_fallocate", full))
        words = r"masters .*moments .* needed there for each rank .* were free \(No space left on device\)"
        with pytest.raises(ConfigError, match=f"^{'rank 1: ' * (rank == 0)}zero_optimization.offload_optimizer.nvme"):
            try:
                built(settings(2, tmp_path), model)
            except ConfigError as error:
                assert re.search(words, str(error))
                raise
    go(built(settings(2, tmp_path), model), rank, world, 0, 2)


@on_ranks()
def test_a_disk_that_fails_in_a_step(rank, world, tmp_path):
    """One clear error; nothing goes on from half-old states until a checkpoint has been loaded."""
    engine = built(settings(2, tmp_path, precision="bf16"), Wide)
    losses = go(engine, rank, world, 0, 1)
    engine.save_checkpoint(tmp_path / "saved")
    losses += go(engine, rank, world, 1, 3)
    words = r"nvme_path=.*has failed .*Input/output error.*load a ch"
    shard, write, calls = engine.zero.optimizer_shard, os.pwritev, itertools.count(rank == 0)
    step = shard.step

    def failing(*given):
        """The first write of a step fails on one rank; the others are slow, and must not land on what is loaded."""
        if next(calls) == 0:
            raise OSError(errno.EIO, "Input/output error")
        time.sleep(0.2)
        return write(*given)

    def step_on_a_bad_disk(*given):
        with mock.patch("os.pwritev", failing):
            step(*given)

    with mock.patch.object(shard, "step", step_on_a_bad_disk), pytest.raises(RuntimeError, match=words):
        go(engine, rank, world, 3, 5)  # all ranks know at the next boundary
    assert next(calls) > 1 and engine.global_steps == 4
    engine.discard_gradients()
    for refused in (lambda: go(engine, rank, world, 3, 4), lambda: engine.save_checkpoint(tmp_path / "torn")):
        with pytest.raises(RuntimeError, match="load a checkpoint"):
            refused()
    engine.discard_gradients()
    engine.load_checkpoint(tmp_path / "saved", load_module_only=True)
    with pytest.raises(RuntimeError, match="load a checkpoint"):
        go(engine, rank, world, 3, 4)
    engine.discard_gradients()
    engine.load_checkpoint(tmp_path / "saved")
    assert go(engine, rank, world, 1, 3) == losses[1:] and not (tmp_path / "torn").exists()


@on_ranks()
def test_a_disk_that_fails_in_a_backward_pass(rank, world, tmp_path):
    """On one rank: no rank waits for it, each raises at the boundary, and the gradients can be discarded."""
    engine = built(settings(2, tmp_path, precision="bf16", gradient_accumulation_steps=2, bucket=200), Wide)
    losses = go(engine, rank, world, 0, 1)
    engine.save_checkpoint(tmp_path / "saved")
    losses += go(engine, rank, world, 1, 2)
    error = OSError(errno.EIO, "Input/output error") if rank == 1 else None
    for words in (r"rank 1.*Input/output error.*load a ch", "load a checkpoint"):
        raises = pytest.raises(RuntimeError, match=words if rank == 0 else "load a checkpoint")
        with raises, mock.patch("os.pwritev", side_effect=error, wraps=os.pwritev):
            go(engine, rank, world, 2, 3)
        engine.discard_gradients()
        error = None
    engine.load_checkpoint(tmp_path / "saved")
    assert go(engine, rank, world, 1, 2) == losses[1:]


def test_whole_tensors_keep_their_shape(ranks, tmp_path):
    """Muon's matrices, whose parameters in files are their own masters in fp32; CPUAdam's with its states there."""
    muon, adam = {"type": "Muon", "params": {"lr": 1e-2}}, {"type": "CPUAdam", "params": {"per_tensor": True}}
    for optimizer, more in ((muon, {}), (adam, {}), (adam, {"precision": "bf16"})):
        cases = [in_memory.settings(3, ratio, bucket=BUCKET, **more) for ratio in (None, 1.0)]
        cases += [settings(3, tmp_path, {}, optimizer=False, **more)]
        cases += [settings(3, tmp_path, param, **more) for param in (None, {}) if optimizer is adam]
        check_same_bits(ranks, [(case | {"optimizer": optimizer}, "wide") for case in cases], 2)


@on_ranks()
def test_a_disk_that_fails_in_a_fetch(rank, world, tmp_path):
    """The step is dropped, as after any error of a forward pass, and the same one succeeds when the disk does."""
    losses = []
    for fails in (False, True):
        engine = built(settings(3, tmp_path, {}, precision="bf16"), Wide)
        losses.append(go(engine, rank, world, 0, 2))
        if fails:
            engine.zero.offload.copier.ahead.discard()  # so that the next fetch reads, and meets the disk
            error = OSError(errno.EIO, "Input/output error")
            with mock.patch("os.preadv", side_effect=error), pytest.raises(RuntimeError, match="Input/output error"):
                go(engine, rank, world, 2, 3)
            coordinator = engine.zero.stage3.coordinator
            assert coordinator.live_numel == 0 and not coordinator.live
            engine.discard_gradients()
        losses[-1] += go(engine, rank, world, 2, 4)
        engine.destroy()
    assert losses[0] == losses[1]


@on_ranks()
def test_a_state_that_was_replaced(rank, world, tmp_path):
    """Torch's ``load_state_dict`` makes new tensors, which no file has: the step says so, and nothing is lost."""
    engine = built(settings(2, tmp_path, precision="bf16", ratio=0.5), Wide)
    losses = go(engine, rank, world, 0, 2)
    before = [master.detach().clone() for group in engine.zero.groups for master in group.masters]
    kept = {param: dict(state) for param, state in engine.optimizer.state.items()}
    engine.optimizer.load_state_dict(engine.optimizer.state_dict())
    for state in engine.optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].clone()
    with pytest.raises(RuntimeError, match=r"do not lie in its file .*load_checkpoint"):
        go(engine, rank, world, 2, 3)
    after = [master.detach() for group in engine.zero.groups for master in group.masters]
    assert all(map(torch.equal, before, after)), "also of the device's share"
    engine.optimizer.state.update(kept)
    engine.discard_gradients()
    assert len({*losses, *go(engine, rank, world, 2, 3)}) == 3


@on_ranks()
def test_without_direct_io(rank, world, tmp_path):
    """A file system that takes none: the same bits through the page cache, and the engine says so."""
    found = []
    for flags in (fcntl.fcntl, OSError(errno.EINVAL, "Invalid argument")):
        with mock.patch("deepzero.offload.file_store.fcntl.fcntl", side_effect=flags):
            engine = built(settings(3, tmp_path, {}, precision="bf16"), Wide)
        go(engine, rank, world, 0, 3)
        found.append((engine.params_sha256(), engine.zero.offload.describe(engine.optimizer)))
        engine.destroy()
    assert found[0][0] == found[1][0]
    assert "direct I/O" in found[0][1] and "the file system takes no direct I/O" in found[1][1]


@on_ranks()
def test_two_runs_never_share_a_file_and_none_is_left(rank, world, tmp_path):
    """Two engines with one folder train as each alone; nothing has a name while they run."""
    engines = [built(settings(2, tmp_path, precision="bf16"), Wide) for _ in range(2)]
    losses = [go(engine, rank, world, step, step + 1) for step in range(3) for engine in engines]
    assert losses[::2] == losses[1::2] and list(tmp_path.iterdir()) == []
    assert safe_get_full_fp32_param(next(iter(engines[0].module.parameters()))).isfinite().all()
    for engine in engines:
        engine.destroy()


@on_ranks(1)
def test_pages_of_files_are_given_back(rank, world, tmp_path):
    """After a step, and after a look at the states: what lies in files takes no memory but buffers."""
    engine = built(settings(2, tmp_path, precision="bf16", bucket=100_000), Wide)
    before = mapped_bytes()
    go(engine, rank, world, 0, 2)
    assert mapped_bytes() == before
    total = sum(float(master.detach().sum()) for group in engine.zero.groups for master in group.masters)
    assert total == total and mapped_bytes() > before
    go(engine, rank, world, 2, 3)
    assert mapped_bytes() <= before
    engine.destroy()


def mapped_bytes():
    """Resident bytes of this process's mappings of files that have no name."""
    found, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            ours = words[-1] == "(deleted)"
        elif ours and words[0] == "Rss:":
            found += int(words[1]) * 1024
    return found


LIMITED = r"""
import re, resource, sys
from pathlib import Path
import torch
import deepzero
from deepzero.comm import process_group

device, folder, budget = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(24))).to(torch.bfloat16)
files = {"nvme_path": folder, "buffer_count": 12, "pipeline_read": True, "pipeline_write": True}
zero = {"stage": 2, "offload_optimizer": {"device": device, "threads": 1, **files}}
settings = {
    "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": zero,
    "optimizer": {"type": "CPUAdam", "params": {"lr": 1e-3, "kernel": "chunked"}},
}
deepzero.init_distributed()
data = 1024 * int(re.search(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text())[1])
resource.setrlimit(resource.RLIMIT_DATA, (data + budget, data + budget))
engine = deepzero.initialize(model=model, config=settings)[0]
for step in range(2):
    engine.backward(engine(torch.ones(1, 1024, dtype=torch.bfloat16)).float().square().mean())
    engine.step()
print("trained", engine.params_sha256())
engine.destroy()
process_group.shutdown()
"""


def limited(device, folder, mebibytes):
    command = [sys.executable, "-c", LIMITED, device, str(folder), str(mebibytes << 20)]
    return subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.slow
def test_states_that_exceed_the_memory_limit(tmp_path):
    """25 million parameters, 403 MB of states, and 300 MB for everything that this process may still take."""
    in_memory, in_files = limited("cpu", tmp_path, 300), limited("nvme", tmp_path, 300)
    assert in_files.returncode == 0 and in_files.stdout.startswith("trained "), in_files.stderr
    assert in_memory.returncode != 0 and "the system refuses" in in_memory.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.exhaustive
def test_a_memory_limit_changes_no_bit(tmp_path):
    one, other = limited("nvme", tmp_path, 300), limited("cpu", tmp_path, 4096)
    assert one.stdout == other.stdout != "", one.stderr + other.stderr
