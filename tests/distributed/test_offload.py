"""Offloading changes where things are, and nothing else: bits, counted bytes, order, checkpoints, misuse."""

import itertools

import pytest
import torch

import deepzero
from deepzero.config.strict import ConfigError
from deepzero.offload import offload_plan, pinned_arena
from deepzero.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
)
from tests.distributed.pool import on_ranks
from tests.distributed.training import as_predicted, config, make_model, my_micro_batches, one_step, train

STEPS = 4
CPU_ADAM = {"type": "CPUAdam", "params": {"lr": 1e-2, "weight_decay": 0.1}}
PSI = sum(p.numel() for p in make_model().parameters())


def zero(stage, ratio=None, param=False, **more):
    """``zero_optimization`` with offload; stage 3 with persistent and partitioned parameters."""
    block = {"stage3_param_persistence_threshold": 30} if stage == 3 else {}
    if ratio is not None:
        block["offload_optimizer"] = {"device": "cpu", "ratio": ratio, **more}
    if param:
        block["offload_param"] = {
            "device": "cpu", "pin_memory": True, "buffer_count": 5, **({} if param is True else param),
        }  # fmt: skip
    return block


def settings(stage, ratio=None, param=False, chaos=None, bucket=200, **more):
    extra = more.pop("offload", {})
    return config(
        stage=stage, bucket=bucket, overlap=True, chaos=chaos, zero=zero(stage, ratio, param, **extra),
        **{"optimizer": CPU_ADAM, **more},
    )  # fmt: skip


def many(rank, world, cases, steps=STEPS):
    found = []
    for case in cases:
        result = train(rank, world, case, steps)
        found.append(((result["losses"], result["norms"], result["sha256"]), result["report"]))
    return found


def same_everywhere(results):
    reference = results[0][0][0]
    assert len(set(reference[0])) == len(reference[0])
    for per_rank in results:
        for number, (bits, _) in enumerate(per_rank):
            assert bits == reference, f"case {number} differs"


def check_account(report, label, elsewhere=("gathered", "activations")):
    """Measured is predicted: traffic exactly, memory within a percent."""
    as_predicted(report["communication"])
    for category, entry in report["memory"].items():
        if category not in elsewhere:
            assert entry["measured"] == pytest.approx(entry["predicted"], rel=0.01), (label, category)


def marked(stage, world, accumulation):
    """One of each stage often, in all of what there is."""
    some = {(2, 2, 3): [], (3, 2, 1): [pytest.mark.slow], (1, 2, 1): [pytest.mark.slow]}
    return some.get((stage, world, accumulation), [pytest.mark.exhaustive])


@pytest.mark.parametrize(
    ("stage", "world", "accumulation"),
    [pytest.param(*case, marks=marked(*case)) for case in itertools.product((1, 2, 3), (2, 4), (1, 3))],
)
def test_same_bits(ranks, stage, world, accumulation):
    """Ratios, accumulation, chaos; the same Adam kernel with and without offload."""
    more = {"precision": "bf16", "gradient_accumulation_steps": accumulation}
    cases = [settings(stage, **more)]
    cases += [settings(stage, ratio, **more) for ratio in (0.0, 0.5)]
    cases += [settings(stage, 1.0, chaos=seed, **more) for seed in (None, 3)]
    cases += [settings(stage, 0.5, chaos=4, **more)]
    if stage == 3:
        cases += [settings(3, 1.0, param=True, chaos=seed, **more) for seed in (None, 5)]
        cases += [settings(3, 0.5, param={"max_in_cpu": 900}, chaos=6, **more)]
    results = ranks.run(many, cases, world_size=world, timeout=110)
    same_everywhere(results)
    for number, (_, report) in enumerate(results[0]):
        check_account(report, number)


@pytest.mark.slow
def test_same_bits_on_four_ranks(ranks):
    """A sample of the above."""
    more = {"precision": "bf16", "gradient_accumulation_steps": 3}
    cases = [settings(3, **more), settings(3, 1.0, param=True, chaos=5, **more)]
    same_everywhere(ranks.run(many, [*cases, settings(2, 0.5, chaos=4, **more)], world_size=4, timeout=110))


