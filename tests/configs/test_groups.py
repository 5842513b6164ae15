"""Every choice of every group composes into typed settings; what nobody chooses is as in the dataclasses."""

import dataclasses
from pathlib import Path

import hydra
import pytest
import torch

from deepzero.config.run import RunConfig
from deepzero.runtime.elementwise_check import check_elementwise
from deepzero.runtime.lr_schedules import CURVES, build_scheduler
from deepzero.runtime.optimizers import build_optimizer
from deepzero.training.command_line import CONFIGS
from deepzero.utils.formatting import flatten
from tests.configs.compose import run_config, settings

GROUPS = sorted(path.name for path in CONFIGS.iterdir() if path.is_dir() and path.name != "hydra")
CHOICES = [(group, path.stem) for group in GROUPS for path in sorted((CONFIGS / group).glob("*.yaml"))]

DEPARTURES = {
    "engine.zero.stage": 2,
    "engine.zero.overlap_comm": True,
    "engine.zero.stage3_param_persistence_threshold": 1000,
    "engine.zero.stage3_max_live_parameters": 262_144,
    "engine.precision.dtype": "bf16",
    "model.n_head": 2,
    "model.position": "rope",
    "model.activation": "swiglu",
    "model.bias": False,
}
"""Where the default run chooses otherwise than a bare dataclass; starred in train.yaml, zero/ and model/nano.yaml."""


def choices_of(group):
    return [choice for name, choice in CHOICES if name == group]


def leaves(run):
    """Every setting by its dotted name, but those that are an optimizer's or a schedule's own."""
    found = flatten(dataclasses.asdict(run))
    return {key: value for key, value in found.items() if not key.startswith(("engine.optimizer", "engine.scheduler"))}


def test_the_groups_are_those_of_the_design():
    expected = "zero offload zeropp model data optimizer scheduler precision comm logger profiler experiment debug"
    assert set(GROUPS) == set(expected.split())


@pytest.mark.parametrize(("group", "choice"), CHOICES, ids=["=".join(one) for one in CHOICES])
def test_every_choice_composes(group, choice):
    asks_for_a_path = choice in ("text", "tokens") or (choice.startswith("gpt2_") and group == "experiment")
    more = ["data.path=/some/path"] if asks_for_a_path else []
    more += ["zero.offload_optimizer.nvme_path=/some/path"] if choice == "nvme" else []
    run = run_config(f"{group}={choice}", *more)
    assert isinstance(run, RunConfig)
    assert run.engine.optimizer is not None and run.engine.scheduler is not None
    if group == "model" and choice != "hf":
        assert run.model.name == choice


def test_what_is_not_chosen_is_as_in_the_dataclasses():
    chosen, default = leaves(RunConfig.from_mapping(settings())), leaves(RunConfig())
    assert {key: value for key, value in chosen.items() if value != default[key]} == DEPARTURES


def test_every_setting_can_be_typed_without_a_plus():
    assert {name.removeprefix("engine.") for name in leaves(RunConfig())} <= set(flatten(settings()))


def test_schedulers_show_every_parameter():
    assert set(choices_of("scheduler")) == set(CURVES)
    for choice in CURVES:
        given = settings(f"scheduler={choice}")["scheduler"]
        assert given.pop("type") == choice
        assert set(given) == {field.name for field in dataclasses.fields(CURVES[choice])}


@pytest.mark.parametrize("optimizer", choices_of("optimizer"))
@pytest.mark.parametrize("scheduler", ["constant", "warmup_cosine", "OneCycle"])
def test_optimizers_and_schedulers_can_be_built(optimizer, scheduler):
    run = run_config(f"optimizer={optimizer}", f"scheduler={scheduler}", "optimizer.lr=0.25", "train.steps=7")
    built = build_optimizer(run.engine.optimizer, [torch.nn.Parameter(torch.zeros(3))])
    assert built.defaults["lr"] == 0.25
    check_elementwise(built)
    assert len(build_scheduler(run.engine.scheduler, built, run.train.steps).get_last_lr()) == 1


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
    assert settings(*overrides)["optimizer"]["lr"] == rate
    assert run_config(*overrides).engine.optimizer.params["lr"] == rate


def test_what_follows_from_other_settings():
    assert settings("train.steps=77")["scheduler"]["total_steps"] == 77
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
    sizes = (engine.train_batch_size, engine.train_micro_batch_size_per_gpu, engine.gradient_accumulation_steps)
    assert sizes == (total, micro, accumulation)


def test_slurm_preset_names_the_plugin():
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        cfg = hydra.compose("train", overrides=["hydra/launcher=submitit_slurm"], return_hydra_config=True)
    assert cfg.hydra.launcher["_target_"].endswith("SlurmLauncher")
    assert cfg.hydra.launcher.tasks_per_node == 1


def test_every_line_of_the_contents_page_has_a_comment():
    page = Path(CONFIGS / "train.yaml").read_text(encoding="utf-8")
    lines = page[page.index("defaults:") : page.index("\nhydra:")].splitlines()
    assert [line for line in lines if line.strip() and "#" not in line and not line.endswith(":")] == []
