"""Dynamic filtering by hand: the groups that are kept, and the case of too few."""

import logging
from dataclasses import replace

import pytest
import torch

from hybrid_rl.config import ConfigError
from hybrid_rl.distributed import World
from hybrid_rl.rewards.filtering import DynamicFilter, informative_rows
from hybrid_rl.rewards.scoring import Scored
from tests.conftest import make_rollout

WORLD = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))


def scored(scores: list[float], groups: list[int]) -> Scored:
    """Return responses with their scores, each in the group of its prompt."""
    rollouts = [make_rollout(prompt_id=group, sequence_id=i) for i, group in enumerate(groups)]
    return Scored(
        rollouts=rollouts, scores=torch.tensor(scores, dtype=torch.float64), parts={"rule": torch.tensor(scores)}
    )


def test_groups_whose_mean_score_is_on_a_bound_are_dropped():
    """Means 0.5, 0 and 1; bounds are strict."""
    found = scored([1, 0, 0, 0, 1, 1], [7, 8, 7, 8, 9, 9])
    assert informative_rows(found, (0.0, 1.0)) == [0, 2]
    assert informative_rows(found, (-1.0, 1.0)) == [0, 1, 2, 3]


def test_scores_that_a_function_gives_for_the_filter_decide():
    """The rewards of the first group differ and its scores do not; of the second group the scores alone differ."""
    found = scored([1, -1, 2, 2], [7, 7, 8, 8])
    found = replace(found, filter_scores=torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float64))
    assert informative_rows(found, (0.0, 1.0)) == [2, 3]
    kept = DynamicFilter((0.0, 1.0), WORLD)
    kept.add(found)
    part, metrics = kept.take(2, seed=0)
    assert part.scores.tolist() == [2, 2] and metrics["filter/score"] == 0.75


@pytest.mark.parametrize(
    "score, bounds",
    [
        (0.7 + 0.2 + 0.1, (0.0, 1.0)),  # 0.9999999999999999
        (0.1 + 0.2, (0.0, 0.3)),
        (0.1, (0.1, 1.0)),
        (-(0.1 + 0.2), (-0.3, 1.0)),
    ],
)
def test_a_group_of_equal_scores_on_a_bound_is_dropped_in_spite_of_rounding(score, bounds):
    assert informative_rows(scored([score] * 8, [3] * 8), bounds) == []


def test_failures_of_dropped_groups_are_counted_with_all_sampled_responses():
    kept = DynamicFilter((0.0, 1.0), WORLD)
    kept.add(replace(scored([1, 0, 0, 0], [1, 1, 2, 2]), failed=frozenset([1, 2, 3])))
    part, metrics = kept.take(2, seed=0)
    assert metrics["filter/num_failed"] == 3 / 4 and part.failed == {1}


def test_filter_collects_groups_over_batches_and_draws_as_many_as_wanted():
    kept = DynamicFilter((0.0, 1.0), WORLD)
    kept.add(scored([1, 0, 0, 0], [1, 1, 2, 2]))
    assert (kept.num_groups, kept.seen) == (1, {1, 2})
    kept.add(scored([1, 0, 0, 1, 1, 0], [3, 3, 4, 4, 5, 5]))
    assert (kept.num_groups, kept.seen) == (4, {1, 2, 3, 4, 5})
    part, metrics = kept.take(2, seed=0)
    assert metrics == {
        "filter/score": pytest.approx(0.4),
        "filter/num_failed": 0.0,
        "filter/batches": 2.0,
        "filter/groups": 2.0,
    }
    groups = {rollout.prompt.prompt_id for rollout in part.rollouts}
    assert len(part.rollouts) == 4 and len(groups) == 2 and groups < {1, 3, 4, 5}
    assert part.parts["rule"].tolist() == part.scores.tolist()
    choices = {tuple(r.prompt.prompt_id for r in kept.take(2, seed=seed)[0].rollouts) for seed in range(20)}
    assert len(choices) > 2


def test_filter_with_too_few_groups_warns_and_continues(caplog):
    kept = DynamicFilter((0.0, 1.0), WORLD)
    kept.add(scored([1, 0, 1, 1], [1, 1, 2, 2]))
    with caplog.at_level(logging.WARNING):
        part, _ = kept.take(4, seed=0)
    assert len(part.rollouts) == 2
    assert "gave up with 1 of 4 groups after 1 batches of prompts (mean score 0.750" in caplog.text


def test_filter_without_any_group_is_an_error():
    kept = DynamicFilter((0.0, 1.0), WORLD)
    kept.add(scored([1, 1], [1, 1]))
    with pytest.raises(ConfigError, match=r"kept 0 of 4 groups after 1 batches of prompts \(mean score 1.000"):
        kept.take(4, seed=0)
