"""Damaged checkpoints: refused on every rank with the file's name, never loaded, and a whole one loads afterwards."""

import shutil
import zlib
from random import Random

import pytest
import torch

from deepzero.checkpoint.errors import CheckpointError
from deepzero.checkpoint.export import export
from deepzero.comm import process_group
from deepzero.config.strict import ConfigError
from deepzero.training.run_folder import find_start
from tests.distributed.checkpoints import engine_for, fingerprints, said, steps
from tests.distributed.damages import ALL, FILES, MANIFESTS
from tests.distributed.training import TinyModel, my_micro_batches
from tools.verify import main as verify

BITS = [name for name in FILES if "a bit" in name or "cut" in name or "shard" in name]
"""What is another damage with each seed."""

PLACES = {(2, 2): "fp32", (3, 2): "bf16", (1, 1): "fp16", (0, 2): "bf16", (3, 3): "fp32", (1, 4): "fp16"}
"""(stage, ranks) → precision."""


def state(engine):
    return engine.params_sha256(), fingerprints(engine)


def save_two(rank, world, folder, stage, precision):
    """A checkpoint, and a later one of the same tag elsewhere; what the first one has to give."""
    engine = engine_for(world, stage, precision=precision)
    right = None
    for until, name in ((2, "good"), (3, "later")):
        steps(engine, rank, world, until)
        engine.save_checkpoint(folder / name, tag="step", client_state={"x": torch.arange(3.0), "note": "kept"})
        right = right or state(engine)
    return right


@pytest.fixture(scope="module")
def checkpoints(ranks, tmp_path_factory):
    """By (stage, ranks): their folder, and what is right."""
    made = {}

    def get(stage, world):
        if (stage, world) not in made:
            folder = tmp_path_factory.mktemp(f"stage{stage}-of-{world}")
            made[stage, world] = folder, ranks.run(save_two, folder, stage, PLACES[stage, world], world_size=world)[0]
        return made[stage, world]

    return get


NOTHING = "nothing was loaded"


def load(engine, place):
    """An interrupted first save is no checkpoint yet, and nothing but a warning, which counts as refused here."""
    if engine.load_checkpoint(place) == (None, None):
        raise CheckpointError(f"{place}: {NOTHING}")


def try_all(rank, world, folder, stage, precision, cases, right):
    """For each case what it raised, if the engine then held a mixture, and what is wrong afterwards."""
    engine = engine_for(world, stage, precision=precision)
    engine.load_checkpoint(folder / "good")
    seen = []
    for number, (name, seed) in enumerate(cases):
        place = folder / f"damaged-{number}"
        if rank == 0:
            shutil.copytree(folder / "good", place)
            ALL[name](place, folder / "later", Random(zlib.crc32(name.encode()) + seed))
        process_group.barrier()
        outcome = said(load, engine, place)
        mixture, wrong = engine.state.broke_off is not None, None
        if mixture:
            assert "mixture of two states" in said(engine, *my_micro_batches(0, rank, world, 2, 1)[0])
            assert "mixture of two states" in said(engine.save_checkpoint, folder / "never")
            _, client = engine.load_checkpoint(folder / "good")
            wrong = None if client["x"].tolist() == [0.0, 1.0, 2.0] else f"client state {client}"
        if mixture or outcome is None or NOTHING in outcome or number % 10 == 0:
            wrong = wrong or (None if state(engine) == right else "bits")
        seen.append((outcome, mixture, wrong))
        process_group.barrier()
        if rank == 0:
            shutil.rmtree(place) if place.is_dir() else place.unlink()
    assert state(engine) == right
    steps(engine, rank, world, 3)
    return seen


def refused(ranks, checkpoints, stage, world, cases):
    """Check every case; how many the engine noticed only when it held a mixture."""
    folder, right = checkpoints(stage, world)
    arguments = folder, stage, PLACES[stage, world], cases, right
    everyone = ranks.run(try_all, *arguments, world_size=world, timeout=100)
    for number, case in enumerate(cases):
        for rank, seen in enumerate(everyone):
            message, _, wrong = seen[number]
            assert message is not None, f"rank {rank} has loaded it: {case}"
            assert str(folder / f"damaged-{number}") in message, (case, message)
            assert (NOTHING in message) == (case[0] == "half written"), (case, message)
            assert wrong is None, (case, wrong)
    assert not (folder / "never").exists()
    return sum(mixture for _, mixture, _ in everyone[0])


