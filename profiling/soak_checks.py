"""Whether the measurements of soak.py stay flat."""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

MAX_GROWTH_MIB = 1.0
"""Growth of memory in 10 steps that a flat process may show."""
FIRST_CHECKED_STEP = 10
MEMORY = ("rss_mib", "shared_mib")
COUNTS = ("processes", "descriptors", "threads")


def growth_per_10_steps(steps: Sequence[float], values: Sequence[float]) -> float:
    """Return ten times the median of the slopes between all pairs of points, which few outliers do not change.

    Source: Theil 1950, Sen 1968.
    """
    points = list(zip(steps, values, strict=True))
    slopes = [(y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in combinations(points, 2)]
    return 10 * statistics.median(slopes)


def findings(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a sentence for everything that grows.

    Memory may grow by MAX_GROWTH_MIB in 10 steps in the second half. The largest count of the second half must not
    exceed the largest one from FIRST_CHECKED_STEP to the middle.

    Args:
        rows: step, process, pid, and the columns of MEMORY and COUNTS.
    """
    series: dict[tuple[str, int], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        series[row["process"], row["pid"]].append(row)
    middle = (FIRST_CHECKED_STEP + max(row["step"] for row in rows)) // 2
    for (process, pid), measured in series.items():
        early = [row for row in measured if FIRST_CHECKED_STEP <= row["step"] < middle]
        late = [row for row in measured if row["step"] >= middle]
        if len(late) < 2 or not early:
            continue
        for name in MEMORY:
            growth = growth_per_10_steps([row["step"] for row in late], [row[name] for row in late])
            if growth > MAX_GROWTH_MIB:
                yield f"{name} of {process} ({pid}) grows by {growth:.2f} MiB in 10 steps"
        for name in COUNTS:
            before, after = max(row[name] for row in early), max(row[name] for row in late)
            if after > before:
                yield f"{name} of {process} ({pid}) grow from {before} to {after}"
