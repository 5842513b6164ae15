"""A run's charts: what is on which axis. Each function returns figures as HTML, or "" where nothing is to be shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deepzero.monitor.report import svg
from deepzero.monitor.report.bottlenecks import EXPOSED, IN_FLIGHT, offload_parts
from deepzero.monitor.report.html import figure, figures, legend, paragraph
from deepzero.monitor.report.run_data import Run, number
from deepzero.utils.formatting import short_bytes, short_number, short_seconds

COLOURS = {
    "parameters": "c1", "masters": "c2", "moments": "c3", "gradients": "c4", "gathered": "c5", "buckets": "c6",
    "secondary": "c7", "padding": "c8", "snapshot": "c7",
}  # fmt: skip
ORDER = ("parameters", "masters", "moments", "gradients", "secondary", "gathered", "buckets", "padding")
"""Of the layers, the lowest first: what stays, then what comes and goes."""
PHASES = {"gradient_ready": "3", "boundary": "4", "step": "5", "publish": "6"}
"""Events that begin or end a phase of ``docs/step.md``, by its number there; of the first, the first one counts."""
MOST_RANKS = 4
"""Memory charts: of more ranks the first, and those that held the most and the least."""
STEP = "optimizer step"


def series(run: Run, key: str) -> list[tuple[float, float | None]]:
    """One figure over the steps, as many points as a chart can show; what is missing or not finite is None."""
    return svg.thin(list(zip(run.column("step"), run.column(key), strict=True)))  # type: ignore[arg-type]


def validations(run: Run) -> list[tuple[float, float | None]]:
    """The loss of validations over the steps before them."""
    return [(float(entry["step"]), number(entry.get("val_loss"))) for entry in run.validations]


def curves(run: Run) -> str:
    """Loss, throughput, gradient norm, learning rate, loss scale: the figures of every step."""
    skipped = [float(entry["step"]) for entry in run.steps if entry.get("skipped") is True]
    loss = [
        svg.Line("training", series(run, "loss"), "c1"),
        svg.Line("validation", validations(run), "c6", "dots"),
    ]
    pictures = [
        figure("Loss", svg.line_chart("loss", "Loss", _from_to("Loss", run.column("loss")), loss, STEP, "{:.4g}".format,
                                      crosses=skipped),
               legend([("training", "c1", ""), ("validation", "c6", "")])
               + ("<p>A cross is a step that was skipped.</p>" if skipped else "")),
    ]  # fmt: skip
    for ident, name, key, label, zero in (
        ("speed", "Tokens per second, all ranks", "tokens_per_second", short_number, True),
        ("norm", "Gradient norm before clipping", "grad_norm", "{:.3g}".format, True),
        ("rate", "Learning rate", "lr", "{:.2g}".format, True),
        ("scale", "Loss scale (fp16)", "loss_scale", short_number, True),
        ("mfu", "Part of the devices' peak (MFU)", "mfu", "{:.1%}".format, True),
    ):
        points = series(run, key)
        if key == "loss_scale" and {y for _, y in points} <= {1.0, None}:
            continue
        line = svg.Line(name, points, "c1")
        note = speed_note(run) if key == "tokens_per_second" else ""
        drawn = svg.line_chart(ident, name, _from_to(name, run.column(key)), [line], STEP, label, zero=zero)
        pictures.append(figure(name, drawn, note))
    return figures(pictures)


def speed_note(run: Run) -> str:
    """The typical speed, and which steps it leaves out."""
    usual = run.typical("tokens_per_second")
    if usual is None:
        return ""
    tail = f", nor step {run.recorded_step}, which was recorded" if run.recorded_step is not None else ""
    return f"<p>Median {short_number(usual)}, without the first step{tail}.</p>"


def overlap(run: Run) -> str:
    """Communication that was waited for, beside what was under way, and the step itself."""
    if EXPOSED not in run.keys:
        return ""
    lines = [
        svg.Line("step", series(run, "step_seconds"), "c8"),
        svg.Line("under way", series(run, IN_FLIGHT), "c5"),
        svg.Line("waited for", series(run, EXPOSED), "c6"),
    ]
    named = legend([("whole step", "c8", ""), ("communication under way", "c5", ""), ("of it waited for", "c6", "")])
    title = "Communication within a step"
    drawn = svg.line_chart("overlap", title, "Seconds a step, over the steps", lines, STEP, short_seconds, zero=True)
    return figures([figure(title, drawn, named)])


def offload(run: Run) -> str:
    """Seconds of every part of the pipeline between device and host."""
    parts = offload_parts(run)
    lines = [
        svg.Line(part, series(run, f"offload/{part}/seconds"), f"c{1 + place % 8}") for place, part in enumerate(parts)
    ]
    named = legend([(part.replace("_", " "), f"c{1 + k % 8}", _usual(run, part)) for k, part in enumerate(parts)])
    title = "Offload pipeline, seconds a step"
    drawn = svg.line_chart("offload", title, "Seconds of each part, over steps", lines, STEP, short_seconds, zero=True)
    return figures([figure(title, drawn, named)])


def _usual(run: Run, part: str) -> str:
    took, hidden = run.typical(f"offload/{part}/seconds"), run.typical(f"offload/{part}/hidden")
    words = [] if took is None else [short_seconds(took)]
    return ", ".join([*words, *([] if hidden is None else [f"{hidden:.0%} hidden"])])


def quantization(run: Run) -> str:
    """The worst signal-to-noise ratio of weights and of gradients."""
    lines, named = [], []
    for what, colour in (("weights", "c1"), ("gradients", "c6")):
        key = f"quantization/{what}_snr_db_min"
        points = [(x, y) for x, y in series(run, key) if y is not None]
        if points:
            lines.append(svg.Line(what, points, colour))
            named.append((what, colour, f"lowest {min(y for _, y in points):.1f} dB"))
    title = "Quantisation: signal over noise of the worst bucket"
    drawn = svg.line_chart("snr", title, "Decibels over the steps; 6 dB are one bit", lines, STEP, "{:.0f} dB".format)
    return figures([figure(title, drawn, legend(named))])


def communication(run: Run) -> str:
    """Bytes by kind, measured, with a mark where they were predicted; copies between device and host apart."""
    pictures = []
    for ident, title, copies in (
        ("sent", "Sent by one rank in one step", False),
        ("copied", "Copied by one rank between device and host in one step", True),
    ):
        bars = sorted(_bars(run.sent(copies)), key=lambda bar: -bar.value)
        drawn = svg.bar_chart(ident, title, f"{len(bars)} kinds, by bytes", bars, short_bytes)
        pictures.append(figure(title, drawn, "<p>Bar: measured. Upright mark: predicted.</p>"))
    return figures(pictures)


def _bars(account: Mapping[str, Mapping[str, Any]]) -> list[svg.Bar]:
    bars = []
    for kind, entry in account.items():
        measured, predicted = entry.get("measured") or {}, entry.get("predicted")
        value = number(measured.get("bytes")) or 0.0
        if value:
            expected = number(predicted.get("bytes")) if isinstance(predicted, dict) else None
            note = f"{short_bytes(value)}, {number(measured.get('calls')) or 0:g} calls"
            bars.append(svg.Bar(kind, value, expected, note))
    return bars


def _from_to(name: str, values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return f"{name}: no finite value"
    return f"{name} from {known[0]:.4g} to {known[-1]:.4g} over {len(values)} steps"


# ---- memory over one step --------------------------------------------------------------------------------------------


def memory_step(run: Run) -> str:
    """The recorded step of each rank: what was held, filled, and what was predicted, as an outline."""
    ranks = recorded_ranks(run)
    if not ranks:
        return ""
    pictures = []
    for rank in chosen_ranks(ranks):
        for side in ("device", "host"):
            pictures.append(_rank_memory(run, ranks, rank, side))
    return figures(pictures, large=True)


def recorded_ranks(run: Run) -> list[Mapping[str, Any]]:
    """The ranks of the recorded step, in order; none when there is no point of any."""
    ranks = run.timeline.get("ranks")
    found: list[Mapping[str, Any]] = (
        [rank if isinstance(rank, dict) else {} for rank in ranks] if isinstance(ranks, list) else []
    )
    return found if any(points_of(rank) for rank in found) else []


def points_of(rank: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A rank's points that can be drawn."""
    return [
        point for point in (rank["points"] if isinstance(rank.get("points"), list) else [])
        if isinstance(point, dict) and number(point.get("seconds")) is not None and isinstance(point.get("held"), dict)
    ]  # fmt: skip


