"""Every category of memory is predicted, within a thousandth, over models and settings drawn at random, by seed."""

import random
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import deepzero
from deepzero.comm.ledger import off_forms
from deepzero.monitor.monitor import _last_words
from tests.distributed.training import config, step_on

VOCAB = 70


class Net(nn.Module):
    """Blocks of odd widths behind an embedding; ``again`` names how their activations are checkpointed."""

    def __init__(self, width, depth, again, frozen):
        super().__init__()
        self.again = again
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))
            for _ in range(depth)
        )
        self.head = nn.Linear(width, VOCAB)
        for block in self.blocks[:frozen]:
            block[1].weight.requires_grad_(False)

    def forward(self, ids, labels):
        x = self.embed(ids)
        for block in self.blocks:
            if self.again != "never" and self.training and torch.is_grad_enabled():
                x = x + checkpoint(block, x, use_reentrant=self.again == "reentrant")
            else:
                x = x + block(x)
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), labels.flatten())


def draw(seed):
    """One run: how many ranks, the model's arguments, the settings, how many evaluations before and in between."""
    rng = random.Random(seed)
    world, stage = rng.randint(1, 4), rng.choice([0, 1, 2, 3, 3, 3])
    zero = {"overlap_comm": rng.random() < 0.6}
    if rng.random() < 0.7:
        zero["reduce_bucket_size"] = rng.choice([1, 900, 5000, 30_000])
    if stage == 1:
        zero["reduce_scatter"] = rng.random() < 0.7
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = rng.choice([0, 0, 100, 2000])
        zero["stage3_prefetch_bucket_size"] = rng.choice([0, 3000, 10**9])
        zero["stage3_max_reuse_distance"] = rng.choice([0, 4000, 10**9])
        zero["stage3_max_live_parameters"] = rng.choice([10**9, 10**9, 20_000, 100])
        if world > 1:
            zero["zero_quantized_weights"] = rng.random() < 0.25
            zero["zero_hpz_partition_size"] = rng.choice([1, 1, 2 if world % 2 == 0 else world])
    comm = {"reduce": rng.choice(["exact", "exact", "native"])}
    if stage >= 2 and world > 1 and rng.random() < 0.3:
        zero["zero_quantized_gradients"], comm["reduce"] = True, "exact"
        zero["quantization"] = {"error_feedback": rng.random() < 0.5}
        comm["ranks_per_node"] = rng.choice([n for n in (1, 2, 4) if world % n == 0])
    if stage and zero.get("reduce_scatter", True) and rng.random() < 0.35:
        zero["offload_optimizer"] = {"device": "cpu", "ratio": rng.choice([1.0, 0.5])}
        if stage == 3 and rng.random() < 0.7:
            zero["offload_param"] = {"device": "cpu", "max_in_cpu": rng.choice([10**9, 4000])}
    settings = config(
        stage=stage, precision=rng.choice(["bf16", "bf16", "fp32"]), zero=zero, comm=comm,
        gradient_accumulation_steps=rng.choice([1, 1, 3]),
    )  # fmt: skip
    again = rng.choice(["never", "never", "reentrant", "non-reentrant"])
    model = (rng.choice([24, 40, 56]), rng.randint(1, 5), again, rng.choice([0, 0, 1]))
    evaluations = (rng.randint(0, 1), rng.randint(0, 2))
    if rng.random() < 0.4:
        settings["optimizer"] = {"type": "Muon", "params": {"lr": 1e-2}}
    return world, model, settings, evaluations


def off(rank, world, cases):
    """What is off in each of the runs, said by the run itself."""
    found = []
    for seed, model, settings, (before, between) in cases:
        torch.manual_seed(seed)
        engine, *_ = deepzero.initialize(model=Net(*model), config=settings)
        generator = torch.Generator().manual_seed(seed)
        engine.optimizer.zero_grad()

        def batch(generator=generator):
            tokens = torch.randint(0, VOCAB, (2, 9), generator=generator)
            return tokens[:, :-1], tokens[:, 1:]

        def evaluate(times, engine=engine, batch=batch):
            engine.eval()
            with torch.no_grad():
                for _ in range(2 * times):
                    engine(*batch())
            engine.train()

        evaluate(before)
        for _ in range(4):
            for _ in range(engine.gradient_accumulation_steps()):
                step_on(engine, *batch())
            evaluate(between)
        found.append([f"seed {seed}: {line}" for line in off_forms(engine.report())])
        engine.destroy()
    return found


def runs_of(seeds):
    """The runs of ``seeds`` by their number of ranks."""
    by_world = {}
    for seed in seeds:
        world, *case = draw(seed)
        by_world.setdefault(world, []).append((seed, *case))
    return by_world


@pytest.mark.parametrize("seeds", [
    range(4),
    pytest.param(range(4, 1000), marks=[pytest.mark.exhaustive, pytest.mark.timeout(7200)]),
])  # fmt: skip
def test_every_category_is_predicted(ranks, seeds):
    for world, cases in runs_of(seeds).items():
        for first in range(0, len(cases), 10):
            some = cases[first : first + 10]
            assert [line for lines in ranks.run(off, some, world_size=world, timeout=300)[0] for line in lines] == []


def test_what_is_off_is_said():
    """A category more than a thousandth off its form, with both numbers; residuals have none."""
    held = {
        "parameters": {"predicted": 1_000_000, "measured": 1_000_900},
        "gathered": {"predicted": 8_781_824, "measured": 9_568_256},
        "padding": {"predicted": 0, "measured": 64},
        "activations": {"predicted": None, "measured": 5},
    }
    lines = off_forms({"memory": held})
    assert [line.partition(":")[0] for line in lines] == ["gathered", "padding"]
    assert "9,568,256 bytes were held, and the closed form says 8,781,824" in lines[0]
    facts = {"off_the_forms": lines, "memory": held, "communication": {}, "peak_rss_bytes": 1, "world_size": 1}
    words = _last_words({**facts, "val_loss": None, "steps": 1, "resumed_from_step": None, "wall_seconds": 1}, Path())
    assert "\npeak resident memory: 1 B\n" in words, "of one rank, and not the largest of them"
    assert [line[2:] for line in words.splitlines() if line.startswith("! ")] == lines
