"""What a run does with a folder that has been used, and what it refuses; whatever it refuses stays as it was."""

import re
import shutil

import pytest

from tests.e2e import runs
from tests.e2e.runs import SOON, TORCHRUN
from tests.e2e.test_resume import checkpoints, far_enough, training

SHORT = [
    "train.steps=4", "train.save_every=2", "train.eval_every=0", "train.sample_tokens=0", "launch.nproc=1",
    "hydra.run.dir=run",
]  # fmt: skip


@pytest.fixture(scope="module")
def used(tmp_path_factory, tiny):
    """A folder with ``run/``, which has finished on two ranks; not to be changed."""
    cwd = tmp_path_factory.mktemp("used")
    done = runs.train(*tiny, *SHORT, "launch.nproc=2", cwd=cwd)
    assert (done.status, done.err) == (0, "")
    assert checkpoints(cwd / "run") == ["step_00000002", "step_00000004"]
    return cwd


def contents(run_dir):
    """Every file, but not the locks' texts."""
    files = [path for path in run_dir.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path): path.read_bytes() for path in files}


REFUSED = {
    "train.resume=null": "train.resume=null, and {run}/checkpoints holds checkpoints of an earlier run (step_",
    "launch.nproc=5": "the checkpoint was trained with train_batch_size=12, which 5 ranks cannot share evenly",
    "train.steps=3": "train.steps=3: {run}/checkpoints/step_00000010 was saved after step 10",
    "hydra.run.dir={run}/checkpoints": "hydra.run.dir={run}/checkpoints holds checkpoints: name their run's folder",
    "train.resume=nowhere hydra.run.dir=new": "train.resume=nowhere: nowhere is not a folder",
    "train.init_from=nowhere hydra.run.dir=new": "train.init_from=nowhere: no such file or folder",
}


def test_refused_before_anything_is_started(sweep, tiny):
    run_dir = sweep[0] / "2"
    before = contents(run_dir)
    for overrides, said in REFUSED.items():
        words = [f"hydra.run.dir={run_dir}", *overrides.format(run=run_dir).split()]
        done = runs.refused(*tiny, *words, cwd=run_dir.parent)
        assert (done.status, done.out, done.err.count("\n")) == (2, "", 1), done.err
        assert done.err.startswith(said.format(run=run_dir))
    assert contents(run_dir) == before
    assert not (run_dir.parent / "new").exists()


@pytest.mark.slow
def test_the_newest_checkpoint_is_damaged(used, tiny, tmp_path):
    """By a bit, which ranks find, or cut, which is found before any starts: it is said what goes on instead."""
    shutil.copytree(used, tmp_path, dirs_exist_ok=True)
    folder, words = tmp_path / "run" / "checkpoints", [*tiny, *SHORT, "launch.nproc=2", "launch.max_restarts=3"]
    shard, way_out = folder / "step_00000004" / "rank-00001-of-00002.safetensors", f"{folder}/step_00000002"
    content = bytearray(shard.read_bytes())
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))  # only a rank that reads it all can tell
    ends = [runs.train(*words, "train.steps=6", cwd=tmp_path)]
    assert f"{shard} is damaged: " in ends[0].err and len(runs.entries(tmp_path / "run")[0]) == 4
    shard.write_bytes(content[:-1])
    before = contents(tmp_path)
    ends.append(runs.refused(*words, "train.steps=6", cwd=tmp_path))
    assert ends[1].err.startswith(f"{shard} has ") and contents(tmp_path) == before
    for done in ends:
        assert (done.status, done.err.count("\n")) == (2, 1) and f"; {way_out} is complete (" in done.err
        assert done.err.endswith(f": the same command with train.resume={way_out} goes on from there\n")
    done = runs.train(*words, "train.steps=3", "launch.nproc=1", f"train.resume={way_out}", cwd=tmp_path)
    assert (done.status, done.err) == (0, "") and "going on after step 2" in done.out
    assert (folder / "latest").read_text() == "step_00000003", "where a restart goes on"


