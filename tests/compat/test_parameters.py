"""DeepSpeed's words for stage 3's parameters: what its users call on a parameter, ``Init`` and modules."""

import copy
import pickle
import tempfile

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepzero
from deepzero import utils, zero
from deepzero.comm import process_group
from deepzero.compat import zero_to_fp32
from deepzero.utils import safe_get_full_fp32_param
from deepzero.zero import GatheredParameters, OffloadStateTypeEnum, ZeroParamStatus
from tests.distributed.pool import on_ranks
from tests.distributed.training import WHOLE, config, is_gathered, make_model, one_step, start

AUTO = {
    **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping"), "auto"),
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "bf16": {"enabled": "auto"},
}


@on_ranks()
def test_verbs_on_a_parameter(rank, world):
    """``all_gather`` until ``partition``, before ``initialize`` and after; what was written counts when it is said."""
    with zero.Init():
        early = nn.Linear(6, 3)
    engine = start(make_model(), stage=3, zero={"stage3_param_persistence_threshold": 100}, bucket=300)
    late = engine.module.blocks[0][1]  # its bias is persistent
    before = late.weight.ds_tensor.clone()
    for layer in (early, late):
        params = [layer.weight, layer.bias]
        layer.weight.all_gather(async_op=True, hierarchy=1)
        layer.weight.all_gather_coalesced(params, safe_mode=True).wait()
        with pytest.raises(NotImplementedError, match="quantize=True"):
            layer.weight.all_gather_coalesced(params, quantize=True)
        with pytest.raises(NotImplementedError, match="keeps no whole value"):
            layer.weight.partition(params, free_data=False)
        assert all(p.ds_status is ZeroParamStatus.AVAILABLE for p in params)
        assert torch.isfinite(layer.weight).all() and layer.weight.ds_summary()["status"] == "AVAILABLE"
        layer.weight.partition(params, 1)
        assert layer.weight.ds_status is ZeroParamStatus.NOT_AVAILABLE and not is_gathered(layer.weight)
        layer.weight.all_gather()
        with torch.no_grad():
            layer.weight.fill_(rank + 2.0)
        layer.weight.partition(has_been_updated=True)
        with GatheredParameters(layer.weight):
            assert (layer.weight == 2.0).all()
        layer.weight.all_gather()
        with torch.no_grad():
            layer.weight.add_(0.0)
        with pytest.raises(RuntimeError, match="in-place modification"):
            layer.weight.partition()
        assert not is_gathered(layer.weight) and zero.is_zero_param(layer.weight)
    with pytest.raises(RuntimeError, match="would leave the ranks with different values"):
        late.bias.ds_tensor.data = late.bias.ds_tensor
    for layer in (early, late):  # an assignment is a write into the partition
        for param in (early.weight, early.bias) if layer is early else (late.weight,):
            param.ds_tensor.data = torch.full_like(param.ds_tensor.data, 7.0)
            with pytest.raises(RuntimeError, match="invalid for input of size"):
                param.ds_tensor.data = torch.zeros(param.ds_numel + 1)
            made = (param.ds_tensor * 2, copy.deepcopy(param.ds_tensor), pickle.loads(pickle.dumps(param.ds_tensor)))
            assert {type(one) for one in made} == {torch.Tensor} and (made[0] == 14).all() and (made[2] == 7).all()
        with GatheredParameters(layer.weight):
            assert (layer.weight == 7.0).all()
    assert late.bias.ds_persist and late.bias.ds_summary()["numel"] == late.bias.numel()
    late.weight.ds_active_sub_modules.clear()
    assert dist.get_world_size(late.bias.ds_process_group) == world and before.shape == late.weight.ds_tensor.shape
    with zero.unwrap_model_for_generation(engine) as model, torch.no_grad():
        model.eval()
        late(torch.ones(1, late.in_features))  # outside of a forward pass of the whole
        assert not torch.isnan(late.weight).any()
    one_step(engine.train(), rank, world)


@on_ranks()
def test_an_assignment_to_a_partition_reaches_the_master(rank, world):
    """Where that is another tensor: it is what the next step begins with, and what is saved."""
    sgd = {"type": "SGD", "params": {"lr": 0.0}}
    engine = start(make_model(), stage=3, precision="bf16", bucket=300, zero=WHOLE, optimizer=sgd)
    weight = engine.module.blocks[0][1].weight
    weight.ds_tensor.data = torch.full_like(weight.ds_tensor.data, 3.0)
    assert (safe_get_full_fp32_param(weight) == 3.0).all()
    one_step(engine, rank, world)
    with GatheredParameters(weight):
        assert (weight == 3.0).all()


