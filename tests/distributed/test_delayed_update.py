"""The one-step delayed update, against a plain loop that is late in the same way; and who must wait for it."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

import deepzero
from deepzero.comm import process_group
from deepzero.offload.delayed_update import DelayedOptimizerShard
from deepzero.ops import CPUAdam
from deepzero.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from tests.distributed.pool import on_ranks
from tests.distributed.test_offload import settings
from tests.distributed.training import built, check_same_bits, go, make_batch, make_model, my_micro_batches, train_each

ENV = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
AFTER = 2


def late(stage, after=AFTER, ratio=1.0, **more):
    offload = {"delayed_update": True, "delay_after_steps": after}
    return settings(stage, ratio, offload=offload, gradient_clipping=0.0, **{"precision": "bf16", **more})


def by_hand(rank, world, steps):
    """fp32, the whole batch at once: gradients of step t are applied after the gradients of step t + 1 were taken."""
    model = make_model()
    optimizer = CPUAdam(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses, waiting = [], None
    for step in range(steps):
        ids, labels = make_batch(step, 2 * world)
        optimizer.zero_grad()
        loss = model(ids, labels)
        loss.backward()
        losses.append(loss.item())
        grads = [param.grad.clone() for param in model.parameters()]
        if waiting is not None:
            optimizer.step(waiting)
            waiting = None
        if step < AFTER:
            optimizer.step(grads)
        else:
            waiting = grads
    return losses


def test_is_late_by_one_step(ranks):
    steps = 6
    expected = ranks.run(by_hand, steps, world_size=2)[0]
    cases = [*(late(stage, precision="fp32") for stage in (1, 2, 3)), settings(2, 1.0, gradient_clipping=0.0)]
    for per_rank in ranks.run(train_each, cases, steps):
        *delayed, prompt = (losses for (losses, *_), _ in per_rank)
        assert delayed == [pytest.approx(expected, rel=2e-4)] * 3
    # The first forward pass that an update is missing from is that of the step after the first late one.
    assert prompt[: AFTER + 1] == pytest.approx(expected[: AFTER + 1], rel=2e-4)
    assert abs(prompt[AFTER + 1] / expected[AFTER + 1] - 1) > 1e-2


@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_same_bits_in_all_stages(ranks, accumulation):
    """Whatever the thread, chaos and the buckets do. (Stage 1 sums micro-batches in another order than 2 and 3.)"""
    stages = (1, 2, 3) if accumulation == 1 else (2, 3)
    cases = [
        late(stage, chaos=seed, bucket=bucket, gradient_accumulation_steps=accumulation)
        for stage in stages
        for seed, bucket in ((None, 1500), (1, 200))
    ]
    check_same_bits(ranks, cases, 5)


def begins_late(rank, world, case):
    """Losses and bits, where each delayed update begins after the backward pass that it runs beside."""
    engine = built(case)
    run, gate, held, losses = DelayedOptimizerShard._run, threading.Event(), [], []

    def wait_and_run(self, *args):
        held.append(gate.wait(60))
        run(self, *args)

    with mock.patch.object(DelayedOptimizerShard, "_run", wait_and_run):
        for step in range(6):
            engine.backward(engine(*my_micro_batches(step, rank, world, 2, 1)[0]))
            engine.stage.gradients.drain()
            gate.set()
            engine.zero.optimizer_shard.wait_pending_update()
            gate.clear()
            engine.step()
            losses.append(engine.last_step.loss)
        gate.set()
        sha = engine.params_sha256()
    engine.destroy()
    return losses, sha, held


def test_an_update_that_begins_late_reads_the_sums_of_its_step(ranks):
    """The next step's gradients have arrived by then, and lie in the other copy."""
    for stage in (2, 3):
        (expected, _, hashed), _ = check_same_bits(ranks, [late(stage)], 6)
        for losses, sha, held in ranks.run(begins_late, late(stage), world_size=2):
            assert (losses, sha) == (expected, hashed)
            assert held == [True] * (6 - AFTER)


def test_half_of_it(ranks):
    """What stays on the device is not late; the bits are the same whatever the timing."""
    check_same_bits(ranks, [late(2, ratio=0.5, chaos=seed) for seed in (None, 1, 2)], 7)


