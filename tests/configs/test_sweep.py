"""The ready-made W&B sweep: what its agent would type composes, at every point of the grid."""

import itertools
import re

import hydra
import pytest
import yaml

from deepzero.monitor.metrics_file import scalars
from deepzero.monitor.throughput import rates
from deepzero.training.command_line import CONFIGS
from tests import ROOT
from tests.configs.compose import run_config


@pytest.fixture(scope="module")
def sweep():
    """The file, read as ``wandb sweep`` reads it (whose own function leaves it open)."""
    return yaml.safe_load((ROOT / "examples" / "sweeps" / "zero.yaml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def typed(sweep):
    """Every point of the grid, and the agent's command: W&B's own functions, put together as ``wandb agent`` does."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_RUN_ID", "abc123")
        for point in itertools.product(*(parameter["values"] for parameter in sweep["parameters"].values())):
            given = {name: {"value": value} for name, value in zip(sweep["parameters"], point, strict=True)}
            values = {**create_sweep_command_args({"args": given}), "program": [sweep["program"]]}
            values["env"] = ["/usr/bin/env"]
            command = []
            for word in create_sweep_command(list(sweep["command"])):
                macro = re.fullmatch(r"\$\{(.*)\}", word)
                command += values[macro[1]] if macro else [word]
            found.append((point, command))
    return found


def test_every_point_composes(typed):
    assert len(typed) == len({point for point, _ in typed}) == 12
    for point, command in typed:
        assert command[:3] == ["/usr/bin/env", "python", "train.py"]
        run = run_config(*command[3:])
        assert (run.engine.zero.stage, run.engine.zero.overlap_comm, run.engine.zero.reduce_bucket_size) == point
        assert run.logger.names == ("wandb",)


def test_each_run_has_a_folder_of_its_own(typed, monkeypatch):
    monkeypatch.setenv("WANDB_RUN_ID", "abc123")
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        cfg = hydra.compose("train", typed[0][1][3:], return_hydra_config=True)
    assert cfg.hydra.run.dir == "outputs/sweep/abc123"


def test_the_file_says_what_wandb_knows(sweep):
    """Keys and words of W&B's sweep configuration; the library leaves its check to the server."""
    assert set(sweep) <= {"program", "name", "project", "method", "metric", "parameters", "command", "description"}
    assert sweep["method"] in ("grid", "random", "bayes")
    assert sweep["metric"]["goal"] in ("minimize", "maximize")
    assert sweep["metric"]["name"] in scalars("train", rates(100, 0.5, 1e6, 2, None)), "which every run has"
    assert all(list(parameter) == ["values"] for parameter in sweep["parameters"].values())
    assert (ROOT / sweep["program"]).samefile(ROOT / "train.py")
