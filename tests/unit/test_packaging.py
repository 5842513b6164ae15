"""What ``pip install`` brings: all that the package imports, and all of the package."""

import os
import re
import subprocess
import sys

import pytest

import deepzero
from tests import ROOT
from tools.measure_house import Source

DISTRIBUTION = {"yaml": "pyyaml", "hydra": "hydra-core", "torch_tb_profiler": "torch-tb-profiler"}
"""Modules whose distribution has another name."""


def project(name="project"):
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML")
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[name]


def names(lines):
    return {re.split(r"[<>=!\[; ]", line)[0] for line in lines}


def test_the_plain_install_is_light():
    watching = {"wandb", "tensorboard", "torch-tb-profiler"}
    assert names(project()["dependencies"]) == {
        "torch", "numpy", "safetensors", "hydra-core", "omegaconf", "pyyaml", "tqdm", *watching,
    }  # fmt: skip


def test_every_import_is_declared():
    table = project()
    # What model=hf and DeepSpeed's config classes need is imported when it is asked for, and comes with an extra.
    extras = table["optional-dependencies"]
    declared = names([*table["dependencies"], *extras["hf"], *extras["deepspeed"]])
    files = [ROOT / "train.py", *(ROOT / "deepzero").rglob("*.py")]
    sources = [Source(str(path), path.read_text(encoding="utf-8")) for path in files]
    used = {name.split(".")[0]: source.path for source in sources for name in source.imports()}
    known = {*sys.stdlib_module_names, "deepzero", "triton"}  # torch for CUDA brings Triton
    foreign = {name: place for name, place in used.items() if name not in known}
    assert {"torch", "numpy", "hydra"} <= set(foreign)
    assert {name: place for name, place in foreign.items() if DISTRIBUTION.get(name, name) not in declared} == {}


def test_every_folder_is_packaged():
    folders = {path.parent for path in (ROOT / "deepzero").rglob("*.py")}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_every_file_of_another_kind_is_packaged():
    patterns = project("tool")["setuptools"]["package-data"]["deepzero"]
    files = {path for path in (ROOT / "deepzero").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    named = {path for pattern in patterns for path in (ROOT / "deepzero").glob(pattern)}
    assert {path.name for path in files if path.suffix not in (".py", ".pyc") and path not in named} == set()


def test_version_and_licence():
    table = project()
    assert table["name"] == "deepzero"
    assert re.fullmatch(r"\d+\.\d+\.\d+", table["version"])
    assert deepzero.__version__ == table["version"]
    assert table["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")[:200]


@pytest.mark.parametrize("pair", ["oldest", "newest"])
def test_the_versions_script_names_what_it_needs(pair):
    """Before anything is installed."""
    variable = f"{pair.upper()}_PYTHON"
    environment = {**os.environ, variable: "/nowhere/python"}
    script = subprocess.run([ROOT / ".ci" / "versions", pair], env=environment, capture_output=True, text=True)
    assert (script.returncode, script.stdout) == (2, "")
    assert "/nowhere/python does not run" in script.stderr and variable in script.stderr
