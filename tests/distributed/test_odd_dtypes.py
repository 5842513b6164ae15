"""Buffers and frozen parameters of dtypes that no backend sends: every rank starts with rank 0's values, to the bit."""

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import deepzero
from deepzero.config.strict import ConfigError
from tests.distributed.pool import on_ranks
from tests.distributed.training import config, scripted, start, step_from, step_on

NAMES = [
    *("bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "bits8", "bits16"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128", "int4", "uint4"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
]
DTYPES = [getattr(torch, name) for name in NAMES if hasattr(torch, name)]

NUMEL = 5000
"""Of a frozen parameter: of a shard of it not every element is compared."""


def filled(dtype, rank, numel=6):
    """Bytes that are a value in any dtype, other ones on every rank."""
    return (torch.arange(numel * dtype.itemsize, dtype=torch.uint8) % 2 ^ (rank & 1)).view(dtype)


class Odd(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        for dtype in DTYPES:
            name = str(dtype).removeprefix("torch.")
            self.register_buffer(f"buffer_{name}", filled(dtype, rank))
            self.register_buffer(f"scalar_{name}", filled(dtype, rank, 1)[0], persistent=False)
            if not dtype.is_complex and dtype is not torch.float64 and "int4" not in name:  # which torch cannot copy
                self.register_parameter(f"frozen_{name}", nn.Parameter(filled(dtype, rank, NUMEL), requires_grad=False))
        self.register_buffer("conjugate", filled(torch.complex64, rank).conj())
        self.register_buffer("apart", filled(torch.uint16, rank).view(2, 3).t())

    def forward(self, x):
        return self.linear(x).sum()


def start_and_step(rank, world, settings, init):
    """What every rank has of the odd ones, as bytes and dtypes; two steps are taken in between."""
    with deepzero.zero.Init(enabled=init):
        model = Odd(rank)
    engine, *_ = deepzero.initialize(model=model, config=settings)
    for _ in range(2):
        step_on(engine, torch.ones(2, 4, dtype=torch.bfloat16))
    frozen = {n: p for n, p in engine.module.named_parameters() if n.startswith("frozen")}
    with deepzero.zero.GatheredParameters(frozen.values(), modifier_rank=world - 1):
        found = {n: p.detach().clone() for n, p in frozen.items()}
    tensors = {**found, **dict(engine.module.named_buffers())}
    return {name: (str(t.dtype), t.contiguous().view(-1).view(torch.uint8).tolist()) for name, t in tensors.items()}


@pytest.mark.parametrize(("stage", "init"), [(0, False), (2, False), (3, False), (3, True)])
def test_odd_dtypes(ranks, stage, init):
    settings = config(stage=stage, precision="bf16", zero={"stage3_param_persistence_threshold": 4})
    first, second = ranks.run(start_and_step, settings, init, world_size=2)
    assert first == second
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        assert first[f"buffer_{name}"] == (str(dtype), filled(dtype, 0).view(torch.uint8).tolist())
    for name in ("uint16", "int16", "bits8", "float4_e2m1fn_x2"):
        assert first[f"frozen_{name}"][1] == filled(getattr(torch, name), 0, NUMEL).view(torch.uint8).tolist()


class Scaled(nn.Linear):
    """With a buffer that needs its precision, whatever parametrizes the weight."""

    def __init__(self, buffer):
        super().__init__(4, 4)
        self.register_buffer("own", buffer)


class Active(nn.BatchNorm1d):
    """As timm's."""

    def forward(self, x):
        return super().forward(x).relu()


class Normed(nn.Module):
    """Modules of torch's that compute with buffers in the dtype of weights, and buffers that stay as they are."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.active = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), Active(4)
        self.head, self.older = spectral_norm(nn.Linear(4, 2)), nn.utils.spectral_norm(nn.Linear(4, 4))
        self.conv.register_buffer("mean", self.norm.running_mean)  # it comes first, and has no say
        shared = torch.ones(3) / 3
        self.scaled, self.plain = weight_norm(Scaled(shared)), Scaled(shared)

    def forward(self, x):
        x = self.active(self.norm(self.conv(x)).mean((2, 3)))
        return self.head(self.older(self.scaled(x) + self.plain(x))).square().sum()


@pytest.mark.parametrize("stage", [0, 1, 3])
@on_ranks()
def test_buffers_that_torch_wants_in_the_dtype_of_weights(rank, world, tmp_path, stage):
    values = []
    for precision, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        engine = start(Normed(), stage=stage, precision=precision)
        look = lambda: [buffer.float().clone() for buffer in engine.module.buffers()]  # noqa: B023
        if precision == "fp32":
            engine.load_checkpoint(tmp_path)
            assert all(map(torch.equal, look(), values))
        step_on(engine, torch.ones(2, 1, 5, 5, dtype=dtype))  # alike on all ranks, as are the buffers then
        values = look()
        named = {name: b.dtype for name, b in engine.module.named_buffers() if b.is_floating_point()}
        assert named.pop("scaled.own") == torch.float32 and engine.module.scaled.own is engine.module.plain.own
        assert len(named) == 8 and set(named.values()) == {dtype}
        engine.save_checkpoint(tmp_path)


@on_ranks(1)
def test_a_scripted_part(rank, world):
    model = nn.Sequential(scripted(nn.Linear(4, 4)), scripted(nn.BatchNorm1d(4)), nn.BatchNorm1d(4, affine=False))
    engine = start(model, stage=1, precision="bf16")
    step_from(engine, engine(torch.ones(2, 4, dtype=torch.bfloat16)).square().sum())
    assert engine.was_step_applied()
    assert (model[1].running_mean.dtype, model[2].running_mean.dtype) == (torch.bfloat16, torch.float32)


@on_ranks()
def test_a_sparse_buffer(rank, world):
    model = nn.Linear(4, 4)
    model.register_buffer("graph", torch.eye(4).to_sparse())
    with pytest.raises(ConfigError, match=r"buffer 'graph' is torch.sparse_coo"):
        deepzero.initialize(model=model, config=config(stage=2))


@on_ranks()
def test_fp64_parameters_are_refused_by_name(rank, world):
    with deepzero.zero.Init():
        model = nn.Linear(64, 64, dtype=torch.float64)
    with deepzero.zero.GatheredParameters(model.weight):
        assert model.weight.isfinite().all()
    with pytest.raises(ConfigError, match=r"parameter 'weight' is torch.float64"):
        deepzero.initialize(model=model, config=config(stage=3))
