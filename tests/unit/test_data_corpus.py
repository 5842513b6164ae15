"""What is read, how it is split, and every way in which a path can be wrong."""

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest

from deepzero.config.run import DataConfig
from deepzero.config.strict import ConfigError
from deepzero.data import corpus as module
from deepzero.data.corpus import Corpus, load_corpus, split_by_file, split_single


def text(path, **settings):
    return load_corpus(DataConfig(name="text", path=str(path), **settings))


def token_files(path):
    return load_corpus(DataConfig(name="tokens", path=str(path)))


def write_folder(root, files):
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


MANY = {f"{'abc'[i % 3]}/file_{i}.txt": bytes([65 + i]) * (50 + i) for i in range(20)}


@pytest.fixture(scope="module")
def stdlib():
    return load_corpus(DataConfig())


def test_stdlib_is_python_source(stdlib):
    whole = stdlib.train.tobytes() + stdlib.val.tobytes()
    assert stdlib.vocab_size == 256 and stdlib.bytes_per_token == 1.0 and stdlib.separator == 0
    assert stdlib.train.dtype == np.uint8 and len(stdlib.train) > 3_000_000
    assert 0.05 < len(stdlib.val) / len(whole) <= 0.1
    assert whole.count(b"\ndef ") + whole.count(b"\n    def ") > 5_000
    sources = whole.split(b"\0")
    assert Path(os.__file__).read_bytes() in sources
    for source in sources[::40]:
        source.decode("utf-8")
    again = load_corpus(DataConfig())
    assert again.train.tobytes() == stdlib.train.tobytes() and again.val.tobytes() == stdlib.val.tobytes()


def test_stdlib_leaves_out_tests_and_tables(stdlib):
    sources = set((stdlib.train.tobytes() + stdlib.val.tobytes()).split(b"\0"))
    root = Path(os.__file__).parent
    for name in ("encodings/cp437.py", "pydoc_data/topics.py", "test/test_os.py", "unittest/test/test_case.py"):
        if (root / name).exists():
            assert (root / name).read_bytes() not in sources, name
    assert stdlib.train.tobytes().count(b"\nclass Test") < 20


def test_python_without_source(tmp_path, monkeypatch):
    monkeypatch.setattr(module.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"no standard library source.*data=text data.path="):
        load_corpus(DataConfig())


def test_split_by_file_is_by_name_alone(tmp_path):
    """Neither the order of creation nor the place of the folder matters."""
    one = write_folder(tmp_path / "one", MANY)
    two = write_folder(tmp_path / "elsewhere" / "two", dict(reversed(list(MANY.items()))))
    first, second = text(one), text(two)
    assert first.train.tobytes() == second.train.tobytes() and first.val.tobytes() == second.val.tobytes()


def test_split_by_file_keeps_files_whole_and_apart(tmp_path):
    corpus = text(write_folder(tmp_path, MANY), val_fraction=0.25)
    train = corpus.train.tobytes().rstrip(b"\0").split(b"\0")
    val = corpus.val.tobytes().rstrip(b"\0").split(b"\0")
    assert sorted(train + val) == sorted(MANY.values())
    assert 0.15 < len(corpus.val) / (len(corpus.val) + len(corpus.train)) <= 0.25
    order = sorted(MANY, key=lambda name: hashlib.sha256(name.encode()).digest())
    assert [c for c in (MANY[n] for n in order) if c in train] == train


def test_split_by_file_frozen():
    """Frozen: another answer on another machine or version would mix the two parts of a resumed run."""
    sizes = {f"f{i}.txt": 100 for i in range(10)}
    assert split_by_file(sizes, 0.2)[1] == ["f9.txt", "f4.txt"]


@pytest.mark.parametrize("fraction", [0.001, 0.1, 0.5, 0.999])
def test_split_by_file_never_empties_a_part(fraction):
    for sizes in ({"a": 1, "b": 1000}, {"a": 1000, "b": 1}, {"a": 5, "b": 5}, {"a": 900, "b": 900, "c": 2}):
        train, val = split_by_file(sizes, fraction)
        assert train and val and sorted(train + val) == sorted(sizes)


def test_split_single_file(tmp_path):
    content = bytes(range(1, 128)) * 10
    (tmp_path / "book.txt").write_bytes(content)
    corpus = text(tmp_path / "book.txt", val_fraction=0.2)
    assert corpus.train.tobytes() + corpus.val.tobytes() == content
    assert len(corpus.val) == 254
    alone = text(tmp_path, val_fraction=0.2)  # a folder with one file is that file
    assert alone.train.tobytes() == corpus.train.tobytes()


def test_split_single_does_not_cut_a_character():
    content = "ä€😀".encode() * 30
    for fraction in np.linspace(0.01, 0.99, 50):
        train, val = split_single(content, float(fraction))
        assert train + val == content
        train.decode("utf-8")
        val.decode("utf-8")


def test_max_bytes(tmp_path):
    corpus = text(write_folder(tmp_path, MANY), max_bytes=400, val_fraction=0.2)
    assert len(corpus.train) == 320 and len(corpus.val) == 80
    (tmp_path / "one.txt").write_bytes(b"x" * 1000)
    single = text(tmp_path / "one.txt", max_bytes=100)
    assert len(single.train) == 90 and len(single.val) == 10


