"""Models, optimizers and schedules of all kinds, resumed to the bit: in a new engine, and in one that went further."""

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules

import deepzero
from deepzero.checkpoint import rng
from deepzero.checkpoint.reader import read_own
from deepzero.comm import process_group
from tests.distributed.checkpoints import engine_for, fingerprints, said, steps
from tests.distributed.pool import on_ranks, sampled
from tests.distributed.test_export import Buffered
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
    step_on,
)


class Special(Buffered):
    """Also unused parameters, a block whose bias is frozen, a buffer that counts, and one that is None."""

    def __init__(self):
        super().__init__()
        self.tiny.blocks[0][1].bias.requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("none", None)

    def forward(self, ids, labels):
        self.calls += 1
        return super().forward(ids, labels) + 1e-3 * self.frozen.sum()


class Normed(nn.Module):
    """Statistics that are each rank's own."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.norm = nn.BatchNorm1d(LENGTH * WIDTH)
        self.head = nn.Linear(LENGTH * WIDTH, VOCAB)

    def forward(self, ids, labels):
        return nn.functional.cross_entropy(self.head(self.norm(self.embed(ids).flatten(1))), labels[:, 0])


class Rebinds(TinyModel):
    """Its buffers become tensors that nothing can be read into; one element has a stride of 5; one may be empty."""

    def __init__(self, empty=False):
        super().__init__()
        if empty:
            self.empty = nn.Parameter(torch.zeros(0, 3), requires_grad=False)
        self.register_buffer("turned", torch.zeros(3, 2))
        self.register_buffer("inferred", torch.zeros(2))
        self.register_buffer("one", torch.arange(5.0)[2::5])
        self.frozen = nn.Parameter(torch.arange(5.0)[3::5], requires_grad=False)

    def forward(self, ids, labels):
        self.turned = (self.turned + 1).t().contiguous().t()
        with torch.inference_mode():
            self.inferred = self.inferred + 2
        return super().forward(ids, labels)


class Pair(TinyModel):
    def __init__(self, tied):
        super().__init__()
        self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)
        if tied:
            self.other.weight = self.one.weight


class Keeps(torch.optim.Optimizer):
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


class Counts(torch.optim.Optimizer):
    """Counts its steps, as some classes do, in each group from the first one on, and in an attribute."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        self.taken = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.taken += 1
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group.setdefault("count", torch.zeros((), dtype=torch.int32)).add_(1)
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param]["seen"] = param.grad.clone()
                    param.sub_(
                        param.grad, alpha=group["lr"] / (self.taken + group["step"] ** 2 + group["count"].item())
                    )

    def state_dict(self):
        return super().state_dict() | {"taken": self.taken}

    def load_state_dict(self, state_dict):
        self.taken = state_dict["taken"]
        assert all("seen" in state for state in state_dict["state"].values()) and (
            state_dict["state"] or not self.taken
        )
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        self.first = self.param_groups[0]


class Adds(torch.optim.SGD):
    """Adds to its state dict what no checkpoint can hold."""

    def __init__(self, params, value, **given):
        super().__init__(params, lr=0.1)
        self.value = value
        self.param_groups[0].update(given)

    def state_dict(self):
        return super().state_dict() | {"taken": 3, "kept": [self.value]}


def two_groups(model, turned=False):
    first, *rest = model.parameters()
    groups = [{"params": [first], "weight_decay": 0.0}, {"params": rest, "weight_decay": 0.3}]
    return groups[::-1] if turned else groups


def three_groups(model):
    params = list(model.parameters())
    return [
        {"params": params[:1], "lr": 3e-3, "weight_decay": 0.0},
        {"params": params[1:5], "weight_decay": 0.3, "betas": (0.8, 0.9)},
        {"params": params[5:]},
    ]


