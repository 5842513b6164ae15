"""What step 0 of a training step, build, leaves behind."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepzero.comm.ledger import Ledger
from deepzero.comm.quantized_reduce import QuantizedReduce
from deepzero.comm.reduce_scatter import BucketReducer
from deepzero.config.engine import EngineConfig
from deepzero.runtime.trained import TrainedParameters
from deepzero.runtime.zero.delayed_update import DelayedStep
from deepzero.runtime.zero.gradient_reduction import GradAccumulator
from deepzero.runtime.zero.offload_setup import Offload
from deepzero.runtime.zero.sharded_step import ParamGroup, ShardedStep
from deepzero.runtime.zero.stage3 import Partitioning, ZeroStage3
from deepzero.runtime.zero.stage_0 import ZeroStage0
from deepzero.runtime.zero.stage_1_and_2 import ZeroStage1And2
from deepzero.runtime.zero.zeropp import QuantizationMonitor

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Dtypes:
    """Three settings, not one: what the model computes in, what travels, what gradients are summed in."""

    compute: torch.dtype
    wire: torch.dtype
    accumulation: torch.dtype

    @classmethod
    def of(cls, config: EngineConfig) -> Dtypes:
        """The compute dtype is also the wire dtype unless ``communication_data_type`` says otherwise."""
        compute = TORCH_DTYPES[config.precision.dtype]
        wire = TORCH_DTYPES[config.communication_data_type or config.precision.dtype]
        return cls(compute, wire, TORCH_DTYPES[config.grad_accum_dtype])


@dataclass(frozen=True)
class ZeroComponents:
    """What step 0 leaves behind."""

    groups: list[ParamGroup]
    source: GradAccumulator
    reducer: BucketReducer
    stage: ZeroStage0 | ZeroStage1And2 | ZeroStage3
    dtypes: Dtypes
    moment_bytes: int
    partitioning: Partitioning | None
    """Stage 3's."""
    offload: Offload | None
    """What lives in host memory, if anything does."""
    sharded_step: ShardedStep | DelayedStep
    """Phase 5: the optimizer over this rank's masters."""
    trained: TrainedParameters
    """Checked before every step: the same parameters train as at build."""
    meter: QuantizationMonitor | None = None
    """Of what is quantised, if anything is."""

    @property
    def quantized_grads(self) -> QuantizedReduce | None:
        """The reducer's part that is qgZ; None: gradients are not quantised, or there is one rank."""
        return self.reducer.strategy if isinstance(self.reducer.strategy, QuantizedReduce) else None

    def offload_report(self) -> dict[str, dict[str, float]]:
        """The last step's pipeline between device and host, part by part; empty where nothing is offloaded."""
        if self.offload is None:
            return {}
        return {kind.removeprefix("offload."): leg.as_dict() for kind, leg in self.offload.meter.last_step.items()}

    def close(self) -> None:
        """The engine is destroyed: host memory is unlocked, and goes back to the system with its last tensor."""
        if self.offload is not None:
            self.offload.arena.close()
        if self.partitioning is not None:
            self.partitioning.clear()

    def forget_gradients(self) -> None:
        """The step's gradients are not used: what was kept and measured of them goes with them."""
        self.reducer.forget()
        if self.meter is not None:
            self.meter.restart()

    def close_step(self, ledger: Ledger, applied: bool) -> None:
        """An optimizer step is complete: measure what is due, close the books."""
        if self.meter is not None:
            self.meter.close_step(applied)
        ledger.close_step()
        if self.offload is not None:
            self.offload.meter.close_step()

    @property
    def stores(self) -> list[ParamGroup]:
        """All groups, those that are not trained (stage 3) too."""
        return [*self.groups, *(self.partitioning.frozen if self.partitioning is not None else ())]
