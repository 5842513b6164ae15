"""``zero.Init``, existing and ``meta`` models, ``GatheredParameters``: what is whole when, and with which values."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import deepzero
from deepzero.comm import process_group
from deepzero.runtime.zero import partition_parameters
from deepzero.runtime.zero.partition_parameters import PartitionedParameter
from deepzero.zero import GatheredParameters, Init, PartitionedUseError, ZeroParamStatus
from tests.distributed.pool import on_ranks
from tests.distributed.training import (
    WHOLE,
    WIDTH,
    TinyModel,
    config,
    is_gathered,
    log_lines,
    make_model,
    one_step,
    start,
)


class PostInit(TinyModel):
    """Writes into children that are complete already, in four ways, and reads one."""

    def __init__(self):
        super().__init__()
        nn.init.normal_(self.blocks[0][1].weight, std=0.1)
        self.blocks[1][1].bias.data = self.blocks[0][1].bias.data.fill_(0.5) + 0.25
        with torch.no_grad():
            self.blocks[1][1].weight.mul_(2.0)
            self.blocks[1][3].weight.copy_(self.blocks[0][3].weight + 1)
            self.blocks[0][3].weight[2].zero_()
            kept = self.head.weight[5:7]
            nn.init.ones_(self.norm.weight)
            kept.fill_(2.0)
        self.scale = nn.Parameter(torch.full((), float(self.embed.weight.detach().std())))

    def forward(self, ids, labels):
        return super().forward(ids, labels) * self.scale


class Upper(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).T

    def right_inverse(self, weight):
        return weight.triu()


class Copies(TinyModel):
    """Repeats layers by ``copy.deepcopy``, as ``nn.Transformer`` does, and gives children other memory."""

    def __init__(self):
        super().__init__()
        self.norm.bias.requires_grad_(False)
        self.more = copy.deepcopy(nn.ModuleList([self.blocks, self.norm, self.head, self.embed]))
        row = self.head.weight.data[0]  # while it is there, the weight is whole
        self.again = copy.deepcopy(self.head)
        row.zero_()
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True), 2)
        self.square = nn.utils.parametrize.register_parametrization(nn.Linear(8, 8), "weight", Upper())
        self.turned = nn.Linear(8, 8)
        with torch.no_grad():
            self.turned.weight.t_()
            self.turned.bias.set_(copy.deepcopy(self.square.bias.data) * 2)


def values_of(model):
    with GatheredParameters(model.parameters()):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


@pytest.mark.parametrize("kind", ["plain", "post", "copies"])
@pytest.mark.parametrize("world", [2, 3])
@on_ranks(None)
def test_values_are_those_of_the_whole_model(rank, world, kind):
    classes = {"plain": TinyModel, "post": PostInit, "copies": Copies}
    torch.manual_seed(1)
    expected = values_of(classes[kind]())
    torch.manual_seed(1)
    with Init():
        model = classes[kind]()
    assert not any(is_gathered(p) for p in model.parameters())
    assert sum(p.ds_tensor.numel() for p in model.parameters()) < 0.8 * sum(p.numel() for p in model.parameters())
    assert kind != "copies" or (model.more[2].weight is model.more[3].weight and not model.more[1].bias.requires_grad)
    got = values_of(model)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in got)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@on_ranks()
def test_same_bits_with_and_without(rank, world, precision):
    results = []
    for how in ("stage 2", "no init", "init", "existing"):
        torch.manual_seed(3)
        stage = {"stage": 2} if how == "stage 2" else {"stage": 3, "zero": WHOLE}
        settings = config(**stage, precision=precision, bucket=1500)
        with Init(enabled=how == "init", config_dict_or_path=settings if how == "init" else None):
            model = PostInit()
        if how == "existing":
            Init(module=model)
        engine, *_ = deepzero.initialize(model=model, config=settings)
        records = [one_step(engine, rank, world, step) for step in range(3)]
        results.append(([(r.loss, r.grad_norm) for r in records], engine.params_sha256()))
    assert results == [results[0]] * 4


@on_ranks()
def test_from_meta(rank, world):
    torch.manual_seed(4)
    expected = nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 3))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.manual_seed(4)
    settings = config(stage=3, zero=WHOLE)
    del settings["optimizer"]
    engine, *_ = deepzero.initialize(model=model, optimizer=optimizer, config=settings)
    got = values_of(engine.module)
    assert all(torch.equal(got[n], p) for n, p in expected.named_parameters())
    engine.backward(engine(torch.ones(2, 7)).sum())
    engine.step()


@on_ranks(1)
def test_meta_without_values_is_refused(rank, world):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), Odd())
    with pytest.raises(deepzero.ConfigError, match=r"'1' .Odd. is on the meta device and has no reset_parameters"):
        Init(module=model)
    with torch.device("meta"):
        model = nn.Linear(3, 3)
    with pytest.raises(deepzero.ConfigError, match="is on the meta device"):
        start(model, stage=2)


@on_ranks()
def test_an_exception_leaves_torch_as_it_was(rank, world):
    linear, module = nn.Linear.__init__, nn.Module.__dict__.get("__init_subclass__")
    default = torch.get_default_dtype()
    with pytest.raises(ZeroDivisionError), Init(dtype=torch.bfloat16), Init():

        class Inner(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.ones(4))

        inner = Inner()
        assert inner.weight.ds_numel == 4 and inner.weight.dtype == torch.bfloat16
        with Init(dtype=torch.float32):  # a copy keeps its dtype, whatever the outer context's is
            assert copy.deepcopy(nn.Linear(2, 2)).weight.dtype == torch.float32
        _ = 1 / 0
    assert nn.Linear.__init__ is linear and nn.Module.__dict__.get("__init_subclass__") is module
    assert torch.get_default_dtype() is default
    plain, after = nn.Linear(2, 2), Inner()
    assert type(plain.weight) is nn.Parameter and type(after.weight) is nn.Parameter
    with Init(enabled=False):
        assert type(nn.Linear(2, 2).weight) is nn.Parameter
    with pytest.raises(deepzero.ConfigError, match="stage=2; set it to 3"):
        Init(config_dict_or_path={"train_batch_size": 2, "zero_optimization": {"stage": 2}})
    with pytest.raises(deepzero.ConfigError, match="remote_device='nvme'"):
        Init(remote_device="nvme")


@on_ranks()
def test_an_operation_that_raises_leaves_nothing_gathered(rank, world):
    """Nothing stays gathered after an operation that raises, though its traceback holds views."""

    def whole():
        return [layer for layer in layers if is_gathered(layer.weight)]

    layers = []
    with Init() as first:
        layers.append(nn.Linear(6, 4))
        before = layers[0].weight.detach().clone()
        with pytest.raises(RuntimeError, match="must match the size") as caught:
            layers[0].weight.data.copy_(torch.ones(5))
        with pytest.raises(ValueError, match=r"was given \(6, 4\).* give the module a new nn.Parameter"):
            nn.Linear(6, 4).weight.t_()
        assert not first._open and not whole() and caught.tb is not None
        assert torch.equal(layers[0].weight, before)
        layers[0].weight.data.fill_(3.0)
    assert all((value == 3.0).all() for name, value in values_of(layers[0]).items() if name == "weight")

    with Init():
        layer = nn.Linear(6, 4)
        held = layer.weight[1:3]
        nn.Linear(2, 2)  # another module is made meanwhile
        held.fill_(2.0)
    assert (values_of(layer)["weight"] == 2.0).sum().item() == 12

    with pytest.raises(KeyError), Init() as second:
        layers.append(nn.Linear(6, 4))
        kept = layers[1].weight[1:3]
        kept.fill_(2.0)
        raise KeyError
    assert not second._open and not whole()

    def lost(*_):
        raise RuntimeError("connection lost")

    context = Init()
    with pytest.raises(RuntimeError, match="connection lost"), context:
        layers += [nn.Linear(6, 4), nn.Linear(6, 4)]
        views = [layer.weight[1:3] for layer in layers[2:]]
        context.comm.broadcast = lost
    assert len(views) == 2 and not context._open and not whole()
    with Init():
        layers.append(nn.Linear(6, 4))
    assert values_of(layers[-1])["weight"].shape == (4, 6)


@on_ranks()
def test_copies_and_moves_behind_the_context(rank, world):
    """As peft copies the layers that it trains beside the frozen ones, and moves them to the device where they are."""
    with Init():
        layer = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6))
        layer[1].weight = nn.Parameter(torch.ones(6, 4))
        layer.append(layer[0])
    layer[0].weight.requires_grad_(False)
    copied = copy.deepcopy(layer)
    assert copied[2] is copied[0]
    weight = copied[0].weight
    assert copied.to(weight.device).float() is copied and copied[0].weight is weight and weight.to(weight) is weight
    assert torch.ones(2).to(tensor=weight).dtype == weight.dtype
    for move in (copied.half, lambda: weight.to(torch.bfloat16), lambda: weight.to(weight, copy=True)):
        with pytest.raises(PartitionedUseError, match=r"'Linear.weight' .* cannot be used"):
            move()
    for param, other in zip(layer.parameters(), copied.parameters(), strict=True):
        assert type(param) is type(other) and param.requires_grad is other.requires_grad
        assert isinstance(other, PartitionedParameter) == (param is not layer[1].weight) and param is not other
    with GatheredParameters(copied[0].weight, modifier_rank=0):
        copied[0].weight.data.fill_(rank + 3.0)
    before = values_of(layer)
    assert (values_of(copied)["0.weight"] == 3.0).all() and not (before["0.weight"] == 3.0).any()
    assert torch.equal(values_of(copied)["0.bias"], before["0.bias"])
    both = nn.ModuleList([layer, copied.requires_grad_()])
    engine = start(both, stage=3, zero={"stage3_param_persistence_threshold": 0})
    engine.backward(sum(one(torch.ones(2, 6)).sum() for one in both))
    engine.step()
    after = values_of(both)
    assert torch.equal(after["0.0.weight"], before["0.weight"]) and not (after["1.0.weight"] == 3.0).any()
    with pytest.raises(PartitionedUseError, match="cannot be copied"):
        copy.deepcopy(both)
    with pytest.raises(PartitionedUseError, match=r"cannot be used \(cpu\)"):  # of an alias values are asked for
        layer[0].weight.detach().cpu()


@pytest.mark.parametrize("stage", [0, 2])
@on_ranks()
def test_a_model_of_init_in_other_stages(rank, world, stage):
    """It keeps parameters whole: they are gathered, and rank 0 says so."""
    hashes = []
    with log_lines() as lines:
        for how in ("init", "plain", "copied", "copied whole"):
            torch.manual_seed(5)
            with Init(enabled=how != "plain"):
                model = PostInit()
            with GatheredParameters(model.parameters(), enabled=how == "copied whole"):
                model = copy.deepcopy(model) if how.startswith("copied") else model
            engine = start(model, stage=stage, precision="bf16", bucket=1500)
            assert all(type(param) is nn.Parameter for param in model.parameters())
            one_step(engine, rank, world)
            hashes.append(engine.params_sha256())
    assert hashes == [hashes[0]] * 4
    whole = start(make_model(), stage=3, zero=WHOLE)
    with pytest.raises(deepzero.ConfigError, match=r"'0\.embed\.weight' belongs to another engine"):
        start(nn.Sequential(whole.module), stage=stage)
    assert [f"zero stage {stage} keeps its parameters whole" in line for line in lines].count(True) == 2 * (rank == 0)


@on_ranks()
def test_skip_init(rank, world):
    """``skip_init`` gives memory to a module that was made on ``meta``: it is cut then."""
    to_empty = nn.Module.to_empty

    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.child = nn.utils.skip_init(nn.Linear, 6, 4)
            nn.init.constant_(self.child.weight, 2.0)

    with Init():
        layers = [nn.utils.skip_init(nn.Linear, 6, 4), Parent().child]
        with torch.device("meta"):
            large = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5))
        layers += list(large.to_empty(device="cpu"))
        for layer in layers:
            assert not any(is_gathered(p) for p in layer.parameters())
            nn.init.ones_(layer.bias)
    assert nn.Module.to_empty is to_empty
    assert type(nn.utils.skip_init(nn.Linear, 6, 4).weight) is nn.Parameter
    values = values_of(layers[1])
    assert bool((values["weight"] == 2).all() and (values["bias"] == 1).all())


@on_ranks()
def test_parameters_that_stay_whole(rank, world):
    """What DeepSpeed's scripts ask of a parameter is answered for those that stay whole, frozen ones too."""
    model = make_model()
    model.blocks[0][1].weight.requires_grad_(False)
    model.norm.bias.requires_grad_(False)
    engine = start(model, stage=3, zero={"stage3_param_persistence_threshold": 100})
    assert len({param.ds_id for param in model.parameters()}) == len(list(model.parameters()))
    frozen, cut = model.norm.bias, model.blocks[0][1].weight
    assert frozen.ds_persist and frozen.ds_status is ZeroParamStatus.AVAILABLE and not cut.ds_persist
    assert cut.ds_status is ZeroParamStatus.NOT_AVAILABLE and isinstance(frozen, nn.Parameter)
    kept = model.blocks[0][1].bias  # whole and trained: each rank updates its fragment
    trained = [param.ds_tensor.numel() for param in (kept, cut, model.embed.weight)]
    numels = [kept.numel(), cut.numel(), model.embed.weight.numel()]
    assert [sum(sizes) for sizes in zip(*process_group.all_gather_object(trained), strict=True)] == numels
    assert frozen.ds_shape == (24,) and frozen.ds_numel == 24 and torch.equal(frozen.ds_tensor, frozen)
    for some in ([cut, None], (None,), None):  # a layer without bias
        with GatheredParameters(some):
            assert is_gathered(cut) == (cut.ds_status is ZeroParamStatus.AVAILABLE) == bool(some and cut is some[0])
    with pytest.raises(TypeError, match="got a str"):
        GatheredParameters([cut, "bias"])
    with GatheredParameters(cut):
        for param in (cut, kept, frozen):
            for copied in (copy.deepcopy(param), copy.copy(param), pickle.loads(pickle.dumps(param))):
                assert type(copied) is nn.Parameter and torch.equal(copied, param) and not hasattr(copied, "_record")
                assert copied.requires_grad is param.requires_grad and copied.data_ptr() != param.data_ptr()
    state = engine.module_state_dict()
    assert state["head.weight"] is state["embed.weight"] and state["norm.bias"].shape == (24,)
    one_step(engine, rank, world)
    engine.destroy()
    assert all(type(param) is nn.Parameter for param in model.parameters())


