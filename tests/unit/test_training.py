"""Where a run of train.py begins, the command that goes on, its folder, and what its summary asks of the machine."""

import errno
import fcntl
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast
from unittest import mock

import hydra
import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import setup_globals
from omegaconf import OmegaConf

from deepzero import machine
from deepzero.checkpoint.checkpoint_dir import LOCK, release
from deepzero.compat.deepspeed_engine import DeepSpeedEngine as Engine
from deepzero.config.engine import BatchSizes, EngineConfig, resolve_batch
from deepzero.config.run import RunConfig
from deepzero.config.strict import ConfigError
from deepzero.monitor import environment
from deepzero.training import command_line, run_folder
from deepzero.training.build_model import program_of
from deepzero.training.command_line import NewFolders, compose, remove_unused, with_fallback_batch
from deepzero.training.reporting import StepTimeline, final_facts
from deepzero.training.run_folder import Command, find_start, tag_of, take, without_calls

# ---- the batch of a run that goes on, on as many ranks as before or not ----------------------------------------------


@pytest.mark.parametrize(("ranks", "saved_by", "micro", "config", "split"), [
    # Fewer ranks accumulate more; more ranks take smaller micro-batches.
    (4, 4, 3, {"train_batch_size": 12}, "12 = 3 x 1 x 4"),
    (3, 4, 3, {"train_batch_size": 12}, "12 = 2 x 2 x 3"),
    (1, 4, 3, {"train_batch_size": 12}, "12 = 3 x 4 x 1"),
    (6, 2, 6, {"train_batch_size": 12}, "12 = 2 x 1 x 6"),
    # A second start with the fewer ranks: the command names the micro-batch only, which would make a batch of 6.
    (1, 2, 6, {"train_micro_batch_size_per_gpu": 6}, "12 = 6 x 2 x 1"),
    (1, 1, 6, {"train_micro_batch_size_per_gpu": 6}, "12 = 6 x 2 x 1"),
    # It keeps the micro-batch: more than the first start had might not fit into memory.
    (2, 2, 3, {"train_batch_size": 12}, "12 = 3 x 2 x 2"),
    # What a run names goes first.
    (2, 2, 6, {"train_batch_size": 24}, "24 = 12 x 1 x 2"),
    (2, 2, 6, {"train_micro_batch_size_per_gpu": 2}, "12 = 2 x 3 x 2"),
    (2, 2, 6, {"train_batch_size": 12, "gradient_accumulation_steps": 3}, "12 = 2 x 3 x 2"),
    (5, 4, 3, {"train_batch_size": 12}, None),
])  # fmt: skip
def test_the_global_batch_is_kept(ranks, saved_by, micro, config, split):
    batch = {"global_batch": 12, "micro_batch": micro, "accumulation": 12 // micro // saved_by}
    saved = SimpleNamespace(world_size=saved_by, batch=batch)
    if split is None:
        with pytest.raises(ConfigError, match="train_batch_size=12, which 5 ranks cannot share evenly"):
            run_folder.keep_global_batch(EngineConfig(**config), saved, ranks)
        return
    sizes = resolve_batch(run_folder.keep_global_batch(EngineConfig(**config), saved, ranks), ranks)
    assert f"{sizes.global_batch} = {sizes.micro_batch} x {sizes.accumulation} x {ranks}" == split


@pytest.mark.parametrize(("words", "split"), [((), "12 = 6 x 1 x 2"), (("train_batch_size=24",), "24 = 12 x 1 x 2")])
def test_a_run_that_goes_on_elsewhere_keeps_the_batch(words, split, tmp_path, monkeypatch):
    """``train.fallback_batch_size``, which is 24, is not a batch that anybody has named."""
    (tmp_path / "text.txt").write_text("some text\n" * 2000, encoding="utf-8")
    saved(tmp_path / "other" / "checkpoints", 4, latest=4)
    batch = {"global_batch": 12, "micro_batch": 6, "accumulation": 1}
    manifest = SimpleNamespace(batch=batch, counters={"global_steps": 4}, other_micro_batch=lambda _: "")
    monkeypatch.setattr(run_folder, "read_manifest", lambda _: manifest)
    started = mock.Mock()
    monkeypatch.setattr(command_line, "launch", started)
    words = (*words, "data=text", f"data.path={tmp_path / 'text.txt'}", f"train.resume={tmp_path / 'other'}")
    words = [*words, "launch.nproc=2", "launch.device=cpu", "model.block_size=16"]
    with hydra.initialize_config_dir(str(command_line.CONFIGS), version_base="1.3"):
        run = command_line.read_config(hydra.compose("train", overrides=words))
    command_line.CommandLine(mock.Mock(), Path("train.py"))._start_ranks(run, tmp_path / "new", mock.Mock())
    release(tmp_path / "new")
    sizes = resolve_batch(started.call_args.args[2][0].engine, 2)
    assert f"{sizes.global_batch} = {sizes.micro_batch} x {sizes.accumulation} x 2" == split


# ---- the checkpoint that a run begins with ---------------------------------------------------------------------------


def saved(folder, *steps, latest=None):
    for step in steps:
        (folder / tag_of(step)).mkdir(parents=True)
        (folder / tag_of(step) / "COMMIT").touch()
    if latest is not None:
        (folder / "latest").write_text(tag_of(latest))
    return folder


def test_fewer_steps_than_were_taken(monkeypatch):
    monkeypatch.setattr(run_folder, "read_manifest", lambda path: SimpleNamespace(counters={"global_steps": 7}))
    run_folder.manifest_of(Path("saved"), 7)
    with pytest.raises(ConfigError, match=r"train\.steps=6: saved was saved after step 7; name at least as many"):
        run_folder.manifest_of(Path("saved"), 6)


def test_no_argument_of_a_call_is_advised():
    assert without_calls("a is no b; load_module_strict=False loads what both have") == "a is no b"


def test_a_kill_before_latest_was_written_for_the_first_time(tmp_path):
    own = saved(tmp_path / "checkpoints", 4, 8)
    assert find_start("auto", tmp_path) == find_start(None, tmp_path, restarted=True) == own / tag_of(8)
    (own / "latest").write_text(tag_of(4))
    assert find_start("auto", tmp_path) == own / tag_of(4)
    assert find_start("auto", tmp_path / "elsewhere") is None


def test_the_only_checkpoint_is_not_complete(tmp_path):
    own = saved(tmp_path / "checkpoints", 4, latest=4)
    (own / tag_of(4) / "COMMIT").unlink()
    with pytest.raises(ConfigError, match=r"files are lost; no other is complete: choose another hydra\.run\.dir$"):
        find_start("auto", tmp_path)
    with pytest.raises(ConfigError, match=r"files are lost$"):
        find_start(str(own), tmp_path / "another run")


def test_a_run_goes_back_to_a_checkpoint_of_its_own(tmp_path, monkeypatch):
    """Where the newest is damaged, say. Another run's only counts until this one has saved, and so does a restart's."""
    monkeypatch.chdir(tmp_path)
    own, other = (saved(Path(name) / "checkpoints", 4, 8, latest=8) for name in ("run", "other"))
    older = own / tag_of(4)
    for named in (older, older.resolve()):
        assert find_start(str(named), Path("run")) == older
        assert find_start(str(named), Path("run"), restarted=True) == own / tag_of(8)
    assert find_start(str(other / tag_of(4)), Path("run")) == own / tag_of(8)
    assert find_start(str(other / tag_of(4)), Path("new")) == other / tag_of(4)
    with pytest.raises(ConfigError, match=r"train\.resume=~nosuchuser/run: ~nosuchuser/run is not a folder"):
        find_start("~nosuchuser/run", Path("new"))


def full(path, *_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def test_a_run_goes_back_where_latest_cannot_be_read(tmp_path, monkeypatch, capsys):
    """Or cannot be written, which is one line. In another folder it replaces what is there."""
    own = saved(tmp_path / "checkpoints", 4)
    (own / "latest").write_bytes(b"\xff")
    train = SimpleNamespace(resume=str(own / tag_of(4)), seed=0, steps=8, init_from=None)
    run = SimpleNamespace(train=train, data=SimpleNamespace(name="tiny"))
    data = {"data": "tiny", "sequences": 9, "seed": 0}
    engine = SimpleNamespace(
        load_checkpoint=lambda path: (path, {"data": data}), global_steps=4, global_samples=8, global_rank=0,
        batch=BatchSizes(8, 2, 2, 2),
    )  # fmt: skip
    sampler = SimpleNamespace(go_on=lambda *_: None, num_sequences=9)
    command = SimpleNamespace(keep=lambda _: None)
    (tmp_path / "metrics.jsonl").touch()
    assert run_folder.load_start(run, tmp_path, engine, sampler, command) == 4
    assert (tmp_path / "metrics.jsonl").exists() and not capsys.readouterr().out
    assert (own / "latest").read_text() == tag_of(4)

    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "metrics.jsonl").touch()
    assert run_folder.load_start(run, tmp_path / "new", engine, sampler, command) == 4
    assert list((tmp_path / "new").iterdir()) == [] and "replacing the run of " in capsys.readouterr().out
    engine.load_checkpoint = lambda path: (None, None)
    with pytest.raises(ConfigError, match="step_00000004 was there when the run looked for it, and is gone"):
        run_folder.load_start(run, tmp_path, engine, sampler, command)
    engine.load_checkpoint = lambda path: (path, {"data": data})
    (own / "latest").write_text(tag_of(2))
    monkeypatch.setattr(run_folder.checkpoint_dir, "point_latest", full)
    with pytest.raises(ConfigError, match=r"cannot write .*/step_00000004: No space left on device; make room there"):
        run_folder.load_start(run, tmp_path, engine, sampler, command)


# ---- the command that goes on, as it is said where a run ends --------------------------------------------------------


def way_on(monkeypatch, run_dir, step, *overrides):
    monkeypatch.setattr(run_folder, "find_start", lambda *_: run_dir / "checkpoints" / "step")
    monkeypatch.setattr(run_folder, "read_manifest", lambda _: SimpleNamespace(counters={"global_steps": step}))
    return Command(("python", "train.py"), overrides, {}, False).way_on(run_dir, 10)


def test_a_record_that_cannot_be_written_leaves_no_folder(monkeypatch, tmp_path):
    """Hydra's record of a run on a full disk; that of an earlier start stays."""
    command = Command(("python", "train.py"), (), {"config.yaml": "a: 1"}, False)
    for there in ([], [tmp_path / ".hydra"]):
        with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
            patch.setattr(Path, "write_text", full)
            command.keep(tmp_path)
        assert list(tmp_path.iterdir()) == there
        command.keep(tmp_path)
    assert (tmp_path / ".hydra" / "config.yaml").read_text() == "a: 1"


def test_what_was_typed_with_the_folder(monkeypatch, tmp_path):
    assert Command(("python", "train.py"), (), {}, False).way_on(tmp_path, 10) == "", "nothing was saved"
    typed = ["zero.stage=2", "optimizer.betas=[0.9, 0.95]", "hydra.run.dir=outputs/${now:%H}", "train.resume=null"]
    said = way_on(monkeypatch, Path("/runs/1"), 7, *typed)
    assert said.startswith("saved after step 7; to go on: python train.py ")
    assert shlex.split(said)[9:] == ["zero.stage=2", "optimizer.betas=[0.9, 0.95]", "hydra.run.dir=/runs/1"]
    # The newest checkpoint goes before what the run began with.
    for value in ("None", "/runs/1/checkpoints/step_4", "'/runs/1/checkpoints/step_4'", "/runs/0"):
        said = way_on(monkeypatch, Path("/runs/1"), 7, f"train.resume={value}", "zero.stage=1")
        assert said.endswith("to go on: python train.py zero.stage=1 hydra.run.dir=/runs/1")
    said = way_on(monkeypatch, Path("/runs/1"), 10, "train.steps=10", "zero.stage=1")
    assert said.endswith("to go on to more steps: python train.py zero.stage=1 train.steps=20 hydra.run.dir=/runs/1")


@pytest.mark.parametrize(
    "name", ["a b", "it's", "a=b,c", "(1)", "back\\slash", "ends with\\", "both\\'", "${x}", "new [1]", "ü"]
)
def test_a_folder_with_any_name(name, monkeypatch):
    said = way_on(monkeypatch, Path("/runs") / name, 7)
    monkeypatch.setenv("RANK", "0")  # torchrun's, which starts it once more
    monkeypatch.setattr(command_line, "under_launcher", lambda: True)
    monkeypatch.setattr(command_line.rank_process, "recall", lambda _: f"/runs/{name}")
    monkeypatch.setattr(sys, "argv", ["train.py"])
    command_line._prepare_words()
    for override in OverridesParser.create().parse_overrides([shlex.split(said)[-1], *sys.argv[1:]]):
        assert OmegaConf.create({"dir": override.value()}).dir == f"/runs/{name}"


def test_the_python_that_runs_this(tmp_path, monkeypatch):
    here, other = tmp_path / "here", tmp_path / "other"
    for folder in (here, other):
        folder.mkdir()
        (folder / "python3").touch(0o755)
    monkeypatch.setattr(sys, "executable", str(here / "python3"))
    for path, said in ((here, "python3"), (other, sys.executable), (tmp_path, sys.executable)):
        monkeypatch.setenv("PATH", str(path))
        assert run_folder.interpreter() == said


# ---- the folder of a run that was refused, where another run may have begun ------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A run folder that Hydra makes, below another that was not there."""
    monkeypatch.setattr(NewFolders, "noted", None)
    run_dir = tmp_path / "outputs" / "12-00-00"
    NewFolders().on_run_start(OmegaConf.create({"hydra": {"run": {"dir": str(run_dir)}}}))
    run_dir.mkdir(parents=True)
    yield run_dir
    release(run_dir)


def test_a_refused_run_leaves_nothing(folder):
    take(folder)
    remove_unused()
    assert list(folder.parents[1].iterdir()) == []


def test_commands_of_one_second_have_folders_of_their_own(tmp_path):
    """A folder that is named otherwise is taken as it is, whatever a sweep's jobs are named by."""
    setup_globals()
    for kind, event in (("run", NewFolders().on_run_start), ("sweep", NewFolders().on_multirun_start)):
        for name, made in (("${now:%S}", 2), ("fixed", 2)):
            for _ in range(2):
                folders = {"dir": f"{tmp_path}/{kind}/{name}", "subdir": "${now:%S}"}
                event(OmegaConf.create({"hydra": {kind: folders}}))
            assert len(list((tmp_path / kind).iterdir())) == made
        (tmp_path / kind / "fixed").mkdir()
        event(OmegaConf.create({"hydra": {kind: folders}}))


def test_a_second_run_with_a_folder_leaves_it_to_the_first(folder):
    with (folder / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=r"^hydra\.run\.dir: another run writes to "):
            take(folder)
        remove_unused()
        assert (folder / LOCK).exists()


# ---- what a machine has room for -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nproc", "device", "room", "said"), [
    (8, "cpu", {}, "^$"),
    (9, "cpu", {}, r"^launch\.nproc=9: this machine has 2 cores, and each rank waits for all others$"),
    (9, "cpu", {"memory": 1e9}, r"^launch\.nproc=9: so many processes take 1\.35 GB .* and 1 GB are free, on 2 cores;"),
    (1, "cpu", {"memory": 2e8}, r"^the model in fp32, .* 203\.5 MB, .*\nmodel states of all ranks .* 915\.6 MB"),
    (2, "cuda", {"memory": 4e8}, r"^the model in fp32, [^\n]* 40\d\.\d MB, and this machine has 400 MB[^\n]*$"),
    (2, "cpu", {"disk": 6e8}, r"^a checkpoint takes 610\.\d MB, and the disk of \S+ has 600 MB left; make room, "),
])  # fmt: skip
def test_room_is_asked_for_before_ranks_start(nproc, device, room, said, monkeypatch, tmp_path):
    found = {"memory": 1e12, "disk": 1e12, **room}
    monkeypatch.setattr(machine, "usable_cores", lambda: {0, 1})
    monkeypatch.setattr(machine, "available_host_bytes", lambda: found["memory"])
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=found["disk"]))
    run = with_fallback_batch(compose(["model.n_embd=1024", "train_batch_size=72"]))
    try:
        told = machine.check_machine(run, program_of, tmp_path, nproc, device)
    except ConfigError as error:
        told = str(error)
    assert re.search(said, told), told


