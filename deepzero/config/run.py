"""What one training run of ``train.py`` needs beyond the engine: model, data, length, launch, what is watched.

The Hydra groups under ``configs/`` have exactly these names. :meth:`RunConfig.from_mapping` is the only door: Hydra's
composed mapping comes in, a frozen dataclass goes out, and nothing behind it knows Hydra.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, Literal

from deepzero.config.engine import EngineConfig, OptimizerConfig, PrecisionConfig, SchedulerConfig
from deepzero.config.strict import AtLeast, ConfigError, Count, NotNegative, Section, build, require, unknown_key


@dataclass(frozen=True)
class ModelConfig(Section):
    """``model.*``: a decoder-only transformer, from nano to a 7B in the Llama style. See ``models/gpt.py``."""

    where = "model"

    name: str = "nano"
    """Shown in logs and tables; with ``library: hf`` the model type, for example ``gpt2`` or ``llama``."""
    library: Literal["own", "hf"] = "own"
    """``own``: ``models/gpt.py``. ``hf``: Hugging Face's causal language model of that type, with random weights."""
    vocab_size: Count = 256
    """Tokens; 256 for bytes."""
    block_size: Count = 128
    """Tokens per sequence."""
    n_layer: Count = 4
    """Transformer blocks."""
    n_head: Count = 4
    """Attention heads; must divide ``n_embd``."""
    n_kv_head: Count | None = None
    """Key/value heads (grouped-query attention); None: as many as ``n_head``."""
    n_embd: Count = 128
    """Width of the residual stream."""
    ffn_hidden: Count | None = None
    """Width of the feed-forward layer; None: 4 times ``n_embd``, or 8/3 of it rounded up to 64 for swiglu."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Before attention and feed-forward layer, and at the end."""
    position: Literal["learned", "rope"] = "learned"
    """Learned embeddings, or rotated queries and keys."""
    activation: Literal["gelu", "swiglu"] = "gelu"
    """Of the feed-forward layer."""
    bias: bool = True
    """Biases in linear layers and layer norms."""
    tied: bool = True
    """The output head shares the token embedding's weight."""
    dropout: float = 0.0
    """Probability; 0 switches it off."""
    activation_checkpointing: bool = False
    """Keep only each block's input and compute the block again in the backward pass."""
    adam_lr: float = 2e-3
    """Adam's learning rate for this shape; ``configs/optimizer/`` starts from it, and ``optimizer.lr`` sets another."""

    def _check(self) -> None:
        self.need(self.adam_lr > 0, "adam_lr", "must be positive")
        self.need(self.n_embd % self.n_head == 0, "n_head", f"must divide model.n_embd={self.n_embd}")
        ok = self.n_kv_head is None or (self.n_kv_head >= 1 and self.n_head % self.n_kv_head == 0)
        self.need(ok, "n_kv_head", f"must divide model.n_head={self.n_head}")
        head = self.n_embd // self.n_head
        ok = self.position != "rope" or head % 2 == 0
        self.need(ok, "n_head", f"rope needs an even head width, here {head}")
        rule = "a model of library=hf has its own; leave this out"
        self.idle_unless(self.library == "own", rule, "norm", "position", "activation", "bias")
        self.need(0.0 <= self.dropout < 1.0, "dropout", "must be in [0, 1)")


_DATA_READERS = {
    "path": ("text", "tokens"),
    "glob": ("text",),
    "max_bytes": ("stdlib", "text"),
    "val_fraction": ("stdlib", "text"),
}
"""Keys of ``data.*`` that not every source reads, and which do."""


@dataclass(frozen=True)
class DataConfig(Section):
    """``data.*``: where tokens come from. See ``data/``."""

    where = "data"

    name: Literal["stdlib", "text", "tokens"] = "stdlib"
    """stdlib: the source text of this Python's standard library; text: your text; tokens: nanoGPT's ``.bin`` files."""
    path: str | None = None
    """text: a file or a folder; tokens: a folder with train.bin and val.bin."""
    val_fraction: float = 0.1
    """Part of the corpus kept for validation: by file, or the tail of a single file."""
    glob: str | None = None
    """text: which files of a folder, for example ``*.md``; None: every file that is UTF-8 text."""
    max_bytes: Count | None = None
    """Use at most this many bytes of text; None: all."""

    def _check(self) -> None:
        for key, readers in _DATA_READERS.items():
            rule = f"data={self.name} does not read it; leave it out or choose data={' or data='.join(readers)} as well"
            self.idle_unless(self.name in readers, rule, key)
        self.need(0.0 < self.val_fraction < 1.0, "val_fraction", "must be between 0 and 1")
        if self.name != "stdlib" and not self.path:
            what = "FILE_OR_FOLDER" if self.name == "text" else "FOLDER (with train.bin and val.bin)"
            raise ConfigError(f"data={self.name} needs data.path={what}")