MODELS = {"special": Special, "normed": Normed, "untied": lambda: Pair(False), "tied": lambda: Pair(True)}
GROUPS = {
    "groups": three_groups,
    "no group": lambda model: list(model.parameters())[:6],
    "two groups": two_groups,
    "turned groups": lambda model: two_groups(model, True),
}
TENSORS = (torch.tensor(0.9), torch.tensor(0.99))
OPTIMIZERS = {
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
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
    "counts of its own": Counts,
}
KEEPING = {
    "keeps master": (lambda p: Keeps(p, "master"), "'master', a name that a checkpoint uses itself"),
    "keeps buffer": (lambda p: Keeps(p, "buffer"), "'buffer', a name that a checkpoint uses itself"),
    "keeps a buffer of its own": (lambda p: Keeps(p, "buffer_1"), None),
    "keeps a list": (lambda p: Keeps(p, "old", lambda _: [torch.zeros(())]), "is a tensor, which cannot be saved"),
    "keeps a dtype": (lambda p: Keeps(p, "old", lambda _: {"dtype": "F32", "shape": [1]}), None),
    "tensors": (lambda p: torch.optim.AdamW(p, betas=TENSORS, foreach=False), "is a tensor, which cannot be saved"),
}
"""What is said when it is saved."""
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


def build(what, stage):
    """An engine over the model, groups, optimizer or schedule of this name."""
    torch.manual_seed(0)
    settings = config(stage=stage, bucket=900)
    if what == "init":
        with deepzero.zero.Init(enabled=stage == 3):
            return deepzero.initialize(model=TinyModel(), config=settings)[0]
    model = MODELS.get(what, TinyModel)()
    if what in MODELS:
        return deepzero.initialize(model=model, config=settings)[0]
    make = KEEPING[what][0] if what in KEEPING else OPTIMIZERS.get(what, lambda p: torch.optim.AdamW(p, lr=1e-2))
    optimizer = make(GROUPS.get(what, lambda m: m.parameters())(model))
    del settings["optimizer"]
    return deepzero.initialize(model=model, optimizer=optimizer, lr_scheduler=SCHEDULES.get(what), config=settings)[0]


