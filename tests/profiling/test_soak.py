"""The soak's checks find what grows, and nothing else; its measurements are those of real processes."""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "profiling"))

import soak
from soak_checks import findings, growth_per_10_steps


def rows(**changes):
    """Rows of one process over 100 steps; a change is a function from step to value."""
    flat = {"rss_mib": 500.0, "shared_mib": 20.0, "processes": 1, "descriptors": 30, "threads": 8}
    return [
        {"step": step, "process": "trainer", "pid": 7, **flat, **{name: of(step) for name, of in changes.items()}}
        for step in range(1, 101)
    ]


def test_a_slope_is_the_median_of_all_pairs():
    assert growth_per_10_steps([0, 1, 2, 3], [0, 2, 4, 100]) == pytest.approx(10 * (2 + 100 / 3) / 2)
    assert growth_per_10_steps([1, 2, 3, 4, 5], [5, 5, 900, 5, 5]) == 0


def test_flat_measurements_are_no_finding_however_much_they_grow_before_the_second_half():
    assert not [*findings(rows())]
    assert not [*findings(rows(rss_mib=lambda step: 500 + min(step, 50) * 10))]
    assert not [*findings(rows(rss_mib=lambda step: 500 + 80 * (step % 10 == 0), threads=lambda step: 8 + step % 3))]


@pytest.mark.parametrize("name", ["rss_mib", "shared_mib"])
def test_memory_that_grows_is_found(name):
    (found,) = findings(rows(**{name: lambda step: 500 + 0.2 * step + 30 * (step % 10 == 0)}))
    assert found == f"{name} of trainer (7) grows by 2.00 MiB in 10 steps"
    assert not [*findings(rows(**{name: lambda step: 500 + 0.09 * step}))]


@pytest.mark.parametrize("name", ["processes", "descriptors", "threads"])
def test_one_more_in_the_second_half_is_found(name):
    assert [*findings(rows(**{name: lambda step: 8 + (step == 90)}))] == [f"{name} of trainer (7) grow from 8 to 9"]


def test_every_process_below_this_one_is_measured():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        measured = soak.measure_all(3, before_mib=0.0)
    finally:
        child.kill()
        child.wait()
    own = next(row for row in measured if row["pid"] == child.pid)
    assert own["step"] == 3 and own["rss_mib"] > 1 and own["descriptors"] >= 3 and own["threads"] == 1
    whole = measured[-1]
    assert whole["process"] == "all" and whole["processes"] == len(measured) - 1
    assert whole["rss_mib"] == pytest.approx(sum(row["rss_mib"] for row in measured[:-1]), abs=0.1)
