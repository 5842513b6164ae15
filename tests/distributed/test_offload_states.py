"""``offload_states`` and ``reload_states``: the device's memory is given back, and nothing else changes."""

import copy
import pickle
from enum import Enum
from unittest import mock

import pytest
import torch
from torch import nn

import deepzero
from deepzero.comm.ledger import SPARE
from deepzero.offload import offload_states
from deepzero.offload.offload_states import HOST_STATES, STATES, STATES_TO_DEVICE, STATES_TO_HOST, StatesOffloadedError
from deepzero.runtime.zero.stage3 import PartitionedParamGroup
from tests.distributed.pool import on_ranks, sampled
from tests.distributed.training import WHOLE, built, config, make_model, my_micro_batches, one_step, step_from

EXHAUSTIVE = pytest.mark.exhaustive
ALL = sampled([(1, "fp32"), (3, "bf16")], (0, 1, 2, 3), ("fp32", "bf16"))


class DeepSpeedsEnum(str, Enum):
    optim_states = "optim_states"
    lp_grads = "lp_grads"


def start(stage, precision="fp32", offload=False, persistent=False, **changes):
    zero = dict(WHOLE) if stage == 3 and not persistent else {}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu", "ratio": 0.5 if offload is True else 1.0}
    if offload == "parameters":
        zero["offload_param"] = {"device": "cpu", "max_in_cpu": 1500}
    return built(config(stage=stage, precision=precision, bucket=1500, overlap=True, zero=zero, **changes))


def batch(rank, world):
    return my_micro_batches(77, rank, world, 2, 1)[0]


def extents(engine):
    with torch._C.DisableTorchFunctionSubclass():
        states = engine.offloader.states().items()
        held = {what: [t.untyped_storage() for t, _ in tensors if t.numel()] for what, tensors in states}
        return {what: {s._cdata: s.nbytes() for s in storages if s.resizable()} for what, storages in held.items()}


def state_of(engine):
    optimizer = [t.clone() for state in engine.optimizer.state.values() for t in state.values()]
    return optimizer + [master.detach().clone() for group in engine.zero.groups for master in group.masters]


def trained(rank, world, stage, precision, options, away):
    """Two steps, away and back, two more; or all four."""
    engine = start(stage, precision, **options)
    seen = [one_step(engine, rank, world, step) for step in range(2)]
    if away is not None:
        include, non_blocking = away
        evaluated = torch.no_grad()(lambda: float(engine(*batch(rank, world))))
        before = evaluated()
        engine.offload_states(include, non_blocking=non_blocking)
        assert "lp_params" in engine.offloader.away or evaluated() == before
        left = extents(engine)
        for category in include or STATES:
            assert not any(left[category].values()), (category, left[category])
        engine.reload_states(non_blocking)
        assert all(size for sizes in extents(engine).values() for size in sizes.values())
    seen += [one_step(engine, rank, world, step) for step in range(2, 4)]
    return [(r.loss, r.grad_norm) for r in seen], engine.params_sha256(), [t.tolist() for t in state_of(engine)]


ONCE, TWICE = [(None, False)], [(None, False), (None, True)]
SITUATIONS = [
    *(pytest.param(*p.values, {}, [*TWICE, *(([n], False) for n in STATES)], 2, marks=p.marks) for p in ALL),
    *(
        (stage, "fp16", {"fp16": {"initial_scale_power": 8}}, [*ONCE, (["optim_states", "hp_params"], False)], 2)
        for stage in (2, 3)
    ),
    # Chaos puts copies off.
    *(pytest.param(s, "bf16", {"chaos": 3}, TWICE, 2, marks=[] if s == 3 else EXHAUSTIVE) for s in (1, 2, 3)),
    # Alone, and of uneven extents.
    *(
        pytest.param(3, "bf16", {"persistent": persistent}, ONCE, world, marks=[] if world == 1 else EXHAUSTIVE)
        for persistent in (False, True)
        for world in (1, 3)
    ),
    # What is in the arena stays.
    *(
        pytest.param(stage, "bf16", {"offload": True}, [*ONCE, (["optim_states"], False)], 2,
                     marks=[] if stage == 2 else EXHAUSTIVE)
        for stage in (1, 2, 3)
    ),
    (3, "bf16", {"offload": "parameters"}, [*ONCE, (["lp_params"], False)], 2),
]  # fmt: skip


@pytest.mark.parametrize(("stage", "precision", "options", "aways", "world"), SITUATIONS)
@on_ranks(None)
def test_same_bits(rank, world, stage, precision, options, aways):
    reference, *others = (trained(rank, world, stage, precision, options, away) for away in (None, *aways))
    for number, result in enumerate(others):
        assert result == reference, f"variant {number}"


