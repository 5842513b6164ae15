"""What a save or a load refuses, and how: on every rank, with a message that helps, and with nothing changed."""

import hashlib
import json
import shutil

import numpy as np
import pytest
import torch
from torch import nn

from deepzero.checkpoint import reader
from deepzero.checkpoint.errors import CheckpointError
from deepzero.comm import process_group
from tests.distributed.checkpoints import engine_for, fingerprints, said, steps
from tests.distributed.pool import on_ranks
from tests.distributed.training import SGD, TinyModel, start


def save_one(rank, world, folder, stage):
    engine = engine_for(world, stage)
    steps(engine, rank, world, 2)
    engine.save_checkpoint(folder, tag="first")
    engine.save_checkpoint(folder, tag="second")
    engine.destroy()


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """A folder with two checkpoints."""
    folder = tmp_path_factory.mktemp("saved")
    ranks.run(save_one, folder, 2)
    return folder


def load_from(rank, world, places):
    engine = engine_for(world, 2)
    before = engine.params_sha256()
    messages = [said(engine.load_checkpoint, folder, tag) for folder, tag in places]
    assert engine.params_sha256() == before
    steps(engine, rank, world, 1)
    engine.destroy()
    return messages


def test_folders_that_hold_no_such_checkpoint(ranks, saved, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "deepspeed" / "global_step5", tmp_path / "deepspeed3" / "global_step5"):
        place.mkdir(parents=True)
        (place.parent / "latest").write_text("global_step5")
    (tmp_path / "deepspeed" / "global_step5" / "mp_rank_00_model_states.pt").touch()
    (tmp_path / "deepspeed3" / "global_step5" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
    shutil.copytree(saved, tmp_path / "unnamed")
    (tmp_path / "unnamed" / "latest").unlink()
    expected = {
        (tmp_path / "nowhere", None): f"{tmp_path}/nowhere is not a folder; give the folder",
        (tmp_path / "file", None): "is not a folder",
        (tmp_path / "empty", None): f"{tmp_path}/empty holds no checkpoint (latest is missing)",
        (tmp_path / "empty", "x"): "x does not exist; there is no complete checkpoint in this folder",
        (saved, "third"): f"{saved}/third does not exist; there are: first, second",
        (tmp_path / "unnamed", None): "latest is missing; name the checkpoint with tag=: there are first, second",
        (saved, ""): "cannot name a checkpoint",
        (saved, "../first"): "cannot name a checkpoint",
        (saved, "x" * 300): "cannot name a checkpoint",
        (tmp_path / "deepspeed", None): "is a checkpoint of DeepSpeed's own format",
        (tmp_path / "deepspeed3", None): "is a checkpoint of DeepSpeed's own format",
    }
    for messages in ranks.run(load_from, list(expected)):
        for message, part in zip(messages, expected.values(), strict=True):
            assert message is not None and part in message


def test_a_manifest_of_a_newer_version(ranks, saved, tmp_path):
    shutil.copytree(saved, tmp_path / "newer")
    file = tmp_path / "newer" / "second" / "manifest.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "version": 2, "versions": {"deepzero": "9.1"}}))
    file.with_name("COMMIT").write_text(hashlib.sha256(file.read_bytes()).hexdigest())
    for (message,) in ranks.run(load_from, [(tmp_path / "newer", None)]):
        assert f"{file} has version 2, and this deepzero reads version 1; load it with the one that wrote it (9.1)" in (
            message
        )


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


def other_models(rank, world, folder, stage):
    """What is said, strictly or not, of models that are not the saved one."""
    found = {}
    torch.manual_seed(1)
    models = {"larger": Larger(), "renamed": Renamed(), "wider": TinyModel(hidden=39)}
    for name, model in models.items():
        engine = engine_for(world, stage, model=model)
        before = engine.params_sha256()
        strictly = said(engine.load_checkpoint, folder)
        assert engine.params_sha256() == before
        loosely = said(engine.load_checkpoint, folder, load_module_strict=False)
        found[name] = strictly, loosely
        steps(engine, rank, world, 3)
        if name == "larger":
            engine.save_checkpoint(folder / "of-larger")
        engine.destroy()
    engine = engine_for(world, stage)
    found["fewer"] = (
        said(engine.load_checkpoint, folder / "of-larger"),
        said(engine.load_checkpoint, folder / "of-larger", load_module_strict=False),
    )
    steps(engine, rank, world, 4)
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_another_model(ranks, saved, tmp_path, stage):
    shutil.copytree(saved, tmp_path / "copy")
    for found in ranks.run(other_models, tmp_path / "copy", stage):
        strictly, loosely = found["larger"]
        assert "3 missing there (extra.bias, extra.weight, seen); load_module_strict=False loads what both" in strictly
        assert loosely is None
        strictly, loosely = found["renamed"]
        assert "2 missing there (last_norm.bias, last_norm.weight)" in strictly
        assert "2 not known here (norm.bias, norm.weight)" in strictly
        assert loosely is None
        strictly, loosely = found["wider"]
        assert "parameter 'blocks.0.1.weight' has shape (37, 24) there and (39, 24) here" in strictly
        assert strictly == loosely
        strictly, loosely = found["fewer"]
        assert "3 not known here (extra.bias, extra.weight, seen)" in strictly
        assert loosely is None


def two_groups(model):
    """Biases in a group of their own."""
    params = dict(model.named_parameters())
    weights = [p for n, p in params.items() if not n.endswith("bias")]
    biases = [p for n, p in params.items() if n.endswith("bias")]
    return [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0, "lr": 3e-3}]


