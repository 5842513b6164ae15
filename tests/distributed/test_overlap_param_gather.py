"""``zero.overlap_param_gather``: parameters travel while the program goes on, and who reads one reads the new one."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import deepzero
from deepzero.config.strict import ConfigError
from deepzero.config.zero import ZeroConfig
from deepzero.runtime.zero.overlap_param_gather import UNDER_WAY, HiddenParameter
from tests.distributed.pool import on_ranks, sampled
from tests.distributed.training import (
    WHOLE,
    WIDTH,
    check_same_bits,
    config,
    make_batch,
    make_model,
    one_step,
    scripted,
    start,
)

OVERLAP = {"overlap_param_gather": True}
ON_HOST = {"offload_optimizer": {"device": "cpu"}}
HALF = {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}
LATE = {"offload_optimizer": {"device": "cpu", "delayed_update": True, "delay_after_steps": 1}}
FP16 = {"fp16": {"initial_scale_power": 16, "hysteresis": 1}}  # its first step overflows


def twins(precision, stage, zero, **fixed):
    """The same run without and with, calm and under chaos."""
    more = {"precision": precision, "stage": stage, **fixed, **(FP16 if precision == "fp16" else {})}
    zero = {**(WHOLE), **zero}
    yield config(bucket=1500, zero=zero, **more)
    for bucket, chaos in ((1500, None), (200, 7)):
        yield config(bucket=bucket, chaos=chaos, overlap=chaos is None, zero={**OVERLAP, **zero}, **more)


WHERE = {"device": {}, "host": ON_HOST, "half": HALF, "late": LATE}
OFTEN = [
    (2, "bf16", 1, 1, "device"), (2, "fp16", 2, 1, "host"), (3, "fp32", 1, 3, "half"), (4, "bf16", 2, 1, "late"),
    (2, "fp16", 3, 3, "late"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("world", "precision", "stage", "accumulation", "where"),
    sampled(OFTEN, (2, 3, 4), ("bf16", "fp32", "fp16"), (1, 2, 3), (1, 3), WHERE),
)
def test_same_bits(ranks, world, precision, stage, accumulation, where):
    cases = list(twins(precision, stage, WHERE[where], gradient_accumulation_steps=accumulation))
    check_same_bits(ranks, cases, 4, world)


# ---- who reads between two steps -------------------------------------------------------------------------------------


class Scale(torch.autograd.Function):
    """A custom function, into which torch hands its arguments without asking their class."""

    @staticmethod
    def forward(ctx, weight):
        with torch._C.DisableTorchFunctionSubclass():  # as C++ code would
            return weight * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x * Scale.apply(self.weight)


def model_with_everything():
    """With attention, whose fast path and training path read its children's parameters."""
    model = make_model()
    model.blocks.append(nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True))
    model.blocks.append(Scaled())
    return model


def data(seed=5):
    return make_batch(seed, 2)