def accumulated(rank, world, stage, precision, away):
    """Away in the middle of an optimizer step, with gradients, at every micro-batch."""
    engine, norms = start(stage, precision, gradient_accumulation_steps=3), []
    for step in range(3):
        for ids, labels in my_micro_batches(step, rank, world, 2, 3):
            loss = engine(ids, labels)
            if away:
                engine.offload_states()
                engine.reload_states()
            engine.backward(loss)
            if away:
                engine.offload_states(include=["lp_grads", "contiguous_grad_buffer"])
                engine.reload_states()
            engine.step()
        norms.append(engine.last_step.grad_norm)
    return norms, engine.params_sha256()


@pytest.mark.parametrize(("stage", "precision"), ALL)
@on_ranks()
def test_in_the_middle_of_accumulation(rank, world, stage, precision):
    here, away = (accumulated(rank, world, stage, precision, away) for away in (False, True))
    assert here == away


@pytest.mark.parametrize(("stage", "precision"), ALL)
@on_ranks()
def test_what_is_away_is_missed(rank, world, tmp_path, stage, precision):
    folder = str(tmp_path / "saved")
    engine = start(stage, precision)
    one_step(engine, rank, world, 0)
    loss = engine(*batch(rank, world))
    engine.offload_states()
    param = next(engine.module.parameters())
    master = engine.zero.groups[0].masters[0]
    moment = next(iter(engine.optimizer.state.values()))["exp_avg"]
    asked = {
        "forward": lambda: engine(*batch(rank, world)),
        "module": lambda: engine.module(*batch(rank, world)),
        "backward": lambda: engine.backward(loss),
        "plain backward": lambda: loss.backward(),
        "step": engine.step,
        "save": lambda: engine.save_checkpoint(folder),
        "save 16 bit": lambda: engine.save_16bit_model(folder),
        "load": lambda: engine.load_checkpoint(folder),
        "hash": lambda: engine.params_sha256(),
        "load module": lambda: engine.load_module_state_dict({}),
        "state dict": lambda: engine.module_state_dict(),
        "fragment": lambda: deepzero.utils.safe_get_full_fp32_param(param),
        "parameter": lambda: param + 1 if stage < 3 else deepzero.zero.GatheredParameters(param).__enter__(),
        "master": lambda: master.sum(),
        "moment": lambda: moment.tolist(),
        "detach": lambda: moment.detach(),
        "numpy": lambda: moment.numpy(),
        "together": lambda: torch._foreach_add_([moment], 1.0),
        "copied": lambda: copy.deepcopy(engine.module) if stage < 3 else copy.deepcopy(moment),
        "pickled": lambda: pickle.dumps(engine.optimizer.state_dict()),
    }
    for name, ask in asked.items():
        with pytest.raises(RuntimeError, match=r"reload_states\(\)"):
            ask()
            raise AssertionError(name)
    assert "away" in repr(moment) and moment.shape == master.shape
    engine.passes.count = 0
    engine.offload_states()  # it is away already
    engine.reload_states()
    engine.reload_states()
    step_from(engine, loss)
    # The optimizer's state alone: the model can be used, and be trained up to the step.
    engine.offload_states(include=["optim_states"])
    engine.params_sha256()
    engine.backward(engine(*batch(rank, world)))
    with pytest.raises(StatesOffloadedError, match=r"engine.step\(\): optim_states are away"):
        engine.step()
    with pytest.raises(RuntimeError, match="optim_states"):
        engine.save_checkpoint(folder)
    engine.reload_states()
    engine.step()
    engine.save_checkpoint(folder, asynchronous=True)
    engine.offload_states()
    assert engine.checkpointer.saver._thread is None
    engine.destroy()
    assert torch.isfinite(next(engine.module.parameters())).all()
    with pytest.raises(RuntimeError, match="destroy"):
        engine.offload_states()


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks()
def test_a_parameter_without_elements(rank, world, stage):
    """A parameter that has none: it lies nowhere, and does not leave with the others."""
    model = make_model()
    model.empty = nn.Parameter(torch.empty(0))
    engine, *_ = deepzero.initialize(model=model, config=config(stage=stage, precision="fp32", bucket=1500))
    for step in range(2):
        one_step(engine, rank, world, step)
        engine.offload_states()
        engine.reload_states()


