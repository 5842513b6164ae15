"""Schedules: the shape of deepzero's own, every number of DeepSpeed's, resuming, and what is refused."""

import argparse
import copy
import itertools
import json
import logging
import math
import pickle

import pytest
import torch

from deepzero.compat import lr_schedules
from deepzero.config.engine import SchedulerConfig
from deepzero.config.strict import ConfigError
from deepzero.runtime.lr_schedules import CURVES, Scheduler, build_scheduler


def sgd(*lrs):
    """An optimizer with one parameter group for each learning rate."""
    return torch.optim.SGD([{"params": [torch.zeros(1)], "lr": lr} for lr in lrs or (1.0,)])


def adam(*lrs):
    """The same with betas."""
    return torch.optim.Adam([{"params": [torch.zeros(1)], "lr": lr} for lr in lrs or (1.0,)], betas=(0.85, 0.95))


def used(kind, params, steps, lr=1.0, total=None):
    """The learning rate that each of the first optimizer steps would use."""
    optimizer = sgd(lr)
    scheduler, out = build_scheduler(SchedulerConfig(kind, params), optimizer, total), []
    for _ in range(steps):
        out.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    return out


UP = {"warmup_steps": 3, "total_steps": 12, "decay_steps": 4}


@pytest.mark.parametrize(("kind", "params", "rates"), [
    ("constant", {}, [1.0] * 5),
    # A run that is over stays on the cosine's floor.
    ("warmup_cosine", {"total_steps": 2, "min_lr_ratio": 0.25}, [1.0, 0.625, 0.25, 0.25, 0.25]),
    # Three straight parts; and without warm-up to a ratio.
    ("warmup_stable_decay", UP, [0.25, 0.5, 0.75, *[1.0] * 6, 0.75, 0.5, 0.25, 0.0]),
    ("warmup_stable_decay", {"total_steps": 4, "decay_steps": 2, "min_lr_ratio": 0.5}, [1, 1, 1, 0.75, 0.5, 0.5]),
    # Without a decay no step of the run has any.
    ("warmup_stable_decay", {"total_steps": 2, "decay_steps": 0}, [1, 1, 0, 0]),
    # A fifth by default: ceil(11 / 5) = 3 steps of decay, the first of them still at 1.
    ("warmup_stable_decay", {"total_steps": 11}, [*[1.0] * 9, 2 / 3, 1 / 3]),
])  # fmt: skip
def test_own_curves(kind, params, rates):
    assert used(kind, params, len(rates)) == pytest.approx(rates, rel=1e-12)
    assert used(kind, params, len(rates), lr=0.3) == pytest.approx([0.3 * rate for rate in rates], rel=1e-12)


def test_cosine_warms_up_without_a_zero_and_peaks_once():
    rates = used("warmup_cosine", {"warmup_steps": 4, "total_steps": 20, "min_lr_ratio": 0.1}, 20, lr=2.0)
    assert rates[:5] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0], rel=1e-12)
    assert rates.count(max(rates)) == 1
    assert all(a > b for a, b in itertools.pairwise(rates[4:])), "it falls from the peak to the end"
    assert rates[12] == pytest.approx(2.0 * 0.55, rel=1e-12), "halfway down: the mean of 1 and 0.1"
    assert 0.2 < rates[-1] < 0.23, "the last step is just above the floor"


@pytest.mark.parametrize("kind", ["warmup_cosine", "warmup_stable_decay"])
def test_length_of_the_run(kind):
    """It is the default; and it may be shorter than the warm-up."""
    params = {"warmup_steps": 2}
    assert used(kind, params, 9, total=9) == used(kind, {**params, "total_steps": 9}, 9)
    assert used(kind, {**params, "total_steps": None}, 9, total=9) == used(kind, params, 9, total=9)
    assert used(kind, {**params, "total_steps": 30}, 9, total=9) == used(kind, {**params, "total_steps": 30}, 9)
    short = used(kind, {"warmup_steps": 9, "total_steps": 4}, 4)
    assert short[0] == 0.1 and all(0.0 < rate <= 0.4 for rate in short)


