"""qgZ in training: stages 1, 2 and 3 with accumulation, overlap, offload and chaos; what is counted; overflow."""

import pytest
import torch

import deepzero
from deepzero.comm.quantized_reduce import BETWEEN, INSIDE
from deepzero.comm.reduce_scatter import REDUCE_SCATTER
from deepzero.runtime.engine import NonFiniteError
from tests.distributed.pool import on_ranks, sampled
from tests.distributed.training import (
    as_predicted,
    check_alike,
    check_same_bits,
    config,
    go,
    make_batch,
    make_model,
    one_step,
    start,
    train_each,
)

SMALL = {"stage3_param_persistence_threshold": 48}
"""Norms and biases of the tiny model."""
PSI = sum(p.numel() for p in make_model().parameters())
PERSISTENT = sum(p.numel() for p in make_model().parameters() if p.numel() <= 48)


def settings_of(stage, per_node=2, feedback=False, quantized=True, **changes):
    zero = {**(SMALL if stage == 3 else {}), **changes.pop("zero", {})}
    if quantized:
        zero |= {"zero_quantized_gradients": True, "quantization": {"block_size": 64, "error_feedback": feedback}}
    changes = {"precision": "bf16", "bucket": 2500, "gradient_accumulation_steps": 2, **changes}
    settings = config(stage=stage, zero=zero, **changes)
    settings["comm"]["ranks_per_node"] = per_node
    return settings


def made(settings, seed=0):
    return deepzero.initialize(model=make_model(seed), config=settings)[0]


@pytest.mark.parametrize("stages", sampled([], ((2, 3), (1,)), slow=[((2, 3),)]))
def test_same_bits_with_overlap_chaos_and_offload(ranks, stages):
    offload = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
    variants = [settings_of(2, quantized=False)]
    for stage in stages:
        variants += [
            settings_of(stage, feedback=True),
            settings_of(stage, feedback=True, overlap=True, chaos=stage, zero=offload if stage == 2 else {}),
        ]
    (exact, _, _), *found = [bits for bits, _ in ranks.run(train_each, variants, 10, world_size=4)[0]]
    for stage, calm, busy in zip(stages, found[::2], found[1::2], strict=True):
        assert calm == busy, f"stage {stage}"
        # Four bits: a little noise, and the same way down.
        assert exact[-1] < exact[0] - 0.2 and exact != calm[0]
        assert abs(calm[0][-1] - exact[-1]) < 0.15 * (exact[0] - exact[-1])


@pytest.mark.parametrize(("world", "per_node"), [(2, 1), (4, 2), (2, 2), *sampled([], (4,), (1, 4))])
def test_counted_bytes(ranks, world, per_node):
    cases = [settings_of(stage, per_node, feedback=stage == 2, overlap=stage == 2) for stage in (1, 2, 3)]
    for stage, (_, report) in zip((1, 2, 3), ranks.run(train_each, cases, 2, world_size=world)[0], strict=True):
        communication = report["communication"]
        as_predicted(communication)
        sent = {kind: counts["measured"]["elements"] for kind, counts in communication.items()}
        times, exact = (1 if stage == 1 else 2), (PERSISTENT if stage == 3 else 0)
        nodes = world // per_node
        assert sent.get(INSIDE, 0) == pytest.approx(times * (PSI - exact) * (per_node - 1) / per_node)
        assert sent.get(BETWEEN, 0) == pytest.approx(times * (PSI - exact) * (nodes - 1) / world)
        assert sent.get(REDUCE_SCATTER, 0) == pytest.approx(times * exact * (world - 1) / world)
        held = report["memory"]["buckets"]
        assert held["measured"] == held["predicted"] > 0


def test_one_rank_sends_nothing_and_loses_nothing(ranks):
    _, (report, _) = check_same_bits(ranks, [settings_of(2, None), settings_of(2, None, quantized=False)], 2, 1)
    assert report["communication"][REDUCE_SCATTER]["measured"]["elements"] == 0
    as_predicted(report["communication"])


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.exhaustive), 3])
@on_ranks(4)
def test_fp16_overflow_skips_the_step(rank, world, stage):
    """The first loss scales overflow fp16: skipped on all ranks, until one does not."""
    settings = settings_of(stage, feedback=True, precision="fp16", fp16={"initial_scale_power": 17, "hysteresis": 1})
    engine = made(settings)
    before, skipped, kept = engine.params_sha256(), [], []
    for step in range(6):
        record = one_step(engine, rank, world, step)
        if not skipped:
            kept = [engine.params_sha256() == before, not any(t.any() for t in engine.zero.bucket_reducer.residuals())]
        skipped.append(record.skipped)
    assert skipped[0] and not all(skipped) and all(kept)
    assert all(t.isfinite().all() for t in engine.zero.bucket_reducer.residuals())
    check_alike(skipped)


