"""Tell stories of ``library_stories.py`` on two ranks, and give back what they have come to."""

import json
import warnings
from pathlib import Path

import pytest

from tests.compat import library_stories
from tests.e2e import runs

PROGRAM = str(Path(library_stories.__file__))
QUIET = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
# What the real DeepSpeed 0.19.8 came to in the same stories, on the same machine: fp32, four optimizer steps.
DEEPSPEED = json.loads(Path(__file__).with_name("deepspeed_stories.json").read_text(encoding="utf-8"))


def prepared(folder):
    """A folder with the base model."""
    pytest.importorskip("transformers", reason="needs the extra hf")
    pytest.importorskip("accelerate", reason="needs the extra hf")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of another library, about itself
        library_stories.write_base(folder / "base")
    return folder


def tell(names, stage, precision, folder, launcher=()):
    """Run the stories in one launch; story → its result."""
    start = [*(launcher or [*runs.TORCHRUN, "-m", "deepzero.compat"]), PROGRAM]
    arguments = [",".join(names), str(stage), precision, str(folder)]
    done = runs.finished([*start, *arguments], runs.ROOT, 400, **QUIET)
    assert done.status == 0, done.err[-6000:]
    lines = (line.split(" ", 2) for line in done.out.splitlines() if line.startswith("STORY "))
    return {name: json.loads(result) for _, name, result in lines}


def check_like_deepspeed(told, stage, name, keys=("loss", "grad_norm", "learning_rate")):
    """In fp32 each number is DeepSpeed's, to 1e-5."""
    there = DEEPSPEED[str(stage)][name]
    for key in keys:
        assert told[key] == pytest.approx(there[key], rel=1e-5, abs=1e-5), (name, key)
