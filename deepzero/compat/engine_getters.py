"""DeepSpeed's getters: what an engine says of its sizes, settings and last step. Nothing here changes anything.

Source: the properties and methods of these names in ``runtime/engine.py`` of [DeepSpeed].
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from torch.utils.data import DataLoader

from deepzero.comm import process_group
from deepzero.runtime.diagnostics import gradient_norms
from deepzero.runtime.engine import Engine


class EngineGetters(Engine):
    """An :class:`Engine` with DeepSpeed's getters."""

    model_numel: int
    """Elements of the whole model, before anything was partitioned."""
    training_dataloader: DataLoader[Any] | None = None

    global_rank = property(attrgetter("comm.rank"))
    world_size = property(attrgetter("comm.world_size"))
    local_rank = property(lambda self: process_group.local_rank())
    device = property(attrgetter("comm.device"))
    ledger = property(attrgetter("comm.ledger"))
    stage = property(attrgetter("zero.stage"))

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

    # ---- offload -----------------------------------------------------------------------------------------------------

    def offload_report(self) -> dict[str, dict[str, float]]:
        """This rank's pipeline between device and host in the last step, part by part; empty without offload.

        Returns:
            For ``gradients_to_host``, ``optimizer_step``, ``parameters_to_device`` and ``parameters_fetch``, as far as
            there are such: ``bytes``, ``seconds`` under way, ``gb_per_second``, and ``hidden``, the part of those
            seconds (0 to 1) in which neither the program nor the compute stream stood still for it. Without a GPU
            copies are made in line, and nothing is hidden but a delayed update.
        """
        return self.zero.offload_report()

    def describe_offload(self) -> str | None:
        """One line for rank 0's log: what is in host memory, how many threads step on it and with which kernel."""
        return self.zero.offload.describe(self.optimizer) if self.zero.offload is not None else None

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
        meter = self.zero.meter
        return meter.readings() if meter is not None else {}

    def step_metrics(self) -> dict[str, float]:
        """What the last step has to say beside its record.

        Communication that was hidden (``profiler_ranges.py``), :meth:`offload_metrics`, the error meter's readings.
        """
        meter = self.zero.meter
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
        if self.last_step is None or self.last_step.skipped:
            return {}
        divisor = self.world_size * self.batch.accumulation * self.last_step.loss_scale
        return gradient_norms(self.zero.groups, self.zero.stage.gradients.param_norm_sq(), divisor, self.device)

    def get_global_grad_norm(self) -> float | None:
        """Norm of the last step's gradients before clipping; ``inf`` when it was skipped, None before the first."""
        return self.last_step.grad_norm if self.last_step is not None else None

    def was_step_applied(self) -> bool:
        """Whether the last call of ``step`` changed the parameters."""
        return self.state.applied

    @property
    def loss_scale(self) -> float:
        """The scale that the next loss is multiplied by; 1 outside fp16."""
        return self.scaler.scale

    cur_scale = loss_scale

    # ---- optimizer ---------------------------------------------------------------------------------------------------

    def get_lr(self) -> list[float]:
        """Learning rate of every param group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """Momentum of every param group: ``betas`` where the optimizer has them, else ``momentum``, else 0."""
        return [group.get("betas", group.get("momentum", 0.0)) for group in self.optimizer.param_groups]
