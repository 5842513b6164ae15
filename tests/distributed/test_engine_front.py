"""The engine's front door, and what happens to those who misuse it."""

import base64
import contextlib
import io
import sys
import traceback
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import deepzero
from deepzero.comm import process_group
from deepzero.compat.lr_schedules import WarmupLR
from deepzero.config.engine import OptimizerConfig
from deepzero.runtime import consistency
from deepzero.runtime.consistency import RankMismatchError
from deepzero.runtime.optimizers import build_optimizer
from tests.distributed.pool import on_ranks, sampled
from tests.distributed.training import (
    SGD,
    WHOLE,
    TinyModel,
    check_alike,
    config,
    go,
    log_lines,
    make_batch,
    make_model,
    my_micro_batches,
    one_step,
    scripted,
    start,
    step_from,
    step_on,
)


@pytest.mark.parametrize(("stage", "instead"), [(2, r"with zero\.stage=1 once"), (3, "which is there to avoid")])
@on_ranks()
def test_misuse(rank, world, stage, instead):
    engine, several = start(make_model(), stage=stage), torch.ones(3, requires_grad=True)
    engine.backward(engine(*make_batch(0, 2)))
    with pytest.raises(RuntimeError, match=r"engine\.step"):
        engine.optimizer.step()
    with pytest.raises(RuntimeError, match=instead), engine.no_sync():
        pass
    unfit = {r"shape \(3,\)": several * 2, "requires_grad=False": torch.ones(()), "got dict": {"loss": several}}
    for call in (engine.backward, engine.scale):
        for got, loss in unfit.items():
            with pytest.raises(ValueError, match=f"{call.__name__} needs a scalar loss that requires grad, .*{got}"):
                call(loss)
    engine.step()


@pytest.mark.parametrize("stage", [0, 1, 2])
@on_ranks()
def test_a_step_without_any_backward_pass_is_refused(rank, world, stage):
    engine = start(make_model(), stage=stage, gradient_accumulation_steps=2)
    batch = make_batch(0, 2)
    before = engine.params_sha256()
    with pytest.raises(RuntimeError, match=rf"no backward pass has run on rank {rank} since optimizer step 0"):
        engine.step()
    assert (engine.micro_steps, engine.params_sha256()) == (0, before)
    step_on(engine, *batch)
    engine.step()  # one backward pass is enough for a step of two micro-batches
    assert engine.was_step_applied() and engine.params_sha256() != before
    with pytest.raises(RuntimeError, match="since optimizer step 1"):
        engine.step()
    step_on(engine, *batch)
    assert (engine.micro_steps, engine.global_steps) == (3, 1)


@on_ranks()
def test_what_trains_in_no_group_computes_in_the_same_precision(rank, world):
    for stage in (0, 2, 3):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        settings = config(stage=stage, precision="bf16")
        engine, *_ = deepzero.initialize(model=model, model_parameters=model[0].parameters(), config=settings)
        step_from(engine, engine(torch.ones(2, 4, dtype=torch.bfloat16)).sum())
        assert engine.was_step_applied() and model[1].weight.dtype == torch.bfloat16


@on_ranks()
def test_what_others_ask(rank, world):
    settings = config(stage=2, precision="bf16", steps_per_print=7, gradient_accumulation_steps=3)
    engine, _, loader, _ = deepzero.initialize(model=make_model(), config=settings, training_data=Numbers())
    assert isinstance(engine, deepzero.DeepSpeedEngine) and engine.training_dataloader is loader
    later, _, none, _ = deepzero.initialize(model=make_model(), config=settings, collate_fn=len)
    assert none is None and set(later.deepspeed_io(Numbers())) == {2}
    with pytest.raises(deepzero.ConfigError, match=r"route='trian'\): routes are train, eval, predict"):
        later.deepspeed_io(Numbers(), route="trian")
    with pytest.raises(deepzero.ConfigError, match="each of 2 ranks would train on the same samples"):
        later.deepspeed_io(Stream())
    assert start(make_model(), optimizer=SGD).get_mom() == [0]
    assert start(make_model()).training_dataloader is None
    assert (engine.fp16_enabled(), engine.bfloat16_enabled(), engine.zero_optimization()) == (False, True, True)
    assert (engine.get_batch_info(), engine.steps_per_print()) == ((12, 2, 3), 7)
    assert (engine.get_mom(), engine.get_data_parallel_rank()) == ([(0.9, 0.999)], rank)
    assert (engine.dp_world_size, engine.mp_world_size) == (2, 1)


