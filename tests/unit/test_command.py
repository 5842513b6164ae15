"""The command that goes on, as it is said where a run ends."""

import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from deepzero.training import resume as module
from deepzero.training.resume import Command, interpreter


def way_on(monkeypatch, run_dir, step, *overrides):
    """What is said after ``step`` of 10 steps."""
    monkeypatch.setattr(module, "find_start", lambda *_: run_dir / "checkpoints" / "step")
    monkeypatch.setattr(module, "read_manifest", lambda _: SimpleNamespace(counters={"global_steps": step}))
    return Command(("python", "train.py"), overrides, {}, False).way_on(run_dir, 10)


def test_what_was_typed_with_the_folder(monkeypatch):
    typed = ["zero.stage=2", "optimizer.betas=[0.9, 0.95]", "hydra.run.dir=outputs/${now:%H}", "train.resume=null"]
    said = way_on(monkeypatch, Path("/runs/1"), 7, *typed)
    assert said.startswith("saved after step 7; to go on: python train.py ")
    assert shlex.split(said)[9:] == ["zero.stage=2", "optimizer.betas=[0.9, 0.95]", "hydra.run.dir=/runs/1"]


@pytest.mark.parametrize("value", ["None", "/runs/1/checkpoints/step_4", "'/runs/1/checkpoints/step_4'", "/runs/0"])
def test_the_newest_checkpoint_goes_before_what_the_run_began_with(value, monkeypatch):
    said = way_on(monkeypatch, Path("/runs/1"), 7, f"train.resume={value}", "zero.stage=1")
    assert said.endswith("to go on: python train.py zero.stage=1 hydra.run.dir=/runs/1")


def test_after_the_last_step_there_are_more(monkeypatch):
    said = way_on(monkeypatch, Path("/runs/1"), 10, "train.steps=10", "zero.stage=1")
    assert said.endswith("to go on to more steps: python train.py zero.stage=1 train.steps=20 hydra.run.dir=/runs/1")


@pytest.mark.parametrize(
    "name", ["a b", "it's", "a=b,c", "(1)", "back\\slash", "ends with\\", "both\\'", "${x}", "new [1]", "ü"]
)
def test_a_folder_with_any_name(name, monkeypatch):
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    said = way_on(monkeypatch, Path("/runs") / name, 7)
    (override,) = OverridesParser.create().parse_overrides([shlex.split(said)[-1]])
    assert OmegaConf.create({"dir": override.value()}).dir == f"/runs/{name}"


def test_the_python_that_runs_this(tmp_path, monkeypatch):
    here, other = tmp_path / "here", tmp_path / "other"
    for folder in (here, other):
        folder.mkdir()
        (folder / "python3").touch(0o755)
    monkeypatch.setattr(sys, "executable", str(here / "python3"))
    for path, said in ((here, "python3"), (other, sys.executable), (tmp_path, sys.executable)):
        monkeypatch.setenv("PATH", str(path))
        assert interpreter() == said


def test_nothing_was_saved(tmp_path):
    assert Command(("python", "train.py"), (), {}, False).way_on(tmp_path, 10) == ""
