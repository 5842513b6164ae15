"""DeepSpeed's schedules as pure curves, number by number: WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle.

DeepSpeed counts ``last_batch_iteration``: -1 after construction, 0 after the first ``step()``. Its engine calls
``step()`` after the optimizer, so the rate of optimizer step k is the schedule's value at iteration ``k - 1``, and step
0 has the value that the constructor wrote. In the names used here, ``done = iteration + 1``:

==================  ===================================================  ========================================
curve               optimizer step 0                                     optimizer step k > 0, at iteration k - 1
==================  ===================================================  ========================================
``WarmupLR``        ``warmup_min_lr``                                    up, then level
``WarmupDecayLR``   ``warmup_min_lr``                                    up, then a straight line to 0
``WarmupCosineLR``  0, whatever ``warmup_min_ratio`` says                up, then half a cosine to the floor
``OneCycle``        ``cycle_min_lr``, first beta ``cycle_min_mom``       up, down, then decay (first beta: down, up)
==================  ===================================================  ========================================

So the warm-ups start *twice* at the bottom (at iteration 0 the logarithm and the line are both 0), and with the default
``warmup_min_lr`` of 0 the first two optimizer steps move no parameter. That is what scripts tuned under DeepSpeed have
seen, and what they get here.

Where DeepSpeed warns and goes on (an unknown ``warmup_type``), these raise. ``LRRangeTest`` is left out.

Sources: DeepSpeed's ``runtime/lr_schedules.py`` for names, defaults and values, against which they are tested; the one
cycle is Smith, "A disciplined approach to neural network hyper-parameters: Part 1", 2018.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from deepzero.config.strict import ConfigError, require

PerGroup = float | tuple[float, ...]
"""One number for all parameter groups, or one for each."""

BETA2 = 0.99
"""While OneCycle moves the first beta of Adam, DeepSpeed sets the second one to this."""


def _per_group(value: PerGroup, groups: int, name: str) -> list[float]:
    if not isinstance(value, tuple):
        return [value] * groups
    rule = f"has {len(value)} values, and the optimizer has {groups} parameter groups"
    require(len(value) == groups, f"scheduler.params.{name}", list(value), rule)
    return list(value)


def _warmup(kind: str, iteration: int, steps: int) -> float:
    """From 0 at iteration 0 to 1 at ``steps``: by the logarithm (already 1 at ``steps - 1``) or by a straight line."""
    return math.log(iteration + 1) / math.log(steps) if kind == "log" else iteration / steps


def _check_warmup(steps: int) -> None:
    require(steps >= 1, "scheduler.params.warmup_num_steps", steps, "must be at least 1")


def _check_total(steps: int | None) -> None:
    require(steps is None or steps >= 1, "scheduler.params.total_num_steps", steps, "must be at least 1")


@dataclass(frozen=True)
class WarmupLR:
    """Up from ``warmup_min_lr`` to ``warmup_max_lr``, then level."""

    warmup_min_lr: PerGroup = 0.0
    """Where the warm-up starts."""

    warmup_max_lr: PerGroup | None = None
    """Where it ends; None: the optimizer's own learning rate."""

    warmup_num_steps: int = 1000
    """Iterations of the warm-up; 1 counts as 2."""

    warmup_type: Literal["log", "linear"] = "log"
    """Fast at first, or even."""

    def __post_init__(self) -> None:
        _check_warmup(self.warmup_num_steps)

    def lrs(self, done: int, base_lrs: Sequence[float]) -> list[float]:
        """Between the two rates of each group."""
        groups, iteration, steps = len(base_lrs), done - 1, max(2, self.warmup_num_steps)
        low = _per_group(self.warmup_min_lr, groups, "warmup_min_lr")
        top = base_lrs if self.warmup_max_lr is None else _per_group(self.warmup_max_lr, groups, "warmup_max_lr")
        if iteration < 0:
            return low
        part = _warmup(self.warmup_type, iteration, steps) if iteration < steps else 1.0
        return [a + (b - a) * part for a, b in zip(low, top, strict=True)]


