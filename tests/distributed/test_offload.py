"""Offloading changes where things are, and nothing else: bits, counted bytes, order, checkpoints, misuse.

Also for frozen weights, one rank, state that is made late, ``zero.Init``, and exceptions half-way.
"""

from functools import partial
from unittest import mock

import pytest
import torch

import deepzero
from deepzero import utils
from deepzero.comm.reduce_scatter import BucketReducer
from deepzero.config.run import ModelConfig
from deepzero.config.strict import ConfigError
from deepzero.models.gpt import GPT
from deepzero.offload import cpu_adam
from deepzero.offload.adam_kernels import ChunkedAdam
from deepzero.offload.optimizer_offload import MOMENTS
from deepzero.zero import Init
from tests.distributed.pool import on_ranks, sampled
from tests.distributed.training import (
    as_predicted,
    built,
    check_alike,
    check_same_bits,
    config,
    go,
    make_batch,
    make_model,
    my_micro_batches,
    step_from,
)

STEPS = 3
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


def tier(name, stage, folder, chaos=None, **more):
    """Settings with all on the device, in host memory (half in stage 2), or in files; in stage 3 parameters, too."""
    ratio = {"plain": None, "memory": 0.5 if stage == 2 else 1.0, "files": 1.0}[name]
    case = settings(stage, ratio, name != "plain" and stage == 3, chaos, **more)
    if name == "files":
        block, where = case["zero_optimization"], {"device": "nvme", "nvme_path": str(folder)}
        block["offload_optimizer"] |= {**where, "buffer_count": 12, "pipeline_read": True, "pipeline_write": True}
        if stage == 3:
            block["offload_param"] = where
    return case


def check_same(ranks, cases, world_size=2):
    """The first case's bits in all; what was counted is what was predicted."""
    (losses, *_), reports = check_same_bits(ranks, cases, STEPS, world_size)
    assert len(set(losses)) == STEPS
    for number, report in enumerate(reports):
        check_account(report, number)


def check_account(report, label):
    """Measured is predicted: traffic exactly, memory within a percent."""
    as_predicted(report["communication"])
    for category, entry in report["memory"].items():
        if category not in ("gathered", "activations"):
            assert entry["measured"] == pytest.approx(entry["predicted"], rel=0.01), (label, category)


@pytest.mark.parametrize(
    ("stage", "world", "accumulation"),
    sampled([(2, 2, 3), (3, 1, 1)], (1, 2, 3), (1, 2, 4), (1, 3), slow=[(3, 2, 1), (1, 2, 1)]),
)
def test_same_bits(ranks, stage, world, accumulation):
    """The same Adam kernel with and without offload.

    On one rank nothing is gathered that copies could hide behind. Of one large bucket several reductions are under
    way, and each goes on with the sum that the one before leaves.
    """
    more = {"precision": "bf16", "gradient_accumulation_steps": accumulation}
    cases = [settings(stage, **more)]
    cases += [settings(stage, ratio, **more) for ratio in (0.0, 0.5)]
    cases += [settings(stage, 1.0, chaos=seed, **more) for seed in (None, 3)]
    cases += [settings(stage, 0.5, chaos=4, **more), settings(stage, 1.0, chaos=3, bucket=10**6, **more)]
    if stage == 3:
        cases += [settings(3, 1.0, param=True, chaos=seed, **more) for seed in (None, 5)]
        cases += [settings(3, 0.5, param={"max_in_cpu": 900}, chaos=6, **more)]
    check_same(ranks, cases, world)


@pytest.mark.slow
def test_same_bits_on_four_ranks(ranks):
    """A sample of the above."""
    more = {"precision": "bf16", "gradient_accumulation_steps": 3}
    cases = [settings(3, **more), settings(3, 1.0, param=True, chaos=5, **more)]
    check_same(ranks, [*cases, settings(2, 0.5, chaos=4, **more)], 4)


