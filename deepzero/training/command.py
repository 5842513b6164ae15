"""What was typed: kept in ``.hydra/`` of the run folder, and said again, with that folder, where a run can go on."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepzero.checkpoint.checkpoint_dir import read_manifest
from deepzero.checkpoint.errors import CheckpointError
from deepzero.config.hydra_errors import split
from deepzero.config.strict import ConfigError
from deepzero.training.resume import find_start

FOLDER = ".hydra"


@dataclass(frozen=True)
class Command:
    """One run as it was typed; of a sweep, one of its runs."""

    start: Sequence[str]
    """The words before the overrides: ``python train.py``, or torchrun with what it needs."""
    overrides: Sequence[str]
    files: Mapping[str, str]
    """Names and texts of Hydra's own record: config, overrides, Hydra's settings."""
    by_torchrun: bool
    """Then ranks say for themselves how to go on; else the process that has started them does."""

    def keep(self, run_dir: Path) -> None:
        """Write Hydra's record: when the run begins, for a run that is refused leaves no trace in the folder."""
        (run_dir / FOLDER).mkdir(parents=True, exist_ok=True)
        for name, text in self.files.items():
            (run_dir / FOLDER / name).write_text(text, encoding="utf-8")

    def way_on(self, run_dir: Path, total_steps: int) -> str:
        """Which step was saved last, and the command that goes on from there; empty where nothing was saved.

        Args:
            run_dir: the run folder.
            total_steps: of the run. After the last one the command asks for twice as many.
        """
        try:
            if (path := find_start("auto", run_dir)) is None:
                return ""
            step = read_manifest(path).counters["global_steps"]
        except (ConfigError, CheckpointError):  # whoever tries to go on reads what is wrong with it
            return ""
        words = self._again(run_dir, {"train.steps": str(2 * total_steps)} if step >= total_steps else {})
        return f"saved after step {step}; to go on{' to more steps' * (step >= total_steps)}: {words}"

    def _again(self, run_dir: Path, others: Mapping[str, str]) -> str:
        # Without train.resume the newest checkpoint of the folder counts. The value that was typed named the beginning
        # of this run: null is refused now that there are checkpoints, and an earlier one of them would be gone back to.
        kept = [word for word in self.overrides if split(word)[1] not in ("hydra.run.dir", "train.resume", *others)]
        more = [f"{key}={value}" for key, value in others.items()]
        words = [*self.start, *kept, *more, f"hydra.run.dir={in_hydras_quotes(str(run_dir))}"]
        return " ".join(map(in_shells_quotes, words))


def interpreter() -> str:
    """This Python as a shell finds it: by its name where that leads here, else by its path."""
    name = Path(sys.executable).name
    return name if shutil.which(name) == sys.executable else sys.executable


def torchrun_words(program: str) -> tuple[str, ...]:
    """How torchrun was called on this node, from the table of processes; shortened where there is none to read."""
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_text(encoding="utf-8").split("\0")
        return tuple(words[: words.index(program)])
    except (OSError, ValueError):
        return ("torchrun", "...")


def in_hydras_quotes(value: str) -> str:
    r"""The value of an override as Hydra reads it to the letter; plain where it can stand as it is.

    Example:
        >>> print(in_hydras_quotes("runs/1"), in_hydras_quotes("it's (2)"))
        runs/1 'it\'s (2)'
    """
    if re.fullmatch(r"[\w./+-]+", value, re.ASCII):
        return value
    # A backslash is an escape only where a quote follows.
    escaped = re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + ("\\'" if found[2] else ""), value)
    return "'" + escaped.replace("${", "\\${") + "'"


def in_shells_quotes(word: str) -> str:
    """A word for the shell; one with Hydra's quotes in double ones where that can be.

    Example:
        >>> print(in_shells_quotes("zero.stage=2"), in_shells_quotes("data.path='my text'"), in_shells_quotes("a b"))
        zero.stage=2 "data.path='my text'" 'a b'
    """
    return f'"{word}"' if "'" in word and not set(word) & set('"$`\\!') else shlex.quote(word)
