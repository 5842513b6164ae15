"""A dry run: some optimizer steps of the engine, as any one rank of any number of ranks, without values.

The model, the engine, the stage, the coordinator, the buckets, the offload: all of it is the code that trains. Tensors
are on the meta device, the other ranks are not there (``DryRunCommunicator``), and the ledger keeps every event. In
stage 3 the first step records the trace, as always, and what is compiled from it is the :data:`FetchPlan` that the
second step executes: what comes out of here is that object itself, and a real engine can be given it (:func:`follow`).

What cannot be run dry is a model whose path depends on values (experts that are chosen by the data), because the meta
device has none: :func:`refuse_reading_values`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import torch
from torch import nn

from deepzero.comm.collectives import DryRunCommunicator, DryRunRank
from deepzero.comm.ledger import Event, Traffic, side_of
from deepzero.comm.topology import Nodes
from deepzero.compat.deepspeed_engine import DeepSpeedEngine
from deepzero.config.engine import EngineConfig
from deepzero.config.strict import ConfigError
from deepzero.offload.copy_streams import FETCH
from deepzero.offload.cpu_adam import CPUAdam
from deepzero.planning.op_cost import OpCost, WorkMeter, fused_attention, nothing_is_packed
from deepzero.profiling.step_recorder import StepRecorder
from deepzero.runtime.optimizers import build_optimizer
from deepzero.runtime.pytree import scalar_loss
from deepzero.runtime.zero.parameter_all_gather import TO_REPLICAS
from deepzero.runtime.zero.partition_parameters import Init
from deepzero.runtime.zero.partitioned_param_coordinator import ModuleTrace
from deepzero.runtime.zero.stage3 import ZeroStage3

STEPS = 2  # the first records, the second follows the plan; all later ones are like the second


@dataclass(frozen=True)
class ClusterShape:
    """Number of ranks, how they share machines, and the kind of device."""

    world_size: int
    ranks_of_host: int  # R, ranks that share a machine, unless `comm.ranks_per_node` says otherwise
    device_type: Literal["cpu", "cuda"] = "cuda"


@dataclass(frozen=True)
class TrainStep:
    """One training step as a rank runs it: model, batch, settings.

    ``model`` is called with the meta device as torch's default, and so makes a model without memory. ``batch`` gives
    the arguments of one micro-batch's forward pass, on the meta device; the model's output has to be, or to hold, a
    scalar loss, unless ``loss`` makes one of it.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Any, ...]]
    config: EngineConfig
    loss: Callable[[Any], torch.Tensor] | None = None


@dataclass(frozen=True)
class DryRunResult:
    """Everything that a dry run recorded on one rank."""

    rank: int
    nodes: Nodes
    device_type: str  # what the ranks run on: cpu or cuda. Buffers, kernels and ways of summing differ.
    stage: int
    model_numel: int
    events: list[Event]  # of the last step, in order; `at` counts ops, see :attr:`work`
    recording: list[Event]  # of the first step
    work: list[OpCost]  # of the last step: ops, numbered as the events count them
    trace: ModuleTrace | None  # stage 3: training's, with the plan that the last step followed
    memory: dict[str, int]  # bytes of model state and buffers by category: the ledger's closed forms
    held: dict[str, int]  # the same as counted in the rehearsal: the most that was held of each
    peak_bytes: int
    """On the device, the most that was alive at any time of the last step, activations and temporaries included."""
    traffic: dict[str, Traffic]  # of the last step, as counted on this rank
    predicted: dict[str, Traffic]  # of any step, by the closed forms, mean over ranks
    host_bytes: int  # in host memory
    trail: list[tuple[str, str, int, int]]
    """Every collective of the last step, in order: kind, where, how many take part, elements that a rank sends. The
    same on all ranks, or they hang. (Of what goes to replicas ranks send different numbers: 0 stands for all.)"""
    gradients: list[str]  # parameters that got one in the last step, in the order in which they came
    points: list[dict[str, Any]]
    """What was held after each event of the last step, where that was asked for: see ``profiling/step_recorder.py``."""
    fetched: dict[str, str]  # what stage 3 fetches and releases: `bucket 3` → the parameters that lie in it
    reduced: dict[str, str]
    """The same of what is reduced, and of what is published whole; several groups may have a bucket of a number."""
    micro_batches: int
    delayed: bool = False  # the CPU steps beside the next step's forward and backward pass

    def name_of(self, event: Event) -> str:
        """The parameters that an event is about, for people; empty where it is about none, or about all."""
        if event.what in ("fetch", "release") or "all_gather_" in event.kind or event.kind in (FETCH, TO_REPLICAS):
            return self.fetched.get(event.where, "")
        return self.reduced.get(event.where, "")

    @property
    def activation_bytes(self) -> int:
        """What of the peak is neither model state nor a buffer of ZeRO's: activations and temporaries.

        With :attr:`memory` it makes the peak. (Not with :attr:`held`: that is weighed between micro-batches, when what
        was gathered is gone on a GPU, and would be counted twice.)
        """
        device = sum(size for category, size in self.memory.items() if side_of(category) == "device")
        return max(0, self.peak_bytes - device)


