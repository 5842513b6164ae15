"""Tell stories of ``library_stories.py`` on two ranks, and give back what they have come to."""

import json
import warnings
from pathlib import Path

import pytest

from tests.compat import library_stories
from tests.e2e import runs

PROGRAM = str(Path(library_stories.__file__))
QUIET = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
# What DeepSpeed 0.19.8 came to in the same stories, in fp32 and stage 2. In stage 3 it differs by 2e-6 at most.
DEEPSPEED = json.loads(Path(__file__).with_name("deepspeed_stories.json").read_text(encoding="utf-8"))


def need_hf():
    pytest.importorskip("transformers", reason="needs the extra hf")
    pytest.importorskip("accelerate", reason="needs the extra hf")


def prepared(folder):
    """A folder with the base model."""
    need_hf()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of another library, about itself
        library_stories.write_base(folder / "base")
    return folder


def started(program, arguments, launcher=()):
    """What a program prints on two ranks, in DeepSpeed's place deepzero."""
    command = [*(launcher or [*runs.TORCHRUN, "-m", "deepzero.compat"]), program, *arguments]
    done = runs.finished(command, runs.ROOT, 400, **QUIET)
    assert done.status == 0, done.err[-6000:]
    return done.out.splitlines()


def tell(names, stage, precision, folder, launcher=()):
    """Run the stories in one launch; story → its result."""
    lines = started(PROGRAM, [",".join(names), str(stage), precision, str(folder)], launcher)
    found = (line.split(" ", 2) for line in lines if line.startswith("STORY "))
    return {name: json.loads(result) for _, name, result in found}


def run_example(name, arguments, launcher=()):
    need_hf()
    lines = started(str(runs.ROOT / "examples" / f"{name}.py"), arguments, launcher)
    return json.loads(next(line for line in reversed(lines) if line.startswith('{"')))


def loss_of_all(folder, change=lambda model: model):
    """The mean loss of a saved model over all data, with plain transformers."""
    import torch
    from transformers import LlamaForCausalLM

    data = library_stories.Tokens()
    ids = torch.stack([data[index]["input_ids"] for index in range(len(data))])
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        return change(LlamaForCausalLM.from_pretrained(folder))(input_ids=ids, labels=ids).loss.item()


def check_like_deepspeed(told, name, keys=("loss", "grad_norm", "learning_rate")):
    """In fp32 each number is DeepSpeed's, to 1e-5; norms to 1e-3, as Adam makes much of a tiny gradient's last bits."""
    there = DEEPSPEED[name]
    for key in keys:
        near = 1e-3 if "norm" in key else 1e-5
        assert told[key] == pytest.approx(there[key], rel=near, abs=near), (name, key)
