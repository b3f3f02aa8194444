"""Spans and counters of one rank, as Chrome trace events and NVTX ranges."""

import json
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hybrid_rl.atomic import write_atomically

_HAS_NVTX = torch.version.cuda is not None  # a property of the build; asking for a device would initialise the driver
MAX_EVENTS = 50_000
"""Events that a timeline keeps, about 10 MB of JSON."""


class Timeline:
    """Records spans and counters as Chrome trace events, which https://ui.perfetto.dev shows.

    Spans measure host time: a kernel that is still in flight counts for the span that waits for it. Time stamps come
    from the monotonic clock, so that the files of all ranks of a node have the same time axis.
    """

    def __init__(self, rank: int = 0, *, max_events: int = MAX_EVENTS) -> None:
        """Start without events.

        Args:
            rank: process id of the events.
            max_events: number of events to keep; older ones are dropped.
        """
        self._rank = rank
        self._events: deque[dict[str, Any]] = deque(maxlen=max_events)
        self._lanes: dict[str, int] = {}
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def span(
        self, name: str, *, phase: str = "", step: int | None = None, lane: str = "main", **args: Any
    ) -> Iterator[dict[str, Any]]:
        """Record the duration of the body, also as an NVTX range `step/phase/name` where PyTorch is built with CUDA.

        Args:
            name: name of the event; `take_seconds` sums durations by name.
            phase, step: attributes of the event.
            lane: row of the timeline; spans of one lane must nest.
            **args: further attributes of the event, as JSON values. The body may add some to the dictionary that it
                gets; `bytes` adds GB_per_s.
        """
        if _HAS_NVTX:
            torch.cuda.nvtx.range_push("/".join(str(part) for part in (step, phase, name) if part not in (None, "")))
        start = time.monotonic_ns()
        try:
            yield args
        finally:
            duration = time.monotonic_ns() - start
            if _HAS_NVTX:
                torch.cuda.nvtx.range_pop()
            self._seconds[name] += duration / 1e9
            if "bytes" in args:
                args.setdefault("GB_per_s", round(args["bytes"] / max(duration, 1), 3))
            self._append(name, start, duration, lane, {"step": step, "phase": phase, **args})

    def add(self, name: str, start_ns: int, end_ns: int, *, phase: str, lane: str) -> None:
        """Record a span that has ended, which `take_seconds` does not count.

        Args:
            name: name of the event.
            start_ns, end_ns: on the monotonic clock.
            phase: attribute of the event.
            lane: row of the timeline.
        """
        self._append(name, start_ns, end_ns - start_ns, lane, {"step": None, "phase": phase})

    def _append(self, name: str, start_ns: int, duration_ns: int, lane: str, args: dict[str, Any]) -> None:
        tid = self._lanes.setdefault(lane, len(self._lanes))
        event = {"name": name, "cat": args["phase"] or "none", "ph": "X", "ts": start_ns / 1e3}
        self._events.append({**event, "dur": duration_ns / 1e3, "pid": self._rank, "tid": tid, "args": args})

    def counter(self, name: str, **values: float) -> None:
        """Record values that hold until the next call with this name; Perfetto stacks the values of a counter."""
        event = {"name": name, "ph": "C", "ts": time.monotonic_ns() / 1e3, "pid": self._rank, "args": values}
        self._events.append(event)

    def take_seconds(self) -> dict[str, float]:
        """Return span name -> seconds, over all spans that ended after the last call; nested spans count in both."""
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds

    def write(self, path: Path) -> None:
        """Write the recorded events as one JSON file, atomically."""
        names = [{"name": "process_name", "ph": "M", "pid": self._rank, "args": {"name": f"rank {self._rank}"}}]
        names += [
            {"name": "thread_name", "ph": "M", "pid": self._rank, "tid": tid, "args": {"name": lane}}
            for lane, tid in self._lanes.items()
        ]
        trace = {"traceEvents": [*names, *self._events], "displayTimeUnit": "ms"}
        write_atomically(path, json.dumps(trace, allow_nan=False))


class CudaProfiler:
    """Starts and stops a profiler that waits for the CUDA profiler API, such as Nsight Systems."""

    def __init__(self, steps: tuple[int, int] | None) -> None:
        """Take the first and the last step to record; None records none."""
        self._steps = steps
        self._is_on = False

    def before(self, step: int) -> None:
        """Start to record if `step` is the first step to record; further calls in this step have no effect."""
        if self._steps and not self._is_on and step == self._steps[0]:
            torch.cuda.profiler.start()
            self._is_on = True

    def after(self, step: int) -> None:
        """Stop if `step` is the last step to record."""
        if self._steps and self._is_on and step == self._steps[1]:
            torch.cuda.profiler.stop()
            self._is_on = False
