"""Every choice of every group composes into typed settings; what nobody chooses is as in the dataclasses."""

import dataclasses
import typing
from pathlib import Path

import hydra
import pytest
import torch

from deepzero.config.run import RunConfig
from deepzero.runtime.lr_schedules import CURVES, build_scheduler
from deepzero.runtime.optimizers import build_optimizer, check_elementwise
from deepzero.training.command_line import CONFIGS, settings_of
from tests.configs.compose import run_config, settings

GROUPS = sorted(path.name for path in CONFIGS.iterdir() if path.is_dir() and path.name != "hydra")
CHOICES = [(group, path.stem) for group in GROUPS for path in sorted((CONFIGS / group).glob("*.yaml"))]

DEPARTURES = {
    "engine.zero.stage": 2,
    "engine.zero.overlap_comm": True,
    "engine.zero.stage3_param_persistence_threshold": 1000,
    "engine.precision.dtype": "bf16",
    "model.n_head": 2,
    "model.position": "rope",
    "model.activation": "swiglu",
    "model.bias": False,
}
"""Where the default run chooses otherwise than a bare dataclass; starred in configs/train.yaml and configs/zero/."""


def choose(group, choice):
    """Overrides for one choice, with what it asks for besides."""
    overrides = [f"{group}={choice}"]
    if choice in ("text", "tokens") or (choice.startswith("gpt2_") and group == "experiment"):
        overrides.append("data.path=/some/path")
    return overrides


def test_the_groups_are_those_of_the_design():
    expected = "zero offload zeropp model data optimizer scheduler precision comm logger profiler experiment debug"
    assert set(GROUPS) == set(expected.split())


@pytest.mark.parametrize(("group", "choice"), CHOICES, ids=["=".join(one) for one in CHOICES])
def test_every_choice_composes(group, choice):
    run = run_config(*choose(group, choice))
    assert isinstance(run, RunConfig)
    assert run.engine.optimizer is not None
    assert run.engine.scheduler is not None


def leaves(value, prefix):
    """Dotted names and values of nested dataclasses."""
    if not dataclasses.is_dataclass(value):
        return {prefix: value}
    found = {}
    for field in dataclasses.fields(value):
        found |= leaves(getattr(value, field.name), f"{prefix}.{field.name}" if prefix else field.name)
    return found


def test_what_is_not_chosen_is_as_in_the_dataclasses():
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        composed = RunConfig.from_mapping(settings_of(hydra.compose("train")))
    chosen, default = leaves(composed, ""), leaves(RunConfig(), "")
    chosen = {
        key: value for key, value in chosen.items() if not key.startswith(("engine.optimizer", "engine.scheduler"))
    }
    differs = {key: value for key, value in chosen.items() if value != default[key]}
    assert differs == DEPARTURES


def keys_of(cls):
    """Dotted names of all fields of nested dataclasses, as they stand in the YAML files."""
    names = set()
    for name, kind in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            names |= {f"{name}.{inner}" for inner in keys_of(kind)}
        else:
            names.add(name)
    return names


def dotted(mapping, prefix=""):
    """Dotted names of all leaves of a nested mapping."""
    names = set()
    for key, value in mapping.items():
        names |= dotted(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key}
    return names


def test_every_setting_can_be_typed_without_a_plus():
    wanted = {name.removeprefix("engine.") for name in keys_of(RunConfig)} - {"optimizer", "scheduler"}
    assert wanted <= dotted(settings())


@pytest.mark.parametrize("choice", [choice for group, choice in CHOICES if group == "scheduler"])
def test_schedulers_show_every_parameter(choice):
    given = settings(f"scheduler={choice}")["scheduler"]
    assert given["type"] == choice
    assert set(given) - {"type"} == {field.name for field in dataclasses.fields(CURVES[choice])}


def test_every_scheduler_has_a_file():
    assert {choice for group, choice in CHOICES if group == "scheduler"} == set(CURVES)


@pytest.mark.parametrize("optimizer", [choice for group, choice in CHOICES if group == "optimizer"])
@pytest.mark.parametrize("scheduler", ["constant", "warmup_cosine", "OneCycle"])
def test_optimizers_and_schedulers_can_be_built(optimizer, scheduler):
    run = run_config(f"optimizer={optimizer}", f"scheduler={scheduler}", "optimizer.lr=0.25", "train.steps=7")
    assert run.engine.optimizer is not None
    assert run.engine.scheduler is not None
    built = build_optimizer(run.engine.optimizer, [torch.nn.Parameter(torch.zeros(3))])
    assert built.defaults["lr"] == 0.25
    check_elementwise(built)
    assert len(build_scheduler(run.engine.scheduler, built, run.train.steps).get_last_lr()) == 1


def test_models_are_named_as_their_files():
    models = [choice for group, choice in CHOICES if group == "model" and choice != "hf"]
    assert [run_config(f"model={name}").model.name for name in models] == models


@pytest.mark.parametrize(("overrides", "rate"), [
    ([], 2e-3),
    (["model=gpt2_124m"], 6e-4),
    (["model=gpt2_124m", "optimizer=cpu_adam"], 6e-4),
    (["model=gpt2_1_3b", "optimizer.lr=1e-4"], 1e-4),
    (["model=gpt2_124m", "optimizer=sgd"], 0.1),
    (["experiment=gpt2_1_3b", "data.path=/some/path"], 2e-4),
    (["experiment=smoke"], 2e-3),
])  # fmt: skip
def test_each_model_has_its_learning_rate(overrides, rate):
    composed = settings(*overrides)
    assert composed["optimizer"]["lr"] == rate
    optimizer = run_config(*overrides).engine.optimizer
    assert optimizer is not None
    assert optimizer.params["lr"] == rate


def test_schedules_follow_the_length_of_the_run():
    assert settings("train.steps=77")["scheduler"]["total_steps"] == 77


def test_chaos_is_one_word():
    assert run_config("debug=chaos").engine.comm.chaos.enabled
    assert not run_config().engine.comm.chaos.enabled


@pytest.mark.parametrize(("overrides", "total", "micro", "accumulation"), [
    ([], 24, None, None),
    (["train_batch_size=12"], 12, None, None),
    (["train_micro_batch_size_per_gpu=2"], None, 2, None),
    (["train_micro_batch_size_per_gpu=2", "gradient_accumulation_steps=4"], None, 2, 4),
    (["gradient_accumulation_steps=4"], 24, None, 4),
    (["experiment=smoke"], 12, None, None),
])  # fmt: skip
def test_the_fallback_batch_never_contradicts_what_was_typed(overrides, total, micro, accumulation):
    engine = run_config(*overrides).engine
    assert engine.train_batch_size == total
    assert engine.train_micro_batch_size_per_gpu == micro
    assert engine.gradient_accumulation_steps == accumulation


def test_slurm_preset_names_the_plugin():
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        cfg = hydra.compose("train", overrides=["hydra/launcher=submitit_slurm"], return_hydra_config=True)
    assert cfg.hydra.launcher["_target_"].endswith("SlurmLauncher")
    assert cfg.hydra.launcher.tasks_per_node == 1


def test_every_line_of_the_contents_page_has_a_comment():
    page = Path(CONFIGS / "train.yaml").read_text(encoding="utf-8")
    lines = page[page.index("defaults:") : page.index("\nhydra:")].splitlines()
    bare = [line for line in lines if line.strip() and "#" not in line and not line.endswith(":")]
    assert bare == []
