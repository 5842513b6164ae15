"""Settings that cannot be used: one clear message, with the offending value, the nearest valid one, before any rank."""

import importlib.util

import pytest

from deepzero.config.hydra_errors import no_such_key
from deepzero.training.command_line import CONFIGS
from tests.configs.compose import complaint
from tests.e2e import runs

REFUSED = [
    # Keys and choices.
    (["zero.stagee=1"], ["'zero.stagee'", "Did you mean 'zero.stage'?"]),
    (["zro.stage=1"], ["'zro.stage'", "'zero.stage'"]),
    (["zero.stage.x=1"], ["zero.stage"]),
    (["lr=1"], ["'lr'", "'optimizer.lr'"]),
    (["optimizer.betass=1"], ["'optimizer.betas'"]),
    (["optimzer=adamw"], ["'optimizer'"]),
    (["experimnt=smoke"], ["'experiment'"]),
    (["optimizer=adamww"], ["optimizer=adamww", "'optimizer=adamw'", "sgd"]),
    (["precision=bf17"], ["precision=bf17", "'precision=bf16'", "fp32"]),
    (["zero=stage2"], ["'zero.stage=2'"]),
    (["model=gpt2_124"], ["'model=gpt2_124m'"]),
    (["scheduler=cosine"], ["scheduler=cosine", "warmup_cosine"]),
    (["+optimizer=sgd"], ["optimizer=sgd", "without +"]),
    (["+zero.foo=1"], ["'zero.foo'", "reduce_bucket_size"]),
    (["+zero.stages=1"], ["'zero.stages'", "'zero.stage'"]),
    (["+nonsense=1"], ["'nonsense'"]),
    (["+optimizer.foo=1"], ["foo", "weight_decay"]),
    (["+scheduler.warmup=1"], ["scheduler.warmup", "warmup_steps"]),
    (["zero.stage=[1"], ["zero.stage=[1"]),
    (["zero.stage"], ["Write zero.stage=VALUE"]),
    (["zero.stage=", "2"], ["2: this is no setting", "Write KEY=VALUE, without a space"]),
    (["zero.stage:2"], ["zero.stage:2: this is no setting", "Write KEY=VALUE"]),
    (["zero_optimization.stage=2"], ["Did you mean 'zero.stage'?"]),
    (["bf16.enabled=true"], ["Did you mean 'precision=bf16'?"]),
    (["zero.stage=${x}"], ["zero.stage: Interpolation key 'x' not found"]),
    (["+offload.device=cpu"], ["offload={'device': 'cpu'}: must be the name of a file, offload=NAME"]),
    (["--zero.stage=2"], ["--zero.stage=2: settings have no dashes; write zero.stage=2"]),
    (["--model"], ["--model: settings have no dashes; write model=VALUE"]),
    (["~zero"], ["~zero: every run has a choice of zero: write zero=CHOICE, of default, stage1_allreduce"]),
    (["~zero.stag"], ["Did you mean 'zero.stage'?"]),
    (["zero.offload_optimizer.devic=cpu"], ["Did you mean 'zero.offload_optimizer.device'?"]),
    (["optimizer.momentum=0.9"], ["There are: lr, betas, eps, weight_decay", "+optimizer.momentum=VALUE"]),
    (["+experimnt=smoke"], ["Did you mean 'experiment'?"]),
    (["optimizer=sgd", "optimizer.betas=[0.9,0.9]"], ["There are: lr, momentum, dampening, weight_decay, nesterov"]),
    (["experiment=smoke", "scheduler=WarmupLR", "scheduler.warmup_steps=3"], ["mean 'scheduler.warmup_num_steps'?"]),
    (["scheduler=constant", "scheduler.min_lr_ratio=0.1"], ["'scheduler.min_lr_ratio'. There are: type"]),
    (["scheduler=OneCycle", "scheduler.params.cycle_min_lr=1"], ["no params; write scheduler.cycle_min_lr=VALUE"]),
    (["zeropp.all=true"], ["Did you mean 'zeropp=all'?"]),
    (["hydra.run.dirr=x"], ["Did you mean 'hydra.run.dir'?"]),
    (["hydra/launcher=slurm"], ["hydra/launcher=slurm: no such choice", "submitit_slurm"]),
    # Values.
    (["zero.stage=1", "train.steps=2", "zero.stage=2"], ["given twice, as zero.stage=1 and as zero.stage=2"]),
    (["zero.stage=1", "++zero.stage=1"], ["zero.stage is given twice"]),
    (["experiment=smoke", "experiment=volumes"], ["experiment is given twice"]),
    (["=3"], ["=3: no key is named; write KEY=3"]),
    ([""], ["'' is no setting; write KEY=VALUE, or leave it out"]),
    ([" "], ["' ' is no setting"]),
    (["train_batch_size=-4"], ["train_batch_size=-4", "at least 1"]),
    (["train_batch_size=1e30"], ["train_batch_size=1e+30", "too large"]),
    (["train_batch_size=1e12"], ["train_batch_size=1000000000000", "at most"]),
    (["train_batch_size=nan"], ["train_batch_size=nan", "integer"]),
    (["train_batch_size=inf"], ["train_batch_size=inf", "integer"]),
    (["train.steps=1e30"], ["train.steps=1e+30", "too large"]),
    (["gradient_clipping=nan"], ["gradient_clipping=nan", "finite"]),
    (["comm.timeout_seconds=1e30"], ["comm.timeout_seconds=1e+30", "at most"]),
    (["optimizer.lr=inf"], ["optimizer.lr=inf", "finite"]),
    (["optimizer.betas=[0.9,nan]"], ["optimizer.betas", "finite"]),
    (["scheduler.min_lr_ratio=nan"], ["scheduler.min_lr_ratio=nan", "finite"]),
    (["scheduler=WarmupLR", "scheduler.warmup_min_lr=nan"], ["scheduler.warmup_min_lr=nan: must be a finite number"]),
    (["data.max_bytes=10"], ["9 tokens", "data.max_bytes"]),
    (["zero.stage=3", "zero.zero_hpz_partition_size=3"], ["zero.zero_hpz_partition_size=3: does not divide"]),
    (["zero.stage=7"], ["zero.stage=7", "0, 1, 2 and 3"]),
    (["zero.stage=two"], ["zero.stage='two'", "integer"]),
    (["zero.stage="], ["zero.stage=''"]),
    (["zero.overlap_comm=maybe"], ["zero.overlap_comm='maybe'", "true or false"]),
    (["zero.reduce_scatter=false"], ["zero.reduce_scatter=False", "stage 1"]),
    (["zero.offload_param.device=cpu"], ["zero.offload_param.device='cpu'", "stage 3 alone", "set zero.stage=3"]),
    (["zero.stage=3", "zero.offload_param.device=cpu"], ["zero.offload_param.device", "needs zero.offload_optimizer"]),
    (["zero.offload_optimizer.device=nvme", "zero.offload_optimizer.nvme_path=a"], ["choose optimizer=cpu_adam"]),
    (["hydra.run.dir=müll"], ["hydra.run.dir=müll: Hydra cannot read", "hydra.run.dir='müll'"]),
    (["data.path=it's"], ["data.path=it's: Hydra cannot read", "it's\\\""]),
    (["launch.nproc=0"], ["launch.nproc=0"]),
    (["launch.threads_per_rank=0"], ["launch.threads_per_rank=0"]),
    (["comm.world_size_invariant=true", "launch.threads_per_rank=2"], ["launch.threads_per_rank=2", "leave it out"]),
    (["comm.world_size_invariant=true", "comm.reduce=native", "zero.stage=0"], ["bits depend", "comm.reduce=exact"]),
    (["comm.world_size_invariant=true", "grad_accum_dtype=bf16"], ["bits depend", "set grad_accum_dtype=fp32"]),
    (["launch.device=tpu"], ["launch.device='tpu'", "cpu"]),
    (["train.steps=0"], ["train.steps=0"]),
    (["train.resume="], ["train.resume=''", "auto or null"]),
    (["train.steps=1.5"], ["train.steps=1.5", "integer"]),
    (["train_batch_size=7"], ["train_batch_size=7", "6 or 8"]),
    (["train_batch_size=12", "train_micro_batch_size_per_gpu=4"], ["train_batch_size=12", "8 or 16"]),
    (["train_batch_size=16", "train_micro_batch_size_per_gpu=4", "gradient_accumulation_steps=4"],
     ["train_batch_size=16", "32"]),
    (["comm.reduce=exactly"], ["comm.reduce='exactly'", "'exact'"]),
    (["optimizer.lr=fast"], ["optimizer.lr='fast'"]),
    (["optimizer.lr=-1"], ["optimizer.lr=-1.0: must not be negative"]),
    (["hydra.run.dir="], ["hydra.run.dir=: no folder is named"]),
    (["hydra.sweep.dir=''"], ["hydra.sweep.dir='': no folder is named"]),
    (["optimizer._target_=torch.optim.AdamX"], ["AdamX"]),
    (["optimizer._target_=torch.nn.Linear"], ["torch.nn.Linear"]),
    (["scheduler.warmup_steps=-1"], ["scheduler.warmup_steps=-1"]),
    (["precision.dtype=fp32", "precision.check_grad_overflow=true"], ["check_grad_overflow", "bf16"]),
    (["precision.dtype=fp8"], ["precision.dtype='fp8'", "bf16"]),
    (["model.n_head=3"], ["model.n_head=3", "128"]),
    (["model.vocab_size=100"], ["model.vocab_size=100", "256"]),
    (["model.block_size=2000000"], ["model.block_size=2000000", "validation corpus"]),
    (["data=text"], ["data.path"]),
    (["data.path=docs"], ["data.path='docs'", "data=stdlib does not read it", "data=text"]),
    (["data.glob=*.md"], ["data.glob='*.md'", "data=text"]),
    (["precision.loss_scale=128"], ["precision.loss_scale=128.0", "precision.dtype=bf16", "precision=fp16"]),
    (["precision=fp32", "precision.hysteresis=1"], ["precision.hysteresis=1", "precision=fp16"]),
    (["debug=overflow", "train.steps=4"], ["debug.inject_overflow_at=5", "train.steps=4"]),
    (["debug.inject_overflow_at=0"], ["debug.inject_overflow_at=0", "counted from 1"]),
    (["data=text", "data.path=/nowhere"], ["/nowhere", "does not exist"]),
    (["data=tokens", "data.path=/nowhere"], ["/nowhere"]),
    (["profiler=torch", "train.steps=3"], ["train.steps=3", "6 steps"]),
    (["profiler=torch", "profiler.ranks=[2]"], ["profiler.ranks=[2]", "0 to 1"]),
    (["profiler.active=0"], ["profiler.active=0"]),
    (["logger.names=[wandb,neptune]"], ["neptune", "tensorboard"]),
    (["logger.project=a/b"], ["logger.project='a/b'", "none of /"]),
    (["logger.run_name=''"], ["logger.run_name=''", "1 to 128"]),
    (["logger.run_name=mine"], ["logger.run_name='mine'", "needs logger=wandb"]),
    (["precision=fp16", "precision.loss_scale=128", "precision.hysteresis=1"], ["precision.hysteresis=1", "is fixed"]),
    (["dataloader_drop_last=true"], ["dataloader_drop_last=True", "train.py has whole batches"]),
    (["load_universal=true"], ["load_universal=True", "train.resume"]),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "fragments"), REFUSED, ids=[" ".join(overrides) for overrides, _ in REFUSED])