def chosen_ranks(ranks: Sequence[Mapping[str, Any]]) -> list[int]:
    """Of those that have points all of a few; of many the first, and those with the highest and the lowest peak.

    Example:
        >>> chosen_ranks([{"points": [{"seconds": 0, "held": {"parameters": k % 7}}]} for k in range(9)])
        [0, 6]
    """
    peaks = {place: peak_of(rank) for place, rank in enumerate(ranks) if points_of(rank)}
    if len(ranks) <= MOST_RANKS or not peaks:
        return list(peaks)
    return sorted({min(peaks), max(peaks, key=peaks.__getitem__), min(peaks, key=peaks.__getitem__)})


def peak_of(rank: Mapping[str, Any]) -> float:
    """The most bytes that a rank's points hold; 0 without points."""
    return max((sum(point["held"].values()) for point in points_of(rank)), default=0)


def _rank_memory(run: Run, ranks: Sequence[Mapping[str, Any]], rank: int, side: str) -> str:
    points = points_of(ranks[rank])
    on_host = side == "host"
    names = sorted(
        {name for p in points for name, size in p["held"].items() if size and _host(name) == on_host}, key=_place
    )
    times = [float(point["seconds"]) for point in points]
    layers = [svg.Layer(name, [number(p["held"].get(name)) or 0.0 for p in points], _colour(name)) for name in names]
    peak = max((sum(values) for values in zip(*(layer.values for layer in layers), strict=True)), default=0.0)
    outlines = [_predicted(run, rank, points, names)]
    device = [(t, number(point.get("device_bytes"))) for t, point in zip(times, points, strict=True)]
    if not on_host and svg.finite(device):
        outlines.append(svg.Line("allocated on the GPU", device, "c8"))
    title = f"Rank {rank}, {'host' if on_host else 'device'}: peak {short_bytes(peak)}"
    shown = [(layer.name, layer.colour, short_bytes(max(layer.values))) for layer in reversed(layers)]
    desc = f"{title}. Largest by category: " + ", ".join(f"{name} {size}" for name, _, size in shown)
    drawn = svg.stacked_chart(
        f"memory-{rank}-{side}", title, desc, times, layers, outlines, "time within the step", short_bytes,
        x_label=short_seconds, marks=_phases(points),
    )  # fmt: skip
    lines = [("predicted", "dash", _most(outlines[0]))]
    lines += [(line.name, line.colour, _most(line)) for line in outlines[1:]]
    words = legend([*shown, *lines])
    if ranks[rank].get("problem"):
        words += paragraph(f"Not complete: {ranks[rank]['problem']}")
    return figure(title, drawn, words)


