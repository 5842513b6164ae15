"""Which ranks are rehearsed, and how one that goes another way is found and named."""

import dataclasses
import itertools
from functools import partial

import pytest
import torch
from torch import nn

from deepzero.config.deepspeed_json import load_engine_config
from deepzero.config.run import ModelConfig
from deepzero.config.strict import ConfigError
from deepzero.models.gpt import GPT
from deepzero.planning import plan
from deepzero.planning.check_collective_order import check, compare, skipping, telling_ranks
from deepzero.planning.dry_run import ClusterShape, TrainStep, dry_run
from deepzero.training.build_model import program_of
from deepzero.training.command_line import compose, with_fallback_batch

MODEL = ModelConfig(n_layer=2, n_embd=32, n_head=2, block_size=16, vocab_size=64)
WORLD = ClusterShape(16, 4)


def program(stage=3, **changes):
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": stage, "reduce_bucket_size": 4_000, "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": 9_000,
        },
        **changes,
    }  # fmt: skip

    def batch():
        ids = torch.zeros(1, MODEL.block_size, dtype=torch.long, device="meta")
        return ids, ids

    return TrainStep(lambda: GPT(MODEL), batch, load_engine_config(config))


def test_the_ranks_whose_number_could_matter():
    assert telling_ranks(ClusterShape(1, 1)) == [0]
    assert telling_ranks(ClusterShape(2, 2)) == [0, 1]
    assert telling_ranks(ClusterShape(64, 8), [16]) == [0, 7, 8, 15, 16, 32, 63]


def test_all_ranks_of_one_program_launch_the_same():
    rehearsals, differences = check(program(), WORLD)
    assert [r.rank for r in rehearsals] == [0, 3, 4, 8, 15] and differences == []
    assert len(rehearsals[0].trail) > 10


def test_a_rank_that_leaves_out_a_module_is_caught_and_named():
    said = []
    rehearsals, differences = check(program(), WORLD, {9: "blocks.1.mlp"}, [0], tell=said.append)
    [found] = differences
    assert (found.rank, found.reference) == (9, 0)
    assert found.number > 1, found
    usual = next(r for r in rehearsals if r.rank == 0)
    wrong = next(r for r in rehearsals if r.rank == 9)
    same = [a == b for a, b in zip(usual.trail, wrong.trail, strict=False)]
    assert found.number == same.index(False) + 1
    assert "(blocks.1.mlp." in found.expected and "(blocks.1.mlp." not in found.found
    assert f"rank 9 leaves the others at collective {found.number}: it launches" in str(found)
    assert "rehearsing rank 9 without blocks.1.mlp" in said


def test_the_majority_is_right():
    _, differences = check(program(), WORLD, {0: "blocks.0"}, [0, 3, 4])
    assert [(d.rank, d.reference) for d in differences] == [(0, 3)]


def test_launches_agree_and_gradients_do_not():
    _, [found] = check(program(stage=1), WORLD, {5: "blocks.1.mlp"}, [0, 15])
    assert (found.rank, found.number) == (5, 0)
    assert "launches what the others launch, and computes something else" in str(found)
    assert "no gradient of blocks.1.mlp." in str(found)


def test_what_a_plan_lists_makes_the_peak():
    """On a GPU, where gathered buckets are gone when the ledger samples, their most counts, not as activations."""
    found = dry_run(program(), WORLD, 0)
    assert found.held["gathered"] == found.memory["gathered"] > 0
    assert sum(plan.memory(found).values()) == found.peak_bytes
    assert found.activation_bytes > 0


def test_the_default_run_of_stage_3_shows_what_stage_3_is_for():
    """It holds less than that of stage 2, and what is gathered rises and falls."""
    runs = [with_fallback_batch(compose([f"zero.stage={stage}"])) for stage in (2, 3)]
    found = [dry_run(program_of(run, 2), ClusterShape(2, 2, "cpu"), limit=1000) for run in runs]
    assert sum(found[1].memory.values()) < 0.9 * sum(found[0].memory.values())
    gathered = [point["held"].get("gathered", 0) for point in found[1].points]
    assert gathered[0] == gathered[-1] == 0 and max(gathered) == found[1].memory["gathered"]
    falls = [place for place, (before, after) in enumerate(itertools.pairwise(gathered)) if after < before]
    assert len(falls) > 10 and max(gathered) < found[0].memory["parameters"] / 3


