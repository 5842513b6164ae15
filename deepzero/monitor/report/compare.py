"""Several runs on one page: curves over each other, a line of a table for each. For a sweep, say of ``zero.stage``."""

from __future__ import annotations

from collections.abc import Sequence

from deepzero.monitor.report import svg
from deepzero.monitor.report.charts import STEP, series, validations
from deepzero.monitor.report.limits import EXPOSED, limits_of, seconds
from deepzero.monitor.report.page import document, figure, figures, legend, paragraph, section, table, text
from deepzero.monitor.report.reading import Run, number
from deepzero.monitor.report.savings import savings_of
from deepzero.monitor.report.sections import sum_of, title
from deepzero.monitor.terminal import short_bytes, short_number

STYLES = ("solid", "dashed")
COLOURS = 8


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
    keys = list(dict.fromkeys(key for run in runs for key in run.settings))
    unlike = [key for key in keys if len({repr(run.setting(key, "–")) for run in runs}) > 1]
    heads = table(["run", "what", "status"], [
        [name, title(run), run.summary.get("status") or "no summary"] for run, name in zip(runs, names, strict=True)
    ])  # fmt: skip
    if not unlike:
        return heads + paragraph("Their settings are the same.")
    rows = [[key, *(run.setting(key, "–") for run in runs)] for key in unlike]
    return heads + paragraph("Settings in which they differ:") + table(["key", *names], rows)


def numbers(runs: Sequence[Run], names: Sequence[str]) -> str:
    """Speed, memory and volume of each."""
    rows = []
    for run, name in zip(runs, names, strict=True):
        saved, exposed = savings_of(run), run.typical(EXPOSED)
        speed, took = run.typical("tokens_per_second"), run.typical("step_seconds")
        loss = number(run.summary.get("val_loss"))
        loss = loss if loss is not None else number(run.summary.get("loss"))
        rows.append([
            name,
            "–" if loss is None else f"{loss:.4f}",
            "–" if speed is None else short_number(speed),
            "–" if took is None else seconds(took),
            "–" if exposed is None else seconds(exposed),
            "–" if saved is None else short_bytes(saved.here_bytes),
            "–" if saved is None else short_bytes(saved.host),
            "–" if saved is None else f"{saved.part:.0%}",
            short_bytes(sum_of(run, "measured")) if run.account("communication") else "–",
        ])  # fmt: skip
    head = ["run", "loss", "tokens/s", "step", "waited", "state, device", "state, host", "saved", "sent a step"]
    note = "Loss: of validation where there is one. Speed: medians, without the first and the recorded step. State: "
    note += "parameters, gradients, masters and moments of one rank; saved: against plain data parallelism."
    return table(head, rows, range(1, 9)) + paragraph(note, "soft")


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