def test_one_message_names_what_is_wrong(overrides, fragments):
    message = complaint(*overrides)
    assert all(fragment in message for fragment in fragments) and len(message.splitlines()) == 1, message
    assert ".params." not in message


def test_an_optimizer_that_is_not_elementwise():
    words = ["optimizer=sgd", "optimizer._target_=torch.optim.Adafactor"]
    assert "Adafactor" in complaint(*words, *(f"~optimizer.{key}" for key in ("momentum", "dampening", "nesterov")))


def test_gpus_that_are_not_there(monkeypatch):
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda check_available=False: None)
    assert "launch.device=cuda" in complaint("launch.device=cuda")


def test_an_empty_corpus_and_a_good_one(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("")
    message = complaint("data=text", f"data.path={file}")
    assert str(file) in message and "empty" in message
    file.write_text("All work and no play makes Jack a dull boy.\n" * 200)
    assert complaint("data=text", f"data.path={file}") == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["zero.stage=1", "zro.stage=2", "hydra.run.dir=run"], "Did you mean 'zero.stage'?"),
        (["launch.nproc=0"], "launch.nproc=0: must be at least 1 rank\n"),
        (["zero=1"], "zero=1: no such choice. Did you mean 'zero.stage=1'?"),
        (["precision=16"], "precision=16: no such choice. Did you mean 'precision=fp16'? There are: bf16"),
        (["-m", "zero=0,1"], "Did you mean 'zero.stage=0,1'?"),
        (["-m", "--cfg", "job"], "Hydra refuses a flag, or cannot read a config file: Only one of --run, --multirun"),
        (["hydra.run.dir=README.md"], "hydra.run.dir=README.md: README.md is a file"),
        (["hydra.run.dir=README.md/run"], "hydra.run.dir=README.md/run: README.md is a file"),
        pytest.param(
            ["-m", "hydra/launcher=submitit_slurm", "hydra.sweep.dir=out"], "pip install 'deepzero[slurm]'\n",
            marks=pytest.mark.skipif(importlib.util.find_spec("submitit") is not None, reason="it is installed"),
        ),
    ],
)  # fmt: skip
def test_on_the_command_line_there_is_one_message_and_status_2(arguments, said, tmp_path):
    (tmp_path / "README.md").write_text("keep me")
    done = runs.refused(*arguments, cwd=tmp_path)
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    assert said in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]


