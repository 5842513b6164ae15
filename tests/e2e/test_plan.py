"""`python train.py plan=true` prints a plan and leaves nothing; large simulations in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT, train

SCALE = """
import resource, sys
from tools.simulate import main
status = main(sys.argv[1:])
print("peak resident", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
sys.exit(status)
"""
"""Reads its own peak: that of all children would be some other test's."""


def test_a_plan_runs_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    done = train("plan=true", "zero.stage=3", "model.n_layer=1", "model.block_size=16", "launch.nproc=3", cwd=tmp_path)
    assert done.status == 0, done.err
    assert "stage 3" in done.out and "3 ranks on 1 node" in done.out and "one step, in order" in done.out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_plan_is_not_for_torchrun(tmp_path: Path) -> None:
    launcher = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = train("plan=true", cwd=tmp_path, **launcher)
    assert done.status == 2 and "plan=true starts nothing: run it with python, not with torchrun" in done.err
    assert not (tmp_path / "outputs").exists()


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_175_billion_parameters_on_1024_ranks(tmp_path: Path) -> None:
    words = ["model=gpt3_175b", "zero.stage=3", "--ranks", "1024", "--check", "0", "--check", "1023"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", SCALE, *words],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "ranks 0, 1023 rehearsed" in done.stdout and "all go the same way" in done.stdout
    assert "1024 ranks, 128 nodes of 8" in done.stdout
    assert int(done.stdout.split("peak resident")[1]) < 4 * 2**30


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_a_trillion_parameters_on_4096_ranks(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    words = ["model=gpt_1t", "zero.stage=3", "--ranks", "4096"]
    done = subprocess.run(
        [sys.executable, "-c", SCALE, *words],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=560,
    )
    assert done.returncode == 0, done.stderr
    assert "ranks 0, 7, 8, 2048, 4095 rehearsed" in done.stdout and "all go the same way" in done.stdout
    assert int(done.stdout.split("peak resident")[1]) < 4 * 2**30
