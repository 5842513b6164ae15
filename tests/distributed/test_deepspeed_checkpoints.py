"""Checkpoints that DeepSpeed has written: read bit for bit in any stage and by any number of ranks, never executed."""

import json
import pickle
import runpy
import shutil
import tarfile
from argparse import Namespace
from collections import defaultdict
from pathlib import Path, PurePosixPath
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import deepzero
from deepzero.checkpoint.errors import CheckpointError
from deepzero.compat import deepspeed_checkpoint, utilities, zero_to_fp32
from deepzero.compat.utilities import clone_tensors_for_torch_save
from deepzero.runtime.zero.partition_parameters import GatheredParameters
from deepzero.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from tests.distributed import moved_runs
from tests.distributed.checkpoints import said
from tests.distributed.moved_runs import CLIENT_STATE, RUNS, SAVED, UNTIL, Model, optimizer_for, settings, train
from tests.distributed.pool import on_ranks
from tests.distributed.training import log_lines


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """What DeepSpeed 0.19.8 has written, see ``moved_runs.py``."""
    folder = tmp_path_factory.mktemp("theirs")
    with tarfile.open(Path(__file__).parent / "data" / "deepspeed.tar.xz") as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # not in each 3.10 and 3.11
        archive.extractall(folder)
    return folder


def engine_for(name, stage):
    """Another initialisation than that of the run that was saved."""
    torch.manual_seed(5)
    model = Model()
    with torch.no_grad():
        for tensor in (*model.parameters(), model.scale):
            tensor.mul_(3)
    return deepzero.initialize(model=model, optimizer=optimizer_for(model), config=settings(stage, RUNS[name][1]))[0]


def values(engine):
    """Every parameter's master and moments, or the value of one that is not trained."""
    found = {}
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            moments = {key: safe_get_full_optimizer_state(param, key) for key in ("exp_avg", "exp_avg_sq")}
            found[name] = {"master": safe_get_full_fp32_param(param), **moments}
        else:
            with GatheredParameters([param]):
                found[name] = {"master": param.detach().float().clone()}
    return found


def moves_over(rank, world, folder, name, tag, stage):
    engine = engine_for(name, stage)
    truth = torch.load(folder / name / "truth.pt")
    path, client_state = engine.load_checkpoint(folder / name, tag)
    assert path == str(folder / name / tag) and torch.equal(client_state.pop("seen"), CLIENT_STATE["seen"])
    assert client_state == {key: value for key, value in CLIENT_STATE.items() if key != "seen"}
    for key, expected in truth["values"].items():
        for what, tensor in values(engine)[key].items():
            assert torch.equal(tensor.flatten(), expected[what].flatten()), (key, what)
    assert engine.module.scale.tolist() == [1.5, 0.5, 1.0, 1.0, 2.0, 1.0]
    assert (engine.global_steps, engine.skipped_steps) == (SAVED, truth["skipped"])
    assert engine.loss_scale == truth["scale"] and (truth["skipped"] > 0) == (RUNS[name][1] == "fp16")
    losses = train(engine, SAVED, UNTIL, rank)
    if world == RUNS[name][2]:
        nearly = {"abs": 1e-5} if RUNS[name][1] == "fp32" else {"rel": 1e-3}
        assert losses == pytest.approx(truth["losses"][rank], **nearly), (losses, truth["losses"][rank])
        assert engine.get_lr() == truth["lr"]
    again = values(engine)
    engine.save_checkpoint(folder / f"ours-{tag}-{name}-{stage}-{world}", tag="ours")
    engine.load_checkpoint(folder / f"ours-{tag}-{name}-{stage}-{world}")
    assert all(torch.equal(t, again[key][what]) for key, kept in values(engine).items() for what, t in kept.items())


