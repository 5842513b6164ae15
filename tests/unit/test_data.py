"""The corpus: what is read, how it is split, every way in which a path can be wrong; windows; the order of the data."""

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepzero.config.run import DataConfig
from deepzero.config.strict import ConfigError
from deepzero.data import corpus as module
from deepzero.data.corpus import Corpus, load_corpus, split_by_file, split_single
from deepzero.data.loader import TokenSequences
from deepzero.data.sampler import GlobalBatchSampler, permute

MANY = {f"{'abc'[i % 3]}/file_{i}.txt": bytes([65 + i]) * (50 + i) for i in range(20)}


def load(path, name="text", **settings):
    return load_corpus(DataConfig(name=name, path=str(path), **settings))


def both(corpus):
    return corpus.train.tobytes() + corpus.val.tobytes()


def write(root, files):
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


# ---- text ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stdlib():
    return load_corpus(DataConfig())


def test_stdlib_is_python_source(stdlib):
    assert stdlib.vocab_size == 256 and stdlib.bytes_per_token == 1.0 and stdlib.separator == 0
    assert stdlib.train.dtype == np.uint8 and len(stdlib.train) > 3_000_000
    whole = both(stdlib)
    assert 0.05 < len(stdlib.val) / len(whole) <= 0.1
    assert whole.count(b"\ndef ") + whole.count(b"\n    def ") > 5_000
    sources = whole.split(b"\0")
    assert Path(os.__file__).read_bytes() in sources
    for source in sources[::40]:
        source.decode("utf-8")
    assert both(load_corpus(DataConfig())) == whole
    # Without tests and tables.
    root = Path(os.__file__).parent
    for name in ("encodings/cp437.py", "pydoc_data/topics.py", "test/test_os.py", "unittest/test/test_case.py"):
        assert not (root / name).exists() or (root / name).read_bytes() not in set(sources), name
    assert stdlib.train.tobytes().count(b"\nclass Test") < 20


def test_python_without_source(tmp_path, monkeypatch):
    monkeypatch.setattr(module.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"no standard library source.*data=text data.path="):
        load_corpus(DataConfig())


def test_split_by_file_is_by_name_alone(tmp_path):
    """Neither the order of creation nor the place of the folder matters; files stay whole and apart."""
    one = write(tmp_path / "one", MANY)
    two = write(tmp_path / "elsewhere" / "two", dict(reversed(list(MANY.items()))))
    first, second = load(one), load(two)
    assert first.train.tobytes() == second.train.tobytes() and first.val.tobytes() == second.val.tobytes()
    corpus = load(one, val_fraction=0.25)
    train, val = (part.tobytes().rstrip(b"\0").split(b"\0") for part in (corpus.train, corpus.val))
    assert sorted(train + val) == sorted(MANY.values())
    assert 0.15 < len(corpus.val) / (len(corpus.val) + len(corpus.train)) <= 0.25
    order = sorted(MANY, key=lambda name: hashlib.sha256(name.encode()).digest())
    assert [content for content in (MANY[name] for name in order) if content in train] == train


def test_split_by_file_frozen():
    """Frozen: another answer on another machine or version would mix the two parts of a resumed run."""
    assert split_by_file({f"f{i}.txt": 100 for i in range(10)}, 0.2)[1] == ["f9.txt", "f4.txt"]


@pytest.mark.parametrize("fraction", [0.001, 0.1, 0.5, 0.999])
def test_split_by_file_never_empties_a_part(fraction):
    for sizes in ({"a": 1, "b": 1000}, {"a": 1000, "b": 1}, {"a": 5, "b": 5}, {"a": 900, "b": 900, "c": 2}):
        train, val = split_by_file(sizes, fraction)
        assert train and val and sorted(train + val) == sorted(sizes)


def test_split_single_file(tmp_path):
    content = bytes(range(1, 128)) * 10
    corpus = load(write(tmp_path, {"book.txt": content}) / "book.txt", val_fraction=0.2)
    assert both(corpus) == content and len(corpus.val) == 254
    alone = load(tmp_path, val_fraction=0.2)  # a folder with one file is that file
    assert alone.train.tobytes() == corpus.train.tobytes()
    content = "ä€😀".encode() * 30
    for fraction in np.linspace(0.01, 0.99, 50):  # no character is cut
        train, val = split_single(content, float(fraction))
        assert train.decode("utf-8") + val.decode("utf-8") == content.decode("utf-8")


def test_max_bytes(tmp_path):
    corpus = load(write(tmp_path, MANY), max_bytes=400, val_fraction=0.2)
    assert (len(corpus.train), len(corpus.val)) == (320, 80)
    single = load(write(tmp_path, {"one.txt": b"x" * 1000}) / "one.txt", max_bytes=100)
    assert (len(single.train), len(single.val)) == (90, 10)


