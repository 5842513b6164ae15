"""Run one of the examples with the weights that its model was made with, where it would round them to bf16 first.

    torchrun … tools/bench/as_made.py examples/hf_trainer.py …

Not for use by itself: ``hf_losses`` shows with it what the rounding of initial weights has to do with the losses.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    """The script is the first argument, the others are its own."""
    make = AutoModelForCausalLM.from_config
    whole: Any = lambda config, dtype: make(config, dtype=torch.float32)
    as_it_is: Any = lambda module: module
    AutoModelForCausalLM.from_config, torch.nn.Module.bfloat16 = whole, as_it_is
    sys.argv[:] = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
