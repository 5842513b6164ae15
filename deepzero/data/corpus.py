"""A corpus: the tokens to train on, the tokens to validate on, and the way back to text.

Three kinds, ``data=…``:

* ``stdlib``: the source text of the running Python's standard library, which everyone has: about 10 MB, and anyone can
  judge the sample at the end. Left out is what no person wrote to be read: tests (more than half of all bytes),
  code-page tables (``encodings``), the docs in one string (``pydoc_data``), build settings, installed packages.
* ``text``: one file, or every text file under a folder.
* ``tokens``: nanoGPT's ``train.bin`` and ``val.bin``: raw little-endian uint16, memory-mapped, never read as a whole.
  Its ``meta.pkl`` is not read: unpickling a file runs whatever is in it.

Text is trained on as UTF-8 bytes, 256 tokens. Files stand in the order of the SHA-256 of their relative names, joined
by a NUL byte, which no text contains: as a prompt it means "a new file begins". **The split is by file**, so that
validation never sees the other half of a file that was trained on; the tail of a single file is split off. Every rank
and every machine with the same files cuts the same corpus.
"""

from __future__ import annotations

import hashlib
import os
import re
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from deepzero.config.run import DataConfig
from deepzero.config.strict import ConfigError

Tokens = npt.NDArray[np.integer]

SEPARATOR = 0  # the byte between two files of text
STDLIB_SKIPPED = re.compile(
    "site-packages|dist-packages|tests?|idle_test|__pycache__|encodings|pydoc_data|config-.*|_sysconfigdata.*"
)
"""Names of folders and files beside the sources."""
LLM_C_MAGIC = {20240520: "llm.c's .bin for GPT-2", 20240801: "llm.c's .bin for Llama 3"}
"""First int32 of token files that share the suffix with nanoGPT's, and start with a header of 256 numbers."""
SCANNED_TOKENS = 1 << 26
"""A token file of at most this many tokens is scanned whole for its largest id, a larger one in samples."""


@dataclass(frozen=True)
class Corpus:
    """Tokens of both parts; see the module."""

    train: Tokens  # 1-D, uint8 (text) or little-endian uint16 (token files, memory-mapped)
    val: Tokens  # from other files
    vocab_size: int  # of text 256; of token files the largest id seen + 1: ``TokenSequences`` checks every batch
    bytes_per_token: float | None  # for bits per byte: 1 for text; None for token files, whose text is unknown
    separator: int | None  # the token between two files, a good prompt; None for token files
    description: str  # one line for the log

    def decode(self, tokens: list[int]) -> str:
        """Text of tokens. What is no UTF-8, and what is no byte, becomes U+FFFD; ids without a tokenizer stay numbers.

        Example:
            >>> empty = np.zeros(0, np.uint8)
            >>> Corpus(empty, empty, 256, 1.0, SEPARATOR, "").decode([104, 105])
            'hi'
        """
        if self.bytes_per_token is None:
            return " ".join(map(str, tokens))
        # A model may have a larger vocabulary than its corpus. No text has the byte 0xFF.
        return bytes(min(token, 0xFF) for token in tokens).decode("utf-8", errors="replace")