@pytest.mark.exhaustive
def test_a_finished_run_once_more(used, tiny, tmp_path):
    shutil.copytree(used, tmp_path, dirs_exist_ok=True)
    done = runs.train(*tiny, *SHORT, "launch.nproc=2", cwd=tmp_path)
    assert (done.status, done.err) == (0, "")
    assert "nothing was left to train" in done.out and "predicted" not in done.out
    assert runs.trajectory(tmp_path / "run") == runs.trajectory(used / "run")
    before, after = runs.summary(used / "run"), runs.summary(tmp_path / "run")
    for name in ("status", "steps", "loss", "tokens_seen", "world_size", "model_numel", "skipped_steps"):
        assert after[name] == before[name], name
    assert (after["memory"], after["communication"]) == (None, None)


ENDLESS = [*SHORT, "train.steps=100000", "train.save_every=0", "train.log_every=1000"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("by", [None, [*TORCHRUN, "--nproc-per-node=1"]], ids=["launcher", "torchrun"])
def test_two_runs_in_one_folder(by, tiny, tmp_path):
    run_dir, command = tmp_path / "run", training(*tiny, *ENDLESS, by=by)
    with runs.started(command, tmp_path) as first:
        far_enough(run_dir, 3)
        second = runs.finished(command, tmp_path, SOON)
        owner = first.ranks()[0] if by else first.process.pid
        assert second.err.startswith(f"hydra.run.dir: another run writes to {run_dir} (process {owner} on ")
        assert second.status == 1 if by else (second.status, second.err.count("\n")) == (2, 1)
        far_enough(run_dir, runs.steps_taken(run_dir) + 3)
        assert not (run_dir / "summary.json").exists()  # the second one's failure is not the first one's
        first.process.terminate()  # without checkpoints there is nothing to wait for
        done = first.wait(SOON)
    assert by or (done.status, done.err) == (143, f"stopped by SIGTERM; what there is lies in {run_dir}\n")
    assert not (run_dir / "checkpoints").exists() and done.out.count("bits   the same") == 1, done.out
    steps = [entry["step"] for entry in runs.entries(run_dir)[0]]
    assert steps == list(range(1, len(steps) + 1))
    assert by or runs.summary(run_dir)["error"] == "stopped by SIGTERM"


@pytest.mark.exhaustive
@pytest.mark.parametrize("source", ["run", "run/checkpoints/step_00000004"])
def test_going_on_from_another_folder(source, used, tiny, tmp_path):
    before = contents(used)
    more = ["train.steps=6", "scheduler=constant"]
    done = runs.train(*tiny, *SHORT, *more, f"train.resume={used / source}", cwd=tmp_path)
    assert done.status == 0, done.err
    assert re.match(r"the learning rate goes on at [\d.e-]{1,11}, and the checkpoint's was [\d.e-]{1,11}: ", done.err)
    assert "going on after step 4" in done.out
    assert contents(used) == before
    run_dir = tmp_path / "run"
    assert checkpoints(run_dir) == ["step_00000006"]
    assert [entry["step"] for entry in runs.entries(run_dir)[0]] == [5, 6]
    assert runs.entries(run_dir)[0][-1]["tokens_seen"] == 6 * 12 * 16
    assert runs.summary(run_dir)["resumed_from_step"] == 4


@pytest.mark.exhaustive
def test_all_are_kept_where_nothing_is_said_to_go(tiny, tmp_path):
    few = [("train.keep_last=null",), ("train.keep_last=1", "train.steps=5")]
    for words, left in zip(few, (["step_00000002", "step_00000004"], ["step_00000005"]), strict=True):
        done = runs.train(*tiny, *SHORT, *words, cwd=tmp_path)
        assert (done.status, done.err) == (0, "")
        assert checkpoints(tmp_path / "run") == left


@pytest.mark.exhaustive
def test_weights_only(used, tiny, tmp_path):
    done = runs.train(*tiny, *SHORT, f"train.init_from={used / 'run' / 'checkpoints'}", cwd=tmp_path)
    assert (done.status, done.err) == (0, "")
    assert "going on" not in done.out
    steps, _ = runs.entries(tmp_path / "run")
    assert [entry["step"] for entry in steps] == [1, 2, 3, 4]
    earlier = runs.entries(used / "run")[0]
    assert steps[0]["loss"] < earlier[0]["loss"]
    assert steps[0]["lr"] == earlier[0]["lr"]
    assert runs.summary(tmp_path / "run")["resumed_from_step"] is None


@pytest.mark.slow
def test_what_is_advised_can_work(used, tiny, tmp_path):
    """The weights alone serve under another optimizer; another model has no use for them."""
    resume = f"train.resume={used / 'run' / 'checkpoints'}"
    other_optimizer, other_model = (
        runs.train(*tiny, *SHORT, "train.steps=5", resume, other, cwd=tmp_path)
        for other in ("optimizer=sgd", "model.n_embd=48")
    )
    assert other_optimizer.status == other_model.status == 2
    assert "takes the weights alone" in other_optimizer.err and "train.init_from" not in other_model.err
    assert "is of another model" in other_model.err and "set model.* as it was" in other_model.err
    assert "load_" not in other_optimizer.err + other_model.err, "no argument of a call"
    weights = re.search(r"train.resume=null train.init_from=\S+", other_optimizer.err).group().split()
    assert runs.train(*tiny, *SHORT, *weights, "optimizer=sgd", cwd=tmp_path).status == 0
    again = runs.train(*tiny, *SHORT, "train.steps=5", weights[1], "optimizer=sgd", cwd=tmp_path)
    assert f"{weights[1]} is not read: this run goes on from {tmp_path}/run" in again.out, "it has gone on"
    no_weights = runs.train(*tiny, *SHORT, f"train.init_from={__file__}", "hydra.run.dir=new", cwd=tmp_path)
    assert no_weights.err.startswith(f"train.init_from={__file__}: ") and no_weights.status == 2


def test_what_is_refused_leaves_no_folder(tiny, tmp_path):
    (tmp_path / "kept").mkdir()
    for words in ("hydra.run.dir=kept/a/b train.init_from=nowhere", "zero.stage=7", "-m zero.stage=7,8",
                  "-m zero.stag=1,2 hydra.sweep.dir=kept/a"):  # fmt: skip
        first, *more = words.split()
        assert runs.refused(first, *tiny, *SHORT[:-1], *more, cwd=tmp_path).status == 2
        assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["kept"], words


@pytest.mark.exhaustive
def test_a_part_of_a_sweep_that_is_refused(tiny, tmp_path):
    done = runs.train("-m", *tiny, *SHORT[:-1], "zero.stage=7,1", "hydra.sweep.dir=a", cwd=tmp_path)
    assert done.status == 2 and done.out.endswith("a/0: refused: zero.stage=7: stages are 0, 1, 2 and 3\n"), done.out
    assert sorted(path.name for path in tmp_path.glob("*/*")) == ["1", "multirun.yaml"]


@pytest.mark.exhaustive
def test_what_torchrun_starts_and_is_refused_is_said_once_and_leaves_no_folder(tiny, tmp_path):
    for override, said in (
        ("train.init_from=nowhere", "train.init_from=nowhere: no such file or folder"),
        ("zero.stage=7", "zero.stage=7: stages are"),
        ("zero.stagee=1", "unknown config key 'zero.stagee'. Did you mean 'zero.stage'?"),
    ):
        done = runs.finished(training(*tiny, *SHORT, "launch.nproc=null", override, by=TORCHRUN), tmp_path)
        assert (done.status, done.out) == (1, "") and done.err.startswith(said)
        assert done.err.count(said) == 2, "and once more in torchrun's own report"
        assert list(tmp_path.iterdir()) == []