def test_the_flag_of_a_sweep_may_stand_between_the_settings(tmp_path):
    done = runs.refused("launch.nproc=0", "-m", "zero.stage=1", cwd=tmp_path)
    assert (done.status, done.err) == (2, "launch.nproc=0: must be at least 1 rank\n")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"zero: [", ["expected the node content", 'experiment/mine.yaml", line 1']),
        (b"\xff", ["cannot read a config file", "invalid start byte"]),
        (b"zero: {stage: 2}", ["experiment={'zero': {'stage': 2}}", "begin with the line # @package _global_"]),
        (b"", ["experiment={}", "begin with the line # @package _global_"]),
    ],
)
def test_a_file_of_choices_that_is_none(content, said, tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_bytes(content)
    done = runs.refused("--config-dir", str(tmp_path), "experiment=mine", cwd=tmp_path)
    assert (done.status, done.out) == (2, "")
    assert all(words in done.err for words in said) and "Traceback" not in done.err, done.err
    assert [path.name for path in tmp_path.iterdir()] == ["experiment"]


def test_help_is_worth_reading(tmp_path):
    done = runs.refused("--help", cwd=tmp_path)
    assert (done.status, done.err) == (0, "")
    for word in ("zero.stage=1", "-m zero.stage=0,1,2", "torchrun", "gpt2_124m", "warmup_cosine", "reduce_bucket_size"):
        assert word in done.out
    assert "+key" not in done.out, "a new key is refused"


def test_a_config_of_another_name_has_not_the_keys_of_train():
    """``--config-name zero/default experiment=smoke``: a key is never said to be meant by itself."""
    said = no_such_key("experiment", CONFIGS, ["experiment", "zero.stage"])
    assert said == "unknown config key 'experiment'. `python train.py --help` lists all keys"