@on_ranks()
def test_checkpoint(rank, world, tmp_path):
    """Saving finishes the update, so a checkpoint is one state; who goes on from it takes the same course."""
    folder = str(tmp_path)
    straight = built(late(2))
    losses = go(straight, rank, world, 0, 5)
    straight.save_checkpoint(folder)
    losses += go(straight, rank, world, 5, 8)
    sha = straight.params_sha256()
    for steps in (0, 4):
        again = built(late(2, chaos=3))
        go(again, rank, world, 0, steps)  # after four an update is on its way when everything is replaced
        again.load_checkpoint(folder)
        # The delay of a run that goes on counts its steps from the beginning of the run.
        assert losses[5:] == go(again, rank, world, 5, 8)
        assert again.params_sha256() == sha


@on_ranks()
def test_what_a_late_step_moved_is_measured(rank, world):
    """Master and two moments read and written, a gradient read, the new parameter written, by one update each."""
    case = late(2)
    began = time.perf_counter()
    engine = built(case)
    go(engine, rank, world, 0, AFTER + 2)
    engine.finish_delayed_update()
    numel = sum(master.numel() for master in engine.zero.optimizer_shard.grads)
    meter = engine.zero.offload.copier.meter
    legs = [meter.last_step["offload.optimizer_step"], meter.legs["offload.optimizer_step"]]
    engine.destroy()
    seconds = time.perf_counter() - began
    for leg in legs:
        assert leg.bytes == (2 * 3 * 4 + 4 + 2) * numel
        assert 0 < leg.seconds < seconds and 0 <= leg.waited_seconds < seconds


@on_ranks()
def test_steps_agree_by_their_one_message(rank, world):
    engine = built(late(2))
    go(engine, rank, world, 0, 4)
    with mock.patch.object(process_group, "all_gather_object", side_effect=AssertionError("a collective more")):
        go(engine, rank, world, 4, 6)
    go(engine, rank, world, 6, 7)
    if rank == 1:
        with torch.no_grad():
            engine.module.norm.weight.add_(1)
    with pytest.raises(RuntimeError, match=("rank 1: " if rank == 0 else "^") + "parameter 'norm.weight' was written"):
        go(engine, rank, world, 7, 8)


@on_ranks()
def test_step_hooks_of_the_program_are_refused(rank, world):
    """On all ranks, though one has them: the thread would not call them, as the first steps do, without a delay."""
    engine, seen = built(late(2)), []
    early = engine.optimizer.register_step_post_hook(lambda *_: seen.append(0))
    go(engine, rank, world, 0, 2)
    early.remove()
    assert seen
    go(engine, rank, world, 2, 4)
    hooks = [engine.optimizer.register_step_post_hook(lambda *_: None)] if rank == 1 else []
    with pytest.raises(RuntimeError, match=("rank 1: " if rank == 0 else "^") + "the optimizer has step hooks"):
        go(engine, rank, world, 4, 5)
    for hook in hooks:
        hook.remove()
    go(engine, rank, world, 4, 5)


@on_ranks()
def test_readers_and_writers(rank, world):
    engine = built(late(2))
    go(engine, rank, world, 0, 4)
    param = engine.module.norm.weight
    before = param.detach().clone()
    master = safe_get_full_fp32_param(param)  # waits for the thread
    assert torch.equal(param, before) and not torch.equal(master.to(before.dtype), before)
    with torch.no_grad():
        param.add_(1)
    with pytest.raises(RuntimeError, match="written while a delayed update was on its way"):
        go(engine, rank, world, 4, 5)
    engine.discard_gradients()
    engine.destroy()

    engine = built(late(3))
    go(engine, rank, world, 0, 4)
    param = engine.module.blocks[0][1].weight
    late_write = pytest.raises(RuntimeError, match="finish_delayed_update")
    with late_write, deepzero.zero.GatheredParameters(param, modifier_rank=0), torch.no_grad():
        param.mul_(0)
    engine.finish_delayed_update()
    with deepzero.zero.GatheredParameters(param, modifier_rank=0), torch.no_grad():
        param.mul_(0)
    go(engine, rank, world, 4, 6)
    safe_set_full_fp32_param(param, torch.ones(param.shape))
    with deepzero.zero.GatheredParameters(param):
        assert bool((param == 1).all())


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks()
def test_finished_in_the_middle(rank, world, stage):
    """Between two micro-batches it is new values; a graph over the old ones is refused, not mixed."""
    engine = built(late(stage, gradient_accumulation_steps=2, after=0))
    go(engine, rank, world, 0, 2)
    micro = my_micro_batches(2, rank, world, engine.batch.micro_batch, 2)
    engine.backward(engine(*micro[0]))
    engine.step()
    engine.finish_delayed_update()
    engine.backward(engine(*micro[1]))
    engine.step()
    go(engine, rank, world, 3, 5)
    loss = engine(*micro[0])
    engine.finish_delayed_update()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|older values"):
        engine.backward(loss)


