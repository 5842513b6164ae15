"""What a setting will hold and take, roughly and at once: closed forms, and a probe of the model without ZeRO.

A rehearsal takes seconds, and there are hundreds of settings. This sorts them: the *states* are the closed forms of
``runtime/memory_model.py``, exact but for padding and buffers; *activations* and the time of forward and backward are
those of the model alone, run on the meta device with few blocks and three micro-batches, and drawn out in straight
lines; *communication* is the closed volumes at the cluster's bandwidth, hidden as far as the stage can hide it.
What is shown to people as a prediction comes from a rehearsal instead: see ``autotune.py``.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from deepzero.comm.ledger import Sent, side_of
from deepzero.comm.topology import Nodes
from deepzero.config.engine import resolve_batch
from deepzero.config.run import RunConfig
from deepzero.config.strict import ConfigError
from deepzero.layout import choose_bucket_limit
from deepzero.planning.clusters import Cluster
from deepzero.planning.dry_run import ClusterShape, TrainStep, loss_of, quiet, refuse_reading_values, without_values
from deepzero.planning.op_cost import WorkMeter, fused_attention
from deepzero.runtime.build import Dtypes
from deepzero.runtime.memory_model import Elements, StateSizes, predicted_memory
from deepzero.runtime.optimizer_state import moment_bytes
from deepzero.runtime.optimizers import build_optimizer

Offloaded = Literal["none", "optimizer", "optimizer_and_param"]
MakeProgram = Callable[[RunConfig, int], TrainStep]
"""A run and a number of ranks to what a rank runs: ``deepzero.training.build_model.program_of``."""

DEPTHS = (4, 8)
"""Blocks of the probed models; activations and time grow by the same with every further one. (With fewer
blocks the peak is not among them, but at the logits.)"""
MICRO_BATCHES = (1, 4, 8)
"""Sequences of the probes. With one the peak is often that of a weight's gradient, and later that of activations."""
BACKWARD = 2 / 3  # of the time of a micro-batch: two matrix products where the forward pass has one
BUFFERS = {0: 3, 1: 3, 2: 3, 3: 6}
"""Buckets, and in stage 3 what is gathered, by stage: about so many times the largest bucket."""


@dataclass(frozen=True)
class Setting:
    """One point of the search."""

    stage: int
    offload: Offloaded
    checkpointing: bool
    micro_batch: int
    accumulation: int = 1
    extra: tuple[str, ...] = ()  # further overrides, as on the command line: bucket sizes, ZeRO++

    @property
    def family(self) -> tuple[int, Offloaded]:
        """Settings that differ in the rest alone hold their states alike."""
        return self.stage, self.offload


@dataclass(frozen=True)
class Estimate:
    """Memory and time of one setting, estimated."""

    setting: Setting
    memory: dict[str, int]  # bytes of one rank by category: closed forms, and `activations`
    buffers: int  # bytes: a guess, and so no part of `memory`
    seconds: float  # of an optimizer step
    tokens_per_second: float

    @property
    def device_bytes(self) -> int:
        """At least so much: without buffers."""
        return sum(size for name, size in self.memory.items() if side_of(name) == "device")

    @property
    def host_bytes(self) -> int:
        """Host bytes of one rank, without buffers."""
        return sum(self.memory.values()) - self.device_bytes


def _on_line(x: float, at: Sequence[int], values: Sequence[float]) -> float:
    """At ``x``, on the straight lines through the points, the first and the last drawn out; through one: level."""
    if len(at) == 1:
        return values[0]
    first = next((k for k in range(len(at) - 2) if x <= at[k + 1]), len(at) - 2)
    slope = (values[first + 1] - values[first]) / (at[first + 1] - at[first])
    return values[first] + slope * (x - at[first])


