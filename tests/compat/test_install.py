"""``import deepspeed`` means deepzero: here, below, and in what is started from here. Each case is a process."""

import os
import subprocess
import sys

import pytest

from deepzero.compat import STAND_IN
from tests import ROOT
from tests.e2e import runs

FOUND = """
import importlib.metadata, importlib.util
assert importlib.util.find_spec("deepspeed") is not None
assert importlib.metadata.version("deepspeed") == "0.19.8"
from deepspeed.launcher.runner import DEEPSPEED_ENVIRONMENT_NAME
import deepspeed
assert deepspeed.__version__ == "0.19.8" and "deepzero" in deepspeed.__spec__.origin
assert deepspeed.__file__.endswith("stand_in/deepspeed.py")
"""


def run(*arguments, cwd=ROOT, **environment):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-W", "error", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=cwd, env=environment)


EVERY_NAME = """
from deepzero.compat import install
from deepzero.compat.import_paths import MODULES
install()
import importlib
for module, homes in MODULES.items():
    assert module == "deepspeed" or module.rpartition(".")[0] in MODULES, module
    there = importlib.import_module(module)
    for home, names in homes:
        for name in (there.__all__ if "*" in names else names):
            getattr(there, name)
"""


HERE_BESIDE = """
import os
from deepzero.compat import STAND_IN, install
install()
print(os.environ["PYTHONPATH"].removeprefix(str(STAND_IN)))
"""


def test_an_empty_entry_of_the_path_is_the_current_folder():
    for given in (f"{ROOT}{os.pathsep}", f"{STAND_IN}{os.pathsep}{ROOT}{os.pathsep}"):
        assert run("-c", HERE_BESIDE, PYTHONPATH=given).stdout.strip() == f"{os.pathsep}{ROOT}{os.pathsep}"
    assert run("-c", HERE_BESIDE, PYTHONPATH="").stdout.strip() == ""


def test_every_name_of_the_table_has_its_home(tmp_path):
    (tmp_path / "every_name.py").write_text(EVERY_NAME)
    done = runs.refused(cwd=tmp_path, program="every_name.py")  # it takes all that torch has
    assert (done.status, done.err) == (0, "")


@pytest.mark.slow
def test_a_script_and_what_it_starts(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        FOUND
        + "import deepspeed.comm as dist\n"
        + "from deepspeed.zero import Init\n"
        + "assert deepspeed.zero.Init is Init and Init.__module__.startswith('deepzero.'), Init\n"
        + "import multiprocessing, os, subprocess, sys\n"
        + f"HERE = {FOUND!r}\n"
        + "def child():\n    exec(HERE, globals())\n"
        + "if __name__ == '__main__':\n"
        + "    assert sys.argv[1:] == ['--deepspeed', 'ds.json'] and sys.path[1] == os.path.dirname(__file__)\n"
        + "    for how in ('spawn', 'forkserver'):\n"
        + "        process = multiprocessing.get_context(how).Process(target=child)\n"
        + "        process.start(); process.join(); assert process.exitcode == 0, how\n"
        + "    subprocess.run([sys.executable, '-c', HERE], check=True, cwd='/')\n"
        + "    1 / 0\n"
    )
    done = run("-m", "deepzero.compat", str(script), "--deepspeed", "ds.json")
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert (lines[0], lines[-1]) == ("Traceback (most recent call last):", "ZeroDivisionError: division by zero")
    assert len([line for line in lines if line.startswith("  File")]) == 1, done.stderr  # the script's own frame


def test_the_folder_alone():
    assert run("-c", FOUND, PYTHONPATH=f"{STAND_IN}{os.pathsep}{ROOT}").stderr == ""
    assert run("-m", "deepzero.compat", "--path").stdout.strip() == str(STAND_IN)


def test_modules_and_exit_status():
    done = run("-m", "deepzero.compat", "-m", "timeit", "-n1", "-r1", "import deepspeed.zero")
    assert (done.returncode, done.stderr) == (0, "") and "1 loop" in done.stdout
    assert run("-m", "deepzero.compat").returncode == 1


ABSENT = """
from deepzero.compat import install
install(), install()
import deepspeed
for program, error, words in [
    ("deepspeed.nothing", AttributeError, "has no deepspeed.nothing; docs/coming_from_deepspeed.md says"),
    ("from deepspeed.runtime import nothing", ImportError, "has no deepspeed.runtime.nothing"),
    ("import deepspeed.runtime.zero.stage9", ImportError, "has no deepspeed.runtime.zero.stage9"),
    ("from deepspeed.pipe import PipelineModule\\nclass Mine(PipelineModule): pass\\nMine(1)", NotImplementedError,
     "deepzero has no pipeline parallelism, so no PipelineModule"),
    ("deepspeed.init_inference(None)", NotImplementedError, "no inference engine"),
]:
    try:
        exec(program)
    except error as raised:
        assert words in str(raised), raised
    else:
        raise AssertionError(program)
assert not isinstance(1, deepspeed.pipe.PipelineModule) and not hasattr(deepspeed.zero, "__file__")
"""


def test_what_is_not_there_is_named():
    assert run("-c", ABSENT).stderr == ""


def test_deepspeed_itself_comes_first_or_not_at_all(tmp_path):
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text("kind = 'real'\n")
    path = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    late = run("-c", "import deepspeed\nfrom deepzero.compat import install\ninstall()", **path)
    assert late.returncode == 1 and "ImportError: deepspeed is imported already, from" in late.stderr
    assert run("-c", "from deepzero.compat import install\ninstall()\n" + FOUND, **path).stderr == ""
