"""DeepSpeed's front door beyond training: engines without an optimizer, its names on engine and optimizer."""

import copy
import gc
import inspect
import pickle
import weakref
from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn

import deepzero
from deepzero.comm import process_group
from deepzero.compat import front
from deepzero.compat.engine_getters import GETTERS, NOT_HERE
from deepzero.compat.optimizer_names import DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3
from deepzero.offload.cpu_adam import CPUAdam
from deepzero.utils import safe_get_full_fp32_param
from tests.distributed.pool import on_ranks
from tests.distributed.training import (
    SGD,
    WHOLE,
    as_predicted,
    check_alike,
    config,
    log_lines,
    make_batch,
    make_model,
    my_micro_batches,
    one_step,
    start,
)


def without_optimizer(**changes):
    return {key: value for key, value in config(**changes).items() if key != "optimizer"}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks()
def test_without_an_optimizer(rank, world, tmp_path, stage):
    """A reference model: same outputs, parameters and nothing else, no training; it takes a trained one's values."""
    batch = make_batch(0, 2)
    trained = start(make_model(seed=1), stage=stage, precision="bf16", zero=WHOLE)
    one_step(trained, rank, world)
    trained.save_checkpoint(tmp_path)

    schedule = {"type": "WarmupLR", "params": {}}  # it comes with many a config, and has nothing to move here
    settings = without_optimizer(stage=stage, precision="bf16", zero=WHOLE, scheduler=schedule)
    model, other = make_model(), make_model()
    other.head.weight.requires_grad_(False)
    with deepzero.zero.Init(enabled=stage == 3):
        cut = make_model()
    engine, optimizer, loader, scheduler = deepzero.initialize(model=model, config=settings)
    assert (optimizer, loader, scheduler, engine.get_lr(), engine.zero.groups) == (None, None, None, [], [])
    plain = make_model().bfloat16()
    assert torch.equal(engine(*batch), plain(*batch))
    assert torch.equal(deepzero.initialize(model=cut, config=settings)[0](*batch), plain(*batch))
    if stage == 3:
        held = sum(part.numel() for group in engine.zero.all_groups for part in group.parameter_storage)
        assert 0 < held < engine.model_numel / world * 1.2 and engine.zero.optimizer_shard.grad_S == []
    for call, words in ((lambda: engine.backward(engine(*batch)), "backward"), (engine.step, r"engine\.step\(\)")):
        with pytest.raises(AssertionError, match=rf"{words}: this engine evaluates only"):
            call()
    with pytest.raises(RuntimeError, match="does not require grad"):
        engine(*batch).backward()
    engine.load_checkpoint(tmp_path, load_module_only=True)
    with torch.no_grad():
        assert torch.equal(engine(*batch), trained(*batch))
    assert engine.params_sha256() == trained.params_sha256()
    engine.save_checkpoint(tmp_path, tag="evaluated")
    whole = engine._zero3_consolidated_16bit_state_dict()
    assert (whole is None) == (rank > 0) and (rank or whole.keys() == model.state_dict().keys())
    engine.destroy()
    assert all(param.requires_grad for param in model.parameters())
    evaluated, *_ = deepzero.initialize(model=other, config=settings)
    evaluated.load_checkpoint(tmp_path, tag="evaluated")
    check_alike((evaluated.params_sha256(), evaluated.params_sha256() == trained.params_sha256()))
    evaluated.destroy()
    assert [name for name, p in other.named_parameters() if not p.requires_grad] == ["embed.weight"]  # which is tied
    # A forgotten engine, and one that was never made, leave nothing frozen either.
    forgotten, *_ = deepzero.initialize(model=model, config=settings)
    assert not any(param.requires_grad for param in model.parameters())
    del forgotten
    gc.collect()
    assert all(param.requires_grad for param in model.parameters())
    broken = make_model()
    with mock.patch("deepzero.compat.deepspeed_engine.dress", side_effect=KeyError("late")), pytest.raises(KeyError):
        deepzero.initialize(model=broken, config=settings)
    assert all(param.requires_grad for param in broken.parameters())
    with pytest.raises(deepzero.ConfigError, match="left in pieces"):
        deepzero.initialize(model=broken, config=settings)
    training = start(make_model(seed=2), stage=stage)
    with pytest.raises(deepzero.ConfigError, match=r"another engine"):
        deepzero.initialize(model=training.module.blocks, config=settings)
    assert all(param.requires_grad for param in training.module.parameters())
    left, before = training.module, training.params_sha256()
    del training
    gc.collect()
    with pytest.raises(deepzero.ConfigError, match=r"let go of without engine\.destroy"):
        deepzero.initialize(model=left, config=settings)
    assert stage == 3 or start(copy.deepcopy(left), stage=stage).params_sha256() == before
    held = [weakref.ref(one) for one in (trained, trained.module, trained.module.embed.weight)]
    del trained
    gc.collect()
    assert [one() for one in held] == [None] * 3


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks()
def test_names_on_the_optimizer(rank, world, stage):
    """They follow the engine, and go with it."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    settings = config(stage=stage, precision="fp16", fp16={"initial_scale_power": 4, "hysteresis": 1}, zero=WHOLE)
    engine, returned, *_ = deepzero.initialize(model=model, optimizer=optimizer, config=settings)
    assert returned is optimizer is engine.optimizer and type(optimizer).__name__ == "SGD"
    inner = optimizer.optimizer
    assert inner is optimizer.optimizer and type(inner) is torch.optim.SGD and not hasattr(inner, "optimizer")
    assert inner.state is optimizer.state and inner.param_groups is optimizer.param_groups
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(inner)):
        assert type(copied) is torch.optim.SGD and copied.param_groups[0]["momentum"] == 0.9
        assert vars(copied).keys().isdisjoint(("_deepzero_engine", "_deepzero_order", "_deepzero_inner"))
    assert isinstance(optimizer, torch.optim.SGD) and repr(optimizer).startswith("SGD (")
    assert isinstance(optimizer, DeepSpeedZeroOptimizer) == (stage in (1, 2))
    assert isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3) == hasattr(optimizer, "parameter_offload")
    scaler = optimizer.loss_scaler
    assert (optimizer.overflow, scaler.cur_scale, scaler.cur_iter, scaler.dynamic) == (False, 16.0, 0, True)
    before = engine.params_sha256()
    engine.backward(engine(*make_batch(0, 2)) * float("inf"))
    engine.step()
    assert (optimizer.overflow, optimizer.loss_scale, scaler.cur_scale, scaler.cur_iter) == (True, 8.0, 8.0, 1)
    assert engine.params_sha256() == before and not engine.was_step_applied()
    engine.backward(engine(*my_micro_batches(0, rank, world, 2, 1)[0]))
    engine.allreduce_gradients()
    found = optimizer.averaged_gradients[0]
    whole = 1 if stage == 0 else world
    for param, mean in zip(model.parameters(), found, strict=True):
        gathered = process_group.all_gather_object(mean)[:whole]
        assert torch.cat(gathered).numel() == (getattr(param, "ds_numel", 0) or param.numel())
        assert mean.dtype == torch.float32
    means = torch.cat(found).double()
    square = process_group.gather_and_sum(means.square().sum().reshape(1), engine.device).item() / (world / whole)
    engine.step()
    assert square**0.5 / 8.0 == pytest.approx(optimizer._global_grad_norm, rel=1e-5)
    assert optimizer._global_grad_norm == engine.get_global_grad_norm() > 0 and not optimizer.overflow
    masters = {0: [], 3: "fp32_partitioned_groups_flat"}.get(stage, "single_partition_of_fp32_groups")
    for tensor in getattr(optimizer, masters) if masters else []:
        assert any(tensor is held for held in optimizer.param_groups[0]["params"]) and tensor in optimizer.state
    assert not hasattr(optimizer, "no_such_name") and optimizer.state_dict()["param_groups"][0]["lr"] == 0.1
    engine.destroy()
    assert type(optimizer) is torch.optim.SGD and not hasattr(optimizer, "overflow")
    assert vars(optimizer).keys().isdisjoint(("_deepzero_engine", "_deepzero_order", "_deepzero_inner"))


@on_ranks()
def test_names_on_the_engine(rank, world):
    engine = start(make_model(), stage=2, precision="bf16", bucket=800)
    model, optimizer = engine.module, engine.optimizer
    assert engine.blocks is model.blocks and engine.client_optimizer is engine.basic_optimizer is optimizer
    assert engine.param_groups is optimizer.param_groups and engine.defaults is optimizer.defaults  # for Fabric
    assert (engine.zero_reduce_bucket_size(), engine.optimizer_name()) == (800, "adamw")
    assert engine.dynamic_loss_scale() is False
    assert engine.zero_optimization_partition_gradients() and not engine.zero_optimization_partition_weights()
    assert engine.zero_offload_optimizer() is None and engine.zero_gather_16bit_weights_on_model_save()
    for name in GETTERS:
        getattr(engine, name)()
    for why, names in NOT_HERE.items():
        for name in names.split():
            with pytest.raises(AttributeError, match=f"the engine has no {name}: {why}"):
                getattr(engine, name)
    with pytest.raises(AttributeError, match="neither DeepSpeedEngine nor its module has an attribute 'nothing'"):
        _ = engine.nothing
    model.loss_scale, scaler = "the module's", vars(engine).pop("scaler")
    with pytest.raises(AttributeError, match="scaler"):
        _ = engine.loss_scale  # the engine's own property, whose fault is told
    engine.scaler = scaler
    held = weakref.ref(engine.stage)
    engine.destroy()
    engine.empty_partition_cache()
    assert held() is not None


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks()
def test_in_deepspeeds_place(rank, world, stage):
    """Behind ``import deepspeed``: masters are made of rounded values, a step may find a parameter frozen."""
    settings = config(stage=stage, precision="bf16", zero=WHOLE)
    plain = {name: param.detach().clone() for name, param in make_model().named_parameters()}
    with front.RoundedInit(config_dict_or_path=settings, enabled=stage == 3):
        model = make_model()
    engine, *_ = front.initialize(model=model, config=settings)
    for name, param in model.named_parameters():
        master = safe_get_full_fp32_param(param)
        assert torch.equal(master, master.bfloat16().float()), name
        assert stage == 3 or torch.equal(master, plain[name].bfloat16().float()), name
    assert isinstance(engine, deepzero.DeepSpeedEngine) and not engine.optimizer.needs_scaler()
    frozen = model.head.weight.requires_grad_(False)
    for micro_batch in my_micro_batches(0, rank, world, 2, 3):
        for _ in range(2):  # also of two passes in one step
            engine.backward(engine(*micro_batch))
            assert stage < 3 or all(param.ds_status.name == "NOT_AVAILABLE" for param in model.parameters())
            if stage == 3:  # hidden, and gathered until the step
                with pytest.raises(RuntimeError, match="whole on this rank"):
                    frozen.ds_tensor.data = frozen.ds_tensor
        engine.step()
    assert engine.was_step_applied() and not frozen.requires_grad
    as_predicted({kind: told for kind, told in engine.report()["communication"].items() if "parameters" in kind})
    with pytest.raises(AssertionError, match="scalar tensor"):
        engine.scale(torch.ones(2, requires_grad=True) * 2)
    engine.destroy()
    host = {"zero_optimization": settings["zero_optimization"] | {"offload_optimizer": {"device": "cpu"}}}
    untested, forced = "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"
    sgd, refused = torch.optim.SGD, deepzero.ConfigError
    cases = [(sgd, {}, None), (sgd, {untested: True}, None), (torch.optim.Adagrad, {untested: False}, None)]
    cases += [(sgd, {untested: False}, refused)]
    if stage:
        cases += [(sgd, {forced: True, untested: False} | host, deepzero.CheckpointError)]
        cases += [(sgd, {forced: False} | host, None), (CPUAdam, {forced: True} | host, None)]
    for kind, asked, error in cases:
        model = make_model()
        with pytest.raises(error, match=f"{next(iter(asked))}.*SGD") if stage and error else nullcontext():
            made = front.initialize(model=model, optimizer=kind(model.parameters(), lr=0.1), config=settings | asked)
            made[0].destroy()


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks()
def test_a_refused_call_in_deepspeeds_place_rounds_nothing(rank, world, stage):
    """Neither a model nor what an older engine has of it, which may be on the host."""
    model = make_model()
    before = [param.detach().clone() for param in model.parameters()]
    wrong = config(stage=stage, precision="bf16", train_batch_size=7)
    with pytest.raises(deepzero.ConfigError, match="train_batch_size"):
        front.initialize(model=model, config=wrong)
    assert all(map(torch.equal, before, model.parameters()))
    older = start(model, stage=stage, optimizer=SGD)
    values = older.params_sha256()
    with pytest.raises(deepzero.ConfigError, match="train_batch_size"):
        front.initialize(model=model, config=wrong)
    assert older.params_sha256() == values
    older.offload_states()
    engine, *_ = front.initialize(model=model, config=config(stage=stage, precision="bf16"))
    one_step(engine, rank, world)
    assert engine.was_step_applied()


@pytest.mark.parametrize("stage", [1, 2])
@on_ranks()
def test_when_gradients_are_reduced(rank, world, stage):
    """At once by hand, or two passes together: the bits of a step that does neither."""
    bits = []
    for way in ("plain", "by hand", "together"):
        engine = start(make_model(), stage=stage, optimizer=SGD, gradient_accumulation_steps=2)
        first, second = my_micro_batches(0, rank, world, 2, 2)
        if way == "together":
            with engine.coalesce_grad_reduction():
                for batch in (first, second):
                    engine.backward(engine(*batch))
                with pytest.raises(AssertionError, match="inside"):
                    engine.step()
                with pytest.raises(AssertionError, match="leave that first"), engine.coalesce_grad_reduction():
                    pass
            engine.set_gradient_accumulation_boundary(True)
        else:
            engine.backward(engine(*first))
            with pytest.raises(AssertionError, match="further micro-batches"):
                engine.allreduce_gradients()
            engine.step()
            engine.backward(engine(*second))
            if way == "by hand":
                with pytest.raises(deepzero.ConfigError, match="reduce_bucket_size"):
                    engine.allreduce_gradients(bucket_size=5)
                engine.allreduce_gradients(bucket_size=500_000_000)
        engine.step()
        bits.append((engine.global_steps, engine.params_sha256()))
        engine.destroy()
    assert bits[0] == bits[1] == bits[2]


@on_ranks()
def test_another_number_of_micro_batches(rank, world):
    """From the second step on: the bits of an engine that has it from the start, and the first step's values."""
    bits = []
    for late in (True, False):
        engine = start(make_model(), stage=2, precision="bf16", gradient_accumulation_steps=2 if late else 3)
        if late:
            engine.micro_steps += 2
            engine.set_train_batch_size(6 * world)
        assert (engine.train_batch_size(), engine.gradient_accumulation_steps()) == (6 * world, 3)
        one_step(engine, rank, world)
        bits.append((engine.global_steps, engine.params_sha256()))
    assert bits[0] == bits[1]
    engine.backward(engine(*make_batch(0, 2)))
    with pytest.raises(AssertionError, match="within an optimizer step"):
        engine.set_train_batch_size(2 * world)
    engine.set_gradient_accumulation_boundary(True)
    engine.step()
    engine.set_train_batch_size(2 * world)  # between two steps, though not after three micro-batches
    narrow = start(make_model(), stage=1, precision="bf16")
    with pytest.raises(AssertionError, match=r"the sum of 2 would be kept in torch\.bfloat16"):
        narrow.set_train_batch_size(4 * world)
    with pytest.raises(deepzero.ConfigError, match="train_batch_size"):
        narrow.set_train_batch_size(5)
    for size, words in ((0, "at least 1 seq"), (-3, "at least 1 seq"), (2.5, "an integer"), (True, "a number")):
        for refuses in (
            narrow.set_train_micro_batch_size,
            narrow.set_train_batch_size,
            partial(narrow.deepspeed_io, [1]),
        ):
            with pytest.raises(deepzero.ConfigError, match=words):
                refuses(size)
    narrow.set_train_micro_batch_size(7)
    assert narrow.get_batch_info() == (7 * world, 7, 1)


