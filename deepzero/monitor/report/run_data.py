"""A run folder's files, read with whatever is missing or broken left out and said."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from deepzero.config.run import RunConfig
from deepzero.monitor.metrics_file import METRICS, SUMMARY, TIMELINE, read_lines
from deepzero.utils.formatting import flatten

DEVICE_STATES = ("parameters", "secondary", "gradients", "masters", "moments")
"""The model state: what ZeRO cuts."""
HOST_STATES = ("host_parameters", "host_gradients", "host_masters", "host_moments")
COPIES = "offload."
"""Kinds of the ledger's traffic that leave no machine begin so."""
EXPOSED = "comm/exposed_seconds"
IN_FLIGHT = "comm/in_flight_seconds"
HIDDEN = "comm/hidden_fraction"
"""Of a step in ``metrics.jsonl``: seconds in which it stood still for communication, seconds in which some was under
way, and the part of the latter that was hidden."""


def number(value: Any) -> float | None:
    """A finite number as a float; anything else, NaN and true included, is None.

    Example:
        >>> number(2), number(float("nan")), number("2"), number(True)
        (2.0, None, None, None)
    """
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, (int, float))):
        return None
    return float(value) if math.isfinite(value) else None


@dataclass
class Run:
    """The contents of one run folder."""

    folder: Path
    steps: list[dict[str, Any]] = field(default_factory=list)
    """Lines of ``metrics.jsonl``: one for each optimizer step."""
    validations: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    """Empty when there is none: the run is under way, or its end was sudden."""
    timeline: dict[str, Any] = field(default_factory=dict)
    """Empty when no step was recorded."""
    overrides: list[str] = field(default_factory=list)
    """What was typed on the command line."""
    problems: list[str] = field(default_factory=list)
    """Files that could not be read, and why."""
    _medians: dict[str, float | None] = field(default_factory=dict, repr=False)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Dotted key, as in ``docs/config.md``, to value."""
        return flat(_mapping(self.summary.get("config")))

    def setting(self, key: str, default: Any = None) -> Any:
        """One of :attr:`settings`."""
        return self.settings.get(key, default)

    @property
    def stage(self) -> int | None:
        """The ZeRO stage; None if it is not known."""
        value = number(self.setting("zero.stage"))
        return None if value is None else int(value)

    def _noted(self, name: str) -> int | None:
        found = (number(place.get(name)) for place in (self.summary, self.timeline))
        return next((int(value) for value in found if value is not None and value >= 1), None)

    @property
    def world_size(self) -> int | None:
        """Ranks; None: not known."""
        return self._noted("world_size")

    @property
    def model_numel(self) -> int | None:
        """Ψ, in elements; None: not known."""
        return self._noted("model_numel")

    def account(self, name: str) -> dict[str, dict[str, Any]]:
        """``memory`` or ``communication``: of the summary, else of the recorded step; empty when neither has it."""
        found = _mapping(self.summary.get(name)) or _mapping(self.timeline.get(name))
        return {key: value for key, value in found.items() if isinstance(value, dict)}

    def sent(self, copies: bool = False) -> dict[str, dict[str, Any]]:
        """The account of what went to other ranks; with ``copies``, of what went between device and host."""
        kinds = self.account("communication").items()
        return {kind: entry for kind, entry in kinds if kind.startswith(COPIES) == copies}

    def total_sent(self, what: str = "bytes", column: str = "measured", kinds: tuple[str, ...] = ("",)) -> float:
        """The sum of one figure over all kinds of communication between ranks that begin with one of ``kinds``."""
        chosen = [_mapping(entry.get(column)) for kind, entry in self.sent().items() if kind.startswith(kinds)]
        return sum(number(entry.get(what)) or 0.0 for entry in chosen)

    def held(self, category: str, column: str = "measured") -> float:
        """Bytes of one memory category, mean over ranks; 0 where there are none."""
        return number(self.account("memory").get(category, {}).get(column)) or 0.0

    @property
    def recorded_step(self) -> int | None:
        """Number of the step that was recorded, and is slower for it."""
        value = number(self.timeline.get("step"))
        return None if value is None else int(value)

    @cached_property
    def steady(self) -> list[dict[str, Any]]:
        """Steps of this start that speak of speed: neither the first, which builds, nor the recorded one, where there
        are others.
        """
        first = int(number(self.summary.get("resumed_from_step")) or 0) + 1
        mine = [entry for entry in self.steps if entry["step"] >= first]
        return [entry for entry in mine if entry["step"] not in (first, self.recorded_step)] or mine

    def typical(self, key: str) -> float | None:
        """The median of a step's figure over :attr:`steady`; None where no step has it."""
        if key not in self._medians:
            values = [value for entry in self.steady if (value := number(entry.get(key))) is not None]
            self._medians[key] = median(values) if values else None
        return self._medians[key]

    def series(self, key: str) -> list[tuple[float, float | None]]:
        """One figure over the steps; what is missing or not finite is None."""
        return [(float(entry["step"]), number(entry.get(key))) for entry in self.steps]

    def losses(self) -> list[tuple[float, float | None]]:
        """The loss of validations over the steps before them."""
        return [(float(entry["step"]), number(entry.get("val_loss"))) for entry in self.validations]

    @cached_property
    def keys(self) -> set[str]:
        """Names of all figures that any step has."""
        return {key for names in {tuple(entry) for entry in self.steps} for key in names}

    @cached_property
    def offload_parts(self) -> list[str]:
        """Names of the parts of the offload pipeline that steps were timed in."""
        return sorted({key.split("/")[1] for key in self.keys if key.startswith("offload/") and key.count("/") == 2})


def read_run(folder: Path) -> Run:
    """Read what there is. Nothing in a run folder can make this fail; what could not be read is in ``problems``."""
    run = Run(folder)
    run.summary, run.timeline = _read_json(run, SUMMARY), _read_json(run, TIMELINE)
    entries, broken = list[dict[str, Any]](), 0
    try:
        entries, broken = read_lines(folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        run.problems.append(f"{METRICS}: {error}")
    if broken:
        run.problems.append(f"{METRICS}: {broken} lines are no JSON objects")
    for entry in entries:
        if number(entry.get("step")) is not None and ("loss" in entry or "val_loss" in entry):
            (run.steps if "loss" in entry else run.validations).append(entry)
    try:
        lines = (folder / ".hydra" / "overrides.yaml").read_text(encoding="utf-8").splitlines()
        run.overrides = [line[2:].strip("'\"") for line in lines if line.startswith("- ")]
    except (OSError, UnicodeDecodeError):
        pass  # only what Hydra started has it
    return run


def is_run(folder: Path) -> bool:
    """Whether a run has written to this folder."""
    return (folder / METRICS).exists() or (folder / SUMMARY).exists()


def _read_json(run: Run, name: str) -> dict[str, Any]:
    try:
        value = json.loads((run.folder / name).read_text(encoding="utf-8"))
        if isinstance(value, dict):
            return value
        run.problems.append(f"{name}: not a JSON object")
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        run.problems.append(f"{name}: {error}")
    return {}


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings with dotted keys, as on the command line: without ``engine.``.

    Example:
        >>> flat({"engine": {"zero": {"stage": 2}}, "train": {"steps": 5}})
        {'zero.stage': 2, 'train.steps': 5}
    """
    leaves = flatten(settings).items()
    return {key.removeprefix("engine."): list(value) if isinstance(value, tuple) else value for key, value in leaves}


def defaults() -> dict[str, Any]:
    """The dataclasses' own settings, dotted."""
    return flat(dataclasses.asdict(RunConfig()))
