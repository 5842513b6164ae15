"""What the engine needs to know, as frozen dataclasses: DeepSpeed's JSON keys, their names, meanings and defaults.

This package is the *one* source of defaults: Hydra starts from these classes, and the files of ``configs/`` choose.
:mod:`deepzero.config.deepspeed_json` reads DeepSpeed's JSON (``zero_optimization``, ``bf16``, ``fp16`` …) into them.

Source: [DeepSpeed], ``runtime/config.py``, ``runtime/zero/config.py``, ``runtime/constants.py``: names and meanings.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Annotated, Any, Literal

from deepzero.config.strict import AtLeast, ConfigError, Count, NotNegative, Section, require
from deepzero.config.zero import ZeroConfig

_SMALL = ", this is too small"


@dataclass(frozen=True)
class PrecisionConfig(Section):
    """``bf16`` and ``fp16`` of a DeepSpeed config, ``precision.*`` on the command line."""

    where = "precision"

    dtype: Literal["bf16", "fp16", "fp32"] = "fp32"
    """Compute dtype of the model's parameters. With bf16 and fp16 the optimizer works on fp32 masters."""
    loss_scale: Annotated[float, AtLeast(0, "; 0 is dynamic, a fixed scale is positive")] = 0.0
    """fp16: a fixed loss scale; 0 means dynamic."""
    initial_scale_power: NotNegative = 16
    """fp16, dynamic: the first scale is 2 to this power."""
    loss_scale_window: Annotated[int, AtLeast(1, _SMALL)] = 1000
    """fp16, dynamic: steps without overflow before the scale doubles."""
    hysteresis: Annotated[int, AtLeast(1, _SMALL)] = 2
    """fp16, dynamic: the scale halves at this overflow; those before it are tolerated."""
    consecutive_hysteresis: bool = False
    """fp16, dynamic: refill the hysteresis after every step without overflow."""
    min_loss_scale: Annotated[float, AtLeast(1, _SMALL)] = 1.0
    """fp16, dynamic: the scale never falls below this."""
    auto_cast: bool = False
    """Cast floating-point inputs of ``engine(...)`` to the compute dtype."""
    check_grad_overflow: bool = False
    """bf16: skip a step whose gradients are not finite, as fp16 does, instead of stopping the run."""

    @property
    def skips_overflow(self) -> bool:
        """Whether a step whose gradients are not finite is skipped."""
        return self.dtype == "fp16" or self.check_grad_overflow

    def _check(self) -> None:
        rule = "must be at most 127: a scale of more is none of fp32's numbers"
        self.need(self.initial_scale_power < 128, "initial_scale_power", rule)
        rule = "is for precision.dtype=bf16: fp16 always skips, fp32 never does; leave it out"
        self.idle_unless(self.dtype == "bf16", rule, "check_grad_overflow")


@dataclass(frozen=True)
class ChaosConfig(Section):
    """Seeded disorder, to show that results do not depend on timing. See ``comm/chaos.py``."""

    where = "comm.chaos"

    enabled: bool = False
    """Sleep at random before launches and waits, and fill released buffers with NaN."""
    seed: int = 0
    """Every rank draws its own delays from this seed."""
    max_delay_ms: Annotated[float, AtLeast(0)] = 2.0
    """The longest single delay, in milliseconds."""


@dataclass(frozen=True)
class CommConfig(Section):
    """deepzero's own extension of the DeepSpeed config: how ranks talk."""

    where = "comm"

    reduce: Literal["exact", "native"] | None = None
    """exact: all-to-all, then an fp32 sum in rank order (same bits for any bucketing). native: the backend's own
    reduce-scatter. None: exact on gloo and with qgZ, native on NCCL."""
    world_size_invariant: bool = False
    """Refuse what would let bits depend on the number of ranks; and let stages 0 and 1 reduce every micro-batch, in the
    order of the global batch, as stages 2 and 3 do: their gradients then travel once for each."""
    ranks_per_node: Count | None = None
    """Ranks that share a node, consecutive ones: qgZ reduces there first, and the ledger tells what leaves a node. On
    one machine nodes can be pretended. None: as the launcher says (``LOCAL_WORLD_SIZE``), else all."""
    timeout_seconds: float = 600.0
    """A collective that takes longer raises. Not read where the script has joined the process group itself."""
    save_timeout_seconds: float = 1800.0
    """A save is given up when a rank's disk has taken nothing for so long. No collective waits for a disk."""
    chaos: ChaosConfig = field(default_factory=ChaosConfig)
    """Disorder for tests; off."""
    simulated_streams: bool = False
    """On CPUs, run the code for a GPU, and raise where it would read or write before it has waited. See
    ``comm/simulated_streams.py``."""

    def _check(self) -> None:
        for name in ("timeout_seconds", "save_timeout_seconds"):
            self.need(0 < getattr(self, name) <= 1e9, name, "must be positive, and at most 1e9, thirty years")


@dataclass(frozen=True)
class ActivationCheckpointingConfig(Section):
    """``activation_checkpointing`` of a DeepSpeed config: what is kept for the backward pass, and where.

    Which blocks are run again is the model's choice (``torch.utils.checkpoint``, ``model.activation_checkpointing``).
    """

    where = "activation_checkpointing"

    cpu_checkpointing: bool = False
    """What autograd keeps for the backward pass waits in host memory: with checkpointing the inputs of blocks, without
    it all activations. Every stage."""
    cpu_checkpointing_min_bytes: NotNegative = 1 << 20
    """Smaller ones stay on the device: a copy costs ten microseconds, whatever its size, in which a GPU moves a quarter
    of a megabyte."""
    cpu_checkpointing_pin_memory: bool = True
    """Lock the pages, without which no copy runs in the background."""


