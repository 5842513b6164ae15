"""Models, optimizers and schedules of all kinds, resumed to the bit: in a new engine, and in one that went further."""

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules

import deepzero
from tests.distributed.checkpoints import engine_for, fingerprints, said, steps
from tests.distributed.pool import on_ranks
from tests.distributed.training import (
    LENGTH,
    VOCAB,
    WIDTH,
    TinyModel,
    config,
    log_lines,
    make_model,
    my_micro_batches,
    one_step,
    start,
)


class Special(TinyModel):
    """Frozen, unused, scalar, empty and half-frozen parameters; buffers that are saved and one that is not."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(VOCAB, 3)
        self.frozen.requires_grad_(False)
        self.blocks[0][1].bias.requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, ids, labels):
        self.calls += 1
        loss = super().forward(ids, labels) * self.scale + self.empty.sum()
        return loss + 1e-3 * self.frozen(nn.functional.one_hot(ids, VOCAB).to(loss.dtype)).float().square().mean()


class Normed(nn.Module):
    """Statistics that are each rank's own."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.norm = nn.BatchNorm1d(LENGTH * WIDTH)
        self.head = nn.Linear(LENGTH * WIDTH, VOCAB)

    def forward(self, ids, labels):
        return nn.functional.cross_entropy(self.head(self.norm(self.embed(ids).flatten(1))), labels[:, 0])


def build(what, stage):
    """An engine over the model, optimizer or schedule of this name."""
    torch.manual_seed(0)
    settings = config(stage=stage, bucket=900)
    kinds = {"special": Special, "normed": Normed}
    if what == "init":
        with deepzero.zero.Init(enabled=stage == 3):
            return deepzero.initialize(model=TinyModel(), config=settings)[0]
    model = kinds.get(what, TinyModel)()
    if what in SCHEDULES or what in OPTIMIZERS or what in GROUPS:
        params = GROUPS.get(what, lambda m: m.parameters())(model)
        optimizer = OPTIMIZERS.get(what, lambda p: torch.optim.AdamW(p, lr=1e-2))(params)
        del settings["optimizer"]
        schedule = SCHEDULES.get(what)
        return deepzero.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=settings)[0]
    return deepzero.initialize(model=model, config=settings)[0]


def _by_kind(model):
    """Three groups of other rates and decays."""
    params = list(model.parameters())
    return [
        {"params": params[:1], "lr": 3e-3, "weight_decay": 0.0},
        {"params": params[1:5], "weight_decay": 0.3, "betas": (0.8, 0.9)},
        {"params": params[5:]},
    ]


GROUPS = {"groups": _by_kind, "no group": lambda model: list(model.parameters())[:6]}
OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "SGD, dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2, t0=2),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "a rate that is a tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2)),
}
SCHEDULES = {
    "LambdaLR": lambda o: schedules.LambdaLR(o, lambda step: 1.0 / (1 + step)),
    "MultiStepLR": lambda o: schedules.MultiStepLR(o, milestones=[2, 4, 4]),
    "CosineAnnealingLR": lambda o: schedules.CosineAnnealingLR(o, T_max=9),
    "OneCycleLR": lambda o: schedules.OneCycleLR(o, max_lr=0.02, total_steps=20),
    "ReduceLROnPlateau": lambda o: schedules.ReduceLROnPlateau(o, patience=0, threshold=0.5),
    "SequentialLR": lambda o: schedules.SequentialLR(
        o, [schedules.ConstantLR(o, 0.5, 2), schedules.ExponentialLR(o, 0.9)], milestones=[2]
    ),
}