@pytest.mark.parametrize("stage", [2, *(pytest.param(stage, marks=pytest.mark.exhaustive) for stage in (1, 3))])
def test_same_bits_in_fp32_and_fp16(ranks, stage):
    """fp32 parameters are their own masters where both are on one side; fp16 has a loss scale and overflows."""
    for more in ({"precision": "fp32"}, {"precision": "fp16", "fp16": {"initial_scale_power": 16, "hysteresis": 1}}):
        cases = [settings(stage, **more)] + [settings(stage, ratio, chaos=7, **more) for ratio in (0.5, 1.0)]
        if stage == 3:
            cases += [settings(3, ratio, param={"max_in_cpu": 900}, chaos=8, **more) for ratio in (0.5, 1.0)]
            cases += [settings(3, 1.0, param=True, chaos=9, **more)]
        for number, report in enumerate(check_same_bits(ranks, cases, STEPS)[1]):
            check_account(report, (more["precision"], number))


@on_ranks(1)
def test_a_model_in_another_memory_format(rank, world):
    """The masters are contiguous, whatever the model's weights are."""
    found = []
    for ratio in (None, 1.0):
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(16, 1))
        engine = built(settings(2, ratio), model.to(memory_format=torch.channels_last))
        for step in range(2):
            step_from(engine, engine(torch.full((2, 3, 4, 4), step + 0.5)).square().mean())
        found.append(engine.params_sha256())
        torch.manual_seed(0)
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adagrad"])
@on_ranks()
def test_any_elementwise_optimizer(rank, world, name):
    """An optimizer object of torch's steps in host memory as it would on the device."""
    found = []
    for ratio in (None, 0.5, 1.0):
        model = make_model()
        extra = {"momentum": 0.9} if name == "SGD" else {}
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-2, **extra)
        case = settings(2, ratio, precision="bf16", chaos=2)
        del case["optimizer"]
        engine = built(case, model, optimizer=optimizer)
        go(engine, rank, world, 0, 4)
        found.append((engine.last_step.loss, engine.params_sha256()))
    assert found[0] == found[1] == found[2]


def test_narrow_gradients(ranks):
    """With ``grad_accum_dtype=bf16`` two bytes an element come down and two go up: the paper's 4 Psi / W."""
    for stage in (1, 2, 3):
        narrow = {"precision": "bf16", "data_types": {"grad_accum_dtype": "bf16"}}
        cases = [settings(stage, ratio, **narrow) for ratio in (None, 1.0)]
        cases += [settings(stage, 1.0, chaos=1, gradient_accumulation_steps=2, **narrow)]
        cases += [settings(stage, None, gradient_accumulation_steps=2, **narrow)]
        (_, report), (late, _) = (check_same_bits(ranks, pair, 2)[1] for pair in (cases[:2], cases[2:]))
        wire = report["communication"]
        sent = [wire[f"offload.{kind}"]["measured"] for kind in ("gradients_to_host", "parameters_to_device")]
        assert sum(2 * counts["elements"] for counts in sent) == pytest.approx(4 * PSI / 2)
        check_account(report, stage)
        check_account(late, stage)


def test_device_memory(ranks):
    """What is left on the device: 2 Psi and buffers in stages 1 and 2; with offload_param what is gathered."""
    for stage, param in ((1, False), (2, False), (3, False), (3, True)):
        _, (report,) = check_same_bits(ranks, [settings(stage, 1.0, param, precision="bf16")], 2)
        check_account(report, (stage, param))
        memory = report["memory"]
        assert memory["masters"]["measured"] == memory["moments"]["measured"] == memory["gradients"]["measured"] == 0
        whole = sum(p.numel() for p in make_model().parameters() if p.numel() <= 30) if stage == 3 else PSI
        parted = 0 if param or stage < 3 else PSI - whole
        assert memory["parameters"]["measured"] == pytest.approx(2 * whole + 2 * parted / 2, rel=0.01)
        assert memory["host_masters"]["measured"] == pytest.approx(4 * PSI / 2, rel=0.01)
        assert memory["host_moments"]["measured"] == pytest.approx(8 * PSI / 2, rel=0.01)
        assert memory["host_gradients"]["measured"] == pytest.approx(4 * PSI / 2, rel=0.01)
        assert memory["host_parameters"]["measured"] == pytest.approx((PSI - whole) if param else 0, rel=0.01)