@pytest.mark.parametrize("gathered", [True, False])
@on_ranks()
def test_weights_of_a_checkpoint_into_parameters_of_stage_3(rank, world, gathered):
    """``load_state_dict_from_zero_checkpoint`` fills what the program has gathered, and what it has not."""
    engine = start(make_model(), stage=3, zero={"stage3_param_persistence_threshold": 100}, bucket=300)
    folder = process_group.broadcast_object(tempfile.mkdtemp())
    engine.save_checkpoint(folder)
    before = engine.params_sha256()
    one_step(engine, rank, world)
    with GatheredParameters(engine.module.parameters(), enabled=gathered):
        zero_to_fp32.load_state_dict_from_zero_checkpoint(engine.module, folder)
    assert engine.params_sha256() == before
    one_step(engine, rank, world, 1)
    assert engine.params_sha256() != before


@pytest.mark.parametrize(
    ("stage", "precision", "dtype"), [(0, "bf16", "fp32"), (0, "fp32", "bf16"), (1, "fp32", "bf16")]
)
@on_ranks(1)
def test_gradients_accumulate_in_any_dtype(rank, world, stage, precision, dtype):
    engine = start(make_model(), stage=stage, precision=precision, data_types={"grad_accum_dtype": dtype})
    one_step(engine, rank, world)
    assert engine.was_step_applied()
    assert engine.zero.dtypes.accumulation == {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]


