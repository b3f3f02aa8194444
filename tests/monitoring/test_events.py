"""TensorBoard's files, read back by TensorBoard."""

from dataclasses import dataclass

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hybrid_rl.monitoring.events import EventsFile, markdown_table


@dataclass(frozen=True)
class Halves:
    """Values 0.5, 1.5 and 1.5 in two buckets."""

    edges = (0.0, 1.0, 2.0)
    counts = (1, 2)
    total = 3.5
    total_squares = 4.75


def test_steps_that_are_written_again_are_read_once(tmp_path):
    events = EventsFile(tmp_path, resume_step=1)
    for step in range(1, 6):
        events.write(step, {"reward": step}, {})
    EventsFile(tmp_path, resume_step=4).write(4, {"reward": 40}, {})
    read = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in read.Scalars("reward")] == [(1, 1), (2, 2), (3, 3), (4, 40)]


def test_a_histogram_keeps_its_buckets_and_sums(tmp_path):
    EventsFile(tmp_path, resume_step=1).write(1, {}, {"histogram/reward": Halves()})
    (event,) = EventAccumulator(str(tmp_path)).Reload().Histograms("histogram/reward")
    value = event.histogram_value
    assert (event.step, value.min, value.max, value.num, value.sum) == (1, 0, 2, 3, 3.5)
    filled = [(limit, n) for limit, n in zip(value.bucket_limit, value.bucket, strict=True) if n]
    assert filled == [(1.0, 1.0), (2.0, 2.0)]


def test_text_of_a_model_is_a_cell_and_neither_markdown_nor_html():
    table = markdown_table(["response", "reward"], [["<think>a|b</think>\n*c*", 0.5], [None, 1]])
    assert table.splitlines() == [
        "| response | reward |",
        "| --- | --- |",
        "| &lt;think&gt;a&#124;b&lt;/think&gt;<br>&#42;c&#42; | 0.5 |",
        "|  | 1 |",
    ]
