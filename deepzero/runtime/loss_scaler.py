"""The loss scale: why fp16 training multiplies its loss, and how the factor finds its place by itself.

fp16 has no numbers between 0 and 6e-8, and many gradients are smaller. The backward pass is linear, so a loss that is
multiplied by a scale ``s`` gives gradients that are all multiplied by ``s``; they survive the trip in fp16 and are
divided by ``s`` in fp32, in the optimizer's step. Too large an ``s`` overflows: some gradient becomes inf or NaN, the
step is thrown away on all ranks, and ``s`` is made smaller. bf16 and fp32 have the range and use a scale of 1.

A *dynamic* scale rides the edge. With a ``window`` of w steps and a ``hysteresis`` of h, after each optimizer step:

- **overflow**: the first ``h - 1`` overflows are forgiven (one odd batch should not cost a halving); once they are used
  up, each further one halves the scale, down to ``min_scale``. There, one more raises.
- **no overflow**: the scale doubles if the number of good steps in a row *before* this one is ``w``, ``2w``, ``3w`` …;
  so the first doubling comes with good step ``w + 1``. A doubling fills the forgiveness up again; with
  ``consecutive_hysteresis`` each single good step does.

The scale that multiplies a loss must be the one that later divides its gradients: **read** ``scale`` **before**
``update``. (DeepSpeed 0.19.8 updates first: on each step that doubles its scale, the optimizer sees half the gradient.)

Sources: the numbers are those of ``runtime/fp16/loss_scaler.py`` in [DeepSpeed], which comes from [Megatron-LM], tested
against it; the method is that of [mixed precision], section 3.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from deepzero.config.engine import PrecisionConfig
from deepzero.config.strict import ConfigError, require

GROWTH = 2.0
"""The scale doubles and halves: a power of two changes no digit of a gradient, only its exponent."""


class LossScaleError(RuntimeError):
    """The scale is at its minimum and gradients still overflow: something else is wrong, and training stops."""


class LossScaler:
    """A scale that never changes: fp16 with a fixed ``loss_scale``, and 1 for bf16 and fp32. DeepSpeed's name.

    It multiplies the next loss, and divides the gradients that come of it. In fp16 an overflowing step is still skipped
    by the engine, and there is nothing to learn from it; in bf16 and fp32 the engine raises.
    """

    kind = "static"
    changing: ClassVar[tuple[str, ...]] = ("scale",)
    """Attributes that are saved with a checkpoint."""

    def __init__(self, scale: float = 1.0) -> None:
        require(scale > 0, "precision.loss_scale", scale, "a fixed loss scale must be positive")
        self.scale = float(scale)

    def update(self, overflow: bool) -> None:
        """Take note of one optimizer step. ``overflow`` must be agreed upon by all ranks, or their scales part ways."""

    def state_dict(self) -> dict[str, Any]:
        """What changes; a fixed scale is there only to be looked at, and everything else comes from the config."""
        return {"kind": self.kind, **{name: getattr(self, name) for name in self.changing}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken, with the window, hysteresis, minimum or fixed scale of this run."""
        if state.get("kind") != self.kind:
            raise ValueError(
                f"the saved loss scaler is {state.get('kind')!r}, this run's is {self.kind!r}: set "
                "precision.loss_scale as in the run that was saved (0 is dynamic), or leave the saved loss scaler out"
            )
        expected = sorted(self.state_dict())
        if sorted(state) != expected:
            raise ValueError(f"a {self.kind} loss scaler's state has the keys {expected}, this one has {sorted(state)}")
        for name in self.changing if self.kind == "dynamic" else ():
            setattr(self, name, type(getattr(self, name))(state[name]))


class DynamicLossScaler(LossScaler):
    """A scale that doubles after a while without overflow and halves after one. See the module's first lines.

    Args:
        initial_scale: the first scale.
        window: good steps in a row before the scale doubles.
        hysteresis: overflows until the scale halves; 1 halves at once.
        consecutive_hysteresis: fill the hysteresis up after every good step, instead of at every doubling.
        min_scale: the scale is never halved below this.

    Example:
        >>> scaler = DynamicLossScaler(initial_scale=8.0, window=2, hysteresis=1)
        >>> [scaler.update(overflow) or scaler.scale for overflow in (True, False, False, False)]
        [4.0, 4.0, 4.0, 8.0]
    """

    kind = "dynamic"
    changing = ("scale", "iteration", "last_overflow_iteration", "hysteresis_left")

    def __init__(
        self,
        initial_scale: float = 2.0**16,
        window: int = 1000,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
        min_scale: float = 1.0,
    ) -> None:
        for name, value in (("loss_scale_window", window), ("hysteresis", hysteresis)):
            require(value >= 1, f"precision.{name}", value, "must be at least 1")
        if not 0 < min_scale <= initial_scale:
            raise ConfigError(
                f"precision.min_loss_scale={min_scale!r}: must be positive and not above the first loss scale, "
                f"which is {initial_scale:g} (2 to the power of precision.initial_scale_power)"
            )
        super().__init__(initial_scale)
        self.window, self.hysteresis, self.consecutive_hysteresis = window, hysteresis, consecutive_hysteresis
        self.min_scale = float(min_scale)
        # -1 is the step before the first one.
        self.iteration, self.last_overflow_iteration, self.hysteresis_left = 0, -1, hysteresis

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As above; a scale from before is none below this run's minimum, or an overflow would raise it."""
        super().load_state_dict(state)
        self.scale = max(self.scale, self.min_scale)
        self.hysteresis_left = min(self.hysteresis_left, self.hysteresis)

    def update(self, overflow: bool) -> None:
        """Take note of one optimizer step, and change ``scale`` for the next one; raise where it cannot be smaller."""
        if overflow:
            # A hysteresis of 1 never forgives. Otherwise the last of the forgiven overflows leaves 1, and it stays at 1
            # (each further overflow halves) until good steps fill it up.
            if self.hysteresis_left > 1:
                self.hysteresis_left -= 1
            elif self.scale != self.min_scale:
                self.scale = max(self.scale / GROWTH, self.min_scale)
            else:
                raise LossScaleError(
                    f"gradients overflow in fp16 although the loss scale is at its minimum, {self.min_scale:g}, after "
                    f"{self.iteration + 1} optimizer steps. Most likely the loss itself is inf or NaN: look at the "
                    "learning rate and the data, or train in bf16. precision.min_loss_scale (fp16.min_loss_scale in a "
                    "DeepSpeed config) lowers the minimum"
                )
            self.last_overflow_iteration = self.iteration
        else:
            good_steps = self.iteration - self.last_overflow_iteration - 1
            grows = good_steps > 0 and good_steps % self.window == 0
            if grows or self.consecutive_hysteresis:
                self.hysteresis_left = self.hysteresis
            self.scale *= GROWTH if grows else 1
        self.iteration += 1


def build_loss_scaler(precision: PrecisionConfig) -> LossScaler:
    """The scaler that a precision asks for: dynamic for fp16 with ``loss_scale=0``, else fixed, and 1 outside fp16.

    Example:
        >>> build_loss_scaler(PrecisionConfig(dtype="fp16")).scale, build_loss_scaler(PrecisionConfig()).scale
        (65536.0, 1.0)
    """
    if precision.dtype != "fp16" or precision.loss_scale:
        return LossScaler(precision.loss_scale if precision.dtype == "fp16" else 1.0)
    return DynamicLossScaler(
        2.0**precision.initial_scale_power, precision.loss_scale_window, precision.hysteresis,
        precision.consecutive_hysteresis, precision.min_loss_scale,
    )  # fmt: skip
