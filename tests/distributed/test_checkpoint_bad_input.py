"""What a save or a load refuses, and how: on every rank, with a message that helps, and with nothing changed."""

import hashlib
import json
import shutil
from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from torch import nn

import deepzero
from deepzero.checkpoint import manifest, reader, shard_file
from deepzero.checkpoint.checkpoint_dir import read_manifest
from deepzero.checkpoint.errors import CheckpointError
from deepzero.comm import process_group
from tests.distributed.checkpoints import engine_for, fingerprints, said, steps
from tests.distributed.pool import on_ranks
from tests.distributed.test_checkpoint_models import two_groups
from tests.distributed.training import SGD, WHOLE, TinyModel, Wide, config, log_lines, make_batch, make_model, start


def save_two(rank, world, folder):
    engine = engine_for(world, 2)
    steps(engine, rank, world, 2)
    engine.save_checkpoint(folder, tag="first")
    engine.save_checkpoint(folder, tag="second")


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    ranks.run(save_two, folder)
    return folder


def refused(rank, world, expected):
    engine = engine_for(world, 2)
    before = engine.params_sha256()
    for (folder, tag, *also), part in expected.items():
        if isinstance(part, tuple):  # a warning, as in DeepSpeed: a run begins
            with log_lines("deepzero.checkpoint.checkpointer") as lines:
                assert engine.load_checkpoint(folder, tag) == (None, None), folder
            assert [part[0] in line for line in lines] == [True] * (rank == 0), (folder, lines)
            continue
        message = said(engine.load_checkpoint, folder, tag, **dict.fromkeys(also, True))
        assert message is not None and part in message, (folder, tag, message)
    assert engine.params_sha256() == before
    steps(engine, rank, world, 1)


def test_folders_that_hold_no_such_checkpoint(ranks, saved, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "unfinished" / ".saving-0123456789ab-x").mkdir(parents=True)
    for name in (".lock", "zero_to_fp32.py"):  # an asynchronous save leaves the script before it is done
        (tmp_path / "unfinished" / name).touch()
    for number, latest in enumerate((None, "../deepspeed0/global_step5", "")):
        place = tmp_path / f"unnamed{number}"
        (place / "t").mkdir(parents=True)
        (place / "t" / "mp_rank_00_model_states.pt").touch()
        if latest is not None:
            (place / "latest").write_text(latest)
            (place / "latest_universal").write_text("t")
    for number, name in enumerate(("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt")):
        place = tmp_path / f"deepspeed{number}"
        (place / "global_step5").mkdir(parents=True)
        (place / "latest").write_text("global_step5")
        (place / "global_step5" / name).touch()
    shutil.copytree(saved, tmp_path / "unnamed")
    (tmp_path / "unnamed" / "latest").unlink()
    shutil.copytree(tmp_path / "unnamed", tmp_path / "lost")
    for file in (tmp_path / "lost").glob("*/COMMIT"):
        file.unlink()
    shutil.copytree(tmp_path / "lost" / "first", tmp_path / "aside" / ".replaced-0123-first")
    shutil.copytree(saved, tmp_path / "newer")
    file = tmp_path / "newer" / "second" / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "version": 2, "versions": {"deepzero": "9.1"}}))
    file.with_name("COMMIT").write_text(hashlib.sha256(file.read_bytes()).hexdigest())
    version = "has version 2, and this deepzero reads version 1; load it with the one that wrote it (9.1)"
    ranks.run(refused, {
        (tmp_path / "nowhere", None): (f"{tmp_path}/nowhere is not a folder; give the folder",),
        (tmp_path / "nowhere", "x"): f"{tmp_path}/nowhere is not a folder; give the folder",
        (tmp_path / "nowhere", None, "load_module_only"): f"{tmp_path}/nowhere is not a folder; give the folder",
        (tmp_path / "empty", None, "load_module_only"): f"{tmp_path}/empty holds no checkpoint",
        (tmp_path / "file", None): "is not a folder",
        (tmp_path / "dangling", None): "is not a folder",
        (tmp_path / "empty", None): (f"{tmp_path}/empty holds no checkpoint (latest is missing)",),
        (tmp_path / "empty", "x"): "x does not exist; there is no complete checkpoint in this folder",
        (tmp_path / "unfinished", None): ("its only save was interrupted",),
        (saved, "third"): f"{saved}/third does not exist; there are: first, second",
        (tmp_path / "unnamed", None): "latest is missing; name the checkpoint with tag=: there are first, second",
        (tmp_path, None): "latest is missing; it holds aside, dangling, deepspeed0",
        (tmp_path / "lost", None): "latest is missing; it holds first, second: give the folder",
        (tmp_path / "aside", None): "latest is missing; it holds .replaced-0123-first",
        (tmp_path / "unnamed0", None): "latest is missing; it holds t: give the folder",
        (tmp_path / "unnamed1", None): "latest is damaged: '../deepspeed0/global_step5' cannot be the name",
        (tmp_path / "unnamed2", None): "latest is damaged: '' cannot be the name of a checkpoint",
        **dict.fromkeys(((saved, tag) for tag in ("", "../first", "x" * 300)), "cannot name a checkpoint"),
        (tmp_path / "deepspeed0", None): "mp_rank_00_model_states.pt is missing, truncated, or was not written by",
        (tmp_path / "deepspeed1", None): "global_step5 lacks model_states files",
        (tmp_path / "newer", None): f"{file} {version}",
    })  # fmt: skip