class TestScheduler:
    def test_every_group_keeps_its_proportion(self):
        optimizer = sgd(1.0, 0.25)
        scheduler = build_scheduler(SchedulerConfig("warmup_cosine", {"total_steps": 10}), optimizer)
        for _ in range(7):
            scheduler.step()
            first, second = (group["lr"] for group in optimizer.param_groups)
            assert second == pytest.approx(first / 4, rel=1e-15)
            assert scheduler.get_last_lr() == scheduler.get_lr() == [first, second]

    def test_a_rate_in_a_tensor_is_filled_not_replaced(self):
        rate = torch.tensor(0.5)
        optimizer = torch.optim.Adam([torch.zeros(1)], lr=rate)
        scheduler = build_scheduler(SchedulerConfig("warmup_cosine", {"warmup_steps": 4, "total_steps": 9}), optimizer)
        held = optimizer.param_groups[0]["lr"]
        assert held.item() == pytest.approx(0.1), "written by the constructor"
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] is held
        assert held.item() == pytest.approx(0.2)

    @pytest.mark.parametrize("kind", sorted(CURVES))
    def test_resume_goes_on_with_the_same_rates_at_once(self, kind):
        params = {
            "constant": {},
            "warmup_cosine": {"warmup_steps": 3},
            "warmup_stable_decay": {"warmup_steps": 3},
            "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.9, "cycle_first_step_size": 4},
            "LRRangeTest": {"lr_range_test_step_size": 4},
        }.get(kind, {"warmup_num_steps": 3})

        def run(steps, state=None):
            optimizer, seen = adam(0.7), []
            scheduler = build_scheduler(SchedulerConfig(kind, params), optimizer, 15)
            if state is not None:
                scheduler.load_state_dict(json.loads(json.dumps(state)))
            for _ in range(steps):
                seen.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]))
                scheduler.step()
            return seen, scheduler.state_dict()

        for cut in (0, 1, 6):
            assert run(15 - cut, run(cut)[1])[0] == run(15)[0][cut:]

    def test_a_foreign_state_is_refused(self):
        scheduler = build_scheduler(SchedulerConfig("constant"), sgd())
        with pytest.raises(ValueError, match=r"last_batch_iteration.*_step_count"):
            scheduler.load_state_dict({"_step_count": 3})

    def test_step_can_jump(self):
        params, optimizer = {"warmup_num_steps": 8, "warmup_type": "linear"}, sgd(1.0)
        build_scheduler(SchedulerConfig("WarmupLR", params), optimizer).step(6)
        assert optimizer.param_groups[0]["lr"] == 0.75


