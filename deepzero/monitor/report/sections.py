"""The report of one run, from the headline to the versions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path

from deepzero.config.run import RunConfig
from deepzero.monitor.metrics_file import REPORT, put
from deepzero.monitor.report import charts
from deepzero.monitor.report.bottlenecks import limits_of
from deepzero.monitor.report.html import cards, document, folded, paragraph, section, table, text
from deepzero.monitor.report.run_data import EXPOSED, HIDDEN, HOST_STATES, Run, flat, number, shown, traffic
from deepzero.monitor.report.savings import ALIKE, MOMENT, WHAT_STAGES_DO, headline, like_stage_2, savings_of, textbook
from deepzero.utils.formatting import short_bytes, short_number, short_seconds


def report(run: Run) -> str:
    """Returns the report of one run as an HTML page."""
    written = run.summary.get("sample")
    parts = [
        *_top(run),
        section("What limits it", _limits(run)),
        section("Training", charts.curves(run) or paragraph("No optimizer step was taken, so there is no curve.")),
        section("Memory: what ZeRO saved", *_states(run)),
        section("Memory over one step, rank by rank", *_memory_step(run)),
        section("Communication", *_communication(run)),
        section("Offload", charts.offload(run)),
        section("Quantisation", charts.quantization(run)),
        section("Sampled text", f"<pre>{text(written)}</pre>" if isinstance(written, str) and written else ""),
        section("Settings", *_settings(run)),
        section("Versions and machine", _environment(run)),
    ]
    return document(f"deepzero: {title(run)}", parts)


def title(run: Run) -> str:
    """Stage, ranks and model in a line."""
    ranks = "" if run.world_size is None else f" on {run.world_size} rank{'s' * (run.world_size != 1)}"
    stage = "ZeRO, stage not known" if run.stage is None else f"ZeRO stage {run.stage}"
    return f"{stage}{ranks}, model {run.settings.get('model.name', 'not known')}"


def _top(run: Run) -> Iterable[str]:
    """Headline, whether it finished and how far it came, what the stage does and saves, and the first figures."""
    size = "" if run.model_numel is None else f" ({short_number(run.model_numel)} parameters)"
    yield f"<h1>{text(title(run) + size)}</h1>"
    state = str(run.summary.get("status") or "no summary: under way, or ended suddenly")
    steps, total = run.steps[-1]["step"] if run.steps else 0, number(run.settings.get("train.steps"))
    words = f", {steps:g} steps" if total is None else f", {steps:g} of {total:g} steps"
    if (wall := number(run.summary.get("wall_seconds"))) is not None:
        words += f", {wall:.1f} s"
    if (resumed := number(run.summary.get("resumed_from_step"))) is not None:
        words += f", going on after step {resumed:g}"
    style = "good" if state == "finished" else "bad"
    name = f'<span class="soft">{text(run.folder.name)}</span>'
    yield f'<p><span class="status {style}">{text(state)}</span>{text(words)} {name}</p>'
    if run.stage is not None and 0 <= run.stage < len(WHAT_STAGES_DO):
        yield paragraph(f"{WHAT_STAGES_DO[run.stage]} {headline(run)}", "lead")
    yield from (paragraph(f"Not read: {problem}", "bad") for problem in run.problems)
    yield cards(_first_figures(run))


def _first_figures(run: Run) -> Iterable[tuple[str, str]]:
    """Pairs of a figure and what it is; only what is known."""
    if (saved := savings_of(run)) is not None:
        yield short_bytes(saved.here_bytes), "model state on one rank's device"
        yield short_bytes(saved.plain_bytes), "the same under plain data parallelism"
    if run.account("communication"):
        yield short_bytes(run.total_sent()), "sent by one rank in one step"
    if usual := shown(run.typical("tokens_per_second"), short_number):
        yield usual, "tokens per second (median)"
    if took := shown(run.typical("step_seconds"), short_seconds):
        yield took, "a step (median)"
    for key, name, least in (("val_loss", "validation loss", 2), ("loss", "training loss", 1)):
        losses = [y for _, y in run.series(key) if y is not None]
        if len(losses) >= least:
            yield f"{losses[0]:.3f} → {losses[-1]:.3f}", name
            break


def _limits(run: Run) -> str:
    items = []
    for about, finding, advice in limits_of(run):
        more = f' <span class="soft">{text(advice)}</span>' if advice else ""
        items.append(f"<li><b>{text(about)}.</b> {text(finding)}{more}</li>")
    return f'<ul class="limits">{"".join(items)}</ul>' if items else paragraph("Nothing was measured that could say.")


def _states(run: Run) -> Iterable[str]:
    """Model state against plain data parallelism, then all that was held, predicted beside measured."""
    if (saved := savings_of(run)) is not None:
        rows = []
        for name, here in saved.here.items():
            if here or name in saved.plain:
                rows.append([name, *map(shown, (saved.plain.get(name, 0.0), saved.predicted[name], here))])
        rows.append(["together", *map(shown, (saved.plain_bytes, sum(saved.predicted.values()), saved.here_bytes))])
        form = textbook(run)
        yield paragraph(
            f"Model state, {MOMENT.partition(' (')[0]}; mean over ranks. Plain data parallelism is what a rank would "
            f"hold without ZeRO: parameters and gradients in {run.settings.get('precision.dtype')}, fp32 masters and "
            "the optimizer's moments, all of them whole. "
            + (f"The textbook's form of this stage: {form}." if form else "")
        )
        yield paragraph(ALIKE if like_stage_2(run) else "")
        yield table(["", "plain data parallelism", "this run, predicted", "this run, measured"], rows, (1, 2, 3))
        if saved.host:
            yield paragraph("Of the model state in host memory:")
            host = [[name, shown(run.held(name, "predicted")), shown(run.held(name))] for name in HOST_STATES]
            yield table(["", "predicted", "measured"], host, (1, 2))
    rows = [
        [name, *(shown(entry.get(column)) for column in ("predicted", "measured", "largest"))]
        for name, entry in run.account("memory").items()
    ]
    if rows:
        note = paragraph("“activations” is a residual: the peak of memory over what was in use before the first step.")
        everything = table(["most held", "predicted", "mean over ranks", "largest rank"], rows, (1, 2, 3))
        yield folded("All that was held, by category", everything, note)
    else:
        why = "no step was recorded and there is no summary of one"
        yield paragraph(f"Nothing is known of what this run held: {why}.")


def _memory_step(run: Run) -> Iterable[str]:
    """The recorded step, and how to read it."""
    if not (pictures := charts.memory_step(run)):
        why = "train.timeline_step=0" if run.settings.get("train.timeline_step") == 0 else "none came to its end"
        yield paragraph(f"No step was recorded: {why}.")
        return
    words = f"Step {run.recorded_step}. Filled: what the ledger held after each event. Dashed: what was predicted"
    if run.planned:
        words += " for each event."
    else:
        words += ": the sum of the largest of each category; they need not meet."
        most = max(charts.peaks_of(run).values())
        forms = sum(run.held(name, "predicted") for name in run.account("memory"))
        if most > forms * 1.001 > 0:
            words += f" The peak is {short_bytes(most - forms)} above it: the closed forms speak of the end of a "
            words += (
                "micro-batch, and inside one there are gradients that autograd has made and no bucket has taken yet."
            )
    words += " Numbers above: 3 first gradient, 4 boundary, 5 optimizer step, 6 publish (docs/step.md)."
    words += " Activations are not in the ledger and not in the picture."
    drawn = [run.recorded[rank] for rank in charts.chosen_ranks(run)]
    events = sum(int(number(rank.get("events")) or 0) for rank in drawn)
    kept = sum(len(rank["points"]) for rank in drawn)
    words += f" {kept:,} of {events:,} events are shown." * (kept < events)
    if len(drawn) < len(run.recorded):
        words += f" Of {len(run.recorded)} ranks: the first, and those with the highest and the lowest peak."
    yield paragraph(words)
    yield pictures


def _communication(run: Run) -> Iterable[str]:
    """Volume in the paper's unit and how much of it leaves the node, the chart, the table, overlap."""
    if account := run.account("communication"):
        sent, across = run.total_sent(), run.total_sent("between_node_bytes")
        words = f"One rank sent {short_bytes(sent)} in one step, mean over ranks; "
        words += f"predicted {short_bytes(run.total_sent(column='predicted'))}."
        if run.model_numel and run.world_size and run.world_size > 1:
            moved = run.total_sent("elements", kinds=("gradients.", "parameters.")) / run.model_numel
            usual = 2 * (run.world_size - 1) / run.world_size
            words += f" Of parameters and gradients that is {moved:.2f}Ψ elements, where the all-reduce of plain data "
            words += f"parallelism sends 2Ψ(W-1)/W = {usual:.2f}Ψ in a step of one micro-batch."
        far = f" {across / sent:.0%} of the bytes went to other nodes." if across and sent else ""
        yield paragraph(words + (far or " All stayed on one node."))
    else:
        yield paragraph("Nothing is known of what this run sent.")
    yield charts.communication(run)
    rows = []
    for kind, entry in account.items():
        sizes = (shown(traffic(entry, "bytes", column)) for column in ("predicted", "measured"))
        counts = (f"{traffic(entry, name) or 0:,.0f}" for name in ("calls", "elements", "padding_elements"))
        rows.append([kind, *sizes, *counts, shown(traffic(entry, "between_node_bytes"))])
    head = ["kind", "predicted", "measured", "calls", "elements", "padding", "between nodes"]
    yield folded("All kinds, in numbers", table(head, rows, range(1, 7))) if rows else ""
    exposed, hidden = run.typical(EXPOSED), run.typical(HIDDEN)
    if exposed is None:
        yield paragraph("How much of it was hidden behind computing was not measured in this run.")
    else:
        words = f"A step waited {short_seconds(exposed)} for communication (median)"
        if hidden is not None:
            words += f"; {hidden:.0%} of the time in which some was under way was hidden"
        yield paragraph(f"{words}.")
    yield charts.overlap(run)


