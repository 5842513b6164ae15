"""One whole model out of a checkpoint or of an engine: values, files, names, failures."""

import errno
import json
import os
import re
import tracemalloc
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import nn

import deepzero
from deepzero.checkpoint import export as exporting
from deepzero.checkpoint import reader, shard_file
from deepzero.checkpoint.checkpoint_dir import read_manifest
from deepzero.checkpoint.errors import CheckpointError
from deepzero.checkpoint.export import export
from deepzero.checkpoint.reader import read_header
from deepzero.compat.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from deepzero.runtime.zero import partition_parameters
from tests.distributed.checkpoints import said
from tests.distributed.pool import on_ranks
from tests.distributed.training import WHOLE, TinyModel, config, go, make_model, one_step, start, step_on
from tools.export import main

safetensors_torch = pytest.importorskip("safetensors.torch")


class Buffered(nn.Module):
    """A tied model with frozen and odd parameters and buffers of several dtypes."""

    def __init__(self):
        super().__init__()
        self.tiny = TinyModel()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.linspace(0, 1, 33).reshape(3, 11), requires_grad=False)
        self.nothing = nn.Parameter(torch.zeros(0, 4))
        self.register_buffer("mean", torch.linspace(-3, 3, 13))
        self.register_buffer("count", torch.tensor(2**40 + 1))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.one = self.other = nn.Module()  # under two names
        self.one.register_buffer("seen", torch.linspace(0, 1, 3))

    def forward(self, ids, labels):
        return self.tiny(ids, labels) * self.scale + 0 * self.frozen.sum()


def buffered():
    torch.manual_seed(0)
    return Buffered()


class Wide(nn.Module):
    """One parameter of 32 MiB in fp32."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 1 << 17)
        self.head = nn.Linear(1 << 17, 1)

    def forward(self, ids, labels):
        return self.head(self.embed(ids)).mean()


class Wrapper(nn.Module):
    """What puts a prefix before every name."""

    def __init__(self, make=make_model):
        super().__init__()
        self.model = make()

    def forward(self, *batch):
        return self.model(*batch)


def state_and_masters(engine):
    masters = {
        n: deepzero.utils.safe_get_full_fp32_param(p) for n, p in engine.module.named_parameters() if p.requires_grad
    }
    return {k: v.clone() for k, v in engine.module_state_dict().items()}, masters


def saved(rank, world, folder, stage, precision, kind=buffered):
    engine = start(kind(), stage=stage, precision=precision, bucket=800)
    go(engine, rank, world, 0, 2)
    engine.save_checkpoint(folder / "checkpoints")
    assert engine.save_16bit_model(folder / "16bit") is True
    assert engine.save_fp16_model(folder / "parts", "pytorch.safetensors", max_shard_size="4KB")
    return state_and_masters(engine)


def same(a, b):
    """Bit for bit."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def load_parts(folder, index):
    """A model of several files, and the sizes of their tensors."""
    content = json.loads((folder / index).read_text())
    whole, sizes = {}, []
    for name in sorted(set(content["weight_map"].values())):
        part = safetensors_torch.load_file(folder / name)
        assert set(part) == {key for key, file in content["weight_map"].items() if file == name}
        whole |= part
        sizes.append(sum(tensor.nbytes for tensor in part.values()))
    assert content["metadata"]["total_size"] == sum(sizes)
    return whole, sizes


@pytest.mark.parametrize(
    ("stage", "world", "precision"), [(0, 2, "fp32"), (1, 2, "bf16"), (2, 1, "bf16"), (3, 2, "bf16"), (3, 2, "fp16")]
)
def test_every_stage(ranks, tmp_path, stage, world, precision):
    state, masters = ranks.run(saved, tmp_path, stage, precision, world_size=world)[0]
    compute = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    expected = {name: t.to(compute) if t.is_floating_point() else t for name, t in state.items()}
    alias = expected.pop("tiny.head.weight")
    assert same(expected.pop("other.seen"), expected["one.seen"])
    for name, dtype in (("same", precision), ("full", "fp32")):
        with torch.device("meta"):  # as who has set another default device
            done = export(tmp_path / "checkpoints", tmp_path / name, dtype)
        assert done.files == ("model.safetensors",) and done.left_out == ()
    file = tmp_path / "same" / "model.safetensors"
    got = safetensors_torch.load_file(file)
    assert set(got) == set(expected) and "scratch" not in got
    assert all(same(got[name], expected[name]) for name in expected)
    full = safetensors_torch.load_file(tmp_path / "full" / "model.safetensors")
    assert all(same(full[name], value) for name, value in masters.items()) and masters
    assert same(full["count"], torch.tensor(2**40 + 1)) and full["mask"].dtype == torch.bool

    # The engine writes the very same file.
    assert file.read_bytes() == (tmp_path / "16bit" / "model.safetensors").read_bytes()
    assert [path.name for path in (tmp_path / "16bit").iterdir()] == ["model.safetensors"]
    parts, sizes = load_parts(tmp_path / "parts", "pytorch.safetensors.index.json")
    assert all(same(parts[name], expected[name]) for name in expected) and len(sizes) > 1

    # All names of what is tied or shared come back.
    assert read_header(file)[0] == {"format": "pt", "tiny.head.weight": "tiny.embed.weight", "other.seen": "one.seen"}
    with torch.device("meta"):
        state = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "checkpoints")
    buffered().load_state_dict(state)
    model = buffered().to(compute)
    missing, unexpected = safetensors_torch.load_model(model, file)
    assert not missing and not unexpected and same(model.tiny.head.weight.data, alias)