ONE_AND_THREE = [pytest.param(stage, marks=pytest.mark.exhaustive) for stage in (1, 3)]


@pytest.mark.parametrize("stage", [2, *ONE_AND_THREE])
def test_same_bits_in_fp32_and_fp16(ranks, stage):
    """fp32 parameters are their own masters where both are on one side; fp16 has a loss scale and overflows."""
    for more in ({"precision": "fp32"}, {"precision": "fp16", "fp16": {"initial_scale_power": 18, "hysteresis": 1}}):
        cases = [settings(stage, **more)] + [settings(stage, ratio, chaos=7, **more) for ratio in (0.5, 1.0)]
        if stage == 3:
            cases += [settings(3, ratio, param={"max_in_cpu": 900}, chaos=8, **more) for ratio in (0.5, 1.0)]
            cases += [settings(3, 1.0, param=True, chaos=9, **more)]
        results = ranks.run(many, cases, 8, world_size=2, timeout=110)
        reference = results[0][0][0]
        for per_rank in results:
            assert all(bits == reference for bits, _ in per_rank), more
        for number, (_, report) in enumerate(results[0]):
            check_account(report, (more["precision"], number))


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adagrad"])
@on_ranks()
def test_any_elementwise_optimizer(rank, world, name):
    """An optimizer object of torch's steps in host memory as it would on the device."""
    found = []
    for ratio in (None, 0.5, 1.0):
        model = make_model()
        extra = {"momentum": 0.9} if name in ("SGD", "RMSprop") else {}
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-2, **extra)
        case = settings(2, ratio, precision="bf16", chaos=2)
        del case["optimizer"]
        engine, *_ = deepzero.initialize(model=model, optimizer=optimizer, config=case)
        go(engine, rank, world, 0, 4)
        found.append((engine.last_step.loss, engine.params_sha256()))
        engine.destroy()
    assert found[0] == found[1] == found[2]


def go(engine, rank, world, first, last):
    return [one_step(engine, rank, world, step).loss for step in range(first, last)]


def test_narrow_gradients(ranks):
    """With ``grad_accum_dtype=bf16`` two bytes an element come down and two go up: the paper's 4 Psi / W."""
    for stage in (1, 2, 3):
        narrow = {"precision": "bf16", "data_types": {"grad_accum_dtype": "bf16"}}
        cases = [settings(stage, ratio, **narrow) for ratio in (None, 1.0)]
        cases += [settings(stage, 1.0, chaos=1, gradient_accumulation_steps=2, **narrow)]
        cases += [settings(stage, None, gradient_accumulation_steps=2, **narrow)]
        results = ranks.run(many, cases, 2, world_size=2)
        for per_rank in results:
            assert per_rank[0][0] == per_rank[1][0] and per_rank[2][0] == per_rank[3][0]
        wire = results[0][1][1]["communication"]
        sent = [wire[f"offload.{kind}"]["measured"] for kind in ("gradients_to_host", "parameters_to_device")]
        true_bytes = sum(2 * counts["elements"] for counts in sent)
        assert true_bytes == pytest.approx(4 * PSI / 2)
        check_account(results[0][1][1], stage)
        check_account(results[0][2][1], stage)


def test_device_memory(ranks):
    """What is left on the device: 2 Psi and buffers in stages 1 and 2; with offload_param what is gathered."""
    for stage, param in ((1, False), (2, False), (3, False), (3, True)):
        results = ranks.run(many, [settings(stage, 1.0, param, precision="bf16")], 2, world_size=2)
        check_account(results[0][0][1], (stage, param))
        memory = results[0][0][1]["memory"]
        assert memory["masters"]["measured"] == memory["moments"]["measured"] == memory["gradients"]["measured"] == 0
        whole = sum(p.numel() for p in make_model().parameters() if p.numel() <= 30) if stage == 3 else PSI
        parted = 0 if param or stage < 3 else PSI - whole
        assert memory["parameters"]["measured"] == pytest.approx(2 * whole + 2 * parted / 2, rel=0.01)
        assert memory["host_masters"]["measured"] == pytest.approx(4 * PSI / 2, rel=0.01)
        assert memory["host_moments"]["measured"] == pytest.approx(8 * PSI / 2, rel=0.01)
        assert memory["host_gradients"]["measured"] == pytest.approx(4 * PSI / 2, rel=0.01)
        assert memory["host_parameters"]["measured"] == pytest.approx((PSI - whole) if param else 0, rel=0.01)