def _settings(run: Run) -> Iterable[str]:
    """What was typed, what differs from the defaults, then everything."""
    if not run.settings:
        yield paragraph("No settings were noted.")
        return
    usual = flat(dataclasses.asdict(RunConfig()))
    differing = [
        [k, str(v), str(usual.get(k, "–"))] for k, v in run.settings.items() if k not in usual or usual[k] != v
    ]
    yield f"<p>On the command line: <code>{text(' '.join(run.overrides) or 'none')}</code></p>"
    yield table(["differs from deepzero.initialize's default", "here", "default"], differing)
    yield folded("All settings", table(["key", "value"], [[key, str(value)] for key, value in run.settings.items()]))


def _environment(run: Run) -> str:
    """Versions and machine, as the run itself noted them."""
    noted = run.summary.get("environment")
    rows = [[key, str(value)] for key, value in noted.items()] if isinstance(noted, dict) else []
    if isinstance(digest := run.summary.get("params_sha256"), str):
        rows.append(["final parameters, SHA-256", digest])
    return table(["", ""], rows) if rows else paragraph("The run noted none.")


def write_report(run_dir: Path) -> Path:
    """Read the folder and write its ``report.html``; returns the file's path."""
    put(run_dir / REPORT, report(Run(run_dir)))
    return run_dir / REPORT


def write_report_or_tell(run_dir: Path, tell: Callable[[str], None]) -> None:
    """The same at a run's end, where it must not be what the run fails by: ``tell`` prints a line about a failure."""
    try:
        write_report(run_dir)
    except Exception as error:  # a disk that is full, a file that nobody thought of: the run is over and stands
        tell(f"{REPORT}: {type(error).__name__}: {error}; python -m tools.report {run_dir} writes it again")
