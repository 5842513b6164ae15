"""Small statistics over step times: what "median" and "ratio" mean in every table of the benchmark.

A step time is one number per optimizer step: the slowest rank's. Samples of all rounds of one variant are pooled, so a
median spans the whole run, and a machine that slows down for a while slows every contender of that round alike.
"""

from __future__ import annotations

from collections.abc import Sequence


def median(values: Sequence[float]) -> float:
    """The middle value; the mean of the two middle values of an even count.

    Example:
        >>> median([3.0, 1.0, 2.0, 10.0])
        2.5
    """
    if not values:
        raise ValueError("the median of no samples is undefined; did every round of this variant fail?")
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def slowest_rank(per_rank: Sequence[Sequence[float]]) -> list[float]:
    """Step by step, the largest value over the ranks: ``per_rank[rank][step]`` to ``[step]``.

    Raises:
        ValueError: ranks that timed different numbers of steps, which would pair the wrong steps.

    Example:
        >>> slowest_rank([[1.0, 5.0], [2.0, 4.0]])
        [2.0, 5.0]
    """
    lengths = {len(samples) for samples in per_rank}
    if len(lengths) != 1:
        raise ValueError(f"ranks timed different numbers of steps: {sorted(lengths)}")
    return [max(step) for step in zip(*per_rank, strict=True)]


def mean_over_ranks(per_rank: Sequence[Sequence[float]]) -> list[float]:
    """Step by step, the mean over the ranks, as :func:`slowest_rank` takes the maximum."""
    return [sum(step) / len(step) for step in zip(*per_rank, strict=True)]
