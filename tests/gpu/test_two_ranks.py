"""Two ranks on one GPU: gloo carries what lies on it, all stages have the same bits, and delays change nothing."""

import os
import random
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import deepzero
from tests.distributed.test_null_gpu import EVERYTHING, tour_of
from tests.distributed.training import KINDS, config, make_batch, make_model

SECONDS = 100.0
STAGES = [(stage, overlap) for stage in (0, 1, 2, 3) for overlap in (False, True)]
TOURS = random.Random(11).sample(EVERYTHING, 12)


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


def stages(rank, device):
    found = [steps_of(*case, rank) for case in STAGES]
    assert found == [found[0]] * len(STAGES) and found[0][0] == device


def tours(rank, device, given, kind):
    """Everything that an engine can do, on time and late: with chaos, buffers that are not needed yet hold NaN."""
    seen = []
    for chaos in (None, 5):
        torch.manual_seed(0)
        settings = {**given, "comm": {**given["comm"], "chaos": {"enabled": chaos is not None, "seed": chaos or 0}}}
        seen.append(tour_of(rank, 2, KINDS[kind](), settings))
    assert seen[0] == seen[1]


def one_rank(rank, folder, device, work, *words):
    os.environ.update(LOCAL_RANK="0", DEEPZERO_DEVICE="cpu" if device == "cpu" else "")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    work(rank, device, *words)
    dist.destroy_process_group()


def on_two_ranks(*arguments):
    ranks, until = mp.spawn(one_rank, arguments, nprocs=2, join=False), time.monotonic() + SECONDS
    try:
        while not ranks.join(timeout=max(0.0, until - time.monotonic())):  # raises what a rank has raised
            assert time.monotonic() < until, f"not done after {SECONDS} s"
    finally:
        for rank in ranks.processes:
            rank.kill()
            rank.join()


ON = [pytest.param("cuda:0", marks=pytest.mark.gpu), pytest.param("cpu", marks=pytest.mark.exhaustive)]


@pytest.mark.parametrize("device", ON)
def test_same_bits(device, tmp_path):
    on_two_ranks(str(tmp_path), device, stages)


@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize(("given", "kind"), [pytest.param(*case.values, id=case.id) for case in TOURS])
def test_delays_change_no_bits(given, kind, device, tmp_path):
    on_two_ranks(str(tmp_path), device, tours, given, kind)
