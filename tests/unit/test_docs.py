"""README and book say what the code does: commands, keys, defaults, links, pointers into files."""

import ast
import dataclasses
import functools
import importlib.util
import json
import re
from pathlib import Path

import pytest

from deepzero.config.deepspeed_json import load_engine_config
from deepzero.config.deepspeed_keys import DOTTED, MOOT, NOT_IMPLEMENTED, NVME_ALONE, SATISFIED, STEERING, SWITCHED_OFF
from deepzero.config.engine import EngineConfig
from deepzero.config.run import RunConfig
from deepzero.config.strict import ConfigError
from deepzero.runtime.lr_schedules import CURVES
from tests import ROOT
from tests.configs.compose import run_config
from tools.deepspeed_names import at, keys_of
from tools.deepspeed_surface import COLLECTED

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
CONFIG = DOCS / "config.md"
COMMANDS = ("pip install -e . && python train.py zero.stage=2", 'pip install -e ".[test]" && pytest')
CODE = re.compile(
    r"`((?:deepzero|tests|tools|configs|examples|docs)/[\w./-]*\w|train\.py|\.ci/run)(?::([A-Za-z_][\w.]*))?`"
)
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)]*))?\)")


def text(page):
    return page.read_text(encoding="utf-8")


@functools.cache
def names_in(file):
    """Every dotted name that a Python file defines: classes, functions, also inside of them, and constants."""
    found = set()

    def visit(body, prefix):
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                found.add(prefix + node.name)
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found.update(prefix + target.id for target in targets if isinstance(target, ast.Name))

    visit(ast.parse(text(file)).body, "")
    return found


def fenced(page):
    return [block.strip() for block in re.findall(r"^```\w*\n(.*?)^```", text(page), re.M | re.S)]


def prose(page):
    return re.sub(r"^```\w*\n.*?^```", "", text(page), flags=re.M | re.S)


@functools.cache
def anchors(page):
    """What can be linked in a page: its headings, as mkdocs and code hosts name them, and explicit ids."""
    found = re.findall(r"^#+ (.+)$", prose(page), re.M)
    named = {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in found}
    return named | set(re.findall(r'id="([^"]+)"', text(page)))


def resolve(passage, page):
    """Raise where a link or a pointer of a passage of a page leads nowhere. Returns how many there are."""
    links, pointers = LINK.findall(passage), CODE.findall(passage)
    for link, anchor in links:
        if "://" not in link:
            target = (page.parent / link).resolve() if link else page
            assert target.exists() and (not anchor or anchor in anchors(target)), f"{link}#{anchor}"
    for file, name in pointers:
        if file.rstrip("/") in ("docs/benchmarks", "examples") or (page.name == "CONTRIBUTING.md" and not name):
            continue
        assert (ROOT / file).exists(), file
        assert not name or name in names_in(ROOT / file), f"{file}:{name}"
    return len(links) + len(pointers)


def rows(page):
    """The cells of all table rows."""
    lines = [line.strip("|").split("|") for line in text(page).splitlines() if line[:1] == "|"]
    return [[cell.strip() for cell in line] for line in lines]


def test_readme_shows_the_two_commands_each_by_itself():
    blocks = fenced(ROOT / "README.md")
    assert [blocks.count(command) for command in COMMANDS] == [1, 1]
    assert blocks[:2] == list(COMMANDS)


def test_ci_finds_the_test_command_in_the_readme():
    posix = re.search(r"grep -m1 -E '([^']+)' README\.md", text(ROOT / ".ci" / "run"))[1]
    pattern = posix.replace("[[:space:]]", r"\s")  # in Python's notation, as far as .ci/run needs it
    assert [line for line in text(ROOT / "README.md").splitlines() if re.search(pattern, line)] == [COMMANDS[1]]


def settings_of(config, prefix=""):
    """Dotted key, as on the command line, to value."""
    found = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in ("optimizer", "scheduler"):
            continue  # described by their classes
        if dataclasses.is_dataclass(value):
            found |= settings_of(value, "" if field.name == "engine" else f"{prefix}{field.name}.")
        else:
            found[prefix + field.name] = list(value) if isinstance(value, tuple) else value
    return found


def documented():
    """Key to its JSON name ("" for none) and the values in its default cell: the dataclass's, then train.py's."""
    table = [row for row in rows(CONFIG) if len(row) == 4 and re.fullmatch(r"`[a-z0-9_.]+`", row[0])]
    found = {}
    for key, name, default, _ in table:
        assert key.strip("`") not in found
        values = [json.loads(value) for value in re.findall(r"`([^`]+)`", default) if value != "train.py"]
        found[key.strip("`")] = name.strip("`"), values
    return found


