"""Learning-rate schedules: a curve says what, one scheduler says when.

A *curve* is a frozen dataclass of numbers with one pure function, ``lrs(done, base_lrs)``: the learning rate of each
parameter group for the optimizer step that comes after ``done`` steps. :class:`Scheduler` is the only thing with a
state, and that state is one integer. So resuming needs no history, and a curve can be plotted without an optimizer.

**When.** The constructor writes the rate for the first optimizer step into the optimizer (``done = 0``); each call of
:meth:`Scheduler.step` comes *after* an optimizer step and writes the rate for the next one. The engine does not call it
after a step that was skipped (fp16 overflow): such a step uses up data, but no place on the curve.

=======================  ============================================================================================
``scheduler.type``       rate of optimizer step k = 0, 1, …, T - 1, as a multiple of the optimizer's ``lr``
=======================  ============================================================================================
``constant``             1
``warmup_cosine``        (k + 1) / (warmup + 1) up to k = warmup, then half a cosine to ``min_lr_ratio`` at k = T
``warmup_stable_decay``  the same warm-up, 1, and for the last ``decay_steps`` a line to ``min_lr_ratio`` at k = T
``WarmupLR`` and so on   DeepSpeed's, in :mod:`deepzero.runtime.deepspeed_schedules`
=======================  ============================================================================================

No step is wasted on a rate of zero: neither the first (unlike DeepSpeed's) nor the last one reaches it. T is
``total_steps``; when it is not given, it is the length of the run, ``train.steps``.

Sources: the cosine is Loshchilov and Hutter, "SGDR", 2017, in nanoGPT's form; warm-up, stable, decay is Hu et al.,
"MiniCPM", 2024, and the default of a fifth of the run for the decay is from Hägele et al., "Scaling Laws and
Compute-Optimal Training Beyond Fixed Training Durations", 2024.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from deepzero.config.engine import SchedulerConfig
from deepzero.config.strict import ConfigError, build, convert, require
from deepzero.runtime.deepspeed_schedules import OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR


class Curve(Protocol):
    """A schedule as a pure function."""

    def lrs(self, done: int, base_lrs: Sequence[float]) -> list[float]:
        """The learning rates for the optimizer step after ``done`` steps.

        Args:
            done: optimizer steps that are over, skipped ones not counted; 0 before the first.
            base_lrs: the optimizer's own learning rate of each parameter group, as it was before any schedule.

        Returns:
            One rate for each parameter group.
        """


@dataclass(frozen=True)
class Constant:
    """``constant``: the optimizer's own learning rate, all the way."""

    def lrs(self, done: int, base_lrs: Sequence[float]) -> list[float]:
        """The base rates."""
        return list(base_lrs)


@dataclass(frozen=True)
class WarmupCosine:
    """``warmup_cosine``: a straight line up, half a cosine down."""

    warmup_steps: int = 0
    """Steps below the full rate, which step number ``warmup_steps`` (counted from 0) is the first to have."""

    total_steps: int | None = None
    """T, the length of the whole schedule in optimizer steps; None: the length of the run."""

    min_lr_ratio: float = 0.1
    """Where the cosine ends, as a part of the full rate. Steps after T, if any, stay there."""

    def __post_init__(self) -> None:
        _check_steps(self.warmup_steps, self.total_steps, self.min_lr_ratio)

    def lrs(self, done: int, base_lrs: Sequence[float]) -> list[float]:
        """``base_lrs`` times warm-up or cosine."""
        total = _known(self.total_steps)
        if done <= self.warmup_steps:
            factor = _warmup(done, self.warmup_steps)
        else:
            # Warm-up and cosine meet at done = warmup_steps, where both are 1.
            progress = min(1.0, (done - self.warmup_steps) / max(1, total - self.warmup_steps))
            cosine = (1.0 + math.cos(math.pi * progress)) / 2.0
            factor = self.min_lr_ratio + (1.0 - self.min_lr_ratio) * cosine
        return [lr * factor for lr in base_lrs]


