"""What the engine needs to know, as frozen dataclasses: DeepSpeed's JSON keys, their names, meanings and defaults.

This file is the *one* source of defaults. The Hydra files in ``configs/`` repeat them so that every key can be typed on
the command line, and a test compares the two. :mod:`deepzero.config.deepspeed_json` reads DeepSpeed's JSON shape
(``zero_optimization``, ``bf16``, ``fp16`` …) into the classes here.

Sources: DeepSpeed's ``runtime/config.py``, ``runtime/zero/config.py``, ``runtime/constants.py`` for names and meanings.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from deepzero.config.parse import ConfigError

DTYPES = ("bf16", "fp16", "fp32")


def require(ok: bool, path: str, value: object, rule: str) -> None:
    """Raise a :class:`ConfigError` that names key, value and rule unless ``ok``."""
    if not ok:
        raise ConfigError(f"{path}={value!r}: {rule}")


@dataclass(frozen=True)
class OffloadOptimizerConfig:
    """``zero_optimization.offload_optimizer``: masters, moments and reduced gradients in host memory."""

    device: Literal["none", "cpu"] = "none"
    """cpu: the CPU keeps the optimizer's states and steps on them. Stages 1, 2 and 3."""

    pin_memory: bool = True
    """Lock the pages, without which no copy runs in the background. DeepSpeed's default is false, as its allocator
    rounds up to powers of two; the arena is exact."""

    ratio: float = 1.0
    """Part of the states that goes to the host, in whole intervals; the device steps on the rest."""

    delayed_update: bool = False
    """One-step delayed parameter update: the CPU steps during the next step's forward and backward pass, which still
    use the parameters from before. Needs CPUAdam."""

    delay_after_steps: int = 40
    """The first so many steps are not delayed: early in training parameters change fast."""

    threads: int | None = None
    """Of the CPU's step, for each rank; None: the host's cores divided by its ranks."""

    def __post_init__(self) -> None:
        where = "zero.offload_optimizer"
        require(0.0 <= self.ratio <= 1.0, f"{where}.ratio", self.ratio, "must be between 0 and 1")
        require(self.delay_after_steps >= 0, f"{where}.delay_after_steps", self.delay_after_steps, "is negative")
        require(self.threads is None or self.threads >= 1, f"{where}.threads", self.threads, "must be at least 1")
        # What would say nothing is refused; pin_memory alone is harmless.
        silent = {"ratio": 1.0, "threads": None, "delayed_update": False} if self.device == "none" else {}
        if not self.delayed_update:
            silent["delay_after_steps"] = 40
        for name, default in silent.items():
            value = getattr(self, name)
            needs = "delayed_update=true" if name == "delay_after_steps" else "device=cpu"
            require(value == default, f"{where}.{name}", value, f"needs {where}.{needs}")


@dataclass(frozen=True)
class OffloadParamConfig:
    """``zero_optimization.offload_param``: stage 3's partitioned parameters in host memory."""

    device: Literal["none", "cpu"] = "none"
    """cpu: a rank's part of the parameters waits in host memory, and is fetched along the trace. Stage 3 alone."""

    pin_memory: bool = True
    """As for ``offload_optimizer``; one arena holds both, and is locked when either asks for it."""

    max_in_cpu: int | None = None
    """At most so many elements of a rank's parts are kept there; the rest stays on the device. None: all are. (In
    DeepSpeed the key concerns NVMe alone, and its default is 1e9.)"""

    def __post_init__(self) -> None:
        require(
            self.max_in_cpu is None or self.max_in_cpu >= 0,
            "zero.offload_param.max_in_cpu",
            self.max_in_cpu,
            "must not be negative",
        )
        require(
            self.max_in_cpu is None or self.device == "cpu",
            "zero.offload_param.max_in_cpu",
            self.max_in_cpu,
            "needs zero.offload_param.device=cpu",
        )


