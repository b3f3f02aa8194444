"""The trackers of a run as the trainer sees them: TensorBoard, and processes that follow the run for the others."""

import json
import logging
import time
from collections.abc import Mapping

from hybrid_rl.atomic import append, make_folder, writing
from hybrid_rl.config import Config
from hybrid_rl.monitoring.events import EventsFile, Histogram, markdown_table
from hybrid_rl.monitoring.trackers.content import SAMPLES, due_samples
from hybrid_rl.monitoring.trackers.follow import DONE
from hybrid_rl.monitoring.trackers.ledger import FOLDER, HISTOGRAMS
from hybrid_rl.monitoring.trackers.process import TrackerProcess
from hybrid_rl.printable import hide_passwords

TENSORBOARD = "tensorboard"
"""Name in run.trackers, and folder, of the tracker that has no process."""
FINISH_S = 30.0
"""Seconds that all processes together may take after a run has done its steps."""
FAILED_FINISH_S = 10.0
"""Seconds that they may take after a run has failed or is preempted."""


logger = logging.getLogger(__name__)


class Trackers:
    """The trackers of a run: TensorBoard, whose files this process writes, and processes that follow the run."""

    def __init__(self, config: Config, run_id: str, first_step: int) -> None:
        """Start the trackers of the settings, when metrics.jsonl and config.yaml are written.

        Args:
            config: settings of the run.
            run_id: id of the run, the same when it continues.
            first_step: first step that is written.
        Raises:
            FileWriteError: a file cannot be written.
        """
        self._config, self._run_dir = config, config.run_dir
        self._last_step = first_step - 1
        self._events = None
        if TENSORBOARD in config.run.trackers:
            self._events = EventsFile(self._run_dir / TENSORBOARD, resume_step=first_step)
            settings = (self._run_dir / "config.yaml").read_text(encoding="utf-8")
            self._events.write_text(self._last_step, "settings", f"```\n{hide_passwords(settings)}\n```")
        libraries = [name for name in config.run.trackers if name != TENSORBOARD]
        folder = self._run_dir / FOLDER
        if libraries:
            with writing(folder):
                make_folder(folder)
        self._histograms = folder / HISTOGRAMS
        self.processes: list[TrackerProcess] = []
        """One process per library."""
        for library in libraries:
            try:
                self.processes.append(TrackerProcess(library, self._run_dir, run_id))
            except OSError as error:
                logger.warning(
                    "run.trackers: the process of %s cannot be started (%s); the run goes on without it", library, error
                )

    def write_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Keep the histograms of a step for the processes, before its row is written to metrics.jsonl.

        Raises:
            FileWriteError: the file cannot be written.
        """
        if self.processes and histograms:
            buckets = {name: {"edges": list(h.edges), "counts": list(h.counts)} for name, h in histograms.items()}
            append(self._histograms, json.dumps({"step": step, **buckets}).encode() + b"\n")

    def write(self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Histogram]) -> None:
        """Write a step, whose row and responses are written, to TensorBoard; warn once of a process that fails.

        Raises:
            FileWriteError: a file of TensorBoard cannot be written.
        """
        run = self._config.run
        if self._events:
            self._events.write(step, metrics, histograms)
            samples = due_samples(self._run_dir, step, run.tracked_samples, run.tracked_samples_every_steps)
            if samples:
                self._events.write_text(step, SAMPLES, markdown_table(samples.columns, samples.rows))
        for process in self.processes:
            process.look(self._last_step)
        self._last_step = step

    def summarize(self, values: Mapping[str, float]) -> None:
        """Write the first and the last evaluation to TensorBoard; the processes read summary.json.

        Raises:
            FileWriteError: a file of TensorBoard cannot be written.
        """
        if self._events and values:
            self._events.write(self._last_step, values, {})

    def close(self, error: BaseException | None) -> None:
        """Let every process send what is left, for at most FINISH_S, or FAILED_FINISH_S after an error.

        Args:
            error: what ends the run; None for a run that has done its steps.
        """
        deadline = time.monotonic() + (FINISH_S if error is None else FAILED_FINISH_S)
        for process in self.processes:
            process.say(DONE if error is None else b"")
        for process in self.processes:
            process.end(deadline - time.monotonic())
        self.processes = []
