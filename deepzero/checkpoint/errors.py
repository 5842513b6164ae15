"""What goes wrong with checkpoints: one error, its words for other ranks, and how all ranks raise together."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from deepzero.comm import process_group


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; ``text`` names the file, and says what to do.

    Where a checkpoint is damaged, ``beside`` is another one of the same folder that is complete.
    """

    says_it_all = True
    """Frames would tell a user nothing: see ``describe`` of ``rank_process.py``."""

    def __init__(self, text: str, beside: Path | None = None) -> None:
        super().__init__(text)
        self.text, self.beside = text, beside

    def __str__(self) -> str:
        if self.beside is None:
            return self.text
        return f"{self.text}; {said_complete(self.beside)}: load it with tag={self.beside.name!r} from there"


class RanksDisagree(CheckpointError, AssertionError):
    """Ranks save or load with different arguments. DeepSpeed raises the other of the two for a tag."""


class NoCheckpoint(CheckpointError):
    """Nothing has been saved there yet: what a run meets that begins."""


class OtherModel(CheckpointError):
    """The checkpoint's parameters or buffers are not those of the model."""


def said_complete(path: Path) -> str:
    """What is known of a checkpoint whose bytes nobody has read, and who reads them."""
    return f"{path} is complete (whether it is whole, `python -m tools.verify` says)"


def reason(error: BaseException) -> str:
    """An error in words, for the other ranks."""
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"


def own_words(error: Exception) -> str:
    """An error that says itself what is to be done, in its words; another one as :func:`reason` has it."""
    return str(error) if isinstance(error, (RuntimeError, ValueError)) else reason(error)


@contextlib.contextmanager
def together(
    words: Callable[[Exception], str] = reason, error: Callable[[str], Exception] = CheckpointError
) -> Iterator[None]:
    """What one rank raises inside, all raise as an ``error`` of these words: none waits for it. A collective.

    A fault of the program's, which no word of these foresees, is this rank's error's cause, with its traceback.
    """
    problem = fault = None
    try:
        yield
    except Exception as raised:  # whatever it is: the others wait for this rank's word
        problem = words(raised)
        fault = None if isinstance(raised, (RuntimeError, ValueError, OSError)) else raised
    try:
        process_group.raise_on_all_ranks(problem, error)
    except Exception as told:
        told.__cause__ = told.__cause__ or fault  # that of a lost rank says how it was noticed
        raise


def agree_on(call: str, arguments: dict[str, Any]) -> None:
    """Raise on every rank when one calls with other arguments than rank 0. A collective."""
    first = process_group.broadcast_object(arguments)
    with together(error=RanksDisagree):
        for name, value in arguments.items():
            if value != first[name]:
                other = f"{name}={value!r}, but rank 0 {first[name]!r}"
                raise CheckpointError(f"{call}: this rank passes {other}; pass the same on all ranks")


def as_folder(call: str, folder: str | Path) -> Path:
    """Raise on every rank when one names no folder: an empty setting would mean the current one. A collective."""
    with together():
        if not str(folder).strip():
            raise CheckpointError(f'{call}({folder!r}): no folder is named; "." is the current one')
    return Path(os.path.expanduser(folder))


@contextlib.contextmanager
def naming(beside: Callable[[], Path | None]) -> Iterator[None]:
    """Damage that is found inside is raised with another checkpoint, which ``beside`` looks for."""
    try:
        yield
    except CheckpointError as error:
        raise type(error)(error.text, beside()) from None