def test_several_files(ranks, tmp_path):
    state, _ = ranks.run(saved, tmp_path, 3, "bf16", make_model, world_size=2)[0]
    export(tmp_path / "checkpoints", tmp_path / "out", "bf16", max_shard_size="3KB", tag="global_step2")
    whole, sizes = load_parts(tmp_path / "out", "model.safetensors.index.json")
    del state["head.weight"]
    assert set(whole) == set(state) and all(same(whole[name], state[name]) for name in state)
    assert len(sizes) > 2 and max(sizes) <= 3000
    # Replaced by one file: nothing of the old ones stays.
    (tmp_path / "out" / "README.md").write_text("mine")
    with pytest.raises(CheckpointError, match=r"holds model\.safetensors\.index\.json already"):
        export(tmp_path / "checkpoints", tmp_path / "out", "bf16")
    export(tmp_path / "checkpoints", tmp_path / "out", "bf16", force=True)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["README.md", "model.safetensors"]


def test_pieces_and_the_reader_of_the_book(ranks, tmp_path, monkeypatch):
    """A large parameter goes in pieces, from all shards that hold it; docs/export.md reads masters with numpy alone."""
    state, masters = ranks.run(saved, tmp_path, 3, "bf16", world_size=2)[0]
    monkeypatch.setattr(exporting, "PIECE_BYTES", 100)
    monkeypatch.setattr(reader, "READ_BYTES", 512)
    sizes, put = [], shard_file.put
    monkeypatch.setattr(shard_file, "put", lambda file, view: (sizes.append(len(view)), put(file, view)))
    export(tmp_path / "checkpoints", tmp_path / "out", "bf16")
    header, *pieces = sizes
    assert header > 1000 and max(pieces) == 50  # 25 elements: 100 bytes in fp32, 50 in bf16
    for name, value in safetensors_torch.load_file(tmp_path / "out" / "model.safetensors").items():
        assert same(value, state[name].bfloat16() if state[name].is_floating_point() else state[name])

    page = (Path(__file__).parents[2] / "docs" / "export.md").read_text(encoding="utf-8")
    (code,) = [block for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if "read_masters" in block]
    names = {}
    exec(code, names)
    found = names["read_masters"](tmp_path / "checkpoints" / "global_step2")
    masters.pop("nothing")
    assert masters and all(same(torch.from_numpy(found[name]), value) for name, value in masters.items())


@pytest.mark.slow
def test_memory_is_bounded(ranks, tmp_path, monkeypatch):
    """The largest tensors alive at once are a piece and its conversion, whatever the parameter's size."""
    ranks.run(saved, tmp_path, 0, "bf16", Wide, world_size=1)
    monkeypatch.setattr(exporting, "PIECE_BYTES", 1 << 20)
    allocated, empty = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: allocated.append(empty(*a, **k).nbytes) or empty(*a, **k))
    tracemalloc.start()
    export(tmp_path / "checkpoints", tmp_path / "out", "bf16")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert max(allocated) <= 1 << 20
    assert peak < reader.READ_BYTES + (4 << 20)  # Python's own: the read buffer, the manifest


def test_strip_prefix(ranks, tmp_path):
    ranks.run(saved, tmp_path, 2, "bf16", Wrapper, world_size=1)
    export(tmp_path / "checkpoints", tmp_path / "out", "bf16", strip_prefix="model.")
    file = tmp_path / "out" / "model.safetensors"
    assert set(safetensors_torch.load_file(file)) | {"head.weight"} == set(make_model().state_dict())
    assert read_header(file)[0]["head.weight"] == "embed.weight"
    with pytest.raises(CheckpointError, match=r"'model\.embed\.weight' does not begin with 'other\.'"):
        export(tmp_path / "checkpoints", tmp_path / "out2", "bf16", strip_prefix="other.")
    assert not (tmp_path / "out2").exists()


