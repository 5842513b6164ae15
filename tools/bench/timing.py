"""What the benchmarks share: options that are whole numbers, the time of a call, contenders in turn."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tools.bench.workload import TINY, Workload

SIZES = {"layers": "n_layer", "width": "n_embd", "heads": "n_head", "vocab": "vocab_size", "tokens": "block_size",
         "micro_batch": "micro_batch"}  # fmt: skip
"""Option to the field of :class:`Workload` that it sets."""
MODEL_OPTIONS = {option: (None, f"default {getattr(Workload, field)}") for option, field in SIZES.items()}
"""What :func:`parser_of` is given by a benchmark whose model may have other sizes."""


def multiple_of(unit: int, least: int = 1) -> Callable[[str], int]:
    """An argparse type, whose error has the option's name: a multiple of ``unit``, and at least ``least``."""

    def read(text: str) -> int:
        value = int(text) if text.lstrip("-").isdecimal() else least - 1
        if value < least or value % unit:
            what = f"an integer of at least {least}" if unit == 1 else f"a positive multiple of {unit}"
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return value

    return read


positive, natural = multiple_of(1), multiple_of(1, least=0)


def parser_of(command: str, doc: str | None, **numbers: tuple[int | None, str]) -> argparse.ArgumentParser:
    """The parser of ``python -m tools.bench.<command>``, with options that take positive integers.

    Args:
        command: the module's name.
        doc: its docstring.
        numbers: option to its default and what it is.
    """
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=f"python -m tools.bench.{command}", description=doc, formatter_class=shape)
    for name, (default, about) in numbers.items():
        told = "" if default is None else f" (default {default})"
        parser.add_argument(f"--{name.replace('_', '-')}", type=positive, default=default, help=about + told)
    return parser


def work_of(parser: argparse.ArgumentParser, options: argparse.Namespace, **more: Any) -> Workload:
    """The work with the sizes that were asked for, of a tiny model with ``--quick``; a bad width ends with status 2."""
    sizes = {field: getattr(options, option) for option, field in SIZES.items() if getattr(options, option)}
    work = replace(TINY if options.quick else Workload(), **sizes, **more)
    if work.n_embd % work.n_head:
        parser.error(f"--width {work.n_embd} does not divide by --heads {work.n_head}: give both, or a multiple")
    return work


def timed(act: Callable[[], object]) -> float:
    """Wall-clock seconds of one call."""
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def interleaved(
    runs: Mapping[str, Callable[[], object]], rounds: int, wait: Callable[[], object] = lambda: None
) -> dict[str, list[float]]:
    """Seconds of each round for each run; the first round warms up, and is not counted.

    The order moves on from round to round, so that a slow second of the machine meets all of them. ``wait`` returns
    when the device has nothing left to do.
    """
    names, seconds = list(runs), {name: list[float]() for name in runs}
    for number in range(rounds + 1):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            wait()
            took = timed(lambda name=name: (runs[name](), wait()))
            if number:
                seconds[name].append(took)
    return seconds
