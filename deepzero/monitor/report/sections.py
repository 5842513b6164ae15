"""The report of one run, from the headline to the versions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from deepzero.monitor.metrics_file import REPORT, put
from deepzero.monitor.report import charts
from deepzero.monitor.report.bottlenecks import EXPOSED, HIDDEN, limits_of
from deepzero.monitor.report.html import (
    cards,
    document,
    folded,
    paragraph,
    section,
    table,
    text,
)
from deepzero.monitor.report.run_data import HOST_STATES, Run, defaults, number, read_run
from deepzero.monitor.report.savings import MOMENT, PLAIN, WHAT_STAGES_DO, headline, like_stage_2, savings_of, textbook
from deepzero.utils.formatting import short_bytes, short_number, short_seconds


def report(run: Run) -> str:
    """Returns the report of one run as an HTML page."""
    parts = [
        top(run),
        section("What limits it", limits(run)),
        section("Training", charts.curves(run) or paragraph("No optimizer step was taken, so there is no curve.")),
        section("Memory: what ZeRO saved", states(run)),
        section("Memory over one step, rank by rank", memory_step(run)),
        section("Communication", communication(run)),
        section("Offload", charts.offload(run)),
        section("Quantisation", charts.quantization(run)),
        section("Sampled text", sample(run)),
        section("Settings", settings(run)),
        section("Versions and machine", environment(run)),
    ]
    return document(f"deepzero: {title(run)}", "\n".join(part for part in parts if part))


def title(run: Run) -> str:
    """Stage, ranks and model in a line."""
    ranks = "" if run.world_size is None else f" on {run.world_size} rank{'s' * (run.world_size != 1)}"
    stage = "ZeRO, stage not known" if run.stage is None else f"ZeRO stage {run.stage}"
    return f"{stage}{ranks}, model {run.setting('model.name', 'not known')}"


def top(run: Run) -> str:
    """Headline, what the stage does and saves, and the figures that are read first."""
    size = "" if run.model_numel is None else f" ({short_number(run.model_numel)} parameters)"
    lines = [f"<h1>{text(title(run) + size)}</h1>", status(run)]
    if run.stage is not None and 0 <= run.stage < len(WHAT_STAGES_DO):
        lines.append(paragraph(f"{WHAT_STAGES_DO[run.stage]} {headline(run)}", "lead"))
    lines += [paragraph(f"Not read: {problem}", "bad") for problem in run.problems]
    return "\n".join([*lines, cards(first_figures(run))])


def status(run: Run) -> str:
    """Whether it finished, how far it came, where it lies."""
    state = str(run.summary.get("status") or "no summary: under way, or ended suddenly")
    steps = run.steps[-1]["step"] if run.steps else 0
    total = number(run.setting("train.steps"))
    words = f", {steps:g} of {total:g} steps" if total is not None else f", {steps:g} steps"
    if (wall := number(run.summary.get("wall_seconds"))) is not None:
        words += f", {wall:.1f} s"
    if (resumed := number(run.summary.get("resumed_from_step"))) is not None:
        words += f", going on after step {resumed:g}"
    style = "good" if state == "finished" else "bad"
    return (
        f'<p><span class="status {style}">{text(state)}</span>{text(words)} '
        f'<span class="soft">{text(run.folder.name)}</span></p>'
    )


def first_figures(run: Run) -> list[tuple[str, str]]:
    """Pairs of a figure and what it is; only what is known."""
    found: list[tuple[str, str]] = []
    saved = savings_of(run)
    if saved is not None:
        found.append((short_bytes(saved.here_bytes), "model state on one rank's device"))
        found.append((short_bytes(saved.plain_bytes), "the same under plain data parallelism"))
    sent = sum_of(run, "measured")
    if run.account("communication"):
        found.append((short_bytes(sent), "sent by one rank in one step"))
    if (usual := run.typical("tokens_per_second")) is not None:
        found.append((short_number(usual), "tokens per second (median)"))
    if (took := run.typical("step_seconds")) is not None:
        found.append((short_seconds(took), "a step (median)"))
    losses = [value for value in run.column("loss") if value is not None]
    vals = [value for entry in run.validations if (value := number(entry.get("val_loss"))) is not None]
    if len(vals) > 1:
        found.append((f"{vals[0]:.3f} → {vals[-1]:.3f}", "validation loss"))
    elif losses:
        found.append((f"{losses[0]:.3f} → {losses[-1]:.3f}", "training loss"))
    return found


def limits(run: Run) -> str:
    """The statements, with their evidence."""
    items = [
        f"<li><b>{text(limit.about)}.</b> {text(limit.finding)}"
        + (f' <span class="soft">{text(limit.advice)}</span>' if limit.advice else "") + "</li>"
        for limit in limits_of(run)
    ]  # fmt: skip
    return f'<ul class="limits">{"".join(items)}</ul>' if items else paragraph("Nothing was measured that could say.")


# ---- memory ----------------------------------------------------------------------------------------------------------


def states(run: Run) -> str:
    """Model state against plain data parallelism, then all that was held, predicted beside measured."""
    saved = savings_of(run)
    parts = []
    if saved is not None:
        rows = []
        for name in sorted({*saved.plain, *(n for n, size in saved.here.items() if size)}, key=list(saved.here).index):
            rows.append([name, *map(_size, (saved.plain.get(name, 0.0), saved.predicted[name], saved.here[name]))])
        rows.append(["together", *map(_size, (saved.plain_bytes, sum(saved.predicted.values()), saved.here_bytes))])
        form, moment = textbook(run), MOMENT.partition(" (")[0]
        plain = PLAIN.format(dtype=run.setting("precision.dtype"))
        parts.append(
            paragraph(
                f"Model state, {moment}; mean over ranks. {plain} "
                + (f"The textbook's form of this stage: {form}." if form else "")
            )
        )
        parts += filter(None, [paragraph(words) if (words := like_stage_2(run)) else ""])
        parts.append(
            table(["", "plain data parallelism", "this run, predicted", "this run, measured"], rows, (1, 2, 3))
        )
        if saved.host:
            host = [[name, _size(run.held(name, "predicted")), _size(run.held(name))] for name in HOST_STATES]
            parts += [
                paragraph("Of the model state in host memory:"),
                table(["", "predicted", "measured"], host, (1, 2)),
            ]
    rows = [
        [name, "–" if number(v.get("predicted")) is None else _size(v["predicted"]), _size(v.get("measured")),
         _size(v.get("largest"))]
        for name, v in run.account("memory").items()
    ]  # fmt: skip
    if not rows:
        why = "no step was recorded and there is no summary of one"
        return paragraph(f"Nothing is known of what this run held: {why}.")
    whole = table(["most held", "predicted", "mean over ranks", "largest rank"], rows, (1, 2, 3))
    note = paragraph("“activations” is a residual: the peak of memory over what was in use before the first step.")
    return "\n".join([*parts, folded("All that was held, by category", whole + note)])


def memory_step(run: Run) -> str:
    """The recorded step, and how to read it."""
    pictures = charts.memory_step(run)
    ranks = charts.recorded_ranks(run)
    if not pictures:
        why = "train.timeline_step=0" if run.setting("train.timeline_step") == 0 else "none came to its end"
        return paragraph(f"No step was recorded: {why}.")
    words = f"Step {run.recorded_step}. Filled: what the ledger held after each event. Dashed: what was predicted"
    planned = isinstance(run.timeline.get("predicted"), list)
    words += " for each event." if planned else ": the sum of the largest of each category; they need not meet."
    if not planned:
        words += above_the_forms(run, ranks)
    words += " Numbers above: 3 first gradient, 4 boundary, 5 optimizer step, 6 publish (docs/step.md)."
    words += " Activations are not in the ledger and not in the picture."
    shown = charts.chosen_ranks(ranks)
    events = sum(int(number(ranks[rank].get("events")) or 0) for rank in shown)
    kept = sum(len(charts.points_of(ranks[rank])) for rank in shown)
    if kept < events:
        words += f" {kept:,} of {events:,} events are shown."
    if len(shown) < len(ranks):
        words += f" Of {len(ranks)} ranks: the first, and those with the highest and the lowest peak."
    return paragraph(words) + pictures


def above_the_forms(run: Run, ranks: Sequence[Mapping[str, Any]]) -> str:
    """Why a peak inside the step can be higher than what was predicted; nothing where it is not."""
    most = max(charts.peak_of(rank) for rank in ranks)
    forms = sum(run.held(name, "predicted") for name in run.account("memory"))
    if not most > forms * 1.001 > 0:
        return ""
    return (
        f" The peak is {short_bytes(most - forms)} above it: the closed forms speak of the end of a micro-batch, and"
        " inside one there are gradients that autograd has made and no bucket has taken yet."
    )


# ---- communication ---------------------------------------------------------------------------------------------------


def communication(run: Run) -> str:
    """Volume in the paper's unit, the chart, the table, overlap."""
    account = run.account("communication")
    parts = [volume(run)] if account else [paragraph("Nothing is known of what this run sent.")]
    parts.append(charts.communication(run))
    if account:
        rows = []
        for kind, entry in account.items():
            measured, predicted = entry.get("measured") or {}, entry.get("predicted")
            expected = _size(predicted.get("bytes")) if isinstance(predicted, dict) else "–"
            numbers = (f"{number(measured.get(name)) or 0:,.0f}" for name in ("calls", "elements", "padding_elements"))
            between = _size(measured.get("between_node_bytes"))
            rows.append([kind, expected, _size(measured.get("bytes")), *numbers, between])
        head = ["kind", "predicted", "measured", "calls", "elements", "padding", "between nodes"]
        parts.append(folded("All kinds, in numbers", table(head, rows, range(1, 7))))
    parts += [overlap_words(run), charts.overlap(run)]
    return "\n".join(part for part in parts if part)