@on_ranks()
def test_what_the_script_passes_wins_over_the_config(rank, world):
    model, schedule = make_model(), {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    given = {"lr_scheduler": lambda chosen: torch.optim.lr_scheduler.ConstantLR(chosen, factor=1.0)}
    with log_lines() as messages:
        engine, *_ = deepzero.initialize(
            model=model, optimizer=optimizer, **given, config=config(stage=1, scheduler=schedule)
        )
    assert engine.optimizer is optimizer and engine.get_lr() == [0.5]
    said = ["initialize was given optimizer=", "initialize was given lr_scheduler="]
    assert [m.partition(",")[0] for m in messages] == [said, []][rank]


@pytest.mark.parametrize(
    ("stage", "precision"), sampled([(0, "fp32"), (1, "bf16"), (2, "fp32"), (2, "bf16")], (0, 1, 2), ("fp32", "bf16"))
)
@on_ranks()
def test_loading_weights_reaches_the_masters(rank, world, stage, precision):
    engine = start(make_model(), stage=stage, precision=precision, bucket=800, optimizer=SGD)
    one_step(engine, rank, world)
    same = {name: value.clone() for name, value in engine.module_state_dict().items()}
    masters = [master.detach().clone() for group in engine.zero.groups for master in group.masters]
    engine.optimizer.param_groups[0]["lr"] = 0.0
    # Writing what is there already leaves the masters' lower bits; a new value is taken over and survives the step.
    engine.load_module_state_dict({"module": same})
    one_step(engine, rank, world, step=1)
    kept = [master for group in engine.zero.groups for master in group.masters]
    assert all(torch.equal(a, b) for a, b in zip(masters, kept, strict=True))
    other = {name: value * 3 for name, value in same.items()}
    engine.load_module_state_dict(other)
    one_step(engine, rank, world, step=2)
    assert all((torch.equal(engine.module_state_dict()[name], value) for name, value in other.items()))


@on_ranks()
def test_a_model_that_building_broke_off_with_is_refused(rank, world):
    """Out of memory on all ranks, in the middle of building: the model is lost, and is said to be; a new one trains."""
    for stage in (0, 2, 3):
        zero = {"stage3_param_persistence_threshold": 30} if stage == 3 else {}  # the frozen weight stays whole
        for place in (
            "zero.stage_1_and_2.ParamGroup.allocate_masters",
            "build.OptimizerShard",
            "zero.stage_1_and_2.take_values",
        ):
            model = make_model()
            model.norm.weight.requires_grad_(False)
            broken = mock.patch(f"deepzero.runtime.{place}", side_effect=torch.OutOfMemoryError("no room"))
            with broken, pytest.raises(torch.OutOfMemoryError, match="no room") as error:
                start(model, stage=stage, precision="bf16", zero=zero)
            assert sys.version_info < (3, 11) or "Build model and optimizer anew" in error.value.__notes__[0]
            with pytest.raises(deepzero.ConfigError, match=r"earlier deepzero.initialize left in pieces"):
                start(model, stage=stage, precision="bf16", zero=zero)
        one_step(start(make_model(), stage=stage), rank, world)


@pytest.mark.parametrize("stages", [(2, 2), (3, 1), (0, 3)])
@on_ranks()
def test_a_second_engine_takes_the_model(rank, world, stages):
    """The first lets go, with its values; a model that only contains it is refused."""
    first = start(make_model(), stage=stages[0], precision="bf16", zero=WHOLE if stages[0] == 3 else {})
    one_step(first, rank, world)
    with pytest.raises(deepzero.ConfigError, match="belongs to another engine"):
        start(nn.Sequential(first.module), stage=stages[0])
    before = first.params_sha256()
    with log_lines() as lines:
        second = start(first.module, stage=stages[1], precision="bf16")
    assert [("lets go of it" in line) for line in lines].count(True) == (rank == 0)
    assert second.params_sha256() == before
    with pytest.raises(RuntimeError, match=r"after engine\.destroy\(\)"):
        first.step()
    one_step(second, rank, world, 1)


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks()
def test_what_is_refused_takes_no_engine_its_model(rank, world, stage):
    """Settings, an optimizer, a schedule that cannot be used, of this rank or of another: the first engine goes on."""
    engine = start(make_model(), stage=stage, precision="bf16", zero=WHOLE)
    model, settings = engine.module, config(stage=stage)
    foreign = torch.optim.SGD(make_model().parameters(), lr=0.1)
    late = {"type": "WarmupLR", "params": {"warmup_num_steps": "many"}}
    for number, given in enumerate((
        {"config": {"gradient_cliping": 1}},
        {"config": config(stage=stage, train_batch_size=7)},
        {"config": config(stage=stage, scheduler=late)},
        {"config": settings, "optimizer": foreign},
        {"config": settings, "optimizer": engine.optimizer},
        {"config": settings, "mesh_param": 1},
        {"config": settings, "lr_scheduler": torch.optim.lr_scheduler.ConstantLR(foreign)},
        {"config": settings, "lr_scheduler": WarmupLR(foreign)},
        {"config": settings, "training_data": Stream()},
        {"config": settings if rank else {"gradient_cliping": 1}},
        {"config": settings, "model": model if rank else make_model()},
    )):  # fmt: skip
        with pytest.raises((deepzero.ConfigError, RankMismatchError)):
            deepzero.initialize(**{"model": model, **given})
        one_step(engine, rank, world, number)
    assert engine.global_steps == number + 1


@on_ranks()
def test_an_evaluating_engine_keeps_its_model_where_training_is_refused(rank, world):
    """And gives it to one that trains: it had frozen the parameters."""
    settings = config(stage=2)
    del settings["optimizer"]
    model = make_model()
    engine = deepzero.initialize(model=model, config=settings)[0]
    with pytest.raises(deepzero.ConfigError):
        deepzero.initialize(model=model, config=config(stage=2, optimizer={"type": "AdamW", "params": {"lr": -1.0}}))
    assert not any(param.requires_grad for param in model.parameters()) and not engine.state.destroyed
    one_step(start(model, stage=2), rank, world)
    assert engine.state.destroyed


@on_ranks()
def test_model_moved(rank, world):
    model = make_model()
    engine = start(model, stage=2, precision="bf16")
    engine.backward(engine(*my_micro_batches(0, rank, world, 2, 1)[0]))
    if rank == 0:
        model.norm.weight.data = model.norm.weight.data.float()
    said = r"'norm.weight' has left ZeRO's flat buffer: it is now .*torch\.float32"
    with pytest.raises(RuntimeError, match=said if rank == 0 else f"rank 0: parameter {said}"):
        engine.step()
    engine.destroy()
    model.float()
    one_step(start(model, stage=1), rank, world)


@pytest.mark.parametrize(
    ("stage", "zero"),
    [(0, {}), (1, {"overlap_param_gather": True}), (2, {}), (3, {})],  # 3: persistent parameters
)
@on_ranks()
def test_parameter_turned_where_it_lies(rank, world, stage, zero):
    """Its elements have the address that they had, and another order, or fewer of them are shown."""
    engine = start(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), stage=stage, zero=zero)
    weight = engine.module[1].weight
    step_from(engine, engine(torch.ones(2, 4)).sum())
    before = engine.params_sha256()
    for write, said in {
        lambda: weight.detach().t(): r"shape \(4, 4\) and strides \(1, 4\), not \(4, 4\) row by row",
        lambda: weight.detach()[:2]: r"shape \(2, 4\) and strides \(4, 1\), not \(4, 4\) row by row",
    }.items():
        kept, weight.data = weight.data, write()
        with pytest.raises(RuntimeError, match=f"'1.weight' was transposed or reshaped in ZeRO's flat buffer.*{said}"):
            engine.zero.groups[0].sync_masters_from_params()
        weight.data = kept
    with torch.no_grad():
        weight.t_()
    with pytest.raises(RuntimeError, match=r"'1.weight' was transposed or reshaped in ZeRO's flat buffer"):
        step_from(engine, engine(torch.ones(2, 4)).sum())
    with torch.no_grad():
        weight.t_()  # undone
    engine.zero_grad()
    assert engine.params_sha256() == before
    step_from(engine, engine(torch.ones(2, 4)).sum())


