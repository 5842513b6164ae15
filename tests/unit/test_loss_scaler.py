"""The loss scaler: its rules one by one, its numbers against DeepSpeed's, and resuming in the middle."""

import json
import random
from types import SimpleNamespace

import pytest

from deepzero.config.engine import PrecisionConfig
from deepzero.config.strict import ConfigError
from deepzero.runtime.loss_scaler import DynamicLossScaler, LossScaleError, LossScaler, build_loss_scaler


def scales(scaler, overflows):
    return [scaler.update(overflow) or scaler.scale for overflow in overflows]


GOOD, BAD = False, True


@pytest.mark.parametrize(("settings", "steps", "seen"), [
    # The first doubling is late by one, then one comes every window.
    ({"initial_scale": 4, "window": 3, "hysteresis": 1}, [GOOD] * 10, [4, 4, 4, 8, 8, 8, 16, 16, 16, 32]),
    # After an overflow the count starts anew.
    ({"initial_scale": 4, "window": 2, "hysteresis": 1}, [GOOD, GOOD, BAD, GOOD, GOOD, GOOD], [4, 4, 2, 2, 2, 4]),
    # Hysteresis forgives all but one; forgiveness once used stays used through good steps …
    ({"initial_scale": 16, "hysteresis": 3}, [BAD] * 5, [16, 16, 8, 4, 2]),
    ({"initial_scale": 16, "hysteresis": 2}, [BAD, GOOD, BAD, GOOD, BAD], [16, 16, 8, 8, 4]),
    # … until a doubling fills it up, or every good step does.
    ({"initial_scale": 16, "window": 1, "hysteresis": 2}, [BAD, GOOD, GOOD, BAD, BAD], [16, 16, 32, 32, 16]),
    ({"initial_scale": 16, "hysteresis": 2, "consecutive_hysteresis": True}, [BAD, GOOD, BAD, GOOD, BAD, BAD],
     [16, 16, 16, 16, 16, 8]),
])  # fmt: skip
def test_rules(settings, steps, seen):
    assert scales(DynamicLossScaler(**{"window": 1000, **settings}), steps) == seen


def test_minimum_holds_then_raises():
    scaler = DynamicLossScaler(initial_scale=3.0, window=1000, hysteresis=1, min_scale=2.0)
    assert scales(scaler, [BAD]) == [2.0], "3 / 2 is below the minimum of 2"
    with pytest.raises(LossScaleError, match=r"minimum, 2, after 2 optimizer steps.*bf16"):
        scaler.update(BAD)
    forgiving = DynamicLossScaler(initial_scale=1.0, hysteresis=2, min_scale=1.0)
    forgiving.update(BAD)
    with pytest.raises(LossScaleError):
        forgiving.update(BAD)


@pytest.mark.parametrize("wrong", [
    {"window": 0}, {"hysteresis": 0}, {"min_scale": 0.0}, {"min_scale": -1.0}, {"initial_scale": 2.0, "min_scale": 4.0},
])  # fmt: skip
def test_numbers_without_sense_are_refused(wrong):
    said = r"min_loss_scale=4.*first loss scale, which is 2" if "initial_scale" in wrong else None
    with pytest.raises(ConfigError, match=said):
        DynamicLossScaler(**wrong)


