"""Several runs beside each other: a table for the terminal, a page with their curves. For a sweep, say of stages."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from deepzero.monitor.report import svg
from deepzero.monitor.report.bottlenecks import EXPOSED, limits_of
from deepzero.monitor.report.charts import STEP, series, validations
from deepzero.monitor.report.html import document, figure, figures, legend, paragraph, section, table, text
from deepzero.monitor.report.run_data import Run, is_run, number, read_run
from deepzero.monitor.report.savings import MOMENT, like_stage_2, savings_of
from deepzero.monitor.report.sections import sum_of, title
from deepzero.utils.formatting import short_bytes, short_number, short_seconds

STYLES = ("solid", "dashed")
COLOURS = 8
NAMED = 4
"""So many settings in which runs differ have a column in the table; its last line names the others."""
SHOWN = 20
"""Characters of such a setting: of a path, its end."""


def runs_in(folder: Path) -> list[Path]:
    """The folder itself, or the runs right below it: those of a sweep, in the order of their numbers."""
    if is_run(folder):
        return [folder]
    below = [path for path in folder.iterdir() if path.is_dir() and is_run(path)] if folder.is_dir() else []
    return sorted(below, key=lambda path: (int(path.name) if path.name.isdigit() else sys.maxsize, path.name))


def text_table(folders: Sequence[Path]) -> str:
    """The runs in numbers, for the terminal; empty when there are none."""
    runs = [read_run(folder) for folder in folders]
    if not runs:
        return ""
    head, rows = in_numbers(runs)
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in (head, *rows)
    ]
    last = [f"they also differ in {', '.join(others)}"] if (others := _differing(runs)[NAMED:]) else []
    alike = dict.fromkeys(filter(None, map(like_stage_2, runs)))
    return "\n".join([f"{len(runs)} runs; {MOMENT}", *lines, *alike, *last])


def in_numbers(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """A head and a row for each run: its folder, the stage, what differs, memory by category, sent, time, loss."""
    keys = _differing(runs)[:NAMED]
    categories = list(dict.fromkeys(name for run in runs for name in run.account("memory")))
    held = [name for name in categories if any(run.held(name) for run in runs)]
    rows = []
    for run in runs:
        took = run.typical("step_seconds")
        rows.append([
            str(run.folder.relative_to(Path.cwd()) if run.folder.is_relative_to(Path.cwd()) else run.folder),
            "–" if run.stage is None else str(run.stage),
            *(value if len(value := str(run.setting(key, "–"))) <= SHOWN else f"…{value[-SHOWN:]}" for key in keys),
            *(short_bytes(run.held(name)) if run.account("memory") else "–" for name in held),
            _sent(run),
            "–" if took is None else short_seconds(took),
            _loss(run) + _how_far(run),
        ])  # fmt: skip
    return ["run", "stage", *keys, *held, "sent a step", "step", "loss"], rows


def _sent(run: Run) -> str:
    return short_bytes(sum_of(run, "measured")) if run.account("communication") else "–"


def _loss(run: Run) -> str:
    """The validation loss as text; the training loss where nothing was validated."""
    of_validation = number(run.summary.get("val_loss"))
    loss = of_validation if of_validation is not None else number(run.summary.get("loss"))
    return "–" if loss is None else f"{loss:.4f}"


def _how_far(run: Run) -> str:
    """In brackets, of a run that is not finished."""
    state, total = run.summary.get("status") or "no summary", number(run.setting("train.steps"))
    if state == "stopped" and total is not None:
        return f" (stopped at {run.summary.get('steps')}/{total:g})"
    return "" if state == "finished" else f" ({state})"


def unlike(runs: Sequence[Run]) -> list[str]:
    """Settings in which the runs are not alike."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    return [key for key in keys if len({repr(run.setting(key, "–")) for run in runs}) > 1]


def _differing(runs: Sequence[Run]) -> list[str]:
    """Without the stage, which has its column, and a logger's names, which tell the runs apart."""
    return [key for key in unlike(runs) if key != "zero.stage" and not key.startswith("logger.")]


def comparison(runs: Sequence[Run]) -> str:
    """The page."""
    names = names_of(runs)
    heading = f"{len(runs)} runs beside each other"
    parts = [
        f"<h1>{text(heading)}</h1>",
        section("The runs", what_differs(runs, names)),
        section("In numbers", numbers(runs, names)),
        section("Curves", curves(runs, names)),
        section("What limits each", *(_limits(run, name) for run, name in zip(runs, names, strict=True))),
    ]
    return document(f"deepzero: {heading}", "\n".join(parts))