MOVES = {
    "half": lambda module: module.half(),
    "double": lambda module: module.double(),
    "to": lambda module: module.to("meta"),
    "to_empty": lambda module: module.to_empty(device="cpu"),
    "share_memory": lambda module: module.share_memory(),
}


@on_ranks()
def test_to_half_and_their_like_are_refused_in_all_stages(rank, world):
    """Whatever would move or cast a parameter is refused where it is called; what would not goes on."""
    found = []
    for stage, zero in [(0, {}), (2, {}), (3, {}), (3, WHOLE)]:
        model = make_model()
        model.register_buffer("plain", torch.ones(3, dtype=torch.float64))
        engine = start(model, stage=stage, precision="bf16", zero=zero)
        before, messages = engine.params_sha256(), set()
        for name, move in MOVES.items():
            for part in (engine, model, model.blocks[1]):
                with pytest.raises(RuntimeError, match=r"belongs to an engine: model.to\(\), .half\(\)") as error:
                    move(part)
                messages.add((name, str(error.value)))
        # Where parameters are already; the buffer follows, the parameters stay.
        assert model.to("cpu") is model and engine.bfloat16() is engine and model.plain.dtype == torch.bfloat16
        assert engine.params_sha256() == before
        for module in (engine, nn.Linear(2, 2).half()):
            module.to("cpu")
        one_step(engine, rank, world)
        engine.destroy()
        assert model.float().norm.weight.dtype == torch.float32
        found.append(messages)
    assert all(messages == found[0] and len(messages) == 15 for messages in found)
    check_alike(found[0])