def go(engine, rank, world, until):
    records = []
    while engine.global_steps < until:
        for ids, labels in my_micro_batches(engine.global_steps, rank, world, 2, 1):
            engine.backward(engine(ids, labels))
            plateau = isinstance(engine.lr_scheduler, schedules.ReduceLROnPlateau)
            engine.step({"metrics": engine.global_steps // 2} if plateau else None)
        r = engine.last_step
        records.append((r.step, r.loss, tuple(engine.get_lr()), r.grad_norm))
    return records


def everything(engine):
    buffers = {name: buffer.tolist() for name, buffer in engine.module.named_buffers() if name != "scratch"}
    return engine.params_sha256(), fingerprints(engine), repr(buffers), engine.global_steps


RESUMED = [
    *sampled([("SGD, momentum", 2, 2), ("counts of its own", 2, 2)], (*OPTIMIZERS, "groups", "no group"), (2,), (2,)),
    # A new engine of stage 0 has no state yet, and each rank reads a part of what all have to hold whole.
    *sampled([("ASGD", 0, 2)], ("ASGD", "Rprop", "SGD, dampening"), (0,), (2,)),
    *sampled([("LambdaLR", 1, 2), ("MultiStepLR", 1, 2)], SCHEDULES, (1,), (2,)),
    # Three ranks are more than some of the parameters have elements.
    *sampled([("special", 0, 3), ("special", 3, 3)], ("special",), (0, 1, 2, 3), (3,)),
    *sampled([("normed", 3, 2)], ("normed",), (0, 3), (2,)),
    *sampled(
        [(what, 3, 2) for what in ("init", "groups", "ASGD")],
        ("init", "groups", "ASGD", "no group", "SGD, dampening"),
        (3,),
        (2,),
    ),
]


@pytest.mark.parametrize(("what", "stage", "world"), RESUMED)
@on_ranks(None)
def test_resumed_to_the_bit(rank, world, tmp_path, what, stage):
    """Four steps; and the same from a save before the first and from one after the second."""
    engine = build(what, stage)
    engine.save_checkpoint(tmp_path, tag="zero")
    first = go(engine, rank, world, 2)
    engine.save_checkpoint(tmp_path, tag="two")
    at_two = everything(engine)
    rest = go(engine, rank, world, 4)
    at_four = everything(engine)
    for tag, records in (("zero", first + rest), ("two", rest)):
        engine.load_checkpoint(tmp_path, tag)
        assert tag == "zero" or everything(engine) == at_two, "after loading into an engine that went further"
        assert go(engine, rank, world, 4) == records, tag
        assert everything(engine) == at_four, tag
    engine.destroy()
    engine = build(what, stage)
    engine.load_checkpoint(tmp_path)
    assert everything(engine) == at_two, "after loading into a new engine"
    assert (go(engine, rank, world, 4), everything(engine)) == (rest, at_four)
    buffers = process_group.all_gather_object(at_two[2])
    assert what != "normed" or buffers[0] != buffers[1], "statistics that are each rank's own"


@on_ranks(1)
def test_what_an_optimizer_has_besides_torch(rank, world, tmp_path):
    """It ends no save and no load; and what a program gave its groups is the program's, not the checkpoint's."""

    def build_with(make, **more):
        made = make_model()
        settings = {key: value for key, value in config(stage=2, bucket=900).items() if key != "optimizer"}
        return deepzero.initialize(model=made, optimizer=make(made.parameters()), config=settings, **more)[0]

    def fails(*_):
        raise NotImplementedError("no state dict")

    for value, why in (
        (torch.ones(2), "['kept'][0] is a tensor"),
        (object(), "is a builtins.object"),
        (None, "no state"),
    ):
        engine = build_with(lambda params, value=value: Adds(params, value, lr_mult=0.1))
        engine.optimizer.register_state_dict_post_hook(fails if value is None else lambda *_: None)
        with log_lines() as messages:
            engine.save_checkpoint(tmp_path, tag="first")
            go(engine, rank, world, 1)
            engine.save_checkpoint(tmp_path)
        assert [why in m for m in messages if "is not saved, all else is" in m] == [True], messages
        other = build_with(lambda params, value=value: Adds(params, value, name="all"))
        other.load_checkpoint(tmp_path)
        assert [(g.get("lr_mult"), g["name"]) for g in other.optimizer.param_groups] == [(None, "all")]
        assert other.params_sha256() == engine.params_sha256()
    other = build_with(lambda params: Adds(params, 1, name="all"), lr_scheduler=SCHEDULES["OneCycleLR"])
    for _ in range(2):  # before a step, and after one
        other.load_checkpoint(tmp_path, "first", load_lr_scheduler_states=False)
        go(other, rank, world, 1)
        assert other.optimizer.param_groups[0]["name"] == "all"
    counting = build_with(Counts)
    go(counting, rank, world, 2)
    counting.save_checkpoint(tmp_path, tag="second")
    other = build_with(Counts)
    other.load_checkpoint(tmp_path, "second")
    first = other.optimizer.param_groups[0]
    assert other.optimizer.first is first
    assert (first["step"], first["count"].dtype) == (2, torch.int32)
    # What began after the checkpoint, in a step, ends with its load; what the program put there stays.
    first["lr_mult"] = 0.1
    other.optimizer.register_step_pre_hook(lambda *_: first.update(late=torch.ones(1)))
    other.on_step = [lambda _: None]
    go(other, rank, world, 3)
    other.load_checkpoint(tmp_path, "second")
    assert first["step"] == 2 and "late" not in first and first["lr_mult"] == 0.1
    go(other, rank, world, 3)
    other.save_checkpoint(tmp_path, tag="third")
    # A class that keeps the same state by parameter takes another's, with what steps put into the groups.
    other = build_with(type("Renamed", (Counts,), {}))
    go(other, rank, world, 1)
    other.load_checkpoint(tmp_path, "third")
    assert (other.optimizer.param_groups[0]["step"], other.optimizer.param_groups[0]["late"].item()) == (3, 1.0)


@pytest.mark.parametrize(("stage",), sampled([(0,), (3,)], (0, 1, 2, 3)))
@on_ranks()
def test_frozen_parameters_left_out(rank, world, tmp_path, stage):
    engine = build("special", stage)
    go(engine, rank, world, 2)
    engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    saved = fingerprints(engine)
    engine.destroy()
    engine = build("special", stage)
    assert "2 missing there (frozen, tiny.blocks.0.1.bias)" in said(engine.load_checkpoint, tmp_path)
    engine.load_checkpoint(tmp_path, load_module_strict=False)
    assert fingerprints(engine) == saved
    go(engine, rank, world, 3)


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
    expected = {key: (saved if key.endswith("/master") else fresh)[key] for key in fresh}
    assert (engine.params_sha256(), fingerprints(engine)) == (sha, expected)
    assert (engine.global_steps, engine.get_lr()) == (0, rate)
    engine.load_checkpoint(tmp_path, load_lr_scheduler_states=False)
    assert engine.global_steps == 3 and engine.lr_scheduler.state_dict() != {}
    other = build("LambdaLR", 2)
    message = said(other.load_checkpoint, tmp_path)
    other.load_checkpoint(tmp_path, load_lr_scheduler_states=False)
    assert "has the state of schedule deepzero.runtime." in message
    assert "this run's is torch.optim.lr_scheduler.LambdaLR; load_lr_scheduler_states=False" in message


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks()
def test_a_save_between_two_micro_batches(rank, world, tmp_path, stage):
    engine, again = (start(make_model(), stage=stage, bucket=900, gradient_accumulation_steps=3) for _ in range(2))
    records = [one_step(engine, rank, world, step) for step in range(3)]
    one_step(again, rank, world, 0)
    step_on(again, *my_micro_batches(1, rank, world, 2, 3)[0])
    with log_lines() as messages:
        again.save_checkpoint(tmp_path)
    again.load_checkpoint(tmp_path)
    assert [one_step(again, rank, world, step).loss for step in (1, 2)] == [r.loss for r in records[1:]]
    assert engine.params_sha256() == again.params_sha256()
    told = "save_checkpoint within optimizer step 2: the gradients"
    assert [m[: len(told)] for m in messages if rank or m.startswith(told)] == [[told], []][rank]


@pytest.mark.slow
@on_ranks()
def test_compiled_models(rank, world, tmp_path):
    """What torch.compile puts into names is not in a checkpoint."""

    def engine_of(stage, compiled):
        torch._dynamo.reset()
        model = torch.compile(make_model(), backend="eager") if compiled else make_model()
        return engine_for(world, stage, model=model)

    expected = steps(engine_of(2, False), rank, world, 4)
    saved = None
    for until, stage, compiled in ((2, 2, True), (3, 3, False), (4, 2, True)):
        engine = engine_of(stage, compiled)
        if saved is not None:
            engine.load_checkpoint(tmp_path)
            assert fingerprints(engine) == saved
        losses = [r[1] for r in steps(engine, rank, world, until)]
        assert saved or losses == pytest.approx([r[1] for r in expected[:2]], abs=1e-5)
        engine.save_checkpoint(tmp_path)
        saved = fingerprints(engine)
    torch._dynamo.reset()


@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks()
def test_buffers_that_the_model_has_rebound(rank, world, tmp_path, stage):
    """They are read into copies; also beside a new parameter that is empty."""
    engine = engine_for(world, stage, model=Rebinds())
    steps(engine, rank, world, 1)
    saved, sha256 = [engine.module.turned.tolist(), engine.module.inferred.tolist()], engine.params_sha256()
    engine.save_checkpoint(tmp_path, client_state={"given": torch.ones(2), "one": torch.ones(5)[::5]})
    reader = read_own(tmp_path, None)
    with torch.device("meta"):  # as who has set another default device
        assert reader.value(reader.manifest.client_state)["given"].tolist() == [1, 1]
        assert {tensor.device.type for tensor in rng.capture(engine.device)[0].values()} == {"cpu"}
    steps(engine, rank, world, 2)
    for loading in (engine, engine_for(world, stage, model=Rebinds(empty=True))):
        loading.load_checkpoint(tmp_path)
        assert [loading.module.turned.tolist(), loading.module.inferred.tolist()] == saved
        assert loading.module.one.tolist() == [2] and loading.params_sha256() == sha256
        steps(loading, rank, world, 2)


@pytest.mark.parametrize("what", KEEPING)
@on_ranks()
def test_state_that_could_not_be_loaded_is_not_saved(rank, world, tmp_path, what):
    text, engine = KEEPING[what][1], build(what, 2)
    go(engine, rank, world, 2)
    message, before = said(engine.save_checkpoint, tmp_path), everything(engine)
    if text is None:
        engine.load_checkpoint(tmp_path)
    assert message is None if text is None else text in message
    assert everything(engine) == before


@pytest.mark.parametrize(("saving", "loading", "text"), [
    ("two groups", "turned groups", "it would get another group's settings"),
    ("untied", "tied", "'one.weight' and 'other.weight' are two parameters there and one (tied) here"),
    ("a rate that is a tensor", "NAdam", "this run's optimizer is torch.optim.nadam.NAdam"),
])  # fmt: skip
@on_ranks()
def test_what_is_not_of_this_run(rank, world, tmp_path, saving, loading, text):
    engine = build(saving, 2)
    engine.save_checkpoint(tmp_path)
    engine.destroy()
    assert text in said(build(loading, 2).load_checkpoint, tmp_path)