@on_ranks()
def test_what_is_kept_follows_the_loss_scale(rank, world):
    """What is kept, before and after each change of the loss scale."""
    zero = {"zero_quantized_gradients": True, "quantization": {"error_feedback": True, "block_size": 64}}
    fp16 = {"initial_scale_power": 4, "loss_scale_window": 2}
    engine = start(make_model(), stage=2, precision="fp16", fp16=fp16, zero=zero, comm={"ranks_per_node": 1})
    reducer, seen = engine.zero.bucket_reducer, []
    rescale = reducer.rescale

    def spy(factor):
        before = torch.cat([kept.flatten() for kept in reducer.residuals()])
        rescale(factor)
        after = torch.cat([kept.flatten() for kept in reducer.residuals()])
        seen.append((factor, bool(before.any()), torch.equal(after, before * factor)))

    reducer.rescale = spy
    go(engine, rank, world, 0, 5)
    assert [factor for factor, *_ in seen].count(2.0) >= 1 and all(some and exact for _, some, exact in seen)


@on_ranks(4)
def test_not_finite_on_one_rank_raises_on_all(rank, world):
    engine = made(settings_of(2))
    one_step(engine, rank, world)
    before = engine.params_sha256()
    with pytest.raises(NonFiniteError):
        for number in range(2):
            loss = engine(*make_batch(number, 2))
            engine.backward(loss * float("inf") if rank == 1 and number == 1 else loss)
            engine.step()
    assert engine.params_sha256() == before


@on_ranks(4)
def test_dropped_gradients(rank, world):
    """zero_grad after every step leaves what was lost; zero_grad of gradients that have left takes it away."""
    engine = made(settings_of(2, feedback=True, gradient_accumulation_steps=1))
    one_step(engine, rank, world)
    lost = [float(t.float().norm()) for t in engine.zero.bucket_reducer.residuals()]
    engine.discard_gradients()
    after = [float(t.float().norm()) for t in engine.zero.bucket_reducer.residuals()]
    engine.backward(engine(*make_batch(1, 2)))
    engine.discard_gradients()
    dropped_too = [float(t.float().norm()) for t in engine.zero.bucket_reducer.residuals()]
    assert lost == after and all(lost) and not any(dropped_too)


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
@on_ranks(4)
def test_resume_without_feedback_gives_the_same_bits(rank, world, tmp_path, stage):
    """Saved after two steps; two more, without stopping and from the checkpoint."""
    first, second = (made(settings_of(stage), seed) for seed in (0, 1))
    go(first, rank, world, 0, 2)
    first.save_checkpoint(tmp_path)
    second.load_checkpoint(tmp_path)
    for engine in (first, second):
        go(engine, rank, world, 2, 4)
    assert first.params_sha256() == second.params_sha256()


@on_ranks(4)
def test_the_meter_changes_nothing_and_what_is_lost_survives_offload_states(rank, world):
    """Two equal runs, one of them with the meter; and what is lost survives a phase without the device."""
    settings = settings_of(3, feedback=True, gradient_accumulation_steps=1)
    settings["zero_optimization"]["quantization"]["meter_every"] = 0  # switched here, not by the engine
    plain, watched = made(settings), made(settings)
    quantized_grads = watched.zero.bucket_reducer.strategy
    for step in range(2):
        quantized_grads.meter(step == 1)
        for engine in (plain, watched):
            one_step(engine, rank, world, step)
    lost = [t.clone() for t in watched.zero.bucket_reducer.residuals()]
    watched.offload_states()
    watched.reload_states()
    same = all(torch.equal(a, b) for a, b in zip(lost, watched.zero.bucket_reducer.residuals(), strict=True))
    buckets = {(g, i.index) for g, group in enumerate(watched.zero.groups) for i in group.layout.buckets}
    exact = {key for key in buckets if not quantized_grads.takes(key)}
    assert plain.params_sha256() == watched.params_sha256() and same
    assert exact and set(quantized_grads.measured) == buckets - exact
    assert all(0 < noise < signal / 4 for signal, noise in quantized_grads.measured.values() if signal)
