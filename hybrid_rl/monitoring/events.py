"""Metrics, histograms and texts as TensorBoard events, written at once, so that an error is raised where it occurs."""

import html
import io
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import histogram_raw, text

from hybrid_rl.atomic import append, make_folder, writing


class Histogram(Protocol):
    """The distribution of values in a step."""

    @property
    def edges(self) -> Sequence[float]:
        """Bounds of the buckets, one more than there are buckets."""
        ...

    @property
    def counts(self) -> Sequence[int]:
        """Number of values in each bucket."""
        ...

    @property
    def total(self) -> float:
        """Sum of the values."""
        ...

    @property
    def total_squares(self) -> float:
        """Sum of the squares of the values."""
        ...


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

    def write(self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Histogram]) -> None:
        """Append metrics and histograms of a step.

        Raises:
            FileWriteError: the file cannot be written.
        """
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        values += [value for name, each in histograms.items() for value in _histogram(name, each).value]
        self._append(Event(step=step, summary=Summary(value=values)))

    def write_text(self, step: int, name: str, content: str) -> None:
        """Append a text in Markdown.

        Raises:
            FileWriteError: the file cannot be written.
        """
        self._append(Event(step=step, summary=text(name, content)))

    def _append(self, *events: Event) -> None:
        buffer = io.BytesIO()
        writer = RecordWriter(buffer)
        for event in events:
            event.wall_time = time.time()
            writer.write(event.SerializeToString())
        append(self._path, buffer.getvalue())


def _histogram(name: str, histogram: Histogram) -> Any:
    edges, counts = histogram.edges, histogram.counts
    sums = (sum(counts), histogram.total, histogram.total_squares)
    return histogram_raw(name, edges[0], edges[-1], *sums, bucket_limits=edges[1:], bucket_counts=counts)


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table in Markdown; text is shown as it stands, not as Markdown or HTML."""
    lines = [columns, ["---"] * len(columns), *([_cell(value) for value in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    escaped = html.escape("" if value is None else str(value))
    for sign in "\\`*_[]|":
        escaped = escaped.replace(sign, f"&#{ord(sign)};")
    return escaped.replace("\n", "<br>")
