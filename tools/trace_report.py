"""What a trace means: ``python -m tools.trace_report TRACE… [--html FILE]``; see ``docs/traces.md``.

Step by step and rank by rank: compute, communication, what of it was exposed, the widest gaps with what they wait for,
and the setting that would move them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from deepzero.profiling.trace_events import Trace, TraceError, find_traces
from deepzero.profiling.trace_report import page, render
from deepzero.profiling.trace_summary import TraceSummary
from deepzero.utils.closed_pipe import exit_with


def main(arguments: list[str] | None = None) -> int:
    """Print the report. Returns the exit status: 1 when a file is no trace."""
    parser = argparse.ArgumentParser(prog="python -m tools.trace_report", description=__doc__.split("\n")[0])
    parser.add_argument("trace", type=Path, nargs="+", help="trace files (.json, .json.gz), or run folders with traces")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page with plots, in one file")
    options = parser.parse_args(arguments)
    try:
        summaries = [TraceSummary(Trace(path)) for path in find_traces(options.trace)]
        summaries.sort(key=lambda summary: (summary.trace.rank, summary.trace.steps[0].begin))
        if options.html is not None:
            options.html.write_text(page(summaries), encoding="utf-8")
    except (TraceError, OSError) as error:
        print(f"trace_report: {error}", file=sys.stderr)
        return 1
    print(render(summaries))
    return 0


if __name__ == "__main__":
    exit_with(main)