def test_what_is_not_text_is_passed_over_and_a_glob_chooses(tmp_path):
    files = {"a.txt": b"alpha", "b.txt": b"beta", "empty.txt": b"", "c.bin": b"\x00\x01", "d.txt": b"\xff\xfe latin"}
    files |= {".git/config": b"hidden", "sub/.hidden": b"hidden"}
    corpus = load(write(tmp_path / "one", files), val_fraction=0.5)
    assert sorted(both(corpus).split(b"\0")) == [b"", b"alpha", b"beta"]
    files = {"a.md": b"alpha", "sub/b.md": b"beta", "c.txt": b"gamma"}
    for glob in ("*.md", "**/*.md"):
        whole = both(load(write(tmp_path / "two", files), val_fraction=0.5, glob=glob))
        assert sorted(whole.split(b"\0")) == [b"", b"alpha", b"beta"], glob


def test_decode():
    empty = np.zeros(0, np.uint8)
    by_bytes = Corpus(empty, empty, 256, 1.0, 0, "")
    assert by_bytes.decode(list("naïve".encode())) == "naïve" and by_bytes.decode([0xC3]) == "\ufffd"
    assert by_bytes.decode([104, 50256, 105]) == "h\ufffdi", "of a model with a larger vocabulary"
    assert Corpus(empty, empty, 50257, None, None, "").decode([15496, 995]) == "15496 995"


@pytest.mark.parametrize(("files", "path", "glob", "message"), [
    ({}, "~nosuchuser/a.txt", None, r"~nosuchuser/a\.txt does not exist"),
    *(({"a.txt": b"text"}, "", glob, "is no pattern like") for glob in ("", "**/", "a/**/b.md")),
    ({}, "nowhere", None, r"data\.path=.*nowhere does not exist"),
    ({"empty.txt": b""}, "empty.txt", None, r"empty\.txt is empty"),
    ({"a.bin": b"\x00", "b.txt": b""}, "", None, "holds no UTF-8 text file"),
    ({}, "/dev/null", None, r"data\.path=/dev/null is a device, a pipe or a socket"),
    ({"a.txt": b"text", "b.txt": b"text"}, "", "*.rst", r"matches '\*\.rst'"),
    ({"a.txt": b"text"}, "a.txt", "*.txt", r"data\.glob='\*\.txt'.*is a file"),
    ({"x.txt": b"ab"}, "x.txt", None, r"x\.txt gives 2 bytes for training and 0 for validation.*val_fraction=0\.1"),
    *(({"x.dat": content}, path, glob, said)
      for content in (b"\xff\xfe\x00a", "café".encode("latin-1"), b"text with \x00 inside")
      for path, glob, said in (("x.dat", None, r"x\.dat is not UTF-8 text"), ("", "*.dat", r"glob chose .*x\.dat"))),
])  # fmt: skip
def test_wrong_paths(tmp_path, files, path, glob, message):
    write(tmp_path, files)
    with pytest.raises(ConfigError, match=message):
        load(path if path.startswith("~") else tmp_path / path, glob=glob)


@pytest.mark.skipif(os.geteuid() == 0 if hasattr(os, "geteuid") else True, reason="root reads everything")
def test_unreadable(tmp_path):
    write(tmp_path, {"a.txt": b"text", "b.txt": b"text"})
    (tmp_path / "a.txt").chmod(0)
    with pytest.raises(ConfigError, match=r"a\.txt cannot be read: Permission denied"):
        load(tmp_path)


# ---- token files -----------------------------------------------------------------------------------------------------


def tokens_of(root, train, val):
    files = {"train.bin": np.array(train, dtype="<u2").tobytes(), "val.bin": np.array(val, dtype="<u2").tobytes()}
    return load(write(root, files), "tokens")


def test_token_files(tmp_path, monkeypatch):
    corpus = tokens_of(tmp_path, [1, 50256, 3], [7, 8])
    assert corpus.train.tolist() == [1, 50256, 3] and corpus.val.tolist() == [7, 8]
    assert isinstance(corpus.train, np.memmap) and corpus.train.dtype == np.dtype("<u2")
    assert not corpus.train.flags.writeable
    assert corpus.vocab_size == 50257 and corpus.bytes_per_token is None and corpus.separator is None
    # Large ones are scanned in samples, of which the last reaches the end; all are little-endian.
    monkeypatch.setattr(module, "SCANNED_TOKENS", 640)
    assert tokens_of(tmp_path, [5] * 9_999 + [300], [1]).vocab_size == 301
    corpus = load(write(tmp_path, {"train.bin": b"\x01\x02", "val.bin": b"\x00\x01"}), "tokens")
    assert corpus.train.tolist() == [0x0201] and corpus.val.tolist() == [0x0100]


