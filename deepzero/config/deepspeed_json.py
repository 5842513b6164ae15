"""DeepSpeed's JSON config, read strictly into :class:`~deepzero.config.engine.EngineConfig`.

Every key is one of three things: implemented, and read; in one of the tables of :mod:`deepzero.config.deepspeed_keys`,
which say for what values it has nothing to ask for, or to change; or refused, by name, with the list of what is
implemented. What is read may have nothing to say in a stage, or beside a switch that is off. DeepSpeed ignores unknown
keys at the top level: a misspelt ``gradient_cliping`` trains for a week. Our own extension is the block ``comm``.
"""

from __future__ import annotations

import base64
import difflib
import functools
import importlib
import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from deepzero.config import deepspeed_keys as keys
from deepzero.config.engine import EngineConfig, OptimizerConfig, PrecisionConfig, SchedulerConfig
from deepzero.config.strict import ConfigError, build, convert, unknown_key
from deepzero.config.zero import OffloadOptimizerConfig, OffloadParamConfig, ZeroConfig
from deepzero.utils.formatting import flatten

_SCALARS = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
    "steps_per_print",
)  # fmt: skip
_IMPLEMENTED = (
    *_SCALARS, "activation_checkpointing", "checkpoint", "zero_optimization", "fp16", "bf16", "comm",
    "optimizer", "scheduler", "data_types", "communication_data_type", "dataloader_drop_last",
)  # fmt: skip
DTYPE_NAMES = {
    **dict.fromkeys(("fp32", "float32", "float"), "fp32"),
    **dict.fromkeys(("fp16", "float16", "half"), "fp16"),
    **dict.fromkeys(("bf16", "bfloat16", "bfp16"), "bf16"),
}
_QUOTE_OR_KEY = re.compile(
    r"""(?<![\w./-])((['"`])(\\.|(?!\2)[^\\])*\2|precision(\.dtype)?=\w+|(zero|precision)(\.\w+)+)(?![\w/])"""
)
log = logging.getLogger(__name__)
T = TypeVar("T")


def load_engine_config(config: EngineConfig | Mapping[str, Any] | str | os.PathLike[str] | None) -> EngineConfig:
    """Whatever ``deepzero.initialize(config=…)`` was given, as an :class:`EngineConfig`.

    Args:
        config: an EngineConfig, or what :func:`read_mapping` takes.

    Raises:
        ConfigError: a file that is missing or is not JSON, or a setting that cannot be used.

    Example:
        >>> load_engine_config({"train_batch_size": 8, "zero_optimization": {"stage": 2}}).zero.stage
        2
    """
    return config if isinstance(config, EngineConfig) else _in_json_words(_read, read_mapping(config))


def load_zero_config(config: EngineConfig | Mapping[str, Any] | str | os.PathLike[str] | None) -> ZeroConfig:
    """``zero_optimization`` alone, for ``zero.Init``: it comes before a trainer has filled in batch sizes and rates.

    Example:
        >>> load_zero_config({"train_batch_size": "auto", "zero_optimization": {"stage": 3}}).stage
        3
    """
    return config.zero if isinstance(config, EngineConfig) else _in_json_words(_read_zero, read_mapping(config))


def load_block(config: EngineConfig | Mapping[str, Any] | str | os.PathLike[str], name: str) -> Any:
    """One block alone: ``activation_checkpointing``, for ``checkpointing.configure``; ``comm``, for ``zero.Init``."""
    if not isinstance(config, EngineConfig):
        config = load_engine_config({name: read_mapping(config).get(name)})
    return getattr(config, name)


def read_mapping(config: Mapping[str, Any] | str | os.PathLike[str] | None) -> Mapping[str, Any]:
    """A DeepSpeed config as a mapping: one, a file's path, or the base64 text of such a file (launchers pass that).

    A file is JSON, or Hjson where the package ``hjson`` is installed.

    Raises:
        ConfigError: None, a file that is missing or cannot be parsed, a key twice in one object, no object.
    """
    if config is None:
        raise ConfigError("initialize needs config=: a DeepSpeed-style dict, a JSON file's path, or an EngineConfig")
    if isinstance(config, (str, os.PathLike)):
        config = _parsed(*_text_of(config))
    if not isinstance(config, Mapping):
        raise ConfigError(f"config must be a mapping or the path of a JSON file, got {type(config).__name__}")
    return config


