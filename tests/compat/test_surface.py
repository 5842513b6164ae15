"""The table of DeepSpeed's names: the page is current, every row has its verdict, and a false word in it is found."""

import importlib.util
import json
import re
import subprocess
import sys

import pytest
import yaml

from tests import ROOT
from tools import deepspeed_names, deepspeed_surface
from tools.deepspeed_surface import COLLECTED, PAGE, REASONS, judge, page

TABLE = {
    "head": "{version}: {names} names, {outside} outside, {total} inside",
    "apart": "",
    "verdicts": {"same": "same", "differs": "documented", "other": "another way", "refused": "refused"},
    "outside": {"moe": "experts"},
}
GONE = "m: gone is not there, and no row says why"


@pytest.mark.slow
def test_each_name_is_what_the_page_says():
    """The command tries all of them, in a process of its own, as the hook that it installs stays."""
    command = [sys.executable, "-m", "tools.deepspeed_surface"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout[-2000:]
    rows = re.findall(r"^\| (?:`[^|]+) \| ([a-z ]+) \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.M)
    outside = yaml.safe_load(REASONS.read_text(encoding="utf-8"))["outside"]
    assert len(rows) > 100 and all(why or verdict == "same" or verdict in outside for verdict, why in rows)


def test_nine_in_ten_are_there():
    shares = re.findall(r"^\| ([\w, -]+) \| \d+ \| ([\d.]+)% \|$", PAGE.read_text(encoding="utf-8"), re.M)
    assert len(shares) == 4 and shares[0][0] == "same"
    assert float(shares[0][1]) + float(shares[1][1]) >= 90


class Pretended:
    """A trial of a library that has ``here``, and has words about ``off``."""

    def attribute(self, area, name):
        return name == "here", "it is off" if name == "off" else ""

    def key(self, name, default):
        return default is not None, "changes nothing" if default == 1 else ""


@pytest.mark.parametrize(
    ("row", "verdict", "wrong"),
    [
        ({"names": "here", "verdict": "differs", "why": "rounded"}, {"here": "differs"}, [GONE]),
        ({"names": "h*", "verdict": "refused", "why": "no"}, {"here": "same"}, [GONE, "no name for the row 'h*'"]),
        ({"names": "here", "verdict": "other", "why": "no"}, {}, ["m: here is there, but called 'other'", GONE]),
        ({"names": "gone", "verdict": "differs", "why": "no"}, {}, ["m: gone is not there, but called 'differs'"]),
        ({"names": "g*", "verdict": "refused", "why": "no"}, {"gone": "refused"}, []),
        ({"names": "gone", "verdict": "moe"}, {"gone": "moe"}, []),
        ({"names": "nothing", "verdict": "moe"}, {}, [GONE, "no name for"]),
        ({"in": "n*", "names": "gone", "verdict": "moe"}, {}, [GONE, "no name for"]),
    ],
)
def test_rows_that_contradict_what_is_found(row, verdict, wrong):
    areas = {"m": ["here", "gone", "off"], "configuration": {"read": 2, "idle": 1}}
    rows, found = judge(areas, {**TABLE, "row": [row]}, Pretended())
    assert len(found) == len(wrong) and all(map(str.startswith, found, wrong)), found
    verdicts = {name: said for _, name, said, _ in rows}
    assert verdicts.items() >= {"off": "refused", "read": "same", "idle": "differs", **verdict}.items()
    assert [why for _, name, _, why in rows if name in ("off", "idle")] == ["it is off", "changes nothing"]


def test_rows_of_one_reason_stand_together():
    rows = [("m", "a", "same", ""), ("m", "b", "same", ""), ("m", "c", "refused", "a|b"), ("k", "d", "moe", "")]
    text = page("1", rows, TABLE)
    assert text.startswith("1: 4 names, 1 outside, 3 inside\n")
    assert "| same | 2 | 66.7% |" in text and "| moe | 1 | experts |" in text
    assert "| `a` `b` | same |  |" in text and "| `c` | refused | a&#124;b |" in text
    assert "<summary><code>m</code>: 2 same, 1 refused</summary>" in text


def test_each_intended_difference_has_a_reason_and_a_test():
    text = (ROOT / "docs/coming_from_deepspeed.md").read_text(encoding="utf-8")
    section = text.partition("\n## Intended differences\n")[2].partition("\n### What is alike on purpose\n")[0]
    paragraphs = [part for part in section.split("\n\n") if part.startswith("**")]
    assert len(paragraphs) >= 20
    for paragraph in paragraphs:
        assert "*Why:*" in paragraph, paragraph
        assert re.search(r"`tests/[\w/]+\.py:test_\w+`$", paragraph), paragraph


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="collects from an installed DeepSpeed")
def test_the_list_is_that_of_the_installed_deepspeed():
    code = (
        "import json, sys, yaml\nfrom tools import deepspeed_names, deepspeed_surface\n"
        "table = yaml.safe_load(deepspeed_surface.REASONS.read_text())\n"
        "found = deepspeed_names.collect(table['modules'], table['calls'])\n"
        "sys.stdout.flush(); print('\\n' + json.dumps(found))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=ROOT)
    found, stored = json.loads(done.stdout.splitlines()[-1]), json.loads(COLLECTED.read_text(encoding="utf-8"))
    if found["deepspeed"] != stored["deepspeed"]:
        pytest.skip(f"DeepSpeed {found['deepspeed']} is installed, the list is of {stored['deepspeed']}")
    assert found == stored


def test_what_is_asked_of_a_configuration_is_noted():
    block = deepspeed_names._Seen({"a": 1})
    assert block.get("a", 2) == 1 and "b" not in block and "c" not in block.keys()  # noqa: SIM118
    assert block.asked == {"a": 2, "b": None, "c": None}
    assert deepspeed_surface.at("json.dumps") is json.dumps