def saved(write, value):
    file = io.BytesIO()
    write(value, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def in_eval_mode(engine):
    engine.eval()
    with torch.no_grad():
        out = engine.module(*data())
    engine.train()
    return out


def written(engine):
    with torch.no_grad():
        engine.module.norm.weight.mul_(1.25)
    return engine.module.norm.weight.detach().clone()


@torch.no_grad()
def broadcast(param):
    torch.distributed.broadcast(param, 0)
    return param.detach().clone()


def handed_on(engine):
    """A collective begins, which takes the parameter's memory without asking its class."""
    weight = engine.module.norm.weight
    torch.distributed.P2POp(torch.distributed.isend, weight, 0)
    return [type(weight) is nn.Parameter]


def total(weights: list[torch.Tensor]):
    return weights[0].sum() + weights[1].sum()


READERS = {
    "state_dict": lambda e: e.module.state_dict(),
    "sum": lambda e: [param.sum() for param in e.module.parameters()],
    "data": lambda e: [param.data.clone() for param in e.module.parameters()],
    "foreach": lambda e: torch._foreach_mul(list(e.module.parameters()), 2.0),
    "vector": lambda e: nn.utils.parameters_to_vector(e.module.parameters()),
    "numpy": lambda e: torch.from_numpy(e.module.head.weight.detach().float().numpy().copy()),
    "aten": lambda e: torch.ops.aten.mul.Tensor(e.module.head.weight, 2),
    "forward": lambda e: e.module(*data()),
    "submodule": lambda e: e.module.blocks[1](torch.ones(1, WIDTH, dtype=e.zero.dtypes.compute)),
    "forward of a submodule": lambda e: e.module.norm.forward(torch.ones(1, WIDTH, dtype=e.zero.dtypes.compute)),
    "attention": lambda e: e.module.blocks[2](torch.ones(1, 3, WIDTH, dtype=e.zero.dtypes.compute)),
    "eval": in_eval_mode,
    "deepcopy": lambda e: copy.deepcopy(e.module).state_dict(),
    "deepcopy of one": lambda e: copy.deepcopy(e.module.head.weight),
    "copy of one": lambda e: copy.copy(e.module.head.weight),
    "save": lambda e: saved(torch.save, e.module).state_dict(),
    "pickle": lambda e: pickle.loads(pickle.dumps(e.module)).state_dict(),
    "ema": lambda e: torch.optim.swa_utils.AveragedModel(e.module).module.state_dict(),
    "functional": lambda e: torch.func.functional_call(e.module, dict(e.module.named_parameters()), data()),
    "inference": lambda e: torch.inference_mode()(lambda: e.module(*data()).clone())(),
    "list": lambda e: [next(iter(e.module.head.weight)).clone(), e.module.norm.weight.tolist()],
    "master": lambda e: deepzero.utils.safe_get_full_fp32_param(e.module.head.weight),
    "engine's state": lambda e: e.module_state_dict(),
    "hash": lambda e: e.params_sha256(),
    "offload_states": lambda e: (e.offload_states(), e.reload_states(), e.module.state_dict())[2],
    "bit16_groups_flat": lambda e: [flat.clone() for flat in e.optimizer.bit16_groups_flat],
    "broadcast": lambda e: broadcast(e.module.norm.weight),
    "handed to torch": handed_on,
    "write": written,
    "scripted function": lambda e: scripted(total)([e.module.head.weight, e.module.norm.weight]),
}


def alike(a, b):
    """The same bits, in whatever container."""
    if torch.is_tensor(a):
        return a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    return len(a) == len(b) and all(map(alike, a, b)) if isinstance(a, (list, tuple)) else a == b


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=pytest.mark.exhaustive)])
@on_ranks()
def test_every_reader_gets_new_values(rank, world, precision):
    more = {"precision": precision, "bucket": 2000, "chaos": 3}
    plain, engine = (start(model_with_everything(), stage=2, zero=zero, **more) for zero in ({}, OVERLAP))
    wrong = []
    for step, (name, read) in enumerate(READERS.items()):
        one_step(plain, rank, world, step)
        one_step(engine, rank, world, step)
        hidden = [param for param in engine.module.parameters() if type(param) is HiddenParameter]
        if len(hidden) != len(list(engine.module.parameters())):
            wrong.append(f"{name}: {len(hidden)} parameters were under way before it")
        if not alike(read(engine), read(plain)):
            wrong.append(name)
    assert wrong == [], wrong
    assert engine.params_sha256() == plain.params_sha256()
    one_step(engine, rank, world)
    engine.destroy()
    assert not under_way(engine) and all(type(param) is nn.Parameter for param in engine.module.parameters())
    start(engine.module, stage=1, zero=OVERLAP)  # a second engine


@on_ranks()
def test_set_leaves_the_flat_buffer_as_without_the_overlap(rank, world):
    """Torch tells no subclass of ``set_``; what it wrote was lost when the bucket had arrived."""
    engine = start(make_model(), stage=2, precision="bf16", zero=OVERLAP)
    one_step(engine, rank, world)
    weight = engine.module.norm.weight
    assert type(weight) is HiddenParameter
    with torch.no_grad():
        weight.set_(torch.full_like(weight, 0.5))
    assert weight.tolist() == [0.5] * WIDTH
    with pytest.raises(RuntimeError, match=r"'norm.weight' has left ZeRO's flat buffer"):
        one_step(engine, rank, world)


