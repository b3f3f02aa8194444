"""The stages of a start, as they are shown and as they lie in the timeline."""

import json
import time
from io import StringIO

import pytest
from rich.console import Console

from hybrid_rl.monitoring.start import Start, process_start_ns
from hybrid_rl.monitoring.timeline import Timeline


@pytest.fixture
def screen() -> StringIO:
    return StringIO()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The monotonic clock in seconds, as the only element."""
    now = [100]
    monkeypatch.setattr("time.monotonic_ns", lambda: now[0] * 10**9)
    return now


def spans(timeline: Timeline, tmp_path) -> dict[str, tuple[float, float, str]]:
    """Return name -> start and duration in seconds, and the lane."""
    timeline.write(tmp_path / "timeline.json")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    return {e["name"]: (e["ts"] / 1e6, e["dur"] / 1e6, lanes[e["tid"]]) for e in events if e["ph"] == "X"}


def test_without_a_terminal_a_stage_is_one_line_when_it_has_ended(screen, clock):
    with Start(Console(file=screen, width=20)) as start:
        with start.stage("imports", since_ns=90 * 10**9):
            assert screen.getvalue() == ""
        with start.stage("checks"):
            clock[0] += 1
            with start.stage("dataset"):
                clock[0] += 2
    assert screen.getvalue() == "start: imports 10.0 s\nstart: checks: dataset 2.0 s\nstart: checks 3.0 s\n"


def test_a_terminal_shows_the_stage_that_goes_on_with_its_seconds(screen, clock):
    with Start(Console(file=screen, force_terminal=True, width=100)) as start, start.stage("models.actor"):
        clock[0] += 7
        start._bar.refresh()
        assert "start: models.actor 7.0 s" in screen.getvalue()
        start.report("models.actor", "weights", 101 * 10**9, None)
        start._bar.refresh()
        assert "start: models.actor: weights 6.0 s" in screen.getvalue()


def test_other_ranks_keep_their_stages_and_show_none(screen, clock, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with Start(Console(file=screen)) as start, start.stage("checks"):
        clock[0] += 1
    assert screen.getvalue() == ""
    assert [(stage.name, stage.seconds) for stage in start.stages] == [("checks", 1.0)]


def test_stages_lie_in_the_timeline_whether_they_end_before_or_after_it_exists(screen, clock, tmp_path):
    timeline = Timeline()
    with Start(Console(file=screen)) as start:
        with start.stage("checks"):
            clock[0] += 1
        start.record_in(timeline)
        with start.stage("rollout engine"):
            clock[0] += 5
            start.report("rollout engine", "model", 102 * 10**9, 104 * 10**9)
    assert spans(timeline, tmp_path) == {
        "checks": (100.0, 1.0, "start"),
        "rollout engine: model": (102.0, 2.0, "start"),
        "rollout engine": (101.0, 5.0, "start"),
    }
    assert timeline.take_seconds() == {}  # the seconds of a start are none of the first step
    assert [stage.is_part for stage in start.stages] == [False, True, False]


def test_work_of_another_thread_has_a_lane_of_its_own(screen, tmp_path):
    timeline, seconds = Timeline(), [0.0]
    with Start(Console(file=screen)) as start:
        start.record_in(timeline)
        start.follow("pinning of host memory", lambda: seconds[0])
        seconds[0] = 2.5
        deadline = time.monotonic() + 30
        while not start.stages and time.monotonic() < deadline:
            time.sleep(0.01)
    assert screen.getvalue() == "start: pinning of host memory 2.5 s\n"
    _, duration, lane = spans(timeline, tmp_path)["pinning of host memory"]
    assert (duration, lane) == (pytest.approx(2.5), "pinning of host memory")


def test_a_stage_that_ends_after_the_display_is_kept_and_not_shown(screen, clock):
    with Start(Console(file=screen)) as start:
        pass
    start.report("rollout engine", "model", 0, 10**9)  # of an engine that starts again
    assert screen.getvalue() == "" and [stage.name for stage in start.stages] == ["rollout engine: model"]


def test_this_process_began_before_this_test():
    assert 0 < time.monotonic_ns() - process_start_ns() < 24 * 3600 * 10**9


def test_an_error_ends_the_display_and_the_stage(screen, clock):
    with pytest.raises(ZeroDivisionError), Start(Console(file=screen)) as start, start.stage("checks"):
        raise ZeroDivisionError
    assert screen.getvalue() == "start: checks 0.0 s\n" and len(start.stages) == 1
