import json
import time

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hybrid_rl.monitoring.metrics import MetricsWriter, write_rollouts
from hybrid_rl.monitoring.timeline import CudaProfiler, Timeline


def trace_events(timeline, path, kind):
    timeline.write(path)
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == kind]


def rows(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


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


def test_a_swap_tells_its_bandwidth(tmp_path):
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


def test_a_long_run_keeps_its_latest_events(tmp_path, monkeypatch):
    monkeypatch.setattr("hybrid_rl.monitoring.metrics._MAX_EVENTS", 3)
    timeline = Timeline()
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


def test_resuming_removes_rows_that_will_be_written_again(tmp_path):
    writer = MetricsWriter(tmp_path)
    for step in range(1, 6):
        writer.write(step, {"reward": step})
    writer.close()

    writer = MetricsWriter(tmp_path, resume_step=4)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3]
    writer.write(4, {"reward": 40})
    writer.close()
    assert rows(tmp_path) == [{"step": s, "reward": r} for s, r in [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]]

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward")] == [(1, 1), (2, 2), (3, 3), (4, 40)]


def test_a_fresh_run_starts_an_empty_file(tmp_path):
    for _ in range(2):
        writer = MetricsWriter(tmp_path)
        writer.write(0, {"accuracy": 0.5})
        writer.close()
    assert rows(tmp_path) == [{"step": 0, "accuracy": 0.5}]


def test_half_a_row_from_a_killed_run_is_removed(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 1.0}\n{"step": 2, "rew')
    writer = MetricsWriter(tmp_path, resume_step=9)
    writer.write(2, {"reward": 2})
    writer.close()
    assert rows(tmp_path) == [{"step": 1, "reward": 1.0}, {"step": 2, "reward": 2.0}]


def test_a_row_is_readable_before_the_writer_closes(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write(1, {"reward": 0.25})
    assert rows(tmp_path) == [{"step": 1, "reward": 0.25}]
    writer.close()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_metric_that_is_not_finite_is_named_and_not_written(tmp_path, value):
    writer = MetricsWriter(tmp_path)
    with pytest.raises(ValueError, match=r"metric kl = .* at step 2"):
        writer.write(2, {"reward": 1.0, "kl": value})
    writer.close()
    assert rows(tmp_path) == []


def test_a_step_is_written_once(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write(3, {"reward": 1.0})
    with pytest.raises(ValueError, match="step = 3: must be greater than 3"):
        writer.write(3, {"reward": 1.0})
    writer.close()


def test_rollouts_keep_any_text(tmp_path):
    texts = ["2 + 2 = 4\n", "\u2028\u00e9", "\ud83d"]  # a line separator, a letter, half a surrogate pair
    path = write_rollouts(tmp_path, 12, ({"prompt_id": i, "response": text} for i, text in enumerate(texts)))
    assert path == tmp_path / "rollouts" / "step_000012.jsonl"
    with path.open(encoding="utf-8") as file:
        assert [json.loads(line)["response"] for line in file] == texts


def test_rollouts_of_a_repeated_step_are_replaced(tmp_path):
    write_rollouts(tmp_path, 1, [{"reward": 0.0}, {"reward": 1.0}])
    path = write_rollouts(tmp_path, 1, [{"reward": 2.0}])
    assert path.read_text() == '{"reward": 2.0}\n'


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
