"""Numbers, sizes, times and nested settings as people read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def short_number(value: float) -> str:
    """Three digits and a suffix.

    Example:
        >>> short_number(842_496), short_number(12.0), short_number(1.3e9)
        ('842k', '12', '1.3G')
    """
    for suffix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g}{suffix}"
    return f"{value:.3g}"


def short_bytes(value: float) -> str:
    """Decimal units, as the sources count.

    Example:
        >>> short_bytes(1_684_992), short_bytes(0)
        ('1.685 MB', '0 B')
    """
    for suffix, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.4g} {suffix}"
    return f"{value:.4g} B"


def binary_bytes(size: int) -> str:
    """Binary units, as memory is sold.

    Example:
        >>> binary_bytes(82_240), binary_bytes(7 * 2**30)
        ('80.3 KiB', '7 GiB')
    """
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size} B"


def short_seconds(value: float) -> str:
    """A time with its unit.

    Example:
        >>> short_seconds(0.0361), short_seconds(12.34), short_seconds(0.00002)
        ('36.1 ms', '12.3 s', '20 µs')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return "0 s" if value == 0 else f"{value:.1e} s"


def flatten(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of nested mappings under dotted keys; an empty mapping is a leaf.

    Example:
        >>> flatten({"zero": {"stage": 0}, "seed": 1})
        {'zero.stage': 0, 'seed': 1}
    """
    found: dict[str, Any] = {}
    for key, value in mapping.items():
        found |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {prefix + key: value}
    return found


def text_columns(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Lines of a table: cells padded to the width of their column, the first ``left`` columns to the left.

    Example:
        >>> text_columns([["run", "loss"], ["a", "2.5"]])
        ['run  loss', 'a     2.5']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:{'<' if k < left else '>'}{w}}" for k, (cell, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