def without_frozen(rank, world, folder):
    engine = start(buffered(), stage=3)
    engine.save_checkpoint(folder, exclude_frozen_parameters=True)
    engine.save_16bit_model(folder / "model", exclude_frozen_parameters=True)


def test_without_frozen_parameters(ranks, tmp_path, capsys):
    ranks.run(without_frozen, tmp_path, world_size=2)
    arguments = [str(tmp_path), str(tmp_path / "out"), "--dtype", "fp32"]
    assert main(arguments) == 1 and "was saved without parameters that are not trained" in capsys.readouterr().err
    assert main([*arguments, "--partial"]) == 0 and "does not hold it: frozen" in capsys.readouterr().out
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "model")]
    assert files[0] == files[1]


@on_ranks()
def test_a_bucket_is_gathered_once_for_all_of_its_parameters(rank, world, tmp_path):
    engine, gathered = start(make_model(), stage=3, zero=WHOLE), []
    gather = partition_parameters._all_gather_params

    def counted(buckets, kind):
        gathered.extend(buckets)
        gather(buckets, kind)

    with patch.object(partition_parameters, "_all_gather_params", counted):
        for act in (engine.module_state_dict, engine.params_sha256, lambda: engine.save_16bit_model(tmp_path)):
            gathered.clear()
            act()
            assert 0 < len(gathered) == len(set(gathered)) < len(list(engine.module.parameters()))


def full_disk(file, view):
    if file.tell() > 2000:
        raise OSError(errno.ENOSPC, "No space left on device")
    return file.write(view)


@on_ranks()
def test_save_16bit_model_refuses_and_fails_on_all_ranks(rank, world, tmp_path):
    engine, folder = start(make_model(), stage=3), tmp_path / "out"
    before = engine.params_sha256()
    engine.save_16bit_model(folder)
    was = (folder / "model.safetensors").read_bytes() if rank == 0 else b""
    for name in ("a/b.safetensors", "model"):
        assert "ends in .safetensors" in said(engine.save_16bit_model, folder, name)
    assert "pass the same" in said(engine.save_16bit_model, folder, f"{rank}.pt")
    assert "is one file" in said(engine.save_16bit_model, folder, "model.bin", max_shard_size="1GB")
    for name in ("pytorch_model.bin", "model.pt"):
        assert engine.save_16bit_model(folder, name)
        whole, tensors = engine.module_state_dict(), safetensors_torch.load_file(folder / "model.safetensors")
        written = torch.load(folder / name)
        assert written.keys() == whole.keys() and all(torch.equal(written[key], whole[key]) for key in whole)
        assert all(torch.equal(written[key], value) for key, value in tensors.items())
    assert "not a size" in said(engine.save_16bit_model, folder, max_shard_size="many")
    assert "pass the same" in said(engine.save_16bit_model, folder / str(rank))
    with patch.object(shard_file, "put", full_disk):
        assert "No space left" in said(engine.save_16bit_model, folder)
    save, full = torch.save, lambda file: SimpleNamespace(write=partial(full_disk, file))
    with patch.object(torch, "save", lambda state, file: save(state, full(file))):
        assert said(engine.save_16bit_model, folder, "model.pt").endswith("/out/model.pt: No space left on device")
    if rank == 0:
        assert (folder / "model.safetensors").read_bytes() == was and torch.load(folder / "model.pt")
        assert {path.name for path in folder.iterdir()} == {"model.safetensors", "pytorch_model.bin", "model.pt"}
    assert engine.params_sha256() == before
    one_step(engine, rank, world)
    engine.save_16bit_model(folder)


def test_failures_leave_nothing(ranks, tmp_path):
    ranks.run(saved, tmp_path, 2, "fp32", make_model, world_size=2)
    checkpoints, out = tmp_path / "checkpoints", tmp_path / "a" / "out"
    for where, name, value, error, text in (
        (shard_file, "put", full_disk, CheckpointError, "No space left on device; the model was not written"),
        (exporting.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000), CheckpointError,
         r"needs .* kB and the disk has 1 kB left"),
        (shard_file, "put", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt), KeyboardInterrupt, None),
    ):  # fmt: skip
        with patch.object(where, name, value), pytest.raises(error, match=text):
            export(checkpoints, out, "fp32")
    for arguments, text in (
        ({"dtype": "int8"}, "not one of bf16"),
        ({"tag": "none"}, "does not exist; there are: global_step2"),
        ({"hf_config": tmp_path / "no.json"}, "No such file"),
        ({"max_shard_size": "0GB"}, "not a size"),
    ):
        with pytest.raises(CheckpointError, match=text):
            export(checkpoints, out, **arguments)
    assert not out.parent.exists()
    with pytest.raises(CheckpointError, match="holds checkpoints; choose another folder"):
        export(checkpoints, checkpoints, "bf16")
    path = checkpoints / "global_step2"
    shard, info = next(iter(read_manifest(path).files.items()))
    raw = bytearray((path / shard).read_bytes())
    raw[next(row.offset for row in info.rows if row.key == "master")] ^= 1
    (path / shard).write_bytes(raw)
    with pytest.raises(CheckpointError, match="is damaged: bytes"):
        export(checkpoints, out, "bf16")
    assert not out.parent.exists()


