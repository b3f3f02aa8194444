"""Rows of metrics and rollouts on disk."""

import json

import pytest

from hybrid_rl.monitoring.metrics import MetricsWriter, write_rollouts


def rows(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_resuming_removes_rows_that_will_be_written_again(tmp_path):
    writer = MetricsWriter(tmp_path)
    for step in range(1, 6):
        writer.write(step, {"reward": step})

    writer = MetricsWriter(tmp_path, resume_step=4)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3]
    writer.write(4, {"reward": 40})
    assert rows(tmp_path) == [{"step": s, "reward": r} for s, r in [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]]


def test_a_fresh_run_starts_an_empty_file(tmp_path):
    for _ in range(2):
        writer = MetricsWriter(tmp_path)
        writer.write(0, {"accuracy": 0.5})
        assert rows(tmp_path) == [{"step": 0, "accuracy": 0.5}]


def test_half_a_row_from_a_killed_run_is_removed(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 1.0}\n{"step": 2, "rew')
    writer = MetricsWriter(tmp_path, resume_step=9)
    writer.write(2, {"reward": 2})
    assert rows(tmp_path) == [{"step": 1, "reward": 1.0}, {"step": 2, "reward": 2.0}]


def test_a_row_is_readable_before_the_writer_closes(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write(1, {"reward": 0.25})
    assert rows(tmp_path) == [{"step": 1, "reward": 0.25}]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_metric_that_is_not_finite_is_named_and_not_written(tmp_path, value):
    writer = MetricsWriter(tmp_path)
    with pytest.raises(ValueError, match=r"metric kl = .* at step 2"):
        writer.write(2, {"reward": 1.0, "kl": value})
    assert rows(tmp_path) == []


def test_a_step_is_written_once(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write(3, {"reward": 1.0})
    with pytest.raises(ValueError, match="step = 3: must be greater than 3"):
        writer.write(3, {"reward": 1.0})


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


def test_damaged_rows_are_left_out_and_the_file_is_kept(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    content = '{"step": 1}\ngarbage\n{"loss": 2}\n\xff\n{"step": 2}\n{"step": 2}\n'.encode("latin-1")
    path.write_bytes(content)
    MetricsWriter(tmp_path, resume_step=3)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    assert path.with_name("metrics.jsonl.old-1").read_bytes() == content
    assert "4 lines are damaged, first line 2" in caplog.text