def dry_run(program: TrainStep, world: ClusterShape, rank: int = 0, limit: int | None = None) -> DryRunResult:
    """Run ``program`` for :data:`STEPS` steps as ``rank`` of ``world``.

    With a ``limit`` what is held is weighed at every event of the last step, and about so many points are kept. A
    ConfigError: settings that do not fit together or this many ranks, as in a run; a model without a scalar loss, or
    one that reads values.
    """
    who = DryRunRank(rank, world.world_size, world.device_type, world.ranks_of_host)
    meter, arrived, recording = WorkMeter(), list[str](), list[Event]()
    device = fused_attention(world.device_type)
    with meter, device, quiet(), refuse_reading_values(), contextlib.ExitStack() as running:
        engine = _build(program, who, arrived)
        running.enter_context(nothing_is_packed())  # the model, and with it its library, is there by now
        ledger, recorder = engine.ledger, None
        ledger.clock, ledger.trace = meter.clock, True
        for step in range(STEPS):
            ledger.events, arrived[:] = [], []
            meter.restart()
            if limit is not None and step == STEPS - 1:
                recorder = StepRecorder(ledger, limit, clock=meter.clock)
                recorder.begin()
            for _ in range(engine.batch.accumulation):
                engine.backward(loss_of(program, engine(*program.batch())))
                engine.step()
            if recorder is not None:
                recorder.end()
            if step == 0:
                recording = ledger.events
        engine.finish_delayed_update()
        return _result(engine, meter, recording, arrived, recorder)


def follow(engine: DeepSpeedEngine, rehearsed: ModuleTrace) -> None:
    """Let a stage-3 engine follow a rehearsed trace's plan from its first step on: nothing has to be recorded.

    It must be cut into the plan's buckets, and have its limits on what is fetched ahead, kept and gathered.
    """
    if not isinstance(stage := engine.stage, ZeroStage3):
        raise ConfigError(f"zero.stage={engine.config.zero.stage}: only stage 3 follows a plan of fetches")
    if (numel := stage.coordinator.bucket_numels) != (before := rehearsed.bucket_numels):
        raise ConfigError(
            f"the plan is about {len(before)} buckets of {sum(before.values()):,} elements, and this engine "
            f"has {len(numel)} of {sum(numel.values()):,}; rehearse with the same model, settings and number of ranks"
        )
    for name in ("stage3_prefetch_bucket_size", "stage3_max_reuse_distance", "stage3_max_live_parameters"):
        if (here := getattr(stage.coordinator.limits, name)) != (there := getattr(rehearsed.limits, name)):
            raise ConfigError(f"the plan has {name}={there}, this engine {here}; rehearse with the same settings")
    stage.coordinator.follow(rehearsed.plan or ())


def _without_side_effects(config: EngineConfig) -> EngineConfig:
    """Nothing is delayed, printed or measured; what is launched and held does not depend on it."""
    chaos = dataclasses.replace(config.comm.chaos, enabled=False)
    zero, unmeasured = config.zero, dict[str, Any](meter_every=0, min_weight_snr_db=None, min_gradient_snr_db=None)
    if zero.zero_quantized_weights or zero.zero_quantized_gradients:
        # The limits of the error are the meter's, and go with it.
        zero = dataclasses.replace(zero, quantization=dataclasses.replace(zero.quantization, **unmeasured))
    comm = dataclasses.replace(config.comm, chaos=chaos, simulated_streams=False)
    return dataclasses.replace(config, comm=comm, zero=zero, steps_per_print=None, scheduler=None)


def _build(program: TrainStep, who: DryRunRank, arrived: list[str]) -> DeepSpeedEngine:
    """The engine; names of parameters whose gradients come are appended to ``arrived``."""
    config = _without_side_effects(program.config)
    if config.optimizer is None:
        raise ConfigError("a rehearsal builds its optimizer from the settings: they have to name one")
    comm = DryRunCommunicator.open(config, who)
    with torch.device("meta"), mock.patch.object(Init, "communicator", comm):
        model = program.model()
    for name, param in model.named_parameters():
        if not param.is_meta:
            raise ConfigError(f"parameter {name!r} has values: the model of a rehearsal is made on the meta device")
        if param.requires_grad:
            param.register_hook(lambda _, name=name: arrived.append(name))
    trained = [param for param in model.parameters() if param.requires_grad]
    on_host = config.zero.offload_optimizer.device != "none"
    optimizer = build_optimizer(config.optimizer, trained, on_host, without_values, model)
    engine = DeepSpeedEngine(model, optimizer, config, comm=comm)
    vars(engine.zero.optimizer_shard)["_optimizer_step"] = lambda *_: None  # of values there are none to work on
    return engine


