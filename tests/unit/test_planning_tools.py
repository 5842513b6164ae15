"""``tools.plan``, ``tools.simulate``, ``tools.advise`` from the command line: what is said, odd input, large worlds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e import runs
from tools import advise, plan, simulate

TINY = ["model.n_layer=1", "model.n_embd=32", "model.n_head=2", "model.block_size=16"]
PROGRAM = """
import torch
from torch import nn
from deepzero.config.deepspeed_json import load_engine_config
from deepzero.planning.dry_run import TrainStep

CONFIG = {
    "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.out = nn.Conv1d(8, 16, 3), nn.Linear(16, 1)

    def forward(self, x):
        return self.out(self.conv(x).transpose(1, 2)).float().mean()

class Reads(Net):
    def forward(self, x):
        return super().forward(x) * x.sum().item()

class Chooses(Net):
    def forward(self, x):
        return super().forward(x) * x.nonzero().sum()

def make(net=Net):
    batch = lambda: (torch.empty(2, 8, 32, device="meta", dtype=torch.bfloat16),)
    return TrainStep(net, batch, load_engine_config(CONFIG))

number = lambda: 3
reads = lambda: make(Reads)
chooses = lambda: make(Chooses)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(PROGRAM)
    unfit = {"train_batch_size": 7, "zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW"}}
    Path("unfit.json").write_text(json.dumps(unfit))
    Path("bare.json").write_text(json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 2}}))
    return tmp_path


def test_a_plan(folder, capsys):
    assert plan.main([*TINY, "zero.stage=3", "--ranks", "64", "--rank", "63", "--json", "plan.json"]) == 0
    text = capsys.readouterr().out
    assert "64 ranks on 8 nodes" in text and "rank 63" in text and "one step, in order" in text
    found = json.loads((folder / "plan.json").read_text())
    assert (found["stage"], found["rank"], found["world_size"], found["ranks_per_node"]) == (3, 63, 64, 8)
    assert {row["what"] for row in found["moves"]} >= {"fetch", "release", "launch", "wait", "step"}
    assert {path.name for path in folder.iterdir()} == {"mine.py", "unfit.json", "bare.json", "plan.json"}


def test_a_plan_for_a_module_of_ones_own(folder, capsys):
    assert plan.main(["--program", "mine.py:make", "--ranks", "4"]) == 0
    assert "stage 3, 417 parameters, 4 ranks" in capsys.readouterr().out
    Path("json.py").write_text(PROGRAM)
    assert plan.main(["--program", "json.py:make", "--ranks", "4"]) == 0 and sys.modules["json"] is json


def test_a_plan_for_a_hugging_face_model(folder, capsys):
    pytest.importorskip("transformers")
    assert plan.main(["model=hf", *TINY[:1], "zero.stage=3", "--ranks", "16", "--moves", "0"]) == 0
    assert "16 ranks on 2 nodes" in capsys.readouterr().out


def test_simulated_on_both_clusters_of_the_post(folder, capsys):
    words = [*TINY, "--compare", "zero.stage=1", "--compare", "zero=stage1_allreduce", "--check", "0", "--check", "5"]
    assert simulate.main([*words, "--cluster", "azure_nc24r", "--cluster", "dgx_2h", "--json", "found.json"]) == 0
    found = json.loads((folder / "found.json").read_text())
    assert [(row["cluster"], row["world_size"]) for row in found] == [("azure_nc24r", 32)] * 2 + [("dgx_2h", 128)] * 2
    for scattered, reduced in (found[:2], found[2:]):
        assert scattered["settings"].endswith("zero.stage=1") and scattered["differences"] == []
        assert scattered["network_seconds"] < reduced["network_seconds"]
    assert capsys.readouterr().out.count("all go the same way") == 4


def test_a_wrong_rank_ends_with_its_own_status(folder, capsys):
    words = [*TINY, "--ranks", "4", "--wrong", "2:blocks.0", "--wrong", "3:blocks.0.norm_1"]
    assert simulate.main(words) == simulate.DIFFERENT
    text = capsys.readouterr().out
    assert "rank 2 launches what the others launch, and computes something else" in text
    assert "rank 3 launches what" in text


