"""Activation checkpoints in host memory: the bits of a run without, and every byte that moves is known beforehand."""

import contextlib
import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepzero
from deepzero.comm.chaos import Chaos
from deepzero.comm.ledger import Ledger
from deepzero.config.engine import ChaosConfig
from deepzero.offload.activations import (
    ACTIVATIONS_TO_DEVICE,
    ACTIVATIONS_TO_HOST,
    HOST_ACTIVATIONS,
    HostActivations,
    Saved,
)
from deepzero.offload.copy_streams import HostDeviceCopier, OffloadStats
from tests.distributed.pool import on_ranks, sampled
from tests.distributed.training import (
    KINDS,
    LENGTH,
    VOCAB,
    WHOLE,
    WIDTH,
    built,
    check_same_bits,
    config,
    my_micro_batches,
    one_step,
    step_from,
)

EVERYTHING = {"cpu_checkpointing": True, "cpu_checkpointing_min_bytes": 1}


def settings(stage, keep, **changes):
    block = EVERYTHING if keep is True else keep or {}
    return config(stage=stage, bucket=1500, overlap=True, zero=WHOLE, activation_checkpointing=block, **changes)


@pytest.mark.parametrize(("precision", "stages"), sampled([("bf16", (0, 3))], ("bf16", "fp32"), ((0, 3), (2,))))
@pytest.mark.parametrize(("kind", "accumulation"), [("plain", 1), ("checkpoint", 3), ("reentrant", 1)])
def test_same_bits(ranks, kind, accumulation, precision, stages):
    more = {"precision": precision, "gradient_accumulation_steps": accumulation}
    for stage in stages:
        plain, *kept = (settings(stage, on, chaos=seed, **more) for on, seed in
                        ((False, None), (True, None), (True, 4)))  # fmt: skip
        _, (without, *reports) = check_same_bits(ranks, [(one, kind) for one in (plain, *kept)], 3)
        assert ACTIVATIONS_TO_HOST not in without["communication"]
        assert all(report["communication"][ACTIVATIONS_TO_HOST]["measured"]["bytes"] > 0 for report in reports)


@pytest.mark.parametrize("kind", ["plain", "reentrant"])
def test_one_rank(ranks, kind):
    cases = [(settings(stage, on, precision="bf16"), kind) for stage in (2, 3) for on in (False, True)]
    check_same_bits(ranks, cases, 3, 1)


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks()
def test_states_away_between_the_passes(rank, world, stage):
    """Model states go and come between the passes of a step whose activations are in host memory."""
    results = []
    for away in (False, True):
        engine = built(settings(stage, True, precision="bf16"), KINDS["checkpoint"])
        for step in range(3):
            loss = engine(*my_micro_batches(step, rank, world, 2, 1)[0])
            if away:
                engine.offload_states()
                engine.reload_states()
            step_from(engine, loss)
        results.append(engine.params_sha256())
    assert results[0] == results[1]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("stage", [0, 3])
@on_ranks()
def test_counted_bytes(rank, world, stage, reentrant):
    """Two inputs of blocks, and nothing else that is as large."""
    block_input = 2 * LENGTH * WIDTH * 4
    given = settings(stage, {"cpu_checkpointing": True, "cpu_checkpointing_min_bytes": block_input})
    engine, *_ = deepzero.initialize(model=KINDS["reentrant" if reentrant else "checkpoint"](), config=given)
    held = []
    for step in range(4):
        one_step(engine, rank, world, step)
        held.append(engine.ledger.held_now()[HOST_ACTIVATIONS])
    # Outside of the blocks: the last norm's input and output, and the loss's logarithms.
    tokens = 2 * LENGTH
    outside = 2 * tokens * WIDTH * 4 + tokens * VOCAB * 4
    sent, back = (engine.ledger.last_step[kind].bytes for kind in (ACTIVATIONS_TO_HOST, ACTIVATIONS_TO_DEVICE))
    report = engine.report()
    assert sent == back == 2 * block_input + outside
    assert set(held) == {sent}, "buffers are used again"
    assert report["memory"][HOST_ACTIVATIONS]["measured"] == sent
    assert report["communication"][ACTIVATIONS_TO_HOST]["predicted"] is None