def load_corpus(cfg: DataConfig) -> Corpus:
    """Read the corpus that ``cfg`` names; each part has at least one token, and ``TokenSequences`` counts sequences.

    Raises:
        ConfigError: nothing there, nothing in it, or not what it is said to be; names the path and what to do.

    Example:
        >>> corpus = load_corpus(DataConfig(max_bytes=10_000))
        >>> len(corpus.train) + len(corpus.val) <= 10_000, corpus.vocab_size
        (True, 256)
    """
    if cfg.name == "tokens":
        return _load_token_files(cfg)
    if cfg.name == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        files = _read_folder(root, [path for path in _walk(root, STDLIB_SKIPPED.fullmatch) if path.suffix == ".py"])
        if not files:
            hint = "take your own text with data=text data.path=FILE_OR_FOLDER"
            raise ConfigError(f"data=stdlib: this Python has no standard library source under {root}; {hint}")
        return _from_files(files, cfg, f"Python's standard library under {root}")
    path = Path(os.path.expanduser(str(cfg.path)))
    if path.is_file():
        if cfg.glob is not None:
            raise ConfigError(f"data.glob={cfg.glob!r} chooses files of a folder, and data.path={path} is a file")
        if (text := _read_text(path)) is None:
            raise ConfigError(f"data.path={path} is not UTF-8 text; convert it, or give token files with data=tokens")
        return _from_files({path.name: text}, cfg, str(path))
    if not path.is_dir():
        missing = f"does not exist (looked from {Path.cwd()})"
        problem = "is a device, a pipe or a socket" if path.exists() else missing
        raise ConfigError(f"data.path={path} {problem}; give a text file or a folder")
    glob = "*" if cfg.glob is None else cfg.glob.removeprefix("**/")  # it counts from the right, at any depth
    if not glob or "**" in glob:
        raise ConfigError(f"data.glob={cfg.glob!r} is no pattern like *.md or docs/*.md, which count at any depth")
    chosen = [file for file in _walk(path) if file.relative_to(path).match(glob)]
    files = _read_folder(path, chosen, must_be_text=cfg.glob is not None)
    if not files:
        what = "UTF-8 text file" if cfg.glob is None else f"file with text that matches {cfg.glob!r}"
        raise ConfigError(f"data.path={path} holds no {what}; look at data.path and data.glob")
    return _from_files(files, cfg, str(path))


def _walk(root: Path, skipped: Callable[[str], object] = lambda name: False) -> list[Path]:
    """Every file under ``root``; hidden files and folders (``.git``) are left out, linked folders not entered."""

    def unreadable(error: OSError) -> None:
        raise ConfigError(f"data: {error.filename} cannot be read: {error.strerror}") from error

    found = []
    for folder, folders, names in os.walk(root, onerror=unreadable):
        # What is left out is not entered: beside the standard library lie all the packages that are installed.
        folders[:] = [name for name in folders if not name.startswith(".") and not skipped(name)]
        found += [os.path.join(folder, name) for name in names if not name.startswith(".") and not skipped(name)]
    return [Path(path) for path in found if os.path.isfile(path)]


def _read_text(path: Path) -> bytes | None:
    """The file's bytes, or None where they are not text: not UTF-8, or with the byte that separates files."""
    try:
        content = path.read_bytes()
        content.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"data: {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        return None
    return None if bytes((SEPARATOR,)) in content else content


def _read_folder(root: Path, paths: list[Path], must_be_text: bool = False) -> dict[str, bytes]:
    """Relative name to content, without empty files. What is not text is passed over, unless a glob asked for it."""
    files = {}
    for path in paths:
        if (content := _read_text(path)) is None and must_be_text:
            raise ConfigError(f"data.glob chose {path}, which is not UTF-8 text; choose others, or convert it")
        if content:
            files[path.relative_to(root).as_posix()] = content
    return files


def _from_files(files: dict[str, bytes], cfg: DataConfig, where: str) -> Corpus:
    if len(files) == 1:
        (content,) = files.values()
        if not content:
            raise ConfigError(f"data.path={where} is empty; give a file with text in it")
        train, val = split_single(content, cfg.val_fraction, cfg.max_bytes)
        split = "split at its tail"
    else:
        parts = split_by_file({name: len(content) + 1 for name, content in files.items()}, cfg.val_fraction)
        separator = bytes((SEPARATOR,))
        train, val = (b"".join(files[name] + separator for name in names) for names in parts)
        if cfg.max_bytes is not None:
            val_limit = int(cfg.max_bytes * cfg.val_fraction)
            train, val = train[: cfg.max_bytes - val_limit], val[:val_limit]
        split = f"{len(parts[0])} files for training, {len(parts[1])} for validation"
    if not train or not val:
        raise ConfigError(
            f"data: {where} gives {len(train)} bytes for training and {len(val)} for validation, and both need some; "
            f"use a larger corpus, or look at data.val_fraction={cfg.val_fraction} and data.max_bytes={cfg.max_bytes}"
        )
    return Corpus(
        train=np.frombuffer(train, dtype=np.uint8),
        val=np.frombuffer(val, dtype=np.uint8),
        vocab_size=256,
        bytes_per_token=1.0,
        separator=SEPARATOR,
        description=f"{where}: {len(train):,} + {len(val):,} bytes, {split}",
    )


