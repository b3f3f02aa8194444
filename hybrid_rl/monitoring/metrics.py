"""Files of metrics and rollouts: metrics.jsonl and rollouts/step_*.jsonl."""

import json
import logging
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hybrid_rl.atomic import append, make_folder, set_aside, write_atomically, writing
from hybrid_rl.printable import printable

logger = logging.getLogger(__name__)


class MetricsWriter:
    """Writes a row of metrics per step to metrics.jsonl."""

    def __init__(self, run_dir: Path, resume_step: int = 0) -> None:
        """Start the file of a run, and delete the rows from `resume_step` on, which the run writes again.

        Lines that are no rows are left out with a warning; the damaged file is kept under another name. Half a line
        at the end, which a killed process leaves, is left out without one.
        """
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / "metrics.jsonl"
        kept = [row for row in _read_rows(path) if row["step"] < resume_step]
        write_atomically(path, "".join(json.dumps(row) + "\n" for row in kept))
        self._last_step = kept[-1]["step"] if kept else -1
        self._path = path

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the row of a step and flush it to the disk.

        Raises:
            ValueError: a metric is not finite, or the step does not exceed the last one in the file.
            FileWriteError: a file cannot be written.
        """
        for name, value in metrics.items():
            if not math.isfinite(value):
                raise ValueError(f"metric {name} = {value} at step {step}: must be finite")
        if step <= self._last_step:
            raise ValueError(f"step = {step}: must be greater than {self._last_step}, the last step in {self._path}")
        values = {name: float(value) for name, value in metrics.items()}
        append(self._path, json.dumps({"step": step, **values}).encode() + b"\n")
        self._last_step = step


def write_rollouts(run_dir: Path, step: int, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write or replace the rollouts of a step, one JSON object per line, and return the file."""
    path = run_dir / "rollouts" / f"step_{step:06d}.jsonl"
    with writing(path.parent):
        make_folder(path.parent)
    write_atomically(path, "".join(printable(json.dumps(dict(row), ensure_ascii=False)) + "\n" for row in rows))
    return path


def delete_rollouts(run_dir: Path, *, first_step: int = 0, last_step: int | None = None) -> None:
    """Delete the rollouts of the steps from first_step to last_step; None deletes up to the end."""
    for path in (run_dir / "rollouts").glob("step_*.jsonl"):
        number = path.stem.removeprefix("step_")
        if number.isdecimal() and first_step <= int(number) and (last_step is None or int(number) <= last_step):
            path.unlink()


def _read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file, each of a later step than the one before; none if there is no file."""
    if not path.exists():
        return []
    rows, bad_lines = list[dict[str, Any]](), list[int]()
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        row = _parse_row(line)
        if row is None or (rows and row["step"] <= rows[-1]["step"]):
            bad_lines.append(number)
        else:
            rows.append(row)
    if bad_lines:
        logger.warning(
            "%s: %d lines are damaged, first line %d: they are left out; the damaged file is kept as %s",
            path,
            len(bad_lines),
            bad_lines[0],
            set_aside(path),
        )
    return rows


def _parse_row(line: bytes) -> dict[str, Any] | None:
    """Return the row in a line; None if it is none."""
    try:
        row = json.loads(line)
        return row if type(row["step"]) is int else None
    except (ValueError, KeyError, TypeError):
        return None
