"""Who takes part in ``tools.bench.gpu offload``, with which settings, and which model the host's memory can hold.

Everything here is data and arithmetic: no tensor is made, so a test can check it without a GPU.

Host memory for one rank that offloads everything, in bytes for each parameter (``docs/offload.md``, "Memory")::

    compute 2 + master 4 + Adam's moments 8 + gradients (grad_accum_dtype=bf16) 2  =  16
    the parts that zero.Init made, until the engine has moved them in                  +  2, if they wait on the host

Beside these stand two landing places in fp32 as large as the largest bucket (here the embedding's or the head's
table, or a sixteenth of the model) and the process itself.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from deepzero.layout import bucket_limit
from tools.bench.engines import settings_of
from tools.bench.workload import TINY, Workload

GIB = 2**30
HOST_BYTES, INIT_BYTES = 16, 2
LANDINGS, LANDING_BYTES = 2, 4

DEFAULT_BUCKET = 500_000_000
"""``reduce_bucket_size`` and ``allgather_bucket_size``."""

CPU: dict[str, Any] = {"device": "cpu", "pin_memory": True}


@dataclass(frozen=True)
class Entry:
    """One contender of the speed part."""

    name: str
    title: str
    library: str
    """``deepzero`` or ``deepspeed``."""
    zero: dict[str, Any] = field(default_factory=dict)
    """``zero_optimization``, the same keys for both libraries."""
    peer: str | None = None
    """Over whom the table gives its ratio."""
    late: bool = False
    """Its course of training is another one by definition, so its losses are shown and not judged."""


_STEP, _BOTH = {"offload_optimizer": CPU}, {"offload_optimizer": CPU, "offload_param": CPU}
_HALF = {"offload_optimizer": {**CPU, "ratio": 0.5}}
_LATE = {"offload_optimizer": {**CPU, "delayed_update": True, "delay_after_steps": 0}}

ENTRIES = (
    Entry("plain", "deepzero 2, no offload", "deepzero", {"stage": 2}),
    Entry("s2", "deepzero 2", "deepzero", {"stage": 2, **_STEP}, "ds2"),
    Entry("ds2", "DeepSpeed 2", "deepspeed", {"stage": 2, **_STEP}),
    Entry("s3", "deepzero 3, parameters too", "deepzero", {"stage": 3, **_BOTH}, "ds3"),
    Entry("ds3", "DeepSpeed 3, parameters too", "deepspeed", {"stage": 3, **_BOTH}),
    Entry("s2-half", "deepzero 2, ratio 0.5", "deepzero", {"stage": 2, **_HALF}, "ds2"),
    Entry("s2-late", "deepzero 2, delayed", "deepzero", {"stage": 2, **_LATE}, "ds2", late=True),
)
"""In the order of the first round: whoever must not be missing comes first."""

LARGEST_ZERO: dict[str, Any] = {"stage": 3, **_BOTH}


@dataclass(frozen=True)
class Shape:
    """One rung of the ladder: a GPT with heads of 128."""

    n_layer: int
    n_embd: int

    def work(self, base: Workload) -> Workload:
        """``base`` with this shape, and with activation checkpointing."""
        heads = max(1, self.n_embd // 128)
        sizes = {"n_layer": self.n_layer, "n_embd": self.n_embd, "n_head": heads}
        return dataclasses.replace(base, checkpointing=True, **sizes)


LADDER = tuple(
    Shape(layers, width)
    for layers, width in (
        (24, 2048), (32, 2560), (36, 3072), (32, 3584), (32, 3840), (30, 4096), (32, 4096), (34, 4096), (36, 4096),
        (39, 4096), (48, 4096), (40, 5120), (44, 5120), (44, 6144), (80, 5120),
    )
)  # fmt: skip
"""1.4, 2.8, 4.4, 5.3, 6.1, 6.5, 6.9, 7.3, 7.7, 8.3, 10, 13, 14, 21 and 26 billion parameters."""

QUICK_LADDER = (Shape(1, 64), Shape(2, 64), Shape(2, 96))


def speed_work(device: str, threads: int, quick: bool) -> Workload:
    """The model of the speed part: 1.4 billion parameters, or a tiny one.

    The learning rate is low: a large model without warm-up would make two courses of bf16 noise.
    """
    if quick:
        return dataclasses.replace(TINY, ranks=1, device=device, threads=threads)
    return Workload(
        n_layer=24, n_embd=2048, n_head=16, vocab_size=50304, block_size=1024, micro_batch=4, ranks=1,
        threads=threads, device=device, lr=2e-5,
    )  # fmt: skip


def parameters(work: Workload) -> int:
    """Elements of the benchmark's GPT: two tables of the vocabulary, positions, blocks, norms and biases.

    Example:
        >>> parameters(Workload())
        97835520
    """
    width = work.n_embd
    block = 12 * width * width + 13 * width
    return 2 * work.vocab_size * width + work.block_size * width + work.n_layer * block + 2 * width


def host_bytes_needed(work: Workload, parts_on: str) -> int:
    """What training it with everything in host memory takes there at its peak, without the process itself.

    Args:
        work: the shape.
        parts_on: where ``zero.Init`` keeps the parts until the engine moves them in, ``cpu`` or ``device``.

    Example:
        >>> host_bytes_needed(Workload(n_layer=32, n_embd=4096, vocab_size=50304), "device") / GIB > 100
        True
    """
    count = parameters(work)
    limit = bucket_limit(count, DEFAULT_BUCKET, DEFAULT_BUCKET)
    largest = max(work.vocab_size * work.n_embd, min(count, limit))
    each = HOST_BYTES + (INIT_BYTES if parts_on == "cpu" else 0)
    return each * count + LANDINGS * LANDING_BYTES * largest


@dataclass(frozen=True)
class Rung:
    """A shape that should fit, and how."""

    work: Workload
    parts_on: str
    needed: int


def rungs(ladder: Sequence[Shape], base: Workload, host_bytes: int, device_bytes: int) -> list[Rung]:
    """The shapes that the closed forms say fit, the largest first.

    While the engine is built, the parts of ``zero.Init`` wait in host memory, where there is room for them, and else on
    the device, where at most a half of the memory is for them.

    Args:
        ladder: shapes.
        base: everything but the shape.
        host_bytes: that may be used.
        device_bytes: of the GPU; 0 without one.
    """
    found = []
    for shape in ladder:
        work = shape.work(base)
        on_host, on_device = host_bytes_needed(work, "cpu"), host_bytes_needed(work, "device")
        if on_host <= host_bytes:
            found.append(Rung(work, "cpu", on_host))
        elif on_device <= host_bytes and INIT_BYTES * parameters(work) <= device_bytes // 2:
            found.append(Rung(work, "device", on_device))
    return sorted(found, key=lambda rung: -parameters(rung.work))


def engine_config(work: Workload, zero: dict[str, Any], bf16_sums: bool = False) -> dict[str, Any]:
    """The settings of either library, with their defaults where nothing is said."""
    more: dict[str, Any] = {"data_types": {"grad_accum_dtype": "bf16"}} if bf16_sums else {}
    return settings_of(work, {"overlap_comm": work.device == "cuda", **zero}, **more)


def absent(library: str) -> str | None:
    """Why a library cannot take part, or None."""
    return None if importlib.util.find_spec(library) is not None else f"{library} is not installed"
