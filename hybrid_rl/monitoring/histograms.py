"""Histograms of values of a step, such as the lengths of its responses."""

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

NUM_BUCKETS = 30
QUANTILES = {"min": 0.0, "p10": 0.1, "p50": 0.5, "p90": 0.9, "max": 1.0}
"""Last part of a metric's name -> the fraction of values that are at most the metric."""


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """Counts of values in buckets of equal width, with sums and quantiles of the values themselves."""

    edges: tuple[float, ...]
    """Bounds of the buckets, one more than counts. A bucket holds its lower bound, the last one its upper bound too."""
    counts: tuple[int, ...]
    """Number of values in each bucket."""
    total: float
    """Sum of all values."""
    total_squares: float
    """Sum of the squares of all values."""
    quantiles: Mapping[str, float]
    """Name in QUANTILES -> value."""

    @property
    def num_values(self) -> int:
        """Number of values."""
        return sum(self.counts)


def make_histogram(values: Sequence[float], *, num_buckets: int = NUM_BUCKETS) -> Histogram | None:
    """Return the histogram of values between the smallest and the largest one; None without values.

    Integers of a small range get a bucket each. A quantile is a value that occurs, by the nearest rank.

    Args:
        values: finite numbers.
        num_buckets: largest number of buckets.
    """
    if not values:
        return None
    ordered = sorted(map(float, values))
    low, high = ordered[0], ordered[-1]
    if all(value.is_integer() for value in ordered) and high - low < num_buckets:
        edges = [low - 0.5 + i for i in range(round(high - low) + 2)]
    elif high > low:
        edges = [low + (high - low) * i / num_buckets for i in range(num_buckets)] + [high]
    else:
        edges = [low - 0.5, low + 0.5]
    counts = [0] * (len(edges) - 1)
    for value in ordered:
        counts[min(bisect.bisect_right(edges, value), len(counts)) - 1] += 1
    return Histogram(
        edges=tuple(edges),
        counts=tuple(counts),
        total=math.fsum(ordered),
        total_squares=math.fsum(value * value for value in ordered),
        quantiles={name: ordered[max(0, math.ceil(q * len(ordered)) - 1)] for name, q in QUANTILES.items()},
    )


def flatten(histograms: Mapping[str, Histogram]) -> dict[str, float]:
    """Return the quantiles of histograms as metrics, <name>/<quantile>."""
    return {f"{name}/{part}": value for name, found in histograms.items() for part, value in found.quantiles.items()}