class Larger(TinyModel):
    def __init__(self):
        super().__init__()
        self.extra = nn.Linear(3, 5)
        self.register_buffer("seen", torch.zeros(3))


class Renamed(TinyModel):
    def __init__(self):
        super().__init__()
        self.last_norm = self.norm
        del self._modules["norm"]

    def forward(self, ids, labels):
        self.__dict__["norm"] = self.last_norm
        return super().forward(ids, labels)


MODELS = {
    "larger": (Larger, "3 missing there (extra.bias, extra.weight, seen); load_module_strict=False loads what both"),
    "renamed": (Renamed, "(last_norm.bias, last_norm.weight); 2 not known here (norm.bias, norm.weight)"),
    "wider": (lambda: TinyModel(hidden=39), "parameter 'blocks.0.1.weight' has shape (37, 24) there and (39, 24) here"),
    "fewer": (make_model, "3 not known here (extra.bias, extra.weight, seen)"),
}


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks()
def test_another_model(rank, world, saved, tmp_path, stage):
    """Strictly none loads, and nothing changes; else all but the one of another shape."""
    for name, (kind, text) in MODELS.items():
        torch.manual_seed(1)
        engine = engine_for(world, stage, model=kind())
        before = engine.params_sha256()
        folder = tmp_path if name == "fewer" else saved
        strictly = said(engine.load_checkpoint, folder)
        assert text in strictly and engine.params_sha256() == before
        assert said(engine.load_checkpoint, folder, load_module_strict=False) == (strictly if name == "wider" else None)
        steps(engine, rank, world, 3)
        if name == "larger":
            engine.save_checkpoint(tmp_path)


@on_ranks()
def test_another_optimizer(rank, world, saved):
    engine = engine_for(world, 2, optimizer=SGD)
    other = said(engine.load_checkpoint, saved, load_lr_scheduler_states=False)
    assert "has the state of torch.optim.adamw.AdamW (exp_avg, exp_avg_sq, step), and this run's optimizer is" in other
    assert "torch.optim.sgd.SGD; load_optimizer_states=False loads the rest" in other
    assert said(engine.load_checkpoint, saved, load_optimizer_states=False) is None
    sha = engine.params_sha256()
    engine.destroy()
    model = make_model()
    engine, *_ = deepzero.initialize(model=model, model_parameters=two_groups(model), config=config(stage=2))
    groups = said(engine.load_checkpoint, saved)
    assert "has 1 optimizer groups, and this run has 2; load_optimizer_states=False" in groups
    assert said(engine.load_checkpoint, saved, load_optimizer_states=False) is None
    assert engine.params_sha256() == sha, "the same values"


