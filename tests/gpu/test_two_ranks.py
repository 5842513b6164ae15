"""Two ranks on one GPU: gloo carries what lies on it, and all stages have the same bits."""

import os
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import deepzero
from tests.distributed.training import config, make_batch, make_model

SECONDS = 100.0
STAGES = [(stage, overlap) for stage in (0, 1, 2, 3) for overlap in (False, True)]


def steps_of(stage, overlap, rank):
    zero = {"stage3_param_persistence_threshold": 30} if stage == 3 else {}
    settings = config(stage=stage, overlap=overlap, bucket=200, precision="bf16", zero=zero)
    engine, *_ = deepzero.initialize(model=make_model(), config=settings)
    losses = []
    for step in range(5):
        ids, labels = (t.to(engine.device) for t in make_batch(2 * step + rank, 2))
        engine.backward(engine(ids, labels))
        engine.step()
        losses.append(engine.last_step.loss)
    found = str(engine.device), losses, engine.params_sha256()
    engine.destroy()
    return found


def one_rank(rank, folder, device):
    os.environ.update(LOCAL_RANK="0", DEEPZERO_DEVICE="cpu" if device == "cpu" else "")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    found = [steps_of(*case, rank) for case in STAGES]
    assert found == [found[0]] * len(STAGES) and found[0][0] == device
    dist.destroy_process_group()


@pytest.mark.parametrize("device", [
    pytest.param("cuda:0", marks=pytest.mark.gpu), pytest.param("cpu", marks=pytest.mark.exhaustive)
])  # fmt: skip
def test_same_bits(device, tmp_path):
    ranks, until = mp.spawn(one_rank, (str(tmp_path), device), nprocs=2, join=False), time.monotonic() + SECONDS
    try:
        while not ranks.join(timeout=max(0.0, until - time.monotonic())):  # raises what a rank has raised
            assert time.monotonic() < until, f"not done after {SECONDS} s"
    finally:
        for rank in ranks.processes:
            rank.kill()
            rank.join()
