"""Spans and counters of a timeline, and the steps that a profiler records."""

import json
import time

import pytest
import torch

from hybrid_rl.monitoring.timeline import CudaProfiler, Timeline


def trace_events(timeline, path, kind):
    timeline.write(path)
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == kind]


def test_spans_nest_and_last_as_long_as_their_bodies(tmp_path):
    timeline = Timeline(rank=3)
    with timeline.span("generate", phase="ROLLOUT", step=7, num_prompts=4):
        time.sleep(0.02)
        with timeline.span("decode", phase="ROLLOUT", step=7):
            time.sleep(0.03)

    inner, outer = trace_events(timeline, tmp_path / "timeline.json", "X")
    assert (inner["name"], outer["name"]) == ("decode", "generate")
    assert outer["args"] == {"step": 7, "phase": "ROLLOUT", "num_prompts": 4}
    assert outer["pid"] == 3 and outer["tid"] == inner["tid"]
    assert inner["dur"] >= 30_000 and outer["dur"] >= inner["dur"] + 20_000  # microseconds
    assert outer["ts"] + 20_000 <= inner["ts"]
    assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 1


def test_a_span_with_bytes_has_a_bandwidth(tmp_path):
    timeline = Timeline()
    with timeline.span("release actor") as args:
        time.sleep(0.01)
        args["bytes"] = 1_000_000_000

    (event,) = trace_events(timeline, tmp_path / "timeline.json", "X")
    assert event["args"]["bytes"] == 1_000_000_000
    assert event["args"]["GB_per_s"] == pytest.approx(1e6 / event["dur"], rel=1e-2)
    assert 0 < event["args"]["GB_per_s"] <= 100


def test_lanes_have_names_and_counters_have_values(tmp_path):
    timeline = Timeline(rank=1)
    with timeline.span("train"), timeline.span("reward", lane="scorer"):
        timeline.counter("device_memory", used_bytes=5, trainer_bytes=2)

    (counter,) = trace_events(timeline, tmp_path / "timeline.json", "C")
    assert counter["args"] == {"used_bytes": 5, "trainer_bytes": 2} and counter["pid"] == 1
    names = {event["args"]["name"]: event.get("tid") for event in trace_events(timeline, tmp_path / "t.json", "M")}
    lanes = {event["name"]: event["tid"] for event in trace_events(timeline, tmp_path / "t.json", "X")}
    assert set(names) == {"rank 1", "main", "scorer"}
    assert lanes == {"train": names["main"], "reward": names["scorer"]} and names["main"] != names["scorer"]


def test_a_span_that_fails_is_recorded(tmp_path):
    timeline = Timeline()
    with pytest.raises(RuntimeError, match="lost"), timeline.span("generate"):
        raise RuntimeError("lost")
    assert [event["name"] for event in trace_events(timeline, tmp_path / "timeline.json", "X")] == ["generate"]


def test_take_seconds_sums_by_name_and_starts_again():
    timeline = Timeline()
    for _ in range(2):
        with timeline.span("update"):
            time.sleep(0.01)
    seconds = timeline.take_seconds()
    assert list(seconds) == ["update"] and seconds["update"] >= 0.02
    assert timeline.take_seconds() == {}


def test_a_long_run_keeps_its_latest_events(tmp_path):
    timeline = Timeline(max_events=3)
    for step in range(10):
        timeline.counter("step", value=step)
    counters = trace_events(timeline, tmp_path / "timeline.json", "C")
    assert [event["args"]["value"] for event in counters] == [7, 8, 9]


def test_a_failed_write_leaves_the_old_timeline(tmp_path):
    timeline, path = Timeline(), tmp_path / "timeline.json"
    with timeline.span("generate"):
        pass
    timeline.write(path)
    before = path.read_bytes()
    timeline.counter("loss", value=float("nan"))
    with pytest.raises(ValueError, match="JSON"):
        timeline.write(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_profiler_records_between_two_steps(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: calls.append(("start", step)))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: calls.append(("stop", step)))
    for steps in ((3, 4), None):
        profiler = CudaProfiler(steps)
        for step in range(1, 7):
            profiler.before(step)
            profiler.before(step)
            profiler.after(step)
    assert calls == [("start", 3), ("stop", 4)]
