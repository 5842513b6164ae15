"""The report into its place: after a run, whatever became of it, and anew by ``python -m tools.report``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from deepzero.monitor.metrics_file import REPORT, put
from deepzero.monitor.report.run_data import read_run
from deepzero.monitor.report.sections import report


def write_report(run_dir: Path) -> Path:
    """Read the folder and write its ``report.html``; returns the file's path."""
    put(run_dir / REPORT, report(read_run(run_dir)))
    return run_dir / REPORT


def write_report_or_tell(run_dir: Path, tell: Callable[[str], None]) -> None:
    """The same at a run's end, where it must not be what the run fails by.

    Args:
        run_dir: the run folder.
        tell: prints a line; called only when the report could not be written.
    """
    try:
        write_report(run_dir)
    except Exception as error:  # a disk that is full, a file that nobody thought of: the run is over and stands
        tell(f"{REPORT}: {type(error).__name__}: {error}; python -m tools.report {run_dir} writes it again")