def go(engine, rank, world, until):
    """Train; everything about each step."""
    records = []
    while engine.global_steps < until:
        for ids, labels in my_micro_batches(engine.global_steps, rank, world, 2, 1):
            loss = engine(ids, labels)
            engine.backward(loss)
            plateau = isinstance(engine.lr_scheduler, schedules.ReduceLROnPlateau)
            engine.step({"metrics": engine.global_steps // 2} if plateau else None)
        r = engine.last_step
        records.append((r.step, r.loss, tuple(engine.get_lr()), r.grad_norm))
    return records


def everything(engine):
    buffers = {name: buffer.tolist() for name, buffer in engine.module.named_buffers() if name != "scratch"}
    return engine.params_sha256(), fingerprints(engine), repr(buffers), engine.global_steps


def resume(rank, world, folder, what, stage):
    """Six steps; and the same from a save before the first and from one after the third."""
    engine = build(what, stage)
    engine.save_checkpoint(folder, tag="zero")
    first = go(engine, rank, world, 3)
    engine.save_checkpoint(folder, tag="three")
    at_three = everything(engine)
    rest = go(engine, rank, world, 6)
    at_six = everything(engine)
    for tag, records in (("zero", first + rest), ("three", rest)):
        engine.load_checkpoint(folder, tag)
        if tag == "three":
            assert everything(engine) == at_three, "after loading into an engine that went further"
        assert go(engine, rank, world, 6) == records, tag
        assert everything(engine) == at_six, tag
    engine.destroy()
    engine = build(what, stage)
    engine.load_checkpoint(folder)
    assert everything(engine) == at_three, "after loading into a new engine"
    assert go(engine, rank, world, 6) == rest
    assert everything(engine) == at_six
    engine.destroy()
    return at_three[2]


def some(cases, first):
    """The first ones in every run of the tests, the others in the exhaustive one."""
    return [
        pytest.param(case, marks=[] if place < first else [pytest.mark.exhaustive]) for place, case in enumerate(cases)
    ]


@pytest.mark.parametrize("what", some([*OPTIMIZERS, *GROUPS], 3))
def test_optimizers(ranks, tmp_path, what):
    ranks.run(resume, tmp_path, what, 2)


@pytest.mark.parametrize("what", some(["ASGD", "Rprop", "SGD, dampening"], 1))
def test_state_that_the_first_step_makes_in_stage_0(ranks, tmp_path, what):
    """A new engine has no state yet, and each rank reads a part of what all have to hold whole."""
    ranks.run(resume, tmp_path, what, 0)


@pytest.mark.parametrize("what", some(SCHEDULES, 2))
def test_schedules_of_torch(ranks, tmp_path, what):
    ranks.run(resume, tmp_path, what, 1)


@pytest.mark.parametrize("stage", some([0, 3, 1, 2], 2))
def test_special_parameters_and_buffers(ranks, tmp_path, stage):
    """Three ranks are more than some of the parameters have elements."""
    ranks.run(resume, tmp_path, "special", stage, world_size=3)


@pytest.mark.parametrize("stage", [0, 3])
def test_statistics_that_are_each_ranks_own(ranks, tmp_path, stage):
    buffers = ranks.run(resume, tmp_path, "normed", stage)
    assert buffers[0] != buffers[1]


@pytest.mark.parametrize("what", some(["init", "groups", "ASGD", "no group", "SGD, dampening"], 3))
def test_partitioned_parameters(ranks, tmp_path, what):
    ranks.run(resume, tmp_path, what, 3)


@pytest.mark.parametrize("stage", some([0, 3, 1, 2], 2))
@on_ranks()
def test_frozen_parameters_left_out(rank, world, tmp_path, stage):
    engine = build("special", stage)
    go(engine, rank, world, 2)
    engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    saved = fingerprints(engine)
    engine.destroy()
    engine = build("special", stage)
    strictly = said(engine.load_checkpoint, tmp_path)
    engine.load_checkpoint(tmp_path, load_module_strict=False)
    assert fingerprints(engine) == saved
    go(engine, rank, world, 3)
    engine.destroy()
    assert "3 missing there (blocks.0.1.bias, frozen.bias, frozen.weight)" in strictly


@on_ranks()
def test_the_module_only_and_another_schedule(rank, world, tmp_path):
    engine = engine_for(world, 2)
    steps(engine, rank, world, 3)
    engine.save_checkpoint(tmp_path, client_state={"x": 1})
    saved, sha = fingerprints(engine), engine.params_sha256()
    engine.destroy()
    engine = engine_for(world, 1)
    fresh, rate = fingerprints(engine), engine.get_lr()
    engine.load_checkpoint(tmp_path, load_module_only=True)
    found = fingerprints(engine)
    assert engine.params_sha256() == sha
    assert {key: value for key, value in found.items() if key.endswith("/master")} == {
        key: value for key, value in saved.items() if key.endswith("/master")
    }
    assert all(found[key] == fresh[key] for key in found if not key.endswith("/master"))
    assert (engine.global_steps, engine.get_lr()) == (0, rate)
    engine.load_checkpoint(tmp_path, load_lr_scheduler_states=False)
    assert engine.global_steps == 3 and engine.lr_scheduler.state_dict() != {}
    engine.destroy()
    engine = start(make_model(), stage=2, scheduler={"type": "constant"})
    engine.destroy()
    other = build("LambdaLR", 2)
    message = said(other.load_checkpoint, tmp_path)
    other.load_checkpoint(tmp_path, load_lr_scheduler_states=False)
    other.destroy()
    assert "has the state of schedule deepzero.runtime." in message
    assert "this run's is torch.optim.lr_scheduler.LambdaLR; load_lr_scheduler_states=False" in message


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks()
def test_a_save_between_two_micro_batches(rank, world, tmp_path, stage):
    engine = start(make_model(), stage=stage, bucket=900, gradient_accumulation_steps=3)
    records = [one_step(engine, rank, world, step) for step in range(3)]
    again = start(make_model(), stage=stage, bucket=900, gradient_accumulation_steps=3)
    one_step(again, rank, world, 0)
    again.backward(again(*my_micro_batches(1, rank, world, 2, 3)[0]))
    again.step()
    with log_lines() as messages:
        again.save_checkpoint(tmp_path)
    again.load_checkpoint(tmp_path)
    assert [one_step(again, rank, world, step).loss for step in (1, 2)] == [r.loss for r in records[1:]]
    assert engine.params_sha256() == again.params_sha256()
    said = "save_checkpoint within optimizer step 2: the gradients"
    assert [m[: len(said)] for m in messages if rank or m.startswith(said)] == [[said], []][rank]


@pytest.mark.slow
@on_ranks()
def test_compiled_models(rank, world, tmp_path):
    """What torch.compile puts into names is not in a checkpoint."""
    backend = "eager"
    plain = engine_for(world, 2)
    expected = steps(plain, rank, world, 4)
    plain.destroy()
    engine = engine_for(world, 2, model=torch.compile(make_model(), backend=backend))
    assert [r[1] for r in steps(engine, rank, world, 2)] == pytest.approx([r[1] for r in expected[:2]], abs=1e-5)
    engine.save_checkpoint(tmp_path)
    saved = fingerprints(engine)
    engine.destroy()
    torch._dynamo.reset()
    plain = engine_for(world, 3)
    plain.load_checkpoint(tmp_path)
    assert fingerprints(plain) == saved
    steps(plain, rank, world, 3)
    plain.save_checkpoint(tmp_path)
    saved = fingerprints(plain)
    plain.destroy()
    engine = engine_for(world, 2, model=torch.compile(make_model(), backend=backend))
    engine.load_checkpoint(tmp_path)
    assert fingerprints(engine) == saved
    steps(engine, rank, world, 4)
    engine.destroy()
    torch._dynamo.reset()


class Keeps(torch.optim.Optimizer):
    """Keeps one thing for each parameter, under any name."""

    def __init__(self, params, key, value=torch.zeros_like):
        super().__init__(params, {"lr": 0.1})
        self.key, self.value = key, value

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param].setdefault(self.key, self.value(param))
                    param.sub_(param.grad, alpha=group["lr"])


TENSORS = (torch.tensor(0.9), torch.tensor(0.99))
KEEPING = {
    "master": (lambda p: Keeps(p, "master"), "'master', a name that a checkpoint uses itself"),
    "buffer": (lambda p: Keeps(p, "buffer"), "'buffer', a name that a checkpoint uses itself"),
    "buffer of its own": (lambda p: Keeps(p, "buffer_1"), None),
    "list": (lambda p: Keeps(p, "old", lambda _: [torch.zeros(())]), "is a tensor inside of a list"),
    "betas": (lambda p: torch.optim.AdamW(p, betas=TENSORS, foreach=False), "is a tensor inside of a list"),
}


@pytest.mark.parametrize("what", KEEPING)
@on_ranks()
def test_state_that_could_not_be_loaded_is_not_saved(rank, world, tmp_path, what):
    torch.manual_seed(0)
    model, settings = TinyModel(), config(stage=2, bucket=900)
    del settings["optimizer"]
    engine = deepzero.initialize(model=model, optimizer=KEEPING[what][0](model.parameters()), config=settings)[0]
    go(engine, rank, world, 2)
    message = said(engine.save_checkpoint, tmp_path)
    if message is None:
        before = everything(engine)
        engine.load_checkpoint(tmp_path)
        assert everything(engine) == before
    engine.destroy()
    assert message is None if KEEPING[what][1] is None else KEEPING[what][1] in message


class Pair(TinyModel):
    """Two layers, with one weight or two."""

    def __init__(self, tied):
        super().__init__()
        self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)
        if tied:
            self.other.weight = self.one.weight