class TestRefused:
    @pytest.mark.parametrize("kind", ["warmup_cosine", "warmup_stable_decay", "WarmupDecayLR", "WarmupCosineLR"])
    def test_length_unknown(self, kind):
        with pytest.raises(ConfigError, match=r"needs scheduler.params.total_(num_)?steps"):
            build_scheduler(SchedulerConfig(kind), sgd())

    @pytest.mark.parametrize(("kind", "params", "message"), [
        # An unknown type or parameter comes with the nearest.
        *((kind, {}, rf"scheduler.type='{kind}' is not one of .*did you mean '{near}'") for kind, near in
          (("warmuplr", "WarmupLR"), ("Constant", "constant"), ("warmup_cosin", "warmup_cosine"))),
        ("warmup_cosine", {"warmup_step": 3}, r"'scheduler.params.warmup_step'.*'scheduler.params.warmup_steps'"),
        ("warmup_cosine", {"warmup_steps": -1}, r"warmup_steps=-1: must not be negative"),
        ("warmup_cosine", {"min_lr_ratio": 1.5}, r"min_lr_ratio=1.5: must be between 0 and 1"),
        ("warmup_cosine", {"total_steps": 0}, r"total_steps=0: must be at least 1"),
        ("warmup_cosine", {"warmup_steps": 2.5}, r"warmup_steps=2.5: must be an integer"),
        ("warmup_stable_decay", {"decay_steps": -2}, r"decay_steps=-2"),
        ("warmup_stable_decay", {"decay_steps": 11}, r"decay_steps=11: is longer than the whole schedule"),
        ("WarmupLR", {"warmup_type": "cubic"}, r"warmup_type='cubic' is not one of log, linear"),
        ("WarmupLR", {"warmup_num_steps": 0}, r"warmup_num_steps=0: must be at least 1"),
        ("WarmupLR", {"warmup_max_lr": [0.1, 0.2]}, r"warmup_max_lr=\[0.1, 0.2\]: has 2 values.*1 parameter group"),
        ("WarmupLR", {"last_batch_iteration": -2}, r"last_batch_iteration=-2"),
        ("WarmupLR", {"warmup_min_lr": [0.1, -0.5]}, r"warmup_min_lr=\(0.1, -0.5\): must not be negative"),
        *((kind, {name: -1.0}, rf"params.{name}=-1.0: must not be negative") for kind, name in (
            ("WarmupDecayLR", "warmup_max_lr"), ("LRRangeTest", "lr_range_test_min_lr"),
            ("LRRangeTest", "lr_range_test_step_rate"), ("WarmupCosineLR", "warmup_min_ratio"),
            ("WarmupCosineLR", "cos_min_ratio"))),
        ("OneCycle", {"cycle_min_lr": -1, "cycle_max_lr": 1}, r"cycle_min_lr=-1.0: must not be negative"),
        ("WarmupDecayLR", {"total_num_steps": 0}, r"total_num_steps=0: must be at least 1"),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1, "decay_lr_rate": -1}, r"decay_lr_rate=-1"),
        ("OneCycle", {}, r"needs cycle_min_lr, cycle_max_lr"),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1, "cycle_first_step_size": 0}, r"cycle_first_step_size=0"),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1, "cycle_momentum": True}, r"SGD has none"),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1, "cycle_min_mom": 0.5}, r"SGD has no betas"),
    ])  # fmt: skip
    def test_values_without_sense(self, kind, params, message):
        with pytest.raises(ConfigError, match=message):
            build_scheduler(SchedulerConfig(kind, params), sgd(), 10)

    def test_a_warm_up_that_is_cut_off_is_said(self, caplog):
        for kind in ("WarmupDecayLR", "WarmupCosineLR"):
            build_scheduler(SchedulerConfig(kind, {"warmup_num_steps": 10}), sgd(), 10)
            assert not caplog.records
            build_scheduler(SchedulerConfig(kind, {"warmup_num_steps": 11}), sgd(), 10)
            assert "the warm-up of 11 steps is cut off" in caplog.text
            caplog.clear()

    def test_numbers_that_yaml_reads_as_strings(self):
        assert used("WarmupLR", {"warmup_min_lr": "1e-1", "warmup_num_steps": "1e1"}, 1) == [0.1]