@pytest.mark.parametrize(("train", "val", "message"), [
    (b"\1\0\2\0\0", b"\3\0", r"train\.bin has 5 bytes, an odd number"),
    (b"\1\0", b"", r"val\.bin is empty"),
    (b"\1\0", None, r"val\.bin cannot be read: No such file"),
    (np.array([20240520, 1, 2], dtype="<i4").tobytes(), b"\2\0", r"llm\.c's \.bin for GPT-2, which starts with a head"),
])  # fmt: skip
def test_token_files_that_are_none(tmp_path, train, val, message):
    write(tmp_path, {"train.bin": train, **({} if val is None else {"val.bin": val})})
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, "tokens")
    with pytest.raises(ConfigError, match=r"train\.bin is not a folder"):
        load(tmp_path / "train.bin", "tokens")
    (tmp_path / "folder" / "train.bin").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"train\.bin cannot be read: Is a directory"):
        load(tmp_path / "folder", "tokens")


@pytest.mark.parametrize(
    ("source", "settings"),
    [("tokens", {"max_bytes": 5}), ("tokens", {"glob": "*"}), ("tokens", {"val_fraction": 0.2}),
     ("stdlib", {"path": "docs"}), ("stdlib", {"glob": "*.md"})],
)  # fmt: skip
def test_settings_of_another_source_are_refused(source, settings):
    (key,) = settings
    path = {"path": "somewhere"} if source == "tokens" else {}
    with pytest.raises(ConfigError, match=rf"^data\.{key}=.*data={source} does not read it.*choose data="):
        DataConfig(**{"name": source, **path, **settings})


# ---- windows over a stream of tokens ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.uint8, "<u2", np.int64])
def test_every_token_but_the_first_is_a_target_once(dtype):
    sequences = TokenSequences(np.arange(41).astype(dtype), block_size=8)
    assert len(sequences) == 5
    inputs, targets = sequences.batch(np.arange(5))
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.is_contiguous() and targets.is_contiguous()
    assert inputs.flatten().tolist() == list(range(40)) and targets.flatten().tolist() == list(range(1, 41))


def test_windows(tmp_path):
    """An uneven rest is not used; the order is that of the indices; a memory-mapped file is copied from."""
    assert [len(TokenSequences(np.arange(n), 8)) for n in (9, 16, 17)] == [1, 1, 2]
    assert TokenSequences(np.arange(41), 8).batch(np.array([4, 0, 4]))[0][:, 0].tolist() == [32, 0, 32]
    np.arange(1000, dtype="<u2").tofile(tmp_path / "x.bin")
    inputs, targets = TokenSequences(np.memmap(tmp_path / "x.bin", dtype="<u2", mode="r"), 10).batch(np.array([98]))
    assert inputs[0].tolist() == list(range(980, 990)) and targets[0, -1] == 990
    inputs += 1  # a copy: the file is read-only


def test_windows_that_cannot_be():
    short = r"the validation corpus has 8 tokens.*model\.block_size=8 needs 9.*smaller model\.block_size"
    for tokens, message in ((8, short), ((0,), "has 0 tokens"), ((2, 9), r"shape \(2, 9\)")):
        with pytest.raises(ConfigError, match=message):
            TokenSequences(np.zeros(tokens, np.uint8), 8, "validation corpus")
    sequences = TokenSequences(np.array([1, 2, 3, 4, 5, 300, 7]), 3, "training corpus", vocab_size=300)
    assert sequences.batch(np.array([0]))[0].tolist() == [[1, 2, 3]]
    message = r"token id 300 in the training corpus.*model\.vocab_size to at least 301 \(it is 300\)"
    with pytest.raises(ConfigError, match=message):
        sequences.batch(np.array([0, 1]))
    for index in (-1, 5):
        with pytest.raises(IndexError, match=f"sequence {index} of the corpus, which has 5"):
            TokenSequences(np.arange(41), 8).batch(np.array([index]))


# ---- the order: what it depends on, what it must not depend on, and that nothing is lost or repeated -----------------


def test_frozen_order():
    """Frozen: a change of these numbers changes every run that is resumed."""
    sampler = GlobalBatchSampler(100, 8, seed=1234)
    assert sampler.indices(0).tolist() == [95, 33, 72, 73, 70, 88, 17, 47]
    assert sampler.indices(1_000_000).tolist() == [14, 47, 82, 48, 13, 9, 8, 53]