class OneNumber(nn.Module):
    """One element: with two ranks, one of them holds nothing."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, ids, labels):
        return (self.weight * ids.float().mean()).sum()


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.exhaustive) for stage in (0, 1, 2)), 3])
@on_ranks(3)
def test_a_rank_that_holds_nothing(rank, world, tmp_path, stage):
    """It cannot tell which optimizer it has, and does not keep the others waiting."""
    engine = start(OneNumber(), stage=stage, optimizer={"type": "Adam", "params": {"lr": 0.1}})
    steps(engine, rank, world, 2)
    engine.save_checkpoint(tmp_path)
    expected = steps(engine, rank, world, 4), engine.params_sha256()
    engine.destroy()
    for kind in ("Adam", "AdamW"):
        engine = start(OneNumber(), stage=stage, optimizer={"type": kind, "params": {"lr": 0.1, "weight_decay": 0.0}})
        engine.load_checkpoint(tmp_path)
        assert (steps(engine, rank, world, 4), engine.params_sha256()) == expected, kind
    engine = start(OneNumber(), stage=stage, optimizer=SGD)
    assert "has the state of torch.optim.adam" in said(engine.load_checkpoint, tmp_path)


class Sullen:
    """Cannot be turned into anything."""


@on_ranks()
def test_client_state(rank, world, tmp_path):
    engine, endless = engine_for(world, 1), []
    endless.append(endless)
    bad = [
        {"a": [1, {"b": Sullen()}]}, {"f": len}, {"z": 1j}, {"s": torch.eye(3).to_sparse()},
        {"m": torch.empty(2, device="meta")}, {"o": np.array([Sullen()], dtype=object)}, {"o": np.array(["a"])},
        {"e": endless}, [1, 2],
    ]  # fmt: skip
    messages = [said(engine.save_checkpoint, tmp_path, client_state=state) for state in bad]
    assert all(message is not None and message.startswith("nothing was saved. ") for message in messages)
    assert "client_state['a'][1]['b'] is a tests.distributed.test_checkpoint_bad_input.Sullen" in messages[0]
    process_group.barrier()
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    process_group.barrier()
    good = {
        "pair": (1, (2.5, "x")), 3: "int", "nan": float("nan"), "inf": [float("inf"), -float("inf")], "none": None,
        "tensor": torch.arange(6.0, dtype=torch.bfloat16).reshape(2, 3), "scalar": torch.tensor(7), "flag": True,
        "empty": torch.zeros(0, 2), "array": np.arange(4, dtype=np.int16).reshape(2, 2), "numpy flag": np.bool_(True),
        "numpy": np.float32(0.5), "bytes": b"\x00\xff", "set": {1, 2}, "$odd": {"$": 1}, "big": 2**80, "ü\ud800": "\n",
        "turned": torch.arange(6).reshape(2, 3).t(), (1, "a"): -0.0, "dtype": torch.float16, "nothing": {},
        "arguments": Namespace(lr=0.1, layers=[1, 2]), "named self": Namespace(**{"$": 1}),
        frozenset({1}): {frozenset({2}), (3, frozenset())}, "frozen": frozenset(), "tensors": {torch.eye(2): 1},
    }  # fmt: skip
    good["tensors"] |= {torch.zeros(3): 2, float("nan"): torch.ones(1), float("nan"): torch.ones(2)}
    vars(good["named self"])["self"] = 3
    engine.save_checkpoint(tmp_path, tag="good", client_state=good if rank == 0 else {"only": "rank 0's counts"})
    _, back = engine.load_checkpoint(tmp_path)
    assert list(back) == list(good), rank
    assert back["nan"] != back["nan"] and str(back[1, "a"]) == "-0.0" and back["numpy flag"] is True
    (one, other, *_), (*_, first, second) = back["tensors"], back["tensors"].values()
    assert (one.tolist(), other.tolist(), first.numel(), second.numel()) == ([[1, 0], [0, 1]], [0, 0, 0], 1, 2)
    assert type(back["frozen"]) is frozenset
    for key, value in good.items():
        if torch.is_tensor(value):
            assert torch.equal(back[key], value) and back[key].dtype == value.dtype, key
        elif isinstance(value, np.ndarray):
            assert np.array_equal(back[key], value) and back[key].dtype == value.dtype
        elif key not in ("nan", "tensors"):
            assert back[key] == value and not isinstance(back[key], np.generic), key


@on_ranks()
def test_ranks_that_disagree(rank, world, tmp_path):
    engine, here = engine_for(world, 1), tmp_path / "here"
    save, load = engine.save_checkpoint, engine.load_checkpoint
    other = "tag 'a/b' cannot"
    for call, folder, arguments, part in (
        (save, here, {"tag": f"tag{rank}"}, "save_checkpoint: this rank passes tag='tag1', but rank 0 'tag0'; pass"),
        (save, tmp_path / str(rank), {"tag": "tag"}, "this rank passes save_dir="),
        (save, here, {"tag": "a/b" if rank else "ab"}, other if rank else f"rank 1: {other}"),
        (save, here, {"tag": "ends "}, "no white space at its ends"),
        (save, here, {"tag": "latest"}, "'latest' is taken"),
        (save, here, {"tag": "manifest.json"}, "tag 'manifest.json' is the name of a file that belongs to"),
        (save, here, {"keep_last": 0}, "keep_last=0 must be at least 1"),
        (save, here, {"keep_last": 1.5}, "keep_last=1.5 must be at least 1, and a whole number"),
        (load, tmp_path, {"tag": "x"}, "there is no complete checkpoint in this folder"),
        (save, here, {"exclude_frozen_parameters": rank == 1},
         "save_checkpoint: this rank passes exclude_frozen_parameters=True, but rank 0 False"),
        (load, here, {"load_optimizer_states": rank == 0},
         "load_checkpoint: this rank passes load_optimizer_states=False, but rank 0 True"),
        (load, tmp_path / str(rank), {}, "load_checkpoint: this rank passes load_dir="),
    ):  # fmt: skip
        assert part in said(call, folder, **arguments)
    process_group.barrier()
    assert [path.name for path in tmp_path.rglob("*")] == ["here", ".lock"]
    process_group.barrier()
    engine.save_checkpoint(here, tag="tag")


@on_ranks()
def test_a_write_on_one_rank_that_a_load_would_lose(rank, world, tmp_path):
    """Stage 3 refuses it; all ranks raise, nothing has changed, and the next load goes well."""
    engine = engine_for(world, 3, zero=WHOLE)
    engine.save_checkpoint(tmp_path)

    @torch.no_grad()
    def write(head, *_):
        if rank:
            head.weight.mul_(2.0)

    hook = engine.module.head.register_forward_hook(write)
    engine(*make_batch(0, 2))
    hook.remove()
    message = said(engine.load_checkpoint, tmp_path)
    assert "was written" in message and message.startswith("rank 1: ") == (rank == 0)
    engine.load_checkpoint(tmp_path)
    steps(engine, rank, world, 1)


@on_ranks()
def test_numbers_of_numpys_and_torchs_in_a_config(rank, world, tmp_path):
    """They are written as Python's; what JSON has not is refused before a shard is written."""
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": np.int64(3), "warmup_max_lr": np.float32(0.5)}}
    engine = engine_for(world, 1, scheduler=schedule, optimizer={"type": "AdamW", "params": {"lr": torch.tensor(0.25)}})
    with patch.object(manifest, "_by_lines", wraps=manifest._by_lines) as rendered:
        engine.save_checkpoint(tmp_path, tag="one")
    dicts = [call.args[0] for call in rendered.call_args_list if isinstance(call.args[0], dict)]
    assert sum("embed.weight" in one for one in dicts) == (rank == 0), "once"
    engine.load_checkpoint(tmp_path)
    stored = json.dumps(read_manifest(tmp_path / "one").config)
    assert all(text in stored for text in ('"warmup_num_steps": 3', '"warmup_max_lr": 0.5', '"lr": 0.0'))
    engine.config.optimizer.params["odd"] = Sullen()
    with patch.object(shard_file, "put", side_effect=AssertionError):
        assert "Sullen" in said(engine.save_checkpoint, tmp_path, tag="two")


