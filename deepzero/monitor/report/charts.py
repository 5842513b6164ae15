"""A run's charts: what is on which axis. Each function returns figures as HTML, or "" where nothing is to be shown."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deepzero.comm.ledger import side_of
from deepzero.monitor.report import svg
from deepzero.monitor.report.html import figures, paragraph
from deepzero.monitor.report.run_data import EXPOSED, IN_FLIGHT, Run, number, shown, traffic
from deepzero.utils.formatting import short_bytes, short_number, short_seconds

LAYERS = {
    "parameters": "c1", "masters": "c2", "moments": "c3", "gradients": "c4", "secondary": "c7", "gathered": "c5",
    "buckets": "c6", "padding": "c8", "snapshot": "c7", "spare buffers": "c8",
}  # fmt: skip
"""Colours of the memory categories, the lowest layer first: what stays, then what comes and goes."""
PHASES = {"gradient_ready": "3", "boundary": "4", "step": "5", "publish": "6"}
"""Events that begin or end a phase of ``docs/step.md``, by its number there; of the first, the first one counts."""
MOST_RANKS = 4  # memory charts: of more ranks the first, and those that held the most and the least
STEP = "optimizer step"


def curves(run: Run) -> str:
    """Loss, throughput, gradient norm, learning rate, loss scale: the figures of every step."""
    skipped = [float(entry["step"]) for entry in run.steps if entry.get("skipped") is True]
    validation = svg.Line("validation", run.series("val_loss"), "c6", "dots")
    loss = [svg.Line("training", run.series("loss"), "c1"), validation]
    note = "<p>A cross is a step that was skipped.</p>" * bool(skipped)
    pictures = [svg.chart("loss", "Loss", loss, STEP, "{:.4g}".format, note=note, crosses=skipped)]
    speed = run.typical("tokens_per_second")
    usual = f"Median {short_number(speed or 0)}, without the first step"
    usual += f", nor step {run.recorded_step}, which was recorded." if run.recorded_step is not None else "."
    for ident, name, key, label in (
        ("speed", "Tokens per second, all ranks", "tokens_per_second", short_number),
        ("norm", "Gradient norm before clipping", "grad_norm", "{:.3g}".format),
        ("rate", "Learning rate", "lr", "{:.2g}".format),
        ("scale", "Loss scale (fp16)", "loss_scale", short_number),
        ("mfu", "Part of the devices' peak (MFU)", "mfu", "{:.1%}".format),
    ):
        points = run.series(key)
        if key != "loss_scale" or not {y for _, y in points} <= {1.0, None}:
            note = paragraph(usual) if key == "tokens_per_second" else ""
            pictures.append(svg.chart(ident, name, [svg.Line(name, points, "c1")], STEP, label, note=note, zero=True))
    return figures(pictures)


def overlap(run: Run) -> str:
    """Communication that was waited for, beside what was under way, and the step itself."""
    if EXPOSED not in run.keys:
        return ""
    lines = [
        svg.Line("whole step", run.series("step_seconds"), "c8"),
        svg.Line("communication under way", run.series(IN_FLIGHT), "c5"),
        svg.Line("of it waited for", run.series(EXPOSED), "c6"),
    ]
    return figures([svg.chart("overlap", "Communication within a step", lines, STEP, short_seconds, zero=True)])


def offload(run: Run) -> str:
    """Seconds of every part of the pipeline between device and host."""
    lines = []
    for place, part in enumerate(run.offload_parts):
        took = shown(run.typical(f"offload/{part}/seconds"), short_seconds)
        hidden = shown(run.typical(f"offload/{part}/hidden"), "{:.0%} hidden".format)
        points, words = run.series(f"offload/{part}/seconds"), ", ".join(filter(None, (took, hidden)))
        lines.append(svg.Line(part.replace("_", " "), points, f"c{1 + place % 8}", words=words))
    return figures([svg.chart("offload", "Offload pipeline, seconds a step", lines, STEP, short_seconds, zero=True)])


def quantization(run: Run) -> str:
    """The worst signal-to-noise ratio of weights and of gradients; 6 dB are one bit."""
    lines = []
    for what, colour in (("weights", "c1"), ("gradients", "c6")):
        if points := svg.finite(run.series(f"quantization/{what}_snr_db_min")):
            lines.append(svg.Line(what, points, colour, words=f"lowest {min(y for _, y in points):.1f} dB"))
    title = "Quantisation: signal over noise of the worst bucket"
    return figures([svg.chart("snr", title, lines, STEP, "{:.0f} dB".format)])


def communication(run: Run) -> str:
    """Bytes by kind, measured, with a mark where they were predicted; copies between device and host apart."""
    pictures = []
    for ident, title, copies in (
        ("sent", "Sent by one rank in one step", False),
        ("copied", "Copied by one rank between device and host in one step", True),
    ):
        bars: list[svg.Bar] = []
        for kind, entry in run.sent(copies).items():
            if value := traffic(entry, "bytes"):
                note = f"{short_bytes(value)}, calls: {traffic(entry, 'calls') or 0:g}"
                bars.append((kind, value, traffic(entry, "bytes", "predicted"), note))
        bars.sort(key=lambda bar: -bar[1])
        pictures.append(svg.bar_chart(ident, title, bars, "<p>Bar: measured. Upright mark: predicted.</p>"))
    return figures(pictures)


# ---- memory over one step --------------------------------------------------------------------------------------------


def memory_step(run: Run) -> str:
    """The recorded step of each rank: what was held, filled, and what was predicted, as an outline."""
    chosen = [(rank, side) for rank in chosen_ranks(run) for side in ("device", "host")]
    return figures((_rank_memory(run, rank, side) for rank, side in chosen), large=True)


def chosen_ranks(run: Run) -> list[int]:
    """Of those that have points all of a few; of many the first, and those with the highest and the lowest peak."""
    peaks = peaks_of(run)
    if len(run.recorded) <= MOST_RANKS or not peaks:
        return list(peaks)
    return sorted({min(peaks), max(peaks, key=peaks.__getitem__), min(peaks, key=peaks.__getitem__)})


def peaks_of(run: Run) -> dict[int, float]:
    """The most bytes that the points of each rank hold, where it has points."""
    ranks = enumerate(run.recorded)
    return {k: max(sum(point["held"].values()) for point in rank["points"]) for k, rank in ranks if rank["points"]}


def _rank_memory(run: Run, rank: int, side: str) -> str:
    points = run.recorded[rank]["points"]
    names = [
        name for name in dict.fromkeys(name for point in points for name, size in point["held"].items() if size)
        if ("host" if name == "snapshot" else side_of(name)) == side
    ]  # fmt: skip
    if len(points) < 2 or not names:
        return ""
    order, short = list(LAYERS), {name: name.removeprefix("host_") for name in names}
    names.sort(key=lambda name: (order.index(short[name]) if short[name] in order else len(order), name))
    times = [float(point["seconds"]) for point in points]
    sizes = {name: [point["held"].get(name, 0.0) for point in points] for name in names}
    lines = [
        svg.Line(name, list(zip(times, sizes[name], strict=True)), LAYERS.get(short[name], "c8"), "area")
        for name in names
    ]
    lines.append(_predicted(run, rank, names))
    device = [(time, number(point.get("device_bytes"))) for time, point in zip(times, points, strict=True)]
    if side == "device" and svg.finite(device):
        lines.append(svg.Line("allocated on the GPU", device, "c8"))
    problem = run.recorded[rank].get("problem")
    note = paragraph(f"Not complete: {problem}" if problem else "")
    title = f"Rank {rank}, {side}: peak {short_bytes(max(map(sum, zip(*sizes.values(), strict=True))))}"
    marks = [(t, PHASES[what]) for t, p in zip(times, points, strict=True) if (what := str(p.get("what"))) in PHASES]
    first = next((mark for mark in marks if mark[1] == "3"), None)
    marks = [mark for mark in marks if mark[1] != "3" or mark is first]
    return svg.chart(
        f"memory-{rank}-{side}", title, [line._replace(words=_most(line)) for line in lines], "time within the step",
        short_bytes, note=note, x_label=short_seconds, marks=marks,
    )  # fmt: skip


def _most(line: svg.Line) -> str:
    known = svg.finite(line.points)
    return short_bytes(max(y for _, y in known)) if known else "not known"


def _predicted(run: Run, rank: int, names: Sequence[str]) -> svg.Line:
    """The plan's outline where there is one; else the sum of the closed forms, which is reached where all meet.

    A plan has no times: its events are this step's, in the same order, so an event came when that of its number did.
    """
    points = run.recorded[rank]["points"]
    times = [float(point["seconds"]) for point in points]
    plan = run.planned[rank]["points"] if rank < len(run.planned) else []
    if not plan:
        total = sum(run.held(name, "predicted") for name in names) or None
        return svg.Line("predicted", [(times[0], total), (times[-1], total)], "ink", "dashed")
    numbers = [number(point.get("number")) or 0.0 for point in points]
    came = np.interp([number(point.get("number")) or place for place, point in enumerate(plan)], numbers, times)
    totals = [sum(point["held"].get(name, 0.0) for name in names) for point in plan]
    stairs = [(float(time), size) for k, time in enumerate(came) for size in totals[max(0, k - 1) : k + 1]]
    return svg.Line("predicted", stairs, "ink", "dashed")
