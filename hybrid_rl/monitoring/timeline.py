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

# A build without CUDA has no NVTX; asking for the build, not the device, leaves the driver untouched.
_HAS_NVTX = torch.version.cuda is not None


# 10 MB of JSON, written in 0.3 s, so that a file after every step stays cheap. A longer run keeps its latest events.
_MAX_EVENTS = 50_000


class Timeline:
    """Spans and counters of one rank as Chrome trace events, which https://ui.perfetto.dev opens.

    Spans are host time: a kernel still in flight counts for the span that waits for it. Time stamps come from the
    monotonic clock, so the files of all ranks of a node share one axis.
    """

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self._events: deque[dict[str, Any]] = deque(maxlen=_MAX_EVENTS)
        self._lanes: dict[str, int] = {}
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def span(
        self, name: str, *, phase: str = "", step: int | None = None, lane: str = "main", **args: Any
    ) -> Iterator[dict[str, Any]]:
        """Record the body's duration, also as an NVTX range `step/phase/name` where PyTorch is built with CUDA.

        Args:
            name: what runs; `take_seconds` sums durations by it.
            phase, step: kept with the event.
            lane: row of the timeline. Spans of one lane must nest.
            **args: JSON values kept with the event. The body may add more to the yielded dict; `bytes` makes GB_per_s.
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
            tid = self._lanes.setdefault(lane, len(self._lanes))
            event = {"name": name, "cat": phase or "none", "ph": "X", "ts": start / 1e3, "dur": duration / 1e3}
            self._events.append(
                {**event, "pid": self._rank, "tid": tid, "args": {"step": step, "phase": phase, **args}}
            )

    def counter(self, name: str, **values: float) -> None:
        """Record values that hold from now on; Perfetto stacks the values of one counter."""
        event = {"name": name, "ph": "C", "ts": time.monotonic_ns() / 1e3, "pid": self._rank, "args": values}
        self._events.append(event)

    def take_seconds(self) -> dict[str, float]:
        """Return the seconds per span name since the last call; a span inside another counts in both."""
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds

    def write(self, path: Path) -> None:
        """Write everything recorded so far as one JSON file, atomically."""
        names = [{"name": "process_name", "ph": "M", "pid": self._rank, "args": {"name": f"rank {self._rank}"}}]
        names += [
            {"name": "thread_name", "ph": "M", "pid": self._rank, "tid": tid, "args": {"name": lane}}
            for lane, tid in self._lanes.items()
        ]
        trace = {"traceEvents": [*names, *self._events], "displayTimeUnit": "ms"}
        write_atomically(path, json.dumps(trace, allow_nan=False))


class CudaProfiler:
    """Tells a profiler that waits for it, such as Nsight Systems, between which steps to record."""

    def __init__(self, steps: tuple[int, int] | None) -> None:
        """Take first and last step, both recorded; None is none."""
        self._steps = steps
        self._is_on = False

    def before(self, step: int) -> None:
        """Start recording if this is the first step to record; to be called as often as one likes."""
        if self._steps and not self._is_on and step == self._steps[0]:
            torch.cuda.profiler.start()
            self._is_on = True

    def after(self, step: int) -> None:
        """Stop after the last one."""
        if self._steps and self._is_on and step == self._steps[1]:
            torch.cuda.profiler.stop()
            self._is_on = False
