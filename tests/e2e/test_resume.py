"""The same command again goes on where the run was stopped, and ends with the bits of a run that never stopped."""

import os
import re
import signal
import sys
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
    "optimizer.betas=[0.9, 0.95]",  # quoted where a command is said
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
    runs.wait_until(lambda: runs.steps_taken(run_dir) >= step, f"step {step}")


def checkpoints(run_dir):
    """Tags in a run folder, and what should not be there."""
    beside = (".lock", "latest", "zero_to_fp32.py")
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir() if path.name not in beside)


def interrupt(command, run_dir, send, number):
    """A signal some steps later, and all that is told of it; returns the end, its step, and what stderr began with."""
    far_enough(run_dir, runs.steps_taken(run_dir) + 5)
    send(command.process.pid, number)
    done, step, summary = command.wait(40), runs.steps_taken(run_dir), runs.summary(run_dir)
    *before, stopped, way_on = done.err.splitlines()
    assert stopped == f"stopped by {number.name}; what there is lies in {run_dir}"
    assert way_on.startswith(f"saved after step {step}; to go on: ") and step < STEPS
    assert f"stopped after step {step}; saved\n" in done.out
    assert (summary["status"], summary["error"], summary["steps"]) == ("stopped", f"stopped by {number.name}", step)
    report = (run_dir / "report.html").read_text(encoding="utf-8")
    assert f"The run did not finish: stopped by {number.name}." in report
    assert f"step_{step:08d}" in checkpoints(run_dir) and len(checkpoints(run_dir)) == 2
    return done, step, before


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_killed_stopped_and_interrupted_a_run_keeps_its_bits(reference, tiny, tmp_path):
    """A killed rank is started again; SIGTERM, and the same command goes on; Ctrl-C, and the one that is said does."""
    elsewhere, run_dir = tmp_path / "elsewhere", tmp_path / "my (first) run"
    elsewhere.mkdir()
    command_line = training(*tiny, *LONG, *STAGE_2, "launch.max_restarts=2", f"hydra.run.dir='{run_dir}'")
    with runs.started(command_line, tmp_path, PATH="/usr/bin:/bin") as command:  # another Python's, or none's
        far_enough(run_dir, 15)
        first = command.ranks()
        os.kill(first[1], signal.SIGKILL)
        runs.wait_until(lambda: not set(first) & set(command.processes()), "the other rank's end", SOON)
        done, saved, (killed,) = interrupt(command, run_dir, os.kill, signal.SIGTERM)
    assert killed.startswith("rank 1 was killed by signal 9 (SIGKILL)") and killed.endswith("; restart 1 of 2")
    (restarted,) = re.findall(r"going on after step (\d+)", done.out)
    assert done.status == 143 and int(restarted) in range(6, 60, 6)
    with runs.started(command_line, tmp_path, PATH="/usr/bin:/bin") as command:
        done, step, before = interrupt(command, run_dir, os.killpg, signal.SIGINT)
    assert (done.status, before) == (130, []) and f"going on after step {saved}" in done.out
    again = done.err.partition("; to go on: ")[2]
    done = runs.finished(["bash", "-c", f"exec {again}"], elsewhere)  # to the letter, and from anywhere
    assert (done.status, done.err, list(elsewhere.iterdir())) == (0, "", [])
    assert f"going on after step {step}" in done.out and runs.summary(run_dir)["resumed_from_step"] == step
    assert f"going on after step {step}" in (run_dir / "report.html").read_text(encoding="utf-8")
    last = done.out.splitlines()[-1]
    assert last.startswith(f"saved after step {STEPS}; to go on to more steps: ")
    assert f" train.steps={2 * STEPS} " in last
    assert runs.trajectory(run_dir) == runs.trajectory(reference(*STAGE_2))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("overrides", "by"),
    [(["zero.stage=0"], None), (["zero.stage=1", "precision=bf16", "train.save_async=false"], None),
     (["zero.stage=3"], None), (STAGE_2, TORCHRUN)],
    ids=["stage 0, fp32", "stage 1, bf16, waiting for each save", "stage 3, fp32", "torchrun"],
)  # fmt: skip
def test_sigterm_in_the_middle_and_the_same_command_again(overrides, by, reference, tiny, tmp_path):
    run_dir, arguments = tmp_path / "run", [*tiny, *LONG, *overrides]
    with runs.started(training(*arguments, "profiler=torch", "profiler.active=60", by=by), tmp_path) as command:
        far_enough(run_dir, 15)
        command.process.terminate()
        done = command.wait(SOON)
    step = runs.steps_taken(run_dir)
    assert done.status != 0 and 15 <= step < STEPS
    assert f"stopped after step {step}; saved\n" in done.out
    assert f"saved after step {step}; to go on: " in (done.out if by else done.err)
    assert f"step_{step:08d}" in checkpoints(run_dir) and len(checkpoints(run_dir)) == 2
    assert runs.summary(run_dir)["error"] == "stopped by SIGTERM"
    assert len(list(run_dir.glob("traces/*.pt.trace.json"))) == 1, "of the steps up to there"
    strict = {} if by else {"PYTHONWARNINGS": "error"}  # torchrun has warnings of its own
    done = runs.finished(training(*arguments, by=by), tmp_path, **strict)
    assert done.status == 0 and f"going on after step {step}" in done.out, done.err
    assert runs.trajectory(run_dir) == runs.trajectory(reference(*overrides))


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