def _in_json_words(read: Callable[[Mapping[str, Any]], T], mapping: Mapping[str, Any]) -> T:
    """Read the mapping; errors name the JSON's keys."""
    try:
        return read(mapping)
    except ConfigError as error:
        raise ConfigError(in_json_words(str(error))) from None


def in_json_words(text: str) -> str:
    """An error's text with the JSON's keys: the dataclasses name them as the command line does. Quotes stay."""
    of_zero = [part for key in flatten(asdict(ZeroConfig())) for part in (key, key.partition(".")[0])]
    words = {f"zero.{key}": f"zero_optimization.{key}" for key in of_zero}
    words |= {f"precision.{field.name}": f"fp16.{field.name}" for field in fields(PrecisionConfig)}
    words |= {"precision.check_grad_overflow": "bf16.check_grad_overflow", "precision.dtype": "bf16 or fp16"}
    words |= {f"precision{key}={name}": f"{name}.enabled=true" for key in ("", ".dtype") for name in ("bf16", "fp16")}
    words |= dict.fromkeys(("precision=fp32", "precision.dtype=fp32"), "fp32")
    return _QUOTE_OR_KEY.sub(lambda found: words.get(found[0], found[0]), text)


def _text_of(config: str | os.PathLike[str]) -> tuple[str, str]:
    """A name for messages and the text itself, of a file or of the base64 of one."""
    path = Path(config)
    try:
        return f"config {str(path)!r}", path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # no text in UTF-8, or no path
        try:
            text = base64.urlsafe_b64decode(os.fspath(config)).decode()
        except ValueError:
            text = ""
        if text.lstrip().startswith("{"):
            return "config, a base64 text,", text
        raise ConfigError(f"config {str(path)!r} cannot be read: {getattr(error, 'strerror', error)}") from None


def _parsed(name: str, text: str) -> Any:
    pairs = partial(_refuse_duplicates, name)
    try:
        return json.loads(text, object_pairs_hook=pairs)
    except json.JSONDecodeError as error:
        try:
            hjson = importlib.import_module("hjson")
        except ImportError:
            advice = "if it is meant to be Hjson, with comments or without quotes, install the package hjson"
            raise ConfigError(f"{name} is not JSON: {error}; {advice}, or write JSON") from None
    try:
        return hjson.loads(text, object_pairs_hook=pairs)
    except hjson.HjsonDecodeError as error:
        raise ConfigError(f"{name} is neither JSON nor Hjson: {error}") from None


