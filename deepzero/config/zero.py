"""``zero_optimization`` of a DeepSpeed config as frozen dataclasses: what is partitioned, offloaded and quantised.

Source: [DeepSpeed], ``runtime/zero/config.py`` and ``runtime/zero/offload_config.py``, for names and meanings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from deepzero.config.strict import AtLeast, Count, NotNegative, Section
from deepzero.layout import ALIGN

Numel = Annotated[int, AtLeast(1, " element")]
MOST = 1 << 20
"""Elements that share a scale."""


@dataclass(frozen=True)
class OffloadOptimizerConfig(Section):
    """``zero_optimization.offload_optimizer``: masters, moments and reduced gradients in host memory, or in files."""

    where = "zero.offload_optimizer"

    device: Literal["none", "cpu", "nvme"] = "none"
    """cpu: the CPU keeps the optimizer's states and steps on them. nvme: they lie in a file of each rank's, and come
    into host memory bucket by bucket. Stages 1, 2 and 3."""
    nvme_path: str | None = None
    """The folder of the files, on a disk of each host. Nothing stays there."""
    buffer_count: int = 4
    """nvme: buffers in host memory, each for one state of a bucket. Four, master, two moments and gradient, are one
    bucket in memory at a time; eight are two, twelve three."""
    pipeline_read: bool = False
    """nvme: read the next bucket while the CPU steps on one. Needs 8 buffers."""
    pipeline_write: bool = False
    """nvme: write a bucket while the CPU steps on the next one. Needs 8 buffers; with ``pipeline_read`` 12."""
    pin_memory: bool = True
    """Lock the pages, without which no copy runs in the background. DeepSpeed's default is false, as its allocator
    rounds up to powers of two; the arena is exact."""
    ratio: float = 1.0
    """Part of the states that goes to the host, in whole buckets; the device steps on the rest."""
    delayed_update: bool = False
    """One-step delayed parameter update: the CPU steps during the next step's forward and backward pass, which still
    use the parameters from before. Needs CPUAdam."""
    delay_after_steps: NotNegative = 40
    """The first so many steps are not delayed: early in training parameters change fast."""
    threads: Count | None = None
    """Of the CPU's step, for each rank; None: the host's cores divided by its ranks."""

    def _check(self) -> None:
        self.need(0.0 <= self.ratio <= 1.0, "ratio", "must be between 0 and 1")
        # pin_memory alone is harmless.
        self.idle_unless(self.device != "none", f"needs {self.where}.device=cpu or nvme", "ratio", "threads")
        of_files = ("nvme_path", "buffer_count", "pipeline_read", "pipeline_write")
        self.idle_unless(self.device == "nvme", f"needs {self.where}.device=nvme", *of_files)
        self.idle_unless(self.device == "cpu", f"needs {self.where}.device=cpu", "delayed_update")
        self.idle_unless(self.delayed_update, f"needs {self.where}.delayed_update=true", "delay_after_steps")
        self.need(self.device != "nvme" or bool(self.nvme_path), "nvme_path", "device=nvme needs the files' folder")
        least = 4 * (1 + self.pipeline_read + self.pipeline_write)
        rule = f"must be at least {least}: 4 for each bucket that is in memory at a time"
        self.need(self.buffer_count >= least, "buffer_count", rule)


@dataclass(frozen=True)
class OffloadParamConfig(Section):
    """``zero_optimization.offload_param``: stage 3's partitioned parameters in host memory, or in files."""

    where = "zero.offload_param"

    device: Literal["none", "cpu", "nvme"] = "none"
    """cpu: a rank's part of the parameters waits in host memory, and is fetched along the trace. nvme: it waits in a
    file, and is read ahead of that. Stage 3 alone."""
    nvme_path: str | None = None
    """The folder of the files, on a disk of each host. Nothing stays there."""
    buffer_count: Count = 5
    """nvme: so many buckets' parts are in host memory at a time, read and not yet fetched."""
    buffer_size: Count = 100_000_000
    """nvme: at most so many elements of a bucket's part; one that is larger is refused."""
    pin_memory: bool = True
    """As for ``offload_optimizer``; one arena holds both, and is locked unless either says false."""
    max_in_cpu: NotNegative | None = None
    """At most so many elements of a rank's parts are kept there; the rest stays on the device. None: all are. (In
    DeepSpeed the key concerns NVMe alone, and its default is 1e9.)"""

    def _check(self) -> None:
        rule = f"needs {self.where}.device=cpu; beside nvme all parameters are in files, and buffer_count says how many"
        self.idle_unless(self.device == "cpu", f"{rule} are in memory", "max_in_cpu")
        of_files = ("nvme_path", "buffer_count", "buffer_size")
        self.idle_unless(self.device == "nvme", f"needs {self.where}.device=nvme", *of_files)
        self.need(self.device != "nvme" or bool(self.nvme_path), "nvme_path", "device=nvme needs the files' folder")


