"""Several runs beside each other: a table for the terminal, a page with their curves. For a sweep, say of stages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from deepzero.monitor.metrics_file import METRICS, SUMMARY
from deepzero.monitor.report import svg
from deepzero.monitor.report.bottlenecks import limits_of
from deepzero.monitor.report.charts import STEP
from deepzero.monitor.report.html import document, figures, paragraph, section, table, text
from deepzero.monitor.report.run_data import EXPOSED, Run, number, shown
from deepzero.monitor.report.savings import ALIKE, MOMENT, like_stage_2, savings_of
from deepzero.monitor.report.sections import title
from deepzero.utils.formatting import short_bytes, short_number, short_seconds, text_columns

NAMED = 4  # so many settings in which runs differ have a column in the table; its last line names the others
SHOWN = 20  # characters of such a setting: of a path, its end


def runs_in(folder: Path) -> list[Path]:
    """The folder itself, or the runs right below it: those of a sweep, in the order of their numbers."""
    runs = {path.parent for name in (METRICS, SUMMARY) for place in (name, f"*/{name}") for path in folder.glob(place)}
    if folder in runs:
        return [folder]
    return sorted(runs, key=lambda path: (int(path.name) if path.name.isdigit() else sys.maxsize, path.name))


def text_table(folders: Sequence[Path]) -> str:
    """The runs in numbers, for the terminal; empty when there are none."""
    if not (runs := [Run(folder) for folder in folders]):
        return ""
    here = Path.cwd()
    names = [str(run.folder.relative_to(here) if run.folder.is_relative_to(here) else run.folder) for run in runs]
    head = f"{len(runs)} run{'s' * (len(runs) > 1)}; {MOMENT}"
    last = [f"they also differ in {', '.join(others)}"] if (others := _differing(runs)[NAMED:]) else []
    return "\n".join([head, *text_columns(_by_category(runs, names)), *[ALIKE] * any(map(like_stage_2, runs)), *last])


def _by_category(runs: Sequence[Run], names: Sequence[str]) -> list[list[str]]:
    """A head and a row for each run: its name, the stage, what differs, memory by category, sent, time, loss."""
    keys = _differing(runs)[:NAMED]
    categories = dict.fromkeys(name for run in runs for name in run.account("memory"))
    held = [name for name in categories if any(run.held(name) for run in runs)]
    rows = [["run", "stage", *keys, *held, "sent a step", "step", "loss"]]
    for run, name in zip(runs, names, strict=True):
        state, total = run.summary.get("status") or "no summary", number(run.settings.get("train.steps"))
        if state == "stopped" and total is not None:
            state = f"stopped at {run.summary.get('steps')}/{total:g}"
        said = (str(run.settings.get(key, "–")) for key in keys)
        rows.append([
            name,
            "–" if run.stage is None else str(run.stage),
            *(value if len(value) <= SHOWN else f"…{value[-SHOWN:]}" for value in said),
            *(short_bytes(run.held(category)) if run.account("memory") else "–" for category in held),
            _sent(run) or "–",
            shown(run.typical("step_seconds"), short_seconds) or "–",
            (_loss(run) or "–") + (f" ({state})" if state != "finished" else ""),
        ])  # fmt: skip
    return rows


def _sent(run: Run) -> str | None:
    return short_bytes(run.total_sent()) if run.account("communication") else None


def _loss(run: Run) -> str | None:
    """The validation loss; the training loss where nothing was validated."""
    found = (number(run.summary.get(key)) for key in ("val_loss", "loss"))
    return next((f"{loss:.4f}" for loss in found if loss is not None), None)


def _unlike(runs: Sequence[Run]) -> list[str]:
    """Settings in which the runs are not alike."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    return [key for key in keys if len({repr(run.settings.get(key, "–")) for run in runs}) > 1]


def _differing(runs: Sequence[Run]) -> list[str]:
    """Without the stage, which has its column, and a logger's names, which tell the runs apart."""
    return [key for key in _unlike(runs) if key != "zero.stage" and not key.startswith("logger.")]


