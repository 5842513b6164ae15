"""Resume to the bit, and every crossing of stages and numbers of ranks; how much is read of a checkpoint."""

import json
import math
import tarfile
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors import safe_open

from deepzero.checkpoint import reader
from deepzero.checkpoint.checkpoint_dir import find, read_manifest
from deepzero.comm.ledger import off_forms
from tests.distributed.checkpoints import engine_for, load_and_train, steps, train_and_save
from tests.distributed.pool import on_ranks, sampled
from tests.distributed.training import TinyModel

OFTEN, SLOW = [(1, "bf16", 1), (2, "fp32", 1), (3, "bf16", 3)], [(2, "fp16", 3)]


@pytest.mark.parametrize(
    ("stage", "precision", "accumulation"), sampled(OFTEN, (0, 1, 2, 3), ("bf16", "fp16", "fp32"), (1, 3), slow=SLOW)
)
@on_ranks()
def test_three_and_three_steps_are_six(rank, world, tmp_path, stage, precision, accumulation):
    changes = {"precision": precision, "gradient_accumulation_steps": accumulation}
    if precision == "fp16":
        # The scale doubles in the second stretch because of steps of the first.
        changes["fp16"] = {"initial_scale_power": 10, "loss_scale_window": 4, "hysteresis": 1}
    records, sha, _ = train_and_save(rank, world, None, stage, 6, changes)
    head, *saved = train_and_save(rank, world, tmp_path, stage, 3, changes)
    loaded, tail, tail_sha, client = load_and_train(rank, world, tmp_path, stage, 6, changes)
    assert [*loaded] == saved, "what was loaded is what was saved"
    assert [*head, *tail] == records, "losses, norms, rates and scales"
    assert tail_sha == sha
    assert client == {"until": 3}
    assert precision != "fp16" or len({record[5] for record in records}) > 1, "the loss scale has moved"


@on_ranks(1)
def test_a_run_that_goes_on_after_many_steps_measures_its_memory(rank, world, tmp_path):
    engine = engine_for(world, 2)
    steps(engine, rank, world, 1)
    engine.global_steps = 1001
    engine.save_checkpoint(tmp_path)
    other = engine_for(world, 2)
    other.load_checkpoint(tmp_path)
    steps(other, rank, world, 1003)
    assert (other.micro_steps, off_forms(other.report())) == (1003, [])


PLACES = [(stage, world) for world in (1, 2, 3, 4) for stage in (0, 1, 2, 3)]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("stage", "world"), PLACES)
def test_every_crossing(ranks, tmp_path, stage, world):
    """Saved here, loaded everywhere: the same bits after loading; the next losses agree, and to the bit at equal W."""
    records, sha, saved = ranks.run(train_and_save, tmp_path, stage, 3, {}, world_size=world)[0]
    reference = ranks.run(train_and_save, None, stage, 13, {}, world_size=world)[0][0]
    assert reference[:3] == records
    for other_stage, other_world in PLACES:
        if (other_stage, other_world) == (stage, world):
            continue
        results = ranks.run(load_and_train, tmp_path, other_stage, 13, {}, world_size=other_world)
        for loaded, tail, _, _ in results:
            assert loaded == (sha, saved), (other_stage, other_world)
            if other_world == world:
                assert tail == reference[3:], (other_stage, other_world)
            else:
                losses = torch.tensor([record[1] for record in tail])
                expected = torch.tensor([record[1] for record in reference[3:]])
                torch.testing.assert_close(losses, expected, rtol=0, atol=1e-5)


def test_precisions_may_change(ranks, tmp_path):
    """Masters are fp32 in every precision: only the parameters are rounded anew."""
    saved = ranks.run(train_and_save, tmp_path, 2, 3, {"precision": "bf16"}, world_size=2)[0][2]
    for precision in ("fp32", "fp16", "bf16"):
        (_, state), tail, _, _ = ranks.run(load_and_train, tmp_path, 3, 6, {"precision": precision}, world_size=3)[0]
        assert state == saved, precision
        assert [record[0] for record in tail] == [4, 5, 6]


def test_numpy_and_safetensors_alone_can_read_it(ranks, tmp_path):
    """By the manifest: a parameter is put together from the rows of all shards."""
    ranks.run(train_and_save, tmp_path, 3, 2, {"precision": "bf16"}, world_size=3)
    folder = tmp_path / (tmp_path / "latest").read_text().strip()
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["world_size"], manifest["zero_stage"], manifest["counters"]["global_steps"]) == (3, 3, 2)
    assert manifest["parameters"]["embed.weight"]["aliases"] == ["head.weight"]
    seen = {}
    for name, info in manifest["files"].items():
        with safe_open(folder / name, "np") as file:
            assert file.metadata()["deepzero_id"] == manifest["id"]
            assert sorted(file.keys()) == sorted(f"{row['key']}/{row['name']}" for row in info["rows"])
            for row in info["rows"]:
                values = file.get_tensor(f"{row['key']}/{row['name']}")
                assert values.shape == (row["numel"],)
                seen.setdefault((row["key"], row["name"]), []).append((row["start"], values))
    for name, info in manifest["parameters"].items():
        for key in ("master", "exp_avg", "exp_avg_sq"):
            runs = sorted(seen[key, name], key=lambda item: item[0])
            ends = [start + len(values) for start, values in runs]
            assert [start for start, _ in runs] == [0, *ends[:-1]] and ends[-1] == math.prod(info["shape"])


WRITTEN = Path(__file__).parent / "data" / "checkpoint_of_version_1.tar.xz"
"""Two steps of stage 2 in bf16 on 2 ranks, and the hashes of its parameters, masters and moments."""


def test_a_checkpoint_that_an_earlier_commit_wrote(ranks, tmp_path):
    """The format is a promise: every stage loads the bits that were saved, and all go on alike."""
    with tarfile.open(WRITTEN) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # not in each 3.10 and 3.11
        archive.extractall(tmp_path)
    expected, tails = json.loads((tmp_path / "expected.json").read_text()), []
    for stage in (0, 1, 2, 3):
        loaded, tail, sha, _ = ranks.run(load_and_train, tmp_path, stage, 4, {"precision": "bf16"}, world_size=2)[0]
        assert loaded == (expected["sha"], expected["state"]), stage
        tails.append((tail, sha))
    assert all(tail == tails[0] for tail in tails)


def bytes_of_a_load(rank, world, folder, stage):
    engine = engine_for(world, stage, model=TinyModel(hidden=400))
    with mock.patch.object(reader, "fill", wraps=reader.fill) as fill:
        engine.load_checkpoint(folder)
    return sum(len(call.args[2]) for call in fill.call_args_list)


@pytest.mark.parametrize(
    ("stage", "saved_by"), [pytest.param(0, 1, marks=pytest.mark.exhaustive), (2, 4), (3, 3), (3, 1)]
)
def test_four_ranks_read_a_checkpoint_once(ranks, tmp_path, stage, saved_by):
    """Over all ranks about once, whatever the layout it was saved in."""
    ranks.run(train_and_save, tmp_path, 2, 1, {"model": TinyModel(hidden=400)}, world_size=saved_by)
    stored = sum(info.bytes for info in read_manifest(find(tmp_path, None)).files.values())
    read = sum(ranks.run(bytes_of_a_load, tmp_path, stage, world_size=4))
    assert stored <= read <= 1.1 * stored, read / stored
