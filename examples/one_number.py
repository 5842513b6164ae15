"""One weight, w = 0.347, one gradient, g = 0.021: what Adam does with them, and why the weight needs an fp32 master.

    python examples/one_number.py                        one weight, then a small GPT with masters and without
    python examples/one_number.py --steps 0              the weight alone, in a second
    python examples/one_number.py --plot loss.svg        the GPT's two loss curves as a figure (needs matplotlib)

The GPT learns the text of the LICENSE file, twice, from the same initial values and with the same batches. Moments are
fp32 in both runs; the only difference is what is kept of a weight between two steps: all of it, or its bf16 form.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from deepzero.config.run import ModelConfig
from deepzero.models.gpt import GPT
from deepzero.utils.closed_pipe import exit_with

ROOT = Path(__file__).resolve().parents[1]
WEIGHT, GRADIENT = 0.347, 0.021
NAMES = ("with masters", "without masters")
BETA1, BETA2, EPS = 0.9, 0.999, 1e-8
TOKENS, BATCH, WINDOW = 64, 16, 50
"""Tokens of a sequence, sequences of a batch, and how many steps one line of the table is the mean of."""


class Adam:
    """Adam with decoupled weight decay (AdamW), as the chapter's formula has it, on fp32 tensors of one shape."""

    def __init__(self, like: torch.Tensor, lr: float, weight_decay: float = 0.0) -> None:
        self.lr, self.weight_decay, self.steps = lr, weight_decay, 0
        self.m, self.v = torch.zeros_like(like, dtype=torch.float32), torch.zeros_like(like, dtype=torch.float32)

    def step(self, weight: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """Returns what ``weight`` (fp32) becomes by ``grad`` (fp32); the moments follow."""
        self.steps += 1
        self.m = BETA1 * self.m + (1 - BETA1) * grad
        self.v = BETA2 * self.v + (1 - BETA2) * grad * grad
        m_hat = self.m / (1 - BETA1**self.steps)
        v_hat = self.v / (1 - BETA2**self.steps)
        return weight - self.lr * self.weight_decay * weight - self.lr * m_hat / (v_hat.sqrt() + EPS)


def bits(value: float, dtype: torch.dtype) -> str:
    """Sign, exponent and fraction of a number's encoding in fp32 or bf16, which is the upper half of an fp32 number.

    Example:
        >>> bits(0.347, torch.bfloat16)
        '0 01111101 0110010'
    """
    pattern = f"{struct.unpack('>I', struct.pack('>f', torch.tensor(value, dtype=dtype).item()))[0]:032b}"
    return f"{pattern[0]} {pattern[1:9]} {pattern[9 : 8 * dtype.itemsize]}"


def spacing(value: float) -> float:
    """The distance between neighbouring bf16 numbers around a positive value: 7 bits follow the leading one.

    Example:
        >>> spacing(1.0) == 2**-7, spacing(0.99) == 2**-8
        (True, True)
    """
    return 2.0 ** (math.floor(math.log2(value)) - 7)


def one_weight(lr: float, steps: int = 10) -> Iterator[str]:
    """The story of the one weight, a line at a time."""
    weight, grad = torch.tensor(WEIGHT), torch.tensor(GRADIENT)
    adam = Adam(weight, lr)
    after = adam.step(weight, grad)
    m_hat, v_hat = adam.m / (1 - BETA1), adam.v / (1 - BETA2)
    update = lr * m_hat / (v_hat.sqrt() + EPS)
    yield f"Adam's first step: w = {WEIGHT}, g = {GRADIENT}, lr = {lr:g}"
    yield f"  m = {1 - BETA1:.1f} g    = {adam.m:.9f}    m_hat = m / {1 - BETA1:.1f}   = {m_hat:.6f}"
    yield f"  v = {1 - BETA2:.3f} g² = {adam.v:.9f}    v_hat = v / {1 - BETA2:.3f} = {v_hat:.6f}"
    yield f"  update = lr m_hat / (sqrt(v_hat) + eps) = {update:.7f}    w becomes {after:.7f}"
    yield ""
    grid, rounded = spacing(WEIGHT), weight.bfloat16().item()
    yield f"bf16 numbers around {WEIGHT} are {grid:.9f} apart; half of that is {grid / 2:.9f}"
    for number in (rounded - grid, rounded, rounded + grid):
        yield f"  {number:.9f}   {bits(number, torch.bfloat16)}{'   <- w' if number == rounded else ''}"
    yield ""
    yield "step  kept in bf16  its bits             master in fp32  its bits                              cast to bf16"
    kept, master = weight.bfloat16(), weight.clone()
    of_kept, of_master = Adam(weight, lr), Adam(weight, lr)
    for step in range(steps + 1):
        if step:
            kept = of_kept.step(kept.float(), grad).bfloat16()
            master = of_master.step(master, grad)
        cast = master.bfloat16().item()
        left = f"{kept.item():<12.9f}  {bits(kept.item(), torch.bfloat16)}"
        right = f"{master:<14.9f}  {bits(master.item(), torch.float32)}"
        yield f"{step:>4}  {left}  {right}  {cast:.9f}"
    yield ""
    moved = f"has moved by {kept.item() - rounded:.9f}" if kept.item() != rounded else "has not moved"
    yield f"after {steps} steps the bf16 weight {moved}, the fp32 master by {master.item() - WEIGHT:.6f}"


def batches(steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and labels, int64 [BATCH, TOKENS], out of the LICENSE file; the same in every run."""
    text = torch.tensor(list((ROOT / "LICENSE").read_bytes()))
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(text) - TOKENS, (BATCH, 1), generator=generator)
        cut = text[starts + torch.arange(TOKENS + 1)]
        yield cut[:, :-1], cut[:, 1:]


def train(steps: int, lr: float, masters: bool) -> Iterator[tuple[float, float]]:
    """Train a small GPT in bf16. Yields each step's loss, and which part of its weights the step left as they were."""
    torch.manual_seed(0)
    shape = ModelConfig(n_layer=2, n_embd=64, n_head=2, block_size=TOKENS)
    model = GPT(shape)
    params = list(model.parameters())
    kept = [param.detach().clone() for param in params]  # fp32: the masters, from the values before the cast
    optimizers = [Adam(param, lr) for param in params]
    model.bfloat16()
    for inputs, labels in batches(steps):
        loss = model(inputs, labels=labels)
        loss.backward()
        still = 0
        with torch.no_grad():
            for i, param in enumerate(params):
                before = param.clone()
                new = optimizers[i].step(kept[i] if masters else param.float(), param.grad.float())
                kept[i] = new
                param.copy_(new)  # rounds to bf16: without masters all that is left of the update
                param.grad = None
                still += int((param == before).sum())
        yield loss.item(), still / model.num_parameters()


def table(runs: dict[str, list[tuple[float, float]]]) -> Iterator[str]:
    """Losses of both runs in means over ``WINDOW`` steps, and the part of the weights that a step left unmoved."""
    yield "             loss                      weights that a step left as they were"
    yield "steps        with masters   without    with masters   without"
    steps = len(next(iter(runs.values())))
    for start in range(0, steps, WINDOW):
        stop = min(start + WINDOW, steps)
        # Of each run, the mean of both columns over these steps.
        means = [
            [sum(column) / (stop - start) for column in zip(*run[start:stop], strict=True)] for run in runs.values()
        ]
        (loss, still), (loss_without, still_without) = means
        first = f"{start + 1:>3} - {stop:<4}   {loss:>12.2f}   {loss_without:>7.2f}"
        yield f"{first}    {still:>12.0%}   {still_without:>7.0%}"


def plot(runs: dict[str, list[tuple[float, float]]], file: Path) -> None:
    """Draw the loss curves into an SVG file."""
    import matplotlib.figure  # an extra: imported where it is asked for

    figure = matplotlib.figure.Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    for name, run in runs.items():
        axes.plot([loss for loss, _ in run], label=name)
    axes.set(xlabel="step", ylabel="loss")
    axes.legend()
    figure.savefig(file, format="svg", metadata={"Date": None})


def main() -> int:
    """Tell the story. Returns the exit status."""
    parser = argparse.ArgumentParser(description="What Adam does with one weight, in bf16 and with an fp32 master.")
    parser.add_argument("--lr", type=float, default=1e-4, help="Adam's learning rate (default 1e-4)")
    parser.add_argument("--steps", type=int, default=300, help="steps of each GPT (default 300; 0: the weight alone)")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the GPTs' loss curves into this file")
    options = parser.parse_args()
    if not 0 < options.lr < 1 or not 0 <= options.steps <= 2000:
        parser.error(f"--lr {options.lr} --steps {options.steps}: a rate between 0 and 1 and 0 to 2000 steps, please")
    if options.plot is not None:
        folder = options.plot.absolute().parent
        if options.plot.suffix != ".svg" or options.plot.is_dir() or not folder.is_dir() or options.steps == 0:
            parser.error(
                f"--plot {options.plot}: a file that ends in .svg, in a folder that exists, and --steps above 0"
            )
        if importlib.util.find_spec("matplotlib") is None:
            parser.error("--plot needs matplotlib: pip install matplotlib")
    print(*one_weight(options.lr), sep="\n")
    if options.steps:
        runs = {name: list(train(options.steps, options.lr, name == "with masters")) for name in NAMES}
        print("", f"A GPT on the text of LICENSE, bf16, lr = {options.lr:g}", *table(runs), sep="\n")
        if options.plot is not None:
            plot(runs, options.plot)
    return 0


if __name__ == "__main__":
    exit_with(main)