@pytest.mark.parametrize("name,tag,stage,world", [
    pytest.param("stage1-fp32", "own", 2, 1, marks=pytest.mark.exhaustive),
    ("stage1-fp32", "universal", 3, 2),
    ("stage2-bf16", "own", 1, 3),
    pytest.param("stage2-bf16", "own", 3, 2, marks=pytest.mark.exhaustive),
    pytest.param("stage3-fp16", "own", 0, 2, marks=pytest.mark.exhaustive),
    ("stage3-fp16", "own", 3, 3),
    ("stage3-fp16", "universal", 2, 2),
])  # fmt: skip
def test_a_run_moves_over(ranks, theirs, tmp_path, name, tag, stage, world):
    """Masters, moments, frozen and tied parameters, buffer, counters, scale and schedule; then the same losses."""
    shutil.copytree(theirs / name, tmp_path / name)
    ranks.run(moves_over, tmp_path, name, tag, stage, world_size=world)


def linear_of_deepspeed(x, weight, bias=None):
    """What DeepSpeed's stage 3 puts in the place of torch's, for inputs of three dimensions."""
    product = x.matmul(weight.t())
    return product if bias is None else product + bias


def next_losses(rank, world, folder):
    """The first loss after a checkpoint of DeepSpeed's stage 3, with torch's linear layers and with DeepSpeed's."""
    found = []
    for linear in (torch.nn.functional.linear, linear_of_deepspeed):
        with mock.patch.object(torch.nn.functional, "linear", linear), mock.patch.object(
            moved_runs, "Affine", torch.nn.Linear
        ):  # fmt: skip
            engine = engine_for("stage2-bf16", 2)
            engine.load_checkpoint(folder, "own")
            found.append(train(engine, SAVED, SAVED + 1, 0)[0])
            engine.destroy()
    return found


def test_deepspeeds_linear_rounds_twice(ranks, theirs):
    """Nothing else keeps the first loss after its stage 3 from being the same to the last bit."""
    once, twice = ranks.run(next_losses, theirs / "stage3-bf16", world_size=1)[0]
    assert abs(once - twice) > 1e-3
    assert twice == pytest.approx(moved_runs.NEXT_LOSS, abs=1e-4)


def edited(change):
    """Write a ``.pt`` file of another content."""

    def act(path):
        content = torch.load(path)
        change(content)
        torch.save(content, path)

    return act


class Evil:
    def __reduce__(self):
        return eval, ("open('/tmp/executed', 'w')",)


def shorter(path):
    path.write_bytes(path.read_bytes()[:-500])


def one_bit(path):
    """In the bytes of a tensor: only the archive's sums show it."""
    with torch.serialization.safe_globals([(deepspeed_checkpoint._Inert, n) for n in deepspeed_checkpoint._CLASSES]):
        tensor = torch.load(path)["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["exp_avg"]
    raw = path.read_bytes()
    at = raw.index(tensor.numpy().tobytes())
    path.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])


MODEL, OPTIM = "own/mp_rank_00_model_states.pt", "own/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
DAMAGES = {
    "truncated": (OPTIM, shorter, "is missing, truncated, or was not written by torch.save"),
    "empty": (MODEL, lambda path: path.write_bytes(b""), "is missing, truncated, or was not written by torch.save"),
    "a plain pickle": (MODEL, lambda path: path.write_bytes(pickle.dumps(Evil())), "was not written by torch.save"),
    "a rank is missing": (OPTIM, Path.unlink, "is not whole"),
    "rank 0 is missing": (OPTIM.replace("rank_1", "rank_0"), Path.unlink, "lacks optim_states files, or has two"),
    "no model": (MODEL, Path.unlink, "lacks model_states files"),
    "malicious": (MODEL, edited(lambda content: content.update(evil=Evil())), "no plain data (builtins.eval)"),
    "no moments": ("universal/zero/embed.weight/exp_avg.pt", Path.unlink, "of exp_avg of 'embed.weight'"),
    "no shapes": (MODEL, edited(lambda content: content.pop("param_shapes")), "is not as DeepSpeed 0.9 to 0.19 writes"),
    "another model": (MODEL, edited(lambda c: c["buffer_names"].clear()), "is of another model: 1 missing"),
    "tensor parallel": (MODEL, lambda path: shutil.copy(path, path.with_name("mp_rank_01_model_states.pt")), "divided"),
    "one bit": (OPTIM, one_bit, "/data/1 is not what was written"),
}