@settings(deadline=None)
@given(size=st.integers(1, 3000), seed=st.integers(-(2**40), 2**70), epoch=st.integers(0, 2**40))
def test_permute_is_a_permutation(size, seed, epoch):
    result = permute(np.arange(size), size, seed, epoch)
    assert result.dtype == np.int64 and np.array_equal(np.sort(result), np.arange(size))


def test_permute_of_a_large_corpus():
    size = 10**12 + 7  # no array of this size exists
    positions = np.random.default_rng(0).integers(0, size, 10_000)
    result = permute(positions, size, seed=1, epoch=2)
    assert result.min() >= 0 and result.max() < size
    assert len(np.unique(result)) == len(np.unique(positions))


def test_permute_mixes():
    size = 10_000
    result = permute(np.arange(size), size, seed=0, epoch=0)
    # Neighbours are no longer neighbours, and positions say nothing about places.
    assert abs(np.corrcoef(np.arange(size), result)[0, 1]) < 0.03
    assert (np.abs(np.diff(result)) < 10).mean() < 0.01
    # Every place is reached from every tenth equally: 10 x 10 cells, expected 100 each.
    cells = np.histogram2d(np.arange(size), result, bins=10)[0]
    assert cells.min() > 60 and cells.max() < 140
    assert (result == permute(np.arange(size), size, seed=0, epoch=1)).mean() < 0.001
    # Small shuffles take many forms: of 4 things there are 24 orders; 400 epochs should show all of them.
    assert len({tuple(permute(np.arange(4), 4, 9, epoch)) for epoch in range(400)}) == 24


@pytest.mark.parametrize(("num_sequences", "global_batch"), [(12, 4), (13, 4), (7, 7), (5, 8), (1, 3), (1000, 32)])
def test_epochs_without_repetition(num_sequences, global_batch):
    sampler = GlobalBatchSampler(num_sequences, global_batch, seed=3)
    steps = 3 * num_sequences // global_batch + 2
    stream = np.concatenate([sampler.indices(step) for step in range(steps)])
    for epoch in range(3):
        one = stream[epoch * num_sequences : (epoch + 1) * num_sequences]
        assert np.array_equal(np.sort(one), np.arange(num_sequences)), epoch
    if num_sequences >= 12:
        assert not np.array_equal(stream[:num_sequences], stream[num_sequences : 2 * num_sequences])


def test_the_order_depends_on_seed_and_step_alone():
    one, two = (GlobalBatchSampler(1000, 64, seed).indices(0) for seed in (1, 2))
    assert not np.array_equal(one, two)
    straight, resumed = (GlobalBatchSampler(50, 8, seed=3) for _ in range(2))
    history = [straight.indices(step) for step in range(30)]
    for step in (17, 29, 3):
        assert np.array_equal(resumed.indices(step), history[step])


@pytest.mark.parametrize("step", [0, 5, 123])
def test_ranks_and_micro_steps_cut_the_global_batch(step):
    sampler = GlobalBatchSampler(100, 24, seed=1)
    for world_size in (1, 2, 3, 4, 6):
        for micro_batch in (1, 2, 4):
            accumulation, rest = divmod(24, world_size * micro_batch)
            if rest:
                continue
            pieces = [
                sampler.rank_indices(step, micro_step, rank, micro_batch, world_size)
                for micro_step in range(accumulation)
                for rank in range(world_size)
            ]
            assert all(piece.shape == (micro_batch,) for piece in pieces)
            # Not the same set only: the same order, so that one rank with one large batch is the same sum.
            assert np.array_equal(np.concatenate(pieces), sampler.indices(step))


@pytest.mark.parametrize(("act", "kind", "message"), [
    (lambda s: s.rank_indices(0, 0, 0, 5, 2), ConfigError, r"train_batch_size=24 .* 5 x 2 does not divide it"),
    (lambda s: s.rank_indices(0, 0, 0, 0, 2), ConfigError, "0 x 2"),
    (lambda s: s.rank_indices(0, 0, 2, 4, 2), ValueError, "rank=2 of 2"),
    (lambda s: s.rank_indices(0, 3, 0, 4, 2), ValueError, "micro_step=3 of 3"),
    (lambda s: s.indices(-1), ValueError, "step=-1"),
    (lambda _: GlobalBatchSampler(0, 4, seed=0), ConfigError, "at least one sequence"),
    (lambda _: GlobalBatchSampler(4, 0, seed=0), ConfigError, "train_batch_size=0"),
])  # fmt: skip
def test_bad_numbers(act, kind, message):
    with pytest.raises(kind, match=message):
        act(GlobalBatchSampler(100, 24, seed=1))