def some(names, seeds, first=0):
    return [(name, seed) for seed in range(first, first + seeds) for name in names]


@pytest.mark.parametrize(("stage", "world", "cases", "mixtures"), [
    # Bits of a shard are noticed when they are read.
    pytest.param(2, 2, [*some(FILES, 1), *some(BITS, 4, first=1)], range(6, 999), id="files"),
    pytest.param(3, 2, [*some(FILES, 1, first=10), *some(BITS, 4, first=11)], range(999), marks=pytest.mark.slow,
                 id="files of partitioned parameters"),
    pytest.param(1, 1, some(BITS, 4, first=20), range(999), id="files of one rank"),
    # With a hash that is right: what an edit by hand would be. All but two are found before anything is loaded.
    pytest.param(2, 2, some(MANIFESTS, 1), range(2, 3), id="manifests that make no sense"),
    *(pytest.param(*place, [*some(BITS, 8, first=100), *some(MANIFESTS, 1, first=100)], range(999),
                   marks=pytest.mark.exhaustive, id=f"many more {place}") for place in PLACES),
])  # fmt: skip
def test_what_is_damaged(ranks, checkpoints, stage, world, cases, mixtures):
    assert refused(ranks, checkpoints, stage, world, cases) in mixtures


def try_the_damaged(rank, world, folder):
    """Of three one has a wrong bit, which only reading finds, and one half a manifest: what is said, and what loads."""
    engine = engine_for(world, 2)
    for step in (1, 2, 3):
        steps(engine, rank, world, step)
        engine.save_checkpoint(folder, tag=f"step_{step}")
    process_group.barrier()
    if rank == 0:
        shard = folder / "step_3" / "rank-00001-of-00002.safetensors"
        shard.write_bytes(shard.read_bytes()[:-1] + bytes([shard.read_bytes()[-1] ^ 1]))
        manifest = folder / "step_2" / "manifest.json"
        manifest.write_bytes(manifest.read_bytes()[:500])
        (folder / "checkpoints").mkdir()  # of something else
    process_group.barrier()
    other, messages = engine_for(world, 2, model=TinyModel(hidden=5)), []
    for loading, place, tag in (
        (engine, folder, None), (engine, folder, "step_2"), (engine, folder / "step_2", None),
        (engine, folder, "step_7"), (other, folder, "step_1"),
    ):  # fmt: skip
        with pytest.raises(CheckpointError) as caught:
            loading.load_checkpoint(place, tag)
        messages.append((str(caught.value), caught.value.beside))
    engine.load_checkpoint(folder, "step_1")
    assert engine.global_steps == 1 and "is of another model" in messages[-1][0]
    return messages


def test_a_complete_one_beside_a_damaged_one_is_named(ranks, tmp_path, capsys):
    """What is named is not read, for ranks would wait for a disk: it may be the one with a wrong bit."""
    complete = "{} is complete (whether it is whole, `python -m tools.verify` says): "
    advice = f"; {complete}load it with tag={{!r}} from there"
    for *damaged, wrong_tag, other_model in ranks.run(try_the_damaged, tmp_path):
        for (text, found), named in zip(damaged, ("step_1", "step_3", "step_3"), strict=True):
            assert text.endswith(advice.format(tmp_path / named, named)) and found == tmp_path / named
        assert "step_3/rank-00001-of-00002.safetensors is damaged" in damaged[0][0]
        for text, found in (wrong_tag, other_model):
            assert found is None and "is complete" not in text
    (tmp_path / "latest").write_text("step_3\0")
    again = f"latest is damaged.*{tmp_path}/step_3 is complete .*: the same command with"
    with pytest.raises(ConfigError, match=again):
        find_start(str(tmp_path), tmp_path / "another run")
    (tmp_path / "latest").write_text("step_3")
    message = said(export, tmp_path, tmp_path / "out", "fp32", tag="step_2")
    assert message.endswith(advice.format(tmp_path / "step_3", "step_3")) and not (tmp_path / "out").exists()
    assert verify([str(tmp_path)]) == 1
    assert capsys.readouterr().err.endswith(f"{tmp_path}/step_1 beside it is whole\n")
