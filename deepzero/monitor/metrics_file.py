"""What a run leaves behind, written so that it can be read whatever happens: ``metrics.jsonl`` and ``summary.json``.

- **Numbers round-trip.** Python writes a float with the fewest digits that give the same bits back, so two runs can be
  compared for identical bits by their files.
- **Always JSON.** ``NaN`` and ``Infinity`` become ``null``; the entry's other fields (``skipped``, the summary's error)
  say why.
- **Always whole.** Each line of ``metrics.jsonl`` is handed to the system at once; ``summary.json`` is written beside
  its place, flushed and moved there, so a reader sees the old one or the new one, after a power cut, too.
- **Never what a run ends by.** A disk that is full or gone is said once; training goes on, and lines are written again
  as soon as there is room (:meth:`deepzero.monitor.monitor.Monitor.step`).
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from deepzero.durable import write_whole
from deepzero.monitor.async_logger import Kind
from deepzero.monitor.environment import environment

METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
ERROR = "error.txt"  # the whole traceback of a run that failed
TIMELINE = "timeline.json"  # the memory of one step, event by event
REPORT = "report.html"
STOPPED = "stopped by SIG"
"""So the reason begins, in whichever process it is said, where a signal has ended the run and no fault."""


def to_json(value: Any, indent: int | None = None) -> str:
    """Valid JSON of nested mappings, sequences and scalars."""
    return json.dumps(_clean(value), indent=indent, allow_nan=False, ensure_ascii=False)


def _clean(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{value!r} of type {type(value).__name__} has no place in a JSON file")


def scalars(kind: Kind, entry: Mapping[str, Any]) -> dict[str, float]:
    """Every number of an entry but the step, under the name that loggers show it by.

    W&B and TensorBoard make a section of what stands before the first slash: ``kind``, or a name's own section.
    """
    return {
        key if "/" in key else f"{kind}/{key}": float(value)
        for key, value in entry.items()
        if key != "step" and isinstance(value, (int, float))
    }


def clear(run_dir: Path, going_on: bool = False) -> datetime | None:
    """Remove what an earlier run left in a folder that is used again: its summary must not speak for this run.

    A run that is ``going_on`` with that one keeps its metrics. Returns when that run last wrote; None: there was none.
    """
    names = (SUMMARY, ERROR, REPORT) if going_on else (METRICS, SUMMARY, ERROR, REPORT, TIMELINE)
    left = [run_dir / name for name in names if (run_dir / name).is_file()]
    when = max((path.stat().st_mtime for path in left), default=None)
    for path in left:
        path.unlink()
    return None if when is None else datetime.fromtimestamp(when)


class MetricsFile:
    """``metrics.jsonl`` of one run: one JSON object per line, each handed to the system as soon as it is known.

    It begins with the ``kept`` ones of earlier starts; the others are of a start that came to nothing.
    """

    def __init__(self, run_dir: Path, kept: Sequence[Mapping[str, Any]] = ()) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._path = run_dir / METRICS
        put(self._path, "".join(to_json(entry) + "\n" for entry in kept))
        # Opened once: opening takes longer than writing. Not a file object, so that a line is one call to the system,
        # whole in the file when it returns.
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND)

    def write(self, kind: Kind, entry: Mapping[str, Any]) -> None:
        """Append a line."""
        line, written = (to_json(entry) + "\n").encode("utf-8"), 0
        try:
            if not self._path.exists():
                raise FileNotFoundError(errno.ENOENT, "it was removed")
            while written < len(line):  # a disk that is almost full takes a part, and raises at the next
                written += os.write(self._file, line[written:])
        except OSError as error:
            if written:  # the next line must not begin in the middle of this one
                os.ftruncate(self._file, os.fstat(self._file).st_size - written)
            raise OSError(error.errno, error.strerror, str(self._path)) from None

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Close: every line was handed to the system, and the summary has a file of its own."""
        try:
            os.close(self._file)
        except OSError as error:  # some file systems say only now that there was no room
            print(f"{self._path}: {error}", file=sys.stderr, flush=True)


def read_lines(run_dir: Path) -> tuple[list[dict[str, Any]], int]:
    """All whole lines of a run's ``metrics.jsonl``, none where there is no file; and how many are no JSON objects.

    A torn last line is left out; a power cut may leave others of lines that had not reached the disk.
    """
    content = b""
    with contextlib.suppress(FileNotFoundError):
        content = (run_dir / METRICS).read_bytes()
    lines = list(filter(None, content.split(b"\n")[:-1]))
    entries = []
    for line in lines:
        with contextlib.suppress(ValueError):
            entries.append(json.loads(line))
    found = [entry for entry in entries if isinstance(entry, dict)]
    return found, len(lines) - len(found)


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The entries of a run's ``metrics.jsonl``; empty when there is none."""
    return read_lines(run_dir)[0]


def kept_metrics(run_dir: Path, first_step: int, validated_again: bool = True) -> list[dict[str, Any]]:
    """What a run that goes on after ``first_step`` steps keeps: all up to there, but a validation that it repeats."""
    entries = read_metrics(run_dir) if first_step else []
    return [entry for entry in entries if entry["step"] < first_step + (not validated_again or "loss" in entry)]


def put(path: Path, text: str) -> None:
    """Write a file beside its place and move it there: a reader sees the old one or the new one, whole."""
    # A name of a file may hold bytes that are no text: as backslashes they are JSON, and come back.
    write_whole(path, text.encode("utf-8", "backslashreplace"), str(os.getpid()))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Put a JSON file into place, whole, on one line."""
    put(path, to_json(value) + "\n")


def write_summary(run_dir: Path, summary: Mapping[str, Any]) -> None:
    """Put ``summary.json`` into place, whole."""
    run_dir.mkdir(parents=True, exist_ok=True)
    put(run_dir / SUMMARY, to_json(summary, indent=2) + "\n")


def write_error(run_dir: Path, traceback: str) -> str:
    """Keep the whole traceback; returns where it is, or, where it cannot be written, what it is."""
    try:
        (run_dir / ERROR).write_text(traceback, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        return f"{error}; so the whole traceback stands here:\n{traceback}"
    return f"whole traceback: {run_dir / ERROR}"


def write_failed_summary(run_dir: Path, reason: str, config: Mapping[str, Any], wall_seconds: float) -> None:
    """A run that did not finish: why, and how far it came as ``metrics.jsonl`` tells. A finished run's is left alone.

    It needs nothing but files, so that whoever is left can write it: the launcher, or a rank under torchrun. A disk
    that does not take it is said on stderr.
    """
    try:
        with contextlib.suppress(FileNotFoundError, ValueError):  # what is no JSON tells of no finished run
            summary = json.loads((run_dir / SUMMARY).read_text(encoding="utf-8"))
            if isinstance(summary, dict) and summary.get("status") == "finished":
                return
        entries = read_metrics(run_dir)
        last: dict[str, Any] = next((entry for entry in reversed(entries) if "loss" in entry), {})
        losses = [entry["val_loss"] for entry in entries if "val_loss" in entry] or [None]
        write_summary(run_dir, {
            "status": "stopped" if reason.startswith(STOPPED) else "failed",
            "error": reason,
            "steps": last.get("step", 0),
            "loss": last.get("loss"),
            "val_loss_first": losses[0],
            "val_loss": losses[-1],
            "wall_seconds": wall_seconds,
            "environment": environment(),
            "config": config,
        })  # fmt: skip
    except OSError as error:
        print(f"{SUMMARY}: {error}", file=sys.stderr, flush=True)
