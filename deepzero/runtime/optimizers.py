"""Optimizers: from a name and some settings to a torch optimizer.

Names are DeepSpeed's: ``Adam`` means decoupled weight decay, that is AdamW, unless ``adam_w_mode`` is false, and its
default weight decay is 0 (torch's AdamW has 0.01; ``torch_adam: true`` or ``torch.optim.AdamW`` take that one). Any
other class of ``torch.optim`` goes by its name, any class at all by its dotted path. ``CPUAdam``, or by DeepSpeed's
name ``DeepSpeedCPUAdam``, is deepzero's own Adam for tensors in the CPU's memory. Upper and lower case do not matter in
names without a dot. All other arithmetic is torch's, in its fused kernels where they exist.

What ZeRO needs of an optimizer is found out elsewhere and for any class: :mod:`deepzero.runtime.elementwise_check` asks
whether it may be cut up, :mod:`deepzero.runtime.optimizer_state` allocates its state in advance.

Source: [DeepSpeed], ``runtime/engine.py`` (``_configure_basic_optimizer``) and ``ops/adam/``: names and defaults.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from deepzero.config.engine import OptimizerConfig
from deepzero.config.strict import ConfigError, convert, unknown_key
from deepzero.offload.cpu_adam import CPUAdam
from deepzero.runtime.muon import Muon, as_groups, muon_groups
from deepzero.runtime.per_tensor import PER_TENSOR

WHERE = "optimizer.params"

TORCH_ALONE = ("amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused")
"""Arguments of torch's Adam that CPUAdam has not: who gives one of them means torch's."""

NOT_HERE = {
    "fusedadam": "is a class of DeepSpeed's, and no name in its config either; Adam has torch's fused kernel",
    "lamb": "is not in torch; name a class of yours by its dotted path, with per_tensor=true, as it needs whole layers",
    "lion": "is not in torch; name an elementwise class of yours by its dotted path, for example lion_pytorch.Lion",
    "muadam": "needs the package mup; name its class by its dotted path, mup.MuAdam",
    "muadamw": "needs the package mup; name its class by its dotted path, mup.MuAdamW",
    "musgd": "needs the package mup; name its class by its dotted path, mup.MuSGD",
}
"""Optimizers that DeepSpeed has by name and deepzero has not."""


def build_optimizer(
    config: OptimizerConfig,
    params: Iterable[Any],
    on_host: bool = False,
    stand_in: Callable[[type], type] | None = None,
    model: nn.Module | None = None,
) -> torch.optim.Optimizer:
    """The optimizer that a config asks for.

    Args:
        config: ``target`` is ``Adam``, ``AdamW``, ``CPUAdam``, any class of ``torch.optim`` by name, or a dotted path.
            ``params`` are the class's keyword arguments, and for Adam DeepSpeed's ``adam_w_mode`` and ``torch_adam``.
        params: tensors, or parameter groups as torch takes them.
        on_host: optimizer states are offloaded: ``Adam`` and ``AdamW`` without ``torch_adam`` are CPUAdam then, as they
            are DeepSpeedCPUAdam in DeepSpeed; ``torch.optim.AdamW`` stays what it is.
        stand_in: what is made for the class; a dry run's CPUAdam does no arithmetic.
        model: whose modules say which parameters are Muon's matrices.

    Returns:
        The optimizer; with ``fused=True`` where the class and the parameters' device can and the config is silent.

    Raises:
        ConfigError: an unknown name, an unknown argument (with the nearest valid one) or one that the class refuses.

    Example:
        >>> weight = torch.zeros(2, requires_grad=True)
        >>> optimizer = build_optimizer(OptimizerConfig("Adam", {"lr": "1e-4", "betas": [0.9, 0.95]}), [weight])
        >>> type(optimizer).__name__, optimizer.defaults["lr"], optimizer.defaults["weight_decay"]
        ('AdamW', 0.0001, 0.0)
    """
    # Parameters that come from a generator can be looked at only once; a list can be looked at again.
    once = lambda group: isinstance(group, Mapping) and not isinstance(group["params"], torch.Tensor)
    groups = [{**group, "params": list(group["params"])} if once(group) else group for group in params]
    given = dict(config.params)
    if "max_grad_norm" in given:
        raise ConfigError(f"{WHERE}.max_grad_norm={given['max_grad_norm']!r}: set gradient_clipping instead")
    if config.target.lower() in ("adam", "adamw"):
        cls: type[torch.optim.Optimizer] = _deepspeed_adam(config.target, given, on_host)
    else:
        cls = _find_class(config.target)
    if PER_TENSOR in given:  # a declaration for all groups, and no argument of the class
        declared = bool(convert(bool, given.pop(PER_TENSOR), f"{WHERE}.{PER_TENSOR}"))
        plain = [item for item in groups if not isinstance(item, Mapping)]
        groups = [{"params": plain}] * bool(plain) + [item for item in groups if isinstance(item, Mapping)]
        groups = [{PER_TENSOR: declared, **group} for group in groups]
    if cls is Muon and model is not None:
        groups = muon_groups(model, groups)
    if cls is CPUAdam and "adam_w_mode" in given:  # the word that DeepSpeed's JSON has for the argument
        if "adamw_mode" in given:
            raise ConfigError(f"{WHERE} has both adam_w_mode and adamw_mode, which are the same; keep one")
        given["adamw_mode"] = given.pop("adam_w_mode")
    arguments = _read_arguments(cls, given)
    if isinstance(rate := arguments.get("lr"), float) and rate < 0:
        raise ConfigError(f"{WHERE}.lr={rate!r}: must not be negative")
    if _fused_by_default(cls, arguments, groups):
        arguments["fused"] = True
    try:
        return (cls if stand_in is None else stand_in(cls))(groups, **arguments)
    except (ValueError, TypeError, RuntimeError) as error:
        told = {name: f"{name}={value!r}" for name, value in arguments.items()}
        null = "; lr is null: give a number, or leave it out" if arguments.get("lr", 0) is None else ""
        # torch's refusals, and CPUAdam's, begin with what they are about.
        about = "lr" if null else str(error).removeprefix("param_groups[0]: ").removeprefix("Invalid ")
        key = next((f"{WHERE}.{told[name]}: " for name in told if about.startswith(name.rstrip("s"))), "")
        listed = ", ".join(told.values())
        raise ConfigError(f"{key}optimizer {config.target}({listed}) cannot be built: {error}{null}") from error


def _deepspeed_adam(target: str, given: dict[str, Any], on_host: bool) -> type[torch.optim.Optimizer]:
    """DeepSpeed's reading of ``Adam`` and ``AdamW``; takes the arguments that torch has not out of ``given``."""

    def flag(name: str, default: bool) -> bool:
        return bool(convert(bool, given.pop(name, default), f"{WHERE}.{name}"))

    decoupled = flag("adam_w_mode", True)
    if target.lower() == "adamw" and not decoupled:
        # DeepSpeed drops the switch without a word here.
        raise ConfigError(f"{WHERE}.adam_w_mode=False contradicts optimizer {target!r}; use Adam for Adam's L2 decay")
    if not (torchs := flag("torch_adam", False)):
        given.setdefault("weight_decay", 0.0)  # the default of DeepSpeed's own kernels
    if on_host and not torchs and not any(given.get(name) for name in TORCH_ALONE):
        for name in TORCH_ALONE:  # false or null: what CPUAdam does anyway
            given.pop(name, None)
        given["adamw_mode"] = decoupled
        flag("set_grad_none", True)
        return CPUAdam
    for name, meaning in (
        ("bias_correction", "torch's Adam always corrects the bias"),
        ("fp32_optimizer_states", "deepzero keeps optimizer states in fp32"),
        ("set_grad_none", "deepzero frees gradients after each step"),
    ):
        if not flag(name, True):
            raise ConfigError(f"{WHERE}.{name}=False is not implemented: {meaning}")
    return torch.optim.AdamW if decoupled else torch.optim.Adam


