"""A run folder's files, read with whatever is missing or broken left out and said."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from deepzero.monitor.metrics_file import METRICS, SUMMARY, TIMELINE, read_lines
from deepzero.utils.formatting import flatten, short_bytes

DEVICE_STATES = ("parameters", "secondary", "gradients", "masters", "moments")  # the model state: what ZeRO cuts
HOST_STATES = ("host_parameters", "host_gradients", "host_masters", "host_moments")
COPIES = "offload."  # kinds of the ledger's traffic that leave no machine begin so
EXPOSED = "comm/exposed_seconds"
IN_FLIGHT = "comm/in_flight_seconds"
HIDDEN = "comm/hidden_fraction"
"""Of a step in ``metrics.jsonl``: seconds in which it stood still for communication, seconds in which some was under
way, and the part of the latter that was hidden."""


def number(value: Any) -> float | None:
    """A finite number as a float; anything else, NaN and true included, is None."""
    if type(value) is not float and (isinstance(value, bool) or not isinstance(value, (int, float))):
        return None
    return float(value) if math.isfinite(value) else None


def shown(value: Any, words: Callable[[float], str] = short_bytes) -> str | None:
    """A finite number in words; None where there is none."""
    known = number(value)
    return None if known is None else words(known)


class Run:
    """The contents of one run folder. What is not known is None, or empty.

    Nothing in a run folder can make reading fail; what could not be read is in :attr:`problems`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problems: list[str] = []  # files that could not be read, and why
        self.summary, self.timeline = self._read(SUMMARY), self._read(TIMELINE)
        """Empty: the run is under way, or its end was sudden; no step was recorded."""
        entries, broken = list[dict[str, Any]](), 0
        try:
            entries, broken = read_lines(folder)
        except OSError as error:
            self.problems.append(f"{METRICS}: {error}")
        if broken:
            self.problems.append(f"{METRICS}: {broken} lines are no JSON objects")
        entries = [entry for entry in entries if number(entry.get("step")) is not None]
        self.steps = [entry for entry in entries if "loss" in entry]
        self.validations = [entry for entry in entries if "val_loss" in entry and "loss" not in entry]
        self.overrides: list[str] = []  # what was typed on the command line; only what Hydra started has it
        with contextlib.suppress(OSError, UnicodeDecodeError):
            lines = (folder / ".hydra" / "overrides.yaml").read_text(encoding="utf-8").splitlines()
            self.overrides = [line[2:].strip("'\"") for line in lines if line.startswith("- ")]
        self.settings = flat(_mapping(self.summary.get("config")))  # dotted key, as in `docs/config.md`, to value
        self.stage = _whole(self.settings.get("zero.stage"), 0)
        self.world_size, self.model_numel = (
            _whole(self.summary.get(name), 1) or _whole(self.timeline.get(name), 1)
            for name in ("world_size", "model_numel")
        )
        self.recorded_step = _whole(self.timeline.get("step"), 0)
        """Number of the step that was recorded, and is slower for it."""
        self.recorded, self.planned = self._ranks("ranks"), self._ranks("predicted")
        """That step on each rank, measured and rehearsed; their ``points`` are those that can be drawn."""
        first = (_whole(self.summary.get("resumed_from_step"), 0) or 0) + 1
        mine = [entry for entry in self.steps if entry["step"] >= first]
        self.steady = [entry for entry in mine if entry["step"] not in (first, self.recorded_step)] or mine
        """Steps of this start that speak of speed: neither the first, which builds, nor the recorded one, where there
        are others."""
        self.keys = {key for names in {tuple(entry) for entry in self.steps} for key in names}
        """Names of all figures that any step has."""
        parts = (key.split("/") for key in self.keys if key.startswith("offload/"))
        self.offload_parts = sorted({part[1] for part in parts if len(part) == 3})
        self._medians: dict[str, float | None] = {}

    def _read(self, name: str) -> dict[str, Any]:
        try:
            value = json.loads((self.folder / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            self.problems.append(f"{name}: {error}")
            return {}
        if not isinstance(value, dict):
            self.problems.append(f"{name}: not a JSON object")
        return _mapping(value)

    def _ranks(self, name: str) -> list[dict[str, Any]]:
        ranks = self.timeline.get(name)
        found = [dict(_mapping(rank)) for rank in ranks] if isinstance(ranks, list) else []
        for rank in found:
            points = rank["points"] if isinstance(rank.get("points"), list) else []
            placed = (p for p in points if isinstance(p, dict) and number(p.get("seconds")) is not None)
            rank["points"] = [
                {**p, "held": {name: number(size) or 0.0 for name, size in p["held"].items()}}
                for p in placed
                if isinstance(p.get("held"), dict)
            ]
        return found

    def account(self, name: str) -> dict[str, dict[str, Any]]:
        """``memory`` or ``communication``: of the summary, else of the recorded step."""
        found = _mapping(self.summary.get(name)) or _mapping(self.timeline.get(name))
        return {key: value for key, value in found.items() if isinstance(value, dict)}

    def sent(self, copies: bool = False) -> dict[str, dict[str, Any]]:
        """The account of what went to other ranks; with ``copies``, of what went between device and host."""
        kinds = self.account("communication").items()
        return {kind: entry for kind, entry in kinds if kind.startswith(COPIES) == copies}

    def total_sent(self, what: str = "bytes", column: str = "measured", kinds: tuple[str, ...] = ("",)) -> float:
        """The sum of one figure over all kinds of communication between ranks that begin with one of ``kinds``."""
        return sum(traffic(e, what, column) or 0.0 for kind, e in self.sent().items() if kind.startswith(kinds))

    def held(self, category: str, column: str = "measured") -> float:
        """Bytes of one memory category, mean over ranks; 0 where there are none."""
        return number(self.account("memory").get(category, {}).get(column)) or 0.0

    def typical(self, key: str) -> float | None:
        """The median of a step's figure over :attr:`steady`; None where no step has it."""
        if key not in self._medians:
            values = [value for entry in self.steady if (value := number(entry.get(key))) is not None]
            self._medians[key] = median(values) if values else None
        return self._medians[key]

    def series(self, key: str) -> list[tuple[float, float | None]]:
        """One figure over the steps, or ``val_loss`` over those before validations; what is not finite is None."""
        entries = self.validations if key == "val_loss" else self.steps
        return [(float(entry["step"]), number(entry.get(key))) for entry in entries]


def traffic(entry: Mapping[str, Any], what: str, column: str = "measured") -> float | None:
    """One figure of a kind of :meth:`Run.sent`; None where it is not known."""
    return number(_mapping(entry.get(column)).get(what))


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _whole(value: Any, least: int) -> int | None:
    known = number(value)
    return int(known) if known is not None and least <= known < 2**63 else None  # a larger one counts nothing


def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings with dotted keys, as on the command line: without ``engine.``."""
    leaves = flatten(settings).items()
    return {key.removeprefix("engine."): list(value) if isinstance(value, tuple) else value for key, value in leaves}
