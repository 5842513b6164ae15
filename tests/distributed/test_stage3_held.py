"""Whatever keeps a weight of stage 3 until the backward pass sees its values: the bits of stage 2, under poison."""

import itertools
import math
import random

import pytest
import torch
from torch import nn

import deepzero
from tests.distributed.pool import on_ranks
from tests.distributed.training import config, same_in_stages_2_and_3
from tests.distributed.weight_uses import CHECKPOINTINGS, OPERATIONS, WIDTH, checkpointed

FROZEN = ("frozen", "trained", "mixed")
CASES = [
    (*case, init)
    for case, init in itertools.product(itertools.product(FROZEN, OPERATIONS, CHECKPOINTINGS), (False, True))
]
STEPS = 3


class Blocks(nn.Module):
    """Blocks with one operation; every second is checkpointed as a function, with no module's hooks around it."""

    def __init__(self, operation, frozen, checkpointing):
        super().__init__()
        self.checkpointing = checkpointing
        self.first = nn.Linear(WIDTH, WIDTH)
        self.uses = nn.ModuleList(OPERATIONS[operation]() for _ in range(4))
        self.after = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        for number, param in enumerate(self.uses.parameters()):
            param.requires_grad_(frozen == "trained" or (frozen == "mixed" and number % 2 == 1))

    def forward(self, x):
        x = self.first(x)
        for number, (use, after) in enumerate(zip(self.uses, self.after, strict=True)):
            operation = use if number % 2 == 0 else use.forward
            x = x + checkpointed(self.checkpointing, lambda y, f=operation, g=after: g(torch.tanh(f(y))), x)
        return x.pow(2).mean()


def batch(step, rank):
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def trained(rank, settings, init, model):
    """Loss, norm and hash of each step."""
    torch.manual_seed(0)
    with deepzero.zero.Init(enabled=init):
        made = Blocks(*model)
    engine, *_ = deepzero.initialize(model=made, config=settings)
    seen = []
    for step in range(STEPS):
        engine.backward(engine(batch(step, rank)))
        engine.step()
        seen.append((engine.last_step.loss, engine.last_step.grad_norm, engine.params_sha256()))
    engine.destroy()
    return seen


def compared(rank, world, cases):
    """The cases in which stage 3 differs from stage 2."""
    different = []
    for frozen, operation, checkpointing, init in cases:
        model = (operation, frozen, checkpointing)
        expected = trained(rank, config(stage=2, bucket=300), False, model)
        zero = {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 200}
        settings = config(stage=3, bucket=300, zero=zero, chaos=1)
        settings["comm"]["chaos"]["max_delay_ms"] = 0.02
        if (found := trained(rank, settings, init, model)) != expected:
            different.append(f"{frozen} {operation} {checkpointing} init={init}: {found} is not {expected}")
    return different


def some_cases():
    """A thirtieth, with each value of each axis; the exhaustive marker runs all."""
    shuffled = CASES.copy()
    random.Random(0).shuffle(shuffled)
    chosen = shuffled[: len(CASES) // 30]
    for axis in range(4):
        counts = {value: sum(case[axis] == value for case in chosen) for value in {case[axis] for case in CASES}}
        for value in sorted(value for value, count in counts.items() if count < 1):
            chosen.append(next(case for case in shuffled if case[axis] == value))
    return chosen


class Conv1D(nn.Module):
    """GPT-2's linear layer, frozen, with trained factors beside it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.2, requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x):
        return torch.addmm(self.bias, x, self.weight) + self.up(self.down(x))


class Lora(nn.Module):
    """The standard recipe: adapters, with each block checkpointed."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(Conv1D(), nn.Tanh(), Conv1D()) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = x + checkpointed("non_reentrant", block, x)
        return x.float().pow(2).mean()


@on_ranks(timeout=300)
def test_adapters_with_checkpointed_blocks(rank, world):
    for precision, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16), ("fp32", torch.float32)):
        more = {"fp16": {"initial_scale_power": 8}} if precision == "fp16" else {}
        seen = []

        def step(engine, number, dtype=dtype, seen=seen):
            engine.backward(engine(batch(number, rank).to(dtype)))
            engine.step()
            assert math.isfinite(engine.last_step.grad_norm) and not engine.last_step.skipped
            seen.append((engine.last_step.loss, engine.last_step.grad_norm))
            return seen[-1]

        same_in_stages_2_and_3(lambda stage: Lora(), step, 5, precision=precision, bucket=300, **more)
        assert seen[0] != seen[-1]


@on_ranks(timeout=300)
def test_values_show_inside_a_pass_only_and_what_is_kept_stays(rank, world):
    """A parameter shows its values inside a pass, however long its bucket stays gathered; what is kept stays."""
    settings = config(stage=3, bucket=10**6, zero={"stage3_param_persistence_threshold": 0}, chaos=1)
    engine, *_ = deepzero.initialize(model=Blocks("addmm", "trained", "none"), config=settings)
    model, kept = engine.module, []
    values = {name: value.clone() for name, value in engine.module_state_dict().items()} if rank == 0 else {}
    if rank:
        engine.module_state_dict()
    hook = model.after[0].register_forward_hook(
        lambda module, *_: kept.extend([module.weight.t(), module.weight.detach(), module.weight.data])
    )
    loss = engine(batch(0, rank))
    assert engine.stage.coordinator.live_numel > 0
    with pytest.raises(deepzero.zero.PartitionedUseError, match="partitioned"):
        model.after[0].weight.sum()
    with deepzero.zero.GatheredParameters(model.after[0].weight):
        model.after[0].weight.sum()
    with pytest.raises(deepzero.zero.PartitionedUseError, match="partitioned"):
        model.after[0].weight.sum()
    engine.backward(loss)
    engine.step()
    hook.remove()
    for step in range(2):
        engine.backward(engine(batch(step, rank)))
        engine.step()
    if rank == 0:
        whole = values["after.0.weight"]
        assert all(
            torch.equal(value, expected) for value, expected in zip(kept, (whole.t(), whole, whole), strict=True)
        )


def test_some_ways_to_keep_a_weight(ranks):
    for different in ranks.run(compared, some_cases(), world_size=2, timeout=300):
        assert not different, "\n".join(different)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_all_ways_to_keep_a_weight(ranks, operation):
    cases = [case for case in CASES if case[1] == operation]
    for different in ranks.run(compared, cases, world_size=2, timeout=400):
        assert not different, "\n".join(different)
