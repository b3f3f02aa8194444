"""What a run says at SIGTERM, and when it asks the other ranks."""

import time

import pytest
import torch

from hybrid_rl.config import CheckpointConfig
from hybrid_rl.distributed import World
from hybrid_rl.monitoring import signals
from hybrid_rl.monitoring.activity import Activity
from hybrid_rl.monitoring.preemption import Preemption

ALONE = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))


def make(activity: Activity, save_seconds: float, **settings: object) -> Preemption:
    config = CheckpointConfig(grace_s=60.0, **settings)
    return Preemption(config, ALONE, activity, save_seconds=lambda: save_seconds)


def in_second_rollout(monkeypatch: pytest.MonkeyPatch, *, passed: float) -> Activity:
    """Return the activity of a run some seconds after the start of a rollout; the one before took 50 s."""
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    activity = Activity()
    activity.enter("rollout", 1)
    now += 50
    activity.enter("score", 1)
    activity.enter("rollout", 2)
    now += passed
    return activity


def test_the_sentence_says_when_phase_and_checkpoint_are_expected_to_take_too_long(monkeypatch):
    promise = "the run ends with a checkpoint within checkpoint.grace_s = 60 s"
    assert make(in_second_rollout(monkeypatch, passed=10), 20.0, on_sigterm=True)._describe() == promise
    assert make(in_second_rollout(monkeypatch, passed=10), 21.0, on_sigterm=True)._describe() == (
        f"{promise}, which may be too short: about 40 s for phase rollout of step 2 and 21 s for the checkpoint"
    )


@pytest.mark.parametrize("is_on", [False, True])
def test_a_signal_is_deferred_only_where_a_checkpoint_is_asked_for(monkeypatch, is_on):
    deferred = []
    monkeypatch.setattr(signals, "defer", deferred.append)
    with make(Activity(), 0.0, on_sigterm=is_on) as preemption:
        assert not preemption.is_asked()
        assert len(deferred) == is_on
        monkeypatch.setattr(signals, "is_end_requested", lambda: True)
        assert preemption.is_asked() == is_on
    assert deferred[-1] is None
