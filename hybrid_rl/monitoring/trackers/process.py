"""The process of a tracker as the trainer sees it: it starts, shows how far it is, and ends. Imports no torch."""

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from hybrid_rl.atomic import writing
from hybrid_rl.monitoring.trackers.ledger import ledger_path, read_ledger

FOLLOW = "hybrid_rl.monitoring.trackers.follow"
"""Module that a process runs."""
SILENT_S = 60.0
"""Seconds without progress after which a tracker counts as silent."""

logger = logging.getLogger(__name__)


class TrackerProcess:
    """A process that follows the run for one tracker."""

    def __init__(self, library: str, run_dir: Path, run_id: str) -> None:
        """Start the process, in a session of its own so that Ctrl-C does not reach it.

        Args:
            library: name in run.trackers.
            run_dir: folder of the run, whose config.yaml and metrics.jsonl are written.
            run_id: id of the run.
        Raises:
            FileWriteError: its log cannot be written.
            OSError: no process can be started.
        """
        self.library = library
        self._path, self._run_id = ledger_path(run_dir, library), run_id
        self._log = self._path.with_suffix(".log")
        self._behind_since: float | None = None
        self._is_reported = False
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        with writing(self._log):
            log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", FOLLOW, library, str(run_dir.absolute()), run_id],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=environment,
            )
        finally:
            os.close(log)

    @property
    def process_id(self) -> int:
        """Id of the process."""
        return self._process.pid

    def look(self, written_step: int) -> None:
        """Warn once if the tracker has failed, ended or been silent for long; the run goes on.

        Args:
            written_step: last step whose row was in metrics.jsonl at the previous look.
        """
        if self._is_reported:
            return
        ledger, now = read_ledger(self._path, self._run_id), time.monotonic()
        if ledger.last_step >= written_step:
            self._behind_since = None
        elif self._behind_since is None:
            self._behind_since = now
        code = self._process.poll()
        if ledger.error:
            self._report(f"fails ({ledger.error})", "gets the missing rows when it answers")
        elif code is not None:
            self._report(f"has ended with exit code {code}", f"has the rows up to step {ledger.last_step}")
        elif self._behind_since is not None and now - self._behind_since > SILENT_S:
            self._report(f"has not answered for {SILENT_S:.0f} s", "gets the missing rows when it answers")

    def say(self, word: bytes) -> None:
        """Tell the process that the run ends."""
        assert self._process.stdin
        try:
            self._process.stdin.write(word)
            self._process.stdin.close()
        except BrokenPipeError:  # it has ended
            pass

    def end(self, left_s: float) -> None:
        """Wait until the process has sent everything, and kill it where that takes longer than the seconds left."""
        try:
            code = self._process.wait(max(0.0, left_s))
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            code = None
        if code == 0 or self._is_reported:
            return
        ledger = read_ledger(self._path, self._run_id)
        if code is None:
            failure = "has not sent everything within the time that a run waits at its end"
        else:
            failure = f"fails ({ledger.error or f'exit code {code}'})"
        self._report(failure, f"has the rows up to step {ledger.last_step}")

    def _report(self, failure: str, consequence: str) -> None:
        self._is_reported = True
        logger.warning(
            "run.trackers: %s %s; the run goes on, metrics.jsonl has every row, and %s %s; its messages are in %s",
            *(self.library, failure, self.library, consequence, self._log),
        )