def volume(run: Run) -> str:
    """How much, against plain data parallelism, and how much of it leaves the node."""
    sent, across = sum_of(run, "measured"), sum_of(run, "measured", "between_node_bytes")
    words = f"One rank sent {short_bytes(sent)} in one step, mean over ranks"
    words += f"; predicted {short_bytes(sum_of(run, 'predicted'))}."
    numel, ranks = run.model_numel, run.world_size
    if numel and ranks and ranks > 1:
        moved = ("gradients.", "parameters.")
        elements = sum(
            number((entry.get("measured") or {}).get("elements")) or 0.0
            for kind, entry in run.account("communication").items() if kind.startswith(moved)
        )  # fmt: skip
        words += (
            f" Of parameters and gradients that is {elements / numel:.2f}Ψ elements, where the all-reduce of plain "
            f"data parallelism sends 2Ψ(W-1)/W = {2 * (ranks - 1) / ranks:.2f}Ψ in a step of one micro-batch."
        )
    words += (
        f" {across / sent:.0%} of the bytes went to other nodes." if across and sent else " All stayed on one node."
    )
    return paragraph(words)


def overlap_words(run: Run) -> str:
    """How much communication was hidden; or that it was not measured."""
    exposed, hidden = run.typical(EXPOSED), run.typical(HIDDEN)
    if exposed is None:
        return paragraph("How much of it was hidden behind computing was not measured in this run.")
    words = f"A step waited {short_seconds(exposed)} for communication (median)"
    if hidden is not None:
        words += f"; {hidden:.0%} of the time in which some was under way was hidden"
    return paragraph(f"{words}.")