@on_ranks()
def test_arguments(rank, world):
    engine = start(3, "bf16")
    with pytest.raises(ValueError, match="optim_states, hp_params, lp_params, lp_grads, contiguous_grad_buffer"):
        engine.offload_states(include=["optimizer"])
    for device in ("nvme", "none", "cuda"):
        with pytest.raises(ValueError, match=device):
            engine.offload_states(device=device)
    gathered = lambda: deepzero.zero.GatheredParameters(engine.module.head.weight)
    with gathered(), pytest.raises(RuntimeError, match="GatheredParameters"):
        engine.offload_states()
    engine.offload_states(include=[DeepSpeedsEnum.optim_states, DeepSpeedsEnum.lp_grads], device=torch.device("cpu"))
    assert engine.offloader.away == {"optim_states", "lp_grads"}
    engine.offload_states(include=("hp_params",))
    _, (second, _) = engine.offloader.offloaded
    with mock.patch.object(second, "come_back", side_effect=torch.OutOfMemoryError), pytest.raises(RuntimeError):
        engine.reload_states()
    assert engine.offloader.away == {"hp_params"}  # of the first call nothing is refused any more
    engine.reload_states()
    with gathered():
        pass
    engine.offload_states(include="lp_params")
    with pytest.raises(RuntimeError, match="lp_params are away"), gathered():
        pass


@on_ranks()
def test_own_masters(rank, world):
    """fp32 parameters are their own masters: whichever is named, both are away."""
    engine = start(2, "fp32")
    engine.offload_states(include=["hp_params"])
    assert engine.offloader.away == {"hp_params", "lp_params"}
    engine.reload_states()


class Adapter(nn.Module):
    """Frozen weights of the model's own, and one that somebody else refers to."""

    def __init__(self, shared):
        super().__init__()
        self.base, self.adapter = nn.Linear(8, 8), nn.Linear(8, 8)
        self.other = nn.Parameter(shared.data, requires_grad=False)
        self.base.requires_grad_(False)

    def forward(self, x):
        return (self.adapter(self.base(x)) + self.other).square().mean()


@on_ranks()
def test_frozen_parameters(rank, world):
    shared = nn.Parameter(torch.ones(8))
    engine, *_ = deepzero.initialize(model=Adapter(shared), config=config(stage=2))
    before = engine.module.base.weight.clone()
    engine.offload_states()
    assert engine.module.base.weight.untyped_storage().nbytes() == 0
    assert shared.sum() == 8 and engine.module.other.sum() == 8
    engine.reload_states()
    assert torch.equal(engine.module.base.weight, before)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks()
def test_the_ledger_shows_it(rank, world, stage):
    engine = start(stage, "bf16")
    one_step(engine, rank, world)
    ledger = engine.ledger
    before = ledger.held_now()
    there = extents(engine)
    engine.offload_states()
    away = ledger.held_now()
    host = away.pop(HOST_STATES)
    counters = sum(t.nbytes for state in engine.optimizer.state.values() for t in state.values() if not t.dim())
    assert sum(away.values()) == 0 < counters  # the counters of steps stay, and count as nothing
    # Between steps gradients and buckets hold nothing that anybody needs: they are freed and not copied.
    kept = {key: size for name in ("optim_states", "hp_params", "lp_params") for key, size in there[name].items()}
    assert host == sum(kept.values())
    engine.reload_states()
    after = ledger.held_now()
    assert after.pop(HOST_STATES) == 0 and before.pop(SPARE, 0) >= after.pop(SPARE, 0) == 0
    assert after == before
    moved = ledger.between_steps[STATES_TO_HOST], ledger.between_steps[STATES_TO_DEVICE]
    assert [traffic.bytes for traffic in moved] == [host, host]
    assert engine.report()["memory"][HOST_STATES]["largest"] >= host
    for group in engine.zero.groups:
        if not isinstance(group, PartitionedParamGroup):
            group.sync_masters_from_params()  # raises where a parameter has left the flat buffer


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks()
def test_zero_grad_while_away(rank, world, stage):
    hashes = set()
    for away in (False, True):
        engine = start(stage, "bf16", gradient_accumulation_steps=2)
        one_step(engine, rank, world)
        engine.backward(engine(*batch(rank, world)))
        if away:
            engine.offload_states()
        engine.discard_gradients()
        engine.reload_states()
        one_step(engine, rank, world, 1)
        hashes.add(engine.params_sha256())
    assert len(hashes) == 1


@on_ranks()
def test_a_host_without_room(rank, world):
    engine = start(2, "bf16")
    one_step(engine, rank, world)
    little = mock.patch.object(offload_states, "available_host_bytes", return_value=1000 if rank == 1 else None)
    with little, pytest.raises(RuntimeError, match="GiB are available" if rank == 0 else "GiB"):
        engine.offload_states()
    one_step(engine, rank, world)