@dataclass(frozen=True)
class WarmupStableDecay:
    """``warmup_stable_decay``: up, level, down; the level part can be made longer without a new start."""

    warmup_steps: int = 0
    """Steps below the full rate, which step number ``warmup_steps`` (counted from 0) is the first to have."""

    total_steps: int | None = None
    """T, the length of the whole schedule in optimizer steps; None: the length of the run."""

    decay_steps: int | None = None
    """Length of the decay at the end; None: a fifth of T, rounded up."""

    min_lr_ratio: float = 0.0
    """Where the decay ends (at T, one step after the last), as a part of the full rate."""

    def __post_init__(self) -> None:
        _check_steps(self.warmup_steps, self.total_steps, self.min_lr_ratio)
        decay = self.decay_steps
        require(decay is None or decay >= 0, "scheduler.params.decay_steps", decay, "must not be negative")
        if decay is not None and self.total_steps is not None:
            rule = f"is longer than the whole schedule, scheduler.params.total_steps={self.total_steps}"
            require(decay <= self.total_steps, "scheduler.params.decay_steps", decay, rule)

    def lrs(self, done: int, base_lrs: Sequence[float]) -> list[float]:
        """``base_lrs`` times warm-up, 1 or decay; where warm-up and decay overlap, the lower of the two."""
        total = _known(self.total_steps)
        decay_steps = -(-total // 5) if self.decay_steps is None else self.decay_steps
        left = total - done
        factor = _warmup(done, self.warmup_steps)
        if left < decay_steps:
            down = max(0, left) / decay_steps
            factor = min(factor, self.min_lr_ratio + (1.0 - self.min_lr_ratio) * down)
        return [lr * factor for lr in base_lrs]


def _warmup(done: int, warmup_steps: int) -> float:
    return min(1.0, (done + 1) / (warmup_steps + 1))


def _known(total_steps: int | None) -> int:
    if total_steps is None:
        raise ConfigError("scheduler.params.total_steps is not known; give it, in optimizer steps")
    return total_steps


def _check_steps(warmup_steps: int, total_steps: int | None, min_lr_ratio: float) -> None:
    require(warmup_steps >= 0, "scheduler.params.warmup_steps", warmup_steps, "must not be negative")
    require(total_steps is None or total_steps >= 1, "scheduler.params.total_steps", total_steps, "must be at least 1")
    require(0.0 <= min_lr_ratio <= 1.0, "scheduler.params.min_lr_ratio", min_lr_ratio, "must be between 0 and 1")


class Scheduler:
    """Moves along a curve and writes what it says into an optimizer.

    It has the four methods that the engine, and scripts written for DeepSpeed or torch, call on a scheduler.

    Args:
        optimizer: its ``param_groups`` are written to; their present ``lr`` are the curve's base rates.
        curve: the schedule.
        last_batch_iteration: DeepSpeed's count, which is one behind: -1 starts the schedule, ``n - 1`` goes on after
            ``n`` steps.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        >>> scheduler = Scheduler(optimizer, WarmupCosine(warmup_steps=3, total_steps=100))
        >>> rates = []
        >>> for _ in range(4):
        ...     rates.append(optimizer.param_groups[0]["lr"])  # a training step would stand here
        ...     scheduler.step()
        >>> rates
        [0.25, 0.5, 0.75, 1.0]
    """

    def __init__(self, optimizer: torch.optim.Optimizer, curve: Curve, last_batch_iteration: int = -1) -> None:
        rule = "must be -1 (the start) or the number of the last finished step"
        require(last_batch_iteration >= -1, "scheduler.params.last_batch_iteration", last_batch_iteration, rule)
        self.optimizer = optimizer
        self.curve = curve
        # Taken before the first write below; a rate in a tensor is read once, the tensor goes on being written to.
        self.base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self.last_batch_iteration = last_batch_iteration
        self._write()

    def step(self, last_batch_iteration: int | None = None) -> None:
        """One optimizer step is over: write the learning rates for the next one.

        Args:
            last_batch_iteration: go to this place of the schedule instead of one further.
        """
        here = self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        self.last_batch_iteration = here
        self._write()

    def get_lr(self) -> list[float]:
        """The rate of each parameter group for the coming optimizer step, as DeepSpeed names it."""
        return self.curve.lrs(self.last_batch_iteration + 1, self.base_lrs)

    def get_last_lr(self) -> list[float]:
        """The same, as torch names it: the rates that were written last."""
        return self.get_lr()

    def state_dict(self) -> dict[str, Any]:
        """DeepSpeed's one key: a checkpoint's scheduler state fits either."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the saved place, and write its rates at once, so that the next step already has them.

        Raises:
            ValueError: not the state of such a scheduler.
        """
        if set(state) != {"last_batch_iteration"}:
            raise ValueError(f"a scheduler's state has the key 'last_batch_iteration', this one has {sorted(state)}")
        self.step(int(state["last_batch_iteration"]))

    def _write(self) -> None:
        done = self.last_batch_iteration + 1
        groups = self.optimizer.param_groups
        for group, lr in zip(groups, self.curve.lrs(done, self.base_lrs), strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)  # captured CUDA graphs hold this very tensor
            else:
                group["lr"] = lr
        if isinstance(self.curve, OneCycle) and self.curve.cycle_momentum:
            for group, betas in zip(groups, self.curve.betas(done, len(groups)), strict=True):
                group["betas"] = betas


CURVES: dict[str, type[Any]] = {
    "constant": Constant,
    "warmup_cosine": WarmupCosine,
    "warmup_stable_decay": WarmupStableDecay,
    "WarmupLR": WarmupLR,
    "WarmupDecayLR": WarmupDecayLR,
    "WarmupCosineLR": WarmupCosineLR,
    "OneCycle": OneCycle,
}
"""``scheduler.type`` and the curve it means."""

_TOTALS = ("total_steps", "total_num_steps")
"""What deepzero's and DeepSpeed's curves call the length of the run."""


def build_scheduler(
    config: SchedulerConfig, optimizer: torch.optim.Optimizer, total_steps: int | None = None
) -> Scheduler:
    """The scheduler that a config asks for; the first learning rate is written at once.

    Args:
        config: type and parameters. DeepSpeed's types also take ``last_batch_iteration``.
        optimizer: whose learning rates are scheduled.
        total_steps: optimizer steps of the whole run, for curves that need to know and are not told.

    Returns:
        A scheduler to be stepped once after each optimizer step that was not skipped.

    Raises:
        ConfigError: an unknown type or parameter (with the nearest valid one), or a value that makes no sense.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
        >>> build_scheduler(SchedulerConfig("WarmupLR", {"warmup_num_steps": 10}), optimizer).get_last_lr()
        [0.0]
    """
    if config.type not in CURVES:
        near = difflib.get_close_matches(config.type.lower(), [name.lower() for name in CURVES], n=1)
        hint = "".join(f"; did you mean {name!r}?" for name in CURVES if name.lower() in near)
        raise ConfigError(f"scheduler.type={config.type!r} is not one of {', '.join(CURVES)}{hint}")
    cls = CURVES[config.type]
    params = dict(config.params)
    last = -1
    if cls in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle):
        last = convert(int, params.pop("last_batch_iteration", -1), "scheduler.params.last_batch_iteration")
    for name in _TOTALS:
        if name in {field.name for field in dataclasses.fields(cls)} and params.get(name) is None:
            if total_steps is None:
                raise ConfigError(f"scheduler.type={config.type!r} needs scheduler.params.{name}, in optimizer steps")
            params[name] = total_steps
    curve = build(cls, params, "scheduler.params")
    if isinstance(curve, OneCycle):
        curve = curve.for_optimizer(optimizer)
    return Scheduler(optimizer, curve, last)
