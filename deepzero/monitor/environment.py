"""What a run ran on: versions, machine, commit. Only what is known without asking for long."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import torch

from deepzero.version import __version__

CHECKOUT = Path(__file__).resolve().parents[2]  # of the sources; an installed package has none
GIT_SECONDS = 2.0


def environment(gpu: str | None = None) -> dict[str, str]:
    """Versions and machine as words, for ``summary.json``; ``gpu`` names the ranks' device. It does not raise."""
    found = {
        "deepzero": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count() or 1} logical cores",
        "gpu": gpu,
        "commit": _commit(),
    }
    return {name: words for name, words in found.items() if words is not None}


def _commit() -> str | None:
    """The commit of the sources, with ``-dirty`` where files differ from it; None where git does not say.

    By ``git status``, which can be told not to lock the index, in the way of whoever works in the checkout, to write
    down what it found; ``git describe --dirty`` always does.
    """
    if not (CHECKOUT / ".git").exists():
        return None
    status = ["git", "--no-optional-locks", "-C", str(CHECKOUT), "status", "--porcelain=v2", "--branch"]
    command = [*status, "--untracked-files=no"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.splitlines()
    heads = [line.split()[-1] for line in lines if line.startswith("# branch.oid ")]
    if done.returncode != 0 or not heads or heads[0] == "(initial)":
        return None
    return heads[0][:12] + ("" if all(line.startswith("# ") for line in lines) else "-dirty")