@on_ranks()
def test_a_checkpoint_without_a_folder(rank, world):
    """An empty name on one rank is refused on all; nothing is written into the current folder."""
    engine = start(make_model(), stage=1)
    before = sorted(Path().iterdir())
    for call in (engine.save_checkpoint, engine.load_checkpoint, engine.save_16bit_model):
        for folder in ("", " "):
            with pytest.raises(deepzero.CheckpointError, match=rf"{call.__name__}\('{folder}'\): no folder is named"):
                call(folder if rank == 1 else "somewhere")
    assert sorted(Path().iterdir()) == before


@on_ranks()
def test_steps_per_print(rank, world):
    engine = start(make_model(), stage=1, steps_per_print=2)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        go(engine, rank, world, 0, 4)
    assert [line.split(",")[0] for line in out.getvalue().splitlines()] == [["step=2", "step=4"], []][rank]


def with_a_frozen_weight(rank):
    model = make_model()
    model.norm.bias.requires_grad_(rank != 1)
    return {"model": model}


def with_another_buffer(rank):
    model = make_model()
    model.register_buffer("extra", torch.zeros(4 + rank))
    return {"model": model}


def with_another_state(rank):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    if rank:
        optimizer.state[model.norm.bias] = {"step": torch.tensor(3.0), "exp_avg": torch.zeros(24)}
    return {"model": model, "optimizer": optimizer}


DIFFERENT = {
    "config": (lambda rank: {"config": config(stage=1, gradient_clipping=1.0 + rank)},
               "gradient_clipping: 1.0 on rank 0, 2.0 on rank 1"),
    "shape": (lambda rank: {"model": TinyModel(hidden=38 if rank == 1 else 37)}, "(38, 24)"),
    "frozen": (with_a_frozen_weight, "trained=False"),
    "optimizer": (lambda rank: {"optimizer": lambda p: (torch.optim.AdamW if rank else torch.optim.SGD)(p, lr=0.1)},
                  "optimizer class: SGD on rank 0, AdamW on rank 1"),
    "lr": (lambda rank: {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1 * (rank + 1))},
           "optimizer group 0 lr: 0.1 on rank 0, 0.2 on rank 1"),
    "groups": (lambda rank: {"optimizer": lambda p: torch.optim.SGD(p[rank:], lr=0.1)}, "optimizer group 0 params"),
    "state": (with_another_state,
              "group 0 state: {} on rank 0, {'norm.bias': {'step': 3.0, 'exp_avg': (24,)}} on rank 1"),
    "schedule": (lambda rank: {"config": config(stage=1, scheduler={"type": "warmup_cosine"}), "total_steps": 9 + rank},
                 "lr_scheduler: Scheduler WarmupCosine(warmup_steps=0, total_steps=9, min_lr_ratio=0.1) on rank 0"),
    "given schedule": (lambda rank: {"lr_scheduler": torch.optim.lr_scheduler.ConstantLR if rank else None},
                       "lr_scheduler: NoneType on rank 0, ConstantLR on rank 1"),
    "buffer": (with_another_buffer, "buffer 0: 'extra' (4,) torch.float32 on rank 0, 'extra' (5,)"),
}  # fmt: skip


