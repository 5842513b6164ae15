"""Every kind of damage to a checkpoint on disk is found, named, and none hides another."""

import hashlib
import json
import random
import re
import shutil

import pytest
import torch

from deepzero.checkpoint.checkpoint_dir import read_manifest
from deepzero.checkpoint.verify import verify
from tests.distributed.test_export import buffered
from tests.distributed.training import one_step, start
from tools.verify import main

WHERE = "rank-00001-of-00002.safetensors"


def save(rank, world, folder, exclude=False):
    engine = start(buffered(), stage=3, bucket=800)
    one_step(engine, rank, world)
    engine.module.mean.add_(rank)  # another on each rank
    client_state = {"seen": torch.arange(5), "epoch": 3}
    engine.save_checkpoint(folder, client_state=client_state, exclude_frozen_parameters=exclude)


@pytest.fixture(scope="module")
def original(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    ranks.run(save, folder, world_size=2)
    return folder


@pytest.fixture
def path(original, tmp_path):
    return shutil.copytree(original, tmp_path / "copy") / "global_step1"


def flip(file, offset):
    raw = bytearray(file.read_bytes())
    raw[offset] ^= 1
    file.write_bytes(raw)


def write(path, raw):
    """A manifest with its hash, as a bug of ours would."""
    (path / "manifest.json").write_bytes(raw)
    (path / "COMMIT").write_text(hashlib.sha256(raw).hexdigest() + "\n")


def lines(path, count=None):
    """The problems, after looking that there are so many."""
    problems = verify(path).problems
    assert problems and not any("\n" in problem for problem in problems)
    assert count is None or len(problems) == count, problems
    return problems


def test_whole(original, capsys):
    assert main([str(original)]) == 0
    out = capsys.readouterr().out
    for text in ("step1 is whole", "ranks +2", "stage +3", "step +1", "precision +fp32", r"bytes +\d+ in 2 files"):
        assert re.search(text, out), text
    assert main([str(original), "--tag", "global_step1"]) == 0 and main([str(original / "global_step1")]) == 0
    assert verify(original).bytes == sum(file.stat().st_size for file in original.glob("*/*.safetensors"))


def test_frozen_parameters_left_out(ranks, tmp_path, capsys):
    ranks.run(save, tmp_path, True, world_size=2)
    assert main([str(tmp_path)]) == 0 and "1 parameters that are not trained" in capsys.readouterr().out


def test_nothing_there(tmp_path, original, capsys):
    for arguments in (["nowhere"], [str(tmp_path)], [str(original), "--tag", "other"], [str(original), "--tag", "a/b"]):
        assert main(arguments) == 1
    assert capsys.readouterr().err.count("verify: ") == 4
    (tmp_path / "notes").mkdir()
    assert main([str(tmp_path)]) == 1 and "and with --tag the one that is meant" in capsys.readouterr().err


def test_flipped_bits_are_named_by_tensor_and_elements(path, capsys):
    key, name = "exp_avg", "tiny.blocks.0.1.weight"
    files = read_manifest(path).files.items()
    file, info, row = next((f, i, r) for f, i in files for r in i.rows if (r.key, r.name) == (key, name))
    flip(path / file, row.offset + 4 * 17)
    flip(path / file, 9)
    header, *problems = lines(path)
    assert header == f"{file}: bytes 0 to {info.block_bytes} are not what was written: the header"
    assert "no safetensors file (" in problems.pop()
    pattern = rf"{file}: bytes (\d+) to (\d+) are not what was written: (\w+) of '(.*)', elements (\d+) to (\d+)"
    found = [re.fullmatch(pattern, problem) for problem in problems]
    assert all(found) and len({(match[1], match[2]) for match in found}) == 1  # one block, a few small tensors
    (match,) = [match for match in found if (match[3], match[4]) == (key, name)]
    assert row.start <= int(match[5]) <= row.start + 17 < int(match[6]) <= row.start + row.numel
    assert int(match[6]) - int(match[5]) <= info.block_bytes // 4
    assert main([str(path)]) == 1 and "problems" in capsys.readouterr().err


def test_every_damaged_byte_is_found(path):
    chance = random.Random(0)
    for file in sorted(path.glob("*.safetensors")):
        raw = file.read_bytes()
        for offset in [0, 7, 8, len(raw) - 1, *(chance.randrange(len(raw)) for _ in range(25))]:
            flip(file, offset)
            assert any(problem.startswith(f"{file.name}: bytes ") for problem in lines(path))
            file.write_bytes(raw)
    assert verify(path).problems == []


def test_several_at_once(path):
    raw = (path / WHERE).read_bytes()
    half = len(raw) // 2
    (path / WHERE).write_bytes(raw[:half])
    (path / "notes.txt").write_text("")
    for gone in ("rank-00000-of-00002.safetensors", "COMMIT"):
        (path / gone).unlink()
    problems = lines(path.parent)
    assert problems[0] == "COMMIT: is missing"
    assert problems[1].startswith("rank-00000-of-00002.safetensors: is missing, with ")
    assert problems[2] == f"{WHERE}: has {half} bytes and should have {len(raw)}"
    assert re.match(rf"{WHERE}: bytes \d+ to {len(raw)} are not what was written: \w+ of '", problems[3])
    assert any(p.startswith(f"{WHERE}: is damaged, truncated or") and f"has {half} bytes" in p for p in problems)
    assert problems[-1] == "notes.txt: is no file of this checkpoint"


def test_longer_or_of_another_save(ranks, path, tmp_path):
    with open(path / WHERE, "ab") as file:
        file.write(b"more")
    text = " ".join(lines(path, 3))
    assert "bytes and should have" in text and "SHA-256 is not" in text and "not fully covered" in text
    ranks.run(save, tmp_path / "other", world_size=2)
    shutil.copy(tmp_path / "other" / "global_step1" / WHERE, path / WHERE)
    assert any(re.match(rf"{WHERE}: is of save '\w+', and the manifest of save '\w+'", line) for line in lines(path))


def test_a_damaged_commit(path):
    (path / "COMMIT").write_bytes(b"\xff\xfe")
    assert lines(path, 1) == ["COMMIT: is not one SHA-256"]
    (path / "COMMIT").write_text("0" * 64)
    assert lines(path, 1)[0].startswith("manifest.json: is not what was written")


@pytest.mark.parametrize(
    "raw", [b"", b"\xff\xfe", b"{", b"[]", b"null", b'{"format": "deepzero-checkpoint"}', b"[" * 100000]
)
def test_no_manifest(path, raw, capsys):
    (path / "manifest.json").write_bytes(raw)
    assert main([str(path)]) == 1
    assert "nothing else can be checked" in capsys.readouterr().out
    (path / "manifest.json").unlink()
    assert lines(path, 1) == ["manifest.json: is missing"]


def rows(content):
    return content["files"]["rank-00000-of-00002.safetensors"]["rows"]


def bias(content):
    return content["parameters"]["tiny.norm.bias"]


CHANGES = {
    "row lost": (lambda c: rows(c).pop(0), "its header has '", "no shard has elements"),
    "row twice": (lambda c: rows(c).append(rows(c)[0]), "are stored twice", "its header has no"),
    "offset": (lambda c: rows(c)[1].update(offset=64), "in its header, and"),
    "unknown": (lambda c: c["parameters"].pop("tiny.norm.bias"),
     "holds master of 'tiny.norm.bias', which the manifest does not know"),
    "shape": (lambda c: bias(c).update(shape=[25]), "no shard has elements 24 to 25 of master of 'tiny.norm.bias'"),
    "dtype": (lambda c: bias(c)["tensors"].update(exp_avg="BF16"),
     "exp_avg of 'tiny.norm.bias' is F32, and should be BF16"),
    "no values": (lambda c: bias(c)["tensors"].pop("master"), "parameter 'tiny.norm.bias' has no values"),
    "buffer": (lambda c: c["buffers"]["mean"].update(shape=[12]), "buffer of 'mean' has elements up to 13"),
    "client": (lambda c: c["client_state"]["seen"].update(shape=[6]), "no shard has elements 5 to 6 of client of"),
    "ranks": (lambda c: c.update(world_size=3), "of 3 ranks"),
    "id": (lambda c: c.update(id="other"), "and the manifest of save 'other'"),
    "sha": (lambda c: c["files"][WHERE].update(sha256="0" * 64), "SHA-256 is not the manifest's"),
    "crc": (lambda c: c["files"][WHERE].update(crc32="0" * 8), "8 digits of CRC-32 for"),
    "block": (lambda c: c["files"][WHERE].update(block_bytes=0), "cannot be followed"),
    "huge block": (lambda c: c["files"][WHERE].update(block_bytes=1 << 60), "digits of CRC-32 for 1 blocks"),
    "counter": (lambda c: c["counters"].pop("global_steps"), "manifest.json: makes no sense (KeyError"),
    "words": (lambda c: rows(c)[0].update(numel="many"), "cannot be followed"),
}  # fmt: skip


@pytest.mark.parametrize("kind", CHANGES)
def test_manifests_that_do_not_fit(path, kind):
    change, *texts = CHANGES[kind]
    content = json.loads((path / "manifest.json").read_text())
    change(content)
    write(path, json.dumps(content).encode())
    problems = lines(path)
    for text in texts:
        assert any(text in problem for problem in problems), problems
    assert main([str(path)]) == 1


def test_any_garbage_without_a_traceback(path):
    """Random damage to the manifest, with a hash that fits: never an exception, never nothing."""
    chance = random.Random(1)
    raw = (path / "manifest.json").read_bytes()
    for _ in range(60):
        changed = bytearray(raw)
        for _ in range(chance.choice((1, 3, 50))):
            changed[chance.randrange(len(raw))] = chance.choice(b'0123456789"{}[],:aFx\xff')
        write(path, changed)
        verify(path)
        (path / "COMMIT").write_text(hashlib.sha256(raw).hexdigest())
        assert changed == raw or lines(path)
