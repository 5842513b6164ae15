"""Every layer's gradient norm: those of plain torch, at every stage, and together the global norm."""

import math
from collections import defaultdict

import pytest

from deepzero.runtime.grad_norm import layer_of
from tests.distributed.training import built, config, make_batch, make_model, one_step

ACCUMULATION, MICRO = 2, 2


def layer_norms(rank, world, changes):
    """One step's norms by layer, before any step and after it, and the global norm."""
    settings = config(
        **{"bucket": 700, "gradient_clipping": 0.01, "train_micro_batch_size_per_gpu": MICRO,
           "gradient_accumulation_steps": ACCUMULATION, **changes},
    )  # fmt: skip
    engine = built(settings)
    before = engine.gradient_norms()
    one_step(engine, rank, world, 0)
    found, whole = engine.gradient_norms(), engine.last_step.grad_norm
    engine.destroy()
    return before, found, whole


def expected(world):
    """The same of plain torch on the whole batch."""
    model = make_model()
    model(*make_batch(0, world * MICRO * ACCUMULATION)).backward()
    squares = defaultdict(float)
    for name, param in model.named_parameters():
        squares[f"gradients/{layer_of(name)}"] += param.grad.double().square().sum().item()
    return {layer: math.sqrt(square) for layer, square in squares.items()}


CASES = {
    "0": {"stage": 0},
    "1": {"stage": 1},
    "1 by all-reduce": {"stage": 1, "zero": {"reduce_scatter": False}},
    "2": {"stage": 2},
    "2 with a loss scale": {"stage": 2, "precision": "fp16", "fp16": {"initial_scale_power": 8}},
    "2 on the host": {"stage": 2, "zero": {"offload_optimizer": {"device": "cpu"}}},
    "3": {"stage": 3, "zero": {"stage3_param_persistence_threshold": 100}},
}


@pytest.mark.parametrize("case", CASES)
def test_layers_have_the_norms_of_plain_torch(ranks, case):
    world = 3
    everyone = ranks.run(layer_norms, CASES[case], world_size=world)
    before, found, whole = everyone[0]
    assert before == {}
    assert all(other == everyone[0] for other in everyone)
    assert found == pytest.approx(expected(world), rel=2e-2 if CASES[case].get("precision") else 1e-5)
    assert {"gradients/blocks.0", "gradients/blocks.1", "gradients/embed", "gradients/norm"} == set(found)
    assert math.sqrt(sum(norm**2 for norm in found.values())) == pytest.approx(whole, rel=1e-6)
