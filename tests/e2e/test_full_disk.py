"""Disks that are full, or refuse: training goes on and says once what it could not write; a start is refused."""

import sys

import pytest

from tests.e2e import runs, shared


def check_goes_on(run_dir, done, names=()):
    """Everything is said once, and what is there is whole."""
    assert (done.status, done.err) == (0, "")
    steps, _ = runs.entries(run_dir)  # every line is whole
    assert [entry["step"] for entry in steps] == list(range(1, len(steps) + 1))
    assert 20 < len(steps) < 55 and runs.summary(run_dir)["steps"] == 60
    assert done.out.count(f"'{run_dir / 'metrics.jsonl'}'; training goes on, and what cannot be written is left") == 1
    assert f"metrics.jsonl: {60 - len(steps)} entries could not be written" in done.out
    assert done.out.count("training goes on without tensorboard") == ("tensorboard" in names)
    assert [path.name for path in run_dir.glob(".*.[0-9]*")] == [], "no half of a file is left"


def test_training_goes_on_and_says_it_once(full_disk):
    check_goes_on(*full_disk)


@pytest.mark.exhaustive
def test_training_goes_on_without_its_loggers(tiny, tmp_path):
    check_goes_on(*shared.full_disk(tmp_path, tiny, "[tensorboard,wandb]"), ["tensorboard"])


def on_full_disk(words, cwd):
    """A command in a process of its own, whose standard output is a full disk."""
    with open("/dev/full", "wb") as full, runs.started(words, cwd, stdout=full.fileno()) as command:
        return command.wait()


@pytest.mark.slow
def test_standard_output_on_a_full_disk(tiny, tmp_path):
    words = [sys.executable, runs.TRAIN, *tiny, "train.steps=2", "hydra.run.dir=run", "launch.nproc=1"]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "error.txt").touch()  # that it is replaced is said, too
    done = on_full_disk(words, tmp_path)
    assert done.status == 0
    assert done.err == "standard output: [Errno 28] No space left on device; training goes on without it\n"
    assert runs.summary(tmp_path / "run")["status"] == "finished"


@pytest.mark.parametrize("alone", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_help_on_a_full_disk(alone, tmp_path):
    words = [sys.executable, runs.TRAIN, "--help"]
    done = on_full_disk(words, tmp_path) if alone else runs.refused("--help", cwd=tmp_path, out="/dev/full")
    assert (done.status, done.err) == (2, "cannot write to standard output: No space left on device\n")


@pytest.mark.parametrize("where", [["hydra.run.dir=/proc/run"], ["-m", "hydra.sweep.dir=/proc/run"]], ids=str)
def test_a_folder_that_cannot_be_made(where, tiny, tmp_path):
    done = runs.refused(*where, *tiny, cwd=tmp_path)
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    assert done.err.startswith("cannot write /proc/run: No such file or directory; choose another hydra.run.dir")


def test_a_folder_that_nothing_fits_into(tiny, tmp_path):
    done = runs.refused(*tiny, "hydra.run.dir=run", cwd=tmp_path, file_bytes=0)
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    assert done.err.startswith(f"cannot write {tmp_path / 'run'}: File too large; make room there, or choose another")
    assert not (tmp_path / "run").exists()
