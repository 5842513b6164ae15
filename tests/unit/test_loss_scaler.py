"""The loss scaler: its rules one by one, its numbers against DeepSpeed's, and resuming in the middle."""

import json
import random
from types import SimpleNamespace

import pytest

from deepzero.config.engine import PrecisionConfig
from deepzero.config.strict import ConfigError
from deepzero.runtime.loss_scaler import DynamicLossScaler, LossScaleError, StaticLossScaler, build_loss_scaler


def scales(scaler, overflows):
    """The scale after each step."""
    out = []
    for overflow in overflows:
        scaler.update(overflow)
        out.append(scaler.scale)
    return out


GOOD, BAD = False, True


class TestDynamic:
    def test_first_doubling_is_late_by_one_then_every_window(self):
        scaler = DynamicLossScaler(initial_scale=4.0, window=3, hysteresis=1)
        assert scales(scaler, [GOOD] * 10) == [4, 4, 4, 8, 8, 8, 16, 16, 16, 32]

    def test_after_an_overflow_the_count_starts_anew(self):
        scaler = DynamicLossScaler(initial_scale=4.0, window=2, hysteresis=1)
        assert scales(scaler, [GOOD, GOOD, BAD, GOOD, GOOD, GOOD]) == [4, 4, 2, 2, 2, 4]

    def test_hysteresis_forgives_all_but_one(self):
        scaler = DynamicLossScaler(initial_scale=16.0, window=1000, hysteresis=3)
        assert scales(scaler, [BAD] * 5) == [16, 16, 8, 4, 2]

    def test_forgiveness_once_used_stays_used_through_good_steps(self):
        scaler = DynamicLossScaler(initial_scale=16.0, window=1000, hysteresis=2)
        assert scales(scaler, [BAD, GOOD, BAD, GOOD, BAD]) == [16, 16, 8, 8, 4]

    def test_a_doubling_fills_the_forgiveness_up(self):
        scaler = DynamicLossScaler(initial_scale=16.0, window=1, hysteresis=2)
        # BAD forgiven, two good steps double and refill, the next BAD is forgiven again.
        assert scales(scaler, [BAD, GOOD, GOOD, BAD, BAD]) == [16, 16, 32, 32, 16]

    def test_consecutive_hysteresis_fills_up_at_every_good_step(self):
        scaler = DynamicLossScaler(initial_scale=16.0, window=1000, hysteresis=2, consecutive_hysteresis=True)
        assert scales(scaler, [BAD, GOOD, BAD, GOOD, BAD, BAD]) == [16, 16, 16, 16, 16, 8]

    def test_minimum_holds_then_raises(self):
        scaler = DynamicLossScaler(initial_scale=3.0, window=1000, hysteresis=1, min_scale=2.0)
        assert scales(scaler, [BAD]) == [2.0], "3 / 2 is below the minimum of 2"
        with pytest.raises(LossScaleError, match=r"minimum, 2, after 2 optimizer steps.*bf16"):
            scaler.update(BAD)

    def test_forgiveness_is_used_up_before_the_minimum_raises(self):
        scaler = DynamicLossScaler(initial_scale=1.0, hysteresis=2, min_scale=1.0)
        scaler.update(BAD)
        with pytest.raises(LossScaleError):
            scaler.update(BAD)

    def test_first_scale_below_the_minimum_is_refused(self):
        with pytest.raises(ConfigError, match=r"min_loss_scale=4.*first loss scale, which is 2"):
            DynamicLossScaler(initial_scale=2.0, min_scale=4.0)

    @pytest.mark.parametrize("wrong", [{"window": 0}, {"hysteresis": 0}, {"min_scale": 0.0}, {"min_scale": -1.0}])
    def test_numbers_without_sense_are_refused(self, wrong):
        with pytest.raises(ConfigError):
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

    def test_a_static_state_does_not_fit_a_dynamic_scaler(self):
        with pytest.raises(ValueError, match=r"saved loss scaler is 'static', this run's is 'dynamic'"):
            DynamicLossScaler().load_state_dict(StaticLossScaler(8.0).state_dict())
        with pytest.raises(ValueError, match=r"'dynamic', this run's is 'static'"):
            StaticLossScaler(8.0).load_state_dict(DynamicLossScaler().state_dict())

    def test_missing_and_surplus_keys_are_named(self):
        state = DynamicLossScaler().state_dict()
        state["iterations"] = state.pop("iteration")
        with pytest.raises(ValueError, match=r"'iteration', .*'iterations'"):
            DynamicLossScaler().load_state_dict(state)


class TestBuild:
    @pytest.mark.parametrize("dtype", ["bf16", "fp32"])
    def test_wide_dtypes_have_scale_one_whatever_fp16_says(self, dtype):
        scaler = build_loss_scaler(PrecisionConfig(dtype=dtype, loss_scale=128.0))
        scaler.update(BAD)
        assert (scaler.scale, scaler.dynamic) == (1.0, False)

    def test_fp16_with_a_scale_is_static(self):
        scaler = build_loss_scaler(PrecisionConfig(dtype="fp16", loss_scale=128.0))
        for overflow in (BAD, GOOD, BAD):
            scaler.update(overflow)
        assert (scaler.scale, scaler.dynamic) == (128.0, False)

    def test_fp16_reads_every_number(self):
        precision = PrecisionConfig(
            dtype="fp16", initial_scale_power=3, loss_scale_window=7, hysteresis=5, consecutive_hysteresis=True,
            min_loss_scale=2.0,
        )  # fmt: skip
        scaler = build_loss_scaler(precision)
        assert isinstance(scaler, DynamicLossScaler)
        assert (scaler.scale, scaler.window, scaler.hysteresis) == (8.0, 7, 5)
        assert (scaler.consecutive_hysteresis, scaler.min_scale) == (True, 2.0)

    def test_fp16_whose_first_scale_is_below_the_minimum_is_refused(self):
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
            theirs = deepspeed_scaler(2.0**10, window, min_scale, hysteresis, consecutive)
            raised = 0
            for step in range(2000):
                overflow = rng.random() < overflow_rate
                our_error = their_error = None
                try:
                    ours.update(overflow)
                except LossScaleError as error:
                    our_error = error
                try:
                    theirs.update_scale(overflow)
                except Exception as error:  # DeepSpeed raises a bare Exception
                    their_error = error
                assert (our_error is None) == (their_error is None), f"step {step}"
                assert ours.scale == theirs.cur_scale, f"step {step}"
                if our_error is not None:
                    raised += 1
                    break
            if overflow_rate == 0.7:
                assert raised == 1, "the minimum must have been reached"
