"""What a run says of itself at its end: which rank asks the machine, and that asking changes nothing."""

import os
import subprocess
from types import SimpleNamespace
from typing import cast

import torch

from deepzero.compat.deepspeed_engine import DeepSpeedEngine as Engine
from deepzero.config.run import RunConfig
from deepzero.monitor import environment
from deepzero.training.reporting import final_facts

COMMIT = ["-c", "user.name=x", "-c", "user.email=x@x", "commit", "--quiet", "--message=x"]


def facts_of(rank):
    """The facts of an engine that is nothing but this rank."""
    engine = SimpleNamespace(
        device=torch.device("cpu"), global_rank=rank, world_size=2, model_numel=1, skipped_steps=0,
        params_sha256=lambda: "00", report=lambda: {"memory": {}, "communication": {}},
    )  # fmt: skip
    return final_facts(RunConfig(), cast(Engine, engine), None)


def test_only_the_rank_that_writes_the_summary_asks_git(monkeypatch):
    asked = []
    monkeypatch.setattr(environment, "_commit", lambda: asked.append("git"))
    first, second = facts_of(0), facts_of(1)
    assert asked == ["git"]
    assert first["environment"]["torch"] == torch.__version__
    assert second["environment"] is None
    assert set(first) == set(second)


def test_asking_for_the_commit_leaves_gits_index_alone(tmp_path, monkeypatch):
    """The file has another time, so that git would write down that it looked and found the same content."""
    file = tmp_path / "file"
    file.write_text("x", encoding="utf-8")
    for words in (["init", "--quiet"], ["add", "file"], COMMIT):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    os.utime(file, (1e9, 1e9))
    monkeypatch.setattr(environment, "CHECKOUT", tmp_path)
    before = (tmp_path / ".git" / "index").read_bytes()
    commit = environment.environment()["commit"]
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert commit == head[:12]
    assert (tmp_path / ".git" / "index").read_bytes() == before
    file.write_text("y", encoding="utf-8")
    assert environment.environment()["commit"] == f"{commit}-dirty"
