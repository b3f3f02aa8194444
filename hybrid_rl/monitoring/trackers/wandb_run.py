"""A run of Weights & Biases. WANDB_MODE, WANDB_ENTITY, WANDB_TAGS and its other variables hold as the library says."""

import os
from collections.abc import Mapping
from typing import Any

import wandb

from hybrid_rl.monitoring.trackers.content import PROJECT, SAMPLES, Row, TrackedRun


class WandbRun:
    """Writes a run, which has the same id when it continues; see Tracker for the methods."""

    def __init__(self, run: TrackedRun) -> None:
        self._run = wandb.init(
            project=run.project or os.environ.get("WANDB_PROJECT") or PROJECT,
            name=os.environ.get("WANDB_NAME") or run.name,
            id=run.run_id,
            resume="allow",
            dir=os.environ.get("WANDB_DIR") or run.folder,
            settings=wandb.Settings(console="off", x_stats_pid=os.getppid()),
        )
        self._run.config.update(dict(run.settings), allow_val_change=True)

    def write(self, row: Row) -> None:
        """Write metrics, histograms and table in one call, as Weights & Biases closes a step with the next one."""
        values: dict[str, Any] = dict(row.metrics)
        for name, buckets in row.histograms.items():
            values[name] = wandb.Histogram(np_histogram=(list(buckets.counts), list(buckets.edges)))
        if row.samples:
            data = [list(cells) for cells in row.samples.rows]
            values[SAMPLES] = wandb.Table(columns=list(row.samples.columns), data=data, allow_mixed_types=True)
        self._run.log(values, step=row.step, commit=True)

    def summarize(self, step: int, values: Mapping[str, float]) -> None:
        """Write into the summary of the run."""
        self._run.summary.update(dict(values))

    def finish(self, *, is_done: bool) -> None:
        """Wait until everything is sent."""
        self._run.finish(exit_code=0 if is_done else 1)