@dataclass(frozen=True)
class WarmupDecayLR:
    """Up as in :class:`WarmupLR`, then a straight line that ends at ``warmup_min_lr`` when all steps are done."""

    total_num_steps: int | None = None
    """Length of the schedule in optimizer steps; None: the length of the run."""

    warmup_min_lr: PerGroup = 0.0
    """Where the warm-up starts and the decay ends."""

    warmup_max_lr: PerGroup = 0.001
    """The highest rate."""

    warmup_num_steps: int = 1000
    """Iterations of the warm-up; 1 counts as 2."""

    warmup_type: Literal["log", "linear"] = "log"
    """Fast at first, or even."""

    def __post_init__(self) -> None:
        _check_warmup(self.warmup_num_steps)
        _check_total(self.total_num_steps)

    def lrs(self, done: int, base_lrs: Sequence[float]) -> list[float]:
        """Between the two rates of each group."""
        groups, iteration, steps = len(base_lrs), done - 1, max(2, self.warmup_num_steps)
        low = _per_group(self.warmup_min_lr, groups, "warmup_min_lr")
        top = _per_group(self.warmup_max_lr, groups, "warmup_max_lr")
        if iteration < 0:
            return low
        if iteration < steps:
            part = _warmup(self.warmup_type, iteration, steps)
        else:
            total = _known_total(self.total_num_steps)
            part = max(0.0, (total - iteration) / max(1.0, total - steps))
        return [a + (b - a) * part for a, b in zip(low, top, strict=True)]


@dataclass(frozen=True)
class WarmupCosineLR:
    """The optimizer's own rate times a warm-up and half a cosine."""

    total_num_steps: int | None = None
    """Length of the schedule in optimizer steps; None: the length of the run."""

    warmup_min_ratio: float = 0.0
    """Where the warm-up starts, as a part of the full rate."""

    warmup_num_steps: int = 1000
    """Iterations of the warm-up; 1 counts as 2."""

    cos_min_ratio: float = 0.0001
    """Where the cosine ends and stays, as a part of the full rate."""

    warmup_type: Literal["log", "linear"] = "log"
    """Fast at first, or even."""

    def __post_init__(self) -> None:
        _check_warmup(self.warmup_num_steps)
        _check_total(self.total_num_steps)

    def lrs(self, done: int, base_lrs: Sequence[float]) -> list[float]:
        """``base_lrs`` times one factor."""
        iteration, steps = done - 1, max(2, self.warmup_num_steps)
        if iteration < 0:
            factor = 0.0
        elif iteration < steps:
            part = _warmup(self.warmup_type, iteration, steps)
            factor = self.warmup_min_ratio + (1.0 - self.warmup_min_ratio) * part
        else:
            total = _known_total(self.total_num_steps)
            progress = min(1.0, (iteration - steps + 1) / max(1, total - steps))
            cosine = (1.0 + math.cos(math.pi * progress)) / 2.0
            factor = max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * cosine)
        return [lr * factor for lr in base_lrs]


