"""Advantage estimators by hand, and the properties of all that compare groups."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_rl.algorithms.advantage import moments
from hybrid_rl.algorithms.estimators import TokenRewards, group_advantages, token_advantages, turn_advantages
from hybrid_rl.algorithms.specs import ESTIMATORS

GROUP_ESTIMATORS = sorted(name for name, spec in ESTIMATORS.items() if spec.compares_group)


@pytest.mark.parametrize(
    "estimator, expected",
    [
        ("grpo", [-2 / (math.sqrt(7) + 1e-6), -1 / (math.sqrt(7) + 1e-6), 3 / (math.sqrt(7) + 1e-6)]),  # (4 + 1 + 9)/2
        ("rloo", [1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2]),
        ("dr_grpo", [1 - 3, 2 - 3, 6 - 3]),
        ("reinforce_pp_baseline", [1 - 3, 2 - 3, 6 - 3]),
        ("opo", [1 - 23 / 6, 2 - 23 / 6, 6 - 23 / 6]),  # lengths 1 2 3: (1*1 + 2*2 + 3*6) / 6
    ],
)
def test_group_advantages_by_hand(estimator, expected):
    # Rewards 1 2 6 (mean 3) of group 7 are interleaved with group 4, whose rewards are equal.
    rewards, group_ids = torch.tensor([0.1, 1, 2, 0.1, 6, 0.1]), torch.tensor([4, 7, 7, 4, 7, 4])
    lengths = torch.tensor([9, 1, 2, 8, 3, 0])
    advantages = group_advantages(rewards, group_ids, estimator=estimator, lengths=lengths)
    assert advantages.dtype == torch.float32
    assert advantages[[1, 2, 4]].tolist() == pytest.approx(expected, rel=1e-6)
    assert advantages[[0, 3, 5]].tolist() == [0, 0, 0]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.sampled_from(GROUP_ESTIMATORS), st.randoms(), st.data())
def test_advantages_do_not_depend_on_order_or_other_groups(groups, estimator, random, data):
    group_ids = [group for group in sorted(set(groups)) for _ in range(groups.count(group) + 1)]
    random.shuffle(group_ids)
    size = {"min_size": len(group_ids), "max_size": len(group_ids)}
    rewards = torch.tensor(data.draw(st.lists(st.floats(-100, 100, width=32), **size)))
    lengths = torch.tensor(data.draw(st.lists(st.integers(0, 50), **size)))
    ids = torch.tensor(group_ids)
    together = group_advantages(rewards, ids, estimator=estimator, lengths=lengths)
    for group in set(groups):
        rows = ids == group
        alone = group_advantages(rewards[rows], ids[rows], estimator=estimator, lengths=lengths[rows])
        assert torch.equal(together[rows], alone)
        # A baseline is unbiased, over the responses or over their tokens.
        weights = lengths[rows].double() if estimator == "opo" else torch.ones(len(alone), dtype=torch.float64)
        weights /= weights.sum().clamp_min(1)
        assert abs((weights @ alone.double()).item()) <= 1e-5 * max(1, alone.abs().max().item())


def test_opo_of_equal_lengths_is_the_group_mean():
    rewards, ids = torch.tensor([1.0, 2, 6, -3]), torch.tensor([0, 0, 1, 1])
    assert torch.equal(
        group_advantages(rewards, ids, estimator="opo", lengths=torch.full((4,), 7)),
        group_advantages(rewards, ids, estimator="dr_grpo"),
    )


def test_opo_of_a_group_without_tokens_is_finite():
    rewards = torch.tensor([1.0, 2])
    advantages = group_advantages(rewards, torch.zeros(2), estimator="opo", lengths=torch.zeros(2, dtype=torch.int64))
    assert advantages.tolist() == [1, 2]


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_equal_rewards_give_exactly_zero(estimator):
    rewards = torch.full((3,), 0.1, dtype=torch.float64)
    assert rewards.mean() != rewards[0]  # the sum rounds, so that the difference alone would not be 0
    lengths = torch.tensor([3, 1, 5])
    assert group_advantages(rewards, torch.zeros(3), estimator=estimator, lengths=lengths).tolist() == [0, 0, 0]


def test_group_advantages_name_the_wrong_input():
    ids = torch.tensor([0, 0, 5])
    with pytest.raises(ValueError, match="group 5 has one response"):
        group_advantages(torch.ones(3), ids, estimator="grpo")
    with pytest.raises(ValueError, match="rewards is nan in row 1"):
        group_advantages(torch.tensor([0, math.nan, 0]), ids, estimator="grpo")
    with pytest.raises(ValueError, match="grpo, rloo, dr_grpo"):
        group_advantages(torch.ones(3), ids, estimator="gae")
    with pytest.raises(ValueError, match=r"group_ids \[3\]"):
        group_advantages(torch.ones(3, 1), ids, estimator="grpo")
    with pytest.raises(ValueError, match=r"lengths \[2\]"):
        group_advantages(torch.ones(3), ids, estimator="opo", lengths=torch.ones(2))
    with pytest.raises(ValueError, match="lengths is None: opo"):
        group_advantages(torch.ones(3), ids, estimator="opo")


# The turns of a conversation are compared

# Rewards of the turns of four conversations, of which the first three belong to one group.
TURN_REWARDS = torch.tensor([[1.0, 0, 2], [0, 4, 0], [3, 0, 0], [5, 0, 0]], dtype=torch.float64)
TURN_LENGTHS = torch.tensor([[2, 1, 4], [3, 2, 0], [1, 0, 0], [6, 0, 0]])


@pytest.mark.parametrize(
    "estimator, expected",
    [
        # Returns with turn_gamma 0.5: 1.5 1 2 | 2 4 | 3. Turn 0 compares 1.5 2 3, turn 1 compares 1 4, turn 2 nothing.
        ("dr_grpo", [[1.5 - 6.5 / 3, 1 - 2.5, 0], [2 - 6.5 / 3, 4 - 2.5, 0], [3 - 6.5 / 3, 0, 0]]),
        ("rloo", [[1.5 - 2.5, 1 - 4, 0], [2 - 2.25, 4 - 1, 0], [3 - 1.75, 0, 0]]),
        # Weighted by the lengths of the turns: (2*1.5 + 3*2 + 1*3) / 6 = 2 and (1*1 + 2*4) / 3 = 3.
        ("opo", [[1.5 - 2, 1 - 3, 0], [2 - 2, 4 - 3, 0], [3 - 2, 0, 0]]),
    ],
)
def test_turns_are_compared_with_the_same_turn_of_the_group_by_hand(estimator, expected):
    ids = torch.tensor([7, 7, 7, 8, 8])
    rewards, lengths = (torch.cat([x, x[3:]]) for x in (TURN_REWARDS, TURN_LENGTHS))
    found = turn_advantages(rewards, lengths, ids, estimator=estimator, turn_gamma=0.5)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found[:3], torch.tensor(expected))
    assert found[3:].tolist() == [[0, 0, 0], [0, 0, 0]]  # equal rewards


def test_conversations_of_one_turn_are_compared_as_responses():
    rewards, lengths, ids = torch.tensor([1.0, 2, 6, 4]), torch.tensor([2, 0, 3, 1]), torch.tensor([0, 0, 0, 0])
    for estimator in GROUP_ESTIMATORS:
        by_turn = turn_advantages(rewards[:, None], lengths[:, None], ids, estimator=estimator, turn_gamma=0.5)
        assert torch.equal(by_turn[:, 0], group_advantages(rewards, ids, estimator=estimator, lengths=lengths))


def test_turn_advantages_name_the_wrong_input():
    arguments = (TURN_REWARDS, TURN_LENGTHS, torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"turn_gamma must lie in \[0, 1\], got 2"):
        turn_advantages(*arguments, estimator="grpo", turn_gamma=2)
    with pytest.raises(ValueError, match="grpo, rloo, dr_grpo"):
        turn_advantages(*arguments, estimator="gae", turn_gamma=1)


# Estimators that give every token its own advantage; tests/algorithms/test_advantage.py has their maths

TOKENS = TokenRewards(
    rewards=torch.tensor([1.0, -2.0, 7.0]),
    response_mask=torch.tensor([[1, 1], [1, 0], [0, 0]]).bool(),
    gamma=0.9,
    gae_lambda=0.5,
    values=torch.tensor([[0.5, 0.25], [0.4, 9.0], [9.0, 9.0]]),
    baselines=torch.tensor([0.25, 1.0, 9.0]),
)


def test_gae_by_hand():
    """delta_1 = 1 - 0.25; delta_0 = 0.9 * 0.25 - 0.5; A_0 = delta_0 + 0.45 * A_1; without KL, returns are A + V."""
    found = token_advantages(TOKENS, estimator="gae")
    torch.testing.assert_close(found.advantages, torch.tensor([[0.0625, 0.75], [-2.4, 0], [0, 0]]))
    torch.testing.assert_close(found.returns, torch.tensor([[0.5625, 1.0], [-2.0, 0], [0, 0]]))


def test_value_targets_may_have_their_own_lambda():
    """With lambda 1 the targets are the discounted returns."""
    found = token_advantages(dataclasses.replace(TOKENS, critic_lambda=1.0), estimator="gae")
    torch.testing.assert_close(found.advantages, torch.tensor([[0.0625, 0.75], [-2.4, 0], [0, 0]]))
    torch.testing.assert_close(found.returns, torch.tensor([[0.9, 1.0], [-2.0, 0], [0, 0]]))


def test_reinforce_pp_and_remax_by_hand():
    returns = torch.tensor([[0.9, 1.0], [-2.0, 0], [0, 0]])
    torch.testing.assert_close(token_advantages(TOKENS, estimator="reinforce_pp").advantages, returns)
    found = token_advantages(TOKENS, estimator="remax")
    expected = torch.tensor([[0.65, 0.75], [-3.0, 0], [0, 0]])
    torch.testing.assert_close(found.advantages, expected)
    torch.testing.assert_close(found.moments, moments(expected, TOKENS.response_mask))


def test_returns_of_a_conversation_by_hand():
    """Two turns of one token around an observation: 2 is paid at the first, 1 at the end; gamma 0.9, turn_gamma 0.5."""
    tokens = TokenRewards(
        rewards=torch.tensor([1.0]),
        token_rewards=torch.tensor([[2.0, math.nan, 0.0]]),
        response_mask=torch.tensor([[True, False, True]]),
        turn_ids=torch.tensor([[0, 0, 1]]),
        turn_gamma=0.5,
        gamma=0.9,
        baselines=torch.tensor([0.25]),
        values=torch.tensor([[0.5, math.nan, 2.0]]),
        gae_lambda=0.5,
    )
    torch.testing.assert_close(
        token_advantages(tokens, estimator="reinforce_pp").advantages, torch.tensor([[2.45, 0, 1.0]])
    )
    torch.testing.assert_close(token_advantages(tokens, estimator="remax").advantages, torch.tensor([[2.2, 0, 0.75]]))
    # GAE: A_2 = 1 - 2. A_0 = 2 + 0.45 * 2 - 0.5 + 0.45 * 0.5 * -1.
    found = token_advantages(tokens, estimator="gae")
    torch.testing.assert_close(found.advantages, torch.tensor([[2.175, 0, -1.0]]))
    torch.testing.assert_close(found.returns, torch.tensor([[2.675, 0, 1.0]]))


@pytest.mark.parametrize("estimator", sorted(set(ESTIMATORS) - set(GROUP_ESTIMATORS)))
def test_moments_belong_to_the_advantages(estimator):
    found = token_advantages(TOKENS, estimator=estimator)
    torch.testing.assert_close(found.moments, moments(found.advantages, TOKENS.response_mask))


@pytest.mark.parametrize(
    "estimator, changes, message",
    [
        ("gae", {"values": None}, "values is None: gae"),
        ("remax", {"baselines": None}, "baselines is None: remax"),
        ("reinforce_pp", {"kl_coef": 0.1}, "kl is None"),
        ("grpo", {}, "estimator must be one of gae, reinforce_pp, remax, got 'grpo'"),
    ],
)
def test_token_estimators_name_what_is_missing(estimator, changes, message):
    with pytest.raises(ValueError, match=message):
        token_advantages(dataclasses.replace(TOKENS, **changes), estimator=estimator)
