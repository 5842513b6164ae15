"""Types for argparse: a bad number gets argparse's line with the option's name, not a traceback."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def positive(text: str) -> int:
    """An integer of at least 1."""
    return multiple_of(1)(text)


def multiple_of(unit: int) -> Callable[[str], int]:
    """An argparse type: a positive multiple of ``unit``.

    Example:
        >>> multiple_of(64)("128")
        128
    """

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = 0
        if value < 1 or value % unit:
            what = "an integer of at least 1" if unit == 1 else f"a positive multiple of {unit}"
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return value

    return read