@dataclass(frozen=True)
class ZeroConfig:
    """``zero_optimization`` of a DeepSpeed config, ``zero.*`` on the command line."""

    stage: int = 0
    """Which model states are partitioned: 0 none, 1 optimizer states, 2 and gradients, 3 and parameters."""

    reduce_bucket_size: int = 500_000_000
    """At most this many elements are reduced at a time. For small models see ``layout.interval_limit``."""

    allgather_bucket_size: int = 500_000_000
    """At most this many elements are gathered at a time; with ``reduce_bucket_size`` it limits an interval."""

    overlap_comm: bool = False
    """Let reductions run while the backward pass goes on, with two buckets in flight."""

    reduce_scatter: bool = True
    """Stage 1 only: false reduces with an all-reduce, as DeepSpeed's first release did, at 1.5 times the volume."""

    stage3_prefetch_bucket_size: int = 50_000_000
    """Stage 3: fetch ahead until so many elements are gathered and not yet used; 0: never. A small model is cut into
    small intervals, and then one interval ahead is the most; see ``build.fetch_limits``."""

    stage3_max_live_parameters: int = 1_000_000_000
    """Stage 3: at most this many elements are gathered at any time. A module that needs more at once gets it, with a
    warning."""

    stage3_max_reuse_distance: int = 1_000_000_000
    """Stage 3: keep what is used again within so many elements of other parameters. For small models as
    ``stage3_prefetch_bucket_size``: one interval is the most."""

    stage3_param_persistence_threshold: int = 100_000
    """Stage 3: parameters of at most this many elements stay whole on every rank."""

    sub_group_size: int = 1_000_000_000
    """Stage 3: the optimizer steps on at most this many elements of a rank's share at a time. What the CPU steps on is
    cut into the layout's intervals instead."""

    offload_optimizer: OffloadOptimizerConfig = field(default_factory=OffloadOptimizerConfig)
    """Optimizer states in host memory."""

    offload_param: OffloadParamConfig = field(default_factory=OffloadParamConfig)
    """Parameters in host memory."""

    def __post_init__(self) -> None:
        require(self.stage in (0, 1, 2, 3), "zero.stage", self.stage, "stages are 0, 1, 2 and 3")
        for name in ("prefetch_bucket_size", "max_reuse_distance", "param_persistence_threshold"):
            value = getattr(self, f"stage3_{name}")
            require(value >= 0, f"zero.stage3_{name}", value, "must not be negative")
        for name in ("reduce_bucket_size", "allgather_bucket_size", "stage3_max_live_parameters", "sub_group_size"):
            require(getattr(self, name) >= 1, f"zero.{name}", getattr(self, name), "must be at least 1 element")
        require(
            self.reduce_scatter or self.stage == 1,
            "zero.reduce_scatter",
            self.reduce_scatter,
            f"the all-reduce variant exists for stage 1 alone, and zero.stage={self.stage}",
        )
        self._check_offload()

    def _check_offload(self) -> None:
        optimizer, param = self.offload_optimizer, self.offload_param
        where = "zero.offload_optimizer.device"
        require(
            optimizer.device == "none" or self.stage >= 1,
            where,
            optimizer.device,
            f"offloading is for partitioned states (stages 1, 2, 3), and zero.stage={self.stage}",
        )
        require(
            optimizer.device == "none" or self.reduce_scatter,
            where,
            optimizer.device,
            "does not go with zero.reduce_scatter=False, which keeps whole gradients on the device",
        )
        where = "zero.offload_param.device"
        require(
            param.device == "none" or self.stage == 3,
            where,
            param.device,
            f"parameters are partitioned in stage 3 alone, and zero.stage={self.stage}",
        )
        require(
            param.device == "none" or optimizer.device == "cpu",
            where,
            param.device,
            "needs zero.offload_optimizer.device=cpu: masters on the device would take twice what this saves",
        )
        require(
            param.device == "none" or not optimizer.delayed_update,
            where,
            param.device,
            "does not go with zero.offload_optimizer.delayed_update: the step writes where the forward pass fetches",
        )


