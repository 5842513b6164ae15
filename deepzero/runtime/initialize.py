"""``deepzero.initialize``: DeepSpeed's front door, with DeepSpeed's arguments and return values."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import os
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from deepzero.comm import process_group
from deepzero.comm.simulated_streams import simulate_streams
from deepzero.comm.topology import check_ranks
from deepzero.compat.deepspeed_engine import DeepSpeedEngine
from deepzero.compat.engine_batches import refuse_stream
from deepzero.compat.optimizer_names import NoOptimizer
from deepzero.config.deepspeed_json import in_json_words, load_engine_config
from deepzero.config.engine import EngineConfig, resolve_batch
from deepzero.config.strict import ConfigError
from deepzero.offload.file_store import check_folders
from deepzero.runtime.build import check_params
from deepzero.runtime.consistency import (
    RankMismatchError,
    agree_to_start,
    check_modules,
    check_parameters,
    check_precision,
    describe,
)
from deepzero.runtime.diagnostics import tensor_namer
from deepzero.runtime.elementwise_check import check_elementwise, steps_in_turn
from deepzero.runtime.invariance import dependences, refuse_dependence
from deepzero.runtime.loss_scaler import build_loss_scaler
from deepzero.runtime.lr_schedules import Scheduler, build_scheduler
from deepzero.runtime.muon import Muon, log_choice
from deepzero.runtime.optimizers import build_optimizer
from deepzero.runtime.zero.guards import check_unclaimed
from deepzero.runtime.zero.partition_parameters import Init, ZeroParameter, unpartition

log = logging.getLogger(__name__)


def initialize(
    args: argparse.Namespace | None = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: EngineConfig | Mapping[str, Any] | str | Path | None = None,
    mesh_param: Any = None,
    config_params: Mapping[str, Any] | None = None,
    total_steps: int | None = None,
    engine_class: type[DeepSpeedEngine] = DeepSpeedEngine,
) -> tuple[DeepSpeedEngine, torch.optim.Optimizer | None, DataLoader[Any] | None, Any]:
    """Wrap a model for training under ZeRO; joins the process group when nobody has.

    Without an optimizer, here and in the configuration, the engine evaluates and does not train: it holds the
    parameters (stage 3: this rank's part) and nothing else, and none of them requires a gradient.

    Args:
        args: ``args.deepspeed_config`` is read, when ``config`` is None.
        model: any ``nn.Module``, the same on every rank. Afterwards its trainable parameters are views of flat buffers
            on the rank's device, in the configured precision, with rank 0's values.
        optimizer: an elementwise optimizer over ``model``'s parameters, or a callable that makes one from them; None
            builds the one that the configuration names. Afterwards it holds this rank's fp32 masters. What is given
            here wins over the configuration's block, with a warning; so does ``lr_scheduler``.
        model_parameters: for an optimizer that is built here; None takes all trainable parameters. Beside an optimizer
            object they have nothing to say, and what it does not hold does not train: a warning says so.
        training_data: a dataset; the third return value is then a loader of this rank's micro-batches.
        lr_scheduler: an object with ``step()``, a callable that makes one from the optimizer, or None for the config's.
        distributed_port: where ranks meet, when they meet here and ``MASTER_PORT`` is not set.
        mpu: for model parallelism, which deepzero has not; only one that says so of every rank is taken.
        dist_init_required: False refuses to join a process group here.
        collate_fn: for the loader, and for those that ``engine.deepspeed_io`` makes later.
        config: a DeepSpeed-style mapping, the path of a JSON file with one, or an :class:`EngineConfig`.
        mesh_param: for sequence parallelism, which deepzero has not.
        config_params: the older name of ``config``.
        total_steps: optimizer steps of the whole run, for schedules that end with it.
        engine_class: what is made, once all ranks have agreed.

    Returns:
        ``(engine, optimizer, dataloader, lr_scheduler)``; None in place of what there is not.

    Raises:
        ConfigError, RankMismatchError: settings that cannot be used, or that differ between ranks.

    Example:
        >>> config = {"train_batch_size": 2, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2}}
        >>> engine, optimizer, _, _ = initialize(model=nn.Linear(4, 1), config=config)
        >>> _ = engine.backward(engine(torch.ones(2, 4)).pow(2).mean())
        >>> engine.step()
        >>> engine.global_steps
        1

    Source: [DeepSpeed], ``__init__.py``.
    """
    try:
        settings, problem = _read((config, config_params, args), mpu, mesh_param)
        _join(dist_init_required, distributed_port, settings.comm.timeout_seconds)
        given = (optimizer, model_parameters, lr_scheduler, total_steps, training_data)
        model, chosen, lr_scheduler = _taken(problem, settings, model, *given)
        trains = not isinstance(chosen, NoOptimizer)
        with torch.inference_mode(False):  # what is made here is trained
            engine = engine_class(model, chosen, _in_use(settings, optimizer, trains), lr_scheduler, total_steps)
        if engine.global_rank == 0:
            log.info(engine.describe_bits())
        engine.collate_fn = collate_fn
        if settings.comm.simulated_streams:
            simulate_streams().namers.append(tensor_namer(engine.comm.ledger, engine.zero))
        if training_data is not None:
            engine.training_dataloader = engine.deepspeed_io(training_data)
        return engine, chosen if trains else None, engine.training_dataloader, engine.lr_scheduler
    except (ConfigError, RankMismatchError) as error:
        if not _frames(error) <= {"deepzero", "torch", "contextlib", "json"}:
            raise  # in a factory of the user's, say, which its frame tells
        error.args = (str(error) if isinstance(config or config_params, EngineConfig) else in_json_words(str(error)),)
        raise error.with_traceback(None) from error.__cause__  # where it was found says nothing of a setting


def _frames(error: Exception) -> set[str]:
    """The packages in which it was on its way."""
    return {at.f_globals.get("__name__", "").partition(".")[0] for at, _ in traceback.walk_tb(error.__traceback__)}


def _in_use(settings: EngineConfig, optimizer: Any, trains: bool) -> EngineConfig:
    """Without the blocks that the engine does not go by, as an optimizer was given, or none is there."""
    used = settings.optimizer if optimizer is None else None
    return dataclasses.replace(settings, optimizer=used, scheduler=settings.scheduler if trains else None)


def _taken(
    problem: Exception | None, settings: EngineConfig, model: nn.Module | None, *given: Any
) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """What :func:`_agreed` gives, free for an engine. One that has this model goes on unless everything can be used."""
    older = DeepSpeedEngine.of(model)
    with older.frozen_parameters.thawed() if older is not None else contextlib.nullcontext():
        found = _agreed(problem, settings, model, older is not None, *given)
    if older is not None:
        older.destroy()
        if process_group.rank() == 0:
            log.warning(
                "deepzero.initialize was given a model that has an engine: that one lets go of it, and trains no more. "
                "Call its destroy() before, or give one of the two a copy of the model"
            )
    _put_together(settings.zero.stage, found[0])
    return found


def _read(given: tuple[Any, ...], mpu: Any, mesh_param: Any) -> tuple[EngineConfig, ConfigError | None]:
    """The settings, and what is wrong, of which all ranks are to hear before any raises.

    With ``comm.simulated_streams``, simulate them from now on, and sum as on gloo.
    """
    settings = EngineConfig()
    try:
        settings = load_engine_config(given_config(*given))
        check_folders(settings.zero)
        _refuse_other_parallelism(mpu, mesh_param)
        if settings.comm.simulated_streams:
            simulate_streams()
            comm = dataclasses.replace(settings.comm, reduce=settings.comm.reduce or "exact")
            settings = dataclasses.replace(settings, comm=comm)
    except ConfigError as error:
        return settings, error
    return settings, None


def _join(required: bool | None, port: int | None, timeout: float) -> None:
    if required is False and not process_group.is_initialized():
        raise ConfigError("dist_init_required=False, but this process has joined no process group; leave it out")
    if port is not None and "WORLD_SIZE" in os.environ:
        os.environ.setdefault("MASTER_PORT", str(port))
    process_group.init_distributed(timeout_seconds=timeout, port=port)


def given_config(config: Any, config_params: Any, args: Any) -> Any:
    """What :func:`initialize` was given as settings, in one of three arguments; None; a ConfigError for two."""
    from_args = [getattr(args, name, None) for name in ("deepspeed_config", "deepscale_config")]
    given = [value for value in (config, config_params, *from_args) if value is not None]
    if len(given) > 1:
        raise ConfigError("the settings are given twice (config, config_params, args.deepspeed_config); give them once")
    return given[0] if given else None


def _refuse_other_parallelism(mpu: Any, mesh_param: Any) -> None:
    sizes = [getattr(mpu, f"get_{kind}_parallel_world_size", None) for kind in ("model", "tensor_model", "pipeline")]
    if mpu is not None and (not any(sizes) or any(size is not None and size() != 1 for size in sizes)):
        raise ConfigError(
            "mpu= divides a model among ranks (tensor or pipeline parallelism), which deepzero has not: every rank "
            "shares the data. Leave it out, or let its get_model_parallel_world_size() be 1"
        )
    if mesh_param is not None:
        raise ConfigError(f"mesh_param={mesh_param!r}: deepzero has no sequence parallelism; leave it out")


def _agreed(
    problem: Exception | None,
    settings: EngineConfig,
    model: nn.Module | None,
    has_engine: bool,
    optimizer: Any,
    model_parameters: Any,
    lr_scheduler: Any,
    total_steps: int | None,
    training_data: Any,
) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Check what this rank was given, then tell the other ranks: all start, or all raise.

    The optimizer and the schedule are made here, and over parameters that may still belong to an engine.
    """
    try:
        if problem is not None:
            raise problem
        if not isinstance(model, nn.Module):
            raise ConfigError(f"initialize needs model=, a torch.nn.Module; it got {type(model).__name__}")
        resolve_batch(settings, process_group.world_size())
        check_ranks(settings, process_group.world_size())
        check_precision(settings.precision.dtype, process_group.default_device())
        # A model that was made on the meta device: stage 3 makes its parameters here, module by module.
        without_values = [name for name, param in model.named_parameters() if param.is_meta]
        if settings.zero.stage == 3 and without_values:
            Init(module=model)
            without_values = [name for name, param in model.named_parameters() if param.is_meta]
        if without_values:
            advice = "load them first, or use zero stage 3, which makes them module by module"
            raise ConfigError(f"parameter {without_values[0]!r} is on the meta device and has no values; {advice}")
        check_parameters(model)
        if settings.comm.world_size_invariant:
            refuse_dependence(dependences(settings, model, process_group.default_device()))
        chosen = _optimizer(model, optimizer, model_parameters, settings)
        if not isinstance(chosen, NoOptimizer):
            check_modules(model, process_group.world_size(), settings.zero.stage)
        if isinstance(chosen, Muon) and process_group.rank() == 0:
            log_choice(model, chosen.param_groups)
        names = {param: name for name, param in model.named_parameters()}
        if not has_engine:
            check_unclaimed(names)
        check_params(names, chosen)
        check_elementwise(
            chosen, steps_in_turn(settings.zero, chosen, process_group.world_size()), settings.zero.stage > 0
        )
        build_loss_scaler(settings.precision)  # can still refuse its numbers
        refuse_stream("training_data=", training_data, process_group.world_size())
        built = lr_scheduler.optimizer.param_groups if isinstance(lr_scheduler, (LRScheduler, Scheduler)) else None
        # By groups, which accelerate hands on to another optimizer: there the schedule writes the rates.
        if built is not None and list(map(id, built)) != list(map(id, chosen.param_groups)):
            raise ConfigError(
                "lr_scheduler= was given, and nothing trains: neither initialize nor its config has an optimizer. Pass "
                "optimizer=, or leave lr_scheduler= out"
                if isinstance(chosen, NoOptimizer)
                else "lr_scheduler= was built for another optimizer than the one that trains, whose rates it would "
                "never change; build it from the optimizer= that you pass, or pass a callable that makes it from one"
            )
        _warn_of_two("lr_scheduler", lr_scheduler, settings.scheduler)
        if isinstance(lr_scheduler, type) or (callable(lr_scheduler) and not hasattr(lr_scheduler, "step")):
            lr_scheduler = lr_scheduler(chosen)
        if lr_scheduler is None and settings.scheduler is not None and not isinstance(chosen, NoOptimizer):
            lr_scheduler = build_scheduler(settings.scheduler, chosen, total_steps)
        # The curve has the length of the run, which a program may have taken of this rank's own loader.
        curve = lr_scheduler.curve if isinstance(lr_scheduler, Scheduler) else ""
        mine = {"lr_scheduler": f"{type(lr_scheduler).__qualname__} {curve}".rstrip()}
        mine |= describe(settings, model, chosen) | {"whether the model has an engine": str(has_engine)}
    except Exception as error:
        agree_to_start(error, {})
        raise
    agree_to_start(None, mine)
    return model, chosen, lr_scheduler


