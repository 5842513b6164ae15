"""Building optimizers by name: DeepSpeed's names and defaults, torch's arithmetic, and what is refused."""

import inspect
from types import SimpleNamespace

import pytest
import torch

from deepzero.config.engine import OptimizerConfig
from deepzero.config.strict import ConfigError
from deepzero.ops import CPUAdam
from deepzero.runtime.optimizers import build_optimizer


def weights(*extents):
    return [torch.linspace(-1.0, 1.0, n).requires_grad_() for n in extents or (5,)]


def built(target, **params):
    return build_optimizer(OptimizerConfig(target, params), weights())


class OfTheUser(torch.optim.Optimizer):
    """An optimizer that only a dotted path can find."""

    def __init__(self, params, lr, period=5, scale=0, names=(1.0, 2.0)):
        super().__init__(params, {"lr": lr, "period": period, "scale": scale, "names": names})

    def step(self, closure=None):
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    param -= group["lr"] * param.grad


class TakesAnything(OfTheUser):
    def __init__(self, params, lr=0.1, **more):
        super().__init__(params, lr)
        self.more = more


PATH = f"{__name__}.OfTheUser"


class TestNames:
    @pytest.mark.parametrize(("name", "params", "cls"), [
        # Adam means decoupled decay, as in DeepSpeed.
        *((name, {}, "AdamW") for name in ("Adam", "adam", "ADAM", "AdamW", "adamw")),
        ("Adam", {"adam_w_mode": True}, "AdamW"), ("Adam", {"adam_w_mode": False}, "Adam"),
        *((name, {}, name.rpartition(".")[2]) for name in ("SGD", "RMSprop", "Adagrad", "NAdam", "torch.optim.SGD")),
        ("sgd", {}, "SGD"), ("rmsprop", {}, "RMSprop"), ("adamw", {"adam_w_mode": True}, "AdamW"),
    ])  # fmt: skip
    def test_classes_of_torch_go_by_name(self, name, params, cls):
        assert type(built(name, **params)) is getattr(torch.optim, cls)

    @pytest.mark.parametrize(("target", "params", "decay"), [
        ("Adam", {}, 0.0), ("AdamW", {}, 0.0), ("AdamW", {"weight_decay": 0.3}, 0.3), ("torch.optim.AdamW", {}, 0.01),
        ("AdamW", {"torch_adam": True}, 0.01), ("Adam", {"torch_adam": True}, 0.01),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}, 0.0),
    ])  # fmt: skip
    def test_default_weight_decay(self, target, params, decay):
        assert built(target, **params).defaults["weight_decay"] == decay

    def test_a_dotted_path_is_imported(self):
        assert (type(found := built(PATH, lr=0.5)).__name__, found.param_groups[0]["lr"]) == ("OfTheUser", 0.5)