@dataclass(frozen=True)
class QuantizationConfig(Section):
    """``zero.quantization``, deepzero's own: how qwZ and qgZ quantise. See ``comm/quantization.py``."""

    where = "zero.quantization"

    weight_bits: int = 8
    """Of gathered parameters: 8, or 4 for bf16 and fp16 runs."""
    gradient_bits: int = 4
    """Of gradients: 4 or 8."""
    block_size: int = 2048
    """Elements that share a scale, a multiple of 64."""
    error_feedback: bool = False
    """qgZ: what a gradient lost on the wire is added to the next one. Costs memory, see docs/zeropp.md."""
    meter_every: NotNegative = 50
    """Measure the signal-to-noise ratio of every bucket in every so-manieth optimizer step; 0: never."""
    min_weight_snr_db: float | Literal["never"] | None = None
    """A bucket whose weights fall below this ratio goes unquantised from then on. None: 25 for 8 bits, 8 for 4."""
    min_gradient_snr_db: float | Literal["never"] | None = None
    """The same for its gradients. None: 20 for 8 bits, 3 for 4."""
    kernel: Literal["auto", "plain", "compiled"] = "auto"
    """compiled: by ``torch.compile``, on GPUs by Triton, up to a ``block_size`` of 16,384: wider is an error there.
    auto: compiled where there is a compiler, enough to do, and no such width."""

    def _check(self) -> None:
        for name in ("weight_bits", "gradient_bits"):
            self.need(getattr(self, name) in (4, 8), name, "must be 8 or 4")
        rule = f"must be at most {MOST} elements, as one scale for so many is no scale for most of them"
        self.need(self.block_size <= MOST, "block_size", rule)
        rule = f"must be a multiple of {ALIGN} elements, as every rank's part is one, and is cut into blocks"
        self.need(self.block_size >= ALIGN and self.block_size % ALIGN == 0, "block_size", rule)
        for name in ("min_weight_snr_db", "min_gradient_snr_db"):
            value = getattr(self, name)
            finite = value is None or value == "never" or math.isfinite(value)
            self.need(finite, name, "must be a number of dB, never, or null for the usual one")
            self.idle_unless(self.meter_every > 0, f"needs {self.where}.meter_every > 0", name)

    def bound_db(self, what: Literal["weight", "gradient"]) -> float | None:
        """The ratio below which a bucket of ``what`` goes unquantised; None: it never does.

        Where nothing is said, well below what numbers of a bell curve have in blocks of 2048: 42 dB in 8 bits, 17 in 4.
        """
        given = self.min_weight_snr_db if what == "weight" else self.min_gradient_snr_db
        if given == "never":
            return None
        bits = self.weight_bits if what == "weight" else self.gradient_bits
        usual = {("weight", 8): 25.0, ("weight", 4): 8.0, ("gradient", 8): 20.0, ("gradient", 4): 3.0}
        return usual[what, bits] if given is None else float(given)


