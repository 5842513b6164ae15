"""Learning-rate schedules, deepzero's own and DeepSpeed's: a curve says what, one scheduler says when.

A *curve* is a frozen dataclass of numbers with one pure function, ``lrs(done, base_lrs)``: the learning rates of the
optimizer step that comes after ``done`` steps. Only :class:`Scheduler` has a state, one integer (torch's schedulers
keep more), so resuming needs no history, and a curve can be plotted without an optimizer.

**When.** The constructor writes the rate of the first optimizer step into the optimizer (``done = 0``); each call of
:meth:`Scheduler.step` comes *after* an optimizer step and writes the rate of the next one. The engine does not call it
after a step that was skipped (fp16 overflow): such a step uses up data, but no place on the curve.

Each curve says the rate of optimizer step k = 0, 1, …, T - 1. T is ``total_steps`` (``total_num_steps`` in
DeepSpeed's); when it is not given, it is the length of the run. deepzero's own waste no step on a rate of zero.
DeepSpeed's count ``last_batch_iteration``, which is -1 after construction and 0 after the first ``step()``: step k > 0
has the value of iteration k - 1, so warm-ups start *twice* at the bottom, and with the default ``warmup_min_lr`` of 0
the first two optimizer steps move no parameter; scripts tuned there get the same here. Where DeepSpeed warns and goes
on these raise for an unknown ``warmup_type`` and for negative rates, and warn of a long warm-up.

Sources: ``runtime/lr_schedules.py`` in [DeepSpeed] for its names, defaults and values, against which they are tested;
the cosine is that of [SGDR], in the form of [nanoGPT]; warm-up, stable, decay is that of [MiniCPM], with a fifth of the
run for the decay from [fixed durations]; [one cycle].
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch

from deepzero.comm import process_group
from deepzero.config.engine import SchedulerConfig
from deepzero.config.strict import AtLeast, ConfigError, Count, NotNegative, Section, build, convert, require

log = logging.getLogger(__name__)

PerGroup = Annotated[float | tuple[float, ...], AtLeast(0)]
"""One number for all parameter groups, or one for each."""

BETA2 = 0.99
"""While OneCycle moves the first beta of Adam, DeepSpeed sets the second one to this."""


@dataclass(frozen=True)
class Curve(Section):
    """A schedule as a pure function; its fields are ``scheduler.params``."""

    where = "scheduler.params"

    def lrs(self, done: int, base_lrs: Sequence[float]) -> list[float]:
        """The learning rates of each parameter group for the optimizer step after ``done`` steps, without skipped ones.

        ``base_lrs`` are the optimizer's own, as they were before any schedule.
        """
        factor = self._factor(done)
        return [lr * factor for lr in base_lrs]

    def _factor(self, done: int) -> float:
        return 1.0

    def _per_group(self, name: str, groups: int) -> list[float]:
        value = getattr(self, name)
        if not isinstance(value, tuple):
            return [value] * groups
        rule = f"has {len(value)} values, and the optimizer has {groups} parameter groups"
        require(len(value) == groups, f"{self.where}.{name}", list(value), rule)
        return list(value)

    def _length(self, name: str) -> int:
        """T, which ``build_scheduler`` fills in where it was not given."""
        self.need(getattr(self, name) is not None, name, "is not known; give it, in optimizer steps")
        return int(getattr(self, name))


def _cosine(progress: float, floor: float) -> float:
    """Half a cosine from 1 at progress 0 to ``floor`` at progress 1, and level after it."""
    return floor + (1.0 - floor) * (1.0 + math.cos(math.pi * min(1.0, progress))) / 2.0


def _between(low: Sequence[float], top: Sequence[float], part: float) -> list[float]:
    return [a + (b - a) * part for a, b in zip(low, top, strict=True)]


# ---- deepzero's own --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Constant(Curve):
    """``constant``: the optimizer's own learning rate, all the way."""


@dataclass(frozen=True)
class WarmupCosine(Curve):
    """``warmup_cosine``: ``lr`` times (k + 1) / (warmup + 1) up to k = warmup, then half a cosine down."""

    warmup_steps: NotNegative = 0  # below the full rate, which step number warmup_steps (from 0) is the first to have
    total_steps: Count | None = None  # T; None: the length of the run
    min_lr_ratio: float = 0.1  # the end, as a part of the full rate; steps after T, if any, stay there

    def _check(self) -> None:
        self.need(0.0 <= self.min_lr_ratio <= 1.0, "min_lr_ratio", "must be between 0 and 1")

    def _factor(self, done: int) -> float:
        # Warm-up and cosine meet at done = warmup_steps, where both are 1.
        after, total = done - self.warmup_steps, self._length("total_steps")
        if after > 0:
            return _cosine(after / max(1, total - self.warmup_steps), self.min_lr_ratio)
        return min(1.0, (done + 1) / (self.warmup_steps + 1))


