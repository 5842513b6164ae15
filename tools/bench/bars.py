"""What the rounds amount to: one summary per variant, the floor, and the limits deepzero is held to.

A peer counts with its fastest variant in the speed bars and with its *leanest* variant in the memory bars, so a peer
may win on both although no single configuration of it does. deepzero counts with one variant, its fastest, in all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tools.bench.contenders import Contender, Variant
from tools.bench.launch import Outcome
from tools.bench.stats import median

REDUCE_WAYS = ("reduce_all_to_all", "reduce_all_to_all_pieces", "reduce_scatter")
GATHER_WAYS = ("gather", "gather_pieces")

SPEED_LIMITS: dict[int, dict[str, float]] = {
    1: {"deepspeed1": 0.60, "zro": 0.85, "ddp": 0.90, "floor": 1.20},
    2: {"deepspeed2": 0.60, "zro": 0.85, "ddp": 0.90, "floor": 1.20},
    3: {"deepspeed3": 0.62, "fsdp2": 0.70, "floor": 1.25},
}
"""By stage: largest step time, relative to a peer or to the floor."""


ALONE_LIMIT = 1.05
"""Of stage 3 on one rank, over a plain loop."""


@dataclass(frozen=True)
class Measured:
    """One variant over all of its rounds; times in seconds per step, memory in bytes of the largest rank."""

    contender: Contender
    variant: Variant
    median_seconds: float
    best_seconds: float
    cpu_seconds: float
    """Processor time of one step of the busiest rank, all its threads together."""
    samples: int
    peak_bytes: float
    """Median over rounds, as the two below."""
    build_peak_bytes: float
    step_peak_bytes: float
    losses: tuple[float, ...]
    """Of the first round."""
    idle_bytes: float | None = None
    """Peak of the same program with a tiny model; None where that was not measured."""

    @property
    def model_bytes(self) -> float | None:
        """What the model itself costs: the peak without the interpreter, torch and the contender's own packages."""
        return None if self.idle_bytes is None else self.peak_bytes - self.idle_bytes


@dataclass(frozen=True)
class Floor:
    """Seconds of each part, median and best, and their sums."""

    median_parts: Mapping[str, float]
    best_parts: Mapping[str, float]

    def seconds(self, stage: int, best: bool = False) -> float:
        """The floor of a stage: forward and backward + Adam + the fastest way to do its communication."""
        parts = self.best_parts if best else self.median_parts
        scattered = min(parts[way] for way in REDUCE_WAYS) + min(parts[way] for way in GATHER_WAYS)
        if stage == 0:
            return parts["forward_backward"] + parts["adam_full"] + min(parts["all_reduce"], scattered)
        again = min(parts[way] for way in GATHER_WAYS) if stage == 3 else 0.0
        return parts["forward_backward"] + parts["adam_shard"] + scattered + again


_MEMORY_MEASURES: dict[str, Callable[[Measured], Any]] = {
    "peak memory": lambda row: row.peak_bytes,
    "memory of the model": lambda row: row.model_bytes,
}


@dataclass(frozen=True)
class Bar:
    """One limit. ``value`` is None where a side of the comparison was not measured."""

    name: str
    against: str
    value: float | None
    limit: float

    @property
    def verdict(self) -> str:
        """pass, FAIL, or not measured."""
        if self.value is None:
            return "not measured"
        return "pass" if self.value <= self.limit else "FAIL"


def summarize(
    contender: Contender, variant: Variant, outcomes: Sequence[Outcome], idle: float | None
) -> Measured | None:
    """Pool the rounds that worked; None when none did. ``idle``: the peak bytes with a tiny model, if known."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    if not good or "step" not in good[0].seconds:
        return None
    samples = [second for outcome in good for second in outcome.seconds["step"]]
    return Measured(
        contender=contender,
        variant=variant,
        median_seconds=median(samples),
        best_seconds=min(samples),
        cpu_seconds=median([o.cpu_seconds["step"] for o in good]),
        samples=len(samples),
        peak_bytes=median([o.peak_bytes for o in good]),
        build_peak_bytes=median([o.build_peak_bytes for o in good]),
        step_peak_bytes=median([o.step_peak_bytes for o in good]),
        losses=tuple(good[0].losses),
        idle_bytes=idle,
    )


def floor_of(outcomes: Sequence[Outcome]) -> Floor | None:
    """Pool the floor's rounds part by part; None when none worked."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    if not good:
        return None
    pooled = {part: [s for o in good for s in o.seconds[part]] for part in good[0].seconds}
    return Floor({p: median(s) for p, s in pooled.items()}, {p: min(s) for p, s in pooled.items()})


def fastest(rows: Iterable[Measured], name: str) -> Measured | None:
    """The variant of contender ``name`` with the lowest median, if any was measured."""
    return min((r for r in rows if r.contender.name == name), key=lambda r: r.median_seconds, default=None)


def compute_bars(rows: Sequence[Measured], floor: Floor | None) -> list[Bar]:
    """All bars of stages 1, 2 and 3, in the order of the table."""
    bars: list[Bar] = []
    for stage, limits in SPEED_LIMITS.items():
        ours = fastest(rows, f"deepzero{stage}")
        peers = tuple(name for name in limits if name != "floor")
        for peer_name in peers:
            peer = fastest(rows, peer_name)
            value = ours.median_seconds / peer.median_seconds if ours and peer else None
            bars.append(Bar(f"stage {stage} step time", _label(peer, peer_name), value, limits[peer_name]))
        value = ours.median_seconds / floor.seconds(stage) if ours and floor else None
        bars.append(Bar(f"stage {stage} step time", "floor", value, limits["floor"]))
        alone = fastest(rows, "plain")
        if alone is not None and stage == 3:
            value = ours.median_seconds / alone.median_seconds if ours else None
            bars.append(Bar(f"stage {stage} step time, one rank", _label(alone, ""), value, ALONE_LIMIT))
        bars.extend(_memory_bars(rows, ours, stage, peers))
    return bars


def _memory_bars(rows: Sequence[Measured], ours: Measured | None, stage: int, peers: tuple[str, ...]) -> list[Bar]:
    bars: list[Bar] = []
    others = [row for row in rows if row.contender.name in peers]
    for title, bytes_of in _MEMORY_MEASURES.items():
        leanest = min((row for row in others if bytes_of(row) is not None), key=bytes_of, default=None)
        mine, theirs = (bytes_of(row) if row else None for row in (ours, leanest))
        value = mine / theirs if mine is not None and theirs is not None and theirs > 0 else None
        bars.append(Bar(f"stage {stage} {title}", "leanest: " + _label(leanest, "no peer"), value, 1.0))
    return bars


def _label(row: Measured | None, otherwise: str) -> str:
    return f"{row.contender.name} ({row.variant.name})" if row else otherwise


def loss_disagreement(rows: Sequence[Measured], steps: int) -> tuple[float, int, str]:
    """How far the losses of the first ``steps`` steps lie from the middle of all variants.

    Returns:
        The largest relative distance, the step where it is, and the variant that has it.
    """
    worst = (0.0, 0, "nobody")
    for step in range(min([steps, *(len(row.losses) for row in rows)])):
        middle = median([row.losses[step] for row in rows])
        for row in rows:
            distance = abs(row.losses[step] - middle) / abs(middle)
            if distance > worst[0]:
                worst = (distance, step, _label(row, ""))
    return worst
