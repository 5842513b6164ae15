"""One-step delayed parameter update: the CPU steps while the next step's forward and backward pass run.

Where the CPU's step takes longer than the rest of the pipeline can hide, it can be taken off the path altogether, at
the price of one step of staleness::

    step t      forward, backward | boundary: send what t-1's update has written; hand over t's gradients
    a thread                        update t ..........................................
    step t+1                      forward, backward (parameters of update t-1) | boundary: send update t ...

So the gradients of step t+1 are taken at parameters that lack update t. Early in training parameters change fast and
that hurts; so the first ``delay_after_steps`` steps are not delayed. The paper finds the same final accuracy with a
delay that begins after some dozens of steps; the bits are others than without.

Reduced gradients have two copies on the host here, one for the thread and one for the backward pass under way, and new
parameters stay in staging until the boundary. Masters and moments belong to the thread while it runs: who wants to read
them calls :meth:`DelayedStep.join`, who wants to write, or to save, :meth:`DelayedStep.finish` first. Whoever reads the
parameters reads those that the model computes with.

Source: section 5.2 of the ZeRO-Offload paper, "One-Step Delayed Parameter Update".
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from deepzero.comm import profiler_ranges
from deepzero.comm.process_group import raise_on_all_ranks
from deepzero.config.strict import ConfigError
from deepzero.offload.copy_streams import ADAM
from deepzero.offload.cpu_adam import CPUAdam
from deepzero.runtime.zero.gradient_reduction import GradientReducer
from deepzero.runtime.zero.sharded_step import ParamGroup, ShardedStep, SubGroup, bytes_of_step, cpu_threads
from deepzero.utils.threads import start_thread


class DelayedStep:
    """A :class:`ShardedStep` whose part on the host is one step late.

    Args:
        step: what would run without delay. Its optimizer has to be :class:`CPUAdam`: the thread steps with a twin of it
            that has the settings of the hand-over, whatever a schedule does to the original meanwhile.
        gradients: whose sums on the host the thread reads.
        groups: whose writers have to know.
        after: steps without delay.

    Raises:
        ConfigError: another optimizer.
    """

    def __init__(self, step: ShardedStep, gradients: GradientReducer, groups: Sequence[ParamGroup], after: int) -> None:
        if not isinstance(step.optimizer, CPUAdam):
            raise ConfigError(
                f"zero.offload_optimizer.delayed_update steps in a thread of its own, with CPUAdam alone, and the "
                f"optimizer is {type(step.optimizer).__name__}; choose CPUAdam (Adam or AdamW in the config), or "
                "switch delayed_update off"
            )
        self.inner, self.gradients, self.groups, self.after = step, gradients, list(groups), after
        self.optimizer, self.parts = step.optimizer, step.parts
        self.steps = 0
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._broken: str | None = None
        self.update_pending = False
        """An update is on its way: being made, or made and not sent."""
        self._seconds = 0.0
        self._bytes = 0
        for group in groups:
            group.before_write = partial(self._refuse_write, group.before_write)

    # ---- step 4 ------------------------------------------------------------------------------------------------------

    def before_step(self, groups: Sequence[ParamGroup]) -> None:
        """Before anything of a step: a parameter that was written meanwhile would lose to the update on its way."""
        self._check_unwritten()
        self.inner.before_step(groups)  # with an update on its way nothing was written, and the rest of it is checks

    def step(self, divisor: float) -> None:
        """Send what the last update has written, step on the device, hand over what is for the host."""
        self._send()
        for group in self.inner.on_device:
            self.inner.step_sub_group(group, divisor, None)
        self.steps += 1
        if self.steps <= self.after:
            self.inner.step_on_host(divisor)
            return
        twin = self._twin()
        # A sum's tensor will be turned to its other copy; the thread keeps its own view of this one.
        work = [(group, [part.grad.detach() for part in group.parts]) for group in self.inner.on_host]
        self.gradients.swap_host_sums(self.parts)
        self.update_pending = True
        # No daemon: a program that ends meanwhile waits for it.
        self._thread = start_thread(self._run, "deepzero-delayed-update", twin, work, divisor, daemon=False)

    def _twin(self) -> CPUAdam:
        """The optimizer's settings of now over its state."""
        twin: CPUAdam = self.optimizer.twin()
        return twin

    def _run(self, twin: CPUAdam, work: Sequence[tuple[SubGroup, list[torch.Tensor]]], divisor: float) -> None:
        began = time.perf_counter()
        host = self.inner.host
        try:
            with torch.no_grad(), cpu_threads(host.threads if host is not None else 1):
                for group, grads in work:
                    outs = group.back.outs() if group.back is not None else None
                    number, first = group.back.where() if group.back is not None else (None, "")
                    with profiler_ranges.span_aside("step", number, first, "delayed"):
                        twin.step(grads=grads, out=outs, scale=divisor, only=group.masters)
                    self._bytes += bytes_of_step(self.optimizer, group, outs or [])
        except BaseException as error:
            self._error = error
        self._seconds = time.perf_counter() - began

    def _check_unwritten(self) -> None:
        """Join; raise when the update failed, or when a parameter was written that it would change."""
        self.join()
        written = [name for group in self.groups for name in group.written()] if self.update_pending else []
        if written:
            raise RuntimeError(
                f"parameter {written[0]!r} was written while a delayed update was on its way to it; call "
                "engine.finish_delayed_update() before parameters are written, or load a checkpoint now"
            )

    def _agree(self) -> None:
        """All ranks have come so far, or all raise. A collective, while an update is on its way."""
        if not self.update_pending:
            self.join()
            return
        problem = None
        try:
            self._check_unwritten()
        except RuntimeError as error:
            problem = str(error)
        raise_on_all_ranks(problem)

    # ---- the thread's end --------------------------------------------------------------------------------------------

    def join(self) -> None:
        """The thread is over: masters and moments may be read. The parameters are still those of the step before."""
        if self._broken is not None:
            raise RuntimeError(self._broken)
        if self._thread is None:
            return
        began = time.perf_counter()
        self._thread.join()
        self._thread = None
        if self.inner.host is not None:
            self.inner.host.meter.leg(ADAM).add(self._bytes, self._seconds, time.perf_counter() - began)
        self._bytes, self._seconds = 0, 0.0
        if self._error is not None:
            error, self._error = self._error, None
            self._broken = (
                f"the delayed update failed ({error!r}), and masters are half old, half new; load a checkpoint"
            )
            raise RuntimeError(self._broken) from error

    def finish(self) -> bool:
        """Join, and send what was written: after the next publication the parameters are those of the masters.

        A collective.

        Returns:
            Whether there was anything to send.

        Raises:
            RuntimeError: on every rank. An update failed on one, or a parameter was written that it would change.
        """
        self._agree()
        return self._send()

    def _send(self) -> bool:
        if not self.update_pending:
            return False
        self.update_pending = False
        for group in self.inner.on_host:
            if group.back is not None:
                group.back.send()
        return True

    def forget(self) -> None:
        """What the update has written will not be sent: everything is about to be replaced."""
        with contextlib.suppress(RuntimeError):
            self.join()
        self._broken, self.update_pending = None, False

    def set_applied_steps(self, steps: int) -> None:
        """The run goes on from a checkpoint, after so many applied steps."""
        self.steps = steps

    def _refuse_write(self, before_write: Callable[[], None] | None) -> None:
        if self.update_pending:
            raise RuntimeError(
                "a delayed update is on its way to the parameters, and what is written now would be lost; call "
                "engine.finish_delayed_update() on all ranks first"
            )
        if before_write is not None:
            before_write()
