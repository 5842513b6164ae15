"""``load_module_only`` from plain safetensors: every stage, names, ties, buffers, dtypes, damage."""

import json
import re
import shutil
import struct
from functools import partial

import pytest
import torch

import deepzero
from tests.distributed.checkpoints import said
from tests.distributed.pool import on_ranks, sampled
from tests.distributed.test_export import Buffered, Wrapper, buffered, same, state_and_masters
from tests.distributed.training import config, make_model, one_step, start

safetensors_torch = pytest.importorskip("safetensors.torch")


def source(dtype=torch.float32, seed=7):
    """The values that are going to be loaded, by name; tied weights under both names."""
    torch.manual_seed(seed)
    model = Buffered()
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point():
                tensor.normal_()
    model.count.fill_(5)
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in model.state_dict().items()}


def write(folder, tensors, parts=1):
    """``model.safetensors``, or several with an index."""
    folder.mkdir(exist_ok=True)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    if parts == 1:
        safetensors_torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = [f"model-{i + 1:05d}-of-{parts:05d}.safetensors" for i in range(parts)]
    where = {name: names[i % parts] for i, name in enumerate(tensors)}
    for file in names:
        safetensors_torch.save_file({n: t for n, t in tensors.items() if where[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def loaded(rank, world, path, stage, precision, kind, strict):
    engine = start(kind(), stage=stage, precision=precision, bucket=800)
    where, client = engine.load_checkpoint(path, load_module_only=True, load_module_strict=strict)
    found = state_and_masters(engine)
    assert client == {} and engine.global_steps == 0 and where
    one_step(engine, rank, world)
    return found


def load(ranks, path, stage=3, world=2, precision="fp32", kind=buffered, strict=True):
    """State dict and masters after loading, the same on all ranks."""
    return ranks.run(loaded, path, stage, precision, kind, strict, world_size=world)[0]


OFTEN = [(0, 2, "fp32"), (1, 1, "bf16"), (1, 2, "fp32"), (2, 2, "bf16"), (3, 1, "fp32"), (3, 2, "bf16")]


@pytest.mark.parametrize(("stage", "world", "precision"), sampled(OFTEN, (0, 1, 2, 3), (1, 2), ("fp32", "bf16")))
def test_every_stage(ranks, tmp_path, stage, world, precision):
    """From weights in the other of the two precisions."""
    values = source(torch.bfloat16 if precision == "fp32" else torch.float32)
    path = write(tmp_path / "m", values, parts=1 if stage % 2 else 3)
    state, masters = load(ranks, path, stage, world, precision)
    assert set(masters) and all(same(master, values[name].float()) for name, master in masters.items())
    assert set(state) == set(values)
    assert all(same(state[name], values[name].to(state[name].dtype)) for name in values)
    if precision == "bf16":
        assert state["tiny.embed.weight"].dtype == torch.bfloat16


def test_one_file_one_index_and_buffers_of_no_state_dict(ranks, tmp_path):
    """The hub's GPT-2 holds masks that are not persistent today; they are passed over."""
    values = source()
    safetensors_torch.save_file({k: v.clone() for k, v in values.items()}, tmp_path / "some.safetensors")
    index = write(tmp_path / "index", values, parts=2) / "model.safetensors.index.json"
    scratch = write(tmp_path / "scratch", values | {"scratch": torch.zeros(99)})
    for path in (tmp_path / "some.safetensors", index, scratch):
        got = load(ranks, path)[0]
        assert all(same(got[name], values[name]) for name in values)


@pytest.mark.parametrize("name", ["tiny.embed.weight", "tiny.head.weight"])
def test_one_name_of_a_tied_weight_and_no_buffers(ranks, tmp_path, name):
    values = source()
    kept = {k: v for k, v in values.items() if k not in ("tiny.embed.weight", "tiny.head.weight", "mean", "mask")}
    state, _ = load(ranks, write(tmp_path / "m", kept | {name: values[name]}))
    assert same(state["tiny.head.weight"], values[name]) and same(state["tiny.embed.weight"], values[name])
    assert same(state["mean"], buffered().mean) and same(state["count"], values["count"])


@pytest.mark.slow
def test_a_prefix_on_one_side(ranks, tmp_path):
    values = source()
    state, _ = load(ranks, write(tmp_path / "without", values), kind=partial(Wrapper, buffered))
    assert all(same(state[f"model.{name}"], value) for name, value in values.items())
    state, _ = load(ranks, write(tmp_path / "with", {f"model.{name}": value for name, value in values.items()}))
    assert all(same(state[name], value) for name, value in values.items())


def unfit(rank, world, cases):
    """Each is refused before anything changes."""
    engine = start(buffered(), stage=3, bucket=800)
    before = engine.params_sha256()
    for path, strict, text in cases:
        message = said(engine.load_checkpoint, path, load_module_only=True, load_module_strict=strict)
        assert message is not None and re.search(text, message), (path, message)
        assert engine.params_sha256() == before
    one_step(engine, rank, world)


def test_weights_of_another_model(ranks, tmp_path):
    values = source()
    apart = values | {"tiny.head.weight": values["tiny.head.weight"].clone()}
    apart["tiny.head.weight"][3, 4] += 1
    shape = values | {"tiny.norm.bias": torch.zeros(25)}
    other = {name: value for name, value in values.items() if name != "tiny.norm.bias"} | {"other": torch.zeros(3)}
    cases = {
        "tied": (apart, r"are one parameter \(tied\) here"),
        "shape": (shape, r"parameter 'tiny\.norm\.bias' has shape \(25,\) there and \(24,\) here"),
        "kind": (values | {"count": torch.tensor(1.5)}, r"holds 'count' in F32, and here it is not floating"),
    }
    both = [(write(tmp_path / kind, held), strict, text) for kind, (held, text) in cases.items() for strict in (0, 1)]
    text = r"1 missing there \(tiny\.norm\.bias\); 1 not known here \(other\); load_module_strict=False"
    path = write(tmp_path / "other", other)
    ranks.run(unfit, [*both, (path, True, text)], world_size=2)
    state, _ = load(ranks, path, strict=False)
    assert same(state["tiny.norm.bias"], buffered().tiny.norm.bias.data) and same(state["mean"], values["mean"])


@on_ranks()
def test_without_load_module_only(rank, world, tmp_path):
    write(tmp_path / str(rank), source())
    engine, path = deepzero.initialize(model=make_model(), config=config(stage=1))[0], tmp_path / "0"
    assert "holds plain safetensors: weights, without the state of an optimizer" in said(engine.load_checkpoint, path)
    (path / "COMMIT").touch()
    part = said(engine.load_checkpoint, path / "model.safetensors")
    assert f"is one rank's part of a checkpoint; give its folder, {path}" in part


def with_header(raw, change):
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + raw[8 + length :]


def set_entry(key, value):
    return lambda raw: with_header(raw, lambda header: header["mean"].__setitem__(key, value))


DAMAGES = {
    "empty": (lambda raw: b"", r"damaged, truncated or no safetensors file \(.*header too small\); it has 0 bytes"),
    "short": (lambda raw: raw[:100], r"invalid header length.*it has 100 bytes"),
    "truncated": (lambda raw: raw[:-1], "not fully covered"),
    "longer": (lambda raw: raw + b"x", "not fully covered"),
    "huge": (lambda raw: b"\xff" * 8 + raw[8:], "no safetensors file"),
    "garbage": (lambda raw: raw[:8] + b"\xfe" * 50 + raw[58:], "no safetensors file"),
    "list": (lambda raw: struct.pack("<Q", 2) + b"[]", "invalid JSON in header"),
    "nested": (lambda raw: struct.pack("<Q", 200000) + b"[" * 200000, "invalid JSON in header"),
    "outside": (set_entry("data_offsets", [10**9, 10**9 + 52]), "invalid offset for"),
    "negative": (set_entry("data_offsets", [-52, 0]), "invalid JSON in header"),
    "extent": (set_entry("shape", [14]), "invalid shape, data type, or offset"),
    "dtype": (set_entry("dtype", "Q9"), "unknown variant `Q9`"),
    "words": (set_entry("shape", "ab"), "invalid JSON in header"),
    "null": (lambda raw: with_header(raw, lambda header: header.update(mean=None)), "invalid JSON in header"),
}
INDICES = {
    "{": "is not JSON",
    "[1]": "has no weight_map",
    '{"weight_map": {"mean": 3}}': "has no weight_map",
    '{"weight_map": {"mean": "../x.safetensors"}}': "no safetensors file of the same folder",
    '{"weight_map": {"mean": "x.safetensors"}}': "is missing, and the index names it",
    '{"weight_map": {"nose": "model-00001-of-00002.safetensors"}}': "does not hold 'nose'",
}


def test_damaged_headers_and_indices(ranks, tmp_path):
    raw, cases = (write(tmp_path / "m", source()) / "model.safetensors").read_bytes(), []
    for kind, (change, text) in DAMAGES.items():
        file = tmp_path / kind / "model.safetensors"
        file.parent.mkdir()
        file.write_bytes(change(raw))
        cases.append((file.parent, True, rf"{kind}/model\.safetensors.*{text}"))
    parts = write(tmp_path / "parts", source(), parts=2)
    for number, (content, text) in enumerate(INDICES.items()):
        folder = shutil.copytree(parts, tmp_path / str(number))
        (folder / "model.safetensors.index.json").write_text(content)
        cases.append((folder, True, rf"{folder}/.*{text}"))
    ranks.run(unfit, cases, world_size=2)


@pytest.mark.filterwarnings("ignore")
def test_a_model_of_transformers(ranks, tmp_path):
    """The body alone, as the hub has GPT-2: no ``transformer.``, no head (it is tied)."""
    pytest.importorskip("transformers")
    model = gpt2()
    with torch.no_grad():
        model.transformer.h[0].mlp.c_fc.weight.normal_()
    model.transformer.save_pretrained(tmp_path / "body")
    model.save_pretrained(tmp_path / "whole")
    for name in ("body", "whole"):
        got = ranks.run(load_gpt2, tmp_path / name, world_size=2)[0]
        assert all(same(got[key], value) for key, value in model.state_dict().items())


def gpt2():
    import transformers

    torch.manual_seed(3)
    settings = transformers.GPT2Config(vocab_size=101, n_embd=32, n_layer=2, n_head=4, n_positions=16)
    return transformers.GPT2LMHeadModel(settings)


def load_gpt2(rank, world, path):
    engine = start(gpt2(), stage=3)
    engine.load_checkpoint(path, load_module_only=True)
    return state_and_masters(engine)[0]
