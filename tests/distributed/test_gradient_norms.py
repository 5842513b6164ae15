"""Every layer's gradient norm: those of plain torch, at every stage, and together the global norm."""

import math
from collections import defaultdict

import pytest

from deepzero.runtime.diagnostics import layer_of
from tests.distributed.pool import on_ranks
from tests.distributed.training import built, check_alike, config, make_batch, make_model, one_step

ACCUMULATION, MICRO = 2, 2


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
@on_ranks(3)
def test_layers_have_the_norms_of_plain_torch(rank, world, case):
    settings = config(
        **{"bucket": 700, "gradient_clipping": 0.01, "train_micro_batch_size_per_gpu": MICRO,
           "gradient_accumulation_steps": ACCUMULATION, **CASES[case]},
    )  # fmt: skip
    engine = built(settings)
    assert engine.gradient_norms() == {}
    whole, found = one_step(engine, rank, world).grad_norm, engine.gradient_norms()
    check_alike((found, whole))
    assert found == pytest.approx(expected(world), rel=2e-2 if CASES[case].get("precision") else 1e-5)
    assert {"gradients/blocks.0", "gradients/blocks.1", "gradients/embed", "gradients/norm"} == set(found)
    assert math.sqrt(sum(norm**2 for norm in found.values())) == pytest.approx(whole, rel=1e-6)
