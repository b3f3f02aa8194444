"""Tokens per second and MFU with a clock of our own."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hybrid_rl.distributed import World
from hybrid_rl.monitoring.throughput import Throughput

ALONE = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))


class ThreeRanks:
    """A world in which two other ranks have given works."""

    size = 3

    def __init__(self, others: Sequence[Any]) -> None:
        self.others = list(others)

    def all_gather(self, item: Any) -> list[Any]:
        return [item, *self.others]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def test_work_of_a_phase_adds_up_and_is_divided_by_its_seconds_and_the_peak(clock):
    throughput = Throughput(ALONE, peak_flops=1e12)
    for tokens, flops, seconds in ((300, 2e12, 1.0), (100, 4e12, 3.0)):
        with throughput.work("score") as work:
            clock[0] += seconds
            work.add(tokens, flops)
    assert throughput.metrics() == {"tokens_per_s/score": 100.0, "mfu/score": 1.5e12 / 1e12}
    assert throughput.metrics() == {}  # of the next step


def test_without_a_peak_there_are_tokens_and_no_mfu(clock):
    throughput = Throughput(ALONE, peak_flops=None)
    with throughput.work("rollout") as work:
        clock[0] += 2.0
        work.add(10, 1e9)
    assert throughput.metrics() == {"tokens_per_s/rollout": 5.0}


def test_a_model_of_unknown_operations_leaves_the_mfu_of_its_phase_out(clock):
    throughput = Throughput(ALONE, peak_flops=1e12)
    with throughput.work("score") as work:
        clock[0] += 2.0
        work.add(10, 1e9)
        work.add(10, None)
        work.add(10, 1e9)
    assert throughput.metrics() == {"tokens_per_s/score": 15.0}


def test_a_phase_that_was_replayed_has_no_metrics(clock):
    throughput = Throughput(ALONE, peak_flops=1e12)
    with throughput.work("rollout"):
        clock[0] += 2.0
    assert throughput.metrics() == {}


def test_the_slowest_rank_decides_and_copies_of_a_group_count_once(clock):
    """Two ranks share 400 tokens and 8e12 operations; a third has 200 and 4e12."""
    others = [{"update_actor": (200.0, 4e12, 3.0)}, {"update_actor": (200.0, 4e12, 4.0)}]
    throughput = Throughput(ThreeRanks(others), peak_flops=1e12)  # type: ignore[arg-type]
    with throughput.work("update_actor") as work:
        clock[0] += 2.0
        work.add(400, 8e12, copies=2)
    assert throughput.metrics() == {
        "tokens_per_s/update_actor": 600 / 4.0,
        "mfu/update_actor": pytest.approx(12e12 / (4.0 * 3 * 1e12)),
    }