@dataclass(frozen=True)
class ZeroConfig(Section):
    """``zero_optimization`` of a DeepSpeed config, ``zero.*`` on the command line."""

    where = "zero"

    stage: int = 0
    """Which model states are partitioned: 0 none, 1 optimizer states, 2 and gradients, 3 and parameters."""
    reduce_bucket_size: Numel = 500_000_000
    """At most this many elements are reduced at a time. For small models see ``layout.choose_bucket_limit``."""
    allgather_bucket_size: Numel = 500_000_000
    """At most this many elements are gathered at a time; with ``reduce_bucket_size`` it limits a bucket."""
    overlap_comm: bool = False
    """Let reductions run while the backward pass goes on, with two buckets in flight."""
    overlap_param_gather: bool = False
    """Let updated parameters travel while the optimizer steps on the next ones and the next forward pass begins: in
    stages 1 and 2 all, in stage 3 those that it needs first. deepzero's own; the name is Megatron's."""
    reduce_scatter: bool = True
    """Stage 1 only: false reduces with an all-reduce, as DeepSpeed's first release did, at 1.5 times the elements."""
    stage3_prefetch_bucket_size: NotNegative = 50_000_000
    """Stage 3: fetch ahead until so many elements are gathered and not yet used; 0: never. A small model is cut into
    small buckets, and then so many are limited to its largest size; see ``partition_plan.limit_lookahead``."""
    stage3_max_live_parameters: Numel = 1_000_000_000
    """Stage 3: at most this many elements are gathered at any time. A module that needs more at once gets it, with a
    warning."""
    stage3_max_reuse_distance: NotNegative = 1_000_000_000
    """Stage 3: keep what is used again within so many elements of other parameters. For small models as
    ``stage3_prefetch_bucket_size``."""
    stage3_param_persistence_threshold: NotNegative = 100_000
    """Stage 3: parameters of at most this many elements stay whole on every rank."""
    sub_group_size: Numel = 1_000_000_000
    """Stage 3: the optimizer steps on at most this many elements of a rank's share at a time. What the CPU steps on is
    cut into the layout's buckets instead."""
    zero_quantized_weights: bool = False
    """qwZ, stage 3: parameters are gathered in ``quantization.weight_bits`` bits."""
    zero_quantized_nontrainable_weights: bool = False
    """qwZ for frozen parameters alone."""
    zero_hpz_partition_size: Annotated[int, AtLeast(1, " rank; 1 switches hpZ off")] = 1
    """hpZ, stage 3: so many consecutive ranks, a node's, keep the parameters once more among them; all gathers but a
    step's first stay there. 1: off."""
    zero_quantized_gradients: bool = False
    """qgZ: gradients are reduced in ``quantization.gradient_bits`` bits, inside nodes first. Stages 1, 2 and 3."""
    mics_shard_size: int = -1
    """MiCS, hybrid sharding, stage 3: parameters are partitioned over so many consecutive ranks and replicated across
    such groups; they are gathered inside alone. Optimizer states stay partitioned over all ranks. -1: off."""
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)
    """How qwZ and qgZ quantise."""
    offload_optimizer: OffloadOptimizerConfig = field(default_factory=OffloadOptimizerConfig)
    """Optimizer states in host memory."""
    offload_param: OffloadParamConfig = field(default_factory=OffloadParamConfig)
    """Parameters in host memory."""

    def _check(self) -> None:
        stage, mics, hpz = self.stage, self.mics_shard_size, self.zero_hpz_partition_size
        optimizer, param, quantization = self.offload_optimizer, self.offload_param, self.quantization
        self.need(stage in (0, 1, 2, 3), "stage", "stages are 0, 1, 2 and 3")
        self.need(mics == -1 or mics >= 1, "mics_shard_size", "must be at least 1 rank, or -1 for off")
        here = f"and zero.stage={stage}; leave it out, or set zero.stage="
        one = "leave one of the two out"
        weights = self.zero_quantized_weights or self.zero_quantized_nontrainable_weights
        gradients = self.zero_quantized_gradients
        # What fields are for, and why they say nothing, or cannot be, where that is not the case.
        for section, names, fits, rule in (
            (self, "reduce_scatter", stage == 1, f"the all-reduce variant exists for stage 1 alone, {here}1"),
            (self, "overlap_param_gather", stage > 0, f"nothing is gathered, {here}1, 2 or 3"),
            (optimizer, "device", stage >= 1, f"offloading is for partitioned states, {here}1, 2 or 3"),
            (optimizer, "device", self.reduce_scatter,
             f"does not go with zero.reduce_scatter=False, which keeps whole gradients on the device; {one}"),
            (param, "device", stage == 3, f"parameters are partitioned in stage 3 alone, {here}3"),
            (param, "device", optimizer.device != "none",
             "needs zero.offload_optimizer.device=cpu or nvme: masters on the device would take twice what this saves"),
            (param, "device", not optimizer.delayed_update,
             f"does not go with zero.offload_optimizer.delayed_update, as its step writes where others fetch; {one}"),
            (self, "mics_shard_size", hpz == 1,
             f"does not go with zero.zero_hpz_partition_size={hpz}, as MiCS gathers inside groups anyway; {one}"),
            (self, "mics_shard_size", param.device == "none" and not optimizer.delayed_update,
             "does not go with zero.offload_param or zero.offload_optimizer.delayed_update: every step sends the new "
             f"parameters to the other groups from the device; {one}"),
            (self, "zero_quantized_weights zero_quantized_nontrainable_weights zero_hpz_partition_size mics_shard_size",
             stage == 3, f"gathered parameters are stage 3's, {here}3"),
            (self, "zero_quantized_gradients", stage >= 1, f"needs reduced gradients, {here}1, 2 or 3"),
            (self, "zero_quantized_gradients", self.reduce_scatter,
             f"does not go with zero.reduce_scatter=False, whose all-reduce the backend makes; {one}"),
            (quantization, "weight_bits min_weight_snr_db", weights, "needs zero.zero_quantized_weights=true"),
            (quantization, "gradient_bits error_feedback min_gradient_snr_db", gradients,
             "needs zero.zero_quantized_gradients=true"),
            (quantization, "block_size meter_every kernel", weights or gradients,
             "needs quantised weights or gradients"),
        ):  # fmt: skip
            section.idle_unless(fits, rule, *names.split())

    @property
    def secondary_size(self) -> int:
        """Over how many ranks parameters are partitioned once more, for hpZ or MiCS; 1: not."""
        return max(self.zero_hpz_partition_size, self.mics_shard_size)

    @property
    def shard_align(self) -> int:
        """Elements, of which a rank's part of a bucket is a multiple: in files whole blocks of a disk."""
        return 2048 if "nvme" in (self.offload_optimizer.device, self.offload_param.device) else ALIGN
