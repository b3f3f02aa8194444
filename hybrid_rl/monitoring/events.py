"""Metrics as events of TensorBoard, written at once, so that an error is raised where it happens."""

import io
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from hybrid_rl.atomic import append, make_folder, writing


class EventsFile:
    """Appends events to a new file, which TensorBoard reads together with the older files of its folder."""

    def __init__(self, folder: Path, *, resume_step: int) -> None:
        """Start the file.

        Args:
            folder: of the events; it is created.
            resume_step: first step of this file; TensorBoard does not show later events of the older files.
        Raises:
            FileWriteError: the file cannot be written.
        """
        with writing(folder):
            make_folder(folder)
        self._path = folder / f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._append(
            Event(step=resume_step, file_version="brain.Event:2"),
            Event(step=resume_step, session_log=SessionLog(status=SessionLog.START)),
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the metrics of a step.

        Raises:
            FileWriteError: the file cannot be written.
        """
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._append(Event(step=step, summary=Summary(value=values)))

    def _append(self, *events: Event) -> None:
        buffer = io.BytesIO()
        writer = RecordWriter(buffer)
        for event in events:
            event.wall_time = time.time()
            writer.write(event.SerializeToString())
        append(self._path, buffer.getvalue())
