"""What becomes of the model's parameters after the engine was built: noticed at the next step, on all ranks alike."""

import pytest
import torch
from torch import nn

from tests.distributed.pool import on_ranks
from tests.distributed.training import WHOLE, TinyModel, make_model, my_micro_batches, one_step, start


def freeze(model):
    model.norm.weight.requires_grad_(False)
    return lambda: model.norm.weight.requires_grad_()


def unfreeze(model):
    model.still.weight.requires_grad_()
    return lambda: model.still.weight.requires_grad_(False)


def add(model):
    model.blocks[0].register_parameter("extra", nn.Parameter(torch.zeros(3)))
    return lambda: model.blocks[0]._parameters.pop("extra")


def add_a_module(model):
    model.more = nn.Linear(3, 3)
    return lambda: model.more.requires_grad_(False)


def replace(model):
    old, model.norm = model.norm, nn.LayerNorm(model.norm.weight.shape)
    return lambda: setattr(model, "norm", old)


CHANGES = {
    freeze: r"parameter 'norm.weight' was frozen \(requires_grad=False\) after deepzero.initialize",
    unfreeze: r"parameter 'still.weight' was unfrozen \(requires_grad=True\) after deepzero.initialize",
    add: r"parameter 'blocks.0.extra' has been added since deepzero.initialize",
    add_a_module: r"parameter 'more.weight' has been added since",
    replace: r"parameter 'norm.weight' has been replaced or removed since",
}


class WithFrozen(TinyModel):
    def __init__(self):
        super().__init__()
        self.still = nn.Linear(3, 3).requires_grad_(False)


def changed(rank, world, stage, zero):
    """Each change on both ranks, then on rank 1 alone; undone, training goes on where it was."""
    torch.manual_seed(0)
    engine = start(WithFrozen(), stage=stage, bucket=800, zero=zero)
    one_step(engine, rank, world)
    before = engine.params_sha256()
    for change, text in CHANGES.items():
        for ranks in ((0, 1), (1,)):
            # Gradients first: in stage 3 ranks with other modules would fetch other parameters.
            engine.backward(engine(*my_micro_batches(1, rank, world, 2, 1)[0]))
            undo = change(engine.module) if rank in ranks else lambda: None
            with pytest.raises(RuntimeError, match=("" if rank in ranks else "rank 1: ") + text):
                engine.step()
            undo()
            assert not engine.was_step_applied()
    engine.module.__dict__.get("_modules").pop("more")
    assert engine.params_sha256() == before
    engine.module.norm.weight.requires_grad_(False)  # between two steps everything is allowed
    engine.module.norm.weight.requires_grad_()
    engine.module.teacher = nn.Linear(2, 2).requires_grad_(False)  # and so is what does not train
    engine.module.act = nn.ReLU()
    one_step(engine, rank, world, 1)
    del engine.module.teacher
    return engine.last_step.grad_norm, engine.params_sha256()


def test_changes_are_named_on_all_ranks(ranks):
    found = [
        ranks.run(changed, stage, zero, world_size=2)
        for stage, zero in [(0, {}), (1, {"offload_optimizer": {"device": "cpu"}}), (2, {}), (3, {}), (3, WHOLE)]
    ]
    assert all(result == found[0][0] for results in found for result in results)


@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks()
def test_a_param_group_that_is_added_on_one_rank_is_refused_on_all(rank, world, stage):
    engine = start(make_model(), stage=stage, zero=WHOLE)
    one_step(engine, rank, world)
    before = engine.params_sha256()
    if rank == 0:
        engine.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    with pytest.raises(RuntimeError, match=("" if rank == 0 else "rank 0: ") + "the optimizer's parameters have chan"):
        one_step(engine, rank, world)
    assert engine.params_sha256() == before
