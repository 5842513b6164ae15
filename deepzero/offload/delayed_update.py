"""One-step delayed parameter update: the CPU steps while the next step's forward and backward pass run.

Where the CPU's step takes longer than the rest of the pipeline can hide, it can be taken off the path altogether, at
the price of one step of staleness::

    step t      forward, backward | boundary: send what t-1's update has written; hand over t's gradients
    a thread                        update t ..........................................
    step t+1                      forward, backward (parameters of update t-1) | boundary: send update t ...

So the gradients of step t+1 are taken at parameters that lack update t. Early in training parameters change fast and
that hurts; so the first ``delay_after_steps`` steps are not delayed. Reduced gradients have two copies on the host
here, one for the thread and one for the backward pass under way, and new parameters stay in staging until the boundary.
Masters and moments belong to the thread while it runs: call :meth:`DelayedOptimizerShard.wait_pending_update` before
they are read, and :meth:`DelayedOptimizerShard.apply_pending_update` before they are written or saved.

Source: [ZeRO-Offload], section 5.2, "One-Step Delayed Parameter Update".
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from deepzero.offload.copy_streams import ADAM
from deepzero.offload.cpu_adam import CPUAdam
from deepzero.offload.optimizer_offload import HostOptimizerShard, bytes_of_step, cpu_threads
from deepzero.utils.threads import start_thread


class DelayedOptimizerShard(HostOptimizerShard):
    """A :class:`HostOptimizerShard` whose step in host memory is applied one step late. Arguments are as there.

    Its optimizer has to be :class:`CPUAdam`: the thread steps with a twin of it that has the settings of the hand-over,
    whatever a schedule does to the original meanwhile.
    """

    optimizer: CPUAdam

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.steps = 0
        self.update_pending = False
        # What the thread will have moved, in bytes and seconds; None: no thread runs.
        self._update: Future[tuple[int, float]] | None = None
        self._broken: str | None = None
        for group in self.groups:
            group.before_write = partial(self._refuse_write, group.before_write)

    # ---- 5: step -----------------------------------------------------------------------------------------------------

    def before_step(self) -> None:
        """Refuse a step when a parameter was written meanwhile, which would lose to the update on its way."""
        optimizer = self.optimizer
        delayed = self.steps >= self.host.settings.delay_after_steps
        # One is the shard's own.
        if delayed and len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks) > 1:
            raise RuntimeError(
                "the optimizer has step hooks, which a delayed update, in a thread of its own, would not call: remove "
                "them, or switch zero.offload_optimizer.delayed_update off"
            )
        self._check_unwritten()
        super().before_step()  # with an update on its way nothing was written, and the rest of it is checks

    def step(self, divisor: float) -> None:
        """Send what the last update has written, step on the device, hand over what is for the host."""
        self._send()
        super().step(divisor)

    def _step_on_host(self, divisor: float) -> None:
        self.steps += 1
        if self.steps <= self.host.settings.delay_after_steps:
            super()._step_on_host(divisor)
            return
        twin = self.optimizer.twin()
        # The next sums go into the other copy; the thread keeps its own views of these.
        grads = [[self.grads[master] for master in upload.masters] for upload in self.uploads]
        self.gradients.swap()
        self.grads = self.cut_grads()
        self.update_pending, self._update = True, Future()
        # No daemon: a program that ends meanwhile waits for it.
        try:
            start_thread(self._run, "deepzero-delayed-update", self._update, twin, grads, divisor, daemon=False)
        except BaseException as error:  # nobody else would end the update, and whoever waits for it would wait for ever
            self._update.set_exception(error)
            raise

    def _run(
        self, update: Future[tuple[int, float]], twin: CPUAdam, grads: Sequence[list[torch.Tensor]], divisor: float
    ) -> None:
        began, moved = time.perf_counter(), 0
        try:
            with torch.no_grad(), cpu_threads(self.host.threads):
                for upload, sums in zip(self.uploads, grads, strict=True):
                    outs = upload.output_fragments()
                    with upload.group.comm.ranges.span_aside("step", *upload.where(), "delayed"):
                        twin.step(grads=sums, out=outs, scale=divisor, only=upload.masters)
                    moved += bytes_of_step(self, upload.masters, outs)
        except BaseException as error:
            update.set_exception(error)
        else:
            update.set_result((moved, time.perf_counter() - began))

    def _check_unwritten(self) -> None:
        """Wait; raise when the update failed, or when a parameter was written that it would change."""
        self.wait_pending_update()
        written = [name for group in self.groups for name in group.written()] if self.update_pending else []
        if written:
            raise RuntimeError(
                f"parameter {written[0]!r} was written while a delayed update was on its way to it; call "
                "engine.finish_delayed_update() before parameters are written, or load a checkpoint now"
            )

    # ---- the thread's end --------------------------------------------------------------------------------------------

    def wait_pending_update(self) -> None:
        """Wait until the thread is over; raise if the update failed. The parameters are still those of before."""
        if self._broken is not None:
            raise RuntimeError(self._broken)
        if self._update is None:
            return
        began = time.perf_counter()
        error = self._update.exception()  # stands still until the thread is over
        update, self._update = self._update, None
        if error is not None:
            self._broken = (
                f"the delayed update failed ({error!r}), and masters are half old, half new; load a checkpoint"
            )
            raise RuntimeError(self._broken) from error
        self.host.copier.meter.legs[ADAM].add(*update.result(), time.perf_counter() - began)

    def apply_pending_update(self) -> None:
        """Wait, and send what was written: after the next publication the parameters are those of the masters.

        A collective, called with an update pending alone. Every rank raises if an update failed on one, or a parameter
        was written that it would change.
        """
        with self.groups[0].comm.together(RuntimeError, RuntimeError):
            self._check_unwritten()
        self._send()

    def _send(self) -> None:
        pending, self.update_pending = self.update_pending, False
        for upload in self.uploads if pending else ():
            upload.send()

    def drop_pending_update(self) -> None:
        """Forget what the update has written: everything is about to be replaced."""
        with contextlib.suppress(RuntimeError):
            self.wait_pending_update()
        self._broken, self.update_pending = None, False

    def set_applied_steps(self, steps: int) -> None:
        """Go on from a checkpoint, after so many applied steps."""
        self.steps = steps

    def _refuse_write(self, before_write: Callable[[], None]) -> None:
        if self.update_pending:
            raise RuntimeError(
                "a delayed update is on its way to the parameters, and what is written now would be lost; call "
                "engine.finish_delayed_update() on all ranks first"
            )
        before_write()