def refuses(rank, world, folders):
    engine = engine_for("stage2-bf16", 2)
    before = values(engine)
    for what, folder in folders.items():
        message = said(engine.load_checkpoint, folder, DAMAGES[what][0].partition("/")[0])
        assert message is not None and DAMAGES[what][2] in message and str(folder) in message, (what, message)
        if what != "one bit":  # found while it is read: then nothing may be done but load again
            same = [torch.equal(t, before[k][w]) for k, kept in values(engine).items() for w, t in kept.items()]
            assert all(same) and engine.global_steps == 0, what


def test_nothing_malformed_is_loaded_and_no_pickle_executed(ranks, theirs, tmp_path):
    for what, (file, act, _) in DAMAGES.items():
        shutil.copytree(theirs / "stage2-bf16", tmp_path / what)
        act(tmp_path / what / file)
    ranks.run(refuses, {what: tmp_path / what for what in DAMAGES})
    assert "gate" in zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "malicious", "own")
    assert not Path("/tmp/executed").exists()


def without_places(path):
    """Only the order of parameters says where one lies, as it is with ``round_robin_gradients``."""
    with torch.serialization.safe_globals([(deepspeed_checkpoint._Inert, n) for n in deepspeed_checkpoint._CLASSES]):
        own = torch.load(path)["optimizer_state_dict"]
    kept = {key: own[key] for key in ("base_optimizer_state", "single_partition_of_fp32_groups")}
    torch.save({"optimizer_state_dict": kept}, path)


def test_parameters_that_were_dealt_out_in_turn(theirs, tmp_path):
    """DeepSpeed's ``param_slice_mappings`` are wrong then, in what it converts too: values would change places."""
    shutil.copytree(theirs / "stage2-bf16", tmp_path, dirs_exist_ok=True)
    read = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint
    expected = read(tmp_path, "own")
    for model in (MODEL, MODEL.replace("own", "universal")):
        edited(lambda c: c["ds_config"]["zero_optimization"].update(round_robin_gradients=True))(tmp_path / model)
    for rank in "01":
        without_places(tmp_path / OPTIM.replace("rank_1", f"rank_{rank}"))
    found = read(tmp_path, "own")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    with pytest.raises(CheckpointError, match="puts into each other's places; load the checkpoint that was converted"):
        read(tmp_path, "universal")
    # Stage 3 does not look at the setting.
    edited(lambda c: c["ds_config"]["zero_optimization"].update(stage=3))(tmp_path / MODEL.replace("own", "universal"))
    assert read(tmp_path, "universal").keys() == expected.keys()


def weights_alone(rank, world, folder):
    engine = engine_for("stage2-bf16", 3)
    engine.load_checkpoint(folder, load_module_only=True)
    truth = torch.load(folder / "truth.pt")["values"]
    assert all(torch.equal(one["master"].view(-1), truth[k]["master"].view(-1)) for k, one in values(engine).items())
    assert engine.global_steps == 0 and not values(engine)["gate"]["exp_avg"].any()
    message = said(engine.load_checkpoint, folder)
    assert "multiarray.scalar, numpy.dtype, pathlib" in message and "load_module_only=True" in message
    allowed = [np.dtype, np.dtypes.Float64DType, type(PurePosixPath()), np.float64(0).__reduce__()[0]]
    with (
        torch.serialization.safe_globals(allowed),
        log_lines("deepzero.compat.deepspeed_checkpoint") as lines,
        log_lines("deepzero.checkpoint.json_codec") as warned,
    ):
        _, client_state = engine.load_checkpoint(folder)
    counts = client_state.pop("counts")
    assert counts == {"a": [1]} and counts["b"] == [] and type(client_state.pop("by")) is dict
    assert ["client_state['by'] is a defaultdict" in line for line in warned] == [True] * (rank == 0)
    assert client_state["best"] == 0.5 and {*client_state} == {*CLIENT_STATE, "best"} and engine.global_steps == SAVED
    said_once = ["client_state['where'] is a pathlib" in line and "left out" in line for line in lines]
    assert said_once == [True] * (rank == 0)