def comparison(runs: Sequence[Run]) -> str:
    """The page."""
    short = [run.folder.name for run in runs]
    names = short if len(set(short)) == len(short) else [str(run.folder) for run in runs]
    heading = f"{len(runs)} runs beside each other"
    limits = []
    for run, name in zip(runs, names, strict=True):
        found = " ".join(limit.finding for limit in limits_of(run)) or "Nothing was measured that could say."
        limits.append(f"<p><b>{text(name)}.</b> {text(found)}</p>")
    return document(f"deepzero: {heading}", [
        f"<h1>{text(heading)}</h1>",
        section("The runs", *_what_differs(runs, names)),
        section("In numbers", *_numbers(runs, names)),
        section("Curves", *_curves(runs, names)),
        section("What limits each", *limits),
    ])  # fmt: skip


def _what_differs(runs: Sequence[Run], names: Sequence[str]) -> Iterable[str]:
    """Each run's headline, and the settings in which they are not alike."""
    status = [run.summary.get("status") or "no summary" for run in runs]
    yield table(["run", "what", "status"], list(zip(names, map(title, runs), status, strict=True)))
    rows = [[key, *(str(run.settings.get(key, "–")) for run in runs)] for key in _unlike(runs)]
    yield paragraph("Settings in which they differ:" if rows else "Their settings are the same.")
    yield table(["key", *names], rows) if rows else ""


FIGURES: dict[str, Callable[[Run], str | None]] = {
    "loss": _loss,
    "tokens/s": lambda run: shown(run.typical("tokens_per_second"), short_number),
    "step": lambda run: shown(run.typical("step_seconds"), short_seconds),
    "waited": lambda run: shown(run.typical(EXPOSED), short_seconds),
    "state, device": lambda run: short_bytes(saved.here_bytes) if (saved := savings_of(run)) else None,
    "state, host": lambda run: short_bytes(saved.host) if (saved := savings_of(run)) else None,
    "saved": lambda run: f"{saved.part:.0%}" if (saved := savings_of(run)) else None,
    "sent a step": _sent,
}


def _numbers(runs: Sequence[Run], names: Sequence[str]) -> Iterable[str]:
    """Speed, memory and volume of each."""
    rows = [[name, *(figure(run) for figure in FIGURES.values())] for run, name in zip(runs, names, strict=True)]
    yield table(["run", *FIGURES], rows, range(1, 9))
    note = "Loss: of validation where there is one. Speed: medians, without the first and the recorded step. State: "
    note += "parameters, gradients, masters and moments of one rank; saved: against plain data parallelism."
    yield paragraph(note, "soft")
    yield paragraph(f"By category, {MOMENT}:")
    head, *by_category = _by_category(runs, names)
    yield table(head, by_category, range(1, len(head)))
    yield paragraph(ALIKE if any(map(like_stage_2, runs)) else "")


def _curves(runs: Sequence[Run], names: Sequence[str]) -> Iterable[str]:
    """Loss, validation and speed, one line for each run; and which of them hide each other."""
    alike: dict[str, list[str]] = {}
    for run, name in zip(runs, names, strict=True):
        alike.setdefault(repr(run.series("loss")), []).append(name)
    for losses, group in alike.items():
        if len(group) > 1 and losses != "[]":
            who = f"The training losses of {', '.join(group[:-1])} and {group[-1]}"
            yield paragraph(f"{who} are the same, bit for bit, at every step: their curves lie on each other.")
    pictures = []
    for ident, heading, key, label in (
        ("loss", "Training loss", "loss", "{:.4g}".format),
        ("val", "Validation loss", "val_loss", "{:.4g}".format),
        ("speed", "Tokens per second, all ranks", "tokens_per_second", short_number),
    ):
        lines = [
            svg.Line(name, run.series(key), f"c{1 + k % 8}", ("solid", "dashed")[k // 8 % 2])
            for k, (run, name) in enumerate(zip(runs, names, strict=True))
        ]
        pictures.append(svg.chart(ident, heading, lines, STEP, label))
    yield figures(pictures)
