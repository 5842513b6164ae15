"""What others ask an engine: sizes, settings, counters, in DeepSpeed's names. Nothing here changes anything.

Apart from :mod:`~deepzero.runtime.engine` only so that the training step can be read there without them.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import nn

from deepzero.comm import process_group
from deepzero.comm.collectives import Communicator
from deepzero.config.engine import BatchSizes, EngineConfig
from deepzero.runtime.grad_norm import layer_of
from deepzero.runtime.zero_components import ZeroComponents


class EngineFacts(nn.Module):
    """The questions that an engine answers from its configuration and its optimizer."""

    config: EngineConfig
    batch: BatchSizes
    optimizer: torch.optim.Optimizer
    global_rank: int
    _asked_to_stop: bool
    _zero: ZeroComponents
    last_step: Any
    comm: Communicator
    skipped_steps: int
    world_size: int

    # ---- batch -------------------------------------------------------------------------------------------------------

    def train_batch_size(self) -> int:
        """Sequences per optimizer step over all ranks."""
        return self.batch.global_batch

    def train_micro_batch_size_per_gpu(self) -> int:
        """Sequences in one forward pass of one rank."""
        return self.batch.micro_batch

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self.batch.accumulation

    def get_batch_info(self) -> tuple[int, int, int]:
        """Sequences per optimizer step, sequences per micro-batch of a rank, micro-batches per optimizer step."""
        return self.batch.global_batch, self.batch.micro_batch, self.batch.accumulation

    # ---- settings ----------------------------------------------------------------------------------------------------

    def gradient_clipping(self) -> float:
        """Largest global gradient norm; 0: off."""
        return self.config.gradient_clipping

    def steps_per_print(self) -> int | None:
        """Optimizer steps between two lines that the engine prints; None: it prints none."""
        return self.config.steps_per_print

    def zero_optimization(self) -> bool:
        """Whether anything is partitioned."""
        return self.config.zero.stage > 0

    def zero_optimization_stage(self) -> int:
        """0, 1, 2 or 3."""
        return self.config.zero.stage

    def fp16_enabled(self) -> bool:
        """Whether the model computes in fp16, under a loss scale."""
        return self.config.precision.dtype == "fp16"

    def bfloat16_enabled(self) -> bool:
        """Whether the model computes in bf16."""
        return self.config.precision.dtype == "bf16"

    def _print_progress(self, record: Any) -> None:
        """What ``steps_per_print`` asks for, of the step that ``record`` (a ``StepRecord``) is about."""
        every = self.config.steps_per_print
        if every is not None and self.global_rank == 0 and record.step % every == 0:
            print(
                f"step={record.step}, skipped={self.skipped_steps}, lr={self.get_lr()}, loss={record.loss:.6g}, "
                f"grad_norm={record.grad_norm:.6g}, loss_scale={record.loss_scale:g}",
                flush=True,
            )

    # ---- ranks -------------------------------------------------------------------------------------------------------

    @property
    def dp_world_size(self) -> int:
        """Ranks that share the data: all of them."""
        return self.world_size

    @property
    def mp_world_size(self) -> int:
        """Ranks that share one copy of a layer: one."""
        return 1

    def get_data_parallel_rank(self) -> int:
        """This rank among those that share the data."""
        return self.global_rank

    def eval_mean(self, values: torch.Tensor) -> torch.Tensor:
        """Mean over ranks, in rank order, of a 1-D tensor of doubles."""
        everyone = process_group.all_gather_object(values.detach().double().cpu())
        total = torch.zeros_like(everyone[0])
        for theirs in everyone:
            total += theirs
        return total / len(everyone)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        process_group.barrier()

    def request_stop(self) -> None:
        """Ask for an orderly end; from any thread of any rank. After the next step ``engine.stopping`` is True on all.

        A signal reaches ranks at different instants, and some of them perhaps a step later. The word travels with the
        step's agreement, at no cost, so that all leave the loop at the same place.
        """
        self._asked_to_stop = True

    # ---- offload -----------------------------------------------------------------------------------------------------

    def offload_report(self) -> dict[str, dict[str, float]]:
        """This rank's pipeline between device and host in the last step, part by part; empty without offload.

        Returns:
            For ``gradients_to_host``, ``optimizer_step``, ``parameters_to_device`` and ``parameters_fetch``, as far as
            there are such: ``bytes``, ``seconds`` under way, ``gb_per_second``, and ``hidden``, the part of those
            seconds (0 to 1) in which neither the program nor the compute stream stood still for it. Without a GPU
            copies are made in line, and nothing is hidden but a delayed update.
        """
        return self._zero.offload_report()

    def describe_offload(self) -> str | None:
        """One line for rank 0's log: what is in host memory, how many threads step on it and with which kernel."""
        return self._zero.offload.describe(self.optimizer) if self._zero.offload is not None else None

    def offload_metrics(self) -> dict[str, float]:
        """:meth:`offload_report` in flat words, for a log: ``offload/optimizer_step/gb_per_second`` and so on."""
        found = self.offload_report().items()
        return {f"offload/{part}/{name}": value for part, leg in found for name, value in leg.items()}

    # ---- quantisation ------------------------------------------------------------------------------------------------

    def quantization_report(self) -> dict[str, Any]:
        """What the error meter has read last: signal-to-noise ratios in dB; empty where nothing is quantised.

        Returns:
            ``weights`` and ``gradients``, each by bucket; ``unquantized``, what fell below a bound and travels as it
            is.
        """
        meter = self._zero.meter
        return dataclasses.asdict(meter.readings) if meter is not None else {}

    def step_metrics(self) -> dict[str, float]:
        """What the last step has to say beside its record.

        Communication that was hidden (``profiler_ranges.py``), :meth:`offload_metrics`, the error meter's readings.
        """
        meter = self._zero.meter
        overlap = self.comm.overlap.metrics()
        return {**overlap, **self.offload_metrics(), **(meter.metrics() if meter is not None else {})}

    # ---- gradients ---------------------------------------------------------------------------------------------------

    def gradient_norms(self) -> dict[str, float]:
        """The last step's gradient norm, layer by layer, before clipping: ``gradients/LAYER``. A collective.

        It is made of what the global norm was made of, so that no gradient is read again: one addition for each block
        of ``ALIGN`` of a rank's elements (``grad_norm.py``). A rank adds up what it has of each layer, and one gather
        brings 8 bytes a layer from every rank to every rank. Empty before the first step, and after a step that was
        skipped.
        """
        record = self.last_step
        if record is None or record.skipped:
            return {}
        squares = torch.cat(self._zero.stage.gradients.param_norm_sq()).tolist()
        names = [name for group in self._zero.groups for name in group.names]
        layers = dict.fromkeys(map(layer_of, names), 0.0)  # the same layers in the same order on every rank
        for name, square in zip(names, squares, strict=True):
            layers[layer_of(name)] += square
        mine = torch.tensor(list(layers.values()), dtype=torch.float64)
        sums = process_group.sum_in_rank_order(mine, self.comm.device).tolist()
        divisor = self.world_size * self.batch.accumulation * record.loss_scale
        return {f"gradients/{layer}": math.sqrt(square) / divisor for layer, square in zip(layers, sums, strict=True)}

    # ---- optimizer ---------------------------------------------------------------------------------------------------

    def get_lr(self) -> list[float]:
        """Learning rate of every param group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """Momentum of every param group: ``betas`` where the optimizer has them, else ``momentum``, else 0."""
        return [group.get("betas", group.get("momentum", 0.0)) for group in self.optimizer.param_groups]
