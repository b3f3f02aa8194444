"""Scores by hand: their sources, the groups that dynamic filtering keeps, and the rewards made of them."""

import logging
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybrid_rl.batch import Prompt, Rollout, make_train_batch
from hybrid_rl.config import ModelsConfig, RewardConfig
from hybrid_rl.distributed import World
from hybrid_rl.judge import (
    Filter,
    RewardSources,
    Scored,
    add_rewards,
    informative_rows,
    normalize_and_clip,
    penalize,
    score_rollouts,
)
from hybrid_rl.models import load_value_model
from hybrid_rl.rewards import RunningNormalizer, ScorerPool
from hybrid_rl.score import Packing, sequence_values

CPU = torch.device("cpu")
WORLD = World(rank=0, size=1, local_rank=0, device=CPU)


def scored(scores: list[float], groups: list[int]) -> Scored:
    rollouts = [
        Rollout(
            prompt=Prompt(prompt_id=group, text="", token_ids=[1]),
            sequence_id=i,
            response_ids=[4],
            rollout_logprobs=[-1.0],
            is_truncated=False,
            text="",
        )
        for i, group in enumerate(groups)
    ]
    return Scored(rollouts=rollouts, scores=torch.tensor(scores), parts={"rule": torch.tensor(scores)})


def model_of(folder: Path, spoil: float | None = None):
    critic = load_value_model(str(folder / "reward"), ModelsConfig(), CPU, field="models.reward")
    if spoil is not None:
        critic.model.model.embed_tokens.weight.data[5] = spoil  # token 5 stands in prompts 20 and 23
    packing = Packing(max_tokens=64, world=WORLD)
    return lambda rollouts: sequence_values(critic, make_train_batch(rollouts), packing)


def test_score_is_the_weighted_sum_of_its_sources(tiny, five_rollouts):
    model = model_of(tiny)
    config = RewardConfig(functions=["exact_match"], model_weight=0.5)
    with ScorerPool(["exact_match"], [2.0], timeout_s=10, on_error="raise", num_workers=1) as scorer:
        found = score_rollouts(five_rollouts, RewardSources(functions=scorer, model=model), config)
    values = model(five_rollouts)
    torch.testing.assert_close(found.scores, 0.5 * values + torch.tensor([2.0, 0, 0, 0, 0]))
    assert found.sums["reward/model"] == pytest.approx(float(values.sum()), abs=1e-5)
    assert found.sums["reward/exact_match"] == 1 and found.sums["reward/num_failed"] == 0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_score_that_is_not_finite_names_the_prompt(tiny, five_rollouts, value):
    with pytest.raises(ValueError, match="reward of prompt 20 is nan"):
        score_rollouts(five_rollouts, RewardSources(model=model_of(tiny, spoil=value)), RewardConfig())


def test_groups_of_equal_scores_teach_nothing():
    """Means 0.5, 0 and 1; bounds are strict."""
    found = scored([1, 0, 0, 0, 1, 1], [7, 8, 7, 8, 9, 9])
    assert informative_rows(found, (0.0, 1.0)) == [0, 2]
    assert informative_rows(found, (-1.0, 1.0)) == [0, 1, 2, 3]


def test_filter_gathers_until_there_are_enough():
    kept = Filter((0.0, 1.0), WORLD)
    assert kept.add(scored([1, 0, 0, 0], [1, 1, 2, 2])) == 1
    assert kept.add(scored([1, 0, 0, 1, 1, 0], [3, 3, 4, 4, 5, 5])) == 4
    part, metrics = kept.take(2, seed=0)
    assert metrics == {"filter/score": pytest.approx(0.4), "filter/batches": 2.0, "filter/groups": 2.0}
    groups = {rollout.prompt.prompt_id for rollout in part.rollouts}
    assert len(part.rollouts) == 4 and len(groups) == 2 and groups < {1, 3, 4, 5}
    assert part.parts["rule"].tolist() == part.scores.tolist()
    choices = {tuple(r.prompt.prompt_id for r in kept.take(2, seed=seed)[0].rollouts) for seed in range(20)}
    assert len(choices) > 2


def test_filter_gives_up_in_words(caplog):
    kept = Filter((0.0, 1.0), WORLD)
    kept.add(scored([1, 0, 1, 1], [1, 1, 2, 2]))
    with caplog.at_level(logging.WARNING):
        part, _ = kept.take(4, seed=0)
    assert len(part.rollouts) == 2
    assert "gave up with 1 of 4 groups after 1 batches of prompts (mean score 0.750" in caplog.text


def test_filter_that_keeps_nothing_is_an_error():
    kept = Filter((0.0, 1.0), WORLD)
    kept.add(scored([1, 1], [1, 1]))
    with pytest.raises(RuntimeError, match=r"kept 0 of 4 groups after 1 batches of prompts \(mean score 1.000"):
        kept.take(4, seed=0)


def test_rewards_by_hand():
    """Lengths 2, 9 and 10 of 10, buffer 4: from 6 on, 3/4 and 4/4 of the penalty; the last is truncated."""
    config = RewardConfig(truncation_penalty=0.5, overlong_buffer=4, overlong_penalty=2.0)
    arguments = (torch.tensor([1.0, 1.0, 1.0]), torch.tensor([2, 9, 10]), torch.tensor([False, False, True]))
    assert penalize(*arguments, config, max_response_tokens=10).tolist() == [1.0, -0.5, -1.5]
    config = RewardConfig(truncation_penalty=9.0, clip=0.25)
    clipped = normalize_and_clip(penalize(*arguments, config, max_response_tokens=10), config, None)
    assert clipped.tolist() == [0.25, 0.25, -0.25]


def test_rewards_are_normalised_by_all_that_was_seen():
    """Scores 0 and 2 have mean 1 and standard deviation 1; 4 and 6 beside them make mean 3 and deviation sqrt(5)."""
    normalizer = RunningNormalizer()
    config = RewardConfig(normalize=True, clip=1.2)
    make = {"max_response_tokens": 4, "world": WORLD, "normalizer": normalizer}
    assert add_rewards(scored([0, 2], [1, 1]), config, **make).rewards.tolist() == pytest.approx([-1, 1], abs=1e-5)
    later = add_rewards(scored([4, 6], [1, 1]), config, **make).rewards.tolist()
    assert later == pytest.approx([1 / math.sqrt(5), 1.2], abs=1e-5)


def test_baselines_belong_to_the_prompts():
    found = Scored(
        rollouts=scored([1, 0, 1], [7, 8, 7]).rollouts,
        scores=torch.tensor([1.0, 0.0, 1.0]),
        parts={},
        baselines={7: 0.25, 8: 3.0},
    )
    batch = add_rewards(found, RewardConfig(clip=2.0), max_response_tokens=4, world=WORLD)
    assert batch.baselines.tolist() == [0.25, 2.0, 0.25]


def test_penalties_are_the_sampled_responses_own():
    """A greedy response that was not cut off must not pay for the sampled one that was."""
    plain = scored([1, 1], [7, 8])
    cut_off = [replace(rollout, is_truncated=True) for rollout in plain.rollouts]
    found = replace(plain, rollouts=cut_off, baselines={7: 0.5, 8: 1.0})
    batch = add_rewards(found, RewardConfig(truncation_penalty=0.25), max_response_tokens=1, world=WORLD)
    assert batch.rewards.tolist() == [0.75, 0.75] and batch.baselines.tolist() == [0.5, 1.0]