@dataclass(frozen=True)
class PrecisionConfig:
    """``bf16`` and ``fp16`` of a DeepSpeed config, ``precision.*`` on the command line."""

    dtype: Literal["bf16", "fp16", "fp32"] = "fp32"
    """Compute dtype of the model's parameters. With bf16 and fp16 the optimizer works on fp32 masters."""

    loss_scale: float = 0.0
    """fp16: a fixed loss scale; 0 means dynamic."""

    initial_scale_power: int = 16
    """fp16, dynamic: the first scale is 2 to this power."""

    loss_scale_window: int = 1000
    """fp16, dynamic: steps without overflow before the scale doubles."""

    hysteresis: int = 2
    """fp16, dynamic: overflows that are tolerated before the scale halves."""

    consecutive_hysteresis: bool = False
    """fp16, dynamic: refill the hysteresis after every step without overflow."""

    min_loss_scale: float = 1.0
    """fp16, dynamic: the scale never falls below this."""

    auto_cast: bool = False
    """Cast floating-point inputs of ``engine(...)`` to the compute dtype."""

    def __post_init__(self) -> None:
        require(self.loss_scale >= 0, "precision.loss_scale", self.loss_scale, "must be 0 (dynamic) or positive")
        for name in ("initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"):
            value = getattr(self, name)
            require(value >= (0 if name == "initial_scale_power" else 1), f"precision.{name}", value, "is too small")


@dataclass(frozen=True)
class ChaosConfig:
    """Seeded disorder, to show that results do not depend on timing. See ``comm/chaos.py``."""

    enabled: bool = False
    """Sleep at random before launches and waits, and fill released buffers with NaN."""

    seed: int = 0
    """Every rank draws its own delays from this seed."""

    max_delay_ms: float = 2.0
    """The longest single delay, in milliseconds."""

    def __post_init__(self) -> None:
        require(self.max_delay_ms >= 0, "comm.chaos.max_delay_ms", self.max_delay_ms, "must not be negative")


@dataclass(frozen=True)
class CommConfig:
    """deepzero's own extension of the DeepSpeed config: how ranks talk."""

    reduce: Literal["exact", "native"] | None = None
    """exact: all-to-all, then an fp32 sum in rank order (same bits for any bucketing). native: the backend's own
    reduce-scatter. None: exact on gloo, native on NCCL."""

    timeout_seconds: float = 600.0
    """A collective that takes longer raises."""

    chaos: ChaosConfig = field(default_factory=ChaosConfig)
    """Disorder for tests; off."""

    def __post_init__(self) -> None:
        require(self.timeout_seconds > 0, "comm.timeout_seconds", self.timeout_seconds, "must be positive")


@dataclass(frozen=True)
class ActivationCheckpointingConfig:
    """``activation_checkpointing`` of a DeepSpeed config: what is kept for the backward pass, and where.

    Which blocks are run again is the model's choice (``torch.utils.checkpoint``, ``model.activation_checkpointing``).
    """

    cpu_checkpointing: bool = False
    """What autograd keeps for the backward pass waits in host memory: with checkpointing the inputs of blocks, without
    it all activations. Every stage."""

    cpu_checkpointing_min_bytes: int = 1 << 20
    """Smaller ones stay on the device: a copy costs ten microseconds, whatever its size, in which a GPU moves a quarter
    of a megabyte."""

    def __post_init__(self) -> None:
        require(
            self.cpu_checkpointing_min_bytes >= 0,
            "activation_checkpointing.cpu_checkpointing_min_bytes",
            self.cpu_checkpointing_min_bytes,
            "must not be negative",
        )


