"""DeepSpeed's schedules as classes that take an optimizer: ``WarmupLR(optimizer, warmup_num_steps=10)``.

Each is a :class:`~deepzero.runtime.lr_schedules.Scheduler` over the curve of its name, made by :func:`build_scheduler`,
which checks the arguments. What ``initialize`` builds from a config's block is of these classes too.

Source: ``runtime/lr_schedules.py`` in [DeepSpeed]: names, order and defaults of arguments.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from functools import partial
from typing import Any, cast

import torch

from deepzero.config.engine import SchedulerConfig
from deepzero.runtime.lr_schedules import BETA2, CURVES, Scheduler, build_scheduler

# Of each class: its arguments in order, with the defaults of the command line's options (None: left out).
_RATES = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000, "warmup_type": "log"}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "LRRangeTest": {"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 1000, "lr_range_test_step_rate": 1.0,
                    "lr_range_test_staircase": False},
    "OneCycle": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "decay_lr_rate": 0.0, "cycle_first_step_size": 1000,
                 "cycle_second_step_size": None, "cycle_first_stair_count": None, "cycle_second_stair_count": None,
                 "decay_step_size": 1000, "cycle_momentum": False, "cycle_min_mom": 0.8, "cycle_max_mom": 0.9,
                 "decay_mom_rate": 0.0},
    "WarmupLR": _RATES,
    "WarmupDecayLR": {"total_num_steps": None, **_RATES},
    "WarmupCosineLR": {"total_num_steps": None, "warmup_min_ratio": 0.01, "warmup_num_steps": 1000,
                       "cos_min_ratio": 0.01, "warmup_type": "log"},
}  # fmt: skip
VALID_LR_SCHEDULES = list(ARGUMENTS)
globals().update({
    "LR_SCHEDULE": "lr_schedule", "WARMUP_LOG_RATE": "log", "WARMUP_LINEAR_RATE": "linear",
    "LR_RANGE_TEST": "LRRangeTest", "ONE_CYCLE": "OneCycle", "WARMUP_LR": "WarmupLR",
    "WARMUP_DECAY_LR": "WarmupDecayLR", "WARMUP_COSINE_LR": "WarmupCosineLR",
    **{name.upper(): name for arguments in ARGUMENTS.values() for name in arguments},
})  # fmt: skip


class NamedScheduler(Scheduler):
    """A scheduler over the curve that has its class's name; a curve's fields are its attributes."""

    def __init__(self, optimizer: Any, *values: Any, **named: Any) -> None:
        kind = type(self).__name__
        names = [*ARGUMENTS[kind], "last_batch_iteration"]
        if len(values) > len(names) or not named.keys().isdisjoint(names[: len(values)]):
            raise TypeError(f"{kind} takes an optimizer and, once each, {', '.join(names)}")
        inner = optimizer if isinstance(optimizer, torch.optim.Optimizer) else getattr(optimizer, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer):
            raise TypeError(f"{kind} needs a torch optimizer, it got a {type(optimizer).__name__}")
        params = {**dict(zip(names, values, strict=False)), **named}
        vars(self).update(vars(build_scheduler(SchedulerConfig(kind, params), inner)))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled and copied by its kind, since no class is found under the name that those below have."""
        kind, reduced = type(self), cast("tuple[Any, ...]", super().__reduce_ex__(max(protocol, 2)))
        return (_empty, (kind.__name__,), *reduced[2:]) if kind is _CLASSES.get(kind.__name__) else reduced

    def get_mom(self) -> list[tuple[float, float]] | None:
        """OneCycle's betas at this place of the curve; None where it leaves them alone."""
        if not getattr(self.curve, "cycle_momentum", False):
            return None
        done, groups = self.last_batch_iteration + 1, len(self.base_lrs)
        top: list[float] = self.curve._per_group("cycle_max_mom", groups)
        return self.curve.betas(done, groups) if done else [(beta, BETA2) for beta in top]  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        curve: Any = vars(self).get("curve")
        if name == "get_lr_ratio" and isinstance(curve, CURVES["WarmupCosineLR"]):  # the others have no factor
            return lambda: curve._factor(self.last_batch_iteration + 1)
        for prefix in ("warmup", "cycle") if name in ("min_lrs", "max_lrs") else ():
            if hasattr(curve, f"{prefix}_{name[:-1]}"):
                given = getattr(curve, f"{prefix}_{name[:-1]}") is not None
                return curve._per_group(f"{prefix}_{name[:-1]}", len(self.base_lrs)) if given else self.base_lrs
        if name in ("first_step_size", "second_step_size", "first_stair_count", "second_stair_count"):
            value = getattr(curve, f"cycle_{name}")
            return getattr(curve, f"cycle_{name.replace('second', 'first')}") if value is None else value
        if name == "step_ratio":
            return self.first_step_size / (self.first_step_size + self.second_step_size)
        if curve is None or name not in vars(curve):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return max(2, curve.warmup_num_steps) if name == "warmup_num_steps" else getattr(curve, name)