def test_weights_alone_and_by_latest(ranks, theirs, tmp_path):
    shutil.copytree(theirs / "stage2-bf16", tmp_path, dirs_exist_ok=True)
    (tmp_path / "latest").write_text("own")
    counts, by = defaultdict(list, a=[1]), defaultdict(PurePosixPath, a=1)
    edited(lambda c: c.update(where=PurePosixPath("/x"), best=np.float64(0.5), counts=counts, by=by))(tmp_path / MODEL)
    ranks.run(weights_alone, tmp_path)


@on_ranks(1)
def test_load_universal_looks_for_its_own_latest_first(rank, world, tmp_path):
    for asked, found in ((True, "older"), (False, "newer")):
        model = Model()
        config = settings(2, "fp32") | {"checkpoint": {"load_universal": asked}}
        engine = deepzero.initialize(model=model, optimizer=optimizer_for(model), config=config)[0]
        assert engine.load_universal_checkpoint() is asked
        for tag in ("older", "newer"):
            engine.save_checkpoint(tmp_path, tag=tag)
        (tmp_path / "latest_universal").write_text("older\n")
        assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / found)


def saves(rank, world, folder):
    engine = engine_for("stage3-fp16", 3)
    train(engine, 0, 3, rank)
    engine.save_checkpoint(folder, tag="ours", exclude_frozen_parameters=False)
    with safe_open(engine._get_optimizer_ckpt_name(folder, "ours", 0), "pt") as file:
        assert any("exp_avg" in key for key in file.keys())  # noqa: SIM118
    if rank == 0:
        (folder / "zero_to_fp32.py").write_text("")  # cut short: the next save puts it right
    engine.save_checkpoint(folder, tag="some", exclude_frozen_parameters=True, save_latest=False)
    return {name: tensors["master"].clone() for name, tensors in values(engine).items()}