@dataclass(frozen=True)
class TrainConfig(Section):
    """``train.*``: how long and how often."""

    where = "train"

    steps: Count = 400
    """Optimizer steps."""
    seed: int = 1234
    """Of the model's initial values and of the order of the data."""
    eval_every: NotNegative = 100
    """Validate before the first step, after every so many steps and after the last; 0: never."""
    eval_batches: Count = 8
    """Global batches per validation."""
    fallback_batch_size: Count = 24
    """``train_batch_size`` of a run that gives neither it nor the micro-batch. Divides by 1, 2, 3, 4, 6, 8 ranks."""
    compile: bool = False
    """Compile the model's blocks by torch.compile: first step longer, others shorter. A CPU takes a C++ compiler."""
    log_every: Count = 1
    """Steps between two lines on a plain terminal; ``metrics.jsonl`` gets every step."""
    timeline_step: NotNegative = 3
    """Record the memory of this step of every start, event by event, into ``timeline.json``: counted from 1; a shorter
    run's last; 0: never. The step takes a little longer."""
    sample_tokens: NotNegative = 300
    """Tokens of text sampled at the end; 0: none."""
    sample_temperature: float = 0.8
    """Below 1 the sample is more careful, above 1 wilder."""
    save_every: NotNegative = 100
    """Save a checkpoint after every so many steps, after the last, on SIGTERM and on Ctrl-C; 0: never."""
    save_async: bool = True
    """Write checkpoints in the background; the step waits only until a copy was taken in memory."""
    keep_last: Annotated[int, AtLeast(1, ", or null to keep all")] | None = 2
    """How many checkpoints stay; None: all."""
    resume: str | None = "auto"
    """auto: go on from the newest checkpoint in the run folder, if there is one; a path: of a run folder, a folder of
    checkpoints or one checkpoint; None: begin at the beginning."""
    init_from: str | None = None
    """Begin with the weights of a checkpoint, a safetensors file or a folder of them; None: with random ones."""

    def _check(self) -> None:
        ok = self.init_from is None or self.resume in (None, "auto")
        self.need(ok, "init_from", f"train.resume={self.resume} loads the weights; leave one out")
        self.need(self.resume != "", "resume", "name a run folder or a checkpoint, or write auto or null")
        self.need(self.sample_temperature > 0, "sample_temperature", "must be positive")


@dataclass(frozen=True)
class LaunchConfig(Section):
    """``launch.*``: ranks that ``python train.py`` starts. torchrun has its own ``nproc`` and ``max_restarts``."""

    where = "launch"

    nproc: Annotated[int, AtLeast(1, " rank")] | None = None
    """Ranks on this machine; None: one per GPU, or 2 on a machine without GPU."""
    threads_per_rank: Count | None = None
    """Intra-op threads of each rank; None: cores divided by ranks, at least 1; 1 with comm.world_size_invariant."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where there is a GPU for each rank, or under torchrun one that each may be shown alone, else CPU."""
    max_restarts: NotNegative = 0
    """How often the ranks are started again after one has failed or was killed; they go on from the last checkpoint."""


@dataclass(frozen=True)
class LoggerConfig(Section):
    """``logger.*``: where metrics go besides ``metrics.jsonl``, which is always written."""

    where = "logger"

    names: tuple[Literal["wandb", "tensorboard"], ...] = ()
    """Any of wandb and tensorboard."""
    project: str = "deepzero"
    """W&B project."""
    wandb_mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto: online when logged in, else offline."""
    run_name: str | None = None
    """W&B's name for the run; None: what was typed on the command line, or the run folder's name."""
    group: str | None = None
    """W&B group; None: the folder of the sweep that the run belongs to, if it does."""
    tags: tuple[str, ...] = ()
    """W&B tags."""
    gradient_norms_every: Annotated[int, AtLeast(0, "; 0: never")] = 0
    """Steps between two measurements of every layer's gradient norm, also for ``metrics.jsonl``; 0: never."""

    def _check(self) -> None:
        for name in ("run_name", "group"):
            value = getattr(self, name)
            self.need(value is None or 0 < len(value) <= 128, name, "must have 1 to 128 characters")
        for tag in self.tags:
            require(0 < len(tag) <= 64, "logger.tags", tag, "a tag must have 1 to 64 characters")
        # W&B's own rule; else it would be an error of W&B's in the middle of the start.
        ok = 0 < len(self.project) <= 128 and not set(self.project) & set("/\\#?%:")
        self.need(ok, "project", "must have 1 to 128 characters, none of / \\ # ? % :")