@pytest.mark.parametrize(("tool", "words", "said"), [
    (plan, ["--ranks", "0"], "--ranks 0: there has to be at least one"),
    (plan, ["--ranks-per-node", "0"], "--ranks-per-node 0: there has to be at least one"),
    (plan, ["--ranks", "7", "--ranks-per-node", "2"], "--ranks-per-node 2: does not divide the 7 ranks"),
    (plan, ["--ranks", "4", "--rank", "4"], "--rank 4: there are ranks 0 to 3"),
    (plan, ["--moves", "-1"], "--moves -1: give 0 or more rows"),
    (plan, ["--json", "nowhere/plan.json"], "--json nowhere/plan.json: give a file in a folder that exists"),
    (plan, ["zero.stge=1"], "Did you mean 'zero.stage'?"),
    (plan, ["train_batch_size=7", "--ranks", "4"], "train_batch_size=7: does not divide"),
    (plan, ["--config", "unfit.json", "--ranks", "4"], "train_batch_size=7: does not divide"),
    (plan, ["--config", "bare.json", "--ranks", "4"], "they have to name one"),
    (plan, ["--config", "bare.json", "zero.stage=3"], "--config has the engine's settings; write zero.stage=3 there"),
    (plan, ["--config", "missing.json"], "'missing.json' cannot be read"),
    (plan, ["--program", "nowhere.py:make"], "there is no file 'nowhere.py'"),
    (plan, ["--program", "mine.py"], "give FILE.py:FUNCTION; no function is named"),
    (plan, ["--program", "mine.py:other"], "mine.py has no function 'other'"),
    (plan, ["--program", "mine.py:number"], "number() returned an int, not a TrainStep"),
    (plan, ["--program", "mine.py:make", "zero.stage=1"], "leave out the others"),
    (plan, ["--program", "mine.py:reads"], "this model reads values while it runs, so"),
    (plan, ["--program", "mine.py:chooses"], "this model reads values while it runs, so"),
    (simulate, ["--cluster", "h200"], "cluster=h200: there are h100"),
    (simulate, ["--cluster", "dgx_2h", "--ranks", "24"], "--ranks-per-node 16: does not divide the 24 ranks"),
    (simulate, ["--ranks", "0"], "--ranks 0: there has to be at least one"),
    (simulate, ["--wrong", "3"], "--wrong 3: give RANK:MODULE"),
    (simulate, ["--wrong", "99:blocks.0"], "rank 99: this world has ranks 0 to 7"),
    (simulate, ["--wrong", "3:blocks.9"], "no module 'blocks.9' to skip"),
    (simulate, ["--check", "9"], "rank 9: this world has ranks 0 to 7"),
    (simulate, ["--json", "nowhere/found.json"], "--json nowhere/found.json"),
    (simulate, ["--save", "probed.json"], "--save belongs to --probe"),
    (simulate, ["--probe", "--cluster", "h100"], "--probe measures"),
    (advise, ["--ranks", "0"], "--ranks 0: there has to be at least one"),
    (advise, ["--ranks", "12"], "does not divide it; say --ranks-per-node"),
    (advise, ["--ranks", "8", "--ranks-per-node", "3"], "1, 2, 4 or 8"),
    (advise, ["--memory-gb", "nan"], "--memory-gb nan: must be a positive number"),
    (advise, ["--headroom", "1"], "--headroom 1.0: must be a part"),
    (advise, ["--cluster", "b200"], "cluster=b200: there are h100"),
    (advise, ["--global-batch", "9", "--ranks", "2"], "train_batch_size=9: does not divide"),
    (advise, ["--global-batch", "8", "train_batch_size=4", "--ranks", "2"], "leave one of them out"),
    (advise, ["zero.stgae=2"], "stgae"),
    (advise, ["launch.nproc=4", "--ranks", "8"], "launch.nproc=4: advice is for 8 ranks"),
    (advise, ["--json", "none/advice.json"], "--json none/advice.json: give a file in a folder that exists"),
])  # fmt: skip
def test_what_cannot_be_used_is_one_message_and_nothing_is_written(folder, capsys, tool, words, said):
    before = sorted(folder.iterdir())
    given = {plan: [], simulate: TINY, advise: ["--json", "advice.json"]}[tool]
    assert tool.main([*given, *words]) == 2
    captured = capsys.readouterr()
    assert said in captured.err and (tool is simulate or captured.out == "")
    assert [path for path in sorted(folder.iterdir()) if path.name != "__pycache__"] == before


def test_train_py_prints_a_plan_and_leaves_nothing(tmp_path):
    done = runs.refused("plan=true", "zero.stage=3", "model.n_layer=1", "launch.nproc=3", cwd=tmp_path)
    assert done.status == 0, done.err
    assert "stage 3" in done.out and "3 ranks on 1 node" in done.out and "one step, in order" in done.out
    assert list(tmp_path.iterdir()) == []


def test_a_plan_is_not_for_torchrun(tmp_path):
    launcher = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = runs.refused("plan=true", cwd=tmp_path, **launcher)
    assert done.status == 2 and "plan=true starts nothing: run it with python, not with torchrun" in done.err
    assert not (tmp_path / "outputs").exists()


SCALE = """
import resource, sys
from tools.simulate import main
status = main(sys.argv[1:])
print("peak resident", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
sys.exit(status)
"""
"""Reads its own peak: that of all children would be some other test's."""


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