def test_every_key_is_documented_with_its_default_and_what_train_py_starts_from():
    assert {key: values[0] for key, (_, values) in documented().items()} == settings_of(RunConfig())
    composed = settings_of(run_config()) | {"train_batch_size": None}
    assert {key: values[-1] for key, (_, values) in documented().items()} == composed


def nested(path, value):
    """``{"a": {"b": value}}`` for ``a.b``."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


def test_json_names_are_read():
    """The default is taken, a bad value is refused, and neither as an unknown key."""
    names = {key: name for key, (name, _) in documented().items() if name}
    defaults = {name: values[0] for name, values in documented().values() if name}
    assert set(settings_of(EngineConfig())) - set(names) == {"precision.dtype"}
    for name, default in defaults.items():
        load_engine_config({"train_batch_size": 4, **nested(name, default)})
        with pytest.raises(ConfigError) as error:
            # Any word may be a folder.
            bad = 3 if name.endswith("nvme_path") else "no such value"
            load_engine_config({"train_batch_size": 4, **nested(name, bad)})
        assert "unknown config key" not in str(error.value), name


def test_satisfied_keys():
    table = {row[0].strip("`"): row[1] for row in rows(CONFIG) if len(row) == 3 and row[0].startswith("`")}
    table = {key: values for key, values in table.items() if key not in CURVES}
    rules = {**SATISFIED, **{key: ((default,), why) for key, (default, why) in STEERING.items()}}
    assert set(table) == set(rules)
    for key, (values, _) in rules.items():
        assert [json.loads(v) for v in table[key].split(", ")] == list(values), key


def defaults_of_deepspeed():
    """Key to default: of the DeepSpeed that is installed, or else as they have been collected from one."""
    found = importlib.util.find_spec("deepspeed")
    if found is not None and found.origin and (Path(found.origin).parent / "runtime" / "config.py").is_file():
        return keys_of(at("deepspeed.runtime.config.DeepSpeedConfig"))
    return json.loads(text(COLLECTED))["areas"]["configuration"]


def test_defaults_in_the_tables_are_deepspeeds(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    theirs, ours = defaults_of_deepspeed(), {key: values[0] for key, (values, _) in SATISFIED.items()}
    ours |= {key: default for key, (default, _) in STEERING.items()} | {"dataloader_drop_last": False}
    known = {key: theirs[key] for key in ours if theirs.get(key) is not None}  # None: it asks without a default
    assert len(known) > 40 and known == {key: ours[key] for key in known}
    assert EngineConfig().dataloader_drop_last is ours["dataloader_drop_last"]


def quoted_in(paragraph):
    """The words in backquotes in the paragraph of docs/config.md that begins with ``*paragraph*``."""
    return re.findall(r"`(\w+)`", re.search(rf"^\*{paragraph}\*.*?\n\n", text(CONFIG), re.S | re.M)[0])


def test_keys_that_ask_for_nothing_or_are_refused_are_listed():
    assert quoted_in("Switched off") == [*SWITCHED_OFF, "activation_checkpointing"]
    dotted = re.search(r"^\*Dotted\*.*?\n\n", text(CONFIG), re.S | re.M)[0]
    assert re.findall(r"`([\w.]+)`", dotted) == [*DOTTED]
    assert quoted_in("Moot") == [path.rpartition(".")[2] for path in MOOT] + [*NVME_ALONE]
    assert quoted_in("Refused") == [path.rpartition(".")[2] for path in NOT_IMPLEMENTED]


def test_schedules_with_their_parameters():
    table = {row[0].strip("`"): row[1] for row in rows(CONFIG) if row[0].strip("`") in CURVES}
    assert set(table) == set(CURVES)
    for name, cell in table.items():
        shown = dict((entry.split("=", 1) + ["required"])[:2] for entry in re.findall(r"`([^`]+)`", cell))
        fields = dataclasses.fields(CURVES[name])
        required = {field.name for field in fields if field.default is dataclasses.MISSING}
        assert {key for key, value in shown.items() if value == "required"} == required
        defaults = {field.name: field.default for field in fields if field.name not in required}
        assert {key: json.loads(value) for key, value in shown.items() if key not in required} == defaults, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_pointers_resolve(page):
    resolve(prose(page), page)
