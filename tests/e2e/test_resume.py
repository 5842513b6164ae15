"""The same command again goes on where the run was stopped, and ends with the bits of a run that never stopped."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e import runs
from tests.e2e.runs import SOON, TORCHRUN

Reference = Callable[..., Path]
STEPS = 70
LONG = [
    f"train.steps={STEPS}", "train.eval_every=40", "train.save_every=6", "gradient_accumulation_steps=3",
    "model.dropout=0.1", "train.sample_tokens=0", "train.log_every=50", "hydra.run.dir=run",
]  # fmt: skip
"""Some seconds; dropout and the order of the data show whether generators and sampler go on."""
STAGE_2 = ["zero.stage=2", "precision=bf16"]


@pytest.fixture(scope="module")
def reference(tmp_path_factory, tiny):
    """The run folder of an uninterrupted run with these overrides; each is run once."""
    known = {}

    def run(*overrides):
        if overrides not in known:
            cwd = tmp_path_factory.mktemp("whole")
            done = runs.train(*tiny, *LONG, *overrides, cwd=cwd)
            assert done.status == 0, done.err
            known[overrides] = cwd / "run"
        return known[overrides]

    return run


def training(*arguments, by=None):
    """A command line for ``train.py``; ``by`` torchrun, or as it is."""
    return [*(by or [sys.executable]), runs.TRAIN, *arguments]


def far_enough(run_dir, step):
    """Wait until the run has taken ``step`` steps."""
    runs.wait_until(lambda: runs.steps_taken(run_dir) >= step, f"step {step}")


def checkpoints(run_dir):
    """Tags in a run folder, and what should not be there."""
    beside = (".lock", "latest", "zero_to_fp32.py")
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir() if path.name not in beside)


def stop_with_sigterm(command_line, cwd):
    """SIGTERM in the middle; returns the step after which the run has left, which a checkpoint must hold."""
    run_dir = cwd / "run"
    with runs.started(command_line, cwd) as command:
        far_enough(run_dir, 15)
        command.process.terminate()
        done = command.wait(SOON)
    step = runs.steps_taken(run_dir)
    assert 15 <= step < STEPS
    assert f"stopped after step {step}; saved\n" in done.out
    assert f"saved after step {step}; to go on: " in (done.out if "torch.distributed.run" in command_line else done.err)
    assert f"step_{step:08d}" in checkpoints(run_dir) and len(checkpoints(run_dir)) == 2
    return done, step


@pytest.mark.slow
def test_sigterm_saves_and_the_same_command_goes_on(reference, tiny, tmp_path):
    arguments = [*tiny, *LONG, *STAGE_2]
    done, step = stop_with_sigterm(training(*arguments), tmp_path)
    assert done.status == 143
    stopped, way_on = done.err.splitlines()
    assert stopped == f"stopped by SIGTERM; what there is lies in {tmp_path / 'run'}"
    assert way_on.endswith(f" hydra.run.dir={tmp_path / 'run'}")
    summary = runs.summary(tmp_path / "run")
    assert (summary["status"], summary["error"], summary["steps"]) == ("stopped", "stopped by SIGTERM", step)
    report = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "The run did not finish: stopped by SIGTERM." in report
    done = runs.train(*arguments, cwd=tmp_path)
    assert (done.status, done.err) == (0, "")
    assert f"going on after step {step}" in done.out
    assert runs.summary(tmp_path / "run")["resumed_from_step"] == step
    assert f"going on after step {step}" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert runs.trajectory(tmp_path / "run") == runs.trajectory(reference(*STAGE_2))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "overrides",
    [["zero.stage=0"], ["zero.stage=1", "precision=bf16", "train.save_async=false"], ["zero.stage=3"]],
    ids=["stage 0, fp32", "stage 1, bf16, waiting for each save", "stage 3, fp32"],
)
def test_every_stage_goes_on(overrides, reference, tiny, tmp_path):
    arguments = [*tiny, *LONG, *overrides]
    stop_with_sigterm(training(*arguments), tmp_path)
    assert runs.train(*arguments, cwd=tmp_path).status == 0
    assert runs.trajectory(tmp_path / "run") == runs.trajectory(reference(*overrides))


@pytest.mark.exhaustive
def test_sigterm_to_torchrun(reference, tiny, tmp_path):
    command_line = training(*tiny, *LONG, *STAGE_2, by=TORCHRUN)
    done, step = stop_with_sigterm(command_line, tmp_path)
    assert done.status != 0  # torchrun's own
    assert runs.summary(tmp_path / "run")["error"] == "stopped by SIGTERM"
    done = runs.finished(command_line, tmp_path)
    assert done.status == 0, done.err
    assert f"going on after step {step}" in done.out
    assert runs.trajectory(tmp_path / "run") == runs.trajectory(reference(*STAGE_2))


@pytest.mark.slow
def test_a_killed_rank_is_started_again(reference, tiny, tmp_path):
    run_dir = tmp_path / "run"
    with runs.started(training(*tiny, *LONG, *STAGE_2, "launch.max_restarts=2"), tmp_path) as command:
        far_enough(run_dir, 15)
        first = command.ranks()
        os.kill(first[1], signal.SIGKILL)
        began = time.monotonic()
        runs.wait_until(lambda: not set(first) & set(command.processes()), "the other rank's end", SOON)
        print(f"the other rank ended {time.monotonic() - began:.1f} s after the kill")
        done = command.wait()
    assert (done.status, done.err.count("\n"), done.out.count("going on after step")) == (0, 1, 1), done.err
    assert done.err.startswith("rank 1 was killed by signal 9 (SIGKILL)") and done.err.endswith("; restart 1 of 2\n")
    assert runs.summary(run_dir)["resumed_from_step"] in range(6, 60, 6)
    assert runs.trajectory(run_dir) == runs.trajectory(reference(*STAGE_2))


@pytest.mark.exhaustive
def test_killed_before_the_first_checkpoint(reference, tiny, tmp_path):
    run_dir = tmp_path / "run"
    arguments = [*tiny, *LONG, *STAGE_2, "train.save_every=1000", "launch.max_restarts=2"]
    with runs.started(training(*arguments), tmp_path) as command:
        far_enough(run_dir, 5)
        os.kill(command.ranks()[0], signal.SIGKILL)
        done = command.wait()
    assert done.status == 0, done.err
    assert "rank 0 was killed by signal 9 (SIGKILL)" in done.err
    assert "going on" not in done.out
    assert runs.summary(run_dir)["resumed_from_step"] is None
    assert runs.trajectory(run_dir) == runs.trajectory(reference(*STAGE_2))


@pytest.mark.exhaustive
def test_more_kills_than_restarts(tiny, tmp_path):
    run_dir = tmp_path / "run"
    with runs.started(training(*tiny, *LONG, "train.steps=100000", "launch.max_restarts=1"), tmp_path) as command:
        far_enough(run_dir, 12)
        first = command.ranks()
        os.kill(first[1], signal.SIGKILL)
        runs.wait_until(lambda: len(command.ranks()) == 2 and not set(first) & set(command.ranks()), "new ranks")
        far_enough(run_dir, runs.steps_taken(run_dir) + 10)
        os.kill(command.ranks()[0], signal.SIGKILL)
        done = command.wait(SOON)
    first, second, third = done.err.splitlines()
    assert first.startswith("rank 1 was killed by signal 9 (SIGKILL)") and first.endswith("; restart 1 of 1")
    assert second.startswith(killed := "rank 0 was killed by signal 9 (SIGKILL)") and done.status == 1
    assert third.startswith("saved after step ")
    assert runs.summary(run_dir)["error"].startswith(killed)


@pytest.mark.exhaustive
def test_a_killed_rank_under_torchrun(reference, tiny, tmp_path):
    arguments = [argument for argument in (*tiny, *LONG, *STAGE_2) if not argument.startswith("hydra.run.dir")]
    (tmp_path / "here").mkdir()
    with runs.started(training(*arguments, by=[*TORCHRUN, "--max-restarts=2"]), tmp_path / "here") as command:
        runs.wait_until(lambda: list(tmp_path.rglob("metrics.jsonl")), "metrics")
        (metrics,) = tmp_path.rglob("metrics.jsonl")
        for rank, step in ((1, 15), (0, 45)):
            far_enough(metrics.parent, step)
            ranks = command.ranks()
            os.kill(ranks[rank], signal.SIGKILL)
            runs.wait_until(lambda old=ranks: not set(old) & set(command.processes()), "their end", SOON)
        done = command.wait()
    assert done.status == 0, done.err
    assert done.out.count("going on after step") == 2
    assert [path.parent for path in tmp_path.rglob(".hydra")] == [metrics.parent]  # not a folder for each attempt
    assert runs.trajectory(metrics.parent) == runs.trajectory(reference(*STAGE_2))