# A checkpoint names the class of its schedule, and each of these goes on where any Scheduler has stopped.
_CLASSES = {
    kind: type(kind, (NamedScheduler,), {"__qualname__": "Scheduler", "__module__": Scheduler.__module__,
                                         "__doc__": CURVES[kind].__doc__})
    for kind in ARGUMENTS
}  # fmt: skip
globals().update(_CLASSES)


def _empty(kind: str) -> Scheduler:
    """One of this kind before its attributes come back."""
    cls: Any = _CLASSES[kind]
    return cls.__new__(cls)


def name_scheduler(scheduler: Any) -> None:
    """Give what ``build_scheduler`` made of one of DeepSpeed's types its class here."""
    if type(scheduler) is Scheduler and type(scheduler.curve).__name__ in _CLASSES:
        scheduler.__class__ = _CLASSES[type(scheduler.curve).__name__]


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--lr_schedule`` and an option for each argument of DeepSpeed's schedules."""
    group = parser.add_argument_group("Convergence Tuning", "learning-rate schedules")
    group.add_argument("--lr_schedule", default=None, metavar="TYPE", help=", ".join(VALID_LR_SCHEDULES))
    options = {name: default for arguments in ARGUMENTS.values() for name, default in arguments.items()}
    for name, default in options.items():
        if name == "lr_range_test_staircase":  # DeepSpeed's takes a word, which is true whatever it says
            group.add_argument(f"--{name}", nargs="?", const=True, default=False, type=bool)
        elif default is False:
            group.add_argument(f"--{name}", action="store_true")
        elif name != "total_num_steps":
            group.add_argument(f"--{name}", default=default, type=int if default is None else type(default))
    return parser


def override_params(args: Any, params: dict[str, Any], *, kinds: Iterable[str] = tuple(ARGUMENTS)) -> None:
    """Copy the options of these schedules that are there and not None."""
    found = {name: getattr(args, name, None) for kind in kinds for name in ARGUMENTS[kind]}
    found.pop("cycle_momentum", None)  # as in DeepSpeed: betas move wherever the optimizer has any
    params.update({name: value for name, value in found.items() if value is not None})


override_lr_range_test_params = partial(override_params, kinds=["LRRangeTest"])
override_1cycle_params = partial(override_params, kinds=["OneCycle"])
override_warmupLR_params = partial(override_params, kinds=["WarmupLR"])
override_warmupCosineLR_params = partial(override_params, kinds=["WarmupCosineLR"])


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """The command line's schedule options, and what else stands there."""
    return add_tuning_arguments(argparse.ArgumentParser()).parse_known_args()


def get_config_from_args(args: Any) -> tuple[dict[str, Any] | None, str | None]:
    """A config's ``scheduler`` block from parsed options, or None and what is wrong with them."""
    if (kind := getattr(args, "lr_schedule", None)) not in ARGUMENTS:
        return None, f"--lr_schedule={kind!r} is not one of {', '.join(VALID_LR_SCHEDULES)}"
    params: dict[str, Any] = {}
    override_params(args, params, kinds=[kind])
    return {"type": kind, "params": params}, None


def get_lr_from_config(config: dict[str, Any]) -> tuple[float | None, str]:
    """The highest rate that a ``scheduler`` block names, or None and why there is none."""
    keys = {"LRRangeTest": "lr_range_test_min_lr", "OneCycle": "cycle_max_lr", "WarmupCosineLR": "no rate"}
    key = keys.get(config.get("type", ""), "warmup_max_lr")
    rate = config.get("params", {}).get(key)
    return rate, "" if rate is not None else f"scheduler {config.get('type')!r} names no {key} in its params"