@on_ranks()
def test_another_optimizer(rank, world, saved):
    import deepzero
    from tests.distributed.training import config, make_model

    found = []
    engine = engine_for(world, 2, optimizer=SGD)
    found.append(said(engine.load_checkpoint, saved, load_lr_scheduler_states=False))
    found.append(said(engine.load_checkpoint, saved, load_optimizer_states=False))
    sha = engine.params_sha256()
    engine.destroy()
    model = make_model()
    engine, *_ = deepzero.initialize(model=model, model_parameters=two_groups(model), config=config(stage=2))
    found.append(said(engine.load_checkpoint, saved))
    found.append(said(engine.load_checkpoint, saved, load_optimizer_states=False))
    assert engine.params_sha256() == sha, "the same values"
    engine.destroy()
    other, rest, groups, groups_rest = found
    assert "has the state of torch.optim.adamw.AdamW (exp_avg, exp_avg_sq, step), and this run's optimizer is" in other
    assert "torch.optim.sgd.SGD; load_optimizer_states=False loads the rest" in other
    assert "has 1 optimizer groups, and this run has 2; load_optimizer_states=False" in groups
    assert rest is None and groups_rest is None


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
    records, sha = steps(engine, rank, world, 4), engine.params_sha256()
    engine.destroy()
    for kind in ("Adam", "AdamW"):
        engine = start(OneNumber(), stage=stage, optimizer={"type": kind, "params": {"lr": 0.1, "weight_decay": 0.0}})
        engine.load_checkpoint(tmp_path)
        assert (steps(engine, rank, world, 4), engine.params_sha256()) == (records, sha), kind
        engine.destroy()
    engine = start(OneNumber(), stage=stage, optimizer=SGD)
    assert "has the state of torch.optim.adam" in said(engine.load_checkpoint, tmp_path)
    engine.destroy()


class Sullen:
    """Cannot be turned into anything."""


def endless():
    values = []
    values.append(values)
    return values