@dataclass(frozen=True)
class OneCycle:
    """One climb and one descent between two rates, then a slow decay; Adam's first beta moves the other way.

    ``cycle_min_lr`` and ``cycle_max_lr`` have no default in DeepSpeed, and none here.
    """

    cycle_min_lr: PerGroup
    """The rate at both ends of the cycle."""

    cycle_max_lr: PerGroup
    """The rate in the middle."""

    decay_lr_rate: float = 0.0
    """After the cycle the rate is ``cycle_min_lr / (1 + decay_lr_rate * x)``, x counted in ``decay_step_size``."""

    cycle_first_step_size: int = 2000
    """Iterations up."""

    cycle_second_step_size: int | None = None
    """Iterations down; None: as many as up."""

    cycle_first_stair_count: int = 0
    """Climb in so many stairs; 0: smoothly."""

    cycle_second_stair_count: int | None = None
    """Descend in so many stairs; None: as many as on the way up."""

    decay_step_size: float = 0
    """Iterations of one unit of decay; 0: no decay."""

    cycle_momentum: bool | None = None
    """Move the first beta too; None: if the optimizer has betas."""

    cycle_min_mom: PerGroup = 0.8
    """The first beta in the middle of the cycle, and at optimizer step 0."""

    cycle_max_mom: PerGroup = 0.9
    """The first beta at both ends of the cycle."""

    decay_mom_rate: float = 0.0
    """After the cycle the first beta is ``cycle_max_mom * (1 + decay_mom_rate * x)``."""

    def __post_init__(self) -> None:
        up, down = self.cycle_first_step_size, self.cycle_second_step_size
        require(up >= 1, "scheduler.params.cycle_first_step_size", up, "must be at least 1")
        require(down is None or down >= 0, "scheduler.params.cycle_second_step_size", down, "must not be negative")
        for name in ("cycle_first_stair_count", "cycle_second_stair_count", "decay_step_size"):
            value = getattr(self, name)
            require(value is None or value >= 0, f"scheduler.params.{name}", value, "must not be negative")

    def for_optimizer(self, optimizer: torch.optim.Optimizer) -> OneCycle:
        """Decide about the betas, now that the optimizer is known.

        Returns:
            The same curve with ``cycle_momentum`` true or false.

        Raises:
            ConfigError: settings for betas that nobody would read.
        """
        has_betas = "betas" in optimizer.defaults
        cycling = has_betas if self.cycle_momentum is None else self.cycle_momentum
        names = ("cycle_min_mom", "cycle_max_mom", "decay_mom_rate")
        asked = [f.name for f in dataclasses.fields(self) if f.name in names and getattr(self, f.name) != f.default]
        if cycling and not has_betas:
            raise ConfigError(
                "scheduler.params.cycle_momentum=True: OneCycle moves the betas of an Adam, and "
                f"{type(optimizer).__name__} has none; leave cycle_momentum out"
            )
        if asked and not cycling:
            why = "cycle_momentum is false" if has_betas else f"{type(optimizer).__name__} has no betas"
            raise ConfigError(
                f"scheduler.params.{asked[0]}={getattr(self, asked[0])!r} is for betas, and {why}; leave it out"
            )
        return dataclasses.replace(self, cycle_momentum=cycling)

    @property
    def down_steps(self) -> int:
        """Iterations of the descent."""
        return self.cycle_first_step_size if self.cycle_second_step_size is None else self.cycle_second_step_size

    @property
    def cycle_steps(self) -> int:
        """Iterations of climb and descent together."""
        return self.cycle_first_step_size + self.down_steps

    def height(self, done: int) -> float:
        """Where on the cycle: 0 at both ends, 1 at the top. At ``done == cycle_steps`` the next cycle would begin."""
        place = done % self.cycle_steps
        climbing = place <= self.cycle_first_step_size
        stairs = self.cycle_first_stair_count
        if not climbing and self.cycle_second_stair_count is not None:
            stairs = self.cycle_second_stair_count
        steps, length = (place, self.cycle_first_step_size) if climbing else (self.cycle_steps - place, self.down_steps)
        # One division of integers, so that a stair is never missed by a rounding.
        return (steps * stairs // length) / stairs if stairs else steps / length

    def lrs(self, done: int, base_lrs: Sequence[float]) -> list[float]:
        """Between the two rates of each group; ``base_lrs`` only says how many groups there are."""
        low = _per_group(self.cycle_min_lr, len(base_lrs), "cycle_min_lr")
        top = _per_group(self.cycle_max_lr, len(base_lrs), "cycle_max_lr")
        if done <= self.cycle_steps:
            height = self.height(done)
            return [a + (b - a) * height for a, b in zip(low, top, strict=True)]
        return [a / (1.0 + self.decay_lr_rate * self._decay_units(done)) for a in low]

    def betas(self, done: int, groups: int) -> list[tuple[float, float]]:
        """The betas of each of ``groups`` parameter groups; at step 0 the first one is low, and so is the rate."""
        low = _per_group(self.cycle_min_mom, groups, "cycle_min_mom")
        top = _per_group(self.cycle_max_mom, groups, "cycle_max_mom")
        if done == 0:
            return [(a, BETA2) for a in low]
        if done <= self.cycle_steps:
            height = self.height(done)
            return [(b - (b - a) * height, BETA2) for a, b in zip(low, top, strict=True)]
        return [(b * (1.0 + self.decay_mom_rate * self._decay_units(done)), BETA2) for b in top]

    def _decay_units(self, done: int) -> float:
        return (done - self.cycle_steps) / self.decay_step_size if self.decay_step_size else 0.0


def _known_total(total_num_steps: int | None) -> int:
    if total_num_steps is None:
        raise ConfigError("scheduler.params.total_num_steps is not known; give it, in optimizer steps")
    return total_num_steps