class TestArguments:
    def test_open_ended_constructors_take_anything(self):
        assert built(f"{__name__}.TakesAnything", colour="red").more == {"colour": "red"}

    def test_numbers_that_yaml_reads_as_strings_and_lists(self):
        """An integer stays one, and a default of zero takes a fraction."""
        optimizer = built("AdamW", lr="1e-4", betas=["0.9", 0.5], eps="1e-6", weight_decay=1)
        assert [optimizer.defaults[name] for name in ("lr", "betas", "eps")] == [1e-4, (0.9, 0.5), 1e-6]
        group = built(PATH, lr=1, period="7", scale=0.25).param_groups[0]
        assert repr([group[name] for name in ("lr", "period", "scale")]) == "[1.0, 7, 0.25]"

    @pytest.mark.parametrize(("target", "params", "message"), [
        ("AdamX", {}, r"unknown optimizer 'AdamX'. Did you mean 'Adam\w*'\? Known: .*SGD"),
        ("Optimizer", {}, r"unknown optimizer 'Optimizer'"),
        ("Lamb", {}, r"'Lamb' is not in torch; name a class of yours by its dotted path, with per_tensor=true"),
        ("Lion", {}, r"dotted path"),
        ("no.such.module.Adam", {}, r"'no.such.module.Adam' cannot be imported"),
        *((name, {}, f"'{name}' cannot be imported") for name in ("torch.optim.Nothing", ".Adam")),
        *((name, {}, f"'{name}' is not a subclass") for name in ("torch.nn.Linear", "torch.optim.Optimizer")),
        ("AdamW", {"lr": "auto"}, r"optimizer.params.lr='auto' must be a number"),
        ("AdamW", {"betas": 0.9}, r"optimizer.params.betas=0.9 must be a list of 2 numbers"),
        ("AdamW", {"amsgrad": "yes"}, r"optimizer.params.amsgrad='yes' must be true or false"),
        ("AdamW", {"lr": -1.0}, r"optimizer.params.lr=-1.0: must not be negative"),
        ("AdamW", {"lr": None}, r"^optimizer.params.lr=None: .*lr is null: give a number, or leave it out"),
        ("AdamW", {"betas": [1.5, -1]}, r"^optimizer.params.betas=\(1.5, -1.0\): .*cannot be built: Invalid beta"),
        ("CPUAdam", {"eps": -1}, r"^optimizer.params.eps=-1.0: .*cannot be built: .* eps=-1.0 must be finite and not"),
        ("AdamW", {"betas": [0.9]}, r"betas=\[0.9\] must be a list of 2 numbers, like \[0.9, 0.999\]"),
        ("AdamW", {"max_grad_norm": 1.0}, r"max_grad_norm=1.0: set gradient_clipping instead"),
        ("Adam", {"bias_correction": False}, r"bias_correction=False is not implemented"),
        ("Adam", {"fp32_optimizer_states": False}, r"fp32_optimizer_states=False is not implemented"),
        ("Adam", {"adam_w_mode": 1}, r"adam_w_mode=1 must be true or false"),
        ("torch.optim.AdamW", {"adam_w_mode": True}, r"unknown config key 'optimizer.params.adam_w_mode'"),
        ("SGD", {"nesterov": True}, r"cannot be built: Nesterov momentum requires a momentum"),
        ("AdamW", {"weight_decey": 0.1}, r"'optimizer.params.weight_decey'.*'optimizer.params.weight_decay'"),
        (PATH, {"lr": 0.1, "perod": 3}, r"'optimizer.params.perod'.*'optimizer.params.period'"),
        ("AdamW", {"params": [1]}, r"unknown config key 'optimizer.params.params'"),
        ("adamw", {"adam_w_mode": False}, r"adam_w_mode=False contradicts optimizer 'adamw'"),
        (PATH, {}, r"OfTheUser\(\) cannot be built: .*lr"),
    ])  # fmt: skip
    def test_refused(self, target, params, message):
        with pytest.raises(ConfigError, match=message):
            built(target, **params)

    def test_deepspeeds_switches_that_are_fulfilled(self):
        switches = dict.fromkeys(("bias_correction", "fp32_optimizer_states", "set_grad_none"), True)
        assert type(built("Adam", **switches, torch_adam=False)) is torch.optim.AdamW


def test_fused_is_the_default_where_it_exists():
    for target in ("AdamW", "Adam", "SGD", "torch.optim.AdamW", "Adagrad"):
        assert built(target).defaults["fused"] is True
    for params in ({"fused": False}, {"foreach": True}, {"foreach": False}, {"differentiable": True}):
        assert not built("AdamW", **params).defaults["fused"], "the user's choice wins"
    assert "fused" not in built("RAdam").defaults
    integers = build_optimizer(OptimizerConfig("SGD"), [torch.zeros(2, dtype=torch.int64)])
    nowhere = build_optimizer(OptimizerConfig("AdamW"), [torch.zeros(2, device="meta", requires_grad=True)])
    assert not integers.defaults["fused"] and not nowhere.defaults["fused"]


