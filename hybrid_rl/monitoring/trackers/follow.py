"""The process of a tracker: it follows the files of a run and sends what is new, so that the trainer never waits.

`python -m hybrid_rl.monitoring.trackers.follow <library> <folder of the run> <id of the run>`; the trainer writes DONE
to its standard input before it closes it, unless the run has failed.
"""

import fcntl
import importlib
import json
import os
import select
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from hybrid_rl.monitoring.trackers.content import (
    Buckets,
    Row,
    TrackedRun,
    Tracker,
    due_samples,
    flat_settings,
    summary_values,
)
from hybrid_rl.monitoring.trackers.ledger import FOLDER, HISTOGRAMS, ledger_path, read_ledger, write_ledger
from hybrid_rl.printable import PrintableStream, hide_passwords

DONE = b"done"
"""Word of the trainer for a run that has ended without an error."""
POLL_S = 0.5
"""Seconds between two looks at the files."""
RETRY_S = 30.0
"""Seconds after which a tracker that has failed is opened again."""
CLASSES = {"wandb": "WandbRun", "trackio": "TrackioRun", "mlflow": "MlflowRun"}
"""Name in run.trackers -> class in the module `<name>_run`."""


class Lines:
    """The JSON objects in a file that grows, each returned once and when its line is whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def take(self) -> Iterator[dict[str, Any]]:
        """Yield the objects of new lines."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._position += len(line)
                yield json.loads(line)


class Follower:
    """Sends the rows of a run to a tracker, each once, in the order of their steps."""

    def __init__(self, library: str, run: TrackedRun, open_tracker: Callable[[TrackedRun], Tracker]) -> None:
        """Continue where the file of the tracker ends.

        Args:
            library: name in run.trackers.
            run: the run, whose settings say how many responses a table has and how often there is one.
            open_tracker: opens the run of the tracker, also one that exists.
        """
        self._run, self._open = run, open_tracker
        self._tracker: Tracker | None = None
        self._path = ledger_path(run.folder, library)
        self._ledger = read_ledger(self._path, run.run_id)
        self._rows, self._histograms = Lines(run.folder / "metrics.jsonl"), Lines(run.folder / FOLDER / HISTOGRAMS)
        self._waiting: deque[Row] = deque()
        self._buckets: dict[int, dict[str, Buckets]] = {}

    def follow(self, wait_for_word: Callable[[float], bytes | None]) -> int:
        """Send rows until the trainer ends, then what is left, and return the exit code: 0 if all was sent.

        Args:
            wait_for_word: waits for some seconds and returns the trainer's last word, b"" for none; None if it goes on.
        """
        pause_s = 0.0
        while True:
            word = wait_for_word(pause_s)
            try:
                self._send()
                if word is not None:
                    self._finish(is_done=word == DONE)
                    return 0
                pause_s = POLL_S
            except Exception as error:
                traceback.print_exc()
                reason = (str(error).splitlines() or [""])[0]
                self._note(error=hide_passwords(f"{type(error).__name__}: {reason}")[:500])
                self._tracker, pause_s = None, RETRY_S
                if word is not None:
                    return 1

    def _opened(self) -> Tracker:
        if self._tracker is None:
            self._tracker = self._open(self._run)
            self._note(error=None)
        return self._tracker

    def _send(self) -> None:
        """Send the rows that are new."""
        tracker = self._opened()
        for row in self._rows.take():
            if row["step"] > self._ledger.last_step:
                self._waiting.append(self._read(row))
        while self._waiting:
            self._note(last_step=self._waiting[0].step)
            tracker.write(self._waiting[0])
            self._waiting.popleft()

    def _read(self, values: Mapping[str, Any]) -> Row:
        for found in self._histograms.take():
            step = found.pop("step")
            self._buckets[step] = {name: Buckets(**buckets) for name, buckets in found.items()}
        step, settings = values["step"], self._run.settings
        number, every = settings["run.tracked_samples"], settings["run.tracked_samples_every_steps"]
        return Row(
            step=step,
            time_ms=time.time_ns() // 1_000_000,
            metrics={name: value for name, value in values.items() if name != "step"},
            histograms=self._buckets.pop(step, {}),
            samples=due_samples(self._run.folder, step, number, every),
        )

    def _finish(self, *, is_done: bool) -> None:
        tracker, summary = self._opened(), self._run.folder / "summary.json"
        step = self._ledger.last_step
        if is_done and summary.exists() and step > self._ledger.summarized_step:
            self._note(summarized_step=step)
            tracker.summarize(step, summary_values(json.loads(summary.read_text())))
        tracker.finish(is_done=is_done)

    def _note(self, **changes: Any) -> None:
        changed = replace(self._ledger, **changes)
        if changed != self._ledger:
            self._ledger = changed
            write_ledger(self._path, changed)


def tracked_run(folder: Path, run_id: str) -> TrackedRun:
    """Return the run of a folder, with the settings of its config.yaml."""
    settings = flat_settings(yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8")))
    hidden = {name: _without_passwords(value) for name, value in settings.items()}
    name, project = hidden["run.name"], hidden["run.project"]
    return TrackedRun(folder=folder, run_id=run_id, name=name, project=project, settings=hidden)


def _without_passwords(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_passwords(item) for item in value]
    return hide_passwords(value) if isinstance(value, str) else value


def open_with(library: str) -> Callable[[TrackedRun], Tracker]:
    """Return what opens a run with a library, which is imported at the first call."""

    def open_tracker(run: TrackedRun) -> Tracker:
        module = importlib.import_module(f"hybrid_rl.monitoring.trackers.{library}_run")
        return getattr(module, CLASSES[library])(run)

    return open_tracker


def words_of(trainer_id: int) -> Callable[[float], bytes | None]:
    """Return what waits for the trainer's last word on standard input; a trainer that is gone has none."""

    def wait(seconds: float) -> bytes | None:
        if select.select([0], [], [], seconds)[0]:
            return os.read(0, len(DONE))
        return None if os.getppid() == trainer_id else b""

    return wait


def main() -> int:
    """Follow a run until it ends; return the exit code."""
    sys.stdout = PrintableStream(sys.stdout.buffer, errors="backslashreplace", line_buffering=True)
    sys.stderr = PrintableStream(sys.stderr.buffer, errors="backslashreplace", line_buffering=True)
    trainer_id = os.getppid()
    library, folder, run_id = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    with (folder / FOLDER / f"{library}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the process of a trainer that was killed may still send its last rows
        follower = Follower(library, tracked_run(folder, run_id), open_with(library))
        return follower.follow(words_of(trainer_id))


if __name__ == "__main__":
    sys.exit(main())
