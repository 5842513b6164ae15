"""Mappings in, frozen dataclasses out: the one strict reader behind the JSON config and the Hydra config.

Every config dataclass of deepzero is read by :func:`build`. It refuses what it does not know (a misspelt key that is
silently ignored trains the wrong model for a week), names the full path of the offending key, and suggests the nearest
valid one. Values are converted only where nothing can be lost: ``5e8`` is an int where an int is wanted, ``"5e8"`` too
(YAML 1.1 reads ``5e8`` as a string), ``0.5`` is not.

Source: [torchtitan], for dataclasses that check themselves.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from deepzero.utils.errors import ConfigError

T = TypeVar("T")


def require(ok: bool, path: str, value: object, rule: str) -> None:
    """Raise a :class:`ConfigError` that names key, value and rule unless ``ok``."""
    if not ok:
        raise ConfigError(f"{path}={value!r}: {rule}")


@dataclasses.dataclass(frozen=True)
class AtLeast:
    """The least value of a number, or of a tuple's, in the annotation: ``steps: Annotated[int, AtLeast(1)] = 400``."""

    least: int
    of: str = ""
    """What follows in the message."""


Count = Annotated[int, AtLeast(1)]
NotNegative = Annotated[int, AtLeast(0)]


class Section:
    """A part of the settings. Its numbers have bounds; ``_check`` says, with the methods here, what else is refused."""

    where = ""
    """The section's dotted path."""

    def __post_init__(self) -> None:
        cls: type = type(self)
        for name, bound in _bounds(cls):
            value = getattr(self, name)
            rule = f"must be at least {bound.least}" if bound.least else "must not be negative"
            least = min(value, default=None) if isinstance(value, tuple) else value
            self.need(least is None or least >= bound.least, name, rule + bound.of)
        self._check()

    def _check(self) -> None:
        """Raise a :class:`ConfigError` for what no bound says."""

    def need(self, ok: bool, name: str, rule: str) -> None:
        """Raise a :class:`ConfigError` with the path of field ``name``, its value and ``rule`` unless ``ok``."""
        require(ok, f"{self.where}.{name}".lstrip("."), getattr(self, name), rule)

    def idle_unless(self, used: bool, rule: str, *names: str) -> None:
        """Refuse what would say nothing: unless ``used``, each of the fields has its default, or ``rule`` is broken."""
        for name in names:
            self.need(used or getattr(self, name) == getattr(type(self), name), name, rule)


@functools.cache
def _bounds(cls: type) -> list[tuple[str, AtLeast]]:
    """Names of fields with their bounds, those that may be None too."""
    hints = typing.get_type_hints(cls, include_extras=True).items()
    kinds = [(name, kind) for name, hint in hints for kind in (hint, *typing.get_args(hint))]
    return [(name, mark) for name, kind in kinds for mark in getattr(kind, "__metadata__", ())]


def unknown_key(key: object, valid: typing.Iterable[str], where: str) -> ConfigError:
    """The error for a key that nobody reads, with the nearest valid one and the list of all of them.

    Args:
        key: the key as the user wrote it.
        valid: the keys that are understood at this place.
        where: dotted path of the mapping that holds the key, ``""`` for the top level.
    """
    names, prefix = sorted(valid), f"{where}." if where else ""
    near = difflib.get_close_matches(str(key), names, n=1, cutoff=0.6)
    hint = f" Did you mean {prefix + near[0]!r}?" if near else ""
    return ConfigError(f"unknown config key {f'{prefix}{key}'!r}.{hint} Implemented here: {', '.join(names)}")


def build(cls: type[T], mapping: Mapping[str, Any], where: str = "") -> T:
    """Read ``mapping`` into the dataclass ``cls``, strictly.

    Args:
        cls: a dataclass; nested dataclass fields are read from nested mappings.
        mapping: keys must be names of fields of ``cls``; missing ones take the field's default.
        where: dotted path of ``mapping``, for messages.

    Raises:
        ConfigError: unknown key, wrong type, or a value that the dataclass itself refuses.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class Point:
        ...     x: int = 0
        >>> build(Point, {"x": "5e2"})
        Point(x=500)
    """
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{where or 'config'} must be a mapping of settings, got {mapping!r}")
    hints, values = typing.get_type_hints(cls), dict[str, Any]()
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key, value in mapping.items():
        if key not in fields:
            raise unknown_key(key, fields, where)
        values[key] = convert(hints[key], value, f"{where}.{key}" if where else key)
    none = dataclasses.MISSING
    if missing := [n for n, f in fields.items() if n not in values and f.default is none and f.default_factory is none]:
        raise ConfigError(f"{where or 'config'} needs {', '.join(missing)}")
    return cls(**values)


def convert(kind: Any, value: Any, path: str) -> Any:
    """One value to the annotated type of its field, or a :class:`ConfigError` that names ``path``."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin is typing.Literal:
        if value not in args:
            near = difflib.get_close_matches(str(value), [str(a) for a in args], n=1, cutoff=0.7)  # gpu is not cpu
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"{path}={value!r} is not one of {', '.join(map(str, args))}{hint}")
        return args[args.index(value)]  # not an enum's member that equals it
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        problems, kinds = [], [arg for arg in args if arg is not type(None)]
        is_list = isinstance(value, (list, tuple))
        for inner in [k for k in kinds if (typing.get_origin(k) in (tuple, list)) is is_list] or kinds:
            try:
                return convert(inner, value, path)
            except ConfigError as error:
                problems.append(str(error))
        raise ConfigError("; or ".join(problems))
    if dataclasses.is_dataclass(kind):
        return value if isinstance(value, kind) else build(kind, value, path)  # type: ignore[arg-type]
    if origin in (tuple, list):
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{path}={value!r} must be a list")
        return origin(convert(args[0], v, f"{path}[{i}]") for i, v in enumerate(value))
    if origin is dict or kind is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{path}={value!r} must be a mapping")
        return dict(value)
    return _scalar(kind, value, path)


def _scalar(kind: Any, value: Any, path: str) -> Any:
    if kind in (bool, str):
        if not isinstance(value, kind):
            raise ConfigError(f"{path}={value!r} must be {'true or false' if kind is bool else 'a string'}")
        return value
    if kind not in (int, float):
        raise TypeError(f"{path}: a config field of type {kind} has no reader")
    if isinstance(value, bool):
        raise ConfigError(f"{path}={value!r} must be a number")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{path}={value!r} must be {'an integer' if kind is int else 'a number'}") from None
    require(math.isfinite(number), path, value, f"must be {'an integer' if kind is int else 'a finite number'}")
    if kind is float:
        return number
    require(number == int(number), path, value, "must be an integer")
    whole = int(value) if isinstance(value, int) else int(number)
    require(abs(whole) < 1 << 63, path, value, "is too large for any size or count; it must fit into 64 bits")
    return whole