@pytest.mark.parametrize("what", DIFFERENT)
@on_ranks(3)
def test_ranks_that_differ_all_raise(rank, world, what):
    given, words = DIFFERENT[what]
    with pytest.raises(RankMismatchError) as error:
        deepzero.initialize(**{"model": make_model(), "config": config(stage=1), **given(rank)})
    assert words in str(error.value)


@on_ranks()
def test_what_a_group_holds_is_compared_by_value(rank, world):
    """A rate in a tensor by its number, which lies on each rank's own device; a function without its address."""
    own = [lambda step, n=n: n for n in range(rank + 1)][-1]
    rate = torch.tensor(0.5)
    grouped = lambda params: torch.optim.SGD([{"params": params, "rule": own}], lr=rate)
    engine = deepzero.initialize(model=make_model(), optimizer=grouped, config=config(stage=1))[0]
    assert consistency.describe(engine.config, engine.module, engine.optimizer)["optimizer group 0 lr"] == "0.5"
    record = one_step(engine, rank, world)
    rate.fill_(0.25)  # as a schedule does
    assert record.lr == 0.5
    engine.optimizer.param_groups[0]["lr"] = None  # as of optimizers that find their own
    with mock.patch.object(engine.zero.optimizer_shard, "step"):
        assert str(one_step(engine, rank, world).lr) == "nan"


@on_ranks()
def test_one_rank_cannot_start(rank, world):
    with pytest.raises(deepzero.ConfigError if rank else RankMismatchError) as error:
        start(make_model(), stage=1, train_batch_size=4 + rank)
    assert str(error.value).startswith(("" if rank else "could not start: rank 1: ") + "train_batch_size=5")


@on_ranks(3)
def test_rank_0s_values_win(rank, world):
    torch.manual_seed(rank)
    check_alike(start(TinyModel(), stage=2).params_sha256())


class SharedMemory(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.ones(4))
        self.b = nn.Parameter(self.a.data)


class Fused(nn.Module):
    """Two parameters of one matrix; by default its columns, which lie in one another's extent."""

    def __init__(self, one=lambda w: w[:, :3], two=lambda w: w[:, 3:]):
        super().__init__()
        whole = torch.arange(48.0).view(8, 6)
        self.one, self.two = nn.Parameter(one(whole)), nn.Parameter(two(whole))

    def forward(self, x):
        return (x @ torch.cat((self.one, self.two), 1)).sum()


@on_ranks()
def test_columns_of_one_matrix_are_two_parameters(rank, world):
    for stage in (1, 3):
        model = Fused()
        engine = start(model, stage=stage, optimizer=SGD)
        with deepzero.zero.GatheredParameters(list(model.parameters())):
            assert torch.equal(torch.cat((model.one, model.two), 1), torch.arange(48.0).view(8, 6))
        step_on(engine, torch.ones(2, 8))


@on_ranks()
def test_models_and_optimizers_that_cannot_be_partitioned(rank, world):
    for model, words in (
        (SharedMemory(), "'a' and 'b' share memory"),
        (Fused(lambda w: w[::2], lambda w: w[4:6]), "'one' and 'two' share memory"),
        (nn.ParameterList([torch.eye(3).to_sparse()]), "'0' is torch.sparse_coo; deepzero trains dense"),
        (nn.ModuleDict({"f": nn.Linear(2, 2, dtype=torch.float64)}), "'f.weight' is torch.float64.*with .float"),
        (nn.Linear(2, 2, dtype=torch.complex64), "complex64.*view_as_real"),
        (torch.inference_mode()(lambda: nn.Linear(2, 2))(), "'weight' was made in torch.inference_mode"),
        (nn.ModuleList([nn.Embedding(3, 2, max_norm=1.0)]), "module '0' has max_norm=1.0.*renormalise after"),
        (nn.parallel.DistributedDataParallel(make_model()), "model= is wrapped in DistributedDataParallel"),
        (nn.Sequential(nn.DataParallel(make_model())), "module '0' is wrapped in DataParallel.*what it wraps"),
        (nn.Sequential(scripted(nn.Linear(2, 2))), "module '0' is a RecursiveScriptModule: stage 3 fetches"),
    ):
        with pytest.raises(deepzero.ConfigError, match=words):
            start(model, stage=3 if "stage 3" in words else 1, optimizer=SGD)
    # A refusal leaves the model free: the corrected call works.
    model = make_model()
    with pytest.raises(deepzero.ConfigError):
        start(model, stage=1, scheduler={"type": "warmup_cosine", "params": {"warmup_steps": 1}})
    one_step(start(model, stage=1), rank, world)