@on_ranks()
def test_another_kind_of_loss_scale(rank, world, tmp_path):
    """This run's stays, and everything else is loaded."""
    for name, scale, loaded in (("dynamic", 0, None), ("fixed", 128, 128), ("dynamic again", 0, 2.0**16)):
        engine = engine_for(world, 1, precision="fp16", fp16={"enabled": True, "loss_scale": scale})
        if loaded is not None:
            with log_lines("deepzero.checkpoint.checkpointer") as lines:
                engine.load_checkpoint(tmp_path)
            assert engine.scaler.scale == loaded and engine.global_steps == 1, name
            assert sum("as this run has it" in line for line in lines) == (rank == 0)
            engine.global_steps = 0
        steps(engine, rank, world, 1)
        engine.save_checkpoint(tmp_path)


@on_ranks()
def test_a_frozen_parameter_of_a_dtype_that_is_not_known(rank, world, tmp_path):
    model = make_model()
    model.table = nn.Parameter(torch.zeros(3, dtype=torch.uint16), requires_grad=False)
    engine = engine_for(world, 1, model=model)
    for options in ({}, {"exclude_frozen_parameters": True}):
        assert "is torch.uint16, which a checkpoint cannot hold" in said(engine.save_checkpoint, tmp_path, **options)


@pytest.mark.parametrize("weights_alone", [False, True])
@on_ranks()
def test_a_disk_that_fails_while_it_is_read(rank, world, tmp_path, weights_alone):
    """One of rank 1's, at last in the middle of a load: all raise, and another load like it ends what it has left."""
    zero = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    engine = engine_for(world, 2, model=Wide(), zero=zero, checkpoint={"load_universal": True})
    engine.save_checkpoint(tmp_path)
    failing, masters = Mock(side_effect=OSError(5, "Input/output error")), engine.zero.offload.memories[1]
    for where, name, broken, file in (
        (Path, "read_text", failing, f"{tmp_path / 'latest_universal'} cannot be read: "),
        (reader.os, "open", failing, f"{tmp_path / 'global_step0' / 'rank-00001-of-00002.safetensors'}: Input"),
        (masters, "_memory", Mock(flush=failing), f"masters in {tmp_path} cannot be loaded: Input"),
        (reader.os, "preadv", failing, "Input/output error; the disk cannot read it"),
    ):
        with patch.object(where, name, broken) if rank == 1 else nullcontext():
            message = said(engine.load_checkpoint, tmp_path, load_module_only=weights_alone)
        assert file in message and message.startswith("rank 1: ") == (rank == 0)
    with pytest.raises(CheckpointError, match="mixture of two states"):
        steps(engine, rank, world, 1)
    engine.load_checkpoint(tmp_path, load_module_only=weights_alone)
    assert fingerprints(engine)
    with patch.object(engine.checkpointer, "_take_counters", side_effect=ValueError("on purpose")):
        assert "on purpose" in said(engine.load_checkpoint, tmp_path, load_optimizer_states=False)
    assert "load the optimizer's states too" in said(engine.load_checkpoint, tmp_path, load_module_only=True)