def order_of_events(rank, world):
    engine, *_ = deepzero.initialize(model=make_model(), config=settings(2, 1.0, precision="bf16"))
    engine.ledger.trace = True
    go(engine, rank, world, 0, 1)
    return [(event.what, event.kind, event.where) for event in engine.ledger.events]


def test_order_of_events(ranks):
    """Gradients leave during the backward pass; a bucket's parameters leave before the next one's, and are gathered
    while the CPU steps on.
    """
    events = ranks.run(order_of_events, world_size=2)[0]
    words = [what for what, *_ in events]
    down = [at for at, (what, kind, _) in enumerate(events) if kind == "offload.gradients_to_host"]
    assert len(down) > 4 and sum(at < words.index("backward_end") for at in down) >= len(down) - 3
    assert down[-1] < words.index("boundary")
    up = [at for at, (what, kind, _) in enumerate(events) if kind == "offload.parameters_to_device"]
    gathers = [at for at, (what, kind, _) in enumerate(events) if what == "launch" and kind == "parameters.all_gather"]
    assert words.index("boundary") < up[0] and gathers[-1] < words.index("step") < words.index("publish")
    assert [first < second for first, second in zip(up, gathers, strict=True)] == [True] * len(up)
    assert all(second < first for first, second in zip(up[1:], gathers, strict=False))


def checkpoints(rank, world, folder, stage, one, other):
    def engine_for(case):
        return deepzero.initialize(model=make_model(), config=case)[0]

    straight = engine_for(settings(stage, precision="bf16"))
    wanted = go(straight, rank, world, 0, 6)
    sha = straight.params_sha256()
    straight.destroy()
    first = engine_for(one)
    begun = go(first, rank, world, 0, 3)
    first.save_checkpoint(folder)
    first.destroy()
    second = engine_for(other)
    go(second, rank, world, 3, 4)  # what is loaded replaces something else
    second.load_checkpoint(folder)
    went_on = go(second, rank, world, 3, 6)
    assert begun + went_on == wanted and second.params_sha256() == sha
    second.destroy()


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.exhaustive), 2, 3])
def test_checkpoints_with_and_without(ranks, stage, tmp_path):
    """Saved with offload and loaded without, and the other way round: the bits of a run that did not stop."""
    plain = settings(stage, precision="bf16")
    offloaded = settings(stage, 0.5 if stage == 2 else 1.0, param=stage == 3, chaos=4, precision="bf16")
    for number, (one, other) in enumerate(((plain, offloaded), (offloaded, plain))):
        ranks.run(checkpoints, str(tmp_path / str(number)), stage, one, other, world_size=2)


def look_inside(rank, world, stage, ratio):
    model = make_model()
    engine, *_ = deepzero.initialize(model=model, config=settings(stage, ratio, precision="bf16", chaos=6))
    go(engine, rank, world, 0, 2)
    ids, labels = my_micro_batches(2, rank, world, engine.batch.micro_batch, 1)[0]
    engine.backward(engine(ids, labels))
    param = model.blocks[0][1].weight
    grad = safe_get_full_grad(param)
    safe_set_full_grad(param, grad * 2)
    doubled = safe_get_full_grad(param)
    engine.step()
    master = safe_get_full_fp32_param(param)
    moment = safe_get_full_optimizer_state(param, "exp_avg")
    safe_set_full_fp32_param(param, master + 1)
    with deepzero.zero.GatheredParameters(param):
        shown = param.detach().clone()
    go(engine, rank, world, 3, 4)
    return grad, doubled, master, moment, shown, engine.params_sha256()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_looking_at_parts(ranks, stage):
    without, with_offload = (ranks.run(look_inside, stage, ratio, world_size=2)[0] for ratio in (None, 1.0))
    for one, other in zip(without[:-1], with_offload[:-1], strict=True):
        assert torch.equal(one, other)
    assert torch.equal(without[1], without[0] * 2) and torch.equal(without[4], (without[2] + 1).bfloat16())
    assert without[-1] == with_offload[-1]