@on_ranks()
def test_settings_that_contradict_or_do_nothing(rank, world):
    with pytest.raises(deepzero.ConfigError, match=r"given twice .config_dict_or_path, config."):
        Init(config={"train_batch_size": 2}, config_dict_or_path={"train_batch_size": 2})
    partition_parameters._warn_once.cache_clear()
    with log_lines() as lines:
        for _ in range(2):
            Init(remote_device="cpu", pin_memory=True)
    assert ["pin_memory=True" in line for line in lines].count(True) == (rank == 0)


@on_ranks()
def test_gathered_parameters_in_all_stages(rank, world):
    results = [gathered(rank, world, stage) for stage in (0, 2, 3)]
    assert results == [results[0]] * 3


def gathered(rank, world, stage):
    engine = start(make_model(), stage=stage, bucket=1500, zero=WHOLE, precision="bf16")
    model = engine.module
    weight, other = model.blocks[0][1].weight, model.norm.weight
    with GatheredParameters([weight, other], modifier_rank=1):
        if rank == 1:
            weight.data.fill_(0.25)
            with torch.no_grad():
                other.mul_(3)
    with GatheredParameters(weight), GatheredParameters(model.parameters()):
        assert weight.min().item() == weight.max().item() == 0.25
        assert other.min().item() == 3.0
    before = engine.params_sha256()
    with pytest.raises(KeyError), GatheredParameters(weight, modifier_rank=0):
        weight.data.fill_(7.0)
        raise KeyError
    # Whole parameters have been written; partitioned ones go back to what they were.
    assert (engine.params_sha256() == before) is (stage == 3)
    with GatheredParameters(weight, modifier_rank=0), torch.no_grad():
        weight.fill_(0.25)
    with GatheredParameters(weight, enabled=False):
        pass
    with pytest.raises(ValueError, match="modifier_rank=5"):
        GatheredParameters(weight, modifier_rank=5)
    with pytest.raises(TypeError, match="takes parameters"):
        GatheredParameters([weight.shape])
    with pytest.raises(TypeError, match=r"pass module.parameters"):
        GatheredParameters(model)
    record = one_step(engine, rank, world)
    return record.loss, record.grad_norm, engine.params_sha256()