@on_ranks()
def test_a_skipped_step_sends_what_is_ready(rank, world):
    engine = built(late(2, after=0, precision="fp16", fp16={"initial_scale_power": 4}))
    go(engine, rank, world, 0, 2)
    before = engine.module.norm.weight.detach().clone()
    ids, labels = my_micro_batches(2, rank, world, engine.batch.micro_batch, 1)[0]
    engine.backward(engine(ids, labels) * (float("inf") if rank == 0 else 1.0))
    engine.step()
    assert engine.last_step.skipped and not torch.equal(before, engine.module.norm.weight)
    assert not engine.zero.optimizer_shard.update_pending


@on_ranks()
def test_after_a_refused_step_gradients_are_those_of_the_step(rank, world):
    engine = built(late(2, after=0))
    go(engine, rank, world, 0, 2)
    engine.backward(engine(*my_micro_batches(2, rank, world, engine.batch.micro_batch, 1)[0]) * float("nan"))
    with pytest.raises(RuntimeError, match="is not finite"):
        engine.step()
    engine.discard_gradients()
    for step in range(3, 7):
        engine.backward(engine(*my_micro_batches(step, rank, world, engine.batch.micro_batch, 1)[0]))
        engine.stage.gradients.reduce_now()
        fresh, mine = engine.zero.optimizer_shard.cut_grads(), engine.zero.optimizer_shard.grads
        assert all(torch.equal(grad, mine[master]) for master, grad in fresh.items()), step
        assert all(grad.data_ptr() == mine[master].data_ptr() for master, grad in fresh.items()), step
        engine.step()


def refuse(*_, **__):
    raise MemoryError("no memory")


@on_ranks()
def test_an_update_that_fails_is_not_forgotten(rank, world, tmp_path):
    """All ranks raise, whatever asks; nothing half old is saved; loading begins anew."""
    folder = str(tmp_path)
    engine = built(late(2, after=0))
    engine.save_checkpoint(folder)
    go(engine, rank, world, 0, 1)
    engine.zero.optimizer_shard.wait_pending_update()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(CPUAdam, "step", refuse)
        go(engine, rank, world, 1, 2)
        said = ("rank 1: " if rank == 0 else "^") + "the delayed update failed .*no memory"
        with pytest.raises(RuntimeError, match=said):
            go(engine, rank, world, 2, 3)
    for again in (lambda: engine.save_checkpoint(folder), engine.finish_delayed_update):
        with pytest.raises(RuntimeError, match=("rank 1: " if rank == 0 else "^") + "the delayed update failed"):
            again()
    engine.load_checkpoint(folder)
    go(engine, rank, world, 0, 3)


@on_ranks()
def test_a_thread_that_cannot_be_started_is_not_waited_for(rank, world):
    engine = built(late(2, after=0))
    unstarted = mock.patch("deepzero.offload.delayed_update.start_thread", refuse)
    with unstarted, pytest.raises(MemoryError, match="no memory"):
        go(engine, rank, world, 0, 1)
    with pytest.raises(RuntimeError, match=r"the delayed update failed .*no memory"):
        engine.finish_delayed_update()
    engine.destroy()


@pytest.mark.slow
def test_a_program_may_end_before_its_update(tmp_path):
    """The interpreter waits for the thread; nothing aborts."""
    program = tmp_path / "program.py"
    program.write_text(
        "import torch, deepzero\n"
        "from deepzero.ops import CPUAdam\n"
        "engine, *_ = deepzero.initialize(model=torch.nn.Linear(2000, 2000), config={\n"
        "    'train_batch_size': 2, 'optimizer': {'type': 'AdamW', 'params': {}}, 'zero_optimization': {'stage': 2,\n"
        "    'offload_optimizer': {'device': 'cpu', 'delayed_update': True, 'delay_after_steps': 0}}})\n"
        "engine.backward(engine(torch.ones(2, 2000)).sum())\n"
        "engine.step()\n"
        "print('end')\n"
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=60, env=ENV)
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr


@on_ranks()
def test_the_checks_of_a_step_are_made(rank, world):
    engine = built(late(2, after=0))
    go(engine, rank, world, 0, 2)
    engine.module.norm.weight.data = engine.module.norm.weight.data.clone()
    with pytest.raises(RuntimeError, match="has left ZeRO's flat buffer"):
        go(engine, rank, world, 2, 3)
