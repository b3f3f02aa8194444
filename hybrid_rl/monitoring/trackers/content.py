"""What trackers get of a run: its settings, rows of metrics, histograms and sampled responses. Imports no torch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hybrid_rl.monitoring.transcript import turn_blocks

PROJECT = "hybrid_rl"
"""Project of a run whose settings and environment name none."""
SAMPLES = "samples"
"""Name of the tables of sampled responses."""


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """A run as a tracker sees it."""

    folder: Path
    """Folder of the run."""
    run_id: str
    """Id of the run, the same when it continues."""
    name: str
    project: str | None
    """Project of the settings; None leaves it to the environment variables of the library, and then to PROJECT."""
    settings: Mapping[str, Any]
    """Dotted name of each setting -> its value."""


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """A histogram: counts[i] values lie between edges[i] and edges[i + 1]."""

    edges: Sequence[float]
    counts: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Sampled responses, one per row."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a tracker gets of a step."""

    step: int
    time_ms: int
    """Time at which the row was read, in milliseconds of Unix time."""
    metrics: Mapping[str, float]
    histograms: Mapping[str, Buckets] = field(default_factory=dict)
    samples: Table | None = None


class Tracker(Protocol):
    """A run of a tracker that is open for writing. Every method may raise what its library raises."""

    def write(self, row: Row) -> None:
        """Write a step, which follows all steps that were written."""
        ...

    def summarize(self, step: int, values: Mapping[str, float]) -> None:
        """Write the first and the last evaluation of a run whose last step is given."""
        ...

    def finish(self, *, is_done: bool) -> None:
        """Send what is not sent yet and close the run, as done or as failed."""
        ...


def samples_are_due(step: int, number: int, every: int) -> bool:
    """Return whether a step shows samples: the first step and every so many after it, unless the number is 0.

    Args:
        number: run.tracked_samples.
        every: run.tracked_samples_every_steps.
    """
    return number > 0 and (step - 1) % every == 0


def due_samples(folder: Path, step: int, number: int, every: int) -> Table | None:
    """Return responses of a step, evenly spread over its file; None if no table is due or the file is not there.

    Args:
        folder: folder of the run.
        number: run.tracked_samples.
        every: run.tracked_samples_every_steps.
    """
    if not samples_are_due(step, number, every):
        return None
    try:
        lines = (folder / "rollouts" / f"step_{step:06d}.jsonl").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:  # run.keep_rollouts has deleted it
        return None
    number = min(number, len(lines))
    rows = [json.loads(lines[place * len(lines) // number]) for place in range(number)]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    if not rows:
        return None
    return Table(columns=columns, rows=[[_cell(name, row.get(name)) for name in columns] for row in rows])


def _cell(name: str, value: Any) -> Any:
    if name == "turns" and value:
        return turn_blocks(value)
    return value if value is None or isinstance(value, str | bool | int | float) else json.dumps(value)


def flat_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return dotted name -> value of nested settings; an empty mapping stays one."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        inner = flat_settings(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {}
        flat |= inner or {f"{prefix}{name}": value}
    return flat


def summary_values(evaluations: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the values of summary.json by the names that trackers give them, such as summary/after/accuracy."""
    return {f"summary/{when}/{name}": value for when, found in evaluations.items() for name, value in found.items()}