def test_a_failure_while_the_old_model_is_replaced_restores_it(ranks, tmp_path):
    ranks.run(saved, tmp_path, 2, "fp32", make_model, world_size=1)
    out, single = tmp_path / "out", tmp_path / "single"
    export(tmp_path / "checkpoints", out, "fp32", max_shard_size="3KB")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    replace, come, moves = Path.replace, [], []

    def failing(source, target):
        if target.parent == out:
            come.append(source)
            if len(come) == 3:
                raise OSError(errno.EIO, "Input/output error")
        replace(source, target)

    def watched(source, target):
        moves.append((source.name, target.exists()))
        replace(source, target)

    with patch.object(Path, "replace", failing), pytest.raises(CheckpointError, match="Input/output error"):
        export(tmp_path / "checkpoints", out, "bf16", max_shard_size="1KB", force=True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    export(tmp_path / "checkpoints", single, "fp32")
    with patch.object(Path, "replace", watched):
        export(tmp_path / "checkpoints", single, "bf16", force=True)
    assert moves == [("model.safetensors", True)]  # one rename: a reader finds one file or the other
    before = (single / "model.safetensors").read_bytes()
    for error, raised in ((OSError(errno.EIO, "I/O error"), CheckpointError), (KeyboardInterrupt, KeyboardInterrupt)):
        for links in (nullcontext(), patch.object(os, "link", side_effect=OSError(errno.EPERM, "no links"))):
            with links, patch.object(exporting, "flush_parents", side_effect=error), pytest.raises(raised):
                export(tmp_path / "checkpoints", single, "fp32", force=True)
            assert {path.name: path.read_bytes() for path in single.iterdir()} == {"model.safetensors": before}


def too_large(rank, world, folder):
    model = make_model()
    with torch.no_grad():
        model.norm.bias[3] = 70000.0
    start(model, stage=1).save_checkpoint(folder)


def test_fp16_that_cannot_hold_a_value(ranks, tmp_path):
    ranks.run(too_large, tmp_path, world_size=1)
    with pytest.raises(CheckpointError, match=r"'norm\.bias' has a value of 70000, which fp16 cannot hold"):
        export(tmp_path, tmp_path / "out", "fp16")
    export(tmp_path, tmp_path / "out", "bf16")


def hf_model(kind):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    few = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 101, "hidden_size": 32}
    if kind == "gpt2":
        return transformers.AutoModelForCausalLM.from_config(transformers.GPT2Config(**few, n_positions=16))
    return transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**few, intermediate_size=48))


class Wrapped(nn.Module):
    """As ``model=hf`` wraps it."""

    def __init__(self, kind):
        super().__init__()
        self.model = hf_model(kind)

    def forward(self, ids):
        return self.model(input_ids=ids, labels=ids).loss


def train_hf(rank, world, folder, kind):
    torch.manual_seed(0)
    engine, *_ = deepzero.initialize(model=Wrapped(kind), config=config(stage=3, precision="bf16"))
    for step in range(2):
        step_on(engine, torch.randint(0, 101, (2, 9), generator=torch.Generator().manual_seed(10 * step + rank)))
    engine.save_checkpoint(folder)
    if rank == 0:
        engine.module.model.config.save_pretrained(folder / "hf")
    engine.eval()
    with torch.no_grad(), deepzero.zero.GatheredParameters(engine.module.parameters()):
        return engine.module.model(input_ids=torch.arange(10)[None]).logits


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_transformers_loads_it(ranks, tmp_path, kind):
    transformers = pytest.importorskip("transformers")
    logits = ranks.run(train_hf, tmp_path, kind, world_size=2)[0]
    arguments = [str(tmp_path), str(tmp_path / "out"), "--dtype", "bf16", "--strip-prefix", "model."]
    assert main([*arguments, "--hf-config", str(tmp_path / "hf" / "config.json"), "--max-shard-size", "20KB"]) == 0
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.bfloat16, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    with torch.no_grad():
        assert same(model.eval()(input_ids=torch.arange(10)[None]).logits, logits)