@on_ranks()
def test_optimizers_that_do_not_fit(rank, world):
    model = make_model()
    named = make_model()  # torch's optimizers take names, too
    deepzero.initialize(model=named, model_parameters=named.named_parameters(), config=config(stage=1))[0].destroy()
    frozen = make_model().requires_grad_(False)
    own = lambda params: build_optimizer(OptimizerConfig("Adamm"), params)
    for arguments, words in (
        ({"model": model, "optimizer": torch.optim.LBFGS(model.parameters())}, "elementwise"),
        ({"model": model, "optimizer": torch.optim.SGD([torch.zeros(3)], lr=1.0)}, "not a parameter of the model"),
        ({"model": model, "optimizer": own}, "unknown optimizer 'Adamm'"),
        ({"model": model, "config": base64.b64encode(b'{"a": 1, "a": 2}').decode()}, "has 'a' twice in one object"),
        ({"model": 5}, "initialize needs model=, a torch.nn.Module; it got int"),
        ({"model": model, "model_parameters": [1, 2]}, "model_parameters holds int objects: give parameters"),
        ({"model": model, "model_parameters": []}, "nothing can be trained: model_parameters is empty"),
        ({"model": frozen}, "nothing can be trained: model has no parameter that requires a gradient"),
    ):
        with pytest.raises(deepzero.ConfigError, match=words) as error:
            deepzero.initialize(**{"config": config(stage=1), **arguments})
        places = [frame.name for frame in traceback.extract_tb(error.tb)]
        # Where deepzero has found it says nothing of a setting; where a program of the user's led to it does.
        assert "<lambda>" in places if arguments.get("optimizer") is own else places[-1] == "initialize"


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, i):
        return torch.full((4,), float(i)), i


class Stream(torch.utils.data.IterableDataset):
    """The same samples on every rank."""

    def __iter__(self):
        return iter(range(12))


@on_ranks()
def test_front_door(rank, world):
    model = nn.Linear(4, 1)
    settings = config(stage=2, precision="bf16", scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 4}})
    del settings["optimizer"]
    engine, optimizer, loader, scheduler = deepzero.initialize(
        model=model, optimizer=lambda params: torch.optim.SGD(params, lr=0.5), training_data=Numbers(), config=settings
    )
    assert optimizer is engine.optimizer and scheduler is engine.lr_scheduler and len(loader) == 12 // world // 2
    seen = []
    for x, index in loader:
        seen += index.tolist()
        step_from(engine, engine(x.bfloat16()).float().mean())
        assert engine.was_step_applied()
    assert engine.global_steps == len(loader) and engine.global_samples == 12
    assert model.weight.dtype == torch.bfloat16 and engine.get_lr()[0] > 0
    assert sorted(index for mine in process_group.all_gather_object(seen) for index in mine) == list(range(12))


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks()
def test_a_smaller_last_batch(rank, world, stage):
    """As many batches on every rank, as DeepSpeed has; the step of a smaller one is like any other's."""
    for drop_last, sizes in ((None, [4, 2]), (False, [4, 2]), (True, [4])):
        settings = config(stage=stage, train_micro_batch_size_per_gpu=4, dataloader_drop_last=drop_last)
        engine, _, loader, _ = deepzero.initialize(
            model=nn.Linear(4, 1), config=settings, training_data=torch.utils.data.Subset(Numbers(), range(11))
        )
        seen = []
        for x, index in loader:
            seen.append(len(index))
            step_from(engine, engine(x).mean())
            assert engine.was_step_applied()
        assert seen == sizes and len(loader) == len(sizes) == engine.global_steps
        check_alike(engine.params_sha256())
