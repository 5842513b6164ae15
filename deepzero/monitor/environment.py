"""What a run ran on: versions, machine, commit. Only what is known without asking for long."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import torch

from deepzero.version import __version__

CHECKOUT = Path(__file__).resolve().parents[2]
"""Of the sources; an installed package has none."""
GIT_SECONDS = 2.0


def environment(gpu: str | None = None) -> dict[str, str]:
    """Versions and machine as words, for ``summary.json``. It does not raise.

    Args:
        gpu: the device's name, where ranks have one.
    """
    system = {
        "deepzero": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count() or 1} logical cores",
    }
    if gpu is not None:
        system["gpu"] = gpu
    commit = _commit()
    return system if commit is None else {**system, "commit": commit}


def _commit() -> str | None:
    """The commit of the sources, with ``-dirty`` where files differ from it; None where git does not say."""
    if not (CHECKOUT / ".git").exists():
        return None
    command = ["git", "-C", str(CHECKOUT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 and done.stdout.strip() else None