def sum_of(run: Run, column: str, what: str = "bytes") -> float:
    """Over all kinds of communication between ranks."""
    found = [entry.get(column) for entry in run.sent().values()]
    return sum(number(entry.get(what)) or 0.0 for entry in found if isinstance(entry, dict))


def _size(value: Any) -> str:
    known = number(value)
    return "–" if known is None else short_bytes(known)


# ---- the rest --------------------------------------------------------------------------------------------------------


def sample(run: Run) -> str:
    """The text that the model wrote at the end, as HTML."""
    words = run.summary.get("sample")
    return f"<pre>{text(words)}</pre>" if isinstance(words, str) and words else ""


def settings(run: Run) -> str:
    """What was typed, what differs from the defaults, then everything."""
    if not run.settings:
        return paragraph("No settings were noted.")
    usual, typed = defaults(), "none" if not run.overrides else " ".join(run.overrides)
    differing = [
        [key, value, usual.get(key, "–")] for key, value in run.settings.items()
        if key not in usual or usual[key] != value
    ]  # fmt: skip
    everything = [[key, value] for key, value in run.settings.items()]
    return "\n".join([
        f"<p>On the command line: <code>{text(typed)}</code></p>",
        table(["differs from deepzero.initialize's default", "here", "default"], differing),
        folded("All settings", table(["key", "value"], everything)),
    ])  # fmt: skip


def environment(run: Run) -> str:
    """Versions and machine, as the run itself noted them."""
    noted = run.summary.get("environment")
    rows = [[key, value] for key, value in noted.items()] if isinstance(noted, dict) else []
    if isinstance(digest := run.summary.get("params_sha256"), str):
        rows.append(["final parameters, SHA-256", digest])
    return table(["", ""], rows) if rows else paragraph("The run noted none.")


# ---- into its place --------------------------------------------------------------------------------------------------


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