# What DeepSpeed 0.19.8 gives for optimizer steps 0, 1, …, kept here so that the numbers hold where it is not installed.
FROZEN = [
    ("WarmupLR", {"warmup_min_lr": 0.1, "warmup_max_lr": 0.9, "warmup_num_steps": 4},
     [0.1, 0.1, 0.5, 0.7339850002884625, 0.9, 0.9]),
    ("WarmupLR", {"warmup_max_lr": 1.0, "warmup_num_steps": 4, "warmup_type": "linear"}, [0, 0, 0.25, 0.5, 0.75, 1, 1]),
    ("WarmupDecayLR", {"total_num_steps": 6, "warmup_max_lr": 1.0, "warmup_num_steps": 2, "warmup_type": "linear"},
     [0, 0, 0.5, 1, 0.75, 0.5, 0.25, 0, 0]),
    ("WarmupCosineLR", {"total_num_steps": 6, "warmup_num_steps": 2, "warmup_min_ratio": 0.5, "cos_min_ratio": 0.0,
     "warmup_type": "linear"}, [0, 0.5, 0.75, 0.8535533905932737, 0.5, 0.14644660940672627, 0, 0]),
    ("OneCycle", {"cycle_min_lr": 0.0, "cycle_max_lr": 1.0, "cycle_first_step_size": 4, "cycle_second_step_size": 2,
     "decay_step_size": 1, "decay_lr_rate": 1.0}, [0, 0.25, 0.5, 0.75, 1, 0.5, 0, 0, 0]),
    ("OneCycle", {"cycle_min_lr": 1.0, "cycle_max_lr": 2.0, "cycle_first_step_size": 1, "decay_step_size": 2,
     "decay_lr_rate": 1.0}, [1, 2, 1, 1 / 1.5, 1 / 2, 1 / 2.5]),
    ("LRRangeTest", {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 3.0},
     [0.1, 0.25, 0.4, 0.55, 0.7]),
    ("LRRangeTest", {"lr_range_test_min_lr": 0.5, "lr_range_test_step_size": 2, "lr_range_test_staircase": True},
     [0.5, 0.5, 1, 1, 1.5]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "params", "rates"), FROZEN, ids=lambda value: value if isinstance(value, str) else "")
def test_frozen_numbers_of_deepspeed(kind, params, rates):
    assert used(kind, params, len(rates)) == pytest.approx(rates, rel=1e-12, abs=1e-15)


@pytest.fixture(scope="module")
def theirs():
    pytest.importorskip("deepspeed", exc_type=ImportError)
    from deepspeed.runtime import lr_schedules
    from deepspeed.utils import logger

    level = logger.level
    logger.setLevel(logging.ERROR)
    yield lr_schedules
    logger.setLevel(level)


def situations():
    """Type and parameters, and the learning rates of the optimizer's groups; with betas where Adam is named."""
    totals = [(1, 40), (7, 40), (30, 31), (30, 30), (30, 20)]
    for kind in ("log", "linear"):
        for steps in (1, 2, 7, 30):
            warmup = {"warmup_num_steps": steps, "warmup_type": kind}
            for rates in ({}, {"warmup_min_lr": 0.02}, {"warmup_min_lr": [0.1, 0.2], "warmup_max_lr": 3.0}):
                yield "WarmupLR", {**warmup, **rates}, adam, (0.5, 2)
        for steps, total in totals:
            params = {"warmup_num_steps": steps, "total_num_steps": total, "warmup_type": kind}
            yield "WarmupDecayLR", params, sgd, ()
            yield "WarmupDecayLR", {**params, "warmup_max_lr": [0.5, 2], "warmup_min_lr": 0.1}, sgd, (1, 2)
            yield "WarmupCosineLR", params, sgd, (0.3, 5)
            yield "WarmupCosineLR", {**params, "warmup_min_ratio": 0.2, "cos_min_ratio": 0.1}, sgd, ()
    momenta = {"cycle_min_mom": 0.75, "cycle_max_mom": [0.9, 0.95]}
    for second in (None, 1, 5, 13):
        cycle = {"cycle_min_lr": [0.01, 0.1], "cycle_max_lr": 1.5, "cycle_first_step_size": 7, **momenta}
        cycle["cycle_second_step_size"] = second
        both_ways = {"cycle_first_stair_count": 2, "cycle_second_stair_count": 5}
        decays = {}, {"decay_step_size": 3, "decay_lr_rate": 0.7, "decay_mom_rate": 0.01}, {"decay_step_size": 4}
        for stairs, decay in itertools.product(({}, {"cycle_first_stair_count": 3}, both_ways), decays):
            yield "OneCycle", {**cycle, **stairs, **decay}, adam, (1, 1)
    plain = {"cycle_min_lr": 0.01, "cycle_max_lr": 1.5, "cycle_first_step_size": 7}
    yield "OneCycle", plain, sgd, ()
    yield "OneCycle", {**plain, "cycle_momentum": False}, adam, ()
    for stairs in (False, True):
        yield "LRRangeTest", {"lr_range_test_step_size": 7, "lr_range_test_staircase": stairs}, sgd, (1, 2)


