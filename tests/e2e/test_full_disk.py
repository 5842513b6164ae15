"""Disks that are full, or refuse: training goes on and says once what it could not write; a start is refused."""

import shlex
import sys

import pytest

from tests.e2e import runs


def within(kilobytes, *overrides, cwd):
    """``python train.py OVERRIDES`` where no file may grow above so many kilobytes, as on a full disk."""
    words = runs.last_of_each_key([sys.executable, runs.TRAIN, *overrides])
    limited = f"ulimit -f {kilobytes}; exec {shlex.join(words)}"
    with runs.started(["bash", "-c", limited], cwd, HOME=str(cwd), NETRC=str(cwd / "none")) as command:
        done = command.wait()
        assert command.processes() == {}
    return done


@pytest.mark.parametrize("names", ["[]", pytest.param("[tensorboard,wandb]", marks=pytest.mark.slow)])
def test_training_goes_on_and_says_it_once(names, tiny, tmp_path):
    more = ["train.steps=120", "train.eval_every=0", "train.save_every=0", "train.log_every=40"]
    done = within(32, *tiny, *more, f"logger.names={names}", "hydra.run.dir=run", cwd=tmp_path)
    assert (done.status, done.err) == (0, "")
    run_dir = tmp_path / "run"
    steps, _ = runs.entries(run_dir)  # every line is whole
    assert [entry["step"] for entry in steps] == list(range(1, len(steps) + 1))
    assert 40 < len(steps) < 110
    assert runs.summary(run_dir)["steps"] == 120
    assert done.out.count(f"'{run_dir / 'metrics.jsonl'}'; training goes on, and what cannot be written is left") == 1
    assert f"metrics.jsonl: {120 - len(steps)} entries could not be written" in done.out
    assert done.out.count("training goes on without tensorboard") == ("tensorboard" in names)
    assert [path.name for path in run_dir.glob(".*.[0-9]*")] == [], "no half of a file is left"


@pytest.mark.slow
def test_standard_output_on_a_full_disk(tiny, tmp_path):
    words = [sys.executable, runs.TRAIN, *tiny, "train.steps=2", "hydra.run.dir=run"]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "error.txt").touch()  # that it is replaced is said, too
    with (
        open("/dev/full", "w", encoding="utf-8") as full,
        runs.started(words, tmp_path, stdout=full.fileno()) as command,
    ):
        done = command.wait()
        assert command.processes() == {}
    assert done.status == 0
    assert done.err == "standard output: [Errno 28] No space left on device; training goes on without it\n"
    assert runs.summary(tmp_path / "run")["status"] == "finished"


@pytest.mark.parametrize("sweep", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_a_folder_that_cannot_be_made(sweep, tiny, tmp_path):
    where = ["-m", "hydra.sweep.dir=/proc/run"] if sweep else ["hydra.run.dir=/proc/run"]
    done = runs.train(*where, *tiny, cwd=tmp_path)
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    assert done.err.startswith("cannot write /proc/run: No such file or directory; make room there, or choose another")


def test_a_folder_that_nothing_fits_into(tiny, tmp_path):
    done = within(0, *tiny, "hydra.run.dir=run", cwd=tmp_path)
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    assert done.err.startswith(f"cannot write {tmp_path / 'run'}: File too large; make room there, or choose another")
    assert not (tmp_path / "run").exists()
