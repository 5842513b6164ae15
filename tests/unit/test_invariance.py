"""Why bits may depend on the number of ranks: each reason by itself, and random numbers that do not."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from deepzero.config.deepspeed_json import load_engine_config
from deepzero.config.strict import ConfigError
from deepzero.runtime.consistency import sum_rounded_once
from deepzero.runtime.invariance import dependences, refuse_dependence, seed_generators

CPU, GPU = torch.device("cpu"), torch.device("cuda")
HOST = {"device": "cpu", "ratio": 0.5}


def found(model=None, device=CPU, comm=None, **changes):
    zero = {"stage": 2, **changes.pop("zero", {})}
    given = {"train_batch_size": 4, "bf16": {"enabled": True}, **changes}
    given |= {"zero_optimization": zero, "comm": {"reduce": "exact", **(comm or {})}}
    return dependences(load_engine_config(given), model or nn.Linear(2, 2), device)


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("comm.reduce=exact", {"comm": {"reduce": "native"}}),
        ("stage 0 sums", {"zero": {"stage": 0}}),
        ("stage 1 sums", {"zero": {"stage": 1}}),
        ("qgZ", {"zero": {"stage": 3, "zero_quantized_gradients": True}}),
        ("qwZ", {"zero": {"stage": 3, "zero_quantized_weights": True}}),
        ("rounded to bf16", {"data_types": {"grad_accum_dtype": "bf16"}}),
        ("fp16 would round", {"communication_data_type": "fp16"}),
        ("BatchNorm", {"model": nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))}),
        ("InstanceNorm", {"model": nn.InstanceNorm1d(2, track_running_stats=True)}),
        ("use_deterministic_algorithms", {"device": GPU}),
    ],
)
def test_each_reason(monkeypatch, reason, changes):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    (line,) = found(**changes)
    assert reason in line
    with pytest.raises(ConfigError, match="world_size_invariant=true, but bits depend"):
        refuse_dependence([line])


def test_none(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    for stage in range(4):
        assert found(zero={"stage": stage}, comm={"world_size_invariant": True}) == []
    assert found(zero={"offload_optimizer": HOST}, communication_data_type="fp32") == []
    refuse_dependence([])


def test_quantised_sums_are_exact_on_a_gpu_too():
    settings = {"zero": {"stage": 3, "zero_quantized_gradients": True}, "comm": {"reduce": None}}
    assert ["backend" in line for line in found(device=GPU, **settings)] == [False, False]  # qgZ, and kernels


def test_several_at_once(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert ["as 4 threads" in line for line in found()] == [True]
    assert len(found(device=GPU, zero={"offload_optimizer": HOST}, comm={"reduce": None})) == 3


def draw():
    return random.random(), np.random.random(), float(torch.rand(()))


def test_seeds():
    drawn = set()
    for place in [(1, 2, 3), (1, 2, 4), (1, 3, 3), (2, 2, 3), (-1, 12, 3), (1 << 70, 2, 3)]:
        seed_generators(CPU, *place)
        first = draw()
        seed_generators(CPU, *place)
        assert draw() == first
        drawn.update(first)
    assert len(drawn) == 18


def test_a_sum_that_does_not_depend_on_who_adds():
    losses = (torch.rand(12, generator=torch.Generator().manual_seed(0)) * 9).tolist()
    whole = sum_rounded_once(losses)
    for ranks in (2, 3, 4, 6):
        assert sum_rounded_once([sum_rounded_once(losses[rank::ranks]) for rank in range(ranks)]) == whole
    assert sum_rounded_once([1.0, float("inf")]) == float("inf")
    assert np.isnan(sum_rounded_once([float("inf"), float("-inf")])) and np.isnan(sum_rounded_once([1.0, float("nan")]))
