"""Bits do not depend on the number of ranks: one hash for every stage, whoever makes which micro-batch."""

import itertools
import math
from unittest import mock

import pytest
import torch
from torch import nn

import deepzero
from deepzero.checkpoint import checkpointer
from deepzero.config.strict import ConfigError
from deepzero.utils import safe_get_full_grad
from tests.distributed.pool import on_ranks
from tests.distributed.training import WHOLE, TinyModel, config, my_micro_batches

SEED = 5


class Dropping(TinyModel):
    def through(self, block, x):
        if block is self.blocks[0]:
            x = nn.functional.dropout(x, 0.2, self.training)
        return x + nn.functional.dropout(block(x), 0.1, self.training)


def settings(stage, precision, world, micro_batches=6, **changes):
    """So many micro-batches of one sequence, over all ranks; fp16 has no overflow of its own for some steps."""
    zero = {**(WHOLE), **changes.pop("zero", {})}
    comm = {"reduce": "exact", "world_size_invariant": True, **changes.pop("comm", {})}
    fp16 = {"fp16": {"initial_scale_power": 10, "hysteresis": 1, "loss_scale_window": 5}} if precision == "fp16" else {}
    sizes = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": micro_batches // world}
    made = config(stage=stage, precision=precision, bucket=1500, zero=zero, **fp16, **sizes, **changes)
    return {**made, "comm": comm}


def start(*given, **changes):
    torch.manual_seed(0)
    return deepzero.initialize(model=Dropping(), config=settings(*given, **changes))[0]


def go(engine, first, last):
    """The steps ``first`` to ``last`` - 1; what each has said. One micro-batch of step 1 overflows in fp16."""
    said = []
    rank, world, count = engine.global_rank, engine.world_size, engine.gradient_accumulation_steps()
    for step in range(first, last):
        for k, (ids, labels) in enumerate(my_micro_batches(step, rank, world, 1, count)):
            engine.seed_micro_batch(SEED)
            loss = engine(ids, labels)
            overflow = step == 1 and k * world + rank == 4 and engine.config.precision.dtype == "fp16"
            engine.backward(loss * math.inf if overflow else loss)
            engine.step()
        said.append(engine.last_step)
    return said


def train_cases(rank, world, cases, steps):
    """Each case from the start; its steps and the parameters' hash."""
    found = []
    for stage, precision, changes in cases:
        engine = start(stage, precision, world, **changes)
        found.append((str(go(engine, 0, steps)), engine.params_sha256()))
    return found


SAMPLE = [
    (0, "bf16", {}), (3, "bf16", {"overlap": True}), (2, "fp16", {"comm": {"chaos": {"enabled": True, "seed": 1}}}),
    (0, "fp16", {}), (1, "fp32", {"overlap": True, "zero": {"reduce_scatter": False}}), (2, "fp32", {}),
]  # fmt: skip
BY_HAND = [pytest.mark.exhaustive, pytest.mark.timeout(3000)]
WHOLE_MATRIX = [(*both, {"micro_batches": 12}) for both in itertools.product(range(4), ("bf16", "fp16", "fp32"))]
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
"""The CPU's Adam has bits of its own."""


@pytest.mark.parametrize(
    ("cases", "worlds", "steps"),
    [
        pytest.param(SAMPLE, (1, 2, 3), 2, id="sample"),
        pytest.param(WHOLE_MATRIX, (1, 2, 3, 4, 6), 100, id="whole", marks=BY_HAND),
        pytest.param(
            [(stage, "bf16", {"zero": OFFLOAD, "overlap": stage != 2}) for stage in (1, 2, 3)], (1, 2, 3), 3,
            id="offload", marks=pytest.mark.exhaustive,
        ),
    ],
)  # fmt: skip
def test_one_hash(ranks, cases, worlds, steps):
    """Stages, dropout, an overflow in one micro-batch, ranks of any number: losses, norms, scales, weights."""
    reference = {}
    for world in worlds:
        per_rank = ranks.run(train_cases, cases, steps, world_size=world, timeout=1500)
        for case, *found in zip(cases, *per_rank, strict=True):
            for bits in found:
                assert bits == reference.setdefault(case[1], bits), (world, case)
    assert len({sha for _, sha in reference.values()}) == len({case[1] for case in cases})


