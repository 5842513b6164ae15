"""``report.html`` of a run, anew; or several runs on one page: ``python -m tools.report RUN_FOLDER …``.

One run folder: its ``report.html``. Several, or the folder of a sweep: ``comparison.html`` in the folder above them,
and a table on the terminal, with which a sweep ends as well.
``docs/report.md`` says what stands in both.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from deepzero.monitor.metrics_file import put
from deepzero.monitor.report.compare import comparison, runs_in, text_table
from deepzero.monitor.report.run_data import Run
from deepzero.monitor.report.sections import report
from deepzero.utils.closed_pipe import exit_with

COMPARISON = "comparison.html"


def main(arguments: list[str] | None = None) -> int:
    """Write the page and say where it lies. Returns the exit status: 0, or 1 when no folder holds a run."""
    parser = argparse.ArgumentParser(prog="python -m tools.report", description="The report of a run, or of several.")
    parser.add_argument("folder", type=Path, nargs="+", help="a run folder, or a folder whose sub-folders are runs")
    parser.add_argument("--out", type=Path, help="the page; default: report.html in the run folder, or comparison.html")
    options = parser.parse_args(arguments)
    folders: list[Path] = []
    for folder in options.folder:
        found = runs_in(folder.resolve())
        if not found:
            print(f"report: {folder}: no run, neither metrics.jsonl nor summary.json is there", file=sys.stderr)
        folders += [run for run in found if run not in folders]
    if not folders:
        return 1
    if len(folders) == 1:
        out, page = folders[0] / "report.html", report(Run(folders[0]))
    else:
        out, page = Path(os.path.commonpath(folders)) / COMPARISON, comparison([Run(run) for run in folders])
    out = options.out if options.out is not None else out
    try:
        put(out, page)
    except OSError as error:
        print(f"report: {error}; choose another place with --out", file=sys.stderr)
        return 1
    if len(folders) > 1:
        print(text_table(folders))
    print(f"{out}: {len(folders)} run{'s' * (len(folders) > 1)}, {len(page.encode())} bytes")
    return 0


if __name__ == "__main__":
    exit_with(main)