@dataclass(frozen=True)
class WarmupStableDecay(WarmupCosine):
    """``warmup_stable_decay``: the same warm-up, level, a line down; the level part can grow without a new start."""

    min_lr_ratio: float = 0.0  # the end (at T, one step after the last)
    decay_steps: NotNegative | None = None  # at the end; None: a fifth of T, rounded up

    def _check(self) -> None:
        super()._check()
        if self.decay_steps is not None and self.total_steps is not None:
            rule = f"is longer than the whole schedule, scheduler.params.total_steps={self.total_steps}"
            self.need(self.decay_steps <= self.total_steps, "decay_steps", rule)

    def _factor(self, done: int) -> float:
        # Warm-up, 1 or decay; where warm-up and decay overlap, the lower of the two.
        total = self._length("total_steps")
        decay_steps = -(-total // 5) if self.decay_steps is None else max(1, self.decay_steps)
        factor, left = min(1.0, (done + 1) / (self.warmup_steps + 1)), total - done
        if left >= decay_steps:
            return factor
        return min(factor, self.min_lr_ratio + (1.0 - self.min_lr_ratio) * (max(0, left) / decay_steps))


# ---- DeepSpeed's -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeepSpeedWarmup(Curve):
    """The warm-up that three of DeepSpeed's schedules share."""

    warmup_num_steps: Count = 1000  # iterations; 1 counts as 2
    warmup_type: Literal["log", "linear"] = "log"  # fast at first, or even

    def _warmup(self, iteration: int) -> float | None:
        """From 0 at iteration 0 to 1, by the logarithm (1 at the last iteration) or by a line; None: it is over."""
        steps = max(2, self.warmup_num_steps)
        if iteration >= steps:
            return None
        return math.log(iteration + 1) / math.log(steps) if self.warmup_type == "log" else iteration / steps


@dataclass(frozen=True)
class WarmupLR(DeepSpeedWarmup):
    """``warmup_min_lr`` for k = 0, 1; up to ``warmup_max_lr`` by a logarithm or a line; then level."""

    warmup_min_lr: PerGroup = 0.0
    warmup_max_lr: PerGroup | None = None  # None: the optimizer's own learning rate

    def lrs(self, done: int, base_lrs: Sequence[float]) -> list[float]:
        """Between the two rates of each group."""
        low, top = self._per_group("warmup_min_lr", len(base_lrs)), base_lrs
        if self.warmup_max_lr is not None:
            top = self._per_group("warmup_max_lr", len(base_lrs))
        if done == 0:
            return low
        part = self._warmup(done - 1)
        return _between(low, top, self._after(done) if part is None else part)

    def _after(self, done: int) -> float:
        return 1.0


@dataclass(frozen=True)
class WarmupDecayLR(WarmupLR):
    """Up as in :class:`WarmupLR`, then a straight line that ends at ``warmup_min_lr`` when all steps are done."""

    warmup_max_lr: PerGroup | None = 0.001
    total_num_steps: Count | None = None  # T; None: the length of the run

    def _after(self, done: int) -> float:
        total = self._length("total_num_steps")
        return max(0.0, (total - (done - 1)) / max(1.0, total - max(2, self.warmup_num_steps)))


@dataclass(frozen=True)
class WarmupCosineLR(DeepSpeedWarmup):
    """0 for k = 0; then the optimizer's own rate times a warm-up and half a cosine."""

    total_num_steps: Count | None = None  # T; None: the length of the run
    warmup_min_ratio: Annotated[float, AtLeast(0)] = 0.0  # where the warm-up starts, as a part of the full rate
    cos_min_ratio: Annotated[float, AtLeast(0)] = 0.0001  # where the cosine ends and stays, as a part of the full rate

    def _factor(self, done: int) -> float:
        if (part := self._warmup(done - 1) if done else None) is not None:
            return self.warmup_min_ratio + (1.0 - self.warmup_min_ratio) * part
        total, steps = self._length("total_num_steps"), max(2, self.warmup_num_steps)
        return max(0.0, _cosine((done - steps) / max(1, total - steps), self.cos_min_ratio)) if done else 0.0


@dataclass(frozen=True)
class OneCycle(Curve):
    """One climb and one descent between two rates, then a slow decay; Adam's first beta moves the other way.

    ``cycle_min_lr`` and ``cycle_max_lr`` have no default in DeepSpeed, and none here.
    """

    cycle_min_lr: PerGroup  # at both ends of the cycle
    cycle_max_lr: PerGroup  # in the middle
    decay_lr_rate: Annotated[float, AtLeast(0)] = 0.0  # after the cycle: cycle_min_lr / (1 + decay_lr_rate * x)
    cycle_first_step_size: Count = 2000  # iterations up
    cycle_second_step_size: NotNegative | None = None  # iterations down; None: as many as up
    cycle_first_stair_count: NotNegative = 0  # climb in so many stairs; 0: smoothly
    cycle_second_stair_count: NotNegative | None = None  # descend in so many; None: as many as on the way up
    decay_step_size: Annotated[float, AtLeast(0)] = 0  # iterations of one unit of x; 0: no decay
    cycle_momentum: bool | None = None  # move the first beta too; None: if the optimizer has betas
    cycle_min_mom: PerGroup = 0.8  # the first beta in the middle of the cycle, and at optimizer step 0
    cycle_max_mom: PerGroup = 0.9  # the first beta at both ends
    decay_mom_rate: float = 0.0  # after the cycle the first beta is cycle_max_mom * (1 + decay_mom_rate * x)

    def for_optimizer(self, optimizer: torch.optim.Optimizer) -> OneCycle:
        """The same curve with ``cycle_momentum`` true or false, now that the optimizer is known.

        Settings for betas that nobody would read are refused.
        """
        has_betas, kind = "betas" in optimizer.defaults, type(optimizer).__name__
        cycling = has_betas if self.cycle_momentum is None else self.cycle_momentum
        rule = f"OneCycle moves the betas of an Adam, and {kind} has none; leave cycle_momentum out"
        self.need(has_betas or not cycling, "cycle_momentum", rule)
        why = "cycle_momentum is false" if has_betas else f"{kind} has no betas"
        for name in ("cycle_min_mom", "cycle_max_mom", "decay_mom_rate"):
            unset = getattr(self, name) == getattr(OneCycle, name)
            self.need(cycling or unset, name, f"is for betas, and {why}; leave it out")
        return dataclasses.replace(self, cycle_momentum=cycling)

    def _place(self, done: int) -> tuple[float | None, float]:
        """Where on the cycle, 0 at both ends, 1 at the top, None after it; and how many units of decay after it."""
        up, stairs = self.cycle_first_step_size, self.cycle_first_stair_count
        down = up if self.cycle_second_step_size is None else self.cycle_second_step_size
        if done > up + down:
            return None, (done - up - down) / self.decay_step_size if self.decay_step_size else 0.0
        steps, length = done % (up + down), up  # where the cycle ends the next one would begin
        if steps > up:
            steps, length = up + down - steps, down
            stairs = stairs if self.cycle_second_stair_count is None else self.cycle_second_stair_count
        # One division of integers, so that a stair is never missed by a rounding.
        return (steps * stairs // length) / stairs if stairs else steps / length, 0.0

    def lrs(self, done: int, base_lrs: Sequence[float]) -> list[float]:
        """Between the two rates of each group; of ``base_lrs`` only the number counts."""
        low, top = (self._per_group(name, len(base_lrs)) for name in ("cycle_min_lr", "cycle_max_lr"))
        height, units = self._place(done)
        return [a / (1.0 + self.decay_lr_rate * units) for a in low] if height is None else _between(low, top, height)

    def betas(self, done: int, groups: int) -> list[tuple[float, float]]:
        """The betas of each of ``groups`` parameter groups; at step 0 the first one is low, and so is the rate."""
        low, top = (self._per_group(name, groups) for name in ("cycle_min_mom", "cycle_max_mom"))
        height, units = self._place(done)
        if done == 0:
            first = low
        elif height is None:
            first = [b * (1.0 + self.decay_mom_rate * units) for b in top]
        else:
            first = _between(top, low, height)
        return [(beta, BETA2) for beta in first]


@dataclass(frozen=True)
class LRRangeTest(Curve):
    """A line upwards, to find the rate at which a model stops to learn."""

    lr_range_test_min_lr: PerGroup = 1e-3  # of step 0
    lr_range_test_step_size: Count = 2000  # steps for which one lr_range_test_step_rate is added
    lr_range_test_step_rate: Annotated[float, AtLeast(0)] = 1.0  # in parts of lr_range_test_min_lr
    lr_range_test_staircase: bool = False  # all at once after so many steps

    def lrs(self, done: int, base_lrs: Sequence[float]) -> list[float]:
        """The same line for each group; of ``base_lrs`` only the number counts."""
        size = self.lr_range_test_step_size
        factor = 1 + self.lr_range_test_step_rate * (done // size if self.lr_range_test_staircase else done / size)
        return [lr * factor for lr in self._per_group("lr_range_test_min_lr", len(base_lrs))]


# ---- when ------------------------------------------------------------------------------------------------------------


class Scheduler:
    """Moves along a curve and writes what it says into an optimizer.

    It has the four methods that the engine, and scripts written for DeepSpeed or torch, call on a scheduler.

    Args:
        optimizer: its ``param_groups`` are written to; their present ``lr`` are the curve's base rates.
        curve: the schedule; any object with :meth:`Curve.lrs` will do.
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
        self.optimizer, self.curve, self.last_batch_iteration = optimizer, curve, last_batch_iteration
        # Taken before the first write; a rate in a tensor is read once, the tensor goes on being written to.
        self.base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self.step(last_batch_iteration)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """One optimizer step is over: write the rates for the next one, or for that after ``last_batch_iteration``."""
        here = self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        self.last_batch_iteration = here
        groups = self.optimizer.param_groups
        for group, lr in zip(groups, self.get_lr(), strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)  # captured CUDA graphs hold this very tensor
            else:
                group["lr"] = lr
        if isinstance(self.curve, OneCycle) and self.curve.cycle_momentum:
            for group, betas in zip(groups, self.curve.betas(here + 1, len(groups)), strict=True):
                group["betas"] = betas

    def get_lr(self) -> list[float]:
        """The rate of each parameter group for the coming optimizer step, which was written last."""
        return self.curve.lrs(self.last_batch_iteration + 1, self.base_lrs)

    get_last_lr = get_lr  # torch's name of it

    def state_dict(self) -> dict[str, Any]:
        """DeepSpeed's one key: a checkpoint's scheduler state fits either."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the saved place, and write its rates at once, so that the next step already has them."""
        if set(state) != {"last_batch_iteration"}:
            raise ValueError(f"a scheduler's state has the key 'last_batch_iteration', this one has {sorted(state)}")
        self.step(int(state["last_batch_iteration"]))


CURVES: dict[str, type[Curve]] = {
    "constant": Constant,
    "warmup_cosine": WarmupCosine,
    "warmup_stable_decay": WarmupStableDecay,
    **{cls.__name__: cls for cls in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)},
}
"""``scheduler.type`` and the curve it means."""


def build_scheduler(
    config: SchedulerConfig, optimizer: torch.optim.Optimizer, total_steps: int | None = None
) -> Scheduler:
    """The scheduler that a config asks for; the first learning rate is written at once.

    DeepSpeed's types also take ``last_batch_iteration``. ``total_steps`` is the length of the whole run, for curves
    whose parameters do not give it.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
        >>> build_scheduler(SchedulerConfig("WarmupLR", {"warmup_num_steps": 10}), optimizer).get_last_lr()
        [0.0]
    """
    if config.type not in CURVES:
        near = difflib.get_close_matches(config.type.lower(), [name.lower() for name in CURVES], n=1)
        hint = "".join(f"; did you mean {name!r}?" for name in CURVES if name.lower() in near)
        raise ConfigError(f"scheduler.type={config.type!r} is not one of {', '.join(CURVES)}{hint}")
    cls, params, last = CURVES[config.type], dict(config.params), -1
    if issubclass(cls, (DeepSpeedWarmup, OneCycle, LRRangeTest)):
        last = convert(int, params.pop("last_batch_iteration", -1), "scheduler.params.last_batch_iteration")
    for name in {"total_steps", "total_num_steps"} & {field.name for field in dataclasses.fields(cls)}:
        if params.get(name) is None:
            if total_steps is None:
                raise ConfigError(f"scheduler.type={config.type!r} needs scheduler.params.{name}, in optimizer steps")
            params[name] = total_steps
    curve, own = build(cls, params, "scheduler.params"), {float(group["lr"]) for group in optimizer.param_groups}
    warmup, total = (getattr(curve, name, None) or 0 for name in ("warmup_num_steps", "total_num_steps"))
    if warmup > total > 0 and process_group.rank() == 0:
        log.warning("scheduler.params: the warm-up of %d steps is cut off at the schedule's end, %d", warmup, total)
    for name in ("warmup_max_lr", "cycle_max_lr"):
        if len(own) > 1 and isinstance(one := getattr(curve, name, None), float) and process_group.rank() == 0:
            log.warning(
                "scheduler.params.%s=%g gives all param groups one learning rate, and the optimizer's own are %s; give "
                "a list, one for each group, if they are to stay apart", name, one, sorted(own),
            )  # fmt: skip
    return Scheduler(optimizer, curve.for_optimizer(optimizer) if isinstance(curve, OneCycle) else curve, last)