def under_way(engine):
    return [bucket for bucket in engine.zero.stage._under_way if bucket in UNDER_WAY]


ALIASES = {
    "view": lambda m: m.head.weight.data.view(-1),
    "numpy": lambda m: m.norm.weight.detach().numpy(),
    "dlpack": lambda m: torch.from_dlpack(m.norm.weight.detach()),
    "storage": lambda m: m.norm.weight.untyped_storage(),
    "graph": lambda m: m.head.weight.t().sin(),
}


@on_ranks()
def test_no_step_ends_early_while_somebody_holds_an_alias(rank, world):
    """Nor where compiled code could read, or a parameter has a class of its own."""
    engine = start(make_model(), stage=2, precision="fp32", bucket=700, chaos=3, zero=OVERLAP)
    model = engine.module
    for name, alias in ALIASES.items():
        held = alias(model)
        one_step(engine, rank, world)
        assert not under_way(engine), name
        del held
        one_step(engine, rank, world)
        assert under_way(engine), name
    address = model.head.weight.data_ptr()
    one_step(engine, rank, world)
    assert model.head.weight.data_ptr() == address
    engine.destroy()
    model = make_model()
    model.blocks[0].compile(backend="eager")
    engine = start(model, stage=2, bucket=700, zero=OVERLAP)
    one_step(engine, rank, world)
    assert not under_way(engine)
    engine.destroy()

    class Own(nn.Parameter):
        pass

    model = make_model()
    model.norm.weight = Own(model.norm.weight)
    engine = start(model, stage=1, bucket=700, zero=OVERLAP)
    one_step(engine, rank, world)
    assert type(model.norm.weight) is Own and under_way(engine)


@on_ranks()
def test_a_module_waits_for_its_own_bucket(rank, world):
    """Buckets leave in the order of use, each as soon as it is stepped on; and are waited for one by one."""
    engine = start(make_model(), stage=2, bucket=700, zero=OVERLAP)
    one_step(engine, rank, world)
    engine.ledger.trace = True
    engine.module.embed(torch.zeros(1, dtype=torch.long))
    buckets = engine.zero.groups[0].layout.buckets
    last = f"bucket {len(buckets) - 1}"
    assert [(e.what, e.where) for e in engine.ledger.events] == [("wait", last)]
    assert len(under_way(engine)) == len(buckets) - 1
    engine.ledger.events = []
    one_step(engine, rank, world)
    events = [(e.what, e.where) for e in engine.ledger.events if e.kind == "parameters.all_gather" or e.what == "step"]
    assert events[: len(buckets) - 1] == [("wait", f"bucket {k}") for k in reversed(range(len(buckets) - 1))]
    sent = [("launch", f"bucket {k}") for k in reversed(range(len(buckets)))]
    assert events[len(buckets) - 1 :] == [*sent, ("step", "")]
    engine.module.embed.weight.requires_grad_(True)  # a question about metadata
    assert len(under_way(engine)) == len(buckets)


def test_stage_0_has_nothing_to_overlap():
    with pytest.raises(ConfigError, match=r"overlap_param_gather.*stage=0"):
        ZeroConfig(stage=0, overlap_param_gather=True)


# ---- stage 3: the first buckets of the next forward pass are on their way, or here, between two steps ----------------


def evaluated(engine):
    with torch.no_grad():
        return engine(*data())


@torch.no_grad()
def gathered(engine, modify=False):
    weights = [engine.module.embed.weight, engine.module.head.weight]
    with deepzero.zero.GatheredParameters(weights, modifier_rank=0 if modify else None):
        if modify:
            weights[0].mul_(1.25)
        return [weight.detach().clone() for weight in weights]


