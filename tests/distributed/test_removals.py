"""Every wait, every gate and every poison is needed: without any one of them, something raises or differs."""

from __future__ import annotations

import contextlib
import gc
from unittest import mock

import pytest
import torch

import deepzero
from deepzero.comm import process_group
from deepzero.comm.collectives import Communicator
from deepzero.comm.pretended import Pretended, pretend
from tests.distributed.null_gpu import CPU, GPU, MIRRORS, null_gpu
from tests.distributed.removals import calls_of, without
from tests.distributed.test_offload import settings
from tests.distributed.test_stage3_bits import KINDS
from tests.distributed.training import make_batch

COMM = ("bucket", "collectives", "streams", "quantized_bucket")
ZERO = (
    "interval_gather", "publish", "partitioned_interval", "partitioned_group", "way_back", "gradient_partition",
    "stage_0", "stage_1_and_2", "stage3", "partitioned_param_coordinator", "delayed_step",
)  # fmt: skip
MODULES = [
    *(f"deepzero.comm.{name}" for name in COMM),
    *(f"deepzero.runtime.zero.{name}" for name in ZERO),
    *(f"deepzero.offload.{name}" for name in ("wire", "host_gradients", "activations")),
    "deepzero.runtime.away",
]
VERBS = {
    "wait", "finish", "record", "poison", "settle", "_settle", "drain", "wait_all", "wait_event", "synchronize",
    "finish_reads", "finish_fetches", "may_overwrite", "before_write", "before_writes", "_catch_up",
}  # fmt: skip
REMOVALS = [r for module in MODULES for r in calls_of(module, VERBS) if "ledger.record" not in r.statement]

BUCKET = 1000
OFFLOADED = {"precision": "bf16", "gradient_accumulation_steps": 2, "chaos": 3, "bucket": BUCKET}
HOST = {"cpu_checkpointing": True, "cpu_checkpointing_min_bytes": 1}
QUANTIZED = {"zero_quantized_weights": True, "zero_quantized_gradients": True, "quantization": {"block_size": 64}}


def zeropp(world, comm=None, **more):
    made = settings(3, precision="bf16", chaos=3, bucket=BUCKET)
    made["zero_optimization"].update(more)
    made["comm"].update(comm or {})
    return world, made, "plain"


PROGRAMS = {
    "stage 2": (2, settings(2, **OFFLOADED), "plain"),
    "offload": (2, settings(2, 1.0, **OFFLOADED), "plain"),
    "offload in fp32": (2, settings(2, 0.5, chaos=3, bucket=BUCKET), "plain"),
    "stage 3": (2, settings(3, 1.0, param=True, **OFFLOADED), "checkpoint"),
    "stage 3 in fp32": (2, settings(3, 0.5, param=True, chaos=3, bucket=BUCKET), "plain"),
    "activations": (1, settings(1, chaos=3, bucket=BUCKET, activation_checkpointing=HOST), "plain"),
    "stage 0": (2, settings(0, precision="bf16", chaos=3, bucket=BUCKET), "plain"),
    "quantized": zeropp(4, {"ranks_per_node": 2}, zero_hpz_partition_size=2, **QUANTIZED),
    "hybrid": zeropp(4, mics_shard_size=2),
}


@contextlib.contextmanager
def mirrored_cpu(world):
    """Rank 0 of ``world`` on the CPU, alone: the others send what it would have sent them."""

    def mirrored(method, mirror):
        def collective(self, kind, *args, **kwargs):
            pending = method(self, kind, *args, **kwargs)
            with torch.no_grad():
                mirror(self, *args, **kwargs)
            return pending

        return collective

    with contextlib.ExitStack() as stack:
        stack.enter_context(pretend(Pretended(0, world, "cpu", world)))
        stack.enter_context(mock.patch.object(process_group, "default_device", lambda: CPU))
        for name, mirror in MIRRORS.items():
            made = mirrored(getattr(Communicator, name), mirror)
            stack.enter_context(mock.patch.object(Communicator, name, made))
        yield


def poisoned(engine):
    """Of every buffer that nobody may read now, whether it says so."""
    pools = []
    if engine._zero.partitioning is not None:
        pools = [engine._zero.partitioning.pool, engine._zero.partitioning.messages]
    reduced = [(b.send, b.mail) for b in engine._zero.reducer._all_buckets]
    free = [*(t for pair in reduced for t in pair), *(b for pool in pools if pool is not None for b in pool._free)]
    return [bool((t == 255).all() if t.dtype == torch.uint8 else t.isnan().all()) for t in free]


def run(program, device):
    """Some steps, and what is between them; everything that can be seen of them."""
    world, given, kind = PROGRAMS[program]
    torch.manual_seed(0)
    seen = []
    with null_gpu(world) if device == GPU else mirrored_cpu(world):
        engine, *_ = deepzero.initialize(model=KINDS[kind](), config=given)
        weight = dict(engine.module.named_parameters())["blocks.0.1.weight"]
        for step in range(3):
            for k in range(engine.batch.accumulation):
                ids, labels = (t.to(device) for t in make_batch(10 * step + k, 2))
                engine.backward(engine(ids, labels))
                engine.step()
            seen.append((engine.last_step.loss, engine.last_step.grad_norm, poisoned(engine)))
            if step == 1:
                with torch.no_grad():
                    engine(ids, labels)
                with deepzero.zero.GatheredParameters(weight, modifier_rank=0), torch.no_grad():
                    weight.mul_(0.5)
                engine.offload_states(non_blocking=True)
                engine.reload_states(non_blocking=True)
        seen.append(engine.params_sha256())
        engine.destroy()
        del engine, weight
        gc.collect()
    return seen


@pytest.fixture(scope="module")
def calm():
    """What the programs show when nothing is left out."""
    return {}


def notices(removal, calm):
    """Which program notices that a statement is gone; None: none does."""
    for program in PROGRAMS:
        for device in (GPU, CPU):
            place = (program, device)
            if place not in calm:
                calm[place] = run(*place)
            try:
                with without(removal):
                    found = run(*place)
            except Exception as error:
                return place, error
            if str(found) != str(calm[place]):
                return place, "other results"
    return None


@pytest.mark.parametrize("removal", REMOVALS, ids=str)
def test_noticed(removal, calm):
    assert notices(removal, calm) is not None