class Estimator:
    """Estimates for one model on one cluster; the model is probed once with checkpointing and once without."""

    def __init__(self, run: RunConfig, make: MakeProgram, cluster: Cluster, world: ClusterShape) -> None:
        if run.engine.optimizer is None:
            raise ConfigError("the settings name no optimizer: choose one with optimizer=…")
        self.run, self.make, self.cluster, self.world = run, make, cluster, world
        self.nodes = Nodes(world.world_size, run.engine.comm.ranks_per_node or world.ranks_of_host)
        self.dtypes = Dtypes.of(run.engine, world.world_size)
        self.optimizer = run.engine.optimizer
        build_optimizer(self.optimizer, [torch.nn.Parameter(torch.zeros(64))])  # can refuse its settings
        self.numel = self.largest = 0
        self.moments = 0.0  # bytes per element; a mean, as Muon keeps half of what AdamW does
        self._probes: dict[bool, tuple[list[float], list[float]]] = {}

    def of(self, world: ClusterShape) -> Estimator:
        """The same for another number of ranks, without another probe."""
        other = copy.copy(self)
        other.world, other.nodes = world, Nodes(world.world_size, self.nodes.per_node)
        return other

    def _probe(self, checkpointing: bool) -> tuple[list[float], list[float]]:
        """Bytes of activations and seconds of forward and backward at :data:`MICRO_BATCHES`, the model alone.

        The model is run with few blocks, and drawn out to its depth.
        """
        if checkpointing not in self._probes:
            layers = self.run.model.n_layer
            depths = DEPTHS if layers > max(DEPTHS) else (layers,)
            rows = []
            for micro_batch in MICRO_BATCHES:
                found = [self._run_once(depth, micro_batch, checkpointing) for depth in depths]
                rows.append([_on_line(layers, depths, values) for values in zip(*found, strict=True)])
            self.numel, self.moments = round(rows[-1][0]), rows[-1][3] / rows[-1][0]
            self._probes[checkpointing] = [row[1] for row in rows], [row[2] for row in rows]
        return self._probes[checkpointing]

    def _run_once(self, depth: int, micro_batch: int, checkpointing: bool) -> tuple[float, float, float, float]:
        """Of so many blocks: elements; bytes beside the parameters, and seconds, of a micro-batch; bytes of states.

        Gradients go as soon as they are there: they are ZeRO's to keep, and its closed forms count them.
        """
        model_config = dataclasses.replace(self.run.model, n_layer=depth, activation_checkpointing=checkpointing)
        engine = dataclasses.replace(
            self.run.engine,
            train_batch_size=None,
            train_micro_batch_size_per_gpu=micro_batch,
            gradient_accumulation_steps=1,
        )
        run = dataclasses.replace(self.run, model=model_config, engine=engine)
        program, meter = self.make(run, self.world.world_size), WorkMeter()
        with meter, fused_attention(self.world.device_type), refuse_reading_values():
            with torch.device("meta"):
                model = program.model().to(self.dtypes.compute)
            for param in model.parameters():
                param.register_post_accumulate_grad_hook(lambda made: setattr(made, "grad", None))
            before = meter.restart()
            loss_of(program, model(*program.batch())).backward()
            held = meter.peak_bytes - before
        sizes = [param.numel() for param in model.parameters()]
        self.largest = max(self.largest, *sizes)
        seconds = sum(map(self.cluster.op_seconds, meter.work))
        return sum(sizes), held, seconds, self._state_bytes(model)

    def _state_bytes(self, model: torch.nn.Module) -> int:
        with quiet():
            optimizer = build_optimizer(self.optimizer, list(model.parameters()), stand_in=without_values, model=model)
        groups = enumerate(optimizer.param_groups)
        kept = [(moment_bytes(optimizer, torch.device("cpu"), index), group["params"]) for index, group in groups]
        return sum(states.of(param.shape) for states, params in kept for param in params)

    def states(self) -> dict[str, int]:
        """Bytes of one rank's model states by category, for the run as it is set and at once: nothing is run."""
        with torch.device("meta"):
            model = self.make(self.run, self.world.world_size).model()
        self.numel = sum(param.numel() for param in model.parameters())
        self.moments = self._state_bytes(model) / self.numel
        zero = self.run.engine.zero
        batch = resolve_batch(self.run.engine, self.world.world_size)
        offloads = zero.offload_optimizer.device != "none", zero.offload_param.device != "none"
        away: Offloaded = "optimizer_and_param" if all(offloads) else "optimizer" if any(offloads) else "none"
        return self._states(Setting(zero.stage, away, False, batch.micro_batch, batch.accumulation))

    def __call__(self, setting: Setting) -> Estimate:
        """Memory and time of one setting."""
        probe = self._probe(setting.checkpointing)
        held, seconds = (max(0.0, _on_line(setting.micro_batch, MICRO_BATCHES, values)) for values in probe)
        if self.run.engine.activation_checkpointing.cpu_checkpointing:
            held = 0.0  # they wait in host memory; how much of them, a rehearsal tells
        memory = {**self._states(setting), "activations": round(held)}
        total = self._step_seconds(setting, memory, seconds)
        tokens = setting.micro_batch * setting.accumulation * self.world.world_size * self.run.model.block_size
        bucket = max(self.limit, self.largest) * self.dtypes.compute.itemsize
        return Estimate(setting, memory, BUFFERS[setting.stage] * bucket, total, tokens / total)

    @cached_property
    def limit(self) -> int:
        """Elements of a bucket, where no parameter is larger."""
        self._probe(self.run.model.activation_checkpointing)
        zero = self.run.engine.zero
        return choose_bucket_limit(self.numel, zero.reduce_bucket_size, zero.allgather_bucket_size)

    def _states(self, setting: Setting) -> dict[str, int]:
        zero, world_size, numel = self.run.engine.zero, self.world.world_size, self.numel
        sizes = StateSizes(
            compute=self.dtypes.compute.itemsize,
            accumulation=self.dtypes.accumulation.itemsize,
            moments=self.moments,
            wire=self.dtypes.wire.itemsize,
            stage=setting.stage,
            overlap=zero.overlap_comm,
            micro_batches=setting.accumulation,
            whole_reduce=setting.stage == 0 or (setting.stage == 1 and not zero.reduce_scatter),
            exact=self.run.engine.comm.reduce == "exact",
            invariant=self.run.engine.comm.world_size_invariant,
        )
        host, limit = int(numel * zero.offload_optimizer.ratio), zero.offload_param.max_in_cpu
        host = 0 if setting.offload == "none" else host
        away = numel if setting.offload == "optimizer_and_param" else 0
        away = away if limit is None else min(away, limit * world_size)
        on_one_side = {"sent": max(0, host - away), "brought": max(0, away - host)}
        elements = Elements(numel, host_optimizer=host, host_parameters=away, **on_one_side)
        return predicted_memory(elements, world_size, sizes)

    def _step_seconds(self, setting: Setting, memory: dict[str, int], one: float) -> float:
        """Forward and backward of all micro-batches, what of the communication cannot hide behind them, the step."""
        cluster, times = self.cluster, setting.accumulation
        gather = self._collective(self.dtypes.compute.itemsize)
        reduce = self._collective(self.dtypes.wire.itemsize)
        behind = one * BACKWARD if self.run.engine.zero.overlap_comm else 0.0
        passes = times if self.run.engine.comm.world_size_invariant else 1  # that stages 0 and 1 reduce
        late = {
            0: (passes - 1) * max(0.0, reduce - behind) + max(0.0, 2 * reduce - behind),
            1: (passes * max(0.0, reduce - behind) if passes == times else reduce) + gather,
            2: times * max(0.0, reduce - behind) + gather,
            3: times * (max(0.0, 2 * gather - one) + max(0.0, reduce - behind)),
        }[setting.stage]
        held = Counter(memory)  # the host's categories are there where it has something
        states = 2 * (held["masters"] + held["moments"]) + held["gradients"]
        on_host = 2 * (held["host_masters"] + held["host_moments"]) + held["host_gradients"]
        total = times * one + late + states / cluster.memory_bandwidth
        total += on_host * self.nodes.per_node / cluster.host_memory_bandwidth
        total += times * max(0.0, held["host_gradients"] / cluster.host_bandwidth - behind)
        if setting.offload == "optimizer":
            total += self.numel * self.dtypes.compute.itemsize / self.world.world_size / cluster.host_bandwidth
        return total

    def _collective(self, itemsize: int) -> float:
        """All parameters once: reduced, or gathered."""
        world_size, nodes = self.world.world_size, self.nodes
        if world_size == 1:
            return 0.0
        calls = max(1, self.numel // max(self.limit, 1))
        nbytes = self.numel * itemsize * (world_size - 1) / world_size / calls
        ring = self.world.device_type == "cuda" and self.run.engine.comm.reduce != "exact"
        sent = Sent(0, int(nbytes), nbytes * nodes.share_between, world_size, ring)
        return calls * self.cluster.collective_seconds(sent, nodes)
