"""Restarts, as a rank sees them: how many there were, and a note that the next attempt can read.

Two can start ranks anew after a failure: :func:`deepzero.launch.launcher.launch` with ``max_restarts``, and ``torchrun
--max-restarts``. The launcher's process outlives its ranks and can hand them what it likes. Under torchrun nothing of
ours is alive between two attempts; but its agent gives every rank a file for its error, in a folder that is the same
for all attempts of that agent: ``<folder>/attempt_<n>/<local rank>/error.json``. Notes are files in ``<folder>``. Each
node has its own agent, hence its own notes.

Source: ``DefaultLogsSpecs.reify`` in torch's ``distributed/elastic/multiprocessing/api.py``.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

RESTART_VARIABLE = "DEEPZERO_RESTART"
"""The launcher tells its ranks: "0" in the first attempt."""


def restart_count() -> int:
    """How often the ranks of this run have been started again; 0 in the first attempt, and without a launcher."""
    return int(os.environ.get(RESTART_VARIABLE) or os.environ.get("TORCHELASTIC_RESTART_COUNT") or "0")


def remember(name: str, value: str) -> None:
    """Leave a note for this node's ranks in later attempts. Local rank 0 writes it; elsewhere this does nothing.

    Args:
        name: letters, digits and ``_ . -``.
        value: what :func:`recall` will return, over what it returned before.
    """
    path = _note(name)
    if path is not None and os.environ.get("LOCAL_RANK") == "0":
        temporary = path.with_name(f".{path.name}")
        temporary.write_text(value, encoding="utf-8")
        temporary.replace(path)  # whole or not at all: this process may be killed at any instant


def recall(name: str) -> str | None:
    """The note that this node's local rank 0 has left; None when there is none, and when not under torchrun."""
    path = _note(name)
    try:
        return None if path is None else path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def _note(name: str) -> Path | None:
    if not re.fullmatch(r"[\w.-]+", name):
        raise ValueError(f"name={name!r}: a note's name has letters, digits and _ . - only")
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not error_file or RESTART_VARIABLE in os.environ:
        return None
    folders = Path(error_file).parents
    if len(folders) < 3 or not re.fullmatch(r"attempt_\d+", folders[1].name):
        return None
    return folders[2] / f"deepzero-{name}"