def _find_class(target: str) -> type[torch.optim.Optimizer]:
    if target.lower() in NOT_HERE:
        raise ConfigError(f"optimizer {target!r} {NOT_HERE[target.lower()]}")
    if "." not in target:
        known = {name.lower(): cls for name, cls in vars(torch.optim).items() if _is_optimizer(cls)}
        known.update(cpuadam=CPUAdam, deepspeedcpuadam=CPUAdam, muon=Muon)
        if target.lower() in known:
            return known[target.lower()]
        near = difflib.get_close_matches(target.lower(), known, n=1)
        hint = f" Did you mean {known[near[0]].__name__!r}?" if near else ""
        names = ", ".join(sorted({cls.__name__ for cls in known.values()}))
        raise ConfigError(f"unknown optimizer {target!r}.{hint} Known: {names}, or the dotted path of a class")
    module, _, name = target.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"optimizer {target!r} cannot be imported: {error}") from error
    if not _is_optimizer(found):
        raise ConfigError(f"optimizer {target!r} is not a subclass of torch.optim.Optimizer, but {found!r}")
    return found


def _is_optimizer(thing: object) -> bool:
    return isinstance(thing, type) and issubclass(thing, torch.optim.Optimizer) and thing is not torch.optim.Optimizer


def _read_arguments(cls: type[torch.optim.Optimizer], given: Mapping[str, Any]) -> dict[str, Any]:
    """Check the names against the class's signature, and read numbers that YAML or JSON left as strings and lists."""
    accepted = [p for name, p in inspect.signature(cls).parameters.items() if name != "params"]
    defaults = {p.name: p.default for p in accepted if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    open_ended = any(p.kind is p.VAR_KEYWORD for p in accepted)
    if cls in (CPUAdam, Muon):  # their open ends take these, and nothing else
        defaults, open_ended = {**defaults, **cls.switches}, False
    if (unknown := [name for name in given if name not in defaults]) and not open_ended:
        raise unknown_key(unknown[0], defaults, WHERE)
    defaults |= {name: 0.0 for name in ("lr", "muon_lr", "adam_lr") if name in defaults}
    return {name: _read_value(value, defaults.get(name), f"{WHERE}.{name}") for name, value in given.items()}


def _read_value(value: Any, default: Any, path: str) -> Any:
    """``value`` in the kind of ``default``, where that is a kind that YAML and JSON can miss."""
    if value is None or isinstance(value, torch.Tensor):
        return value
    if isinstance(default, bool):
        return convert(bool, value, path)
    if isinstance(default, (int, float)):
        number = convert(float, value, path)
        if isinstance(default, float):
            return number
        # A default of 0 says nothing: momentum's is 0 and 0.9 is meant; what counts something has to stay an integer.
        return int(number) if isinstance(value, (int, str)) and number.is_integer() else number
    if isinstance(default, tuple):
        if not isinstance(value, (list, tuple)) or len(value) != len(default):
            raise ConfigError(f"{path}={value!r} must be a list of {len(default)} numbers, like {list(default)}")
        return tuple(v if isinstance(v, torch.Tensor) else convert(float, v, path) for v in value)
    return value


def _fused_by_default(cls: Any, arguments: Mapping[str, Any], groups: Sequence[Any]) -> bool:
    torchs = cls.__module__.startswith("torch.optim.") and "fused" in inspect.signature(cls).parameters
    chosen = any(arguments.get(name) is not None for name in ("fused", "foreach")) or arguments.get("differentiable")
    if chosen or not (torchs or cls is Muon):
        return False
    tensors = [param for group in as_groups(groups) for param in group["params"]]
    kinds = {(tensor.device.type, tensor.is_floating_point()) for tensor in tensors}
    return bool(kinds) and all(floating and _fused_works(cls, device) for device, floating in kinds)


@functools.cache
def _fused_works(cls: Any, device: str) -> bool:
    """One step on one element: torch says no either when it builds or when it steps."""
    try:
        probe = torch.zeros(1, device=device, requires_grad=True)
        probe.grad = torch.zeros_like(probe)
        cls([probe], lr=0.0, fused=True).step()
    except (RuntimeError, NotImplementedError):
        return False
    return True