@dataclass(frozen=True)
class OptimizerConfig:
    """Which torch optimizer, with which arguments."""

    target: str = "AdamW"
    """``Adam``, ``AdamW``, ``SGD``, or the dotted path of any elementwise ``torch.optim.Optimizer`` class."""

    params: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of that class."""


@dataclass(frozen=True)
class SchedulerConfig:
    """Which learning-rate schedule, with which arguments. See ``runtime/lr_schedules.py``."""

    type: str = "constant"
    """constant, warmup_cosine, warmup_stable_decay, WarmupLR, WarmupDecayLR, WarmupCosineLR or OneCycle."""

    params: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of that schedule."""


@dataclass(frozen=True)
class EngineConfig:
    """Everything ``deepzero.initialize`` reads. Batch sizes are in sequences (samples)."""

    train_batch_size: int | None = None
    """Sequences per optimizer step over all ranks = micro-batch × accumulation × ranks. Any two give the third."""

    train_micro_batch_size_per_gpu: int | None = None
    """Sequences in one forward pass of one rank."""

    gradient_accumulation_steps: int | None = None
    """Micro-batches per optimizer step."""

    gradient_clipping: float = 1.0
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

    steps_per_print: int | None = None
    """Print loss scale, learning rate and skipped steps on rank 0 every so many optimizer steps; None: never."""

    def __post_init__(self) -> None:
        for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, value, "must be at least 1")
        require(self.gradient_clipping >= 0, "gradient_clipping", self.gradient_clipping, "must not be negative")
        require(
            self.steps_per_print is None or self.steps_per_print >= 1,
            "steps_per_print",
            self.steps_per_print,
            "must be at least 1",
        )


@dataclass(frozen=True)
class BatchSizes:
    """DeepSpeed's triad, resolved for a number of ranks: ``global_batch = micro_batch * accumulation * world_size``."""

    global_batch: int
    micro_batch: int
    accumulation: int
    world_size: int


def resolve_batch(config: EngineConfig, world_size: int) -> BatchSizes:
    """Any two of the triad give the third; one alone leaves accumulation at 1; all three must agree.

    Args:
        config: holds ``train_batch_size``, ``train_micro_batch_size_per_gpu``, ``gradient_accumulation_steps``.
        world_size: ranks.

    Returns:
        The three sizes, in sequences, micro-batches and ranks.

    Raises:
        ConfigError: a size that does not divide, three that disagree, or none given.

    Example:
        >>> resolve_batch(EngineConfig(train_batch_size=8, train_micro_batch_size_per_gpu=2), world_size=2).accumulation
        2
    """
    total, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    steps, ranks = config.gradient_accumulation_steps, world_size
    if total is None and micro is None:
        raise ConfigError("set train_batch_size or train_micro_batch_size_per_gpu; neither is given")
    if micro is not None and steps is not None:
        implied = micro * steps * ranks
        require(
            total is None or total == implied,
            "train_batch_size",
            total,
            f"must equal train_micro_batch_size_per_gpu {micro} x gradient_accumulation_steps {steps} x {ranks} ranks "
            f"= {implied}; leave one of the three out",
        )
        return BatchSizes(implied, micro, steps, ranks)
    if total is None and micro is not None:
        return BatchSizes(micro * ranks, micro, 1, ranks)
    if total is not None and micro is not None:
        _divides(total, micro * ranks, f"train_micro_batch_size_per_gpu {micro} x {ranks} ranks")
        return BatchSizes(total, micro, total // (micro * ranks), ranks)
    total, steps = total or 0, steps or 1
    _divides(total, steps * ranks, f"gradient_accumulation_steps {steps} x {ranks} ranks")
    return BatchSizes(total, total // (steps * ranks), steps, ranks)


def _divides(total: int, part: int, what: str) -> None:
    below = total // part * part
    near = f"{below} or {below + part}" if below else str(part)
    require(total % part == 0, "train_batch_size", total, f"does not divide by {what}; {near} would")