@on_ranks()
def test_order_of_events(rank, world):
    """Gradients leave in the backward pass, one bucket's parameters before the next one's step, gathered under that."""
    engine = built(settings(2, 1.0, precision="bf16"))
    engine.ledger.trace = True
    go(engine, rank, world, 0, 1)
    events = [(event.what, event.kind, event.where) for event in engine.ledger.events]
    words = [what for what, *_ in events]
    down = [at for at, (what, kind, _) in enumerate(events) if kind == "offload.gradients_to_host"]
    assert len(down) > 4 and sum(at < words.index("backward_end") for at in down) >= len(down) - 3
    assert down[-1] < words.index("boundary")
    up = [at for at, (what, kind, _) in enumerate(events) if kind == "offload.parameters_to_device"]
    gathers = [at for at, (what, kind, _) in enumerate(events) if what == "launch" and kind == "parameters.all_gather"]
    assert words.index("boundary") < up[0] and gathers[-1] < words.index("step") < words.index("publish")
    assert [first < second for first, second in zip(up, gathers, strict=True)] == [True] * len(up)
    assert all(second < first for first, second in zip(up[1:], gathers, strict=False))


PAIRS = (("memory", "plain"), ("plain", "files"), ("files", "memory"))
ALL_PAIRS = (*PAIRS, ("plain", "memory"), ("files", "files"))


@pytest.mark.parametrize(("stage", "pairs"), [(3, PAIRS), *sampled([], (1, 2, 3), (ALL_PAIRS,))])
@on_ranks()
def test_checkpoints_with_and_without(rank, world, stage, pairs, tmp_path):
    """Saved by one tier and loaded by another: the bits of a run that did not stop."""
    straight = built(tier("plain", stage, tmp_path, precision="bf16"))
    wanted = go(straight, rank, world, 0, 4)
    for number, names in enumerate(pairs):
        one, other = (tier(name, stage, tmp_path, {"plain": None}.get(name, 4), precision="bf16") for name in names)
        first = built(one)
        begun = go(first, rank, world, 0, 2)
        first.save_checkpoint(tmp_path / str(number), asynchronous=names[0] == "files")
        go(first, rank, world, 2, 3)  # a save in the background, while a step goes on
        first.destroy()
        second = built(other)
        go(second, rank, world, 3, 4)  # what is loaded replaces something else
        second.load_checkpoint(tmp_path / str(number))
        went_on = go(second, rank, world, 2, 4)
        assert begun + went_on == wanted and second.params_sha256() == straight.params_sha256(), names


