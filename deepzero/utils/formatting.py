"""Numbers, sizes, times and nested settings as people read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def _in_units(value: float, units: Sequence[tuple[str, float]], digits: int = 3) -> str:
    """So many digits, and the first of the units of which there is one, as rounded, or the last."""
    unit, size = next((one for one in units if abs(float(f"{value / one[1]:.{digits}g}")) >= 1), units[-1])
    scaled = value / size
    return (f"{scaled:.{digits}g}" if abs(scaled) < 10**digits - 0.5 else f"{scaled:.0f}") + unit


def short_number(value: float) -> str:
    """Three digits and a suffix.

    Example:
        >>> short_number(842_496), short_number(12.0), short_number(1.3e9), short_number(999_999)
        ('842k', '12', '1.3G', '1M')
    """
    return _in_units(value, (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1)))


def short_bytes(value: float) -> str:
    """Decimal units, as the sources count.

    Example:
        >>> short_bytes(1_684_992), short_bytes(0), short_bytes(16e12)
        ('1.685 MB', '0 B', '16 TB')
    """
    return _in_units(value, ((" TB", 1e12), (" GB", 1e9), (" MB", 1e6), (" kB", 1e3), (" B", 1)), digits=4)


def binary_bytes(size: int) -> str:
    """Binary units, as memory is sold.

    Example:
        >>> binary_bytes(82_240), binary_bytes(7 * 2**30), binary_bytes(2**41), binary_bytes(1023 * 2**20)
        ('80.3 KiB', '7 GiB', '2 TiB', '1023 MiB')
    """
    return _in_units(size, ((" TiB", 2**40), (" GiB", 2**30), (" MiB", 2**20), (" KiB", 2**10), (" B", 1)))


def short_seconds(value: float) -> str:
    """A time with its unit.

    Example:
        >>> short_seconds(0.0361), short_seconds(12.34), short_seconds(0.00002), short_seconds(12345)
        ('36.1 ms', '12.3 s', '20 µs', '3.43 h')
    """
    units = ((" h", 3600), (" s", 1), (" ms", 1e-3), (" µs", 1e-6), (" ns", 1e-9))
    return _in_units(value, units) if value else "0 s"


def listed(names: Sequence[str]) -> str:
    """The first three names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


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