def test_who_is_known_to_be_wrong_is_no_reference():
    """Also where no other rank was asked for, and where the wrong ones are as many as the others."""
    rehearsals, [found] = check(program(), WORLD, {3: "blocks.0"}, [3])
    assert ([r.rank for r in rehearsals], found.rank, found.reference) == ([0, 3], 3, 0)
    _, [found] = check(program(stage=1), ClusterShape(2, 2), {0: "blocks.0.mlp"})
    assert (found.rank, found.reference) == (0, 1)
    assert "no gradient of blocks.0.mlp." in found.found and found.expected == "one"


def test_the_same_launches_of_another_size():
    """A rank with another width: the names are the same, and the backend would hang or mix up what it receives."""
    usual, other = dry_run(program(stage=1), WORLD, 0), program(stage=1)
    wider = dataclasses.replace(other, model=lambda: GPT(dataclasses.replace(MODEL, ffn_hidden=144)))
    [found] = compare([usual, dry_run(program(stage=1), WORLD, 1), dry_run(wider, WORLD, 2)])
    assert (found.rank, found.number) == (2, 2) and "elements" in found.expected


def test_what_is_launched_more_than_the_others_do():
    usual, longer = dry_run(program(), WORLD, 0), dry_run(program(gradient_accumulation_steps=2), WORLD, 1)
    assert [d.rank for d in compare([usual, dry_run(program(), WORLD, 2), longer])] == [1]


@pytest.mark.parametrize(("act", "said"), [
    (lambda: check(program(), WORLD, {}, [-1]), "this world has ranks 0 to 15"),
    (lambda: check(program(), WORLD, {}, []), "no rank"),
    (lambda: dry_run(skipping(program(), "blocks.7"), WORLD), r"no module 'blocks.7' to skip; the model has .*blocks"),
    (lambda: dry_run(skipping(program(), "blocks"), WORLD), "'blocks' to skip is a ModuleList, which is never called"),
    (lambda: own(loss=False), r"output \(dict\) holds no scalar loss; give the program one"),
    (lambda: own(partial(Own, "cpu")), r"'first.weight' has values: the model of a rehearsal is made on the meta"),
])  # fmt: skip
def test_what_cannot_be_rehearsed(act, said):
    with pytest.raises(ConfigError, match=said):
        act()


class Own(nn.Module):
    """A module of one's own, with an output that is no loss yet."""

    def __init__(self, device=None):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16, device=device), nn.Linear(16, 1)

    def forward(self, x):
        return {"scores": self.second(torch.relu(self.first(x)))}


def own(model=Own, loss=True):
    made = TrainStep(
        model,
        lambda: (torch.empty(4, 8, device="meta"),),
        program().config,
        (lambda output: output["scores"].float().mean()) if loss else None,
    )
    return dry_run(made, ClusterShape(4, 4))


def test_any_module_with_a_loss_of_its_own():
    found = own()
    assert found.model_numel == 8 * 16 + 16 + 16 + 1
    assert sorted(set(found.gradients)) == ["first.bias", "first.weight", "second.bias", "second.weight"]


def test_a_limit_of_the_quantisation_error_does_not_keep_a_run_from_being_planned():
    """A dry run measures no error: its limits go with the measurement, which they need everywhere else."""
    found = []
    for limits in ({}, {"min_weight_snr_db": 20.0}):
        zero = {"stage": 3, "zero_quantized_weights": True, "quantization": limits}
        events = dry_run(program(zero_optimization=zero), WORLD, 0).events
        found.append([(event.what, event.kind) for event in events])
    assert found[0] == found[1] and found[0]