@dataclass(frozen=True)
class ProfilerConfig(Section):
    """``profiler.*``: torch.profiler traces into the run folder."""

    where = "profiler"

    enabled: bool = False
    """Whether it runs; the other keys wait for that."""
    wait: NotNegative = 2
    """Steps before the profiler warms up."""
    warmup: NotNegative = 1
    """Steps in which it runs and records nothing."""
    active: Count = 3
    """Steps that are recorded."""
    repeat: Count = 1
    """How often wait, warmup and active come, one after the other; a trace each time."""
    ranks: tuple[int, ...] = (0,)
    """Which ranks record."""
    memory: bool = True
    """Allocations, the ledger's categories over time, and with a GPU the allocator's history in a file of its own."""
    with_stack: bool = False
    """The line of Python that called each operator: large traces, and slower steps."""


@dataclass(frozen=True)
class DebugConfig(Section):
    """``debug.*``: switches for finding faults. ``debug=chaos`` sets ``comm.chaos``."""

    where = "debug"

    detect_anomaly: bool = False
    """torch.autograd's anomaly mode: slow, names the forward operation of a NaN."""
    inject_overflow_at: Annotated[int, AtLeast(1, ": steps are counted from 1")] | None = None
    """In any precision: multiply the loss by infinity at this step on rank 0, to see how the engine reacts."""


@dataclass(frozen=True)
class RunConfig:
    """One run of ``train.py``. Its sections are described by their classes."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    plan: bool = False
    """Print what the run would hold, send and fetch, in order, and run nothing."""

    def __post_init__(self) -> None:
        precision = self.engine.precision
        # On the command line a loss scale without fp16 is a mistake. (In DeepSpeed's JSON a block may be switched off.)
        rule = f"is about fp16's loss scale, and precision.dtype={precision.dtype} has none; leave it out, or choose"
        of_scale = {f.name for f in fields(PrecisionConfig)} - {"dtype", "auto_cast", "check_grad_overflow"}
        precision.idle_unless(precision.dtype == "fp16", f"{rule} precision=fp16", *sorted(of_scale))
        rule = f"is about a dynamic scale, and precision.loss_scale={precision.loss_scale:g} is fixed; leave one out"
        precision.idle_unless(precision.loss_scale == 0, rule, *sorted(of_scale - {"loss_scale"}))
        step, steps = self.debug.inject_overflow_at, self.train.steps
        rule = f"the run ends at train.steps={steps}; choose an earlier step"
        self.debug.need(step is None or step <= steps, "inject_overflow_at", rule)

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Every key with its default, nested as :meth:`from_mapping` reads them; no optimizer and no schedule."""
        rest = asdict(cls())
        engine = rest.pop("engine")
        del engine["optimizer"], engine["scheduler"]
        return {**engine, **rest}

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> RunConfig:
        """Read what Hydra composed. The engine's keys stand at the top level, as in a DeepSpeed config.

        Raises:
            ConfigError: anything that cannot be used, before a rank has started.
        """
        engine_keys = {f.name for f in fields(EngineConfig)}
        own_keys = {f.name for f in fields(cls)} - {"engine"}
        of_others = {"experiment", "offload", "zeropp"}  # groups that set keys of others
        for key in mapping:
            rule = f"must be the name of a file, {key}=NAME; the file has to begin with the line # @package _global_"
            require(key not in of_others, key, mapping[key], rule)
            if key not in engine_keys | own_keys:
                raise unknown_key(key, engine_keys | own_keys | of_others, "")
        engine = {key: value for key, value in mapping.items() if key in engine_keys}
        for key, kind in (("optimizer", OptimizerConfig), ("scheduler", SchedulerConfig)):
            if key in engine:
                engine[key] = _with_params(kind, engine[key], key)
        rest = {key: value for key, value in mapping.items() if key in own_keys}
        run = build(cls, {"engine": build(EngineConfig, engine), **rest})
        # Here, as a JSON may say these for a program, and the loggers' names are filled in later.
        run.engine.idle_unless(False, "is for engine.deepspeed_io; train.py has whole batches", "dataloader_drop_last")
        run.engine.idle_unless(False, "is for engine.load_checkpoint; train.py loads train.resume", "load_universal")
        of_wandb = ("project", "wandb_mode", "run_name", "group", "tags")
        run.logger.idle_unless("wandb" in run.logger.names, "needs logger=wandb, or logger=all", *of_wandb)
        return run


def _with_params(cls: type, value: Any, where: str) -> Any:
    """``{_target_ or type: X, lr: …}`` and DeepSpeed's ``{type: X, params: {lr: …}}`` alike."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}={value!r} must be a mapping with a type")
    settings = dict(value)
    name = settings.pop("_target_", None) or settings.pop("type", None)
    if not isinstance(name, str):
        example = "AdamW" if cls is OptimizerConfig else "constant"
        raise ConfigError(f"{where} needs a type, for example {where}.type={example}")
    if (params := settings.pop("params", None)) is not None and settings:
        raise ConfigError(f"{where} has both params and {sorted(settings)}; put all of them in one place")
    return cls(name, dict(params if params is not None else settings))