def test_a_model_whose_size_is_not_known_before_ranks_start(tmp_path):
    """One that cannot be made on the meta device, also by an error of ours, and one of a library that takes seconds."""
    make = mock.Mock(side_effect=[NotImplementedError("no meta"), ConfigError("no meta")])
    for words, calls in (([], 1), ([], 2), (["model=hf"], 2)):
        assert machine.check_machine(with_fallback_batch(compose(words)), make, tmp_path, 1, "cpu") == ""
        assert make.call_count == calls


# ---- what a run says of itself at its end ----------------------------------------------------------------------------


def test_only_the_rank_that_writes_the_summary_asks_git(monkeypatch):
    asked, facts = [], []
    monkeypatch.setattr(environment, "_commit", lambda: asked.append("git"))
    for rank in (0, 1):
        engine = SimpleNamespace(
            device=torch.device("cpu"), global_rank=rank, world_size=2, model_numel=1, skipped_steps=0,
            params_sha256=lambda: "00", report=lambda: {"memory": {}, "communication": {}},
        )  # fmt: skip
        facts.append(final_facts(RunConfig(), cast(Engine, engine), None))
    assert asked == ["git"] and set(facts[0]) == set(facts[1])
    assert facts[0]["environment"]["torch"] == torch.__version__ and facts[1]["environment"] is None


