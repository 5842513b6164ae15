"""Names of the installed DeepSpeed that a script can see, by introspection: rows of ``tools.deepspeed_surface``."""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import os
import pkgutil
import re
from collections.abc import Mapping
from typing import Any

Z = "deepspeed.runtime.zero"
VERSION = re.compile("__(version(_major|_minor|_patch)?|git_hash|git_branch)__")


at = pkgutil.resolve_name  # what a dotted path leads to: a module, or a name in one


def collect(modules: Mapping[str, str], calls: Mapping[str, str]) -> dict[str, Any]:
    """Area → names, or key → default for the configuration, of the DeepSpeed that is installed."""
    one = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    os.environ.update(one | {"DS_ACCELERATOR": "cpu"})
    deepspeed = importlib.import_module("deepspeed")
    areas: dict[str, Any] = {name: _public(at(name), taken) for name, taken in modules.items()}
    for path in (f"{home}.{name}" for home, names in calls.items() for name in names.split()):
        taken = inspect.signature(at(path)).parameters.items()
        names = [key for key, one in taken if key != "self" and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
        areas |= {f"{path}()": names} if names else {}
    kinds = {
        "engine": deepspeed.DeepSpeedEngine,
        "optimizer of stages 1 and 2": at(f"{Z}.stage_1_and_2.DeepSpeedZeroOptimizer"),
        "optimizer of stage 3": at(f"{Z}.stage3.DeepSpeedZeroOptimizer_Stage3"),
    }
    for title, kind in kinds.items():
        bases = [base for base in kind.__mro__ if base.__module__.startswith("deepspeed")]
        areas[title] = sorted({name for base in bases for name in vars(base) if name[0] != "_"})
    areas["accelerator"] = [name for name in dir(deepspeed.get_accelerator()) if name[0] != "_"]
    with deepspeed.zero.Init(config_dict_or_path={"train_batch_size": 1}):
        layer = importlib.import_module("torch").nn.Linear(8, 8)
    areas["parameter of stage 3"] = sorted(name for name in vars(layer.weight) if name[0] != "_")
    areas["configuration"] = keys_of(at("deepspeed.runtime.config.DeepSpeedConfig"))
    return {"deepspeed": deepspeed.__version__, "areas": areas}


def _public(module: Any, taken: str) -> list[str]:
    """Its names that are DeepSpeed's own: classes, functions, constants; of a package what it takes from below too."""
    package, found = hasattr(module, "__path__"), set()
    for name, value in vars(module).items():
        home = str(getattr(value, "__module__", ""))
        if inspect.ismodule(value):
            # Modules are rows of the top alone; those that matter have a table of their own.
            own = module.__name__ == "deepspeed" and value.__name__.startswith("deepspeed")
        elif inspect.isclass(value) or inspect.isroutine(value):
            own = home == module.__name__ or (package and home.startswith("deepspeed"))
        else:
            constant = isinstance(value, (str, list, logging.Logger)) or VERSION.fullmatch(name)
            own = constant and not (package and name.isupper())
        if own and (VERSION.fullmatch(name) or (name[0] != "_" and re.fullmatch(taken, name))):
            found.add(name)
    return sorted(found)


class _Seen(dict[str, Any]):
    """A block of a configuration that notes which keys are asked for, with the default that the question names."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.asked: dict[str, Any] = {}

    def get(self, key: Any, default: Any = None) -> Any:
        self.asked[key] = default
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.asked.setdefault(str(key), None)
        return super().__contains__(key)

    def keys(self) -> Any:  # ``key in block.keys()`` asks as well
        return self


def keys_of(kind: Any) -> dict[str, Any]:
    """Every key that ``DeepSpeedConfig`` asks for, by dotted path, with its default: at the top, and in each block."""
    top = _Seen({"train_batch_size": 1})
    kind(top)
    found: dict[str, Any] = {}
    for key, default in top.asked.items():
        block, fields = _Seen(), {}
        try:
            kind({"train_batch_size": 1, key: block})
            kind({"train_batch_size": 1, key: {"no such key": 1}})
        except Exception as error:  # a block of pydantic's refuses what it does not know, and says which class it is
            fields = _fields(getattr(error, "title", ""), key)
        fields = fields or {f"{key}.{name}": value for name, value in block.asked.items()}
        # The monitors' four blocks are fields of one class.
        own = {name.replace(f"{key}.", "", 1): at for name, at in fields.items() if name.startswith(f"{key}.{key}.")}
        found |= own or fields or {key: default}
    return {key: json.loads(json.dumps(value, default=str)) for key, value in sorted(found.items())}


def _fields(model: Any, where: str) -> dict[str, Any]:
    """The fields of a class of pydantic's, or of DeepSpeed's with this name."""
    kinds = [at("deepspeed.runtime.config_utils.DeepSpeedConfigModel")]
    for kind in kinds:
        kinds.extend(kind.__subclasses__())
    found: dict[str, Any] = {}
    for kind in (one for one in kinds if model in (one, one.__name__)):
        for name, field in kind.model_fields.items():
            key, kept = f"{where}.{field.alias or name}", field.annotation
            inner = [part for part in (kept, *getattr(kept, "__args__", ())) if hasattr(part, "model_fields")]
            found |= _fields(inner[0], key) if inner else {key: field.get_default(call_default_factory=True)}
    return found