def names_of(runs: Sequence[Run]) -> list[str]:
    """Folder names; with their parents' where two are alike."""
    short = [run.folder.name for run in runs]
    return short if len(set(short)) == len(short) else [str(run.folder) for run in runs]


def what_differs(runs: Sequence[Run], names: Sequence[str]) -> str:
    """Each run's headline, and the settings in which they are not alike."""
    keys = unlike(runs)
    heads = table(["run", "what", "status"], [
        [name, title(run), run.summary.get("status") or "no summary"] for run, name in zip(runs, names, strict=True)
    ])  # fmt: skip
    if not keys:
        return heads + paragraph("Their settings are the same.")
    rows = [[key, *(run.setting(key, "–") for run in runs)] for key in keys]
    return heads + paragraph("Settings in which they differ:") + table(["key", *names], rows)


def numbers(runs: Sequence[Run], names: Sequence[str]) -> str:
    """Speed, memory and volume of each."""
    rows = []
    for run, name in zip(runs, names, strict=True):
        saved, exposed = savings_of(run), run.typical(EXPOSED)
        speed, took = run.typical("tokens_per_second"), run.typical("step_seconds")
        rows.append([
            name,
            _loss(run),
            "–" if speed is None else short_number(speed),
            *("–" if seconds is None else short_seconds(seconds) for seconds in (took, exposed)),
            *(("–",) * 3 if saved is None
              else (short_bytes(saved.here_bytes), short_bytes(saved.host), f"{saved.part:.0%}")),
            _sent(run),
        ])  # fmt: skip
    head = ["run", "loss", "tokens/s", "step", "waited", "state, device", "state, host", "saved", "sent a step"]
    note = "Loss: of validation where there is one. Speed: medians, without the first and the recorded step. State: "
    note += "parameters, gradients, masters and moments of one rank; saved: against plain data parallelism."
    by_category, of_each = in_numbers(runs)
    parts = [table(head, rows, range(1, 9)), paragraph(note, "soft"), paragraph(f"By category, {MOMENT}:")]
    parts.append(table(by_category, [[name, *row[1:]] for name, row in zip(names, of_each, strict=True)], range(1, 99)))
    return "".join([*parts, *(paragraph(words) for words in dict.fromkeys(filter(None, map(like_stage_2, runs))))])


def curves(runs: Sequence[Run], names: Sequence[str]) -> str:
    """Loss, validation and speed, one line for each run."""
    look = [(f"c{1 + k % COLOURS}", STYLES[k // COLOURS % 2]) for k in range(len(runs))]
    named = legend([(name, colour, "") for name, (colour, _) in zip(names, look, strict=True)])
    pictures = []
    for ident, heading, key in (
        ("loss", "Training loss", "loss"),
        ("val", "Validation loss", "val_loss"),
        ("speed", "Tokens per second, all ranks", "tokens_per_second"),
    ):
        lines = [
            svg.Line(name, validations(run) if key == "val_loss" else series(run, key), *style)
            for run, name, style in zip(runs, names, look, strict=True)
        ]
        label = short_number if key == "tokens_per_second" else "{:.4g}".format
        drawn = svg.line_chart(ident, heading, f"{heading} of {len(runs)} runs", lines, STEP, label)
        pictures.append(figure(heading, drawn, named))
    return same_bits(runs, names) + figures(pictures)


def same_bits(runs: Sequence[Run], names: Sequence[str]) -> str:
    """Says which runs have the same losses, whose curves hide each other."""
    alike: dict[str, list[str]] = {}
    for run, name in zip(runs, names, strict=True):
        alike.setdefault(repr([run.column("step"), run.column("loss")]), []).append(name)
    said = [
        f"The training losses of {', '.join(group[:-1])} and {group[-1]} are the same, bit for bit, at every step:"
        " their curves lie on each other."
        for losses, group in alike.items()
        if len(group) > 1 and losses != "[[], []]"
    ]
    return "".join(paragraph(words) for words in said)


def _limits(run: Run, name: str) -> str:
    found = " ".join(limit.finding for limit in limits_of(run))
    return f"<p><b>{text(name)}.</b> {text(found or 'Nothing was measured that could say.')}</p>"
