"""DeepSpeed's public surface, name by name, and what deepzero has of it: ``python -m tools.deepspeed_surface``.

*Collected* are the names of the installed DeepSpeed, by introspection, into ``tools/deepspeed_surface.json``; only this
needs DeepSpeed. *Tried* is each of them on deepzero: an attribute is fetched from the stand-in modules, from an engine,
its optimizer, a partitioned parameter or the accelerator; a keyword is looked up in a signature; a key of the
configuration is read with its default, and switched on. *Judged* is a row by both: what is there is the same, unless
``tools/deepspeed_surface.yaml`` says in which point it differs; what is not there has its reason in that file, or in
deepzero's own words when it was asked, or the command fails. So it does when the file says the contrary of what was
found. The page shows all rows.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from tools.deepspeed_names import at, collect

ROOT = Path(__file__).resolve().parent.parent
COLLECTED, REASONS = (ROOT / f"tools/deepspeed_surface.{kind}" for kind in ("json", "yaml"))
PAGE = ROOT / "docs/deepspeed_surface.md"
HAS = ("same", "differs")  # verdicts for what is there; all others are for what is not

# ---- tried on deepzero -----------------------------------------------------------------------------------------------


class Trial:
    """Looks names up in deepzero: each method says (whether it is there, deepzero's own words where it is not)."""

    def __init__(self, switched_on: Mapping[str, Any], keys: Iterable[str]) -> None:
        os.environ.setdefault("DEEPZERO_DEVICE", "cpu")
        logging.disable(logging.WARNING)  # what a key changes nothing in is told below
        at("deepzero.compat.install")()
        torch, deepzero = importlib.import_module("torch"), importlib.import_module("deepzero")
        self.read, self.switched_on = at("deepzero.config.deepspeed_json.load_engine_config"), switched_on
        self.steering, self.moot = (at(f"deepzero.config.deepspeed_keys.{table}") for table in ("STEERING", "MOOT"))
        # Blocks that say nothing unless they are enabled.
        self.enabled = {key.partition(".")[0] for key in keys if key.endswith(".enabled")}
        self.engines = engines = []  # held: an optimizer answers for its engine
        for stage in (2, 3):
            zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
            config = {"train_batch_size": 1, "optimizer": {"type": "Adam"}, "zero_optimization": zero}
            engines.append(deepzero.initialize(model=torch.nn.Linear(8, 8), config=config)[0])
        self.live = {
            "engine": engines[0], "optimizer of stages 1 and 2": engines[0].optimizer,
            "optimizer of stage 3": engines[1].optimizer, "parameter of stage 3": engines[1].module.weight,
            "accelerator": at("deepspeed.accelerator.get_accelerator")(),
        }  # fmt: skip

    def attribute(self, area: str, name: str) -> tuple[bool, str]:
        """``name`` of a module, or of a live object."""
        try:
            value = getattr(self.live[area] if area in self.live else at(area), name)
        except (AttributeError, ImportError, NotImplementedError) as error:
            return False, str(error) if ": " in str(error) else ""
        told = str(value.__doc__) if inspect.isclass(value) else ""
        return (False, told) if told.startswith("Not in deepzero") else (True, "")

    def keyword(self, area: str, name: str) -> tuple[bool, str]:
        """A parameter of the call ``area``."""
        try:
            taken = inspect.signature(at(area.removesuffix("()"))).parameters
        except (AttributeError, ImportError):
            return False, ""
        return name in taken or any(one.kind is one.VAR_KEYWORD for one in taken.values()), ""

    def key(self, path: str, default: Any) -> tuple[bool, str]:
        """A key of the configuration: read with its default, and switched on, in some setting that it belongs to."""
        number = isinstance(default, int) and default >= 0 and not isinstance(default, bool)
        on = (not default) if isinstance(default, bool) else (default // 2 or 2) if number else None
        for value in (default, self.switched_on.get(path, on)):
            if value is not None and (told := self._refusal(path, value)):
                return False, "" if told.startswith("unknown config key") else told
        if path in self.steering:
            return True, f"another value is accepted and changes nothing: {self.steering[path][1]}"
        moot = self.moot.get(path) or self.moot.get(path.partition(".")[0])
        return True, f"accepted; without {moot[1]} it says nothing" if moot else ""

    def _refusal(self, path: str, value: Any) -> str:
        told = ""
        for stage in (3, 2, 1, 0):
            config: dict[str, Any] = {"zero_optimization": {"stage": stage}}
            config |= {} if path.startswith(("train_", "gradient_accumulation")) else {"train_batch_size": 1}
            *blocks, last = path.split(".")
            inner = config
            for block in blocks:
                fresh = {"device": "cpu"} if block.startswith("offload_") else {}
                inner = inner.setdefault(block, {"enabled": True} if block in self.enabled else fresh)
            if "offload_param" in blocks:
                config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
            inner[last] = value
            try:
                self.read(config)
                return ""
            except ValueError as error:
                told = told or str(error)
        return told


# ---- judged ----------------------------------------------------------------------------------------------------------


def judge(areas: Mapping[str, Any], table: Mapping[str, Any], trial: Any) -> tuple[list[tuple[str, ...]], list[str]]:
    """Rows (area, name, verdict, reason), and what is wrong: names without a reason, reasons that are not true."""
    rows, wrong, used = [], [], set[int]()
    for area, name in ((area, name) for area, names in areas.items() for name in names):
        if area == "configuration":
            found, told = trial.key(name, areas[area][name])
        else:
            found, told = (trial.keyword if area[-1] == ")" else trial.attribute)(area, name)
        verdict, why = "refused" if not found else "differs" if told else "same", told
        for number, row in enumerate(table["row"]):
            exact, has = name in row["names"].split(), row["verdict"] in HAS
            match = exact or any(fnmatchcase(name, one) for one in row["names"].split())
            # A pattern speaks of those that are there, or of those that are not; a name must be what the row says,
            # unless that is none of ZeRO's.
            if match and fnmatchcase(area, row.get("in", "*")) and (exact or has == found):
                used.add(number)
                verdict, why = row["verdict"], row.get("why") or table["outside"].get(row["verdict"]) or told
                if has != found and verdict not in table["outside"]:
                    wrong.append(f"{area}: {name} is {'' if found else 'not '}there, but called {verdict!r}")
                break
        if not (found or why):
            wrong.append(f"{area}: {name} is not there, and no row says why")
        rows.append((area, name, verdict, "" if verdict in table["outside"] else " ".join(why.split())))
    unused = [row["names"] for number, row in enumerate(table["row"]) if number not in used]
    return rows, wrong + [f"no name for the row {names!r}" for names in unused]


def page(version: str, rows: Sequence[tuple[str, ...]], table: Mapping[str, Any]) -> str:
    """The page: a summary with percentages, then a foldable table for each area; rows of one reason stand together."""
    outside, inside = (Counter(row[2] for row in rows if (row[2] in table["outside"]) is out) for out in (True, False))
    total = inside.total()
    lines = [table["head"].strip().format(version=version, total=total, outside=outside.total(), names=len(rows)), ""]
    lines += ["| Verdict | Names | Of ZeRO's |", "| --- | --- | --- |"]
    lines += [f"| {text} | {inside[name]} | {inside[name] / total:.1%} |" for name, text in table["verdicts"].items()]
    lines += ["", table["apart"].strip(), "", "| Not ZeRO's | Names | What |", "| --- | --- | --- |"]
    lines += [f"| {kind} | {outside[kind]} | {text} |" for kind, text in table["outside"].items() if outside[kind]]
    for area in dict.fromkeys(row[0] for row in rows):
        groups: dict[tuple[str, ...], list[str]] = {}
        for _, name, verdict, why in (row for row in rows if row[0] == area):
            groups.setdefault((verdict, why), []).append(f"`{name}`")
        counts = Counter("not ZeRO's" if row[2] in table["outside"] else row[2] for row in rows if row[0] == area)
        said = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
        lines += ["", '<details markdown="1">', f"<summary><code>{area}</code>: {said}</summary>", ""]
        lines += ["| Names | Verdict | Why |", "| --- | --- | --- |"]
        for (verdict, why), names in groups.items():
            lines.append(f"| {' '.join(names)} | {verdict} | {why.replace('|', '&#124;')} |")
        lines += ["", "</details>"]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Print what is wrong; 0 when nothing is and the page is current."""
    about = str(__doc__).split("\n\n")[0]
    parser = argparse.ArgumentParser(prog="python -m tools.deepspeed_surface", description=about)
    parser.add_argument("--collect", action="store_true", help="list the installed DeepSpeed's names anew, and end")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}; else it is compared")
    arguments = parser.parse_args(argv)
    table = yaml.safe_load(REASONS.read_text(encoding="utf-8"))
    if arguments.collect:
        found = collect(table["modules"], table["calls"])
        COLLECTED.write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")
        return 0
    collected = json.loads(COLLECTED.read_text(encoding="utf-8"))
    rows, wrong = judge(collected["areas"], table, Trial(table["on"], collected["areas"]["configuration"]))
    text = page(collected["deepspeed"], rows, table)
    if arguments.write and not wrong:
        PAGE.write_text(text, encoding="utf-8")
    elif not wrong and text != PAGE.read_text(encoding="utf-8"):
        wrong.append(f"{PAGE.relative_to(ROOT)} is not current: run python -m tools.deepspeed_surface --write")
    print("\n".join(wrong) or f"{len(rows)} names, each with its verdict")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
