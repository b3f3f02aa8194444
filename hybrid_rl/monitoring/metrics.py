"""Files of metrics and rollouts: metrics.jsonl, TensorBoard events and rollouts/step_*.jsonl."""

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hybrid_rl.atomic import write_atomically


class MetricsWriter:
    """Writes a row of metrics per step to metrics.jsonl and to TensorBoard."""

    def __init__(self, run_dir: Path, resume_step: int = 0) -> None:
        """Open the files of a run, and delete the rows from `resume_step` on, which the run writes again."""
        from torch.utils.tensorboard import (
            SummaryWriter,
        )  # imported here because it takes a second and only rank 0 writes

        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / "metrics.jsonl"
        kept = [row for row in _complete_lines(path) if json.loads(row)["step"] < resume_step]
        write_atomically(path, "".join(kept))
        self._last_step = json.loads(kept[-1])["step"] if kept else -1
        self._file = path.open("a", encoding="utf-8")
        self._tensorboard = SummaryWriter(str(run_dir / "tensorboard"), purge_step=resume_step)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the row of a step and flush it to the disk.

        Raises:
            ValueError: a metric is not finite, or the step does not exceed the last one in the file.
        """
        for name, value in metrics.items():
            if not math.isfinite(value):
                raise ValueError(f"metric {name} = {value} at step {step}: must be finite")
        if step <= self._last_step:
            raise ValueError(
                f"step = {step}: must be greater than {self._last_step}, the last step in {self._file.name}"
            )
        values = {name: float(value) for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._last_step = step
        for name, value in values.items():
            self._tensorboard.add_scalar(name, value, step)

    def close(self) -> None:
        """Close both files."""
        self._file.close()
        self._tensorboard.close()


def write_rollouts(run_dir: Path, step: int, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write or replace the rollouts of a step, one JSON object per line, and return the file."""
    path = run_dir / "rollouts" / f"step_{step:06d}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(json.dumps(dict(row), ensure_ascii=False) + "\n" for row in rows))
    return path


def _complete_lines(path: Path) -> list[str]:
    """Return the lines of a file without one that a killed process wrote in part; none if there is no file."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8") as file:
        return [line for line in file if line.endswith("\n")]
