"""Losses of Trainer and accelerate with deepzero and with DeepSpeed: the table of ``docs/huggingface.md``.

    python -m tools.bench.hf_losses                                    both examples, stages 2 and 3, fp32 and bf16
    python -m tools.bench.hf_losses --stages 3 --precisions fp32

Each pair is one script on two ranks, run twice with the same arguments: once as it is, by DeepSpeed, and once behind
``-m deepzero.compat``. In bf16 the examples begin with weights that bf16 can hold; the last column is of runs without
that (*as made*), where DeepSpeed makes its masters from rounded weights, and deepzero in its place too. It needs the
extras ``hf`` and ``bench``; on a machine without a GPU both compute on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
RANKS = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
SCRIPTS = ("hf_trainer", "accelerate_loop")
AS_MADE = "as-made"  # as this file's first argument: run an example, the others are its name and its own arguments


def arguments_of(script: str, stage: int, precision: str, steps: int, folder: str) -> list[str]:
    """The command line of one example, the same for both."""
    config = str(ROOT / "examples" / f"zero{stage}_auto.json")
    if script == "accelerate_loop":
        return ["--config", config, "--steps", str(steps), "--precision", {"fp32": "no"}.get(precision, precision)]
    words = ["--deepspeed", config, "--max_steps", str(steps), "--output_dir", folder, "--logging_steps", "1"]
    words += ["--save_strategy", "no", "--report_to", "none", "--per_device_train_batch_size", "4"]
    return [*words, "--learning_rate", "1e-3", *([f"--{precision}"] if precision != "fp32" else [])]


def losses_of(script: str, arguments: list[str], ours: bool, as_made: bool) -> list[float]:
    """One run's training losses."""
    place = {"DS_ACCELERATOR": "cpu", "DEEPZERO_DEVICE": "cpu"} if not torch.cuda.is_available() else {}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **place}
    words = ["-m", "deepzero.compat"] if ours else []
    words += [__file__, AS_MADE] if as_made else []
    command = [*RANKS, *words, str(ROOT / "examples" / f"{script}.py")]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, cwd=ROOT, env=environment)
    last = next((line for line in reversed(done.stdout.splitlines()) if line.startswith('{"')), None)
    # On CPUs gloo's threads abort some of DeepSpeed's processes while they exit, after all that is asked of them here.
    if last is None or (done.returncode and ours):
        raise SystemExit(f"{' '.join(command + arguments)}\n{done.stdout[-1000:]}\n{done.stderr[-4000:]}")
    losses: list[float] = json.loads(last)["train_losses"]
    return losses


def compare(script: str, stage: int, precision: str, steps: int, as_made: bool) -> tuple[list[float], list[float], str]:
    """The losses here and there, and the largest difference as text."""
    with tempfile.TemporaryDirectory() as folder:
        words = arguments_of(script, stage, precision, steps, folder)
        here, there = (losses_of(script, words, ours, as_made) for ours in (True, False))
    apart = max(abs(one - other) for one, other in zip(here, there, strict=True))
    return here, there, f"{apart:.1e}"


def run_as_made(words: list[str]) -> None:
    """Run an example with the weights that its model was made with, where it would round them to bf16 first."""
    from transformers import AutoModelForCausalLM

    make = AutoModelForCausalLM.from_config
    whole: Any = lambda config, dtype: make(config, dtype=torch.float32)
    as_it_is: Any = lambda module: module
    AutoModelForCausalLM.from_config, torch.nn.Module.bfloat16 = whole, as_it_is
    sys.argv[:] = words
    runpy.run_path(words[0], run_name="__main__")


def main() -> None:
    """Print the table in Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3], help="of ZeRO")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"], help="fp32, bf16, fp16")
    parser.add_argument("--scripts", nargs="+", choices=SCRIPTS, default=list(SCRIPTS), help="the examples")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
    options = parser.parse_args()
    print("| example | stage | precision | first loss | last, deepzero | last, DeepSpeed | difference | as made |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for script in options.scripts:
        for precision in options.precisions:
            for stage in options.stages:
                run = script, stage, precision, options.steps
                here, there, apart = compare(*run, as_made=False)
                as_made = compare(*run, as_made=True)[2] if precision == "bf16" else ""
                print(f"| `{script}` | {stage} | {precision} | {here[0]:.4f} | {here[-1]:.6f} | {there[-1]:.6f} "
                      f"| {apart} | {as_made} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    run_as_made(sys.argv[2:]) if sys.argv[1:2] == [AS_MADE] else main()
