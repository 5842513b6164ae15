"""`python train.py plan=true` prints a plan and leaves nothing; large simulations in a process of their own."""

import os
import subprocess
import sys

import pytest

from tests.e2e import runs

SCALE = """
import resource, sys
from tools.simulate import main
status = main(sys.argv[1:])
print("peak resident", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
sys.exit(status)
"""
"""Reads its own peak: that of all children would be some other test's."""


def test_a_plan_runs_nothing_and_leaves_nothing(tmp_path):
    done = runs.refused(
        "plan=true", "zero.stage=3", "model.n_layer=1", "model.block_size=16", "launch.nproc=3", cwd=tmp_path
    )
    assert done.status == 0, done.err
    assert "stage 3" in done.out and "3 ranks on 1 node" in done.out and "one step, in order" in done.out
    assert list(tmp_path.iterdir()) == []


def test_a_plan_is_not_for_torchrun(tmp_path):
    launcher = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = runs.refused("plan=true", cwd=tmp_path, **launcher)
    assert done.status == 2 and "plan=true starts nothing: run it with python, not with torchrun" in done.err
    assert not (tmp_path / "outputs").exists()


def simulated(words, cwd, timeout):
    """What a simulation in a process of its own prints, whose memory stays below 4 GB."""
    environment = {**os.environ, "PYTHONPATH": str(runs.ROOT), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", SCALE, "zero.stage=3", *words]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split("peak resident")[1]) < 4 * 2**30
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_175_billion_parameters_on_1024_ranks(tmp_path):
    said = simulated(["model=gpt3_175b", "--ranks", "1024", "--check", "0", "--check", "1023"], tmp_path, 240)
    assert "ranks 0, 1023 rehearsed" in said and "all go the same way" in said
    assert "1024 ranks, 128 nodes of 8" in said


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_a_trillion_parameters_on_4096_ranks(tmp_path):
    said = simulated(["model=gpt_1t", "--ranks", "4096"], tmp_path, 560)
    assert "ranks 0, 7, 8, 2048, 4095 rehearsed" in said and "all go the same way" in said