@on_ranks()
def test_client_state(rank, world, tmp_path):
    engine = engine_for(world, 1)
    bad = {
        "object": {"a": [1, {"b": Sullen()}]},
        "function": {"f": len},
        "complex": {"z": 1j},
        "sparse": {"s": torch.eye(3).to_sparse()},
        "meta": {"m": torch.empty(2, device="meta")},
        "objects": {"o": np.array([Sullen()], dtype=object)},
        "texts": {"o": np.array(["a"])},
        "endless": {"e": endless()},
        "no mapping": [1, 2],
    }
    messages = {name: said(engine.save_checkpoint, tmp_path, client_state=state) for name, state in bad.items()}
    process_group.barrier()
    left = sorted(path.name for path in tmp_path.iterdir())
    process_group.barrier()
    good = {
        "pair": (1, (2.5, "x")), 3: "int", "nan": float("nan"), "inf": [float("inf"), -float("inf")], "none": None,
        "tensor": torch.arange(6.0, dtype=torch.bfloat16).reshape(2, 3), "scalar": torch.tensor(7), "flag": True,
        "empty": torch.zeros(0, 2), "array": np.arange(4, dtype=np.int16).reshape(2, 2), "numpy flag": np.bool_(True),
        "numpy": np.float32(0.5), "bytes": b"\x00\xff", "set": {1, 2}, "$odd": {"$": 1}, "big": 2**80, "ü\ud800": "\n",
        "turned": torch.arange(6).reshape(2, 3).t(), (1, "a"): -0.0, "dtype": torch.float16, "nothing": {},
    }  # fmt: skip
    engine.save_checkpoint(tmp_path, tag="good", client_state=good if rank == 0 else {"only": "rank 0's counts"})
    _, back = engine.load_checkpoint(tmp_path)
    engine.destroy()
    assert all(message is not None and message.startswith("nothing was saved. ") for message in messages.values())
    assert "client_state['a'][1]['b'] is a tests.distributed.test_checkpoint_bad_input.Sullen" in messages["object"]
    assert left == [".lock"]
    assert list(back) == list(good), rank
    for key in ("pair", 3, "inf", "none", "flag", "numpy flag", "numpy", "bytes", "set", "$odd", "big", "nothing"):
        assert back[key] == good[key] and type(back[key]) is not np.float32, key
    assert back["numpy flag"] is True
    assert back["ü\ud800"] == "\n" and back["dtype"] is torch.float16
    assert back["nan"] != back["nan"] and str(back[1, "a"]) == "-0.0"
    for key in ("tensor", "scalar", "empty", "turned"):
        assert torch.equal(back[key], good[key]) and back[key].dtype == good[key].dtype, key
    assert np.array_equal(back["array"], good["array"]) and back["array"].dtype == np.int16


@on_ranks()
def test_ranks_that_disagree(rank, world, tmp_path):
    engine = engine_for(world, 1)
    found = [
        said(engine.save_checkpoint, tmp_path, tag=f"tag{rank}"),
        said(engine.save_checkpoint, tmp_path / str(rank), tag="tag"),
        said(engine.save_checkpoint, tmp_path, tag="a/b" if rank else "ab"),
        said(engine.save_checkpoint, tmp_path, tag="ends "),
        said(engine.save_checkpoint, tmp_path, tag="latest"),
        said(engine.save_checkpoint, tmp_path, keep_last=0),
        said(engine.load_checkpoint, tmp_path),
    ]
    process_group.barrier()
    assert list(tmp_path.iterdir()) == []
    process_group.barrier()
    engine.save_checkpoint(tmp_path, tag="tag")
    engine.destroy()
    assert "save_checkpoint: this rank passes tag='tag1', but rank 0 'tag0'; pass the same" in found[0]
    assert "this rank passes save_dir=" in found[1]
    assert found[2].startswith("tag 'a/b' cannot" if rank else "rank 1: tag 'a/b' cannot")
    assert "no white space at its ends" in found[3] and "'latest' is taken" in found[4]
    assert "keep_last=0 must be at least 1" in found[5]
    assert "holds no checkpoint" in found[6]


@on_ranks()
def test_a_disk_that_fails_while_it_is_read(rank, world, saved):
    """A disk fails on rank 1 in the middle of a load."""
    engine = engine_for(world, 2)
    real = reader.os.preadv
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(reader.os, "preadv", lambda *args: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        message = said(engine.load_checkpoint, saved)
    assert reader.os.preadv is real
    with pytest.raises(CheckpointError, match="mixture of two states"):
        steps(engine, rank, world, 1)
    engine.load_checkpoint(saved)
    found = fingerprints(engine)
    engine.destroy()
    assert "Input/output error; the disk cannot read it" in message and ".safetensors" in message
    assert found
