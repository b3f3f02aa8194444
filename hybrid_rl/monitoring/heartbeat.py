"""A file that shows whether a run is alive and what it does, for a supervisor that reads it."""

import datetime
import json
import logging
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from hybrid_rl.atomic import write_atomically
from hybrid_rl.errors import FileWriteError
from hybrid_rl.monitoring.activity import Activity

INTERVAL_S = 10.0
"""Seconds between two writes, if no phase begins."""
PATIENCE_S = 60.0
"""Seconds without a successful write after which a warning says so."""

logger = logging.getLogger(__name__)


class Heartbeat:
    """Replaces the file of this rank in a thread, at every phase and every INTERVAL_S."""

    def __init__(self, path: Path, activity: Activity, *, rank: int, interval_s: float = INTERVAL_S) -> None:
        """Write the file for the first time, and start the thread.

        Args:
            path: file to replace; its folder exists.
            activity: what the run does.
            rank: of this process.
            interval_s: seconds between two writes.
        """
        self._path = path
        self._activity = activity
        self._rank = rank
        self._interval_s = interval_s
        self._failing_since: float | None = None
        self._is_due = threading.Event()
        self._is_closed = False
        self._write(activity.phase)
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def beat(self) -> None:
        """Let the thread write the file at once."""
        self._is_due.set()

    def close(self) -> None:
        """End the thread, and write `ended` as the last phase."""
        self._is_closed = True
        self._is_due.set()
        self._thread.join()
        self._write("ended")

    def _run(self) -> None:
        while not self._is_closed:
            self._is_due.wait(self._interval_s)
            self._is_due.clear()
            if not self._is_closed:
                self._write(self._activity.phase)

    def _write(self, phase: str) -> None:
        """Replace the file; a full disk ends the run with another file, and a run that goes on all the same says so."""
        content = json.dumps(self._content(phase), indent=1) + "\n"
        try:
            write_atomically(self._path, content, is_flushed=False)
            self._failing_since = None
        except FileWriteError as error:
            now = time.monotonic()
            self._failing_since = self._failing_since or now
            if now > self._failing_since + PATIENCE_S:
                logger.warning("%s", error)
                self._failing_since = float("inf")  # once

    def _content(self, phase: str) -> dict[str, Any]:
        return {
            "step": self._activity.step,
            "phase": phase,
            "phase_started": _iso(self._activity.started_at),
            "time": _iso(datetime.datetime.now().timestamp()),
            "host": socket.gethostname(),
            "rank": self._rank,
            "pid": os.getpid(),
            "engine_restarts": self._activity.engine_restarts,
            "children": _children(),
        }


def _iso(timestamp: float) -> str:
    return datetime.datetime.fromtimestamp(timestamp, datetime.UTC).isoformat(timespec="milliseconds")


def _children() -> list[dict[str, Any]]:
    """Return id and name of every process that this one has started, directly or not: the engine and the scorers."""
    children = []
    for process in psutil.Process().children(recursive=True):
        try:
            children.append({"pid": process.pid, "name": process.name()})
        except psutil.Error:  # it has ended
            continue
    return children
