"""The ready-made W&B sweep: what its agent would type composes, at every point of the grid."""

import itertools
import re
from pathlib import Path

import pytest
import yaml

from deepzero.training.command_line import CONFIGS
from tests.configs.compose import run_config

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples" / "sweeps" / "zero.yaml"


@pytest.fixture(scope="module")
def sweep():
    """The file, read as ``wandb sweep`` reads it (whose own function leaves it open)."""
    config = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    assert isinstance(config, dict)
    return config


def points(sweep):
    """Every point of the grid, in the form in which the server gives it to an agent."""
    names = list(sweep["parameters"])
    every = itertools.product(*(sweep["parameters"][name]["values"] for name in names))
    return [{name: {"value": value} for name, value in zip(names, point, strict=True)} for point in every]


def typed(sweep, point):
    """The agent's command for one point: W&B's own functions, put together as ``wandb agent`` does it."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    values = {**create_sweep_command_args({"args": point}), "program": [sweep["program"]], "env": ["/usr/bin/env"]}
    command = []
    for word in create_sweep_command(list(sweep["command"])):
        macro = re.fullmatch(r"\$\{(.*)\}", word)
        command += values[macro[1]] if macro else [word]
    return command


def test_every_point_composes(sweep, monkeypatch):
    monkeypatch.setenv("WANDB_RUN_ID", "abc123")
    grid = points(sweep)
    assert len(grid) == 12
    seen = set()
    for point in grid:
        command = typed(sweep, point)
        assert command[:3] == ["/usr/bin/env", "python", "train.py"]
        run = run_config(*command[3:])
        zero = run.engine.zero
        assert (zero.stage, zero.overlap_comm, zero.reduce_bucket_size) == tuple(v["value"] for v in point.values())
        assert run.logger.names == ("wandb",)
        seen.add((zero.stage, zero.overlap_comm, zero.reduce_bucket_size))
    assert len(seen) == len(grid)


def test_each_run_has_a_folder_of_its_own(sweep, monkeypatch):
    import hydra

    monkeypatch.setenv("WANDB_RUN_ID", "abc123")
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        cfg = hydra.compose("train", typed(sweep, points(sweep)[0])[3:], return_hydra_config=True)
    assert cfg.hydra.run.dir == "outputs/sweep/abc123"


def test_the_file_says_what_wandb_knows(sweep):
    """Keys and words of W&B's sweep configuration; the library leaves its check to the server."""
    assert set(sweep) <= {"program", "name", "project", "method", "metric", "parameters", "command", "description"}
    assert sweep["method"] in ("grid", "random", "bayes")
    assert sweep["metric"]["goal"] in ("minimize", "maximize")
    assert all(list(parameter) == ["values"] for parameter in sweep["parameters"].values())
    assert (FILE.parents[2] / sweep["program"]).samefile(ROOT / "train.py")


def test_the_metric_is_one_that_every_run_has(sweep):
    from deepzero.monitor.metrics_file import scalars
    from deepzero.monitor.throughput import rates

    assert sweep["metric"]["name"] in scalars("train", rates(100, 0.5, 1e6, 2, None))
