"""What step 0 of a training step, build, leaves behind; and whether the same parameters train as did then."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import is_

import torch
from torch import nn

from deepzero.comm.ledger import Ledger
from deepzero.comm.quantized_reduce import QuantizedReduce
from deepzero.comm.reduce_scatter import BucketReducer
from deepzero.config.engine import EngineConfig
from deepzero.offload.optimizer_offload import Offload
from deepzero.runtime.zero.gradient_reduction import GradAccumulator
from deepzero.runtime.zero.optimizer_shard import OptimizerShard, ParamGroup
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


ADVICE = "call engine.destroy(), then deepzero.initialize with the model as it is to be trained"


class TrainedParameters:
    """The parameters that an engine trains, and the model that they must stay in.

    Masters, gradients and optimizer states exist for the parameters that trained at ``deepzero.initialize``. One that
    is frozen afterwards would go on moving by its momentum and weight decay; one that is unfrozen or added would never
    move, and might have other values on every rank. So each optimizer step looks whether the same parameters train.
    Between two steps a program may freeze and unfreeze as it likes, as it does where two models train in turn.

    Args:
        model: as it is now.
        groups: of the trained parameters.
    """

    def __init__(self, model: nn.Module, groups: Iterable[ParamGroup]) -> None:
        self._model = model
        names = {param: name for name, param in model.named_parameters()}
        grouped = {param for group in groups for param in group.params}
        self._trained = {param: name for param, name in names.items() if param in grouped}
        # With whether it may require grad all the same: it is in no group of the optimizer, and that has been said.
        self._untrained = [(param, name, param.requires_grad) for param, name in names.items() if param not in grouped]
        self._remember()

    def _remember(self) -> None:
        """The model's tree: the step compares it, object by object, instead of naming all parameters anew."""
        self._tree = [(m, list(m._parameters.values()), list(m._modules.values())) for m in self._model.modules()]

    def _same_tree(self) -> bool:
        return all(
            len(module._parameters) == len(params)
            and len(module._modules) == len(children)
            and all(map(is_, module._parameters.values(), params))
            and all(map(is_, module._modules.values(), children))
            for module, params, children in self._tree
        )

    def check(self) -> None:
        """Raise a :class:`RuntimeError` when other parameters train than did when the engine was built."""
        with torch._C.DisableTorchFunctionSubclass():  # flags need no values, and no detour through Python
            for param, name in self._trained.items():
                if not param.requires_grad:
                    raise RuntimeError(
                        f"parameter {name!r} was frozen (requires_grad=False) after deepzero.initialize: its momentum "
                        "and weight decay would go on moving it. Let it train again, or give it a param group of its "
                        f"own from the start and set that group's lr to 0; or {ADVICE}"
                    )
                if param.grad is not None:
                    raise RuntimeError(
                        f"parameter {name!r} has a .grad that was assigned by hand: engine.step() takes what backward "
                        "passes have left, and would ignore it. Use deepzero.utils.safe_set_full_grad, or set it to "
                        "None"
                    )
            for param, name, trainable in self._untrained:
                if param.requires_grad and not trainable:
                    raise RuntimeError(
                        f"parameter {name!r} was unfrozen (requires_grad=True) after deepzero.initialize: ZeRO has no "
                        f"master and no optimizer state for it, and it would never change. Freeze it again; or {ADVICE}"
                    )
            if not self._same_tree():
                self._check_tree()

    def _check_tree(self) -> None:
        now = {param: name for name, param in self._model.named_parameters()}
        gone = [name for param, name in self._trained.items() if param not in now]
        if gone:
            raise RuntimeError(
                f"parameter {gone[0]!r} has been replaced or removed since deepzero.initialize, and the optimizer "
                f"would go on training the old one. Put it back; or {ADVICE}"
            )
        known = {*self._trained, *(param for param, *_ in self._untrained)}
        added = [name for param, name in now.items() if param.requires_grad and param not in known]
        if added:
            raise RuntimeError(
                f"parameter {added[0]!r} has been added since deepzero.initialize: the optimizer does not know it, and "
                f"every rank has its own values of it. Freeze it (requires_grad_(False)); or {ADVICE}"
            )
        self._remember()


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
    optimizer_shard: OptimizerShard
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