def split_by_file(sizes: dict[str, int], val_fraction: float) -> tuple[list[str], list[str]]:
    """Whole files for training and for validation, both in the order of their names' hashes.

    Going through the files in that order, one is kept for validation if it still fits into ``val_fraction`` of all
    bytes; if none fits, the smallest is. Hence validation never takes more than its part unless it must, and never all.
    ``sizes`` is relative name to bytes, of at least two files; neither list is empty.

    Example:
        >>> split_by_file({"a": 50, "b": 50, "c": 900}, 0.1)
        (['c'], ['b', 'a'])
    """
    order = sorted(sizes, key=lambda name: (hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest(), name))
    room = int(val_fraction * sum(sizes.values()))
    val = []
    for name in order:
        if sizes[name] <= room:
            val.append(name)
            room -= sizes[name]
    kept = dict.fromkeys(val or [min(order, key=lambda name: sizes[name])])
    return [name for name in order if name not in kept], list(kept)


def split_single(content: bytes, val_fraction: float, max_bytes: int | None = None) -> tuple[bytes, bytes]:
    """Head for training, tail for validation; the cut is moved back to the beginning of a character.

    Example:
        >>> split_single(b"0123456789", 0.2)
        (b'01234567', b'89')
    """
    if max_bytes is not None:
        content = content[:max_bytes]
    cut = len(content) - int(len(content) * val_fraction)
    # UTF-8 continuation bytes are 10xxxxxx.
    while 0 < cut < len(content) and content[cut] & 0xC0 == 0x80:
        cut -= 1
    return content[:cut], content[cut:]


def _load_token_files(cfg: DataConfig) -> Corpus:
    folder = Path(os.path.expanduser(str(cfg.path)))
    if not folder.is_dir():
        raise ConfigError(f"data.path={folder} is not a folder; data=tokens wants one with train.bin and val.bin")
    train, val = _map_tokens(folder / "train.bin"), _map_tokens(folder / "val.bin")
    return Corpus(
        train=train,
        val=val,
        vocab_size=max(_largest(train), _largest(val)) + 1,
        bytes_per_token=None,
        separator=None,
        description=f"{folder}: {len(train):,} + {len(val):,} tokens from train.bin and val.bin",
    )


def _map_tokens(path: Path) -> Tokens:
    """Memory-map one file in nanoGPT's convention: nothing but little-endian uint16."""
    try:
        size = path.stat().st_size
        tokens = np.memmap(path, "<u2", "r", shape=(size // 2,)) if size > 1 else np.zeros(0, "<u2")
    except OSError as error:
        raise ConfigError(f"data=tokens: {path} cannot be read: {error.strerror}") from error
    if size == 0 or size % 2:
        problem = "is empty" if size == 0 else f"has {size} bytes, an odd number, so it is cut off or not uint16"
        raise ConfigError(f"data=tokens: {path} {problem}; write it with numpy: ids.astype('<u2').tofile(path)")
    if (magic := int.from_bytes(tokens[:2].tobytes(), "little")) in LLM_C_MAGIC:
        raise ConfigError(
            f"data=tokens: {path} is {LLM_C_MAGIC[magic]}, which starts with a header; nanoGPT's convention has none"
        )
    return tokens


def _largest(tokens: Tokens) -> int:
    """The largest id, of all tokens or of 64 evenly spaced stretches of a large file."""
    if len(tokens) <= SCANNED_TOKENS:
        return int(tokens.max())
    stretch = SCANNED_TOKENS // 64
    starts = np.linspace(0, len(tokens) - stretch, 64).astype(np.int64)
    return max(int(tokens[start : start + stretch].max()) for start in starts)