@on_ranks()
def test_init_takes_deepspeeds_keywords(rank, world):
    settings = {**AUTO, "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}
    everyone = dist.new_group(list(range(world)))
    for given in (
        {"config_dict_or_path": settings, "mem_efficient_linear": False},
        {"data_parallel_group": everyone, "zero_param_parallel_group": None},
        {"sequence_data_parallel_group": dist.group.WORLD, "zero_quantized_weights": False},
    ):
        with zero.Init(**given):
            assert nn.Linear(4, 4).weight.ds_process_group is dist.group.WORLD
    refused = {"zero_quantized_weights": True, "param_swapper": object(), "zero_param_parallel_group": everyone}
    for name, value in refused.items():
        with pytest.raises(deepzero.ConfigError, match=name):
            zero.Init(**{name: value})
        assert not hasattr(nn.Linear(2, 2).weight, "ds_id")
        zero.Init(enabled=False, **{name: value})
    alone = [dist.new_group([one]) for one in range(world)][rank]
    with pytest.raises(deepzero.ConfigError, match=r"all 2 ranks, and a group of 1"):
        zero.Init(data_parallel_group=alone)
    with pytest.raises(TypeError, match="no keyword zero_stage"):
        zero.Init(zero_stage=3)
    settings["zero_optimization"]["offload_param"] = {"device": "nvme"}
    with pytest.raises(deepzero.ConfigError, match="nvme"):
        zero.Init(config_dict_or_path=settings)


@on_ranks()
def test_an_engine_inside_init(rank, world):
    """Models and engines one after the other in one context; a context that is shut for a while."""
    settings, norms = config(stage=3, zero=WHOLE), []
    with zero.Init(config_dict_or_path=settings):
        for _ in range(2):
            with zero.Init(config_dict_or_path=settings):
                torch.manual_seed(1)
                model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
            engine, *_ = deepzero.initialize(model=model, config=settings)
            engine.backward(engine(torch.ones(2, 4)).sum())
            engine.step()
            norms.append(engine.get_global_grad_norm())
        zero.shutdown_init_context()
        plain = nn.Linear(2, 2)
        zero.restore_init_context()
        assert type(plain.weight) is nn.Parameter and zero.is_zero_param(nn.Linear(2, 2).weight)
    # Shut and not restored before they end: the program's own error comes through, and later ones are not affected.
    with pytest.raises(KeyError, match="mine"), zero.Init(), zero.Init():
        zero.shutdown_init_context()
        raise KeyError("mine")
    zero.restore_init_context()
    assert norms[0] == norms[1] > 0 and type(nn.Linear(2, 2).weight) is nn.Parameter


@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks()
def test_gradients_of_many_and_parameters_of_none(rank, world, stage):
    """A vectorised update; a frozen parameter, one without elements, tensors that are no parameters."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Bilinear(1, 1, 1, bias=False))
    model[1].weight = nn.Parameter(torch.empty(0, 8))
    model[0].bias.requires_grad_(False)
    engine, *_ = deepzero.initialize(
        model=model, model_parameters=model.parameters(), config=config(stage=stage, zero=WHOLE)
    )
    new = torch.arange(64.0).view(8, 8)
    for _ in range(2):
        engine.backward(engine.module[0](torch.ones(2, 8)).sum() + model[1].weight.sum())
        utils.safe_update_full_grad_vectorized(model.parameters(), lambda old, param: new if old.numel() else old)
        assert torch.equal(utils.safe_get_full_grad(model[0].weight), new)
        engine.step()
    assert not zero.z3_leaf_parameter(model[0].weight)
    assert model[1].weight.shape == (0, 8) and type(model[1].weight) is nn.Parameter
    for some in ([torch.ones(2), model[1].weight], (p for p in model.parameters()), []):
        with GatheredParameters(some, modifier_rank=0):
            pass
    for state in OffloadStateTypeEnum:
        engine.offload_states(include=[state], device=zero.OffloadDeviceEnum.cpu, pin_memory=False)
        away = set() if state is OffloadStateTypeEnum.contiguous_grad_buffer else {torch.device("cpu")}
        assert zero.get_state_devices(engine, state) in (away, {torch.device("cpu")})
        engine.reload_states()
        assert zero.get_state_devices(engine, state) == {torch.device("cpu")}


@on_ranks()
def test_tiled_linear(rank, world):
    """The same outputs and gradients as the layer that was cut, whole or in parts, with and without a bias."""
    for bias, cls in ((True, nn.Linear), (False, nn.Linear), (True, BiasApart)):
        torch.manual_seed(rank)
        whole = cls(23, 29, bias=bias)
        for param in whole.parameters():
            dist.broadcast(param.data, 0)
        kind = zero.TiledLinear if cls is nn.Linear else zero.TiledLinearReturnBias
        with zero.Init():
            tiled = kind(23, 29, bias, 3, 4, linear_cls=cls, init_linear=whole)
        assert tiled.in_parts == [0, 8, 16, 23] and tiled.out_parts == [0, 8, 15, 22, 29]
        assert tiled.linears[3][2].bias is None or tiled.linears[3][1].bias is None
        engine, *_ = deepzero.initialize(model=tiled, config=config(stage=3, zero=WHOLE, gradient_clipping=0.0))
        x = torch.rand(5, 23, generator=torch.Generator().manual_seed(0))
        expected, got = whole(x), engine(x)
        assert isinstance(expected, tuple) is isinstance(got, tuple)
        (expected, b), (got, c) = (out if isinstance(out, tuple) else (out, torch.zeros(29)) for out in (expected, got))
        assert torch.allclose(got, expected, atol=1e-6) and torch.allclose(b, c)
        (expected + b).pow(2).mean().backward()
        engine.backward((got + c).pow(2).mean())
        with torch.no_grad():
            row = utils.safe_get_full_grad(tiled.linears[1][2].weight)
        assert torch.allclose(row, whole.weight.grad[8:15, 16:23], atol=1e-6)
    with pytest.raises(RuntimeError, match="cannot be cut into 0 and 2 parts"):
        zero.TiledLinear(4, 4, in_splits=0, out_splits=2)
    with pytest.raises(ValueError, match="differs"):
        zero.TiledLinear(4, 4, init_linear=nn.Linear(4, 5))
    parts = zero.TiledLinear(4, 4, in_splits=2, out_splits=2, input_is_already_split=True, combine_out_splits=False)
    assert [out.shape[1] for out in parts(torch.ones(1, 4).chunk(2, -1))] == [2, 2]


class BiasApart(nn.Linear):
    """Leaves the addition of the bias to its caller."""

    def forward(self, input):
        return nn.functional.linear(input, self.weight), self.bias


def test_leaves_by_name():
    model = nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2)]))
    inner = model[1]
    assert zero.set_z3_leaf_modules(model, ["torch.nn.modules.container.ModuleList"]) == [inner]
    assert zero.get_z3_leaf_modules(copy.deepcopy(model))
    assert zero.unset_z3_leaf_modules(model, [nn.ModuleList]) == [inner]
    assert not zero.get_z3_leaf_modules(model) and zero.unset_z3_leaf_modules(model, [nn.Linear]) == []
    assert not utils.set_z3_leaf_modules(model, [nn.Conv2d], False)
    assert zero.set_z3_leaf_modules_by_name(model, ["1", "x"], raise_if_not_found=False) == ([inner], ["x"])
    assert zero.set_z3_leaf_modules_by_suffix(model, [".0"]) == ([inner[0]], [])
    assert zero.get_z3_leaf_modules(model) == [inner, inner[0]]
    with pytest.raises(ValueError, match="no module named x"):
        zero.set_z3_leaf_modules_by_name(model, ["0", "x"])
    with pytest.raises(ValueError, match="no module of Conv2d"):
        zero.unset_z3_leaf_modules(model, [nn.Conv2d])


def test_on_device():
    with zero.OnDevice(dtype=torch.bfloat16), zero.OnDevice(dtype=torch.float16, enabled=False):
        layer = nn.Linear(3, 3)
        assert layer.weight.is_meta and layer.weight.dtype == torch.bfloat16 and torch.ones(1, dtype=torch.int).is_meta
    with utils.OnDevice(dtype=torch.float64, device="cpu"):
        assert nn.Linear(3, 3).weight.dtype == torch.float64
    again = zero.OnDevice(dtype=torch.float16)
    for _ in range(2):
        with again, zero.OnDevice(torch.float64, "cpu"), again:
            assert torch.ones(1).is_meta and torch.ones(1).dtype == torch.float16
    assert torch.ones(1).dtype == torch.float32 and not torch.ones(1).is_meta
    with pytest.raises(TypeError), zero.OnDevice(torch.int64):
        pass
    assert torch.ones(1).dtype == torch.float32 and isinstance(again, zero.OnDevice)