def _most(line: svg.Line) -> str:
    known = svg.finite(line.points)
    return short_bytes(max(y for _, y in known)) if known else "not known"


def _predicted(run: Run, rank: int, points: Sequence[Mapping[str, Any]], names: Sequence[str]) -> svg.Line:
    """The plan's outline where there is one; else the sum of the closed forms, which is reached where all meet."""
    plans = run.timeline.get("predicted")
    if isinstance(plans, list) and rank < len(plans) and (plan := points_of(plans[rank])):
        clock = _clock(points)
        outline: list[tuple[float, float | None]] = []
        for place, point in enumerate(plan):
            time = clock(int(number(point.get("number")) or place))
            total = sum(number(point["held"].get(name)) or 0.0 for name in names)
            if outline:
                outline.append((time, outline[-1][1]))
            outline.append((time, total))
        return svg.Line("predicted by the plan", outline, "ink", "dashed")
    total = sum(run.held(name, "predicted") for name in names)
    ends = [float(points[0]["seconds"]), float(points[-1]["seconds"])]
    line = [(x, total if total else None) for x in ends]
    return svg.Line("predicted, sum of the largest", line, "ink", "dashed")


def _clock(points: Sequence[Mapping[str, Any]]) -> Callable[[int], float]:
    """When the event of a number came. A plan has no times: its events are this step's, in the same order."""
    numbers = [int(number(p.get("number")) or 0) for p in points]
    times = [float(p["seconds"]) for p in points]

    def at(event: int) -> float:
        later = next((k for k, n in enumerate(numbers) if n >= event), len(numbers) - 1)
        if later == 0 or numbers[later] <= event:
            return times[later]
        part = (event - numbers[later - 1]) / (numbers[later] - numbers[later - 1])
        return times[later - 1] + part * (times[later] - times[later - 1])

    return at


def _phases(points: Sequence[Mapping[str, Any]]) -> list[tuple[float, str]]:
    marks: list[tuple[float, str]] = []
    for point in points:
        word = PHASES.get(str(point.get("what")))
        if word is not None and (word != "3" or word not in [w for _, w in marks]):
            marks.append((float(point["seconds"]), word))
    return marks


def _host(name: str) -> bool:
    return name.startswith("host_") or name == "snapshot"


def _colour(name: str) -> str:
    return COLOURS.get(name.removeprefix("host_"), "c8")


def _place(name: str) -> tuple[int, str]:
    short = name.removeprefix("host_")
    return (ORDER.index(short) if short in ORDER else len(ORDER), name)