def on_from(rank, world, folder, first, last, stage, precision):
    """Go on from the checkpoint of ``first``, if there is one, and save that of ``last``."""
    engine = start(stage, precision, world)
    if first:
        engine.load_checkpoint(folder / str(first))
    said = go(engine, first, last)
    engine.save_checkpoint(folder / str(last))
    return str(said), engine.params_sha256()


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.exhaustive)])
def test_other_ranks_and_another_stage_after_each_restart(ranks, tmp_path, precision):
    """3 ranks, then 1, then 2, back to 3: the run that nobody touched."""
    path = [(3, 2), (1, 3), (2, 0), (3, 1)]
    parts = [
        ranks.run(on_from, tmp_path / "moved", n, n + 1, stage, precision, world_size=world)[0]
        for n, (world, stage) in enumerate(path)
    ]
    said, sha = ranks.run(on_from, tmp_path / "whole", 0, 4, 2, precision, world_size=2)[0]
    assert "[" + ", ".join(text.strip("[]") for text, _ in parts) + "]" == said
    assert parts[-1][1] == sha


@on_ranks(1)
def test_a_program_is_told_of_micro_batches_of_another_size(rank, world, tmp_path):
    for micro, said in ((1, 0), (2, 1)):
        sizes = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": 6 // micro}
        engine, *_ = deepzero.initialize(model=Dropping(), config=settings(2, "bf16", world) | sizes)
        if micro == 1:
            engine.save_checkpoint(tmp_path)
        with mock.patch.object(checkpointer.log, "warning") as warned:
            engine.load_checkpoint(tmp_path)
        assert warned.call_count == said
    (text, cut), _ = warned.call_args
    words = "other bits from here on: the checkpoint's steps had 6 micro-batches of 1 sequences, this run's are of 2"
    assert text % cut == words


def gathers(engine):
    """How many buckets of whole sums this step has gathered."""
    traffic = engine.ledger.traffic.get("gradients.all_gather")
    return traffic.calls if traffic is not None else 0


@on_ranks(2)
def test_whole_sums_within_a_step(rank, world):
    """Stage 0 gathers when it is asked, or at the boundary, also one that is declared after the last pass."""
    found = []
    for stage in (0, 2):
        engine = start(stage, "bf16", world)
        engine.set_gradient_accumulation_boundary(False)
        for ids, labels in my_micro_batches(0, rank, world, 1, 2):
            engine.seed_micro_batch(SEED)
            engine.backward(engine(ids, labels))
            before = gathers(engine)
            found.append([safe_get_full_grad(param).tolist() for param in engine.module.parameters()])
            assert stage or gathers(engine) - before == len(engine.zero.stage.gradients.order)  # once for all of them
            engine.step()
        engine.set_gradient_accumulation_boundary(True)
        engine.step()
        found.append((engine.last_step.grad_norm, engine.params_sha256()))
    assert found[:3] == found[3:] and found[0] != found[1]


@on_ranks(2)
def test_what_is_promised_and_refused(rank, world):
    promised = "bits   the same at every number of ranks that divides 6, with micro-batches of 1, with one thread each"
    for stage in range(4):
        engine = start(stage, "bf16", world)
        assert engine.describe_bits() == promised
        if stage < 2:
            with (
                pytest.raises(RuntimeError, match=r"comm\.world_size_invariant, which reduces .* set it to false"),
                engine.no_sync(),
            ):
                pass
    engine = start(1, "bf16", world, comm={"world_size_invariant": False})
    assert "stage 1 sums a rank's micro-batches first (set comm.world_size_invariant=true" in engine.describe_bits()
    with pytest.raises(ConfigError, match="number of ranks: sums are the backend's"):
        start(2, "bf16", world, comm={"reduce": "native"})
