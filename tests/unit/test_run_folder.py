"""The folder of a run that was refused, where another run may have begun."""

import fcntl

import pytest
from omegaconf import OmegaConf

from deepzero.checkpoint.checkpoint_dir import LOCK, release
from deepzero.config.strict import ConfigError
from deepzero.training.run_folder import FoldersBefore, remove_unused, take


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A run folder that Hydra makes, below another that was not there."""
    monkeypatch.setattr(FoldersBefore, "noted", None)
    run_dir = tmp_path / "outputs" / "12-00-00"
    FoldersBefore().on_run_start(OmegaConf.create({"hydra": {"run": {"dir": str(run_dir)}}}))
    run_dir.mkdir(parents=True)
    yield run_dir
    release(run_dir)


def test_a_refused_run_leaves_nothing(folder):
    take(folder)
    remove_unused()
    assert list(folder.parents[1].iterdir()) == []


def test_a_second_run_of_the_same_second_leaves_the_first_ones_folder(folder):
    with (folder / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=r"^hydra\.run\.dir: another run writes to "):
            take(folder)
        remove_unused()
        assert (folder / LOCK).exists()