def changed(engine):
    """A module that was the first is used no more: what was fetched for it is for nothing."""
    engine.module.blocks.insert(0, engine.module.blocks.pop(-1))


def given(engine, value=1.5):
    weight = engine.module.embed.weight
    deepzero.utils.safe_set_full_fp32_param(weight, torch.full(weight.shape, value))


BETWEEN = {
    "evaluate": evaluated,
    "evaluate twice": lambda e: (evaluated(e), evaluated(e)),
    "infer": lambda e: torch.inference_mode()(lambda: e(*data()).clone())(),
    "read": gathered,
    "write": lambda e: gathered(e, modify=True),
    "write, and read the master": lambda e: (gathered(e, modify=True), READERS["master"](e)),
    "set": given,
    "state": lambda e: e.module_state_dict(),
    "hash": lambda e: e.params_sha256(),
    "offload_states": lambda e: (e.offload_states(), e.reload_states()),
    "discard": lambda e: e.discard_gradients(),
    "a pass that is dropped": lambda e: (e(*data()), e.discard_gradients()),
    "another order": changed,
}


@pytest.mark.parametrize(
    ("precision", "place"),
    sampled([("bf16", "device"), ("fp32", "device")], ("bf16", "fp32"), ("device", "host"), slow=[("bf16", "host")]),
)
@on_ranks()
def test_what_is_fetched_under_the_step_holds_what_the_program_leaves(rank, world, precision, place):
    where = WHERE[place]
    more = {"precision": precision, "bucket": 1500, "chaos": 3}
    plain, engine = (start(make_model(), stage=3, zero={**WHOLE, **where, **zero}, **more) for zero in ({}, OVERLAP))
    for each in (plain, engine):
        one_step(each, rank, world)
    for step, (name, act) in enumerate(BETWEEN.items(), 1):
        one_step(plain, rank, world, step)
        one_step(engine, rank, world, step)
        assert engine.stage.coordinator.live, f"nothing is here before {name}"
        sent = [each.ledger.last_step for each in (plain, engine)]
        assert sent[0] == sent[1], name
        assert alike(act(engine), act(plain)), name
    one_step(plain, rank, world)
    one_step(engine, rank, world)
    assert engine.params_sha256() == plain.params_sha256()
    engine.destroy()
    assert all(type(param) is nn.Parameter for param in engine.module.parameters())


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@on_ranks()
def test_a_write_behind_a_fetch_is_refused(rank, world, precision):
    """On every rank alike, before the model computes with what was sent; behind an evaluation nothing has been."""
    engine = start(make_model(), stage=3, precision=precision, bucket=700, zero={**WHOLE, **OVERLAP})
    one_step(engine, rank, world)
    one_step(engine, rank, world)
    gathered(engine, modify=True)  # this one is permitted
    one_step(engine, rank, world)
    evaluated(engine)
    with torch.no_grad():
        engine.module.embed.weight.ds_tensor.mul_(2)
    one_step(engine, rank, world)
    with torch.no_grad():
        engine.module.embed.weight.ds_tensor.mul_(2)
    with pytest.raises(deepzero.zero.PartitionedUseError, match="written between two steps"):
        one_step(engine, rank, world)


@on_ranks()
def test_frozen_weights_are_fetched_too_but_not_what_the_program_holds(rank, world):
    engines = []
    for zero in ({}, OVERLAP):
        model = make_model()
        model.embed.weight.requires_grad_(False)  # its bucket is the first that is used
        engines.append(start(model, stage=3, precision="bf16", bucket=700, zero={**WHOLE, **zero}))
    for engine in engines:
        one_step(engine, rank, world)
        one_step(engine, rank, world)
        first = engine.module.embed.weight._record.bucket
        assert (first.key in engine.stage.coordinator.live) is (engine is engines[1])
        with deepzero.zero.GatheredParameters(engine.module.embed.weight):
            one_step(engine, rank, world)
        one_step(engine, rank, world)
    assert len({engine.params_sha256() for engine in engines}) == 1