def writes(rank, world, stage, ratio):
    model = make_model()
    engine, *_ = deepzero.initialize(model=model, config=settings(stage, ratio, precision="bf16", chaos=6))
    go(engine, rank, world, 0, 1)
    with deepzero.zero.GatheredParameters(model.norm.weight, modifier_rank=0), torch.no_grad():
        model.norm.weight.mul_(0.5)
    state = {key: value + 0.25 for key, value in engine.module_state_dict().items()}
    go(engine, rank, world, 1, 2)
    engine.load_module_state_dict(state)
    return go(engine, rank, world, 2, 4), engine.params_sha256()


@pytest.mark.parametrize("stage", [2, 3])
def test_writes_between_steps(ranks, stage):
    """A master on the host follows what is written to its parameter on the device."""
    without, with_offload = (ranks.run(writes, stage, ratio, world_size=2) for ratio in (None, 1.0))
    assert without == with_offload


def refused(rank, world, changes):
    try:
        deepzero.initialize(model=make_model(), config=changes)
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("changes", "words"), [
    ({"stage": 0, "offload_optimizer": {"device": "cpu"}}, "stages 1, 2, 3"),
    ({"stage": 2, "offload_param": {"device": "cpu"}}, "stage 3 alone"),
    ({"stage": 3, "offload_param": {"device": "cpu"}}, "needs zero_optimization.offload_optimizer.device=cpu"),
    ({"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 1.5}}, "between 0 and 1"),
    ({"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}, "nvme"),
    ({"stage": 2, "offload_optimizer": {"device": "gpu"}}, "not one of none, cpu"),
    ({"stage": 2, "offload_optimizer": {"device": "cpu", "raito": 1}}, "ratio"),
    ({"stage": 1, "reduce_scatter": False, "offload_optimizer": {"device": "cpu"}}, "reduce_scatter"),
    ({"stage": 2, "offload_optimizer": {"device": "none", "ratio": "half"}}, "must be a number"),
    ({"stage": 2, "offload_optimizer": {"device": "cpu", "threads": 5000}}, "only wait for each other"),
    ({"stage": 2, "offload_optimizer": {"device": "cpu", "delay_after_steps": 3}}, "delayed_update=true"),
    ({"stage": 2, "offload_optimizer": "cpu"}, "must be an object"),
])  # fmt: skip
def test_bad_settings(ranks, changes, words):
    case = config()
    case["zero_optimization"] = changes
    for told in ranks.run(refused, case, world_size=2):
        assert words in str(told)


def crowded(rank, world):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pinned_arena, "available_host_bytes", lambda: 1000 if rank == 1 else 1 << 40)
        return refused(rank, world, settings(2, 1.0))


def bound(rank, world):
    """Rank 1 may use one core alone, for which eight threads are too many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload_plan, "usable_cores", lambda: frozenset([0] if rank == 1 else range(64)))
        return refused(rank, world, settings(2, 1.0, offload={"threads": 8}))


def test_threads_that_one_rank_cannot_have(ranks):
    """All ranks say so; none waits for the one that does."""
    for rank, told in enumerate(ranks.run(bound, world_size=2)):
        assert told.startswith(("", "rank 1: ")[rank == 0] + "zero.offload_optimizer.threads=8: this rank has 1 cores")


def test_a_host_without_room(ranks):
    """One rank's host is full: all ranks say so, with the sizes, and nothing has started."""
    for rank, told in enumerate(ranks.run(crowded, world_size=2)):
        assert (
            told.startswith(("", "rank 1: ")[rank == 0] + "offloading needs")
            and "masters" in told
            and "moments" in told
        )
    same_everywhere(ranks.run(many, [settings(2, 1.0)], world_size=2))