def _put_together(stage: int, model: nn.Module) -> None:
    """Stages 0-2 keep parameters whole: what ``zero.Init`` has cut is put together again. A collective."""
    cut = {name: param for name, param in model.named_parameters() if stage < 3 and isinstance(param, ZeroParameter)}
    check_unclaimed({param: name for name, param in cut.items()})
    for param in cut.values():
        unpartition(param)
    if cut and process_group.rank() == 0:
        log.warning(
            "zero.Init has partitioned the model, and zero stage %d keeps its parameters whole: they are gathered on "
            "every rank. Set zero_optimization.stage to 3, or leave zero.Init out (enabled=False)",
            stage,
        )


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add DeepSpeed's command-line arguments: ``--deepspeed`` and ``--deepspeed_config FILE``."""
    group = parser.add_argument_group("deepzero", "configuration in DeepSpeed's format")
    group.add_argument("--deepspeed", action="store_true", help="accepted for scripts that branch on it")
    group.add_argument("--deepspeed_config", default=None, metavar="FILE", help="DeepSpeed-style JSON config")
    return parser


def _optimizer(
    model: nn.Module, optimizer: Any, model_parameters: Any, settings: EngineConfig
) -> torch.optim.Optimizer:
    _warn_of_two("optimizer", optimizer, settings.optimizer)
    given = None if model_parameters is None else list(model_parameters)
    for item in given or ():
        if not isinstance(item, (torch.Tensor, Mapping, tuple)):  # a tuple: torch's optimizers take named parameters
            raise ConfigError(f"model_parameters holds {type(item).__name__} objects: give parameters or param groups")
    if isinstance(optimizer, torch.optim.Optimizer):
        # With an optimizer object ``model_parameters`` has nothing left to say.
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        flat = [p for item in given or () for p in (item["params"] if isinstance(item, Mapping) else [item])]
        missing = [
            tuple(p.shape) for p in flat if isinstance(p, torch.Tensor) and p.requires_grad and id(p) not in held
        ]
        if missing and process_group.rank() == 0:
            log.warning(
                "model_parameters= is ignored, as optimizer= is given; it holds %d parameters that the optimizer does "
                "not and that will not train, first of shape %s", len(missing), missing[0],
            )  # fmt: skip
        return optimizer
    if optimizer is None and settings.optimizer is None:
        return NoOptimizer()
    parameters = [param for param in model.parameters() if param.requires_grad] if given is None else given
    if not parameters:
        where = "model has no parameter that requires a gradient" if given is None else "model_parameters is empty"
        raise ConfigError(f"nothing can be trained: {where}")
    if callable(optimizer):
        made = optimizer(parameters)
        if not isinstance(made, torch.optim.Optimizer):
            raise ConfigError(f"the optimizer callable returned a {type(made).__name__}, not a torch optimizer")
        return made
    if optimizer is not None or settings.optimizer is None:
        raise ConfigError(f"optimizer= must be a torch optimizer or a callable that makes one, not {optimizer!r}")
    on_host = settings.zero.offload_optimizer.device != "none"
    return build_optimizer(settings.optimizer, parameters, on_host, model=model)


def _warn_of_two(argument: str, given: Any, block: Any) -> None:
    """What the script passes wins over the configuration, as in DeepSpeed. Rank 0 says so."""
    if given is not None and block is not None and process_group.rank() == 0:
        text = "initialize was given %s=, so the config's %r block is not used; leave one of the two out"
        log.warning(text, argument, argument.removeprefix("lr_"))