class Trivial:
    """A model-parallel unit of a run without any."""

    size = 1

    def get_model_parallel_world_size(self):
        return self.size


@on_ranks()
def test_arguments_of_initialize(rank, world):
    theirs = """args model optimizer model_parameters training_data lr_scheduler distributed_port mpu
    dist_init_required collate_fn config mesh_param config_params""".split()  # noqa: SIM905
    assert list(inspect.signature(deepzero.initialize).parameters)[: len(theirs)] == theirs
    made, other = make_model(), make_model()
    optimizer, several = torch.optim.SGD(made.parameters(), lr=0.5), Trivial()
    several.size = 2
    schedule = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(other.parameters(), lr=0.5))
    given = {"model": made, "optimizer": optimizer, "config": config(stage=1)}
    for wrong, words in (
        ({"mpu": several}, "tensor or pipeline parallelism"),
        ({"mpu": object()}, "tensor or pipeline parallelism"),
        ({"mesh_param": (2, 1)}, "no sequence parallelism"),
        ({"lr_scheduler": schedule}, "built for another optimizer"),
        ({"lr_scheduler": schedule, "optimizer": None, "config": without_optimizer()}, "nothing trains: neither"),
        ({"optimizer": "Adam"}, "must be a torch optimizer or a callable"),
        ({"model": None}, "initialize needs model="),
    ):
        with pytest.raises(AssertionError, match=words):
            deepzero.initialize(**{**given, **wrong})
    with log_lines() as messages:
        engine, *_ = deepzero.initialize(**given, mpu=Trivial(), model_parameters=nn.Linear(3, 4).parameters())
    assert engine.optimizer is optimizer and engine.optimizer_name() == "SGD"
    assert [m.partition(",")[0] for m in messages if "parameters" in m] == [
        "model_parameters= is ignored"][: 1 - rank]  # fmt: skip
    one_step(engine, rank, world)
    written = torch.optim.SGD(other.parameters(), lr=0.5)
    stepped = torch.optim.SGD(written.param_groups, lr=0.5)  # has the same groups, so that a schedule of one moves both
    schedule = torch.optim.lr_scheduler.ConstantLR(written, factor=0.5)
    engine, *_ = deepzero.initialize(model=other, optimizer=stepped, lr_scheduler=schedule, config=config(stage=1))
    assert engine.get_lr() == [0.25]