def test_a_switch_that_is_off_asks_for_nothing():
    """Where the optimizer is offloaded, too; one that is on means torch's class."""
    off = {"fused": False, "foreach": None, "maximize": False, "amsgrad": False}
    assert type(build_optimizer(OptimizerConfig("AdamW", off), weights(3), on_host=True)) is CPUAdam
    asked = build_optimizer(OptimizerConfig("AdamW", {**off, "maximize": True}), weights(3), on_host=True)
    assert type(asked) is torch.optim.AdamW and asked.defaults["maximize"]


class TestParams:
    def test_groups_keep_their_settings_and_may_come_from_generators(self):
        a, b = weights(3, 4)
        groups = ({"params": (p for p in [p]), "lr": lr} for p, lr in ((a, 0.1), (b, 0.2)))
        optimizer = build_optimizer(OptimizerConfig("AdamW", {"lr": 0.3}), groups)
        assert [(group["params"], group["lr"]) for group in optimizer.param_groups] == [([a], 0.1), ([b], 0.2)]
        named = build_optimizer(OptimizerConfig("AdamW"), torch.nn.Linear(2, 2).named_parameters())
        assert named.param_groups[0]["param_names"] == ["weight", "bias"]
        alone = build_optimizer(OptimizerConfig("AdamW"), [{"params": a}])
        assert alone.param_groups[0]["params"] == [a]
        assert all(made.defaults["fused"] is True for made in (optimizer, named, alone))

    def test_the_config_is_left_as_it_was(self):
        config = OptimizerConfig("Adam", {"adam_w_mode": False, "torch_adam": True, "betas": [0.9, 0.95]})
        build_optimizer(config, weights())
        assert config.params == {"adam_w_mode": False, "torch_adam": True, "betas": [0.9, 0.95]}


class TestAgainstDeepSpeed:
    @pytest.mark.parametrize("decay", [{}, {"weight_decay": 0.5}])
    @pytest.mark.parametrize(("name", "extra"), [
        ("Adam", {"torch_adam": True}),
        ("adam", {"torch_adam": True, "adam_w_mode": True}),
        ("Adam", {"torch_adam": True, "adam_w_mode": False}),
        ("AdamW", {"torch_adam": True}),
        ("adamw", {"torch_adam": True, "adam_w_mode": True}),
        ("SGD", {"momentum": 0.9}),
        ("RMSprop", {}),
        ("Adagrad", {}),
        ("adagrad", {"lr_decay": 0.1}),
    ])  # fmt: skip
    def test_same_class_and_the_same_steps(self, name, extra, decay):
        """DeepSpeed's own choice, asked of its engine's method with an engine in which only the config is real."""
        pytest.importorskip("deepspeed", exc_type=ImportError)
        from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
        from deepspeed.runtime.engine import DeepSpeedEngine

        params = {"lr": 0.01, **decay, **extra}
        lowered = name.lower() if name.lower() in DEEPSPEED_OPTIMIZERS else name
        engine = SimpleNamespace(optimizer_params=lambda: dict(params), optimizer_name=lambda: lowered)
        engine.zero_use_cpu_optimizer = lambda: False
        engine.get_optimizer_configuration = DeepSpeedEngine.get_optimizer_configuration.__get__(engine)
        (mine,), (its,) = weights(7), weights(7)
        theirs = DeepSpeedEngine._configure_basic_optimizer(engine, [its])
        ours = build_optimizer(OptimizerConfig(name, {**params, "foreach": False}), [mine])
        assert type(ours) is type(theirs)
        for step in range(4):
            for leaf, optimizer in ((mine, ours), (its, theirs)):
                leaf.grad = torch.sin(torch.arange(7.0) + step)
                optimizer.step()
            assert torch.equal(mine, its), f"step {step}"

    def test_default_weight_decay_is_that_of_its_kernels(self):
        pytest.importorskip("deepspeed", exc_type=ImportError)
        from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

        for cls in (DeepSpeedCPUAdam, FusedAdam):
            assert inspect.signature(cls).parameters["weight_decay"].default == built("AdamW").defaults["weight_decay"]
