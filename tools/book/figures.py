"""The figures of the book: ``python -m tools.book.figures [NAME …]`` draws ``docs/figures/NAME.svg``; no name: all.

Every number in a figure comes from deepzero: from a closed form, a layout, a plan, or the events of a run. A figure is
a list of boxes, lines and words in points (:class:`Canvas`); matplotlib makes the SVG. As metadata the SVG holds that
list's hash and the numbers that are drawn, so that ``--check`` can tell, without drawing and with any version of
matplotlib, whether a committed figure is current. Exit status: 0; 1: with ``--check``, a figure is not.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from html import unescape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import deepzero
from deepzero.comm import process_group, ring
from deepzero.comm.quantization import Format
from deepzero.comm.quantized_reduce import BETWEEN, INSIDE
from deepzero.comm.reduce_scatter import BucketReducer
from deepzero.comm.topology import Nodes, split_ranks
from deepzero.launch.launcher import launch
from deepzero.layout import plan_layout
from deepzero.planning.clusters import PRESETS
from deepzero.planning.dry_run import ClusterShape, DryRunResult, dry_run
from deepzero.runtime.memory_model import Elements, StateSizes, predicted_memory, predicted_traffic, reduction_traffic
from deepzero.runtime.zero.gradient_reduction import UnreducedGradients
from deepzero.runtime.zero.module_hooks import ModuleHooks
from deepzero.runtime.zero.optimizer_shard import OptimizerShard
from deepzero.runtime.zero.parameter_all_gather import BACKWARD, FORWARD
from deepzero.runtime.zero.partitioned_bucket import PartitionedBucket, ZeroParamStatus
from deepzero.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator as Coordinator
from deepzero.runtime.zero.stage_1_and_2 import ALL_GATHER
from deepzero.training.build_model import build_model, program_of
from deepzero.training.command_line import compose, with_fallback_batch
from deepzero.utils.closed_pipe import exit_with
from deepzero.utils.formatting import short_bytes

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "figures"
COMMAND = "python -m tools.book.figures"

WIDTH, LEFT, RIGHT = 360.0, 14.0, 346.0
"""Points. On a telephone 400 pixels wide a letter of 9 points has 10 pixels."""
INK, SOFT, FAINT, CARD = "#1f2328", "#59636e", "#d1d9e0", "#ffffff"
COLOURS = {"parameters": "#6cb4e4", "gradients": "#f0b252", "masters": "#4fb894", "moments": "#d79ac0"}
"""One tensor has one colour in all figures (after Okabe and Ito, light enough for dark letters)."""
PARAMETERS, GRADIENTS = COLOURS["parameters"], COLOURS["gradients"]
GATHERED, ALERT = "#b9dcf3", "#d55e00"
SUMS = (CARD, "#fdf1dc", "#f9dba6", "#f5c672", GRADIENTS)
"""Of gradients, by the number of ranks that are in a sum: stronger with each."""


class Canvas:
    """What is drawn, as data. Points, from the upper left corner; ``numbers`` are what a check compares first."""

    def __init__(self, title: str) -> None:
        self.title, self.height = title, 0.0
        self.items: list[tuple[Any, ...]] = []
        self.numbers: dict[str, Any] = {}
        self.text(LEFT, 20, title, 11, bold=True)

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, edge: str = "none", label: str = "",
        size: float = 9, corner: float = 0,
    ) -> None:  # fmt: skip
        """A rectangle, with words in its middle."""
        self.items.append(("box", *_places(x, y, width, height), fill, edge, corner))
        if label:
            self.text(x + width / 2, y + height / 2 + 0.36 * size, label, size, at="center")

    def text(
        self, x: float, y: float, words: str, size: float = 9, colour: str = INK, at: str = "left", bold: bool = False
    ) -> None:
        """Words whose base line begins, has its middle or ends (``at``: left, center, right) at the place."""
        self.items.append(("text", *_places(x, y), words, size, colour, at, bold))

    def line(self, *points: tuple[float, float], colour: str = SOFT, width: float = 1, dash: bool = False) -> None:
        """The points joined."""
        self.items.append(("line", [_places(*point) for point in points], colour, width, dash))

    def arrow(self, start: tuple[float, float], end: tuple[float, float], colour: str = SOFT) -> None:
        """From ``start`` to ``end``."""
        self.items.append(("arrow", _places(*start), _places(*end), colour))

    def legend(self, y: float, *entries: tuple[str, str], step: float = 84) -> None:
        """Coloured squares with words, in a row."""
        for place, (fill, words) in enumerate(entries):
            self.box(LEFT + place * step, y - 7.5, 9, 9, fill, SOFT)
            self.text(LEFT + place * step + 13, y, words)

    def end(self, y: float, words: str = "") -> Canvas:
        """Words in several lines from ``y`` on, and the end of the card."""
        lines = textwrap.wrap(words, 68)
        for row, line in enumerate(lines):
            self.text(LEFT, y + 12 * row, line, colour=SOFT)
        self.height = y + 12 * len(lines)
        return self

    def facts(self) -> dict[str, Any]:
        """What the SVG keeps of how it was made, and a check compares."""
        drawing = json.dumps([self.height, self.items], sort_keys=True)
        return {"numbers": self.numbers, "drawing": hashlib.sha256(drawing.encode()).hexdigest()[:16]}

    def save(self, path: Path) -> None:
        """Let matplotlib write the SVG: words stay words, and the same data give the same file."""
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

        families = ["DejaVu Sans", "Verdana", "Arial", "sans-serif"]
        style = {"svg.fonttype": "none", "svg.hashsalt": path.stem, "font.sans-serif": families}
        card = ("box", 1, 1, WIDTH - 2, self.height - 2, CARD, FAINT, 8)
        with matplotlib.rc_context(style):
            figure = Figure(figsize=(WIDTH / 72, self.height / 72))
            axes = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(self.height, 0))
            axes.axis("off")
            for layer, (kind, *what) in enumerate([card, *self.items]):
                if kind == "box":
                    x, y, width, height, fill, edge, corner = what
                    look = {"facecolor": fill, "edgecolor": edge, "linewidth": 0.8, "zorder": layer}
                    if corner:
                        look["boxstyle"] = f"round,pad=0,rounding_size={corner}"
                    axes.add_patch((FancyBboxPatch if corner else Rectangle)((x, y), width, height, **look))
                elif kind == "text":
                    x, y, words, size, colour, at, bold = what
                    look = {"fontsize": size, "color": colour, "ha": at, "weight": "bold" if bold else "normal"}
                    drawn = axes.text(x, y, words, zorder=layer, **look)
                    extent = drawn.get_window_extent().transformed(axes.transData.inverted())
                    if extent.x0 < 4 or extent.x1 > WIDTH - 4 or y > self.height - 4:
                        raise ValueError(f"{path.stem}: {words!r} does not fit on the card")
                elif kind == "line":
                    points, colour, width, dash = what
                    look = {"color": colour, "lw": width, "ls": "--" if dash else "-"}
                    axes.plot(*zip(*points, strict=True), zorder=layer, **look)
                else:
                    start, end, colour = what
                    look = {"arrowstyle": "-|>", "mutation_scale": 9, "shrinkA": 0, "shrinkB": 0}
                    axes.add_patch(FancyArrowPatch(start, end, color=colour, zorder=layer, **look))
            about = {"Title": self.title, "Creator": f"{COMMAND} {path.stem}", "Date": None}
            path.parent.mkdir(parents=True, exist_ok=True)
            description = json.dumps(self.facts(), sort_keys=True)
            figure.savefig(path, format="svg", transparent=True, metadata={**about, "Description": description})


def _places(*values: float) -> tuple[float, ...]:
    return tuple(round(float(value), 2) for value in values)


# ---- what is held, in closed forms -----------------------------------------------------------------------------------


def sizes(stage: int) -> StateSizes:
    """Bytes an element as the paper counts them: bf16 parameters and gradients, fp32 masters and moments."""
    # The paper counts a gradient once, whole in stages 0 and 1 and as the owner's share in 2 and 3; what deepzero adds
    # gradients up in is another 4 bytes an element, or a share of them.
    return StateSizes(
        compute=2, accumulation=0 if stage < 2 else 2, moments=8, wire=2, stage=stage, overlap=False, micro_batches=1,
        whole_reduce=stage == 0, exact=False,
    )  # fmt: skip


def held(stage: int, numel: int, world_size: int) -> dict[str, int]:
    """Bytes of one rank by state."""
    return predicted_memory(Elements(numel), world_size, sizes(stage))


def memory_16_bytes() -> Canvas:
    """The 16 bytes of a weight."""
    canvas, cell, x = Canvas("One weight while it trains, byte by byte"), 20.0, 20.0
    forms = canvas.numbers["bytes"] = held(0, 1, 1)
    parts = (
        ("parameters", 1, "weight", "w", "bf16"), ("gradients", 1, "gradient", "g", "bf16"),
        ("masters", 1, "master", "of w", "fp32"), ("moments", 2, "momentum", "m", "fp32"),
        ("moments", 2, "variance", "v", "fp32"),
    )  # fmt: skip
    for state, tensors, *words, dtype in parts:
        count = forms[state] // tensors
        for byte in range(count):
            canvas.box(x + byte * cell, 36, cell, 26, COLOURS[state], CARD)
        for row, word in enumerate((*words, f"{dtype}: {count}")):
            canvas.text(x + count * cell / 2, 74 + 11 * row, word, at="center")
        x += count * cell
    model, total = forms["parameters"] + forms["gradients"], sum(forms.values())
    uses = ((0, model, "in both passes"), (model, total, f"optimizer states, K = {total - model}"))
    for begin, end, use in uses:
        left, right = 22 + begin * cell, 18 + end * cell
        canvas.line((left, 102), (left, 106), (right, 106), (right, 102))
        canvas.text((left + right) / 2, 118, use, at="center")
    note = f"{total} bytes. A billion weights take {total} GB, of which the model is {forms['parameters']}."
    return canvas.end(138, note)


def stages() -> Canvas:
    """What four ranks hold in each stage, to scale; a partitioned state in the place of its owner."""
    canvas, world, scale, numel = Canvas("Four ranks, bytes held for each weight"), 4, 14.0, 1 << 20
    whole = held(0, 1, 1)
    canvas.legend(39, *((fill, state) for state, fill in COLOURS.items()))
    for stage in range(4):
        top, mine = 54 + stage * 66.0, {state: size / numel for state, size in held(stage, numel, world).items()}
        canvas.numbers[f"stage {stage}"] = mine
        canvas.text(LEFT, top + 16, f"Stage {stage}", 10, bold=True)
        canvas.text(LEFT, top + 30, f"{sum(mine.values()):g} bytes")
        for rank in range(world):
            x, y = 76.0, top + rank * 13.0
            for state, fill in COLOURS.items():
                canvas.box(x, y, whole[state] * scale, 10.5, CARD, FAINT)
                start = rank * mine[state] if mine[state] < whole[state] else 0
                canvas.box(x + start * scale, y, mine[state] * scale, 10.5, fill)
                x += whole[state] * scale
            canvas.text(x + 5, y + 8.5, f"rank {rank}")
    return canvas.end(322, "Empty: another rank has it. Stage 3 also holds what is gathered.")


def four_weights() -> Canvas:
    """Who holds which number of four weights on four ranks."""
    canvas, world, cell = Canvas("Four weights on four ranks"), 4, 15.0
    layout = plan_layout([1] * world, world_size=world, bucket_limit=world, align=1)
    owned = [[piece.slot.index for piece in layout.fragments(rank)] for rank in range(world)]
    kinds = [("w", "parameters"), ("g", "gradients"), ("W", "masters"), ("m", "moments"), ("v", "moments")]
    for stage in range(4):
        top, forms = 48 + stage * 80.0, held(stage, world, world)
        canvas.numbers[f"stage {stage}"] = {**forms, "owned": owned}
        canvas.text(LEFT, top + 10, f"Stage {stage}", 10, bold=True)
        canvas.text(LEFT, top + 24, f"{sum(forms.values())} bytes")
        canvas.text(LEFT, top + 35, "a rank")
        for rank in range(world):
            x = 68 + rank * 72.0
            if stage == 0:
                canvas.text(x + 2 * cell, top - 8, f"rank {rank}", at="center")
            canvas.box(x, top, world * cell, 13.0 * len(kinds), CARD, FAINT)
            for row, (letter, state) in enumerate(kinds):
                cut = forms[state] < held(0, world, 1)[state]
                for weight in owned[rank] if cut else range(world):
                    place = (x + weight * cell, top + row * 13.0, cell, 13)
                    canvas.box(*place, COLOURS[state], CARD, f"{letter}{weight + 1}", 8)
    return canvas.end(374, "w, g: weight and gradient, bf16. W, m, v: master and moments, fp32.")


# ---- numbers, rings, layouts -----------------------------------------------------------------------------------------


def adam_steps(weight: torch.Tensor, grad: float, rate: float, steps: int) -> list[float]:
    """A weight before and after each step of Adam, kept in its dtype between two; moments are fp32."""
    # torch's Adam on a bf16 tensor would keep bf16 moments: here the fp32 result is rounded to what is kept.
    param = torch.nn.Parameter(weight.float())
    adam, path = torch.optim.Adam([param], lr=rate), [float(weight)]
    for _ in range(steps):
        param.grad = torch.tensor(grad)
        adam.step()
        param.data = param.data.to(weight.dtype).float()
        path.append(float(param.detach()))
    return path


def bf16_grid() -> Canvas:
    """The bf16 numbers around 0.347, and Adam's steps on a weight that is kept in bf16, or in fp32."""
    canvas, weight, grad, rate, steps = Canvas("The bf16 numbers around w = 0.347"), 0.347, 0.021, 1e-4, 10
    one, infinity = torch.tensor(weight, dtype=torch.bfloat16), torch.tensor(torch.inf, dtype=torch.bfloat16)
    grid = [float(torch.nextafter(one, -infinity)), float(one), float(torch.nextafter(one, infinity))]
    kept, master = adam_steps(one, grad, rate, steps), adam_steps(torch.tensor(weight), grad, rate, steps)
    copies = [float(torch.tensor(value).bfloat16()) for value in master]
    canvas.numbers.update(grid=grid, kept=kept, master=master, copies=copies)
    across = lambda value: 60 + 240 * (value - grid[0]) / (grid[2] - grid[0])
    for value in grid:
        canvas.text(across(value), 44, f"{value:.9f}", at="center")
    rows = (("kept in bf16", PARAMETERS, kept), ("fp32 master", COLOURS["masters"], master),
            ("bf16 copy of the master", PARAMETERS, copies))  # fmt: skip
    for row, (name, fill, values) in enumerate(rows):
        y = 76 + row * 40.0
        canvas.text(40, y - 13, name)
        canvas.line((40, y), (320, y), colour=FAINT)
        for value in grid:
            canvas.line((across(value), y - 9), (across(value), y + 9))
        for value in dict.fromkeys(values):
            canvas.box(across(value) - 1.6, y - 6, 3.2, 12, fill, SOFT)
    note = (
        f"{steps} steps of Adam, lr = {rate:g}, g = {grad}. Each moves w by {master[0] - master[1]:.4f}. Neighbours in "
        f"bf16 are {grid[2] - grid[1]:.6f} apart here, and {rate:g} is less than half of that: a weight kept in bf16 "
        f"stays where it is. The master has moved by {master[0] - master[-1]:.4f}, and its copy to the next number."
    )
    return canvas.end(184, note)