@dataclass(frozen=True)
class OptimizerConfig:
    """Which torch optimizer, with which arguments."""

    target: str = "AdamW"
    """``Adam``, ``AdamW``, ``CPUAdam``, ``Muon``, another class of ``torch.optim`` by name, any by its dotted path."""
    params: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of that class."""


@dataclass(frozen=True)
class SchedulerConfig:
    """Which learning-rate schedule, with which arguments."""

    type: str = "constant"
    """One of ``runtime/lr_schedules.py:CURVES``."""
    params: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of that schedule."""


@dataclass(frozen=True)
class EngineConfig(Section):
    """Everything ``deepzero.initialize`` reads; sections are described by their classes. Batch sizes are in samples."""

    train_batch_size: Count | None = None
    """Sequences per optimizer step over all ranks = micro-batch × accumulation × ranks. Any two give the third."""
    train_micro_batch_size_per_gpu: Count | None = None
    """Sequences in one forward pass of one rank."""
    gradient_accumulation_steps: Count | None = None
    """Micro-batches per optimizer step."""
    gradient_clipping: Annotated[float, AtLeast(0)] = 1.0
    """Largest global gradient norm; 0 switches clipping off. The default is DeepSpeed's."""
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    activation_checkpointing: ActivationCheckpointingConfig = field(default_factory=ActivationCheckpointingConfig)
    optimizer: OptimizerConfig | None = None
    """None: the caller passes an optimizer object to ``initialize``."""
    scheduler: SchedulerConfig | None = None
    """None: the caller passes a scheduler, or the learning rate stays as it is."""
    grad_accum_dtype: Literal["bf16", "fp16", "fp32"] = "fp32"
    """``data_types.grad_accum_dtype``: dtype in which gradients are summed and kept until the step."""
    communication_data_type: Literal["bf16", "fp16", "fp32"] | None = None
    """Wire dtype of gradients. None: the compute dtype."""
    steps_per_print: Count | None = None
    """Print loss scale, learning rate and skipped steps on rank 0 every so many optimizer steps; None: never."""
    dataloader_drop_last: bool = False
    """Whether ``deepspeed_io``'s loaders drop an incomplete last batch."""
    load_universal: bool = False
    """``checkpoint.load_universal``: ``load_checkpoint`` without a tag takes what ``latest_universal`` names first."""

    def _check(self) -> None:
        zero, native = self.zero, self.comm.reduce == "native"
        rule = "does not go with zero.zero_quantized_gradients: backends cannot add quantised numbers; leave it out"
        self.comm.need(not (zero.zero_quantized_gradients and native), "reduce", rule)
        few_bits = zero.quantization.weight_bits == 4 and self.precision.dtype == "fp32"
        rule = "means little with precision.dtype=fp32, chosen for digits that 15 levels cannot carry; use 8, or bf16"
        weights = zero.zero_quantized_weights or zero.zero_quantized_nontrainable_weights
        zero.quantization.need(not (weights and few_bits), "weight_bits", rule)

    def get(self, key: str, default: Any = None) -> Any:
        """A setting by its key in the JSON, a block as a mapping: Hugging Face's Trainer asks ``engine.config`` so.

        What is not set, or not kept, is the default.
        """
        if key in ("bf16", "fp16"):
            scale = asdict(self.precision)
            skips = {"check_grad_overflow": scale.pop("check_grad_overflow")}
            return {"enabled": scale.pop("dtype") == key, **(skips if key == "bf16" else scale)}
        value = vars(self).get("zero" if key == "zero_optimization" else key)
        if isinstance(value, OptimizerConfig):
            return {"type": value.target, "params": dict(value.params)}
        if is_dataclass(value) and not isinstance(value, type):
            return asdict(value)
        return default if value is None else value


@dataclass(frozen=True)
class BatchSizes:
    """DeepSpeed's triad, resolved for a number of ranks: ``global_batch = micro_batch * accumulation * world_size``."""

    global_batch: int
    micro_batch: int
    accumulation: int
    world_size: int


def resolve_batch(config: EngineConfig, world_size: int) -> BatchSizes:
    """Any two of the triad give the third on ``world_size`` ranks; one alone leaves accumulation at 1.

    Raises:
        ConfigError: a size that does not divide, three that disagree, or none given.

    Example:
        >>> resolve_batch(EngineConfig(train_batch_size=8, train_micro_batch_size_per_gpu=2), world_size=2).accumulation
        2
    """
    total, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    steps = config.gradient_accumulation_steps
    if total is None and micro is None:
        raise ConfigError("set train_batch_size or train_micro_batch_size_per_gpu; neither is given")
    if micro is not None and (total is None or steps is not None):
        steps = steps or 1
        implied = micro * steps * world_size
        what = f"train_micro_batch_size_per_gpu {micro} x gradient_accumulation_steps {steps} x {world_size} ranks"
        rule = f"must equal {what} = {implied}; leave one of the three out"
        require(total in (None, implied), "train_batch_size", total, rule)
        return BatchSizes(implied, micro, steps, world_size)
    name, part = ("train_micro_batch_size_per_gpu", micro) if micro else ("gradient_accumulation_steps", steps or 1)
    total, unit = total or 0, part * world_size
    other, rest = divmod(total, unit)
    near = f"{total - rest} or {total - rest + unit}" if other else str(unit)
    require(not rest, "train_batch_size", total, f"does not divide by {name} {part} x {world_size} ranks; {near} would")
    return BatchSizes(total, *((part, other) if micro else (other, part)), world_size)
