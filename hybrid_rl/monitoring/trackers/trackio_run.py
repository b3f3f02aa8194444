"""A run of Trackio. TRACKIO_DIR, TRACKIO_SPACE_ID and its other variables hold as the library says."""

from collections.abc import Mapping
from typing import Any

import trackio

from hybrid_rl.monitoring.trackers.content import PROJECT, SAMPLES, Row, TrackedRun


class TrackioRun:
    """Writes a run, whose name ends with its id, by which Trackio finds it when it continues; see Tracker."""

    def __init__(self, run: TrackedRun) -> None:
        self._run = trackio.init(
            project=run.project or PROJECT,
            name=f"{run.name}-{run.run_id[:8]}",
            config=dict(run.settings),
            resume="allow",
            embed=False,
        )

    def write(self, row: Row) -> None:
        """Write metrics, histograms and table of a step."""
        values: dict[str, Any] = dict(row.metrics)
        for name, buckets in row.histograms.items():
            values[name] = trackio.Histogram(np_histogram=(list(buckets.counts), list(buckets.edges)))
        if row.samples:
            values[SAMPLES] = trackio.Table(columns=list(row.samples.columns), data=[list(r) for r in row.samples.rows])
        self._run.log(values, step=row.step)

    def summarize(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values at the last step, as Trackio has no summary."""
        self._run.log(dict(values), step=step)

    def finish(self, *, is_done: bool) -> None:
        """Wait until everything is written."""
        self._run.finish()