def test_what_is_not_text_is_passed_over(tmp_path):
    files = {"a.txt": b"alpha", "b.txt": b"beta", "empty.txt": b"", "c.bin": b"\x00\x01", "d.txt": b"\xff\xfe latin"}
    files |= {".git/config": b"hidden", "sub/.hidden": b"hidden"}
    corpus = text(write_folder(tmp_path, files), val_fraction=0.5)
    assert sorted((corpus.train.tobytes() + corpus.val.tobytes()).split(b"\0")) == [b"", b"alpha", b"beta"]


def test_glob(tmp_path):
    files = {"a.md": b"alpha", "sub/b.md": b"beta", "c.txt": b"gamma"}
    corpus = text(write_folder(tmp_path, files), val_fraction=0.5, glob="*.md")
    assert b"gamma" not in corpus.train.tobytes() + corpus.val.tobytes()
    assert b"beta" in corpus.train.tobytes() + corpus.val.tobytes()


def test_decode():
    empty = np.zeros(0, np.uint8)
    by_bytes = Corpus(empty, empty, 256, 1.0, 0, "")
    assert by_bytes.decode(list("naïve".encode())) == "naïve"
    assert by_bytes.decode([0xC3]) == "\ufffd"
    assert Corpus(empty, empty, 50257, None, None, "").decode([15496, 995]) == "15496 995"


@pytest.mark.parametrize(("files", "path", "glob", "message"), [
    ({}, "nowhere", None, r"data\.path=.*nowhere does not exist"),
    ({"empty.txt": b""}, "empty.txt", None, r"empty\.txt is empty"),
    ({"a.bin": b"\x00", "b.txt": b""}, "", None, "holds no UTF-8 text file"),
    ({}, "/dev/null", None, r"data\.path=/dev/null is a device, a pipe or a socket"),
    ({"a.txt": b"text", "b.txt": b"text"}, "", "*.rst", r"matches '\*\.rst'"),
    ({"a.txt": b"text"}, "a.txt", "*.txt", r"data\.glob='\*\.txt'.*is a file"),
    ({"x.txt": b"ab"}, "x.txt", None,
     r"x\.txt gives 2 bytes for training and 0 for validation.*val_fraction=0\.1"),
])  # fmt: skip
def test_wrong_paths(tmp_path, files, path, glob, message):
    write_folder(tmp_path, files)
    with pytest.raises(ConfigError, match=message):
        text(tmp_path / path, **({"glob": glob} if glob else {}))


@pytest.mark.parametrize("content", [b"\xff\xfe\x00a", "café".encode("latin-1"), b"text with \x00 inside"])
def test_binary_or_undecodable(tmp_path, content):
    (tmp_path / "x.dat").write_bytes(content)
    with pytest.raises(ConfigError, match=r"x\.dat is not UTF-8 text"):
        text(tmp_path / "x.dat")
    with pytest.raises(ConfigError, match=r"data\.glob chose .*x\.dat"):
        text(tmp_path, glob="*.dat")


@pytest.mark.skipif(os.geteuid() == 0 if hasattr(os, "geteuid") else True, reason="root reads everything")
def test_unreadable(tmp_path):
    write_folder(tmp_path, {"a.txt": b"text", "b.txt": b"text"})
    (tmp_path / "a.txt").chmod(0)
    with pytest.raises(ConfigError, match=r"a\.txt cannot be read: Permission denied"):
        text(tmp_path)


def write_tokens(root, train, val):
    np.array(train, dtype="<u2").tofile(root / "train.bin")
    np.array(val, dtype="<u2").tofile(root / "val.bin")
    return root


def test_token_files(tmp_path):
    corpus = token_files(write_tokens(tmp_path, [1, 50256, 3], [7, 8]))
    assert corpus.train.tolist() == [1, 50256, 3] and corpus.val.tolist() == [7, 8]
    assert isinstance(corpus.train, np.memmap) and corpus.train.dtype == np.dtype("<u2")
    assert not corpus.train.flags.writeable
    assert corpus.vocab_size == 50257 and corpus.bytes_per_token is None and corpus.separator is None


def test_large_token_files_are_scanned_in_samples_and_are_little_endian(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SCANNED_TOKENS", 640)
    tokens = [5] * 10_000
    tokens[-1] = 300  # the last sample reaches the end
    assert token_files(write_tokens(tmp_path, tokens, [1])).vocab_size == 301
    (tmp_path / "train.bin").write_bytes(b"\x01\x02")
    (tmp_path / "val.bin").write_bytes(b"\x00\x01")
    corpus = token_files(tmp_path)
    assert corpus.train.tolist() == [0x0201] and corpus.val.tolist() == [0x0100]


@pytest.mark.parametrize(("train", "val", "message"), [
    (b"\1\0\2\0\0", b"\3\0", r"train\.bin has 5 bytes, an odd number"),
    (b"\1\0", b"", r"val\.bin is empty"),
    (b"\1\0", None, r"val\.bin cannot be read: No such file"),
    (np.array([20240520, 1, 2], dtype="<i4").tobytes(), b"\2\0", r"llm\.c's \.bin for GPT-2, which starts with a head"),
])  # fmt: skip
def test_token_files_that_are_none(tmp_path, train, val, message):
    write_folder(tmp_path, {"train.bin": train, **({} if val is None else {"val.bin": val})})
    with pytest.raises(ConfigError, match=message):
        token_files(tmp_path)
    with pytest.raises(ConfigError, match=r"train\.bin is not a folder"):
        token_files(tmp_path / "train.bin")


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