@on_ranks()
def test_what_is_not_of_this_run(rank, world, tmp_path):
    def grouped(turned):
        model, settings = TinyModel(), config(stage=1, bucket=900)
        first, *rest = model.parameters()
        groups = [{"params": [first], "weight_decay": 0.0}, {"params": rest, "weight_decay": 0.3}]
        del settings["optimizer"]
        optimizer = torch.optim.AdamW(groups[::-1] if turned else groups, lr=1e-2)
        return deepzero.initialize(model=model, optimizer=optimizer, config=settings)[0]

    pairs = {
        "groups": (lambda: grouped(False), lambda: grouped(True)),
        "tied": (lambda: engine_for(world, 2, model=Pair(False)), lambda: engine_for(world, 2, model=Pair(True))),
        "NAdam": (lambda: build("a rate that is a tensor", 2), lambda: build("NAdam", 2)),
    }
    found = {}
    for what, (saving, loading) in pairs.items():
        engine = saving()
        engine.save_checkpoint(tmp_path / what)
        engine.destroy()
        engine = loading()
        found[what] = said(engine.load_checkpoint, tmp_path / what)
        engine.destroy()
    assert "it would get another group's settings" in found["groups"]
    assert "'one.weight' and 'other.weight' are two parameters there and one (tied) here" in found["tied"].replace(
        "'other.weight' and 'one.weight'", "'one.weight' and 'other.weight'"
    )
    assert "this run's optimizer is torch.optim.nadam.NAdam" in found["NAdam"]
