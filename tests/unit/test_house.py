"""The house's rules: each fires on a planted violation, at its line, and the repository keeps them all."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools.house import graph, violations

ROOT = Path(__file__).parents[2]
DOC = '"""What it is."""\n'


def plant(root, files):
    """Write a small repository whose modules are documented, and return the violations found in it."""
    tree = {
        "deepzero/__init__.py": DOC,
        "deepzero/layout.py": DOC,
        "deepzero/config/__init__.py": DOC,
        "deepzero/comm/__init__.py": DOC,
        "deepzero/runtime/__init__.py": DOC,
        "deepzero/runtime/zero/__init__.py": DOC,
        "deepzero/models/__init__.py": DOC,
    }
    for name, text in {**tree, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return [f"{v.path}:{v.line} {v.rule}" for v in violations(root)]


@pytest.mark.exhaustive
def test_this_repository_keeps_the_rules():
    assert [str(v) for v in violations(ROOT)] == []


def test_a_kept_house_is_silent(tmp_path):
    files = {
        "deepzero/config/engine.py": DOC + "from deepzero.config import strict\n",
        "deepzero/config/strict.py": DOC + "class Public:\n    'Doc.'\n    def _private(self): ...\n",
        "deepzero/comm/ledger.py": DOC + "import torch.distributed as dist\nfrom deepzero import layout\n",
        "deepzero/runtime/engine.py": DOC + "from ..comm.ledger import x\ndef f():\n    'Doc.'\n    import wandb\n",
        "train.py": "import hydra\nfrom omegaconf import DictConfig\nimport deepzero\n",
        "tests/test_it.py": "import torch.distributed, hydra, wandb\nassert True\n",
    }
    assert plant(tmp_path, files) == []


PLANTED = {
    "a file too long": ({"tests/x.py": "#\n" * 801}, "tests/x.py:801 file-size"),
    "a config file too long": ({"configs/x.yaml": "#\n" * 801}, "configs/x.yaml:801 file-size"),
    "a function too long": ({"tools/x.py": "\ndef f():\n" + "    1\n" * 80}, "tools/x.py:2 function-size"),
    "a method too long": ({"t.py": "class A:\n async def f():\n" + "  1\n" * 80}, "t.py:2 function-size"),
    "a file that does not parse": ({"tools/x.py": "\ndef f(:\n"}, "tools/x.py:2 syntax"),
    "an import from above": (
        {"deepzero/comm/x.py": DOC + "from deepzero.runtime import zero\n"},
        "deepzero/comm/x.py:2 floors",
    ),
    "a relative import from above": (
        {"deepzero/layout.py": DOC + "from .comm import x\n"},
        "deepzero/layout.py:2 floors",
    ),
    "a late import from above": (
        {"deepzero/comm/x.py": DOC + "def _f():\n    import deepzero.runtime.zero\n"},
        "deepzero/comm/x.py:3 floors",
    ),
    "an import by name from above": (
        {"deepzero/comm/x.py": DOC + "import importlib\nm = importlib.import_module('deepzero.models')\n"},
        "deepzero/comm/x.py:3 floors",
    ),
    "a type-only import from above": (
        {"deepzero/comm/x.py": DOC + "if TYPE_CHECKING:\n    from deepzero.runtime import zero\n"},
        "deepzero/comm/x.py:3 floors",
    ),
    "the package imported from within": (
        {"deepzero/layout.py": DOC + "import deepzero\n"},
        "deepzero/layout.py:2 floors",
    ),
    "comm imports its bucket": (
        {
            "deepzero/comm/reduce_scatter.py": DOC,
            "deepzero/comm/x.py": DOC + "from deepzero.comm.reduce_scatter import B\n",
        },
        "deepzero/comm/x.py:2 floors",
    ),
    "another room of the same floor": (
        {"deepzero/data/__init__.py": DOC + "import deepzero.models\n"},
        "deepzero/data/__init__.py:2 floors",
    ),
    "a room without a floor": ({"deepzero/attic.py": DOC}, "deepzero/attic.py:1 floors"),
    "a model that knows ZeRO": (
        {"deepzero/models/x.py": DOC + "from deepzero.runtime.zero import y\n"},
        "deepzero/models/x.py:2 walls",
    ),
    "a model that knows ranks": (
        {"deepzero/models/x.py": DOC + "import deepzero.comm\n"},
        "deepzero/models/x.py:2 walls",
    ),
    "stage 1 and 2 knows stage 3": (
        {
            "deepzero/runtime/zero/stage3.py": DOC,
            "deepzero/runtime/zero/stage_1_and_2.py": DOC + "from . import stage3\n",
        },
        "deepzero/runtime/zero/stage_1_and_2.py:2 walls",
    ),
    "stage 3 knows stage 1 and 2": (
        {
            "deepzero/runtime/zero/stage_1_and_2.py": DOC,
            "deepzero/runtime/zero/stage3.py": DOC + "from .stage_1_and_2 import f\n",
        },
        "deepzero/runtime/zero/stage3.py:2 walls",
    ),
    "partitioning knows the coordinator": (
        {
            "deepzero/runtime/zero/partitioned_param_coordinator.py": DOC,
            "deepzero/runtime/zero/partition_parameters.py": DOC + "from .partitioned_param_coordinator import f\n",
        },
        "deepzero/runtime/zero/partition_parameters.py:2 walls",
    ),
    "torch.distributed": ({"deepzero/layout.py": DOC + "import torch.distributed\n"}, "deepzero/layout.py:2 reserved"),
    "torch.distributed as": (
        {"deepzero/layout.py": DOC + "import torch.distributed as d\n"},
        "deepzero/layout.py:2 reserved",
    ),
    "from torch import distributed": (
        {"deepzero/layout.py": DOC + "from torch import distributed\n"},
        "deepzero/layout.py:2 reserved",
    ),
    "from inside torch.distributed": (
        {"deepzero/layout.py": DOC + "from torch.distributed.fsdp import fully_shard\n"},
        "deepzero/layout.py:2 reserved",
    ),
    "torch.distributed late": (
        {"train.py": "def f():\n    from torch.distributed import barrier\n"},
        "train.py:2 reserved",
    ),
    "torch.distributed as an attribute": (
        {"deepzero/layout.py": DOC + "import torch as t\nt.distributed.barrier()\n"},
        "deepzero/layout.py:3 reserved",
    ),
    "torch.distributed by name": (
        {"deepzero/layout.py": DOC + "__import__('torch.distributed')\n"},
        "deepzero/layout.py:2 reserved",
    ),
    "hydra in the package": (
        {"deepzero/config/x.py": DOC + "def _f():\n    import hydra\n"},
        "deepzero/config/x.py:3 reserved",
    ),
    "omegaconf in a tool": ({"tools/x.py": "from omegaconf import OmegaConf\n"}, "tools/x.py:1 reserved"),
    "wandb at module level": ({"train.py": "import wandb\n"}, "train.py:1 late"),
    "tensorboard in a class body": (
        {"deepzero/layout.py": DOC + "class _A:\n    from torch.utils.tensorboard import SummaryWriter\n"},
        "deepzero/layout.py:3 late",
    ),
    "matplotlib in a try": (
        {"deepzero/layout.py": DOC + "try:\n    import matplotlib.pyplot\nexcept ImportError: pass\n"},
        "deepzero/layout.py:3 late",
    ),
    "deepspeed at module level": ({"deepzero/layout.py": DOC + "import deepspeed\n"}, "deepzero/layout.py:2 late"),
    "a star": ({"tests/x.py": "from os.path import *\n"}, "tests/x.py:1 star-import"),
    "a bare assert": ({"deepzero/layout.py": DOC + "def _f(x):\n    assert x\n"}, "deepzero/layout.py:3 assert"),
    "a thread that chooses no device": (
        {"deepzero/layout.py": DOC + "import threading\nthreading.Thread(target=print).start()\n"},
        "deepzero/layout.py:3 threads",
    ),
    "a timer": ({"tools/x.py": "from threading import Timer\nTimer(1, print)\n"}, "tools/x.py:2 threads"),
    "a pool of threads": (
        {"train.py": "import concurrent.futures as c\nc.ThreadPoolExecutor(2)\n"},
        "train.py:2 threads",
    ),
    "a kind of thread": (
        {"deepzero/layout.py": DOC + "import threading\nclass _T(threading.Thread):\n    pass\n"},
        "deepzero/layout.py:3 threads",
    ),
    "a module without docstring": ({"deepzero/layout.py": "x = 1\n"}, "deepzero/layout.py:1 docstring"),
    "an empty package": ({"deepzero/data/__init__.py": ""}, "deepzero/data/__init__.py:1 docstring"),
    "a function without docstring": ({"deepzero/layout.py": DOC + "def f(): ...\n"}, "deepzero/layout.py:2 docstring"),
    "a class without docstring": ({"deepzero/layout.py": DOC + "class A: ...\n"}, "deepzero/layout.py:2 docstring"),
    "a method without docstring": (
        {"deepzero/layout.py": DOC + "class A:\n    'Doc.'\n    @property\n    def f(self): ...\n"},
        "deepzero/layout.py:5 docstring",
    ),
    "a function in an if without docstring": (
        {"deepzero/layout.py": DOC + "if True:\n    def f(): ...\n"},
        "deepzero/layout.py:3 docstring",
    ),
    "a cycle of two": (
        {"deepzero/comm/a.py": DOC + "from . import b\n", "deepzero/comm/b.py": DOC + "from deepzero.comm import a\n"},
        "deepzero/comm/a.py:2 cycle",
    ),
    "a cycle of three, one import late": (
        {
            "deepzero/comm/a.py": DOC + "\nimport deepzero.comm.b\n",
            "deepzero/comm/b.py": DOC + "import deepzero.comm.c\n",
            "deepzero/comm/c.py": DOC + "def _f():\n    import deepzero.comm.a\n",
        },
        "deepzero/comm/a.py:3 cycle",
    ),
    "a cycle through the package's __init__": (
        {
            "deepzero/comm/__init__.py": DOC + "from deepzero.comm import a\n",
            "deepzero/comm/a.py": DOC + "from . import x\n",
        },
        "deepzero/comm/__init__.py:2 cycle",
    ),
}


@pytest.mark.parametrize("situation", PLANTED)
def test_planted(situation, tmp_path):
    files, expected = PLANTED[situation]
    assert plant(tmp_path, files) == [expected]


def test_command_line(tmp_path):
    plant(tmp_path, {"deepzero/layout.py": DOC + "def f(x):\n    'Doc.'\n    assert x\n"})

    def run(*arguments):
        command = [sys.executable, str(ROOT / "tools/house.py"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout + done.stderr

    code, text = run(str(tmp_path))
    assert code == 1
    assert text.splitlines()[0].startswith("deepzero/layout.py:4: a bare assert")
    (tmp_path / "deepzero/layout.py").write_text(DOC)
    assert run(str(tmp_path)) == (0, "house: 7 files, all rules kept\n")
    code, text = run(str(tmp_path / "deepzero"))
    assert code == 2
    assert "holds no package deepzero/" in text


def test_graph(tmp_path):
    plant(tmp_path, {"deepzero/comm/x.py": DOC + "from deepzero.layout import Layout\nfrom deepzero import config\n"})
    lines = graph(tmp_path).splitlines()
    assert lines.index("floor 1") < lines.index("  comm.x -> config, layout") < lines.index("floor 0")
