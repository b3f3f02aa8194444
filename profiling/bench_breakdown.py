"""Prints the time of a step by kernel: `python profiling/bench_kernels.py --breakdown`."""

from collections.abc import Callable, Mapping

import torch
from torch.profiler import ProfilerActivity, profile

REPEATS = 5


def breakdown(shape: str, steps: Mapping[str, Callable[[], object]], G: float) -> None:
    """Print each kernel's launches and time per step, in milliseconds and in times of G, slowest first."""
    for name, step in steps.items():
        step()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            for _ in range(REPEATS):
                step()
            torch.cuda.synchronize()
        events = [event for event in trace.key_averages() if event.device_time_total]
        total = sum(event.device_time_total for event in events) / REPEATS / 1000
        print(f"{shape} {name}: {total:.2f} ms of kernels, {total / G:.2f} G")
        for event in sorted(events, key=lambda event: -event.device_time_total)[:8]:
            ms = event.device_time_total / REPEATS / 1000
            print(f"    {ms:8.3f} ms  {ms / G:6.3f} G  {event.count / REPEATS:6.1f} launches  {event.key[:110]}")