def ring_panels() -> Canvas:
    """The ring all-reduce of the sources' example: start, first hop, reduce-scatter done, all-gather done."""
    canvas, world = Canvas("The ring: four ranks, eight gradients each"), 4
    starts = [torch.arange(1.0, 9.0) + offset for offset in (0.0, 1.0, 0.5, 1.5)]
    # Of every rank's chunks the values, and of how many ranks they are the sum.
    chunks = [[(chunk.tolist(), 1) for chunk in ring.cut(start, world)] for start in starts]
    hops = ring.simulate([start.clone() for start in starts], average=False)
    rounds = [hops[first : first + world] for first in range(0, len(hops), world)]
    titles = {0: "Start", 1: "After one hop", 3: "After reduce-scatter", 6: "After all-gather"}
    for number in range(len(rounds) + 1):
        if number in titles:
            place = list(titles).index(number)
            x, y = LEFT + (place % 2) * 170.0, 42 + (place // 2) * 128.0
            leaving = {(hop.rank, hop.sent_chunk) for hop in (*rounds, [])[number]}
            canvas.numbers[titles[number]] = [list(row) for row in chunks]
            canvas.text(x, y + 4, titles[number], 10, bold=True)
            for rank, row in enumerate(chunks):
                canvas.text(x, y + 25 + rank * 24, f"{rank}")
                for index, (values, count) in enumerate(row):
                    edge, label = ALERT if (rank, index) in leaving else FAINT, " ".join(f"{v:g}" for v in values)
                    canvas.box(x + 10 + index * 37.5, y + 12 + rank * 24, 35.5, 20, SUMS[count], edge, label, 7)
        before = [list(row) for row in chunks]
        for hop in (*rounds, [])[number]:
            count = before[hop.rank - 1][hop.received_chunk][1] + (hop.phase is ring.Phase.REDUCE_SCATTER)
            chunks[hop.rank][hop.received_chunk] = (hop.result, count)
    words = ("one rank's", "sum of 2", "sum of 3", "sum of all 4")
    canvas.legend(306, *zip(SUMS[1:], words, strict=True))
    canvas.box(14.5, 314.5, 8, 8, CARD, ALERT)
    canvas.text(27, 322, "leaves for the next rank in the next hop. A row is a rank.")
    return canvas.end(334)


def ten_parameters() -> Canvas:
    """The post's ten parameters, cut over four ranks as a whole, and within three buckets."""
    canvas, numels, world, scale = Canvas("Ten parameters, four ranks, cut in two ways"), TEN, 4, 5.5
    whole, buckets = (plan_layout(numels, world, limit, align=1) for limit in (sum(numels), 20))
    for slot in whole.slots:
        canvas.box(LEFT + slot.offset * scale, 34, slot.numel * scale, 18, CARD, SOFT, f"p{slot.index}", 8)
    first, part = buckets.buckets[0], whole.shard_numel
    overlaps = [max(0, min((rank + 1) * part, first.numel) - rank * part) for rank in range(world)]
    canvas.numbers["first bucket, cut as a whole"] = overlaps
    shares = " and ".join(f"{overlap} to rank {rank}" for rank, overlap in enumerate(overlaps) if overlap)
    told = {
        "Cut as a whole": f"Of the first bucket's {first.numel}, {shares}.",
        "Cut bucket by bucket": f"Of each bucket {first.shard_numel} to every rank: one balanced reduce-scatter.",
    }
    for row, ((title, words), layout) in enumerate(zip(told.items(), (whole, buckets), strict=True)):
        top = 82 + row * 78.0
        canvas.text(LEFT, top - 8, f"{title}: the owner of each part", 10, bold=True)
        for bucket in layout.buckets:
            for rank in range(world):
                x, width = LEFT + bucket.part_start(rank) * scale, bucket.shard_numel * scale
                canvas.box(x, top, width, 18, RANKS[rank], CARD, f"{rank}", 8)
        for bucket in buckets.buckets:
            canvas.box(LEFT + bucket.offset * scale, top - 1, bucket.numel * scale, 20, "none", INK)
        owns = [(piece.slot.index, piece.numel, piece.slot.numel) for piece in layout.fragments(2)]
        canvas.numbers[title] = owns
        names = ", ".join(f"p{index}" if mine == all_ else f"{mine}/{all_} p{index}" for index, mine, all_ in owns)
        canvas.text(LEFT, top + 31, f"Rank 2 owns {names}.")
        canvas.text(LEFT, top + 43, words)
    return canvas.end(222, "Frames: the three buckets in which gradients leave. deepzero cuts in the second way.")


TEN = (10, 4, 6, 13, 4, 3, 10, 3, 5, 2)
"""Elements; of the whole, the third of four ranks owns p4 and p5, and parts of p3 and p6, as in the post."""
RANKS = ("#eef1f4", "#d9dee4", "#f7c9a8", "#bcc5cf")
"""Four ranks; the third one is followed."""


# ---- the life of a bucket, and of a parameter ------------------------------------------------------------------------


def rehearsed(*overrides: str, ranks: int = 2) -> DryRunResult:
    """One step of ``python train.py`` with these words, rehearsed as rank 0 of so many; time counts operators."""
    run = with_fallback_batch(compose(overrides))
    return dry_run(program_of(run, ranks), ClusterShape(ranks, ranks, "cpu"))


BUCKET_STEPS = (
    (SUMS[2], "A gradient is ready: taken, .grad = None", UnreducedGradients.take),
    (SUMS[2], "The bucket is complete: take a buffer", BucketReducer.acquire),
    (SUMS[2], "Gradients are copied into it, and freed", UnreducedGradients.fill),
    (CARD, "Each part is sent to its owner", BucketReducer.launch),
    (GRADIENTS, "All have arrived: fp32 sum, in rank order", BucketReducer._finish),
    (GRADIENTS, "The owner's part is in grad_S", OptimizerShard.grad_output),
)  # fmt: skip


def bucket_life() -> Canvas:
    """A gradient bucket of stage 2: what happens to it, who does it, and two of them in flight."""
    canvas = Canvas("A bucket of gradients, from autograd to its owners")
    for row, (fill, words, who) in enumerate(BUCKET_STEPS):
        y = 34 + row * 31.0
        canvas.box(LEFT, y, 332, 25, fill, SOFT, corner=4)
        canvas.text(22, y + 10.5, words)
        canvas.text(338, y + 21, who.__qualname__, 8, INK, at="right")
        if row:
            canvas.arrow((28, y - 6), (28, y))
    events, flights = rehearsed("zero.stage=2").events, dict[str, list[float]]()
    ready = [event.at for event in events if event.what == "gradient_ready"]
    for event in events:
        if event.kind == "gradients.reduce_scatter":
            flights.setdefault(event.where, []).append(event.at)
    canvas.numbers.update({"ready": ready, "launched, summed": flights})
    begin, end = min(ready), max(at for flight in flights.values() for at in flight)
    across = lambda at: 70 + 276 * (at - begin) / (end - begin)
    canvas.text(LEFT, 236, "Stage 2, the backward pass of the default run", 10, bold=True)
    before = -1.0
    for row, (where, (launched, summed)) in enumerate(flights.items()):
        y = 246 + row * 18.0
        canvas.text(LEFT, y + 9, where)
        for at in (at for at in ready if before < at <= launched):
            canvas.box(across(at) - 1, y, 2, 11, GRADIENTS)
        canvas.box(across(launched), y, across(summed) - across(launched), 11, CARD, SOFT)
        before = launched
    canvas.legend(330, (GRADIENTS, "a gradient is ready"), (CARD, "in flight, until the sum is made"), step=124)
    words = "Colours of the steps: on this rank alone, on the wire, with the owner. There are two buffers: "
    return canvas.end(346, f"{words}the third bucket is filled when the first one's sum is made.")


CALLERS = (
    (PartitionedBucket.launch, Coordinator.fetch_sub_module, ModuleHooks._pre_forward_hook, ModuleHooks.unpack),
    (PartitionedBucket.wait, Coordinator.fetch_sub_module, ModuleHooks._pre_forward_hook, ModuleHooks.unpack),
    (PartitionedBucket.release, Coordinator.release_sub_module, Coordinator.end_passes),
)
"""Of each change of state what makes it, then who calls that, then who calls the caller."""


def parameter_states() -> Canvas:
    """ZeroParamStatus: the three states of a parameter, and who calls what between them."""
    canvas = Canvas("The states of a parameter in stage 3")
    canvas.numbers["states"] = [status.name for status in ZeroParamStatus]
    whole = "the shard, and all numel elements"
    notes = ("this rank's part of its bucket", "the shard, and a buffer being filled", whole)
    for row, (status, words) in enumerate(zip(ZeroParamStatus, notes, strict=True)):
        y = 34 + row * 88.0
        canvas.box(LEFT, y, 178, 34, (CARD, GATHERED, PARAMETERS)[row], SOFT, corner=6)
        canvas.text(103, y + 15, status.name, 10, at="center", bold=True)
        canvas.text(103, y + 28, words, 8.5, at="center")
    verbs = [[who.__qualname__ for who in several] for several in CALLERS]
    for row, (verb, *callers) in enumerate(verbs):
        x, y = ((68, 84), (68, 172), (200, 52))[row]
        canvas.text(x, y, verb.split(".")[1] + "()", bold=True)
        for line, caller in enumerate(callers):
            words = caller if row < 2 else caller.split(".")[1]
            canvas.text(x, y + 10.5 * (line + 1), ("in " if line == 0 else "from ") + words, 8, SOFT)
        if row < 2:
            canvas.arrow((58, y - 16), (58, y + 38))
    canvas.line((192, 227), (338, 227), (338, 38), (198, 38))
    canvas.arrow((198, 38), (192, 38))
    return canvas.end(264, (
        "fetch_sub_module launches a module's buckets, then those of the next modules, and waits for its own. All "
        "parameters of a bucket change state together. A use of one that is not AVAILABLE is seen by its class, "
        "PartitionedParameter: in a pass it fetches, elsewhere it raises."
    ))  # fmt: skip


SMALL_BUCKETS = ("zero.reduce_bucket_size=131072", "zero.stage3_max_live_parameters=1000000000")


def fetch_timeline() -> Canvas:
    """Stage 3's step along its plan: fetch, prefetch, compute, release, bucket by bucket."""
    canvas, rehearsal = Canvas("Stage 3: when each bucket is here"), rehearsed("zero.stage=3", *SMALL_BUCKETS)
    gathers = [event for event in rehearsal.events if event.what == "release" or event.kind in (FORWARD, BACKWARD)]
    times: dict[str, list[list[float]]] = {}  # of each bucket, each time that it was gathered
    for event in gathers:
        if event.what == "launch":
            times.setdefault(event.where, []).append([event.at])
        else:
            times[event.where][-1].append(event.at)
    canvas.numbers["launched, waited for, released"] = times
    end, bottom = gathers[-1].at, 38.0 + 15 * len(times)
    across = lambda at: 66 + 280 * at / end
    turn = across(max(event.at for event in gathers if event.kind == FORWARD))
    canvas.line((turn, 34), (turn, bottom), dash=True)
    for row, (where, each) in enumerate(times.items()):
        y = 38 + 15.0 * row
        canvas.text(LEFT, y + 9, where)
        for launched, waited, released in each:
            canvas.box(across(launched), y, across(waited) - across(launched), 11, GATHERED, SOFT)
            canvas.box(across(waited), y, across(released) - across(waited), 11, PARAMETERS, SOFT)
    canvas.line((66, bottom), (RIGHT, bottom))
    for begin, stop, words in ((66, turn, "forward"), (turn, RIGHT, "backward")):
        canvas.text((begin + stop) / 2, bottom + 11, words, at="center")
    canvas.legend(bottom + 28, (GATHERED, "on its way"), (PARAMETERS, "here, until it is released"))
    first, last = next(iter(times)), list(times)[-1]
    return canvas.end(bottom + 44, (
        f"The plan of the default model, cut into {len(times)} buckets, without a limit of what is gathered. The next "
        f"bucket travels while one computes. {first.capitalize()} has the embedding, which is also the head, and comes "
        f"twice in the forward pass; {last} stays for the backward pass."
    ))  # fmt: skip


def program(folder: str) -> None:
    """One rank of two real runs, three steps each of the default model; rank 0 writes the last step's events."""
    process_group.init_distributed("gloo", timeout_seconds=120)
    for stage in (2, 3):
        run = with_fallback_batch(compose([f"zero.stage={stage}"]))
        engine, *_ = deepzero.initialize(model=build_model(run), config=run.engine, total_steps=3)
        ids, ledger = torch.zeros(engine.batch.micro_batch, run.model.block_size, dtype=torch.long), engine.ledger
        ledger.trace = True
        for _ in range(3):
            ledger.events.clear()
            engine.backward(engine(ids, ids))
            engine.step()
        memory = engine.report()["memory"].items()
        held = {name: entry["measured"] for name, entry in memory if entry["predicted"] is not None}
        events = [(e.what, e.kind, e.where, e.sent.elements if e.sent else 0) for e in ledger.events]
        if engine.global_rank == 0:
            Path(folder, f"{stage}.json").write_text(json.dumps({"held": held, "events": events}), encoding="utf-8")
        engine.destroy()
    process_group.shutdown()


def gathered_memory() -> Canvas:
    """Two real runs: what of the parameters a rank holds over a step of stage 3, and of stage 2."""
    canvas, itemsize = Canvas("Parameters on one rank over a step, two real runs"), 2
    environment = {"DEEPZERO_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    with TemporaryDirectory() as folder:
        launch(__file__, "program", (folder,), nproc=2, environment=environment)
        runs = [json.loads(Path(folder, f"{stage}.json").read_text(encoding="utf-8")) for stage in (2, 3)]
    (whole, shard), gathered, sizes_of = (run["held"]["parameters"] for run in runs), [0], dict[str, int]()
    totals = [sum(run["held"].values()) for run in runs]
    marks: dict[str, int] = {}
    for what, kind, where, elements in runs[1]["events"]:
        change = 0
        if what == "launch" and kind in (FORWARD, BACKWARD):
            change = sizes_of[where] = 2 * elements * itemsize  # of two ranks each sends its half
        elif what == "release":
            change = -sizes_of[where]
        marks.setdefault(what, len(gathered))
        gathered.append(gathered[-1] + change)
    canvas.numbers.update(whole=whole, shard=shard, gathered=gathered, totals=totals)
    left, bottom = 60.0, 196.0
    across = lambda event: left + (RIGHT - left) * event / len(gathered)
    up = lambda size: bottom - 140 * size / whole
    canvas.box(left, up(shard), RIGHT - left, bottom - up(shard), PARAMETERS)
    begin = 0
    for size, same in itertools.groupby(gathered):
        end = begin + len(list(same))
        canvas.box(across(begin), up(shard + size), across(end) - across(begin), up(0) - up(size), GATHERED)
        begin = end
    canvas.line((left, up(whole)), (RIGHT, up(whole)), colour=INK, width=1.5)
    canvas.text(RIGHT, up(whole) - 5, f"stage 2: all parameters, {short_bytes(whole)}", at="right")
    canvas.text(left + 6, bottom - 8, f"stage 3: this rank's shard, {short_bytes(shard)}")
    for size, words in ((whole, short_bytes(whole)), (shard, short_bytes(shard)), (0, "0 B")):
        canvas.text(left - 4, up(size) + 3, words, 8.5, at="right")
    turns = {"forward": (0, marks["gradient_ready"]), "backward": (marks["gradient_ready"], marks["boundary"])}
    for words, (begin, end) in {**turns, "step": (marks["boundary"], len(gathered))}.items():
        canvas.line((across(end), bottom), (across(end), bottom + 5))
        canvas.text(across((begin + end) / 2), bottom + 12, words, at="center")
    canvas.legend(bottom + 30, (PARAMETERS, "the shard"), (GATHERED, f"gathered, at most {short_bytes(max(gathered))}"))
    return canvas.end(bottom + 46, (
        f"The default run on two ranks, event by event. With gradients, masters, moments and buffers a rank holds "
        f"{short_bytes(totals[0])} in stage 2 and {short_bytes(totals[1])} in stage 3."
    ))  # fmt: skip


# ---- on the wire -----------------------------------------------------------------------------------------------------


def volume() -> Canvas:
    """What one rank sends in a step, by stage and number of micro-batches, in passes over all parameters."""
    canvas, world, numel = Canvas("Sent by one rank in a step, in units of Ψ(W−1)/W"), 8, 1 << 20
    nodes, layouts, unit = Nodes(world, world), [plan_layout([numel], world, numel)], numel * (world - 1) / world
    canvas.legend(39, (GRADIENTS, "gradients reduced"), (PARAMETERS, "parameters gathered"), step=124)
    for row, (stage, whole_reduce) in enumerate(((0, True), (1, False), (1, True), (2, False), (3, False))):
        y = 54 + row * 39.0
        canvas.text(LEFT, y + 10, f"Stage {stage}", 10, bold=True)
        canvas.text(LEFT, y + 23, "all-reduce" if stage and whole_reduce else "", 8.5)
        for line, micro_batches in enumerate((1, 4)):
            form = replace(sizes(min(stage, 2)), micro_batches=micro_batches, whole_reduce=whole_reduce)
            sent = {kind: traffic.elements / unit for kind, traffic in predicted_traffic(layouts, nodes, form).items()}
            # Stage 3's all-gathers are as large as those that publish in stages 1 and 2: two in each micro-batch.
            gathered = sent.get(ALL_GATHER, 0) * (2 * micro_batches if stage == 3 else 1)
            reduced = sum(times for kind, times in sent.items() if kind.startswith("gradients"))
            canvas.numbers[f"stage {stage}, {whole_reduce=}, {micro_batches=}"] = [reduced, gathered]
            for each in range(round(reduced + gathered)):
                fill = GRADIENTS if each < reduced else PARAMETERS
                canvas.box(76 + 16 * each, y + 15 * line, 15, 12, fill)
            canvas.text(81 + 16 * (reduced + gathered), y + 15 * line + 9.5, f"{reduced + gathered:g}")
    return canvas.end(262, "Upper bar: one micro-batch to a step. Lower bar: four.")


def qgz() -> Canvas:
    """A bucket's way under qgZ over two nodes of two ranks."""
    canvas, nodes, numel = Canvas("qgZ: two nodes of two ranks, one bucket"), Nodes(4, 2), 1 << 20
    layouts = [plan_layout([numel], nodes.world_size, numel)]
    form = Format(4, 2048)
    ways = [reduction_traffic(layouts, nodes, form, 2, lambda *_, exact=exact: exact) for exact in (False, True)]
    leaving, whole = (sum(traffic.between_node_bytes for traffic in way.values()) / numel for way in ways)
    each = {kind: traffic.bytes / numel for kind, traffic in ways[0].items()}
    inside, across = split_ranks(nodes.world_size, nodes.per_node)
    canvas.numbers.update(bytes_per_element=each, between_nodes=[leaving, whole], inside=inside, across=across)
    peers = {rank: group for group in across for rank in group}
    panels: list[tuple[str, Callable[[int], Sequence[int]], int, Sequence[tuple[int, ...]], str]] = [
        ("Every rank has gradients for all four owners", lambda _: range(4), 1, inside,
         f"inside the node, 4 bits: {each[INSIDE]:.3f} bytes an element"),
        ("Sums of a node, for the owners of the same place", lambda rank: peers[rank], 2, across,
         f"between nodes, 4 bits: {each[BETWEEN]:.3f} bytes an element"),
        ("Each owner has the sum of all four", lambda rank: [rank], 4, [], ""),
    ]  # fmt: skip
    place = lambda rank: 22.0 + (rank // 2) * 170 + (rank % 2) * 78
    for row, (title, parts, count, groups, words) in enumerate(panels):
        top = 34 + row * 84.0
        canvas.text(LEFT, top + 8, title)
        for node in range(nodes.count):
            canvas.box(LEFT + node * 170, top + 14, 162, 32, CARD, SOFT, corner=5)
        for rank in range(nodes.world_size):
            canvas.box(place(rank), top + 19, 68, 13, CARD, FAINT)
            for part in parts(rank):
                canvas.box(place(rank) + part * 17, top + 19, 17, 13, SUMS[count], SOFT, f"{part}", 8)
            canvas.text(place(rank) + 34, top + 42, f"rank {rank}", 8, SOFT, at="center")
        for number, (first, second) in enumerate(groups):
            begin, end, y = place(first) + 34, place(second) + 34, top + 54 + (5 * number if groups is across else 0)
            canvas.arrow((begin, y), (end, y), ALERT)
            canvas.arrow((end, y), (begin, y), ALERT)
        canvas.text(180, top + 72, words, at="center")
    note = f"Between nodes a rank sends {leaving:.3f} bytes an element; exact sums of 2-byte gradients send {whole:g}."
    return canvas.end(264, f"{note} An element is rounded at most twice; sums are in fp32.")


def bandwidths() -> Canvas:
    """How fast a rank reaches its memory, its node, its host, and other nodes, to scale."""
    canvas = Canvas("Bytes a second for one GPU, one direction, to scale")
    titles = ("H100, NVLink 4, InfiniBand HDR", "Azure NC24r v3 (V100)", "DGX-2H (V100)")
    links = (
        ("its memory", "memory_bandwidth", RANKS[3]), ("inside the node", "inside_bandwidth", PARAMETERS),
        ("host memory", "host_bandwidth", COLOURS["masters"]), ("other nodes", "node_bandwidth", GRADIENTS),
    )  # fmt: skip
    longest = max(cluster.memory_bandwidth for cluster in PRESETS.values())
    for row, (cluster, title) in enumerate(zip(PRESETS.values(), titles, strict=True)):
        top, speeds = 38 + row * 66.0, canvas.numbers.setdefault(cluster.name, {})
        canvas.text(LEFT, top + 4, title, bold=True)
        for line, (words, field, fill) in enumerate(links):
            # What leaves a node is shared by its ranks.
            speed = getattr(cluster, field) / (cluster.ranks_per_node if field == "node_bandwidth" else 1)
            y, width, speeds[field] = top + 9 + 12 * line, max(0.5, 205 * speed / longest), speed
            canvas.text(86, y + 8.5, words, 8.5, at="right")
            canvas.box(90, y, width, 9.5, fill)
            canvas.text(94 + width, y + 8.5, f"{speed / 1e9:g} GB/s", 8.5)
    fast = canvas.numbers["h100"]
    factor = fast["inside_bandwidth"] / fast["node_bandwidth"]
    return canvas.end(244, f"H100: NVLink is {factor:g} times its port to other nodes, one direction each.")


# ---- the command -----------------------------------------------------------------------------------------------------

FIGURES: dict[str, Callable[[], Canvas]] = {
    "memory_16_bytes": memory_16_bytes, "bf16_grid": bf16_grid, "stages": stages, "four_weights": four_weights,
    "ring": ring_panels, "ten_parameters": ten_parameters, "bucket_life": bucket_life,
    "parameter_states": parameter_states, "fetch_timeline": fetch_timeline, "gathered_memory": gathered_memory,
    "volume": volume, "qgz": qgz, "bandwidths": bandwidths,
}  # fmt: skip
"""Name of the file → what draws it."""


def problems(name: str) -> list[str]:
    """Why ``docs/figures/NAME.svg`` is not current, a line each."""
    path = FOLDER / f"{name}.svg"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    found = re.search(r"<dc:description>(.*?)</dc:description>", text, re.DOTALL)
    drawn_here = found and f"<dc:title>{COMMAND} {name}</dc:title>" in text
    before = json.loads(unescape(found[1])) if drawn_here else {}
    now = json.loads(json.dumps(FIGURES[name]().facts()))
    if before == now:
        return []
    there, numbers = before.get("numbers", {}), now["numbers"]
    keys = sorted(key for key in {*there, *numbers} if there.get(key) != numbers.get(key))
    changed = [f"{key}: {there.get(key)} in the file, {numbers.get(key)} in the code" for key in keys]
    return changed or ["it is drawn in another way now"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw, or check. Returns the exit status."""
    parser = argparse.ArgumentParser(description="The figures of the book.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(FIGURES)}; none: all")
    parser.add_argument("--check", action="store_true", help="draw nothing; exit 1 where a file is not current")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in FIGURES]:
        parser.error(f"no figure {', '.join(unknown)}; there are {', '.join(FIGURES)}")
    names = options.names or list(FIGURES)
    if not options.check:
        for name in names:
            FIGURES[name]().save(FOLDER / f"{name}.svg")
        return 0
    found = [(name, problem) for name in names for problem in problems(name)]
    for name, problem in found:
        print(f"docs/figures/{name}.svg is not current, {COMMAND} {name} draws it: {problem}")
    return 1 if found else 0


if __name__ == "__main__":
    exit_with(main)