class TestState:
    def test_resume_gives_the_same_scales(self):
        rng = random.Random(3)
        steps = [rng.random() < 0.15 for _ in range(200)]
        settings = {"initial_scale": 2.0**12, "window": 4, "hysteresis": 3}
        whole = scales(DynamicLossScaler(**settings), steps)
        for cut in (1, 57, 120):
            first, second = DynamicLossScaler(**settings), DynamicLossScaler(**settings)
            before = scales(first, steps[:cut])
            second.load_state_dict(json.loads(json.dumps(first.state_dict())))  # must survive a text file
            assert before + scales(second, steps[cut:]) == whole

    def test_every_changing_attribute_is_in_the_state(self):
        scaler = DynamicLossScaler(initial_scale=8.0, window=1, hysteresis=2)
        before = dict(vars(scaler))
        scales(scaler, [BAD, GOOD, GOOD, GOOD])
        changed = {name for name, value in vars(scaler).items() if value != before[name]}
        assert changed <= set(scaler.state_dict())
        assert {"scale", "iteration", "last_overflow_iteration"} <= changed

    def test_window_and_minimum_come_from_the_resuming_run(self):
        saved = DynamicLossScaler(initial_scale=8.0, window=1000).state_dict()
        resumed = DynamicLossScaler(initial_scale=64.0, window=1)
        resumed.load_state_dict(saved)
        assert scales(resumed, [GOOD, GOOD, GOOD]) == [8, 16, 32]
        resumed = DynamicLossScaler(initial_scale=64.0, hysteresis=1, min_scale=16.0)
        resumed.load_state_dict(saved)
        assert (resumed.scale, resumed.hysteresis_left) == (16, 1)

    def test_states_that_do_not_fit(self):
        with pytest.raises(ValueError, match=r"saved loss scaler is 'static', this run's is 'dynamic'"):
            DynamicLossScaler().load_state_dict(LossScaler(8.0).state_dict())
        with pytest.raises(ValueError, match=r"'dynamic', this run's is 'static'"):
            LossScaler(8.0).load_state_dict(DynamicLossScaler().state_dict())
        state = DynamicLossScaler().state_dict()
        state["iterations"] = state.pop("iteration")
        with pytest.raises(ValueError, match=r"'iteration', .*'iterations'"):
            DynamicLossScaler().load_state_dict(state)


def test_built_from_the_precision():
    for dtype in ("bf16", "fp32"):  # scale one, whatever fp16 says
        scaler = build_loss_scaler(PrecisionConfig(dtype=dtype, loss_scale=128.0))
        scaler.update(BAD)
        assert (scaler.scale, scaler.kind) == (1.0, "static")
    static = build_loss_scaler(PrecisionConfig(dtype="fp16", loss_scale=128.0))
    assert scales(static, (BAD, GOOD, BAD)) == [128.0] * 3 and static.kind == "static"
    numbers = {"initial_scale_power": 3, "loss_scale_window": 7, "hysteresis": 5, "min_loss_scale": 2.0}
    scaler = build_loss_scaler(PrecisionConfig(dtype="fp16", consecutive_hysteresis=True, **numbers))
    assert isinstance(scaler, DynamicLossScaler)
    assert (scaler.scale, scaler.window, scaler.hysteresis) == (8.0, 7, 5)
    assert (scaler.consecutive_hysteresis, scaler.min_scale) == (True, 2.0)
    with pytest.raises(ConfigError, match="initial_scale_power"):
        build_loss_scaler(PrecisionConfig(dtype="fp16", initial_scale_power=0, min_loss_scale=2.0))


@pytest.fixture(scope="module")
def deepspeed_scaler():
    """DeepSpeed's class, with the one collective call it makes (``get_rank``) answered."""
    pytest.importorskip("deepspeed", exc_type=ImportError)
    from deepspeed.runtime.fp16 import loss_scaler

    patch = pytest.MonkeyPatch()
    patch.setattr(loss_scaler, "dist", SimpleNamespace(get_rank=lambda: 1))
    yield loss_scaler.DynamicLossScaler
    patch.undo()


class TestAgainstDeepSpeed:
    @pytest.mark.parametrize("consecutive", [False, True])
    @pytest.mark.parametrize(
        ("window", "hysteresis", "min_scale"), [(1, 1, 1.0), (2, 2, 1.0), (3, 4, 4.0), (5, 3, 0.5)]
    )
    def test_two_thousand_random_steps(self, deepspeed_scaler, window, hysteresis, min_scale, consecutive):
        for overflow_rate in (0.05, 0.3, 0.7):
            rng = random.Random(window * 100 + hysteresis)
            ours = DynamicLossScaler(2.0**10, window, hysteresis, consecutive, min_scale)
            theirs, raised = deepspeed_scaler(2.0**10, window, min_scale, hysteresis, consecutive), 0
            for step in range(2000):
                overflow, errors = rng.random() < overflow_rate, []
                for update in (ours.update, theirs.update_scale):
                    try:
                        update(overflow)
                    except Exception as error:  # DeepSpeed raises a bare Exception
                        errors.append(error)
                assert len(errors) in (0, 2) and ours.scale == theirs.cur_scale, f"step {step}"
                if errors:
                    assert isinstance(errors[0], LossScaleError)
                    raised += 1
                    break
            if overflow_rate == 0.7:
                assert raised == 1, "the minimum must have been reached"
