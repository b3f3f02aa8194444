"""A run of MLflow. MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME and its other variables hold as the library says."""

import os
import re
import time
from collections.abc import Mapping

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run

from hybrid_rl.monitoring.trackers.content import PROJECT, SAMPLES, Row, TrackedRun

ID_TAG = "hybrid_rl.run_id"
"""Tag by which a run is found when it continues."""
MAX_PARAMS = 100
"""Number of parameters that a request may have."""
UNNAMEABLE = re.compile(r"[^/\w.\- :]")
"""What a name may not contain."""


class MlflowRun:
    """Writes a run, which is found by its tag when it continues; see Tracker for the methods."""

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # the URL may hold a password
        self._client = MlflowClient()
        found = self._find(run) or self._create(run)
        self._id = found.info.run_id
        self._client.update_run(self._id, status="RUNNING")
        params = [Param(name, str(value)) for name, value in run.settings.items() if name not in found.data.params]
        for start in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(self._id, params=params[start : start + MAX_PARAMS])
        self._client.log_dict(self._id, dict(run.settings), "settings.yaml")  # parameters keep their first values

    def _find(self, run: TrackedRun) -> Run | None:
        self._experiment = _experiment(self._client, run.project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT)
        found = self._client.search_runs([self._experiment], f"tags.`{ID_TAG}` = '{run.run_id}'", max_results=1)
        return found[0] if found else None

    def _create(self, run: TrackedRun) -> Run:
        return self._client.create_run(self._experiment, run_name=run.name, tags={ID_TAG: run.run_id})

    def write(self, row: Row) -> None:
        """Write the metrics, and the table as an artifact of the step; MLflow has no histograms."""
        self._log(row.metrics, row.step, row.time_ms)
        if row.samples:
            columns = dict(zip(row.samples.columns, map(list, zip(*row.samples.rows, strict=True)), strict=True))
            self._client.log_table(self._id, columns, f"{SAMPLES}/step_{row.step:06d}.json")

    def summarize(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values as metrics of the last step."""
        self._log(values, step, time.time_ns() // 1_000_000)

    def finish(self, *, is_done: bool) -> None:
        """Give the run its final state."""
        self._client.set_terminated(self._id, "FINISHED" if is_done else "FAILED")

    def _log(self, values: Mapping[str, float], step: int, time_ms: int) -> None:
        metrics = [Metric(UNNAMEABLE.sub("_", name), value, time_ms, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)


def _experiment(client: MlflowClient, name: str) -> str:
    """Return the id of an experiment, which is created if there is none."""
    found = client.get_experiment_by_name(name)
    return found.experiment_id if found else client.create_experiment(name)