def test_a_timeline_of_an_earlier_start_keeps_its_plan(tmp_path):
    engine = SimpleNamespace(device=torch.device("cpu"), ledger=None, world_size=2, batch=BatchSizes(8, 2, 2, 2))
    timeline, told = StepTimeline(RunConfig(), tmp_path, cast(Engine, engine), 400), []
    (tmp_path / "timeline.json").write_text("an earlier start's", encoding="utf-8")
    timeline.complete(RunConfig(), told.append)
    assert told == [] and os.listdir(tmp_path) == ["timeline.json"]


def test_asking_for_the_commit_leaves_gits_index_alone(tmp_path, monkeypatch):
    """The file has another time, so that git would write down that it looked and found the same content."""
    file = tmp_path / "file"
    file.write_text("x", encoding="utf-8")
    commit = ["-c", "user.name=x", "-c", "user.email=x@x", "commit", "--quiet", "--message=x"]
    for words in (["init", "--quiet"], ["add", "file"], commit):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    os.utime(file, (1e9, 1e9))
    monkeypatch.setattr(environment, "CHECKOUT", tmp_path)
    before = (tmp_path / ".git" / "index").read_bytes()
    found = environment.environment()["commit"]
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert found == head[:12]
    assert (tmp_path / ".git" / "index").read_bytes() == before
    file.write_text("y", encoding="utf-8")
    assert environment.environment()["commit"] == f"{found}-dirty"
