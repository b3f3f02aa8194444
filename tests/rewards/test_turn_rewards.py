"""Rewards of an environment: part of the score, paid at the last sampled token of their turns."""

import math

import pytest
import torch

from hybrid_rl.batch import Rollout, Turn
from hybrid_rl.config import ConfigError, RewardConfig
from hybrid_rl.distributed import World
from hybrid_rl.rewards import RunningNormalizer
from hybrid_rl.rewards.scoring import RewardSources, Scored, add_rewards, score_responses
from tests.conftest import make_rollout

WORLD = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
CONFIG = RewardConfig(model_weight=0.5)


def conversation(*rewards: float, number: int = 0) -> Rollout:
    """Return sampled turns of two tokens with these rewards, and an observation of one token after each of them."""
    turns = [
        turn
        for reward in rewards
        for turn in (Turn(role="assistant", num_tokens=2, reward=reward), Turn(role="tool", num_tokens=1))
    ]
    return make_rollout(response_ids=[9] * 3 * len(rewards), prompt_id=number, sequence_id=number, turns=turns)


def judged(*rollouts: Rollout, score: float = 4.0) -> Scored:
    """Return the responses with the score of a reward model besides the rewards of turns."""
    return score_responses(rollouts, RewardSources(model=lambda given: torch.full((len(given),), score)), CONFIG)


def test_the_score_is_the_sum_over_the_turns_and_the_sources():
    found = judged(conversation(1.0, 0.0, -3.0), conversation(0.25, number=1), make_rollout(prompt_id=2))
    assert found.scores.tolist() == [2 - 2, 2 + 0.25, 2]
    assert found.parts["environment"].tolist() == [-2, 0.25, 0]
    assert found.token_rewards == {0: [(1, 1.0), (7, -3.0)], 1: [(1, 0.25)]}


def test_the_rest_of_the_score_is_paid_at_the_end():
    batch = add_rewards(judged(conversation(1.0, -3.0)), CONFIG, max_response_tokens=9, world=WORLD)
    assert batch.rewards.tolist() == [0]  # 2 of the model
    assert batch.token_rewards.tolist() == [[0, 1, 0, 0, -3, 0]]


def test_rewards_of_several_kinds_at_one_token_add_up():
    found = judged(conversation(1.0))
    found.token_rewards[0] += [(1, 0.5), (0, 2.0)]
    batch = add_rewards(found, CONFIG, max_response_tokens=9, world=WORLD)
    assert batch.token_rewards.tolist() == [[2, 1.5, 0]]


def test_responses_without_rewards_of_turns_have_no_token_rewards():
    batch = add_rewards(judged(make_rollout(), conversation(0.0, 0.0)), CONFIG, max_response_tokens=9, world=WORLD)
    assert batch.token_rewards is None


def test_normalisation_divides_every_part_and_subtracts_the_mean_once():
    config, normalizer = RewardConfig(normalize=True, model_weight=0.5), RunningNormalizer()
    found = judged(conversation(1.0, 3.0), conversation(0.0, -2.0, number=1))  # scores 6 and 0: mean 3, std 3
    batch = add_rewards(found, config, max_response_tokens=9, world=WORLD, normalizer=normalizer)
    assert batch.rewards.tolist() == pytest.approx([1, -1])
    assert batch.token_rewards.flatten().tolist() == pytest.approx([0, 1 / 3, 0, 0, 1, 0, 0, 0, 0, 0, -2 / 3, 0])


def test_penalties_and_the_clip_change_the_whole_and_leave_the_parts():
    config = RewardConfig(clip=1.5, overlong_buffer=2, overlong_penalty=1.0, model_weight=0.5)
    # Four sampled tokens of at most 4 take the whole penalty, whatever observations there are.
    batch = add_rewards(judged(conversation(1.0, 3.0)), config, max_response_tokens=4, world=WORLD)
    assert batch.rewards.tolist() == [1.5]  # 6 - 1, clipped
    assert batch.token_rewards.tolist() == [[0, 1, 0, 0, 3, 0]]


def test_rewards_of_turns_follow_their_responses():
    found = judged(conversation(1.0), conversation(2.0, number=1), conversation(3.0, number=2))
    assert found.select([2, 0]).token_rewards == {2: [(1, 3.0)], 0: [(1, 1.0)]}
    assert (found.select([1]) + found.select([2])).token_rewards == {1: [(1, 2.0)], 2: [(1, 3.0)]}


def test_a_reward_of_a_turn_that_is_not_finite_names_the_response():
    with pytest.raises(ConfigError, match=r"the score of prompt_id 5, sequence_id 5 is nan .*environment nan"):
        judged(conversation(1.0, number=3), conversation(math.nan, number=5))


def test_a_reward_at_a_token_that_is_not_sampled_is_an_error():
    found = judged(conversation(1.0))
    found.token_rewards[0].append((2, 1.0))
    with pytest.raises(ValueError, match="a reward of sequence_id 0 is at token 2: not sampled"):
        add_rewards(found, CONFIG, max_response_tokens=9, world=WORLD)