class TestAgainstDeepSpeed:
    @pytest.mark.parametrize(("kind", "params", "rates"), FROZEN, ids=[kind for kind, *_ in FROZEN])
    def test_the_frozen_numbers_are_its_numbers(self, theirs, kind, params, rates):
        optimizer = sgd()
        scheduler = getattr(theirs, kind)(optimizer, **params)
        for rate in rates:
            assert optimizer.param_groups[0]["lr"] == pytest.approx(rate, rel=1e-12, abs=1e-15)
            scheduler.step()

    @pytest.mark.parametrize(("kind", "params", "make", "lrs"), list(situations()))
    def test_rates_betas_and_states(self, theirs, kind, params, make, lrs):
        ours_opt, their_opt = make(*lrs), make(*lrs)
        ours, named_opt = build_scheduler(SchedulerConfig(kind, params), ours_opt), make(*lrs)
        named = getattr(lr_schedules, kind)(named_opt, **params)
        other = getattr(theirs, kind)(their_opt, **params)
        for step in range(60):
            for mine, group in zip(ours_opt.param_groups, their_opt.param_groups, strict=True):
                assert mine["lr"] == pytest.approx(group["lr"], rel=1e-12, abs=1e-15), f"optimizer step {step}"
                if "betas" in group:
                    assert mine["betas"] == pytest.approx(group["betas"], rel=1e-12), f"optimizer step {step}"
            assert ours.state_dict() == other.state_dict()
            assert [group["lr"] for group in named_opt.param_groups] == [group["lr"] for group in ours_opt.param_groups]
            # Flat, as approx takes no lists in a list.
            betas = [beta for pair in (kind == "OneCycle" and other.get_mom()) or [] for beta in pair]
            assert [beta for pair in named.get_mom() or [] for beta in pair] == pytest.approx(betas, rel=1e-12)
            named.step()
            ours.step()
            other.step()
            assert ours.get_last_lr() == pytest.approx(other.get_last_lr(), rel=1e-12, abs=1e-15)

    def test_continuing_from_an_iteration(self, theirs):
        params, ours_opt, their_opt = {"warmup_num_steps": 9, "last_batch_iteration": 4}, sgd(), sgd()
        ours = build_scheduler(SchedulerConfig("WarmupLR", params), ours_opt)
        other = theirs.WarmupLR(their_opt, **params)
        assert ours_opt.param_groups[0]["lr"] == pytest.approx(math.log(5) / math.log(9)), "written at once, not later"
        for _ in range(9):
            ours.step()
            other.step()
            assert ours_opt.param_groups[0]["lr"] == pytest.approx(their_opt.param_groups[0]["lr"], rel=1e-12)


def test_schedules_as_classes():
    """DeepSpeed's order of arguments, and the attributes that its scripts read."""
    optimizer = sgd(0.5, 2.0)
    scheduler = lr_schedules.WarmupLR(optimizer, 0.1, None, 8, warmup_type="linear")
    assert isinstance(scheduler, Scheduler) and type(scheduler).__name__ == "WarmupLR"
    assert (scheduler.min_lrs, scheduler.max_lrs, scheduler.warmup_num_steps) == ([0.1, 0.1], [0.5, 2.0], 8)
    scheduler.step(8)
    assert not hasattr(scheduler, "get_lr_ratio")
    assert scheduler.get_last_lr() == [group["lr"] for group in optimizer.param_groups] == [0.5, 2.0]
    cosine = lr_schedules.WarmupCosineLR(sgd(), total_num_steps=100, warmup_num_steps=10)
    cosine.step(1)
    assert cosine.get_lr_ratio() == pytest.approx(math.log(2) / math.log(10)) and cosine.get_mom() is None
    cycle = lr_schedules.OneCycle(adam(), 0.1, 0.2, cycle_first_step_size=4, cycle_first_stair_count=2)
    assert (cycle.step_ratio, cycle.second_step_size, cycle.second_stair_count) == (0.5, 4, 2)
    assert cycle.get_mom() == [(0.9, 0.99)] and cycle.optimizer.param_groups[0]["betas"] == (0.8, 0.99)
    for copied in (copy.deepcopy(cycle), pickle.loads(pickle.dumps(cycle))):
        assert type(copied) is type(cycle) and copied.curve == cycle.curve and copied.optimizer is not cycle.optimizer
        assert copied.state_dict() == cycle.state_dict() and copied.get_mom() == cycle.get_mom()
    with pytest.raises(AttributeError, match="OneCycle has no attribute 'warmup_type'"):
        _ = cycle.warmup_type
    for wrong in ({"warmup_num_steps": None}, {"warmup_num_steps": -5}, {"warmup_min_lr": [1.0, 2.0]}):
        with pytest.raises(ValueError, match="warmup"):
            lr_schedules.WarmupLR(sgd(), **wrong)
    with pytest.raises(TypeError, match="WarmupLR takes an optimizer and, once each, warmup_min_lr, warmup_max_lr"):
        lr_schedules.WarmupLR(sgd(), 0.1, warmup_min_lr=0.2)
    with pytest.raises(TypeError, match="needs a torch optimizer, it got a int"):
        lr_schedules.LRRangeTest(3)