@on_ranks()
def test_weights_of_stage_3_are_not_copied(rank, world):
    """Stage 3: weights are fetched again, not copied; what is on the host is activations."""
    engine = built(settings(3, True), KINDS["plain"])
    loss = engine(*my_micro_batches(0, rank, world, 2, 1)[0])
    numels = {p.numel() for name, p in engine.module.named_parameters() if p.dim() == 2}
    parked = [p.nbytes // 4 for p in engine.callbacks.around_forward[-1].__self__._parked.values()]
    assert numels.isdisjoint(parked) and len(parked) > 5
    step_from(engine, loss)


@on_ranks()
def test_evaluation_keeps_nothing(rank, world):
    engine, *_ = deepzero.initialize(model=KINDS["plain"](), config=settings(2, True))
    ids, labels = my_micro_batches(0, rank, world, 2, 1)[0]
    with torch.no_grad():
        engine(ids, labels)
    assert engine.ledger.held_now()[HOST_ACTIVATIONS] == 0


def hooks(min_bytes=1, chaos=False, keep=()):
    ledger = Ledger()
    wire = HostDeviceCopier(
        torch.device("cpu"), ledger, Chaos(ChaosConfig(enabled=chaos, max_delay_ms=0.1), 0), OffloadStats()
    )
    return HostActivations(wire, lambda: keep, min_bytes), ledger


@pytest.mark.parametrize("chaos", [False, True])
def test_two_backward_passes(chaos):
    """``retain_graph=True``: everything is asked for twice."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.Tanh())
    x = torch.randn(8, 16)
    activations, ledger = hooks(chaos=chaos, keep=list(made.parameters()))
    results = []
    for on in (False, True):
        made.zero_grad()
        if on:
            with activations.watching():
                loss = made(x).square().sum()
        else:
            loss = made(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        results.append([p.grad.clone() for p in made.parameters()])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    assert ledger.traffic[ACTIVATIONS_TO_DEVICE].bytes == 2 * ledger.traffic[ACTIVATIONS_TO_HOST].bytes


def test_a_tensor_saved_twice_is_copied_once():
    activations, ledger = hooks()
    x = torch.randn(100, requires_grad=True)
    with activations.watching():
        y = x * 2.0
        z = (y * y).sum() + (y.exp() * y.view(10, 10).reshape(-1)).sum()
    assert ledger.traffic[ACTIVATIONS_TO_HOST].bytes == 2 * y.nbytes  # y and its exponential
    z.backward()
    y = x.detach() * 2.0
    torch.testing.assert_close(x.grad, 2 * (2 * y + y.exp() * y + y.exp()))


def test_views_keep_their_strides():
    activations, ledger = hooks()
    seen = []
    base = torch.arange(60.0).view(4, 15)
    for view in (base[:, :5], base[:, 5:10], base.t(), base[:, 10:]):
        saved = activations._pack(view)
        assert isinstance(saved, Saved)
        back = activations._unpack(saved)
        assert back.stride() == view.stride() and torch.equal(back, view)
        seen.append(saved)
    assert ledger.traffic[ACTIVATIONS_TO_HOST].calls == 1
    whole = torch.zeros(1000)
    assert activations._pack(whole[:3])[0].numel() == 3  # a small part of a large storage stays where it is


def test_small_ones_and_parameters_stay():
    weight = nn.Parameter(torch.ones(1000))
    activations, _ = hooks(min_bytes=400, keep=[weight])
    with activations.watching():
        for stays in (torch.ones(99), weight, weight[10:900]):
            assert activations._pack(stays)[0].data_ptr() == stays.data_ptr()
        assert isinstance(activations._pack(torch.ones(100)), Saved)


@pytest.mark.parametrize("chaos", [False, True])
def test_a_change_in_place_is_noticed(chaos):
    activations, _ = hooks(chaos=chaos)
    x = torch.randn(50, requires_grad=True)
    with activations.watching():
        y = x.exp()
        loss = y.sum()
        y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("chaos", [False, True])
def test_buffers_come_back(chaos):
    """Also from graphs that never run backward, and identities that come again are not mistaken."""
    activations, ledger = hooks(chaos=chaos)
    for step in range(30):
        x = torch.full((64,), float(step), requires_grad=True)
        with activations.watching():
            loss = (x * 2).exp().sum() if step % 3 else (x * 3).square().sum()
        if step % 5:
            loss.backward()
            y = x.detach()
            assert torch.equal(x.grad, (y * 2).exp() * 2 if step % 3 else 2 * (y * 3) * 3)
        del loss
    gc.collect()
    assert sum(t.nbytes for t in activations.buffers.tensors()) <= 4 * 256
    assert ledger.traffic[ACTIVATIONS_TO_HOST].bytes >= 30 * 256


def attention(x, made):
    q, k, v = made(x).view(4, 16, 3, 4, 16).permute(2, 0, 3, 1, 4).unbind(0)
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).square().sum()


def dropout(x, made):
    return nn.functional.dropout(made(x).relu_(), 0.5).sum()


def autocast(x, made):
    with torch.autocast("cpu", torch.bfloat16):
        return made(made(x)).float().square().mean()


def gradient_penalty(x, made):
    x = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad(made(x).tanh().sum(), x, create_graph=True)
    return grad.square().sum()


def conjugate(x, made):
    z = torch.complex(made(x), x)
    return (z * z.conj() * z.conj().exp()).real.sum()


def parts_of_one_storage(x, made):
    """``unsafe_chunk``'s have a version counter each, and the second is written when the first has been saved."""
    a, b = made(x).unsafe_chunk(2, -1)
    return (a.sigmoid_() * b.tanh_()).sum()


def nested(x, made):
    """A batch of sequences of different lengths, in a tensor that says it is strided and has no shape."""
    rows = torch.nested.as_nested_tensor(list(made(x)))
    return torch.nested.to_padded_tensor(nn.functional.gelu(rows), 0.0).square().sum()


@pytest.mark.parametrize("chaos", [False, True])
@pytest.mark.parametrize(
    "function", [attention, dropout, autocast, gradient_penalty, conjugate, nested, parts_of_one_storage]
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_kinds_of_graphs(function, chaos):
    torch.manual_seed(0)
    made, x, results = nn.Linear(192, 192), torch.randn(4, 16, 192), []
    for on in (False, True):
        activations, ledger = hooks(chaos=chaos, keep=list(made.parameters()))
        torch.manual_seed(1)
        made.zero_grad()
        with activations.watching() if on else contextlib.nullcontext():
            loss = function(x, made)
        loss.backward()
        results.append([p.grad.clone() for p in made.parameters() if p.grad is not None])
    assert ledger.traffic[ACTIVATIONS_TO_HOST].calls
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(lambda y, b=block: torch.tanh(b(y)), x, use_reentrant=False)
        return x.sum()


def test_the_next_one_is_fetched_ahead():
    """In the backward pass the copy of the tensor that comes next is launched with that of the one that is used."""
    torch.manual_seed(0)
    made = Deep()
    activations, ledger = hooks(keep=list(made.parameters()))
    ledger.trace = True
    with activations.watching():
        loss = made(torch.randn(4, 32, requires_grad=True))
    order = []
    fetch = activations._fetch

    def spy(parked):
        order.append((parked.serial, parked.serial in activations._ahead))
        return fetch(parked)

    activations._fetch = spy
    loss.backward()
    serials = list(dict.fromkeys(serial for serial, _ in order))
    assert serials == sorted(serials, reverse=True) and len(serials) == 6
    assert [dict(reversed(order))[serial] for serial in serials] == [False] + [True] * 5
    assert not activations._ahead
    assert ledger.traffic[ACTIVATIONS_TO_DEVICE].calls == 6
