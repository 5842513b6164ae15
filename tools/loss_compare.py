"""The loss curves of several runs in one picture, and how far apart they end: ``python tools/loss_compare.py RUN RUN``.

A run is a folder with a ``metrics.jsonl``. Training losses are drawn as running means, validation losses as they are.
The first run is the one that the others are compared with. Needs matplotlib (``pip install -e ".[bench]"``).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from deepzero.monitor.metrics_file import METRICS, read_lines
from deepzero.utils.closed_pipe import exit_with

COLOURS = ("#1f4e9c", "#d1660a", "#2a7f3f", "#8a2f8f")
PICTURES = (".svg", ".png", ".pdf")
STYLES = ("-", "--", "-.", ":")


def read(folder: Path) -> tuple[dict[int, float], dict[int, float]]:
    """Step → training loss, and step → validation loss.

    Raises:
        SystemExit: there is no such file, or no loss in it.
    """
    path = folder / METRICS
    if not path.is_file():
        raise SystemExit(f"{path} is not there; give the folder of a run")
    entries, broken = read_lines(folder)
    if broken:
        print(f"{path}: lines left out because they are not whole: {broken}")
    has = lambda key: {entry["step"]: entry[key] for entry in entries if entry.get(key) is not None}
    training, validation = has("loss"), has("val_loss")
    if not training:
        raise SystemExit(f"{path} holds no loss")
    return training, validation


def running_mean(values: list[float], length: int) -> list[float]:
    """Of the last ``length`` values, fewer at the beginning.

    Example:
        >>> running_mean([1.0, 3.0, 5.0], 2)
        [1.0, 2.0, 4.0]
    """
    windows = [values[max(0, end - length) : end] for end in range(1, len(values) + 1)]
    return [sum(window) / len(window) for window in windows]


def draw(runs: dict[str, tuple[dict[int, float], dict[int, float]]], out: Path, length: int) -> None:
    """Write the picture; the same bytes for the same runs."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "deepzero"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.2))
    for number, (name, (training, validation)) in enumerate(runs.items()):
        colour, style = COLOURS[number % len(COLOURS)], STYLES[number % len(STYLES)]
        steps = sorted(training)
        means = running_mean([training[step] for step in steps], length)
        axes.plot(steps, means, style, color=colour, lw=1.4, label=f"{name}: training, mean of {length} steps")
        if validation:
            filled = colour if style == "-" else "none"
            points = list(validation), list(validation.values())
            axes.plot(*points, "o", color=colour, ms=5, mfc=filled, label=f"{name}: validation")
    axes.set(xlabel="step", ylabel="loss")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)


def main() -> None:
    """Compare and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs, the reference first")
    parser.add_argument("--names", nargs="+", help="what to call them; default: the folders' names")
    parser.add_argument("--out", type=Path, help="write a picture, for example curves.svg")
    parser.add_argument("--mean", type=int, default=10, help="steps of the running mean")
    given = parser.parse_args()
    if given.mean < 1:
        parser.error(f"--mean {given.mean}: a running mean is of at least 1 step")
    if given.out is not None and (given.out.suffix not in PICTURES or not given.out.parent.is_dir()):
        parser.error(f"--out {given.out}: give a file in a folder that exists, ending in {', '.join(PICTURES)}")
    names = given.names or [folder.name for folder in given.runs]
    if len(names) != len(given.runs) or len(set(names)) != len(names):
        parser.error(f"{len(given.runs)} runs need as many different names, not {names}; give them with --names")
    runs = {name: read(folder) for name, folder in zip(names, given.runs, strict=True)}
    curves = [validation for _, validation in runs.values()]
    print("| step | " + " | ".join(names) + " |\n| --- |" + " --- |" * len(names))
    for step in sorted({step for curve in curves for step in curve}):
        cells, expected = [], curves[0].get(step)
        for curve in curves:
            value = curve.get(step)
            compared = value is not None and expected and curve is not curves[0]
            apart = f" ({value / expected - 1:+.2%})" if compared else ""
            cells.append("-" if value is None else f"{value:.4f}{apart}")
        print(f"| {step} | {' | '.join(cells)} |")
    if not any(curves):
        print("(no run has a validation loss)")
    if given.out is not None:
        draw(runs, given.out, given.mean)


if __name__ == "__main__":
    exit_with(main)