class DryRunCPUAdam(CPUAdam):
    """CPUAdam over tensors without values, for which no kernel is compiled."""

    device_types, stands_for = ("cpu", "meta"), CPUAdam

    def prepare(self, *_: Any) -> None:
        """Do nothing."""

    def _over(self, groups: list[dict[str, Any]]) -> CPUAdam:
        return DryRunCPUAdam(groups, kernel=self._request)


def without_values(cls: type) -> type:
    """What a dry run makes of an optimizer's class: of CPUAdam, or one derived from it, one that takes such tensors."""
    return type(cls.__name__, (DryRunCPUAdam, cls), {"stands_for": cls}) if issubclass(cls, CPUAdam) else cls


@contextlib.contextmanager
def quiet(level: int = logging.WARNING) -> Iterator[None]:
    """What an engine says of itself when it is built is about a run; warnings are about the settings, and stay.

    At ``level`` ERROR they go too, where a run has given them itself.
    """
    logger = logging.getLogger("deepzero")
    before = logger.level
    logger.setLevel(max(before, level))
    try:
        yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def refuse_reading_values() -> Iterator[None]:
    """Make a :class:`ConfigError` of what torch raises where a program reads values of the meta device."""
    try:
        yield
    except RuntimeError as error:  # also its NotImplementedError, of an operator whose result's shape depends on values
        # torch's words for it: the meta device is named by other errors, too, such as of a tensor that lies elsewhere.
        words = r"meta tensor|register_meta|'meta' backend|item\(\)|data-dependent"
        if not re.search(words, str(error), re.IGNORECASE):
            raise
        said = str(error).partition("\n")[0]
        raise ConfigError(f"this model reads values while it runs, so that it cannot be rehearsed: {said}") from error


def loss_of(program: TrainStep, output: Any) -> torch.Tensor:
    """The loss of a model's output; a ConfigError where it holds no scalar, and the program makes none of it."""
    loss = program.loss(output) if program.loss is not None else scalar_loss(output)
    if loss is None:
        raise ConfigError(f"the model's output ({type(output).__name__}) holds no scalar loss; give the program one")
    return loss


def _result(
    engine: DeepSpeedEngine, meter: WorkMeter, recording: list[Event], arrived: list[str], recorder: StepRecorder | None
) -> DryRunResult:
    ledger, stage = engine.ledger, engine.stage
    ledger.sample()
    stage3 = stage.coordinator if isinstance(stage, ZeroStage3) else None
    sides = {side: sum(n for name, n in ledger.held.items() if side_of(name) == side) for side in ("host", "file")}
    fetched: dict[str, str] = {}
    for made in stage3.buckets if stage3 is not None else ():
        fetched[f"bucket {made.key}"] = _first_to_last([param._record.name for param in made.params])
    reduced: dict[str, str] = {}
    for group in engine.zero.groups:  # buckets have the group's own numbers; where two groups have the same, both count
        for bucket in group.layout.buckets:
            key, name = f"bucket {bucket.index}", _first_to_last([group.names[slot.index] for slot in bucket.slots])
            reduced[key] = f"{reduced[key]} or {name}" if key in reduced else name
    return DryRunResult(
        rank=engine.global_rank,
        nodes=engine.comm.nodes,
        device_type=engine.comm.device_type,
        stage=engine.config.zero.stage,
        model_numel=engine.model_numel,
        events=ledger.events,
        recording=recording,
        work=meter.work,
        trace=stage3.training if stage3 is not None else None,
        memory=dict(ledger.predicted_memory),
        held=dict(ledger.held),
        # The host's memory is one arena, a file is one too; on the meta device, too, and there all the time.
        peak_bytes=meter.peak_bytes - sum(sides.values()),
        traffic=dict(ledger.last_step),
        predicted=dict(ledger.predicted_traffic),
        host_bytes=sides["host"],
        trail=[launched(event) for event in ledger.events if event.what == "launch"],
        gradients=arrived,
        points=[point.as_dict() for point in recorder.points] if recorder is not None else [],
        fetched=fetched,
        reduced=reduced,
        micro_batches=engine.batch.accumulation,
        delayed=engine.config.zero.offload_optimizer.delayed_update,
    )


def launched(event: Event) -> tuple[str, str, int, int]:
    """One entry of a rehearsal's trail."""
    if event.sent is None:
        return event.kind, event.where, 0, 0
    elements = 0 if event.kind == TO_REPLICAS else event.sent.elements
    return event.kind, event.where, event.sent.ranks, elements


def _first_to_last(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
