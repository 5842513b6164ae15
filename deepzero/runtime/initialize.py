"""``deepzero.initialize``: DeepSpeed's front door, with DeepSpeed's arguments and return values."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from deepzero.comm import process_group
from deepzero.comm.topology import check_ranks
from deepzero.compat.deepspeed_engine import DeepSpeedEngine
from deepzero.config.deepspeed_json import load_engine_config
from deepzero.config.engine import EngineConfig, resolve_batch
from deepzero.config.strict import ConfigError
from deepzero.runtime.consistency import agree_to_start, check_parameters, check_precision, describe
from deepzero.runtime.optimizers import build_optimizer, check_elementwise
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
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: EngineConfig | Mapping[str, Any] | str | Path | None = None,
    config_params: Mapping[str, Any] | None = None,
    total_steps: int | None = None,
) -> tuple[DeepSpeedEngine, torch.optim.Optimizer, DataLoader[Any] | None, Any]:
    """Wrap a model for training under ZeRO; joins the process group when nobody has.

    Args:
        args: ``args.deepspeed_config`` is read, when ``config`` is None.
        model: any ``nn.Module``, the same on every rank. Afterwards its trainable parameters are views of flat buffers
            on the rank's device, in the configured precision, with rank 0's values.
        optimizer: an elementwise optimizer over ``model``'s parameters, or a callable that makes one from them; None
            builds the one that the configuration names. Afterwards it holds this rank's fp32 masters. What is given
            here wins over the configuration's block, with a warning; so does ``lr_scheduler``.
        model_parameters: for an optimizer that is built here; None takes all trainable parameters.
        training_data: a dataset; the third return value is then a loader of this rank's micro-batches.
        lr_scheduler: an object with ``step()``, a callable that makes one from the optimizer, or None for the config's.
        dist_init_required: False refuses to join a process group here.
        collate_fn: for the loader.
        config: a DeepSpeed-style mapping, the path of a JSON file with one, or an :class:`EngineConfig`.
        config_params: the older name of ``config``.
        total_steps: optimizer steps of the whole run, for schedules that end with it.

    Returns:
        ``(engine, optimizer, dataloader, lr_scheduler)``.

    Raises:
        ConfigError, RankMismatchError: settings that cannot be used, or that differ between ranks.

    Example:
        >>> config = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        ...           "zero_optimization": {"stage": 2}}
        >>> engine, optimizer, _, _ = initialize(model=nn.Linear(4, 1), config=config)
        >>> loss = engine(torch.ones(2, 4)).pow(2).mean()
        >>> _ = engine.backward(loss)
        >>> engine.step()
        >>> engine.global_steps
        1

    Source: [DeepSpeed], ``__init__.py``.
    """
    settings, problem = EngineConfig(), None
    try:
        from_args = getattr(args, "deepspeed_config", None)
        given = [value for value in (config, config_params, from_args) if value is not None]
        twice = "the configuration is given twice (config, config_params, args.deepspeed_config); give it once"
        if len(given) > 1:
            raise ConfigError(twice)
        settings = load_engine_config(given[0] if given else None)
    except ConfigError as error:
        problem = error
    if dist_init_required is False and not process_group.is_initialized():
        raise ConfigError("dist_init_required=False, but this process has joined no process group")
    process_group.init_distributed(timeout_seconds=settings.comm.timeout_seconds)
    model, chosen = _agreed(problem, settings, model, optimizer, model_parameters)
    _warn_of_two("lr_scheduler", lr_scheduler, settings.scheduler)
    if callable(lr_scheduler) and not callable(getattr(lr_scheduler, "step", None)):
        lr_scheduler = lr_scheduler(chosen)
    engine = DeepSpeedEngine(model, chosen, settings, lr_scheduler, total_steps)
    if training_data is not None:
        # This rank's micro-batches, reshuffled by ``loader.sampler.set_epoch``; an incomplete last batch is dropped.
        ranks = (engine.world_size, engine.global_rank)
        sampler: DistributedSampler[Any] = DistributedSampler(training_data, *ranks, drop_last=True)
        engine.training_dataloader = DataLoader(
            training_data, engine.batch.micro_batch, sampler=sampler, collate_fn=collate_fn, drop_last=True
        )
    return engine, chosen, engine.training_dataloader, engine.lr_scheduler


def _agreed(
    problem: Exception | None, settings: EngineConfig, model: nn.Module | None, optimizer: Any, model_parameters: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Check what this rank was given, then tell the other ranks: all start, or all raise."""
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
        chosen = _optimizer(model, optimizer, model_parameters, settings)
        check_elementwise(chosen)
        mine = describe(settings, model, chosen)
    except Exception as error:
        agree_to_start(error, {})
        raise
    agree_to_start(None, mine)
    # Stages 0-2 keep parameters whole: what ``zero.Init`` has cut is put together again, by a collective.
    whole = settings.zero.stage < 3
    cut = {name: param for name, param in model.named_parameters() if whole and isinstance(param, ZeroParameter)}
    check_unclaimed({param: name for name, param in cut.items()})
    for param in cut.values():
        unpartition(param)
    if cut and process_group.rank() == 0:
        log.warning(
            "zero.Init has partitioned the model, and zero stage %d keeps its parameters whole: they are gathered on "
            "every rank. Set zero_optimization.stage to 3, or leave zero.Init out (enabled=False)",
            settings.zero.stage,
        )
    return model, chosen


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
            kind = type(item).__name__
            raise ConfigError(f"model_parameters holds {kind} objects: give parameters, or groups of them")
    if isinstance(optimizer, torch.optim.Optimizer):
        # With an optimizer object ``model_parameters`` has nothing left to say; a contradiction is refused.
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        flat = [p for item in given or () for p in (item["params"] if isinstance(item, Mapping) else [item])]
        missing = [tuple(p.shape) for p in flat if p.requires_grad and id(p) not in held]
        if missing:
            raise ConfigError(
                f"model_parameters holds {len(missing)} parameters that optimizer= does not, first of shape "
                f"{missing[0]}"
            )
        return optimizer
    parameters = [param for param in model.parameters() if param.requires_grad] if given is None else given
    if not parameters:
        where = "model has no parameter that requires a gradient" if given is None else "model_parameters is empty"
        raise ConfigError(f"nothing can be trained: {where}")
    if callable(optimizer):
        made = optimizer(parameters)
        if not isinstance(made, torch.optim.Optimizer):
            raise ConfigError(f"the optimizer callable returned a {type(made).__name__}, not a torch optimizer")
        return made
    if settings.optimizer is None:
        raise ConfigError('no optimizer: pass optimizer= to initialize, or set "optimizer": {"type": …} in the config')
    return build_optimizer(settings.optimizer, parameters, settings.zero.offload_optimizer.device == "cpu")


def _warn_of_two(argument: str, given: Any, block: Any) -> None:
    """What the script passes wins over the configuration, as in DeepSpeed. Rank 0 says so."""
    if given is not None and block is not None and process_group.rank() == 0:
        log.warning(
            "initialize was given %s=, so the config's %r block is not used; leave one of the two out",
            argument,
            argument.removeprefix("lr_"),
        )