@on_ranks()
def test_use_and_writes_without_gathering_are_refused(rank, world):
    engine = start(make_model(), stage=3, bucket=1500, zero=WHOLE)
    weight = engine.module.blocks[0][1].weight
    assert weight.shape == (37, 24) and weight.numel() == 37 * 24 and weight.dim() == 2 and len(weight) == 37
    assert "shape=(37, 24)" in repr(weight) and "NOT_AVAILABLE" in repr(weight)
    assert engine.module.state_dict()["blocks.0.1.weight"].shape == (37, 24)
    assert type(torch.zeros_like(weight)) is type(weight.new_ones(3)) is torch.Tensor
    assert torch.equal(torch.ones_like(weight), torch.ones(37, 24)) and torch.ones_like(weight).is_contiguous()
    assert torch.equal(torch.full_like(input=weight, fill_value=2.0), torch.full((37, 24), 2.0))
    assert torch.equal(weight.new_full((3,), 2.0), torch.full((3,), 2.0)) and torch.randint_like(weight, 3).max() < 3
    with Init():  # a value to fill with is read
        value = nn.ParameterList([nn.Parameter(torch.tensor(2.0), requires_grad=False)])[0]
        assert torch.equal(torch.full_like(value, value), torch.tensor(2.0))
    for fill in (lambda: torch.full_like(weight, value), lambda: weight.new_full((3,), fill_value=value)):
        with pytest.raises(PartitionedUseError, match=r"'ParameterList.0' .* cannot be used"):
            fill()
    assert weight.new_empty_strided((2,), (3,)).stride() == (3,) and torch.optim.Adagrad(engine.module.parameters())
    assert weight.ds_numel == 888 and weight.ds_shape == (37, 24) and isinstance(weight.ds_id, int)
    for use in (
        lambda: weight.sum(), lambda: weight @ torch.ones(24), lambda: nn.functional.linear(torch.ones(24), weight),
        lambda: weight[0], lambda: weight.tolist(), lambda: weight.numpy(), lambda: weight.data_ptr(),
        lambda: pickle.dumps(weight), lambda: copy.deepcopy(weight), lambda: weight.detach().sum(),
        lambda: weight.data.norm(), lambda: engine.module.state_dict()["blocks.0.1.weight"].sum(),
    ):  # fmt: skip
        with pytest.raises(PartitionedUseError, match=r"'blocks.0.1.weight' of shape \(37, 24\) is partitioned"):
            use()
    for write in (
        lambda: weight.data.zero_(), lambda: nn.init.normal_(weight), lambda: weight.data.__setitem__(0, 1.0),
        lambda: torch.add(torch.ones(37, 24), 1, out=weight.data),
    ):  # fmt: skip
        with pytest.raises(PartitionedUseError, match="cannot be written"):
            write()
    with pytest.raises(PartitionedUseError, match="would be lost"), GatheredParameters(weight):
        weight.data[:] = 1.0
    with pytest.raises(PartitionedUseError, match="would be lost"), GatheredParameters(weight), torch.no_grad():
        weight.add_(1.0)
    with pytest.raises(PartitionedUseError, match="would be lost"), GatheredParameters(weight):
        weight.data = weight.data.t()  # where it lies
    assert weight.ds_status is ZeroParamStatus.NOT_AVAILABLE and not is_gathered(weight)
    one_step(engine, rank, world)