def _refuse_duplicates(name: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [key for key, _ in pairs]
    if twice := sorted(key for key in names if names.count(key) > 1):
        raise ConfigError(f"{name} has {twice[0]!r} twice in one object: leave one out")
    return dict(pairs)


@functools.cache
def _say(text: str) -> None:
    """Once, and on the first rank: what a setting does not do here, where that changes no result."""
    if os.environ.get("RANK", "0") == "0":
        log.warning("%s (said once)", text)


def _read(mapping: Mapping[str, Any]) -> EngineConfig:
    zero = _read_zero(mapping)
    # Of the keys that nobody knows, which DeepSpeed passes over here, those that can be no misspelt ones are comments.
    given = _renamed({key: mapping[key] for key in mapping if not str(key).startswith(("_", "//", "#"))}, "")
    for path in keys.DOTTED:
        if (value := given.pop(path, None)) is not None:
            convert(float, value, path)
            outer, _, inner = path.partition(".")
            _say(f'{path!r}, one key with a dot, changes nothing; write "{outer}": {{"{inner}": …}} where it is meant')
    given = _settled(given, "")
    if isinstance(given.get("zero_optimization"), bool):
        given.pop("allgather_size", None)
    _only(given, _IMPLEMENTED, "")
    for key in _SCALARS:
        if given.get(key) == "auto":
            raise ConfigError(f'{key}="auto" is for a trainer to fill in; write a number')
    if given.get("steps_per_print") == math.inf:
        del given["steps_per_print"]  # as accelerate writes never
    settings: dict[str, Any] = {
        key: given[key] for key in (*_SCALARS, "dataloader_drop_last") if given.get(key) is not None
    }
    settings["zero"], settings["precision"] = zero, _precision(given)
    if given.get("activation_checkpointing") is False:  # as some write off
        del given["activation_checkpointing"]
    settings |= {name: _block(given, name) for name in ("activation_checkpointing", "comm")}
    for name, kind in (("optimizer", OptimizerConfig), ("scheduler", SchedulerConfig)):
        if given.get(name) not in (None, {}):
            settings[name] = kind(*_typed(given, name))
    known = [name.removeprefix("checkpoint.") for name in keys.SATISFIED if name.startswith("checkpoint.")]
    saved = _block(given, "checkpoint")
    settings["load_universal"] = convert(bool, saved.pop("load_universal", False), "checkpoint.load_universal")
    _only(saved, [*known, "load_universal"], "checkpoint")
    types = _block(given, "data_types")
    _only(types, ["grad_accum_dtype"], "data_types")
    for block, path in ((types, "data_types.grad_accum_dtype"), (given, "communication_data_type")):
        if (value := block.get(key := path.rpartition(".")[2])) is not None:
            # As DeepSpeed takes them: in any case, also as torch's own, by name or as an object.
            if (name := str(value).lower().removeprefix("torch.")) not in DTYPE_NAMES:
                raise ConfigError(f"{path}={value!r} is not one of {', '.join(sorted(DTYPE_NAMES))}")
            settings[key] = DTYPE_NAMES[name]
    return build(EngineConfig, settings)


def _read_zero(mapping: Mapping[str, Any]) -> ZeroConfig:
    return build(ZeroConfig, _zero_block(mapping), "zero_optimization")


def _only(given: Iterable[str], known: Iterable[str], where: str) -> None:
    for key in given:
        if key not in known:
            raise unknown_key(key, known, where)


def _renamed(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    """With every key under the spelling that is read here."""
    kept: dict[str, Any] = {}
    for key, value in block.items():
        if (name := keys.OLDER.get(f"{where}{key}", key)) in kept:
            raise ConfigError(f"{where}{name} is given twice, under two of its names; give it once")
        kept[name] = value
    return kept


def _settled(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Without the keys of the tables, whose values ask for nothing that deepzero has not; the others are refused."""
    kept = {}
    for key, value in block.items():
        path = f"{where}{key}"
        one_machine = os.environ.get("WORLD_SIZE") == os.environ.get("LOCAL_WORLD_SIZE")
        if path == "checkpoint.use_node_local_storage" and value is True and one_machine:
            continue  # its disk is the folder that all ranks see
        if value is None and path in {**keys.SATISFIED, **keys.STEERING, **keys.MOOT}:
            continue
        if path in keys.MOOT:
            _check_moot(path, value)
        elif path in keys.SATISFIED:
            values, why = keys.SATISFIED[path]
            if value not in values:
                allowed = " or ".join(map(json.dumps, values))
                raise ConfigError(f"{path}={value!r} is not implemented: leave it at {allowed} ({why})")
        elif path in keys.STEERING:
            default, why = keys.STEERING[path]
            if convert(type(default), value, path) != default:
                _say(f"{path}={value!r} changes nothing in deepzero: {why}")
        elif path in keys.SWITCHED_OFF:
            _check_off(path, value)
        elif path in keys.NOT_IMPLEMENTED:
            if _asks(path, value):
                raise _not_implemented(path, "leave it out")
        else:
            kept[key] = value
    return kept


def _check_moot(path: str, value: Any) -> None:
    """Say that a key changes nothing, once its value is of the right kind and asks for nothing."""
    kind, what = keys.MOOT[path]
    given = convert(kind, value, path)
    _check_inside(path, given)
    stages = given.get("stages") if path == "pipeline" else None
    if stages not in (None, "auto") and convert(int, stages, "pipeline.stages") > 1:
        raise ConfigError(f"pipeline.stages={stages!r} is not implemented: leave it out, each rank has the whole model")
    if given:
        _say(f"{path} changes nothing in deepzero: it concerns {what} alone")


def _check_off(path: str, value: Any) -> None:
    """Refuse a block of what deepzero has not, unless its switch is off."""
    if value is None or value is False:
        return
    switch, off = keys.SWITCH.get(path, ("enabled", (False,)))
    if not isinstance(value, Mapping) or (value.get(switch) and value[switch] not in off):
        raise _not_implemented(path, f'leave it out, or set "{switch}": {json.dumps(off[0])}')
    _check_inside(path, value)
    _check_inside(f"{path}.tp", value.get("tp"))


def _check_inside(path: str, block: Any) -> None:
    """Refuse a word that is not among those of a block of this path, if it has a list of them."""
    for key in block if path in keys.INSIDE and isinstance(block, Mapping) else ():
        if key not in keys.INSIDE[path]:
            raise ConfigError(f"unknown config key {f'{path}.{key}'!r}; DeepSpeed's are {', '.join(keys.INSIDE[path])}")


def _asks(path: str, value: Any) -> bool:
    """Whether a key of what deepzero has not asks for anything: false, null, nothing and a block that is off do not."""
    if path in keys.BY_PRESENCE:
        return value is not None and not any(value is off for off in keys.BY_PRESENCE[path])
    if isinstance(value, Mapping):
        return bool(value["enabled"]) if "enabled" in value else any(_asks(path, inner) for inner in value.values())
    return bool(value)


def _not_implemented(path: str, advice: str) -> ConfigError:
    instead = f": {keys.INSTEAD[path]}" if path in keys.INSTEAD else ""
    return ConfigError(f"{path!r} is a DeepSpeed key that deepzero does not implement; {advice}{instead}")


def _block(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    if (value := given.get(name)) is None:
        return {}
    if not isinstance(value, Mapping):
        switch = isinstance(value, bool) and name in ("bf16", "bfloat16", "fp16")
        example = ', like {"stage": 2}' if name == "zero_optimization" else ""
        example = f', like {{"enabled": {json.dumps(value)}}}' if switch else example
        raise ConfigError(f"{name}={value!r} must be an object with settings{example}")
    if value.get("enabled") == "auto":
        raise ConfigError(f'{name}.enabled="auto" is for a trainer to fill in; write true or false')
    return _settled(_renamed(_chosen(value), f"{name}."), f"{name}.")


def _chosen(block: Mapping[str, Any]) -> dict[str, Any]:
    """Without "auto", which is how Hugging Face's trainer writes "take the default"."""
    return {key: value for key, value in block.items() if value is not None and value != "auto"}


def _zero_block(given: Mapping[str, Any]) -> dict[str, Any]:
    """``zero_optimization``, in all its formats, with what its stage makes of the blocks."""
    if isinstance(given.get("zero_optimization"), bool):
        _say("zero_optimization=true or false is DeepSpeed's first format, of stage 1 alone; write an object")
        size = given.get("allgather_size")
        return {"stage": 1, **_chosen({"allgather_bucket_size": size})} if given["zero_optimization"] else {}
    zero = _block(given, "zero_optimization")
    pin = "cpu_offload_use_pin_memory"
    pinned = convert(bool | None, zero.pop(pin, None), f"zero_optimization.{pin}")
    for older, name in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if older in zero and convert(bool, zero.pop(older), f"zero_optimization.{older}"):
            if zero.get(name) is not None:
                raise ConfigError(f"zero_optimization.{older} is the older word for {name}; keep {name}")
            zero[name] = {"device": "cpu"} if pinned is None else {"device": "cpu", "pin_memory": pinned}
    for name, kind in (("offload_optimizer", OffloadOptimizerConfig), ("offload_param", OffloadParamConfig)):
        if name in zero:
            zero[name] = _offload_block(zero[name], kind, f"zero_optimization.{name}")
    _fit_to_stage(zero, convert(int, zero.get("stage", 0), "zero_optimization.stage"))
    return zero


def _fit_to_stage(zero: dict[str, Any], stage: int) -> None:
    """What DeepSpeed does without a word where a stage needs something else than the block says; here it is said."""
    if stage != 1 and zero.get("reduce_scatter") is False:
        del zero["reduce_scatter"]
        _say(f"zero_optimization.reduce_scatter=False is stage 1's: stage {stage} has one way to the same sums")
    if zero.get("offload_param") and stage < 3:
        del zero["offload_param"]
        _say(f"zero_optimization.offload_param is stage 3's: in stage {stage} parameters stay on the device")
    if zero.get("offload_param") and not zero.get("offload_optimizer"):
        _say("zero_optimization.offload_param takes offload_optimizer along: masters stay where their parameters are")
        both = ("device", "pin_memory", "nvme_path")
        zero["offload_optimizer"] = {key: value for key, value in zero["offload_param"].items() if key in both}


def _offload_block(block: Any, kind: type, where: str) -> dict[str, Any]:
    """One of the two blocks; what concerns NVMe alone has nothing to say where the device is the CPU, or none."""
    if not isinstance(block, Mapping):
        raise ConfigError(f'{where}={block!r} must be an object with settings, like {{"device": "cpu"}}')
    given, hints = _settled(_chosen(block), f"{where}."), get_type_hints(kind) | keys.NVME_MOOT
    moot = keys.NVME_MOOT if given.get("device") == "nvme" else keys.NVME_ALONE
    kept = {key: value for key, value in given.items() if key not in moot or key not in hints}
    for key in hints.keys() & (given.keys() - kept.keys()):
        convert(hints[key], given[key], f"{where}.{key}")
    on = kept.get("device", "none") != "none"
    # What is switched off is checked too, so that switching it on later brings no surprise.
    delayed = {"delayed_update": True} if "delay_after_steps" in kept else {}
    build(kind, kept if on else {**kept, "device": "cpu", **delayed}, where)
    return kept if on else {}


def _precision(given: Mapping[str, Any]) -> PrecisionConfig:
    bf16, fp16 = _block(given, "bf16"), _block(given, "fp16")
    use_bf16 = convert(bool, bf16.pop("enabled", False), "bf16.enabled")
    use_fp16 = convert(bool, fp16.pop("enabled", False), "fp16.enabled")
    if use_bf16 and use_fp16:
        raise ConfigError("bf16.enabled and fp16.enabled are both true; choose one")
    _only(bf16, ["enabled", "check_grad_overflow"], "bf16")
    of_scales = [f.name for f in fields(PrecisionConfig) if f.name not in ("dtype", "check_grad_overflow")]
    _only(fp16, ["enabled", *of_scales], "fp16")
    # A block that is present but not enabled is still checked, so that enabling it later brings no surprise.
    checked = build(PrecisionConfig, {**fp16, "dtype": "fp16"}, "fp16")
    skips = convert(bool, bf16.get("check_grad_overflow", False), "bf16.check_grad_overflow")
    if use_fp16 and checked.loss_scale and (idle := [name for name in fp16 if name not in ("loss_scale", "auto_cast")]):
        _say(f"fp16.loss_scale={checked.loss_scale:g} is fixed, and {', '.join(idle)} says nothing")
    other = PrecisionConfig("bf16", check_grad_overflow=skips) if use_bf16 else PrecisionConfig()
    return checked if use_fp16 else other


def _typed(given: Mapping[str, Any], name: str) -> tuple[str, dict[str, Any]]:
    block = given[name]
    if not isinstance(block, Mapping) or not isinstance(block.get("type"), str):
        raise ConfigError(f'{name} must be an object like {{"type": …, "params": {{…}}}}, got {block!r}')
    known, settled = ("type", "params"), _settled(block, f"{name}.")
    for key in settled:
        if key not in known and not difflib.get_close_matches(str(key), known):
            where = f'settings of the {name} itself stand in "params": {{"type": …, "params": {{"{key}": …}}}}'
            raise ConfigError(f"unknown config key {f'{name}.{key}'!r}: {where}")
    _only(settled, known, name)
    params = block.get("params") or {}
    if not isinstance(params, Mapping):
        raise ConfigError(f"{name}.params={params!r} must be an object with settings")
    for key, value in params.items():
        if value == "auto":
            raise ConfigError(f'{name}.params.{key}="auto" is for a trainer to fill in; write its value')
    return block["type"], dict(params)