def look_inside(rank, world, case):
    engine = built(case)
    go(engine, rank, world, 0, 2)
    engine.backward(engine(*my_micro_batches(2, rank, world, engine.batch.micro_batch, 1)[0]))
    param = engine.module.blocks[0][1].weight
    grad = utils.safe_get_full_grad(param)
    utils.safe_set_full_grad(param, grad * 2)
    doubled = utils.safe_get_full_grad(param)
    engine.step()
    master = utils.safe_get_full_fp32_param(param)
    moment = utils.safe_get_full_optimizer_state(param, "exp_avg")
    utils.safe_set_full_fp32_param(param, master + 1)
    with deepzero.zero.GatheredParameters(param):
        shown = param.detach().clone()
    go(engine, rank, world, 3, 4)
    return grad, doubled, master, moment, shown, engine.params_sha256()


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.exhaustive), 2, 3])
@on_ranks()
def test_looking_at_parts(rank, world, stage, tmp_path):
    """``safe_get_*`` and ``safe_set_*`` read and write what lies wherever."""
    cases = (tier(name, stage, tmp_path, 6, precision="bf16") for name in ("plain", "memory", "files"))
    without, *others = (look_inside(rank, world, case) for case in cases)
    for found in others:
        assert all(torch.equal(one, other) for one, other in zip(without[:-1], found[:-1], strict=True))
        assert without[-1] == found[-1]
    assert torch.equal(without[1], without[0] * 2) and torch.equal(without[4], (without[2] + 1).bfloat16())


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.exhaustive), 3])
@on_ranks()
def test_writes_between_steps(rank, world, stage, tmp_path):
    """Masters and parameters follow what is written, and nothing that was read ahead is used after it."""
    found = []
    for name in ("plain", "memory", "files"):
        engine = built(tier(name, stage, tmp_path, 6, precision="bf16"))
        weights = engine.module.norm.weight, engine.module.blocks[0][1].weight
        go(engine, rank, world, 0, 2)
        for weight in weights:
            with deepzero.zero.GatheredParameters(weight, modifier_rank=0), torch.no_grad():
                weight.mul_(0.5)
        engine.eval()
        with torch.no_grad():
            evaluated = engine(*my_micro_batches(9, rank, world, 2, 1)[0]).item()
        engine.train()
        state = {key: value + 0.25 for key, value in engine.module_state_dict().items()}
        go(engine, rank, world, 2, 3)
        engine.load_module_state_dict(state)
        found.append((evaluated, go(engine, rank, world, 3, 5), engine.params_sha256()))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(("changes", "words"), [
    ({"stage": 0, "offload_optimizer": {"device": "cpu"}}, "stage=1, 2 or 3$"),
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
@on_ranks()
def test_bad_settings(rank, world, changes, words):
    with pytest.raises(ConfigError, match=words):
        built({**config(), "zero_optimization": changes})


@pytest.mark.parametrize(("asked", "here", "there", "given", "words"), [
    ("offload_plan.usable_cores", frozenset([0]), frozenset(range(64)), {"threads": 8},
     r"zero_optimization\.offload_optimizer\.threads=8: this rank has 1 cores"),
    ("pinned_arena.available_host_bytes", 1000, 1 << 40, {}, "offloading needs .*masters .*moments "),
], ids=["cores", "memory"])  # fmt: skip
@on_ranks()
def test_what_one_ranks_host_lacks(rank, world, asked, here, there, given, words):
    """All ranks say so, none waits for the one that does, and nothing has started."""
    answer = mock.patch(f"deepzero.offload.{asked}", return_value=here if rank == 1 else there)
    with answer, pytest.raises(ConfigError, match=("^rank 1: " if rank == 0 else "^") + words):
        built(settings(2, 1.0, offload=given))
    assert len(set(go(built(settings(2, 1.0)), rank, world, 0, STEPS))) == STEPS


def adapted(rank, world, case, init):
    """Large weights are frozen, norms and biases trained, as adapters do it."""
    torch.manual_seed(0)
    with deepzero.zero.Init(enabled=init):
        model = make_model()
    for param in model.parameters():
        param.requires_grad = param.dim() == 1
    engine = built(case, model)
    losses = go(engine, rank, world, 0, 3)
    memory = engine.report()["memory"]
    return losses, engine.params_sha256(), memory


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_frozen_weights(ranks, world, tmp_path):
    """In host memory, in files; in files with the optimizer on the device."""
    more = {"precision": "bf16", "bucket": 500}
    cases = [("host", tier("memory", 3, tmp_path, chaos, **more)) for chaos in (None, 3)]
    cases += [("file", tier("files", 3, tmp_path, chaos, **more)) for chaos in (3, None)]
    cases[-1][1]["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "ratio": 0.0}
    plain = ranks.run(adapted, tier("plain", 3, tmp_path, **more), False, world_size=world)[0]
    frozen = sum(p.numel() for p in make_model().parameters() if p.dim() == 2)
    for number, (place, case) in enumerate(cases):
        *bits, memory = ranks.run(adapted, case, number % 2 == 1, world_size=world)[0]
        assert tuple(bits) == plain[:2]
        assert memory[f"{place}_parameters"]["measured"] >= 2 * frozen / world
        assert (memory["masters"]["measured"] > 0) == (case is cases[-1][1])


@pytest.mark.parametrize("offload", [{"delayed_update": True}, {"device": "nvme", "nvme_path": "."}], ids=str)
@on_ranks()
def test_other_optimizers_are_refused(rank, world, offload):
    """By what steps bucket by bucket, or in a thread; nothing has been made."""
    model, case = make_model(), settings(2, 1.0, offload=offload)
    del case["optimizer"]
    with pytest.raises(ConfigError, match="CPUAdam alone, and the optimizer is AdamW"):
        built(case, model, optimizer=torch.optim.AdamW(model.parameters()))


class Late(torch.optim.Optimizer):
    """Momentum that is made in the first step, by a class that nobody knows."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in (p for p in group["params"] if p.grad is not None):
                if not (state := self.state[param]):
                    state["seen"] = torch.zeros_like(param)
                state["seen"].mul_(0.9).add_(param.grad)
                param.sub_(state["seen"], alpha=group["lr"])


@on_ranks()
def test_state_that_is_made_late(rank, world):
    """It lies outside of the arena, which has no room for it, and is counted where it is: on the host."""
    for make in (Late, partial(torch.optim.SGD, lr=1e-2, momentum=0.9, dampening=0.5)):
        found = []
        for ratio in (None, 1.0):
            model, case = make_model(), settings(2, ratio, precision="bf16")
            del case["optimizer"]
            engine = built(case, model, optimizer=make(model.parameters()))
            go(engine, rank, world, 0, 3)
            found.append((engine.params_sha256(), engine.report()["memory"]))
        (plain, held), (offloaded, memory) = found
        assert plain == offloaded and memory["moments"]["measured"] == 0
        assert memory["host_moments"]["measured"] == pytest.approx(held["moments"]["measured"], rel=0.01)
        assert not any(region.category == MOMENTS for region in engine.zero.offload.arena.regions)


@on_ranks()
def test_a_reduction_that_fails_can_be_repeated(rank, world):
    engine = built(settings(2, 1.0, precision="bf16"))
    go(engine, rank, world, 0, 1)
    ids, labels = my_micro_batches(1, rank, world, engine.batch.micro_batch, 1)[0]
    acquire = BucketReducer.acquire

    def full(self, bucket, *rest):
        if bucket.index == 3:
            raise torch.OutOfMemoryError("no room")
        return acquire(self, bucket, *rest)

    with mock.patch.object(BucketReducer, "acquire", full), pytest.raises(torch.OutOfMemoryError):
        engine.backward(engine(ids, labels))
    engine.discard_gradients()
    go(engine, rank, world, 1, 3)
    check_alike(engine.params_sha256())


@on_ranks()
def test_destroyed_and_built_again(rank, world):
    model = make_model()
    for _ in range(3):
        engine = built(settings(2, 1.0, precision="bf16", chaos=1), model)
        go(engine, rank, world, 0, 2)
        arena = engine.zero.offload.arena
        engine.destroy()
        assert not arena.pinned and arena.tensors("host_masters") == []
    check_alike([p.detach().float().sum().item() for p in model.parameters()])


WIDE = ModelConfig(
    vocab_size=40, block_size=8, n_layer=2, n_head=2, n_embd=24, tied=False, activation_checkpointing=True
)


def cut_settings(offload, optimizer, chaos=None):
    block = {"stage3_param_persistence_threshold": 30}
    if offload:
        block |= {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    return config(
        stage=3, bucket=200, overlap=True, precision="bf16", chaos=chaos, zero=block,
        optimizer={"type": optimizer, "params": {"lr": 1e-2}}, data_types={"grad_accum_dtype": "bf16"},
    )  # fmt: skip


def cut_and_trained(rank, world, remote, case):
    """Three steps of a GPT that was cut while it was made."""
    torch.manual_seed(3)
    with Init(dtype=torch.bfloat16, remote_device=remote):
        model = GPT(WIDE)
    asked = []

    def choose(request, numel, wanted):
        if numel > 1000:  # initialize tries every optimizer on a few elements first
            asked.append((numel, set(wanted)))
        return ChunkedAdam(), "for this test"

    with mock.patch.object(cpu_adam, "choose_kernel", choose):
        engine, *_ = deepzero.initialize(model=model, config=case)
    losses = []
    for step in range(3):
        ids, labels = (t[2 * rank : 2 * rank + 2] for t in make_batch(step, 2 * world))
        step_from(engine, engine(ids, labels))
        losses.append(engine.last_step.loss)
    return losses, engine.params_sha256(), asked


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_a_model_that_was_cut_while_it_was_made(ranks, world):
    """The same bits wherever the parts waited, with and without offload; the kernel is chosen for fp32 masters."""
    plain = ranks.run(cut_and_trained, None, cut_settings(False, "CPUAdam"), world_size=world)[0]
    elements = GPT(WIDE).num_parameters()
    assert plain[2] == [(elements, {(torch.float32, torch.bfloat16, None, True)})]
    for remote in (None, "cpu"):
        # "Adam" in a config that offloads is CPUAdam.
        cases = [cut_settings(True, "CPUAdam"), cut_settings(True, "AdamW", chaos=5)]
        losses, sha, asked = ranks.run(cut_and_trained, remote, cases[0], world_size=world)[0]
        assert (losses, sha) == plain[:2]
        assert asked == [(elements, {(torch.float32, torch.bfloat16, torch.bfloat16, True)})]
        assert len(set(ranks.run(cut_and_trained, remote, cases[1], world_size=world)[0][0])) == 3