@on_ranks()
def test_loading_saving_and_destroying(rank, world):
    source, hashes = {name: value.clone() for name, value in make_model(9).state_dict().items()}, []
    for stage in (2, 3):
        engine = start(make_model(), stage=stage, bucket=1500, zero=WHOLE, precision="bf16")
        engine.load_module_state_dict(source)
        state = engine.module_state_dict()
        assert list(state) == list(source)
        assert all(torch.equal(state[name].float(), source[name].bfloat16().float()) for name in source)
        one_step(engine, rank, world)
        hashes.append(engine.params_sha256())
        engine.destroy()
        engine.destroy()
        for refused in (engine.step, lambda: engine.backward(torch.ones((), requires_grad=True))):  # noqa: B023
            with pytest.raises(RuntimeError, match=r"after engine.destroy"):
                refused()
        assert all(type(p) is nn.Parameter for p in engine.module.parameters())
        assert not any(m._forward_pre_hooks for m in engine.module.modules())
        assert start(engine.module, stage=3, bucket=200, zero=WHOLE, precision="bf16").params_sha256() == hashes[-1]
    assert hashes[0] == hashes[1]
    for zero in (WHOLE, {}):
        model = make_model(9)
        model.blocks[0] = checkpoint_wrapper(model.blocks[0])  # its hooks give entries of a state_dict other names
        list(model.blocks[0].parameters())[-1].requires_grad_(False)
        model.norm.bias.requires_grad_(False)  # a hook changes its entry below
        frozen = [name for name, value in model.state_dict(keep_vars=True).items() if not value.requires_grad]
        model.register_state_dict_post_hook(lambda _, state, *__: state.update({k: v.data for k, v in state.items()}))
        double = lambda _, state, *__: state.update({"norm.bias": state["norm.bias"] * 2})
        model.norm.register_state_dict_post_hook(double) if not zero else None
        engine = start(model, stage=3, bucket=1500, zero=zero)
        state, trained = engine.module_state_dict(), engine.module_state_dict(exclude_frozen_parameters=True)
        expected = source if zero else {**source, "norm.bias": source["norm.bias"] * 2}
        assert list(state) == list(source) and all(torch.equal(state[name], expected[name]) for name in source)
        assert [name for name in state if name not in trained] == frozen
        memory = {
            param.data_ptr() for param in model.parameters() if not hasattr(param, "ds_tensor") or param.ds_persist
        }
        assert not any(value.data_ptr() in memory for value in state.values())