@pytest.mark.parametrize("kind", lr_schedules.VALID_LR_SCHEDULES)
def test_schedules_from_the_command_line(kind):
    words = ["--lr_schedule", kind, "--cycle_first_stair_count", "3", "--cycle_min_mom", "0.7"]
    parser = lr_schedules.add_tuning_arguments(argparse.ArgumentParser())
    args = parser.parse_args([*words, "--lr_range_test_staircase", "True"])
    assert args == parser.parse_args(["--lr_range_test_staircase", *words]), "with DeepSpeed's word, and without"
    config, problem = lr_schedules.get_config_from_args(args)
    scheduler = build_scheduler(SchedulerConfig(**config), adam(), 20)
    expected = {"OneCycle": ("cycle_first_stair_count", 3), "LRRangeTest": ("lr_range_test_staircase", True)}
    name, value = expected.get(kind, ("warmup_num_steps", 1000))
    assert problem is None and getattr(scheduler.curve, name) == value == config["params"][name]
    assert getattr(scheduler.curve, "cycle_momentum", True), "betas move also without --cycle_momentum"
    assert lr_schedules.get_lr_from_config(config)[0] == {"OneCycle": 0.1, "WarmupCosineLR": None}.get(kind, 0.001)
    assert lr_schedules.get_config_from_args(argparse.Namespace(lr_schedule="none"))[0] is None
    assert [lr_schedules.LR_RANGE_TEST, lr_schedules.WARMUP_NUM_STEPS] == ["LRRangeTest", "warmup_num_steps"]


def test_scheduler_works_with_a_curve_of_the_users():
    class Halves:
        def lrs(self, done, base_lrs):
            return [lr / 2**done for lr in base_lrs]

    optimizer = sgd(8.0)
    scheduler = Scheduler(optimizer, Halves())
    scheduler.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 2.0


@pytest.mark.parametrize(("kind", "params", "said"), [
    ("OneCycle", {"cycle_min_lr": 0.0, "cycle_max_lr": 0.1, "cycle_first_step_size": 2}, 1),
    ("OneCycle", {"cycle_min_lr": 0.0, "cycle_max_lr": [0.1, 0.2], "cycle_first_step_size": 2}, 0),
    ("WarmupDecayLR", {"total_num_steps": 1000, "warmup_max_lr": None}, 0),
    ("WarmupDecayLR", {"total_num_steps": 1000}, 1),
])  # fmt: skip
def test_one_rate_for_groups_that_have_their_own_is_said(kind, params, said, caplog):
    optimizer = torch.optim.SGD([{"params": [torch.zeros(1)], "lr": lr} for lr in (0.05, 0.002)])
    build_scheduler(SchedulerConfig(kind, params), optimizer)
    assert [record.args[2] for record in caplog.records] == [[0.002, 0.05]] * said