def test_weights_in_fp32_as_deepspeed_gives_them(ranks, theirs, tmp_path, monkeypatch, caplog):
    """The functions and the script of ``zero_to_fp32``, on checkpoints of ours and of theirs."""
    ours, scale = ranks.run(saves, tmp_path / "ours")[0], torch.tensor([4.5, 1.5, 3.0, 3.0, 6.0, 3.0])
    truth = {key: kept["master"] for key, kept in torch.load(theirs / "stage3-fp16" / "truth.pt")["values"].items()}
    shutil.copytree(theirs / "stage3-fp16", tmp_path / "theirs")
    (tmp_path / "theirs" / "latest").write_text("own")
    edited(lambda content: content.update(where=PurePosixPath("/x")))(
        next((tmp_path / "theirs" / "own").glob("zero_pp_rank_0_*model_states.pt"))
    )
    frozen, moves, replace = {"frozen.weight", "frozen.bias"}, [], Path.replace
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder, expected, buffer in (("ours", ours, scale), ("theirs", truth, scale / 3)):
        whole = {**expected, "head.weight": expected["embed.weight"], "scale": buffer}
        state = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path / folder)
        assert state.keys() == whole.keys() and state["head.weight"] is state["embed.weight"]
        assert all(torch.equal(state[name].view(-1), value.view(-1)) for name, value in whole.items())
        lazy = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(
            tmp_path / folder, exclude_frozen_parameters=True, lazy_mode=True
        )
        assert whole.keys() - lazy.keys() == frozen and torch.equal(lazy["gate"].contiguous(), whole["gate"])
        model = zero_to_fp32.load_state_dict_from_zero_checkpoint(Model(), tmp_path / folder)
        assert torch.equal(model.head.weight, state["embed.weight"]) and not caplog.records
        out = tmp_path / f"{folder}-out"
        if folder == "ours":
            monkeypatch.setattr("sys.argv", ["zero_to_fp32.py", str(tmp_path / folder), str(out)])
            runpy.run_path(str(tmp_path / folder / "zero_to_fp32.py"), run_name="__main__")
        else:
            zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(tmp_path / folder, out)
        written = torch.load(out / "pytorch_model.bin")
        assert all(torch.equal(written[name], value) for name, value in state.items()) and len(written) == len(state)
        for name in ("config.json", "model.safetensors", "model.safetensors.index.json"):
            (out / name).touch()
        with mock.patch.object(Path, "replace", lambda source, to: (moves.append(to), replace(source, to))[1]):
            zero_to_fp32.convert_zero_checkpoint_to_state_dict(f"~/{folder}", f"~/{out.name}", "bf16", "200B", False)
        assert moves[-1] == out / "pytorch_model.bin.index.json", "what is opened first comes last"
        index = json.loads((out / "pytorch_model.bin.index.json").read_text())["weight_map"]
        parts = {file: torch.load(out / file) for file in set(index.values())}
        # Hugging Face would open a whole model before an index, and safetensors before both.
        assert {path.name for path in out.iterdir()} == {*parts, "pytorch_model.bin.index.json", "config.json"}
        assert len(parts) > 1 and all(parts[index[n]][n].equal(value.bfloat16()) for n, value in state.items())
        zero_to_fp32.convert_zero_checkpoint_to_state_dict(
            tmp_path / folder, out, safe_serialization=True, exclude_frozen_parameters=True
        )
        assert {path.name for path in out.iterdir()} == {"model.safetensors", "config.json"}
        tensors = load_file(out / "model.safetensors")
        assert tensors.keys() == whole.keys() - frozen - {"head.weight"} and tensors["gate"].equal(whole["gate"])
    some = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "ours", "some")
    assert state.keys() - some.keys() == frozen, "what was not saved is not there"
    with pytest.raises(CheckpointError, match="dtype 'int8' is not one of"):
        zero_to_fp32.convert_zero_checkpoint_to_state_dict(tmp_path / "ours", tmp_path / "none", "int8")
    with pytest.raises(CheckpointError, match="/latest: File exists"):
        zero_to_fp32.convert_zero_checkpoint_to_state_dict(tmp_path / "ours", tmp_path / "ours" / "latest")
    given = Namespace(input_folder=str(tmp_path / "ours" / "ours"), output_folder=str(tmp_path / "ours" / "universal"))
    zero_to_fp32.convert_to_universal(given)
    assert (tmp_path / "ours" / "latest_universal").read_text() == "universal"
    again = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "ours", "universal")
    assert again["gate"].equal(ours["gate"])
    with pytest.raises(CheckpointError, match="universal is there already"):
        zero_to_fp32.convert_to_universal(given)
    given.input_folder = str(tmp_path / "theirs" / "own")
    with pytest.raises(CheckpointError, match="DeepSpeed's own needs no conversion"):
        zero_to_fp32.convert_to_universal(given)


def test_a_share_that_knows_no_permissions(tmp_path, monkeypatch):
    """The script is there; a line on DeepSpeed's logger says that it is not executable."""
    told = []
    monkeypatch.setattr(utilities.logger, "info", lambda words, *values: told.append(words % values))
    monkeypatch.setattr(Path, "chmod", mock.Mock(side_effect=PermissionError(1, "no permissions here")))
    zero_to_fp32.leave_script(tmp_path)
    assert (tmp_path / "zero_to_fp32.py").read_text().startswith("#!")
    assert len(told) == 1 and "zero_to_fp32.py is not executable (no permissions here)" in told[0]


def test_copies_for_torch_save(tmp_path):
    """Without the buffer that a view looks at."""
    whole = torch.arange(100_000.0)
    item = {"a": whole[:3], "b": [whole[5:6], (whole[7], "x")]}
    copies = clone_tensors_for_torch_save(item)
    assert copies["a"].equal(item["a"]) and copies["b"][1] == (torch.tensor(7.0), "x")
    torch.save(copies, tmp_path / "copies.pt")
    assert (tmp_path / "copies.pt").stat().st_size < 10_000 and copies["a"].data_ptr() != whole.data_ptr()
